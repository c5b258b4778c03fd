"""What a model and its cache take before anything is allocated: from the config alone, no torch.

Two kinds of numbers, and they are kept apart:

* **to the byte**: weights (``sum of state_dict nbytes``) and the pool (``Memory.payload_bytes/column_bytes``), because
  the same functions size the real ones.  A pool is payload and columns for the rows asked, in whole blocks, and the
  *reserved* blocks of each group beside them (``step.py``: empty and bin).
* **an upper bound of a step's peak**: scratch and activations, for the largest step that the scheduler may plan,
  ``T = min(budget, rows * chunk)`` new tokens with every row at its longest.  They come and go with each layer, so
  they are seen in a process's peak, not in what it holds between two steps.  A test holds the bound against what
  torch really makes.  Not counted: the interpreter and torch themselves (about 250 MiB), allocator slack, and prompt
  scoring, which wants the logits of all T tokens instead of one per row.

Letters as in ``step.py``; ``c`` is the bytes of a computed value, ``e`` of a cached one, F an MLP's hidden width.

scratch of a group, for one layer at a time (``cache/layout.py``, ``ops/attend.py``):

    gather   rows S K (D + Dv) e      keys and values of the blocks of all rows, side by side; a single contiguous
                                      row is read where it lies: 0
    widen    rows S K (D + Dv) c      where the cache's dtype is not the computed one
             rows S K (D + Dv) 4      where half precision meets a kernel that computes in float32
    mask     12 M                     M = min(T S, max(MASK_BUDGET, rows S)) pairs made at a time
             T S + 8 rows S           kept for the group's other layers: booleans (small masks only), positions
    scores   4 * 4 Q (8 in float64)   Q = min(H T S, max(SCORE_BUDGET, H rows S)): only with softcap, sink logits or
                                      biases, or in float16; else the fused kernel makes no such matrix

activations, the largest of three moments:

    attention   c T (4 E + 4 (H D + K D) + 2 K Dv + 3 H Dv)   stream, norm; q, k while they turn, v; outputs
    MLP         c T (5 E + 3 F)                               stream before and after attention, norm; gate, up, product
    logits      c T E + rows V (c + 3 * 4)                    one per row, and the sampler's float32 copies
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvad.cache.available import available_bytes
from kvad.cache.sizing import DTYPE_BYTES, MOST_ROWS, CacheConfig, Fit, Group, GroupBytes, group_bytes, groups
from kvad.cache.weights import lookup_bytes, weight_bytes
from kvad.config import Attention, Gated, Layer, ModelConfig, Rope, head_dim, mixers
from kvad.errors import ConfigError, MemoryPlanError, nearest
from kvad.step import RESERVED_BLOCKS

__all__ = ["BUDGET", "GroupPlan", "MemoryPlan", "available_bytes", "fits", "plan_memory", "require", "step_bytes"]

BUDGET = 2048  # new tokens of a step, unless the engine is told otherwise
MASK_BUDGET = 1 << 22  # ops/attend.py's, which imports torch; a test holds them equal
SCORE_BUDGET = 1 << 24


@dataclass(frozen=True)
class GroupPlan:
    """One cache group's share.  ``payload`` and ``columns`` are for the rows asked; ``reserved`` stands beside them."""

    group: Group
    bytes: GroupBytes  # of the whole pool, reserved blocks included

    @property
    def reserved(self) -> int:
        """Payload and columns of the empty block and the bin."""
        return RESERVED_BLOCKS * self.bytes.total // self.group.blocks

    @property
    def payload(self) -> int:
        return self.bytes.payload // self.group.blocks * self.group.usable

    @property
    def columns(self) -> int:
        return self.bytes.columns // self.group.blocks * self.group.usable

    @property
    def row_payload(self) -> int:
        """Keys and values of one row at its longest, in whole blocks."""
        return self.bytes.per_token_payload * self.slots

    @property
    def row_columns(self) -> int:
        return self.bytes.per_token_columns * self.slots

    @property
    def slots(self) -> int:
        """Slots of one row at its longest."""
        return self.group.blocks_per_row * self.group.block_size


