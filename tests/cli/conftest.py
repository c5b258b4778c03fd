"""Fixtures of the command line's tests: a tiny decoder, and ``kvad`` in this process."""

import shlex
import signal

import pytest

from kvad.cli.stats import RunMeter
from kvad.llm import LLM
from tests.support.cli_checkpoints import run, write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def llm(model):
    with LLM.load(model, max_num_seqs=4) as opened:
        yield opened


@pytest.fixture
def kvad(capsys, monkeypatch, tmp_path):
    """Run a command: its first argument is split like a shell's line; ``stdin`` is bytes. Sessions are temporary."""
    monkeypatch.setenv("KVAD_SESSION_DIR", str(tmp_path / "sessions"))

    def call(command, *arguments, stdin=None):
        return run(capsys, *shlex.split(command), *arguments, stdin=stdin, monkeypatch=monkeypatch)

    return call


@pytest.fixture
def interrupt_after(monkeypatch):
    """Return a function that sends Ctrl-C after a number of generated chunks, and returns the list of chunks."""

    def install(count):
        add, chunks = RunMeter.add, []

        def add_and_interrupt(meter, chunk):
            add(meter, chunk)
            chunks.append(chunk)
            if len(chunks) == count:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(RunMeter, "add", add_and_interrupt)
        return chunks

    return install
