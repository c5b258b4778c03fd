"""Counts of an evaluation and the numbers derived from them; labeled texts to evaluate on.

*loss*: mean nats per scored token. *perplexity* = exp(loss). *bits per byte* = loss * tokens / (ln 2 * bytes):
``tokens`` and UTF-8 ``bytes`` are those of the whole text, so tokens that were not scored (the first of a window) count
as the mean does, and models with different tokenizers can be compared. *Perplexity per word* = exp(loss * tokens /
words), words being separated by white space; published word-level figures (WikiText, Penn Treebank) count the end of
every line as a word too. *Macro-F1*: the plain mean of F1 over the labels that occur in the gold labels or in the
predictions, 0 if precision or recall is undefined (scikit-learn's ``f1_score(average="macro", zero_division=0)``).

BLEU (Papineni et al. 2002) and chrF (Popovic 2015) of a corpus are computed by sacrebleu (Post 2018), with its
signatures: the tokenization changes a BLEU by points. Three forms:

*detokenized* (the default): plain texts, tokenized by sacrebleu's 13a; this is the figure to publish.
*tokenized, words*: both sides are split by kvad's rule (``text.words.split_words``) and compared at the spaces.
*tokenized, spaces*: both sides are tokenized already, as ``multi-bleu.perl`` takes them.

sacrebleu is the extra ``eval``; ModuleNotFoundError if it is not installed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvad import benchmarks
from kvad.errors import DataError
from kvad.text import split_words
from kvad.train import sources

BleuTokenization = Literal["words", "spaces"]


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
        return benchmarks.scorers.perplexity(self.loss)

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
        return benchmarks.scorers.perplexity(self.loss * self.tokens / self.words) if self.words else math.nan

    @property
    def word_perplexity_eos(self) -> float:
        """Perplexity per word; every line's end is a word."""
        words = self.words + self.lines
        return benchmarks.scorers.perplexity(self.loss * self.tokens / words) if words else math.nan


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
    """Score predicted against gold labels, by index, at least one; a label in neither is omitted from the mean too."""
    assert len(gold) == len(predicted) > 0, "a prediction for every gold label"
    support, num_predicted = Counter(gold), Counter(predicted)
    hits = Counter(true for true, have in zip(gold, predicted, strict=True) if true == have)
    each = [
        LabelScore(label, support[label], num_predicted[label], hits[label]) for label in {*support, *num_predicted}
    ]
    each.sort(key=lambda one: (-one.support, one.label))
    return LabelScores(len(gold), sum(hits.values()), tuple(each))


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


@dataclass(frozen=True)
class BleuOptions:
    """Options of a text comparison."""

    tokenization: BleuTokenization | None = None  # None: detokenized
    lowercase: bool = False


@dataclass(frozen=True)
class BleuScores:
    """Scores from sacrebleu."""

    bleu: float  # 0 to 100, as chrf
    chrf: float
    ratio: float  # words of the output over words of the references
    precisions: tuple[float, ...]  # of 1 to 4 consecutive words, in percent
    bleu_signature: str
    chrf_signature: str


def check_sacrebleu() -> None:
    """Raise ModuleNotFoundError, naming sacrebleu, before anything is translated."""
    import sacrebleu  # noqa: F401


def compute_bleu(outputs: Sequence[str], references: Sequence[str], form: BleuOptions | None = None) -> BleuScores:
    """Compute BLEU and chrF of at least one text, with one reference each."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    assert len(outputs) == len(references) > 0, "a text for every reference"
    form = form or BleuOptions()
    if form.tokenization == "words":
        outputs, references = ([" ".join(split_words(text)) for text in texts] for texts in (outputs, references))
    # force: sacrebleu warns about texts that end in " ."; the options already state the tokenization.
    bleu = BLEU(lowercase=form.lowercase, tokenize=None if form.tokenization is None else "none", force=True)
    chrf = CHRF(lowercase=form.lowercase)
    words: Any = bleu.corpus_score(outputs, [references])
    return BleuScores(
        bleu=float(words.score),
        chrf=float(chrf.corpus_score(outputs, [references]).score),
        ratio=float(words.ratio),
        precisions=tuple(words.precisions),
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
    )


Sentence = tuple[list[str], list[str]]  # words, tags


def read_tagged(paths: Sequence[Path], errors: str = "strict") -> list[Sentence]:
    """Read ``WORD<tab>TAG`` lines, an empty line between sentences; DataError names file and line."""
    corpus = sources.examples.TagCorpus(errors=errors)
    sentences = [each.content for path in paths for each in corpus.read(path)]
    if not sentences:
        raise DataError(f"no tagged words in {', '.join(map(str, paths))}")
    return [(list(sentence.words), list(sentence.tags)) for sentence in sentences]


def read_labeled(paths: Sequence[Path], errors: str = "strict") -> list[tuple[str, str]]:
    """Read (text, label) of ``LABEL<tab>TEXT`` lines or of JSON lines; DataError names file and line."""
    corpus = sources.examples.LabeledCorpus(errors=errors)
    lines = [line for path in paths for line in corpus.read(path) if line is not None]
    if not lines:
        raise DataError(f"no labelled texts in {', '.join(map(str, paths))}")
    return [(line.content.text, line.content.label) for line in lines]
