"""What is done when it is full: a row at its limit, a pool without blocks; per engine and per request.

The scheduler without a model says who ends, who waits and who is refused; the engine with one says the tokens.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvad.cache.config import CONTINUING_MODES, OVERFLOW_MODES, CacheConfig, resolve_for_model
from kvad.cache.groups import build_groups
from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.cache.sizing.fits import find_fits
from kvad.cache.sizing.memory_plan import plan_memory
from kvad.config.model import AttentionSpec
from kvad.engine import Engine
from kvad.engine.scheduling.limits import ENDLESS, LengthLimits
from kvad.engine.scheduling.request import SamplingParams, SequenceOutput, StreamChunk
from kvad.engine.scheduling.scheduler import Scheduler
from kvad.errors import ConfigError, RequestError
from tests.engine.scheduling.test_streams import FULL, NARROW, Driver, Setup, World
from tests.support.random_models import LIMIT, build, encoder_config, model_config, pair_config

ONE = AttentionSpec(True, None, 1, 8, 8)


# ---------------------------------------------------------------- the scheduler: who gives way


class Desk:
    """A scheduler over ``blocks`` blocks of four tokens, and a model that says its request's number."""

    def __init__(self, blocks: int, *, rows: int = 4, watermark: float = 0.0, on_full: Any = "preempt") -> None:
        config = CacheConfig(
            block_size=4, max_num_seqs=rows, max_seq_len=64, num_blocks=blocks, enable_prefix_caching=False
        )
        self.ledger = KVCacheManager(
            build_groups((ONE,), config), prefix_caching=False, max_num_seqs=rows, watermark=watermark
        )
        self.scheduler = Scheduler(
            self.ledger,
            max_num_seqs=rows,
            max_num_batched_tokens=64,
            prefill_chunk_size=64,
            limit=LengthLimits(64, "model", on_full),
        )
        self.said: dict[int, list[int]] = {}
        self.ends: dict[int, tuple[str | None, str | None]] = {}
        self.running: list[tuple[int, ...]] = []

    def add(self, number: int, prompt: int, **options: Any) -> None:
        self.scheduler.add_request(number, [number] * prompt, SamplingParams(**options))
        self.said[number] = []

    def step(self) -> list[StreamChunk]:
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        self.running.append(tuple(work.sequence.request_id for work in plan.scheduled))
        results = [SequenceOutput(work.sequence.request_id if work.is_sampled else None) for work in plan.scheduled]
        events = self.scheduler.update_from_output(plan, results)
        self.scheduler.check()
        for event in events:
            if event.token_id is not None:
                self.said[event.request].append(event.token_id)
            if event.finish_reason is not None:
                self.ends[event.request] = event.finish_reason, event.limit
        return events

    def run(self) -> None:
        while not self.scheduler.idle:
            self.step()

    def preemptions(self) -> int:
        return self.scheduler.stats().preemptions


def test_preempt_everybody_says_everything() -> None:
    desk = Desk(6)
    for number in (1, 2, 3):
        desk.add(number, 4, max_tokens=9)  # 12 tokens stored: 3 blocks each, 9 in all
    desk.run()
    assert {number: len(said) for number, said in desk.said.items()} == {1: 9, 2: 9, 3: 9}
    assert desk.preemptions() > 0 and set(desk.ends.values()) == {("length", "max_tokens")}


def test_stop_ends_the_youngest_that_cannot_grow_with_what_it_has() -> None:
    """Six blocks: each row has one, then two; at the third block the youngest finds none, then the second."""
    desk = Desk(6)
    for number in (1, 2, 3):
        desk.add(number, 4, max_tokens=9, overflow="stop")
    desk.run()
    assert {number: len(said) for number, said in desk.said.items()} == {1: 9, 2: 9, 3: 5}
    assert desk.ends == {1: ("length", "max_tokens"), 2: ("length", "max_tokens"), 3: ("length", "pool")}
    assert desk.preemptions() == 0


