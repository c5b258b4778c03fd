"""Test number one with parking: every stream equals its solo run, however its row gave way and came back.

The worlds of ``test_policy_streams.py`` whose device copies rows out and in, exact and lossy ones, with little memory
for them or none, on a disk whose worker is slow, that fails now and then, or that changes what was written.  What a
swap costs is the toss of a coin: the outputs must not depend on it.

Broken on purpose (blocks woken in the wrong order, prefixes published before they are filled ...), the runs must fail.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

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
from kvad.engine.scheduling.sequence import SchedulerOutput, TokenSequence
from kvad.model_input import BlockOps
from kvad.storage.container import Section
from tests.engine.scheduling.test_policy_streams import POLICIES, PolicyDriver, PolicyMemory, PolicyWorld
from tests.engine.scheduling.test_streams import MACHINE, SETUPS, FakeMemory, Mismatch, Setup, StreamMachine
from tests.support.slow_swap_files import LateFiles, UnluckyDisk

EVERY = {**{f"exact-{name}": each for name, each in SETUPS.items() if name != "full-collisions"}, **POLICIES}
LOSSY = ("ranked", "ranked-tight", "watched", "levels", "levels-tight", "packed", "gone", "translating")
EXACT = tuple(name for name in EVERY if name not in LOSSY and name != "ranked-contiguous")
SOME = (
    "exact-full-tight",
    "exact-mixed",
    "exact-mixed-tall",
    "exact-translating",
    "exact-contiguous",
    "sinks",
    "quest",
)
A_ROW = 6000  # bytes: about what one row of these worlds takes


class Coin(SwapCostModel):
    """Swaps so often."""

    def __init__(self, rng: random.Random, often: float) -> None:
        super().__init__()
        self.rng, self.often = rng, often

    def swap_is_cheaper(self, nbytes: int, tokens: int, *, disk: bool = False, back: bool = False) -> bool:
        return self.rng.random() < self.often


class Stubborn(PreemptionManager):
    """Wakes a row that is still on its way out only now and then: else most would be back before they were written."""

    def __init__(self, ledger: KVCacheManager, costs: SwapCostModel, parking: SwapSpace, rng: random.Random) -> None:
        super().__init__(ledger, costs, parking)
        self.rng, self.stubborn = rng, 0.95

    def ready(self, row: TokenSequence) -> bool:
        if row.swapped is not None and self.swap_space is not None and self.swap_space.files is not None:
            on_disk = self.swap_space._records[row.swapped.key].is_written
            if not on_disk and self.rng.random() < self.stubborn:
                return False
        return super().ready(row)


class ParkWorld(PolicyWorld):
    """``ram``: bytes; ``disk`` None: there is none."""

    def __init__(
        self,
        setup: Setup,
        rng: random.Random,
        *,
        ram: int | None = 0,
        disk: UnluckyDisk | None = None,
        often: float = 1.0,
        ledger: type[KVCacheManager] = KVCacheManager,
        memory: type[FakeMemory] = PolicyMemory,
        check: bool = True,
    ) -> None:
        super().__init__(setup, ledger=ledger, memory=memory, check=check)
        self.copies: list[object] = []  # what stands in a file is where it is in here
        self.folder, self.disk = tempfile.TemporaryDirectory(), disk
        files = None if disk is None else LateFiles(Path(self.folder.name), lambda: rng.randrange(3), disk)
        self.parking = SwapSpace(
            self.memory.parked,
            ram=ram,
            files=files,
            to_sections=self._pack,
            from_sections=self._unpack,
            clock=self._clock,
        )
        self.swaps = self.scheduler.preemption = self.scheduler._admission.preemption = Stubborn(
            self.ledger, Coin(rng, often), self.parking, rng
        )
        self.lost, self.losing = 0, False
        self.natural = True  # nobody was preempted for no reason

    def _pack(self, key: int, copy: object) -> list[Section]:
        self.copies.append(copy)
        return [Section("0", "int64", (8,), (len(self.copies) - 1).to_bytes(64, "little"))]

    def _unpack(self, sections: Sequence[Section]) -> object:
        return self.copies[int.from_bytes(sections[0].data, "little")]

    def check(self) -> None:
        super().check()
        if self.checked:
            self.parking.check()
            ram, taken = self.parking.ram, self.parking.stats().ram_bytes
            if ram is not None and self.disk is None and self.natural:
                assert taken <= ram, f"{taken} bytes parked in {ram}"

    def plan(self) -> SchedulerOutput | None:
        plan = self.scheduler.schedule()
        if plan is None:
            self._judge(self.scheduler.pop_chunks())  # of rows that were lost
            assert not self.streams, f"nothing runs, and {sorted(self.streams)} wait"
        elif plan.encoder_batch is None:
            self._check_lanes(plan)
        return plan

    def _judge(self, events: Sequence[StreamChunk]) -> None:
        for event in events:
            if event.error is not None and "are lost" in event.error:
                assert self.ledger.lossy and (self.losing or (self.disk is not None and self.disk.bad))
                self.lost += 1
        super()._judge(events)

    def drain(self, most: int = 5000) -> None:
        super().drain(most)
        assert not len(self.parking), "somebody is parked for ever"
        self.swaps.close()
        assert not list(Path(self.folder.name).iterdir()) or (self.disk is not None and self.disk.failed)
        self.folder.cleanup()


class ParkDriver(PolicyDriver):
    """``wanton``: how often a row is preempted for no reason."""

    world: ParkWorld

    def __init__(self, setup: Setup, seed: int, *, wanton: float = 0.05, **parts: object) -> None:
        rng = random.Random(seed + 1000)
        self.world_type = lambda setup, **parts: ParkWorld(setup, rng, **parts)  # type: ignore[assignment, misc]
        super().__init__(setup, seed, **parts)
        self.wanton = wanton

    def operate(self) -> None:
        running = self.world.scheduler._running
        if running and self.rng.random() < self.wanton:
            self.world.natural = False
            self.world.scheduler._preempt(self.rng.choice(running))
        super().operate()


def judged(name: str, seed: int = 1, operations: int = 300, **parts: object) -> ParkWorld:
    world = ParkDriver(EVERY[name], seed, **parts).run(operations)
    assert isinstance(world, ParkWorld)
    return world


@pytest.mark.parametrize("name", SOME + LOSSY)
def test_rows_that_are_swapped_to_a_slow_disk(name: str) -> None:
    world = judged(name, disk=UnluckyDisk(random.Random(0)))
    told = world.swaps.stats()
    assert told.swap_space.written > 5 and told.swap_space.read > 5 and not told.num_lost
    assert told.swap_space.failed == 0


@pytest.mark.parametrize("name", SOME + LOSSY)
def test_rows_that_are_swapped_to_memory(name: str) -> None:
    told = judged(name, ram=1 << 30).swaps.stats()
    assert told.to_ram > 5 and told.to_disk == 0


@pytest.mark.parametrize("name", SOME)
def test_rows_that_are_swapped_or_computed_again_by_the_toss_of_a_coin(name: str) -> None:
    world = judged(name, ram=A_ROW, disk=UnluckyDisk(random.Random(0)), often=0.5)
    told = world.swaps.stats()
    assert told.recomputed > 3 and told.to_ram + told.to_disk > 3


@pytest.mark.parametrize("name", ["exact-mixed", "exact-translating", "ranked", "levels"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_disk_that_fails_and_lies(name: str, seed: int) -> None:
    """Rows that cannot be computed again end with an error, no others do, and no stream is wrong."""
    disk = UnluckyDisk(random.Random(seed), fail=0.2, spoil=0.2)
    world = judged(name, seed, 800, disk=disk, wanton=0.1)
    assert disk.failed and disk.spoiled and world.swaps.stats().num_lost > 0
    assert (world.lost > 0) == world.ledger.lossy


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("ram", [0, A_ROW])
def test_lossy_rows_without_room_wait_and_nothing_is_lost(name: str, ram: int) -> None:
    """No disk, and no memory but for one row: what runs together is what could be parked; the bound is kept."""
    world = judged(name, ram=ram, wanton=0.0)
    assert world.swaps.stats().num_lost == 0
    assert ram or not world.swaps.stats().to_ram


@pytest.mark.long(minutes=20)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("seed", range(500, 504))
def test_ten_thousand_operations_with_parking(name: str, seed: int) -> None:
    disk = UnluckyDisk(random.Random(seed), fail=0.02 * (seed % 2), spoil=0.02 * (seed % 2))
    judged(name, seed, 10_000, ram=(0, A_ROW)[seed // 2 % 2], disk=disk, often=0.7)


class ParkStreamMachine(StreamMachine):
    world: ParkWorld

    @initialize(
        name=st.sampled_from(sorted(EVERY)),
        ram=st.sampled_from((0, A_ROW, None)),
        seed=st.integers(0, 999),
        bad=st.sampled_from((0.0, 0.0, 0.2)),
    )
    def start(self, name: str, ram: int | None, seed: int, bad: float) -> None:  # type: ignore[override]
        rng = random.Random(seed)
        self.begin(ParkWorld(EVERY[name], rng, ram=ram, disk=UnluckyDisk(rng, bad, bad), often=0.8))

    @precondition(lambda self: self.world.scheduler._running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """For no reason at all."""
        self.world.natural = False
        self.world.scheduler._preempt(data.draw(st.sampled_from(self.world.scheduler._running)))

    @rule()
    def forget_prefixes(self) -> None:
        self.world.ledger.reset_prefix_cache()


class TestParkStreamMachine(ParkStreamMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(MACHINE, max_examples=50, stateful_step_count=30)


@pytest.mark.long(minutes=10)
class TestParkStreamMachineLong(ParkStreamMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(MACHINE, max_examples=1000, stateful_step_count=60, derandomize=False)


# ---------------------------------------------------------------- one by one


def test_others_run_while_a_row_is_read(tmp_path: Path) -> None:
    """The row at the head of the queue is on disk, and nobody waits for it but itself."""
    world = ParkWorld(EVERY["exact-full-tight"], random.Random(0), disk=UnluckyDisk(random.Random(0)))
    files = world.parking.files
    assert isinstance(files, LateFiles)
    files.jobs, world.swaps.stubborn = (lambda: 0), 1.0
    first, second = (world.add([token] * 6, SamplingParams(max_tokens=20), stops=frozenset()) for token in (1, 2))
    world.step()
    world.scheduler._preempt(world.scheduler.sequences(second)[0])
    row = world.scheduler.sequences(second)[0]
    for _ in range(2):
        world.step()
    files.work(10)
    world.step()
    assert row.swapped is not None and row.state == "waiting"
    for _ in range(3):
        plan = world.plan()
        assert plan is not None and [work.sequence.request_id for work in plan.scheduled] == [first]
        world.settle(plan)
        assert world.parking.state(row.swapped.key) == "reading"
    files.work(10)
    plan = world.plan()
    assert plan is not None and {work.sequence.request_id for work in plan.scheduled} == {first, second}
    assert [work.num_tokens for work in plan.scheduled] == [1, 1], "it was computed again"
    world.settle(plan)
    files.jobs = lambda: 1
    world.drain()


def test_a_row_alone_is_waited_for() -> None:
    world = ParkWorld(EVERY["levels"], random.Random(0), disk=UnluckyDisk(random.Random(0)))
    files = world.parking.files
    assert isinstance(files, LateFiles)
    only = world.add([1, 2] * 6, SamplingParams(max_tokens=9), stops=frozenset())
    for _ in range(3):
        world.step()
    world.scheduler._preempt(world.scheduler.sequences(only)[0])
    (row,) = world.scheduler.sequences(only)
    assert row.swapped is not None
    other = world.add([5], SamplingParams(max_tokens=1), stops=frozenset())
    plan = world.plan()  # a row that is here is woken at once, whatever the bound
    assert plan is not None and only in {work.sequence.request_id for work in plan.scheduled}
    world.settle(plan)
    world.drain()
    assert other not in world.streams


def test_a_woken_row_publishes_what_it_had_published() -> None:
    """A second request of the same prompt finds it, although its first blocks are long gone."""
    world = ParkWorld(EVERY["exact-full-tight"], random.Random(0), ram=1 << 30)
    prompt = list(range(100, 120))
    first = world.add(prompt, SamplingParams(max_tokens=12), stops=frozenset())
    while not world.scheduler.sequences(first)[0].num_generated_tokens:
        world.step()
    world.scheduler._preempt(world.scheduler.sequences(first)[0])
    for pool in world.ledger.pools:
        for block in pool.published():
            pool.unpublish(block)
    world.step()
    assert world.scheduler.sequences(first)[0].state == "running" and world.swaps.stats().to_ram == 1
    second = world.add(prompt, SamplingParams(max_tokens=2), stops=frozenset())
    world.step()
    assert world.scheduler.metrics(second).num_cached_tokens == 16
    world.drain()


def test_forgotten_prefixes_stay_forgotten() -> None:
    """Weights changed while a row was parked: what it had published is not to be found any more."""
    world = ParkWorld(EVERY["exact-full-tight"], random.Random(0), ram=1 << 30)
    prompt = list(range(100, 120))
    first = world.add(prompt, SamplingParams(max_tokens=12), stops=frozenset())
    while not world.scheduler.sequences(first)[0].num_generated_tokens:
        world.step()
    world.scheduler._preempt(world.scheduler.sequences(first)[0])
    world.ledger.reset_prefix_cache()
    for _ in range(3):
        world.step()
    assert not any(list(pool.published()) for pool in world.ledger.pools)
    world.drain()


@pytest.mark.parametrize("name", ["exact-mixed", "ranked"])
def test_a_copy_that_fails_is_not_missed(name: str) -> None:
    """The device has no memory for a copy: its step fails, and the row that gave way is not woken with nothing."""
    world = ParkWorld(EVERY[name], random.Random(0), disk=UnluckyDisk(random.Random(0)))
    world.swaps.stubborn = 1.0
    numbers = [world.add([token] * 7, SamplingParams(max_tokens=9), stops=frozenset()) for token in (1, 2)]
    for _ in range(3):
        world.step()
    world.scheduler._preempt(world.scheduler.sequences(numbers[1])[0])
    plan = world.scheduler.schedule()
    assert plan is not None
    assert [work.sequence.request_id for work in plan.scheduled] == numbers[:1]
    world.losing = True
    world._judge(
        world.scheduler.update_from_output(plan, [SequenceOutput(error="out of memory")] * len(plan.scheduled))
    )
    assert not world.memory.parked
    world.step()
    assert world.swaps.stats().num_lost == 1
    world.drain()
    assert world.lost == world.ledger.lossy


class Asked(SwapCostModel):
    """Notes what it is asked, and says as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, bool, bool]] = []
        self.way_back = True

    def swap_is_cheaper(self, nbytes: int, tokens: int, *, disk: bool = False, back: bool = False) -> bool:
        self.asked.append((tokens, disk, back))
        return self.way_back if back else True


