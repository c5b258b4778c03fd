"""Shared parts of many families' configs: activations, rotary positions, dropout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvad import config as cfg
from kvad.checkpoint.conversion import HFConfigReader
from kvad.config import ModelConfig
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


def hf_activation(activation: str) -> str:
    """Return transformers' name of an activation."""
    return _TO_HF.get(activation, activation)


def read_dropout(fields: HFConfigReader, **names: str) -> cfg.DropoutConfig:
    """Read dropout probabilities by a class's field names; absent fields are 0."""
    shares = {kvad_name: fields.number(hf_name, default=0.0) for kvad_name, hf_name in names.items()}
    for kvad_name, share in shares.items():
        if not 0 <= share < 1:
            raise CheckpointError(f"{fields.where}: {names[kvad_name]}: must be in [0, 1), got {share}")
    return cfg.DropoutConfig(**shares)


def dropout_fields(config: ModelConfig, **names: str) -> dict[str, Any]:
    """Return the inverse of ``read_dropout``."""
    return {hf_name: getattr(config.dropout, kvad_name) for kvad_name, hf_name in names.items()}


def read_rope(
    fields: HFConfigReader, *, max_seq_len: int, layer_type: str | None = None, **changes: Any
) -> cfg.RopeConfig:
    """Read the rotary positions of a config in either format.

    transformers 4 has ``rope_theta`` and ``rope_scaling``, 5 has ``rope_parameters``, nested by ``layer_type`` if
    layers differ.  A file in which both formats disagree is refused.  ``changes`` are fields of ``RopeConfig``
    that the family decides, or defaults of the class for ``theta`` and ``partial_rotary_factor``.
    """
    current, legacy = fields.part("rope_parameters").content, fields.part("rope_scaling").content
    if layer_type is not None and isinstance(current.get(layer_type), Mapping):
        current, legacy = current[layer_type], {}
    if any(isinstance(value, Mapping) for value in current.values()):
        raise CheckpointError(f"{fields.where}: rope_parameters by layer type are not supported")
    if current and legacy and _scaling(fields, current, max_seq_len) != _scaling(fields, legacy, max_seq_len):
        raise CheckpointError(f"{fields.where}: rope_parameters and rope_scaling disagree", "Keep one of them.")
    present = {name: value for name, value in (current or legacy).items() if value is not None}
    outer = {name: fields.get(name) for name in ("rope_theta", "partial_rotary_factor")}  # of transformers 4
    values = HFConfigReader({**outer, **present}, fields.where)
    theta = values.number("rope_theta", default=changes.pop("theta", 10000.0))
    fraction = values.number("partial_rotary_factor", default=changes.pop("partial_rotary_factor", 1.0))
    return cfg.RopeConfig(
        theta=theta, partial_rotary_factor=fraction, scaling=_scaling(fields, current or legacy, max_seq_len), **changes
    )


def _scaling(fields: HFConfigReader, current: Mapping[str, Any], max_seq_len: int) -> cfg.RopeScalingConfig | None:
    values = HFConfigReader(current, f"{fields.where}: rope_scaling")
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return cfg.LinearScalingConfig(values.number("factor"))
    original = _original_max_seq_len(fields, values, max_seq_len)
    if kind == "dynamic":
        values.require_one_of(
            "original_max_position_embeddings", max_seq_len, reason="transformers uses max_position_embeddings."
        )
        return cfg.DynamicScalingConfig(values.number("factor"), max_seq_len)
    if kind == "llama3":
        low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
        return cfg.Llama3ScalingConfig(values.number("factor"), original, low, high)
    if kind == "yarn":
        return cfg.YarnScalingConfig(
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
        scaling = cfg.LongRopeScalingConfig(
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


def rope_fields(position: cfg.RopeConfig, *, partial: bool = False) -> dict[str, Any]:
    """Return the inverse of ``read_rope``, in both formats."""
    scaling = position.scaling
    values: dict[str, Any] = {}
    if scaling is not None:
        options = {name: value for name, value in vars(scaling).items() if value is not None and name != "kind"}
        original = options.pop("original_max_seq_len", None)
        values = {"rope_type": scaling.kind} | {
            name: list(value) if isinstance(value, tuple) else value for name, value in options.items()
        }
        if original is not None and not isinstance(scaling, cfg.DynamicScalingConfig):
            values["original_max_position_embeddings"] = original
    out: dict[str, Any] = {
        "rope_theta": position.theta,
        "rope_scaling": values or None,
        "rope_parameters": {"rope_type": "default", "rope_theta": position.theta, **values},
    }
    if partial:
        out["partial_rotary_factor"] = position.partial_rotary_factor
        out["rope_parameters"]["partial_rotary_factor"] = position.partial_rotary_factor
    return out


def single_layer_type(config: ModelConfig | cfg.StackConfig, model_type: str) -> Any:
    """Return the only layer type of a stack.  Raises CheckpointError if it has several."""
    layer_types = list((config if isinstance(config, cfg.StackConfig) else config.stack).layer_types.values())
    if len(layer_types) != 1:
        raise CheckpointError(f"{model_type} has one layer type, this model has {len(layer_types)}")
    return layer_types[0]


def shortest_pattern(pattern: str) -> str:
    """Return the shortest pattern whose repetition is this one: GLGL -> GL."""
    lengths = range(1, len(pattern) + 1)
    return next((pattern[:n] for n in lengths if (pattern[:n] * len(pattern))[: len(pattern)] == pattern), pattern)
