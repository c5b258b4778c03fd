"""Synthetic data with known answers: sequence pairs and lookup texts. No torch.

Pairs: ``copy`` is the task of the Annotated Transformer (Rush 2018, "A first example"): sequences of ten numbers out
of ten. ``reverse`` is that of JoeyNMT's tutorial (Kreutzer et al. 2019): 1 to 25 numbers out of fifty, and 1 to 30 in
the dev and test splits, so that the model is evaluated on longer sequences than it was trained on. Every number is a
word; all data is a function of a seed, the same in every Python version.

Lookup texts: a small language in which each fact occurs once. A sentence is *noise* (five of them, in turn), a
*binding* of a key to a value or to an earlier key, or a *question*, which is answered by following the bindings::

    the sky is blue . k17 v9 the sun is yellow . k200 k17 here we go . ? k200 k17 v9

A trained model answers ``? k`` by one lookup (an induction head: Olsson et al. 2022), and a chain by one lookup per
link, as in the variable tracking of RULER (Hsieh et al. 2024). A key is bound once in a text, so every question has
one answer; the value is random, so only the text determines it.

Every word is one token of a word tokenizer, every text is one line.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class SplitSpec:
    """One file of ``num_pairs`` pairs with ``shortest`` to ``longest`` numbers each."""

    name: str
    num_pairs: int
    shortest: int
    longest: int


@dataclass(frozen=True)
class SyntheticTask:
    """A task over ``numbers`` numbers from ``low`` on; ``reverse`` reverses the target."""

    low: int
    numbers: int
    reverse: bool
    parts: tuple[SplitSpec, ...]

    def pairs(self, split: SplitSpec, seed: int) -> Iterator[tuple[str, str]]:
        """Yield the (source, target) pairs of a split."""
        rng = random.Random(f"{seed} {split.name}")
        for _ in range(split.num_pairs):
            length = split.shortest + _below(rng, split.longest - split.shortest + 1)
            numbers = [str(self.low + _below(rng, self.numbers)) for _ in range(length)]
            yield " ".join(numbers), " ".join(reversed(numbers) if self.reverse else numbers)


def _below(rng: random.Random, bound: int) -> int:
    """Return a number from 0 to bound - 1.

    Of the methods of ``Random``, only random() is guaranteed to return the same numbers in every version.
    """
    return int(rng.random() * bound)


def _splits(num_train: int, train: tuple[int, int], held_out: tuple[int, int]) -> tuple[SplitSpec, ...]:
    """Return the splits with their shortest and longest lengths in training and otherwise."""
    return (SplitSpec("train", num_train, *train), *(SplitSpec(name, 1_000, *held_out) for name in ("dev", "test")))


SYNTHETIC_TASKS = {
    "copy": SyntheticTask(1, 10, False, _splits(32_000, (10, 10), (10, 10))),
    "reverse": SyntheticTask(0, 50, True, _splits(40_000, (1, 25), (1, 30))),
}


KEYS = tuple(f"k{number}" for number in range(128))
VALUES = tuple(f"v{number}" for number in range(64))
NOISE = ("the grass is green .", "the sky is blue .", "the sun is yellow .", "here we go .", "there and back again .")
LINKS = 3  # bindings of the longest chain
MIN_WORDS = 12  # words of the shortest text
MAX_BINDINGS = 48
NOISE_RATIOS = (0.0, 0.0, 0.3, 0.6, 0.95)  # fractions of a text's sentences
LINK_RATIO = 0.25  # fraction of the bindings that bind to a key
HELD_OUT_SEED = 1 << 40  # Seeds from here on are never used for training.


def vocabulary() -> list[str]:
    """Return every word in a fixed order."""
    return [*dict.fromkeys(" ".join(NOISE).split()), "?", *KEYS, *VALUES]


def episodes(num_words: int, longest: int, seed: int) -> Iterator[str]:
    """Yield texts of ``num_words`` words in total, with log-uniform lengths up to ``longest``."""
    rng, total = random.Random(seed), 0
    while total < num_words:
        text = episode(round(MIN_WORDS * (longest / MIN_WORDS) ** rng.random()), rng.getrandbits(32))
        total += text.count(" ") + 1
        yield text


def episode(num_words: int, seed: int) -> str:
    """Return a text of ``num_words`` words; its last sentence may be truncated."""
    rng = random.Random(seed)
    noise, turn = rng.choice(NOISE_RATIOS), rng.randrange(len(NOISE))
    max_bindings = min(MAX_BINDINGS, max(2, num_words // 6))
    unbound = rng.sample(KEYS, round(max_bindings ** rng.random()))
    chains: dict[str, tuple[str, ...]] = {}
    words: list[str] = []
    while len(words) < num_words:
        if unbound and (not chains or rng.random() < (1 - noise) / 2):
            key = unbound.pop()
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
    """Return a value, or an earlier key and its chain."""
    if chains and rng.random() < LINK_RATIO:
        earlier = rng.choice(list(chains))
        if len(chains[earlier]) < LINKS:
            return (earlier, *chains[earlier])
    return (rng.choice(VALUES),)
