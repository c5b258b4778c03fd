"""KVCacheManager without a model: exact block ids, slots and block operations, with blocks of 4 slots."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.manager_driver import FULL, WINDOW, ManagerDriver


def paged(*specs, blocks=None, **fields):
    return ManagerDriver(*specs, num_blocks=blocks, **({"max_seq_len": 40} | fields))


def contiguous(*specs, max_seq_len=12):
    return ManagerDriver(*specs, layout="contiguous", max_num_seqs=3, max_seq_len=max_seq_len, prefill_chunk_size=4)


# ---------------------------------------------------------------- placing


def test_a_sequence_grows_block_by_block():
    manager = paged()
    assert manager.add_sequence(0, [1, 2, 3], b"") == 0
    steps, tables = [], []  # A table is the sequence's own list, which grows.
    for tokens in ([1, 2, 3], [4], [5], [6, 7, 8, 9, 10]):
        steps.append(manager.write(0, tokens))
        tables.append([list(table) for table in steps[-1].block_tables[0]])
    assert [step.slots for step in steps] == [([8, 9, 10],), ([11],), ([12],), ([13, 14, 15, 16, 17],)]
    assert tables == [[[2]], [[2]], [[2, 3]], [[2, 3, 4]]]
    assert [step.block_ops.clear for step in steps] == [((2,),), ((),), ((3,),), ((4,),)]
    assert not any(step.block_ops.copy[0] for step in steps)
    assert manager.blocks(0) == [2, 3, 4] and manager.seq_len(0) == 10


def test_spans_are_placed_in_their_order():
    manager = paged()
    for seq_index in (0, 1, 2):
        manager.add_sequence(seq_index, [7], b"")
    step = manager.allocate((2, 2), (0, 5), (1, 1))
    assert step.block_tables == ([[2], [3, 4], [5]],) and step.slots == ([8, 9, 12, 13, 14, 15, 16, 20],)
    assert step.block_ops.clear == ((2, 3, 4, 5),)


def test_an_allocation_is_all_or_nothing():
    manager = paged(blocks=3)
    for seq_index in (0, 1):
        manager.add_sequence(seq_index, [7], b"")
    before = manager.state()
    assert manager.try_allocate((0, 8), (1, 8)) is None and manager.state() == before
    assert manager.allocate((0, 8), (1, 4)).block_tables == ([[2, 3], [4]],)


def test_an_index_in_use_is_refused():
    manager = paged()
    assert manager.add_sequence(1, [1], b"") == 0 and manager.add_sequence(1, [1], b"") is None


def test_a_window_holds_what_its_next_query_needs_and_no_block_more():
    manager = paged(WINDOW, prefill_chunk_size=4)
    manager.add_sequence(0, [0], b"")
    tables = [list(manager.write(0, 4).block_tables[0][0]) for _ in range(6)]
    # At length 8 the first query sees 4..8: block 0 (positions 0..3) is dropped. It is published, so it is not reused
    # before the pool's unused blocks.
    assert tables == [[2], [2, 3], [3, 4], [4, 5], [5, 6], [6, 7]]
    assert manager.write(0, 1).block_tables == ([[7, 8]],)  # query 24 sees 20..24
    assert manager.write(0, 1).block_tables == ([[7, 8]],)  # 25 sees 21..25: still in block 7


def test_a_contiguous_sequence_is_one_block_and_a_window_a_ring_in_it():
    manager = contiguous(WINDOW, FULL)  # ring of 5 + 4 - 1 = 8 slots
    assert [group.block_size for group in manager.groups] == [8, 12]
    manager.add_sequence(1, [0], b"")
    manager.write(1, 4)
    manager.write(1, 3)
    step = manager.write(1, 3)
    assert step.slots == ([2 * 8 + 7, 2 * 8 + 0, 2 * 8 + 1], [2 * 12 + 7, 2 * 12 + 8, 2 * 12 + 9])
    assert step.block_tables == ([[2]], [[2]]) and step.block_ops.clear == ((), ())
    assert manager.write(1, 1).slots == ([2 * 8 + 2], [2 * 12 + 10])


def test_a_sequence_cannot_outgrow_a_group():
    manager, ring = paged(max_seq_len=8), contiguous(WINDOW)
    manager.grow(0, 8)
    with pytest.raises(AssertionError, match="outgrows"):
        manager.try_allocate((0, 1))
    ring.grow(0, 5, chunk=4)
    with pytest.raises(AssertionError, match="outgrows a ring"):
        ring.try_allocate((0, 6))


def test_a_span_starts_at_the_end_of_its_sequence():
    manager = paged()
    manager.add_sequence(0, [0], b"")
    with pytest.raises(AssertionError, match="does not start"):
        manager.allocate_slots([(0, 1, 1)])


def test_capacity_is_the_longest_sequence_alone():
    assert (paged().capacity, paged(blocks=3).capacity, contiguous().capacity) == (40, 12, 12)
    assert paged(WINDOW).capacity > 1 << 40 and paged(WINDOW, FULL, blocks=5).capacity == 20


# ---------------------------------------------------------------- prefix hits


# All 4 of 4 tokens are known, but one must be left to compute.
@pytest.mark.parametrize(
    ("count", "hit"), [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12), (16, 12)]
)
def test_a_hit_covers_full_blocks_and_at_most_all_tokens_but_one(count, hit):
    manager, known = paged(), list(range(100, 114))  # 14 tokens: 3 full blocks
    manager.add(0, known)
    assert manager.add_sequence(1, [*known, 1, 2][:count], b"") == hit
    step = manager.allocate((1, 1))
    assert step.block_tables[0][0] == [*range(2, 2 + hit // 4), 6]  # sequence 0 has blocks 2..5
    assert step.block_ops.clear == ((6,),)


@pytest.mark.parametrize(("max_tokens", "hit"), [(None, 12), (12, 12), (11, 8), (4, 4), (3, 0), (0, 0), (99, 12)])
def test_a_hit_covers_no_more_than_requested(max_tokens, hit):
    manager = paged()
    manager.add(0, list(range(14)))
    assert manager.add_sequence(1, list(range(16)), b"", max_tokens) == hit


def test_an_equal_block_is_not_published_twice_and_is_reused_first():
    manager = paged()
    manager.add(0, list(range(8)))
    assert manager.add(1, list(range(8))) == 4
    manager.free(1)
    manager.free(0)
    assert (manager.stats().evictable, manager.stats().free) == ((2,), (8 * 4 + 6,))


def test_generated_tokens_are_published_too():
    manager = paged()
    manager.add(0, [1, 2])
    for token in (3, 4, 5):
        manager.write(0, [token])
    manager.free(0)
    assert manager.add_sequence(1, [1, 2, 3, 4, 9], b"") == 4


def test_only_the_same_root_and_history_hit():
    manager, tokens = paged(), [1, 1, 1, 1, 2, 2, 2, 2, 3]
    manager.add(0, tokens)
    assert manager.add_sequence(1, tokens, b"another adapter") == 0
    assert manager.add_sequence(2, [9, 9, 9, 9, *tokens[4:]], b"") == 0
    assert manager.add_sequence(3, [1, 1, 1, 1, 9, *tokens[5:]], b"") == 4
    manager.free(1)
    assert manager.add_sequence(1, tokens, b"") == 8


def test_ends_of_prefixes_are_evicted_before_their_beginnings():
    manager = paged(blocks=3)
    manager.add(0, list(range(12)))
    manager.free(0)
    assert manager.stats().evictable == (3,)
    manager.add(1, [50, 51, 52])
    assert manager.stats().evictions == (1,)
    assert manager.add_sequence(2, list(range(12)), b"") == 8


def test_the_least_recently_used_prefix_is_evicted_first():
    manager = paged(blocks=3)
    for first in (10, 20, 30):
        manager.add(0, [first, 1, 2, 3])
        manager.free(0)
    manager.add_sequence(0, [10, 1, 2, 3, 4], b"")  # used again
    manager.free(0)
    manager.add(0, [5, 5])
    manager.free(0)
    hits = [manager.add_sequence(index, [first, 1, 2, 3, 4], b"") for index, first in enumerate((10, 20, 30))]
    assert hits == [4, 0, 4]


def test_a_live_prefix_is_never_evicted():
    manager = paged(blocks=3)
    manager.add(0, list(range(9)))
    assert manager.add_sequence(1, list(range(8)), b"") == 4
    assert manager.try_allocate((1, 4)) is None
    manager.free(0)
    # Block 4 was free (half full), block 3 stays evictable.
    assert manager.allocate((1, 4)).block_tables == ([[2, 4]],)


def test_a_preempted_sequence_hits_its_own_blocks():
    manager, tokens = paged(blocks=5), list(range(11))
    manager.add(0, tokens)
    manager.free(0)
    assert manager.add_sequence(0, tokens, b"") == 8
    assert manager.stats().hit_tokens == 8


def test_a_window_needs_only_its_last_blocks_for_a_hit():
    """20 tokens, window 5: at its end the group holds the logical blocks 3 and 4, older ones are evictable."""
    manager, tokens = paged(WINDOW, prefill_chunk_size=4, max_num_seqs=2), list(range(20))  # 2 sequences of 3 blocks
    manager.add(0, tokens, chunk=4)
    manager.free(0)
    # 6 usable blocks, 5 published. Two new blocks: the free one, then the least recent: logical block 0.
    manager.add(1, [90, 91, 92, 93, 94])
    manager.free(1)
    assert manager.add_sequence(0, [*tokens, 1], b"") == 20  # needs 16..19 only: logical block 4
    assert len(manager.allocate((0, 1)).block_tables[0][0]) == 2


def test_the_hit_is_the_longest_that_every_group_can_serve():
    manager, tokens = paged(WINDOW, FULL, prefill_chunk_size=4), list(range(20))
    manager.add(0, tokens, chunk=4)
    windowed, full = manager.pools
    chain = manager._prefix_cache.find(manager._prefix_cache.prefixes.root(b""), tokens, 20)
    assert len(chain) == 5
    windowed.unpublish(windowed.find(chain[3]))  # positions 12..15 are gone from the windowed group
    # The last 4 tokens are there. 16 would need 12..15; 12 needs 8..11.
    for request, hit in (([*tokens, 1], 20), (tokens, 12)):
        assert manager.add_sequence(1, request, b"") == hit
        manager.free(1)
    full.unpublish(full.find(chain[2]))
    assert manager.add_sequence(1, [*tokens, 1], b"") == 8  # full attention needs every block


@pytest.mark.parametrize(
    "manager", [contiguous(WINDOW, FULL), paged(prefix_caching=False)], ids=["contiguous", "switched off"]
)
def test_without_prefix_caching_nothing_is_published(manager):
    assert not manager.prefix_caching
    manager.add(0, list(range(12)), chunk=4)
    manager.free(0)
    assert manager.add_sequence(0, list(range(12)), b"") == 0 and not any(manager.stats().evictable)


def test_blocks_are_published_only_up_to_finite_logits():
    manager = paged()
    manager.add_sequence(0, [0], b"")
    for count, num_sure, hit in ((8, 0, 0), (6, 11, 8), (1, None, 12)):
        manager.allocate((0, count))
        start = manager.seq_len(0)
        manager.commit(0, list(range(start, start + count)), num_sure)
        assert manager.add_sequence(1, list(range(20)), b"") == hit
        manager.free(1)


def test_a_faulted_sequence_leaves_nothing_to_find():
    manager = paged()
    manager.add(0, list(range(8)))
    manager.add(1, [*range(8), 50, 51, 52, 53])
    manager.free(1, publish=False)
    manager.check()
    assert manager.stats().evictable == (0,) and manager.add_sequence(1, list(range(14)), b"") == 0
    manager.write(0, [8, 9])  # sequence 0 has its blocks still, and continues
    assert manager.seq_len(0) == 10


def test_statistics():
    manager = paged(blocks=5)
    manager.add(0, list(range(9)))
    manager.add(1, list(range(6)))
    manager.add_sequence(2, [9] * 9, b"")
    stats = manager.stats()
    assert (stats.total, stats.used, stats.free, stats.evictable) == ((5,), (4,), (1,), (0,))
    assert (stats.hits, stats.misses, stats.hit_tokens) == (1, 2, 4)


# ---------------------------------------------------------------- copy on write


@pytest.mark.parametrize("first", ["child", "parent"])
def test_a_fork_shares_blocks_until_one_of_them_writes(first):
    manager = paged()
    manager.add(0, [1, 2, 3, 4, 5, 6])
    assert manager.fork(0, 1, 6) and manager.stats().used == (2,)
    order = (1, 0) if first == "child" else (0, 1)
    step = manager.write(order[0], [7])  # It copies the half-full block ...
    assert step.block_ops.copy == (((3, 4, 2),),) and step.block_ops.clear == ((),)
    assert (step.block_tables, step.slots) == (([[2, 4]],), ([4 * 4 + 2],))
    step = manager.write(order[1], [8])  # ... and the other one has it alone again.
    assert step.block_ops.copy == ((),) and (step.block_tables, step.slots) == (([[2, 3]],), ([3 * 4 + 2],))


def test_a_shorter_fork_overwrites_slots_of_its_parent():
    manager = paged()
    manager.add(0, [1, 2, 3, 4, 5, 6])
    manager.fork(0, 1, 5)  # The child owns one slot of the block.
    assert manager.write(0, [7]).block_ops.copy == (((3, 4, 2),),)
    step = manager.write(1, [8])
    assert step.block_ops.copy == ((),) and (step.block_tables, step.slots) == (([[2, 3]],), ([3 * 4 + 1],))


def test_three_sharers_make_two_copies():
    manager = paged()
    manager.add(0, [1, 2, 3])
    manager.fork(0, 1, 3)
    manager.fork(0, 2, 2)
    step = manager.allocate((2, 1), (0, 1), (1, 1))
    assert step.block_ops.copy == (((2, 3, 2), (2, 4, 3)),) and step.block_tables == ([[3], [4], [2]],)


def test_copies_count_in_all_or_nothing():
    manager = paged(blocks=2)
    manager.add(0, [1, 2, 3])
    manager.fork(0, 1, 3)
    manager.fork(0, 2, 3)
    before = manager.state()
    assert manager.try_allocate((0, 1), (1, 1), (2, 1)) is None and manager.state() == before
    manager.allocate((0, 1))


def test_a_published_block_is_never_written():
    manager = paged()
    manager.add(0, [1, 2, 3, 4, 5, 6, 7, 8])
    assert manager.truncate(0, 6) == 6
    assert manager.write(0, [9]).block_ops.copy == (((3, 4, 2),),)
    manager.free(0)
    assert manager.add_sequence(0, [1, 2, 3, 4, 5, 6, 7, 8, 9], b"") == 8  # The published one is unchanged.


def test_the_source_of_a_copy_is_not_allocated_in_the_same_step():
    """BlockOps clears before it copies, so with one spare block the source must not become sequence 1's new block."""
    manager = paged(blocks=3)
    manager.add(0, [1, 2, 3, 4])
    manager.truncate(0, 3)
    manager.add_sequence(1, [9], b"")
    assert manager.try_allocate((0, 1), (1, 8)) is None  # 1 for the copy and 2 new ones, of 2
    step = manager.allocate((0, 1), (1, 4))
    assert step.block_ops.copy == (((2, 3, 3),),) and step.block_ops.clear == ((4,),)
    assert manager.stats().evictable == (1,)


