"""Blenderbot 2.7B and larger (Roller et al. 2020).

Norms before each half, learned positions from row 0.
"""

from __future__ import annotations

from kvad.checkpoint.families._bart import BartFamily, learned_positions

FAMILY = BartFamily(
    "blenderbot", "BlenderbotForConditionalGeneration", learned_positions(0), pre_norm=True, max_seq_len=128
).family()
