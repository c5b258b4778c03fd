"""The Tokenizer class, special tokens, and shared checks.

Invariant: ``decode(ids) == b"".join(map(incremental_decoder(), ids)).decode("utf-8", "replace")``. A tokenizer decodes
token by token without lookahead, so streamed text equals ``decode`` (``detokenizer.py``).

Special tokens are never created by accident: text that spells ``<|endofdoc|>`` is ordinary text unless the caller uses
``encode(text, specials=True)``. Standard library only.
"""

from __future__ import annotations

import hashlib
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

from kvad import storage
from kvad.errors import TokenizerError, suggest

FILE_NAME = "tokenizer.json"
NAMES = {"separator": "<|endofdoc|>", "bos": "<|bos|>", "eos": "<|eos|>", "pad": "<|pad|>", "unk": "<|unk|>"}
ENCODER_NAMES = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}  # BERT's spelling
MAX_PIECE_CHARS = 1 << 20  # longer documents are encoded in pieces of about this many characters


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens by role (None: missing), and all of them by name.

    ``separator`` opens every document; an empty prompt starts with it. Several roles may share a token: in XLM-R
    ``cls`` is ``bos`` and ``sep`` is ``eos``.
    """

    separator: int | None = None
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unk: int | None = None
    named: tuple[tuple[str, int], ...] = ()
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a text: EOS, and the separator unless it only opens texts as BOS."""
        separator = self.separator if self.separator != self.bos or self.eos is None else None
        return tuple(dict.fromkeys(token for token in (self.eos, separator) if token is not None))

    def names(self) -> dict[str, int]:
        """Return every special token, also those without a role (``<|im_start|>``): name -> id."""
        return dict(self.named)


LANGUAGE_PLACEHOLDER = -1
FIRST_TEXT, SECOND_TEXT = -2, -3  # in the template of a pair


