"""Small models of each topology that a transformers class can hold, like those that kvad trains."""

from __future__ import annotations

from typing import Any

from kvad.config import EncoderInputConfig
from kvad.config import layers as cfg
from kvad.config.model import ModelConfig

__all__ = ["T5", "attention", "configs"]

T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "vocab_size": 300,
    "n_positions": 64,
    "d_model": 36,
    "d_kv": 8,
    "d_ff": 52,
    "num_layers": 2,
    "num_heads": 6,
    "tie_word_embeddings": True,
}  # a transformers config

NORM = cfg.NormConfig("layer", bias=True)


def attention(**changes: Any) -> cfg.AttentionConfig:
    return cfg.AttentionConfig(6, **{"position": None, "qkv_bias": True, "out_bias": True, **changes})


def configs() -> dict[str, ModelConfig]:
    """Return configs like those of ``kvad train``: a Llama, a BERT and a BART."""
    llama = cfg.LayerConfig(cfg.AttentionConfig(6, 2, head_dim=8), cfg.GatedMLPConfig(52))
    bert = cfg.LayerConfig(
        attention(causal=False), cfg.PlainMLPConfig(52, bias=True), cfg.NormConfig("layer", 1e-12, bias=True)
    )
    cross = attention(causal=False)
    bart = cfg.LayerConfig(attention(), cfg.PlainMLPConfig(52, bias=True), NORM, cross)
    head = cfg.LanguageHeadConfig(bias=True, transform=cfg.HeadTransformConfig("gelu", True, bert.norm))
    embed = cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(66, offset=2), 1.0, NORM)
    post = {"norm_position": "post", "final_norm": False}
    return {
        "decoder": ModelConfig(36, 300, 64, cfg.StackConfig(2, {"L": llama})),
        "encoder": ModelConfig(
            36,
            300,
            64,
            encoder=cfg.StackConfig(2, {"L": bert}, **post),  # type: ignore[arg-type]
            embedding=cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(64), 1.0, bert.norm, num_token_types=2),
            head=head,
        ),
        "encoder-decoder": ModelConfig(
            36,
            300,
            64,
            cfg.StackConfig(2, {"L": bart}, **post),  # type: ignore[arg-type]
            cfg.StackConfig(2, {"L": cfg.LayerConfig(attention(causal=False), bart.mlp, NORM)}, **post),  # type: ignore[arg-type]
            embed,
            EncoderInputConfig(64, embed),
            cfg.LanguageHeadConfig(bias=True),
        ),
    }
