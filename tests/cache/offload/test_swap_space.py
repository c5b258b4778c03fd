"""SwapSpace without a device: copies are bytes."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvad.cache.offload.swap_space import FILE_PREFIX, RESERVED_BYTES, RETRY, SwapFiles, SwapSpace
from kvad.errors import ConfigError
from kvad.storage.filesystem import REAL_FILE_SYSTEM, FileSystem
from kvad.storage.temp_paths import list_temp_paths
from tests.support.faulty_filesystems import FailingDisk
from tests.support.slow_swap_files import LateFiles, as_bytes, as_section

EVERYTHING = 1 << 30


class Driver:
    """A SwapSpace and its copies; a sequence of ``nbytes`` bytes has a content that depends on its key."""

    def __init__(
        self,
        folder: Path | None,
        ram: int | None = 0,
        *,
        disk: FileSystem = REAL_FILE_SYSTEM,
        jobs: Callable[[], int] = lambda: 0,
    ) -> None:
        self.copies: dict[int, bytes] = {}
        self.now = 0.0
        self.files = None if folder is None else LateFiles(folder, jobs, disk)
        self.swap_space = SwapSpace(
            self.copies,
            ram=ram,
            files=self.files,
            to_sections=lambda key, copy: as_section(copy),
            from_sections=as_bytes,
            clock=lambda: self.now,
        )

    def store(self, key: int, nbytes: int = 100, *, required: bool = True) -> None:
        """Store a sequence and make its copy."""
        self.swap_space.store(key, nbytes, (key, 0), required=required)
        self.copies[key] = content(key, nbytes)
        self.swap_space.poll()

    def work(self, count: int = EVERYTHING) -> None:
        if self.files is not None:
            self.files.work(count)
        self.swap_space.poll()
        self.swap_space.check()

    def states(self) -> dict[int, str]:
        return {key: self.swap_space.state(key) for key in self.swap_space._records}

    def swap_in(self, key: int) -> bytes:
        self.swap_space.pop(key)
        return self.copies.pop(key)


def content(key: int, nbytes: int = 100) -> bytes:
    return bytes((key + at) % 251 for at in range(nbytes))


def files_in(folder: Path) -> list[Path]:
    return [each.path for each in list_temp_paths(folder)]


# ---------------------------------------------------------------- memory and disk


def test_the_sequence_needed_last_is_written_first(tmp_path: Path) -> None:
    driver = Driver(tmp_path, ram=250)
    for key in (2, 3, 1):
        driver.store(key)
    assert driver.states() == {2: "in-ram", 3: "writing", 1: "in-ram"}
    assert 3 in driver.copies, "dropped before it was written"
    driver.work()
    assert driver.states() == {2: "in-ram", 3: "on-disk", 1: "in-ram"} and 3 not in driver.copies
    stats = driver.swap_space.stats()
    assert (stats.ram_bytes, stats.disk_bytes, stats.written) == (200, 100, 1)


def test_without_a_limit_nothing_is_written(tmp_path: Path) -> None:
    driver = Driver(tmp_path, ram=None)
    for key in range(5):
        driver.store(key)
    assert set(driver.states().values()) == {"in-ram"} and not files_in(tmp_path)
    assert (
        not driver.swap_space.bounded
        and driver.swap_space.location_for(1 << 60) == "ram"
        and driver.swap_space.has_room(1 << 60)
    )


def test_a_sequence_is_restored_unchanged(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.store(7)
    driver.work()
    driver.swap_space.prefetch(7)
    assert driver.states() == {7: "reading"} and driver.swap_space.pending
    driver.work()
    assert driver.states() == {7: "in-ram"} and driver.swap_in(7) == content(7)
    driver.work()
    assert not files_in(tmp_path) and not len(driver.swap_space)


def test_a_prefetched_sequence_stays_in_ram_until_another_is_prefetched(tmp_path: Path) -> None:
    """Its file stays, so that its copy can be dropped again without a write."""
    driver = Driver(tmp_path)
    driver.store(1)
    driver.work()
    driver.store(2)
    driver.work()
    driver.swap_space.prefetch(1)
    driver.work()
    driver.work()
    assert driver.states() == {1: "in-ram", 2: "on-disk"}
    driver.swap_space.prefetch(2)
    driver.work()
    assert driver.states() == {1: "on-disk", 2: "in-ram"}
    assert driver.swap_space.stats().written == 2


def test_a_sequence_that_is_being_written_can_be_swapped_in(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.store(1)
    assert driver.states() == {1: "writing"} and driver.swap_in(1) == content(1)
    driver.store(2)
    driver.work()
    assert driver.states() == {2: "on-disk"} and len(files_in(tmp_path)) == 1, "a late write left a file"


def test_a_late_result_is_not_applied_to_a_new_sequence_with_the_same_key(tmp_path: Path) -> None:
    """A sequence that is preempted again before its swap-in was applied has the same key."""
    driver = Driver(tmp_path)
    driver.store(1)
    assert driver.files is not None
    driver.files.work(EVERYTHING)  # The first file is complete, and its result was not returned yet.
    assert driver.swap_in(1) == content(1)
    driver.store(1)
    assert driver.states() == {1: "writing"} and driver.copies[1] == content(1)
    driver.work()
    driver.swap_space.prefetch(1)
    driver.work()
    assert driver.swap_in(1) == content(1)


def test_wait_returns_after_a_pending_read(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.store(1)
    driver.work()
    driver.swap_space.prefetch(1)
    assert not driver.swap_space.poll()
    driver.swap_space.wait()
    assert driver.states() == {1: "in-ram"}
    assert driver.swap_space.poll(), "poll does not report the finished read"


def test_location_and_room(tmp_path: Path) -> None:
    driver = Driver(tmp_path, ram=150)
    swap_space = driver.swap_space
    assert (swap_space.location_for(150), swap_space.location_for(151)) == ("ram", "disk")
    driver.store(1)
    assert swap_space.location_for(50) == "ram" and swap_space.location_for(51) == "disk"
    driver.store(2)
    assert driver.states() == {1: "in-ram", 2: "writing"}
    assert swap_space.location_for(100) is None, "only one sequence may exceed the limit"
    assert swap_space.location_for(100, required=True) == "disk"
    driver.work()
    assert swap_space.location_for(100) == "disk"
    free = REAL_FILE_SYSTEM.free_bytes(tmp_path) - RESERVED_BYTES
    assert swap_space.location_for(2 * free) is None and not swap_space.has_room(2 * free) and swap_space.has_room(1000)
    assert Driver(None, ram=99).swap_space.location_for(100) is None


def test_a_full_disk_has_no_room(tmp_path: Path) -> None:
    class Full(FileSystem):
        def free_bytes(self, folder: Path) -> int:
            return RESERVED_BYTES + 99

    class Refusing(FileSystem):
        def free_bytes(self, folder: Path) -> int:
            raise OSError(5, "Input/output error")

    assert Driver(tmp_path, disk=Full()).swap_space.location_for(100) is None
    assert Driver(tmp_path, disk=Full()).swap_space.location_for(99) == "disk"
    assert Driver(tmp_path, disk=Refusing()).swap_space.location_for(1) is None


# ---------------------------------------------------------------- dropped


@pytest.mark.parametrize("done", range(6))
def test_a_dropped_sequence_leaves_nothing(tmp_path: Path, done: int) -> None:
    """Dropped after any number of jobs."""
    driver = Driver(tmp_path)
    driver.store(1)
    driver.store(2)
    for step in range(done):
        driver.work(1)
        if step == 2:
            driver.swap_space.prefetch(1)
    driver.swap_space.drop(1)
    driver.work()
    assert driver.states() == {2: "on-disk"} and not driver.copies
    assert len(files_in(tmp_path)) == 1
    driver.swap_space.prefetch(2)
    driver.work()
    assert driver.swap_in(2) == content(2)


def test_a_copy_that_was_not_made_is_lost() -> None:
    driver = Driver(None, ram=None)
    driver.swap_space.store(1, 100, (0, 0), required=True)
    assert not driver.swap_space.poll(not_copied=[1]) and driver.states() == {1: "pending"}
    assert driver.swap_space.poll() and driver.states() == {1: "lost"}
    assert "not made" in driver.swap_space.failure(1)
    driver.swap_space.drop(1)
    assert not len(driver.swap_space)


def test_closing_stops_the_worker_and_removes_the_files(tmp_path: Path) -> None:
    store = {1: content(1), 2: content(2)}
    files = SwapFiles(tmp_path)
    swap_space = SwapSpace(
        store, ram=0, files=files, to_sections=lambda key, copy: as_section(copy), from_sections=as_bytes
    )
    for key in (1, 2):
        swap_space.store(key, 100, (key, 0), required=True)
    swap_space.poll()
    thread = files._worker._thread
    assert thread is not None and thread.is_alive()
    while swap_space.pending:
        swap_space.wait()
    assert len(files_in(tmp_path)) == 2
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files_in(tmp_path))
    swap_space.close()
    assert not thread.is_alive() and not files_in(tmp_path)
    swap_space.close()


def test_the_thread_ends_with_its_owner(tmp_path: Path) -> None:
    files = SwapFiles(tmp_path)
    files.write(1, lambda: as_section(b"x"))
    files.wait()
    thread = files._worker._thread
    assert thread is not None
    del files
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_bug_in_a_job_is_returned_as_a_failure(tmp_path: Path) -> None:
    files = SwapFiles(tmp_path)
    files.write(1, lambda: [][0])
    (done,) = files.wait()
    assert done.failure is not None and "IndexError" in done.failure
    files.close()


# ---------------------------------------------------------------- faults


def round_trip(driver: Driver, *, required: bool) -> str | bytes:
    """Swap a sequence out and in; return its bytes, or its state if it is lost."""
    driver.store(1, required=required)
    driver.work()
    if driver.states()[1] == "on-disk":
        driver.swap_space.prefetch(1)
        driver.work()
    got = driver.states()[1] if driver.states()[1] == "lost" else driver.swap_in(1)
    driver.swap_space.drop(1)
    driver.work()
    return got


def operations(folder: Path) -> int:
    disk = FailingDisk()
    round_trip(Driver(folder, disk=disk), required=True)
    return disk.count


@pytest.mark.parametrize("required", [True, False])
def test_after_any_failed_operation_the_sequence_is_unchanged_or_lost(tmp_path: Path, required: bool) -> None:
    lost = 0
    count = operations(tmp_path)
    assert count > 12
    for k in range(count):
        driver = Driver(tmp_path, disk=FailingDisk(k))
        got = round_trip(driver, required=required)
        if got == "lost":
            lost += 1
        else:
            assert got == content(1), k
        assert driver.swap_space.stats().failed <= 1
        written = driver.swap_space.stats().written
        assert not required or got != "lost" or written, "a required sequence was dropped before it was written"
        driver.swap_space.close()
    assert 3 < lost < count


def test_writes_are_retried_after_a_pause(tmp_path: Path) -> None:
    driver = Driver(tmp_path, disk=FailingDisk(0, on=False, which=("create",)))
    driver.store(1)
    driver.work()
    assert driver.states() == {1: "in-ram"}, "a required sequence stays in RAM beyond the limit"
    assert "Input/output error" in driver.swap_space.stats().fault
    assert driver.swap_space.location_for(1) is None and not driver.swap_space.has_room(1)
    driver.now = RETRY
    driver.work()
    assert driver.states() == {1: "writing"}
    driver.work()
    assert driver.states() == {1: "on-disk"}


def written(folder: Path) -> tuple[Driver, Path]:
    driver = Driver(folder)
    driver.store(1, 300)
    driver.work()
    (path,) = files_in(folder)
    return driver, path


def read_back(driver: Driver) -> str:
    driver.swap_space.prefetch(1)
    driver.work()
    state = driver.states()[1]
    assert state != "in-ram" or driver.copies[1] == content(1, 300)
    driver.swap_space.close()
    return state


def test_every_flipped_byte_and_every_truncation_is_detected(tmp_path: Path) -> None:
    driver, path = written(tmp_path)
    size = path.stat().st_size
    driver.swap_space.close()
    for at in range(0, size, 16):
        driver, path = written(tmp_path)
        raw = bytearray(path.read_bytes())
        raw[at] ^= 0x10
        path.write_bytes(raw)
        assert read_back(driver) == "lost", f"byte {at} of {size}"
        driver, path = written(tmp_path)
        path.write_bytes(path.read_bytes()[:at])
        assert read_back(driver) == "lost", f"cut at {at} of {size}"
    driver, path = written(tmp_path)
    path.unlink()
    assert read_back(driver) == "lost"
    assert read_back(written(tmp_path)[0]) == "in-ram", "an undamaged file was refused"


def test_the_file_of_another_sequence_is_refused(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.store(1)
    driver.work()
    (first,) = files_in(tmp_path)
    driver.store(2)
    driver.work()
    (second,) = set(files_in(tmp_path)) - {first}
    first.write_bytes(second.read_bytes())
    driver.swap_space.prefetch(1)
    driver.work()
    assert driver.states()[1] == "lost" and "another sequence" in driver.swap_space.failure(1)


# ---------------------------------------------------------------- dead processes

CHILD = """
import sys
from pathlib import Path
from kvad.cache.offload.swap_space import SwapFiles
from tests.support.slow_swap_files import as_section
files = SwapFiles(Path(sys.argv[1]))
for key in range(3):
    files.write(key, lambda: as_section(bytes(1 << 20)))
    files.wait()