def test_stop_never_ends_a_row_that_needs_nothing() -> None:
    """The oldest needs a block and the youngest has room in its own: the oldest ends, though it is the oldest."""
    desk = Desk(3)
    desk.add(1, 7, max_tokens=6, overflow="stop")  # two blocks; the third is needed at 9 stored tokens
    desk.add(2, 1, max_tokens=3, overflow="stop")
    desk.run()
    assert desk.ends == {1: ("length", "pool"), 2: ("length", "max_tokens")}
    assert len(desk.said[1]) == 2 and len(desk.said[2]) == 3


def test_a_row_that_stops_and_has_said_nothing_waits_instead() -> None:
    """A prompt of 12 is admitted, and cannot be placed beside rows that grow: nothing is lost, it begins again."""
    desk = Desk(5, rows=3)
    desk.add(1, 4, max_tokens=5, overflow="stop")
    desk.add(2, 4, max_tokens=5, overflow="stop")
    desk.scheduler._batch_builder._prefill_chunk_size = 4
    desk.add(3, 12, max_tokens=2, overflow="stop")
    desk.run()
    assert desk.said == {1: [1] * 5, 2: [2] * 5, 3: [3] * 2} and desk.preemptions() == 1


def test_the_request_s_own_word_stands_before_the_engine_s() -> None:
    desk = Desk(4, on_full="stop")
    desk.add(1, 4, max_tokens=9)
    desk.add(2, 4, max_tokens=9, overflow="preempt")
    desk.run()
    assert desk.ends == {1: ("length", "max_tokens"), 2: ("length", "max_tokens")} and desk.preemptions() > 0
    desk = Desk(4, on_full="stop")
    desk.add(1, 4, max_tokens=9)
    desk.add(2, 4, max_tokens=9)
    desk.run()
    assert desk.ends == {1: ("length", "max_tokens"), 2: ("length", "pool")} and desk.preemptions() == 0


def test_refuse_promises_the_worst_case_and_gives_it_back() -> None:
    desk = Desk(6, on_full="reject")
    desk.add(1, 4, max_tokens=9)  # 12 stored tokens: 3 blocks
    desk.add(2, 4, max_tokens=9)
    with pytest.raises(RequestError, match="the request can need 1 blocks, but 0 of 6 are neither reserved"):
        desk.add(3, 1, max_tokens=1)
    desk.run()
    assert desk.preemptions() == 0 and {len(said) for said in (desk.said[1], desk.said[2])} == {9}
    desk.add(3, 4, max_tokens=21)  # all six again
    desk.scheduler.abort_request(3)
    desk.add(4, 4, max_tokens=21)
    desk.run()
    assert len(desk.said[4]) == 21


def test_refuse_names_both_numbers() -> None:
    desk = Desk(40, on_full="reject")
    with pytest.raises(RequestError, match="60 prompt tokens and max_tokens 5 exceed the model's limit, 64 tokens"):
        desk.add(1, 60, max_tokens=5)
    with pytest.raises(RequestError, match="without max_tokens the request could exceed the model's limit, 64 tokens"):
        desk.add(1, 60)
    desk.add(1, 60, max_tokens=4)
    with pytest.raises(RequestError, match="can need 12 blocks, but 10 of 40"):
        Desk(40, on_full="reject", watermark=0.75).add(1, 40, max_tokens=9)


def test_what_was_promised_room_is_never_what_gives_way() -> None:
    """The refusing row is the youngest, and the older ones yield to it: one waits, one ends."""
    for other, end in (("preempt", "max_tokens"), ("stop", "pool")):
        desk = Desk(6)
        desk.add(1, 4, max_tokens=17, overflow=other)
        desk.step()
        desk.add(2, 4, max_tokens=17, overflow="reject")
        desk.run()
        assert len(desk.said[2]) == 17 and desk.scheduler.metrics(2).num_preemptions == 0
        assert desk.ends[1] == ("length", end)


