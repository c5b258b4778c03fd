"""Fields of ``config.json`` that a family's table reads into kvad's config and writes from it.

A table maps kvad's dotted names to fields, or to constants of the class::

    {"norm.kind": "rms", "norm.eps": number("rms_norm_eps", 1e-6), "attention.qkv_bias": flag("attention_bias")}

The first part of a name is a part of the config: ``attention``, ``mlp`` and ``norm`` of the first layer, ``stack``,
``embedding``, ``head``, ``dropout``.  Names without a dot are fields of ``ModelConfig``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kvad import config as cfg
from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families._common import ACTIVATIONS, hf_activation, read_dropout, read_rope, rope_fields
from kvad.config import ModelConfig, head_dim
from kvad.errors import CheckpointError


class HFField(NamedTuple):
    """One of kvad's values: how it is read from ``config.json`` and written to it."""

    read: Callable[[HFConfigReader], Any]
    # Value and model -> fields.  Empty if other fields determine the value.
    write: Callable[[Any, ModelConfig], Mapping[str, Any]] = lambda value, config: {}


FieldTable = Mapping[str, Any]  # kvad's dotted name -> HFField, or a constant


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


def biases(name: str, default: bool = False) -> FieldTable:
    """Build the flag for biases in attention."""
    return dict.fromkeys(("attention.qkv_bias", "attention.out_bias"), flag(name, default))


def layer_norm(name: str) -> FieldTable:
    """Build a LayerNorm with bias; ``name`` is the field of its epsilon."""
    return {"norm.kind": "layer", "norm.eps": number(name, 1e-5), "norm.bias": True}


def optional_integer(name: str, *, write_none: bool = True) -> HFField:
    return HFField(
        lambda fields: fields.integer(name) if name in fields else None,
        lambda value, config: {name: value} if value is not None or write_none else {},
    )


def optional_number(name: str) -> HFField:
    return HFField(lambda fields: fields.number(name) if name in fields else None, lambda value, config: {name: value})


def activation(name: str, default: str) -> HFField:
    return HFField(
        lambda fields: fields.choice(name, ACTIVATIONS, default), lambda value, config: {name: hf_activation(value)}
    )


def dropout(name: str) -> HFField:
    return HFField(lambda fields: read_dropout(fields, embedding=name).embedding, lambda value, config: {name: value})


def learned_positions(name: str, default: int | None = None, *, offset: int = 0) -> HFField:
    """Build learned positions with ``offset`` unused rows before the first position."""
    return HFField(lambda fields: cfg.LearnedPositionsConfig(fields.integer(name, default=default) + offset, offset))


def softmax_scale(read: Callable[[HFConfigReader], Any], write: Callable[[float], Mapping[str, Any]]) -> HFField:
    """Build the scale of attention logits; ``write`` takes it as a number."""

    def write_scale(value: Any, config: ModelConfig) -> Mapping[str, Any]:
        default = head_dim(config, config.stack.layer_config(0).attention) ** -0.5
        return write({"default": default, "none": 1.0}.get(value, value))

    return HFField(read, write_scale)


def rope(
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    interleaved: bool = False,
    scaling_fields: tuple[str, ...] = (),
) -> HFField:
    """Build rotary positions.

    Args:
        theta: Default of the class.
        partial: Default fraction of a head's dims that is rotated.  None: the class has no such field, and a fraction
            is refused.
        interleaved: Pairs are neighboring dims.
        scaling_fields: Fields of ``rope_scaling`` that a class accepts, if it refuses all others but ``type``.
    """

    def read(fields: HFConfigReader) -> cfg.RopeConfig:
        if partial is None:
            return read_full_rope(fields, theta=theta, interleaved=interleaved)
        max_seq_len = fields.integer("max_position_embeddings")
        return read_rope(
            fields, max_seq_len=max_seq_len, theta=theta, partial_rotary_factor=partial, interleaved=interleaved
        )

    def write(position: object, config: ModelConfig) -> dict[str, Any]:
        content = rope_fields(require_rope(position), partial=partial is not None)
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
        raise CheckpointError(
            f"{fields.where}: partial_rotary_factor {position.partial_rotary_factor} is not supported"
        )
    return position


def require_rope(position: object) -> cfg.RopeConfig:
    """Return ``position`` if it is rotary.  Raises CheckpointError if it is not."""
    if not isinstance(position, cfg.RopeConfig):
        raise CheckpointError("its positions are not rotary")
    return position


# ---------------------------------------------------------------- tables


def read_table(table: FieldTable, fields: HFConfigReader) -> defaultdict[str, dict[str, Any]]:
    """Return kvad's values by part and name."""
    values: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for dotted_name, entry in table.items():
        part, _, name = dotted_name.rpartition(".")
        values[part][name] = entry.read(fields) if isinstance(entry, HFField) else entry
    return values


def write_table(table: FieldTable, config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a model.

    A value that the model lacks is left out, which reading back detects.
    """
    layer = config.stack.layer_config(0)
    parts: dict[str, Any] = {"attention": _explicit(config, layer.attention), "mlp": layer.mlp, "norm": layer.norm}
    parts |= {"stack": config.stack, "embedding": config.embedding, "head": config.head, "dropout": config.dropout}
    values = {f"{part}.{name}": value for part, fields in parts.items() for name, value in vars(fields).items()}
    values |= vars(config)
    content: dict[str, Any] = {}
    for name, entry in table.items():
        if isinstance(entry, HFField) and name in values:
            content |= entry.write(values[name], config)
    return content


def _explicit(config: ModelConfig, attention: cfg.AttentionConfig) -> cfg.AttentionConfig:
    """Return attention whose number of key-value heads is stated, and whose scale is named if it has a name."""
    scale_names: dict[Any, Any] = {1.0: "none", head_dim(config, attention) ** -0.5: "default"}
    return replace(
        attention,
        num_kv_heads=attention.num_kv_heads or attention.num_heads,
        softmax_scale=scale_names.get(attention.softmax_scale, attention.softmax_scale),
    )
