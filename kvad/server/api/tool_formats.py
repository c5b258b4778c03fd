"""Formats in which models write tool calls: their marks, how a call is read, and the grammar that permits only calls.

The format follows from the model's chat template. A grammar is Lark as llguidance defines it. It describes the text of
an answer, marks included, so it applies whether a model writes a mark as one token or as several.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from kvad import storage
from kvad.server.api.errors import invalid

Schema = Mapping[str, Any]
Functions = Mapping[str, Schema]  # name -> JSON schema of the arguments

_TYPES = {"string": str, "boolean": bool, "integer": int, "number": float, "array": list, "object": dict}
_ALL_TYPES = frozenset((*_TYPES, "null"))
_SCALARS = frozenset(("boolean", "integer", "number", "null"))
# Keywords of a schema that permit all texts, and those of a list of parameters that can be written as tags.
_ANNOTATIONS = frozenset(("type", "title", "description", "default", "examples", "deprecated"))
_OBJECT_KEYWORDS = _ANNOTATIONS | {"properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_LIST_KEYWORDS = frozenset(("items", "minItems", "maxItems"))
_NO_JSON = "is not supported in a strict function whose model writes no JSON. Leave it out, or set strict to false."
_ANY_KEY = '" /[^<>\\n]{1,64}/ "'  # in place of a name inside a literal
_ANY_WORD = '" /[A-Za-z_][A-Za-z0-9_]{0,63}/ "'
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
    arguments = item.get("arguments", item.get("parameters"))
    if isinstance(arguments, str):
        return ToolCall(item["name"], arguments)
    arguments = {} if arguments is None else arguments
    return ToolCall(item["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


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


def read_kimi(text: str, functions: Functions) -> list[ToolCall]:
    """Return the call of Kimi K2 with the id that the model has written, because its template writes only that."""
    call_id = text.partition(_KIMI[2])[0].rpartition(_KIMI[1])[2].strip()
    return [replace(call, id=call_id) for call in read_named(_KIMI_CALL, text, functions)]


def read_python(text: str, functions: Functions) -> list[ToolCall]:
    """Return the calls of a list such as ``[f(a="x", b=[1, None])]``, or of JSON (``read_json``)."""
    return read_json(_PYTHON.sub(_python_to_json, text), functions)


def _python_to_json(match: re.Match[str]) -> str:
    """Return the JSON of a token of Python; a call is an object with name and arguments."""
    if match["text"]:
        return json.dumps(_PYTHON_ESCAPE.sub(_unescape, match["text"][1:-1]))
    if match["constant"]:
        return json.dumps(_PYTHON_CONSTANTS[match["constant"]])
    if match["key"]:
        return f"{json.dumps(match['key'])}: "
    return "}}" if match[0] == ")" else f'{{"name": {json.dumps(match["call"])}, "arguments": {{'


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _PYTHON_ESCAPES.get(code, match[0])


def read_gemma(text: str, functions: Functions) -> list[ToolCall]:
    """Return the call in a text such as ``call:f{a:<|"|>x<|"|>,b:[1,null]}``."""
    *texts, last = text.strip().split(_GEMMA_QUOTE)
    if len(texts) % 2:
        return []
    parts = [
        json.dumps(part) if index % 2 else _GEMMA_WORD.sub(lambda word: "null" if word[1] else f'"{word[0]}"', part)
        for index, part in enumerate((*texts, last))
    ]
    return read_named(_GEMMA_CALL, "".join(parts), functions)


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


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class Tags(NamedTuple):
    """Texts around the value of a parameter, in formats whose arguments are not JSON.

    A text is a value without quotes, unless ``opens_texts``; values of other types are JSON.
    """

    before: str  # Lark expression before the value, with the field ``key``
    opening: str  # the last part of it that is the same for all keys
    after: str  # text after a value
    end: str  # the part of it that ends a text; "": texts are JSON, too
    separator: str = ""  # Lark expression between parameters; "": white space
    opens_texts: bool = False  # ``opening`` and ``end`` are quotes of texts only, and lists and objects have such texts


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
        quotes: Pattern of the quotes of texts, and of escaped characters; None: parameters are between tags.
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
    quotes: re.Pattern[str] | None = re.compile(r'\\.|"', re.DOTALL)
    id_length: int = 0

    @property
    def all_marks(self) -> tuple[str, ...]:
        """All marks, which are special tokens in many models."""
        return tuple(dict.fromkeys(mark for mark in (self.start, self.end, self.close, *self.marks) if mark))

    @property
    def continues(self) -> bool:
        """True if another call may follow an end mark without a start mark."""
        return bool(self.close) or (self.end == self.start != "")

    def open_value(self, text: str, opening: str) -> str:
        """Return the text that opens the value in which a part of a call ends; "" if it ends in none.

        In a value a mark has no meaning. ``opening``: the same for the text before this part.
        """
        if self.quotes is None:
            assert self.tags is not None
            start, end = text.rfind(self.tags.opening), text.rfind(self.tags.end)
            return opening if start == end else self.tags.opening if start > end else ""
        for quote in self.quotes.findall(text):
            if not quote.startswith("\\") and opening in ("", quote):
                opening = "" if opening else quote
        return opening


_JSON = (
    r'"{{" ws "\"name\"" ws ":" ws "\"{name}\"" ws "," ws ("\"arguments\"" | "\"parameters\"") ws ":" ws {arguments}'
    r' ws "}}"'
)
_NAME = r"([A-Za-z0-9_.-]+)"
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
)  # fmt: skip
_KIMI = (
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)  # fmt: skip
_KIMI_CALL = re.compile(rf"{re.escape(_KIMI[1])}\s*(?:functions\.)?{_NAME}:\d+\s*{re.escape(_KIMI[2])}(.*)", re.DOTALL)
# The template of LFM2 escapes nothing, so an apostrophe between letters is no quote.
_PYTHON_QUOTES = re.compile(r"""\\.|(?<!\w)["']|["'](?!\w)""", re.DOTALL)
_PYTHON = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\]|(?<=\w)"(?=\w))*"|'(?:\\.|[^'\\]|(?<=\w)'(?=\w))*')"""
    r"""|(?<![\w.$-])(?P<key>[\w.$-]{1,256})\s*=|\b(?P<call>[\w.-]{1,64})\(|\)"""
    r"""|\b(?P<constant>True|False|None)\b""",
    re.DOTALL,
)
_PYTHON_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_PYTHON_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "/": "/"}
_GEMMA_QUOTE = '<|"|>'
_GEMMA_WORD = re.compile(
    r"(?<![\w.$-])[\w.$-]{1,256}(?=\s*:)|\b(None)\b"
)  # a key, or what the template writes for null
_GEMMA_CALL = re.compile(rf'"call":{_NAME}(\{{.*)', re.DOTALL)
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
        tags=Tags(r'"<parameter={key}>\n"', "<parameter=", "\n</parameter>", "</parameter>"), quotes=None,
    )  # fmt: skip


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
        quotes=None,
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
    ToolFormat(
        "minimax_m2", ("<minimax:tool_call>",), "<minimax:tool_call>", "</invoke>",
        partial(
            read_tagged, re.compile(rf'<invoke name="{_NAME}">(.*)', re.DOTALL),
            re.compile(r'\s*<parameter name="([^>\n]+)">(.*?)</parameter>\s*', re.DOTALL),
        ),
        r'"<invoke name=\"{name}\">\n" {arguments} "</invoke>"', separator="ws", close="</minimax:tool_call>",
        closing='ws "</minimax:tool_call>"', quotes=None,
        tags=Tags(r'"<parameter name=\"{key}\">"', "<parameter name=", "</parameter>", "</parameter>"),
    ),
    ToolFormat(
        "kimi_k2", ("<|tool_call_begin|>",), _KIMI[0], _KIMI[3],
        read_kimi, f'{literal(_KIMI[1] + "functions.{name}:")} /[0-9]{{{{1,4}}}}/ {literal(_KIMI[2])} {{arguments}}'
        f" {literal(_KIMI[3])}",
        opening="", separator="ws", closing=literal(_KIMI[4]), close=_KIMI[4], marks=_KIMI[1:3],
    ),
    ToolFormat(
        "gemma4", ("<|tool_call>",), "<|tool_call>", "<tool_call|>", read_gemma,
        '"call:{name}{{" {arguments} "}}"', opening="", closing='"<tool_call|>"', marks=(_GEMMA_QUOTE,),
        tags=Tags('"{key}:"', _GEMMA_QUOTE, "", _GEMMA_QUOTE, '","', opens_texts=True),
        quotes=re.compile(re.escape(_GEMMA_QUOTE)),
    ),
    ToolFormat(  # some templates have no mark of a call, but that of a list of tools
        "lfm2", ("<|tool_", "_start|>"), "<|tool_call_start|>", "<|tool_call_end|>", read_python,
        '"{name}(" {arguments} ")"', opening='"["', closing='"]<|tool_call_end|>"', separator='"," " "?',
        tags=Tags('"{key}="', "", "", "", '"," " "?'), quotes=_PYTHON_QUOTES,
    ),
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


def find_format(template: str) -> ToolFormat:
    """Return the format that a chat template writes; plain JSON if it has the marks of none."""
    return next((each for each in (HARMONY, *FORMATS) if all(sign in template for sign in each.signs)), PLAIN_JSON)


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
        ApiError: 400 for a strict schema that cannot be enforced, because the format has no JSON.
    """
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
    if form.tags is not None and form.tags.end:
        lines.append(f"text_value[suffix={literal(form.tags.end)}]: TEXT")
    if form.tags is not None and form.tags.opens_texts:
        lines.append(_any_value_rule(form.tags))
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
            lines += _Arguments(rule, form.tags, schema, tool=index if is_strict else None).lines
        lines.append(f"call_{index}: {form.call.format(name=function['name'], arguments=rule)}")
    return calls, lines


