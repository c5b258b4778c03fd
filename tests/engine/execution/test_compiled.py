"""Engines with ``compile`` against PyTorch without it, and the number of compilations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvad import model as model_lib
from kvad import ops
from kvad.cache.config import CacheConfig
from kvad.cache.device import KVCache
from kvad.config.model import ModelConfig
from kvad.engine.engine import Engine
from kvad.engine.options import EngineConfig
from kvad.engine.scheduling import SamplingParams
from kvad.errors import ConfigError
from kvad.model.lora import add_adapters
from kvad.model.transformer import Transformer
from kvad.ops import runtime
from kvad.ops.block_matrix import BlockLinear
from kvad.ops.quantized_linear import QuantizedLinear, quantize_matrix
from tests.model.test_topologies import with_axes
from tests.support.random_models import VOCAB, build, encoder_config, model_config, pair_config

pytestmark = pytest.mark.skipif(runtime.compile_error("cpu", backward=False) is not None, reason="no compiler")
PROMPTS = [[11, 60, 2, 45, 45, 1, 66, 30, 4], [3], [5, 9, 8, 7], [21, 22, 23, 24, 25] * 8, [1, 2]]


def mixed(mlp: str, position: str = "rope", norm: str = "pre", heads: str = "gqa") -> ModelConfig:
    return with_axes(model_config(position, norm, heads), {"norm": norm, "mlp": mlp, "position": position})


FAMILIES: dict[str, tuple[ModelConfig, int]] = {  # and the compilations: of one token, and of several, for each part
    "llama": (mixed("gated"), 4),
    "post-norm": (mixed("plain", "learned", "post", "mha"), 4),
    "parallel": (mixed("gated", "rope-partial", "parallel", "qk-norm"), 4),
    "latent": (mixed("gated", heads="latent"), 4),
    "experts": (mixed("experts-deepseek"), 4),
    "parallel experts": (mixed("experts", norm="parallel"), 2),
    "recurrence": (model_config("none", "pre", "delta"), 6),
    "encoder-decoder": (pair_config("t5", "pre", "gqa"), 14),
}


def run(model: Transformer, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[Tensor]:
    """Return the logits of every step of the prompts in one batch."""
    source_len = 40 if model.config.encoder else 0
    cache = CacheConfig(max_seq_len=64, max_num_seqs=8, block_size=4, max_source_len=source_len)
    engine = Engine(model, cache, EngineConfig(**({"native": False} | options), stop_tokens=frozenset({VOCAB})))
    execute, logits = engine.runner.execute, list[Tensor]()

    def recorded(output: Any) -> Tensor:
        logits.append(execute(output).clone())
        return logits[-1]

    engine.runner.execute = recorded  # type: ignore[method-assign]
    for prompt in prompts:
        params = SamplingParams(max_tokens=4, temperature=0.0)
        engine.add_request(prompt, params, encoder_token_ids=prompt if model.config.encoder else None)
    while not engine.idle:
        engine.step()
    assert engine.runner.program is None
    return logits


def difference(model: Transformer, prompts: list[list[int]] = PROMPTS) -> float:
    """Return the largest difference of compiled logits over the largest logit."""
    ours, theirs = run(model, prompts, compile=True, native=True), run(model, prompts)
    assert len(ours) == len(theirs)
    pairs = zip(ours, theirs, strict=True)
    return max(float((own - other).abs().max() / other.abs().max()) for own, other in pairs)


def num_compilations(model: Transformer) -> int:
    return model.compiler.num_compilations


SLOW = pytest.mark.long  # compiling takes seconds


@pytest.mark.parametrize(
    "family", [name if name in ("llama", "encoder-decoder") else pytest.param(name, marks=SLOW) for name in FAMILIES]
)
def test_logits_are_equal_and_the_compilations_do_not_grow(family: str) -> None:
    config, expected = FAMILIES[family]
    model = build(config)
    assert difference(model) <= 1e-12
    assert difference(model, [[3]]) <= 1e-12  # single tokens
    assert num_compilations(model) == expected
    for prompts in ([[9, 8, 7]] * 3, [list(range(1, 1 + length)) for length in range(3, 11)], [[5] * 37]):
        assert difference(model, prompts) <= 1e-12
    assert num_compilations(model) == expected


def test_compilations_grow_without_dynamic_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    def static(function: Callable[..., Any], backend: Any) -> Any:
        return torch.compile(function, backend=backend, dynamic=False)

    monkeypatch.setattr(runtime, "lazy_compile", static)
    monkeypatch.setattr(torch._dynamo, "maybe_mark_dynamic", lambda *_: None)
    model = build(FAMILIES["llama"][0])
    run(model, compile=True)
    first = num_compilations(model)
    run(model, [[9, 8, 7]] * 3, compile=True)
    assert num_compilations(model) > first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_dtypes_are_near(dtype: torch.dtype) -> None:
    wide = replace(mixed("gated"), hidden_size=264)  # has products that are chosen by the number of tokens
    model = build(wide, dtype=dtype)
    own, other = run(model, compile=True)[0], run(model)[0]
    assert float((own - other).abs().max() / other.abs().max()) <= (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize(
    ("bits", "rounded"), [pytest.param(8, False, marks=SLOW), pytest.param(4, False, marks=SLOW), (8, True)]
)
def test_quantized_weights(bits: int, rounded: bool) -> None:
    model = build(FAMILIES["llama"][0], dtype=torch.float32)
    for module in list(model.decoder.modules()):  # type: ignore[union-attr]
        for name, child in list(module.named_children()):
            if isinstance(child, ops.linear.Linear):
                setattr(module, name, QuantizedLinear(quantize_matrix(child.weight, bits, 8), child.bias))
    if rounded:
        model.round_activations(8)
    assert difference(model) <= 1e-5
    assert num_compilations(model) == 2


def test_adapters() -> None:
    model = build(FAMILIES["llama"][0])
    plain = run(model)[0]
    add_adapters(model, ["decoder.layers.0.attention.q", "decoder.layers.1.mlp.down"], rank=2, scale=0.5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.fill_(0.1)
    assert difference(model.eval()) <= 1e-12
    assert not torch.equal(run(model, compile=True)[0], plain)


def test_an_encoder() -> None:
    model, texts = build(encoder_config("rope", "post", "gqa")), [[7, 3, 12], [9], [4] * 11, [5, 6]]

    def outputs(**options: Any) -> list[Tensor]:
        engine = Engine(model, CacheConfig(max_seq_len=16, max_num_seqs=4), EngineConfig(**options))
        for text in texts:
            engine.add_encoder_request(text)
        chunks = []
        while not engine.idle:
            chunks += engine.step()
        return [chunk.output for chunk in sorted(chunks, key=lambda c: c.request) if chunk.output is not None]

    for own, other in zip(outputs(compile=True), outputs(native=False), strict=True):
        assert torch.allclose(own, other, rtol=0, atol=1e-12)
    assert 0 < num_compilations(model) <= 4


def test_changed_weights_are_read() -> None:
    model = build(FAMILIES["llama"][0])
    run(model, compile=True)
    layer = model.decoder.layers[1]  # type: ignore[union-attr]
    layer.attention.q.weight.data = layer.attention.q.weight.data * 2  # type: ignore[union-attr, operator]
    layer.mlp.down.weight.data *= 2  # type: ignore[union-attr, operator]
    assert difference(model) <= 1e-12


def test_the_model_of_other_engines_is_unchanged() -> None:
    model = build(FAMILIES["llama"][0])
    modules, plain = [*model.modules()], run(model)
    run(model, compile=True)
    count = num_compilations(model)
    assert [*model.modules()] == modules and not any(isinstance(m, model_lib.compiled.CompiledLayer) for m in modules)
    assert all(map(torch.equal, run(model), plain)) and num_compilations(model) == count
    assert num_compilations(copy.deepcopy(model)) == 0


def test_hooks_are_called() -> None:
    model, calls = build(FAMILIES["llama"][0]), list[nn.Module]()
    run(model, compile=True)
    mlp = model.decoder.layers[1].mlp  # type: ignore[union-attr]
    handle = mlp.register_forward_hook(lambda module, _, out: calls.append(module) or out + 1)  # type: ignore[union-attr, operator]
    assert difference(model) <= 1e-12 and calls
    handle.remove()
    calls.clear()
    assert difference(model) <= 1e-12 and not calls


def test_attention_hooks_are_called() -> None:
    model, seen = build(FAMILIES["llama"][0]), list[Any]()
    run(model, compile=True, attention_hook=lambda *tensors: seen.append(tensors))
    assert seen


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="compile: is not supported with deterministic, because"):
        EngineConfig(compile=True, deterministic=True)
    model = build(FAMILIES["llama"][0])

    def ranks(*arguments: Any, **options: Any) -> KVCache:
        cache = KVCache(*arguments, **options)
        cache.ranks = 2
        return cache

    with pytest.raises(ConfigError, match="compile: is not supported with 2 ranks"):
        run(model, compile=True, cache_factory=ranks)
    tiled = copy.deepcopy(model)
    model_lib.batch_invariant.make_batch_invariant(tiled)
    with pytest.raises(ConfigError, match=r"compile: the model is batch-invariant \(deterministic\)"):
        run(tiled, compile=True)
    monkeypatch.setattr(model_lib.compiled.ops.block_matrix, "BlockLinear", ops.linear.Linear)
    with pytest.raises(ConfigError, match="compile: this model has no layer that can be compiled"):
        run(model, compile=True)
    monkeypatch.setattr(model_lib.compiled.ops.block_matrix, "BlockLinear", BlockLinear)

    def missing(*_: Any, **__: Any) -> None:
        raise RuntimeError("No working C++ compiler found\nmore of it")

    monkeypatch.setattr(runtime.torch, "compile", missing)
    with pytest.raises(ConfigError, match=r"compile: torch cannot compile for cpu: No working C\+\+ compiler found"):
        run(model, compile=True)
