"""Byte-level BPE by the ``tokenizers`` library: training, and any ``tokenizer.json`` that decodes token by token.

Training is GPT-2's scheme (Radford et al. 2019): text becomes bytes, so nothing is unknown and decoding is lossless;
the same texts give the same file, byte for byte.  Ids: specials first (0, ...), then the 256 bytes, then the merges.
Loaded files may also be of the SentencePiece or WordPiece kind (see ``pieces.py``).

``tokenizers`` is imported only when it is needed.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvad.errors import TokenizerError
from kvad.text.base import (
    CUT_CHARS,
    FILE_NAME,
    NAMES,
    OnUnknown,
    Specials,
    check_on_unknown,
    check_text,
    check_texts,
    cut,
    printable,
    report_unknown,
    standard_specials,
    write_text,
)
from kvad.text.pieces import Pieces, byte_alphabet, parts

if TYPE_CHECKING:
    import tokenizers  # type: ignore[import-untyped]

__all__ = ["CONFIG_NAME", "BpeTokenizer", "find_specials", "train_bpe"]

CONFIG_NAME = "tokenizer_config.json"  # Hugging Face's file beside tokenizer.json: the roles of the special tokens
BATCH_CHARS = 4 * CUT_CHARS  # the library's results weigh ~100 bytes per token until they are ours
_KNOWN_NAMES = {  # role -> the names it goes by
    "separator": (NAMES["separator"], "<|endoftext|>"),
    "bos": (NAMES["bos"], "<s>", "<bos>", "<|begin_of_text|>"),
    "eos": (NAMES["eos"], "</s>", "<eos>", "<|end_of_text|>"),
    "pad": (NAMES["pad"], "<pad>", "[PAD]"),
    "unk": (NAMES["unk"], "<unk>", "[UNK]"),
}


class BpeTokenizer:
    """A ``tokenizers.Tokenizer`` behind kvad's protocol.  ``roles`` ({"bos": "<s>"}) go before the well-known names."""

    kind = "bpe"
    on_unknown: OnUnknown

    def __init__(
        self, backend: tokenizers.Tokenizer, roles: Mapping[str, str | None] | None = None, *, on_unknown: str = "warn"
    ) -> None:
        self.on_unknown = check_on_unknown(on_unknown)
        backend.no_truncation()  # a file may carry a limit: cutting a prompt in silence is not a tokenizer's business
        backend.no_padding()
        backend.encode_special_tokens = True  # text that spells a special token stays text
        roles = roles or {}
        vocabulary = backend.get_vocab(with_added_tokens=True)
        backend.add_special_tokens([name for name in roles.values() if name is not None and name in vocabulary])
        added = backend.get_added_tokens_decoder().items()
        self.specials = find_specials({token.content: token_id for token_id, token in added if token.special}, roles)
        self._backend = backend
        self._pieces = Pieces(backend)
        self.vocab_size = self._pieces.vocab_size
        self._special_ids = frozenset(self.specials.names().values())
        self._missing_bytes = self._pieces.missing_bytes()
        self._cuttable = _is_cuttable(backend)

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        return self.encode_batch([text], specials=specials)[0]

    def encode_batch(self, texts: Iterable[str], *, specials: bool = False) -> list[list[int]]:
        """Ids of each text.  Long texts are cut and short ones gathered: memory stays near that of the result."""
        backend = self._obeying if specials else self._backend
        rows: list[list[int]] = []
        waiting: list[tuple[list[int], str]] = []  # (the row that it goes to, piece of its text)
        unknown: Counter[str] = Counter()
        chars = 0
        for text in check_texts(texts):
            rows.append([])
            check_text(text)
            for piece in cut(text) if self._cuttable else [text]:
                if waiting and chars + len(piece) > BATCH_CHARS:
                    self._encode_pieces(backend, waiting, unknown)
                    waiting, chars = [], 0
                waiting.append((rows[-1], piece))
                chars += len(piece)
        self._encode_pieces(backend, waiting, unknown)
        has_unk = self.specials.unk is not None and not self._missing_bytes
        report_unknown(unknown, "piece of text", "pieces of text", has_unk=has_unk, on_unknown=self.on_unknown)
        return rows

    def _encode_pieces(
        self, backend: tokenizers.Tokenizer, waiting: list[tuple[list[int], str]], unknown: Counter[str]
    ) -> None:
        texts = [piece for _, piece in waiting]
        for (row, piece), encoding in zip(
            waiting, backend.encode_batch_fast(texts, add_special_tokens=False), strict=True
        ):
            ids = encoding.ids
            row += ids
            if self._missing_bytes:
                unknown.update(char for char in piece if not self._missing_bytes.isdisjoint(char.encode()))
            elif not self._pieces.byte_level and self.specials.unk in ids:
                unknown.update(self._unknown_parts(backend, piece))

    def _unknown_parts(self, backend: tokenizers.Tokenizer, piece: str) -> list[str]:
        """The parts of a text that became UNK: encoded again, slowly, with their places."""
        encoding = backend.encode(piece, add_special_tokens=False)
        found = zip(encoding.ids, encoding.offsets, strict=True)
        spelled = [piece[start:end] for token_id, (start, end) in found if token_id == self.specials.unk]
        return [part for part in spelled if part not in self.specials.names()]

    @functools.cached_property
    def _obeying(self) -> tokenizers.Tokenizer:
        """A twin that turns the names of special tokens into them.  Two, because a flag is not safe between threads."""
        twin = type(self._backend).from_str(self._backend.to_str())
        twin.encode_special_tokens = False
        return twin

    def decode(self, ids: Sequence[int], *, skip_specials: bool = True) -> str:
        return b"".join(map(self.joiner(skip_specials=skip_specials), ids)).decode("utf-8", "replace")

    def joiner(self, *, skip_specials: bool = True) -> Callable[[int], bytes]:
        first, rest = self._pieces.first, self._pieces.rest
        skipped: frozenset[int] = self._special_ids if skip_specials else frozenset()
        started = False

        def add(token_id: int) -> bytes:
            nonlocal started
            if token_id in skipped:
                return b""
            piece = rest[token_id] if started else first[token_id]
            started = True
            return piece

        return add

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self._pieces.rest[token_id]

    def token_text(self, token_id: int) -> str:
        return printable(self._pieces.rest[token_id])

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``; beside it the roles of the specials, only where their names do not tell them."""
        write_text(Path(folder) / FILE_NAME, self._backend.to_str(pretty=True) + "\n")
        if find_specials(self.specials.names(), {}) == self.specials:
            return
        names = {token_id: name for name, token_id in self.specials.named}
        roles = {f"{role}_token": names.get(getattr(self.specials, role)) for role in NAMES}
        write_text(Path(folder) / CONFIG_NAME, json.dumps(roles, ensure_ascii=False, indent=1) + "\n")

    def fingerprint(self) -> str:
        roles = {role: getattr(self.specials, role) for role in NAMES}
        return hashlib.sha256((self._backend.to_str() + json.dumps(roles)).encode()).hexdigest()


def find_specials(named: Mapping[str, int], roles: Mapping[str, str | None]) -> Specials:
    """Give each special token its role: by ``roles`` (role -> name; None: nobody), else by the names in common use.

    A tokenizer without a separator opens its documents with its BOS (Llama) where it has one.
    """
    for role, name in roles.items():
        if role not in NAMES or (name is not None and name not in named):
            raise TokenizerError(f"the {role} token {name!r} is not among the special tokens", ", ".join(named))
    ids: dict[str, int | None] = {}
    for role, names in _KNOWN_NAMES.items():
        wanted = [roles[role]] if role in roles else names
        ids[role] = next((named[name] for name in wanted if name is not None and name in named), None)
    if "separator" not in roles and ids["separator"] is None:
        ids["separator"] = ids["bos"]
    return Specials(**ids, named=tuple(sorted(named.items(), key=lambda item: item[1])))


def _is_cuttable(backend: tokenizers.Tokenizer) -> bool:
    """Whether ``base.cut`` leaves the ids as they are: GPT-2's pattern cuts words, and nothing is put before a text."""
    before = parts(backend.pre_tokenizer)
    gpt2 = len(before) == 1 and before[0]["type"] == "ByteLevel" and before[0].get("use_regex", True)
    return bool(gpt2) and not before[0]["add_prefix_space"] and backend.normalizer is None


def train_bpe(
    texts: Iterable[str],
    roles: Sequence[str] = (),
    *,
    vocab_size: int = 4096,
    min_freq: int = 1,
    on_unknown: str = "warn",
) -> BpeTokenizer:
    """Learn merges until the vocabulary has ``vocab_size`` tokens, or no pair occurs ``min_freq`` times.

    The first specials and the 256 bytes are always there, so that is the least ``vocab_size``.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    names = list(standard_specials(roles, first=0).names())
    least = 256 + len(names)
    if vocab_size < least:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too small for byte-level BPE",
            f"at least {least}: 256 bytes and {len(names)} special token{'s' * (len(names) > 1)}",
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_freq,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in names],
        initial_alphabet=sorted(byte_alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator((piece for text in texts for piece in cut(text)), trainer)
    return BpeTokenizer(backend, on_unknown=on_unknown)
