"""Figures from series: equal bytes for equal numbers, and errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvad.cli.main import main
from kvad.errors import DataError, SaveError, UsageError
from kvad.inspection.plot import PlotSeries, build_series, draw_loss, draw_series, read_jsonl

ROOT = Path(__file__).parents[2]
CURVES = [
    PlotSeries("cached", [64, 128, 256], [0.1, 0.2, 0.4], dots=True),
    PlotSeries("uncached", [64, 128, 256], [0.5, 2, 8]),
]
BENCH = [
    {"cache": "paged", "tokens": 64, "seconds": 0.1, "note": "x"},
    {"cache": "fresh", "tokens": 128, "seconds": 2.0},
    {"cache": "fresh", "tokens": 64, "seconds": 0.5},
    {"cache": "paged", "tokens": 128, "seconds": 0.2},
    {"machine": "two cores"},
]


@pytest.fixture
def metrics(tmp_path):
    lines = [{"kind": "run", "parameters": 3}]
    lines += [{"kind": "step", "step": n, "loss": 5 / n} for n in range(1, 51)]
    lines += [{"kind": "eval", "step": n, "val_loss": 6 / n} for n in (25, 50)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_png_svg_and_pdf(tmp_path):
    out = [tmp_path / "deep" / f"a{ending}" for ending in (".png", ".svg", ".pdf")]
    labels = {"title": "time", "x_label": "tokens", "y_label": "seconds"}
    assert draw_series(CURVES, out, log_x=True, log_y=True, **labels) == out
    assert out[0].read_bytes().startswith(b"\x89PNG") and out[2].read_bytes().startswith(b"%PDF")
    svg = out[1].read_text()
    assert all(word in svg for word in ("cached", "uncached", "time", "tokens", "seconds"))


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_equal_numbers_give_equal_bytes(tmp_path, ending):
    paths = [tmp_path / f"{name}{ending}" for name in "abc"]
    draw_series(CURVES, paths[:1])
    draw_series(CURVES, paths[1:2])
    draw_series([CURVES[0]], paths[2:])
    first, second, other = (path.read_bytes() for path in paths)
    assert first == second != other


def test_loss_figure_is_small_and_has_the_last_loss(metrics, tmp_path):
    out = [tmp_path / "loss.png", tmp_path / "loss.svg"]
    assert draw_loss(metrics, out) == out
    assert all(0 < path.stat().st_size < 100_000 for path in out)
    svg = out[1].read_text()
    assert "validation 0.120 after 50 steps" in svg and "training" in svg
    assert draw_loss(tmp_path / "nothing.jsonl", out) == []


def test_series_are_sorted_and_skip_other_lines():
    found = build_series(BENCH, "tokens", ["seconds"], by="cache")
    assert [(s.name, s.x, s.y) for s in found] == [("paged", [64, 128], [0.1, 0.2]), ("fresh", [64, 128], [0.5, 2.0])]
    both = build_series([{"x": 1, "a": 2, "b": 3}], "x", ["a", "b"], name="run")
    assert [s.name for s in both] == ["run a", "run b"]


@pytest.mark.parametrize(
    ("x", "y", "by", "message"),
    [
        ("token", ["seconds"], None, r"no line has a number under 'token' \(did you mean 'tokens'"),
        ("tokens", ["note"], None, r"no line has a number under 'note'"),
        ("tokens", ["seconds"], "cachee", r"no line has 'cachee' \(did you mean 'cache'"),
    ],
)
def test_unknown_key_is_refused(x, y, by, message):
    with pytest.raises(UsageError, match=message):
        build_series(BENCH, x, y, by=by)


def test_impossible_figures_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"a.gif: figures end in .png, .svg, .pdf"):
        draw_series(CURVES, [tmp_path / "a.gif"])
    with pytest.raises(DataError, match="nothing to draw"):
        draw_series([PlotSeries("x", [], [])], [tmp_path / "a.png"])
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match=r"cannot write .*a.png"):
        draw_series(CURVES, [tmp_path / "file" / "a.png"])


def test_invalid_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n[1]\n{"a": 2')
    assert read_jsonl(path) == [{"a": 1}]
    path.write_text('{"a": 1\n{"a": 2}\n')
    with pytest.raises(DataError, match=r"x.jsonl is not a JSON-lines file of metrics: line 1 is not JSON"):
        read_jsonl(path)
    with pytest.raises(DataError, match="no such file"):
        read_jsonl(tmp_path / "none.jsonl")


def test_command(metrics, tmp_path, capsys):
    assert main(["plot", str(metrics)]) == 0
    assert capsys.readouterr().out.split() == [str(metrics.with_suffix(".png")), str(metrics.with_suffix(".svg"))]
    bench = tmp_path / "bench.jsonl"
    bench.write_text("".join(json.dumps(line) + "\n" for line in BENCH))
    out = tmp_path / "bench.svg"
    options = ["--x", "tokens", "--y", "seconds", "--group-by", "cache", "--log-x", "-o", str(out)]
    assert main(["plot", str(bench), *options]) == 0 and "fresh" in out.read_text()
    assert main(["plot", str(bench)]) == 2
    assert "contains no training steps" in capsys.readouterr().err
    two = ["plot", str(metrics), str(metrics), "--y", "loss", "--y", "val_loss", "-o", str(out)]
    assert main(two) == 0 and f"{tmp_path.name} val_loss" in out.read_text()


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("loss.png", b"\x89PNG\r\n\x1a\n\0\0", "it is not text"),
        ("loss.svg", b"<svg>\n</svg>\n", "line 1 is not JSON"),
        ("one.txt", b"one line of prose", "line 1 is not JSON"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--y", "loss"]])
def test_other_files_are_refused(tmp_path, capsys, name, content, why, options):
    path = tmp_path / name
    path.write_bytes(content)
    assert main(["plot", str(path), *options]) == 2
    output = capsys.readouterr()
    error, hint = output.err.splitlines()
    assert error == f"kvad: error: {path} is not a JSON-lines file of metrics: {why}"
    assert "metrics.jsonl" in hint and not output.out and "codec" not in output.err
    assert [one.name for one in tmp_path.iterdir()] == [name]


def test_matplotlib_is_imported_only_to_draw():
    program = "import sys, kvad.inspection.plot, kvad.cli.commands.runs; "
    program += "print({'matplotlib', 'torch', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "set()", result.stderr
