"""Blenderbot 2.7B and larger (Roller et al. 2020): norms before each half, learned positions from row 0."""

from __future__ import annotations

from kvad.checkpoint.families.fairseq import BartFamily, learned_positions

__all__ = ["FAMILY"]

FAMILY = BartFamily(
    "blenderbot", "BlenderbotForConditionalGeneration", learned_positions(0), pre_norm=True, limit=128
).family()
