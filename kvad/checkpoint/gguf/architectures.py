"""GGUF architectures and the Hugging Face classes that they correspond to.

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

from kvad.errors import CheckpointError, suggest

_SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "rope.freq_base": "rope_theta",
}
_RMS = {**_SIZES, "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_GPT2 = {
    "context_length": "n_positions",
    "block_count": "n_layer",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
# Keys without a field of config.json, which ``_check_derived`` and ``_rope_scaling`` read.
_DERIVED = ("attention.value_length", "rope.dimension_count", "vocab_size", "attention.causal")
_SCALING = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length")
_UNUSED = ("rope.scaling.finetuned",)
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_LOCAL_EXPERTS = {**_EXPERTS, "expert_count": "num_local_experts"}


class FileContents(NamedTuple):
    """Metadata of a GGUF file, and the names of its tensors."""

    values: Mapping[str, Any]
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
    is_partial: bool = False  # rope.dimension_count may be less than the head's width
    interleaves_rotary: bool = False  # rows of q and k are stored for rotary pairs (2i, 2i + 1)
    norm_offset: float = 0.0  # stored weights of norms are larger by this
    transposed: tuple[str, ...] = ()  # tensors that Hugging Face stores as [in, out]
    packings: Mapping[str, Packing] = field(default_factory=dict)  # by the name in a layer of Hugging Face
    not_written: tuple[str, ...] = ()  # keys that are read, and that llama.cpp ignores: a model with one is refused

    @property
    def has_experts(self) -> bool:
        return "expert_count" in self.keys

    def convert(self, name: str, tensor: Tensor, content: Mapping[str, Any], *, write: bool = False) -> Tensor:
        """Convert a tensor between the two layouts.

        Args:
            name: Its name in the GGUF file, such as ``blk.0.attn_q.weight``.
            tensor: The tensor of Hugging Face (``write``) or of the file.
            content: The ``config.json``.
            write: Convert to GGUF's layout instead of from it.
        """
        part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        if self.interleaves_rotary and part in ("attn_q", "attn_k"):
            num_heads = content["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
            pairs = tensor.unflatten(0, (num_heads, 2, -1) if write else (num_heads, -1, 2))
            converted: Tensor = pairs.transpose(1, 2).flatten(0, 2)
            return converted
        if self.norm_offset and part.endswith("norm") and name.endswith(".weight"):
            return tensor + (self.norm_offset if write else -self.norm_offset)
        return tensor.t() if part in self.transposed and tensor.dim() == 2 else tensor


def _llama_biases(content: dict[str, Any], contents: FileContents) -> None:
    content["attention_bias"] = "blk.0.attn_q.bias" in contents.tensor_names
    content["mlp_bias"] = "blk.0.ffn_up.bias" in contents.tensor_names


def _stablelm_biases(content: dict[str, Any], contents: FileContents) -> None:
    content["use_qkv_bias"] = "blk.0.attn_q.bias" in contents.tensor_names
    content["qk_layernorm"] = "blk.0.attn_q_norm.weight" in contents.tensor_names


def _starcoder_biases(content: dict[str, Any], contents: FileContents) -> None:
    content["use_bias"] = "blk.0.attn_q.bias" in contents.tensor_names


def _seed_oss_biases(content: dict[str, Any], contents: FileContents) -> None:
    names = contents.tensor_names
    content["attention_bias"], content["attention_out_bias"], content["mlp_bias"] = (
        f"blk.0.{part}.bias" in names for part in ("attn_q", "attn_output", "ffn_up")
    )


def _olmoe_heads(content: dict[str, Any], contents: FileContents) -> None:
    content["num_key_value_heads"] = content["num_attention_heads"]  # llama.cpp reads no other file


def _gpt_oss_windows(content: dict[str, Any], contents: FileContents) -> None:
    content["layer_types"] = ["sliding_attention", "full_attention"] * (content["num_hidden_layers"] // 2)
    if content.get("rope_scaling") is not None:
        content["rope_scaling"]["truncate"] = False


def _split_last(tensor: Tensor) -> list[Tensor]:
    return list(tensor.unflatten(-1, (-1, 2)).unbind(-1))


# gpt-oss joins gate and up, alternating, and stores its matrices as [in, out].
_GPT_OSS = {
    "self_attn.sinks": Packing(("attn_sinks.weight",), lambda parts: parts[0], lambda tensor: [tensor]),
    "mlp.experts.gate_up_proj": Packing(
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        lambda parts: torch.stack(parts, -1).flatten(-2) if parts[0].dim() == 2 else
        torch.stack([part.transpose(1, 2) for part in parts], -1).flatten(-2),
        lambda tensor: [part.transpose(1, 2).contiguous() for part in _split_last(tensor)],
    ),
    "mlp.experts.gate_up_proj_bias": Packing(
        ("ffn_gate_exps.bias", "ffn_up_exps.bias"), lambda parts: torch.stack(parts, -1).flatten(-2), _split_last
    ),
    "mlp.experts.down_proj": Packing(
        ("ffn_down_exps.weight",), lambda parts: parts[0].transpose(1, 2), lambda tensor: [tensor.transpose(1, 2)]
    ),
    "mlp.experts.down_proj_bias": Packing(
        ("ffn_down_exps.bias",), lambda parts: parts[0], lambda tensor: [tensor]
    ),
}  # fmt: skip


def _gemma_scale(content: dict[str, Any], contents: FileContents) -> None:
    """Set the attention scale, which llama.cpp derives from the size of the model (27B has its own)."""
    is_27b = content["num_hidden_layers"] == {"gemma2": 46}.get(content["model_type"], 62)
    width = content["hidden_size"] // content["num_attention_heads"]
    content["query_pre_attn_scalar"] = width if is_27b else content["head_dim"]


_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
_SILU = {"hidden_act": "silu"}
ARCHITECTURES = {
    architecture.model_type: architecture
    for architecture in (
        Architecture(
            "llama", "llama", "LlamaForCausalLM", _RMS, {"hidden_act": "silu"}, _llama_biases, interleaves_rotary=True
        ),
        Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", _RMS, {"hidden_act": "silu"}),
        Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", _RMS, {"hidden_act": "silu", "attention_bias": False}),
        Architecture(
            "gemma2", "gemma2", "Gemma2ForCausalLM",
            {
                **_RMS, "attention.sliding_window": "sliding_window",
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            _GEMMA, _gemma_scale, norm_offset=1.0,
        ),
        Architecture(
            "gemma3", "gemma3_text", "Gemma3ForCausalLM", {**_RMS, "attention.sliding_window": "sliding_window"},
            {**_GEMMA, "rope_local_base_freq": 10000.0}, _gemma_scale, norm_offset=1.0,
        ),
        Architecture(
            "stablelm", "stablelm", "StableLmForCausalLM",
            {
                **_SIZES, "attention.layer_norm_epsilon": "layer_norm_eps",
                "use_parallel_residual": "use_parallel_residual",
            },
            {"hidden_act": "silu"}, _stablelm_biases, is_partial=True,
        ),
        Architecture(
            "starcoder2", "starcoder2", "Starcoder2ForCausalLM",
            {
                **_SIZES, "attention.layer_norm_epsilon": "norm_epsilon",
                "attention.sliding_window": "sliding_window",
            },
            {"hidden_act": "gelu_pytorch_tanh"}, _starcoder_biases, not_written=("attention.sliding_window",),
        ),
        Architecture(
            "gemma", "gemma", "GemmaForCausalLM", _RMS,
            {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "attention_bias": False},
            norm_offset=1.0,
        ),
        Architecture(
            "phi3", "phi3", "Phi3ForCausalLM",
            {
                **_SIZES, "attention.layer_norm_rms_epsilon": "rms_norm_eps",
                "attention.sliding_window": "sliding_window",
            },
            _SILU, is_partial=True, not_written=("attention.sliding_window",),
        ),
        Architecture("olmo2", "olmo2", "Olmo2ForCausalLM", _RMS, {**_SILU, "attention_bias": False}),
        Architecture(
            "granite", "granite", "GraniteForCausalLM",
            {
                **_RMS, "logit_scale": "logits_scaling", "residual_scale": "residual_multiplier",
                "embedding_scale": "embedding_multiplier", "attention.scale": "attention_multiplier",
            },
            _SILU, _llama_biases, interleaves_rotary=True,
        ),
        Architecture("seed_oss", "seed_oss", "SeedOssForCausalLM", _RMS, _SILU, _seed_oss_biases),
        Architecture(
            "arcee", "arcee", "ArceeForCausalLM", _RMS,
            {"hidden_act": "relu2", "attention_bias": False, "mlp_bias": False}, interleaves_rotary=True,
        ),
        Architecture(
            "smollm3", "smollm3", "SmolLM3ForCausalLM", _RMS, {**_SILU, "no_rope_layer_interval": 4}, _llama_biases,
            interleaves_rotary=True,
        ),
        Architecture("ernie4_5", "ernie4_5", "Ernie4_5ForCausalLM", _RMS, {**_SILU, "use_bias": False}),
        Architecture(
            "nemotron", "nemotron", "NemotronForCausalLM",
            {**_SIZES, "attention.layer_norm_epsilon": "norm_eps"},
            {"hidden_act": "relu2", "attention_bias": False, "mlp_bias": False}, is_partial=True, norm_offset=1.0,
        ),
        Architecture(
            "command-r", "cohere", "CohereForCausalLM",
            {**_SIZES, "attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
            {**_SILU, "attention_bias": False},
        ),
        Architecture(
            "llama", "mixtral", "MixtralForCausalLM", {**_RMS, **_LOCAL_EXPERTS}, _SILU, interleaves_rotary=True
        ),
        Architecture(
            "qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM",
            {**_RMS, **_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"},
            {**_SILU, "attention_bias": False, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        ),
        Architecture(
            "olmoe", "olmoe", "OlmoeForCausalLM", {**_RMS, **_EXPERTS},
            {**_SILU, "attention_bias": False, "norm_topk_prob": False}, _olmoe_heads,
        ),
        Architecture(
            "gpt-oss", "gpt_oss", "GptOssForCausalLM",
            {
                **_RMS, **_LOCAL_EXPERTS, "expert_feed_forward_length": "intermediate_size",
                "attention.sliding_window": "sliding_window",
            },
            {**_SILU, "attention_bias": True}, _gpt_oss_windows, packings=_GPT_OSS,
        ),
        Architecture(
            "gpt2", "gpt2", "GPT2LMHeadModel", _GPT2, {"activation_function": "gelu_new"},
            transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
        ),
    )
}  # fmt: skip


def find_architecture(values: Mapping[str, Any], where: str) -> Architecture:
    """Return the architecture; a CheckpointError names the closest of those that are read."""
    name = values.get("general.architecture")
    candidates = [architecture for architecture in ARCHITECTURES.values() if architecture.name == name]
    if not candidates:
        names = {architecture.name: architecture for architecture in ARCHITECTURES.values()}
        raise CheckpointError(f"{where}: general.architecture {name!r} is not read", suggest(str(name), names))
    has_experts = bool(values.get(f"{name}.expert_count"))
    return next((each for each in candidates if each.has_experts == has_experts), candidates[0])


def config_json(architecture: Architecture, contents: FileContents, where: str) -> dict[str, Any]:
    """Return the ``config.json`` of a file.

    Raises:
        CheckpointError: For a key of the architecture that is not read, or that contradicts another one.
    """
    prefix = f"{architecture.name}."
    values = {name.removeprefix(prefix): value for name, value in contents.values.items() if name.startswith(prefix)}
    content: dict[str, Any] = {"model_type": architecture.model_type, "architectures": [architecture.hf_class]}
    for key, value in values.items():
        if key in architecture.keys:
            content[architecture.keys[key]] = value
        elif key not in (*_DERIVED, *_SCALING, *_UNUSED):
            raise CheckpointError(f"{where}: {prefix}{key} {value!r} is not supported")
    required = ("block_count", "attention.head_count", *(_EXPERTS if architecture.has_experts else ()))
    missing = next((key for key in required if key not in values), None)
    if missing is not None:
        raise CheckpointError(f"{where}: {prefix}{missing} is missing")
    content["tie_word_embeddings"] = "output.weight" not in contents.tensor_names
    _check_derived(architecture, values, content, where)
    content |= architecture.constants
    scaling = _rope_scaling(values, contents, where)
    if scaling is not None:
        content["rope_scaling"] = scaling
    architecture.complete(content, contents)
    return content


def _check_derived(architecture: Architecture, values: Mapping[str, Any], content: dict[str, Any], where: str) -> None:
    """Complete the head's width, and compare the keys that follow from others."""
    width = content.get("hidden_size", content.get("n_embd", 0)) // max(1, values["attention.head_count"])
    head_dim = values.get("attention.key_length", width)
    if architecture.keys is not _GPT2:
        content.setdefault("head_dim", head_dim)
        content.setdefault("num_key_value_heads", values["attention.head_count"])
    rotary_dim = values.get("rope.dimension_count", head_dim)
    if architecture.is_partial:
        content["partial_rotary_factor"] = rotary_dim / max(1, head_dim)
    elif rotary_dim != head_dim:
        raise CheckpointError(f"{where}: rope.dimension_count must be the head's width {head_dim}, got {rotary_dim}")
    if values.get("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{where}: attention.value_length must be {head_dim}, got other than its keys'")
    if values.get("attention.causal", True) is not True:
        raise CheckpointError(f"{where}: attention.causal must be true")


