"""Prepared data: a folder with tokens and the tokenizer that made them, ready for any number of runs.

    DIR/manifest.json  offsets.bin  tokens-00000.bin ...     a store (``store.py``), with its columns
    DIR/tokenizer/                                            the tokenizer, as checkpoints hold it
    DIR/template/                                             of conversations: the chat template, the same way

``kind`` in the manifest says what is in it: "documents" (each opened by the separator), "pairs", or the objective whose
form they have: masked and spans frame documents otherwise, tag, classify and chat are examples with a column.  Examples
keep what was held out when they were prepared, for their labels are those of the rest.

A run is given the folder in the place of texts.  It is refused where the tokenizer is no longer the one that made the
tokens, where a token lies beyond the vocabulary, and where files are missing or cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvad import config as config_lib
from kvad import storage
from kvad.errors import ConfigError, DataError, UsageError, format_count
from kvad.text import Tokenizer, load_tokenizer
from kvad.train import data as data_lib
from kvad.train import sources
from kvad.train.config import DataConfig, RunConfig, TokenizerConfig
from kvad.train.data import TokenStore
from kvad.train.setup.dataset_factory import FramedDocuments
from kvad.train.setup.objective_factory import OBJECTIVE_TOPOLOGY
from kvad.train.sources import ChatCorpus

VERSION = 1
CONTENT_KINDS = {
    "next-token": "documents",
    "compress": "documents",
    "seq2seq": "pairs",
}  # others: by their objective's name

AnyCorpus = (
    sources.documents.DocumentCorpus | sources.pairs.PairCorpus | FramedDocuments | sources.examples.ExampleCorpus[Any]
)


class PreparedData:
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
        self.tokenizer: Tokenizer = load_tokenizer(folder / data_lib.token_store.TOKENIZER)
        self.store = TokenStore(folder, self.manifest)
        self.check(self.tokenizer, f"{folder / data_lib.token_store.TOKENIZER} is")

    @property
    def kind(self) -> str:
        """What it holds: "documents", "pairs", or the objective whose form it has."""
        return str(self.manifest["kind"])

    @property
    def objective(self) -> str:
        """What learns from it, where nothing else is said."""
        return next((name for name, kind in CONTENT_KINDS.items() if kind == self.kind), self.kind)

    @property
    def pairs(self) -> bool:
        return self.kind == "pairs"

    @property
    def num_held_out(self) -> int:
        """Pairs or examples at the end that are for validation only."""
        return int(self.manifest["held"])

    @property
    def noun(self) -> str:
        """What one text of it is called."""
        return str(self.manifest.get("noun", "pair" if self.pairs else "document"))

    @property
    def labels(self) -> tuple[str, ...]:
        """Of tags and labelled texts, the names of the labels; else ()."""
        return tuple(self.manifest.get("labels", ()))

    def template_files(self) -> dict[str, bytes]:
        """Of conversations, the files of the chat template that rendered them, as a checkpoint holds them."""
        folder = self.folder / data_lib.token_store.TEMPLATE
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.jinja")}

    def check_kind(self, objective: str) -> None:
        """DataError where it holds another thing than ``objective`` reads."""
        wanted = CONTENT_KINDS.get(objective, objective)
        if self.kind != wanted:
            named = ("documents", "pairs")
            held = self.kind if self.kind in named else f"{self.noun}s for objective {self.kind}"
            reads = f"this model reads {wanted}" if wanted in named else f"objective {objective} has a form of its own"
            hint = f"prepare them with --objective {objective}"
            if objective != "compress" and OBJECTIVE_TOPOLOGY[self.objective] == OBJECTIVE_TOPOLOGY[objective]:
                hint = f"--objective {self.objective} reads it; else prepare the texts with --objective {objective}"
            raise DataError(f"{self.folder} holds {held}, and {reads}", hint)

    def check_validation_split(self, data: DataConfig) -> None:
        """ConfigError where a run asks for another share of examples than was held out."""
        share = self.manifest.get("validation")
        if share is not None and data.validation_fraction not in (share, DataConfig().validation_fraction):
            raise ConfigError(
                f"data.validation_fraction: {data.validation_fraction}, and {self.folder} holds out a share of {share}",
                "leave it out, or prepare the files again with another",
            )

    def check(self, tokenizer: Tokenizer, named: str, place: str | Path | None = None) -> None:
        """DataError where ``tokenizer`` did not make these tokens; ``named``: "the run's tokenizer is"; ``place``: what
        to name so that they are made by it."""
        if tokenizer.fingerprint() != self.manifest["tokenizer"]:
            kind = "" if self.objective == "next-token" else f" --objective {self.objective}"
            how = "" if place is None else f": kvad data prepare TEXTS{kind} --tokenizer {place} --out DIR"
            told = f"{named} not the tokenizer that made the tokens of {self.folder}"
            raise DataError(told, f"prepare it again{how and ' by that one'}{how}")
        if self.manifest["largest"] >= tokenizer.vocab_size:
            self.check_tokens()
            raise self._beyond(self.manifest["largest"], "its manifest says so")

    def check_tokens(self) -> None:
        """DataError where a token lies beyond the vocabulary, whatever the manifest says.  Reads all tokens."""
        found = self.store.find_out_of_vocabulary(self.tokenizer.vocab_size)
        if found is None:
            return
        text = f"{self.noun} {found.text + 1:,}"
        if self.pairs:
            text = f"the {'target' if found.text % 2 else 'source'} of pair {found.text // 2 + 1:,}"
        where = f"token {found.offset + 1:,} of {text}, at byte {found.byte:,} of {found.shard}"
        raise self._beyond(found.token, f"the first is {where}")

    def _beyond(self, token: int, where: str) -> DataError:
        vocab = self.tokenizer.vocab_size
        told = f"{self.folder} holds token id {token:,}, beyond the vocabulary of {vocab:,}: {where}"
        return DataError(told, "prepare it again")

    def summary(self) -> str:
        """One line about it."""
        texts = format_count(self.manifest["documents"] // (2 if self.pairs else 1), self.noun)
        held = f", {self.num_held_out:,} of them for validation" if self.num_held_out else ""
        return f"prepared: {self.folder}, {self.manifest['tokens']:,} tokens in {texts}{held}"


def prepare_data(
    config: RunConfig,
    texts: AnyCorpus,
    tokenizer: Tokenizer,
    out: Path,
    *,
    overwrite: bool = False,
    progress: sources.documents.Progress = lambda chars, tokens: None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Write ``out``, whole or not at all; -> its manifest.  ``config.objective.kind`` is what ``texts`` are for.

    Raises UsageError where something is there (``overwrite``: prepared data gives way), DataError for what cannot be
    read, SaveError if the disk refuses.
    """
    check_writable_target(out, overwrite)
    texts.framer(tokenizer)
    pairs = isinstance(texts, sources.pairs.PairCorpus)
    kind = (
        "pairs"
        if pairs
        else "documents"
        if isinstance(texts, sources.documents.DocumentCorpus)
        else config.objective.kind
    )
    more = {
        "prepared": VERSION,
        "kind": kind,
        "held": texts.num_held_out
        if isinstance(texts, (sources.pairs.PairCorpus, sources.examples.ExampleCorpus))
        else 0,
        "vocab": tokenizer.vocab_size,
        "tokenizer_config": config_lib.serialization.to_dict(config.tokenizer),
    }
    if isinstance(texts, sources.examples.ExampleCorpus):
        share = None if texts.found.held_out_files else config.data.validation_fraction
        more |= {"noun": texts.noun, "validation": share, "labels": list(getattr(texts, "labels", ()))}
    tell(f"tokens: {tokenizer.kind}, vocabulary {tokenizer.vocab_size:,}")
    with storage.atomic.new_folder(out) as new:
        tokenizer.save(new / data_lib.token_store.TOKENIZER)
        for name, text in (texts.template_files(tokenizer) if isinstance(texts, ChatCorpus) else {}).items():
            (new / data_lib.token_store.TEMPLATE / name).parent.mkdir(parents=True, exist_ok=True)
            (new / data_lib.token_store.TEMPLATE / name).write_text(text, "utf-8")
        return data_lib.token_store.write_store(new, texts, tokenizer, more, progress=progress)


