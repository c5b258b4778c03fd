"""CodeGen (Nijkamp et al. 2022): GPT-J whose q, v and k are fused, in this order, in four parts of the outputs: one for
each core of the TPU that trained it."""

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
    check_expressible("codegen", heads_that_four_cores_do_not_share=heads % _CORES != 0)
    return {**gptj.write(config), "architectures": ["CodeGenForCausalLM"], "model_type": "codegen"}


FAMILY = replace(gptj.FAMILY, types=("codegen",), rules=rules, write_fields=write)
