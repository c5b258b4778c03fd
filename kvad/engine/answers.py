"""An encoder's numbers as answers: labels of words, labels of a text, tokens for its masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvad.errors import RequestError
from kvad.text.tokenizer import Tokenizer

__all__ = ["MaskPrediction", "Label", "TokenLabel", "fill_masks", "rank_labels", "label_tokens"]


@dataclass(frozen=True)
class Label:
    """A label and its probability."""

    label: str
    probability: float


@dataclass(frozen=True)
class TokenLabel:
    """A word of the text, labelled as its first token is."""

    word: str
    label: str
    probability: float


@dataclass(frozen=True)
class MaskPrediction:
    """A candidate for a mask: its token, its text, and the whole text with it in place."""

    token: int
    text: str
    probability: float
    whole: str


def rank_labels(scores: Tensor, labels: Sequence[str]) -> tuple[Label, ...]:
    """scores [labels] -> all labels, the likeliest first."""
    chances = scores.float().softmax(dim=-1)
    order = chances.argsort(descending=True).tolist()
    return tuple(Label(labels[number], float(chances[number])) for number in order)


def label_tokens(
    tokenizer: Tokenizer, ids: Sequence[int], scores: Tensor, labels: Sequence[str]
) -> tuple[TokenLabel, ...]:
    """ids [T], scores [T, labels] -> the words between spaces, special tokens left out."""
    chances = scores.float().softmax(dim=-1)
    best = chances.max(dim=-1)
    special = set(tokenizer.special_tokens.names().values())
    said = tokenizer.incremental_decoder()
    words: list[tuple[str, int]] = []
    raw = b""
    for place, token in enumerate(ids):
        if token in special:
            continue
        added = said(token)
        if not words or added[:1].isspace():
            words.append(("", place))
            raw = b""
        raw += added
        words[-1] = raw.decode("utf-8", errors="replace").strip(), words[-1][1]
    return tuple(
        TokenLabel(word, labels[int(best.indices[place])], float(best.values[place])) for word, place in words if word
    )


def fill_masks(
    tokenizer: Tokenizer, ids: Sequence[int], logits: Tensor, top: int
) -> tuple[tuple[MaskPrediction, ...], ...]:
    """ids [T], logits [T, V] -> per mask of the text, its ``top`` candidates.  RequestError where there is no mask."""
    mask = tokenizer.special_tokens.mask
    places = [place for place, token in enumerate(ids) if token == mask]
    if mask is None or not places:
        name = "" if mask is None else f" ({tokenizer.token_text(mask)})"
        raise RequestError(f"the text has no mask{name}", "write the mask token where a word is to be found")
    found = []
    for place in places:
        chances = logits[place].float().softmax(dim=-1)
        values, tokens = chances.topk(min(top, len(chances)))
        rows = []
        for token, chance in zip(tokens.tolist(), values.tolist(), strict=True):
            whole = tokenizer.decode([*ids[:place], token, *ids[place + 1 :]])
            rows.append(MaskPrediction(token, tokenizer.decode([token]).strip(), chance, whole))
        found.append(tuple(rows))
    return tuple(found)
