"""DistilBERT (Sanh et al. 2019).

Half of BERT's layers, without token types and pooler; epsilons are 1e-12.  With ``sinusoidal_pos_embds`` the
positions are the Transformer's sines and cosines, which are stored like a learned table.  If a file has other values
there, which transformers would use, the positions are learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvad import config as cfg
from kvad import model
from kvad.checkpoint.conversion import Family, HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families import _encoder
from kvad.checkpoint.families._common import ACTIVATIONS, hf_activation, single_layer_type
from kvad.config import ModelConfig

_NORM = cfg.NormConfig("layer", 1e-12, bias=True)
_TABLE = "embeddings.position_embeddings.weight"
_EMBEDDING = {
    "embedding.tokens": "embeddings.word_embeddings",
    "embedding.positions": "embeddings.position_embeddings",
    "embedding.norm": "embeddings.LayerNorm",
}
_LAYER = {
    "attention.q": "attention.q_lin",
    "attention.k": "attention.k_lin",
    "attention.v": "attention.v_lin",
    "attention.out": "attention.out_lin",
    "norm1": "sa_layer_norm",
    "mlp.up": "ffn.lin1",
    "mlp.down": "ffn.lin2",
    "norm2": "output_layer_norm",
}


def read(fields: HFConfigReader) -> ModelConfig:
    _encoder.encoder_only(fields)
    max_seq_len = fields.integer("max_position_embeddings", default=512)
    activation = fields.choice("activation", ACTIVATIONS, "gelu")
    attention = cfg.AttentionConfig(
        fields.integer("n_heads"), position=None, causal=False, qkv_bias=True, out_bias=True
    )
    layer = cfg.LayerConfig(attention, cfg.PlainMLPConfig(fields.integer("hidden_dim"), activation, bias=True), _NORM)
    language = cfg.LanguageHeadConfig(bias=True, transform=cfg.HeadTransformConfig(activation, norm=_NORM))
    heads = _encoder.task_heads(fields, language, "relu")
    is_sinusoidal = fields.flag("sinusoidal_pos_embds")
    return ModelConfig(
        hidden_size=fields.integer("dim"),
        vocab_size=fields.integer("vocab_size"),
        max_seq_len=max_seq_len,
        encoder=cfg.StackConfig(fields.integer("n_layers"), {"L": layer}, norm_position="post", final_norm=False),
        embedding=cfg.EmbeddingConfig(
            cfg.SinusoidalPositionsConfig() if is_sinusoidal else cfg.LearnedPositionsConfig(max_seq_len), norm=_NORM
        ),
        head=_encoder.read_task_head(fields, heads),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    base = _base(config)
    for kvad_name, hf_name in _EMBEDDING.items():
        yield tensor_rule(kvad_name, base + hf_name)
    for i in range(config.stack.num_layers):
        yield from prefix_rules(f"encoder.layers.{i}", f"{base}transformer.layer.{i}", _LAYER)
    if isinstance(config.head, cfg.LanguageHeadConfig):
        yield tensor_rule("head.transform.dense", "vocab_transform")
        yield tensor_rule("head.transform.norm", "vocab_layer_norm")
        yield tensor_rule("head", "vocab_projector")
    else:
        yield tensor_rule("head.transform.dense", "pre_classifier")
        yield tensor_rule("head", "classifier")


def _base(config: ModelConfig) -> str:
    return "" if isinstance(config.head, cfg.PoolingHeadConfig) else "distilbert."


def write(config: ModelConfig) -> dict[str, Any]:
    layer = single_layer_type(config, "distilbert")
    fields = {
        **_encoder.task_fields(config, "DistilBert"),
        "model_type": "distilbert",
        "vocab_size": config.vocab_size,
        "dim": config.hidden_size,
        "hidden_dim": layer.mlp.intermediate_size,
        "n_layers": config.stack.num_layers,
        "n_heads": layer.attention.num_heads,
        "activation": hf_activation(layer.mlp.activation),
        "max_position_embeddings": config.max_seq_len,
        "sinusoidal_pos_embds": isinstance(config.embedding.position, cfg.SinusoidalPositionsConfig),
        "tie_word_embeddings": config.tie_embeddings,
    }
    return fields


def table(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the sinusoidal positions [max_seq_len, E] as they are stored."""
    if isinstance(config.embedding.position, cfg.SinusoidalPositionsConfig):
        yield (
            _base(config) + _TABLE,
            model.positions.sinusoidal_embedding(
                torch.arange(config.max_seq_len), config.hidden_size, config.embedding.position
            ),
        )


_heads = _encoder.head_resolver("vocab_transform.weight")


def resolve(config: ModelConfig, lookup: Callable[[str], Tensor | None]) -> ModelConfig:
    stored = lookup(f"distilbert.{_TABLE}")
    for _, sinusoids in table(config):
        if stored is not None and not _encoder.tables_equal(stored, sinusoids):
            config = replace(
                config, embedding=replace(config.embedding, position=cfg.LearnedPositionsConfig(config.max_seq_len))
            )
    return _heads(config, lookup)


FAMILIES = (
    Family(
        ("distilbert",),
        read,
        rules,
        write,
        prefix="distilbert.",
        ignored=(r"embeddings\.position_(ids|embeddings\.weight)", r"vocab_projector\.weight"),
        extra=table,
        head=("vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"),
        name_variants=_encoder.LEGACY_NORMS,
        resolve=resolve,
    ),
)
