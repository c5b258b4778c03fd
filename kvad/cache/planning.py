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

from kvad.cache.available import available_bytes
from kvad.cache.deposits import check_shared
from kvad.cache.full import SINKS
from kvad.cache.peak import peak
from kvad.cache.policy import Hierarchy
from kvad.cache.settle import settle
from kvad.cache.sizing import DTYPE_BYTES, MOST_ROWS, CacheConfig, Fit, Group, GroupBytes, group_bytes, groups
from kvad.cache.spilled import Spilling, spilling
from kvad.cache.weights import Summaries, compressor_shapes, lookup_bytes, weight_bytes, weight_shapes
from kvad.config import DynamicScaling, Experts, LongRopeScaling, ModelConfig, OwnPositions, Rope, mixers
from kvad.errors import ConfigError, MemoryPlanError, counted, nearest
from kvad.step import RESERVED_BLOCKS

__all__ = [
    "BUDGET",
    "GroupPlan",
    "MemoryPlan",
    "available_bytes",
    "check_compressor",
    "check_policy",
    "fits",
    "largest",
    "plan_memory",
    "planned_total",
    "require",
    "step_bytes",
]

BUDGET = 2048  # new tokens of a step, unless the engine is told otherwise


@dataclass(frozen=True)
class GroupPlan:
    """One cache group's share.  ``payload``, ``scales`` and ``columns`` are for the rows asked; beside them stands
    ``reserved``."""

    group: Group
    bytes: GroupBytes  # of the whole pool, reserved blocks included

    @property
    def reserved(self) -> int:
        """Payload, scales and columns of the empty block and the bin."""
        return RESERVED_BLOCKS * self.bytes.total // self.group.blocks

    @property
    def payload(self) -> int:
        return self.bytes.payload // self.group.blocks * self.group.usable

    @property
    def scales(self) -> int:
        return self.bytes.scales // self.group.blocks * self.group.usable

    @property
    def columns(self) -> int:
        return self.bytes.columns // self.group.blocks * self.group.usable

    @property
    def row_payload(self) -> int:
        """Keys and values of one row at its longest, in whole blocks."""
        return self.bytes.per_token_payload * self.slots

    @property
    def row_scales(self) -> int:
        return self.bytes.scales // self.group.blocks * self.group.blocks_per_row

    @property
    def row_columns(self) -> int:
        return self.bytes.columns // self.group.blocks * self.group.blocks_per_row

    @property
    def slots(self) -> int:
        """Slots of one row at its longest."""
        return self.group.blocks_per_row * self.group.block_size


@dataclass(frozen=True)
class MemoryPlan:
    """Everything in bytes.  ``budget``: new tokens of a step at most; ``cache``: as asked for (``settle.py``).

    ``learned``: what makes summaries, None for their means; ``compressor``: its parameters, which are float32 whatever
    the weights are.  ``deterministic``: the same bits in any batch.
    """

    config: ModelConfig
    cache: CacheConfig
    weights_dtype: str
    budget: int
    weights: int
    groups: tuple[GroupPlan, ...]
    scratch: int
    activations: int
    spilling: Spilling
    compressor: int = 0
    learned: Summaries | None = None
    deterministic: bool = False

    @property
    def payload(self) -> int:
        return sum(group.payload for group in self.groups)

    @property
    def scales(self) -> int:
        return sum(group.scales for group in self.groups)

    @property
    def columns(self) -> int:
        return sum(group.columns for group in self.groups)

    @property
    def reserved(self) -> int:
        return sum(group.reserved for group in self.groups)

    @property
    def pool(self) -> int:
        """What Memory allocates."""
        return self.payload + self.scales + self.columns + self.reserved

    @property
    def parked_row(self) -> int:
        """What one row takes in *host* memory while it has given way to others (``Memory.parked``): all that it held,
        where it cannot be computed anew; 0 where it can.  Beside ``total``, as nobody knows how many rows will wait;
        ``parking`` bounds them."""
        own = [each for each in self.groups if not each.group.mixer.cross]
        if not any(each.group.scored or isinstance(each.group.levels, Hierarchy) for each in own):
            return 0
        return sum(each.row_payload + each.row_scales + each.row_columns for each in own)

    @property
    def parking(self) -> int:
        """Host memory for rows that give way (``cache.park_ram``), where a bound was given."""
        return self.cache.park_ram or 0

    @property
    def tiers(self) -> int:
        """Host memory of the tiers: what they may hold, and what may wait to be written.  Not counted: what is on its
        way back in, which is at most what three rows hold, while they wait."""
        return self.cache.tier_memory

    @property
    def total(self) -> int:
        beside = self.spilling.host + self.parking + self.tiers
        return self.weights + self.compressor + self.pool + self.scratch + self.activations + beside