def test_a_fork_at_the_end_of_a_block_copies_nothing():
    manager = paged()
    manager.add(0, [1, 2, 3, 4, 5])
    manager.fork(0, 1, 4)
    step = manager.write(1, [9])
    assert step.block_ops.copy == ((),) and step.block_tables == ([[2, 4]],)


def test_a_fork_of_no_tokens_is_an_empty_sequence():
    for manager in (paged(), contiguous()):
        manager.add(0, [1, 2, 3])
        assert manager.fork(0, 1, 0) and manager.seq_len(1) == 0
        assert manager.write(1, [1]).block_ops.copy == ((),)


def test_a_fork_before_the_window_is_refused():
    manager = paged(WINDOW, prefill_chunk_size=4)
    manager.add(0, list(range(16)), chunk=4)  # holds 8..15
    before = manager.state()
    assert not manager.fork(0, 1, 11) and manager.state() == before  # query 11 sees 7..11
    assert manager.fork(0, 1, 12)
    manager.check()
    assert manager.write(1, [99]).block_tables == ([[4, 6]],)  # 8..11 shared, 12 in a block of its own


def test_a_contiguous_fork_copies_the_block():
    manager = contiguous(WINDOW, FULL)
    manager.add(0, list(range(6)), chunk=4)
    assert manager.fork(0, 1, 5)
    step = manager.write(1, [77])
    assert step.block_ops.copy == (((2, 3, 5),), ((2, 3, 5),)) and step.slots == ([3 * 8 + 5], [3 * 12 + 5])
    manager.add(2, list(range(12)), chunk=4)  # its ring holds 4..11
    manager.free(0)
    assert not manager.fork(2, 0, 7) and manager.fork(2, 0, 8)  # query 7 sees 3..7


