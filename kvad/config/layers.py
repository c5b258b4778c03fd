"""The parts that a model is composed of, as frozen dataclasses: positions, norms, mixers, MLPs, layers, stacks, heads.

:mod:`kvad.config.model` puts them together, checks them, and hands them on: import them from there.  Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "silu", "tanh"]
Pooling = Literal["first", "mean"]


# ---------------------------------------------------------------- positions


@dataclass(frozen=True)
class LinearScalingConfig:
    """Position interpolation (Chen et al. 2023): positions are divided by ``factor``."""

    factor: float
    kind: Literal["linear"] = "linear"


@dataclass(frozen=True)
class DynamicScalingConfig:
    """Dynamic NTK: a row whose limit n exceeds ``original`` gets the base theta * (f n/original - (f-1))^(D/(D-2)).

    n is the row's limit, fixed at admission, so that keys already stored are never rotated by another base.
    """

    factor: float
    original_max_seq_len: int
    kind: Literal["dynamic"] = "dynamic"


@dataclass(frozen=True)
class Llama3ScalingConfig:
    """Llama 3.1: long wavelengths are divided by ``factor``, short ones kept, those between interpolated."""

    factor: float
    original_max_seq_len: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    kind: Literal["llama3"] = "llama3"


@dataclass(frozen=True)
class YarnScalingConfig:
    """YaRN (Peng et al. 2023, sec. 3.2): NTK by parts, and a temperature on cos and sin.

    ``attention_factor`` None means 0.1 ln(factor) + 1, or the ratio of the two mscale terms where they are given.
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    kind: Literal["yarn"] = "yarn"


@dataclass(frozen=True)
class LongRopeScalingConfig:
    """LongRoPE (Ding et al. 2024): one factor per frequency, ``short`` up to ``original``, ``long`` for longer rows."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_seq_len: int
    factor: float | None = None  # limit / original, where the checkpoint states it; decides the attention factor
    attention_factor: float | None = None
    kind: Literal["longrope"] = "longrope"


RopeScalingConfig = (
    LinearScalingConfig | DynamicScalingConfig | Llama3ScalingConfig | YarnScalingConfig | LongRopeScalingConfig
)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions on the first ``fraction`` of each head; ``interleaved`` pairs (0,1),(2,3),... as GPT-J does."""

    theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    interleaved: bool = False
    scaling: RopeScalingConfig | None = None
    kind: Literal["rope"] = "rope"


@dataclass(frozen=True)
class AlibiConfig:
    """Linear biases (Press et al. 2021); slopes follow from the number of heads, powers of two or not.

    ``factor`` multiplies the slopes; ``rounded``: a slope, and it times the key's position, are bfloat16 numbers (so
    Falcon computes it, and adds it before the division by sqrt(head_dim)).
    """

    factor: float = 1.0
    round_to_bfloat16: bool = False
    kind: Literal["alibi"] = "alibi"


@dataclass(frozen=True)
class T5BiasConfig:
    """Bucketed relative bias; one table shared by all layers of the stack (T5), or one per layer (UMT5)."""

    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = False
    shared: bool = True
    kind: Literal["t5"] = "t5"


@dataclass(frozen=True)
class CustomPositionsConfig:
    """A position encoding of one's own: ``name`` is "package.module:Class" (docs/extending.md), ``options`` its own."""

    name: str
    options: Mapping[str, float | int | str] = field(default_factory=dict)
    kind: Literal["own"] = "own"


@dataclass(frozen=True)
class LearnedPositionsConfig:
    """A table of ``size`` rows added to the embeddings (GPT-2); ``offset`` is added to the position (OPT: 2)."""

    num_positions: int
    offset: int = 0
    kind: Literal["learned"] = "learned"


