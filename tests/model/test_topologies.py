"""Encoders and encoder-decoders compared with a NumPy Transformer in float64, with random parameters.

No library has classes for ALiBi and RoPE in an encoder-decoder, T5's biases in a decoder-only model, or windows in an
encoder; each is one config option here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvad.config import layers as cfg
from kvad.config.model import ModelConfig
from kvad.model import transformer
from kvad.model.lora import adapter_factors, add_adapters, merge_weight
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.model_input import ModelInput, SubBatch
from tests.support.covering_array import Case, pairwise
from tests.support.numpy_reference import Reference
from tests.support.random_models import HEADS, SOURCE_VOCAB, VOCAB, build, encoder_config, model_config, pair_config

EXACT = 1e-10
POSITIONS = ("none", "learned", "sinusoidal", "rope", "rope-partial", "alibi", "t5", "t5-each")
PLACES = ("pre", "post", "sandwich", "after", "normed", "parallel", "parallel_pair")
FORMS = ("interleaved", "concat", "fairseq")
MLPS = ("plain", "gated", "experts", "experts-gpt-oss", "experts-deepseek")
SOURCE, TARGET = [7, 3, 12, 40, 5, 0, 33, 21, 9, 9, 2, 17, 8], [11, 60, 2, 45, 45, 1, 66, 30, 4]


@pytest.fixture(autouse=True)
def double_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kvad compute angles in float64; given float64 frequencies it otherwise uses float32."""
    real = transformer.rope_frequencies
    monkeypatch.setattr(transformer, "rope_frequencies", lambda *given: real(*given).double())


# ---------------------------------------------------------------- models


def mlp_of(name: str) -> cfg.PlainMLPConfig | cfg.GatedMLPConfig | cfg.MoEConfig:
    if name == "experts":
        return cfg.MoEConfig(20, 5, 2, "gelu_tanh", router_bias=True)
    if name == "experts-gpt-oss":
        return cfg.MoEConfig(20, 4, 3, bias=True, swiglu_alpha=1.7, swiglu_limit=1.0)
    if name == "experts-deepseek":
        groups = {"num_groups": 3, "num_groups_per_token": 2}
        router = {"router": "sigmoid", "selection_bias": True, "routed_scale": 1.5, **groups}
        return cfg.MoEConfig(20, 6, 3, **router, bias=True, shared_size=12, shared_gate=True)
    return (
        cfg.PlainMLPConfig(40, "relu2", bias=True)
        if name == "plain"
        else cfg.GatedMLPConfig(40, "quick_gelu", bias=True)
    )


def with_axes(config: ModelConfig, case: Case) -> ModelConfig:
    """Set the axes that ``tests.support.random_models`` lacks, in every stack; RoPE frequencies are powers of two."""

    def position(old: Any) -> Any:
        if isinstance(old, cfg.RopeConfig):
            scaling = cfg.LinearScalingConfig(2.0) if case["position"] == "rope-partial" else None
            return replace(old, theta=16.0, scaling=scaling)
        return replace(old, shared=case["position"] == "t5") if isinstance(old, cfg.T5BiasConfig) else old

    def stack(old: cfg.StackConfig | None, where: str) -> cfg.StackConfig | None:
        if old is None:
            return None
        kinds = {}
        for letter, layer in old.layer_types.items():
            mixer = replace(layer.attention, position=position(layer.attention.position))
            kinds[letter] = replace(layer, attention=mixer, mlp=mlp_of(case["mlp"]))
        crossed = where == "decoder" and config.encoder is not None
        place = case["norm"] if not crossed or case["norm"] in ("pre", "post", "sandwich") else old.norm_position
        return replace(old, layer_types=kinds, norm_position=place, residual_scale=0.7)

    config = replace(config, decoder=stack(config.decoder, "decoder"), encoder=stack(config.encoder, "encoder"))
    if case["position"] != "sinusoidal":
        return config
    form = FORMS[len(case["norm"]) % 3]  # any of them
    config = replace(config, embedding=cfg.EmbeddingConfig(cfg.SinusoidalPositionsConfig(form=form, offset=2)))  # type: ignore[arg-type]
    if config.encoder_input is None:
        return config
    embed = replace(config.encoder_input.embedding, position=cfg.SinusoidalPositionsConfig(form=form))  # type: ignore[arg-type]
    return replace(config, encoder_input=replace(config.encoder_input, embedding=embed))


def named(position: str) -> str:
    return "t5" if position == "t5-each" else position


def reference(model: Transformer) -> Reference:
    return Reference(model.config.to_dict(), {name: x.detach().numpy() for name, x in model.named_parameters()})


# ---------------------------------------------------------------- steps


