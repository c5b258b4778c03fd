"""Tiny configs of every kind, and checkpoints written by hand: what planning and inspecting are held against."""

from dataclasses import replace

import torch

from kvad.checkpoint import native
from kvad.config import (
    Alibi,
    Attention,
    Classes,
    Embedding,
    Experts,
    Gated,
    Head,
    Layer,
    LearnedPositions,
    ModelConfig,
    Norm,
    Plain,
    Pooled,
    Rope,
    SinusoidalPositions,
    Source,
    Stack,
    T5Bias,
    Transform,
)
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import train_tokenizer
from tests.oracle import checkpoint as oracle


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
    "qk norm each": tiny(Attention(4, 2, qk_norm="each", norm=Norm("layer")), norm=LAYER_NORM),
    "qk norm full": tiny(Attention(4, 2, qk_norm="full")),
    "sinks": tiny(Attention(4, 2, sinks=True, softcap=5.0)),
    "untied": tiny(tie=False),
    "post": tiny(norm_place="post", final_norm=False),
    "sandwich": tiny(norm_place="sandwich", norm=Norm(unit_offset=True)),
    "parallel": tiny(norm_place="parallel"),
    "learned": tiny(Attention(4, position=None), embed=Embedding(LearnedPositions(66, offset=2))),
    "sinusoidal": tiny(Attention(4, position=None), embed=Embedding(SinusoidalPositions(), norm=LAYER_NORM)),
    "alibi": tiny(Attention(4, position=Alibi())),
    "t5": tiny(Attention(4, position=T5Bias(8, 16))),
    "t5 per layer": tiny(Attention(4, position=T5Bias(8, 16, shared=False))),
    "window": tiny(Attention(4, 2, window=7)),
    "pattern": tiny(layers=5, kinds=LOCAL, pattern="LLG"),
    "pattern norms": tiny(layers=3, kinds={**LOCAL, "G": replace(LOCAL["G"], norm=LAYER_NORM)}, pattern="LG"),
}


def seeing(mixer, **changes):
    """The same attention, to a source or of an encoder."""
    return replace(mixer, causal=False, **changes)


def pair(mixer=None, mlp=None, norm=None, *, norm_place="pre", source_width=None, source_vocab=None, **rest):
    """An encoder-decoder: the encoder has a layer more, and a source of its own length."""
    mixer = mixer or Attention(4, 2)
    made = tiny(mixer, mlp, norm, norm_place=norm_place, **rest)
    layer = made.decoder.kinds["L"]
    position = mixer.position
    if isinstance(position, T5Bias):
        position = replace(position, bidirectional=True)
    encoder = replace(layer, mixer=seeing(mixer, position=position, head_dim=mixer.head_dim or 6))
    decoder = replace(layer, cross=seeing(mixer, position=None, window=None))
    return replace(
        made,
        decoder=replace(made.decoder, kinds={"L": decoder}),
        encoder=replace(made.decoder, kinds={"L": encoder}, layers=made.decoder.layers + 1),
        source=Source(48, made.embed, source_vocab, source_width),
    )


def encoder(mixer=None, *, head=None, **rest):
    """An encoder alone."""
    embed, tie = rest.pop("embed", Embedding()), rest.pop("tie", True)
    made = tiny(mixer or Attention(4, 2), **rest)
    layer = made.decoder.kinds["L"]
    stack = replace(made.decoder, kinds={"L": replace(layer, mixer=seeing(layer.mixer))})
    head = head or Head(bias=True, transform=Transform(norm=Norm()))
    return replace(made, decoder=None, encoder=stack, head=head, embed=embed, tie=tie)


PAIRS = {
    "pair": pair(),
    "pair of widths": pair(source_width=30, source_vocab=41),
    "pair t5": pair(Attention(4, position=T5Bias(8, 16), scale="none")),
    "pair umt5": pair(Attention(4, position=T5Bias(8, 16, shared=False))),
    "pair post": pair(
        Attention(4, position=None), norm=LAYER_NORM, norm_place="post", embed=Embedding(SinusoidalPositions())
    ),
    "pair window": pair(Attention(4, 2, window=7)),
    "pair values": pair(Attention(4, 2, head_dim=10, value_dim=3, position=None)),
}
ENCODERS = {
    "encoder": encoder(),
    "encoder classes": encoder(head=Classes(("a", "b", "c"))),
    "encoder rows": encoder(head=Classes(("a", "b"), "row", transform=Transform("tanh"))),
    "encoder pooled": encoder(Attention(4, position=None), head=Pooled(), embed=Embedding(LearnedPositions(64))),
    "encoder untied": encoder(Attention(4, window=5), tie=False),
}
MIXTURES = {"experts": tiny(mlp=Experts(40, 8, 2)), "experts bias": tiny(mlp=Experts(40, 4, 1, bias=True))}
EVERY = {**CONFIGS, **MIXTURES, **PAIRS, **ENCODERS}


def write_foreign(folder, name, version="5", *, weights=True, **changes):
    """A case of the oracle as its Hugging Face folder; ``changes`` of its config."""
    meta, arrays = oracle.load(version, name)
    meta["config"] |= changes
    if weights:
        return oracle.write(meta, arrays, folder)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(oracle.text(meta["config"]))
    return folder


def write_checkpoint(folder, config, *, dtype=torch.float32, tokenizer=True, drop=(), change=None, training=None):
    """A folder as kvad saves it.  ``drop``: tensors to leave out; ``change``: tensors to put instead."""
    weights = {name: tensor.to(dtype) for name, tensor in Transformer(config).state_dict().items()}
    weights = {name: tensor for name, tensor in weights.items() if name not in drop} | (change or {})
    made = train_tokenizer("char", ["the quick brown fox"]) if tokenizer else None
    native.save(folder, config, weights, made, training)
    return folder
