"""The Ledger under policies, with no model: cuts, descents, sinks, parking; worked by hand with blocks of 4 slots.

And at random, in pools that are nearly always full: a reservation succeeds or changes nothing, and is refused only
where it could not be placed.
"""

from __future__ import annotations

import copy
import random

import pytest

from kvad.cache.config import CacheConfig
from kvad.cache.groups import CacheGroup, build_groups
from kvad.cache.manager.allocation import BlockAllocation, TokenSpan
from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.cache.manager.sequence_blocks import SwappedSequence
from kvad.config.model import AttentionSpec
from kvad.model_input import EvictOp, MergeOp

FULL = AttentionSpec(True, None, 1, 8, 8)
WIDE = AttentionSpec(True, None, 2, 8, 8)


def made(policy: str, *mixers: AttentionSpec, tight: int | None = None, **fields: object) -> tuple[CacheGroup, ...]:
    """``tight``: no pool has more blocks than this; -1: two more than one row at its longest has."""
    given = {"block_size": 4, "max_num_seqs": 4, "max_seq_len": 48, "prefill_chunk_size": 8, "policy": policy} | fields
    placed = build_groups(mixers or (FULL,), CacheConfig(**given))  # type: ignore[arg-type]
    if tight is None:
        return placed
    most = [group.max_blocks_per_seq + 2 if tight < 0 else tight for group in placed]
    return tuple(group._replace(num_blocks=min(group.num_blocks, n + 2)) for n, group in zip(most, placed, strict=True))


def under(policy: str, *mixers: AttentionSpec, prefix: bool = True, **fields: object) -> KVCacheManager:
    return KVCacheManager(made(policy, *mixers, **fields), prefix_caching=prefix, max_num_seqs=4)  # type: ignore[arg-type]


def write(ledger: KVCacheManager, row: int, count: int) -> BlockAllocation:
    tokens = list(range(ledger.seq_len(row), ledger.seq_len(row) + count))
    placed = ledger.allocate_slots([TokenSpan(row, ledger.seq_len(row), count)])
    assert placed is not None
    ledger.check()
    ledger.commit(row, tokens)
    ledger.check()
    return placed


def grow(ledger: KVCacheManager, row: int, length: int, *, chunk: int = 8) -> BlockAllocation | None:
    """A row of so many tokens, cut where the policy says."""
    placed = None
    if ledger._sequences[row] is None:
        ledger.add_sequence(row, list(range(length + 1)), b"")
    while ledger.seq_len(row) < length:
        placed = write(ledger, row, min(chunk, length - ledger.seq_len(row), ledger.tokens_until_eviction(row)))
    return placed


def blocks(ledger: KVCacheManager, row: int, group: int = 0) -> list[int]:
    seat = ledger._sequences[row]
    assert seat is not None
    return seat.all_groups[group].blocks


# ---------------------------------------------------------------- cuts


def test_a_cut_fills_up_from_the_front_and_its_blocks_are_free_in_the_same_step() -> None:
    """key-norm(6, interval=4): at 8 tokens 6 stay, at 12 (10 held) 6 of those; the third block is free at once."""
    ledger = under("key-norm(6, interval=4)")
    grow(ledger, 0, 8)
    assert blocks(ledger, 0) == [2, 3]
    placed = write(ledger, 0, 4)
    assert placed.block_ops.evict == ((EvictOp(0, 8, (2, 3), 8, 6, (2, 3)),),)
    assert placed.slots == ([14, 15, 16, 17],) and placed.block_ops.clear == ((4,),)  # position 8 lies where 6 would
    ledger.add_sequence(1, [7], b"")
    free = ledger.stats().free[0]
    placed_or_none = ledger.allocate_slots([TokenSpan(1, 0, 3), TokenSpan(0, 12, 1)])
    assert placed_or_none is not None
    assert placed_or_none.block_ops.evict == ((EvictOp(0, 12, (2, 3, 4), 10, 6, (2, 3)),),)
    assert placed_or_none.block_tables == ([[4], [2, 3]],) and placed_or_none.block_ops.clear == ((4,),)
    assert placed_or_none.slots == ([16, 17, 18, 14],)
    assert ledger.stats().free[0] == free  # one came back, one went
    ledger.check()


def test_a_contiguous_row_is_cut_in_place() -> None:
    ledger = under("key-norm(6, interval=4)", layout="contiguous")
    grow(ledger, 0, 8)
    placed = write(ledger, 0, 1)
    assert placed.block_ops.evict == ((EvictOp(0, 8, (2,), 8, 6, (2,)),),)
    assert placed.slots == ([2 * 10 + 6],)


