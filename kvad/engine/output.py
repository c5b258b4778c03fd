"""Printable results: output text of samples, completions, scores and encoder outputs."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvad import cache
from kvad import config as cfg
from kvad.engine import scheduling
from kvad.engine.scheduling import RequestMetrics, SamplingParams, StreamChunk, TokenLogprob
from kvad.errors import RequestError
from kvad.text import Detokenizer, StopStringMatcher, Tokenizer

if TYPE_CHECKING:
    from torch import Tensor


class OutputTextStream:
    """Incremental text of one sample; stop strings are matched once ``min_tokens`` are generated.

    ``stop_tokens``: tokens without text at the end of a sample.
    """

    def __init__(
        self, tokenizer: Tokenizer, sampling_params: SamplingParams, stop_tokens: frozenset[int] = frozenset()
    ) -> None:
        self.stop_tokens = stop_tokens
        self._detokenizer = Detokenizer(tokenizer, visible=sampling_params.visible_special_tokens)
        self._stops = StopStringMatcher(sampling_params.stop)
        self._min_tokens_left = sampling_params.min_tokens
        self._stopped = False

    def push(self, token: int | None) -> tuple[str, bool]:
        if token is None:
            return "", False
        text = self._detokenizer.push(token)
        self._min_tokens_left -= 1
        if self._min_tokens_left >= 0:
            return text, False
        text, stopped = self._stops.push(text)
        self._stopped = stopped is not None
        return text, self._stopped

    def flush(self) -> str:
        if self._stopped:
            return ""
        text, stopped = self._stops.push(self._detokenizer.flush())
        return text if stopped is not None else text + self._stops.flush()


def ends_with_stop_string(tokenizer: Tokenizer, sampling_params: SamplingParams, tokens: Sequence[int]) -> bool:
    """Return True if the last generated token completes a stop string, given that no earlier one did.

    The end of the text is decoded, and the whole text only if it is short or its spaces depend on earlier words.
    """
    stops, min_tokens = sampling_params.stop, sampling_params.min_tokens
    if len(tokens) <= min_tokens:
        return False
    end = _text_end(tokenizer, tokens, min_tokens, 4 * max(map(len, stops), default=0))
    if end is None:
        stream = OutputTextStream(tokenizer, sampling_params)
        return any(stream.push(token)[1] for token in tokens)
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(end)
    return any(stop in text for stop in stops)


def _text_end(tokenizer: Tokenizer, tokens: Sequence[int], first: int, num_bytes: int) -> bytes | None:
    """Return the bytes of the last token and at least ``num_bytes`` before it, from the start of a character.

    Returns None if they would begin before token ``first`` or with the text's first characters: there a tokenizer may
    drop spaces, so the token before them must have other characters.
    """
    if not tokenizer.has_token_bytes:
        return None
    end, last_size = b"", len(tokenizer.token_bytes(tokens[-1]))
    for index in range(len(tokens) - 1, max(first, 1) - 1, -1):
        end = tokenizer.token_bytes(tokens[index]) + end
        is_start = end[:1] < b"\x80" or end[:1] >= b"\xc0"  # of a character; others are in its middle
        if len(end) >= num_bytes + last_size and is_start and tokenizer.token_bytes(tokens[index - 1]).strip():
            return end
    return None


@dataclass(frozen=True)
class CompletionUsage:
    """Token counts; ``num_cached_tokens`` are prompt tokens that were not recomputed."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True)
class Timings:
    """Seconds from submission to the first token and to the end, and ``tokens_per_second`` after the first token.

    Measured on the scheduler's clock when tokens were computed, not when they were read. Without generated tokens,
    ``first_token`` equals ``total``.
    """

    first_token: float
    total: float
    tokens_per_second: float

    @staticmethod
    def from_metrics(metrics: RequestMetrics, num_tokens: int) -> Timings:
        """Return the times of an ended request with ``num_tokens`` generated tokens."""
        assert metrics.finished is not None, "the request has not ended"
        first = metrics.finished if metrics.first_token is None else metrics.first_token
        decode = metrics.finished - first
        rate = (num_tokens - 1) / decode if num_tokens > 1 and decode > 0 else 0.0
        return Timings(first - metrics.arrived, metrics.finished - metrics.arrived, rate)


@dataclass(frozen=True)
class CompletionChoice:
    """One continuation."""

    text: str
    token_ids: tuple[int, ...]  # with the stop token, if one was sampled, which is not part of the text
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: scheduling.request.FinishReason
    cumulative_logprob: float | None = None  # of a beam search: sum of log-probabilities over the length penalty
    limit: cache.config.LengthLimit | None = None  # the limit reached ("cache": its max_seq_len, "pool": no free block)


@dataclass(frozen=True)
class Completion:
    """Result of one prompt: sample 0 as attributes, all ``n`` samples in ``choices``."""

    choices: tuple[CompletionChoice, ...]
    usage: CompletionUsage
    timings: Timings
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    seed: int | None = None  # of the random numbers; None if none were drawn (greedy, beam search)

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


