"""ModernBERT (Warner et al. 2024): rotary positions, LayerNorm before each half, GeGLU; most layers see a window.

``local_attention`` is the whole window: a token sees half of it on each side, itself besides.  Layers of the two kinds
have rotary bases of their own; the first layer has no norm before its attention, as the embedding ends in one.
``local_attention`` is read halved, so that an odd one is written as the even one below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvad.checkpoint.families import encoders
from kvad.checkpoint.families.common import ACTIVATIONS, rope, rope_fields, rotary, their_activation
from kvad.checkpoint.hf import STACKED, Family, Fields, Rule, rule, rules_under
from kvad.config import (
    Attention,
    Classes,
    Embedding,
    Gated,
    Head,
    Layer,
    ModelConfig,
    Norm,
    Pooled,
    Rope,
    Stack,
    Transform,
)
from kvad.errors import CheckpointError

__all__ = ["FAMILY"]

_FULL, _SLIDING = "full_attention", "sliding_attention"
_POOLING = {"cls": "first", "mean": "mean"}


def read(fields: Fields) -> ModelConfig:
    encoders.encoder_only(fields)
    types = _types(fields)
    first = {_FULL: "F", _SLIDING: "S"}[types[0]]  # its kind alone has no first norm
    pattern = first + "".join({_FULL: "G", _SLIDING: "L"}[kind] for kind in types[1:])
    kinds = {letter: _layer(fields, types[pattern.index(letter)], letter != first) for letter in set(pattern)}
    return ModelConfig(
        width=fields.integer("hidden_size"),
        vocab=fields.integer("vocab_size"),
        limit=_limit(fields),
        encoder=Stack(len(types), kinds, pattern),
        embed=Embedding(norm=_norm(fields)),
        head=encoders.task(fields, _heads(fields)),
        tie=fields.flag("tie_word_embeddings", True),
    )


def _types(fields: Fields) -> list[str]:
    """``layer_types`` (5.x), or every n-th layer a full one, beginning with the first (4.x)."""
    layers, every = fields.integer("num_hidden_layers"), fields.integer("global_attn_every_n_layers", default=3)
    types = fields.get("layer_types", [_SLIDING if i % every else _FULL for i in range(layers)])
    if len(types) != layers or not set(types) <= {_FULL, _SLIDING}:
        raise CheckpointError(f"{fields.where}: layer_types {types!r} is not supported")
    return list(types)


def _layer(fields: Fields, kind: str, first_norm: bool) -> Layer:
    bias = fields.flag("attention_bias")
    fields.refuse("rope_theta", why="say global_rope_theta and local_rope_theta")
    mixer = Attention(
        fields.integer("num_attention_heads"),
        position=rope(fields, limit=_limit(fields), layer_type=kind, theta=_theta(fields, kind)),
        causal=False,
        window=None if kind == _FULL else fields.integer("local_attention", default=128) // 2 + 1,
        bias=bias,
        out_bias=bias,
    )
    activation = fields.choice("hidden_activation", ACTIVATIONS, "gelu")
    mlp = Gated(fields.integer("intermediate_size"), activation, fields.flag("mlp_bias"))
    return Layer(mixer, mlp, _norm(fields), first_norm=first_norm)


def _theta(fields: Fields, kind: str) -> float:
    """4.x's fields; a null for the local layers means the global one's."""
    whole = fields.number("global_rope_theta", default=160000.0)
    if kind == _FULL or fields.content.get("local_rope_theta", 0) is None:
        return whole
    return fields.number("local_rope_theta", default=10000.0)


def _limit(fields: Fields) -> int:
    return fields.integer("max_position_embeddings", default=8192)


def _norm(fields: Fields) -> Norm:
    return Norm("layer", fields.number("norm_eps", default=1e-5), bias=fields.flag("norm_bias"))


def _heads(fields: Fields) -> dict[str, encoders.Task]:
    names, pool = encoders.labels(fields), fields.choice("classifier_pooling", _POOLING, "cls")
    activation = fields.choice("classifier_activation", ACTIVATIONS, "gelu")
    transform = Transform(activation, fields.flag("classifier_bias"), _norm(fields))
    return {
        "ForMaskedLM": Head(bias=fields.flag("decoder_bias", True), transform=transform),
        "ForTokenClassification": Classes(names, transform=transform),
        "ForSequenceClassification": Classes(names, "row", pool, transform=transform),
        "Model": Pooled(),
    }


def rules(config: ModelConfig) -> Iterator[Rule]:
    base = "" if isinstance(config.head, Pooled) else "model."
    yield rule("embed.tokens", f"{base}embeddings.tok_embeddings")
    yield rule("embed.norm", f"{base}embeddings.norm")
    for i in range(config.stack.layers):
        ours, theirs = f"encoder.layers.{i}", f"{base}layers.{i}"
        yield rule(tuple(f"{ours}.mixer.{part}" for part in "qkv"), f"{theirs}.attn.Wqkv", STACKED)
        yield rule((f"{ours}.mlp.gate", f"{ours}.mlp.up"), f"{theirs}.mlp.Wi", STACKED)
        names = {"mixer.out": "attn.Wo", "mlp.down": "mlp.Wo", "norm1": "attn_norm", "norm2": "mlp_norm"}
        yield from rules_under(ours, theirs, names)
    yield rule("encoder.norm", f"{base}final_norm")
    yield rule("head.transform.dense", "head.dense")
    yield rule("head.transform.norm", "head.norm")
    yield rule("head", "decoder" if isinstance(config.head, Head) else "classifier")


def write(config: ModelConfig) -> dict[str, Any]:
    stack, layer, head = config.stack, config.stack.layer(0), config.head
    layers = [stack.layer(i) for i in range(stack.layers)]
    types = [_FULL if each.mixer.window is None else _SLIDING for each in layers]
    windows = {each.mixer.window for each in layers if each.mixer.window is not None}
    ropes = {kind: rotary(each.mixer.position, "modernbert") for kind, each in zip(types, layers, strict=True)}
    fields = {
        **encoders.task_fields(config, "ModernBert"),
        "model_type": "modernbert",
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "num_hidden_layers": stack.layers,
        "num_attention_heads": layer.mixer.heads,
        "intermediate_size": layer.mlp.hidden,
        "hidden_activation": their_activation(layer.mlp.activation),
        "max_position_embeddings": config.limit,
        "norm_eps": layer.norm.eps,
        "norm_bias": layer.norm.bias,
        "attention_bias": layer.mixer.bias,
        "mlp_bias": layer.mlp.bias if isinstance(layer.mlp, Gated) else False,
        "decoder_bias": not isinstance(head, Head) or head.bias,
        "classifier_pooling": "mean" if isinstance(head, Classes) and head.pool == "mean" else "cls",
        "local_attention": 2 * (max(windows, default=65) - 1),
        "pad_token_id": None,  # theirs is beyond a smaller vocabulary
        "tie_word_embeddings": config.tie,
        **_types_and_ropes(types, ropes),
    }
    if head.transform is not None:
        fields["classifier_bias"] = head.transform.bias
        fields["classifier_activation"] = their_activation(str(head.transform.activation))
    return fields


def _types_and_ropes(types: list[str], ropes: dict[str, Rope]) -> dict[str, Any]:
    """The kinds of layers and their rotary positions as 5.x spells them, and as 4.x does where it can: every n-th layer
    a full one, one scaling for all."""
    layers = len(types)
    said = {kind: rope_fields(position) for kind, position in ropes.items()}
    out: dict[str, Any] = {
        "layer_types": types,
        "rope_parameters": {kind: fields["rope_parameters"] for kind, fields in said.items()},
    }
    thetas = {_FULL: "global_rope_theta", _SLIDING: "local_rope_theta"}
    out |= {thetas[kind]: position.theta for kind, position in ropes.items()}
    for every in range(1, layers + 1):
        if types == [_SLIDING if i % every else _FULL for i in range(layers)]:
            out["global_attn_every_n_layers"] = every
    scalings = [fields["rope_scaling"] for fields in said.values()]
    if scalings[0] is not None and all(scaling == scalings[0] for scaling in scalings):
        out["rope_scaling"] = scalings[0]
    return out


FAMILY = Family(
    ("modernbert",),
    read,
    rules,
    write,
    prefix="model.",
    ignored=(r"decoder\.weight",),
    head=("decoder.weight", "model.embeddings.tok_embeddings.weight"),
    settle=encoders.settling("head.dense.weight"),
)
