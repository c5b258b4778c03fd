"""A Jinja template of a stranger, rendered in bounded time and memory within this process, from any thread.

Python cannot stop a thread, and a template is a program.  So nothing here is stopped from outside; the template's own
code asks at every step.  Three things make that airtight:

* **The code is ours.**  ``_Generator`` compiles every block, loop, literal, slice, comparison, concatenation and output
  into a call of the environment.  Each adds to a counter (``tick``), which looks at the CPU clock *of this thread* now
  and then: a busy machine does not make a good template fail.  Constants are not folded while compiling.
* **The world is closed.**  A template reaches plain data, its own macros, and the functions, filters and methods of the
  tables below; each that can make much of little (``ljust``, ``replace``, ``join``, ``%``, ``**``, ``range`` ...) is
  asked for the size of its result *before* it is called, and what walks deep (``==``, ``tojson``, ``str``) has its
  operands weighed first, so that no single call is long.  What is in no table may not be called.
* **What it makes is counted.**  Every string and container is charged; when the sum passes the limit, those that nobody
  refers to any more are let go, and if that does not halve it, the render ends.

No thread-local, no trace function, no signal: the state is one ``Sandbox`` per render, around a shared code object.
The dialect is that of ``transformers.apply_chat_template``: trim_blocks, lstrip_blocks, break and continue,
``{% generation %}``, raise_exception, strftime_now, tojson without HTML escapes.  Every way to end badly is one
ChatTemplateError with the template's line.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import CodeType, MethodType, TracebackType
from typing import Any

from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined, markup_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace, pass_environment
from markupsafe import Markup, escape

from kvad.errors import ChatTemplateError

__all__ = ["RenderLimits", "RenderOutput", "compile_template", "render_template"]

MAX_SOURCE = 1 << 16  # characters of a template; the longest in use have about 30,000
MAX_ITEMS = 1 << 18  # of one list
MAX_NESTING = 200  # of data in data
MAX_CALLS = 80  # macros within macros
MAX_ARGUMENTS = 1 << 10  # of one call
MAX_BITS = 1 << 14  # of an integer
MAX_SCAN = 1 << 28  # characters times characters, for searches that may take that many steps
HELD = 96  # bytes of our own for each value that is counted
SMALL = 1 << 14  # characters for the filters that are slow and that no prompt needs
CLOCK_EVERY = 64  # ticks

SCALARS = (str, int, float, type(None), bytes, Undefined)
VIEWS: tuple[type[Iterable[Any]], ...] = (type({}.keys()), type({}.values()), type({}.items()))


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Methods by the type of their owner.  What takes more than a glance before it is called has a guard in _GUARDS.
METHODS: dict[type, frozenset[str]] = {
    str: _names(
        "capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii "
        "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip "
        "partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines "
        "startswith strip swapcase title upper zfill"
    ),
    dict: _names("copy get items keys values"),
    list: _names("copy count index"),
    tuple: _names("count index"),
    int: _names("bit_length"),
    float: _names("is_integer"),
}
# Filters that do not look into what their argument holds; those that walk through it; those that are slow, with the
# characters that they may be given.  Every filter that is not shallow has its arguments weighed.
SHALLOW = _names(
    "abs attr batch count d default first items last length list map random reject rejectattr reverse safe select "
    "selectattr slice"
)
WALKING = _names("batch groupby join list map max min reject rejectattr select selectattr slice sort sum unique")
SLOW: dict[str, int] = {
    **dict.fromkeys(("pprint", "striptags", "urlize", "wordwrap", "xmlattr"), SMALL),
    **dict.fromkeys(("filesizeformat", "float", "int"), SMALL),
    **dict.fromkeys(("indent", "title", "urlencode", "wordcount"), MAX_ITEMS),
}
DEEP_TESTS = _names(
    "!= < <= == > >= divisibleby eq equalto even filter ge greaterthan gt in le lessthan lower lt ne odd test upper"
)

_SPEC = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(?P<width>\*|\d*)(?:\.(?P<precision>\*|\d*))?[hlL]?(?P<kind>.)", re.DOTALL)
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


class _TemplateException(Exception):
    """What ``raise_exception`` raises."""


@dataclass(frozen=True)
class RenderLimits:
    """What one render may take: seconds of this thread's CPU, and characters of output.

    Memory follows from the output: at most about fifteen bytes for each of its characters while rendering.
    """

    seconds: float = 1.0
    output: int = 4 << 20


@dataclass(frozen=True)
class RenderOutput:
    """``spans``: the places of ``{% generation %}`` blocks; None where one lies within a macro, and so has no place."""

    text: str
    spans: tuple[tuple[int, int], ...] | None


def compile_template(source: str, limits: RenderLimits) -> CodeType:
    """The code of a template, good for any number of renders.  Raises ChatTemplateError that names the line."""
    if len(source) > MAX_SOURCE:
        raise ChatTemplateError(f"the chat template has {len(source):,} characters; the limit is {MAX_SOURCE:,}")
    try:
        code: CodeType = Sandbox(limits).compile(source)
        return code
    except ChatTemplateError as error:
        problem = f"it {error.message}"
    except TemplateSyntaxError as error:
        problem = f"line {error.lineno}: {error.message}"
    except (RecursionError, MemoryError):
        problem = "it is nested too deeply"
    except SyntaxError as error:  # what Jinja's grammar allows and Python's does not; its line would be our code's
        problem = error.msg
    except Exception as error:
        problem = str(error)
    raise ChatTemplateError(f"the chat template cannot be read: {problem}")


def render_template(
    code: CodeType, values: dict[str, Any], limits: RenderLimits, now: datetime | None = None
) -> RenderOutput:
    """``values``: plain data only, which nobody changes meanwhile.  Raises ChatTemplateError."""
    sandbox = Sandbox(limits, now)
    template = Template.from_code(sandbox, code, sandbox.make_globals(None))
    try:
        sandbox.learn(values)
        for chunk in template.root_render_func(template.new_context(values)):
            sandbox.write(chunk)
        return sandbox.output()
    except Exception as error:
        problem, where = _explain(error)[:1000], _line(template, error.__traceback__)
    finally:
        sandbox.forget()
    raise ChatTemplateError(f"the chat template{where} {problem}")  # out here, where the frames are gone


def _explain(error: Exception) -> str:
    match error:
        case _TemplateException():
            return f"refuses: {error}"
        case ChatTemplateError():
            return error.message
        case RecursionError():
            return "calls itself too deeply"
        case MemoryError():
            return "ran out of memory"
        case TemplateError():
            return f"failed: {error}"
    return f"failed: {type(error).__name__}: {error}"


def _line(template: Template, trace: TracebackType | None) -> str:
    """`` (line 3)``: the innermost line of the template that was at work."""
    found = ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == template.filename:
            found = f" (line {template.get_corresponding_lineno(trace.tb_lineno)})"
        trace = trace.tb_next
    return found


# ---------------------------------------------------------------- the code


class _Generator(CodeGenerator):
    """Jinja's compiler, writing a call of the environment wherever time or memory may go."""

    environment: Sandbox

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self.environment.tick()
        return super().visit(node, *args, **kwargs)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.tick()")
        super().blockvisit(nodes, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.iter = self._asks("items", node.iter)
        if node.test is not None:
            node.test = nodes.And(self._asks("tick"), node.test, lineno=node.lineno)
        super().visit_For(node, frame)

    def _asks(self, name: str, *arguments: nodes.Node) -> nodes.Expr:
        return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> str:
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> None:
        escaping = "context.eval_ctx.autoescape" if frame.eval_ctx.volatile else str(bool(frame.eval_ctx.autoescape))
        self.write(f"(environment.escaped if {escaping} else environment.text)(")

    def visit_CallBlock(self, node: nodes.CallBlock, frame: Frame) -> None:
        called = node.call.node
        if frame.buffer is not None and isinstance(called, nodes.ExtensionAttribute):
            self.writeline(f"environment.lose({frame.buffer})")
        super().visit_CallBlock(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.chain(context, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(environment.deep(")
        self.visit(node.expr, frame)
        self.write(")")
        for operand in node.ops:
            self.write(f" {operators[operand.op]} environment.{'sought' if 'in' in operand.op else 'deep'}(")
            self.visit(operand.expr, frame)
            self.write(")")
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        made = isinstance(node.arg, nodes.Slice)
        self.write("environment.kept(" if made else "")
        super().visit_Getitem(node, frame)
        self.write(")" if made else "")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        made = node.ctx == "load"
        self.write("environment.kept(" if made else "")
        super().visit_Tuple(node, frame)
        self.write(")" if made else "")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self.write("environment.kept(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.kept({")
        for pair in node.items:
            self.write("environment.deep(")
            self.visit(pair.key, frame)
            self.write("): ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("})")


class _Generation(Extension):
    """``{% generation %} ... {% endgeneration %}``: what the model is to say.  Notes where it lies in the output."""

    tags = {"generation"}  # noqa: RUF012  # the base class says so
    environment: Sandbox

    def filter_stream(self, stream: Any) -> Any:
        for token in stream:
            self.environment.tick()
            yield token

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("note"), [], [], body).set_lineno(line)

    def note(self, caller: Macro) -> str:
        text: str = caller()
        self.environment.blocks.append((self.environment.written, text))
        return text


# ---------------------------------------------------------------- methods


class _Method:
    """A bound method of plain data that asks before it does."""

    __slots__ = ("name", "owner", "sandbox")

    def __init__(self, sandbox: Sandbox, owner: Any, name: str) -> None:
        self.sandbox, self.owner, self.name = sandbox, owner, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sandbox, owner = self.sandbox, self.owner
        for argument in (*args, *kwargs.values()):
            sandbox.deep(argument)
        if isinstance(owner, str):
            sandbox.tick(1 + (len(owner) >> 12))
            if self.name in _GUARDS:
                return sandbox.kept(_GUARDS[self.name](sandbox, owner, self.name, *args, **kwargs))
        elif self.name in ("count", "index"):
            sandbox.deep(owner)
        return sandbox.kept(getattr(owner, self.name)(*args, **kwargs))

    def __repr__(self) -> str:
        return f"<method {self.name}>"


def _padded(sandbox: Sandbox, text: str, name: str, width: int, *fill: str) -> Any:
    sandbox.check(width)
    return getattr(text, name)(width, *fill)


def _tabs(sandbox: Sandbox, text: str, name: str, tabsize: int = 8) -> str:
    sandbox.check(len(text) + text.count("\t") * tabsize)
    return text.expandtabs(tabsize)


def _replaced(sandbox: Sandbox, text: str, name: str, old: str, new: str, count: int = -1) -> str:
    if isinstance(old, str) and isinstance(new, str):
        times = text.count(old) if count < 0 else min(text.count(old), count)
        sandbox.check(len(text) + times * len(new))
    return text.replace(old, new, count)


def _joined(sandbox: Sandbox, text: str, name: str, parts: Iterable[Any]) -> str:
    listed = sandbox.items(parts)
    sandbox.check(sum(len(part) + len(text) for part in listed if isinstance(part, str)))
    return text.join(listed)


def _pieces(sandbox: Sandbox, text: str, name: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    if name == "rsplit":
        _check_scan(text, sep)
    most = MAX_ITEMS if maxsplit < 0 else min(maxsplit, MAX_ITEMS)
    found: list[str] = getattr(text, name)(sep, most)
    return [sandbox.kept(piece) for piece in sandbox.counted(found)]


def _lines(sandbox: Sandbox, text: str, name: str, keepends: bool = False) -> list[str]:
    if len(text) > MAX_ITEMS and sum(map(text.count, _LINE_ENDS)) >= MAX_ITEMS:
        raise ChatTemplateError(f"makes a list of more than {MAX_ITEMS:,} lines")
    return [sandbox.kept(line) for line in text.splitlines(keepends)]


def _scanned(sandbox: Sandbox, text: str, name: str, *args: Any) -> Any:
    _check_scan(text, *args[:1])
    return getattr(text, name)(*args)


def _check_scan(text: str, what: object = None) -> None:
    """Searches from the end, and what strips characters, take up to len(text) x len(what) steps."""
    if isinstance(what, str) and len(text) * len(what) > MAX_SCAN:
        raise ChatTemplateError(f"searches {len(text):,} characters for {len(what):,} of them")


def _formatted(sandbox: Sandbox, text: str, name: str, *args: Any, **kwargs: Any) -> str:
    if len(text) > MAX_ITEMS:
        raise ChatTemplateError(f"formats a text of {len(text):,} characters")
    if name == "format_map":
        (kwargs,), args = args, ()
    if isinstance(text, Markup):
        return Markup(_EscapeFormatter(sandbox, escape=text.escape).vformat(text, args, kwargs))
    return _Formatter(sandbox).vformat(text, args, kwargs)


_GUARDS: Mapping[str, Callable[..., Any]] = types.MappingProxyType(
    {
        **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
        **dict.fromkeys(("format", "format_map"), _formatted),
        **dict.fromkeys(("rfind", "rindex", "rpartition", "strip", "lstrip", "rstrip"), _scanned),
        **dict.fromkeys(("split", "rsplit"), _pieces),
        "expandtabs": _tabs,
        "join": _joined,
        "replace": _replaced,
        "splitlines": _lines,
    }
)


class _FieldGuard(SandboxedFormatter):
    """``str.format`` whose fields are weighed one by one."""

    def __init__(self, sandbox: Sandbox, **settings: Any) -> None:
        super().__init__(sandbox, **settings)
        self._sandbox, self._size = sandbox, 0

    def convert_field(self, value: Any, conversion: Any) -> Any:
        converted = super().convert_field(self._sandbox.deep(value), conversion)
        return self._sandbox.kept(converted) if conversion else converted

    def format_field(self, value: Any, format_spec: str) -> Any:
        for digits in re.findall(r"\d+", format_spec):
            self._sandbox.check(_number(digits))
        field = super().format_field(self._sandbox.deep(value), format_spec)
        self._size += len(field)
        self._sandbox.check(self._size)
        return field


class _Formatter(_FieldGuard):
    pass


class _EscapeFormatter(_FieldGuard, SandboxedEscapeFormatter):
    pass


def _number(digits: str) -> int:
    return int(digits) if len(digits) < 10 else sys.maxsize


# ---------------------------------------------------------------- the sandbox


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one render: what it has taken so far, and the gates that its code goes through."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self, limits: RenderLimits, now: datetime | None = None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols])
        self.limits = limits
        self.largest = 5 * limits.output + 1024  # bytes of one value: the whole output, at four bytes a character
        self.memory = 3 * self.largest  # bytes of all values; after a sweep, half of it
        self.blocks: list[tuple[int, str]] = []
        self.written = 0
        self._chunks: list[str] = []
        self._known: dict[int, int] = {}  # weights of what the caller gave
        self._held: dict[int, Any] = {}
        self._bytes = self._emitted = self._ticks = self._depth = 0
        self._lost = False
        self._now = now
        self._deadline = time.thread_time() + limits.seconds
        own: dict[str, Callable[..., Any]] = {"tojson": self._tojson, "sum": _sum}
        self.filters = {name: self._gate(name, plain) for name, plain in {**self.filters, **own}.items()}
        self.tests = {name: self._test_gate(name, plain) for name, plain in self.tests.items()}
        self.globals.update(raise_exception=_raise_exception, strftime_now=self._strftime, lipsum=_lipsum)
        self._functions = frozenset(map(id, self.globals.values()))

    # ------------------------------------------------------------ what it takes

    def tick(self, cost: int = 1) -> bool:
        """One step, or as many as ``cost``; True.  Raises ChatTemplateError when the time is over."""
        self._ticks += cost
        if self._ticks >= CLOCK_EVERY:
            self._ticks = 0
            if time.thread_time() > self._deadline:
                raise ChatTemplateError(f"took more than {self.limits.seconds:g} s of CPU")
        return True

    def check(self, characters: int) -> None:
        """Before something is made that has so many characters."""
        if characters > self.largest >> 2:
            raise ChatTemplateError(f"makes a text of more than {self.largest >> 2:,} characters")
        self.tick(1 + (max(0, characters) >> 12))

    def kept(self, value: Any) -> Any:
        """``value``, charged: nothing that a template makes goes uncounted.

        Tuples are weighed at birth: they may be hashed, anywhere, and a hash neither ends early nor minds depth.
        """
        if isinstance(value, tuple):
            self.weigh(value)
        size = sys.getsizeof(value)
        if size < 64 and not isinstance(value, str):
            return value
        if size > self.largest:
            raise ChatTemplateError(f"makes a value of {size:,} bytes; the limit is {self.largest:,}")
        self.tick(1 + (size >> 12))
        if id(value) not in self._held:
            self._held[id(value)] = value
            self._bytes += size + HELD
            if self._bytes > self.memory:
                self._let_go()
        return value

    def _let_go(self) -> None:
        """Forget what nobody else refers to.  From the youngest on, because containers are younger than their parts."""
        live: dict[int, Any] = {}
        while self._held:
            key, value = self._held.popitem()
            if sys.getrefcount(value) > 2:  # this variable and the call's argument
                live[key] = value
        self._held = dict(reversed(live.items()))
        self._bytes = sum(map(sys.getsizeof, live.values())) + HELD * len(live)
        if self._bytes > self.memory // 2:
            raise ChatTemplateError(f"holds more than {self.memory // 2:,} bytes")

    def forget(self) -> None:
        """Environment, gates and methods refer to each other: what they hold must not wait for the collector."""
        for kept in (self._held, self._known, self._chunks, self.blocks):
            kept.clear()

    def learn(self, values: Any) -> int:
        """Weigh the caller's data once, every part of it."""
        if isinstance(values, str):
            return 8 + len(values)
        if not isinstance(values, dict | list | tuple):
            return 8
        parts = [*values, *values.values()] if isinstance(values, dict) else values
        weight = 8 + sum(map(self.learn, parts))
        self._known[id(values)] = weight
        return weight

    def weigh(self, value: Any, per_level: int = 0) -> int:
        """About the characters that ``value`` has when written, its parts counted as often as they are reached.

        Level by level, so that ``[a, a]`` within ``[b, b]`` within ... ends early.
        """
        total, level = 0, [value]
        for depth in range(MAX_NESTING):
            total += len(level) * (8 + per_level * depth)
            below: list[Any] = []
            for one in level:
                if isinstance(one, str | bytes):
                    total += len(one)
                elif isinstance(one, int):
                    total += one.bit_length() // 3
                elif not per_level and id(one) in self._known:
                    total += self._known[id(one)]
                else:
                    below += _parts(one)
                if total + 8 * len(below) > self.limits.output:
                    raise ChatTemplateError(f"walks through data of more than {self.limits.output:,} characters")
            self.tick(1 + (len(level) >> 4))
            if not below:
                return total
            level = below
        raise ChatTemplateError(f"nests data more than {MAX_NESTING} levels deep")

    def deep(self, value: Any) -> Any:
        """``value``, about to be compared, hashed, searched or written: cheap, or refused."""
        if isinstance(value, str):
            self.tick(1 + (len(value) >> 12))
        elif isinstance(value, int):
            self._check_bits(value.bit_length())
        elif not isinstance(value, SCALARS):
            self.weigh(value)
        return value

    def _check_bits(self, bits: int) -> None:
        if bits > MAX_BITS:
            raise ChatTemplateError(f"reckons with a number of more than {MAX_BITS:,} bits")

    def items(self, value: Any) -> Any:
        """``value``, about to be walked through: a generator becomes the list of what it gives."""
        if isinstance(value, (*VIEWS, dict, list, tuple, range)) or not hasattr(value, "__iter__"):
            return value
        if isinstance(value, str) and value.isascii() and len(value) <= MAX_ITEMS:
            return value  # its characters exist already
        return self.kept([self.kept(item) for item in self.counted(value)])

    def sought(self, value: Any) -> Any:
        """``value``, whose items are about to be compared, hashed or written."""
        return self.deep(self.items(value) if hasattr(value, "__next__") else value)

    def counted(self, value: Iterable[Any]) -> Iterator[Any]:
        for number, item in enumerate(value):
            self.tick()
            if number >= MAX_ITEMS:
                raise ChatTemplateError(f"walks through more than {MAX_ITEMS:,} items")
            yield item

    # ------------------------------------------------------------ output

    def write(self, chunk: str) -> None:
        self.written += len(chunk)
        if self.written > self.limits.output:
            raise ChatTemplateError(f"writes more than {self.limits.output:,} characters")
        self._chunks.append(chunk)

    def output(self) -> RenderOutput:
        text = "".join(self._chunks)
        spans = tuple((start, start + len(block)) for start, block in self.blocks)
        found = all(text.startswith(block, start) for start, block in self.blocks)
        apart = all(one[1] <= two[0] for one, two in itertools.pairwise(spans))
        return RenderOutput(text, spans if found and apart and not self._lost else None)

    def lose(self, buffer: list[str]) -> None:
        """A generation block begins in a buffer: only one that opens a macro called from the top has a place."""
        self._lost = self._lost or any(buffer) or self._depth != 1

    def text(self, value: Any) -> str:
        """What ``{{ value }}`` writes."""
        if type(value) is not str:
            value = self.kept(str(self.deep(value)))
        self._emit(len(value))
        return value  # type: ignore[no-any-return]

    def escaped(self, value: Any) -> Markup:
        if not hasattr(value, "__html__"):
            value = self.text(value)
            _check_escape(self, value)
        return self.kept(escape(value))  # type: ignore[no-any-return]

    def _emit(self, characters: int) -> None:
        """Texts in buffers are many references to few strings: count what they will be when they are joined."""
        self._emitted += 16 + characters
        if self._emitted > 16 * self.limits.output:
            raise ChatTemplateError(f"writes more than {16 * self.limits.output:,} characters, macros included")

    def concat(self, parts: Iterable[str]) -> str:
        """What a macro, a recursive loop or a ``{% set %}`` block wrote."""
        listed = list(parts)
        self.check(sum(map(len, listed)))
        return self.kept("".join(listed))  # type: ignore[no-any-return]

    def chain(self, context: Context, parts: tuple[Any, ...]) -> str:
        """``a ~ b``"""
        if context.eval_ctx.autoescape:
            return self.kept(markup_join([self.escaped(part) for part in parts]))  # type: ignore[no-any-return]
        return self.concat([part if isinstance(part, str) else self.kept(str(self.deep(part))) for part in parts])

    # ------------------------------------------------------------ operators, attributes, calls

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for value in (left, right):
            if isinstance(value, int | str) or operator not in "+*":
                self.deep(value)
        if operator == "%" and isinstance(left, str):
            self._printf(left, right)
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(one, str | bytes | list | tuple) and isinstance(times, int):
                    self.check(times * (len(one) if isinstance(one, str | bytes) else 16 * len(one)))
        elif operator == "+" and isinstance(left, str | list | tuple) and type(left) is type(right):
            self.check((len(left) + len(right)) * (1 if isinstance(left, str) else 16))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._check_bits(left.bit_length() * max(0, right) if abs(left) > 1 else 1)
        return self.kept(self.binop_table[operator](left, right))

    def _printf(self, text: str, values: Any) -> None:
        """Refuse ``"%1000000000d"`` and its kind: at most so many characters come of ``text % values``."""
        weight = self.weigh(values)
        numbers = values if isinstance(values, tuple) else values.values() if isinstance(values, dict) else [values]
        widest = max((abs(number) for number in numbers if isinstance(number, int)), default=0)
        size = len(text)
        for spec in _SPEC.finditer(text):
            self.tick()
            for given in (spec["width"], spec["precision"]):
                size += widest if given == "*" else _number(given or "0")
            size += (400 + weight * (10 if spec["kind"] in "ra" else 1)) if spec["kind"] != "%" else 1
        self.check(size)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.tick()
        return self._method(obj, attribute, super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.deep(argument)
        return self._method(obj, argument, super().getitem(obj, argument))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        return None  # _method does

    def _method(self, obj: Any, name: Any, value: Any) -> Any:
        owner = getattr(value, "__self__", None) if not isinstance(value, Undefined | Namespace) else None
        if owner is None or isinstance(owner, LoopContext | Cycler):
            return value
        for kind, allowed in METHODS.items():
            if isinstance(owner, kind) and name in allowed:
                return _Method(self, owner, name)
        return self.unsafe_undefined(obj, name)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self, target = __self, __obj
        self.tick(4)
        if len(args) + len(kwargs) > MAX_ARGUMENTS:
            raise ChatTemplateError(f"calls something with more than {MAX_ARGUMENTS:,} arguments")
        owner = target.__self__ if isinstance(target, MethodType) else None
        if id(target) in self._functions or isinstance(owner, LoopContext | Cycler):
            hidden = ("_loop_vars", "_block_vars")  # Jinja's own
            args = tuple(map(self.sought, args))
            kwargs = {name: one if name in hidden else self.sought(one) for name, one in kwargs.items()}
        elif isinstance(target, LoopContext):
            args = tuple(map(self.items, args))
        elif isinstance(target, Macro):
            self.weigh([one for one in args if isinstance(one, tuple)])  # they may become its varargs
        elif callable(target) and not isinstance(target, _CALLABLE) and not isinstance(owner, _Generation | Sandbox):
            raise SecurityError(f"{type(target).__name__} may not be called")
        self._depth += 1
        try:
            if self._depth > MAX_CALLS:
                raise ChatTemplateError(f"calls itself more than {MAX_CALLS} times deep")
            return self.kept(super().call(__context, target, *args, **kwargs))
        finally:
            self._depth -= 1

    # ------------------------------------------------------------ filters, tests, functions

    def _gate(self, name: str, plain: Any) -> Callable[..., Any]:
        """A filter behind its checks.  Its first argument may be the context or the environment: not the template's."""
        skip = int(hasattr(plain, "jinja_pass_arg"))
        check = _CHECKS.get(name)

        @functools.wraps(plain)
        def gate(*args: Any, **kwargs: Any) -> Any:
            self.tick(2)
            given = args[skip:]
            if given and (name in WALKING or (name != "first" and hasattr(given[0], "__next__"))):
                given = (self.items(given[0]), *given[1:])
                for argument in (*given[1:], *kwargs.values()):
                    self.check(len(argument) * 16 if isinstance(argument, str) else 0)  # an attribute, to be split
            if name not in SHALLOW:
                for argument in (*given, *kwargs.values()):
                    self.deep(argument)
            if name in SLOW and sum(map(self.weigh, (*given, *kwargs.values()))) > SLOW[name]:
                raise ChatTemplateError(f"gives the filter {name!r} more than {SLOW[name]:,} characters")
            if check is not None:
                check(self, *given, **kwargs)
            return self.kept(plain(*args[:skip], *given, **kwargs))

        return gate

    def _test_gate(self, name: str, plain: Any) -> Callable[..., Any]:
        skip = int(hasattr(plain, "jinja_pass_arg"))

        @functools.wraps(plain)
        def gate(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            given = args[skip:]
            if name in DEEP_TESTS:
                given = tuple(map(self.sought, given))
            if name in ("divisibleby", "even", "odd") and isinstance(given[0], str):
                self._printf(given[0], *given[1:] or (2,))  # they reckon with %
            return plain(*args[:skip], *given, **kwargs)

        return gate

    def _tojson(
        self,
        x: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """As transformers has it, positions of the arguments included."""
        width = len(indent) if isinstance(indent, str) else indent or 0
        between = sum(map(len, separators)) if separators else 0
        self.check(width)
        self.check(self.weigh(x, max(1, width) + between))
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def _strftime(self, format: str) -> str:
        if len(format) > 256 or re.search(r"%[-_0^#+]*[1-9]\d{2}", format):
            raise ChatTemplateError("gives strftime_now a format of more than 256 characters, or a wide field")
        return (self._now or datetime.now()).strftime(format)


_CALLABLE = (BlockReference, Joiner, Undefined, _Method)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return [*value]
    if isinstance(value, VIEWS):
        return [*value]
    if isinstance(value, Namespace):
        inside: dict[str, Any] = object.__getattribute__(value, "_Namespace__attrs")
        return [*inside, *inside.values()]
    return []


def _raise_exception(message: object) -> None:
    raise _TemplateException(str(message))


def _lipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:
    raise ChatTemplateError("calls lipsum, which no prompt needs")


@pass_environment
def _sum(sandbox: Sandbox, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    """``sum`` whose every addition is looked at: it also adds lists."""
    if isinstance(start, str):
        raise TypeError("sum() can't sum strings [use ''.join(seq) instead]")
    values = iterable if attribute is None else map(make_attrgetter(sandbox, attribute), iterable)
    total = start
    for value in values:
        total = sandbox.call_binop(None, "+", total, value)  # type: ignore[arg-type]
    return total


def _check_replace(sandbox: Sandbox, s: Any, old: Any, new: Any, count: int | None = None) -> None:
    times = str(s).count(str(old))
    sandbox.check(len(str(s)) + (times if count is None or count < 0 else min(times, count)) * len(str(new)))


def _check_indent(sandbox: Sandbox, s: str, width: int | str = 4, *_: Any, **__: Any) -> None:
    each = len(width) if isinstance(width, str) else max(0, width)
    sandbox.check(len(s) + each * (1 + sum(map(str(s).count, _LINE_ENDS))))


def _check_join(sandbox: Sandbox, value: Any, d: Any = "", attribute: Any = None) -> None:
    if hasattr(value, "__len__"):
        sandbox.check(sandbox.weigh(value) + len(value) * len(str(d)))


def _check_number(sandbox: Sandbox, value: Any, number: Any = 0, *_: Any, **named: Any) -> None:
    """The width, count or precision that comes second."""
    for given in (number, *named.values()):
        if isinstance(given, int) and abs(given) > MAX_ITEMS:
            raise ChatTemplateError(f"gives a filter the number {given}")


def _check_escape(sandbox: Sandbox, value: Any) -> None:
    if isinstance(value, str):
        sandbox.check(len(value) + 4 * sum(map(value.count, "<>&\"'")))


def _check_round(sandbox: Sandbox, value: Any, precision: int = 0, method: str = "common") -> None:
    if abs(precision) > 400:
        raise ChatTemplateError("rounds to more than 400 places")


def _check_trim(sandbox: Sandbox, value: Any, chars: str | None = None) -> None:
    _check_scan(str(value), chars)


_CHECKS: Mapping[str, Callable[..., None]] = types.MappingProxyType(
    {
        **dict.fromkeys(("batch", "center", "slice", "wordwrap"), _check_number),
        **dict.fromkeys(("e", "escape", "forceescape"), _check_escape),
        "format": lambda sandbox, value, *args, **kwargs: sandbox._printf(str(value), args or kwargs),
        "indent": _check_indent,
        "join": _check_join,
        "replace": _check_replace,
        "round": _check_round,
        "trim": _check_trim,
    }
)
