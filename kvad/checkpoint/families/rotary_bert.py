"""Encoders like BERT with rotary positions: RoFormer, Nomic BERT, ModernBERT."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvad import config as cfg
from kvad import model
from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families._encoder import EncoderClass, HeadNames, TaskHead, TensorLookup, encoder_only, read_labels
from kvad.checkpoint.families._hf_class import LayerTypes, fused_rules, with_attention
from kvad.checkpoint.families.bert import BERT, BERT_HEADS, FIELDS
from kvad.config import ModelConfig

# ---------------------------------------------------------------- RoFormer


def _check_roformer(fields: HFConfigReader) -> None:
    fields.require_one_of("rotary_value", False, reason="Rotated values are not supported.")
    causal = fields.flag("is_decoder")
    if causal != fields.architecture.endswith("ForCausalLM"):
        raise fields.error(
            f"is_decoder {causal} with {fields.architecture} is not supported",
            "RoFormerForCausalLM is a decoder, all other classes are encoders.",
        )
    encoder_only(fields.derive({**fields.content, "is_decoder": False}))


class _RoFormerClass(EncoderClass):
    """RoFormer, which may be a decoder, and whose files have a table of its angles."""

    def task_heads(self, fields: HFConfigReader, values: hf.FieldValues) -> dict[str, TaskHead]:
        heads = super().task_heads(fields, values)
        return {**heads, "ForCausalLM": heads["ForMaskedLM"]}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        content = super().write(config)
        return content if config.decoder is None else {**content, "architectures": ["RoFormerForCausalLM"]}

    def resolve(self, config: ModelConfig, lookup: TensorLookup) -> ModelConfig:
        """Select the head by the stored tensors; a decoder always has a language head."""
        return config if config.decoder is not None else super().resolve(config, lookup)

    def table(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """Yield the table [max_seq_len, D]: the sines of all angles, then their cosines."""
        dim = hf.first_head_dim(config)
        positions = torch.arange(config.max_seq_len)
        table = model.positions.sinusoidal_embedding(positions, dim, cfg.SinusoidalPositionsConfig(form="concat"))
        yield f"{self.base(config)}encoder.embed_positions.weight", table


# Su et al. 2021.  BERT's layers with interleaved rotary positions instead of learned ones.  Files have the table of
# sines and cosines (``embed_positions``) as a tensor, which is checked and written.  The embedding may be narrower than
# the model. ``RoFormerForCausalLM`` with ``is_decoder`` is a decoder of the same layers.
_ROFORMER = _RoFormerClass.like(
    BERT,
    model_type="roformer",
    architecture="RoFormer",
    fields={
        **FIELDS,
        "max_seq_len": hf.integer("max_position_embeddings", default=1536),
        "attention.position": cfg.RopeConfig(interleaved=True),
        "attention.causal": hf.flag("is_decoder"),
        "embedding.position": None,
        "embedding.embedding_size": hf.table_size(),
    },
    check=_check_roformer,
    constants={"add_cross_attention": False, "position_embedding_type": "absolute", "rotary_value": False},
    prefix="roformer.",
    ignored=(r"encoder\.embed_positions\.weight",),
    names=BERT_HEADS._replace(classifier_dense="classifier.dense", sequence="classifier.out_proj"),
    sequence_activation=None,
    has_pooler=False,
)


# ---------------------------------------------------------------- Nomic BERT


def _read_nomic_head_dim(fields: HFConfigReader) -> Any:
    size, hidden_size = fields.get("head_dim"), fields.integer("hidden_size")
    return None if size is not None and size * fields.integer("num_attention_heads") == hidden_size else size


# Nussbaum et al. 2024.  BERT's order of norms with rotary positions, SwiGLU, no biases in the layers.  kvad reads the
# config of transformers 5's class; tensors have the names of the authors' code (``emb_ln``, ``Wqkv``, ``fc11`` for up
# and ``fc12`` for gate). Their older config (``n_embd``, ...) is not supported.
_NOMIC_BERT = BERT.variant(
    "nomic_bert",
    "NomicBert",
    fields={
        **{name: FIELDS[name] for name in FIELDS if name not in hf.ALL_BIASES},
        "max_seq_len": hf.integer("max_position_embeddings", default=2048),
        "attention.head_dim": hf.HFField(
            _read_nomic_head_dim, lambda _, config: {"head_dim": hf.first_head_dim(config)}
        ),
        "attention.position": hf.HFField(
            lambda fields: hf.read_rope(
                fields, max_seq_len=fields.integer("max_position_embeddings", default=2048), theta=1000.0
            ),
            lambda position, config: hf.rope_fields(position),
        ),
        "mlp.activation": hf.activation("hidden_act", "silu"),
        "embedding.position": None,
    },
    layer={
        "mlp.up": "mlp.fc11",
        "mlp.gate": "mlp.fc12",
        "mlp.down": "mlp.fc2",
        "attention.out": "attn.out_proj",
        "norm1": "norm1",
        "norm2": "norm2",
    },
    tensors={
        "embedding.tokens": "embeddings.word_embeddings",
        "embedding.token_types": "embeddings.token_type_embeddings",
        "embedding.norm": "emb_ln",
        "stack.layers": "encoder.layers",
    },
    mlp=cfg.GatedMLPConfig,
    layer_rules=fused_rules("attn.Wqkv"),
    prefix="nomic_bert.",
    ignored=(),
    names=BERT_HEADS._replace(norm="cls.predictions.transform.layer_norm"),
    has_pooler=False,
    name_variants={},
)


# ---------------------------------------------------------------- ModernBERT

_FULL, _SLIDING = "full_attention", "sliding_attention"
_THETAS = {_FULL: "global_rope_theta", _SLIDING: "local_rope_theta"}


def _check_modern(fields: HFConfigReader) -> None:
    encoder_only(fields)
    fields.require_one_of("rope_theta", reason="Use global_rope_theta and local_rope_theta.")


def _read_modern_layers(fields: HFConfigReader, layer: cfg.LayerConfig) -> tuple[Mapping[str, cfg.LayerConfig], str]:
    """Return layers F and G (full) and S and L (window) by ``layer_types`` (5.x) or ``global_attn_every_n_layers``.

    In 4.x every n-th layer from the first is full.  Only the first layer, F or S, has no first norm.
    """
    layers, interval = fields.integer("num_hidden_layers"), fields.integer("global_attn_every_n_layers", default=3)
    types = fields.get("layer_types", [_SLIDING if i % interval else _FULL for i in range(layers)])
    if len(types) != layers or not set(types) <= {_FULL, _SLIDING}:
        raise fields.error(f"layer_types {types!r} is not supported")
    window = fields.integer("local_attention", default=128) // 2 + 1
    layer_types: dict[str, cfg.LayerConfig] = {}
    for kind in dict.fromkeys(types):
        first, letter, size = ("F", "G", None) if kind == _FULL else ("S", "L", window)
        layer_types[letter] = with_attention(layer, position=_read_modern_rope(fields, kind), window=size)
        layer_types[first] = replace(layer_types[letter], pre_attention_norm=False)
    pattern = {_FULL: "F", _SLIDING: "S"}[types[0]]
    return layer_types, pattern + "".join({_FULL: "G", _SLIDING: "L"}[kind] for kind in types[1:])


def _read_modern_rope(fields: HFConfigReader, kind: str) -> cfg.RopeConfig:
    """Return the positions of a layer type; in 4.x's fields a null base of local layers is the global one."""
    theta = fields.number("global_rope_theta", default=160000.0)
    if kind == _SLIDING and fields.content.get("local_rope_theta", 0) is not None:
        theta = fields.number("local_rope_theta", default=10000.0)
    max_seq_len = fields.integer("max_position_embeddings", default=8192)
    return hf.read_rope(fields, max_seq_len=max_seq_len, layer_type=kind, theta=theta)


