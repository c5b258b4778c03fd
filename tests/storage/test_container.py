"""An entry is whole, ours and unchanged, or refused: every byte, every cut, every operation of the disk."""

import errno
import os
import stat

import numpy as np
import pytest

from kvad.errors import StorageError
from kvad.storage.container import Section, open_container, read_header, write_container
from kvad.storage.fingerprint import CacheFingerprint
from tests.support.faulty_filesystems import FailingDisk, ForgetfulDisk

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
    """The seed of a whole entry."""
    with open_container(path, **more) as entry:
        entry.check()
        seed = entry.header.metadata["seed"]
        for section in sections(seed):
            assert bytes(entry.read(section.name)) == bytes(section.data)
        return seed


def test_what_is_read_is_what_was_written(tmp_path):
    path = tmp_path / "a"
    assert write(path) == path.stat().st_size
    header = read_header(path)
    assert (header.kind, header.fingerprint, header.metadata) == ("session", IDENTITY, {"tokens": 4, "seed": 0})
    assert header.sections["keys"].shape == (5, 3) and header.nbytes == path.stat().st_size
    assert seed_of(path) == 0
    assert os.listdir(tmp_path) == ["a"] and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_every_flipped_byte_is_seen(tmp_path):
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


def test_every_cut_and_every_longer_file_is_seen(tmp_path):
    write(tmp_path / "a")
    raw = (tmp_path / "a").read_bytes()
    for end in range(len(raw)):
        (tmp_path / "b").write_bytes(raw[:end])
        with pytest.raises(StorageError):
            seed_of(tmp_path / "b")
    (tmp_path / "b").write_bytes(raw + b"\0")
    with pytest.raises(StorageError, match="expected"):
        seed_of(tmp_path / "b")


def test_a_file_that_is_cut_while_it_is_read_is_torn(tmp_path):
    write(tmp_path / "a")
    with open_container(tmp_path / "a") as entry:
        os.truncate(tmp_path / "a", entry.header.sections["tokens"].offset + 1)
        entry.read("keys")
        with pytest.raises(StorageError, match="section tokens is truncated"):
            entry.read("tokens")


@pytest.mark.parametrize("raw", [b"", b"KVADKV", b"KVADKV99" + bytes(100), b"#!/bin/sh\n" * 20, bytes(4096)])
def test_what_is_not_ours_is_left_alone(tmp_path, raw):
    (tmp_path / "a").write_bytes(raw)
    with pytest.raises(StorageError):
        read_header(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == raw


def test_a_header_cannot_ask_for_more_than_the_file_has(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"KVADKV02" + (1 << 60).to_bytes(8, "little") + bytes(64))
    with pytest.raises(StorageError, match="header is truncated"):
        read_header(path)


def test_missing_is_said(tmp_path):
    with pytest.raises(StorageError, match="does not exist") as caught:
        read_header(tmp_path / "a")
    assert caught.value.reason == "missing"


def test_a_link_is_not_followed(tmp_path):
    write(tmp_path / "a")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        read_header(tmp_path / "b")


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_whichever_operation_fails_the_old_entry_is_whole(tmp_path, code):
    counted = FailingDisk()
    write(tmp_path / "a", fs=counted)
    assert counted.count > 6
    for k in range(counted.count):
        disk = FailingDisk(k, code=code)
        with pytest.raises(OSError, match=os.strerror(code)):
            write(tmp_path / "a", seed=k + 1, fs=disk)
        assert disk.failed == 1
        assert seed_of(tmp_path / "a") in (k, 0, k + 1)  # the new one, if the folder's flush alone failed
        assert os.listdir(tmp_path) == ["a"]
        write(tmp_path / "a", seed=k + 1)


def test_whichever_read_fails_nothing_wrong_comes_back(tmp_path):
    write(tmp_path / "a")
    counted = FailingDisk()
    seed_of(tmp_path / "a", fs=counted)
    for k in range(counted.count):
        with pytest.raises(OSError, match="Input/output"):
            seed_of(tmp_path / "a", fs=FailingDisk(k))


@pytest.mark.parametrize("durable", [True, False])
def test_after_a_power_cut_an_entry_is_whole_or_refused(tmp_path, durable):
    lost = 0
    for seed in range(1, 60):
        path = tmp_path / f"{seed}"
        path.mkdir()
        write(path / "a")
        disk = ForgetfulDisk(seed)
        write(path / "a", seed=seed, durable=durable, fs=disk)
        disk.power_cut()
        try:
            assert seed_of(path / "a") in ((seed,) if durable else (0, seed))
        except StorageError:
            assert not durable  # it was acknowledged
            lost += 1
    assert (lost > 0) is not durable, "this disk forgets nothing: the test shows nothing"


def test_identities_say_which_part_differs():
    here = CacheFingerprint(model="a" * 32, policy="full", keys="float32")
    assert not list(here.differences(dict(here.parts)))
    assert list(here.differences({**here.parts, "policy": "window(64)"})) == ["policy: full here, window(64) there"]
    assert list(here.differences({**here.parts, "model": "b" * 32})) == ["model"]
    assert list(here.differences({**here.parts, "shape": "x"})) == ["shape: none here, x there"]
    assert here.digest() == CacheFingerprint(keys="float32", policy="full", model="a" * 32).digest()
    assert here.digest() != CacheFingerprint(model="a" * 32, policy="full", keys="float16").digest()
