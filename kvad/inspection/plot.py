"""Figures of named series, heat maps, attention and box trees as PNG, SVG or PDF; the suffix of a file decides.

A figure is a function of its numbers: no clock and no random identifier is written, so a curve in ``docs/`` changes
only when its numbers do. matplotlib (the ``plot`` extra) is imported when something is drawn, without its global
state; every ``draw_*`` function raises ModuleNotFoundError without it. No torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from kvad import storage
from kvad.engine import AttentionMap
from kvad.errors import DataError, SaveError, UsageError, suggest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
RC_PARAMS = {"svg.fonttype": "none", "svg.hashsalt": "kvad", "font.size": 9.0, "axes.spines.top": False}
MAPS_PER_LINE = 4  # attention maps in a row of a figure

Target = Path | BinaryIO  # a stream gets SVG


@dataclass(frozen=True)
class PlotSeries:
    """A named curve."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dots: bool = False  # mark the points
    faint: bool = False  # thin (raw loss)
    dashed: bool = False
    color: int | None = None  # equal for related curves


@dataclass(frozen=True)
class PlotPanel:
    """Curves over one y axis."""

    label: str
    series: Sequence[PlotSeries]
    title: str = ""
    log_y: bool = False


@dataclass(frozen=True)
class HeatMapGrid:
    """A heat map over the names of its columns and rows."""

    name: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float | None]]  # [row][column] from 0 to 1; None: not measured


class Box(NamedTuple):
    """A box of a tree, indented by ``depth``; the bar at its left has ``color``."""

    depth: int
    color: str
    title: str
    note: str  # at the right end of the title
    lines: Sequence[str]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSONL file; an incomplete last line is omitted. DataError for other files."""
    try:
        lines = storage.filesystem.read_text(path).splitlines()
    except FileNotFoundError as error:
        raise DataError(f"no such file: {path}") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise _not_metrics(path, "it is not text") from None
    objects: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            if objects and number == len(lines):
                break
            raise _not_metrics(path, f"line {number} is not JSON") from None
        if isinstance(content, dict):
            objects.append(content)
    return objects


def _not_metrics(path: Path, why: str) -> DataError:
    hint = "give the metrics.jsonl of a run of kvad train, or lines of kvad bench"
    return DataError(f"{path} is not a JSON-lines file of metrics: {why}", hint)


def build_series(
    lines: Sequence[Mapping[str, Any]], x: str, y: Sequence[str], *, by: str | None = None, name: str = ""
) -> list[PlotSeries]:
    """Build one series per key of ``y``, and per value of ``by`` if given; lines without both keys are skipped.

    Raises:
        UsageError: For a key that no line has, with the nearest one.
    """
    known = {key for line in lines for key, value in line.items() if _is_number(value)}
    for key in (x, *y):
        if key not in known:
            raise UsageError(f"no line has a number under {key!r}", suggest(key, known))
    groups: list[str | None] = [None]
    if by is not None:
        groups = list(dict.fromkeys(str(line[by]) for line in lines if by in line))
        if not groups:
            raise UsageError(f"no line has {by!r}", suggest(by, {key for line in lines for key in line}))
    series = []
    for group in groups:
        group_lines = [line for line in lines if by is None or str(line.get(by)) == group]
        for key in y:
            numeric = [line for line in group_lines if _is_number(line.get(x)) and _is_number(line.get(key))]
            points = sorted((float(line[x]), float(line[key])) for line in numeric)
            label = " ".join(part for part in (name, group, key if group is None or len(y) > 1 else "") if part)
            if points:
                series.append(PlotSeries(label, [p[0] for p in points], [p[1] for p in points], dots=len(points) <= 32))
    return series


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@contextmanager
def _figure(out: Sequence[Target], *, is_empty: bool = False, layout: str | None = "constrained") -> Iterator[Figure]:
    """Yield a figure to draw, and write it into every target.

    Raises:
        UsageError: For a suffix that is not in ENDINGS.
        DataError: If there is nothing to draw.
        SaveError: If a file cannot be written.
    """
    if wrong := [path for path in _files(out) if path.suffix not in ENDINGS]:
        raise UsageError(f"{wrong[0]}: figures end in {', '.join(ENDINGS)}")
    if is_empty:
        raise DataError("there is nothing to draw")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    undated: dict[str, dict[str, str | None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with mpl.rc_context(RC_PARAMS):  # type: ignore[arg-type]
        figure = Figure(layout=layout)  # type: ignore[arg-type]
        yield figure
        for target in out:
            suffix = target.suffix if isinstance(target, Path) else ".svg"
            try:
                if isinstance(target, Path):
                    target.parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(target, format=suffix[1:], dpi=120, metadata=undated.get(suffix))
            except OSError as error:
                raise SaveError(f"cannot write {target}: {error.strerror or error}") from error


def _files(out: Sequence[Target]) -> list[Path]:
    return [target for target in out if isinstance(target, Path)]


def draw_series(
    series: Sequence[PlotSeries],
    out: Sequence[Path],
    *,
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    log_x: bool = False,
    log_y: bool = False,
) -> list[Path]:
    """Draw curves into every file of ``out``. Raises as ``_figure``."""
    with _figure(out, is_empty=not any(len(one.x) for one in series)) as figure:
        figure.set_size_inches(6.4, 3.6)
        axes = figure.add_subplot()
        _curves(axes, series)
        if log_x:
            axes.set_xscale("log", base=2)
        if log_y:
            axes.set_yscale("log")
        axes.set_title(title, fontsize=9)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
    return _files(out)


def draw_panels(panels: Sequence[PlotPanel], out: Sequence[Path], *, x_label: str) -> list[Path]:
    """Draw panels, one below the other over one x axis, into every file of ``out``. Raises as ``_figure``."""
    with _figure(out) as figure:
        from matplotlib.ticker import LogFormatter

        figure.set_size_inches(6.4, 1.0 + 2.0 * len(panels))
        heights = [2.0, *(1.0 for _ in panels[1:])]
        places = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
        for axes, panel in zip(places, panels, strict=True):
            _curves(axes, panel.series)
            axes.set_ylabel(panel.label)
            axes.set_title(panel.title, fontsize=8)
            if panel.log_y and all(value > 0 for one in panel.series for value in one.y):
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(LogFormatter())  # 0.3, and no powers of ten
                axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
        places[-1].set_xlabel(x_label)
        figure.suptitle("", fontsize=9)  # room above the first panel
    return _files(out)


def _curves(axes: Axes, series: Sequence[PlotSeries]) -> None:
    for one in series:
        if len(one.x):
            width, alpha = (0.8, 0.4 if one.color is not None else 0.6) if one.faint else (1.6, 1.0)
            color = None if one.color is None else f"C{one.color % 10}"
            (line,) = axes.plot(one.x, one.y, label=one.name, color=color, linewidth=width, alpha=alpha, markersize=3)
            line.set_marker("o" if one.dots else "")
            line.set_linestyle("--" if one.dashed else "-")
    axes.grid(alpha=0.25, linewidth=0.5)
    if any(one.name for one in series):
        axes.legend(frameon=False)


def draw_loss(metrics: Path, out: Sequence[Path], *, title: str = "") -> list[Path]:
    """Draw the loss curves of a run's ``metrics.jsonl``; ``[]`` if no step was logged yet."""
    lines = read_jsonl(metrics) if metrics.exists() else []
    steps = [line for line in lines if line.get("kind") == "step"]
    evals = [line for line in lines if line.get("kind") == "eval"]
    if not steps:
        return []
    training = PlotSeries("training", [s["step"] for s in steps], [s["loss"] for s in steps], faint=True)
    validation = PlotSeries("validation", [e["step"] for e in evals], [e["val_loss"] for e in evals], dots=True)
    last = f"validation {evals[-1]['val_loss']:.3f} after {evals[-1]['step']:,} steps" if evals else ""
    title, y_label = title or last, "loss (nats per token)"
    return draw_series([training, validation], out, title=title, x_label="step", y_label=y_label)


