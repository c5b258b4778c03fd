"""Formats in which models write tool calls: their marks, how a call is read, and the grammar that permits only calls.

The format follows from the model's chat template. A grammar is Lark as llguidance defines it. It describes the text of
an answer, marks included, so it applies whether a model writes a mark as one token or as several.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from kvad import storage
from kvad.server.api.errors import invalid

Schema = Mapping[str, Any]
Functions = Mapping[str, Schema]  # name -> JSON schema of the arguments

_TYPES = {"string": str, "boolean": bool, "integer": int, "number": float, "array": list, "object": dict}
_ALL_TYPES = frozenset((*_TYPES, "null"))
# Keywords of a schema that permit all texts, and those of a list of parameters that can be written as tags.
_ANNOTATIONS = frozenset(("type", "title", "description", "default", "examples", "deprecated"))
_OBJECT_KEYWORDS = _ANNOTATIONS | {"properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_NO_JSON = "is not supported in a strict function whose model writes no JSON. Leave it out, or set strict to false."
_ANY_KEY = '" /[^<>\\n]{1,64}/ "'  # in place of a name inside a literal
TEXT_RULE = r"TEXT: /(.|\n)*/"
_SPACE = r" |\n[ \t]{0,20}"  # bounded, so that no text is endless space
_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}  # templates of Qwen write values with str()


@dataclass(frozen=True)
class ToolCall:
    """A call of a function; ``arguments`` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


# ---------------------------------------------------------------- reading


def read_json(text: str, functions: Functions) -> list[ToolCall]:
    """Return the calls of an object, or a list of objects, with name and arguments; [] for another text."""
    try:
        value = storage.strict_json.loads(text.strip())  # no value that is not JSON, or too deep to be written
    except ValueError:
        return []
    items = value if isinstance(value, list) else [value]
    calls = [call for item in items if (call := _to_call(item)) and call.name in functions]
    return calls if len(calls) == len(items) else []


def _to_call(item: Any) -> ToolCall | None:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(item["name"], text)


def read_named(pattern: re.Pattern[str], text: str, functions: Functions) -> list[ToolCall]:
    """Return the call in a text of which ``pattern`` matches the name and the JSON of the arguments."""
    match = pattern.fullmatch(text.strip())
    if match is None or match[1] not in functions:
        return []
    try:
        arguments = storage.strict_json.loads(match[2])
    except ValueError:
        return []
    return [ToolCall(match[1], json.dumps(arguments, ensure_ascii=False))] if isinstance(arguments, dict) else []


def read_tagged(call: re.Pattern[str], parameter: re.Pattern[str], text: str, functions: Functions) -> list[ToolCall]:
    """Return the call in a text whose parameters are tags; the types of their values are those of the schema."""
    match = call.fullmatch(text.strip())
    if match is None or match[1] not in functions:
        return []
    name, body, schema, arguments, position = match[1], match[2].strip(), functions[match[1]], dict[str, Any](), 0
    while position < len(body):
        found = parameter.match(body, position)
        if found is None:
            return []
        arguments[found[1]] = _to_value(found[2], _properties(schema).get(found[1], {"type": "string"}), schema)
        position = found.end()
    return [ToolCall(name, json.dumps(arguments, ensure_ascii=False))]


def _to_value(text: str, schema: Any, root: Schema) -> Any:
    """Return the value of a parameter's text: JSON, or the text itself if the schema permits a text."""
    types = {kind for leaf in _alternatives(schema, root) for kind in _types(leaf)}
    if types == {"string"}:
        return text
    try:
        value = storage.strict_json.loads(text)
    except ValueError:
        value = _PYTHON_CONSTANTS.get(text, text)
    return value if "string" not in types or _type(value) in types else text


# ---------------------------------------------------------------- schemas of parameters


