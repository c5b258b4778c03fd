"""What a model is, as frozen nested dataclasses: JSON in and out, dotted overrides, errors that name the key.

``ModelConfig.load(path)`` / ``.to_dict()`` round-trip exactly.  A layer is a composition of parts (mixer, mlp, norm),
a stack repeats kinds of layers by a pattern string (``"LLLG"``), and nothing anywhere asks for a family's name.
Standard library only: no torch, so that ``kvad plan`` starts fast.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvad.errors import ConfigError, nearest
from kvad.schema import from_dict, override, to_dict

__all__ = [
    "Alibi",
    "Attention",
    "DynamicScaling",
    "Gated",
    "Head",
    "Layer",
    "LearnedPositions",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MixerSpec",
    "ModelConfig",
    "Norm",
    "Plain",
    "Rope",
    "SinusoidalPositions",
    "Stack",
    "T5Bias",
    "YarnScaling",
    "from_dict",
    "mixers",
    "override",
    "to_dict",
]

Activation = Literal["gelu", "gelu_tanh", "relu", "relu2", "silu"]


# ---------------------------------------------------------------- positions


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): positions are divided by ``factor``."""

    factor: float
    kind: Literal["linear"] = "linear"


@dataclass(frozen=True)
class DynamicScaling:
    """Dynamic NTK: a row whose limit n exceeds ``original`` gets the base theta * (f n/original - (f-1))^(D/(D-2)).

    n is the row's limit, fixed at admission, so that keys already stored are never rotated by another base.
    """

    factor: float
    original: int
    kind: Literal["dynamic"] = "dynamic"


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths are divided by ``factor``, short ones kept, those between interpolated."""

    factor: float
    original: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    kind: Literal["llama3"] = "llama3"


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, sec. 3.2): NTK by parts, and a temperature on cos and sin.

    ``attention_factor`` None means 0.1 ln(factor) + 1, or the ratio of the two mscale terms where they are given.
    """

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    kind: Literal["yarn"] = "yarn"


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024): one factor per frequency, ``short`` up to ``original``, ``long`` for longer rows."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    factor: float | None = None  # limit / original, where the checkpoint states it; decides the attention factor
    attention_factor: float | None = None
    kind: Literal["longrope"] = "longrope"


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True)
class Rope:
    """Rotary positions on the first ``fraction`` of each head; ``interleaved`` pairs (0,1),(2,3),... as GPT-J does."""

    theta: float = 10000.0
    fraction: float = 1.0
    interleaved: bool = False
    scaling: Scaling | None = None
    kind: Literal["rope"] = "rope"


@dataclass(frozen=True)
class Alibi:
    """Linear biases (Press et al. 2021); slopes follow from the number of heads, powers of two or not."""

    kind: Literal["alibi"] = "alibi"


@dataclass(frozen=True)
class T5Bias:
    """Bucketed relative bias; one table shared by all layers of the stack (T5), or one per layer (UMT5)."""

    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = False
    shared: bool = True
    kind: Literal["t5"] = "t5"


@dataclass(frozen=True)
class LearnedPositions:
    """A table of ``size`` rows added to the embeddings (GPT-2); ``offset`` is added to the position (OPT: 2)."""

    size: int
    offset: int = 0
    kind: Literal["learned"] = "learned"


@dataclass(frozen=True)
class SinusoidalPositions:
    """Sines and cosines added to the embeddings (Vaswani et al. 2017, sec. 3.5).

    ``form``: ``interleaved`` (the paper: sin, cos, sin, cos), ``concat`` (all sines, then all cosines; Marian),
    ``fairseq`` (concat with the half-1 frequencies; M2M100, XGLM).  No table limits the length.
    """

    base: float = 10000.0
    form: Literal["interleaved", "concat", "fairseq"] = "interleaved"
    offset: int = 0
    kind: Literal["sinusoidal"] = "sinusoidal"


# ---------------------------------------------------------------- layers


@dataclass(frozen=True)
class Norm:
    """``layer``: (x - mean) / sqrt(var + eps) * w (+ b).  ``rms``: x / sqrt(mean(x^2) + eps) * (w or 1 + w)."""

    kind: Literal["layer", "rms"] = "rms"
    eps: float = 1e-5
    bias: bool = False
    unit_offset: bool = False  # the weight is stored as w - 1 (Gemma)


@dataclass(frozen=True)
class Attention:
    """Multi-head attention: ``heads`` queries share ``kv_heads`` keys and values (MHA = all, GQA, MQA = 1).

    ``head_dim`` and ``value_dim`` are free of width / heads.  ``scale``: ``"default"`` = 1/sqrt(head_dim),
    ``"none"`` = 1 (T5), or a number.  ``qk_norm``: normalise q and k per ``head`` or over the ``full`` projection.
    """

    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    position: Rope | Alibi | T5Bias | None = field(default_factory=Rope)
    causal: bool = True
    window: int | None = None
    bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    softcap: float | None = None
    sinks: bool = False
    scale: Literal["default", "none"] | float = "default"


