"""DiskBlockStore: entries are returned unchanged or are misses after faults, power cuts and with other processes."""

import errno
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvad.cache.offload.disk_store import LOCK_NAME, MAX_FAILURES, DiskBlockStore, remove_leftovers
from kvad.cache.offload.pinned import PinnedPrefix, write_pinned_prefix
from kvad.errors import ConfigError, StorageError
from kvad.storage.container import Section
from kvad.storage.filesystem import lock_owner
from kvad.storage.temp_paths import temp_path
from tests.support.faulty_filesystems import FailingDisk, PowerCutDisk

BLOCK = 20_000


def key(number):
    return f"{number:08x}"


def put(store, number, size=BLOCK):
    section = Section("0", "uint8", (size,), bytes([number % 256]) * size)
    return store.put(key(number), "block", {"model": "m"}, {"number": number}, [section])


def get(store, number):
    """Return True if the entry was read; its content must be right."""
    try:
        stored, data = store.get(key(number), lambda header, section: (header.metadata["number"], bytes(section("0"))))
    except (StorageError, OSError):
        return False
    assert stored == number and data == bytes([number % 256]) * len(data) and data
    return True


def make(folder, limit=1 << 20, *, entries=(), **options):
    store = DiskBlockStore(folder, limit, reserve=0, **options)
    for number in entries:
        put(store, number)
    return store


def test_entries_can_be_read_after_reopening(tmp_path):
    folder = tmp_path / "new" / "store"
    store = make(folder)
    assert put(store, 1) and put(store, 2) and not put(store, 1)
    assert get(store, 1) and get(store, 2) and not get(store, 3)
    store.release()
    again = make(folder)
    assert get(again, 1) and again.stats().num_blocks == 2 and again.stats().bytes == store.stats().bytes
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_size_is_limited_and_the_least_recently_used_entry_is_evicted(tmp_path):
    store = make(tmp_path, 5 * (BLOCK + 2000), entries=range(4))
    get(store, 0)
    for number in range(4, 7):
        put(store, number)
        assert store.stats().bytes <= store.max_bytes
        assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) == store.stats().bytes
    assert key(0) in store and key(1) not in store and store.stats().evictions
    assert not put(store, 99, size=1 << 20) and store.stats().num_refused == 1
    store.release()
    smaller = make(tmp_path, 2 * (BLOCK + 2000))
    assert smaller.stats().bytes <= smaller.max_bytes and smaller.stats().num_blocks == 2 and get(smaller, 6)


def test_the_order_of_use_survives_reopening(tmp_path):
    store = make(tmp_path, entries=(1, 2, 3))
    for second, number in enumerate((1, 3, 2)):  # Files written at once may have equal times.
        os.utime(store._path(key(number)), (second, second))
    assert get(store, 1)
    store.release()
    again = make(tmp_path)
    assert again.eviction_order() == (key(3), key(2), key(1))
    again.release()
    smaller = make(tmp_path, 2 * (BLOCK + 2000))
    assert get(smaller, 1) and get(smaller, 2) and not get(smaller, 3)


def test_pinned_entries_are_not_evicted(tmp_path):
    store = make(tmp_path, 12 * BLOCK, entries=[0])
    store.pin([key(0)])
    for number in range(1, 30):
        put(store, number)
    assert get(store, 0) and store.stats().pinned == 1
    store.pin([key(number) for number in range(30) if key(number) in store])
    assert not put(store, 100) and not store.stats().disabled_reason, "no room is no failure"


def test_pinned_entries_stay_when_the_folder_is_opened_with_a_smaller_limit(tmp_path):
    make(tmp_path, 12 * BLOCK, entries=range(4)).release()
    smaller = make(tmp_path, 1, pinned=lambda: [key(2)])
    assert smaller.eviction_order() == (key(2),) and get(smaller, 2) and smaller.stats().pinned == 1
    assert not put(smaller, 9), "pinned entries exceed the limit: nothing is stored"


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_byte_is_refused(tmp_path, limit):
    with pytest.raises(ConfigError, match="prefix_cache_size: must be at least 1"):
        make(tmp_path, limit)


