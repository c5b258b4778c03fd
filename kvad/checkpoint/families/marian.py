"""Marian (Junczys-Dowmunt et al. 2018.

The 1,000 pairs of OPUS-MT, Tiedemann & Thottingal 2020).

The original Transformer: norms after each half, sinusoidal positions with all sines before all cosines.  Older files
have their tables, which are not weights.  With ``share_encoder_decoder_embeddings`` false there are two vocabularies
with separate tables.  ``final_logits_bias`` is trained.  The target starts with padding, which must not be generated.
"""

from __future__ import annotations

from kvad.checkpoint.families._bart import BartFamily, concat_tables
from kvad.config import SinusoidalPositionsConfig

FAMILY = BartFamily(
    "marian",
    "MarianMTModel",
    lambda fields, max_seq_len: SinusoidalPositionsConfig(form="concat"),
    two_vocabularies=True,
    extra=concat_tables,
).family()
