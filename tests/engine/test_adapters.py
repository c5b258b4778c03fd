"""Adapters that requests choose: each request has the output of the merged model, whatever its neighbors have."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kvad import ops
from kvad.cache.config import CacheConfig
from kvad.checkpoint.peft import mergeable_linears
from kvad.config.model import ModelConfig
from kvad.engine import Engine, EngineConfig
from kvad.engine.options import ServedAdapter
from kvad.engine.scheduling import SpeculativeConfig
from kvad.engine.scheduling.request import SamplingParams
from kvad.errors import ConfigError, RequestError
from kvad.model.lora import AdapterSet, LoraFactors, SelectedAdapters, merge_weight, unsupported_layer
from kvad.model.transformer import Transformer
from kvad.ops.linear import Linear
from kvad.ops.native import library as native
from tests.engine.execution.test_native import ATTENTIONS, MIXTURES, quantize, with_layer
from tests.support.random_models import build, model_config, pair_config

EXACT = 1e-10
MODELS = {
    "rope": model_config("rope"),
    "alibi, parallel": model_config("alibi", "parallel", "mqa"),
    "learned, sandwich": model_config("learned", "sandwich", "qk-norm"),
    "latent": model_config("rope", heads="latent"),
    "short-conv": model_config("rope", heads="short-conv"),
    "recurrence": model_config("rope", heads="recurrence"),
    "delta": model_config("rope", heads="delta"),
    "encoder-decoder": pair_config(),
}
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [5, 6, 7], [12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [5, 6, 7, 8, 9, 10, 11, 12])
NAMES = ("a", "", "b", "a")
Logits = dict[int, dict[int, Tensor]]  # request -> position -> [V]


@cache
def base(name: str, dtype: torch.dtype = torch.float64) -> Transformer:
    return build(MODELS[name], dtype=dtype)


def random_factors(config: ModelConfig, rank: int, ends: tuple[str, ...] = ("",)) -> dict[str, LoraFactors]:
    generator = torch.Generator().manual_seed(rank)

    def random(*shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)

    shapes = {name: shape for name, shape in mergeable_linears(config).items() if name.endswith(ends)}
    names = [name for name in shapes if unsupported_layer(config, [name]) is None]
    return {name: LoraFactors(random(rank, shapes[name][1]), random(shapes[name][0], rank), 0.7) for name in names}


@cache
def adapters_of(name: str) -> dict[str, dict[str, LoraFactors]]:
    """Return one adapter on some layers, and one of another rank on all."""
    return {
        "a": random_factors(MODELS[name], 2, (".q", ".out", ".input", ".down")),
        "b": random_factors(MODELS[name], 5),
    }


@cache
def merged(name: str, adapter: str, dtype: torch.dtype = torch.float64) -> Transformer:
    """Return the model with the adapter's terms added to its weights."""
    model = copy.deepcopy(base(name, dtype))
    for layer_name, factors in (adapters_of(name)[adapter] if adapter else {}).items():
        layer = model.get_submodule(layer_name)
        assert isinstance(layer, Linear)
        layer.weight.data = merge_weight(layer.weight.data, factors)
    return model


def engine_of(
    model: Transformer, adapters: Mapping[str, Mapping[str, LoraFactors]], *, cached: Any = None, **options: Any
) -> Engine:
    dtype = str(model.token_embedding.dtype).removeprefix("torch.")
    sizes = {"max_num_seqs": 4, "max_seq_len": 48, "block_size": 4, "prefill_chunk_size": 8, **(cached or {})}
    if model.config.encoder_input is not None:
        sizes["max_source_len"] = 32
    served = {name: ServedAdapter(factors) for name, factors in adapters.items()}
    return Engine(model, CacheConfig(dtype=dtype, **sizes), EngineConfig(adapters=served, **options))


def add(engine: Engine, prompt: Sequence[int], adapter: str = "", **options: Any) -> int:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    if engine.model.config.kind == "encoder-decoder":
        return engine.add_request(prompt, params, encoder_token_ids=prompt[:9], adapter=adapter, **options)
    return engine.add_request(prompt, params, adapter=adapter, **options)


