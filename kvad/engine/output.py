"""The text of one sample as its tokens come: whole characters, and the end where a stop string is found.

What a caller gets back: typed, frozen, printable results.

An encoder's numbers as answers: labels of words, labels of a text, tokens for its masks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvad import cache
from kvad.engine import scheduling
from kvad.engine.scheduling import SamplingParams, TokenLogprob
from kvad.errors import RequestError
from kvad.text import Detokenizer, StopStringMatcher, Tokenizer


class OutputTextStream:
    """One sample's text: bytes made whole, stop strings found across tokens once ``min_tokens`` have come."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._words, self._stops = Detokenizer(tokenizer), StopStringMatcher(sampling.stop)
        self._unstoppable = sampling.min_tokens
        self._stopped = False

    def push(self, token: int | None) -> tuple[str, bool]:
        if token is None:
            return "", False
        text = self._words.push(token)
        self._unstoppable -= 1
        if self._unstoppable >= 0:
            return text, False
        text, stopped = self._stops.push(text)
        self._stopped = stopped is not None
        return text, self._stopped

    def flush(self) -> str:
        if self._stopped:
            return ""
        text, stopped = self._stops.push(self._words.flush())
        return text if stopped is not None else text + self._stops.flush()


@dataclass(frozen=True)
class CompletionUsage:
    """``cached``: prompt tokens whose keys and values were reused instead of computed."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True)
class Timings:
    """Seconds from submission to the first token and to the end; ``tokens_per_second`` after the first token.

    They are the request's own, on the scheduler's clock: when its tokens were made, not when somebody fetched them.
    Where no token was asked for, ``first_token`` is ``total``.
    """

    first_token: float
    total: float
    tokens_per_second: float


@dataclass(frozen=True)
class CompletionChoice:
    """One continuation.  ``tokens`` holds every generated token, the stop token too; ``text`` never shows it.
    ``total``: of a beam search, its sum of log-probabilities over the length penalty.  ``limit``: where it ended by its
    length, whose limit that was: "max_tokens", "model", "cache" (its capacity) or "pool" (no block was left)."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: scheduling.request.FinishReason
    cumulative_logprob: float | None = None
    limit: cache.config.LengthLimit | None = None


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt: sample 0 through the plain attributes, all ``n`` of them in ``samples``."""

    choices: tuple[CompletionChoice, ...]
    usage: CompletionUsage
    timings: Timings
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> scheduling.request.FinishReason:
        return self.choices[0].finish_reason

    @property
    def limit(self) -> cache.config.LengthLimit | None:
        return self.choices[0].limit


@dataclass(frozen=True)
class TextScore:
    """Log-probabilities of a text's tokens; the first token has none, for nothing stands before it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()

    @property
    def total_logprob(self) -> float:
        return math.fsum(p for p in self.logprobs if p is not None)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability over the tokens that have one."""
        counted = sum(p is not None for p in self.logprobs)
        return math.exp(-self.total_logprob / counted) if counted else math.nan


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
