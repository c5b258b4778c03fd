"""``kvad plot``: JSON lines -> figures; the drawing itself is ``kvad.lab.plot``."""

from __future__ import annotations

from pathlib import Path

import click

from kvad.cli.common import figures_option
from kvad.errors import UsageError

__all__ = ["plot_command"]


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE.jsonl...", type=click.Path(path_type=Path))
@figures_option()
@click.option("--x", "x", default="step", show_default=True, help="The key of the horizontal axis.")
@click.option(
    "--y", "y", multiple=True, help="A key to draw; may be repeated.  [default: the losses of a training run]"
)
@click.option("--by", help="One curve per value of this key.")
@click.option("--title", default="", help="A line above the figure.")
@click.option("--log-x", is_flag=True)
@click.option("--log-y", is_flag=True)
def plot_command(
    files: tuple[Path, ...],
    out: tuple[Path, ...],
    x: str,
    y: tuple[str, ...],
    by: str | None,
    title: str,
    log_x: bool,
    log_y: bool,
) -> None:
    """Draw figures from JSON lines: a training run's metrics, or the lines of a bench.

    Without --out the figures lie beside the first file, as PNG and SVG.

    \b
    kvad plot runs/x/metrics.jsonl
    kvad plot a/metrics.jsonl b/metrics.jsonl --y val_loss -o compare.svg
    kvad plot bench.jsonl --x tokens --y seconds --by curve --log-x -o bench.png
    """
    from kvad.lab.plot import build_series, draw_loss, draw_series, read_jsonl

    targets = list(out) or [files[0].with_suffix(".png"), files[0].with_suffix(".svg")]
    if not y and (x != "step" or by or log_x or log_y):
        raise UsageError("--x, --by, --log-x and --log-y need --y: the key to draw", "leave them out for a loss curve")
    if not y and len(files) == 1:
        read_jsonl(files[0])
        drawn = draw_loss(files[0], targets, title=title)
        if not drawn:
            raise UsageError(f"{files[0]} holds no training steps", "say what to draw with --x and --y")
    else:
        series = []
        for path in files:
            name = (path.parent.name or path.stem) if len(files) > 1 else ""
            series += build_series(read_jsonl(path), x, y or ("loss",), by=by, name=name)
        label = y[0] if len(y) == 1 else ""
        drawn = draw_series(series, targets, title=title, x_label=x, y_label=label, log_x=log_x, log_y=log_y)
    for path in drawn:
        click.echo(path)
