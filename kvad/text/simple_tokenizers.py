"""Tokenizers that are a plain table: bytes, characters and words.

Their file is ``{"kvad": {"kind": ..., "specials": [roles], ...}}`` in ``tokenizer.json``. Ids of the byte tokenizer are
the byte values, followed by its specials (256, ...); characters and words follow the specials (0, ...). Standard
library only.

The word tokenizer splits text into words; the most frequent get an id, the others become UNK. It is lossy by design:
runs of spaces, and capitals with ``lower``, are lost. It splits in two ways:

- ``"whitespace"``: ``text.split()``; decoding joins words with one space.
- ``"words"``: words (with inner marks: ``don't``, ``well-known``, ``3.14``), single punctuation marks, and line breaks
  as tokens. Decoding follows typographic rules: no space before ``,`` or ``)``, none after ``(``; a straight quote
  opens, the next one closes.

      He said: "Don't (ever)!"   is split into   He | said | : | " | Don't | ( | ever | ) | ! | "   and decodes to
      itself

Invariant: without unknown tokens, encoding decoded text gives the same ids.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

from kvad.errors import DataError, TokenizerError, suggest
from kvad.text.base import (
    ENCODER_NAMES,
    NAMES,
    PostProcessor,
    SpecialTokens,
    Tokenizer,
    check_text,
    check_token_id,
    split_text,
    standard_specials,
)


class TableTokenizer(Tokenizer):
    """A list of tokens; subclasses define splitting (``_encode_plain``) and may define decoding."""

    def __init__(self, pieces: Sequence[bytes], specials: SpecialTokens) -> None:
        """Build the table from the bytes of every id in order, those of special tokens' names included."""
        self.special_tokens = specials
        self.vocab_size = len(pieces)
        self._pieces = pieces
        prefix_ids, suffix_ids = (() if id_ is None else (id_,) for id_ in (specials.cls, specials.sep))
        self._post_processor = PostProcessor(prefix_ids, suffix_ids)
        self._special_pattern = re.compile("(" + "|".join(re.escape(name) for name, _ in specials.named) + ")")

    @abstractmethod
    def _encode_plain(self, text: str, unknown: Counter[str]) -> list[int]:
        """Return the ids of ordinary text; unknown tokens become UNK and are counted in ``unknown``."""

    def _content(self) -> dict[str, Any]:
        """Return the file's entries besides ``kind`` and ``specials``."""
        return {}

    def _encode(self, text: str, specials: bool, unknown: Counter[str]) -> list[int]:
        ids: list[int] = []
        names = self.special_tokens.names()
        # split() with a group: ordinary text at even indices, special tokens at odd ones
        for index, part in enumerate(self._special_pattern.split(text) if specials else [text]):
            if index % 2:
                ids.append(names[part])
                continue
            for piece in split_text(part):
                ids += self._encode_plain(piece, unknown)
        return ids

    def incremental_decoder(self, *, skip_specials: bool = True) -> Callable[[int], bytes]:
        return self.token_bytes if skip_specials else self._display_bytes

    def _display_bytes(self, token_id: int) -> bytes:
        check_token_id(token_id, self.vocab_size)
        return self._pieces[token_id]

    @functools.cached_property
    def file_text(self) -> str:
        role_names = {**NAMES, **ENCODER_NAMES}
        roles = [role for role in role_names if getattr(self.special_tokens, role) is not None]
        roles += [name for name, _ in self.special_tokens.named if name not in role_names.values()]
        content = {"kind": self.kind, "specials": roles, **self._content()}
        return json.dumps({"kvad": content}, ensure_ascii=False, indent=1) + "\n"


