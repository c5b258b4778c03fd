"""Tokenizers of folders older than ``tokenizer.json``: ``vocab.json`` + ``merges.txt``, and ``vocab.txt``.

The first is byte-level BPE in three dialects: GPT-2's (OPT and others), RoBERTa's (``<s> x </s>``; BART too) and
Qwen2's.  The second is BERT's WordPiece.  Both become what transformers' ``convert_slow_tokenizer.py`` makes of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvad.errors import TokenizerError
from kvad.text.settings import TokenizerSettings, parse_object, read_text

if TYPE_CHECKING:
    import tokenizers  # type: ignore[import-untyped]

__all__ = ["byte_level_bpe", "read_vocabulary", "wordpiece"]

_ROBERTA = ("Bart", "Blenderbot", "LED", "Longformer", "Mvp", "Roberta")
_ROBERTA_ROLES = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "pad": "<pad>", "cls": "<s>"}
_GPT2_ROLES = {"bos": "<|endoftext|>", "eos": "<|endoftext|>"}
_BERT_ROLES = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_vocabulary(path: Path) -> dict[str, int]:
    """``{"piece": id}``.  Raises TokenizerError naming the file."""
    try:
        vocabulary = parse_object(read_text(path))
        if not vocabulary or not all(type(token_id) is int and token_id >= 0 for token_id in vocabulary.values()):
            raise TokenizerError("expected an object of pieces and their ids")
    except TokenizerError as error:
        raise TokenizerError(_named(path, error.message), error.hint) from None
    return vocabulary


def _named(path: Path, message: str) -> str:
    return message if path.name in message else f"{path}: {message}"


def _read_merges(path: Path) -> list[tuple[str, str]]:
    if not path.is_file():
        raise TokenizerError(f"there is no {path.name} in {path.parent}, beside vocab.json", "copy both files")
    merges = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line or (number == 1 and line.startswith("#version:")):
            continue
        pair = line.split()
        if len(pair) != 2:
            raise TokenizerError(f"{path}: line {number} is not a merge of two pieces: {line[:40]!r}")
        merges.append((pair[0], pair[1]))
    return merges


def byte_level_bpe(folder: Path, settings: TokenizerSettings) -> tuple[tokenizers.Tokenizer, dict[str, str | None]]:
    """The backend of ``vocab.json`` and ``merges.txt``, and the roles of its special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    path = folder / "vocab.json"
    vocabulary, merges = read_vocabulary(path), _read_merges(folder / "merges.txt")
    if any(second.endswith("</w>") for _, second in merges[:100]):
        raise TokenizerError(f"{path}: BPE over words (CLIP, GPT-1) is not known", "convert it to a tokenizer.json")
    try:
        backend = Tokenizer(models.BPE(vocabulary, merges))
    except Exception as error:  # the library raises nothing more special
        raise TokenizerError(f"{path} and merges.txt do not belong together: {error}") from None
    spaced = settings.flag("add_prefix_space", False)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    backend.decoder = decoders.ByteLevel()
    if settings.family == "Qwen2":
        backend.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=spaced, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    is_roberta = settings.family in _ROBERTA
    roles = _roles(settings, _ROBERTA_ROLES if is_roberta else _GPT2_ROLES, vocabulary)
    _add_special(backend, roles, mask="<mask>" if is_roberta else None)
    if is_roberta:
        cls, sep = (_needed(path, vocabulary, roles, role) for role in ("cls", "sep"))
        backend.post_processor = processors.RobertaProcessing(sep, cls, add_prefix_space=spaced)
    return backend, roles


def wordpiece(folder: Path, settings: TokenizerSettings) -> tuple[tokenizers.Tokenizer, dict[str, str | None]]:
    """The backend of BERT's ``vocab.txt``, and the roles of its special tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    path = folder / "vocab.txt"
    lines = read_text(path).split("\n")
    vocabulary = {piece.rstrip("\r"): i for i, piece in enumerate(lines if lines[-1] else lines[:-1])}
    roles = _roles(settings, _BERT_ROLES, vocabulary)
    unk, cls, sep = (_needed(path, vocabulary, roles, role) for role in ("unk", "cls", "sep"))
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token=unk[0]))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.flag("tokenize_chinese_chars", True),
        strip_accents=settings.flag("strip_accents"),
        lowercase=settings.flag("do_lower_case", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    _add_special(backend, roles, mask=None)
    backend.post_processor = processors.BertProcessing(sep, cls)
    return backend, roles


def _roles(
    settings: TokenizerSettings, usual: Mapping[str, str], vocabulary: Mapping[str, int]
) -> dict[str, str | None]:
    """Those of the class, where they are in the vocabulary, under those that the folder's files name."""
    return {**{role: name for role, name in usual.items() if name in vocabulary}, **settings.roles_in(vocabulary)}


def _add_special(backend: tokenizers.Tokenizer, roles: Mapping[str, str | None], *, mask: str | None) -> None:
    """``mask``: RoBERTa's, which swallows the space before it."""
    from tokenizers import AddedToken

    names = dict.fromkeys(name for name in roles.values() if name is not None)
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names if name != mask])
    if mask is not None and backend.token_to_id(mask) is not None:
        backend.add_special_tokens([AddedToken(mask, lstrip=True, normalized=False)])


def _needed(path: Path, vocabulary: Mapping[str, int], roles: Mapping[str, str | None], role: str) -> tuple[str, int]:
    name = roles.get(role)
    if name is None:
        raise TokenizerError(f"{path}: there is no {role} token", "is it the vocabulary that its class names?")
    return name, vocabulary[name]