def test_what_two_rows_share_is_cut_by_each_for_itself() -> None:
    """The first to be cut gets new blocks, the last keeps the old ones; both cuts name what they read."""
    ledger = under("key-norm(6, interval=4)")
    grow(ledger, 0, 8)
    assert ledger.fork(0, 1, 8)
    placed = ledger.allocate_slots([TokenSpan(0, 8, 1), TokenSpan(1, 8, 1)])
    assert placed is not None
    assert placed.block_ops.evict == ((EvictOp(0, 8, (2, 3), 8, 6, (4, 5)), EvictOp(1, 8, (2, 3), 8, 6, (2, 3))),)
    assert placed.block_ops.copy == ((),)
    ledger.check()


def test_a_cut_may_take_what_a_later_cut_leaves() -> None:
    """Five blocks: 0 and 1 share three, 2 has two of its own.  Row 0 needs two for its cut, and only row 2's cut and
    row 1's leave any; they are cut in the same step, behind it."""
    ledger = under("key-norm(6, interval=4)", tight=5)
    grow(ledger, 0, 12)
    assert ledger.fork(0, 1, 12)
    grow(ledger, 2, 8)
    assert ledger.stats().free == (0,)
    before = state(ledger)
    assert (
        ledger.allocate_slots([TokenSpan(0, 12, 1), TokenSpan(2, 8, 1), TokenSpan(1, 12, 1)]) is None
    )  # one comes back, two are needed
    assert state(ledger) == before
    ledger.free(2)
    grow(ledger, 2, 4)
    assert ledger.stats().free == (1,)
    placed = ledger.allocate_slots([TokenSpan(0, 12, 1), TokenSpan(1, 12, 1)])
    assert placed is not None and len(set(blocks(ledger, 0)) | set(blocks(ledger, 1))) == 4
    ledger.check()


def test_a_fork_or_a_rewind_behind_a_cut_is_refused() -> None:
    ledger = under("key-norm(6, interval=4)")
    grow(ledger, 0, 10)
    before = state(ledger)
    assert not ledger.fork(0, 1, 7) and state(ledger) == before
    assert ledger.fork(0, 1, 9)
    ledger.check()
    assert ledger.truncate(0, 8) == 8
    ledger.check()
    placed = write(ledger, 0, 1)
    assert placed.block_ops.evict in ((), ((),))  # it was cut at 8 already
    assert ledger.truncate(0, 7) == 0
    ledger.check()
    assert grow(ledger, 0, 8) is not None


def test_who_watches_attention_is_not_forked() -> None:
    ledger = under("tova(6, interval=4)")
    grow(ledger, 0, 5)
    assert not ledger.fork(0, 1, 5)


# ---------------------------------------------------------------- blocks that are summed up as they stand


def test_a_block_is_emptied_of_later_tokens_before_it_is_written() -> None:
    """Under quest: of a sibling's, of drafts that were thrown away, of one token that was."""
    ledger = under("quest(8)")
    grow(ledger, 0, 7)
    assert ledger.fork(0, 1, 5)
    ledger.free(0)
    assert write(ledger, 1, 1).block_ops.copy == (((3, 3, 1),),)
    grow(ledger, 1, 7)
    assert ledger.allocate_slots([TokenSpan(1, 7, 4)]) is not None
    ledger.commit(1, [7])
    placed = write(ledger, 1, 1)  # 8 goes to a block that a draft has opened
    assert placed.block_ops.copy == ((),) and placed.block_ops.clear == ((blocks(ledger, 1)[2],),)
    grow(ledger, 1, 14, chunk=1)
    assert ledger.allocate_slots([TokenSpan(1, 14, 1)]) is not None  # nothing but a slot to find
    ledger.commit(1, [])
    assert write(ledger, 1, 1).block_ops.copy == (((blocks(ledger, 1)[3],) * 2 + (2,),),)


# ---------------------------------------------------------------- descents


