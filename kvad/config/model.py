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

from kvad.config.layers import (
    AlibiConfig,
    AttentionConfig,
    ClassificationHeadConfig,
    DropoutConfig,
    DynamicScalingConfig,
    EmbeddingConfig,
    GatedMLPConfig,
    LanguageHeadConfig,
    LayerConfig,
    LearnedPositionsConfig,
    LinearScalingConfig,
    Llama3ScalingConfig,
    LongRopeScalingConfig,
    MoEConfig,
    NormConfig,
    PlainMLPConfig,
    PoolingHeadConfig,
    RopeConfig,
    RopeScalingConfig,
    SinusoidalPositionsConfig,
    StackConfig,
    T5BiasConfig,
    YarnScalingConfig,
)
from kvad.config.serialization import from_dict, to_dict
from kvad.errors import ConfigError, suggest


@dataclass(frozen=True)
class EncoderInputConfig:
    """The encoder's side of an encoder-decoder.  ``vocab`` None: it shares the decoder's table of tokens.  ``width``:
    of the encoder's layers, where it is not the decoder's (T5Gemma 9B-2B)."""

    max_seq_len: int
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    vocab_size: int | None = None
    hidden_size: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A Transformer: a decoder, an encoder, or both.

    ``limit`` is the longest row (prompt + generated; of an encoder, its tokens) that the model may hold.  ``embed`` is
    the decoder's embedding, or the encoder's where it stands alone; ``source`` the encoder's where there are both.
    """

    hidden_size: int
    vocab_size: int
    max_seq_len: int
    decoder: StackConfig | None = None
    encoder: StackConfig | None = None
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    encoder_input: EncoderInputConfig | None = None
    head: LanguageHeadConfig | ClassificationHeadConfig | PoolingHeadConfig = field(default_factory=LanguageHeadConfig)
    tie_embeddings: bool = True
    dropout: DropoutConfig = field(default_factory=DropoutConfig)

    @property
    def kind(self) -> Literal["decoder", "encoder", "encoder-decoder"]:
        if self.decoder is None:
            return "encoder"
        return "decoder" if self.encoder is None else "encoder-decoder"

    @property
    def stack(self) -> StackConfig:
        """The stack whose output the head reads: the decoder, or the encoder where it stands alone."""
        stack = self.encoder if self.decoder is None else self.decoder
        assert stack is not None, "_check_model has looked"
        return stack

    @property
    def pools_sequence(self) -> bool:
        """Whether the head answers for a whole row, and not for each of its tokens."""
        return isinstance(self.head, PoolingHeadConfig) or (
            isinstance(self.head, ClassificationHeadConfig) and self.head.level == "row"
        )

    def __post_init__(self) -> None:
        _check_model(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> ModelConfig:
        """Raises ConfigError naming the key (``decoder.layer_types.L.attention.num_heads``) for anything unknown or out of range."""
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


def canonical_config(config: ModelConfig) -> dict[str, Any]:
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
        found |= {f"{name}.{key}": value for key, value in said if key not in ("layer_types", "layer_pattern")}
        for index in range(stack.num_layers):
            layer = stack.layer_config(index)
            cross = None if layer.cross_attention is None else _filled(config, layer.cross_attention)
            filled = replace(layer, attention=_filled(config, layer.attention), cross_attention=cross)
            found |= _flat(f"{name}.layers.{index}", to_dict(filled))
    return found


def _filled(config: ModelConfig, mixer: AttentionConfig) -> AttentionConfig:
    dim, kv_heads = head_dim(config, mixer), mixer.num_kv_heads or mixer.num_heads
    scale = {"default": dim**-0.5, "none": 1.0}.get(str(mixer.softmax_scale), mixer.softmax_scale)
    return replace(mixer, head_dim=dim, num_kv_heads=kv_heads, value_dim=mixer.value_dim or dim, softmax_scale=scale)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, part in value.items():
        yield from _flat(f"{name}.{key}", part)


# ---------------------------------------------------------------- what a memory must hold


class AttentionSpec(NamedTuple):
    """What one attention layer asks of a memory.  Layers with equal specs form a cache group and share a table.

    ``cross``: it reads the encoder's output, written once per source.  ``sinks``, ``grain``, ``outer`` and
    ``renumber`` are a policy's (``cache/policy.py``); what they mean stands at ``step.Reach``.
    """

    causal: bool
    window: int | None
    num_kv_heads: int
    head_dim: int
    value_dim: int
    is_cross_attention: bool = False
    num_sinks: int = 0
    window_step: int = 1
    layer_window: int | None = None
    renumber_positions: bool = False


def head_dim(config: ModelConfig, mixer: AttentionConfig) -> int:
    return mixer.head_dim if mixer.head_dim is not None else config.hidden_size // mixer.num_heads


def attention_specs(config: ModelConfig) -> tuple[AttentionSpec, ...]:
    """What a memory must hold: one :class:`MixerSpec` per decoder layer, from first to last, then one per
    cross-attention.  An encoder keeps nothing: it has none."""
    if config.decoder is None:
        return ()
    layers = [config.decoder.layer_config(index) for index in range(config.decoder.num_layers)]
    own = [_spec(config, layer.attention, config.max_seq_len) for layer in layers]
    cross = [
        _spec(config, layer.cross_attention, config.max_seq_len)._replace(is_cross_attention=True)
        for layer in layers
        if layer.cross_attention
    ]
    return (*own, *cross)


def encoder_attention_specs(config: ModelConfig) -> tuple[AttentionSpec, ...]:
    """The encoder's attention layers, from first to last."""
    if config.encoder is None:
        return ()
    limit = config.max_seq_len if config.encoder_input is None else config.encoder_input.max_seq_len
    return tuple(
        _spec(config, config.encoder.layer_config(index).attention, limit) for index in range(config.encoder.num_layers)
    )


