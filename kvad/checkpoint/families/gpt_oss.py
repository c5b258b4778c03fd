"""gpt-oss (OpenAI 2025).

Experts with biases, a sink logit per head, a window in every other layer, unrounded YaRN.  An expert computes (up +
1) * gate * sigmoid(1.702 gate), clipped at 7; gate and up are interleaved in one matrix stored as [in, out].  The
hub's MXFP4 files are refused; transformers' ``dequantize`` writes files that kvad reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvad.checkpoint.conversion import HFConfigReader, TensorRule, TensorTransform, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import require_rope, rope_fields
from kvad.checkpoint.families._decoder import (
    LAYER,
    attention_config,
    build_model_config,
    build_stack,
    decoder_family,
    full_rope,
    layer_rules,
    read_window,
    rms_norm,
    size_fields,
    window_pattern,
    with_defaults,
    write_layer_types,
)
from kvad.config import LayerConfig, ModelConfig, MoEConfig, head_dim
from kvad.errors import CheckpointError

_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_NAMES = {kvad_name: hf_name for kvad_name, hf_name in LAYER.items() if not kvad_name.startswith("mlp.")}
_ROUTER = {"mlp.router": "mlp.router", "attention.sink_logits": "self_attn.sinks"}


def read(fields: HFConfigReader) -> ModelConfig:
    fields.require_one_of(
        "quantization_config", reason="MXFP4 is not supported. Convert the weights to bfloat16 first."
    )
    fields = with_defaults(fields, **_DEFAULTS)
    fields.require_one_of("hidden_act", "silu", reason="transformers' class ignores it.")
    if "rope_scaling" not in fields and "rope_parameters" not in fields:
        raise CheckpointError(
            f"{fields.where}: rope_scaling is missing", "Null means no scaling in transformers 4, YaRN in 5."
        )
    bias = fields.flag("attention_bias", True)
    full = attention_config(
        fields, position=full_rope(fields, theta=150000.0), qkv_bias=bias, out_bias=bias, sink_logits=True
    )
    mlp = MoEConfig(
        fields.integer("intermediate_size"),
        num_experts=fields.integer("num_local_experts"),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        bias=True,
        router_bias=True,
        router="softmax_last",
        swiglu_alpha=fields.number("swiglu_alpha"),
        swiglu_limit=fields.number("swiglu_limit"),
    )
    norm = rms_norm(fields, 1e-5)
    layer_types = {
        "G": LayerConfig(full, mlp, norm),
        "L": LayerConfig(replace(full, window=read_window(fields)), mlp, norm),
    }
    return build_model_config(fields, build_stack(layer_types, window_pattern(fields, lambda index: index % 2 == 0)))


def _split_gate_up(tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Split interleaved [experts, (in,) 2 hidden] into two [experts, hidden(, in)]."""
    (gate_up,) = tensors
    return [_transposed(gate_up[..., start::2]) for start in (0, 1)]


def _join_gate_up(tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    return [torch.stack([_transposed(tensor) for tensor in tensors], dim=-1).flatten(-2)]


def _transposed(tensor: Tensor) -> Tensor:
    """Transpose each expert's matrix; a bias per expert is returned unchanged."""
    return tensor.transpose(1, 2).contiguous() if tensor.dim() == 3 else tensor.contiguous()


_GATE_UP = TensorTransform(_split_gate_up, _join_gate_up)
_DOWN = TensorTransform(
    lambda tensors, shapes: [_transposed(tensors[0])], lambda tensors, shapes: [_transposed(tensors[0])]
)


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    def layer(kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
        yield from prefix_rules(kvad_prefix, hf_prefix, {**_NAMES, **_ROUTER})
        for suffix in ("", "_bias"):
            gate_up = (f"{kvad_prefix}.mlp.gate{suffix}", f"{kvad_prefix}.mlp.up{suffix}")
            yield tensor_rule(gate_up, f"{hf_prefix}.mlp.experts.gate_up_proj{suffix}", _GATE_UP)
            yield tensor_rule(f"{kvad_prefix}.mlp.down{suffix}", f"{hf_prefix}.mlp.experts.down_proj{suffix}", _DOWN)

    return layer_rules(config, layer)


def write(config: ModelConfig) -> dict[str, Any]:
    layer = config.stack.layer_config(0)
    attention, mlp = layer.attention, layer.mlp
    experts: dict[str, Any] = {}
    if isinstance(mlp, MoEConfig):
        experts = {
            "num_local_experts": mlp.num_experts,
            "num_experts_per_tok": mlp.num_experts_per_token,
            "swiglu_alpha": mlp.swiglu_alpha,
            "swiglu_limit": mlp.swiglu_limit,
        }
    out = {
        **size_fields(config, "gpt_oss", "GptOssForCausalLM"),
        "head_dim": head_dim(config, attention),
        "hidden_act": "silu",
        "rms_norm_eps": layer.norm.eps,
        "attention_bias": attention.qkv_bias,
        **rope_fields(require_rope(attention.position, "gpt_oss")),
        **write_layer_types(config),
        **experts,
    }
    out["sliding_window"] = out["sliding_window"] or config.max_seq_len  # the class requires a number
    return out


FAMILY = decoder_family(("gpt_oss",), read, rules, write)
