"""``kvad plan CONFIG|MODEL|NAME``: memory of a model and its cache, decoding speed, and configurations that fit.

The plan needs only the config: no weights are loaded, and torch is imported for Hugging Face configs only. The page
lists exact bytes first, then each cache group, speed and what fits.
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
    """One or several counts: ``4096`` or ``1024,4096``."""

    name = "N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return value if isinstance(value, tuple) else tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a whole number, or several separated by commas", param, ctx)


COUNTS = _Counts()


@click.command(cls=SectionedCommand)
@click.argument("target", metavar="CONFIG|MODEL|NAME", required=False)
@click.option("--list-models", is_flag=True, help="List the models known by name.")
@click.option("-c", "--max-seq-len", type=COUNTS, help="Maximum tokens of a sequence [default: the model's limit].")
@click.option("--max-source-len", type=int, help="Maximum tokens of the encoder input [default: the encoder's limit].")
@click.option("--max-num-seqs", type=COUNTS, help="Number of sequences [default: 8].")
@click.option("--cache-dtype", metavar="FORMAT", help="Format of keys and values [default: --dtype].")
@click.option("--cache-key-dtype", metavar="FORMAT", help="Format of the keys [default: --cache-dtype].")
@click.option("--cache-value-dtype", metavar="FORMAT", help="Format of the values [default: --cache-dtype].")
@click.option(
    "--dtype", metavar="DTYPE", help="Dtype of the weights and the computation [default: as stored, else float32]."
)
@click.option("--layout", type=click.Choice(LAYOUTS), default="paged", show_default=True, help="Cache layout.")
@click.option("--block-size", type=int, default=16, show_default=True, help="Tokens per block (paged layout).")
@policy_options
@swap_space_option
@prefix_cache_options
@click.option(
    "--summarizer",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="Summarizer for a tiered policy with summaries.",
)
@click.option("--deterministic", is_flag=True, help="Include the memory of batch-invariant kernels.")
@click.option(
    "--prefill-chunk-size",
    type=int,
    default=512,
    show_default=True,
    help="Maximum new tokens of one sequence per step.",
)
@click.option(
    "--max-num-batched-tokens",
    type=int,
    default=2048,
    show_default=True,
    help="Maximum new tokens of all sequences per step.",
)
@click.option(
    "--fit-memory",
    type=ByteSize("must be at least 1 byte"),
    help="List configurations that fit into this memory; --max-seq-len and --max-num-seqs may have several values.",
)
@click.option(
    "--compression-ratios",
    default="0.75",
    show_default=True,
    help="With --fit-memory: fractions of a sequence to evict, such as 0.5,0.75.",
)
@click.option(
    "--quality-results",
    metavar="FOLDER",
    type=click.Path(path_type=Path),
    help="With --fit-memory: folder of kvad bench cache-quality --out with quality measurements [default: packaged].",
)
@click.option(
    "--mesh",
    metavar="TxP",
    help="Plan each rank of a mesh of T tensor ranks by P pipeline stages, such as 2x1 [default: one device].",
)
@click.option("--bandwidth", type=float, metavar="GB/s", help="Memory bandwidth [default: measured].")
@json_option
def plan_command(
    target: str | None,
    list_models: bool,
    max_seq_len: tuple[int, ...] | None,
    max_source_len: int | None,
    max_num_seqs: tuple[int, ...] | None,
    cache_dtype: str | None,
    cache_key_dtype: str | None,
    cache_value_dtype: str | None,
    dtype: str | None,
    layout: str,
    block_size: int,
    summarizer: Path | None,
    deterministic: bool,
    prefill_chunk_size: int,
    max_num_batched_tokens: int,
    fit_memory: int | None,
    compression_ratios: str,
    quality_results: Path | None,
    mesh: str | None,
    bandwidth: float | None,
    as_json: bool,
    **policies: Any,
) -> None:
    """Estimate the memory of a model and its cache without loading the model.

    The bytes of weights and cache are exact; those of a step's activations are an upper bound. CONFIG is a config.json
    of kvad or Hugging Face: a file, a folder or a name on the hub.

    \b
    kvad plan runs/demo --max-seq-len 4096 --max-num-seqs 8
    kvad plan t5-base --max-source-len 512 --max-seq-len 128 --max-num-seqs 32
    kvad plan llama-3-8b --max-seq-len 8192 --max-num-seqs 1 --cache-dtype bfloat16 --dtype bfloat16 --fit-memory 24GiB
    kvad plan llama-3-8b --dtype bfloat16 --fit-memory 24GiB --max-seq-len 8192 --max-num-seqs 1,4
    kvad plan smollm-135m --cache-key-dtype int8 --cache-value-dtype int4
    kvad plan gpt2 --policy "sinks(4, 252)"
    kvad plan gpt2 --max-seq-len 256 --overflow offload --offload-ram 64MiB --swap-space 256MiB
    kvad plan llama-3-8b --dtype bfloat16 --max-seq-len 8192 --max-num-seqs 8 --mesh 4x1
    """
    from kvad import checkpoint, config
    from kvad.cache.sizing import available_bytes
    from kvad.parallel import Mesh
    from kvad.planning import build_report, measure_bandwidth, plan_target, read_target, report_to_json

    if list_models:
        _list_known_models(as_json)
        return
    if target is None:
        raise click.UsageError("Missing argument 'CONFIG|MODEL|NAME'; --list-models lists the known names.")
    if bandwidth is not None and not bandwidth > 0:
        raise click.BadParameter("must be above 0", param_hint="--bandwidth")
    _check({"--dtype": dtype}, config.DTYPE_BYTES)
    formats = {
        "--cache-dtype": cache_dtype,
        "--cache-key-dtype": cache_key_dtype,
        "--cache-value-dtype": cache_value_dtype,
    }
    _check(formats, cache.quantization.FORMATS)
    if mesh is not None and fit_memory is not None:
        raise UsageError("--fit-memory and --mesh exclude each other", "give one of them")
    ranks = None if mesh is None else Mesh.parse(mesh)
    fields = {**parse_policy_options(policies), **parse_prefix_cache_options(policies)}
    if fit_memory is None:
        _require_single(max_seq_len, max_num_seqs)
    plan_input = read_target(target)
    planned = plan_target(
        plan_input,
        context=None if max_seq_len is None else max(max_seq_len),
        source_context=max_source_len,
        weights_dtype=dtype,
        dtype=cache_dtype,
        key_dtype=cache_key_dtype,
        value_dtype=cache_value_dtype,
        budget=max_num_batched_tokens,
        learned=None if summarizer is None else checkpoint.folder.read_summarizer_shape(summarizer),
        deterministic=deterministic,
        max_num_seqs=8 if max_num_seqs is None else max(max_num_seqs),
        layout=layout,
        block_size=block_size,
        prefill_chunk_size=prefill_chunk_size,
        **fields,
    )
    speed = measure_bandwidth() if bandwidth is None else bandwidth * 1e9
    table = None
    if fit_memory is not None and plan_input.config.decoder is not None:
        table = _table(planned, fit_memory, max_seq_len, max_num_seqs, compression_ratios, quality_results)
    report = build_report(
        plan_input.name,
        planned,
        available=available_bytes(),
        bandwidth=speed,
        measured=bandwidth is None,
        fit=fit_memory,
        table=table,
        mesh=ranks,
    )
    if as_json:
        emit_json(report_to_json(report))
        return
    click.echo(plan_text(report))


def _require_single(*counts: tuple[int, ...] | None) -> None:
    if any(values is not None and len(values) > 1 for values in counts):
        raise UsageError(
            "several values of --max-seq-len or --max-num-seqs need --fit-memory",
            "add the memory, as in --fit-memory 8GiB",
        )


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
        fractions = [float(part) for part in ratios.split(",")]
    except ValueError:
        raise UsageError(f"--compression-ratios: cannot read {ratios!r}", "write it like 0.5,0.75") from None
    if not all(0 < fraction < 1 for fraction in fractions):
        raise UsageError(f"--compression-ratios: must be between 0 and 1, got {ratios}")
    for value in (*(context or ()), *(rows or ())):
        if value < 1:
            raise UsageError(f"--max-seq-len and --max-num-seqs: must be at least 1, got {value}")
    lengths = (limit // 4, limit) if limit >= 256 else (limit,)
    return planning.fit.find_configurations(
        planned,
        size,
        contexts=context if context is not None else lengths if rows is None else (),
        rows=rows or (),
        choices=planning.fit.policy_choices(planned, fractions),
        formats=planning.fit.format_choices(planned),
        costs=planning.fit.read_costs(planning.fit.PACKAGED_COSTS if prices is None else prices),
    )


def _check(dtypes: dict[str, str | None], known: Iterable[str]) -> None:
    """Check the dtypes here, where the error can name the flag."""
    for flag, dtype in dtypes.items():
        if dtype is not None and dtype not in known and not (":" in dtype and known is cache.quantization.FORMATS):
            raise UsageError(f"{flag}: unknown dtype {dtype!r}", suggest(dtype, known))


def _list_known_models(as_json: bool) -> None:
    from kvad import config
    from kvad.planning import KNOWN_MODELS

    sizes = {name: config.parameter_shapes.num_parameters(build()) for name, build in KNOWN_MODELS.items()}
    if as_json:
        emit_json(sizes)
        return
    for name, count in sizes.items():
        click.echo(f"{name:<17}{count:>18,} parameters  {format_bytes(4 * count):>12} in float32")


SWAP_NOTE = "at most, in host memory, for each preempted sequence"


def plan_text(report: PlanReport) -> str:
    """Format the whole page, without a final newline."""
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
    """Describe the planned sequences, encoder inputs, layout and policy."""
    cache, config = plan.cache, plan.config
    if config.decoder is None:
        return f"{format_count(cache.max_num_seqs, 'text')} of {format_count(cache.max_seq_len, 'token')} at once"
    seqs = f"{format_count(cache.max_num_seqs, 'sequence')} of {format_count(cache.max_seq_len, 'token')}"
    source = "" if config.encoder_input is None else f", {cache.max_source_len:,} of source each"
    blocks = f"in blocks of {cache.block_size}" if cache.layout == "paged" else "one block each"
    policy = "" if cache.policy == "full" else f", under {cache.policy}"
    ends = ", without a length limit" if resolve_for_model(config, cache).endless else ""
    return f"{seqs}{ends}{source}, {cache.layout}, {blocks}{policy}"


def memory_lines(plan: MemoryPlan) -> list[str]:
    """Format the table of bytes, and the bytes of each cache group per token and per sequence."""
    pool = [
        ("cache payload", plan.payload, f"{_format_formats(plan.cache)} of the sequences, exact"),
        *([("cache scales", plan.scales, "scales and zeros of the sequences, exact")] if plan.scales else []),
        ("cache metadata", plan.metadata, f"{_metadata(plan)} of the sequences, exact"),
        ("cache reserved", plan.reserved, f"{_parts(plan)} of 2 more blocks per group, exact"),
    ]
    if not plan.groups:
        pool = [("cache", 0, "none: an encoder has no cache")]
    gathered = "gathered keys and values of one layer, masks" if plan.groups else "masks of one layer"
    offloaded = [
        ("offloaded", plan.offload.ram_bytes, "older tokens in host memory, exact"),
        (
            "staging",
            plan.offload.staging_bytes + plan.offload.checksum_bytes,
            "two tiles of them, and checksums of the tokens on disk, exact",
        ),
    ]
    if plan.deterministic:
        gathered += ", tiles"
    table = [
        ("weights", plan.weights, f"{plan.weights_dtype}, exact"),
        *([("summarizer", plan.summarizer, "float32, exact")] if plan.summarizer else []),
        *pool,
        *(offloaded if plan.offload.shares else []),
        ("scratch", plan.scratch, f"at most: {gathered}{_scores(plan)}"),
        ("activations", plan.activations, f"at most: {_step(plan)}"),
        *(
            [("swap space", plan.swap_bytes, "host memory for preempted sequences, as requested")]
            if plan.swap_bytes
            else []
        ),
        *(
            [
                (
                    "prefix cache",
                    plan.prefix_cache_host_bytes,
                    "at most, in host memory: evicted blocks and blocks to write",
                )
            ]
            if plan.prefix_cache_host_bytes
            else []
        ),
        ("total", plan.total, "without the interpreter and torch"),
        *(
            [("on disk", plan.offload.disk_bytes, "in addition: with all sequences at full length")]
            if plan.offload.disk_bytes
            else []
        ),
        *([("swapped seq", plan.swapped_seq_bytes, SWAP_NOTE)] if plan.swapped_seq_bytes else []),
    ]
    lines = [f"{name:<15}{size:>21,}  {format_bytes(size):>11}   {note}" for name, size, note in table]
    for index in range(len(plan.groups)):
        lines += ["", *_group_lines(plan, index)]
    return lines


def _scores(plan: MemoryPlan) -> str:
    stacks = [stack for stack in (plan.config.encoder, plan.config.decoder) if stack is not None]
    positions = [layer.attention.position for stack in stacks for layer in stack.layer_types.values()]
    return ", scores" if any(isinstance(position, (AlibiConfig, T5BiasConfig)) for position in positions) else ""


def _step(plan: MemoryPlan) -> str:
    cache, config = plan.cache, plan.config
    read = f"{sizing.activations.max_encoder_tokens(config, cache, plan.max_num_batched_tokens):,}"
    if config.decoder is None:
        num_tokens = sizing.activations.max_encoder_tokens(config, cache, plan.max_num_batched_tokens)
        return f"a step of {format_count(num_tokens, 'token')} of texts"
    tokens = format_count(
        sizing.activations.max_decoder_tokens(cache, plan.max_num_batched_tokens, [each.group for each in plan.groups]),
        "new token",
    )
    logits = f"{tokens}, {format_count(cache.max_num_seqs, 'sequence')} of logits"
    return f"a step of {logits}" if config.encoder is None else f"{logits}; or {read} of source"


def _group_lines(plan: MemoryPlan, index: int) -> list[str]:
    group_plan = plan.groups[index]
    group, size, mixer = group_plan.group, group_plan.bytes, group_plan.group.spec
    row = "source" if mixer.is_cross_attention else "seq"
    dims = f"{mixer.head_dim}" if mixer.head_dim == mixer.value_dim else f"{mixer.head_dim} + {mixer.value_dim}"
    heads = f"{format_count(mixer.num_kv_heads, 'key-value head')} of {dims}"
    slots = f"{group.max_blocks_per_seq:,} x {format_count(group.block_size, 'slot')}"
    layers = planning.report.group_layers(plan, group_plan)
    names = planning.group_summary.layer_names(layers)
    retention = planning.group_summary.describe_retention(group, attention_specs(plan.config))
    total = _sizes(group_plan.payload, group_plan.scales, group_plan.metadata)
    return [
        f"group {index}: {names} ({len(layers)}): {retention}, {planning.group_summary.describe_format(group)}",
        f"  {'' if group.lower_level is None else f'below group {group.lower_level.upper_group}; '}{heads}",
        f"  per token   {_sizes(size.per_token_payload, size.per_token_scales, size.per_token_metadata)}",
        f"  per {row:<7} {_sizes(group_plan.seq_payload, group_plan.seq_scales, group_plan.seq_metadata)} ({slots})",
        f"  all seqs    {total}, reserved {group_plan.reserved:,}",
    ]


def _sizes(payload: int, scales: int, metadata: int) -> str:
    return f"payload {payload:,}, {f'scales {scales:,}, ' if scales else ''}metadata {metadata:,}"


def _metadata(plan: MemoryPlan) -> str:
    groups = [each.group for each in plan.groups]
    more = [
        *(
            ["attention per head"]
            if any(group.eviction_policy is not None and group.eviction_policy.observed_queries for group in groups)
            else []
        ),
        *(["key bounds per block"] if any(group.sparse_read_policy is not None for group in groups) else []),
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
    return "payload, scales and metadata" if plan.scales else "payload and metadata"


def _rank_lines(report: PlanReport) -> list[str]:
    """Format the bytes of each rank of a mesh; the pool includes reserved blocks."""
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
        f"and on each rank, at most, {work:,} for a step: as for the whole model",
    ]


def _speed_lines(report: PlanReport) -> list[str]:
    where = "measured" if report.measured else "as given"
    lines = [f"decoding at {report.bandwidth / 1e9:.1f} GB/s ({where}), an upper bound by memory bandwidth:"]
    source = (
        f", {report.plan.cache.max_source_len:,} of encoder input"
        if report.plan.config.encoder_input is not None
        else ""
    )
    for speed in report.speeds:
        load = f"{format_count(speed.rows, 'sequence')} at {format_count(speed.context, 'token')}{source}"
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
            f"in {format_bytes(report.fit)} not even one sequence of one block fits",
            *_weights_too_large(report, report.fit),
        ]
    sources = (
        "" if config.encoder_input is None else f", encoder inputs of {format_count(cache.max_source_len, 'token')}"
    )
    first = f"in {format_bytes(report.fit)}, weights and activations included{sources}:"
    if table is None:
        return [
            first,
            f"  {'seqs':>6}  {'tokens each':>12}  {'takes':>11}",
            *(f"  {fit.num_seqs:>6,}  {fit.max_seq_len:>12,}  {format_bytes(fit.bytes):>11}" for fit in report.fits),
        ]
    rows = [("seqs", "tokens each", "takes", "stored", "policy", "quality"), *map(_format_fit_row, table.rows)]
    stored, policy = (max(len(row[column]) for row in rows) for column in (3, 4))
    return [
        first,
        *(f"  {a:>6}  {b:>12}  {c:>11}  {d:<{stored}}  {e:<{policy}}  {f}" for a, b, c, d, e, f in rows),
        *(["  no such configuration fits"] if not table.rows else []),
        *(f"not for this model: {reason}" for reason in table.refused),
        *table.sources,
        *(["measured on these models; other models differ (--quality-results)"] if table.sources else []),
    ]


def _format_fit_row(row: planning.fit.FitRow) -> tuple[str, ...]:
    size = format_bytes(row.bytes)
    return f"{row.num_seqs:,}", f"{row.context:,}", size, row.cache_format, row.policy, _quality(row)


def _quality(row: planning.fit.FitRow) -> str:
    """Format the measured quality of a configuration."""
    if row.is_lossless:
        return "lossless"
    perplexity, needle = row.perplexity, row.needle
    parts = [
        *([f"perplexity x{perplexity.perplexity_ratio:,.3f}"] if perplexity is not None else []),
        *([f"finds {needle.recall['single']:.0%}"] if needle is not None else []),
    ]
    return ", ".join(parts) or "not measured"


def _weights_too_large(report: PlanReport, fit: int) -> list[str]:
    short = planning.fit.weights_shortfall(report.plan, fit)
    if short is None:
        smaller = "--max-seq-len, --prefill-chunk-size or --max-num-batched-tokens"
        return [f"  a smaller {smaller} leaves more memory for the cache"]
    missing, dtype, weights = short
    lines = [f"  the weights alone take {format_bytes(report.plan.weights)}, {format_bytes(missing)} too much"]
    if report.plan.weights_dtype in ("bfloat16", "float16"):
        return [*lines, "  a smaller model would fit: kvad plan --list-models"]
    if weights <= fit:
        return [*lines, f"  in {dtype} they take {format_bytes(weights)}: --dtype {dtype}"]
    missing = weights - fit
    return [
        *lines,
        f"  and in {dtype} still {format_bytes(missing)} more: a smaller model would (kvad plan --list-models)",
    ]
