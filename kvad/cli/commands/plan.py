"""``kvad plan CONFIG|MODEL|NAME``: memory of a model and its cache, decoding speed, and configurations that fit.

The plan needs only the config: no weights are loaded, and torch is imported for Hugging Face configs only. The page
lists exact bytes first, then each cache group, speed and what fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click

from kvad import api, parallel, planning
from kvad import cache as cache_lib
from kvad import config as config_lib
from kvad.cache import resolve_for_model, sizing
from kvad.cache.sizing import MemoryPlan
from kvad.cli import parameters
from kvad.cli.fields import argument, command, flag_of, option
from kvad.cli.output import format_records, format_table, print_result
from kvad.config import attention_specs
from kvad.errors import UsageError, format_bytes, format_count, suggest
from kvad.planning import PlanReport


class _PlanOptions(
    parameters.PolicyOptions,
    parameters.EndlessOption,
    parameters.PrefixCacheOptions,
    parameters.SpeculativeOptions,
    parameters.JsonOption,
):
    target: str | None = argument("CONFIG|MODEL|NAME")
    list_models: bool = option("List the models known by name")
    max_seq_len: tuple[int, ...] | None = option(
        "Maximum tokens of a sequence [default: the model's limit]", short="-c", kind=parameters.INTEGERS
    )
    max_source_len: int | None = option("Maximum tokens of the encoder input [default: the encoder's limit]")
    max_num_seqs: tuple[int, ...] | None = option("Number of sequences [default: 1]", kind=parameters.INTEGERS)
    cache_dtype: str | None = option("Format of keys and values [default: --dtype]", metavar="FORMAT")
    cache_key_dtype: str | None = option("Format of the keys [default: --cache-dtype]", metavar="FORMAT")
    cache_value_dtype: str | None = option("Format of the values [default: --cache-dtype]", metavar="FORMAT")
    dtype: str | None = option(
        "Dtype of the weights and the computation [default: as stored or published, else float32]", metavar="DTYPE"
    )
    layout: Literal["paged", "contiguous"] = option("Cache layout", "paged")
    block_size: int = option("Tokens per block (paged layout)", 16)
    deterministic: bool = option("Include the memory of batch-invariant kernels")
    prefill_chunk_size: int = option("Maximum new tokens of one sequence per step", 512)
    max_num_batched_tokens: int = option("Maximum new tokens of all sequences per step", 2048)
    memory: int | float | Literal["auto"] | None = option(
        "Memory to compare with: auto (what is available here), a size or a fraction of it [default: auto]",
        kind=parameters.MEMORY,
    )
    fit_memory: int | None = option(
        "List configurations that fit into this memory; --max-seq-len and --max-num-seqs may have several values",
        kind=parameters.POSITIVE_SIZE,
    )
    compression_ratios: tuple[float, ...] = option(
        "With --fit-memory: fractions of a sequence to evict, such as 0.5,0.75", (0.75,), kind=parameters.NUMBERS
    )
    quality_results: Path | None = option(
        "With --fit-memory: folder of kvad bench cache-quality --out with quality measurements [default: packaged]"
    )
    mesh: str | None = option(
        "Plan each rank of a mesh of T tensor ranks by P pipeline stages, such as 2x1 [default: one device]; "
        "several ranks support neither --adapter nor --draft-model",
        metavar="TxP",
    )
    adapter: tuple[str, ...] = option(
        "LoRA adapter that requests choose by name, as in kvad serve", metavar="NAME=FOLDER"
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
    kvad plan llama-3-8b --memory 24GiB
    kvad plan llama-3-8b --fit-memory 24GiB --max-seq-len 8192 --max-num-seqs 1,4
    kvad plan smollm-135m --cache-key-dtype int8 --cache-value-dtype int4
    kvad plan gpt2 --policy "sinks(4, 252)"
    kvad plan gpt2 --max-seq-len 256 --overflow offload --offload-ram 64MiB --swap-space 256MiB
    kvad plan llama-3-8b --max-seq-len 8192 --max-num-seqs 8 --mesh 4x1
    kvad plan llama-3-8b --draft-model smollm-135m
    kvad plan ./Qwen3-0.6B --adapter sql=runs/sql --max-seq-len 4096

    Exit code 1 if the given sizes, or one sequence of one block, do not fit.
    """
    if options.list_models:
        count = config_lib.parameter_shapes.num_parameters
        sizes = {name: count(build()) for name, build in planning.KNOWN_MODELS.items()}
        lines = [f"{name:<17}{n:>18,} parameters  {format_bytes(4 * n):>12} in float32" for name, n in sizes.items()]
        print_result(options.as_json, sizes, lines)
        return
    if options.target is None:
        raise click.UsageError("Missing argument 'CONFIG|MODEL|NAME'; --list-models lists the known names.")
    report = api.plan(options.target, **_settings(options))
    lines = _page(report, is_here=options.memory is None, toy_quality=options.quality_results is None)
    print_result(options.as_json, planning.report_to_json(report), lines, failed=report.is_too_large)


