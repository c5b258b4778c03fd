"""Many callers, one engine: requests of all threads share one batch, and whoever holds the lock drives it for all.

A :class:`Ticket` gathers one request's pieces.  Dropping a ticket (an iterator closed, an exception on the way) cancels
what is left of its request, also from a finaliser that runs in the middle of a step.

Texts as a model wants them: a decoder's prompts, an encoder-decoder's sources and targets, an encoder's rows.

A tokenizer knows its own frame (``[CLS] x [SEP]``, ``<s> x``); a checkpoint knows where targets begin
(:class:`Generation`).  Here the two meet, and lengths and ids are checked before anything is queued.
"""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvad import cache
from kvad.cache.sessions import SequenceState
from kvad.checkpoint import GenerationConfig
from kvad.config import ModelConfig
from kvad.engine.engine import Engine, StreamChunk
from kvad.engine.output import Completion, CompletionChoice, CompletionUsage, Timings
from kvad.engine.scheduling import RequestMetrics as EngineUsage
from kvad.engine.scheduling import SamplingParams, TokenLogprob
from kvad.errors import EngineError, NumericalError, RequestError, suggest
from kvad.text import Tokenizer


class EngineClient:
    """Takes requests and hands out their pieces."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.lock = threading.Lock()
        self._mail: dict[int, deque[StreamChunk]] = {}
        self._dropped: deque[int] = deque()  # requests to cancel: a finaliser may run in the middle of a step
        self._closed = False

    def submit(self, queue: Callable[[Engine], int], sampling: SamplingParams, num_prompt: int) -> RequestHandle:
        """``queue`` hands the request to the engine and returns its number."""
        with self.lock:
            self.check_open()
            self._cancel_dropped()
            request = queue(self.engine)
            self._mail[request] = deque()
            return RequestHandle(self, request, sampling, num_prompt, self.engine.metrics(request))

    def next_chunk(self, request: int) -> StreamChunk:
        """The request's next piece; whoever holds the lock steps the engine for everybody."""
        while True:
            with self.lock:
                self.check_open()
                self._cancel_dropped()
                box = self._mail[request]
                if box:
                    return box.popleft()
                pieces = self.engine.step()
                if not pieces and self.engine.idle:
                    raise EngineError(f"request {request} ended without saying so", "this is a bug in kvad")
                for piece in pieces:
                    if piece.request in self._mail:
                        self._mail[piece.request].append(piece)

    def cancel(self, tickets: Sequence[RequestHandle]) -> None:
        """Cancel what is left of requests.  May be called from anywhere, a finaliser inside a step included."""
        self._dropped.extend(ticket.request for ticket in tickets)
        if self.lock.acquire(blocking=False):
            try:
                self._cancel_dropped()
            finally:
                self.lock.release()

    def pop_state(self, request: int) -> SequenceState:
        """What a request has left (``Engine.kept``)."""
        with self.lock:
            self.check_open()
            return self.engine.pop_state(request)

    def forget(self, request: int) -> None:
        with self.lock:
            self._mail.pop(request, None)

    def check_open(self) -> None:
        if self._closed:
            raise EngineError("this LLM is closed", "load it again")

    def close(self) -> None:
        with self.lock:
            if not self._closed:
                self._closed = True
                self.engine.close()

    def _cancel_dropped(self) -> None:
        while self._dropped:
            request = self._dropped.popleft()
            if self._mail.pop(request, None) is not None and not self._closed:
                self.engine.abort_request(request)


