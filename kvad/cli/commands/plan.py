"""``kvad plan CONFIG|MODEL|SHAPE``: how much memory will it take, what would fit, how fast can it be?

From the config alone: no weight is loaded, and torch is imported for Hugging Face's configs only (``lab/plan.py``).

The page that ``kvad plan`` prints, line by line: exact bytes first, then each group, speed, and what fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from kvad import cache, planning
from kvad import cache as cache_lib
from kvad import config as config_lib
from kvad.cache import CacheConfig, resolve_for_model, sizing
from kvad.cache.sizing import MemoryPlan
from kvad.cli.cache_options import (
    parse_policy_options,
    parse_prefix_cache_options,
    policy_options,
    prefix_cache_options,
    swap_space_option,
)
from kvad.cli.options import ByteSize, SectionedCommand, emit_json, format_bytes, json_option
from kvad.config import AlibiConfig, ModelConfig, T5BiasConfig, attention_specs
from kvad.errors import UsageError, format_count, suggest
from kvad.planning import PlanReport

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
    from kvad import checkpoint, config
    from kvad.cache.sizing import available_bytes
    from kvad.parallel import Mesh
    from kvad.planning import build_report, measure_bandwidth, plan_target, read_target, report_to_json

    if shapes:
        _list_shapes(as_json)
        return
    if target is None:
        raise click.UsageError("Missing argument 'CONFIG|MODEL|SHAPE'; --shapes lists those known by name.")
    if bandwidth is not None and not bandwidth > 0:
        raise click.BadParameter("must be above 0", param_hint="--bandwidth")
    _check({"--weights-dtype": weights_dtype}, config.DTYPE_BYTES)
    _check({"--dtype": dtype, "--cache-keys": cache_keys, "--cache-values": cache_values}, cache.quantization.FORMATS)
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
        learned=None if compressor is None else checkpoint.folder.read_summarizer_shape(compressor),
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
    pass

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
) -> planning.fit.FitTable:
    from kvad import planning

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
    return planning.fit.find_configurations(
        planned,
        size,
        contexts=context if context is not None else some if rows is None else (),
        rows=rows or (),
        choices=planning.fit.policy_choices(planned, shares),
        formats=planning.fit.format_choices(planned),
        prices=planning.fit.read_costs(planning.fit.PACKAGED_COSTS if prices is None else prices),
    )


def _check(dtypes: dict[str, str | None], known: Iterable[str]) -> None:
    """UsageError names the flag: further down the cache has the weights' dtype by default, and it could be either."""
    for flag, dtype in dtypes.items():
        if dtype is not None and dtype not in known and not (":" in dtype and known is cache.quantization.FORMATS):
            raise UsageError(f"{flag}: unknown dtype {dtype!r}", suggest(dtype, known))


def _list_shapes(as_json: bool) -> None:
    from kvad import config
    from kvad.planning import KNOWN_MODELS

    sizes = {name: config.parameter_shapes.num_parameters(build()) for name, build in KNOWN_MODELS.items()}
    if as_json:
        emit_json(sizes)
        return
    for name, count in sizes.items():
        click.echo(f"{name:<17}{count:>18,} parameters  {format_bytes(4 * count):>12} in float32")


SWAP_NOTE = "in host memory, at most, for each row that gives way to others"


def plan_text(report: PlanReport) -> str:
    """The whole page, without a newline at its end."""
    plan = report.plan
    model = (
        f"{report.name}: {config_lib.parameter_shapes.num_parameters(plan.config):,} parameters, {_layers(plan.config)}"
    )
    lines = [f"{model}; {request_lines(plan)}", "", *memory_lines(plan)]
    if report.ranks:
        lines += ["", *_rank_lines(report)]
    if report.speeds:
        lines += ["", *_speed_lines(report)]
    if report.available is not None and not report.ranks:
        verdict = "it fits" if plan.total <= report.available else "it does not fit"
        lines += ["", f"available here: {format_bytes(report.available)}: {verdict}"]
    if report.fit is not None:
        lines += ["", *_fit_lines(report)]
    return "\n".join(lines)