class ByteTokenizer(TableTokenizer):
    """One id per byte of the UTF-8 text: nothing is unknown or trained."""

    kind = "byte"
    units = "byte", "bytes"

    def __init__(self, roles: Sequence[str] = ()) -> None:
        specials = standard_specials(roles, first=256)
        names = [name.encode() for name, _ in specials.named]
        super().__init__([*(bytes([value]) for value in range(256)), *names], specials)

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> ByteTokenizer:
        return cls(read_field(content, "specials", list))

    def _encode_plain(self, text: str, unknown: Counter[str]) -> list[int]:
        return list(text.encode("utf-8"))


class VocabularyTokenizer(TableTokenizer):
    """One id per token of a learned vocabulary."""

    option_types: ClassVar[Mapping[str, type]]  # of the constructor and of the file
    is_sorted = False  # order of ids: that of the tokens, else of their frequencies

    def __init__(self, tokens: Sequence[str], roles: Sequence[str] = ("unk",), *, lower: bool = False) -> None:
        specials = standard_specials(roles, first=0)
        names = [name for name, _ in specials.named]
        super().__init__([piece.encode() for piece in (*names, *tokens)], specials)
        self.lower = lower
        self._tokens = list(tokens)
        self._ids = {token: i for i, token in enumerate(tokens, start=len(names))}

    @abstractmethod
    def split_tokens(self, text: str) -> Sequence[str]:
        """Split a text, independent of the vocabulary."""

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        roles: Sequence[str] = ("unk",),
        *,
        vocab_size: int = 4096,
        min_freq: int = 1,
        **options: Any,
    ) -> Self:
        """Select the tokens with ``min_freq`` occurrences, most frequent first; ``options`` are the constructor's."""
        splitter = cls([], roles, **options)  # checks the options before a long read
        num_specials = splitter.vocab_size
        if vocab_size <= num_specials:
            hint = f"{num_specials} are special tokens."
            raise TokenizerError(f"vocab_size: must be at least {num_specials + 1}, got {vocab_size}", hint)
        counts: Counter[str] = Counter()
        for text in texts:
            for piece in split_text(text):
                counts.update(splitter.split_tokens(piece))
        frequent = (token for token in counts if counts[token] >= min_freq)
        ranked = sorted(frequent, key=lambda token: (-counts[token], token))
        if counts and not ranked:
            raise DataError(f"no token in the corpus occurs {min_freq} times or more", "Lower min_freq.")
        tokens = ranked[: vocab_size - num_specials]
        return cls(sorted(tokens) if cls.is_sorted else tokens, roles, **options)

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> Self:
        tokens, roles = (read_field(content, name, list) for name in ("tokens", "specials"))
        options = {name: read_field(content, name, kind) for name, kind in cls.option_types.items()}
        return cls(tokens, roles, **options)

    def _encode_plain(self, text: str, unknown: Counter[str]) -> list[int]:
        tokens = self.split_tokens(text)
        token_ids = list(map(self._ids.get, tokens))
        if None in token_ids:
            unknown.update(token for token, token_id in zip(tokens, token_ids, strict=True) if token_id is None)
        unk = self.special_tokens.unk or 0  # without UNK, _report_unknown raises
        return [unk if token_id is None else token_id for token_id in token_ids]

    def _content(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in self.option_types}, "tokens": self._tokens}


class CharTokenizer(VocabularyTokenizer):
    """One id per Unicode code point of the training text (lower-cased with ``lower``), in code point order."""

    kind = "char"
    units = "character", "characters"
    option_types: ClassVar[Mapping[str, type]] = {"lower": bool}
    is_sorted = True

    def split_tokens(self, text: str) -> Sequence[str]:
        return text.lower() if self.lower else text

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> CharTokenizer:
        if not all(len(char) == 1 for char in read_field(content, "tokens", list)):
            raise TokenizerError("'tokens' of a character tokenizer must be single characters")
        return super().from_content(content)


