"""Tiny configs of every kind, and checkpoints written by hand: what planning and inspecting are held against."""

from dataclasses import replace

import pytest
import torch

from kvad.checkpoint import native
from kvad.config.layers import (
    AlibiConfig,
    AttentionConfig,
    ClassificationHeadConfig,
    EmbeddingConfig,
    GatedMLPConfig,
    HeadTransformConfig,
    LanguageHeadConfig,
    LayerConfig,
    LearnedPositionsConfig,
    MoEConfig,
    NormConfig,
    PlainMLPConfig,
    PoolingHeadConfig,
    RopeConfig,
    SinusoidalPositionsConfig,
    StackConfig,
    T5BiasConfig,
)
from kvad.config.model import EncoderInputConfig, ModelConfig
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import train_tokenizer
from tests.hf_parity import checkpoint as oracle


def tiny(mixer=None, mlp=None, norm=None, *, layers=2, vocab=61, limit=64, width=24, kinds=None, pattern="L", **rest):
    """A model of width 24 with the given parts."""
    stack_keys = {key: rest.pop(key) for key in ("norm_position", "final_norm") if key in rest}
    layer = LayerConfig(mixer or AttentionConfig(4, 2), mlp or GatedMLPConfig(40), norm or NormConfig())
    stack = StackConfig(layers, kinds or {"L": layer}, pattern, **stack_keys)
    return ModelConfig(width, vocab, limit, stack, **rest)


LAYER_NORM = NormConfig("layer", bias=True)
LOCAL = {
    "L": LayerConfig(AttentionConfig(4, 2, window=5), GatedMLPConfig(40)),
    "G": LayerConfig(AttentionConfig(4, 4, head_dim=10), PlainMLPConfig(30)),
}
CONFIGS = {
    "plain": tiny(),
    "mha": tiny(AttentionConfig(4)),
    "mqa": tiny(AttentionConfig(4, 1)),
    "dims": tiny(AttentionConfig(4, 2, head_dim=10, value_dim=3, position=RopeConfig(partial_rotary_factor=0.6))),
    "biases": tiny(
        AttentionConfig(4, qkv_bias=True, out_bias=True),
        PlainMLPConfig(40, bias=True),
        LAYER_NORM,
        head=LanguageHeadConfig(bias=True),
    ),
    "gated bias": tiny(mlp=GatedMLPConfig(40, bias=True)),
    "qk norm head": tiny(AttentionConfig(4, 2, qk_norm="head"), norm=LAYER_NORM),
    "qk norm each": tiny(AttentionConfig(4, 2, qk_norm="each", qk_norm_config=NormConfig("layer")), norm=LAYER_NORM),
    "qk norm full": tiny(AttentionConfig(4, 2, qk_norm="full")),
    "sinks": tiny(AttentionConfig(4, 2, sink_logits=True, logit_softcap=5.0)),
    "untied": tiny(tie_embeddings=False),
    "post": tiny(norm_position="post", final_norm=False),
    "sandwich": tiny(norm_position="sandwich", norm=NormConfig(unit_offset=True)),
    "parallel": tiny(norm_position="parallel"),
    "learned": tiny(AttentionConfig(4, position=None), embedding=EmbeddingConfig(LearnedPositionsConfig(66, offset=2))),
    "sinusoidal": tiny(
        AttentionConfig(4, position=None), embedding=EmbeddingConfig(SinusoidalPositionsConfig(), norm=LAYER_NORM)
    ),
    "alibi": tiny(AttentionConfig(4, position=AlibiConfig())),
    "t5": tiny(AttentionConfig(4, position=T5BiasConfig(8, 16))),
    "t5 per layer": tiny(AttentionConfig(4, position=T5BiasConfig(8, 16, shared=False))),
    "window": tiny(AttentionConfig(4, 2, window=7)),
    "pattern": tiny(layers=5, kinds=LOCAL, pattern="LLG"),
    "pattern norms": tiny(layers=3, kinds={**LOCAL, "G": replace(LOCAL["G"], norm=LAYER_NORM)}, pattern="LG"),
}


def seeing(mixer, **changes):
    """The same attention, to a source or of an encoder."""
    return replace(mixer, causal=False, **changes)


def pair(mixer=None, mlp=None, norm=None, *, norm_position="pre", source_width=None, source_vocab=None, **rest):
    """An encoder-decoder: the encoder has a layer more, and a source of its own length."""
    mixer = mixer or AttentionConfig(4, 2)
    made = tiny(mixer, mlp, norm, norm_position=norm_position, **rest)
    layer = made.decoder.layer_types["L"]
    position = mixer.position
    if isinstance(position, T5BiasConfig):
        position = replace(position, bidirectional=True)
    encoder = replace(layer, attention=seeing(mixer, position=position, head_dim=mixer.head_dim or 6))
    decoder = replace(layer, cross_attention=seeing(mixer, position=None, window=None))
    return replace(
        made,
        decoder=replace(made.decoder, layer_types={"L": decoder}),
        encoder=replace(made.decoder, layer_types={"L": encoder}, num_layers=made.decoder.num_layers + 1),
        encoder_input=EncoderInputConfig(48, made.embedding, source_vocab, source_width),
    )


def encoder(mixer=None, *, head=None, **rest):
    """An encoder alone."""
    embedding, tie = rest.pop("embedding", EmbeddingConfig()), rest.pop("tie_embeddings", True)
    made = tiny(mixer or AttentionConfig(4, 2), **rest)
    layer = made.decoder.layer_types["L"]
    stack = replace(made.decoder, layer_types={"L": replace(layer, attention=seeing(layer.attention))})
    head = head or LanguageHeadConfig(bias=True, transform=HeadTransformConfig(norm=NormConfig()))
    return replace(made, decoder=None, encoder=stack, head=head, embedding=embedding, tie_embeddings=tie)


PAIRS = {
    "pair": pair(),
    "pair of widths": pair(source_width=30, source_vocab=41),
    "pair t5": pair(AttentionConfig(4, position=T5BiasConfig(8, 16), softmax_scale="none")),
    "pair umt5": pair(AttentionConfig(4, position=T5BiasConfig(8, 16, shared=False))),
    "pair post": pair(
        AttentionConfig(4, position=None),
        norm=LAYER_NORM,
        norm_position="post",
        embedding=EmbeddingConfig(SinusoidalPositionsConfig()),
    ),
    "pair window": pair(AttentionConfig(4, 2, window=7)),
    "pair values": pair(AttentionConfig(4, 2, head_dim=10, value_dim=3, position=None)),
}
ENCODERS = {
    "encoder": encoder(),
    "encoder classes": encoder(head=ClassificationHeadConfig(("a", "b", "c"))),
    "encoder rows": encoder(head=ClassificationHeadConfig(("a", "b"), "row", transform=HeadTransformConfig("tanh"))),
    "encoder pooled": encoder(
        AttentionConfig(4, position=None),
        head=PoolingHeadConfig(),
        embedding=EmbeddingConfig(LearnedPositionsConfig(64)),
    ),
    "encoder untied": encoder(AttentionConfig(4, window=5), tie_embeddings=False),
}
MIXTURES = {"experts": tiny(mlp=MoEConfig(40, 8, 2)), "experts bias": tiny(mlp=MoEConfig(40, 4, 1, bias=True))}
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
    native.save_checkpoint(folder, config, weights, made, training)
    return folder


@pytest.fixture(params=EVERY)
def config(request):
    return EVERY[request.param]


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "run", CONFIGS["pattern"])
