"""What stays of a row: the kinds of policies, and those that go by position or give up precision.

A policy is a function of its row's own history: neighbours and a full pool change nothing of what it keeps.  There are
three kinds.  What they are called, and how they are put together, is ``named.py``.

* By *position* (:class:`Window`, :class:`Sinks`, :class:`Truncate`): a mask (``step.Reach``).  Every query of a chunk
  sees what it would see alone, so a cache under such a policy is exact against the same model with that mask, whatever
  the chunks; blocks that no later query can see go back at once.
* By *rank* (:class:`Scored`, ``ranks.py``): what is held is scored in each layer and kv head apart, and the best
  ``budget`` tokens stay.  A row is cut when its length reaches a multiple of ``every``, where the scheduler ends a
  chunk, so that chunks do not matter either; in between it holds up to ``budget + every`` tokens.  What is dropped is
  gone: lossy by design.
* By *levels* (:class:`Hierarchy`): older tokens are packed, the oldest are summarised.  Or they leave the pool as they
  are (:class:`Spilled`): nothing is lost, and reading them takes longer.
* By *choice* (:class:`Quest`): everything stays, and each query reads what may matter to it.

Standard library only: sizing and planning read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from kvad.cache.quantization import get_format
from kvad.config import AttentionSpec
from kvad.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

UNBOUNDED = 1 << 40
ALL_QUERIES = 1 << 40  # Scored.watch: every query counts


class CachePolicy:
    """The base: keeps everything.  Subclasses are frozen dataclasses whose fields are their arguments.

    ``name``: what it is called (``named.py``); one of one's own goes by "package.module:Class".
    """

    name: ClassVar[str] = ""

    def restrict(self, mixer: AttentionSpec, block_size: int) -> AttentionSpec:
        """The layer with what its queries may still see.  A layer whose own window is narrower stays as it is."""
        return mixer

    def for_layer(self, layer: int) -> CachePolicy:
        """The policy of one layer."""
        return self

    @property
    def eviction(self) -> EvictionPolicy | None:
        """The policy that ranks what is held, where this is one."""
        return None

    @property
    def tiered(self) -> TieredPolicy | OffloadPolicy | None:
        """The policy that keeps older tokens in other forms, or elsewhere, where this is one."""
        return None

    @property
    def sparse_read(self) -> Quest | None:
        """The policy under which a query reads some blocks only, where this is one."""
        return None

    def __str__(self) -> str:
        every = [(getattr(self, each.name), each.default) for each in fields(self)]  # type: ignore[arg-type]
        while every and every[-1][0] == every[-1][1]:
            every.pop()
        said = ", ".join(str(value) for value, _ in every)
        name = self.name or f"{type(self).__module__}:{type(self).__qualname__}"
        return f"{name}({said})" if said else name


@dataclass(frozen=True)
class KeepAll(CachePolicy):
    """Everything stays."""

    name: ClassVar[str] = "full"


@dataclass(frozen=True)
class Window(CachePolicy):
    """The last ``size`` tokens stay, the newest included."""

    name: ClassVar[str] = "window"

    size: int

    def __post_init__(self) -> None:
        check_minimum(1, "window", "size", self.size)

    def restrict(self, mixer: AttentionSpec, block_size: int) -> AttentionSpec:
        return _narrowed(mixer, self.size)


@dataclass(frozen=True)
class Sinks(CachePolicy):
    """The first ``sinks`` tokens and the last ``window`` stay (Xiao et al. 2023, sec. 3.2)."""

    name: ClassVar[str] = "sinks"

    num_sinks: int
    window: int

    def __post_init__(self) -> None:
        check_minimum(1, "sinks", "sinks", self.num_sinks)
        check_minimum(1, "sinks", "window", self.window)

    def restrict(self, mixer: AttentionSpec, block_size: int) -> AttentionSpec:
        return _narrowed(mixer, self.window, sinks=self.num_sinks)


@dataclass(frozen=True)
class BlockWindow(CachePolicy):
    """At most the last ``size`` tokens stay; the oldest ``block`` (0: the cache's block) leave together."""

    name: ClassVar[str] = "truncate"

    size: int
    block_size: int = 0

    def __post_init__(self) -> None:
        check_minimum(1, "truncate", "size", self.size)
        check_minimum(0, "truncate", "block", self.block_size)

    def restrict(self, mixer: AttentionSpec, block_size: int) -> AttentionSpec:
        grain = self.block_size or block_size
        if grain > self.size:
            raise ConfigError(
                f"cache.policy: {self}: a block of {grain} tokens leaves at once, so nothing would stay",
                f"keep at least {grain}, or take a smaller block",
            )
        return _narrowed(mixer, self.size, grain=grain)


def _narrowed(mixer: AttentionSpec, window: int, *, sinks: int = 0, grain: int = 1) -> AttentionSpec:
    if mixer.window is not None and mixer.window <= window:
        return mixer
    outer = mixer.window if mixer.layer_window is None else mixer.layer_window
    return mixer._replace(window=window, num_sinks=sinks, window_step=grain, layer_window=outer if sinks else None)


class EvictionContext(NamedTuple):
    """What a policy may rank by: one row's held slots in one layer, oldest first, ``m`` of them.

    ``positions`` [K, m]; ``mass`` [K, m]: the attention that each got from the queries that count, summed over the
    heads that read it (None: not watched); ``keys()`` and ``values()`` [K, m, D] as attention reads them; ``now``: the
    row's length; ``layer``.
    """

    positions: Tensor
    attention_mass: Tensor | None
    keys: Callable[[], Tensor]
    values: Callable[[], Tensor]
    length: int
    layer: int


@dataclass(frozen=True)
class EvictionPolicy(CachePolicy):
    """A policy that ranks: ``budget`` tokens stay at each cut, the last ``recent`` and the first ``sinks`` among them.

    ``every``: a cut is made when the length reaches a multiple of it.  Subclasses say ``rank`` (on the device, which
    the host never reads), and ``watch``: how many of the latest queries before a cut leave their attention (0: none
    do; :data:`ALWAYS`: all, from the first on).
    """

    budget: int
    interval: int = 64
    recent: int = 1
    num_sinks: int = 0

    def __post_init__(self) -> None:
        name = str(self).partition("(")[0]
        for field, least in (("budget", 1), ("interval", 1), ("recent", 0), ("num_sinks", 0)):
            check_minimum(least, name, field, getattr(self, field))
        if self.num_sinks + self.recent > self.budget:
            raise ConfigError(
                f"cache.policy: {self}: {self.num_sinks} sinks and {self.recent} recent tokens exceed the budget",
                f"give a budget of at least {self.num_sinks + self.recent}",
            )
        if self.observed_queries not in (0, ALL_QUERIES) and self.observed_queries > self.interval:
            raise ConfigError(
                f"cache.policy: {self}: it looks at the last {self.observed_queries} queries, and cuts every {self.interval}",
                f"take every={self.observed_queries} or more",
            )

    @property
    def eviction(self) -> EvictionPolicy | None:
        return self

    @property
    def observed_queries(self) -> int:
        return 0

    @property
    def per_head_independent(self) -> bool:
        """Whether a head's ranks follow from that head's columns, whatever its number and the other heads."""
        return False

    def next_trigger_length(self, length: int) -> int:
        """The first length above ``length`` at which the row is cut."""
        return (max(length, self.budget) // self.interval + 1) * self.interval

    def evicts_at(self, length: int) -> bool:
        """Whether a row of this length is cut."""
        return length > self.budget and length % self.interval == 0

    def score(self, seen: EvictionContext) -> Tensor:
        """[K, m]: the higher, the longer it stays; of equals the older one stays."""
        raise NotImplementedError


@dataclass(frozen=True)
class TieredPolicy(CachePolicy):
    """The first ``sinks`` and the last ``recent`` tokens as they are; older ones packed, at most ``packed`` (-1: all);
    what is older still as at most ``summaries`` tokens that stand for ``ratio`` each; then gone.

    A summary is the mean of the values and of the keys, unrotated, put at the mean position; its logit gets log(ratio),
    so that it weighs what its tokens would weigh if their keys were equal.  ``every``: a row descends when its length
    reaches a multiple of it.  All numbers are in tokens and are rounded up to whole blocks.
    """

    name: ClassVar[str] = "hierarchy"

    recent: int
    quantized: int = -1
    key_format: str = "int8"
    value_format: str = "int8"
    summaries: int = 0
    ratio: int = 8
    interval: int = 128
    num_sinks: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("recent", 1),
            ("quantized", -1),
            ("summaries", 0),
            ("ratio", 2),
            ("interval", 1),
            ("num_sinks", 0),
        ):
            check_minimum(least, "hierarchy", name, getattr(self, name))
        for name in ("key_format", "value_format"):
            get_format(getattr(self, name), f"cache.policy: hierarchy: {name}")
        if self.quantized == -1 and self.summaries:
            raise ConfigError(
                f"cache.policy: {self}: all older tokens stay packed, so none is ever summarised",
                "say how many stay packed: packed=1024",
            )

    @property
    def tiered(self) -> TieredPolicy | None:
        return self

    def next_trigger_length(self, length: int) -> int:
        """The first length above ``length`` at which the row descends."""
        return (length // self.interval + 1) * self.interval


@dataclass(frozen=True)
class OffloadPolicy(CachePolicy):
    """Everything stays: the last ``recent`` tokens, and up to ``every`` more, in the pool; up to ``older`` before them
    (-1: all) in host memory and on disk (``spill.py``), as they are.

    All numbers are in tokens and are multiples of the block size.  A row descends when its length reaches a multiple
    of ``every``.
    """

    name: ClassVar[str] = "spilled"
    num_sinks: ClassVar[int] = 0
    quantized: ClassVar[int] = -1  # as Hierarchy has it: nothing is ever gone
    summaries: ClassVar[int] = 0

    recent: int
    max_offloaded: int = -1
    interval: int = 64

    def __post_init__(self) -> None:
        for name, least in (("recent", 1), ("max_offloaded", -1), ("interval", 1)):
            check_minimum(least, "spilled", name, getattr(self, name))
        if self.max_offloaded == 0:
            raise ConfigError(f"cache.policy: {self}: no room for older tokens", "leave older out: all of them")

    @property
    def tiered(self) -> OffloadPolicy | None:
        return self

    def next_trigger_length(self, length: int) -> int:
        """The first length above ``length`` at which the row descends."""
        return (length // self.interval + 1) * self.interval


@dataclass(frozen=True)
class Quest(CachePolicy):
    """Everything stays; a query reads its own block and those whose keys may match it best, ``budget`` tokens in whole
    blocks (Tang et al. 2024, sec. 3)."""

    name: ClassVar[str] = "quest"

    budget: int

    def __post_init__(self) -> None:
        check_minimum(1, "quest", "budget", self.budget)

    @property
    def sparse_read(self) -> Quest | None:
        return self


def check_minimum(least: int, policy: str, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"cache.policy: {policy}: {name} must be a whole number of at least {least}, found {value!r}")
