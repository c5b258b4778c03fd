"""MPT (MosaicML 2023): ALiBi, no biases, q, k and v clipped to [-clip_qkv, clip_qkv].

transformers' class ignores parts of the config: the MLP is always four times as wide (``expansion_ratio`` has no
effect) and ALiBi is always used (it overrides ``learned_pos_emb``).  kvad does the same, and refuses options for which
the original code would compute something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.conversion import STACKED, Family, HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import single_layer_type
from kvad.config import (
    AlibiConfig,
    AttentionConfig,
    EmbeddingConfig,
    LayerConfig,
    ModelConfig,
    NormConfig,
    PlainMLPConfig,
    StackConfig,
)

_LAYER = {
    "attention.out": "attn.out_proj",
    "mlp.up": "ffn.up_proj",
    "mlp.down": "ffn.down_proj",
    "norm1": "norm_1",
    "norm2": "norm_2",
}


def read(fields: HFConfigReader) -> ModelConfig:
    hidden_size, attention_fields = fields.integer("d_model", "hidden_size", default=2048), fields.part("attn_config")
    _check_supported(fields, attention_fields)
    scale = attention_fields.get("softmax_scale")
    attention = AttentionConfig(
        fields.integer("n_heads", "num_attention_heads", default=16),
        position=AlibiConfig(),
        clip_qkv=attention_fields.number("clip_qkv", default=0.0) or None,
        softmax_scale="default" if scale is None else attention_fields.number("softmax_scale"),
    )
    layer = LayerConfig(
        attention,
        PlainMLPConfig(4 * hidden_size),
        NormConfig("layer", fields.number("layer_norm_epsilon", default=1e-5)),
    )
    return ModelConfig(
        hidden_size=hidden_size,
        vocab_size=fields.integer("vocab_size", default=50368),
        max_seq_len=fields.integer("max_seq_len", default=2048),
        decoder=StackConfig(fields.integer("n_layers", "num_hidden_layers", default=24), {"L": layer}),
        embedding=EmbeddingConfig(),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )


def _check_supported(fields: HFConfigReader, attention_fields: HFConfigReader) -> None:
    reason = "transformers' class ignores it."
    fields.require_one_of("no_bias", True, reason=reason)
    fields.require_one_of("logit_scale", reason=reason)
    fields.require_one_of("norm_type", "low_precision_layernorm", "layernorm", reason=reason)
    attention_fields.require_one_of("attn_type", "multihead_attention", reason=reason)
    attention_fields.require_one_of("alibi", True, reason=reason)
    attention_fields.require_one_of("alibi_bias_max", 8, reason=reason)
    for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        attention_fields.require_one_of(name, False, reason=reason)


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield tensor_rule("embedding.tokens", "transformer.wte")
    for i in range(config.stack.num_layers):
        kvad_prefix, hf_prefix = f"decoder.layers.{i}", f"transformer.blocks.{i}"
        yield tensor_rule(tuple(f"{kvad_prefix}.attention.{part}" for part in "qkv"), f"{hf_prefix}.attn.Wqkv", STACKED)
        yield from prefix_rules(kvad_prefix, hf_prefix, _LAYER)
    yield tensor_rule("decoder.norm", "transformer.norm_f")
    yield tensor_rule("head", "lm_head")


def write(config: ModelConfig) -> dict[str, Any]:
    layer: LayerConfig = single_layer_type(config, "mpt")
    scale = {"default": None, "none": 1.0}.get(str(layer.attention.softmax_scale), layer.attention.softmax_scale)
    fields = {
        "architectures": ["MptForCausalLM"],
        "model_type": "mpt",
        "vocab_size": config.vocab_size,
        "max_seq_len": config.max_seq_len,
        "d_model": config.hidden_size,
        "n_layers": config.stack.num_layers,
        "n_heads": layer.attention.num_heads,
        "expansion_ratio": 4,
        "layer_norm_epsilon": layer.norm.eps,
        "no_bias": True,
        "learned_pos_emb": False,
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": 8,
            "clip_qkv": layer.attention.clip_qkv,
            "softmax_scale": scale,
        },
        "tie_word_embeddings": config.tie_embeddings,
    }
    return fields


FAMILY = Family(
    ("mpt",),
    read,
    rules,
    write,
    prefix="transformer.",
    ignored=(r"lm_head\.weight",),
    head=("lm_head.weight", "transformer.wte.weight"),
)