def build_step(
    rows: Sequence[Sequence[int]], source: ModelInput | None = None, sub_batches: Sequence[SubBatch] | None = None
) -> ModelInput:
    """Build sequences of any length, each in a separate sub-batch by default."""
    tokens = torch.tensor([token for row in rows for token in row])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    sub_batches = [SubBatch(1, len(row), len(row)) for row in rows] if sub_batches is None else sub_batches
    return ModelInput(tokens, positions, tuple(sub_batches), torch.arange(len(tokens)), encoder_input=source)


def output_of(model: Transformer, target: Sequence[int], source: Sequence[int] | None = None) -> Tensor:
    step = build_step([target], None if source is None else build_step([source]))
    return model.logits(model(step, NoCache(model.config)), step.logit_indices)


def difference(own: Tensor, reference_model: np.ndarray) -> float:
    assert tuple(own.shape) == reference_model.shape
    return float(np.abs(own.detach().numpy() - reference_model).max())


# ---------------------------------------------------------------- against NumPy

AXES = {"position": POSITIONS, "norm": PLACES, "heads": HEADS, "mlp": MLPS}
ENCODERS = pairwise(AXES)
DECODERS = [case for case in pairwise(AXES, seed=1) if case["position"].startswith(("t5", "alibi", "rope"))][:24]
PAIRS = pairwise(AXES | {"norm": ("pre", "post", "sandwich", "after"), "vocab": ("shared", "own")}, seed=2)


def case_id(case: Case) -> str:
    return "-".join(case.values())


@pytest.mark.parametrize("case", ENCODERS, ids=case_id)
def test_encoder_equals_reference(case: Case) -> None:
    model = build(with_axes(encoder_config(named(case["position"]), case["norm"], case["heads"]), case))
    assert difference(output_of(model, SOURCE), reference(model).logits(SOURCE)) <= EXACT


@pytest.mark.parametrize("case", DECODERS, ids=case_id)
def test_decoder_equals_reference(case: Case) -> None:
    model = build(with_axes(model_config(named(case["position"]), case["norm"], case["heads"]), case))
    assert difference(output_of(model, SOURCE), reference(model).logits(SOURCE)) <= EXACT


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", PAIRS, ids=case_id)
def test_encoder_decoder_equals_reference(case: Case) -> None:
    config = pair_config(named(case["position"]), case["norm"], case["heads"], own=case["vocab"] == "own")
    model = build(with_axes(config, case))
    reference_model = reference(model)
    with torch.no_grad():
        assert difference(model.encode(build_step([SOURCE])), reference_model.encode(SOURCE)) <= EXACT
    assert difference(output_of(model, TARGET, SOURCE), reference_model.logits(TARGET, SOURCE)) <= EXACT


def test_an_adapter_of_the_absorbed_matrix_equals_the_merged_weight() -> None:
    model, name = build(model_config(heads="latent")), "decoder.layers.1.attention.kv_up"
    before, whole = output_of(model, TARGET).detach(), dict(model.state_dict())
    add_adapters(model, [name], 2, 0.5)
    (factors,) = adapter_factors(model).values()
    factors.b.copy_(torch.randn(factors.b.shape, generator=torch.Generator().manual_seed(1)))
    merged = build(model_config(heads="latent"))
    merged.load_state_dict({**whole, f"{name}.weight": merge_weight(whole[f"{name}.weight"], factors)})
    adapted, expected = output_of(model, TARGET).detach(), output_of(merged, TARGET).detach()
    assert float((adapted - expected).abs().max()) <= EXACT and float((adapted - before).abs().max()) > 1e-3


def test_queries_keys_and_values_are_clipped() -> None:
    """In self-attention and in cross-attention, at half of their size."""
    case = {"position": "rope", "norm": "pre", "heads": "gqa", "mlp": "gated"}
    config, outputs = with_axes(pair_config("rope", "pre", "gqa"), case), []
    assert config.decoder is not None
    for clip, cross_clip in ((None, None), (None, 0.3), (0.3, None), (0.3, 0.3)):
        kinds = {}
        for letter, layer in config.decoder.layer_types.items():
            assert layer.cross_attention is not None
            cross = replace(layer.cross_attention, clip_qkv=cross_clip)
            kinds[letter] = replace(layer, attention=replace(layer.attention, clip_qkv=clip), cross_attention=cross)
        model = build(replace(config, decoder=replace(config.decoder, layer_types=kinds)))
        outputs.append(reference(model).logits(TARGET, SOURCE))
        assert difference(output_of(model, TARGET, SOURCE), outputs[-1]) <= EXACT
    assert all(np.abs(outputs[0] - other).max() > 1e-3 for other in outputs[1:])


