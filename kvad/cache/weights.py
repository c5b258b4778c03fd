"""The weights of a model from its config alone: every tensor's name and shape, no torch, nothing loaded.

The one promise: ``weight_shapes(config)`` is what ``Transformer(config).state_dict()`` holds, name by name.  It stands
here and not in ``kvad.model`` because planning must know it without torch, and ``kvad.cache`` never imports the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvad.cache.sizing import DTYPE_BYTES
from kvad.config import (
    Attention,
    Classes,
    Embedding,
    Experts,
    Gated,
    Head,
    Layer,
    LearnedPositions,
    MixerSpec,
    ModelConfig,
    Norm,
    OwnPositions,
    Plain,
    Pooled,
    Stack,
    T5Bias,
    head_dim,
    head_width,
    source_width,
    table_width,
)
from kvad.own import load_own

__all__ = [
    "PARTS",
    "Summaries",
    "compressor_shapes",
    "lookup_bytes",
    "misfits",
    "num_parameters",
    "part_of",
    "parts",
    "weight_bytes",
    "weight_shapes",
]

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]
PARTS = ("embedding", "attention", "mlp", "norms", "head")


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name -> shape of every tensor that a checkpoint of this model stores."""
    return dict(_model(config))


class Summaries(NamedTuple):
    """What learned summaries are made by: one of ``ratio`` tokens, by ``hidden`` units."""

    ratio: int
    hidden: int


def compressor_shapes(mixers: Sequence[MixerSpec], learned: Summaries) -> dict[str, Shape]:
    """The same of a compressor for layers that are so (``model/compress.py``): those that keep all their tokens."""
    found: dict[str, Shape] = {}
    for number, mixer in enumerate(mixers):
        if mixer.causal and not mixer.cross and mixer.window is None:
            both, (ratio, hidden), name = mixer.head_dim + mixer.value_dim, learned, f"layers.{number}"
            found[f"{name}.look"] = (mixer.kv_heads, 2, both)
            found[f"{name}.place"] = (mixer.kv_heads, 2, ratio)
            found[f"{name}.inner"] = (mixer.kv_heads, both, hidden)
            found[f"{name}.inner_bias"] = (mixer.kv_heads, hidden)
            found[f"{name}.outer"] = (mixer.kv_heads, hidden, both + 1)
    return found


def misfits(config: ModelConfig, stored: Mapping[str, Shape]) -> list[str]:
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
    read_whole = config.tie and isinstance(config.head, Head)
    numbers = 0 if read_whole else config.vocab * table_width(config)
    for name, shape in weight_shapes(config).items():
        if name.endswith((".positions.weight", ".segments.weight")) or name == "source.tokens.weight":
            numbers += math.prod(shape)
    return numbers * DTYPE_BYTES[dtype]


def part_of(name: str) -> str:
    """Which of :data:`PARTS` a tensor of a checkpoint belongs to."""
    pieces = name.split(".")
    if any(piece.startswith("norm") or piece.endswith("_norm") for piece in pieces):
        return "norms"
    if pieces[0] in ("embed", "source", "head"):
        return "head" if pieces[0] == "head" else "embedding"
    return "mlp" if "mlp" in pieces else "attention"


