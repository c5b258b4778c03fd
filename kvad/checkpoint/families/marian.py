"""Marian (Junczys-Dowmunt et al. 2018; the 1,000 pairs of OPUS-MT, Tiedemann & Thottingal 2020).

The Transformer of 2017: norms after each half, sinusoidal positions as all sines, then all cosines.  Their tables stand
in older files, but are no weights.  ``share_encoder_decoder_embeddings`` false: two vocabularies, each with its table.
``final_logits_bias`` is trained.  The target starts with the padding, which must not be generated.
"""

from __future__ import annotations

from kvad.checkpoint.families._bart import BartFamily, concat_tables
from kvad.config import SinusoidalPositionsConfig

FAMILY = BartFamily(
    "marian",
    "MarianMTModel",
    lambda fields, limit: SinusoidalPositionsConfig(form="concat"),
    two_vocabularies=True,
    extra=concat_tables,
).family()
