"""Decoders with the names of GPT-2 (Radford et al. 2019) and of its descendants."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvad import config as cfg
from kvad.checkpoint.conversion import (
    STACKED_COLUMNS,
    TRANSPOSED,
    HFConfigReader,
    TensorRule,
    grouped_transform,
    prefix_rules,
    tensor_rule,
)
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families._decoder import (
    DecoderClass,
    LayerTypes,
    decoder_family,
    fused_qkv,
    kv_heads,
    with_attention,
)
from kvad.config import ModelConfig, head_dim
from kvad.errors import CheckpointError

_MASKS = r".*\.attn\.(masked_)?bias"  # buffers of older files
_TENSORS = {
    "embedding.tokens": "transformer.wte",
    "embedding.positions": "transformer.wpe",
    "decoder.layers": "transformer.h",
    "decoder.norm": "transformer.ln_f",
    "head": "lm_head",
}
_NORMS = {"norm1": "ln_1", "norm2": "ln_2"}


def _four_times(name: str) -> Callable[[HFConfigReader], int]:
    return lambda fields: 4 * fields.integer(name)


_SIZES: hf.FieldTable = {
    "hidden_size": hf.integer("n_embd"),
    "vocab_size": hf.integer("vocab_size"),
    "tie_embeddings": hf.flag("tie_word_embeddings", True),
    "stack.num_layers": hf.integer("n_layer"),
    "attention.num_heads": hf.integer("n_head"),
    "mlp.intermediate_size": hf.integer("n_inner", default=_four_times("n_embd")),
    "mlp.bias": True,
    **hf.layer_norm("layer_norm_epsilon"),
}
_BIASES: hf.FieldTable = {"attention.position": None, "attention.qkv_bias": True, "attention.out_bias": True}


def check_decoder(fields: HFConfigReader) -> None:
    fields.require_one_of(
        "add_cross_attention", False, reason="A decoder of an encoder-decoder is read with its encoder."
    )


# ---------------------------------------------------------------- GPT and GPT-2


def _check_gpt2(fields: HFConfigReader) -> None:
    check_decoder(fields)
    fields.require_one_of("reorder_and_upcast_attn", False, True)  # affects rounding only


def _gpt2_rules(config: ModelConfig, kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
    qkv = tuple(f"{kvad_prefix}.attention.{part}" for part in "qkv")
    yield tensor_rule(qkv, f"{hf_prefix}.attn.c_attn", STACKED_COLUMNS)
    products = {"attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    yield from prefix_rules(kvad_prefix, hf_prefix, products, TRANSPOSED)


def _read_gpt2_layers(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
    """Return one layer type, or one for each layer if the logits of layer n are divided by n."""
    layers, is_scaled = fields.integer("n_layer"), fields.flag("scale_attn_weights", True)
    if not fields.flag("scale_attn_by_inverse_layer_idx"):
        return {"L": layer if is_scaled else with_attention(layer, softmax_scale=1.0)}, "L" * layers
    if layers > len(string.ascii_letters):
        raise CheckpointError(f"{fields.where}: scale_attn_by_inverse_layer_idx with {layers} layers is not supported")
    scale = (fields.integer("n_embd") // layer.attention.num_heads) ** -0.5 if is_scaled else 1.0
    scaled_layers = [with_attention(layer, softmax_scale=scale / depth) for depth in range(1, layers + 1)]
    if is_scaled and layers:
        scaled_layers[0] = layer
    pattern = string.ascii_letters[:layers]
    return dict(zip(pattern, scaled_layers, strict=True)), pattern


def _write_gpt2_layers(config: ModelConfig) -> dict[str, Any]:
    return {
        "scale_attn_weights": config.stack.layer_config(0).attention.softmax_scale not in ("none", 1.0),
        "scale_attn_by_inverse_layer_idx": len(config.stack.layer_types) > 1,
    }


# Learned positions, LayerNorm before each half, weights stored as [in, out].
_GPT2 = DecoderClass(
    "gpt2",
    "GPT2LMHeadModel",
    {
        **_SIZES,
        **_BIASES,
        "max_seq_len": hf.integer("n_positions", default=1024),
        "mlp.activation": hf.activation("activation_function", "gelu_new"),
        "embedding.position": hf.learned_positions("n_positions", 1024),
        "dropout.embedding": hf.dropout("embd_pdrop"),
        "dropout.residual": hf.dropout("resid_pdrop"),
        "dropout.attention": hf.dropout("attn_pdrop"),
    },
    layer=_NORMS,
    tensors=_TENSORS,
    mlp=cfg.PlainMLPConfig,
    check=_check_gpt2,
    layer_types=LayerTypes(_read_gpt2_layers, _write_gpt2_layers),
    layer_rules=_gpt2_rules,
    constants={},
    prefix="transformer.",
    ignored=(r".*attn\.(masked_)?bias",),
)

_GPT_ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}  # Hugging Face -> kvad
# Radford et al. 2018.  LayerNorm after each half, no final norm.  ``gelu`` in its config is the tanh approximation; the
# MLP is always four times as wide.
_GPT = _GPT2.variant(
    "openai-gpt",
    "OpenAIGPTLMHeadModel",
    fields={
        **_SIZES,
        **_BIASES,
        "hidden_size": hf.integer("n_embd", default=768),
        "vocab_size": hf.integer("vocab_size", default=40478),
        "max_seq_len": hf.integer("n_positions", default=512),
        "stack.num_layers": hf.integer("n_layer", default=12),
        "stack.norm_position": "post",
        "stack.final_norm": False,
        "attention.num_heads": hf.integer("n_head", default=12),
        "mlp.intermediate_size": hf.HFField(lambda fields: 4 * fields.integer("n_embd", default=768)),
        "mlp.activation": hf.HFField(
            lambda fields: fields.choice("afn", _GPT_ACTIVATIONS, "gelu"),
            lambda value, config: {"afn": "gelu" if value == "gelu_tanh" else value},
        ),
        "embedding.position": hf.learned_positions("n_positions", 512),
    },
    tensors={
        "embedding.tokens": "transformer.tokens_embed",
        "embedding.positions": "transformer.positions_embed",
        "decoder.layers": "transformer.h",
        "head": "lm_head",
    },
    check=None,
    layer_types=None,
    ignored=(r"position_ids", r".*\.attn\.bias"),
)


# ---------------------------------------------------------------- GPT-BigCode, GPT-Neo


# Li et al. 2023, the first StarCoder.  GPT-2 with one key-value head for all queries.  Weights are stored as [out, in]:
# all q, then k, then v; without ``multi_query``, by head.
_BIGCODE = _GPT2.variant(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    fields={
        **{name: entry for name, entry in _GPT2.fields.items() if not name.startswith("dropout.")},
        "attention.num_kv_heads": hf.HFField(
            lambda fields: 1 if fields.flag("multi_query", True) else fields.integer("n_head"),
            lambda value, config: {"multi_query": value == 1},
        ),
        "attention.softmax_scale": hf.flag("scale_attn_weights", True, values=("none", "default")),
        "mlp.activation": hf.activation("activation_function", "gelu_pytorch_tanh"),
    },
    layer={"attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj", **_NORMS},
    check=check_decoder,
    layer_types=None,
    layer_rules=fused_qkv("attn.c_attn", kv_heads),
    ignored=(_MASKS,),
)


def _read_neo_layers(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
    """Read ``attention_types``, which ``attention_layers`` repeats layer by layer."""
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
    local = with_attention(layer, window=fields.integer("window_size", default=256))
    return {"G": layer, "L": local}, pattern


def _write_neo_layers(config: ModelConfig) -> dict[str, Any]:
    windows = [config.stack.layer_config(index).attention.window for index in range(config.stack.num_layers)]
    types = ["global" if window is None else "local" for window in windows]
    window_size = next((window for window in windows if window is not None), 256)
    return {"attention_types": [[types, 1]], "attention_layers": types, "window_size": window_size}


# Black et al. 2021.  GPT-2 with a window in every second layer and unscaled attention logits.  Only the output of
# attention has a bias.
_NEO = _GPT2.variant(
    "gpt_neo",
    "GPTNeoForCausalLM",
    fields={
        **_SIZES,
        "hidden_size": hf.integer("hidden_size"),
        "max_seq_len": hf.integer("max_position_embeddings", default=2048),
        "stack.num_layers": hf.integer("num_layers"),
        "attention.num_heads": hf.integer("num_heads"),
        "attention.position": None,
        "attention.out_bias": True,
        "attention.softmax_scale": "none",
        "mlp.intermediate_size": hf.integer(
            "intermediate_size", default=lambda fields: 4 * fields.integer("hidden_size")
        ),
        "mlp.activation": hf.activation("activation_function", "gelu_new"),
        "embedding.position": hf.learned_positions("max_position_embeddings", 2048),
    },
    layer={
        **{f"attention.{part}": f"attn.attention.{part}_proj" for part in ("q", "k", "v", "out")},
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
        **_NORMS,
    },
    check=None,
    layer_types=LayerTypes(_read_neo_layers, _write_neo_layers),
    layer_rules=None,
    ignored=(r".*\.attention\.(masked_)?bias",),
)


# ---------------------------------------------------------------- GPT-J, CodeGen


def _check_gptj(fields: HFConfigReader) -> None:
    for name in ("rotary", "scale_attn_weights"):
        fields.require_one_of(name, True, reason="transformers' class ignores it.")


def _read_gptj_rope(fields: HFConfigReader) -> cfg.RopeConfig:
    dim = fields.integer("n_embd") // fields.integer("n_head")
    return cfg.RopeConfig(partial_rotary_factor=fields.integer("rotary_dim") / dim, interleaved=True)


def _write_gptj_rope(position: object, config: ModelConfig) -> dict[str, Any]:
    dim = head_dim(config, config.stack.layer_config(0).attention)
    return {"rotary_dim": int(dim * hf.require_rope(position).partial_rotary_factor)}


# Wang & Komatsuzaki 2021.  Parallel halves after one norm, no biases in attention, one in the head.  RoPE rotates
# neighboring pairs of the first ``rotary_dim`` dimensions.
_GPTJ = _GPT2.variant(
    "gptj",
    "GPTJForCausalLM",
    fields={
        **_SIZES,
        "max_seq_len": hf.integer("n_positions", default=2048),
        "tie_embeddings": hf.flag("tie_word_embeddings"),
        "attention.position": hf.HFField(_read_gptj_rope, _write_gptj_rope),
        "mlp.activation": hf.activation("activation_function", "gelu_new"),
        "stack.norm_position": "parallel",
        "head.bias": True,
    },
    layer={
        **{f"attention.{part}": f"attn.{part}_proj" for part in ("q", "k", "v", "out")},
        "mlp.up": "mlp.fc_in",
        "mlp.down": "mlp.fc_out",
        "norm1": "ln_1",
    },
    tensors={name: hf_name for name, hf_name in _TENSORS.items() if name != "embedding.positions"},
    check=_check_gptj,
    layer_types=None,
    layer_rules=None,
    ignored=(_MASKS, r".*\.attn\.embed_positions"),
)

_CORES = 4  # of the TPU that trained CodeGen


def _write_codegen_heads(heads: int, config: ModelConfig) -> dict[str, Any]:
    if heads % _CORES:
        raise CheckpointError("number of heads is not a multiple of 4")
    return {"n_head": heads}


def _codegen_rules(config: ModelConfig, kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
    qvk = tuple(f"{kvad_prefix}.attention.{part}" for part in "qvk")
    yield tensor_rule(qvk, f"{hf_prefix}.attn.qkv_proj", grouped_transform(_CORES))


# Nijkamp et al. 2022.  GPT-J with q, v, k, in this order, fused in four parts of the outputs.
_CODEGEN = _GPTJ.variant(
    "codegen",
    "CodeGenForCausalLM",
    fields={
        **_GPTJ.fields,
        "attention.num_heads": hf.HFField(_SIZES["attention.num_heads"].read, _write_codegen_heads),
    },
    layer={name: _GPTJ.layer[name] for name in ("attention.out", "mlp.up", "mlp.down", "norm1")},
    layer_rules=_codegen_rules,
)

FAMILIES = tuple(map(decoder_family, (_GPT2, _GPT, _BIGCODE, _NEO, _GPTJ, _CODEGEN)))
