"""Series become figures, the same bytes for the same numbers; what cannot be drawn is named."""

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
    {"memory": "paged", "tokens": 64, "seconds": 0.1, "note": "x"},
    {"memory": "fresh", "tokens": 128, "seconds": 2.0},
    {"memory": "fresh", "tokens": 64, "seconds": 0.5},
    {"memory": "paged", "tokens": 128, "seconds": 0.2},
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


def test_png_svg_and_pdf_hold_the_curves(tmp_path):
    out = [tmp_path / "deep" / f"a{ending}" for ending in (".png", ".svg", ".pdf")]
    labels = {"title": "time", "x_label": "tokens", "y_label": "seconds"}
    assert draw_series(CURVES, out, log_x=True, log_y=True, **labels) == out
    assert out[0].read_bytes().startswith(b"\x89PNG") and out[2].read_bytes().startswith(b"%PDF")
    svg = out[1].read_text()
    assert all(word in svg for word in ("cached", "uncached", "time", "tokens", "seconds"))


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_the_same_numbers_are_the_same_bytes(tmp_path, ending):
    paths = [tmp_path / f"{name}{ending}" for name in "abc"]
    draw_series(CURVES, paths[:1])
    draw_series(CURVES, paths[1:2])
    draw_series([CURVES[0]], paths[2:])
    first, second, other = (path.read_bytes() for path in paths)
    assert first == second != other


def test_a_loss_curve_is_small_and_names_its_last_loss(metrics, tmp_path):
    out = [tmp_path / "loss.png", tmp_path / "loss.svg"]
    assert draw_loss(metrics, out) == out
    assert all(0 < path.stat().st_size < 100_000 for path in out)
    svg = out[1].read_text()
    assert "validation 0.120 after 50 steps" in svg and "training" in svg
    assert draw_loss(tmp_path / "nothing.jsonl", out) == []


def test_series_by_a_key_are_sorted_and_pass_over_other_lines():
    found = build_series(BENCH, "tokens", ["seconds"], by="memory")
    assert [(s.name, s.x, s.y) for s in found] == [("paged", [64, 128], [0.1, 0.2]), ("fresh", [64, 128], [0.5, 2.0])]
    both = build_series([{"x": 1, "a": 2, "b": 3}], "x", ["a", "b"], name="run")
    assert [s.name for s in both] == ["run a", "run b"]


@pytest.mark.parametrize(
    ("x", "y", "by", "says"),
    [
        ("token", ["seconds"], None, r"no line has a number under 'token' \(did you mean 'tokens'"),
        ("tokens", ["note"], None, r"no line has a number under 'note'"),
        ("tokens", ["seconds"], "memoryy", r"no line has 'memoryy' \(did you mean 'memory'"),
    ],
)
def test_a_key_that_is_not_there_is_named(x, y, by, says):
    with pytest.raises(UsageError, match=says):
        build_series(BENCH, x, y, by=by)


def test_what_cannot_be_drawn(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"a.gif: figures end in .png, .svg, .pdf"):
        draw_series(CURVES, [tmp_path / "a.gif"])
    with pytest.raises(DataError, match="nothing to draw"):
        draw_series([PlotSeries("x", [], [])], [tmp_path / "a.png"])
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match=r"cannot write .*a.png"):
        draw_series(CURVES, [tmp_path / "file" / "a.png"])


def test_lines_that_are_none(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n[1]\n{"a": 2')
    assert read_jsonl(path) == [{"a": 1}]
    path.write_text('{"a": 1\n{"a": 2}\n')
    with pytest.raises(DataError, match=r"x.jsonl is not a JSON-lines file of metrics: line 1 is not JSON"):
        read_jsonl(path)
    with pytest.raises(DataError, match="no such file"):
        read_jsonl(tmp_path / "none.jsonl")


def test_the_command(metrics, tmp_path, capsys):
    assert main(["plot", str(metrics)]) == 0
    assert capsys.readouterr().out.split() == [str(metrics.with_suffix(".png")), str(metrics.with_suffix(".svg"))]
    bench = tmp_path / "bench.jsonl"
    bench.write_text("".join(json.dumps(line) + "\n" for line in BENCH))
    out = tmp_path / "bench.svg"
    arguments = [
        "plot",
        str(bench),
        "--x",
        "tokens",
        "--y",
        "seconds",
        "--group-by",
        "memory",
        "--log-x",
        "-o",
        str(out),
    ]
    assert main(arguments) == 0 and "fresh" in out.read_text()
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
def test_a_file_of_another_kind_is_one_clear_line(tmp_path, capsys, name, content, why, options):
    path = tmp_path / name
    path.write_bytes(content)
    assert main(["plot", str(path), *options]) == 2
    seen = capsys.readouterr()
    error, hint = seen.err.splitlines()
    assert error == f"kvad: error: {path} is not a JSON-lines file of metrics: {why}"
    assert "metrics.jsonl" in hint and not seen.out and "codec" not in seen.err
    assert [one.name for one in tmp_path.iterdir()] == [name]


def test_matplotlib_is_imported_only_to_draw():
    program = "import sys, kvad.inspection.plot, kvad.cli.commands.runs; "
    program += "print({'matplotlib', 'torch', 'numpy'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == "set()", ran.stderr
