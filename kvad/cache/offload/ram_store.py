"""LRU store in RAM for evicted blocks; older entries are compressed, then dropped.

Half of the size is for raw blocks; older ones are compressed (``byte_shuffle.py``) if that saves enough. The least
recently used block is dropped first. Not thread-safe: ``block_store.py`` holds the lock. No torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvad import storage
from kvad.cache import manager
from kvad.errors import ConfigError
from kvad.storage import Buffer


@dataclass
class RamStoreStats:
    """Statistics of a RAM store."""

    bytes: int = 0
    limit: int = 0  # bytes
    num_blocks: int = 0
    compressed: int = 0  # blocks
    evictions: int = 0
    written: int = 0  # blocks copied out of the pool, later dropped ones included
    written_bytes: int = 0


@dataclass(frozen=True, eq=False)
class CachedBlock:
    """One block, immutable, so that a thread can read it without the store's lock."""

    name: manager.prefix_offload.BlockKey
    buffers: Mapping[int, Buffer]  # raw, by group
    compressed: Mapping[int, bytes]  # by group
    compression_tried: bool = False

    @property
    def nbytes(self) -> int:
        return sum(memoryview(buffer).nbytes for buffer in (*self.buffers.values(), *self.compressed.values()))

    def has(self, groups: Sequence[int]) -> bool:
        return all(group in self.buffers or group in self.compressed for group in groups)

    def raw(self, groups: Sequence[int], widths: Sequence[int]) -> dict[int, Buffer]:
        """Return the raw buffers of these groups; ``widths`` are the bytes of a number, per group."""
        return {
            g: self.buffers[g] if g in self.buffers else storage.byte_shuffle.decompress(self.compressed[g], widths[g])
            for g in groups
        }

    def compress(self, widths: Sequence[int]) -> CachedBlock:
        """Return a compressed block; buffers that save too little stay raw."""
        buffers = {group: storage.byte_shuffle.compress(raw, widths[group]) for group, raw in self.buffers.items()}
        compressed = {group: buffer for group, buffer in buffers.items() if buffer is not None}
        raw = {group: buffer for group, buffer in self.buffers.items() if group not in compressed}
        return CachedBlock(self.name, raw, {**self.compressed, **compressed}, compression_tried=True)


class RamBlockStore:
    """LRU store of ``limit`` bytes; ``widths`` are the bytes of a number, per group."""

    def __init__(self, limit: int, widths: Sequence[int]) -> None:
        if limit < 1:
            raise ConfigError(
                f"cache.prefix_cache_ram: must be at least 1 byte, got {limit}", "Omit it, or give a larger size."
            )
        self._widths, self._stats = tuple(widths), RamStoreStats(limit=limit)
        self._blocks: OrderedDict[str, CachedBlock] = OrderedDict()
        self._raw_bytes = 0  # of blocks whose compression was not tried

    def get(self, name: manager.prefix_offload.BlockKey, groups: Sequence[int]) -> CachedBlock | None:
        """Return the block with this key and all groups, or None; it becomes the most recently used."""
        block = self._blocks.get(name.key)
        if block is None or block.name != name or not block.has(groups):
            return None
        self._blocks.move_to_end(name.key)
        return block

    def __contains__(self, key: str) -> bool:
        return key in self._blocks

    def put(self, name: manager.prefix_offload.BlockKey, buffers: Mapping[int, Buffer]) -> bool:
        """Store a block; return True if a block should be compressed."""
        previous = self._blocks.get(name.key)
        if previous is not None:
            self.drop(name.key)
            if previous.name == name:  # The same block with other groups.
                buffers = {**previous.raw([*previous.buffers, *previous.compressed], self._widths), **buffers}
        block = CachedBlock(name, buffers, {})
        if block.nbytes > self._stats.limit:
            return False
        self._blocks[name.key] = block
        self._count(block, 1)
        self._stats.written += 1
        self._stats.written_bytes += block.nbytes
        while self._stats.bytes > self._stats.limit:
            self.drop(next(iter(self._blocks)))
            self._stats.evictions += 1
        return self.next_to_compress() is not None

    def next_to_compress(self) -> CachedBlock | None:
        """Return the oldest raw block, if raw blocks take more than half of the size."""
        if 2 * self._raw_bytes <= self._stats.limit:
            return None
        return next((block for block in self._blocks.values() if not block.compression_tried), None)

    def replace(self, block: CachedBlock, compressed: CachedBlock) -> None:
        """Replace a block by its compressed form, unless it was dropped meanwhile."""
        if self._blocks.get(block.name.key) is block:
            self._blocks[block.name.key] = compressed
            self._count(block, -1)
            self._count(compressed, 1)

    def drop(self, key: str) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self._count(block, -1)

    def _count(self, block: CachedBlock, sign: int) -> None:
        self._stats.bytes += sign * block.nbytes
        self._raw_bytes += 0 if block.compression_tried else sign * block.nbytes

    def stats(self) -> RamStoreStats:
        num_compressed = sum(bool(block.compressed) for block in self._blocks.values())
        return replace(self._stats, num_blocks=len(self._blocks), compressed=num_compressed)
