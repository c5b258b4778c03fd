"""``kvad compare RUN RUN...``: training runs side by side; reading and drawing is ``kvad.evaluation.compare_runs``.

``kvad plot``: JSON lines -> figures; the drawing itself is ``kvad.inspection.plot``.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Literal

import click

from kvad import evaluation, inspection
from kvad.cli.fields import Options, argument, command, option
from kvad.cli.output import draw_figures, format_optional, format_table, print_result
from kvad.cli.parameters import JsonOption
from kvad.errors import UsageError, format_bytes

MAX_COLUMN = 28  # columns of a value in the table
FIGURE_HELP = "File for the figure: PNG, SVG or PDF"


class _CompareOptions(JsonOption):
    runs: tuple[Path, ...] = argument("RUN RUN...", required=True)
    out: tuple[Path, ...] = option(
        f"{FIGURE_HELP} [default: compare.png and compare.svg, here]", short="-o", metavar="FILE"
    )
    x: Literal["steps", "tokens", "seconds"] = option("The horizontal axis", "steps")
    smoothing: float | None = option(
        "Exponential smoothing of the loss [default: by the number of steps]",
        kind=click.FloatRange(0, 1, max_open=True),
        metavar="X",
    )


@command("compare", _CompareOptions)
def compare_command(options: _CompareOptions) -> None:
    """Compare training runs: curves in one figure, and a table of different settings and results.

    RUN is the --out of a kvad train, finished or not. Losses of runs with different tokenizers or objectives are not
    comparable; a note says so.

    \b
    kvad compare runs/a runs/b
    kvad compare runs/lr-* --x tokens -o lr.svg
    """
    if len(options.runs) < 2:
        raise UsageError("compare needs at least two runs", "the curves of one run are in its folder")
    records = evaluation.compare_runs.read_runs(options.runs)
    smoothing = options.smoothing
    smoothing = evaluation.compare_runs.default_smoothing(records) if smoothing is None else smoothing
    summaries = [run.summary(smoothing) for run in records]
    different = evaluation.compare_runs.run_differences(records)
    warnings = evaluation.compare_runs.comparison_warnings(records)
    out = list(options.out) or [Path("compare.png"), Path("compare.svg")]
    figures = draw_figures(lambda: evaluation.compare_runs.draw_runs(records, out, options.x, smoothing), "curves")
    runs = [
        {"name": run.name, "path": run.path, **dataclasses.asdict(summary)}
        for run, summary in zip(records, summaries, strict=True)
    ]
    record = {"runs": runs, "differences": different, "cautions": warnings, "figures": figures}
    settings = [("", *(run.name for run in records))]  # a column per run
    settings += [(key, *map(_short, values)) for key, values in different.items()]
    results = [(name, *map(format_cell, summaries)) for name, format_cell in RESULT_ROWS]
    table = format_table([*settings, *results], left=(0,))
    table.insert(len(settings), "-" * max(map(len, table)))
    print_result(options.as_json, record, [*table, *(f"note: {line}" for line in warnings), *map(str, figures)])


def _short(value: object) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_COLUMN else "..." + text[3 - MAX_COLUMN :]


RESULT_ROWS = (
    ("parameters", lambda s: f"{s.parameters:,}"),
    ("steps", lambda s: f"{s.steps:,}" + ("" if s.finished else " so far" if s.failed is None else ", failed")),
    ("tokens", lambda s: f"{s.tokens:,}"),
    ("loss, smoothed", lambda s: format_optional(s.loss, ".4f")),
    ("validation", lambda s: format_optional(s.validation, ".4f")),
    ("best validation", lambda s: "-" if s.best is None else f"{s.best:.4f} (step {s.best_step:,})"),
    ("seconds", lambda s: f"{s.seconds:,.0f}"),
    ("tokens/s", lambda s: f"{s.tokens_per_second:,.0f}"),
    ("MFU", lambda s: format_optional(s.mfu, ".1%")),
    ("memory, at most", lambda s: "-" if s.memory_peak is None else format_bytes(s.memory_peak)),
    ("computed by", lambda s: f"{s.precision} {s.device}, {s.threads} thr."),
)


class _PlotOptions(Options):
    files: tuple[Path, ...] = argument("FILE.jsonl...", required=True)
    out: tuple[Path, ...] = option(FIGURE_HELP, short="-o", metavar="FILE")
    x: str = option("The key of the horizontal axis", "step")
    y: tuple[str, ...] = option("Key to draw [default: the losses of a training run]")
    group_by: str | None = option("Draw one curve per value of this key")
    title: str = option("Title of the figure", "")
    log_x: bool = option("Logarithmic horizontal axis")
    log_y: bool = option("Logarithmic vertical axis")


@command("plot", _PlotOptions)
def plot_command(options: _PlotOptions) -> None:
    """Plot JSON lines: the metrics of a training run, or the lines of a benchmark.

    Without --out the figures are written next to the first file, as PNG and SVG.

    \b
    kvad plot runs/x/metrics.jsonl
    kvad plot a/metrics.jsonl b/metrics.jsonl --y val_loss -o compare.svg
    kvad plot bench.jsonl --x tokens --y seconds --group-by curve --log-x -o bench.png
    """
    files, x, y, title = options.files, options.x, options.y, options.title
    targets = list(options.out) or [files[0].with_suffix(".png"), files[0].with_suffix(".svg")]
    if not y and (x != "step" or options.group_by or options.log_x or options.log_y):
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
            lines = inspection.plot.read_jsonl(path)
            series += inspection.plot.build_series(lines, x, y or ("loss",), by=options.group_by, name=name)
        label = y[0] if len(y) == 1 else ""
        drawn = inspection.plot.draw_series(
            series, targets, title=title, x_label=x, y_label=label, log_x=options.log_x, log_y=options.log_y
        )
    for path in drawn:
        click.echo(path)
