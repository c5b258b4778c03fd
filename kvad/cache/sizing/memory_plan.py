"""What a model and its cache take before anything is allocated: from the config alone, no torch.

Two kinds of numbers, and they are kept apart:

* **to the byte**: weights (``sum of state_dict nbytes``), a compressor's, what is spilled (``spilled.py``: host memory,
  staging, checksums; and on disk, when all rows are at their longest) and the pool (``Memory.payload_bytes``,
  ``scale_bytes``, ``column_bytes``), because the same functions size the real ones.  A pool is payload, scales and
  columns for the rows asked, in whole blocks, and the *reserved* blocks of each group beside them (``step.py``: empty
  and bin).
* **an upper bound of a step's peak**: scratch and activations of the largest step that the scheduler may plan, of the
  decoder or of the encoder; ``cache/peak.py`` has the formulas.  Not counted: the interpreter and torch themselves
  (about 250 MiB), allocator slack, and prompt scoring, which wants the logits of all T tokens instead of one per row.

An encoder has no pool: it keeps nothing between two steps.
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

DEFAULT_BATCHED_TOKENS = 2048  # new tokens of a step, unless the engine is told otherwise


@dataclass(frozen=True)
class GroupPlan:
    """One cache group's share.  ``payload``, ``scales`` and ``columns`` are for the rows asked; beside them stands
    ``reserved``."""

    group: CacheGroup
    bytes: GroupBytes  # of the whole pool, reserved blocks included

    @property
    def reserved(self) -> int:
        """Payload, scales and columns of the empty block and the bin."""
        return RESERVED_BLOCKS * self.bytes.total // self.group.num_blocks

    @property
    def payload(self) -> int:
        return self.bytes.payload // self.group.num_blocks * self.group.num_usable_blocks

    @property
    def scales(self) -> int:
        return self.bytes.scales // self.group.num_blocks * self.group.num_usable_blocks

    @property
    def metadata(self) -> int:
        return self.bytes.metadata // self.group.num_blocks * self.group.num_usable_blocks

    @property
    def seq_payload(self) -> int:
        """Keys and values of one row at its longest, in whole blocks."""
        return self.bytes.per_token_payload * self.max_slots_per_seq

    @property
    def seq_scales(self) -> int:
        return self.bytes.scales // self.group.num_blocks * self.group.max_blocks_per_seq

    @property
    def seq_metadata(self) -> int:
        return self.bytes.metadata // self.group.num_blocks * self.group.max_blocks_per_seq

    @property
    def max_slots_per_seq(self) -> int:
        """Slots of one row at its longest."""
        return self.group.max_blocks_per_seq * self.group.block_size


@dataclass(frozen=True)
class MemoryPlan:
    """Everything in bytes.  ``budget``: new tokens of a step at most; ``cache``: as asked for (``settle.py``).

    ``learned``: what makes summaries, None for their means; ``compressor``: its parameters, which are float32 whatever
    the weights are.  ``deterministic``: the same bits in any batch.
    """

    config: ModelConfig
    cache: CacheConfig
    weights_dtype: str
    max_num_batched_tokens: int
    weights: int
    groups: tuple[GroupPlan, ...]
    scratch: int
    activations: int
    offload: offload_lib.token_offload.OffloadLayout
    summarizer: int = 0
    summarizer_shape: config_lib.parameter_shapes.SummarizerShape | None = None
    deterministic: bool = False

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
        """What Memory allocates."""
        return self.payload + self.scales + self.metadata + self.reserved

    @property
    def swapped_seq_bytes(self) -> int:
        """What one row takes in *host* memory while it has given way to others (``Memory.parked``): all that it held,
        where it cannot be computed anew; 0 where it can.  Beside ``total``, as nobody knows how many rows will wait;
        ``parking`` bounds them."""
        own = [each for each in self.groups if not each.group.spec.is_cross_attention]
        if not any(each.group.eviction_policy or isinstance(each.group.demotion_policy, TieredPolicy) for each in own):
            return 0
        return sum(each.seq_payload + each.seq_scales + each.seq_metadata for each in own)

    @property
    def swap_bytes(self) -> int:
        """Host memory for rows that give way (``cache.park_ram``), where a bound was given."""
        return self.cache.swap_space or 0

    @property
    def prefix_cache_host_bytes(self) -> int:
        """Host memory of the tiers: what they may hold, and what may wait to be written.  Not counted: what is on its
        way back in, which is at most what three rows hold, while they wait."""
        return self.cache.prefix_cache_host_bytes

    @property
    def total(self) -> int:
        beside = self.offload.host_bytes + self.swap_bytes + self.prefix_cache_host_bytes
        return self.weights + self.summarizer + self.pool + self.scratch + self.activations + beside


def check_policy(config: ModelConfig, cache: CacheConfig, *, deterministic: bool = False) -> None:
    """ConfigError where the model's positions do not allow what is asked: it says which, and what fits."""
    if config.decoder is None:
        return
    if deterministic:
        _check_deterministic(config, cache)
    if cache.rope_at == "write":
        _check_summaries(config, cache)
    if cache.endless:
        _check_endless(config, cache)


