"""Ids to text as they come: nothing is shown before it is certain, and nothing is shown that ``decode`` would not say.

Invariant: the pushes of a Detokenizer and its flush, put together, equal ``tokenizer.decode(ids)``, for any ids at all.
A character whose bytes are spread over several tokens appears when its last byte does.  U+FFFD stands only for bytes
that are proven broken: by the byte that follows them, or by the end of the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvad.text.base import Tokenizer

__all__ = ["Detokenizer", "ids_of_text"]


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
