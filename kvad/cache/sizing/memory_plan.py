"""Memory plan: bytes of a model and its cache before anything is allocated.

The plan is computed from the config alone, without torch. Two kinds of numbers are kept apart:

* **exact**: weights (sum of the state_dict's nbytes), the summarizer, token offload (``token_offload.py``: RAM,
  staging, checksums, and on disk if all sequences have their maximum length) and the pool (``KVCache.payload_bytes``,
  ``scale_bytes``, ``metadata_bytes``), because the same functions size the real ones. A pool is payload, scales and
  metadata for the requested sequences in whole blocks, plus the *reserved* blocks of each group (NULL_BLOCK and
  PADDING_BLOCK).
* **upper bound of a step's peak**: scratch and activations of the largest step that the scheduler may plan, of the
  decoder or the encoder (``activations.py``, ``scratch.py``). Not counted: the interpreter and torch (about 250 MiB),
  allocator slack, prompt scoring, which requires logits of all T tokens instead of one per sequence, and of the native
  CPU kernels up to 4 MiB of activations and the packed copy of weights that are not mapped from a file (at most 1 GiB).

Combinations of a model and a cache that are not supported are refused, with the reason (``check_policy``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvad import config as config_lib
from kvad.cache import offload as offload_lib
from kvad.cache.config import CacheConfig, resolve_for_model
from kvad.cache.groups import CacheGroup, GroupBytes, build_groups, group_bytes
from kvad.cache.manager import check_shareable
from kvad.cache.policy import TieredPolicy
from kvad.cache.sizing.activations import peak_memory
from kvad.config import ModelConfig, attention_specs
from kvad.errors import ConfigError, suggest
from kvad.model_input import RESERVED_BLOCKS

DEFAULT_BATCHED_TOKENS = 2048  # default number of new tokens per step


class SpeculationShape(NamedTuple):
    """Sizes of speculative decoding."""

    num_drafts: int  # of a sequence per step; each has a row of logits
    draft_config: ModelConfig | None = None  # of a draft model
    draft_weights: int = 0  # its bytes


@dataclass(frozen=True)
class GroupPlan:
    """Bytes of one cache group, for the requested sequences and (``seq_``) for one sequence at its maximum length."""

    group: CacheGroup
    bytes: GroupBytes  # of the whole pool, reserved blocks included
    payload: int  # keys and values
    scales: int
    metadata: int  # positions, per-head data, block bounds and weights
    reserved: int  # NULL_BLOCK and PADDING_BLOCK
    seq_payload: int
    seq_scales: int
    seq_metadata: int

    @property
    def total(self) -> int:
        return self.bytes.total


def _plan_group(group: CacheGroup) -> GroupPlan:
    pool, num_usable, num_per_seq = group_bytes(group), group.num_usable_blocks, group.max_blocks_per_seq
    payload, scales, metadata = (size // group.num_blocks for size in (pool.payload, pool.scales, pool.metadata))
    return GroupPlan(
        group,
        pool,
        payload=payload * num_usable,
        scales=scales * num_usable,
        metadata=metadata * num_usable,
        reserved=(payload + scales + metadata) * RESERVED_BLOCKS,
        seq_payload=pool.per_token_payload * num_per_seq * group.block_size,
        seq_scales=scales * num_per_seq,
        seq_metadata=metadata * num_per_seq,
    )


@dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """Sums over the cache groups of a pool, in bytes."""

    groups: tuple[GroupPlan, ...] | tuple[GroupBytes, ...]  # a GroupBytes includes the reserved blocks in each number

    @property
    def payload(self) -> int:
        return sum(group.payload for group in self.groups)

    @property
    def scales(self) -> int:
        return sum(group.scales for group in self.groups)

    @property
    def metadata(self) -> int:
        return sum(group.metadata for group in self.groups)

    @property
    def pool(self) -> int:
        """Bytes that KVCache allocates."""
        return sum(group.total for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan(PoolPlan):
    """Sizes of a model and its cache, in bytes."""

    config: ModelConfig
    cache: CacheConfig  # as requested, before resolve_for_model
    weights_dtype: str
    max_num_batched_tokens: int
    weights: int
    groups: tuple[GroupPlan, ...] = ()
    scratch: int = 0
    activations: int = 0
    offload: offload_lib.token_offload.OffloadLayout
    summarizer: int = 0  # parameters of the summarizer, float32 for any weights
    summarizer_shape: config_lib.parameter_shapes.SummarizerShape | None = None  # None: means
    deterministic: bool = False  # batch-invariant
    head_copy: int = 0  # part of the weights: a tied head's quantized copy of the token table
    quantized: Mapping[str, int] = field(default_factory=dict)  # part of the weights: quantized parameters, by name
    num_drafts: int = 0  # speculative decoding: drafts of a sequence per step
    draft: MemoryPlan | None = None  # of the draft model and its cache
    adapters: int = 0  # factors of the adapters that requests choose, and at most their terms in a step

    @property
    def reserved(self) -> int:
        return sum(group.reserved for group in self.groups)

    @property
    def swapped_seq_bytes(self) -> int:
        """Host bytes of one swapped-out sequence (``KVCache.swapped``); 0 if it is recomputed.

        Not part of ``total``, because the number of preempted sequences is unknown; ``cache.swap_space`` limits them.
        """
        token_groups = [plan for plan in self.groups if not plan.group.spec.is_cross_attention]
        groups = [plan.group for plan in token_groups]
        if not any(group.eviction_policy or isinstance(group.demotion_policy, TieredPolicy) for group in groups):
            return 0
        return sum(plan.bytes.per_seq for plan in token_groups)

    @property
    def prefix_cache_host_bytes(self) -> int:
        """Host bytes of the block store, without blocks that are being loaded (at most those of three sequences)."""
        return self.cache.prefix_cache_host_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes that are in host memory for any device."""
        return self.offload.host_bytes + (self.cache.swap_space or 0) + self.cache.prefix_cache_host_bytes

    @property
    def total(self) -> int:
        """Bytes of everything."""
        own = self.weights + self.adapters + self.summarizer + self.pool
        return own + self.scratch + self.activations + self.host_bytes + self.draft_bytes

    @property
    def draft_bytes(self) -> int:
        """Bytes of the draft model, its cache and its steps."""
        return 0 if self.draft is None else self.draft.total