@dataclass(frozen=True)
class SinusoidalPositionsConfig:
    """Sines and cosines added to the embeddings (Vaswani et al. 2017, sec. 3.5).

    ``form``: ``interleaved`` (the paper: sin, cos, sin, cos), ``concat`` (all sines, then all cosines; Marian),
    ``fairseq`` (concat with the half-1 frequencies; M2M100, XGLM).  No table limits the length.
    """

    base: float = 10000.0
    form: Literal["interleaved", "concat", "fairseq"] = "interleaved"
    offset: int = 0
    kind: Literal["sinusoidal"] = "sinusoidal"


# ---------------------------------------------------------------- layers


@dataclass(frozen=True)
class NormConfig:
    """``layer``: (x - mean) / sqrt(var + eps) * w (+ b).  ``rms``: x / sqrt(mean(x^2) + eps) * (w or 1 + w)."""

    kind: Literal["layer", "rms"] = "rms"
    eps: float = 1e-5
    bias: bool = False
    unit_offset: bool = False  # the weight is stored as w - 1 (Gemma)
    weight: bool = True  # False: no weight at all (OLMo)


@dataclass(frozen=True)
class DropoutConfig:
    """Shares of numbers that training sets to zero, what is left divided by what remains (Srivastava et al. 2014).

    ``embedding``: of the vectors that enter a stack (the sums with positions, normed where the embedding norms them);
    ``residual``: of what each branch adds to the stream (both: Vaswani et al. 2017, sec. 5.4); ``attention``: of the
    weights of the softmax; ``hidden``: of an MLP's activations; ``output``: of what leaves a stack (T5: Raffel et al.
    2020, sec. 2.1).  Outside training nothing is dropped.
    """

    embedding: float = 0.0
    residual: float = 0.0
    attention: float = 0.0
    hidden: float = 0.0
    output: float = 0.0


