"""ModernBERT (Warner et al. 2024).

Rotary positions, LayerNorm before each half, GeGLU; most layers have a window.  ``local_attention`` is the window's
size: a token sees half of it on each side, and itself.  Both layer types have separate rotary bases; the first layer
has no norm before its attention, because the embedding ends in one. ``local_attention`` is halved when it is read, so
that an odd value is written as the even one below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad import config as cfg
from kvad.checkpoint.conversion import STACKED, Family, HFConfigReader, TensorRule, prefix_rules, tensor_rule
from kvad.checkpoint.families import _encoder
from kvad.checkpoint.families._common import ACTIVATIONS, hf_activation, read_rope, rope_fields
from kvad.checkpoint.families._fields import require_rope
from kvad.config import ModelConfig
from kvad.errors import CheckpointError

_FULL, _SLIDING = "full_attention", "sliding_attention"
_POOLING = {"cls": "first", "mean": "mean"}


def read(fields: HFConfigReader) -> ModelConfig:
    _encoder.encoder_only(fields)
    types = _types(fields)
    first = {_FULL: "F", _SLIDING: "S"}[types[0]]  # only this layer type has no first norm
    pattern = first + "".join({_FULL: "G", _SLIDING: "L"}[kind] for kind in types[1:])
    layer_types = {letter: _layer(fields, types[pattern.index(letter)], letter != first) for letter in set(pattern)}
    return ModelConfig(
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        max_seq_len=_max_seq_len(fields),
        encoder=cfg.StackConfig(len(types), layer_types, pattern),
        embedding=cfg.EmbeddingConfig(norm=_norm(fields)),
        head=_encoder.read_task_head(fields, _heads(fields)),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )


def _types(fields: HFConfigReader) -> list[str]:
    """Return ``layer_types`` (5.x), or a full layer in every n-th place from the first (4.x)."""
    layers, interval = fields.integer("num_hidden_layers"), fields.integer("global_attn_every_n_layers", default=3)
    types = fields.get("layer_types", [_SLIDING if i % interval else _FULL for i in range(layers)])
    if len(types) != layers or not set(types) <= {_FULL, _SLIDING}:
        raise CheckpointError(f"{fields.where}: layer_types {types!r} is not supported")
    return list(types)


def _layer(fields: HFConfigReader, kind: str, first_norm: bool) -> cfg.LayerConfig:
    bias = fields.flag("attention_bias")
    fields.require_one_of("rope_theta", reason="Use global_rope_theta and local_rope_theta.")
    attention = cfg.AttentionConfig(
        fields.integer("num_attention_heads"),
        position=read_rope(fields, max_seq_len=_max_seq_len(fields), layer_type=kind, theta=_theta(fields, kind)),
        causal=False,
        window=None if kind == _FULL else fields.integer("local_attention", default=128) // 2 + 1,
        qkv_bias=bias,
        out_bias=bias,
    )
    activation = fields.choice("hidden_activation", ACTIVATIONS, "gelu")
    mlp = cfg.GatedMLPConfig(fields.integer("intermediate_size"), activation, fields.flag("mlp_bias"))
    return cfg.LayerConfig(attention, mlp, _norm(fields), pre_attention_norm=first_norm)


def _theta(fields: HFConfigReader, kind: str) -> float:
    """Return the rotary base of a layer type in 4.x's fields; null for local layers is the global one."""
    full_theta = fields.number("global_rope_theta", default=160000.0)
    if kind == _FULL or fields.content.get("local_rope_theta", 0) is None:
        return full_theta
    return fields.number("local_rope_theta", default=10000.0)


def _max_seq_len(fields: HFConfigReader) -> int:
    return fields.integer("max_position_embeddings", default=8192)


def _norm(fields: HFConfigReader) -> cfg.NormConfig:
    return cfg.NormConfig("layer", fields.number("norm_eps", default=1e-5), bias=fields.flag("norm_bias"))