@pytest.mark.parametrize("position", POSITIONS)
def test_every_parameter_affects_the_output(position: str) -> None:
    """Each parameter except a key's bias, slightly changed, changes the output: neither side ignores one."""
    case = {"position": position, "norm": "pre", "heads": "sinks", "mlp": "gated"}
    model = build(with_axes(pair_config(named(position), "pre", "sinks", own=True), case))
    expected = reference(model).logits(TARGET, SOURCE)
    for name, parameter in model.named_parameters():
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter.mul_(1.01).add_(1e-3)
            assert difference(output_of(model, TARGET, SOURCE), expected) > 1e-8, name
            parameter.copy_(before)


@pytest.mark.parametrize("embed", ["segments", "width-end", "width-start", "norm-first"])
def test_embeddings_of_encoders(embed: str) -> None:
    norm = cfg.NormConfig("layer", bias=True)
    spec = {
        "segments": cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(96), norm=norm, num_token_types=2),
        "width-end": cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(96), embedding_size=10, norm=norm),
        "width-start": cfg.EmbeddingConfig(
            cfg.LearnedPositionsConfig(96), embedding_size=10, norm=norm, projection="start", scale=3.0
        ),
        "norm-first": cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(96), norm=norm, norm_first=True, scale=3.0),
    }[embed]
    model = build(replace(encoder_config("none", "post", "mha"), embedding=spec, tie_embeddings=False))
    segments = [0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 1] if embed == "segments" else None
    reference_model = reference(model)
    step = build_step([SOURCE])._replace(token_type_ids=None if segments is None else torch.tensor(segments))
    with torch.no_grad():
        assert difference(model.encode(step), reference_model.encode(SOURCE, segments)) <= EXACT
        assert difference(output_of(model, SOURCE), reference_model.logits(SOURCE)) <= EXACT  # segment 0 is the default


# ---------------------------------------------------------------- heads

TRANSFORM = cfg.HeadTransformConfig("tanh", norm=cfg.NormConfig("layer", bias=True), output_size=15)
ROW_HEADS: dict[str, cfg.ClassificationHeadConfig | cfg.PoolingHeadConfig] = {
    "classes-first": cfg.ClassificationHeadConfig(("a", "b", "c"), level="row", transform=TRANSFORM),
    "classes-mean": cfg.ClassificationHeadConfig(("a", "b"), level="row", pool="mean", bias=False),
    "pooled-first": cfg.PoolingHeadConfig("first", transform=cfg.HeadTransformConfig("tanh")),
    "pooled-mean": cfg.PoolingHeadConfig("mean"),
    "pooled-unit": cfg.PoolingHeadConfig(
        "mean", normalize=True, transform=cfg.HeadTransformConfig(None, bias=False, output_size=7)
    ),
}
TOKEN_HEADS: dict[str, cfg.LanguageHeadConfig | cfg.ClassificationHeadConfig] = {
    "language": cfg.LanguageHeadConfig(
        bias=True, logit_softcap=2.0, logit_scale=0.5, transform=replace(TRANSFORM, output_size=None)
    ),
    "tags": cfg.ClassificationHeadConfig(("x", "y", "z", "w")),
    "tags-transformed": cfg.ClassificationHeadConfig(("x", "y"), transform=TRANSFORM),
}
TEXTS = [SOURCE, SOURCE[:4], [9], SOURCE[5:11], SOURCE[2:6]]


@pytest.mark.parametrize("head", TOKEN_HEADS)
def test_token_heads(head: str) -> None:
    model = build(replace(encoder_config("alibi", "post", "gqa"), head=TOKEN_HEADS[head]))
    reference_model = reference(model)
    for text in TEXTS:
        assert difference(output_of(model, text), reference_model.logits(text)) <= EXACT


@pytest.mark.parametrize("head", ROW_HEADS)
def test_sequence_heads(head: str) -> None:
    """A batch of sequences of different lengths, two of them in one sub-batch."""
    model = build(replace(encoder_config("t5", "pre", "mqa"), head=ROW_HEADS[head]))
    reference_model = reference(model)
    rows = [TEXTS[1], TEXTS[4], TEXTS[0], TEXTS[2]]
    step = build_step(rows, sub_batches=[SubBatch(2, 4, 4), SubBatch(1, 13, 13), SubBatch(1, 1, 1)])
    own = model.pooled_outputs(model(step, NoCache(model.config)), step)
    expected = np.stack([reference_model.pooled_output(reference_model.encode(row)) for row in rows])
    assert difference(own, expected) <= EXACT
    if isinstance(model.config.head, cfg.PoolingHeadConfig) and model.config.head.normalize:
        torch.testing.assert_close(own.norm(dim=-1), torch.ones(4, dtype=torch.float64))


# ---------------------------------------------------------------- several sources and shared sources