def _layers(config: ModelConfig) -> str:
    if config.encoder is not None and config.decoder is not None:
        return f"{config.encoder.num_layers} + {config.decoder.num_layers} layers"
    return format_count(config.stack.num_layers, "layer") + (" of an encoder" if config.decoder is None else "")


def request_lines(plan: MemoryPlan) -> str:
    """What is to be held: rows, sources, and how they lie."""
    cache, config = plan.cache, plan.config
    if config.decoder is None:
        return f"{format_count(cache.max_num_seqs, 'text')} of {format_count(cache.max_seq_len, 'token')} at once"
    rows = f"{format_count(cache.max_num_seqs, 'row')} of {format_count(cache.max_seq_len, 'token')}"
    source = "" if config.encoder_input is None else f", {cache.max_source_len:,} of source each"
    blocks = f"in blocks of {cache.block_size}" if cache.layout == "paged" else "one block each"
    policy = "" if cache.policy == "full" else f", under {cache.policy}"
    ends = ", without an end" if resolve_for_model(config, cache).endless else ""
    return f"{rows}{ends}{source}, {cache.layout}, {blocks}{policy}"


def memory_lines(plan: MemoryPlan) -> list[str]:
    """The table of bytes, and what each group of layers takes per token and per row."""
    pool = [
        ("cache payload", plan.payload, f"{_format_formats(plan.cache)} of the rows asked, exact"),
        *([("cache scales", plan.scales, "scales and zeros of the rows asked, exact")] if plan.scales else []),
        ("cache columns", plan.metadata, f"{_columns(plan)} of the rows asked, exact"),
        ("cache reserved", plan.reserved, f"{_parts(plan)} of 2 more blocks per group, exact"),
    ]
    if not plan.groups:
        pool = [("cache", 0, "none: an encoder keeps nothing between two steps")]
    gathered = "keys and values gathered for one layer, masks" if plan.groups else "masks of one layer"
    spilled = [
        ("spilled", plan.offload.ram_bytes, "older tokens in host memory, exact"),
        (
            "staging",
            plan.offload.staging_bytes + plan.offload.checksum_bytes,
            "two tiles of them, and checksums of those on disk, exact",
        ),
    ]
    if plan.deterministic:
        gathered += ", tiles"
    table = [
        ("weights", plan.weights, f"{plan.weights_dtype}, exact"),
        *([("compressor", plan.summarizer, "float32, exact")] if plan.summarizer else []),
        *pool,
        *(spilled if plan.offload.shares else []),
        ("scratch", plan.scratch, f"at most: {gathered}{_scores(plan)}"),
        ("activations", plan.activations, f"at most: {_step(plan)}"),
        *([("parking", plan.swap_bytes, "of host memory for rows that give way, as asked")] if plan.swap_bytes else []),
        *(
            [
                (
                    "tiers",
                    plan.prefix_cache_host_bytes,
                    "in host memory, at most: blocks given up, and those to be written",
                )
            ]
            if plan.prefix_cache_host_bytes
            else []
        ),
        ("total", plan.total, "beside the interpreter and torch"),
        *(
            [("on disk", plan.offload.disk_bytes, "beside it: when all rows are at their longest")]
            if plan.offload.disk_bytes
            else []
        ),
        *([("parked row", plan.swapped_seq_bytes, SWAP_NOTE)] if plan.swapped_seq_bytes else []),
    ]
    lines = [f"{name:<15}{size:>21,}  {format_bytes(size):>11}   {note}" for name, size, note in table]
    for number in range(len(plan.groups)):
        lines += ["", *_group_lines(plan, number)]
    return lines


def _scores(plan: MemoryPlan) -> str:
    stacks = [stack for stack in (plan.config.encoder, plan.config.decoder) if stack is not None]
    positions = [layer.attention.position for stack in stacks for layer in stack.layer_types.values()]
    return ", scores" if any(isinstance(position, (AlibiConfig, T5BiasConfig)) for position in positions) else ""


