"""A memory's logits beside the judge's: how far apart, in logits and in nats, and where the likeliest token differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvad.cache.formats import get_format, split_format_name
from kvad.lab.findings import EXACT, TokenDivergence
from kvad.lab.replay import ReplayResult, SequenceKey

__all__ = ["Comparison", "compare_logits", "kl_divergence", "format_loss", "tolerance"]

COMPUTE_EPS = 256
STORED_EPS = 8
AMPLIFICATION = 16


@dataclass(frozen=True)
class Comparison:
    """A memory's logits beside the judge's, over every position that was computed."""

    max_dlogit: float
    kl_mean: float
    kl_max: float
    compared: int
    divergences: tuple[TokenDivergence, ...]


def compare_logits(
    replayed: ReplayResult, judge: Mapping[SequenceKey, Tensor], tie_below: float, before: int | None = None
) -> Comparison:
    """``judge`` [T, V] per row, of its positions ``before`` that one if it is given; NaN on either side counts as an
    infinite difference."""
    worst, kl, divergences = 0.0, [], []
    for key, pieces in replayed.pieces.items():
        for start, have in pieces:
            have = have[: None if before is None else max(0, before - start)]
            true = judge[key][start : start + len(have)].double()
            have = have.double()
            worst = max(worst, float((have - true).abs().nan_to_num(nan=torch.inf).max()) if len(have) else 0.0)
            kl.append(kl_divergence(true, have))
            divergences += _divergences(key, start, true, have, tie_below)
    every = torch.cat(kl)
    ordered = tuple(sorted(divergences, key=lambda d: (d.tie, d.position, d.row, d.sample)))
    return Comparison(worst, float(every.mean()), float(every.max()), len(every), ordered)


def kl_divergence(true: Tensor, have: Tensor) -> Tensor:
    """KL(judge || memory) in nats, [n, V] [n, V] -> [n]."""
    p, q = true.log_softmax(-1), have.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)


def _divergences(key: SequenceKey, start: int, true: Tensor, have: Tensor, tie_below: float) -> list[TokenDivergence]:
    best, chosen = true.argmax(-1), have.argmax(-1)
    found = []
    for at in (best != chosen).nonzero().squeeze(-1).tolist():
        top = true[at].topk(min(2, true.shape[-1])).values
        gap = float(top[0] - top[-1])
        found.append(TokenDivergence(*key, start + at, int(best[at]), int(chosen[at]), gap, gap < tie_below))
    return found


def tolerance(dtype: str, scale: float, structure: float) -> float:
    """How far logits may be from the judge's; ``scale``: its largest |logit|, ``structure``: the float64 twin's noise.

    float64: 1e-10.  Else rounding in float32 (256 eps, or 16 times the twin's own noise carried over to float32: a
    sharp model amplifies it) and, for a half precision, that of what is stored (8 eps of it).  A lossy format has
    float32's: beyond it, a token that differs is no tie.
    """
    if dtype == "float64":
        return EXACT
    single, double = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
    coarser = STORED_EPS * _eps(dtype) * scale if format_loss(dtype) == "rounding" else 0.0
    return max(COMPUTE_EPS * single * scale, AMPLIFICATION * structure * single / double) + coarser


def format_loss(dtype: str) -> str:
    """The worse of keys and values: "none", "rounding", "lossy"."""
    return max((get_format(name).loss for name in split_format_name(dtype)), key=("none", "rounding", "lossy").index)


def _eps(dtype: str) -> float:
    return max(get_format(name).eps for name in split_format_name(dtype))
