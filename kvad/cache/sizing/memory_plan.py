"""Memory plan: bytes of a model and its cache before anything is allocated.

The plan is computed from the config alone, without torch. Two kinds of numbers are kept apart:

* **exact**: weights (sum of the state_dict's nbytes), the summarizer, token offload (``token_offload.py``: RAM,
  staging, checksums, and on disk if all sequences have their maximum length) and the pool (``KVCache.payload_bytes``,
  ``scale_bytes``, ``metadata_bytes``), because the same functions size the real ones. A pool is payload, scales and
  metadata for the requested sequences in whole blocks, plus the *reserved* blocks of each group (NULL_BLOCK and
  PADDING_BLOCK).
* **upper bound of a step's peak**: scratch and activations of the largest step that the scheduler may plan, of the
  decoder or the encoder; ``activations.py`` has the formulas. Not counted: the interpreter and torch (about 250 MiB),
  allocator slack, and prompt scoring, which requires logits of all T tokens instead of one per sequence.

An encoder has no pool: nothing is cached between two steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvad import config as config_lib
from kvad.cache import offload as offload_lib
from kvad.cache.config import NUM_SINKS, CacheConfig, resolve_for_model
from kvad.cache.groups import MAX_PLANNED_SEQS, CacheGroup, GroupBytes, MemoryFit, build_groups, group_bytes
from kvad.cache.manager import check_shareable
from kvad.cache.policy import TieredPolicy
from kvad.cache.sizing.activations import peak_memory
from kvad.config import (
    CustomPositionsConfig,
    DynamicScalingConfig,
    LongRopeScalingConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    attention_specs,
)
from kvad.errors import ConfigError, MemoryPlanError, format_count, suggest
from kvad.model_input import RESERVED_BLOCKS

DEFAULT_BATCHED_TOKENS = 2048  # default number of new tokens per step


@dataclass(frozen=True)
class GroupPlan:
    """Sizes of one cache group; payload, scales and metadata are for the requested sequences."""

    group: CacheGroup
    bytes: GroupBytes  # of the whole pool, reserved blocks included

    @property
    def reserved(self) -> int:
        """Bytes of NULL_BLOCK and PADDING_BLOCK."""
        return RESERVED_BLOCKS * self.bytes.total // self.group.num_blocks

    @property
    def payload(self) -> int:
        """Bytes of keys and values."""
        return self.bytes.payload // self.group.num_blocks * self.group.num_usable_blocks

    @property
    def scales(self) -> int:
        """Bytes of the scales."""
        return self.bytes.scales // self.group.num_blocks * self.group.num_usable_blocks

    @property
    def metadata(self) -> int:
        """Bytes of positions, per-head metadata, block bounds and weights."""
        return self.bytes.metadata // self.group.num_blocks * self.group.num_usable_blocks

    @property
    def seq_payload(self) -> int:
        """Bytes of keys and values of one sequence at its maximum length, in whole blocks."""
        return self.bytes.per_token_payload * self.max_slots_per_seq

    @property
    def seq_scales(self) -> int:
        """Bytes of the scales of one sequence at its maximum length."""
        return self.bytes.scales // self.group.num_blocks * self.group.max_blocks_per_seq

    @property
    def seq_metadata(self) -> int:
        """Bytes of the metadata of one sequence at its maximum length."""
        return self.bytes.metadata // self.group.num_blocks * self.group.max_blocks_per_seq

    @property
    def max_slots_per_seq(self) -> int:
        """Slots of one sequence at its maximum length."""
        return self.group.max_blocks_per_seq * self.group.block_size


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of a model and its cache, in bytes."""

    config: ModelConfig
    cache: CacheConfig  # as requested, before resolve_for_model
    weights_dtype: str
    max_num_batched_tokens: int
    weights: int
    groups: tuple[GroupPlan, ...]
    scratch: int
    activations: int
    offload: offload_lib.token_offload.OffloadLayout
    summarizer: int = 0  # parameters of the summarizer, float32 for any weights
    summarizer_shape: config_lib.parameter_shapes.SummarizerShape | None = None  # None: means
    deterministic: bool = False  # batch-invariant

    @property
    def payload(self) -> int:
        """Bytes of keys and values."""
        return sum(group.payload for group in self.groups)

    @property
    def scales(self) -> int:
        """Bytes of the scales."""
        return sum(group.scales for group in self.groups)

    @property
    def metadata(self) -> int:
        """Bytes of positions, per-head metadata, block bounds and weights."""
        return sum(group.metadata for group in self.groups)

    @property
    def reserved(self) -> int:
        """Bytes of the reserved blocks."""
        return sum(group.reserved for group in self.groups)

    @property
    def pool(self) -> int:
        """Bytes that KVCache allocates."""
        return self.payload + self.scales + self.metadata + self.reserved

    @property
    def swapped_seq_bytes(self) -> int:
        """Host bytes of one swapped-out sequence (``KVCache.swapped``); 0 if it is recomputed.

        Not part of ``total``, because the number of preempted sequences is unknown; ``swap_bytes`` limits them.
        """
        token_groups = [plan for plan in self.groups if not plan.group.spec.is_cross_attention]
        if not any(
            plan.group.eviction_policy or isinstance(plan.group.demotion_policy, TieredPolicy) for plan in token_groups
        ):
            return 0
        return sum(plan.seq_payload + plan.seq_scales + plan.seq_metadata for plan in token_groups)

    @property
    def swap_bytes(self) -> int:
        """Host bytes for preempted sequences (``cache.swap_space``); 0 if unlimited."""
        return self.cache.swap_space or 0

    @property
    def prefix_cache_host_bytes(self) -> int:
        """Host bytes of the block store and its write queue.

        Not counted: blocks being loaded, at most those of three sequences, while they wait.
        """
        return self.cache.prefix_cache_host_bytes

    @property
    def total(self) -> int:
        """Bytes of everything."""
        host = self.offload.host_bytes + self.swap_bytes + self.prefix_cache_host_bytes
        return self.weights + self.summarizer + self.pool + self.scratch + self.activations + host


