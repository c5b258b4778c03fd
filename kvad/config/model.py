"""Model configuration: nested frozen dataclasses that are read from JSON and validated.

``ModelConfig.load(path)`` and ``.to_dict()`` round-trip exactly. A layer is composed of parts (attention, MLP, norm),
and a stack repeats layer types by a pattern string (``"LLLG"``). No code depends on the name of a model family.
Standard library only: without torch, ``kvad plan`` starts fast.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvad import storage
from kvad.config import layers as cfg
from kvad.config.serialization import check_fields, from_dict, to_dict
from kvad.errors import ConfigError, suggest
from kvad.model_input import AttentionPattern


@dataclass(frozen=True)
class EncoderInputConfig:
    """The encoder's input in an encoder-decoder."""

    max_seq_len: cfg.Length
    embedding: cfg.EmbeddingConfig = field(default_factory=cfg.EmbeddingConfig)
    vocab_size: cfg.Length | None = None  # None: the encoder shares the decoder's token table
    hidden_size: cfg.Size | None = None  # of the encoder's layers, if not the decoder's (T5Gemma 9B-2B)


@dataclass(frozen=True)
class ModelConfig:
    """A Transformer: a decoder, an encoder, or both."""

    hidden_size: cfg.Size
    vocab_size: cfg.Length
    max_seq_len: cfg.Length  # longest sequence: prompt and generated tokens, or an encoder's tokens
    decoder: cfg.StackConfig | None = None
    encoder: cfg.StackConfig | None = None
    embedding: cfg.EmbeddingConfig = field(default_factory=cfg.EmbeddingConfig)  # of the decoder, or of a lone encoder
    encoder_input: EncoderInputConfig | None = None  # of an encoder-decoder only
    head: cfg.LanguageHeadConfig | cfg.ClassificationHeadConfig | cfg.PoolingHeadConfig = field(
        default_factory=cfg.LanguageHeadConfig
    )
    tie_embeddings: bool = True  # the language head uses the token table
    dropout: cfg.DropoutConfig = field(default_factory=cfg.DropoutConfig)

    @property
    def kind(self) -> Literal["decoder", "encoder", "encoder-decoder"]:
        """The topology."""
        if self.decoder is None:
            return "encoder"
        return "decoder" if self.encoder is None else "encoder-decoder"

    @property
    def stack(self) -> cfg.StackConfig:
        """The stack whose output the head reads: the decoder, or a single encoder."""
        stack = self.encoder if self.decoder is None else self.decoder
        assert stack is not None, "_check_model requires a stack"
        return stack

    @property
    def pools_sequence(self) -> bool:
        """True if the head has one output per sequence, not one per token."""
        return isinstance(self.head, cfg.PoolingHeadConfig) or (
            isinstance(self.head, cfg.ClassificationHeadConfig) and self.head.level == "row"
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
            data = storage.strict_json.loads(storage.filesystem.read_bytes(path))
        except FileNotFoundError as error:
            raise ConfigError(f"no such file: {path}") from error
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: must be an object of keys, got {type(data).__name__}")
        try:
            return ModelConfig.from_dict(data.get("model", data))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}", error.hint) from error


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
        for index, layer in enumerate(stack.layer_configs):
            attention, cross = layer.attention, layer.cross_attention
            cross = None if cross is None else _filled(config, cross)
            attention = _filled(config, attention) if isinstance(attention, cfg.AttentionConfig) else attention
            filled = replace(layer, attention=attention, cross_attention=cross)
            values |= _flat(f"{name}.layers.{index}", to_dict(filled))
    return values


def _filled(config: ModelConfig, attention: cfg.AttentionConfig) -> cfg.AttentionConfig:
    dims, scale = attention_dims(config, attention), attention.softmax_scale
    scale = {"default": query_dim(config, attention) ** -0.5, "none": 1.0}.get(str(scale), scale)
    return replace(attention, softmax_scale=scale, **dims._asdict())


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, part in value.items():
        yield from _flat(f"{name}.{key}", part)


