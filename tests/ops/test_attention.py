"""Attention against a loop over queries and heads in float64, written from the formulas and not from the code.

softmax over the visible keys of softcap(scale * q.k) + bias, the sink in the denominator only; nothing visible: zeros.
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
from kvad.ops.attention import AttentionMask, Kernel, dot_product_attention, position_bias, t5_bucket
from kvad.ops.merge import AttentionPart, merge_attention
from tests.support.covering_array import Case, pairwise

KERNELS = get_args(Kernel)
BOTH: tuple[Kernel, ...] = ("reference", "sdpa")
ROWS, SLOTS = 2, 13
SHAPES = {  # H, K, D, Dv
    "mha": (4, 4, 8, 8),
    "gqa": (6, 3, 8, 8),
    "mqa": (6, 1, 8, 8),
    "value-dim": (6, 2, 5, 7),
}
REACHES = {
    "causal": AttentionPattern(),
    "window": AttentionPattern(window=3),
    "bidirectional": AttentionPattern(causal=False),
    "bidirectional-window": AttentionPattern(causal=False, window=3),
    "documents": AttentionPattern(),
}
LOGITS = ("plain", "softcap", "sinks", "alibi", "t5", "t5-both-ways", "everything")
SCALES = {"default": None, "none": 1.0, "number": 0.37}
AXES = {"heads": tuple(SHAPES), "reach": tuple(REACHES), "logits": LOGITS, "scale": tuple(SCALES), "new": ("1", "6")}


class Question(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    queries: TokenPositions
    keys: TokenPositions
    reach: AttentionPattern
    score: AttentionParams

    def ask(self, kernel: Kernel = "auto", **options: Any) -> Tensor:
        reading = AttentionMask(self.queries, self.keys, self.reach)
        return dot_product_attention(self.q, self.k, self.v, reading, self.score, kernel=kernel, **options).out


def question(case: Case, seed: int = 0, dtype: torch.dtype = torch.float64) -> Question:
    """Row 0's keys lie in any order with holes (-1) among them; row 1's are few, and one of its queries sees none."""
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
    return Question(
        (2 * random(ROWS, new, heads, dim)).to(dtype),
        (2 * random(ROWS, kv_heads, SLOTS, dim)).to(dtype),
        random(ROWS, kv_heads, SLOTS, value_dim).to(dtype),
        TokenPositions(queries, queries // 4 if documents else None),
        TokenPositions(positions, positions // 4 if documents else None),
        REACHES[case.get("reach", "causal")],
        score,
    )


def seen_by(ask: Question, row: int, query: int) -> list[int]:
    """Slots that a query may read, by the words of the contract."""
    seen = []
    at = int(ask.queries.position[row, query])
    for slot in range(ask.k.shape[2]):
        position = int(ask.keys.position[row, slot])
        if position < 0 or (ask.reach.causal and position > at):
            continue
        if ask.reach.window is not None and abs(at - position) > ask.reach.window - 1:
            continue
        mine, its = ask.queries.document_id, ask.keys.document_id
        if mine is not None and its is not None and int(mine[row, query]) != int(its[row, slot]):
            continue
        seen.append(slot)
    return seen


def naive(ask: Question) -> Tensor:
    q, k, v, score = ask.q.double(), ask.k.double(), ask.v.double(), ask.score
    rows, new, heads, _ = q.shape
    out = torch.zeros(rows, new, heads, v.shape[-1], dtype=torch.float64)
    for row in range(rows):
        for i in range(new):
            slots = seen_by(ask, row, i)
            for head in range(heads):
                group = head // (heads // k.shape[1])
                weights = []
                for slot in slots:
                    z = score.scale * float(q[row, i, head] @ k[row, group, slot])
                    z = z if score.logit_softcap is None else score.logit_softcap * math.tanh(z / score.logit_softcap)
                    ahead = int(ask.keys.position[row, slot] - ask.queries.position[row, i])
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


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", pairwise(AXES), ids=case_id)
def test_every_kernel_is_the_formula(case: Case, kernel: Kernel) -> None:
    ask = question(case)
    torch.testing.assert_close(ask.ask(kernel), naive(ask), rtol=0, atol=1e-12)


# bfloat16: the fused kernel rounds the weights too, before they meet the values.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("logits", LOGITS)
def test_every_dtype_is_the_formula_of_its_rounded_inputs(logits: str, kernel: Kernel, dtype: torch.dtype) -> None:
    for heads in ("gqa", "value-dim"):
        ask = question({"heads": heads, "logits": logits}, dtype=dtype)
        out = ask.ask(kernel)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), naive(ask), rtol=0, atol=ROUNDING[dtype])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["alibi", "t5"])
def test_biases_of_half_precision_models_are_not_rounded(kind: str, dtype: torch.dtype, kernel: Kernel) -> None:
    """A bias of hundreds, which bfloat16 knows to the next 2, on keys whose biases differ by less than that."""
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
    expected = pull.softmax(-1) @ v[0].double()  # [H, L, Dv]; q = 0, so the bias decides alone
    torch.testing.assert_close(out[0].transpose(0, 1).double(), expected, rtol=0, atol=ROUNDING[dtype])


# ---------------------------------------------------------------- blocks of queries, and what they are for


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("case", pairwise(AXES | {"num_new_tokens": ("6",)}), ids=case_id)
def test_blocks_of_queries_change_nothing(case: Case, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = question(case)
    whole = dot_product_attention(
        *ask[:3], AttentionMask(*ask[3:6]), ask.score, kernel=kernel, return_weights=kernel == "reference"
    )
    monkeypatch.setattr(attention, "MASK_BUDGET", ROWS * SLOTS)  # one or two queries at a time
    monkeypatch.setattr(attention, "SCORE_BUDGET", ROWS * SLOTS * 12)
    cut = dot_product_attention(
        *ask[:3], AttentionMask(*ask[3:6]), ask.score, kernel=kernel, return_weights=kernel == "reference"
    )
    for one, other in zip(cut, whole, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


class Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation made (a view of an old one makes nothing)."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.made_by = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(made, Tensor):
                elements = made.untyped_storage().nbytes() // made.element_size()
                if elements > self.elements:
                    self.elements, self.made_by = elements, str(func)
        return out


def long_question(logits: str, heads: str, new: int) -> Question:
    small = question({"logits": logits, "heads": heads})
    count, kv_heads, dim, value_dim = SHAPES[heads]
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=draw)
        for shape in ((1, new, count, dim), (1, kv_heads, new, dim), (1, kv_heads, new, value_dim))
    )
    mark = TokenPositions(torch.arange(new)[None])
    return Question(q, k, v, mark, mark, AttentionPattern(), small.score)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("heads", ["gqa", "value-dim"])
@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("fault", [False, True])
def test_no_matrix_of_a_whole_long_step_is_made(
    fault: bool, logits: str, heads: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """320 queries by 320 keys by 6 heads: nothing made exceeds the budgets, with a NaN in sight or without."""
    monkeypatch.setattr(attention, "MASK_BUDGET", 1 << 13)
    monkeypatch.setattr(attention, "SCORE_BUDGET", 1 << 15)
    ask = long_question(logits, heads, new := 320)
    if fault:
        ask.k[0, 0, 300] = math.nan  # the fused kernel's output is of no use there
    with Largest() as largest, torch.no_grad():
        out = ask.ask(kernel)
    assert largest.elements <= 1 << 15 < new * new, f"{largest.made_by} made {largest.elements} elements"
    assert bool(out[:, :300].isfinite().all()) and bool(out[:, 300:].isnan().any()) == fault


def test_the_watcher_sees_a_matrix_of_a_whole_step() -> None:
    ask = long_question("plain", "gqa", 320)
    with Largest() as largest:
        ask.ask("reference")
    assert largest.elements >= 6 * 320 * 320


# ---------------------------------------------------------------- what nobody may see


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize(
    "case", pairwise(AXES | {"reach": ("causal",), "dtype": ("float64", "float32", "bfloat16", "float16")}), ids=case_id
)
def test_a_query_that_sees_nothing_gives_zeros(case: Case, kernel: Kernel) -> None:
    ask = question(case, dtype=getattr(torch, case["dtype"]))
    blind = ask._replace(keys=TokenPositions(torch.full_like(ask.keys.position, -1)))
    assert bool((blind.ask(kernel) == 0).all())
    first = ask.ask(kernel)[1, 0]  # row 1 holds positions 1..4, its first query stands at 0
    assert bool((first == 0).all()) and bool((ask.ask(kernel)[0] != 0).any())


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("case", pairwise(AXES | {"value": ("nan", "inf", "-inf"), "where": ("k", "v")}), ids=case_id)
def test_what_lies_in_a_masked_slot_reaches_nobody(case: Case, kernel: Kernel) -> None:
    ask = question(case)
    clean = ask.ask(kernel)
    everyone = torch.zeros(ROWS, SLOTS, dtype=torch.bool)
    for row in range(ROWS):
        for i in range(ask.q.shape[1]):
            everyone[row, seen_by(ask, row, i)] = True
    assert not bool(everyone.all())
    for tensor in {"k": (ask.k,), "v": (ask.v,)}[case["where"]]:
        tensor.masked_fill_(~everyone[:, None, :, None], float(case["value"]))
    torch.testing.assert_close(ask.ask(kernel), clean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("case", pairwise(AXES), ids=case_id)
def test_a_nan_in_sight_reaches_those_that_see_it_and_no_other(case: Case, where: str, kernel: Kernel) -> None:
    ask = question(case)
    clean = ask.ask(kernel)
    heads, kv_heads = SHAPES[case["heads"]][:2]
    row, group = 0, kv_heads - 1
    slot = seen_by(ask, row, ask.q.shape[1] - 1)[0]
    (ask.k if where == "k" else ask.v)[row, group, slot, 2] = math.nan
    out = ask.ask(kernel)
    hit = torch.zeros(out.shape[:3], dtype=torch.bool)
    for i in range(out.shape[1]):
        if slot in seen_by(ask, row, i):
            hit[row, i, heads // kv_heads * group :] = True
    assert bool(hit.any()) and not bool(hit.all())
    assert bool(out[hit].isnan().all())
    torch.testing.assert_close(out[~hit], clean[~hit], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", BOTH)
def test_an_infinite_value_in_sight_is_heard(kernel: Kernel) -> None:
    ask = question({"layer_pattern": "causal"})
    slot = int((ask.keys.position[0] == 9).nonzero())
    ask.v[0, 0, slot] = math.inf
    out = ask.ask(kernel)
    sees = ask.queries.position[0] >= 9
    assert bool(out[0, sees, :2].isnan().all())
    assert bool(out[0, ~sees].isfinite().all()) and bool(out[0, :, 2:].isfinite().all())


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("logits", LOGITS)
def test_gradients_of_the_reference(logits: str) -> None:
    """By finite differences, for q, k, v and whatever of the score is learned; a blind query is among them."""
    ask = question({"logits": logits, "heads": "value-dim", "new": "1" if logits == "everything" else "6"})
    few = ask._replace(q=ask.q[:, :3], queries=TokenPositions(ask.queries.position[:, :3]))
    learned = [t for t in (few.score.sink_logits, getattr(few.score.bias, "table", None)) if t is not None]

    def run(q: Tensor, k: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        return few._replace(q=q, k=k, v=v, score=rebuilt(few.score, list(extra))).ask("reference")

    inputs = [t.detach().clone().requires_grad_() for t in (few.q, few.k, few.v, *learned)]
    assert torch.autograd.gradcheck(run, inputs, eps=1e-6, atol=1e-6, nondet_tol=0.0, fast_mode=True)


def rebuilt(score: AttentionParams, learned: list[Tensor]) -> AttentionParams:
    """The score with its learned tensors replaced, in the order sinks, table."""
    sinks = learned.pop(0) if score.sink_logits is not None else None
    bias = score.bias._replace(table=learned.pop(0)) if isinstance(score.bias, RelativeBuckets) else score.bias
    return score._replace(sink_logits=sinks, bias=bias)


def gradients(ask: Question, kernel: Kernel) -> list[Tensor]:
    bias = ask.score.bias
    table = [bias.table] if isinstance(bias, RelativeBuckets) else []
    inputs = [t.detach().clone().requires_grad_() for t in (ask.q, ask.k, ask.v, *table)]
    score = ask.score if not table else ask.score._replace(bias=bias._replace(table=inputs[3]))  # type: ignore[union-attr]
    out = ask._replace(q=inputs[0], k=inputs[1], v=inputs[2], score=score).ask(kernel)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
    return list(torch.autograd.grad((out * weight).sum(), inputs))


@pytest.mark.parametrize("case", pairwise(AXES | {"logits": ("plain", "alibi", "t5", "t5-both-ways")}), ids=case_id)
def test_the_fused_kernel_has_the_gradients_of_the_reference(case: Case) -> None:
    ask = question(case)
    expected = gradients(ask, "reference")
    assert float(expected[2].abs().max()) > 1e-3
    for fused, plain in zip(gradients(ask, "sdpa"), expected, strict=True):
        torch.testing.assert_close(fused, plain, rtol=0, atol=1e-11)


def test_a_sink_far_above_every_score_leaves_finite_gradients() -> None:
    ask = question({"logits": "sinks"}, dtype=torch.float32)
    sinks = torch.full((6,), 300.0, requires_grad=True)  # its exponential is infinite in float32
    q = ask.q.clone().requires_grad_()
    out = ask._replace(q=q, score=ask.score._replace(sink_logits=sinks)).ask()
    assert float(out.detach().abs().max()) < 1e-30
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(out.sum(), (q, sinks)))


@pytest.mark.parametrize("kernel", BOTH)
def test_gradients_survive_blocks_of_queries(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = question({"logits": "t5"})
    whole = gradients(ask, kernel)
    monkeypatch.setattr(attention, "MASK_BUDGET", 1)
    monkeypatch.setattr(attention, "SCORE_BUDGET", 1)
    for cut, full in zip(gradients(ask, kernel), whole, strict=True):
        torch.testing.assert_close(cut, full, rtol=0, atol=1e-12)


# ---------------------------------------------------------------- what else is promised


@pytest.mark.parametrize("logits", LOGITS)
def test_scores_and_weights_where_asked_for(logits: str) -> None:
    ask = question({"logits": logits})
    done = dot_product_attention(*ask[:3], AttentionMask(*ask[3:6]), ask.score, return_weights=True)
    assert done.scores is not None and done.weights is not None
    torch.testing.assert_close(done.out, ask.ask("reference"), rtol=0, atol=0)
    totals = done.scores.exp().sum(-1)
    if ask.score.sink_logits is not None:
        totals = totals + ask.score.sink_logits.exp()[:, None]
    weights = torch.where(totals[..., None] > 0, done.scores.exp() / totals.clamp(min=1e-300)[..., None], 0.0)
    torch.testing.assert_close(done.weights, weights, rtol=0, atol=1e-12)
    for row in range(ROWS):
        for i in range(6):
            seen = set(seen_by(ask, row, i))
            assert {j for j in range(SLOTS) if done.scores[row, 0, i, j] > -math.inf} == seen
    blind = bool((done.weights[1, :, 0] == 0).all())
    assert blind


def test_one_reading_serves_layers_with_different_tables() -> None:
    """Biases are kept per tensor, not per address: a table that was freed must not lend its bias to the next one."""
    ask = question({"logits": "alibi"})
    reading = AttentionMask(ask.queries, ask.keys, ask.reach)
    for seed in range(20):
        out = dot_product_attention(
            *ask[:3], reading, AttentionParams(0.3, bias=slopes_of(seed)), kernel="reference"
        ).out
        again = ask._replace(score=AttentionParams(0.3, bias=slopes_of(seed)))
        torch.testing.assert_close(out, naive(again), rtol=0, atol=1e-12)


def slopes_of(seed: int) -> AlibiSlopes:
    return AlibiSlopes(torch.rand(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def test_keys_of_another_dtype_are_widened() -> None:
    """A float16 cache under a float32 model: storage only."""
    ask = question({}, dtype=torch.float32)
    stored = ask._replace(k=ask.k.half(), v=ask.v.half())
    for kernel in BOTH:
        out = stored.ask(kernel)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), naive(stored), rtol=0, atol=2e-6)


def test_scores_that_overflow_exp_are_safe() -> None:
    ask = question({"softmax_scale": "number"})
    huge = ask._replace(score=AttentionParams(500.0), q=ask.q.float(), k=ask.k.float(), v=ask.v.float())
    for kernel in BOTH:
        assert bool(huge.ask(kernel).isfinite().all())


# ---------------------------------------------------------------- several parts, one softmax


CUTS = ((0, 5), (5, 5), (5, 6), (6, SLOTS))  # one is empty, one has a single slot
PART_AXES = AXES | {"own": ("shared", "per-head", "weighted", "per-head-weighted"), "fused": ("auto", "reference")}


def of_head(x: Tensor, kv_head: int) -> Tensor:
    return x if x.dim() == 2 else x[:, kv_head]


class Parts(NamedTuple):
    """A question whose heads may keep other tokens, and whose keys may stand for several."""

    ask: Question
    keys: Tensor  # [R, S] or [R, K, S]
    documents: Tensor | None
    weight: Tensor | None

    def cut(self, cuts: tuple[tuple[int, int], ...] = CUTS) -> list[AttentionPart]:
        ask, made = self.ask, []
        for low, high in cuts:
            documents = None if self.documents is None else self.documents[..., low:high]
            weight = None if self.weight is None else self.weight[..., low:high]
            reading = AttentionMask(ask.queries, TokenPositions(self.keys[..., low:high], documents), ask.reach, weight)
            made.append(AttentionPart(ask.q, ask.k[:, :, low:high], ask.v[:, :, low:high], reading))
        return made

    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        """out [R, L, H, Dv], lse [R, H, L] and weights [R, H, L, S] by the formula, one head at a time."""
        ask, heads, kv_heads = self.ask, self.ask.q.shape[2], self.ask.k.shape[1]
        outs, lses, every = [], [], []
        for head in range(heads):
            own = head // (heads // kv_heads)
            keys = TokenPositions(
                of_head(self.keys, own), None if self.documents is None else of_head(self.documents, own)
            )
            z = torch.einsum("rld,rsd->rls", ask.q[:, :, head].double(), ask.k[:, own].double()) * ask.score.scale
            if ask.score.logit_softcap is not None:
                z = ask.score.logit_softcap * torch.tanh(z / ask.score.logit_softcap)
            if ask.score.bias is not None:
                z = z + position_bias(ask.score.bias, ask.queries.position, keys.position)[:, head]
            if self.weight is not None:
                z = z + of_head(self.weight, own)[:, None].double()
            z = z.masked_fill(~ask.reach.visible(ask.queries, keys), -math.inf)
            sinks = ask.score.sink_logits
            extra = z.new_full((*z.shape[:2], 1), -math.inf if sinks is None else float(sinks[head]))
            lse = torch.cat([z, extra], -1).logsumexp(-1)
            weights = torch.where(z > -math.inf, (z - lse.unsqueeze(-1)).exp(), 0.0)
            outs.append(weights @ ask.v[:, own].double())
            lses.append(lse)
            every.append(weights)
        return torch.stack(outs, 2), torch.stack(lses, 1), torch.stack(every, 1)

    def group(self, x: Tensor) -> Tensor:
        """[R, H, S] -> [R, K, S], summed over the heads that read a kv head."""
        return x.unflatten(1, (self.ask.k.shape[1], -1)).sum(2)


def in_parts(case: Case, dtype: torch.dtype = torch.float64) -> Parts:
    ask, own = question(case, dtype=dtype), case.get("own", "shared")
    draw = torch.Generator().manual_seed(5)
    keys, kv_heads = ask.keys.position, ask.k.shape[1]
    if own.startswith("per-head"):  # each head has the row's tokens in another order, and has dropped others
        keys = torch.stack([keys[:, torch.randperm(SLOTS, generator=draw)] for _ in range(kv_heads)], dim=1)
        keys = keys.masked_fill(torch.rand(keys.shape, generator=draw) < 0.2, -1)
    documents = None if ask.keys.document_id is None else keys // 4
    shape = keys.shape if own == "per-head-weighted" else (ROWS, SLOTS)
    weight = torch.randint(1, 9, shape, generator=draw).double().log() if own.endswith("weighted") else None
    return Parts(ask, keys, documents, weight)


@pytest.mark.parametrize("case", pairwise(PART_AXES), ids=case_id)
def test_parts_are_one_softmax(case: Case) -> None:
    parts = in_parts(case)
    kernel: Kernel = "auto" if case["fused"] == "auto" else "reference"
    out, lse, weights = parts.plain()
    count = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]])[:, -parts.ask.q.shape[1] :]
    for cuts in (CUTS, CUTS[::-1], ((0, SLOTS),)):
        made = merge_attention(parts.cut(cuts), parts.ask.score, kernel=kernel, mass=True, count=count)
        torch.testing.assert_close(made.out, out, rtol=0, atol=1e-12)
        if made.lse is not None:
            torch.testing.assert_close(made.lse, lse, rtol=0, atol=1e-12)
        assert made.mass is not None
        for mass, (low, high) in zip(made.mass, cuts, strict=True):
            counted = (weights[..., low:high] * count.double()[:, None, :, None]).sum(2)
            torch.testing.assert_close(mass, parts.group(counted), rtol=0, atol=1e-12)
        seen = merge_attention(parts.cut(cuts), parts.ask.score, kernel=kernel, return_weights=True)
        assert seen.weights is not None
        order = [slot for low, high in cuts for slot in range(low, high)]
        torch.testing.assert_close(seen.weights, weights[..., order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("own", PART_AXES["own"])
@pytest.mark.parametrize("heads", SHAPES)
def test_parts_in_every_dtype(heads: str, own: str, dtype: torch.dtype) -> None:
    parts = in_parts({"heads": heads, "own": own, "logits": "alibi"}, dtype)
    made = merge_attention(parts.cut(), parts.ask.score, mass=True)
    assert made.out.dtype == dtype and made.mass is not None and made.mass[0].dtype == torch.float32
    out, _, weights = parts.plain()
    torch.testing.assert_close(made.out.double(), out, rtol=0, atol=ROUNDING[dtype])
    torch.testing.assert_close(torch.cat(made.mass, -1).double(), parts.group(weights.sum(2)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("case", pairwise(AXES), ids=case_id)
def test_one_part_is_attention(case: Case, kernel: Kernel) -> None:
    ask = question(case)
    part = AttentionPart(*ask[:3], AttentionMask(*ask[3:6]))
    for parts in ([part], iter([part])):
        assert torch.equal(merge_attention(parts, ask.score, kernel=kernel).out, ask.ask(kernel))


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("case", pairwise({k: v for k, v in PART_AXES.items() if k != "fused"}), ids=case_id)
def test_what_lies_in_a_masked_slot_of_a_part_reaches_nobody(case: Case, where: str, kernel: Kernel) -> None:
    parts = in_parts(case)
    clean = merge_attention(parts.cut(), parts.ask.score, kernel=kernel, mass=True)
    hidden = parts.keys < 0
    hidden = hidden[:, None] if hidden.dim() == 2 else hidden
    assert bool(hidden.any())
    (parts.ask.k if where == "k" else parts.ask.v).masked_fill_(hidden[..., None], math.nan)
    if parts.weight is not None:
        parts.weight.masked_fill_(hidden if parts.weight.dim() == 3 else hidden.all(1), math.nan)
    dirty = merge_attention(parts.cut(), parts.ask.score, kernel=kernel, mass=True)
    torch.testing.assert_close(dirty.out, clean.out, rtol=0, atol=1e-12)
    torch.testing.assert_close(dirty.mass, clean.mass, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("logits", LOGITS)
def test_queries_that_see_nothing_in_a_part_or_in_any(logits: str, kernel: Kernel) -> None:
    ask = question({"logits": logits})
    seeing = AttentionPart(*ask[:3], AttentionMask(*ask[3:6]))
    blind = AttentionPart(
        ask.q,
        *(torch.full_like(x, math.nan) for x in ask[1:3]),
        AttentionMask(ask.queries, TokenPositions(torch.full((2, SLOTS), -1)), ask.reach),
    )
    alone = merge_attention([blind, blind], ask.score, kernel=kernel, mass=True)
    assert bool((alone.out == 0).all()) and alone.mass is not None and not any(bool(m.any()) for m in alone.mass)
    whole = ask.ask(kernel)
    for parts in ([blind, seeing], [seeing, blind], [blind, seeing, blind]):
        torch.testing.assert_close(merge_attention(parts, ask.score, kernel=kernel).out, whole, rtol=0, atol=1e-13)


def test_mass_sums_to_the_queries_that_count() -> None:
    parts = in_parts({"heads": "gqa", "own": "per-head-weighted"})
    made = merge_attention(parts.cut(), parts.ask.score, mass=True)
    assert made.mass is not None
    sighted = (parts.plain()[2].sum(-1) > 0.5).double().sum(2)  # [R, H]: a blind query gives nobody anything
    torch.testing.assert_close(torch.cat(made.mass, -1).sum(-1), parts.group(sighted.unsqueeze(-1)).squeeze(-1))
    nobody = merge_attention(parts.cut(), parts.ask.score, mass=True, count=torch.zeros(ROWS, 6))
    assert nobody.mass is not None and not any(bool(m.any()) for m in nobody.mass)


def test_a_query_that_does_not_count_may_hold_anything() -> None:
    parts = in_parts({})
    count = torch.ones(ROWS, 6)
    count[1, 3] = 0
    clean = merge_attention(parts.cut(), parts.ask.score, mass=True, count=count)
    parts.ask.q[1, 3] = math.nan
    torch.testing.assert_close(merge_attention(parts.cut(), parts.ask.score, mass=True, count=count).mass, clean.mass)


def test_parts_are_made_one_at_a_time() -> None:
    """Of a hundred parts at most the one that is read, the one before the first read, and the generator's own live."""
    ask, alive = question({}), []
    most = 0

    def unpacked() -> Iterator[AttentionPart]:
        nonlocal most
        for slot in [*range(SLOTS)] * 8:
            k, v = (x[:, :, slot : slot + 1].clone() for x in ask[1:3])
            alive.append(weakref.ref(k))
            most = max(most, sum(ref() is not None for ref in alive))
            yield AttentionPart(
                ask.q,
                k,
                v,
                AttentionMask(ask.queries, TokenPositions(ask.keys.position[:, slot : slot + 1]), ask.reach),
            )

    merge_attention(unpacked(), ask.score)
    assert len(alive) == 8 * SLOTS and most <= 3


