"""How many bytes spilled tokens take, and where: pure integers, asked by the real spool and by ``kvad plan`` alike.

A *spilled level* (``policy.Spilled``) has block numbers as any level has, but no pool: a block of one layer is a
*line* of bytes, the raw arrays of its keys and values one behind the other.  The first ``ram`` blocks of a level lie in
host memory, all others on disk, in one file per layer, each at the place that its number says.  The ledger gives the
lowest free number (``blocks.LowestFirst``).

A decode step reads every spilled block of a row once, in the same order as the step before.  In such a cycle whoever
keeps what was read last has always just dropped what comes next, and no choice is better than a fixed one: so what
lies in memory stays there, and nothing is moved up or down.

    budget 1000 bytes, 2 layers, lines of 96 bytes:  1000 // 192 = 5 blocks in memory, 960 bytes

What is read goes through two *tiles* of staging, of about :data:`TILE` bytes each.  No torch.

Lines of bytes by (layer, number): the first ones of each layer in host memory, the others in a file per layer.

Promises: what :meth:`Spool.read` gives is what :meth:`Spool.write` was given, or it says of which lines it is not, and
why.  A line from disk is held against its checksum, which stays in memory, so that a lost write, a line in the wrong
place and a line of before are found as well as a changed bit.  A failed write raises nothing: it makes its line
unreadable until it is written again.  Memory cannot be written while it is read: one who writes waits for the reader.

The files are private to this process and worth nothing without it.  They are named as what is not finished
(``aside.py``), removed by :meth:`Spool.close` or at the process's end, and after its death by the next :func:`sweep`.

No torch: lines are NumPy's bytes, which a thread of another mode than the model's may write.
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
from kvad.errors import ConfigError
from kvad.storage import REAL_FILE_SYSTEM, FileSystem

ALIGN = 16  # bytes: every array of a line starts at a multiple
TILE = 1 << 21  # bytes of a tile, but for a block of each row at least
NUM_TILES = 2  # one is read while the other is attended to
CHECKSUM_BYTES = 4  # bytes of a line's checksum


class ArraySlice(NamedTuple):
    """One raw array of a line: of keys (side 0) or values (1), ``width`` numbers of ``dtype`` per head and slot, from
    byte ``offset`` on."""

    is_value: int
    dtype: str
    width: int
    offset: int
    nbytes: int


def block_slices(group: CacheGroup) -> tuple[ArraySlice, ...]:
    """The arrays of a line in their order; formats by channel never come here (``CacheConfig.kept``)."""
    made, offset = [], 0
    for side, (form, dim) in enumerate(group.tensor_formats):
        for array in form.arrays(dim):
            assert array.granularity == "slot", "what is spilled is a row of slots"
            nbytes = array.nbytes * group.spec.num_kv_heads * group.block_size
            made.append(ArraySlice(side, array.dtype, array.width, offset, nbytes))
            offset += -(-nbytes // ALIGN) * ALIGN
    return tuple(made)


class LevelLayout(NamedTuple):
    """One level's part: ``line`` bytes of a block of one layer; blocks in host memory, and on disk at most."""

    layers: int
    block_bytes: int
    ram: int
    disk: int
    tile: int  # blocks of a tile


