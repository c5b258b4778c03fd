"""The engine: an error affects only its request, and nothing outlives its sequence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.engine import Engine, StreamChunk
from kvad.engine.options import EngineConfig
from kvad.engine.scheduling.request import SamplingParams
from kvad.errors import RequestError
from kvad.text.tokenizer import train_tokenizer
from tests.support.random_models import VOCAB, build, model_config

CACHE = CacheConfig(dtype="float64", max_num_seqs=4, max_seq_len=96, block_size=4, prefill_chunk_size=8)
GREEDY = SamplingParams(temperature=0, max_tokens=12)
POISONED = 13  # a token whose embedding is NaN


def run(engine: Engine) -> dict[tuple[int, int], list[StreamChunk]]:
    out: dict[tuple[int, int], list[StreamChunk]] = {}
    while not engine.idle:
        for chunk in engine.step():
            out.setdefault((chunk.request, chunk.sample_index), []).append(chunk)
        engine.scheduler.check()
    return out


def tokens(chunks: list[StreamChunk]) -> list[int]:
    return [chunk.token_id for chunk in chunks if chunk.token_id is not None]


def poisoned_model() -> torch.nn.Module:
    config = model_config(norm="post")  # an untied head: the NaN row of the embedding is not a column of the logits
    model = build(config)
    with torch.no_grad():
        model.embedding.tokens.weight[POISONED] = math.nan
    return model


def test_a_request_with_nan_logits_fails_alone_and_its_blocks_are_never_published() -> None:
    model = poisoned_model()
    bad = [1, 2, 3, 4, 5, 6, 7, 8, POISONED, 9]
    alone = Engine(model, CACHE)
    healthy = [[5, 6, 7], list(range(14, 34)), [8, 9, 10, 11, 12]]
    expected = []
    for prompt in healthy:
        alone.add_request(prompt, GREEDY)
        expected.append(tokens(run(alone)[len(expected), 0]))
    engine = Engine(model, CACHE)
    for prompt in (healthy[0], bad, healthy[1], healthy[2]):
        engine.add_request(prompt, GREEDY)
    out = run(engine)
    assert [tokens(out[i, 0]) for i in (0, 2, 3)] == expected
    (end,) = [chunk for chunk in out[1, 0] if chunk.finish_reason]
    assert end.finish_reason == "error" and "numerical" in (end.error or "") and not tokens(out[1, 0])
    engine.add_request(
        [*bad[:8], 40, 41], GREEDY
    )  # the same finite start: right, whatever remains of the failed sequence
    again = tokens(run(engine)[4, 0])
    alone.add_request([*bad[:8], 40, 41], GREEDY)
    assert again == tokens(run(alone)[3, 0])


@pytest.mark.parametrize("dtype", ["float64", "fp8-e4m3", "fp8-e5m2", "int8", "int4"])
def test_blocks_of_a_failed_sequence_are_cleared_for_the_next(dtype: str) -> None:
    """With one sequence at a time, the next one gets the blocks in which NaN was written, in any format."""
    model = poisoned_model()
    engine = Engine(
        model, CacheConfig(dtype=dtype, max_num_seqs=1, max_seq_len=24, block_size=4, prefill_chunk_size=24)
    )
    engine.add_request([POISONED] * 10, GREEDY)
    assert run(engine)[0, 0][-1].finish_reason == "error"
    blocks, offsets = torch.arange(8).repeat_interleave(4), torch.arange(4).repeat(8)
    assert any(store.read_slots(blocks, offsets, torch.float64).isnan().any() for store in engine.kv_cache.keys)
    engine.add_request([5, 6, 7], GREEDY)
    after = tokens(run(engine)[1, 0])
    fresh = Engine(model, dataclasses.replace(CACHE, dtype=dtype))
    fresh.add_request([5, 6, 7], GREEDY)
    assert after == tokens(run(fresh)[0, 0])


def test_a_prefix_s_root_covers_the_formats() -> None:
    model = build(model_config())
    outputs = [{"dtype": "int8"}, {"dtype": "int4"}, {"key_dtype": "int8"}, {"value_dtype": "int8"}]
    outputs.append({"key_dtype": "int8", "value_dtype": "int4"})
    configs = [CacheConfig(max_num_seqs=1, max_seq_len=24, block_size=4, **each) for each in outputs]  # type: ignore[arg-type]
    assert len({Engine(model, cache)._root("") for cache in configs}) == len(configs)
    same = CacheConfig(max_num_seqs=1, max_seq_len=24, block_size=4, key_dtype="int8", value_dtype="int8")
    assert Engine(model, same)._root("") == Engine(model, configs[0])._root("")


@pytest.mark.parametrize("position", ["rope-dynamic", "rope-longrope"])
def test_prompts_share_blocks_within_a_rotary_regime_only(position: str) -> None:
    engine = Engine(build(model_config(position)), CACHE)
    prompt = list(range(1, 17))
    # The original length is 20: the second request is recomputed at 21 tokens, and leaves blocks of both regimes.
    for tokens, max_tokens, hits in ((prompt, 1, 0), (prompt, 20, 12), (prompt + [9] * 8, 1, 16), (prompt, 2, 12)):
        before = engine.kv_cache_manager.stats().hit_tokens
        request = engine.add_request(tokens, SamplingParams(temperature=0, max_tokens=max_tokens))
        metrics = engine.metrics(request)
        run(engine)
        assert metrics.num_cached_tokens == hits and metrics.num_preemptions == 0
        assert engine.kv_cache_manager.stats().hit_tokens - before == hits


def test_requests_with_another_salt_share_no_blocks() -> None:
    engine = Engine(build(model_config()), CACHE)
    prompt = list(range(1, 17))
    for salt, hits in (("a", 0), ("b", 0), ("a", 12)):
        before = engine.kv_cache_manager.stats().hit_tokens
        engine.add_request(prompt, GREEDY, cache_salt=salt)
        run(engine)
        assert engine.kv_cache_manager.stats().hit_tokens - before == hits


def test_fingerprints_differ_by_the_adapter() -> None:
    model = build(model_config())
    plain, one, two = (
        Engine(model, CACHE, config=EngineConfig(adapter_fingerprint=name)).cache_fingerprint("")
        for name in ("", "one", "two")
    )
    assert list(one.differences(plain.parts)) == ["adapter: one here, none there"]
    assert list(one.differences(two.parts)) == ["adapter: one here, two there"]
    assert len({each.digest() for each in (plain, one, two)}) == 3


def test_generated_tokens_are_part_of_the_prefix_cache() -> None:
    engine = Engine(build(model_config()), CACHE)
    prompt = list(range(1, 8))
    engine.add_request(prompt, GREEDY)
    outputs = tokens(run(engine)[0, 0])
    engine.add_request([*prompt, *outputs, 3], GREEDY)
    run(engine)
    assert (
        engine.kv_cache_manager.stats().hit_tokens == 16
    )  # 7 + 12 tokens, the last one never computed: 4 whole blocks


def test_samples_share_the_prompt_s_blocks_and_differ_by_their_number_only() -> None:
    model = build(model_config(), dtype=torch.float32)
    cache = CacheConfig(max_num_seqs=4, max_seq_len=96, block_size=4, prefill_chunk_size=32)
    engine = Engine(model, cache)
    options = SamplingParams(temperature=1, max_tokens=10, n=3, seed=7)
    engine.add_request(list(range(1, 30)), options)
    peak = 0
    out: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while not engine.idle:
        for chunk in engine.step():
            out[chunk.sample_index] += [] if chunk.token_id is None else [chunk.token_id]
        peak = max(peak, *engine.kv_cache_manager.stats().used)
    assert len({tuple(t) for t in out.values()}) == 3
    assert peak <= 7 + 3 * 4  # 7 whole prompt blocks once, not three times
    lone = Engine(model, cache)
    lone.add_request(list(range(1, 30)), SamplingParams(temperature=1, max_tokens=10, n=1, seed=7))
    assert tokens(run(lone)[0, 0]) == out[0]


def test_seeded_output_does_not_depend_on_the_batch() -> None:
    model = build(model_config(), dtype=torch.float64)
    options = SamplingParams(temperature=1, top_p=0.9, max_tokens=10, seed=3)
    lone = Engine(model, CACHE)
    lone.add_request([4, 5, 6], options)
    expected = tokens(run(lone)[0, 0])
    for neighbors in (
        [SamplingParams(temperature=1, max_tokens=10)] * 3,
        [GREEDY, SamplingParams(seed=9, max_tokens=30)],
    ):
        engine = Engine(model, CACHE)
        for i, other in enumerate(neighbors):
            engine.add_request([i + 1] * (i + 9), other)
        mine = engine.add_request([4, 5, 6], options)
        assert tokens(run(engine)[mine, 0]) == expected


def test_preempted_sequences_draw_the_same_tokens() -> None:
    model = build(model_config(), dtype=torch.float64)
    options = SamplingParams(temperature=1, max_tokens=40, seed=3, ignore_eos=True)
    prompts = [[i + 1] * (9 + i) for i in range(4)]
    expected = []
    for prompt in prompts:
        engine = Engine(model, CACHE)
        engine.add_request(prompt, options)
        expected.append(tokens(run(engine)[0, 0]))
    engine = Engine(model, dataclasses.replace(CACHE, num_blocks=32))
    for prompt in prompts:
        engine.add_request(prompt, options)
    chunks = run(engine)
    assert [tokens(chunks[i, 0]) for i in range(4)] == expected
    assert engine.scheduler.stats().preemptions > 0


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt: must have at least 1 token, got 0"),
        ([VOCAB], {}, f"prompt: token id must be below {VOCAB}, got {VOCAB}"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ([1], {"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ([1], {"bad_words_ids": ((1, -1),)}, "bad_words"),
        ([1] * 97, {}, "must have at most 96 tokens, got 97"),
        ([1], {"stop": ("x",)}, "tokenizer"),
    ],
)
def test_invalid_requests_are_rejected_before_they_are_queued(
    prompt: list[int], options: dict[str, object], message: str
) -> None:
    engine = Engine(build(model_config()), CACHE)
    with pytest.raises(RequestError, match=message):
        engine.add_request(prompt, SamplingParams.from_options(**options))
    assert engine.idle
    engine.add_request([1, 2], GREEDY)
    assert len(tokens(run(engine)[0, 0])) == 12


def test_a_stop_string_ends_its_sample_and_is_not_in_the_text() -> None:
    tokenizer = train_tokenizer("byte", ["x"])
    config = model_config()
    from dataclasses import replace

    model = build(replace(config, vocab_size=tokenizer.vocab_size))
    engine = Engine(model, CACHE, tokenizer=tokenizer)
    engine.add_request(tokenizer.encode("hello"), SamplingParams(temperature=0, max_tokens=20))
    full_text = "".join(chunk.text for chunk in run(engine)[0, 0])
    stop = full_text[5:8]
    request = engine.add_request(tokenizer.encode("hello"), SamplingParams(temperature=0, max_tokens=20, stop=(stop,)))
    chunks = run(engine)[request, 0]
    assert "".join(chunk.text for chunk in chunks) == full_text[: full_text.find(stop)]
    assert chunks[-1].finish_reason == "stop"
    assert all(used == 0 for used in engine.kv_cache_manager.stats().used)


def test_aborted_requests_free_everything() -> None:
    engine = Engine(build(model_config()), CACHE)
    remaining = engine.add_request([1, 2, 3], GREEDY)
    gone = [engine.add_request(list(range(1, 20)), SamplingParams(max_tokens=40)) for _ in range(6)]
    engine.step()
    for request in gone:
        engine.abort_request(request)
    out = run(engine)
    assert tokens(out[remaining, 0]) and all((request, 0) not in out or not tokens(out[request, 0]) for request in gone)
    assert engine.kv_cache_manager.stats().used == (0,)


def test_an_exception_in_a_callers_function_ends_only_its_request() -> None:
    def allowed(text: Sequence[int]) -> list[int]:
        raise RuntimeError("no")

    engine = Engine(build(model_config()), CACHE)
    alone = engine.add_request([1, 2, 3], GREEDY)
    expected = tokens(run(engine)[alone, 0])
    for sampling in (
        SamplingParams(allowed_tokens_fn=allowed, max_tokens=4),
        SamplingParams(allowed_tokens_fn=allowed, max_tokens=4, num_beams=2),
    ):
        sick, fine = engine.add_request([7, 8], sampling), engine.add_request([1, 2, 3], GREEDY)
        out = run(engine)
        assert out[sick, 0][-1].finish_reason == "error" and "RuntimeError: no" in (out[sick, 0][-1].error or "")
        assert tokens(out[fine, 0]) == expected
