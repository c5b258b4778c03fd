"""A decoder embeds texts in the engine's steps: in chunks, among other requests, through the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvad.cache.config import CacheConfig
from kvad.config.model import ModelConfig
from kvad.engine import Engine, EngineConfig
from kvad.engine.options import ServedAdapter
from kvad.engine.scheduling.request import SamplingParams, StreamChunk
from kvad.errors import RequestError
from kvad.model import whole_sequences
from kvad.model.heads import pool_hidden
from kvad.model.lora import merge_weight
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.ops.linear import Linear
from tests.engine.test_adapters import MODELS, random_factors
from tests.support.random_models import build, pair_config

TEXTS = ([7], [5, 6, 7, 8], list(range(9, 40)), list(range(9, 30)))
POOLINGS = ("mean", "first", "last", "max")
FLOAT64 = torch.float64


def engine_of(model: Transformer, *, config: EngineConfig | None = None, **cached: Any) -> Engine:
    dtype = str(model.token_embedding.dtype).removeprefix("torch.")
    sizes = {"max_num_seqs": 3, "max_seq_len": 48, "block_size": 4, "prefill_chunk_size": 8}
    return Engine(model, CacheConfig(dtype=dtype, **{**sizes, **cached}), config or EngineConfig())


def expected(model: Transformer, text: Sequence[int], pooling: Any) -> Tensor:
    step = whole_sequences([text], torch.device("cpu"))
    with torch.inference_mode():
        return pool_hidden(model(step, NoCache(model.config)), step.sub_batches, pooling)[0]


def run(engine: Engine) -> dict[int, list[StreamChunk]]:
    chunks: dict[int, list[StreamChunk]] = {}
    while not engine.idle:
        for chunk in engine.step():
            chunks.setdefault(chunk.request, []).append(chunk)
        engine.scheduler.check()
    return chunks


def vector(chunks: list[StreamChunk]) -> Tensor:
    (chunk,) = chunks
    assert chunk.error is None and chunk.finish_reason == "stop" and chunk.token_id is None
    assert chunk.output is not None
    return chunk.output


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "encoder-decoder"])
def test_vectors_equal_those_of_whole_texts(name: str, pooling: Any) -> None:
    model = build(MODELS[name], dtype=FLOAT64)
    engine = engine_of(model)
    requests = [engine.add_embedding_request(text, pooling) for text in (*TEXTS, TEXTS[2])]
    chunks = run(engine)
    for text, request in zip((*TEXTS, TEXTS[2]), requests, strict=True):
        assert float((vector(chunks[request]) - expected(model, text, pooling)).abs().max()) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbors_keep_their_bits(dtype: torch.dtype) -> None:
    model = build(MODELS["rope"], dtype=dtype)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)

    def outputs(embeds: bool, generates: bool) -> tuple[list[Any], list[Tensor]]:
        engine = engine_of(model, enable_prefix_caching=False)
        tokens = [engine.add_request(text, params) for text in TEXTS[1:3]] if generates else []
        vectors = [engine.add_embedding_request(text, "mean") for text in TEXTS] if embeds else []
        chunks = run(engine)
        assert engine.runner.program is not None, engine.runner.native_reason
        return [[chunk[2:4] for chunk in chunks[request]] for request in tokens], [
            vector(chunks[request]) for request in vectors
        ]

    (tokens, vectors), (alone, _), (_, lonely) = outputs(True, True), outputs(False, True), outputs(True, False)
    assert tokens == alone
    assert all(float((one - other).abs().max()) < 1e-6 for one, other in zip(vectors, lonely, strict=True))
    wide = build(MODELS["rope"], dtype=torch.float32)
    for text, one in zip(TEXTS, vectors, strict=True):
        assert float((one - expected(wide, text, "mean")).abs().max()) < (1e-5 if dtype == torch.float32 else 0.1)


def test_preempted_texts_are_pooled_once() -> None:
    model = build(MODELS["rope"], dtype=FLOAT64)
    engine = engine_of(model, num_blocks=12)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for text in TEXTS[1:3]:
        engine.add_request(text[:9], params)
    requests = {engine.add_embedding_request(TEXTS[2], pooling): pooling for pooling in POOLINGS}
    preemptions = 0
    for number in range(200):
        for chunk in engine.step():
            if chunk.request in requests:
                difference = (vector([chunk]) - expected(model, TEXTS[2], requests[chunk.request])).abs().max()
                assert float(difference) < 1e-10
                preemptions += engine.metrics(chunk.request).num_preemptions
        if number % 4 == 3:
            engine.scheduler.preempt(list(requests)[number // 4 % 4])
        engine.scheduler.check()
    assert engine.idle and preemptions > 2


def test_cached_prefixes_are_used_where_they_can_be() -> None:
    model = build(MODELS["rope"], dtype=FLOAT64)
    engine = engine_of(model)
    hits = []
    for pooling, salt in (("last", ""), ("last", ""), ("mean", ""), ("last", "other")):
        request = engine.add_embedding_request(TEXTS[2], pooling, cache_salt=salt)
        metrics = engine.metrics(request)
        out = vector(run(engine)[request])
        assert float((out - expected(model, TEXTS[2], pooling)).abs().max()) < 1e-10
        hits.append(metrics.num_cached_tokens)
    assert hits == [0, 28, 0, 0]


def test_a_long_text_leaves_every_step_to_the_others() -> None:
    model = build(MODELS["rope"], dtype=torch.float32)
    engine = engine_of(model)
    chat = engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    engine.step()
    request = engine.add_embedding_request(TEXTS[2], "mean")
    steps = []
    while engine.scheduler.sequences(request):
        steps.append([chunk.request for chunk in engine.step()])
    assert len(steps) >= 4 and all(chat in step for step in steps)
    aborted = engine.add_embedding_request(TEXTS[2], "mean")
    engine.step()
    engine.abort_request(aborted)
    assert aborted not in {chunk.request for chunk in engine.step()}, "an abandoned text is computed no further"


def test_an_adapter_computes_the_states() -> None:
    config: ModelConfig = MODELS["rope"]
    factors = random_factors(config, 3)
    for dtype, tolerance in ((FLOAT64, 1e-10), (torch.float32, 1e-4)):
        model, merged = build(config, dtype=dtype), build(config, dtype=dtype)
        for layer_name, each in factors.items():
            layer = merged.get_submodule(layer_name)
            assert isinstance(layer, Linear)
            layer.weight.data = merge_weight(layer.weight.data, each)
        engine = engine_of(model, config=EngineConfig(adapters={"a": ServedAdapter(factors)}))
        requests = [engine.add_embedding_request(TEXTS[2], "mean", adapter=name) for name in ("a", "")]
        chunks = run(engine)
        for request, used in zip(requests, (merged, model), strict=True):
            assert float((vector(chunks[request]) - expected(used, TEXTS[2], "mean")).abs().max()) < tolerance


def test_states_that_are_not_finite_fail_their_text_only() -> None:
    model = build(MODELS["rope"], dtype=FLOAT64)
    with torch.no_grad():
        model.token_embedding[13] = float("nan")
    engine = engine_of(model)
    good, bad = engine.add_embedding_request([5, 6, 7], "mean"), engine.add_embedding_request([5, 13, 7], "mean")
    chunks = run(engine)
    assert vector(chunks[good]).isfinite().all()
    assert [chunk.error for chunk in chunks[bad]] == ["numerical error: the model's logits are NaN or infinite"]


def test_texts_that_cannot_be_embedded_are_refused() -> None:
    engine = engine_of(build(MODELS["rope"], dtype=FLOAT64))
    with pytest.raises(RequestError, match="at least 1 token"):
        engine.add_embedding_request([], "mean")
    with pytest.raises(RequestError, match="at most"):
        engine.add_embedding_request(list(range(49)), "mean")
    with pytest.raises(RequestError, match="encoder-decoder"):
        engine_of(build(pair_config(), dtype=FLOAT64), max_source_len=16).add_embedding_request([1], "mean")
    assert engine.idle
