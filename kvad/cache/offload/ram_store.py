"""The RAM tier: blocks that a pool had to give up, bounded in bytes; what lies longest is packed, then given up too.

Half of the budget is for blocks as they were; older ones are packed (``planes.py``) where that pays.  The least
recently used goes first.  Not safe for several threads by itself: ``tiers.py`` holds the lock.  No torch.
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
    bytes: int = 0
    limit: int = 0
    num_blocks: int = 0
    compressed: int = 0
    evictions: int = 0


class CachedBlock:
    """One block: its pieces by group, packed or not (``tried``: packing was)."""

    __slots__ = ("buffers", "compressed", "compression_tried", "name")

    def __init__(self, name: manager.prefix_offload.BlockKey, buffers: Mapping[int, storage.filesystem.Buffer]) -> None:
        self.name, self.compression_tried = name, False
        self.buffers: dict[int, storage.filesystem.Buffer] = dict(buffers)
        self.compressed: dict[int, bytes] = {}

    @property
    def nbytes(self) -> int:
        return sum(memoryview(each).nbytes for each in (*self.buffers.values(), *self.compressed.values()))

    def has(self, groups: Sequence[int]) -> bool:
        return all(group in self.buffers or group in self.compressed for group in groups)


class RamBlockStore:
    """``limit`` bytes; ``widths``: bytes of a number, per group."""

    def __init__(self, limit: int, widths: Sequence[int]) -> None:
        if limit < 1:
            raise ConfigError(f"tier_ram: a tier of {limit} bytes holds nothing", "leave it out, or give it more")
        self.limit, self._widths = limit, tuple(widths)
        self._kept: OrderedDict[str, CachedBlock] = OrderedDict()
        self._bytes = self._raw = self._evictions = 0

    def get(self, name: manager.prefix_offload.BlockKey, groups: Sequence[int]) -> CachedBlock | None:
        """The block of this very name with all of these groups; it is the latest used from now on."""
        kept = self._kept.get(name.key)
        if kept is None or kept.name != name or not kept.has(groups):
            return None
        self._kept.move_to_end(name.key)
        return kept

    def has(self, key: str) -> bool:
        return key in self._kept

    def put(
        self, name: manager.prefix_offload.BlockKey, pieces: Mapping[int, storage.filesystem.Buffer]
    ) -> CachedBlock | None:
        """The block that is to be packed next, if any is."""
        before = self._kept.get(name.key)
        if before is not None:
            self.drop(name.key)
            if before.name == name:  # other groups of the same block
                pieces = {
                    **before.buffers,
                    **{
                        g: storage.byte_shuffle.decompress(raw, self._widths[g]) for g, raw in before.compressed.items()
                    },
                    **pieces,
                }
        kept = CachedBlock(name, pieces)
        if kept.nbytes > self.limit:
            return None
        self._kept[name.key] = kept
        self._bytes += kept.nbytes
        self._raw += kept.nbytes
        while self._bytes > self.limit:
            self.drop(next(iter(self._kept)))
            self._evictions += 1
        return self.oldest()

    def oldest(self) -> CachedBlock | None:
        """The next one to be packed: more than half of the budget lies as it was."""
        if 2 * self._raw <= self.limit:
            return None
        return next((kept for kept in self._kept.values() if not kept.compression_tried), None)

    def drop(self, key: str) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._bytes -= kept.nbytes
            self._raw -= 0 if kept.compression_tried else kept.nbytes

    def compress_job(self, kept: CachedBlock) -> Callable[[], dict[int, bytes | None]]:
        """What packs it, without the lock."""
        pieces = dict(kept.buffers)
        return lambda: {
            group: storage.byte_shuffle.compress(piece, self._widths[group]) for group, piece in pieces.items()
        }

    def on_compressed(self, kept: CachedBlock, done: Mapping[int, bytes | None]) -> None:
        """It was packed; where that did not pay, it stays as it is."""
        if self._kept.get(kept.name.key) is not kept or kept.compression_tried:
            return
        before, kept.compression_tried = kept.nbytes, True
        for group, raw in done.items():
            if raw is not None:
                kept.compressed[group] = raw
                del kept.buffers[group]
        self._raw -= before
        self._bytes += kept.nbytes - before

    def decompress_job(
        self, kept: CachedBlock, groups: Sequence[int]
    ) -> Callable[[], dict[int, storage.filesystem.Buffer]]:
        """What gives its pieces as they were: at once where nothing is packed, else without the lock."""
        pieces, packed = dict(kept.buffers), dict(kept.compressed)
        return lambda: {
            g: pieces[g] if g in pieces else storage.byte_shuffle.decompress(packed[g], self._widths[g]) for g in groups
        }

    def stats(self) -> RamStoreStats:
        count = sum(bool(kept.compressed) for kept in self._kept.values())
        return RamStoreStats(self._bytes, self.limit, len(self._kept), count, self._evictions)
