"""T5Gemma (Zhang et al. 2025).

A Gemma 2 as encoder and a Gemma 2 as decoder, of one size or two.  Norms precede and follow each branch,
cross-attention included, which has neither positions nor windows.  In every other layer the encoder sees |q - k| <
``sliding_window``, as in transformers 4.57 and Gemma's own mask; transformers 5 lets it see one more token on either
side for equal files.  Each side has a separate token table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvad import config as cfg
from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import rope_fields
from kvad.checkpoint.families._decoder import build_stack, read_window, window_pattern, with_defaults, write_layer_types
from kvad.checkpoint.families._fields import read_table, require_rope
from kvad.checkpoint.families.gemma import GEMMA2, write_activation
from kvad.config import EncoderInputConfig, ModelConfig, encoder_hidden_size, head_dim
from kvad.errors import CheckpointError

_DEFAULTS = {**GEMMA2.defaults, "vocab_size": 256000}
_ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}
_LAYER = {
    **{f"attention.{kvad_name}": f"self_attn.{hf_name}" for kvad_name, hf_name in _ATTENTION.items()},
    **{f"cross_attention.{kvad_name}": f"cross_attn.{hf_name}" for kvad_name, hf_name in _ATTENTION.items()},
    **{f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    "norm1": "pre_self_attn_layernorm",
    "norm1_after": "post_self_attn_layernorm",
    "norm_cross": "pre_cross_attn_layernorm",
    "norm_cross_after": "post_cross_attn_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "norm2_after": "post_feedforward_layernorm",
}


# ---------------------------------------------------------------- configs


def read(fields: HFConfigReader) -> ModelConfig:
    if fields.architecture not in ("", "T5GemmaForConditionalGeneration", "T5GemmaModel"):
        hint = "Supported: T5GemmaForConditionalGeneration."
        raise CheckpointError(f"{fields.where}: architectures {fields.architecture!r} is not supported", hint)
    fields.require_one_of("is_encoder_decoder", True, reason="Half of an encoder-decoder is another model.")
    encoder, decoder = (with_defaults(fields.part(side), **_DEFAULTS) for side in ("encoder", "decoder"))
    encoder_size, max_source_len = encoder.integer("hidden_size"), encoder.integer("max_position_embeddings")
    decoder.require_one_of("cross_attention_hidden_size", encoder_size, reason="It must be the encoder's hidden_size.")
    values = read_table(GEMMA2.fields, decoder)
    hidden_size = values[""]["hidden_size"]
    values[""]["tie_embeddings"] = fields.flag("tie_word_embeddings", True)
    return ModelConfig(
        **values[""],
        encoder=_stack(encoder, causal=False),
        decoder=_stack(decoder, causal=True),
        embedding=cfg.EmbeddingConfig(**values["embedding"]),
        encoder_input=EncoderInputConfig(
            max_source_len,
            cfg.EmbeddingConfig(scale=encoder_size**0.5),
            encoder.integer("vocab_size"),
            None if encoder_size == hidden_size else encoder_size,
        ),
        head=cfg.LanguageHeadConfig(**values["head"]),
    )


def _stack(fields: HFConfigReader, *, causal: bool) -> cfg.StackConfig:
    """Build the stack of one side from G (full) and L (window) layers."""
    values = read_table(GEMMA2.fields, fields)
    full = cfg.AttentionConfig(**values["attention"], causal=causal)
    cross = replace(full, position=None, causal=False) if causal else None
    layer = cfg.LayerConfig(full, cfg.GatedMLPConfig(**values["mlp"]), cfg.NormConfig(**values["norm"]), cross)
    layer_types = {"G": layer, "L": replace(layer, attention=replace(full, window=read_window(fields)))}
    return build_stack(layer_types, window_pattern(fields, lambda index: index % 2 == 0), **values["stack"])


def write(config: ModelConfig) -> dict[str, Any]:
    if config.encoder is None or config.decoder is None or config.encoder_input is None:
        raise CheckpointError("t5gemma cannot express this model: it must be an encoder-decoder")
    softcap = config.head.logit_softcap if isinstance(config.head, cfg.LanguageHeadConfig) else None
    encoder_size, encoder_input = encoder_hidden_size(config), config.encoder_input
    encoder = {
        **_side(config, config.encoder),
        "vocab_size": encoder_input.vocab_size or config.vocab_size,
        "hidden_size": encoder_size,
        "max_position_embeddings": encoder_input.max_seq_len,
        "final_logit_softcapping": softcap,
    }
    decoder = {
        **_side(config, config.decoder),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "max_position_embeddings": config.max_seq_len,
        "final_logit_softcapping": softcap,
        "cross_attention_hidden_size": encoder_size,
    }
    return {
        "architectures": ["T5GemmaForConditionalGeneration"],
        "model_type": "t5gemma",
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "encoder": {**encoder, "is_decoder": False},
        "decoder": {**decoder, "is_decoder": True},
    }


def _side(config: ModelConfig, side: cfg.StackConfig) -> dict[str, Any]:
    layer = side.layer_config(0)
    attention = layer.attention
    return {
        "model_type": "t5_gemma_module",
        "intermediate_size": layer.mlp.intermediate_size,
        "num_hidden_layers": side.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
        "head_dim": head_dim(config, attention),
        "attention_bias": attention.qkv_bias,
        "attn_logit_softcapping": attention.logit_softcap,
        "query_pre_attn_scalar": _scalar(attention, head_dim(config, attention)),
        "rms_norm_eps": layer.norm.eps,
        "hidden_activation": write_activation(layer.mlp.activation),
        **write_layer_types(side),
        **rope_fields(require_rope(attention.position)),
    }


def _scalar(attention: cfg.AttentionConfig, dim: int) -> int:
    """Return an integer, as the class requires; reading it back detects a different scale."""
    if isinstance(attention.softmax_scale, str):
        return dim if attention.softmax_scale == "default" else 1
    return max(1, round(attention.softmax_scale**-2))


# ---------------------------------------------------------------- tensors


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    for side, embedding, stack in (
        ("encoder", "encoder_embedding", config.encoder),
        ("decoder", "embedding", config.decoder),
    ):
        assert stack is not None
        yield tensor_rule(f"{embedding}.tokens", f"model.{side}.embed_tokens")
        for i in range(stack.num_layers):
            yield from prefix_rules(f"{side}.layers.{i}", f"model.{side}.layers.{i}", _LAYER)
        yield tensor_rule(f"{side}.norm", f"model.{side}.norm")
    yield tensor_rule("head", "lm_head.out_proj")


FAMILIES = (
    Family(
        ("t5gemma",),
        read,
        rules,
        write,
        prefix="model.",
        ignored=(r".*rotary_emb\.inv_freq", r"lm_head\.out_proj\.weight"),
        head=("lm_head.out_proj.weight", "model.decoder.embed_tokens.weight"),
    ),
)
