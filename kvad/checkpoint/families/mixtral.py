"""Mixtral (Jiang et al. 2024): Mistral whose MLP is a mixture of experts, two of eight for each token.

An expert is w2(silu(w1 x) * w3 x), a file of its own in the checkpoint: transformers 5 joins them when it reads, and
parts them again when it writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.families.common import ACTIVATIONS, rope_fields, rotary, their_activation
from kvad.checkpoint.families.decoders import (
    LAYER,
    STACKED,
    attention,
    family,
    full_rope,
    known,
    make,
    rms,
    rules_of,
    sizes,
    stack,
    window,
)
from kvad.checkpoint.hf import Fields, Rule, rule, rules_under
from kvad.config import Experts, Layer, ModelConfig

__all__ = ["FAMILY"]

_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_NAMES = {mine: other for mine, other in LAYER.items() if not mine.startswith("mlp.")}


def read(fields: Fields) -> ModelConfig:
    fields = known(fields, **_DEFAULTS)
    mlp = Experts(
        fields.integer("intermediate_size"),
        count=fields.integer("num_local_experts"),
        active=fields.integer("num_experts_per_tok"),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
    )
    mixer = attention(fields, position=full_rope(fields, theta=1000000.0), window=window(fields))
    return make(fields, stack({"L": Layer(mixer, mlp, rms(fields, 1e-5))}, "L" * fields.integer("num_hidden_layers")))


def rules(config: ModelConfig) -> Iterator[Rule]:
    mlp = config.stack.layer(0).mlp
    assert isinstance(mlp, Experts)
    count = mlp.count

    def layer(ours: str, theirs: str) -> Iterator[Rule]:
        yield from rules_under(ours, theirs, {**_NAMES, "mlp.router": "block_sparse_moe.gate"})
        for mine, other in {"gate": "w1", "down": "w2", "up": "w3"}.items():
            names = tuple(f"{theirs}.block_sparse_moe.experts.{expert}.{other}.weight" for expert in range(count))
            yield rule(f"{ours}.mlp.{mine}", names, STACKED)

    return rules_of(config, layer)


def write(config: ModelConfig) -> dict[str, Any]:
    layer = config.stack.layer(0)
    mlp = layer.mlp
    experts = {"num_local_experts": mlp.count, "num_experts_per_tok": mlp.active} if isinstance(mlp, Experts) else {}
    out = {
        **sizes(config, "mixtral", "MixtralForCausalLM"),
        "hidden_act": their_activation(mlp.activation),
        "rms_norm_eps": layer.norm.eps,
        "sliding_window": layer.mixer.window,
        **rope_fields(rotary(layer.mixer.position, "mixtral")),
        **experts,
    }
    return out


FAMILY = family(("mixtral",), read, rules, write)