def check_policy(config: ModelConfig, cache: CacheConfig, *, deterministic: bool = False) -> None:
    """Check that the model's positions support the cache configuration.

    Raises:
        ConfigError: If they do not; the message says what fits.
    """
    if config.decoder is None:
        return
    if deterministic:
        _check_deterministic(config, cache)
    if cache.rope_at == "write":
        _check_summaries(config, cache)
    if cache.endless:
        _check_endless(config, cache)


def _check_endless(config: ModelConfig, cache: CacheConfig) -> None:
    """Check that positions can be renumbered.

    Positions added to the embeddings are part of keys and values and cannot be renumbered; RoPE and biases depend on
    distances, which a window bounds.
    """
    assert config.decoder is not None
    position_config = config.embedding.position
    if position_config is not None:
        raise ConfigError(
            f"cache.endless: {position_config.kind} positions are part of every key and value and cannot be renumbered",
            "Sequences of this model end at max_seq_len: use --overflow stop.",
        )
    specs = cache.restrict(attention_specs(config))
    for num_sinks, window in ((spec.num_sinks, spec.window) for spec in specs if not spec.is_cross_attention):
        if window is not None and num_sinks + window > config.max_seq_len:
            raise ConfigError(
                f"cache.endless: the cache must have at most {config.max_seq_len} tokens, got {num_sinks + window}",
                f"Keep at most {config.max_seq_len} tokens.",
            )
        if window is not None and num_sinks and cache.layout == "paged" and window < cache.block_size:
            raise ConfigError(
                f"cache.endless: the window must have at least a block of {cache.block_size} tokens, got {window}",
                f"Keep at least {cache.block_size}, or use a smaller cache.block_size.",
            )
    for layer_type in config.decoder.layer_types.values():
        position = layer_type.attention.position
        if isinstance(position, CustomPositionsConfig) and any(spec.renumber_positions for spec in specs):
            raise ConfigError(
                f"cache.endless: {position.name} does not support renumbered positions", "Use window(n), without sinks."
            )