def _settings(options: _PlanOptions) -> dict[str, Any]:
    """Return the given options as settings of ``kvad.plan``."""
    settings = _check_options(options)
    seq_lens, num_seqs = options.max_seq_len, options.max_num_seqs
    own = {
        "max_seq_len": None if seq_lens is None else max(seq_lens),
        "max_num_seqs": None if num_seqs is None else max(num_seqs),
        "max_source_len": options.max_source_len,
        "memory": options.memory,
        "fit_memory": options.fit_memory,
        "fit_seq_lens": seq_lens,
        "fit_num_seqs": num_seqs,
        "bandwidth": None if options.bandwidth is None else options.bandwidth * 1e9,
        "speculative": parameters.speculative_config(options),
        "adapters": parameters.named_adapters(options.adapter) or None,
    }
    own |= {name: getattr(options, name) for name in api.memory.PLAN_SETTINGS if name not in own}
    return settings | {name: value for name, value in own.items() if value is not None}


def _check_options(options: _PlanOptions) -> dict[str, Any]:
    """Check the options that do not depend on the model; return the fields of CacheConfig but sizes and formats."""
    if options.bandwidth is not None and not options.bandwidth > 0:
        raise click.BadParameter("must be above 0", param_hint="--bandwidth")
    formats = cache_lib.quantization.FORMATS
    names = ("cache_dtype", "cache_key_dtype", "cache_value_dtype")
    known_names: dict[str, Iterable[str]] = {"dtype": config_lib.DTYPE_BYTES, **dict.fromkeys(names, formats)}
    for name, known in known_names.items():
        dtype = getattr(options, name)  # checked here, where the error can name the flag
        is_custom = dtype is not None and known is formats and cache_lib.quantization.is_format(dtype)
        if dtype is not None and dtype not in known and not is_custom:
            raise UsageError(f"{flag_of(name)}: unknown dtype {dtype!r}", suggest(dtype, known))
    if options.mesh is not None and options.fit_memory is not None:
        raise UsageError("--fit-memory and --mesh exclude each other", "give one of them")
    if options.fit_memory is None and max(len(options.max_seq_len or ()), len(options.max_num_seqs or ())) > 1:
        message = "several values of --max-seq-len or --max-num-seqs need --fit-memory"
        raise UsageError(message, "add the memory, as in --fit-memory 8GiB")
    return parameters.cache_fields(replace(options, max_seq_len=None, max_num_seqs=None, max_source_len=None))


def _page(report: PlanReport, *, is_here: bool, toy_quality: bool) -> list[str]:
    plan, config = report.plan, report.plan.config
    num_parameters = config_lib.parameter_shapes.num_parameters(config)
    layers = format_count(config.stack.num_layers, "layer") + (" of an encoder" if config.decoder is None else "")
    if config.encoder is not None and config.decoder is not None:
        layers = f"{config.encoder.num_layers} + {config.decoder.num_layers} layers"
    lines = [f"{report.name}: {num_parameters:,} parameters, {layers}; {request_lines(plan)}", "", *memory_lines(plan)]
    if report.ranks:
        lines += ["", *_rank_lines(report)]
    if report.speeds:
        lines += ["", *_speed_lines(report)]
    if report.available is not None and not report.ranks:
        source = "available here" if is_here else "memory"
        lines += ["", f"{source}: {format_bytes(report.available)}: {_verdict(report, report.available)}"]
    return [*lines, "", *_fit_lines(report, report.fit, toy_quality)] if report.fit is not None else lines


