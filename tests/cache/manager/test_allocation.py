"""Allocation under policies, without a model: evictions, demotions, sinks and swaps, with blocks of 4 slots.

Random operations in pools that are nearly always full: an allocation succeeds or changes nothing, and is refused only
if there are not enough blocks.
"""

from __future__ import annotations

import copy
import random

import pytest

from kvad.cache.manager.sequence_blocks import SwappedSequence
from kvad.model_input import EvictOp, MergeOp
from tests.support.manager_driver import FULL, WIDE, ManagerDriver

LEVELS = "tiered(4, quantized=8, interval=4, summaries=4, ratio=2)"
KEY_NORM = "key-norm(6, interval=4)"  # at 8 tokens 6 stay


def under(policy, *specs, **fields):
    return ManagerDriver(*specs, policy=policy, **fields)


# ---------------------------------------------------------------- evictions


def test_an_eviction_fills_blocks_from_the_front_and_frees_the_others_in_the_same_step():
    """At 8 tokens 6 stay; at 12, with 10 held, 6 of those, and the third block is free at once."""
    manager = under(KEY_NORM)
    manager.grow(0, 8)
    assert manager.blocks(0) == [2, 3]
    step = manager.write(0, 4)
    assert step.block_ops.evict == ((EvictOp(0, 8, (2, 3), 8, 6, (2, 3)),),)
    assert step.slots == ([14, 15, 16, 17],) and step.block_ops.clear == ((4,),)  # position 8 is where 6 would be
    manager.add_sequence(1, [7], b"")
    free = manager.stats().free
    step = manager.allocate((1, 3), (0, 1))
    assert step.block_ops.evict == ((EvictOp(0, 12, (2, 3, 4), 10, 6, (2, 3)),),)
    assert step.block_tables == ([[4], [2, 3]],) and step.block_ops.clear == ((4,),)
    assert step.slots == ([16, 17, 18, 14],) and manager.stats().free == free  # one was freed, one allocated


def test_a_contiguous_sequence_is_evicted_in_place():
    manager = under(KEY_NORM, layout="contiguous")
    manager.grow(0, 8)
    step = manager.write(0, 1)
    assert step.block_ops.evict == ((EvictOp(0, 8, (2,), 8, 6, (2,)),),) and step.slots == ([2 * 10 + 6],)


def test_sequences_that_share_blocks_evict_separately():
    """The first one gets new blocks, the last one keeps the old ones; both operations read the old ones."""
    manager = under(KEY_NORM)
    manager.grow(0, 8)
    assert manager.fork(0, 1, 8)
    step = manager.allocate((0, 1), (1, 1))
    assert step.block_ops.evict == ((EvictOp(0, 8, (2, 3), 8, 6, (4, 5)), EvictOp(1, 8, (2, 3), 8, 6, (2, 3))),)
    assert step.block_ops.copy == ((),)


def test_an_eviction_may_use_blocks_that_a_later_one_frees():
    """Five blocks: 0 and 1 share three, 2 has two of its own. Sequence 0 needs two for its eviction."""
    manager = under(KEY_NORM, usable=5)
    manager.grow(0, 12)
    assert manager.fork(0, 1, 12)
    manager.grow(2, 8)
    assert manager.stats().free == (0,)
    before = manager.state()
    assert manager.try_allocate((0, 1), (2, 1), (1, 1)) is None and manager.state() == before  # one is freed
    manager.free(2)
    manager.grow(2, 4)
    assert manager.stats().free == (1,)
    manager.allocate((0, 1), (1, 1))
    assert len({*manager.blocks(0), *manager.blocks(1)}) == 4


def test_a_fork_or_a_truncation_before_an_eviction_is_refused():
    manager = under(KEY_NORM)
    manager.grow(0, 10)
    before = manager.state()
    assert not manager.fork(0, 1, 7) and manager.state() == before
    assert manager.fork(0, 1, 9) and manager.truncate(0, 8) == 8
    manager.check()
    assert manager.write(0, 1).block_ops.evict in ((), ((),))  # It was evicted at 8 already.
    assert manager.truncate(0, 7) == 0
    manager.grow(0, 8)


