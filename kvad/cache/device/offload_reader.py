"""Offload reader: streams offloaded tokens from RAM and disk while a layer attends.

The host decides which blocks are offloaded (``BlockOps.quantize``) and which a sequence reads (its level's block
table), as for any level. Whole blocks are stored as raw bytes in an
``kvad.cache.token_offload.OffloadFile``, so no information is lost. A step reads them once per layer, in
tiles, and ``ops/merge.py`` merges the attention parts one after the other, so temporary memory is bounded for any
length. A tile in RAM is read in place. The order of other tiles is known when the step begins: a thread reads ahead
into two alternating buffers, the next tile of this layer or the first of the next layer, while the layer attends to the
current one.

Sequences whose blocks cannot be read are reported (``OffloadReader.failed_rows``); only their own outputs are
wrong, because sequences do not attend to each other.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
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
from kvad.storage import REAL_FILE_SYSTEM, FileSystem, IoThread

token_offload = offload.token_offload

MAX_RUNS_IN_PLACE = 8  # runs per sequence and tile that are read in place; more are gathered first


class OffloadTile(NamedTuple):
    """Some blocks of each sequence of a sub-batch."""

    sub_batch: int
    table: BlockTable  # [R, n]
    keys: TokenPositions
    runs: list[token_offload.BlockRun]  # no run contains blocks of two sequences
    in_ram: bool  # All blocks are in RAM.


class OffloadReader:
    """Reads and writes the blocks of all offloaded levels.

    Args:
        groups: All cache groups.
        ram_bytes: RAM for their tokens; further tokens are in files.
        folder: Folder of the files, created if missing; leftovers in it are removed.
        fs: File system.

    Raises:
        ConfigError: If the folder cannot be used.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        ram_bytes: int,
        folder: Path | None = None,
        fs: FileSystem = REAL_FILE_SYSTEM,
    ) -> None:
        self.plan = token_offload.plan_offload(groups, ram_bytes)
        target_folder = folder or storage.filesystem.user_cache_dir("offload")
        self.folder = target_folder if self.plan.disk_bytes else None
        self._groups = {group_index: groups[group_index] for group_index in self.plan.shares}
        self._slices = {group_index: token_offload.block_slices(group) for group_index, group in self._groups.items()}
        self._codecs = {
            group_index: (ops.quantize.get_codec(group.key_format), ops.quantize.get_codec(group.value_format))
            for group_index, group in self._groups.items()
        }
        self.offload_files: dict[int, token_offload.OffloadFile] = {}
        self._stats = token_offload.OffloadStats(folder=self.folder)
        tile_bytes = self.plan.staging_bytes // token_offload.NUM_TILES
        self._staging = [np.empty(tile_bytes, np.uint8) for _ in range(token_offload.NUM_TILES)]
        self._thread = IoThread("kvad-offload")
        weakref.finalize(self, self._thread.finish)
        self._read_ahead: _ReadAhead | None = None
        try:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                prefix = token_offload.FILE_PREFIX
                storage.filesystem.remove_temp_files(self.folder, lambda name: name.startswith(prefix), fs)
            for group_index, share in self.plan.shares.items():
                self.offload_files[group_index] = token_offload.OffloadFile(
                    share, target_folder, str(group_index), fs, self._stats
                )
        except OSError as error:
            self.close()
            raise ConfigError(
                f"cache.offload_dir: cannot write to {target_folder}: {error.strerror or error}",
                "Give another folder: --offload-dir.",
            ) from None

    def close(self) -> None:
        """Remove the files. Nothing can be read afterwards."""
        self._stop_reading()
        for offload_file in self.offload_files.values():
            offload_file.close()
        self._staging = []
        self._thread.stop()

    def stats(self) -> token_offload.OffloadStats:
        return replace(self._stats)

    def write_blocks(
        self,
        group_index: int,
        upper: dict[int, tuple[LayerTensor, LayerTensor]],
        sources: Tensor,
        targets: Sequence[int],
    ) -> None:
        """Offload whole blocks of the upper level, in every layer."""
        self._stop_reading()
        offload_file, slices = self.offload_files[group_index], self._slices[group_index]
        runs = token_offload.split_runs([target - RESERVED_BLOCKS for target in targets], offload_file.share.ram)
        lines = torch.zeros((len(targets), offload_file.share.block_bytes), dtype=torch.uint8)
        for layer, stores in upper.items():
            raw = [array[sources] for store in stores for array in store.arrays]
            for array_slice, array in zip(slices, raw, strict=True):
                flat = array.flatten(1).contiguous().view(torch.uint8)
                lines[:, array_slice.offset : array_slice.offset + array_slice.nbytes] = flat.cpu()
            offload_file.write(self._groups[group_index].layers.index(layer), runs, lines.numpy())

    def open(self, model_input: ModelInput, positions: Sequence[Tensor]) -> dict[int, list[OffloadTile]]:
        """Return the tiles that a step reads, by group, and start reading ahead; ``positions`` are the columns."""
        self._stop_reading()
        tiles = {
            group_index: list(self._tiles(group_index, model_input, positions[group_index]))
            for group_index in self.offload_files
        }
        jobs = [
            (layer, group_index, tile)
            for group_index, group_tiles in tiles.items()
            for layer in self._groups[group_index].layers
            for tile in group_tiles
            if not tile.in_ram
        ]
        jobs.sort(key=lambda job: job[0])
        self._read_ahead = _ReadAhead(self, jobs)
        return tiles

    def _tiles(self, group_index: int, model_input: ModelInput, column: Tensor) -> Iterator[OffloadTile]:
        """Yield the tiles of one group in reading order."""
        share, size = self.offload_files[group_index].share, column.shape[1]
        for sub_batch, blocks in enumerate(model_input.slot_mappings[group_index].block_tables):
            num_seqs, per_row = blocks.shape
            blocks_per_tile = max(1, share.tile // num_seqs)
            for start in range(0, per_row, blocks_per_tile):
                tile_blocks = blocks[:, start : start + blocks_per_tile]
                width = tile_blocks.shape[1]
                table = BlockTable(tile_blocks, size, width * size)
                file_blocks = torch.where(tile_blocks == NULL_BLOCK, -1, tile_blocks - RESERVED_BLOCKS)
                runs = [
                    run._replace(tile_index=run.tile_index + seq * width)
                    for seq, block_ids in enumerate(file_blocks.tolist())
                    for run in token_offload.split_runs(block_ids, share.ram)
                ]
                in_ram = len(runs) <= MAX_RUNS_IN_PLACE * num_seqs and all(run.first < share.ram for run in runs)
                yield OffloadTile(sub_batch, table, TokenPositions(gather_metadata(column, table)), runs, in_ram)

    def read(self, group_index: int, layer: int, tile: OffloadTile, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [R, K, S, D] and values [R, K, S, Dv] of the step's next tile.

        Dtype and device are those of ``like``.
        """
        assert self._read_ahead is not None, "open must precede read"
        if tile.in_ram:
            offload_file, layer_index = self.offload_files[group_index], self._groups[group_index].layers.index(layer)
            views = [(run.tile_index, offload_file.ram_view(layer_index, run)) for run in tile.runs]
            lines = [(layer_index, torch.from_numpy(view)) for layer_index, view in views if view is not None]
        else:
            lines = [(0, self._read_ahead.take(layer, tile))]
        num_seqs, num_blocks = tile.table.rows, tile.table.per_row
        shape = num_seqs, self._groups[group_index].spec.num_kv_heads, num_blocks, tile.table.block_size
        raw: tuple[list[Tensor], list[Tensor]] = [], []
        for array_slice in self._slices[group_index]:
            raw[array_slice.is_value].append(_arrays(lines, array_slice, shape, like.device))
        if not tile.in_ram:
            self._read_ahead.done()
        (keys, values), spec = self._codecs[group_index], self._groups[group_index].spec
        decoded = keys.decode(raw[0], like.dtype)
        if spec.values_in_keys:
            return decoded, decoded[..., spec.head_dim - spec.value_dim :]
        return decoded, values.decode(raw[1], like.dtype)

    def failed_rows(self, seqs_per_sub_batch: Sequence[int]) -> dict[int, str]:
        """Return the sequences of the last step with unreadable blocks, and the causes."""
        lost = {} if self._read_ahead is None else self._read_ahead.lost
        return {sum(seqs_per_sub_batch[:sub_batch]) + seq: reason for (sub_batch, seq), reason in lost.items()}

    def _stop_reading(self) -> None:
        if self._read_ahead is not None:
            self._read_ahead.stop()
            self._read_ahead = None


class _ReadAhead:
    """Reads of one step in order, one per buffer at a time."""

    def __init__(self, reader: OffloadReader, jobs: Sequence[tuple[int, int, OffloadTile]]) -> None:
        self.lost: dict[tuple[int, int], str] = {}
        self._reader, self._jobs = reader, deque(jobs)
        # By read: layer, tile, the part of the buffer that it fills [n, block_bytes], buffer, result.
        self._in_flight: deque[tuple[int, OffloadTile, token_offload.BlockBytes, int, Future[dict[int, str]]]] = deque()
        for buffer in range(token_offload.NUM_TILES):
            self._submit(buffer)

    def _submit(self, buffer: int) -> None:
        if self._jobs:
            reader, (layer, group_index, tile) = self._reader, self._jobs.popleft()
            count, block_bytes = tile.table.rows * tile.table.per_row, reader.plan.shares[group_index].block_bytes
            into = reader._staging[buffer][: count * block_bytes].reshape(count, block_bytes)
            layer_index = reader._groups[group_index].layers.index(layer)
            read = partial(reader.offload_files[group_index].read, layer_index, tile.runs, into)
            self._in_flight.append((layer, tile, into, buffer, reader._thread.submit(read)))

    def take(self, layer: int, tile: OffloadTile) -> Tensor:
        """Return the next tile, [n, block_bytes]; it is valid until ``done``."""
        planned_layer, next_tile, lines, _, future = self._in_flight[0]
        assert planned_layer == layer and next_tile is tile, "tiles must be read in layer order"
        for tile_index, reason in future.result().items():
            self.lost.setdefault((tile.sub_batch, tile_index // tile.table.per_row), reason)
        return torch.from_numpy(lines)

    def done(self) -> None:
        """Reuse the buffer of the tile that was taken."""
        *_, buffer, _ = self._in_flight.popleft()
        self._submit(buffer)

    def stop(self) -> None:
        """Cancel all reads and wait for running ones."""
        self._jobs.clear()
        while self._in_flight:
            *_, future = self._in_flight.popleft()
            if not future.cancel():
                future.exception()


def _arrays(
    lines: Sequence[tuple[int, Tensor]],
    array_slice: token_offload.ArraySlice,
    shape: tuple[int, int, int, int],
    device: torch.device,
) -> Tensor:
    """Return one array of all blocks of a tile, [R, K, P * block_size, width], a copy.

    ``lines`` are (tile index, [n, bytes]) of whole sequences or of parts of one; ``shape`` is R, K, P, block_size.
    """
    num_seqs, num_heads, num_blocks, block_size = shape
    dtype: torch.dtype = getattr(torch, array_slice.dtype)
    is_complete = sum(len(part) for _, part in lines) == num_seqs * num_blocks
    allocate = torch.empty if is_complete else torch.zeros
    result = allocate((num_seqs, num_heads, num_blocks, block_size, array_slice.width), dtype=dtype, device=device)
    for tile_index, part in lines:
        raw = part[:, array_slice.offset : array_slice.offset + array_slice.nbytes]
        view = raw.view(dtype).view(-1, num_heads, block_size, array_slice.width)
        if len(view) == num_seqs * num_blocks:
            result.copy_(view.view(num_seqs, num_blocks, num_heads, block_size, array_slice.width).transpose(1, 2))
        else:
            start = tile_index % num_blocks
            result[tile_index // num_blocks, :, start : start + len(view)] = view.transpose(0, 1)
    return result.view(num_seqs, num_heads, num_blocks * block_size, array_slice.width)