def _verdict(report: PlanReport, available: int) -> str:
    if report.plan.total <= available:
        return "it fits"
    if report.fitted is None or report.fitted.total > available:
        return "it does not fit"
    room = sizing.describe_room(report.fitted)
    return f"not at this length; without --max-seq-len: {room}"


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
    keys, values = cache_lib.quantization.split_format_name(plan.cache.format_name)
    formats = f"{keys} keys and values" if keys == values else f"{keys} keys and {values} values"
    scratch = "gathered keys and values of one layer, masks" if plan.groups else "masks of one layer"
    stacks = [stack for stack in (plan.config.encoder, plan.config.decoder) if stack is not None]
    positions = [layer.attention.position for stack in stacks for layer in stack.layer_types.values()]
    has_bias = any(isinstance(each, (config_lib.AlibiConfig, config_lib.T5BiasConfig)) for each in positions)
    scratch += (", tiles" if plan.deterministic else "") + (", scores" if has_bias else "")
    parts = "payload, scales and metadata" if plan.scales else "payload and metadata"
    cache: list[tuple[str, int | None, str]] = [
        ("cache payload", plan.payload, f"{formats} of the sequences, exact"),
        ("cache scales", plan.scales or None, "scales and zeros of the sequences, exact"),
        ("cache metadata", plan.metadata, f"{_metadata(plan)} of the sequences, exact"),
        ("cache reserved", plan.reserved, f"{parts} of 2 more blocks per group, exact"),
    ]
    staging = plan.offload.staging_bytes + plan.offload.checksum_bytes
    offloaded = [
        ("offloaded", plan.offload.ram_bytes, "older tokens in host memory, exact"),
        ("staging", staging, "two tiles of them, and checksums of the tokens on disk, exact"),
    ]
    prefix_note = "at most, in host memory: evicted blocks and blocks to write"
    copied = f"; {format_bytes(plan.head_copy)} of them the head's copy of the token table" if plan.head_copy else ""
    table: list[tuple[str, int | None, str]] = [  # a line without a size is omitted
        ("weights", plan.weights, f"{plan.weights_dtype}, exact{copied}"),
        ("summarizer", plan.summarizer or None, "float32, exact"),
        ("adapters", plan.adapters or None, "their factors, exact; the terms of a step, at most"),
        ("draft model", plan.draft_bytes or None, "weights and cache, exact; a step, at most"),
        *(cache if plan.groups else [("cache", 0, "none: an encoder has no cache")]),
        *(offloaded if plan.offload.shares else []),
        ("scratch", plan.scratch, f"at most: {scratch}"),
        ("activations", plan.activations, f"at most: {_step(plan)}"),
        ("swap space", plan.cache.swap_space or None, "host memory for preempted sequences, as requested"),
        ("prefix cache", plan.prefix_cache_host_bytes or None, prefix_note),
        ("total", plan.total, "without the interpreter and torch"),
        ("on disk", plan.offload.disk_bytes or None, "in addition: with all sequences at full length"),
        ("swapped seq", plan.swapped_seq_bytes or None, "at most, in host memory, for each preempted sequence"),
    ]
    lines = [
        f"{name:<15}{size:>21,}  {format_bytes(size):>11}   {note}" for name, size, note in table if size is not None
    ]
    for index in range(len(plan.groups)):
        lines += ["", *_group_lines(plan, index)]
    return lines


