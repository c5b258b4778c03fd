"""The Scheduler with no model: exact plans, lanes, events and order."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvad.cache.config import CacheConfig
from kvad.cache.groups import build_groups
from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.config.model import AttentionSpec
from kvad.engine.scheduling.request import SamplingParams, SequenceOutput, StreamChunk, TokenLogprob
from kvad.engine.scheduling.scheduler import Scheduler
from kvad.engine.scheduling.sequence import ScheduledSequence, SchedulerOutput
from kvad.errors import ConfigError, RequestError
from kvad.model_input import SubBatch

FULL = AttentionSpec(True, None, 1, 8, 8)
W5 = AttentionSpec(True, 5, 1, 8, 8)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """A scheduler, and a model that says ``token`` whatever it is asked."""

    def __init__(
        self,
        *mixers: AttentionSpec,
        rows: int = 4,
        budget: int = 16,
        chunk: int = 8,
        limit: int = 64,
        blocks: int | None = None,
        layout: Any = "paged",
        block_size: int = 4,
        prefix: bool = True,
    ) -> None:
        config = CacheConfig(
            layout=layout,
            block_size=block_size,
            max_num_seqs=rows,
            max_seq_len=limit,
            prefill_chunk_size=chunk,
            num_blocks=blocks,
            enable_prefix_caching=prefix,
        )
        self.clock = Clock()
        self.ledger = KVCacheManager(build_groups(mixers or (FULL,), config), prefix_caching=prefix, max_num_seqs=rows)
        self.scheduler = Scheduler(
            self.ledger,
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            prefill_chunk_size=chunk,
            limit=limit,
            clock=self.clock,
        )

    def add(self, number: int, prompt: int | Sequence[int], **options: Any) -> None:
        stops = options.pop("stop_tokens", frozenset())
        root = options.pop("root", b"")
        tokens = [100 * number + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        self.scheduler.add_request(number, tokens, SamplingParams(**options), root, stop_tokens=stops)

    def plan(self) -> SchedulerOutput:
        plan = self.scheduler.schedule()
        assert plan is not None
        return plan

    def settle(self, plan: SchedulerOutput, token: int = 1, faults: Sequence[int] = ()) -> list[StreamChunk]:
        events = self.scheduler.update_from_output(plan, [self._result(work, token, faults) for work in plan.scheduled])
        self.scheduler.check()
        return events

    def _result(self, work: ScheduledSequence, token: int, faults: Sequence[int]) -> SequenceOutput:
        if work.sequence.request_id in faults:
            return SequenceOutput(error="NaN in the logits")
        scored = work.logit_offsets[:-1] if work.is_sampled else work.logit_offsets
        prompt = tuple(TokenLogprob(work.sequence.token_ids[work.start + i + 1], -1.0) for i in scored)
        return (
            SequenceOutput(token, TokenLogprob(token, -0.5), prompt)
            if work.is_sampled
            else SequenceOutput(prompt_logprobs=prompt)
        )

    def step(self, token: int = 1, faults: Sequence[int] = ()) -> list[StreamChunk]:
        return self.settle(self.plan(), token, faults)

    def shape(self) -> list[tuple[int, int, int]]:
        """Run a step; (request, start, count) of its work."""
        plan = self.plan()
        shape = [(work.sequence.request_id, work.start, work.num_tokens) for work in plan.scheduled]
        self.settle(plan)
        return shape

    def run(self, most: int = 1000) -> list[StreamChunk]:
        events = []
        for _ in range(most):
            plan = self.scheduler.schedule()
            if plan is None:
                assert self.scheduler.idle
                assert not any(self.ledger.stats().used)
                return events
            events += self.settle(plan)
        raise AssertionError("it does not end")


# ---------------------------------------------------------------- order and budget


def test_nothing_to_do() -> None:
    desk = Desk()
    assert desk.scheduler.schedule() is None and desk.scheduler.idle
    desk.scheduler.check()


def test_first_come_first_served_within_seats_and_budget() -> None:
    desk = Desk(rows=2, budget=10, chunk=8)
    for number in (3, 1, 2):
        desk.add(number, 6, max_tokens=3)
    assert desk.shape() == [(1, 0, 4), (3, 0, 6)]  # budget 10; lanes are sorted by new tokens; 2 has no seat
    assert desk.shape() == [(3, 6, 1), (1, 4, 2)]
    assert desk.shape() == [(3, 7, 1), (1, 6, 1)]  # 3's last
    assert desk.shape() == [(1, 7, 1), (2, 0, 6)]
    assert desk.shape() == [(2, 6, 1)]


def test_a_long_prompt_does_not_hold_up_decoding_rows() -> None:
    desk = Desk(budget=9, chunk=4)
    desk.add(1, 2, max_tokens=20)
    desk.shape()
    desk.add(2, 11, max_tokens=2)
    assert [desk.shape() for _ in range(4)] == [
        [(1, 2, 1), (2, 0, 4)],
        [(1, 3, 1), (2, 4, 4)],
        [(1, 4, 1), (2, 8, 3)],
        [(1, 5, 1), (2, 11, 1)],
    ]


def test_the_budget_is_shared_by_prompts_oldest_first() -> None:
    desk = Desk(rows=3, budget=12, chunk=8)
    for number in (1, 2, 3):
        desk.add(number, 10, max_tokens=2)
    assert desk.shape() == [(2, 0, 4), (1, 0, 8)]  # nothing left for 3
    assert desk.shape() == [(1, 8, 2), (3, 0, 4), (2, 4, 6)]


def test_every_row_gets_a_token_even_when_the_budget_is_the_number_of_rows() -> None:
    desk = Desk(rows=3, budget=3, chunk=8)
    for number in (1, 2, 3):
        desk.add(number, 4, max_tokens=2)
    assert {event.finish_reason for event in desk.run() if event.finish_reason} == {"length"}


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens: must be at least max_num_seqs"):
        Desk(rows=4, budget=3)
    with pytest.raises(ConfigError, match="must be at least 1, got 1, 0 and 1"):
        Scheduler(Desk().ledger, max_num_seqs=1, max_num_batched_tokens=1, prefill_chunk_size=0, limit=1)


def test_one_plan_in_flight() -> None:
    desk = Desk()
    desk.add(1, 3)
    plan = desk.plan()
    with pytest.raises(AssertionError, match="in flight"):
        desk.scheduler.schedule()
    with pytest.raises(AssertionError, match="results for"):
        desk.scheduler.update_from_output(plan, [])
    other = Desk()
    other.add(1, 3)
    with pytest.raises(AssertionError, match="not in flight"):
        desk.scheduler.update_from_output(other.plan(), [SequenceOutput(token_id=1)])


# ---------------------------------------------------------------- lanes


def test_rows_of_like_read_length_share_a_lane() -> None:
    """One long row does not make the short ones read its length."""
    desk = Desk(rows=5, budget=512, chunk=300, limit=512, block_size=16)
    for number, length in enumerate((300, 5, 17, 60, 65)):
        desk.add(number, length, max_tokens=8)
    desk.step()
    plan = desk.plan()
    assert [(work.sequence.request_id, work.start) for work in plan.scheduled] == [
        (1, 5),
        (2, 17),
        (3, 60),
        (4, 65),
        (0, 300),
    ]
    assert plan.sub_batches == (SubBatch(3, 1, 64), SubBatch(1, 1, 80), SubBatch(1, 1, 304))
    assert [len(table) for table in plan.allocation.block_tables[0]] == [1, 2, 4, 5, 19]
    desk.settle(plan)


def test_lanes_are_rectangles_of_equal_new_tokens() -> None:
    desk = Desk(rows=4, budget=64, chunk=8)
    for number, length in enumerate((8, 3, 8, 3)):
        desk.add(number, length, max_tokens=4)
    plan = desk.plan()
    assert plan.sub_batches == (SubBatch(2, 3, 4), SubBatch(2, 8, 8))
    assert [work.sequence.seq_index for work in plan.scheduled] == [1, 3, 0, 2]
    desk.settle(plan)


def test_a_window_alone_reads_its_window_only() -> None:
    desk = Desk(W5, rows=2, budget=64, chunk=8, limit=512)
    desk.add(1, 200, max_tokens=4)
    desk.add(2, 3, max_tokens=100)
    while desk.shape()[-1][0] == 1:
        pass
    for _ in range(25):
        desk.step()
    desk.add(3, 200, max_tokens=4)
    for _ in range(26):
        plan = desk.plan()
        assert all(lane.num_read_slots <= 16 for lane in plan.sub_batches)
        desk.settle(plan)
    plan = desk.plan()
    assert [lane.num_seqs for lane in plan.sub_batches] == [2], "rows of any length share a lane"


def test_contiguous_rows_read_no_further_than_they_are_written() -> None:
    desk = Desk(W5, FULL, layout="contiguous", rows=2, budget=512, chunk=200, limit=500)
    desk.add(1, 150, max_tokens=4)
    desk.add(2, 3, max_tokens=4)
    desk.step()
    assert desk.plan().sub_batches == (SubBatch(1, 1, 64), SubBatch(1, 1, 192))


# ---------------------------------------------------------------- a full pool


def test_the_youngest_row_is_preempted_and_returns_to_its_place() -> None:
    desk = Desk(rows=3, blocks=4, limit=16)
    desk.add(1, 7, max_tokens=9)
    desk.add(2, 7, max_tokens=9)
    assert desk.shape() == [(1, 0, 7), (2, 0, 7)]
    desk.add(3, 2, max_tokens=2)
    assert desk.shape() == [(1, 7, 1), (2, 7, 1)]  # 8 tokens each: 4 blocks, so 3 waits
    assert desk.shape() == [(1, 8, 1)]  # 1 needs a third block: 2 gives way, and stays before 3 in the queue
    stats = desk.scheduler.stats()
    assert (stats.running, stats.waiting, stats.preemptions) == (1, 2, 1)
    assert desk.scheduler.metrics(2).num_preemptions == 1
    assert [event.request for event in desk.run() if event.finish_reason] == [1, 3, 2]  # 3 asks for two tokens only
    assert desk.scheduler.metrics(2).num_completion_tokens == 9


def test_a_preempted_row_keeps_its_tokens_and_hits_its_blocks() -> None:
    desk = Desk(rows=2, blocks=5, limit=20)
    desk.add(1, 7, max_tokens=3)
    desk.add(2, 9, max_tokens=9)
    seen: list[tuple[int, int, int]] = []
    while not any(item[0] == 2 and item[1] == 0 and seen for item in seen[2:]) and len(seen) < 40:
        plan = desk.scheduler.schedule()
        if plan is None:
            break
        seen += [(work.sequence.request_id, work.start, work.num_tokens) for work in plan.scheduled]
        desk.settle(plan)
    # Request 2 never starts again at 0: with its first blocks still published it goes on behind them.
    assert [item for item in seen if item[0] == 2 and item[1] == 0] == [(2, 0, 8)]
    assert desk.scheduler.idle


def test_a_pool_for_one_row_serves_many_in_turn() -> None:
    desk = Desk(rows=4, blocks=4, limit=16)
    for number in range(6):
        desk.add(number, 10, max_tokens=6)
    ends = [event.request for event in desk.run() if event.finish_reason]
    assert ends == list(range(6))


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("samples", [1, 2, 4])
def test_a_full_pool_never_livelocks(prefix: bool, samples: int) -> None:
    """Every row may need the whole pool; each of them gets there."""
    desk = Desk(rows=4, blocks=4, limit=17, prefix=prefix)
    for number in range(4):
        desk.add(number, 8, max_tokens=9, n=samples)
    events = desk.run(most=60 * 4 * samples)
    assert sum(event.finish_reason == "length" for event in events) == 4 * samples
    assert sum(event.token_id is not None for event in events) == 4 * samples * 9


def test_admission_waits_for_room_for_all_known_tokens() -> None:
    desk = Desk(rows=2, blocks=6, limit=24, chunk=4)
    desk.add(1, 4, max_tokens=20)
    desk.shape()
    desk.add(2, 24, max_tokens=0)
    assert desk.shape() == [(1, 4, 1)]
    desk.scheduler.abort_request(1)
    assert desk.shape() == [(2, 0, 4)]


# ---------------------------------------------------------------- limits, ends


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        (0, {}, "prompt: must have at least 1 token"),
        (65, {}, "prompt: must have at most 64 tokens, got 65"),
        (
            30,
            {"max_tokens": 12},
            "30 prompt tokens and max_tokens 12 need room for 41 tokens, the whole cache holds 40",
        ),
        (41, {}, "41 prompt tokens and max_tokens None need room for 41 tokens, the whole cache holds 40"),
    ],
)
def test_what_can_never_run_is_refused_with_both_numbers(prompt: int, options: dict[str, Any], words: str) -> None:
    desk = Desk(blocks=10)
    with pytest.raises(RequestError, match=words):
        desk.add(1, prompt, **options)
    assert desk.scheduler.idle
    desk.scheduler.check()


@pytest.mark.parametrize(
    ("blocks", "prompt", "most", "generated"),
    [
        (None, 5, 3, 3),
        (None, 60, 9, 4),  # the model's limit is 64
        (None, 60, None, 4),
        (None, 64, 5, 0),
        (10, 30, None, 11),  # 40 tokens stored, and one more sampled
        (10, 30, 11, 11),
        (10, 40, None, 1),
    ],
)
def test_a_row_ends_at_its_limit(blocks: int | None, prompt: int, most: int | None, generated: int) -> None:
    desk = Desk(blocks=blocks)
    desk.add(1, prompt, max_tokens=most)
    events = desk.run()
    assert sum(event.token_id is not None for event in events) == generated
    assert [event.finish_reason for event in events if event.finish_reason] == ["length"]
    assert events[-1].finish_reason == "length"
    assert desk.scheduler.metrics(1).num_completion_tokens == generated


def test_stop_tokens_end_a_sample_after_its_minimum() -> None:
    desk = Desk()
    desk.add(1, 3, max_tokens=9, min_tokens=2, stop_tokens=frozenset({7}))
    desk.add(2, 3, max_tokens=9, stop_tokens=frozenset({8}))
    assert [event.finish_reason for event in desk.step(7)] == [None, None]
    assert [event.finish_reason for event in desk.step(7)] == [None, None]
    assert desk.step(7)[0] == StreamChunk(1, 0, 7, TokenLogprob(7, -0.5), (), "stop")
    desk.scheduler.abort_request(2)
    desk.add(3, 3, max_tokens=1, stop_tokens=frozenset({7}))
    assert [event.finish_reason for event in desk.step(7)] == ["stop"]


def test_sampling_stop_tokens_count_too() -> None:
    desk = Desk()
    desk.scheduler.add_request(1, [1], SamplingParams(stop_token_ids=(4,)), stop_tokens=frozenset({5}))
    assert desk.scheduler.sequences(1)[0].stop_tokens == {4, 5}
    assert [event.finish_reason for event in desk.step(4)] == ["stop"]


def test_finish_ends_one_sample() -> None:
    desk = Desk()
    desk.add(1, 3, n=2)
    desk.step()
    desk.step()
    assert desk.scheduler.finish_sequence(1, 0) == [StreamChunk(1, 0, finish_reason="stop")]
    assert desk.scheduler.finish_sequence(1, 0) == []
    assert desk.shape() == [(1, 3, 1)]
    assert desk.scheduler.finish_sequence(1, 1) == [StreamChunk(1, 1, finish_reason="stop")]
    assert desk.scheduler.idle
    assert desk.scheduler.finish_sequence(9, 0) == []


def test_cancel_running_waiting_and_in_flight() -> None:
    desk = Desk(rows=1, budget=8)
    for number in (1, 2, 3):
        desk.add(number, 3)
    plan = desk.plan()
    assert desk.scheduler.abort_request(2) == [StreamChunk(2, 0, finish_reason="abort")]  # waiting
    assert desk.scheduler.abort_request(1) == [StreamChunk(1, 0, finish_reason="abort")]  # in flight
    assert desk.settle(plan) == []
    assert desk.scheduler.abort_request(1) == []
    assert desk.shape() == [(3, 0, 3)]
    desk.scheduler.abort_request(3)
    assert desk.scheduler.idle and desk.ledger.stats().used == (0,)


def test_a_fault_ends_that_request_only() -> None:
    desk = Desk()
    shared = list(range(9))
    desk.add(1, shared, max_tokens=3)
    desk.add(2, [*shared[:8], 50], max_tokens=3)
    desk.add(3, 4, max_tokens=3)
    events = desk.step(faults=[2])
    assert [event for event in events if event.request == 2] == [
        StreamChunk(2, 0, finish_reason="error", error="NaN in the logits")
    ]
    ends = {event.request: event.finish_reason for event in desk.run() if event.finish_reason}
    assert ends == {1: "length", 3: "length"}


def test_a_faulted_prompt_is_never_hit() -> None:
    desk = Desk(rows=1, budget=4, chunk=4)
    desk.add(1, list(range(12)), max_tokens=1)
    desk.step()
    desk.step(faults=[1])
    desk.add(2, list(range(12)), max_tokens=1)
    assert desk.shape() == [(2, 0, 4)]


# ---------------------------------------------------------------- samples


def test_samples_share_the_prompt_and_copy_on_write() -> None:
    desk = Desk(budget=64)
    desk.add(1, 6, n=3, max_tokens=3)
    plan = desk.plan()
    assert [(work.sequence.sample_index, work.start, work.num_tokens) for work in plan.scheduled] == [(0, 0, 6)]
    desk.settle(plan)
    plan = desk.plan()
    assert [(work.sequence.sample_index, work.start, work.num_tokens) for work in plan.scheduled] == [
        (0, 6, 1),
        (1, 5, 1),
        (2, 5, 1),
    ]
    # Block 3 holds positions 4 and 5; all three write into it: two copies, the last one has it to itself.
    assert plan.allocation.block_ops.copy == (((3, 4, 2), (3, 5, 1)),)
    assert plan.allocation.block_tables == ([[2, 4], [2, 5], [2, 3]],)
    events = desk.settle(plan)
    assert [event.sample_index for event in events] == [0, 1, 2]
    events += desk.run()
    assert {event.sample_index for event in events if event.finish_reason == "length"} == {0, 1, 2}
    assert desk.scheduler.metrics(1).num_completion_tokens == 9


def test_samples_wait_for_the_prompt_and_let_others_pass() -> None:
    desk = Desk(rows=3, budget=6, chunk=4)
    desk.add(1, 8, n=2, max_tokens=2)
    desk.add(2, 2, max_tokens=2)
    assert desk.shape() == [(2, 0, 2), (1, 0, 4)]
    assert desk.shape() == [(2, 2, 1), (1, 4, 4)]
    plan = desk.plan()
    assert [(work.sequence.request_id, work.sequence.sample_index, work.start) for work in plan.scheduled] == [
        (1, 0, 8),
        (1, 1, 7),
    ]
    desk.settle(plan)
    desk.run()


def test_more_samples_than_seats_run_in_turn() -> None:
    desk = Desk(rows=2, budget=16)
    desk.add(1, 9, n=5, max_tokens=2)
    events = desk.run()
    assert sorted(event.sample_index for event in events if event.finish_reason) == [0, 1, 2, 3, 4]
    assert desk.scheduler.metrics(1).num_cached_tokens == 0


def test_a_sample_whose_sibling_has_gone_takes_a_prefix_hit() -> None:
    desk = Desk(rows=1, budget=16)
    desk.add(1, 6, n=2, max_tokens=1)
    assert desk.shape() == [(1, 0, 6)]
    assert desk.shape() == [(1, 4, 2)]


def test_cancelling_takes_every_sample() -> None:
    desk = Desk()
    desk.add(1, 6, n=3)
    desk.step()
    assert [event.sample_index for event in desk.scheduler.abort_request(1)] == [0, 1, 2]
    assert desk.scheduler.idle
    desk.scheduler.check()


# ---------------------------------------------------------------- wanted positions


def wanted(desk: Desk) -> list[tuple[range, bool]]:
    plan = desk.plan()
    desk.settle(plan)
    return [(work.logit_offsets, work.is_sampled) for work in plan.scheduled]


def test_the_last_position_of_every_span_is_wanted() -> None:
    desk = Desk(chunk=4)
    desk.add(1, 10, max_tokens=2)
    assert [wanted(desk) for _ in range(4)] == [
        [(range(3, 4), False)],  # it vouches for the blocks of this chunk
        [(range(3, 4), False)],
        [(range(1, 2), True)],
        [(range(1), True)],
    ]


def test_prompt_scores_are_told_once_and_whole() -> None:
    desk = Desk(chunk=4)
    desk.add(1, 10, max_tokens=2, prompt_logprobs=0)
    assert wanted(desk) == [(range(4), False)]
    assert wanted(desk) == [(range(4), False)]
    plan = desk.plan()
    assert [(work.logit_offsets, work.is_sampled) for work in plan.scheduled] == [(range(2), True)]
    (event,) = desk.settle(plan)
    assert [score.token_id for score in event.prompt_logprobs] == [101 + i for i in range(9)]
    assert event.token_id == 1
    assert wanted(desk) == [(range(1), True)]
    assert all(not event.prompt_logprobs for event in desk.run())


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("scores", [None, 0])
def test_a_pure_score_generates_nothing(length: int, scores: int | None) -> None:
    desk = Desk(chunk=4)
    desk.add(1, length, max_tokens=0, prompt_logprobs=scores)
    events = desk.run()
    assert [(event.token_id, event.finish_reason) for event in events] == [(None, "length")]
    expected = [101 + i for i in range(length - 1)] if scores is not None else []
    assert [score.token_id for score in events[0].prompt_logprobs] == expected


def test_the_last_block_of_a_pure_score_is_not_published() -> None:
    desk = Desk()
    desk.add(1, list(range(8)), max_tokens=0)
    desk.run()
    desk.add(2, list(range(9)), max_tokens=1)
    assert desk.shape() == [(2, 4, 5)]  # no logits at the last token showed that its block is finite


def test_scored_prompts_take_no_hit_and_siblings_score_nothing() -> None:
    desk = Desk(chunk=8, budget=32)
    desk.add(1, list(range(12)), max_tokens=1)
    desk.run()
    desk.add(2, list(range(12)), max_tokens=1, prompt_logprobs=0, n=2)
    assert desk.shape() == [(2, 0, 8)]
    events = desk.run()
    assert [len(event.prompt_logprobs) for event in events] == [11, 0]
    assert desk.scheduler.metrics(2).num_cached_tokens == 0
    desk.add(3, list(range(12)), max_tokens=1)
    assert desk.shape() == [(3, 8, 4)]
    assert desk.scheduler.metrics(3).num_cached_tokens == 8


def test_a_preempted_score_goes_on_where_it_was() -> None:
    desk = Desk(rows=2, blocks=5, chunk=4, budget=5, limit=20)
    desk.add(1, 3, max_tokens=17)
    desk.step()
    desk.add(2, 15, max_tokens=1, prompt_logprobs=0)
    events = desk.run()
    assert desk.scheduler.metrics(2).num_preemptions > 0
    (scores,) = [event.prompt_logprobs for event in events if event.request == 2 and event.token_id is not None]
    assert [score.token_id for score in scores] == [201 + i for i in range(14)]


# ---------------------------------------------------------------- usage and checks


def test_usage_and_times() -> None:
    desk = Desk(rows=1, chunk=4)
    desk.clock.now = 10.0
    desk.add(1, 6, max_tokens=2)
    usage = desk.scheduler.metrics(1)
    assert (usage.num_prompt_tokens, usage.arrived, usage.admitted) == (6, 10.0, None)
    for now in (11.0, 12.0, 13.0):
        desk.clock.now = now
        desk.step()
    assert (usage.admitted, usage.first_token, usage.finished) == (11.0, 12.0, 13.0)
    assert (usage.num_completion_tokens, usage.num_cached_tokens, usage.num_preemptions) == (2, 0, 0)
    assert desk.scheduler.metrics(1) is usage
    stats = desk.scheduler.stats()
    assert (stats.steps, stats.tokens) == (3, 7)


def test_only_the_latest_usages_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvad.engine.scheduling.scheduler.MAX_FINISHED_METRICS", 2)
    desk = Desk()
    for number in range(4):
        desk.add(number, 3)
        desk.scheduler.abort_request(number)
    assert desk.scheduler.metrics(3).num_prompt_tokens == 3
    with pytest.raises(KeyError):
        desk.scheduler.metrics(1)


def doctor_seat(scheduler: Scheduler) -> None:
    scheduler._running[0].seq_index = scheduler._running[1].seq_index


def doctor_lost(scheduler: Scheduler) -> None:
    scheduler._waiting.pop()


def doctor_order(scheduler: Scheduler) -> None:
    scheduler._running.reverse()


def doctor_length(scheduler: Scheduler) -> None:
    scheduler._running[0].num_computed_tokens -= 1


def doctor_state(scheduler: Scheduler) -> None:
    scheduler._waiting[0].state = "running"


def doctor_seats(scheduler: Scheduler) -> None:
    scheduler._admission.free_indices.append(0)


@pytest.mark.parametrize("doctor", [doctor_seat, doctor_lost, doctor_order, doctor_length, doctor_state, doctor_seats])
def test_check_catches_a_doctored_state(doctor: Callable[[Scheduler], None]) -> None:
    desk = Desk(rows=2)
    for number in (1, 2, 3):
        desk.add(number, 3)
    desk.step()
    doctor(desk.scheduler)
    with pytest.raises(AssertionError):
        desk.scheduler.check()


def test_the_bench_runs() -> None:
    bench = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "scheduler.py"))
    line = bench["run"](8, 20, (FULL, W5))
    assert line["rows"] == 8 and line["groups"] == 2 and line["row_steps_per_s"] > 0
