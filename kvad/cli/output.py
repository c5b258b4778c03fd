"""Output of all commands: JSON, tables, sizes, notes and progress.

Results go to stdout; progress, notes and errors go to stderr, so that ``kvad ... --json | jq`` always works.
No torch, and rich only when a console is requested.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from kvad import storage

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.console import Console

RecordT = TypeVar("RecordT")
SLOW_SECONDS = 5.0  # of a task after which progress is printed once if stderr is not a terminal


def console() -> Console:
    """Create a rich console on stderr."""
    from rich.console import Console

    return Console(stderr=True)


def note(text: str) -> None:
    """Print a line on stderr, after the name of the program."""
    click.echo(f"kvad: {text}", err=True)


def print_error(text: str) -> None:
    click.echo(text, err=True)


def program_path() -> str:
    """Return how this program is called: ``kvad`` if that is on the path, else its file, else ``python -m kvad``."""
    called = Path(sys.argv[0])
    if shutil.which("kvad") is not None:
        return "kvad"
    if called.name != "kvad":
        return f"{sys.executable} -m kvad"
    return str(called.relative_to(Path.cwd()) if called.is_absolute() and called.is_relative_to(Path.cwd()) else called)


def print_result(as_json: bool, record: object, text: str | Iterable[str], *, failed: bool = False) -> None:
    """Print ``record`` as JSON, or the text or its lines; exit with code 1 if a check failed."""
    if as_json:
        emit_json(record)
    else:
        click.echo(text if isinstance(text, str) else "\n".join(text))
    if failed:
        exit_with(1)


def exit_with(code: int) -> NoReturn:
    click.get_current_context().exit(code)


def with_properties(record: DataclassInstance, *names: str) -> dict[str, Any]:
    """Return the fields of a dataclass and its named properties as one JSON object."""
    return {**dataclasses.asdict(record), **{name: getattr(record, name) for name in names}}


def emit_json(result: object) -> None:
    """Print ``result`` as one line of JSON on stdout."""
    click.echo(json_line(result))


def json_line(result: object) -> str:
    """Format ``result`` as JSON: dataclasses become objects, paths strings, NaN and infinities null."""
    return json.dumps(storage.strict_json.plain_value(result), ensure_ascii=False, allow_nan=False)


def format_table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0, -1)) -> list[str]:
    """Align the columns of a table: to the left those in ``left`` (-1 is the last), else to the right."""
    columns = len(rows[0])
    widths = [max(len(row[column]) for row in rows) for column in range(columns)]
    left_columns = {column % columns for column in left}
    pads = [str.ljust if column in left_columns else str.rjust for column in range(columns)]
    padded = ([pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)] for row in rows)
    return ["  ".join(cells).rstrip() for cells in padded]


def format_records(
    records: Iterable[RecordT], columns: Mapping[str, str | Callable[[RecordT], str]], left: Sequence[int] = ()
) -> list[str]:
    """Format a table of records: heading -> a template such as ``{.loss:.4f}``, or a function of the record."""
    cells = [column.format if isinstance(column, str) else column for column in columns.values()]
    return format_table([tuple(columns), *(tuple(cell(record) for cell in cells) for record in records)], left)


def format_optional(value: float | None, spec: str) -> str:
    """Format a number, or "-" for None."""
    return "-" if value is None else format(value, spec)


def draw_figures(draw: Callable[[], list[Path]], name: str = "figure") -> list[Path]:
    """Draw figures; without matplotlib print a note and return no files."""
    try:
        return draw()
    except ModuleNotFoundError:
        note(f"no {name}: matplotlib is not installed (pip install matplotlib)")
        return []


class ProgressLine:
    """A line of progress with the time left on stderr; it is cleared at the end of the ``with`` block.

    If stderr is not a terminal, one line is printed after ``SLOW_SECONDS``.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._is_terminal, self._is_quiet = sys.stderr.isatty(), quiet
        self._next_update = 0.0 if self._is_terminal else time.monotonic() + SLOW_SECONDS
        self._total: int | None = None
        self._start, self._first = time.monotonic(), 0  # of the current total

    def update(self, label: str, done: int, total: int | None) -> None:
        """Show how much is done, at most ten times a second; ``done`` below its last value starts another task."""
        now = time.monotonic()
        if total != self._total or done < self._first:
            self._total, self._start, self._first = total, now, done
        if self._is_quiet or now < self._next_update:
            return
        of_total = "" if total is None else f"of {total:,} "
        line = f"{label:<40} {done:>11,} {of_total}{self._time_left(done, now - self._start)}"
        if self._is_terminal:
            self._next_update = now + 0.1
            click.echo(f"\r{line:<76}", err=True, nl=False)
        else:
            self._next_update = math.inf
            note(" ".join(line.split()))

    def _time_left(self, done: int, seconds: float) -> str:
        """Estimate the time left from the current total's progress; "" while that is too little."""
        if not self._total or done <= self._first or seconds < 0.5:
            return ""
        left = seconds * (self._total - done) / (done - self._first)
        return f"about {left:.0f} s left" if left < 90 else f"about {left / 60:.0f} min left"

    def clear(self) -> None:
        if self._is_terminal and not self._is_quiet:
            click.echo(f"\r{'':<79}\r", err=True, nl=False)

    def note(self, text: str) -> None:
        self.clear()
        note(text)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
