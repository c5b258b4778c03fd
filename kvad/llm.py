"""The three-line face.

    from kvad import LLM
    llm = LLM.load("runs/demo")
    print(llm.generate("def ", max_tokens=64, temperature=0).text)

Every method takes text or token ids, one or many.  Safe to call from several threads: requests of all threads share
one engine and one batch, and whichever thread holds the lock drives it.  As a context manager it frees its pool.
"""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import torch
from torch import Tensor

from kvad.cache.planning import available_bytes, plan_memory, require
from kvad.cache.sizing import CacheConfig
from kvad.checkpoint.native import DTYPES, Checkpoint, load, load_model
from kvad.config import ModelConfig
from kvad.engine.completion import Completion, Sample, TextScore, Timings, Usage
from kvad.engine.engine import Engine, Piece
from kvad.engine.request import Sampling, TokenScore
from kvad.engine.row import Usage as EngineUsage
from kvad.engine.trace import Trace, trace
from kvad.errors import ConfigError, EngineError, NumericalError, RequestError, UsageError, nearest
from kvad.model.fresh import Fresh
from kvad.model.transformer import Transformer
from kvad.step import Lane, Step
from kvad.text.tokenizer import Tokenizer

__all__ = ["LLM"]

Prompt = str | Sequence[int]