def run(engine: Engine) -> Logits:
    """Run all requests and return every computed row of logits."""
    logits: Logits = {}
    execute = engine.runner.execute

    def recorded(output: Any) -> Tensor:
        out = execute(output)
        rows = iter(out.clone())
        for scheduled in output.scheduled:
            for offset in scheduled.logit_offsets:
                logits.setdefault(scheduled.sequence.request_id, {})[scheduled.start + offset] = next(rows)
        return out

    engine.runner.execute = recorded  # type: ignore[method-assign]
    while not engine.idle:
        for chunk in engine.step():
            assert chunk.error is None, chunk.error
        engine.scheduler.check()
    engine.runner.execute = execute  # type: ignore[method-assign]
    return logits


def difference(ours: Mapping[int, Tensor], theirs: Mapping[int, Tensor]) -> float:
    """Return the largest difference; infinite if the generated tokens differ."""
    if ours.keys() != theirs.keys():
        return float("inf")
    return max(float((ours[position] - theirs[position]).abs().max()) for position in ours)


def alone(model: Transformer, prompt: Sequence[int], **options: Any) -> dict[int, Tensor]:
    engine = engine_of(model, {}, **options)
    request = add(engine, prompt)
    return run(engine)[request]


def worst_difference(name: str, **options: Any) -> float:
    """Return the largest difference of a mixed batch from each request alone on its merged model."""
    engine = engine_of(base(name), adapters_of(name), **options)
    requests = [add(engine, prompt, adapter) for prompt, adapter in zip(PROMPTS, NAMES, strict=True)]
    logits = run(engine)
    expected = [alone(merged(name, adapter), prompt) for prompt, adapter in zip(PROMPTS, NAMES, strict=True)]
    return max(difference(logits[request], each) for request, each in zip(requests, expected, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_a_mixed_batch_equals_the_merged_models(name: str) -> None:
    assert worst_difference(name) < EXACT


def test_the_comparison_finds_exchanged_adapters_and_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    select = AdapterSet.select
    for change in (
        lambda spans: [(3 - number if number else 0, count) for number, count in spans],
        lambda spans: [spans[-1], *spans[:-1]],
        lambda spans: [(0, count) for _, count in spans],
    ):
        monkeypatch.setattr(AdapterSet, "select", lambda self, spans, f=change: select(self, f(list(spans))))
        assert worst_difference("rope") > 1e-3


def test_tokens_without_an_adapter_have_the_bits_of_an_engine_without_adapters() -> None:
    outputs = []
    for adapters, names in ((adapters_of("rope"), NAMES), ({}, [""] * len(NAMES))):
        engine = engine_of(base("rope"), adapters)
        requests = [add(engine, prompt, adapter) for prompt, adapter in zip(PROMPTS, names, strict=True)]
        outputs.append(run(engine)[requests[1]])
    assert difference(*outputs) == 0


def test_preempted_requests_keep_their_adapter() -> None:
    engine = engine_of(base("rope"), adapters_of("rope"), cached={"num_blocks": 10, "enable_prefix_caching": False})
    requests = [add(engine, prompt, adapter) for prompt, adapter in zip(PROMPTS, NAMES, strict=True)]
    metrics = [engine.metrics(request) for request in requests]
    logits = run(engine)
    assert sum(each.num_preemptions for each in metrics) > 0
    for prompt, adapter, request in zip(PROMPTS, NAMES, requests, strict=True):
        assert difference(logits[request], alone(merged("rope", adapter), prompt)) < EXACT


@pytest.mark.parametrize("name", ["rope", "encoder-decoder"])
def test_adapters_share_no_cached_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(5, 22))

    def hits(engine: Engine) -> tuple[list[int], float]:
        cached, worst = [], 0.0
        for adapter in ("", "a", "b", "a", ""):
            request = add(engine, prompt, adapter)
            metrics = engine.metrics(request)
            logits = run(engine)[request]
            cached.append(metrics.num_cached_tokens)
            expected = alone(merged(name, adapter), prompt)
            last = max(logits)
            worst = max(worst, float((logits[last] - expected[last]).abs().max()) if last in expected else 1.0)
        return cached, worst

    cached, worst = hits(engine_of(base(name), adapters_of(name)))
    assert cached[:3] == [0, 0, 0] and min(cached[3:]) > 0 and worst < EXACT
    root = Engine._root
    monkeypatch.setattr(Engine, "_root", lambda self, salt, source=None, adapter="": root(self, salt, source))
    cached, worst = hits(engine_of(base(name), adapters_of(name)))
    assert min(cached[1:]) > 0 and worst > 1e-3, "the comparison finds blocks of another adapter"


def test_the_root_covers_the_factors_and_not_the_name() -> None:
    factors = adapters_of("rope")
    one = engine_of(base("rope"), {"x": factors["a"], "y": factors["b"]})
    other = engine_of(base("rope"), {"x": factors["b"]})
    assert one._root("", None, "y") == other._root("", None, "x")
    assert len({one._root(""), one._root("", None, "x"), one._root("", None, "y")}) == 3
    assert one._root("") == engine_of(base("rope"), {})._root(""), "blocks of the base stay valid"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_requests_have_the_same_bits_with_other_adapters(dtype: torch.dtype) -> None:
    model, factors = copy.deepcopy(base("rope", dtype)), adapters_of("rope")
    engine = engine_of(model, factors, deterministic=True)
    requests = [add(engine, prompt, adapter) for prompt, adapter in zip(PROMPTS, NAMES, strict=True)]
    logits = run(engine)
    for prompt, adapter, request in zip(PROMPTS, NAMES, requests, strict=True):
        single = engine_of(model, {adapter: factors[adapter]} if adapter else {}, deterministic=True)
        mine = add(single, prompt, adapter)
        assert difference(logits[request], run(single)[mine]) == 0


NATIVE = {
    **{name: MODELS[name] for name in ("rope", "alibi, parallel", "learned, sandwich", "encoder-decoder")},
    "mixture": with_layer(model_config(), MIXTURES["qwen2"]),  # the shared expert; not the router
    "gate": with_layer(model_config(), **ATTENTIONS["gate"]),
    "values from keys": with_layer(model_config(), **ATTENTIONS["values from keys"]),
    "wide": replace(model_config("rope"), hidden_size=40),
}


def native_rows(
    model: Transformer, adapters: Mapping[str, Any], requests: Sequence[tuple[Sequence[int], str]], **options: Any
) -> list[dict[int, Tensor]]:
    engine = engine_of(model, adapters, **options)
    ids = [add(engine, prompt, adapter) for prompt, adapter in requests]
    logits = run(engine)
    assert (engine.runner.program is not None) == options.get("native", True), engine.runner.native_reason
    return [logits[request] for request in ids]


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("name", NATIVE)
def test_native_kernels_add_the_terms(name: str, bits: int) -> None:
    model = build(NATIVE[name], dtype=torch.float32)
    if bits:
        assert quantize(model, bits, 4, half=False)
    others = tuple(layer for layer in mergeable_linears(NATIVE[name]) if not layer.endswith(".router"))
    adapters = {"a": random_factors(NATIVE[name], 2, (".q", ".out", ".up", ".v"))}
    adapters["b"] = random_factors(NATIVE[name], 5, others)
    requests = list(zip(PROMPTS, NAMES, strict=True))
    ours, theirs = (native_rows(model, adapters, requests, native=native) for native in (True, False))
    scale = max(float(rows.abs().max()) for each in theirs for rows in each.values())
    assert max(map(difference, ours, theirs)) < 1e-4 * scale
    plain = native_rows(model, {}, [(prompt, "") for prompt in PROMPTS])
    moved = [
        min(float((one[at] - other[at]).abs().max()) for at in one if at in other)
        for one, other in zip(ours, plain, strict=True)
    ]
    assert min(moved[0], moved[2], moved[3]) > 0.01 * scale and moved[1] == 0


def test_steps_with_the_adapter_of_a_router_run_in_pytorch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvad")
    model = build(NATIVE["mixture"], dtype=torch.float32)
    adapters = {"a": random_factors(NATIVE["mixture"], 2), "b": random_factors(NATIVE["mixture"], 3, (".q",))}
    engine = engine_of(model, adapters)
    add(engine, PROMPTS[0])
    run(engine)
    assert engine.runner.program is not None and not caplog.records
    request = add(engine, PROMPTS[1], "a")
    logits = run(engine)[request]
    (expected,) = native_rows(model, adapters, [(PROMPTS[1], "a")], native=False)
    assert difference(logits, expected) == 0
    (record,) = caplog.records
    assert "run in PyTorch: faster kernels add no terms to decoder.layers.0.mlp.router" in record.message


@pytest.mark.parametrize("variant", native.runnable_variants())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_rows_do_not_depend_on_the_adapters_of_others(
    variant: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops.native, "load", lambda: native.LoadResult(native.load_variant(variant)))
    model, adapters = build(MODELS["rope"], dtype=dtype), adapters_of("rope")
    requests = list(zip(PROMPTS, NAMES, strict=True))
    together = native_rows(model, adapters, requests)
    for request, rows in zip(requests, together, strict=True):
        (alone,) = native_rows(model, adapters, [request])
        assert difference(rows, alone) == 0
        (wide,) = native_rows(copy.deepcopy(model).float(), adapters, [request])
        first = min(rows)
        assert float((rows[first] - wide[first]).abs().max()) < (0.2 if dtype == torch.bfloat16 else 1e-6)


def test_bfloat16_products_are_rounded_once() -> None:
    layer = Linear(16, 12, bias=False).bfloat16()
    generator = torch.Generator().manual_seed(0)
    x, out = (torch.randn(5, size, generator=generator).bfloat16() for size in (16, 12))
    a, b = torch.randn(3, 16, generator=generator), torch.randn(12, 3, generator=generator)
    for rows, spans in (([1, 2, 3], [(0, 1), (1, 3), (0, 1)]), ([0, 3], [(1, 1), (0, 2), (1, 1), (0, 1)])):
        added = SelectedAdapters({layer: {1: (a, b)}}, spans, x.device).add(layer, x, out.clone())
        expected = out.clone()
        expected[rows] = (out[rows].double() + x[rows].double() @ a.double().T @ b.double().T).bfloat16()
        assert torch.equal(added, expected)


def test_drafts_are_checked_with_the_adapter() -> None:
    speculative = SpeculativeConfig(num_tokens=3, min_match=1, adaptive=False)
    generated, drafts = [], 0
    for options in ({}, {"speculative": speculative}):
        engine = engine_of(base("rope"), adapters_of("rope"), **options)
        for prompt, adapter in zip(PROMPTS, NAMES, strict=True):
            add(engine, [*prompt, *prompt], adapter)
        tokens: dict[int, list[int | None]] = {}
        while not engine.idle:
            for chunk in engine.step():
                tokens.setdefault(chunk.request, []).append(chunk.token_id)
        generated.append(tokens)
        drafts += sum(engine.metrics(request).num_draft_tokens for request in tokens)
    assert generated[0] == generated[1] and drafts > 0


def test_a_state_of_another_adapter_is_not_resumed() -> None:
    engine = engine_of(base("rope"), adapters_of("rope"), cached={"enable_prefix_caching": False})
    request = add(engine, PROMPTS[2], "a", keep_state=True)
    run(engine)
    state = engine.pop_state(request)
    for adapter, num_cached, reason in (("a", 9, ""), ("b", 0, "adapter: b here, a in the state")):
        metrics = engine.metrics(add(engine, PROMPTS[2], adapter, resume=state))
        run(engine)
        assert (metrics.num_cached_tokens, metrics.resume_miss_reason) == (num_cached, reason)


def test_unknown_names_and_impossible_engines_are_refused() -> None:
    engine = engine_of(base("rope"), adapters_of("rope"))
    with pytest.raises(RequestError, match=r"adapter: unknown adapter 'c' \(known: a, b"):
        add(engine, PROMPTS[0], "c")
    with pytest.raises(RequestError, match=r"unknown adapter 'a' \(No adapters were loaded"):
        add(engine_of(base("rope"), {}), PROMPTS[0], "a")
    with pytest.raises(ConfigError, match="compile: is not supported with adapters"):
        engine_of(base("rope"), adapters_of("rope"), compile=True)
    assert engine.idle


@pytest.mark.parametrize(
    ("config", "name", "reason"),
    [
        (MODELS["rope"], "head", "only layers of the decoder"),
        (MODELS["latent"], "decoder.layers.0.attention.kv_up", "latent attention"),
        (MODELS["short-conv"], "decoder.layers.0.attention.conv", "convolutions"),
    ],
)
def test_layers_whose_terms_are_not_computed_are_named(config: ModelConfig, name: str, reason: str) -> None:
    assert name == "head" or name in mergeable_linears(config)
    message = unsupported_layer(config, ["decoder.layers.0.attention.out", name])
    assert message is not None and message.startswith(f"{name}: ") and reason in message
