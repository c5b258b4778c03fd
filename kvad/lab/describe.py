"""The parts of a model in words, one line each: what its config says, and what follows from it.  No torch.

What a position encoding allows is said once here (:data:`ALLOWS`), for ``kvad inspect --tree`` and for its test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvad.config import (
    Alibi,
    Attention,
    Classes,
    DynamicScaling,
    Embedding,
    Experts,
    Gated,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    Norm,
    OwnPositions,
    Plain,
    Pooled,
    Rope,
    Scaling,
    SinusoidalPositions,
    T5Bias,
    Transform,
    YarnScaling,
)

__all__ = ["ALLOWS", "PLACES", "Allows", "allows", "attention", "embedding", "head", "kind_of", "mlp", "norm"]

Position = LearnedPositions | SinusoidalPositions | Rope | Alibi | T5Bias | OwnPositions | None


class Allows(NamedTuple):
    """What a position encoding allows: keys evicted while the others keep their positions, a text that goes on for ever
    with its positions renumbered, and prefixes that are used again."""

    eviction: str
    endless: str
    reuse: str


ALLOWS: Mapping[str, Allows] = {
    "learned": Allows(
        "exact until the table ends",
        "impossible, positions are baked into k and v: recompute",
        "exact at the same positions only",
    ),
    "sinusoidal": Allows(
        "exact up to the limit",
        "impossible, positions are baked into k and v: recompute",
        "exact at the same positions only",
    ),
    "rope": Allows(
        "exact while positions are below the limit; keys are stored rotated",
        "rotate on read, or turn the stored keys by R(delta)",
        "exact; keys of what is no prefix must be turned",
    ),
    "alibi": Allows(
        "exact; the bias is made of stored positions when they are read",
        "renumber the stored positions, keys stay; kept ones would bias sinks away",
        "exact",
    ),
    "t5": Allows(
        "exact; the bias is made of stored positions when they are read",
        "renumber the stored positions, keys stay; kept ones would bias sinks away",
        "exact",
    ),
    "none": Allows("exact; no position enters k or v", "nothing to renumber", "exact"),
    "own": Allows("as its class has it", "as its class has it", "exact for equal prefixes"),
    "source": Allows(
        "none of a source is evicted", "a source does not grow", "of a whole equal source, never of its part"
    ),
}

PLACES: Mapping[str, str] = {
    "pre": "norms before each half: x + f(norm(x))",
    "post": "norms after each half: norm(x + f(x))",
    "sandwich": "norms before and after each half: x + norm(f(norm(x)))",
    "after": "norms after each half, inside the residual: x + norm(f(x))",
    "normed": "the normed stream goes on: norm(x) + f(norm(x))",
    "parallel": "attention and MLP side by side, one norm: x + attention(norm(x)) + mlp(norm(x))",
    "parallel_pair": "attention and MLP side by side, a norm each: x + attention(norm(x)) + mlp(norm(x))",
}


def kind_of(position: Position) -> str:
    """The key of :data:`ALLOWS`."""
    return "none" if position is None else position.kind


def allows(kind: str) -> Iterator[str]:
    """Three lines."""
    said = ALLOWS[kind]
    yield f"eviction: {said.eviction}"
    yield f"endless generation: {said.endless}"
    yield f"prefix reuse: {said.reuse}"


# ---------------------------------------------------------------- positions


def position(spec: Position) -> str:
    if spec is None:
        return "no positions of its own"
    if isinstance(spec, Rope):
        return _rope(spec)
    if isinstance(spec, Alibi):
        factor = "" if spec.factor == 1.0 else f", slopes times {spec.factor:.4g}"
        return f"ALiBi, a slope per head{factor}{', rounded to bfloat16' * spec.rounded}"
    if isinstance(spec, T5Bias):
        ways = "both ways" if spec.bidirectional else "one way"
        whose = "one table for the stack's layers of this kind" if spec.shared else "a table per layer"
        return f"T5 bias, {spec.buckets} buckets up to distance {spec.max_distance:,}, {ways}, {whose}"
    if isinstance(spec, OwnPositions):
        options = ", ".join(f"{name} {value}" for name, value in spec.options.items())
        return f"positions by {spec.name}{f' ({options})' if options else ''}"
    offset = f", offset {spec.offset}" if spec.offset else ""
    if isinstance(spec, LearnedPositions):
        return f"learned positions, a table of {spec.size:,}{offset}"
    return f"sinusoidal positions, {spec.form}, base {spec.base:,.10g}{offset}"


def _rope(spec: Rope) -> str:
    part = "" if spec.fraction == 1.0 else f", of the first {spec.fraction:.4g} of each head"
    pairs = ", interleaved pairs" if spec.interleaved else ""
    scaled = "" if spec.scaling is None else f"; {_scaling(spec.scaling)}"
    return f"rotary, theta {spec.theta:,.10g}{part}{pairs}{scaled}"


def _scaling(spec: Scaling) -> str:
    factor = "" if spec.factor is None else f", factor {spec.factor:g}"
    if isinstance(spec, LinearScaling):
        return f"linear scaling{factor}"
    name = {DynamicScaling: "dynamic", Llama3Scaling: "llama3", YarnScaling: "yarn", LongRopeScaling: "longrope"}
    said = f"{name[type(spec)]} scaling{factor}, made for {spec.original:,}"
    regime = isinstance(spec, (DynamicScaling, LongRopeScaling))
    return said + (", by a row's limit, fixed when it is admitted" if regime else "")


# ---------------------------------------------------------------- parts


def norm(spec: Norm, width: str = "") -> str:
    name = "LayerNorm" if spec.kind == "layer" else "RMSNorm"
    form = "" if spec.weight else ", no weight"
    unit = ", weight + 1" if spec.unit_offset else ""
    return f"{name}, eps {spec.eps:g}{form}{unit}{', bias' * spec.bias}{width}"


def embedding(spec: Embedding) -> Iterator[str]:
    if spec.width is not None:
        yield f"a table {spec.width:,} wide, projected at the {spec.project}"
    if spec.scale != 1.0:
        yield f"multiplied by {spec.scale:.6g}"
    if spec.position is not None:
        yield position(spec.position)
    if spec.segments:
        yield f"{spec.segments} segments"
    if spec.norm is not None:
        yield f"{norm(spec.norm)}{', before positions are added' * spec.norm_first}"


def attention(spec: Attention, dim: int) -> Iterator[str]:
    kv_heads, value_dim = spec.kv_heads or spec.heads, spec.value_dim or dim
    sharing = {spec.heads: "each has its own key-value head", 1: "one key-value head for all"}
    shared = sharing.get(kv_heads, f"{kv_heads} key-value heads, {spec.heads // kv_heads} queries each")
    if spec.heads == 1:
        shared = "one key-value head"
    dims = f"{dim}" if dim == value_dim else f"{dim}, values of {value_dim}"
    yield f"{spec.heads} heads of {dims}; {shared}"
    more = []
    if spec.scale != "default":
        more.append("no scale" if spec.scale == "none" else f"scale {spec.scale:.6g}")
    if spec.softcap is not None:
        more.append(f"softcap {spec.softcap:g}")
    if spec.sinks:
        more.append("a sink logit per head")
    if spec.qk_norm != "none":
        each = {"head": "per head, one weight", "each": "per head, a weight each", "full": "over all heads"}
        own = "" if spec.norm is None else f" ({norm(spec.norm)})"
        more.append(f"q and k normed {each[spec.qk_norm]}{own}")
    if spec.clip is not None:
        more.append(f"q, k, v cut to {spec.clip:g}")
    if spec.bias or spec.out_bias:
        more.append("biases" if spec.bias and spec.out_bias else f"bias of {'q, k, v' if spec.bias else 'the output'}")
    if spec.own is not None:
        more.append(f"a mixer of one's own, {spec.own}")
    if more:
        yield "; ".join(more)
    yield position(spec.position)


def mlp(spec: Plain | Gated | Experts) -> tuple[str, list[str]]:
    """(title, lines)."""
    biases = ", biases" * spec.bias
    if isinstance(spec, Plain):
        return f"MLP of {spec.hidden:,}", [f"{spec.activation}{biases}"]
    if isinstance(spec, Gated):
        return f"gated MLP of {spec.hidden:,}", [f"{spec.activation}{biases}"]
    form = spec.activation if spec.alpha is None else f"(up + 1) gate sigmoid({spec.alpha:g} gate)"
    clip = "" if spec.clip is None else f", cut to {spec.clip:g}"
    router = f"a token goes to {spec.active} of them, router {spec.router}{' with bias' * spec.router_bias}"
    return f"{spec.count} experts of {spec.hidden:,}", [router, f"{form}{clip}{biases}"]


def head(config: ModelConfig) -> tuple[str, list[str]]:
    """(title, lines)."""
    spec = config.head
    lines = [] if spec.transform is None else [_transform(spec.transform)]
    if isinstance(spec, Pooled):
        unit = ", scaled to length one" if spec.unit else ""
        return "head: a vector per row", [f"the {'first state' if spec.pool == 'first' else 'mean'}{unit}", *lines]
    if isinstance(spec, Classes):
        names = ", ".join(spec.labels[:6]) + (" ..." if len(spec.labels) > 6 else "")
        per = "token" if spec.per == "token" else f"row, of its {'first state' if spec.pool == 'first' else 'mean'}"
        return f"head: {len(spec.labels)} labels per {per}", [*lines, names]
    lines.append("the matrix is the embedding's table" if config.tie else "a matrix of its own")
    changes = [f"times {spec.scale:.6g}"] if spec.scale != 1.0 else []
    changes += [f"softcap {spec.softcap:g}"] if spec.softcap is not None else []
    changes += ["bias"] if spec.bias else []
    return "head: logits over the vocabulary", [*lines, *([", ".join(changes)] if changes else [])]


def _transform(spec: Transform) -> str:
    parts = ["a matrix", "bias"] if spec.bias else ["a matrix"]
    parts += [spec.activation] if spec.activation is not None else []
    parts += [norm(spec.norm)] if spec.norm is not None else []
    return f"first {', '.join(parts)}"