def _check_deterministic(config: ModelConfig, cache: CacheConfig) -> None:
    """Check that the policy is batch-invariant.

    Tiles of keys are at fixed positions, which eviction, demotion, sparse reads and renumbering change.
    """
    for group in build_groups(attention_specs(config), cache):
        policy = group.eviction_policy or group.demotion_policy or group.sparse_read_policy
        if policy is not None or group.spec.renumber_positions:
            cause = f"the policy {policy}" if policy is not None else "renumbered sinks"
            if group.demotion_policy is not None and cache.overflow in ("summarize", "offload"):
                cause = f"overflow={cache.overflow}, which uses {cause}"
            raise ConfigError(
                f"deterministic: not supported with {cause}",
                "Use full, window(n), sinks(k, n) up to the limit, or block-window(n).",
            )


def _check_summaries(config: ModelConfig, cache: CacheConfig) -> None:
    """Check that stored keys can be rotated back to be merged.

    Sequence-dependent RoPE frequencies prevent that.
    """
    for layer in range(config.stack.num_layers):
        position, levels = (
            config.stack.layer_config(layer).attention.position,
            cache.resolved_policy.for_layer(layer).tiered,
        )
        scaling = position.scaling if isinstance(position, RopeConfig) else None
        if (
            levels is not None
            and levels.summaries
            and isinstance(scaling, DynamicScalingConfig | LongRopeScalingConfig)
        ):
            raise ConfigError(
                f"cache.policy: {levels}: {scaling.kind} scaling gives each sequence other frequencies, so stored keys "
                f"of layer {layer} cannot be rotated back to be summarized",
                "Store them unrotated: cache.rope_at='read'.",
            )


def check_summarizer(ratio: int, groups: Sequence[CacheGroup]) -> None:
    """Check that the cache has summaries of the summarizer's ratio.

    Raises:
        ConfigError: If it has none, or others.
    """
    levels = [group.lower_level for group in groups if group.lower_level is not None and group.lower_level.ratio > 1]
    if not levels:
        raise ConfigError(
            "summarizer: the cache's policy has no summaries",
            f'Use --policy "tiered(64, quantized=0, summaries=256, ratio={ratio})".',
        )
    for level in levels:
        if level.ratio != ratio:
            raise ConfigError(
                f"summarizer: must have the policy's ratio {level.ratio}, got {ratio}",
                f"Use ratio={ratio} in the policy, or another summarizer.",
            )


def plan_memory(
    config: ModelConfig,
    cache: CacheConfig,
    *,
    weights_dtype: str = "float32",
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
    summarizer_shape: config_lib.parameter_shapes.SummarizerShape | None = None,
    deterministic: bool = False,
) -> MemoryPlan:
    """Compute the sizes of a model and its cache.

    Args:
        config: Model configuration.
        cache: Cache configuration.
        weights_dtype: Dtype of the weights and of the computation.
        max_num_batched_tokens: New tokens of a step, at most.
        summarizer_shape: Shape of the trained summarizer; None for means.
        deterministic: Batch-invariant computation.

    Raises:
        ConfigError: If an option is invalid or unsupported in this combination.
    """
    if weights_dtype not in config_lib.DTYPE_BYTES:
        raise ConfigError(f"dtype: unknown dtype {weights_dtype!r}", suggest(weights_dtype, config_lib.DTYPE_BYTES))
    if max_num_batched_tokens < 1:
        raise ConfigError(f"max_num_batched_tokens: must be at least 1, got {max_num_batched_tokens}")
    if deterministic and weights_dtype == "float16":
        raise ConfigError("deterministic: not supported in float16", "Use float32 or bfloat16.")
    weights = config_lib.parameter_shapes.weight_bytes(config, weights_dtype)
    plan = _plan(config, cache, weights_dtype, max_num_batched_tokens, weights, summarizer_shape, deterministic)
    if summarizer_shape is not None:
        check_summarizer(summarizer_shape.ratio, [group_plan.group for group_plan in plan.groups])
    return plan


