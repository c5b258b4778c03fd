"""The Scheduler without a model: steps, sub-batches, chunks and their order."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvad.engine.scheduling.request import SamplingParams, SequenceOutput, StreamChunk, TokenLogprob
from kvad.engine.scheduling.scheduler import Scheduler
from kvad.errors import ConfigError, RequestError
from kvad.model_input import SubBatch
from tests.support.scheduler_run import FakeModelRun
from tests.support.streams import FULL, NARROW

# ---------------------------------------------------------------- order and budget


def test_nothing_to_do() -> None:
    harness = FakeModelRun()
    assert harness.scheduler.schedule() is None and harness.scheduler.idle
    harness.scheduler.check()


def test_first_come_first_served_within_the_limits() -> None:
    harness = FakeModelRun(rows=2, budget=10, chunk=8)
    for number in (3, 1, 2):
        harness.add(number, 6, max_tokens=3)
    assert harness.shape() == [(1, 0, 4), (3, 0, 6)]  # budget 10; sub-batches are sorted by new tokens; request 2 waits
    assert harness.shape() == [(3, 6, 1), (1, 4, 2)]
    assert harness.shape() == [(3, 7, 1), (1, 6, 1)]  # 3's last
    assert harness.shape() == [(1, 7, 1), (2, 0, 6)]
    assert harness.shape() == [(2, 6, 1)]


def test_a_long_prompt_does_not_delay_decoding_sequences() -> None:
    harness = FakeModelRun(budget=9, chunk=4)
    harness.add(1, 2, max_tokens=20)
    harness.shape()
    harness.add(2, 11, max_tokens=2)
    assert [harness.shape() for _ in range(4)] == [
        [(1, 2, 1), (2, 0, 4)],
        [(1, 3, 1), (2, 4, 4)],
        [(1, 4, 1), (2, 8, 3)],
        [(1, 5, 1), (2, 11, 1)],
    ]


def test_prompts_get_tokens_oldest_first() -> None:
    harness = FakeModelRun(rows=3, budget=12, chunk=8)
    for number in (1, 2, 3):
        harness.add(number, 10, max_tokens=2)
    assert harness.shape() == [(2, 0, 4), (1, 0, 8)]  # nothing left for 3
    assert harness.shape() == [(1, 8, 2), (3, 0, 4), (2, 4, 6)]


def test_every_sequence_gets_a_token_at_the_smallest_limit() -> None:
    harness = FakeModelRun(rows=3, budget=3, chunk=8)
    for number in (1, 2, 3):
        harness.add(number, 4, max_tokens=2)
    assert {chunk.finish_reason for chunk in harness.run() if chunk.finish_reason} == {"length"}


def test_impossible_limits_are_rejected() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens: must be at least max_num_seqs"):
        FakeModelRun(rows=4, budget=3)
    with pytest.raises(ConfigError, match="must be at least 1, got 1, 0 and 1"):
        Scheduler(FakeModelRun().manager, max_num_seqs=1, max_num_batched_tokens=1, prefill_chunk_size=0, limit=1)


def test_one_step_is_in_flight() -> None:
    harness = FakeModelRun()
    harness.add(1, 3)
    output = harness.output()
    with pytest.raises(AssertionError, match="in flight"):
        harness.scheduler.schedule()
    with pytest.raises(AssertionError, match="results for"):
        harness.scheduler.update_from_output(output, [])
    other = FakeModelRun()
    other.add(1, 3)
    with pytest.raises(AssertionError, match="not in flight"):
        harness.scheduler.update_from_output(other.output(), [SequenceOutput(token_id=1)])


# ---------------------------------------------------------------- sub-batches


def test_sequences_of_similar_length_share_a_sub_batch() -> None:
    """Short sequences do not read the length of a long one."""
    harness = FakeModelRun(rows=5, budget=512, chunk=300, limit=512, block_size=16)
    for number, length in enumerate((300, 5, 17, 60, 65)):
        harness.add(number, length, max_tokens=8)
    harness.step()
    output = harness.output()
    assert [(scheduled.sequence.request_id, scheduled.start) for scheduled in output.scheduled] == [
        (1, 5),
        (2, 17),
        (3, 60),
        (4, 65),
        (0, 300),
    ]
    assert output.sub_batches == (SubBatch(3, 1, 64), SubBatch(1, 1, 80), SubBatch(1, 1, 304))
    assert [len(table) for table in output.allocation.block_tables[0]] == [1, 2, 4, 5, 19]
    harness.complete(output)


def test_sub_batches_read_a_limited_number_of_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvad.engine.scheduling.batching.MAX_READ_SLOTS", 200)
    harness = FakeModelRun(rows=4, budget=2000, chunk=512)
    for number in (1, 2, 3, 4):
        harness.add(number, 60, max_tokens=4)
    assert harness.output().sub_batches == (SubBatch(3, 60, 60), SubBatch(1, 60, 60))  # 64 slots each
    harness = FakeModelRun(rows=2, budget=2000, chunk=512, limit=512)
    for number in (1, 2):
        harness.add(number, 300, max_tokens=4)
    assert harness.output().sub_batches == (SubBatch(1, 300, 300), SubBatch(1, 300, 300))


def test_sub_batches_have_equally_many_new_tokens() -> None:
    harness = FakeModelRun(rows=4, budget=64, chunk=8)
    for number, length in enumerate((8, 3, 8, 3)):
        harness.add(number, length, max_tokens=4)
    output = harness.output()
    assert output.sub_batches == (SubBatch(2, 3, 4), SubBatch(2, 8, 8))
    assert [scheduled.sequence.seq_index for scheduled in output.scheduled] == [1, 3, 0, 2]
    harness.complete(output)


def test_a_windowed_model_reads_its_window_only() -> None:
    harness = FakeModelRun(NARROW, rows=2, budget=64, chunk=8, limit=512)
    harness.add(1, 200, max_tokens=4)
    harness.add(2, 3, max_tokens=100)
    while harness.shape()[-1][0] == 1:
        pass
    for _ in range(25):
        harness.step()
    harness.add(3, 200, max_tokens=4)
    for _ in range(26):
        output = harness.output()
        assert all(sub_batch.num_read_slots <= 16 for sub_batch in output.sub_batches)
        harness.complete(output)
    output = harness.output()
    assert [sub_batch.num_seqs for sub_batch in output.sub_batches] == [2], "sequences of any length share a sub-batch"


def test_contiguous_sequences_read_only_written_slots() -> None:
    harness = FakeModelRun(NARROW, FULL, layout="contiguous", rows=2, budget=512, chunk=200, limit=500)
    harness.add(1, 150, max_tokens=4)
    harness.add(2, 3, max_tokens=4)
    harness.step()
    assert harness.output().sub_batches == (SubBatch(1, 1, 64), SubBatch(1, 1, 192))


# ---------------------------------------------------------------- a full pool


def test_the_youngest_sequence_is_preempted_and_returns_to_its_place() -> None:
    harness = FakeModelRun(rows=3, blocks=4, limit=16)
    harness.add(1, 7, max_tokens=9)
    harness.add(2, 7, max_tokens=9)
    assert harness.shape() == [(1, 0, 7), (2, 0, 7)]
    harness.add(3, 2, max_tokens=2)
    assert harness.shape() == [(1, 7, 1), (2, 7, 1)]  # 8 tokens each: 4 blocks, so 3 waits
    assert harness.shape() == [(1, 8, 1)]  # 1 needs a third block: 2 gives way, and stays before 3 in the queue
    stats = harness.scheduler.stats()
    assert (stats.running, stats.waiting, stats.preemptions) == (1, 2, 1)
    assert harness.scheduler.metrics(2).num_preemptions == 1
    assert [chunk.request for chunk in harness.run() if chunk.finish_reason] == [1, 3, 2]  # 3 asks for two tokens only
    assert harness.scheduler.metrics(2).num_completion_tokens == 9


def test_a_preempted_sequence_keeps_its_tokens_and_hits_its_blocks() -> None:
    harness = FakeModelRun(rows=2, blocks=5, limit=20)
    harness.add(1, 7, max_tokens=3)
    harness.add(2, 9, max_tokens=9)
    seen: list[tuple[int, int, int]] = []
    while not any(item[0] == 2 and item[1] == 0 and seen for item in seen[2:]) and len(seen) < 40:
        output = harness.scheduler.schedule()
        if output is None:
            break
        seen += [
            (scheduled.sequence.request_id, scheduled.start, scheduled.num_tokens) for scheduled in output.scheduled
        ]
        harness.complete(output)
    # Request 2 never restarts at 0: its first blocks are still published, so it continues behind them.
    assert [item for item in seen if item[0] == 2 and item[1] == 0] == [(2, 0, 8)]
    assert harness.scheduler.idle


def test_a_pool_for_one_sequence_serves_many_in_turn() -> None:
    harness = FakeModelRun(rows=4, blocks=4, limit=16)
    for number in range(6):
        harness.add(number, 10, max_tokens=6)
    ends = [chunk.request for chunk in harness.run() if chunk.finish_reason]
    assert ends == list(range(6))


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("samples", [1, 2, 4])
def test_a_full_pool_never_livelocks(prefix: bool, samples: int) -> None:
    """Every sequence may need the whole pool, and each of them ends."""
    harness = FakeModelRun(rows=4, blocks=4, limit=17, prefix=prefix)
    for number in range(4):
        harness.add(number, 8, max_tokens=9, n=samples)
    chunks = harness.run(max_steps=60 * 4 * samples)
    assert sum(chunk.finish_reason == "length" for chunk in chunks) == 4 * samples
    assert sum(chunk.token_id is not None for chunk in chunks) == 4 * samples * 9


def test_admission_waits_for_room_for_all_known_tokens() -> None:
    harness = FakeModelRun(rows=2, blocks=6, limit=24, chunk=4)
    harness.add(1, 4, max_tokens=20)
    harness.shape()
    harness.add(2, 24, max_tokens=0)
    assert harness.shape() == [(1, 4, 1)]
    harness.scheduler.abort_request(1)
    assert harness.shape() == [(2, 0, 4)]


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
def test_a_request_that_can_never_run_is_rejected(prompt: int, options: dict[str, Any], words: str) -> None:
    harness = FakeModelRun(blocks=10)
    with pytest.raises(RequestError, match=words):
        harness.add(1, prompt, **options)
    assert harness.scheduler.idle
    harness.scheduler.check()


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
def test_a_sequence_ends_at_its_limit(blocks: int | None, prompt: int, most: int | None, generated: int) -> None:
    harness = FakeModelRun(blocks=blocks)
    harness.add(1, prompt, max_tokens=most)
    chunks = harness.run()
    assert sum(chunk.token_id is not None for chunk in chunks) == generated
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    assert chunks[-1].finish_reason == "length"
    assert harness.scheduler.metrics(1).num_completion_tokens == generated


def test_stop_tokens_end_a_sample_after_its_minimum() -> None:
    harness = FakeModelRun()
    harness.add(1, 3, max_tokens=9, min_tokens=2, stop_tokens=frozenset({7}))
    harness.add(2, 3, max_tokens=9, stop_tokens=frozenset({8}))
    assert [chunk.finish_reason for chunk in harness.step(7)] == [None, None]
    assert [chunk.finish_reason for chunk in harness.step(7)] == [None, None]
    assert harness.step(7)[0] == StreamChunk(1, 0, 7, TokenLogprob(7, -0.5), (), "stop")
    harness.scheduler.abort_request(2)
    harness.add(3, 3, max_tokens=1, stop_tokens=frozenset({7}))
    assert [chunk.finish_reason for chunk in harness.step(7)] == ["stop"]


def test_sampling_stop_tokens_count_too() -> None:
    harness = FakeModelRun()
    harness.scheduler.add_request(1, [1], SamplingParams(stop_token_ids=(4,)), stop_tokens=frozenset({5}))
    assert harness.scheduler.sequences(1)[0].stop_tokens == {4, 5}
    assert [chunk.finish_reason for chunk in harness.step(4)] == ["stop"]


def test_finish_ends_one_sample() -> None:
    harness = FakeModelRun()
    harness.add(1, 3, n=2)
    harness.step()
    harness.step()
    assert harness.scheduler.finish_sequence(1, 0) == [StreamChunk(1, 0, finish_reason="stop")]
    assert harness.scheduler.finish_sequence(1, 0) == []
    assert harness.shape() == [(1, 3, 1)]
    assert harness.scheduler.finish_sequence(1, 1) == [StreamChunk(1, 1, finish_reason="stop")]
    assert harness.scheduler.idle
    assert harness.scheduler.finish_sequence(9, 0) == []


def test_the_next_waiting_sequence_is_admitted_when_the_first_one_is_aborted() -> None:
    """Four blocks: request 2 needs four and waits, and request 3, which needs one, waits behind it."""
    harness = FakeModelRun(blocks=4, budget=64, chunk=64, prefix=False)
    harness.add(1, 4, max_tokens=9)
    harness.step()
    harness.add(2, 15, max_tokens=1)
    harness.add(3, 3, max_tokens=1)
    for _ in range(2):
        harness.step()
        assert harness.running[-1] == (1,)
    harness.scheduler.abort_request(2)
    harness.step()
    assert sorted(harness.running[-1]) == [1, 3]


def test_abort_running_waiting_and_in_flight() -> None:
    harness = FakeModelRun(rows=1, budget=8)
    for number in (1, 2, 3):
        harness.add(number, 3)
    output = harness.output()
    assert harness.scheduler.abort_request(2) == [StreamChunk(2, 0, finish_reason="abort")]  # waiting
    assert harness.scheduler.abort_request(1) == [StreamChunk(1, 0, finish_reason="abort")]  # in flight
    assert harness.complete(output) == []
    assert harness.scheduler.abort_request(1) == []
    assert harness.shape() == [(3, 0, 3)]
    harness.scheduler.abort_request(3)
    assert harness.scheduler.idle and harness.manager.stats().used == (0,)


def test_an_error_ends_only_its_request() -> None:
    harness = FakeModelRun()
    shared = list(range(9))
    harness.add(1, shared, max_tokens=3)
    harness.add(2, [*shared[:8], 50], max_tokens=3)
    harness.add(3, 4, max_tokens=3)
    chunks = harness.step(faults=[2])
    assert [chunk for chunk in chunks if chunk.request == 2] == [
        StreamChunk(2, 0, finish_reason="error", error="NaN in the logits")
    ]
    ends = {chunk.request: chunk.finish_reason for chunk in harness.run() if chunk.finish_reason}
    assert ends == {1: "length", 3: "length"}


def test_a_failed_prompt_is_never_hit() -> None:
    harness = FakeModelRun(rows=1, budget=4, chunk=4)
    harness.add(1, list(range(12)), max_tokens=1)
    harness.step()
    harness.step(faults=[1])
    harness.add(2, list(range(12)), max_tokens=1)
    assert harness.shape() == [(2, 0, 4)]


# ---------------------------------------------------------------- samples


def test_samples_share_the_prompt_and_copy_on_write() -> None:
    harness = FakeModelRun(budget=64)
    harness.add(1, 6, n=3, max_tokens=3)
    output = harness.output()
    assert [
        (scheduled.sequence.sample_index, scheduled.start, scheduled.num_tokens) for scheduled in output.scheduled
    ] == [(0, 0, 6)]
    harness.complete(output)
    output = harness.output()
    assert [
        (scheduled.sequence.sample_index, scheduled.start, scheduled.num_tokens) for scheduled in output.scheduled
    ] == [(0, 6, 1), (1, 5, 1), (2, 5, 1)]
    # Block 3 holds positions 4 and 5; all three write into it: two copies, the last one has it to itself.
    assert output.allocation.block_ops.copy == (((3, 4, 2), (3, 5, 1)),)
    assert output.allocation.block_tables == ([[2, 4], [2, 5], [2, 3]],)
    chunks = harness.complete(output)
    assert [chunk.sample_index for chunk in chunks] == [0, 1, 2]
    chunks += harness.run()
    assert {chunk.sample_index for chunk in chunks if chunk.finish_reason == "length"} == {0, 1, 2}
    assert harness.scheduler.metrics(1).num_completion_tokens == 9


def test_samples_wait_for_the_prompt_and_let_others_pass() -> None:
    harness = FakeModelRun(rows=3, budget=6, chunk=4)
    harness.add(1, 8, n=2, max_tokens=2)
    harness.add(2, 2, max_tokens=2)
    assert harness.shape() == [(2, 0, 2), (1, 0, 4)]
    assert harness.shape() == [(2, 2, 1), (1, 4, 4)]
    output = harness.output()
    assert [
        (scheduled.sequence.request_id, scheduled.sequence.sample_index, scheduled.start)
        for scheduled in output.scheduled
    ] == [(1, 0, 8), (1, 1, 7)]
    harness.complete(output)
    harness.run()


def test_more_samples_than_indices_run_in_turn() -> None:
    harness = FakeModelRun(rows=2, budget=16)
    harness.add(1, 9, n=5, max_tokens=2)
    chunks = harness.run()
    assert sorted(chunk.sample_index for chunk in chunks if chunk.finish_reason) == [0, 1, 2, 3, 4]
    assert harness.scheduler.metrics(1).num_cached_tokens == 0


def test_a_sample_whose_sibling_has_ended_uses_the_prefix_cache() -> None:
    harness = FakeModelRun(rows=1, budget=16)
    harness.add(1, 6, n=2, max_tokens=1)
    assert harness.shape() == [(1, 0, 6)]
    assert harness.shape() == [(1, 4, 2)]


def test_abort_ends_every_sample() -> None:
    harness = FakeModelRun()
    harness.add(1, 6, n=3)
    harness.step()
    assert [chunk.sample_index for chunk in harness.scheduler.abort_request(1)] == [0, 1, 2]
    assert harness.scheduler.idle
    harness.scheduler.check()


# ---------------------------------------------------------------- wanted positions


def wanted(harness: FakeModelRun) -> list[tuple[range, bool]]:
    output = harness.output()
    harness.complete(output)
    return [(scheduled.logit_offsets, scheduled.is_sampled) for scheduled in output.scheduled]


def test_logits_are_computed_at_the_end_of_every_span() -> None:
    harness = FakeModelRun(chunk=4)
    harness.add(1, 10, max_tokens=2)
    assert [wanted(harness) for _ in range(4)] == [
        [(range(3, 4), False)],  # it vouches for the blocks of this chunk
        [(range(3, 4), False)],
        [(range(1, 2), True)],
        [(range(1), True)],
    ]


def test_prompt_logprobs_are_returned_once_and_complete() -> None:
    harness = FakeModelRun(chunk=4)
    harness.add(1, 10, max_tokens=2, prompt_logprobs=0)
    assert wanted(harness) == [(range(4), False)]
    assert wanted(harness) == [(range(4), False)]
    output = harness.output()
    assert [(scheduled.logit_offsets, scheduled.is_sampled) for scheduled in output.scheduled] == [(range(2), True)]
    (chunk,) = harness.complete(output)
    assert [score.token_id for score in chunk.prompt_logprobs] == [101 + i for i in range(9)]
    assert chunk.token_id == 1
    assert wanted(harness) == [(range(1), True)]
    assert all(not chunk.prompt_logprobs for chunk in harness.run())


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("scores", [None, 0])
def test_a_pure_score_generates_nothing(length: int, scores: int | None) -> None:
    harness = FakeModelRun(chunk=4)
    harness.add(1, length, max_tokens=0, prompt_logprobs=scores)
    chunks = harness.run()
    assert [(chunk.token_id, chunk.finish_reason) for chunk in chunks] == [(None, "length")]
    expected = [101 + i for i in range(length - 1)] if scores is not None else []
    assert [score.token_id for score in chunks[0].prompt_logprobs] == expected


def test_the_last_block_of_a_pure_score_is_not_published() -> None:
    harness = FakeModelRun()
    harness.add(1, list(range(8)), max_tokens=0)
    harness.run()
    harness.add(2, list(range(9)), max_tokens=1)
    assert harness.shape() == [(2, 4, 5)]  # no logits at the last token showed that its block is finite


def test_scored_prompts_use_no_cached_prefix() -> None:
    harness = FakeModelRun(chunk=8, budget=32)
    harness.add(1, list(range(12)), max_tokens=1)
    harness.run()
    harness.add(2, list(range(12)), max_tokens=1, prompt_logprobs=0, n=2)
    assert harness.shape() == [(2, 0, 8)]
    chunks = harness.run()
    assert [len(chunk.prompt_logprobs) for chunk in chunks] == [11, 0]
    assert harness.scheduler.metrics(2).num_cached_tokens == 0
    harness.add(3, list(range(12)), max_tokens=1)
    assert harness.shape() == [(3, 8, 4)]
    assert harness.scheduler.metrics(3).num_cached_tokens == 8


def test_a_preempted_score_continues() -> None:
    harness = FakeModelRun(rows=2, blocks=5, chunk=4, budget=5, limit=20)
    harness.add(1, 3, max_tokens=17)
    harness.step()
    harness.add(2, 15, max_tokens=1, prompt_logprobs=0)
    chunks = harness.run()
    assert harness.scheduler.metrics(2).num_preemptions > 0
    (scores,) = [chunk.prompt_logprobs for chunk in chunks if chunk.request == 2 and chunk.token_id is not None]
    assert [score.token_id for score in scores] == [201 + i for i in range(14)]


# ---------------------------------------------------------------- usage and checks


def test_usage_and_times() -> None:
    harness = FakeModelRun(rows=1, chunk=4)
    harness.clock.now = 10.0
    harness.add(1, 6, max_tokens=2)
    usage = harness.scheduler.metrics(1)
    assert (usage.num_prompt_tokens, usage.arrived, usage.admitted) == (6, 10.0, None)
    for now in (11.0, 12.0, 13.0):
        harness.clock.now = now
        harness.step()
    assert (usage.admitted, usage.first_token, usage.finished) == (11.0, 12.0, 13.0)
    assert (usage.num_completion_tokens, usage.num_cached_tokens, usage.num_preemptions) == (2, 0, 0)
    assert harness.scheduler.metrics(1) is usage
    stats = harness.scheduler.stats()
    assert (stats.steps, stats.tokens) == (3, 7)


def test_metrics_of_the_latest_requests_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvad.engine.scheduling.scheduler.MAX_FINISHED_METRICS", 2)
    harness = FakeModelRun()
    for number in range(4):
        harness.add(number, 3)
        harness.scheduler.abort_request(number)
    assert harness.scheduler.metrics(3).num_prompt_tokens == 3
    with pytest.raises(KeyError):
        harness.scheduler.metrics(1)


def corrupt_index(scheduler: Scheduler) -> None:
    scheduler._running[0].seq_index = scheduler._running[1].seq_index


def corrupt_queue(scheduler: Scheduler) -> None:
    scheduler._waiting.pop()


def corrupt_order(scheduler: Scheduler) -> None:
    scheduler._running.reverse()


def corrupt_length(scheduler: Scheduler) -> None:
    scheduler._running[0].num_computed_tokens -= 1


def corrupt_state(scheduler: Scheduler) -> None:
    scheduler._waiting[0].state = "running"


def corrupt_free_indices(scheduler: Scheduler) -> None:
    scheduler._admission.free_indices.append(0)


@pytest.mark.parametrize(
    "corrupt", [corrupt_index, corrupt_queue, corrupt_order, corrupt_length, corrupt_state, corrupt_free_indices]
)
def test_check_detects_inconsistent_states(corrupt: Callable[[Scheduler], None]) -> None:
    harness = FakeModelRun(rows=2)
    for number in (1, 2, 3):
        harness.add(number, 3)
    harness.step()
    corrupt(harness.scheduler)
    with pytest.raises(AssertionError):
        harness.scheduler.check()


def test_the_bench_runs() -> None:
    bench = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "scheduler.py"))
    line = bench["run"](8, 20, (FULL, NARROW))
    assert line["max_num_seqs"] == 8 and line["groups"] == 2 and line["sequence_steps_per_s"] > 0
