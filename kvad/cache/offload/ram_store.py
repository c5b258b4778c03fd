"""LRU store in RAM for evicted blocks; older entries are compressed, then dropped.

Half of the size is for raw blocks; older ones are compressed (``byte_shuffle.py``) if that saves enough. The least
recently used block is dropped first. Not thread-safe: ``block_store.py`` holds the lock. No torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvad import storage
from kvad.cache import manager
from kvad.errors import ConfigError


@dataclass(frozen=True)
class RamStoreStats:
    """Statistics of a RAM store."""

    bytes: int = 0
    limit: int = 0  # bytes
    num_blocks: int = 0
    compressed: int = 0  # blocks
    evictions: int = 0


class CachedBlock:
    """One block: raw and compressed buffers by group."""

    __slots__ = ("buffers", "compressed", "compression_tried", "name")

    def __init__(self, name: manager.prefix_offload.BlockKey, buffers: Mapping[int, storage.filesystem.Buffer]) -> None:
        self.name, self.compression_tried = name, False
        self.buffers: dict[int, storage.filesystem.Buffer] = dict(buffers)
        self.compressed: dict[int, bytes] = {}

    @property
    def nbytes(self) -> int:
        return sum(memoryview(buffer).nbytes for buffer in (*self.buffers.values(), *self.compressed.values()))

    def has(self, groups: Sequence[int]) -> bool:
        """True if all groups are present."""
        return all(group in self.buffers or group in self.compressed for group in groups)


class RamBlockStore:
    """LRU store of ``limit`` bytes; ``widths`` are the bytes of a number, per group."""

    def __init__(self, limit: int, widths: Sequence[int]) -> None:
        if limit < 1:
            raise ConfigError(
                f"cache.prefix_cache_ram: must be at least 1 byte, got {limit}", "Omit it, or give a larger size."
            )
        self.limit, self._widths = limit, tuple(widths)
        self._blocks: OrderedDict[str, CachedBlock] = OrderedDict()
        self._bytes = self._raw = self._evictions = 0

    def get(self, name: manager.prefix_offload.BlockKey, groups: Sequence[int]) -> CachedBlock | None:
        """Return the block with this key and all groups, or None; it becomes the most recently used."""
        block = self._blocks.get(name.key)
        if block is None or block.name != name or not block.has(groups):
            return None
        self._blocks.move_to_end(name.key)
        return block

    def has(self, key: str) -> bool:
        """True if a block with this key is stored."""
        return key in self._blocks

    def put(
        self, name: manager.prefix_offload.BlockKey, buffers: Mapping[int, storage.filesystem.Buffer]
    ) -> CachedBlock | None:
        """Store a block; returns the next block to compress, if any."""
        previous = self._blocks.get(name.key)
        if previous is not None:
            self.drop(name.key)
            if previous.name == name:  # The same block with other groups.
                buffers = {
                    **previous.buffers,
                    **{
                        g: storage.byte_shuffle.decompress(raw, self._widths[g])
                        for g, raw in previous.compressed.items()
                    },
                    **buffers,
                }
        block = CachedBlock(name, buffers)
        if block.nbytes > self.limit:
            return None
        self._blocks[name.key] = block
        self._bytes += block.nbytes
        self._raw += block.nbytes
        while self._bytes > self.limit:
            self.drop(next(iter(self._blocks)))
            self._evictions += 1
        return self.oldest()

    def oldest(self) -> CachedBlock | None:
        """Return the next block to compress: if raw blocks take more than half of the size."""
        if 2 * self._raw <= self.limit:
            return None
        return next((block for block in self._blocks.values() if not block.compression_tried), None)

    def drop(self, key: str) -> None:
        """Drop a block if it is stored."""
        block = self._blocks.pop(key, None)
        if block is not None:
            self._bytes -= block.nbytes
            self._raw -= 0 if block.compression_tried else block.nbytes

    def compress_job(self, block: CachedBlock) -> Callable[[], dict[int, bytes | None]]:
        """Return a function that compresses the block without the lock."""
        buffers = dict(block.buffers)
        return lambda: {
            group: storage.byte_shuffle.compress(buffer, self._widths[group]) for group, buffer in buffers.items()
        }

    def on_compressed(self, block: CachedBlock, compressed: Mapping[int, bytes | None]) -> None:
        """Replace buffers by their compressed form; those that saved too little stay raw."""
        if self._blocks.get(block.name.key) is not block or block.compression_tried:
            return
        before, block.compression_tried = block.nbytes, True
        for group, raw in compressed.items():
            if raw is not None:
                block.compressed[group] = raw
                del block.buffers[group]
        self._raw -= before
        self._bytes += block.nbytes - before

    def decompress_job(
        self, block: CachedBlock, groups: Sequence[int]
    ) -> Callable[[], dict[int, storage.filesystem.Buffer]]:
        """Return a function that returns the raw buffers; it needs no lock."""
        buffers, compressed = dict(block.buffers), dict(block.compressed)
        return lambda: {
            g: buffers[g] if g in buffers else storage.byte_shuffle.decompress(compressed[g], self._widths[g])
            for g in groups
        }

    def stats(self) -> RamStoreStats:
        """Return the statistics of the store."""
        count = sum(bool(block.compressed) for block in self._blocks.values())
        return RamStoreStats(self._bytes, self.limit, len(self._blocks), count, self._evictions)
