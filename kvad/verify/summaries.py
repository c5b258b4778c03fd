"""Comparison of every summary that a cache writes with the tokens that it replaces.

A policy with summaries is a function of its own sequence, so two runs with the same wrong summaries agree. Here each
summary is computed again from the upper level's slots, by the definition: ``ratio`` tokens, their mean (or the trained
summarizer's output), and a weight of log(ratio).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvad import ops
from kvad.cache.device import KVCache
from kvad.engine import Engine
from kvad.model_input import MergeOp
from kvad.verify.report import MismatchFinding

COARSE = 0.2  # relative to the largest number of a summary: beyond any format's rounding
WEIGHT = 0.05  # of a summary's logit


class SummaryCheck:
    """Checks the merges of an engine's cache from now on; ``findings`` has those that are wrong."""

    def __init__(self, engine: Engine, findings: list[MismatchFinding]) -> None:
        self.cache, self.findings = engine.kv_cache, findings
        summarizer = engine.config.summarizer
        self._summarizers: dict[int, Any] = {} if summarizer is None else dict(summarizer.by_layer())
        self._merge = self.cache._merge
        setattr(self.cache, "_merge", self._merge_and_check)  # noqa: B010

    def _merge_and_check(self, group_index: int, merge_ops: Sequence[MergeOp]) -> None:
        cache, group = self.cache, self.cache.groups[group_index]
        level = group.lower_level
        assert level is not None
        tokens = {
            (layer, op): _tokens(cache, level.upper_group, layer, op) for layer in group.layers for op in merge_ops
        }
        self._merge(group_index, merge_ops)
        for (layer, op), (keys, values, positions) in tokens.items():
            expected = self._summarize(layer, keys, values, level.ratio)
            count = len(positions) // level.ratio
            blocks = torch.full((count,), op.target_block, device=positions.device)
            offsets = torch.arange(op.first_slot, op.first_slot + count, device=positions.device)
            stores = (*cache.stores[group_index][layer], cache.weights[group_index][layer])
            have = [store.read_slots(blocks, offsets, torch.float64) for store in stores]  # [count, K, D]
            means = positions.unflatten(0, (count, level.ratio)).double().mean(-1)
            have[0] = _unrotate(cache, layer, have[0], means)
            self._compare(layer, int(positions[0]), level.ratio, have, expected)

    def _summarize(self, layer: int, keys: Tensor, values: Tensor, ratio: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values [count, K, D] and weights [count, K, 1] of tokens [n, K, D]."""
        chunks = [x.unflatten(0, (-1, ratio)).transpose(1, 2) for x in (keys, values)]  # [count, K, ratio, D]
        if layer in self._summarizers:
            with torch.inference_mode():
                key, value, weight = self._summarizers[layer](*chunks)
        else:
            key, value = (chunk.mean(2) for chunk in chunks)
            weight = key.new_zeros(key.shape[:2])
        return key, value, (math.log(ratio) + weight).unsqueeze(-1)

    def _compare(self, layer: int, position: int, ratio: int, have: Sequence[Tensor], true: Sequence[Tensor]) -> None:
        names, bounds = ("key", "value", "weight"), [COARSE * float(x.abs().max()) for x in true[:2]]
        for name, bound, x, y in zip(names, (*bounds, WEIGHT), have, true, strict=True):
            gap = float((x - y).abs().max())
            if not gap <= bound:
                evidence = f"the {name} is not that of {ratio} tokens"
                self.findings.append(
                    MismatchFinding("summary", layer, -1, 0, position, f"the {name} of a summary", gap, evidence)
                )


def _tokens(cache: KVCache, group: int, layer: int, op: MergeOp) -> tuple[Tensor, Tensor, Tensor]:
    """Return unrotated keys and values [n, K, D] and positions [n] of the block that is merged, in float64."""
    positions = cache.positions[group][op.source_block].clone()
    offsets = torch.arange(len(positions), device=positions.device)
    keys, values = (
        store.read_slots(torch.full_like(offsets, op.source_block), offsets, torch.float64)
        for store in cache.stores[group][layer]
    )
    return _unrotate(cache, layer, keys, positions), values, positions


def _unrotate(cache: KVCache, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
    """Return keys [n, K, D] of ``positions`` [n] without their rotation, if they are stored with one."""
    rotary = None if cache.rope_on_read else cache.rotaries.get(layer)
    if rotary is None:
        return keys
    unrotated = ops.rotary.rotate_blocks(keys.transpose(0, 1).unsqueeze(0), -positions[None], rotary, 1 / rotary.factor)
    return unrotated[0].transpose(0, 1)