def _step(plan: MemoryPlan) -> str:
    cache, config = plan.cache, plan.config
    num_tokens = sizing.activations.max_encoder_tokens(config, cache, plan.max_num_batched_tokens)
    if config.decoder is None:
        return f"a step of {format_count(num_tokens, 'token')} of texts"
    groups = [each.group for each in plan.groups]
    num_new = sizing.activations.max_decoder_tokens(cache, plan.max_num_batched_tokens, groups)
    drafts = f" with {format_count(plan.num_drafts, 'draft')}" if plan.num_drafts else ""
    rows = f"{format_count(cache.max_num_seqs, 'sequence')}{drafts}"
    logits = f"{format_count(num_new, 'new token')}, {rows} of logits"
    return f"a step of {logits}" if config.encoder is None else f"{logits}; or {num_tokens:,} of source"


def _group_lines(plan: MemoryPlan, index: int) -> list[str]:
    group_plan = plan.groups[index]
    group, size, mixer = group_plan.group, group_plan.bytes, group_plan.group.spec
    row = "source" if mixer.is_cross_attention else "seq"
    heads = f"{format_count(mixer.num_kv_heads, 'key-value head')} of {mixer.dims}"
    slots = f"{group.max_blocks_per_seq:,} x {format_count(group.block_size, 'slot')}"
    layers = planning.report.group_layers(plan, group_plan)
    names = planning.layer_names(layers)
    retention = planning.describe_retention(group, attention_specs(plan.config))
    total = _sizes(group_plan.payload, group_plan.scales, group_plan.metadata)
    return [
        f"group {index}: {names} ({len(layers)}): {retention}, {group.format_name}",
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


def _rank_lines(report: PlanReport) -> list[str]:
    """Format the bytes of each rank of a mesh; the pool includes reserved blocks."""
    plan = report.plan
    columns: dict[str, str | Callable[[parallel.RankPlan], str]] = {
        "rank": "{0.mesh.rank}", "tensor": "{0.mesh.tensor_rank}", "stage": "{0.mesh.stage}",
        "layers": lambda rank: planning.layer_names(tuple(rank.layers)),
        "weights": "{.weights:,}", "pool": "{.pool:,}", "both": "{.total:,}",
        "": lambda rank: format_bytes(rank.total),
    }  # fmt: skip
    extra = plan.adapters + plan.draft_bytes  # of a mesh of one rank; others are refused
    parts = "a step, adapters and a draft model" if extra else "a step"
    return [
        f"a mesh of {report.ranks[0].mesh}, exact:",
        *(f"  {line}" for line in format_records(report.ranks, columns)),
        f"and on each rank, at most, {plan.scratch + plan.activations + extra:,} for {parts}: as for the whole model",
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


def _fit_lines(report: PlanReport, memory: int, toy_quality: bool) -> list[str]:
    table, config = report.table, report.plan.config
    if not report.fits and not (table and table.rows):
        message = f"in {format_bytes(memory)} not even one sequence of one block fits"
        return [message, *_weights_too_large(report, memory)]
    length = format_count(report.plan.cache.max_source_len, "token")
    sources = "" if config.encoder_input is None else f", encoder inputs of {length}"
    first = f"in {format_bytes(memory)}, weights and activations included{sources}:"
    if table is None:
        rows = [("seqs", "tokens each", "takes")]
        rows += [(f"{fit.num_seqs:,}", f"{fit.max_seq_len:,}", format_bytes(fit.bytes)) for fit in report.fits]
        return [first, *(f"  {line}" for line in format_table(rows, left=()))]
    columns: dict[str, str | Callable[[planning.fit.FitRow], str]] = {
        "seqs": "{.num_seqs:,}", "tokens each": "{.context:,}", "takes": lambda row: format_bytes(row.bytes),
        "stored": "{.cache_format}", "policy": "{.policy}",
        "toy-model quality" if toy_quality else "quality": _quality,
    }  # fmt: skip
    return [
        first,
        *(f"  {line}" for line in format_records(table.rows, columns, left=(3, 4, 5))),
        *(["  no such configuration fits"] if not table.rows else []),
        *(f"not for this model: {reason}" for reason in table.refused),
        *table.sources,
        *(["measured on these models; other models differ (--quality-results)"] if table.sources else []),
    ]


def _quality(row: planning.fit.FitRow) -> str:
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
    still = f"  and in {dtype} still {format_bytes(missing)} more"
    return [*lines, f"{still}: a smaller model would (kvad plan --list-models)"]
