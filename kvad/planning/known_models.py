"""Known models by name: their public ``config.json`` as a ModelConfig, so they can be planned without a download.

Each entry is a function, so a config is built (and checked) only on request. The numbers are those of
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
from typing import Any, Literal

from kvad import config as cfg
from kvad.config import EncoderInputConfig, ModelConfig
from kvad.errors import UsageError, suggest

LAYER_NORM = cfg.NormConfig("layer", 1e-5, bias=True)


def known_model(name: str) -> ModelConfig:
    """Return the config of a known model; UsageError with the nearest name for an unknown one."""
    if name.lower() not in KNOWN_MODELS:
        raise UsageError(f"{name!r} is not a file, a folder or a known model", suggest(name.lower(), KNOWN_MODELS))
    return KNOWN_MODELS[name.lower()]()


def published_dtype(name: str) -> str:
    """Return the dtype in which the weights of a known model were published."""
    return next((dtype for dtype, names in PUBLISHED_DTYPES.items() if name.lower() in names), "float32")


def _biased_layer(heads: int, hidden: int, activation: cfg.Activation, **attention: Any) -> cfg.LayerConfig:
    options = {"position": None, "qkv_bias": True, "out_bias": True, **attention}
    mlp = cfg.PlainMLPConfig(hidden, activation, bias=True)
    return cfg.LayerConfig(cfg.AttentionConfig(heads, **options), mlp, LAYER_NORM)


def _llama_layer(heads: int, kv_heads: int, hidden: int, *, eps: float = 1e-5, **attention: Any) -> cfg.LayerConfig:
    """RMSNorm, RoPE, SwiGLU, no biases: Llama, and most later models."""
    attention_config = cfg.AttentionConfig(heads, kv_heads, **attention)
    return cfg.LayerConfig(attention_config, cfg.GatedMLPConfig(hidden), cfg.NormConfig("rms", eps))


def _llama31_layer(heads: int, hidden: int, factor: float) -> cfg.LayerConfig:
    scaling = cfg.Llama3ScalingConfig(factor, original_max_seq_len=8192)
    return _llama_layer(heads, 8, hidden, position=cfg.RopeConfig(500000.0, scaling=scaling))


_llama3_layer = partial(_llama_layer, position=cfg.RopeConfig(500000.0))
# Llama's layers with biases on q, k and v; with heads of 128, q and k normalized per head.
_qwen25_layer = partial(_llama_layer, position=cfg.RopeConfig(1e6), eps=1e-6, qkv_bias=True)
_qwen3_layer = partial(_llama_layer, position=cfg.RopeConfig(1e6), eps=1e-6, head_dim=128, qk_norm="head")


def _decoder(
    layers: int, width: int, vocab: int, limit: int, layer: cfg.LayerConfig, *, tie: bool = True, **embedding: Any
) -> ModelConfig:
    """Equal layers, the norm before each branch."""
    stack, embed = cfg.StackConfig(layers, {"L": layer}), cfg.EmbeddingConfig(**embedding)
    return ModelConfig(width, vocab, limit, stack, embedding=embed, tie_embeddings=tie)


def _gpt2(layers: int, heads: int, width: int, *, limit: int = 1024) -> ModelConfig:
    layer = _biased_layer(heads, 4 * width, "gelu_tanh")
    return _decoder(layers, width, 50257, limit, layer, position=cfg.LearnedPositionsConfig(limit))


def _gemma2(layers: int, heads: int, kv_heads: int, width: int, hidden: int) -> ModelConfig:
    """Every second layer has a window of 4,096 tokens; norms before and after each branch, soft-capped logits."""

    def layer(window: int | None) -> cfg.LayerConfig:
        mixer = cfg.AttentionConfig(heads, kv_heads, head_dim=256, window=window, logit_softcap=50.0)
        mlp, norm = cfg.GatedMLPConfig(hidden, "gelu_tanh"), cfg.NormConfig("rms", 1e-6, unit_offset=True)
        return cfg.LayerConfig(mixer, mlp, norm)

    stack = cfg.StackConfig(layers, {"L": layer(4096), "G": layer(None)}, "LG", "sandwich")
    embedding, head = cfg.EmbeddingConfig(scale=math.sqrt(width)), cfg.LanguageHeadConfig(logit_softcap=30.0)
    return ModelConfig(width, 256000, 8192, stack, embedding=embedding, head=head)


def _falcon7b() -> ModelConfig:
    layer = cfg.LayerConfig(cfg.AttentionConfig(71, 1), cfg.PlainMLPConfig(4 * 4544, "gelu"), LAYER_NORM)
    return ModelConfig(4544, 65024, 2048, cfg.StackConfig(32, {"L": layer}, norm_position="parallel"))


def _t5(layers: int, heads: int, width: int, hidden: int) -> ModelConfig:
    """Version 1.0: no biases, no division by sqrt(head_dim), one bias table per stack, tied and scaled logits."""

    def layer(cross: cfg.AttentionConfig | None) -> cfg.LayerConfig:
        position = cfg.T5BiasConfig(32, 128, bidirectional=cross is None)
        causal, mlp = cross is not None, cfg.PlainMLPConfig(hidden, "relu")
        mixer = cfg.AttentionConfig(heads, head_dim=64, position=position, causal=causal, softmax_scale="none")
        return cfg.LayerConfig(mixer, mlp, cfg.NormConfig("rms", 1e-6), cross)

    source = cfg.AttentionConfig(heads, head_dim=64, position=None, causal=False, softmax_scale="none")
    decoder, encoder = (cfg.StackConfig(layers, {"L": layer(cross)}) for cross in (source, None))
    head = cfg.LanguageHeadConfig(logit_scale=width**-0.5)
    return ModelConfig(width, 32128, 512, decoder, encoder, encoder_input=EncoderInputConfig(512), head=head)


def _translator(
    heads: int, hidden: int, vocab: int, limit: int, embed: cfg.EmbeddingConfig, act: cfg.Activation, bias: bool = True
) -> ModelConfig:
    """Vaswani's model: a norm after each branch, one embedding table for source, target and head; heads of 64."""
    attention = cfg.AttentionConfig(heads, position=None, qkv_bias=bias, out_bias=bias)
    bidirectional = replace(attention, causal=False)
    mlp = cfg.PlainMLPConfig(hidden, act, bias=True)

    def stack(mixer: cfg.AttentionConfig, cross: cfg.AttentionConfig | None) -> cfg.StackConfig:
        layer = cfg.LayerConfig(mixer, mlp, LAYER_NORM, cross)
        return cfg.StackConfig(6, {"L": layer}, norm_position="post", final_norm=False)

    decoder, encoder = stack(attention, bidirectional), stack(bidirectional, None)
    source, head = EncoderInputConfig(limit, embed), cfg.LanguageHeadConfig(bias=bias)
    return ModelConfig(64 * heads, vocab, limit, decoder, encoder, embed, source, head)


