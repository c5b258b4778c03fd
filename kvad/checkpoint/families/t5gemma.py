"""T5Gemma (Zhang et al. 2025): a Gemma 2 that reads beside a Gemma 2 that writes, of one size or of two.

Norms before and after each branch, of the attention to the source too, which knows neither positions nor windows.  In
every other layer the encoder sees |q - k| < ``sliding_window``, as transformers 4.57 and Gemma's own mask have it;
transformers 5 lets it see one token more on either side, in files that say the same.  A table of tokens for each side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvad.checkpoint.families.common import ACTIVATIONS, optional, rope_fields, rotary, their_activation
from kvad.checkpoint.families.decoders import attention, full_rope, known, letters, rms, stack, window
from kvad.checkpoint.hf import Family, Fields, Rule, rule, rules_under
from kvad.config import Attention, Embedding, Gated, Head, Layer, ModelConfig, Source, Stack, head_dim, source_width
from kvad.errors import CheckpointError

__all__ = ["FAMILY"]

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
    **{f"mixer.{ours}": f"self_attn.{theirs}" for ours, theirs in _ATTENTION.items()},
    **{f"cross.{ours}": f"cross_attn.{theirs}" for ours, theirs in _ATTENTION.items()},
    **{f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    "norm1": "pre_self_attn_layernorm",
    "norm1_after": "post_self_attn_layernorm",
    "norm_cross": "pre_cross_attn_layernorm",
    "norm_cross_after": "post_cross_attn_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "norm2_after": "post_feedforward_layernorm",
}


# ---------------------------------------------------------------- configs


def read(fields: Fields) -> ModelConfig:
    if fields.architecture not in ("", "T5GemmaForConditionalGeneration", "T5GemmaModel"):
        hint = "of this family: T5GemmaForConditionalGeneration"
        raise CheckpointError(f"{fields.where}: architectures {fields.architecture!r} is not supported", hint)
    fields.refuse("is_encoder_decoder", True, why="half of an encoder-decoder is another model")
    encoder, decoder = (known(fields.part(side), **_DEFAULTS) for side in ("encoder", "decoder"))
    width, encoder_width = (side.integer("hidden_size") for side in (decoder, encoder))
    decoder.refuse("cross_attention_hidden_size", encoder_width, why="it is the encoder's hidden_size")
    return ModelConfig(
        width=width,
        vocab=decoder.integer("vocab_size"),
        limit=decoder.integer("max_position_embeddings"),
        encoder=_stack(encoder, causal=False),
        decoder=_stack(decoder, causal=True),
        embed=Embedding(scale=width**0.5),
        source=Source(
            encoder.integer("max_position_embeddings"),
            Embedding(scale=encoder_width**0.5),
            encoder.integer("vocab_size"),
            None if encoder_width == width else encoder_width,
        ),
        head=Head(softcap=optional(decoder, "final_logit_softcapping")),
        tie=fields.flag("tie_word_embeddings", True),
    )


def _stack(fields: Fields, *, causal: bool) -> Stack:
    """G sees all, L a window."""
    bias = fields.flag("attention_bias")
    whole = attention(
        fields,
        position=full_rope(fields),
        causal=causal,
        bias=bias,
        out_bias=bias,
        softcap=optional(fields, "attn_logit_softcapping"),
        scale=fields.number("query_pre_attn_scalar") ** -0.5,
    )
    cross = replace(whole, position=None, causal=False) if causal else None
    mlp = Gated(
        fields.integer("intermediate_size"), fields.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    )
    layer = Layer(whole, mlp, rms(fields, unit_offset=True), cross)
    kinds = {"G": layer, "L": replace(layer, mixer=replace(whole, window=window(fields)))}
    return stack(kinds, letters(fields, lambda index: index % 2 == 0), norm_place="sandwich")


def write(config: ModelConfig) -> dict[str, Any]:
    if config.encoder is None or config.decoder is None or config.source is None:
        raise CheckpointError("t5gemma cannot express this model: it is an encoder-decoder")
    softcap = config.head.softcap if isinstance(config.head, Head) else None
    width, source = source_width(config), config.source
    encoder = {
        **_side(config, config.encoder),
        "vocab_size": source.vocab or config.vocab,
        "hidden_size": width,
        "max_position_embeddings": source.limit,
        "final_logit_softcapping": softcap,
    }
    decoder = {
        **_side(config, config.decoder),
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "max_position_embeddings": config.limit,
        "final_logit_softcapping": softcap,
        "cross_attention_hidden_size": width,
    }
    fields = {
        "architectures": ["T5GemmaForConditionalGeneration"],
        "model_type": "t5gemma",
        "is_encoder_decoder": True,
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tie,
        "encoder": {**encoder, "is_decoder": False},
        "decoder": {**decoder, "is_decoder": True},
    }
    return fields


def _side(config: ModelConfig, side: Stack) -> dict[str, Any]:
    layers = [side.layer(index) for index in range(side.layers)]
    first, windows = layers[0], [layer.mixer.window for layer in layers]
    mixer, activation = first.mixer, first.mlp.activation
    return {
        "model_type": "t5_gemma_module",
        "intermediate_size": first.mlp.hidden,
        "num_hidden_layers": side.layers,
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads or mixer.heads,
        "head_dim": head_dim(config, mixer),
        "attention_bias": mixer.bias,
        "attn_logit_softcapping": mixer.softcap,
        "query_pre_attn_scalar": _scalar(mixer, head_dim(config, mixer)),
        "rms_norm_eps": first.norm.eps,
        "hidden_activation": "gelu_pytorch_tanh" if activation == "gelu_tanh" else their_activation(activation),
        "sliding_window": next((size for size in windows if size is not None), None),
        "layer_types": ["full_attention" if size is None else "sliding_attention" for size in windows],
        **rope_fields(rotary(mixer.position, "t5gemma")),
    }


def _scalar(mixer: Attention, dim: int) -> int:
    """A whole number, as their class has it; reading it back tells whether it is the same scale."""
    if isinstance(mixer.scale, str):
        return dim if mixer.scale == "default" else 1
    return max(1, round(mixer.scale**-2))


# ---------------------------------------------------------------- tensors


def rules(config: ModelConfig) -> Iterator[Rule]:
    for side, embed, stack_ in (("encoder", "source", config.encoder), ("decoder", "embed", config.decoder)):
        assert stack_ is not None
        yield rule(f"{embed}.tokens", f"model.{side}.embed_tokens")
        for i in range(stack_.layers):
            yield from rules_under(f"{side}.layers.{i}", f"model.{side}.layers.{i}", _LAYER)
        yield rule(f"{side}.norm", f"model.{side}.norm")
    yield rule("head", "lm_head.out_proj")


FAMILY = Family(
    ("t5gemma",),
    read,
    rules,
    write,
    prefix="model.",
    ignored=(r".*rotary_emb\.inv_freq", r"lm_head\.out_proj\.weight"),
    head=("lm_head.out_proj.weight", "model.decoder.embed_tokens.weight"),
)