def test_a_tiered_policy_by_hand() -> None:
    """recent 4, packed 8, summaries 4 of ratio 2: blocks go down one by one, two slots of a summary for each."""
    ledger = under("tiered(4, quantized=8, interval=4, summaries=4, ratio=2)")
    told = []
    ledger.add_sequence(0, [0], b"")
    for _ in range(8):
        placed = write(ledger, 0, 4)
        told.append(
            (placed.block_ops.quantize, placed.block_ops.merge, list(blocks(ledger, 0)), list(blocks(ledger, 0, 1)))
        )
    nothing: tuple[tuple[()], ...] = ((), (), ())
    none = (nothing, nothing)
    assert [each[:2] for each in told[:2]] == [none, none]
    assert told[2][:2] == (((), ((2, 2),), ()), nothing)  # at 8: tokens 0..3, block 2 -> packed block 2
    assert told[3][0] == ((), ((3, 3),), ())
    assert told[4][:2] == (((), ((2, 4),), ()), ((), (), (MergeOp(2, 2, 0, 2),)))  # a third: the first is folded
    assert told[4][3] == [3, 4]
    assert told[5][1] == ((), (), (MergeOp(3, 2, 2, 2),))
    assert told[6][1] == ((), (), (MergeOp(4, 3, 0, 3),))  # a second block of summaries: one too many
    assert blocks(ledger, 0, 2) == [3]
    assert told[7][1] == ((), (), (MergeOp(2, 3, 2, 3),))
    assert all(len(each[2]) <= 2 for each in told)
    assert ledger.stats().used == (2, 2, 1)


def test_what_no_level_takes_is_gone() -> None:
    """quantized=0 and no summaries: sinks and the recent tokens are all that a row keeps."""
    ledger = under("tiered(8, quantized=0, interval=8, num_sinks=4)")
    for length in range(8, 48, 8):
        grow(ledger, 0, length + 1)
        assert len(blocks(ledger, 0)) <= 1 + (8 + 8) // 4 == ledger.groups[0].max_blocks_per_seq
    assert len(blocks(ledger, 0)) == 4 and ledger.capacity > 1 << 40


def test_a_block_of_summaries_that_another_row_reads_is_copied() -> None:
    ledger = under("tiered(4, quantized=0, interval=4, summaries=8, ratio=2)")
    grow(ledger, 0, 9)  # tokens 0..3 are folded: half a block
    assert ledger.fork(0, 1, 9)
    grow(ledger, 0, 12)
    assert blocks(ledger, 0, 1) == blocks(ledger, 1, 1) == [2]
    placed = write(ledger, 0, 1)
    (fold,) = placed.block_ops.merge[1]
    assert fold[1:] == (3, 2, 2) and blocks(ledger, 0, 1) == [3]  # into 3, behind what was in 2
    grow(ledger, 1, 12)
    (fold,) = write(ledger, 1, 1).block_ops.merge[1]
    assert fold[1:] == (2, 2, 2) and blocks(ledger, 1, 1) == [2]


# ---------------------------------------------------------------- parked and woken


@pytest.mark.parametrize(
    "policy", ["key-norm(6, interval=4)", "tiered(4, quantized=8, interval=4, summaries=4, ratio=2)"]
)
def test_a_row_is_woken_where_it_stood(policy: str) -> None:
    ledger = under(policy)
    grow(ledger, 0, 27)
    seat = ledger._sequences[0]
    assert seat is not None
    stood = [(len(each.blocks), hold_of(each)) for each in seat.all_groups]
    held = tuple(tuple(each.blocks) for each in seat.all_groups)
    parked = ledger.swap_out(0)
    ledger.check()
    assert not any(ledger.stats().used)
    assert ledger.swap_in(3, parked)
    ledger.check()
    seat = ledger._sequences[3]
    assert seat is not None and [(len(each.blocks), hold_of(each)) for each in seat.all_groups] == stood
    placed = ledger.allocate_slots([TokenSpan(3, 27, 1)])
    assert placed is not None
    assert placed.block_ops.swap_out == ((parked.key, held),)
    assert [key for key, _ in placed.block_ops.swap_in] == [parked.key] and placed.block_ops.drop_swapped == ()
    ledger.commit(3, [27])
    moves = write(ledger, 3, 1).block_ops
    assert not (moves.swap_out or moves.swap_in or moves.drop_swapped)


def hold_of(each: object) -> tuple[object, ...]:
    return tuple(getattr(each, name) for name in ("gap", "dropped", "cut", "used") if hasattr(each, name))


