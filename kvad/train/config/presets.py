"""Model shapes to train by name.

Decoders for documents: RoPE, grouped-query attention, SwiGLU, pre-norm RMSNorm, a tied head.

==========  =====  ======  =======  ========  ======  ==========================
name        width  layers  heads    kv heads  hidden  parameters with vocab 4096
==========  =====  ======  =======  ========  ======  ==========================
``tiny``      128       4        4         2     352                      1.26 M
``small``     256       6        8         4     704                      5.48 M
``demo``      384       4       6          3    1536                      10.4 M
``medium``    512       8        8         4    1408                      25.7 M
``base``      768      12       12         4    2048                      78.7 M
==========  =====  ======  =======  ========  ======  ==========================

Published decoders:

====================  =====  ======  =====  ======  ============================================
name                  width  layers  heads  hidden  parameters
====================  =====  ======  =====  ======  ============================================
``shakespeare-char``    128       4      4     512  0.796 M with vocab 66, context 64
``gpt2-124m``           768      12     12    3072  124.44 M with vocab 50257, context 1024
``llama-small``         768      12     12    2048  109.53 M with vocab 32000
====================  =====  ======  =====  ======  ============================================

``shakespeare-char`` is nanoGPT's CPU model (layer norm without bias, GELU, no biases), but with rotary
positions; ``gpt2-124m`` is GPT-2 (Radford et al. 2019) to the parameter; ``llama-small`` has Llama's parts in the shape
of llama2.c's 110 M, with a tied head and as many kv heads as heads.

Encoder-decoders, for pairs of texts: the Transformer of Vaswani et al. 2017 (``transformer-base`` is the first line of
their table 3, ``transformer-big`` the last), without dropout:

====================  =====  ======  =====  ======  =================================
name                  width  layers  heads  hidden  parameters with vocab 4096, 37000
====================  =====  ======  =====  ======  =================================
``transformer-tiny``    128   2 + 2      4     512                   1.45 M    5.66 M
``transformer-base``    512   6 + 6      8    2048                  46.24 M   63.08 M
``transformer-big``    1024   6 + 6     16    4096                 180.55 M  214.25 M
====================  =====  ======  =====  ======  =================================

No class of transformers has exactly this one; ``marian-tiny`` and ``marian-base`` are close variants that Marian's
class has: all sines before all cosines in each position, a bias at the head, eps 1e-5 in every norm.

Encoders, and T5:

================  =====  ======  =====  ======  ============================================
name              width  layers  heads  hidden  parameters
================  =====  ======  =====  ======  ============================================
``encoder-tiny``    128       4      4     512  1.37 M with vocab 4096, context 256, a masked head
``bert-base``       768      12     12    3072  109.5 M with vocab 30522, context 512 (Devlin et al. 2018, sec. 3)
``t5-tiny``         128   2 + 2      4     512  1.44 M with vocab 4096
``t5-small``        512   6 + 6      8    2048  60.5 M with vocab 32128 (Raffel et al. 2020, sec. 3.7)
================  =====  ======  =====  ======  ============================================

``encoder-tiny`` has BERT's shape. Objectives tag and classify replace the language head.
Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvad.config import (
    AttentionConfig,
    EmbeddingConfig,
    EncoderInputConfig,
    GatedMLPConfig,
    HeadTransformConfig,
    LanguageHeadConfig,
    LayerConfig,
    LearnedPositionsConfig,
    ModelConfig,
    NormConfig,
    PlainMLPConfig,
    SinusoidalPositionsConfig,
    StackConfig,
    T5BiasConfig,
)


def _bert(vocab: int, context: int, *, width: int, layers: int, heads: int, hidden: int) -> ModelConfig:
    norm = NormConfig("layer", 1e-12, bias=True)
    mixer = AttentionConfig(heads, position=None, causal=False, qkv_bias=True, out_bias=True)
    layer = LayerConfig(mixer, PlainMLPConfig(hidden, "gelu", bias=True), norm)
    return ModelConfig(
        hidden_size=width,
        vocab_size=vocab,
        max_seq_len=context,
        encoder=StackConfig(layers, {"L": layer}, norm_position="post", final_norm=False),
        embedding=EmbeddingConfig(LearnedPositionsConfig(context), norm=norm, num_token_types=2),
        head=LanguageHeadConfig(bias=True, transform=HeadTransformConfig("gelu", norm=norm)),
    )


def _t5(vocab: int, context: int, *, width: int, layers: int, heads: int, hidden: int) -> ModelConfig:
    """Build T5 v1.0: no biases, pre-norm RMSNorm, attention without a softmax scale.

    Each stack has one table of relative positions; one token table serves all; logits are scaled by width^-0.5.
    """
    norm, mlp = NormConfig("rms", 1e-6), PlainMLPConfig(hidden, "relu")
    self_attention = AttentionConfig(heads, position=T5BiasConfig(), softmax_scale="none")
    bidirectional_attention = replace(self_attention, causal=False, position=T5BiasConfig(bidirectional=True))
    return ModelConfig(
        hidden_size=width,
        vocab_size=vocab,
        max_seq_len=context,
        encoder=StackConfig(layers, {"L": LayerConfig(bidirectional_attention, mlp, norm)}),
        decoder=StackConfig(
            layers,
            {
                "L": LayerConfig(
                    self_attention, mlp, norm, cross_attention=replace(bidirectional_attention, position=None)
                )
            },
        ),
        encoder_input=EncoderInputConfig(context),
        head=LanguageHeadConfig(logit_scale=width**-0.5),
    )


ENCODER_PRESETS: dict[str, Callable[[int, int], ModelConfig]] = {
    "encoder-tiny": partial(_bert, width=128, layers=4, heads=4, hidden=512),
    "bert-base": partial(_bert, width=768, layers=12, heads=12, hidden=3072),
    "t5-tiny": partial(_t5, width=128, layers=2, heads=4, hidden=512),
    "t5-small": partial(_t5, width=512, layers=6, heads=8, hidden=2048),
}


def _decoder(
    vocab: int, context: int, *, width: int, layers: int, heads: int, kv_heads: int, hidden: int
) -> ModelConfig:
    layer = LayerConfig(AttentionConfig(heads, kv_heads), GatedMLPConfig(hidden))
    return ModelConfig(
        hidden_size=width, vocab_size=vocab, max_seq_len=context, decoder=StackConfig(layers, {"L": layer})
    )


def _shakespeare(vocab: int, context: int) -> ModelConfig:
    layer = LayerConfig(AttentionConfig(4), PlainMLPConfig(512, "gelu"), NormConfig("layer", bias=False))
    return ModelConfig(hidden_size=128, vocab_size=vocab, max_seq_len=context, decoder=StackConfig(4, {"L": layer}))


def _gpt2(vocab: int, context: int) -> ModelConfig:
    attention = AttentionConfig(12, position=None, qkv_bias=True, out_bias=True)
    layer = LayerConfig(attention, PlainMLPConfig(3072, "gelu_tanh", bias=True), NormConfig("layer", bias=True))
    embed = EmbeddingConfig(LearnedPositionsConfig(context))
    return ModelConfig(
        hidden_size=768, vocab_size=vocab, max_seq_len=context, decoder=StackConfig(12, {"L": layer}), embedding=embed
    )


def _transformer(
    vocab: int, context: int, *, width: int, layers: int, heads: int, hidden: int, marian: bool = False
) -> ModelConfig:
    """Build the Transformer of Vaswani et al.: post-norm, ReLU, sinusoidal positions.

    One token table, scaled by sqrt(width), serves source, target and output (sec. 3.4). Biases everywhere, as most
    implementations have them; the paper has them for the MLP (eq. 2) only.
    """
    norm = NormConfig("layer", eps=1e-5 if marian else 1e-6, bias=True)  # not in the paper; 1e-6 is tensor2tensor's
    mlp = PlainMLPConfig(hidden, "relu", bias=True)
    self_attention = AttentionConfig(heads, position=None, qkv_bias=True, out_bias=True)
    bidirectional_attention = replace(self_attention, causal=False)
    positions = SinusoidalPositionsConfig(form="concat") if marian else SinusoidalPositionsConfig()
    embed = EmbeddingConfig(positions, scale=math.sqrt(width))

    def stack(layer: LayerConfig) -> StackConfig:
        return StackConfig(layers, {"L": layer}, norm_position="post", final_norm=False)

    return ModelConfig(
        hidden_size=width,
        vocab_size=vocab,
        max_seq_len=context,
        encoder=stack(LayerConfig(bidirectional_attention, mlp, norm)),
        decoder=stack(LayerConfig(self_attention, mlp, norm, cross_attention=bidirectional_attention)),
        embedding=embed,
        encoder_input=EncoderInputConfig(max_seq_len=context, embedding=embed),
        head=LanguageHeadConfig(bias=marian),
    )


MODEL_PRESETS: dict[str, Callable[[int, int], ModelConfig]] = {
    "tiny": partial(_decoder, width=128, layers=4, heads=4, kv_heads=2, hidden=352),
    "small": partial(_decoder, width=256, layers=6, heads=8, kv_heads=4, hidden=704),
    "demo": partial(_decoder, width=384, layers=4, heads=6, kv_heads=3, hidden=1536),
    "medium": partial(_decoder, width=512, layers=8, heads=8, kv_heads=4, hidden=1408),
    "base": partial(_decoder, width=768, layers=12, heads=12, kv_heads=4, hidden=2048),
    "shakespeare-char": _shakespeare,
    "gpt2-124m": _gpt2,
    "llama-small": partial(_decoder, width=768, layers=12, heads=12, kv_heads=12, hidden=2048),
    "transformer-tiny": partial(_transformer, width=128, layers=2, heads=4, hidden=512),
    "transformer-base": partial(_transformer, width=512, layers=6, heads=8, hidden=2048),
    "transformer-big": partial(_transformer, width=1024, layers=6, heads=16, hidden=4096),
    "marian-tiny": partial(_transformer, width=128, layers=2, heads=4, hidden=512, marian=True),
    "marian-base": partial(_transformer, width=512, layers=6, heads=8, hidden=2048, marian=True),
    **ENCODER_PRESETS,
}