def _sinusoidal(form: Literal["interleaved", "concat"]) -> cfg.EmbeddingConfig:
    return cfg.EmbeddingConfig(cfg.SinusoidalPositionsConfig(form=form), scale=math.sqrt(512))


def _bert() -> ModelConfig:
    """The masked language model."""
    norm = cfg.NormConfig("layer", 1e-12, bias=True)
    layer = replace(_biased_layer(12, 3072, "gelu", causal=False), norm=norm)
    encoder = cfg.StackConfig(12, {"L": layer}, norm_position="post", final_norm=False)
    embedding = cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(512), norm=norm, num_token_types=2)
    head = cfg.LanguageHeadConfig(bias=True, transform=cfg.HeadTransformConfig("gelu", norm=norm))
    return ModelConfig(768, 30522, 512, encoder=encoder, embedding=embedding, head=head)


PUBLISHED_DTYPES: Mapping[str, frozenset[str]] = {  # other models: float32
    "bfloat16": frozenset({
        "falcon-7b", "llama-3-8b", "llama-3-70b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b", "llama-3.2-3b",
        "mistral-7b", "qwen2.5-0.5b", "qwen2.5-7b", "qwen3-0.6b", "qwen3-8b", "tinyllama-1.1b",
    }),
    "float16": frozenset({"opt-125m", "bloom-560m", "llama-2-7b", "llama-2-13b", "llama-2-70b"}),
}  # fmt: skip
KNOWN_MODELS: Mapping[str, Callable[[], ModelConfig]] = {
    "gpt2": lambda: _gpt2(12, 12, 768),
    "gpt2-medium": lambda: _gpt2(24, 16, 1024),
    "gpt2-large": lambda: _gpt2(36, 20, 1280),
    "gpt2-xl": lambda: _gpt2(48, 25, 1600),
    "gpt3-175b": lambda: _gpt2(96, 96, 12288, limit=2048),
    "opt-125m": lambda: _decoder(
        12, 768, 50272, 2048, _biased_layer(12, 3072, "relu"), position=cfg.LearnedPositionsConfig(2050, 2)
    ),
    "bloom-560m": lambda: _decoder(
        24, 1024, 250880, 2048, _biased_layer(16, 4096, "gelu_tanh", position=cfg.AlibiConfig()), norm=LAYER_NORM
    ),
    "falcon-7b": _falcon7b,
    "llama-2-7b": lambda: _decoder(32, 4096, 32000, 4096, _llama_layer(32, 32, 11008), tie=False),
    "llama-2-13b": lambda: _decoder(40, 5120, 32000, 4096, _llama_layer(40, 40, 13824), tie=False),
    "llama-2-70b": lambda: _decoder(80, 8192, 32000, 4096, _llama_layer(64, 8, 28672), tie=False),
    "llama-3-8b": lambda: _decoder(32, 4096, 128256, 8192, _llama3_layer(32, 8, 14336), tie=False),
    "llama-3-70b": lambda: _decoder(80, 8192, 128256, 8192, _llama3_layer(64, 8, 28672), tie=False),
    "llama-3.1-8b": lambda: _decoder(32, 4096, 128256, 131072, _llama31_layer(32, 14336, 8.0), tie=False),
    "llama-3.1-70b": lambda: _decoder(80, 8192, 128256, 131072, _llama31_layer(64, 28672, 8.0), tie=False),
    "llama-3.2-1b": lambda: _decoder(16, 2048, 128256, 131072, _llama31_layer(32, 8192, 32.0)),
    "llama-3.2-3b": lambda: _decoder(28, 3072, 128256, 131072, _llama31_layer(24, 8192, 32.0)),
    "mistral-7b": lambda: _decoder(32, 4096, 32000, 32768, _llama_layer(32, 8, 14336, window=4096), tie=False),
    "qwen2.5-0.5b": lambda: _decoder(24, 896, 151936, 32768, _qwen25_layer(14, 2, 4864)),
    "qwen2.5-7b": lambda: _decoder(28, 3584, 152064, 131072, _qwen25_layer(28, 4, 18944), tie=False),
    "qwen3-0.6b": lambda: _decoder(28, 1024, 151936, 40960, _qwen3_layer(16, 8, 3072)),
    "qwen3-8b": lambda: _decoder(36, 4096, 151936, 40960, _qwen3_layer(32, 8, 12288), tie=False),
    "gemma-2-2b": lambda: _gemma2(26, 8, 4, 2304, 9216),
    "gemma-2-9b": lambda: _gemma2(42, 16, 8, 3584, 14336),
    "smollm-135m": lambda: _decoder(30, 576, 49152, 2048, _llama_layer(9, 3, 1536)),
    "tinyllama-1.1b": lambda: _decoder(22, 2048, 32000, 2048, _llama_layer(32, 4, 5632), tie=False),
    "bert-base": _bert,
    "t5-small": lambda: _t5(6, 8, 512, 2048),
    "t5-base": lambda: _t5(12, 12, 768, 3072),
    "bart-base": lambda: _translator(
        12, 3072, 50265, 1024, cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(1026, 2), norm=LAYER_NORM), "gelu"
    ),
    "marian-base": lambda: _translator(8, 2048, 58101, 512, _sinusoidal("concat"), "silu"),
    "transformer-base": lambda: _translator(8, 2048, 37000, 512, _sinusoidal("interleaved"), "relu", bias=False),
    "notes-example": lambda: _decoder(
        24, 2048, 32000, 8192, cfg.LayerConfig(cfg.AttentionConfig(32), cfg.PlainMLPConfig(8192), LAYER_NORM)
    ),
}