def test_a_sequence_whose_attention_is_observed_is_not_forked():
    manager = under("tova(6, interval=4)")
    manager.grow(0, 5)
    assert not manager.fork(0, 1, 5)


def test_a_block_with_bounds_is_cleared_of_later_tokens_before_it_is_written():
    """Under quest: of another sequence's tokens, of drafts that were not committed, of one token that was not."""
    manager = under("quest(8)")
    manager.grow(0, 7)
    assert manager.fork(0, 1, 5)
    manager.free(0)
    assert manager.write(1, 1).block_ops.copy == (((3, 3, 1),),)
    manager.grow(1, 7)
    manager.allocate((1, 4))
    manager.commit(1, [7])
    step = manager.write(1, 1)  # 8 is in a block that the draft allocated.
    assert step.block_ops.copy == ((),) and step.block_ops.clear == ((manager.blocks(1)[2],),)
    manager.grow(1, 14, chunk=1)
    manager.allocate((1, 1))  # on the fast path
    manager.commit(1, [])
    assert manager.write(1, 1).block_ops.copy == (((manager.blocks(1)[3],) * 2 + (2,),),)


# ---------------------------------------------------------------- demotions


def test_a_tiered_policy_demotes_block_by_block():
    """recent 4, quantized 8, 4 summaries of ratio 2: each block becomes two slots of a block of summaries."""
    manager = under(LEVELS)
    manager.add_sequence(0, [0], b"")
    quantized, merged, held = [], [], []
    for _ in range(8):
        ops = manager.write(0, 4).block_ops
        held.append(list(manager.blocks(0, 1)))
        quantized.append(ops.quantize[1])
        merged.append(ops.merge[2])
        assert not (ops.quantize[0] or ops.quantize[2] or ops.merge[0] or ops.merge[1])
        assert len(manager.blocks(0)) <= 2 >= len(manager.blocks(0, 1))
    # At 8: tokens 0..3, block 2 -> quantized block 2. At 16 there is a third: the first one is merged.
    assert quantized[:5] == [(), (), ((2, 2),), ((3, 3),), ((2, 4),)]
    assert held[4] == [3, 4]
    # At 24 there is a second block of summaries: one too many.
    merges = [MergeOp(2, 2, 0, 2), MergeOp(3, 2, 2, 2), MergeOp(4, 3, 0, 3), MergeOp(2, 3, 2, 3)]
    assert merged == [(), (), (), (), *((op,) for op in merges)]
    assert manager.blocks(0, 2) == [3] and manager.stats().used == (2, 2, 1)


def test_tokens_that_no_level_takes_are_dropped():
    """quantized=0 and no summaries: a sequence keeps sinks and recent tokens."""
    manager = under("tiered(8, quantized=0, interval=8, num_sinks=4)")
    for length in range(8, 48, 8):
        manager.grow(0, length + 1)
        assert len(manager.blocks(0)) <= 1 + (8 + 8) // 4 == manager.groups[0].max_blocks_per_seq
    assert len(manager.blocks(0)) == 4 and manager.capacity > 1 << 40


def test_a_shared_block_of_summaries_is_copied():
    manager = under("tiered(4, quantized=0, interval=4, summaries=8, ratio=2)")
    manager.grow(0, 9)  # Tokens 0..3 are merged: half a block.
    assert manager.fork(0, 1, 9)
    manager.grow(0, 12)
    assert manager.blocks(0, 1) == manager.blocks(1, 1) == [2]
    (merge,) = manager.write(0, 1).block_ops.merge[1]
    assert merge[1:] == (3, 2, 2) and manager.blocks(0, 1) == [3]  # into 3, behind the slots of 2
    manager.grow(1, 12)
    (merge,) = manager.write(1, 1).block_ops.merge[1]
    assert merge[1:] == (2, 2, 2) and manager.blocks(1, 1) == [2]


# ---------------------------------------------------------------- swapped sequences


def records(manager, seq_index):
    """Return the blocks of a sequence, and its state without the block ids."""
    groups = [copy.copy(each) for each in manager._sequence(seq_index).all_groups]
    blocks = tuple(tuple(each.blocks) for each in groups)
    for each in groups:
        each.blocks = [0] * len(each.blocks)
        if hasattr(each, "slot_offset"):
            each.slot_offset = 0
    return blocks, [repr(each) for each in groups]