@dataclass(frozen=True)
class MemoryPlan:
    """Everything in bytes.  ``budget``: new tokens of a step at most."""

    config: ModelConfig
    cache: CacheConfig
    weights_dtype: str
    budget: int
    weights: int
    groups: tuple[GroupPlan, ...]
    scratch: int
    activations: int

    @property
    def payload(self) -> int:
        return sum(group.payload for group in self.groups)

    @property
    def columns(self) -> int:
        return sum(group.columns for group in self.groups)

    @property
    def reserved(self) -> int:
        return sum(group.reserved for group in self.groups)

    @property
    def pool(self) -> int:
        """What Memory allocates."""
        return self.payload + self.columns + self.reserved

    @property
    def total(self) -> int:
        return self.weights + self.pool + self.scratch + self.activations


def plan_memory(
    config: ModelConfig, cache: CacheConfig, *, weights_dtype: str = "float32", budget: int = BUDGET
) -> MemoryPlan:
    """Size everything.  Weights are computed with in their own dtype.

    Raises ConfigError for a dtype, a budget or a cache that cannot be.
    """
    if weights_dtype not in DTYPE_BYTES:
        raise ConfigError(f"unknown dtype {weights_dtype!r} of weights", nearest(weights_dtype, DTYPE_BYTES))
    if budget < 1:
        raise ConfigError(f"budget: must be at least 1, found {budget}")
    return _plan(config, cache, weights_dtype, budget, weight_bytes(config, weights_dtype))


def _plan(config: ModelConfig, cache: CacheConfig, weights_dtype: str, budget: int, weights: int) -> MemoryPlan:
    made = groups(mixers(config), cache)
    tokens = min(budget, cache.rows * min(cache.chunk, cache.capacity))
    scratch = sum(_kept(group, cache, tokens) for group in made)
    scratch += max(_scratch(config, group, cache, weights_dtype, tokens) for group in made)
    return MemoryPlan(
        config,
        cache,
        weights_dtype,
        budget,
        weights,
        tuple(GroupPlan(group, group_bytes(group, cache.dtype)) for group in made),
        scratch,
        _activations(config, cache.rows, tokens, DTYPE_BYTES[weights_dtype]),
    )


def require(plan: MemoryPlan, available: int | None) -> None:
    """MemoryPlanError when the plan needs more than is there; it names need, have, and what would fit.

    ``available`` None (nobody knows) lets everything pass.
    """
    if available is None or plan.total <= available:
        return
    message = (
        f"{plan.cache.rows:,} rows of {plan.cache.capacity:,} tokens need {_shown(plan.total)} (weights "
        f"{_shown(plan.weights)}, cache {_shown(plan.pool)}, work {_shown(plan.scratch + plan.activations)}) "
        f"and {_shown(available)} is available"
    )
    raise MemoryPlanError(message, _advice(plan, available))


def _advice(plan: MemoryPlan, available: int) -> str:
    found = fits(plan, available)
    if not found:
        least = plan.total - plan.pool - plan.scratch
        return f"no row fits: without any cache it takes {_shown(least)}; smaller weights or a smaller dtype would"
    same_length = [fit for fit in found if fit.capacity == plan.cache.capacity][-1:]
    same_rows = [fit for fit in found if fit.rows <= plan.cache.rows][-1:]
    lines = sorted({(fit.rows, fit.capacity) for fit in (*same_length, *same_rows, found[0])})
    shown = (f"{rows} row{'s' if rows > 1 else ''} of {capacity:,} tokens" for rows, capacity in lines)
    return f"what would fit: {', or '.join(shown)}"


