"""Pairs of texts, source and target, from files of lines: what an encoder-decoder is trained on.

Three forms, UTF-8, one pair per line: a TSV file (``source<TAB>target``, exactly one tab), a file of JSON lines (two
fields of each object), or two parallel files whose line n belong together; compressed ones are read through
(``readers.py``).  A pair with an empty side is left out and counted; lines that cannot be pairs are refused
by number.  As tokens, side by side in a store::

    pair i    source  x1 .. xm EOS      tokens[offsets[2 i] : offsets[2 i + 1]]
              target  BOS t1 .. tn EOS  tokens[offsets[2 i + 1] : offsets[2 i + 2]]

A source has the tokenizer's frame and then ``Generation.ended``, exactly as the engine will read it.  No torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kvad.checkpoint import GenerationConfig
from kvad.errors import DataError, format_count
from kvad.text import Tokenizer
from kvad.train.sources.documents import PROBE_BYTES, CorpusFile, FrameFn
from kvad.train.sources.formats import TextPiece, detect_format, open_decompressed, read_json_fields, read_lines

ROLES = ("bos", "eos", "pad", "unk")  # special tokens of a tokenizer that is trained on pairs


@dataclass(frozen=True)
class PairPaths:
    """Where pairs lie: each item is one TSV file, or a source's and a target's file.  ``held``: for validation only."""

    files: tuple[tuple[Path, ...], ...]
    held_out: tuple[tuple[Path, ...], ...] = ()

    def to_dict(self) -> dict[str, list[list[str]]]:
        def spelled(items: tuple[tuple[Path, ...], ...]) -> list[list[str]]:
            return [[str(path.resolve()) for path in item] for item in items]

        return {"files": spelled(self.files), "held": spelled(self.held_out)}

    @staticmethod
    def from_dict(content: Mapping[str, Sequence[Sequence[str]]]) -> PairPaths:
        """Raises KeyError and TypeError for what :meth:`to_dict` did not write."""

        def read(items: Sequence[Sequence[str]]) -> tuple[tuple[Path, ...], ...]:
            return tuple(tuple(Path(name) for name in item) for item in items)

        return PairPaths(read(content["files"]), read(content["held"]))


@dataclass(frozen=True)
class PairCorpus:
    """Pairs that have been looked at: ``num_pairs`` in all, the last ``num_held`` of them from files held out.

    ``skipped``: pairs with an empty side, which are none of them.  ``format``: of a single file, ``jsonl``, or
    ``auto``: by its name, else TSV.  ``said``: how sources and targets begin and end for
    the model that reads them; None: as :func:`generation_of` has it.
    """

    files: tuple[tuple[CorpusFile, ...], ...]
    num_pairs: int
    num_held_out: int
    skipped: int
    errors: str
    fields: tuple[str, str] = ("source", "target")
    generation: GenerationConfig | None = None
    format: str = "auto"

    @property
    def sources(self) -> tuple[CorpusFile, ...]:
        return tuple(source for item in self.files for source in item)

    def texts(self) -> Iterator[str]:
        """Source, target, source, target, ...; may be called again.  Raises DataError naming file and line."""
        for item in self.files:
            for pair in _pairs([source.path for source in item], self.errors, self.fields, self.format):
                if not _has_empty_side(pair):
                    yield from pair

    def pieces(self) -> Iterator[TextPiece]:
        """The same, as a store takes them: a side is never cut."""
        return map(TextPiece, self.texts())

    def settings(self) -> dict[str, Any]:
        """What decides the texts, and how they are framed."""
        pairs: dict[str, Any] = {"files": [len(item) for item in self.files], "held": self.num_held_out}
        if any(_is_json([source.path for source in item], self.format) for item in self.files):
            pairs["fields"] = list(self.fields)
        framed = {} if self.generation is None else {"framed": framing_tokens(self.generation)}
        return {
            "errors": self.errors,
            "sources": [source.manifest_entry() for source in self.sources],
            "pairs": pairs,
            **framed,
        }

    def framer(self, tokenizer: Tokenizer) -> FrameFn:
        """Raises DataError for a tokenizer without BOS or EOS, where the model does not say what they are."""
        if self.generation is not None:
            return _framer(tokenizer, self.generation)
        said = pair_generation_config(tokenizer)
        bos, eos = said.decoder_start_token_id, said.eos_token_ids[0]
        assert bos is not None

        def frame(number: int, ids: list[int]) -> list[int]:
            return [bos, *ids, eos] if number % 2 else said.with_source_eos(tokenizer.add_special_tokens(ids))

        return frame

    def summary(self) -> str:
        """One line about it."""
        num_bytes = sum(source.num_bytes for source in self.sources)
        held = f", {self.num_held_out:,} of them for validation" if self.num_held_out else ""
        skipped = f"; {format_count(self.skipped, 'pair')} with an empty side left out" if self.skipped else ""
        files = format_count(len(self.sources), "file")
        return f"corpus: {format_count(self.num_pairs, 'pair')} in {files}, {num_bytes / 1e6:,.1f} MB{held}{skipped}"


def framing_tokens(said: GenerationConfig) -> list[int | None]:
    """The tokens that stand around pairs: what opens a target, what ends a source, what ends a target."""
    return [said.decoder_start_token_id, said.source_eos_token_id, *said.eos_token_ids]


def _framer(tokenizer: Tokenizer, said: GenerationConfig) -> FrameFn:
    """As a model was trained that says so.

    A target is what its tokenizer makes of the text, behind the token that opens it (shifted right, as transformers
    does), and ends with one that ends it."""
    assert said.decoder_start_token_id is not None and said.eos_token_ids
    start, stops, source = said.decoder_start_token_id, said.eos_token_ids, tokenizer.source_tokenizer or tokenizer

    def frame(number: int, ids: list[int]) -> list[int]:
        if number % 2 == 0:
            return said.with_source_eos(source.add_special_tokens(ids))
        framed = [start, *tokenizer.add_special_tokens(ids)]
        return framed if framed[-1] in stops else [*framed, stops[0]]

    return frame


def pair_generation_config(tokenizer: Tokenizer) -> GenerationConfig:
    """What a model trained on pairs says about generating: a target is opened by BOS, and EOS ends both sides; greedy.

    Raises DataError for a tokenizer that cannot say it.
    """
    specials = tokenizer.special_tokens
    if tokenizer.source_tokenizer is not None:
        raise DataError("this tokenizer has a vocabulary for each side", "pairs are trained with one shared table")
    for role in ("bos", "eos"):
        if getattr(specials, role) is None:
            raise DataError(f"this tokenizer has no {role.upper()} token, and targets need one", "train one here")
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


# ---------------------------------------------------------------- files


def open_pairs(
    paths: PairPaths,
    errors: str = "strict",
    fields: tuple[str, str] = ("source", "target"),
    *,
    format: str = "auto",
    hashed: bool = True,
) -> PairCorpus:
    """Read every line once, hash the files and count the pairs (``hashed`` False: none of it, for a stream).

    Raises DataError for a file that is missing, binary or not UTF-8, for a line without exactly one tab, for parallel
    files of unequal length, and for a corpus without pairs.
    """
    if not paths.files:
        raise DataError("no pairs were named", "name TSV files, or --pairs SOURCE TARGET")
    files, counts, skipped = [], [0, 0], 0
    for held, items in enumerate((paths.files, paths.held_out)):
        for item in items:
            files.append(tuple(source_info(path, hashed) for path in item))
            for pair in _pairs(item, errors, fields, format) if hashed else ():
                empty = _has_empty_side(pair)
                skipped += empty
                counts[held] += not empty
    if not hashed:
        return PairCorpus(tuple(files), 0, 0, 0, errors, fields, format=format)
    if not counts[0] or (paths.held_out and not counts[1]):
        names = ", ".join(str(path) for item in (paths.held_out if counts[0] else paths.files) for path in item)
        raise DataError(
            f"no pairs in {names}", f"{format_count(skipped, 'pair')} with an empty side" if skipped else ""
        )
    return PairCorpus(tuple(files), sum(counts), counts[1], skipped, errors, fields, format=format)


def source_info(path: Path, hashed: bool = True) -> CorpusFile:
    """Its size and hash; a file's name is its folder's and its own, as both sides may be called alike."""
    if path.is_dir():
        raise DataError(f"{path} is a folder, and pairs come from files", "name TSV files, or --pairs SOURCE TARGET")
    with open_decompressed(path) as file:
        if b"\0" in (first := file.read(PROBE_BYTES)):
            raise DataError(f"{path} is binary (a zero byte at offset {first.index(0)}), not text")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest() if hashed else ""
    return CorpusFile(path, f"{path.resolve().parent.name}/{path.name}", path.stat().st_size, digest)


def _is_json(item: Sequence[Path], format: str) -> bool:
    return len(item) == 1 and detect_format(item[0], format) == "jsonl"


def _pairs(item: Sequence[Path], errors: str, fields: tuple[str, str], format: str) -> Iterator[tuple[str, str]]:
    """Every line's pair, those with an empty side too."""
    if _is_json(item, format):
        yield from ((source, target) for source, target in read_json_fields(item[0], errors, *fields))
        return
    if len(item) == 1:
        for number, line in enumerate(read_lines(item[0], errors), 1):
            source, *targets = line.split("\t")
            if len(targets) != 1:
                found = f"{len(targets)} tabs" if targets else "no tab"
                raise DataError(
                    f"{item[0]}, line {number}: {found}, and a pair is SOURCE<tab>TARGET",
                    "two files with a line each: --pairs SOURCE TARGET",
                )
            yield source, targets[0]
        return
    both = zip_longest(*(read_lines(path, errors) for path in item))
    for number, (first_line, second_line) in enumerate(both, 1):
        if first_line is None or second_line is None:
            longer = number + sum(1 for _ in both)
            counts = (number - 1, longer) if first_line is None else (longer, number - 1)
            said = ", ".join(
                f"{path} has {format_count(count, 'line')}" for path, count in zip(item, counts, strict=True)
            )
            raise DataError(
                f"parallel files of unequal length: {said}; line {number:,} of the longer one has no other side",
                "line n of one belongs to line n of the other",
            )
        yield first_line, second_line


def _has_empty_side(pair: tuple[str, str]) -> bool:
    return not pair[0].strip() or not pair[1].strip()