def _step(plan: MemoryPlan) -> str:
    cache, config = plan.cache, plan.config
    read = f"{sizing.activations.max_encoder_tokens(config, cache, plan.max_num_batched_tokens):,}"
    if config.decoder is None:
        return f"a step of {format_count(sizing.activations.max_encoder_tokens(config, cache, plan.max_num_batched_tokens), 'token')} of texts"
    tokens = format_count(
        sizing.activations.max_decoder_tokens(cache, plan.max_num_batched_tokens, [each.group for each in plan.groups]),
        "new token",
    )
    logits = f"{tokens}, {format_count(cache.max_num_seqs, 'row')} of logits"
    return f"a step of {logits}" if config.encoder is None else f"{logits}; or {read} of source"


def _group_lines(plan: MemoryPlan, number: int) -> list[str]:
    each = plan.groups[number]
    group, size, mixer = each.group, each.bytes, each.group.spec
    row = "source" if mixer.is_cross_attention else "row"
    dims = f"{mixer.head_dim}" if mixer.head_dim == mixer.value_dim else f"{mixer.head_dim} + {mixer.value_dim}"
    heads = f"{format_count(mixer.num_kv_heads, 'key-value head')} of {dims}"
    slots = f"{group.max_blocks_per_seq:,} x {format_count(group.block_size, 'slot')}"
    layers = planning.report.group_layers(plan, each)
    return [
        f"group {number}: {planning.group_summary.layer_names(layers)} ({len(layers)}): {planning.group_summary.describe_retention(group, attention_specs(plan.config))}, {planning.group_summary.describe_format(group)}",
        f"  {'' if group.lower_level is None else f'below group {group.lower_level.upper_group}; '}{heads}",
        f"  per token   {_sizes(size.per_token_payload, size.per_token_scales, size.per_token_metadata)}",
        f"  per {row:<7} {_sizes(each.seq_payload, each.seq_scales, each.seq_metadata)} ({slots})",
        f"  all rows    {_sizes(each.payload, each.scales, each.metadata)}, reserved {each.reserved:,}",
    ]


def _sizes(payload: int, scales: int, columns: int) -> str:
    return f"payload {payload:,}, {f'scales {scales:,}, ' if scales else ''}columns {columns:,}"


def _columns(plan: MemoryPlan) -> str:
    groups = [each.group for each in plan.groups]
    more = [
        *(
            ["attention per head"]
            if any(group.eviction_policy is not None and group.eviction_policy.observed_queries for group in groups)
            else []
        ),
        *(["bounds per block"] if any(group.sparse_read_policy is not None for group in groups) else []),
        *(
            ["weights of summaries"]
            if any(group.lower_level and group.lower_level.ratio > 1 for group in groups)
            else []
        ),
    ]
    return ", ".join(
        ["positions, also per head" if any(g.eviction_policy for g in groups) else "int64 positions", *more]
    )


def _format_formats(cache: CacheConfig) -> str:
    keys, values = cache_lib.quantization.split_format_name(cache.format_name)
    return f"{keys} keys and values" if keys == values else f"{keys} keys and {values} values"


def _parts(plan: MemoryPlan) -> str:
    return "payload, scales and columns" if plan.scales else "payload and columns"


