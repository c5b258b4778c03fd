"""A text that goes on from turn to turn, and from process to process: its tokens, and what the cache holds of them.

Each turn begins from what the last one left, as far as the tokens agree; what is saved is one file
(``cache/session.py``) from which another process goes on without computing it again.  Whatever cannot be reused is
computed: a turn says what it would say if all of it were, and ``reused`` and ``missed`` say truly what was there and
why not.

Where the engine finds prefixes, a turn leaves its blocks there, and nothing is copied out before :meth:`Session.save`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from kvad.cache import sessions
from kvad.cache.sessions import SequenceState, load_session, save_session
from kvad.engine.client import EngineClient, PromptEncoder, PromptInput, RequestHandle
from kvad.engine.engine import Engine, StreamChunk
from kvad.engine.output import Completion
from kvad.engine.scheduling import SamplingParams
from kvad.errors import RequestError, SaveError, StorageError
from kvad.storage import REAL_FILE_SYSTEM, CacheFingerprint, FileSystem
from kvad.text import ids_of_text


class _Turn(NamedTuple):
    ticket: RequestHandle
    tokens: list[int]
    source: list[int] | None
    seed: int


class Session:
    """Make it with ``LLM.session``.  For one thread.

    ``tokens``: all of its text; ``source``: what an encoder-decoder's answers.  Of the last turn: ``reused``, tokens
    that needed no computing, and ``missed``, why what was kept was of no use.  ``restored``: tokens whose keys and
    values the file had.  ``seed``: of the last turn, the next one's default.
    """

    def __init__(
        self,
        client: EngineClient,
        prompt_encoder: PromptEncoder,
        sampling: Callable[..., SamplingParams],
        *,
        path: Path | None = None,
        name: str = "",
        model: str = "",
        template: str = "",
        disk: FileSystem = REAL_FILE_SYSTEM,
    ) -> None:
        self.path, self.name = path, name
        self.tokens: list[int] = []
        self.source: list[int] | None = None
        self.reused = self.restored = self.seed = 0
        self.missed = ""
        self.created = _now()
        self._client, self._prompt_encoder, self._sampling, self._disk = client, prompt_encoder, sampling, disk
        self._model, self._template = model, template
        self._state: SequenceState | None = None

    # ------------------------------------------------------------ turns

    def generate(
        self,
        text: PromptInput = "",
        sampling: SamplingParams | None = None,
        *,
        source: PromptInput | None = None,
        **options: Any,
    ) -> Completion:
        """Add ``text`` to the session and let the model go on; both are part of it then.

        ``source``: of an encoder-decoder, with the first turn; the text is the target's then.  ``options``: the fields
        of :class:`Sampling`.  RequestError for what cannot be served; nothing is changed by a turn that fails.
        """
        turn = self._begin(*self._prompt(text, source), sampling, options)
        try:
            done = turn.ticket.result()
        except BaseException:
            self._client.cancel([turn.ticket])
            raise
        self._end(turn, done.text, done.tokens, whole=True)
        return done

    def stream(
        self,
        text: PromptInput = "",
        sampling: SamplingParams | None = None,
        *,
        source: PromptInput | None = None,
        **options: Any,
    ) -> Generator[StreamChunk, None, None]:
        """The same, in pieces as they come; closing the iterator ends the turn with what there is."""
        return self._streamed(*self._prompt(text, source), sampling, options)

    def continue_from(
        self, tokens: Sequence[int], sampling: SamplingParams | None = None, **options: Any
    ) -> Generator[StreamChunk, None, None]:
        """Go on from ``tokens``, the whole text: what of it the session has is reused, the rest of the session is
        forgotten (none: what opens every text).  For chats, whose template writes the text anew at each turn."""
        whole = list(tokens) if self.source is not None else self._prompt_encoder.encode_prompt(tokens)
        return self._streamed(whole, self.source, sampling, options)

    def append(self, text: PromptInput, *, source: PromptInput | None = None) -> None:
        """Add ``text`` without going on from it: all but its last token is computed, which a continuation needs."""
        tokens, read = self._prompt(text, source)
        if len(tokens) > 1:
            self._state, (self.reused, self.missed) = self._computed(tokens[:-1], read)
        self.tokens, self.source = tokens, read

    def _streamed(
        self, tokens: list[int], source: list[int] | None, sampling: SamplingParams | None, options: Mapping[str, Any]
    ) -> Generator[StreamChunk, None, None]:
        turn = self._begin(tokens, source, sampling, options)
        text, came, whole = "", list[int](), False
        try:
            for piece in turn.ticket.chunks():
                text += piece.text
                if piece.token_id is not None:
                    came.append(piece.token_id)
                whole = piece.finish_reason is not None
                yield piece
        except GeneratorExit:
            self._end(turn, text, came, whole=whole)
            raise
        except BaseException:
            self._client.cancel([turn.ticket])
            raise
        self._end(turn, text, came, whole=whole)

    # ------------------------------------------------------------ files

    def save(self, path: Path | None = None, **said: Any) -> int:
        """Write the session to its file, or to ``path``; returns its bytes.  Durable when it returns.

        ``said``: more for the file's header, plain JSON.  RequestError: there is nothing yet, or no file;
        EntryError: a file that is no session stands there; SaveError: the disk refused, and what was there before is
        whole.
        """
        path = self.path if path is None else path
        if path is None:
            raise RequestError("this session has no file", "give save() a path, or session() a name")
        if not self.tokens:
            raise RequestError("the session is empty", "generate something first")
        state = self._state = self._caught_up()
        identity = self._identity(state.regime, state.salt)
        facts = {**self._said(), **said}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            sessions.directory.check_overwritable(path, self._disk)
            return save_session(path, state, identity, self.tokens, facts, self._disk)
        except OSError as error:
            raise SaveError(f"{path}: {error.strerror}", "what was there before is whole") from None

    def load(self, path: Path | None = None) -> None:
        """Replace the session by that of its file, or of ``path``.

        EntryError: it is missing, damaged, or belongs to another model or cache, and it says which part differs; the
        session is as it was.
        """
        path = self.path if path is None else path
        if path is None:
            raise RequestError("this session has no file", "give load() a path, or session() a name")
        self._client.check_open()
        engine = self._engine
        try:
            loaded = load_session(path, self._identity, engine.kv_cache, engine.state_keeper.engine_id, self._disk)
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}", "nothing of it is used", reason="unread") from None
        said, state = loaded.metadata, loaded.state
        self.tokens, self._state, self.restored = list(loaded.history), state, state.length
        self.source = None if state.encoder_tokens is None else list(state.encoder_tokens)
        self.seed, self.created = int(said.get("seed", 0)), str(said.get("created", self.created))
        self.reused, self.missed = 0, ""

    # ------------------------------------------------------------ inside

    @property
    def state(self) -> SequenceState | None:
        """What the next turn begins from, where anything is kept of the tokens."""
        return self._state

    @property
    def _engine(self) -> Engine:
        return self._client.engine

    @property
    def _keeps(self) -> bool:
        """Is what a turn leaves kept for the next?  Elsewhere that finds it as a prefix, or, where rows spill, reads
        the text again."""
        ledger = self._engine.kv_cache_manager
        return not ledger.prefix_caching and not ledger.uses_offload

    def _identity(self, regime: str, salt: str) -> CacheFingerprint:
        return self._engine.cache_fingerprint(regime, salt=salt, template=self._template)

    def _said(self) -> dict[str, Any]:
        from kvad import __version__

        cache, asked = self._engine.cache, ("policy", "keys", "values", "dtype", "rotate", "endless", "on_full")
        return {
            "name": self.name,
            "model": self._model,
            "created": self.created,
            "saved": _now(),
            "kvad": __version__,
            "seed": self.seed,
            "cache": {each: getattr(cache, each) for each in (*asked, "layout", "block_size", "max_seq_len")},
        }

    def _prompt(self, text: PromptInput, source: PromptInput | None) -> tuple[list[int], list[int] | None]:
        """The whole text of the next turn, and its source."""
        crossed, read = self._prompt_encoder.config.kind == "encoder-decoder", self.source
        if source is not None and (not crossed or read is not None):
            what = "this model has no source" if not crossed else "this session has its source"
            raise RequestError(f"source=: {what}", "leave it out")
        if crossed and read is None:
            if source is None:
                raise RequestError("source=: this model answers a source", "give it with the first turn")
            read = self._prompt_encoder.encode_source(source)
        if not self.tokens:
            return (
                self._prompt_encoder.encode_target(text or None)
                if crossed
                else self._prompt_encoder.encode_prompt(text)
            ), read
        return [*self.tokens, *self._prompt_encoder.encode_continuation(text)], read

    def _begin(
        self, tokens: list[int], source: list[int] | None, sampling: SamplingParams | None, options: Mapping[str, Any]
    ) -> _Turn:
        chosen = self._sampling(sampling, dict(options))
        if sampling is None and "seed" not in options and not chosen.greedy and chosen.num_beams == 1:
            chosen = replace(chosen, seed=self.seed)
        if chosen.n > 1 or chosen.num_beams > 1:
            raise RequestError("a session is one text, without samples or beams beside it", "leave n= and beams= out")
        return _Turn(self._queue(tokens, source, chosen, keep=self._keeps), tokens, source, chosen.seed)

    def _queue(
        self, tokens: Sequence[int], source: Sequence[int] | None, sampling: SamplingParams, *, keep: bool
    ) -> RequestHandle:
        state = self._state

        def queue(engine: Engine) -> int:
            return engine.add_request(tokens, sampling, source=source, resume=state, keep=keep)

        return self._client.submit(queue, sampling, len(tokens))

    def _end(self, turn: _Turn, text: str, came: Sequence[int], *, whole: bool) -> None:
        usage, tokenizer = turn.ticket.metrics, self._prompt_encoder.tokenizer
        self.reused, self.missed = usage.num_cached_tokens, usage.resume_miss_reason
        if whole and self._keeps:
            self._state = self._client.pop_state(turn.ticket.request)
        self.tokens = turn.tokens + list(came if tokenizer is None else ids_of_text(tokenizer, text, came))
        self.source, self.seed = turn.source, turn.seed
        self._client.cancel([turn.ticket])

    def _caught_up(self) -> SequenceState:
        """A state of as many of the tokens as can be: what no turn has left is computed now, from what is there."""
        state = self._state
        held = (
            state.length
            if state is not None and sessions.state.common_prefix_length(state, self.tokens) == state.length
            else 0
        )
        if (
            state is not None
            and held
            and (held >= len(self.tokens) - 1 or not self._engine.kv_cache_manager.prefix_caching)
        ):
            return state
        return self._computed(self.tokens, self.source)[0]

    def _computed(self, tokens: Sequence[int], source: Sequence[int] | None) -> tuple[SequenceState, tuple[int, str]]:
        """The state of these tokens, and what of it was there already."""
        ticket = self._queue(tokens, source, SamplingParams(max_tokens=0), keep=True)
        try:
            for _ in ticket.chunks():
                pass
            return self._client.pop_state(ticket.request), (
                ticket.metrics.num_cached_tokens,
                ticket.metrics.resume_miss_reason,
            )
        finally:
            self._client.cancel([ticket])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
