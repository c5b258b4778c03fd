"""Eviction policies, one class each. Tokens with higher scores stay longer.

A policy scores the slots of one sequence in one layer (``policy.EvictionContext``), per kv head. The host never reads
the scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvad import config as cfg
from kvad.cache.policy import ALL_QUERIES, EvictionContext, EvictionPolicy
from kvad.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class HeavyHitters(EvictionPolicy):
    """H2O (Zhang et al. 2023, sec. 4): attention that a token received, summed over all queries so far.

    Half of the budget is for the latest tokens. With ``average=1`` the sum is divided by the number of queries that
    could see the token.
    """

    name: ClassVar[str] = "heavy-hitters"

    recent: cfg.NonNegativeInt = -1  # -1: half of the budget
    average: int = 0

    def __post_init__(self) -> None:
        if self.recent == -1 and isinstance(self.budget, int):
            object.__setattr__(self, "recent", self.budget // 2)
        super().__post_init__()

    @property
    def observed_queries(self) -> int:
        return ALL_QUERIES

    @property
    def per_head_independent(self) -> bool:
        return True

    def score(self, context: EvictionContext) -> Tensor:
        assert context.attention_mass is not None
        return context.attention_mass / (context.length - context.positions) if self.average else context.attention_mass


@dataclass(frozen=True)
class SnapKV(EvictionPolicy):
    """SnapKV (Li et al. 2024, sec. 4): attention of the last ``window`` queries, averaged over ``kernel`` neighbors.

    The average keeps the neighbors of an important token. The tokens of the window stay.
    """

    name: ClassVar[str] = "snapkv"

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

    @property
    def per_head_independent(self) -> bool:
        return True

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

    @property
    def observed_queries(self) -> int:
        return 1

    def score(self, context: EvictionContext) -> Tensor:
        assert context.attention_mass is not None
        return context.attention_mass.sum(0, keepdim=True).expand_as(context.attention_mass)


@dataclass(frozen=True)
class KeyNorm(EvictionPolicy):
    """Keys with small norms stay, because they receive attention (Devoto et al. 2024, sec. 3)."""

    name: ClassVar[str] = "key-norm"

    @property
    def per_head_independent(self) -> bool:
        return True

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
