"""The page that ``kvad plan`` prints, line by line: exact bytes first, then each group, speed, and what fits."""

from __future__ import annotations

from kvad.cache.planning import MemoryPlan
from kvad.cache.weights import num_parameters
from kvad.cli.common import format_bytes
from kvad.errors import counted
from kvad.lab.plan import Report

__all__ = ["memory_lines", "page"]


def page(report: Report) -> str:
    """The whole page, without a newline at its end."""
    plan, cache = report.plan, report.plan.cache
    blocks = f"in blocks of {cache.block_size}" if cache.layout == "paged" else "one block each"
    layers = counted(plan.config.decoder.layers, "layer")
    model = f"{report.name}: {num_parameters(plan.config):,} parameters, {layers}"
    lines = [
        f"{model}; {counted(cache.rows, 'row')} of {counted(cache.capacity, 'token')}, {cache.layout}, {blocks}",
        "",
        *memory_lines(plan),
        "",
        *_speed_lines(report),
    ]
    if report.available is not None:
        verdict = "it fits" if plan.total <= report.available else "it does not fit"
        lines += ["", f"available here: {format_bytes(report.available)}: {verdict}"]
    if report.fit is not None:
        lines += ["", *_fit_lines(report)]
    return "\n".join(lines)


def memory_lines(plan: MemoryPlan) -> list[str]:
    """The table of bytes, and what each group of layers takes per token and per row."""
    tokens = min(plan.budget, plan.cache.rows * min(plan.cache.chunk, plan.cache.capacity))
    table = [
        ("weights", plan.weights, f"{plan.weights_dtype}, exact"),
        ("cache payload", plan.payload, f"{plan.cache.dtype} keys and values of the rows asked, exact"),
        ("cache columns", plan.columns, "int64 positions of the rows asked, exact"),
        ("cache reserved", plan.reserved, "payload and columns of 2 more blocks per group, exact"),
        ("scratch", plan.scratch, "at most: keys and values gathered for one layer, masks"),
        (
            "activations",
            plan.activations,
            f"at most: a step of {counted(tokens, 'new token')}, {counted(plan.cache.rows, 'row')} of logits",
        ),
        ("total", plan.total, "beside the interpreter and torch"),
    ]
    lines = [f"{name:<15}{size:>21,}  {format_bytes(size):>11}   {note}" for name, size, note in table]
    for number in range(len(plan.groups)):
        lines += ["", *_group_lines(plan, number)]
    return lines


def _group_lines(plan: MemoryPlan, number: int) -> list[str]:
    each = plan.groups[number]
    group, size, mixer = each.group, each.bytes, each.group.mixer
    reach = "full attention" if mixer.window is None else f"window {mixer.window:,}"
    dims = f"{mixer.head_dim}" if mixer.head_dim == mixer.value_dim else f"{mixer.head_dim} + {mixer.value_dim}"
    heads = f"{counted(mixer.kv_heads, 'key-value head')} of {dims}"
    layers = counted(len(group.layers), "layer")
    slots = f"{group.blocks_per_row:,} x {counted(group.block_size, 'slot')}"
    return [
        f"group {number}: {layers}, {reach}, {heads}",
        f"  per token  payload {size.per_token_payload:,}, columns {size.per_token_columns:,}",
        f"  per row    payload {each.row_payload:,}, columns {each.row_columns:,} ({slots})",
        f"  all rows   payload {each.payload:,}, columns {each.columns:,}, reserved {each.reserved:,}",
    ]


def _speed_lines(report: Report) -> list[str]:
    where = "measured here" if report.measured else "as given"
    lines = [f"decoding at {report.bandwidth / 1e9:.1f} GB/s ({where}), if reading memory were all there is:"]
    for speed in report.speeds:
        load = f"{counted(speed.rows, 'row')} at {counted(speed.context, 'token')}"
        lines.append(
            f"  {load}: {format_bytes(speed.step_bytes)} per step, at most {speed.tokens_per_second:,.1f} tokens/s"
        )
    return lines


def _fit_lines(report: Report) -> list[str]:
    assert report.fit is not None
    if not report.fits:
        return [f"in {format_bytes(report.fit)} not even one row of one block fits"]
    return [
        f"in {format_bytes(report.fit)}, weights and work included:",
        f"  {'rows':>6}  {'tokens each':>12}  {'takes':>11}",
        *(f"  {fit.rows:>6,}  {fit.capacity:>12,}  {format_bytes(fit.bytes):>11}" for fit in report.fits),
    ]
