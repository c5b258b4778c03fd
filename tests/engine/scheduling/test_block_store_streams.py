"""Every request equals its solo run while blocks are evicted, stored and loaded.

The machine of ``tests/support/stream_harness.py`` with a block store that drops some blocks and loads others late, out
of order or not at all, and never returns a block that was dropped on request. With a bug (a load that is left out, a
copy after the clearing, a removal that does not reach the store ...) the same runs must fail.
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

from kvad.cache.groups import CacheGroup
from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.cache.manager.prefix_offload import BlockKey, LoadHandle, PrefetchRequest, PrefixOffload
from kvad.engine.scheduling.request import SamplingParams
from kvad.engine.scheduling.sequence import SchedulerOutput
from kvad.model_input import BlockOps
from tests.support.manager_driver import unpublish_all
from tests.support.stream_harness import MACHINE, MACHINE_LONG, RandomRequests, SchedulerHarness, StreamMachine
from tests.support.streams import EXACT_SETUPS, FULL, NARROW, SELF, WIDE, FakeKVCache, Mismatch, Setup, cache

SETUPS = {
    name: setup
    for name, setup in EXACT_SETUPS.items()
    if setup.config.enable_prefix_caching and setup.config.layout == "paged"
} | {
    "narrow-and-full": Setup((NARROW, FULL, WIDE, SELF), cache(block_size=2, prefill_chunk_size=5, num_blocks=24)),
    "scarce": Setup((FULL,), cache(prefill_chunk_size=7, num_blocks=10), 10),
    "scarce-collisions": Setup((FULL,), cache(block_size=2, prefill_chunk_size=7, num_blocks=20), 10, hash_bits=8),
}


class FakeBlockStore:
    """Stores at most ``max_blocks`` blocks; ``tick`` finishes some loads, some of them with a failure."""

    def __init__(self, seed: int, max_blocks: int = 60, failure_rate: float = 0.1) -> None:
        self.rng, self.max_blocks, self.failure_rate = random.Random(seed), max_blocks, failure_rate
        self.blocks: dict[str, tuple[BlockKey, dict[int, Any]]] = {}
        self.requested: dict[int, BlockKey] = {}
        self.staged: dict[int, Mapping[int, Any]] = {}
        self.loading: list[LoadHandle] = []
        self.number = self.stored = self.loaded = self.failed = self.dropped = self.refused = 0

    def has(self, key: str) -> bool:
        return key in self.blocks

    def load(self, name: BlockKey, groups: tuple[int, ...]) -> LoadHandle:
        self.loading.append(LoadHandle(name, groups))
        return self.loading[-1]

    def request_copy(self, name: BlockKey, groups: tuple[int, ...], *, evicted: bool) -> int | None:
        if self.rng.random() < (0.1 if evicted else 0.6):
            return None
        self.number += 1
        self.requested[self.number] = name
        return self.number

    def cancel(self, number: int) -> None:
        del self.requested[number]

    def stage_load(self, pieces: Mapping[int, Any]) -> int:
        self.number += 1
        self.staged[self.number] = pieces
        self.loaded += 1
        return self.number

    def drop(self, key: str) -> None:
        self.dropped += self.blocks.pop(key, None) is not None
        for number in [number for number, name in self.requested.items() if name.key == key]:
            del self.requested[number]
        for handle in self.loading:
            if handle.name.key == key:
                handle.fail("withdrawn")

    def put(self, number: int, pieces: Mapping[int, Any]) -> None:
        name = self.requested.pop(number, None)
        if name is None:
            return
        self.stored += 1
        previous = self.blocks.pop(name.key, None)
        others = previous[1] if previous is not None and previous[0] == name else {}
        self.blocks[name.key] = name, {**others, **pieces}
        if len(self.blocks) > self.max_blocks:
            del self.blocks[self.rng.choice(list(self.blocks))]

    def take(self, number: int) -> Mapping[int, Any]:
        return self.staged.pop(number)

    def tick(self) -> None:
        for handle in self.rng.sample(self.loading, self.rng.randint(0, len(self.loading))):
            self.loading.remove(handle)
            if not handle.done:
                self.finish(handle)

    def finish(self, handle: LoadHandle) -> None:
        name, pieces = self.blocks.get(handle.name.key, (None, {}))
        if name is not None and not self.matches(name, handle.name):
            self.refused += 1
            handle.fail("collision")
        elif name is None or self.rng.random() < self.failure_rate:
            self.failed += 1
            handle.fail("damaged")
        else:
            handle.complete({group: pieces[group] for group in handle.groups if group in pieces}, "disk")

    def matches(self, name: BlockKey, requested: BlockKey) -> bool:
        return name == requested


class StoringKVCache(FakeKVCache):
    """Cache whose blocks are copied to a store, as the number of their content in ``copies``."""

    block_store: FakeBlockStore

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        super().__init__(groups)
        self.copies: list[Any] = []

    def apply(self, block_ops: BlockOps) -> None:
        self.store(block_ops)
        self.load(block_ops)
        super().apply(block_ops)

    def store(self, block_ops: BlockOps) -> None:
        for number, blocks in block_ops.store:
            pieces = {}
            for g, held in enumerate(blocks):
                if held:
                    pieces[g] = len(self.copies).to_bytes(8, "little")
                    self.copies.append(self.read_block(g, held[0]))
            self.block_store.put(number, pieces)

    def load(self, block_ops: BlockOps) -> None:
        for number, blocks in block_ops.load:
            pieces = self.block_store.take(number)
            for g, held in enumerate(blocks):
                for block in held:
                    self.write_block(g, block, self.copies[int.from_bytes(pieces[g], "little")])


class StoreHarness(SchedulerHarness):
    """Harness with a block store; blocks without an owner are overwritten after every operation."""

    kv_cache: StoringKVCache

    def __init__(
        self,
        setup: Setup,
        *,
        manager: type[KVCacheManager] = KVCacheManager,
        kv_cache: type[StoringKVCache] = StoringKVCache,
        block_store: type[FakeBlockStore] = FakeBlockStore,
        prefix_offload: type[PrefixOffload] = PrefixOffload,
        store_seed: int = 0,
        check: bool = True,
    ) -> None:
        self.block_store = block_store(store_seed)
        with_store = partial(manager, block_store=self.block_store)  # type: ignore[arg-type]
        super().__init__(setup, manager=with_store, kv_cache=kv_cache, check=check)
        self.manager.prefix_offload.__class__ = prefix_offload
        self.kv_cache.block_store = self.block_store
        self.num_aborted_loads = 0

    def schedule(self) -> SchedulerOutput | None:
        self.block_store.tick()
        return super().schedule()

    def check_idle(self) -> None:
        is_loading = any(seq.prefetch is not None and not seq.prefetch.ready() for seq in self.scheduler._waiting)
        assert is_loading or not self.expected, f"nothing runs or loads, and {sorted(self.expected)} wait"

    def is_done(self, output: SchedulerOutput | None) -> bool:
        return output is None and not self.expected

    def abort(self, request: int) -> None:
        prefetches = [seq.prefetch for seq in self.scheduler.sequences(request)]
        self.num_aborted_loads += any(each is not None and each.started and not each.ready() for each in prefetches)
        super().abort(request)

    def check(self) -> None:
        super().check()
        block_ops = self.manager.flush_offload()
        if block_ops is not None:
            self.kv_cache.apply(block_ops)
        self.kv_cache.fill_unowned(self.manager)


class StoreRequests(RandomRequests):
    harness: StoreHarness
    harness_type = StoreHarness

    def __init__(self, setup: Setup, seed: int, **parts: Any) -> None:
        super().__init__(setup, seed, store_seed=seed, **parts)

    def source(self) -> list[int]:
        """Return one of three encoder inputs, because a sequence loads only the blocks of its own input."""
        return self.rng.choice(([1], [0, 1, 1, 0, 1], [0, 1, 1, 0, 0]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SETUPS)
def test_every_stream_equals_its_solo_run_with_a_block_store(name: str) -> None:
    harness = StoreRequests(SETUPS[name], 1).run(1000)
    assert isinstance(harness, StoreHarness) and harness.manager.prefix_offload is not None
    store = harness.block_store
    assert min(store.stored, store.loaded, store.failed, harness.manager.prefix_offload.hits.tokens["disk"]) > 4
    assert store.dropped and harness.num_aborted_loads
    assert not name.endswith("-collisions") or store.refused


@pytest.mark.long
@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("seed", range(300, 304))
def test_ten_thousand_operations_with_a_block_store(name: str, seed: int) -> None:
    StoreRequests(SETUPS[name], seed).run(10_000)


@pytest.mark.parametrize("seed", range(3))
def test_samples_that_load_nothing_do_not_block_loads(seed: int) -> None:
    """Samples that wait for sample 0 do not count as sequences that load blocks."""
    StoreRequests(SETUPS["scarce"], seed).run(2000)


class StoreMachine(StreamMachine):
    harness: StoreHarness

    @initialize(name=st.sampled_from(sorted(SETUPS)), seed=st.integers(0, 1 << 16))
    def start(self, name: str, seed: int) -> None:
        self.begin(StoreHarness(SETUPS[name], store_seed=seed))

    @rule(seed=st.integers(0, 1))
    def repeat_a_prompt(self, seed: int) -> None:
        """Submit one of two long prompts; their evicted blocks are loaded."""
        if len(self.harness.expected) < 8 and self.max_len >= 17:
            self.harness.add([seed] * 15, SamplingParams(max_tokens=2))


class TestStoreMachine(StoreMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(MACHINE, max_examples=50)


@pytest.mark.long(minutes=4)
class TestStoreMachineLong(StoreMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = MACHINE_LONG


# ---------------------------------------------------------------- single events


class ManualStore(FakeBlockStore):
    """Stores everything, and finishes loads only when the test requests it."""

    def request_copy(self, name: BlockKey, groups: tuple[int, ...], *, evicted: bool) -> int | None:
        self.number += 1
        self.requested[self.number] = name
        return self.number

    def tick(self) -> None:
        pass

    def finish_loads(self, damaged: Sequence[int] = ()) -> None:
        self.failure_rate = 0.0
        for index, handle in enumerate(self.loading):
            handle.fail("damaged") if index in damaged else self.finish(handle)
        self.loading.clear()


def add(harness: StoreHarness, prompt: Sequence[int], max_tokens: int) -> int:
    return harness.add(prompt, SamplingParams(max_tokens=max_tokens), stop_tokens=frozenset())


def stored(prompt: Sequence[int], **parts: Any) -> tuple[StoreHarness, ManualStore]:
    """Return a harness whose block store has this prompt, and whose pools do not."""
    harness = StoreHarness(SETUPS["full-tight"], **{"block_store": ManualStore, **parts})
    add(harness, prompt, 1)
    harness.drain()
    unpublish_all(harness.manager)
    assert isinstance(harness.block_store, ManualStore) and len(harness.block_store.blocks) == len(prompt) // 4
    return harness, harness.block_store


def loading(**parts: Any) -> tuple[StoreHarness, ManualStore, int]:
    """Return a harness with a request that waits for three blocks of its 13 tokens."""
    harness, store = stored([1] * 12, **parts)
    request = add(harness, [1] * 13, 3)
    assert harness.scheduler.schedule() is None and len(store.loading) == 3
    return harness, store, request


def test_a_request_that_loads_nothing_overtakes_one_that_waits() -> None:
    harness, store = stored([1] * 12)
    waiting, other = add(harness, [1] * 13, 3), add(harness, [2] * 9, 3)
    metrics = harness.metrics[waiting]
    for _ in range(10):
        harness.step()
    assert waiting in harness.expected and other not in harness.expected
    assert harness.scheduler.schedule() is None
    store.finish_loads()
    harness.drain()
    assert metrics.num_cached_tokens == 12


@pytest.mark.parametrize(("damaged", "num_cached"), [((2,), 8), ((1,), 4), ((1, 2), 4), ((0,), 0), ((), 12)])
def test_tokens_from_the_first_damaged_block_on_are_computed(damaged: tuple[int, ...], num_cached: int) -> None:
    harness, store, request = loading()
    metrics = harness.metrics[request]
    store.finish_loads(damaged)
    harness.drain()
    assert metrics.num_cached_tokens == num_cached and harness.manager.prefix_offload is not None
    assert harness.manager.prefix_offload.hits.misses["damaged"] == bool(damaged)


@pytest.mark.parametrize("end", [StoreHarness.abort, partial(StoreHarness.finish, sample=0)])
def test_blocks_for_an_ended_request_are_not_loaded(end: Any) -> None:
    harness, store, request = loading()
    end(harness, request)
    assert harness.scheduler.idle
    add(harness, [2] * 12, 20)
    harness.step()
    store.finish_loads()
    harness.drain()
    assert not store.loaded


def test_loaded_blocks_are_kept_until_the_request_is_admitted() -> None:
    harness, store = stored([1] * 12)
    for prompt, max_tokens in (([2] * 36, 4), ([1] * 39, 1)):
        add(harness, prompt, max_tokens)
        harness.step()
    store.finish_loads()
    harness.drain()
    assert store.loaded == 3


def fail_after_a_chunk(**parts: Any) -> None:
    """Check that all blocks of a failed sequence, loaded and computed ones, are removed from the store."""
    harness, store = stored([1] * 12, **parts)
    request = add(harness, [1] * 23, 5)
    assert harness.scheduler.schedule() is None
    store.finish_loads()
    harness.step()  # 12 tokens loaded, 7 computed
    harness.step(faults=lambda seq: seq.request_id == request)
    assert not harness.expected and harness.ended == {"length": 1, "error": 1}
    harness.check()
    assert not store.blocks, "a failed sequence's blocks are in the store"
    metrics = harness.metrics[add(harness, [1] * 23, 5)]
    harness.drain()
    assert metrics.num_cached_tokens == 0


def test_blocks_of_a_failed_sequence_are_removed_from_the_store() -> None:
    fail_after_a_chunk()


def test_blocks_of_a_sequence_that_fails_in_its_first_step_are_removed() -> None:
    harness, store, _ = loading()
    store.finish_loads()
    harness.step(faults=lambda seq: True)
    assert not store.blocks


def test_a_block_that_is_removed_while_it_loads_is_not_used() -> None:
    harness, store, request = loading()
    metrics = harness.metrics[request]
    store.drop(list(store.blocks)[1])
    store.finish_loads()
    harness.drain()
    assert metrics.num_cached_tokens == 4


# ---------------------------------------------------------------- bugs


class LoadsNothing(StoringKVCache):
    def load(self, block_ops: BlockOps) -> None:
        for number, _ in block_ops.load:
            self.block_store.take(number)


class StoresLate(StoringKVCache):
    """Copies blocks to the host after their owner changed."""

    def apply(self, block_ops: BlockOps) -> None:
        FakeKVCache.apply(self, block_ops)
        self.store(block_ops)
        self.load(block_ops)


class TrustsTheKey(FakeBlockStore):
    def matches(self, name: BlockKey, requested: BlockKey) -> bool:
        return True


class TrustsTheTokens(FakeBlockStore):
    """Compares the block's tokens, but not the prefix before it."""

    def matches(self, name: BlockKey, requested: BlockKey) -> bool:
        return name.tokens == requested.tokens