def two_of_a_prompt() -> tuple[ParkWorld, Asked, list[int]]:
    """Two requests share 16 published tokens of 20, and one of them has given way and is on disk."""
    world = ParkWorld(EVERY["exact-mixed-tall"], random.Random(0), disk=UnluckyDisk(random.Random(0)))
    costs = world.swaps.costs = Asked()
    world.swaps.stubborn = 1.0
    prompt = list(range(100, 118))
    numbers = []
    for _ in range(2):
        numbers.append(world.add(prompt, SamplingParams(max_tokens=9), stops=frozenset()))
        while not world.scheduler.sequences(numbers[-1])[0].num_generated_tokens:
            world.step()
    return world, costs, numbers


def test_what_other_rows_hold_counts_for_computing_again() -> None:
    world, costs, numbers = two_of_a_prompt()
    (row,) = world.scheduler.sequences(numbers[1])
    computed, shared = row.num_computed_tokens, world.ledger.retained_prefix_length(row.seq_index)
    assert shared >= 16
    world.scheduler._preempt(row)
    assert costs.asked == [(computed - shared, True, False)]
    world.drain()


def test_a_row_that_is_known_by_now_is_not_read() -> None:
    world, costs, numbers = two_of_a_prompt()
    files, (row,) = world.parking.files, world.scheduler.sequences(numbers[1])
    assert isinstance(files, LateFiles)
    files.jobs = lambda: 0
    world.scheduler._preempt(row)
    for _ in range(2):
        world.step()
    files.work(10)
    costs.way_back = False
    world.step()
    tokens, *way = costs.asked[-1]
    assert tokens <= 1 and way == [True, True]
    assert row.swapped is None and row.state == "running"
    assert world.swaps.stats().swap_space.read == 0 and not len(world.parking)
    files.jobs = lambda: 1
    world.drain()


