"""Model configuration: nested frozen dataclasses that are read from JSON and validated.

``ModelConfig.load(path)`` and ``.to_dict()`` round-trip exactly. A layer is composed of parts (attention, MLP, norm),
and a stack repeats layer types by a pattern string (``"LLLG"``). No code depends on the name of a model family.
Standard library only: without torch, ``kvad plan`` starts fast.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvad.config.layers import (
    AlibiConfig,
    AttentionConfig,
    ClassificationHeadConfig,
    DropoutConfig,
    DynamicScalingConfig,
    EmbeddingConfig,
    LanguageHeadConfig,
    LayerConfig,
    LearnedPositionsConfig,
    Llama3ScalingConfig,
    LongRopeScalingConfig,
    MoEConfig,
    PoolingHeadConfig,
    RopeConfig,
    RopeScalingConfig,
    SinusoidalPositionsConfig,
    StackConfig,
    T5BiasConfig,
    YarnScalingConfig,
)
from kvad.config.serialization import from_dict, to_dict
from kvad.config.validation import PositiveInt, check_fields
from kvad.errors import ConfigError, suggest


@dataclass(frozen=True)
class EncoderInputConfig:
    """The encoder's input in an encoder-decoder."""

    max_seq_len: PositiveInt
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    vocab_size: PositiveInt | None = None  # None: the encoder shares the decoder's token table
    hidden_size: PositiveInt | None = None  # of the encoder's layers, if not the decoder's (T5Gemma 9B-2B)


