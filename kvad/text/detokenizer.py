"""Ids to text as they come: nothing is shown before it is certain, and nothing is shown that ``decode`` would not say.

Invariant: the pushes of a Detokenizer and its flush, put together, equal ``tokenizer.decode(ids)``, for any ids at all.
A character whose bytes are spread over several tokens appears when its last byte does.  U+FFFD stands only for bytes
that are proven broken: by the byte that follows them, or by the end of the text.

Stop strings: end a stream of text where one of them appears, however the text was cut into tokens.

The stop that counts is the one that is complete first; of several that end there, the one that began first.  What is
emitted is the text before it.  This depends on the text alone, not on how it was pushed:

    end, start, stop = min((text.find(s) + len(s), text.find(s), s) for s in stops if s in text);  emit text[:start]

Only a suffix that could still become a stop string (a proper prefix of one) is ever held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvad.errors import RequestError

if TYPE_CHECKING:
    from kvad.text.base import Tokenizer


class Detokenizer:
    """One per stream.  ``push`` each id, then ``flush``; after that it is as new."""

    def __init__(self, tokenizer: Tokenizer, *, skip_specials: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_specials = skip_specials
        self._begin()

    def _begin(self) -> None:
        self._bytes_of = self._tokenizer.incremental_decoder(skip_specials=self._skip_specials)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before; often ``""``.  Raises TokenizerError for an unknown id."""
        return self._decoder.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, else ``""``."""
        rest = self._decoder.decode(b"", final=True)
        self._begin()
        return rest


def ids_of_text(tokenizer: Tokenizer, text: str, tokens: Sequence[int]) -> tuple[int, ...]:
    """The ids that stand for a reply: without what the end of a document or a stop string cut off."""
    words, kept, shown = Detokenizer(tokenizer), list[int](), ""
    for token in tokens:
        if len(shown) >= len(text):
            break
        kept.append(token)
        shown += words.push(token)
    if text in (shown, shown + words.flush()):
        return tuple(kept)
    return tuple(tokenizer.encode(text))  # a stop string ended within a token


class StopStringMatcher:
    """One per stream.  ``push`` text until ``stopped`` is not None, or ``flush`` at the end."""

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise RequestError("stop strings must be a list", f"[{stops!r}]")
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError("a stop string is empty, so it would stop before the first token", "remove it")
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._stopped: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to emit now, the stop string that was met or None).  After a stop, nothing is emitted any more."""
        if self._stopped is not None:
            return "", self._stopped
        text = self._held + text
        found = min(((at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0), default=None)
        if found is not None:
            _, start, self._stopped = found
            self._held = ""
            return text[:start], self._stopped
        keep = len(text) - self._open_suffix(text)
        self._held = text[keep:]
        return text[:keep], None

    def _open_suffix(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that is a proper prefix of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stops):  # not the whole stop: push has looked
                return length
        return 0

    def flush(self) -> str:
        """The text that was held back, once no more can come; ``""`` after a stop."""
        held, self._held = self._held, ""
        return held