def _heads(fields: HFConfigReader) -> dict[str, _encoder.TaskHead]:
    names, pool = _encoder.read_labels(fields), fields.choice("classifier_pooling", _POOLING, "cls")
    activation = fields.choice("classifier_activation", ACTIVATIONS, "gelu")
    transform = cfg.HeadTransformConfig(activation, fields.flag("classifier_bias"), _norm(fields))
    return {
        "ForMaskedLM": cfg.LanguageHeadConfig(bias=fields.flag("decoder_bias", True), transform=transform),
        "ForTokenClassification": cfg.ClassificationHeadConfig(names, transform=transform),
        "ForSequenceClassification": cfg.ClassificationHeadConfig(names, "row", pool, transform=transform),
        "Model": cfg.PoolingHeadConfig(),
    }


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    base = "" if isinstance(config.head, cfg.PoolingHeadConfig) else "model."
    yield tensor_rule("embedding.tokens", f"{base}embeddings.tok_embeddings")
    yield tensor_rule("embedding.norm", f"{base}embeddings.norm")
    for i in range(config.stack.num_layers):
        kvad_prefix, hf_prefix = f"encoder.layers.{i}", f"{base}layers.{i}"
        yield tensor_rule(tuple(f"{kvad_prefix}.attention.{part}" for part in "qkv"), f"{hf_prefix}.attn.Wqkv", STACKED)
        yield tensor_rule((f"{kvad_prefix}.mlp.gate", f"{kvad_prefix}.mlp.up"), f"{hf_prefix}.mlp.Wi", STACKED)
        names = {"attention.out": "attn.Wo", "mlp.down": "mlp.Wo", "norm1": "attn_norm", "norm2": "mlp_norm"}
        yield from prefix_rules(kvad_prefix, hf_prefix, names)
    yield tensor_rule("encoder.norm", f"{base}final_norm")
    yield tensor_rule("head.transform.dense", "head.dense")
    yield tensor_rule("head.transform.norm", "head.norm")
    yield tensor_rule("head", "decoder" if isinstance(config.head, cfg.LanguageHeadConfig) else "classifier")


def write(config: ModelConfig) -> dict[str, Any]:
    stack, layer, head = config.stack, config.stack.layer_config(0), config.head
    layers = [stack.layer_config(i) for i in range(stack.num_layers)]
    types = [_FULL if layer_config.attention.window is None else _SLIDING for layer_config in layers]
    windows = {layer_config.attention.window for layer_config in layers if layer_config.attention.window is not None}
    ropes = {
        kind: require_rope(layer_config.attention.position) for kind, layer_config in zip(types, layers, strict=True)
    }
    fields = {
        **_encoder.task_fields(config, "ModernBert"),
        "model_type": "modernbert",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": stack.num_layers,
        "num_attention_heads": layer.attention.num_heads,
        "intermediate_size": layer.mlp.intermediate_size,
        "hidden_activation": hf_activation(layer.mlp.activation),
        "max_position_embeddings": config.max_seq_len,
        "norm_eps": layer.norm.eps,
        "norm_bias": layer.norm.bias,
        "attention_bias": layer.attention.qkv_bias,
        "mlp_bias": layer.mlp.bias if isinstance(layer.mlp, cfg.GatedMLPConfig) else False,
        "decoder_bias": not isinstance(head, cfg.LanguageHeadConfig) or head.bias,
        "classifier_pooling": "mean"
        if isinstance(head, cfg.ClassificationHeadConfig) and head.pool == "mean"
        else "cls",
        "local_attention": 2 * (max(windows, default=65) - 1),
        "pad_token_id": None,  # the class's default exceeds a smaller vocabulary
        "tie_word_embeddings": config.tie_embeddings,
        **_types_and_ropes(types, ropes),
    }
    if head.transform is not None:
        fields["classifier_bias"] = head.transform.bias
        fields["classifier_activation"] = hf_activation(str(head.transform.activation))
    return fields


def _types_and_ropes(types: list[str], ropes: dict[str, cfg.RopeConfig]) -> dict[str, Any]:
    """Return layer types and rotary positions in 5.x's format and, if possible, in 4.x's.

    4.x can express every n-th layer being full, and one scaling for all layers.
    """
    layers = len(types)
    rope_by_type = {kind: rope_fields(position) for kind, position in ropes.items()}
    out: dict[str, Any] = {
        "layer_types": types,
        "rope_parameters": {kind: fields["rope_parameters"] for kind, fields in rope_by_type.items()},
    }
    thetas = {_FULL: "global_rope_theta", _SLIDING: "local_rope_theta"}
    out |= {thetas[kind]: position.theta for kind, position in ropes.items()}
    for interval in range(1, layers + 1):
        if types == [_SLIDING if i % interval else _FULL for i in range(layers)]:
            out["global_attn_every_n_layers"] = interval
    scalings = [fields["rope_scaling"] for fields in rope_by_type.values()]
    if scalings[0] is not None and all(scaling == scalings[0] for scaling in scalings):
        out["rope_scaling"] = scalings[0]
    return out


FAMILIES = (
    Family(
        ("modernbert",),
        read,
        rules,
        write,
        prefix="model.",
        ignored=(r"decoder\.weight",),
        head=("decoder.weight", "model.embeddings.tok_embeddings.weight"),
        resolve=_encoder.head_resolver("head.dense.weight"),
    ),
)
