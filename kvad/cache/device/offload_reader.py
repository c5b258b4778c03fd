"""Tokens that were spilled, read back while a layer attends: the device's half of a level without a pool.

The host says which blocks leave (``Moves.pack``) and which a row reads (its level's table), as of any level.  Whole
blocks go into a :class:`~kvad.cache.offload.token_offload.OffloadFile` as the bytes that they were, so nothing is lost and no format knows of
it.  A step reads them once per layer, in tiles, and ``ops/merge.py`` takes parts one after the other: so what is there
at once is bounded, however long a row.  A tile in host memory is read where it lies.  Others come in an order that is
known when the step begins: a thread of its own reads ahead into two buffers in turn, the next tile of this layer or the
first of the next, while the layer attends to the last one.

Rows that read a line which is not there any more are told of (:meth:`Spill.lost`); what came out of their step is
theirs alone to be thrown away, for rows do not see one another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvad import ops, storage
from kvad.cache import offload
from kvad.cache.device.tensors import BlockTable, LayerTensor, gather_metadata
from kvad.cache.groups import CacheGroup
from kvad.errors import ConfigError
from kvad.model_input import NULL_BLOCK, RESERVED_BLOCKS, ModelInput, TokenPositions
from kvad.storage import REAL_FILE_SYSTEM, FileSystem

FEW = 8  # runs of a row in a tile that are copied one by one; more are gathered first


@dataclass(frozen=True)
class OffloadStats:
    """Bytes of older tokens that were ``written`` and read since the start, ``from_ram`` host memory and ``from_disk``;
    bytes that the files in ``folder`` (None: there are none) have come to; operations on them that ``failed``."""

    written: int
    from_ram: int
    from_disk: int
    disk_bytes: int
    failed: int
    folder: Path | None


class OffloadTile(NamedTuple):
    """Some blocks of each row of a lane: ``table`` [R, n], ``runs`` of its lines, none of two rows; ``near``: all of
    them lie in host memory."""

    sub_batch: int
    table: BlockTable
    keys: TokenPositions
    runs: list[offload.token_offload.BlockRun]
    in_ram: bool


class OffloadReader:
    """The spools of all levels that are spilled, and what reads them.

    ``ram``: bytes of host memory for their tokens; what passes them goes to files in ``folder``, which is made where
    it is not there, and swept.  ConfigError: it cannot be used.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        ram_bytes: int,
        folder: Path | None = None,
        disk: FileSystem = REAL_FILE_SYSTEM,
    ) -> None:
        self.plan = offload.token_offload.plan_offload(groups, ram_bytes)
        where = folder or storage.filesystem.user_cache_dir("spill")
        self.folder = where if self.plan.disk_bytes else None
        if self.folder is not None:
            _prepare(self.folder, disk)
        self._layers = {number: groups[number].layers for number in self.plan.shares}
        self._pieces = {number: offload.token_offload.block_slices(groups[number]) for number in self.plan.shares}
        self._heads = {number: groups[number].spec.num_kv_heads for number in self.plan.shares}
        self._codecs: dict[int, tuple[ops.quantize.FormatCodec, ops.quantize.FormatCodec]] = {}
        for number in self.plan.shares:
            self._codecs[number] = (
                ops.quantize.get_codec(groups[number].key_format),
                ops.quantize.get_codec(groups[number].value_format),
            )
        self.spools: dict[int, offload.token_offload.OffloadFile] = {}
        self._staging = [
            np.empty(self.plan.staging_bytes // offload.token_offload.NUM_TILES, np.uint8)
            for _ in range(offload.token_offload.NUM_TILES)
        ]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvad-spill")
        self._ahead: _ReadAhead | None = None
        try:
            for number, share in self.plan.shares.items():
                self.spools[number] = offload.token_offload.OffloadFile(share, where, str(number), disk)
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Remove the files.  Nothing can be read afterwards."""
        self._quiet()
        for spool in self.spools.values():
            spool.close()
        self._staging = []
        self._thread.shutdown()

    def stats(self) -> OffloadStats:
        every = list(self.spools.values())
        return OffloadStats(
            sum(spool.written for spool in every),
            sum(spool.read_ram for spool in every),
            sum(spool.read_disk for spool in every),
            sum(spool.touched * spool.share.layers * spool.share.block_bytes for spool in every),
            sum(spool.failures for spool in every),
            self.folder,
        )

    # ------------------------------------------------------------ between two steps

    def write_blocks(
        self, number: int, above: dict[int, tuple[LayerTensor, LayerTensor]], sources: Tensor, targets: Sequence[int]
    ) -> None:
        """Whole blocks of the group above go out, in every layer."""
        self._quiet()
        spool, made = self.spools[number], self._pieces[number]
        runs = spool.split_runs([target - RESERVED_BLOCKS for target in targets])
        lines = torch.zeros((len(targets), spool.share.block_bytes), dtype=torch.uint8)
        for layer, stores in above.items():
            raw = [array for store in stores for array in store.take_blocks(sources)]
            for piece, array in zip(made, raw, strict=True):
                flat = array.flatten(1).contiguous().view(torch.uint8)
                lines[:, piece.offset : piece.offset + piece.nbytes] = flat.cpu()
            spool.write(self._layers[number].index(layer), runs, lines.numpy())

    # ------------------------------------------------------------ a step

    def open(self, step: ModelInput, positions: Sequence[Tensor]) -> dict[int, list[OffloadTile]]:
        """What a step reads, by group; from now on it is read ahead.  ``positions``: columns, by group."""
        self._quiet()
        tiles = {number: list(self._tiles(number, step, positions[number])) for number in self.spools}
        jobs = [
            (layer, number, tile)
            for number, every in tiles.items()
            for layer in self._layers[number]
            for tile in every
            if not tile.in_ram
        ]
        jobs.sort(key=lambda job: job[:1])
        self._ahead = _ReadAhead(self, jobs)
        return tiles

    def _tiles(self, number: int, step: ModelInput, column: Tensor) -> Iterator[OffloadTile]:
        share, size = self.spools[number].share, column.shape[1]
        for lane, blocks in enumerate(step.slot_mappings[number].block_tables):
            rows, per_row = blocks.shape
            many = max(1, share.tile // rows)
            for at in range(0, per_row, many):
                cut = blocks[:, at : at + many]
                table = BlockTable(cut, size, cut.shape[1] * size)
                runs = [
                    run._replace(tile_index=run.tile_index + row * cut.shape[1])
                    for row, ids in enumerate(cut.tolist())
                    for run in self.spools[number].split_runs(
                        [block - RESERVED_BLOCKS if block != NULL_BLOCK else -1 for block in ids]
                    )
                ]
                near = len(runs) <= FEW * rows and all(run.first < share.ram for run in runs)
                yield OffloadTile(lane, table, TokenPositions(gather_metadata(column, table)), runs, near)

    def read(self, number: int, layer: int, tile: OffloadTile, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [R, K, S, D] and values [R, K, S, Dv] of the step's next tile, in the dtype and on the device of
        ``like``."""
        assert self._ahead is not None, "no step is open"
        if tile.in_ram:
            spool, place = self.spools[number], self._layers[number].index(layer)
            found = [(run.tile_index, spool.ram_view(place, run)) for run in tile.runs]
            lines = [(place, torch.from_numpy(there)) for place, there in found if there is not None]
        else:
            lines = [(0, self._ahead.take(layer, tile))]
        rows, blocks = tile.table.rows, tile.table.per_row
        shape = rows, self._heads[number], blocks, tile.table.block_size
        raw: tuple[list[Tensor], list[Tensor]] = [], []
        for piece in self._pieces[number]:
            raw[piece.is_value].append(_arrays(lines, piece, shape, like.device))
        if not tile.in_ram:
            self._ahead.done()
        keys, values = self._codecs[number]
        return keys.decode(raw[0], like.dtype), values.decode(raw[1], like.dtype)

    def failed_rows(self, step_rows: Sequence[int]) -> dict[int, str]:
        """Of the step that was opened last: which of its rows read what is not there, and why.  ``step_rows``: rows of
        each lane."""
        found = {} if self._ahead is None else self._ahead.lost
        return {sum(step_rows[:lane]) + row: why for (lane, row), why in found.items()}

    def _job(self, layer: int, number: int, tile: OffloadTile, buffer: int) -> dict[int, str]:
        line = self.spools[number].share.block_bytes
        count = tile.table.rows * tile.table.per_row
        into = self._staging[buffer][: count * line].reshape(count, line)
        return self.spools[number].read(self._layers[number].index(layer), tile.runs, into)

    def _quiet(self) -> None:
        """Nothing is being read when this returns."""
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None


class _ReadAhead:
    """One step's reads in their order, as many at a time as there are buffers."""

    def __init__(self, spill: OffloadReader, jobs: Sequence[tuple[int, int, OffloadTile]]) -> None:
        self.lost: dict[tuple[int, int], str] = {}
        self._spill, self._jobs = spill, deque(jobs)
        self._flying: deque[tuple[int, int, OffloadTile, int, Future[dict[int, str]]]] = deque()
        for buffer in range(offload.token_offload.NUM_TILES):
            self._submit(buffer)

    def _submit(self, buffer: int) -> None:
        if self._jobs:
            layer, number, tile = self._jobs.popleft()
            future = self._spill._thread.submit(self._spill._job, layer, number, tile, buffer)
            self._flying.append((layer, number, tile, buffer, future))

    def take(self, layer: int, tile: OffloadTile) -> Tensor:
        """[n, line], the next tile: it stays until :meth:`done`."""
        planned, number, next_tile, buffer, future = self._flying[0]
        assert planned == layer and next_tile is tile, "tiles are read in the order of the layers"
        for place, why in future.result().items():
            self.lost.setdefault((tile.sub_batch, place // tile.table.per_row), why)
        count, line = tile.table.rows * tile.table.per_row, self._spill.spools[number].share.block_bytes
        return torch.from_numpy(self._spill._staging[buffer][: count * line]).view(count, line)

    def done(self) -> None:
        *_, buffer, _ = self._flying.popleft()
        self._submit(buffer)

    def stop(self) -> None:
        self._jobs.clear()
        while self._flying:
            *_, future = self._flying.popleft()
            if not future.cancel():
                future.exception()


def _prepare(folder: Path, disk: FileSystem) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        offload.token_offload.remove_offload_leftovers(folder, disk)
    except OSError as error:
        raise ConfigError(f"cannot spill to {folder}: {error.strerror or error}", "give another --spill-dir") from None


def _arrays(
    lines: Sequence[tuple[int, Tensor]],
    piece: offload.token_offload.ArraySlice,
    shape: tuple[int, int, int, int],
    device: torch.device,
) -> Tensor:
    """(place, lines [n, bytes]) of a tile, of whole rows or of parts of one -> that array of all of them,
    [R, K, P * block_size, width], a copy; ``shape``: R, K, P, block_size."""
    rows, heads, blocks, size = shape
    dtype: torch.dtype = getattr(torch, piece.dtype)
    whole = sum(len(part) for _, part in lines) == rows * blocks
    made = (torch.empty if whole else torch.zeros)((rows, heads, blocks, size, piece.width), dtype=dtype, device=device)
    for place, part in lines:
        there = part[:, piece.offset : piece.offset + piece.nbytes].view(dtype).view(-1, heads, size, piece.width)
        if len(there) == rows * blocks:
            made.copy_(there.view(rows, blocks, heads, size, piece.width).transpose(1, 2))
        else:
            at = place % blocks
            made[place // blocks, :, at : at + len(there)] = there.transpose(0, 1)
    return made.view(rows, heads, blocks * size, piece.width)
