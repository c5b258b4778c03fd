"""Configuration of a model's parts: positions, norms, attention, MLPs, layers, stacks and heads.

Frozen dataclasses; ``kvad.config.model`` combines and validates them. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from kvad.config.recurrent import Activation as Activation
from kvad.config.recurrent import GatedDeltaConfig as GatedDeltaConfig
from kvad.config.recurrent import GatedRecurrenceConfig as GatedRecurrenceConfig
from kvad.config.recurrent import RecurrentMixer as RecurrentMixer
from kvad.config.recurrent import ShortConvConfig as ShortConvConfig
from kvad.config.recurrent import Size as Size
from kvad.config.serialization import Fraction, NonNegativeInt, PositiveFloat, Range

# Bounds far above any model: beyond them a config would only exhaust time and memory.
MAX_LAYERS, MAX_LENGTH = 10_000, 2**40
LayerCount = Annotated[int, Range(1), Range(high=MAX_LAYERS)]
Length = Annotated[int, Range(1), Range(high=MAX_LENGTH)]  # tokens and rows of tables
Epsilon = Annotated[float, Range(0), Range(high=1)]

Pooling = Literal["first", "last", "max", "mean"]


@dataclass(frozen=True)
class LinearScalingConfig:
    """Position interpolation (Chen et al. 2023): positions are divided by ``factor``."""

    factor: PositiveFloat
    kind: Literal["linear"] = "linear"


@dataclass(frozen=True)
class DynamicScalingConfig:
    """Dynamic NTK scaling of the RoPE base.

    If a sequence's maximum length n exceeds ``original_max_seq_len`` o, the base is theta * (f n/o - (f-1))^(D/(D-2)).
    n is fixed at admission, so stored keys are never rotated by another base.
    """

    factor: PositiveFloat  # f above
    original_max_seq_len: Length  # the length that the model was trained with
    kind: Literal["dynamic"] = "dynamic"


@dataclass(frozen=True)
class Llama3ScalingConfig:
    """Llama 3.1 scaling: low frequencies are divided by ``factor``, high ones unchanged, others interpolated."""

    factor: PositiveFloat
    original_max_seq_len: Length
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: float = 4.0
    kind: Literal["llama3"] = "llama3"


@dataclass(frozen=True)
class YarnScalingConfig:
    """YaRN (Peng et al. 2023, sec. 3.2): NTK by parts, and a temperature on cos and sin.

    ``attention_factor`` None means 0.1 ln(factor) + 1, or the ratio of the two mscale terms if they are given.
    """

    factor: PositiveFloat
    original_max_seq_len: Length
    beta_fast: float = 32.0
    beta_slow: PositiveFloat = 1.0
    truncate: bool = True
    attention_factor: PositiveFloat | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    kind: Literal["yarn"] = "yarn"


@dataclass(frozen=True)
class LongRopeScalingConfig:
    """LongRoPE (Ding et al. 2024): one factor per frequency, chosen by the length of the sequence."""

    short_factor: tuple[PositiveFloat, ...]  # [D_rot/2] for sequences up to original_max_seq_len
    long_factor: tuple[PositiveFloat, ...]  # [D_rot/2] for longer sequences
    original_max_seq_len: Length
    factor: PositiveFloat | None = None  # max_seq_len / original_max_seq_len, if given; determines the attention factor
    attention_factor: PositiveFloat | None = None
    kind: Literal["longrope"] = "longrope"


@dataclass(frozen=True)
class ProportionalScalingConfig:
    """Rotation of the pairs with the highest frequencies only (Gemma 4); the frequencies are those of a full head."""

    fraction: Fraction  # of the pairs (i, i + D/2)
    factor: PositiveFloat = 1.0  # divides the frequencies
    kind: Literal["proportional"] = "proportional"


RopeScalingConfig = (
    LinearScalingConfig
    | DynamicScalingConfig
    | Llama3ScalingConfig
    | YarnScalingConfig
    | LongRopeScalingConfig
    | ProportionalScalingConfig
)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoPE)."""

    theta: PositiveFloat = 10000.0
    partial_rotary_factor: float = 1.0  # the fraction of each head's dims that is rotated, from the front
    interleaved: bool = False  # pairs (0,1), (2,3), ... as in GPT-J
    scaling: RopeScalingConfig | None = None
    kind: Literal["rope"] = "rope"


@dataclass(frozen=True)
class AlibiConfig:
    """ALiBi: linear biases (Press et al. 2021); the slopes follow from the number of heads."""

    factor: float = 1.0  # multiplies the slopes
    # Round each slope, and its product with the key's position, to bfloat16, as in Falcon, which adds the bias
    # before the division by sqrt(head_dim).
    round_to_bfloat16: bool = False
    kind: Literal["alibi"] = "alibi"


