"""PEGASUS (Zhang et al. 2020), for summaries.

Norms before each half, Marian's sinusoids, scaled embeddings.  The sinusoidal table is in the files, but is not a
weight.
"""

from __future__ import annotations

from kvad.checkpoint.families._bart import BartFamily, concat_tables
from kvad.config import SinusoidalPositionsConfig

FAMILY = BartFamily(
    "pegasus",
    "PegasusForConditionalGeneration",
    lambda fields, max_seq_len: SinusoidalPositionsConfig(form="concat"),
    pre_norm=True,
    extra=concat_tables,
).family()
