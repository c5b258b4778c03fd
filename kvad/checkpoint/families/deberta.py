"""DeBERTa-v2 and v3 (He et al. 2021 and 2023): BERT's layers with disentangled attention.

A logit has three terms: content with content, content with relative position, and relative position with content.  A
table of distances, normalized, is projected by each layer's matrices of q and k.  The published models have no
absolute positions and no pooler; v3's files have the heads of its pretraining, which transformers does not read.
"""

from __future__ import annotations

from typing import Any

from kvad import config as cfg
from kvad.checkpoint.conversion import HFConfigReader
from kvad.checkpoint.families import _encoder as base
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families import bert
from kvad.checkpoint.families._encoder import EncoderClass, TaskHead
from kvad.config import ModelConfig
from kvad.errors import CheckpointError

_TERMS = {"c2p": "content_to_position", "p2c": "position_to_content"}


def _check(fields: HFConfigReader) -> None:
    base.encoder_only(fields)
    hidden_size = fields.integer("hidden_size")
    if not fields.flag("relative_attention"):
        raise fields.error("relative_attention: must be true", "Without it the model has no relative positions.")
    if not fields.flag("share_att_key"):
        raise fields.error("share_att_key: must be true", "Separate matrices of positions are not supported.")
    fields.require_one_of("conv_kernel_size", 0, reason="The convolution of v2-xlarge is not supported.")
    fields.require_one_of("embedding_size", hidden_size, reason="A narrower embedding is not supported.")
    fields.require_one_of("pooler_hidden_size", hidden_size, reason="It must be hidden_size.")
    head_dim = hidden_size // fields.integer("num_attention_heads")
    fields.require_one_of("attention_head_size", head_dim, reason="It must be hidden_size / num_attention_heads.")
    if fields.architecture.endswith("ForMaskedLM"):
        fields.require_one_of("legacy", True, reason="The head of the original code is not supported.")


def _read_position(fields: HFConfigReader) -> cfg.DisentangledConfig:
    terms = fields.get("pos_att_type", [])
    terms = [term.strip() for term in terms.lower().split("|")] if isinstance(terms, str) else list(terms)
    if not terms or not set(terms) <= set(_TERMS):
        raise fields.error(f"pos_att_type {terms!r} is not supported", "Supported: c2p, p2c, or both.")
    norms = [norm.strip() for norm in str(fields.get("norm_rel_ebd", "none")).lower().split("|")]
    eps = fields.number("layer_norm_eps", default=1e-7)
    distance, buckets = (
        fields.integer("max_relative_positions", default=-1),
        fields.integer("position_buckets", default=-1),
    )
    return cfg.DisentangledConfig(
        max_distance=distance if distance >= 1 else fields.integer("max_position_embeddings", default=512),
        num_buckets=buckets if buckets > 0 else None,
        norm=cfg.NormConfig("layer", eps, bias=True) if "layer_norm" in norms else None,
        content_to_position="c2p" in terms,
        position_to_content="p2c" in terms,
    )


def _write_position(position: object, config: ModelConfig) -> dict[str, Any]:
    if not isinstance(position, cfg.DisentangledConfig):
        raise CheckpointError("its attention is not disentangled")
    return {
        "relative_attention": True,
        "share_att_key": True,
        "pos_att_type": [term for term, name in _TERMS.items() if getattr(position, name)],
        "norm_rel_ebd": "none" if position.norm is None else "layer_norm",
        "max_relative_positions": position.max_distance,
        "position_buckets": position.num_buckets or -1,
    }


def _softmax_scale(fields: HFConfigReader) -> float:
    """Return the scale of a sum of one to three terms: 1 / sqrt(terms * head_dim)."""
    position, heads = _read_position(fields), fields.integer("num_attention_heads")
    terms = 1 + position.content_to_position + position.position_to_content
    return float((fields.integer("hidden_size") // heads * terms) ** -0.5)


_POSITIONS = hf.learned_positions("max_position_embeddings", 512)


class _DebertaClass(EncoderClass):
    """DeBERTa, whose classes of a sequence are computed from its first token with ``pooler_hidden_act``."""

    def task_heads(self, fields: HFConfigReader, values: hf.FieldValues) -> dict[str, TaskHead]:
        heads = super().task_heads(fields, values)
        activation = fields.choice("pooler_hidden_act", hf.ACTIVATIONS, "gelu")
        transform = cfg.HeadTransformConfig(activation)
        labels = base.read_labels(fields)
        return {**heads, "ForSequenceClassification": cfg.ClassificationHeadConfig(labels, "row", transform=transform)}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        content, transform = super().write(config), config.head.transform
        if content["architectures"][0].endswith("ForSequenceClassification") and transform is not None:
            content["pooler_hidden_act"] = hf.hf_activation(str(transform.activation))
        return content


_DEBERTA_V2 = _DebertaClass.like(
    bert.BERT,
    model_type="deberta-v2",
    architecture="DebertaV2",
    fields={
        **{name: bert.FIELDS[name] for name in bert.FIELDS if name != "head.transform"},
        "attention.position": hf.HFField(_read_position, _write_position),
        "attention.softmax_scale": hf.HFField(_softmax_scale),
        "norm.eps": hf.number("layer_norm_eps", 1e-7),
        "embedding.norm": hf.embedding_norm("layer_norm_eps", 1e-7),
        "embedding.num_token_types": hf.integer("type_vocab_size", default=0),
        "embedding.position": hf.HFField(
            lambda fields: _POSITIONS.read(fields) if fields.flag("position_biased_input", True) else None,
            lambda position, config: {"position_biased_input": position is not None},
        ),
    },
    layer={
        **bert.BERT.layer,
        **{f"attention.{name[0]}": f"attention.self.{name}_proj" for name in ("query", "key", "value")},
    },
    tensors={
        **bert.BERT.tensors,
        "stack.relative_embedding.L": "encoder.rel_embeddings",
        "stack.relative_embedding.L.norm": "encoder.LayerNorm",
    },
    check=_check,
    constants={"legacy": True},
    prefix="deberta.",
    ignored=(r"embeddings\.position_ids", r"(lm|mask)_predictions\..*"),
    names=bert.BERT_HEADS._replace(classifier_dense="pooler.dense"),
    has_pooler=False,
)

FAMILIES = (_DEBERTA_V2.family(),)
