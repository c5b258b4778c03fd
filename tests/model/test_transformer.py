"""The Transformer: parameter names, initialization, and independence of sequences and documents."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvad.config import layers as cfg
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


def step_of(rows: list[Tensor], sub_batches: list[SubBatch], **more: Any) -> ModelInput:
    tokens = torch.cat(rows)
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    fixed = {"seq_lens": torch.full_like(tokens, LIMIT), **more}
    return ModelInput(tokens, positions, tuple(sub_batches), torch.arange(len(tokens)), **fixed)


def logits(model: Transformer, step: ModelInput) -> Tensor:
    return model.logits(model(step, NoCache(model.config)), step.logit_indices)


def solo_logits(model: Transformer, row: Tensor) -> Tensor:
    return logits(model, step_of([row], [SubBatch(1, len(row), len(row))]))


# ---------------------------------------------------------------- names

DOCUMENTED = re.compile(
    r"embedding\.tokens\.weight|embedding\.positions\.weight|embedding\.norm\.(weight|bias)"
    r"|decoder\.layers\.\d+\.attention\.([qkv]|out)\.(weight|bias)"
    r"|decoder\.layers\.\d+\.attention\.((q|kv)_(down|up)\.(weight|bias)|(q|kv)_norm\.(weight|bias))"
    r"|decoder\.layers\.\d+\.attention\.([qk]_norm\.(weight|bias)|sink_logits|relative_bias)"
    r"|decoder\.layers\.\d+\.mlp\.(up|gate|down)\.(weight|bias)"
    r"|decoder\.layers\.\d+\.norm[12](_after)?\.(weight|bias)"
    r"|decoder\.relative_bias\.\w+|decoder\.norm\.(weight|bias)|head\.weight|head\.bias"
)


def expected_names(config: ModelConfig) -> set[str]:
    """Derive the names in the module's docstring from the config."""

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
        if mixer.latent is None:
            for letter in "qkv":
                names |= linear(f"{at}.attention.{letter}", mixer.qkv_bias)
        else:
            for part in ("q", "kv"):
                names |= linear(f"{at}.attention.{part}_down", mixer.qkv_bias) | linear(
                    f"{at}.attention.{part}_up", False
                )
                names |= norm(f"{at}.attention.{part}_norm", layer.norm)
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


def unusual_config() -> ModelConfig:
    """Two kinds in a pattern of three, q/k norms with biases over the whole projection, no final norm, separate
    tables.
    """
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


CONFIGS = {case_id(case): model_config(**case) for case in CASES} | {"awkward": unusual_config()}


@pytest.mark.parametrize("name", CONFIGS)
def test_state_dict_has_the_documented_names(name: str) -> None:
    names = set(Transformer(CONFIGS[name]).state_dict())
    assert names == expected_names(CONFIGS[name])
    assert all(DOCUMENTED.fullmatch(n) for n in names)


def test_docstring_lists_these_names() -> None:
    written = transformer.__doc__ or ""
    for word in (
        "embedding.tokens.weight  [.positions.weight]  [.token_types.weight]  [.norm.*]",
        "{q,k,v,out}.{weight,bias}",
        "decoder.layers.{i}.attention.{q_down,q_up,kv_down,kv_up,out}.{weight,bias}  .{q,kv}_norm.weight",
    ):
        assert word in written
    for word in (
        "decoder.layers.{i}.attention.{q,k,v,out}.{weight,bias}  .{q,k}_norm.weight  .sink_logits  .relative_bias",
        "decoder.relative_bias.{type}",
        "[head.weight]  [head.bias]",
    ):
        assert word in written


# ---------------------------------------------------------------- initialization


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


def test_equal_seeds_give_equal_models() -> None:
    built = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        built.append(Transformer(unusual_config()).state_dict())
    assert all(torch.equal(built[0][n], built[1][n]) for n in built[0])
    assert not torch.equal(built[0]["embedding.tokens.weight"], built[2]["embedding.tokens.weight"])


@pytest.mark.parametrize("name", ["awkward", *list(CONFIGS)[::10]])
def test_model_on_meta_device_is_complete_after_loading(name: str) -> None:
    """No buffer stays on meta, nothing is allocated before the weights are loaded, and no random number is drawn."""
    first = build(CONFIGS[name])
    state = torch.get_rng_state()
    with torch.device("meta"):
        second = Transformer(CONFIGS[name])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.is_meta for parameter in second.parameters())
    second.load_state_dict(first.state_dict(), assign=True)
    assert not [n for n, t in [*second.named_parameters(), *second.named_buffers()] if t.is_meta]
    with torch.no_grad():
        assert torch.equal(solo_logits(second.eval(), text(9)), solo_logits(first, text(9)))


