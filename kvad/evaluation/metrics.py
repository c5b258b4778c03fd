"""Counts of an evaluation and the numbers derived from them; labeled texts to evaluate on. No torch.

*loss*: mean nats per scored token. *perplexity* = exp(loss). *bits per byte* = loss * tokens / (ln 2 * bytes):
``tokens`` and UTF-8 ``bytes`` are those of the whole text, so tokens that were not scored (the first of a window) count
as the mean does, and models with different tokenizers can be compared. *Perplexity per word* = exp(loss * tokens /
words), words being separated by white space; published word-level figures (WikiText, Penn Treebank) count the end of
every line as a word too. *Macro-F1*: the plain mean of F1 over the labels that occur in the gold labels or in the
predictions, 0 if precision or recall is undefined (scikit-learn's ``f1_score(average="macro", zero_division=0)``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvad.errors import DataError
from kvad.train import sources


@dataclass(frozen=True)
class Likelihood:
    """Sums over the scored tokens, and the size of the whole text, without opening tokens."""

    nats: float  # negative log-likelihood
    hits: int  # scored tokens that were the likeliest
    scored: int
    tokens: int
    bytes: int  # of UTF-8
    words: int
    lines: int
    unknown: int = 0  # tokens of the text that are UNK

    @property
    def loss(self) -> float:
        """Mean nats per scored token."""
        return self.nats / self.scored

    @property
    def perplexity(self) -> float:
        return _exp(self.loss)

    @property
    def accuracy(self) -> float:
        """Share of the scored tokens that were the likeliest."""
        return self.hits / self.scored

    @property
    def bits_per_byte(self) -> float:
        return self.loss * self.tokens / (math.log(2) * self.bytes) if self.bytes else math.nan

    @property
    def word_perplexity(self) -> float:
        """Perplexity per word; a line's end is no word."""
        return _exp(self.loss * self.tokens / self.words) if self.words else math.nan

    @property
    def word_perplexity_eos(self) -> float:
        """Perplexity per word; every line's end is a word."""
        words = self.words + self.lines
        return _exp(self.loss * self.tokens / words) if words else math.nan


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


# ---------------------------------------------------------------- labels


@dataclass(frozen=True)
class LabelScore:
    """``support``: gold labels; ``num_predicted``: predicted labels; ``hits``: both at once."""

    label: str
    support: int
    num_predicted: int
    hits: int

    @property
    def precision(self) -> float:
        return self.hits / self.num_predicted if self.num_predicted else 0.0

    @property
    def recall(self) -> float:
        return self.hits / self.support if self.support else 0.0

    @property
    def f1(self) -> float:
        """F1, 2 hits / (support + predicted): the harmonic mean of precision and recall."""
        return 2 * self.hits / (self.support + self.num_predicted)


@dataclass(frozen=True)
class LabelScores:
    """``hits`` of ``count`` labels were right; ``by_label``: the most frequent first."""

    count: int
    hits: int
    by_label: tuple[LabelScore, ...]

    @property
    def accuracy(self) -> float:
        return self.hits / self.count

    @property
    def macro_f1(self) -> float:
        return math.fsum(one.f1 for one in self.by_label) / len(self.by_label)


def score_labels(gold: Sequence[str], predicted: Sequence[str]) -> LabelScores:
    """Score predicted labels against gold labels, index by index, at least one.

    A label that is in neither is omitted, also from the mean.
    """
    assert len(gold) == len(predicted) > 0, "a prediction for every gold label"
    support, num_predicted = Counter(gold), Counter(predicted)
    hits = Counter(true for true, have in zip(gold, predicted, strict=True) if true == have)
    each = [
        LabelScore(label, support[label], num_predicted[label], hits[label]) for label in {*support, *num_predicted}
    ]
    each.sort(key=lambda one: (-one.support, one.label))
    return LabelScores(len(gold), sum(hits.values()), tuple(each))


# ---------------------------------------------------------------- whole texts


@dataclass(frozen=True)
class ExactMatch:
    """``hits`` of ``count`` texts equal their references."""

    hits: int
    count: int

    @property
    def accuracy(self) -> float:
        return self.hits / self.count


def count_exact_matches(predicted: Sequence[str], wanted: Sequence[str], *, lower: bool = False) -> ExactMatch:
    """Count texts that are equal without white space at both ends (``lower``: and in lower case), at least one."""

    def plain(text: str) -> str:
        return text.strip().lower() if lower else text.strip()

    assert len(predicted) == len(wanted) > 0, "an answer for every text"
    return ExactMatch(sum(plain(a) == plain(b) for a, b in zip(predicted, wanted, strict=True)), len(predicted))


Sentence = tuple[list[str], list[str]]  # words, tags


def read_tagged(paths: Sequence[Path], errors: str = "strict") -> list[Sentence]:
    """Read ``WORD<tab>TAG`` lines, an empty line between sentences; DataError names file and line."""
    sentences = [each.content for path in paths for each in sources.examples.read_sentences(path, errors)]
    if not sentences:
        raise DataError(f"no tagged words in {', '.join(map(str, paths))}")
    return [(list(sentence.words), list(sentence.tags)) for sentence in sentences]


def read_labeled(paths: Sequence[Path], errors: str = "strict") -> list[tuple[str, str]]:
    """Read (text, label) of ``LABEL<tab>TEXT`` lines or of JSON lines; DataError names file and line."""
    lines = [line for path in paths for line in sources.examples.read_labeled_lines(path, errors) if line is not None]
    if not lines:
        raise DataError(f"no labelled texts in {', '.join(map(str, paths))}")
    return [(line.content.text, line.content.label) for line in lines]
