"""``kvad demo`` from end to end, on a smaller model and a smaller library."""

import json
from pathlib import Path

import pytest

from kvad.cli.commands import demo
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


def test_demo(kvad, out):
    result = kvad("demo --minutes 0.05 --repeats 1 --out", out)
    assert result.code == 0
    for words in ("three files", "validation loss", "'def ' continued", "verdict: exact", "speedup", "kvad chat"):
        assert words in result.out, words
    record = json.loads((out / "demo.json").read_text())
    assert record["exact"] is True and record["steps"] > 0 and set(record["speedup"]) == {"8", "16"}
    assert (out / "bench-cache.json").exists() and (out / "loss.png").exists()
    result = kvad("demo --minutes 0.02 --repeats 1 --json --out", out)  # replaces its own run
    record = json.loads(result.out)
    assert result.code == 0 and record["verdict"].startswith("exact") and record["steps"] != 0


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