print("stored", flush=True)
key = 3
while True:
    files.write(key, lambda: as_section(bytes(1 << 20)))
    files.wait()
    files.remove(key)
    key += 1
"""


def test_files_of_a_killed_process_are_removed_at_the_next_start(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("notes")
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"stored\n"
        living = SwapFiles(tmp_path)
        assert living.swept == 0 and len(files_in(tmp_path)) >= 3, "files of a living process were removed"
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert len(files_in(tmp_path)) >= 3
        assert SwapFiles(tmp_path).swept >= 3 and not files_in(tmp_path)
    assert notes.read_text() == "notes"


def test_only_swap_files_are_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    other = tmp_path / f".model.{dead.pid}.0123abcd.tmp"
    row = tmp_path / f".{FILE_PREFIX}5.{dead.pid}.0123abcd.tmp"
    half = tmp_path / f".{row.name}.{dead.pid}.0123abcd.tmp"
    for path in (other, row, half):
        path.write_bytes(b"")
    assert SwapFiles(tmp_path).swept == 2
    assert files_in(tmp_path) == [other]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="swap_dir"):
        SwapFiles(file)
    with pytest.raises(ConfigError, match="swap_dir"):
        SwapFiles(file / "below")
    files = SwapFiles(tmp_path / "new" / "folder")
    assert files.folder.stat().st_mode & 0o777 == 0o700


# ---------------------------------------------------------------- random operations


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_restore_every_sequence(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    driver = Driver(tmp_path, ram=rng.choice((0, 150, 350)), jobs=lambda: rng.randrange(3))
    keys, number = list[int](), 0
    for _ in range(400):
        draw = rng.random()
        if draw < 0.3 and len(keys) < 6:
            driver.store(number, rng.randrange(1, 200), required=rng.random() < 0.5)
            keys.append(number)
            number += 1
        elif draw < 0.4 and keys:
            driver.swap_space.drop(keys.pop(rng.randrange(len(keys))))
        elif keys:
            key = rng.choice(keys)
            if driver.swap_space.state(key) in ("in-ram", "writing"):
                nbytes = driver.swap_space.nbytes(key)
                keys.remove(key)
                assert driver.swap_in(key) == content(key, nbytes)
            else:
                driver.swap_space.prefetch(key)
        driver.swap_space.poll()
        driver.swap_space.check()
        assert sorted(driver.states()) == sorted(keys)
    driver.swap_space.close()
    assert not files_in(tmp_path)
    assert threading.active_count() < 20 and os.path.isdir(tmp_path)
