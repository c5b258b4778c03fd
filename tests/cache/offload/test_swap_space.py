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
from tests.support.slow_swap_files import LateFiles, LateSwapSpace, as_bytes, as_section


class Driver(LateSwapSpace):
    """A swap space and its copies; the content of a sequence depends on its key."""

    def __init__(
        self,
        folder: Path | None,
        ram: int | None = 0,
        *,
        disk: FileSystem = REAL_FILE_SYSTEM,
        jobs: Callable[[], int] = lambda: 0,
    ) -> None:
        self.now = 0.0
        super().__init__(
            {},
            ram=ram,
            files=None if folder is None else LateFiles(folder, jobs, disk),
            to_sections=lambda key, copy: as_section(copy),
            from_sections=as_bytes,
            clock=lambda: self.now,
        )

    def add(self, *keys: int, nbytes: int = 100, required: bool = True, written: bool = False) -> None:
        """Store sequences and make their copies; ``written``: run the file jobs."""
        for key in keys:
            self.store(key, nbytes, (key, 0), required=required)
            self.copies[key] = content(key, nbytes)
            self.poll()
            if written:
                self.work()

    def work(self, count: int = 1 << 30) -> None:
        """Run file jobs and apply their results."""
        if isinstance(self.files, LateFiles):
            self.files.work(count)
        self.poll()
        self.check()

    def read(self, key: int) -> None:
        self.prefetch(key)
        self.work()

    def states(self) -> dict[int, str]:
        return {key: record.state for key, record in self._records.items()}

    def swap_in(self, key: int) -> bytes:
        self.pop(key)
        return self.copies.pop(key)


def content(key: int, nbytes: int = 100) -> bytes:
    return bytes((key + index) % 251 for index in range(nbytes))


def files_in(folder: Path) -> list[Path]:
    return [each.path for each in list_temp_paths(folder)]


# ---------------------------------------------------------------- RAM and disk


def test_the_sequence_needed_last_is_written_first(tmp_path):
    space = Driver(tmp_path, ram=250)
    space.add(2, 3, 1)
    assert space.states() == {2: "in-ram", 3: "writing", 1: "in-ram"}
    assert 3 in space.copies, "dropped before it was written"
    space.work()
    assert space.states() == {2: "in-ram", 3: "on-disk", 1: "in-ram"} and 3 not in space.copies
    stats = space.stats()
    assert (stats.ram_bytes, stats.disk_bytes, stats.written) == (200, 100, 1)


def test_without_a_limit_nothing_is_written(tmp_path):
    space = Driver(tmp_path, ram=None)
    space.add(*range(5))
    assert set(space.states().values()) == {"in-ram"} and not files_in(tmp_path)
    assert space.location_for(1 << 60) == "ram" and space.has_room(1 << 60)


def test_a_sequence_is_restored_unchanged(tmp_path):
    space = Driver(tmp_path)
    space.add(7, written=True)
    space.prefetch(7)
    assert space.states() == {7: "reading"} and space.pending
    space.work()
    assert space.states() == {7: "in-ram"} and space.swap_in(7) == content(7)
    space.work()
    assert not files_in(tmp_path) and not len(space)


def test_a_prefetched_sequence_stays_in_ram_until_another_is_prefetched(tmp_path):
    """Its file stays, so that its copy can be dropped again without a write."""
    space = Driver(tmp_path)
    space.add(1, 2, written=True)
    space.read(1)
    space.work()
    assert space.states() == {1: "in-ram", 2: "on-disk"}
    space.read(2)
    assert space.states() == {1: "on-disk", 2: "in-ram"} and space.stats().written == 2


def test_a_sequence_that_is_being_written_can_be_swapped_in(tmp_path):
    space = Driver(tmp_path)
    space.add(1)
    assert space.states() == {1: "writing"} and space.swap_in(1) == content(1)
    space.add(2, written=True)
    assert space.states() == {2: "on-disk"} and len(files_in(tmp_path)) == 1, "a late write left a file"


def test_a_late_result_is_not_applied_to_a_new_sequence_with_the_same_key(tmp_path):
    """A sequence that is preempted again before its swap-in was applied has the same key."""
    space = Driver(tmp_path)
    space.add(1)
    space.files.work(1 << 30)  # The first file is complete, and its result was not returned yet.
    assert space.swap_in(1) == content(1)
    space.add(1)
    assert space.states() == {1: "writing"} and space.copies[1] == content(1)
    space.work()
    space.read(1)
    assert space.swap_in(1) == content(1)


def test_wait_returns_after_a_pending_read(tmp_path):
    space = Driver(tmp_path)
    space.add(1, written=True)
    space.prefetch(1)
    assert not space.poll()
    space.wait()
    assert space.states() == {1: "in-ram"} and space.poll(), "poll does not report the finished read"


