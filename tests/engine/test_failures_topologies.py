"""Combinations of encoders, beams and checkpoint defaults: mixed steps, full pools, options without effect."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvad.cache.config import CacheConfig
from kvad.cache.groups import build_groups
from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.checkpoint.generation_config import GenerationConfig, read_generation_config
from kvad.config.model import attention_specs
from kvad.engine import PromptEncoder
from kvad.engine.scheduling.request import SamplingParams, SequenceOutput, StreamChunk
from kvad.engine.scheduling.scheduler import Scheduler
from kvad.errors import CheckpointError, ConfigError, RequestError
from kvad.llm import LLM
from tests.support.driver import run_engine, tokens_of
from tests.support.random_models import build, encoder_config, model_config, pair_config

CACHE = CacheConfig(dtype="float64", max_num_seqs=4, max_seq_len=96, block_size=4, max_source_len=64)
GENERATION = GenerationConfig(decoder_start_token_id=1, eos_token_ids=(2,))


def decoder() -> LLM:
    return LLM(build(model_config()), None, CACHE)


def pair(generation: GenerationConfig = GENERATION) -> LLM:
    return LLM(build(pair_config()), None, CACHE, generation=generation)


def test_cached_and_returned_encoder_outputs_run_in_separate_steps() -> None:
    llm = pair()
    engine, options = llm.engine, SamplingParams(max_tokens=5, temperature=0)
    one = engine.add_request([1], options, encoder_token_ids=[3, 4, 5])
    engine.add_encoder_request([4, 5, 6], "mean")
    two = engine.add_request([1], options, encoder_token_ids=[6, 5])
    chunks = run_engine(engine)
    assert tokens_of(chunks[one]) == list(pair().generate([3, 4, 5], options).tokens)
    assert tokens_of(chunks[two]) == list(pair().generate([6, 5], options).tokens)


@pytest.mark.parametrize("n", [1, 3])
def test_beams_without_tokens_to_generate_end_at_once(n: int) -> None:
    """max_tokens is 0, or the prompt has the maximum length."""
    for llm, prompt, most in ((decoder(), [1, 2], 0), (decoder(), [1] * 96, None)):
        done = llm.generate(prompt, num_beams=3, n=n, max_tokens=most)
        assert [(each.token_ids, each.finish_reason) for each in done.choices] == [((), "length")] * n
        llm.engine.scheduler.check()
        assert llm.engine.idle


def scheduler(rows: int, blocks: int) -> Scheduler:
    cache = CacheConfig(max_num_seqs=rows, max_seq_len=24, block_size=4, num_blocks=blocks)
    ledger = KVCacheManager(
        build_groups(attention_specs(model_config()), cache), prefix_caching=True, max_num_seqs=rows
    )
    return Scheduler(ledger, max_num_seqs=rows, max_num_batched_tokens=64, prefill_chunk_size=64, limit=24)


def advance(found: Scheduler, candidates: dict[int, tuple[tuple[int, float], ...]]) -> list[StreamChunk]:
    """One step; ``candidates``: of the beams with that last token, three of them elsewhere."""
    output = found.schedule()
    assert output is not None
    every = tuple((token, -float(token)) for token in (3, 4, 5))
    results = [
        SequenceOutput(token_id=9, candidates=candidates.get(scheduled.sequence.token_ids[-1], every))
        for scheduled in output.scheduled
    ]
    events = found.update_from_output(output, results)
    found.check()
    return events


def test_a_preempted_search_continues_without_its_first_beam() -> None:
    found = scheduler(rows=4, blocks=24)
    found.add_request(0, [7, 7], SamplingParams(num_beams=2, temperature=0, max_tokens=6))
    advance(found, {})
    advance(found, {3: (), 4: ((4, -1.0),)})  # beam 0 has no continuation, beam 1 has one
    (live,) = found._requests[0].live_beams
    assert live.sample_index == 1
    found._preempt(live)
    found.check()
    events: list[StreamChunk] = []
    while not found.idle:
        events += advance(found, {})
    assert [event.finish_reason for event in events if event.finish_reason] == ["length"]


def test_two_preempted_searches_do_not_deadlock() -> None:
    """Each has room for its first beam only, so the younger search is preempted again."""
    found = scheduler(rows=4, blocks=6)
    for request in (0, 1):
        found.add_request(request, [7, 7, 7, request], SamplingParams(num_beams=2, temperature=0, max_tokens=8))
    events: list[StreamChunk] = []
    for _ in range(3):
        events += advance(found, {})
    for request in (1, 0):
        if found._requests[request].live_beams[0].state == "running":
            found._preempt(found._requests[request].live_beams[0])
    for _ in range(60):
        if found.idle:
            break
        events += advance(found, {})
    assert sorted(event.request for event in events if event.finish_reason) == [0, 1] and found.idle


def test_live_beams_fill_up_missing_hypotheses() -> None:
    """patience 0.25 of 4 beams: the first ending ends the search, before any beam has been forked."""
    stops = tuple(range(0, 60, 3))
    done = pair().generate(
        [3, 4, 5], num_beams=4, n=4, patience=0.25, early_stopping=True, max_tokens=20, stop_token_ids=stops
    )
    assert len({each.token_ids for each in done.choices}) == 4
    for each in done.choices:
        scored = pair().score([1, *each.token_ids], encoder_input=[3, 4, 5]).logprobs[1:]
        assert each.cumulative_logprob == pytest.approx(
            sum(one or 0.0 for one in scored) / len(each.token_ids), abs=1e-4
        )


def test_targets_of_one_source_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [pair().score(target, encoder_input=[3, 4, 5]) for target in ([1, 6, 7], [1, 8])]
    read, source = list[list[int]](), PromptEncoder.encode_source
    monkeypatch.setattr(
        PromptEncoder, "encode_source", lambda self, text, language: read.append(text) or source(self, text, language)
    )
    together = pair().score([[1, 6, 7], [1, 8]], encoder_input=[3, 4, 5])
    assert read == [[3, 4, 5]] and [each.tokens for each in together] == [(1, 6, 7), (1, 8)]
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs[1:] == pytest.approx(other.logprobs[1:])


def test_given_options_precede_the_checkpoint_s() -> None:
    llm = pair(replace(GENERATION, sampling={"min_tokens": 10, "temperature": 0.0}))
    assert len(llm.generate([3, 4], max_tokens=3).tokens) <= 3
    with pytest.raises(RequestError, match="min_tokens: must be at most max_tokens"):
        llm.generate([3, 4], max_tokens=3, min_tokens=10)


def test_the_checkpoint_s_beam_options_apply_to_searches_only() -> None:
    llm = pair(replace(GENERATION, sampling={"length_penalty": 2.0, "temperature": 0.0}))
    assert len(llm.generate([3, 4], max_tokens=3).tokens) <= 3
    outputs, expected, other = (
        llm.generate([3, 4], max_tokens=3, num_beams=2, **more).choices[0].cumulative_logprob
        for more in ({}, {"length_penalty": 2.0}, {"length_penalty": 1.0})
    )
    assert outputs == expected != other


def test_an_empty_target_prefix_is_ignored() -> None:
    llm = pair(replace(GENERATION, forced_bos_token_id=9))
    assert llm.generate([3, 4], target_prefix="", max_tokens=3, temperature=0).tokens[0] == 9


def test_options_without_effect_are_rejected() -> None:
    with pytest.raises(RequestError, match="length_penalty: requires num_beams above 1"):
        decoder().generate([1], max_tokens=2, length_penalty=2.0)
    with pytest.raises(RequestError, match="early_stopping: requires num_beams above 1"):
        SamplingParams(early_stopping="never")
    with pytest.raises(RequestError, match="language= and target_prefix= as ids"):
        pair().generate([3, 4], target_prefix=[1, 5], language="de")
    with pytest.raises(RequestError, match="language 'de': requires text, got token ids"):
        pair().generate([3, 4], source_language="de", max_tokens=2)
    with pytest.raises(RequestError, match="no encoder input"):
        decoder().logits([1], encoder_input=[2])
    encoder = LLM(build(encoder_config()), None, CACHE)
    with pytest.raises(RequestError, match=r"pool: unknown mode 'men'.*mean"):
        encoder.embed([1, 2], pool="men")  # type: ignore[arg-type]
    assert encoder.embed([1, 2]).shape == (1, 24)


@pytest.mark.parametrize("value", ["8", None, 1.5, True])
def test_a_fractional_cache_size_is_rejected(value: object) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs: must be int"):
        CacheConfig(max_num_seqs=value, max_seq_len=8)  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{"eos_token_id": "x"}, {"eos_token_id": [[1]]}, {"bad_words_ids": 5.5}])
def test_a_generation_config_without_ids_is_rejected(fields: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=f"{next(iter(fields))}: must be token ids"):
        read_generation_config({}, fields)
