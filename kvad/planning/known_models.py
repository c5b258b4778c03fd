"""Known models by name: their public ``config.json`` as a ModelConfig, so they can be planned without a download.

Each entry is a function without arguments, so a config is built (and checked) only on request. The numbers are those of
the published checkpoints; a test compares the parameters of each with the published count. ``gpt3-175b`` is Brown et
al. 2020, table 2.1, with all layers dense (half of theirs are banded). ``notes-example`` is the model that note 004
sizes in section 4.17: 24 layers, 32 heads of 64, width 2,048, 8,192 tokens; its MLP and vocabulary are chosen here.
``transformer-base`` is Vaswani et al. 2017, table 3: the 37,000 tokens that English and German share, no biases in
attention; the maximum length is chosen here. ``marian-base`` is a pair of OPUS-MT (opus-mt-en-de).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvad.config import (
    Activation,
    AlibiConfig,
    AttentionConfig,
    EmbeddingConfig,
    EncoderInputConfig,
    GatedMLPConfig,
    HeadTransformConfig,
    LanguageHeadConfig,
    LayerConfig,
    LearnedPositionsConfig,
    Llama3ScalingConfig,
    ModelConfig,
    NormConfig,
    PlainMLPConfig,
    RopeConfig,
    SinusoidalPositionsConfig,
    StackConfig,
    T5BiasConfig,
)
from kvad.errors import UsageError, suggest

LAYER_NORM = NormConfig("layer", 1e-5, bias=True)


def known_model(name: str) -> ModelConfig:
    """Return the config of a known model; UsageError with the nearest name for an unknown one."""
    if name.lower() not in KNOWN_MODELS:
        raise UsageError(f"{name!r} is no file, folder or known model", suggest(name.lower(), KNOWN_MODELS))
    return KNOWN_MODELS[name.lower()]()


# ---------------------------------------------------------------- families


def _gpt2(layers: int, heads: int, width: int, *, limit: int = 1024) -> ModelConfig:
    attention = AttentionConfig(heads, position=None, qkv_bias=True, out_bias=True)
    layer = LayerConfig(attention, PlainMLPConfig(4 * width, "gelu_tanh", bias=True), LAYER_NORM)
    return ModelConfig(
        width, 50257, limit, StackConfig(layers, {"L": layer}), embedding=EmbeddingConfig(LearnedPositionsConfig(limit))
    )


def _llama(
    layers: int,
    heads: int,
    kv_heads: int,
    width: int,
    hidden: int,
    vocab: int,
    limit: int,
    *,
    rope: RopeConfig | None = None,
    tie: bool = False,
    eps: float = 1e-5,
    **attention: Any,
) -> ModelConfig:
    """RMSNorm, RoPE, SwiGLU, no biases: Llama, and most later models."""
    attention_config = AttentionConfig(heads, kv_heads, position=rope or RopeConfig(), **attention)
    stack = StackConfig(layers, {"L": LayerConfig(attention_config, GatedMLPConfig(hidden), NormConfig("rms", eps))})
    return ModelConfig(width, vocab, limit, stack, tie_embeddings=tie)


def _llama31(factor: float) -> RopeConfig:
    return RopeConfig(500000.0, scaling=Llama3ScalingConfig(factor, 8192))


def _qwen25(
    layers: int, heads: int, kv_heads: int, width: int, hidden: int, vocab: int, limit: int, *, tie: bool
) -> ModelConfig:
    """Llama's layers with biases on q, k and v."""
    return _llama(
        layers, heads, kv_heads, width, hidden, vocab, limit, rope=RopeConfig(1e6), tie=tie, eps=1e-6, qkv_bias=True
    )


def _qwen3(layers: int, heads: int, width: int, hidden: int, *, tie: bool) -> ModelConfig:
    """Eight key-value heads of 128, q and k normalized per head."""
    return _llama(
        layers,
        heads,
        8,
        width,
        hidden,
        151936,
        40960,
        rope=RopeConfig(1e6),
        tie=tie,
        eps=1e-6,
        head_dim=128,
        qk_norm="head",
    )


