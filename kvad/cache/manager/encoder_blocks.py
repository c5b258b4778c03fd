"""Blocks of cross-attention: keys and values of encoder inputs, written once and shared by sequences.

The encoder is bidirectional, so keys and values depend on all tokens of the input. Its blocks are published under the
whole input, never under a prefix of it: a hit covers all blocks in every group, or none.

    block size 4, input of 6 tokens, blocks [7, 3]:  token 5 is in slot 3*4 + 1; slots 14 and 15 stay empty

Blocks are never written again, so there is no copy-on-write. No torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvad.cache.groups import CacheGroup
from kvad.cache.manager.block_pool import BlockPool
from kvad.cache.manager.prefix_index import PrefixIndex, PrefixNode
from kvad.model_input import BlockOps


class EncoderAllocation(NamedTuple):
    """Slots that one encoder step writes."""

    block_ops: BlockOps
    slots: tuple[list[int], ...]  # per cross-attention group: one per encoder token, in the order of the sequences


@dataclass(slots=True, eq=False)
class EncoderSequence:
    """Cross-attention blocks of one sequence."""

    tokens: tuple[int, ...]
    cache_key: PrefixNode | None  # of the whole input; None if other sequences must not find it
    blocks: tuple[list[int], ...]  # per group
    written: bool = False  # The input was encoded.


class EncoderBlocks:
    """Manages the pools of the cross-attention groups.

    With ``share``, encoded inputs are published and found by later sequences.
    """

    def __init__(
        self, groups: Sequence[CacheGroup], pools: Sequence[BlockPool], prefixes: PrefixIndex, *, share: bool
    ) -> None:
        self.groups, self.pools = tuple(groups), tuple(pools)
        self._prefixes, self._share = prefixes, share
        self.hits = self.misses = 0

    @property
    def max_source_len(self) -> int:
        """Maximum number of encoder tokens; 0 without cross-attention."""
        return min((min(g.num_usable_blocks, g.max_blocks_per_seq) * g.block_size for g in self.groups), default=0)

    def attach(self, tokens: Sequence[int], root: bytes) -> EncoderSequence | None:
        """Acquire the published blocks of an encoder input, or allocate new ones; None if a pool is too full."""
        assert 0 < len(tokens) <= self.max_source_len, f"an encoder input of {len(tokens)} tokens"
        token_bytes = array("q", tokens).tobytes()
        cache_key = self._prefixes.root(b"source\0" + root + b"\0" + token_bytes) if self._share else None
        if cache_key is not None:
            matches = [self._find(index, cache_key, token_bytes) for index in range(len(self.groups))]
            complete = [blocks for blocks in matches if blocks is not None]
            if len(complete) == len(matches):
                for pool, blocks in zip(self.pools, complete, strict=True):
                    for block in blocks:
                        pool.incref(block)
                self.hits += 1
                return EncoderSequence(tuple(tokens), cache_key, tuple(complete), written=True)
        num_blocks = [-(-len(tokens) // group.block_size) for group in self.groups]
        if any(count > pool.num_available for count, pool in zip(num_blocks, self.pools, strict=True)):
            return None
        self.misses += 1
        blocks_per_group = tuple(
            [pool.allocate() for _ in range(count)] for count, pool in zip(num_blocks, self.pools, strict=True)
        )
        return EncoderSequence(tuple(tokens), cache_key, blocks_per_group)

    def share(self, sequence: EncoderSequence) -> EncoderSequence:
        """Share the blocks with one more sequence."""
        for pool, blocks in zip(self.pools, sequence.blocks, strict=True):
            for block in blocks:
                pool.incref(block)
        return replace(sequence, blocks=tuple(list(blocks) for blocks in sequence.blocks))

    def allocate_slots(self, sequences: Sequence[EncoderSequence], groups_before: int) -> EncoderAllocation:
        """Compute the slots of one encoder step and the blocks to clear.

        ``groups_before`` groups precede the cross-attention groups in BlockOps.
        """
        clear: list[tuple[int, ...]] = [()] * groups_before
        slots: list[list[int]] = []
        for index, group in enumerate(self.groups):
            size, group_slots = group.block_size, list[int]()
            for sequence in sequences:
                assert not sequence.written, "an encoder input is written once"
                blocks = sequence.blocks[index]
                positions = range(len(sequence.tokens))
                group_slots.extend(blocks[position // size] * size + position % size for position in positions)
            clear.append(tuple(block for sequence in sequences for block in sequence.blocks[index]))
            slots.append(group_slots)
        return EncoderAllocation(BlockOps(tuple(clear), ((),) * len(clear)), tuple(slots))

    def commit(self, sequence: EncoderSequence) -> None:
        """Mark an input as written with finite outputs, and publish its blocks."""
        sequence.written = True
        if sequence.cache_key is None:
            return
        token_bytes = array("q", sequence.tokens).tobytes()
        for index, pool in enumerate(self.pools):
            prefixes = self._block_prefixes(index, sequence.cache_key, token_bytes)
            for block, prefix in zip(sequence.blocks[index], prefixes, strict=True):
                if prefix is not None:
                    pool.publish(block, prefix)

    def release(self, sequence: EncoderSequence, *, publish: bool = True) -> None:
        """Free a sequence's blocks. With ``publish=False`` (a numerical error) they are also unpublished."""
        for pool, blocks in zip(self.pools, sequence.blocks, strict=True):
            for block in reversed(blocks):
                if not publish and pool.prefixes[block] is not None:
                    pool.unpublish(block)
                pool.decref(block)

    def _block_prefixes(self, index: int, cache_key: PrefixNode, token_bytes: bytes) -> list[PrefixNode | None]:
        """Return the prefix node of each block: the input's node, the group's block size and the block's index."""
        size = self.groups[index].block_size
        count = -(-len(token_bytes) // (size * 8))
        return [self._prefixes.extend(cache_key, b"%d/%d" % (block_index, size)) for block_index in range(count)]

    def _find(self, index: int, cache_key: PrefixNode, token_bytes: bytes) -> list[int] | None:
        prefixes = self._block_prefixes(index, cache_key, token_bytes)
        blocks = [None if prefix is None else self.pools[index].find(prefix) for prefix in prefixes]
        published = [block for block in blocks if block is not None]
        return published if len(published) == len(blocks) else None
