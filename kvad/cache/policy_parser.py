"""Policies by name, of each layer, and several at once.

``full``                        everything stays
``window(n)``                   the last n tokens
``sinks(k, n)``                 the first k and the last n (Xiao et al. 2023, StreamingLLM)
``truncate(n)``                 at most the last n, dropped a block at a time (first in, first out)
``heavy-hitters(b)``            the b tokens that got most attention so far (Zhang et al. 2023, H2O)
``snapkv(b)``                   those that the latest queries attend to, and their neighbours (Li et al. 2024)
``tova(b)``                     those that the latest query attends to, over all heads (Oren et al. 2024)
``norm(b)``                     those whose keys are shortest (Devoto et al. 2024)
``random(b)``                   any: the baseline
``hierarchy(r)``                the latest r as they are, older ones packed, the oldest as summaries
``quest(b)``                    everything stays; a query reads the b tokens that may matter most (Tang et al. 2024)
``package.module:Class(...)``   a policy of one's own
==============================  =======================================================================================
What each keeps is said in one line of :data:`ABOUT`; ``package.module:Class(...)`` is a policy of one's own.

A policy of each layer: ``"0-3: full; sinks(4, 60)"``; what no layer is named for stands last.  Several at once:
``"window(512) + truncate(256)"`` keeps what all of them keep.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvad import config
from kvad.cache.eviction_policies import TOVA, HeavyHitters, KeyNorm, Random, SnapKV
from kvad.cache.policy import (
    UNBOUNDED,
    BlockWindow,
    CachePolicy,
    EvictionPolicy,
    KeepAll,
    OffloadPolicy,
    Quest,
    Sinks,
    TieredPolicy,
    Window,
)
from kvad.config import AttentionSpec
from kvad.errors import ConfigError, suggest
from kvad.model_input import AttentionPattern


@dataclass(frozen=True)
class PerLayerPolicy(CachePolicy):
    """Another policy for some layers: ``layers`` pairs them (first, last) with theirs; ``rest`` for the others."""

    layers: tuple[tuple[int, int, CachePolicy], ...]
    default: CachePolicy

    def for_layer(self, layer: int) -> CachePolicy:
        return next((policy for low, high, policy in self.layers if low <= layer <= high), self.default)

    def __str__(self) -> str:
        return "; ".join([*(f"{_span(low, high)}: {policy}" for low, high, policy in self.layers), str(self.default)])


@dataclass(frozen=True)
class CombinedPolicy(CachePolicy):
    """What all of them keep.  Of position policies: the narrowest window; sinks stay if all keep them."""

    policies: tuple[CachePolicy, ...]

    def for_layer(self, layer: int) -> CachePolicy:
        return CombinedPolicy(tuple(policy.for_layer(layer) for policy in self.policies))

    @property
    def tiered(self) -> TieredPolicy | OffloadPolicy | None:
        made = [policy.tiered for policy in self.policies if policy.tiered is not None]
        if made and any(policy not in (made[0], KeepAll()) for policy in self.policies):
            raise ConfigError(
                f"cache.policy: {self}: a hierarchy decides alone", "protect tokens by its sinks= and recent="
            )
        return made[0] if made else None

    @property
    def sparse_read(self) -> Quest | None:
        made = [policy.sparse_read for policy in self.policies if policy.sparse_read is not None]
        if made and any(policy not in (made[0], KeepAll()) for policy in self.policies):
            raise ConfigError(f"cache.policy: {self}: quest reads what is kept, and chooses among all of it")
        return made[0] if made else None

    @property
    def eviction(self) -> EvictionPolicy | None:
        made = [policy.eviction for policy in self.policies if policy.eviction is not None]
        if made and any(policy not in (made[0], KeepAll()) for policy in self.policies):
            raise ConfigError(
                f"cache.policy: {self}: a policy that ranks decides alone",
                "protect tokens by its own sinks= and recent=, or give other layers another policy",
            )
        return made[0] if made else None

    def restrict(self, mixer: AttentionSpec, block_size: int) -> AttentionSpec:
        each = [policy.restrict(mixer, block_size) for policy in self.policies]
        narrower = [spec for spec in each if spec != mixer]
        if not narrower:
            return mixer
        first = min(narrower, key=lambda spec: spec.window or UNBOUNDED)
        if any(
            (spec.window or UNBOUNDED) - spec.window_step + 1 < (first.window or UNBOUNDED)
            for spec in narrower
            if spec is not first
        ):
            raise ConfigError(
                f"cache.policy: {self}: windows of nearly one size that move by different steps have no common one",
                "make one of them wider by a block",
            )
        return first._replace(num_sinks=min(spec.num_sinks for spec in narrower))

    def __str__(self) -> str:
        return " + ".join(str(policy) for policy in self.policies)


def _span(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low}-" if high >= UNBOUNDED else f"{low}-{high}"


def restrict_specs(
    mixers: Sequence[AttentionSpec], policy: CachePolicy, block_size: int, *, renumber: bool
) -> tuple[AttentionSpec, ...]:
    """A model's layers under a policy; cross-attention keeps its source.  ``renumber``: as :class:`kvad.model_input.AttentionPattern`."""
    made = []
    for layer, mixer in enumerate(mixers):
        if not mixer.is_cross_attention:
            mixer = policy.for_layer(layer).restrict(mixer, block_size)
            mixer = mixer._replace(
                renumber_positions=renumber
                and AttentionPattern.from_spec(mixer._replace(renumber_positions=True)).renumbers_sinks
            )
        made.append(mixer)
    return tuple(made)


