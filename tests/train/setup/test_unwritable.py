"""An --out that cannot be written is refused before texts are read."""

import pytest

from kvad.cli.main import main
from kvad.train.setup import run_data
from kvad.train.setup.preflight import check_writable


@pytest.fixture
def unread(monkeypatch):
    """A run that reads its corpus, or trains a tokenizer, fails."""

    def read(*_, **__):
        raise AssertionError("it was read before its place was looked at")

    monkeypatch.setattr(run_data.RunData, "__init__", read)


COMMANDS = (("train",), ("train", "--objective", "summarizer", "--init", "no-model"), ("data", "prepare"))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_unwritable_folder_is_refused_before_texts_are_read(tmp_path, unread, capsys, command):
    (tmp_path / "a.txt").write_text("some text " * 100)
    (tmp_path / "FILE").write_text("")
    if "--init" in command:  # whose limit is a default: it is said here, so that no model is opened
        command = (*command, "--seq-len", "64")
    for out, said in (
        ("/proc/x21", "cannot write /proc/x21: "),
        (tmp_path / "FILE" / "x", f"{tmp_path}/FILE is a file"),
    ):
        assert main([*command, str(tmp_path / "a.txt"), "--out", str(out)]) == 2
        error, hint = capsys.readouterr().err.splitlines()
        assert said in error and "another" in hint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["FILE", "a.txt"]


def test_check_leaves_the_folder_unchanged(tmp_path):
    check_writable(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / "a").mkdir()
    check_writable(tmp_path / "a" / "b")
    check_writable(tmp_path / "a")
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]
