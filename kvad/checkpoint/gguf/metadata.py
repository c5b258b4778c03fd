"""Keys of a GGUF file and of the ``config.json`` that it corresponds to.

A config is converted key by key. What a GGUF file cannot express is refused: a written config is read back and compared
(``writer``), and a key of the architecture that is not in its table is an error, not a default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvad.errors import CheckpointError

# Keys without a field of config.json, which ``_check_derived`` and ``_rope_scaling`` read.
_DERIVED = ("attention.value_length", "rope.dimension_count", "vocab_size", "attention.causal", "rope.scaling.type")
_SCALING = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_UNUSED = ("rope.scaling.finetuned",)
_EXPERTS = ("expert_count", "expert_used_count")
_LLAMA3_DIVISORS = "rope_freqs.weight"
_LONGROPE_DIVISORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
DIVISORS = (_LLAMA3_DIVISORS, *_LONGROPE_DIVISORS.values())  # tensors that are part of the config


class FileContents(NamedTuple):
    """Metadata of a GGUF file, and the names of its tensors."""

    values: Mapping[str, Any]  # ``Architecture.complete`` gets those of the architecture, without its prefix
    tensor_names: frozenset[str]
    factors: Callable[[str], list[float]]  # values of a small tensor


class Packing(NamedTuple):
    """A tensor of Hugging Face that is stored as one or more others in a GGUF file."""

    names: tuple[str, ...]  # of a layer's tensors in the GGUF file
    read: Callable[[list[Tensor]], Tensor]
    write: Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp, as a Hugging Face class."""

    name: str  # general.architecture
    model_type: str
    hf_class: str
    keys: Mapping[str, str]  # key without the architecture -> key of config.json
    constants: Mapping[str, Any] = field(default_factory=dict)  # of config.json; llama.cpp has them in its code
    complete: Callable[[dict[str, Any], FileContents], None] = field(default=lambda content, contents: None)
    # Completes the keys of a config.json, or raises CheckpointError.
    finish: Callable[[dict[str, Any], Mapping[str, Any]], None] = field(default=lambda values, content: None)
    derived: tuple[str, ...] = ()  # further keys that ``complete`` reads
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys that always have this value
    # Chooses among architectures of the same name by a file's keys.
    is_chosen: Callable[[Mapping[str, Any]], bool] = field(default=lambda values: True)
    is_partial: bool = False  # rope.dimension_count may be less than the head's width
    has_longrope: bool = False  # llama.cpp reads two lists of divisors of the frequencies
    interleaves_rotary: bool = False  # rows of q and k are stored for rotary pairs (2i, 2i + 1)
    norm_offset: float = 0.0  # stored weights of norms are larger by this
    transposed: tuple[str, ...] = ()  # tensors that Hugging Face stores as [in, out]
    row_vectors: tuple[str, ...] = ()  # tensors [n] that Hugging Face stores as [1, n]
    # A config.json -> packings by the name in a layer of Hugging Face.
    packings: Callable[[Mapping[str, Any]], Mapping[str, Packing]] = field(default=lambda content: {})
    not_written: tuple[str, ...] = ()  # keys that are read, and that llama.cpp ignores: a model with one is refused

    @property
    def has_experts(self) -> bool:
        return "expert_count" in self.keys

    @property
    def is_latent(self) -> bool:
        return "attention.kv_lora_rank" in self.keys

    def head_width(self, content: Mapping[str, Any]) -> int:
        """Return the width of a head of a ``config.json``."""
        size, heads = (content[self.keys[key]] for key in ("embedding_length", "attention.head_count"))
        return int(content.get("head_dim") or size // max(1, heads))

    def convert(self, name: str, tensor: Tensor, content: Mapping[str, Any], *, write: bool = False) -> Tensor:
        """Convert a tensor between the two layouts.

        Args:
            name: Its name in the GGUF file, such as ``blk.0.attn_q.weight``.
            tensor: The tensor of Hugging Face (``write``) or of the file.
            content: The ``config.json``.
            write: Convert to GGUF's layout instead of from it.
        """
        part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        if part in self.row_vectors:
            return tensor.reshape(-1) if write else tensor.reshape(1, -1)
        if self.interleaves_rotary and part in ("attn_q", "attn_k"):
            num_heads = content["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
            pairs = tensor.unflatten(0, (num_heads, 2, -1) if write else (num_heads, -1, 2))
            converted: Tensor = pairs.transpose(1, 2).flatten(0, 2)
            return converted
        if self.norm_offset and part.endswith("norm") and name.endswith(".weight"):
            return tensor + (self.norm_offset if write else -self.norm_offset)
        return tensor.t() if part in self.transposed and tensor.dim() == 2 else tensor


def inexpressible(name: str, reason: str) -> CheckpointError:
    """Return the error for a model that an architecture cannot express."""
    return CheckpointError(f"GGUF's {name} cannot express this model: {reason}")


def config_json(architecture: Architecture, contents: FileContents, where: str) -> dict[str, Any]:
    """Return the ``config.json`` of a file.

    Raises:
        CheckpointError: For a key of the architecture that is not read, or that contradicts another one.
    """
    values = architecture_keys(architecture.name, contents.values)
    content: dict[str, Any] = {"model_type": architecture.model_type, "architectures": [architecture.hf_class]}
    known = (*_DERIVED, *_SCALING, *_UNUSED, *architecture.derived)
    for key, value in values.items():
        if key in architecture.keys:
            content[architecture.keys[key]] = value
        elif key not in known and architecture.fixed.get(key) != value:
            raise CheckpointError(f"{where}: {architecture.name}.{key} {value!r} is not supported")
    required = ("block_count", "attention.head_count", *(_EXPERTS if architecture.has_experts else ()))
    missing = next((key for key in required if key not in values), None)
    if missing is not None:
        raise CheckpointError(f"{where}: {architecture.name}.{missing} is missing")
    content["tie_word_embeddings"] = "output.weight" not in contents.tensor_names
    _check_derived(architecture, values, content, where)
    content |= architecture.constants
    scaling = _rope_scaling(values, contents, where)
    if scaling is not None:
        content["rope_scaling"] = scaling
    try:
        architecture.complete(content, contents._replace(values=values))
    except (ArithmeticError, KeyError, TypeError) as error:
        raise CheckpointError(f"{where}: a key of {architecture.name} is missing or invalid: {error}") from error
    return content


def architecture_keys(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of an architecture without its prefix."""
    return {key.removeprefix(f"{name}."): value for key, value in values.items() if key.startswith(f"{name}.")}


def _check_derived(architecture: Architecture, values: Mapping[str, Any], content: dict[str, Any], where: str) -> None:
    """Complete the head's width, and compare the keys that follow from others."""
    if values.get("attention.causal", True) is not True:
        raise CheckpointError(f"{where}: attention.causal must be true")
    if architecture.is_latent:
        return
    content.setdefault(architecture.keys["embedding_length"], 0)
    head_dim = architecture.head_width(content)
    if "attention.head_count_kv" in architecture.keys:
        content.setdefault("head_dim", head_dim)
        content.setdefault(architecture.keys["attention.head_count_kv"], values["attention.head_count"])
    rotary_dim = values.get("rope.dimension_count", head_dim)
    if architecture.is_partial:
        content["partial_rotary_factor"] = rotary_dim / max(1, head_dim)
    elif rotary_dim != head_dim:
        raise CheckpointError(f"{where}: rope.dimension_count must be the head's width {head_dim}, got {rotary_dim}")
    for key in ("attention.key_length", "attention.value_length"):
        if values.get(key, head_dim) != head_dim:
            raise CheckpointError(f"{where}: {key} must be {head_dim}, got {values[key]}")


def _rope_scaling(values: Mapping[str, Any], contents: FileContents, where: str) -> dict[str, Any] | None:
    """Return ``rope_scaling`` of ``config.json``, or None."""
    kind = values.get("rope.scaling.type", "none")
    scaling = {name: values[key] for key, name in _SCALING.items() if key in values}
    divisors = {name: tensor for name, tensor in _LONGROPE_DIVISORS.items() if tensor in contents.tensor_names}
    if len(divisors) == 2:
        default = _longrope_attention_factor(
            {**scaling, "attention_factor": None}, {"max_position_embeddings": values.get("context_length", 0)}
        )
        if math.isclose(scaling.get("attention_factor", default), default, rel_tol=1e-5):
            scaling.pop("attention_factor", None)
        return {"rope_type": "longrope", **scaling, **{name: contents.factors(divisors[name]) for name in divisors}}
    if _LLAMA3_DIVISORS in contents.tensor_names:  # Llama 3.1's frequencies as divisors of the unscaled ones
        factors = contents.factors(_LLAMA3_DIVISORS)
        limit = values.get("context_length", 0)
        lists = {"short_factor": factors, "long_factor": factors}
        return {"rope_type": "longrope", **lists, "attention_factor": 1.0, "original_max_position_embeddings": limit}
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{where}: rope.scaling.type {kind!r} is not supported", "Supported: linear, yarn.")
    return {"rope_type": kind, "factor": 1.0, **scaling}


def metadata(architecture: Architecture, content: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the keys of a ``config.json``, with the architecture's prefix."""
    keys = {key: name for key, name in architecture.keys.items() if key not in architecture.not_written}
    values = {key: content[name] for key, name in keys.items() if content.get(name) is not None}
    values |= architecture.fixed
    if "rope.freq_base" in keys and not architecture.is_latent:
        width = architecture.head_width(content)
        fraction = content.get("partial_rotary_factor", 1.0) if architecture.is_partial else 1.0
        values["rope.dimension_count"] = math.floor(width * fraction)
        if "attention.key_length" in keys:
            values["attention.key_length"] = values["attention.value_length"] = width
    scaling = content.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    has_longrope = kind == "longrope" and architecture.has_longrope
    original = scaling.get("original_max_position_embeddings", content.get("original_max_position_embeddings"))
    if kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": float(scaling["factor"])}
    if has_longrope:
        values["rope.scaling.attn_factor"] = _longrope_attention_factor(scaling, content)
    if (kind == "yarn" or has_longrope) and original is not None:
        values["rope.scaling.original_context_length"] = original
    values["vocab_size"] = vocab_size
    architecture.finish(values, content)
    return {f"{architecture.name}.{key}": value for key, value in values.items()}


def _longrope_attention_factor(scaling: Mapping[str, Any], content: Mapping[str, Any]) -> float:
    """Return the factor of cos and sin, which is that of transformers' ``_compute_longrope_parameters``."""
    original = scaling.get("original_max_position_embeddings", content.get("original_max_position_embeddings"))
    limit = content["max_position_embeddings"]
    factor = scaling.get("factor") or limit / (original or limit)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return float(scaling.get("attention_factor") or default)


def rope_divisors(architecture: Architecture, content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors [head_dim / 2] by which llama.cpp divides the unscaled frequencies."""
    scaling = content.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "llama3":
        return {_LLAMA3_DIVISORS: _llama3_divisors(scaling, content["rope_theta"], architecture.head_width(content))}
    if kind == "longrope" and architecture.has_longrope:
        return {tensor: torch.tensor(scaling[name]) for name, tensor in _LONGROPE_DIVISORS.items()}
    return {}


def _llama3_divisors(scaling: Mapping[str, Any], theta: float, width: int) -> Tensor:
    """Return the divisors of Llama 3.1's scaling, with the formula of transformers' ``_compute_llama3_parameters``."""
    frequencies = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    wavelengths = 2 * math.pi / frequencies
    original, low, high = (scaling[name] for name in (
        "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"
    ))  # fmt: skip
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    divisors: Tensor = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return divisors
