"""Overflow modes: a sequence at its length limit, and a full pool; per engine and per request.

The scheduler without a model decides which sequences end, wait and are rejected; an engine gives the tokens.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvad.cache.config import CONTINUING_MODES, OVERFLOW_MODES, CacheConfig, OverflowMode, resolve_for_model
from kvad.cache.sizing.fits import find_fits
from kvad.cache.sizing.memory_plan import plan_memory
from kvad.engine import Engine
from kvad.engine.scheduling.limits import ENDLESS
from kvad.engine.scheduling.request import SamplingParams, StreamChunk
from kvad.errors import ConfigError, RequestError
from tests.support.driver import run_engine, tokens_of
from tests.support.random_models import LIMIT, build, encoder_config, model_config, pair_config
from tests.support.scheduler_run import FakeModelRun
from tests.support.stream_harness import RandomRequests, SchedulerHarness
from tests.support.streams import EXACT_SETUPS, FULL, Setup

# ---------------------------------------------------------------- the scheduler


def fake_run(blocks: int, **options: Any) -> FakeModelRun:
    """Return a scheduler over ``blocks`` blocks of four tokens, without prefix caching and chunks."""
    return FakeModelRun(blocks=blocks, budget=64, chunk=64, prefix=False, **options)


def test_preempted_sequences_generate_everything() -> None:
    run = fake_run(6)
    for number in (1, 2, 3):
        run.add(number, 4, max_tokens=9)  # 12 tokens stored: 3 blocks each, 9 in all
    run.run()
    assert run.num_tokens() == {1: 9, 2: 9, 3: 9}
    assert run.preemptions() > 0 and set(run.ends.values()) == {("length", "max_tokens")}


def test_stop_ends_the_youngest_sequence_that_cannot_grow() -> None:
    """Six blocks: each sequence has one, then two; for a third block, the youngest ends."""
    run = fake_run(6)
    for number in (1, 2, 3):
        run.add(number, 4, max_tokens=9, overflow="stop")
    run.run()
    assert run.num_tokens() == {1: 9, 2: 9, 3: 5}
    assert run.ends == {1: ("length", "max_tokens"), 2: ("length", "max_tokens"), 3: ("length", "pool")}
    assert run.preemptions() == 0


def test_stop_never_ends_a_sequence_that_needs_no_block() -> None:
    """The oldest needs a block and the youngest has room in its last one, so the oldest ends."""
    run = fake_run(3)
    run.add(1, 7, max_tokens=6, overflow="stop")  # two blocks; the third is needed at 9 stored tokens
    run.add(2, 1, max_tokens=3, overflow="stop")
    run.run()
    assert run.ends == {1: ("length", "pool"), 2: ("length", "max_tokens")}
    assert len(run.tokens[1]) == 2 and len(run.tokens[2]) == 3


def test_a_sequence_in_mode_stop_without_output_waits() -> None:
    """A prompt of 12 is admitted, but the others grow, so it is preempted and recomputed."""
    run = fake_run(5, rows=3)
    run.add(1, 4, max_tokens=5, overflow="stop")
    run.add(2, 4, max_tokens=5, overflow="stop")
    run.scheduler._batch_builder._prefill_chunk_size = 4
    run.add(3, 12, max_tokens=2, overflow="stop")
    run.run()
    assert run.tokens == {1: [1] * 5, 2: [2] * 5, 3: [3] * 2} and run.preemptions() == 1


def test_a_request_s_mode_precedes_the_engine_s() -> None:
    run = fake_run(4, overflow="stop")
    run.add(1, 4, max_tokens=9)
    run.add(2, 4, max_tokens=9, overflow="preempt")
    run.run()
    assert run.ends == {1: ("length", "max_tokens"), 2: ("length", "max_tokens")} and run.preemptions() > 0
    run = fake_run(4, overflow="stop")
    run.add(1, 4, max_tokens=9)
    run.add(2, 4, max_tokens=9)
    run.run()
    assert run.ends == {1: ("length", "max_tokens"), 2: ("length", "pool")} and run.preemptions() == 0


def test_reject_reserves_the_worst_case_and_releases_it() -> None:
    run = fake_run(6, overflow="reject")
    run.add(1, 4, max_tokens=9)  # 12 stored tokens: 3 blocks
    run.add(2, 4, max_tokens=9)
    with pytest.raises(RequestError, match="the request can need 1 blocks, but 0 of 6 are neither reserved"):
        run.add(3, 1, max_tokens=1)
    run.run()
    assert run.preemptions() == 0 and {len(run.tokens[1]), len(run.tokens[2])} == {9}
    run.add(3, 4, max_tokens=21)  # all six again
    run.scheduler.abort_request(3)
    run.add(4, 4, max_tokens=21)
    run.run()
    assert len(run.tokens[4]) == 21


def test_a_rejection_names_both_numbers() -> None:
    run = fake_run(40, overflow="reject")
    with pytest.raises(RequestError, match="60 prompt tokens and max_tokens 5 exceed the model's limit, 64 tokens"):
        run.add(1, 60, max_tokens=5)
    with pytest.raises(RequestError, match="without max_tokens the request could exceed the model's limit, 64 tokens"):
        run.add(1, 60)
    run.add(1, 60, max_tokens=4)
    with pytest.raises(RequestError, match="can need 12 blocks, but 10 of 40"):
        fake_run(40, overflow="reject", watermark=0.75).add(1, 40, max_tokens=9)


def test_a_sequence_with_reserved_blocks_is_never_preempted() -> None:
    """The sequence in mode reject is the youngest; the older one is preempted, or ends."""
    for other, end in (("preempt", "max_tokens"), ("stop", "pool")):
        run = fake_run(6)
        run.add(1, 4, max_tokens=17, overflow=other)
        run.step()
        run.add(2, 4, max_tokens=17, overflow="reject")
        run.run()
        assert len(run.tokens[2]) == 17 and run.scheduler.metrics(2).num_preemptions == 0
        assert run.ends[1] == ("length", end)


def test_a_stopped_beam_search_returns_its_best_hypotheses() -> None:
    config = CacheConfig(block_size=4, max_num_seqs=4, max_seq_len=40, num_blocks=7, enable_prefix_caching=False)
    harness, chunks = SchedulerHarness(Setup((FULL,), config, 12)), list[StreamChunk]()
    harness.add([1, 2, 0], SamplingParams(max_tokens=20, overflow="reject"), stop_tokens=frozenset())
    harness.scheduler.add_request(7, [1, 0], SamplingParams(num_beams=2, n=2, max_tokens=10, overflow="stop"))
    harness.expected[7] = {}
    harness.compare = chunks.extend  # type: ignore[method-assign]
    while not harness.scheduler.idle:
        harness.step()
    chunks = [chunk for chunk in chunks if chunk.request == 7]
    ends = {chunk.sample_index: (chunk.finish_reason, chunk.limit) for chunk in chunks if chunk.finish_reason}
    assert ends == {0: ("length", "pool"), 1: ("length", "pool")}
    assert 0 < sum(chunk.token_id is not None for chunk in chunks) < 20


def test_only_admissions_keep_the_watermark_free() -> None:
    """Nine blocks, a quarter of them free: two sequences are admitted and grow into the watermark, the third waits."""
    run = fake_run(9, watermark=0.25)
    for number in (1, 2, 3):
        run.add(number, 12, max_tokens=4)
    run.step()
    assert run.running == [(1, 2)]
    assert run.manager.stats().watermark == (3,) and run.manager.stats().used == (6,)
    run.step()
    assert run.manager.stats().used == (8,)
    run.run()
    assert run.preemptions() == 0 and set(run.num_tokens().values()) == {4}
    plain = fake_run(9)
    for number in (1, 2, 3):
        plain.add(number, 12, max_tokens=4)
    plain.run()
    assert plain.preemptions() > 0


def test_the_watermark_counts_sequences_admitted_in_the_same_step() -> None:
    run = fake_run(8, watermark=0.25)
    # Prompts take three steps; all of their blocks count from the start.
    run.scheduler._batch_builder._prefill_chunk_size = 4
    for number in (1, 2, 3):
        run.add(number, 12, max_tokens=1)
    run.step()
    assert run.running == [(1, 2)]


def test_a_single_sequence_is_admitted_whatever_the_watermark() -> None:
    run = fake_run(4, watermark=0.9)
    run.add(1, 12, max_tokens=3)
    run.run()
    assert run.tokens[1] == [1] * 3


def test_preempted_beams_are_admitted_whatever_the_watermark() -> None:
    """Each holds four of ten blocks, of which an admission beside another request leaves five free."""
    sizes = {"block_size": 4, "max_num_seqs": 2, "max_seq_len": 40, "num_blocks": 10}
    harness = SchedulerHarness(Setup((FULL,), CacheConfig(**sizes, watermark=0.5, enable_prefix_caching=False), 64))
    harness.add([1, 2, 0], SamplingParams(num_beams=2, max_tokens=16), stop_tokens=frozenset())
    for _ in range(12):
        harness.step()
    assert harness.scheduler.preempt(0)
    harness.drain(100)


@pytest.mark.parametrize("overflow", ["stop", "reject"])
def test_no_sequence_ends_for_one_that_is_computed_alone(overflow: OverflowMode) -> None:
    """Each holds three of eight blocks, of which an admission leaves four free; then a step fails."""
    run = fake_run(8, watermark=0.5)
    run.add(1, 4, max_tokens=12, overflow=overflow)
    run.add(2, 4, max_tokens=12)
    for _ in range(7):
        run.step()
    assert run.scheduler.retry_alone(run.output())
    run.run()
    assert run.num_tokens() == {1: 12, 2: 12} and set(run.ends.values()) == {("length", "max_tokens")}


def test_the_peak_counts_blocks_in_use_at_once() -> None:
    run = fake_run(9)
    run.add(1, 4, max_tokens=5)
    run.add(2, 4, max_tokens=1)
    run.run()
    stats = run.manager.stats()
    assert (stats.used, stats.peak) == ((0,), (2,))
    run.manager.reset_peak()
    assert run.manager.stats().peak == (0,)


def test_a_full_pool_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvad.engine.scheduling")
    run = fake_run(4)
    run.add(1, 4, max_tokens=9)
    run.add(2, 4, max_tokens=9, overflow="stop")
    run.run()
    messages = [record.getMessage() for record in caplog.records]
    ended = "the pool is full: a sequence is ended (request 2, sample 0); "
    assert messages == [ended + "blocks used (4,), peak (4,), watermark (0,), of (4,)"]


# ---------------------------------------------------------------- random requests


class MixedModes(SchedulerHarness):
    """Every request has a random overflow mode."""

    def __init__(self, setup: Setup, **parts: Any) -> None:
        super().__init__(setup, **parts)
        self.rng, self.modes, self.num_rejected, self.num_stopped = random.Random(5), dict[int, str](), 0, 0

    def add(self, prompt: Sequence[int], sampling: SamplingParams, *rest: Any) -> int:  # type: ignore[override]
        mode = self.rng.choice(("preempt", "stop", "reject")) if sampling.num_beams == 1 else "preempt"
        try:
            request = super().add(prompt, replace(sampling, overflow=mode), *rest)  # type: ignore[arg-type]
        except RequestError:
            if mode != "reject":
                raise
            self.num_rejected += 1
            return -1
        self.modes[request] = mode
        return request

    def compare(self, chunks: Sequence[StreamChunk]) -> None:
        for chunk in chunks:
            mode = self.modes[chunk.request]
            if chunk.limit == "pool" and self.expected[chunk.request] and mode != "preempt":
                assert mode == "stop", "a sequence with reserved blocks has none"
                self.num_stopped += 1
            if mode == "reject":
                assert self.metrics[chunk.request].num_preemptions == 0
        super().compare(chunks)


class MixedRequests(RandomRequests):
    harness_type = MixedModes


TWO_GROUPS = EXACT_SETUPS["no-prefix"]
TWO_GROUPS = TWO_GROUPS._replace(config=replace(TWO_GROUPS.config, block_size=2, num_blocks=24))


@pytest.mark.parametrize("watermark", [0.0, 0.3])
@pytest.mark.parametrize("setup", [EXACT_SETUPS["full-tight"], TWO_GROUPS])
def test_every_stream_equals_its_solo_run_or_its_beginning(setup: Setup, watermark: float) -> None:
    harness = MixedRequests(setup._replace(config=replace(setup.config, watermark=watermark)), 3).run(1000)
    assert isinstance(harness, MixedModes)
    pool_was_full = harness.num_stopped > 0 and harness.scheduler.stats().preemptions > 10
    assert harness.num_rejected > 20 and (pool_was_full or watermark)


def test_missing_reservations_are_detected() -> None:
    requests = MixedRequests(EXACT_SETUPS["full-tight"], 3)
    requests.harness.scheduler._reservations.reserve = lambda *_: (0,)  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="with reserved blocks"):
        requests.run(3000)


# ---------------------------------------------------------------- the engine


def engine(position: str = "rope", *, rows: int = 2, **cache: Any) -> Engine:
    fields = {
        "dtype": "float64",
        "block_size": 4,
        "max_num_seqs": rows,
        "max_seq_len": LIMIT,
        "prefill_chunk_size": 8,
        **cache,
    }
    return Engine(build(model_config(position)), CacheConfig(**fields))


def generate(engine: Engine, *prompts: Sequence[int], **options: Any) -> list[tuple[list[int], str | None, str | None]]:
    """Return (tokens, finish reason, limit) of each prompt."""
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(temperature=0, **options))
    return [
        (tokens_of(chunks), chunks[-1].finish_reason, chunks[-1].limit)
        for _, chunks in sorted(run_engine(engine).items())
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("capacity", [40, pytest.param(LIMIT, marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize(("mode", "policy"), [("window", "window({})"), ("sinks", "sinks(4, {})")])
@pytest.mark.parametrize("position", ["rope", "alibi", "t5", "none"])
def test_an_overflow_mode_equals_its_policy_from_the_start(
    position: str, mode: str, policy: str, layout: str, capacity: int
):
    policy_text = policy.format(capacity - 4 if mode == "sinks" else capacity)
    prompt = [3, 1, 4, 1, 5]
    (right,) = generate(
        engine(position, layout=layout, max_seq_len=capacity, policy=policy_text, endless=True), prompt, max_tokens=150
    )
    on = engine(position, layout=layout, max_seq_len=capacity, overflow=mode)
    assert (on.cache.policy, on.cache.endless) == (policy_text, True)
    assert generate(on, prompt, max_tokens=150) == [right] and right[1:] == ("length", "max_tokens")
    (plain,) = generate(engine(position, layout=layout, max_seq_len=capacity), prompt)
    by = "model" if capacity == LIMIT else "cache"
    assert plain[1:] == ("length", by) and len(plain[0]) == capacity - 5
    assert right[0][: len(plain[0])] == plain[0]  # a shorter sequence loses no token
    for requested in ("stop", "preempt"):
        assert generate(on, prompt, overflow=requested) == [plain]
    assert generate(on, prompt, overflow="reject", max_tokens=9)[0][0] == plain[0][:9]
    with pytest.raises(RequestError, match="could exceed"):
        generate(on, prompt, overflow="reject")


def test_a_prompt_may_exceed_the_limit_if_sequences_continue() -> None:
    prompt = [7 * i % 60 for i in range(2 * LIMIT)]
    for capacity, chunk in ((40, 512), (LIMIT, 8)):
        ((tokens, _, _),) = generate(
            engine(overflow="sinks", max_seq_len=capacity, prefill_chunk_size=chunk), prompt, max_tokens=8
        )
        by_hand = engine(policy=f"sinks(4, {capacity - 4})", endless=True, max_seq_len=capacity, prefill_chunk_size=5)
        assert generate(by_hand, prompt, max_tokens=8)[0][0] == tokens
    with pytest.raises(RequestError, match=f"must have at most {LIMIT} tokens, got {2 * LIMIT}"):
        generate(engine(), prompt)


def test_summaries_raise_the_cache_s_limit_to_the_model_s() -> None:
    prompt = [3, 1, 4, 1, 5]
    ((full_tokens, _, _),) = generate(engine(), prompt)
    on = engine(overflow="summarize", max_seq_len=40)
    assert on.cache.policy == "tiered(36, 0, int8, int8, 14, 4, 8, 4)" and not on.cache.endless
    ((tokens, finish, limit),) = generate(on, prompt)
    assert (len(tokens), finish, limit) == (LIMIT - 5, "length", "model")
    assert tokens[:35] == full_tokens[:35]  # up to the capacity nothing is summarized
    ((stopped, _, limit),) = generate(on, prompt, overflow="stop")
    assert stopped == full_tokens[:35] and limit == "cache"
    by_hand = engine(policy=on.cache.policy)
    assert generate(by_hand, prompt)[0][0] == tokens
    config = model_config()
    small = plan_memory(config, on.cache).pool
    assert (
        small
        < plan_memory(
            config, CacheConfig(dtype="float64", block_size=4, max_num_seqs=2, max_seq_len=LIMIT, prefill_chunk_size=8)
        ).pool
    )
    assert small == on.kv_cache.payload_bytes() + on.kv_cache.scale_bytes() + on.kv_cache.metadata_bytes()


@pytest.mark.parametrize("position", ["learned", "sinusoidal"])
def test_added_positions_allow_summaries_only(position: str) -> None:
    ((tokens, _, limit),) = generate(engine(position, overflow="summarize", max_seq_len=40), [3, 1, 4])
    assert len(tokens) == LIMIT - 3 and limit == "model"
    for mode in ("window", "sinks"):
        with pytest.raises(ConfigError, match=f"{mode}: {position} positions are part of every key"):
            engine(position, overflow=mode)


@pytest.mark.parametrize(("requested", "has"), [("window", "preempt"), ("sinks", "window"), ("summarize", "sinks")])
def test_a_request_continues_only_if_the_cache_was_created_for_it(requested: str, has: str) -> None:
    with pytest.raises(
        RequestError, match=f"overflow: {requested} must be configured when the cache is created"
    ) as caught:
        generate(engine(overflow=has), [1, 2], overflow=requested)
    assert f"--overflow {requested}" in caught.value.hint
    assert (
        generate(engine(overflow=requested, max_seq_len=40), [1, 2], max_tokens=60, overflow=requested)[0][2]
        == "max_tokens"
    )


def test_a_full_pool_in_each_mode() -> None:
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    alone = [generate(engine(), prompt, max_tokens=30)[0] for prompt in prompts]
    tight = {"max_num_seqs": 3, "num_blocks": 14, "enable_prefix_caching": False}
    waits = engine(**tight)
    assert generate(waits, *prompts, max_tokens=30) == alone and waits.scheduler.stats().preemptions > 0
    stops = engine(**tight, overflow="stop")
    results = generate(stops, *prompts, max_tokens=30)
    assert stops.scheduler.stats().preemptions == 0 and results[0] == alone[0]
    for (tokens, _, limit), (right, _, _) in zip(results, alone, strict=True):
        assert tokens == right[: len(tokens)] and (limit == "pool") == (len(tokens) < len(right))
    assert any(limit == "pool" for _, _, limit in results)
    refuses = engine(**tight, overflow="reject")
    with pytest.raises(RequestError, match="the request can need 8 blocks, but 6 of 14"):
        generate(refuses, *prompts, max_tokens=30)
    while not refuses.idle:
        refuses.step()
    assert generate(refuses, prompts[1], max_tokens=30) == [alone[1]] and refuses.scheduler.stats().preemptions == 0


def test_a_completion_names_its_limit() -> None:
    assert generate(engine(), [1, 2], max_tokens=3)[0][1:] == ("length", "max_tokens")
    assert generate(engine(), [1, 2])[0][1:] == ("length", "model")
    assert generate(engine(), [1, 2], max_tokens=LIMIT - 2)[0][1:] == (
        "length",
        "max_tokens",
    )  # both limits: the request's
    assert generate(engine(), [1, 2], max_tokens=LIMIT)[0][1:] == ("length", "model")
    assert generate(engine(max_seq_len=20), [1, 2])[0][1:] == ("length", "cache")
    assert generate(engine(max_num_seqs=1, num_blocks=3), [1, 2])[0][1:] == ("length", "pool")
    first = generate(engine(), [1, 2], max_tokens=3)[0][0][0]
    assert generate(engine(), [1, 2], max_tokens=1, stop_token_ids=(first,))[0][1:] == ("stop", None)


def test_an_endless_request_runs_until_it_is_aborted() -> None:
    on = engine(overflow="sinks", max_seq_len=24)
    number = on.add_request([1, 2, 3], SamplingParams(temperature=0))
    tokens = 0
    for _ in range(300):
        tokens += sum(piece.token_id is not None for piece in on.step())
    assert tokens == 300 and on.scheduler.sequences(number)[0].max_len == ENDLESS
    assert max(on.kv_cache_manager.stats().used) <= on.kv_cache_manager.groups[0].max_blocks_per_seq
    on.abort_request(number)
    assert on.idle


# ---------------------------------------------------------------- invalid options


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"overflow": "sink"}, "cache.overflow: must be one of .*, got 'sink'"),
        ({"watermark": 1.0}, r"cache.watermark: must be in \[0, 1\), got 1"),
        ({"watermark": -0.1}, "got -0.1"),
        ({"watermark": "much"}, "cache.watermark: must be float, got 'much'"),
        ({"overflow": "sinks", "policy": "window(8)"}, r"sinks is sinks\(4, 92\), but policy window\(8\) is given too"),
        ({"overflow": "sinks", "max_seq_len": 7}, "max_seq_len 7 is less than 4 sinks and a block of 4"),
        ({"overflow": "summarize"}, "max_seq_len must be below the model's limit of 96"),
        ({"overflow": "summarize", "max_seq_len": 7}, "max_seq_len 7 is less than two blocks of 4"),
        ({"overflow": "summarize", "max_seq_len": 40, "layout": "contiguous"}, "summarized in whole blocks"),
        ({"overflow": "summarize", "max_seq_len": 40, "block_size": 1}, "blocks of 1 cannot be divided"),
        ({"overflow": "sinks", "num_blocks": 9}, "cache.num_blocks: no layer keeps all tokens"),
        ({"policy": "sinks(4, 3)", "endless": True}, "the window must have at least a block of 4 tokens, got 3"),
    ],
)
def test_invalid_cache_options_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(**fields)


def test_an_encoder_accepts_no_cache_options() -> None:
    for fields in ({"overflow": "sinks"}, {"policy": "window(4)"}, {"endless": True}):
        with pytest.raises(ConfigError, match="an encoder has no cache"):
            resolve_for_model(encoder_config(), CacheConfig(max_seq_len=LIMIT, **fields))  # type: ignore[arg-type]
    assert resolve_for_model(encoder_config(), CacheConfig(max_seq_len=LIMIT)) == CacheConfig(max_seq_len=LIMIT)


def test_an_unknown_mode_is_rejected() -> None:
    with pytest.raises(RequestError, match=r"overflow: must be one of .*, got 'sotp'") as caught:
        SamplingParams.from_options(overflow="sotp")
    assert "'stop'" in caught.value.hint


@pytest.mark.parametrize("mode", OVERFLOW_MODES)
def test_resolving_twice_changes_nothing(mode: str) -> None:
    cache = CacheConfig(block_size=4, max_num_seqs=2, max_seq_len=40, overflow=mode)  # type: ignore[arg-type]
    once = resolve_for_model(model_config(), cache)
    assert resolve_for_model(model_config(), once) == once and (once == cache) == (mode not in CONTINUING_MODES)
    plan = plan_memory(model_config(), cache)
    assert plan.pool == plan_memory(model_config(), once).pool
    assert any(fit.num_seqs == 2 and fit.max_seq_len >= 40 for fit in find_fits(plan, plan.total))


def test_an_encoder_decoder_continues_past_its_limit() -> None:
    cache = CacheConfig(
        dtype="float64",
        block_size=4,
        max_num_seqs=2,
        max_seq_len=24,
        prefill_chunk_size=8,
        max_source_len=16,
        overflow="sinks",
    )
    model = build(pair_config("t5"))
    on = Engine(model, cache)
    by_hand = Engine(model, replace(cache, overflow="preempt", policy="sinks(4, 20)", endless=True))
    results = []
    for each in (on, by_hand):
        each.add_request([1, 2], SamplingParams(temperature=0, max_tokens=60), encoder_token_ids=[3, 4, 5])
        tokens = []
        while not each.idle:
            tokens += [piece.token_id for piece in each.step() if piece.token_id is not None]
        results.append(tokens)
    assert results[0] == results[1] and len(results[0]) == 60