# ---------------------------------------------------------------- by name


_CALL = re.compile(r"([A-Za-z_][\w.-]*(?::[A-Za-z_]\w*)?)(?:\((.*)\))?")
_LAYERS = re.compile(r"(\d+)(?:(-)(\d+)?)?\s*:\s*(.*)")


def parse_policy(text: str) -> CachePolicy:
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
            high = low if not found[2] else int(found[3]) if found[3] else UNBOUNDED
            layers.append((low, high, _sum(found[4])))
    return PerLayerPolicy(tuple(layers), rest or KeepAll())


def _sum(text: str) -> CachePolicy:
    parts = [_one(part.strip()) for part in _split(text, "+")]
    return parts[0] if len(parts) == 1 else CombinedPolicy(tuple(parts))


def _split(text: str, mark: str) -> list[str]:
    """At every ``mark`` outside of parentheses."""
    parts, depth, last = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == mark and depth == 0:
            parts.append(text[last:at])
            last = at + 1
    return [*parts, text[last:]]


def _one(text: str) -> CachePolicy:
    found = _CALL.fullmatch(text)
    if found is None:
        raise ConfigError(f"cache.policy: cannot read {text!r}", "write it as name(number, ...): sinks(4, 1020)")
    name, said = found[1], found[2]
    if ":" in name:
        made = config.plugins.load_plugin(name, "cache.policy")
    elif name in POLICIES:
        made = POLICIES[name]
    else:
        raise ConfigError(f"cache.policy: unknown policy {name!r}", suggest(name, POLICIES))
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
    if not isinstance(policy, CachePolicy):
        raise ConfigError(f"cache.policy: {name} is no Policy", "derive it from kvad.cache.policy.CachePolicy")
    return policy


def _number(text: str, where: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if re.fullmatch(r"[A-Za-z_][\w.-]*(:[A-Za-z_]\w*)?", text):
        return text
    raise ConfigError(f"cache.policy: {where}: cannot read {text!r}", "arguments are numbers: sinks(4, 1020)")


POLICIES: dict[str, Callable[..., CachePolicy]] = {
    made.name: made
    for made in (
        KeepAll,
        Window,
        Sinks,
        BlockWindow,
        HeavyHitters,
        SnapKV,
        TOVA,
        KeyNorm,
        Random,
        TieredPolicy,
        OffloadPolicy,
        Quest,
    )
}

POLICY_HELP = {
    "full": "everything stays",
    "window(N)": "the last N tokens",
    "sinks(K,N)": "the first K and the last N (Xiao et al. 2023, StreamingLLM)",
    "truncate(N)": "at most the last N, dropped a block at a time (first in, first out)",
    "heavy-hitters(B)": "the B tokens that got most attention so far (Zhang et al. 2023, H2O)",
    "snapkv(B)": "those that the latest queries attend to, and their neighbours (Li et al. 2024)",
    "tova(B)": "those that the latest query attends to, over all heads (Oren et al. 2024)",
    "norm(B)": "those whose keys are shortest (Devoto et al. 2024)",
    "random(B)": "any: the baseline",
    "hierarchy(R)": "the latest R as they are, older ones packed, the oldest as summaries",
    "spilled(R)": "everything stays: the latest R in the pool, older ones in host memory and on disk",
    "quest(B)": "everything stays; a query reads the B tokens that may matter most (Tang et al. 2024)",
}
