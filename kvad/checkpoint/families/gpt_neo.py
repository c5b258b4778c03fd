"""GPT-Neo (Black et al. 2021).

GPT-2 with a window in every second layer and unscaled attention logits.  Only the output of attention has a bias.
``attention_layers`` repeats ``attention_types``, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import ACTIVATIONS, hf_activation, shortest_pattern
from kvad.config import (
    AttentionConfig,
    EmbeddingConfig,
    LayerConfig,
    LearnedPositionsConfig,
    ModelConfig,
    NormConfig,
    PlainMLPConfig,
    StackConfig,
)
from kvad.errors import CheckpointError

_LAYER = {
    "attention.q": "attn.attention.q_proj",
    "attention.k": "attn.attention.k_proj",
    "attention.v": "attn.attention.v_proj",
    "attention.out": "attn.attention.out_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "norm1": "ln_1",
    "norm2": "ln_2",
}


def read(fields: HFConfigReader) -> ModelConfig:
    hidden_size, max_seq_len = fields.integer("hidden_size"), fields.integer("max_position_embeddings", default=2048)
    layers, pattern = fields.integer("num_layers"), shortest_pattern(_pattern(fields))
    attention = AttentionConfig(fields.integer("num_heads"), position=None, out_bias=True, softmax_scale="none")
    attentions = {"G": attention, "L": replace(attention, window=fields.integer("window_size", default=256))}
    activation = fields.choice("activation_function", ACTIVATIONS, "gelu_new")
    mlp = PlainMLPConfig(fields.integer("intermediate_size", default=4 * hidden_size), activation, bias=True)
    norm = NormConfig("layer", fields.number("layer_norm_epsilon", default=1e-5), bias=True)
    return ModelConfig(
        hidden_size=hidden_size,
        vocab_size=fields.integer("vocab_size"),
        max_seq_len=max_seq_len,
        decoder=StackConfig(
            layers, {kind: LayerConfig(attentions[kind], mlp, norm) for kind in sorted(set(pattern))}, pattern
        ),
        embedding=EmbeddingConfig(LearnedPositionsConfig(max_seq_len)),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )


def _pattern(fields: HFConfigReader) -> str:
    """Return one letter per layer."""
    letters = {"global": "G", "local": "L"}
    try:
        types = fields.get("attention_types", [[["global", "local"], 12]])
        pattern = "".join(letters[kind] for layer_types, count in types for kind in list(layer_types) * count)
        layer_pattern = "".join(letters[kind] for kind in fields.get("attention_layers", ())) or pattern
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{fields.where}: attention_types {fields.get('attention_types')!r} is not supported",
            "Supported: global and local.",
        ) from error
    if layer_pattern != pattern or len(pattern) != fields.integer("num_layers"):
        raise CheckpointError(f"{fields.where}: attention_types, attention_layers and num_layers disagree")
    return pattern


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield tensor_rule("embedding.tokens", "transformer.wte")
    yield tensor_rule("embedding.positions", "transformer.wpe")
    for i in range(config.stack.num_layers):
        yield from prefix_rules(f"decoder.layers.{i}", f"transformer.h.{i}", _LAYER)
    yield tensor_rule("decoder.norm", "transformer.ln_f")
    yield tensor_rule("head", "lm_head")


def write(config: ModelConfig) -> dict[str, Any]:
    layers = [config.stack.layer_config(i) for i in range(config.stack.num_layers)]
    layer_types = ["global" if layer.attention.window is None else "local" for layer in layers]
    windows = [layer.attention.window for layer in layers if layer.attention.window is not None]
    fields = {
        "architectures": ["GPTNeoForCausalLM"],
        "model_type": "gpt_neo",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "hidden_size": config.hidden_size,
        "num_layers": len(layers),
        "num_heads": layers[0].attention.num_heads,
        "attention_types": [[layer_types, 1]],
        "attention_layers": layer_types,
        "window_size": windows[0] if windows else 256,
        "intermediate_size": layers[0].mlp.intermediate_size,
        "activation_function": hf_activation(layers[0].mlp.activation),
        "layer_norm_epsilon": layers[0].norm.eps,
        "tie_word_embeddings": config.tie_embeddings,
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
