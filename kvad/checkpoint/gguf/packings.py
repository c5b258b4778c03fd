"""Tensors that Hugging Face stores in another number of pieces, or in another order of rows, than GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvad.checkpoint.gguf.metadata import Packing


def _split_last(tensor: Tensor) -> list[Tensor]:
    return list(tensor.unflatten(-1, (-1, 2)).unbind(-1))


# gpt-oss joins gate and up, alternating, and stores its matrices as [in, out].
GPT_OSS = {
    "self_attn.sinks": Packing(("attn_sinks.weight",), lambda parts: parts[0], lambda tensor: [tensor]),
    "mlp.experts.gate_up_proj": Packing(
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        lambda parts: torch.stack(parts, -1).flatten(-2) if parts[0].dim() == 2 else
        torch.stack([part.transpose(1, 2) for part in parts], -1).flatten(-2),
        lambda tensor: [part.transpose(1, 2).contiguous() for part in _split_last(tensor)],
    ),
    "mlp.experts.gate_up_proj_bias": Packing(
        ("ffn_gate_exps.bias", "ffn_up_exps.bias"), lambda parts: torch.stack(parts, -1).flatten(-2), _split_last
    ),
    "mlp.experts.down_proj": Packing(
        ("ffn_down_exps.weight",), lambda parts: parts[0].transpose(1, 2), lambda tensor: [tensor.transpose(1, 2)]
    ),
    "mlp.experts.down_proj_bias": Packing(
        ("ffn_down_exps.bias",), lambda parts: parts[0], lambda tensor: [tensor]
    ),
}  # fmt: skip


# Granite joins gate and up.
GRANITE_EXPERTS = {
    f"{module}.input_linear.weight": Packing(
        (f"ffn_gate_{kind}.weight", f"ffn_up_{kind}.weight"),
        lambda parts: torch.cat(parts, -2), lambda tensor: list(tensor.chunk(2, -2)),
    )
    for module, kind in (("block_sparse_moe", "exps"), ("shared_mlp", "shexp"))
}  # fmt: skip


def latent_packings(content: Mapping[str, Any]) -> Mapping[str, Packing]:
    """Return the matrices of keys, transposed per head, and of values; older files have one, as Hugging Face."""
    heads, nope, value = (content[name] for name in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))

    def split(tensor: Tensor) -> list[Tensor]:
        keys, values = tensor.unflatten(0, (heads, nope + value)).split([nope, value], dim=1)
        return [keys.transpose(1, 2).contiguous(), values.contiguous()]

    def join(parts: list[Tensor]) -> Tensor:
        return torch.cat([parts[0].transpose(1, 2), parts[1]], dim=1).flatten(0, 1)

    return {"self_attn.kv_b_proj.weight": Packing(("attn_k_b.weight", "attn_v_b.weight"), join, split)}


def grouped_qkv(module: str, num_heads: int, num_groups: int) -> Mapping[str, Packing]:
    """Return the matrix that has q, k and v of each group in turn; GGUF stores all q, then all k, then all v."""
    num_queries = num_heads // num_groups

    def read(parts: list[Tensor]) -> Tensor:
        heads = parts[0].unflatten(0, (num_heads + 2 * num_groups, -1))
        groups = [part.unflatten(0, (num_groups, -1)) for part in heads.split([num_heads, num_groups, num_groups])]
        return torch.cat(groups, 1).flatten(0, 2)

    def write(tensor: Tensor) -> list[Tensor]:
        groups = tensor.unflatten(0, (num_groups, num_queries + 2, -1)).split([num_queries, 1, 1], 1)
        return [torch.cat([part.flatten(0, 2) for part in groups])]

    suffixes = ("weight", "bias")
    return {f"{module}.query_key_value.{each}": Packing((f"attn_qkv.{each}",), read, write) for each in suffixes}
