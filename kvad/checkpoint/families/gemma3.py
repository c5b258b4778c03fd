"""Gemma 3 with eyes (Kamath et al. 2025): its text part alone is read, and written as ``gemma3_text``.

The vision tower and its projector are left out by name: what kvad loads answers to text as the whole model does.
"""

from __future__ import annotations

from kvad.checkpoint.conversion import Family, HFConfigReader
from kvad.checkpoint.families import gemma
from kvad.config import ModelConfig


def read(fields: HFConfigReader) -> ModelConfig:
    if fields.model_type == "gemma3_text":  # as it is written
        return gemma.read(fields)
    fields.require_one_of("quantization_config", why="convert the weights to bfloat16 first")
    text = fields.part("text_config")
    tie = fields.content.get("tie_word_embeddings")
    own = {"model_type": "gemma3_text", **({} if tie is None else {"tie_word_embeddings": tie}), **text.content}
    return gemma.read(HFConfigReader(own, text.where))


FAMILY = Family(
    ("gemma3",),
    read,
    gemma.named,
    gemma.write,
    prefix="language_model.",
    ignored=(r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*", r"lm_head\.weight"),
    head=("lm_head.weight", "model.embed_tokens.weight"),
)
