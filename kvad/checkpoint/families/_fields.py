"""Fields of ``config.json`` that a family's table reads into kvad's config and writes from it.

A table maps kvad's dotted names to fields, or to constants of the class::

    {"norm.kind": "rms", "norm.eps": number("rms_norm_eps", 1e-6), "attention.qkv_bias": flag("attention_bias")}

The first part of a name is a part of the config: ``attention``, ``mlp`` and ``norm`` of the first layer, ``stack``,
``embedding``, ``head``, ``dropout``.  Names without a dot are fields of ``ModelConfig``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kvad import config as cfg
from kvad.checkpoint.conversion import HFConfigReader
from kvad.config import ModelConfig, head_dim, query_dim
from kvad.errors import CheckpointError, ConfigError, suggest

SCALING_NAMES = (
    *("rope_type", "type", "factor", "original_max_position_embeddings", "max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale"),
    *("mscale_all_dim", "short_factor", "long_factor"),
)
ACTIVATIONS = {  # Hugging Face -> kvad
    **{name: name for name in ("gelu", "quick_gelu", "relu", "relu2", "silu", "tanh")},
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
    "gelu_python": "gelu",
    "swish": "silu",
}


class HFField(NamedTuple):
    """One of kvad's values: how it is read from ``config.json`` and written to it."""

    read: Callable[[HFConfigReader], Any]
    # Value and model -> fields.  Empty if other fields determine the value.
    write: Callable[[Any, ModelConfig], Mapping[str, Any]] = lambda value, config: {}


FieldTable = Mapping[str, Any]  # kvad's dotted name -> HFField, or a constant
FieldValues = defaultdict[str, dict[str, Any]]  # part of the config -> values by name


def integer(
    *names: str, default: int | Callable[[HFConfigReader], int] | None = None, write_as: str | None = None
) -> HFField:
    """Build an integer field; ``names`` are its names in the order in which they are looked up."""
    return HFField(
        lambda fields: fields.integer(*names, default=default(fields) if callable(default) else default),
        lambda value, config: {write_as or names[0]: value},
    )


def number(name: str, default: float | None = None) -> HFField:
    return HFField(lambda fields: fields.number(name, default=default), lambda value, config: {name: value})


def flag(name: str, default: bool = False, values: tuple[Any, Any] = (False, True)) -> HFField:
    """Build a boolean field that stands for ``values``."""
    return HFField(lambda fields: values[fields.flag(name, default)], lambda value, config: {name: value == values[1]})


def sizes(
    hidden_size: str = "hidden_size",
    num_layers: str = "num_hidden_layers",
    num_heads: str = "num_attention_heads",
    intermediate_size: str = "intermediate_size",
) -> FieldTable:
    """Build the sizes of a class by their fields' names."""
    return {
        "hidden_size": integer(hidden_size),
        "vocab_size": integer("vocab_size"),
        "stack.num_layers": integer(num_layers),
        "attention.num_heads": integer(num_heads),
        "mlp.intermediate_size": integer(intermediate_size),
    }


def biases(name: str, default: bool = False) -> FieldTable:
    """Build the flag for biases in attention."""
    return dict.fromkeys(("attention.qkv_bias", "attention.out_bias"), flag(name, default))


ALL_BIASES: FieldTable = dict.fromkeys(("attention.qkv_bias", "attention.out_bias", "mlp.bias"), True)


def layer_norm(name: str, default: float = 1e-5) -> FieldTable:
    """Build a LayerNorm with bias; ``name`` is the field of its epsilon."""
    return {"norm.kind": "layer", "norm.eps": number(name, default), "norm.bias": True}


def embedding_norm(name: str, default: float = 1e-5) -> HFField:
    """Build the norm after the embedding, with the epsilon of the other norms."""
    return HFField(lambda fields: cfg.NormConfig("layer", fields.number(name, default=default), bias=True))


def optional_integer(name: str) -> HFField:
    return HFField(lambda fields: fields.optional_integer(name), lambda value, config: {name: value})


def optional_number(name: str) -> HFField:
    return HFField(lambda fields: fields.optional_number(name), lambda value, config: {name: value})


