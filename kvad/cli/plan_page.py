"""The page that ``kvad plan`` prints, line by line: exact bytes first, then each group, speed, and what fits."""

from __future__ import annotations

from kvad.cache.formats import split_format_name
from kvad.cache.peak import max_decoder_tokens, max_encoder_tokens
from kvad.cache.planning import MemoryPlan
from kvad.cache.settle import resolve_for_model
from kvad.cache.sizing import CacheConfig
from kvad.cache.weights import num_parameters
from kvad.cli.common import format_bytes
from kvad.config import AlibiConfig, ModelConfig, T5BiasConfig, attention_specs
from kvad.errors import format_count
from kvad.lab.fit import FitRow, weights_shortfall
from kvad.lab.kept import describe_format, describe_retention, layer_names
from kvad.lab.plan import PlanReport, group_layers

__all__ = ["request_lines", "memory_lines", "plan_text"]

SWAP_NOTE = "in host memory, at most, for each row that gives way to others"


def plan_text(report: PlanReport) -> str:
    """The whole page, without a newline at its end."""
    plan = report.plan
    model = f"{report.name}: {num_parameters(plan.config):,} parameters, {_layers(plan.config)}"
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
    read = f"{max_encoder_tokens(config, cache, plan.max_num_batched_tokens):,}"
    if config.decoder is None:
        return f"a step of {format_count(max_encoder_tokens(config, cache, plan.max_num_batched_tokens), 'token')} of texts"
    tokens = format_count(
        max_decoder_tokens(cache, plan.max_num_batched_tokens, [each.group for each in plan.groups]), "new token"
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
    layers = group_layers(plan, each)
    return [
        f"group {number}: {layer_names(layers)} ({len(layers)}): {describe_retention(group, attention_specs(plan.config))}, {describe_format(group)}",
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
    keys, values = split_format_name(cache.format_name)
    return f"{keys} keys and values" if keys == values else f"{keys} keys and {values} values"


def _parts(plan: MemoryPlan) -> str:
    return "payload, scales and columns" if plan.scales else "payload and columns"


def _rank_lines(report: PlanReport) -> list[str]:
    """What each rank of a mesh has; of the pool, reserved blocks included."""
    first, plan = report.ranks[0].mesh, report.plan
    rows = [("rank", "tensor", "stage", "layers", "weights", "pool", "both", "")]
    for rank in report.ranks:
        mesh, sizes = rank.mesh, (rank.weights, rank.pool, rank.total)
        at = (mesh.rank, mesh.tensor_rank, mesh.stage, layer_names(tuple(rank.layers)))
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


def _format_fit_row(offer: FitRow) -> tuple[str, ...]:
    size = format_bytes(offer.bytes)
    return f"{offer.num_seqs:,}", f"{offer.context:,}", size, offer.cache_format, offer.policy, _quality(offer)


def _quality(offer: FitRow) -> str:
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
    short = weights_shortfall(report.plan, fit)
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
