"""Client of the engine: requests of all threads share one batch.

The thread that holds the lock runs steps for all. Cancelling a handle (a closed iterator, an exception) aborts the rest
of its request, also from a finalizer that runs during a step.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from kvad import text as text_lib
from kvad.cache.sessions import SequenceState
from kvad.checkpoint import GenerationConfig
from kvad.config import ModelConfig
from kvad.engine.engine import Engine
from kvad.engine.options import PromptInput, check_ids, check_source
from kvad.engine.output import Completion, assemble_completion
from kvad.engine.scheduling import RequestMetrics, SamplingParams, StreamChunk
from kvad.errors import EngineError, NumericalError, RequestError, format_count, suggest
from kvad.text import Tokenizer

T = TypeVar("T")


class EngineClient:
    """Submits requests to an engine and distributes their chunks."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.lock = threading.Lock()
        self._chunk_queues: dict[int, deque[StreamChunk]] = {}
        self._cancelled: deque[int] = deque()  # requests to abort; a finalizer may run during a step
        self.on_chunk: Callable[[StreamChunk], None] | None = None  # gets the chunks of requests without a handle
        self._closed = False

    def submit(self, queue: Callable[[], int], sampling_params: SamplingParams, token_ids: list[int]) -> RequestHandle:
        """Submit a request; ``queue`` adds it to the engine and returns its number."""
        with self.lock:
            self.check_open()
            self._abort_cancelled()
            request = queue()
            self._chunk_queues[request] = deque()
            return RequestHandle(self, request, sampling_params, token_ids, self.engine.metrics(request))

    def run_each(
        self,
        prompts: Any,
        submit: Callable[[Any], RequestHandle],
        convert: Callable[[RequestHandle], T],
        progress: Callable[[int, int], object] | None = None,
    ) -> Any:
        """Submit one or many prompts and convert their results; abort all of them on an exception.

        ``progress`` is called with (results, prompts) after every result.
        """
        is_single, prompt_list = normalize_prompts(prompts)
        handles: list[RequestHandle] = []
        try:
            for prompt in prompt_list:
                handles.append(submit(prompt))
            results = []
            for handle in handles:
                results.append(convert(handle))
                if progress is not None:
                    progress(len(results), len(handles))
        except BaseException:
            self.cancel(handles)
            raise
        return results[0] if is_single else results

    def next_chunk(self, request: int) -> StreamChunk:
        """Return the request's next chunk, running engine steps for all requests if needed."""
        while True:
            with self.lock:
                self.check_open()
                self._abort_cancelled()
                chunk_queue = self._chunk_queues[request]
                if chunk_queue:
                    return chunk_queue.popleft()
                if not self._run_step() and self.engine.idle:
                    raise EngineError(f"request {request} ended without a final chunk", "This is a bug in kvad.")

    def step(self) -> None:
        """Run one engine step and distribute its chunks."""
        with self.lock:
            self.check_open()
            self._abort_cancelled()
            self._run_step()

    def _run_step(self) -> list[StreamChunk]:
        chunks = self.engine.step()
        for chunk in chunks:
            if chunk.request in self._chunk_queues:
                self._chunk_queues[chunk.request].append(chunk)
            elif self.on_chunk is not None:
                self.on_chunk(chunk)
        return chunks

    def cancel(self, handles: Sequence[RequestHandle]) -> None:
        """Abort the rest of requests. May be called from anywhere, also from a finalizer during a step."""
        self._cancelled.extend(handle.request for handle in handles)
        self._abort_when_free()

    def _abort_when_free(self) -> None:
        """Abort cancelled requests, unless another thread has the lock: it does so before its last return."""
        while self._cancelled and self.lock.acquire(blocking=False):
            try:
                self._abort_cancelled()
            finally:
                self.lock.release()

    def pop_state(self, request: int) -> SequenceState:
        with self.lock:
            self.check_open()
            return self.engine.pop_state(request)

    def forget(self, request: int) -> None:
        with self.lock:
            self._chunk_queues.pop(request, None)
        self._abort_when_free()

    def check_open(self) -> None:
        if self._closed:
            raise EngineError("this LLM is closed", "Load it again.")

    def close(self) -> None:
        with self.lock:
            if not self._closed:
                self._closed = True
                self.engine.close()

    def _abort_cancelled(self) -> None:
        while self._cancelled:
            request = self._cancelled.popleft()
            if self._chunk_queues.pop(request, None) is not None and not self._closed:
                self.engine.abort_request(request)


