"""Pairs of texts, source and target, from files of lines.

Three forms, UTF-8, one pair per line: a TSV file (``source<TAB>target``, exactly one tab), a file of JSON lines (two
fields of each object), or two parallel files whose lines n belong together; compressed files are decompressed
(``formats.py``). A pair with an empty side is skipped and counted; lines that are not pairs are refused by number. In a
token store::

    pair i    source  x1 .. xm EOS      tokens[offsets[2 i] : offsets[2 i + 1]]
              target  BOS t1 .. tn EOS  tokens[offsets[2 i + 1] : offsets[2 i + 2]]

A source has the tokenizer's frame and then ``GenerationConfig.with_source_eos``, exactly as the engine reads it. No
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kvad.checkpoint import GenerationConfig
from kvad.errors import DataError, format_count
from kvad.text import Tokenizer
from kvad.train.sources.documents import Corpus, CorpusFile, FrameFn, describe_files, probe_file
from kvad.train.sources.formats import detect_format, read_json_fields, read_lines

ROLES: tuple[str, ...] = ("bos", "eos", "pad", "unk")  # special tokens of a tokenizer trained on pairs


@dataclass(frozen=True)
class PairPaths:
    """Files of pairs: each item is one TSV file, or a source file and a target file."""

    files: tuple[tuple[Path, ...], ...]
    held_out: tuple[tuple[Path, ...], ...] = ()  # for validation only

    @property
    def items(self) -> tuple[tuple[Path, ...], ...]:
        """All items, held-out ones last."""
        return (*self.files, *self.held_out)

    def to_dict(self) -> dict[str, list[list[str]]]:
        groups = {"files": self.files, "held": self.held_out}
        return {key: [[str(path.resolve()) for path in item] for item in items] for key, items in groups.items()}

    @staticmethod
    def from_dict(content: Mapping[str, Sequence[Sequence[str]]]) -> PairPaths:
        """Return the inverse of ``to_dict``; raises KeyError and TypeError for other content."""
        groups = (tuple(tuple(map(Path, item)) for item in content[key]) for key in ("files", "held"))
        return PairPaths(*groups)


@dataclass(frozen=True)
class PairCorpus(Corpus):
    """Pairs of files that were read once."""

    sources: tuple[CorpusFile, ...]
    paths: PairPaths
    errors: str
    fields: tuple[str, str] = ("source", "target")
    format: str = "auto"  # of a single file: "jsonl", or by its name, else TSV
    num_pairs: int = 0
    num_held_out: int = 0  # pairs at the end, from validation files
    skipped: int = 0  # pairs with an empty side, not counted above
    generation: GenerationConfig | None = None  # frames of the model; None: pair_generation_config

    noun = "pair"

    def texts(self) -> Iterator[str]:
        """Yield source, target, source, ...; a side is never cut."""
        for item in self.paths.items:
            for pair in _pairs(item, self.errors, self.fields, self.format):
                yield from pair if all(map(str.strip, pair)) else ()

    def settings(self) -> dict[str, Any]:
        pairs: dict[str, Any] = {"files": [len(item) for item in self.paths.items], "held": self.num_held_out}
        if any(_is_json(item, self.format) for item in self.paths.items):
            pairs["fields"] = list(self.fields)
        framed = {} if self.generation is None else {"framed": framing_tokens(self.generation)}
        return {**super().settings(), "pairs": pairs, **framed}

    def framer(self, tokenizer: Tokenizer) -> FrameFn:
        """Return the framing function; raise DataError if the tokenizer lacks BOS or EOS.

        A target of a trained model is the decoder start token (shifted right, as in transformers), the tokenizer's
        frame, and an EOS.
        """
        generation = self.generation or pair_generation_config(tokenizer)
        start, stops = generation.decoder_start_token_id, generation.eos_token_ids
        assert start is not None and stops
        source, has_frame = tokenizer.source_tokenizer or tokenizer, self.generation is not None

        def frame(number: int, ids: list[int]) -> list[int]:
            if number % 2 == 0:
                return generation.with_source_eos(source.add_special_tokens(ids))
            framed = [start, *(tokenizer.add_special_tokens(ids) if has_frame else ids)]
            return framed if has_frame and framed[-1] in stops else [*framed, stops[0]]

        return frame

    def summary(self) -> str:
        validation = f", {self.num_held_out:,} of them for validation" if self.num_held_out else ""
        skipped = f"; {format_count(self.skipped, 'pair')} with an empty side left out" if self.skipped else ""
        return f"corpus: {format_count(self.num_pairs, 'pair')} in {describe_files(self.sources)}{validation}{skipped}"


def framing_tokens(generation: GenerationConfig) -> list[int | None]:
    """Return the framing tokens of pairs: decoder start, source EOS, target EOS."""
    return [generation.decoder_start_token_id, generation.source_eos_token_id, *generation.eos_token_ids]


def pair_generation_config(tokenizer: Tokenizer) -> GenerationConfig:
    """Return the settings of a model trained on pairs: BOS, EOS on both sides, greedy.

    Raises DataError if the tokenizer lacks a token or has two vocabularies.
    """
    specials = tokenizer.special_tokens
    if tokenizer.source_tokenizer is not None:
        raise DataError("this tokenizer has a vocabulary for each side", "Training on pairs uses one shared table.")
    for role in ("bos", "eos"):
        if getattr(specials, role) is None:
            raise DataError(f"this tokenizer has no {role.upper()} token, and targets need one", "Train a tokenizer.")
    assert specials.bos is not None and specials.eos is not None
    return GenerationConfig(
        decoder_start_token_id=specials.bos,
        bos_token_id=specials.bos,
        eos_token_ids=(specials.eos,),
        source_eos_token_id=specials.eos,
        pad_token_id=specials.pad,
        suppress_tokens=() if specials.pad is None else (specials.pad,),
        sampling={"temperature": 0.0},
    )


def open_pairs(
    paths: PairPaths,
    errors: str = "strict",
    fields: tuple[str, str] = ("source", "target"),
    *,
    format: str = "auto",
    hashed: bool = True,
) -> PairCorpus:
    """Read every line once, hash the files and count the pairs; if ``hashed`` is false, do not.

    Raises:
        DataError: If a file is missing, binary or not UTF-8, a line has not exactly one tab, parallel files differ in
            length, or there are no pairs.
    """
    if not paths.files:
        raise DataError("no pairs were named", "Name TSV files, or --pairs SOURCE TARGET.")
    sources, counts, skipped = list[CorpusFile](), [0, 0], 0
    for is_held_out, items in enumerate((paths.files, paths.held_out)):
        for item in items:
            sources += [source_info(path, hashed) for path in item]
            for pair in _pairs(item, errors, fields, format) if hashed else ():
                is_complete = all(map(str.strip, pair))
                skipped += not is_complete
                counts[is_held_out] += is_complete
    if hashed and (not counts[0] or (paths.held_out and not counts[1])):
        names = ", ".join(str(path) for item in (paths.held_out if counts[0] else paths.files) for path in item)
        raise DataError(
            f"no pairs in {names}", f"{format_count(skipped, 'pair')} with an empty side" if skipped else ""
        )
    return PairCorpus(tuple(sources), paths, errors, fields, format, sum(counts), counts[1], skipped)


def source_info(path: Path, hashed: bool = True) -> CorpusFile:
    """Return name, size and hash of a file; the name includes its folder's."""
    if path.is_dir():
        raise DataError(f"{path} is a folder, and pairs come from files", "Name TSV files, or --pairs SOURCE TARGET.")
    return probe_file(path, f"{path.resolve().parent.name}/{path.name}", hashed=hashed, may_be_empty=True)


