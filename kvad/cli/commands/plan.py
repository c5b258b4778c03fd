"""``kvad plan CONFIG|MODEL|NAME``: memory of a model and its cache, decoding speed, and configurations that fit.

The plan needs only the config: no weights are loaded, and torch is imported for Hugging Face configs only. The page
lists exact bytes first, then each cache group, speed and what fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click

from kvad import cache as cache_lib
from kvad import config as cfg
from kvad import config as config_lib
from kvad import planning
from kvad.cache import CacheConfig, resolve_for_model, sizing
from kvad.cache.sizing import MemoryPlan
from kvad.cli.fields import argument, command, flag_of, option
from kvad.cli.output import format_bytes, format_table, print_result
from kvad.cli.parameters import (
    INTEGERS,
    NUMBERS,
    POSITIVE_SIZE,
    EndlessOption,
    JsonOption,
    PolicyOptions,
    PrefixCacheOptions,
    cache_fields,
)
from kvad.config import ModelConfig, attention_specs
from kvad.errors import UsageError, format_count, suggest
from kvad.planning import PlanReport


class _PlanOptions(PolicyOptions, EndlessOption, PrefixCacheOptions, JsonOption):
    target: str | None = argument("CONFIG|MODEL|NAME")
    list_models: bool = option("List the models known by name")
    max_seq_len: tuple[int, ...] | None = option(
        "Maximum tokens of a sequence [default: the model's limit]", short="-c", kind=INTEGERS
    )
    max_source_len: int | None = option("Maximum tokens of the encoder input [default: the encoder's limit]")
    max_num_seqs: tuple[int, ...] | None = option("Number of sequences [default: 8]", kind=INTEGERS)
    cache_dtype: str | None = option("Format of keys and values [default: --dtype]", metavar="FORMAT")
    cache_key_dtype: str | None = option("Format of the keys [default: --cache-dtype]", metavar="FORMAT")
    cache_value_dtype: str | None = option("Format of the values [default: --cache-dtype]", metavar="FORMAT")
    dtype: str | None = option(
        "Dtype of the weights and the computation [default: as stored, else float32]", metavar="DTYPE"
    )
    layout: Literal["paged", "contiguous"] = option("Cache layout", "paged")
    block_size: int = option("Tokens per block (paged layout)", 16)
    deterministic: bool = option("Include the memory of batch-invariant kernels")
    prefill_chunk_size: int = option("Maximum new tokens of one sequence per step", 512)
    max_num_batched_tokens: int = option("Maximum new tokens of all sequences per step", 2048)
    fit_memory: int | None = option(
        "List configurations that fit into this memory; --max-seq-len and --max-num-seqs may have several values",
        kind=POSITIVE_SIZE,
    )
    compression_ratios: tuple[float, ...] = option(
        "With --fit-memory: fractions of a sequence to evict, such as 0.5,0.75", (0.75,), kind=NUMBERS
    )
    quality_results: Path | None = option(
        "With --fit-memory: folder of kvad bench cache-quality --out with quality measurements [default: packaged]"
    )
    mesh: str | None = option(
        "Plan each rank of a mesh of T tensor ranks by P pipeline stages, such as 2x1 [default: one device]",
        metavar="TxP",
    )
    bandwidth: float | None = option("Memory bandwidth [default: measured]", metavar="GB/s")


@command("plan", _PlanOptions)
def plan_command(options: _PlanOptions) -> None:
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
    from kvad import checkpoint
    from kvad.cache.sizing import available_bytes, measure_bandwidth
    from kvad.parallel import Mesh
    from kvad.planning import build_report, plan_target, read_target, report_to_json

    if options.list_models:
        _list_known_models(options.as_json)
        return
    if options.target is None:
        raise click.UsageError("Missing argument 'CONFIG|MODEL|NAME'; --list-models lists the known names.")
    fields = _check_options(options)
    ranks = None if options.mesh is None else Mesh.parse(options.mesh)
    plan_input = read_target(options.target)
    summarizer = options.summarizer
    planned = plan_target(
        plan_input,
        context=None if options.max_seq_len is None else max(options.max_seq_len),
        source_context=options.max_source_len,
        weights_dtype=options.dtype,
        dtype=options.cache_dtype,
        key_dtype=options.cache_key_dtype,
        value_dtype=options.cache_value_dtype,
        budget=options.max_num_batched_tokens,
        learned=None if summarizer is None else checkpoint.folder.read_summarizer_shape(summarizer),
        deterministic=options.deterministic,
        max_num_seqs=max(options.max_num_seqs or (8,)),
        **fields,
    )
    bandwidth = options.bandwidth
    report = build_report(
        plan_input.name,
        planned,
        available=available_bytes(),
        bandwidth=measure_bandwidth() if bandwidth is None else bandwidth * 1e9,
        measured=bandwidth is None,
        fit=options.fit_memory,
        table=_fit_table(planned, options),
        mesh=ranks,
    )
    print_result(options.as_json, report_to_json(report), plan_text(report))


def _check_options(options: _PlanOptions) -> dict[str, Any]:
    """Check the options that do not depend on the model; return the fields of CacheConfig but sizes and formats."""
    if options.bandwidth is not None and not options.bandwidth > 0:
        raise click.BadParameter("must be above 0", param_hint="--bandwidth")
    _check_dtypes(options, ("dtype",), config_lib.DTYPE_BYTES)
    formats = ("cache_dtype", "cache_key_dtype", "cache_value_dtype")
    _check_dtypes(options, formats, cache_lib.quantization.FORMATS)
    if options.mesh is not None and options.fit_memory is not None:
        raise UsageError("--fit-memory and --mesh exclude each other", "give one of them")
    if options.fit_memory is None and max(len(options.max_seq_len or ()), len(options.max_num_seqs or ())) > 1:
        raise UsageError(
            "several values of --max-seq-len or --max-num-seqs need --fit-memory",
            "add the memory, as in --fit-memory 8GiB",
        )
    return cache_fields(replace(options, max_seq_len=None, max_num_seqs=None, max_source_len=None))


def _check_dtypes(options: _PlanOptions, names: Iterable[str], known: Iterable[str]) -> None:
    """Check the dtypes here, where the error can name the flag."""
    for name in names:
        dtype = getattr(options, name)
        is_custom = ":" in (dtype or "") and known is cache_lib.quantization.FORMATS
        if dtype is not None and dtype not in known and not is_custom:
            raise UsageError(f"{flag_of(name)}: unknown dtype {dtype!r}", suggest(dtype, known))


def _fit_table(planned: MemoryPlan, options: _PlanOptions) -> planning.fit.FitTable | None:
    if options.fit_memory is None or planned.config.decoder is None:
        return None
    ratios, limit = options.compression_ratios, planned.config.max_seq_len
    if not all(0 < fraction < 1 for fraction in ratios):
        raise UsageError(f"--compression-ratios: must be between 0 and 1, got {','.join(map(str, ratios))}")
    contexts, rows = options.max_seq_len, options.max_num_seqs or ()
    for value in (*(contexts or ()), *rows):
        if value < 1:
            raise UsageError(f"--max-seq-len and --max-num-seqs: must be at least 1, got {value}")
    lengths = (limit // 4, limit) if limit >= 256 else (limit,)
    results = planning.fit.PACKAGED_COSTS if options.quality_results is None else options.quality_results
    return planning.fit.find_configurations(
        planned,
        options.fit_memory,
        contexts=contexts if contexts is not None else () if rows else lengths,
        rows=rows,
        choices=planning.fit.policy_choices(planned, list(ratios)),
        formats=planning.fit.format_choices(planned),
        costs=planning.fit.read_costs(results),
    )


def _list_known_models(as_json: bool) -> None:
    from kvad.planning import KNOWN_MODELS

    sizes = {name: config_lib.parameter_shapes.num_parameters(build()) for name, build in KNOWN_MODELS.items()}
    lines = [f"{name:<17}{n:>18,} parameters  {format_bytes(4 * n):>12} in float32" for name, n in sizes.items()]
    print_result(as_json, sizes, lines)


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
    gathered = "gathered keys and values of one layer, masks" if plan.groups else "masks of one layer"
    parts = "payload, scales and metadata" if plan.scales else "payload and metadata"
    cache = [
        ("cache payload", plan.payload, f"{_format_formats(plan.cache)} of the sequences, exact"),
        *_if_any("cache scales", plan.scales, "scales and zeros of the sequences, exact"),
        ("cache metadata", plan.metadata, f"{_metadata(plan)} of the sequences, exact"),
        ("cache reserved", plan.reserved, f"{parts} of 2 more blocks per group, exact"),
    ]
    staging = plan.offload.staging_bytes + plan.offload.checksum_bytes
    offloaded = [
        ("offloaded", plan.offload.ram_bytes, "older tokens in host memory, exact"),
        ("staging", staging, "two tiles of them, and checksums of the tokens on disk, exact"),
    ]
    table = [
        ("weights", plan.weights, f"{plan.weights_dtype}, exact"),
        *_if_any("summarizer", plan.summarizer, "float32, exact"),
        *(cache if plan.groups else [("cache", 0, "none: an encoder has no cache")]),
        *(offloaded if plan.offload.shares else []),
        ("scratch", plan.scratch, f"at most: {gathered}{', tiles' if plan.deterministic else ''}{_scores(plan)}"),
        ("activations", plan.activations, f"at most: {_step(plan)}"),
        *_if_any("swap space", plan.cache.swap_space, "host memory for preempted sequences, as requested"),
        *_if_any(
            "prefix cache", plan.prefix_cache_host_bytes, "at most, in host memory: evicted blocks and blocks to write"
        ),
        ("total", plan.total, "without the interpreter and torch"),
        *_if_any("on disk", plan.offload.disk_bytes, "in addition: with all sequences at full length"),
        *_if_any("swapped seq", plan.swapped_seq_bytes, "at most, in host memory, for each preempted sequence"),
    ]
    lines = [f"{name:<15}{size:>21,}  {format_bytes(size):>11}   {note}" for name, size, note in table]
    for index in range(len(plan.groups)):
        lines += ["", *_group_lines(plan, index)]
    return lines


def _if_any(name: str, size: int | None, text: str) -> list[tuple[str, int, str]]:
    return [(name, size, text)] if size else []


def _scores(plan: MemoryPlan) -> str:
    stacks = [stack for stack in (plan.config.encoder, plan.config.decoder) if stack is not None]
    positions = [layer.attention.position for stack in stacks for layer in stack.layer_types.values()]
    return (
        ", scores" if any(isinstance(position, (cfg.AlibiConfig, cfg.T5BiasConfig)) for position in positions) else ""
    )


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
    names = planning.layer_names(layers)
    retention = planning.describe_retention(group, attention_specs(plan.config))
    total = _sizes(group_plan.payload, group_plan.scales, group_plan.metadata)
    return [
        f"group {index}: {names} ({len(layers)}): {retention}, {planning.describe_format(group)}",
        f"  {'' if group.lower_level is None else f'below group {group.lower_level.upper_group}; '}{heads}",
        f"  per token   {_sizes(size.per_token_payload, size.per_token_scales, size.per_token_metadata)}",
        f"  per {row:<7} {_sizes(group_plan.seq_payload, group_plan.seq_scales, group_plan.seq_metadata)} ({slots})",
        f"  all seqs    {total}, reserved {group_plan.reserved:,}",
    ]


def _sizes(payload: int, scales: int, metadata: int) -> str:
    return f"payload {payload:,}, {f'scales {scales:,}, ' if scales else ''}metadata {metadata:,}"


def _metadata(plan: MemoryPlan) -> str:
    groups = [each.group for each in plan.groups]
    parts = ["positions, also per head" if any(group.eviction_policy for group in groups) else "int64 positions"]
    if any(group.eviction_policy is not None and group.eviction_policy.observed_queries for group in groups):
        parts.append("attention per head")
    if any(group.sparse_read_policy is not None for group in groups):
        parts.append("key bounds per block")
    if any(group.lower_level and group.lower_level.ratio > 1 for group in groups):
        parts.append("weights of summaries")
    return ", ".join(parts)


def _format_formats(cache: CacheConfig) -> str:
    keys, values = cache_lib.quantization.split_format_name(cache.format_name)
    return f"{keys} keys and values" if keys == values else f"{keys} keys and {values} values"


def _rank_lines(report: PlanReport) -> list[str]:
    """Format the bytes of each rank of a mesh; the pool includes reserved blocks."""
    first, plan = report.ranks[0].mesh, report.plan
    rows = [("rank", "tensor", "stage", "layers", "weights", "pool", "both", "")]
    for rank in report.ranks:
        layers = planning.layer_names(tuple(rank.layers))
        sizes = (f"{rank.weights:,}", f"{rank.pool:,}", f"{rank.total:,}", format_bytes(rank.total))
        rows.append((str(rank.mesh.rank), str(rank.mesh.tensor_rank), str(rank.mesh.stage), layers, *sizes))
    return [
        f"a mesh of {first}, exact:",
        *(f"  {line}" for line in format_table(rows, left=())),
        f"and on each rank, at most, {plan.scratch + plan.activations:,} for a step: as for the whole model",
    ]


def _speed_lines(report: PlanReport) -> list[str]:
    where = "measured" if report.measured else "as given"
    lines = [f"decoding at {report.bandwidth / 1e9:.1f} GB/s ({where}), an upper bound by memory bandwidth:"]
    plan = report.plan
    source = "" if plan.config.encoder_input is None else f", {plan.cache.max_source_len:,} of encoder input"
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
        rows = [("seqs", "tokens each", "takes")]
        rows += [(f"{fit.num_seqs:,}", f"{fit.max_seq_len:,}", format_bytes(fit.bytes)) for fit in report.fits]
        return [first, *(f"  {line}" for line in format_table(rows, left=()))]
    columns = ("seqs", "tokens each", "takes", "stored", "policy", "quality")
    return [
        first,
        *(f"  {line}" for line in format_table([columns, *map(_format_fit_row, table.rows)], left=(3, 4, 5))),
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
    parts = [] if row.perplexity is None else [f"perplexity x{row.perplexity.perplexity_ratio:,.3f}"]
    if row.needle is not None:
        parts.append(f"finds {row.needle.recall['single']:.0%}")
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