def test_a_row_that_was_woken_and_not_placed_is_parked_under_its_key() -> None:
    ledger = under("0: full; key-norm(6, interval=4)", FULL, WIDE, num_blocks=4)
    grow(ledger, 0, 12)
    first = ledger.swap_out(0)
    assert ledger.swap_in(0, first)
    grow(ledger, 1, 0)
    assert (
        ledger.allocate_slots([TokenSpan(0, 12, 1), TokenSpan(1, 0, 8)]) is None
    )  # one block is left, three are asked for
    ledger.check()
    again = ledger.swap_out(0)
    assert again == first
    ledger.check()
    placed = ledger.allocate_slots([TokenSpan(1, 0, 8)])  # row 1 may have it all
    assert (
        placed is not None
        and [key for key, _ in placed.block_ops.swap_out] == [first.key]
        and not placed.block_ops.swap_in
    )
    ledger.commit(1, list(range(8)))
    before = state(ledger)
    assert not ledger.swap_in(0, again) and state(ledger) == before
    ledger.free(1)
    assert ledger.swap_in(2, again)
    ledger.check()
    placed = ledger.allocate_slots([TokenSpan(2, 12, 1)])
    assert (
        placed is not None
        and [key for key, _ in placed.block_ops.swap_in] == [first.key]
        and not placed.block_ops.swap_out
    )
    ledger.check()


def test_a_woken_row_that_leaves_is_not_woken_and_a_forgotten_one_is_dropped() -> None:
    ledger = under("key-norm(6, interval=4)")
    grow(ledger, 0, 12)
    parked = ledger.swap_out(0)
    assert ledger.swap_in(0, parked)
    ledger.free(0)
    ledger.drop_swapped(parked)
    ledger.check()
    ledger.add_sequence(0, [1], b"")
    placed = ledger.allocate_slots([TokenSpan(0, 0, 1)])
    assert placed is not None and not placed.block_ops.swap_in and placed.block_ops.drop_swapped == (parked.key,)
    assert not any(used - 1 for used in ledger.stats().used)


def test_a_row_about_to_wake_has_nothing_to_share() -> None:
    """A fork of it, parked before the next step, would be copied out before its blocks are filled."""
    ledger = under("key-norm(6, interval=4)")
    grow(ledger, 0, 11)
    assert ledger.swap_in(0, ledger.swap_out(0))
    before = state(ledger)
    assert not ledger.fork(0, 1, 11) and state(ledger) == before
    write(ledger, 0, 1)
    assert ledger.fork(0, 1, 11)
    ledger.check()


def test_a_row_about_to_wake_is_not_rewound() -> None:
    ledger = under("key-norm(6, interval=4)")
    grow(ledger, 0, 12)
    assert ledger.swap_in(0, ledger.swap_out(0))
    with pytest.raises(AssertionError, match="after its next step"):
        ledger.truncate(0, 9)


# ---------------------------------------------------------------- sinks and block-window


def test_a_hit_under_sinks_needs_the_sinks_and_the_window() -> None:
    """sinks(3, 5): of 20 tokens the first block and the last stay; those between may be gone."""
    ledger = under("sinks(3, 5)", max_num_seqs=4)
    grow(ledger, 0, 20, chunk=4)
    assert [placed - 2 for placed in blocks(ledger, 0)] == [0, 3, 4]
    ledger.free(0)
    (pool,) = ledger.pools
    for block in (3, 4, 5):  # logical blocks 1, 2, 3
        pool.unpublish(block)
    ledger.check()
    assert ledger.add_sequence(1, [*range(20), 1], b"") == 20  # 16..19 and the sinks
    ledger.check()
    assert blocks(ledger, 1) == [2, 6]
    placed = write(ledger, 1, 1)
    assert placed.block_tables[0][0][:2] == [2, 6] and len(placed.block_tables[0][0]) == 3
    ledger.free(1)
    pool.unpublish(2)
    assert ledger.add_sequence(1, [*range(20), 1], b"") == 0  # without its sinks there is no hit
    ledger.check()


@pytest.mark.parametrize("policy", ["sinks(3, 5)", "sinks(6, 1)", "block-window(8)", "block-window(6, 2)", "window(1)"])
@pytest.mark.parametrize("length", range(1, 22))
def test_forks_and_rewinds_of_all_lengths_go_on_or_are_refused(policy: str, length: int) -> None:
    ledger = under(policy)
    grow(ledger, 0, 22, chunk=3)
    before = state(ledger)
    if ledger.fork(0, 1, length):
        ledger.check()
        grow(ledger, 1, length + 9, chunk=2)
        ledger.free(1)
    else:
        assert state(ledger) == before
    kept = ledger.truncate(0, length)
    ledger.check()
    assert kept in (0, length)
    grow(ledger, 0, length + 9, chunk=2)
    ledger.free(0)
    assert not any(ledger.stats().used)