def _check_endless(config: ModelConfig, cache: CacheConfig) -> None:
    """Positions that are added to the embeddings are baked into keys and values, and nothing can number them anew; a
    rotation and a bias are made of distances, which a window bounds."""
    assert config.decoder is not None
    added = config.embedding.position
    if added is not None:
        raise ConfigError(
            f"endless: {added.kind} positions are part of every key and value and cannot be numbered anew",
            "rows of this model end at its limit: say what then (--on-full stop)",
        )
    seeing = cache.restrict(attention_specs(config))
    for sinks, window in ((mixer.num_sinks, mixer.window) for mixer in seeing if not mixer.is_cross_attention):
        if window is not None and sinks + window > config.max_seq_len:
            raise ConfigError(
                f"endless: {sinks + window} tokens kept, the model knows distances up to {config.max_seq_len}",
                f"keep at most {config.max_seq_len}",
            )
        if window is not None and sinks and cache.layout == "paged" and window < cache.block_size:
            raise ConfigError(
                f"endless: a window of {window} tokens beside the sinks is less than a block of {cache.block_size}",
                f"keep at least {cache.block_size}, or take a smaller cache.block_size",
            )
    for kind in config.decoder.layer_types.values():
        position = kind.attention.position
        if isinstance(position, CustomPositionsConfig) and any(mixer.renumber_positions for mixer in seeing):
            raise ConfigError(
                f"endless: {position.name} says nothing of positions that are numbered anew",
                "take window(n), without sinks",
            )


def _check_deterministic(config: ModelConfig, cache: CacheConfig) -> None:
    """Tiles of keys lie at fixed positions: what ranks, descends, chooses or is numbered anew has others."""
    for group in build_groups(attention_specs(config), cache):
        policy = group.eviction_policy or group.demotion_policy or group.sparse_read_policy
        if policy is not None or group.spec.renumber_positions:
            said = f"the policy {policy}" if policy is not None else "rows whose sinks are numbered anew"
            if group.demotion_policy is not None and cache.overflow in ("summarise", "spill"):
                said = f"on_full={cache.overflow}, that is {said}"
            raise ConfigError(
                f"deterministic: not promised under {said}",
                "policies by position keep it: full, window(n), sinks(k, n) up to the limit, truncate(n)",
            )


def _check_summaries(config: ModelConfig, cache: CacheConfig) -> None:
    """Summaries are means of unrotated keys: where frequencies are a row's own, stored keys cannot be turned back."""
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
                f"cache.policy: {levels}: {scaling.kind} scaling gives each row frequencies of its own, so stored keys "
                f"of layer {layer} cannot be turned back to be summarised",
                "keep them unrotated: cache.rope_at='read'",
            )