@dataclass(frozen=True)
class AttentionConfig:
    """Multi-head attention: ``heads`` queries share ``kv_heads`` keys and values (MHA = all, GQA, MQA = 1).

    ``head_dim`` and ``value_dim`` are free of width / heads.  ``scale``: ``"default"`` = 1/sqrt(head_dim),
    ``"none"`` = 1 (T5), or a number.  ``qk_norm``: normalise q and k per ``head`` with one weight for all heads, per
    head with a weight for ``each``, or over the ``full`` projection; by ``norm``, or as the layer does.  ``clip``: q, k
    and v are cut to [-clip, clip].
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    position: RopeConfig | AlibiConfig | T5BiasConfig | CustomPositionsConfig | None = field(default_factory=RopeConfig)
    causal: bool = True
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "each", "full"] = "none"
    qk_norm_config: NormConfig | None = None
    clip_qkv: float | None = None
    logit_softcap: float | None = None
    sink_logits: bool = False
    softmax_scale: Literal["default", "none"] | float = "default"
    custom_class: str | None = (
        None  # "package.module:Class": a mixer of one's own in place of kvad's (docs/extending.md)
    )


@dataclass(frozen=True)
class PlainMLPConfig:
    """``down(act(up(x)))``."""

    intermediate_size: int
    activation: Activation = "gelu"
    bias: bool = False
    kind: Literal["plain"] = "plain"


@dataclass(frozen=True)
class GatedMLPConfig:
    """``down(act(gate(x)) * up(x))`` (Shazeer 2020): SwiGLU with silu, GeGLU with gelu."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    kind: Literal["gated"] = "gated"


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of gated MLPs (Shazeer et al. 2017): each token goes to the ``active`` best of ``count`` experts.

    ``router``: ``softmax_first`` takes the best of a softmax over all and lets them sum to one (Mixtral),
    ``softmax_last`` takes a softmax over the best logits: the same numbers, in another order of rounding.
    ``alpha`` and ``clip`` are GPT-OSS's form, ``(up + 1) * gate * sigmoid(alpha * gate)`` with the gate cut at
    ``clip`` and up to [-clip, clip].
    """

    intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    activation: Activation = "silu"
    bias: bool = False
    router_bias: bool = False
    router: Literal["softmax_first", "softmax_last"] = "softmax_first"
    swiglu_alpha: float | None = None
    swiglu_limit: float | None = None
    kind: Literal["experts"] = "experts"


@dataclass(frozen=True)
class LayerConfig:
    """``cross``: attention to the encoder's output, between the mixer and the MLP.  ``first_norm`` False: none before
    the mixer (ModernBERT's first layer, whose input the embedding has normalised)."""

    attention: AttentionConfig
    mlp: PlainMLPConfig | GatedMLPConfig | MoEConfig
    norm: NormConfig = field(default_factory=NormConfig)
    cross_attention: AttentionConfig | None = None
    pre_attention_norm: bool = True


@dataclass(frozen=True)
class StackConfig:
    """``layers`` layers; layer i is of kind ``pattern[i % len(pattern)]``.

    ``norm_place``: ``pre`` x + f(norm(x)); ``post`` norm(x + f(x)); ``sandwich`` x + norm(f(norm(x)));
    ``after`` x + norm(f(x)) (OLMo 2); ``normed`` norm(x) + f(norm(x)) (a variant of BLOOM);
    ``parallel`` x + attention(norm(x)) + mlp(norm(x)); ``parallel_pair`` likewise with a norm for each (GPT-NeoX).
    ``final_norm`` follows the last layer.  ``residual`` multiplies what a branch adds (Granite).
    """

    num_layers: int
    layer_types: Mapping[str, LayerConfig]
    layer_pattern: str = "L"
    norm_position: Literal["pre", "post", "sandwich", "after", "normed", "parallel", "parallel_pair"] = "pre"
    final_norm: bool = True
    residual_scale: float = 1.0

    def layer_type(self, index: int) -> str:
        return self.layer_pattern[index % len(self.layer_pattern)]

    def layer_config(self, index: int) -> LayerConfig:
        return self.layer_types[self.layer_type(index)]


@dataclass(frozen=True)
class EmbeddingConfig:
    """How ids become vectors: ``norm(scale * table[id] + position + segment)``.

    ``segments``: rows of a segment table (BERT's token types), one of which is added to every token: row 0 unless the
    step says another.  ``width``: of the table where it is not the model's; a projection then leads to the model's
    width, at the ``end`` (ELECTRA, with a bias) or at the ``start``, before positions are added (OPT-350m, without).
    ``norm_first``: positions and segments are added to what is already normalised (BlenderbotSmall's decoder).
    """

    position: LearnedPositionsConfig | SinusoidalPositionsConfig | None = None
    scale: float = 1.0
    norm: NormConfig | None = None
    num_token_types: int = 0
    embedding_size: int | None = None
    projection: Literal["start", "end"] = "end"
    norm_first: bool = False


@dataclass(frozen=True)
class HeadTransformConfig:
    """What stands before an output matrix: ``norm(activation(W h + b))``; ``width``: of its output, if another."""

    activation: Activation | None = "gelu"
    bias: bool = True
    norm: NormConfig | None = None
    output_size: int | None = None


@dataclass(frozen=True)
class LanguageHeadConfig:
    """From hidden states to logits over the vocabulary: ``softcap(scale * (W h + b))``, of a language model or of a
    masked one."""

    bias: bool = False
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    transform: HeadTransformConfig | None = None
    kind: Literal["language"] = "language"


@dataclass(frozen=True)
class ClassificationHeadConfig:
    """A score for each label: of every token (tagging), or of the whole row, from its pooled hidden states."""

    labels: tuple[str, ...]
    level: Literal["token", "row"] = "token"
    pool: Pooling = "first"
    transform: HeadTransformConfig | None = None
    bias: bool = True
    kind: Literal["classes"] = "classes"


@dataclass(frozen=True)
class PoolingHeadConfig:
    """A row's embedding: the mean of its hidden states or the first of them, transformed (BERT's pooler: a matrix and
    tanh); ``unit``: scaled to length one."""

    pool: Pooling = "mean"
    normalize: bool = False
    transform: HeadTransformConfig | None = None
    kind: Literal["pooled"] = "pooled"