# ---------------------------------------------------------------- broken on purpose


class WrongOrder(PolicyMemory):
    """Wakes the first group's blocks in reverse."""

    def park_and_wake(self, moves: BlockOps) -> None:
        wake = tuple((key, (blocks[0][::-1], *blocks[1:])) for key, blocks in moves.swap_in)
        super().park_and_wake(moves._replace(swap_in=wake))


class TooSoon(KVCacheManager):
    """Lets others find the blocks of a row that is to wake before they are filled."""

    def swap_in(self, row: int, parked: SwappedSequence) -> bool:
        woken = super().swap_in(row, parked)
        if woken and self._sequence(row).republish:
            self._prefix_cache.republish(self._sequence(row))
        return woken


class CopiesOne(KVCacheManager):
    """Has one row of several copied out."""

    def allocate_slots(self, spans: TokenSpans) -> BlockAllocation | None:
        placed = super().allocate_slots(spans)
        return placed and placed._replace(block_ops=placed.block_ops._replace(swap_out=placed.block_ops.swap_out[:1]))


def runs(name: str, **parts: object) -> None:
    for seed in range(1, 5):
        disk = UnluckyDisk(random.Random(seed))
        ParkDriver(EVERY[name], seed, check=False, disk=disk, **parts).run(2000)


@pytest.mark.parametrize("name", ["exact-full-tight", "exact-mixed", "ranked", "levels", "exact-translating"])
def test_blocks_woken_in_the_wrong_order_are_noticed(name: str) -> None:
    with pytest.raises(Mismatch):
        runs(name, memory=WrongOrder)


def test_prefixes_published_too_soon_are_noticed() -> None:
    with pytest.raises(Mismatch):
        runs("exact-full-tight", ledger=TooSoon)


def test_copies_that_are_never_made_are_noticed() -> None:
    with pytest.raises(AssertionError):  # a row is lost, and the disk was never bad
        runs("ranked-tight", ledger=CopiesOne)
