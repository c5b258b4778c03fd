"""Tokenizers in the metadata of GGUF files, from and to ``tokenizer.json``.

llama.cpp names how a text is split before its merges (``tokenizer.ggml.pre``); a name that is not in ``_SPLITS`` is
refused, because another split gives other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvad import text
from kvad.checkpoint.generation_config import GenerationConfig
from kvad.errors import CheckpointError, TokenizerError, suggest
from kvad.text import HFTokenizer, Tokenizer

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # tokenizer.ggml.token_type
_ROLES = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}

_GPT2_SPLIT: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**_GPT2_SPLIT, "trim_offsets": False, "use_regex": False}]}


_DIGITS = {"type": "Digits", "individual_digits": True}
_SPLITS: dict[str, dict[str, Any]] = {  # tokenizer.ggml.pre -> pre_tokenizer of tokenizer.json
    "gpt-2": _GPT2_SPLIT,
    "llama-bpe": _split(_CONTRACTIONS + r"\p{N}{1,3}" + _REST),
    "qwen2": _split(_CONTRACTIONS + r"\p{N}" + _REST),
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _GPT2_SPLIT]},
}
_ALIASES = {"default": "gpt-2", "llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_ALIASES |= dict.fromkeys(("starcoder", "refact", "command-r", "codeshell"), "smollm")
_PLAIN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")  # of an added token; all are false
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def has_tokenizer(values: Mapping[str, Any]) -> bool:
    return values.get(f"{_PREFIX}model", "none") not in ("none", "no_vocab")


def token_ids(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of the first, the end and the padding token as fields of ``config.json``."""
    found = {name: values.get(f"{_PREFIX}{name}") for name in ("bos_token_id", "eos_token_id")}
    ends = [found["eos_token_id"], values.get(f"{_PREFIX}eot_token_id"), values.get(f"{_PREFIX}eom_token_id")]
    unique = list(dict.fromkeys(token for token in ends if token is not None))
    found["eos_token_id"] = unique if len(unique) > 1 else unique[0] if unique else None
    found["pad_token_id"] = values.get(f"{_PREFIX}padding_token_id")
    return {name: value for name, value in found.items() if value is not None}


