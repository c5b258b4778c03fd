"""``kvad plan CONFIG|MODEL|SHAPE``: how much memory will it take, what would fit, how fast can it be?

From the config alone: no weight is loaded, and torch is imported for Hugging Face's configs only (``lab/plan.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from kvad.cli.common import emit_json, format_bytes, json_option, parse_bytes
from kvad.cli.policies import policies_asked, policy_options
from kvad.errors import UsageError, nearest

__all__ = ["plan"]

LAYOUTS = ("paged", "contiguous")


@click.command()
@click.argument("target", metavar="CONFIG|MODEL|SHAPE", required=False)
@click.option("--shapes", is_flag=True, help="List the shapes known by name.")
@click.option("--context", type=int, help="Tokens of the longest row [default: the model's limit].")
@click.option("--source-context", type=int, help="Tokens of the longest source [default: the source's limit].")
@click.option("--rows", type=int, default=8, show_default=True, help="Live sequences.")
@click.option("--dtype", help="What the cache stores [default: the weights' dtype].")
@click.option("--cache-keys", help="The same, of keys alone.")
@click.option("--cache-values", help="The same, of values alone.")
@click.option("--weights-dtype", help="[default: what the checkpoint stores, else float32]")
@click.option("--layout", type=click.Choice(LAYOUTS), default="paged", show_default=True)
@click.option("--block-size", type=int, default=16, show_default=True, help="Slots of a block (paged).")
@policy_options
@click.option("--chunk", type=int, default=512, show_default=True, help="New tokens of one row in a step, at most.")
@click.option("--budget", type=int, default=2048, show_default=True, help="New tokens of all rows in a step, at most.")
@click.option("--fit", metavar="SIZE", help="Also show the most rows x context that fit, as in 8GiB.")
@click.option("--bandwidth", type=float, metavar="GB/s", help="Memory bandwidth [default: measured here].")
@json_option
def plan(
    target: str | None,
    shapes: bool,
    context: int | None,
    source_context: int | None,
    rows: int,
    dtype: str | None,
    cache_keys: str | None,
    cache_values: str | None,
    weights_dtype: str | None,
    layout: str,
    block_size: int,
    chunk: int,
    budget: int,
    fit: str | None,
    bandwidth: float | None,
    as_json: bool,
    **policies: Any,
) -> None:
    """How much memory will a model and its cache take?  Nothing is loaded.

    The weights and the cache are exact, to the byte; what a step makes besides is an upper bound.  CONFIG is kvad's, or
    the config.json of a Hugging Face model, alone, in its folder or on the hub.

    \b
    kvad plan runs/demo --context 4096 --rows 8
    kvad plan t5-base --source-context 512 --context 128 --rows 32
    kvad plan llama-3-8b --context 8192 --rows 1 --dtype bfloat16 --weights-dtype bfloat16 --fit 24GiB
    kvad plan smollm-135m --cache-keys int8 --cache-values int4
    kvad plan gpt2 --policy "sinks(4, 252)"
    """
    from kvad.cache.available import available_bytes
    from kvad.cache.formats import FORMATS
    from kvad.cache.sizing import DTYPE_BYTES
    from kvad.lab.machine import read_bandwidth
    from kvad.lab.plan import make_report, plan_target, read_target, to_json

    if shapes:
        _list_shapes(as_json)
        return
    if target is None:
        raise click.UsageError("Missing argument 'CONFIG|MODEL|SHAPE'; --shapes lists those known by name.")
    if bandwidth is not None and not bandwidth > 0:
        raise click.BadParameter("must be above 0", param_hint="--bandwidth")
    _check({"--weights-dtype": weights_dtype}, DTYPE_BYTES)
    _check({"--dtype": dtype, "--cache-keys": cache_keys, "--cache-values": cache_values}, FORMATS)
    size, asked = None if fit is None else parse_bytes(fit), policies_asked(policies)
    found = read_target(target)
    planned = plan_target(
        found,
        context=context,
        source_context=source_context,
        weights_dtype=weights_dtype,
        dtype=dtype,
        keys=cache_keys,
        values=cache_values,
        budget=budget,
        rows=rows,
        layout=layout,
        block_size=block_size,
        chunk=chunk,
        **asked,
    )
    speed = read_bandwidth() if bandwidth is None else bandwidth * 1e9
    report = make_report(
        found.name, planned, available=available_bytes(), bandwidth=speed, measured=bandwidth is None, fit=size
    )
    if as_json:
        emit_json(to_json(report))
        return
    from kvad.cli.plan_page import page

    click.echo(page(report))


def _check(dtypes: dict[str, str | None], known: Iterable[str]) -> None:
    """UsageError names the flag: further down the cache has the weights' dtype by default, and it could be either."""
    for flag, dtype in dtypes.items():
        if dtype is not None and dtype not in known:
            raise UsageError(f"{flag}: unknown dtype {dtype!r}", nearest(dtype, known))


def _list_shapes(as_json: bool) -> None:
    from kvad.cache.weights import num_parameters
    from kvad.lab.shapes import SHAPES

    sizes = {name: num_parameters(build()) for name, build in SHAPES.items()}
    if as_json:
        emit_json(sizes)
        return
    for name, count in sizes.items():
        click.echo(f"{name:<17}{count:>18,} parameters  {format_bytes(4 * count):>12} in float32")