@dataclass(frozen=True)
class T5BiasConfig:
    """T5's bucketed relative bias."""

    num_buckets: Size = 32
    max_distance: Size = 128
    bidirectional: bool = False
    shared: bool = True  # one table for all layers of the stack (T5), else one per layer (UMT5)
    kind: Literal["t5"] = "t5"


@dataclass(frozen=True)
class DisentangledConfig:
    """Disentangled attention of an encoder (DeBERTa, He et al. 2021): terms of content and relative position.

    A table of distances, shared by the stack, is projected by each layer's matrices of q and k. Distances beyond half
    of ``num_buckets`` share rows, whose width grows logarithmically up to ``max_distance`` (DeBERTa-v2).
    """

    max_distance: Size
    num_buckets: Size | None = None  # rows of the table in one direction; None: max_distance, a row per distance
    content_to_position: bool = True  # the term of queries and positions
    position_to_content: bool = True  # the term of positions and keys
    norm: NormConfig | None = None  # of the table's rows
    kind: Literal["disentangled"] = "disentangled"

    @property
    def span(self) -> int:
        """Rows of the table in one direction."""
        return self.num_buckets or self.max_distance


@dataclass(frozen=True)
class CustomPositionsConfig:
    """Custom position encoding (docs/contributing/extending.md)."""

    name: str  # of a plugin (kvad.register)
    options: Mapping[str, float | int | str] = field(default_factory=dict)  # keyword arguments of the class
    kind: Literal["custom"] = "custom"


@dataclass(frozen=True)
class LearnedPositionsConfig:
    """Learned absolute positions, added to the embeddings (GPT-2)."""

    num_positions: Length  # rows of the table
    offset: NonNegativeInt = 0  # added to the position (OPT: 2)
    kind: Literal["learned"] = "learned"


@dataclass(frozen=True)
class SinusoidalPositionsConfig:
    """Sines and cosines added to the embeddings (Vaswani et al. 2017, sec. 3.5); the length is unlimited.

    ``form``: ``interleaved`` (the paper: sin, cos, sin, cos), ``concat`` (all sines, then all cosines; Marian),
    ``fairseq`` (concat with the half-1 frequencies; M2M100, XGLM).
    """

    base: PositiveFloat = 10000.0
    form: Literal["interleaved", "concat", "fairseq"] = "interleaved"
    offset: NonNegativeInt = 0
    kind: Literal["sinusoidal"] = "sinusoidal"


@dataclass(frozen=True)
class NormConfig:
    """LayerNorm, (x - mean) / sqrt(var + eps) * w (+ b), or RMSNorm, x / sqrt(mean(x^2) + eps) * (w or 1 + w)."""

    kind: Literal["layer", "rms"] = "rms"
    eps: Epsilon = 1e-5
    bias: bool = False
    unit_offset: bool = False  # the weight is stored as w - 1 (Gemma)
    weight: bool = True  # False: no weight (OLMo)


@dataclass(frozen=True)
class DropoutConfig:
    """Dropout rates in training (Srivastava et al. 2014): fractions set to zero, the rest is divided by 1 - rate.

    ``embedding`` and ``residual``: Vaswani et al. 2017, sec. 5.4; ``output``: T5 (Raffel et al. 2020, sec. 2.1).
    """

    embedding: Fraction = 0.0  # vectors that enter a stack: sums with positions, after the embedding's norm
    residual: Fraction = 0.0  # output of each branch, before it is added to the residual stream
    attention: Fraction = 0.0  # softmax weights
    hidden: Fraction = 0.0  # activations of an MLP
    output: Fraction = 0.0  # output of a stack


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (MLA, DeepSeek-V2, 2024, sec. 2.1): keys and values of all heads from one vector.

    The cache stores the normalized latent of a token and the rotated part of its key, which all heads share.
    """

    kv_lora_rank: Size  # numbers of the latent
    qk_nope_head_dim: Size  # numbers of a head's query that are not rotated
    qk_rope_head_dim: Size  # numbers that are rotated
    v_head_dim: Size  # numbers of a head's value
    q_lora_rank: Size | None = None  # numbers of the queries' latent; None: one matrix
    norm: NormConfig | None = None  # norm of both latents; None: the layer's

    @property
    def qk_head_dim(self) -> int:
        """Numbers of a head's query; its root divides q.k."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class QueryScalingConfig:
    """Growth of queries with their position p (Llama 4): times 1 + beta ln(1 + floor(p / original_max_seq_len))."""

    beta: PositiveFloat
    original_max_seq_len: Length


