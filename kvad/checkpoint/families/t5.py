"""T5 and T5 v1.1 (Raffel et al. 2020), mT5 (Xue et al. 2021), UMT5 (Chung et al. 2023).

The only positions are a bias by buckets of distance: one table per stack, in UMT5 one per layer; cross-attention has
none.  Attention logits are not scaled, RMSNorm precedes each half, and there are no biases.  Later versions than v1.0
have a gated MLP.

The logits of v1.0 are multiplied by hidden_size^-0.5; those of later versions are not.  A file states this in two ways:
transformers 4 multiplies if ``tie_word_embeddings`` is true (its default, except for mT5's); 5 always ties, and
writes ``scale_decoder_outputs`` for T5; it never multiplies for mT5 and always for UMT5.  kvad uses
``scale_decoder_outputs``, and without it ``tie_word_embeddings``, for mT5 only in files of transformers 4.  A file is
thus read as the version that wrote it does, and Google's UMT5 as it was trained: with the logits of 4.57.

T5 has no maximum length: ``n_positions``, which older files have (512, the rows' length in training), is used for
source and target alike.  An mT5 is written as the T5 v1.1 that it is.  ``dropout_rate`` is one probability for all
places, the outputs of the stacks included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvad import config as cfg
from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families._common import ACTIVATIONS, dropout_fields, hf_activation, read_dropout, single_layer_type
from kvad.config import EncoderInputConfig, ModelConfig, head_dim
from kvad.errors import CheckpointError

_ATTENTION = {"q": "q", "k": "k", "v": "v", "out": "o"}
_DROPOUT = dict.fromkeys(("embedding", "residual", "attention", "hidden", "output"), "dropout_rate")
_GATED = {"relu": "gated-relu", "gelu_tanh": "gated-gelu", "silu": "gated-silu"}


# ---------------------------------------------------------------- configs


def read(fields: HFConfigReader) -> ModelConfig:
    fields.require_one_of("is_decoder", False, reason="Half of an encoder-decoder is another model.")
    fields.require_one_of("tie_encoder_decoder", False, reason="Encoder and decoder have separate weights in kvad.")
    hidden_size, max_seq_len = fields.integer("d_model"), fields.integer("n_positions", default=512)
    layers = fields.integer("num_layers")
    encoder = _layer(fields, bidirectional=True)
    common: dict[str, Any] = {
        "hidden_size": hidden_size,
        "vocab_size": fields.integer("vocab_size"),
        "max_seq_len": max_seq_len,
        "encoder": cfg.StackConfig(layers, {"L": encoder}),
        "dropout": read_dropout(fields, **_DROPOUT),
    }
    if _encoder_only(fields):
        return ModelConfig(**common, head=cfg.PoolingHeadConfig())
    decoder = _layer(fields, bidirectional=False)
    cross = replace(encoder.attention, position=None)
    return ModelConfig(
        **common,
        decoder=cfg.StackConfig(
            fields.integer("num_decoder_layers", default=layers), {"L": replace(decoder, cross_attention=cross)}
        ),
        encoder_input=EncoderInputConfig(max_seq_len, cfg.EmbeddingConfig()),
        head=cfg.LanguageHeadConfig(logit_scale=hidden_size**-0.5 if _scaled(fields) else 1.0),
        tie_embeddings=_tied(fields),
    )


def _encoder_only(fields: HFConfigReader) -> bool:
    name = fields.architecture.removeprefix("U").removeprefix("M")
    if name in ("T5ForConditionalGeneration", "T5WithLMHeadModel", "T5Model", ""):
        return not name and not fields.flag("is_encoder_decoder", True)
    if name == "T5EncoderModel":
        return True
    hint = "Supported: T5ForConditionalGeneration, T5EncoderModel."
    raise CheckpointError(f"{fields.where}: architectures {fields.architecture!r} is not supported", hint)


def _tied(fields: HFConfigReader) -> bool:
    return fields.flag("tie_word_embeddings", fields.model_type != "mt5")


def _scaled(fields: HFConfigReader) -> bool:
    """Return True if the logits are multiplied; see the module's docstring."""
    is_version_5 = not str(fields.get("transformers_version", "5")).startswith(("2.", "3.", "4."))
    default = _tied(fields) and not (fields.model_type == "mt5" and is_version_5)
    return fields.flag("scale_decoder_outputs", default)


def _layer(fields: HFConfigReader, *, bidirectional: bool) -> cfg.LayerConfig:
    position = cfg.T5BiasConfig(
        fields.integer("relative_attention_num_buckets", default=32),
        fields.integer("relative_attention_max_distance", default=128),
        bidirectional=bidirectional,
        shared=fields.model_type != "umt5",
    )
    attention = cfg.AttentionConfig(
        fields.integer("num_heads"),
        head_dim=fields.integer("d_kv"),
        position=position,
        causal=not bidirectional,
        softmax_scale="none",
    )
    return cfg.LayerConfig(
        attention, _mlp(fields), cfg.NormConfig("rms", fields.number("layer_norm_epsilon", default=1e-6))
    )


