"""Tiny configs of every kind, and checkpoints written by hand: what planning and inspecting are held against."""

from dataclasses import replace

import torch

from kvad.checkpoint import native
from kvad.config import (
    Alibi,
    Attention,
    Gated,
    Head,
    Layer,
    LearnedPositions,
    ModelConfig,
    Norm,
    Plain,
    Rope,
    SinusoidalPositions,
    Stack,
    T5Bias,
)
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import train_tokenizer


def tiny(mixer=None, mlp=None, norm=None, *, layers=2, vocab=61, limit=64, width=24, kinds=None, pattern="L", **rest):
    """A model of width 24 with the given parts."""
    stack_keys = {key: rest.pop(key) for key in ("norm_place", "final_norm") if key in rest}
    layer = Layer(mixer or Attention(4, 2), mlp or Gated(40), norm or Norm())
    stack = Stack(layers, kinds or {"L": layer}, pattern, **stack_keys)
    return ModelConfig(width, vocab, limit, stack, **rest)


LAYER_NORM = Norm("layer", bias=True)
LOCAL = {"L": Layer(Attention(4, 2, window=5), Gated(40)), "G": Layer(Attention(4, 4, head_dim=10), Plain(30))}
CONFIGS = {
    "plain": tiny(),
    "mha": tiny(Attention(4)),
    "mqa": tiny(Attention(4, 1)),
    "dims": tiny(Attention(4, 2, head_dim=10, value_dim=3, position=Rope(fraction=0.6))),
    "biases": tiny(Attention(4, bias=True, out_bias=True), Plain(40, bias=True), LAYER_NORM, head=Head(bias=True)),
    "gated bias": tiny(mlp=Gated(40, bias=True)),
    "qk norm head": tiny(Attention(4, 2, qk_norm="head"), norm=LAYER_NORM),
    "qk norm full": tiny(Attention(4, 2, qk_norm="full")),
    "sinks": tiny(Attention(4, 2, sinks=True, softcap=5.0)),
    "untied": tiny(tie=False),
    "post": tiny(norm_place="post", final_norm=False),
    "sandwich": tiny(norm_place="sandwich", norm=Norm(unit_offset=True)),
    "parallel": tiny(norm_place="parallel"),
    "learned": tiny(Attention(4, position=None), position=LearnedPositions(66, offset=2)),
    "sinusoidal": tiny(Attention(4, position=None), position=SinusoidalPositions(), embedding_norm=LAYER_NORM),
    "alibi": tiny(Attention(4, position=Alibi())),
    "t5": tiny(Attention(4, position=T5Bias(8, 16))),
    "t5 per layer": tiny(Attention(4, position=T5Bias(8, 16, shared=False))),
    "window": tiny(Attention(4, 2, window=7)),
    "pattern": tiny(layers=5, kinds=LOCAL, pattern="LLG"),
    "pattern norms": tiny(layers=3, kinds={**LOCAL, "G": replace(LOCAL["G"], norm=LAYER_NORM)}, pattern="LG"),
}


def write_checkpoint(folder, config, *, dtype=torch.float32, tokenizer=True, drop=(), change=None, training=None):
    """A folder as kvad saves it.  ``drop``: tensors to leave out; ``change``: tensors to put instead."""
    weights = {name: tensor.to(dtype) for name, tensor in Transformer(config).state_dict().items()}
    weights = {name: tensor for name, tensor in weights.items() if name not in drop} | (change or {})
    made = train_tokenizer("char", ["the quick brown fox"]) if tokenizer else None
    native.save(folder, config, weights, made, training)
    return folder
