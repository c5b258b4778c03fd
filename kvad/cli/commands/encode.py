"""``kvad tag``, ``fill``, ``classify`` and ``embed``: every line through an encoder."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import click

from kvad.cli.line_batches import (
    BATCH_LINES,
    LineResult,
    LineSource,
    LineTask,
    answer_lines,
    line_options,
    open_for_command,
    print_answers,
    printer,
    require_tokenizer,
)
from kvad.cli.options import json_line, model_argument
from kvad.errors import RequestError, SaveError

if TYPE_CHECKING:
    from kvad import engine
    from kvad.llm import LLM

T = TypeVar("T")

batch_size_option = click.option(
    "--rows", type=int, default=BATCH_LINES, show_default=True, help="Lines that are read side by side, at most."
)


@click.command()
@model_argument
@batch_size_option
@line_options
def tag_command(model: Path, file: Path | None, **options: Any) -> None:
    """Label the words of every line of FILE, or of standard input: `Angela/B-PER Merkel/I-PER spoke/O`.

    A line in gives a line out, in the same order; an empty line stays empty.

    \b
    kvad tag dslim/bert-base-NER news.txt > news.tags
    echo "Angela Merkel spoke in Bonn." | kvad tag dslim/bert-base-NER --json
    """
    _run_lines(model, file, "tag", options, _tagging)


def _tagging(llm: LLM) -> LineTask[Sequence[engine.output.TokenLabel]]:
    return LineTask(
        prepare=llm.encode,
        run=llm.tag,
        plain=lambda number, words: " ".join(f"{each.word}/{each.label}" for each in words),
        fields=lambda words: {"words": words},
        empty=(),
    )


@click.command()
@model_argument
@batch_size_option
@line_options
def classify_command(model: Path, file: Path | None, **options: Any) -> None:
    """Label every line of FILE, or of standard input: its likeliest `LABEL<tab>PROBABILITY`.

    A line in gives a line out, in the same order; an empty line stays empty.  --json has every label.

    \b
    kvad classify distilbert/distilbert-base-uncased-finetuned-sst-2-english reviews.txt
    echo "What a film." | kvad classify runs/sst2 --json
    """
    _run_lines(model, file, "classify", options, _classifying)


def _classifying(llm: LLM) -> LineTask[Sequence[engine.output.Label]]:
    return LineTask(
        prepare=llm.encode,
        run=llm.classify,
        plain=lambda number, labels: "\t".join(f"{each.label}\t{each.probability:.4f}" for each in labels[:1]),
        fields=lambda labels: {"labels": labels},
        empty=(),
    )


@click.command()
@model_argument
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, help="Candidates for each mask.")
@batch_size_option
@line_options
def fill_mask_command(model: Path, file: Path | None, **options: Any) -> None:
    """Fill the masks of every line of FILE, or of standard input: `TOKEN PROBABILITY`, the likeliest first, with tabs
    between; ` | ` stands between several masks.

    A line in gives a line out, in the same order; an empty line stays empty.  The mask is written as the model's
    tokenizer spells it; a line without one is told on stderr.

    \b
    echo "Paris is the [MASK] of France." | kvad fill google-bert/bert-base-cased --top 3
    kvad fill FacebookAI/xlm-roberta-base masked.txt --json
    """
    _run_lines(model, file, "fill", options, lambda llm: _filling(llm, options["top"]))


def _filling(llm: LLM, top: int) -> LineTask[Sequence[Sequence[engine.output.MaskPrediction]]]:
    tokenizer = require_tokenizer(llm)
    mask = tokenizer.special_tokens.mask
    if mask is None:
        raise RequestError("this model's tokenizer has no mask", "kvad embed would do")
    spelled = next(name for name, token in tokenizer.special_tokens.names().items() if token == mask)

    def prepare(text: str) -> list[int]:
        ids = llm.encode(tokenizer.add_special_tokens(tokenizer.encode(text, specials=True)))
        if mask not in ids:
            raise RequestError(f"no mask: write {spelled} where a word is to be found")
        return ids

    def plain(number: int, masks: Sequence[Sequence[engine.output.MaskPrediction]]) -> str:
        return "\t|\t".join(
            "\t".join(f"{_escape_unprintable(each.text)} {each.probability:.4f}" for each in one) for one in masks
        )

    return LineTask(prepare, lambda many: llm.fill_mask(many, top=top), plain, lambda masks: {"masks": masks}, empty=())


def _escape_unprintable(text: str) -> str:
    """A token on one line, in one column: what does not print is escaped."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