def test_sources_of_several_sub_batches() -> None:
    """Three sub-batches (three sequences over one source, two over two, one) equal their solo runs."""
    model = build(pair_config("alibi", "sandwich", "gqa"))
    sources = [SOURCE, SOURCE[:5], SOURCE[8:], SOURCE[3:6]]
    targets = [TARGET, TARGET[::-1], TARGET[1:] + TARGET[:1], TARGET[:4], TARGET[2:6], TARGET[:7]]
    of = [0, 0, 0, 1, 2, 3]
    source = build_step(sources, sub_batches=[SubBatch(1, 13, 13), SubBatch(2, 5, 5), SubBatch(1, 3, 3)])
    step = build_step(targets, source, [SubBatch(3, 9, 9), SubBatch(2, 4, 4), SubBatch(1, 7, 7)])
    together = model.logits(model(step, NoCache(model.config)), step.logit_indices)
    start = 0
    for target, number in zip(targets, of, strict=True):
        solo = output_of(model, target, sources[number])
        assert (together[start : start + len(target)] - solo).abs().max() <= EXACT
        start += len(target)


@pytest.mark.parametrize("beams", [1, 2, 5])
def test_beams_share_their_source(beams: int) -> None:
    """With rows = sources * beams, row r reads source r // beams."""
    model = build(pair_config("rope", "post", "sinks", own=True))
    sources = [SOURCE, SOURCE[::-1]]
    targets = [[(token * (r + 1) + r) % VOCAB for token in TARGET] for r in range(2 * beams)]
    source = build_step(sources, sub_batches=[SubBatch(2, 13, 13)])
    step = build_step(targets, source, [SubBatch(2 * beams, 9, 9)])
    together = model.logits(model(step, NoCache(model.config)), step.logit_indices).view(2 * beams, 9, -1)
    for r, target in enumerate(targets):
        assert (together[r] - output_of(model, target, sources[r // beams])).abs().max() <= EXACT
        other = output_of(model, target, sources[1 - r // beams])
        assert (together[r] - other).abs().max() > 1e-3, "the sources differ"


def test_encoder_sequences_are_independent() -> None:
    model = build(encoder_config("rope", "pre", "window-mix"))
    step = build_step(TEXTS)
    together = model.logits(model(step, NoCache(model.config)), step.logit_indices)
    solo = torch.cat([output_of(model, text) for text in TEXTS])
    assert (together - solo).abs().max() <= EXACT


# ---------------------------------------------------------------- gradients


def loss_of(model: Transformer) -> Tensor:
    logits = output_of(model, TARGET[:-1], SOURCE)
    return torch.nn.functional.cross_entropy(logits, torch.tensor(TARGET[1:]))


@pytest.mark.parametrize("position", ["learned", "rope", "alibi", "t5"])
def test_decoder_loss_has_gradients_in_the_encoder(position: str) -> None:
    """Every parameter that the loss depends on gets a gradient, equal to finite differences."""
    model = build(pair_config(position, "pre", "gqa", own=True))
    loss_of(model).backward()
    missing = [name for name, x in model.named_parameters() if x.grad is None or not x.grad.abs().max() > 0]
    assert missing == []
    draw = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if not name.startswith(("source.", "encoder.")) and ".cross_attention." not in name:
            continue
        assert parameter.grad is not None
        flat, grad = parameter.data.view(-1), parameter.grad.view(-1)
        touched = grad.nonzero()[:, 0]
        at = int(touched[torch.randint(len(touched), (1,), generator=draw)])
        before, step = float(flat[at]), 1e-5
        losses = []
        for changed in (before + step, before - step):
            flat[at] = changed
            with torch.no_grad():
                losses.append(float(loss_of(model)))
        flat[at] = before
        numeric = (losses[0] - losses[1]) / (2 * step)
        assert abs(numeric - float(grad[at])) <= 1e-7 + 1e-5 * abs(numeric), name


def test_source_gradients_sum_over_sequences() -> None:
    """Two sequences over one source: their gradients add up."""
    model = build(pair_config("alibi", "post", "mha"))
    rows = [TARGET, TARGET[::-1]]

    def gradient(targets: Sequence[Sequence[int]]) -> Tensor:
        model.zero_grad()
        step = build_step(targets, build_step([SOURCE]), [SubBatch(len(targets), 9, 9)])
        model.logits(model(step, NoCache(model.config)), step.logit_indices).square().sum().backward()
        assert model.encoder is not None
        results = model.encoder.layers[0].attention.v.weight.grad
        assert isinstance(results, Tensor)
        return results.clone()

    together, apart_ = gradient(rows), gradient(rows[:1]) + gradient(rows[1:])
    assert (together - apart_).abs().max() <= 1e-9 * together.abs().max()


def test_source_tokens_use_the_source_vocabulary() -> None:
    model = build(pair_config("none", own=True))
    assert model.encoder_embedding is not None and model.encoder_embedding.tokens is not None
    assert model.encoder_embedding.tokens.weight.shape == (SOURCE_VOCAB, 30)
