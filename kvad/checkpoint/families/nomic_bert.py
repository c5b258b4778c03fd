"""Nomic BERT (Nussbaum et al. 2024).

BERT's order of norms with rotary positions, SwiGLU, no biases in the layers.  kvad reads the config of transformers
5's class; tensors have the names of the authors' code (``emb_ln``, ``Wqkv``, ``fc11`` for up and ``fc12`` for gate).
Their older config (``n_embd``, ...) is not supported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvad.checkpoint.conversion import STACKED, Family, HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families import _encoder, bert
from kvad.checkpoint.families._common import read_rope, require_rope, rope_fields
from kvad.config import (
    AttentionConfig,
    ClassificationHeadConfig,
    GatedMLPConfig,
    HeadTransformConfig,
    LanguageHeadConfig,
    LayerConfig,
    ModelConfig,
    PlainMLPConfig,
    PoolingHeadConfig,
    head_dim,
)

_DECODER, _BIAS = "cls.predictions.decoder", "cls.predictions.bias"
_EMBEDDING = {
    "embedding.tokens": "embeddings.word_embeddings",
    "embedding.token_types": "embeddings.token_type_embeddings",
    "embedding.norm": "emb_ln",
}
_LAYER = {
    "attention.out": "attn.out_proj",
    "norm1": "norm1",
    "mlp.up": "mlp.fc11",
    "mlp.gate": "mlp.fc12",
    "mlp.down": "mlp.fc2",
    "norm2": "norm2",
}


def read(fields: HFConfigReader) -> ModelConfig:
    max_seq_len = fields.integer("max_position_embeddings", default=2048)
    activation = fields.get("hidden_act", "silu")
    config = bert.read(_encoder.base_model_config(fields, max_position_embeddings=max_seq_len, hidden_act=activation))
    layer, names = config.stack.layer_types["L"], _encoder.read_labels(fields)
    assert isinstance(layer.mlp, PlainMLPConfig)
    heads: dict[str, _encoder.TaskHead] = {
        "ForMaskedLM": LanguageHeadConfig(
            bias=True, transform=HeadTransformConfig(layer.mlp.activation, norm=layer.norm)
        ),
        "ForTokenClassification": ClassificationHeadConfig(names),
        "ForSequenceClassification": ClassificationHeadConfig(names, "row", transform=HeadTransformConfig("tanh")),
        "Model": PoolingHeadConfig(),
    }
    stored_head_dim, position = fields.get("head_dim"), read_rope(fields, max_seq_len=max_seq_len, theta=1000.0)
    head_size = (
        None
        if stored_head_dim is None or stored_head_dim * layer.attention.num_heads == config.hidden_size
        else stored_head_dim
    )
    attention = AttentionConfig(layer.attention.num_heads, head_dim=head_size, position=position, causal=False)
    layer_config = LayerConfig(attention, GatedMLPConfig(layer.mlp.intermediate_size, layer.mlp.activation), layer.norm)
    return replace(
        config,
        encoder=replace(config.stack, layer_types={"L": layer_config}),
        embedding=replace(config.embedding, position=None),
        head=_encoder.read_task_head(fields, heads),
    )


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    base = "" if isinstance(config.head, PoolingHeadConfig) else "nomic_bert."
    for kvad_name, hf_name in _EMBEDDING.items():
        yield tensor_rule(kvad_name, base + hf_name)
    for i in range(config.stack.num_layers):
        kvad_prefix, hf_prefix = f"encoder.layers.{i}", f"{base}encoder.layers.{i}"
        yield tensor_rule(tuple(f"{kvad_prefix}.attention.{part}" for part in "qkv"), f"{hf_prefix}.attn.Wqkv", STACKED)
        yield from prefix_rules(kvad_prefix, hf_prefix, _LAYER)
    if isinstance(config.head, LanguageHeadConfig):
        yield tensor_rule("head.transform.dense", "cls.predictions.transform.dense")
        yield tensor_rule("head.transform.norm", "cls.predictions.transform.layer_norm")
        yield from _encoder.head_bias(config, _DECODER, _BIAS)
    else:
        yield tensor_rule("head.transform.dense", f"{base}pooler.dense")
        yield tensor_rule("head", "classifier")


def write(config: ModelConfig) -> dict[str, Any]:
    attention = config.stack.layer_config(0).attention
    fields = {
        **_encoder.bert_fields(config, "nomic_bert", "NomicBert"),
        "head_dim": head_dim(config, attention),
        **rope_fields(require_rope(attention.position, "nomic_bert")),
    }
    return fields


FAMILY = Family(
    ("nomic_bert",),
    read,
    rules,
    write,
    prefix="nomic_bert.",
    ignored=(r"cls\.predictions\.decoder\.weight",),
    head=(f"{_DECODER}.weight", "nomic_bert.embeddings.word_embeddings.weight"),
    resolve=_encoder.head_resolver("cls.predictions.transform.dense.weight"),
    copies=_encoder.bias_rules(_DECODER, _BIAS),
)