def plan_memory(
    config: ModelConfig,
    cache: CacheConfig,
    *,
    weights_dtype: str = "float32",
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
    summarizer_shape: config_lib.parameter_shapes.SummarizerShape | None = None,
    deterministic: bool = False,
    weights: int | None = None,
    speculation: SpeculationShape | None = None,
    adapters: int = 0,
) -> MemoryPlan:
    """Compute the sizes of a model and its cache.

    Args:
        config: Model configuration.
        cache: Cache configuration.
        weights_dtype: Dtype of the weights and of the computation.
        max_num_batched_tokens: New tokens of a step, at most.
        summarizer_shape: Shape of the trained summarizer; None for means.
        deterministic: Batch-invariant computation.
        weights: Bytes of the weights, if some are quantized.
        speculation: Sizes of speculative decoding; a draft model has the same dtype.
        adapters: Bytes of the adapters that requests choose.
    """
    if weights_dtype not in config_lib.DTYPE_BYTES:
        raise ConfigError(f"dtype: unknown dtype {weights_dtype!r}", suggest(weights_dtype, config_lib.DTYPE_BYTES))
    if max_num_batched_tokens < 1:
        raise ConfigError(f"max_num_batched_tokens: must be at least 1, got {max_num_batched_tokens}")
    if deterministic and weights_dtype == "float16":
        raise ConfigError("deterministic: not supported in float16", "Use float32 or bfloat16.")
    without_cache = MemoryPlan(
        config=config,
        cache=cache,
        weights_dtype=weights_dtype,
        max_num_batched_tokens=max_num_batched_tokens,
        weights=config_lib.parameter_shapes.weight_bytes(config, weights_dtype) if weights is None else weights,
        offload=offload_lib.token_offload.OffloadLayout({}),
        summarizer_shape=summarizer_shape,
        deterministic=deterministic,
        num_drafts=0 if speculation is None else speculation.num_drafts,
        adapters=adapters,
    )
    if speculation is not None and speculation.draft_config is not None:
        draft = replace(without_cache, config=speculation.draft_config, weights=speculation.draft_weights, num_drafts=0)
        draft = replace(draft, deterministic=False, summarizer_shape=None, adapters=0)
        without_cache = replace(without_cache, draft=draft)
    plan = plan_with(without_cache, cache)
    if summarizer_shape is not None:
        check_summarizer(summarizer_shape.ratio, [group_plan.group for group_plan in plan.groups])
    return plan


def plan_with(plan: MemoryPlan, cache: CacheConfig) -> MemoryPlan:
    """Plan the same model with another cache."""
    config, resolved, deterministic = plan.config, resolve_for_model(plan.config, cache), plan.deterministic
    check_policy(config, resolved, deterministic=deterministic)
    groups = build_groups(attention_specs(config), resolved, plan.weights_dtype)
    check_shareable(resolved, groups)
    hidden = summarizer_bytes = 0
    if plan.summarizer_shape is not None and any(group.has_summaries for group in groups):
        hidden = plan.summarizer_shape.hidden
        shapes = config_lib.parameter_shapes.summarizer_shapes(attention_specs(config), plan.summarizer_shape).values()
        summarizer_bytes = config_lib.DTYPE_BYTES["float32"] * sum(map(math.prod, shapes))
    limit = plan.max_num_batched_tokens
    scratch, activations = peak_memory(
        config, resolved, groups, plan.weights_dtype, limit, plan.num_drafts, hidden=hidden, deterministic=deterministic
    )
    draft = plan.draft
    return replace(
        plan,
        cache=cache,
        draft=None if draft is None else plan_with(draft, draft_cache(draft.config, cache, draft.weights_dtype)),
        groups=tuple(map(_plan_group, groups)),
        scratch=scratch,
        activations=activations,
        offload=offload_lib.token_offload.plan_offload(groups, resolved.offload_ram),
        summarizer=summarizer_bytes,
    )