@dataclass(frozen=True)
class PostProcessor:
    """Special tokens around one text, and language codes.

    In its two short rows of ids, ``LANGUAGE_PLACEHOLDER`` is replaced by the language's code:

        mBART     () x (</s>, LANGUAGE)        apply([7], "de_DE") == [7, 2, 250003]
        NLLB      (LANGUAGE,) x (</s>,)        apply([7], "deu_Latn") == [256042, 7, 2]
    """

    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    languages: Mapping[str, int] = field(default_factory=dict)  # code -> id
    language: int | None = None  # default id
    pair: tuple[tuple[int, int], ...] = ()  # template of two texts: ids or placeholders with token types; () if none

    def apply_to_pair(self, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return ids and token types of two texts with special tokens; raise TokenizerError without a template."""
        if not self.pair:
            raise TokenizerError("this tokenizer has no template for two texts", "Give one text.")
        texts = {FIRST_TEXT: first, SECOND_TEXT: second}
        tokens = [(token, token_type) for item, token_type in self.pair for token in texts.get(item, (item,))]
        return [token for token, _ in tokens], [token_type for _, token_type in tokens]

    def apply(self, ids: Sequence[int], language: str | None = None) -> list[int]:
        """Return ``ids`` with special tokens; raise TokenizerError for an unsupported language."""
        code = self.language
        if language is not None:
            if LANGUAGE_PLACEHOLDER not in self.prefix_ids + self.suffix_ids:
                raise TokenizerError(f"language {language!r}: this tokenizer has no language tokens")
            code = self.languages.get(language.strip("_<>"))  # "de", "__de__" and ">>de<<" are equal
            if code is None:
                raise TokenizerError(f"unknown language {language!r}", suggest(language, self.languages))
        prefix_ids, suffix_ids = self.filled(code)
        return [*prefix_ids, *ids, *suffix_ids]

    def filled(self, code: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return both rows with the id of a language; None omits it."""
        prefix_ids, suffix_ids = (
            tuple(id_ for i in row if (id_ := code if i == LANGUAGE_PLACEHOLDER else i) is not None)
            for row in (self.prefix_ids, self.suffix_ids)
        )
        return prefix_ids, suffix_ids


class Tokenizer(ABC):
    """Converts text to ids and back, thread-safe; never truncates or pads, adds special tokens only on request."""

    kind: str  # "bpe" | "unigram" | "wordpiece" | "wordlevel"; kvad's formats: "byte" | "char" | "word"
    vocab_size: int  # the highest id + 1, added tokens included
    special_tokens: SpecialTokens
    on_unknown: Literal["warn", "error"] = "warn"  # for text without a token
    source_tokenizer: Tokenizer | None = None  # of source texts if it differs from that of target texts (Marian)
    units: ClassVar[tuple[str, str]] = "piece of text", "pieces of text"  # a token in messages, singular and plural
    has_token_bytes: ClassVar[bool] = True  # after the first token, a token's text is ``token_bytes`` in every text
    _post_processor: PostProcessor

    @property
    def languages(self) -> Mapping[str, int]:
        """Codes and ids of languages for ``add_special_tokens``; targets start with the id."""
        return self._post_processor.languages

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.special_tokens.names().values())

    # ------------------------------------------------------------ text -> ids

    def _encode_batch(self, texts: Iterable[str], specials: bool, unknown: Counter[str]) -> list[list[int]]:
        """Return the ids of each text; unknown tokens become UNK and are counted in ``unknown``."""
        return [self._encode(text, specials, unknown) for text in texts]

    def _encode(self, text: str, specials: bool, unknown: Counter[str]) -> list[int]:
        raise NotImplementedError  # of a subclass without a method for batches

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        return self.encode_batch([text], specials=specials)[0]

    def encode_batch(self, texts: Iterable[str], *, specials: bool = False) -> list[list[int]]:
        unknown: Counter[str] = Counter()
        rows = self._encode_batch(checked_texts(texts), specials, unknown)
        if unknown:
            self._report_unknown(unknown)
        return rows

    @property
    def _has_unk(self) -> bool:
        """True if unknown text becomes UNK."""
        return self.special_tokens.unk is not None

    def _report_unknown(self, unknown: Counter[str]) -> None:
        """Print one line for all unknown tokens of a call, or raise an error that names them."""
        listed = ", ".join(f"{text!r} x{count}" if count > 1 else repr(text) for text, count in unknown.most_common(5))
        listed += f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        summary = f"{unknown.total()} {self.units[unknown.total() > 1]} not in the vocabulary"
        if self.on_unknown == "error":
            hint = "Train the tokenizer on text that contains them, or allow UNK."
            raise TokenizerError(f"{summary}: {listed}", hint)
        if not self._has_unk:
            raise TokenizerError(f"{summary}, and this tokenizer has no UNK: {listed}")
        print(f"kvad: {summary} became UNK: {listed}", file=sys.stderr)

    def add_special_tokens(self, ids: Sequence[int], *, language: str | None = None) -> list[int]:
        """Return ``ids`` with the model's special tokens, if any: ``[CLS] x [SEP]``, ``x </s>``.

        ``language`` ("deu_Latn") is for models with language tokens (default: theirs). Raises TokenizerError.
        """
        return self._post_processor.apply(ids, language)

    def add_pair_tokens(self, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return ids and token types of two texts with the model's special tokens: ``[CLS] x [SEP] y [SEP]``.

        Raises TokenizerError if the tokenizer has no template for two texts.
        """
        return self._post_processor.apply_to_pair(first, second)

    # ------------------------------------------------------------ ids -> text

    @abstractmethod
    def incremental_decoder(self, *, skip_specials: bool = True) -> Callable[[int], bytes]:
        """Return a function for one text that maps the next id to the bytes it adds."""

    @abstractmethod
    def _display_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, or the name of a special one."""

    def decode(self, ids: Sequence[int], *, skip_specials: bool = True) -> str:
        return b"".join(map(self.incremental_decoder(skip_specials=skip_specials), ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the raw bytes of a token, possibly invalid UTF-8; ``b""`` for a special token."""
        return b"" if token_id in self._special_ids else self._display_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        r"""Return a printable form: ``b" def\\n"`` as ``"␣def\\\\n"``, bytes that are not UTF-8 as ``<0xE3>``."""
        raw = self._display_bytes(token_id)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in raw)
        listed = (char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
        return "".join(listed).replace(" ", "␣")

    # ------------------------------------------------------------ files

    @property
    @abstractmethod
    def file_text(self) -> str:
        """Content of the tokenizer's file."""

    def save(self, folder: Path) -> None:
        storage.atomic.write_bytes(Path(folder) / FILE_NAME, self.file_text.encode())

    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of everything that determines ids and text."""
        return hashlib.sha256(self.file_text.encode()).hexdigest()


def standard_specials(roles: Sequence[str], first: int) -> SpecialTokens:
    """Build special tokens for the roles, in fixed order, with ids from ``first``.

    The separator always exists.  Entries spelled ``<...>`` have no role (``<extra_id_0>``) and follow.
    """
    known = {**NAMES, **ENCODER_NAMES}
    custom_names = list(dict.fromkeys(role for role in roles if role.startswith("<") and role.endswith(">")))
    unknown = [role for role in roles if role not in known and role not in custom_names]
    if unknown:
        raise TokenizerError(f"unknown special token role {unknown[0]!r}", suggest(unknown[0], known))
    if reserved_names := [name for name in custom_names if name in known.values()]:
        role = next(role for role, name in known.items() if name == reserved_names[0])
        raise TokenizerError(f"the special token {reserved_names[0]} has a role", f"Name the role {role!r}.")
    listed_roles = [role for role in known if role == "separator" or role in roles]
    ids = {role: first + i for i, role in enumerate(listed_roles)}
    named = [known[role] for role in listed_roles] + custom_names
    return SpecialTokens(**ids, named=tuple((name, first + i) for i, name in enumerate(named)))


def check_text(text: str) -> None:
    """Reject lone surrogates, which ``json`` can produce but UTF-8 cannot encode."""
    if not isinstance(text, str):
        raise TokenizerError(f"text must be a str, not {type(text).__name__}")
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        problem = f"character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}"
        raise TokenizerError(f"the text is not valid Unicode: {problem}", "Replace or remove it.") from None


def checked_texts(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts that ``check_text`` accepts; reject a str, which would be iterated by character."""
    if isinstance(texts, str):
        raise TokenizerError("expected several texts, got one str", "Put it in a list: [text].")
    for text in texts:
        check_text(text)
        yield text


def check_token_id(token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        message = f"token id {token_id} is outside the vocabulary of {vocab_size} tokens (0 to {vocab_size - 1})"
        raise TokenizerError(message, "Check that the model and the tokenizer belong together.")


_WORD_END = re.compile(r"\S(?=\s)")  # Python's \s includes every character of the library's \s


def split_text(text: str, limit: int = MAX_PIECE_CHARS) -> Iterator[str]:
    """Yield pieces of about ``limit`` characters, split only where a space follows a non-space.

    No word and no pretoken of the GPT-2 pattern spans such a position (a space belongs to the next word), so encoding
    the pieces separately gives the same ids.

        list(split_text("ab cd  ef", limit=4)) == ["ab cd", "  ef"]
    """
    start = 0
    while len(text) - start > limit:
        match = _WORD_END.search(text, start + limit - 1)
        if match is None:
            break
        yield text[start : match.end()]
        start = match.end()
    yield text[start:] if start else text
