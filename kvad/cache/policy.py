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

from kvad.cache.formats import find_format
from kvad.config import MixerSpec
from kvad.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ALWAYS",
    "MANY",
    "Full",
    "Hierarchy",
    "Policy",
    "Quest",
    "Scored",
    "Seen",
    "Sinks",
    "Spilled",
    "Truncate",
    "Window",
    "at_least",
]

MANY = 1 << 40
ALWAYS = 1 << 40  # Scored.watch: every query counts


class Policy:
    """The base: keeps everything.  Subclasses are frozen dataclasses whose fields are their arguments.

    ``name``: what it is called (``named.py``); one of one's own goes by "package.module:Class".
    """

    name: ClassVar[str] = ""

    def narrow(self, mixer: MixerSpec, block_size: int) -> MixerSpec:
        """The layer with what its queries may still see.  A layer whose own window is narrower stays as it is."""
        return mixer

    def at(self, layer: int) -> Policy:
        """The policy of one layer."""
        return self

    @property
    def scored(self) -> Scored | None:
        """The policy that ranks what is held, where this is one."""
        return None

    @property
    def levels(self) -> Hierarchy | Spilled | None:
        """The policy that keeps older tokens in other forms, or elsewhere, where this is one."""
        return None

    @property
    def chooses(self) -> Quest | None:
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
class Full(Policy):
    """Everything stays."""

    name: ClassVar[str] = "full"


@dataclass(frozen=True)
class Window(Policy):
    """The last ``size`` tokens stay, the newest included."""

    name: ClassVar[str] = "window"

    size: int

    def __post_init__(self) -> None:
        at_least(1, "window", "size", self.size)

    def narrow(self, mixer: MixerSpec, block_size: int) -> MixerSpec:
        return _narrowed(mixer, self.size)


@dataclass(frozen=True)
class Sinks(Policy):
    """The first ``sinks`` tokens and the last ``window`` stay (Xiao et al. 2023, sec. 3.2)."""

    name: ClassVar[str] = "sinks"

    sinks: int
    window: int

    def __post_init__(self) -> None:
        at_least(1, "sinks", "sinks", self.sinks)
        at_least(1, "sinks", "window", self.window)

    def narrow(self, mixer: MixerSpec, block_size: int) -> MixerSpec:
        return _narrowed(mixer, self.window, sinks=self.sinks)


@dataclass(frozen=True)
class Truncate(Policy):
    """At most the last ``size`` tokens stay; the oldest ``block`` (0: the cache's block) leave together."""

    name: ClassVar[str] = "truncate"

    size: int
    block: int = 0

    def __post_init__(self) -> None:
        at_least(1, "truncate", "size", self.size)
        at_least(0, "truncate", "block", self.block)

    def narrow(self, mixer: MixerSpec, block_size: int) -> MixerSpec:
        grain = self.block or block_size
        if grain > self.size:
            raise ConfigError(
                f"cache.policy: {self}: a block of {grain} tokens leaves at once, so nothing would stay",
                f"keep at least {grain}, or take a smaller block",
            )
        return _narrowed(mixer, self.size, grain=grain)


def _narrowed(mixer: MixerSpec, window: int, *, sinks: int = 0, grain: int = 1) -> MixerSpec:
    if mixer.window is not None and mixer.window <= window:
        return mixer
    outer = mixer.window if mixer.outer is None else mixer.outer
    return mixer._replace(window=window, sinks=sinks, grain=grain, outer=outer if sinks else None)


class Seen(NamedTuple):
    """What a policy may rank by: one row's held slots in one layer, oldest first, ``m`` of them.

    ``positions`` [K, m]; ``mass`` [K, m]: the attention that each got from the queries that count, summed over the
    heads that read it (None: not watched); ``keys()`` and ``values()`` [K, m, D] as attention reads them; ``now``: the
    row's length; ``layer``.
    """

    positions: Tensor
    mass: Tensor | None
    keys: Callable[[], Tensor]
    values: Callable[[], Tensor]
    now: int
    layer: int