def test_a_search_that_stops_has_the_best_of_what_it_has() -> None:
    world = World(
        Setup(
            (FULL,),
            CacheConfig(block_size=4, max_num_seqs=4, max_seq_len=40, num_blocks=7, enable_prefix_caching=False),
            12,
            40,
        )
    )
    world.add([1, 2, 0], SamplingParams(max_tokens=20, overflow="reject"), stops=frozenset())
    world.scheduler.add_request(7, [1, 0], SamplingParams(num_beams=2, n=2, max_tokens=10, overflow="stop"))
    world.streams[7] = {}
    found: list[StreamChunk] = []
    world._judge = found.extend  # type: ignore[method-assign]
    while not world.scheduler.idle:
        world.step()
    ends = {
        event.sample_index: (event.finish_reason, event.limit)
        for event in found
        if event.request == 7 and event.finish_reason
    }
    assert ends == {0: ("length", "pool"), 1: ("length", "pool")}
    assert 0 < sum(event.token_id is not None for event in found if event.request == 7) < 20


def test_a_watermark_is_left_free_by_admissions_alone() -> None:
    """Nine blocks, a quarter of them free: two rows of three blocks enter, the third waits; the two grow into it."""
    desk = Desk(9, watermark=0.25)
    for number in (1, 2, 3):
        desk.add(number, 12, max_tokens=4)
    desk.step()
    assert desk.running == [(1, 2)]
    assert desk.ledger.stats().watermark == (3,) and desk.ledger.stats().used == (6,)
    desk.step()
    assert desk.ledger.stats().used == (8,)
    desk.run()
    assert desk.preemptions() == 0 and all(len(said) == 4 for said in desk.said.values())
    plain = Desk(9)
    for number in (1, 2, 3):
        plain.add(number, 12, max_tokens=4)
    plain.run()
    assert plain.preemptions() > 0


def test_a_watermark_holds_against_what_was_admitted_in_the_same_step() -> None:
    desk = Desk(8, watermark=0.25)
    # Prompts take three steps: what they will take is counted from the start.
    desk.scheduler._batch_builder._prefill_chunk_size = 4
    for number in (1, 2, 3):
        desk.add(number, 12, max_tokens=1)
    desk.step()
    assert desk.running == [(1, 2)]


def test_a_row_alone_enters_whatever_the_watermark() -> None:
    desk = Desk(4, watermark=0.9)
    desk.add(1, 12, max_tokens=3)
    desk.run()
    assert desk.said[1] == [1] * 3


def test_the_peak_is_what_was_in_use_at_once() -> None:
    desk = Desk(9)
    desk.add(1, 4, max_tokens=5)
    desk.add(2, 4, max_tokens=1)
    desk.run()
    stats = desk.ledger.stats()
    assert (stats.used, stats.peak) == ((0,), (2,))
    desk.ledger.reset_peak()
    assert desk.ledger.stats().peak == (0,)


def test_a_full_pool_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvad.engine.scheduling")
    desk = Desk(4)
    desk.add(1, 4, max_tokens=9)
    desk.add(2, 4, max_tokens=9, overflow="stop")
    desk.run()
    said = [record.getMessage() for record in caplog.records]
    ended = "the pool is full: a sequence is ended (request 2, sample 0); "
    assert said == [ended + "blocks used (4,), peak (4,), watermark (0,), of (4,)"]


# ---------------------------------------------------------------- random runs: nobody's tokens change


class Mixed(World):
    """Every request says for itself what is done when it is full."""

    def __init__(self, setup: Setup, **parts: Any) -> None:
        super().__init__(setup, **parts)
        self.rng, self.chosen, self.refused, self.stopped = random.Random(5), dict[int, str](), 0, 0

    def add(self, prompt: Sequence[int], sampling: SamplingParams, *rest: Any) -> int:  # type: ignore[override]
        chosen = self.rng.choice(("preempt", "stop", "reject")) if sampling.num_beams == 1 else "preempt"
        try:
            number = super().add(prompt, replace(sampling, overflow=chosen), *rest)  # type: ignore[arg-type]
        except RequestError:
            if chosen != "reject":
                raise
            self.refused += 1
            return -1
        self.chosen[number] = chosen
        return number

    def _judge(self, events: Sequence[StreamChunk]) -> None:
        for event in events:
            if event.limit == "pool" and len(self.streams[event.request]) and self.chosen[event.request] != "preempt":
                assert self.chosen[event.request] == "stop", "a row that was with reserved blocks has none"
                self.stopped += 1
            if self.chosen[event.request] == "reject":
                assert self.usages[event.request].num_preemptions == 0
        super()._judge(events)


