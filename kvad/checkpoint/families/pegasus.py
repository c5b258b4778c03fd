"""PEGASUS (Zhang et al. 2020), for summaries: norms before each half, Marian's sinusoidal table, scaled embeddings.

The table stands in their files, but is no weight.
"""

from __future__ import annotations

from kvad.checkpoint.families._bart import BartFamily, concat_tables
from kvad.config import SinusoidalPositionsConfig

FAMILY = BartFamily(
    "pegasus",
    "PegasusForConditionalGeneration",
    lambda fields, limit: SinusoidalPositionsConfig(form="concat"),
    pre_norm=True,
    extra=concat_tables,
).family()
