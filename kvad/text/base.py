"""What every tokenizer promises (the ``Tokenizer`` protocol), its special tokens, and the checks they share.

Invariant: ``decode(ids) == b"".join(map(joiner(), ids)).decode("utf-8", "replace")``.  A tokenizer therefore decodes
token by token, never by looking ahead, so that a stream can say exactly what ``decode`` would have said
(``detokenize.py``).

Special tokens are never made by accident: text that happens to spell ``<|endofdoc|>`` is ordinary text unless the
caller asks for ``encode(text, specials=True)``.  Standard library only.
"""

from __future__ import annotations

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
NAMES = {
    "separator": "<|endofdoc|>",
    "bos": "<|bos|>",
    "eos": "<|eos|>",
    "pad": "<|pad|>",
    "unk": "<|unk|>",
}
ENCODER_NAMES = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}  # as BERT spells them
UnknownPolicy = Literal["warn", "error"]
MAX_PIECE_CHARS = 1 << 20  # a longer document is encoded in pieces of about this many characters


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens by role (None: this tokenizer has none), and all of them by name.

    ``separator`` opens every document: it is what an empty prompt is generated from.  Several roles may be one token:
    in XLM-R ``cls`` is ``bos`` and ``sep`` is ``eos``.
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
        """Every special token, also those without a role (``<|im_start|>``): name -> id."""
        return dict(self.named)


class Tokenizer(Protocol):
    """Text <-> ids.  Safe to call from several threads; never truncates, pads or adds a special token by itself."""

    on_unknown: UnknownPolicy

    @property
    def kind(self) -> str: ...  # "bpe" | "unigram" | "wordpiece" | "wordlevel"; kvad's own: "byte" | "char" | "word"

    @property
    def vocab_size(self) -> int: ...  # the highest id + 1, added tokens included

    @property
    def special_tokens(self) -> SpecialTokens: ...

    @property
    def source_tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the source texts, where they have another than the target texts (Marian): else None."""
        ...

    @property
    def languages(self) -> Mapping[str, int]:
        """Code -> id of the languages that ``frame`` takes; generation in a language starts with its id."""
        ...

    def encode(self, text: str, *, specials: bool = False) -> list[int]: ...

    def encode_batch(self, texts: Iterable[str], *, specials: bool = False) -> list[list[int]]: ...

    def add_special_tokens(self, ids: Sequence[int], *, language: str | None = None) -> list[int]:
        """``ids`` with what the model's texts have around them: ``[CLS] x [SEP]``, ``x </s>``; often nothing.

        ``language`` ("deu_Latn"): where the model marks it; its default otherwise.  Raises TokenizerError.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_specials: bool = True) -> str: ...

    def incremental_decoder(self, *, skip_specials: bool = True) -> Callable[[int], bytes]:
        """A function, good for one text, from the next id to the bytes that it adds to the text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token, possibly not valid UTF-8; ``b""`` for a special token."""
        ...

    def token_text(self, token_id: int) -> str:
        """A printable form for tables: spaces as ``␣``, the rest escaped."""
        ...

    def save(self, folder: Path) -> None: ...

    def fingerprint(self) -> str:
        """sha256 (hex) of all that decides which ids a text becomes, and which text ids become."""
        ...


class BaseTokenizer(ABC):
    """What two kinds of tokenizer share that encode text by text; what became UNK is told once, of all of them."""

    units: ClassVar[tuple[str, str]]  # what a token is called in a message, one and many
    special_tokens: SpecialTokens
    on_unknown: UnknownPolicy

    @abstractmethod
    def _encode(self, text: str, specials: bool, unknown: Counter[str]) -> list[int]:
        """Ids of one text; what the vocabulary lacks becomes UNK and is counted in ``unknown``."""

    @abstractmethod
    def incremental_decoder(self, *, skip_specials: bool = True) -> Callable[[int], bytes]: ...

    @abstractmethod
    def _shown(self, token_id: int) -> bytes:
        """The bytes of a token, of a special one its name."""

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
        return printable_token(self._shown(token_id))


def standard_specials(roles: Sequence[str], first: int) -> SpecialTokens:
    """The named roles, in their fixed order, with ids from ``first`` on; the separator always exists.

    What is spelled ``<...>`` is no role but a special token of its own (``<extra_id_0>``), and comes after them.
    """
    known = {**NAMES, **ENCODER_NAMES}
    own = list(dict.fromkeys(role for role in roles if role.startswith("<") and role.endswith(">")))
    unknown = [role for role in roles if role not in known and role not in own]
    if unknown:
        raise TokenizerError(f"unknown special token role {unknown[0]!r}", suggest(unknown[0], known))
    if taken := [name for name in own if name in known.values()]:
        role = next(role for role, name in known.items() if name == taken[0])
        raise TokenizerError(f"the special token {taken[0]} has a role", f"name it {role!r}")
    chosen = [role for role in known if role == "separator" or role in roles]
    ids = {role: first + i for i, role in enumerate(chosen)}
    named = [known[role] for role in chosen] + own
    return SpecialTokens(**ids, named=tuple((name, first + i) for i, name in enumerate(named)))


def check_text(text: str) -> None:
    """Refuse what UTF-8 cannot carry: a lone surrogate, as ``json`` and ``surrogateescape`` may leave behind."""
    if not isinstance(text, str):
        raise TokenizerError(f"text must be a str, not {type(text).__name__}")
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = f"character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}"
        raise TokenizerError(f"the text is not valid Unicode: {where}", "replace or remove it") from None


def check_texts(texts: Iterable[str]) -> Iterable[str]:
    """A str is an iterable of its characters, which nobody means."""
    if isinstance(texts, str):
        raise TokenizerError("expected several texts, got one str", "put it in a list: [text]")
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
        "do the model and the tokenizer belong together?",
    )


def report_unknown(unknown: Counter[str], one: str, many: str, *, has_unk: bool, on_unknown: UnknownPolicy) -> None:
    """One line on stderr for all that became UNK in one call, or the error that names it."""
    if not unknown:
        return
    shown = ", ".join(f"{text!r} x{count}" if count > 1 else repr(text) for text, count in unknown.most_common(5))
    more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
    noun = one if unknown.total() == 1 else many
    found = f"{unknown.total()} {noun} not in the vocabulary"
    if on_unknown == "error":
        raise TokenizerError(f"{found}: {shown}{more}", "train the tokenizer on text that has them, or allow UNK")
    if not has_unk:
        raise TokenizerError(f"{found}, and this tokenizer has no UNK: {shown}{more}")
    print(f"kvad: {found} became UNK: {shown}{more}", file=sys.stderr)


_WORD_END = re.compile(r"\S(?=\s)")  # Python's \s contains every character that the library's \s does


def split_text(text: str, limit: int = MAX_PIECE_CHARS) -> Iterator[str]:
    """Pieces of about ``limit`` characters, cut only where a space follows what is none.

    No word, and no pretoken of the GPT-2 pattern, spans that place (a space belongs to the word after it): encoding the
    pieces apart gives the same ids.

        list(cut("ab cd  ef", limit=4)) == ["ab cd", "  ef"]
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
    """``b" def\\n"`` -> ``"␣def\\\\n"``; bytes that are not UTF-8 -> ``<0xE3>``."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in raw)
    shown = (char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
    return "".join(shown).replace(" ", "␣")


def write_text(path: Path, text: str) -> None:
    """Write beside, flush to the disk, then rename: what was there before stays whole if the disk refuses."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):  # what stood in the way of writing it may stand in the way of this
            temporary.unlink(missing_ok=True)
        raise SaveError(f"cannot write {path}: {error.strerror}") from error
