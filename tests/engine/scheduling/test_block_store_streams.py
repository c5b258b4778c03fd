"""Test number one with tiers: every stream equals its solo run, while blocks are evicted, stored and loaded all the
time.

The worlds of ``test_streams.py`` over a tier that keeps what a fake memory copies out, forgets some of it, brings it
late, out of order or not at all, and never hands out what was withdrawn.  Blocks that nobody owns are filled with
canaries, so that what is read without having been loaded is heard.

Broken on purpose (a load left out, a store after the clearing, a withdrawal that does not reach the tier ...), they
fail.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from kvad.cache.config import CacheConfig
from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.cache.manager.prefix_offload import BlockKey, LoadHandle, PrefetchRequest, PrefixOffload
from kvad.engine.scheduling.request import SamplingParams
from kvad.engine.scheduling.sequence import SchedulerOutput
from kvad.model_input import RESERVED_BLOCKS, BlockOps
from tests.engine.scheduling.test_streams import (
    FULL,
    MACHINE,
    NARROW,
    SELF,
    SETUPS,
    WIDE,
    Driver,
    FakeMemory,
    Mismatch,
    Setup,
    StreamMachine,
    World,
)

TIERED = {
    name: setup
    for name, setup in SETUPS.items()
    if setup.config.enable_prefix_caching and setup.config.layout == "paged"
} | {
    "narrow-and-full": Setup(
        (NARROW, FULL, WIDE, SELF),
        CacheConfig(block_size=2, max_num_seqs=4, max_seq_len=40, prefill_chunk_size=5, num_blocks=24),
        9,
        40,
    ),
    "scarce": Setup(
        (FULL,), CacheConfig(block_size=4, max_num_seqs=4, max_seq_len=40, prefill_chunk_size=7, num_blocks=10), 10, 40
    ),
    "scarce-collisions": Setup(
        (FULL,),
        CacheConfig(block_size=2, max_num_seqs=4, max_seq_len=40, prefill_chunk_size=7, num_blocks=20),
        10,
        40,
        8,
    ),
}


class FakeTier:
    """Keeps at most ``limit`` blocks; ``tick`` finishes some tickets, some of them in failure."""

    def __init__(self, seed: int, limit: int = 60, failing: float = 0.1) -> None:
        self.rng, self.limit, self.failing = random.Random(seed), limit, failing
        self.kept: dict[str, tuple[BlockKey, dict[int, Any]]] = {}
        self.wanted: dict[int, BlockKey] = {}
        self.lent: dict[int, Mapping[int, Any]] = {}
        self.coming: list[LoadHandle] = []
        self.number = self.stored = self.loaded = self.failed = self.withdrawn = self.refused = 0

    def has(self, key: str) -> bool:
        return key in self.kept

    def load(self, name: BlockKey, groups: tuple[int, ...]) -> LoadHandle:
        ticket = LoadHandle(name, groups)
        self.coming.append(ticket)
        return ticket

    def request_copy(self, name: BlockKey, groups: tuple[int, ...], *, evicted: bool) -> int | None:
        if self.rng.random() < (0.1 if evicted else 0.6):
            return None
        self.number += 1
        self.wanted[self.number] = name
        return self.number

    def cancel(self, number: int) -> None:
        del self.wanted[number]

    def stage_load(self, pieces: Mapping[int, Any]) -> int:
        self.number += 1
        self.lent[self.number] = pieces
        self.loaded += 1
        return self.number

    def drop(self, key: str) -> None:
        self.withdrawn += self.kept.pop(key, None) is not None
        for number in [number for number, name in self.wanted.items() if name.key == key]:
            del self.wanted[number]
        for ticket in self.coming:
            if ticket.name.key == key:
                ticket.fail("withdrawn")

    def put(self, number: int, pieces: Mapping[int, Any]) -> None:
        name = self.wanted.pop(number, None)
        if name is None:
            return
        self.stored += 1
        before = self.kept.pop(name.key, None)
        more = before[1] if before is not None and before[0] == name else {}
        self.kept[name.key] = name, {**more, **pieces}
        if len(self.kept) > self.limit:
            del self.kept[self.rng.choice(list(self.kept))]

    def take(self, number: int) -> Mapping[int, Any]:
        return self.lent.pop(number)

    def tick(self) -> None:
        for ticket in self.rng.sample(self.coming, self.rng.randint(0, len(self.coming))):
            self.coming.remove(ticket)
            if not ticket.done:
                self.finish(ticket)

    def finish(self, ticket: LoadHandle) -> None:
        name, pieces = self.kept.get(ticket.name.key, (None, {}))
        if name is not None and not self.matches(name, ticket.name):
            self.refused += 1
            ticket.fail("collision")
        elif name is None or self.rng.random() < self.failing:
            self.failed += 1
            ticket.fail("damaged")
        else:
            ticket.complete({group: pieces[group] for group in ticket.groups if group in pieces}, "disk")

    def matches(self, name: BlockKey, asked: BlockKey) -> bool:
        return name == asked


class TieredMemory(FakeMemory):
    tier: FakeTier

    def apply(self, moves: BlockOps) -> None:
        self.store(moves)
        self.load(moves)
        super().apply(moves)

    def store(self, moves: BlockOps) -> None:
        for number, blocks in moves.store:
            self.tier.put(number, {g: self.copied(g, own[0]) for g, own in enumerate(blocks) if own})

    def load(self, moves: BlockOps) -> None:
        for number, blocks in moves.load:
            pieces = self.tier.take(number)
            for g, own in enumerate(blocks):
                for block in own:
                    self.fill(g, block, pieces[g])

    def copied(self, g: int, block: int) -> tuple[tuple[int, ...], ...]:
        size = self.groups[g].block_size
        arrays = (self.position[g], self.token[g], self.history[g])
        return tuple(tuple(array[block * size : (block + 1) * size]) for array in arrays)

    def fill(self, g: int, block: int, piece: Sequence[Sequence[int]]) -> None:
        size = self.groups[g].block_size
        for array, part in zip((self.position[g], self.token[g], self.history[g]), piece, strict=True):
            array[block * size : (block + 1) * size] = part


class TieredWorld(World):
    """Blocks are on their way while others run; what nobody owns is garbage."""

    def __init__(
        self,
        setup: Setup,
        *,
        ledger: type[KVCacheManager] = KVCacheManager,
        memory: type[TieredMemory] = TieredMemory,
        tier: type[FakeTier] = FakeTier,
        deposits: type[PrefixOffload] = PrefixOffload,
        luck: int = 0,
        check: bool = True,
    ) -> None:
        self.tier = tier(luck)
        super().__init__(setup, ledger=partial(ledger, block_store=self.tier), memory=memory, check=check)  # type: ignore[arg-type]
        if deposits is not PrefixOffload:
            made = self.ledger._prefix_cache.offload = deposits(self.tier, len(self.ledger.groups))
            for index in range(len(self.ledger.token_groups)):
                self.ledger.pools[index].on_evict = partial(made.on_evicted, index)
        self.memory.tier = self.tier  # type: ignore[attr-defined]
        self.aborted = 0

    def plan(self) -> SchedulerOutput | None:
        self.tier.tick()
        plan = self.scheduler.schedule()
        if plan is None:
            waiting = [row for row in self.scheduler._waiting if row.prefetch is not None and not row.prefetch.ready()]
            assert waiting or not self.streams, f"nothing runs, nothing is on its way, and {sorted(self.streams)} wait"
        elif plan.encoder_batch is None:
            self._check_lanes(plan)
        return plan

    def plan_and_settle_is_idle(self) -> bool:
        return super().plan_and_settle_is_idle() and not self.streams

    def cancel(self, number: int) -> None:
        rows = self.scheduler.sequences(number)
        self.aborted += any(
            row.prefetch is not None and row.prefetch.started and not row.prefetch.ready() for row in rows
        )
        super().cancel(number)

    def check(self) -> None:
        super().check()
        moves = self.ledger.flush_offload()
        if moves is not None:
            self.memory.apply(moves)
        for g, (group, pool) in enumerate(zip(self.ledger.groups, self.ledger.pools, strict=True)):
            for block in range(RESERVED_BLOCKS, group.num_blocks):
                if pool.refs[block] == 0 and pool.prefixes[block] is None:
                    for slot in range(block * group.block_size, (block + 1) * group.block_size):
                        self.memory.position[g][slot] = 0
                        self.memory.spoil(g, slot)


class TieredDriver(Driver):
    world_type = TieredWorld


@pytest.mark.parametrize("name", TIERED)
@pytest.mark.parametrize("seed", [1])
def test_every_stream_equals_its_solo_run_with_tiers(name: str, seed: int) -> None:
    world = TieredDriver(TIERED[name], seed, luck=seed).run(1000)
    assert isinstance(world, TieredWorld) and world.ledger.prefix_offload is not None
    tier, tokens = world.tier, world.ledger.prefix_offload.hits.tokens
    assert min(tier.stored, tier.loaded, tier.failed, tokens["disk"]) > 4
    assert world.aborted and tier.withdrawn
    assert name not in ("full-collisions", "scarce-collisions") or tier.refused


@pytest.mark.long
@pytest.mark.parametrize("name", TIERED)
@pytest.mark.parametrize("seed", range(300, 304))
def test_ten_thousand_operations_with_tiers(name: str, seed: int) -> None:
    TieredDriver(TIERED[name], seed, luck=seed).run(10_000)


class TierMachine(StreamMachine):
    """Requests come, are cancelled, fail and are preempted, over a tier that is slow and forgets."""

    @initialize(name=st.sampled_from(sorted(TIERED)), seed=st.integers(0, 1 << 16))
    def start(self, name: str, seed: int) -> None:  # type: ignore[override]
        self.begin(TieredWorld(TIERED[name], luck=seed))

    @rule()
    def cancel_in_flight(self) -> None:  # type: ignore[override]
        plan = self.world.plan()
        if plan is not None:
            self.world.cancel(min(self.world.streams))
            self.world.settle(plan)

    @rule(seed=st.integers(0, 9))
    def read_again(self, seed: int) -> None:
        """A long prompt of few kinds: what was evicted of it is fetched."""
        prompt = [seed % 2] * 15
        if len(self.world.streams) < 8 and len(prompt) + 2 <= self.longest:
            self.world.add(prompt, SamplingParams(max_tokens=2), b"")


class TestTierMachine(TierMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(MACHINE, max_examples=100)


@pytest.mark.long(minutes=4)
class TestTierMachineLong(TierMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(MACHINE, max_examples=1000, stateful_step_count=60, derandomize=False)


# ---------------------------------------------------------------- single events


class Sure(FakeTier):
    """Keeps everything, and brings what the test lets come."""

    def request_copy(self, name: BlockKey, groups: tuple[int, ...], *, evicted: bool) -> int | None:
        self.number += 1
        self.wanted[self.number] = name
        return self.number

    def tick(self) -> None:
        pass

    def bring(self, torn: Sequence[int] = ()) -> None:
        """All that is on its way, but for those that are damaged."""
        self.failing = 0.0
        for at, ticket in enumerate(self.coming):
            ticket.fail("damaged") if at in torn else self.finish(ticket)
        self.coming.clear()


def after(prompt: Sequence[int], **parts: Any) -> TieredWorld:
    """A world whose tier has this prompt, and whose pools do not."""
    world = TieredWorld(TIERED["full-tight"], **{"tier": Sure, **parts})
    world.add(prompt, SamplingParams(max_tokens=1), b"", frozenset())
    world.drain()
    world.ledger.reset_prefix_cache()
    assert len(world.tier.kept) == len(prompt) // 4
    return world


def test_who_needs_nothing_from_the_tiers_goes_past_who_waits() -> None:
    world = after([1] * 12)
    waits = world.add([1] * 13, SamplingParams(max_tokens=3), b"", frozenset())
    goes = world.add([2] * 9, SamplingParams(max_tokens=3), b"", frozenset())
    usage = world.usages[waits]
    for _ in range(10):
        world.step()
    assert waits in world.streams and goes not in world.streams
    assert world.scheduler.schedule() is None
    world.tier.bring()  # type: ignore[attr-defined]
    world.drain()
    assert usage.num_cached_tokens == 12


@pytest.mark.parametrize(("broken", "cached"), [((2,), 8), ((1,), 4), ((1, 2), 4), ((0,), 0), ((), 12)])
def test_the_row_computes_from_the_first_block_that_did_not_come(broken: tuple[int, ...], cached: int) -> None:
    world = after([1] * 12)
    usage = world.usages[world.add([1] * 13, SamplingParams(max_tokens=3), b"", frozenset())]
    assert world.scheduler.schedule() is None and len(world.tier.coming) == 3
    world.tier.bring(broken)  # type: ignore[attr-defined]
    world.drain()
    assert usage.num_cached_tokens == cached
    assert world.ledger.prefix_offload is not None and world.ledger.prefix_offload.hits.misses["damaged"] == bool(
        broken
    )


@pytest.mark.parametrize("how", ["cancel", "finish"])
def test_blocks_that_come_for_a_request_that_has_ended_go_nowhere(how: str) -> None:
    world = after([1] * 12)
    number = world.add([1] * 13, SamplingParams(max_tokens=3), b"", frozenset())
    assert world.scheduler.schedule() is None
    getattr(world, how)(number, *([0] if how == "finish" else []))
    assert world.scheduler.idle
    world.add([2] * 12, SamplingParams(max_tokens=20), b"", frozenset())
    world.step()
    world.tier.bring()  # type: ignore[attr-defined]
    world.drain()
    assert not world.tier.loaded


def test_a_row_without_room_keeps_what_it_was_fetched() -> None:
    world = after([1] * 12)
    world.add([2] * 36, SamplingParams(max_tokens=4), b"", frozenset())
    world.step()
    world.add([1] * 39, SamplingParams(max_tokens=1), b"", frozenset())
    world.step()
    world.tier.bring()  # type: ignore[attr-defined]
    world.drain()
    assert world.tier.loaded == 3


def fault(**parts: Any) -> None:
    """What a faulted row has published, and what it was fetched, is in no tier when it has ended."""
    world = after([1] * 12, **parts)
    number = world.add([1] * 23, SamplingParams(max_tokens=5), b"", frozenset())
    assert world.scheduler.schedule() is None
    world.tier.bring()  # type: ignore[attr-defined]
    world.step()  # 12 fetched, 7 computed
    world.step(faults=lambda row: row.request_id == number)
    assert not world.streams and world.ended == {"length": 1, "error": 1}
    world.check()
    assert not world.tier.kept, "a faulted row's blocks are in the tier"
    again = world.usages[world.add([1] * 23, SamplingParams(max_tokens=5), b"", frozenset())]
    world.drain()
    assert again.num_cached_tokens == 0


def test_what_a_faulted_row_had_is_withdrawn_from_the_tiers() -> None:
    fault()


def test_a_row_that_fails_in_its_first_step_takes_what_it_was_fetched_along() -> None:
    world = after([1] * 12)
    world.add([1] * 13, SamplingParams(max_tokens=5), b"", frozenset())
    assert world.scheduler.schedule() is None
    world.tier.bring()  # type: ignore[attr-defined]
    world.step(faults=lambda row: True)
    assert not world.tier.kept


def test_a_block_that_was_withdrawn_on_its_way_does_not_come() -> None:
    world = after([1] * 12)
    usage = world.usages[world.add([1] * 13, SamplingParams(max_tokens=3), b"", frozenset())]
    assert world.scheduler.schedule() is None
    world.tier.drop(list(world.tier.kept)[1])
    world.tier.bring()  # type: ignore[attr-defined]
    world.drain()
    assert usage.num_cached_tokens == 4


# ---------------------------------------------------------------- broken on purpose


class LoadsNothing(TieredMemory):
    def load(self, moves: BlockOps) -> None:
        for number, _ in moves.load:
            self.tier.take(number)


class StoresLate(TieredMemory):
    """After the blocks have changed hands."""

    def apply(self, moves: BlockOps) -> None:
        FakeMemory.apply(self, moves)
        self.store(moves)
        self.load(moves)


class TrustsTheKey(FakeTier):
    def matches(self, name: BlockKey, asked: BlockKey) -> bool:
        return True


class TrustsTheTokens(FakeTier):
    """Compares the block's tokens and not what stands before it."""

    def matches(self, name: BlockKey, asked: BlockKey) -> bool:
        return name.tokens == asked.tokens


