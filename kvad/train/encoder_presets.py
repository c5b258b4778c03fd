"""Shapes of encoders, and of T5.

================  =====  ======  =====  ======  ============================================
name              width  layers  heads  hidden  parameters
================  =====  ======  =====  ======  ============================================
``encoder-tiny``    128       4      4     512  1.37 M with vocab 4096, context 256, a masked head
``bert-base``       768      12     12    3072  109.5 M with vocab 30522, context 512 (Devlin et al. 2018, sec. 3)
``t5-tiny``         128   2 + 2      4     512  1.44 M with vocab 4096
``t5-small``        512   6 + 6      8    2048  60.5 M with vocab 32128 (Raffel et al. 2020, sec. 3.7)
================  =====  ======  =====  ======  ============================================

``encoder-tiny`` is BERT's shape.  Objectives tag and classify put their own head in the place of the masked one's.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvad.config import (
    AttentionConfig,
    EmbeddingConfig,
    EncoderInputConfig,
    HeadTransformConfig,
    LanguageHeadConfig,
    LayerConfig,
    LearnedPositionsConfig,
    ModelConfig,
    NormConfig,
    PlainMLPConfig,
    StackConfig,
    T5BiasConfig,
)

__all__ = ["ENCODER_PRESETS"]


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
    """No biases, RMSNorm before each part, attention that divides by nothing, one table of relative positions in each
    stack, one table of tokens; logits times width^-0.5 (v1.0)."""
    norm, mlp = NormConfig("rms", 1e-6), PlainMLPConfig(hidden, "relu")
    own = AttentionConfig(heads, position=T5BiasConfig(), softmax_scale="none")
    seeing = replace(own, causal=False, position=T5BiasConfig(bidirectional=True))
    return ModelConfig(
        hidden_size=width,
        vocab_size=vocab,
        max_seq_len=context,
        encoder=StackConfig(layers, {"L": LayerConfig(seeing, mlp, norm)}),
        decoder=StackConfig(layers, {"L": LayerConfig(own, mlp, norm, cross_attention=replace(seeing, position=None))}),
        encoder_input=EncoderInputConfig(context),
        head=LanguageHeadConfig(logit_scale=width**-0.5),
    )


ENCODER_PRESETS: dict[str, Callable[[int, int], ModelConfig]] = {
    "encoder-tiny": partial(_bert, width=128, layers=4, heads=4, hidden=512),
    "bert-base": partial(_bert, width=768, layers=12, heads=12, hidden=3072),
    "t5-tiny": partial(_t5, width=128, layers=2, heads=4, hidden=512),
    "t5-small": partial(_t5, width=512, layers=6, heads=8, hidden=2048),
}