class AttentionDims(NamedTuple):
    """Sizes of an attention layer, with the defaults filled in."""

    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # D
    value_dim: int  # Dv


def attention_dims(config: ModelConfig, attention: cfg.TokenMixer) -> AttentionDims:
    """Return the sizes of an attention layer of this model, as its cache has them."""
    if isinstance(attention, cfg.RecurrentMixer):
        sizes = attention.state_sizes(config.hidden_size)
        return AttentionDims(1, 1, sizes.inputs, sizes.others)
    heads, dim = attention.num_heads, head_dim(config, attention)
    if attention.latent is not None:
        return AttentionDims(heads, 1, dim, attention.latent.kv_lora_rank)
    return AttentionDims(heads, attention.num_kv_heads or heads, dim, attention.value_dim or dim)


def head_dim(config: ModelConfig, attention: cfg.TokenMixer) -> int:
    """Return the head dim of a layer's cache: its own, or hidden_size / num_heads."""
    if isinstance(attention, cfg.RecurrentMixer):
        return attention_dims(config, attention).head_dim
    if attention.latent is not None:
        return attention.latent.qk_rope_head_dim + attention.latent.kv_lora_rank
    return attention.head_dim or config.hidden_size // attention.num_heads


def rotary_dim(config: ModelConfig, attention: cfg.TokenMixer) -> int:
    """Return the leading dims of a head to which ``partial_rotary_factor`` applies."""
    return head_dim(config, attention) if attention.latent is None else attention.latent.qk_rope_head_dim


def kv_size(config: ModelConfig, attention: cfg.TokenMixer) -> int:
    """Return K (D + Dv), the stored numbers of a token's keys and values."""
    return _spec(config, attention, config.max_seq_len).kv_size


def query_dim(config: ModelConfig, attention: cfg.TokenMixer) -> int:
    """Return the numbers of a head's query, whose root divides q.k by default."""
    return head_dim(config, attention) if attention.latent is None else attention.latent.qk_head_dim


def encoder_hidden_size(config: ModelConfig) -> int:
    """Return the hidden size of the encoder's layers, which cross-attention reads."""
    encoder_input = config.encoder_input
    return (encoder_input and encoder_input.hidden_size) or config.hidden_size


def embedding_size(config: ModelConfig) -> int:
    """Return the number of columns of the token table."""
    return config.embedding.embedding_size or config.hidden_size


def head_input_size(config: ModelConfig) -> int:
    """Return the input size of the head's output matrix."""
    transform = config.head.transform
    return (transform and transform.output_size) or config.hidden_size


class AttentionSpec(NamedTuple):
    """Requirements of an attention layer on its cache. Layers with equal specs form a cache group.

    ``num_sinks`` to ``renumber_positions`` are set by a policy (``cache/policy.py``) and defined at
    ``model_input.AttentionPattern``.
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
    values_in_keys: bool = False  # values are the last ``value_dim`` numbers of the keys, and are not stored (MLA)
    # A key is the input of a convolution, a value a state after this token, or what computes it from an earlier one:
    # policies and quantized formats do not apply. The window has the tokens that the next one reads.
    is_state: bool = False
    snapshot_size: int = 0  # numbers of a state that is stored once per block, behind its last token

    @property
    def kv_size(self) -> int:
        """K (D + Dv): stored numbers of a token's keys and values."""
        return self.num_kv_heads * (self.head_dim + (0 if self.values_in_keys else self.value_dim))

    @property
    def dims(self) -> str:
        """Head dim of the keys, and of the values if they are stored and differ, such as "64" or "192 + 128"."""
        has_one = self.values_in_keys or self.head_dim == self.value_dim
        return f"{self.head_dim}" if has_one else f"{self.head_dim} + {self.value_dim}"

    @property
    def is_summarizable(self) -> bool:
        """True if a trained summarizer can merge the layer's tokens; a latent is key and value at once."""
        is_full = self.causal and not self.is_cross_attention and self.window is None
        return is_full and not self.values_in_keys

    @property
    def pattern(self) -> AttentionPattern:
        """Visibility of keys to queries."""
        window = self.window, self.num_sinks, self.window_step, self.layer_window
        return AttentionPattern(self.causal, *window, self.renumber_positions)