def _gemma2(layers: int, heads: int, kv_heads: int, width: int, hidden: int) -> ModelConfig:
    """Every second layer has a window of 4,096 tokens.

    Norms before and after each branch, soft-capped logits.
    """

    def layer(window: int | None) -> LayerConfig:
        mixer = AttentionConfig(heads, kv_heads, head_dim=256, window=window, logit_softcap=50.0)
        return LayerConfig(mixer, GatedMLPConfig(hidden, "gelu_tanh"), NormConfig("rms", 1e-6, unit_offset=True))

    stack = StackConfig(layers, {"L": layer(4096), "G": layer(None)}, "LG", "sandwich")
    return ModelConfig(
        width,
        256000,
        8192,
        stack,
        embedding=EmbeddingConfig(scale=math.sqrt(width)),
        head=LanguageHeadConfig(logit_softcap=30.0),
    )


def _falcon7b() -> ModelConfig:
    layer = LayerConfig(AttentionConfig(71, 1), PlainMLPConfig(4 * 4544, "gelu"), LAYER_NORM)
    return ModelConfig(4544, 65024, 2048, StackConfig(32, {"L": layer}, norm_position="parallel"))


def _bloom560m() -> ModelConfig:
    attention = AttentionConfig(16, position=AlibiConfig(), qkv_bias=True, out_bias=True)
    layer = LayerConfig(attention, PlainMLPConfig(4096, "gelu_tanh", bias=True), LAYER_NORM)
    return ModelConfig(1024, 250880, 2048, StackConfig(24, {"L": layer}), embedding=EmbeddingConfig(norm=LAYER_NORM))


def _opt125m() -> ModelConfig:
    attention = AttentionConfig(12, position=None, qkv_bias=True, out_bias=True)
    layer = LayerConfig(attention, PlainMLPConfig(3072, "relu", bias=True), LAYER_NORM)
    return ModelConfig(
        768,
        50272,
        2048,
        StackConfig(12, {"L": layer}),
        embedding=EmbeddingConfig(LearnedPositionsConfig(2050, offset=2)),
    )


def _t5(layers: int, heads: int, width: int, hidden: int) -> ModelConfig:
    """Version 1.0: no biases, no division by sqrt(head_dim), one bias table per stack, tied and scaled logits."""

    def layer(cross: AttentionConfig | None) -> LayerConfig:
        position = T5BiasConfig(32, 128, bidirectional=cross is None)
        mixer = AttentionConfig(heads, head_dim=64, position=position, causal=cross is not None, softmax_scale="none")
        return LayerConfig(mixer, PlainMLPConfig(hidden, "relu"), NormConfig("rms", 1e-6), cross_attention=cross)

    source = AttentionConfig(heads, head_dim=64, position=None, causal=False, softmax_scale="none")
    return ModelConfig(
        width,
        32128,
        512,
        decoder=StackConfig(layers, {"L": layer(source)}),
        encoder=StackConfig(layers, {"L": layer(None)}),
        encoder_input=EncoderInputConfig(512),
        head=LanguageHeadConfig(logit_scale=width**-0.5),
    )


def _translator(
    layers: int,
    heads: int,
    width: int,
    hidden: int,
    vocab: int,
    limit: int,
    embed: EmbeddingConfig,
    activation: Activation,
    *,
    biases: bool = True,
) -> ModelConfig:
    """Vaswani's model: a norm after each branch, one embedding table for source, target and head."""
    attention = AttentionConfig(heads, position=None, qkv_bias=biases, out_bias=biases)
    bidirectional = replace(attention, causal=False)
    mlp = PlainMLPConfig(hidden, activation, bias=True)

    def stack(mixer: AttentionConfig, cross: AttentionConfig | None) -> StackConfig:
        return StackConfig(
            layers, {"L": LayerConfig(mixer, mlp, LAYER_NORM, cross)}, norm_position="post", final_norm=False
        )

    return ModelConfig(
        width,
        vocab,
        limit,
        decoder=stack(attention, bidirectional),
        encoder=stack(bidirectional, None),
        embedding=embed,
        encoder_input=EncoderInputConfig(limit, embed),
        head=LanguageHeadConfig(bias=biases),
    )


def _marian() -> ModelConfig:
    embed = EmbeddingConfig(SinusoidalPositionsConfig(form="concat"), scale=math.sqrt(512))
    return _translator(6, 8, 512, 2048, 58101, 512, embed, "silu")


def _transformer_base() -> ModelConfig:
    embed = EmbeddingConfig(SinusoidalPositionsConfig(), scale=math.sqrt(512))
    return _translator(6, 8, 512, 2048, 37000, 512, embed, "relu", biases=False)


