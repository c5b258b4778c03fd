"""Every `kvad` command in the README, in docs/, in the table of the notes and in recipes/README.md runs as written.

A workspace has the files and the models that the pages name, all tiny. Names on the Hugging Face hub and `MODEL` are
folders in it; `MODEL` has the architecture that the command needs. Options in `LIMITS` are appended, so that
training takes two steps. The commands of a page run in order, so a page may use what earlier commands made. They run in
this process, with the page's copy of the workspace as working folder and home.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import io
import json
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from pathlib import Path

import pytest

from kvad.cli.main import main as kvad
from tests.docs import test_notes_table as notes
from tests.support.baseline import isolated, write_data

pytestmark = pytest.mark.usefixtures("much_memory")
ROOT = Path(__file__).parents[2]
EXTENDING = ROOT / "docs" / "contributing" / "extending.md"  # run by test_extending.py, with the plugins of the page
PAGES = [ROOT / "README.md", ROOT / "recipes" / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {EXTENDING})]
MODELS = {  # name in the pages -> how a stand-in is trained
    "runs/demo": "book.txt --preset tiny --seq-len 512",
    "runs/de-en": "pairs.tsv --preset marian-tiny --seq-len 64",
    "runs/masked": "book.txt --objective masked-lm --preset encoder-tiny",
    "runs/spans": "book.txt --objective span-corruption --preset t5-tiny",
    "runs/classes": "reviews.tsv --objective classify --preset encoder-tiny",
    "runs/chat": "talks.jsonl --objective chat --preset tiny",
    "runs/lr-1e-3": "book.txt --preset tiny --seq-len 64 --lr 1e-3",
    "runs/lr-3e-3": "book.txt --preset tiny --seq-len 64 --lr 3e-3",
}
NARROW = "--tokenizer byte --set model.hidden_size=32"
ALIASES = {  # other names of these models
    "SMALL": "runs/demo",
    "MODEL": "runs/demo", "runs/shakespeare": "runs/demo", "runs/base": "runs/demo", "runs/lookup-cpu": "runs/demo",
    "runs/other": "runs/demo", "runs/extrapolation-alibi": "runs/lr-1e-3",
    "Qwen/Qwen3-0.6B": "runs/demo", "openai-community/gpt2-large": "runs/demo",
    "Helsinki-NLP/opus-mt-de-en": "runs/de-en", "intfloat/e5-small-v2": "runs/masked",
}  # fmt: skip
ADAPTER = "train book.txt --init runs/demo --lora-rank 2 --seq-len 64 --out runs/lora"
COPIES = ("runs/endless-rope", "runs/mine")  # of runs/demo
MODEL_OF = {"translate": "runs/de-en", "embed": "runs/masked", "classify": "runs/classes"}  # command -> MODEL
PLACEHOLDERS = {
    "DATA": "book.txt",
    "DATA...": "book.txt",
    "FOLDER": "folder",
    "ADAPTER": "runs/lora",
    "SESSIONS": "data/kvad/sessions",
    "/mnt/ssd": "ssd",
    "/tmp/swap": "swap",
}
SMALLER = {
    "small": "tiny",
    "transformer-base": "transformer-tiny",
    "512": "64",
    "1024": "128",
    "2048": "320",
    "16384": "512",
    "4096": "256",
    "8192": "300",
    "10000": "300",
    "2000": "4",
}
_BENCH = "--tasks single --depths 0.5 --samples-per-cell 1 --num-texts 1 --text-length 24 --text book.txt"
LIMITS = {  # appended to a command that begins with these words: less work, the same code path
    "train": "--batch-size 1 --steps 2 --precision fp32 --overwrite",
    "bench cache-quality runs/endless-rope": f"--lengths 256 {_BENCH}",
    "bench cache-quality": f"--lengths 500 {_BENCH}",
    "verify": "--layout paged --cache-dtype float32 --num-prompts 3 --max-tokens 24",
    "bench --profile": "--context 8 --new-tokens 4 --repeats 1",
    "bench speculative": "--new-tokens 4 --repeats 1",
    "bench --speculative": "--new-tokens 4 --repeats 1",
    "bench streaming": "--num-tokens 128 --span-length 32 --text book.txt",
    "generate": "--max-tokens 4",
    "serve": "--limits",  # it would serve until a signal; tests/server does
    "eval": "--quiet",
}
UNLIMITED = ("--dry-run", "--resume", "--against")
# What a command shows: words of it -> a pattern in its output or its HTML page.
PROMISES = {
    '--policy "tova(64, interval=16)"': r"dropped at step|\"evicted\"",
    '--policy "heavy-hitters(16, interval=8)" --html': r"heavy-hitters",
    '--policy "heavy-hitters(16, interval=8)" --block-size 4': r"dropped at step|evicted",
    '--policy "sinks(4, 28)"': r"\. evicted",
    '--policy "tiered(32, interval=16)"': r"quantized at step",
    "--num-blocks 20 --swap-space 256MiB": r"[1-9]\d* preemption",
    "--num-blocks 6 --cache-key-dtype int8-channel": r"[1-9]\d* to disk|swapped out: .* to disk",
    "--num-blocks 12 --block-size 4": r"[1-9]\d* preemption",
    "# reads the prefix from disk": r"[1-9]\d* from disk",
    "--max-seq-len 128 --overflow offload": r"offloaded +[1-9]",
    'eval MODEL text.txt --policy "sinks(4, 124)"': r"windows of .* policy sinks\(4, 124\)",
    'session continue MODEL notes --prompt "In short:" --max-tokens 64': r"[1-9]\d* of [\d,]+ tokens restored",
    "--inject-fault mask": r"\nfault +mask: ",
    "--inject-fault packed": r"\nfault +packed: packed weights differ",
    "--inject-fault table": r"\nfault +table: ",
    "plan gpt3-175b": r"96 layers",
    "plan notes-example --max-seq-len=8192": r"cache payload +3,221,225,472 ",
}
PYTHON = "data/python"  # several pages name it, and some create it
PAGE_WITH_CURVES = "README.md"  # the loss curve of a training command takes longer than its two steps


def commands(page: Path) -> list[str]:
    """Return the commands of a page: lines of its code blocks that start with kvad."""
    lines, fenced = [], False
    for line in page.read_text("utf-8").replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            match = re.match(r"\s*(?:\.venv/bin/)?(kvad .*)", line)
            if match:
                lines.append(match[1])
    return lines


def without_comment(command: str) -> str:
    return re.sub(r"\s+#\s.*", "", command)


def commands_of_the_notes(others: Iterable[str]) -> list[str]:
    """Return the commands that show a statement in the table of the notes, except those that another page runs."""
    shown = [pointer for row in notes.parse(notes.PAGE.read_text("utf-8")) for pointer in notes.pointers(row.shows)]
    known = {without_comment(command) for command in others}
    return [name for name in dict.fromkeys(shown) if name.startswith("kvad ") and name not in known]


WITH_COMMANDS = {str(page.relative_to(ROOT)): lines for page in PAGES if (lines := commands(page))}
WITH_COMMANDS[str(notes.PAGE.relative_to(ROOT))] = commands_of_the_notes(chain(*WITH_COMMANDS.values()))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    write_data(folder)
    text = (folder / "text.txt").read_text()
    long = "book.txt input.txt validation.txt wiki.test.raw train.de train.en"
    short = "lines.txt chapter.txt a.txt b.txt system.txt notes.txt long.txt prompt.txt text.de test.de test.en"
    for name in long.split():
        (folder / name).write_text(text)
    for name in short.split():
        (folder / name).write_text("".join(text.splitlines(keepends=True)[:2]))
    for name in ("more", "books", "corpus", "notes"):
        (folder / name).mkdir()
        (folder / name / "one.txt").write_text(text)
    for source, name in {"pairs": "pairs.tsv", "tags": "train.tsv", "labels": "reviews.tsv"}.items():
        shutil.copy(folder / f"{source}.txt", folder / name)
    shutil.copy(folder / "tags.txt", folder / "dev.tsv")
    shutil.copy(folder / "chat.jsonl", folder / "talks.jsonl")
    body = "".join(json.dumps({"body": line}) + "\n" for line in text.splitlines())
    (folder / "dump.jsonl.gz").write_bytes(gzip.compress(body.encode()))
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    shutil.copytree(ROOT / "docs" / "tutorials", folder / "docs")
    (folder / "recipes" / "mine.toml").write_text('[model]\npreset = "tiny"\n[tokenizer]\nkind = "byte"\n')
    with isolated(folder), contextlib.chdir(folder):
        models = [f"train {options} {NARROW} --out {name}" for name, options in MODELS.items()]
        for command in (*models, ADAPTER):
            with pytest.MonkeyPatch.context() as patch:
                skip_curves(patch)
                assert kvad([*command.split(), *LIMITS["train"].split()]) == 0, command
        for name in COPIES:
            shutil.copytree("runs/demo", name)
        assert kvad(["data", "create", "python", PYTHON]) == 0
        shorten_python_data()
        return folder


def skip_curves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kvad.cli.commands.train.draw_loss_curve", lambda out: [])


def shorten_python_data() -> None:
    """Delete all but four short files of each part of the data that ``kvad data create python`` wrote."""
    for part in Path(PYTHON).iterdir():
        files = sorted(part.glob("**/*.py"))
        assert len(files) > 20
        for path in {*files} - {*[path for path in files if 2000 < path.stat().st_size < 20_000][:4]}:
            path.unlink()


@pytest.fixture
def page_folder(workspace: Path, tmp_path: Path) -> Iterator[Path]:
    """Copy of the workspace, so that no page depends on another one."""
    folder = Path(shutil.copytree(workspace, tmp_path / "page"))
    with isolated(folder), contextlib.chdir(folder):
        yield folder


def arguments(command: str) -> tuple[list[str], str]:
    """Return the arguments of a command in the workspace, and its standard input."""
    command, _, redirected = without_comment(command).partition(" < ")
    words = shlex.split(command)[1:]
    aliases = {**ALIASES, "MODEL": MODEL_OF.get(words[0], ALIASES["MODEL"])}
    words = [PLACEHOLDERS.get(word, SMALLER.get(word, word)) for word in words]
    words = [
        word if Path(word).exists() or before == "--out" else aliases.get(word, word)
        for before, word in pairwise(["", *words])
    ]
    words = [path for word in words for path in (sorted(glob.glob(word)) if word.endswith("*") else [word])]
    limit = next((text for start, text in LIMITS.items() if " ".join(words).startswith(start)), "")
    if not set(words) & set(UNLIMITED) and not (words[0] == "generate" and "--max-tokens" in words):
        words += limit.split()
    text = "/quit\n" if words[0] == "chat" else ""
    return words, Path(redirected).read_text() if redirected else text


def check_promises(command: str, words: list[str], output: str) -> None:
    """Check that a command shows what it is an example of, and that no prompt ends in a space."""
    assert not any(word.endswith(" ") for word in words), f"{command}: a lone space is a token that no name follows"
    if "--html" in words:
        output += Path(words[words.index("--html") + 1]).read_text("utf-8")
    for part, pattern in PROMISES.items():
        if part in command:
            assert re.search(pattern, output), f"{command}\n{pattern}\n{output[-3000:]}"


def test_every_promise_is_made() -> None:
    lines = [command for commands_of_page in WITH_COMMANDS.values() for command in commands_of_page]
    assert [part for part in PROMISES if not any(part in line for line in lines)] == []


SLOW_PAGES = ("docs/explanation/kv-cache/verify.md", "docs/explanation/cache-quality.md")  # over ten seconds each


@pytest.mark.usefixtures("page_folder")
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.long] * (page in SLOW_PAGES)) for page in WITH_COMMANDS]
)
def test_commands_of_a_page_run(page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if page != PAGE_WITH_CURVES:
        skip_curves(monkeypatch)
    for command in WITH_COMMANDS[page]:
        words, text = arguments(command)
        if words[:2] == ["data", "create"]:
            shutil.rmtree(words[3], ignore_errors=True)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        code = kvad(words)
        output, errors = capsys.readouterr()
        assert code == (1 if "--inject-fault" in words else 0), f"{command}\n{errors}"
        check_promises(command, words, output + errors)
        if words[:3] == ["data", "create", "python"]:
            shorten_python_data()
