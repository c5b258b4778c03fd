"""Rows that left their seats and will have their blocks back as they were, and rows from elsewhere that come likewise.

    park   blocks are copied out, then freed       wake     as many are taken, and filled with the row's next step
    adopt  a row that was never here, as if it had been parked                 forget   it will not come back

What is to be copied and dropped is told with the next moves (:meth:`Away.told`), a waking row's with those of its own
step: a step that fails ends its rows, so none goes on with blocks that were never filled.

Invariant: a key is used once.  Integers only, no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvad.cache.manager.block_pool import BlockPool, PrefixNode
from kvad.cache.manager.portable_layout import GroupLayout
from kvad.cache.manager.sequence_blocks import PublishedPrefix, SequenceBlocks, SwappedSequence
from kvad.model_input import BlockOps

SwapCopy = tuple[int, tuple[tuple[int, ...], ...]]  # a key, and blocks per group


class PendingSwapIn(NamedTuple):
    """A row that is seated again: as it was parked, and what its next step fills."""

    sequence: SwappedSequence
    blocks: tuple[tuple[int, ...], ...]


class SwappedSequences:
    """``pools``: of the groups that a row's tokens are in, ``own`` that take tokens, then their levels."""

    def __init__(self, pools: Sequence[BlockPool], own: int) -> None:
        self._pools, self._own = tuple(pools), own
        self._keys = self._epoch = 0  # keys so far; times that all prefixes were forgotten
        self.pending_swap_outs: list[SwapCopy] = []  # told with the next moves
        self.pending_swap_ins: dict[int, PendingSwapIn] = {}  # by row
        self.drop_next: list[int] = []

    def swap_out(self, row: int, seat: SequenceBlocks) -> SwappedSequence:
        """What the row's blocks are known by when it has left its seat, which it is about to do."""
        if row in self.pending_swap_ins:  # it has not moved since it was to wake
            return self.pending_swap_ins[row].sequence
        key = self._key()
        self.pending_swap_outs.append((key, tuple(tuple(hold.blocks) for hold in seat.all_groups)))
        holds = tuple(
            (len(hold.blocks), hold.num_skipped_blocks, hold.num_evicted_tokens, hold.last_eviction_length)
            for hold in seat.groups
        )
        below = tuple((len(each.blocks), each.num_used_slots) for each in seat.lower_levels)
        known = (
            None
            if seat.root is None
            else PublishedPrefix(seat.root, seat.last_block, tuple(seat.tail_tokens), self._epoch)
        )
        return SwappedSequence(key, seat.length, holds, below, known, seat.min_truncate_length)

    def swap_in(self, row: int, parked: SwappedSequence) -> SequenceBlocks | None:
        """The row's new seat, with blocks that its next step fills; None, and no change: there is no room now."""
        counts = [count for count, *_ in (*parked.groups, *parked.lower_levels)]
        if any(count > pool.num_available for count, pool in zip(counts, self._pools, strict=True)):
            return None
        known = parked.published if parked.published is not None and parked.published.epoch == self._epoch else None
        seat = SequenceBlocks(self._own, len(self._pools) - self._own, None if known is None else known.root)
        if known is not None:
            seat.last_block, seat.tail_tokens, seat.republish = known.last_block, list(known.tail_tokens), True
        seat.length = seat.num_written = parked.length
        seat.min_truncate_length = parked.min_truncate_length
        for hold, (_, *marks) in zip(seat.groups, parked.groups, strict=True):
            hold.num_skipped_blocks, hold.num_evicted_tokens, hold.last_eviction_length = marks
        for level, (_, used) in zip(seat.lower_levels, parked.lower_levels, strict=True):
            level.num_used_slots = used
        for each, pool, count in zip(seat.all_groups, self._pools, counts, strict=True):
            each.blocks = [pool.allocate()[0] for _ in range(count)]
        self.pending_swap_ins[row] = PendingSwapIn(parked, tuple(tuple(hold.blocks) for hold in seat.all_groups))
        return seat

    def import_sequence(
        self,
        tokens: Sequence[int],
        begin: PrefixNode | None,
        laid: Sequence[GroupLayout],
        below: Sequence[tuple[int, int]],
        *,
        source: bool,
    ) -> SwappedSequence:
        """As :meth:`Ledger.adopt <kvad.cache.manager.kv_cache_manager.KVCacheManager.import_sequence>`; ``begin``: the root under which it may publish."""
        length = len(tokens)
        holds = tuple(
            (each.count, each.num_skipped_blocks, each.held_range.num_evicted, each.held_range.last_eviction_length)
            for each in laid
        )
        floor = 0 if all(each.whole for each in laid) else length
        known = None if begin is None or floor else PublishedPrefix(begin, begin, tuple(tokens), self._epoch)
        return SwappedSequence(self._key(), length, holds, tuple(below), known, floor, source)

    def drop(self, parked: SwappedSequence) -> None:
        """It will not come back."""
        self.drop_next.append(parked.key)

    def drop_prefixes(self) -> None:
        """Rows that are away publish no more."""
        self._epoch += 1

    def restore_encoder_blocks(self, row: int, blocks: Sequence[Sequence[int]]) -> None:
        """A waking row's source comes back with it."""
        parked, own = self.pending_swap_ins[row]
        self.pending_swap_ins[row] = PendingSwapIn(parked, (*own, *map(tuple, blocks)))

    def attach_to_ops(self, moves: BlockOps, rows: Collection[int]) -> BlockOps:
        """With what was parked and given up since moves were last told, and those of these ``rows`` that wake."""
        if not (self.pending_swap_outs or self.pending_swap_ins or self.drop_next):
            return moves
        woken = [self.pending_swap_ins.pop(row) for row in sorted(set(rows) & self.pending_swap_ins.keys())]
        wake = tuple((parked.key, blocks) for parked, blocks in woken)
        moves = moves._replace(swap_out=tuple(self.pending_swap_outs), swap_in=wake, drop_swapped=tuple(self.drop_next))
        self.pending_swap_outs, self.drop_next = [], []
        return moves

    def _key(self) -> int:
        self._keys += 1
        return self._keys - 1
