"""One process at a time writes to a run folder; the lock ends with its process."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from kvad.checkpoint.folder import list_steps
from kvad.cli.main import main
from kvad.errors import DataError, UsageError
from kvad.storage.filesystem import FileSystem
from kvad.train.loop.run import resume_model, train_model
from kvad.train.monitoring.callbacks import Callback
from kvad.train.setup.preflight import LOCK_FILE
from tests.train.test_cli import QUICK

ROOT = Path(__file__).parents[3]
WAITING = """
import sys
from pathlib import Path
from kvad.train.loop.run import train_model
from kvad.train.monitoring.callbacks import Callback
from tests.support.training_runs import tiny_config

class Waiting(Callback):
    def on_save(self, path, step):
        print("saved", flush=True)
        sys.stdin.read()

corpus, out = map(Path, sys.argv[1:])
train_model(tiny_config(steps=9, save_interval=2, async_save=False), [corpus], out, callbacks=[Waiting()])
"""


def test_a_second_process_is_refused_until_the_first_is_killed(corpus, tmp_path, run_config, capsys):
    out = tmp_path / "run"
    command = [sys.executable, "-c", WAITING, str(corpus), str(out)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "saved\n"
            before = sorted(path.name for path in out.rglob("*"))
            for arguments in ([str(corpus), "--overwrite", *QUICK, "--steps", "1"], ["--resume"]):
                assert main(["train", *arguments, "--out", str(out)]) == 2
                problem, hint = capsys.readouterr().err.splitlines()[-2:]
                assert problem == f"kvad: error: {out} is in use: process {child.pid} is training there"
                assert hint == "kvad: hint: Wait until it ends, or choose another --out."
            assert sorted(path.name for path in out.rglob("*")) == before
        finally:
            child.kill()
    assert [path.name for path in list_steps(out)] == ["step-00000002"]
    assert resume_model(out).step == 9
    assert not (out / LOCK_FILE).exists()


class Again(Callback):
    """Starts another run in the folder while the first is training."""

    def __init__(self, start):
        self.start, self.errors = start, []

    def on_step(self, report):
        with pytest.raises(UsageError) as caught:
            self.start()
        self.errors.append(caught.value.message)


def test_a_second_run_in_the_same_process_is_refused(corpus, tmp_path, run_config):
    out = tmp_path / "run"
    again = Again(lambda: train_model(run_config(steps=2), [corpus], out, overwrite=True))
    assert train_model(run_config(steps=2), [corpus], out, callbacks=[again]).step == 2
    assert again.errors == [f"{out} is in use: this process is training there"] * 2


def test_a_file_system_without_locks_is_not_locked(corpus, tmp_path, run_config, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(FileSystem, "lock", refuse)
    assert train_model(run_config(steps=1), [corpus], tmp_path / "run").step == 1


def test_a_run_that_is_refused_leaves_no_folder(tmp_path, run_config):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError):
        train_model(run_config(), [tmp_path / "empty.txt"], tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()
