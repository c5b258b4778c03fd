"""Demotion of older tokens to lower groups (``policy.TieredPolicy``), on the host. No torch.

When a sequence's length reaches a multiple of ``interval``, the blocks that are no longer recent leave the group that
takes tokens. They are quantized into blocks of the next level, or merged into a few of its slots. What exceeds a
level's size is demoted to the next one; after the last level it is dropped.

    recent 8, quantized 16, block size 4, 32 tokens:  blocks 6 7 unchanged | 2 3 4 5 quantized | 0 1 merged or dropped
"""

from __future__ import annotations

from collections.abc import Sequence

from kvad.cache.groups import CacheGroup
from kvad.cache.manager.block_pool import BlockPool
from kvad.cache.manager.sequence_blocks import GroupBlocks, LevelBlocks, SequenceBlocks
from kvad.model_input import BlockOps, MergeOp


def max_blocks(group: CacheGroup, groups: Sequence[CacheGroup], length: int) -> int:
    """Return the maximum number of blocks that a sequence of ``length`` tokens holds in a group."""
    if group.lower_level is not None:
        policy = groups[group.lower_level.token_group].demotion_policy
        assert policy is not None
        length = max(0, length - policy.recent - policy.num_sinks)
    return min(-(-length // group.block_size), group.max_blocks_per_seq)


class DemotionOps:
    """Demotions of one step, per group, and the blocks that are freed after all sequences were demoted."""

    def __init__(self, groups: int) -> None:
        self.quantize: list[list[tuple[int, int]]] = [[] for _ in range(groups)]
        self.merge: list[list[MergeOp]] = [[] for _ in range(groups)]
        self.freed_later: list[tuple[BlockPool, int]] = []

    def release(self) -> None:
        for pool, block in self.freed_later:
            pool.decref(block)

    def attach_to_ops(self, block_ops: BlockOps) -> BlockOps:
        return block_ops._replace(quantize=tuple(map(tuple, self.quantize)), merge=tuple(map(tuple, self.merge)))


class LevelDemotion:
    """Demotes blocks from the first ``num_token_groups`` groups to the lower groups behind them."""

    def __init__(self, groups: Sequence[CacheGroup], pools: Sequence[BlockPool], num_token_groups: int) -> None:
        self._groups, self._pools, self._num_token_groups = tuple(groups), tuple(pools), num_token_groups
        levels = [(group_index, group.lower_level) for group_index, group in enumerate(groups) if group.lower_level]
        self.lower_groups = tuple(
            tuple(group_index for group_index, level in levels if level.token_group == index)
            for index in range(num_token_groups)
        )
        self._count = len(levels)

    def num_leaving(self, index: int, group_blocks: GroupBlocks, start: int) -> int:
        """Return the number of blocks behind the sinks that leave group ``index`` at length ``start``."""
        group = self._groups[index]
        policy, size = group.demotion_policy, group.block_size
        if policy is None or group_blocks.last_eviction_length == start or start % policy.interval:
            return 0
        return max(0, (start - policy.recent) // size - policy.num_sinks // size - group_blocks.num_skipped_blocks)

    def has_room(self, sequences: Sequence[tuple[SequenceBlocks, int]]) -> bool:
        """Return True if ``demote`` would find enough blocks, those that it frees not counted."""
        needs = zip(self.blocks_needed(sequences), self._pools[self._num_token_groups :], strict=False)
        return all(count <= pool.num_available for count, pool in needs)

    def blocks_needed(self, sequences: Sequence[tuple[SequenceBlocks, int]]) -> list[int]:
        """Return the number of blocks that ``demote`` would take from each lower group."""
        num_needed = [0] * self._count
        for index, lower_groups in enumerate(self.lower_groups):
            for sequence, start in sequences if lower_groups else ():
                num_demoted = self.num_leaving(index, sequence.groups[index], start)
                for group_index in lower_groups:
                    group, level_index = self._groups[group_index], group_index - self._num_token_groups
                    size, level, level_blocks = group.block_size, group.lower_level, sequence.lower_levels[level_index]
                    assert level is not None
                    if level.ratio > 1:
                        shared = self._is_shared(group_index, level_blocks) and num_demoted > 0
                        num_filled = level_blocks.num_used_slots + num_demoted * size // level.ratio
                        num_needed[level_index] += -(-num_filled // size) - len(level_blocks.blocks) + shared
                    else:
                        num_needed[level_index] += num_demoted
                        num_demoted = max(0, len(level_blocks.blocks) + num_demoted - level.max_blocks)
        return num_needed

    def demote(self, index: int, sequence: SequenceBlocks, start: int, ops: DemotionOps) -> None:
        """Demote the older blocks of one sequence.

        Blocks that leave the group ``index`` are freed at once, because ``BlockOps.quantize`` and ``merge`` read them
        before they are cleared. Blocks that leave a lower group are freed by ``ops.release``, because quantizing
        another sequence's blocks would overwrite them.
        """
        group_blocks, group = sequence.groups[index], self._groups[index]
        num_demoted = self.num_leaving(index, group_blocks, start)
        if not num_demoted:
            return
        assert group.demotion_policy is not None
        sinks, group_blocks.last_eviction_length = group.demotion_policy.num_sinks // group.block_size, start
        leaving = group_blocks.blocks[sinks : sinks + num_demoted]
        del group_blocks.blocks[sinks : sinks + num_demoted]
        group_blocks.num_skipped_blocks += num_demoted
        for block in leaving:
            self._pools[index].decref(block)
        for group_index in self.lower_groups[index]:
            level = self._groups[group_index].lower_level
            level_blocks = sequence.lower_levels[group_index - self._num_token_groups]
            assert level is not None
            if level.ratio > 1:
                self._merge(group_index, level_blocks, leaving, ops)
                return
            leaving = self._quantize(group_index, level_blocks, leaving, ops)

    def _quantize(
        self, group_index: int, level_blocks: LevelBlocks, blocks: Sequence[int], ops: DemotionOps
    ) -> list[int]:
        """Quantize blocks into a lower group. Return the blocks that leave it for the next one."""
        group, pool = self._groups[group_index], self._pools[group_index]
        assert group.lower_level is not None
        allocated = [pool.allocate() for _ in blocks]
        ops.quantize[group_index].extend(zip(blocks, allocated, strict=True))
        level_blocks.blocks.extend(allocated)
        level_blocks.num_used_slots += len(allocated) * group.block_size
        return self._drop_excess(group_index, level_blocks, ops)

    def _merge(self, group_index: int, level_blocks: LevelBlocks, blocks: Sequence[int], ops: DemotionOps) -> None:
        group, pool = self._groups[group_index], self._pools[group_index]
        assert group.lower_level is not None
        for block in blocks:
            slot = level_blocks.num_used_slots % group.block_size
            if slot == 0:
                level_blocks.blocks.append(pool.allocate())
            source = level_blocks.blocks[-1]
            if self._is_shared(group_index, level_blocks):
                level_blocks.blocks[-1] = pool.allocate()
                ops.freed_later.append((pool, source))
            ops.merge[group_index].append(MergeOp(block, level_blocks.blocks[-1], slot, source))
            level_blocks.num_used_slots += group.block_size // group.lower_level.ratio
        self._drop_excess(group_index, level_blocks, ops)

    def _drop_excess(self, group_index: int, level_blocks: LevelBlocks, ops: DemotionOps) -> list[int]:
        """Drop the oldest blocks beyond the level's size and return them."""
        group = self._groups[group_index]
        assert group.lower_level is not None
        dropped = level_blocks.blocks[: max(0, len(level_blocks.blocks) - group.lower_level.max_blocks)]
        del level_blocks.blocks[: len(dropped)]
        level_blocks.num_used_slots -= len(dropped) * group.block_size
        ops.freed_later.extend((self._pools[group_index], block) for block in dropped)
        return dropped

    def _is_shared(self, group_index: int, level_blocks: LevelBlocks) -> bool:
        """Return True if another sequence references the block that is being filled."""
        filling = level_blocks.num_used_slots % self._groups[group_index].block_size
        return bool(filling) and self._pools[group_index].refs[level_blocks.blocks[-1]] > 1