def _plan(
    config: ModelConfig,
    cache: CacheConfig,
    weights_dtype: str,
    max_num_batched_tokens: int,
    weights: int,
    summarizer_shape: config_lib.parameter_shapes.SummarizerShape | None,
    deterministic: bool,
) -> MemoryPlan:
    resolved = resolve_for_model(config, cache)
    check_policy(config, resolved, deterministic=deterministic)
    groups = build_groups(attention_specs(config), resolved)
    check_shareable(resolved, groups)
    has_summaries = any(group.lower_level is not None and group.lower_level.ratio > 1 for group in groups)
    hidden = summarizer_shape.hidden if summarizer_shape is not None and has_summaries else 0
    peak = peak_memory(
        config, resolved, groups, weights_dtype, max_num_batched_tokens, hidden=hidden, deterministic=deterministic
    )
    return MemoryPlan(
        config,
        cache,
        weights_dtype,
        max_num_batched_tokens,
        weights,
        tuple(GroupPlan(group, group_bytes(group)) for group in groups),
        peak.scratch,
        peak.activations,
        offload_lib.token_offload.plan_offload(groups, resolved.offload_ram),
        _summarizer_bytes(config, summarizer_shape) if summarizer_shape is not None and has_summaries else 0,
        summarizer_shape,
        deterministic,
    )


def _summarizer_bytes(config: ModelConfig, summarizer_shape: config_lib.parameter_shapes.SummarizerShape) -> int:
    shapes = config_lib.parameter_shapes.summarizer_shapes(attention_specs(config), summarizer_shape).values()
    return config_lib.DTYPE_BYTES["float32"] * sum(map(math.prod, shapes))


def require_memory(plan: MemoryPlan, available: int | None) -> None:
    """Check that the plan fits into the available memory.

    Args:
        plan: Sizes of the model and its cache.
        available: Bytes; None if unknown, which passes every plan.

    Raises:
        MemoryPlanError: If it does not fit; the message has both sizes and what would fit.
    """
    if available is None or plan.total <= available:
        return
    sources = f" and encoder inputs of {plan.cache.max_source_len:,}" if plan.config.encoder_input is not None else ""
    parts = plan.weights + plan.summarizer, plan.pool + plan.offload.host_bytes, plan.scratch + plan.activations
    weights, cache, work = map(_format_bytes, parts)
    num_seqs, prefix_cache = (
        format_count(plan.cache.max_num_seqs, "sequence"),
        f", block store {_format_bytes(plan.prefix_cache_host_bytes)}" if plan.prefix_cache_host_bytes else "",
    )
    verb = "needs" if plan.cache.max_num_seqs == 1 else "need"
    message = (
        f"{num_seqs} of {plan.cache.max_seq_len:,} tokens{sources} {verb} "
        f"{_format_bytes(plan.total)} (weights {weights}, cache {cache}, work {work}{prefix_cache}) "
        f"and {_format_bytes(available)} is available"
    )
    raise MemoryPlanError(message, _advice(plan, available))


