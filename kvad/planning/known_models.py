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
from functools import partial
from typing import Any

from kvad import config as cfg
from kvad.config import EncoderInputConfig, ModelConfig
from kvad.errors import UsageError, suggest

LAYER_NORM = cfg.NormConfig("layer", 1e-5, bias=True)


def known_model(name: str) -> ModelConfig:
    """Return the config of a known model; UsageError with the nearest name for an unknown one."""
    if name.lower() not in KNOWN_MODELS:
        raise UsageError(f"{name!r} is no file, folder or known model", suggest(name.lower(), KNOWN_MODELS))
    return KNOWN_MODELS[name.lower()]()


# ---------------------------------------------------------------- families


def _gpt2(layers: int, heads: int, width: int, *, limit: int = 1024) -> ModelConfig:
    attention = cfg.AttentionConfig(heads, position=None, qkv_bias=True, out_bias=True)
    layer = cfg.LayerConfig(attention, cfg.PlainMLPConfig(4 * width, "gelu_tanh", bias=True), LAYER_NORM)
    return ModelConfig(
        width,
        50257,
        limit,
        cfg.StackConfig(layers, {"L": layer}),
        embedding=cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(limit)),
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
    rope: cfg.RopeConfig | None = None,
    tie: bool = False,
    eps: float = 1e-5,
    **attention: Any,
) -> ModelConfig:
    """RMSNorm, RoPE, SwiGLU, no biases: Llama, and most later models."""
    attention_config = cfg.AttentionConfig(heads, kv_heads, position=rope or cfg.RopeConfig(), **attention)
    stack = cfg.StackConfig(
        layers, {"L": cfg.LayerConfig(attention_config, cfg.GatedMLPConfig(hidden), cfg.NormConfig("rms", eps))}
    )
    return ModelConfig(width, vocab, limit, stack, tie_embeddings=tie)


def _llama31(factor: float) -> cfg.RopeConfig:
    return cfg.RopeConfig(500000.0, scaling=cfg.Llama3ScalingConfig(factor, 8192))


# Llama's layers with biases on q, k and v; with heads of 128, q and k normalized per head.
_qwen25 = partial(_llama, rope=cfg.RopeConfig(1e6), eps=1e-6, qkv_bias=True)
_qwen3 = partial(_llama, rope=cfg.RopeConfig(1e6), eps=1e-6, head_dim=128, qk_norm="head")


def _gemma2(layers: int, heads: int, kv_heads: int, width: int, hidden: int) -> ModelConfig:
    """Every second layer has a window of 4,096 tokens; norms before and after each branch, soft-capped logits."""

    def layer(window: int | None) -> cfg.LayerConfig:
        mixer = cfg.AttentionConfig(heads, kv_heads, head_dim=256, window=window, logit_softcap=50.0)
        return cfg.LayerConfig(
            mixer, cfg.GatedMLPConfig(hidden, "gelu_tanh"), cfg.NormConfig("rms", 1e-6, unit_offset=True)
        )

    stack = cfg.StackConfig(layers, {"L": layer(4096), "G": layer(None)}, "LG", "sandwich")
    embedding, head = cfg.EmbeddingConfig(scale=math.sqrt(width)), cfg.LanguageHeadConfig(logit_softcap=30.0)
    return ModelConfig(width, 256000, 8192, stack, embedding=embedding, head=head)


def _falcon7b() -> ModelConfig:
    layer = cfg.LayerConfig(cfg.AttentionConfig(71, 1), cfg.PlainMLPConfig(4 * 4544, "gelu"), LAYER_NORM)
    return ModelConfig(4544, 65024, 2048, cfg.StackConfig(32, {"L": layer}, norm_position="parallel"))


def _bloom560m() -> ModelConfig:
    attention = cfg.AttentionConfig(16, position=cfg.AlibiConfig(), qkv_bias=True, out_bias=True)
    layer = cfg.LayerConfig(attention, cfg.PlainMLPConfig(4096, "gelu_tanh", bias=True), LAYER_NORM)
    return ModelConfig(
        1024, 250880, 2048, cfg.StackConfig(24, {"L": layer}), embedding=cfg.EmbeddingConfig(norm=LAYER_NORM)
    )


def _opt125m() -> ModelConfig:
    attention = cfg.AttentionConfig(12, position=None, qkv_bias=True, out_bias=True)
    layer = cfg.LayerConfig(attention, cfg.PlainMLPConfig(3072, "relu", bias=True), LAYER_NORM)
    embedding = cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(2050, offset=2))
    return ModelConfig(768, 50272, 2048, cfg.StackConfig(12, {"L": layer}), embedding=embedding)


def _t5(layers: int, heads: int, width: int, hidden: int) -> ModelConfig:
    """Version 1.0: no biases, no division by sqrt(head_dim), one bias table per stack, tied and scaled logits."""

    def layer(cross: cfg.AttentionConfig | None) -> cfg.LayerConfig:
        position = cfg.T5BiasConfig(32, 128, bidirectional=cross is None)
        mixer = cfg.AttentionConfig(
            heads, head_dim=64, position=position, causal=cross is not None, softmax_scale="none"
        )
        return cfg.LayerConfig(
            mixer, cfg.PlainMLPConfig(hidden, "relu"), cfg.NormConfig("rms", 1e-6), cross_attention=cross
        )

    source = cfg.AttentionConfig(heads, head_dim=64, position=None, causal=False, softmax_scale="none")
    return ModelConfig(
        width,
        32128,
        512,
        decoder=cfg.StackConfig(layers, {"L": layer(source)}),
        encoder=cfg.StackConfig(layers, {"L": layer(None)}),
        encoder_input=EncoderInputConfig(512),
        head=cfg.LanguageHeadConfig(logit_scale=width**-0.5),
    )


