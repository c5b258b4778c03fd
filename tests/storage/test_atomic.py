"""Folders appear whole or not at all, for every disk error and every kill."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from kvad.errors import SaveError
from kvad.storage import atomic
from kvad.storage.atomic import find_interrupted, new_folder, remove_folder, write_bytes


def put(folder, text, **options):
    with new_folder(folder, **options) as new:
        (new / "inner").mkdir()
        (new / "a").write_text(text)
        (new / "inner" / "b").write_text(text)


def content(folder):
    return {(folder / "a").read_text(), (folder / "inner" / "b").read_text()}


class Disk:
    """Fails, or calls a function, at the k-th operation that changes the disk."""

    def __init__(self, monkeypatch, at, do):
        self.count = 0
        for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "mkdir"), (Path, "replace")):
            monkeypatch.setattr(owner, name, self.wrap(getattr(owner, name), at, do))

    def wrap(self, real, at, do):
        def operation(*arguments, **options):
            self.count += 1
            if self.count == at:
                do()
            return real(*arguments, **options)

        return operation


def no_space():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_folder_is_written_and_replaced(tmp_path):
    put(tmp_path / "x", "one")
    assert content(tmp_path / "x") == {"one"}
    put(tmp_path / "x", "two")
    assert content(tmp_path / "x") == {"two"}
    assert names(tmp_path) == ["x"]


def test_a_failed_file_is_named_by_the_final_folder(tmp_path):
    """A full disk while a model is exported: the message has the folder that the user gave."""
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(SaveError) as caught, new_folder(tmp_path / "exp") as new:
        raise SaveError(f"cannot write {new / 'model.safetensors'}: {full.strerror}", "Free some space.") from full
    assert caught.value.message == f"cannot write {tmp_path}/exp/model.safetensors: No space left on device"
    assert caught.value.hint == "Free some space." and not list(tmp_path.iterdir())
    assert caught.value.__cause__ is full, "the exit code depends on it"


def test_writer_error_leaves_no_files(tmp_path):
    put(tmp_path / "x", "one")

    def half():
        with new_folder(tmp_path / "x") as new:
            (new / "a").write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    assert content(tmp_path / "x") == {"one"} and names(tmp_path) == ["x"]


def test_old_folder_survives_every_failed_operation(tmp_path):
    for at in range(1, 100):
        shutil.rmtree(tmp_path)
        put(tmp_path / "x", "old")
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(patch, at, no_space)
            refusal = error_of(lambda: put(tmp_path / "x", "new"))
        if disk.count < at:
            break
        if refusal is None:  # The deletion of the old folder failed, after the new one was complete.
            assert at > 10 and content(tmp_path / "x") == {"new"}
            continue
        assert "No space left" in refusal.message and "complete" in refusal.hint
        assert content(tmp_path / "x") == {"old"}, f"operation {at}"
        assert names(tmp_path) == ["x"], f"operation {at}"
    assert at == 13, "an operation that changes the disk was not counted"
    assert content(tmp_path / "x") == {"new"}


def error_of(action):
    try:
        action()
    except SaveError as error:
        return error
    return None


def test_flushes_before_and_after_the_rename(tmp_path, monkeypatch):
    events = []
    opened = {}
    real_open, real_fsync, real_rename = os.open, os.fsync, Path.rename

    def recording_open(path, *arguments, **options):
        descriptor = real_open(path, *arguments, **options)
        opened[descriptor] = Path(path).name
        return descriptor

    monkeypatch.setattr(os, "open", recording_open)
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(opened.get(fd)), real_fsync(fd))[1])
    monkeypatch.setattr(Path, "rename", lambda old, new: (events.append("rename"), real_rename(old, new))[1])
    put(tmp_path / "x", "one")
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert {"a", "b", "inner"} <= set(before) and any(name.endswith(".tmp") for name in before)
    assert after == [tmp_path.name]


def test_replaced_folders_are_renamed_together(tmp_path):
    put(tmp_path / "step-9", "old")
    put(tmp_path / "step-1", "new", replaces=[tmp_path / "step-9"])
    assert names(tmp_path) == ["step-1"]


def make_old(path, age_seconds=3600):
    path.mkdir()
    (path / "a").write_text("left")
    past = path.stat().st_mtime - age_seconds
    os.utime(path, (past, past))


def dead_pid():
    """Return the id of a process that has exited."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def test_only_leftovers_of_dead_processes_are_removed(tmp_path):
    dead = dead_pid()
    make_old(tmp_path / f".x.{dead}.00000000.tmp")
    make_old(
        tmp_path / f".y.{os.getpid()}.00000000.tmp"
    )  # of an earlier process with our process id, as in a container
    make_old(tmp_path / f".z.{os.getppid()}.00000000.tmp")
    (tmp_path / f".w.{os.getpid()}.00000000.tmp").mkdir()  # another thread's folder
    put(tmp_path / "x", "one")
    assert names(tmp_path) == [f".w.{os.getpid()}.00000000.tmp", f".z.{os.getppid()}.00000000.tmp", "x"]