def test_location_and_room(tmp_path):
    space = Driver(tmp_path, ram=150)
    assert (space.location_for(150), space.location_for(151)) == ("ram", "disk")
    space.add(1)
    assert space.location_for(50) == "ram" and space.location_for(51) == "disk"
    space.add(2)
    assert space.states() == {1: "in-ram", 2: "writing"}
    assert space.location_for(100) is None, "only one sequence may exceed the limit"
    assert space.location_for(100, required=True) == "disk"
    space.work()
    assert space.location_for(100) == "disk"
    free = REAL_FILE_SYSTEM.free_bytes(tmp_path) - RESERVED_BYTES
    assert space.location_for(2 * free) is None and not space.has_room(2 * free) and space.has_room(1000)
    assert Driver(None, ram=99).location_for(100) is None


def test_a_full_disk_has_no_room(tmp_path):
    class SmallDisk(FileSystem):
        def free_bytes(self, folder: Path) -> int:
            if not folder.exists():
                raise OSError(5, "Input/output error")
            return RESERVED_BYTES + 99

    space = Driver(tmp_path / "new", disk=SmallDisk())
    assert space.location_for(100) is None and space.location_for(99) == "disk"
    (tmp_path / "new").rmdir()
    assert space.location_for(1) is None, "the disk fails"


# ---------------------------------------------------------------- dropped sequences


@pytest.mark.parametrize("done", range(6))
def test_a_sequence_dropped_after_any_number_of_jobs_leaves_nothing(tmp_path, done):
    space = Driver(tmp_path)
    space.add(1, 2)
    for step in range(done):
        space.work(1)
        if step == 2:
            space.prefetch(1)
    space.drop(1)
    space.work()
    assert space.states() == {2: "on-disk"} and not space.copies and len(files_in(tmp_path)) == 1
    space.read(2)
    assert space.swap_in(2) == content(2)


def test_a_copy_that_was_not_made_is_lost():
    space = Driver(None, ram=None)
    space.store(1, 100, (0, 0), required=True)
    assert not space.poll(not_copied=[1]) and space.states() == {1: "pending"}
    assert space.poll() and space.states() == {1: "lost"} and "not made" in space.record(1).fault
    space.drop(1)
    assert not len(space)


def test_closing_stops_the_thread_and_removes_the_files(tmp_path):
    files = SwapFiles(tmp_path)
    space = SwapSpace(
        {1: content(1), 2: content(2)},
        ram=0,
        files=files,
        to_sections=lambda key, copy: as_section(copy),
        from_sections=as_bytes,
    )
    for key in (1, 2):
        space.store(key, 100, (key, 0), required=True)
    space.poll()
    thread = files._worker._thread
    assert thread is not None and thread.is_alive()
    while space.pending:
        space.wait()
    assert [path.stat().st_mode & 0o777 for path in files_in(tmp_path)] == [0o600] * 2
    space.close()
    assert not thread.is_alive() and not files_in(tmp_path)
    space.close()


def test_the_thread_ends_with_its_owner(tmp_path):
    files = SwapFiles(tmp_path)
    files.write(1, lambda: as_section(b"x")).result()
    thread = files._worker._thread
    assert thread is not None
    del files
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


# ---------------------------------------------------------------- faults


def test_a_bug_in_a_job_is_returned_as_a_failure(tmp_path):
    files = SwapFiles(tmp_path)
    assert "IndexError" in files.write(1, lambda: [][0]).result().failure
    files.close()


def round_trip(space: Driver, *, required: bool) -> str | bytes:
    """Swap a sequence out and in; return its bytes, or its state if it is lost."""
    space.add(1, required=required, written=True)
    if space.states()[1] == "on-disk":
        space.read(1)
    result = space.states()[1] if space.states()[1] == "lost" else space.swap_in(1)
    space.drop(1)
    space.work()
    return result


@pytest.mark.parametrize("required", [True, False])
def test_after_any_failed_operation_the_sequence_is_unchanged_or_lost(tmp_path, required):
    disk, lost = FailingDisk(), 0
    round_trip(Driver(tmp_path, disk=disk), required=True)
    assert disk.count > 12
    for k in range(disk.count):
        space = Driver(tmp_path, disk=FailingDisk(k))
        result = round_trip(space, required=required)
        assert result in ("lost", content(1)), k
        lost += result == "lost"
        stats = space.stats()
        assert stats.failed <= 1
        assert not required or result != "lost" or stats.written, "a required copy was dropped before it was written"
        space.close()
    assert 3 < lost < disk.count