def _properties(schema: Schema) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _alternatives(schema: Any, root: Schema) -> list[Mapping[str, Any]]:
    """Return the schemas of which a value has one: members of anyOf and oneOf, with local references resolved.

    Each reference is followed once, so that schemas that contain themselves end.
    """
    pending, known, leaves = [schema], set[str](), list[Mapping[str, Any]]()
    while pending:
        current = pending.pop()
        if not isinstance(current, dict):
            leaves.append({})
        elif isinstance(reference := current.get("$ref"), str) and reference.startswith("#"):
            if reference not in known:
                known.add(reference)
                pending.append(_target(reference, root))
        elif isinstance(members := current.get("anyOf", current.get("oneOf")), list) and members:
            pending += reversed(members)
        else:
            leaves.append(current)
    return leaves or [{}]


def _target(reference: str, root: Schema) -> Any:
    """Return the schema of a local reference; None if there is none."""
    target: Any = root
    for part in reference[1:].split("/")[1:]:
        target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
    return target


def _types(schema: Schema) -> frozenset[str]:
    """Return the JSON types that a schema without references permits; none if its type is not valid."""
    if (values := _values(schema)) is not None:
        return frozenset(map(_type, values))
    given = schema.get("type", list(_ALL_TYPES))
    names = given if isinstance(given, list) else [given]
    types = _ALL_TYPES.intersection(name for name in names if isinstance(name, str))
    return types | {"integer"} if "number" in types else types


def _type(value: Any) -> str:
    return next((name for name, kind in _TYPES.items() if isinstance(value, kind)), "null")