class RequestHandle:
    """Gathers one request's pieces."""

    def __init__(
        self, client: EngineClient, request: int, sampling: SamplingParams, num_prompt: int, metrics: EngineUsage
    ) -> None:
        self.client, self.request, self.sampling = client, request, sampling
        self._num_prompt, self.metrics = num_prompt, metrics

    def chunks(self) -> Iterator[StreamChunk]:
        left = self.sampling.n
        while left:
            piece = self.client.next_chunk(self.request)
            if piece.error is not None:
                kind = NumericalError if piece.error.startswith("numerical") else EngineError
                raise kind(f"request {self.request}, sample {piece.sample_index}: {piece.error}")
            left -= piece.finish_reason is not None
            yield piece

    def encoder_output(self) -> Tensor:
        """What an encoder says of the text."""
        (piece,) = self.chunks()
        self.client.forget(self.request)
        assert piece.output is not None
        return piece.output

    def result(self) -> Completion:
        n = self.sampling.n
        texts, tokens = [""] * n, [list[int]() for _ in range(n)]
        scores, reasons = [list[TokenLogprob]() for _ in range(n)], ["stop"] * n
        totals: list[float | None] = [None] * n
        limits: list[cache.config.LengthLimit | None] = [None] * n
        prompt: list[TokenLogprob] = []
        for piece in self.chunks():
            texts[piece.sample_index] += piece.text
            prompt.extend(piece.prompt_logprobs)
            if piece.token_id is not None:
                tokens[piece.sample_index].append(piece.token_id)
            if piece.logprob is not None:
                scores[piece.sample_index].append(piece.logprob)
            if piece.finish_reason is not None:
                reasons[piece.sample_index], totals[piece.sample_index] = piece.finish_reason, piece.cumulative_logprob
                limits[piece.sample_index] = piece.limit
        cached = self.metrics.num_cached_tokens
        self.client.forget(self.request)
        samples = tuple(
            CompletionChoice(text, tuple(ids), tuple(score), reason, total, limit)
            for text, ids, score, reason, total, limit in zip(
                texts, tokens, scores, reasons, totals, limits, strict=True
            )
        )
        count = sum(map(len, tokens))
        return Completion(
            samples, CompletionUsage(self._num_prompt, count, cached), _timings(self.metrics, count), tuple(prompt)
        )


def _timings(usage: EngineUsage, count: int) -> Timings:
    """By the stamps of the engine: other requests may have kept the caller waiting."""
    assert usage.finished is not None, "the request has not ended"
    first = usage.finished if usage.first_token is None else usage.first_token
    decode = usage.finished - first
    rate = (count - 1) / decode if count > 1 and decode > 0 else 0.0
    return Timings(first - usage.arrived, usage.finished - usage.arrived, rate)


PromptInput = str | Sequence[int]


