"""The Transformer as a whole: its names, its beginnings, and that rows, lanes and documents never meet."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from kvad import config as cfg
from kvad.config.model import ModelConfig
from kvad.model import transformer
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.model_input import ModelInput, SubBatch
from tests.support.covering_array import Case, pairwise
from tests.support.random_models import HEADS, LIMIT, NORMS, POSITIONS, VOCAB, build, model_config

CASES = pairwise({"position": POSITIONS, "norm": NORMS, "heads": HEADS})


def case_id(case: Case) -> str:
    return "-".join(case.values())


def text(length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def step_of(rows: list[Tensor], lanes: list[SubBatch], **more: Any) -> ModelInput:
    tokens = torch.cat(rows)
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    fixed = {"max_seq_lens": torch.full_like(tokens, LIMIT), **more}
    return ModelInput(tokens, positions, tuple(lanes), torch.arange(len(tokens)), **fixed)


def logits(model: Transformer, step: ModelInput) -> Tensor:
    return model.logits(model(step, NoCache(model.config)), step.logit_indices)


def alone(model: Transformer, row: Tensor) -> Tensor:
    return logits(model, step_of([row], [SubBatch(1, len(row), len(row))]))


# ---------------------------------------------------------------- names

DOCUMENTED = re.compile(
    r"embedding\.tokens\.weight|embedding\.positions\.weight|embedding\.norm\.(weight|bias)"
    r"|decoder\.layers\.\d+\.attention\.([qkv]|out)\.(weight|bias)"
    r"|decoder\.layers\.\d+\.attention\.([qk]_norm\.(weight|bias)|sink_logits|relative_bias)"
    r"|decoder\.layers\.\d+\.mlp\.(up|gate|down)\.(weight|bias)"
    r"|decoder\.layers\.\d+\.norm[12](_after)?\.(weight|bias)"
    r"|decoder\.relative_bias\.\w+|decoder\.norm\.(weight|bias)|head\.weight|head\.bias"
)


def expected_names(config: ModelConfig) -> set[str]:
    """The module's docstring, spelled out from the config."""

    def norm(name: str, spec: cfg.NormConfig) -> set[str]:
        return {f"{name}.weight"} | ({f"{name}.bias"} if spec.bias else set())

    def linear(name: str, bias: bool) -> set[str]:
        return {f"{name}.weight"} | ({f"{name}.bias"} if bias else set())

    names = {"embedding.tokens.weight"}
    names |= (
        {"embedding.positions.weight"} if isinstance(config.embedding.position, cfg.LearnedPositionsConfig) else set()
    )
    names |= norm("embedding.norm", config.embedding.norm) if config.embedding.norm else set()
    stack = config.decoder
    for i in range(stack.num_layers):
        at, layer = f"decoder.layers.{i}", stack.layer_config(i)
        mixer, mlp = layer.attention, layer.mlp
        for letter in "qkv":
            names |= linear(f"{at}.attention.{letter}", mixer.qkv_bias)
        names |= linear(f"{at}.attention.out", mixer.out_bias)
        if mixer.qk_norm != "none":
            names |= norm(f"{at}.attention.q_norm", layer.norm) | norm(f"{at}.attention.k_norm", layer.norm)
        names |= {f"{at}.attention.sink_logits"} if mixer.sink_logits else set()
        if isinstance(mixer.position, cfg.T5BiasConfig):
            own = f"{at}.attention.relative_bias"
            names.add(f"decoder.relative_bias.{stack.layer_type(i)}" if mixer.position.shared else own)
        for part in ("up", "down", *(["gate"] if isinstance(mlp, cfg.GatedMLPConfig) else [])):
            names |= linear(f"{at}.mlp.{part}", mlp.bias)
        places = {"parallel": ["norm1"], "sandwich": ["norm1", "norm2", "norm1_after", "norm2_after"]}
        for place in places.get(stack.norm_position, ["norm1", "norm2"]):
            names |= norm(f"{at}.{place}", layer.norm)
    if stack.final_norm:
        names |= norm("decoder.norm", stack.layer_config(stack.num_layers - 1).norm)
    names |= {"head.weight"} if not config.tie_embeddings else set()
    return names | ({"head.bias"} if config.head.bias else set())


def awkward() -> ModelConfig:
    """Two kinds in a pattern of three, q/k norms with biases over the whole projection, no final norm, a table each."""
    norm = cfg.NormConfig("layer", bias=True)
    local = cfg.AttentionConfig(
        6, 3, 8, 5, cfg.T5BiasConfig(8, 20, shared=False), window=5, qk_norm="full", sink_logits=True
    )
    globe = cfg.AttentionConfig(4, 1, 10, position=cfg.T5BiasConfig(8, 20), qkv_bias=True, softmax_scale="none")
    kinds = {
        "L": cfg.LayerConfig(local, cfg.GatedMLPConfig(40), norm),
        "G": cfg.LayerConfig(globe, cfg.PlainMLPConfig(30, bias=True), norm),
    }
    stack = cfg.StackConfig(5, kinds, "LLG", norm_position="sandwich", final_norm=False)
    head = cfg.LanguageHeadConfig(bias=True, logit_softcap=5.0)
    return ModelConfig(
        24, VOCAB, LIMIT, stack, embedding=cfg.EmbeddingConfig(norm=norm, scale=2.0), head=head, tie_embeddings=False
    )


