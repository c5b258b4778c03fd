"""Train or load a tokenizer of any kind: the one door of ``kvad.text``.

What kvad saves is one file, ``tokenizer.json``: either the Hugging Face ``tokenizers`` format (byte-level BPE and
whatever else that library loads), or kvad's own: a table of bytes, characters or words, or SentencePiece models with
what stood beside them.  Which one it is, the file says.  Folders of other makes are read too (``load_tokenizer``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvad.errors import DataError, TokenizerError, suggest
from kvad.text.base import FILE_NAME, Tokenizer, check_text, check_texts
from kvad.text.hf_config import byte_level_bpe, parse_object, read_settings, read_text, wordpiece
from kvad.text.hf_tokenizer import HFTokenizer, apply_settings, special_roles, train_bpe
from kvad.text.sentencepiece_tokenizer import SUFFIXES, SentencePieceTokenizer, is_sentencepiece, load_sentencepiece
from kvad.text.simple_tokenizers import ByteTokenizer, CharTokenizer, WordTokenizer, read_field

KINDS = ("bpe", "byte", "char", "word")
Progress = Callable[[int, int], None]  # (texts read, characters read)

_KVAD_KEY = re.compile(r'\s*\{\s*"kvad"\s*:')


def train_tokenizer(
    kind: str,
    texts: Iterable[str],
    *,
    vocab_size: int = 4096,
    min_freq: int = 1,
    lower: bool = False,
    split: str = "words",
    specials: Sequence[str] | None = None,
    closed: bool = False,
    on_unknown: str = "warn",
    progress: Progress | None = None,
) -> Tokenizer:
    """Learn a vocabulary from documents, which are read once and need not fit in memory.

    ``vocab_size`` is a ceiling, specials included; ``min_freq`` is for tokens (bpe: for pairs to merge); both mean
    nothing to ``byte``, which has nothing to learn and reads no text.  ``lower`` is for char and word, ``split`` for
    word (``words.SPLITS``).  ``specials`` are roles out of separator, bos, eos, pad, unk, cls, sep, mask, and
    names of tokens without a role (``<extra_id_0>``); the separator is always there, and by default unk for char and
    word.  cls and sep are around every text.  ``closed``: EOS is part of a text's frame (bpe, whose file others read
    too; the other kinds have no frame).
    Raises TokenizerError for an option that cannot be, DataError for an empty corpus.
    """
    if kind not in KINDS:
        raise TokenizerError(f"unknown kind of tokenizer {kind!r}", suggest(kind, KINDS))
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
        tokenizer = train_bpe(
            corpus, roles, vocab_size=vocab_size, min_freq=min_freq, closed=closed, on_unknown=on_unknown
        )
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
    """Read the tokenizer of a folder, or the file that is named.

    In a folder, what is found first: ``tokenizer.json``; SentencePiece models, as the class in
    ``tokenizer_config.json`` says (``spm.py``); ``vocab.json`` + ``merges.txt``; ``vocab.txt`` (``vocabularies.py``).
    ``roles`` ({"bos": "<s>"}) says which special token is which in a Hugging Face file; without it,
    ``tokenizer_config.json`` beside the file does, and then the names in common use.  Raises TokenizerError that names
    the file.
    """
    path = Path(folder_or_file)
    if path.is_dir():
        return _load_folder(path, roles, on_unknown)
    if path.suffix in SUFFIXES:
        return load_sentencepiece(path.parent, read_settings(path.parent), path, roles=roles, on_unknown=on_unknown)
    return _load_json(path, roles, on_unknown)


def _load_folder(folder: Path, roles: Mapping[str, str | None] | None, on_unknown: str) -> Tokenizer:
    if (folder / FILE_NAME).is_file():
        return _load_json(folder / FILE_NAME, roles, on_unknown)
    settings = read_settings(folder)
    if is_sentencepiece(folder, settings):
        return load_sentencepiece(folder, settings, roles=roles, on_unknown=on_unknown)
    for name, read in (("vocab.json", byte_level_bpe), ("vocab.txt", wordpiece)):
        if (folder / name).is_file():
            backend, usual = read(folder, settings)
            apply_settings(backend, settings)
            return HFTokenizer(backend, usual if roles is None else roles, on_unknown=on_unknown)
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    found = f"the folder holds {', '.join(names[:8])}{more}" if names else "the folder is empty"
    raise TokenizerError(f"there is no {FILE_NAME} in {folder}, nor another tokenizer", found)


def _load_json(path: Path, roles: Mapping[str, str | None] | None, on_unknown: str) -> Tokenizer:
    text = read_text(path)
    try:
        if _KVAD_KEY.match(text):
            return _load_table(parse_object(text), on_unknown)
        return _load_library(path, text, roles, on_unknown)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error.message}", error.hint) from error.__cause__


def _load_table(file: dict[str, Any], on_unknown: str) -> Tokenizer:
    content = read_field(file, "kvad", dict)
    kind = read_field(content, "kind", str)
    if kind == "byte":
        return ByteTokenizer.from_content(content, on_unknown)
    if kind == "char":
        return CharTokenizer.from_content(content, on_unknown)
    if kind == "word":
        return WordTokenizer.from_content(content, on_unknown)
    if kind == "sentencepiece":
        return SentencePieceTokenizer.from_content(content, on_unknown)
    raise TokenizerError(f"unknown kind of tokenizer {kind!r}", suggest(kind, [*KINDS, "sentencepiece"]))


def _load_library(path: Path, text: str, roles: Mapping[str, str | None] | None, on_unknown: str) -> Tokenizer:
    from tokenizers import Tokenizer as Backend  # type: ignore[import-untyped]

    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises nothing more special
        parse_object(text)  # says where, when it is not JSON at all
        raise TokenizerError(f"not a tokenizer that the tokenizers library reads: {error}") from None
    settings = read_settings(path.parent)
    apply_settings(backend, settings)
    if roles is None:
        roles = special_roles(backend, settings)
    return HFTokenizer(backend, roles, on_unknown=on_unknown)
