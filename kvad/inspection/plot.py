"""Numbers -> figures: named series of points become PNG, SVG or PDF, the file's ending decides which.

A figure is a function of its numbers: no clock and no random identifier goes into the file, so that a curve in
``docs/`` changes only when its numbers do.  matplotlib (the ``plot`` extra) is imported when something is drawn, and
without its global state.  No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvad.errors import DataError, SaveError, UsageError, suggest
from kvad.inspection.attention_plot import MAPS_PER_LINE, AttentionMap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
RC_PARAMS = {"svg.fonttype": "none", "svg.hashsalt": "kvad", "font.size": 9.0, "axes.spines.top": False}


@dataclass(frozen=True)
class PlotSeries:
    """A named curve.

    ``dots`` marks its points, ``faint`` draws it thin (raw loss), ``dashed`` interrupts it; ``color``: a number, equal
    for related curves.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dots: bool = False
    faint: bool = False
    dashed: bool = False
    color: int | None = None


@dataclass(frozen=True)
class PlotPanel:
    """Curves over one y axis."""

    label: str
    series: Sequence[PlotSeries]
    title: str = ""
    log_y: bool = False


@dataclass(frozen=True)
class HeatMapGrid:
    """A heat map: ``values[row][column]`` from 0 to 1 (None: not measured) over the names of its columns and rows."""

    name: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float | None]]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSONL file; an incomplete last line is omitted.

    DataError for other files.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except FileNotFoundError as error:
        raise DataError(f"no such file: {path}") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise _not_metrics(path, "it is not text") from None
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line)
        except ValueError:
            if found and number == len(lines):
                break
            raise _not_metrics(path, f"line {number} is not JSON") from None
        if isinstance(content, dict):
            found.append(content)
    return found


def _not_metrics(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is not a JSON-lines file of metrics: {why}",
        "give the metrics.jsonl of a run of kvad train, or lines of kvad bench",
    )


def build_series(
    lines: Sequence[Mapping[str, Any]], x: str, y: Sequence[str], *, by: str | None = None, name: str = ""
) -> list[PlotSeries]:
    """Build one series per key of ``y``, and per value of ``by`` if given.

    Lines without both keys are skipped.

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
    found = []
    for group in groups:
        mine = [line for line in lines if by is None or str(line.get(by)) == group]
        for key in y:
            points = sorted(
                (float(line[x]), float(line[key]))
                for line in mine
                if _is_number(line.get(x)) and _is_number(line.get(key))
            )
            label = " ".join(part for part in (name, group, key if group is None or len(y) > 1 else "") if part)
            if points:
                found.append(PlotSeries(label, [p[0] for p in points], [p[1] for p in points], dots=len(points) <= 32))
    return found


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
    """Draw the curves into every file of ``out``.

    Raises:
        UsageError: For a suffix that is not in ENDINGS.
        SaveError: If a file cannot be written.
        ModuleNotFoundError: If matplotlib is not installed.
    """
    _check_endings(out)
    if not any(len(one.x) for one in series):
        raise DataError("there is nothing to draw")
    import matplotlib as mpl

    with mpl.rc_context(RC_PARAMS):  # type: ignore[arg-type]
        figure = _figure(series, title, x_label, y_label, log_x, log_y)
        for path in out:
            _write(figure, path)
    return list(out)


def draw_grids(
    grids: Sequence[HeatMapGrid | None],
    out: Sequence[Path],
    *,
    across: int,
    title: str = "",
    x_label: str = "",
    y_label: str = "",
) -> list[Path]:
    """Draw heat maps into every file of ``out``, ``across`` in a row (None: an empty cell), each cell with its number.

    Raises as :func:`draw_series`.
    """
    _check_endings(out)
    if not any(grids):
        raise DataError("there is nothing to draw")
    import matplotlib as mpl

    with mpl.rc_context(RC_PARAMS):  # type: ignore[arg-type]
        figure = _heat_maps(grids, across, title, x_label, y_label)
        for path in out:
            _write(figure, path)
    return list(out)


def draw_attention(pieces: Sequence[str], maps: Sequence[AttentionMap], out: Sequence[Path]) -> list[Path]:
    """Draw heads' weights into every file of ``out``, four in a row, shaded by square root as in attention_plot.py.

    Raises as :func:`draw_series`.
    """
    _check_endings(out)
    if not maps:
        raise DataError("there is nothing to draw")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    across = min(MAPS_PER_LINE, len(maps))
    down = -(-len(maps) // across)
    tokens = [one.tokens(pieces) for one in maps]
    wide = 1.3 + 0.16 * max(len(keys) for _, keys in tokens)
    high = 1.3 + 0.16 * max(len(queries) for queries, _ in tokens)
    with mpl.rc_context(RC_PARAMS):  # type: ignore[arg-type]
        figure = Figure(figsize=(wide * across, high * down), layout="constrained")
        places = figure.subplots(down, across, squeeze=False)
        for place in places.flat[len(maps) :]:
            place.set_axis_off()
        for place, one, (queries, keys) in zip(places.flat, maps, tokens, strict=False):
            shades = [[math.sqrt(min(max(weight, 0.0), 1.0)) for weight in row] for row in one.weights]
            place.imshow(shades, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
            place.set_yticks(range(len(queries)), [_plain(piece) for piece in queries], fontsize=6)
            place.set_xticks(range(len(keys)), [_plain(piece) for piece in keys], fontsize=6, rotation=90)
            place.xaxis.tick_top()
            place.set_title(one.name, fontsize=8)
            place.tick_params(length=0)
        for path in out:
            _write(figure, path)
    return list(out)


def _plain(piece: str) -> str:
    """Shorten a token to a label, without formula signs."""
    return (piece if len(piece) <= 20 else piece[:19] + "…").replace("$", r"\$")


def _heat_maps(grids: Sequence[HeatMapGrid | None], across: int, title: str, x_label: str, y_label: str) -> Figure:
    from matplotlib.figure import Figure

    down, some = -(-len(grids) // across), next(grid for grid in grids if grid is not None)
    wide, high = 0.5 * len(some.columns) + 0.6, 0.32 * len(some.rows) + 0.5
    figure = Figure(figsize=(max(4.0, wide * across + 0.8), high * down + 0.9), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for number, place in enumerate(axes.flat):
        grid = grids[number] if number < len(grids) else None
        if grid is None:
            place.set_axis_off()
            continue
        values = [[math.nan if value is None else value for value in row] for row in grid.values]
        place.pcolormesh(values, cmap="RdYlGn", vmin=0, vmax=1, edgecolors="white", linewidth=0.5)
        for row, line in enumerate(grid.values):
            for column, value in enumerate(line):
                text = "" if value is None else f"{value:.2f}".removeprefix("0")
                place.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=6)
        place.set_xticks([at + 0.5 for at in range(len(grid.columns))], grid.columns, fontsize=6)
        place.set_yticks([at + 0.5 for at in range(len(grid.rows))], grid.rows, fontsize=6)
        place.set_title(grid.name, fontsize=8)
        place.tick_params(length=0)
    axes[0][0].invert_yaxis()
    figure.suptitle(title, fontsize=9)
    figure.supxlabel(x_label, fontsize=8)
    figure.supylabel(y_label, fontsize=8)
    return figure


def draw_loss(metrics: Path, out: Sequence[Path], *, title: str = "") -> list[Path]:
    """Build the loss curves of a run's ``metrics.jsonl``; ``[]`` if no step was logged yet."""
    lines = read_jsonl(metrics) if metrics.exists() else []
    steps = [line for line in lines if line.get("kind") == "step"]
    evals = [line for line in lines if line.get("kind") == "eval"]
    if not steps:
        return []
    raw = PlotSeries("training", [s["step"] for s in steps], [s["loss"] for s in steps], faint=True)
    held = PlotSeries("validation", [e["step"] for e in evals], [e["val_loss"] for e in evals], dots=True)
    last = f"validation {evals[-1]['val_loss']:.3f} after {evals[-1]['step']:,} steps" if evals else ""
    return draw_series([raw, held], out, title=title or last, x_label="step", y_label="loss (nats per token)")