def test_model_can_be_trained_after_generation() -> None:
    """Tables created in inference mode do not break a backward pass; every parameter is used."""
    for config in (*(model_config(p) for p in POSITIONS), *(model_config(heads=h) for h in HEADS), unusual_config()):
        model = build(config)
        with torch.inference_mode():
            expected = solo_logits(model, text(9)).clone()
        out = solo_logits(model, text(9))
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        out.square().sum().backward()
        assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in model.parameters())


# ---------------------------------------------------------------- isolation of sequences and documents


@pytest.mark.parametrize("name", [*list(CONFIGS)[::2], "awkward"])
@torch.inference_mode()
def test_sub_batches_equal_solo_runs(name: str) -> None:
    """T = 2 * 5 + 1 * 11 + 3 * 1 tokens in three sub-batches."""
    model, sub_batches = build(CONFIGS[name]), [SubBatch(2, 5, 5), SubBatch(1, 11, 11), SubBatch(3, 1, 1)]
    rows = [
        text(sub_batch.num_new_tokens, seed)
        for seed, sub_batch in enumerate(sub_batch for sub_batch in sub_batches for _ in range(sub_batch.num_seqs))
    ]
    together = logits(model, step_of(rows, sub_batches))
    expected = torch.cat([solo_logits(model, row) for row in rows])
    torch.testing.assert_close(together, expected, rtol=0, atol=1e-12)
    assert float(expected.std()) > 0.1


@pytest.mark.parametrize("name", [*list(CONFIGS)[::4], "awkward"])
def test_packed_documents_equal_solo_runs_with_gradients(name: str) -> None:
    """Two packed rows of three and two documents; positions restart in each document."""
    model, lengths = build(CONFIGS[name]), [[4, 1, 7], [3, 9]]
    documents = [text(n, seed) for seed, n in enumerate(n for row in lengths for n in row)]
    number = torch.tensor([i for row in lengths for i, n in enumerate(row) for _ in range(n)])
    step = step_of(documents, [SubBatch(2, 12, 12)], document_ids=number)
    weight = torch.randn(24, VOCAB, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    packed = logits(model, step)
    parts = torch.cat([solo_logits(model, document) for document in documents])
    torch.testing.assert_close(packed, parts, rtol=0, atol=1e-12)
    names, parameters = zip(*model.named_parameters(), strict=True)
    packed_gradients = torch.autograd.grad((packed * weight).sum(), parameters)
    solo_gradients = torch.autograd.grad((parts * weight).sum(), parameters)
    for parameter, a, b in zip(names, packed_gradients, solo_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=parameter)
    mixed = logits(model, step._replace(document_ids=None))  # without isolation the documents attend to each other
    assert float((mixed - parts).abs().max()) > 1e-3


@pytest.mark.parametrize("name", [name for name in CONFIGS if "window" not in name][::4])
@torch.inference_mode()
def test_later_tokens_do_not_change_earlier_logits(name: str) -> None:
    model, row = build(CONFIGS[name]), text(14)
    other = row.clone()
    other[9] = (other[9] + 1) % VOCAB
    before, after = solo_logits(model, row), solo_logits(model, other)
    torch.testing.assert_close(before[:9], after[:9], rtol=0, atol=1e-12)
    assert float((before[9:] - after[9:]).abs().amax(-1).min()) > 1e-6


@torch.inference_mode()
def test_window_layers_limit_visibility() -> None:
    """Two layers of window 7 extend over 12 positions; one layer without a window extends over all."""
    row = text(40)
    other = row.clone()
    other[5] = (other[5] + 1) % VOCAB
    windowed, mixed = build(model_config(heads="window")), build(model_config(heads="window-mix"))
    change = (solo_logits(windowed, row) - solo_logits(windowed, other)).abs().amax(-1)
    assert bool((change[5:18] > 1e-9).all()) and bool((change[18:] < 1e-12).all()) and bool((change[:5] == 0).all())
    assert bool(((solo_logits(mixed, row) - solo_logits(mixed, other)).abs().amax(-1)[5:] > 1e-9).all())


def test_only_requested_logits_are_computed() -> None:
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
def test_bidirectional_order_depends_on_positions_only() -> None:
    row, order = text(11), torch.randperm(11, generator=torch.Generator().manual_seed(1))
    model = bidirectional()
    torch.testing.assert_close(solo_logits(model, row[order]), solo_logits(model, row)[order], rtol=0, atol=1e-12)
    for name, encoding in ENCODINGS.items():
        model = bidirectional(**encoding)
        assert float((solo_logits(model, row[order]) - solo_logits(model, row)[order]).abs().max()) > 1e-3, name


def test_a_model_is_built_to_be_loaded_without_a_compiler() -> None:
    """A few functions of tensors on the meta device import torch._dynamo, which takes seconds."""
    program = """
import sys, torch
from kvad.model.transformer import Transformer
from tests.support.random_models import HEADS, STATES, model_config
with torch.device("meta"):
    for heads in (*HEADS, *STATES):
        Transformer(model_config(heads=heads))
print("torch._dynamo" in sys.modules)
"""
    command, folder = [sys.executable, "-c", program], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "False\n"