def check_summarizer(ratio: int, placed: Sequence[CacheGroup]) -> None:
    """ConfigError where a cache of these groups has no summaries for a compressor of this ratio to make."""
    levels = [group.lower_level for group in placed if group.lower_level is not None and group.lower_level.ratio > 1]
    if not levels:
        raise ConfigError(
            "compressor: the cache's policy summarises nothing",
            f'say --policy "hierarchy(64, packed=0, summaries=256, ratio={ratio})"',
        )
    for level in levels:
        if level.ratio != ratio:
            raise ConfigError(
                f"compressor: it makes a summary of {ratio} tokens, the policy of {level.ratio}",
                f"say ratio={ratio}, or train another",
            )


def plan_memory(
    config: ModelConfig,
    cache: CacheConfig,
    *,
    weights_dtype: str = "float32",
    budget: int = DEFAULT_BATCHED_TOKENS,
    learned: config_lib.parameter_shapes.SummarizerShape | None = None,
    deterministic: bool = False,
) -> MemoryPlan:
    """Size everything.  Weights are computed with in their own dtype.

    Raises ConfigError for a dtype, a budget or a cache that cannot be, or not with these ``learned`` summaries, or not
    ``deterministic``.
    """
    if weights_dtype not in config_lib.DTYPE_BYTES:
        raise ConfigError(
            f"unknown dtype {weights_dtype!r} of weights",
            suggest(weights_dtype, config_lib.DTYPE_BYTES),
        )
    if budget < 1:
        raise ConfigError(f"budget: must be at least 1, found {budget}")
    if deterministic and weights_dtype == "float16":
        raise ConfigError("deterministic: not promised in float16", "dtype=float32 or bfloat16")
    weights = config_lib.parameter_shapes.weight_bytes(config, weights_dtype)
    made = _plan(config, cache, weights_dtype, budget, weights, learned, deterministic)
    if learned is not None:
        check_summarizer(learned.ratio, [each.group for each in made.groups])
    return made


def _plan(
    config: ModelConfig,
    cache: CacheConfig,
    weights_dtype: str,
    budget: int,
    weights: int,
    learned: config_lib.parameter_shapes.SummarizerShape | None,
    deterministic: bool,
) -> MemoryPlan:
    settled = resolve_for_model(config, cache)
    check_policy(config, settled, deterministic=deterministic)
    made = build_groups(attention_specs(config), settled)
    check_shareable(settled, made)
    summarised = any(group.lower_level is not None and group.lower_level.ratio > 1 for group in made)
    hidden = learned.hidden if learned is not None and summarised else 0
    passing = peak_memory(config, settled, made, weights_dtype, budget, hidden=hidden, deterministic=deterministic)
    return MemoryPlan(
        config,
        cache,
        weights_dtype,
        budget,
        weights,
        tuple(GroupPlan(group, group_bytes(group)) for group in made),
        passing.scratch,
        passing.activations,
        offload_lib.token_offload.plan_offload(made, settled.offload_ram),
        _compressor_bytes(config, learned) if learned is not None and summarised else 0,
        learned,
        deterministic,
    )


def _compressor_bytes(config: ModelConfig, learned: config_lib.parameter_shapes.SummarizerShape) -> int:
    shapes = config_lib.parameter_shapes.summarizer_shapes(attention_specs(config), learned).values()
    return config_lib.DTYPE_BYTES["float32"] * sum(map(math.prod, shapes))


def require_memory(plan: MemoryPlan, available: int | None) -> None:
    """MemoryPlanError when the plan needs more than is there; it names need, have, and what would fit.

    ``available`` None (nobody knows) lets everything pass.
    """
    if available is None or plan.total <= available:
        return
    sources = f" and sources of {plan.cache.max_source_len:,}" if plan.config.encoder_input is not None else ""
    parts = plan.weights + plan.summarizer, plan.pool + plan.offload.host_bytes, plan.scratch + plan.activations
    weights, cache, work = map(_format_bytes, parts)
    rows, tiers = (
        format_count(plan.cache.max_num_seqs, "row"),
        f", tiers {_format_bytes(plan.prefix_cache_host_bytes)}" if plan.prefix_cache_host_bytes else "",
    )
    message = (
        f"{rows} of {plan.cache.max_seq_len:,} tokens{sources} {'needs' if plan.cache.max_num_seqs == 1 else 'need'} "
        f"{_format_bytes(plan.total)} (weights {weights}, cache {cache}, work {work}{tiers}) "
        f"and {_format_bytes(available)} is available"
    )
    raise MemoryPlanError(message, _advice(plan, available))


