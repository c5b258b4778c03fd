"""A shelf serves what was stored or nothing, whatever the disk, the neighbour or the power does."""

import errno
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvad.cache.offload.disk_store import LOCK_NAME, MAX_FAILURES, DiskBlockStore, remove_leftovers
from kvad.errors import ConfigError, StorageError
from kvad.storage.container import Section
from kvad.storage.filesystem import FileSystem
from kvad.storage.temp_paths import temp_path
from tests.support.faulty_filesystems import FailingDisk, ForgetfulDisk

BLOCK = 20_000


def put(shelf, number, size=BLOCK):
    data = bytes([number % 256]) * size
    return shelf.put(
        f"{number:08x}", "block", {"model": "m"}, {"number": number}, [Section("0", "uint8", (size,), data)]
    )


def get(shelf, number):
    """Whether it came; what came is right."""

    def read(header, section):
        return header.metadata["number"], bytes(section("0"))

    try:
        found, data = shelf.get(f"{number:08x}", read)
    except (StorageError, OSError):
        return False
    assert found == number and data == bytes([number % 256]) * len(data) and data
    return True


def make(folder, limit=1 << 20, **more):
    return DiskBlockStore(folder, limit, reserve=0, **more)


def test_what_is_put_is_got_also_by_the_next_process(tmp_path):
    shelf = make(tmp_path / "new" / "tier")
    assert put(shelf, 1) and put(shelf, 2) and not put(shelf, 1)
    assert get(shelf, 1) and get(shelf, 2) and not get(shelf, 3)
    shelf.release()
    again = make(tmp_path / "new" / "tier")
    assert get(again, 1) and again.stats().num_blocks == 2 and again.stats().bytes == shelf.stats().bytes
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new" / "tier").iterdir()}
    assert modes == {0o600} and stat.S_IMODE((tmp_path / "new" / "tier").stat().st_mode) == 0o700


def test_it_is_bounded_and_the_least_used_goes_first(tmp_path):
    shelf = make(tmp_path, 5 * (BLOCK + 2000))
    for number in range(4):
        put(shelf, number)
    get(shelf, 0)
    for number in range(4, 7):
        put(shelf, number)
        assert shelf.stats().bytes <= shelf.max_bytes
        assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) == shelf.stats().bytes
    assert f"{0:08x}" in shelf and f"{1:08x}" not in shelf and shelf.stats().evictions
    assert not put(shelf, 99, size=1 << 20) and shelf.stats().num_refused == 1
    shelf.release()
    smaller = make(tmp_path, 2 * (BLOCK + 2000))
    assert smaller.stats().bytes <= smaller.max_bytes and smaller.stats().num_blocks == 2 and get(smaller, 6)


def test_what_is_pinned_stays(tmp_path):
    shelf = make(tmp_path, 12 * BLOCK)
    put(shelf, 0)
    shelf.pin([f"{0:08x}"])
    for number in range(1, 30):
        put(shelf, number)
    assert get(shelf, 0) and shelf.stats().pinned == 1
    shelf.pin([f"{number:08x}" for number in range(30) if f"{number:08x}" in shelf])
    assert not put(shelf, 100) and not shelf.stats().disabled_reason, (
        "all is pinned: there is no room, and that is no failure"
    )


def test_what_is_pinned_stays_when_the_folder_is_opened_with_less(tmp_path):
    shelf = make(tmp_path, 12 * BLOCK)
    for number in range(4):
        put(shelf, number)
    shelf.release()
    smaller = make(tmp_path, 1, pinned=lambda: [f"{2:08x}"])
    assert smaller.eviction_order() == (f"{2:08x}",) and get(smaller, 2) and smaller.stats().pinned == 1
    assert not put(smaller, 9), "more is pinned than it may hold: nothing comes in"


@pytest.mark.parametrize("limit", [0, -1])
def test_a_budget_of_nothing_is_refused(tmp_path, limit):
    with pytest.raises(ConfigError, match="prefix_cache_size: must be at least 1"):
        make(tmp_path, limit)


def test_room_on_the_disk_is_left_for_others(tmp_path, caplog):
    disk = FailingDisk()
    disk.free_bytes = lambda folder: 100_000
    shelf = DiskBlockStore(tmp_path, 1 << 20, reserve=90_000, fs=disk)
    with caplog.at_level(logging.WARNING):
        assert not put(shelf, 1) and not put(shelf, 2)
    assert shelf.stats().num_refused == 2 and len(caplog.records) == 1 and not shelf.stats().disabled_reason
    disk.free_bytes = lambda folder: 1 << 30
    assert put(shelf, 1)


def test_names_that_are_not_ours_are_left_alone(tmp_path):
    make(tmp_path).release()
    for name in ("notes.txt", "UPPER.kv", "x.kv", "deadbeef.kvx", ".hidden", "-00.kv"):
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "00ff.kv").symlink_to("/etc/passwd")
    (tmp_path / "00fe.kv").mkdir()
    shelf = make(tmp_path, 10)
    assert shelf.stats().num_blocks == 0
    assert len(list(tmp_path.iterdir())) == 9
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        shelf.get("00ff", lambda header, section: header)


def test_what_dead_writers_left_is_swept_away(tmp_path):
    make(tmp_path).release()
    dead = tmp_path / ".00aa.kv.999999.0123abcd.tmp"
    dead.write_bytes(b"half")
    ours = temp_path(tmp_path / "00bb.kv", "tmp")
    ours.write_bytes(b"half")
    other = tmp_path / ".notes.999999.0123abcd.tmp"
    other.write_bytes(b"not the tier's")
    shelf = make(tmp_path)
    assert not dead.exists() and ours.exists() and other.exists() and shelf.stats().num_removed == 1


