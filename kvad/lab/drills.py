"""Pairs whose answer is known: numbers to copy, and numbers to reverse.

``copy`` is the task of the Annotated Transformer (Rush 2018, "A first example"): rows of ten numbers out of ten.
``reverse`` is that of JoeyNMT's tutorial (Kreutzer et al. 2019): rows of 1 to 25 numbers out of fifty, and of 1 to 30
where the model is judged, so that it meets rows longer than it ever saw.

Every number is a word; all of it is a function of a seed, the same with every Python.  No torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["DRILLS", "Drill", "Part"]


@dataclass(frozen=True)
class Part:
    """One file: so many pairs, of ``shortest`` to ``longest`` numbers."""

    name: str
    pairs: int
    shortest: int
    longest: int


@dataclass(frozen=True)
class Drill:
    """``numbers``: from ``low`` on, so many different ones; ``backwards``: the target is the source reversed."""

    low: int
    numbers: int
    backwards: bool
    parts: tuple[Part, ...]

    def pairs(self, part: Part, seed: int) -> Iterator[tuple[str, str]]:
        """Of one part, each (source, target)."""
        rng = random.Random(f"{seed} {part.name}")
        for _ in range(part.pairs):
            length = part.shortest + _below(rng, part.longest - part.shortest + 1)
            row = [str(self.low + _below(rng, self.numbers)) for _ in range(length)]
            yield " ".join(row), " ".join(reversed(row) if self.backwards else row)


def _below(rng: random.Random, bound: int) -> int:
    """From 0 to bound - 1.  Of Random's methods only random() promises the same numbers in every version."""
    return int(rng.random() * bound)


DRILLS = {
    "copy": Drill(
        1, 10, False, (Part("train", 32_000, 10, 10), Part("dev", 1_000, 10, 10), Part("test", 1_000, 10, 10))
    ),
    "reverse": Drill(
        0, 50, True, (Part("train", 40_000, 1, 25), Part("dev", 1_000, 1, 30), Part("test", 1_000, 1, 30))
    ),
}