def test_writes_are_retried_after_a_pause(tmp_path):
    space = Driver(tmp_path, disk=FailingDisk(0, on=False, which=("create",)))
    space.add(1, written=True)
    assert space.states() == {1: "in-ram"}, "a required sequence stays in RAM beyond the limit"
    assert "Input/output error" in space.stats().fault
    assert space.location_for(1) is None and not space.has_room(1)
    space.now = RETRY
    space.work()
    assert space.states() == {1: "writing"}
    space.work()
    assert space.states() == {1: "on-disk"}


def state_after_change(folder: Path, change: Callable[[Path], object]) -> str:
    """Write a sequence, change its file, and return the state after reading it."""
    space = Driver(folder)
    space.add(1, nbytes=300, written=True)
    change(*files_in(folder))
    space.read(1)
    state = space.states()[1]
    assert state != "in-ram" or space.copies[1] == content(1, 300)
    space.close()
    return state


def test_every_flipped_byte_and_every_truncation_is_detected(tmp_path):
    def flip(path: Path, offset: int) -> None:
        raw = bytearray(path.read_bytes())
        raw[offset] ^= 0x10
        path.write_bytes(raw)

    sizes = list[int]()
    assert state_after_change(tmp_path, lambda path: sizes.append(path.stat().st_size)) == "in-ram"
    for at in range(0, sizes[0], 16):
        assert state_after_change(tmp_path, lambda path, at=at: flip(path, at)) == "lost", f"byte {at}"
        assert state_after_change(tmp_path, lambda path, at=at: os.truncate(path, at)) == "lost", f"truncated at {at}"
    assert state_after_change(tmp_path, Path.unlink) == "lost"


def test_the_file_of_another_sequence_is_refused(tmp_path):
    space = Driver(tmp_path)
    space.add(1, written=True)
    (first,) = files_in(tmp_path)
    space.add(2, written=True)
    (second,) = set(files_in(tmp_path)) - {first}
    first.write_bytes(second.read_bytes())
    space.read(1)
    assert space.states()[1] == "lost" and "another sequence" in space.record(1).fault


# ---------------------------------------------------------------- dead processes

CHILD = """
import itertools, sys
from pathlib import Path
from kvad.cache.offload.swap_space import SwapFiles
from tests.support.slow_swap_files import as_section
files = SwapFiles(Path(sys.argv[1]))
for key in itertools.count():
    files.write(key, lambda: as_section(bytes(1 << 20))).result()
    if key == 2:
        print("stored", flush=True)
    if key > 2:
        files.remove(key)
"""


def test_files_of_a_killed_process_are_removed_at_the_next_start(tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("notes")
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"stored\n"
    assert SwapFiles(tmp_path).swept == 0 and len(files_in(tmp_path)) >= 3, "files of a living process were removed"
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=60)
    child.stdout.close()
    assert len(files_in(tmp_path)) >= 3
    assert SwapFiles(tmp_path).swept >= 3 and not files_in(tmp_path)
    assert notes.read_text() == "notes"


def test_only_swap_files_are_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=60)
    other = tmp_path / f".model.{dead.pid}.0123abcd.tmp"
    swapped = tmp_path / f".{FILE_PREFIX}5.{dead.pid}.0123abcd.tmp"
    for path in (other, swapped, tmp_path / f".{swapped.name}.{dead.pid}.0123abcd.tmp"):
        path.write_bytes(b"")
    assert SwapFiles(tmp_path).swept == 2 and files_in(tmp_path) == [other]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below"):
        with pytest.raises(ConfigError, match="swap_dir"):
            SwapFiles(folder)
    assert SwapFiles(tmp_path / "new" / "folder").folder.stat().st_mode & 0o777 == 0o700


# ---------------------------------------------------------------- random operations


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_restore_every_sequence(tmp_path, seed):
    rng = random.Random(seed)
    space = Driver(tmp_path, ram=rng.choice((0, 150, 350)), jobs=lambda: rng.randrange(3))
    keys, number = list[int](), 0
    for _ in range(400):
        draw = rng.random()
        if draw < 0.3 and len(keys) < 6:
            space.add(number, nbytes=rng.randrange(1, 200), required=rng.random() < 0.5)
            keys.append(number)
            number += 1
        elif draw < 0.4 and keys:
            space.drop(keys.pop(rng.randrange(len(keys))))
        elif keys:
            key = rng.choice(keys)
            if space.record(key).state in ("in-ram", "writing"):
                nbytes = space.record(key).nbytes
                keys.remove(key)
                assert space.swap_in(key) == content(key, nbytes)
            else:
                space.prefetch(key)
        space.poll()
        space.check()
        assert sorted(space.states()) == sorted(keys)
    space.close()
    assert not files_in(tmp_path) and threading.active_count() < 20 and tmp_path.is_dir()
