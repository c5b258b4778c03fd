"""KVCacheManager without a model: sequences that are written, and the state that a refused call must not change."""

from __future__ import annotations

from kvad.cache.config import CacheConfig
from kvad.cache.groups import CacheGroup, build_groups
from kvad.cache.manager.allocation import BlockAllocation, TokenSpan
from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.config.model import AttentionSpec
from kvad.model_input import RESERVED_BLOCKS

FULL = AttentionSpec(True, None, 1, 8, 8)
WINDOW = FULL._replace(window=5)  # A query sees itself and 4 tokens before.
WIDE = FULL._replace(num_kv_heads=2)


def make_groups(*specs: AttentionSpec, usable: int | None = None, **fields: object) -> tuple[CacheGroup, ...]:
    """Build groups with blocks of 4 slots.

    ``usable``: maximum usable blocks of a pool; -1: two more than one sequence at its longest has.
    """
    defaults = {"block_size": 4, "max_num_seqs": 4, "max_seq_len": 48, "prefill_chunk_size": 8}
    groups = build_groups(specs or (FULL,), CacheConfig(**(defaults | fields)))  # type: ignore[arg-type]
    if usable is None:
        return groups
    limits = [(group.max_blocks_per_seq + 2 if usable < 0 else usable) + RESERVED_BLOCKS for group in groups]
    return tuple(
        group._replace(num_blocks=min(group.num_blocks, limit)) for group, limit in zip(groups, limits, strict=True)
    )


def unpublish_all(manager: KVCacheManager) -> None:
    """Remove every prefix from the pools, so that only a block store has them."""
    for pool in manager.pools:
        for block, prefix in enumerate(pool.prefixes):
            if prefix is not None:
                pool.unpublish(block)


class ManagerDriver(KVCacheManager):
    """A manager of up to 4 sequences that is checked after each write."""

    def __init__(self, *specs: AttentionSpec, prefix_caching: bool = True, **fields: object) -> None:
        super().__init__(make_groups(*specs, **fields), prefix_caching=prefix_caching, max_num_seqs=4)

    def try_allocate(self, *spans: tuple[int, int]) -> BlockAllocation | None:
        """Allocate ``(sequence index, number of tokens)``, behind the committed tokens."""
        return self.allocate_slots([TokenSpan(seq_index, self.seq_len(seq_index), count) for seq_index, count in spans])

    def allocate(self, *spans: tuple[int, int]) -> BlockAllocation:
        allocation = self.try_allocate(*spans)
        assert allocation is not None, "a pool is too full"
        self.check()
        return allocation

    def write(self, seq_index: int, tokens: list[int] | int) -> BlockAllocation:
        """Allocate and commit tokens; a number of tokens stands for their positions."""
        length = self.seq_len(seq_index)
        tokens = list(range(length, length + tokens)) if isinstance(tokens, int) else tokens
        allocation = self.allocate((seq_index, len(tokens)))
        self.commit(seq_index, tokens)
        self.check()
        return allocation

    def add(self, seq_index: int, tokens: list[int], *, chunk: int = 8) -> int:
        """Add a sequence, write all of its tokens and return the length of its cached prefix."""
        hit = self.add_sequence(seq_index, tokens, b"")
        assert hit is not None
        for start in range(hit, len(tokens), chunk):
            self.write(seq_index, tokens[start : start + chunk])
        return hit

    def grow(self, seq_index: int, length: int, *, chunk: int = 8) -> None:
        """Write a sequence up to ``length``, in spans that end at evictions."""
        if self._sequences[seq_index] is None:
            self.add_sequence(seq_index, list(range(length + 1)), b"")
        while (left := length - self.seq_len(seq_index)) > 0:
            self.write(seq_index, min(chunk, left, self.tokens_until_eviction(seq_index)))

    def blocks(self, seq_index: int, group: int = 0) -> list[int]:
        return self._sequence(seq_index).all_groups[group].blocks

    def state(self) -> object:
        """Return everything that a refused call must leave unchanged."""
        sequences = [
            None if each is None else (each.length, each.num_written, repr(each.all_groups)) for each in self._sequences
        ]
        pools = [(list(pool.refs), list(pool._idle), list(pool.prefixes)) for pool in self.pools]
        swapped = self._swapped
        pending = list(swapped.pending_swap_outs), dict(swapped.pending_swap_ins), list(swapped.pending_drops)
        return sequences, pools, pending