# ---------------------------------------------------------------- vectors


@click.command()
@model_argument
@click.option(
    "--pool",
    type=click.Choice(["mean", "first", "head"]),
    help="One vector of a line: its tokens' mean, the first, or the head's [default: as the model says, else mean].",
)
@click.option("--format", "form", type=click.Choice(["json", "npy"]), help="[default: by --out's ending, else json]")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="[default: stdout]")
@batch_size_option
@line_options
def embed_command(
    model: Path, file: Path | None, pool: Any, form: str | None, out: Path | None, as_json: bool, **options: Any
) -> None:
    """A vector for every line of FILE, or of standard input.

    JSON is an object per line, {"line": 1, "embedding": [...]}, null for an empty line; npy is one array of float32,
    lines x width, whose row is NaN for an empty line.

    \b
    kvad embed sentence-transformers/all-MiniLM-L6-v2 sentences.txt --out sentences.npy
    echo "A house by the lake." | kvad embed runs/bert --pool first
    """
    if as_json and form == "npy":
        raise click.UsageError("--json and --format npy both given.")
    form = form or ("npy" if out is not None and out.suffix == ".npy" and not as_json else "json")
    if form == "npy" and out is None:
        raise click.UsageError("--format npy needs --out FILE.")

    def task(llm: LLM) -> LineTask[list[float] | None]:
        return LineTask(
            prepare=llm.encode,
            run=lambda many: llm.embed(many, pool=pool).float().tolist(),
            plain=None,
            fields=lambda vector: {"embedding": vector},
            empty=None,
        )

    with ExitStack() as stack:
        show: Callable[[LineResult[list[float] | None]], None] | None = None
        if out is not None:
            target = stack.enter_context(_replacing(out))
            show = stack.enter_context(_Matrix(target)).show if form == "npy" else _Objects(target).show
        failed = _answer(model, file, "embed", {**options, "as_json": as_json}, task, show)
    click.get_current_context().exit(1 if failed else 0)


class _Objects:
    """JSON lines in a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def show(self, line: LineResult[list[float] | None]) -> None:
        found = {"embedding": line.answer} if line.error is None else {"error": line.error}
        self._file.write(f"{json_line({'line': line.number, **found})}\n".encode())


class _Matrix:
    """NumPy's format 1.0, row by row: the header, of 128 bytes whatever the shape, is written at the end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._rows, self._width, self._before = file, 0, 0, 0

    def __enter__(self) -> _Matrix:
        self._file.write(bytes(128))
        return self

    def show(self, line: LineResult[list[float] | None]) -> None:
        self._rows += 1
        if line.answer is None and not self._width:
            self._before += 1  # how wide a row is will be known later
            return
        vector = line.answer or [math.nan] * self._width
        if not self._width:
            self._width = len(vector)
            self._file.write(struct.pack("<f", math.nan) * (self._width * self._before))
        self._file.write(struct.pack(f"<{self._width}f", *vector))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            said = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({self._rows}, {self._width}), }}"
            self._file.seek(0)
            self._file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + said.ljust(117).encode() + b"\n")


@contextmanager
def _replacing(out: Path) -> Iterator[BinaryIO]:
    """A file beside ``out`` that takes its place when the block ends well."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(out)
    except OSError as error:
        raise SaveError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


# ---------------------------------------------------------------- what they share


def _run_lines(
    model: Path, file: Path | None, command: str, options: dict[str, Any], task: Callable[[LLM], LineTask[T]]
) -> None:
    failed = _answer(model, file, command, options, task)
    click.get_current_context().exit(1 if failed else 0)


def _answer(
    model: Path,
    file: Path | None,
    command: str,
    options: dict[str, Any],
    task: Callable[[LLM], LineTask[T]],
    show: Callable[[LineResult[T]], None] | None = None,
) -> int:
    """How many lines failed; ``show`` None: they are printed."""
    from kvad.llm import LLM

    with LineSource(file) as lines:
        opened = open_for_command(model, command)
        # An encoder keeps nothing; of an encoder-decoder the decoder is not asked.
        least: dict[str, Any] = {} if opened.config.encoder_input is None else {"capacity": 1, "source_capacity": 1}
        chosen = {name: options[name] for name in ("dtype", "rows", "deterministic", "adapter")}
        with LLM.load(opened.path, **chosen, **least) as llm:
            require_tokenizer(llm)
            asked = task(llm)
            shown = printer(asked, as_json=options["as_json"]) if show is None else show
            return print_answers(answer_lines(lines, asked), shown, lines, quiet=options["quiet"])
