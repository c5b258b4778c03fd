"""Hugging Face families; ``FAMILIES`` maps a ``model_type`` to its file.

Classes that differ only in fields and names are rows of a table (``_hf_class.py``, ``fairseq.py``).  A file is imported
when one of its families is requested, and lists them in ``FAMILIES``.  A plugin that is registered under a
``model_type`` is the family of that type.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from kvad import config
from kvad.checkpoint.conversion import Family
from kvad.config import ModelConfig
from kvad.errors import CheckpointError, suggest

__all__ = ["FAMILIES", "UNSUPPORTED", "find_family", "scale_rope"]

_TYPES: dict[str, tuple[str, ...]] = {  # file -> its model_types
    "bert": (
        *("bert", "camembert", "distilbert", "electra", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta"),
        *("albert", "xlm-roberta-xl"),
    ),
    "deepseek": ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"),
    "experts": (
        *("dots1", "ernie4_5_moe", "glm4_moe", "granitemoe", "granitemoeshared", "phimoe", "qwen2_moe", "solar_open"),
    ),
    "deberta": ("deberta-v2",),
    "fairseq": (
        *("bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "pegasus"),
        *("biogpt", "opt", "xglm"),
    ),
    "gemma": ("gemma", "gemma2", "gemma3", "gemma3_text", "t5gemma", "vaultgemma"),
    "gemma4": ("gemma4", "gemma4_text"),
    "gpt": ("codegen", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "openai-gpt"),
    "hybrid": ("lfm2", "lfm2_moe", "recurrent_gemma"),
    "llama": (
        *("ernie4_5", "granite", "llama", "mistral", "mixtral", "olmo", "olmo2", "olmoe", "phi", "phi3", "seed_oss"),
        *("flex_olmo", "minimax_m2", "stablelm", "starcoder2"),
    ),
    "llama_like": (
        *("cwm", "helium", "hyperclovax", "internlm3", "iquestcoder", "ministral", "ministral3"),
        "mistral3",
    ),
    "neox": ("bloom", "falcon", "gpt_neox", "mpt"),
    "plain_mlp": ("apertus", "arcee", "jais2", "nanochat", "nemotron"),
    "qwen_hybrid": ("qwen3_5", "qwen3_5_text", "qwen3_next"),
    "sparse": ("exaone_moe", "granite_swa", "hy_v3", "mellum", "qwen3_moe"),
    "rotary_bert": ("modernbert", "nomic_bert", "roformer"),
    "t5": ("mt5", "t5", "umt5"),
    "windowed": (*("cohere", "cohere2", "exaone4", "glm", "glm4", "gpt_oss", "olmo3", "qwen2", "qwen3", "smollm3"),),
}
FAMILIES: dict[str, str] = {model_type: file for file, types in _TYPES.items() for model_type in types}

UNSUPPORTED: dict[str, str] = {  # model_type -> reason
    **dict.fromkeys(("gemma3n", "gemma3n_text"), "some of its layers read the cache of another layer; gemma3 is read"),
    "hunyuan_v1_dense": "it multiplies q and k by weights after their rotation; keys are stored without weights",
    "longt5": "its encoder attends to blocks and to sums of blocks; t5, mt5 and umt5 are read",
    "nllb-moe": "its experts drop tokens beyond a capacity; the dense NLLB, m2m_100, is read",
    "switch_transformers": "its experts drop tokens beyond a capacity; t5, mt5 and umt5 are read",
}


def scale_rope(config: ModelConfig, values: Mapping[str, Any]) -> ModelConfig:
    """Return the config with another RoPE scaling, the names and defaults of which are transformers' ``rope_scaling``.

    The limit becomes ``factor`` times the original one, if that is longer. Layers with a window keep their rotation if
    the model also has layers without one (Gemma 3).
    """
    fields = importlib.import_module("kvad.checkpoint.families._fields")
    scaled: ModelConfig = fields.scale_rope(config, values)
    return scaled


def find_family(model_type: str) -> Family:
    """Return the family of a ``model_type``.

    Raises CheckpointError for any other; the hint is the most similar name, or why it is not supported.
    """
    if config.plugins.is_plugin(model_type, {*FAMILIES, *UNSUPPORTED}):
        custom = config.plugins.load_plugin(model_type, "model_type")
        if not isinstance(custom, Family):
            raise CheckpointError(f"model_type: the plugin {model_type!r} is not a kvad.checkpoint.conversion.Family")
        return custom
    if model_type in UNSUPPORTED:
        raise CheckpointError(f"model_type {model_type!r} is not supported", UNSUPPORTED[model_type])
    if model_type not in FAMILIES:
        raise CheckpointError(f"model_type {model_type!r} is not known", suggest(model_type, FAMILIES))
    module = importlib.import_module(f"kvad.checkpoint.families.{FAMILIES[model_type]}")
    families: tuple[Family, ...] = module.FAMILIES
    return next(family for family in families if model_type in family.types)
