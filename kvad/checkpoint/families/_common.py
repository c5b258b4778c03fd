"""What many families' configs share: activations, rotary positions in both spellings, norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvad.checkpoint.conversion import HFConfigReader
from kvad.config import (
    DropoutConfig,
    DynamicScalingConfig,
    LinearScalingConfig,
    Llama3ScalingConfig,
    LongRopeScalingConfig,
    ModelConfig,
    RopeConfig,
    RopeScalingConfig,
    StackConfig,
    YarnScalingConfig,
)
from kvad.errors import CheckpointError

ACTIVATIONS = {  # theirs -> ours
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
_BACK = {"gelu": "gelu", "gelu_tanh": "gelu_new", "quick_gelu": "quick_gelu", "relu": "relu", "relu2": "relu2"}
FAIRSEQ_LAYER = {  # ours -> theirs, of a decoder's layer in fairseq's names
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.out_proj",
    "norm1": "self_attn_layer_norm",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
    "norm2": "final_layer_norm",
}


def hf_activation(ours: str) -> str:
    """The name that transformers knows it by."""
    return _BACK.get(ours, ours)


def read_dropout(fields: HFConfigReader, **names: str) -> DropoutConfig:
    """What training drops, by the names that a class has for it; a file that does not say drops nothing."""
    shares = {ours: fields.number(theirs, default=0.0) for ours, theirs in names.items()}
    for ours, share in shares.items():
        if not 0 <= share < 1:
            raise CheckpointError(f"{fields.where}: {names[ours]}: expected a share below 1, found {share}")
    return DropoutConfig(**shares)


def dropout_fields(config: ModelConfig, **names: str) -> dict[str, Any]:
    """The inverse of :func:`dropout_of`; of two of ours that are one of theirs the last is said."""
    return {theirs: getattr(config.dropout, ours) for ours, theirs in names.items()}


def read_rope(fields: HFConfigReader, *, limit: int, layer_type: str | None = None, **changes: Any) -> RopeConfig:
    """Rotary positions of a config of either spelling: ``rope_theta`` + ``rope_scaling`` (4.x), ``rope_parameters``
    (5.x; nested by ``layer_type`` where layers differ).  ``changes`` are fields of :class:`Rope` that the family
    decides, ``theta`` among them where its own default is not 10,000.  CheckpointError where a file has both spellings
    and they disagree: each version of transformers would take another."""
    given, older = fields.part("rope_parameters").content, fields.part("rope_scaling").content
    if layer_type is not None and isinstance(given.get(layer_type), Mapping):
        given, older = given[layer_type], {}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise CheckpointError(f"{fields.where}: rope_parameters by type of layer are not supported")
    if given and older and _scaling(fields, given, limit) != _scaling(fields, older, limit):
        raise CheckpointError(f"{fields.where}: rope_parameters and rope_scaling disagree", "keep one of them")
    stated = {name: value for name, value in (given or older).items() if value is not None}
    values = HFConfigReader({**_older(fields), **stated}, fields.where)
    theta = values.number("rope_theta", default=changes.pop("theta", 10000.0))
    fraction = values.number("partial_rotary_factor", default=changes.pop("fraction", 1.0))
    return RopeConfig(
        theta=theta, partial_rotary_factor=fraction, scaling=_scaling(fields, given or older, limit), **changes
    )


def _older(fields: HFConfigReader) -> dict[str, Any]:
    """What 4.x keeps beside the scaling."""
    names = ("rope_theta", "partial_rotary_factor")
    return {name: fields.get(name) for name in names}


def _scaling(fields: HFConfigReader, given: Mapping[str, Any], limit: int) -> RopeScalingConfig | None:
    values = HFConfigReader(given, f"{fields.where}: rope_scaling")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScalingConfig(values.number("factor"))
    original = _original(fields, values, limit)
    if kind == "dynamic":
        values.require_one_of(
            "original_max_position_embeddings", limit, why="transformers takes max_position_embeddings"
        )
        return DynamicScalingConfig(values.number("factor"), limit)
    if kind == "llama3":
        low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
        return Llama3ScalingConfig(values.number("factor"), original, low, high)
    if kind == "yarn":
        return YarnScalingConfig(
            factor=values.number("factor", default=limit / original),
            original_max_seq_len=original,
            beta_fast=values.number("beta_fast", default=32.0),
            beta_slow=values.number("beta_slow", default=1.0),
            truncate=values.flag("truncate", True),
            attention_factor=optional(values, "attention_factor"),
            mscale=optional(values, "mscale"),
            mscale_all_dim=optional(values, "mscale_all_dim"),
        )
    if kind in ("longrope", "su"):
        scaling = LongRopeScalingConfig(
            short_factor=tuple(map(float, values.get("short_factor", ()))),
            long_factor=tuple(map(float, values.get("long_factor", ()))),
            original_max_seq_len=original,
            factor=optional(values, "factor"),
            attention_factor=optional(values, "attention_factor"),
        )
        if scaling.attention_factor is None:
            values.require_one_of(
                "factor", limit / original, why="transformers 4 takes max_position_embeddings / original"
            )
        return scaling
    raise CheckpointError(
        f"{fields.where}: rope_type {kind!r} is not supported", "default, linear, dynamic, llama3, yarn or longrope"
    )


def _original(fields: HFConfigReader, values: HFConfigReader, limit: int) -> int:
    """The length that the model was first made for; some files say it twice."""
    name = "original_max_position_embeddings"
    outer = fields.integer(name, default=values.integer(name, default=limit))
    inner = values.integer(name, default=outer)
    if inner != outer:
        raise CheckpointError(f"{fields.where}: {name} is {outer}, and {inner} in rope_scaling", "keep one of them")
    return inner


def optional(values: HFConfigReader, name: str) -> float | None:
    return values.number(name) if name in values else None


def rope_fields(position: RopeConfig, *, partial: bool = False) -> dict[str, Any]:
    """The inverse of :func:`rope`, in both spellings, which both oracles read."""
    scaling = position.scaling
    values: dict[str, Any] = {}
    if isinstance(scaling, LinearScalingConfig):
        values = {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, DynamicScalingConfig):
        values = {"rope_type": "dynamic", "factor": scaling.factor}
    elif isinstance(scaling, Llama3ScalingConfig):
        values = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    elif isinstance(scaling, YarnScalingConfig):
        values = {"rope_type": "yarn", "factor": scaling.factor, "beta_fast": scaling.beta_fast}
        values |= {"beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        optional = {
            "attention_factor": scaling.attention_factor,
            "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim,
        }
        values |= {name: value for name, value in optional.items() if value is not None}
    elif isinstance(scaling, LongRopeScalingConfig):
        values = {
            "rope_type": "longrope",
            "short_factor": list(scaling.short_factor),
            "long_factor": list(scaling.long_factor),
        }
        optional = {"factor": scaling.factor, "attention_factor": scaling.attention_factor}
        values |= {name: value for name, value in optional.items() if value is not None}
    if isinstance(scaling, Llama3ScalingConfig | YarnScalingConfig | LongRopeScalingConfig):
        values["original_max_position_embeddings"] = scaling.original_max_seq_len
    out: dict[str, Any] = {
        "rope_theta": position.theta,
        "rope_scaling": values or None,
        "rope_parameters": {"rope_type": "default", "rope_theta": position.theta, **values},
    }
    if partial:
        out["partial_rotary_factor"] = position.partial_rotary_factor
        out["rope_parameters"]["partial_rotary_factor"] = position.partial_rotary_factor
    return out


def single_layer_type(config: ModelConfig | StackConfig, model_type: str) -> Any:
    """The one kind of layer of a stack; CheckpointError where it has several and their class has not."""
    kinds = list((config if isinstance(config, StackConfig) else config.stack).layer_types.values())
    if len(kinds) != 1:
        raise CheckpointError(f"{model_type} has one kind of layer, this model has {len(kinds)}")
    return kinds[0]


def check_expressible(model_type: str, **wrong: bool) -> None:
    """CheckpointError naming the first thing that is true: their class has no place for it."""
    for what, found in wrong.items():
        if found:
            raise CheckpointError(f"{model_type} cannot express this model: {what.replace('_', ' ')}")


def require_rope(position: object, model_type: str) -> RopeConfig:
    """The same, if it is rotary; CheckpointError where their class knows no other positions."""
    if not isinstance(position, RopeConfig):
        raise CheckpointError(f"{model_type} cannot express this model: its positions are not rotary")
    return position


def shortest_pattern(pattern: str) -> str:
    """The shortest pattern that, repeated, is this one: GLGL -> GL."""
    lengths = range(1, len(pattern) + 1)
    return next(pattern[:n] for n in lengths if (pattern[:n] * len(pattern))[: len(pattern)] == pattern)