@pytest.mark.parametrize("watermark", [0.0, 0.3])
@pytest.mark.parametrize(
    "setup",
    [
        Setup(
            (FULL,),
            CacheConfig(block_size=4, max_num_seqs=5, max_seq_len=40, prefill_chunk_size=7, num_blocks=12),
            12,
            40,
        ),
        Setup(
            (FULL, NARROW),
            CacheConfig(
                block_size=2,
                max_num_seqs=4,
                max_seq_len=40,
                prefill_chunk_size=6,
                num_blocks=24,
                enable_prefix_caching=False,
            ),
            9,
            40,
        ),
    ],
)
def test_every_stream_equals_its_solo_run_or_stops_short_of_it(setup: Setup, watermark: float) -> None:
    driver = Driver(setup._replace(config=replace(setup.config, watermark=watermark)), 3)
    world = driver.world = Mixed(driver.world.setup)
    driver.run(1500)
    happened = world.stopped > 0 and world.scheduler.stats().preemptions > 10
    assert world.refused > 20 and (happened or watermark)


def test_a_promise_that_is_not_kept_is_noticed() -> None:
    """Break it: a ledger that promises nothing to anybody.  The rows that were to be safe then have no room."""
    driver = Driver(
        Setup(
            (FULL,),
            CacheConfig(block_size=4, max_num_seqs=5, max_seq_len=40, prefill_chunk_size=7, num_blocks=12),
            12,
            40,
        ),
        3,
    )
    world = driver.world = Mixed(driver.world.setup)
    world.scheduler._reservations.reserve = lambda rows, length: (0,)  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="with reserved blocks"):
        driver.run(3000)


# ---------------------------------------------------------------- the engine: the tokens


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


def said(engine: Engine, *prompts: Sequence[int], **options: Any) -> list[tuple[list[int], str | None, str | None]]:
    """(tokens, finish, limit) of each."""
    ids = [engine.add_request(prompt, SamplingParams(temperature=0, **options)) for prompt in prompts]
    pieces: dict[int, list[StreamChunk]] = {number: [] for number in ids}
    while not engine.idle:
        for piece in engine.step():
            pieces[piece.request].append(piece)
    return [
        ([piece.token_id for piece in found if piece.token_id is not None], found[-1].finish_reason, found[-1].limit)
        for found in pieces.values()
    ]


@pytest.mark.parametrize("capacity", [40, LIMIT])
@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize(("on_full", "policy"), [("window", "window({})"), ("sinks", "sinks(4, {})")])
@pytest.mark.parametrize("position", ["rope", "alibi", "t5", "none"])
def test_going_on_is_that_policy_from_the_start(position: str, on_full: str, policy: str, layout: str, capacity: int):
    kept = policy.format(capacity - 4 if on_full == "sinks" else capacity)
    prompt = [3, 1, 4, 1, 5]
    (right,) = said(
        engine(position, layout=layout, max_seq_len=capacity, policy=kept, endless=True), prompt, max_tokens=150
    )
    on = engine(position, layout=layout, max_seq_len=capacity, overflow=on_full)
    assert (on.cache.policy, on.cache.endless) == (kept, True)
    assert said(on, prompt, max_tokens=150) == [right] and right[1:] == ("length", "max_tokens")
    (plain,) = said(engine(position, layout=layout, max_seq_len=capacity), prompt)
    by = "model" if capacity == LIMIT else "cache"
    assert plain[1:] == ("length", by) and len(plain[0]) == capacity - 5
    assert right[0][: len(plain[0])] == plain[0]  # nothing is lost of a row that is shorter
    for asked in ("stop", "preempt"):
        assert said(on, prompt, overflow=asked) == [plain]
    assert said(on, prompt, overflow="reject", max_tokens=9)[0][0] == plain[0][:9]
    with pytest.raises(RequestError, match="could exceed"):
        said(on, prompt, overflow="reject")


