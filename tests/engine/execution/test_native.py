"""The native CPU kernels against PyTorch, for every configuration of model and cache that they can compute."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvad import ops
from kvad.cache.config import CacheConfig
from kvad.config import layers as cfg
from kvad.config.model import ModelConfig
from kvad.engine.engine import Engine
from kvad.engine.options import EngineConfig
from kvad.engine.scheduling import SamplingParams
from kvad.model.layers import MixtureOfExperts
from kvad.model.transformer import Transformer
from kvad.ops.linear import Linear
from kvad.ops.native import library as native
from kvad.ops.quantized_linear import QuantizedLinear, quantize_matrix
from tests.model.test_topologies import MLPS, PLACES, case_id, named, with_axes
from tests.support.covering_array import Case, pairwise
from tests.support.random_models import HEADS, POSITIONS, VOCAB, build, model_config, pair_config

pytestmark = pytest.mark.skipif(native.load().library is None, reason=native.load().reason)
PROMPTS = [[11, 60, 2, 45, 45, 1, 66, 30, 4], [3], [5, 9, 8, 7], [21, 22, 23, 24, 25] * 8, [1, 2]]
SOURCES = [[7, 3, 12, 40, 5], [1], [0, 33, 21, 9, 9, 2, 17, 8] * 4, [4, 4, 5], [6, 7]]
CACHES: dict[str, dict[str, Any]] = {
    "paged": {"block_size": 4},
    "contiguous": {"layout": "contiguous"},
    "chunks": {"block_size": 16, "prefill_chunk_size": 7},
    "sinks": {"policy": "sinks(2, 12)", "block_size": 4},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "int8"},
    "int4": {"key_dtype": "int8", "value_dtype": "int4"},
    "fp8": {"key_dtype": "fp8-e4m3", "value_dtype": "fp8-e5m2"},
}
LOSSY = {"bfloat16": 0.02, "float16": 0.002, "int8": 0.02, "int4": 0.3, "fp8": 0.3}  # a rounding may go either way
AXES = {"position": POSITIONS, "norm": PLACES, "heads": HEADS, "mlp": MLPS, "cache": tuple(CACHES)}
CASES = pairwise(AXES, seed=5)
PAIRS = pairwise(AXES | {"norm": ("pre", "post", "sandwich"), "cache": ("paged", "contiguous", "bfloat16")}, seed=6)


def logits_of_steps(
    model: Transformer, cache: dict[str, Any], *, native: bool = True, beams: int = 1, tokens: int = 8
) -> tuple[list[Tensor], str]:
    """Return the logits of every step of five requests, and why they were not computed natively."""
    sizes = {"max_seq_len": 64, "max_num_seqs": 8, "max_source_len": 40 if model.config.encoder else 0}
    config = CacheConfig(**sizes | cache)
    engine = Engine(model, config, EngineConfig(native=native, stop_tokens=frozenset({VOCAB})))
    execute, logits = engine.runner.execute, list[Tensor]()

    def recorded(output: Any) -> Tensor:
        logits.append(execute(output).float())
        return logits[-1]

    engine.runner.execute = recorded  # type: ignore[method-assign]
    sources: Sequence[Sequence[int] | None] = SOURCES if model.config.encoder else [None] * len(PROMPTS)
    for prompt, source in zip(PROMPTS, sources, strict=True):
        params = SamplingParams(max_tokens=tokens, temperature=0.0, n=beams)
        engine.add_request(prompt, params, encoder_token_ids=source)
    while not engine.idle:
        engine.step()
    program = engine.runner.program
    assert (program is None) == bool(engine.runner.native_reason)
    assert program is None or (program.encoder is None) == (model.config.encoder is None)
    return logits, engine.runner.native_reason


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest difference over the largest logit, up to the first step of other tokens."""
    worst = 0.0
    for own, other in zip(ours, theirs, strict=False):
        if own.shape != other.shape:
            break
        worst = max(worst, float((own - other).abs().max() / other.abs().max()))
        if not torch.equal(own.argmax(-1), other.argmax(-1)):
            break
    return worst


