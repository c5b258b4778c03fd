"""Shared parts of many families' configs: activations, rotary positions, dropout."""

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

ACTIVATIONS = {  # Hugging Face -> kvad
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
_TO_HF = {"gelu": "gelu", "gelu_tanh": "gelu_new", "quick_gelu": "quick_gelu", "relu": "relu", "relu2": "relu2"}
FAIRSEQ_LAYER = {  # kvad -> Hugging Face; a decoder's layer by fairseq's names
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.out_proj",
    "norm1": "self_attn_layer_norm",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
    "norm2": "final_layer_norm",
}


def hf_activation(activation: str) -> str:
    """Return transformers' name of an activation."""
    return _TO_HF.get(activation, activation)


def read_dropout(fields: HFConfigReader, **names: str) -> DropoutConfig:
    """Read dropout probabilities by a class's field names; absent fields are 0."""
    shares = {kvad_name: fields.number(hf_name, default=0.0) for kvad_name, hf_name in names.items()}
    for kvad_name, share in shares.items():
        if not 0 <= share < 1:
            raise CheckpointError(f"{fields.where}: {names[kvad_name]}: must be in [0, 1), got {share}")
    return DropoutConfig(**shares)


def dropout_fields(config: ModelConfig, **names: str) -> dict[str, Any]:
    """Return the inverse of :func:`read_dropout`."""
    return {hf_name: getattr(config.dropout, kvad_name) for kvad_name, hf_name in names.items()}


def read_rope(fields: HFConfigReader, *, max_seq_len: int, layer_type: str | None = None, **changes: Any) -> RopeConfig:
    """Read the rotary positions of a config in either format.

    transformers 4 has ``rope_theta`` and ``rope_scaling``, 5 has ``rope_parameters``, nested by ``layer_type`` if
    layers differ.

    Args:
        fields: The config.
        max_seq_len: Longest sequence of the model.
        layer_type: Layer type to read.
        changes: Fields of :class:`RopeConfig` that the family decides, or defaults of the class for ``theta`` and
            ``partial_rotary_factor``.

    Raises:
        CheckpointError: If a file has both formats and they disagree, so that transformers' versions would differ.
    """
    current, legacy = fields.part("rope_parameters").content, fields.part("rope_scaling").content
    if layer_type is not None and isinstance(current.get(layer_type), Mapping):
        current, legacy = current[layer_type], {}
    if any(isinstance(value, Mapping) for value in current.values()):
        raise CheckpointError(f"{fields.where}: rope_parameters by layer type are not supported")
    if current and legacy and _scaling(fields, current, max_seq_len) != _scaling(fields, legacy, max_seq_len):
        raise CheckpointError(f"{fields.where}: rope_parameters and rope_scaling disagree", "Keep one of them.")
    present = {name: value for name, value in (current or legacy).items() if value is not None}
    values = HFConfigReader({**_legacy_fields(fields), **present}, fields.where)
    theta = values.number("rope_theta", default=changes.pop("theta", 10000.0))
    fraction = values.number("partial_rotary_factor", default=changes.pop("partial_rotary_factor", 1.0))
    return RopeConfig(
        theta=theta, partial_rotary_factor=fraction, scaling=_scaling(fields, current or legacy, max_seq_len), **changes
    )


def _legacy_fields(fields: HFConfigReader) -> dict[str, Any]:
    """Return the fields that transformers 4 stores outside ``rope_scaling``."""
    names = ("rope_theta", "partial_rotary_factor")
    return {name: fields.get(name) for name in names}


def _scaling(fields: HFConfigReader, current: Mapping[str, Any], max_seq_len: int) -> RopeScalingConfig | None:
    values = HFConfigReader(current, f"{fields.where}: rope_scaling")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScalingConfig(values.number("factor"))
    original = _original_max_seq_len(fields, values, max_seq_len)
    if kind == "dynamic":
        values.require_one_of(
            "original_max_position_embeddings", max_seq_len, reason="transformers uses max_position_embeddings."
        )
        return DynamicScalingConfig(values.number("factor"), max_seq_len)
    if kind == "llama3":
        low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
        return Llama3ScalingConfig(values.number("factor"), original, low, high)
    if kind == "yarn":
        return YarnScalingConfig(
            factor=values.number("factor", default=max_seq_len / original),
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
                "factor", max_seq_len / original, reason="transformers 4 uses max_position_embeddings / original."
            )
        return scaling
    raise CheckpointError(
        f"{fields.where}: rope_type {kind!r} is not supported",
        "Supported: default, linear, dynamic, llama3, yarn, longrope.",
    )


def _original_max_seq_len(fields: HFConfigReader, values: HFConfigReader, max_seq_len: int) -> int:
    """Return the length that the model was first trained for; some files have it twice."""
    name = "original_max_position_embeddings"
    outer = fields.integer(name, default=values.integer(name, default=max_seq_len))
    inner = values.integer(name, default=outer)
    if inner != outer:
        raise CheckpointError(f"{fields.where}: {name} is {outer}, and {inner} in rope_scaling", "Keep one of them.")
    return inner


def optional(values: HFConfigReader, name: str) -> float | None:
    """Return a number, or None if the field is absent."""
    return values.number(name) if name in values else None


def rope_fields(position: RopeConfig, *, partial: bool = False) -> dict[str, Any]:
    """Return the inverse of :func:`read_rope`, in both formats."""
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
    """Return the only layer type of a stack.  Raises CheckpointError if it has several."""
    layer_types = list((config if isinstance(config, StackConfig) else config.stack).layer_types.values())
    if len(layer_types) != 1:
        raise CheckpointError(f"{model_type} has one layer type, this model has {len(layer_types)}")
    return layer_types[0]


def check_expressible(model_type: str, **wrong: bool) -> None:
    """Check that a family can express a model.

    Raises:
        CheckpointError: If a condition is true; the message is the first one's name.
    """
    for label, is_wrong in wrong.items():
        if is_wrong:
            raise CheckpointError(f"{model_type} cannot express this model: {label.replace('_', ' ')}")


def require_rope(position: object, model_type: str) -> RopeConfig:
    """Return ``position`` if it is rotary.  Raises CheckpointError if it is not."""
    if not isinstance(position, RopeConfig):
        raise CheckpointError(f"{model_type} cannot express this model: its positions are not rotary")
    return position


def shortest_pattern(pattern: str) -> str:
    """Return the shortest pattern whose repetition is this one: GLGL -> GL."""
    lengths = range(1, len(pattern) + 1)
    return next(pattern[:n] for n in lengths if (pattern[:n] * len(pattern))[: len(pattern)] == pattern)
