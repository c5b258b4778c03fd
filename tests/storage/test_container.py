"""A container file is whole, from kvad and unchanged, or refused: for every byte, length and disk operation."""

import errno
import os
import stat
from contextlib import contextmanager

import numpy as np
import pytest

from kvad.errors import StorageError
from kvad.storage import container
from kvad.storage.container import (
    ALIGNED,
    CacheFingerprint,
    ContainerWriter,
    Section,
    open_container,
    read_header,
    write_container,
)
from kvad.storage.filesystem import REAL_FILE_SYSTEM, FileSystem
from tests.support.faulty_filesystems import FailingDisk, PowerCutDisk

IDENTITY = {"model": "m", "keys": "float32"}


def sections(seed=0):
    numbers = np.random.default_rng(seed).standard_normal((5, 3)).astype(np.float32)
    return [
        Section("keys", "float32", (5, 3), memoryview(numbers)),
        Section("none", "int64", (0, 2), memoryview(b"")),
        Section("tokens", "int64", (4,), memoryview(np.arange(4))),
    ]


def write(path, seed=0, durable=True, **more):
    return write_container(
        path, "session", IDENTITY, {"tokens": 4, "seed": seed}, sections(seed), durable=durable, **more
    )


def seed_of(path, **more):
    """Return the seed of a valid file."""
    with open_container(path, **more) as entry:
        entry.check()
        seed = entry.header.metadata["seed"]
        for section in sections(seed):
            assert bytes(entry.read(section.name)) == bytes(section.data)
        return seed


def test_file_is_read_as_written(tmp_path):
    path = tmp_path / "a"
    assert write(path) == path.stat().st_size
    header = read_header(path)
    assert (header.kind, header.fingerprint, header.metadata) == ("session", IDENTITY, {"tokens": 4, "seed": 0})
    assert header.sections["keys"].shape == (5, 3) and header.nbytes == path.stat().st_size
    assert seed_of(path) == 0
    assert os.listdir(tmp_path) == ["a"] and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_every_flipped_byte_is_detected(tmp_path):
    write(tmp_path / "a")
    raw = (tmp_path / "a").read_bytes()
    for at in range(len(raw)):
        for bit in (1, 0x40):
            changed = bytearray(raw)
            changed[at] ^= bit
            (tmp_path / "b").write_bytes(changed)
            with pytest.raises(StorageError) as caught:
                seed_of(tmp_path / "b")
            assert caught.value.reason in ("damaged", "foreign")


def test_every_wrong_length_is_detected(tmp_path):
    write(tmp_path / "a")
    raw = (tmp_path / "a").read_bytes()
    for end in range(len(raw)):
        (tmp_path / "b").write_bytes(raw[:end])
        with pytest.raises(StorageError):
            seed_of(tmp_path / "b")
    (tmp_path / "b").write_bytes(raw + b"\0")
    with pytest.raises(StorageError, match="expected"):
        seed_of(tmp_path / "b")


def test_file_truncated_during_the_read_is_refused(tmp_path):
    write(tmp_path / "a")
    with open_container(tmp_path / "a") as entry:
        os.truncate(tmp_path / "a", entry.header.sections["tokens"].offset + 1)
        entry.read("keys")
        with pytest.raises(StorageError, match="section tokens is truncated"):
            entry.read("tokens")


