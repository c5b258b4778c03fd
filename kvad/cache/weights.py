"""The weights of a model from its config alone: every tensor's name and shape, no torch, nothing loaded.

The one promise: ``weight_shapes(config)`` is what ``Transformer(config).state_dict()`` holds, name by name.  It stands
here and not in ``kvad.model`` because planning must know it without torch, and ``kvad.cache`` never imports the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from kvad.cache.sizing import DTYPE_BYTES
from kvad.config import Attention, Gated, Layer, LearnedPositions, ModelConfig, Norm, Plain, T5Bias, head_dim

__all__ = ["PARTS", "lookup_bytes", "num_parameters", "part_of", "parts", "weight_bytes", "weight_shapes"]

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]
PARTS = ("embedding", "attention", "mlp", "norms", "head")


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name -> shape of every tensor that a checkpoint of this model stores."""
    return dict(_model(config))


def num_parameters(config: ModelConfig) -> int:
    """All of them; a tied head's matrix counts once."""
    return sum(math.prod(shape) for shape in weight_shapes(config).values())


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    return num_parameters(config) * DTYPE_BYTES[dtype]


def lookup_bytes(config: ModelConfig, dtype: str) -> int:
    """Weights of which a token reads one row only: the position table, and the embedding where no head shares it."""
    rows = 0 if config.tie else config.vocab
    if isinstance(config.position, LearnedPositions):
        rows += config.position.size
    return rows * config.width * DTYPE_BYTES[dtype]


def part_of(name: str) -> str:
    """Which of :data:`PARTS` a tensor of a checkpoint belongs to."""
    pieces = name.split(".")
    if any(piece.startswith("norm") or piece.endswith("_norm") for piece in pieces):
        return "norms"
    if pieces[0] in ("embed", "head"):
        return "embedding" if pieces[0] == "embed" else "head"
    return "mlp" if "mlp" in pieces else "attention"


def parts(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Parameters by part, in the order of :data:`PARTS`."""
    counts = dict.fromkeys(PARTS, 0)
    for name, shape in shapes.items():
        counts[part_of(name)] += math.prod(shape)
    return counts


def _model(config: ModelConfig) -> Named:
    width, stack = config.width, config.decoder
    yield "embed.tokens.weight", (config.vocab, width)
    if isinstance(config.position, LearnedPositions):
        yield "embed.positions.weight", (config.position.size, width)
    if config.embedding_norm is not None:
        yield from _norm("embed.norm", width, config.embedding_norm)
    for index in range(stack.layers):
        yield from _layer(f"decoder.layers.{index}", config, stack.layer(index))
    if stack.final_norm:
        yield from _norm("decoder.norm", width, stack.layer(stack.layers - 1).norm)
    for letter, kind in stack.kinds.items():
        position = kind.mixer.position
        if isinstance(position, T5Bias) and position.shared:
            yield f"decoder.relative.{letter}", (position.buckets, kind.mixer.heads)
    if not config.tie:
        yield "head.weight", (config.vocab, width)
    if config.head.bias:
        yield "head.bias", (config.vocab,)


def _layer(name: str, config: ModelConfig, layer: Layer) -> Named:
    yield from _attention(f"{name}.mixer", config, layer.mixer, layer.norm)
    yield from _mlp(f"{name}.mlp", config.width, layer.mlp)
    place = config.decoder.norm_place
    norms = ["norm1"] if place == "parallel" else ["norm1", "norm2"]
    if place == "sandwich":
        norms += ["norm1_after", "norm2_after"]
    for norm in norms:
        yield from _norm(f"{name}.{norm}", config.width, layer.norm)


def _attention(name: str, config: ModelConfig, mixer: Attention, norm: Norm) -> Named:
    dim, kv_heads = head_dim(config, mixer), mixer.kv_heads or mixer.heads
    value_dim = mixer.value_dim or dim
    yield from _linear(f"{name}.q", config.width, mixer.heads * dim, mixer.bias)
    yield from _linear(f"{name}.k", config.width, kv_heads * dim, mixer.bias)
    yield from _linear(f"{name}.v", config.width, kv_heads * value_dim, mixer.bias)
    yield from _linear(f"{name}.out", mixer.heads * value_dim, config.width, mixer.out_bias)
    if mixer.qk_norm != "none":
        full = mixer.qk_norm == "full"
        yield from _norm(f"{name}.q_norm", dim * (mixer.heads if full else 1), norm)
        yield from _norm(f"{name}.k_norm", dim * (kv_heads if full else 1), norm)
    if mixer.sinks:
        yield f"{name}.sink_logits", (mixer.heads,)
    if isinstance(mixer.position, T5Bias) and not mixer.position.shared:
        yield f"{name}.relative", (mixer.position.buckets, mixer.heads)


def _mlp(name: str, width: int, mlp: Plain | Gated) -> Named:
    if isinstance(mlp, Gated):
        yield from _linear(f"{name}.gate", width, mlp.hidden, mlp.bias)
    yield from _linear(f"{name}.up", width, mlp.hidden, mlp.bias)
    yield from _linear(f"{name}.down", mlp.hidden, width, mlp.bias)


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> Named:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int, norm: Norm) -> Named:
    yield f"{name}.weight", (width,)
    if norm.bias:
        yield f"{name}.bias", (width,)