@dataclass(frozen=True)
class AttentionConfig:
    """Multi-head attention: ``num_heads`` query heads share ``num_kv_heads`` key-value heads (MHA, GQA, MQA).

    ``qk_norm`` normalizes q and k: ``head`` per head with one weight for all heads, ``each`` per head with a weight for
    each, ``full`` over the whole projection. ``latent`` replaces the matrices of q, k and v; it determines
    ``num_kv_heads`` (1), ``head_dim`` and ``value_dim``, and ``qkv_bias`` belongs to the matrices to its vectors.
    """

    num_heads: Size
    num_kv_heads: Size | None = None  # None: num_heads
    head_dim: Size | None = None  # None: hidden_size / num_heads
    value_dim: Size | None = None  # None: head_dim
    position: RopeConfig | AlibiConfig | T5BiasConfig | DisentangledConfig | CustomPositionsConfig | None = field(
        default_factory=RopeConfig
    )
    causal: bool = True
    window: Length | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "each", "full"] = "none"
    qk_norm_config: NormConfig | None = None  # None: the layer's norm
    clip_qkv: PositiveFloat | None = None  # clamps q, k and v to [-clip_qkv, clip_qkv]
    logit_softcap: PositiveFloat | None = None
    sink_logits: bool = False  # one learned logit per head joins the softmax's denominator
    softmax_scale: Literal["default", "none"] | float = "default"  # "default": 1/sqrt(head_dim); "none": 1 (T5)
    latent: LatentConfig | None = None  # multi-head latent attention (MLA)
    query_scaling: QueryScalingConfig | None = None
    values_from_keys: bool = False  # v is k before its norm, without a matrix (Gemma 4)
    value_norm: bool = False  # RMSNorm without weight on each head of v, with the layer's epsilon (Gemma 4)
    custom_class: str | None = None  # plugin with a custom attention (docs/contributing/extending.md)
    output_gate: bool = False  # out(sigmoid(gate(x)) * heads), with a matrix like that of q (Qwen3-Next)


TokenMixer = AttentionConfig | ShortConvConfig | GatedRecurrenceConfig | GatedDeltaConfig


@dataclass(frozen=True)
class PlainMLPConfig:
    """MLP with two matrices: ``down(act(up(x)))``.

    ``xielu`` (Huang & Schlag 2024) has two learned numbers per layer, ``alpha_p`` and ``alpha_n``.
    """

    intermediate_size: Size
    activation: Literal[Activation, "xielu"] = "gelu"
    bias: bool = False
    kind: Literal["plain"] = "plain"


