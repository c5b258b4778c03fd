"""Sessions of HTTP requests: the cache of a conversation is saved before the end of each turn is reported.

A request gives the whole text, as for every other request; what the session has of it is not computed again, also
after a restart of the server. A shutdown saves running turns with the tokens so far. Sessions belong to an API key: the
same name of another key is another session. A key's files are limited (``SessionLimits``): after a turn, those that
were saved longest ago are removed, one by one, so a process that dies in between leaves whole files, and the next turn
continues. Several processes may share the folder: the file of a running turn is locked, and no process removes it.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvad import engine as engine_lib
from kvad.cache import sessions
from kvad.engine import Session, StreamChunk
from kvad.engine.scheduling import SamplingParams
from kvad.errors import KvadError, RequestError
from kvad.llm import LLM
from kvad.server.limits import SESSION_LIMITS, SessionLimits
from kvad.storage import REAL_FILE_SYSTEM

LOG = logging.getLogger(__name__)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_OPEN = 8  # sessions whose tokens stay in memory between turns; others are loaded from their files
MAX_KNOWN = 1024  # session files whose sizes are reported


@dataclass
class SessionStats:
    """Session files of this process, and what was copied to and from them."""

    num_files: int = 0
    num_tokens: int = 0  # in them
    saved: int = 0  # turns
    saved_bytes: int = 0
    loaded: int = 0  # sessions read from their files
    removed: int = 0  # files, because of the limits


@dataclass(eq=False)
class _Turn:
    key: tuple[str, str]  # owner and name
    session: Session
    handle: engine_lib.client.RequestHandle
    source: list[int] | None
    held: int | None  # the session's file, held open so that it is not removed
    chunks: list[StreamChunk] = field(default_factory=list)


class SessionTurns:
    """Runs turns of sessions in the engine process.

    Args:
        llm: The model.
        folder: Folder of the session files; None: sessions are refused.
        limits: Largest session files of an API key.
    """

    def __init__(self, llm: LLM, folder: Path | None, limits: SessionLimits = SESSION_LIMITS) -> None:
        self._llm, self._folder, self._limits = llm, folder, limits
        self._open: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self._turns: dict[int, _Turn] = {}  # by request
        self._stats = SessionStats()
        self._known: OrderedDict[Path, int] = OrderedDict()  # tokens of a file

    def begin(
        self,
        identity: dict[str, str],
        tokens: list[int],
        source: list[int] | None,
        sampling_params: SamplingParams,
        *,
        cache_salt: str,
        adapter: str,
    ) -> int:
        """Submit a turn and return the request's number.

        Args:
            identity: The session's ``name`` and its ``owner`` (the API key's id, or "").
            tokens: The whole text.
            source: Tokens of the encoder input.
            sampling_params: Sampling parameters of one sample.
            cache_salt: Salt of the prefix cache.
            adapter: Name of the adapter that computes the turn.

        Raises:
            RequestError: If the name is invalid, or the session has a running turn or another adapter.
            StorageError: If the session's file is damaged or belongs to another model.
        """
        name, owner = identity["name"], identity["owner"]
        if any(turn.key == (owner, name) for turn in self._turns.values()):
            raise RequestError(f"session: {name!r} has a running request", "Wait for its end.")
        session = self._session(name, owner, cache_salt, adapter)
        if session.adapter != adapter:
            message = f"session: {name!r} belongs to {session.adapter or 'the base model'}"
            raise RequestError(message, "Send its model, or use another session.")
        session.cache_salt = cache_salt  # tokens that were computed with another one are not reused
        handle = session.begin_turn(tokens, source, sampling_params, {})
        self._llm.client.forget(handle.request)  # its chunks are passed to ``add_chunk``
        assert session.path is not None, "a session of a request has a file"
        held = REAL_FILE_SYSTEM.hold(session.path)
        self._turns[handle.request] = _Turn((owner, name), session, handle, source, held)
        return handle.request

    def add_chunk(self, chunk: StreamChunk) -> None:
        turn = self._turns.get(chunk.request)
        if turn is not None:
            turn.chunks.append(chunk)

    def end(self, request: int) -> dict[str, Any]:
        """End a turn, if the request is one, save the session and return what is reported of it.

        After an error the session keeps its previous text.

        Raises:
            KvadError: If the session cannot be saved, or is larger than the limit.
        """
        turn = self._turns.pop(request, None)
        if turn is None:
            return {}
        session, path = turn.session, turn.session.path
        if turn.chunks and turn.chunks[-1].error is not None:
            _release(turn)
            return {}
        try:
            session.end_turn(turn.handle, turn.source, turn.chunks)
            num_bytes = session.save(overwrite=True)
        finally:
            _release(turn)
        assert path is not None, "a session of a request has a file"
        self._stats.saved_bytes += num_bytes
        self._stats.saved += 1
        self._add_file(session)
        is_too_large = num_bytes > self._limits.num_bytes
        try:
            if is_too_large:
                self._remove(path)
            else:
                self._remove_oldest(path)
        except OSError as error:
            LOG.warning("sessions beyond the limit are not removed: %s", error)
        if is_too_large:
            message = f"session: has {num_bytes:,} bytes, the limit is {self._limits.num_bytes:,}; it is not on disk"
            raise RequestError(message, "Start the server with a larger max_session_bytes.")
        return {"session": {"reused": session.reused, "missed": session.missed}}

    def end_all(self) -> None:
        """End all turns with the tokens so far and save the sessions; errors are logged.

        Of a prompt that is not computed yet, the computed part is saved. A turn that waits is cancelled.
        """
        engine = self._llm.engine
        for request, turn in list(self._turns.items()):
            num_computed = engine.num_computed_tokens(request)
            last_chunks = engine.finish_request(request)
            if not turn.chunks:
                turn.handle.token_ids = turn.handle.token_ids[:num_computed]
            if num_computed:
                turn.chunks += last_chunks
            elif not turn.chunks:
                self.cancel(request)
        for request in list(self._turns):
            try:
                self.end(request)
            except KvadError as error:
                LOG.error("a session is not saved: %s", error)

    def _remove_oldest(self, newest: Path) -> None:
        """Remove files of a key, those saved longest ago first but not ``newest``, until the limits hold."""
        files = REAL_FILE_SYSTEM.list_files(newest.parent)
        files = [file for file in files if file.name.endswith(sessions.directory.FILE_SUFFIX)]
        count, total = len(files), sum(file.size for file in files)
        for file in sorted(files, key=lambda file: file.used_ns):
            if count <= self._limits.num_files and total <= self._limits.num_bytes:
                return
            if file.name != newest.name and self._remove(newest.parent / file.name):
                count, total = count - 1, total - file.size

    def _remove(self, path: Path) -> bool:
        """Remove a session's file, unless a turn uses it; return True if it is gone."""
        if not REAL_FILE_SYSTEM.remove_unused(path):
            return False
        self._stats.removed += 1
        self._known.pop(path, None)
        return True

    def stats(self) -> SessionStats:
        return replace(self._stats, num_files=len(self._known), num_tokens=sum(self._known.values()))

    def _add_file(self, session: Session) -> None:
        assert session.path is not None, "a session of a request has a file"
        self._known.pop(session.path, None)
        self._known[session.path] = len(session.tokens)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def cancel(self, request: int) -> None:
        """Forget the turn of a cancelled request; the session keeps its previous text."""
        turn = self._turns.pop(request, None)
        if turn is not None:
            _release(turn)

    def _session(self, name: str, owner: str, cache_salt: str, adapter: str) -> Session:
        if self._folder is None:
            raise RequestError("session: this server keeps no sessions", "Start it with --session-dir.")
        if not NAME.fullmatch(name):
            raise RequestError(f"session: must be 1 to 64 letters, digits, '.', '_' or '-', got {name[:80]!r}")
        session = self._open.pop((owner, name), None)
        if session is None:
            folder = self._folder / (hashlib.sha256(owner.encode()).hexdigest()[:16] if owner else "public")
            sessions.directory.session_path(name, folder)
            session = self._llm.session(name, folder, cache_salt=cache_salt, adapter=adapter)
            session.captures_state = True  # a request for it would wait behind others
            if session.tokens:
                self._stats.loaded += 1
                self._add_file(session)
        self._open[owner, name] = session
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        return session


def _release(turn: _Turn) -> None:
    if turn.held is not None:
        REAL_FILE_SYSTEM.close(turn.held)
