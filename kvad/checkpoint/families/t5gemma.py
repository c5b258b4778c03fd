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

from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import ACTIVATIONS, hf_activation, optional, require_rope, rope_fields
from kvad.checkpoint.families._decoder import (
    attention_config,
    build_stack,
    full_rope,
    read_window,
    rms_norm,
    window_pattern,
    with_defaults,
)
from kvad.config import (
    AttentionConfig,
    EmbeddingConfig,
    EncoderInputConfig,
    GatedMLPConfig,
    LanguageHeadConfig,
    LayerConfig,
    ModelConfig,
    StackConfig,
    encoder_hidden_size,
    head_dim,
)
from kvad.errors import CheckpointError

_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "vocab_size": 256000,
}
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
    hidden_size, encoder_size = (side.integer("hidden_size") for side in (decoder, encoder))
    decoder.require_one_of("cross_attention_hidden_size", encoder_size, reason="It must be the encoder's hidden_size.")
    return ModelConfig(
        hidden_size=hidden_size,
        vocab_size=decoder.integer("vocab_size"),
        max_seq_len=decoder.integer("max_position_embeddings"),
        encoder=_stack(encoder, causal=False),
        decoder=_stack(decoder, causal=True),
        embedding=EmbeddingConfig(scale=hidden_size**0.5),
        encoder_input=EncoderInputConfig(
            encoder.integer("max_position_embeddings"),
            EmbeddingConfig(scale=encoder_size**0.5),
            encoder.integer("vocab_size"),
            None if encoder_size == hidden_size else encoder_size,
        ),
        head=LanguageHeadConfig(logit_softcap=optional(decoder, "final_logit_softcapping")),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )


def _stack(fields: HFConfigReader, *, causal: bool) -> StackConfig:
    """Build the stack of one side from G (full) and L (window) layers."""
    bias = fields.flag("attention_bias")
    full = attention_config(
        fields,
        position=full_rope(fields),
        causal=causal,
        qkv_bias=bias,
        out_bias=bias,
        logit_softcap=optional(fields, "attn_logit_softcapping"),
        softmax_scale=fields.number("query_pre_attn_scalar") ** -0.5,
    )
    cross = replace(full, position=None, causal=False) if causal else None
    mlp = GatedMLPConfig(
        fields.integer("intermediate_size"), fields.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    )
    layer = LayerConfig(full, mlp, rms_norm(fields, unit_offset=True), cross)
    layer_types = {"G": layer, "L": replace(layer, attention=replace(full, window=read_window(fields)))}
    return build_stack(layer_types, window_pattern(fields, lambda index: index % 2 == 0), norm_position="sandwich")


def write(config: ModelConfig) -> dict[str, Any]:
    if config.encoder is None or config.decoder is None or config.encoder_input is None:
        raise CheckpointError("t5gemma cannot express this model: it must be an encoder-decoder")
    softcap = config.head.logit_softcap if isinstance(config.head, LanguageHeadConfig) else None
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
    fields = {
        "architectures": ["T5GemmaForConditionalGeneration"],
        "model_type": "t5gemma",
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "encoder": {**encoder, "is_decoder": False},
        "decoder": {**decoder, "is_decoder": True},
    }
    return fields


def _side(config: ModelConfig, side: StackConfig) -> dict[str, Any]:
    layers = [side.layer_config(index) for index in range(side.num_layers)]
    first, windows = layers[0], [layer.attention.window for layer in layers]
    attention, activation = first.attention, first.mlp.activation
    return {
        "model_type": "t5_gemma_module",
        "intermediate_size": first.mlp.intermediate_size,
        "num_hidden_layers": side.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
        "head_dim": head_dim(config, attention),
        "attention_bias": attention.qkv_bias,
        "attn_logit_softcapping": attention.logit_softcap,
        "query_pre_attn_scalar": _scalar(attention, head_dim(config, attention)),
        "rms_norm_eps": first.norm.eps,
        "hidden_activation": "gelu_pytorch_tanh" if activation == "gelu_tanh" else hf_activation(activation),
        "sliding_window": next((size for size in windows if size is not None), None),
        "layer_types": ["full_attention" if size is None else "sliding_attention" for size in windows],
        **rope_fields(require_rope(attention.position, "t5gemma")),
    }


def _scalar(attention: AttentionConfig, dim: int) -> int:
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


FAMILY = Family(
    ("t5gemma",),
    read,
    rules,
    write,
    prefix="model.",
    ignored=(r".*rotary_emb\.inv_freq", r"lm_head\.out_proj\.weight"),
    head=("lm_head.out_proj.weight", "model.decoder.embed_tokens.weight"),
)
