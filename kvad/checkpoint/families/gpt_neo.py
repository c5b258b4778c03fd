"""GPT-Neo (Black et al. 2021): GPT-2 with every second layer looking back over a window, and q.k divided by nothing.

Only the output of attention has a bias.  ``attention_layers`` repeats ``attention_types``, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvad.checkpoint.families.common import ACTIVATIONS, shortest, their_activation
from kvad.checkpoint.hf import Family, Fields, Rule, rule, rules_under
from kvad.config import Attention, Embedding, Layer, LearnedPositions, ModelConfig, Norm, Plain, Stack
from kvad.errors import CheckpointError

__all__ = ["FAMILY"]

_LAYER = {
    "mixer.q": "attn.attention.q_proj",
    "mixer.k": "attn.attention.k_proj",
    "mixer.v": "attn.attention.v_proj",
    "mixer.out": "attn.attention.out_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "norm1": "ln_1",
    "norm2": "ln_2",
}


def read(fields: Fields) -> ModelConfig:
    width, limit = fields.integer("hidden_size"), fields.integer("max_position_embeddings", default=2048)
    layers, pattern = fields.integer("num_layers"), shortest(_pattern(fields))
    mixer = Attention(fields.integer("num_heads"), position=None, out_bias=True, scale="none")
    mixers = {"G": mixer, "L": replace(mixer, window=fields.integer("window_size", default=256))}
    activation = fields.choice("activation_function", ACTIVATIONS, "gelu_new")
    mlp = Plain(fields.integer("intermediate_size", default=4 * width), activation, bias=True)
    norm = Norm("layer", fields.number("layer_norm_epsilon", default=1e-5), bias=True)
    return ModelConfig(
        width=width,
        vocab=fields.integer("vocab_size"),
        limit=limit,
        decoder=Stack(layers, {kind: Layer(mixers[kind], mlp, norm) for kind in sorted(set(pattern))}, pattern),
        embed=Embedding(LearnedPositions(limit)),
        tie=fields.flag("tie_word_embeddings", True),
    )


def _pattern(fields: Fields) -> str:
    """One letter for each layer.  CheckpointError unless both fields that say so agree, and with the layers' number."""
    letters = {"global": "G", "local": "L"}
    try:
        types = fields.get("attention_types", [[["global", "local"], 12]])
        pattern = "".join(letters[kind] for kinds, count in types for kind in list(kinds) * count)
        again = "".join(letters[kind] for kind in fields.get("attention_layers", ())) or pattern
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{fields.where}: attention_types {fields.get('attention_types')!r} is not supported", "global and local"
        ) from error
    if again != pattern or len(pattern) != fields.integer("num_layers"):
        raise CheckpointError(f"{fields.where}: attention_types, attention_layers and num_layers disagree")
    return pattern


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield rule("embed.tokens", "transformer.wte")
    yield rule("embed.positions", "transformer.wpe")
    for i in range(config.stack.layers):
        yield from rules_under(f"decoder.layers.{i}", f"transformer.h.{i}", _LAYER)
    yield rule("decoder.norm", "transformer.ln_f")
    yield rule("head", "lm_head")


def write(config: ModelConfig) -> dict[str, Any]:
    layers = [config.stack.layer(i) for i in range(config.stack.layers)]
    kinds = ["global" if layer.mixer.window is None else "local" for layer in layers]
    windows = [layer.mixer.window for layer in layers if layer.mixer.window is not None]
    fields = {
        "architectures": ["GPTNeoForCausalLM"],
        "model_type": "gpt_neo",
        "vocab_size": config.vocab,
        "max_position_embeddings": config.limit,
        "hidden_size": config.width,
        "num_layers": len(layers),
        "num_heads": layers[0].mixer.heads,
        "attention_types": [[kinds, 1]],
        "attention_layers": kinds,
        "window_size": windows[0] if windows else 256,
        "intermediate_size": layers[0].mlp.hidden,
        "activation_function": their_activation(layers[0].mlp.activation),
        "layer_norm_epsilon": layers[0].norm.eps,
        "tie_word_embeddings": config.tie,
    }
    return fields


FAMILY = Family(
    ("gpt_neo",),
    read,
    rules,
    write,
    prefix="transformer.",
    ignored=(r".*\.attention\.(masked_)?bias", r"lm_head\.weight"),
    head=("lm_head.weight", "transformer.wte.weight"),
)