@pytest.mark.parametrize("raw", [b"", b"KVADKV", b"KVADKV99" + bytes(100), b"#!/bin/sh\n" * 20, bytes(4096)])
def test_foreign_files_are_refused(tmp_path, raw):
    (tmp_path / "a").write_bytes(raw)
    with pytest.raises(StorageError):
        read_header(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == raw


@pytest.mark.parametrize("length", [53, 1 << 20, 1 << 60])  # 52 bytes are left between the prefix and the end marker
def test_header_sizes_are_checked_against_the_file(tmp_path, length):
    path = tmp_path / "a"
    path.write_bytes(b"KVADKV02" + length.to_bytes(8, "little") + bytes(64))
    with pytest.raises(StorageError, match="header is truncated"):
        read_header(path)


def test_missing_file_is_reported(tmp_path):
    with pytest.raises(StorageError, match="does not exist") as caught:
        read_header(tmp_path / "a")
    assert caught.value.reason == "missing"


def test_links_are_not_followed(tmp_path):
    write(tmp_path / "a")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        read_header(tmp_path / "b")


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_old_file_survives_every_failed_operation(tmp_path, code):
    counted = FailingDisk()
    write(tmp_path / "a", fs=counted)
    assert counted.count > 6
    for k in range(counted.count):
        disk = FailingDisk(k, code=code)
        with pytest.raises(OSError, match=os.strerror(code)):
            write(tmp_path / "a", seed=k + 1, fs=disk)
        assert disk.failed == 1
        assert seed_of(tmp_path / "a") in (k, 0, k + 1)  # the new one, if only the folder's flush failed
        assert os.listdir(tmp_path) == ["a"]
        write(tmp_path / "a", seed=k + 1)


def test_failed_reads_return_no_wrong_data(tmp_path):
    write(tmp_path / "a")
    counted = FailingDisk()
    seed_of(tmp_path / "a", fs=counted)
    for k in range(counted.count):
        with pytest.raises(OSError, match="Input/output"):
            seed_of(tmp_path / "a", fs=FailingDisk(k))


@pytest.mark.parametrize("durable", [True, False])
def test_file_is_whole_or_refused_after_a_power_cut(tmp_path, durable):
    num_lost = 0
    for seed in range(1, 60):
        path = tmp_path / f"{seed}"
        path.mkdir()
        write(path / "a")
        disk = PowerCutDisk(seed)
        write(path / "a", seed=seed, durable=durable, fs=disk)
        disk.power_cut()
        try:
            assert seed_of(path / "a") in ((seed,) if durable else (0, seed))
        except StorageError:
            assert not durable  # it was acknowledged
            num_lost += 1
    assert (num_lost > 0) is not durable, "the power cut lost nothing, so the test shows nothing"


def test_identity_errors_name_the_part():
    here = CacheFingerprint(model="a" * 32, policy="full", keys="float32")
    assert not list(here.differences(dict(here.parts)))
    assert list(here.differences({**here.parts, "policy": "window(64)"})) == ["policy: full here, window(64) there"]
    assert list(here.differences({**here.parts, "model": "b" * 32})) == ["model"]
    assert list(here.differences({**here.parts, "shape": "x"})) == ["shape: none here, x there"]
    assert here.digest() == CacheFingerprint(keys="float32", policy="full", model="a" * 32).digest()
    assert here.digest() != CacheFingerprint(model="a" * 32, policy="full", keys="float16").digest()


def test_a_file_that_is_renamed_during_a_listing_is_skipped(tmp_path, monkeypatch):
    """The writer thread of a prefix cache renames temporary files while another thread lists the folder."""
    (tmp_path / "kept").write_bytes(b"abc")
    (tmp_path / "renamed").write_bytes(b"abc")
    scandir = os.scandir

    @contextmanager
    def renaming(folder):
        with scandir(folder) as entries:
            found = list(entries)
        (tmp_path / "renamed").unlink()
        yield found

    monkeypatch.setattr("kvad.storage.filesystem.os.scandir", renaming)
    assert [(file.name, file.size) for file in REAL_FILE_SYSTEM.list_files(tmp_path)] == [("kept", 3)]


# ---------------------------------------------------------------- written section by section


@pytest.mark.parametrize("header_bytes", [1000, 4096, 5000])
def test_a_writer_grows_its_file_by_whole_huge_pages(tmp_path, monkeypatch, header_bytes):
    monkeypatch.setattr(container, "HUGE_PAGE", page := 4096)
    path, size = tmp_path / "it", 0

    class Disk(FileSystem):
        def write_at(self, file, data, offset):
            nonlocal size
            end = offset + len(data)
            assert end <= size or (offset == size and len(data) % page == 0), "the file grows by less than a huge page"
            size = max(size, end)
            super().write_at(file, data, offset)

    contents = [os.urandom(count) for count in (10, 3 * page, 0, page - 1, 1, 2 * page + 7, page - 200)]
    writer = ContainerWriter(path, header_bytes, Disk())
    offsets = [writer.write(str(index), data) for index, data in enumerate(contents)]
    writer.commit("kind", IDENTITY)
    writer.close()
    assert path.stat().st_size == size and size % page == 0 and not any(offset % ALIGNED for offset in offsets)
    with open_container(path) as entry:
        entry.check()
        for index, data in enumerate(contents):
            stored = bytes(entry.read(str(index)))
            assert stored.startswith(data) and not any(stored[len(data) :])


def test_a_writer_without_sections_writes_a_valid_file(tmp_path):
    writer = ContainerWriter(tmp_path / "it", 100)
    writer.commit("kind", IDENTITY)
    writer.close()
    assert not read_header(tmp_path / "it").sections


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs /proc")
def test_no_memory_is_reserved_for_writes_to_a_mapped_file(tmp_path):
    path = tmp_path / "it"
    path.write_bytes(bytes(8192))
    file = REAL_FILE_SYSTEM.open(path)
    mapping = REAL_FILE_SYSTEM.map(file, 0, 8192)
    REAL_FILE_SYSTEM.close(file)
    with open("/proc/self/smaps") as maps:
        lines = maps.read().partition(str(path))[2].splitlines()
    flags = next(line for line in lines if line.startswith("VmFlags"))
    assert "nr" in flags.split()
    mapping[0] = 1
    assert path.read_bytes() == bytes(8192)
