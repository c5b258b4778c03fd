"""``kvad compare RUN RUN...``: training runs side by side; reading and drawing is ``kvad.evaluation.compare_runs``.

``kvad plot``: JSON lines -> figures; the drawing itself is ``kvad.inspection.plot``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvad.cli.options import emit_json, figures_option, format_bytes, json_option
from kvad.errors import UsageError

if TYPE_CHECKING:
    from kvad import evaluation

MAX_COLUMN = 28  # columns of a value in the table


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN...", type=click.Path(path_type=Path))
@figures_option("compare.png and compare.svg, here")
@click.option(
    "--x", "axis", type=click.Choice(["steps", "tokens", "seconds"]), default="steps", show_default=True,
    help="The horizontal axis.",
)  # fmt: skip
@click.option(
    "--smoothing",
    type=click.FloatRange(0, 1, max_open=True),
    help="Exponential smoothing of the loss [default: by the number of steps].",
)
@json_option
def compare_command(
    runs: tuple[Path, ...], out: tuple[Path, ...], axis: str, smoothing: float | None, as_json: bool
) -> None:
    """Compare training runs: curves in one figure, and a table of different settings and results.

    RUN is the --out of a kvad train, finished or not. Losses of runs with different tokenizers or objectives are not
    comparable; a note says so.

    \b
    kvad compare runs/a runs/b
    kvad compare runs/lr-* --x tokens -o lr.svg
    """
    from kvad import evaluation

    if len(runs) < 2:
        raise UsageError("compare needs at least two runs", "the curves of one run are in its folder")
    records = evaluation.compare_runs.read_runs(runs)
    smoothing = evaluation.compare_runs.default_smoothing(records) if smoothing is None else smoothing
    summaries = [run.summary(smoothing) for run in records]
    different, warnings = (
        evaluation.compare_runs.run_differences(records),
        evaluation.compare_runs.comparison_warnings(records),
    )
    try:
        figures = evaluation.compare_runs.draw_runs(
            records, list(out) or [Path("compare.png"), Path("compare.svg")], axis, smoothing
        )
    except ModuleNotFoundError:
        click.echo("kvad: no curves: matplotlib is not installed (pip install 'kvad[plot]')", err=True)
        figures = []
    if as_json:
        run_results = [
            {"name": run.name, "path": run.path, **dataclasses.asdict(summary)}
            for run, summary in zip(records, summaries, strict=True)
        ]
        emit_json({"runs": run_results, "differences": different, "cautions": warnings, "figures": figures})
        return
    click.echo("\n".join(_table(records, summaries, different)))
    for line in warnings:
        click.echo(f"note: {line}")
    for path in figures:
        click.echo(path)


def _table(
    runs: Sequence[evaluation.compare_runs.RunRecord],
    summaries: Sequence[evaluation.compare_runs.RunSummary],
    different: dict[str, list[Any]],
) -> list[str]:
    """Format a table with a column per run: different settings, then results."""
    rows: list[tuple[str, list[str]]] = [("", [run.name for run in runs])]
    rows += [(key, [_short(value) for value in values]) for key, values in different.items()]
    rows += [("", ["-" for _ in runs])]
    rows += [(name, [format_cell(summary) for summary in summaries]) for name, format_cell in RESULT_ROWS]
    first = max(len(key) for key, _ in rows)
    widths = [max(len(values[at]) for _, values in rows) for at in range(len(runs))]
    lines = []
    for key, values in rows:
        if all(value == "-" for value in values) and not key:
            lines.append("-" * (first + sum(width + 2 for width in widths)))
            continue
        cells = "".join(f"  {value:>{width}}" for value, width in zip(values, widths, strict=True))
        lines.append(f"{key:<{first}}{cells}".rstrip())
    return lines


def _short(value: object) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_COLUMN else "..." + text[3 - MAX_COLUMN :]


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _best(summary: evaluation.compare_runs.RunSummary) -> str:
    return "-" if summary.best is None else f"{summary.best:.4f} (step {summary.best_step:,})"


RESULT_ROWS = (
    ("parameters", lambda s: f"{s.parameters:,}"),
    ("steps", lambda s: f"{s.steps:,}" + ("" if s.finished else " so far" if s.failed is None else ", failed")),
    ("tokens", lambda s: f"{s.tokens:,}"),
    ("loss, smoothed", lambda s: _loss(s.loss)),
    ("validation", lambda s: _loss(s.validation)),
    ("best validation", _best),
    ("seconds", lambda s: f"{s.seconds:,.0f}"),
    ("tokens/s", lambda s: f"{s.tokens_per_second:,.0f}"),
    ("MFU", lambda s: "-" if s.mfu is None else f"{s.mfu:.1%}"),
    ("memory, at most", lambda s: "-" if s.memory_peak is None else format_bytes(s.memory_peak)),
    ("computed by", lambda s: f"{s.precision} {s.device}, {s.threads} thr."),
)


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE.jsonl...", type=click.Path(path_type=Path))
@figures_option()
@click.option("--x", "x", default="step", show_default=True, help="The key of the horizontal axis.")
@click.option("--y", "y", multiple=True, help="Key to draw. Repeatable [default: the losses of a training run].")
@click.option("--group-by", help="Draw one curve per value of this key.")
@click.option("--title", default="", help="Title of the figure.")
@click.option("--log-x", is_flag=True, help="Logarithmic horizontal axis.")
@click.option("--log-y", is_flag=True, help="Logarithmic vertical axis.")
def plot_command(
    files: tuple[Path, ...],
    out: tuple[Path, ...],
    x: str,
    y: tuple[str, ...],
    group_by: str | None,
    title: str,
    log_x: bool,
    log_y: bool,
) -> None:
    """Plot JSON lines: the metrics of a training run, or the lines of a benchmark.

    Without --out the figures are written next to the first file, as PNG and SVG.

    \b
    kvad plot runs/x/metrics.jsonl
    kvad plot a/metrics.jsonl b/metrics.jsonl --y val_loss -o compare.svg
    kvad plot bench.jsonl --x tokens --y seconds --group-by curve --log-x -o bench.png
    """
    from kvad import inspection

    targets = list(out) or [files[0].with_suffix(".png"), files[0].with_suffix(".svg")]
    if not y and (x != "step" or group_by or log_x or log_y):
        raise UsageError("--x, --group-by, --log-x and --log-y need --y: the key to draw", "omit them for a loss curve")
    if not y and len(files) == 1:
        inspection.plot.read_jsonl(files[0])
        drawn = inspection.plot.draw_loss(files[0], targets, title=title)
        if not drawn:
            raise UsageError(f"{files[0]} contains no training steps", "choose keys with --x and --y")
    else:
        series = []
        for path in files:
            name = (path.parent.name or path.stem) if len(files) > 1 else ""
            series += inspection.plot.build_series(
                inspection.plot.read_jsonl(path), x, y or ("loss",), by=group_by, name=name
            )
        label = y[0] if len(y) == 1 else ""
        drawn = inspection.plot.draw_series(
            series, targets, title=title, x_label=x, y_label=label, log_x=log_x, log_y=log_y
        )
    for path in drawn:
        click.echo(path)
