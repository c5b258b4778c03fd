"""Model shapes to train by name: RoPE, grouped-query attention, SwiGLU, RMSNorm before each part, a tied head.

==========  =====  ======  =======  ========  ======  ==========================
name        width  layers  heads    kv heads  hidden  parameters with vocab 4096
==========  =====  ======  =======  ========  ======  ==========================
``tiny``      128       4        4         2     352                      1.26 M
``small``     256       6        8         4     704                      5.48 M
``demo``      384       4       6          3    1536                      10.4 M
``medium``    512       8        8         4    1408                      25.7 M
``base``      768      12       12         4    2048                      78.7 M
==========  =====  ======  =======  ========  ======  ==========================

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvad.config import Attention, Gated, Layer, ModelConfig, Stack

__all__ = ["PRESETS"]


def _decoder(
    vocab: int, context: int, *, width: int, layers: int, heads: int, kv_heads: int, hidden: int
) -> ModelConfig:
    layer = Layer(Attention(heads, kv_heads), Gated(hidden))
    return ModelConfig(width=width, vocab=vocab, limit=context, decoder=Stack(layers, {"L": layer}))


PRESETS: dict[str, Callable[[int, int], ModelConfig]] = {
    "tiny": partial(_decoder, width=128, layers=4, heads=4, kv_heads=2, hidden=352),
    "small": partial(_decoder, width=256, layers=6, heads=8, kv_heads=4, hidden=704),
    "demo": partial(_decoder, width=384, layers=4, heads=6, kv_heads=3, hidden=1536),
    "medium": partial(_decoder, width=512, layers=8, heads=8, kv_heads=4, hidden=1408),
    "base": partial(_decoder, width=768, layers=12, heads=12, kv_heads=4, hidden=2048),
}
