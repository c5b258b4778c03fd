"""Prepared data: a folder with tokens and the tokenizer that made them, ready for any number of runs.

    DIR/manifest.json  offsets.bin  tokens-00000.bin ...     a store (``store.py``)
    DIR/tokenizer/                                            the tokenizer, as checkpoints hold it

A run is given the folder in the place of texts.  It is refused where the tokenizer is no longer the one that made the
tokens, where a token lies beyond the vocabulary, and where files are missing or cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvad.checkpoint.atomic import new_folder
from kvad.errors import DataError, UsageError, counted
from kvad.schema import to_dict
from kvad.text.tokenizer import Tokenizer, load_tokenizer
from kvad.train.config import RunConfig, TokenizerConfig
from kvad.train.corpus import Corpus
from kvad.train.pairs import PairCorpus
from kvad.train.store import MANIFEST, OFFSETS, Progress, TokenStore, fill_store

__all__ = ["Prepared", "asked_for", "check_free", "is_prepared", "prepare"]

VERSION = 1
TOKENIZER = "tokenizer"


class Prepared:
    """A folder that ``kvad data prepare`` made.  Raises DataError for one that cannot be used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = _read(folder)
        wrong = f"{folder} cannot be used"
        if self.manifest["prepared"] != VERSION:
            raise DataError(f"{wrong}: it was prepared by another version of kvad", "prepare it again")
        try:
            _check_files(folder, self.manifest)
        except (KeyError, TypeError) as error:
            raise DataError(f"{wrong}: its manifest is damaged ({error})", "prepare it again") from None
        self.tokenizer: Tokenizer = load_tokenizer(folder / TOKENIZER)
        self.check(self.tokenizer, f"{folder / TOKENIZER} is")
        self.store = TokenStore(folder, self.manifest)

    @property
    def pairs(self) -> bool:
        return bool(self.manifest["kind"] == "pairs")

    @property
    def num_held(self) -> int:
        """Pairs at the end that are for validation only."""
        return int(self.manifest["held"])

    def check(self, tokenizer: Tokenizer, named: str) -> None:
        """DataError where ``tokenizer`` did not make these tokens; ``named``: "the run's tokenizer is"."""
        if tokenizer.fingerprint() != self.manifest["tokenizer"]:
            raise DataError(f"{named} not the tokenizer that made the tokens of {self.folder}", "prepare it again")
        if self.manifest["largest"] >= tokenizer.vocab_size:
            raise DataError(
                f"{self.folder} holds token id {self.manifest['largest']:,}, beyond the vocabulary of "
                f"{tokenizer.vocab_size:,}",
                "prepare it again",
            )

    def told(self) -> str:
        """One line about it."""
        count = self.manifest["documents"]
        texts = counted(count // 2, "pair") if self.pairs else counted(count, "document")
        return f"prepared: {self.folder}, {self.manifest['tokens']:,} tokens in {texts}"


def is_prepared(path: Path) -> bool:
    """Whether a path is a folder that ``kvad data prepare`` made, of any version."""
    try:
        return (path / MANIFEST).is_file() and "prepared" in _read(path)
    except DataError:
        return False


def prepare(
    config: RunConfig,
    texts: Corpus | PairCorpus,
    tokenizer: Tokenizer,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Progress = lambda chars, tokens: None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Write ``out``, whole or not at all; -> its manifest.

    Raises UsageError where something is there (``overwrite``: prepared data gives way), DataError for what cannot be
    read, SaveError if the disk refuses.
    """
    check_free(out, overwrite)
    texts.framer(tokenizer)
    pairs = isinstance(texts, PairCorpus)
    more = {
        "prepared": VERSION,
        "kind": "pairs" if pairs else "documents",
        "held": texts.num_held if isinstance(texts, PairCorpus) else 0,
        "vocab": tokenizer.vocab_size,
        "tokenizer_config": to_dict(config.tokenizer),
    }
    tell(f"tokens: {tokenizer.kind}, vocabulary {tokenizer.vocab_size:,}")
    with new_folder(out) as new:
        tokenizer.save(new / TOKENIZER)
        return fill_store(new, texts, tokenizer, more, progress=progress)


def check_free(out: Path, overwrite: bool) -> None:
    """UsageError where something is there that may not give way."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not (overwrite and is_prepared(out)):
        hint = "--overwrite lets it give way" if is_prepared(out) else "choose another --out"
        raise UsageError(f"{out} is not empty", hint)


def asked_for(prepared: Prepared, wanted: TokenizerConfig) -> bool:
    """Whether a run that says ``wanted`` of its tokenizer may use these tokens: it says nothing, or what made them."""
    return wanted == TokenizerConfig() or to_dict(wanted) == prepared.manifest["tokenizer_config"]


def _read(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / MANIFEST} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{folder / MANIFEST} is no manifest")
    return found


def _check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Every file as long as it should be; their hashes are ``kvad data check``'s."""
    size = {"uint16": 2, "uint32": 4}[manifest["dtype"]]
    wanted = {shard["file"]: shard["tokens"] * size for shard in manifest["shards"]}
    for name, expected in {**wanted, OFFSETS: 8 * (manifest["documents"] + 1)}.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else -1
        if found != expected:
            what = "is missing" if found < 0 else f"has {found:,} bytes instead of {expected:,}"
            raise DataError(f"{path} {what}", "prepare it again")