class _Arguments:
    """Builds the rules of arguments that are not an object of JSON, in the order of the schema.

    Args:
        rule: Name of the first rule.
        tags: Those of the format.
        schema: Schema of the arguments.
        tool: Index of the tool whose schema is enforced; None: keywords without an equivalent have no effect.

    Raises:
        ApiError: 400 for such keywords, and for properties or required names that are none.
    """

    def __init__(self, rule: str, tags: Tags, schema: Schema, tool: int | None) -> None:
        self._tags, self._root, self._is_strict = tags, schema, tool is not None
        self._definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        # id of a schema -> its rule, because a schema may contain itself; all are parts of ``schema``
        self._objects, self._lists = dict[int, str](), dict[int, str]()
        self.lines = list[str]()
        self._add_object(rule, schema, f"tools[{tool}].function.parameters")

    def _add_object(self, rule: str, schema: Schema, place: str) -> None:
        """Add the rule of the members of an object, and those that it reads."""
        self._objects[id(schema)] = rule
        others, properties, required = set(schema) - _OBJECT_KEYWORDS, _properties(schema), schema.get("required", [])
        if not isinstance(required, list) or not isinstance(schema.get("properties", {}), dict):
            raise invalid("tools", "properties of parameters must be an object, and required a list.")
        if self._is_strict and others:
            raise invalid(place, f"{min(others)} {_NO_JSON}")
        separator = self._tags.separator
        if others or not properties:
            is_closed = not others and schema.get("additionalProperties") is False
            self.lines.append(f'{rule}: ""' if is_closed else f"{rule}: {_any_members(self._tags)}")
            return
        members = [(f"{rule}_{index}", key in required) for index, key in enumerate(properties)]
        for (name, _), (key, member) in zip(members, properties.items(), strict=True):
            value = self._value(name, member, f"{place}.properties.{key}")
            before = self._tags.before.format(key=literal(key)[1:-1])
            self.lines.append(f"{name}: {before} {value}" + ("" if separator else " ws"))
        if not separator:
            self.lines.append(f"{rule}: " + " ".join(name + ("" if needed else "?") for name, needed in members))
            return
        first, rest = "", ""  # expressions of the members from one on: at the beginning, and after another one
        for name, needed in reversed(members):
            begins = f"{name} {rest}"
            first = begins if needed else f"({begins} | {first})" if first else f"({begins})?"
            self.lines.append(f"{name}_rest: ({separator} {name}){'' if needed else '?'} {rest}")
            rest = f"{name}_rest"
        self.lines.append(f"{rule}: {first}")

    def _value(self, rule: str, member: Any, place: str) -> str:
        """Return the expression of a value."""
        if not self._tags.end:
            return json_value({**self._definitions, **(member if isinstance(member, dict) else {})})
        if self._tags.opens_texts:
            return self._quoted_value(rule, member, place)
        values, has_text = [], False
        for leaf in _alternatives(member, self._root):
            if "string" not in _types(leaf):
                values.append(json_value({**self._definitions, **leaf}))
            elif (constants := _values(leaf)) is not None:
                texts = (value if isinstance(value, str) else json.dumps(value) for value in constants)
                values += map(literal, texts)
            else:
                self._check_keywords(leaf, _ANNOTATIONS, place)
                has_text = True
        return "text_value" if has_text else f"({' | '.join(values)}) {literal(self._tags.after)}"

    def _quoted_value(self, rule: str, member: Any, place: str) -> str:
        """Return the expression of a value whose texts have quotes; lists and objects contain such values."""
        values = list[str]()
        for number, leaf in enumerate(_alternatives(member, self._root)):
            types, name = _types(leaf), f"{rule}_{number}"
            if (constants := _values(leaf)) is not None:
                values += (literal(_with_quotes(value, self._tags)) for value in constants)
                continue
            if not leaf:
                values.append("any_value")
                continue
            if scalars := sorted(types & _SCALARS):
                values.append(json_value({**leaf, "type": scalars}))
            if types - _SCALARS:
                self._check_keywords(leaf, _OBJECT_KEYWORDS | _LIST_KEYWORDS, place)
            if "string" in types:
                values.append(f"{literal(self._tags.opening)} text_value")
            if "array" in types:
                values.append(f'"[" {self._list_rule(f"{name}_list", leaf, place)} "]"')
            if "object" in types:
                if id(leaf) not in self._objects:
                    self._add_object(f"{name}_object", leaf, place)
                values.append(f'"{{" {self._objects[id(leaf)]} "}}"')
        return f"({' | '.join(values)})" if values else "any_value"

    def _list_rule(self, rule: str, schema: Schema, place: str) -> str:
        """Return the rule of the items of a list."""
        if id(schema) not in self._lists:
            self._lists[id(schema)] = rule
            item = self._quoted_value(f"{rule}_item", schema.get("items"), f"{place}.items")
            self.lines.append(f"{rule}: {_repeat(item, schema.get('minItems'), schema.get('maxItems'))}")
        return self._lists[id(schema)]

    def _check_keywords(self, leaf: Schema, known: Collection[str], place: str) -> None:
        if self._is_strict and (others := set(leaf).difference(known)):
            raise invalid(place, f"{min(others)} {_NO_JSON}")