def hf_activation(activation: str) -> str:
    """Return transformers' name of an activation."""
    return "gelu_new" if activation == "gelu_tanh" else activation


def activation(name: str, default: str) -> HFField:
    return HFField(
        lambda fields: fields.choice(name, ACTIVATIONS, default), lambda value, config: {name: hf_activation(value)}
    )


def dropouts(**names: str) -> FieldTable:
    """Build dropout probabilities by a class's field names; absent fields are 0."""

    def dropout(name: str) -> HFField:
        def read(fields: HFConfigReader) -> float:
            rate = fields.number(name, default=0.0)
            if not 0 <= rate < 1:
                raise fields.error(f"{name}: must be in [0, 1), got {rate}")
            return rate

        return HFField(read, lambda value, config: {name: value})

    return {f"dropout.{kvad_name}": dropout(hf_name) for kvad_name, hf_name in names.items()}


def learned_positions(name: str, default: int | None = None, *, offset: int = 0) -> HFField:
    """Build learned positions with ``offset`` unused rows before the first position."""
    return HFField(lambda fields: cfg.LearnedPositionsConfig(fields.integer(name, default=default) + offset, offset))


def table_size(name: str = "embedding_size", default: int | None = None) -> HFField:
    """Build the size of an embedding that may be narrower than the model (None: it has the model's size)."""

    def read(fields: HFConfigReader) -> int | None:
        hidden_size = fields.integer("hidden_size")
        size = fields.integer(name, default=hidden_size if default is None else default)
        return None if size == hidden_size else size

    return HFField(read, lambda _, config: {name: cfg.embedding_size(config)})


def embedding_scale(size_name: str, default: bool = True) -> HFField:
    """Build the flag that multiplies embeddings by the root of the model's size, the field ``size_name``."""
    return HFField(
        lambda fields: math.sqrt(fields.integer(size_name)) if fields.flag("scale_embedding", default) else 1.0,
        lambda scale, config: {"scale_embedding": scale != 1.0},
    )


def softmax_scale(read: Callable[[HFConfigReader], Any], write: Callable[[float], Mapping[str, Any]]) -> HFField:
    """Build the scale of attention logits; ``write`` takes it as a number."""
    return HFField(
        read, lambda value, config: write({"default": first_head_dim(config) ** -0.5, "none": 1.0}.get(value, value))
    )


def _inverse(scale: float) -> float:
    """Return a number whose reciprocal is exactly ``scale``, if there is one."""
    near = 1 / scale
    return next((x for x in (near, math.nextafter(near, 0), math.nextafter(near, math.inf)) if 1 / x == scale), near)


GRANITE_SCALES: FieldTable = {
    "attention.softmax_scale": softmax_scale(
        lambda fields: fields.number("attention_multiplier", default=1.0), lambda scale: {"attention_multiplier": scale}
    ),
    "embedding.scale": number("embedding_multiplier", 1.0),
    "stack.residual_scale": number("residual_multiplier", 1.0),
    "head.logit_scale": HFField(
        lambda fields: 1 / fields.number("logits_scaling", default=1.0),
        lambda scale, config: {"logits_scaling": _inverse(scale)},
    ),
}


def first_head_dim(config: ModelConfig) -> int:
    """Return the head dim of the first layer with attention."""
    return head_dim(config, first_attention_layer(config.stack).attention)


def first_attention_layer(stack: cfg.StackConfig) -> cfg.LayerConfig:
    """Return the first layer with attention.  Raises CheckpointError if there is none."""
    layer = next((layer for layer in stack.layer_configs if isinstance(layer.attention, cfg.AttentionConfig)), None)
    if layer is None:
        raise CheckpointError("no layer of this model has attention")
    return layer


# ---------------------------------------------------------------- rotary positions


