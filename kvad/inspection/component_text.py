"""Descriptions of a configuration's components for the model tree: positions, norms, attention, MLP, head. No torch.

``ENCODING_SUPPORT`` has what a position encoding supports: eviction, renumbered positions, prefix reuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvad import config as cfg
from kvad.config import ModelConfig

Position = (
    cfg.LearnedPositionsConfig
    | cfg.SinusoidalPositionsConfig
    | cfg.RopeConfig
    | cfg.AlibiConfig
    | cfg.T5BiasConfig
    | cfg.DisentangledConfig
    | cfg.CustomPositionsConfig
    | None
)


class EncodingSupport(NamedTuple):
    """Support of a position encoding for eviction, renumbered positions and prefix reuse."""

    eviction: str
    endless: str
    reuse: str


_ABSOLUTE = "impossible, positions are baked into k and v: recompute", "exact at the same positions only"
_BIAS = EncodingSupport(
    "exact; the bias is made of stored positions when they are read",
    "renumber the stored positions, keys stay; kept ones would bias sinks away",
    "exact",
)
ENCODING_SUPPORT: Mapping[str, EncodingSupport] = {
    "learned": EncodingSupport("exact until the table ends", *_ABSOLUTE),
    "sinusoidal": EncodingSupport("exact up to the limit", *_ABSOLUTE),
    "rope": EncodingSupport(
        "exact while positions are below the limit; keys are stored rotated",
        "rotate on read, or turn the stored keys by R(delta)",
        "exact; keys of what is no prefix must be turned",
    ),
    "alibi": _BIAS,
    "t5": _BIAS,
    "disentangled": EncodingSupport(*["only encoders have it, which have no cache"] * 3),
    "none": EncodingSupport("exact; no position enters k or v", "nothing to renumber", "exact"),
    "custom": EncodingSupport("as its class has it", "as its class has it", "exact for equal prefixes"),
    "source": EncodingSupport(
        "none of a source is evicted", "a source does not grow", "of a whole equal source, never of its part"
    ),
}

NORM_POSITIONS: Mapping[str, str] = {
    "pre": "norms before each half: x + f(norm(x))",
    "post": "norms after each half: norm(x + f(x))",
    "sandwich": "norms before and after each half: x + norm(f(norm(x)))",
    "after": "norms after each half, inside the residual: x + norm(f(x))",
    "normed": "the normed stream continues: norm(x) + f(norm(x))",
    "parallel": "attention and MLP side by side, one norm: x + attention(norm(x)) + mlp(norm(x))",
    "parallel_pair": "attention and MLP side by side, a norm each: x + attention(norm(x)) + mlp(norm(x))",
}


def describe_allowed(kind: str) -> Iterator[str]:
    """Describe the support in three lines."""
    text = ENCODING_SUPPORT[kind]
    yield f"eviction: {text.eviction}"
    yield f"endless generation: {text.endless}"
    yield f"prefix reuse: {text.reuse}"


def describe_position(spec: Position) -> str:
    if spec is None:
        return "no positions of its own"
    if isinstance(spec, cfg.RopeConfig):
        factor = spec.partial_rotary_factor
        part = "" if factor == 1.0 else f", of the first {factor:.4g} of each head"
        pairs = ", interleaved pairs" if spec.interleaved else ""
        scaled = "" if spec.scaling is None else f"; {_scaling(spec.scaling)}"
        return f"rotary, theta {spec.theta:,.10g}{part}{pairs}{scaled}"
    if isinstance(spec, cfg.AlibiConfig):
        slopes = "" if spec.factor == 1.0 else f", slopes times {spec.factor:.4g}"
        return f"ALiBi, a slope per head{slopes}{', rounded to bfloat16' * spec.round_to_bfloat16}"
    if isinstance(spec, cfg.T5BiasConfig):
        ways = "both ways" if spec.bidirectional else "one way"
        whose = "one table for the stack's layers of this kind" if spec.shared else "a table per layer"
        return f"T5 bias, {spec.num_buckets} buckets up to distance {spec.max_distance:,}, {ways}, {whose}"
    if isinstance(spec, cfg.DisentangledConfig):
        buckets = "" if spec.num_buckets is None else f", {spec.num_buckets} buckets each way"
        return f"disentangled, distances up to {spec.max_distance:,}{buckets}, one table for the stack"
    if isinstance(spec, cfg.CustomPositionsConfig):
        options = ", ".join(f"{name} {value}" for name, value in spec.options.items())
        return f"positions by {spec.name}{f' ({options})' if options else ''}"
    offset = f", offset {spec.offset}" if spec.offset else ""
    if isinstance(spec, cfg.LearnedPositionsConfig):
        return f"learned positions, a table of {spec.num_positions:,}{offset}"
    return f"sinusoidal positions, {spec.form}, base {spec.base:,.10g}{offset}"


def _scaling(spec: cfg.RopeScalingConfig) -> str:
    factor = "" if spec.factor is None else f", factor {spec.factor:g}"
    if isinstance(spec, cfg.LinearScalingConfig):
        return f"linear scaling{factor}"
    if isinstance(spec, cfg.ProportionalScalingConfig):
        return f"{spec.fraction:.4g} of the pairs{factor}"
    regime = ", other frequencies beyond it" if spec.kind in ("dynamic", "longrope") else ""
    return f"{spec.kind} scaling{factor}, made for {spec.original_max_seq_len:,}{regime}"


def describe_norm(spec: cfg.NormConfig) -> str:
    name = "LayerNorm" if spec.kind == "layer" else "RMSNorm"
    form = "" if spec.weight else ", no weight"
    unit = ", weight + 1" if spec.unit_offset else ""
    return f"{name}, eps {spec.eps:g}{form}{unit}{', bias' * spec.bias}"


def describe_embedding(spec: cfg.EmbeddingConfig) -> Iterator[str]:
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


def describe_attention(spec: cfg.AttentionConfig, dim: int) -> Iterator[str]:
    if spec.latent is not None:
        latent = spec.latent
        queries = "" if latent.q_lora_rank is None else f", queries from {latent.q_lora_rank}"
        dims = f"{latent.qk_nope_head_dim} + {latent.qk_rope_head_dim} rotated, values of {latent.v_head_dim}"
        yield f"{spec.num_heads} heads of {dims}{queries}"
        yield f"the cache stores a latent of {latent.kv_lora_rank} and a key of {latent.qk_rope_head_dim} for all heads"
    else:
        yield _describe_heads(spec, dim)
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
    if spec.output_gate:
        more.append("heads times a sigmoid of the input")
    if spec.qkv_bias and spec.out_bias:
        more.append("biases")
    elif spec.qkv_bias or spec.out_bias:
        more.append(f"bias of {'q, k, v' if spec.qkv_bias else 'the output'}")
    if spec.custom_class is not None:
        more.append(f"custom attention, {spec.custom_class}")
    more += _describe_values_and_scaling(spec)
    if more:
        yield "; ".join(more)
    yield describe_position(spec.position)


def _describe_values_and_scaling(spec: cfg.AttentionConfig) -> Iterator[str]:
    if spec.values_from_keys:
        yield "v is k before its norm"
    if spec.value_norm:
        yield "v is normalized per head"
    if spec.query_scaling is not None:
        beta, length = spec.query_scaling.beta, spec.query_scaling.original_max_seq_len
        yield f"queries grow by {beta:g} ln(1 + floor(position / {length:,}))"


def _describe_heads(spec: cfg.AttentionConfig, dim: int) -> str:
    kv_heads, value_dim = spec.num_kv_heads or spec.num_heads, spec.value_dim or dim
    sharing = {spec.num_heads: "each has its own key-value head", 1: "one key-value head for all"}
    shared = sharing.get(kv_heads, f"{kv_heads} key-value heads, {spec.num_heads // kv_heads} queries each")
    if spec.num_heads == 1:
        shared = "one key-value head"
    dims = f"{dim}" if dim == value_dim else f"{dim}, values of {value_dim}"
    return f"{spec.num_heads} heads of {dims}; {shared}"


def describe_recurrent(
    spec: cfg.ShortConvConfig | cfg.GatedRecurrenceConfig | cfg.GatedDeltaConfig,
) -> tuple[str, list[str]]:
    """Describe a mixer without attention: title and lines."""
    if isinstance(spec, cfg.GatedDeltaConfig):
        lines = [
            f"{spec.num_value_heads} states of {spec.key_dim} x {spec.value_dim}, {spec.num_key_heads} key heads",
            f"after a convolution of {spec.kernel_size} tokens, {spec.activation}",
        ]
        return "gated delta rule (DeltaNet)", lines
    if isinstance(spec, cfg.GatedRecurrenceConfig):
        lines = [
            f"a state of {spec.width:,}, gates of {spec.num_blocks} blocks, {spec.activation}",
            f"after a convolution of {spec.kernel_size} tokens",
        ]
        return "gated recurrence (RG-LRU)", lines
    lines = [f"gates before and after a kernel of {spec.kernel_size} per channel{', biases' * spec.bias}"]
    return f"short convolution over {spec.kernel_size} tokens", lines


def describe_mlp(spec: cfg.PlainMLPConfig | cfg.GatedMLPConfig | cfg.MoEConfig) -> tuple[str, list[str]]:
    """Return (title, lines)."""
    biases = ", biases" * spec.bias
    if not isinstance(spec, cfg.MoEConfig):
        title = "gated MLP" if isinstance(spec, cfg.GatedMLPConfig) else "MLP"
        return f"{title} of {spec.intermediate_size:,}", [f"{spec.activation}{biases}"]
    form = spec.activation if spec.swiglu_alpha is None else f"(up + 1) gate sigmoid({spec.swiglu_alpha:g} gate)"
    clip = "" if spec.swiglu_limit is None else f", cut to {spec.swiglu_limit:g}"
    lines = [f"a token goes to {spec.num_experts_per_token} of them, {_describe_router(spec)}", f"{form}{clip}{biases}"]
    if spec.num_groups > 1:
        lines.append(f"from the best {spec.num_groups_per_token} of {spec.num_groups} groups of experts")
    if spec.shared_size is not None:
        lines.append(f"a shared gated MLP of {spec.shared_size:,}{' times a sigmoid' * spec.shared_gate}")
    return f"{spec.num_experts} experts of {spec.intermediate_size:,}", lines


def _describe_router(spec: cfg.MoEConfig) -> str:
    """Describe scores and weights: ``router sigmoid with bias and selection bias, renormalized, times 2.5``."""
    biases = " and ".join(["bias"] * spec.router_bias + ["selection bias"] * spec.selection_bias)
    if spec.sparsemixer_jitter is not None:
        return f"router sparsemixer within {spec.sparsemixer_jitter:g}" + f" with {biases}" * bool(biases)
    parts = [f"router {spec.router}" + f" with {biases}" * bool(biases)]
    parts += ["renormalized"] * spec.renormalize + [f"times {spec.routed_scale:g}"] * (spec.routed_scale != 1.0)
    return ", ".join(parts)


def describe_head(config: ModelConfig) -> tuple[str, list[str]]:
    """Return (title, lines)."""
    spec = config.head
    lines = []
    if (transform := spec.transform) is not None:
        parts = ["a matrix", "bias"] if transform.bias else ["a matrix"]
        parts += [transform.activation] if transform.activation is not None else []
        parts += [describe_norm(transform.norm)] if transform.norm is not None else []
        lines.append(f"first {', '.join(parts)}")
    if isinstance(spec, cfg.PoolingHeadConfig):
        unit = ", scaled to length one" if spec.normalize else ""
        return "head: a vector per row", [f"the {'first state' if spec.pool == 'first' else 'mean'}{unit}", *lines]
    if isinstance(spec, cfg.ClassificationHeadConfig):
        names = ", ".join(spec.labels[:6]) + (" ..." if len(spec.labels) > 6 else "")
        per = "token" if spec.level == "token" else f"row, of its {'first state' if spec.pool == 'first' else 'mean'}"
        return f"head: {len(spec.labels)} labels per {per}", [*lines, names]
    lines.append("the matrix is the embedding's table" if config.tie_embeddings else "a matrix of its own")
    changes = [f"times {spec.logit_scale:.6g}"] if spec.logit_scale != 1.0 else []
    changes += [f"softcap {spec.logit_softcap:g}"] if spec.logit_softcap is not None else []
    changes += ["bias"] if spec.bias else []
    return "head: logits over the vocabulary", [*lines, *([", ".join(changes)] if changes else [])]