@dataclass(frozen=True)
class Scored(Policy):
    """A policy that ranks: ``budget`` tokens stay at each cut, the last ``recent`` and the first ``sinks`` among them.

    ``every``: a cut is made when the length reaches a multiple of it.  Subclasses say ``rank`` (on the device, which
    the host never reads), and ``watch``: how many of the latest queries before a cut leave their attention (0: none
    do; :data:`ALWAYS`: all, from the first on).
    """

    budget: int
    every: int = 64
    recent: int = 1
    sinks: int = 0

    def __post_init__(self) -> None:
        name = str(self).partition("(")[0]
        for field, least in (("budget", 1), ("every", 1), ("recent", 0), ("sinks", 0)):
            at_least(least, name, field, getattr(self, field))
        if self.sinks + self.recent > self.budget:
            raise ConfigError(
                f"cache.policy: {self}: {self.sinks} sinks and {self.recent} recent tokens exceed the budget",
                f"give a budget of at least {self.sinks + self.recent}",
            )
        if self.watch not in (0, ALWAYS) and self.watch > self.every:
            raise ConfigError(
                f"cache.policy: {self}: it looks at the last {self.watch} queries, and cuts every {self.every}",
                f"take every={self.watch} or more",
            )

    @property
    def scored(self) -> Scored | None:
        return self

    @property
    def watch(self) -> int:
        return 0

    @property
    def alone(self) -> bool:
        """Whether a head's ranks follow from that head's columns, whatever its number and the other heads."""
        return False

    def cut_after(self, length: int) -> int:
        """The first length above ``length`` at which the row is cut."""
        return (max(length, self.budget) // self.every + 1) * self.every

    def cuts(self, length: int) -> bool:
        """Whether a row of this length is cut."""
        return length > self.budget and length % self.every == 0

    def rank(self, seen: Seen) -> Tensor:
        """[K, m]: the higher, the longer it stays; of equals the older one stays."""
        raise NotImplementedError


@dataclass(frozen=True)
class Hierarchy(Policy):
    """The first ``sinks`` and the last ``recent`` tokens as they are; older ones packed, at most ``packed`` (-1: all);
    what is older still as at most ``summaries`` tokens that stand for ``ratio`` each; then gone.

    A summary is the mean of the values and of the keys, unrotated, put at the mean position; its logit gets log(ratio),
    so that it weighs what its tokens would weigh if their keys were equal.  ``every``: a row descends when its length
    reaches a multiple of it.  All numbers are in tokens and are rounded up to whole blocks.
    """

    name: ClassVar[str] = "hierarchy"

    recent: int
    packed: int = -1
    keys: str = "int8"
    values: str = "int8"
    summaries: int = 0
    ratio: int = 8
    every: int = 128
    sinks: int = 0

    def __post_init__(self) -> None:
        for name, least in (("recent", 1), ("packed", -1), ("summaries", 0), ("ratio", 2), ("every", 1), ("sinks", 0)):
            at_least(least, "hierarchy", name, getattr(self, name))
        for name in ("keys", "values"):
            find_format(getattr(self, name), f"cache.policy: hierarchy: {name}")
        if self.packed == -1 and self.summaries:
            raise ConfigError(
                f"cache.policy: {self}: all older tokens stay packed, so none is ever summarised",
                "say how many stay packed: packed=1024",
            )

    @property
    def levels(self) -> Hierarchy | None:
        return self

    def cut_after(self, length: int) -> int:
        """The first length above ``length`` at which the row descends."""
        return (length // self.every + 1) * self.every


@dataclass(frozen=True)
class Spilled(Policy):
    """Everything stays: the last ``recent`` tokens, and up to ``every`` more, in the pool; up to ``older`` before them
    (-1: all) in host memory and on disk (``spill.py``), as they are.

    All numbers are in tokens and are multiples of the block size.  A row descends when its length reaches a multiple
    of ``every``.
    """

    name: ClassVar[str] = "spilled"
    sinks: ClassVar[int] = 0
    packed: ClassVar[int] = -1  # as Hierarchy has it: nothing is ever gone
    summaries: ClassVar[int] = 0

    recent: int
    older: int = -1
    every: int = 64

    def __post_init__(self) -> None:
        for name, least in (("recent", 1), ("older", -1), ("every", 1)):
            at_least(least, "spilled", name, getattr(self, name))
        if self.older == 0:
            raise ConfigError(f"cache.policy: {self}: no room for older tokens", "leave older out: all of them")

    @property
    def levels(self) -> Spilled | None:
        return self

    def cut_after(self, length: int) -> int:
        """The first length above ``length`` at which the row descends."""
        return (length // self.every + 1) * self.every


@dataclass(frozen=True)
class Quest(Policy):
    """Everything stays; a query reads its own block and those whose keys may match it best, ``budget`` tokens in whole
    blocks (Tang et al. 2024, sec. 3)."""

    name: ClassVar[str] = "quest"

    budget: int

    def __post_init__(self) -> None:
        at_least(1, "quest", "budget", self.budget)

    @property
    def chooses(self) -> Quest | None:
        return self


def at_least(least: int, policy: str, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"cache.policy: {policy}: {name} must be a whole number of at least {least}, found {value!r}")