def _advice(plan: MemoryPlan, available: int) -> str:
    fits = find_fits(plan, available)
    if not fits:
        min_bytes = plan.total - plan.pool - plan.scratch
        if plan.prefix_cache_host_bytes > available:
            return "Use a smaller --prefix-cache-ram."
        hint = f"no sequence fits: without a cache {_format_bytes(min_bytes)} are needed; use a smaller model or dtype"
        return "; or ".join([hint, *_smaller_options(plan, available)])
    same_length = [fit for fit in fits if fit.max_seq_len == plan.cache.max_seq_len][-1:]
    same_num_seqs = [fit for fit in fits if fit.num_seqs <= plan.cache.max_num_seqs][-1:]
    options = sorted({(fit.num_seqs, fit.max_seq_len) for fit in (*same_length, *same_num_seqs, fits[0])})
    shown = (
        f"{num_seqs} sequence{'s' if num_seqs > 1 else ''} of {max_seq_len:,} tokens"
        for num_seqs, max_seq_len in options
    )
    return f"what would fit: {', or '.join([*shown, *_smaller_options(plan, available)])}"


def _smaller_options(plan: MemoryPlan, available: int) -> list[str]:
    """Return the first cache format and the policy with which the requested cache would fit."""
    cache, options = plan.cache, []
    for name in ("bfloat16", "int8", "int4"):
        total = _total_bytes(plan, replace(cache, dtype=name, key_dtype=None, value_dtype=None))
        if total is not None and total <= available < plan.total:
            options.append(f"all of it as {name} ({_format_bytes(total)})")
            break
    quarter = cache.max_seq_len // 4
    if cache.policy == "full" and quarter >= 64:
        sinks = f"sinks({NUM_SINKS}, {quarter - NUM_SINKS})"
        total = _total_bytes(plan, replace(cache, policy=sinks, num_blocks=None))
        if total is not None and total <= available:
            options.append(f"all of it under {sinks} ({_format_bytes(total)})")
    return options


def _total_bytes(plan: MemoryPlan, cache: CacheConfig) -> int | None:
    """Return the total bytes with another cache, or None if the model does not support it."""
    try:
        return total_bytes_with(plan, cache)
    except ConfigError:
        return None


