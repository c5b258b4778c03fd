"""Hugging Face families, one file each; :data:`FAMILIES` maps a ``model_type`` to its file.

A family is imported when it is requested.  Custom families are named in an environment variable:
``KVAD_FAMILIES=parrot=parrot:FAMILY``.
"""

from __future__ import annotations

import importlib
import os

from kvad import config
from kvad.checkpoint.conversion import Family
from kvad.errors import CheckpointError, suggest

__all__ = ["ENV_VARIABLE", "FAMILIES", "UNSUPPORTED", "find_family"]

ENV_VARIABLE = "KVAD_FAMILIES"

FAMILIES: dict[str, str] = {  # model_type -> file
    "bart": "bart",
    "bert": "bert",
    "biogpt": "biogpt",
    "blenderbot": "blenderbot",
    "blenderbot-small": "blenderbot_small",
    "bloom": "bloom",
    "camembert": "roberta",
    "codegen": "codegen",
    "cohere": "cohere",
    "cohere2": "cohere",
    "distilbert": "distilbert",
    "electra": "electra",
    "falcon": "falcon",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3": "gemma3",
    "gemma3_text": "gemma",
    "gpt2": "gpt2",
    "gpt_bigcode": "gpt_bigcode",
    "gpt_neo": "gpt_neo",
    "gpt_neox": "gpt_neox",
    "gpt_oss": "gpt_oss",
    "gptj": "gptj",
    "granite": "llama",
    "llama": "llama",
    "m2m_100": "m2m_100",
    "marian": "marian",
    "mbart": "mbart",
    "mistral": "llama",
    "mixtral": "mixtral",
    "modernbert": "modernbert",
    "mpnet": "mpnet",
    "mpt": "mpt",
    "mt5": "t5",
    "nomic_bert": "nomic_bert",
    "olmo": "olmo",
    "olmo2": "olmo",
    "openai-gpt": "openai_gpt",
    "opt": "opt",
    "pegasus": "pegasus",
    "phi": "phi",
    "phi3": "phi3",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "roberta": "roberta",
    "roberta-prelayernorm": "roberta_prelayernorm",
    "roformer": "roformer",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    "t5": "t5",
    "t5gemma": "t5gemma",
    "umt5": "t5",
    "xglm": "xglm",
    "xlm-roberta": "roberta",
}

UNSUPPORTED: dict[str, str] = {  # model_type -> reason
    "longt5": "its encoder attends to blocks and to sums of blocks; t5, mt5 and umt5 are read",
    "nllb-moe": "its experts drop tokens beyond a capacity; the dense NLLB, m2m_100, is read",
    "switch_transformers": "its experts drop tokens beyond a capacity; t5, mt5 and umt5 are read",
}


def find_family(model_type: str) -> Family:
    """Return the family of a ``model_type``.

    Raises:
        CheckpointError: If it is unknown or not supported; the hint is the most similar name, or the reason.
    """
    custom = _custom_families().get(model_type)
    if custom is not None:
        custom_family = config.plugins.load_plugin(custom, ENV_VARIABLE)
        if not isinstance(custom_family, Family):
            raise CheckpointError(f"{ENV_VARIABLE}: {custom} is not a Family")
        return custom_family
    if model_type in UNSUPPORTED:
        raise CheckpointError(f"model_type {model_type!r} is not supported", UNSUPPORTED[model_type])
    if model_type not in FAMILIES:
        raise CheckpointError(f"model_type {model_type!r} is not known", suggest(model_type, FAMILIES))
    family = importlib.import_module(f"kvad.checkpoint.families.{FAMILIES[model_type]}").FAMILY
    assert isinstance(family, Family)
    return family


def _custom_families() -> dict[str, str]:
    """Parse ``parrot=parrot:FAMILY,...``.

    Code of a family is named by the user, never by a downloaded file.
    """
    entries = [entry.partition("=") for entry in os.environ.get(ENV_VARIABLE, "").split(",") if entry.strip()]
    return {name.strip(): target.strip() for name, _, target in entries}
