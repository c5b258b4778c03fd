"""Output folders of runs: other files are never overwritten; unwritable folders are refused first."""

import pytest

from kvad.cli.main import main
from kvad.train.setup import run_data
from kvad.train.setup.preflight import check_writable
from tests.train.test_cli import RUN

SMALL = ["--preset", "tiny", *RUN, "--steps", "1"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one after another, " * 40)
    return path


def train(*words):
    return main(["train", *map(str, words), *SMALL])


def everything(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("there", "named", "words"),
    [
        ("data/text.txt", "data/text.txt", "data exists already"),  # a file of it is the corpus
        ("data/text.txt", "data", "data exists already"),
        ("data/mine/notes.md", None, "data exists already, and the run would write its tokens there"),
        ("data/0/notes.md", None, "data exists already"),
        ("data", None, "data exists already"),  # a file
        ("run.toml", None, "run.toml exists already, and the run would write its configuration there"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--overwrite",), ("--dry-run",)])
def test_files_of_no_run_are_kept(tmp_path, text, capsys, there, named, words, more):
    out = tmp_path / "proj"
    put(out / there, "a user's text, " * 40)
    before = everything(out)
    assert train(text if named is None else out / named, "--out", out, *more) == 2
    stderr = capsys.readouterr().err
    expected = words.format(out=out) if named is None else "is inside" if "--dry" else words
    assert expected in stderr and "choose another --out" in stderr.lower(), stderr
    assert everything(out) == before


def test_pairs_and_mixture_sources_are_checked(tmp_path, text, capsys):
    out = tmp_path / "proj"
    pairs = put(out / "data" / "pairs.tsv", "a b\tb a\n" * 40)
    assert train(pairs, "--out", out, "--preset", "transformer-tiny") == 2
    assert "pairs.tsv is inside" in capsys.readouterr().err
    parts = f'data.sources=[{{"paths": ["{pairs}"], "weight": 1}}]'
    assert train("--out", out, "--set", parts) == 2
    assert "pairs.tsv is inside" in capsys.readouterr().err
    assert pairs.read_text() == "a b\tb a\n" * 40


def test_prepared_folder_in_place_of_tokens_is_kept(tmp_path, text, capsys):
    out = tmp_path / "proj"
    assert main(["data", "prepare", str(text), "--out", str(out / "data"), "--tokenizer", "byte"]) == 0
    before = everything(out)
    for corpus in (text, out / "data"):
        assert train(corpus, "--out", out) == 2
        assert everything(out) == before
    capsys.readouterr()


def test_remains_of_a_run_are_replaced(tmp_path, text, capsys):
    """Tokens of a killed run, and of overwritten runs and mixtures."""
    out = tmp_path / "run"
    other = put(tmp_path / "other.txt", "quite another text, " * 40)
    assert train(text, "--out", out) == 0
    assert train(other, "--out", out) == 2 and "--overwrite" in capsys.readouterr().err
    assert train(other, "--out", out, "--overwrite") == 0
    mixed = f'data.sources=[{{"paths": ["{text}"]}}, {{"paths": ["{other}"]}}]'
    assert train("--out", out, "--set", mixed, "--overwrite") == 0
    assert {"0", "1"} <= {path.name for path in (out / "data").iterdir()}
    assert train(text, "--out", out, "--overwrite") == 0
    assert not (out / "data" / "0").exists()
    capsys.readouterr()


# ---------------------------------------------------------------- folders that cannot be written


@pytest.fixture
def unread(monkeypatch):
    """A run that reads its corpus, or trains a tokenizer, fails."""

    def read(*_, **__):
        raise AssertionError("it was read before its folder was checked")

    monkeypatch.setattr(run_data.RunData, "__init__", read)


COMMANDS = (("train",), ("train", "--objective", "summarizer", "--init", "no-model"), ("data", "prepare"))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_unwritable_folder_is_refused_before_texts_are_read(tmp_path, unread, capsys, command):
    (tmp_path / "a.txt").write_text("some text " * 100)
    (tmp_path / "FILE").write_text("")
    if "--init" in command:  # given, so that no model is opened
        command = (*command, "--seq-len", "64")
    for out, message in (
        ("/proc/x21", "cannot write /proc/x21: "),
        (tmp_path / "FILE" / "x", f"{tmp_path}/FILE is a file"),
    ):
        assert main([*command, str(tmp_path / "a.txt"), "--out", str(out)]) == 2
        error, hint = capsys.readouterr().err.splitlines()
        assert message in error and "another" in hint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["FILE", "a.txt"]


def test_check_leaves_the_folder_unchanged(tmp_path):
    check_writable(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / "a").mkdir()
    check_writable(tmp_path / "a" / "b")
    check_writable(tmp_path / "a")
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]
