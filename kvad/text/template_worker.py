"""Child process of ``kvad.text.chat_template`` that renders chat templates.

Standard input and output carry requests and replies: eight bytes of length (big endian), then JSON in UTF-8. The
process ends with its input, if a render exceeds its CPU time (signal SIGPROF), and if it runs out of memory (status
ENOMEM). It imports no other module of kvad, so that it starts within a tenth of a second.

Work is counted in steps: lines of Python that run, of the compiled template, of Jinja and of the standard library.
Their number is a function of the template and its values, so a render that ends by it ends on every machine alike. A
step may be one long operation in C (a dict of equal hashes); the CPU time limits it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from traceback import walk_tb
from types import FrameType
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MEMORY = 512 << 20  # bytes of address space, 25 MB of which the process needs itself
MAX_TEMPLATES = 16  # compiled templates that are cached


class _Failure(Exception):
    """Failure whose message is complete."""


class _TooManySteps(BaseException):
    """Ends a render from the trace function; Jinja handles ``Exception`` in places."""


@contextlib.contextmanager
def _step_limit(max_steps: int) -> Iterator[None]:
    """Raise ``_TooManySteps`` after ``max_steps`` lines of Python."""
    remaining = max_steps

    def trace(_frame: FrameType, _event: str, _argument: object) -> Any:
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            raise _TooManySteps
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


class _Generated(str):
    """Text of a ``{% generation %}`` block, the same object while it is written unchanged."""

    def __str__(self) -> str:
        return self


class _Generation(Extension):
    """The tag ``{% generation %}``, whose block is the text that a model generates."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it so
    environment: _Environment

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("record"), [], [], body).set_lineno(line)

    def record(self, caller: Macro) -> str:
        self.environment.blocks.append(_Generated(caller()))
        return self.environment.blocks[-1]


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja environment of ``transformers.apply_chat_template``."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.compiled = functools.lru_cache(MAX_TEMPLATES)(self.from_string)
        self.blocks: list[_Generated] = []  # of one render

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the parts of a macro; one that only writes a generation block returns that object."""
        texts = list(parts)
        return texts[0] if len(texts) == 1 and isinstance(texts[0], _Generated) else "".join(texts)

    def answer(self, source: str, values: dict[str, Any], now: str, max_output: int, max_steps: int) -> dict[str, Any]:
        """Render a template; return its "text" and "spans" (see RenderedChat), or an "error"."""
        too_many = f"takes more than {max_steps:,} steps"
        try:
            with _step_limit(max_steps):
                template = self.compiled(source)
        except (_TooManySteps, Exception) as error:
            problem = f"its compilation {too_many}" if isinstance(error, _TooManySteps) else _syntax_problem(error)
            return {"error": f"the chat template cannot be read: {problem}"}
        try:
            values = {"strftime_now": datetime.fromisoformat(now).strftime, **values}
            with _step_limit(max_steps):
                return self._write(template, values, max_output)
        except MemoryError:
            raise
        except (_TooManySteps, Exception) as error:
            problem = too_many if isinstance(error, _TooManySteps) else _problem(error)[:1000]
            return {"error": f"the chat template{_line(template, error)} {problem}"}

    def _write(self, template: Template, values: dict[str, Any], max_output: int) -> dict[str, Any]:
        self.blocks = []
        size, chunks, spans, written = 0, list[str](), list[tuple[int, int]](), set[int]()
        for chunk in template.root_render_func(template.new_context(values)):
            if isinstance(chunk, _Generated):
                spans.append((size, size + len(chunk)))
                written.add(id(chunk))
            size += len(chunk)
            if size > max_output:
                raise _Failure(f"writes more than {max_output:,} characters")
            chunks.append(chunk)
        # A block that became part of another text (of a macro, a {% set %} block, a filter) has no known position.
        return {"text": "".join(chunks), "spans": spans if written == set(map(id, self.blocks)) else None}


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Filter ``tojson`` of transformers: no HTML escapes, and the same order of arguments."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise _Failure(f"refuses: {message}")


def _syntax_problem(error: BaseException) -> str:
    match error:
        case TemplateSyntaxError():
            return f"line {error.lineno}: {error.message}"
        case RecursionError() | MemoryError():
            return "it is nested too deeply"
        case SyntaxError():  # Jinja's grammar allows it and Python's does not; its line is not one of the template
            return error.msg
    return str(error)


def _problem(error: BaseException) -> str:
    match error:
        case _Failure():
            return str(error)
        case RecursionError():
            return "calls itself too deeply"
        case TemplateError():
            return f"failed: {error}"
    return f"failed: {type(error).__name__}: {error}"


def _line(template: Template, error: BaseException) -> str:
    """Return `` (line 3)`` for the innermost template line of an error, or ""."""
    lines = [n for frame, n in walk_tb(error.__traceback__) if frame.f_code.co_filename == template.filename]
    return f" (line {template.get_corresponding_lineno(lines[-1])})" if lines else ""


def main() -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # macOS does not limit the address space
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    environment = _Environment()
    gc.freeze()
    try:
        while header := sys.stdin.buffer.read(8):
            request = json.loads(sys.stdin.buffer.read(int.from_bytes(header)).decode("utf-8", "surrogatepass"))
            signal.setitimer(signal.ITIMER_PROF, max(request.pop("seconds"), 1e-6))  # 0 would be no limit
            reply = environment.answer(**request)
            body = json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")
            signal.setitimer(signal.ITIMER_PROF, 0)
            sys.stdout.buffer.write(len(body).to_bytes(8) + body)
            sys.stdout.buffer.flush()
    except MemoryError:
        os._exit(errno.ENOMEM)