def _translator(
    layers: int,
    heads: int,
    width: int,
    hidden: int,
    vocab: int,
    limit: int,
    embed: cfg.EmbeddingConfig,
    activation: cfg.Activation,
    *,
    biases: bool = True,
) -> ModelConfig:
    """Vaswani's model: a norm after each branch, one embedding table for source, target and head."""
    attention = cfg.AttentionConfig(heads, position=None, qkv_bias=biases, out_bias=biases)
    bidirectional = replace(attention, causal=False)
    mlp = cfg.PlainMLPConfig(hidden, activation, bias=True)

    def stack(mixer: cfg.AttentionConfig, cross: cfg.AttentionConfig | None) -> cfg.StackConfig:
        return cfg.StackConfig(
            layers, {"L": cfg.LayerConfig(mixer, mlp, LAYER_NORM, cross)}, norm_position="post", final_norm=False
        )

    return ModelConfig(
        width,
        vocab,
        limit,
        decoder=stack(attention, bidirectional),
        encoder=stack(bidirectional, None),
        embedding=embed,
        encoder_input=EncoderInputConfig(limit, embed),
        head=cfg.LanguageHeadConfig(bias=biases),
    )


def _marian() -> ModelConfig:
    embed = cfg.EmbeddingConfig(cfg.SinusoidalPositionsConfig(form="concat"), scale=math.sqrt(512))
    return _translator(6, 8, 512, 2048, 58101, 512, embed, "silu")


def _transformer_base() -> ModelConfig:
    embed = cfg.EmbeddingConfig(cfg.SinusoidalPositionsConfig(), scale=math.sqrt(512))
    return _translator(6, 8, 512, 2048, 37000, 512, embed, "relu", biases=False)


def _bert() -> ModelConfig:
    """The masked language model."""
    norm = cfg.NormConfig("layer", 1e-12, bias=True)
    mixer = cfg.AttentionConfig(12, position=None, causal=False, qkv_bias=True, out_bias=True)
    layer = cfg.LayerConfig(mixer, cfg.PlainMLPConfig(3072, "gelu", bias=True), norm)
    return ModelConfig(
        768,
        30522,
        512,
        encoder=cfg.StackConfig(12, {"L": layer}, norm_position="post", final_norm=False),
        embedding=cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(512), norm=norm, num_token_types=2),
        head=cfg.LanguageHeadConfig(bias=True, transform=cfg.HeadTransformConfig("gelu", norm=norm)),
    )


def _notes_example() -> ModelConfig:
    layer = cfg.LayerConfig(cfg.AttentionConfig(32), cfg.PlainMLPConfig(8192), LAYER_NORM)
    return ModelConfig(2048, 32000, 8192, cfg.StackConfig(24, {"L": layer}))


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
    "llama-3-8b": lambda: _llama(32, 32, 8, 4096, 14336, 128256, 8192, rope=cfg.RopeConfig(500000.0)),
    "llama-3-70b": lambda: _llama(80, 64, 8, 8192, 28672, 128256, 8192, rope=cfg.RopeConfig(500000.0)),
    "llama-3.1-8b": lambda: _llama(32, 32, 8, 4096, 14336, 128256, 131072, rope=_llama31(8.0)),
    "llama-3.1-70b": lambda: _llama(80, 64, 8, 8192, 28672, 128256, 131072, rope=_llama31(8.0)),
    "llama-3.2-1b": lambda: _llama(16, 32, 8, 2048, 8192, 128256, 131072, rope=_llama31(32.0), tie=True),
    "llama-3.2-3b": lambda: _llama(28, 24, 8, 3072, 8192, 128256, 131072, rope=_llama31(32.0), tie=True),
    "mistral-7b": lambda: _llama(32, 32, 8, 4096, 14336, 32000, 32768, window=4096),
    "qwen2.5-0.5b": lambda: _qwen25(24, 14, 2, 896, 4864, 151936, 32768, tie=True),
    "qwen2.5-7b": lambda: _qwen25(28, 28, 4, 3584, 18944, 152064, 131072, tie=False),
    "qwen3-0.6b": lambda: _qwen3(28, 16, 8, 1024, 3072, 151936, 40960, tie=True),
    "qwen3-8b": lambda: _qwen3(36, 32, 8, 4096, 12288, 151936, 40960),
    "gemma-2-2b": lambda: _gemma2(26, 8, 4, 2304, 9216),
    "gemma-2-9b": lambda: _gemma2(42, 16, 8, 3584, 14336),
    "smollm-135m": lambda: _llama(30, 9, 3, 576, 1536, 49152, 2048, tie=True),
    "tinyllama-1.1b": lambda: _llama(22, 32, 4, 2048, 5632, 32000, 2048),
    "bert-base": _bert,
    "t5-small": lambda: _t5(6, 8, 512, 2048),
    "t5-base": lambda: _t5(12, 12, 768, 3072),
    "bart-base": lambda: _translator(
        6, 12, 768, 3072, 50265, 1024, cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(1026, 2), norm=LAYER_NORM), "gelu"
    ),
    "marian-base": _marian,
    "transformer-base": _transformer_base,
    "notes-example": _notes_example,
}