def attention_specs(config: ModelConfig) -> tuple[AttentionSpec, ...]:
    """Return one spec per decoder layer in order, then one per cross-attention; none for an encoder alone."""
    if config.decoder is None:
        return ()
    layers, max_len = config.decoder.layer_configs, config.max_seq_len
    cross = (_spec(config, layer.cross_attention, max_len) for layer in layers if layer.cross_attention)
    own = (_spec(config, layer.attention, max_len) for layer in layers)
    return (*own, *(spec._replace(is_cross_attention=True) for spec in cross))


def encoder_attention_specs(config: ModelConfig) -> tuple[AttentionSpec, ...]:
    """Return the specs of the encoder's attention layers in order."""
    if config.encoder is None:
        return ()
    max_len = config.max_seq_len if config.encoder_input is None else config.encoder_input.max_seq_len
    return tuple(_spec(config, layer.attention, max_len) for layer in config.encoder.layer_configs)


def _spec(config: ModelConfig, attention: cfg.TokenMixer, max_len: int) -> AttentionSpec:
    if isinstance(attention, cfg.RecurrentMixer):
        inputs, others, snapshot = attention.state_sizes(config.hidden_size)
        sizes = attention.kernel_size, 1, inputs, others
        return AttentionSpec(True, *sizes, values_in_keys=others == 0, is_state=True, snapshot_size=snapshot)
    window = attention.window if attention.window is not None and attention.window < max_len else None
    _, kv_heads, dim, value_dim = attention_dims(config, attention)
    values_in_keys = attention.latent is not None
    return AttentionSpec(attention.causal, window, kv_heads, dim, value_dim, values_in_keys=values_in_keys)


# ---------------------------------------------------------------- validation
#
# Ranges are part of the fields' types; these functions check fields against each other.


def _require(condition: bool, message: str, hint: str = "") -> None:
    if not condition:
        raise ConfigError(message, hint)


def _check_model(config: ModelConfig) -> None:
    check_fields(config)
    _require(config.decoder is not None or config.encoder is not None, "a model needs a decoder, an encoder, or both")
    for name, stack in (("decoder", config.decoder), ("encoder", config.encoder)):
        if stack is not None:
            _check_stack(config, stack, name)
    _check_embedding(config.hidden_size, config.embedding, config.max_seq_len, "embedding")
    _check_encoder_input(config)
    _check_head(config)


def _check_stack(config: ModelConfig, stack: cfg.StackConfig, where: str) -> None:
    pattern, norm_position = stack.layer_pattern, stack.norm_position
    _check_distinct_layers(config, stack, where)
    _require(pattern != "", f"{where}.layer_pattern: must not be empty", "name a type per layer, as in 'LLLG'")
    for letter in pattern:
        if letter not in stack.layer_types:
            hint = suggest(letter, stack.layer_types)
            raise ConfigError(f"{where}.layer_pattern: unknown layer type {letter!r}", hint)
    for letter, layer in stack.layer_types.items():
        at = f"{where}.layer_types.{letter}"
        _require(letter in pattern, f"{at}: is not used by layer_pattern {pattern!r}", "omit it")
        if isinstance(layer.attention, cfg.AttentionConfig):
            _check_attention(config, layer.attention, f"{at}.attention")
        else:
            message = f"{at}.attention.kind: {layer.attention.kind} must be in a decoder without an encoder"
            _require(where == "decoder" and config.encoder is None, message)
            problem = layer.attention.problem()
            _require(not problem, f"{at}.attention.{problem}")
        if isinstance(layer.mlp, cfg.MoEConfig):
            _check_experts(layer.mlp, f"{at}.mlp")
        message = f"{at}.pre_attention_norm: must be true with norm_position {norm_position}"
        _require(layer.pre_attention_norm or norm_position == "pre", message, "only norm_position pre allows false")
        _check_cross_attention(config, stack, layer, where, at)


