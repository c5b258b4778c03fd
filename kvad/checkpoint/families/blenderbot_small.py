"""Blenderbot 90M (Roller et al. 2020): BART with learned positions from row 0.

Only its decoder normalizes the embedding before positions are added.
"""

from __future__ import annotations

from kvad.checkpoint.families._bart import BartFamily, learned_positions

FAMILY = BartFamily(
    "blenderbot-small",
    "BlenderbotSmallForConditionalGeneration",
    learned_positions(0),
    embed_norm=True,
    norm_before_positions=True,
    max_seq_len=512,
).family()
