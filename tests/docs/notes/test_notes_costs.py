"""Costs and savings of caching (004 sections 3.1, 3.2, 4.3, 4.7; 003), counted in products instead of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from kvad.benchmarks.cache_speed import ConcatCache
from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.groups import build_groups
from kvad.config.flops import closed_form_flops, generation_cost
from kvad.config.layers import PlainMLPConfig, RopeConfig
from kvad.config.model import attention_specs
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.model_input import RESERVED_BLOCKS, AttentionPattern, ModelInput, SlotMapping, SubBatch, TokenPositions
from kvad.ops.attention import SCORE_BUDGET, AttentionMask

Build = Callable[..., Transformer]


def counted(run: Callable[[], None]) -> tuple[int, int]:
    """Return FLOPs of (projections and MLP, attention): products with weights, and of q, k, v with each other."""
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        run()
    flops_by_kind = {str(op).rpartition(".")[2]: n for op, n in counter.get_flop_counts()["Global"].items()}
    assert set(flops_by_kind) <= {"mm", "addmm", "bmm"}
    return flops_by_kind.get("mm", 0) + flops_by_kind["addmm"], flops_by_kind["bmm"]


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    num_elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.num_elements = max(self.num_elements, *tensors, 0)
        return out


def uncached(model: Transformer, lengths: range, kernel: Any = "reference") -> Callable[[], None]:
    def run() -> None:
        for n in lengths:
            tokens = torch.arange(n) % 32
            model(ModelInput(tokens, tokens, (SubBatch(1, n, n),), tokens), NoCache(model.config, kernel=kernel))

    return run


def cached(model: Transformer, n: int, kernel: Any = "reference") -> Callable[[], None]:
    groups = build_groups(
        attention_specs(model.config), CacheConfig(layout="contiguous", max_num_seqs=1, max_seq_len=n, dtype="float64")
    )
    memory = KVCache(groups, kernel=kernel)

    def run() -> None:
        for t in range(n):
            place = SlotMapping(torch.tensor([RESERVED_BLOCKS * n + t]), (torch.tensor([[RESERVED_BLOCKS]]),))
            at = torch.tensor([t])
            model(ModelInput(at % 32, at, (SubBatch(1, 1, t + 1),), torch.tensor([0]), slot_mappings=(place,)), memory)

    return run


@pytest.mark.parametrize("n", [8, 32])
def test_cost_of_recomputation(n: int, build: Build) -> None:
    """004 section 4.7 calls it "a larger constant factor": it grows with N, 2N/3 in attention, N/2 in projections."""
    model = build(position=RopeConfig())
    every_time, once = counted(uncached(model, range(1, n + 1))), counted(cached(model, n))
    projections, attention = (a / b for a, b in zip(every_time, once, strict=True))
    assert projections == (n + 1) / 2
    assert attention == pytest.approx((2 * n + 1) / 3)
    about = closed_form_flops(n)
    assert about.projections == pytest.approx(projections, rel=1 / n)
    assert about.attention == pytest.approx(attention, rel=1 / n)
    printed = [(cost.projections, cost.attention) for cost in generation_cost(model.config, prompt=1, new=n)]
    assert printed == [once, every_time]  # `kvad bench cache` prints these


def test_cost_of_a_step(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """004 section 4.7: with the cache a step costs O(d^2) in projections for every T, and O(T d) in attention."""

    def step(model: Transformer, t: int) -> list[int]:
        return [b - a for a, b in zip(counted(cached(model, t)), counted(cached(model, t + 1)), strict=True)]

    model = build(position=RopeConfig())
    per_step = [step(model, t) for t in (7, 15, 31)]
    assert per_step[0][0] == per_step[1][0] == per_step[2][0]
    assert [attention / per_step[0][1] for _, attention in per_step] == [1, 2, 4]  # 8, 16, 32 keys
    wide = PlainMLPConfig(96, "gelu", bias=True)  # d is doubled: twice the heads, of the same width
    doubled = step(build(position=RopeConfig(), width=48, num_heads=8, num_kv_heads=4, mlp=wide), 7)
    assert doubled == [4 * per_step[0][0], 2 * per_step[0][1]]
    fused, lengths = torch.nn.functional.scaled_dot_product_attention, list[int]()

    def record(q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Tensor:
        lengths.append(k.shape[-2])
        out: Tensor = fused(q, k, *rest, **options)
        return out

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", record)
    with torch.inference_mode():
        cached(model, 8, "sdpa")()
    assert lengths == [t for t in range(1, 9) for _ in model.decoder.layers]  # the fused kernel's step is linear too
    whole = [counted(uncached(model, range(t, t + 1))) for t in (8, 16, 32)]
    assert [projections / whole[0][0] for projections, _ in whole] == [1, 2, 4]  # O(T d^2) again for each token
    assert [attention / whole[0][1] for _, attention in whole] == [1, 4, 16]  # O(T^2 d) again for each token


def test_doubling_the_length_quadruples_the_products_but_not_the_memory(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """004 section 3.1: the number of products does; the scores are computed in query blocks, so memory does not."""
    model = build(position=RopeConfig())
    (_, one), (_, two) = (counted(uncached(model, range(n, n + 1))) for n in (32, 64))
    assert two == 4 * one
    for n in (1 << 14, 1 << 15, 1 << 16):
        positions = TokenPositions(torch.arange(n)[None])
        queries = AttentionMask(positions, positions, AttentionPattern()).max_queries_per_block(heads=8, scores=True)
        assert 1 <= queries < n and queries * n * 8 <= SCORE_BUDGET

    def largest(n: int, kernel: str) -> int:
        with torch.inference_mode(), LargestTensor() as seen:
            uncached(model, range(n, n + 1), kernel)()
        return seen.num_elements

    assert [largest(n, "reference") for n in (64, 128)] == [4 * 64 * 64, 4 * 128 * 128]  # four heads, in one block
    for name in ("SCORE_BUDGET", "MASK_BUDGET"):
        monkeypatch.setattr(f"kvad.ops.attention.{name}", 1 << 11)
    for kernel in ("reference", "auto"):  # now the MLP's
        assert [largest(n, kernel) for n in (64, 128)] == [64 * 48, 128 * 48]


@pytest.mark.parametrize("n", [4, 16])
def test_torch_cat_copies_the_whole_cache_at_every_step(n: int, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """004 section 4.4: a step's copy is as long as the text, so a text of n tokens copies n (n + 1) / 2 of them."""
    model, copied, concatenate = build(), list[int](), torch.cat

    def counting(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
        joined = concatenate(tensors, dim)
        if joined.dim() == 4:  # keys or values [1, K, S, D]
            copied.append(joined.numel())
        return joined

    monkeypatch.setattr("torch.cat", counting)
    cache = ConcatCache(model)
    for t in range(n):
        at = torch.tensor([t])
        model(ModelInput(at % 32, at, (SubBatch(1, 1, t + 1),), torch.tensor([0])), cache)
    sizes = [spec.num_kv_heads * (spec.head_dim + spec.value_dim) for spec in attention_specs(model.config)]
    assert sum(copied) == sum(sizes) * n * (n + 1) // 2