def draw_grids(
    grids: Sequence[HeatMapGrid | None], out: Sequence[Path], *, across: int, title: str, x_label: str, y_label: str
) -> list[Path]:
    """Draw heat maps, ``across`` in a row (None: an empty cell), each cell with its number. Raises as ``_figure``."""
    with _figure(out, is_empty=not any(grids)) as figure:
        down, some = -(-len(grids) // across), next(grid for grid in grids if grid is not None)
        wide, high = 0.5 * len(some.columns) + 0.6, 0.32 * len(some.rows) + 0.5
        figure.set_size_inches(max(4.0, wide * across + 0.8), high * down + 0.9)
        places = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
        for axes, grid in zip_longest(places.flat, grids):
            if grid is None:
                axes.set_axis_off()
            else:
                _heat_map(axes, grid)
        places[0][0].invert_yaxis()
        figure.suptitle(title, fontsize=9)
        figure.supxlabel(x_label, fontsize=8)
        figure.supylabel(y_label, fontsize=8)
    return _files(out)


def _heat_map(axes: Axes, grid: HeatMapGrid) -> None:
    values = [[math.nan if value is None else value for value in row] for row in grid.values]
    axes.pcolormesh(values, cmap="RdYlGn", vmin=0, vmax=1, edgecolors="white", linewidth=0.5)
    for row, line in enumerate(grid.values):
        for column, value in enumerate(line):
            text = "" if value is None else f"{value:.2f}".removeprefix("0")
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=6)
    axes.set_xticks([at + 0.5 for at in range(len(grid.columns))], grid.columns, fontsize=6)
    axes.set_yticks([at + 0.5 for at in range(len(grid.rows))], grid.rows, fontsize=6)
    axes.set_title(grid.name, fontsize=8)
    axes.tick_params(length=0)


