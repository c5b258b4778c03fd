"""Tiny random models for the tests: short names for every axis of the config, all parameters random."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from kvad.config import EncoderInputConfig
from kvad.config import layers as cfg
from kvad.config.model import ModelConfig
from kvad.model.transformer import Transformer

WIDTH, VOCAB, LIMIT = 24, 67, 96
SOURCE_VOCAB, SOURCE_LIMIT = 41, 64
POSITIONS = ("none", "learned", "sinusoidal", "rope", "rope-partial", "rope-dynamic", "rope-longrope", "alibi", "t5")
NORMS = ("pre", "post", "sandwich", "parallel")
STATES = {  # values of ``heads``: a mixer besides attention
    "short-conv": cfg.ShortConvConfig(3, bias=True),
    "recurrence": cfg.GatedRecurrenceConfig(30, num_blocks=5),
    "delta": cfg.GatedDeltaConfig(2, 4, key_dim=4, value_dim=4, kernel_size=3),
}
HEADS = ("mha", "gqa", "mqa", "value-dim", "qk-norm", "softcap", "sinks", "window", "window-mix", "latent")


def attention(position: str, heads: str) -> cfg.AttentionConfig:
    """Six query heads (not a power of two) of eight dims, for every value of the axis; a latent has rotary ones."""
    encodings: dict[str, cfg.RopeConfig | cfg.AlibiConfig | cfg.T5BiasConfig | None] = {
        "rope": cfg.RopeConfig(theta=100.0),
        "rope-partial": cfg.RopeConfig(theta=100.0, partial_rotary_factor=0.5, interleaved=True),
        "rope-dynamic": cfg.RopeConfig(
            theta=100.0, scaling=cfg.DynamicScalingConfig(factor=2.0, original_max_seq_len=20)
        ),
        "rope-longrope": cfg.RopeConfig(
            scaling=cfg.LongRopeScalingConfig(
                short_factor=(1.0, 1.1, 1.2, 1.3), long_factor=(2.0, 3.0, 4.0, 5.0), original_max_seq_len=20
            )
        ),
        "rope-yarn": cfg.RopeConfig(
            theta=100.0, interleaved=True, scaling=cfg.YarnScalingConfig(4.0, 16)
        ),  # cos * 1.14
        "alibi": cfg.AlibiConfig(),
        "t5": cfg.T5BiasConfig(num_buckets=8, max_distance=20),
    }
    if heads == "latent":
        rotary, latent = encodings.get(position), cfg.LatentConfig(10, 6, 8, 5, q_lora_rank=14)
        return cfg.AttentionConfig(
            6, position=rotary if isinstance(rotary, cfg.RopeConfig) else encodings["rope"], latent=latent
        )
    kv_heads = {"gqa": 3, "window": 2, "window-mix": 2, "mqa": 1, "sinks": 2, "softcap": 3, "value-dim": 3}.get(
        heads, 6
    )
    return cfg.AttentionConfig(
        num_heads=6,
        num_kv_heads=kv_heads,
        head_dim=8,
        value_dim=6 if heads == "value-dim" else None,
        position=encodings.get(position),
        window=7 if heads in ("window", "window-mix") else None,
        qk_norm="head" if heads == "qk-norm" else "none",
        logit_softcap=3.0 if heads == "softcap" else None,
        sink_logits=heads == "sinks",
        qkv_bias=heads == "mha",
        out_bias=heads == "mha",
    )


def model_config(position: str = "rope", norm: str = "pre", heads: str = "gqa", layers: int = 2) -> ModelConfig:
    kind = (
        cfg.NormConfig("layer", bias=True) if norm == "post" else cfg.NormConfig("rms", unit_offset=norm == "sandwich")
    )
    mixer = attention(position, heads)
    mlp = cfg.PlainMLPConfig(40, "gelu", bias=True) if norm == "post" else cfg.GatedMLPConfig(40)
    kinds = {"L": cfg.LayerConfig(mixer, mlp, kind)}
    pattern = "LG" if heads == "window-mix" else "L"
    if heads == "window-mix":
        kinds["G"] = cfg.LayerConfig(attention(position, "gqa"), mlp, kind)
    if heads in STATES:  # a state, attention, a state
        kinds["S"], pattern = cfg.LayerConfig(STATES[heads], mlp, kind), "SLS"
    place = "pre" if norm not in NORMS else norm
    absolute: cfg.LearnedPositionsConfig | cfg.SinusoidalPositionsConfig | None = None
    if position == "learned":
        absolute = cfg.LearnedPositionsConfig(LIMIT + 2, offset=2)
    elif position == "sinusoidal":
        absolute = cfg.SinusoidalPositionsConfig()
    return ModelConfig(
        hidden_size=WIDTH,
        vocab_size=VOCAB,
        max_seq_len=LIMIT,
        decoder=cfg.StackConfig(layers, kinds, pattern, norm_position=place),  # type: ignore[arg-type]
        embedding=cfg.EmbeddingConfig(absolute),
        tie_embeddings=norm != "post",
        head=cfg.LanguageHeadConfig(bias=norm == "post"),
    )


def cross(heads: str) -> cfg.AttentionConfig:
    """Return cross-attention to a source, without positions and window."""
    return replace(attention("none", "mqa" if heads == "latent" else heads), causal=False, window=None)


def bidirectional(stack: cfg.StackConfig) -> cfg.StackConfig:
    """Return the same layers without causality, for an encoder."""
    kinds = {}
    for letter, layer in stack.layer_types.items():
        position = layer.attention.position
        if isinstance(position, cfg.T5BiasConfig):
            position = replace(position, bidirectional=True)
        plain = replace(layer.attention, causal=False, position=position, latent=None, head_dim=8)
        kinds[letter] = replace(layer, attention=plain)
    return replace(stack, layer_types=kinds)


def encoder_config(position: str = "rope", norm: str = "pre", heads: str = "gqa", layers: int = 2) -> ModelConfig:
    """Return an encoder with a masked-language-model head."""
    config = model_config(position, norm, heads, layers)
    assert config.decoder is not None
    head = cfg.LanguageHeadConfig(
        bias=True, transform=cfg.HeadTransformConfig("gelu", norm=cfg.NormConfig("layer", bias=True))
    )
    return replace(config, decoder=None, encoder=bidirectional(config.decoder), head=head)


def pair_config(
    position: str = "rope", norm: str = "pre", heads: str = "gqa", layers: int = 2, own: bool = False
) -> ModelConfig:
    """Return an encoder-decoder; with ``own`` its source has a separate vocabulary and width.

    A decoder of norm_place "parallel" has no place for cross-attention, so it becomes "pre"; the encoder keeps its
    norm.
    """
    config = model_config(position, norm, heads, layers)
    assert config.decoder is not None
    kinds = {
        letter: replace(layer, cross_attention=cross(heads)) for letter, layer in config.decoder.layer_types.items()
    }
    place = config.decoder.norm_position if config.decoder.norm_position in ("pre", "post", "sandwich") else "pre"
    absolute = config.embedding.position
    if isinstance(absolute, cfg.LearnedPositionsConfig):
        absolute = cfg.LearnedPositionsConfig(SOURCE_LIMIT + 1, offset=1)
    embed = cfg.EmbeddingConfig(absolute, scale=2.0, norm=cfg.NormConfig("layer", bias=True))
    source = EncoderInputConfig(SOURCE_LIMIT, embed, SOURCE_VOCAB if own else None, hidden_size=30 if own else None)
    return replace(
        config,
        decoder=replace(config.decoder, layer_types=kinds, norm_position=place),
        encoder=replace(bidirectional(config.decoder), num_layers=layers + 1),
        encoder_input=source,
    )


def build(config: ModelConfig, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Transformer:
    """Build a model with every parameter random, so that a dropped bias or swapped norm shows; logits are a few
    units.
    """
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(config)
    for name, parameter in model.named_parameters():
        randomise(name, parameter, generator)
    return model.to(dtype).eval()


def randomise(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
    noise = torch.randn(parameter.shape, generator=generator)
    with torch.no_grad():
        if "norm" in name and name.endswith("weight"):
            parameter.add_(0.2 * noise)
        elif parameter.dim() < 2 or "relative" in name:
            parameter.copy_(0.5 * noise)
        else:
            parameter.copy_(noise * (1.6 / parameter.shape[-1] ** 0.5))