CONFIGS = {case_id(case): model_config(**case) for case in CASES} | {"awkward": awkward()}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_state_dict_holds_exactly_the_documented_names(name: str) -> None:
    names = set(Transformer(CONFIGS[name]).state_dict())
    assert names == expected_names(CONFIGS[name])
    assert all(DOCUMENTED.fullmatch(n) for n in names)


def test_the_docstring_lists_these_names() -> None:
    written = transformer.__doc__ or ""
    for word in (
        "embedding.tokens.weight  [.positions.weight]  [.token_types.weight]  [.norm.*]",
        "{q,k,v,out}.{weight,bias}",
    ):
        assert word in written
    for word in (
        "decoder.layers.{i}.attention.{q,k,v,out}.{weight,bias}  .{q,k}_norm.weight  .sink_logits  .relative_bias",
        "decoder.relative_bias.{type}",
        "[head.weight]  [head.bias]",
    ):
        assert word in written


# ---------------------------------------------------------------- beginnings


def test_initial_statistics() -> None:
    """normal(0, 0.02), residual outputs / sqrt(2 layers), norms the identity, biases and sinks zero."""
    layers = 6
    mixer = cfg.AttentionConfig(8, position=cfg.T5BiasConfig(), qkv_bias=True, out_bias=True, sink_logits=True)
    kinds = {"L": cfg.LayerConfig(mixer, cfg.GatedMLPConfig(256, bias=True), cfg.NormConfig("layer", bias=True))}
    torch.manual_seed(0)
    config = ModelConfig(
        128,
        300,
        64,
        cfg.StackConfig(layers, kinds),
        embedding=cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(64)),
        tie_embeddings=False,
    )
    for name, parameter in Transformer(config).named_parameters():
        if name.endswith("bias") or "sink" in name:
            assert bool((parameter == 0).all()), name
        elif "norm" in name:
            assert bool((parameter == 1).all()), name
        else:
            std = 0.02 / math.sqrt(2 * layers) if re.search(r"attention\.out|mlp\.down", name) else 0.02
            slack = 5 / math.sqrt(2 * parameter.numel())  # five standard errors of a standard deviation
            assert float(parameter.detach().std()) == pytest.approx(std, rel=slack), name
            assert abs(float(parameter.detach().mean())) < 5 * std / math.sqrt(parameter.numel()), name


def test_the_same_seed_gives_the_same_model() -> None:
    made = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        made.append(Transformer(awkward()).state_dict())
    assert all(torch.equal(made[0][n], made[1][n]) for n in made[0])
    assert not torch.equal(made[0]["embedding.tokens.weight"], made[2]["embedding.tokens.weight"])


@pytest.mark.parametrize("name", ["awkward", *list(CONFIGS)[::10]])
def test_a_model_made_on_meta_is_whole_once_loaded(name: str) -> None:
    """No buffer is left behind on meta, nothing is allocated before the weights come, and nothing is drawn."""
    first = build(CONFIGS[name])
    state = torch.get_rng_state()
    with torch.device("meta"):
        second = Transformer(CONFIGS[name])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.is_meta for parameter in second.parameters())
    second.load_state_dict(first.state_dict(), assign=True)
    assert not [n for n, t in [*second.named_parameters(), *second.named_buffers()] if t.is_meta]
    with torch.no_grad():
        assert torch.equal(alone(second.eval(), text(9)), alone(first, text(9)))


def test_a_model_that_generated_can_still_be_trained() -> None:
    """Tables made and kept in inference mode must not poison a backward pass; and every parameter is used."""
    for config in (*(model_config(p) for p in POSITIONS), *(model_config(heads=h) for h in HEADS), awkward()):
        model = build(config)
        with torch.inference_mode():
            expected = alone(model, text(9)).clone()
        out = alone(model, text(9))
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        out.square().sum().backward()
        assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in model.parameters())


# ---------------------------------------------------------------- rows and documents never meet


@pytest.mark.parametrize("name", [*list(CONFIGS)[::2], "awkward"])
@torch.inference_mode()
def test_rows_in_lanes_equal_each_alone(name: str) -> None:
    """T = 2 * 5 + 1 * 11 + 3 * 1 tokens in three lanes."""
    model, lanes = build(CONFIGS[name]), [SubBatch(2, 5, 5), SubBatch(1, 11, 11), SubBatch(3, 1, 1)]
    rows = [
        text(lane.num_new_tokens, seed)
        for seed, lane in enumerate(lane for lane in lanes for _ in range(lane.num_seqs))
    ]
    together = logits(model, step_of(rows, lanes))
    expected = torch.cat([alone(model, row) for row in rows])
    torch.testing.assert_close(together, expected, rtol=0, atol=1e-12)
    assert float(expected.std()) > 0.1


