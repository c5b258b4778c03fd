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
from typing import Any

from kvad import config as cfg
from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families._hf_class import build_layer
from kvad.config import EncoderInputConfig, ModelConfig
from kvad.errors import CheckpointError

_ATTENTION = {"q": "q", "k": "k", "v": "v", "out": "o"}
_FIELDS: hf.FieldTable = {  # of the model
    "hidden_size": hf.integer("d_model"),
    "vocab_size": hf.integer("vocab_size"),
    "max_seq_len": hf.integer("n_positions", default=512),
    **hf.dropouts(**dict.fromkeys(("embedding", "residual", "attention", "hidden", "output"), "dropout_rate")),
}


def _write_position(position: object, config: ModelConfig) -> dict[str, int]:
    if not isinstance(position, cfg.T5BiasConfig):
        raise CheckpointError("t5 cannot express this model: its positions are no bias by buckets of distance")
    return {
        "relative_attention_num_buckets": position.num_buckets,
        "relative_attention_max_distance": position.max_distance,
    }


def _stack_fields(side: str) -> hf.FieldTable:
    """Return the fields of the encoder or decoder."""

    def read_position(fields: HFConfigReader) -> cfg.T5BiasConfig:
        return cfg.T5BiasConfig(
            fields.integer("relative_attention_num_buckets", default=32),
            fields.integer("relative_attention_max_distance", default=128),
            bidirectional=side == "encoder",
            shared=fields.model_type != "umt5",
        )

    layers = hf.integer("num_decoder_layers", default=lambda fields: fields.integer("num_layers"))
    return {
        "stack.num_layers": hf.integer("num_layers") if side == "encoder" else layers,
        "attention.num_heads": hf.integer("num_heads"),
        "attention.head_dim": hf.HFField(
            lambda fields: fields.integer("d_kv"), lambda _, config: {"d_kv": hf.first_head_dim(config)}
        ),
        "attention.position": hf.HFField(read_position, _write_position),
        "attention.causal": side == "decoder",
        "attention.softmax_scale": "none",
        "mlp.intermediate_size": hf.integer("d_ff"),
        "mlp.activation": hf.HFField(_read_activation, lambda value, config: {"dense_act_fn": hf.hf_activation(value)}),
        "norm.eps": hf.number("layer_norm_epsilon", 1e-6),
    }


# ---------------------------------------------------------------- configs


def read(fields: HFConfigReader) -> ModelConfig:
    fields.require_one_of("is_decoder", False, reason="Half of an encoder-decoder is another model.")
    fields.require_one_of("tie_encoder_decoder", False, reason="Encoder and decoder have separate weights in kvad.")
    values = hf.read_table(_FIELDS, fields)
    common = {**values[""], "dropout": cfg.DropoutConfig(**values["dropout"]), "encoder": _stack(fields, "encoder")}
    if _encoder_only(fields):
        return ModelConfig(**common, head=cfg.PoolingHeadConfig())
    scale = common["hidden_size"] ** -0.5 if _scaled(fields) else 1.0
    return ModelConfig(
        **common,
        decoder=_stack(fields, "decoder"),
        encoder_input=EncoderInputConfig(common["max_seq_len"], cfg.EmbeddingConfig()),
        head=cfg.LanguageHeadConfig(logit_scale=scale),
        tie_embeddings=_tied(fields),
    )


def _encoder_only(fields: HFConfigReader) -> bool:
    name = fields.architecture.removeprefix("U").removeprefix("M")
    if name in ("T5ForConditionalGeneration", "T5WithLMHeadModel", "T5Model", ""):
        return not name and not fields.flag("is_encoder_decoder", True)
    if name == "T5EncoderModel":
        return True
    hint = "Supported: T5ForConditionalGeneration, T5EncoderModel."
    raise fields.error(f"architectures {fields.architecture!r} is not supported", hint)


def _tied(fields: HFConfigReader) -> bool:
    return fields.flag("tie_word_embeddings", fields.model_type != "mt5")


def _scaled(fields: HFConfigReader) -> bool:
    """Return True if the logits are multiplied; see the module's docstring."""
    is_version_5 = not str(fields.get("transformers_version", "5")).startswith(("2.", "3.", "4."))
    default = _tied(fields) and not (fields.model_type == "mt5" and is_version_5)
    return fields.flag("scale_decoder_outputs", default)


def _stack(fields: HFConfigReader, side: str) -> cfg.StackConfig:
    values = hf.read_table(_stack_fields(side), fields)
    is_gated = fields.flag("is_gated_act", bool(_mlp_form(fields)[1]))
    mlp = cfg.GatedMLPConfig if is_gated else cfg.PlainMLPConfig
    layer = build_layer(values, mlp, has_cross_attention=side == "decoder")
    return cfg.StackConfig(layer_types={"L": layer}, **values["stack"])


def _mlp_form(fields: HFConfigReader) -> tuple[str, str]:
    """Return the parts of ``feed_forward_proj``, which other fields may override: relu and "", or gated and gelu."""
    form = str(fields.get("feed_forward_proj", "relu" if fields.model_type == "t5" else "gated-gelu"))
    first, _, last = form.partition("-")
    if last and first != "gated":
        raise fields.error(f"feed_forward_proj {form!r} is not supported", "Supported: relu, gated-gelu.")
    return first, last


def _read_activation(fields: HFConfigReader) -> Any:
    first, last = _mlp_form(fields)
    derived = "gelu_new" if (first, last) == ("gated", "gelu") else last or first
    return fields.choice("dense_act_fn", hf.ACTIVATIONS, derived)


def write(config: ModelConfig) -> dict[str, Any]:
    if config.encoder is None:
        raise CheckpointError("t5 cannot express this model: it must have an encoder")
    for stack in (config.encoder, config.stack):
        hf.require_single_layer_type(stack, "t5")
    layer = config.encoder.layer_config(0)
    is_gated, activation = isinstance(layer.mlp, cfg.GatedMLPConfig), hf.hf_activation(layer.mlp.activation)
    form = f"gated-{activation}" if is_gated else activation
    content = {
        **hf.write_table(_FIELDS, config),
        **hf.write_table(_stack_fields("encoder"), config, config.encoder),
        "is_encoder_decoder": config.decoder is not None,
        "feed_forward_proj": "gated-gelu" if form == "gated-gelu_new" else form,
        "is_gated_act": is_gated,
    }
    name = "t5" if getattr(layer.attention.position, "shared", True) else "umt5"
    if config.decoder is not None and isinstance(config.head, cfg.LanguageHeadConfig):
        scaled = config.head.logit_scale != 1.0
        if name == "umt5" and config.tie_embeddings and not scaled:
            raise CheckpointError("umt5 cannot express this model: its tied head is not scaled")
        content |= {"tie_word_embeddings": config.tie_embeddings, "scale_decoder_outputs": scaled}
        content["num_decoder_layers"] = config.decoder.num_layers
    architecture = f"{name.upper()}{'ForConditionalGeneration' if config.decoder else 'EncoderModel'}"
    return {**content, "architectures": [architecture], "model_type": name}


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
    names = {f"attention.{part}": f"0.SelfAttention.{hf_part}" for part, hf_part in _ATTENTION.items()}
    names |= {f"cross_attention.{part}": f"1.EncDecAttention.{hf_part}" for part, hf_part in _ATTENTION.items()}
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