def _is_json(item: Sequence[Path], format: str) -> bool:
    return len(item) == 1 and detect_format(item[0], format) == "jsonl"


def _pairs(item: Sequence[Path], errors: str, fields: tuple[str, str], format: str) -> Iterator[tuple[str, str]]:
    """Yield every line's pair, including those with an empty side."""
    if _is_json(item, format):
        yield from ((source, target) for source, target in read_json_fields(item[0], errors, *fields))
        return
    if len(item) == 1:
        for number, line in enumerate(read_lines(item[0], errors), 1):
            source, *targets = line.split("\t")
            if len(targets) != 1:
                problem = f"{len(targets)} tabs" if targets else "no tab"
                raise DataError(
                    f"{item[0]}, line {number}: {problem}, and a pair is SOURCE<tab>TARGET",
                    "For two files with a line each: --pairs SOURCE TARGET",
                )
            yield source, targets[0]
        return
    both = zip_longest(*(read_lines(path, errors) for path in item))
    for number, (first_line, second_line) in enumerate(both, 1):
        if first_line is None or second_line is None:
            longer = number + sum(1 for _ in both)
            counts = (number - 1, longer) if first_line is None else (longer, number - 1)
            lengths = ", ".join(
                f"{path} has {format_count(count, 'line')}" for path, count in zip(item, counts, strict=True)
            )
            raise DataError(
                f"parallel files of unequal length: {lengths}; line {number:,} of the longer one has no other side",
                "Line n of one file belongs to line n of the other.",
            )
        yield first_line, second_line