def test_reserved_bytes_stay_free(tmp_path, caplog):
    disk = FailingDisk()
    disk.free_bytes = lambda folder: 100_000
    store = DiskBlockStore(tmp_path, 1 << 20, reserve=90_000, fs=disk)
    with caplog.at_level(logging.WARNING):
        assert not put(store, 1) and not put(store, 2)
    assert store.stats().num_refused == 2 and len(caplog.records) == 1 and not store.stats().disabled_reason
    disk.free_bytes = lambda folder: 1 << 30
    assert put(store, 1)


def test_files_with_other_names_are_not_changed(tmp_path):
    make(tmp_path).release()
    for name in ("notes.txt", "UPPER.kv", "x.kv", "deadbeef.kvx", ".hidden", "-00.kv"):
        (tmp_path / name).write_bytes(b"notes")
    (tmp_path / "00ff.kv").symlink_to("/etc/passwd")
    (tmp_path / "00fe.kv").mkdir()
    store = make(tmp_path, 10)
    assert store.stats().num_blocks == 0 and len(list(tmp_path.iterdir())) == 9
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        store.get("00ff", lambda header, section: header)


def test_leftovers_of_dead_writers_are_removed(tmp_path):
    make(tmp_path).release()
    dead, other = tmp_path / ".00aa.kv.999999.0123abcd.tmp", tmp_path / ".notes.999999.0123abcd.tmp"
    living = temp_path(tmp_path / "00bb.kv", "tmp")
    for path in (dead, other, living):
        path.write_bytes(b"half")
    store = make(tmp_path)
    assert not dead.exists() and living.exists() and other.exists() and store.stats().num_removed == 1
    assert remove_leftovers(tmp_path) == 0 and (tmp_path / LOCK_NAME).exists()


@pytest.mark.parametrize("change", ["flip", "truncate", "long", "other", "empty"])
def test_a_damaged_entry_is_a_miss_once(tmp_path, change):
    store, path = make(tmp_path, entries=[1]), tmp_path / f"{key(1)}.kv"
    raw = bytearray(path.read_bytes())
    if change == "flip":
        raw[-50] ^= 4
    changed = {"truncate": raw[:-10], "long": raw + b"0", "other": b"#!/bin/sh" * 50, "empty": b""}
    path.write_bytes(changed.get(change, raw))
    assert not get(store, 1)
    assert sum(store.stats().misses.values()) == 1 and not store.stats().disabled_reason
    assert path.exists() == (change == "other"), "foreign files are kept"
    assert key(1) not in store and put(store, 1) and get(store, 1)


def test_a_removed_entry_is_a_miss(tmp_path):
    store = make(tmp_path, entries=[1])
    (tmp_path / f"{key(1)}.kv").unlink()
    assert not get(store, 1) and store.stats().misses == {"missing": 1} and put(store, 1)


# ---------------------------------------------------------------- a disk that fails


def use(folder, disk):
    """Open a store, put, get and evict; entries that are read must be right. OSError: it could not be opened."""
    store = make(folder, 4 * (BLOCK + 2000), fs=disk)
    for number in range(6):
        put(store, number)
        get(store, number)
        get(store, number - 1)
    store.release()
    return store.stats()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_any_failed_operation_gives_right_entries_and_a_usable_folder(tmp_path, code):
    counting, refused, failed = FailingDisk(), 0, 0
    use(tmp_path / "counted", counting)
    assert counting.count > 60
    for k in range(counting.count):
        folder = tmp_path / f"{k}"
        try:
            failed += use(folder, FailingDisk(k, code=code)).failures > 0
        except OSError:
            refused += 1
        store = make(folder)
        assert not store.stats().disabled_reason
        for number in range(6):
            get(store, number)
        store.release()
    assert 0 < refused < 10 and failed > 20


