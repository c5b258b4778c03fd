"""Pairs whose answer is known: numbers to copy, and numbers to reverse.

``copy`` is the task of the Annotated Transformer (Rush 2018, "A first example"): rows of ten numbers out of ten.
``reverse`` is that of JoeyNMT's tutorial (Kreutzer et al. 2019): rows of 1 to 25 numbers out of fifty, and of 1 to 30
where the model is judged, so that it meets rows longer than it ever saw.

Every number is a word; all of it is a function of a seed, the same with every Python.  No torch.

A small language in which everything worth remembering is said once, and texts of it to train on.

A sentence is *noise* (five of them, in turn), a *binding* of a key to a value or to an earlier key, or a *question*,
which is answered by following the bindings::

    the sky is blue . k17 v9 the sun is yellow . k200 k17 here we go . ? k200 k17 v9

So a model that has learned it answers ``? k`` by one look back (an induction head: Olsson et al. 2022), and a chain by
one look per link, which is how RULER (Hsieh et al. 2024) asks for the variables of a chain.  A key is bound once in a
text, so every question has one answer; its value may be anything, so nothing but the text can tell it.

Every word is one token of a word tokenizer, every text a line.  All of it is a function of a seed.  No torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


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


KEYS = tuple(f"k{number}" for number in range(128))
VALUES = tuple(f"v{number}" for number in range(64))
NOISE = (
    "the grass is green .",
    "the sky is blue .",
    "the sun is yellow .",
    "here we go .",
    "there and back again .",
)
LINKS = 3  # bindings of the longest chain
MIN_WORDS = 12  # words of a text
MAX_BINDINGS = 48
NOISE_RATIOS = (0.0, 0.0, 0.3, 0.6, 0.95)  # shares of a text's sentences
LINK_RATIO = 0.25  # share of the bindings that bind to a key
HELD_OUT_SEED = 1 << 40  # seeds from here on belong to nobody's training


def vocabulary() -> list[str]:
    """Every word, in a fixed order."""
    return [*dict.fromkeys(" ".join(NOISE).split()), "?", *KEYS, *VALUES]


def episodes(num_words: int, longest: int, seed: int) -> Iterator[str]:
    """Texts of ``num_words`` words in all, their lengths log-uniform up to ``longest``: as many short ones as long."""
    rng, total = random.Random(seed), 0
    while total < num_words:
        text = episode(round(MIN_WORDS * (longest / MIN_WORDS) ** rng.random()), rng.getrandbits(32))
        total += text.count(" ") + 1
        yield text


def episode(num_words: int, seed: int) -> str:
    """A text of ``num_words`` words, its last sentence cut where it must be."""
    rng = random.Random(seed)
    noise, turn = rng.choice(NOISE_RATIOS), rng.randrange(len(NOISE))
    most = min(MAX_BINDINGS, max(2, num_words // 6))
    left = rng.sample(KEYS, round(most ** rng.random()))
    chains: dict[str, tuple[str, ...]] = {}
    words: list[str] = []
    while len(words) < num_words:
        if left and (not chains or rng.random() < (1 - noise) / 2):
            key = left.pop()
            chains[key] = _bound(rng, chains)
            words += [key, chains[key][0]]
        elif rng.random() < 1 - noise:
            key = rng.choice(list(chains))
            words += ["?", key, *chains[key]]
        else:
            words += NOISE[turn % len(NOISE)].split()
            turn += 1
    return " ".join(words[:num_words])


def _bound(rng: random.Random, chains: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """A value, or an earlier key and all that it leads to."""
    if chains and rng.random() < LINK_RATIO:
        earlier = rng.choice(list(chains))
        if len(chains[earlier]) < LINKS:
            return (earlier, *chains[earlier])
    return (rng.choice(VALUES),)
