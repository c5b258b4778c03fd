"""A spool gives back what it was given, or says of which lines it does not, and leaves no file behind."""

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
    BlockRun,
    LevelLayout,
    OffloadFile,
    block_slices,
    plan_offload,
    remove_offload_leftovers,
    split_runs,
)
from kvad.config.model import attention_specs
from kvad.errors import ConfigError
from kvad.storage.filesystem import REAL_FILE_SYSTEM, FileSystem
from tests.support.faulty_filesystems import FailingDisk
from tests.support.random_models import model_config

LINE, LAYERS, RAM, ON_DISK = 48, 2, 3, 7
SHARE = LevelLayout(LAYERS, LINE, RAM, ON_DISK, 4)


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[OffloadFile]:
    made = OffloadFile(SHARE, tmp_path, "0")
    yield made
    made.close()


def lines(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, LINE), dtype=np.uint8)


def fill(spool: OffloadFile, seed: int = 0) -> dict[int, np.ndarray]:
    """Every line of every layer, in two runs of each."""
    told = {}
    for layer in range(LAYERS):
        told[layer] = lines(seed + layer, RAM + ON_DISK)
        spool.write(layer, spool.split_runs(range(5)), told[layer][:5])
        spool.write(layer, spool.split_runs(range(5, 10)), told[layer][5:])
    return told


def read(spool: OffloadFile, layer: int, numbers: list[int]) -> tuple[np.ndarray, dict[int, str]]:
    into = lines(99, len(numbers))
    return into, spool.read(layer, spool.split_runs(numbers), into)


def test_neighbours_are_read_together() -> None:
    assert split_runs([4, 5, 6, -1, -1, 9], 6) == [
        BlockRun(0, 4, 2),
        BlockRun(2, 6, 1),
        BlockRun(3, -1, 2),
        BlockRun(5, 9, 1),
    ]
    assert split_runs([], 3) == [] and split_runs([7, 6], 3) == [BlockRun(0, 7, 1), BlockRun(1, 6, 1)]


def test_lines_come_back_from_memory_and_from_disk_in_any_order(spool: OffloadFile) -> None:
    told, rng = fill(spool), random.Random(1)
    for _ in range(50):
        numbers = [rng.choice([-1, *range(10)]) for _ in range(rng.randint(1, 12))]
        layer = rng.randrange(LAYERS)
        got, lost = read(spool, layer, numbers)
        assert not lost
        for line, number in zip(got, numbers, strict=True):
            assert (line == (told[layer][number] if number >= 0 else 0)).all()
    assert spool.written == LAYERS * 10 * LINE and spool.read_ram and spool.read_disk
    assert [path.stat().st_size for path in spool.paths] == [ON_DISK * LINE] * LAYERS


def test_what_is_written_again_is_what_is_read(spool: OffloadFile) -> None:
    fill(spool)
    told = fill(spool, 10)
    assert (read(spool, 1, list(range(10)))[0] == told[1]).all()


def test_a_file_is_for_its_owner_and_ends_with_the_spool(spool: OffloadFile) -> None:
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in spool.paths)
    spool.close()
    assert not any(path.exists() for path in spool.paths)
    spool.close()


@pytest.mark.parametrize("at", range(0, ON_DISK * LINE, 7))
def test_a_flipped_bit_is_told_of_that_line_alone(spool: OffloadFile, at: int) -> None:
    told = fill(spool)
    with spool.paths[0].open("r+b") as file:
        file.seek(at)
        (was,) = file.read(1)
        file.seek(at)
        file.write(bytes([was ^ 4]))
    got, lost = read(spool, 0, list(range(10)))
    hit = RAM + at // LINE
    assert lost == {hit: "its checksum is wrong"}
    assert (np.delete(got, hit, 0) == np.delete(told[0], hit, 0)).all() and not got[hit].any()
    assert not read(spool, 1, list(range(10)))[1]


