"""``kvad demo`` from end to end, on a smaller model and a smaller library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvad.cli.commands import demo
from kvad.cli.main import main
from kvad.datasets import stdlib_sources


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A library of three files, a tiny model, short timings."""
    library = tmp_path / "library"
    library.mkdir()
    for name in ("argparse.py", "textwrap.py", "heapq.py"):
        (library / name).write_bytes((Path(json.__file__).parent.parent / name).read_bytes())
    found = stdlib_sources.find_sources
    monkeypatch.setattr(stdlib_sources, "MIN_BYTES", 1000)
    monkeypatch.setattr(stdlib_sources, "find_sources", lambda: found([("three files", str(library))]))
    monkeypatch.setattr(demo, "PRESET", "tiny")
    monkeypatch.setattr(demo, "BENCH_LENGTHS", (8, 16))
    return tmp_path / "out"


def test_the_whole_demo(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--minutes", "0.05", "--out", str(small), "--repeats", "1"]) == 0
    shown = capsys.readouterr().out
    for words in ("three files", "validation loss", "'def ' continued", "verdict: exact", "speedup", "kvad chat"):
        assert words in shown, words
    result = json.loads((small / "demo.json").read_text())
    assert result["exact"] is True and result["steps"] > 0 and set(result["speedup"]) == {"8", "16"}
    assert (small / "bench-cache.json").exists() and (small / "loss.png").exists()
    assert main(["demo", "--minutes", "0.02", "--out", str(small), "--repeats", "1", "--json"]) == 0  # once more, there
    again = json.loads(capsys.readouterr().out)
    assert again["verdict"].startswith("exact") and again["steps"] != 0


def test_a_run_that_is_not_the_demo_s_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine" / "checkpoints" / "step-00000005"
    mine.mkdir(parents=True)
    (mine / "config.json").write_text("{}")
    assert main(["demo", "--out", str(tmp_path / "mine")]) == 2
    assert (
        "contains a run that the demo did not create" in capsys.readouterr().err
        and (mine / "config.json").read_text() == "{}"
    )


def test_without_sources_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stdlib_sources, "MIN_BYTES", 1 << 50)
    assert main(["demo", "--out", str(tmp_path / "x")]) == 2
    assert "kvad train FILE" in capsys.readouterr().err and not (tmp_path / "x").exists()
