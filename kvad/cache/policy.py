"""What stays of a row: policies, by name.

A policy is a function of its row's own history: neither neighbours nor a full pool change what it keeps.

``full``                everything
``window(n)``           the last ``n`` tokens
``sinks(k, n)``         the first ``k`` and the last ``n`` (Xiao et al. 2023, StreamingLLM)
``truncate(n)``         at most the last ``n``, dropped a block at a time (first in, first out)

These four say by *position* who stays.  That is a mask (``step.Reach``): every query of a chunk sees what it would see
alone, so a cache under such a policy is exact against the same model with that mask, whatever the chunks; and blocks
that no later query can see go back at once.

Others *score* what is held, in each layer and kv head apart, and keep the best ``budget`` tokens (``ranks.py``):

``heavy-hitters(b)``    those that got most attention so far (Zhang et al. 2023, H2O)
``snapkv(b)``           those that the latest queries attend to, and their neighbours (Li et al. 2024)
``tova(b)``             those that the latest query attends to, over all heads (Oren et al. 2024)
``norm(b)``             those whose keys are shortest (Devoto et al. 2024)
``random(b)``           any: the baseline

They cut when the row's length reaches a multiple of ``every``, where the scheduler ends a chunk, so that the chunks do
not matter either; in between a row holds up to ``budget + every`` tokens.  What is dropped is gone: lossy by design.

**Levels** give up precision before they give up tokens:

``hierarchy(r)``        the latest ``r`` tokens as they are, older ones packed (``keys``, ``values``: formats), the oldest as
                        summaries, one for each ``ratio`` tokens

A row descends at multiples of ``every``, in whole blocks.

A policy of each layer: ``"0-3: full; sinks(4, 60)"`` (what no layer is named for stands last).  Several at once:
``"window(512) + truncate(256)"`` keeps what all of them keep.

Standard library only: sizing and planning read it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from kvad.cache.formats import find_format
from kvad.config import MixerSpec
from kvad.errors import ConfigError, nearest
from kvad.own import load_own
from kvad.step import Reach

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["POLICIES", "Compose", "Full", "PerLayer", "Policy", "Sinks", "Truncate", "Window", "narrowed", "parse_policy"]


class Policy:
    """The base: keeps everything.  Subclasses are frozen dataclasses whose fields are their arguments."""

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
    def levels(self) -> Hierarchy | None:
        """The policy that keeps older tokens in other forms, where this is one."""
        return None

    def __str__(self) -> str:
        every = [(getattr(self, each.name), each.default) for each in fields(self)]  # type: ignore[arg-type]
        while every and every[-1][0] == every[-1][1]:
            every.pop()
        said = ", ".join(str(value) for value, _ in every)
        name = next((name for name, made in POLICIES.items() if made is type(self)), None)
        name = name or f"{type(self).__module__}:{type(self).__qualname__}"
        return f"{name}({said})" if said else name


@dataclass(frozen=True)
class Full(Policy):
    """Everything stays."""


@dataclass(frozen=True)
class Window(Policy):
    """The last ``size`` tokens stay, the newest included."""

    size: int

    def __post_init__(self) -> None:
        _at_least(1, "window", "size", self.size)

    def narrow(self, mixer: MixerSpec, block_size: int) -> MixerSpec:
        return _narrowed(mixer, self.size)


@dataclass(frozen=True)
class Sinks(Policy):
    """The first ``sinks`` tokens and the last ``window`` stay (Xiao et al. 2023, sec. 3.2)."""

    sinks: int
    window: int

    def __post_init__(self) -> None:
        _at_least(1, "sinks", "sinks", self.sinks)
        _at_least(1, "sinks", "window", self.window)

    def narrow(self, mixer: MixerSpec, block_size: int) -> MixerSpec:
        return _narrowed(mixer, self.window, sinks=self.sinks)


@dataclass(frozen=True)
class Truncate(Policy):
    """At most the last ``size`` tokens stay; the oldest ``block`` (0: the cache's block) leave together."""

    size: int
    block: int = 0

    def __post_init__(self) -> None:
        _at_least(1, "truncate", "size", self.size)
        _at_least(0, "truncate", "block", self.block)

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

    ``every``: a cut is made when the length reaches a multiple of it.  Subclasses say ``rank`` (on the device, which the
    host never reads), and ``watch``: how many of the latest queries before a cut leave their attention (0: none do;
    :data:`ALWAYS`: all, from the first on).
    """

    budget: int
    every: int = 64
    recent: int = 1
    sinks: int = 0

    def __post_init__(self) -> None:
        name = str(self).partition("(")[0]
        for field, least in (("budget", 1), ("every", 1), ("recent", 0), ("sinks", 0)):
            _at_least(least, name, field, getattr(self, field))
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
            _at_least(least, "hierarchy", name, getattr(self, name))
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
class HeavyHitters(Scored):
    """H2O (Zhang et al. 2023, sec. 4): the attention that a token got, summed over all queries so far, and half of the
    budget for the latest tokens.  ``average`` 1: divided by how many queries could see it."""

    recent: int = -1
    average: int = 0

    def __post_init__(self) -> None:
        if self.recent == -1:
            object.__setattr__(self, "recent", self.budget // 2)
        super().__post_init__()

    @property
    def watch(self) -> int:
        return ALWAYS

    def rank(self, seen: Seen) -> Tensor:
        assert seen.mass is not None
        return seen.mass / (seen.now - seen.positions) if self.average else seen.mass


@dataclass(frozen=True)
class SnapKV(Scored):
    """SnapKV (Li et al. 2024, sec. 4): the attention of the last ``window`` queries, averaged over ``kernel`` neighbours,
    so that a needle keeps what stands around it; the window itself stays."""

    recent: int = -1
    window: int = 32
    kernel: int = 5

    def __post_init__(self) -> None:
        _at_least(1, "snapkv", "window", self.window)
        _at_least(1, "snapkv", "kernel", self.kernel)
        if self.kernel % 2 == 0:
            raise ConfigError(f"cache.policy: snapkv: kernel must be odd, found {self.kernel}")
        if self.recent == -1:
            object.__setattr__(self, "recent", min(self.window, self.budget))
        super().__post_init__()

    @property
    def watch(self) -> int:
        return self.window

    def rank(self, seen: Seen) -> Tensor:
        from torch.nn.functional import avg_pool1d

        assert seen.mass is not None
        past = seen.mass[:, : max(0, seen.mass.shape[1] - self.recent)]
        pooled = avg_pool1d(past, self.kernel, stride=1, padding=self.kernel // 2) if past.numel() else past
        ranks = seen.mass.clone()  # the latest stay anyway
        ranks[:, : past.shape[1]] = pooled
        return ranks


@dataclass(frozen=True)
class TOVA(Scored):
    """TOVA (Oren et al. 2024, sec. 4): the last query's attention, averaged over all heads of the layer."""

    @property
    def watch(self) -> int:
        return 1

    def rank(self, seen: Seen) -> Tensor:
        assert seen.mass is not None
        return seen.mass.sum(0, keepdim=True).expand_as(seen.mass)


@dataclass(frozen=True)
class KeyNorm(Scored):
    """Short keys stay: they are those that get attention (Devoto et al. 2024, sec. 3)."""

    def rank(self, seen: Seen) -> Tensor:
        return -seen.keys().norm(dim=-1)


@dataclass(frozen=True)
class Random(Scored):
    """Any tokens: what a policy has to beat.  Which ones is a function of seed, layer, head and position."""

    seed: int = 0

    def rank(self, seen: Seen) -> Tensor:
        heads = range(seen.positions.shape[0])
        salt = [(self.seed * 1_000_003 + seen.layer * 8_191 + head + 1) * 40_503 % 65_521 for head in heads]
        mixed = seen.positions.long() * 48_271 + seen.positions.new_tensor(salt).long().unsqueeze(1)
        for _ in range(3):  # Lehmer steps: sums and products of 31 bits, the same on every device
            mixed = (mixed * 48_271 + 11) % 2_147_483_647
        return mixed


@dataclass(frozen=True)
class PerLayer(Policy):
    """Another policy for some layers: ``layers`` pairs them (first, last) with theirs; ``rest`` for the others."""

    layers: tuple[tuple[int, int, Policy], ...]
    rest: Policy = Full()

    def at(self, layer: int) -> Policy:
        return next((policy for low, high, policy in self.layers if low <= layer <= high), self.rest)

    def __str__(self) -> str:
        return "; ".join([*(f"{_span(low, high)}: {policy}" for low, high, policy in self.layers), str(self.rest)])


@dataclass(frozen=True)
class Compose(Policy):
    """What all of them keep.  Of position policies: the narrowest window; sinks stay if all keep them."""

    policies: tuple[Policy, ...]

    def at(self, layer: int) -> Policy:
        return Compose(tuple(policy.at(layer) for policy in self.policies))

    @property
    def levels(self) -> Hierarchy | None:
        made = [policy.levels for policy in self.policies if policy.levels is not None]
        if made and any(policy not in (made[0], Full()) for policy in self.policies):
            raise ConfigError(f"cache.policy: {self}: a hierarchy decides alone", "protect tokens by its sinks= and recent=")
        return made[0] if made else None

    @property
    def scored(self) -> Scored | None:
        made = [policy.scored for policy in self.policies if policy.scored is not None]
        if made and any(policy not in (made[0], Full()) for policy in self.policies):
            raise ConfigError(
                f"cache.policy: {self}: a policy that ranks decides alone",
                "protect tokens by its own sinks= and recent=, or give other layers another policy",
            )
        return made[0] if made else None

    def narrow(self, mixer: MixerSpec, block_size: int) -> MixerSpec:
        each = [policy.narrow(mixer, block_size) for policy in self.policies]
        narrower = [spec for spec in each if spec != mixer]
        if not narrower:
            return mixer
        first = min(narrower, key=lambda spec: spec.window or MANY)
        if any((spec.window or MANY) - spec.grain + 1 < (first.window or MANY) for spec in narrower if spec is not first):
            raise ConfigError(
                f"cache.policy: {self}: windows of nearly one size that move by different steps have no common one",
                "make one of them wider by a block",
            )
        return first._replace(sinks=min(spec.sinks for spec in narrower))

    def __str__(self) -> str:
        return " + ".join(str(policy) for policy in self.policies)


def _span(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low}-" if high >= MANY else f"{low}-{high}"


MANY = 1 << 40
ALWAYS = 1 << 40  # Scored.watch: every query counts
POLICIES: dict[str, Callable[..., Policy]] = {
    "full": Full,
    "window": Window,
    "sinks": Sinks,
    "truncate": Truncate,
    "hierarchy": Hierarchy,
    "heavy-hitters": HeavyHitters,
    "snapkv": SnapKV,
    "tova": TOVA,
    "norm": KeyNorm,
    "random": Random,
}


def _at_least(least: int, policy: str, name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"cache.policy: {policy}: {name} must be a whole number of at least {least}, found {value!r}")


# ---------------------------------------------------------------- by name


_CALL = re.compile(r"([A-Za-z_][\w.-]*(?::[A-Za-z_]\w*)?)(?:\((.*)\))?")
_LAYERS = re.compile(r"(\d+)(?:(-)(\d+)?)?\s*:\s*(.*)")


def parse_policy(text: str) -> Policy:
    """What a policy's name says; see the head of this file.  ConfigError says what is wrong, and what is near."""
    parts = [part.strip() for part in text.split(";")]
    if len(parts) == 1 and not _LAYERS.fullmatch(parts[0]):
        return _sum(parts[0])
    layers, rest = [], None
    for part in parts:
        found = _LAYERS.fullmatch(part)
        if found is None and rest is None:
            rest = _sum(part)
        elif found is None:
            raise ConfigError(f"cache.policy: {text!r}: two policies for what is left", "name the layers of one")
        else:
            low = int(found[1])
            high = low if not found[2] else int(found[3]) if found[3] else MANY
            layers.append((low, high, _sum(found[4])))
    return PerLayer(tuple(layers), rest or Full())


def _sum(text: str) -> Policy:
    parts = [_one(part.strip()) for part in _split(text, "+")]
    return parts[0] if len(parts) == 1 else Compose(tuple(parts))


def _split(text: str, mark: str) -> list[str]:
    """At every ``mark`` outside of parentheses."""
    parts, depth, last = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == mark and depth == 0:
            parts.append(text[last:at])
            last = at + 1
    return [*parts, text[last:]]


def _one(text: str) -> Policy:
    found = _CALL.fullmatch(text)
    if found is None:
        raise ConfigError(f"cache.policy: cannot read {text!r}", "write it as name(number, ...): sinks(4, 1020)")
    name, said = found[1], found[2]
    if ":" in name:
        made = load_own(name, "cache.policy")
    elif name in POLICIES:
        made = POLICIES[name]
    else:
        raise ConfigError(f"cache.policy: unknown policy {name!r}", nearest(name, POLICIES))
    values, named = [], dict[str, Any]()
    for part in (part.strip() for part in _split(said or "", ",")):
        key, equals, value = part.rpartition("=")
        if part and equals:
            named[key.strip()] = _number(value.strip(), text)
        elif part:
            values.append(_number(part, text))
    try:
        inspect.signature(made).bind(*values, **named)
    except TypeError as error:
        takes = ", ".join(str(each) for each in inspect.signature(made).parameters.values())
        raise ConfigError(f"cache.policy: {text}: {error}", f"it is {name}({takes})") from error
    policy = made(*values, **named)
    if not isinstance(policy, Policy):
        raise ConfigError(f"cache.policy: {name} is no Policy", "derive it from kvad.cache.policy.Policy")
    return policy


def _number(text: str, where: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if re.fullmatch(r"[A-Za-z_][\w.-]*", text):
        return text
    raise ConfigError(f"cache.policy: {where}: cannot read {text!r}", "arguments are numbers: sinks(4, 1020)")


def narrowed(mixers: Sequence[MixerSpec], policy: Policy, block_size: int, *, renumber: bool) -> tuple[MixerSpec, ...]:
    """A model's layers under a policy; cross-attention keeps its source.  ``renumber``: as :class:`kvad.step.Reach`."""
    made = []
    for layer, mixer in enumerate(mixers):
        if not mixer.cross:
            mixer = policy.at(layer).narrow(mixer, block_size)
            mixer = mixer._replace(renumber=renumber and Reach.of(mixer._replace(renumber=True)).turns)
        made.append(mixer)
    return tuple(made)