def draft_cache(config: ModelConfig, cache: CacheConfig, dtype: str) -> CacheConfig:
    """Return the cache of a draft model, with as many sequences, tokens and blocks as ``cache``.

    It is paged and keeps all tokens, in the dtype of the computation.
    """
    grows = any(spec.window is None for spec in attention_specs(config))
    return CacheConfig(
        dtype=dtype,
        block_size=cache.block_size,
        max_num_seqs=cache.max_num_seqs,
        max_seq_len=min(cache.max_seq_len, config.max_seq_len),
        prefill_chunk_size=cache.prefill_chunk_size,
        num_blocks=cache.num_blocks if grows else None,
    )


def decode_step_bytes(plan: MemoryPlan, num_seqs: int, seq_len: int) -> int:
    """Return the bytes that a decode step of ``num_seqs`` sequences of ``seq_len`` tokens must read.

    These are the decoder's weights once (of experts, as many as the sequences can choose) and every sequence's cached
    keys, values and positions that its policy or window retains; of an encoder input, all that is cached.
    """
    shapes = config_lib.parameter_shapes
    lookups = shapes.lookup_bytes(plan.config, plan.weights_dtype, has_head_copy=plan.head_copy > 0)
    cached = 0
    for group_plan in plan.groups:
        size, num_slots = group_plan.bytes, _max_read_slots(plan, group_plan.group, seq_len)
        sparse = group_plan.group.sparse_read_policy
        num_read = num_slots if sparse is None else min(num_slots, sparse.budget)
        cached += num_read * (size.per_token_payload + size.per_token_scales) + num_slots * size.per_token_metadata
    return plan.weights - lookups - _idle_bytes(plan, num_seqs) + num_seqs * cached


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
    """Return the bytes that a decode step does not read: encoder, k and v of cross-attention, unused experts."""
    if plan.config.decoder is None:
        return 0
    idle, dtype_bytes = 0, config_lib.DTYPE_BYTES[plan.weights_dtype]
    for parameter in config_lib.parameter_shapes.parameters(plan.config):
        name, parts = parameter.name, parameter.name.split(".")
        size = plan.quantized[name] if name in plan.quantized else math.prod(parameter.shape) * dtype_bytes
        # lookup_bytes has the encoder's tables.
        is_source = parts[0] == "encoder" or (parts[0] == "encoder_embedding" and parts[1] in ("norm", "projection"))
        if is_source or parts[-3:-1] in (["cross_attention", "k"], ["cross_attention", "v"]):
            idle += size
        elif parameter.experts_per_token:
            num_experts = parameter.shape[0]
            idle += size // num_experts * max(0, num_experts - num_seqs * parameter.experts_per_token)
    return idle


def check_policy(config: ModelConfig, cache: CacheConfig, *, deterministic: bool = False) -> None:
    """Raise ConfigError if the model's positions do not support the cache; the message says what fits."""
    if config.decoder is None:
        return
    if deterministic:
        _check_deterministic(config, cache)
    if cache.rope_at == "write":
        _check_summaries(config, cache)
    if cache.endless:
        _check_endless(config, cache)


def _check_endless(config: ModelConfig, cache: CacheConfig) -> None:
    """Check that positions can be renumbered: RoPE and biases depend on distances, which a window bounds."""
    assert config.decoder is not None
    added = config.embedding.position
    if added is not None:
        raise ConfigError(
            f"cache.endless: {added.kind} positions are part of every key and value and cannot be renumbered",
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
        if isinstance(position, config_lib.CustomPositionsConfig) and any(spec.renumber_positions for spec in specs):
            raise ConfigError(
                f"cache.endless: {position.name} does not support renumbered positions", "Use window(n), without sinks."
            )


def _check_deterministic(config: ModelConfig, cache: CacheConfig) -> None:
    """Refuse policies that move keys or positions: batch-invariant tiles of keys are at fixed positions."""
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
    """Check that stored keys can be rotated back to be merged; sequence-dependent RoPE frequencies prevent that."""
    for layer in range(config.stack.num_layers):
        position = config.stack.layer_config(layer).attention.position
        levels = cache.resolved_policy.for_layer(layer).stateful
        scaling = position.scaling if isinstance(position, config_lib.RopeConfig) else None
        is_per_sequence = isinstance(scaling, config_lib.DynamicScalingConfig | config_lib.LongRopeScalingConfig)
        if scaling is not None and is_per_sequence and isinstance(levels, TieredPolicy) and levels.summaries:
            raise ConfigError(
                f"cache.policy: {levels}: {scaling.kind} scaling gives each sequence other frequencies, so stored keys "
                f"of layer {layer} cannot be rotated back to be summarized",
                "Store them unrotated: cache.rope_at='read'.",
            )


def check_summarizer(ratio: int, groups: Sequence[CacheGroup]) -> None:
    """Raise ConfigError if the cache has no summaries of the summarizer's ratio."""
    levels = [group.lower_level for group in groups if group.lower_level is not None and group.has_summaries]
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
