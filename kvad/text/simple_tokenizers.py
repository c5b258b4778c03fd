"""Tokenizers that are a plain table: bytes, characters, and the base that ``words.py`` shares.

Their file is ``{"kvad": {"kind": ..., "specials": [roles], ...}}``, in ``tokenizer.json``.  Ids of the byte tokenizer
are the byte values, its specials follow (256, ...); characters and words come after the specials (0, ...).
Standard library only.

The word tokenizer: text is cut into words, the most frequent words get an id, the others become UNK.

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
import hashlib
import json
import re
import unicodedata
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from kvad.errors import DataError, TokenizerError, suggest
from kvad.text.base import (
    ENCODER_NAMES,
    FILE_NAME,
    NAMES,
    BaseTokenizer,
    SpecialTokens,
    check_on_unknown,
    check_text,
    out_of_range_error,
    split_text,
    standard_specials,
    write_text,
)
from kvad.text.post_processor import PostProcessor


class TableTokenizer(BaseTokenizer):
    """A list of tokens; a subclass says how text is cut (``_ids_of``) and may say how tokens join (``joiner``)."""

    kind: ClassVar[str]
    source_tokenizer: ClassVar[None] = None
    languages: ClassVar[Mapping[str, int]] = MappingProxyType({})

    def __init__(self, pieces: Sequence[bytes], specials: SpecialTokens, on_unknown: str = "warn") -> None:
        """``pieces``: the bytes of every id in order, ``b""`` for the special ones."""
        self.special_tokens = specials
        self.vocab_size = len(pieces)
        self.on_unknown = check_on_unknown(on_unknown)
        self._pieces = list(pieces)
        self._names = {token_id: name.encode() for name, token_id in specials.named}
        self._special_pattern = re.compile("(" + "|".join(re.escape(name) for name, _ in specials.named) + ")")

    @abstractmethod
    def _encode_plain(self, text: str, unknown: Counter[str]) -> list[int]:
        """Ids of an ordinary text; what the table lacks becomes UNK and is counted in ``unknown``."""

    @abstractmethod
    def _content(self) -> dict[str, Any]:
        """What the file holds beside ``kind`` and ``specials``."""

    def _encode(self, text: str, specials: bool, unknown: Counter[str]) -> list[int]:
        check_text(text)
        ids: list[int] = []
        names = self.special_tokens.names()
        # split() with a group: ordinary text at even places, a special token's name at odd ones
        for place, part in enumerate(self._special_pattern.split(text) if specials else [text]):
            if place % 2:
                ids.append(names[part])
                continue
            for piece in split_text(part):
                ids += self._encode_plain(piece, unknown)
        return ids

    def add_special_tokens(self, ids: Sequence[int], *, language: str | None = None) -> list[int]:
        cls, sep = self.special_tokens.cls, self.special_tokens.sep
        before = () if cls is None else (cls,)
        return PostProcessor(before, () if sep is None else (sep,)).apply(ids, language)

    def incremental_decoder(self, *, skip_specials: bool = True) -> Callable[[int], bytes]:
        return self.token_bytes if skip_specials else self._shown

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:  # a negative index would quietly count from the end
            raise out_of_range_error(token_id, self.vocab_size)
        return self._pieces[token_id]

    def _shown(self, token_id: int) -> bytes:
        return self._names.get(token_id) or self.token_bytes(token_id)

    def _file_text(self) -> str:
        known = {**NAMES, **ENCODER_NAMES}
        roles = [role for role in known if getattr(self.special_tokens, role) is not None]
        roles += [name for name, _ in self.special_tokens.named if name not in known.values()]
        content = {"kind": self.kind, "specials": roles, **self._content()}
        return json.dumps({"kvad": content}, ensure_ascii=False, indent=1) + "\n"

    def save(self, folder: Path) -> None:
        write_text(Path(folder) / FILE_NAME, self._file_text())

    def fingerprint(self) -> str:
        return hashlib.sha256(self._file_text().encode()).hexdigest()


class ByteTokenizer(TableTokenizer):
    """One id per byte of the UTF-8 text: nothing is unknown, nothing has to be learned."""

    kind = "byte"
    units = "byte", "bytes"

    def __init__(self, roles: Sequence[str] = (), *, on_unknown: str = "warn") -> None:
        specials = standard_specials(roles, first=256)
        pieces = [bytes([value]) for value in range(256)] + [b""] * len(specials.named)
        super().__init__(pieces, specials, on_unknown)

    @classmethod
    def from_content(cls, content: Mapping[str, Any], on_unknown: str = "warn") -> ByteTokenizer:
        return cls(read_field(content, "specials", list), on_unknown=on_unknown)

    def _encode_plain(self, text: str, unknown: Counter[str]) -> list[int]:
        return list(text.encode("utf-8"))

    def _content(self) -> dict[str, Any]:
        return {}


class CharTokenizer(TableTokenizer):
    """One id per Unicode code point of the training text (``lower``: of the lower-cased text)."""

    kind = "char"
    units = "character", "characters"

    def __init__(
        self, chars: Sequence[str], roles: Sequence[str] = ("unk",), *, lower: bool = False, on_unknown: str = "warn"
    ) -> None:
        specials = standard_specials(roles, first=0)
        first = len(specials.named)
        super().__init__([b""] * first + [char.encode() for char in chars], specials, on_unknown)
        self.lower = lower
        self._chars = list(chars)
        self._ids = {char: first + i for i, char in enumerate(chars)}

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        roles: Sequence[str] = ("unk",),
        *,
        vocab_size: int = 4096,
        min_freq: int = 1,
        lower: bool = False,
        on_unknown: str = "warn",
    ) -> CharTokenizer:
        """The most frequent characters, with ids in code point order."""
        room = num_free_ids(vocab_size, roles)
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text.lower() if lower else text)
        return cls(sorted(most_frequent(counts, room, min_freq)), roles, lower=lower, on_unknown=on_unknown)

    @classmethod
    def from_content(cls, content: Mapping[str, Any], on_unknown: str = "warn") -> CharTokenizer:
        chars = read_field(content, "tokens", list)
        if not all(len(char) == 1 for char in chars):
            raise TokenizerError("'tokens' of a character tokenizer must be single characters")
        lower = read_field(content, "lower", bool)
        return cls(chars, read_field(content, "specials", list), lower=lower, on_unknown=on_unknown)

    def _encode_plain(self, text: str, unknown: Counter[str]) -> list[int]:
        text = text.lower() if self.lower else text
        found = list(map(self._ids.get, text))
        if None in found:
            unknown.update(char for char, token_id in zip(text, found, strict=True) if token_id is None)
        unk = self.special_tokens.unk or 0  # without an UNK the report of the unknown raises
        return [unk if token_id is None else token_id for token_id in found]

    def _content(self) -> dict[str, Any]:
        return {"lower": self.lower, "tokens": self._chars}


def num_free_ids(vocab_size: int, roles: Sequence[str]) -> int:
    """How many tokens a vocabulary of ``vocab_size`` has beside its specials: at least one."""
    num_specials = len(standard_specials(roles, 0).named)
    if vocab_size <= num_specials:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too small", f"at least {num_specials + 1}: {num_specials} are special tokens"
        )
    return vocab_size - num_specials


def most_frequent(counts: Counter[str], room: int, min_freq: int) -> list[str]:
    """At most ``room`` tokens that occur ``min_freq`` times or more; the most frequent first, ties in text order."""
    ranked = sorted((token for token in counts if counts[token] >= min_freq), key=lambda token: (-counts[token], token))
    if counts and not ranked:
        raise DataError(f"nothing in the corpus occurs {min_freq} times or more", "lower min_freq")
    return ranked[:room]


def read_field(content: Mapping[str, Any], key: str, type_: type) -> Any:
    """A checked value of a tokenizer file; a list must hold distinct, valid, non-empty strings."""
    value = content.get(key)
    if not isinstance(value, type_):
        raise TokenizerError(f"{key!r} must be a {type_.__name__}" if key in content else f"{key!r} is missing")
    if isinstance(value, list):
        if not all(isinstance(item, str) and item for item in value):
            raise TokenizerError(f"{key!r} must hold non-empty strings only")
        if len(set(value)) != len(value):
            twice = next(item for item, count in Counter(value).items() if count > 1)
            raise TokenizerError(f"{key!r} holds {twice!r} twice")
        for item in value:
            check_text(item)
    return value


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
