"""Prepared data: a folder with tokens and their tokenizer, ready for any number of runs.

    DIR/manifest.json  offsets.bin  tokens-00000.bin ...     a token store (``data/token_store.py``) with its columns
    DIR/tokenizer/                                            the tokenizer, in a checkpoint's layout
    DIR/template/                                             conversations only: the chat template, likewise

``kind`` in the manifest names the content: "documents" (each opened by the separator), "pairs", or the objective:
masked-lm and span-corruption frame documents differently, tag, classify and chat are examples with a column. The
validation split of examples is fixed when they are prepared, because their labels are those of the training part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvad import config as config_lib
from kvad import storage
from kvad.errors import ConfigError, DataError, UsageError, format_count
from kvad.text import Tokenizer, load_tokenizer
from kvad.train import data as data_lib
from kvad.train import sources
from kvad.train.config import DataConfig, RunConfig
from kvad.train.data import TokenStore
from kvad.train.setup.objective_factory import OBJECTIVE_TOPOLOGY
from kvad.train.sources import Corpus

VERSION = 2
# Other objectives: their name.
CONTENT_KINDS = {"next-token": "documents", "summarizer": "documents", "seq2seq": "pairs"}


class PreparedData:
    """Folder written by ``kvad data prepare``; raises DataError if it cannot be used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = data_lib.token_store.read_manifest(folder)
        wrong = f"{folder} cannot be used"
        again = f"Prepare it again: kvad data prepare TEXTS --overwrite --out {folder}"
        if not self.manifest:
            raise DataError(f"{wrong}: its {data_lib.token_store.MANIFEST} is missing or damaged", again)
        if "prepared" not in self.manifest:
            raise DataError(f"{wrong}: it has tokens that kvad data prepare did not write", "Name the texts instead.")
        if self.manifest["prepared"] != VERSION:
            raise DataError(f"{wrong}: it was prepared by another version of kvad", again)
        try:
            incomplete = next(data_lib.token_store.find_incomplete_files(folder, self.manifest), None)
            self.hashes = data_lib.token_store.hashes(self.manifest)  # sha256 of every file, by name
        except (KeyError, TypeError) as error:
            raise DataError(f"{wrong}: its manifest is damaged ({error})", "Prepare it again.") from None
        if incomplete is not None:
            path, size, expected = incomplete
            problem = "is missing" if size < 0 else f"has {size:,} bytes instead of {expected:,}"
            raise DataError(f"{path} {problem}", "Prepare it again.")
        self._check_hashes(self.manifest.get("files", {}))
        self.tokenizer: Tokenizer = load_tokenizer(folder / data_lib.token_store.TOKENIZER)
        self.store = TokenStore(folder, self.manifest)
        # Content: "documents", "pairs", or the objective that it is prepared for; and the default objective for it.
        self.kind = str(self.manifest["kind"])
        self.objective = next((name for name, kind in CONTENT_KINDS.items() if kind == self.kind), self.kind)
        self.pairs = self.kind == "pairs"
        self.num_held_out = int(self.manifest["held"])  # pairs or examples at the end, for validation only
        self.noun = str(self.manifest.get("noun", "pair" if self.pairs else "document"))  # for one text
        self.labels: tuple[str, ...] = tuple(self.manifest.get("labels", ()))  # of tagged words and labeled texts
        self.check(self.tokenizer, f"{folder / data_lib.token_store.TOKENIZER} is")

    def template_files(self, tokenizer: Tokenizer) -> dict[str, bytes]:
        """Return the chat template files of conversations, as ``Corpus`` does."""
        folder = self.folder / data_lib.token_store.TEMPLATE
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.jinja")}

    def check_kind(self, objective: str) -> None:
        """Raise DataError if the content is not what ``objective`` reads."""
        needed = CONTENT_KINDS.get(objective, objective)
        if self.kind != needed:
            shared = ("documents", "pairs")
            content = self.kind if self.kind in shared else f"{self.noun}s for objective {self.kind}"
            reads = f"this model reads {needed}" if needed in shared else f"objective {objective} has its own format"
            hint = f"Prepare them with --objective {objective}"
            if objective != "summarizer" and OBJECTIVE_TOPOLOGY[self.objective] == OBJECTIVE_TOPOLOGY[objective]:
                hint = f"Train with --objective {self.objective}, or prepare the texts with --objective {objective}"
            raise DataError(f"{self.folder} holds {content}, and {reads}", hint)

    def check_validation_split(self, data: DataConfig) -> None:
        """Raise ConfigError if the run requests another validation fraction than the prepared one."""
        share = self.manifest.get("validation")
        if share is not None and data.validation_fraction not in (share, DataConfig().validation_fraction):
            raise ConfigError(
                f"data.validation_fraction: must be {share}, as in {self.folder}, got {data.validation_fraction}",
                "Leave it out, or prepare the files again with another value.",
            )

    def check(self, tokenizer: Tokenizer, named: str, location: str | Path | None = None) -> None:
        """Raise DataError if ``tokenizer`` did not make these tokens.

        The message begins with ``named``, such as "the run's tokenizer is"; the hint's command has ``location``.
        """
        if tokenizer.fingerprint() != self.manifest["tokenizer"]:
            kind = "" if self.objective == "next-token" else f" --objective {self.objective}"
            command = "" if location is None else f": kvad data prepare TEXTS{kind} --tokenizer {location} --out DIR"
            message = f"{named} not the tokenizer that made the tokens of {self.folder}"
            raise DataError(message, f"Prepare it again{command and ' with that one'}{command}")
        if self.manifest["largest"] >= tokenizer.vocab_size:
            self.check_tokens()
            raise self._vocabulary_error(self.manifest["largest"], "according to its manifest")

    def check_files(self) -> None:
        """Raise DataError if a file differs from its hash; reads all files.

        A token outside the vocabulary is named in the error.
        """
        try:
            self._check_hashes(self.hashes)
        except DataError:
            self.check_tokens()
            raise

    def _check_hashes(self, expected: Mapping[str, str]) -> None:
        for name in data_lib.token_store.find_corrupt_files(self.folder, expected):
            message = f"{self.folder / name} differs from its manifest: another sha256"
            raise DataError(message, "The file is damaged. Prepare it again.")

    def check_tokens(self) -> None:
        """Raise DataError if a token is outside the vocabulary; reads all tokens."""
        outside = self.store.find_out_of_vocabulary(self.tokenizer.vocab_size)
        if outside is not None:
            text = f"{self.noun} {outside.text + 1:,}"
            if self.pairs:
                text = f"the {'target' if outside.text % 2 else 'source'} of pair {outside.text // 2 + 1:,}"
            where = f"token {outside.offset + 1:,} of {text}, at byte {outside.byte:,} of {outside.shard}"
            raise self._vocabulary_error(outside.token, f"the first is {where}")

    def _vocabulary_error(self, token: int, where: str) -> DataError:
        vocab = self.tokenizer.vocab_size
        message = f"{self.folder} holds token id {token:,}, outside the vocabulary of {vocab:,}: {where}"
        return DataError(message, "Prepare it again.")

    def summary(self) -> str:
        """Return one line about the folder."""
        texts = format_count(self.manifest["documents"] // (2 if self.pairs else 1), self.noun)
        validation = f", {self.num_held_out:,} of them for validation" if self.num_held_out else ""
        return f"prepared: {self.folder}, {self.manifest['tokens']:,} tokens in {texts}{validation}"


def prepare_data(
    config: RunConfig,
    texts: Corpus,
    tokenizer: Tokenizer,
    out: Path,
    *,
    overwrite: bool = False,
    progress: sources.documents.Progress = lambda chars, tokens: None,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Write prepared data to ``out``, completely or not at all, and return its manifest.

    ``config.objective.kind`` is the objective that the texts are prepared for.

    Raises:
        UsageError: If ``out`` is not empty and may not be replaced.
        DataError: If texts cannot be read.
        SaveError: If the disk refuses.
    """
    check_writable_target(out, overwrite)
    texts.framer(tokenizer)
    kind: str = config.objective.kind
    if isinstance(texts, sources.pairs.PairCorpus):
        kind = "pairs"
    elif isinstance(texts, sources.documents.DocumentCorpus) and texts.frame == "separator":
        kind = "documents"
    more = {"prepared": VERSION, "kind": kind, "held": texts.num_held_out, "vocab": tokenizer.vocab_size}
    more["tokenizer_config"] = config_lib.serialization.to_dict(config.tokenizer)
    if isinstance(texts, sources.examples.ExampleCorpus):
        share = None if texts.has_held_out_files else config.data.validation_fraction
        more |= {"noun": texts.noun, "validation": share, "labels": list(texts.labels)}
    log(f"tokens: {tokenizer.kind}, vocabulary {tokenizer.vocab_size:,}")
    with storage.atomic.new_folder(out) as new:
        tokenizer.save(new / data_lib.token_store.TOKENIZER)
        for name, content in texts.template_files(tokenizer).items():
            path = new / data_lib.token_store.TEMPLATE / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return data_lib.token_store.write_store(new, texts, tokenizer, more, progress=progress)


def check_writable_target(out: Path, overwrite: bool) -> None:
    """Raise UsageError if ``out`` is not empty and may not be replaced."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file, and prepared data is a folder", "Choose another --out.")
    if out.exists() and any(out.iterdir()) and not (overwrite and data_lib.token_store.is_prepared(out)):
        hint = "Replace it with --overwrite." if data_lib.token_store.is_prepared(out) else "Choose another --out."
        raise UsageError(f"{out} is not empty", hint)
