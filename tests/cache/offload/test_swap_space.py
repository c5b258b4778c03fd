"""Parked rows in memory and on disk, with no device and no model: copies are bytes."""

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


class Desk:
    """A parking whose device copies a row of ``nbytes`` bytes of its key."""

    def __init__(
        self,
        folder: Path | None,
        ram: int | None = 0,
        *,
        disk: FileSystem = REAL_FILE_SYSTEM,
        jobs: Callable[[], int] = lambda: 0,
    ) -> None:
        self.store: dict[int, bytes] = {}
        self.now = 0.0
        self.files = None if folder is None else LateFiles(folder, jobs, disk)
        self.parking = SwapSpace(
            self.store,
            ram=ram,
            files=self.files,
            to_sections=lambda key, copy: as_section(copy),
            from_sections=as_bytes,
            clock=lambda: self.now,
        )

    def park(self, key: int, nbytes: int = 100, *, needed: bool = True) -> None:
        """With the step that follows."""
        self.parking.store(key, nbytes, (key, 0), required=needed)
        self.store[key] = content(key, nbytes)
        self.parking.poll()

    def work(self, count: int = EVERYTHING) -> None:
        if self.files is not None:
            self.files.work(count)
        self.parking.poll()
        self.parking.check()

    def states(self) -> dict[int, str]:
        return {key: self.parking.state(key) for key in self.parking._records}

    def wake(self, key: int) -> bytes:
        self.parking.pop(key)
        return self.store.pop(key)


def content(key: int, nbytes: int = 100) -> bytes:
    return bytes((key + at) % 251 for at in range(nbytes))


def files_in(folder: Path) -> list[Path]:
    return [each.path for each in list_temp_paths(folder)]


# ---------------------------------------------------------------- memory and disk


def test_what_fits_stays_in_memory_and_the_last_in_the_queue_leaves_first(tmp_path: Path) -> None:
    desk = Desk(tmp_path, ram=250)
    for key in (2, 3, 1):
        desk.park(key)
    assert desk.states() == {2: "in-ram", 3: "writing", 1: "in-ram"}
    assert 3 in desk.store, "dropped before it was written"
    desk.work()
    assert desk.states() == {2: "in-ram", 3: "on-disk", 1: "in-ram"} and 3 not in desk.store
    stats = desk.parking.stats()
    assert (stats.ram_bytes, stats.disk_bytes, stats.written) == (200, 100, 1)


def test_without_a_bound_nothing_leaves(tmp_path: Path) -> None:
    desk = Desk(tmp_path, ram=None)
    for key in range(5):
        desk.park(key)
    assert set(desk.states().values()) == {"in-ram"} and not files_in(tmp_path)
    assert not desk.parking.bounded and desk.parking.location_for(1 << 60) == "ram" and desk.parking.has_room(1 << 60)