def _check_experts(mlp: cfg.MoEConfig, at: str) -> None:
    least, num_groups = mlp.num_experts_per_token, mlp.num_groups
    _require(mlp.num_experts >= least, f"{at}.num_experts: must be at least {least}, got {mlp.num_experts}")
    divides = mlp.num_experts % num_groups == 0
    _require(divides, f"{at}.num_groups: must divide the {mlp.num_experts} experts, got {num_groups}")
    most, size = mlp.num_groups_per_token, mlp.num_experts // num_groups
    _require(most <= num_groups, f"{at}.num_groups_per_token: must be at most {num_groups}, got {most}")
    message = f"{at}.num_experts_per_token: must be at most {most * size}, the experts of {most} groups, got {least}"
    _require(least <= most * size, message)
    is_pair = size > 1 or num_groups == 1 or not mlp.selection_bias
    _require(is_pair, f"{at}.num_groups: must leave two experts per group with selection_bias, got {num_groups}")
    is_plain = mlp.router == "softmax" and not mlp.selection_bias and num_groups == 1 and mlp.routed_scale == 1.0
    message = (
        f"{at}.sparsemixer_jitter: must be used with a softmax router of two experts per token and no other options"
    )
    _require(mlp.sparsemixer_jitter is None or (is_plain and least == 2), message, "omit it")
    _require(
        mlp.shared_size is not None or not mlp.shared_gate, f"{at}.shared_gate: there is no shared expert", "omit it"
    )


def _check_distinct_layers(config: ModelConfig, stack: cfg.StackConfig, where: str) -> None:
    distinct, at = stack.num_distinct_layers, f"{where}.num_distinct_layers"
    if distinct is not None:
        _require(config.decoder is None, f"{at}: must be null in a model with a decoder", "only encoders share layers")
        _require(len(stack.layer_types) == 1, f"{at}: must be null with several layer types")
        _require(distinct <= stack.num_layers, f"{at}: must be at most num_layers {stack.num_layers}, got {distinct}")


def _check_cross_attention(
    config: ModelConfig, stack: cfg.StackConfig, layer: cfg.LayerConfig, where: str, at: str
) -> None:
    at, cross = f"{at}.cross_attention", layer.cross_attention
    is_required = where == "decoder" and config.encoder is not None
    if cross is None:
        hint = "every decoder layer of an encoder-decoder needs cross-attention"
        _require(not is_required, f"missing key {at}", hint)
        return
    _require(is_required, f"{at}: there is no encoder to attend to", "omit it")
    message = f"{at}: is not supported with norm_position {stack.norm_position}"
    _require(stack.norm_position in ("pre", "post", "sandwich"), message, "use pre, post or sandwich")
    _check_attention(config, cross, at)
    is_plain = not cross.causal and cross.window is None and cross.position is None
    _require(not cross.values_from_keys and not cross.value_norm, f"{at}: must have no values_from_keys, value_norm")
    _require(is_plain, f"{at}: must have no mask, window or positions", "set causal = false, position = null")