@dataclass(frozen=True)
class Plain:
    """``down(act(up(x)))``."""

    hidden: int
    activation: Activation = "gelu"
    bias: bool = False
    kind: Literal["plain"] = "plain"


@dataclass(frozen=True)
class Gated:
    """``down(act(gate(x)) * up(x))`` (Shazeer 2020): SwiGLU with silu, GeGLU with gelu."""

    hidden: int
    activation: Activation = "silu"
    bias: bool = False
    kind: Literal["gated"] = "gated"


@dataclass(frozen=True)
class Layer:
    mixer: Attention
    mlp: Plain | Gated
    norm: Norm = field(default_factory=Norm)


@dataclass(frozen=True)
class Stack:
    """``layers`` layers; layer i is of kind ``pattern[i % len(pattern)]``.

    ``norm_place``: ``pre`` x + f(norm(x)); ``post`` norm(x + f(x)); ``sandwich`` x + norm(f(norm(x)));
    ``parallel`` x + attention(norm(x)) + mlp(norm(x)).  ``final_norm`` follows the last layer.
    """

    layers: int
    kinds: Mapping[str, Layer]
    pattern: str = "L"
    norm_place: Literal["pre", "post", "sandwich", "parallel"] = "pre"
    final_norm: bool = True

    def kind_of(self, index: int) -> str:
        return self.pattern[index % len(self.pattern)]

    def layer(self, index: int) -> Layer:
        return self.kinds[self.kind_of(index)]


