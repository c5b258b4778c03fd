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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvad.cache.sizing import CacheGroup

__all__ = ["ALIGN", "TILE", "NUM_TILES", "ArraySlice", "LevelLayout", "OffloadLayout", "block_slices", "plan_offload"]

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
