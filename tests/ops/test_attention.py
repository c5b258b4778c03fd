"""Attention compared with a float64 loop over queries and heads, written from the formulas.

The softmax over the visible keys of softcap(scale * q.k) + bias, with the sink in the denominator only; zeros if
nothing is visible.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvad.model_input import AlibiSlopes, AttentionParams, AttentionPattern, RelativeBuckets, TokenPositions
from kvad.ops import attention
from kvad.ops.attention import AttentionMask, Kernel, dot_product_attention
from kvad.ops.merge import AttentionPart, merge_attention
from kvad.ops.position_bias import position_bias, t5_bucket
from tests.support.covering_array import Case, pairwise

NAMES: tuple[Kernel, ...] = get_args(get_args(Kernel)[0])  # the other member of the union is TileSizes
KERNELS = tuple(name for name in NAMES if name != "auto")
BOTH: tuple[Kernel, ...] = ("reference", "sdpa")
ROWS, SLOTS = 2, 13
SHAPES = {  # H, K, D, Dv
    "mha": (4, 4, 8, 8),
    "gqa": (6, 3, 8, 8),
    "mqa": (6, 1, 8, 8),
    "value-dim": (6, 2, 5, 7),
}
PATTERNS = {
    "causal": AttentionPattern(),
    "window": AttentionPattern(window=3),
    "bidirectional": AttentionPattern(causal=False),
    "bidirectional-window": AttentionPattern(causal=False, window=3),
    "documents": AttentionPattern(),
}
LOGITS = ("plain", "softcap", "sinks", "alibi", "t5", "t5-both-ways", "everything")
SCALES = {"default": None, "none": 1.0, "number": 0.37}
AXES = {"heads": tuple(SHAPES), "reach": tuple(PATTERNS), "logits": LOGITS, "scale": tuple(SCALES), "new": ("1", "6")}


class Problem(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    queries: TokenPositions
    keys: TokenPositions
    pattern: AttentionPattern
    score: AttentionParams

    def compute(self, kernel: Kernel = "auto", **options: Any) -> Tensor:
        reading = AttentionMask(self.queries, self.keys, self.pattern)
        return dot_product_attention(self.q, self.k, self.v, reading, self.score, kernel=kernel, **options).out


def make_problem(case: Case, seed: int = 0, dtype: torch.dtype = torch.float64) -> Problem:
    """Build two sequences: keys in any order with holes (-1), and few keys with one query that sees none."""
    heads, kv_heads, dim, value_dim = SHAPES[case.get("heads", "gqa")]
    new, kind = int(case.get("new", "6")), case.get("logits", "plain")
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    order = torch.randperm(SLOTS, generator=draw)
    positions = torch.stack([order, torch.where(order < 4, order + 1, -1)])
    positions[0, order == 5] = -1
    queries = torch.stack([torch.arange(SLOTS - new, SLOTS), torch.arange(new)])
    documents = case.get("reach") == "documents"
    everything = kind == "everything"
    score = AttentionParams(
        scale=SCALES[case.get("scale", "default")] or dim**-0.5,
        logit_softcap=1.7 if everything or kind == "softcap" else None,
        sink_logits=random(heads) if everything or kind == "sinks" else None,
        bias={
            "alibi": AlibiSlopes(random(heads).exp()),
            "everything": AlibiSlopes(random(heads).exp()),
            "t5": RelativeBuckets(random(6, heads), 8, False),
            "t5-both-ways": RelativeBuckets(random(8, heads), 6, True),
        }.get(kind),
    )
    return Problem(
        (2 * random(ROWS, new, heads, dim)).to(dtype),
        (2 * random(ROWS, kv_heads, SLOTS, dim)).to(dtype),
        random(ROWS, kv_heads, SLOTS, value_dim).to(dtype),
        TokenPositions(queries, queries // 4 if documents else None),
        TokenPositions(positions, positions // 4 if documents else None),
        PATTERNS[case.get("reach", "causal")],
        score,
    )


def visible_slots(problem: Problem, row: int, query: int) -> list[int]:
    """Return the slots that a query may read, according to the contract."""
    seen = []
    at = int(problem.queries.position[row, query])
    for slot in range(problem.k.shape[2]):
        position = int(problem.keys.position[row, slot])
        if position < 0 or (problem.pattern.causal and position > at):
            continue
        if problem.pattern.window is not None and abs(at - position) > problem.pattern.window - 1:
            continue
        own, its = problem.queries.document_id, problem.keys.document_id
        if own is not None and its is not None and int(own[row, query]) != int(its[row, slot]):
            continue
        seen.append(slot)
    return seen


def reference_attention(problem: Problem) -> Tensor:
    q, k, v, score = problem.q.double(), problem.k.double(), problem.v.double(), problem.score
    rows, new, heads, _ = q.shape
    out = torch.zeros(rows, new, heads, v.shape[-1], dtype=torch.float64)
    for row in range(rows):
        for i in range(new):
            slots = visible_slots(problem, row, i)
            for head in range(heads):
                group = head // (heads // k.shape[1])
                weights = []
                for slot in slots:
                    z = score.scale * float(q[row, i, head] @ k[row, group, slot])
                    z = z if score.logit_softcap is None else score.logit_softcap * math.tanh(z / score.logit_softcap)
                    ahead = int(problem.keys.position[row, slot] - problem.queries.position[row, i])
                    if isinstance(score.bias, AlibiSlopes):
                        z -= float(score.bias.slopes[head]) * abs(ahead)
                    elif score.bias is not None:
                        bucket = t5_bucket(torch.tensor(ahead), len(score.bias.table), *score.bias[1:])
                        z += float(score.bias.table[bucket, head])
                    weights.append(math.exp(z))
                sink = 0.0 if score.sink_logits is None else math.exp(float(score.sink_logits[head]))
                for weight, slot in zip(weights, slots, strict=True):
                    out[row, i, head] += weight / (sum(weights) + sink) * v[row, group, slot]
    return out


def case_id(case: Case) -> str:
    return "-".join(case.values())


def test_every_kernel_name_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parametrization without "reference" would run the fused kernel under every name."""
    assert KERNELS == BOTH == ("reference", "sdpa")
    calls, fused = dict.fromkeys(NAMES, 0), attention._fused

    def counted(*arguments: Any) -> Any:
        calls[kernel] += 1
        return fused(*arguments)

    monkeypatch.setattr(attention, "_fused", counted)
    for kernel in NAMES:
        make_problem({}).compute(kernel)
    assert calls == {"auto": 1, "reference": 0, "sdpa": 1}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", pairwise(AXES), ids=case_id)
