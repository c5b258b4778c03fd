"""BLEU (Papineni et al. 2002) and chrF (Popovic 2015) of a corpus, by sacrebleu (Post 2018), with its signatures.

A BLEU without its signature cannot be compared: the tokenization changes it by points. Three forms:

*detokenized* (the default): plain texts, tokenized by sacrebleu's 13a; this is the figure to publish.
*tokenized, words*: both sides are split by kvad's rule (``text.words.split_words``) and compared at the spaces.
*tokenized, spaces*: both sides are tokenized already, as ``multi-bleu.perl`` takes them.

sacrebleu is the extra ``kvad[eval]``; ModuleNotFoundError if it is not installed. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from kvad.text import split_words

BleuTokenization = Literal["words", "spaces"]


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
    words, letters = bleu.corpus_score(outputs, [references]), chrf.corpus_score(outputs, [references])
    more: Any = words
    return BleuScores(
        bleu=float(words.score),
        chrf=float(letters.score),
        ratio=float(more.ratio),
        precisions=tuple(cast("list[float]", more.precisions)),
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
    )
