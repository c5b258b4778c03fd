"""Covering array: few cases that contain every pair of values of every two axes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

Case = dict[str, str]


def full(axes: Mapping[str, Sequence[str]]) -> list[Case]:
    """Return the full product."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def pairwise(
    axes: Mapping[str, Sequence[str]], seed: int = 0, tries: int = 50, order: Sequence[str] = ()
) -> list[Case]:
    """Build a covering array greedily.

    Each case is the best of ``tries`` random cases that contain one open pair.

    Args:
        axes: Axis to its values.
        seed: Seed of the random choices.
        tries: Random candidates per case.
        order: Values whose open pairs are taken first, in this order; the others follow by name.
    """
    ranks = {value: f"{rank:03}" for rank, value in enumerate(order)}
    draw = random.Random(seed)
    names = list(axes)
    open_pairs = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]}
    cases: list[Case] = []
    while open_pairs:
        a, x, b, y = min(open_pairs, key=lambda pair: [ranks.get(part, part) for part in pair])
        best: Case = {}
        gain = -1
        for _ in range(tries):
            case = {name: draw.choice(axes[name]) for name in names} | {a: x, b: y}
            closed = len(_pairs(case, names) & open_pairs)
            if closed > gain:
                best, gain = case, closed
        cases.append(best)
        open_pairs -= _pairs(best, names)
    return cases


def _pairs(case: Case, names: Sequence[str]) -> set[tuple[str, str, str, str]]:
    return {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)}