def test_old_folder_survives_a_kill_between_renames(tmp_path):
    put(tmp_path / "x", "one")
    aside = tmp_path / f".x.{dead_pid()}.00000000.old"
    (tmp_path / "x").rename(aside)
    assert find_interrupted(tmp_path / "x") == aside and content(aside) == {"one"}
    put(tmp_path / "y", "two")  # any save in the same folder restores it
    assert content(tmp_path / "x") == {"one"} and find_interrupted(tmp_path / "x") is None


def test_replaced_folder_is_never_restored_in_part(tmp_path, monkeypatch):
    """A process dies while it deletes the replaced folder, NAME is removed by hand, and another save sweeps."""
    dead, partial = dead_pid(), []

    def die(path, ignore_errors=False):
        partial.append(path)
        (path / "a").unlink()
        path.rename(path.with_name(path.name.replace(f".{os.getpid()}.", f".{dead}.")))

    real = shutil.rmtree
    put(tmp_path / "x", "one")
    with monkeypatch.context() as patch:
        patch.setattr(atomic.shutil, "rmtree", lambda path, **_: die(path) if path.exists() else None)
        put(tmp_path / "x", "two")
        real(tmp_path / "x")
        left = tmp_path / f".z.{dead}.00000000.old"  # of a process that died before its deletion began
        make_old(left)
        (tmp_path / "z").mkdir()
        atomic.recover_interrupted(tmp_path)
    assert len(partial) == 3 and all(path.name.endswith(".tmp") for path in partial)
    (tmp_path / "z").rmdir()
    put(tmp_path / "y", "three")
    assert names(tmp_path) == ["y"]


def test_a_second_process_never_restores_what_a_living_one_has_set_aside(tmp_path, monkeypatch):
    """Another process sweeps before and after every operation of a save; the save still replaces the folder."""
    put(tmp_path / "x", "one")

    def sweep_elsewhere():
        if (pid := os.fork()) == 0:
            code = 1
            try:
                monkeypatch.undo()
                complete = [
                    path for path in (tmp_path / "x", find_interrupted(tmp_path / "x")) if path and path.exists()
                ]
                atomic.recover_interrupted(tmp_path)
                code = 0 if content(complete[0]) in ({"one"}, {"two"}) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    count = 0

    def swept(real):
        def operation(*arguments, **options):
            nonlocal count
            count += 1
            sweep_elsewhere()
            result = real(*arguments, **options)
            sweep_elsewhere()
            return result

        return operation

    for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "mkdir"), (shutil, "rmtree")):
        monkeypatch.setattr(owner, name, swept(getattr(owner, name)))
    put(tmp_path / "x", "two")
    monkeypatch.undo()
    assert count >= 12 and content(tmp_path / "x") == {"two"} and names(tmp_path) == ["x"]


def test_removed_folder_is_never_partially_visible(tmp_path, monkeypatch):
    put(tmp_path / "x", "one")
    monkeypatch.setattr(atomic.shutil, "rmtree", lambda *_, **__: None)  # killed before anything was deleted
    remove_folder(tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_failed_write_of_a_file_keeps_the_old_one(tmp_path):
    write_bytes(tmp_path / "deep" / "f", b"one")
    for at in (2, 3):  # the flush, the rename; 1 is the mkdir
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, at, no_space)
            with pytest.raises(SaveError, match=r"cannot save .*f: No space left"):
                write_bytes(tmp_path / "deep" / "f", b"two")
        assert (tmp_path / "deep" / "f").read_bytes() == b"one"
    assert names(tmp_path / "deep") == ["f"]
