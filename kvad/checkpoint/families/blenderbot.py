"""Blenderbot 2.7B and larger (Roller et al. 2020): norms before each half, learned positions from row 0."""

from __future__ import annotations

from kvad.checkpoint.families.fairseq import Skeleton, learned

__all__ = ["FAMILY"]

FAMILY = Skeleton("blenderbot", "BlenderbotForConditionalGeneration", learned(0), pre=True, limit=128).family()