@dataclass(frozen=True)
class GatedMLPConfig:
    """Gated MLP, ``down(act(gate(x)) * up(x))`` (Shazeer 2020): SwiGLU with silu, GeGLU with gelu."""

    intermediate_size: Size
    activation: Activation = "silu"
    bias: bool = False
    kind: Literal["gated"] = "gated"


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts (Shazeer et al. 2017): each token is routed to its best gated MLPs.

    ``router`` turns logits into scores: a softmax over all experts, or a sigmoid of each (DeepSeek-V3). The best
    scores, plus ``selection_bias`` if any, choose the experts; their scores alone, divided by their sum if
    ``renormalize`` and multiplied by ``routed_scale``, are the weights. If the experts form ``num_groups``, only
    experts of each token's best ``num_groups_per_token`` can be chosen: a group counts by its best expert
    (DeepSeek-V2), with ``selection_bias`` by the sum of its best two (DeepSeek-V3).
    ``swiglu_alpha`` and ``swiglu_limit`` are GPT-OSS's form, ``(up + 1) * gate * sigmoid(alpha * gate)`` with the gate
    clamped to at most the limit and up to [-limit, limit].
    """

    intermediate_size: Size  # of one expert
    num_experts: Size
    num_experts_per_token: Size
    activation: Activation = "silu"
    bias: bool = False
    router: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    renormalize: bool = True
    routed_scale: float = 1.0
    selection_bias: bool = False  # float32, per expert; balances the experts' load in training
    num_groups: Size = 1
    num_groups_per_token: Size = 1
    # PhiMoE's SparseMixer (Liu et al. 2023): each of two experts, best first, is weighted by a softmax over the
    # remaining experts whose logit differs from the best by at most 2 sparsemixer_jitter of the larger magnitude.
    sparsemixer_jitter: Fraction | None = None
    shared_size: Size | None = None  # intermediate size of a gated MLP that all tokens use, if any
    shared_gate: bool = False  # its output is multiplied by a sigmoid (Qwen2-MoE)
    swiglu_alpha: float | None = None
    swiglu_limit: PositiveFloat | None = None
    kind: Literal["moe"] = "moe"


@dataclass(frozen=True)
class LayerConfig:
    """One Transformer layer: attention or another mixer of tokens, cross-attention if any, MLP."""

    attention: TokenMixer
    mlp: PlainMLPConfig | GatedMLPConfig | MoEConfig
    norm: NormConfig = field(default_factory=NormConfig)
    cross_attention: AttentionConfig | None = None  # attention to the encoder's output
    pre_attention_norm: bool = True  # False: none (ModernBERT's first layer, whose input the embedding normalizes)
    output_scale: bool = False  # a learned number multiplies the layer's output (Gemma 4)


@dataclass(frozen=True)
class StackConfig:
    """A stack of layers; layer i has the type ``layer_pattern[i % len(layer_pattern)]``.

    ``norm_position``: ``pre`` x + f(norm(x)); ``post`` norm(x + f(x)); ``sandwich`` x + norm(f(norm(x)));
    ``after`` x + norm(f(x)) (OLMo 2); ``normed`` norm(x) + f(norm(x)) (a variant of BLOOM);
    ``parallel`` x + attention(norm(x)) + mlp(norm(x)); ``parallel_pair`` the same with a norm for each (GPT-NeoX).
    """

    num_layers: LayerCount
    layer_types: Mapping[str, LayerConfig]  # by the letters of layer_pattern
    layer_pattern: str = "L"
    norm_position: Literal["pre", "post", "sandwich", "after", "normed", "parallel", "parallel_pair"] = "pre"
    final_norm: bool = True  # a norm after the last layer
    residual_scale: float = 1.0  # multiplies the output of each branch (Granite)
    # Layers with parameters; each is applied in equally many consecutive places (ALBERT). None: num_layers.
    num_distinct_layers: LayerCount | None = None

    def layer_type(self, index: int) -> str:
        """Return the letter of layer ``index``."""
        return self.layer_pattern[index % len(self.layer_pattern)]

    def layer_config(self, index: int) -> LayerConfig:
        """Return the configuration of layer ``index``."""
        return self.layer_types[self.layer_type(index)]

    def parameter_index(self, index: int) -> int:
        """Return the number of the layer whose parameters layer ``index`` uses."""
        return index * (self.num_distinct_layers or self.num_layers) // self.num_layers

    @property
    def layer_configs(self) -> tuple[LayerConfig, ...]:
        """The configurations of all layers in order."""
        return tuple(map(self.layer_config, range(self.num_layers)))


@dataclass(frozen=True)
class EmbeddingConfig:
    """Token embedding: ``norm(scale * table[id] + position + token_type)``.

    If ``embedding_size`` differs from the model's hidden size, a projection follows: at the ``end`` (ELECTRA, with a
    bias) or at the ``start``, before positions are added (OPT-350m, without a bias).
    """

    position: LearnedPositionsConfig | SinusoidalPositionsConfig | None = None
    scale: float = 1.0
    norm: NormConfig | None = None
    num_token_types: NonNegativeInt = 0  # rows of the token type table (BERT); the default type is 0
    embedding_size: Size | None = None  # columns of the table; None: hidden_size
    projection: Literal["start", "end"] = "end"
    norm_first: bool = False  # positions and token types are added after the norm (BlenderbotSmall's decoder)


@dataclass(frozen=True)
class HeadTransformConfig:
    """Transform before a head's output matrix: ``norm(activation(W h + b))``."""

    activation: Activation | None = "gelu"
    bias: bool = True
    norm: NormConfig | None = None
    output_size: Size | None = None  # None: hidden_size


@dataclass(frozen=True)
class LanguageHeadConfig:
    """Head of a causal or masked language model: logits ``softcap(scale * (W h + b))`` over the vocabulary."""

    bias: bool = False
    logit_softcap: PositiveFloat | None = None
    logit_scale: float = 1.0
    transform: HeadTransformConfig | None = None
    kind: Literal["language"] = "language"


@dataclass(frozen=True)
class ClassificationHeadConfig:
    """Classification head: one score per label, for each token (tagging) or for the pooled sequence.

    ``activation`` converts scores to probabilities: ``softmax`` of exclusive labels, ``sigmoid`` of independent ones;
    ``none``: the scores are values (regression). None: sigmoid of one label, softmax of several.
    """

    labels: tuple[str, ...]
    level: Literal["token", "row"] = "token"  # row: the whole sequence
    pool: Pooling = "first"
    transform: HeadTransformConfig | None = None
    bias: bool = True
    activation: Literal["softmax", "sigmoid", "none"] | None = None
    kind: Literal["classification"] = "classification"


@dataclass(frozen=True)
class PoolingHeadConfig:
    """Sequence embedding: the mean or the first of the hidden states, transformed (BERT's pooler: a matrix, tanh)."""

    pool: Pooling = "mean"
    normalize: bool = False  # scale to length one
    transform: HeadTransformConfig | None = None
    kind: Literal["pooling"] = "pooling"
