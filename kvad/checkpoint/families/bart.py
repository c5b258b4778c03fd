"""BART (Lewis et al. 2020): the original Transformer with learned positions and erf-gelu.

Two unused rows precede the positions.  LayerNorm follows each half of a layer and the embedding, none is at the end.
The target starts with ``</s>``.
"""

from __future__ import annotations

from kvad.checkpoint.families._bart import BartFamily, learned_positions

FAMILY = BartFamily("bart", "BartForConditionalGeneration", learned_positions(2), embed_norm=True).family()
