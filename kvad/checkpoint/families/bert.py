"""BERT (Devlin et al. 2018) and encoders like it: RoBERTa, XLM-R-XL, MPNet, ELECTRA, ALBERT, DistilBERT.

BERT has learned positions, token types, LayerNorm after each half of a layer.  The embedding ends in a norm.  The
masked language model's head has a transform before the tied table and a separate bias.  A base model's output is its
pooler's: a matrix and tanh on the first token; without a pooler in the file, the mean.  Old files name norms gamma
and beta, and have a next-sentence head that only ``BertForPreTraining`` reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvad import config as cfg
from kvad import model
from kvad.checkpoint.conversion import HFConfigReader, TensorRule, tensor_rule
from kvad.checkpoint.families import _encoder as base
from kvad.checkpoint.families import _fields as hf
from kvad.checkpoint.families._encoder import EncoderClass, HeadNames, TaskHead, TensorLookup
from kvad.config import ModelConfig
from kvad.errors import CheckpointError

FIELDS: hf.FieldTable = {
    **hf.sizes(),
    "max_seq_len": hf.integer("max_position_embeddings", default=512),
    "tie_embeddings": hf.flag("tie_word_embeddings", True),
    "stack.norm_position": "post",
    "stack.final_norm": False,
    "attention.position": None,
    "attention.causal": False,
    **hf.ALL_BIASES,
    "mlp.activation": hf.activation("hidden_act", "gelu"),
    **hf.layer_norm("layer_norm_eps", 1e-12),
    "embedding.position": hf.learned_positions("max_position_embeddings", 512),
    "embedding.norm": hf.embedding_norm("layer_norm_eps", 1e-12),
    "embedding.num_token_types": hf.integer("type_vocab_size", default=2),
    # ``add_pooling_layer`` is an argument of transformers' classes, not of their configs; kvad writes it for a model
    # without a pooler, which ``EncoderClass.resolve`` detects in the file.
    "head.transform": hf.HFField(
        lambda fields: base.POOLER.transform if fields.flag("add_pooling_layer", True) else None,
        lambda _, config: {"add_pooling_layer": False} if config.head == cfg.PoolingHeadConfig() else {},
    ),
    **hf.dropouts(  # dropout of a task head is not supported
        embedding="hidden_dropout_prob", residual="hidden_dropout_prob", attention="attention_probs_dropout_prob"
    ),
}
_LAYER = {
    "attention.q": "attention.self.query",
    "attention.k": "attention.self.key",
    "attention.v": "attention.self.value",
    "attention.out": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "norm2": "output.LayerNorm",
}
_TENSORS = {
    "embedding.tokens": "embeddings.word_embeddings",
    "embedding.positions": "embeddings.position_embeddings",
    "embedding.token_types": "embeddings.token_type_embeddings",
    "embedding.norm": "embeddings.LayerNorm",
    "embedding.projection": "embeddings_project",
    "stack.layers": "encoder.layer",
}
BERT_HEADS = HeadNames(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
BERT = EncoderClass(
    "bert",
    "Bert",
    FIELDS,
    layer=_LAYER,
    tensors=_TENSORS,
    mlp=cfg.PlainMLPConfig,
    constants={"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"},
    prefix="bert.",
    ignored=(r"embeddings\.position_ids", r"cls\.seq_relationship\..*"),
    names=BERT_HEADS,
    language_activation=None,
    has_pooler=True,
)


# ---------------------------------------------------------------- RoBERTa, MPNet


def _positions(fields: HFConfigReader, padding: int | None) -> cfg.LearnedPositionsConfig:
    """Return positions from ``padding + 1`` on (None: the config's padding id)."""
    padding = fields.integer("pad_token_id", default=1) if padding is None else padding
    num_positions = fields.integer("max_position_embeddings", default=512)
    if not 0 <= padding + 1 < num_positions:
        raise fields.error(f"pad_token_id {padding} leaves no positions of {num_positions}")
    return cfg.LearnedPositionsConfig(num_positions, offset=padding + 1)


def _write_positions(position: object, config: ModelConfig) -> dict[str, int]:
    """Return the size of the position table, and the padding id that its offset follows from."""
    if not isinstance(position, cfg.LearnedPositionsConfig):
        raise CheckpointError("its positions are not learned")
    return {"max_position_embeddings": position.num_positions, "pad_token_id": position.offset - 1}


def _position_fields(padding: int | None) -> hf.FieldTable:
    """Build the length and the positions, see ``_positions``."""
    position = hf.HFField(lambda fields: _positions(fields, padding), _write_positions)
    length = hf.HFField(lambda fields: position.read(fields).num_positions - position.read(fields).offset)
    return {"max_seq_len": length, "embedding.position": position}


# RoBERTa (Liu et al. 2019), XLM-R (Conneau et al. 2020), CamemBERT (Martin et al. 2020).  Positions count from
# ``pad_token_id + 1``, so that a table of 514 rows has room for 512 tokens.  The language head's activation is always
# gelu; the classes of a sequence are computed from its first token through a separate matrix and tanh.  All three are
# written as ``roberta``: they differ only in their tokenizers.
_ROBERTA = BERT.variant(
    "roberta",
    "Roberta",
    also=("xlm-roberta", "camembert"),
    fields={**FIELDS, **_position_fields(None)},
    prefix="roberta.",
    ignored=(r"embeddings\.position_ids",),
    names=HeadNames(
        "lm_head.dense",
        "lm_head.layer_norm",
        "lm_head.decoder",
        "lm_head.bias",
        "classifier.dense",
        "classifier.out_proj",
    ),
    language_activation="gelu",
)

# RoBERTa with LayerNorm before each half of a layer, fairseq's ``--encoder-normalize-before``.  A final norm follows
# the last layer; the embedding's norm remains.
_PRELAYERNORM = _ROBERTA.variant(
    "roberta-prelayernorm",
    "RobertaPreLayerNorm",
    also=(),
    fields={**_ROBERTA.fields, "stack.norm_position": "pre", "stack.final_norm": True},
    layer={**_LAYER, "norm1": "attention.LayerNorm", "norm2": "intermediate.LayerNorm"},
    tensors={**_TENSORS, "stack.norm": "LayerNorm"},
    prefix="roberta_prelayernorm.",
)

# Goyal et al. 2021.  XLM-R with LayerNorm before each half of a layer and after the last layer, and none after the
# embedding.
_XLM_ROBERTA_XL = _ROBERTA.variant(
    "xlm-roberta-xl",
    "XLMRobertaXL",
    also=(),
    fields={
        **{name: _ROBERTA.fields[name] for name in _ROBERTA.fields if name != "embedding.norm"},
        "stack.norm_position": "pre",
        "stack.final_norm": True,
        "norm.eps": hf.number("layer_norm_eps", 1e-5),
    },
    layer={**_LAYER, "norm1": "attention.self_attn_layer_norm", "norm2": "LayerNorm"},
    tensors={**_TENSORS, "stack.norm": "encoder.LayerNorm"},
)


def _check_mpnet(fields: HFConfigReader) -> None:
    base.encoder_only(fields)
    reason = "transformers computes 32 buckets whatever the table's size."
    fields.require_one_of("relative_attention_num_buckets", 32, reason=reason)


# Song et al. 2020.  BERT's layers with learned positions and T5's bucketed bias, shared by all layers.  Positions count
# from 2 whatever the padding is.  There are 32 buckets up to a distance of 128: the table's size is a config field, but
# transformers computes with these.  There are no token types.
_MPNET = _ROBERTA.variant(
    "mpnet",
    "MPNet",
    also=(),
    fields={
        **FIELDS,
        **_position_fields(1),
        "attention.position": cfg.T5BiasConfig(32, 128, bidirectional=True),
        "embedding.num_token_types": hf.HFField(lambda fields: 0, lambda value, config: {"type_vocab_size": value}),
    },
    layer={
        **_LAYER,
        **{f"attention.{part}": f"attention.attn.{part}" for part in "qkv"},
        "attention.out": "attention.attn.o",
        "norm1": "attention.LayerNorm",
    },
    tensors={**_TENSORS, "stack.relative_bias.L": "encoder.relative_attention_bias.weight"},
    check=_check_mpnet,
    constants={**BERT.constants, "relative_attention_num_buckets": 32},
    prefix="mpnet.",
)


# ---------------------------------------------------------------- ELECTRA

_REPLACED = ("replaced",)


class _ElectraClass(EncoderClass):
    """ELECTRA's generator, whose discriminator has another head."""

    def task_heads(self, fields: HFConfigReader, values: hf.FieldValues) -> dict[str, TaskHead]:
        transform = cfg.HeadTransformConfig(values["mlp"]["activation"])
        discriminator = cfg.ClassificationHeadConfig(_REPLACED, transform=transform)
        return {**super().task_heads(fields, values), "ForPreTraining": discriminator}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        content = super().write(config)
        if _is_discriminator(config):
            content |= {"architectures": ["ElectraForPreTraining"], "id2label": None, "label2id": None}
        return content

    def all_rules(self, config: ModelConfig) -> Iterator[TensorRule]:
        if not _is_discriminator(config):
            yield from super().all_rules(config)
            return
        yield from self.rules(config, self.prefix)
        yield tensor_rule("head.transform.dense", "discriminator_predictions.dense")
        yield tensor_rule("head", "discriminator_predictions.dense_prediction")


def _is_discriminator(config: ModelConfig) -> bool:
    head = config.head
    return isinstance(head, cfg.ClassificationHeadConfig) and head.labels == _REPLACED and head.level == "token"


# Clark et al. 2020.  BERT's layers over an embedding of ``embedding_size``, projected to the model's.  The generator is
# a masked language model whose head projects back to that size; the discriminator (``ForPreTraining``) scores each
# token: above zero, it was replaced.  There is no pooler; the classes of a sequence use gelu.
_ELECTRA = _ElectraClass.like(
    BERT,
    model_type="electra",
    architecture="Electra",
    fields={**FIELDS, "embedding.embedding_size": hf.table_size(default=128)},
    prefix="electra.",
    ignored=(r"embeddings\.position_ids",),
    names=HeadNames(
        "generator_predictions.dense",
        "generator_predictions.LayerNorm",
        "generator_lm_head",
        bias=None,
        classifier_dense="classifier.dense",
        sequence="classifier.out_proj",
    ),
    language_activation="gelu",
    sequence_activation="gelu",
    has_pooler=False,
)


# ---------------------------------------------------------------- ALBERT


def _check_albert(fields: HFConfigReader) -> None:
    base.encoder_only(fields)
    fields.require_one_of("inner_group_num", 1, reason="A group of several layers is not supported.")


def _read_groups(fields: HFConfigReader) -> int | None:
    groups, layers = fields.integer("num_hidden_groups", default=1), fields.integer("num_hidden_layers")
    return None if groups == layers else groups


_ALBERT_PARTS = (("q", "query"), ("k", "key"), ("v", "value"), ("out", "dense"))

# Lan et al. 2020.  BERT's layers over a narrow embedding, projected to the model's size; all layers of a group share
# their parameters.
_ALBERT = BERT.variant(
    "albert",
    "Albert",
    fields={
        **FIELDS,
        "mlp.activation": hf.activation("hidden_act", "gelu_new"),
        "embedding.embedding_size": hf.integer("embedding_size", default=128),
        "stack.num_distinct_layers": hf.HFField(
            _read_groups, lambda groups, config: {"num_hidden_groups": groups or config.stack.num_layers}
        ),
    },
    layer={
        **{f"attention.{part}": f"albert_layers.0.attention.{name}" for part, name in _ALBERT_PARTS},
        "norm1": "albert_layers.0.attention.LayerNorm",
        "mlp.up": "albert_layers.0.ffn",
        "mlp.down": "albert_layers.0.ffn_output",
        "norm2": "albert_layers.0.full_layer_layer_norm",
    },
    tensors={
        **_TENSORS,
        "embedding.projection": "encoder.embedding_hidden_mapping_in",
        "stack.layers": "encoder.albert_layer_groups",
    },
    check=_check_albert,
    constants={"inner_group_num": 1, "position_embedding_type": "absolute"},
    prefix="albert.",
    ignored=(r"embeddings\.position_ids", r"sop_classifier\..*"),
    names=HeadNames(
        "predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias", pooler="pooler"
    ),
)


# ---------------------------------------------------------------- DistilBERT

_SINUSOIDS, _LEARNED = cfg.SinusoidalPositionsConfig(), hf.learned_positions("max_position_embeddings", 512)


class _DistilClass(EncoderClass):
    """DistilBERT, whose positions may be a computed table."""

    def resolve(self, config: ModelConfig, lookup: TensorLookup) -> ModelConfig:
        """Return learned positions if the file has other values than the computed table."""
        stored = lookup(f"{self.prefix}{self.tensors['embedding.positions']}.weight")
        for _, sinusoids in self.table(config):
            stored = sinusoids if stored is None else stored
            rounding = max(1e-5, torch.finfo(stored.dtype).eps)
            if stored.shape != sinusoids.shape or (stored.float() - sinusoids).abs().max() > rounding:
                position = cfg.LearnedPositionsConfig(config.max_seq_len)
                config = replace(config, embedding=replace(config.embedding, position=position))
        return super().resolve(config, lookup)

    def table(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """Yield the sinusoidal positions [max_seq_len, E] as they are stored."""
        position = config.embedding.position
        if isinstance(position, cfg.SinusoidalPositionsConfig):
            table = model.positions.sinusoidal_embedding(torch.arange(config.max_seq_len), config.hidden_size, position)
            yield f"{self.base(config)}{self.tensors['embedding.positions']}.weight", table


# Sanh et al. 2019.  Half of BERT's layers, without token types and pooler; epsilons are 1e-12.  With
# ``sinusoidal_pos_embds`` the positions are the Transformer's sines and cosines, which are stored like a learned table.
# If a file has other values there, which transformers would use, the positions are learned.
_DISTILBERT = _DistilClass(
    "distilbert",
    "DistilBert",
    {
        **{name: FIELDS[name] for name in FIELDS if not name.startswith(("head.", "dropout."))},
        **hf.sizes("dim", "n_layers", "n_heads", "hidden_dim"),
        "mlp.activation": hf.activation("activation", "gelu"),
        "norm.eps": 1e-12,
        "embedding.position": hf.HFField(
            lambda fields: _SINUSOIDS if fields.flag("sinusoidal_pos_embds") else _LEARNED.read(fields),
            lambda position, config: {"sinusoidal_pos_embds": position == _SINUSOIDS},
        ),
        "embedding.norm": cfg.NormConfig("layer", 1e-12, bias=True),
        "embedding.num_token_types": 0,
    },
    layer={
        **{f"attention.{part}": f"attention.{part}_lin" for part in ("q", "k", "v", "out")},
        "norm1": "sa_layer_norm",
        "mlp.up": "ffn.lin1",
        "mlp.down": "ffn.lin2",
        "norm2": "output_layer_norm",
    },
    tensors={
        "embedding.tokens": "embeddings.word_embeddings",
        "embedding.positions": "embeddings.position_embeddings",
        "embedding.norm": "embeddings.LayerNorm",
        "stack.layers": "transformer.layer",
    },
    mlp=cfg.PlainMLPConfig,
    constants={},
    prefix="distilbert.",
    ignored=(r"embeddings\.position_(ids|embeddings\.weight)",),
    names=HeadNames(
        "vocab_transform", "vocab_layer_norm", "vocab_projector", bias=None, classifier_dense="pre_classifier"
    ),
    language_activation=None,
    sequence_activation="relu",
)

FAMILIES = tuple(
    each.family() for each in (BERT, _ROBERTA, _PRELAYERNORM, _XLM_ROBERTA_XL, _MPNET, _ELECTRA, _ALBERT, _DISTILBERT)
)