def _rope_scaling(values: Mapping[str, Any], contents: FileContents, where: str) -> dict[str, Any] | None:
    """Return ``rope_scaling`` of ``config.json``, or None."""
    kind = values.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in contents.tensor_names:  # Llama 3.1's frequencies as divisors of the unscaled ones
        factors = contents.factors("rope_freqs.weight")
        limit = values.get("context_length", 0)
        lists = {"short_factor": factors, "long_factor": factors}
        return {"rope_type": "longrope", **lists, "attention_factor": 1.0, "original_max_position_embeddings": limit}
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{where}: rope.scaling.type {kind!r} is not supported", "Supported: linear, yarn.")
    scaling = {"rope_type": kind, "factor": values.get("rope.scaling.factor", 1.0)}
    original = values.get("rope.scaling.original_context_length")
    return scaling if original is None else {**scaling, "original_max_position_embeddings": original}


def metadata(architecture: Architecture, content: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the keys of a ``config.json``, with the architecture's prefix."""
    keys = {key: name for key, name in architecture.keys.items() if key not in architecture.not_written}
    values = {key: content[name] for key, name in keys.items() if content.get(name) is not None}
    if architecture.keys is _GPT2:
        values.setdefault("feed_forward_length", 4 * content["n_embd"])
    else:
        width = content.get("head_dim") or content["hidden_size"] // content["num_attention_heads"]
        fraction = content.get("partial_rotary_factor", 1.0) if architecture.is_partial else 1.0
        values["rope.dimension_count"] = math.floor(width * fraction)
        if "attention.key_length" in architecture.keys:
            values["attention.key_length"] = values["attention.value_length"] = width
    scaling = content.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": float(scaling["factor"])}
        if "original_max_position_embeddings" in scaling:
            values["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    values["vocab_size"] = vocab_size
    return {f"{architecture.name}.{key}": value for key, value in values.items()}


def llama3_divisors(content: Mapping[str, Any]) -> Tensor | None:
    """Return ``rope_freqs.weight`` [head_dim / 2] of Llama 3.1's scaling, or None.

    The formula is that of transformers' ``_compute_llama3_parameters``.
    """
    scaling = content.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        return None
    width = content.get("head_dim") or content["hidden_size"] // content["num_attention_heads"]
    frequencies = content["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    wavelengths = 2 * math.pi / frequencies
    original, low, high = (scaling[name] for name in (
        "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"
    ))  # fmt: skip
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    divisors: Tensor = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return divisors