def _spec(config: ModelConfig, mixer: AttentionConfig, limit: int) -> AttentionSpec:
    dim = head_dim(config, mixer)
    window = mixer.window if mixer.window is not None and mixer.window < limit else None
    return AttentionSpec(mixer.causal, window, mixer.num_kv_heads or mixer.num_heads, dim, mixer.value_dim or dim)


# ---------------------------------------------------------------- what can be right


def _check_model(config: ModelConfig) -> None:
    for name in ("hidden_size", "vocab_size", "max_seq_len"):
        _check_min(1, getattr(config, name), name)
    if config.decoder is None and config.encoder is None:
        raise ConfigError("a model needs a decoder, an encoder, or both")
    for name, stack in (("decoder", config.decoder), ("encoder", config.encoder)):
        if stack is not None:
            _check_stack(config, stack, name)
    _check_embedding(config.hidden_size, config.embedding, config.max_seq_len, "embedding")
    _check_source(config)
    _check_head(config)
    for name, share in to_dict(config.dropout).items():
        if not 0 <= share < 1:
            raise ConfigError(f"dropout.{name}: must be in [0, 1), found {share}")


def _check_stack(config: ModelConfig, stack: StackConfig, where: str) -> None:
    _check_min(1, stack.num_layers, f"{where}.num_layers")
    if not stack.layer_pattern:
        raise ConfigError(f"{where}.layer_pattern is empty", "name a kind per layer, as in 'LLLG'")
    for letter in stack.layer_pattern:
        if letter not in stack.layer_types:
            raise ConfigError(f"{where}.layer_pattern names kind {letter!r}", suggest(letter, stack.layer_types))
    for letter, layer in stack.layer_types.items():
        at = f"{where}.layer_types.{letter}"
        if letter not in stack.layer_pattern:
            raise ConfigError(f"{at} is in no place of the pattern {stack.layer_pattern!r}", "leave it out")
        _check_attention(config, layer.attention, f"{at}.attention")
        _check_mlp(layer.mlp, f"{at}.mlp")
        _check_eps(layer.norm, f"{at}.norm")
        if not layer.pre_attention_norm and stack.norm_position != "pre":
            raise ConfigError(
                f"{at}.pre_attention_norm: only a layer of norm_place pre can do without", stack.norm_position
            )
        _check_cross(config, stack, layer, where, at)


