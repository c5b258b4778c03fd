"""Line-by-line processing: lines are read in windows, batched by length and answered in input order.

Windows grow from 64 to 4,096 lines: the first answers come soon, and later windows have enough lines of similar
length. If a pipe pauses, the lines read so far are answered. Invariant: every line gives one answer, in order. A line
that cannot be answered (too long, not UTF-8, logits that are not finite) is reported on stderr and gives an empty
answer, as an empty line does; other lines are unaffected, and the exit code is 1.
"""

from __future__ import annotations

import errno
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Generic, TypeVar

import click

from kvad import checkpoint, storage
from kvad import config as cfg
from kvad.cli.fields import argument, option
from kvad.cli.output import ProgressLine, emit_json, note
from kvad.cli.parameters import ModelArgument, TextOptions, WeightOptions
from kvad.errors import DataError, EngineError, RequestError, UsageError, format_count

if TYPE_CHECKING:
    from kvad.checkpoint import CheckpointHandle
    from kvad.config import ModelConfig
    from kvad.llm import LLM
    from kvad.text import Tokenizer

T = TypeVar("T")

WINDOW_SIZES = (64, 256, 1024, 4096)  # lines; the last size repeats
BATCH_LINES = 64  # lines per call of the engine
READ_CHUNK = 1 << 17  # bytes per read
POLL_SECONDS = 0.02  # seconds to wait for a pipe


class LineOptions(ModelArgument, WeightOptions, TextOptions):
    """Options of the commands that read lines."""

    file: Path | None = argument("[FILE|-]")
    as_json: bool = option("Print one JSON object per line of input", flag="--json", common=True)


# ---------------------------------------------------------------- the model


def model_capabilities(config: ModelConfig) -> tuple[str, tuple[str, ...]]:
    """Return the kind of a model and the commands that accept it."""
    if config.kind == "decoder":
        return "a decoder", ("generate", "chat", "embed")
    if config.kind == "encoder-decoder":
        return "an encoder-decoder", ("translate", "embed")
    if isinstance(config.head, cfg.LanguageHeadConfig):
        return "an encoder that predicts masked tokens", ("fill-mask", "embed")
    if isinstance(config.head, cfg.ClassificationHeadConfig):
        tokens = config.head.level == "token"
        return f"an encoder that labels {'tokens' if tokens else 'texts'}", ("tag" if tokens else "classify", "embed")
    return "an encoder that embeds", ("embed",)


def open_for_command(model: Path, command: str, rope_scaling: str | None = None) -> CheckpointHandle:
    """Open a checkpoint without loading weights.

    Raises:
        RequestError: If ``command`` does not accept this kind of model.
    """
    handle = checkpoint.open_checkpoint(model, rope_scaling=rope_scaling)
    kind, commands = model_capabilities(handle.config)
    if command not in commands:
        others = ", ".join(f"kvad {name}" for name in commands)
        raise RequestError(f"{model} is {kind}: kvad {command} does not accept it", f"use {others}")
    return handle


def require_tokenizer(llm: LLM) -> Tokenizer:
    if llm.tokenizer is None:
        raise RequestError("the model has no tokenizer, so it cannot read lines")
    return llm.tokenizer


# ---------------------------------------------------------------- lines in