def _advice(plan: MemoryPlan, available: int) -> str:
    found = find_fits(plan, available)
    if not found:
        least = plan.total - plan.pool - plan.scratch
        if plan.prefix_cache_host_bytes > available:
            return "give the tiers less memory: --tier-ram"
        hint = (
            f"no row fits: without any cache it takes {_format_bytes(least)}; smaller weights or a smaller dtype would"
        )
        return "; or ".join([hint, *_smaller_options(plan, available)])
    same_length = [fit for fit in found if fit.max_seq_len == plan.cache.max_seq_len][-1:]
    same_rows = [fit for fit in found if fit.num_seqs <= plan.cache.max_num_seqs][-1:]
    lines = sorted({(fit.num_seqs, fit.max_seq_len) for fit in (*same_length, *same_rows, found[0])})
    shown = (f"{rows} row{'s' if rows > 1 else ''} of {capacity:,} tokens" for rows, capacity in lines)
    return f"what would fit: {', or '.join([*shown, *_smaller_options(plan, available)])}"


def _smaller_options(plan: MemoryPlan, available: int) -> list[str]:
    """The rows and tokens that were asked for, in the first format that fits, and under a policy that does."""
    cache, found = plan.cache, []
    for name in ("bfloat16", "int8", "int4"):
        total = _total_bytes(plan, replace(cache, dtype=name, key_dtype=None, value_dtype=None))
        if total is not None and total <= available < plan.total:
            found.append(f"all of it as {name} ({_format_bytes(total)})")
            break
    quarter = cache.max_seq_len // 4
    if cache.policy == "full" and quarter >= 64:
        sinks = f"sinks({NUM_SINKS}, {quarter - NUM_SINKS})"
        total = _total_bytes(plan, replace(cache, policy=sinks, num_blocks=None))
        if total is not None and total <= available:
            found.append(f"all of it under {sinks} ({_format_bytes(total)})")
    return found


def _total_bytes(plan: MemoryPlan, cache: CacheConfig) -> int | None:
    """None for a cache that this model cannot have."""
    try:
        return total_bytes_with(plan, cache)
    except ConfigError:
        return None


