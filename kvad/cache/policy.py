"""Cache policies.

A policy is a function of its own sequence's history: other sequences and a full pool do not change which tokens it
keeps. There are four kinds; ``policy_parser.py`` has their names and combinations.

* By *position* (``Window``, ``Sinks``, ``BlockWindow``): a mask (``AttentionPattern``). Every query of a
  chunk sees what it would see alone, so the cache is exact against the model with the same mask, for all chunk sizes.
  Blocks that no later query can see are freed at once.
* By *score* (``EvictionPolicy``): tokens are scored per layer and kv head, and the best
  ``budget`` tokens stay. A sequence evicts when its length reaches a multiple of ``interval``, where the scheduler
  ends a chunk, so chunk sizes do not matter either; in between it holds up to ``budget + interval`` tokens. Lossy by
  design.
* By *level* (``TieredPolicy``): older tokens are quantized, the oldest are summarized. Or they leave the pool
  unchanged (``OffloadPolicy``): nothing is lost, and reading them takes longer.
* By *query* (``Quest``): all tokens stay, and each query reads the blocks that may matter to it.

Standard library only, because sizing and planning import it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

from kvad import config as cfg
from kvad.cache.quantization import get_format
from kvad.config import AttentionSpec
from kvad.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

UNBOUNDED = 1 << 40
ALL_QUERIES = 1 << 40  # EvictionPolicy.observed_queries: all queries count


class CachePolicy:
    """Base class, which keeps all tokens. Subclasses are frozen dataclasses whose fields are their arguments.

    ``name`` is the name in policy strings (``policy_parser.py``); a custom policy is named "package.module:Class".
    """

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        cfg.check_fields(self, f"cache.policy: {self._class_name}")

    @property
    def _class_name(self) -> str:
        return self.name or f"{type(self).__module__}:{type(self).__qualname__}"

    def restrict(self, spec: AttentionSpec, block_size: int) -> AttentionSpec:
        """Return the layer's spec with the tokens that stay visible. A layer with a narrower window is unchanged."""
        return spec

    def for_layer(self, layer: int) -> CachePolicy:
        """Return the policy of one layer."""
        return self

    @property
    def stateful(self) -> StatefulPolicy | None:
        """The part of this policy that is not a mask, or None."""
        return None

    def __str__(self) -> str:
        arguments = [(getattr(self, field.name), field.default) for field in fields(self)]  # type: ignore[arg-type]
        while arguments and arguments[-1][0] == arguments[-1][1]:
            arguments.pop()
        text = ", ".join(str(value) for value, _ in arguments)
        return f"{self._class_name}({text})" if text else self._class_name


@dataclass(frozen=True)
class KeepAll(CachePolicy):
    """All tokens stay."""

    name: ClassVar[str] = "full"


@dataclass(frozen=True)
class Window(CachePolicy):
    """The last ``size`` tokens stay, including the newest."""

    name: ClassVar[str] = "window"

    size: cfg.PositiveInt

    def restrict(self, spec: AttentionSpec, block_size: int) -> AttentionSpec:
        return _with_window(spec, self.size)


@dataclass(frozen=True)
class Sinks(CachePolicy):
    """The first ``num_sinks`` and the last ``window`` tokens stay (Xiao et al. 2023, sec. 3.2)."""

    name: ClassVar[str] = "sinks"

    num_sinks: cfg.PositiveInt
    window: cfg.PositiveInt

    def restrict(self, spec: AttentionSpec, block_size: int) -> AttentionSpec:
        return _with_window(spec, self.window, num_sinks=self.num_sinks)


@dataclass(frozen=True)
class BlockWindow(CachePolicy):
    """At most the last ``size`` tokens stay; ``block_size`` (0: that of the cache) tokens are dropped at a time."""

    name: ClassVar[str] = "block-window"

    size: cfg.PositiveInt
    block_size: cfg.NonNegativeInt = 0

    def restrict(self, spec: AttentionSpec, block_size: int) -> AttentionSpec:
        window_step = self.block_size or block_size
        if window_step > self.size:
            raise ConfigError(
                f"cache.policy: {self}: size must be at least the block size {window_step}",
                f"Use size {window_step}, or a smaller block_size",
            )
        return _with_window(spec, self.size, window_step=window_step)


def _with_window(spec: AttentionSpec, window: int, *, num_sinks: int = 0, window_step: int = 1) -> AttentionSpec:
    if spec.window is not None and spec.window <= window:
        return spec
    layer_window = spec.window if spec.layer_window is None else spec.layer_window
    return spec._replace(
        window=window, num_sinks=num_sinks, window_step=window_step, layer_window=layer_window if num_sinks else None
    )


