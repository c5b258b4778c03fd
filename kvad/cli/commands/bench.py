"""``kvad bench cache MODEL``: time and count generation with and without the cache.

Numbers go to stdout, progress to stderr; ``--out`` writes the JSON lines and a figure. The other benchmarks are in
``cache_quality.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from kvad.cli.commands.cache_quality import cache_quality_command, streaming_command
from kvad.cli.model_options import format_options, parse_format_options
from kvad.cli.options import emit_json, format_bytes, json_line, json_option, model_argument
from kvad.errors import RequestError, UsageError

if TYPE_CHECKING:
    from kvad import benchmarks

T = TypeVar("T")
TOKENS = (64, 128, 256, 512)


@click.group()
def bench_group() -> None:
    """Measure the speed of a model with and without its cache, and the quality of lossy caches.

    \b
    kvad bench cache runs/demo
    kvad bench cache-quality runs/lookup-cpu
    kvad bench streaming runs/endless-rope
    """


bench_group.add_command(cache_quality_command)
bench_group.add_command(streaming_command)


@bench_group.command()
@model_argument
@click.option(
    "--new-tokens", metavar="N,N,...", help="Numbers of new tokens to time [default: 64,128,256,512, or what fits]."
)
@click.option("--prompt", default="", help="Prompt to continue [default: the opening token].")
@format_options
@click.option("--repeats", type=int, default=3, show_default=True, help="Number of runs; medians are reported.")
@click.option(
    "-o",
    "--out",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Folder for the JSON lines and the figure [default: not written].",
)
@json_option
def cache_command(
    model: Path,
    new_tokens: str | None,
    prompt: str,
    repeats: int,
    out: Path | None,
    as_json: bool,
    **options: str | None,
) -> None:
    """Time generation with the cache, by recomputation, and with a cache extended by torch.cat, alternately.

    \b
    kvad bench cache runs/demo
    kvad bench cache runs/demo --new-tokens 64,128,256 --repeats 5 --json >> dev/results/bench.jsonl
    """
    from kvad.benchmarks import bench_cache
    from kvad.llm import LLM

    lengths = None if new_tokens is None else _token_counts(new_tokens)
    with LLM.load(model, max_num_seqs=1, **parse_format_options(options)) as llm:
        if llm.model.config.kind != "decoder":
            raise UsageError(f"kvad bench cache times a decoder, this is an {llm.model.config.kind}")
        if lengths is None:
            room = llm.model.config.max_seq_len - len(llm.encode(prompt))
            lengths = list(TOKENS) if room >= TOKENS[-1] else [max(1, room // part) for part in (8, 4, 2, 1)]
            if room < TOKENS[-1]:
                click.echo(f"kvad: the model's limit leaves room for {room} new tokens: timing {lengths}", err=True)
        result = bench_cache(llm, lengths, repeats, _progress, prompt=prompt)
    for path in [] if out is None else write_results(result, out):
        click.echo(f"kvad: figure: {path}", err=True)
    if as_json:
        emit_json(result)
    else:
        click.echo("\n".join(bench_lines(result)))


def _token_counts(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        wrong = str(error).rpartition(": ")[2]
        raise RequestError(f"--new-tokens: {wrong} is not a number of tokens", "write them like 64,128,256") from None


def _progress(curve: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{curve:<10} {done:>6} of {total} tokens ", err=True, nl=False)


def write_results(result: benchmarks.cache_speed.BenchResult, out: Path) -> list[Path]:
    """Write ``bench-cache.json``, ``bench-cache.jsonl`` (a line per curve and length) and the figure.

    Returns:
        The files of the figure; none if matplotlib is not installed.
    """
    from kvad import text as text_lib

    text_lib.base.write_text(out / "bench-cache.json", json_line(result) + "\n")
    text_lib.base.write_text(out / "bench-cache.jsonl", "".join(f"{json_line(line)}\n" for line in result.lines()))
    return _figure(result, out)


def _figure(result: benchmarks.cache_speed.BenchResult, out: Path) -> list[Path]:
    from kvad import inspection

    series = [
        inspection.plot.PlotSeries(name, result.tokens, curve.seconds, dots=True)
        for name, curve in _names(result.curves).items()
    ]
    files = [out / "bench-cache.png", out / "bench-cache.svg"]
    title = f"{result.speedup[-1]:.1f} times faster with the cache at {result.tokens[-1]} new tokens"
    try:
        return inspection.plot.draw_series(
            series, files, title=title, x_label="new tokens", y_label="seconds", log_x=True, log_y=True
        )
    except ModuleNotFoundError:
        click.echo("kvad: no figure: matplotlib is not installed (pip install 'kvad[plot]')", err=True)
        return []


def bench_lines(result: benchmarks.cache_speed.BenchResult) -> list[str]:
    """Format the result: machine, times, slopes, counted FLOPs and bytes, and a chart."""
    return [
        f"{result.parameters:,} parameters in {result.dtype}, cache {result.layout} in {result.cache_dtype}",
        f"{result.machine}; commit {result.commit or 'unknown'}",
        "",
        *_times(result),
        "",
        *_meaning(result),
        "",
        *_counts(result),
        "",
        _chart(result),
    ]


def _names(curves: Mapping[str, T]) -> dict[str, T]:
    """Map the printed names of the curves to their values."""
    labels = {"cache": "cache", "cat": "torch.cat", "recompute": "recompute"}
    return {text: curves[name] for name, text in labels.items()}


def _times(result: benchmarks.cache_speed.BenchResult) -> list[str]:
    curves = _names(result.curves)
    head = f"{'new tokens':>10}" + "".join(f"{text:>14}" for text in curves) + f"{'speedup':>10}"
    rows = [
        f"{length:>10}"
        + "".join(f"{curve.seconds[at]:>12.3f} s" for curve in curves.values())
        + f"{result.speedup[at]:>9.1f}x"
        for at, length in enumerate(result.tokens)
    ]
    slopes = f"{'exponent':>10}" + "".join(f"{curve.exponent:>14.2f}" for curve in curves.values())
    return [head, *rows, slopes]


def _meaning(result: benchmarks.cache_speed.BenchResult) -> list[str]:
    first, last = min(32, result.tokens[-1]), result.tokens[-1]
    lines = [
        f"one token, {name + ':':<11} {curve.early:8.2f} ms at token {first}, {curve.late:8.2f} ms at token {last}"
        for name, curve in _names(result.curves).items()
    ]
    return [
        *lines,
        f"flatness of the cache: {result.flatness:.2f} (1 = the time per token does not depend on the length)",
        f"of one step, the model takes {result.model_ms:.2f} ms and the engine {result.engine_ms:.3f} ms",
        f"all three generate the same first {result.outputs_agree} of {last} tokens",
    ]


def _counts(result: benchmarks.cache_speed.BenchResult) -> list[str]:
    """Format counted FLOPs and bytes next to the gains that the formulas predict."""
    head = (
        f"{'new tokens':>10}{'GFLOP':>10}{'recomputed':>12}{'cache read':>12}{'all bytes':>12}"
        f"{'attention':>11}{'2N/3':>8}{'projections':>13}{'N/2':>8}"
    )
    rows = [
        f"{c.tokens:>10}{c.cached.flops / 1e9:>10.2f}{c.recomputed.flops / 1e9:>12.2f}"
        f"{format_bytes(c.cached.bytes_read):>12}{format_bytes(c.cached.bytes):>12}"
        f"{c.gain.attention:>10.1f}x{c.formula.attention:>8.1f}{c.gain.projections:>12.1f}x{c.formula.projections:>8.1f}"
        for c in result.counted
    ]
    return [head, *rows]


def _chart(result: benchmarks.cache_speed.BenchResult) -> str:
    from kvad import benchmarks

    curves = _names(result.curves).items()
    points = {name: list(zip(result.tokens, curve.seconds, strict=True)) for name, curve in curves}
    return benchmarks.cache_speed.ascii_chart(points, x="new tokens", y="seconds")