def find_fits(plan: MemoryPlan, memory: int) -> tuple[MemoryFit, ...]:
    """The largest rows x capacity whose whole plan (weights and work too) stays in ``memory``.

    One line for 1, 2, 4, ... rows with the longest capacity in whole blocks, up to the model's limit, and one for the
    most rows of the capacity that was planned.  Empty when not even a row of one block fits.
    """
    limit = max(plan.config.max_seq_len, plan.cache.max_seq_len)
    unit = min(plan.cache.block_size, limit)

    def total(rows: int, capacity: int) -> int:
        return total_bytes_with(plan, replace(plan.cache, max_num_seqs=rows, max_seq_len=capacity, num_blocks=None))

    def longest(rows: int) -> int:
        if total(rows, limit) <= memory:
            return limit
        return unit * binary_search_max(limit // unit, lambda units: total(rows, unit * units) <= memory)

    found: set[tuple[int, int]] = set()
    rows = 1
    while rows <= MAX_PLANNED_SEQS and (capacity := longest(rows)):
        found.add((rows, capacity))
        rows *= 2
    most = binary_search_max(MAX_PLANNED_SEQS, lambda rows: total(rows, plan.cache.max_seq_len) <= memory)
    if most:
        found.add((most, plan.cache.max_seq_len))
    return tuple(MemoryFit(rows, capacity, total(rows, capacity)) for rows, capacity in sorted(found))


def total_bytes_with(plan: MemoryPlan, cache: CacheConfig) -> int:
    """Of the same model with another cache, weights and work included.  ConfigError for a cache that cannot be."""
    cache = replace(cache, overflow=cache.overflow if _can_continue(plan.config, cache) else "preempt")
    same = plan.weights_dtype, plan.max_num_batched_tokens, plan.weights, plan.summarizer_shape, plan.deterministic
    return _plan(plan.config, cache, *same).total


def _can_continue(config: ModelConfig, cache: CacheConfig) -> bool:
    """Whether rows of this capacity can go on as asked: too short, or as long as the model's limit, they end."""
    try:
        resolve_for_model(config, cache)
    except ConfigError:
        return False
    return True


def binary_search_max(high: int, holds: Callable[[int], bool]) -> int:
    """The largest n in 1..high with ``holds(n)``, which is true up to a point and false after it; 0 for none."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def decode_step_bytes(plan: MemoryPlan, rows: int, context: int) -> int:
    """Bytes that a decode step of ``rows`` rows must read, each ``context`` tokens long: the decoder's weights once (of
    experts, as many as the rows can choose), every row's own keys, values and positions: what its policy or a
    window still keeps; of a source, all that the cache holds of one."""
    weights = (
        plan.weights
        - config_lib.parameter_shapes.lookup_bytes(plan.config, plan.weights_dtype)
        - _idle_bytes(plan, rows)
    )
    cached = 0
    for each in plan.groups:
        size, kept = each.bytes, _max_read_slots(plan, each.group, context)
        seen = kept if each.group.sparse_read_policy is None else min(kept, each.group.sparse_read_policy.budget)
        cached += seen * (size.per_token_payload + size.per_token_scales) + kept * size.per_token_metadata
    return weights + rows * cached


def _max_read_slots(plan: MemoryPlan, group: CacheGroup, context: int) -> int:
    """Slots that hold something that a row of ``context`` tokens still reads, at most."""
    mixer, level = group.spec, group.lower_level
    if mixer.is_cross_attention:
        return plan.cache.max_source_len
    if mixer.window is not None:
        return min(context, mixer.num_sinks + mixer.window)
    if group.eviction_policy is not None:
        return min(context, group.eviction_policy.budget + group.eviction_policy.interval)
    policy = group.demotion_policy if level is None else plan.groups[level.token_group].group.demotion_policy
    if policy is None:
        return context
    if level is None:
        return min(context, policy.num_sinks + policy.recent + policy.interval)
    older = max(0, context - policy.num_sinks - policy.recent)
    if level.ratio > 1:
        older = -(-max(0, older - max(0, policy.quantized)) // level.ratio)
    return min(older, level.max_blocks * group.block_size)


def _idle_bytes(plan: MemoryPlan, rows: int) -> int:
    """Weights that a decode step leaves alone: the encoder's, what makes a source's keys and values, other experts."""
    decoder = plan.config.decoder
    if decoder is None:
        return 0
    numbers = 0
    for name, shape in config_lib.parameter_shapes.weight_shapes(plan.config).items():
        pieces = name.split(".")
        of_source = pieces[0] == "source" and pieces[1] in ("norm", "project")  # lookup_bytes has its tables
        if of_source or pieces[0] == "encoder" or pieces[-3:-1] in (["cross", "k"], ["cross", "v"]):
            numbers += math.prod(shape)
        elif "mlp" in pieces and len(pieces) > 2 and pieces[2].isdecimal():
            mlp = decoder.layer_config(int(pieces[2])).mlp
            if isinstance(mlp, MoEConfig) and "router" not in pieces:
                numbers += (
                    math.prod(shape) // mlp.num_experts * max(0, mlp.num_experts - rows * mlp.num_experts_per_token)
                )
    return numbers * config_lib.DTYPE_BYTES[plan.weights_dtype]


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
