"""``kvad plan CONFIG|MODEL|SHAPE``: how much memory will it take, what would fit, how fast can it be?

From the config alone: no weight is loaded, and torch is imported for Hugging Face's configs only (``lab/plan.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvad.cache.formats import FORMATS
from kvad.cli.common import ByteSize, emit_json, format_bytes, json_option
from kvad.cli.helping import SectionedCommand
from kvad.cli.policies import parse_policy_options, policy_options, swap_space_option
from kvad.cli.tiers import parse_prefix_cache_options, prefix_cache_options
from kvad.errors import UsageError, suggest

if TYPE_CHECKING:
    from kvad.cache.planning import MemoryPlan
    from kvad.lab.fit import FitTable

__all__ = ["plan_command"]

LAYOUTS = ("paged", "contiguous")


class _Counts(click.ParamType[tuple[int, ...]]):
    """``4096`` or ``1024,4096``."""

    name = "N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return value if isinstance(value, tuple) else tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is no whole number, nor several with commas between them", param, ctx)


COUNTS = _Counts()


@click.command(cls=SectionedCommand)
@click.argument("target", metavar="CONFIG|MODEL|SHAPE", required=False)
@click.option("--shapes", is_flag=True, help="List the shapes known by name.")
@click.option("--context", type=COUNTS, help="Tokens of the longest row [default: the model's limit].")
@click.option("--source-context", type=int, help="Tokens of the longest source [default: the source's limit].")
@click.option("--rows", type=COUNTS, help="Live sequences [default: 8].")
@click.option("--dtype", metavar="FORMAT", help="What the cache stores [default: the weights' dtype].")
@click.option("--cache-keys", metavar="FORMAT", help="The same, of keys alone.")
@click.option("--cache-values", metavar="FORMAT", help="The same, of values alone.")
@click.option("--weights-dtype", metavar="DTYPE", help="[default: what the checkpoint stores, else float32]")
@click.option("--layout", type=click.Choice(LAYOUTS), default="paged", show_default=True)
@click.option("--block-size", type=int, default=16, show_default=True, help="Slots of a block (paged).")
@policy_options
@swap_space_option
@prefix_cache_options
@click.option(
    "--compressor", metavar="FOLDER", type=click.Path(path_type=Path), help="What makes a hierarchy's summaries."
)
@click.option("--deterministic", is_flag=True, help="The same bits in any batch: what its tiles take.")
@click.option("--chunk", type=int, default=512, show_default=True, help="New tokens of one row in a step, at most.")
@click.option("--budget", type=int, default=2048, show_default=True, help="New tokens of all rows in a step, at most.")
@click.option(
    "--fit",
    type=ByteSize("nothing fits into it"),
    help="What could I run in 8GiB?  Several --context and --rows are for this.",
)
@click.option("--ratios", default="0.75", show_default=True, help="With --fit: shares of a row to drop, as 0.5,0.75.")
@click.option(
    "--prices",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="With --fit: your own bench cache-quality's --out.",
)
@click.option("--mesh", metavar="TxP", help="Bytes of each rank: T tensor ranks by P stages, as 2x1.")
@click.option("--bandwidth", type=float, metavar="GB/s", help="Memory bandwidth [default: measured here].")
@json_option
def plan_command(
    target: str | None,
    shapes: bool,
    context: tuple[int, ...] | None,
    source_context: int | None,
    rows: tuple[int, ...] | None,
    dtype: str | None,
    cache_keys: str | None,
    cache_values: str | None,
    weights_dtype: str | None,
    layout: str,
    block_size: int,
    compressor: Path | None,
    deterministic: bool,
    chunk: int,
    budget: int,
    fit: int | None,
    ratios: str,
    prices: Path | None,
    mesh: str | None,
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
    kvad plan llama-3-8b --weights-dtype bfloat16 --fit 24GiB --context 8192 --rows 1,4
    kvad plan smollm-135m --cache-keys int8 --cache-values int4
    kvad plan gpt2 --policy "sinks(4, 252)"
    kvad plan gpt2 --context 256 --on-full spill --spill-ram 64MiB --park-ram 256MiB
    kvad plan llama-3-8b --weights-dtype bfloat16 --context 8192 --rows 8 --mesh 4x1
    """
    from kvad.cache.available import available_bytes
    from kvad.cache.mesh import Mesh
    from kvad.cache.sizing import DTYPE_BYTES
    from kvad.checkpoint.compressor_folder import read_summarizer_shape
    from kvad.lab.machine import measure_bandwidth
    from kvad.lab.plan import build_report, plan_target, read_target, report_to_json

    if shapes:
        _list_shapes(as_json)
        return
    if target is None:
        raise click.UsageError("Missing argument 'CONFIG|MODEL|SHAPE'; --shapes lists those known by name.")
    if bandwidth is not None and not bandwidth > 0:
        raise click.BadParameter("must be above 0", param_hint="--bandwidth")
    _check({"--weights-dtype": weights_dtype}, DTYPE_BYTES)
    _check({"--dtype": dtype, "--cache-keys": cache_keys, "--cache-values": cache_values}, FORMATS)
    if mesh is not None and fit is not None:
        raise UsageError("--fit asks what one device holds, --mesh what several do", "ask for one of them")
    ranks = None if mesh is None else Mesh.parse(mesh)
    asked = {**parse_policy_options(policies), **parse_prefix_cache_options(policies)}
    if fit is None:
        _one(context, rows)
    found = read_target(target)
    planned = plan_target(
        found,
        context=None if context is None else max(context),
        source_context=source_context,
        weights_dtype=weights_dtype,
        dtype=dtype,
        keys=cache_keys,
        values=cache_values,
        budget=budget,
        learned=None if compressor is None else read_summarizer_shape(compressor),
        deterministic=deterministic,
        rows=8 if rows is None else max(rows),
        layout=layout,
        block_size=block_size,
        chunk=chunk,
        **asked,
    )
    speed = measure_bandwidth() if bandwidth is None else bandwidth * 1e9
    table = None
    if fit is not None and found.config.decoder is not None:
        table = _table(planned, fit, context, rows, ratios, prices)
    report = build_report(
        found.name,
        planned,
        available=available_bytes(),
        bandwidth=speed,
        measured=bandwidth is None,
        fit=fit,
        table=table,
        mesh=ranks,
    )
    if as_json:
        emit_json(report_to_json(report))
        return
    from kvad.cli.plan_page import plan_text

    click.echo(plan_text(report))


