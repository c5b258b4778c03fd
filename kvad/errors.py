"""The tree of errors that a user may meet.  Each one says what is wrong, where, and what to do.

::

    KvadError                     everything below; the CLI prints it as one line
    ├── UsageError                a value, a flag or a path that cannot be right      exit code 2
    │   ├── ConfigError           a configuration key or value
    │   ├── DataError             a corpus: missing, empty, binary, not UTF-8, too short
    │   ├── CheckpointError       a folder that is not, or is no longer, a checkpoint
    │   ├── TokenizerError        text that cannot be encoded, ids that cannot be decoded
    │   ├── ChatTemplateError     a chat template that is missing, wrong or too expensive, or refuses the messages
    │   ├── EntryError            a stored piece of a cache that is torn, not ours, or of another model
    │   └── RequestError          a prompt or a sampling value
    ├── MemoryPlanError           it would not fit; refused before anything is allocated   exit code 2
    ├── SaveError                 the disk refused; what was there before is whole         exit code 2
    └── EngineError               something failed while running                           exit code 1
        ├── NumericalError        NaN or infinite logits: that request fails, the others go on
        └── CacheError            the cache was asked for what it cannot do (by name)

Our own bugs are ``assert``; theirs are these.  Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path


class KvadError(Exception):
    """Base of every error that kvad raises on purpose.

    ``message`` is one line that says what is wrong and where; ``hint`` is what to do next.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(KvadError):
    exit_code = 2


class ConfigError(UsageError):
    pass


class DataError(UsageError):
    pass


class CheckpointError(UsageError):
    pass


class TokenizerError(UsageError):
    pass


class ChatTemplateError(UsageError):
    pass


class StorageError(UsageError):
    """``why``: "missing" (there is none), "torn" (it was damaged or cut), "alien" (not a file of ours, or of another
    version), "other" (it belongs to another model, or another way of keeping things), "unread" (the disk refused)."""

    def __init__(self, message: str, hint: str = "", *, reason: str = "torn") -> None:
        super().__init__(message, hint)
        self.reason = reason


class RequestError(UsageError):
    pass


class MemoryPlanError(KvadError):
    exit_code = 2


class SaveError(KvadError):
    exit_code = 2


class EngineError(KvadError):
    exit_code = 1


class NumericalError(EngineError):
    pass


class CacheError(EngineError):
    pass


def format_count(number: int, noun: str, plural: str = "") -> str:
    """``1 token``, ``2,048 tokens``; ``plural`` where it does not end in a plain s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def with_article(noun: str) -> str:
    """``a decoder``, ``an encoder``: by its first letter."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def suggest_path(missing: Path) -> Path | None:
    """The file or folder beside it with the name that is most like its own; None where none is, or nobody can look."""
    try:
        close = difflib.get_close_matches(missing.name, os.listdir(missing.parent), n=1)
    except OSError:
        return None
    return missing.with_name(close[0]) if close and close[0] != missing.name else None


def suggest(word: str, known: Iterable[str]) -> str:
    """``"did you mean 'x'?"`` for the nearest known word, or the list of them."""
    choices = list(known)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(choices))}"