@dataclass(frozen=True)
class PromptEncoder:
    """``tokenizer`` None: ids only."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    generation: GenerationConfig
    endless: bool = False

    def encode_prompt(self, prompt: PromptInput, *, whole: bool = False) -> list[int]:
        """What a decoder continues; an empty text becomes the token that opens every text.  It may be as long as rows
        may; ``whole``: as the model sees at once."""
        tokens = self._ids(prompt, self.tokenizer, None)
        if not tokens:
            opening = self._opening()
            if opening is None:
                raise RequestError("the prompt is empty and this model has no opening token", "give at least one token")
            return [opening]
        _check(
            tokens,
            "prompt",
            self.config.vocab_size,
            len(tokens) if self.endless and not whole else self.config.max_seq_len,
        )
        return tokens

    def encode_continuation(self, text: PromptInput) -> list[int]:
        """What is added to a text that has begun: as it is spelled, without what opens a text."""
        tokens = self._encoder(self.tokenizer).encode(text) if text and isinstance(text, str) else _integers(text or ())
        _check(tokens, "text", self.config.vocab_size, len(tokens))
        return tokens

    def encode_source(self, text: PromptInput, language: str | None = None, *, specials: bool = False) -> list[int]:
        """What an encoder reads, in its frame; ids are taken as they are.  ``specials``: special tokens that the text
        spells (``[MASK]``) are read as such."""
        source, tokenizer = self.config.encoder_input, self.tokenizer
        if tokenizer is not None and tokenizer.source_tokenizer is not None:
            tokenizer = tokenizer.source_tokenizer
        if language is not None and not isinstance(text, str):
            raise RequestError(f"language {language!r}: the source is ids, taken as they are", "give a text")
        tokens = self._ids(text, tokenizer, language, specials)
        if isinstance(text, str):
            tokens = self.generation.with_source_eos(tokens)
        if not tokens:
            raise RequestError("the text is empty: an encoder reads at least one token")
        vocab = self.config.vocab_size if source is None or source.vocab_size is None else source.vocab_size
        _check(tokens, "source", vocab, self.config.max_seq_len if source is None else source.max_seq_len)
        return tokens

    def encode_target(self, prefix: PromptInput | None, first: int | None = None) -> list[int]:
        """How the target begins: the token that opens it, and a prefix forced on it, behind the token ``first`` (of a
        language, say).  Ids are the whole start."""
        if prefix is not None and not isinstance(prefix, str):
            tokens = _integers(prefix)
        else:
            start = self.generation.decoder_start_token_id
            if start is None:
                start = self.generation.bos_token_id if self.generation.bos_token_id is not None else self._opening()
            if start is None:
                raise RequestError("this checkpoint does not say how a target begins", "give prefix= as token ids")
            tokens = [start]
            if prefix:
                tokens += [] if first is None else [first]
                tokens += self._encoder(self.tokenizer).encode(prefix)
        _check(tokens, "target", self.config.vocab_size, self.config.max_seq_len)
        return tokens

    def language_token(self, code: str) -> int:
        """The id with which targets in this language begin."""
        known = {} if self.tokenizer is None else self.tokenizer.languages
        if code not in known:
            raise RequestError(f"unknown language {code!r}", suggest(code, known) if known else "this model has none")
        return known[code]

    def _opening(self) -> int | None:
        specials = None if self.tokenizer is None else self.tokenizer.special_tokens
        if specials is not None and specials.separator is not None:
            return specials.separator
        return (
            self.generation.bos_token_id
            if self.generation.bos_token_id is not None
            else specials.bos
            if specials
            else None
        )

    def _ids(
        self, text: PromptInput, tokenizer: Tokenizer | None, language: str | None, specials: bool = False
    ) -> list[int]:
        if not isinstance(text, str):
            return _integers(text)
        encoder = self._encoder(tokenizer)
        ids = encoder.encode(text, specials=specials)
        return encoder.add_special_tokens(ids, language=language) if ids else []

    def _encoder(self, tokenizer: Tokenizer | None) -> Tokenizer:
        if tokenizer is None:
            raise RequestError("this model came without a tokenizer", "give token ids")
        return tokenizer


def _check(tokens: Sequence[int], what: str, vocab: int, limit: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab:
            raise RequestError(f"{what}: token id {token} is outside the vocabulary of {vocab}")
    if len(tokens) > limit:
        raise RequestError(f"the {what} has {len(tokens)} tokens and the model's limit is {limit}", "shorten it")


def normalize_prompts(prompts: Any) -> tuple[bool, list[Any]]:
    """(whether it is one prompt, the prompts): a text, ids (a tensor or an array too), or a list of either.

    An empty list is one empty prompt.
    """
    if isinstance(prompts, str):
        return True, [prompts]
    items = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(items, Iterable):
        raise RequestError(f"prompt: expected text or token ids, found {prompts!r}", "give 'text', [1, 2] or a list")
    items = list(items)
    one = not items or (not isinstance(items[0], (str, Sequence)) and not hasattr(items[0], "tolist"))
    return one, [items] if one else items


def _integers(prompt: Any) -> list[int]:
    """Token ids as plain integers; RequestError for what is none."""
    try:
        return [operator.index(token) for token in (prompt.tolist() if hasattr(prompt, "tolist") else prompt)]
    except TypeError as error:
        raise RequestError(f"prompt: expected text or token ids: {error}") from None
