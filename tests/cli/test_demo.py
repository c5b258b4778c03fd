"""``kvad demo`` from end to end, on a smaller model and a smaller library."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from kvad.checkpoint import open_checkpoint
from kvad.cli import output
from kvad.cli.commands import demo
from kvad.cli.main import COMMANDS
from kvad.datasets import stdlib_sources


@pytest.fixture
def out(monkeypatch, tmp_path):
    """Use a library of three files, a tiny model and short timings; return the folder of the demo."""
    library = tmp_path / "library"
    library.mkdir()
    for name in ("argparse.py", "textwrap.py", "heapq.py"):
        (library / name).write_bytes((Path(json.__file__).parent.parent / name).read_bytes())
    find_sources = stdlib_sources.find_sources
    monkeypatch.setattr(stdlib_sources, "MIN_BYTES", 1000)
    monkeypatch.setattr(stdlib_sources, "find_sources", lambda: find_sources([("three files", str(library))]))
    monkeypatch.setattr(demo, "PRESET", "tiny")
    monkeypatch.setattr(demo, "BENCH_LENGTHS", (8, 16))
    return tmp_path / "out"


def check_next_steps(kvad, page):
    """Run the commands as printed, but the long ones with a dry run or without their work."""
    lines = [line.strip() for line in page.split("— next —")[1].splitlines() if line.strip()]
    steps = [line.removesuffix(text).strip() for line, (_, text) in zip(lines, demo.NEXT_STEPS, strict=True)]
    for step in steps:
        words = shlex.split(step)
        assert words[0] == output.program_path().split()[0]
        assert "generate" not in step or f"--temperature {demo.TEMPERATURE}" in step  # at 1 it is gibberish
        command = words[words.index(next(word for word in words if word in COMMANDS)) :]
        few = ["--layout", "paged", "--cache-dtype", "float32", "--num-prompts", "3", "--max-tokens", "24"]
        extra = {"serve": ["--limits"], "train": ["--dry-run"], "generate": ["--max-tokens", 2], "verify": few}
        result = kvad(shlex.join(command), *extra.get(command[0], []), stdin=b"/kv\n" if command[0] == "chat" else None)
        assert result.code == (1 if "--inject-fault" in command else 0), (step, result.err)
        assert (result.out + result.err).strip(), step


def test_the_printed_program_can_be_called(monkeypatch, tmp_path):
    """``make run`` does not put ``kvad`` on the path."""
    monkeypatch.setattr(output.shutil, "which", lambda name: None)
    monkeypatch.chdir(tmp_path)
    for called, expected in ((tmp_path / ".venv/bin/kvad", ".venv/bin/kvad"), ("/opt/kvad", "/opt/kvad")):
        monkeypatch.setattr(sys, "argv", [str(called)])
        assert output.program_path() == expected
    monkeypatch.setattr(sys, "argv", ["/x/__main__.py"])
    assert output.program_path() == f"{sys.executable} -m kvad"
    monkeypatch.setattr(output.shutil, "which", lambda name: "/usr/bin/kvad")
    assert output.program_path() == "kvad"


def test_make_run_installs_in_few_lines():
    """pip printed 152 lines before the first of kvad."""
    lines = (Path(__file__).parents[2] / "Makefile").read_text().splitlines()
    pip = [line for line in lines if line.startswith("\t$(PIP) install") and "--no-deps" not in line]
    assert len(pip) == 2 and all("install -q " in line for line in pip)
    assert any(line.startswith('\t@echo "installing torch') for line in lines)


def test_demo(kvad, out):
    result = kvad("demo --minutes 0.05 --repeats 1 --out", out)
    assert result.code == 0, result.out
    for words in ("three files", "validation loss", repr(demo.PROMPT), "verdict: exact", "speedup", "kvad chat"):
        assert words in result.out, words
    record = json.loads((out / "demo.json").read_text())
    assert record["exact"] is True and record["steps"] > 0 and set(record["speedup"]) == {"8", "16"}
    assert (out / "bench-cache.json").exists() and (out / "loss.png").exists()
    config = open_checkpoint(out).config
    assert config.max_seq_len == demo.CONTEXT >= demo.BENCH_LENGTHS[-1] + 1 and config.vocab_size <= demo.VOCAB_SIZE
    check_next_steps(kvad, result.out)
    result = kvad("demo --minutes 0.02 --repeats 1 --json --out", out)  # replaces its own run
    assert result.code == 0, result.out
    record = json.loads(result.out)
    assert record["verdict"].startswith("exact") and record["steps"] != 0


def test_run_of_another_command_is_not_overwritten(kvad, tmp_path):
    step = tmp_path / "mine" / "checkpoints" / "step-00000005"
    step.mkdir(parents=True)
    (step / "config.json").write_text("{}")
    result = kvad("demo --out", tmp_path / "mine")
    assert result.code == 2 and "contains a run that the demo did not create" in result.err
    assert (step / "config.json").read_text() == "{}"


def test_library_without_sources(kvad, monkeypatch, tmp_path):
    monkeypatch.setattr(stdlib_sources, "MIN_BYTES", 1 << 50)
    result = kvad("demo --out", tmp_path / "x")
    assert result.code == 2 and "kvad train FILE" in result.err and not (tmp_path / "x").exists()


# ---------------------------------------------------------------- kvad serve without a model


@pytest.fixture
def served(monkeypatch, tmp_path, out):
    """Let ``kvad serve`` only record what it would serve."""
    models = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "MINUTES", 0.01)
    monkeypatch.setattr("kvad.server.serve", lambda model, *options: models.append(model) or 0)
    return models


def test_serve_without_a_model_trains_once(kvad, served):
    """The model of a stopped training is not served; the one of ``kvad demo`` and of other commands is."""
    result = kvad("serve --port 0")
    assert result.code == 0 and served == [Path("runs/demo")]
    for words in ("no MODEL is given", "0.01 minutes", "three files", "validation loss"):
        assert words in result.err, result.err
    result = kvad("serve --port 0")
    assert result.code == 0 and "training" not in result.err and len(served) == 2
    record = Path("runs/demo/demo.json")
    record.write_text("{}\n")  # as while it trains
    assert "no MODEL is given" in kvad("serve --port 0").err
    assert json.loads(record.read_text())["steps"] > 0
    record.unlink()  # a run of kvad train
    assert "training" not in kvad("serve --port 0").err and len(served) == 4


def test_an_address_in_use_is_known_before_the_training(kvad, served, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = kvad("serve --port", other.getsockname()[1])
    assert result.code == 2 and "in use" in result.err and not served and not (tmp_path / "runs").exists()


PROGRAM = """
import sys
from kvad.cli.commands import demo
from kvad.cli.main import main
from kvad.datasets import stdlib_sources
find_sources = stdlib_sources.find_sources
stdlib_sources.MIN_BYTES, demo.PRESET, demo.MINUTES = 1000, "tiny", float(sys.argv[2])
stdlib_sources.find_sources = lambda: find_sources([("three files", sys.argv[1])])
sys.exit(main(["serve", "--port", "0"]))
"""


@pytest.mark.long
def test_serve_without_a_model_in_a_terminal(out, tmp_path):
    """Ctrl-C while it trains ends with 130 and serves nothing; the next start trains and serves, the third serves."""

    def start(minutes):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "library"), str(minutes)]
        path = str(Path(__file__).parents[2])
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, **pipes)

    process, lines = start(10), []
    for line in process.stderr:  # progress arrives while it trains
        lines.append(line)
        if "loss" in line:
            break
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130 and "nothing is served" in rest and "Traceback" not in rest, [*lines, rest]
    for minutes, is_trained in ((0.02, True), (10, False)):
        process = start(minutes)
        line = process.stdout.readline()
        assert line.startswith("serving http://"), process.stderr.read()
        body = {"prompt": "def __init__", "max_tokens": 4}
        reply = httpx.post(f"{line.split()[1]}/v1/completions", json=body, timeout=60)
        assert reply.json()["model"] == "demo" and reply.json()["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
        assert process.returncode == 0 and ("no MODEL is given" in rest) is is_trained, rest