@pytest.mark.parametrize("policy", [KEY_NORM, LEVELS])
def test_a_swapped_sequence_is_restored_with_its_state(policy):
    manager = under(policy)
    manager.grow(0, 27)
    blocks, before = records(manager, 0)
    swapped = manager.swap_out(0)
    manager.check()
    assert not any(manager.stats().used)
    assert manager.swap_in(3, swapped) and records(manager, 3)[1] == before
    ops = manager.allocate((3, 1)).block_ops
    assert ops.swap_out == ((swapped.key, blocks),) and ops.drop_swapped == ()
    assert [key for key, _ in ops.swap_in] == [swapped.key]
    manager.commit(3, [27])
    ops = manager.write(3, 1).block_ops
    assert not (ops.swap_out or ops.swap_in or ops.drop_swapped)


def test_a_sequence_that_is_preempted_before_its_swap_in_keeps_its_key():
    manager = under(f"0: full; {KEY_NORM}", FULL, WIDE, num_blocks=4)
    manager.grow(0, 12)
    first = manager.swap_out(0)
    assert manager.swap_in(0, first)
    manager.grow(1, 0)
    assert manager.try_allocate((0, 1), (1, 8)) is None  # One block is left, three are needed.
    again = manager.swap_out(0)
    assert again == first
    ops = manager.write(1, 8).block_ops
    assert [key for key, _ in ops.swap_out] == [first.key] and not ops.swap_in
    before = manager.state()
    assert not manager.swap_in(0, again) and manager.state() == before
    manager.free(1)
    assert manager.swap_in(2, again)
    ops = manager.allocate((2, 1)).block_ops
    assert [key for key, _ in ops.swap_in] == [first.key] and not ops.swap_out


def test_a_freed_sequence_is_not_swapped_in_and_a_dropped_copy_is_deleted():
    manager = under(KEY_NORM)
    manager.grow(0, 12)
    swapped = manager.swap_out(0)
    assert manager.swap_in(0, swapped)
    manager.free(0)
    manager.drop_swapped(swapped)
    manager.add_sequence(0, [1], b"")
    ops = manager.allocate((0, 1)).block_ops
    assert not ops.swap_in and ops.drop_swapped == (swapped.key,) and manager.stats().used == (1,)


def test_a_sequence_whose_blocks_are_not_filled_is_neither_forked_nor_truncated():
    """A fork of it, swapped out before the next step, would be copied out before its blocks are filled."""
    manager = under(KEY_NORM)
    manager.grow(0, 11)
    assert manager.swap_in(0, manager.swap_out(0))
    before = manager.state()
    assert not manager.fork(0, 1, 11) and manager.state() == before
    with pytest.raises(AssertionError, match="after its next step"):
        manager.truncate(0, 9)
    manager.write(0, 1)
    assert manager.fork(0, 1, 11)
    manager.check()


# ---------------------------------------------------------------- sinks and block-window


def test_a_hit_under_sinks_needs_the_sinks_and_the_window():
    """sinks(3, 5): of 20 tokens the first block and the last two stay; those between may be evicted."""
    manager = under("sinks(3, 5)")
    manager.grow(0, 20, chunk=4)
    assert manager.blocks(0) == [2, 5, 6]
    manager.free(0)
    (pool,) = manager.pools
    for block in (3, 4, 5):  # logical blocks 1, 2, 3
        pool.unpublish(block)
    assert manager.add_sequence(1, [*range(20), 1], b"") == 20  # 16..19 and the sinks
    manager.check()
    assert manager.blocks(1) == [2, 6]
    table = manager.write(1, 1).block_tables[0][0]
    assert table[:2] == [2, 6] and len(table) == 3
    manager.free(1)
    pool.unpublish(2)
    assert manager.add_sequence(1, [*range(20), 1], b"") == 0  # Without its sinks there is no hit.


