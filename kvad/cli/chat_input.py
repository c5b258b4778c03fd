"""Turns of ``kvad chat`` from a keyboard or a pipe: a line, continued lines, a block in triple quotes, pasted text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import click

from kvad.cli.output import print_error
from kvad.errors import DataError

QUOTES = '"""'
ReadLine = Callable[[str], str]  # prompt -> line without its newline; raises EOFError at the end


class ChatInput(NamedTuple):
    """Text of one turn."""

    text: str
    is_block: bool = False  # given in triple quotes: never a command, and used without a newline after it


def read_turns(commands: Sequence[str]) -> Iterator[ChatInput]:
    """Read turns from standard input. Ctrl-D ends, Ctrl-C drops a turn.

    Args:
        commands: Names that Tab completes.

    Raises:
        DataError: If a line of a pipe is not UTF-8.
    """
    is_keyboard = sys.stdin.isatty()
    read_line = _keyboard(commands) if is_keyboard else _pipe()
    while True:
        try:
            turn = _read_turn(read_line)
        except EOFError:
            if is_keyboard:
                click.echo()
            return
        except KeyboardInterrupt:
            print_error("\n(/quit or Ctrl-D leaves)")
            continue
        yield turn


def _read_turn(read_line: ReadLine) -> ChatInput:
    lines = [read_line("> ")]
    is_block = lines[0].startswith(QUOTES)
    if is_block:
        lines[0] = lines[0].removeprefix(QUOTES)
    with suppress(EOFError):
        while not lines[-1].endswith(QUOTES) if is_block else lines[-1].endswith("\\"):
            lines[-1] = lines[-1] if is_block else lines[-1][:-1]
            lines.append(read_line("... "))
    if is_block:
        lines[-1] = lines[-1].removesuffix(QUOTES)
        lines = lines[not lines[0] and len(lines) > 1 :]  # nothing after the opening quotes
        lines = lines[:-1] if len(lines) > 1 and not lines[-1] else lines
    return ChatInput("\n".join(lines), is_block)


def _keyboard(commands: Sequence[str]) -> ReadLine:
    """Return ``input``, with line editing, Tab completion and bracketed paste if readline is available."""

    def complete(text: str, state: int) -> str | None:
        return [*(name for name in commands if text and name.startswith(text)), None][state]

    with suppress(ImportError):
        import readline

        for line in ("set enable-bracketed-paste on", "tab: complete"):  # a paste of several lines is one input
            readline.parse_and_bind(line)
        readline.set_completer_delims(" ")
        readline.set_completer(complete)
    print_error("/help lists the commands; Ctrl-D leaves")
    return input


def _pipe() -> ReadLine:
    lines = enumerate(sys.stdin.buffer, 1)

    def read_line(_prompt: str) -> str:
        item = next(lines, None)
        if item is None:
            raise EOFError
        number, raw = item
        try:
            text: str = raw.decode("utf-8")
            return text.rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(f"standard input, line {number}: not UTF-8 at byte {error.start}") from None

    return read_line
