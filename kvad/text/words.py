"""The word tokenizer: text is cut into words, the most frequent words get an id, the others become UNK.

It is lossy by design: runs of spaces, and with ``lower`` the capitals, are gone.  Two ways to cut:

- ``"whitespace"``: ``text.split()``; decoding puts one space between words.
- ``"words"``: words (with their inner marks: ``don't``, ``well-known``, ``3.14``), single punctuation marks, and
  line breaks, which are tokens.  Decoding writes them as people do: no space before ``,`` or ``)``, none after ``(``, a
  straight quote opens, the next one closes.

      He said: "Don't (ever)!"   is cut into   He | said | : | " | Don't | ( | ever | ) | ! | "   and decodes to itself

Invariant: where nothing is unknown, encoding what was decoded gives the same ids again.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvad.errors import TokenizerError, suggest
from kvad.text.base import split_text, standard_specials
from kvad.text.plain import TableTokenizer, most_frequent, num_free_ids, read_field

__all__ = ["SPLITS", "SpacingRules", "WordTokenizer", "split_words"]

_OPENING = frozenset("([{<«“‘„‚¿¡「『《$£€¥@#")
_CLOSING = frozenset(".,;:!?%)]}>»”’…、。，．；：！？」』》")
_QUOTES = frozenset("\"'`")


@functools.cache
def _combining_characters() -> str:
    """The combining marks, and the joiners that Indic and Persian words contain: ``\\w`` of Python lacks them.

    Without them Hindi, or an accent that is a character of its own, would be cut to shreds.
    """
    planes = (range(0x300, 0x20000), range(0xE0100, 0xE01F0))
    return "\u200c\u200d" + "".join(chr(i) for plane in planes for i in plane if unicodedata.category(chr(i))[0] == "M")


@functools.cache
def _patterns() -> tuple[frozenset[str], re.Pattern[str], re.Pattern[str]]:
    """(the marks, words of text without marks, words of any text).  The last is the truth, and ten times as slow."""

    def words(letter: str) -> re.Pattern[str]:
        return re.compile(rf"\n|{letter}+(?:(?:['’-]|(?<=\d)[.,](?=\d)){letter}+)*|\S")

    return frozenset(_combining_characters()), words(r"\w"), words(rf"[\w{_combining_characters()}]")


def split_words(text: str) -> list[str]:
    marks, plain, full = _patterns()
    return (plain if text.isascii() or marks.isdisjoint(text) else full).findall(text)


SPLITS: dict[str, Callable[[str], list[str]]] = {"words": split_words, "whitespace": str.split}


class SpacingRules:
    """Whether a space stands before the next word, as a function of the words before it.  One object per text."""

    def __init__(self, split: str) -> None:
        self._plain = split == "whitespace"
        self._glued = True  # at the start of a text or line, and after an opening mark, nothing is put before a word
        self._open: set[str] = set()  # straight quotes that wait for their partner on this line

    def needs_space(self, word: str) -> str:
        space = "" if self._glued else " "
        if self._plain:
            self._glued = False
            return space
        if word == "\n":
            self._glued = True
            self._open.clear()
            return ""
        closes = word in _CLOSING or word in self._open
        self._glued = word in _OPENING or (word in _QUOTES and not closes)
        if word in _QUOTES:
            self._open ^= {word}
        return "" if closes else space


class WordTokenizer(TableTokenizer):
    """One id per word.  See the module."""

    kind = "word"
    units = "word", "words"

    def __init__(
        self,
        words: Sequence[str],
        roles: Sequence[str] = ("unk",),
        *,
        split: str = "words",
        lower: bool = False,
        on_unknown: str = "warn",
    ) -> None:
        specials = standard_specials(roles, first=0)
        first = len(specials.named)
        super().__init__([b""] * first + [word.encode() for word in words], specials, on_unknown)
        if split not in SPLITS:
            raise TokenizerError(f"unknown split {split!r}", suggest(split, SPLITS))
        self.split = split
        self.lower = lower
        self._words = list(words)
        self._ids = {word: first + i for i, word in enumerate(words)}

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        roles: Sequence[str] = ("unk",),
        *,
        vocab_size: int = 4096,
        min_freq: int = 1,
        split: str = "words",
        lower: bool = False,
        on_unknown: str = "warn",
    ) -> WordTokenizer:
        """The most frequent words, in the order of their frequency."""
        room = num_free_ids(vocab_size, roles)
        cutter = cls([], roles, split=split, lower=lower)  # checks the options before a long read
        counts: Counter[str] = Counter()
        for text in texts:
            for piece in split_text(text):
                counts.update(cutter.words(piece))
        return cls(most_frequent(counts, room, min_freq), roles, split=split, lower=lower, on_unknown=on_unknown)

    @classmethod
    def from_content(cls, content: Mapping[str, Any], on_unknown: str = "warn") -> WordTokenizer:
        return cls(
            read_field(content, "tokens", list),
            read_field(content, "specials", list),
            split=read_field(content, "split", str),
            lower=read_field(content, "lower", bool),
            on_unknown=on_unknown,
        )

    def words(self, text: str) -> list[str]:
        """The words of a text, before any vocabulary."""
        return SPLITS[self.split](text.lower() if self.lower else text)

    def _encode_plain(self, text: str, unknown: Counter[str]) -> list[int]:
        words = self.words(text)
        found = list(map(self._ids.get, words))
        if None in found:
            unknown.update(word for word, token_id in zip(words, found, strict=True) if token_id is None)
        unk = self.special_tokens.unk or 0  # without an UNK the report of the unknown raises
        return [unk if token_id is None else token_id for token_id in found]

    def incremental_decoder(self, *, skip_specials: bool = True) -> Callable[[int], bytes]:
        spacing = SpacingRules(self.split)
        piece_of = self.token_bytes if skip_specials else self._shown

        def add(token_id: int) -> bytes:
            piece = piece_of(token_id)
            return spacing.needs_space(piece.decode()).encode() + piece if piece else b""

        return add

    def _content(self) -> dict[str, Any]:
        return {"split": self.split, "lower": self.lower, "tokens": self._words}
