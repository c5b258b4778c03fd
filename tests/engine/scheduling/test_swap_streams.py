"""Every request equals its solo run if its blocks are swapped out, however they come back.

The machine of ``tests/support/stream_harness.py`` with a swap space: exact and lossy sequences, with little RAM or
none, on a disk whose worker is slow, that fails at times, or that changes what was written. The decision between
copying and recomputing is random, because no output may depend on it. With a bug (blocks restored in the wrong order,
prefixes published before they are filled ...) the same runs must fail.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvad.cache.manager.allocation import BlockAllocation, TokenSpans
from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.cache.manager.sequence_blocks import SwappedSequence
from kvad.cache.offload.swap_space import SwapSpace
from kvad.engine.scheduling.preemption import PreemptionManager, SwapCostModel
from kvad.engine.scheduling.request import SamplingParams, SequenceOutput, StreamChunk
from kvad.engine.scheduling.sequence import TokenSequence
from kvad.model_input import BlockOps
from kvad.storage.container import Section
from tests.support.manager_driver import unpublish_all
from tests.support.slow_swap_files import LateFiles, LateSwapSpace, UnluckyDisk
from tests.support.stream_harness import MACHINE, MACHINE_LONG, RandomRequests, SchedulerHarness, StreamMachine
from tests.support.streams import LOSSY, SETUPS, FakeKVCache, Mismatch, Setup

EXACT = ("full-tight", "mixed", "mixed-tall", "translating", "contiguous", "sinks", "quest")
SEQUENCE_BYTES = 6000  # about the size of one sequence in these setups


class RandomCosts(SwapCostModel):
    """Chooses to swap with a given probability."""

    def __init__(self, rng: random.Random, probability: float) -> None:
        super().__init__()
        self.rng, self.probability = rng, probability

    def swap_is_cheaper(self, nbytes: int, tokens: int, *, disk: bool = False, back: bool = False) -> bool:
        return self.rng.random() < self.probability


class PatientPreemption(PreemptionManager):
    """Rarely restores a sequence before its copy is written, so that most copies reach the disk."""

    def __init__(
        self, manager: KVCacheManager, costs: SwapCostModel, swap_space: SwapSpace, rng: random.Random
    ) -> None:
        super().__init__(manager, costs, swap_space)
        self.rng, self.patience = rng, 0.95

    def ready(self, seq: TokenSequence) -> bool:
        if seq.swapped is not None and self.swap_space is not None and self.swap_space.files is not None:
            is_written = self.swap_space._records[seq.swapped.key].is_written
            if not is_written and self.rng.random() < self.patience:
                return False
        return super().ready(seq)


class SwapHarness(SchedulerHarness):
    """Harness with a swap space of ``ram`` bytes, and a ``disk`` if given."""

    def __init__(
        self,
        setup: Setup,
        rng: random.Random,
        *,
        ram: int | None = 0,
        disk: UnluckyDisk | None = None,
        swap_probability: float = 1.0,
        **parts: Any,
    ) -> None:
        super().__init__(setup, **parts)
        self.copies: list[object] = []  # a file holds the index of its copy
        self.folder, self.disk = tempfile.TemporaryDirectory(), disk
        files = None if disk is None else LateFiles(Path(self.folder.name), lambda: rng.randrange(3), disk)
        self.swap_space = LateSwapSpace(
            self.kv_cache.swapped,
            ram=ram,
            files=files,
            to_sections=self.to_sections,
            from_sections=self.from_sections,
            clock=self.clock,
        )
        costs = RandomCosts(rng, swap_probability)
        self.preemption = PatientPreemption(self.manager, costs, self.swap_space, rng)
        self.scheduler.preemption = self.scheduler._admission.preemption = self.preemption
        self.num_lost, self.expects_losses = 0, False
        self.preempts_at_random = False

    def to_sections(self, key: int, copy: object) -> list[Section]:
        self.copies.append(copy)
        return [Section("0", "int64", (8,), (len(self.copies) - 1).to_bytes(64, "little"))]

    def from_sections(self, sections: Sequence[Section]) -> object:
        return self.copies[int.from_bytes(sections[0].data, "little")]

    def preempt(self, request: int | None = None, rng: random.Random | None = None) -> TokenSequence:
        """Preempt a request's sequence, or a random one, although the pool has room."""
        self.preempts_at_random = True
        candidates = self.scheduler._running if request is None else self.scheduler.sequences(request)
        seq = candidates[0] if rng is None else rng.choice(candidates)
        self.scheduler._preempt(seq)
        return seq

    def check(self) -> None:
        super().check()
        if self.checks_invariants:
            self.swap_space.check()
            ram, used = self.swap_space.ram, self.swap_space.stats().ram_bytes
            if ram is not None and self.disk is None and not self.preempts_at_random:
                assert used <= ram, f"{used} bytes are swapped to {ram}"

    def check_idle(self) -> None:
        self.compare(self.scheduler.pop_chunks())  # of sequences that were lost
        super().check_idle()

    def compare(self, chunks: Sequence[StreamChunk]) -> None:
        for chunk in chunks:
            if chunk.error is not None and "are lost" in chunk.error:
                assert self.manager.lossy
                assert self.expects_losses or (self.disk is not None and self.disk.bad)
                self.num_lost += 1
        super().compare(chunks)

    def drain(self, max_steps: int = 5000) -> None:
        super().drain(max_steps)
        assert not len(self.swap_space), "a sequence remains swapped"
        self.preemption.close()
        assert not list(Path(self.folder.name).iterdir()) or (self.disk is not None and self.disk.failed)
        self.folder.cleanup()