class Unpacked:
    """Parts that are made again each time they are gone through."""

    def __init__(self, parts: list[AttentionPart]) -> None:
        self.parts, self.times = parts, 0

    def __iter__(self) -> Iterator[AttentionPart]:
        self.times += 1
        return (AttentionPart(q, k.clone(), v.clone(), reading) for q, k, v, reading in self.parts)


def test_mass_reads_a_sequence_twice_and_keeps_a_generator() -> None:
    parts = in_parts({})
    listed = merge_attention(parts.cut(), parts.ask.score, mass=True)
    again = Unpacked(parts.cut())
    torch.testing.assert_close(merge_attention(again, parts.ask.score, mass=True).mass, listed.mass, rtol=0, atol=0)
    torch.testing.assert_close(
        merge_attention(iter(parts.cut()), parts.ask.score, mass=True).mass, listed.mass, rtol=0, atol=0
    )
    assert again.times == 2 and merge_attention(again, parts.ask.score).mass is None and again.times == 3


@pytest.mark.parametrize("kernel", BOTH)
@pytest.mark.parametrize("logits", LOGITS)
def test_parts_of_a_long_step_make_no_matrix_of_it(
    logits: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MASK_BUDGET", 1 << 13)
    monkeypatch.setattr(attention, "SCORE_BUDGET", 1 << 15)
    ask = long_question(logits, "gqa", 320)
    keys = ask.keys.position.unsqueeze(1).expand(1, 3, -1)
    parts = [
        AttentionPart(
            ask.q,
            ask.k[:, :, cut],
            ask.v[:, :, cut],
            AttentionMask(ask.queries, TokenPositions(keys[:, :, cut]), ask.reach),
        )
        for cut in (slice(0, 160), slice(160, 320))
    ]
    with Largest() as largest, torch.no_grad():
        made = merge_attention(parts, ask.score, kernel=kernel, mass=True)
    assert largest.elements <= 1 << 15, f"{largest.made_by} made {largest.elements} elements"
    torch.testing.assert_close(made.out, ask.ask("reference"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("logits", LOGITS)
def test_gradients_pass_through_parts(logits: str) -> None:
    """By the whole's own: of q, k and v, where some queries are blind in one part or in all."""
    ask = question({"logits": logits})
    answers = []
    for cuts in (CUTS, ((0, SLOTS),)):
        inputs = [t.detach().clone().requires_grad_() for t in ask[:3]]
        own = Parts(ask._replace(q=inputs[0], k=inputs[1], v=inputs[2]), ask.keys.position, None, None)
        out = merge_attention(own.cut(cuts), ask.score).out
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
        answers.append(torch.autograd.grad((out * weight).sum(), inputs))
    for cut, whole in zip(*answers, strict=True):
        torch.testing.assert_close(cut, whole, rtol=0, atol=1e-11)


TRAINED = {  # tokens of two rows of 9: positions, documents
    "whole rows": (torch.arange(9).repeat(2, 1), None),
    "that begin late": (torch.arange(9).repeat(2, 1) + 5, None),
    "of two documents": (torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2), torch.tensor([[0] * 4 + [1] * 5] * 2)),
    "that restart unseparated": (torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2), None),
    "with padding": (torch.arange(9).repeat(2, 1), torch.tensor([[0] * 7 + [-1] * 2] * 2)),
}


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("reach", [AttentionPattern(), AttentionPattern(window=3), AttentionPattern(causal=False)])
@pytest.mark.parametrize("rows", TRAINED)
def test_what_training_asks_of_the_fused_kernel_is_what_the_reference_says(rows, reach, heads):
    """The gradient too, where no mask is handed over and where one is made for all layers."""
    positions, documents = TRAINED[rows]
    mark = TokenPositions(positions, documents)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    given = drawn(2, 9, heads[0], 8), drawn(2, heads[1], 9, 8), drawn(2, heads[1], 9, 8)
    wanted = drawn(2, 9, heads[0], 8).detach()
    reading = AttentionMask(mark, mark, reach)
    assert reading.is_plain_causal == (reach == AttentionPattern() and rows in ("whole rows", "that begin late"))
    score = AttentionParams(scale=8**-0.5)
    answers = [dot_product_attention(*given, reading, score, kernel=kernel).out for kernel in ("sdpa", "reference")]
    gradients = [torch.autograd.grad((answer * wanted).sum(), given) for answer in answers]
    assert (answers[0] - answers[1]).abs().max() <= 1e-12
    for fused, exact in zip(*gradients, strict=True):
        assert (fused - exact).abs().max() <= 1e-12


def test_without_a_gradient_the_mask_is_handed_over_as_before(monkeypatch):
    """The bits of inference do not depend on what training is spared."""
    seen: list[tuple[Tensor | None, bool]] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def watched(*given: Any, **named: Any) -> Tensor:
        seen.append((named["attn_mask"], named["is_causal"]))
        return real(*given, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    mark = TokenPositions(torch.arange(9).repeat(2, 1))
    reading, score = AttentionMask(mark, mark, AttentionPattern()), AttentionParams(scale=8**-0.5)
    given = [torch.randn(*shape, requires_grad=True) for shape in ((2, 9, 4, 8), (2, 4, 9, 8), (2, 4, 9, 8))]
    dot_product_attention(*given, reading, score)
    with torch.no_grad():
        dot_product_attention(*given, reading, score)
    (learning, causal), (judging, masked) = seen
    assert learning is None and causal
    assert judging is not None and judging.dtype == torch.bool and not masked