def _check_cross(config: ModelConfig, stack: StackConfig, layer: LayerConfig, where: str, at: str) -> None:
    wanted = where == "decoder" and config.encoder is not None
    if layer.cross_attention is None:
        if wanted:
            raise ConfigError(
                f"{at}.cross_attention is missing", "each decoder layer of an encoder-decoder attends to the source"
            )
        return
    if not wanted:
        raise ConfigError(f"{at}.cross_attention: there is no encoder to attend to", "leave it out")
    if stack.norm_position not in ("pre", "post", "sandwich"):
        raise ConfigError(
            f"{at}.cross_attention: not known with norm_place {stack.norm_position}", "pre, post or sandwich"
        )
    _check_attention(config, layer.cross_attention, f"{at}.cross_attention")
    if (
        layer.cross_attention.causal
        or layer.cross_attention.window is not None
        or layer.cross_attention.position is not None
    ):
        raise ConfigError(
            f"{at}.cross_attention: sees the whole source, without positions", "causal = false, position = null"
        )


def _check_mlp(mlp: PlainMLPConfig | GatedMLPConfig | MoEConfig, where: str) -> None:
    _check_min(1, mlp.intermediate_size, f"{where}.intermediate_size")
    if isinstance(mlp, MoEConfig):
        _check_min(1, mlp.num_experts_per_token, f"{where}.num_experts_per_token")
        _check_min(mlp.num_experts_per_token, mlp.num_experts, f"{where}.num_experts")
        _check_positive(mlp.swiglu_limit, f"{where}.clip_qkv")


def _check_source(config: ModelConfig) -> None:
    both = config.decoder is not None and config.encoder is not None
    if config.encoder_input is None:
        if both:
            raise ConfigError("source is missing", "an encoder-decoder's source has a limit and an embedding")
        return
    if not both:
        raise ConfigError("source: only an encoder-decoder has one", "leave it out")
    _check_min(1, config.encoder_input.max_seq_len, "encoder_input.max_seq_len")
    if config.encoder_input.vocab_size is not None:
        _check_min(1, config.encoder_input.vocab_size, "encoder_input.vocab_size")
    elif config.encoder_input.embedding.embedding_size != config.embedding.embedding_size:
        raise ConfigError(
            "encoder_input.embedding.embedding_size: a shared table has one width",
            "set encoder_input.vocab_size for a table of its own",
        )
    elif config.encoder_input.embedding.embedding_size is None and config.encoder_input.hidden_size not in (
        None,
        config.hidden_size,
    ):
        raise ConfigError(
            "encoder_input.hidden_size: a shared table has one width",
            "set encoder_input.vocab_size for a table of its own",
        )
    if config.encoder_input.hidden_size is not None:
        _check_min(1, config.encoder_input.hidden_size, "encoder_input.hidden_size")
        for letter, layer in () if config.encoder is None else config.encoder.layer_types.items():
            if layer.attention.head_dim is None:
                raise ConfigError(
                    f"encoder.kinds.{letter}.attention.head_dim is missing", "encoder_input.hidden_size needs it"
                )
    _check_embedding(
        encoder_hidden_size(config),
        config.encoder_input.embedding,
        config.encoder_input.max_seq_len,
        "encoder_input.embedding",
    )


