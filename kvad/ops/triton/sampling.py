"""Tokens from logits on the device: the best one, or a draw after temperature, top-k, top-p and min-p.

One program handles one row, so no row depends on another. Filters keep the scores up to a threshold, which is found
without sorting: each pass over a row halves the range in which the threshold is. Keys order scores as integers: the
bits of (the best score - score) / temperature, so that 0 is the best one.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LAST_KEY = tl.constexpr(0x7F800000)  # of infinity


class _Row(NamedTuple):
    """A row of logits, and what its scores are computed from."""

    logits: Any
    num_tokens: Any
    top: Any  # the best logit
    tau: Any  # the temperature


@triton.jit
def _best(logits, vocab, num_tokens, size: tl.constexpr) -> Any:
    """Return the best logit, the first token that has it, and 1 if all numbers of the row are finite."""
    best, index = tl.full([size], float("-inf"), tl.float32), tl.zeros([size], tl.int32)
    broken = tl.zeros([size], tl.int32)
    for start in range(0, vocab, size):
        column = start + tl.arange(0, size)
        x = tl.load(logits + column, mask=column < vocab, other=0.0).to(tl.float32)
        broken = tl.where(x - x == 0, broken, 1)
        better = (column < num_tokens) & (x > best)
        best, index = tl.where(better, x, best), tl.where(better, column, index)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, index, vocab), 0), 1 - tl.max(broken, 0)


@triton.jit
def _best_tokens(logits, out, stride, vocab, num_tokens, size: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    _, first, is_finite = _best(logits + row * stride, vocab, num_tokens, size)
    tl.store(out + row * 2, first.to(tl.int64))
    tl.store(out + row * 2 + 1, is_finite.to(tl.int64))


@triton.jit
def _keys(row, start, size: tl.constexpr) -> Any:
    """Return the keys of ``size`` tokens; of those that are never sampled one behind the last."""
    column = start + tl.arange(0, size)
    inside = column < row.num_tokens
    x = tl.load(row.logits + column, mask=inside, other=0.0).to(tl.float32)
    below = tl.div_rn(row.top - x, row.tau + tl.zeros([size], tl.float32))
    return tl.where(inside, below.to(tl.int32, bitcast=True), LAST_KEY + 1)


@triton.jit
def _weight(keys) -> Any:
    """Return probabilities relative to the best token's."""
    return tl.where(keys <= LAST_KEY, tl.exp(-keys.to(tl.float32, bitcast=True)), 0.0)


@triton.jit
def _sum(row, low, key, high, counts: tl.constexpr, size: tl.constexpr) -> Any:
    """Return the sum of the weights (or the number) of keys up to ``key``, and the keys in (low, high] beside it."""
    total = tl.zeros([size], tl.float32)
    last, following = tl.full([size], -1, tl.int32), tl.full([size], LAST_KEY + 1, tl.int32)
    for start in range(0, row.num_tokens, size):
        keys = _keys(row, start, size)
        value = 1.0 if counts else _weight(keys)
        total += tl.where(keys <= key, value, 0.0)
        last = tl.maximum(last, tl.where((keys > low) & (keys <= key), keys, -1))
        following = tl.minimum(following, tl.where((keys > key) & (keys <= high), keys, LAST_KEY + 1))
    return tl.sum(total.to(tl.float64), 0), tl.max(last, 0), tl.min(following, 0)


@triton.jit
def _threshold(row, limit, high, counts: tl.constexpr, size: tl.constexpr) -> Any:
    """Return the first key up to ``high`` at which the sum reaches the limit, and the sum before it."""
    low = high * 0 - 1
    before = limit * 0.0
    while high - low > 1:
        middle = low + (high - low) // 2
        total, last, following = _sum(row, low, middle, high, counts, size)
        if total >= limit:
            high = last
        elif following > LAST_KEY:  # rounding: all keys together do not reach the limit
            low = high - 1
        else:
            low, before = following - 1, total
    return high, before