@pytest.mark.parametrize("change", ["flip", "cut", "long", "other", "empty"])
def test_a_damaged_entry_is_a_miss_once(tmp_path, change):
    shelf = make(tmp_path)
    put(shelf, 1)
    path = tmp_path / f"{1:08x}.kv"
    raw = bytearray(path.read_bytes())
    if change == "flip":
        raw[-50] ^= 4
    path.write_bytes({"cut": raw[:-10], "long": raw + b"0", "other": b"#!/bin/sh" * 50, "empty": b""}.get(change, raw))
    assert not get(shelf, 1)
    assert sum(shelf.stats().misses.values()) == 1 and not shelf.stats().disabled_reason
    assert path.exists() == (change == "other"), "what is not ours is left as it is"
    assert f"{1:08x}" not in shelf and put(shelf, 1) and get(shelf, 1)


def test_an_entry_that_somebody_removed_is_a_miss(tmp_path):
    shelf = make(tmp_path)
    put(shelf, 1)
    (tmp_path / f"{1:08x}.kv").unlink()
    assert not get(shelf, 1) and shelf.stats().misses == {"missing": 1} and put(shelf, 1)


# ---------------------------------------------------------------- a disk that fails


def life(folder, disk):
    """Open, put, get, evict; what came is right, whatever failed.  OSError: it could not be opened."""
    shelf = make(folder, 4 * (BLOCK + 2000), fs=disk)
    for number in range(6):
        put(shelf, number)
        get(shelf, number)
        get(shelf, number - 1)
    stats = shelf.stats()
    shelf.release()
    return stats


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_whichever_operation_fails_nothing_wrong_comes_and_the_next_start_is_fine(tmp_path, code):
    counted = FailingDisk()
    life(tmp_path / "counted", counted)
    assert counted.count > 60
    refused = heard = 0
    for k in range(counted.count):
        disk, folder = FailingDisk(k, code=code), tmp_path / f"{k}"
        try:
            heard += life(folder, disk).failures > 0
        except OSError:
            refused += 1
        shelf = make(folder)
        assert not shelf.stats().disabled_reason
        for number in range(6):
            get(shelf, number)
        shelf.release()
    assert 0 < refused < 10 and heard > 20


@pytest.mark.parametrize("k", range(0, 60, 7))
def test_a_disk_that_goes_on_failing_is_left_alone_and_said_so_once(tmp_path, k, caplog):
    with caplog.at_level(logging.WARNING):
        try:
            stats = life(tmp_path, FailingDisk(k, on=True))
        except OSError:
            return
    assert stats.disabled_reason and 1 <= len([r for r in caplog.records if "failed" in r.message]) <= 2


def test_reads_that_fail_close_it_after_a_few(tmp_path):
    disk = FailingDisk()
    shelf = make(tmp_path, fs=disk)
    for number in range(8):
        put(shelf, number)
    disk.k, disk.on, disk.which, disk.count = 0, True, ("read",), 0
    for number in range(8):
        assert not get(shelf, number)
    assert disk.failed <= MAX_FAILURES + 8 and shelf.stats().disabled_reason and f"{7:08x}" not in shelf
    assert shelf.stats().misses["failed"] >= MAX_FAILURES


def test_an_entry_whose_reading_failed_is_not_tried_again(tmp_path):
    disk = FailingDisk()
    shelf = make(tmp_path, fs=disk)
    put(shelf, 1)
    disk.k, disk.which, disk.count = 0, ("read",), 0
    assert not get(shelf, 1)
    assert f"{1:08x}" not in shelf and not shelf.stats().disabled_reason


@pytest.mark.parametrize("seed", range(40))
def test_after_a_power_cut_every_entry_is_right_or_refused(tmp_path, seed):
    disk = ForgetfulDisk(seed)
    shelf = make(tmp_path, 4 * (BLOCK + 2000), fs=disk)
    for number in range(6):
        put(shelf, number)
    kept = shelf.eviction_order()[:2]
    shelf.pin(kept)
    shelf.release()
    disk.power_cut()
    again = make(tmp_path)
    assert all(get(again, int(key, 16)) for key in kept), "what was flushed is there"
    for number in range(6):
        get(again, number)
        put(again, number)
        assert get(again, number)


def test_the_forgetful_disk_forgets(tmp_path):
    lost = 0
    for seed in range(40):
        disk = ForgetfulDisk(seed)
        shelf = make(tmp_path / f"{seed}", fs=disk)
        put(shelf, 1)
        shelf.release()
        disk.power_cut()
        lost += not get(make(tmp_path / f"{seed}"), 1)
    assert lost > 10


# ---------------------------------------------------------------- two processes

HOLD = """
import sys
from pathlib import Path
from kvad.cache.offload.disk_store import DiskBlockStore
shelf = DiskBlockStore(Path(sys.argv[1]), 1 << 20)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_that_another_process_holds_is_refused_until_it_dies(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=-1, stdout=-1, cwd=Path(__file__).parents[3]
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(BlockingIOError):
        make(tmp_path)
    holder.kill()
    holder.wait()
    holder.stdout.close()
    shelf = make(tmp_path)
    assert put(shelf, 1)


def test_one_process_holds_it_once(tmp_path):
    first = make(tmp_path)
    with pytest.raises(BlockingIOError):
        make(tmp_path)
    first.release()
    second = make(tmp_path)
    del second
    make(tmp_path)


def test_sweeping_is_safe_while_another_writes(tmp_path):
    shelf = make(tmp_path)
    disk = FileSystem()
    half = temp_path(tmp_path / "00cc.kv", "tmp")
    file = disk.create(half)
    assert remove_leftovers(tmp_path) == 0 and half.exists()
    disk.close(file)
    assert (tmp_path / LOCK_NAME).exists() and shelf.stats().num_removed == 0