def _check_head(config: ModelConfig) -> None:
    head = config.head
    if isinstance(head, LanguageHeadConfig):
        _check_positive(head.logit_softcap, "head.softcap")
    elif config.decoder is not None:
        raise ConfigError(f"head.kind: a decoder ends in a language head, found {head.kind}")
    if isinstance(head, ClassificationHeadConfig) and not head.labels:
        raise ConfigError("head.labels is empty", "name the classes")
    transform = head.transform
    if transform is not None:
        if transform.norm is not None:
            _check_eps(transform.norm, "head.transform.norm")
        if transform.output_size is not None:
            _check_min(1, transform.output_size, "head.transform.output_size")
    if (
        isinstance(head, LanguageHeadConfig)
        and config.tie_embeddings
        and head_input_size(config) != embedding_size(config)
    ):
        raise ConfigError(
            f"tie: the table is {embedding_size(config)} wide, the head reads {head_input_size(config)}",
            "set head.transform.width, or tie = false",
        )


def encoder_hidden_size(config: ModelConfig) -> int:
    """Of the encoder's layers, and of what cross-attention reads."""
    return (
        config.hidden_size
        if config.encoder_input is None or config.encoder_input.hidden_size is None
        else config.encoder_input.hidden_size
    )


def embedding_size(config: ModelConfig) -> int:
    """Columns of the table of tokens."""
    return config.hidden_size if config.embedding.embedding_size is None else config.embedding.embedding_size


def head_input_size(config: ModelConfig) -> int:
    """What the head's output matrix reads."""
    transform = config.head.transform
    return config.hidden_size if transform is None or transform.output_size is None else transform.output_size


def _check_embedding(model_width: int, embed: EmbeddingConfig, limit: int, where: str) -> None:
    if embed.norm is not None:
        _check_eps(embed.norm, f"{where}.norm")
    elif embed.norm_first:
        raise ConfigError(f"{where}.norm_first: there is no norm", "leave it out")
    _check_min(0, embed.num_token_types, f"{where}.num_token_types")
    if embed.embedding_size is not None:
        _check_min(1, embed.embedding_size, f"{where}.embedding_size")
    width = model_width if embed.embedding_size is None or embed.projection == "start" else embed.embedding_size
    _check_position(embed.position, width, limit, f"{where}.position")


def _check_position(
    position: LearnedPositionsConfig | SinusoidalPositionsConfig | None, width: int, limit: int, where: str
) -> None:
    if position is not None:
        _check_min(0, position.offset, f"{where}.offset")
    if isinstance(position, LearnedPositionsConfig) and limit + position.offset > position.num_positions:
        raise ConfigError(
            f"{where}: limit {limit} (+ offset {position.offset}) exceeds the table's {position.num_positions} rows"
        )
    if isinstance(position, SinusoidalPositionsConfig):
        _check_positive(position.base, f"{where}.base")
        if width % 2:
            raise ConfigError(f"{where}.kind sinusoidal needs an even width, found {width}")
        if position.form == "fairseq" and width < 4:
            raise ConfigError(f"{where}.form fairseq needs a width of at least 4, found {width}")


def _check_attention(config: ModelConfig, mixer: AttentionConfig, where: str) -> None:
    _check_min(1, mixer.num_heads, f"{where}.num_heads")
    kv_heads = mixer.num_heads if mixer.num_kv_heads is None else mixer.num_kv_heads
    _check_min(1, kv_heads, f"{where}.num_kv_heads")
    if mixer.num_heads % kv_heads:
        raise ConfigError(f"{where}.num_kv_heads: {kv_heads} does not divide heads {mixer.num_heads}")
    if mixer.head_dim is None and config.hidden_size % mixer.num_heads:
        raise ConfigError(
            f"{where}.num_heads: {mixer.num_heads} does not divide width {config.hidden_size}",
            f"or set {where}.head_dim",
        )
    dim = head_dim(config, mixer)
    _check_min(1, dim, f"{where}.head_dim")
    for name in ("value_dim", "window"):
        if getattr(mixer, name) is not None:
            _check_min(1, getattr(mixer, name), f"{where}.{name}")
    _check_positive(mixer.logit_softcap, f"{where}.logit_softcap")
    _check_positive(mixer.clip_qkv, f"{where}.clip_qkv")
    if mixer.qk_norm_config is not None:
        _check_eps(mixer.qk_norm_config, f"{where}.norm")
        if mixer.qk_norm == "none":
            raise ConfigError(f"{where}.norm: of q and k, which qk_norm none leaves as they are", "leave it out")
    if isinstance(mixer.position, AlibiConfig) and mixer.position.round_to_bfloat16 and not mixer.causal:
        raise ConfigError(f"{where}.position.rounded: only a causal layer rounds by the key's position")
    if isinstance(mixer.position, RopeConfig):
        _check_rope(mixer.position, dim, f"{where}.position")
    if isinstance(mixer.position, T5BiasConfig):
        _check_buckets(mixer.position, f"{where}.position")


