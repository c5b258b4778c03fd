"""Rotary position embedding (Su et al. 2021, sec. 3.4.2), applied to flat tokens.

A pair (a, b) at position p is rotated by the angle p * inv_freq in the positive sense:
``a' = a cos - b sin``, ``b' = b cos + a sin``; hence R(n)^T R(m) = R(m - n), and q.k depends on m - n only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvad.model_input import Rotary

SMALL_TOKEN_COUNT = 32  # tokens; with more, reading x twice costs more than the saved calls


class _Tables(NamedTuple):
    inv_freq: Tensor  # kept alive, because ids are reused
    cos: Tensor  # [T, 1, D_rot/2]
    sin: Tensor  # [T, 1, D_rot/2]
    twice: Tensor  # (cos, cos) [T, 1, D_rot]
    signed: Tensor  # (-sin, sin) [T, 1, D_rot]


class RotaryCache:
    """cos and sin of one step's positions, computed once per rotary and shared by all layers.

    ``positions`` [T]. If ``exact``, angles are computed in float64, for endless sequences: in float32 the error is 6e-8
    of the position, in radians.
    """

    def __init__(self, positions: Tensor, *, exact: bool = False) -> None:
        self._positions, self._exact = positions, exact
        self._known: dict[tuple[int, float, torch.dtype], _Tables] = {}
        self._angles: dict[tuple[int, float], tuple[Tensor, Tensor, Tensor]] = {}

    def rotate(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Rotate the first ``2 * inv_freq.shape[-1]`` dims of x [T, H, D]."""
        key = (id(rotary.inv_freq), rotary.factor, x.dtype)
        tables = self._known.get(key)
        if tables is None:
            tables = self._known[key] = self._tables(rotary, x.dtype)
        size = tables.twice.shape[-1]
        if x.shape[0] <= SMALL_TOKEN_COUNT and size == x.shape[-1] and not rotary.interleaved:
            return x * tables.twice + x.roll(size // 2, -1) * tables.signed  # the same sums, in fewer calls
        if torch.is_grad_enabled() and x.requires_grad and not tables.cos.requires_grad:
            out: Tensor = _Rotate.apply(x, tables.cos, tables.sin, rotary.interleaved)  # type: ignore[no-untyped-call]
            return out
        return rotate(x, tables.cos, tables.sin, rotary.interleaved)

    def angles(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, D_rot/2] in float32, for a kernel that rotates."""
        key = (id(rotary.inv_freq), rotary.factor)
        if key not in self._angles:
            wide = torch.float64 if self._exact else torch.float32
            angle = self._positions.to(wide).unsqueeze(-1) * rotary.inv_freq.to(wide)
            cos, sin = angle.cos().to(torch.float32), angle.sin().to(torch.float32)
            if rotary.factor != 1.0:
                cos, sin = cos * rotary.factor, sin * rotary.factor
            self._angles[key] = rotary.inv_freq, cos, sin
        return self._angles[key][1:]

    def _tables(self, rotary: Rotary, dtype: torch.dtype) -> _Tables:
        wide = torch.promote_types(rotary.inv_freq.dtype, torch.float64 if self._exact else torch.float32)
        angle = (self._positions.to(wide).unsqueeze(-1) * rotary.inv_freq.to(wide)).unsqueeze(-2)
        cos, sin = (angle.cos() * rotary.factor).to(dtype), (angle.sin() * rotary.factor).to(dtype)
        return _Tables(rotary.inv_freq, cos, sin, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


class _Rotate(torch.autograd.Function):
    """``rotate`` whose backward pass is the inverse rotation: autograd's bits in fewer operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return rotate(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(gradients[0], cos, -sin, ctx.interleaved), None, None, None


def rotate_by(x: Tensor, by: Tensor, rotary: Rotary, at: slice) -> Tensor:
    """Rotate x [R, K, S, D], already rotated, by further positions ``by`` [R, 1] or [R, S]: R(by) R(p) = R(by + p).

    ``at`` is the span of these sequences in the step's tokens, for frequencies per sequence.
    """
    return _rotate_at(x, by, rotary._replace(factor=1.0), at, torch.float64)


def rotate_rows(x: Tensor, positions: Tensor, rotary: Rotary, at: slice, *, exact: bool) -> Tensor:
    """Rotate keys that are stored unrotated: x [R, K, S, D] at positions [R, S] or [R, K, S]."""
    return _rotate_at(x, positions, rotary, at, torch.float64 if exact else torch.float32)


def rotate_blocks(x: Tensor, positions: Tensor, rotary: Rotary, factor: float = 1.0) -> Tensor:
    """Rotate x [n, K, S, D] by ``positions`` [n, S] in float64; negative positions rotate back.

    ``factor`` multiplies cos and sin instead of the rotary's factor.
    """
    return _rotate_at(x, positions, rotary._replace(factor=factor), slice(0), torch.float64)


def _rotate_at(x: Tensor, by: Tensor, rotary: Rotary, at: slice, min_dtype: torch.dtype) -> Tensor:
    freq = rotary.inv_freq
    if freq.dim() == 2:
        freq = freq[at].unflatten(0, (x.shape[0], -1))[:, None, :1]
    by = by.unsqueeze(1) if by.dim() == 2 else by
    wide = torch.promote_types(freq.dtype, min_dtype)
    angle = by.to(wide).unsqueeze(-1) * freq.to(wide)  # [R, 1 or K, S, D_rot/2]
    cos, sin = (angle.cos() * rotary.factor).to(x.dtype), (angle.sin() * rotary.factor).to(x.dtype)
    return rotate(x, cos, sin, rotary.interleaved)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x [..., D] with cos, sin [..., D_rot/2] that broadcast; dims after D_rot are unchanged."""
    size = 2 * cos.shape[-1]
    head, rest = x[..., :size], x[..., size:]
    if interleaved:
        a, b = head[..., 0::2], head[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = head.chunk(2, dim=-1)
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out
