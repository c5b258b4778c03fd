"""Blenderbot 90M (Roller et al. 2020): BART with learned positions from row 0.

Its decoder alone normalises the embedding before positions are added.
"""

from __future__ import annotations

from kvad.checkpoint.families.fairseq import Skeleton, learned

__all__ = ["FAMILY"]

FAMILY = Skeleton(
    "blenderbot-small",
    "BlenderbotSmallForConditionalGeneration",
    learned(0),
    embed_norm=True,
    early_norm=True,
    limit=512,
).family()
