"""Session: a text that continues over turns and processes, with its cached tokens.

Each turn reuses the state of the last one up to the first differing token. A saved session is one file, from which
another process continues without recomputing. Tokens that cannot be reused are computed, so the output never depends on
reuse; ``reused`` and ``missed`` report how much was reused and why not more.

If the engine caches prefixes, a turn leaves its blocks there, and nothing is copied before ``Session.save``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from kvad import storage
from kvad.cache import sessions
from kvad.cache.sessions import SequenceState, load_session, save_session
from kvad.engine.client import EngineClient, RequestHandle
from kvad.engine.output import Completion, assemble_completion
from kvad.engine.requests import PromptEncoder, PromptInput
from kvad.engine.scheduling import SamplingOptions, SamplingParams, StreamChunk
from kvad.errors import RequestError, SaveError, StorageError
from kvad.storage import REAL_FILE_SYSTEM, CacheFingerprint, FileSystem
from kvad.text import ids_of_text

# Fields of the cache configuration in a session file's header.
STORED_FORMAT_FIELDS = ("policy", "key_dtype", "value_dtype", "dtype", "rope_at", "endless", "overflow")
STORED_CACHE_FIELDS = (*STORED_FORMAT_FIELDS, "layout", "block_size", "max_seq_len")


class Session:
    """A continued text, created by ``LLM.session``; not safe for several threads."""

    def __init__(
        self,
        client: EngineClient,
        prompt_encoder: PromptEncoder,
        resolve_sampling: Callable[..., SamplingParams],
        *,
        path: Path | None = None,
        name: str = "",
        model: str = "",
        template: str = "",
        cache_salt: str | None = None,
        adapter: str = "",
        fs: FileSystem = REAL_FILE_SYSTEM,
    ) -> None:
        self.path, self.name, self.created = path, name, _now()
        self.cache_salt = cache_salt  # None: that of the file, else ""
        self.adapter = adapter  # computes all turns; "": the base
        self.tokens: list[int] = []  # the whole text
        self.source: list[int] | None = None  # token ids of the encoder input
        self.reused = 0  # tokens that the last turn did not recompute
        self.missed = ""  # why the last turn did not use the previous state
        self.restored = 0  # tokens whose keys and values were loaded from the file
        self.seed: int | None = None  # of the last sampled turn, the default of the next one
        self.draw_salt = 0  # number of times that the text was changed, so that a new reply draws other numbers
        self._drawn: list[int] = []  # prompt and all generated tokens of the last turn
        self._client, self._engine, self._prompt_encoder, self._fs = client, client.engine, prompt_encoder, fs
        self._resolve_sampling, self._model, self._template = resolve_sampling, model, template
        self.state: SequenceState | None = None  # from which the next turn starts
        self.captures_state = False  # at the end of each turn, so that ``save`` computes nothing
        self._is_captured = False  # the state is that of the last turn
        self._revisions: dict[Path, str | None] = {}  # of the files that were loaded or saved here

    def generate(
        self,
        text: PromptInput = "",
        sampling_params: SamplingParams | None = None,
        *,
        encoder_input: PromptInput | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Completion:
        """Append ``text`` and the model's continuation to the session.

        Args:
            text: Text or token ids; for an encoder-decoder, part of the target.
            sampling_params: Options; alternatively their fields as keywords.
            encoder_input: Input of an encoder-decoder, with the first turn only.
            **options: Fields of ``SamplingParams``.

        Raises:
            RequestError: If the turn cannot be served; the session is then unchanged.
        """
        tokens, source = self._prompt(text, encoder_input)
        handle = self.begin_turn(tokens, source, sampling_params, options)
        return assemble_completion(list(self._run(handle, source)), handle.sampling_params, len(tokens), handle.metrics)

    def stream(
        self,
        text: PromptInput = "",
        sampling_params: SamplingParams | None = None,
        *,
        encoder_input: PromptInput | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Generator[StreamChunk, None, None]:
        """Yield the turn of ``generate`` in chunks; closing the iterator ends it with the tokens so far."""
        return self._stream_turn(*self._prompt(text, encoder_input), sampling_params, options)

    def continue_from(
        self, tokens: Sequence[int], sampling_params: SamplingParams | None = None, **options: Unpack[SamplingOptions]
    ) -> Generator[StreamChunk, None, None]:
        """Continue from ``tokens``, the whole text; the rest of the session is dropped.

        The common prefix is reused. For chats, whose template rewrites the whole text in each turn.
        """
        all_tokens = list(tokens) if self.source is not None else self._prompt_encoder.encode_prompt(tokens)
        return self._stream_turn(all_tokens, self.source, sampling_params, options)

    def append(self, text: PromptInput, *, encoder_input: PromptInput | None = None) -> None:
        """Append ``text`` without generating; all but its last token is computed."""
        tokens, encoder_tokens = self._prompt(text, encoder_input)
        if len(tokens) > 1:
            self.state, (self.reused, self.missed) = self._compute_state(tokens[:-1], encoder_tokens)
        self.tokens, self.source = tokens, encoder_tokens

    def _stream_turn(
        self, tokens: list[int], source: list[int] | None, params: SamplingParams | None, options: Mapping[str, Any]
    ) -> Generator[StreamChunk, None, None]:
        yield from self._run(self.begin_turn(tokens, source, params, options), source)

    def _run(self, handle: RequestHandle, source: list[int] | None) -> Generator[StreamChunk, None, None]:
        """Yield a turn's chunks, and append them to the session unless there was an error."""
        chunks: list[StreamChunk] = []
        try:
            for chunk in handle.chunks():
                chunks.append(chunk)
                yield chunk
        except GeneratorExit:
            self.end_turn(handle, source, chunks)
            raise
        except BaseException:
            self._client.cancel([handle])
            raise
        self.end_turn(handle, source, chunks)

    def save(self, path: Path | None = None, *, overwrite: bool = False, **metadata: Any) -> int:
        """Write the session to its file or to ``path``, durably, and return the number of bytes.

        Args:
            path: Another file, which is replaced.
            overwrite: Replace the session's file although it was written elsewhere since it was loaded or saved here.
            **metadata: More entries of the file's header, plain JSON.

        Raises:
            RequestError: If the session is empty or has no file.
            StorageError: If an existing file is not a session, or was changed meanwhile.
            SaveError: If the file cannot be written; the previous file is unchanged.
        """
        path = self._file(path, "save")
        if not self.tokens:
            raise RequestError("the session is empty", "Generate something first.")
        self.draw_salt, self._drawn = self._next_salt(self.tokens), list(self.tokens)
        state = self.state = self._complete_state()
        fingerprint = self._cache_fingerprint(state.regime, state.salt)
        metadata_fields = {**self._metadata(), **metadata}
        is_known = path == self.path or path in self._revisions
        check = partial(self._check_unchanged, path) if is_known and not overwrite else None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            sessions.directory.check_overwritable(path, self._fs)
            nbytes = save_session(path, state, fingerprint, self.tokens, metadata_fields, self._fs, check)
        except OSError as error:
            raise SaveError(f"{path}: {error.strerror}", "The previous file is unchanged.") from error
        self._revisions[path] = metadata_fields["revision"]
        return nbytes

    def _check_unchanged(self, path: Path) -> None:
        """Raise StorageError if a file is not what this session loaded from it or saved to it."""
        try:
            writer = storage.container.read_header(path, self._fs).metadata.get("writer", {})
        except StorageError as error:
            if error.reason in ("missing", "damaged"):  # Nothing would be lost.
                return
            raise
        if writer.get("revision") != self._revisions.get(path, ""):
            hint = "It was not overwritten. Save under another name, or load it again."
            raise StorageError(f"{path}: changed meanwhile by another session", hint, reason="changed")

    def load(self, path: Path | None = None) -> None:
        """Replace the session by its file, or by ``path``.

        Raises:
            StorageError: If the file is missing, damaged, or belongs to another model or cache (the message names the
                difference); the session is then unchanged.
        """
        path = self._file(path, "load")
        self._client.check_open()
        kv_cache, engine_id = self._engine.kv_cache, self._engine.state_keeper.engine_id
        try:
            loaded_session = load_session(path, self._cache_fingerprint, kv_cache, engine_id, self._fs)
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}", "The session is unchanged.", reason="unread") from None
        metadata, state = loaded_session.metadata, loaded_session.state
        self._revisions[path] = metadata.get("revision")
        state = replace(state, adapter=self.adapter)  # the fingerprint has that of its factors
        self.tokens, self.state, self.restored = list(loaded_session.history), state, state.length
        self._is_captured = False
        self.source = None if state.encoder_tokens is None else list(state.encoder_tokens)
        self.seed, self.created = metadata.get("seed"), str(metadata.get("created", self.created))
        self.draw_salt, self._drawn = int(metadata.get("draw_salt", 0)), list(self.tokens)
        self.reused, self.missed = 0, ""
        if self.cache_salt is None:
            self.cache_salt = state.salt

    def _file(self, path: Path | None, method: str) -> Path:
        path = self.path if path is None else path
        if path is None:
            raise RequestError("this session has no file", f"Give {method}() a path, or session() a name.")
        return path

    @property
    def _keeps_state(self) -> bool:
        """True if a turn's state is captured; else the prefix cache has it, or with token offload it is recomputed."""
        manager = self._engine.kv_cache_manager
        return (self.captures_state or not manager.prefix_caching) and not manager.uses_offload

    def _cache_fingerprint(self, regime: str, salt: str) -> CacheFingerprint:
        fingerprint = self._engine.cache_fingerprint
        return fingerprint(regime, cache_salt=salt, template=self._template, adapter=self.adapter)

    def _metadata(self) -> dict[str, Any]:
        from kvad import __version__

        cache = self._engine.cache
        return {
            "name": self.name,
            "model": self._model,
            "created": self.created,
            "saved": _now(),
            "revision": os.urandom(8).hex(),
            "kvad": __version__,
            "seed": self.seed,
            "draw_salt": self.draw_salt,
            "cache": {name: getattr(cache, name) for name in STORED_CACHE_FIELDS},
        }

    def _prompt(self, text: PromptInput, encoder_input: PromptInput | None) -> tuple[list[int], list[int] | None]:
        """Return the whole token ids of the next turn, and the encoder's token ids."""
        encoder, encoder_tokens = self._prompt_encoder, self.source
        is_encoder_decoder = encoder.config.kind == "encoder-decoder"
        if encoder_input is not None and not is_encoder_decoder:
            raise RequestError("encoder_input: this model has no encoder input", "Omit it.")
        if encoder_input is not None and encoder_tokens is not None:
            raise RequestError("encoder_input: this session already has its encoder input", "Omit it.")
        if is_encoder_decoder and encoder_tokens is None:
            if encoder_input is None:
                raise RequestError("encoder_input: required by this model", "Give it with the first turn.")
            encoder_tokens = encoder.encode_source(encoder_input)
        if self.tokens:
            return [*self.tokens, *encoder.encode_continuation(text)], encoder_tokens
        tokens = encoder.encode_target(text or None) if is_encoder_decoder else encoder.encode_prompt(text)
        return tokens, encoder_tokens

    def begin_turn(
        self, tokens: list[int], source: list[int] | None, params: SamplingParams | None, options: Mapping[str, Any]
    ) -> RequestHandle:
        """Submit the whole text ``tokens`` with the encoder input ``source``; ``end_turn`` takes its chunks.

        Raises:
            RequestError: If the turn cannot be served; the session is then unchanged.
        """
        resolved = self._resolve_sampling(params, dict(options))
        if resolved.seed is None and resolved.uses_seed:
            resolved = replace(resolved, seed=self.seed).with_seed()
        if resolved.n > 1 or resolved.num_beams > 1:
            raise RequestError("a session is one sequence, without samples or beams", "Omit n= and num_beams=.")
        salt = self._next_salt(tokens)
        handle = self._submit(tokens, source, resolved, keep_state=self._keeps_state, draw_salt=salt)
        self.draw_salt, self._drawn = salt, tokens
        return handle

    def _next_salt(self, tokens: list[int]) -> int:
        """Return another salt if ``tokens`` do not continue those of the last turn, so that no draw is repeated."""
        return self.draw_salt + (tokens[: len(self._drawn)] != self._drawn)

    def _submit(
        self,
        tokens: list[int],
        source: list[int] | None,
        sampling_params: SamplingParams,
        *,
        keep_state: bool,
        draw_salt: int = 0,
    ) -> RequestHandle:
        queue = partial(
            self._engine.add_request,
            encoder_token_ids=source,
            resume=self.state,
            keep_state=keep_state,
            cache_salt=self.cache_salt or "",
            draw_salt=draw_salt,
            adapter=self.adapter,
        )
        return self._client.submit(partial(queue, tokens, sampling_params), sampling_params, tokens)

    def end_turn(self, handle: RequestHandle, source: list[int] | None, chunks: Sequence[StreamChunk]) -> None:
        """Append a turn's tokens to the session, also of one that was cancelled."""
        metrics, tokenizer = handle.metrics, self._prompt_encoder.tokenizer
        self.reused, self.missed = metrics.num_cached_tokens, metrics.resume_miss_reason
        self._is_captured = bool(chunks) and chunks[-1].finish_reason is not None and self._keeps_state
        if self._is_captured:
            self.state = self._client.pop_state(handle.request)
        tokens = [chunk.token_id for chunk in chunks if chunk.token_id is not None]
        text = "".join(chunk.text for chunk in chunks)
        new_tokens = tokens if tokenizer is None else ids_of_text(tokenizer, text, tokens)
        self.tokens, self.source = [*handle.token_ids, *new_tokens], source
        self._drawn = [*handle.token_ids, *tokens]
        self.seed = self.seed if handle.sampling_params.seed is None else handle.sampling_params.seed
        self._client.cancel([handle])

    def _complete_state(self) -> SequenceState:
        """Return a state of as many tokens as possible; missing ones are computed now."""
        state, caches_prefixes = self.state, self._engine.kv_cache_manager.prefix_caching
        is_prefix = state is not None and sessions.state.common_prefix_length(state, self.tokens) == state.length > 0
        if state is not None and is_prefix and (state.length >= len(self.tokens) - 1 or not caches_prefixes):
            return state
        if state is not None and self.captures_state and self._is_captured:  # a stop string was cut off the text
            return state
        return self._compute_state(self.tokens, self.source)[0]

    def _compute_state(self, tokens: list[int], source: list[int] | None) -> tuple[SequenceState, tuple[int, str]]:
        """Return the state of these tokens, the number of reused tokens, and why not more."""
        handle = self._submit(tokens, source, SamplingParams(max_tokens=0), keep_state=True)
        try:
            for _ in handle.chunks():
                pass
            reuse = handle.metrics.num_cached_tokens, handle.metrics.resume_miss_reason
            return self._client.pop_state(handle.request), reuse
        finally:
            self._client.cancel([handle])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
