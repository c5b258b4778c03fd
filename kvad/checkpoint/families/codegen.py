"""CodeGen (Nijkamp et al. 2022): GPT-J with q, v, k fused in four parts of the outputs.

The order is q, v, k; each part is for one core of the TPU that trained it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvad.checkpoint.conversion import TensorRule, grouped_transform, tensor_rule
from kvad.checkpoint.families import gptj
from kvad.checkpoint.families._common import check_expressible
from kvad.config import ModelConfig

_CORES = 4


def rules(config: ModelConfig) -> Iterator[TensorRule]:
    for i in range(config.stack.num_layers):
        parts = tuple(f"decoder.layers.{i}.attention.{part}" for part in "qvk")
        yield tensor_rule(parts, f"transformer.h.{i}.attn.qkv_proj", grouped_transform(_CORES))
    yield from gptj.rules_but_qkv(config)


def write(config: ModelConfig) -> dict[str, Any]:
    heads = config.stack.layer_config(0).attention.num_heads
    check_expressible("codegen", number_of_heads_is_not_a_multiple_of_4=heads % _CORES != 0)
    return {**gptj.write(config), "architectures": ["CodeGenForCausalLM"], "model_type": "codegen"}


FAMILY = replace(gptj.FAMILY, types=("codegen",), rules=rules, write_fields=write)