def test_a_prompt_longer_than_the_limit_goes_in_where_rows_go_on() -> None:
    prompt = [7 * i % 60 for i in range(2 * LIMIT)]
    for capacity, chunk in ((40, 512), (LIMIT, 8)):
        ((tokens, _, _),) = said(
            engine(overflow="sinks", max_seq_len=capacity, prefill_chunk_size=chunk), prompt, max_tokens=8
        )
        by_hand = engine(policy=f"sinks(4, {capacity - 4})", endless=True, max_seq_len=capacity, prefill_chunk_size=5)
        assert said(by_hand, prompt, max_tokens=8)[0][0] == tokens
    with pytest.raises(RequestError, match=f"must have at most {LIMIT} tokens, got {2 * LIMIT}"):
        said(engine(), prompt)


def test_summaries_lift_the_cache_s_limit_up_to_the_model_s() -> None:
    prompt = [3, 1, 4, 1, 5]
    ((whole, _, _),) = said(engine(), prompt)
    on = engine(overflow="summarize", max_seq_len=40)
    assert on.cache.policy == "tiered(36, 0, int8, int8, 14, 4, 8, 4)" and not on.cache.endless
    ((tokens, finish, limit),) = said(on, prompt)
    assert (len(tokens), finish, limit) == (LIMIT - 5, "length", "model")
    assert tokens[:35] == whole[:35]  # up to the capacity nothing is summarised
    ((stopped, _, limit),) = said(on, prompt, overflow="stop")
    assert stopped == whole[:35] and limit == "cache"
    by_hand = engine(policy=on.cache.policy)
    assert said(by_hand, prompt)[0][0] == tokens
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
def test_positions_that_are_added_let_a_row_be_summarised_and_not_go_on(position: str) -> None:
    ((tokens, _, limit),) = said(engine(position, overflow="summarize", max_seq_len=40), [3, 1, 4])
    assert len(tokens) == LIMIT - 3 and limit == "model"
    for on_full in ("window", "sinks"):
        with pytest.raises(ConfigError, match=f"{on_full}: {position} positions are part of every key"):
            engine(position, overflow=on_full)


@pytest.mark.parametrize(("asked", "has"), [("window", "preempt"), ("sinks", "window"), ("summarize", "sinks")])
def test_a_request_goes_on_only_where_the_cache_was_laid_out_for_it(asked: str, has: str) -> None:
    with pytest.raises(RequestError, match=f"overflow: {asked} must be configured when the cache is created") as caught:
        said(engine(overflow=has), [1, 2], overflow=asked)
    assert f"--overflow {asked}" in caught.value.hint
    assert said(engine(overflow=asked, max_seq_len=40), [1, 2], max_tokens=60, overflow=asked)[0][2] == "max_tokens"


def test_the_pool_s_three_ways() -> None:
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    alone = [said(engine(), prompt, max_tokens=30)[0] for prompt in prompts]
    tight = {"max_num_seqs": 3, "num_blocks": 14, "enable_prefix_caching": False}
    waits = engine(**tight)
    assert said(waits, *prompts, max_tokens=30) == alone and waits.scheduler.stats().preemptions > 0
    stops = engine(**tight, overflow="stop")
    found = said(stops, *prompts, max_tokens=30)
    assert stops.scheduler.stats().preemptions == 0 and found[0] == alone[0]
    for (tokens, _, limit), (right, _, _) in zip(found, alone, strict=True):
        assert tokens == right[: len(tokens)] and (limit == "pool") == (len(tokens) < len(right))
    assert any(limit == "pool" for _, _, limit in found)
    refuses = engine(**tight, overflow="reject")
    with pytest.raises(RequestError, match="the request can need 8 blocks, but 6 of 14"):
        said(refuses, *prompts, max_tokens=30)
    while not refuses.idle:
        refuses.step()
    assert said(refuses, prompts[1], max_tokens=30) == [alone[1]] and refuses.scheduler.stats().preemptions == 0