def rope(
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    interleaved: bool = False,
    scaling_fields: tuple[str, ...] = (),
    absent: cfg.RopeConfig | None = None,
) -> HFField:
    """Build rotary positions.

    Args:
        theta: Default of the class.
        partial: Default fraction of a head's dims that is rotated.  None: the class has no such field, and a fraction
            is refused.
        interleaved: Pairs are neighboring dims.
        scaling_fields: Fields of ``rope_scaling`` that a class accepts, if it refuses all others but ``type``.
        absent: Positions to write for a model that has none.
    """

    def read(fields: HFConfigReader) -> cfg.RopeConfig:
        options: dict[str, Any] = {"theta": theta, "interleaved": interleaved}
        if partial is None:
            return read_full_rope(fields, **options)
        max_seq_len = fields.integer("max_position_embeddings")
        return read_rope(fields, max_seq_len=max_seq_len, partial_rotary_factor=partial, **options)

    def write(position: object, config: ModelConfig) -> dict[str, Any]:
        layers = config.stack.layer_configs
        others = (layer.attention.position for layer in layers if layer.attention.position is not None)
        content = rope_fields(position or next(others, absent), partial=partial is not None)
        scaling = content["rope_scaling"]
        if scaling is not None and scaling_fields:
            accepted = {name: scaling[name] for name in scaling_fields if name in scaling}
            content["rope_scaling"] = {"type": scaling["rope_type"], **accepted}
        return content

    return HFField(read, write)


def read_full_rope(fields: HFConfigReader, **changes: Any) -> cfg.RopeConfig:
    """Read rotary positions over the full head.  Raises CheckpointError for part of a head."""
    position = read_rope(fields, max_seq_len=fields.integer("max_position_embeddings"), **changes)
    if position.partial_rotary_factor != 1:
        raise fields.error(f"partial_rotary_factor {position.partial_rotary_factor} is not supported")
    return position


def require_longrope(fields: HFConfigReader, position: cfg.RopeConfig) -> cfg.RopeConfig:
    """Return ``position`` if its scaling, if any, is LongRoPE.  Raises CheckpointError if it is not."""
    if not isinstance(position.scaling, cfg.LongRopeScalingConfig | None):
        raise fields.error(f"rope_type {position.scaling.kind!r} is not supported", "Supported: longrope.")
    return position


def require_scaling(fields: HFConfigReader, hint: str) -> None:
    """Raise CheckpointError unless the file states its scaling; ``hint`` says what its absence means."""
    if "rope_scaling" not in fields and "rope_parameters" not in fields:
        raise fields.error("rope_scaling is missing", hint)


def require_rope(position: object) -> cfg.RopeConfig:
    """Return ``position`` if it is rotary.  Raises CheckpointError if it is not."""
    if not isinstance(position, cfg.RopeConfig):
        raise CheckpointError("its positions are not rotary")
    return position


def read_rope(
    fields: HFConfigReader, *, max_seq_len: int, layer_type: str | None = None, **changes: Any
) -> cfg.RopeConfig:
    """Read the rotary positions of a config in either format.

    transformers 4 has ``rope_theta`` and ``rope_scaling``, 5 has ``rope_parameters``, nested by ``layer_type`` if
    layers differ.  A file in which both formats disagree is refused.  ``changes`` are fields of ``RopeConfig``
    that the family decides, or defaults of the class for ``theta`` and ``partial_rotary_factor``.
    """
    current, legacy = fields.part("rope_parameters"), fields.part("rope_scaling")
    if layer_type is not None and isinstance(current.get(layer_type), Mapping):
        current, legacy = current.part(layer_type), current.derive({})
    if any(isinstance(value, Mapping) for value in current.content.values()):
        raise fields.error("rope_parameters by layer type are not supported")
    scaling = _scaling(fields, current if current.content else legacy, max_seq_len)
    if current.content and legacy.content and scaling != _scaling(fields, legacy, max_seq_len):
        raise fields.error("rope_parameters and rope_scaling disagree", "Keep one of them.")
    names = ("rope_theta", "partial_rotary_factor")  # outside in transformers 4
    inner = current if current.content else legacy
    values = HFConfigReader({name: inner.get(name, fields.get(name)) for name in names}, fields.where)
    theta = values.number("rope_theta", default=changes.pop("theta", 10000.0))
    fraction = values.number("partial_rotary_factor", default=changes.pop("partial_rotary_factor", 1.0))
    return cfg.RopeConfig(theta=theta, partial_rotary_factor=fraction, scaling=scaling, **changes)


