"""OPT (Zhang et al. 2022).

Learned positions after two unused rows, ReLU, LayerNorm with a fixed epsilon.  Only OPT-350M normalizes after each
half (``do_layer_norm_before`` false), has no final norm, and has a smaller embedding, with a projection to and from
it.  ``_remove_final_layer_norm`` marks files written before a bug was fixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import ACTIVATIONS, FAIRSEQ_LAYER, hf_activation, single_layer_type
from kvad.config import (
    AttentionConfig,
    EmbeddingConfig,
    HeadTransformConfig,
    LanguageHeadConfig,
    LayerConfig,
    LearnedPositionsConfig,
    ModelConfig,
    NormConfig,
    PlainMLPConfig,
    StackConfig,
    embedding_size,
)


def read(fields: HFConfigReader) -> ModelConfig:
    hidden_size, max_seq_len = fields.integer("hidden_size"), fields.integer("max_position_embeddings", default=2048)
    bias, affine = fields.flag("enable_bias", True), fields.flag("layer_norm_elementwise_affine", True)
    attention = AttentionConfig(fields.integer("num_attention_heads"), position=None, qkv_bias=bias, out_bias=bias)
    mlp = PlainMLPConfig(fields.integer("ffn_dim"), fields.choice("activation_function", ACTIVATIONS, "relu"), bias)
    layer = LayerConfig(attention, mlp, NormConfig("layer", 1e-5, bias=affine, weight=affine))
    before = fields.flag("do_layer_norm_before", True)
    final = before and not fields.flag("_remove_final_layer_norm")
    table = fields.integer("word_embed_proj_dim", default=hidden_size)
    positions = LearnedPositionsConfig(max_seq_len + 2, offset=2)
    is_projected = table != hidden_size
    return ModelConfig(
        hidden_size=hidden_size,
        vocab_size=fields.integer("vocab_size"),
        max_seq_len=max_seq_len,
        decoder=StackConfig(
            fields.integer("num_hidden_layers"),
            {"L": layer},
            norm_position="pre" if before else "post",
            final_norm=final,
        ),
        embedding=EmbeddingConfig(positions, embedding_size=table, projection="start")
        if is_projected
        else EmbeddingConfig(positions),
        head=LanguageHeadConfig(transform=HeadTransformConfig(activation=None, bias=False, output_size=table))
        if is_projected
        else LanguageHeadConfig(),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    names = {
        "embedding.tokens": "embed_tokens",
        "embedding.positions": "embed_positions",
        "embedding.projection": "project_in",
        "decoder.norm": "final_layer_norm",
        "head.transform.dense": "project_out",
    }
    for kvad_name, hf_name in names.items():
        yield tensor_rule(kvad_name, f"model.decoder.{hf_name}")
    for i in range(config.stack.num_layers):
        yield from prefix_rules(f"decoder.layers.{i}", f"model.decoder.layers.{i}", FAIRSEQ_LAYER)
    yield tensor_rule("head", "lm_head")


def write(config: ModelConfig) -> dict[str, Any]:
    layer: LayerConfig = single_layer_type(config, "opt")
    before = config.stack.norm_position == "pre"
    fields = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "hidden_size": config.hidden_size,
        "word_embed_proj_dim": embedding_size(config),
        "num_hidden_layers": config.stack.num_layers,
        "num_attention_heads": layer.attention.num_heads,
        "ffn_dim": layer.mlp.intermediate_size,
        "activation_function": hf_activation(layer.mlp.activation),
        "enable_bias": layer.attention.qkv_bias,
        "layer_norm_elementwise_affine": layer.norm.weight,
        "do_layer_norm_before": before,
        "_remove_final_layer_norm": before and not config.stack.final_norm,
        "tie_word_embeddings": config.tie_embeddings,
    }
    return fields


FAMILY = Family(
    ("opt",),
    read,
    rules,
    write,
    prefix="model.",
    ignored=(r"lm_head\.weight",),
    head=("lm_head.weight", "model.decoder.embed_tokens.weight"),
)