@pytest.mark.parametrize("policy", ["sinks(3, 5)", "sinks(6, 1)", "block-window(8)", "block-window(6, 2)", "window(1)"])
@pytest.mark.parametrize("length", range(1, 22))
def test_forks_and_truncations_of_all_lengths_continue_or_are_refused(policy, length):
    manager = under(policy)
    manager.grow(0, 22, chunk=3)
    before = manager.state()
    if manager.fork(0, 1, length):
        manager.check()
        manager.grow(1, length + 9, chunk=2)
        manager.free(1)
    else:
        assert manager.state() == before
    assert manager.truncate(0, length) in (0, length)
    manager.check()
    manager.grow(0, length + 9, chunk=2)
    manager.free(0)
    assert not any(manager.stats().used)


# ---------------------------------------------------------------- random operations in full pools


POLICIES = (
    "sinks(3, 5)",
    "block-window(8)",
    KEY_NORM,
    "0: full; key-norm(9, interval=2)",
    LEVELS,
    "tiered(4, interval=4, num_sinks=4)",
    "tiered(8, quantized=0, interval=8, summaries=4, ratio=4)",
    "0: window(3); tiered(8, quantized=4, interval=4)",
    "quest(8)",
)


def operate(manager: ManagerDriver, rng: random.Random, swapped: list[SwappedSequence], counts: dict[str, int]) -> None:
    running = [index for index in range(4) if manager._sequences[index] is not None]
    unused = [index for index in range(4) if index not in running]
    draw, chosen = rng.random(), rng.choice(running or [0])
    if draw < 0.15 and unused:
        manager.add_sequence(unused[0], [rng.randrange(2)] * rng.randint(1, 30), b"")
    elif draw < 0.25 and running and unused:
        counts["forks"] += manager.fork(chosen, unused[0], rng.randint(0, manager.seq_len(chosen)))
    elif draw < 0.30 and running and not manager.is_loading(chosen):
        manager.truncate(chosen, rng.randint(0, manager.seq_len(chosen)))
    elif draw < 0.36 and running:
        manager.free(chosen)
    elif draw < 0.42 and running and manager.lossy:
        swapped.append(manager.swap_out(chosen))
    elif draw < 0.50 and swapped and unused:
        if manager.swap_in(unused[0], swapped[0]):
            counts["swapped in"] += 1
            swapped.pop(0)
    elif draw < 0.51 and swapped:
        manager.drop_swapped(swapped.pop())
    elif running:
        allocate(manager, rng, running, counts)


def allocate(manager: ManagerDriver, rng: random.Random, running: list[int], counts: dict[str, int]) -> None:
    spans = []
    for index in rng.sample(running, rng.randint(1, len(running))):
        count = min(rng.choice((1, 1, 8)), manager.tokens_until_eviction(index), 48 - manager.seq_len(index))
        if count > 0:
            spans.append((index, count))
    before, clone = manager.state(), copy.deepcopy(manager) if counts["refused"] < 30 else None
    if manager.try_allocate(*spans) is None:
        assert manager.state() == before, "a refused allocation changed something"
        counts["refused"] += 1
        if clone is not None:  # It would have failed.
            clone._allocator.block_demand = lambda _: []  # type: ignore[method-assign]
            with pytest.raises(KeyError, match="dictionary is empty"):
                clone.try_allocate(*spans)
        manager.free(running[0])
        return
    counts["allocated"] += 1
    for index, count in spans:
        manager.commit(index, [index % 2] * (count if rng.random() < 0.9 else rng.randint(0, count)))


@pytest.mark.parametrize("policy", POLICIES)
def test_an_allocation_succeeds_or_changes_nothing(policy):
    rng, swapped = random.Random(policy), list[SwappedSequence]()
    manager = under(policy, *((FULL, WIDE) if ":" in policy else (FULL,)), usable=-1, prefix_caching=False)
    counts = dict.fromkeys(("refused", "allocated", "forks", "swapped in"), 0)
    for _ in range(800):
        operate(manager, rng, swapped, counts)
        manager.check()
    assert counts["refused"] > 5 and counts["allocated"] > 100 and counts["forks"] > 5
    assert counts["swapped in"] > 5 or not manager.lossy
    for index in range(4):
        if manager._sequences[index] is not None:
            manager.free(index)
    assert not any(manager.stats().used)