@dataclass(frozen=True)
class OffloadLayout:
    """``shares``: by the number of the level's group."""

    shares: dict[int, LevelLayout]

    @property
    def ram_bytes(self) -> int:
        """Bytes of host memory that hold tokens."""
        return sum(share.layers * share.block_bytes * share.ram for share in self.shares.values())

    @property
    def staging_bytes(self) -> int:
        return NUM_TILES * max((share.block_bytes * share.tile for share in self.shares.values()), default=0)

    @property
    def checksum_bytes(self) -> int:
        """Checksums of what lies on disk."""
        return sum(CHECKSUM_BYTES * share.layers * share.disk for share in self.shares.values())

    @property
    def host_bytes(self) -> int:
        """All that is allocated."""
        return self.ram_bytes + self.staging_bytes + self.checksum_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of files when all rows are at their longest."""
        return sum(share.layers * share.block_bytes * share.disk for share in self.shares.values())


def plan_offload(groups: Sequence[CacheGroup], budget: int) -> OffloadLayout:
    """``budget``: bytes of host memory for tokens, shared out by what the levels take at their longest."""
    levels = {
        number: group
        for number, group in enumerate(groups)
        if group.lower_level is not None and group.lower_level.is_offloaded
    }
    lines = {number: _line(group) for number, group in levels.items()}
    whole = {number: len(group.layers) * lines[number] * group.num_usable_blocks for number, group in levels.items()}
    shares = {}
    for number, group in levels.items():
        line, layers = lines[number], len(group.layers)
        ram = min(group.num_usable_blocks, budget * whole[number] // sum(whole.values()) // (layers * line))
        rows = group.num_usable_blocks // group.max_blocks_per_seq
        tile = min(group.num_usable_blocks, max(rows, TILE // line))
        shares[number] = LevelLayout(layers, line, ram, group.num_usable_blocks - ram, tile)
    return OffloadLayout(shares)


def _line(group: CacheGroup) -> int:
    last = block_slices(group)[-1]
    return last.offset + -(-last.nbytes // ALIGN) * ALIGN


BlockBytes = NDArray[np.uint8]  # [n, line]

FILE_PREFIX = "spill-"


class BlockRun(NamedTuple):
    """``lines`` lines from number ``first`` on, at ``place`` of a tile; ``first`` -1: nothing lies there."""

    tile_index: int
    first: int
    num_blocks: int


def split_runs(numbers: Sequence[int], split: int) -> list[BlockRun]:
    """Neighbours together, but for those on two sides of number ``split``.

    4 5 6 -1 -1 9, split 6  ->  4 5 | 6 | -1 -1 | 9
    """
    made: list[BlockRun] = []
    for place, number in enumerate(numbers):
        if made:
            _, first, count = made[-1]
            follows = number == first + count and number != split if first >= 0 else number < 0
            if follows:
                made[-1] = made[-1]._replace(num_blocks=count + 1)
                continue
        made.append(BlockRun(place, number, 1))
    return made


def remove_offload_leftovers(folder: Path, disk: FileSystem = REAL_FILE_SYSTEM) -> int:
    """Remove what dead processes left; returns how many files."""
    return storage.filesystem.remove_temp_files(folder, lambda name: name.startswith(FILE_PREFIX), disk)


class OffloadFile:
    """One level's lines.  ConfigError: ``folder`` cannot take its files."""

    def __init__(self, share: LevelLayout, folder: Path, name: str, disk: FileSystem = REAL_FILE_SYSTEM) -> None:
        self.share, self.disk = share, disk
        self.written = self.read_ram = self.read_disk = self.failures = 0  # bytes, and operations that failed
        self.touched = 0  # lines of a layer that its file has reached
        self._ram = np.empty((share.layers, share.ram, share.block_bytes), np.uint8)
        self._sums = array("I", bytes(4 * share.layers * share.disk))
        self._lost: dict[tuple[int, int], str] = {}
        self._files: list[int] = []
        paths: list[Path] = []
        self._end = weakref.finalize(self, _remove, disk, self._files, paths)
        try:
            for layer in range(share.layers if share.disk else 0):
                path = storage.temp_paths.temp_path(folder / f"{FILE_PREFIX}{name}.{layer}", "tmp")
                self._files.append(disk.create(path))
                paths.append(path)
        except OSError as error:
            self._end()
            raise ConfigError(
                f"cannot spill to {folder}: {error.strerror or error}", "give another --spill-dir"
            ) from None
        self.paths = tuple(paths)

    def close(self) -> None:
        self._end()
        self._ram = self._ram[:, :0]

    def split_runs(self, numbers: Sequence[int]) -> list[BlockRun]:
        return split_runs(numbers, self.share.ram)

    # ------------------------------------------------------------ in

    def write(self, layer: int, runs: Sequence[BlockRun], lines: BlockBytes) -> None:
        """lines [n, line], contiguous."""
        for place, first, count in runs:
            part = lines[place : place + count]
            self.written += part.nbytes
            if first < self.share.ram:
                self._ram[layer, first : first + count] = part
            else:
                self._write(layer, first, part)

    def _write(self, layer: int, first: int, lines: BlockBytes) -> None:
        data, size, at = lines.reshape(-1).data, self.share.block_bytes, first - self.share.ram
        why = ""
        try:
            self.disk.write_at(self._files[layer], data, at * size)
        except OSError as error:
            why, self.failures = f"it could not be written: {error.strerror or error}", self.failures + 1
        self.touched = max(self.touched, at + len(lines))
        for number in range(len(lines)):
            self._sums[layer * self.share.disk + at + number] = zlib.crc32(data[number * size : (number + 1) * size])
            if why:
                self._lost[layer, first + number] = why
            else:
                self._lost.pop((layer, first + number), None)

    # ------------------------------------------------------------ out

    def read(self, layer: int, runs: Sequence[BlockRun], into: BlockBytes) -> dict[int, str]:
        """Into lines [n, line], contiguous; returns the places that hold nothing (zeros), and why."""
        lost: dict[int, str] = {}
        for place, first, count in runs:
            part = into[place : place + count]
            if first < 0:
                part[:] = 0
            elif first < self.share.ram:
                part[:] = self._ram[layer, first : first + count]
                self.read_ram += part.nbytes
            else:
                found = self._read(layer, first, part)
                self.read_disk += part.nbytes
                for number, why in found.items():
                    part[number] = 0
                    lost[place + number] = why
        return lost

    def ram_view(self, layer: int, run: BlockRun) -> BlockBytes | None:
        """The lines of a run that lies in memory: a view.  None: it does not."""
        _, first, count = run
        if not 0 <= first < self.share.ram:
            return None
        self.read_ram += count * self.share.block_bytes
        return self._ram[layer, first : first + count]

    def _read(self, layer: int, first: int, into: BlockBytes) -> dict[int, str]:
        data, size, at = into.reshape(-1).data, self.share.block_bytes, first - self.share.ram
        lost = {n: self._lost[layer, first + n] for n in range(len(into)) if (layer, first + n) in self._lost}
        try:
            got = self.disk.read(self._files[layer], data, at * size)
        except OSError as error:
            self.failures += 1
            return {n: lost.get(n, f"reading it failed: {error.strerror or error}") for n in range(len(into))}
        for number in range(len(into)):
            begin, end = number * size, (number + 1) * size
            if number in lost:
                continue
            if end > got:
                lost[number] = "its file was cut"
            elif zlib.crc32(data[begin:end]) != self._sums[layer * self.share.disk + at + number]:
                lost[number] = "its bytes are not those that were written"
        self.failures += bool(lost)
        return lost


def _remove(disk: FileSystem, files: list[int], paths: list[Path]) -> None:
    """What cannot be removed is left to the next sweep."""
    for file in files:
        with contextlib.suppress(OSError):
            disk.close(file)
    for path in paths:
        with contextlib.suppress(OSError):
            disk.remove(path)
    files.clear()
    paths.clear()
