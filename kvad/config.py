"""What a model is, as frozen nested dataclasses: JSON in and out, dotted overrides, errors that name the key.

``ModelConfig.load(path)`` / ``.to_dict()`` round-trip exactly.  A layer is a composition of parts (mixer, mlp, norm),
a stack repeats kinds of layers by a pattern string (``"LLLG"``), and nothing anywhere asks for a family's name.
Standard library only: no torch, so that ``kvad plan`` starts fast.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvad.arch import (
    Alibi,
    Attention,
    Classes,
    Dropout,
    DynamicScaling,
    Embedding,
    Experts,
    Gated,
    Head,
    Layer,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Norm,
    OwnPositions,
    Plain,
    Pooled,
    Pooling,
    Rope,
    Scaling,
    SinusoidalPositions,
    Stack,
    T5Bias,
    Transform,
    YarnScaling,
)
from kvad.errors import ConfigError, nearest
from kvad.schema import from_dict, override, to_dict

__all__ = [
    "Alibi",
    "Attention",
    "Classes",
    "Dropout",
    "DynamicScaling",
    "Embedding",
    "Experts",
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
    "OwnPositions",
    "Plain",
    "Pooled",
    "Pooling",
    "Rope",
    "Scaling",
    "SinusoidalPositions",
    "Source",
    "Stack",
    "T5Bias",
    "Transform",
    "YarnScaling",
    "encoder_mixers",
    "from_dict",
    "head_dim",
    "head_width",
    "meaning",
    "mixers",
    "override",
    "source_width",
    "table_width",
    "to_dict",
]


@dataclass(frozen=True)
class Source:
    """The encoder's side of an encoder-decoder.  ``vocab`` None: it shares the decoder's table of tokens.  ``width``:
    of the encoder's layers, where it is not the decoder's (T5Gemma 9B-2B)."""

    limit: int
    embed: Embedding = field(default_factory=Embedding)
    vocab: int | None = None
    width: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A Transformer: a decoder, an encoder, or both.

    ``limit`` is the longest row (prompt + generated; of an encoder, its tokens) that the model may hold.  ``embed`` is
    the decoder's embedding, or the encoder's where it stands alone; ``source`` the encoder's where there are both.
    """

    width: int
    vocab: int
    limit: int
    decoder: Stack | None = None
    encoder: Stack | None = None
    embed: Embedding = field(default_factory=Embedding)
    source: Source | None = None
    head: Head | Classes | Pooled = field(default_factory=Head)
    tie: bool = True
    dropout: Dropout = field(default_factory=Dropout)

    @property
    def kind(self) -> Literal["decoder", "encoder", "encoder-decoder"]:
        if self.decoder is None:
            return "encoder"
        return "decoder" if self.encoder is None else "encoder-decoder"

    @property
    def stack(self) -> Stack:
        """The stack whose output the head reads: the decoder, or the encoder where it stands alone."""
        stack = self.encoder if self.decoder is None else self.decoder
        assert stack is not None, "_check_model has looked"
        return stack

    @property
    def per_row(self) -> bool:
        """Whether the head answers for a whole row, and not for each of its tokens."""
        return isinstance(self.head, Pooled) or (isinstance(self.head, Classes) and self.head.per == "row")

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
        """From a JSON file; a checkpoint's ``config.json`` holds the model under ``"model"``.  ConfigError names it."""
        try:
            data = json.loads(path.read_text("utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(f"no such file: {path}") from error
        except (ValueError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: expected an object of keys, found {type(data).__name__}")
        try:
            return ModelConfig.from_dict(data.get("model", data))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}", error.hint) from error


# ---------------------------------------------------------------- when two are the same model


def meaning(config: ModelConfig) -> dict[str, Any]:
    """Every number of a model by its dotted name, layer by layer, with what is left open filled in.

    Two configs with the same meaning are one model in two spellings: ``kv_heads`` unsaid or as many as ``heads``, a
    pattern written once or twice, kinds of layers by other letters.
    """
    found: dict[str, Any] = {}
    for name, value in to_dict(config).items():
        if name not in ("encoder", "decoder"):
            found |= _flat(name, value)
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack is None:
            continue
        said = to_dict(stack).items()
        found |= {f"{name}.{key}": value for key, value in said if key not in ("kinds", "pattern")}
        for index in range(stack.layers):
            layer = stack.layer(index)
            cross = None if layer.cross is None else _filled(config, layer.cross)
            filled = replace(layer, mixer=_filled(config, layer.mixer), cross=cross)
            found |= _flat(f"{name}.layers.{index}", to_dict(filled))
    return found


def _filled(config: ModelConfig, mixer: Attention) -> Attention:
    dim, kv_heads = head_dim(config, mixer), mixer.kv_heads or mixer.heads
    scale = {"default": dim**-0.5, "none": 1.0}.get(str(mixer.scale), mixer.scale)
    return replace(mixer, head_dim=dim, kv_heads=kv_heads, value_dim=mixer.value_dim or dim, scale=scale)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, part in value.items():
        yield from _flat(f"{name}.{key}", part)


# ---------------------------------------------------------------- what a memory must hold


class MixerSpec(NamedTuple):
    """What one attention layer asks of a memory.  Layers with equal specs form a cache group and share a table.

    ``cross``: it reads the encoder's output, written once per source.  ``sinks``, ``grain``, ``outer`` and
    ``renumber`` are a policy's (``cache/policy.py``); what they mean stands at ``step.Reach``.
    """

    causal: bool
    window: int | None
    kv_heads: int
    head_dim: int
    value_dim: int
    cross: bool = False
    sinks: int = 0
    grain: int = 1
    outer: int | None = None
    renumber: bool = False


def head_dim(config: ModelConfig, mixer: Attention) -> int:
    return mixer.head_dim if mixer.head_dim is not None else config.width // mixer.heads


def mixers(config: ModelConfig) -> tuple[MixerSpec, ...]:
    """What a memory must hold: one :class:`MixerSpec` per decoder layer, from first to last, then one per
    cross-attention.  An encoder keeps nothing: it has none."""
    if config.decoder is None:
        return ()
    layers = [config.decoder.layer(index) for index in range(config.decoder.layers)]
    own = [_spec(config, layer.mixer, config.limit) for layer in layers]
    cross = [_spec(config, layer.cross, config.limit)._replace(cross=True) for layer in layers if layer.cross]
    return (*own, *cross)


def encoder_mixers(config: ModelConfig) -> tuple[MixerSpec, ...]:
    """The encoder's attention layers, from first to last."""
    if config.encoder is None:
        return ()
    limit = config.limit if config.source is None else config.source.limit
    return tuple(_spec(config, config.encoder.layer(index).mixer, limit) for index in range(config.encoder.layers))


def _spec(config: ModelConfig, mixer: Attention, limit: int) -> MixerSpec:
    dim = head_dim(config, mixer)
    window = mixer.window if mixer.window is not None and mixer.window < limit else None
    return MixerSpec(mixer.causal, window, mixer.kv_heads or mixer.heads, dim, mixer.value_dim or dim)


# ---------------------------------------------------------------- what can be right


def _check_model(config: ModelConfig) -> None:
    for name in ("width", "vocab", "limit"):
        _at_least(1, getattr(config, name), name)
    if config.decoder is None and config.encoder is None:
        raise ConfigError("a model needs a decoder, an encoder, or both")
    for name, stack in (("decoder", config.decoder), ("encoder", config.encoder)):
        if stack is not None:
            _check_stack(config, stack, name)
    _check_embedding(config.width, config.embed, config.limit, "embed")
    _check_source(config)
    _check_head(config)
    for name, share in to_dict(config.dropout).items():
        if not 0 <= share < 1:
            raise ConfigError(f"dropout.{name}: must be in [0, 1), found {share}")


def _check_stack(config: ModelConfig, stack: Stack, where: str) -> None:
    _at_least(1, stack.layers, f"{where}.layers")
    if not stack.pattern:
        raise ConfigError(f"{where}.pattern is empty", "name a kind per layer, as in 'LLLG'")
    for letter in stack.pattern:
        if letter not in stack.kinds:
            raise ConfigError(f"{where}.pattern names kind {letter!r}", nearest(letter, stack.kinds))
    for letter, layer in stack.kinds.items():
        at = f"{where}.kinds.{letter}"
        if letter not in stack.pattern:
            raise ConfigError(f"{at} is in no place of the pattern {stack.pattern!r}", "leave it out")
        _check_attention(config, layer.mixer, f"{at}.mixer")
        _check_mlp(layer.mlp, f"{at}.mlp")
        _check_eps(layer.norm, f"{at}.norm")
        if not layer.first_norm and stack.norm_place != "pre":
            raise ConfigError(f"{at}.first_norm: only a layer of norm_place pre can do without", stack.norm_place)
        _check_cross(config, stack, layer, where, at)


def _check_cross(config: ModelConfig, stack: Stack, layer: Layer, where: str, at: str) -> None:
    wanted = where == "decoder" and config.encoder is not None
    if layer.cross is None:
        if wanted:
            raise ConfigError(
                f"{at}.cross is missing", "each decoder layer of an encoder-decoder attends to the source"
            )
        return
    if not wanted:
        raise ConfigError(f"{at}.cross: there is no encoder to attend to", "leave it out")
    if stack.norm_place not in ("pre", "post", "sandwich"):
        raise ConfigError(f"{at}.cross: not known with norm_place {stack.norm_place}", "pre, post or sandwich")
    _check_attention(config, layer.cross, f"{at}.cross")
    if layer.cross.causal or layer.cross.window is not None or layer.cross.position is not None:
        raise ConfigError(f"{at}.cross: sees the whole source, without positions", "causal = false, position = null")


def _check_mlp(mlp: Plain | Gated | Experts, where: str) -> None:
    _at_least(1, mlp.hidden, f"{where}.hidden")
    if isinstance(mlp, Experts):
        _at_least(1, mlp.active, f"{where}.active")
        _at_least(mlp.active, mlp.count, f"{where}.count")
        _above_zero(mlp.clip, f"{where}.clip")


def _check_source(config: ModelConfig) -> None:
    both = config.decoder is not None and config.encoder is not None
    if config.source is None:
        if both:
            raise ConfigError("source is missing", "an encoder-decoder's source has a limit and an embedding")
        return
    if not both:
        raise ConfigError("source: only an encoder-decoder has one", "leave it out")
    _at_least(1, config.source.limit, "source.limit")
    if config.source.vocab is not None:
        _at_least(1, config.source.vocab, "source.vocab")
    elif config.source.embed.width != config.embed.width:
        raise ConfigError("source.embed.width: a shared table has one width", "set source.vocab for a table of its own")
    elif config.source.embed.width is None and config.source.width not in (None, config.width):
        raise ConfigError("source.width: a shared table has one width", "set source.vocab for a table of its own")
    if config.source.width is not None:
        _at_least(1, config.source.width, "source.width")
        for letter, layer in () if config.encoder is None else config.encoder.kinds.items():
            if layer.mixer.head_dim is None:
                raise ConfigError(f"encoder.kinds.{letter}.mixer.head_dim is missing", "source.width needs it")
    _check_embedding(source_width(config), config.source.embed, config.source.limit, "source.embed")


def _check_head(config: ModelConfig) -> None:
    head = config.head
    if isinstance(head, Head):
        _above_zero(head.softcap, "head.softcap")
    elif config.decoder is not None:
        raise ConfigError(f"head.kind: a decoder ends in a language head, found {head.kind}")
    if isinstance(head, Classes) and not head.labels:
        raise ConfigError("head.labels is empty", "name the classes")
    transform = head.transform
    if transform is not None:
        if transform.norm is not None:
            _check_eps(transform.norm, "head.transform.norm")
        if transform.width is not None:
            _at_least(1, transform.width, "head.transform.width")
    if isinstance(head, Head) and config.tie and head_width(config) != table_width(config):
        raise ConfigError(
            f"tie: the table is {table_width(config)} wide, the head reads {head_width(config)}",
            "set head.transform.width, or tie = false",
        )


def source_width(config: ModelConfig) -> int:
    """Of the encoder's layers, and of what cross-attention reads."""
    return config.width if config.source is None or config.source.width is None else config.source.width


def table_width(config: ModelConfig) -> int:
    """Columns of the table of tokens."""
    return config.width if config.embed.width is None else config.embed.width


def head_width(config: ModelConfig) -> int:
    """What the head's output matrix reads."""
    transform = config.head.transform
    return config.width if transform is None or transform.width is None else transform.width


def _check_embedding(model_width: int, embed: Embedding, limit: int, where: str) -> None:
    if embed.norm is not None:
        _check_eps(embed.norm, f"{where}.norm")
    elif embed.norm_first:
        raise ConfigError(f"{where}.norm_first: there is no norm", "leave it out")
    _at_least(0, embed.segments, f"{where}.segments")
    if embed.width is not None:
        _at_least(1, embed.width, f"{where}.width")
    width = model_width if embed.width is None or embed.project == "start" else embed.width
    _check_position(embed.position, width, limit, f"{where}.position")


def _check_position(
    position: LearnedPositions | SinusoidalPositions | None, width: int, limit: int, where: str
) -> None:
    if position is not None:
        _at_least(0, position.offset, f"{where}.offset")
    if isinstance(position, LearnedPositions) and limit + position.offset > position.size:
        raise ConfigError(
            f"{where}: limit {limit} (+ offset {position.offset}) exceeds the table's {position.size} rows"
        )
    if isinstance(position, SinusoidalPositions):
        _above_zero(position.base, f"{where}.base")
        if width % 2:
            raise ConfigError(f"{where}.kind sinusoidal needs an even width, found {width}")
        if position.form == "fairseq" and width < 4:
            raise ConfigError(f"{where}.form fairseq needs a width of at least 4, found {width}")


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
    _above_zero(mixer.clip, f"{where}.clip")
    if mixer.norm is not None:
        _check_eps(mixer.norm, f"{where}.norm")
        if mixer.qk_norm == "none":
            raise ConfigError(f"{where}.norm: of q and k, which qk_norm none leaves as they are", "leave it out")
    if isinstance(mixer.position, Alibi) and mixer.position.rounded and not mixer.causal:
        raise ConfigError(f"{where}.position.rounded: only a causal layer rounds by the key's position")
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
