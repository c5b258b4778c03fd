"""The weights of a model from its config alone: every tensor's name and shape, no torch, nothing loaded.

The one promise: ``weight_shapes(config)`` is what ``Transformer(config).state_dict()`` holds, name by name.  It stands
here and not in ``kvad.model`` because planning must know it without torch, and ``kvad.cache`` never imports the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvad.config.layers import (
    AttentionConfig,
    ClassificationHeadConfig,
    CustomPositionsConfig,
    EmbeddingConfig,
    GatedMLPConfig,
    LanguageHeadConfig,
    LayerConfig,
    LearnedPositionsConfig,
    MoEConfig,
    NormConfig,
    PlainMLPConfig,
    PoolingHeadConfig,
    StackConfig,
    T5BiasConfig,
)
from kvad.config.model import AttentionSpec, ModelConfig, embedding_size, encoder_hidden_size, head_dim, head_input_size
from kvad.config.plugins import load_plugin

TensorShape = tuple[int, ...]
NamedShapes = Iterator[tuple[str, TensorShape]]
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
COMPONENTS = ("embedding", "attention", "mlp", "norms", "head")


def weight_shapes(config: ModelConfig) -> dict[str, TensorShape]:
    """Name -> shape of every tensor that a checkpoint of this model stores."""
    return dict(_model(config))


class SummarizerShape(NamedTuple):
    """What learned summaries are made by: one of ``ratio`` tokens, by ``hidden`` units."""

    ratio: int
    hidden: int


def summarizer_shapes(mixers: Sequence[AttentionSpec], learned: SummarizerShape) -> dict[str, TensorShape]:
    """The same of a compressor for layers that are so (``model/compress.py``): those that keep all their tokens."""
    found: dict[str, TensorShape] = {}
    for number, mixer in enumerate(mixers):
        if mixer.causal and not mixer.is_cross_attention and mixer.window is None:
            both, (ratio, hidden), name = mixer.head_dim + mixer.value_dim, learned, f"layers.{number}"
            found[f"{name}.look"] = (mixer.num_kv_heads, 2, both)
            found[f"{name}.place"] = (mixer.num_kv_heads, 2, ratio)
            found[f"{name}.inner"] = (mixer.num_kv_heads, both, hidden)
            found[f"{name}.inner_bias"] = (mixer.num_kv_heads, hidden)
            found[f"{name}.outer"] = (mixer.num_kv_heads, hidden, both + 1)
    return found


def mismatches(config: ModelConfig, stored: Mapping[str, TensorShape]) -> list[str]:
    """What is wrong with stored tensors, name by name: missing, of no place in the model, of another shape."""
    wanted = weight_shapes(config)
    found = [f"{name} {list(shape)} is missing" for name, shape in wanted.items() if name not in stored]
    for name, shape in stored.items():
        if name not in wanted:
            found.append(f"{name} {list(shape)} is extra: the config has no place for it")
        elif shape != wanted[name]:
            found.append(f"{name} is {list(shape)}, the config says {list(wanted[name])}")
    return found


def num_parameters(config: ModelConfig) -> int:
    """All of them; a tied head's matrix counts once."""
    return sum(math.prod(shape) for shape in weight_shapes(config).values())


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    return num_parameters(config) * DTYPE_BYTES[dtype]


def lookup_bytes(config: ModelConfig, dtype: str) -> int:
    """Weights of which a token reads one row only: the position table, and the embedding where no head shares it."""
    read_whole = config.tie_embeddings and isinstance(config.head, LanguageHeadConfig)
    numbers = 0 if read_whole else config.vocab_size * embedding_size(config)
    for name, shape in weight_shapes(config).items():
        if name.endswith((".positions.weight", ".token_types.weight")) or name == "encoder_embedding.tokens.weight":
            numbers += math.prod(shape)
    return numbers * DTYPE_BYTES[dtype]


def tensor_component(name: str) -> str:
    """Which of :data:`PARTS` a tensor of a checkpoint belongs to."""
    pieces = name.split(".")
    if any(piece.startswith("norm") or piece.endswith("_norm") for piece in pieces):
        return "norms"
    if pieces[0] in ("embed", "source", "head"):
        return "head" if pieces[0] == "head" else "embedding"
    return "mlp" if "mlp" in pieces else "attention"


def component_sizes(shapes: Mapping[str, TensorShape]) -> dict[str, int]:
    """Parameters by part, in the order of :data:`PARTS`."""
    counts = dict.fromkeys(COMPONENTS, 0)
    for name, shape in shapes.items():
        counts[tensor_component(name)] += math.prod(shape)
    return counts


def _model(config: ModelConfig) -> NamedShapes:
    yield from _embedding("embed", config.hidden_size, config.vocab_size, config.embedding)
    if config.encoder_input is not None:
        yield from _embedding(
            "source", encoder_hidden_size(config), config.encoder_input.vocab_size, config.encoder_input.embedding
        )
    sides = (("encoder", config.encoder, encoder_hidden_size(config)), ("decoder", config.decoder, config.hidden_size))
    for name, stack, width in sides:
        if stack is not None:
            yield from _stack(name, config, stack, width)
    yield from _head(config)


def _embedding(name: str, width: int, vocab: int | None, embed: EmbeddingConfig) -> NamedShapes:
    table = width if embed.embedding_size is None else embed.embedding_size
    inner = width if embed.projection == "start" else table
    if vocab is not None:
        yield f"{name}.tokens.weight", (vocab, table)
    if isinstance(embed.position, LearnedPositionsConfig):
        yield f"{name}.positions.weight", (embed.position.num_positions, inner)
    if embed.num_token_types:
        yield f"{name}.token_types.weight", (embed.num_token_types, inner)
    if embed.norm is not None:
        yield from _norm(f"{name}.norm", (inner,), embed.norm)
    if embed.embedding_size is not None:
        yield from _linear(f"{name}.projection", table, width, embed.projection == "end")


