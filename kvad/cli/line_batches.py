"""Many lines through a model: read as they come, answered in batches of like length, printed in their own order.

Lines are taken in windows that grow from 64 to 4,096: the first answers come soon, and later windows have lines enough
to put those of like length together.  A pipe that pauses is not waited for: what has come is answered.  One invariant:
every line of input gives one answer, in its place.  An empty line gives an empty one; a line that cannot be answered
(too long, not UTF-8, numbers that are not finite) is told on stderr, gives an empty one too, and costs no other line
its own.  The exit code is then 1.

The commands themselves: ``translate.py``, ``encoding.py``.  No torch until a model is opened.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, TypeVar

import click

from kvad.cli.model_options import DTYPES, adapter_option, deterministic_option
from kvad.cli.options import console, json_line
from kvad.errors import EngineError, RequestError, UsageError, format_count

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvad.checkpoint import CheckpointHandle
    from kvad.config import ModelConfig
    from kvad.llm import LLM
    from kvad.text import Tokenizer

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])

WINDOW_SIZES = (64, 256, 1024, 4096)  # lines; the last again and again
BATCH_LINES = 64  # lines that the engine is given at once: more than it seats, so that its seats stay taken
READ_CHUNK = 1 << 17  # bytes of one reading
POLL_SECONDS = 0.02  # seconds that a pipe may take to go on


def line_options(command: Command) -> Command:
    """The FILE argument and the options of every command that reads lines."""
    options = [
        click.argument("file", required=False, metavar="[FILE|-]", type=click.Path(path_type=Path, allow_dash=True)),
        adapter_option,
        click.option("--dtype", type=click.Choice(DTYPES), help="What to compute in [default: what is stored]."),
        deterministic_option,
        click.option("--quiet", is_flag=True, help="No progress on stderr."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line of input."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


# ---------------------------------------------------------------- the model


def model_capabilities(config: ModelConfig) -> tuple[str, tuple[str, ...]]:
    """What a model is, and the commands that serve it."""
    from kvad.config import ClassificationHeadConfig, LanguageHeadConfig

    if config.kind == "decoder":
        return "a decoder", ("generate", "chat")
    if config.kind == "encoder-decoder":
        return "an encoder-decoder", ("translate", "embed")
    if isinstance(config.head, LanguageHeadConfig):
        return "an encoder that fills masks", ("fill", "embed")
    if isinstance(config.head, ClassificationHeadConfig):
        tokens = config.head.level == "token"
        return f"an encoder that labels {'tokens' if tokens else 'texts'}", ("tag" if tokens else "classify", "embed")
    return "an encoder that embeds", ("embed",)


def open_for_command(model: Path, command: str) -> CheckpointHandle:
    """A checkpoint, without its weights.  RequestError, with what it can do, for one that ``command`` is not for."""
    from kvad.checkpoint import open_checkpoint

    opened = open_checkpoint(model)
    kind, can = model_capabilities(opened.config)
    if command not in can:
        others = ", ".join(f"kvad {name}" for name in can)
        raise RequestError(f"{model} is {kind}: kvad {command} is not for it", f"it can: {others}")
    return opened


def require_tokenizer(llm: LLM) -> Tokenizer:
    if llm.tokenizer is None:
        raise RequestError("this model came without a tokenizer: it cannot read lines")
    return llm.tokenizer


# ---------------------------------------------------------------- lines in


class LineSource:
    """The lines of a file, or of standard input (None), as bytes without their ends.  ``total``: bytes, where known."""

    def __init__(self, path: Path | None) -> None:
        self._path = None if path is None or str(path) == "-" else path
        self._file: BinaryIO = sys.stdin.buffer if self._path is None else self._path.open("rb")
        self.total = None if self._path is None else os.fstat(self._file.fileno()).st_size
        self._whole: deque[bytes] = deque()
        self._rest: list[bytes] = []  # of the last line, whose end has not come
        self._ended = False

    def take(self, most: int) -> list[bytes]:
        """Up to ``most`` lines: at least one unless all have been taken, and no more than come without waiting."""
        while not self._whole and not self._ended:
            self._read()
        while len(self._whole) < most and not self._ended and self._goes_on():
            self._read()
        return [self._whole.popleft() for _ in range(min(most, len(self._whole)))]

    def _read(self) -> None:
        piece = self._file.read1(READ_CHUNK) if hasattr(self._file, "read1") else self._file.read(READ_CHUNK)
        if b"\n" in piece:
            first, *others = piece.split(b"\n")
            self._whole.append(b"".join([*self._rest, first]))
            self._whole.extend(others[:-1])
            self._rest = others[-1:]
        else:
            self._rest.append(piece)
        if not piece:
            self._ended = True
            last = b"".join(self._rest)
            self._whole.extend([last] if last else [])

    def _goes_on(self) -> bool:
        """Whether reading would not wait; what is no pipe or terminal never does."""
        if self._path is not None:
            return True
        try:
            return bool(select.select([self._file], [], [], POLL_SECONDS)[0])
        except (OSError, ValueError):  # a test's bytes; a system that selects sockets only
            return True

    def __enter__(self) -> LineSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._path is not None:
            self._file.close()


# ---------------------------------------------------------------- answers


@dataclass(frozen=True)
class LineResult(Generic[T]):
    """What became of a line: an answer, None for an empty line, or an error.

    ``size``: its bytes, with its end.  ``note``: what the tokenizer had to say of it (pieces that became UNK), or "".
    """

    number: int  # from 1
    size: int
    answer: T | None = None
    error: str | None = None
    note: str = ""


@dataclass(frozen=True)
class LineTask(Generic[T]):
    """``prepare``: a line's token ids, or a UsageError; ``ask``: the answers to many of them, in their order.

    ``plain`` and ``fields``: an answer (of the line of that number) as text, and as fields of a JSON object; ``plain``
    None: only JSON is printed.
    ``nothing``: the answer to an empty line.
    """

    prepare: Callable[[str], list[int]]
    run: Callable[[list[list[int]]], Sequence[T]]
    plain: Callable[[int, T], str] | None
    fields: Callable[[T], Mapping[str, object]]
    empty: T


def answer_lines(lines: LineSource, task: LineTask[T]) -> Iterator[LineResult[T]]:
    """Every line's answer in the order of the lines, as soon as those before it have theirs.

    A UsageError of ``ask`` is nobody's line: it ends everything.
    """
    sizes = iter(WINDOW_SIZES)
    window, number = next(sizes), 1
    while taken := lines.take(window):
        yield from _answer_window(_Window(number, taken), task)
        number += len(taken)
        window = next(sizes, WINDOW_SIZES[-1])


@dataclass
class _Window(Generic[T]):
    """Consecutive lines and what is known of them."""

    first: int
    raw: list[bytes]
    ids: dict[int, list[int]] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)
    done: dict[int, LineResult[T]] = field(default_factory=dict)

    def end(self, number: int, answer: T | None = None, error: str | None = None) -> None:
        size, note = len(self.raw[number - self.first]) + 1, self.notes.get(number, "")
        self.done[number] = LineResult(number, size, answer, error, note)

    def batches(self) -> list[list[int]]:
        """Numbers of lines of like length; the batch with the earliest line first."""
        order = sorted(self.ids, key=lambda number: (len(self.ids[number]), number))
        return sorted((order[i : i + BATCH_LINES] for i in range(0, len(order), BATCH_LINES)), key=min)


def _answer_window(window: _Window[T], task: LineTask[T]) -> Iterator[LineResult[T]]:
    for number, raw in enumerate(window.raw, window.first):
        try:
            text = _decode(raw, number)
            if not text.strip():
                window.end(number)
                continue
            with redirect_stderr(StringIO()) as said:  # where a tokenizer tells what became UNK, line after line
                window.ids[number] = task.prepare(text)
            window.notes[number] = said.getvalue().strip()
        except UsageError as error:
            window.end(number, error=error.message)
    following = window.first
    for batch in [[], *window.batches()]:
        _ask(window, batch, task)
        while following in window.done:
            yield window.done.pop(following)
            following += 1


def _ask(window: _Window[T], batch: list[int], task: LineTask[T]) -> None:
    """Answer lines together; if one of them fails in the engine, each alone."""
    try:
        answers = task.run([window.ids[number] for number in batch]) if batch else []
        for number, answer in zip(batch, answers, strict=True):
            window.end(number, answer)
    except EngineError as error:
        if len(batch) == 1:
            window.end(batch[0], error=error.message)
            return
        for number in batch:
            _ask(window, [number], task)


def _decode(raw: bytes, number: int) -> str:
    """Without a mark of the byte order, and without the first half of a Windows line's end."""
    raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
    try:
        return raw.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 at byte {error.start} (0x{raw[error.start]:02X})") from None