def fits(plan: MemoryPlan, memory: int) -> tuple[Fit, ...]:
    """The largest rows x capacity whose whole plan (weights and work too) stays in ``memory``.

    One line for 1, 2, 4, ... rows with the longest capacity in whole blocks, up to the model's limit, and one for the
    most rows of the capacity that was planned.  Empty when not even a row of one block fits.
    """
    limit = max(plan.config.limit, plan.cache.capacity)
    unit = min(plan.cache.block_size, limit)

    def total(rows: int, capacity: int) -> int:
        cache = replace(plan.cache, rows=rows, capacity=capacity, blocks=None)
        return _plan(plan.config, cache, plan.weights_dtype, plan.budget, plan.weights).total

    def longest(rows: int) -> int:
        if total(rows, limit) <= memory:
            return limit
        return unit * _largest(limit // unit, lambda units: total(rows, unit * units) <= memory)

    found: set[tuple[int, int]] = set()
    rows = 1
    while rows <= MOST_ROWS and (capacity := longest(rows)):
        found.add((rows, capacity))
        rows *= 2
    most = _largest(MOST_ROWS, lambda rows: total(rows, plan.cache.capacity) <= memory)
    if most:
        found.add((most, plan.cache.capacity))
    return tuple(Fit(rows, capacity, total(rows, capacity)) for rows, capacity in sorted(found))


def _largest(high: int, holds: Callable[[int], bool]) -> int:
    """The largest n in 1..high with ``holds(n)``, which is true up to a point and false after it; 0 for none."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def step_bytes(plan: MemoryPlan, rows: int, context: int) -> int:
    """Bytes that a decode step of ``rows`` rows must read, each ``context`` tokens long: weights once, every row's own
    keys, values and positions (of a window, what it still sees)."""
    weights = plan.weights - lookup_bytes(plan.config, plan.weights_dtype)
    cached = 0
    for each in plan.groups:
        window = each.group.mixer.window
        seen = context if window is None else min(context, window)
        cached += seen * (each.bytes.per_token_payload + each.bytes.per_token_columns)
    return weights + rows * cached


# ---------------------------------------------------------------- what comes and goes; formulas in the docstring above


def _kept(group: Group, cache: CacheConfig, tokens: int) -> int:
    """Masks and positions that live as long as the step."""
    slots = group.blocks_per_row * group.block_size
    lanes = min(tokens, cache.rows)
    return min(tokens * slots, lanes * MASK_BUDGET) + 8 * cache.rows * slots


def _scratch(config: ModelConfig, group: Group, cache: CacheConfig, computed: str, tokens: int) -> int:
    mixer, rows = group.mixer, cache.rows
    slots = group.blocks_per_row * group.block_size
    values = rows * slots * mixer.kv_heads * (mixer.head_dim + mixer.value_dim)
    in_place = cache.layout == "contiguous" and rows == 1
    scratch = 0 if in_place else values * DTYPE_BYTES[cache.dtype]
    if cache.dtype != computed:
        scratch += values * DTYPE_BYTES[computed]
    scratch += 12 * min(tokens * slots, max(MASK_BUDGET, rows * slots))
    layers = {config.decoder.kind_of(index): config.decoder.layer(index) for index in group.layers}
    unfused = [layer.mixer for layer in layers.values() if _makes_scores(layer.mixer, computed)]
    if unfused:
        heads = max(mixer.heads for mixer in unfused)
        width = max(4, DTYPE_BYTES[computed])
        scratch += 4 * width * min(heads * tokens * slots, max(SCORE_BUDGET, heads * rows * slots))
        scratch += values * 4 if DTYPE_BYTES[computed] == 2 else 0
    return scratch


def _makes_scores(mixer: Attention, computed: str) -> bool:
    """Whether attention holds a matrix of scores: not in the fused kernel without biases."""
    plain = mixer.position is None or isinstance(mixer.position, Rope)
    return not plain or mixer.softcap is not None or mixer.sinks or computed == "float16"


def _activations(config: ModelConfig, rows: int, tokens: int, size: int) -> int:
    layers = config.decoder.kinds.values()
    moments = [_attention(config, layer.mixer) for layer in layers] + [_mlp(config, layer) for layer in layers]
    logits = tokens * config.width * size + rows * config.vocab * (size + 3 * 4)
    return max(size * tokens * max(moments), logits)


def _attention(config: ModelConfig, mixer: Attention) -> int:
    dim, kv_heads = head_dim(config, mixer), mixer.kv_heads or mixer.heads
    value_dim = mixer.value_dim or dim
    turned = 4 * (mixer.heads + kv_heads) * dim
    return 4 * config.width + turned + 2 * kv_heads * value_dim + 3 * mixer.heads * value_dim


def _mlp(config: ModelConfig, layer: Layer) -> int:
    held = 3 if isinstance(layer.mlp, Gated) else 2
    return 5 * config.width + held * layer.mlp.hidden


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