def _scaling(fields: HFConfigReader, part: HFConfigReader, max_seq_len: int) -> cfg.RopeScalingConfig | None:
    values = part.derive(part.content)
    values.where = f"{fields.where}: rope_scaling"
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return cfg.LinearScalingConfig(values.number("factor"))
    original = _original_max_seq_len(fields, values, max_seq_len)
    if kind == "dynamic":
        reason = "transformers uses max_position_embeddings."
        values.require_one_of("original_max_position_embeddings", max_seq_len, reason=reason)
        return cfg.DynamicScalingConfig(values.number("factor"), max_seq_len)
    if kind == "llama3":
        low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
        return cfg.Llama3ScalingConfig(values.number("factor"), original, low, high)
    if kind == "yarn":
        names = ("attention_factor", "mscale", "mscale_all_dim")
        attention: Any = {name: values.optional_number(name) for name in names}
        return cfg.YarnScalingConfig(
            factor=values.number("factor", default=max_seq_len / original),
            original_max_seq_len=original,
            beta_fast=values.number("beta_fast", default=32.0),
            beta_slow=values.number("beta_slow", default=1.0),
            truncate=values.flag("truncate", True),
            **attention,
        )
    if kind in ("longrope", "su"):
        scaling = cfg.LongRopeScalingConfig(
            short_factor=tuple(map(float, values.get("short_factor", ()))),
            long_factor=tuple(map(float, values.get("long_factor", ()))),
            original_max_seq_len=original,
            factor=values.optional_number("factor"),
            attention_factor=values.optional_number("attention_factor"),
        )
        if scaling.attention_factor is None:
            reason = "transformers 4 uses max_position_embeddings / original."
            values.require_one_of("factor", max_seq_len / original, reason=reason)
        return scaling
    hint = "Supported: default, linear, dynamic, llama3, yarn, longrope."
    raise fields.error(f"rope_type {kind!r} is not supported", hint)


def scale_rope(config: ModelConfig, values: Mapping[str, Any]) -> ModelConfig:
    """Return the config with another RoPE scaling and its limit (``families.scale_rope``)."""
    unknown = next((name for name in values if name not in SCALING_NAMES), None)
    if unknown is not None:
        raise ConfigError(f"rope_scaling: unknown key {unknown!r}", suggest(unknown, SCALING_NAMES))
    content = {name: value for name, value in values.items() if name != "max_position_embeddings"}
    limit, factor = config.max_seq_len, content.get("factor")
    kind = content.get("rope_type", content.get("type", "default"))
    original = content.get("original_max_position_embeddings", limit)
    if isinstance(factor, int | float) and isinstance(original, int) and kind != "default":
        limit = max(limit, int(factor * original))
    limit = values.get("max_position_embeddings", limit)
    # Dynamic scaling starts at the stored limit; for the others the limit is that of the extended model.
    trained = config.max_seq_len if kind == "dynamic" else limit
    reader = HFConfigReader({"original_max_position_embeddings": original}, "given")
    scaling = _scaling(reader, HFConfigReader(content, "given"), trained)
    if config.decoder is None or not any(_is_scaled(layer, config.decoder) for layer in _layers(config.decoder)):
        raise ConfigError("rope_scaling: this model has no rotary positions to scale")
    layers = {
        letter: replace(layer, attention=replace(attention, position=replace(position, scaling=scaling)))
        if _is_scaled(layer, config.decoder)
        and isinstance(attention := layer.attention, cfg.AttentionConfig)
        and isinstance(position := attention.position, cfg.RopeConfig)
        else layer
        for letter, layer in config.decoder.layer_types.items()
    }
    return replace(config, max_seq_len=limit, decoder=replace(config.decoder, layer_types=layers))


def _layers(stack: cfg.StackConfig) -> list[cfg.LayerConfig]:
    return list(stack.layer_types.values())


