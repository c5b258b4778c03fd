"""The Ledger with no model: exact block ids, slots, moves and order, worked by hand with blocks of 4 slots."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvad.cache.config import CacheConfig
from kvad.cache.groups import CacheGroup, build_groups
from kvad.cache.manager.allocation import BlockAllocation, TokenSpan
from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.config.model import AttentionSpec

FULL = AttentionSpec(True, None, 1, 8, 8)
W5 = AttentionSpec(True, 5, 1, 8, 8)  # sees itself and 4 before: a hit at h needs positions h - 4 .. h - 1


def paged(
    *mixers: AttentionSpec, rows: int = 4, capacity: int = 40, chunk: int = 8, blocks: int | None = None
) -> KVCacheManager:
    config = CacheConfig(
        block_size=4, max_num_seqs=rows, max_seq_len=capacity, prefill_chunk_size=chunk, num_blocks=blocks
    )
    return KVCacheManager(build_groups(mixers or (FULL,), config), prefix_caching=True, max_num_seqs=rows)


def contiguous(*mixers: AttentionSpec, capacity: int = 12, chunk: int = 4) -> KVCacheManager:
    config = CacheConfig(layout="contiguous", max_num_seqs=3, max_seq_len=capacity, prefill_chunk_size=chunk)
    return KVCacheManager(build_groups(mixers or (FULL,), config), prefix_caching=True, max_num_seqs=3)


def write(ledger: KVCacheManager, row: int, tokens: list[int]) -> BlockAllocation:
    placed = ledger.allocate_slots([TokenSpan(row, ledger.seq_len(row), len(tokens))])
    assert placed is not None
    ledger.commit(row, tokens)
    ledger.check()
    return placed


def seat(ledger: KVCacheManager, row: int, tokens: list[int], *, chunk: int = 8) -> int:
    """Admit a row and compute all of its tokens; returns what the prefix cache gave."""
    hit = ledger.add_sequence(row, tokens, b"")
    assert hit is not None
    for start in range(hit, len(tokens), chunk):
        write(ledger, row, tokens[start : start + chunk])
    return hit


# ---------------------------------------------------------------- placing


def test_a_row_grows_block_by_block() -> None:
    ledger = paged()
    assert ledger.add_sequence(0, [1, 2, 3], b"") == 0
    placed = write(ledger, 0, [1, 2, 3])
    assert placed.slots == ([8, 9, 10],)  # block 2, after empty and bin
    assert placed.block_tables == ([[2]],)
    assert placed.block_ops.clear == ((2,),) and placed.block_ops.copy == ((),)
    placed = write(ledger, 0, [4])
    assert (placed.slots, placed.block_ops.clear) == (([11],), ((),))
    placed = write(ledger, 0, [5])
    assert (placed.slots, placed.block_tables, placed.block_ops.clear) == (([12],), ([[2, 3]],), ((3,),))
    placed = write(ledger, 0, [6, 7, 8, 9, 10])
    assert placed.slots == ([13, 14, 15, 16, 17],)
    assert placed.block_ops.clear == ((4,),)
    assert ledger.seq_len(0) == 10


def test_spans_are_placed_in_their_order() -> None:
    ledger = paged()
    for row in (0, 1, 2):
        ledger.add_sequence(row, [7], b"")
    placed = ledger.allocate_slots([TokenSpan(2, 0, 2), TokenSpan(0, 0, 5), TokenSpan(1, 0, 1)])
    assert placed is not None
    assert placed.block_tables == ([[2], [3, 4], [5]],)
    assert placed.slots == ([8, 9, 12, 13, 14, 15, 16, 20],)
    assert placed.block_ops.clear == ((2, 3, 4, 5),)


def test_reserve_is_all_or_nothing() -> None:
    ledger = paged(blocks=3)
    for row in (0, 1):
        ledger.add_sequence(row, [7], b"")
    before = ledger.stats()
    assert ledger.allocate_slots([TokenSpan(0, 0, 8), TokenSpan(1, 0, 8)]) is None
    assert ledger.stats() == before
    ledger.check()
    placed = ledger.allocate_slots([TokenSpan(0, 0, 8), TokenSpan(1, 0, 4)])
    assert placed is not None and placed.block_tables == ([[2, 3], [4]],)


def test_a_taken_seat_admits_nobody() -> None:
    ledger = paged()
    assert ledger.add_sequence(1, [1], b"") == 0
    assert ledger.add_sequence(1, [1], b"") is None


def test_a_window_holds_what_its_next_query_needs_and_no_block_more() -> None:
    ledger = paged(W5, chunk=4)
    ledger.add_sequence(0, [0], b"")
    tables = []
    for start in range(0, 24, 4):
        placed = write(ledger, 0, list(range(start, start + 4)))
        tables.append(list(placed.block_tables[0][0]))
    # At start 8 the first query sees 4..8: block 0 (positions 0..3) is dropped.  It is published, so it is not reused
    # before the pool's unused blocks.
    assert tables == [[2], [2, 3], [3, 4], [4, 5], [5, 6], [6, 7]]
    placed = write(ledger, 0, [24])
    assert placed.block_tables == ([[7, 8]],)  # query 24 sees 20..24
    placed = write(ledger, 0, [25])
    assert placed.block_tables == ([[7, 8]],)  # 25 sees 21..25: still in block 7


def test_a_contiguous_row_is_one_block_and_a_window_a_ring_in_it() -> None:
    ledger = contiguous(W5, FULL)  # ring of 5 + 4 - 1 = 8 slots
    assert [group.block_size for group in ledger.groups] == [8, 12]
    ledger.add_sequence(1, [0], b"")
    write(ledger, 1, [0, 1, 2, 3])
    write(ledger, 1, [4, 5, 6])
    placed = write(ledger, 1, [7, 8, 9])
    assert placed.slots == ([2 * 8 + 7, 2 * 8 + 0, 2 * 8 + 1], [2 * 12 + 7, 2 * 12 + 8, 2 * 12 + 9])
    assert placed.block_tables == ([[2]], [[2]]) and placed.block_ops.clear == ((), ())
    placed = write(ledger, 1, [10])
    assert placed.slots == ([2 * 8 + 2], [2 * 12 + 10])


def test_a_group_never_hands_out_a_row_more_than_it_may_hold() -> None:
    ledger = paged(capacity=8)
    ledger.add_sequence(0, [0], b"")
    write(ledger, 0, list(range(8)))
    with pytest.raises(AssertionError, match="outgrows"):
        ledger.allocate_slots([TokenSpan(0, 8, 1)])
    ring = contiguous(W5)
    ring.add_sequence(0, [0], b"")
    write(ring, 0, [0, 1, 2, 3])
    write(ring, 0, [4])
    with pytest.raises(AssertionError, match="outgrows a ring"):
        ring.allocate_slots([TokenSpan(0, 5, 6)])


def test_a_span_starts_at_its_rows_end() -> None:
    ledger = paged()
    ledger.add_sequence(0, [0], b"")
    with pytest.raises(AssertionError, match="does not start"):
        ledger.allocate_slots([TokenSpan(0, 1, 1)])


def test_capacity_is_the_longest_row_alone() -> None:
    assert paged(capacity=40).capacity == 40
    assert paged(blocks=3).capacity == 12
    assert contiguous(capacity=12).capacity == 12
    assert paged(W5).capacity > 1 << 40
    assert paged(W5, FULL, blocks=5).capacity == 20


# ---------------------------------------------------------------- prefix hits


@pytest.mark.parametrize(
    ("asked", "hit"),
    [
        (3, 0),
        (4, 0),  # all 4 are known, but one must be left to compute
        (5, 4),
        (7, 4),
        (8, 4),
        (9, 8),
        (12, 8),
        (13, 12),
        (16, 12),
    ],
)
def test_a_hit_covers_full_blocks_and_at_most_all_tokens_but_one(asked: int, hit: int) -> None:
    ledger = paged()
    known = list(range(100, 114))  # 14 tokens: 3 full blocks
    seat(ledger, 0, known)
    assert ledger.add_sequence(1, [*known, 1, 2][:asked], b"") == hit
    ledger.check()
    placed = ledger.allocate_slots([TokenSpan(1, hit, 1)])
    assert placed is not None
    shared = hit // 4
    assert placed.block_tables[0][0] == [*range(2, 2 + shared), 6]  # row 0 has blocks 2..5
    assert placed.block_ops.clear == ((6,),)


def test_a_hit_of_exactly_n_is_cut_to_leave_one_block_to_compute() -> None:
    ledger = paged()
    seat(ledger, 0, list(range(8)))
    assert seat(ledger, 1, list(range(8))) == 4
    # Row 1's second block is a twin of row 0's: it is not published a second time, and is reused first.
    ledger.free(1)
    ledger.free(0)
    assert (ledger.stats().evictable, ledger.stats().free) == ((2,), (8 * 4 + 6,))


@pytest.mark.parametrize(("most", "hit"), [(None, 12), (12, 12), (11, 8), (4, 4), (3, 0), (0, 0), (99, 12)])
def test_a_hit_covers_no_more_than_asked(most: int | None, hit: int) -> None:
    ledger = paged()
    seat(ledger, 0, list(range(14)))
    assert ledger.add_sequence(1, list(range(16)), b"", most) == hit


def test_generated_tokens_are_published_too() -> None:
    ledger = paged()
    seat(ledger, 0, [1, 2])
    for token in (3, 4, 5):
        write(ledger, 0, [token])
    ledger.free(0)
    assert ledger.add_sequence(1, [1, 2, 3, 4, 9], b"") == 4


def test_only_the_same_root_hits() -> None:
    ledger = paged()
    seat(ledger, 0, list(range(9)))
    assert ledger.add_sequence(1, list(range(9)), b"another adapter") == 0
    assert ledger.add_sequence(2, list(range(9)), b"") == 8


def test_only_the_same_history_hits() -> None:
    ledger = paged()
    seat(ledger, 0, [1, 1, 1, 1, 2, 2, 2, 2, 3])
    assert ledger.add_sequence(1, [9, 9, 9, 9, 2, 2, 2, 2, 3], b"") == 0
    assert ledger.add_sequence(2, [1, 1, 1, 1, 9, 2, 2, 2, 3], b"") == 4


def test_tails_are_evicted_before_heads() -> None:
    ledger = paged(blocks=3)
    seat(ledger, 0, list(range(12)))
    ledger.free(0)
    assert ledger.stats().evictable == (3,)
    seat(ledger, 1, [50, 51, 52])
    assert ledger.stats().evictions == (1,)
    assert ledger.add_sequence(2, list(range(12)), b"") == 8


def test_the_least_recently_used_prefix_goes_first() -> None:
    ledger = paged(blocks=3)
    for first in (10, 20, 30):
        seat(ledger, 0, [first, 1, 2, 3])
        ledger.free(0)
    ledger.add_sequence(0, [10, 1, 2, 3, 4], b"")  # used again
    ledger.free(0)
    seat(ledger, 0, [5, 5])
    ledger.free(0)
    assert [ledger.add_sequence(row, [first, 1, 2, 3, 4], b"") for row, first in enumerate((10, 20, 30))] == [4, 0, 4]


def test_a_live_prefix_is_never_evicted() -> None:
    ledger = paged(blocks=3)
    seat(ledger, 0, list(range(9)))
    assert ledger.add_sequence(1, list(range(8)), b"") == 4
    assert ledger.allocate_slots([TokenSpan(1, 4, 4)]) is None
    ledger.free(0)
    placed = ledger.allocate_slots([TokenSpan(1, 4, 4)])  # block 4 was free (half full), block 3 stays evictable
    assert placed is not None and placed.block_tables == ([[2, 4]],)


def test_a_preempted_row_finds_its_blocks_again() -> None:
    ledger = paged(blocks=5)
    tokens = list(range(11))
    seat(ledger, 0, tokens)
    ledger.free(0)
    assert ledger.add_sequence(0, tokens, b"") == 8
    assert ledger.stats().hit_tokens == 8


def test_a_window_needs_only_its_last_blocks_for_a_hit() -> None:
    """20 tokens, window 5: at its end the group holds the logical blocks 3 and 4, older ones are evictable."""
    ledger = paged(W5, chunk=4, rows=2)  # 2 rows x 3 blocks
    tokens = list(range(20))
    seat(ledger, 0, tokens, chunk=4)
    ledger.free(0)
    # 6 usable blocks, 5 published.  Two new blocks: the free one, then the least recent: logical block 0.
    seat(ledger, 1, [90, 91, 92, 93, 94])
    ledger.free(1)
    assert ledger.add_sequence(0, [*tokens, 1], b"") == 20  # needs 16..19 only: logical block 4
    placed = ledger.allocate_slots([TokenSpan(0, 20, 1)])
    assert placed is not None and len(placed.block_tables[0][0]) == 2


def test_the_hit_is_the_longest_that_every_group_can_serve() -> None:
    ledger = paged(W5, FULL, chunk=4)
    tokens = list(range(20))
    seat(ledger, 0, tokens, chunk=4)
    local, full = ledger.pools
    chain = ledger._prefix_cache.find(ledger._prefix_cache.prefixes.root(b""), tokens, 20)  # type: ignore[arg-type]
    assert len(chain) == 5
    gone = local.find(chain[3])
    assert gone is not None
    local.unpublish(gone)  # positions 12..15 are gone from the windowed group
    assert ledger.add_sequence(1, [*tokens, 1], b"") == 20  # the last 4 tokens are there
    ledger.free(1)
    assert ledger.add_sequence(1, tokens, b"") == 12  # 16 would need 12..15; 12 needs 8..11
    ledger.free(1)
    lost = full.find(chain[2])
    assert lost is not None
    full.unpublish(lost)
    assert ledger.add_sequence(1, [*tokens, 1], b"") == 8  # full attention needs every block


def test_contiguous_rows_publish_nothing() -> None:
    ledger = contiguous(W5, FULL)
    assert not ledger.prefix_caching
    seat(ledger, 0, list(range(12)), chunk=4)
    ledger.free(0)
    assert ledger.add_sequence(0, list(range(12)), b"") == 0
    assert ledger.stats().evictable == (0, 0)


def test_prefix_reuse_can_be_off() -> None:
    ledger = KVCacheManager(
        build_groups([FULL], CacheConfig(block_size=4, max_num_seqs=2, max_seq_len=16)),
        prefix_caching=False,
        max_num_seqs=2,
    )
    seat(ledger, 0, list(range(9)))
    assert ledger.add_sequence(1, list(range(9)), b"") == 0


def test_blocks_are_published_no_further_than_logits_have_vouched() -> None:
    ledger = paged()
    ledger.add_sequence(0, [0], b"")
    ledger.allocate_slots([TokenSpan(0, 0, 8)])
    ledger.commit(0, list(range(8)), 0)
    assert ledger.add_sequence(1, list(range(9)), b"") == 0
    ledger.free(1)
    ledger.allocate_slots([TokenSpan(0, 8, 6)])
    ledger.commit(0, list(range(8, 14)), 11)
    assert ledger.add_sequence(1, list(range(20)), b"") == 8
    ledger.free(1)
    write(ledger, 0, [14])
    assert ledger.add_sequence(1, list(range(20)), b"") == 12


def test_a_faulted_row_leaves_nothing_to_find() -> None:
    ledger = paged()
    seat(ledger, 0, list(range(8)))
    seat(ledger, 1, [*range(8), 50, 51, 52, 53])
    ledger.free(1, publish=False)
    ledger.check()
    assert ledger.stats().evictable == (0,)
    assert ledger.add_sequence(1, list(range(14)), b"") == 0
    write(ledger, 0, [8, 9])  # row 0 has its blocks still, and goes on
    assert ledger.seq_len(0) == 10


def test_dropped_prefixes_are_forgotten_and_live_rows_go_on() -> None:
    ledger = paged()
    seat(ledger, 0, list(range(9)))
    seat(ledger, 1, [7] * 9)
    ledger.free(1)
    ledger.reset_prefix_cache()
    ledger.check()
    assert ledger.stats().evictable == (0,)
    write(ledger, 0, [9, 10, 11, 12])
    ledger.free(0)
    assert ledger.add_sequence(0, list(range(13)), b"") == 0


def test_statistics() -> None:
    ledger = paged(blocks=5)
    seat(ledger, 0, list(range(9)))
    seat(ledger, 1, list(range(6)))
    ledger.add_sequence(2, [9] * 9, b"")
    stats = ledger.stats()
    assert (stats.total, stats.used, stats.free, stats.evictable) == ((5,), (4,), (1,), (0,))
    assert (stats.hits, stats.misses, stats.hit_tokens) == (1, 2, 4)


# ---------------------------------------------------------------- copy on write


def test_a_fork_shares_blocks_until_someone_writes() -> None:
    ledger = paged()
    seat(ledger, 0, [1, 2, 3, 4, 5, 6])
    assert ledger.fork(0, 1, 6)
    ledger.check()
    assert ledger.stats().used == (2,)
    placed = write(ledger, 1, [7])  # the child copies the half-full block ...
    assert placed.block_ops.copy == (((3, 4, 2),),) and placed.block_ops.clear == ((),)
    assert (placed.block_tables, placed.slots) == (([[2, 4]],), ([4 * 4 + 2],))
    placed = write(ledger, 0, [8])  # ... and its parent has it alone again
    assert placed.block_ops.copy == ((),)
    assert (placed.block_tables, placed.slots) == (([[2, 3]],), ([3 * 4 + 2],))


def test_the_parent_copies_when_it_writes_first() -> None:
    ledger = paged()
    seat(ledger, 0, [1, 2, 3, 4, 5, 6])
    ledger.fork(0, 1, 5)  # the child owns one slot of the block
    placed = write(ledger, 0, [7])
    assert placed.block_ops.copy == (((3, 4, 2),),)
    placed = write(ledger, 1, [8])
    assert placed.block_ops.copy == ((),)
    assert (placed.block_tables, placed.slots) == (([[2, 3]],), ([3 * 4 + 1],))


def test_three_sharers_make_two_copies() -> None:
    ledger = paged()
    seat(ledger, 0, [1, 2, 3])
    ledger.fork(0, 1, 3)
    ledger.fork(0, 2, 2)
    placed = ledger.allocate_slots([TokenSpan(2, 2, 1), TokenSpan(0, 3, 1), TokenSpan(1, 3, 1)])
    assert placed is not None
    assert placed.block_ops.copy == (((2, 3, 2), (2, 4, 3)),)
    assert placed.block_tables == ([[3], [4], [2]],)


def test_copies_count_in_all_or_nothing() -> None:
    ledger = paged(blocks=2)
    seat(ledger, 0, [1, 2, 3])
    ledger.fork(0, 1, 3)
    ledger.fork(0, 2, 3)
    before = ledger.stats()
    assert ledger.allocate_slots([TokenSpan(0, 3, 1), TokenSpan(1, 3, 1), TokenSpan(2, 3, 1)]) is None
    assert ledger.stats() == before
    assert ledger.allocate_slots([TokenSpan(0, 3, 1)]) is not None


def test_a_published_block_is_never_written() -> None:
    ledger = paged()
    seat(ledger, 0, [1, 2, 3, 4, 5, 6, 7, 8])
    assert ledger.truncate(0, 6) == 6
    placed = write(ledger, 0, [9])
    assert placed.block_ops.copy == (((3, 4, 2),),)
    ledger.free(0)
    assert ledger.add_sequence(0, [1, 2, 3, 4, 5, 6, 7, 8, 9], b"") == 8  # the published one is as it was


def test_the_source_of_a_copy_is_not_handed_on_in_the_same_step() -> None:
    """Moves clears before it copies: with one block to spare, the source must not become row 1's new block."""
    ledger = paged(blocks=3)
    seat(ledger, 0, [1, 2, 3, 4])
    ledger.truncate(0, 3)
    ledger.add_sequence(1, [9], b"")
    assert (
        ledger.allocate_slots([TokenSpan(0, 3, 1), TokenSpan(1, 0, 8)]) is None
    )  # 1 for the copy, 2 new: only 2 there
    placed = ledger.allocate_slots([TokenSpan(0, 3, 1), TokenSpan(1, 0, 4)])
    assert placed is not None
    assert placed.block_ops.copy == (((2, 3, 3),),) and placed.block_ops.clear == ((4,),)
    ledger.check()
    assert ledger.stats().evictable == (1,)