# ---------------------------------------------------------------- at random, in full pools


POLICIES = (
    "sinks(3, 5)",
    "block-window(8)",
    "key-norm(6, interval=4)",
    "0: full; key-norm(9, interval=2)",
    "tiered(4, quantized=8, interval=4, summaries=4, ratio=2)",
    "tiered(4, interval=4, num_sinks=4)",
    "tiered(8, quantized=0, interval=8, summaries=4, ratio=4)",
    "0: window(3); tiered(8, quantized=4, interval=4)",
    "quest(8)",
)


def state(ledger: KVCacheManager) -> object:
    """All that a refused reservation must leave as it was."""
    seats = [
        None
        if seat is None
        else (seat.length, seat.num_written, [(list(each.blocks), hold_of(each)) for each in seat.all_groups])
        for seat in ledger._sequences
    ]
    pools = [(list(pool.refs), list(pool._idle), list(pool.prefixes)) for pool in ledger.pools]
    return (
        seats,
        pools,
        list(ledger._swapped.pending_swap_outs),
        dict(ledger._swapped.pending_swap_ins),
        list(ledger._swapped.pending_drops),
    )


def operate(ledger: KVCacheManager, rng: random.Random, asleep: list[SwappedSequence], counts: dict[str, int]) -> None:
    taken = [row for row in range(4) if ledger._sequences[row] is not None]
    empty = [row for row in range(4) if row not in taken]
    draw, row = rng.random(), rng.choice(taken or [0])
    if draw < 0.15 and empty:
        stem = rng.randrange(2)
        ledger.add_sequence(empty[0], [stem] * rng.randint(1, 30), b"")
    elif draw < 0.25 and taken and empty:
        counts["forks"] += ledger.fork(row, empty[0], rng.randint(0, ledger.seq_len(row)))
    elif draw < 0.30 and taken and row not in ledger._swapped.pending_swap_ins:
        ledger.truncate(row, rng.randint(0, ledger.seq_len(row)))
    elif draw < 0.36 and taken:
        ledger.free(row)
    elif draw < 0.42 and taken and ledger.lossy:
        asleep.append(ledger.swap_out(row))
    elif draw < 0.50 and asleep and empty:
        if ledger.swap_in(empty[0], asleep[0]):
            counts["woken"] += 1
            asleep.pop(0)
    elif draw < 0.51 and asleep:
        ledger.drop_swapped(asleep.pop())
    elif taken:
        reserve(ledger, rng, taken, counts)


def reserve(ledger: KVCacheManager, rng: random.Random, taken: list[int], counts: dict[str, int]) -> None:
    spans = []
    for row in rng.sample(taken, rng.randint(1, len(taken))):
        count = min(rng.choice((1, 1, 8)), ledger.tokens_until_eviction(row), 48 - ledger.seq_len(row))
        if count > 0:
            spans.append(TokenSpan(row, ledger.seq_len(row), count))
    before, clone = state(ledger), copy.deepcopy(ledger) if counts["refused"] < 30 else None
    if ledger.allocate_slots(spans) is None:
        assert state(ledger) == before, "a refused reservation changed something"
        counts["refused"] += 1
        if clone is not None:  # would it have been possible?
            clone._allocator._has_blocks = lambda *_: True  # type: ignore[method-assign]
            clone._allocator.demotion.has_room = lambda *_: True  # type: ignore[method-assign]
            with pytest.raises(KeyError, match="dictionary is empty"):
                clone.allocate_slots(spans)
        ledger.free(taken[0])
        return
    counts["placed"] += 1
    for row, _, count in spans:
        ledger.commit(row, [row % 2] * (count if rng.random() < 0.9 else rng.randint(0, count)))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_reservation_succeeds_or_changes_nothing(policy: str) -> None:
    rng = random.Random(policy)
    mixers = (FULL, WIDE) if ":" in policy else (FULL,)
    ledger = KVCacheManager(made(policy, *mixers, tight=-1), prefix_caching=False, max_num_seqs=4)
    asleep: list[SwappedSequence] = []
    counts = dict.fromkeys(("refused", "placed", "forks", "woken"), 0)
    for _ in range(800):
        operate(ledger, rng, asleep, counts)
        ledger.check()
    assert counts["refused"] > 5 and counts["placed"] > 100 and counts["forks"] > 5
    assert counts["woken"] > 5 or not ledger.lossy
    for row in range(4):
        if ledger._sequences[row] is not None:
            ledger.free(row)
    assert not any(ledger.stats().used)
