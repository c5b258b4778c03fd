"""Train or load a tokenizer of any kind.

A saved tokenizer is one file, ``tokenizer.json``: either in the format of the Hugging Face ``tokenizers`` library
(byte-level BPE and all else that it loads), or in kvad's: a table of bytes, characters or words, or SentencePiece
models. The file names its kind. Folders of other formats are read too (``load_tokenizer``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvad.errors import DataError, TokenizerError, suggest
from kvad.text.base import FILE_NAME, Tokenizer, checked_texts
from kvad.text.hf_config import byte_level_bpe, parse_object, read_settings, read_text, wordpiece
from kvad.text.hf_tokenizer import HFTokenizer, apply_settings, train_bpe
from kvad.text.sentencepiece_tokenizer import SUFFIXES, SentencePieceTokenizer, is_sentencepiece, load_sentencepiece
from kvad.text.simple_tokenizers import ByteTokenizer, CharTokenizer, WordTokenizer, read_field

KINDS = ("bpe", "byte", "char", "word")
_KVAD_TOKENIZERS: dict[str, type[ByteTokenizer | CharTokenizer | WordTokenizer | SentencePieceTokenizer]] = {
    "byte": ByteTokenizer,
    "char": CharTokenizer,
    "word": WordTokenizer,
    "sentencepiece": SentencePieceTokenizer,
}

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
) -> Tokenizer:
    """Learn a vocabulary from documents, which are read once and need not fit in memory.

    Args:
        kind: "bpe", "byte", "char" or "word"; byte learns nothing and reads no text.
        texts: The documents.
        vocab_size, min_freq: Maximum number of tokens with specials; minimum frequency (bpe: of merged pairs).
        lower: Lower-case the text (char, word).
        split: Splitting of words, see ``simple_tokenizers.SPLITS`` (word).
        specials: Roles out of separator, bos, eos, pad, unk, cls, sep, mask, and names of tokens without a role
            (``<extra_id_0>``). The separator always exists, unk by default for char and word.
        closed: Texts end with EOS (bpe only; other kinds have no post-processor).

    Raises:
        TokenizerError, DataError: If an option is invalid; if the corpus is empty.
    """
    if kind not in KINDS:
        raise TokenizerError(f"unknown kind of tokenizer {kind!r}", suggest(kind, KINDS))
    if min_freq < 1:
        raise TokenizerError(f"min_freq: must be at least 1, got {min_freq}")
    if lower and kind not in ("char", "word"):
        raise TokenizerError(f"a {kind} tokenizer is lossless and cannot lower-case", "Use char or word.")
    if split != "words" and kind != "word":
        raise TokenizerError(f"split: requires a word tokenizer, got {kind}")
    roles = specials if specials is not None else ("unk",) if kind in ("char", "word") else ()
    if kind == "byte":
        return ByteTokenizer(roles)
    num_texts = num_chars = 0

    def corpus() -> Iterator[str]:
        nonlocal num_texts, num_chars
        for text in checked_texts(texts):
            num_texts, num_chars = num_texts + 1, num_chars + len(text)
            yield text

    limits: dict[str, Any] = {"vocab_size": vocab_size, "min_freq": min_freq}
    tokenizer: Tokenizer
    if kind == "bpe":
        tokenizer = train_bpe(corpus(), roles, closed=closed, **limits)
    elif kind == "char":
        tokenizer = CharTokenizer.train(corpus(), roles, lower=lower, **limits)
    else:
        tokenizer = WordTokenizer.train(corpus(), roles, split=split, lower=lower, **limits)
    if not num_chars:
        raise DataError("the corpus has no text to train a tokenizer on", f"It has {num_texts} documents, all empty.")
    return tokenizer


def load_tokenizer(folder_or_file: Path) -> Tokenizer:
    """Load the tokenizer of a folder, or a file.

    In a folder, the first of these is used: ``tokenizer.json``; SentencePiece models, by the class in
    ``tokenizer_config.json``; ``vocab.json`` + ``merges.txt``; ``vocab.txt``. Special tokens of a Hugging Face file are
    those of the ``tokenizer_config.json`` next to it, then those with common names.
    """
    path = Path(folder_or_file)
    if path.is_dir():
        return _load_folder(path)
    if path.suffix in SUFFIXES:
        return load_sentencepiece(path.parent, read_settings(path.parent), path)
    return _load_json(path)


def _load_folder(folder: Path) -> Tokenizer:
    if (folder / FILE_NAME).exists():
        return _load_json(folder / FILE_NAME)
    settings = read_settings(folder)
    if is_sentencepiece(folder, settings):
        return load_sentencepiece(folder, settings)
    for name, build_backend in (("vocab.json", byte_level_bpe), ("vocab.txt", wordpiece)):
        if (folder / name).is_file():
            backend, roles = build_backend(folder, settings)
            apply_settings(backend, settings)
            return HFTokenizer(backend, roles)
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    omitted = f" and {len(names) - 8} more" if len(names) > 8 else ""
    contents = f"The folder contains {', '.join(names[:8])}{omitted}" if names else "The folder is empty."
    raise TokenizerError(f"there is no {FILE_NAME} in {folder}, nor another tokenizer", contents)


def _load_json(path: Path) -> Tokenizer:
    text = read_text(path)
    try:
        if not _KVAD_KEY.match(text):
            return _load_library(path, text)
        content = read_field(parse_object(text), "kvad", dict)
        kind = read_field(content, "kind", str)
        if kind not in _KVAD_TOKENIZERS:
            raise TokenizerError(f"unknown kind of tokenizer {kind!r}", suggest(kind, [*KINDS, "sentencepiece"]))
        return _KVAD_TOKENIZERS[kind].from_content(content)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error.message}", error.hint) from error.__cause__


def _load_library(path: Path, text: str) -> Tokenizer:
    from tokenizers import Tokenizer as Backend  # type: ignore[import-untyped]

    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises no specific type
        parse_object(text)  # reports the position if it is not JSON
        raise TokenizerError(f"not readable by the tokenizers library: {error}") from None
    return HFTokenizer(backend, apply_settings(backend, read_settings(path.parent)))