def _is_scaled(layer: cfg.LayerConfig, stack: cfg.StackConfig) -> bool:
    """Return True for a layer with RoPE, unless it has a window and others have none."""
    has_unwindowed = any(other.attention.window is None for other in _layers(stack))
    return isinstance(layer.attention.position, cfg.RopeConfig) and not (layer.attention.window and has_unwindowed)


def _original_max_seq_len(fields: HFConfigReader, values: HFConfigReader, max_seq_len: int) -> int:
    """Return the length that the model was first trained for; some files have it twice."""
    name = "original_max_position_embeddings"
    outer = fields.integer(name, default=values.integer(name, default=max_seq_len))
    inner = values.integer(name, default=outer)
    if inner != outer:
        raise fields.error(f"{name} is {outer}, and {inner} in rope_scaling", "Keep one of them.")
    return inner


def rope_fields(position: object, *, partial: bool = False) -> dict[str, Any]:
    """Return the inverse of ``read_rope``, in both formats.  Raises CheckpointError for other positions."""
    position = require_rope(position)
    scaling = position.scaling
    values: dict[str, Any] = {}
    if scaling is not None:
        options = {name: value for name, value in vars(scaling).items() if value is not None and name != "kind"}
        original = options.pop("original_max_seq_len", None)
        lists = {name: list(value) for name, value in options.items() if isinstance(value, tuple)}
        values = {"rope_type": scaling.kind, **options, **lists}
        if original is not None and not isinstance(scaling, cfg.DynamicScalingConfig):
            values["original_max_position_embeddings"] = original
    fraction = {"partial_rotary_factor": position.partial_rotary_factor} if partial else {}
    return {
        "rope_theta": position.theta,
        "rope_scaling": values or None,
        "rope_parameters": {"rope_type": "default", "rope_theta": position.theta, **values, **fraction},
        **fraction,
    }


# ---------------------------------------------------------------- tables


def read_table(table: FieldTable, fields: HFConfigReader) -> FieldValues:
    """Return kvad's values by part and name."""
    values: FieldValues = defaultdict(dict)
    for dotted_name, entry in table.items():
        part, _, name = dotted_name.rpartition(".")
        values[part][name] = entry.read(fields) if isinstance(entry, HFField) else entry
    return values


def write_table(table: FieldTable, config: ModelConfig, stack: cfg.StackConfig | None = None) -> dict[str, Any]:
    """Return the fields of a model and of one of its stacks (default: ``config.stack``).

    A value that the model lacks is left out, which reading back detects.  The number of key-value heads is stated, and
    a scale of attention logits that has a name is named.
    """
    stack = config.stack if stack is None else stack
    layer = first_attention_layer(stack)
    assert isinstance(layer.attention, cfg.AttentionConfig)
    scale_names: dict[Any, Any] = {1.0: "none", query_dim(config, layer.attention) ** -0.5: "default"}
    attention = replace(
        layer.attention,
        num_kv_heads=layer.attention.num_kv_heads or layer.attention.num_heads,
        softmax_scale=scale_names.get(layer.attention.softmax_scale, layer.attention.softmax_scale),
    )
    parts: dict[str, Any] = {"attention": attention, "mlp": layer.mlp, "norm": layer.norm}
    parts |= {"stack": stack, "embedding": config.embedding, "head": config.head, "dropout": config.dropout}
    values = {f"{part}.{name}": value for part, fields in parts.items() for name, value in vars(fields).items()}
    return write_fields(table, {**values, **vars(config)}, config)


def write_fields(table: FieldTable, values: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Return the fields of ``values``, which are kvad's by name; those that are missing are left out."""
    content: dict[str, Any] = {}
    for name, entry in table.items():
        if isinstance(entry, HFField) and name in values:
            content |= entry.write(values[name], config)
    return content


def require_single_layer_type(stack: cfg.StackConfig, model_type: str) -> None:
    """Raise CheckpointError if the layers of a stack differ."""
    if len(stack.layer_types) != 1:
        raise CheckpointError(f"{model_type} has one layer type, this model has {len(stack.layer_types)}")
