"""OffloadFile: lines are read as they were written or reported as lost, and no file is left."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvad.cache.config import CacheConfig
from kvad.cache.groups import build_groups
from kvad.cache.manager.block_pool import LowestFreeBlockPool
from kvad.cache.offload.token_offload import (
    FILE_PREFIX,
    BlockRun,
    LevelLayout,
    OffloadFile,
    block_slices,
    plan_offload,
    split_runs,
)
from kvad.config.model import attention_specs
from kvad.errors import ConfigError
from kvad.storage.filesystem import REAL_FILE_SYSTEM, FileSystem, remove_temp_files
from tests.support.faulty_filesystems import FailingDisk
from tests.support.random_models import model_config

LINE, LAYERS, RAM, ON_DISK = 48, 2, 3, 7
SHARE = LevelLayout(LAYERS, LINE, RAM, ON_DISK, 4)


@pytest.fixture
def offload_file(tmp_path: Path) -> Iterator[OffloadFile]:
    made = OffloadFile(SHARE, tmp_path, "0")
    yield made
    made.close()


def lines(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, LINE), dtype=np.uint8)


def fill(offload_file: OffloadFile, seed: int = 0) -> dict[int, np.ndarray]:
    """Every line of every layer, in two runs of each."""
    told = {}
    for layer in range(LAYERS):
        told[layer] = lines(seed + layer, RAM + ON_DISK)
        offload_file.write(layer, split_runs(range(5), offload_file.share.ram), told[layer][:5])
        offload_file.write(layer, split_runs(range(5, 10), offload_file.share.ram), told[layer][5:])
    return told


def read(offload_file: OffloadFile, layer: int, numbers: list[int]) -> tuple[np.ndarray, dict[int, str]]:
    into = lines(99, len(numbers))
    return into, offload_file.read(layer, split_runs(numbers, offload_file.share.ram), into)


def test_consecutive_blocks_are_one_run() -> None:
    assert split_runs([4, 5, 6, -1, -1, 9], 6) == [
        BlockRun(0, 4, 2),
        BlockRun(2, 6, 1),
        BlockRun(3, -1, 2),
        BlockRun(5, 9, 1),
    ]
    assert split_runs([], 3) == [] and split_runs([7, 6], 3) == [BlockRun(0, 7, 1), BlockRun(1, 6, 1)]


def test_lines_are_read_from_ram_and_disk_in_any_order(offload_file: OffloadFile) -> None:
    told, rng = fill(offload_file), random.Random(1)
    for _ in range(50):
        numbers = [rng.choice([-1, *range(10)]) for _ in range(rng.randint(1, 12))]
        layer = rng.randrange(LAYERS)
        got, lost = read(offload_file, layer, numbers)
        assert not lost
        for line, number in zip(got, numbers, strict=True):
            assert (line == (told[layer][number] if number >= 0 else 0)).all()
    assert offload_file.written == LAYERS * 10 * LINE and offload_file.read_ram and offload_file.read_disk
    assert [path.stat().st_size for path in offload_file.paths] == [ON_DISK * LINE] * LAYERS


def test_a_rewritten_line_is_read(offload_file: OffloadFile) -> None:
    fill(offload_file)
    told = fill(offload_file, 10)
    assert (read(offload_file, 1, list(range(10)))[0] == told[1]).all()


def test_files_are_private_and_removed_on_close(offload_file: OffloadFile) -> None:
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in offload_file.paths)
    offload_file.close()
    assert not any(path.exists() for path in offload_file.paths)
    offload_file.close()


@pytest.mark.parametrize("at", range(0, ON_DISK * LINE, 7))
def test_a_flipped_bit_loses_one_line(offload_file: OffloadFile, at: int) -> None:
    told = fill(offload_file)
    with offload_file.paths[0].open("r+b") as file:
        file.seek(at)
        (was,) = file.read(1)
        file.seek(at)
        file.write(bytes([was ^ 4]))
    got, lost = read(offload_file, 0, list(range(10)))
    hit = RAM + at // LINE
    assert lost == {hit: "its checksum is wrong"}
    assert (np.delete(got, hit, 0) == np.delete(told[0], hit, 0)).all() and not got[hit].any()
    assert not read(offload_file, 1, list(range(10)))[1]


@pytest.mark.parametrize("length", range(0, ON_DISK * LINE, 16))
def test_a_truncated_file_loses_the_missing_lines(offload_file: OffloadFile, length: int) -> None:
    fill(offload_file)
    os.truncate(offload_file.paths[0], length)
    _, lost = read(offload_file, 0, list(range(10)))
    assert lost == {RAM + number: "its file is truncated" for number in range(length // LINE, ON_DISK)}


def test_a_lost_write_is_detected(tmp_path: Path) -> None:
    """The disk reports success and keeps the old line."""

    class Forgets(FileSystem):
        forgets = False

        def write_at(self, file: int, data: object, offset: int) -> None:
            if not self.forgets:
                super().write_at(file, data, offset)  # type: ignore[arg-type]

    disk = Forgets()
    offload_file = OffloadFile(SHARE, tmp_path, "0", disk)
    fill(offload_file)
    disk.forgets = True
    fill(offload_file, 10)
    assert set(read(offload_file, 0, list(range(10)))[1]) == set(range(RAM, 10))
    offload_file.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_the_kth_operation_fails_for_every_k(tmp_path: Path, code: int) -> None:
    counting = FailingDisk()
    work(tmp_path, counting)
    assert counting.count == 2 + 4 + 8 + 4  # create; write_at; read; close and remove
    for k in range(counting.count):
        disk = FailingDisk(k, code=code)
        work(tmp_path, disk)
        assert disk.failed == 1
        for path in tmp_path.iterdir():  # a removal failed, or the close before it
            path.unlink()


def work(folder: Path, disk: FailingDisk) -> None:
    """Lines that are not reported as lost are as written."""
    if disk.k is not None and disk.k < LAYERS:
        with pytest.raises(
            ConfigError, match=r"offload_dir: cannot write to .* \(Give another folder: --offload-dir\.\)"
        ):
            OffloadFile(SHARE, folder, "0", disk)
        return
    offload_file = OffloadFile(SHARE, folder, "0", disk)
    told = fill(offload_file)
    for _ in range(2):
        for layer in range(LAYERS):
            for numbers in ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9]):
                got, lost = read(offload_file, layer, numbers)
                for place, number in enumerate(numbers):
                    assert place in lost or (got[place] == told[layer][number]).all()
                assert not lost or offload_file.failures
    offload_file.close()


def test_a_failed_line_is_lost_until_it_is_rewritten(tmp_path: Path) -> None:
    disk = FailingDisk(0, which=("write_at",), code=errno.ENOSPC)
    offload_file = OffloadFile(SHARE, tmp_path, "0", disk)
    fill(offload_file)
    assert read(offload_file, 0, [3, 4, 5])[1] == dict.fromkeys((0, 1), "could not be written: No space left on device")
    told = fill(offload_file, 5)
    got, lost = read(offload_file, 0, [3, 4, 5])
    assert not lost and (got == told[0][3:6]).all()
    offload_file.close()


def test_only_files_of_dead_processes_are_removed(tmp_path: Path, offload_file: OffloadFile) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from kvad.cache.offload.token_offload import LevelLayout, OffloadFile\n"
        f"s = OffloadFile(LevelLayout{tuple(SHARE)}, Path(sys.argv[1]), '0'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == -9
    other = tmp_path / "notes.txt"
    other.write_text("somebody else's")
    assert len(list(tmp_path.iterdir())) == 2 * LAYERS + 1
    assert remove_temp_files(tmp_path, lambda name: name.startswith(FILE_PREFIX)) == LAYERS
    assert set(tmp_path.iterdir()) == {*offload_file.paths, other}


def test_a_process_that_ends_removes_its_files(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from kvad.cache.offload.token_offload import LevelLayout, OffloadFile\n"
        f"s = OffloadFile(LevelLayout{tuple(SHARE)}, Path(sys.argv[1]), '0')\n"
        "assert len(list(Path(sys.argv[1]).iterdir())) == 2"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == 0
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4", "bfloat16", "fp8-e4m3"])
@pytest.mark.parametrize("heads", ["gqa", "mqa", "value-dim", "window-mix"])
def test_memory_is_as_planned(tmp_path: Path, dtype: str, heads: str) -> None:
    cache = CacheConfig(
        max_seq_len=96,
        max_num_seqs=3,
        block_size=4,
        prefill_chunk_size=8,
        dtype=dtype,
        policy="offload(16, interval=8)",
    )
    placed = build_groups(attention_specs(model_config("rope", "pre", heads)), cache)
    for budget in (0, 1000, 20_000, 1 << 40):
        plan = plan_offload(placed, budget)
        assert plan.ram_bytes <= budget
        for number, share in plan.shares.items():
            offload_file = OffloadFile(share, tmp_path, str(number), REAL_FILE_SYSTEM)
            assert offload_file._ram.nbytes == share.layers * share.ram * share.block_bytes
            assert len(offload_file._checksums) * offload_file._checksums.itemsize == 4 * share.layers * share.disk
            assert share.ram + share.disk == placed[number].num_usable_blocks and share.tile >= cache.max_num_seqs
            every = block_slices(placed[number])
            assert all(a.offset + a.nbytes <= b.offset for a, b in pairwise(every))
            assert (
                all(each.offset % 16 == 0 for each in every)
                and every[-1].offset + every[-1].nbytes <= share.block_bytes
            )
            for layer in range(share.layers):
                offload_file.write(
                    layer,
                    split_runs(range(placed[number].num_usable_blocks), offload_file.share.ram),
                    np.ones((placed[number].num_usable_blocks, share.block_bytes), np.uint8),
                )
            assert (
                sum(path.stat().st_size for path in offload_file.paths) == share.layers * share.disk * share.block_bytes
            )
            offload_file.close()
        assert plan.disk_bytes if budget < 2000 else plan.disk_bytes == 0 or budget < 1 << 40


def test_the_lowest_free_block_is_allocated_first() -> None:
    pool, rng, taken = LowestFreeBlockPool(40), random.Random(3), list[int]()
    for _ in range(500):
        if taken and rng.random() < 0.45:
            pool.decref(taken.pop(rng.randrange(len(taken))))
        elif len(taken) < 38:
            lowest = min(set(range(2, 40)) - set(taken))
            taken.append(pool.allocate())
            assert taken[-1] == lowest
        pool.check()