@triton.jit
def _draw(row, threshold, num_ties, last_key, u, size: tl.constexpr) -> Any:
    """Draw one of the kept tokens by inverse transform: keys below ``threshold``, and the first ``num_ties`` at it."""
    total, cumulated = u * 0.0, u * 0.0
    token = threshold * 0 - 1
    for part in range(2):  # sum the weights, then find the first token at which they exceed u of the sum
        ties = threshold * 0
        for start in range(0, row.num_tokens, size):
            keys = _keys(row, start, size)
            is_tie = (keys == threshold).to(tl.int32)
            remains = (keys < threshold) | ((is_tie > 0) & (ties + tl.cumsum(is_tie, 0) <= num_ties))
            remains = remains & (keys <= last_key)
            ties += tl.sum(is_tie, 0)
            weights = tl.where(remains, _weight(keys), 0.0).to(tl.float64)
            sum_here = tl.sum(weights, 0)
            if part == 0:
                total += sum_here
            elif token < 0:
                if cumulated + sum_here > u * total:
                    column = start + tl.arange(0, size)
                    exceeds = remains & (cumulated + tl.cumsum(weights, 0) > u * total)
                    found = tl.min(tl.where(exceeds, column, row.num_tokens), 0)
                    token = tl.where(found < row.num_tokens, found, token)
                cumulated += sum_here
    return token


@triton.jit
def _draw_tokens(logits, parameters, out, stride, vocab, num_tokens, size: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64)
    top, token, is_finite = _best(logits + at * stride, vocab, num_tokens, size)
    tau = tl.load(parameters + at * 5)
    if (tau > 0) & (is_finite > 0):
        row = _Row(logits + at * stride, num_tokens, top, tl.maximum(tau.to(tl.float32), 1e-30))
        top_k, top_p = tl.load(parameters + at * 5 + 1), tl.load(parameters + at * 5 + 2)
        min_p, u = tl.load(parameters + at * 5 + 3), tl.load(parameters + at * 5 + 4)
        threshold = token * 0 + LAST_KEY
        num_ties = token * 0 + num_tokens
        if top_k > 0:
            threshold, _ = _threshold(row, top_k, threshold, True, size)
        if top_p < 1:
            total, _, _ = _sum(row, -1, threshold, threshold, False, size)
            threshold, before = _threshold(row, top_p * total, threshold, False, size)
            # A tie is kept while the sum before it is below the limit.
            weight = tl.maximum(tl.exp(-threshold.to(tl.float32, bitcast=True)).to(tl.float64), 1e-300)
            num_ties = tl.maximum(tl.ceil((top_p * total - before) / weight), 1.0).to(tl.int32)
        last_key = token * 0 + LAST_KEY
        if min_p > 0:
            last_key = (-tl.log(min_p.to(tl.float32))).to(tl.int32, bitcast=True)
        drawn = _draw(row, threshold, num_ties, last_key, u, size)
        token = tl.where(drawn >= 0, drawn, token)
    tl.store(out + at * 2, token.to(tl.int64))
    tl.store(out + at * 2 + 1, is_finite.to(tl.int64))


def _launch(logits: Tensor) -> tuple[Tensor, int, int]:
    """Return the output, the numbers of a row that are handled at a time, and the warps."""
    size = min(8192, triton.next_power_of_2(logits.shape[1]))
    out = torch.empty((len(logits), 2), dtype=torch.int64, device=logits.device)
    return out, size, max(1, min(32, size // 256))


def best_tokens(logits: Tensor, num_tokens: int) -> Tensor:
    """Return the first best token of each row of [N, V] below ``num_tokens``, and 1 if the row is finite: [N, 2]."""
    out, size, warps = _launch(logits)
    _best_tokens[(len(logits),)](logits, out, logits.stride(0), logits.shape[1], num_tokens, size, num_warps=warps)
    return out


def draw_tokens(logits: Tensor, parameters: Tensor, num_tokens: int) -> Tensor:
    """Return a drawn token of each row of [N, V] below ``num_tokens``, and 1 if the row is finite: [N, 2].

    ``parameters`` [N, 5] float64: temperature (0: the best token), top-k (0: all), top-p, min-p, number in [0, 1).
    """
    out, size, warps = _launch(logits)
    _draw_tokens[(len(logits),)](
        logits, parameters, out, logits.stride(0), logits.shape[1], num_tokens, size, num_warps=warps
    )
    return out