def _check_encoder_input(config: ModelConfig) -> None:
    is_encoder_decoder = config.decoder is not None and config.encoder is not None
    source = config.encoder_input
    if source is None:
        hint = "an encoder-decoder needs its max_seq_len and embedding"
        _require(not is_encoder_decoder, "missing key encoder_input", hint)
        return
    _require(is_encoder_decoder, "encoder_input: only an encoder-decoder has one", "omit it")
    if source.vocab_size is None:
        hint, table_size = "set encoder_input.vocab_size for a separate table", source.embedding.embedding_size
        message = "encoder_input.embedding.embedding_size: must equal embedding.embedding_size of the shared table"
        _require(table_size == config.embedding.embedding_size, message, hint)
        message = "encoder_input.hidden_size: must equal hidden_size, because the token table is shared"
        _require(table_size is not None or source.hidden_size in (None, config.hidden_size), message, hint)
    if source.hidden_size is not None and config.encoder is not None:
        for letter, attention in ((letter, layer.attention) for letter, layer in config.encoder.layer_types.items()):
            message = f"missing key encoder.layer_types.{letter}.attention.head_dim"
            _require(
                isinstance(attention, cfg.AttentionConfig) and attention.head_dim is not None,
                message,
                "encoder_input.hidden_size needs it",
            )
    _check_embedding(encoder_hidden_size(config), source.embedding, source.max_seq_len, "encoder_input.embedding")


def _check_head(config: ModelConfig) -> None:
    head, is_language = config.head, isinstance(config.head, cfg.LanguageHeadConfig)
    message = f"head.kind: must be language for a decoder, got {head.kind}"
    _require(config.decoder is None or is_language, message)
    if isinstance(head, cfg.ClassificationHeadConfig):
        _require(len(head.labels) > 0, "head.labels: must not be empty", "name the classes")
    columns, needed = embedding_size(config), head_input_size(config)
    message = f"tie_embeddings: the token table has {columns} columns, the head needs {needed}"
    hint = "set head.transform.output_size, or tie_embeddings = false"
    _require(not is_language or not config.tie_embeddings or needed == columns, message, hint)


def _check_embedding(hidden_size: int, embed: cfg.EmbeddingConfig, max_len: int, where: str) -> None:
    message = f"{where}.norm_first: must be false without a norm"
    _require(embed.norm is not None or not embed.norm_first, message, "omit it")
    size = hidden_size if embed.embedding_size is None or embed.projection == "start" else embed.embedding_size
    where, position = f"{where}.position", embed.position
    if isinstance(position, cfg.LearnedPositionsConfig):
        message = f"{where}.num_positions: must be at least max_seq_len {max_len} + offset {position.offset},"
        is_enough = max_len + position.offset <= position.num_positions
        _require(is_enough, f"{message} got {position.num_positions}")
    if isinstance(position, cfg.SinusoidalPositionsConfig):
        _require(size % 2 == 0, f"{where}.kind: sinusoidal needs an even hidden_size, got {size}")
        message = f"{where}.form: fairseq needs a hidden_size of at least 4, got {size}"
        _require(position.form != "fairseq" or size >= 4, message)


def _check_attention(config: ModelConfig, attention: cfg.AttentionConfig, where: str) -> None:
    heads, kv_heads, position = attention.num_heads, attention.num_kv_heads, attention.position
    message = f"{where}.num_kv_heads: must divide num_heads {heads}, got {kv_heads}"
    _require(kv_heads is None or heads % kv_heads == 0, message)
    message = f"{where}.num_heads: must divide hidden_size {config.hidden_size}, got {heads}"
    has_head_dim = (attention.head_dim or attention.latent) is not None or config.hidden_size % heads == 0
    _require(has_head_dim, message, f"or set {where}.head_dim")
    has_norm = attention.qk_norm_config is None or attention.qk_norm != "none"
    _require(has_norm, f"{where}.qk_norm_config: must be null with qk_norm none", "omit it")
    if attention.values_from_keys:
        message = f"{where}.values_from_keys: must be false with value_dim, qk_norm full or a custom class"
        is_plain = attention.value_dim in (None, attention.head_dim) and attention.qk_norm != "full"
        _require(is_plain and attention.custom_class is None and attention.latent is None, message, "omit it")
    message = f"{where}.output_gate: must be false with latent or cross-attention or a custom class"
    is_plain = attention.latent is None and attention.custom_class is None and attention.causal
    _require(is_plain or not attention.output_gate, message, "omit it")
    if attention.latent is not None:
        _check_latent(attention, where)
    where = f"{where}.position"
    if isinstance(position, cfg.AlibiConfig):
        message = f"{where}.round_to_bfloat16: must be false in a layer that is not causal"
        _require(attention.causal or not position.round_to_bfloat16, message)
    if isinstance(position, cfg.RopeConfig):
        _check_rope(position, rotary_dim(config, attention), where)
    if isinstance(position, cfg.DisentangledConfig):
        _check_disentangled(config, attention, position, where)
    if isinstance(position, cfg.T5BiasConfig):
        directions = 2 if position.bidirectional else 1
        num_buckets, num_exact = position.num_buckets, position.num_buckets // directions // 2
        message = f"{where}.num_buckets: must be at least {2 * directions}, got {num_buckets}"
        _require(num_buckets >= 2 * directions, message)
        message = f"{where}.max_distance: must exceed the {num_exact} exact buckets, got {position.max_distance}"
        _require(position.max_distance > num_exact, message)


