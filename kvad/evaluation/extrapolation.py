"""Length extrapolation: the loss on rows longer than those of training (Press et al. 2021, fig. 1).

At every length n the *same* tokens of a text are scored, so the text's own difficulty is the same everywhere: the last
``trained / 2`` tokens of rows of n tokens, each with at least ``n - trained / 2`` tokens before it. A model that
extrapolates loses nothing, or gains from the longer context. ``whole`` is the mean over all tokens of the same rows,
as in an evaluation in rows of n tokens without overlap.

    trained 4, longest 8:   n = 4   reads 4 .. 7     scores  6  7        n = 8   reads 0 .. 7     scores  6  7
                                    reads 6 .. 9     scores  8  9                reads 2 .. 9     scores  8  9

The model's limit does not apply. RoPE, ALiBi, T5's bias, sinusoids and models without positions are computed to any
length; learned positions end with their table, and lengths beyond it are omitted with a note. No cache is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvad import benchmarks
from kvad.config import ModelConfig
from kvad.errors import DataError, UsageError
from kvad.model import Transformer

MULTIPLES = (1.0, 2.0, 4.0, 8.0, 16.0)
Tick = Callable[[str, int, int], None]  # (label, tokens done, total)


@dataclass(frozen=True)
class LengthPoint:
    """Scores of rows of ``length`` tokens, ``multiple`` times the trained length."""

    multiple: float
    length: int
    scored: int  # tokens, the same at every length
    loss: float  # mean nats of them
    accuracy: float
    whole: float  # mean nats of all tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(700.0, self.loss))

    @property
    def whole_perplexity(self) -> float:
        return math.exp(min(700.0, self.whole))


@dataclass(frozen=True)
class LengthCurve:
    """A length curve."""

    positions: str  # the model's encoding
    trained: int
    limit: int
    rows: int  # of every length
    points: tuple[LengthPoint, ...]
    note: str = ""  # what was omitted


def position_kinds(config: ModelConfig) -> str:
    """Return the position encodings of a model, joined by a plus: rope, alibi, t5, learned, sinusoidal, none."""
    kinds = [config.embedding.position, *(layer.attention.position for layer in config.stack.layer_types.values())]
    return "+".join(dict.fromkeys(kind.kind for kind in kinds if kind is not None)) or "none"


def extrapolate(
    model: Transformer,
    texts: Sequence[Tensor],
    trained: int,
    *,
    multiples: Sequence[float] = MULTIPLES,
    most: int = 8_192,
    tick: Tick = lambda _what, _done, _total: None,
) -> LengthCurve:
    """Compute the curve of a decoder over texts [n] of int64 ids; those shorter than the longest row are omitted.

    Args:
        trained: Tokens of the training rows.
        most: Approximate number of scored tokens at each length.

    Raises:
        UsageError: For impossible multiples, or if not even the first length can be computed.
        DataError: If no text is long enough.
    """
    if not multiples or any(multiple <= 0 for multiple in multiples):
        raise UsageError("--length-multiples: numbers above 0, as in 1,2,4,8,16")
    lengths, left = {multiple: round(trained * multiple) for multiple in sorted(set(multiples))}, list[int]()
    table_end = benchmarks.scorers.max_row_length(model.config)
    if table_end is not None:
        table_end = max(table_end, model.config.max_seq_len)
        left = [length for length in lengths.values() if length > table_end]
        lengths = {multiple: length for multiple, length in lengths.items() if length <= table_end}
    if not lengths or min(lengths.values()) < 2:
        raise UsageError(f"--length-multiples: of a trained length of {trained} no row can be read", "larger ones")
    longest, scored = max(lengths.values()), min(trained, *lengths.values()) // 2
    ends = _ends(texts, longest, scored, most)
    scorer = benchmarks.scorers.UncachedScorer(model, longest)
    points = []
    for multiple, length in lengths.items():
        rows = [benchmarks.scorers.ScoredRow(texts[number][end - length : end]) for number, end in ends]
        points.append(_point(scorer, rows, multiple, scored, tick))
    omitted = ", ".join(f"{length:,}" for length in left)
    note = f"learned positions end at their table of {table_end:,}: no rows of {omitted} tokens" if left else ""
    return LengthCurve(position_kinds(model.config), trained, model.config.max_seq_len, len(ends), tuple(points), note)


def _ends(texts: Sequence[Tensor], longest: int, scored: int, most: int) -> list[tuple[int, int]]:
    """Return (text, end of its row), evenly spread; a row's last ``scored`` tokens are scored by no other row."""
    ends = [(number, end) for number, text in enumerate(texts) for end in range(longest, len(text) + 1, scored)]
    if not ends:
        have = max(map(len, texts), default=0)
        raise DataError(
            f"the longest text has {have:,} tokens, and a row takes {longest:,}",
            "longer texts (--document-unit joined makes one of all), or smaller --length-multiples",
        )
    count = max(1, min(len(ends), most // scored))
    return [ends[number * len(ends) // count] for number in range(count)]


def _point(
    scorer: benchmarks.scorers.TokenScorer,
    rows: Sequence[benchmarks.scorers.ScoredRow],
    multiple: float,
    scored: int,
    tick: Tick,
) -> LengthPoint:
    nats, all_nats, hits, length = 0.0, 0.0, 0, len(rows[0].tokens)
    at_once = max(1, (1 << 16) // length)
    for low in range(0, len(rows), at_once):
        for scores in scorer.score(rows[low : low + at_once]):
            nats, all_nats = nats + float(scores.nats[-scored:].sum()), all_nats + float(scores.nats.sum())
            hits += int(scores.correct[-scored:].sum())
        tick(f"{multiple:g} times the trained length", min(len(rows), low + at_once) * length, len(rows) * length)
    count = scored * len(rows)
    return LengthPoint(multiple, length, count, nats / count, hits / count, all_nats / (len(rows) * (length - 1)))


def join_texts(texts: Sequence[Tensor], opening: int | None) -> Tensor:
    """Join all texts to one stream, with the opening token, if any, before each."""
    first = torch.empty(0, dtype=torch.int64) if opening is None else torch.tensor([opening])
    return torch.cat([part for text in texts for part in (first, text)])
