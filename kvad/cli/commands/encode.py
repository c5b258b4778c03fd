"""``kvad tag``, ``fill-mask``, ``classify`` and ``embed``: run an encoder on every line."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

import click

from kvad.cli.fields import command, option
from kvad.cli.line_batches import (
    BATCH_LINES,
    LineOptions,
    LineResult,
    LineSource,
    LineTask,
    answer_lines,
    open_for_command,
    print_answer,
    print_answers,
    require_tokenizer,
)
from kvad.cli.output import exit_with, json_line
from kvad.cli.parameters import COUNT, OUTPUT_FILE, load_fields
from kvad.errors import RequestError, SaveError

if TYPE_CHECKING:
    from kvad import engine
    from kvad.llm import LLM

T = TypeVar("T")


class _EncodeOptions(LineOptions):
    batch_size: int = option("Maximum number of lines per batch", BATCH_LINES, common=True)


@command("tag", _EncodeOptions)
def tag_command(options: _EncodeOptions) -> None:
    """Assign a label to each word of FILE, or of standard input: `Angela/B-PER Merkel/I-PER spoke/O`.

    Every line gives one line, in order; an empty line stays empty.

    \b
    kvad tag dslim/bert-base-NER news.txt > news.tags
    echo "Angela Merkel spoke in Bonn." | kvad tag dslim/bert-base-NER --json
    """
    exit_with(_answer("tag", options, _tagging))


def _tagging(llm: LLM) -> LineTask[Sequence[engine.output.TokenLabel]]:
    return LineTask(
        prepare=llm.encode,
        run=llm.tag,
        plain=lambda number, words: " ".join(f"{each.word}/{each.label}" for each in words),
        fields=lambda words: {"words": words},
        empty=(),
    )


@command("classify", _EncodeOptions)
def classify_command(options: _EncodeOptions) -> None:
    """Assign a label to each line of FILE, or of standard input: the most likely `LABEL<tab>PROBABILITY`.

    Every line gives one line, in order; an empty line stays empty. --json prints all labels.

    \b
    kvad classify distilbert/distilbert-base-uncased-finetuned-sst-2-english reviews.txt
    echo "What a film." | kvad classify runs/sst2 --json
    """
    exit_with(_answer("classify", options, _classifying))


def _classifying(llm: LLM) -> LineTask[Sequence[engine.output.Label]]:
    return LineTask(
        prepare=llm.encode,
        run=llm.classify,
        plain=lambda number, labels: "\t".join(f"{each.label}\t{each.probability:.4f}" for each in labels[:1]),
        fields=lambda labels: {"labels": labels},
        empty=(),
    )


class _FillMaskOptions(_EncodeOptions):
    top_k: int = option("Number of tokens to print for each mask", 5, kind=COUNT)


@command("fill-mask", _FillMaskOptions)
def fill_mask_command(options: _FillMaskOptions) -> None:
    """Predict the masked tokens of FILE, or of standard input.

    Prints `TOKEN PROBABILITY`, most likely first, separated by tabs; ` | ` separates several masks. Every line
    gives one line, in order; an empty line stays empty. Write the mask as the model's tokenizer spells it; a line
    without a mask is reported on stderr.

    \b
    echo "Paris is the [MASK] of France." | kvad fill-mask google-bert/bert-base-cased --top-k 3
    kvad fill-mask FacebookAI/xlm-roberta-base masked.txt --json
    """
    exit_with(_answer("fill-mask", options, lambda llm: _filling(llm, options.top_k)))


def _filling(llm: LLM, top: int) -> LineTask[Sequence[Sequence[engine.output.MaskPrediction]]]:
    tokenizer = require_tokenizer(llm)
    mask = tokenizer.special_tokens.mask
    if mask is None:
        raise RequestError("the tokenizer of this model has no mask token", "use kvad embed")
    spelled = next(name for name, token in tokenizer.special_tokens.names().items() if token == mask)

    def prepare(text: str) -> list[int]:
        ids = llm.encode(tokenizer.add_special_tokens(tokenizer.encode(text, specials=True)))
        if mask not in ids:
            raise RequestError(f"the line has no mask; write {spelled} for each masked token")
        return ids

    def plain(number: int, masks: Sequence[Sequence[engine.output.MaskPrediction]]) -> str:
        return "\t|\t".join(
            "\t".join(f"{_escape_unprintable(each.text)} {each.probability:.4f}" for each in one) for one in masks
        )

    return LineTask(prepare, lambda many: llm.fill_mask(many, top=top), plain, lambda masks: {"masks": masks}, empty=())


def _escape_unprintable(text: str) -> str:
    """Escape unprintable characters, so that a token stays on one line and in one column."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