def check_writable_target(out: Path, overwrite: bool) -> None:
    """UsageError where something is there that may not give way."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file, and prepared data is a folder", "choose another --out")
    if out.exists() and any(out.iterdir()) and not (overwrite and data_lib.token_store.is_prepared(out)):
        hint = "--overwrite lets it give way" if data_lib.token_store.is_prepared(out) else "choose another --out"
        raise UsageError(f"{out} is not empty", hint)


def tokenizer_matches(prepared: PreparedData, wanted: TokenizerConfig) -> bool:
    """Whether a run that says ``wanted`` of its tokenizer may use these tokens: it says nothing, or what made them."""
    return (
        wanted == TokenizerConfig() or config_lib.serialization.to_dict(wanted) == prepared.manifest["tokenizer_config"]
    )


def _read(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / data_lib.token_store.MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / data_lib.token_store.MANIFEST} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{folder / data_lib.token_store.MANIFEST} is no manifest")
    return found


def _check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Every file as long as it should be; their hashes are ``kvad data check``'s."""
    size = {"uint16": 2, "uint32": 4}[manifest["dtype"]]
    wanted = {shard["file"]: shard["tokens"] * size for shard in manifest["shards"]}
    wanted |= {**sources.columns.column_sizes(manifest), data_lib.token_store.OFFSETS: 8 * (manifest["documents"] + 1)}
    for name, expected in wanted.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else -1
        if found != expected:
            what = "is missing" if found < 0 else f"has {found:,} bytes instead of {expected:,}"
            raise DataError(f"{path} {what}", "prepare it again")
