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

__all__ = ["SYNTHETIC_TASKS", "SyntheticTask", "SplitSpec"]


@dataclass(frozen=True)
class SplitSpec:
    """One file: so many pairs, of ``shortest`` to ``longest`` numbers."""

    name: str
    num_pairs: int
    shortest: int
    longest: int


@dataclass(frozen=True)
class SyntheticTask:
    """``numbers``: from ``low`` on, so many different ones; ``backwards``: the target is the source reversed."""

    low: int
    numbers: int
    reverse: bool
    parts: tuple[SplitSpec, ...]

    def pairs(self, part: SplitSpec, seed: int) -> Iterator[tuple[str, str]]:
        """Of one part, each (source, target)."""
        rng = random.Random(f"{seed} {part.name}")
        for _ in range(part.num_pairs):
            length = part.shortest + _below(rng, part.longest - part.shortest + 1)
            row = [str(self.low + _below(rng, self.numbers)) for _ in range(length)]
            yield " ".join(row), " ".join(reversed(row) if self.reverse else row)


def _below(rng: random.Random, bound: int) -> int:
    """From 0 to bound - 1.  Of Random's methods only random() promises the same numbers in every version."""
    return int(rng.random() * bound)


SYNTHETIC_TASKS = {
    "copy": SyntheticTask(
        1,
        10,
        False,
        (SplitSpec("train", 32_000, 10, 10), SplitSpec("dev", 1_000, 10, 10), SplitSpec("test", 1_000, 10, 10)),
    ),
    "reverse": SyntheticTask(
        0,
        50,
        True,
        (SplitSpec("train", 40_000, 1, 25), SplitSpec("dev", 1_000, 1, 30), SplitSpec("test", 1_000, 1, 30)),
    ),
}
