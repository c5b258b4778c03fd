"""Train or load a tokenizer of any kind: the one door of ``kvad.text``.

A tokenizer is one file, ``tokenizer.json``: either the Hugging Face ``tokenizers`` format (byte-level BPE and whatever
else that library loads), or kvad's own table of bytes, characters or words.  Which one it is, the file says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvad.errors import DataError, TokenizerError, nearest
from kvad.text.base import FILE_NAME, NAMES, Specials, Tokenizer, check_text, check_texts
from kvad.text.bpe import CONFIG_NAME, BpeTokenizer, train_bpe
from kvad.text.plain import ByteTokenizer, CharTokenizer, field
from kvad.text.words import WordTokenizer

__all__ = ["KINDS", "Progress", "Specials", "Tokenizer", "load_tokenizer", "train_tokenizer"]

KINDS = ("bpe", "byte", "char", "word")
Progress = Callable[[int, int], None]  # (texts read, characters read)

_OURS = re.compile(r'\s*\{\s*"kvad"\s*:')


def train_tokenizer(
    kind: str,
    texts: Iterable[str],
    *,
    vocab_size: int = 4096,
    min_freq: int = 1,
    lower: bool = False,
    split: str = "words",
    specials: Sequence[str] | None = None,
    on_unknown: str = "warn",
    progress: Progress | None = None,
) -> Tokenizer:
    """Learn a vocabulary from documents, which are read once and need not fit in memory.

    ``vocab_size`` is a ceiling, specials included; ``min_freq`` is for tokens (bpe: for pairs to merge); both mean
    nothing to ``byte``, which has nothing to learn and reads no text.  ``lower`` is for char and word, ``split`` for
    word (``words.SPLITS``).  ``specials`` are roles out of separator, bos, eos, pad, unk; the separator is always
    there, and by default unk for char and word.
    Raises TokenizerError for an option that cannot be, DataError for an empty corpus.
    """
    if kind not in KINDS:
        raise TokenizerError(f"unknown kind of tokenizer {kind!r}", nearest(kind, KINDS))
    if min_freq < 1:
        raise TokenizerError(f"min_freq {min_freq} is below 1")
    if lower and kind not in ("char", "word"):
        raise TokenizerError(f"a {kind} tokenizer is lossless and cannot lower-case", "use char or word")
    if split != "words" and kind != "word":
        raise TokenizerError(f"split is for word tokenizers, not for {kind}")
    roles = specials if specials is not None else ("unk",) if kind in ("char", "word") else ()
    if kind == "byte":
        return ByteTokenizer(roles, on_unknown=on_unknown)
    corpus = _Corpus(texts, progress)
    tokenizer: Tokenizer
    if kind == "bpe":
        tokenizer = train_bpe(corpus, roles, vocab_size=vocab_size, min_freq=min_freq, on_unknown=on_unknown)
    elif kind == "char":
        tokenizer = CharTokenizer.train(
            corpus, roles, vocab_size=vocab_size, min_freq=min_freq, lower=lower, on_unknown=on_unknown
        )
    else:
        tokenizer = WordTokenizer.train(
            corpus, roles, vocab_size=vocab_size, min_freq=min_freq, split=split, lower=lower, on_unknown=on_unknown
        )
    if not corpus.num_chars:
        raise DataError("the corpus has no text to train a tokenizer on", f"{corpus.num_texts} documents, all empty")
    return tokenizer


class _Corpus:
    """The documents, checked and counted while somebody else reads them."""

    def __init__(self, texts: Iterable[str], progress: Progress | None) -> None:
        self._texts = check_texts(texts)
        self._progress = progress
        self.num_texts = 0
        self.num_chars = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            check_text(text)
            self.num_texts += 1
            self.num_chars += len(text)
            if self._progress is not None:
                self._progress(self.num_texts, self.num_chars)
            yield text


def load_tokenizer(
    folder_or_file: Path, *, roles: Mapping[str, str | None] | None = None, on_unknown: str = "warn"
) -> Tokenizer:
    """Read ``tokenizer.json``, or the file that is named.

    ``roles`` ({"bos": "<s>"}) says which special token is which in a Hugging Face file; without it,
    ``tokenizer_config.json`` beside the file does, and then the names in common use.  Raises TokenizerError that names
    the file.
    """
    path = Path(folder_or_file)
    path = path / FILE_NAME if path.is_dir() else path
    text = _read(path)
    try:
        if _OURS.match(text):
            return _load_table(_parse(text), on_unknown)
        return _load_library(path, text, roles, on_unknown)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error.message}", error.hint) from error.__cause__


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TokenizerError(
            f"there is no {path.name} in {path.parent}", "name a folder with a tokenizer.json, or the file itself"
        ) from None
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: not UTF-8 at byte {error.start}", "a tokenizer.json is text") from None


def _parse(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise TokenizerError(f"not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"expected a JSON object, found a {type(content).__name__}")
    return content


def _load_table(file: dict[str, Any], on_unknown: str) -> Tokenizer:
    content = field(file, "kvad", dict)
    kind = field(content, "kind", str)
    if kind == "byte":
        return ByteTokenizer.from_content(content, on_unknown)
    if kind == "char":
        return CharTokenizer.from_content(content, on_unknown)
    if kind == "word":
        return WordTokenizer.from_content(content, on_unknown)
    raise TokenizerError(f"unknown kind of tokenizer {kind!r}", nearest(kind, KINDS))


def _load_library(path: Path, text: str, roles: Mapping[str, str | None] | None, on_unknown: str) -> Tokenizer:
    from tokenizers import Tokenizer as Backend  # type: ignore[import-untyped]

    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises nothing more special
        _parse(text)  # says where, when it is not JSON at all
        raise TokenizerError(f"not a tokenizer that the tokenizers library reads: {error}") from None
    if roles is None:
        roles = _roles_beside(path, backend.get_vocab(with_added_tokens=True))
    return BpeTokenizer(backend, roles, on_unknown=on_unknown)


def _roles_beside(path: Path, vocabulary: Container[str]) -> dict[str, str | None]:
    """``{"bos_token": "<s>"}``, or ``{"content": "<s>"}`` in its place, of the tokenizer_config.json beside.

    Names that the vocabulary lacks are nobody's: such files often keep the defaults of a class.
    """
    beside = path.with_name(CONFIG_NAME)
    if not beside.exists():
        return {}
    try:
        config = _parse(_read(beside))
    except TokenizerError as error:
        raise TokenizerError(f"{CONFIG_NAME}: {error.message}", error.hint) from None
    found: dict[str, str | None] = {}
    for role in NAMES:
        if f"{role}_token" in config:
            value = config[f"{role}_token"]
            name = value.get("content") if isinstance(value, dict) else value
            found[role] = name if isinstance(name, str) and name in vocabulary else None
    return found
