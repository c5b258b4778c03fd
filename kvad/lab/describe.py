"""The parts of a model in words, one line each: what its config says, and what follows from it.  No torch.

What a position encoding allows is said once here (:data:`ALLOWS`), for ``kvad inspect --tree`` and for its test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvad.config import (
    AlibiConfig,
    AttentionConfig,
    ClassificationHeadConfig,
    CustomPositionsConfig,
    DynamicScalingConfig,
    EmbeddingConfig,
    GatedMLPConfig,
    HeadTransformConfig,
    LearnedPositionsConfig,
    LinearScalingConfig,
    Llama3ScalingConfig,
    LongRopeScalingConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    PlainMLPConfig,
    PoolingHeadConfig,
    RopeConfig,
    RopeScalingConfig,
    SinusoidalPositionsConfig,
    T5BiasConfig,
    YarnScalingConfig,
)

__all__ = [
    "ENCODING_SUPPORT",
    "NORM_POSITIONS",
    "EncodingSupport",
    "describe_allowed",
    "describe_attention",
    "describe_embedding",
    "describe_head",
    "encoding_kind",
    "describe_mlp",
    "describe_norm",
]

Position = (
    LearnedPositionsConfig
    | SinusoidalPositionsConfig
    | RopeConfig
    | AlibiConfig
    | T5BiasConfig
    | CustomPositionsConfig
    | None
)


class EncodingSupport(NamedTuple):
    """What a position encoding allows: keys evicted while the others keep their positions, a text that goes on for ever
    with its positions renumbered, and prefixes that are used again."""

    eviction: str
    endless: str
    reuse: str


ENCODING_SUPPORT: Mapping[str, EncodingSupport] = {
    "learned": EncodingSupport(
        "exact until the table ends",
        "impossible, positions are baked into k and v: recompute",
        "exact at the same positions only",
    ),
    "sinusoidal": EncodingSupport(
        "exact up to the limit",
        "impossible, positions are baked into k and v: recompute",
        "exact at the same positions only",
    ),
    "rope": EncodingSupport(
        "exact while positions are below the limit; keys are stored rotated",
        "rotate on read, or turn the stored keys by R(delta)",
        "exact; keys of what is no prefix must be turned",
    ),
    "alibi": EncodingSupport(
        "exact; the bias is made of stored positions when they are read",
        "renumber the stored positions, keys stay; kept ones would bias sinks away",
        "exact",
    ),
    "t5": EncodingSupport(
        "exact; the bias is made of stored positions when they are read",
        "renumber the stored positions, keys stay; kept ones would bias sinks away",
        "exact",
    ),
    "none": EncodingSupport("exact; no position enters k or v", "nothing to renumber", "exact"),
    "own": EncodingSupport("as its class has it", "as its class has it", "exact for equal prefixes"),
    "source": EncodingSupport(
        "none of a source is evicted", "a source does not grow", "of a whole equal source, never of its part"
    ),
}

NORM_POSITIONS: Mapping[str, str] = {
    "pre": "norms before each half: x + f(norm(x))",
    "post": "norms after each half: norm(x + f(x))",
    "sandwich": "norms before and after each half: x + norm(f(norm(x)))",
    "after": "norms after each half, inside the residual: x + norm(f(x))",
    "normed": "the normed stream goes on: norm(x) + f(norm(x))",
    "parallel": "attention and MLP side by side, one norm: x + attention(norm(x)) + mlp(norm(x))",
    "parallel_pair": "attention and MLP side by side, a norm each: x + attention(norm(x)) + mlp(norm(x))",
}


def encoding_kind(position: Position) -> str:
    """The key of :data:`ALLOWS`."""
    return "none" if position is None else position.kind


def describe_allowed(kind: str) -> Iterator[str]:
    """Three lines."""
    said = ENCODING_SUPPORT[kind]
    yield f"eviction: {said.eviction}"
    yield f"endless generation: {said.endless}"
    yield f"prefix reuse: {said.reuse}"


# ---------------------------------------------------------------- positions


def describe_position(spec: Position) -> str:
    if spec is None:
        return "no positions of its own"
    if isinstance(spec, RopeConfig):
        return _rope(spec)
    if isinstance(spec, AlibiConfig):
        factor = "" if spec.factor == 1.0 else f", slopes times {spec.factor:.4g}"
        return f"ALiBi, a slope per head{factor}{', rounded to bfloat16' * spec.round_to_bfloat16}"
    if isinstance(spec, T5BiasConfig):
        ways = "both ways" if spec.bidirectional else "one way"
        whose = "one table for the stack's layers of this kind" if spec.shared else "a table per layer"
        return f"T5 bias, {spec.num_buckets} buckets up to distance {spec.max_distance:,}, {ways}, {whose}"
    if isinstance(spec, CustomPositionsConfig):
        options = ", ".join(f"{name} {value}" for name, value in spec.options.items())
        return f"positions by {spec.name}{f' ({options})' if options else ''}"
    offset = f", offset {spec.offset}" if spec.offset else ""
    if isinstance(spec, LearnedPositionsConfig):
        return f"learned positions, a table of {spec.num_positions:,}{offset}"
    return f"sinusoidal positions, {spec.form}, base {spec.base:,.10g}{offset}"


def _rope(spec: RopeConfig) -> str:
    part = "" if spec.partial_rotary_factor == 1.0 else f", of the first {spec.partial_rotary_factor:.4g} of each head"
    pairs = ", interleaved pairs" if spec.interleaved else ""
    scaled = "" if spec.scaling is None else f"; {_scaling(spec.scaling)}"
    return f"rotary, theta {spec.theta:,.10g}{part}{pairs}{scaled}"


def _scaling(spec: RopeScalingConfig) -> str:
    factor = "" if spec.factor is None else f", factor {spec.factor:g}"
    if isinstance(spec, LinearScalingConfig):
        return f"linear scaling{factor}"
    name = {
        DynamicScalingConfig: "dynamic",
        Llama3ScalingConfig: "llama3",
        YarnScalingConfig: "yarn",
        LongRopeScalingConfig: "longrope",
    }
    said = f"{name[type(spec)]} scaling{factor}, made for {spec.original_max_seq_len:,}"
    regime = isinstance(spec, (DynamicScalingConfig, LongRopeScalingConfig))
    return said + (", by a row's limit, fixed when it is admitted" if regime else "")


# ---------------------------------------------------------------- parts


def describe_norm(spec: NormConfig, width: str = "") -> str:
    name = "LayerNorm" if spec.kind == "layer" else "RMSNorm"
    form = "" if spec.weight else ", no weight"
    unit = ", weight + 1" if spec.unit_offset else ""
    return f"{name}, eps {spec.eps:g}{form}{unit}{', bias' * spec.bias}{width}"


def describe_embedding(spec: EmbeddingConfig) -> Iterator[str]:
    if spec.embedding_size is not None:
        yield f"a table {spec.embedding_size:,} wide, projected at the {spec.projection}"
    if spec.scale != 1.0:
        yield f"multiplied by {spec.scale:.6g}"
    if spec.position is not None:
        yield describe_position(spec.position)
    if spec.num_token_types:
        yield f"{spec.num_token_types} segments"
    if spec.norm is not None:
        yield f"{describe_norm(spec.norm)}{', before positions are added' * spec.norm_first}"


def describe_attention(spec: AttentionConfig, dim: int) -> Iterator[str]:
    kv_heads, value_dim = spec.num_kv_heads or spec.num_heads, spec.value_dim or dim
    sharing = {spec.num_heads: "each has its own key-value head", 1: "one key-value head for all"}
    shared = sharing.get(kv_heads, f"{kv_heads} key-value heads, {spec.num_heads // kv_heads} queries each")
    if spec.num_heads == 1:
        shared = "one key-value head"
    dims = f"{dim}" if dim == value_dim else f"{dim}, values of {value_dim}"
    yield f"{spec.num_heads} heads of {dims}; {shared}"
    more = []
    if spec.softmax_scale != "default":
        more.append("no scale" if spec.softmax_scale == "none" else f"scale {spec.softmax_scale:.6g}")
    if spec.logit_softcap is not None:
        more.append(f"softcap {spec.logit_softcap:g}")
    if spec.sink_logits:
        more.append("a sink logit per head")
    if spec.qk_norm != "none":
        each = {"head": "per head, one weight", "each": "per head, a weight each", "full": "over all heads"}
        own = "" if spec.qk_norm_config is None else f" ({describe_norm(spec.qk_norm_config)})"
        more.append(f"q and k normed {each[spec.qk_norm]}{own}")
    if spec.clip_qkv is not None:
        more.append(f"q, k, v cut to {spec.clip_qkv:g}")
    if spec.qkv_bias or spec.out_bias:
        more.append(
            "biases" if spec.qkv_bias and spec.out_bias else f"bias of {'q, k, v' if spec.qkv_bias else 'the output'}"
        )
    if spec.custom_class is not None:
        more.append(f"a mixer of one's own, {spec.custom_class}")
    if more:
        yield "; ".join(more)
    yield describe_position(spec.position)


def describe_mlp(spec: PlainMLPConfig | GatedMLPConfig | MoEConfig) -> tuple[str, list[str]]:
    """(title, lines)."""
    biases = ", biases" * spec.bias
    if isinstance(spec, PlainMLPConfig):
        return f"MLP of {spec.intermediate_size:,}", [f"{spec.activation}{biases}"]
    if isinstance(spec, GatedMLPConfig):
        return f"gated MLP of {spec.intermediate_size:,}", [f"{spec.activation}{biases}"]
    form = spec.activation if spec.swiglu_alpha is None else f"(up + 1) gate sigmoid({spec.swiglu_alpha:g} gate)"
    clip = "" if spec.swiglu_limit is None else f", cut to {spec.swiglu_limit:g}"
    router = (
        f"a token goes to {spec.num_experts_per_token} of them, router {spec.router}{' with bias' * spec.router_bias}"
    )
    return f"{spec.num_experts} experts of {spec.intermediate_size:,}", [router, f"{form}{clip}{biases}"]


def describe_head(config: ModelConfig) -> tuple[str, list[str]]:
    """(title, lines)."""
    spec = config.head
    lines = [] if spec.transform is None else [_transform(spec.transform)]
    if isinstance(spec, PoolingHeadConfig):
        unit = ", scaled to length one" if spec.normalize else ""
        return "head: a vector per row", [f"the {'first state' if spec.pool == 'first' else 'mean'}{unit}", *lines]
    if isinstance(spec, ClassificationHeadConfig):
        names = ", ".join(spec.labels[:6]) + (" ..." if len(spec.labels) > 6 else "")
        per = "token" if spec.level == "token" else f"row, of its {'first state' if spec.pool == 'first' else 'mean'}"
        return f"head: {len(spec.labels)} labels per {per}", [*lines, names]
    lines.append("the matrix is the embedding's table" if config.tie_embeddings else "a matrix of its own")
    changes = [f"times {spec.logit_scale:.6g}"] if spec.logit_scale != 1.0 else []
    changes += [f"softcap {spec.logit_softcap:g}"] if spec.logit_softcap is not None else []
    changes += ["bias"] if spec.bias else []
    return "head: logits over the vocabulary", [*lines, *([", ".join(changes)] if changes else [])]


def _transform(spec: HeadTransformConfig) -> str:
    parts = ["a matrix", "bias"] if spec.bias else ["a matrix"]
    parts += [spec.activation] if spec.activation is not None else []
    parts += [describe_norm(spec.norm)] if spec.norm is not None else []
    return f"first {', '.join(parts)}"
