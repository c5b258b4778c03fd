"""Options of the commands that read training data, and how they are merged into the tables of a run file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kvad import api
from kvad.cli.fields import Options, given_fields, is_given, option
from kvad.cli.parameters import PairFiles
from kvad.errors import UsageError, suggest
from kvad.train import setup, sources
from kvad.train.config import DataConfig, TokenizerConfig

TOKENIZER_KINDS = ("bpe", "byte", "char", "word")
PAIRS_HELP = "Two parallel files: line n of TARGET answers line n of SOURCE"

# Options are keys of the tables of ``kvad.train`` under their own name, but for these.
RENAMED_KEYS = {
    "preset": "model.preset", "suffix": "data.file_suffixes", "field": "data.text_field",
    "validation_fraction": "data.validation_fraction", "objective": "objective.kind", "lora_rank": "lora.rank",
    "prompt": "callbacks.prompts",
}  # fmt: skip


class CorpusOptions(Options):
    """Files of a corpus and its tokenizer."""

    pairs: PairFiles = option(PAIRS_HELP, metavar="SOURCE TARGET")
    tokenizer: str | None = option("bpe, byte, char, word, or a tokenizer to load [default: bpe]", metavar="KIND|PATH")
    vocab_size: int | None = option("Maximum size of the vocabulary", of=TokenizerConfig)
    suffix: tuple[str, ...] = option("Suffix of the files to read in a folder [default: all text]", metavar=".EXT")
    encoding_errors: Literal["strict", "replace"] | None = option("Handling of bytes that are not UTF-8", of=DataConfig)
    validation: str | None = option(
        "Fraction of the corpus to hold out, or a file of pairs or examples [default: 0.1]", metavar="FRACTION|FILE"
    )
    validation_pairs: PairFiles = option("Two parallel files of held-out pairs", metavar="SOURCE TARGET")

    @property
    def validation_fraction(self) -> float | None:
        """The value of --validation if it is a number, else None."""
        try:
            return None if self.validation is None else float(self.validation)
        except ValueError:
            return None

    @property
    def held_out(self) -> list[tuple[Path, ...]]:
        """The held-out files."""
        named = self.validation is not None and self.validation_fraction is None
        return [*([(Path(self.validation),)] if named and self.validation else []), *self.validation_pairs]


def name_corpus(
    texts: Sequence[Path], pairs: PairFiles, held_out: Sequence[tuple[Path, ...]] = ()
) -> setup.CorpusArgument:
    """Return ``texts`` (documents or TSV files), or all pairs if any are given."""
    if not pairs and not held_out:
        return texts
    return sources.PairPaths((*((path,) for path in texts), *pairs), tuple(held_out))


def merge_options(tables: Mapping[str, Any], options: CorpusOptions) -> dict[str, Any]:
    """Merge the given options into the tables of a run file."""
    merged = {name: dict(value) if isinstance(value, Mapping) else value for name, value in tables.items()}
    given = {
        f"{table}.{key}": value
        for table, kind in api.training.SETTING_TABLES.items()
        for key, value in given_fields(options, kind).items()
    }
    given |= {key: value for name, key in RENAMED_KEYS.items() if is_given(value := getattr(options, name, None))}
    if (tokenizer := options.tokenizer) is not None:
        if tokenizer not in TOKENIZER_KINDS and not Path(tokenizer).exists():
            hint = suggest(tokenizer, TOKENIZER_KINDS)
            raise UsageError(f"--tokenizer {tokenizer!r} is neither a kind nor a file", hint)
        given["tokenizer.kind" if tokenizer in TOKENIZER_KINDS else "tokenizer.path"] = tokenizer
    for key, value in given.items():
        api.training.set_key(merged, key, value)
    return merged