@pytest.mark.parametrize("length", range(0, ON_DISK * LINE, 16))
def test_a_file_that_was_cut_gives_what_is_left(spool: OffloadFile, length: int) -> None:
    fill(spool)
    os.truncate(spool.paths[0], length)
    _, lost = read(spool, 0, list(range(10)))
    assert lost == {RAM + number: "its file is truncated" for number in range(length // LINE, ON_DISK)}


def test_a_lost_write_is_noticed(tmp_path: Path) -> None:
    """The disk says yes, and has the line of before."""

    class Forgets(FileSystem):
        forgets = False

        def write_at(self, file: int, data: object, offset: int) -> None:
            if not self.forgets:
                super().write_at(file, data, offset)  # type: ignore[arg-type]

    disk = Forgets()
    spool = OffloadFile(SHARE, tmp_path, "0", disk)
    fill(spool)
    disk.forgets = True
    fill(spool, 10)
    assert set(read(spool, 0, list(range(10)))[1]) == set(range(RAM, 10))
    spool.close()


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
    """What is not told to be lost is what was written."""
    if disk.k is not None and disk.k < LAYERS:
        with pytest.raises(
            ConfigError, match=r"offload_dir: cannot write to .* \(Give another folder: --offload-dir\.\)"
        ):
            OffloadFile(SHARE, folder, "0", disk)
        return
    spool = OffloadFile(SHARE, folder, "0", disk)
    told = fill(spool)
    for _ in range(2):
        for layer in range(LAYERS):
            for numbers in ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9]):
                got, lost = read(spool, layer, numbers)
                for place, number in enumerate(numbers):
                    assert place in lost or (got[place] == told[layer][number]).all()
                assert not lost or spool.failures
    spool.close()


def test_a_line_that_could_not_be_written_is_lost_until_it_is_written_again(tmp_path: Path) -> None:
    disk = FailingDisk(0, which=("write_at",), code=errno.ENOSPC)
    spool = OffloadFile(SHARE, tmp_path, "0", disk)
    fill(spool)
    assert read(spool, 0, [3, 4, 5])[1] == dict.fromkeys((0, 1), "could not be written: No space left on device")
    told = fill(spool, 5)
    got, lost = read(spool, 0, [3, 4, 5])
    assert not lost and (got == told[0][3:6]).all()
    spool.close()


def test_files_of_the_dead_are_swept_and_those_of_the_living_are_not(tmp_path: Path, spool: OffloadFile) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from kvad.cache.offload.token_offload import LevelLayout, OffloadFile\n"
        f"s = OffloadFile(LevelLayout{tuple(SHARE)}, Path(sys.argv[1]), '0'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == -9
    other = tmp_path / "notes.txt"
    other.write_text("somebody else's")
    assert len(list(tmp_path.iterdir())) == 2 * LAYERS + 1
    assert remove_offload_leftovers(tmp_path) == LAYERS
    assert set(tmp_path.iterdir()) == {*spool.paths, other}


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
def test_a_spool_takes_what_the_plan_says(tmp_path: Path, dtype: str, heads: str) -> None:
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
            spool = OffloadFile(share, tmp_path, str(number), REAL_FILE_SYSTEM)
            assert spool._ram.nbytes == share.layers * share.ram * share.block_bytes
            assert len(spool._checksums) * spool._checksums.itemsize == 4 * share.layers * share.disk
            assert share.ram + share.disk == placed[number].num_usable_blocks and share.tile >= cache.max_num_seqs
            every = block_slices(placed[number])
            assert all(a.offset + a.nbytes <= b.offset for a, b in pairwise(every))
            assert (
                all(each.offset % 16 == 0 for each in every)
                and every[-1].offset + every[-1].nbytes <= share.block_bytes
            )
            for layer in range(share.layers):
                spool.write(
                    layer,
                    spool.split_runs(range(placed[number].num_usable_blocks)),
                    np.ones((placed[number].num_usable_blocks, share.block_bytes), np.uint8),
                )
            assert sum(path.stat().st_size for path in spool.paths) == share.layers * share.disk * share.block_bytes
            spool.close()
        assert plan.disk_bytes if budget < 2000 else plan.disk_bytes == 0 or budget < 1 << 40


def test_the_lowest_free_block_comes_first() -> None:
    pool, rng, taken = LowestFreeBlockPool(40), random.Random(3), list[int]()
    for _ in range(500):
        if taken and rng.random() < 0.45:
            pool.decref(taken.pop(rng.randrange(len(taken))))
        elif len(taken) < 38:
            lowest = min(set(range(2, 40)) - set(taken))
            taken.append(pool.allocate()[0])
            assert taken[-1] == lowest
        pool.check()
