"""Decoders with fairseq's names: OPT, XGLM, BioGPT."""

from __future__ import annotations

import math

from kvad import config as cfg
from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families._decoder import DecoderClass, decoder_family
from kvad.config import ModelConfig, embedding_size

_LAYER = {
    **{f"attention.{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")},
    "norm1": "self_attn_layer_norm",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
    "norm2": "final_layer_norm",
}


def _check_decoder(fields: HFConfigReader) -> None:
    fields.require_one_of(
        "add_cross_attention", False, reason="A decoder of an encoder-decoder is read with its encoder."
    )


def _embedding_scale(size_name: str) -> hf.HFField:
    def read(fields: HFConfigReader) -> float:
        return math.sqrt(fields.integer(size_name)) if fields.flag("scale_embedding", True) else 1.0

    return hf.HFField(read, lambda scale, config: {"scale_embedding": scale != 1.0})


_COMMON: hf.FieldTable = {
    "vocab_size": hf.integer("vocab_size"),
    "tie_embeddings": hf.flag("tie_word_embeddings", True),
    "attention.position": None,
    "attention.qkv_bias": True,
    "attention.out_bias": True,
    "mlp.bias": True,
    "norm.kind": "layer",
    "norm.eps": 1e-5,
    "norm.bias": True,
}

# ---------------------------------------------------------------- XGLM, BioGPT

# Lin et al. 2021.  Sinusoids from position 2 on, LayerNorm before each half.  Embeddings are multiplied by
# sqrt(hidden_size), and the norms have a fixed epsilon.  The sinusoids are not weights, but old files may have them.
_XGLM = DecoderClass(
    "xglm",
    "XGLMForCausalLM",
    {
        **_COMMON,
        "hidden_size": hf.integer("d_model"),
        "max_seq_len": hf.integer("max_position_embeddings", default=2048),
        "stack.num_layers": hf.integer("num_layers"),
        "attention.num_heads": hf.integer("attention_heads"),
        "mlp.intermediate_size": hf.integer("ffn_dim"),
        "mlp.activation": hf.activation("activation_function", "gelu"),
        "embedding.position": cfg.SinusoidalPositionsConfig(form="fairseq", offset=2),
        "embedding.scale": _embedding_scale("d_model"),
    },
    layer=_LAYER,
    tensors={
        "embedding.tokens": "model.embed_tokens",
        "decoder.layers": "model.layers",
        "decoder.norm": "model.layer_norm",
        "head": "lm_head",
    },
    mlp=cfg.PlainMLPConfig,
    check=_check_decoder,
    constants={},
    ignored=(r"embed_positions\.weights",),
)

# Luo et al. 2022.  Learned positions, which two unused rows precede; embeddings are multiplied by sqrt(hidden_size).
# transformers' class normalizes with epsilon 1e-5 whatever ``layer_norm_eps`` is; kvad does the same.
_BIOGPT = _XGLM.variant(
    "biogpt",
    "BioGptForCausalLM",
    fields={
        **_COMMON,
        "hidden_size": hf.integer("hidden_size"),
        "max_seq_len": hf.integer("max_position_embeddings", default=1024),
        "stack.num_layers": hf.integer("num_hidden_layers"),
        "attention.num_heads": hf.integer("num_attention_heads"),
        "mlp.intermediate_size": hf.integer("intermediate_size"),
        "mlp.activation": hf.activation("hidden_act", "gelu"),
        "norm.eps": hf.HFField(lambda fields: 1e-5, lambda eps, config: {"layer_norm_eps": eps}),
        "embedding.position": hf.learned_positions("max_position_embeddings", 1024, offset=2),
        "embedding.scale": _embedding_scale("hidden_size"),
    },
    tensors={
        "embedding.tokens": "biogpt.embed_tokens",
        "embedding.positions": "biogpt.embed_positions",
        "decoder.layers": "biogpt.layers",
        "decoder.norm": "biogpt.layer_norm",
        "head": "output_projection",
    },
    prefix="biogpt.",
    ignored=(),
)


# ---------------------------------------------------------------- OPT


def _read_table_size(fields: HFConfigReader) -> int | None:
    """Return the size of the embedding, or None if it is the model's."""
    hidden_size = fields.integer("hidden_size")
    size = fields.integer("word_embed_proj_dim", default=hidden_size)
    return None if size == hidden_size else size


def _read_projection(fields: HFConfigReader) -> cfg.HeadTransformConfig | None:
    size = _read_table_size(fields)
    return None if size is None else cfg.HeadTransformConfig(activation=None, bias=False, output_size=size)


def _write_final_norm(final_norm: bool, config: ModelConfig) -> dict[str, bool]:
    return {"_remove_final_layer_norm": config.stack.norm_position == "pre" and not final_norm}


_AFFINE = hf.flag("layer_norm_elementwise_affine", True)
# Zhang et al. 2022.  Learned positions after two unused rows, ReLU, LayerNorm with a fixed epsilon.  Only OPT-350M
# normalizes after each half (``do_layer_norm_before`` false), has no final norm, and has a smaller embedding, with a
# projection to and from it.  ``_remove_final_layer_norm`` marks files written before a bug was fixed.
_OPT = _XGLM.variant(
    "opt",
    "OPTForCausalLM",
    fields={
        **_COMMON,
        "hidden_size": hf.integer("hidden_size"),
        "max_seq_len": hf.integer("max_position_embeddings", default=2048),
        "stack.num_layers": hf.integer("num_hidden_layers"),
        "stack.norm_position": hf.flag("do_layer_norm_before", True, values=("post", "pre")),
        "stack.final_norm": hf.HFField(
            lambda fields: fields.flag("do_layer_norm_before", True) and not fields.flag("_remove_final_layer_norm"),
            _write_final_norm,
        ),
        "attention.num_heads": hf.integer("num_attention_heads"),
        **hf.biases("enable_bias", True),
        "mlp.intermediate_size": hf.integer("ffn_dim"),
        "mlp.activation": hf.activation("activation_function", "relu"),
        "mlp.bias": hf.flag("enable_bias", True),
        "norm.bias": _AFFINE,
        "norm.weight": _AFFINE,
        "embedding.position": hf.learned_positions("max_position_embeddings", 2048, offset=2),
        "embedding.embedding_size": hf.HFField(
            _read_table_size, lambda _, config: {"word_embed_proj_dim": embedding_size(config)}
        ),
        "embedding.projection": hf.HFField(lambda fields: "end" if _read_table_size(fields) is None else "start"),
        "head.transform": hf.HFField(_read_projection),
    },
    tensors={
        "embedding.tokens": "model.decoder.embed_tokens",
        "embedding.positions": "model.decoder.embed_positions",
        "embedding.projection": "model.decoder.project_in",
        "decoder.layers": "model.decoder.layers",
        "decoder.norm": "model.decoder.final_layer_norm",
        "head.transform.dense": "model.decoder.project_out",
        "head": "lm_head",
    },
    check=None,
    ignored=(),
)

FAMILIES = tuple(map(decoder_family, (_XGLM, _BIOGPT, _OPT)))
