"""MPT (MosaicML 2023): ALiBi, no biases anywhere, q, k and v cut to [-clip_qkv, clip_qkv].

transformers' class reads less than the config says: the MLP is always four times as wide (``expansion_ratio`` counts
for nothing) and ALiBi always there (so is ``learned_pos_emb`` overruled).  That is followed; what the original code
would compute otherwise is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.families.common import one_kind
from kvad.checkpoint.hf import STACKED, Family, Fields, Rule, rule, rules_under
from kvad.config import Alibi, Attention, Embedding, Layer, ModelConfig, Norm, Plain, Stack

__all__ = ["FAMILY"]

_LAYER = {
    "mixer.out": "attn.out_proj",
    "mlp.up": "ffn.up_proj",
    "mlp.down": "ffn.down_proj",
    "norm1": "norm_1",
    "norm2": "norm_2",
}


def read(fields: Fields) -> ModelConfig:
    width, attention = fields.integer("d_model", "hidden_size", default=2048), fields.part("attn_config")
    _refuse(fields, attention)
    scale = attention.get("softmax_scale")
    mixer = Attention(
        fields.integer("n_heads", "num_attention_heads", default=16),
        position=Alibi(),
        clip=attention.number("clip_qkv", default=0.0) or None,
        scale="default" if scale is None else attention.number("softmax_scale"),
    )
    layer = Layer(mixer, Plain(4 * width), Norm("layer", fields.number("layer_norm_epsilon", default=1e-5)))
    return ModelConfig(
        width=width,
        vocab=fields.integer("vocab_size", default=50368),
        limit=fields.integer("max_seq_len", default=2048),
        decoder=Stack(fields.integer("n_layers", "num_hidden_layers", default=24), {"L": layer}),
        embed=Embedding(),
        tie=fields.flag("tie_word_embeddings", True),
    )


def _refuse(fields: Fields, attention: Fields) -> None:
    why = "transformers' class ignores it"
    fields.refuse("no_bias", True, why=why)
    fields.refuse("logit_scale", why=why)
    fields.refuse("norm_type", "low_precision_layernorm", "layernorm", why=why)
    attention.refuse("attn_type", "multihead_attention", why=why)
    attention.refuse("alibi", True, why=why)
    attention.refuse("alibi_bias_max", 8, why=why)
    for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        attention.refuse(name, False, why=why)


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield rule("embed.tokens", "transformer.wte")
    for i in range(config.stack.layers):
        ours, theirs = f"decoder.layers.{i}", f"transformer.blocks.{i}"
        yield rule(tuple(f"{ours}.mixer.{part}" for part in "qkv"), f"{theirs}.attn.Wqkv", STACKED)
        yield from rules_under(ours, theirs, _LAYER)
    yield rule("decoder.norm", "transformer.norm_f")
    yield rule("head", "lm_head")


def write(config: ModelConfig) -> dict[str, Any]:
    layer: Layer = one_kind(config, "mpt")
    scale = {"default": None, "none": 1.0}.get(str(layer.mixer.scale), layer.mixer.scale)
    fields = {
        "architectures": ["MptForCausalLM"],
        "model_type": "mpt",
        "vocab_size": config.vocab,
        "max_seq_len": config.limit,
        "d_model": config.width,
        "n_layers": config.stack.layers,
        "n_heads": layer.mixer.heads,
        "expansion_ratio": 4,
        "layer_norm_epsilon": layer.norm.eps,
        "no_bias": True,
        "learned_pos_emb": False,
        "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": layer.mixer.clip, "softmax_scale": scale},
        "tie_word_embeddings": config.tie,
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