def _check_buckets(bias: T5BiasConfig, where: str) -> None:
    ways = 2 if bias.bidirectional else 1
    _check_min(2 * ways, bias.num_buckets, f"{where}.num_buckets")
    exact = bias.num_buckets // ways // 2
    if bias.max_distance <= exact:
        raise ConfigError(f"{where}.max_distance: must exceed the {exact} exact buckets, found {bias.max_distance}")


def _check_rope(rope: RopeConfig, dim: int, where: str) -> None:
    rotated = int(dim * rope.partial_rotary_factor)
    if not 0 < rope.partial_rotary_factor <= 1 or rotated < 2 or rotated % 2:
        raise ConfigError(
            f"{where}.partial_rotary_factor: {rope.partial_rotary_factor} of head_dim {dim} is {rotated} dims, not an even number"
        )
    _check_positive(rope.theta, f"{where}.theta")
    if rope.scaling is not None:
        _check_scaling(rope.scaling, rotated, f"{where}.scaling")


def _check_scaling(scaling: RopeScalingConfig, rotated: int, where: str) -> None:
    _check_positive(scaling.factor, f"{where}.factor")
    if not isinstance(scaling, LinearScalingConfig):
        _check_min(1, scaling.original_max_seq_len, f"{where}.original_max_seq_len")
    if isinstance(scaling, DynamicScalingConfig) and rotated == 2:
        raise ConfigError(f"{where}.kind: dynamic needs more than 2 rotated dims")
    if isinstance(scaling, (YarnScalingConfig, LongRopeScalingConfig)):
        _check_positive(scaling.attention_factor, f"{where}.attention_factor")
    if isinstance(scaling, YarnScalingConfig):
        _check_positive(scaling.beta_slow, f"{where}.beta_slow")
        if scaling.beta_fast < scaling.beta_slow:
            raise ConfigError(f"{where}.beta_fast: {scaling.beta_fast} is below beta_slow {scaling.beta_slow}")
    if isinstance(scaling, Llama3ScalingConfig):
        _check_positive(scaling.low_freq_factor, f"{where}.low_freq_factor")
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise ConfigError(f"{where}.high_freq_factor: must exceed low_freq_factor {scaling.low_freq_factor}")
    if isinstance(scaling, LongRopeScalingConfig):
        for name in ("short_factor", "long_factor"):
            factors = getattr(scaling, name)
            if len(factors) != rotated // 2:
                raise ConfigError(f"{where}.{name}: {len(factors)} factors for {rotated // 2} frequencies")
            for index, factor in enumerate(factors):
                _check_positive(factor, f"{where}.{name}[{index}]")


def _check_eps(norm: NormConfig, where: str) -> None:
    if norm.eps < 0:
        raise ConfigError(f"{where}.eps: must not be negative, found {norm.eps}")


def _check_positive(value: float | None, where: str) -> None:
    if value is not None and value <= 0:
        raise ConfigError(f"{where}: must be above 0, found {value}")


def _check_min(low: int, value: int, where: str) -> None:
    if value < low:
        raise ConfigError(f"{where}: must be at least {low}, found {value}")