def read_field(content: Mapping[str, Any], key: str, expected_type: type) -> Any:
    """Return a checked value of a tokenizer file; a list has distinct, non-empty strings."""
    value = content.get(key)
    if not isinstance(value, expected_type):
        raise TokenizerError(f"{key!r} must be a {expected_type.__name__}" if key in content else f"{key!r} is missing")
    if isinstance(value, list):
        if not all(isinstance(item, str) and item for item in value):
            raise TokenizerError(f"{key!r} must contain non-empty strings only")
        if len(set(value)) != len(value):
            duplicate = next(item for item, count in Counter(value).items() if count > 1)
            raise TokenizerError(f"{key!r} contains {duplicate!r} twice")
        for item in value:
            check_text(item)
    return value


_OPENING = frozenset("([{<«“‘„‚¿¡「『《$£€¥@#")
_CLOSING = frozenset(".,;:!?%)]}>»”’…、。，．；：！？」』》")
_QUOTES = frozenset("\"'`")


@functools.cache
def _patterns() -> tuple[frozenset[str], re.Pattern[str], re.Pattern[str]]:
    r"""Return (marks, pattern for text without marks, exact but slow pattern for any text).

    Marks are combining characters and the joiners of Indic and Persian words, which Python's ``\w`` lacks. Without
    them, Hindi, or an accent that is a separate character, would be split inside words.
    """
    planes = (range(0x300, 0x20000), range(0xE0100, 0xE01F0))
    combining = "".join(chr(i) for plane in planes for i in plane if unicodedata.category(chr(i))[0] == "M")
    marks = f"\u200c\u200d{combining}"

    def words(letter: str) -> re.Pattern[str]:
        return re.compile(rf"\n|{letter}+(?:(?:['’-]|(?<=\d)[.,](?=\d)){letter}+)*|\S")

    return frozenset(marks), words(r"\w"), words(rf"[\w{marks}]")


def split_words(text: str) -> list[str]:
    marks, plain, with_marks = _patterns()
    return (plain if text.isascii() or marks.isdisjoint(text) else with_marks).findall(text)


SPLITS: dict[str, Callable[[str], list[str]]] = {"words": split_words, "whitespace": str.split}


class SpacingRules:
    """Decides, for one text, whether a space precedes the next word."""

    def __init__(self, split: str) -> None:
        self._is_whitespace = split == "whitespace"
        self._suppress_space = True  # no space at the start of a text or line, or after an opening mark
        self._open_quotes: set[str] = set()  # straight quotes without a partner on this line

    def needs_space(self, word: str) -> str:
        space = "" if self._suppress_space else " "
        if self._is_whitespace:
            self._suppress_space = False
            return space
        if word == "\n":
            self._suppress_space = True
            self._open_quotes.clear()
            return ""
        closes = word in _CLOSING or word in self._open_quotes
        self._suppress_space = word in _OPENING or (word in _QUOTES and not closes)
        if word in _QUOTES:
            self._open_quotes ^= {word}
        return "" if closes else space


class WordTokenizer(VocabularyTokenizer):
    """One id per word in the order of frequency, see the module's description."""

    kind = "word"
    units = "word", "words"
    has_token_bytes = False  # spaces depend on both words
    option_types: ClassVar[Mapping[str, type]] = {"split": str, "lower": bool}

    def __init__(
        self, words: Sequence[str], roles: Sequence[str] = ("unk",), *, split: str = "words", lower: bool = False
    ) -> None:
        super().__init__(words, roles, lower=lower)
        if split not in SPLITS:
            raise TokenizerError(f"unknown split {split!r}", suggest(split, SPLITS))
        self.split = split

    def split_tokens(self, text: str) -> list[str]:
        return SPLITS[self.split](text.lower() if self.lower else text)

    def incremental_decoder(self, *, skip_specials: bool = True) -> Callable[[int], bytes]:
        spacing = SpacingRules(self.split)
        bytes_of_token = super().incremental_decoder(skip_specials=skip_specials)

        def add(token_id: int) -> bytes:
            piece = bytes_of_token(token_id)
            return spacing.needs_space(piece.decode()).encode() + piece if piece else b""

        return add