class StatefulPolicy(CachePolicy):
    """Base class of policies that are not masks: they evict, demote or read sparsely. A layer has at most one."""

    kind: ClassVar[str]  # for errors
    combination_hint: ClassVar[str] = "Protect tokens by its num_sinks= and recent="

    @property
    def stateful(self) -> StatefulPolicy | None:
        return self


class EvictionContext(NamedTuple):
    """Inputs of a score: the ``m`` filled slots of one sequence in one layer, oldest first."""

    positions: Tensor  # [K, m]
    attention_mass: Tensor | None  # [K, m] received from the observed queries, summed over query heads
    keys: Callable[[], Tensor]  # [K, m, D] as attention reads them
    values: Callable[[], Tensor]  # [K, m, Dv]
    length: int  # length of the sequence
    layer: int


@dataclass(frozen=True)
class EvictionPolicy(StatefulPolicy):
    """Base class of policies that score tokens. Subclasses define ``score`` and ``observed_queries``."""

    kind = "an eviction policy"
    combination_hint = "Protect tokens by its num_sinks= and recent=, or give other layers another policy"

    budget: cfg.PositiveInt  # tokens that stay at each eviction
    interval: cfg.PositiveInt = 64  # evict when the length reaches a multiple of it
    recent: cfg.NonNegativeInt = 1  # the last tokens, which always stay
    num_sinks: cfg.NonNegativeInt = 0  # the first tokens, which always stay

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_sinks + self.recent > self.budget:
            raise ConfigError(
                f"cache.policy: {self}: {self.num_sinks} sinks and {self.recent} recent tokens exceed the budget",
                f"Use a budget of {self.num_sinks + self.recent}",
            )
        if self.observed_queries not in (0, ALL_QUERIES) and self.observed_queries > self.interval:
            raise ConfigError(
                f"cache.policy: {self}: interval must be at least {self.observed_queries}, got {self.interval}",
                f"Use interval={self.observed_queries}",
            )

    @property
    def observed_queries(self) -> int:
        """Number of latest queries before an eviction whose attention is summed; ALL_QUERIES for all queries."""
        return 0

    @property
    def per_head_independent(self) -> bool:
        """True if scores depend on this head's data only."""
        return False

    def next_trigger_length(self, length: int) -> int:
        """Return the first length above ``length`` at which the sequence evicts."""
        return (max(length, self.budget) // self.interval + 1) * self.interval

    def evicts_at(self, length: int) -> bool:
        """Return True if a sequence of this length evicts."""
        return length > self.budget and length % self.interval == 0

    def score(self, context: EvictionContext) -> Tensor:
        """Return scores [K, m]. Higher scores stay; of equal scores the older token stays."""
        raise NotImplementedError


@dataclass(frozen=True)
class HeavyHitters(EvictionPolicy):
    """H2O (Zhang et al. 2023, sec. 4): attention that a token received, summed over all queries so far.

    Half of the budget is for the latest tokens. With ``average=1`` the sum is divided by the number of queries that
    could see the token.
    """

    name: ClassVar[str] = "heavy-hitters"
    observed_queries = ALL_QUERIES
    per_head_independent = True

    recent: cfg.NonNegativeInt = -1  # -1: half of the budget
    average: int = 0

    def __post_init__(self) -> None:
        if self.recent == -1 and isinstance(self.budget, int):
            object.__setattr__(self, "recent", self.budget // 2)
        super().__post_init__()

    def score(self, context: EvictionContext) -> Tensor:
        assert context.attention_mass is not None
        return context.attention_mass / (context.length - context.positions) if self.average else context.attention_mass


@dataclass(frozen=True)
class SnapKV(EvictionPolicy):
    """SnapKV (Li et al. 2024, sec. 4): attention of the last ``window`` queries, averaged over ``kernel`` neighbors.

    The average keeps the neighbors of an important token. The tokens of the window stay.
    """

    name: ClassVar[str] = "snapkv"
    per_head_independent = True

    recent: cfg.NonNegativeInt = -1  # -1: the window
    window: cfg.PositiveInt = 32
    kernel: cfg.PositiveInt = 5

    def __post_init__(self) -> None:
        if self.recent == -1 and isinstance(self.budget, int):
            object.__setattr__(self, "recent", min(self.window, self.budget))
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise ConfigError(f"cache.policy: snapkv: kernel must be odd, got {self.kernel}")

    @property
    def observed_queries(self) -> int:
        return self.window

    def score(self, context: EvictionContext) -> Tensor:
        from torch.nn.functional import avg_pool1d

        assert context.attention_mass is not None
        older = context.attention_mass[:, : max(0, context.attention_mass.shape[1] - self.recent)]
        pooled = avg_pool1d(older, self.kernel, stride=1, padding=self.kernel // 2) if older.numel() else older
        scores = context.attention_mass.clone()  # The latest tokens stay in any case.
        scores[:, : older.shape[1]] = pooled
        return scores


@dataclass(frozen=True)
class TOVA(EvictionPolicy):
    """TOVA (Oren et al. 2024, sec. 4): attention of the last query, averaged over all heads of the layer."""

    name: ClassVar[str] = "tova"
    observed_queries = 1

    def score(self, context: EvictionContext) -> Tensor:
        assert context.attention_mass is not None
        return context.attention_mass.sum(0, keepdim=True).expand_as(context.attention_mass)


@dataclass(frozen=True)
class KeyNorm(EvictionPolicy):
    """Keys with small norms stay, because they receive attention (Devoto et al. 2024, sec. 3)."""

    name: ClassVar[str] = "key-norm"
    per_head_independent = True

    def score(self, context: EvictionContext) -> Tensor:
        return context.keys().pow(2).sum(dim=-1).neg()  # same order as the norm


@dataclass(frozen=True)
class Random(EvictionPolicy):
    """Random scores, the baseline: a function of seed, layer, head and position."""

    name: ClassVar[str] = "random"

    seed: int = 0

    def score(self, context: EvictionContext) -> Tensor:
        heads = range(context.positions.shape[0])
        salt = [(self.seed * 1_000_003 + context.layer * 8_191 + head + 1) * 40_503 % 65_521 for head in heads]
        hashed = context.positions.long() * 48_271 + context.positions.new_tensor(salt).long().unsqueeze(1)
        for _ in range(3):  # Lehmer steps: sums and products of 31 bits, equal on every device
            hashed = (hashed * 48_271 + 11) % 2_147_483_647
        return hashed


class DemotionPolicy(StatefulPolicy):
    """Base class of policies that move older tokens to lower levels."""

    kind = "a tiered policy"

    interval: int  # demote when the length reaches a multiple of it

    def next_trigger_length(self, length: int) -> int:
        """Return the first length above ``length`` at which the sequence demotes."""
        return (length // self.interval + 1) * self.interval


@dataclass(frozen=True)
class TieredPolicy(DemotionPolicy):
    """Sinks and recent tokens stay unchanged, older ones are quantized, the oldest summarized, then dropped.

    A summary is the mean of the values and of the unrotated keys, at the mean position; log(ratio) is added to its
    logit, so its weight is that of its tokens if their keys were equal. All sizes are in tokens and are rounded up to
    whole blocks.
    """

    name: ClassVar[str] = "tiered"

    recent: cfg.PositiveInt  # latest tokens, unchanged
    quantized: Annotated[int, cfg.Range(-1)] = -1  # maximum number of quantized tokens; -1: all older tokens
    key_format: str = "int8"  # of quantized tokens
    value_format: str = "int8"
    summaries: cfg.NonNegativeInt = 0  # maximum number of summaries
    ratio: Annotated[int, cfg.Range(2)] = 8  # tokens per summary
    interval: cfg.PositiveInt = 128  # demote when the length reaches a multiple of it
    num_sinks: cfg.NonNegativeInt = 0  # first tokens, unchanged

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("key_format", "value_format"):
            get_format(getattr(self, name), f"cache.policy: tiered: {name}")
        if self.quantized == -1 and self.summaries:
            raise ConfigError(
                f"cache.policy: {self}: with quantized=-1 no token is ever summarized",
                "Limit the quantized tokens: quantized=1024",
            )


@dataclass(frozen=True)
class OffloadPolicy(DemotionPolicy):
    """All tokens stay: the latest in the pool, older ones unchanged in host memory and on disk.

    All sizes are in tokens and are multiples of the block size.
    """

    name: ClassVar[str] = "offload"
    num_sinks: ClassVar[int] = 0
    quantized: ClassVar[int] = -1  # as in TieredPolicy: no token is dropped
    summaries: ClassVar[int] = 0

    recent: cfg.PositiveInt  # latest tokens in the pool, and up to ``interval`` more
    max_offloaded: Annotated[int, cfg.Range(-1)] = -1  # older tokens; -1: all
    interval: cfg.PositiveInt = 64  # offload when the length reaches a multiple of it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_offloaded == 0:
            raise ConfigError(
                f"cache.policy: {self}: max_offloaded must be -1 or at least 1, got 0",
                "Omit it: all older tokens are offloaded",
            )


@dataclass(frozen=True)
class Quest(StatefulPolicy):
    """All tokens stay; a query reads its own block and those with the best bound (Tang et al. 2024, sec. 3)."""

    name: ClassVar[str] = "quest"
    kind = "quest"
    combination_hint = ""

    budget: cfg.PositiveInt  # tokens that a query reads, in whole blocks