# ---------------------------------------------------------------- truncation


@pytest.mark.parametrize("length", range(13))
def test_truncation_keeps_a_prefix_of_any_length_and_publishes_what_follows(length):
    manager = paged()
    manager.add(0, list(range(12)))
    assert manager.truncate(0, 99) == 12 and manager.truncate(0, length) == length
    manager.check()
    assert manager.stats().used == (-(-length // 4),)
    rest = list(range(50, 50 + 13 - length))
    for token in rest:
        manager.write(0, [token])
    manager.free(0)
    assert manager.add_sequence(0, [*range(length), *rest], b"") == 12


def test_truncation_before_the_window_empties_the_sequence():
    manager = paged(WINDOW, FULL, prefill_chunk_size=4)
    manager.add(0, list(range(16)), chunk=4)
    assert manager.truncate(0, 13) == 13 and manager.truncate(0, 11) == 0
    assert manager.seq_len(0) == 0 and manager.stats().used == (0, 0)
    manager.check()
    manager.grow(0, 16, chunk=4)


def test_a_ring_is_truncated_only_to_tokens_that_are_not_overwritten():
    manager = contiguous(WINDOW)  # 8 slots
    manager.add(0, list(range(10)), chunk=4)  # holds 2..9
    # Query 7 sees 3..7, query 6 sees 2..6; 1 is overwritten.
    assert [manager.truncate(0, length) for length in (7, 6, 5)] == [7, 6, 0]


def test_a_draft_that_is_not_committed_is_overwritten():
    manager = paged()
    manager.add(0, [1, 2, 3])
    assert manager.allocate((0, 4)).slots == ([11, 12, 13, 14],)
    manager.commit(0, [4])
    step = manager.allocate((0, 1))
    assert step.slots == ([12],) and step.block_ops.clear == ((),)


# ---------------------------------------------------------------- freeing and checks


def test_freeing_returns_every_block():
    for manager in (paged(WINDOW, FULL), contiguous(WINDOW, FULL)):
        manager.add(0, list(range(10)), chunk=4)
        before = manager.num_frees
        manager.free(0)
        assert manager.stats().used == (0, 0) and manager.num_frees == before + 1
        manager.check()
        with pytest.raises(AssertionError, match="no sequence has index 0"):
            manager.seq_len(0)


def test_can_allocate_counts_the_blocks_that_a_sequence_still_needs():
    manager = paged(WINDOW, FULL, blocks=4, prefill_chunk_size=4)
    manager.add(0, [1, 2, 3])
    assert manager.can_allocate(0, 16) and not manager.can_allocate(0, 17)
    manager.add_sequence(1, [1], b"")
    assert manager.can_allocate(1, 12) and not manager.can_allocate(1, 13)


def shift_window(manager):
    group_blocks = manager._sequence(0).groups[1]
    del group_blocks.blocks[0]
    group_blocks.num_skipped_blocks += 1


CORRUPTIONS: dict[str, Callable[[ManagerDriver], object]] = {
    "leaked block": lambda manager: manager.pools[0].allocate(),
    "block of another sequence": lambda manager: manager.blocks(1).__setitem__(0, manager.blocks(0)[0]),
    "block twice": lambda manager: manager.blocks(0).__setitem__(1, manager.blocks(0)[0]),
    "wrong length": lambda manager: [setattr(manager._sequence(0), key, 99) for key in ("length", "num_written")],
    "window not held": shift_window,
    "wrong order": lambda manager: manager.blocks(0).reverse(),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_check_detects_a_corrupted_state(corruption):
    manager = paged(FULL, WINDOW)
    manager.add(0, list(range(9)))
    manager.add(1, [7, 7, 7])
    CORRUPTIONS[corruption](manager)
    with pytest.raises(AssertionError):
        manager.check()