def test_every_kernel_equals_the_formula(case: Case, kernel: Kernel) -> None:
    problem = make_problem(case)
    torch.testing.assert_close(problem.compute(kernel), reference_attention(problem), rtol=0, atol=1e-12)


# bfloat16: the fused kernel rounds the weights too, before they are multiplied with the values.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("logits", LOGITS)
def test_every_dtype_equals_the_formula_of_its_rounded_inputs(logits: str, kernel: Kernel, dtype: torch.dtype) -> None:
    for heads in ("gqa", "value-dim"):
        problem = make_problem({"heads": heads, "logits": logits}, dtype=dtype)
        out = problem.compute(kernel)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), reference_attention(problem), rtol=0, atol=ROUNDING[dtype])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["alibi", "t5"])
def test_biases_of_half_precision_models_are_not_rounded(kind: str, dtype: torch.dtype, kernel: Kernel) -> None:
    """Biases of hundreds, which bfloat16 rounds to multiples of 2, on keys whose biases differ by less."""
    draw, slots = torch.Generator().manual_seed(0), 20
    k, v = (torch.randn(1, 2, slots, 8, generator=draw).to(dtype) for _ in range(2))
    bias: AlibiSlopes | RelativeBuckets
    if kind == "alibi":
        bias = AlibiSlopes(torch.tensor([0.503, 0.217]))
        pull = bias.slopes[:, None, None].double() * (torch.arange(slots) - torch.tensor([[600], [603]])).double()
    else:
        table = torch.tensor([-300.0, -290.0])[None] + torch.linspace(0, 3, 32)[:, None]
        bias = RelativeBuckets(table, 1200, False)
        bucket = t5_bucket(torch.arange(slots) - torch.tensor([[600], [603]]), 32, 1200, False)
        pull = table[bucket].permute(2, 0, 1).double()
    reading = AttentionMask(
        TokenPositions(torch.tensor([[600, 603]])), TokenPositions(torch.arange(slots)[None]), AttentionPattern()
    )
    out = dot_product_attention(
        torch.zeros(1, 2, 2, 8, dtype=dtype), k, v, reading, AttentionParams(1.0, bias=bias), kernel=kernel
    ).out
    expected = pull.softmax(-1) @ v[0].double()  # [H, L, Dv]; q = 0, so only the bias matters
    torch.testing.assert_close(out[0].transpose(0, 1).double(), expected, rtol=0, atol=ROUNDING[dtype])