class LLM:
    """A model, its tokenizer and one engine.  Build it with :meth:`load`, or from parts (tests, research)."""

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer | None, cache: CacheConfig, *, budget: int = 2048
    ) -> None:
        self.model, self.tokenizer, self.cache = model.eval(), tokenizer, cache
        self.engine = Engine(self.model, cache, tokenizer=tokenizer, budget=budget)
        self._lock = threading.Lock()
        self._mail: dict[int, deque[Piece]] = {}
        self._dropped: deque[int] = deque()  # requests to cancel: a finaliser may run in the middle of a step
        self._closed = False

    @staticmethod
    def load(
        path: str | Path,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device = "cpu",
        memory: CacheConfig | None = None,
        cache_dtype: str | torch.dtype | None = None,
        **cache: Any,
    ) -> LLM:
        """Load a checkpoint folder.

        ``dtype``: what the model computes in (default: what the checkpoint stores).  ``memory``: the cache's
        configuration; or its fields as keywords (``rows=4, capacity=2048, layout="contiguous"``), its dtype as
        ``cache_dtype`` (default: the model's).  Dtypes go by name or as torch's own.  Raises CheckpointError for a
        folder that is not a whole checkpoint, UsageError for a device that is not there, ConfigError for a dtype or a
        cache that cannot be, MemoryPlanError (before it is allocated) for one that would not fit.
        """
        dtype, cache_dtype = _dtype_name("dtype", dtype), _dtype_name("cache.dtype", cache_dtype)
        where = _device(device)
        if memory is not None and (cache or cache_dtype is not None):
            raise RequestError(
                f"memory= and {next(iter(cache), 'cache_dtype')}= both given", "put it in the CacheConfig"
            )
        checkpoint = load(Path(path))
        computed = _computed_dtype(checkpoint, dtype, where)
        config = memory if memory is not None else default_cache(checkpoint.config, cache_dtype or computed, **cache)
        if where.type == "cpu":
            require(plan_memory(checkpoint.config, config, weights_dtype=computed), available_bytes())
        model, checkpoint = load_model(Path(path), dtype=dtype, device=where)
        return LLM(model, checkpoint.tokenizer, config)

    # ------------------------------------------------------------ text out

    @overload
    def generate(self, prompts: str, sampling: Sampling | None = None, **options: Any) -> Completion: ...
    @overload
    def generate(self, prompts: Sequence[int], sampling: Sampling | None = None, **options: Any) -> Completion: ...
    @overload
    def generate(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], sampling: Sampling | None = None, **options: Any
    ) -> list[Completion]: ...
    def generate(self, prompts: Any, sampling: Sampling | None = None, **options: Any) -> Completion | list[Completion]:
        """Continue one prompt, or many at once.  ``options`` are the fields of :class:`Sampling`.

        Raises RequestError for a prompt or an option that cannot be served, NumericalError when the model's logits
        are NaN or infinite.
        """
        one, many = _one_or_many(prompts)
        chosen = _sampling(sampling, options)
        collectors = []
        try:
            for prompt in many:
                collectors.append(self._submit(prompt, chosen))
            done = [collector.finish() for collector in collectors]
        except BaseException:
            self._drop(collectors)
            raise
        return done[0] if one else done

    def stream(self, prompt: Prompt, sampling: Sampling | None = None, **options: Any) -> Generator[Piece, None, None]:
        """Pieces of one prompt's samples as they come; closing the iterator cancels what is left."""
        collector = self._submit(prompt, _sampling(sampling, options))
        try:
            yield from collector.pieces()
        finally:
            self._drop([collector])

    # ------------------------------------------------------------ numbers out

    @overload
    def score(self, texts: str, *, top: int = 0) -> TextScore: ...  # type: ignore[overload-overlap]
    @overload
    def score(self, texts: Sequence[int], *, top: int = 0) -> TextScore: ...
    @overload
    def score(self, texts: Sequence[str] | Sequence[Sequence[int]], *, top: int = 0) -> list[TextScore]: ...
    def score(self, texts: Any, *, top: int = 0) -> TextScore | list[TextScore]:
        """Log-probability of every token given those before it, through the cache; ``top`` alternatives beside each."""
        one, many = _one_or_many(texts)
        sampling = Sampling(max_tokens=0, prompt_logprobs=top)
        collectors = []
        try:
            for text in many:
                collectors.append(self._submit(text, sampling))
            done = [_text_score(c.tokens, c.finish().prompt_logprobs) for c in collectors]
        except BaseException:
            self._drop(collectors)
            raise
        return done[0] if one else done

    @torch.inference_mode()
    def logits(self, prompt: Prompt) -> Tensor:
        """[T, V] without any cache: what the model says, and what every cache is held against."""
        self._alive()
        tokens = torch.tensor(self.encode(prompt), device=self.engine.device)
        every = torch.arange(len(tokens), device=tokens.device)
        limits = torch.full_like(every, len(tokens))
        step = Step(tokens, every, (Lane(1, len(tokens), len(tokens)),), every, limits=limits)
        return self.model.logits(self.model(step, Fresh(self.model.config)), every)

    def trace(
        self,
        prompt: Prompt,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        *,
        cached: bool = False,
    ) -> Trace:
        """Named q, k, v, scores, weights, head outputs and hidden states of the layers and heads asked for.

        ``cached``: through a paged memory made for this call, in the model's dtype.  Others' requests wait meanwhile.
        """
        self._alive()
        tokens = self.encode(prompt)
        pieces = [str(t) if self.tokenizer is None else self.tokenizer.token_text(t) for t in tokens]
        every = range(self.model.config.decoder.layers)
        chosen = list(every if layers is None else layers)
        for layer in chosen:
            if layer not in every:
                raise RequestError(f"layer {layer} is not one of 0..{every[-1]}")
            count = self.model.config.decoder.layer(layer).mixer.heads
            for head in heads or ():
                if not 0 <= head < count:
                    raise RequestError(f"head {head} is not one of 0..{count - 1} of layer {layer}")
        with self._lock:  # the trace watches the model itself
            return trace(self.model, tokens, pieces, layers=chosen, heads=heads, cached=cached)

    # ------------------------------------------------------------ text <-> ids

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; an empty text becomes the token that opens every document."""
        if not isinstance(prompt, str):
            tokens = _ids(prompt)
        elif self.tokenizer is None:
            raise RequestError("this model came without a tokenizer", "give token ids")
        else:
            tokens = self.tokenizer.encode(prompt)
        if tokens:
            self._check_length(tokens)
            return tokens
        opening = None if self.tokenizer is None else self.tokenizer.specials.separator
        if opening is None:
            raise RequestError("the prompt is empty and this model has no opening token", "give at least one token")
        return [opening]

    def _check_length(self, tokens: Sequence[int]) -> None:
        vocab, limit = self.model.config.vocab, self.model.config.limit
        for token in tokens:
            if not 0 <= token < vocab:
                raise RequestError(f"prompt: token id {token} is outside the vocabulary of {vocab}")
        if len(tokens) > limit:
            raise RequestError(f"the prompt has {len(tokens)} tokens and the model's limit is {limit}", "shorten it")

    # ------------------------------------------------------------ life

    def close(self) -> None:
        """Free the pool.  Calls made afterwards raise EngineError; closing twice is fine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ many callers, one engine

    def _submit(self, prompt: Prompt, sampling: Sampling) -> _Collector:
        tokens = self.encode(prompt)
        with self._lock:
            self._alive()
            self._cancel_dropped()
            request = self.engine.submit(tokens, sampling)
            self._mail[request] = deque()
            return _Collector(self, request, tokens, sampling, self.engine.usage(request))

    def _next(self, request: int) -> Piece:
        """The request's next piece; whoever holds the lock steps the engine for everybody."""
        while True:
            with self._lock:
                self._alive()
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

    def _drop(self, collectors: Sequence[_Collector]) -> None:
        """Cancel what is left of requests.  May be called from anywhere, a finaliser inside a step included."""
        self._dropped.extend(collector.request for collector in collectors)
        if self._lock.acquire(blocking=False):
            try:
                self._cancel_dropped()
            finally:
                self._lock.release()

    def _cancel_dropped(self) -> None:
        while self._dropped:
            request = self._dropped.popleft()
            if self._mail.pop(request, None) is not None and not self._closed:
                self.engine.cancel(request)

    def _forget(self, request: int) -> None:
        with self._lock:
            self._mail.pop(request, None)

    def _alive(self) -> None:
        if self._closed:
            raise EngineError("this LLM is closed", "load it again")


