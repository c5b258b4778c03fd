"""OffloadFile: lines are read as they were written or reported as lost, and no file is left."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvad.cache.config import CacheConfig
from kvad.cache.groups import build_groups
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
from kvad.storage.filesystem import FileSystem, remove_temp_files
from tests.support.faulty_filesystems import FailingDisk
from tests.support.random_models import model_config

LINE, LAYERS, RAM, ON_DISK = 48, 2, 3, 7
SHARE = LevelLayout(LAYERS, LINE, RAM, ON_DISK, 4)
ALL = list(range(RAM + ON_DISK))


@pytest.fixture
def offload_file(tmp_path: Path) -> Iterator[OffloadFile]:
    file = OffloadFile(SHARE, tmp_path, "0")
    yield file
    file.close()


def random_lines(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, LINE), dtype=np.uint8)


def fill(offload_file: OffloadFile, seed: int = 0) -> dict[int, np.ndarray]:
    """Write and return all lines of each layer, in two runs."""
    written = {layer: random_lines(seed + layer, len(ALL)) for layer in range(LAYERS)}
    for layer, lines in written.items():
        offload_file.write(layer, split_runs(ALL[:5], RAM), lines[:5])
        offload_file.write(layer, split_runs(ALL[5:], RAM), lines[5:])
    return written


def read(offload_file: OffloadFile, layer: int, numbers: list[int]) -> tuple[np.ndarray, dict[int, str]]:
    into = random_lines(99, len(numbers))
    return into, offload_file.read(layer, split_runs(numbers, RAM), into)


def test_consecutive_blocks_are_one_run():
    runs = [BlockRun(0, 4, 2), BlockRun(2, 6, 1), BlockRun(3, -1, 2), BlockRun(5, 9, 1)]
    assert split_runs([4, 5, 6, -1, -1, 9], 6) == runs
    assert split_runs([], 3) == [] and split_runs([7, 6], 3) == [BlockRun(0, 7, 1), BlockRun(1, 6, 1)]


def test_lines_are_read_from_ram_and_disk_in_any_order(offload_file):
    written, rng = fill(offload_file), random.Random(1)
    for _ in range(50):
        numbers, layer = [rng.choice([-1, *ALL]) for _ in range(rng.randint(1, 12))], rng.randrange(LAYERS)
        lines, lost = read(offload_file, layer, numbers)
        assert not lost
        for line, number in zip(lines, numbers, strict=True):
            assert (line == (written[layer][number] if number >= 0 else 0)).all()
    stats = offload_file.stats
    assert stats.written == LAYERS * len(ALL) * LINE and stats.from_ram and stats.from_disk
    assert [path.stat().st_size for path in offload_file.paths] == [ON_DISK * LINE] * LAYERS


def test_a_rewritten_line_is_read(offload_file):
    first, second = fill(offload_file), fill(offload_file, 10)
    for layer in range(LAYERS):
        lines, lost = read(offload_file, layer, ALL)
        assert not lost and (lines == second[layer]).all() and not (lines == first[layer]).all()


def test_files_are_private_and_removed_on_close(offload_file):
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in offload_file.paths)
    offload_file.close()
    assert not any(path.exists() for path in offload_file.paths)
    offload_file.close()


@pytest.mark.parametrize("at", range(0, ON_DISK * LINE, 7))
def test_a_flipped_bit_loses_one_line(offload_file, at):
    written = fill(offload_file)
    with offload_file.paths[0].open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    lines, lost = read(offload_file, 0, ALL)
    changed = RAM + at // LINE
    assert lost == {changed: "its checksum is wrong"}
    assert (np.delete(lines, changed, 0) == np.delete(written[0], changed, 0)).all() and not lines[changed].any()
    assert not read(offload_file, 1, ALL)[1]


@pytest.mark.parametrize("length", range(0, ON_DISK * LINE, 16))
def test_a_truncated_file_loses_the_missing_lines(offload_file, length):
    fill(offload_file)
    os.truncate(offload_file.paths[0], length)
    missing = {RAM + number: "its file is truncated" for number in range(length // LINE, ON_DISK)}
    assert read(offload_file, 0, ALL)[1] == missing


def test_a_lost_write_is_detected(tmp_path):
    """The disk reports success and keeps the old line."""

    class ForgetfulFiles(FileSystem):
        forgets = False

        def write_at(self, *args: object) -> None:
            if not self.forgets:
                super().write_at(*args)  # type: ignore[arg-type]

    disk = ForgetfulFiles()
    offload_file = OffloadFile(SHARE, tmp_path, "0", disk)
    fill(offload_file)
    disk.forgets = True
    fill(offload_file, 10)
    assert set(read(offload_file, 0, ALL)[1]) == set(ALL[RAM:])
    offload_file.close()


def use(folder: Path, disk: FailingDisk) -> None:
    """Write and read all lines; those that are not lost must be as written. OSError: the files were not created."""
    offload_file = OffloadFile(SHARE, folder, "0", disk)
    written = fill(offload_file)
    for layer in (0, 1, 0, 1):
        for numbers in (ALL[:5], ALL[5:]):
            lines, lost = read(offload_file, layer, numbers)
            for index, number in enumerate(numbers):
                assert index in lost or (lines[index] == written[layer][number]).all()
            assert not lost or offload_file.stats.failed
    offload_file.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_the_kth_operation_fails_for_every_k(tmp_path, code):
    counting = FailingDisk()
    use(tmp_path, counting)
    assert counting.count == 2 + 4 + 8 + 4  # create; write_at; read; close and remove
    for k in range(counting.count):
        disk = FailingDisk(k, code=code)
        if k < LAYERS:
            with pytest.raises(OSError, match=os.strerror(code)):
                use(tmp_path, disk)
        else:
            use(tmp_path, disk)
        assert disk.failed == 1
        for path in tmp_path.iterdir():  # A removal failed, or the close before it.
            path.unlink()


def test_a_failed_line_is_lost_until_it_is_rewritten(tmp_path):
    disk = FailingDisk(0, which=("write_at",), code=errno.ENOSPC)
    offload_file = OffloadFile(SHARE, tmp_path, "0", disk)
    fill(offload_file)
    assert read(offload_file, 0, [3, 4, 5])[1] == dict.fromkeys((0, 1), "could not be written: No space left on device")
    written = fill(offload_file, 5)
    lines, lost = read(offload_file, 0, [3, 4, 5])
    assert not lost and (lines == written[0][3:6]).all()
    offload_file.close()


CHILD = f"""
import os, sys; from pathlib import Path
from kvad.cache.offload.token_offload import LevelLayout, OffloadFile
file = OffloadFile(LevelLayout{tuple(SHARE)}, Path(sys.argv[1]), '0')
assert len(file.paths) == 2 and all(path.exists() for path in file.paths)
if len(sys.argv) > 2: os.kill(os.getpid(), int(sys.argv[2]))
"""


def test_files_are_removed_by_their_process_or_after_its_death(tmp_path, offload_file):
    command, other = [sys.executable, "-c", CHILD, str(tmp_path)], tmp_path / "notes.txt"
    other.write_text("notes")
    files = {*offload_file.paths, other}
    assert subprocess.run(command, check=False, timeout=120).returncode == 0
    assert set(tmp_path.iterdir()) == files
    assert subprocess.run([*command, str(int(signal.SIGKILL))], check=False, timeout=120).returncode == -9
    assert len(list(tmp_path.iterdir())) == len(files) + LAYERS
    assert remove_temp_files(tmp_path, lambda name: name.startswith(FILE_PREFIX)) == LAYERS
    assert set(tmp_path.iterdir()) == files


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4", "bfloat16", "fp8-e4m3"])
@pytest.mark.parametrize("heads", ["gqa", "mqa", "value-dim", "window-mix"])
def test_allocated_bytes_are_as_planned(tmp_path, dtype, heads):
    sizes = {"max_seq_len": 96, "max_num_seqs": 3, "block_size": 4, "prefill_chunk_size": 8}
    cache = CacheConfig(**sizes, dtype=dtype, policy="offload(16, interval=8)")
    groups = build_groups(attention_specs(model_config("rope", "pre", heads)), cache)
    for budget in (0, 1000, 20_000, 1 << 40):
        plan = plan_offload(groups, budget)
        assert plan.ram_bytes <= budget
        for number, share in plan.shares.items():
            offload_file, num_blocks = OffloadFile(share, tmp_path, str(number)), groups[number].num_usable_blocks
            assert offload_file._ram.nbytes == share.layers * share.ram * share.block_bytes
            assert len(offload_file._checksums) * offload_file._checksums.itemsize == 4 * share.layers * share.disk
            assert share.ram + share.disk == num_blocks and share.tile >= cache.max_num_seqs
            slices = block_slices(groups[number])
            assert all(a.offset + a.nbytes <= b.offset for a, b in pairwise(slices))
            assert all(each.offset % 16 == 0 for each in slices)
            assert slices[-1].offset + slices[-1].nbytes <= share.block_bytes
            lines = np.ones((num_blocks, share.block_bytes), np.uint8)
            for layer in range(share.layers):
                offload_file.write(layer, split_runs(range(num_blocks), share.ram), lines)
            written = sum(path.stat().st_size for path in offload_file.paths)
            assert written == share.layers * share.disk * share.block_bytes
            offload_file.close()
        assert plan.disk_bytes if budget < 2000 else plan.disk_bytes == 0 or budget < 1 << 40