def _values(schema: Schema) -> list[Any] | None:
    """Return the values of ``enum`` or ``const``; None: others are possible."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


# ---------------------------------------------------------------- formats


class Tags(NamedTuple):
    """Texts around the value of a parameter, in formats whose arguments are not JSON."""

    before: str  # Lark expression before the value, with the field ``key``
    opening: str  # the last part of it that is the same for all keys
    after: str  # text after a value
    end: str  # the part of it that ends a text


class Thoughts(NamedTuple):
    """Grammar of the text before an answer.

    Attributes:
        expression: Lark expression of thoughts; "": there are none.
        rules: Rules that it reads. ``FREE`` is text that may begin an answer.
        answer: Lark expression between thoughts and an answer that is no call.
    """

    expression: str = ""
    rules: tuple[str, ...] = ("FREE: TEXT",)
    answer: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """Marks, reader and grammar of one way to write calls.

    Attributes:
        name: vLLM's name of the parser, if it has one.
        signs: Texts that are all in the chat template.
        start: Mark before the first call.
        end: Mark after a call or a list of calls, or before the next call; "": the end of the text.
        read: Returns the calls of the text between the marks, [] if it is no call.
        call: Lark expression of a call with the fields ``name`` and ``arguments``.
        opening: Lark expression between the start mark and the first call.
        closing: Lark expression after the last call.
        separator: Lark expression between calls; "": each has a start mark.
        close: Mark after the last of several calls that follow one start mark; "": there is none.
        marks: Further marks, which may be special tokens.
        tags: Those of parameters; None: arguments are JSON.
        id_length: Length of the ids of calls; 0: that of OpenAI's API.
    """

    name: str
    signs: tuple[str, ...]
    start: str
    end: str
    read: Callable[[str, Functions], list[ToolCall]]
    call: str
    opening: str = "ws"
    closing: str = "ws"
    separator: str = ""
    close: str = ""
    marks: tuple[str, ...] = ()
    tags: Tags | None = None
    id_length: int = 0

    @property
    def all_marks(self) -> tuple[str, ...]:
        """All marks, which are special tokens in many models."""
        return tuple(dict.fromkeys(mark for mark in (self.start, self.end, self.close, *self.marks) if mark))

    @property
    def continues(self) -> bool:
        """True if another call may follow an end mark without a start mark."""
        return bool(self.close) or (self.end == self.start != "")

    def is_in_value(self, text: str, in_value: bool) -> bool:
        """Return True if a part of a call ends inside a value, where a mark has no meaning.

        ``in_value``: the text before it ends inside a value.
        """
        if self.tags is None:
            return (_ESCAPED.sub("", text).count('"') + in_value) % 2 == 1
        opening, end = text.rfind(self.tags.opening), text.rfind(self.tags.end)
        return in_value if opening == end else opening > end


_JSON = (
    r'"{{" ws "\"name\"" ws ":" ws "\"{name}\"" ws "," ws ("\"arguments\"" | "\"parameters\"") ws ":" ws {arguments}'
    r' ws "}}"'
)
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_NAME = r"([A-Za-z0-9_.-]+)"
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
)  # fmt: skip
_FUNCTION = (
    re.compile(rf"<function={_NAME}>(.*)</function>", re.DOTALL),
    re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL),
)


def _deepseek(name: str, signs: tuple[str, ...], before: str, after: str) -> ToolFormat:
    """Return a format of DeepSeek; ``before`` is written before the arguments, with the field ``name``."""
    start, begin, separator, end, close = _DEEPSEEK
    text = before.replace("{sep}", separator)
    head, tail = (re.escape(part.strip()).replace(r"\{name\}", _NAME) for part in (text, after))
    pattern = re.compile(rf"{begin}\s*{head}(.*){tail}", re.DOTALL)
    call = f"{literal(begin + text)} {{arguments}} {literal(after + end)}"
    return ToolFormat(
        name, (start, *signs), start, end, partial(read_named, pattern), call, separator="ws",
        closing=f"ws {literal(close)}", close=close, marks=(begin, separator),
    )  # fmt: skip


def _functions(name: str, start: str, end: str) -> ToolFormat:
    """Return a format whose calls are ``<function=f>`` with ``<parameter=key>``."""
    return ToolFormat(
        name, (start, "<function="), start, end, partial(read_tagged, *_FUNCTION),
        r'"<function={name}>\n" {arguments} "</function>"', closing=f"ws {literal(end)}",
        tags=Tags(r'"<parameter={key}>\n"', "<parameter=", "\n</parameter>", "</parameter>"),
    )  # fmt: skip


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# A template is compared with the formats in this order: a format whose marks are also those of another one is first.
FORMATS = (
    ToolFormat(
        "glm45", ("<tool_call>", "<arg_key>"), "<tool_call>", "</tool_call>",
        partial(
            read_tagged, re.compile(rf"{_NAME}(.*)", re.DOTALL),
            re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL),
        ),
        '"{name}" ws {arguments}', opening="", closing='ws "</tool_call>"',
        marks=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        tags=Tags('"<arg_key>{key}</arg_key>" ws "<arg_value>"', "<arg_value>", "</arg_value>", "</arg_value>"),
    ),
    _functions("qwen3_coder", "<tool_call>", "</tool_call>"),  # and Qwen 3.5
    _functions("seed_oss", "<seed:tool_call>", "</seed:tool_call>"),
    ToolFormat(  # Qwen 2.5 and 3, Granite 4
        "hermes", ("<tool_call>",), "<tool_call>", "</tool_call>", read_json, _JSON, closing='ws "</tool_call>"'
    ),
    ToolFormat(
        "mistral_args", ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", "[TOOL_CALLS]",
        partial(read_named, re.compile(rf"{_NAME}(?:\[CALL_ID\]\w*)?\[ARGS\](.*)", re.DOTALL)),
        '"{name}" ("[CALL_ID]" /[A-Za-z0-9]{{9}}/)? "[ARGS]" ws {arguments}', opening="", separator='"[TOOL_CALLS]"',
        marks=("[ARGS]", "[CALL_ID]"), id_length=9,
    ),
    ToolFormat(
        "mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]", "", read_json, _JSON, opening='ws "[" ws',
        closing='ws "]" ws', separator='ws "," ws', id_length=9,
    ),
    ToolFormat(
        "granite", ("<|tool_call|>",), "<|tool_call|>", "", read_json, _JSON, opening='ws "[" ws',
        closing='ws "]" ws', separator='ws "," ws',
    ),
    _deepseek("deepseek_v3", ("```json",), "function{sep}{name}\n```json\n", "\n```"),  # and R1
    _deepseek("deepseek_v31", (), "{name}{sep}", ""),
)  # fmt: skip
# Llama 3: the whole answer is an object with name and parameters.
PLAIN_JSON = ToolFormat("llama3_json", (), "", "", read_json, _JSON, opening="")


# gpt-oss, whose messages ``reasoning.HarmonyParser`` separates; a call has its header, as the grammars permit it.
HARMONY = ToolFormat(
    "openai", ("<|channel|>", "<|message|>"), "", "<|call|>",
    partial(read_named, re.compile(rf"[^{{]*\bto=functions\.{_NAME}[^{{]*<\|message\|>(.*)", re.DOTALL)),
    '("<|channel|>commentary to=functions.{name}" | " to=functions.{name}<|channel|>commentary")'
    ' (" "? "<|constrain|>"? "json")? "<|message|>" ws {arguments}',
    opening="", closing='ws "<|call|>"?',
    marks=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>"),
)  # fmt: skip
HARMONY_RULES = ('START: "<|start|>assistant"', 'body[suffix="<|end|>"]: TEXT')

# Marks of calls that are not read: LFM2, Gemma 4, MiniMax M2, Kimi K2. Required calls are plain JSON.
UNREAD_MARKS = ("<|tool_call_start|>", "<|tool_call>", "<minimax:tool_call>", "<|tool_call_begin|>")
UNREAD = replace(PLAIN_JSON, name="unread")


def find_format(template: str) -> ToolFormat:
    """Return the format that a chat template writes; plain JSON if it has the marks of none."""
    other = UNREAD if any(mark in template for mark in UNREAD_MARKS) else PLAIN_JSON
    return next((each for each in (HARMONY, *FORMATS) if all(sign in template for sign in each.signs)), other)


def has_text_arguments(template: str) -> bool:
    """Return True if a chat template appends the arguments of a call as text, as DeepSeek's; others read an object."""
    return re.search(r"\[.arguments.\]\s*\+", template) is not None