class _Collector:
    """Gathers one request's pieces into a Completion."""

    def __init__(self, llm: LLM, request: int, tokens: list[int], sampling: Sampling, usage: EngineUsage) -> None:
        self.llm, self.request, self.tokens, self.sampling, self.usage = llm, request, tokens, sampling, usage

    def pieces(self) -> Iterator[Piece]:
        left = self.sampling.n
        while left:
            piece = self.llm._next(self.request)
            if piece.error is not None:
                kind = NumericalError if piece.error.startswith("numerical") else EngineError
                raise kind(f"request {self.request}, sample {piece.sample}: {piece.error}")
            left -= piece.finish is not None
            yield piece

    def finish(self) -> Completion:
        n = self.sampling.n
        texts, tokens = [""] * n, [list[int]() for _ in range(n)]
        scores, reasons = [list[TokenScore]() for _ in range(n)], ["stop"] * n
        prompt: list[TokenScore] = []
        for piece in self.pieces():
            texts[piece.sample] += piece.text
            prompt.extend(piece.prompt)
            if piece.token is not None:
                tokens[piece.sample].append(piece.token)
            if piece.score is not None:
                scores[piece.sample].append(piece.score)
            if piece.finish is not None:
                reasons[piece.sample] = piece.finish
        cached = self.usage.cached
        self.llm._forget(self.request)
        samples = tuple(
            Sample(text, tuple(ids), tuple(score), reason)  # type: ignore[arg-type]
            for text, ids, score, reason in zip(texts, tokens, scores, reasons, strict=True)
        )
        count = sum(map(len, tokens))
        return Completion(samples, Usage(len(self.tokens), count, cached), _timings(self.usage, count), tuple(prompt))


def _timings(usage: EngineUsage, count: int) -> Timings:
    """By the stamps of the engine: other requests may have kept the collector waiting."""
    assert usage.finished is not None, "the request has not ended"
    first = usage.finished if usage.first_token is None else usage.first_token
    decode = usage.finished - first
    rate = (count - 1) / decode if count > 1 and decode > 0 else 0.0
    return Timings(first - usage.arrived, usage.finished - usage.arrived, rate)


def _dtype_name(where: str, dtype: Any) -> str | None:
    """``torch.float32`` and ``"float32"`` are "float32".  ConfigError for what no model computes in."""
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if name is None or (isinstance(name, str) and name in DTYPES):
        return name
    raise ConfigError(f"{where}: unknown dtype {name!r}", nearest(str(name), DTYPES))


def _device(device: Any) -> torch.device:
    """UsageError for what is no device, or none that is there."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise UsageError(f"unknown device {device!r}", "write 'cpu', 'cuda' or 'cuda:1'") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {str(found)!r}: this torch finds no CUDA device here", "leave device= out: the CPU")
    try:
        torch.zeros(1, device=found).item()
    except (AssertionError, RuntimeError) as error:  # NotImplementedError of a backend that is not built in, too
        reason = str(error).partition("\n")[0]
        raise UsageError(f"device {str(found)!r} cannot be used here: {reason}", "leave device= out: the CPU") from None
    return found


def _computed_dtype(checkpoint: Checkpoint, dtype: str | None, device: torch.device) -> str:
    """What the model will compute in: as asked, else as stored (float16 is widened on a CPU)."""
    if dtype is not None:
        return dtype
    embedding = checkpoint.tensors.get("embed.tokens.weight")  # mapped, not read; load_model names it when missing
    stored = "float32" if embedding is None else str(embedding.dtype).removeprefix("torch.")
    return "float32" if stored == "float16" and device.type == "cpu" else stored


def default_cache(model: ModelConfig, dtype: str, **fields: Any) -> CacheConfig:
    """Paged, in the dtype that the model computes in, eight rows of the model's limit."""
    known = [f.name for f in dataclasses.fields(CacheConfig)]
    for name in fields:
        if name not in known:
            raise RequestError(f"unknown option {name!r} of the cache", nearest(name, known))
    chosen: dict[str, Any] = {"capacity": model.limit, "dtype": dtype, **fields}
    if chosen["capacity"] > model.limit:
        raise RequestError(f"a context of {chosen['capacity']} tokens exceeds the model's limit of {model.limit}")
    return CacheConfig(**chosen)


def _sampling(sampling: Sampling | None, options: dict[str, Any]) -> Sampling:
    if sampling is None:
        return Sampling.of(**options)
    if not isinstance(sampling, Sampling):
        raise RequestError(f"sampling: expected a Sampling, found {sampling!r}", "give its fields as keywords")
    if options:
        raise RequestError(f"sampling= and {next(iter(options))}= both given", "put it in the Sampling")
    return sampling


def _one_or_many(prompts: Any) -> tuple[bool, list[Any]]:
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


def _ids(prompt: Any) -> list[int]:
    """Token ids as plain integers; RequestError for what is none."""
    try:
        return [operator.index(token) for token in (prompt.tolist() if hasattr(prompt, "tolist") else prompt)]
    except TypeError as error:
        raise RequestError(f"prompt: expected text or token ids: {error}") from None


def _text_score(tokens: Sequence[int], scores: Sequence[TokenScore]) -> TextScore:
    return TextScore(tuple(tokens), (None, *(s.logprob for s in scores)), ((), *(s.top for s in scores)))
