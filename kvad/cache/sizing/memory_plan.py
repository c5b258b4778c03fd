"""Memory plan: bytes of a model and its cache before anything is allocated.

The plan is computed from the config alone, without torch. Two kinds of numbers are kept apart:

* **exact**: weights (sum of the state_dict's nbytes), the summarizer, token offload (``token_offload.py``: RAM,
  staging, checksums, and on disk if all sequences have their maximum length) and the pool (``KVCache.payload_bytes``,
  ``scale_bytes``, ``metadata_bytes``), because the same functions size the real ones. A pool is payload, scales and
  metadata for the requested sequences in whole blocks, plus the *reserved* blocks of each group (NULL_BLOCK and
  PADDING_BLOCK).
* **upper bound of a step's peak**: scratch and activations of the largest step that the scheduler may plan, of the
  decoder or the encoder (``activations.py``, ``scratch.py``). Not counted: the interpreter and torch (about 250 MiB),
  allocator slack, and prompt scoring, which requires logits of all T tokens instead of one per sequence.

An encoder has no pool: nothing is cached between two steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvad import config as config_lib
from kvad.cache import offload as offload_lib
from kvad.cache.config import CacheConfig, resolve_for_model
from kvad.cache.groups import CacheGroup, GroupBytes, build_groups, group_bytes
from kvad.cache.manager import check_shareable
from kvad.cache.policy import TieredPolicy
from kvad.cache.sizing.activations import peak_memory
from kvad.cache.sizing.compatibility import check_policy, check_summarizer
from kvad.config import ModelConfig, attention_specs
from kvad.errors import ConfigError, suggest
from kvad.model_input import RESERVED_BLOCKS

DEFAULT_BATCHED_TOKENS = 2048  # default number of new tokens per step


@dataclass(frozen=True)
class GroupPlan:
    """Bytes of one cache group, for the requested sequences and (``seq_``) for one sequence at its maximum length.

    ``payload``: keys and values; ``metadata``: positions, per-head data, block bounds and weights; ``reserved``:
    NULL_BLOCK and PADDING_BLOCK.
    """

    group: CacheGroup
    bytes: GroupBytes  # of the whole pool, reserved blocks included

    def _blocks(self, pool_bytes: int, num_blocks: int) -> int:
        return pool_bytes // self.group.num_blocks * num_blocks

    @property
    def reserved(self) -> int:
        return self._blocks(self.bytes.total, RESERVED_BLOCKS)

    @property
    def payload(self) -> int:
        return self._blocks(self.bytes.payload, self.group.num_usable_blocks)

    @property
    def scales(self) -> int:
        return self._blocks(self.bytes.scales, self.group.num_usable_blocks)

    @property
    def metadata(self) -> int:
        return self._blocks(self.bytes.metadata, self.group.num_usable_blocks)

    @property
    def seq_payload(self) -> int:
        return self.bytes.per_token_payload * self.max_slots_per_seq

    @property
    def seq_scales(self) -> int:
        return self._blocks(self.bytes.scales, self.group.max_blocks_per_seq)

    @property
    def seq_metadata(self) -> int:
        return self._blocks(self.bytes.metadata, self.group.max_blocks_per_seq)

    @property
    def max_slots_per_seq(self) -> int:
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
        return sum(group.payload for group in self.groups)

    @property
    def scales(self) -> int:
        return sum(group.scales for group in self.groups)

    @property
    def metadata(self) -> int:
        return sum(group.metadata for group in self.groups)

    @property
    def reserved(self) -> int:
        return sum(group.reserved for group in self.groups)

    @property
    def pool(self) -> int:
        """Bytes that KVCache allocates."""
        return self.payload + self.scales + self.metadata + self.reserved

    @property
    def swapped_seq_bytes(self) -> int:
        """Host bytes of one swapped-out sequence (``KVCache.swapped``); 0 if it is recomputed.

        Not part of ``total``, because the number of preempted sequences is unknown; ``cache.swap_space`` limits them.
        """
        token_groups = [plan for plan in self.groups if not plan.group.spec.is_cross_attention]
        groups = [plan.group for plan in token_groups]
        if not any(group.eviction_policy or isinstance(group.demotion_policy, TieredPolicy) for group in groups):
            return 0
        return sum(plan.seq_payload + plan.seq_scales + plan.seq_metadata for plan in token_groups)

    @property
    def prefix_cache_host_bytes(self) -> int:
        """Host bytes of the block store, without blocks that are being loaded (at most those of three sequences)."""
        return self.cache.prefix_cache_host_bytes

    @property
    def total(self) -> int:
        """Bytes of everything."""
        host = self.offload.host_bytes + (self.cache.swap_space or 0) + self.cache.prefix_cache_host_bytes
        return self.weights + self.summarizer + self.pool + self.scratch + self.activations + host


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


def plan_with(plan: MemoryPlan, cache: CacheConfig) -> MemoryPlan:
    """Plan the same model with another cache."""
    options = plan.weights_dtype, plan.max_num_batched_tokens, plan.weights, plan.summarizer_shape, plan.deterministic
    return _plan(plan.config, cache, *options)


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


def decode_step_bytes(plan: MemoryPlan, num_seqs: int, seq_len: int) -> int:
    """Return the bytes that a decode step of ``num_seqs`` sequences of ``seq_len`` tokens must read.

    These are the decoder's weights once (of experts, as many as the sequences can choose) and every sequence's cached
    keys, values and positions that its policy or window retains; of an encoder input, all that is cached.
    """
    lookups = config_lib.parameter_shapes.lookup_bytes(plan.config, plan.weights_dtype)
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
    numbers = 0
    for parameter in config_lib.parameter_shapes.parameters(plan.config):
        size, parts = math.prod(parameter.shape), parameter.name.split(".")
        # lookup_bytes has the encoder's tables.
        is_source = parts[0] == "encoder" or (parts[0] == "encoder_embedding" and parts[1] in ("norm", "projection"))
        if is_source or parts[-3:-1] in (["cross_attention", "k"], ["cross_attention", "v"]):
            numbers += size
        elif parameter.experts_per_token:
            num_experts = parameter.shape[0]
            numbers += size // num_experts * max(0, num_experts - num_seqs * parameter.experts_per_token)
    return numbers * config_lib.DTYPE_BYTES[plan.weights_dtype]
