"""Model shapes to train by name, with their numbers of parameters for one or two sizes of the vocabulary.

Decoders for documents have RoPE, grouped-query attention, SwiGLU, pre-norm RMSNorm and a tied head. Of the published
ones, ``shakespeare-char`` is nanoGPT's CPU model (layer norm without bias, GELU, no biases), but with rotary positions;
``gpt2-124m`` is GPT-2 (Radford et al. 2019) to the parameter; ``llama-small`` has Llama's parts in the shape of
llama2.c's 110 M, with a tied head and as many kv heads as heads.

Encoder-decoders for pairs of texts are the Transformer of Vaswani et al. 2017 (``transformer-base`` is the first line
of their table 3, ``transformer-big`` the last), without dropout. No class of transformers has exactly this one;
``marian-tiny`` and ``marian-base`` are close variants that Marian's class has: all sines before all cosines in each
position, a bias at the head, eps 1e-5 in every norm.

``bert-base`` is that of Devlin et al. 2018, sec. 3, ``t5-small`` that of Raffel et al. 2020, sec. 3.7; ``encoder-tiny``
and ``t5-tiny`` have their parts. Objectives tag and classify replace the language head. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvad import config as cfg
from kvad.config import EncoderInputConfig, ModelConfig


def _bert(vocab: int, context: int, *, width: int, layers: int, heads: int, hidden: int) -> ModelConfig:
    norm = cfg.NormConfig("layer", 1e-12, bias=True)
    mixer = cfg.AttentionConfig(heads, position=None, causal=False, qkv_bias=True, out_bias=True)
    layer = cfg.LayerConfig(mixer, cfg.PlainMLPConfig(hidden, "gelu", bias=True), norm)
    encoder = cfg.StackConfig(layers, {"L": layer}, norm_position="post", final_norm=False)
    embedding = cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(context), norm=norm, num_token_types=2)
    head = cfg.LanguageHeadConfig(bias=True, transform=cfg.HeadTransformConfig("gelu", norm=norm))
    return ModelConfig(width, vocab, context, encoder=encoder, embedding=embedding, head=head)


def _t5(vocab: int, context: int, *, width: int, layers: int, heads: int, hidden: int) -> ModelConfig:
    """Build T5 v1.0: no biases, pre-norm RMSNorm, attention without a softmax scale.

    Each stack has one table of relative positions; one token table serves all; logits are scaled by width^-0.5.
    """
    norm, mlp = cfg.NormConfig("rms", 1e-6), cfg.PlainMLPConfig(hidden, "relu")
    self_attention = cfg.AttentionConfig(heads, position=cfg.T5BiasConfig(), softmax_scale="none")
    bidirectional_attention = replace(self_attention, causal=False, position=cfg.T5BiasConfig(bidirectional=True))
    cross_attention = replace(bidirectional_attention, position=None)
    encoder = cfg.StackConfig(layers, {"L": cfg.LayerConfig(bidirectional_attention, mlp, norm)})
    decoder = cfg.StackConfig(layers, {"L": cfg.LayerConfig(self_attention, mlp, norm, cross_attention)})
    encoder_input, head = EncoderInputConfig(context), cfg.LanguageHeadConfig(logit_scale=width**-0.5)
    return ModelConfig(width, vocab, context, decoder, encoder, encoder_input=encoder_input, head=head)


def _decoder(
    vocab: int, context: int, *, width: int, layers: int, heads: int, kv_heads: int, hidden: int
) -> ModelConfig:
    layer = cfg.LayerConfig(cfg.AttentionConfig(heads, kv_heads), cfg.GatedMLPConfig(hidden))
    return ModelConfig(width, vocab, context, cfg.StackConfig(layers, {"L": layer}))


def _shakespeare(vocab: int, context: int) -> ModelConfig:
    mlp, norm = cfg.PlainMLPConfig(512, "gelu"), cfg.NormConfig("layer", bias=False)
    layer = cfg.LayerConfig(cfg.AttentionConfig(4), mlp, norm)
    return ModelConfig(128, vocab, context, cfg.StackConfig(4, {"L": layer}))


def _gpt2(vocab: int, context: int) -> ModelConfig:
    attention = cfg.AttentionConfig(12, position=None, qkv_bias=True, out_bias=True)
    mlp, norm = cfg.PlainMLPConfig(3072, "gelu_tanh", bias=True), cfg.NormConfig("layer", bias=True)
    decoder = cfg.StackConfig(12, {"L": cfg.LayerConfig(attention, mlp, norm)})
    return ModelConfig(768, vocab, context, decoder, embedding=cfg.EmbeddingConfig(cfg.LearnedPositionsConfig(context)))


def _transformer(
    vocab: int, context: int, *, width: int, layers: int, heads: int, hidden: int, marian: bool = False
) -> ModelConfig:
    """Build the Transformer of Vaswani et al.: post-norm, ReLU, sinusoidal positions.

    One token table, scaled by sqrt(width), serves source, target and output (sec. 3.4). Biases everywhere, as most
    implementations have them; the paper has them for the MLP (eq. 2) only.
    """
    norm = cfg.NormConfig("layer", eps=1e-5 if marian else 1e-6, bias=True)  # not in the paper; 1e-6 is tensor2tensor's
    mlp = cfg.PlainMLPConfig(hidden, "relu", bias=True)
    self_attention = cfg.AttentionConfig(heads, position=None, qkv_bias=True, out_bias=True)
    bidirectional_attention = replace(self_attention, causal=False)
    positions = cfg.SinusoidalPositionsConfig(form="concat") if marian else cfg.SinusoidalPositionsConfig()
    embed = cfg.EmbeddingConfig(positions, scale=math.sqrt(width))

    def stack(layer: cfg.LayerConfig) -> cfg.StackConfig:
        return cfg.StackConfig(layers, {"L": layer}, norm_position="post", final_norm=False)

    encoder = stack(cfg.LayerConfig(bidirectional_attention, mlp, norm))
    decoder = stack(cfg.LayerConfig(self_attention, mlp, norm, cross_attention=bidirectional_attention))
    encoder_input, head = EncoderInputConfig(context, embed), cfg.LanguageHeadConfig(bias=marian)
    return ModelConfig(width, vocab, context, decoder, encoder, embed, encoder_input, head)


MODEL_PRESETS: dict[str, Callable[[int, int], ModelConfig]] = {
    # parameters with vocab 4096
    "tiny": partial(_decoder, width=128, layers=4, heads=4, kv_heads=2, hidden=352),  # 1.26 M
    "small": partial(_decoder, width=256, layers=6, heads=8, kv_heads=4, hidden=704),  # 5.48 M
    "demo": partial(_decoder, width=256, layers=4, heads=4, kv_heads=2, hidden=768),  # 4.20 M; 3.41 M with vocab 1024
    "medium": partial(_decoder, width=512, layers=8, heads=8, kv_heads=4, hidden=1408),  # 25.7 M
    "base": partial(_decoder, width=768, layers=12, heads=12, kv_heads=4, hidden=2048),  # 78.7 M
    "shakespeare-char": _shakespeare,  # 0.796 M with vocab 66, context 64
    "gpt2-124m": _gpt2,  # 124.44 M with vocab 50257, context 1024
    "llama-small": partial(_decoder, width=768, layers=12, heads=12, kv_heads=12, hidden=2048),  # 109.53 M, vocab 32000
    # parameters with vocab 4096 and 37000
    "transformer-tiny": partial(_transformer, width=128, layers=2, heads=4, hidden=512),  # 1.45 M, 5.66 M
    "transformer-base": partial(_transformer, width=512, layers=6, heads=8, hidden=2048),  # 46.24 M, 63.08 M
    "transformer-big": partial(_transformer, width=1024, layers=6, heads=16, hidden=4096),  # 180.55 M, 214.25 M
    "marian-tiny": partial(_transformer, width=128, layers=2, heads=4, hidden=512, marian=True),
    "marian-base": partial(_transformer, width=512, layers=6, heads=8, hidden=2048, marian=True),
    "encoder-tiny": partial(_bert, width=128, layers=4, heads=4, hidden=512),  # 1.37 M with vocab 4096, context 256
    "bert-base": partial(_bert, width=768, layers=12, heads=12, hidden=3072),  # 109.5 M with vocab 30522, context 512
    "t5-tiny": partial(_t5, width=128, layers=2, heads=4, hidden=512),  # 1.44 M with vocab 4096
    "t5-small": partial(_t5, width=512, layers=6, heads=8, hidden=2048),  # 60.5 M with vocab 32128
}