@pytest.mark.parametrize("k", range(0, 60, 7))
def test_a_disk_that_keeps_failing_is_disabled_and_logged_once(tmp_path, k, caplog):
    with caplog.at_level(logging.WARNING):
        try:
            stats = use(tmp_path, FailingDisk(k, on=True))
        except OSError:
            return
    assert stats.disabled_reason and 1 <= len([r for r in caplog.records if "failed" in r.message]) <= 2


def test_repeated_failed_reads_disable_the_store(tmp_path):
    disk = FailingDisk()
    store = make(tmp_path, entries=range(8), fs=disk)
    disk.k, disk.on, disk.which, disk.count = 0, True, ("read",), 0
    assert not any(get(store, number) for number in range(8))
    assert disk.failed <= MAX_FAILURES + 8 and store.stats().disabled_reason and key(7) not in store
    assert store.stats().misses["failed"] >= MAX_FAILURES


def test_an_entry_whose_read_failed_is_not_read_again(tmp_path):
    disk = FailingDisk()
    store = make(tmp_path, entries=[1], fs=disk)
    disk.k, disk.which, disk.count = 0, ("read",), 0
    assert not get(store, 1) and key(1) not in store and not store.stats().disabled_reason


@pytest.mark.parametrize("seed", range(40))
def test_after_a_power_cut_every_entry_is_right_or_a_miss(tmp_path, seed):
    disk = PowerCutDisk(seed)
    store = make(tmp_path, 4 * (BLOCK + 2000), entries=range(6), fs=disk)
    pinned = store.eviction_order()[:2]
    store.pin(pinned)
    store.release()
    disk.power_cut()
    again = make(tmp_path)
    assert all(get(again, int(name, 16)) for name in pinned), "flushed entries are lost"
    for number in range(6):
        get(again, number)
        put(again, number)
        assert get(again, number)


def test_unflushed_entries_are_lost_at_a_power_cut(tmp_path):
    lost = 0
    for seed in range(40):
        disk = PowerCutDisk(seed)
        make(tmp_path / f"{seed}", entries=[1], fs=disk).release()
        disk.power_cut()
        lost += not get(make(tmp_path / f"{seed}"), 1)
    assert lost > 10


# ---------------------------------------------------------------- two processes

HOLD = """
import sys
from pathlib import Path
from kvad.cache.offload.disk_store import DiskBlockStore
store = DiskBlockStore(Path(sys.argv[1]), 1 << 20)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_folder_locked_by_another_process_is_refused_until_it_ends(tmp_path):
    command = [sys.executable, "-c", HOLD, tmp_path]
    with subprocess.Popen(command, stdin=-1, stdout=-1, cwd=Path(__file__).parents[3]) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        with pytest.raises(BlockingIOError):
            make(tmp_path)
        assert lock_owner(tmp_path / LOCK_NAME) == f"process {holder.pid}"
        holder.kill()
    assert put(make(tmp_path), 1)
    assert lock_owner(tmp_path / LOCK_NAME) == "this process"
    (tmp_path / LOCK_NAME).write_text("")  # of a version before, or on a full disk
    assert lock_owner(tmp_path / LOCK_NAME) == lock_owner(tmp_path / "none") == "another process"


def test_a_pinned_prefix_is_flushed(tmp_path):
    pin = PinnedPrefix("system", (), 0, "", {})
    with pytest.raises(OSError):
        write_pinned_prefix(tmp_path, pin, FailingDisk(0, which=("sync",)))
    assert not list(tmp_path.iterdir())


def test_a_process_locks_a_folder_once(tmp_path):
    first = make(tmp_path)
    with pytest.raises(BlockingIOError):
        make(tmp_path)
    first.release()
    second = make(tmp_path)
    del second
    make(tmp_path)
