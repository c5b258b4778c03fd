"""Rotary position embedding (Su et al. 2021, sec. 3.4.2), applied to flat tokens.

A pair (a, b) at position p turns by the angle p * inv_freq in the positive sense:
``a' = a cos - b sin``, ``b' = b cos + a sin``; hence R(n)^T R(m) = R(m - n), and q.k depends on m - n only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvad.step import Rotary

__all__ = ["Angles", "rotate"]


class Angles:
    """cos and sin of one step's positions, computed once per rotary table and shared by all layers."""

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions
        self._known: dict[tuple[int, float], tuple[Tensor, Tensor, Tensor]] = {}

    def rotate(self, x: Tensor, rotary: Rotary) -> Tensor:
        """x [T, H, D] -> the same shape, its first ``2 * inv_freq.shape[-1]`` dimensions turned."""
        key = (id(rotary.inv_freq), rotary.factor)
        if key not in self._known:  # kept beside the table itself: an id is used again once its owner is gone
            self._known[key] = (rotary.inv_freq, *self._tables(rotary))
        _, cos, sin = self._known[key]
        return rotate(x, cos.to(x.dtype), sin.to(x.dtype), rotary.interleaved)

    def _tables(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(rotary.inv_freq.dtype, torch.float32)
        angle = self._positions.to(dtype).unsqueeze(-1) * rotary.inv_freq.to(dtype)
        return (angle.cos() * rotary.factor).unsqueeze(-2), (angle.sin() * rotary.factor).unsqueeze(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [..., D] with cos, sin [..., D_rot/2] that broadcast; dimensions past D_rot pass through."""
    turned = 2 * cos.shape[-1]
    head, rest = x[..., :turned], x[..., turned:]
    if interleaved:
        a, b = head[..., 0::2], head[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = head.chunk(2, dim=-1)
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out