def _write_modern_layers(config: ModelConfig) -> dict[str, Any]:
    """Return layer types and rotary positions in 5.x's format and, if possible, in 4.x's.

    4.x can express every n-th layer being full, and one scaling for all layers.
    """
    attentions = [config.stack.layer_config(i).attention for i in range(config.stack.num_layers)]
    types = [_FULL if attention.window is None else _SLIDING for attention in attentions]
    windows = [attention.window for attention in attentions if attention.window is not None]
    ropes = {kind: hf.rope_fields(attention.position) for kind, attention in zip(types, attentions, strict=True)}
    content: dict[str, Any] = {
        "local_attention": 2 * (max(windows, default=65) - 1),
        "layer_types": types,
        "rope_parameters": {kind: fields["rope_parameters"] for kind, fields in ropes.items()},
        **{_THETAS[kind]: fields["rope_theta"] for kind, fields in ropes.items()},
    }
    for interval in range(1, len(types) + 1):
        if types == [_SLIDING if i % interval else _FULL for i in range(len(types))]:
            content["global_attn_every_n_layers"] = interval
    scalings = [fields["rope_scaling"] for fields in ropes.values()]
    if scalings[0] is not None and all(scaling == scalings[0] for scaling in scalings):
        content["rope_scaling"] = scalings[0]
    return content


