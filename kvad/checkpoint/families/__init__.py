"""Hugging Face families; ``FAMILIES`` maps a ``model_type`` to its file.

Classes that differ only in fields and names are rows of a table (``_hf_class.py``, ``fairseq.py``).  A file is imported
when one of its families is requested, and lists them in ``FAMILIES``.  Custom families are named in an environment
variable, ``KVAD_FAMILIES=parrot=parrot:FAMILY,...``, never in a downloaded file.
"""

from __future__ import annotations

import importlib
import os

from kvad import config
from kvad.checkpoint.conversion import Family
from kvad.errors import CheckpointError, suggest

__all__ = ["ENV_VARIABLE", "FAMILIES", "UNSUPPORTED", "find_family"]

ENV_VARIABLE = "KVAD_FAMILIES"

_TYPES: dict[str, tuple[str, ...]] = {  # file -> its model_types
    "bert": ("bert", "camembert", "distilbert", "electra", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta"),
    "fairseq": (
        *("bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "pegasus"),
        *("biogpt", "opt", "xglm"),
    ),
    "gemma": ("gemma", "gemma2", "gemma3", "gemma3_text", "t5gemma"),
    "gpt": ("codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "openai-gpt"),
    "llama": ("granite", "llama", "mistral", "mixtral", "olmo", "olmo2", "phi", "phi3", "stablelm", "starcoder2"),
    "neox": ("bloom", "falcon", "gpt_neox", "mpt"),
    "rotary_bert": ("modernbert", "nomic_bert", "roformer"),
    "t5": ("mt5", "t5", "umt5"),
    "windowed": ("cohere", "cohere2", "gpt_oss", "qwen2", "qwen3", "smollm3"),
}
FAMILIES: dict[str, str] = {model_type: file for file, types in _TYPES.items() for model_type in types}

UNSUPPORTED: dict[str, str] = {  # model_type -> reason
    "longt5": "its encoder attends to blocks and to sums of blocks; t5, mt5 and umt5 are read",
    "nllb-moe": "its experts drop tokens beyond a capacity; the dense NLLB, m2m_100, is read",
    "switch_transformers": "its experts drop tokens beyond a capacity; t5, mt5 and umt5 are read",
}


def find_family(model_type: str) -> Family:
    """Return the family of a ``model_type``.

    Raises CheckpointError for any other; the hint is the most similar name, or why it is not supported.
    """
    entries = [entry.partition("=") for entry in os.environ.get(ENV_VARIABLE, "").split(",") if entry.strip()]
    custom = {name.strip(): target.strip() for name, _, target in entries}.get(model_type)
    if custom is not None:
        custom_family = config.plugins.load_plugin(custom, ENV_VARIABLE)
        if not isinstance(custom_family, Family):
            raise CheckpointError(f"{ENV_VARIABLE}: {custom} is not a Family")
        return custom_family
    if model_type in UNSUPPORTED:
        raise CheckpointError(f"model_type {model_type!r} is not supported", UNSUPPORTED[model_type])
    if model_type not in FAMILIES:
        raise CheckpointError(f"model_type {model_type!r} is not known", suggest(model_type, FAMILIES))
    module = importlib.import_module(f"kvad.checkpoint.families.{FAMILIES[model_type]}")
    families: tuple[Family, ...] = module.FAMILIES
    return next(family for family in families if model_type in family.types)
