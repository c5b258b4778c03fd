"""Incremental detokenizer and stop strings: stream exactly the text of ``decode``.

Invariant: the pushes of a Detokenizer and its flush, concatenated, equal ``tokenizer.decode(ids)`` for any ids. A
character whose bytes span several tokens is emitted with its last byte. U+FFFD is emitted only for bytes that are
certainly invalid, because of the next byte or the end of the text.

Stop strings end a stream independently of token boundaries. The first stop string that is complete counts; of several
that end there, the one that started first. Emitted is the text before it, a function of the text alone:

    end, start, stop = min((text.find(s) + len(s), text.find(s), s) for s in stops if s in text);  emit text[:start]

Only a suffix that is a proper prefix of a stop string is held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from kvad.errors import RequestError

if TYPE_CHECKING:
    from kvad.text.base import Tokenizer


class Detokenizer:
    """Incremental decoder of one stream: ``push`` each id, then ``flush``, which resets it.

    ``visible``: names of special tokens that have text although ``skip_specials`` is true.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_specials: bool = True, visible: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_specials = skip_specials
        ids = tokenizer.special_tokens.names() if visible else {}
        self._visible = {ids[name]: name.encode() for name in visible if name in ids}
        self._reset()

    def _reset(self) -> None:
        self._next_bytes = self._tokenizer.incremental_decoder(skip_specials=self._skip_specials)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the text that became certain, often ``""``; raise TokenizerError for an unknown id."""
        name = self._visible.get(token_id)
        return self._decoder.decode(self._next_bytes(token_id) if name is None else name)

    def flush(self) -> str:
        """Return the rest: U+FFFD for an incomplete character, else ``""``."""
        remainder = self._decoder.decode(b"", final=True)
        self._reset()
        return remainder


def ids_of_text(tokenizer: Tokenizer, text: str, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the ids of a reply's text, without an end token or text removed by a stop string."""
    detokenizer, ids, decoded = Detokenizer(tokenizer), list[int](), ""
    for token in tokens:
        if len(decoded) >= len(text):
            break
        ids.append(token)
        decoded += detokenizer.push(token)
    if text in (decoded, decoded + detokenizer.flush()):
        return tuple(ids)
    return tuple(tokenizer.encode(text))  # a stop string ended inside a token


class StopStringMatcher:
    """Matcher for one stream: ``push`` text until a stop string, or ``flush`` at the end."""

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise RequestError("stop: must be a list of strings, got a string", f"[{stops!r}]")
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError("stop: must not contain an empty string", "Remove it.")
        self._stops = tuple(stops)
        self._max_stop_len = max(map(len, stops), default=0)
        self._pending_text = ""
        self._stopped: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return (text to emit, matched stop string or None); nothing is emitted after a match."""
        if self._stopped is not None:
            return "", self._stopped
        text = self._pending_text + text
        matches = ((index + len(stop), index, stop) for stop in self._stops if (index := text.find(stop)) >= 0)
        if (match := min(matches, default=None)) is not None:
            _, start, self._stopped = match
            self._pending_text = ""
            return text[:start], self._stopped
        num_certain = len(text) - self._open_suffix(text)
        self._pending_text = text[num_certain:]
        return text[:num_certain], None

    def _open_suffix(self, text: str) -> int:
        """Return the length of the longest suffix that is a proper prefix of a stop string."""
        for length in range(min(self._max_stop_len - 1, len(text)), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stops):  # a whole stop string was matched in push
                return length
        return 0

    def flush(self) -> str:
        """Return the text held back at the end of the stream; ``""`` after a match."""
        pending_text, self._pending_text = self._pending_text, ""
        return pending_text