def find_fits(plan: MemoryPlan, memory_bytes: int) -> tuple[MemoryFit, ...]:
    """Return the largest numbers of sequences and lengths whose whole plan fits.

    For 1, 2, 4, ... sequences, the maximum length in whole blocks, up to the model's limit; and for the planned length,
    the maximum number of sequences. Empty if one sequence of one block does not fit.
    """
    limit = max(plan.config.max_seq_len, plan.cache.max_seq_len)
    unit = min(plan.cache.block_size, limit)

    def total(num_seqs: int, max_seq_len: int) -> int:
        return total_bytes_with(
            plan, replace(plan.cache, max_num_seqs=num_seqs, max_seq_len=max_seq_len, num_blocks=None)
        )

    def longest(num_seqs: int) -> int:
        if total(num_seqs, limit) <= memory_bytes:
            return limit
        return unit * binary_search_max(limit // unit, lambda units: total(num_seqs, unit * units) <= memory_bytes)

    fits: set[tuple[int, int]] = set()
    num_seqs = 1
    while num_seqs <= MAX_PLANNED_SEQS and (max_seq_len := longest(num_seqs)):
        fits.add((num_seqs, max_seq_len))
        num_seqs *= 2
    max_num_seqs = binary_search_max(
        MAX_PLANNED_SEQS, lambda num_seqs: total(num_seqs, plan.cache.max_seq_len) <= memory_bytes
    )
    if max_num_seqs:
        fits.add((max_num_seqs, plan.cache.max_seq_len))
    return tuple(
        MemoryFit(num_seqs, max_seq_len, total(num_seqs, max_seq_len)) for num_seqs, max_seq_len in sorted(fits)
    )


def total_bytes_with(plan: MemoryPlan, cache: CacheConfig) -> int:
    """Return the total bytes of the same model with another cache.

    Raises:
        ConfigError: If the model does not support the cache.
    """
    cache = replace(cache, overflow=cache.overflow if _can_continue(plan.config, cache) else "preempt")
    model_options = (
        plan.weights_dtype,
        plan.max_num_batched_tokens,
        plan.weights,
        plan.summarizer_shape,
        plan.deterministic,
    )
    return _plan(plan.config, cache, *model_options).total


def _can_continue(config: ModelConfig, cache: CacheConfig) -> bool:
    """True if sequences of this length can continue with the requested overflow mode.

    If they are too short, or as long as the model's limit, they end.
    """
    try:
        resolve_for_model(config, cache)
    except ConfigError:
        return False
    return True


def binary_search_max(high: int, holds: Callable[[int], bool]) -> int:
    """Return the largest n in 1..high with ``holds(n)``, or 0.

    ``holds`` must be true up to a point and false after it.
    """
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def decode_step_bytes(plan: MemoryPlan, num_seqs: int, seq_len: int) -> int:
    """Return the bytes that a decode step must read.

    These are the decoder's weights once (of experts, as many as the sequences can choose) and every sequence's cached
    keys, values and positions that its policy or window retains; of an encoder input, all that is cached.

    Args:
        plan: Sizes of the model and its cache.
        num_seqs: Number of sequences.
        seq_len: Tokens of each sequence.
    """
    weights = (
        plan.weights
        - config_lib.parameter_shapes.lookup_bytes(plan.config, plan.weights_dtype)
        - _idle_bytes(plan, num_seqs)
    )
    cached = 0
    for group_plan in plan.groups:
        size, num_slots = group_plan.bytes, _max_read_slots(plan, group_plan.group, seq_len)
        num_read_slots = (
            num_slots
            if group_plan.group.sparse_read_policy is None
            else min(num_slots, group_plan.group.sparse_read_policy.budget)
        )
        cached += (
            num_read_slots * (size.per_token_payload + size.per_token_scales) + num_slots * size.per_token_metadata
        )
    return weights + num_seqs * cached


def _max_read_slots(plan: MemoryPlan, group: CacheGroup, seq_len: int) -> int:
    """Return the maximum number of filled slots that a sequence of ``seq_len`` tokens reads."""
    spec, level = group.spec, group.lower_level
    if spec.is_cross_attention:
        return plan.cache.max_source_len
    if spec.window is not None:
        return min(seq_len, spec.num_sinks + spec.window)
    if group.eviction_policy is not None:
        return min(seq_len, group.eviction_policy.budget + group.eviction_policy.interval)
    policy = group.demotion_policy if level is None else plan.groups[level.token_group].group.demotion_policy
    if policy is None:
        return seq_len
    if level is None:
        return min(seq_len, policy.num_sinks + policy.recent + policy.interval)
    older = max(0, seq_len - policy.num_sinks - policy.recent)
    if level.ratio > 1:
        older = -(-max(0, older - max(0, policy.quantized)) // level.ratio)
    return min(older, level.max_blocks * group.block_size)


def _idle_bytes(plan: MemoryPlan, num_seqs: int) -> int:
    """Return the bytes of weights that a decode step does not read.

    These are the encoder's, those for keys and values of encoder inputs, and unused experts.
    """
    decoder = plan.config.decoder
    if decoder is None:
        return 0
    numbers = 0
    for name, shape in config_lib.parameter_shapes.weight_shapes(plan.config).items():
        parts = name.split(".")
        is_encoder_input = parts[0] == "encoder" or (
            parts[0] == "encoder_embedding" and parts[1] in ("norm", "projection")  # lookup_bytes has its tables
        )
        if is_encoder_input or parts[-3:-1] in (["cross_attention", "k"], ["cross_attention", "v"]):
            numbers += math.prod(shape)
        elif "mlp" in parts and len(parts) > 2 and parts[2].isdecimal():
            mlp = decoder.layer_config(int(parts[2])).mlp
            if isinstance(mlp, MoEConfig) and "router" not in parts:
                numbers += (
                    math.prod(shape) // mlp.num_experts * max(0, mlp.num_experts - num_seqs * mlp.num_experts_per_token)
                )
    return numbers * config_lib.DTYPE_BYTES[plan.weights_dtype]


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
