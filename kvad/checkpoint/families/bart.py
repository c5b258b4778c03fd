"""BART (Lewis et al. 2020): the Transformer of 2017 with learned positions behind two unused rows, and erf-gelu.

LayerNorm after each half of a layer and after the embedding, none at the end.  The target starts with ``</s>``.
"""

from __future__ import annotations

from kvad.checkpoint.families._bart import BartFamily, learned_positions

FAMILY = BartFamily("bart", "BartForConditionalGeneration", learned_positions(2), embed_norm=True).family()
