"""Decoders with the names of GPT-2 (Radford et al. 2019) and of its descendants."""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from typing import Any

from kvad import config as cfg
from kvad.checkpoint import conversion
from kvad.checkpoint.conversion import HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families import _hf_class as base
from kvad.checkpoint.families._hf_class import HFClass, LayerTypes, decoder_family
from kvad.config import ModelConfig
from kvad.errors import CheckpointError

_MASKS = r".*\.attn\.(masked_)?bias"  # buffers of older files
_TENSORS = {
    "embedding.tokens": "transformer.wte",
    "embedding.positions": "transformer.wpe",
    "stack.layers": "transformer.h",
    "stack.norm": "transformer.ln_f",
    "head": "lm_head",
}
_NORMS = {"norm1": "ln_1", "norm2": "ln_2"}
_SIZES: hf.FieldTable = {
    "hidden_size": hf.integer("n_embd"),
    "vocab_size": hf.integer("vocab_size"),
    "tie_embeddings": hf.flag("tie_word_embeddings", True),
    "stack.num_layers": hf.integer("n_layer"),
    "attention.num_heads": hf.integer("n_head"),
    "mlp.intermediate_size": hf.integer("n_inner", default=lambda fields: 4 * fields.integer("n_embd")),
    "mlp.bias": True,
    **hf.layer_norm("layer_norm_epsilon"),
}
_GPT_ATTENTION: hf.FieldTable = {"attention.position": None, **hf.ALL_BIASES}


# ---------------------------------------------------------------- GPT and GPT-2


def _check_gpt2(fields: HFConfigReader) -> None:
    base.check_decoder(fields)
    fields.require_one_of("reorder_and_upcast_attn", False, True)  # affects rounding only


def _gpt2_rules(config: ModelConfig, kvad_prefix: str, hf_prefix: str) -> Iterator[TensorRule]:
    qkv = tuple(f"{kvad_prefix}.attention.{part}" for part in "qkv")
    yield tensor_rule(qkv, f"{hf_prefix}.attn.c_attn", conversion.STACKED_COLUMNS)
    products = {"attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    yield from prefix_rules(kvad_prefix, hf_prefix, products, conversion.TRANSPOSED)


def _read_gpt2_layers(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
    """Return one layer type, or one for each layer if the logits of layer n are divided by n."""
    layers, is_scaled = fields.integer("n_layer"), fields.flag("scale_attn_weights", True)
    first = layer if is_scaled else base.with_attention(layer, softmax_scale=1.0)
    if not fields.flag("scale_attn_by_inverse_layer_idx"):
        return {"L": first}, "L" * layers
    if layers > len(string.ascii_letters):
        raise fields.error(f"scale_attn_by_inverse_layer_idx with {layers} layers is not supported")
    scale = (fields.integer("n_embd") // layer.attention.num_heads) ** -0.5 if is_scaled else 1.0
    others = [base.with_attention(layer, softmax_scale=scale / depth) for depth in range(2, layers + 1)]
    return dict(zip(string.ascii_letters, [first, *others], strict=False)), string.ascii_letters[:layers]


def _write_gpt2_layers(config: ModelConfig) -> dict[str, Any]:
    return {
        "scale_attn_weights": config.stack.layer_config(0).attention.softmax_scale not in ("none", 1.0),
        "scale_attn_by_inverse_layer_idx": len(config.stack.layer_types) > 1,
    }


# Learned positions, LayerNorm before each half, weights stored as [in, out].
_GPT2 = HFClass(
    "gpt2",
    "GPT2LMHeadModel",
    {
        **_SIZES,
        **_GPT_ATTENTION,
        "max_seq_len": hf.integer("n_positions", default=1024),
        "mlp.activation": hf.activation("activation_function", "gelu_new"),
        "embedding.position": hf.learned_positions("n_positions", 1024),
        **hf.dropouts(embedding="embd_pdrop", residual="resid_pdrop", attention="attn_pdrop"),
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

# Radford et al. 2018.  LayerNorm after each half, no final norm.  ``gelu`` in its config is the tanh approximation; the
# MLP is always four times as wide.
_GPT = _GPT2.variant(
    "openai-gpt",
    "OpenAIGPTLMHeadModel",
    fields={
        **_SIZES,
        **_GPT_ATTENTION,
        "hidden_size": hf.integer("n_embd", default=768),
        "vocab_size": hf.integer("vocab_size", default=40478),
        "max_seq_len": hf.integer("n_positions", default=512),
        "stack.num_layers": hf.integer("n_layer", default=12),
        "stack.norm_position": "post",
        "stack.final_norm": False,
        "attention.num_heads": hf.integer("n_head", default=12),
        "mlp.intermediate_size": hf.HFField(lambda fields: 4 * fields.integer("n_embd", default=768)),
        "mlp.activation": hf.HFField(
            lambda fields: fields.choice(
                "afn", {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}, "gelu"
            ),
            lambda value, config: {"afn": "gelu" if value == "gelu_tanh" else value},
        ),
        "embedding.position": hf.learned_positions("n_positions", 512),
    },
    tensors={
        "embedding.tokens": "transformer.tokens_embed",
        "embedding.positions": "transformer.positions_embed",
        "stack.layers": "transformer.h",
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
    check=base.check_decoder,
    layer_types=None,
    layer_rules=base.fused_rules("attn.c_attn", groups=base.kv_heads),
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
        message = f"attention_types {fields.get('attention_types')!r} is not supported"
        raise fields.error(message, "Supported: global and local.") from error
    if layer_pattern != pattern or len(pattern) != fields.integer("num_layers"):
        raise fields.error("attention_types, attention_layers and num_layers disagree")
    return {"G": layer, "L": base.with_attention(layer, window=fields.integer("window_size", default=256))}, pattern


def _write_neo_layers(config: ModelConfig) -> dict[str, Any]:
    windows = [config.stack.layer_config(index).attention.window for index in range(config.stack.num_layers)]
    types = ["local" if window else "global" for window in windows]
    window_size = next(filter(None, windows), 256)
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


# Wang & Komatsuzaki 2021.  Parallel halves after one norm, no biases in attention, one in the head.  RoPE rotates
# neighboring pairs of the first ``rotary_dim`` dimensions.
_GPTJ = _GPT2.variant(
    "gptj",
    "GPTJForCausalLM",
    fields={
        **_SIZES,
        "max_seq_len": hf.integer("n_positions", default=2048),
        "tie_embeddings": hf.flag("tie_word_embeddings"),
        "attention.position": hf.HFField(
            _read_gptj_rope,
            lambda position, config: {
                "rotary_dim": int(hf.first_head_dim(config) * hf.require_rope(position).partial_rotary_factor)
            },
        ),
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
    yield tensor_rule(qvk, f"{hf_prefix}.attn.qkv_proj", conversion.grouped_transform(_CORES))


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
