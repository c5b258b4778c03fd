"""What a forward pass costs, from shapes alone: floating point operations and bytes, with a cache and without one.

A product of [m, k] and [k, n] is 2 m k n operations.  Attention is counted as the rectangle that is computed, new
tokens x slots, and not as the triangle that is visible: so counts torch's own counter (the test holds them together),
and so does document 004, section 4.7.  Norms, rotations, softmax and activations are not products and are left out.

Bytes: every weight matrix once per pass, and the keys and values that are written and read.  Activations are left out.

Over N tokens from an opening token, recomputation costs (2N + 1) / 3 times the attention (the sum of t^2 over the sum
of t) and (N + 1) / 2 times the projections (the sum of t over N) of a cache: 4.7's 2N / 3 and N / 2.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvad.config import Gated, ModelConfig, mixers

__all__ = ["Cost", "Gain", "cached_pass", "formula", "fresh_pass", "generation"]


class Cost(NamedTuple):
    """``projections``: q, k, v, out and the MLPs; ``attention``: q.k and weights.v; ``head``: the logits; in FLOPs.
    ``weights``, ``written`` and ``read`` (keys and values): bytes."""

    projections: int = 0
    attention: int = 0
    head: int = 0
    weights: int = 0
    written: int = 0
    read: int = 0

    @property
    def flops(self) -> int:
        return self.projections + self.attention + self.head

    @property
    def bytes(self) -> int:
        return self.weights + self.written + self.read

    def plus(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


class Gain(NamedTuple):
    """How many times more a recomputation costs than a cache."""

    attention: float
    projections: float


def fresh_pass(config: ModelConfig, length: int, *, element: int = 4) -> Cost:
    """All ``length`` tokens of a row at once, with logits for the last: one token's worth of recomputation.

    ``element``: bytes per number.  A window is a mask here: nothing is saved by it.
    """
    return _pass(config, length, [length] * config.decoder.layers, element, element)


def cached_pass(config: ModelConfig, new: int, length: int, *, element: int = 4, stored: int | None = None) -> Cost:
    """The last ``new`` tokens of a row that is ``length`` tokens long after them, with logits for the last.

    ``stored``: bytes per number in the cache.  A layer with a window reads its last ``window + new - 1`` tokens.
    """
    slots = [length if m.window is None else min(length, m.window + new - 1) for m in mixers(config)]
    return _pass(config, new, slots, element, element if stored is None else stored)


def generation(
    config: ModelConfig, prompt: int, new: int, *, element: int = 4, stored: int | None = None
) -> tuple[Cost, Cost]:
    """(with a cache, by recomputation): what it costs to generate ``new`` tokens after a prompt, greedily."""
    cached = [cached_pass(config, prompt, prompt, element=element, stored=stored)]
    cached += [cached_pass(config, 1, prompt + i, element=element, stored=stored) for i in range(1, new)]
    return _sum(cached), _sum(fresh_pass(config, prompt + i, element=element) for i in range(new))


def formula(tokens: int) -> Gain:
    """Document 004, section 4.7, for ``tokens`` tokens from an opening token."""
    return Gain(2 * tokens / 3, tokens / 2)


def _sum(costs: Iterable[Cost]) -> Cost:
    total = Cost()
    for cost in costs:
        total = total.plus(cost)
    return total


def _pass(config: ModelConfig, new: int, slots: list[int], element: int, stored: int) -> Cost:
    projections = attention = weights = written = read = 0
    for index, (spec, seen) in enumerate(zip(mixers(config), slots, strict=True)):
        layer = config.decoder.layer(index)
        heads, per_token = layer.mixer.heads, spec.kv_heads * (spec.head_dim + spec.value_dim)
        attend = config.width * (heads * (spec.head_dim + spec.value_dim) + per_token)
        mlp = (3 if isinstance(layer.mlp, Gated) else 2) * config.width * layer.mlp.hidden
        projections += 2 * new * (attend + mlp)
        attention += 2 * new * seen * heads * (spec.head_dim + spec.value_dim)
        weights += (attend + mlp) * element
        written += new * per_token * stored
        read += seen * per_token * stored
    head = config.width * config.vocab
    return Cost(projections, attention, 2 * head, weights + head * element, written, read)