@pytest.mark.parametrize("name", [*list(CONFIGS)[::4], "awkward"])
def test_packed_documents_equal_each_alone_in_logits_and_gradients(name: str) -> None:
    """Two packed rows of three and two documents; positions start anew with each document."""
    model, lengths = build(CONFIGS[name]), [[4, 1, 7], [3, 9]]
    documents = [text(n, seed) for seed, n in enumerate(n for row in lengths for n in row)]
    number = torch.tensor([i for row in lengths for i, n in enumerate(row) for _ in range(n)])
    step = step_of(documents, [SubBatch(2, 12, 12)], document_ids=number)
    weight = torch.randn(24, VOCAB, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    packed = logits(model, step)
    parts = torch.cat([alone(model, document) for document in documents])
    torch.testing.assert_close(packed, parts, rtol=0, atol=1e-12)
    names, parameters = zip(*model.named_parameters(), strict=True)
    ours = torch.autograd.grad((packed * weight).sum(), parameters)
    theirs = torch.autograd.grad((parts * weight).sum(), parameters)
    for parameter, a, b in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=parameter)
    mixed = logits(model, step._replace(document_ids=None))  # without the isolation they do meet
    assert float((mixed - parts).abs().max()) > 1e-3


@pytest.mark.parametrize("name", [name for name in CONFIGS if "window" not in name][::4])
@torch.inference_mode()
def test_what_comes_later_changes_nothing_before(name: str) -> None:
    model, row = build(CONFIGS[name]), text(14)
    other = row.clone()
    other[9] = (other[9] + 1) % VOCAB
    before, after = alone(model, row), alone(model, other)
    torch.testing.assert_close(before[:9], after[:9], rtol=0, atol=1e-12)
    assert float((before[9:] - after[9:]).abs().amax(-1).min()) > 1e-6


@torch.inference_mode()
def test_a_window_forgets_and_the_pattern_says_where() -> None:
    """Two layers of window 7 reach back 12 positions; with one layer that sees all, everything is seen."""
    row = text(40)
    other = row.clone()
    other[5] = (other[5] + 1) % VOCAB
    windowed, mixed = build(model_config(heads="window")), build(model_config(heads="window-mix"))
    change = (alone(windowed, row) - alone(windowed, other)).abs().amax(-1)
    assert bool((change[5:18] > 1e-9).all()) and bool((change[18:] < 1e-12).all()) and bool((change[:5] == 0).all())
    assert bool(((alone(mixed, row) - alone(mixed, other)).abs().amax(-1)[5:] > 1e-9).all())


def test_only_wanted_logits_are_made() -> None:
    model, row = build(model_config()), text(9)
    step = step_of([row], [SubBatch(1, 9, 9)])
    with torch.no_grad():
        hidden = model(step, NoCache(model.config))
        some = model.logits(hidden, torch.tensor([8, 2, 2]))
        torch.testing.assert_close(some, model.logits(hidden, step.logit_indices)[[8, 2, 2]], rtol=0, atol=1e-12)
        assert model.logits(hidden, torch.tensor([], dtype=torch.long)).shape == (0, VOCAB)


# ---------------------------------------------------------------- order


def bidirectional(position: Any = None, absolute: Any = None) -> Transformer:
    mixer = cfg.AttentionConfig(6, 3, 8, position=position, causal=False)
    stack = cfg.StackConfig(3, {"L": cfg.LayerConfig(mixer, cfg.GatedMLPConfig(40))})
    return build(ModelConfig(24, VOCAB, LIMIT, stack, embedding=cfg.EmbeddingConfig(absolute)))


ENCODINGS: dict[str, dict[str, Any]] = {
    "rope": {"position": cfg.RopeConfig(100.0)},
    "alibi": {"position": cfg.AlibiConfig()},
    "t5": {"position": cfg.T5BiasConfig(8, 20, bidirectional=True)},
    "learned": {"absolute": cfg.LearnedPositionsConfig(LIMIT)},
    "sinusoidal": {"absolute": cfg.SinusoidalPositionsConfig()},
}


@torch.inference_mode()
def test_only_positions_tell_a_bidirectional_stack_the_order() -> None:
    row, order = text(11), torch.randperm(11, generator=torch.Generator().manual_seed(1))
    model = bidirectional()
    torch.testing.assert_close(alone(model, row[order]), alone(model, row)[order], rtol=0, atol=1e-12)
    for name, encoding in ENCODINGS.items():
        model = bidirectional(**encoding)
        assert float((alone(model, row[order]) - alone(model, row)[order]).abs().max()) > 1e-3, name