def check_policy(config: ModelConfig, cache: CacheConfig, *, deterministic: bool = False) -> None:
    """ConfigError where the model's positions do not allow what is asked: it says which, and what fits."""
    if config.decoder is None:
        return
    if deterministic:
        _check_deterministic(config, cache)
    if cache.rotate == "write":
        _check_summaries(config, cache)
    if cache.endless:
        _check_endless(config, cache)


def _check_endless(config: ModelConfig, cache: CacheConfig) -> None:
    """Positions that are added to the embeddings are baked into keys and values, and nothing can number them anew; a
    rotation and a bias are made of distances, which a window bounds."""
    assert config.decoder is not None
    added = config.embed.position
    if added is not None:
        raise ConfigError(
            f"endless: {added.kind} positions are part of every key and value and cannot be numbered anew",
            "rows of this model end at its limit: say what then (--on-full stop)",
        )
    seeing = cache.narrowed(mixers(config))
    for sinks, window in ((mixer.sinks, mixer.window) for mixer in seeing if not mixer.cross):
        if window is not None and sinks + window > config.limit:
            raise ConfigError(
                f"endless: {sinks + window} tokens kept, the model knows distances up to {config.limit}",
                f"keep at most {config.limit}",
            )
        if window is not None and sinks and cache.layout == "paged" and window < cache.block_size:
            raise ConfigError(
                f"endless: a window of {window} tokens beside the sinks is less than a block of {cache.block_size}",
                f"keep at least {cache.block_size}, or take a smaller cache.block_size",
            )
    for kind in config.decoder.kinds.values():
        position = kind.mixer.position
        if isinstance(position, OwnPositions) and any(mixer.renumber for mixer in seeing):
            raise ConfigError(
                f"endless: {position.name} says nothing of positions that are numbered anew",
                "take window(n), without sinks",
            )


def _check_deterministic(config: ModelConfig, cache: CacheConfig) -> None:
    """Tiles of keys lie at fixed positions: what ranks, descends, chooses or is numbered anew has others."""
    for group in groups(mixers(config), cache):
        policy = group.scored or group.levels or group.chooses
        if policy is not None or group.mixer.renumber:
            said = f"the policy {policy}" if policy is not None else "rows whose sinks are numbered anew"
            if group.levels is not None and cache.on_full in ("summarise", "spill"):
                said = f"on_full={cache.on_full}, that is {said}"
            raise ConfigError(
                f"deterministic: not promised under {said}",
                "policies by position keep it: full, window(n), sinks(k, n) up to the limit, truncate(n)",
            )


def _check_summaries(config: ModelConfig, cache: CacheConfig) -> None:
    """Summaries are means of unrotated keys: where frequencies are a row's own, stored keys cannot be turned back."""
    for layer in range(config.stack.layers):
        position, levels = config.stack.layer(layer).mixer.position, cache.kept.at(layer).levels
        scaling = position.scaling if isinstance(position, Rope) else None
        if levels is not None and levels.summaries and isinstance(scaling, DynamicScaling | LongRopeScaling):
            raise ConfigError(
                f"cache.policy: {levels}: {scaling.kind} scaling gives each row frequencies of its own, so stored keys "
                f"of layer {layer} cannot be turned back to be summarised",
                "keep them unrotated: cache.rotate='read'",
            )


def check_compressor(ratio: int, placed: Sequence[Group]) -> None:
    """ConfigError where a cache of these groups has no summaries for a compressor of this ratio to make."""
    levels = [group.level for group in placed if group.level is not None and group.level.ratio > 1]
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
    budget: int = BUDGET,
    learned: Summaries | None = None,
    deterministic: bool = False,
) -> MemoryPlan:
    """Size everything.  Weights are computed with in their own dtype.

    Raises ConfigError for a dtype, a budget or a cache that cannot be, or not with these ``learned`` summaries, or not
    ``deterministic``.
    """
    if weights_dtype not in DTYPE_BYTES:
        raise ConfigError(f"unknown dtype {weights_dtype!r} of weights", nearest(weights_dtype, DTYPE_BYTES))
    if budget < 1:
        raise ConfigError(f"budget: must be at least 1, found {budget}")
    if deterministic and weights_dtype == "float16":
        raise ConfigError("deterministic: not promised in float16", "dtype=float32 or bfloat16")
    weights = weight_bytes(config, weights_dtype)
    made = _plan(config, cache, weights_dtype, budget, weights, learned, deterministic)
    if learned is not None:
        check_compressor(learned.ratio, [each.group for each in made.groups])
    return made