def test_each_limit_by_its_name() -> None:
    assert said(engine(), [1, 2], max_tokens=3)[0][1:] == ("length", "max_tokens")
    assert said(engine(), [1, 2])[0][1:] == ("length", "model")
    assert said(engine(), [1, 2], max_tokens=LIMIT - 2)[0][1:] == ("length", "max_tokens")  # both: as asked
    assert said(engine(), [1, 2], max_tokens=LIMIT)[0][1:] == ("length", "model")
    assert said(engine(max_seq_len=20), [1, 2])[0][1:] == ("length", "cache")
    assert said(engine(max_num_seqs=1, num_blocks=3), [1, 2])[0][1:] == ("length", "pool")
    first = said(engine(), [1, 2], max_tokens=3)[0][0][0]
    assert said(engine(), [1, 2], max_tokens=1, stop_token_ids=(first,))[0][1:] == ("stop", None)


def test_without_an_end_until_somebody_ends_it() -> None:
    on = engine(overflow="sinks", max_seq_len=24)
    number = on.add_request([1, 2, 3], SamplingParams(temperature=0))
    tokens = 0
    for _ in range(300):
        tokens += sum(piece.token_id is not None for piece in on.step())
    assert tokens == 300 and on.scheduler.sequences(number)[0].max_len == ENDLESS
    assert max(on.kv_cache_manager.stats().used) <= on.kv_cache_manager.groups[0].max_blocks_per_seq
    on.abort_request(number)
    assert on.idle


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("fields", "says"),
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
def test_a_cache_that_cannot_be(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        engine(**fields)


def test_an_encoder_keeps_nothing_and_says_so() -> None:
    for fields in ({"overflow": "sinks"}, {"policy": "window(4)"}, {"endless": True}):
        with pytest.raises(ConfigError, match="an encoder has no cache"):
            resolve_for_model(encoder_config(), CacheConfig(max_seq_len=LIMIT, **fields))  # type: ignore[arg-type]
    assert resolve_for_model(encoder_config(), CacheConfig(max_seq_len=LIMIT)) == CacheConfig(max_seq_len=LIMIT)


def test_sampling_refuses_a_word_that_is_none() -> None:
    with pytest.raises(RequestError, match=r"overflow: must be one of .*, got 'sotp'") as caught:
        SamplingParams.from_options(overflow="sotp")
    assert "'stop'" in caught.value.hint


@pytest.mark.parametrize("on_full", OVERFLOW_MODES)
def test_settling_twice_changes_nothing_and_fits_asks_for_every_capacity(on_full: str) -> None:
    cache = CacheConfig(block_size=4, max_num_seqs=2, max_seq_len=40, overflow=on_full)  # type: ignore[arg-type]
    once = resolve_for_model(model_config(), cache)
    assert resolve_for_model(model_config(), once) == once and (once == cache) == (on_full not in CONTINUING_MODES)
    plan = plan_memory(model_config(), cache)
    assert plan.pool == plan_memory(model_config(), once).pool
    assert any(fit.num_seqs == 2 and fit.max_seq_len >= 40 for fit in find_fits(plan, plan.total))


def test_an_encoder_decoder_goes_on_too() -> None:
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
    found = []
    for each in (on, by_hand):
        each.add_request([1, 2], SamplingParams(temperature=0, max_tokens=60), encoder_token_ids=[3, 4, 5])
        tokens = []
        while not each.idle:
            tokens += [piece.token_id for piece in each.step() if piece.token_id is not None]
        found.append(tokens)
    assert found[0] == found[1] and len(found[0]) == 60