class SwapRequests(RandomRequests):
    """``preempt_probability``: of a preemption without need, before each operation."""

    harness: SwapHarness

    def __init__(self, setup: Setup, seed: int, *, preempt_probability: float = 0.05, **parts: Any) -> None:
        self.harness_type = lambda setup, **parts: SwapHarness(setup, random.Random(seed + 1000), **parts)
        super().__init__(setup, seed, **parts)
        self.preempt_probability = preempt_probability

    def operate(self) -> None:
        if self.harness.scheduler._running and self.rng.random() < self.preempt_probability:
            self.harness.preempt(rng=self.rng)
        super().operate()


def run(name: str, seed: int = 1, num_operations: int = 300, **parts: Any) -> SwapHarness:
    harness = SwapRequests(SETUPS[name], seed, **parts).run(num_operations)
    assert isinstance(harness, SwapHarness)
    return harness


@pytest.mark.parametrize("name", EXACT + LOSSY)
def test_sequences_swapped_to_a_slow_disk(name: str) -> None:
    stats = run(name, disk=UnluckyDisk(random.Random(0))).preemption.stats()
    assert stats.swap_space.written > 5 and stats.swap_space.read > 5 and not stats.num_lost
    assert stats.swap_space.failed == 0


@pytest.mark.parametrize("name", EXACT + LOSSY)
def test_sequences_swapped_to_memory(name: str) -> None:
    stats = run(name, ram=1 << 30).preemption.stats()
    assert stats.to_ram > 5 and stats.to_disk == 0


@pytest.mark.parametrize("name", EXACT)
def test_sequences_swapped_or_recomputed_at_random(name: str) -> None:
    disk = UnluckyDisk(random.Random(0))
    stats = run(name, ram=SEQUENCE_BYTES, disk=disk, swap_probability=0.5).preemption.stats()
    assert stats.recomputed > 3 and stats.to_ram + stats.to_disk > 3