class KeepsTheWithdrawn(Sure):
    def drop(self, key: str) -> None:
        pass


class ForgetsToWithdraw(PrefixOffload):
    """What a row was fetched stays known when that row fails."""

    def on_invalidated(self, prefix: object) -> None:
        pass


class TooEarly(KVCacheManager):
    """Takes what has not come for what has."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        there = self._prefix_cache._is_available

        def early(index: int, prefix: Any, fetch: PrefetchRequest | None) -> bool:
            return there(index, prefix, fetch) or (fetch is not None and prefix in fetch.handles)

        self._prefix_cache._is_available = early  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("scarce", {"memory": LoadsNothing}),
        ("scarce", {"memory": StoresLate}),
        ("scarce-collisions", {"tier": TrustsTheKey}),
        ("scarce-collisions", {"tier": TrustsTheTokens}),
        ("scarce", {"ledger": TooEarly}),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else value,
)
def test_a_broken_tier_is_heard(name: str, parts: dict[str, Any]) -> None:
    def run() -> None:
        for seed in range(12):
            TieredDriver(TIERED[name], seed, luck=seed, **parts).run(2500)

    with pytest.raises((Mismatch, AssertionError)):
        run()


@pytest.mark.parametrize("parts", [{"tier": KeepsTheWithdrawn}, {"deposits": ForgetsToWithdraw}])
def test_a_withdrawal_that_does_not_arrive_is_heard(parts: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="in the tier"):
        fault(**parts)


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_wait_for_nothing_keep_nobody_from_the_tiers(seed: int) -> None:
    """Samples wait for their first, with nothing to fetch: they do not count as rows whose blocks are on their way."""
    TieredDriver(TIERED["scarce"], seed, luck=seed).run(2500)
