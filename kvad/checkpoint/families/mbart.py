"""mBART (Liu et al. 2020).

BART with LayerNorm before each half of a layer and at the end of each stack.  Its checkpoints scale embeddings by
sqrt(hidden_size).  The target starts with the token of its language.
"""

from __future__ import annotations

from kvad.checkpoint.families._bart import BartFamily, learned_positions

FAMILY = BartFamily(
    "mbart", "MBartForConditionalGeneration", learned_positions(2), pre_norm=True, embed_norm=True
).family()
