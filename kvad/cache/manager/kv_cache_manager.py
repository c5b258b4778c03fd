"""Which blocks a row may read and where it writes: the host face of the cache.  Integers only, no torch.

A row sits in a seat (its index, kept for life).  Position p belongs to its logical block ``p // bs``.  In each cache
group the row holds its blocks in order, but for a ``gap``: so many logical blocks, behind those that hold sinks, that
no query can see any more.  A group with one block per row (contiguous) is a ring behind its sinks.

Where a policy ranks (``policy.Scored``), a row is *cut* when it has reached a length: of the slots that it holds it
keeps a number, filled up from the front, so that position p lies where ``p - dropped`` would.  Which tokens they are is
the device's to know.  Where it keeps levels, whole blocks descend (``descent.py``).

    bs = 4, no sinks,  gap = 2, blocks = [7, 3]:     positions 8..11 in block 7, 12..15 in block 3;  13 = slot 3*4 + 1
    bs = 4, 3 sinks,   gap = 2, blocks = [5, 7, 3]:  positions 0..3 in block 5, 12..15 in block 7, 16..19 in block 3

What a group asks of its rows stands in ``rules.py``; what is known of their tokens in ``chains.py``; how they get
blocks for what they write in ``growth.py``; rows that leave and come back in ``away.py``; their sources in
``sources.py``.  The ledger seats rows, and is the one door to all of that.

Promises:

* what those modules promise: blocks that change hands are told, shared ones are not written, prefixes are whole;
* a row's source (cross-attention) is held from :meth:`attach` to :meth:`release`, and written once;
* a windowed row keeps what the first query of its next span needs, and no block before that;
* :meth:`Ledger.reserve` places all spans or changes nothing.

Never: a torch import, a decision about which request runs, a look at a key, a value or a score.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvad.cache.groups import CacheGroup
from kvad.cache.manager.allocation import BlockAllocator, TokenSpans
from kvad.cache.manager.block_mapping import BlockMapping
from kvad.cache.manager.block_pool import BlockPool, HashFn, LowestFreeBlockPool, PrefixIndex, digest
from kvad.cache.manager.demotion import LevelDemotion, max_blocks
from kvad.cache.manager.encoder_blocks import EncoderAllocation, EncoderBlocks, EncoderSequence
from kvad.cache.manager.portable_layout import GroupLayout, SequenceLayout, held_range
from kvad.cache.manager.prefix_cache import PrefixCache
from kvad.cache.manager.prefix_offload import BlockStoreProtocol, PrefetchRequest, PrefixOffload
from kvad.cache.manager.sequence_blocks import NEVER, SequenceBlocks, SwappedSequence
from kvad.cache.manager.swapped import SwappedSequences
from kvad.cache.policy import OffloadPolicy
from kvad.model_input import BlockOps


class BlockAllocation(NamedTuple):
    """Where a step's tokens go.

    ``slots``: per group that takes tokens, one slot per token, in span order.  ``tables``: per group (``below`` levels
    behind those that take tokens, then those of cross-attention), per span, the blocks that the row may read after this
    write; the ledger's own lists, valid until its next call: read, do not keep or change.
    """

    block_ops: BlockOps
    slots: tuple[list[int], ...]
    block_tables: tuple[list[list[int]], ...]
    num_lower_levels: int = 0


@dataclass(frozen=True)
class CacheStats:
    """Blocks per group: ``total`` = ``used`` + ``free`` + ``evictable``, evictions so far, ``peak``: the most in use at
    once since :meth:`Ledger.restart_peak`, and ``watermark``: those that an admission leaves free.  Prefix cache:
    admissions that hit and that did not, and the tokens that need no computing because of hits."""

    total: tuple[int, ...]
    used: tuple[int, ...]
    free: tuple[int, ...]
    evictable: tuple[int, ...]
    evictions: tuple[int, ...]
    hits: int
    misses: int
    hit_tokens: int
    peak: tuple[int, ...]
    watermark: tuple[int, ...]


class KVCacheManager:
    """Owns one :class:`BlockPool` per group and the rows in ``seats`` seats.  ``watermark``: share of a pool, of what
    rows grow in, that :meth:`fits` leaves free.  ``tier``: where published blocks go on beyond the pools."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        prefix_caching: bool,
        max_num_seqs: int,
        hash_fn: HashFn = digest,
        watermark: float = 0.0,
        block_store: BlockStoreProtocol | None = None,
    ) -> None:
        self.groups = tuple(groups)  # those that take tokens first, then their levels, then those of sources
        own = [group for group in self.groups if not group.spec.is_cross_attention and group.lower_level is None]
        below = [group for group in self.groups if group.lower_level is not None]
        assert self.groups[: len(own)] == tuple(own), "what takes tokens stands before all others"
        assert self.groups[len(own) : len(own) + len(below)] == tuple(below), "levels stand before cross-attention"
        self.token_groups, self.lower_groups = tuple(own), tuple(below)
        self._kept = len(own) + len(below)
        self.watermark_blocks = tuple(
            math.ceil(watermark * group.num_usable_blocks) for group in self.groups[: self._kept]
        )
        self.pools = tuple(_pool(group) for group in self.groups)
        self._pools = self.pools[: len(own)]
        self.num_frees = 0  # grows when a row gives its blocks back: a reason to try an admission again
        self._max_num_seqs: list[SequenceBlocks | None] = [None] * max_num_seqs
        self.block_mappings = tuple(map(BlockMapping, self.token_groups))
        descents = LevelDemotion(self.groups, self.pools, len(own))
        self._growth = BlockAllocator(self.block_mappings, self.pools, self._max_num_seqs, descents)
        # A preempted row is parked, never computed again.
        self.uses_offload = any(isinstance(group.demotion_policy, OffloadPolicy) for group in self.token_groups)
        self.lossy = not self.uses_offload and any(
            group.eviction_policy or group.demotion_policy for group in self.token_groups
        )
        self._watched = any(
            group.eviction_policy is not None and group.eviction_policy.observed_queries for group in self.token_groups
        )
        # A row of one block can share no full block and leave one token to compute: nothing to publish.
        # Nor are blocks of a row that spills: they leave its table, and whoever found them would have no room for all.
        rings = any(rules.is_ring for rules in self.block_mappings)
        self.prefix_caching = (
            prefix_caching and bool(self.token_groups) and not (rings or self.uses_offload or self.lossy)
        )
        assert not self.prefix_caching or len({rules.block_size for rules in self.block_mappings}) == 1, (
            "prefix reuse needs one block size"
        )
        deposits = (
            PrefixOffload(block_store, len(self.groups)) if block_store is not None and self.prefix_caching else None
        )
        if deposits is not None:
            for index, pool in enumerate(self._pools):
                pool.on_evict = partial(deposits.on_evicted, index)
        prefixes = PrefixIndex(hash_fn)
        self._chains = PrefixCache(self.block_mappings, self._pools, prefixes, deposits)
        self._away = SwappedSequences(self.pools[: self._kept], len(own))
        firsts = [next((self.groups[number] for number in levels), None) for levels in descents.below]
        longest = [rules.max_length(first) for rules, first in zip(self.block_mappings, firsts, strict=True)]
        self.capacity = min(longest, default=sys.maxsize)
        kept = self._kept
        self._sources = EncoderBlocks(self.groups[kept:], self.pools[kept:], prefixes, share=self.prefix_caching)

    @property
    def prefix_offload(self) -> PrefixOffload | None:
        """What is said to the tiers, where there are any and prefixes are shared."""
        return self._chains.offload

    # ------------------------------------------------------------ rows come and go

    def add_sequence(
        self,
        row: int,
        tokens: Sequence[int],
        root: bytes,
        most: int | None = None,
        fetch: PrefetchRequest | None = None,
    ) -> int | None:
        """Seat a row and claim the longest known prefix of ``tokens``; returns its length, None if the seat is taken.

        A hit is a multiple of the block size and covers at most ``len(tokens) - 1`` tokens (one is left to compute),
        at most ``most`` where given.  A group with a window needs only the blocks of the last ``window - 1`` tokens.
        ``fetch``, which is ready: what of these tokens the tiers gave back; it stands in the pools after the next step.
        """
        if self._max_num_seqs[row] is not None:
            return None
        seat = SequenceBlocks(
            len(self.token_groups),
            len(self.lower_groups),
            self._chains.prefixes.root(root) if self.prefix_caching else None,
        )
        self._max_num_seqs[row] = seat
        if seat.root is None:
            return 0
        seat.length = seat.num_written = self._chains.acquire_longest(row, seat, tokens, _longest(tokens, most), fetch)
        return seat.length

    def prefetch(self, tokens: Sequence[int], root: bytes, most: int | None = None) -> PrefetchRequest:
        """What the tiers have of these tokens and no pool does (``chains.py``); nothing moves before it is started."""
        return self._chains.prefetch(tokens, root, _longest(tokens, most))

    def block_keys(self, tokens: Sequence[int], root: bytes) -> list[str]:
        """Under which keys the tiers have the whole blocks of these tokens."""
        return self._chains.block_keys(tokens, root)

    def fork(self, row: int, child: int, length: int) -> bool:
        """Seat ``child`` on the first ``length`` tokens of ``row``: blocks are shared until one of them writes.

        False, and nothing changed: a window of ``row`` has moved past what a query at ``length`` needs, or a cut has
        dropped it, or a policy watches the attention that blocks get, which is a row's own; or ``row`` is about to
        wake or to be loaded, and its blocks are empty until its next step.
        """
        seat = self._seat(row)
        if self._watched or self.is_loading(row) or any(hold.last_eviction_length > length for hold in seat.groups):
            return False
        assert self._max_num_seqs[child] is None and 0 <= length <= seat.length, (row, child, length, seat.length)
        if not self._window_held(seat, length):
            return False
        twin = SequenceBlocks(len(self.token_groups), len(self.lower_groups), seat.root)
        for pool, old_below, new_below in zip(
            self.pools[len(self.token_groups) :], seat.lower_levels, twin.lower_levels, strict=False
        ):
            new_below.blocks, new_below.num_used_slots = list(old_below.blocks), old_below.num_used_slots
            for block in new_below.blocks:
                pool.incref(block)
        twin.encoder_sequence = None if seat.encoder_sequence is None else self._sources.share(seat.encoder_sequence)
        for rules, pool, old, new in zip(self.block_mappings, self._pools, seat.groups, twin.groups, strict=True):
            rules.copy_for_fork(old, new, length)
            for block in new.blocks:
                pool.incref(block)
        one = any(rules.is_ring for rules in self.block_mappings)
        end = seat.num_written if one else self.block_mappings[0].num_blocks(length) * self.block_mappings[0].block_size
        twin.length, twin.num_written = length, max(length, min(seat.num_written, end))
        twin.last_block, twin.tail_tokens = self._chains.history(seat, length)
        seat.fast_path_start = NEVER
        self._max_num_seqs[child] = twin
        return True

    def truncate(self, row: int, length: int) -> int:
        """Drop the tokens from ``length`` on; returns the length kept.

        It is 0 when a window has moved past what a query at ``length`` needs: the row is then empty, compute it anew.
        """
        seat = self._seat(row)
        assert not self.is_loading(row), "what was parked or stored comes back whole: rewind it after its next step"
        if length >= seat.length:
            return seat.length
        if (
            length == 0
            or not self._window_held(seat, length)
            or any(hold.last_eviction_length > length for hold in seat.groups)
        ):
            self._release_all(seat)
            seat.reset()
            self.num_frees += 1
            return 0
        for rules, pool, hold in zip(self.block_mappings, self._pools, seat.groups, strict=True):
            keep = rules.blocks_after_truncate(hold, length)
            _release(pool, hold.blocks[keep:])
            hold.blocks = hold.blocks[:keep]
            if keep <= rules.num_sink_blocks and not rules.is_ring and rules.eviction_policy is None:
                hold.num_skipped_blocks = min(
                    hold.num_skipped_blocks, max(0, length // rules.block_size - rules.num_sink_blocks)
                )
        seat.last_block, seat.tail_tokens = self._chains.history(seat, length)
        seat.length = length
        seat.fast_path_start = NEVER
        self.num_frees += 1
        return length

    def free(self, row: int, publish: bool = True) -> None:
        """The row leaves its seat.  Blocks go back in reverse, so that the ends of prefixes are evicted first.

        ``publish=False`` (a fault: its numbers cannot be trusted, and chunks of it were committed before anybody
        looked at a logit) withdraws every prefix on this row's way, its own and those it claimed: nobody finds them
        again.  Rows that already count on such a block keep it.
        """
        seat = self._seat(row)
        fetched = None if self.prefix_offload is None else self.prefix_offload.on_released(row)
        if not publish:
            self._chains.invalidate(seat.last_block)
            self._chains.invalidate(fetched)
        self._release_all(seat)
        if seat.encoder_sequence is not None:
            self._sources.release(seat.encoder_sequence, publish=publish)
        self._max_num_seqs[row] = None
        self._away.pending_swap_ins.pop(row, None)  # it was about to wake: what is parked stays parked
        self.num_frees += 1

    def swap_out(self, row: int) -> SwappedSequence:
        """A row leaves its seat and will have its blocks as they are again: they are copied out, then freed."""
        seat = self._seat(row)
        assert row in self._away.pending_swap_ins or not self.is_loading(row), (
            "a row that waits for its blocks has nothing to copy"
        )
        assert not self.uses_offload, "what is spilled is not copied out: such a row is computed again"
        parked = self._away.swap_out(row, seat)
        self.free(row)
        return parked

    def swap_in(self, row: int, parked: SwappedSequence) -> bool:
        """Seat a parked row where it stood; False, and no change: there is no room now."""
        assert self._max_num_seqs[row] is None, f"seat {row} is taken"
        seat = self._max_num_seqs[row] = self._away.swap_in(row, parked)
        return seat is not None

    def export_layout(self, row: int) -> SequenceLayout | None:
        """What the row holds, and where, for whoever reads it before the next step; None: it is not there yet."""
        if self.is_loading(row):
            return None
        seat, groups = self._seat(row), self.token_groups
        holds = tuple(
            (held_range(group, hold, seat.length, seat.num_written), hold.num_skipped_blocks, tuple(hold.blocks))
            for group, hold in zip(groups, seat.groups, strict=True)
        )
        below = tuple((each.num_used_slots, tuple(each.blocks)) for each in seat.lower_levels)
        source = seat.encoder_sequence
        tokens, crossed = (None, ()) if source is None else (source.tokens, tuple(map(tuple, source.blocks)))
        return SequenceLayout(seat.length, holds, below, tokens, crossed)

    def import_sequence(
        self,
        tokens: Sequence[int],
        root: bytes,
        laid: Sequence[GroupLayout],
        below: Sequence[tuple[int, int]],
        *,
        source: bool,
    ) -> SwappedSequence:
        """A row of these ``tokens`` from elsewhere, as if it had been parked here: ``laid`` per group that takes
        tokens, (blocks, filled slots) per level; ``source``: its source's keys and values come with it.  Its full
        blocks are published under ``root`` when it has gone on, where that is done."""
        begin = self._chains.prefixes.root(root) if self.prefix_caching else None
        return self._away.import_sequence(tokens, begin, laid, below, source=source)

    def drop_swapped(self, parked: SwappedSequence) -> None:
        """A parked row will not come back."""
        self._away.drop(parked)

    @property
    def pending_swap_outs(self) -> list[int]:
        """Keys of parked rows that have yet to be copied out: with the next moves."""
        return [key for key, _ in self._away.pending_swap_outs]

    @property
    def pending_swap_ins(self) -> list[int]:
        """Keys of parked rows that are seated again, and have yet to be copied in: with the next moves of their own."""
        return [each.sequence.key for each in self._away.pending_swap_ins.values()]

    def num_blocks(self, row: int) -> list[int]:
        """Blocks that the row holds in each group, those of sources apart."""
        return [len(each.blocks) for each in self._seat(row).all_groups]

    def retained_prefix_length(self, row: int) -> int:
        """Tokens from the row's start on that would still be known if it gave its blocks back: others hold them."""
        return self._chains.retained_prefix_length(self._seat(row))

    def cached_prefix_length(self, tokens: Sequence[int], root: bytes) -> int:
        """Tokens of which an admission would find the blocks now."""
        start = self._chains.prefixes.root(root) if self.prefix_caching else None
        return (
            0
            if start is None
            else len(self._chains.find(start, tokens, len(tokens) - 1)) * self.block_mappings[0].block_size
        )

    def tokens_until_eviction(self, row: int) -> int:
        """Tokens until the row is cut next: no span goes further."""
        length = self._seat(row).length
        policies = [
            policy for rules in self.block_mappings for policy in (rules.eviction_policy, rules.demotion_policy)
        ]
        return (
            min((policy.next_trigger_length(length) for policy in policies if policy is not None), default=NEVER)
            - length
        )

    def reset_prefix_cache(self) -> None:
        """Forget every published block (the weights changed); rows that are seated or parked now publish no more."""
        self._away.drop_prefixes()
        for pool in self.pools:
            for block in pool.published():
                pool.unpublish(block)
        if self.prefix_offload is not None:
            self.prefix_offload.forget()
        for seat in self._max_num_seqs:
            if seat is not None:
                seat.root = seat.last_block = None
                if seat.encoder_sequence is not None:
                    seat.encoder_sequence.cache_key = None

    # ------------------------------------------------------------ sources

    @property
    def max_source_len(self) -> int:
        """Tokens of the longest source; 0 for a model without cross-attention."""
        return self._sources.max_source_len

    def attach_encoder_input(self, row: int, tokens: Sequence[int], root: bytes) -> bool | None:
        """Give a seated row its source.  True: it is encoded already; False: it is to be; None: there is no room."""
        seat = self._seat(row)
        assert seat.encoder_sequence is None, f"row {row} has a source"
        seat.encoder_sequence = self._sources.attach(tokens, root)
        return None if seat.encoder_sequence is None else seat.encoder_sequence.written

    def restore_encoder_blocks(self, row: int) -> None:
        """The source of a row that is about to wake comes back with it, and need not be encoded.  Others do not find
        it: it is not there before the row's next step."""
        source = self._source(row)
        assert not source.written, "a source is written once"
        self._away.restore_encoder_blocks(row, source.blocks)
        source.written, source.cache_key = True, None

    def share_encoder_blocks(self, row: int, child: int) -> None:
        """Give ``child``, a seated row, the source of ``row``."""
        source, seat = self._seat(row).encoder_sequence, self._seat(child)
        assert source is not None and seat.encoder_sequence is None, (row, child)
        seat.encoder_sequence = self._sources.share(source)

    def allocate_encoder_slots(self, rows: Sequence[int]) -> EncoderAllocation:
        """Where the encoder writes the sources of these rows, in their order."""
        return self._sources.allocate_slots([self._source(row) for row in rows], self._kept)

    def commit_encoder_blocks(self, row: int) -> None:
        """The row's source is written, and what came out was finite."""
        self._sources.commit(self._source(row))

    def _source(self, row: int) -> EncoderSequence:
        source = self._seat(row).encoder_sequence
        assert source is not None, f"row {row} has no source"
        return source

    # ------------------------------------------------------------ a step

    def allocate_slots(self, spans: TokenSpans) -> BlockAllocation | None:
        """Room for every span, or None and no change: a pool is too full.  At most one span per row."""
        seats = self._max_num_seqs
        slow = []
        for span in spans:
            seat = seats[span[0]]
            assert seat is not None and span[1] == seat.length, f"span {span} does not start at its row's end"
            if span[2] != 1 or not seat.fast_path_start <= span[1] < seat.fast_path_end:
                slow.append(span)
        moves = self._growth.allocate(slow) if slow else self._no_moves()
        if moves is None:
            return None
        moves = self._away.attach_to_ops(moves, [span[0] for span in spans])
        if self.prefix_offload is not None and self.prefix_offload.pending:
            moves = moves._replace(store=self.prefix_offload.take_stores(), load=self.prefix_offload.take_loads())
        slots: tuple[list[int], ...] = tuple([] for _ in self.token_groups)
        tables: tuple[list[list[int]], ...] = tuple([] for _ in self.groups)
        pairs = [(where.append, table.append) for where, table in zip(slots, tables, strict=False)]
        lower, crossed = tables[len(self.token_groups) : self._kept], tables[self._kept :]
        for row, start, count in spans:
            seat = seats[row]
            assert seat is not None
            if count == 1 and seat.fast_path_start <= start < seat.fast_path_end:
                for hold, (put, show) in zip(seat.groups, pairs, strict=True):
                    put(hold.slot_offset + start)
                    show(hold.blocks)
            else:
                self._place(seat, start, start + count, slots, tables)
            for table, below in zip(lower, seat.lower_levels, strict=True):
                table.append(below.blocks)
            if crossed:
                for table, blocks in zip(crossed, self._source(row).blocks, strict=True):
                    table.append(blocks)
            if start + count > seat.num_written:
                seat.num_written = start + count
        return BlockAllocation(moves, slots, tables, len(self.lower_groups))

    def commit(self, row: int, tokens: Sequence[int], sure: int | None = None) -> None:
        """The row's next ``tokens`` are computed: prompt and generated ones alike.

        Full blocks are published, those within the row's first ``sure`` tokens where given: finite logits have been
        seen at or behind their last token.  The others wait for a later commit.
        """
        seat = self._seat(row)
        seat.length += len(tokens)
        assert seat.length <= seat.num_written, (
            f"row {row} commits {seat.length} tokens, {seat.num_written} were reserved"
        )
        if seat.length < seat.num_written:
            seat.fast_path_start = NEVER  # later tokens stand where the next one goes
        if seat.last_block is not None:
            if seat.republish:
                self._chains.republish(seat)
            seat.tail_tokens.extend(tokens)
            if len(seat.tail_tokens) >= self.block_mappings[0].block_size:
                self._chains.publish(seat, seat.length if sure is None else sure)
        if self.prefix_offload is not None:
            self.prefix_offload.on_released(row)

    def flush_offload(self) -> BlockOps | None:
        """What is to be copied out, where no step is about to do it; None: nothing."""
        if self.prefix_offload is None or not self.prefix_offload.pending:
            return None
        stores = self.prefix_offload.take_stores()
        return self._no_moves()._replace(store=stores) if stores else None

    # ------------------------------------------------------------ questions

    def seq_len(self, row: int) -> int:
        return self._seat(row).length

    def is_loading(self, row: int) -> bool:
        """Are the row's blocks still empty?  It is about to wake, or to be given what the tiers had: with its step."""
        return row in self._away.pending_swap_ins or (
            self.prefix_offload is not None and self.prefix_offload.is_loading(row)
        )

    def has_capacity(self, rows: int, length: int) -> bool:
        """Do ``rows`` rows of ``length`` tokens have room, if nothing else is there and they share nothing?"""
        return all(
            rows * max_blocks(group, self.groups, length) <= group.num_usable_blocks
            for group in self.groups[: self._kept]
        )

    def can_allocate(self, row: int, length: int, others: Sequence[tuple[int, int]] = ()) -> bool:
        """Could this row grow to ``length`` tokens with what is free or evictable now, above the watermark, and
        ``others`` (row, length) to theirs?"""
        rows = [(self._seat(row), length), *((self._seat(other), most) for other, most in others)]
        for index, (group, pool) in enumerate(zip(self.groups[: self._kept], self.pools, strict=False)):
            need = sum(
                max(0, max_blocks(group, self.groups, most) - len(s.all_groups[index].blocks)) for s, most in rows
            )
            if need > pool.num_available - self.watermark_blocks[index]:
                return False
        return True

    def needs_blocks(self, row: int, count: int) -> bool:
        """Do the row's next ``count`` tokens need blocks that it does not have?"""
        return self._growth.needs_blocks(row, count)

    def reset_peak(self) -> None:
        """Count :attr:`LedgerStats.peak` from what is in use now."""
        for pool in self.pools:
            pool.reset_peak()

    def stats(self) -> CacheStats:
        pools = self.pools
        return CacheStats(
            total=tuple(pool.total for pool in pools),
            used=tuple(pool.num_live for pool in pools),
            free=tuple(pool.num_free for pool in pools),
            evictable=tuple(pool.evictable for pool in pools),
            evictions=tuple(pool.evictions for pool in pools),
            hits=self._chains.hits,
            misses=self._chains.misses,
            hit_tokens=self._chains.hit_tokens,
            peak=tuple(pool.peak for pool in pools),
            watermark=self.watermark_blocks + (0,) * (len(pools) - len(self.watermark_blocks)),
        )

    def check(self) -> None:
        """Assert the block law of every pool, and that rows own exactly what the pools count, where they need it."""
        for index, pool in enumerate(self.pools):
            pool.check()
            refs = [0] * len(pool.refs)
            for number, seat in enumerate(self._max_num_seqs):
                if seat is None:
                    continue
                if index < len(self.token_groups):
                    self._check_hold(index, number, seat)
                    blocks = seat.groups[index].blocks
                elif index < self._kept:
                    blocks = seat.lower_levels[index - len(self.token_groups)].blocks
                    assert len(blocks) <= self.groups[index].max_blocks_per_seq, f"group {index}: too many blocks"
                else:
                    blocks = [] if seat.encoder_sequence is None else seat.encoder_sequence.blocks[index - self._kept]
                for block in blocks:
                    refs[block] += 1
            assert refs == pool.refs, f"group {index}: rows count on other blocks than the pool says"

    # ------------------------------------------------------------ inside

    def _seat(self, row: int) -> SequenceBlocks:
        seat = self._max_num_seqs[row]
        assert seat is not None, f"seat {row} is empty"
        return seat

    def _release_all(self, seat: SequenceBlocks) -> None:
        for hold, pool in zip(seat.all_groups, self.pools, strict=False):
            _release(pool, hold.blocks)

    def _no_moves(self) -> BlockOps:
        nothing: tuple[()] = ()
        empty = (nothing,) * len(self.groups)
        return BlockOps(empty, empty)

    def _window_held(self, seat: SequenceBlocks, length: int) -> bool:
        """Does every group still hold the keys that a query at position ``length`` needs?"""
        if length < seat.min_truncate_length:
            return False
        holds = zip(self.block_mappings, seat.groups, strict=True)
        return all(rules.has_window(hold, seat.num_written, length) for rules, hold in holds)

    def _place(
        self,
        seat: SequenceBlocks,
        start: int,
        end: int,
        slots: tuple[list[int], ...],
        tables: tuple[list[list[int]], ...],
    ) -> None:
        """Slots of positions start .. end - 1, and how long the next tokens may take the fast way."""
        fast = NEVER
        for rules, hold, into, table in zip(self.block_mappings, seat.groups, slots, tables, strict=False):
            most = rules.group.max_blocks_per_seq
            assert len(hold.blocks) <= most, f"a row outgrows its {most} blocks"
            fast = min(fast, rules.slots(hold, start, end, into))
            table.append(hold.blocks)
        seat.fast_path_start, seat.fast_path_end = end, fast

    def _check_hold(self, index: int, row: int, seat: SequenceBlocks) -> None:
        hold, rules, where = seat.groups[index], self.block_mappings[index], f"group {index}, row {row}"
        rules.check(hold, seat, where)
        if rules.is_ring or rules.eviction_policy is not None:
            return
        for place, block in enumerate(hold.blocks):
            logical = place if place < rules.num_sink_blocks else place + hold.num_skipped_blocks
            prefix = self.pools[index].prefixes[block]
            assert prefix is None or prefix.depth == logical + 1, f"{where}: block {block} is published elsewhere"


def _longest(tokens: Sequence[int], most: int | None) -> int:
    """Tokens that a hit covers at most: one is left to compute."""
    return len(tokens) - 1 if most is None else min(most, len(tokens) - 1)


def _release(pool: BlockPool, blocks: list[int]) -> None:
    for block in reversed(blocks):
        pool.decref(block)


def _pool(group: CacheGroup) -> BlockPool:
    spilled = group.lower_level is not None and group.lower_level.is_offloaded
    return LowestFreeBlockPool(group.num_blocks) if spilled else BlockPool(group.num_blocks)