def assemble_completion(
    chunks: Iterable[StreamChunk], sampling_params: SamplingParams, num_prompt_tokens: int, metrics: RequestMetrics
) -> Completion:
    """Build a request's completion from its chunks, which are read to their end."""
    by_sample: list[list[StreamChunk]] = [[] for _ in range(sampling_params.n)]
    prompt_logprobs: list[TokenLogprob] = []
    for chunk in chunks:
        by_sample[chunk.sample_index].append(chunk)
        prompt_logprobs += chunk.prompt_logprobs
    choices = tuple(map(_choice, by_sample))
    num_output_tokens = sum(len(choice.token_ids) for choice in choices)
    usage = CompletionUsage(num_prompt_tokens, num_output_tokens, metrics.num_cached_tokens)
    timings = Timings.from_metrics(metrics, num_output_tokens)
    seed = sampling_params.seed if sampling_params.uses_seed else None
    return Completion(choices, usage, timings, tuple(prompt_logprobs), seed)


def _choice(chunks: Sequence[StreamChunk]) -> CompletionChoice:
    last = chunks[-1]
    assert last.finish_reason is not None, "the sample has not ended"
    return CompletionChoice(
        "".join(chunk.text for chunk in chunks),
        tuple(chunk.token_id for chunk in chunks if chunk.token_id is not None),
        tuple(chunk.logprob for chunk in chunks if chunk.logprob is not None),
        last.finish_reason,
        last.cumulative_logprob,
        last.limit,
    )


@dataclass(frozen=True)
class TextScore:
    """Log-probabilities of a text's tokens; the first token has none."""

    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()

    @property
    def total_logprob(self) -> float:
        return math.fsum(p for p in self.logprobs if p is not None)

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-probability over the scored tokens."""
        num_scored = sum(p is not None for p in self.logprobs)
        return math.exp(-self.total_logprob / num_scored) if num_scored else math.nan


@dataclass(frozen=True)
class Label:
    """A label and its probability; of a regression, its value."""

    label: str
    probability: float


@dataclass(frozen=True)
class TokenLabel:
    """A word of the text with the label of its first token."""

    word: str
    label: str
    probability: float


@dataclass(frozen=True)
class MaskPrediction:
    """Candidate for a mask: its token, its text, and the whole text with the mask replaced."""

    token: int
    text: str
    probability: float
    whole: str


def label_probabilities(scores: Tensor, head: cfg.ClassificationHeadConfig) -> Tensor:
    """Return probabilities [..., labels] for scores [..., labels]; the scores themselves of a regression."""
    activation = head.activation or ("sigmoid" if len(head.labels) == 1 else "softmax")
    if activation == "sigmoid":
        return scores.float().sigmoid()
    return scores.float().softmax(dim=-1) if activation == "softmax" else scores.float()


def rank_labels(scores: Tensor, head: cfg.ClassificationHeadConfig) -> tuple[Label, ...]:
    """Return all labels for scores [labels], most probable first."""
    labels, probabilities = head.labels, label_probabilities(scores, head)
    order = probabilities.argsort(descending=True).tolist()
    return tuple(Label(labels[index], float(probabilities[index])) for index in order)


def label_tokens(
    tokenizer: Tokenizer, ids: Sequence[int], scores: Tensor, head: cfg.ClassificationHeadConfig
) -> tuple[TokenLabel, ...]:
    """Label the words between spaces, given ids [T] and scores [T, labels]."""
    labels, probabilities = head.labels, label_probabilities(scores, head)
    best = probabilities.max(dim=-1)
    special = set(tokenizer.special_tokens.names().values())
    decode_token = tokenizer.incremental_decoder()
    words: list[tuple[str, int]] = []
    word_bytes = b""
    for index, token in enumerate(ids):
        if token in special:
            continue
        token_bytes = decode_token(token)
        if not words or token_bytes[:1].isspace():
            words.append(("", index))
            word_bytes = b""
        word_bytes += token_bytes
        words[-1] = word_bytes.decode("utf-8", errors="replace").strip(), words[-1][1]
    return tuple(
        TokenLabel(word, labels[int(best.indices[index])], float(best.values[index])) for word, index in words if word
    )


def fill_masks(
    tokenizer: Tokenizer, ids: Sequence[int], logits: Tensor, top: int
) -> tuple[tuple[MaskPrediction, ...], ...]:
    """Return ``top`` candidates per mask from ids [T] and logits [T, V]; raise RequestError without a mask."""
    mask = tokenizer.special_tokens.mask
    mask_indices = [index for index, token in enumerate(ids) if token == mask]
    if mask is None or not mask_indices:
        name = "" if mask is None else f" ({tokenizer.token_text(mask)})"
        raise RequestError(f"the text has no mask{name}", "Write the mask token at the position to fill.")
    predictions = []
    for index in mask_indices:
        probabilities = logits[index].float().softmax(dim=-1)
        values, tokens = probabilities.topk(min(top, len(probabilities)))
        candidates = []
        for token, probability in zip(tokens.tolist(), values.tolist(), strict=True):
            whole = tokenizer.decode([*ids[:index], token, *ids[index + 1 :]])
            candidates.append(MaskPrediction(token, tokenizer.decode([token]).strip(), probability, whole))
        predictions.append(tuple(candidates))
    return tuple(predictions)
