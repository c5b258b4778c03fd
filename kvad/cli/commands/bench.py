"""``kvad bench cache MODEL``: time and count generation with and without the cache.

Numbers go to stdout, progress to stderr; ``--out`` writes the JSON lines and a figure. The other benchmarks are in
``cache_quality.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from kvad.cli.commands.cache_quality import cache_quality_command, require_decoder, streaming_command
from kvad.cli.fields import command, option
from kvad.cli.output import ProgressLine, draw_figures, format_bytes, json_line, note, print_result
from kvad.cli.parameters import INTEGERS, FormatOptions, JsonOption, ModelArgument, given_formats

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


class _BenchOptions(ModelArgument, FormatOptions, JsonOption):
    new_tokens: tuple[int, ...] | None = option(
        "Numbers of new tokens to time [default: 64,128,256,512, or what fits]", kind=INTEGERS
    )
    prompt: str = option("Prompt to continue [default: the opening token]", "")
    repeats: int = option("Number of runs; medians are reported", 3)
    out: Path | None = option("Folder for the JSON lines and the figure [default: not written]", short="-o")


@command("cache", _BenchOptions, bench_group)
def cache_command(options: _BenchOptions) -> None:
    """Time generation with the cache, by recomputation, and with a cache extended by torch.cat, alternately.

    \b
    kvad bench cache runs/demo
    kvad bench cache runs/demo --new-tokens 64,128,256 --repeats 5 --json >> dev/results/bench.jsonl
    """
    from kvad.benchmarks import bench_cache
    from kvad.llm import LLM

    prompt, lengths = options.prompt, options.new_tokens
    with LLM.load(options.model, max_num_seqs=1, **given_formats(options)) as llm, ProgressLine() as progress:
        require_decoder(llm, "cache")
        if lengths is None:
            room = llm.model.config.max_seq_len - len(llm.encode(prompt))
            lengths = TOKENS if room >= TOKENS[-1] else tuple(max(1, room // part) for part in (8, 4, 2, 1))
            if room < TOKENS[-1]:
                note(f"the model's limit leaves room for {room} new tokens: timing {list(lengths)}")
        result = bench_cache(llm, lengths, options.repeats, progress.update, prompt=prompt)
    for path in [] if options.out is None else write_results(result, options.out):
        note(f"figure: {path}")
    print_result(options.as_json, result, bench_lines(result))


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
    return draw_figures(
        lambda: inspection.plot.draw_series(
            series, files, title=title, x_label="new tokens", y_label="seconds", log_x=True, log_y=True
        )
    )


def bench_lines(result: benchmarks.cache_speed.BenchResult) -> list[str]:
    """Format the result: machine, times, slopes, counted FLOPs and bytes."""
    return [
        f"{result.parameters:,} parameters in {result.dtype}, cache {result.layout} in {result.cache_dtype}",
        f"{result.machine}; commit {result.commit or 'unknown'}",
        "",
        *_times(result),
        "",
        *_meaning(result),
        "",
        *_counts(result),
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
