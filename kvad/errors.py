"""Errors that users may see. Each names the problem, its place and a fix.

::

    KvadError                     base class; the CLI prints it as one line
    ├── UsageError                an invalid value, flag or path                          exit code 2
    │   ├── ConfigError           a configuration key or value
    │   ├── DataError             a corpus: missing, empty, binary, not UTF-8, too short
    │   ├── CheckpointError       a folder that is not, or is no longer, a checkpoint
    │   │   └── NetworkError      a server that cannot be reached                        exit code 1
    │   ├── TokenizerError        text that cannot be encoded, ids that cannot be decoded
    │   ├── ChatTemplateError     a chat template that is missing, wrong or too expensive, or rejects the messages
    │   ├── StorageError          a stored file of the cache that is damaged, foreign or of another model
    │   └── RequestError          a prompt or a sampling value
    ├── MemoryPlanError           the model does not fit; raised before any allocation    exit code 1
    ├── SaveError                 a failed write; existing files are unchanged            exit code 1 (path: 2)
    └── EngineError               a failure at run time                                   exit code 1
        ├── NumericalError        NaN or infinite logits: the request fails, others continue
        └── CacheError            an operation that this cache does not support

Bugs in kvad are ``assert``s; errors of users are these. No torch.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path


class KvadError(Exception):
    """Base of every error that kvad raises on purpose.

    Args:
        message: One line with the problem and its place.
        hint: A fix.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(KvadError):
    """An invalid value, flag or path."""

    exit_code = 2


class ConfigError(UsageError):
    """An invalid configuration key or value."""


class DataError(UsageError):
    """An unusable corpus."""


class CheckpointError(UsageError):
    """An unusable checkpoint folder."""


class NetworkError(CheckpointError):
    """A model that cannot be downloaded now: no connection, or the server failed."""

    exit_code = 1


class TokenizerError(UsageError):
    """Text or ids that a tokenizer cannot convert."""


class ChatTemplateError(UsageError):
    """An unusable chat template, or messages that it rejects."""


class StorageError(UsageError):
    """A stored file that cannot be used.

    ``reason``: "missing", "damaged" (or truncated), "foreign" (no kvad file, or of another version), "mismatch" (of
    another model or cache configuration), "unread" (the disk failed), "changed" (by another
    session since it was loaded).
    """

    def __init__(self, message: str, hint: str = "", *, reason: str = "damaged") -> None:
        super().__init__(message, hint)
        self.reason = reason


class RequestError(UsageError):
    """An invalid prompt or sampling value."""


class MemoryPlanError(KvadError):
    """A model or cache that does not fit into memory."""


class SaveError(KvadError):
    """A failed write; existing files are unchanged.

    If its cause is an OSError that another path would avoid (a file, no permission), the exit code is 2.
    """


class EngineError(KvadError):
    """A failure at run time."""


class NumericalError(EngineError):
    """NaN or infinite logits of one request."""


class CacheError(EngineError):
    """An operation that the cache does not support."""


def format_count(number: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun: ``1 token``, ``2,048 tokens``; ``plural`` if it is irregular."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def format_bytes(num_bytes: float) -> str:
    """Format a size: ``3221225472`` -> ``3.00 GiB``; below 1 KiB in bytes."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes:.0f} B"
    size, units = num_bytes / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1023.995 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.2f} {units[0]}"


def with_article(noun: str) -> str:
    """Add the indefinite article: ``a decoder``, ``an encoder``."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def suggest_path(missing: Path) -> Path | None:
    """Return the most similar name in the same folder, or None if there is none or the folder is unreadable."""
    try:
        close = difflib.get_close_matches(missing.name, os.listdir(missing.parent), n=1)
    except OSError:
        return None
    return missing.with_name(close[0]) if close and close[0] != missing.name else None


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UsageError for the first setting that is not known."""
    choices = list(known)
    for name in given:
        if name not in choices:
            raise UsageError(f"unknown setting {name!r}", suggest(name, choices))


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ``"did you mean 'x'?"`` for the nearest known word, or the list of known words."""
    choices = list(known)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(choices))}"