def _check_endings(out: Sequence[Path]) -> None:
    for path in out:
        if path.suffix not in ENDINGS:
            raise UsageError(f"{path}: figures end in {', '.join(ENDINGS)}")


def _figure(series: Sequence[PlotSeries], title: str, x_label: str, y_label: str, log_x: bool, log_y: bool) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    _curves(axes, series)
    if log_x:
        axes.set_xscale("log", base=2)
    if log_y:
        axes.set_yscale("log")
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure


def _curves(axes: Axes, series: Sequence[PlotSeries]) -> None:
    for one in series:
        if len(one.x):
            width, alpha = (0.8, 0.4 if one.color is not None else 0.6) if one.faint else (1.6, 1.0)
            axes.plot(
                one.x,
                one.y,
                label=one.name,
                color=None if one.color is None else f"C{one.color % 10}",
                marker="o" if one.dots else "",
                markersize=3,
                linestyle="--" if one.dashed else "-",
                linewidth=width,
                alpha=alpha,
            )
    axes.grid(alpha=0.25, linewidth=0.5)
    if any(one.name for one in series):
        axes.legend(frameon=False)


def draw_panels(panels: Sequence[PlotPanel], out: Sequence[Path], *, x_label: str, title: str = "") -> list[Path]:
    """Draw panels, one below the other over one x axis, into every file of ``out``.

    Raises as :func:`draw_series`.
    """
    _check_endings(out)
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    with mpl.rc_context(RC_PARAMS):  # type: ignore[arg-type]
        figure = Figure(figsize=(6.4, 1.0 + 2.0 * len(panels)), layout="constrained")
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
        figure.suptitle(title, fontsize=9)
        for path in out:
            _write(figure, path)
    return list(out)


def _write(figure: Figure, path: Path) -> None:
    undated: dict[str, dict[str, str | None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120, metadata=undated.get(path.suffix))
    except OSError as error:
        raise SaveError(f"cannot write {path}: {error.strerror or error}") from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