@dataclass(frozen=True)
class ModelConfig:
    """A Transformer: a decoder, an encoder, or both."""

    hidden_size: PositiveInt
    vocab_size: PositiveInt
    max_seq_len: PositiveInt  # longest sequence: prompt and generated tokens, or an encoder's tokens
    decoder: StackConfig | None = None
    encoder: StackConfig | None = None
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)  # of the decoder, or of an encoder alone
    encoder_input: EncoderInputConfig | None = None  # of an encoder-decoder only
    head: LanguageHeadConfig | ClassificationHeadConfig | PoolingHeadConfig = field(default_factory=LanguageHeadConfig)
    tie_embeddings: bool = True  # the language head uses the token table
    dropout: DropoutConfig = field(default_factory=DropoutConfig)

    @property
    def kind(self) -> Literal["decoder", "encoder", "encoder-decoder"]:
        """The topology."""
        if self.decoder is None:
            return "encoder"
        return "decoder" if self.encoder is None else "encoder-decoder"

    @property
    def stack(self) -> StackConfig:
        """The stack whose output the head reads: the decoder, or a single encoder."""
        stack = self.encoder if self.decoder is None else self.decoder
        assert stack is not None, "_check_model requires a stack"
        return stack

    @property
    def pools_sequence(self) -> bool:
        """True if the head has one output per sequence, not one per token."""
        return isinstance(self.head, PoolingHeadConfig) or (
            isinstance(self.head, ClassificationHeadConfig) and self.head.level == "row"
        )

    def __post_init__(self) -> None:
        _check_model(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> ModelConfig:
        """Build the configuration from JSON values; a ConfigError names the key: ``decoder.layer_types.L.mlp.kind``."""
        return from_dict(ModelConfig, data)

    def to_dict(self) -> dict[str, Any]:
        """Convert the configuration to JSON values."""
        return typing.cast("dict[str, Any]", to_dict(self))

    @staticmethod
    def load(path: Path) -> ModelConfig:
        """Read a JSON file: a configuration, or a checkpoint's ``config.json`` with the key ``"model"``."""
        try:
            data = json.loads(path.read_text("utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(f"no such file: {path}") from error
        except (ValueError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: must be an object of keys, got {type(data).__name__}")
        try:
            return ModelConfig.from_dict(data.get("model", data))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}", error.hint) from error


# ---------------------------------------------------------------- comparison


def canonical_config(config: ModelConfig) -> dict[str, Any]:
    """Return every value of a configuration by its dotted name, layer by layer, with defaults filled in.

    Equal results mean equal models, for example if ``num_kv_heads`` is omitted or equal to ``num_heads``, a pattern is
    written once or twice, or layer types have other letters.
    """
    values: dict[str, Any] = {}
    for name, value in to_dict(config).items():
        if name not in ("encoder", "decoder"):
            values |= _flat(name, value)
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack is None:
            continue
        fields = to_dict(stack).items()
        values |= {f"{name}.{key}": value for key, value in fields if key not in ("layer_types", "layer_pattern")}
        for index in range(stack.num_layers):
            layer = stack.layer_config(index)
            cross = None if layer.cross_attention is None else _filled(config, layer.cross_attention)
            filled = replace(layer, attention=_filled(config, layer.attention), cross_attention=cross)
            values |= _flat(f"{name}.layers.{index}", to_dict(filled))
    return values


def _filled(config: ModelConfig, attention: AttentionConfig) -> AttentionConfig:
    dims = attention_dims(config, attention)
    scale = {"default": dims.head_dim**-0.5, "none": 1.0}.get(str(attention.softmax_scale), attention.softmax_scale)
    return replace(attention, softmax_scale=scale, **dims._asdict())


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, part in value.items():
        yield from _flat(f"{name}.{key}", part)


# ---------------------------------------------------------------- sizes


class AttentionDims(NamedTuple):
    """Sizes of an attention layer, with the defaults filled in."""

    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # D
    value_dim: int  # Dv

    @property
    def query_size(self) -> int:
        """H (D + Dv): numbers of a token's queries and outputs."""
        return self.num_heads * (self.head_dim + self.value_dim)

    @property
    def kv_size(self) -> int:
        """K (D + Dv): numbers of a token's keys and values."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)


def attention_dims(config: ModelConfig, attention: AttentionConfig) -> AttentionDims:
    """Return the sizes of an attention layer of this model."""
    dim = head_dim(config, attention)
    kv_heads = attention.num_kv_heads or attention.num_heads
    return AttentionDims(attention.num_heads, kv_heads, dim, attention.value_dim or dim)


def head_dim(config: ModelConfig, attention: AttentionConfig) -> int:
    """Return the head dim of a layer: its own, or hidden_size / num_heads."""
    return attention.head_dim if attention.head_dim is not None else config.hidden_size // attention.num_heads


def encoder_hidden_size(config: ModelConfig) -> int:
    """Return the hidden size of the encoder's layers, which cross-attention reads."""
    size = None if config.encoder_input is None else config.encoder_input.hidden_size
    return config.hidden_size if size is None else size


def embedding_size(config: ModelConfig) -> int:
    """Return the number of columns of the token table."""
    return config.hidden_size if config.embedding.embedding_size is None else config.embedding.embedding_size


def head_input_size(config: ModelConfig) -> int:
    """Return the input size of the head's output matrix."""
    transform = config.head.transform
    return config.hidden_size if transform is None or transform.output_size is None else transform.output_size


# ---------------------------------------------------------------- requirements of the attention layers


class AttentionSpec(NamedTuple):
    """Requirements of an attention layer on its cache. Layers with equal specs form a cache group.

    The last four fields are set by a policy (``cache/policy.py``) and defined at ``model_input.AttentionPattern``.
    """

    causal: bool
    window: int | None
    num_kv_heads: int
    head_dim: int
    value_dim: int
    is_cross_attention: bool = False  # reads the encoder's output, which is written once per encoder input
    num_sinks: int = 0
    window_step: int = 1
    layer_window: int | None = None
    renumber_positions: bool = False

    @property
    def kv_size(self) -> int:
        """K (D + Dv): numbers of a token's keys and values."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)


def attention_specs(config: ModelConfig) -> tuple[AttentionSpec, ...]:
    """Return one spec per decoder layer in order, then one per cross-attention; none for an encoder alone."""
    if config.decoder is None:
        return ()
    layers = [config.decoder.layer_config(index) for index in range(config.decoder.num_layers)]
    self_specs = [_spec(config, layer.attention, config.max_seq_len) for layer in layers]
    cross_specs = [
        _spec(config, layer.cross_attention, config.max_seq_len)._replace(is_cross_attention=True)
        for layer in layers
        if layer.cross_attention
    ]
    return (*self_specs, *cross_specs)


def encoder_attention_specs(config: ModelConfig) -> tuple[AttentionSpec, ...]:
    """Return the specs of the encoder's attention layers in order."""
    if config.encoder is None:
        return ()
    max_len = config.max_seq_len if config.encoder_input is None else config.encoder_input.max_seq_len
    return tuple(
        _spec(config, config.encoder.layer_config(index).attention, max_len)
        for index in range(config.encoder.num_layers)
    )


def _spec(config: ModelConfig, attention: AttentionConfig, max_len: int) -> AttentionSpec:
    window = attention.window if attention.window is not None and attention.window < max_len else None
    _, kv_heads, dim, value_dim = attention_dims(config, attention)
    return AttentionSpec(attention.causal, window, kv_heads, dim, value_dim)


# ---------------------------------------------------------------- validation
#
# Ranges are part of the fields' types (validation.py); these functions check fields against each other.


def _check_model(config: ModelConfig) -> None:
    check_fields(config)
    if config.decoder is None and config.encoder is None:
        raise ConfigError("a model needs a decoder, an encoder, or both")
    for name, stack in (("decoder", config.decoder), ("encoder", config.encoder)):
        if stack is not None:
            _check_stack(config, stack, name)
    _check_embedding(config.hidden_size, config.embedding, config.max_seq_len, "embedding")
    _check_encoder_input(config)
    _check_head(config)


def _check_stack(config: ModelConfig, stack: StackConfig, where: str) -> None:
    if not stack.layer_pattern:
        raise ConfigError(f"{where}.layer_pattern: must not be empty", "name a type per layer, as in 'LLLG'")
    for letter in stack.layer_pattern:
        if letter not in stack.layer_types:
            hint = suggest(letter, stack.layer_types)
            raise ConfigError(f"{where}.layer_pattern: unknown layer type {letter!r}", hint)
    for letter, layer in stack.layer_types.items():
        at = f"{where}.layer_types.{letter}"
        if letter not in stack.layer_pattern:
            raise ConfigError(f"{at}: is not used by layer_pattern {stack.layer_pattern!r}", "omit it")
        _check_attention(config, layer.attention, f"{at}.attention")
        if isinstance(layer.mlp, MoEConfig) and layer.mlp.num_experts < layer.mlp.num_experts_per_token:
            raise ConfigError(
                f"{at}.mlp.num_experts: must be at least {layer.mlp.num_experts_per_token}, got {layer.mlp.num_experts}"
            )
        if not layer.pre_attention_norm and stack.norm_position != "pre":
            raise ConfigError(
                f"{at}.pre_attention_norm: must be true with norm_position {stack.norm_position}",
                "only norm_position pre allows false",
            )
        _check_cross_attention(config, stack, layer, where, at)


def _check_cross_attention(config: ModelConfig, stack: StackConfig, layer: LayerConfig, where: str, at: str) -> None:
    required = where == "decoder" and config.encoder is not None
    cross = layer.cross_attention
    if cross is None:
        if required:
            raise ConfigError(
                f"missing key {at}.cross_attention", "every decoder layer of an encoder-decoder needs cross-attention"
            )
        return
    if not required:
        raise ConfigError(f"{at}.cross_attention: there is no encoder to attend to", "omit it")
    if stack.norm_position not in ("pre", "post", "sandwich"):
        raise ConfigError(
            f"{at}.cross_attention: is not supported with norm_position {stack.norm_position}",
            "use pre, post or sandwich",
        )
    _check_attention(config, cross, f"{at}.cross_attention")
    if cross.causal or cross.window is not None or cross.position is not None:
        raise ConfigError(
            f"{at}.cross_attention: must have no mask, window or positions", "set causal = false, position = null"
        )


def _check_encoder_input(config: ModelConfig) -> None:
    is_encoder_decoder = config.decoder is not None and config.encoder is not None
    encoder_input = config.encoder_input
    if encoder_input is None:
        if is_encoder_decoder:
            raise ConfigError("missing key encoder_input", "an encoder-decoder needs its max_seq_len and embedding")
        return
    if not is_encoder_decoder:
        raise ConfigError("encoder_input: only an encoder-decoder has one", "omit it")
    if encoder_input.vocab_size is None:
        hint = "set encoder_input.vocab_size for a separate table"
        if encoder_input.embedding.embedding_size != config.embedding.embedding_size:
            raise ConfigError(
                "encoder_input.embedding.embedding_size: must equal embedding.embedding_size of the shared table", hint
            )
        has_own_size = encoder_input.hidden_size not in (None, config.hidden_size)
        if encoder_input.embedding.embedding_size is None and has_own_size:
            raise ConfigError(
                "encoder_input.hidden_size: must equal hidden_size, because the token table is shared", hint
            )
    if encoder_input.hidden_size is not None:
        for letter, layer in () if config.encoder is None else config.encoder.layer_types.items():
            if layer.attention.head_dim is None:
                raise ConfigError(
                    f"missing key encoder.layer_types.{letter}.attention.head_dim", "encoder_input.hidden_size needs it"
                )
    hidden_size = encoder_hidden_size(config)
    _check_embedding(hidden_size, encoder_input.embedding, encoder_input.max_seq_len, "encoder_input.embedding")


def _check_head(config: ModelConfig) -> None:
    head = config.head
    if config.decoder is not None and not isinstance(head, LanguageHeadConfig):
        raise ConfigError(f"head.kind: must be language for a decoder, got {head.kind}")
    if isinstance(head, ClassificationHeadConfig) and not head.labels:
        raise ConfigError("head.labels: must not be empty", "name the classes")
    columns, needed = embedding_size(config), head_input_size(config)
    if isinstance(head, LanguageHeadConfig) and config.tie_embeddings and needed != columns:
        raise ConfigError(
            f"tie_embeddings: the token table has {columns} columns, the head needs {needed}",
            "set head.transform.output_size, or tie_embeddings = false",
        )


def _check_embedding(hidden_size: int, embed: EmbeddingConfig, max_len: int, where: str) -> None:
    if embed.norm is None and embed.norm_first:
        raise ConfigError(f"{where}.norm_first: must be false without a norm", "omit it")
    size = hidden_size if embed.embedding_size is None or embed.projection == "start" else embed.embedding_size
    position = embed.position
    if isinstance(position, LearnedPositionsConfig) and max_len + position.offset > position.num_positions:
        raise ConfigError(
            f"{where}.position.num_positions: must be at least max_seq_len {max_len} + offset {position.offset},"
            f" got {position.num_positions}"
        )
    if isinstance(position, SinusoidalPositionsConfig):
        if size % 2:
            raise ConfigError(f"{where}.position.kind: sinusoidal needs an even hidden_size, got {size}")
        if position.form == "fairseq" and size < 4:
            raise ConfigError(f"{where}.position.form: fairseq needs a hidden_size of at least 4, got {size}")


def _check_attention(config: ModelConfig, attention: AttentionConfig, where: str) -> None:
    kv_heads, position = attention.num_kv_heads, attention.position
    if kv_heads is not None and attention.num_heads % kv_heads:
        raise ConfigError(f"{where}.num_kv_heads: must divide num_heads {attention.num_heads}, got {kv_heads}")
    if attention.head_dim is None and config.hidden_size % attention.num_heads:
        raise ConfigError(
            f"{where}.num_heads: must divide hidden_size {config.hidden_size}, got {attention.num_heads}",
            f"or set {where}.head_dim",
        )
    if attention.qk_norm_config is not None and attention.qk_norm == "none":
        raise ConfigError(f"{where}.qk_norm_config: must be null with qk_norm none", "omit it")
    if isinstance(position, AlibiConfig) and position.round_to_bfloat16 and not attention.causal:
        raise ConfigError(f"{where}.position.round_to_bfloat16: must be false in a layer that is not causal")
    if isinstance(position, RopeConfig):
        _check_rope(position, head_dim(config, attention), f"{where}.position")
    if isinstance(position, T5BiasConfig):
        _check_buckets(position, f"{where}.position")


def _check_buckets(bias: T5BiasConfig, where: str) -> None:
    directions = 2 if bias.bidirectional else 1
    if bias.num_buckets < 2 * directions:
        raise ConfigError(f"{where}.num_buckets: must be at least {2 * directions}, got {bias.num_buckets}")
    num_exact = bias.num_buckets // directions // 2
    if bias.max_distance <= num_exact:
        raise ConfigError(f"{where}.max_distance: must exceed the {num_exact} exact buckets, got {bias.max_distance}")


def _check_rope(rope: RopeConfig, dim: int, where: str) -> None:
    rotated = int(dim * rope.partial_rotary_factor)
    if not 0 < rope.partial_rotary_factor <= 1 or rotated < 2 or rotated % 2:
        raise ConfigError(
            f"{where}.partial_rotary_factor: must rotate an even number of dims, got"
            f" {rope.partial_rotary_factor} of head_dim {dim} = {rotated}"
        )
    if rope.scaling is not None:
        _check_scaling(rope.scaling, rotated, f"{where}.scaling")


def _check_scaling(scaling: RopeScalingConfig, rotated: int, where: str) -> None:
    match scaling:
        case DynamicScalingConfig() if rotated == 2:
            raise ConfigError(f"{where}.kind: dynamic needs more than 2 rotated dims, got {rotated}")
        case YarnScalingConfig(beta_fast=fast, beta_slow=slow) if fast < slow:
            raise ConfigError(f"{where}.beta_fast: must be at least beta_slow {slow}, got {fast}")
        case Llama3ScalingConfig(high_freq_factor=high, low_freq_factor=low) if high <= low:
            raise ConfigError(f"{where}.high_freq_factor: must be above low_freq_factor {low}, got {high}")
        case LongRopeScalingConfig(short_factor=short, long_factor=long):
            for name, factors in (("short_factor", short), ("long_factor", long)):
                if len(factors) != rotated // 2:
                    raise ConfigError(f"{where}.{name}: must have {rotated // 2} factors, got {len(factors)}")