# ---------------------------------------------------------------- vectors


class _EmbedOptions(_EncodeOptions):
    pooling: Literal["mean", "first", "head"] | None = option(
        "Vector of a line: the mean of its tokens, the first token, or the head's [default: the model's, else mean]"
    )
    format: Literal["json", "npy"] | None = option("Output format [default: from the suffix of --out, else json]")
    out: Path | None = option("Output file [default: stdout]", short="-o", kind=OUTPUT_FILE)


@command("embed", _EmbedOptions)
def embed_command(options: _EmbedOptions) -> None:
    """Compute a vector for each line of FILE, or of standard input.

    JSON is one object per line, {"line": 1, "embedding": [...]}, null for an empty line; npy is one float32 array
    [lines, hidden_size], with NaN for an empty line.

    \b
    kvad embed sentence-transformers/all-MiniLM-L6-v2 sentences.txt --out sentences.npy
    echo "A house by the lake." | kvad embed runs/bert --pooling first
    """
    out, as_json = options.out, options.as_json
    if as_json and options.format == "npy":
        raise click.UsageError("--json and --format npy exclude each other.")
    form = options.format or ("npy" if out is not None and out.suffix == ".npy" and not as_json else "json")
    if form == "npy" and out is None:
        raise click.UsageError("--format npy needs --out FILE.")

    def task(llm: LLM) -> LineTask[list[float] | None]:
        return LineTask(
            prepare=llm.encode,
            run=lambda many: llm.embed(many, pool=options.pooling).float().tolist(),
            plain=None,
            fields=lambda vector: {"embedding": vector},
            empty=None,
        )

    with ExitStack() as stack:
        show: Callable[[LineResult[list[float] | None]], None] | None = None
        if out is not None:
            target = stack.enter_context(_replacing(out))
            show = stack.enter_context(_Matrix(target)).show if form == "npy" else _Objects(target).show
        code = _answer("embed", options, task, show)
    exit_with(code)


class _Objects:
    """Writes JSON lines to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def show(self, line: LineResult[list[float] | None]) -> None:
        result = {"embedding": line.answer} if line.error is None else {"error": line.error}
        self._file.write(f"{json_line({'line': line.number, **result})}\n".encode())


class _Matrix:
    """Writes NumPy's format 1.0 row by row; the header has 128 bytes for any shape and is written at the end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._rows, self._width, self._num_empty = file, 0, 0, 0

    def __enter__(self) -> _Matrix:
        self._file.write(bytes(128))
        return self

    def show(self, line: LineResult[list[float] | None]) -> None:
        self._rows += 1
        if line.answer is None and not self._width:
            self._num_empty += 1  # the width is unknown until the first answer
            return
        vector = line.answer or [math.nan] * self._width
        if not self._width:
            self._width = len(vector)
            self._file.write(struct.pack("<f", math.nan) * (self._width * self._num_empty))
        self._file.write(struct.pack(f"<{self._width}f", *vector))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({self._rows}, {self._width}), }}"
            self._file.seek(0)
            self._file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + header.ljust(117).encode() + b"\n")


@contextmanager
def _replacing(out: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``out`` when the block ends without an error."""
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


# ---------------------------------------------------------------- running


def _answer(
    command: str,
    options: _EncodeOptions,
    task: Callable[[LLM], LineTask[T]],
    show: Callable[[LineResult[T]], None] | None = None,
) -> int:
    """Answer all lines and return the exit code; without ``show`` the answers are printed."""
    from kvad.llm import LLM

    with LineSource(options.file) as lines:
        opened = open_for_command(options.model, command)
        # An encoder needs no cache, and the decoder of an encoder-decoder is not used.
        has_decoder = opened.config.encoder_input is not None
        minimal_cache: dict[str, Any] = {"max_seq_len": 1, "max_source_len": 1} if has_decoder else {}
        with LLM.load(opened, max_num_seqs=options.batch_size, **load_fields(options), **minimal_cache) as llm:
            require_tokenizer(llm)
            line_task = task(llm)
            print_line = partial(print_answer, line_task, as_json=options.as_json) if show is None else show
            failed = print_answers(answer_lines(lines, line_task), print_line, lines, quiet=options.quiet)
    return 1 if failed else 0
