"""Policy strings: policies by name, per layer, and combined. ``POLICY_HELP`` has one line per policy.

A custom policy is named ``package.module:Class(...)``. Arguments are the fields of the policy's class, by position or
by name: ``tiered(64, quantized=256)``.

Layers may have different policies: ``"0-3: full; sinks(4, 60)"``; the policy of all other layers comes last. A
combination such as ``"window(512) + block-window(256)"`` keeps the tokens that all of its policies keep.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvad import config
from kvad.cache.policy import (
    TOVA,
    UNBOUNDED,
    BlockWindow,
    CachePolicy,
    HeavyHitters,
    KeepAll,
    KeyNorm,
    OffloadPolicy,
    Quest,
    Random,
    Sinks,
    SnapKV,
    StatefulPolicy,
    TieredPolicy,
    Window,
)
from kvad.config import AttentionSpec
from kvad.errors import ConfigError, suggest


@dataclass(frozen=True)
class PerLayerPolicy(CachePolicy):
    """Policies per layer: ``layers`` has (first, last, policy); ``default`` applies to the other layers."""

    layers: tuple[tuple[int, int, CachePolicy], ...]
    default: CachePolicy

    def for_layer(self, layer: int) -> CachePolicy:
        return next((policy for first, last, policy in self.layers if first <= layer <= last), self.default)

    def check_layers(self, num_layers: int) -> None:
        """Raise ConfigError if a policy with layers applies to none of a model with ``num_layers``."""
        numbers = set(range(num_layers))
        for named in self.layers:
            first, last, _ = named
            if not any(first <= layer <= last for layer in numbers):
                raise ConfigError(
                    f"cache.policy: {_with_layers(*named)!r} applies to no layer",
                    f"Layers are 0-{num_layers - 1}; the first policy that names a layer applies.",
                )
            numbers = {layer for layer in numbers if not first <= layer <= last}

    def __str__(self) -> str:
        return "; ".join([*(_with_layers(*named) for named in self.layers), str(self.default)])


def _with_layers(first: int, last: int, policy: CachePolicy) -> str:
    end = "" if first == last else "-" if last >= UNBOUNDED else f"-{last}"
    return f"{first}{end}: {policy}"


@dataclass(frozen=True)
class CombinedPolicy(CachePolicy):
    """Combination that keeps what all policies keep: the narrowest window, and sinks if all keep them."""

    policies: tuple[CachePolicy, ...]

    def for_layer(self, layer: int) -> CachePolicy:
        return CombinedPolicy(tuple(policy.for_layer(layer) for policy in self.policies))

    @property
    def stateful(self) -> StatefulPolicy | None:
        """The part that is not a mask; ConfigError unless it is combined with KeepAll only."""
        part = next((policy.stateful for policy in self.policies if policy.stateful is not None), None)
        if part is not None and any(policy not in (part, KeepAll()) for policy in self.policies):
            raise ConfigError(f"cache.policy: {self}: {part.kind} cannot be combined", part.combination_hint)
        return part

    def restrict(self, spec: AttentionSpec, block_size: int) -> AttentionSpec:
        restricted = [policy.restrict(spec, block_size) for policy in self.policies]
        narrower = [candidate for candidate in restricted if candidate != spec]
        if not narrower:
            return spec
        narrowest = min(narrower, key=lambda candidate: candidate.window or UNBOUNDED)
        smallest = [(other.window or UNBOUNDED) - other.window_step + 1 for other in narrower if other is not narrowest]
        if any(size < (narrowest.window or UNBOUNDED) for size in smallest):
            raise ConfigError(
                f"cache.policy: {self}: windows of similar size with different steps cannot be combined",
                "Make one of them wider by a block",
            )
        return narrowest._replace(num_sinks=min(candidate.num_sinks for candidate in narrower))

    def __str__(self) -> str:
        return " + ".join(str(policy) for policy in self.policies)


def restrict_specs(
    specs: Sequence[AttentionSpec], policy: CachePolicy, block_size: int, *, renumber: bool
) -> tuple[AttentionSpec, ...]:
    """Restrict the specs of a model's layers to a policy; cross-attention and states are unchanged.

    ``renumber`` is ``renumber_positions`` of ``kvad.model_input.AttentionPattern``. Raises ConfigError if a part of the
    policy applies to no layer.
    """
    restricted = []
    if isinstance(policy, PerLayerPolicy):
        policy.check_layers(sum(not spec.is_cross_attention for spec in specs))
    for layer, spec in enumerate(specs):
        if not spec.is_cross_attention and not spec.is_state:
            spec = policy.for_layer(layer).restrict(spec, block_size)
            spec = spec._replace(
                renumber_positions=renumber and spec._replace(renumber_positions=True).pattern.renumbers_sinks
            )
        restricted.append(spec)
    return tuple(restricted)


_CALL = re.compile(r"([A-Za-z_][\w.-]*(?::[A-Za-z_]\w*)?)(?:\((.*)\))?")
_PLUS = re.compile(r"\+(?![^(]*\))")  # outside of parentheses
_LAYERS = re.compile(r"(\d+)(?:(-)(\d+)?)?\s*:\s*(.*)")


def parse_policy(text: str) -> CachePolicy:
    """Parse a policy string; ConfigError, with the nearest name or the signature, if it is invalid."""
    parts = [part.strip() for part in text.split(";")]
    if len(parts) == 1 and not _LAYERS.fullmatch(parts[0]):
        return _parse_sum(parts[0])
    layers, default = [], None
    for part in parts:
        match = _LAYERS.fullmatch(part)
        if match is None and default is None:
            default = _parse_sum(part)
        elif match is None:
            raise ConfigError(
                f"cache.policy: {text!r}: two policies have no layers", "Write the layers of one: 0-3: full"
            )
        else:
            first = int(match[1])
            last = first if not match[2] else int(match[3]) if match[3] else UNBOUNDED
            layers.append((first, last, _parse_sum(match[4])))
    return PerLayerPolicy(tuple(layers), default or KeepAll())


def _parse_sum(text: str) -> CachePolicy:
    parts = [_parse_call(part.strip()) for part in _PLUS.split(text)]
    return parts[0] if len(parts) == 1 else CombinedPolicy(tuple(parts))


def _parse_call(text: str) -> CachePolicy:
    match = _CALL.fullmatch(text)
    if match is None:
        raise ConfigError(f"cache.policy: cannot read {text!r}", "Write name(number, ...): sinks(4, 1020)")
    name, argument_text = match[1], match[2]
    if config.plugins.is_plugin(name, POLICIES):
        factory = config.plugins.load_plugin(name, "cache.policy")
    elif name in POLICIES:
        factory = POLICIES[name]
    else:
        raise ConfigError(f"cache.policy: unknown policy {name!r}", suggest(name, POLICIES))
    values, named = [], dict[str, Any]()
    for part in (part.strip() for part in (argument_text or "").split(",")):
        key, equals, value = part.rpartition("=")
        if part and equals:
            named[key.strip()] = _parse_argument(value.strip(), text)
        elif part:
            values.append(_parse_argument(part, text))
    try:
        inspect.signature(factory).bind(*values, **named)
    except TypeError as error:
        parameters = inspect.signature(factory).parameters.values()
        signature = ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters)
        raise ConfigError(f"cache.policy: {text}: {error}", f"The signature is {name}({signature})") from error
    policy = factory(*values, **named)
    if not isinstance(policy, CachePolicy):
        raise ConfigError(f"cache.policy: {name} is not a policy", "Derive it from kvad.cache.policy.CachePolicy")
    return policy


def _parse_argument(text: str, policy_text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if re.fullmatch(r"[A-Za-z_][\w.-]*(:[A-Za-z_]\w*)?", text):
        return text
    raise ConfigError(
        f"cache.policy: {policy_text}: cannot read {text!r}", "Arguments are numbers or names: sinks(4, 1020)"
    )


_CLASSES: tuple[type[CachePolicy], ...] = (
    KeepAll, Window, Sinks, BlockWindow, HeavyHitters, SnapKV, TOVA, KeyNorm, Random, TieredPolicy, OffloadPolicy, Quest
)  # fmt: skip
POLICIES: dict[str, Callable[..., CachePolicy]] = {policy.name: policy for policy in _CLASSES}

POLICY_HELP = {
    "full": "all tokens stay",
    "window(N)": "the last N tokens",
    "sinks(K,N)": "the first K and the last N (Xiao et al. 2023, StreamingLLM)",
    "block-window(N)": "at most the last N, dropped in whole blocks",
    "heavy-hitters(B)": "the B tokens with the most attention so far (Zhang et al. 2023, H2O)",
    "snapkv(B)": "B tokens that the latest queries attend to, and their neighbors (Li et al. 2024)",
    "tova(B)": "B tokens that the latest query attends to, over all heads (Oren et al. 2024)",
    "key-norm(B)": "the B tokens whose keys have the smallest norm (Devoto et al. 2024)",
    "random(B)": "B random tokens: the baseline",
    "tiered(R)": "the latest R unchanged, older ones quantized, the oldest as summaries",
    "offload(R)": "all tokens stay: the latest R in the pool, older ones in host memory and on disk",
    "quest(B)": "all tokens stay; a query reads the B tokens that may matter most (Tang et al. 2024)",
}