def _one(*asked: tuple[int, ...] | None) -> None:
    if any(each is not None and len(each) > 1 for each in asked):
        raise UsageError("several contexts or rows are planned beside one another", "say how much memory: --fit 8GiB")


def _table(
    planned: MemoryPlan,
    size: int,
    context: tuple[int, ...] | None,
    rows: tuple[int, ...] | None,
    ratios: str,
    prices: Path | None,
) -> FitTable:
    from kvad.lab.fit import find_configurations, format_choices, policy_choices
    from kvad.lab.prices import PACKAGED_COSTS, read_costs

    limit = planned.config.max_seq_len
    try:
        shares = [float(part) for part in ratios.split(",")]
    except ValueError:
        raise UsageError(f"--ratios: cannot read {ratios!r}", "write it like 0.5,0.75") from None
    if not all(0 < share < 1 for share in shares):
        raise UsageError(f"--ratios {ratios}: the share that is dropped lies between 0 and 1")
    for each in (*(context or ()), *(rows or ())):
        if each < 1:
            raise UsageError(f"{each} rows, or rows of {each} tokens", "ask for at least 1")
    some = (limit // 4, limit) if limit >= 256 else (limit,)
    return find_configurations(
        planned,
        size,
        contexts=context if context is not None else some if rows is None else (),
        rows=rows or (),
        choices=policy_choices(planned, shares),
        formats=format_choices(planned),
        prices=read_costs(PACKAGED_COSTS if prices is None else prices),
    )


def _check(dtypes: dict[str, str | None], known: Iterable[str]) -> None:
    """UsageError names the flag: further down the cache has the weights' dtype by default, and it could be either."""
    for flag, dtype in dtypes.items():
        if dtype is not None and dtype not in known and not (":" in dtype and known is FORMATS):
            raise UsageError(f"{flag}: unknown dtype {dtype!r}", suggest(dtype, known))


def _list_shapes(as_json: bool) -> None:
    from kvad.cache.weights import num_parameters
    from kvad.lab.shapes import KNOWN_MODELS

    sizes = {name: num_parameters(build()) for name, build in KNOWN_MODELS.items()}
    if as_json:
        emit_json(sizes)
        return
    for name, count in sizes.items():
        click.echo(f"{name:<17}{count:>18,} parameters  {format_bytes(4 * count):>12} in float32")
