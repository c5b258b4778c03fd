"""Policies that rank what a row holds: one class each.  The higher a token ranks, the longer it stays.

They are given a row's slots in one layer (``policy.Seen``) and answer per kv head; the host never reads the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvad.cache.policy import ALL_QUERIES, EvictionContext, EvictionPolicy, check_minimum
from kvad.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class HeavyHitters(EvictionPolicy):
    """H2O (Zhang et al. 2023, sec. 4): the attention that a token got, summed over all queries so far, and half of the
    budget for the latest tokens.  ``average`` 1: divided by how many queries could see it."""

    name: ClassVar[str] = "heavy-hitters"

    recent: int = -1
    average: int = 0

    def __post_init__(self) -> None:
        if self.recent == -1:
            object.__setattr__(self, "recent", self.budget // 2)
        super().__post_init__()

    @property
    def observed_queries(self) -> int:
        return ALL_QUERIES

    @property
    def per_head_independent(self) -> bool:
        return True

    def score(self, seen: EvictionContext) -> Tensor:
        assert seen.attention_mass is not None
        return seen.attention_mass / (seen.length - seen.positions) if self.average else seen.attention_mass


@dataclass(frozen=True)
class SnapKV(EvictionPolicy):
    """SnapKV (Li et al. 2024, sec. 4): the attention of the last ``window`` queries, averaged over ``kernel``
    neighbours, so that a needle keeps what stands around it; the window itself stays."""

    name: ClassVar[str] = "snapkv"

    recent: int = -1
    window: int = 32
    kernel: int = 5

    def __post_init__(self) -> None:
        check_minimum(1, "snapkv", "window", self.window)
        check_minimum(1, "snapkv", "kernel", self.kernel)
        if self.kernel % 2 == 0:
            raise ConfigError(f"cache.policy: snapkv: kernel must be odd, found {self.kernel}")
        if self.recent == -1:
            object.__setattr__(self, "recent", min(self.window, self.budget))
        super().__post_init__()

    @property
    def observed_queries(self) -> int:
        return self.window

    @property
    def per_head_independent(self) -> bool:
        return True

    def score(self, seen: EvictionContext) -> Tensor:
        from torch.nn.functional import avg_pool1d

        assert seen.attention_mass is not None
        past = seen.attention_mass[:, : max(0, seen.attention_mass.shape[1] - self.recent)]
        pooled = avg_pool1d(past, self.kernel, stride=1, padding=self.kernel // 2) if past.numel() else past
        ranks = seen.attention_mass.clone()  # the latest stay anyway
        ranks[:, : past.shape[1]] = pooled
        return ranks


@dataclass(frozen=True)
class TOVA(EvictionPolicy):
    """TOVA (Oren et al. 2024, sec. 4): the last query's attention, averaged over all heads of the layer."""

    name: ClassVar[str] = "tova"

    @property
    def observed_queries(self) -> int:
        return 1

    def score(self, seen: EvictionContext) -> Tensor:
        assert seen.attention_mass is not None
        return seen.attention_mass.sum(0, keepdim=True).expand_as(seen.attention_mass)


@dataclass(frozen=True)
class KeyNorm(EvictionPolicy):
    """Short keys stay: they are those that get attention (Devoto et al. 2024, sec. 3)."""

    name: ClassVar[str] = "norm"

    @property
    def per_head_independent(self) -> bool:
        return True

    def score(self, seen: EvictionContext) -> Tensor:
        return seen.keys().pow(2).sum(dim=-1).neg()  # of equal order as the norm


@dataclass(frozen=True)
class Random(EvictionPolicy):
    """Any tokens: what a policy has to beat.  Which ones is a function of seed, layer, head and position."""

    name: ClassVar[str] = "random"

    seed: int = 0

    def score(self, seen: EvictionContext) -> Tensor:
        heads = range(seen.positions.shape[0])
        salt = [(self.seed * 1_000_003 + seen.layer * 8_191 + head + 1) * 40_503 % 65_521 for head in heads]
        mixed = seen.positions.long() * 48_271 + seen.positions.new_tensor(salt).long().unsqueeze(1)
        for _ in range(3):  # Lehmer steps: sums and products of 31 bits, the same on every device
            mixed = (mixed * 48_271 + 11) % 2_147_483_647
        return mixed
