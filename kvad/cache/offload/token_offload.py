"""Token offload: sizes and files of offloaded levels.

An *offloaded level* (``OffloadPolicy``) has block ids like any level, but no pool: a block of one layer is a *line* of
bytes, the raw arrays of its keys and values concatenated. The first ``ram`` blocks of a level are in RAM, all others on
disk, in one file per layer, each at the offset of its id. The KVCacheManager allocates the lowest free id.

A decode step reads every offloaded block of a sequence once, in the same order as the step before. In such a cycle an
LRU cache has always just dropped the block that is read next, and no policy is better than a fixed assignment. So
blocks never move between RAM and disk.

    budget 1000 bytes, 2 layers, lines of 96 bytes:  1000 // 192 = 5 blocks in RAM, 960 bytes

Blocks on disk are read through two *tiles* of staging memory of about ``TILE`` bytes each.

``OffloadFile.read`` returns what ``OffloadFile.write`` stored, or the lines for which it cannot, with the
cause. A line from disk is verified with its checksum, which stays in RAM, so lost writes, misplaced lines and stale
lines are detected as well as changed bits. A failed write raises nothing: its line is unreadable until it is written
again. RAM lines are not locked: a writer waits for the reader.

The files are private to this process. They have temporary names (``temp_paths.py``) and are removed by
``OffloadFile.close``, at the end of the process, or after its death by the next OffloadReader.

``kvad plan`` uses the sizes. No torch: lines are NumPy bytes, which a thread may write in another inference mode.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvad import storage
from kvad.cache.groups import CacheGroup
from kvad.storage import REAL_FILE_SYSTEM, FileSystem

ALIGN = 16  # Every array of a line starts at a multiple of this.
TILE = 1 << 21  # bytes of a tile; at least one block per sequence
NUM_TILES = 2  # One is read while the other is attended to.
CHECKSUM_BYTES = 4  # of a line


class ArraySlice(NamedTuple):
    """One raw array of a line."""

    is_value: int  # 0: of the keys, 1: of the values
    dtype: str
    width: int  # numbers per head and slot
    offset: int  # bytes from the start of the line
    nbytes: int


def block_slices(group: CacheGroup) -> tuple[ArraySlice, ...]:
    """Return the arrays of a line in order; per-channel formats never occur here."""
    slices, offset = [], 0
    for is_value, (tensor_format, dim) in enumerate(group.tensor_formats):
        for part in tensor_format.arrays(dim):
            assert part.granularity == "slot", "offloaded formats must be per token"
            nbytes = part.nbytes * group.spec.num_kv_heads * group.block_size
            slices.append(ArraySlice(is_value, part.dtype, part.width, offset, nbytes))
            offset += -(-nbytes // ALIGN) * ALIGN
    return tuple(slices)


class LevelLayout(NamedTuple):
    """Size of one offloaded level."""

    layers: int  # number of layers
    block_bytes: int  # of one layer: a line
    ram: int  # blocks in RAM
    disk: int  # maximum number of blocks on disk
    tile: int  # blocks of a tile


@dataclass(frozen=True)
class OffloadLayout:
    """Sizes of all offloaded levels; ``shares`` by the group index of the level."""

    shares: dict[int, LevelLayout]

    @property
    def ram_bytes(self) -> int:
        """Bytes of RAM for tokens."""
        return sum(share.layers * share.block_bytes * share.ram for share in self.shares.values())

    @property
    def staging_bytes(self) -> int:
        """Bytes of all tiles."""
        return NUM_TILES * max((share.block_bytes * share.tile for share in self.shares.values()), default=0)

    @property
    def checksum_bytes(self) -> int:
        """Bytes of the checksums of lines on disk."""
        return sum(CHECKSUM_BYTES * share.layers * share.disk for share in self.shares.values())

    @property
    def host_bytes(self) -> int:
        """All bytes of RAM that are allocated."""
        return self.ram_bytes + self.staging_bytes + self.checksum_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files if all sequences have their maximum length."""
        return sum(share.layers * share.block_bytes * share.disk for share in self.shares.values())