def _mlp(fields: HFConfigReader) -> cfg.PlainMLPConfig | cfg.GatedMLPConfig:
    """Read the MLP from ``feed_forward_proj``, or the fields that override it."""
    form = str(fields.get("feed_forward_proj", "relu" if fields.model_type == "t5" else "gated-gelu"))
    first, _, last = form.partition("-")
    derived = "gelu_new" if form == "gated-gelu" else last or first
    if last and first != "gated":
        raise CheckpointError(
            f"{fields.where}: feed_forward_proj {form!r} is not supported", "Supported: relu, gated-gelu."
        )
    activation = fields.choice("dense_act_fn", ACTIVATIONS, derived)
    kind = cfg.GatedMLPConfig if fields.flag("is_gated_act", bool(last)) else cfg.PlainMLPConfig
    return kind(fields.integer("d_ff"), activation)


def write(config: ModelConfig) -> dict[str, Any]:
    if config.encoder is None:
        raise CheckpointError("t5 cannot express this model: it must have an encoder")
    layer: cfg.LayerConfig = single_layer_type(config.encoder, "t5")
    single_layer_type(config, "t5")
    position, gated = layer.attention.position, isinstance(layer.mlp, cfg.GatedMLPConfig)
    if not isinstance(position, cfg.T5BiasConfig):
        raise CheckpointError("t5 cannot express this model: its positions are no bias by buckets of distance")
    name = "t5" if position.shared else "umt5"
    stem = name.upper()
    fields = {
        "architectures": [f"{stem}ForConditionalGeneration" if config.decoder else f"{stem}EncoderModel"],
        "model_type": name,
        "is_encoder_decoder": config.decoder is not None,
        "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len,
        "d_model": config.hidden_size,
        "d_kv": head_dim(config, layer.attention),
        "d_ff": layer.mlp.intermediate_size,
        "num_layers": config.encoder.num_layers,
        "num_heads": layer.attention.num_heads,
        "relative_attention_num_buckets": position.num_buckets,
        "relative_attention_max_distance": position.max_distance,
        "layer_norm_epsilon": layer.norm.eps,
        **_mlp_fields(layer.mlp.activation, gated),
        **dropout_fields(config, **_DROPOUT),
    }
    if config.decoder is not None and isinstance(config.head, cfg.LanguageHeadConfig):
        scaled = config.head.logit_scale != 1.0
        if name == "umt5" and config.tie_embeddings and not scaled:
            raise CheckpointError("umt5 cannot express this model: its tied head is not scaled")
        fields |= {"tie_word_embeddings": config.tie_embeddings, "scale_decoder_outputs": scaled}
        fields["num_decoder_layers"] = config.decoder.num_layers
    return fields


def _mlp_fields(activation: str, gated: bool) -> dict[str, Any]:
    hf_name = hf_activation(activation)
    form = _GATED.get(activation, f"gated-{hf_name}") if gated else hf_name
    return {"feed_forward_proj": form, "dense_act_fn": hf_name, "is_gated_act": gated}


# ---------------------------------------------------------------- tensors


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield tensor_rule("embedding.tokens", "shared")
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack is None:
            continue
        for i in range(stack.num_layers):
            yield from prefix_rules(f"{side}.layers.{i}", f"{side}.block.{i}.layer", _names(stack.layer_config(i)))
        table = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield tensor_rule(f"{side}.relative_bias.{stack.layer_type(0)}", table)
        yield tensor_rule(f"{side}.norm", f"{side}.final_layer_norm")
    yield tensor_rule("head", "lm_head")


def _names(layer: cfg.LayerConfig) -> dict[str, str]:
    last = 1 if layer.cross_attention is None else 2
    names = {f"attention.{kvad_name}": f"0.SelfAttention.{hf_name}" for kvad_name, hf_name in _ATTENTION.items()}
    names |= {
        f"cross_attention.{kvad_name}": f"1.EncDecAttention.{hf_name}" for kvad_name, hf_name in _ATTENTION.items()
    }
    names |= {"norm1": "0.layer_norm", "norm_cross": "1.layer_norm", "norm2": f"{last}.layer_norm"}
    up = "wi_1" if isinstance(layer.mlp, cfg.GatedMLPConfig) else "wi"
    names |= {"mlp.gate": f"{last}.DenseReluDense.wi_0", "mlp.up": f"{last}.DenseReluDense.{up}"}
    names["mlp.down"] = f"{last}.DenseReluDense.wo"
    return names | {"attention.relative_bias": "0.SelfAttention.relative_attention_bias.weight"}


FAMILIES = (
    Family(
        ("t5", "mt5", "umt5"),
        read,
        rules,
        write,
        ignored=(r"lm_head\.weight", r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"),
        head=("lm_head.weight", "shared.weight"),
        copies={"shared.weight": ("decoder.embed_tokens.weight", "encoder.embed_tokens.weight")},
    ),
)
