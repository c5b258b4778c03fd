"""PEGASUS (Zhang et al. 2020), for summaries: norms before each half, Marian's sinusoidal table, scaled embeddings.

The table stands in their files, but is no weight.
"""

from __future__ import annotations

from kvad.checkpoint.families.fairseq import Skeleton, concat_tables
from kvad.config import SinusoidalPositions

__all__ = ["FAMILY"]

FAMILY = Skeleton(
    "pegasus",
    "PegasusForConditionalGeneration",
    lambda fields, limit: SinusoidalPositions(form="concat"),
    pre=True,
    extra=concat_tables,
).family()