def compare(config: ModelConfig, case: Case, dtype: torch.dtype = torch.float32) -> str:
    model = build(config, dtype=dtype)
    ours, reason = logits_of_steps(model, CACHES[case["cache"]])
    theirs, _ = logits_of_steps(model, CACHES[case["cache"]], native=False)
    assert len(ours) == len(theirs)
    assert all(bool(step.isfinite().all()) for step in ours)
    tolerance = max(LOSSY.get(case["cache"], 0.0), 3e-5 if dtype == torch.float32 else 0.05)
    assert difference(ours, theirs) <= tolerance
    return reason


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_decoder_equals_pytorch(case: Case) -> None:
    config = with_axes(model_config(named(case["position"]), case["norm"], case["heads"]), case)
    reason = compare(config, case)
    assert bool(reason) == (case["heads"] == "latent")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", PAIRS, ids=case_id)
def test_encoder_decoder_equals_pytorch(case: Case) -> None:
    config = with_axes(pair_config(named(case["position"]), case["norm"], case["heads"]), case)
    reason = compare(config, case)
    assert bool(reason) == (case["heads"] == "latent")


@pytest.mark.parametrize("mlp", MLPS[:2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(8, 2), (8, 8), (4, 2), (4, 8)])
def test_quantized_weights(bits: int, group_size: int, half: bool, dtype: torch.dtype, mlp: Any) -> None:
    case = {"position": "rope", "norm": "pre", "mlp": mlp}
    config = with_axes(model_config(named("rope"), "pre", "gqa"), case)
    model = build(config, dtype=dtype)
    assert quantize(model, bits, group_size, half) > 4
    ours, reason = logits_of_steps(model, {})
    theirs, _ = logits_of_steps(model, {}, native=False)
    assert not reason
    assert difference(ours, theirs) <= (3e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [32, 128, None], ids=["32", "128", "channel"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("variant", native.runnable_variants())
def test_quantized_weights_on_every_instruction_set(
    variant: str, bits: int, group_size: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The widths are those of real groups; 640 inputs of a channel are more than a block of integers."""
    monkeypatch.setattr(ops.native, "load", lambda: native.LoadResult(native.load_variant(variant)))
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "value_dim": 32}
    config = with_layer(model_config("rope", layers=1), cfg.GatedMLPConfig(640), **sizes)
    model = build(replace(config, hidden_size=128), dtype=dtype)
    assert quantize(model, bits, group_size, half=group_size == 128) == 7
    ours, reason = logits_of_steps(model, {}, tokens=2)
    theirs, _ = logits_of_steps(model, {}, native=False, tokens=2)
    assert not reason and len(ours) == 2
    assert difference(ours, theirs) <= (3e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group_size"), [(8, 6), (8, 24), (4, 2), (4, 8)])
@pytest.mark.parametrize("variant", native.runnable_variants())
def test_rounded_activations(
    variant: str, bits: int, group_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last bit of a number may decide how it is rounded, so most rows are compared."""
    monkeypatch.setattr(ops.native, "load", lambda: native.LoadResult(native.load_variant(variant)))
    model = build(with_layer(model_config("rope"), cfg.GatedMLPConfig(312)), dtype=dtype)
    assert quantize(model, bits, group_size, half=False) > 4
    plain, _ = logits_of_steps(model, {})
    model = copy.deepcopy(model)
    model.round_activations(8)
    ours, reason = logits_of_steps(model, {})
    theirs, _ = logits_of_steps(model, {}, native=False)

    def typical(rows: Tensor) -> float:
        return float(((rows - theirs[0]).abs().amax(-1) / theirs[0].abs().max()).median())

    assert not reason
    assert typical(ours[0]) <= (2e-6 if dtype == torch.float32 else 0.02)
    assert typical(plain[0]) > 1e-3


@pytest.mark.parametrize("variant", native.runnable_variants())
@pytest.mark.parametrize("num_tokens", [None, 1, 17, VOCAB - 3])
def test_the_best_tokens_are_those_of_the_logits(
    variant: str, num_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops.native, "load", lambda: native.LoadResult(native.load_variant(variant)))
    model = build(replace(model_config("rope"), tie_embeddings=False), dtype=torch.float32)
    with torch.no_grad():
        model.head.weight[[7, 20]] = model.head.weight[50] = 5 * model.head.weight[50]  # ties
    engine = Engine(model, CacheConfig(max_seq_len=64, max_num_seqs=8), EngineConfig())
    engine.runner._num_tokens = num_tokens
    execute, steps = engine.runner.execute, list[Tensor]()

    def compared(output: Any) -> Tensor:
        logits = execute(output)
        best, rows = engine.runner.best_tokens(logits), logits[:, :num_tokens].numpy()
        assert best == rows.argmax(-1).tolist() and engine.runner.best_tokens(logits.clone()) is None
        steps.append(logits.clone())
        return steps[-1]

    engine.runner.execute = compared  # type: ignore[method-assign]
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for prompt in PROMPTS:
                engine.add_request(prompt, SamplingParams(max_tokens=4, temperature=0.0))
            while not engine.idle:
                engine.step()
    finally:
        torch.set_num_threads(before)
    assert len(steps) >= 8 and any(int(row.argmax()) == 7 for step in steps for row in step)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_have_no_best_token(value: float) -> None:
    model = build(replace(model_config("rope"), tie_embeddings=False), dtype=torch.float32)
    with torch.no_grad():
        model.head.weight[VOCAB - 1] = value
    engine = Engine(model, CacheConfig(max_seq_len=64, max_num_seqs=8), EngineConfig())
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=4, temperature=0.0))
    (chunk,) = engine.step()
    assert engine.runner.program is not None and chunk.error is not None and "NaN or infinite" in chunk.error


def quantize(model: Transformer, bits: int, group_size: int | None, half: bool) -> int:
    """Quantize the layers whose width the groups divide, or (None) by channel; return their number."""
    count = 0
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            size = group_size or getattr(layer, "in_features", 0)
            if type(layer) is Linear and layer.in_features % size == 0:
                matrix = quantize_matrix(layer.weight.detach(), bits, size)
                if half:
                    minimum = None if matrix.minimum is None else matrix.minimum.half()
                    matrix = matrix._replace(scale=matrix.scale.half(), minimum=minimum)
                setattr(module, name, QuantizedLinear(matrix, layer.bias))
                count += 1
    return count


ATTENTIONS = {
    "gate": {"output_gate": True, "qkv_bias": True},
    "values from keys": {"values_from_keys": True, "qk_norm": "head", "value_norm": True, "qkv_bias": True},
    "query scaling": {"query_scaling": cfg.QueryScalingConfig(0.5, 10)},
}
MIXTURES = {
    "softmax": cfg.MoEConfig(20, 5, 2, "gelu_tanh", router_bias=True),
    "not renormalized": cfg.MoEConfig(33, 9, 1, renormalize=False, routed_scale=2.5),
    "gpt-oss": cfg.MoEConfig(20, 4, 3, bias=True, router_bias=True, swiglu_alpha=1.7, swiglu_limit=0.4),
    "deepseek-v2": cfg.MoEConfig(16, 8, 3, renormalize=False, num_groups=4, num_groups_per_token=2, shared_size=12),
    "deepseek-v3": cfg.MoEConfig(
        20, 6, 3, router="sigmoid", selection_bias=True, routed_scale=1.5, num_groups=3, num_groups_per_token=2
    ),
    "qwen2": cfg.MoEConfig(20, 6, 2, renormalize=False, bias=True, shared_size=10, shared_gate=True),
    "phi": cfg.MoEConfig(20, 6, 2, sparsemixer_jitter=0.2),
}


def with_layer(config: ModelConfig, mlp: Any = None, **mixer: Any) -> ModelConfig:
    """Return the config with another MLP and other fields of its attention."""
    layer = config.stack.layer_types["L"]
    layer = replace(layer, attention=replace(layer.attention, **mixer), mlp=mlp or layer.mlp)
    return replace(config, decoder=replace(config.stack, layer_types={"L": layer}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(ATTENTIONS))
def test_other_forms_of_attention(kind: str, dtype: torch.dtype) -> None:
    assert not compare(with_layer(model_config(), **ATTENTIONS[kind]), {"cache": "paged"}, dtype)


@pytest.mark.parametrize("variant", native.runnable_variants())
@pytest.mark.parametrize("kind", list(MIXTURES))
def test_mixtures_of_experts(kind: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.native, "load", lambda: native.LoadResult(native.load_variant(variant)))
    assert not compare(with_layer(model_config(), MIXTURES[kind]), {"cache": "paged"})


@pytest.mark.parametrize("kind", list(MIXTURES))
def test_a_mixture_in_bfloat16_equals_the_one_in_float32(kind: str) -> None:
    """A rounding may choose other experts, so both have the same weights, and most rows are compared."""
    narrow = build(with_layer(model_config(), MIXTURES[kind]), dtype=torch.bfloat16)
    wide = copy.deepcopy(narrow).float()
    ours, reason = logits_of_steps(narrow, {})
    theirs, _ = logits_of_steps(wide, {}, native=False)
    errors = (ours[0] - theirs[0]).abs().amax(-1) / theirs[0].abs().max()
    assert not reason and errors.median() < 0.05


def quantized_mixture(kind: str, dtype: torch.dtype, gate_up: tuple[int, int], down: tuple[int, int]) -> Transformer:
    """Build a model whose experts have matrices of (bits, group size)."""
    config = with_layer(model_config("rope"), replace(MIXTURES[kind], intermediate_size=96))
    model = build(replace(config, hidden_size=64, max_seq_len=640), dtype=dtype)
    for name, module in list(model.named_modules()):
        if isinstance(module, MixtureOfExperts):
            for part, (bits, group) in (("gate", gate_up), ("up", gate_up), ("down", down)):
                weights = getattr(module, part).detach().flatten(0, 1)
                model.use_quantized({f"{name}.{part}": quantize_matrix(weights, bits, group or weights.shape[1])})
    return model


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gpt-oss", "deepseek-v3", "qwen2"])
@pytest.mark.parametrize("variant", native.runnable_variants())
def test_quantized_experts(variant: str, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a GGUF file of Q4_K_M, down has another format. A rounding may choose other experts."""
    monkeypatch.setattr(ops.native, "load", lambda: native.LoadResult(native.load_variant(variant)))
    for gate_up, down in (((4, 32), (8, 16)), ((8, 0), (8, 0))):
        model = quantized_mixture(kind, dtype, gate_up, down)
        ours, reason = logits_of_steps(model, {})
        theirs, _ = logits_of_steps(model, {}, native=False)
        errors = (ours[0] - theirs[0]).abs().amax(-1) / theirs[0].abs().max()
        assert not reason and errors.median() <= (3e-5 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("parts", [("gate", "up"), ("down",)], ids="-".join)
def test_experts_of_other_sizes_than_whole_panels_run_in_pytorch(parts: Sequence[str]) -> None:
    model = build(with_layer(model_config("rope"), MIXTURES["softmax"]), dtype=torch.float32)
    for part in parts:
        weights = model.get_parameter(f"decoder.layers.0.mlp.{part}").detach().flatten(0, 1)
        model.use_quantized({f"decoder.layers.0.mlp.{part}": quantize_matrix(weights, 8, weights.shape[1])})
    assert logits_of_steps(model, {})[1] == "int8 or int4 experts of a size that 32 does not divide"


@pytest.mark.parametrize("position", ["rope-dynamic", "rope-longrope", "rope-yarn"])
def test_frequencies_that_depend_on_the_length(position: str) -> None:
    assert not compare(model_config(position, layers=3), {"cache": "paged"})


def wide_heads(config: ModelConfig, dim: int = 40) -> ModelConfig:
    """Return a config with wide heads; 40 dims are whole vectors and a rest."""
    layer = config.stack.layer_types["L"]
    mixer = replace(layer.attention, head_dim=dim, value_dim=dim)
    return replace(config, decoder=replace(config.stack, layer_types={"L": replace(layer, attention=mixer)}))


VARIANT_CACHES = ("paged", "sinks", "bfloat16", "float16", "int8", "int4", "fp8")


@pytest.mark.parametrize("cache", VARIANT_CACHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", native.runnable_variants())
def test_every_instruction_set(variant: str, dtype: torch.dtype, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.native, "load", lambda: native.LoadResult(native.load_variant(variant)))
    for dim in (40, 64):
        assert not compare(wide_heads(model_config("rope"), dim), {"cache": cache}, dtype)


@pytest.mark.parametrize("formats", [("int8", "int8"), ("int4", "int8"), ("int8", "int4")])
@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 7, 12])
def test_packed_keys_and_values_read_in_place_have_the_bits_of_unpacked_ones(
    num_heads: int, formats: tuple[str, str]
) -> None:
    """Blocks of 8 slots are unpacked first, blocks of 16 are multiplied as they are."""
    sizes = {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": 128, "value_dim": 64}
    model = build(with_layer(model_config("rope"), **sizes), dtype=torch.bfloat16)
    cache = {"key_dtype": formats[0], "value_dtype": formats[1]}
    unpacked, in_place = (logits_of_steps(model, cache | {"block_size": size}) for size in (8, 16))
    assert not unpacked[1]
    assert len(unpacked[0]) == len(in_place[0]) == 8
    assert all(torch.equal(a, b) for a, b in zip(unpacked[0], in_place[0], strict=True))


def rows_by_position(
    model: Transformer, prompts: Sequence[list[int]], *, one_by_one: bool = False, **cache: Any
) -> dict[tuple[int, int], Tensor]:
    """Return the logits of sampled tokens by (first token of the prompt, position); an encoder reads the prompt too.

    ``one_by_one``: each prompt in a batch of one, after the one before it is finished.
    """
    sizes = {"max_seq_len": 640, "max_num_seqs": 16, "num_blocks": 400, "block_size": 16}
    config = CacheConfig(**sizes | {"max_source_len": 64 if model.config.encoder else 0} | cache)
    engine = Engine(model, config, EngineConfig(stop_tokens=frozenset({VOCAB})))
    execute, rows = engine.runner.execute, dict[tuple[int, int], Tensor]()

    def recorded(output: Any) -> Tensor:
        logits = execute(output)
        at = 0
        for scheduled in output.scheduled:
            at += len(scheduled.logit_offsets)
            if scheduled.is_sampled:
                last = scheduled.start + scheduled.num_tokens
                rows[scheduled.sequence.token_ids[0], last] = logits[at - 1].clone()
        return logits

    engine.runner.execute = recorded  # type: ignore[method-assign]
    for prompt in prompts:
        source = prompt if model.config.encoder else None
        engine.add_request(prompt, SamplingParams(max_tokens=6, temperature=0.0), encoder_token_ids=source)
        while one_by_one and not engine.idle:
            engine.step()
    while not engine.idle:
        engine.step()
    assert not engine.runner.native_reason
    return rows


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        (None, torch.float32),
        ((8, 8, 8), torch.bfloat16),
        ("experts", torch.bfloat16),
        ("int4 experts", torch.bfloat16),
        ("cache", torch.bfloat16),
        *(
            pytest.param(quantization, dtype, marks=pytest.mark.long)
            for quantization, dtype in (
                (None, torch.bfloat16),
                ((8, 8), torch.bfloat16),
                ((8, 8), torch.float32),
                ((4, 8), torch.float32),
                ((4, 8), torch.bfloat16),
                ((8, 8, 8), torch.float32),
                ((4, 8, 8), torch.float32),
                ((4, 8, 8), torch.bfloat16),
                ("experts", torch.float32),
                ("int4 experts", torch.float32),
                ("cache", torch.float32),
            )
        ),
    ],
    ids=str,
)
def test_logits_have_the_same_bits_in_every_batch_and_with_all_threads(
    dtype: torch.dtype, quantization: tuple[int, ...] | str | None
) -> None:
    config = replace(model_config("rope"), max_seq_len=640)
    if quantization == "experts":
        config = with_layer(config, MIXTURES["qwen2"], output_gate=True)
    formats = {"key_dtype": "int8", "value_dtype": "int4"} if quantization == "cache" else {}
    model = build(wide_heads(config, 32) if formats else config, dtype=dtype)
    if quantization == "int4 experts":  # of many tokens each
        model = quantized_mixture("softmax", dtype, (4, 32), (8, 32))
    if isinstance(quantization, tuple):
        assert quantize(model, *quantization[:2], half=False)
        for activation_bits in quantization[2:]:
            model.round_activations(activation_bits)
    prompts = [[first, *range(1, length)] for first, length in ((1, 600 // 10), (2, 3), (3, 33), (4, 1), (5, 17))]
    # Three chunks of attention. Its last token is alone after prefill chunks of 65 or 104.
    prompts += [[6, *[i % 60 for i in range(520)]]]
    before = torch.get_num_threads()
    together = rows_by_position(model, prompts, **formats)
    try:
        for threads, sizes in ((1, {"prefill_chunk_size": 65}), (3, {}), (3, {"prefill_chunk_size": 104})):
            torch.set_num_threads(threads)
            for one_by_one in (True, False):
                rows = rows_by_position(model, prompts, one_by_one=one_by_one, **formats, **sizes)
                assert rows.keys() == together.keys()
                for key, row in rows.items():
                    assert torch.equal(row, together[key]), (threads, one_by_one, sizes, key)
    finally:
        torch.set_num_threads(before)
    assert len(together) == 6 * len(prompts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_encoder_decoder_has_the_same_bits_in_every_batch_and_with_all_threads(dtype: torch.dtype) -> None:
    model = build(replace(pair_config("t5", own=True), max_seq_len=64), dtype=dtype)
    prompts = [[first, *range(1, length)] for first, length in ((1, 33), (2, 3), (3, 33), (4, 1), (5, 17), (6, 40))]
    sizes = {"max_seq_len": 64, "num_blocks": None}
    before = torch.get_num_threads()
    together = rows_by_position(model, prompts, **sizes)
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            rows = rows_by_position(model, prompts, one_by_one=True, **sizes)
            assert rows.keys() == together.keys()
            for key, row in rows.items():
                assert torch.equal(row, together[key]), (threads, key)
    finally:
        torch.set_num_threads(before)
    assert len(together) == 6 * len(prompts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", native.runnable_variants())
def test_encoders_on_every_instruction_set(variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.native, "load", lambda: native.LoadResult(native.load_variant(variant)))
    for position, heads in (("t5", "window"), ("rope", "sinks"), ("alibi", "qk-norm")):
        assert not compare(pair_config(position, heads=heads, own=True), {"cache": "paged"}, dtype)


def test_beams_of_an_encoder_decoder_equal_pytorch() -> None:
    model = build(pair_config("learned"), dtype=torch.float32)
    sizes = {"max_seq_len": 32, "max_num_seqs": 20, "max_source_len": 40}
    found = []
    for is_native in (True, False):
        options = EngineConfig(native=is_native, stop_tokens=frozenset({VOCAB}))
        engine = Engine(model, CacheConfig(**sizes), options)
        for source in SOURCES:
            engine.add_request(
                [3], SamplingParams(max_tokens=8, temperature=0.0, num_beams=4), encoder_token_ids=source
            )
        chunks = []
        while not engine.idle:
            chunks += [(chunk.request, chunk.token_id) for chunk in engine.step()]
        assert bool(engine.runner.native_reason) != is_native
        found.append(sorted(chunks, key=lambda chunk: chunk[0]))
    assert found[0] == found[1] and len(found[0]) == 8 * len(SOURCES)


def test_a_changed_weight_and_a_new_hook_are_seen_by_the_next_request() -> None:
    model = build(model_config("rope"), dtype=torch.float32)
    engine = Engine(model, CacheConfig(max_seq_len=64, max_num_seqs=2), EngineConfig(stop_tokens=frozenset({VOCAB})))

    def generate() -> list[int]:
        engine.add_request([5, 6, 7], SamplingParams(max_tokens=8, temperature=0.0))
        tokens = []
        while not engine.idle:
            tokens += [chunk.token_id for chunk in engine.step() if chunk.token_id is not None]
        return tokens

    first, program = generate(), engine.runner.program
    assert generate() == first and engine.runner.program is program
    with torch.no_grad():
        model.decoder.layers[0].mlp.down.weight.mul_(-1.0)
    assert generate() != first and engine.runner.program is not program
    handle = model.register_forward_hook(lambda *args: None)
    generate()
    assert engine.runner.program is None and "hook" in engine.runner.native_reason
    handle.remove()


QUIET: list[dict[str, Any]] = [{"dtype": torch.float64}, {"native": False}, {"dtype": torch.bfloat16}]
LOGGED: list[tuple[dict[str, Any], str]] = [
    ({"cache": {"policy": "tova(8)"}}, "an eviction policy reads the attention weights"),
    ({"library": None}, "the kernels are not built: run python -m kvad.ops.native.build"),
]


@pytest.mark.parametrize(("options", "reason"), [*((options, "") for options in QUIET), *LOGGED])
def test_the_reason_for_pytorch_is_logged_once(
    options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if "library" in options:
        monkeypatch.setattr(ops.native, "load", native.load.__wrapped__)
        monkeypatch.setattr(native, "library_path", lambda variant: Path("/absent", variant))
    model = build(model_config("rope"), dtype=options.get("dtype", torch.float32))
    with caplog.at_level("INFO", "kvad.engine.execution"):
        logits_of_steps(model, options.get("cache", {}), native=options.get("native", True), tokens=2)
    assert caplog.messages == [f"PyTorch serves this model: {reason}"] * bool(reason)


@pytest.mark.parametrize(("dtype", "cache"), [(torch.float32, "float32"), (torch.bfloat16, "int8")])
def test_an_invisible_slot_that_is_not_finite_changes_nothing(dtype: torch.dtype, cache: str) -> None:
    """The blocks of a finished request, overwritten with NaN, do not reach a later one."""
    model = build(wide_heads(model_config("rope"), 32), dtype=dtype)
    options = EngineConfig(stop_tokens=frozenset({VOCAB}))
    clean = rows_by_position(model, [[5, 6, 7]], max_seq_len=64, dtype=cache)
    engine = Engine(model, CacheConfig(max_seq_len=64, max_num_seqs=2, dtype=cache), options)
    engine.add_request([9] * 20, SamplingParams(max_tokens=3, temperature=0.0))
    while not engine.idle:
        engine.step()
    for pair in engine.kv_cache.stores:
        for keys, values in pair.values():
            for store in (keys, values):  # integers have their scales
                store.arrays[-1].fill_(float("nan"))
    logits, execute = [], engine.runner.execute
    engine.runner.execute = lambda output: logits.append(execute(output).clone()) or logits[-1]
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=6, temperature=0.0))
    while not engine.idle:
        engine.step()
    assert [torch.equal(ours[-1], row) for ours, row in zip(logits, clean.values(), strict=True)] == [True] * 6