def test_a_row_comes_back_as_it_was(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.park(7)
    desk.work()
    desk.parking.prefetch(7)
    assert desk.states() == {7: "reading"} and desk.parking.pending
    desk.work()
    assert desk.states() == {7: "in-ram"} and desk.wake(7) == content(7)
    desk.work()
    assert not files_in(tmp_path) and not len(desk.parking)


def test_a_row_that_is_fetched_stays_until_another_is(tmp_path: Path) -> None:
    """Its file is kept, so that it can leave again for nothing."""
    desk = Desk(tmp_path)
    desk.park(1)
    desk.work()
    desk.park(2)
    desk.work()
    desk.parking.prefetch(1)
    desk.work()
    desk.work()
    assert desk.states() == {1: "in-ram", 2: "on-disk"}
    desk.parking.prefetch(2)
    desk.work()
    assert desk.states() == {1: "on-disk", 2: "in-ram"}
    assert desk.parking.stats().written == 2


def test_a_row_that_is_leaving_can_be_woken_at_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.park(1)
    assert desk.states() == {1: "writing"} and desk.wake(1) == content(1)
    desk.park(2)
    desk.work()
    assert desk.states() == {2: "on-disk"} and len(files_in(tmp_path)) == 1, "what came late has touched something"


def test_waiting_is_for_one_that_is_under_way(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.park(1)
    desk.work()
    desk.parking.prefetch(1)
    assert not desk.parking.poll()
    desk.parking.wait()
    assert desk.states() == {1: "in-ram"}
    assert desk.parking.poll(), "whoever waits for the row is not told"


def test_room(tmp_path: Path) -> None:
    desk = Desk(tmp_path, ram=150)
    parking = desk.parking
    assert (parking.location_for(150), parking.location_for(151)) == ("ram", "disk")
    desk.park(1)
    assert parking.location_for(50) == "ram" and parking.location_for(51) == "disk"
    desk.park(2)
    assert desk.states() == {1: "in-ram", 2: "writing"}
    assert parking.location_for(100) is None, "one at a time passes the bound"
    assert parking.location_for(100, required=True) == "disk"
    desk.work()
    assert parking.location_for(100) == "disk"
    free = REAL_FILE_SYSTEM.free_bytes(tmp_path) - RESERVED_BYTES
    assert parking.location_for(2 * free) is None and not parking.has_room(2 * free) and parking.has_room(1000)
    assert Desk(None, ram=99).parking.location_for(100) is None


def test_a_full_disk_has_no_room(tmp_path: Path) -> None:
    class Full(FileSystem):
        def free_bytes(self, folder: Path) -> int:
            return RESERVED_BYTES + 99

    class Refusing(FileSystem):
        def free_bytes(self, folder: Path) -> int:
            raise OSError(5, "Input/output error")

    assert Desk(tmp_path, disk=Full()).parking.location_for(100) is None
    assert Desk(tmp_path, disk=Full()).parking.location_for(99) == "disk"
    assert Desk(tmp_path, disk=Refusing()).parking.location_for(1) is None


# ---------------------------------------------------------------- given up


@pytest.mark.parametrize("done", range(6))
def test_what_is_given_up_is_touched_by_nothing(tmp_path: Path, done: int) -> None:
    """At every moment of its way out and in."""
    desk = Desk(tmp_path)
    desk.park(1)
    desk.park(2)
    for step in range(done):
        desk.work(1)
        if step == 2:
            desk.parking.prefetch(1)
    desk.parking.drop(1)
    desk.work()
    assert desk.states() == {2: "on-disk"} and not desk.store
    assert len(files_in(tmp_path)) == 1
    desk.parking.prefetch(2)
    desk.work()
    assert desk.wake(2) == content(2)


def test_a_copy_that_was_never_made_is_lost() -> None:
    desk = Desk(None, ram=None)
    desk.parking.store(1, 100, (0, 0), required=True)
    assert not desk.parking.poll(not_copied=[1]) and desk.states() == {1: "pending"}
    assert desk.parking.poll() and desk.states() == {1: "lost"}
    assert "not made" in desk.parking.failure(1)
    desk.parking.drop(1)
    assert not len(desk.parking)


def test_closing_stops_the_worker_and_removes_the_files(tmp_path: Path) -> None:
    store = {1: content(1), 2: content(2)}
    files = SwapFiles(tmp_path)
    parking = SwapSpace(
        store, ram=0, files=files, to_sections=lambda key, copy: as_section(copy), from_sections=as_bytes
    )
    for key in (1, 2):
        parking.store(key, 100, (key, 0), required=True)
    parking.poll()
    thread = files._worker._thread
    assert thread is not None and thread.is_alive()
    while parking.pending:
        parking.wait()
    assert len(files_in(tmp_path)) == 2
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files_in(tmp_path))
    parking.close()
    assert not thread.is_alive() and not files_in(tmp_path)
    parking.close()


def test_a_worker_ends_with_its_owner(tmp_path: Path) -> None:
    files = SwapFiles(tmp_path)
    files.write(1, lambda: as_section(b"x"))
    files.wait()
    thread = files._worker._thread
    assert thread is not None
    del files
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_worker_that_meets_a_bug_says_so(tmp_path: Path) -> None:
    files = SwapFiles(tmp_path)
    files.write(1, lambda: [][0])
    (done,) = files.wait()
    assert done.failure is not None and "IndexError" in done.failure
    files.close()


# ---------------------------------------------------------------- faults


def trip(desk: Desk, *, needed: bool) -> str | bytes:
    """A row's way out and in: its bytes, or its state where they do not come back."""
    desk.park(1, needed=needed)
    desk.work()
    if desk.states()[1] == "on-disk":
        desk.parking.prefetch(1)
        desk.work()
    got = desk.states()[1] if desk.states()[1] == "lost" else desk.wake(1)
    desk.parking.drop(1)
    desk.work()
    return got


def operations(folder: Path) -> int:
    disk = FailingDisk()
    trip(Desk(folder, disk=disk), needed=True)
    return disk.count


@pytest.mark.parametrize("needed", [True, False])
def test_whichever_operation_fails_the_row_is_whole_or_lost(tmp_path: Path, needed: bool) -> None:
    lost = 0
    count = operations(tmp_path)
    assert count > 12
    for k in range(count):
        desk = Desk(tmp_path, disk=FailingDisk(k))
        got = trip(desk, needed=needed)
        if got == "lost":
            lost += 1
        else:
            assert got == content(1), k
        assert desk.parking.stats().failed <= 1
        written = desk.parking.stats().written
        assert not needed or got != "lost" or written, "a row that cannot be computed again was dropped unwritten"
        desk.parking.close()
    assert 3 < lost < count


def test_a_disk_that_refuses_is_left_alone_for_a_while(tmp_path: Path) -> None:
    desk = Desk(tmp_path, disk=FailingDisk(0, on=False, which=("create",)))
    desk.park(1)
    desk.work()
    assert desk.states() == {1: "in-ram"}, "it stays beyond the bound: it cannot be computed again"
    assert "Input/output error" in desk.parking.stats().fault
    assert desk.parking.location_for(1) is None and not desk.parking.has_room(1)
    desk.now = RETRY
    desk.work()
    assert desk.states() == {1: "writing"}
    desk.work()
    assert desk.states() == {1: "on-disk"}


def written(folder: Path) -> tuple[Desk, Path]:
    desk = Desk(folder)
    desk.park(1, 300)
    desk.work()
    (path,) = files_in(folder)
    return desk, path


def read_back(desk: Desk) -> str:
    desk.parking.prefetch(1)
    desk.work()
    state = desk.states()[1]
    assert state != "here" or desk.store[1] == content(1, 300)
    desk.parking.close()
    return state


def test_every_flipped_byte_and_every_cut_is_seen(tmp_path: Path) -> None:
    desk, path = written(tmp_path)
    size = path.stat().st_size
    desk.parking.close()
    for at in range(0, size, 16):
        desk, path = written(tmp_path)
        raw = bytearray(path.read_bytes())
        raw[at] ^= 0x10
        path.write_bytes(raw)
        assert read_back(desk) == "lost", f"byte {at} of {size}"
        desk, path = written(tmp_path)
        path.write_bytes(path.read_bytes()[:at])
        assert read_back(desk) == "lost", f"cut at {at} of {size}"
    desk, path = written(tmp_path)
    path.unlink()
    assert read_back(desk) == "lost"
    assert read_back(written(tmp_path)[0]) == "in-ram", "nothing was wrong with it"


def test_a_whole_file_of_another_row_is_refused(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.park(1)
    desk.work()
    (first,) = files_in(tmp_path)
    desk.park(2)
    desk.work()
    (second,) = set(files_in(tmp_path)) - {first}
    first.write_bytes(second.read_bytes())
    desk.parking.prefetch(1)
    desk.work()
    assert desk.states()[1] == "lost" and "another sequence" in desk.parking.failure(1)


# ---------------------------------------------------------------- what the dead leave

CHILD = """
import sys
from pathlib import Path
from kvad.cache.offload.swap_space import SwapFiles
from tests.support.slow_swap_files import as_section
files = SwapFiles(Path(sys.argv[1]))
for key in range(3):
    files.write(key, lambda: as_section(bytes(1 << 20)))
    files.wait()
print("parked", flush=True)
key = 3
while True:
    files.write(key, lambda: as_section(bytes(1 << 20)))
    files.wait()
    files.remove(key)
    key += 1
"""


def test_what_a_killed_process_leaves_is_swept_at_the_next_start(tmp_path: Path) -> None:
    mine = tmp_path / "notes.txt"
    mine.write_text("mine")
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"parked\n"
        living = SwapFiles(tmp_path)
        assert living.swept == 0 and len(files_in(tmp_path)) >= 3, "a living process's rows are its own"
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert len(files_in(tmp_path)) >= 3
        assert SwapFiles(tmp_path).swept >= 3 and not files_in(tmp_path)
    assert mine.read_text() == "mine"


def test_only_rows_are_swept(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    other = tmp_path / f".model.{dead.pid}.0123abcd.tmp"
    row = tmp_path / f".{FILE_PREFIX}5.{dead.pid}.0123abcd.tmp"
    half = tmp_path / f".{row.name}.{dead.pid}.0123abcd.tmp"
    for path in (other, row, half):
        path.write_bytes(b"")
    assert SwapFiles(tmp_path).swept == 2
    assert files_in(tmp_path) == [other]


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="swap_dir"):
        SwapFiles(file)
    with pytest.raises(ConfigError, match="swap_dir"):
        SwapFiles(file / "below")
    made = SwapFiles(tmp_path / "new" / "folder")
    assert made.folder.stat().st_mode & 0o777 == 0o700


# ---------------------------------------------------------------- anything at all


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_moves_gives_every_row_its_bytes(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    desk = Desk(tmp_path, ram=rng.choice((0, 150, 350)), jobs=lambda: rng.randrange(3))
    keys, number = list[int](), 0
    for _ in range(400):
        draw = rng.random()
        if draw < 0.3 and len(keys) < 6:
            desk.park(number, rng.randrange(1, 200), needed=rng.random() < 0.5)
            keys.append(number)
            number += 1
        elif draw < 0.4 and keys:
            desk.parking.drop(keys.pop(rng.randrange(len(keys))))
        elif keys:
            key = rng.choice(keys)
            if desk.parking.state(key) in ("in-ram", "writing"):
                nbytes = desk.parking.nbytes(key)
                keys.remove(key)
                assert desk.wake(key) == content(key, nbytes)
            else:
                desk.parking.prefetch(key)
        desk.parking.poll()
        desk.parking.check()
        assert sorted(desk.states()) == sorted(keys)
    desk.parking.close()
    assert not files_in(tmp_path)
    assert threading.active_count() < 20 and os.path.isdir(tmp_path)