@dataclass(eq=False)
class RequestHandle:
    """Collects the chunks of one request with the prompt (or encoder input) ``token_ids``."""

    client: EngineClient
    request: int
    sampling_params: SamplingParams
    token_ids: list[int]
    metrics: RequestMetrics

    def chunks(self) -> Iterator[StreamChunk]:
        num_samples_left = self.sampling_params.n
        while num_samples_left:
            chunk = self.client.next_chunk(self.request)
            if chunk.error is not None:
                error_type = NumericalError if chunk.error.startswith("numerical") else EngineError
                hint = "Check the weights: kvad doctor MODEL." if error_type is NumericalError else ""
                raise error_type(f"request {self.request}, sample {chunk.sample_index}: {chunk.error}", hint)
            num_samples_left -= chunk.finish_reason is not None
            yield chunk

    def encoder_output(self) -> Tensor:
        (chunk,) = self.chunks()
        self.client.forget(self.request)
        assert chunk.output is not None
        return chunk.output

    def result(self) -> Completion:
        completion = assemble_completion(self.chunks(), self.sampling_params, len(self.token_ids), self.metrics)
        self.client.forget(self.request)
        return completion


class EncodedPair(list[int]):
    """Token ids of two texts with special tokens.

    Attributes:
        token_types: Type of each token; None for a model without types.
    """

    def __init__(self, ids: Sequence[int], token_types: Sequence[int] | None) -> None:
        super().__init__(ids)
        self.token_types = token_types


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes prompts, encoder inputs and targets; without a tokenizer, token ids only.

    It combines the tokenizer's special tokens (``[CLS] x [SEP]``, ``<s> x``) with the checkpoint's start of targets,
    and checks lengths and ids before anything is queued.
    """

    config: ModelConfig
    tokenizer: Tokenizer | None
    generation: GenerationConfig
    endless: bool = False

    def encode_prompt(self, prompt: PromptInput, *, whole: bool = False) -> list[int]:
        """Return a decoder's prompt; an empty text becomes the opening token.

        It may be as long as a sequence, or, with ``whole``, as one forward pass.
        """
        tokens = self._ids(prompt, self.tokenizer, None)
        if not tokens:
            opening_token = self.opening_token()
            if opening_token is None:
                raise RequestError("prompt: must have at least 1 token, because this model has no opening token")
            return [opening_token]
        max_len = len(tokens) if self.endless and not whole else self.config.max_seq_len
        check_ids("prompt", tokens, self.config.vocab_size, max_len)
        return tokens

    def encode_chat(
        self,
        template: text_lib.chat_template.ChatTemplate | None,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> list[int]:
        """Return the token ids of a conversation in a chat template (``ChatTemplate.render``).

        Raises:
            RequestError: If there is no template.
            ChatTemplateError: If the template refuses the messages.
        """
        if template is None:
            raise RequestError("this model has no chat template", "Use generate() with a text, or /v1/completions.")
        rendered = template.render(
            messages, tools=tools, generation_prompt=generation_prompt, continue_final=continue_final
        )
        return self.require_tokenizer().encode(rendered.text, specials=True)

    def encode_continuation(self, text: PromptInput) -> list[int]:
        """Return the token ids of text appended to a prompt, without opening tokens."""
        if text and isinstance(text, str):
            tokens = self.require_tokenizer().encode(text)
        else:
            tokens = _integers(text or ())
        check_ids("text", tokens, self.config.vocab_size)
        return tokens

    def encode_source(self, text: PromptInput, language: str | None = None, *, specials: bool = False) -> list[int]:
        """Return an encoder's input with its special tokens; token ids are used unchanged.

        ``specials``: parse special tokens in the text, such as ``[MASK]``.
        """
        tokenizer = self.tokenizer
        if tokenizer is not None and tokenizer.source_tokenizer is not None:
            tokenizer = tokenizer.source_tokenizer
        if language is not None and not isinstance(text, str):
            raise RequestError(f"language {language!r}: requires text, got token ids", "Give a text.")
        tokens = self._ids(text, tokenizer, language, specials)
        if isinstance(text, str):
            tokens = self.generation.with_source_eos(tokens)
        if not tokens:
            raise RequestError("encoder input: must have at least 1 token, got 0")
        check_source(self.config, tokens)
        return tokens

    def encode_embedding(
        self, text: PromptInput, prompt_name: str | None = None, *, truncate: bool = False
    ) -> list[int]:
        """Return the input of an embedding: the prompt, if any, and the text, with special tokens.

        A text longer than the checkpoint's limit for embeddings is truncated, as in sentence-transformers, which is
        printed on stderr; another one that is too long only with ``truncate``. Token ids are used unchanged.

        Raises:
            RequestError: If the text is too long or has no tokens, or the prompt is unknown.
        """
        if not isinstance(text, str):
            return self.encode_source(text) if self.config.encoder is not None else self.encode_prompt(text, whole=True)
        prompts, name = self.generation.prompts, prompt_name or self.generation.prompt_name
        if name is not None and name not in prompts:
            hint = suggest(name, prompts) if prompts else "This model has none."
            raise RequestError(f"unknown prompt {name!r}", hint)
        tokenizer = self.require_tokenizer()
        tokenizer = tokenizer.source_tokenizer or tokenizer
        text = text if name is None else prompts[name] + text
        ids = tokenizer.encode(text.lower() if self.generation.lowercase else text)
        tokens = self.generation.with_source_eos(tokenizer.add_special_tokens(ids))
        source, max_embed_tokens = self.config.encoder_input, self.generation.max_embed_tokens
        limit = min(self.config.max_seq_len if source is None else source.max_seq_len, max_embed_tokens or len(tokens))
        if len(tokens) > limit and (truncate or max_embed_tokens is not None):
            print(f"kvad: {len(tokens):,} tokens were truncated to {limit:,}", file=sys.stderr)
            ids = ids[: max(0, limit - (len(tokens) - len(ids)))]
            tokens = self.generation.with_source_eos(tokenizer.add_special_tokens(ids))
        check_ids("text", tokens, self.config.vocab_size, limit)
        if not tokens:
            raise RequestError("text: must have at least 1 token, got 0")
        return tokens

    def encode_pair(self, first: str, second: str) -> EncodedPair:
        """Return an encoder's input of two texts, as the tokenizer's template joins them.

        Raises:
            RequestError: If the tokenizer or the model does not take two texts, or they are too long.
        """
        tokenizer, num_types = self.require_tokenizer(), self.config.embedding.num_token_types
        ids, token_types = tokenizer.add_pair_tokens(tokenizer.encode(first), tokenizer.encode(second))
        if num_types and max(token_types) >= num_types:
            message = f"this model has {format_count(num_types, 'token type')}, two texts need {max(token_types) + 1}"
            raise RequestError(message, "Give one text.")
        check_source(self.config, ids)
        return EncodedPair(ids, token_types if num_types else None)

    def encode_target(self, prefix: PromptInput | None, first: int | None = None) -> list[int]:
        """Return the start of a target: the start token, the token ``first``, and a forced prefix.

        ``first`` is a language token, for example. Token ids in ``prefix`` are the whole start.
        """
        if prefix is not None and not isinstance(prefix, str):
            tokens = _integers(prefix)
        else:
            start_token = self.generation.decoder_start_token_id
            if start_token is None:
                bos = self.generation.bos_token_id
                start_token = self.opening_token() if bos is None else bos
            if start_token is None:
                raise RequestError(
                    "this checkpoint has no start token for targets", "Pass target_prefix= as token ids."
                )
            tokens = [start_token]
            if prefix:
                tokens += [] if first is None else [first]
                tokens += self.require_tokenizer().encode(prefix)
        check_ids("target", tokens, self.config.vocab_size, self.config.max_seq_len)
        return tokens

    def language_token(self, code: str) -> int:
        """Return the token id that targets in this language begin with."""
        language_ids = {} if self.tokenizer is None else self.tokenizer.languages
        if code not in language_ids:
            raise RequestError(
                f"unknown language {code!r}", suggest(code, language_ids) if language_ids else "This model has none."
            )
        return language_ids[code]

    def opening_token(self) -> int | None:
        """Return the token that opens a text: the separator of documents, else BOS, else None."""
        specials = None if self.tokenizer is None else self.tokenizer.special_tokens
        if specials is not None and specials.separator is not None:
            return specials.separator
        if self.generation.bos_token_id is not None:
            return self.generation.bos_token_id
        return None if specials is None else specials.bos

    def _ids(
        self, text: PromptInput, tokenizer: Tokenizer | None, language: str | None, specials: bool = False
    ) -> list[int]:
        if not isinstance(text, str):
            return _integers(text)
        tokenizer = self.require_tokenizer() if tokenizer is None else tokenizer
        ids = tokenizer.encode(text, specials=specials)
        return tokenizer.add_special_tokens(ids, language=language) if ids else []

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; RequestError without one."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer", "Give token ids.")
        return self.tokenizer


def normalize_prompts(prompts: Any) -> tuple[bool, list[Any]]:
    """Return (is a single prompt, prompts) for a text, ids, an array of ids, or a list.

    An empty list has no prompts.
    """
    if isinstance(prompts, str):
        return True, [prompts]
    items = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(items, Iterable):
        raise RequestError(f"prompt: must be text or token ids, got {prompts!r}", "Give 'text', [1, 2] or a list.")
    items = items if isinstance(items, EncodedPair) else list(items)
    is_single = bool(items) and not isinstance(items[0], (str, Sequence)) and not hasattr(items[0], "tolist")
    return is_single, [items] if is_single else items


def _integers(prompt: Any) -> list[int]:
    """Return token ids as plain integers; raise RequestError for other values."""
    try:
        return [operator.index(token) for token in (prompt.tolist() if hasattr(prompt, "tolist") else prompt)]
    except TypeError as error:
        raise RequestError(f"prompt: must be text or token ids: {error}") from None
