"""Phi-3, 3.5 and 4-mini (Abdin et al. 2024): Llama with q, k, v in one matrix and gate, up in another; LongRoPE."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.families.common import ACTIVATIONS, rope, rope_fields, rotary, their_activation
from kvad.checkpoint.families.decoders import (
    LAYER,
    attention,
    family,
    known,
    make,
    rms,
    rules_of,
    sizes,
    stack,
    window,
    with_type,
)
from kvad.checkpoint.hf import STACKED, Fields, Rule, rule, rules_under
from kvad.config import Gated, Layer, LongRopeScaling, ModelConfig
from kvad.errors import CheckpointError

__all__ = ["FAMILY"]

_DEFAULTS = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
_NAMES = {mine: LAYER[mine] for mine in ("mixer.out", "mlp.down", "norm1", "norm2")}


def read(fields: Fields) -> ModelConfig:
    fields = known(fields, **_DEFAULTS)
    position = rope(fields, limit=fields.integer("max_position_embeddings"))
    if not isinstance(position.scaling, LongRopeScaling | None):
        raise CheckpointError(f"{fields.where}: rope_type {position.scaling.kind!r} is not supported", "longrope")
    mixer = attention(fields, position=position, window=window(fields))
    mlp = Gated(fields.integer("intermediate_size"), fields.choice("hidden_act", ACTIVATIONS, "silu"))
    return make(fields, stack({"L": Layer(mixer, mlp, rms(fields, 1e-5))}, "L" * fields.integer("num_hidden_layers")))


def rules(config: ModelConfig) -> Iterator[Rule]:
    def layer(ours: str, theirs: str) -> Iterator[Rule]:
        yield rule(tuple(f"{ours}.mixer.{part}" for part in "qkv"), f"{theirs}.self_attn.qkv_proj", STACKED)
        yield rule((f"{ours}.mlp.gate", f"{ours}.mlp.up"), f"{theirs}.mlp.gate_up_proj", STACKED)
        yield from rules_under(ours, theirs, _NAMES)

    return rules_of(config, layer)


def write(config: ModelConfig) -> dict[str, Any]:
    layer = config.stack.layer(0)
    position = rotary(layer.mixer.position, "phi3")
    scaling = position.scaling
    out = {
        **sizes(config, "phi3", "Phi3ForCausalLM"),
        "hidden_act": their_activation(layer.mlp.activation),
        "rms_norm_eps": layer.norm.eps,
        "sliding_window": layer.mixer.window,
        **with_type(rope_fields(position, partial=True), "short_factor", "long_factor"),
        "original_max_position_embeddings": scaling.original if isinstance(scaling, LongRopeScaling) else config.limit,
    }
    return out


FAMILY = family(("phi3",), read, rules, write)