# ---------------------------------------------------------------- blocks of queries


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("case", pairwise(AXES | {"new": ("6",)}), ids=case_id)
def test_query_blocks_do_not_change_the_result(case: Case, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(case)
    whole = dot_product_attention(
        *problem[:3], AttentionMask(*problem[3:6]), problem.score, kernel=kernel, return_weights=kernel == "reference"
    )
    monkeypatch.setattr(attention, "MASK_BUDGET", ROWS * SLOTS)  # one or two queries at a time
    monkeypatch.setattr(attention, "SCORE_BUDGET", ROWS * SLOTS * 12)
    split = dot_product_attention(
        *problem[:3], AttentionMask(*problem[3:6]), problem.score, kernel=kernel, return_weights=kernel == "reference"
    )
    for one, other in zip(split, whole, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


class Largest(TorchDispatchMode):
    """Records the largest number of elements of any new tensor; views are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.created_by = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for output in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(output, Tensor):
                elements = output.untyped_storage().nbytes() // output.element_size()
                if elements > self.elements:
                    self.elements, self.created_by = elements, str(func)
        return out


def long_problem(logits: str, heads: str, new: int) -> Problem:
    small = make_problem({"logits": logits, "heads": heads})
    count, kv_heads, dim, value_dim = SHAPES[heads]
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=draw)
        for shape in ((1, new, count, dim), (1, kv_heads, new, dim), (1, kv_heads, new, value_dim))
    )
    token_positions = TokenPositions(torch.arange(new)[None])
    return Problem(q, k, v, token_positions, token_positions, AttentionPattern(), small.score)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("heads", ["gqa", "value-dim"])
@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("fault", [False, True])
def test_long_steps_allocate_no_full_matrix(
    fault: bool, logits: str, heads: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """320 queries by 320 keys by 6 heads: no tensor exceeds the budgets, with or without a visible NaN."""
    monkeypatch.setattr(attention, "MASK_BUDGET", 1 << 13)
    monkeypatch.setattr(attention, "SCORE_BUDGET", 1 << 15)
    problem = long_problem(logits, heads, new := 320)
    if fault:
        problem.k[0, 0, 300] = math.nan  # the fused kernel's output cannot be used then
    with Largest() as largest, torch.no_grad():
        out = problem.compute(kernel)
    assert largest.elements <= 1 << 15 < new * new, f"{largest.created_by} made {largest.elements} elements"
    assert bool(out[:, :300].isfinite().all()) and bool(out[:, 300:].isnan().any()) == fault


def test_full_matrix_is_detected() -> None:
    problem = long_problem("plain", "gqa", 320)
    with Largest() as largest:
        problem.compute("reference")
    assert largest.elements >= 6 * 320 * 320


# ---------------------------------------------------------------- invisible keys


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize(
    "case", pairwise(AXES | {"reach": ("causal",), "dtype": ("float64", "float32", "bfloat16", "float16")}), ids=case_id
)
def test_query_without_visible_keys_gives_zeros(case: Case, kernel: Kernel) -> None:
    problem = make_problem(case, dtype=getattr(torch, case["dtype"]))
    blind = problem._replace(keys=TokenPositions(torch.full_like(problem.keys.position, -1)))
    assert bool((blind.compute(kernel) == 0).all())
    first = problem.compute(kernel)[1, 0]  # sequence 1 has positions 1..4, its first query is at 0
    assert bool((first == 0).all()) and bool((problem.compute(kernel)[0] != 0).any())


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("case", pairwise(AXES | {"value": ("nan", "inf", "-inf"), "where": ("k", "v")}), ids=case_id)
def test_masked_slots_do_not_matter(case: Case, kernel: Kernel) -> None:
    problem = make_problem(case)
    clean = problem.compute(kernel)
    everyone = torch.zeros(ROWS, SLOTS, dtype=torch.bool)
    for row in range(ROWS):
        for i in range(problem.q.shape[1]):
            everyone[row, visible_slots(problem, row, i)] = True
    assert not bool(everyone.all())
    for tensor in {"k": (problem.k,), "v": (problem.v,)}[case["where"]]:
        tensor.masked_fill_(~everyone[:, None, :, None], float(case["value"]))
    torch.testing.assert_close(problem.compute(kernel), clean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("case", pairwise(AXES), ids=case_id)
def test_visible_nan_affects_only_its_queries(case: Case, where: str, kernel: Kernel) -> None:
    problem = make_problem(case)
    clean = problem.compute(kernel)
    heads, kv_heads = SHAPES[case["heads"]][:2]
    row, group = 0, kv_heads - 1
    slot = visible_slots(problem, row, problem.q.shape[1] - 1)[0]
    (problem.k if where == "k" else problem.v)[row, group, slot, 2] = math.nan
    out = problem.compute(kernel)
    hit = torch.zeros(out.shape[:3], dtype=torch.bool)
    for i in range(out.shape[1]):
        if slot in visible_slots(problem, row, i):
            hit[row, i, heads // kv_heads * group :] = True
    assert bool(hit.any()) and not bool(hit.all())
    assert bool(out[hit].isnan().all())
    torch.testing.assert_close(out[~hit], clean[~hit], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", BOTH)
def test_visible_infinity_affects_the_output(kernel: Kernel) -> None:
    problem = make_problem({"layer_pattern": "causal"})
    slot = int((problem.keys.position[0] == 9).nonzero())
    problem.v[0, 0, slot] = math.inf
    out = problem.compute(kernel)
    visible_to = problem.queries.position[0] >= 9
    assert bool(out[0, visible_to, :2].isnan().all())
    assert bool(out[0, ~visible_to].isfinite().all()) and bool(out[0, :, 2:].isfinite().all())


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("logits", LOGITS)
def test_reference_gradients_equal_finite_differences(logits: str) -> None:
    """Finite differences for q, k, v and the learned parts of the score; one query sees no key."""
    problem = make_problem({"logits": logits, "heads": "value-dim", "new": "1" if logits == "everything" else "6"})
    few = problem._replace(q=problem.q[:, :3], queries=TokenPositions(problem.queries.position[:, :3]))
    learned = [t for t in (few.score.sink_logits, getattr(few.score.bias, "table", None)) if t is not None]

    def run(q: Tensor, k: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        return few._replace(q=q, k=k, v=v, score=with_learned(few.score, list(extra))).compute("reference")

    inputs = [t.detach().clone().requires_grad_() for t in (few.q, few.k, few.v, *learned)]
    assert torch.autograd.gradcheck(run, inputs, eps=1e-6, atol=1e-6, nondet_tol=0.0, fast_mode=True)


def with_learned(score: AttentionParams, learned: list[Tensor]) -> AttentionParams:
    """Return the score with its learned tensors replaced, in the order sinks, table."""
    sinks = learned.pop(0) if score.sink_logits is not None else None
    bias = score.bias._replace(table=learned.pop(0)) if isinstance(score.bias, RelativeBuckets) else score.bias
    return score._replace(sink_logits=sinks, bias=bias)


def gradients(problem: Problem, kernel: Kernel) -> list[Tensor]:
    bias = problem.score.bias
    table = [bias.table] if isinstance(bias, RelativeBuckets) else []
    inputs = [t.detach().clone().requires_grad_() for t in (problem.q, problem.k, problem.v, *table)]
    score = problem.score if not table else problem.score._replace(bias=bias._replace(table=inputs[3]))  # type: ignore[union-attr]
    out = problem._replace(q=inputs[0], k=inputs[1], v=inputs[2], score=score).compute(kernel)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
    return list(torch.autograd.grad((out * weight).sum(), inputs))


@pytest.mark.parametrize("case", pairwise(AXES | {"logits": ("plain", "alibi", "t5", "t5-both-ways")}), ids=case_id)
def test_fused_gradients_equal_reference_gradients(case: Case) -> None:
    problem = make_problem(case)
    expected = gradients(problem, "reference")
    assert float(expected[2].abs().max()) > 1e-3
    for fused, plain in zip(gradients(problem, "sdpa"), expected, strict=True):
        torch.testing.assert_close(fused, plain, rtol=0, atol=1e-11)


def test_large_sink_has_finite_gradients() -> None:
    problem = make_problem({"logits": "sinks"}, dtype=torch.float32)
    sinks = torch.full((6,), 300.0, requires_grad=True)  # its exponential is infinite in float32
    q = problem.q.clone().requires_grad_()
    out = problem._replace(q=q, score=problem.score._replace(sink_logits=sinks)).compute()
    assert float(out.detach().abs().max()) < 1e-30
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(out.sum(), (q, sinks)))


@pytest.mark.parametrize("kernel", BOTH)
def test_query_blocks_do_not_change_gradients(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem({"logits": "t5"})
    whole = gradients(problem, kernel)
    monkeypatch.setattr(attention, "MASK_BUDGET", 1)
    monkeypatch.setattr(attention, "SCORE_BUDGET", 1)
    for split, full in zip(gradients(problem, kernel), whole, strict=True):
        torch.testing.assert_close(split, full, rtol=0, atol=1e-12)


# ---------------------------------------------------------------- other properties


@pytest.mark.parametrize("logits", LOGITS)
def test_scores_and_weights_are_returned_on_request(logits: str) -> None:
    problem = make_problem({"logits": logits})
    done = dot_product_attention(*problem[:3], AttentionMask(*problem[3:6]), problem.score, return_weights=True)
    assert done.scores is not None and done.weights is not None
    torch.testing.assert_close(done.out, problem.compute("reference"), rtol=0, atol=0)
    totals = done.scores.exp().sum(-1)
    if problem.score.sink_logits is not None:
        totals = totals + problem.score.sink_logits.exp()[:, None]
    weights = torch.where(totals[..., None] > 0, done.scores.exp() / totals.clamp(min=1e-300)[..., None], 0.0)
    torch.testing.assert_close(done.weights, weights, rtol=0, atol=1e-12)
    for row in range(ROWS):
        for i in range(6):
            seen = set(visible_slots(problem, row, i))
            assert {j for j in range(SLOTS) if done.scores[row, 0, i, j] > -math.inf} == seen
    blind = bool((done.weights[1, :, 0] == 0).all())
    assert blind


def test_layers_with_different_tables_share_one_read() -> None:
    """Biases are cached per tensor, not per address: a new table must not get the bias of a freed one."""
    problem = make_problem({"logits": "alibi"})
    reading = AttentionMask(problem.queries, problem.keys, problem.pattern)
    for seed in range(20):
        out = dot_product_attention(
            *problem[:3], reading, AttentionParams(0.3, bias=slopes_of(seed)), kernel="reference"
        ).out
        again = problem._replace(score=AttentionParams(0.3, bias=slopes_of(seed)))
        torch.testing.assert_close(out, reference_attention(again), rtol=0, atol=1e-12)


def slopes_of(seed: int) -> AlibiSlopes:
    return AlibiSlopes(torch.rand(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def test_keys_of_another_dtype_are_converted() -> None:
    """A float16 cache under a float32 model: storage only."""
    problem = make_problem({}, dtype=torch.float32)
    stored = problem._replace(k=problem.k.half(), v=problem.v.half())
    for kernel in BOTH:
        out = stored.compute(kernel)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), reference_attention(stored), rtol=0, atol=2e-6)


def test_large_scores_do_not_overflow() -> None:
    problem = make_problem({"softmax_scale": "number"})
    huge = problem._replace(score=AttentionParams(500.0), q=problem.q.float(), k=problem.k.float(), v=problem.v.float())
    for kernel in BOTH:
        assert bool(huge.compute(kernel).isfinite().all())


# ---------------------------------------------------------------- several parts, one softmax


SPLITS = ((0, 5), (5, 5), (5, 6), (6, SLOTS))  # one is empty, one has a single slot
PART_AXES = AXES | {"own": ("shared", "per-head", "weighted", "per-head-weighted"), "fused": ("auto", "reference")}


def of_head(x: Tensor, kv_head: int) -> Tensor:
    return x if x.dim() == 2 else x[:, kv_head]


class Parts(NamedTuple):
    """A problem whose heads may keep different tokens, and whose keys may represent several tokens."""

    problem: Problem
    keys: Tensor  # [R, S] or [R, K, S]
    documents: Tensor | None
    weight: Tensor | None

    def split(self, splits: tuple[tuple[int, int], ...] = SPLITS) -> list[AttentionPart]:
        problem, output = self.problem, []
        for low, high in splits:
            documents = None if self.documents is None else self.documents[..., low:high]
            weight = None if self.weight is None else self.weight[..., low:high]
            reading = AttentionMask(
                problem.queries, TokenPositions(self.keys[..., low:high], documents), problem.pattern, weight
            )
            output.append(AttentionPart(problem.q, problem.k[:, :, low:high], problem.v[:, :, low:high], reading))
        return output

    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return out [R, L, H, Dv], lse [R, H, L] and weights [R, H, L, S] by the formula, one head at a time."""
        problem, heads, kv_heads = self.problem, self.problem.q.shape[2], self.problem.k.shape[1]
        outs, lses, every = [], [], []
        for head in range(heads):
            own = head // (heads // kv_heads)
            keys = TokenPositions(
                of_head(self.keys, own), None if self.documents is None else of_head(self.documents, own)
            )
            z = (
                torch.einsum("rld,rsd->rls", problem.q[:, :, head].double(), problem.k[:, own].double())
                * problem.score.scale
            )
            if problem.score.logit_softcap is not None:
                z = problem.score.logit_softcap * torch.tanh(z / problem.score.logit_softcap)
            if problem.score.bias is not None:
                z = z + position_bias(problem.score.bias, problem.queries.position, keys.position)[:, head]
            if self.weight is not None:
                z = z + of_head(self.weight, own)[:, None].double()
            z = z.masked_fill(~problem.pattern.visible(problem.queries, keys), -math.inf)
            sinks = problem.score.sink_logits
            extra = z.new_full((*z.shape[:2], 1), -math.inf if sinks is None else float(sinks[head]))
            lse = torch.cat([z, extra], -1).logsumexp(-1)
            weights = torch.where(z > -math.inf, (z - lse.unsqueeze(-1)).exp(), 0.0)
            outs.append(weights @ problem.v[:, own].double())
            lses.append(lse)
            every.append(weights)
        return torch.stack(outs, 2), torch.stack(lses, 1), torch.stack(every, 1)

    def group(self, x: Tensor) -> Tensor:
        """Sum [R, H, S] over the query heads of each KV head: [R, K, S]."""
        return x.unflatten(1, (self.problem.k.shape[1], -1)).sum(2)


def ones(problem: Problem) -> Tensor:
    """Count every query once, [R, L]."""
    return torch.ones(problem.q.shape[:2])


def in_parts(case: Case, dtype: torch.dtype = torch.float64) -> Parts:
    problem, own = make_problem(case, dtype=dtype), case.get("own", "shared")
    draw = torch.Generator().manual_seed(5)
    keys, kv_heads = problem.keys.position, problem.k.shape[1]
    if own.startswith("per-head"):  # each head has the sequence's tokens in another order and dropped different ones
        keys = torch.stack([keys[:, torch.randperm(SLOTS, generator=draw)] for _ in range(kv_heads)], dim=1)
        keys = keys.masked_fill(torch.rand(keys.shape, generator=draw) < 0.2, -1)
    documents = None if problem.keys.document_id is None else keys // 4
    shape = keys.shape if own == "per-head-weighted" else (ROWS, SLOTS)
    weight = torch.randint(1, 9, shape, generator=draw).double().log() if own.endswith("weighted") else None
    return Parts(problem, keys, documents, weight)


@pytest.mark.parametrize("case", pairwise(PART_AXES), ids=case_id)
def test_parts_share_one_softmax(case: Case) -> None:
    parts = in_parts(case)
    kernel: Kernel = "auto" if case["fused"] == "auto" else "reference"
    out, lse, weights = parts.plain()
    count = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]])[
        :, -parts.problem.q.shape[1] :
    ]
    for splits in (SPLITS, SPLITS[::-1], ((0, SLOTS),)):
        output = merge_attention(parts.split(splits), parts.problem.score, kernel=kernel, count=count)
        torch.testing.assert_close(output.out, out, rtol=0, atol=1e-12)
        if output.lse is not None:
            torch.testing.assert_close(output.lse, lse, rtol=0, atol=1e-12)
        assert output.mass is not None
        for mass, (low, high) in zip(output.mass, splits, strict=True):
            counted = (weights[..., low:high] * count.double()[:, None, :, None]).sum(2)
            torch.testing.assert_close(mass, parts.group(counted), rtol=0, atol=1e-12)
        seen = merge_attention(parts.split(splits), parts.problem.score, kernel=kernel, return_weights=True)
        assert seen.weights is not None
        order = [slot for low, high in splits for slot in range(low, high)]
        torch.testing.assert_close(seen.weights, weights[..., order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("own", PART_AXES["own"])
@pytest.mark.parametrize("heads", SHAPES)
def test_parts_in_every_dtype(heads: str, own: str, dtype: torch.dtype) -> None:
    parts = in_parts({"heads": heads, "own": own, "logits": "alibi"}, dtype)
    output = merge_attention(parts.split(), parts.problem.score, count=ones(parts.problem))
    assert output.out.dtype == dtype and output.mass is not None and output.mass[0].dtype == torch.float32
    out, _, weights = parts.plain()
    torch.testing.assert_close(output.out.double(), out, rtol=0, atol=ROUNDING[dtype])
    torch.testing.assert_close(torch.cat(output.mass, -1).double(), parts.group(weights.sum(2)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("case", pairwise(AXES), ids=case_id)
def test_one_part_equals_attention(case: Case, kernel: Kernel) -> None:
    problem = make_problem(case)
    part = AttentionPart(*problem[:3], AttentionMask(*problem[3:6]))
    for parts in ([part], iter([part])):
        assert torch.equal(merge_attention(parts, problem.score, kernel=kernel).out, problem.compute(kernel))


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("case", pairwise({k: v for k, v in PART_AXES.items() if k != "fused"}), ids=case_id)
def test_masked_slots_of_a_part_do_not_matter(case: Case, where: str, kernel: Kernel) -> None:
    parts = in_parts(case)
    clean = merge_attention(parts.split(), parts.problem.score, kernel=kernel, count=ones(parts.problem))
    hidden = parts.keys < 0
    hidden = hidden[:, None] if hidden.dim() == 2 else hidden
    assert bool(hidden.any())
    (parts.problem.k if where == "k" else parts.problem.v).masked_fill_(hidden[..., None], math.nan)
    if parts.weight is not None:
        parts.weight.masked_fill_(hidden if parts.weight.dim() == 3 else hidden.all(1), math.nan)
    dirty = merge_attention(parts.split(), parts.problem.score, kernel=kernel, count=ones(parts.problem))
    torch.testing.assert_close(dirty.out, clean.out, rtol=0, atol=1e-12)
    torch.testing.assert_close(dirty.mass, clean.mass, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("logits", LOGITS)
def test_queries_without_visible_keys_in_parts(logits: str, kernel: Kernel) -> None:
    problem = make_problem({"logits": logits})
    seeing = AttentionPart(*problem[:3], AttentionMask(*problem[3:6]))
    blind = AttentionPart(
        problem.q,
        *(torch.full_like(x, math.nan) for x in problem[1:3]),
        AttentionMask(problem.queries, TokenPositions(torch.full((2, SLOTS), -1)), problem.pattern),
    )
    single = merge_attention([blind, blind], problem.score, kernel=kernel, count=ones(problem))
    assert bool((single.out == 0).all()) and single.mass is not None and not any(bool(m.any()) for m in single.mass)
    whole = problem.compute(kernel)
    for parts in ([blind, seeing], [seeing, blind], [blind, seeing, blind]):
        torch.testing.assert_close(merge_attention(parts, problem.score, kernel=kernel).out, whole, rtol=0, atol=1e-13)


def test_mass_sums_to_the_number_of_counted_queries() -> None:
    parts = in_parts({"heads": "gqa", "own": "per-head-weighted"})
    output = merge_attention(parts.split(), parts.problem.score, count=ones(parts.problem))
    assert output.mass is not None
    num_seeing = (parts.plain()[2].sum(-1) > 0.5).double().sum(2)  # [R, H]: a query without visible keys adds nothing
    torch.testing.assert_close(torch.cat(output.mass, -1).sum(-1), parts.group(num_seeing.unsqueeze(-1)).squeeze(-1))
    zeros = merge_attention(parts.split(), parts.problem.score, count=torch.zeros(ROWS, 6))
    assert zeros.mass is not None and not any(bool(m.any()) for m in zeros.mass)


def test_uncounted_queries_do_not_matter() -> None:
    parts = in_parts({})
    count = torch.ones(ROWS, 6)
    count[1, 3] = 0
    clean = merge_attention(parts.split(), parts.problem.score, count=count)
    parts.problem.q[1, 3] = math.nan
    torch.testing.assert_close(merge_attention(parts.split(), parts.problem.score, count=count).mass, clean.mass)


def test_parts_are_created_one_at_a_time() -> None:
    """At most three of a hundred parts are alive: the current one, the one before its first read, the generator's
    own.
    """
    problem, alive = make_problem({}), []
    most = 0

    def made_parts() -> Iterator[AttentionPart]:
        nonlocal most
        for slot in [*range(SLOTS)] * 8:
            k, v = (x[:, :, slot : slot + 1].clone() for x in problem[1:3])
            alive.append(weakref.ref(k))
            most = max(most, sum(ref() is not None for ref in alive))
            yield AttentionPart(
                problem.q,
                k,
                v,
                AttentionMask(
                    problem.queries, TokenPositions(problem.keys.position[:, slot : slot + 1]), problem.pattern
                ),
            )

    merge_attention(made_parts(), problem.score)
    assert len(alive) == 8 * SLOTS and most <= 3


class RecreatedParts:
    """Parts that are created again in each iteration."""

    def __init__(self, parts: list[AttentionPart]) -> None:
        self.parts, self.times = parts, 0

    def __iter__(self) -> Iterator[AttentionPart]:
        self.times += 1
        return (AttentionPart(q, k.clone(), v.clone(), reading) for q, k, v, reading in self.parts)


def test_mass_reads_parts_twice() -> None:
    parts = in_parts({})
    listed = merge_attention(parts.split(), parts.problem.score, count=ones(parts.problem))
    again = RecreatedParts(parts.split())
    torch.testing.assert_close(
        merge_attention(again, parts.problem.score, count=ones(parts.problem)).mass, listed.mass, rtol=0, atol=0
    )
    torch.testing.assert_close(
        merge_attention(iter(parts.split()), parts.problem.score, count=ones(parts.problem)).mass,
        listed.mass,
        rtol=0,
        atol=0,
    )
    assert again.times == 2 and merge_attention(again, parts.problem.score).mass is None and again.times == 3


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("logits", LOGITS)
def test_parts_of_long_steps_allocate_no_full_matrix(
    logits: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MASK_BUDGET", 1 << 13)
    monkeypatch.setattr(attention, "SCORE_BUDGET", 1 << 15)
    problem = long_problem(logits, "gqa", 320)
    keys = problem.keys.position.unsqueeze(1).expand(1, 3, -1)
    parts = [
        AttentionPart(
            problem.q,
            problem.k[:, :, split],
            problem.v[:, :, split],
            AttentionMask(problem.queries, TokenPositions(keys[:, :, split]), problem.pattern),
        )
        for split in (slice(0, 160), slice(160, 320))
    ]
    with Largest() as largest, torch.no_grad():
        output = merge_attention(parts, problem.score, kernel=kernel, count=ones(problem))
    assert largest.elements <= 1 << 15, f"{largest.created_by} made {largest.elements} elements"
    torch.testing.assert_close(output.out, problem.compute("reference"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("logits", LOGITS)
def test_parts_have_gradients(logits: str) -> None:
    """Compare with the gradients of one part, for q, k and v; some queries see nothing in one part or in all."""
    problem = make_problem({"logits": logits})
    answers = []
    for splits in (SPLITS, ((0, SLOTS),)):
        inputs = [t.detach().clone().requires_grad_() for t in problem[:3]]
        own = Parts(problem._replace(q=inputs[0], k=inputs[1], v=inputs[2]), problem.keys.position, None, None)
        out = merge_attention(own.split(splits), problem.score).out
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
        answers.append(torch.autograd.grad((out * weight).sum(), inputs))
    for split, whole in zip(*answers, strict=True):
        torch.testing.assert_close(split, whole, rtol=0, atol=1e-11)


TRAINED = {  # tokens of two sequences of 9: positions, documents
    "whole rows": (torch.arange(9).repeat(2, 1), None),
    "that begin late": (torch.arange(9).repeat(2, 1) + 5, None),
    "of two documents": (torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2), torch.tensor([[0] * 4 + [1] * 5] * 2)),
    "that restart unseparated": (torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2), None),
    "with padding": (torch.arange(9).repeat(2, 1), torch.tensor([[0] * 7 + [-1] * 2] * 2)),
}


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("pattern", [AttentionPattern(), AttentionPattern(window=3), AttentionPattern(causal=False)])
@pytest.mark.parametrize("rows", TRAINED)
def test_fused_kernel_in_training_equals_reference(rows, pattern, heads):
    """Compare the gradient too, with and without an explicit mask."""
    positions, documents = TRAINED[rows]
    token_positions = TokenPositions(positions, documents)
    generator = torch.Generator().manual_seed(0)

    def random_inputs(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    given = random_inputs(2, 9, heads[0], 8), random_inputs(2, heads[1], 9, 8), random_inputs(2, heads[1], 9, 8)
    expected = random_inputs(2, 9, heads[0], 8).detach()
    reading = AttentionMask(token_positions, token_positions, pattern)
    assert reading.is_plain_causal == (pattern == AttentionPattern() and rows in ("whole rows", "that begin late"))
    score = AttentionParams(scale=8**-0.5)
    answers = [dot_product_attention(*given, reading, score, kernel=kernel).out for kernel in ("sdpa", "reference")]
    gradients = [torch.autograd.grad((answer * expected).sum(), given) for answer in answers]
    assert (answers[0] - answers[1]).abs().max() <= 1e-12
    for fused, exact in zip(*gradients, strict=True):
        assert (fused - exact).abs().max() <= 1e-12


def test_training_with_a_window_makes_no_whole_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are taken in blocks within the budget; neither pass makes a tensor of [L, S]."""
    length, width = 512, 8
    monkeypatch.setattr(attention, "MASK_BUDGET", 64 * length)
    monkeypatch.setattr(attention, "SCORE_BUDGET", 64 * length)
    token_positions = TokenPositions(torch.arange(length).view(1, -1), None)
    given = [torch.randn(1, *shape, width, requires_grad=True) for shape in ((length, 2), (2, length), (2, length))]
    mask = AttentionMask(token_positions, token_positions, AttentionPattern(window=16))
    with Largest() as largest:
        out = dot_product_attention(*given, mask, AttentionParams(scale=width**-0.5)).out
        torch.autograd.grad(out.sum(), given)
    assert largest.elements <= 64 * length, f"{largest.created_by} made {largest.elements} elements"


def test_inference_passes_the_mask(monkeypatch):
    """The bits of inference do not depend on optimizations of training."""
    seen: list[tuple[Tensor | None, bool]] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def recording(*given: Any, **named: Any) -> Tensor:
        seen.append((named["attn_mask"], named["is_causal"]))
        return real(*given, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recording)
    token_positions = TokenPositions(torch.arange(9).repeat(2, 1))
    reading, score = AttentionMask(token_positions, token_positions, AttentionPattern()), AttentionParams(scale=8**-0.5)
    given = [torch.randn(*shape, requires_grad=True) for shape in ((2, 9, 4, 8), (2, 4, 9, 8), (2, 4, 9, 8))]
    dot_product_attention(*given, reading, score)
    with torch.no_grad():
        dot_product_attention(*given, reading, score)
    (learning, causal), (judging, masked) = seen
    assert learning is None and causal
    assert judging is not None and judging.dtype == torch.bool and not masked