def _repeat(item: str, at_least: Any, at_most: Any) -> str:
    """Return the expression of a list with commas; limits that are no positive integers have no effect."""
    least = at_least if isinstance(at_least, int) and at_least > 0 else 0
    most = at_most if isinstance(at_most, int) and at_most > 0 else None
    items = f'{item} ("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
    return items if least else f"({items})?"


def _any_members(tags: Tags) -> str:
    """Return the expression of any arguments."""
    if not tags.separator:
        return f"({tags.before.format(key=_ANY_KEY)} text_value ws)*"
    member = f"{tags.before.format(key=_ANY_WORD)} {'any_value' if tags.opens_texts else json_value({})}"
    return f"({member} ({tags.separator} {member})*)?"


def _any_value_rule(tags: Tags) -> str:
    """Return the rule of any value whose texts have quotes."""
    scalars = json_value({"type": sorted(_SCALARS)})
    values = f'"[" (any_value ("," any_value)*)? "]" | "{{" {_any_members(tags)} "}}"'
    return f"any_value: {literal(tags.opening)} text_value | {scalars} | {values}"


def _with_quotes(value: Any, tags: Tags) -> str:
    """Return the text of a value whose texts have quotes."""
    if isinstance(value, str):
        return f"{tags.opening}{value}{tags.end}"
    if isinstance(value, list):
        return f"[{','.join(_with_quotes(item, tags) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_with_quotes(item, tags)}' for key, item in value.items())}}}"
    return json.dumps(value)


def json_value(schema: Schema) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": f"({_SPACE})?"}}, ensure_ascii=False)
