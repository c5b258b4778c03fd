"""Every request equals its solo run, whatever its neighbors, chunks, preemptions and errors, under every policy.

The machine is in ``tests/support/stream_harness.py``. With a bug in the manager or in the cache (no copy-on-write, no
clearing, an 8-bit hash that is trusted ...) the same runs must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvad.cache.groups import CacheGroup
from kvad.cache.manager.allocation import DemotionOps
from kvad.cache.manager.block_pool import BlockPool
from kvad.cache.manager.encoder_blocks import EncoderBlocks, EncoderSequence
from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.cache.manager.prefix_index import PrefixIndex, PrefixNode
from kvad.cache.manager.sequence_blocks import BlockMapping
from kvad.engine.scheduling.request import SamplingParams, SequenceOutput, TokenLogprob
from kvad.engine.scheduling.sequence import ScheduledSequence
from kvad.model_input import BlockOps, EvictOp
from tests.support.manager_harness import ManagerHarness
from tests.support.stream_harness import (
    MACHINE,
    MACHINE_LONG,
    TOKENS,
    RandomRequests,
    SchedulerHarness,
    StreamMachine,
    choose_token,
)
from tests.support.streams import EXACT_SETUPS, SETUPS, FakeKVCache, Mismatch


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SETUPS)
def test_every_stream_equals_its_solo_run(name: str) -> None:
    harness = RandomRequests(SETUPS[name], 1).run(1000 if name in EXACT_SETUPS else 500)
    assert {"stop", "length", "abort", "error"} <= set(harness.ended)
    if SETUPS[name].config.layout == "paged" and name not in ("windows", "mixed-tall"):
        assert harness.scheduler.stats().preemptions > 5, "the pool was never full"


@pytest.mark.parametrize("name", [name for name in SETUPS if name != "observed"])  # which refuses drafts
def test_drafts_change_no_stream(name: str) -> None:
    harness = RandomRequests(SETUPS[name], 1, draft=True).run(130)
    stats = harness.scheduler.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.parametrize("name", ["full-tight", "mixed", "full-collisions"])
def test_long_runs_preempt_hit_and_evict(name: str) -> None:
    harness = RandomRequests(SETUPS[name], 12).run(2500)
    stats = harness.manager.stats()
    assert harness.scheduler.stats().preemptions > 50 and stats.hits > 50 and min(stats.evictions) > 50


@pytest.mark.long(minutes=20)
@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("seed", range(100, 106))
def test_ten_thousand_operations(name: str, seed: int) -> None:
    RandomRequests(SETUPS[name], seed).run(10_000)


@pytest.mark.parametrize("name", SETUPS)
def test_forked_truncated_and_swapped_sequences_equal_solo_runs(name: str) -> None:
    harness = ManagerHarness.random_run(SETUPS[name], 5, 1000 if name in EXACT_SETUPS else 700)
    assert harness.num_forks > 5 or harness.manager.observes_attention
    assert harness.num_swapped_in > 5 or not harness.manager.lossy or name == "ranked-translating"


@pytest.mark.long(minutes=20)
@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("seed", range(200, 206))
def test_ten_thousand_operations_of_the_manager(name: str, seed: int) -> None:
    ManagerHarness.random_run(SETUPS[name], seed, 10_000)


class ManagerMachine(RuleBasedStateMachine):
    """Sequences are admitted, extended, forked, truncated and freed."""

    def __init__(self, harness: ManagerHarness) -> None:
        super().__init__()
        self.harness = harness

    def choose_index(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.harness.solos)))

    @rule(index=st.integers(0, 3), tokens=TOKENS)
    def admit(self, index: int, tokens: list[int]) -> None:
        self.harness.admit(index % self.harness.max_num_seqs, tokens[: self.harness.max_len], b"")

    @precondition(lambda self: self.harness.solos)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5), count=st.integers(0, 5))
    def extend(self, data: st.DataObject, tokens: list[int], count: int) -> None:
        indices = data.draw(st.lists(st.sampled_from(sorted(self.harness.solos)), min_size=1, unique=True))
        if not self.harness.extend(dict.fromkeys(indices, (tokens, count))):
            self.harness.free(indices[0], publish=True)

    @precondition(lambda self: 0 < len(self.harness.solos) < self.harness.max_num_seqs)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        index = self.choose_index(data)
        child = next(i for i in range(self.harness.max_num_seqs) if i not in self.harness.solos)
        self.harness.fork(index, child, data.draw(st.integers(0, len(self.harness.solos[index].tokens))))

    @precondition(lambda self: self.harness.solos)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        index = self.choose_index(data)
        self.harness.truncate(index, data.draw(st.integers(0, len(self.harness.solos[index].tokens))))

    @precondition(lambda self: self.harness.solos)
    @rule(data=st.data(), publish=st.booleans())
    def free(self, data: st.DataObject, publish: bool) -> None:
        self.harness.free(self.choose_index(data), publish)

    @invariant()
    def is_consistent(self) -> None:
        self.harness.check()


def run_machine(machine: Callable[[], RuleBasedStateMachine], name: str) -> None:
    """Run several examples with each setup: a machine that draws the setup too leaves a third of them out."""
    run_state_machine_as_test(machine, settings=settings(MACHINE, max_examples=8 if name in EXACT_SETUPS else 3))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SETUPS)
def test_examples_of_requests_equal_solo_runs(name: str) -> None:
    run_machine(lambda: StreamMachine(SchedulerHarness(SETUPS[name])), name)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SETUPS)
def test_examples_of_sequences_equal_solo_runs(name: str) -> None:
    run_machine(lambda: ManagerMachine(ManagerHarness(SETUPS[name])), name)


@pytest.mark.long(minutes=12)
@pytest.mark.parametrize("name", SETUPS)
def test_many_examples_equal_solo_runs(name: str) -> None:
    long = settings(MACHINE_LONG, max_examples=100)
    run_state_machine_as_test(lambda: StreamMachine(SchedulerHarness(SETUPS[name])), settings=long)
    run_state_machine_as_test(lambda: ManagerMachine(ManagerHarness(SETUPS[name])), settings=long)
    if name != "observed":
        run_state_machine_as_test(lambda: StreamMachine(SchedulerHarness(SETUPS[name], draft=True)), settings=long)


def test_only_equal_encoder_inputs_share_blocks() -> None:
    harness = SchedulerHarness(SETUPS["translating"])
    for source, num_cached_tokens in (([1, 2, 0, 1, 1], 0), ([1, 2, 0, 1, 0], 0), ([1, 2, 0, 1, 1], 8)):
        request = harness.add([1, 2, 0, 1, 1, 2, 0, 0, 1], SamplingParams(max_tokens=2), source=source)
        metrics = harness.metrics[request]
        harness.drain()
        assert metrics.num_cached_tokens == num_cached_tokens
    assert (harness.manager._encoder.hits, harness.manager._encoder.misses) == (1, 2)


# ---------------------------------------------------------------- bugs in the fake cache


class WithoutClearing(FakeKVCache):
    def apply(self, block_ops: BlockOps) -> None:
        super().apply(block_ops._replace(clear=tuple(() for _ in block_ops.clear)))


class CopiesTooLittle(FakeKVCache):
    def apply(self, block_ops: BlockOps) -> None:
        copies = (((source, target, count - 1) for source, target, count in group) for group in block_ops.copy)
        super().apply(block_ops._replace(copy=tuple(map(tuple, copies))))


class WithoutSwapping(FakeKVCache):
    """Uses the blocks of a restored sequence as they are."""

    def swap(self, block_ops: BlockOps) -> None:
        pass


class EvictsOneByOne(FakeKVCache):
    """Writes the result of one eviction before the next one reads."""

    def evict(self, g: int, evictions: Sequence[EvictOp]) -> None:
        for eviction in evictions:
            super().evict(g, [eviction])


# ---------------------------------------------------------------- bugs in the manager


class WithoutCopyOnWrite(KVCacheManager):
    def __init__(self, groups: Sequence[CacheGroup], **options: Any) -> None:
        super().__init__(groups, **options)
        self._allocator.is_shared = lambda *_: False  # type: ignore[method-assign]


class ShortWindow(BlockMapping):
    def first_needed(self, start: int) -> int:
        return max(0, start - self.window + 2) // self.block_size


class FreesTooEarly(KVCacheManager):
    """Frees a block one token before it leaves the window."""

    def __init__(self, groups: Sequence[CacheGroup], **options: Any) -> None:
        super().__init__(groups, **options)
        for mapping in self.block_mappings:
            mapping.__class__ = ShortWindow


class ForksAnywhere(KVCacheManager):
    """Forks and truncates even if the window before that point was freed."""

    def _window_held(self, sequence: object, length: int) -> bool:
        return True


class IgnoresRoots(KVCacheManager):
    """Keeps one chain of prefixes for all adapters, salts and rotary regimes."""

    def add_sequence(self, seq_index: int, token_ids: Sequence[int], prefix_root: bytes, *args: Any) -> int | None:
        return super().add_sequence(seq_index, token_ids, b"", *args)


class TrustingIndex(PrefixIndex):
    """Finds a prefix by its hash without comparing tokens and parent."""

    def find(self, parent: PrefixNode | None, tokens: bytes) -> PrefixNode | None:
        return self._nodes.get(self.key(parent, tokens))


class TrustsTheHash(KVCacheManager):
    def __init__(self, groups: Sequence[CacheGroup], **options: Any) -> None:
        super().__init__(groups, **options)
        self._prefix_cache.prefixes = TrustingIndex(options["hash_fn"])


class ComparesFirstTokens(EncoderBlocks):
    """Identifies an encoder input by its first token."""

    attached: list[EncoderSequence]

    def attach(self, tokens: Sequence[int], root: bytes) -> EncoderSequence | None:
        self.attached = getattr(self, "attached", [])
        for other in self.attached:
            blocks = [(pool, block) for pool, held in zip(self.pools, other.blocks, strict=True) for block in held]
            if other.tokens[:1] == tuple(tokens[:1]) and other.written and all(pool.refs[b] for pool, b in blocks):
                return self.share(other)
        sequence = super().attach(tokens, root)
        self.attached += [] if sequence is None else [sequence]
        return sequence


class ConfusesEncoderInputs(KVCacheManager):
    def __init__(self, groups: Sequence[CacheGroup], **options: Any) -> None:
        super().__init__(groups, **options)
        self._encoder.__class__ = ComparesFirstTokens


class ForksWithAnotherToken(KVCacheManager):
    """Replaces the last token of a forked beam."""

    def fork(self, seq_index: int, child: int, length: int) -> bool:
        forked = super().fork(seq_index, child, length)
        if forked and length > 1:
            self.truncate(child, length - 1)
            self.allocate_slots([(child, length - 1, 1)])
            self.commit(child, [7])
        return forked


class ChunksBeyondEvictions(KVCacheManager):
    def tokens_until_eviction(self, seq_index: int) -> int:
        return 1 << 30


class KeepsKeyBounds(KVCacheManager):
    """Does not clear a block before it is written again."""

    def __init__(self, groups: Sequence[CacheGroup], **options: Any) -> None:
        super().__init__(groups, **options)
        for mapping in self.block_mappings:
            mapping.has_block_bounds = False


class SharesSummaries(KVCacheManager):
    """Fills a block of summaries that another sequence reads too."""

    def __init__(self, groups: Sequence[CacheGroup], **options: Any) -> None:
        super().__init__(groups, **options)
        self._allocator.demotion._is_shared = lambda *_: False  # type: ignore[method-assign]


REQUESTS, MANAGER = RandomRequests, ManagerHarness.random_run


def run_with_bug(name: str, run: Callable[..., Any], **bug: Any) -> None:
    """Run up to five seeds without checks of invariants, until a stream differs; another failure is a failure."""
    for seed in range(2, 7):
        if run is RandomRequests:
            RandomRequests(SETUPS[name], seed, check=False, **bug).run(3000)
        else:
            ManagerHarness.random_run(SETUPS[name], seed, 3000, check=False, **bug)


@pytest.mark.parametrize(
    ("bug", "run", "names"),
    [
        ({"manager": WithoutCopyOnWrite}, REQUESTS, ("full-tight", "mixed", "contiguous")),
        ({"kv_cache": WithoutClearing}, REQUESTS, ("full-tight", "mixed", "windows")),
        ({"kv_cache": CopiesTooLittle}, REQUESTS, ("full-tight", "mixed", "contiguous")),
        ({"kv_cache": WithoutSwapping}, REQUESTS, ("ranked", "observed", "tiered", "ranked-translating")),
        ({"manager": FreesTooEarly}, REQUESTS, ("mixed-tall",)),
        ({"manager": ForksAnywhere}, MANAGER, ("contiguous", "windows")),
        ({"manager": TrustsTheHash}, REQUESTS, ("full-collisions",)),
        ({"manager": IgnoresRoots}, REQUESTS, ("full-tight",)),
        ({"manager": ConfusesEncoderInputs}, REQUESTS, ("translating", "translating-contiguous")),
        ({"manager": ForksWithAnotherToken}, REQUESTS, ("full-tight",)),
        ({"manager": KeepsKeyBounds}, MANAGER, ("quest",)),
        ({"manager": SharesSummaries}, MANAGER, ("tiered",)),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_a_bug_changes_a_stream(bug: dict[str, Any], run: Callable[..., Any], names: tuple[str, ...]) -> None:
    for name in names:
        with pytest.raises(Mismatch):
            run_with_bug(name, run, **bug)


@pytest.mark.parametrize("name", ["ranked", "tiered"])
def test_a_chunk_beyond_an_eviction_is_detected(name: str) -> None:
    with pytest.raises((Mismatch, AssertionError)):
        RandomRequests(SETUPS[name], 1, manager=ChunksBeyondEvictions).run(2000)


class AcceptsEveryDraft(SchedulerHarness):
    """Returns the tokens behind rejected drafts too."""

    def result(self, scheduled: ScheduledSequence, values: list[int]) -> SequenceOutput:
        result, drafts = super().result(scheduled, values), scheduled.draft_token_ids
        if not scheduled.is_sampled or not drafts:
            return result
        tokens = [choose_token(value, scheduled.sequence.sample_index) for value in values[-len(drafts) :]]
        scored = (
            TokenLogprob(token, float(value)) for token, value in zip(tokens, values[-len(drafts) :], strict=True)
        )
        return result._replace(next_outputs=tuple(SequenceOutput(each.token_id, each) for each in scored))


def test_wrong_handling_of_drafts_is_detected() -> None:
    class Requests(RandomRequests):
        harness_type = AcceptsEveryDraft

    with pytest.raises(Mismatch):
        Requests(SETUPS["full-tight"], 1, draft=True, check=False).run(500)


def evict_in_one_step(kv_cache: type[FakeKVCache]) -> None:
    """Evict from two sequences that share their first block; the first one gets the block that the second frees."""
    harness = ManagerHarness(SETUPS["ranked"], kv_cache=kv_cache)
    harness.admit(0, [0], b"")
    for length in (4, 8, 9):
        harness.extend({0: ([1] * (length - harness.manager.seq_len(0)), 8)})
    harness.fork(0, 1, 9)
    for index in (0, 1):
        harness.extend({index: ([index + 2] * 3, 3)})
    assert [harness.manager.seq_len(index) for index in (0, 1)] == [12, 12]
    harness.extend({0: ([5], 1), 1: ([6], 1)})
    harness.check()


def test_evictions_of_one_step_read_before_they_write() -> None:
    evict_in_one_step(FakeKVCache)
    with pytest.raises(Mismatch):
        evict_in_one_step(EvictsOneByOne)


class FreedAtOnce(list[tuple[BlockPool, int]]):
    """Blocks that a level leaves, free before the other sequences have been demoted."""

    def extend(self, freed: Iterable[tuple[BlockPool, int]]) -> None:
        for pool, block in freed:
            pool.decref(block)


def test_a_block_that_a_level_frees_too_early_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    init = DemotionOps.__init__

    def init_with_bug(self: DemotionOps, groups: int) -> None:
        init(self, groups)
        self.freed_later = FreedAtOnce()

    monkeypatch.setattr(DemotionOps, "__init__", init_with_bug)
    with pytest.raises(Mismatch):
        run_with_bug("tiered-tight", MANAGER)