MAX_INCHES = 25.0  # of a side of an attention figure: 3,000 pixels
LABEL_INCHES = 0.11  # height of a label


def draw_attention(pieces: Sequence[str], maps: Sequence[AttentionMap], out: Sequence[Target]) -> list[Path]:
    """Draw heads' weights, four in a row, shaded by square root as in attention_plot.py; a NaN is red.

    A figure beyond ``MAX_INCHES`` is scaled down; then only the maps at its edges have labels, for some of the tokens.
    Raises as ``_figure``.
    """
    with _figure(out, is_empty=not maps) as figure:
        from matplotlib import colormaps

        shades = colormaps["Blues"].with_extremes(bad="#dd0000")
        across = min(MAPS_PER_LINE, len(maps))
        tokens = [one.tokens(pieces) for one in maps]
        wide = 1.3 + 0.16 * max(len(keys) for _, keys in tokens)
        high = 1.3 + 0.16 * max(len(queries) for queries, _ in tokens)
        down = -(-len(maps) // across)
        scale = min(1.0, MAX_INCHES / (wide * across), MAX_INCHES / (high * down))
        step = 1 if scale == 1 else math.ceil(LABEL_INCHES / (0.16 * scale))  # tokens per label
        figure.set_size_inches(wide * across * scale, high * down * scale)
        figure.supxlabel("key", fontsize=8)
        figure.supylabel("query", fontsize=8)
        places = figure.subplots(down, across, squeeze=False)
        for axes in places.flat[len(maps) :]:
            axes.set_axis_off()
        for index, (axes, one, (queries, keys)) in enumerate(zip(places.flat, maps, tokens, strict=False)):
            roots = [[math.sqrt(min(max(weight, 0.0), 1.0)) for weight in row] for row in one.weights]
            axes.imshow(roots, cmap=shades, vmin=0, vmax=1, interpolation="nearest")
            rows = queries[::step] if scale == 1 or index % across == 0 else []
            columns = keys[::step] if scale == 1 or index < across else []
            axes.set_yticks([step * number for number in range(len(rows))], list(map(_label, rows)), fontsize=6)
            axes.set_xticks(
                [step * number for number in range(len(columns))], list(map(_label, columns)), fontsize=6, rotation=90
            )
            axes.xaxis.tick_top()
            axes.set_title(one.name, fontsize=8)
            axes.tick_params(length=0)
    return _files(out)


def _label(piece: str) -> str:
    """Shorten a token to a label without formula signs and without characters that XML forbids."""
    text = re.sub(r"[\x00-\x1f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", piece)
    return (text if len(text) <= 20 else text[:19] + "…").replace("$", r"\$")


PIXELS = 1 / 72  # inches: with this size a font of 9 points is 9 pixels
LINE, INDENT, PAD = 13, 20, 6  # pixels of a box: a line of text, one level of the tree, the space around the text
COLUMN = 5.5  # pixels of a monospaced character of 9 points


def draw_boxes(boxes: Sequence[Box], out: Sequence[Target]) -> list[Path]:
    """Draw a tree as indented boxes, one below the other. Raises as ``_figure``."""
    with _figure(out, is_empty=not boxes, layout=None) as figure:
        from matplotlib.patches import Rectangle

        columns = max(max(len(line) for line in (box.title + "  " + box.note, *box.lines)) for box in boxes)
        depth = max(box.depth for box in boxes)
        wide = 4 * PAD + INDENT * depth + COLUMN * columns
        heights = [LINE * (1 + len(box.lines)) + PAD for box in boxes]
        high = sum(heights) + PAD * (len(boxes) + 1)
        figure.set_size_inches(wide * PIXELS, high * PIXELS)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, wide)
        axes.set_ylim(high, 0)
        top = PAD
        for box, height in zip(boxes, heights, strict=True):
            left = PAD + INDENT * box.depth
            axes.add_patch(Rectangle((left, top), wide - PAD - left, height, facecolor="#f6f7f9", edgecolor="#c6ccd6"))
            axes.add_patch(Rectangle((left, top), 3, height, color=box.color))
            style: dict[str, Any] = {"family": "monospace", "va": "center", "parse_math": False}
            axes.text(left + 2 * PAD, top + PAD / 2 + LINE / 2, box.title, weight="bold", **style)
            axes.text(wide - 2 * PAD, top + PAD / 2 + LINE / 2, box.note, ha="right", **style)
            for number, line in enumerate(box.lines, 1):
                axes.text(left + 2 * PAD, top + PAD / 2 + LINE * (number + 0.5), line, color="#3f4856", **style)
            top += height + PAD
    return _files(out)