# ---------------------------------------------------------------- grammars


def call_grammar(
    form: ToolFormat,
    tools: list[dict[str, Any]],
    *,
    is_required: bool,
    is_parallel: bool,
    name: str | None = None,
    thoughts: Thoughts = Thoughts(),  # noqa: B008  # immutable
) -> str:
    """Return the Lark grammar of answers whose calls are valid.

    Args:
        form: How the model writes calls.
        tools: The offered functions. Arguments follow the schema of a function that is strict, and of all functions if
            a call is required; those of others are any object.
        is_required: The answer is calls. Else it is any text in which a valid call follows each start mark.
        is_parallel: There may be several calls.
        name: The function that must be called; None: any.
        thoughts: Text before the answer, in which a start mark has no meaning.

    Raises:
        ApiError: 400 for a strict schema that cannot be enforced, because the format has no JSON or is not read.
    """
    if form is UNREAD and not is_required:
        raise invalid(
            "tools", "strict is not supported with this model, whose tool calls are not read. Set it to false."
        )
    calls, lines = _call_rules(form, tools, name, is_required=is_required)
    several = f"call ({form.separator} call)*" if is_parallel and form.separator else "call"
    group, start = f"{form.opening} {several} {form.closing}", literal(form.start) if form.start else ""
    has_more = is_parallel and not form.separator and bool(form.start)
    if is_required:
        answer = f"{start} group" + (f" (ws {start} group)*" if has_more else "")
    elif form is HARMONY:  # any messages, or those of a continued text
        answer = "(HEAD body START)* (group | HEAD TEXT)" if thoughts.expression else "TEXT"
        thoughts = Thoughts(rules=(*thoughts.rules, 'HEAD: "<|channel|>" /analysis|commentary|final/ "<|message|>"'))
    elif not form.start:
        answer = "ws group | OTHER |"
        lines.append(r"OTHER: FREE & /[ \t\r\n]*[^{ \t\r\n](.|\n)*/")
    else:
        answer = "(head group)* FREE" if is_parallel and form.end != form.start and form.end else "FREE | head group ws"
        lines.append(f"head[suffix={start}]: FREE")
    if form.tags is not None:
        lines.append(f"text_value[suffix={literal(form.tags.end)}]: TEXT")
    return "\n".join(
        (
            f"start: {thoughts.expression} ({answer})", f"group: {group}", f"call: {' | '.join(calls)}", *lines,
            *thoughts.rules, "ws: SPACE?", f"SPACE: /{_SPACE}/", TEXT_RULE,
        )
    )  # fmt: skip


