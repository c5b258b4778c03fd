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

from kvad.config import ModelConfig
from kvad.errors import DataError, UsageError
from kvad.evaluation.readers import ScoredRow, TokenScorer, UncachedScorer, max_row_length
from kvad.model import Transformer

MULTIPLES = (1.0, 2.0, 4.0, 8.0, 16.0)
Tick = Callable[[str, int, int], None]  # (label, tokens done, total)


@dataclass(frozen=True)
class LengthPoint:
    """Rows of ``length`` tokens, ``multiple`` times the trained length.

    Mean nats and share of hits of ``scored`` tokens, the same at every length; ``whole``: mean nats of all tokens.
    """

    multiple: float
    length: int
    scored: int
    loss: float
    accuracy: float
    whole: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(700.0, self.loss))

    @property
    def whole_perplexity(self) -> float:
        return math.exp(min(700.0, self.whole))


@dataclass(frozen=True)
class LengthCurve:
    """A length curve.

    ``positions``: the model's encoding; ``rows``: of every length; ``note``: what was omitted, or "".
    """

    positions: str
    trained: int
    limit: int
    rows: int
    points: tuple[LengthPoint, ...]
    note: str = ""


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
    """Compute the curve of a decoder over texts [n] (int64 ids.

    Texts shorter than the longest row are omitted).

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
    end = max_row_length(model.config)
    if end is not None:
        end = max(end, model.config.max_seq_len)
        left = [length for length in lengths.values() if length > end]
        lengths = {multiple: length for multiple, length in lengths.items() if length <= end}
    if not lengths or min(lengths.values()) < 2:
        raise UsageError(f"--length-multiples: of a trained length of {trained} no row can be read", "larger ones")
    longest, scored = max(lengths.values()), min(trained, *lengths.values()) // 2
    ends = _ends(texts, longest, scored, most)
    reader = UncachedScorer(model, longest)
    points = [_point(reader, texts, ends, multiple, length, scored, tick) for multiple, length in lengths.items()]
    note = "" if not left else f"learned positions end at their table of {end:,}: no rows of {_listed(left)} tokens"
    return LengthCurve(position_kinds(model.config), trained, model.config.max_seq_len, len(ends), tuple(points), note)


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(f"{length:,}" for length in lengths)


def _ends(texts: Sequence[Tensor], longest: int, scored: int, most: int) -> list[tuple[int, int]]:
    """Return (text, end of its row), evenly spread.

    Each row's last ``scored`` tokens are scored, by no other row.
    """
    found = [(number, end) for number, text in enumerate(texts) for end in range(longest, len(text) + 1, scored)]
    if not found:
        have = max(map(len, texts), default=0)
        raise DataError(
            f"the longest text has {have:,} tokens, and a row takes {longest:,}",
            "longer texts (--document-unit joined makes one of all), or smaller --length-multiples",
        )
    count = max(1, min(len(found), most // scored))
    return [found[number * len(found) // count] for number in range(count)]


def _point(
    reader: TokenScorer,
    texts: Sequence[Tensor],
    ends: Sequence[tuple[int, int]],
    multiple: float,
    length: int,
    scored: int,
    tick: Tick,
) -> LengthPoint:
    own, whole, hits, count, every = 0.0, 0.0, 0, 0, 0
    at_once = max(1, (1 << 16) // length)
    for low in range(0, len(ends), at_once):
        rows = [ScoredRow(texts[number][end - length : end]) for number, end in ends[low : low + at_once]]
        for read in reader.score(rows):
            own, whole = own + float(read.nats[-scored:].sum()), whole + float(read.nats.sum())
            hits, count, every = hits + int(read.correct[-scored:].sum()), count + scored, every + len(read.nats)
        tick(f"{multiple:g} times the trained length", min(len(ends), low + at_once) * length, len(ends) * length)
    return LengthPoint(multiple, length, count, own / count, hits / count, whole / every)


def join_texts(texts: Sequence[Tensor], opening: int | None) -> Tensor:
    """Join all texts to one stream, with the opening token, if any, before each."""
    first = torch.empty(0, dtype=torch.int64) if opening is None else torch.tensor([opening])
    return torch.cat([part for text in texts for part in (first, text)])
