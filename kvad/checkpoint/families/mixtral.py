"""Mixtral (Jiang et al. 2024).

Mistral with a mixture of experts as MLP, two of eight for each token.  An expert is w2(silu(w1 x) * w3 x), stored as
separate tensors: transformers 5 joins them when it reads and splits them when it writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.conversion import HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import ACTIVATIONS, hf_activation, require_rope, rope_fields
from kvad.checkpoint.families._decoder import (
    LAYER,
    STACKED,
    attention_config,
    build_model_config,
    build_stack,
    decoder_family,
    full_rope,
    layer_rules,
    read_window,
    rms_norm,
    size_fields,
    with_defaults,
)
from kvad.config import LayerConfig, ModelConfig, MoEConfig

_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_NAMES = {kvad_name: hf_name for kvad_name, hf_name in LAYER.items() if not kvad_name.startswith("mlp.")}


def read(fields: HFConfigReader) -> ModelConfig:
    fields = with_defaults(fields, **_DEFAULTS)
    mlp = MoEConfig(
        fields.integer("intermediate_size"),
        num_experts=fields.integer("num_local_experts"),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
    )
    attention = attention_config(fields, position=full_rope(fields, theta=1000000.0), window=read_window(fields))
    return build_model_config(
        fields,
        build_stack(
            {"L": LayerConfig(attention, mlp, rms_norm(fields, 1e-5))}, "L" * fields.integer("num_hidden_layers")
        ),
    )


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    mlp = config.stack.layer_config(0).mlp
    assert isinstance(mlp, MoEConfig)
    count = mlp.num_experts

    def layer(kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
        yield from prefix_rules(kvad_prefix, hf_prefix, {**_NAMES, "mlp.router": "block_sparse_moe.gate"})
        for kvad_name, hf_name in {"gate": "w1", "down": "w2", "up": "w3"}.items():
            names = tuple(f"{hf_prefix}.block_sparse_moe.experts.{expert}.{hf_name}.weight" for expert in range(count))
            yield tensor_rule(f"{kvad_prefix}.mlp.{kvad_name}", names, STACKED)

    return layer_rules(config, layer)


def write(config: ModelConfig) -> dict[str, Any]:
    layer = config.stack.layer_config(0)
    mlp = layer.mlp
    experts = (
        {"num_local_experts": mlp.num_experts, "num_experts_per_tok": mlp.num_experts_per_token}
        if isinstance(mlp, MoEConfig)
        else {}
    )
    out = {
        **size_fields(config, "mixtral", "MixtralForCausalLM"),
        "hidden_act": hf_activation(mlp.activation),
        "rms_norm_eps": layer.norm.eps,
        "sliding_window": layer.attention.window,
        **rope_fields(require_rope(layer.attention.position, "mixtral")),
        **experts,
    }
    return out


FAMILY = decoder_family(("mixtral",), read, rules, write)
