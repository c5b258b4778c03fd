"""Small models of each topology that a class of transformers can hold, like those that kvad trains."""

from __future__ import annotations

from typing import Any

from kvad import config as cfg
from kvad.config import ModelConfig

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
}  # a config of theirs

NORM = cfg.Norm("layer", bias=True)


def attention(**changes: Any) -> cfg.Attention:
    return cfg.Attention(6, **{"position": None, "bias": True, "out_bias": True, **changes})


def configs() -> dict[str, ModelConfig]:
    """Like what ``kvad train`` makes: a Llama, a BERT, and a BART."""
    llama = cfg.Layer(cfg.Attention(6, 2, head_dim=8), cfg.Gated(52))
    bert = cfg.Layer(attention(causal=False), cfg.Plain(52, bias=True), cfg.Norm("layer", 1e-12, bias=True))
    cross = attention(causal=False)
    bart = cfg.Layer(attention(), cfg.Plain(52, bias=True), NORM, cross)
    head = cfg.Head(bias=True, transform=cfg.Transform("gelu", True, bert.norm))
    embed = cfg.Embedding(cfg.LearnedPositions(66, offset=2), 1.0, NORM)
    post = {"norm_place": "post", "final_norm": False}
    return {
        "decoder": ModelConfig(36, 300, 64, cfg.Stack(2, {"L": llama})),
        "encoder": ModelConfig(
            36,
            300,
            64,
            encoder=cfg.Stack(2, {"L": bert}, **post),  # type: ignore[arg-type]
            embed=cfg.Embedding(cfg.LearnedPositions(64), 1.0, bert.norm, segments=2),
            head=head,
        ),
        "encoder-decoder": ModelConfig(
            36,
            300,
            64,
            cfg.Stack(2, {"L": bart}, **post),  # type: ignore[arg-type]
            cfg.Stack(2, {"L": cfg.Layer(attention(causal=False), bart.mlp, NORM)}, **post),  # type: ignore[arg-type]
            embed,
            cfg.Source(64, embed),
            cfg.Head(bias=True),
        ),
    }