@dataclass(frozen=True)
class Head:
    """From hidden states to logits: ``softcap(scale * (W h + b))``."""

    bias: bool = False
    softcap: float | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only Transformer.  ``limit`` is the longest row (prompt + generated) that the model may hold."""

    width: int
    vocab: int
    limit: int
    decoder: Stack
    position: LearnedPositions | SinusoidalPositions | None = None
    embedding_scale: float = 1.0
    embedding_norm: Norm | None = None
    head: Head = field(default_factory=Head)
    tie: bool = True

    def __post_init__(self) -> None:
        _check_model(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> ModelConfig:
        """Raises ConfigError naming the key (``decoder.kinds.L.mixer.heads``) for anything unknown or out of range."""
        return from_dict(ModelConfig, data)

    def to_dict(self) -> dict[str, Any]:
        return typing.cast("dict[str, Any]", to_dict(self))

    @staticmethod
    def load(path: Path) -> ModelConfig:
        """From a JSON file; a checkpoint's ``config.json`` holds the model under ``"model"``."""
        try:
            data = json.loads(path.read_text("utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(f"no such file: {path}") from error
        except (ValueError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: expected an object of keys, found {type(data).__name__}")
        return ModelConfig.from_dict(data.get("model", data))


# ---------------------------------------------------------------- what a memory must hold


class MixerSpec(NamedTuple):
    """What one attention layer asks of a memory.  Layers with equal specs form a cache group and share a table."""

    causal: bool
    window: int | None
    kv_heads: int
    head_dim: int
    value_dim: int


def head_dim(config: ModelConfig, mixer: Attention) -> int:
    return mixer.head_dim if mixer.head_dim is not None else config.width // mixer.heads


def mixers(config: ModelConfig) -> tuple[MixerSpec, ...]:
    """One :class:`MixerSpec` per layer, from first to last."""
    specs = []
    for index in range(config.decoder.layers):
        mixer = config.decoder.layer(index).mixer
        dim = head_dim(config, mixer)
        window = mixer.window if mixer.window is not None and mixer.window < config.limit else None
        kv_heads = mixer.kv_heads or mixer.heads
        specs.append(MixerSpec(mixer.causal, window, kv_heads, dim, mixer.value_dim or dim))
    return tuple(specs)


# ---------------------------------------------------------------- what can be right


def _check_model(config: ModelConfig) -> None:
    for name in ("width", "vocab", "limit"):
        _at_least(1, getattr(config, name), name)
    stack = config.decoder
    _at_least(1, stack.layers, "decoder.layers")
    if not stack.pattern:
        raise ConfigError("decoder.pattern is empty", "name a kind per layer, as in 'LLLG'")
    for letter in stack.pattern:
        if letter not in stack.kinds:
            raise ConfigError(f"decoder.pattern names kind {letter!r}", nearest(letter, stack.kinds))
    for letter, layer in stack.kinds.items():
        if letter not in stack.pattern:
            raise ConfigError(f"decoder.kinds.{letter} is in no place of the pattern {stack.pattern!r}", "leave it out")
        _check_attention(config, layer.mixer, f"decoder.kinds.{letter}.mixer")
        _at_least(1, layer.mlp.hidden, f"decoder.kinds.{letter}.mlp.hidden")
        _check_eps(layer.norm, f"decoder.kinds.{letter}.norm")
    if config.embedding_norm is not None:
        _check_eps(config.embedding_norm, "embedding_norm")
    _above_zero(config.head.softcap, "head.softcap")
    _check_position(config)


def _check_position(config: ModelConfig) -> None:
    position = config.position
    if position is not None:
        _at_least(0, position.offset, "position.offset")
    if isinstance(position, LearnedPositions) and config.limit + position.offset > position.size:
        raise ConfigError(
            f"limit {config.limit} (+ offset {position.offset}) exceeds the position table's {position.size} rows"
        )
    if isinstance(position, SinusoidalPositions):
        _above_zero(position.base, "position.base")
        if config.width % 2:
            raise ConfigError(f"position.kind sinusoidal needs an even width, found {config.width}")
        if position.form == "fairseq" and config.width < 4:
            raise ConfigError(f"position.form fairseq needs a width of at least 4, found {config.width}")


def _check_attention(config: ModelConfig, mixer: Attention, where: str) -> None:
    _at_least(1, mixer.heads, f"{where}.heads")
    kv_heads = mixer.heads if mixer.kv_heads is None else mixer.kv_heads
    _at_least(1, kv_heads, f"{where}.kv_heads")
    if mixer.heads % kv_heads:
        raise ConfigError(f"{where}.kv_heads: {kv_heads} does not divide heads {mixer.heads}")
    if mixer.head_dim is None and config.width % mixer.heads:
        raise ConfigError(
            f"{where}.heads: {mixer.heads} does not divide width {config.width}", f"or set {where}.head_dim"
        )
    dim = head_dim(config, mixer)
    _at_least(1, dim, f"{where}.head_dim")
    for name in ("value_dim", "window"):
        if getattr(mixer, name) is not None:
            _at_least(1, getattr(mixer, name), f"{where}.{name}")
    _above_zero(mixer.softcap, f"{where}.softcap")
    if isinstance(mixer.position, Rope):
        _check_rope(mixer.position, dim, f"{where}.position")
    if isinstance(mixer.position, T5Bias):
        _check_buckets(mixer.position, f"{where}.position")


def _check_buckets(bias: T5Bias, where: str) -> None:
    ways = 2 if bias.bidirectional else 1
    _at_least(2 * ways, bias.buckets, f"{where}.buckets")
    exact = bias.buckets // ways // 2
    if bias.max_distance <= exact:
        raise ConfigError(f"{where}.max_distance: must exceed the {exact} exact buckets, found {bias.max_distance}")


def _check_rope(rope: Rope, dim: int, where: str) -> None:
    rotated = int(dim * rope.fraction)
    if not 0 < rope.fraction <= 1 or rotated < 2 or rotated % 2:
        raise ConfigError(f"{where}.fraction: {rope.fraction} of head_dim {dim} is {rotated} dims, not an even number")
    _above_zero(rope.theta, f"{where}.theta")
    if rope.scaling is not None:
        _check_scaling(rope.scaling, rotated, f"{where}.scaling")


def _check_scaling(scaling: Scaling, rotated: int, where: str) -> None:
    _above_zero(scaling.factor, f"{where}.factor")
    if not isinstance(scaling, LinearScaling):
        _at_least(1, scaling.original, f"{where}.original")
    if isinstance(scaling, DynamicScaling) and rotated == 2:
        raise ConfigError(f"{where}.kind: dynamic needs more than 2 rotated dims")
    if isinstance(scaling, (YarnScaling, LongRopeScaling)):
        _above_zero(scaling.attention_factor, f"{where}.attention_factor")
    if isinstance(scaling, YarnScaling):
        _above_zero(scaling.beta_slow, f"{where}.beta_slow")
        if scaling.beta_fast < scaling.beta_slow:
            raise ConfigError(f"{where}.beta_fast: {scaling.beta_fast} is below beta_slow {scaling.beta_slow}")
    if isinstance(scaling, Llama3Scaling):
        _above_zero(scaling.low_freq_factor, f"{where}.low_freq_factor")
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise ConfigError(f"{where}.high_freq_factor: must exceed low_freq_factor {scaling.low_freq_factor}")
    if isinstance(scaling, LongRopeScaling):
        for name in ("short", "long"):
            factors = getattr(scaling, name)
            if len(factors) != rotated // 2:
                raise ConfigError(f"{where}.{name}: {len(factors)} factors for {rotated // 2} frequencies")
            for index, factor in enumerate(factors):
                _above_zero(factor, f"{where}.{name}[{index}]")


def _check_eps(norm: Norm, where: str) -> None:
    if norm.eps < 0:
        raise ConfigError(f"{where}.eps: must not be negative, found {norm.eps}")


def _above_zero(value: float | None, where: str) -> None:
    if value is not None and value <= 0:
        raise ConfigError(f"{where}: must be above 0, found {value}")


def _at_least(low: int, value: int, where: str) -> None:
    if value < low:
        raise ConfigError(f"{where}: must be at least {low}, found {value}")
