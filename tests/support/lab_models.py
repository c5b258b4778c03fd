"""Tiny configs of every kind and hand-written checkpoints, for the tests of planning and inspection."""

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
    LatentConfig,
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
    """Build a model of width 24 with the given parts."""
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
    "latent": tiny(AttentionConfig(4, latent=LatentConfig(12, 6, 4, 5, q_lora_rank=14))),
    "latent bias": tiny(AttentionConfig(4, qkv_bias=True, out_bias=True, latent=LatentConfig(12, 6, 4, 8))),
    "pattern": tiny(layers=5, kinds=LOCAL, pattern="LLG"),
    "pattern norms": tiny(layers=3, kinds={**LOCAL, "G": replace(LOCAL["G"], norm=LAYER_NORM)}, pattern="LG"),
}


def bidirectional(mixer, **changes):
    """Return the same attention for a source or an encoder."""
    return replace(mixer, causal=False, **changes)


def pair(mixer=None, mlp=None, norm=None, *, norm_position="pre", source_width=None, source_vocab=None, **rest):
    """Build an encoder-decoder; the encoder has one more layer and a separate source length."""
    mixer = mixer or AttentionConfig(4, 2)
    base_config = tiny(mixer, mlp, norm, norm_position=norm_position, **rest)
    layer = base_config.decoder.layer_types["L"]
    position = mixer.position
    if isinstance(position, T5BiasConfig):
        position = replace(position, bidirectional=True)
    encoder = replace(layer, attention=bidirectional(mixer, position=position, head_dim=mixer.head_dim or 6))
    decoder = replace(layer, cross_attention=bidirectional(mixer, position=None, window=None))
    return replace(
        base_config,
        decoder=replace(base_config.decoder, layer_types={"L": decoder}),
        encoder=replace(base_config.decoder, layer_types={"L": encoder}, num_layers=base_config.decoder.num_layers + 1),
        encoder_input=EncoderInputConfig(48, base_config.embedding, source_vocab, source_width),
    )


def encoder(mixer=None, *, head=None, **rest):
    """Build an encoder without a decoder."""
    embedding, tie = rest.pop("embedding", EmbeddingConfig()), rest.pop("tie_embeddings", True)
    base_config = tiny(mixer or AttentionConfig(4, 2), **rest)
    layer = base_config.decoder.layer_types["L"]
    stack = replace(base_config.decoder, layer_types={"L": replace(layer, attention=bidirectional(layer.attention))})
    head = head or LanguageHeadConfig(bias=True, transform=HeadTransformConfig(norm=NormConfig()))
    return replace(base_config, decoder=None, encoder=stack, head=head, embedding=embedding, tie_embeddings=tie)


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
MIXTURES = {
    "experts": tiny(mlp=MoEConfig(40, 8, 2)),
    "experts bias": tiny(mlp=MoEConfig(40, 4, 1, bias=True)),
    "experts shared": tiny(
        mlp=MoEConfig(40, 4, 2, router="sigmoid", selection_bias=True, shared_size=56, shared_gate=True)
    ),
}
EVERY = {**CONFIGS, **MIXTURES, **PAIRS, **ENCODERS}


def write_foreign(folder, name, version="5", *, weights=True, **changes):
    """Write a case of the golden files as its Hugging Face folder; ``changes`` go into its config."""
    meta, arrays = oracle.load(version, name)
    meta["config"] |= changes
    if weights:
        return oracle.write(meta, arrays, folder)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(oracle.text(meta["config"]))
    return folder


def write_checkpoint(folder, config, *, dtype=torch.float32, tokenizer=True, drop=(), change=None, training=None):
    """Write a native folder. ``drop`` omits tensors, ``change`` replaces tensors."""
    weights = {name: tensor.to(dtype) for name, tensor in Transformer(config).state_dict().items()}
    weights = {name: tensor for name, tensor in weights.items() if name not in drop} | (change or {})
    base_config = train_tokenizer("char", ["the quick brown fox"]) if tokenizer else None
    native.save_checkpoint(folder, config, weights, base_config, training)
    return folder


@pytest.fixture(params=EVERY)
def config(request):
    return EVERY[request.param]


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "run", CONFIGS["pattern"])