def _plan(
    config: ModelConfig,
    cache: CacheConfig,
    weights_dtype: str,
    budget: int,
    weights: int,
    learned: Summaries | None,
    deterministic: bool,
) -> MemoryPlan:
    settled = settle(config, cache)
    check_policy(config, settled, deterministic=deterministic)
    made = groups(mixers(config), settled)
    check_shared(settled, made)
    summarised = any(group.level is not None and group.level.ratio > 1 for group in made)
    hidden = learned.hidden if learned is not None and summarised else 0
    passing = peak(config, settled, made, weights_dtype, budget, hidden=hidden, deterministic=deterministic)
    return MemoryPlan(
        config,
        cache,
        weights_dtype,
        budget,
        weights,
        tuple(GroupPlan(group, group_bytes(group)) for group in made),
        passing.scratch,
        passing.activations,
        spilling(made, settled.spill_ram),
        _compressor_bytes(config, learned) if learned is not None and summarised else 0,
        learned,
        deterministic,
    )


def _compressor_bytes(config: ModelConfig, learned: Summaries) -> int:
    shapes = compressor_shapes(mixers(config), learned).values()
    return DTYPE_BYTES["float32"] * sum(map(math.prod, shapes))


def require(plan: MemoryPlan, available: int | None) -> None:
    """MemoryPlanError when the plan needs more than is there; it names need, have, and what would fit.

    ``available`` None (nobody knows) lets everything pass.
    """
    if available is None or plan.total <= available:
        return
    sources = f" and sources of {plan.cache.source_capacity:,}" if plan.config.source is not None else ""
    parts = plan.weights + plan.compressor, plan.pool + plan.spilling.host, plan.scratch + plan.activations
    weights, cache, work = map(_shown, parts)
    rows, tiers = counted(plan.cache.rows, "row"), f", tiers {_shown(plan.tiers)}" if plan.tiers else ""
    message = (
        f"{rows} of {plan.cache.capacity:,} tokens{sources} {'needs' if plan.cache.rows == 1 else 'need'} "
        f"{_shown(plan.total)} (weights {weights}, cache {cache}, work {work}{tiers}) "
        f"and {_shown(available)} is available"
    )
    raise MemoryPlanError(message, _advice(plan, available))


def _advice(plan: MemoryPlan, available: int) -> str:
    found = fits(plan, available)
    if not found:
        least = plan.total - plan.pool - plan.scratch
        if plan.tiers > available:
            return "give the tiers less memory: --tier-ram"
        hint = f"no row fits: without any cache it takes {_shown(least)}; smaller weights or a smaller dtype would"
        return "; or ".join([hint, *_smaller(plan, available)])
    same_length = [fit for fit in found if fit.capacity == plan.cache.capacity][-1:]
    same_rows = [fit for fit in found if fit.rows <= plan.cache.rows][-1:]
    lines = sorted({(fit.rows, fit.capacity) for fit in (*same_length, *same_rows, found[0])})
    shown = (f"{rows} row{'s' if rows > 1 else ''} of {capacity:,} tokens" for rows, capacity in lines)
    return f"what would fit: {', or '.join([*shown, *_smaller(plan, available)])}"


def _smaller(plan: MemoryPlan, available: int) -> list[str]:
    """The rows and tokens that were asked for, in the first format that fits, and under a policy that does."""
    cache, found = plan.cache, []
    for name in ("bfloat16", "int8", "int4"):
        total = _total_of(plan, replace(cache, dtype=name, keys=None, values=None))
        if total is not None and total <= available < plan.total:
            found.append(f"all of it as {name} ({_shown(total)})")
            break
    quarter = cache.capacity // 4
    if cache.policy == "full" and quarter >= 64:
        sinks = f"sinks({SINKS}, {quarter - SINKS})"
        total = _total_of(plan, replace(cache, policy=sinks, blocks=None))
        if total is not None and total <= available:
            found.append(f"all of it under {sinks} ({_shown(total)})")
    return found


def _total_of(plan: MemoryPlan, cache: CacheConfig) -> int | None:
    """None for a cache that this model cannot have."""
    try:
        return planned_total(plan, cache)
    except ConfigError:
        return None


