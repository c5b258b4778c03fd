"""The Tokenizer protocol, special tokens, and shared checks.

Invariant: ``decode(ids) == b"".join(map(incremental_decoder(), ids)).decode("utf-8", "replace")``. A tokenizer decodes
token by token without lookahead, so streamed text equals ``decode`` (``detokenizer.py``).

Special tokens are never created by accident: text that spells ``<|endofdoc|>`` is ordinary text unless the caller uses
``encode(text, specials=True)``. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from kvad.errors import SaveError, TokenizerError, suggest

FILE_NAME = "tokenizer.json"
NAMES = {"separator": "<|endofdoc|>", "bos": "<|bos|>", "eos": "<|eos|>", "pad": "<|pad|>", "unk": "<|unk|>"}
ENCODER_NAMES = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}  # BERT's spelling
UnknownPolicy = Literal["warn", "error"]
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

    def names(self) -> dict[str, int]:
        """Return every special token, also those without a role (``<|im_start|>``): name -> id."""
        return dict(self.named)


class Tokenizer(Protocol):
    """Converts text to ids and back, thread-safe; never truncates, pads or adds special tokens."""

    on_unknown: UnknownPolicy

    @property
    def kind(
        self,
    ) -> str: ...  # "bpe" | "unigram" | "wordpiece" | "wordlevel"; kvad's formats: "byte" | "char" | "word"

    @property
    def vocab_size(self) -> int: ...  # the highest id + 1, added tokens included

    @property
    def special_tokens(self) -> SpecialTokens: ...

    @property
    def source_tokenizer(self) -> Tokenizer | None:
        """Tokenizer of source texts if it differs from that of target texts (Marian), else None."""
        ...

    @property
    def languages(self) -> Mapping[str, int]:
        """Codes and ids of languages for ``add_special_tokens``; targets start with the id."""
        ...

    def encode(self, text: str, *, specials: bool = False) -> list[int]: ...

    def encode_batch(self, texts: Iterable[str], *, specials: bool = False) -> list[list[int]]: ...

    def add_special_tokens(self, ids: Sequence[int], *, language: str | None = None) -> list[int]:
        """Return ``ids`` with the model's special tokens, if any: ``[CLS] x [SEP]``, ``x </s>``.

        ``language`` ("deu_Latn") is for models with language tokens (default: theirs). Raises TokenizerError.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_specials: bool = True) -> str: ...

    def incremental_decoder(self, *, skip_specials: bool = True) -> Callable[[int], bytes]:
        """Return a function for one text that maps the next id to the bytes it adds."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the raw bytes of a token, possibly invalid UTF-8; ``b""`` for a special token."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return a printable form: spaces as ``␣``, the rest escaped."""
        ...

    def save(self, folder: Path) -> None: ...

    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of everything that determines ids and text."""
        ...


class BaseTokenizer(ABC):
    """Base of tokenizers that encode text by text; unknown tokens are reported once per call."""

    units: ClassVar[tuple[str, str]]  # name of a token in messages, singular and plural
    special_tokens: SpecialTokens
    on_unknown: UnknownPolicy

    @abstractmethod
    def _encode(self, text: str, specials: bool, unknown: Counter[str]) -> list[int]:
        """Return the ids of one text; unknown tokens become UNK and are counted in ``unknown``."""

    @abstractmethod
    def incremental_decoder(self, *, skip_specials: bool = True) -> Callable[[int], bytes]: ...

    @abstractmethod
    def _display_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, or the name of a special one."""

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        return self.encode_batch([text], specials=specials)[0]

    def encode_batch(self, texts: Iterable[str], *, specials: bool = False) -> list[list[int]]:
        unknown: Counter[str] = Counter()
        rows = [self._encode(text, specials, unknown) for text in check_texts(texts)]
        has_unk = self.special_tokens.unk is not None
        report_unknown(unknown, *self.units, has_unk=has_unk, on_unknown=self.on_unknown)
        return rows

    def decode(self, ids: Sequence[int], *, skip_specials: bool = True) -> str:
        return b"".join(map(self.incremental_decoder(skip_specials=skip_specials), ids)).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return printable_token(self._display_bytes(token_id))

    @property
    @abstractmethod
    def _file_text(self) -> str:
        """Content of the tokenizer's file."""

    def save(self, folder: Path) -> None:
        write_text(Path(folder) / FILE_NAME, self._file_text)

    def fingerprint(self) -> str:
        return hashlib.sha256(self._file_text.encode()).hexdigest()


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


def check_texts(texts: Iterable[str]) -> Iterable[str]:
    """Reject a str, which would be iterated by character."""
    if isinstance(texts, str):
        raise TokenizerError("expected several texts, got one str", "Put it in a list: [text].")
    return texts


def check_on_unknown(on_unknown: str) -> UnknownPolicy:
    if on_unknown == "warn":
        return "warn"
    if on_unknown == "error":
        return "error"
    raise TokenizerError(f"on_unknown={on_unknown!r}", suggest(on_unknown, ["warn", "error"]))


def out_of_range_error(token_id: int, vocab_size: int) -> TokenizerError:
    return TokenizerError(
        f"token id {token_id} is outside the vocabulary of {vocab_size} tokens (0 to {vocab_size - 1})",
        "Check that the model and the tokenizer belong together.",
    )


def report_unknown(
    unknown: Counter[str], singular: str, plural: str, *, has_unk: bool, on_unknown: UnknownPolicy
) -> None:
    """Print one line for all unknown tokens of a call, or raise an error that names them."""
    if not unknown:
        return
    listed = ", ".join(f"{text!r} x{count}" if count > 1 else repr(text) for text, count in unknown.most_common(5))
    omitted = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
    noun = singular if unknown.total() == 1 else plural
    summary = f"{unknown.total()} {noun} not in the vocabulary"
    if on_unknown == "error":
        raise TokenizerError(
            f"{summary}: {listed}{omitted}", "Train the tokenizer on text that contains them, or allow UNK."
        )
    if not has_unk:
        raise TokenizerError(f"{summary}, and this tokenizer has no UNK: {listed}{omitted}")
    print(f"kvad: {summary} became UNK: {listed}{omitted}", file=sys.stderr)


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


def printable_token(raw: bytes) -> str:
    r"""Convert ``b" def\\n"`` to ``"␣def\\\\n"``, and bytes that are not UTF-8 to ``<0xE3>``."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in raw)
    listed = (char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
    return "".join(listed).replace(" ", "␣")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically; on an error the old file is unchanged."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):  # the error that prevented writing may prevent this too
            temporary.unlink(missing_ok=True)
        raise SaveError(f"cannot write {path}: {error.strerror}") from error