@pytest.mark.parametrize("name", ["mixed", "translating", "ranked", "tiered"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_disk_that_fails_and_changes_data(name: str, seed: int) -> None:
    """Sequences that cannot be recomputed end with an error, no others do, and no stream is wrong."""
    disk = UnluckyDisk(random.Random(seed), fail=0.2, spoil=0.2)
    harness = run(name, seed, num_operations=800, disk=disk, preempt_probability=0.1)
    assert disk.failed and disk.spoiled and harness.preemption.stats().num_lost > 0
    assert (harness.num_lost > 0) == harness.manager.lossy


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("ram", [0, SEQUENCE_BYTES])
def test_lossy_sequences_without_room_wait_and_none_is_lost(name: str, ram: int) -> None:
    """No disk, and RAM for at most one sequence: only what could be swapped runs together."""
    stats = run(name, ram=ram, preempt_probability=0.0).preemption.stats()
    assert stats.num_lost == 0 and (ram or not stats.to_ram)


@pytest.mark.long(minutes=20)
@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("seed", range(500, 504))
def test_ten_thousand_operations_with_swapping(name: str, seed: int) -> None:
    disk = UnluckyDisk(random.Random(seed), fail=0.02 * (seed % 2), spoil=0.02 * (seed % 2))
    run(name, seed, 10_000, ram=(0, SEQUENCE_BYTES)[seed // 2 % 2], disk=disk, swap_probability=0.7)


class SwapMachine(StreamMachine):
    harness: SwapHarness

    @initialize(
        name=st.sampled_from(sorted(SETUPS)),
        ram=st.sampled_from((0, SEQUENCE_BYTES, None)),
        seed=st.integers(0, 999),
        bad=st.sampled_from((0.0, 0.0, 0.2)),
    )
    def start(self, name: str, ram: int | None, seed: int, bad: float) -> None:
        rng = random.Random(seed)
        self.begin(SwapHarness(SETUPS[name], rng, ram=ram, disk=UnluckyDisk(rng, bad, bad), swap_probability=0.8))

    @precondition(lambda self: self.harness.scheduler._running)
    @rule(seed=st.integers(0, 3))
    def preempt(self, seed: int) -> None:  # type: ignore[override]
        self.harness.preempt(rng=random.Random(seed))


class TestSwapMachine(SwapMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(MACHINE, max_examples=50)


@pytest.mark.long(minutes=10)
class TestSwapMachineLong(SwapMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = MACHINE_LONG


# ---------------------------------------------------------------- single events


def on_disk(name: str, patience: float = 1.0) -> tuple[SwapHarness, LateFiles]:
    """Return a harness with a disk, whose sequences are restored only once they are written."""
    harness = SwapHarness(SETUPS[name], random.Random(0), disk=UnluckyDisk(random.Random(0)))
    assert isinstance(harness.swap_space.files, LateFiles)
    harness.preemption.patience = patience
    return harness, harness.swap_space.files


def add(harness: SwapHarness, prompt: Sequence[int], max_tokens: int) -> int:
    return harness.add(prompt, SamplingParams(max_tokens=max_tokens), stop_tokens=frozenset())


def test_others_run_while_a_sequence_is_read() -> None:
    """The first waiting sequence is on disk; only that sequence waits for it."""
    harness, files = on_disk("full-tight")
    files.late.jobs = lambda: 0
    first, second = (add(harness, [token] * 6, 20) for token in (1, 2))
    harness.step()
    seq = harness.preempt(second)
    for _ in range(2):
        harness.step()
    files.work(10)
    harness.step()
    assert seq.swapped is not None and seq.state == "waiting"
    for _ in range(3):
        output = harness.schedule()
        assert output is not None and [scheduled.sequence.request_id for scheduled in output.scheduled] == [first]
        harness.update(output)
        assert harness.swap_space.record(seq.swapped.key).state == "reading"
    files.work(10)
    output = harness.schedule()
    assert output is not None and {scheduled.sequence.request_id for scheduled in output.scheduled} == {first, second}
    assert [scheduled.num_tokens for scheduled in output.scheduled] == [1, 1], "it was recomputed"
    harness.update(output)
    files.late.jobs = lambda: 1
    harness.drain()


def test_a_sequence_that_is_in_memory_is_restored_at_once() -> None:
    harness, _ = on_disk("tiered", patience=0.95)
    only = add(harness, [1, 2] * 6, 9)
    for _ in range(3):
        harness.step()
    assert harness.preempt(only).swapped is not None
    other = add(harness, [5], 1)
    output = harness.schedule()
    assert output is not None and only in {scheduled.sequence.request_id for scheduled in output.scheduled}
    harness.update(output)
    harness.drain()
    assert other not in harness.expected


def swapped_to_memory() -> tuple[SwapHarness, list[int], int]:
    """Return a harness, a prompt, and its request, whose sequence was swapped to memory after its first token."""
    harness = SwapHarness(SETUPS["full-tight"], random.Random(0), ram=1 << 30)
    prompt = list(range(100, 120))
    request = add(harness, prompt, 12)
    while not harness.scheduler.sequences(request)[0].num_generated_tokens:
        harness.step()
    harness.preempt(request)
    return harness, prompt, request


def test_a_restored_sequence_publishes_its_prefix_again() -> None:
    """A second request with the same prompt finds it, although its first blocks were evicted."""
    harness, prompt, first = swapped_to_memory()
    unpublish_all(harness.manager)
    harness.step()
    assert harness.scheduler.sequences(first)[0].state == "running" and harness.preemption.stats().to_ram == 1
    second = add(harness, prompt, 2)
    harness.step()
    assert harness.scheduler.metrics(second).num_cached_tokens == 16
    harness.drain()


@pytest.mark.parametrize("name", ["mixed", "ranked"])
def test_a_sequence_whose_copy_failed_is_not_restored(name: str) -> None:
    """The device has no memory for the copy, so the step fails, and the copy is lost."""
    harness, _ = on_disk(name)
    requests = [add(harness, [token] * 7, 9) for token in (1, 2)]
    for _ in range(3):
        harness.step()
    harness.preempt(requests[1])
    output = harness.scheduler.schedule()
    assert output is not None
    assert [scheduled.sequence.request_id for scheduled in output.scheduled] == requests[:1]
    harness.expects_losses = True
    results = [SequenceOutput(error="out of memory")] * len(output.scheduled)
    harness.compare(harness.scheduler.update_from_output(output, results))
    assert not harness.kv_cache.swapped
    harness.step()
    assert harness.preemption.stats().num_lost == 1
    harness.drain()
    assert harness.num_lost == harness.manager.lossy


class RecordingCosts(SwapCostModel):
    """Records the questions (tokens, disk, back); ``reads`` is the answer for reading a copy back."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[tuple[int, bool, bool]] = []
        self.reads = True

    def swap_is_cheaper(self, nbytes: int, tokens: int, *, disk: bool = False, back: bool = False) -> bool:
        self.questions.append((tokens, disk, back))
        return self.reads or not back


def two_with_one_prompt() -> tuple[SwapHarness, RecordingCosts, LateFiles, TokenSequence]:
    """Return a harness with two requests that share 16 published tokens, and the second one's sequence."""
    harness, files = on_disk("mixed-tall")
    costs = harness.preemption.costs = RecordingCosts()
    for _ in range(2):
        request = add(harness, list(range(100, 118)), 9)
        while not harness.scheduler.sequences(request)[0].num_generated_tokens:
            harness.step()
    return harness, costs, files, harness.scheduler.sequences(request)[0]


def test_tokens_that_other_sequences_hold_need_not_be_recomputed() -> None:
    harness, costs, _, seq = two_with_one_prompt()
    num_shared = harness.manager.retained_prefix_length(seq.seq_index)
    expected = (seq.num_computed_tokens - num_shared, True, False)
    assert num_shared >= 16
    harness.scheduler._preempt(seq)
    assert costs.questions == [expected]
    harness.drain()


def test_a_sequence_that_is_cached_by_now_is_not_read() -> None:
    harness, costs, files, seq = two_with_one_prompt()
    files.late.jobs = lambda: 0
    harness.scheduler._preempt(seq)
    for _ in range(2):
        harness.step()
    files.work(10)
    costs.reads = False
    harness.step()
    num_tokens, *flags = costs.questions[-1]
    assert num_tokens <= 1 and flags == [True, True]
    assert seq.swapped is None and seq.state == "running"
    assert harness.preemption.stats().swap_space.read == 0 and not len(harness.swap_space)
    files.late.jobs = lambda: 1
    harness.drain()


# ---------------------------------------------------------------- bugs


class RestoresInReverse(FakeKVCache):
    """Restores the first group's blocks in reverse order."""

    def swap(self, block_ops: BlockOps) -> None:
        swap_in = tuple((key, (blocks[0][::-1], *blocks[1:])) for key, blocks in block_ops.swap_in)
        super().swap(block_ops._replace(swap_in=swap_in))


class PublishesTooSoon(KVCacheManager):
    """Publishes the blocks of a restored sequence before they are filled."""

    def swap_in(self, seq_index: int, swapped: SwappedSequence, request_id: int = -1) -> bool:
        restored = super().swap_in(seq_index, swapped, request_id)
        if restored and self._sequence(seq_index).republish:
            self._prefix_cache.republish(self._sequence(seq_index))
        return restored


class CopiesOneSequence(KVCacheManager):
    """Copies only one of several sequences to the host."""

    def allocate_slots(self, spans: TokenSpans) -> BlockAllocation | None:
        allocation = super().allocate_slots(spans)
        if allocation is None:
            return None
        block_ops = allocation.block_ops
        return allocation._replace(block_ops=block_ops._replace(swap_out=block_ops.swap_out[:1]))


@pytest.mark.parametrize(
    ("name", "bug", "error"),
    [
        *((name, {"kv_cache": RestoresInReverse}, Mismatch) for name in ("full-tight", "mixed", "ranked", "tiered")),
        ("translating", {"kv_cache": RestoresInReverse}, Mismatch),
        ("full-tight", {"manager": PublishesTooSoon}, Mismatch),
        ("ranked-tight", {"manager": CopiesOneSequence}, AssertionError),  # a sequence is lost on a good disk
    ],
)
def test_a_bug_is_detected(name: str, bug: dict[str, Any], error: type[Exception]) -> None:
    def run_with_bug() -> None:
        for seed in range(1, 5):
            SwapRequests(SETUPS[name], seed, check=False, disk=UnluckyDisk(random.Random(seed)), **bug).run(2000)

    with pytest.raises(error):
        run_with_bug()