class _ModernClass(EncoderClass):
    """ModernBERT, all of whose heads have a transform with its own options."""

    def task_heads(self, fields: HFConfigReader, values: hf.FieldValues) -> dict[str, TaskHead]:
        names, pool = read_labels(fields), fields.choice("classifier_pooling", {"cls": "first", "mean": "mean"}, "cls")
        activation = fields.choice("classifier_activation", hf.ACTIVATIONS, "gelu")
        transform = cfg.HeadTransformConfig(activation, fields.flag("classifier_bias"), values["embedding"]["norm"])
        return {
            "ForMaskedLM": cfg.LanguageHeadConfig(bias=fields.flag("decoder_bias", True), transform=transform),
            "ForTokenClassification": cfg.ClassificationHeadConfig(names, transform=transform),
            "ForSequenceClassification": cfg.ClassificationHeadConfig(names, "row", pool, transform=transform),
            "Model": cfg.PoolingHeadConfig(),
        }

    def write(self, config: ModelConfig) -> dict[str, Any]:
        content, head = super().write(config), config.head
        is_mean = isinstance(head, cfg.ClassificationHeadConfig) and head.pool == "mean"
        content["decoder_bias"] = not isinstance(head, cfg.LanguageHeadConfig) or head.bias
        content["classifier_pooling"] = "mean" if is_mean else "cls"
        if head.transform is not None:
            content["classifier_bias"] = head.transform.bias
            content["classifier_activation"] = hf.hf_activation(str(head.transform.activation))
        return content


# Warner et al. 2024.  Rotary positions, LayerNorm before each half, GeGLU; most layers have a window.
# ``local_attention`` is the window's size: a token sees half of it on each side, and itself.  Both layer types have
# separate rotary bases; the first layer has no norm before its attention, because the embedding ends in one.
# ``local_attention`` is halved when it is read, so that an odd value is written as the even one below it.
_MODERN_BERT = _ModernClass(
    "modernbert",
    "ModernBert",
    {
        **hf.sizes(),
        "max_seq_len": hf.integer("max_position_embeddings", default=8192),
        "tie_embeddings": hf.flag("tie_word_embeddings", True),
        "attention.causal": False,
        **hf.biases("attention_bias"),
        "mlp.activation": hf.activation("hidden_activation", "gelu"),
        "mlp.bias": hf.flag("mlp_bias"),
        "norm.kind": "layer",
        "norm.eps": hf.number("norm_eps", 1e-5),
        "norm.bias": hf.flag("norm_bias"),
        "embedding.norm": hf.HFField(
            lambda fields: cfg.NormConfig(
                "layer", fields.number("norm_eps", default=1e-5), bias=fields.flag("norm_bias")
            )
        ),
    },
    layer={"attention.out": "attn.Wo", "mlp.down": "mlp.Wo", "norm1": "attn_norm", "norm2": "mlp_norm"},
    tensors={
        "embedding.tokens": "embeddings.tok_embeddings",
        "embedding.norm": "embeddings.norm",
        "stack.layers": "layers",
        "stack.norm": "final_norm",
    },
    check=_check_modern,
    layer_types=LayerTypes(_read_modern_layers, _write_modern_layers),
    layer_rules=fused_rules("attn.Wqkv", gate_up="mlp.Wi"),
    ignored=(),
    names=HeadNames("head.dense", "head.norm", "decoder", bias=None, classifier_dense="head.dense"),
    name_variants={},
)

FAMILIES = tuple(each.family() for each in (_ROFORMER, _NOMIC_BERT, _MODERN_BERT))