def test_a_fork_at_a_blocks_edge_copies_nothing() -> None:
    ledger = paged()
    seat(ledger, 0, [1, 2, 3, 4, 5])
    ledger.fork(0, 1, 4)
    placed = write(ledger, 1, [9])
    assert placed.block_ops.copy == ((),) and placed.block_tables == ([[2, 4]],)


def test_a_fork_of_nothing_is_an_empty_row() -> None:
    for ledger in (paged(), contiguous()):
        seat(ledger, 0, [1, 2, 3])
        assert ledger.fork(0, 1, 0)
        ledger.check()
        assert ledger.seq_len(1) == 0
        assert write(ledger, 1, [1]).block_ops.copy == ((),)


def test_a_fork_behind_the_window_is_refused() -> None:
    ledger = paged(W5, chunk=4)
    seat(ledger, 0, list(range(16)), chunk=4)  # holds 8..15
    before = ledger.stats()
    assert not ledger.fork(0, 1, 11)  # query 11 sees 7..11
    assert ledger.stats() == before
    assert ledger.fork(0, 1, 12)
    ledger.check()
    placed = write(ledger, 1, [99])
    assert placed.block_tables == ([[4, 6]],)  # 8..11 shared, 12 in a block of its own


def test_a_contiguous_fork_copies_the_row() -> None:
    ledger = contiguous(W5, FULL)
    seat(ledger, 0, list(range(6)), chunk=4)
    assert ledger.fork(0, 1, 5)
    placed = write(ledger, 1, [77])
    assert placed.block_ops.copy == (((2, 3, 5),), ((2, 3, 5),))
    assert placed.slots == ([3 * 8 + 5], [3 * 12 + 5])
    seat(ledger, 2, list(range(12)), chunk=4)  # its ring holds 4..11
    ledger.free(0)
    assert not ledger.fork(2, 0, 7)  # query 7 sees 3..7
    assert ledger.fork(2, 0, 8)