def _call_rules(
    form: ToolFormat, tools: list[dict[str, Any]], name: str | None, *, is_required: bool
) -> tuple[list[str], list[str]]:
    """Return the names of the rules of calls, and all their rules."""
    lines, calls = list[str](), list[str]()
    for index, tool in enumerate(tools):
        function = tool["function"]
        if name not in (None, function["name"]):
            continue
        is_strict, schema = function.get("strict") is True, function.get("parameters") or {}
        rule, calls = f"arguments_{index}", [*calls, f"call_{index}"]
        if not (is_strict or is_required):
            schema = {}
        if form.tags is None:
            lines.append(f"{rule}: {json_value({'type': 'object', **schema})}")
        else:
            lines += _tagged_arguments(rule, form.tags, schema, tool=index if is_strict else None)
        lines.append(f"call_{index}: {form.call.format(name=function['name'], arguments=rule)}")
    return calls, lines


def _tagged_arguments(rule: str, tags: Tags, schema: Schema, tool: int | None) -> list[str]:
    """Return the rules of arguments that are written as tags, in the order of the schema.

    Args:
        rule: Name of the first rule.
        tags: Those of the format.
        schema: Schema of the arguments.
        tool: Index of the tool whose schema is enforced; None: keywords without an equivalent have no effect.

    Raises:
        ApiError: 400 for such keywords, and for properties or required names that are none.
    """
    param = f"tools[{tool}].function.parameters"
    others, properties, required = set(schema) - _OBJECT_KEYWORDS, _properties(schema), schema.get("required", [])
    if not isinstance(required, list) or not isinstance(schema.get("properties", {}), dict):
        raise invalid("tools", "properties of parameters must be an object, and required a list.")
    if tool is not None and others:
        raise invalid(param, f"{min(others)} {_NO_JSON}")
    if others or not properties:
        is_closed = not others and schema.get("additionalProperties") is False
        return [f'{rule}: ""' if is_closed else f"{rule}: ({tags.before.format(key=_ANY_KEY)} text_value ws)*"]
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    items, lines = [], []
    for index, (key, member) in enumerate(properties.items()):
        values, has_text = [], False
        for leaf in _alternatives(member, schema):
            if "string" not in _types(leaf):
                values.append(json_value({**definitions, **leaf}))
            elif (constants := _values(leaf)) is not None:
                texts = (value if isinstance(value, str) else json.dumps(value) for value in constants)
                values += map(literal, texts)
            elif tool is None or set(leaf) <= _ANNOTATIONS:
                has_text = True
            else:
                keyword = min(set(leaf) - _ANNOTATIONS)
                raise invalid(f"{param}.properties.{key}", f"{keyword} {_NO_JSON}")
        value = "text_value" if has_text else f"({' | '.join(values)}) {literal(tags.after)}"
        lines.append(f"{rule}_{index}: {tags.before.format(key=literal(key)[1:-1])} {value} ws")
        items.append(f"{rule}_{index}" + ("" if key in required else "?"))
    return [f"{rule}: {' '.join(items)}", *lines]


def json_value(schema: Schema) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": f"({_SPACE})?"}}, ensure_ascii=False)