def plan_offload(groups: Sequence[CacheGroup], ram_budget: int) -> OffloadLayout:
    """Divide RAM for tokens (bytes) among the offloaded levels, in proportion to their maximum sizes."""
    levels = [(i, group) for i, group in enumerate(groups) if group.is_offloaded]
    total_bytes = sum(len(group.layers) * _line_bytes(group) * group.num_usable_blocks for _, group in levels)
    shares = {}
    for group_index, group in levels:
        line_bytes, num_layers, num_blocks = _line_bytes(group), len(group.layers), group.num_usable_blocks
        level_bytes = num_layers * line_bytes * num_blocks
        ram = min(num_blocks, ram_budget * level_bytes // total_bytes // (num_layers * line_bytes))
        tile = min(num_blocks, max(num_blocks // group.max_blocks_per_seq, TILE // line_bytes))
        shares[group_index] = LevelLayout(num_layers, line_bytes, ram, num_blocks - ram, tile)
    return OffloadLayout(shares)


def _line_bytes(group: CacheGroup) -> int:
    last = block_slices(group)[-1]
    return last.offset + -(-last.nbytes // ALIGN) * ALIGN


BlockBytes = NDArray[np.uint8]  # [n, line]
FILE_PREFIX = "offload-"


@dataclass
class OffloadStats:
    """Statistics of offloaded tokens since the start."""

    written: int = 0  # bytes
    from_ram: int = 0  # bytes read
    from_disk: int = 0  # bytes read
    disk_bytes: int = 0  # size of the files
    failed: int = 0  # file operations
    folder: Path | None = None  # of the files, if any


class BlockRun(NamedTuple):
    """Consecutive blocks: ``num_blocks`` from id ``first`` at ``tile_index``; -1 means no block."""

    tile_index: int
    first: int
    num_blocks: int


def split_runs(numbers: Sequence[int], split: int) -> list[BlockRun]:
    """Join consecutive ids, except across id ``split``.

    4 5 6 -1 -1 9, split 6  ->  4 5 | 6 | -1 -1 | 9
    """
    runs: list[BlockRun] = []
    for tile_index, block in enumerate(numbers):
        if runs:
            _, first, count = runs[-1]
            follows = block == first + count and block != split if first >= 0 else block < 0
            if follows:
                runs[-1] = runs[-1]._replace(num_blocks=count + 1)
                continue
        runs.append(BlockRun(tile_index, block, 1))
    return runs


class OffloadFile:
    """Lines of one offloaded level, in RAM and in one file per layer.

    Several files may update the same ``stats``.

    Raises:
        OSError: If the files cannot be created.
    """

    def __init__(
        self,
        share: LevelLayout,
        folder: Path,
        name: str,
        fs: FileSystem = REAL_FILE_SYSTEM,
        stats: OffloadStats | None = None,
    ) -> None:
        self.share, self.fs, self.stats = share, fs, OffloadStats() if stats is None else stats
        self._num_lines = 0  # lines of a layer that its file contains
        self._ram = np.empty((share.layers, share.ram, share.block_bytes), np.uint8)
        self._checksums = array("I", bytes(4 * share.layers * share.disk))
        self._unreadable: dict[tuple[int, int], str] = {}
        self._files: list[int] = []
        paths: list[Path] = []
        self._end = weakref.finalize(self, _remove, fs, self._files, paths)
        try:
            for layer in range(share.layers if share.disk else 0):
                path = storage.temp_paths.temp_path(folder / f"{FILE_PREFIX}{name}.{layer}", "tmp")
                self._files.append(fs.create(path))
                paths.append(path)
        except OSError:
            self._end()
            raise
        self.paths = tuple(paths)

    def close(self) -> None:
        self._end()
        self._ram = self._ram[:, :0]

    def write(self, layer: int, runs: Sequence[BlockRun], lines: BlockBytes) -> None:
        """Write lines [n, line_bytes], contiguous."""
        for tile_index, first, count in runs:
            part = lines[tile_index : tile_index + count]
            self.stats.written += part.nbytes
            if first < self.share.ram:
                self._ram[layer, first : first + count] = part
            else:
                self._write(layer, first, part)

    def _write(self, layer: int, first: int, lines: BlockBytes) -> None:
        data, size, at = lines.reshape(-1).data, self.share.block_bytes, first - self.share.ram
        reason = ""
        try:
            self.fs.write_at(self._files[layer], data, at * size)
        except OSError as error:
            reason = f"could not be written: {error.strerror or error}"
            self.stats.failed += 1
        num_new_lines = max(0, at + len(lines) - self._num_lines)
        self._num_lines += num_new_lines
        self.stats.disk_bytes += num_new_lines * self.share.layers * size
        for index in range(len(lines)):
            self._checksums[layer * self.share.disk + at + index] = zlib.crc32(data[index * size : (index + 1) * size])
            if reason:
                self._unreadable[layer, first + index] = reason
            else:
                self._unreadable.pop((layer, first + index), None)

    def read(self, layer: int, runs: Sequence[BlockRun], into: BlockBytes) -> dict[int, str]:
        """Read into lines [n, line_bytes], contiguous.

        Returns:
            The causes of unreadable lines by tile index; these lines are zero.
        """
        lost: dict[int, str] = {}
        for tile_index, first, count in runs:
            part = into[tile_index : tile_index + count]
            if first < 0:
                part[:] = 0
            elif first < self.share.ram:
                part[:] = self._ram[layer, first : first + count]
                self.stats.from_ram += part.nbytes
            else:
                self.stats.from_disk += part.nbytes
                for index, reason in self._read(layer, first, part).items():
                    part[index] = 0
                    lost[tile_index + index] = reason
        return lost

    def ram_view(self, layer: int, run: BlockRun) -> BlockBytes | None:
        """Return a view of a run in RAM, or None if it is on disk."""
        _, first, count = run
        if not 0 <= first < self.share.ram:
            return None
        self.stats.from_ram += count * self.share.block_bytes
        return self._ram[layer, first : first + count]

    def _read(self, layer: int, first: int, into: BlockBytes) -> dict[int, str]:
        data, size, at = into.reshape(-1).data, self.share.block_bytes, first - self.share.ram
        written = {n: self._unreadable.get((layer, first + n)) for n in range(len(into))}
        lost = {n: reason for n, reason in written.items() if reason is not None}
        try:
            num_read = self.fs.read(self._files[layer], data, at * size)
        except OSError as error:
            self.stats.failed += 1
            return {n: lost.get(n, f"could not be read: {error.strerror or error}") for n in range(len(into))}
        for index in range(len(into)):
            begin, end = index * size, (index + 1) * size
            if index in lost:
                continue
            if end > num_read:
                lost[index] = "its file is truncated"
            elif zlib.crc32(data[begin:end]) != self._checksums[layer * self.share.disk + at + index]:
                lost[index] = "its checksum is wrong"
        self.stats.failed += bool(lost)
        return lost


def _remove(fs: FileSystem, files: list[int], paths: list[Path]) -> None:
    """Close and remove the files; what fails is left to the next cleanup."""
    for file in files:
        with contextlib.suppress(OSError):
            fs.close(file)
    for path in paths:
        with contextlib.suppress(OSError):
            fs.remove(path)
    files.clear()
    paths.clear()