# ---------------------------------------------------------------- rewind


@pytest.mark.parametrize("length", range(13))
def test_rewind_keeps_a_prefix_of_any_length_and_publishes_what_follows(length: int) -> None:
    ledger = paged()
    seat(ledger, 0, list(range(12)))
    assert ledger.truncate(0, length) == length
    ledger.check()
    assert ledger.stats().used == (-(-length // 4),)
    rest = list(range(50, 50 + 13 - length))
    for token in rest:
        write(ledger, 0, [token])
    ledger.free(0)
    assert ledger.add_sequence(0, [*range(length), *rest], b"") == 12


def test_rewind_to_more_than_there_is_changes_nothing() -> None:
    ledger = paged()
    seat(ledger, 0, [1, 2, 3])
    assert ledger.truncate(0, 9) == 3


def test_rewind_behind_the_window_empties_the_row() -> None:
    ledger = paged(W5, FULL, chunk=4)
    seat(ledger, 0, list(range(16)), chunk=4)
    assert ledger.truncate(0, 13) == 13
    assert ledger.truncate(0, 11) == 0
    assert ledger.seq_len(0) == 0 and ledger.stats().used == (0, 0)
    ledger.check()
    for start in range(0, 16, 4):
        write(ledger, 0, list(range(start, start + 4)))


def test_a_ring_remembers_what_it_overwrote() -> None:
    ledger = contiguous(W5)  # 8 slots
    seat(ledger, 0, list(range(10)), chunk=4)  # holds 2..9
    assert ledger.truncate(0, 7) == 7  # query 7 sees 3..7
    assert ledger.truncate(0, 6) == 6  # query 6 sees 2..6
    assert ledger.truncate(0, 5) == 0  # 1 is overwritten


def test_a_draft_that_is_not_committed_is_written_over() -> None:
    ledger = paged()
    seat(ledger, 0, [1, 2, 3])
    placed = ledger.allocate_slots([TokenSpan(0, 3, 4)])
    assert placed is not None and placed.slots == ([11, 12, 13, 14],)
    ledger.commit(0, [4])
    placed = ledger.allocate_slots([TokenSpan(0, 4, 1)])
    assert placed is not None and placed.slots == ([12],)
    assert placed.block_ops.clear == ((),)


# ---------------------------------------------------------------- releases and checks


def test_release_gives_everything_back() -> None:
    for ledger in (paged(W5, FULL), contiguous(W5, FULL)):
        seat(ledger, 0, list(range(10)), chunk=4)
        before = ledger.num_frees
        ledger.free(0)
        assert ledger.stats().used == (0, 0) and ledger.num_frees == before + 1
        ledger.check()
        with pytest.raises(AssertionError, match="no sequence has index 0"):
            ledger.seq_len(0)


def test_fits_counts_what_a_row_still_needs() -> None:
    ledger = paged(W5, FULL, blocks=4, chunk=4)
    seat(ledger, 0, [1, 2, 3])
    assert ledger.can_allocate(0, 16) and not ledger.can_allocate(0, 17)
    ledger.add_sequence(1, [1], b"")
    assert ledger.can_allocate(1, 12) and not ledger.can_allocate(1, 13)


def test_a_longer_window_group_is_a_group_of_its_own() -> None:
    ledger = paged(FULL, W5, FULL._replace(num_kv_heads=2))
    assert [group.layers for group in ledger.groups] == [(0,), (1,), (2,)]
    assert isinstance(ledger.groups[0], CacheGroup)


def doctor_leak(ledger: KVCacheManager) -> None:
    ledger.pools[0].allocate()


def doctor_foreign(ledger: KVCacheManager) -> None:
    one, two = ledger._sequences[0], ledger._sequences[1]
    assert one is not None and two is not None
    two.groups[0].blocks[0] = one.groups[0].blocks[0]


def doctor_twice(ledger: KVCacheManager) -> None:
    one = ledger._sequences[0]
    assert one is not None
    one.groups[0].blocks[1] = one.groups[0].blocks[0]


def doctor_length(ledger: KVCacheManager) -> None:
    one = ledger._sequences[0]
    assert one is not None
    one.length = one.num_written = 99


def doctor_window(ledger: KVCacheManager) -> None:
    one = ledger._sequences[0]
    assert one is not None
    del one.groups[1].blocks[0]
    one.groups[1].num_skipped_blocks += 1


def doctor_order(ledger: KVCacheManager) -> None:
    one = ledger._sequences[0]
    assert one is not None
    one.groups[0].blocks.reverse()


@pytest.mark.parametrize(
    "doctor", [doctor_leak, doctor_foreign, doctor_twice, doctor_length, doctor_window, doctor_order]
)
def test_check_catches_a_doctored_state(doctor: Callable[[KVCacheManager], None]) -> None:
    ledger = paged(FULL, W5)
    seat(ledger, 0, list(range(9)))
    seat(ledger, 1, [7, 7, 7])
    doctor(ledger)
    with pytest.raises(AssertionError):
        ledger.check()