class LineSource:
    """Lines of a file, or of standard input, as bytes without line ends.

    Attributes:
        total: Size of the file in bytes; None for standard input.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = None if path is None or str(path) == "-" else path
        try:
            self._file: BinaryIO = sys.stdin.buffer if self._path is None else storage.filesystem.open_input(self._path)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a pipe, socket or device
                raise
            raise DataError(f"{self._path}: {error.strerror}") from error
        self.total = None if self._path is None else os.fstat(self._file.fileno()).st_size
        self._lines: deque[bytes] = deque()
        self._rest: list[bytes] = []  # parts of the last line, which is not complete
        self._ended = False

    def take(self, max_lines: int) -> list[bytes]:
        """Return up to ``max_lines`` lines without waiting; at least one unless the input has ended."""
        while not self._lines and not self._ended:
            self._read()
        while len(self._lines) < max_lines and not self._ended and self._can_read():
            self._read()
        return [self._lines.popleft() for _ in range(min(max_lines, len(self._lines)))]

    def _read(self) -> None:
        data = self._file.read1(READ_CHUNK) if hasattr(self._file, "read1") else self._file.read(READ_CHUNK)
        if b"\n" in data:
            first, *others = data.split(b"\n")
            self._lines.append(b"".join([*self._rest, first]))
            self._lines.extend(others[:-1])
            self._rest = others[-1:]
        else:
            self._rest.append(data)
        if not data:
            self._ended = True
            last = b"".join(self._rest)
            self._lines.extend([last] if last else [])

    def _can_read(self) -> bool:
        """True if a read would not block; a file never blocks."""
        try:
            return self._path is not None or bool(select.select([self._file], [], [], POLL_SECONDS)[0])
        except (OSError, ValueError):  # the bytes of a test, or a system that selects sockets only
            return True

    def __enter__(self) -> LineSource:
        return self

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            self._file.close()


# ---------------------------------------------------------------- answers


@dataclass(frozen=True)
class LineResult(Generic[T]):
    """Result of a line: an answer, None for an empty line, or an error."""

    number: int  # from 1
    size: int  # bytes, including the line end
    answer: T | None = None
    error: str | None = None
    note: str = ""  # the tokenizer's warning (text that became UNK), or ""


@dataclass(frozen=True)
class LineTask(Generic[T]):
    """Functions that encode, answer and format lines."""

    prepare: Callable[[str], list[int]]  # line -> token ids; raises UsageError
    run: Callable[[list[list[int]]], Sequence[T]]  # token ids of lines -> their answers
    plain: Callable[[int, T], str] | None  # line number, answer -> text; None prints only JSON
    fields: Callable[[T], Mapping[str, object]]  # answer -> fields of a JSON object
    empty: T  # answer to an empty line
    runs_empty: bool = False  # an empty line is prepared and answered like any other


def answer_lines(lines: LineSource, task: LineTask[T]) -> Iterator[LineResult[T]]:
    """Yield the results in the order of the lines, each as soon as all earlier ones are available.

    A UsageError of ``task.run`` does not belong to a line and is raised.
    """
    sizes = chain(WINDOW_SIZES, repeat(WINDOW_SIZES[-1]))
    number = 1
    while batch := lines.take(next(sizes)):
        yield from _Window(number, batch, task).answers()
        number += len(batch)


class _Window(Generic[T]):
    """Consecutive lines with their token ids and results; ``first`` is the number of the first line."""

    def __init__(self, first: int, raw: list[bytes], task: LineTask[T]) -> None:
        self.first, self.raw, self.task = first, raw, task
        self.ids: dict[int, list[int]] = {}
        self.notes: dict[int, str] = {}
        self.results: dict[int, LineResult[T]] = {}

    def answers(self) -> Iterator[LineResult[T]]:
        """Yield the results in order; the batch with the earliest line runs first."""
        for number, raw in enumerate(self.raw, self.first):
            self._prepare(number, raw)
        following = self.first
        order = sorted(self.ids, key=lambda number: (len(self.ids[number]), number))
        batches = [order[i : i + BATCH_LINES] for i in range(0, len(order), BATCH_LINES)]  # of similar length
        for batch in [[], *sorted(batches, key=min)]:
            self._run(batch)
            while following in self.results:
                yield self.results.pop(following)
                following += 1

    def _prepare(self, number: int, raw: bytes) -> None:
        """Encode a line without its byte order mark and the CR of a Windows line end."""
        raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
        try:
            text = raw.removesuffix(b"\r").decode("utf-8")
            if not text.strip() and not self.task.runs_empty:
                self._end(number)
                return
            with redirect_stderr(StringIO()) as warnings:  # a tokenizer prints there what became UNK
                self.ids[number] = self.task.prepare(text)
            self.notes[number] = warnings.getvalue().strip()
        except UnicodeDecodeError as error:
            self._end(number, error=f"not UTF-8 at byte {error.start} (0x{raw[error.start]:02X})")
        except UsageError as error:
            self._end(number, error=error.message)

    def _run(self, batch: list[int]) -> None:
        """Answer lines together; if the engine fails, answer each alone."""
        try:
            answers = self.task.run([self.ids[number] for number in batch]) if batch else []
            for number, answer in zip(batch, answers, strict=True):
                self._end(number, answer)
        except EngineError as error:
            if len(batch) == 1:
                self._end(batch[0], error=error.message)
                return
            for number in batch:
                self._run([number])

    def _end(self, number: int, answer: T | None = None, error: str | None = None) -> None:
        size, note = len(self.raw[number - self.first]) + 1, self.notes.get(number, "")
        self.results[number] = LineResult(number, size, answer, error, note)


# ---------------------------------------------------------------- lines out


def print_answers(
    lines: LineSource, task: LineTask[T], options: LineOptions, show: Callable[[LineResult[T]], None] | None = None
) -> int:
    """Answer all lines and return the exit code: 1 if a line failed.

    An answer is printed, or shown by ``show``, when it is available; failures are reported on stderr. The first
    warning of the tokenizer is printed, and the number of the others.
    """

    def print_answer(line: LineResult[T]) -> None:
        answer = task.empty if line.answer is None else line.answer
        if not options.as_json and task.plain is not None:
            click.echo(task.plain(line.number, answer))
        else:
            fields = {"error": line.error} if line.error is not None else task.fields(answer)
            emit_json({"line": line.number, **fields})

    show = print_answer if show is None else show
    number = failed = num_warnings = num_bytes = 0
    start = time.monotonic()
    try:
        with ProgressLine(quiet=options.quiet or sys.stdout.isatty()) as progress:
            for line in answer_lines(lines, task):
                show(line)
                number, num_bytes = line.number, num_bytes + line.size
                num_warnings += bool(line.note)
                if line.note and num_warnings == 1:
                    progress.note(f"line {number}: {line.note.removeprefix('kvad: ')}")
                if line.error is not None:
                    failed += 1
                    progress.note(f"line {number}: {line.error}")
                rate = number / max(1e-3, time.monotonic() - start)
                progress.update(f"{format_count(number, 'line')}, {rate:,.1f} lines/s", num_bytes, lines.total)
    except KeyboardInterrupt:
        note(f"interrupted after {format_count(number, 'line')}")
        raise
    if num_warnings > 1:
        note(f"the same in {format_count(num_warnings - 1, 'other line')}")
    if failed:
        note(f"{failed:,} of {format_count(number, 'line')} failed")
    return 1 if failed else 0