class DropsNothing(ManualStore):
    def drop(self, key: str) -> None:
        pass


class KeepsInvalidated(PrefixOffload):
    """Does not remove a failed sequence's blocks."""

    def on_invalidated(self, prefix: object) -> None:
        pass


class UsesLoadingBlocks(KVCacheManager):
    """Treats blocks that are still loading as loaded."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        is_available = self._prefix_cache._is_available

        def is_requested(index: int, prefix: Any, prefetch: PrefetchRequest | None) -> bool:
            return is_available(index, prefix, prefetch) or (prefetch is not None and prefix in prefetch.handles)

        self._prefix_cache._is_available = is_requested  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("scarce", {"kv_cache": LoadsNothing}),
        ("scarce", {"kv_cache": StoresLate}),
        ("scarce-collisions", {"block_store": TrustsTheKey}),
        ("scarce-collisions", {"block_store": TrustsTheTokens}),
        ("scarce", {"manager": UsesLoadingBlocks}),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else value,
)
def test_a_bug_is_detected(name: str, bug: dict[str, Any]) -> None:
    def run_with_bug() -> None:
        for seed in range(12):
            StoreRequests(SETUPS[name], seed, **bug).run(2500)

    with pytest.raises((Mismatch, AssertionError)):
        run_with_bug()


@pytest.mark.parametrize("bug", [{"block_store": DropsNothing}, {"prefix_offload": KeepsInvalidated}])
def test_a_missing_removal_is_detected(bug: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="in the store"):
        fail_after_a_chunk(**bug)