# ---------------------------------------------------------------- lines out


def printer(task: LineTask[T], *, as_json: bool) -> Callable[[LineResult[T]], None]:
    """Prints an answer to stdout: a line of text, or a JSON object."""

    def show(line: LineResult[T]) -> None:
        answer = task.empty if line.answer is None else line.answer
        if not as_json and task.plain is not None:
            click.echo(task.plain(line.number, answer))
        elif line.error is not None:
            click.echo(json_line({"line": line.number, "error": line.error}))
        else:
            click.echo(json_line({"line": line.number, **task.fields(answer)}))

    return show


def print_answers(
    answers: Iterable[LineResult[T]], show: Callable[[LineResult[T]], None], lines: LineSource, *, quiet: bool
) -> int:
    """Show each answer as it comes, and on stderr what failed; how many lines did.

    Of the tokenizer's notes the first is told, and how many more there were.
    """
    number = failed = noted = 0
    try:
        with _progress(lines.total, quiet) as progress:
            for line in answers:
                show(line)
                number = line.number
                noted += bool(line.note)
                if line.note and noted == 1:
                    progress.say(f"kvad: line {number}: {line.note.removeprefix('kvad: ')}")
                if line.error is not None:
                    failed += 1
                    progress.say(f"kvad: line {number}: {line.error}")
                progress.advance(number, line.size)
    except KeyboardInterrupt:
        click.echo(f"kvad: interrupted after {format_count(number, 'line')}", err=True)
        raise
    if noted > 1:
        click.echo(f"kvad: likewise in {format_count(noted - 1, 'other line')}", err=True)
    if failed:
        click.echo(f"kvad: {failed:,} of {format_count(number, 'line')} failed", err=True)
    return failed


class _NoProgress:
    """No bar."""

    def advance(self, number: int, size: int) -> None:
        """``number`` lines are done, the last of them of ``size`` bytes."""

    def say(self, text: str) -> None:
        click.echo(text, err=True)


class _ProgressBar(_NoProgress):
    """What is said stays above the bar."""

    def __init__(self, bar: Progress, total: int | None) -> None:
        self._bar, self._task, self._began = bar, bar.add_task("0 lines", total=total), time.monotonic()

    def advance(self, number: int, size: int) -> None:
        rate = number / max(1e-3, time.monotonic() - self._began)
        self._bar.update(self._task, advance=size, description=f"{format_count(number, 'line')}, {rate:,.1f} lines/s")

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _progress(total: int | None, quiet: bool) -> Iterator[_NoProgress]:
    """A bar on stderr where that is a terminal; not where the answers themselves scroll by."""
    if quiet or not sys.stderr.isatty() or sys.stdout.isatty():
        yield _NoProgress()
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console(), transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        yield _ProgressBar(bar, total)
