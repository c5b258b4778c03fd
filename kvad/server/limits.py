"""Limits of requests, checked before anything is allocated. Plain numbers, no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvad.errors import ConfigError


class SessionLimits(NamedTuple):
    """Largest session files of an API key on disk; beyond them its least recently used ones are removed."""

    num_files: int = 1024
    num_bytes: int = 16 << 30


SESSION_LIMITS = SessionLimits()
MAX_HEAD = 1 << 16  # bytes of a request's line and headers


class FixedLimit(NamedTuple):
    """A limit that is not an option: of a part without settings, or one that no request needs to exceed."""

    name: str
    value: int
    status: int
    text: str


FIXED_LIMITS = (  # tests/server/test_limits_and_faults.py compares them with the code that applies them
    FixedLimit("head_bytes", MAX_HEAD, 431, "bytes of a request's line and headers"),
    FixedLimit("num_beams", 128, 400, "beams of a search"),
    FixedLimit("cache_salt", 256, 400, "characters of cache_salt"),
    FixedLimit("session", 64, 400, "characters of a session's name"),
    FixedLimit("request_id", 64, 400, "characters of request_id"),
    FixedLimit("compile_seconds", 1, 400, "seconds of CPU time that compile a schema, a regex or a grammar"),
    FixedLimit("template_steps", 10_000_000, 400, "lines of Python that a chat template runs"),
    FixedLimit("template_seconds", 10, 400, "seconds of CPU time of a chat template"),
    FixedLimit("template_chars", 4 << 20, 400, "characters of a rendered conversation"),
)


def _limit(default: float, status: int | None, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"status": status, "text": text})


@dataclass(frozen=True)
class ServerLimits:
    """Largest values of a request; ``status`` is the HTTP status beyond them, None if older files are removed."""

    max_body_bytes: int = _limit(16 << 20, 413, "bytes of a request's body")
    max_prompts: int = _limit(256, 400, "prompts or texts of a request")
    max_prompt_tokens: int = _limit(1 << 20, 400, "tokens of a prompt, below the longest sequence of the cache")
    max_prompt_chars: int = _limit(8 << 20, 400, "characters of a prompt, or of messages and tools with their keys")
    max_messages: int = _limit(4096, 400, "messages of a conversation")
    max_n: int = _limit(16, 400, "samples of a prompt (n, best_of)")
    max_sequences: int = _limit(512, 400, "sequences of a request (prompts times samples)")
    max_logprobs: int = _limit(20, 400, "alternatives per token (logprobs, top_logprobs)")
    max_echo_logprobs: int = _limit(400_000, 400, "values of prompts with echo: tokens x samples x (logprobs + 1)")
    max_stop: int = _limit(16, 400, "stop strings")
    max_stop_chars: int = _limit(256, 400, "characters of a stop string")
    max_logit_bias: int = _limit(1024, 400, "entries of logit_bias")
    max_tools: int = _limit(128, 400, "tools of a request")
    max_schema_bytes: int = _limit(64 << 10, 400, "bytes of a schema, a regex or a grammar")
    max_queued_requests: int = _limit(256, 429, "sequences (samples, beams) that wait for their first token")
    max_queued_tokens: int = _limit(1 << 20, 429, "prompt tokens of waiting requests")
    max_large_texts: int = _limit(8, 429, "texts of 65,536 characters and more that wait to be encoded")
    max_unread_tokens: int = _limit(1 << 14, 400, "tokens of a stream that its client has not read; it then fails")
    max_requests_per_key: int = _limit(128, 429, "requests of an API key at the same time")
    max_sessions: int = _limit(SESSION_LIMITS.num_files, None, "sessions on disk of an API key; older ones are removed")
    max_session_bytes: int = _limit(SESSION_LIMITS.num_bytes, None, "bytes of their files; older ones are removed")
    request_seconds: float = _limit(600.0, 504, "seconds of a request; 408 after its own timeout")
    header_seconds: float = _limit(10.0, 408, "seconds until a request's head has arrived")
    body_seconds: float = _limit(30.0, 408, "seconds until a request's body has arrived")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(f"{field.name}: must be above 0, got {value}", f"Use {field.default}, the default.")

    @property
    def sessions(self) -> SessionLimits:
        return SessionLimits(self.max_sessions, self.max_session_bytes)

    def table(self) -> list[tuple[str, str, str, str]]:
        """Return (name, value, status beyond it, text) of every limit, the fixed ones at the end."""
        settable = [
            (field.name, f"{getattr(self, field.name):,}", str(field.metadata["status"] or "-"), field.metadata["text"])
            for field in dataclasses.fields(self)
        ]
        fixed = [(each.name, f"{each.value:,}", str(each.status), f"{each.text} (fixed)") for each in FIXED_LIMITS]
        return settable + fixed
