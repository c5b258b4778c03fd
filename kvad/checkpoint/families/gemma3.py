"""Gemma 3 with vision (Kamath et al. 2025).

Only its text model is read; it is written as ``gemma3_text``.  The vision tower and its projector are ignored by
name: for text, the result equals the full model's.
"""

from __future__ import annotations

from kvad.checkpoint.conversion import Family, HFConfigReader
from kvad.checkpoint.families import gemma
from kvad.config import ModelConfig


def read(fields: HFConfigReader) -> ModelConfig:
    if fields.model_type == "gemma3_text":  # as kvad writes it
        return gemma.read(fields)
    fields.require_one_of("quantization_config", reason="Convert the weights to bfloat16 first.")
    text = fields.part("text_config")
    tie = fields.content.get("tie_word_embeddings")
    text_content = {
        "model_type": "gemma3_text",
        **({} if tie is None else {"tie_word_embeddings": tie}),
        **text.content,
    }
    return gemma.read(HFConfigReader(text_content, text.where))


FAMILY = Family(
    ("gemma3",),
    read,
    gemma.rules,
    gemma.write,
    prefix="language_model.",
    ignored=(r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*", r"lm_head\.weight"),
    head=("lm_head.weight", "model.embed_tokens.weight"),
)