def parts(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Parameters by part, in the order of :data:`PARTS`."""
    counts = dict.fromkeys(PARTS, 0)
    for name, shape in shapes.items():
        counts[part_of(name)] += math.prod(shape)
    return counts


def _model(config: ModelConfig) -> Named:
    yield from _embedding("embed", config.width, config.vocab, config.embed)
    if config.source is not None:
        yield from _embedding("source", source_width(config), config.source.vocab, config.source.embed)
    sides = (("encoder", config.encoder, source_width(config)), ("decoder", config.decoder, config.width))
    for name, stack, width in sides:
        if stack is not None:
            yield from _stack(name, config, stack, width)
    yield from _head(config)


def _embedding(name: str, width: int, vocab: int | None, embed: Embedding) -> Named:
    table = width if embed.width is None else embed.width
    inner = width if embed.project == "start" else table
    if vocab is not None:
        yield f"{name}.tokens.weight", (vocab, table)
    if isinstance(embed.position, LearnedPositions):
        yield f"{name}.positions.weight", (embed.position.size, inner)
    if embed.segments:
        yield f"{name}.segments.weight", (embed.segments, inner)
    if embed.norm is not None:
        yield from _norm(f"{name}.norm", (inner,), embed.norm)
    if embed.width is not None:
        yield from _linear(f"{name}.project", table, width, embed.project == "end")


def _stack(name: str, config: ModelConfig, stack: Stack, width: int) -> Named:
    for index in range(stack.layers):
        yield from _layer(f"{name}.layers.{index}", config, stack, stack.layer(index), width)
    if stack.final_norm:
        yield from _norm(f"{name}.norm", (width,), stack.layer(stack.layers - 1).norm)
    for letter, kind in stack.kinds.items():
        position = kind.mixer.position
        if isinstance(position, T5Bias) and position.shared:
            yield f"{name}.relative.{letter}", (position.buckets, kind.mixer.heads)
        if isinstance(position, OwnPositions):
            made = load_own(position.name, "position.name")
            shapes = getattr(made, "shapes", _none)(kind.mixer, head_dim(config, kind.mixer), **position.options)
            yield from ((f"{name}.positions.{letter}.{own}", shape) for own, shape in shapes.items())


def _head(config: ModelConfig) -> Named:
    head, width = config.head, config.width
    if head.transform is not None:
        width = head_width(config)
        yield from _linear("head.transform.dense", config.width, width, head.transform.bias)
        if head.transform.norm is not None:
            yield from _norm("head.transform.norm", (width,), head.transform.norm)
    if isinstance(head, Pooled):
        return
    outputs = config.vocab if isinstance(head, Head) else len(head.labels)
    if isinstance(head, Classes) or not config.tie:
        yield "head.weight", (outputs, width)
    if head.bias:
        yield "head.bias", (outputs,)


def _layer(name: str, config: ModelConfig, stack: Stack, layer: Layer, width: int) -> Named:
    yield from _attention(f"{name}.mixer", config, layer.mixer, layer.norm, width, width)
    if layer.cross is not None:
        yield from _attention(f"{name}.cross", config, layer.cross, layer.norm, width, source_width(config))
    yield from _mlp(f"{name}.mlp", width, layer.mlp)
    norms = ["norm1"] if layer.first_norm else []
    norms += ["norm_cross"] if layer.cross is not None else []
    norms += [] if stack.norm_place == "parallel" else ["norm2"]
    if stack.norm_place == "sandwich":
        norms += [f"{norm}_after" for norm in norms]
    for norm in norms:
        yield from _norm(f"{name}.{norm}", (width,), layer.norm)


def _attention(name: str, config: ModelConfig, mixer: Attention, norm: Norm, width: int, source: int) -> Named:
    """``source``: the width of what keys and values are made of."""
    dim, kv_heads = head_dim(config, mixer), mixer.kv_heads or mixer.heads
    value_dim = mixer.value_dim or dim
    yield from _linear(f"{name}.q", width, mixer.heads * dim, mixer.bias)
    yield from _linear(f"{name}.k", source, kv_heads * dim, mixer.bias)
    yield from _linear(f"{name}.v", source, kv_heads * value_dim, mixer.bias)
    yield from _linear(f"{name}.out", mixer.heads * value_dim, width, mixer.out_bias)
    if mixer.qk_norm != "none":
        for part, heads in (("q_norm", mixer.heads), ("k_norm", kv_heads)):
            shapes: dict[str, Shape] = {"head": (dim,), "each": (heads, dim), "full": (heads * dim,)}
            yield from _norm(f"{name}.{part}", shapes[mixer.qk_norm], mixer.norm or norm)
    if mixer.sinks:
        yield f"{name}.sink_logits", (mixer.heads,)
    if isinstance(mixer.position, T5Bias) and not mixer.position.shared:
        yield f"{name}.relative", (mixer.position.buckets, mixer.heads)
    if mixer.own is not None:
        shapes = getattr(load_own(mixer.own, "mixer.own"), "shapes", _none)(config, mixer)
        yield from ((f"{name}.{own}", shape) for own, shape in shapes.items())


def _none(*_: object, **__: object) -> dict[str, Shape]:
    return {}


def _mlp(name: str, width: int, mlp: Plain | Gated | Experts) -> Named:
    if isinstance(mlp, Experts):
        yield from _linear(f"{name}.router", width, mlp.count, mlp.router_bias)
        for part, outputs, inputs in (
            ("gate", mlp.hidden, width),
            ("up", mlp.hidden, width),
            ("down", width, mlp.hidden),
        ):
            yield f"{name}.{part}", (mlp.count, outputs, inputs)
            if mlp.bias:
                yield f"{name}.{part}_bias", (mlp.count, outputs)
        return
    if isinstance(mlp, Gated):
        yield from _linear(f"{name}.gate", width, mlp.hidden, mlp.bias)
    yield from _linear(f"{name}.up", width, mlp.hidden, mlp.bias)
    yield from _linear(f"{name}.down", mlp.hidden, width, mlp.bias)


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> Named:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, shape: Shape, norm: Norm) -> Named:
    if norm.weight:
        yield f"{name}.weight", shape
    if norm.bias:
        yield f"{name}.bias", shape