def _stack(name: str, config: ModelConfig, stack: StackConfig, width: int) -> NamedShapes:
    for index in range(stack.num_layers):
        yield from _layer(f"{name}.layers.{index}", config, stack, stack.layer_config(index), width)
    if stack.final_norm:
        yield from _norm(f"{name}.norm", (width,), stack.layer_config(stack.num_layers - 1).norm)
    for letter, kind in stack.layer_types.items():
        position = kind.attention.position
        if isinstance(position, T5BiasConfig) and position.shared:
            yield f"{name}.relative_bias.{letter}", (position.num_buckets, kind.attention.num_heads)
        if isinstance(position, CustomPositionsConfig):
            made = load_plugin(position.name, "position.name")
            shapes = getattr(made, "shapes", _none)(
                kind.attention, head_dim(config, kind.attention), **position.options
            )
            yield from ((f"{name}.positions.{letter}.{own}", shape) for own, shape in shapes.items())


def _head(config: ModelConfig) -> NamedShapes:
    head, width = config.head, config.hidden_size
    if head.transform is not None:
        width = head_input_size(config)
        yield from _linear("head.transform.dense", config.hidden_size, width, head.transform.bias)
        if head.transform.norm is not None:
            yield from _norm("head.transform.norm", (width,), head.transform.norm)
    if isinstance(head, PoolingHeadConfig):
        return
    outputs = config.vocab_size if isinstance(head, LanguageHeadConfig) else len(head.labels)
    if isinstance(head, ClassificationHeadConfig) or not config.tie_embeddings:
        yield "head.weight", (outputs, width)
    if head.bias:
        yield "head.bias", (outputs,)


def _layer(name: str, config: ModelConfig, stack: StackConfig, layer: LayerConfig, width: int) -> NamedShapes:
    yield from _attention(f"{name}.attention", config, layer.attention, layer.norm, width, width)
    if layer.cross_attention is not None:
        yield from _attention(
            f"{name}.cross_attention", config, layer.cross_attention, layer.norm, width, encoder_hidden_size(config)
        )
    yield from _mlp(f"{name}.mlp", width, layer.mlp)
    norms = ["norm1"] if layer.pre_attention_norm else []
    norms += ["norm_cross"] if layer.cross_attention is not None else []
    norms += [] if stack.norm_position == "parallel" else ["norm2"]
    if stack.norm_position == "sandwich":
        norms += [f"{norm}_after" for norm in norms]
    for norm in norms:
        yield from _norm(f"{name}.{norm}", (width,), layer.norm)


def _attention(
    name: str, config: ModelConfig, mixer: AttentionConfig, norm: NormConfig, width: int, source: int
) -> NamedShapes:
    """``source``: the width of what keys and values are made of."""
    dim, kv_heads = head_dim(config, mixer), mixer.num_kv_heads or mixer.num_heads
    value_dim = mixer.value_dim or dim
    yield from _linear(f"{name}.q", width, mixer.num_heads * dim, mixer.qkv_bias)
    yield from _linear(f"{name}.k", source, kv_heads * dim, mixer.qkv_bias)
    yield from _linear(f"{name}.v", source, kv_heads * value_dim, mixer.qkv_bias)
    yield from _linear(f"{name}.out", mixer.num_heads * value_dim, width, mixer.out_bias)
    if mixer.qk_norm != "none":
        for part, heads in (("q_norm", mixer.num_heads), ("k_norm", kv_heads)):
            shapes: dict[str, TensorShape] = {"head": (dim,), "each": (heads, dim), "full": (heads * dim,)}
            yield from _norm(f"{name}.{part}", shapes[mixer.qk_norm], mixer.qk_norm_config or norm)
    if mixer.sink_logits:
        yield f"{name}.sink_logits", (mixer.num_heads,)
    if isinstance(mixer.position, T5BiasConfig) and not mixer.position.shared:
        yield f"{name}.relative_bias", (mixer.position.num_buckets, mixer.num_heads)
    if mixer.custom_class is not None:
        shapes = getattr(load_plugin(mixer.custom_class, "mixer.own"), "shapes", _none)(config, mixer)
        yield from ((f"{name}.{own}", shape) for own, shape in shapes.items())


def _none(*_: object, **__: object) -> dict[str, TensorShape]:
    return {}


def _mlp(name: str, width: int, mlp: PlainMLPConfig | GatedMLPConfig | MoEConfig) -> NamedShapes:
    if isinstance(mlp, MoEConfig):
        yield from _linear(f"{name}.router", width, mlp.num_experts, mlp.router_bias)
        for part, outputs, inputs in (
            ("gate", mlp.intermediate_size, width),
            ("up", mlp.intermediate_size, width),
            ("down", width, mlp.intermediate_size),
        ):
            yield f"{name}.{part}", (mlp.num_experts, outputs, inputs)
            if mlp.bias:
                yield f"{name}.{part}_bias", (mlp.num_experts, outputs)
        return
    if isinstance(mlp, GatedMLPConfig):
        yield from _linear(f"{name}.gate", width, mlp.intermediate_size, mlp.bias)
    yield from _linear(f"{name}.up", width, mlp.intermediate_size, mlp.bias)
    yield from _linear(f"{name}.down", mlp.intermediate_size, width, mlp.bias)


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> NamedShapes:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, shape: TensorShape, norm: NormConfig) -> NamedShapes:
    if norm.weight:
        yield f"{name}.weight", shape
    if norm.bias:
        yield f"{name}.bias", shape