def tokenizer_files(values: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return ``tokenizer.json`` and ``tokenizer_config.json`` as texts by name.

    Raises:
        TokenizerError: For a tokenizer of another kind, or lists of different lengths.
    """
    kind = values.get(f"{_PREFIX}model")
    tokens, types = values.get(f"{_PREFIX}tokens", []), values.get(f"{_PREFIX}token_type")
    types = [_NORMAL] * len(tokens) if types is None else types
    if not tokens or len(types) != len(tokens):
        raise TokenizerError(f"{where}: {_PREFIX}tokens has {len(tokens):,} entries, token_type {len(types):,}")
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(f"{where}: {_PREFIX}model {kind!r} is not read", "Read are gpt2 (BPE) and llama (SPM).")
    parts = (
        _byte_level(values, tokens, types, where) if kind == "gpt2" else _sentencepiece(values, tokens, types, where)
    )
    added = [
        {"id": i, "content": tokens[i], "special": type_ != _USER, **dict.fromkeys(_PLAIN_FLAGS, False)}
        for i, type_ in enumerate(types)
        if type_ in (_CONTROL, _USER, _UNKNOWN)
    ]
    names = {
        role: tokens[i] for role, key in _ROLES.items() if 0 <= (i := values.get(f"{_PREFIX}{key}", -1)) < len(tokens)
    }
    if values.get(f"{_PREFIX}add_bos_token", kind == "llama") and "bos" in names:
        parts["post_processor"] = _bos_processor(names["bos"], values[f"{_PREFIX}bos_token_id"])
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **{f"{role}_token": name for role, name in names.items()}}
    if template := values.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return {
        "tokenizer.json": json.dumps({**content, **parts}, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False),
    }


def _bos_processor(name: str, token_id: int) -> dict[str, Any]:
    """Return the post-processor that adds the first token."""
    single = [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {name: {"id": name, "ids": [token_id], "tokens": [name]}}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _vocabulary(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    return {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}


def _byte_level(values: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str) -> dict[str, Any]:
    name = values.get(f"{_PREFIX}pre", "default")
    if _ALIASES.get(name, name) not in _SPLITS:
        raise TokenizerError(f"{where}: {_PREFIX}pre {name!r} is not read", suggest(str(name), {**_SPLITS, **_ALIASES}))
    merges = [merge.split(" ", 1) for merge in values.get(f"{_PREFIX}merges", [])]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    split = _ALIASES.get(name, name)
    return {
        "normalizer": {"type": "NFC"} if split == "qwen2" else None,
        "pre_tokenizer": _SPLITS[split],
        "decoder": _BYTE_LEVEL,
        "post_processor": {**_BYTE_LEVEL, "trim_offsets": False},
        "model": {
            **model,
            "ignore_merges": split == "llama-bpe",
            "vocab": _vocabulary(tokens, types),
            "merges": merges,
        },
    }


def _sentencepiece(
    values: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> dict[str, Any]:
    """Build a BPE tokenizer with the merges that the scores of a SentencePiece model imply.

    SentencePiece merges the pair whose piece has the highest score; so does BPE with the pairs in that order.
    """
    scores = values.get(f"{_PREFIX}scores", [])
    if len(scores) != len(tokens):
        raise TokenizerError(f"{where}: {_PREFIX}scores has {len(scores):,} entries for {len(tokens):,} tokens")
    vocabulary = _vocabulary(tokens, types)
    merges = []
    for piece, i in vocabulary.items():
        pairs = [(piece[:at], piece[at:]) for at in range(1, len(piece))] if types[i] == _NORMAL else []
        known = [(a, b) for a, b in pairs if a in vocabulary and b in vocabulary]
        merges += [(-scores[i], vocabulary[a], vocabulary[b], a, b) for a, b in known]
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    has_prefix = values.get(f"{_PREFIX}add_space_prefix", True)
    normalizers = [{"type": "Prepend", "prepend": "▁"}, space] if has_prefix else [space]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}
    ]  # fmt: skip
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = {"type": "BPE", "dropout": None, "unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {**model, "vocab": vocabulary, "merges": [list(merge[-2:]) for merge in sorted(merges)]},
    }


def metadata(
    tokenizer: Tokenizer | None, folder: Path, generation: GenerationConfig, vocab_size: int
) -> dict[str, Any]:
    """Return the metadata of a byte-level BPE tokenizer and its chat template.

    Raises:
        CheckpointError: For a tokenizer that llama.cpp has no equivalent of.
    """
    if tokenizer is None:
        return {f"{_PREFIX}model": "none"}
    content = json.loads(tokenizer.file_text) if isinstance(tokenizer, HFTokenizer) else {}
    model, split = content.get("model", {}), content.get("pre_tokenizer")
    pre = next((name for name, known in _SPLITS.items() if _same_split(split, known)), None)
    if model.get("type") != "BPE" or model.get("byte_fallback") or pre is None:
        message = f"llama.cpp has no tokenizer like this one ({tokenizer.kind})"
        raise CheckpointError(message, f"It reads byte-level BPE with the splits of {', '.join(_SPLITS)}.")
    tokens, types = [f"[PAD{i}]" for i in range(vocab_size)], [_UNUSED] * vocab_size
    for token, i in model["vocab"].items():
        tokens[i], types[i] = token, _NORMAL
    for added in content["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], _CONTROL if added["special"] else _USER
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    special = tokenizer.special_tokens
    ends = generation.eos_token_ids or special.end_ids
    ids = {"bos": special.bos, "eos": next(iter(ends), None), "unk": special.unk, "pad": special.pad}
    values: dict[str, Any] = {f"{_PREFIX}{_ROLES[role]}": token for role, token in ids.items() if token is not None}
    values |= {
        f"{_PREFIX}model": "gpt2",
        f"{_PREFIX}pre": pre,
        f"{_PREFIX}tokens": tokens,
        f"{_PREFIX}token_type": types,
    }
    values |= {f"{_PREFIX}merges": merges} if merges else {}
    values[f"{_PREFIX}add_bos_token"] = special.bos is not None and tokenizer.add_special_tokens([])[:1] == [
        special.bos
    ]
    template = text.chat_template.ChatTemplate.load(folder)
    return values if template is None else {**values, "tokenizer.chat_template": template.templates[template.choose()]}


def _same_split(split: Any, known: Mapping[str, Any]) -> bool:
    """Return True if two pre-tokenizers split alike; offsets do not matter."""

    def essential(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: essential(part) for key, part in value.items() if key != "trim_offsets"}
        return [essential(part) for part in value] if isinstance(value, list) else value

    return bool(essential(split) == essential(known))
