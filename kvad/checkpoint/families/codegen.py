"""CodeGen (Nijkamp et al. 2022): GPT-J whose q, v and k are fused, in this order, in four parts of the outputs: one for
each core of the TPU that trained it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvad.checkpoint.families import gptj
from kvad.checkpoint.families.common import cannot_express
from kvad.checkpoint.hf import Rule, grouped, rule
from kvad.config import ModelConfig

__all__ = ["FAMILY"]

_CORES = 4


def rules(config: ModelConfig) -> Iterator[Rule]:
    for i in range(config.stack.layers):
        parts = tuple(f"decoder.layers.{i}.mixer.{part}" for part in "qvk")
        yield rule(parts, f"transformer.h.{i}.attn.qkv_proj", grouped(_CORES))
    yield from gptj.rules_but_qkv(config)


def write(config: ModelConfig) -> dict[str, Any]:
    heads = config.stack.layer(0).mixer.heads
    cannot_express("codegen", heads_that_four_cores_do_not_share=heads % _CORES != 0)
    return {**gptj.write(config), "architectures": ["CodeGenForCausalLM"], "model_type": "codegen"}


FAMILY = replace(gptj.FAMILY, types=("codegen",), rules=rules, spell=write)