def _rank_lines(report: PlanReport) -> list[str]:
    """What each rank of a mesh has; of the pool, reserved blocks included."""
    first, plan = report.ranks[0].mesh, report.plan
    rows = [("rank", "tensor", "stage", "layers", "weights", "pool", "both", "")]
    for rank in report.ranks:
        mesh, sizes = rank.mesh, (rank.weights, rank.pool, rank.total)
        at = (mesh.rank, mesh.tensor_rank, mesh.stage, planning.group_summary.layer_names(tuple(rank.layers)))
        rows.append((*map(str, at), *(f"{size:,}" for size in sizes), format_bytes(rank.total)))  # type: ignore[arg-type]
    widths = [max(len(row[column]) for row in rows) for column in range(8)]
    work = plan.scratch + plan.activations
    return [
        f"a mesh of {first}, exact:",
        *(
            "  " + "  ".join(each.rjust(width) for each, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ),
        f"and on each rank, at most, {work:,} for a step: what the whole model's takes",
    ]


def _speed_lines(report: PlanReport) -> list[str]:
    where = "measured here" if report.measured else "as given"
    lines = [f"decoding at {report.bandwidth / 1e9:.1f} GB/s ({where}), if reading memory were all there is:"]
    source = f", {report.plan.cache.max_source_len:,} of source" if report.plan.config.encoder_input is not None else ""
    for speed in report.speeds:
        load = f"{format_count(speed.rows, 'row')} at {format_count(speed.context, 'token')}{source}"
        lines.append(
            f"  {load}: {format_bytes(speed.step_bytes)} per step, at most {speed.tokens_per_second:,.1f} tokens/s"
        )
    return lines


def _fit_lines(report: PlanReport) -> list[str]:
    assert report.fit is not None
    cache, config = report.plan.cache, report.plan.config
    table = report.table
    if not report.fits and not (table and table.rows):
        return [
            f"in {format_bytes(report.fit)} not even one row of one block fits",
            *_weights_too_large(report, report.fit),
        ]
    sources = "" if config.encoder_input is None else f", sources of {format_count(cache.max_source_len, 'token')}"
    first = f"in {format_bytes(report.fit)}, weights and work included{sources}:"
    if table is None:
        return [
            first,
            f"  {'rows':>6}  {'tokens each':>12}  {'takes':>11}",
            *(f"  {fit.num_seqs:>6,}  {fit.max_seq_len:>12,}  {format_bytes(fit.bytes):>11}" for fit in report.fits),
        ]
    rows = [("rows", "tokens each", "takes", "stored", "policy", "quality"), *map(_format_fit_row, table.rows)]
    stored, policy = (max(len(row[column]) for row in rows) for column in (3, 4))
    return [
        first,
        *(f"  {a:>6}  {b:>12}  {c:>11}  {d:<{stored}}  {e:<{policy}}  {f}" for a, b, c, d, e, f in rows),
        *(["  nothing fits so"] if not table.rows else []),
        *(f"not for this model: {each}" for each in table.refused),
        *table.sources,
        *(["as measured on these models; another pays another price (--prices)"] if table.sources else []),
    ]


def _format_fit_row(offer: planning.fit.FitRow) -> tuple[str, ...]:
    size = format_bytes(offer.bytes)
    return f"{offer.num_seqs:,}", f"{offer.context:,}", size, offer.cache_format, offer.policy, _quality(offer)


def _quality(offer: planning.fit.FitRow) -> str:
    """As it was measured; nothing in between."""
    if offer.is_lossless:
        return "as computed"
    perplexity, needle = offer.perplexity, offer.needle
    said = [
        *([f"perplexity x{perplexity.perplexity_ratio:,.3f}"] if perplexity is not None else []),
        *([f"finds {needle.recall['single']:.0%}"] if needle is not None else []),
    ]
    return ", ".join(said) or "not measured"


def _weights_too_large(report: PlanReport, fit: int) -> list[str]:
    short = planning.fit.weights_shortfall(report.plan, fit)
    if short is None:
        return ["  a smaller --context, --chunk or --budget leaves more of it to the cache"]
    missing, dtype, weights = short
    lines = [f"  the weights alone take {format_bytes(report.plan.weights)}, {format_bytes(missing)} more than that"]
    if report.plan.weights_dtype in ("bfloat16", "float16"):
        return [*lines, "  a smaller model would fit: kvad plan --shapes"]
    if weights <= fit:
        return [*lines, f"  in {dtype} they take {format_bytes(weights)}: --weights-dtype {dtype}"]
    missing = weights - fit
    return [*lines, f"  and in {dtype} still {format_bytes(missing)} more: a smaller model would (kvad plan --shapes)"]