def _check_disentangled(
    config: ModelConfig, attention: cfg.AttentionConfig, position: cfg.DisentangledConfig, where: str
) -> None:
    is_full = attention.num_kv_heads in (None, attention.num_heads)
    is_plain = config.decoder is None and not attention.causal and is_full
    message = f"{where}: disentangled needs an encoder without a decoder"
    _require(is_plain, message, "and num_kv_heads equal to num_heads")
    has_terms = position.content_to_position or position.position_to_content
    _require(has_terms, f"{where}.content_to_position: one of the two terms must be true", "use position null")
    half = (position.num_buckets or 2) // 2
    message = f"{where}.max_distance: must exceed half of num_buckets by 2, got {position.max_distance}"
    _require(half >= 1 and position.max_distance >= half + 2, message)


def _check_latent(attention: cfg.AttentionConfig, where: str) -> None:
    hint = "the latent determines it: omit it"
    for name in ("num_kv_heads", "head_dim", "value_dim"):
        _require(getattr(attention, name) is None, f"{where}.{name}: must be null with latent attention", hint)
    others = attention.qk_norm == "none" and attention.clip_qkv is None and attention.custom_class is None
    message = f"{where}: latent attention has no qk_norm, clip_qkv or custom_class"
    _require(others, message, "omit them")
    message = f"{where}.position: must be rope with latent attention"
    _require(isinstance(attention.position, cfg.RopeConfig) and attention.causal, message, "in a causal layer")


def _check_rope(rope: cfg.RopeConfig, dim: int, where: str) -> None:
    factor = rope.partial_rotary_factor
    rotated = int(dim * factor)
    message = f"{where}.partial_rotary_factor: must rotate an even number of dims, got"
    is_even = 0 < factor <= 1 and rotated >= 2 and rotated % 2 == 0
    _require(is_even, f"{message} {factor} of head_dim {dim} = {rotated}")
    where = f"{where}.scaling"
    match rope.scaling:
        case cfg.DynamicScalingConfig():
            _require(rotated > 2, f"{where}.kind: dynamic needs more than 2 rotated dims, got {rotated}")
        case cfg.YarnScalingConfig(beta_fast=fast, beta_slow=slow):
            _require(fast >= slow, f"{where}.beta_fast: must be at least beta_slow {slow}, got {fast}")
        case cfg.Llama3ScalingConfig(high_freq_factor=high, low_freq_factor=low):
            _require(high > low, f"{where}.high_freq_factor: must be above low_freq_factor {low}, got {high}")
        case cfg.LongRopeScalingConfig(short_factor=short, long_factor=long):
            for name, factors in (("short_factor", short), ("long_factor", long)):
                message = f"{where}.{name}: must have {rotated // 2} factors, got {len(factors)}"
                _require(len(factors) == rotated // 2, message)