def _bert() -> ModelConfig:
    """Return the shape as a masked language model."""
    norm = NormConfig("layer", 1e-12, bias=True)
    mixer = AttentionConfig(12, position=None, causal=False, qkv_bias=True, out_bias=True)
    layer = LayerConfig(mixer, PlainMLPConfig(3072, "gelu", bias=True), norm)
    return ModelConfig(
        768,
        30522,
        512,
        encoder=StackConfig(12, {"L": layer}, norm_position="post", final_norm=False),
        embedding=EmbeddingConfig(LearnedPositionsConfig(512), norm=norm, num_token_types=2),
        head=LanguageHeadConfig(bias=True, transform=HeadTransformConfig("gelu", norm=norm)),
    )


def _notes_example() -> ModelConfig:
    layer = LayerConfig(AttentionConfig(32), PlainMLPConfig(8192), LAYER_NORM)
    return ModelConfig(2048, 32000, 8192, StackConfig(24, {"L": layer}))


KNOWN_MODELS: Mapping[str, Callable[[], ModelConfig]] = {
    "gpt2": lambda: _gpt2(12, 12, 768),
    "gpt2-medium": lambda: _gpt2(24, 16, 1024),
    "gpt2-large": lambda: _gpt2(36, 20, 1280),
    "gpt2-xl": lambda: _gpt2(48, 25, 1600),
    "gpt3-175b": lambda: _gpt2(96, 96, 12288, limit=2048),
    "opt-125m": _opt125m,
    "bloom-560m": _bloom560m,
    "falcon-7b": _falcon7b,
    "llama-2-7b": lambda: _llama(32, 32, 32, 4096, 11008, 32000, 4096),
    "llama-2-13b": lambda: _llama(40, 40, 40, 5120, 13824, 32000, 4096),
    "llama-2-70b": lambda: _llama(80, 64, 8, 8192, 28672, 32000, 4096),
    "llama-3-8b": lambda: _llama(32, 32, 8, 4096, 14336, 128256, 8192, rope=RopeConfig(500000.0)),
    "llama-3-70b": lambda: _llama(80, 64, 8, 8192, 28672, 128256, 8192, rope=RopeConfig(500000.0)),
    "llama-3.1-8b": lambda: _llama(32, 32, 8, 4096, 14336, 128256, 131072, rope=_llama31(8.0)),
    "llama-3.1-70b": lambda: _llama(80, 64, 8, 8192, 28672, 128256, 131072, rope=_llama31(8.0)),
    "llama-3.2-1b": lambda: _llama(16, 32, 8, 2048, 8192, 128256, 131072, rope=_llama31(32.0), tie=True),
    "llama-3.2-3b": lambda: _llama(28, 24, 8, 3072, 8192, 128256, 131072, rope=_llama31(32.0), tie=True),
    "mistral-7b": lambda: _llama(32, 32, 8, 4096, 14336, 32000, 32768, window=4096),
    "qwen2.5-0.5b": lambda: _qwen25(24, 14, 2, 896, 4864, 151936, 32768, tie=True),
    "qwen2.5-7b": lambda: _qwen25(28, 28, 4, 3584, 18944, 152064, 131072, tie=False),
    "qwen3-0.6b": lambda: _qwen3(28, 16, 1024, 3072, tie=True),
    "qwen3-8b": lambda: _qwen3(36, 32, 4096, 12288, tie=False),
    "gemma-2-2b": lambda: _gemma2(26, 8, 4, 2304, 9216),
    "gemma-2-9b": lambda: _gemma2(42, 16, 8, 3584, 14336),
    "smollm-135m": lambda: _llama(30, 9, 3, 576, 1536, 49152, 2048, tie=True),
    "tinyllama-1.1b": lambda: _llama(22, 32, 4, 2048, 5632, 32000, 2048),
    "bert-base": _bert,
    "t5-small": lambda: _t5(6, 8, 512, 2048),
    "t5-base": lambda: _t5(12, 12, 768, 3072),
    "bart-base": lambda: _translator(
        6, 12, 768, 3072, 50265, 1024, EmbeddingConfig(LearnedPositionsConfig(1026, 2), norm=LAYER_NORM), "gelu"
    ),
    "marian-base": _marian,
    "transformer-base": _transformer_base,
    "notes-example": _notes_example,
}
