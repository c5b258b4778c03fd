"""A pipe, socket, device or folder in the place of a file is refused in one line, without waiting for a writer."""

import os
import shutil
import signal
import socket
import threading
from pathlib import Path

import pytest

from kvad.cli.main import main
from kvad.errors import TokenizerError
from kvad.text.hf_config import read_settings
from tests.support.golden_files import PROMPT

GOLDEN = Path(__file__).parent / "golden_files" / "formats"
STEP = "run-hf/checkpoints/step-00000002"
ADAPTER = "adapter/checkpoints/step-00000002"
SUMMARIZER = "summarizer/checkpoints/step-00000002"
GENERATE = ["generate", "run-hf", "ada", "--max-tokens", "1"]
TRAIN = ["--preset", "tiny", "--steps", "1", "--out", "new"]
POLICY = "tiered(8, quantized=0, interval=8, summaries=8, ratio=4)"
SUMMARIES = [*GENERATE, "--summarizer", "summarizer", "--policy", POLICY, "--block-size", "4"]
# place -> command that reads it
READERS = {
    **{f"{STEP}/{name}": GENERATE for name in ("config.json", "model.safetensors", "tokenizer.json", "manifest.json")},
    f"{STEP}/generation_config.json": GENERATE,
    f"{STEP}/training/state.json": ["train", "--resume", "--out", "run-hf"],
    f"{STEP}/training/state.safetensors": ["train", "--resume", "--out", "run-hf"],
    **{
        f"{ADAPTER}/{name}": [*GENERATE, "--adapter", "adapter"]
        for name in ("adapter_config.json", "adapter_model.safetensors", "adapter.json", "manifest.json")
    },
    **{f"{SUMMARIZER}/{name}": SUMMARIES for name in ("summarizer.json", "summarizer.safetensors", "manifest.json")},
    "sessions/notes.session": ["session", "continue", "run-hf", "notes", "--session-dir", "sessions"],
    "prepared/manifest.json": ["train", "prepared", *TRAIN],
    "prepared/offsets.bin": ["train", "prepared", *TRAIN],
    "prepared/tokens-00000.bin": ["train", "prepared", *TRAIN],
    "prepared/tokenizer/tokenizer.json": ["train", "prepared", *TRAIN],
    "corpus.txt": ["train", "corpus.txt", *TRAIN],
    "corpus.jsonl.gz": ["data", "prepare", "corpus.jsonl.gz", "--out", "new"],
    "pairs.tsv": ["data", "prepare", "pairs.tsv", "--objective", "seq2seq", "--out", "new"],
    "run.toml": ["train", "run.toml", "text.txt", "--out", "new"],
    "model.json": ["plan", "model.json"],
    "prompt.txt": ["session", "continue", "run-hf", "notes", "--session-dir", "sessions", "--file", "prompt.txt"],
    "messages.json": ["chat-template", "run-hf", "--file", "messages.json"],
    "lines.txt": ["embed", "run-hf", "lines.txt"],
    "tokenizer.json": ["train", "text.txt", "--tokenizer", "tokenizer.json", *TRAIN],
    "metrics.jsonl": ["plot", "metrics.jsonl"],
}


def put(kind: str, path: Path) -> None:
    """Put a pipe, socket, device or folder in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as unbound:
            unbound.bind(path.name)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A copy of stored files, the current folder; a call that waits for two minutes fails."""

    def fail(*_: object) -> None:
        raise AssertionError("a read waits for a writer")

    shutil.copytree(GOLDEN, tmp_path / "files", symlinks=True)
    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(120)
    monkeypatch.chdir(tmp_path / "files")
    yield tmp_path / "files"
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("place", READERS)
def test_a_pipe_in_a_files_place_is_refused(files, place, capsys):
    put("pipe", files / place)
    assert_refused(place, capsys)


@pytest.mark.parametrize("kind", ["socket", "device", "folder"])
@pytest.mark.parametrize(
    "place",
    [
        *(f"{STEP}/model.safetensors", f"{STEP}/manifest.json", "sessions/notes.session", "prepared/manifest.json"),
        *("corpus.txt", "run.toml", "prompt.txt", "lines.txt", "tokenizer.json"),
    ],
)
def test_other_kinds_are_refused(files, place, kind, capsys, monkeypatch):
    if kind == "folder" and place in ("corpus.txt", "tokenizer.json"):
        pytest.skip("a folder is valid there")
    with monkeypatch.context() as patch:
        patch.chdir((files / place).parent)  # the name of a socket is short
        put(kind, files / place)
    assert_refused(place, capsys)


def assert_refused(place: str, capsys: pytest.CaptureFixture) -> None:
    code = main(READERS[place])
    err = capsys.readouterr().err
    errors = [line for line in err.splitlines() if line.startswith("kvad: error: ")]
    assert code == 2 and len(errors) == 1 and Path(place).name in errors[0], err
    assert not Path("new").exists()


@pytest.mark.parametrize("name", [path.name for path in sorted((GOLDEN / "prefix-cache").iterdir())])
def test_a_pipe_in_a_prefix_cache_is_not_read(files, name, capsys):
    command = ["generate", "run-hf", PROMPT, "--prefix-cache-dir", "prefix-cache", "--block-size", "4"]
    command += ["--max-tokens", "2", "--temperature", "0"]
    assert main(command) == 0
    expected = capsys.readouterr().out
    put("pipe", files / "prefix-cache" / name)
    assert main(command) == 0 and capsys.readouterr().out == expected


def test_a_pipe_of_the_shell_is_read_as_a_prompt_but_not_as_a_corpus(files, capsys):
    """``--file <(...)`` is read once; a corpus is read more than once."""
    read, write = os.pipe()
    with open(write, "wb") as file:
        threading.Thread(target=lambda: (file.write(b"ada "), file.close())).start()
        command = ["session", "save", "run-hf", "new", "--session-dir", "sessions", "--file", f"/dev/fd/{read}"]
        assert main(command) == 0
    assert "4 tokens" in capsys.readouterr().out
    assert main(["train", f"/dev/fd/{read}", *TRAIN]) == 2
    assert "it is a pipe, not a regular file\nkvad: hint: Write it to a file" in capsys.readouterr().err
    os.close(read)


def test_a_pipe_among_tokenizer_files_is_refused(tmp_path):
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(TokenizerError, match=rf"cannot read .*{name}: it is a pipe, not a regular file"):
            read_settings(tmp_path)
        (tmp_path / name).unlink()
