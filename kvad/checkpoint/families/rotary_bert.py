"""Encoders like BERT with rotary positions: RoFormer and Nomic BERT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvad import config as cfg
from kvad import model
from kvad.checkpoint.conversion import STACKED, HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families import _encoder
from kvad.checkpoint.families._common import read_rope, rope_fields
from kvad.checkpoint.families._fields import require_rope
from kvad.checkpoint.families.bert import BERT_HEADS, encoder_family, language_head, read_base, write_base
from kvad.config import ModelConfig, embedding_size, head_dim
from kvad.errors import CheckpointError

# ---------------------------------------------------------------- RoFormer

# Su et al. 2021.  BERT's layers with interleaved rotary positions instead of learned ones.  Files have the table of
# sines and cosines (``embed_positions``) as a tensor, which is checked and written.  The embedding may be narrower than
# the model. ``RoFormerForCausalLM`` with ``is_decoder`` is a decoder of the same layers.


def _read_roformer(fields: HFConfigReader) -> ModelConfig:
    fields.require_one_of("rotary_value", False, reason="Rotated values are not supported.")
    causal = fields.flag("is_decoder")
    if causal != fields.architecture.endswith("ForCausalLM"):
        raise CheckpointError(
            f"{fields.where}: is_decoder {causal} with {fields.architecture} is not supported",
            "RoFormerForCausalLM is a decoder, all other classes are encoders.",
        )
    max_seq_len = fields.integer("max_position_embeddings", default=1536)
    config = read_base(fields, is_decoder=False, max_position_embeddings=max_seq_len)
    layer = config.stack.layer_types["L"]
    size = fields.integer("embedding_size", default=config.hidden_size)
    narrow = None if size == config.hidden_size else size
    language = language_head(config, size=narrow)
    heads = {**_encoder.task_heads(fields, language, str(layer.mlp.activation)), "ForCausalLM": language}
    attention = replace(layer.attention, position=cfg.RopeConfig(interleaved=True), causal=causal)
    stack = replace(config.stack, layer_types={"L": replace(layer, attention=attention)})
    return replace(
        config,
        encoder=None if causal else stack,
        decoder=stack if causal else None,
        embedding=replace(config.embedding, position=None, embedding_size=narrow),
        head=_encoder.read_task_head(fields, heads),
    )


def _write_roformer(config: ModelConfig) -> dict[str, Any]:
    fields = {
        **write_base(config, "roformer", "RoFormer"),
        "embedding_size": embedding_size(config),
        "rotary_value": False,
        "is_decoder": config.decoder is not None,
    }
    return fields if config.decoder is None else {**fields, "architectures": ["RoFormerForCausalLM"]}


def _roformer_table(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the table [max_seq_len, D]: the sines of all angles, then their cosines."""
    dim = head_dim(config, config.stack.layer_config(0).attention)
    base = "" if isinstance(config.head, cfg.PoolingHeadConfig) else "roformer."
    positions = torch.arange(config.max_seq_len)
    table = model.positions.sinusoidal_embedding(positions, dim, cfg.SinusoidalPositionsConfig(form="concat"))
    yield f"{base}encoder.embed_positions.weight", table


_resolve_roformer_head = _encoder.head_resolver(f"{BERT_HEADS.dense}.weight")


def _resolve_roformer(config: ModelConfig, lookup: _encoder.TensorLookup) -> ModelConfig:
    """Select the head by the stored tensors; a decoder always has a language head."""
    return config if config.decoder is not None else _resolve_roformer_head(config, lookup)


_ROFORMER = replace(
    encoder_family(
        ("roformer",),
        "roformer.",
        _read_roformer,
        _write_roformer,
        names=BERT_HEADS._replace(sequence_layer=True),
        ignored=(r"encoder\.embed_positions\.weight",),
    ),
    extra=_roformer_table,
    resolve=_resolve_roformer,
)


# ---------------------------------------------------------------- Nomic BERT


def _read_nomic(fields: HFConfigReader) -> ModelConfig:
    max_seq_len = fields.integer("max_position_embeddings", default=2048)
    config = read_base(fields, max_position_embeddings=max_seq_len, hidden_act=fields.get("hidden_act", "silu"))
    layer = config.stack.layer_types["L"]
    heads, size = layer.attention.num_heads, fields.get("head_dim")
    if size is not None and size * heads == config.hidden_size:
        size = None
    position = read_rope(fields, max_seq_len=max_seq_len, theta=1000.0)
    activation: Any = layer.mlp.activation
    layer_config = cfg.LayerConfig(
        cfg.AttentionConfig(heads, head_dim=size, position=position, causal=False),
        cfg.GatedMLPConfig(layer.mlp.intermediate_size, activation),
        layer.norm,
    )
    task_heads = _encoder.task_heads(fields, language_head(config), "tanh")
    return replace(
        config,
        encoder=replace(config.stack, layer_types={"L": layer_config}),
        embedding=replace(config.embedding, position=None),
        head=_encoder.read_task_head(fields, task_heads),
    )


def _write_nomic(config: ModelConfig) -> dict[str, Any]:
    attention = config.stack.layer_config(0).attention
    fields = write_base(config, "nomic_bert", "NomicBert")
    return {**fields, "head_dim": head_dim(config, attention), **rope_fields(require_rope(attention.position))}


def _nomic_rules(config: ModelConfig, base: str) -> Iterator[TensorRule]:
    yield tensor_rule("embedding.tokens", f"{base}embeddings.word_embeddings")
    yield tensor_rule("embedding.token_types", f"{base}embeddings.token_type_embeddings")
    yield tensor_rule("embedding.norm", f"{base}emb_ln")
    names = {"mlp.up": "mlp.fc11", "mlp.gate": "mlp.fc12", "mlp.down": "mlp.fc2", "attention.out": "attn.out_proj"}
    for i in range(config.stack.num_layers):
        kvad_prefix, hf_prefix = f"encoder.layers.{i}", f"{base}encoder.layers.{i}"
        yield tensor_rule(tuple(f"{kvad_prefix}.attention.{part}" for part in "qkv"), f"{hf_prefix}.attn.Wqkv", STACKED)
        yield from prefix_rules(kvad_prefix, hf_prefix, {**names, "norm1": "norm1", "norm2": "norm2"})


# Nussbaum et al. 2024.  BERT's order of norms with rotary positions, SwiGLU, no biases in the layers.  kvad reads the
# config of transformers 5's class; tensors have the names of the authors' code (``emb_ln``, ``Wqkv``, ``fc11`` for up
# and ``fc12`` for gate). Their older config (``n_embd``, ...) is not supported.
_NOMIC_BERT = replace(
    encoder_family(
        ("nomic_bert",),
        "nomic_bert.",
        _read_nomic,
        _write_nomic,
        names=BERT_HEADS._replace(norm="cls.predictions.transform.layer_norm"),
        rules=_nomic_rules,
        ignored=(),
    ),
    name_variants={},
)

FAMILIES = (_ROFORMER, _NOMIC_BERT)