def fits(plan: MemoryPlan, memory: int) -> tuple[Fit, ...]:
    """The largest rows x capacity whose whole plan (weights and work too) stays in ``memory``.

    One line for 1, 2, 4, ... rows with the longest capacity in whole blocks, up to the model's limit, and one for the
    most rows of the capacity that was planned.  Empty when not even a row of one block fits.
    """
    limit = max(plan.config.limit, plan.cache.capacity)
    unit = min(plan.cache.block_size, limit)

    def total(rows: int, capacity: int) -> int:
        return planned_total(plan, replace(plan.cache, rows=rows, capacity=capacity, blocks=None))

    def longest(rows: int) -> int:
        if total(rows, limit) <= memory:
            return limit
        return unit * largest(limit // unit, lambda units: total(rows, unit * units) <= memory)

    found: set[tuple[int, int]] = set()
    rows = 1
    while rows <= MOST_ROWS and (capacity := longest(rows)):
        found.add((rows, capacity))
        rows *= 2
    most = largest(MOST_ROWS, lambda rows: total(rows, plan.cache.capacity) <= memory)
    if most:
        found.add((most, plan.cache.capacity))
    return tuple(Fit(rows, capacity, total(rows, capacity)) for rows, capacity in sorted(found))


def planned_total(plan: MemoryPlan, cache: CacheConfig) -> int:
    """Of the same model with another cache, weights and work included.  ConfigError for a cache that cannot be."""
    cache = replace(cache, on_full=cache.on_full if _goes_on(plan.config, cache) else "preempt")
    same = plan.weights_dtype, plan.budget, plan.weights, plan.learned, plan.deterministic
    return _plan(plan.config, cache, *same).total


def _goes_on(config: ModelConfig, cache: CacheConfig) -> bool:
    """Whether rows of this capacity can go on as asked: too short, or as long as the model's limit, they end."""
    try:
        settle(config, cache)
    except ConfigError:
        return False
    return True


def largest(high: int, holds: Callable[[int], bool]) -> int:
    """The largest n in 1..high with ``holds(n)``, which is true up to a point and false after it; 0 for none."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def step_bytes(plan: MemoryPlan, rows: int, context: int) -> int:
    """Bytes that a decode step of ``rows`` rows must read, each ``context`` tokens long: the decoder's weights once (of
    experts, as many as the rows can choose), every row's own keys, values and positions: what its policy or a
    window still keeps; of a source, all that the cache holds of one."""
    weights = plan.weights - lookup_bytes(plan.config, plan.weights_dtype) - _idle_bytes(plan, rows)
    cached = 0
    for each in plan.groups:
        size, kept = each.bytes, _kept(plan, each.group, context)
        seen = kept if each.group.chooses is None else min(kept, each.group.chooses.budget)
        cached += seen * (size.per_token_payload + size.per_token_scales) + kept * size.per_token_columns
    return weights + rows * cached


def _kept(plan: MemoryPlan, group: Group, context: int) -> int:
    """Slots that hold something that a row of ``context`` tokens still reads, at most."""
    mixer, level = group.mixer, group.level
    if mixer.cross:
        return plan.cache.source_capacity
    if mixer.window is not None:
        return min(context, mixer.sinks + mixer.window)
    if group.scored is not None:
        return min(context, group.scored.budget + group.scored.every)
    policy = group.levels if level is None else plan.groups[level.of].group.levels
    if policy is None:
        return context
    if level is None:
        return min(context, policy.sinks + policy.recent + policy.every)
    older = max(0, context - policy.sinks - policy.recent)
    if level.ratio > 1:
        older = -(-max(0, older - max(0, policy.packed)) // level.ratio)
    return min(older, level.most * group.block_size)


def _idle_bytes(plan: MemoryPlan, rows: int) -> int:
    """Weights that a decode step leaves alone: the encoder's, what makes a source's keys and values, other experts."""
    decoder = plan.config.decoder
    if decoder is None:
        return 0
    numbers = 0
    for name, shape in weight_shapes(plan.config).items():
        pieces = name.split(".")
        of_source = pieces[0] == "source" and pieces[1] in ("norm", "project")  # lookup_bytes has its tables
        if of_source or pieces[0] == "encoder" or pieces[-3:-1] in (["cross", "k"], ["cross", "v"]):
            numbers += math.prod(shape)
        elif "mlp" in pieces and len(pieces) > 2 and pieces[2].isdecimal():
            mlp = decoder.layer(int(pieces[2])).mlp
            if isinstance(mlp, Experts) and "router" not in pieces:
                numbers += math.prod(shape) // mlp.count * max(0, mlp.count - rows * mlp.active)
    return numbers * DTYPE_BYTES[plan.weights_dtype]


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
