"""Tool calls: the formats in which models write them, found in the generated text.

The format follows from the model's chat template. Text before the first call is content; a call is passed on when it is
complete, so its arguments arrive in one piece.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from kvad import storage
from kvad.server.api.errors import invalid

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Keywords of JSON Schema whose values are schemas by name, and those whose values are data.
_NAMED_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_DATA_KEYWORDS = ("const", "enum", "default", "examples")


@dataclass(frozen=True)
class ToolFormat:
    """Marks around a call or a list of calls; ``end`` "" means the end of the text."""

    name: str
    start: str
    end: str


FORMATS = (
    ToolFormat("hermes", "<tool_call>", "</tool_call>"),  # Qwen, Hermes
    ToolFormat("mistral", "[TOOL_CALLS]", ""),
    ToolFormat("granite", "<|tool_call|>", ""),
)
PLAIN_JSON = ToolFormat("json", "{", "")  # Llama 3.1: the whole answer is an object with name and parameters


def find_format(template: str) -> ToolFormat:
    """Return the format that a chat template mentions; plain JSON if it mentions none."""
    return next((each for each in FORMATS if each.start in template), PLAIN_JSON)


@dataclass(frozen=True)
class ToolCall:
    """A call of a function; ``arguments`` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallParser:
    """Separates the text of one sample into content and calls, as it arrives.

    Args:
        form: How the model writes calls.
        names: Names of the offered functions; JSON that calls another one is content.
        is_parallel: Pass on all calls; else the first one only.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], *, is_parallel: bool = True) -> None:
        self._form, self._names, self._is_parallel = form, names, is_parallel
        self._pending = ""  # text that may belong to a call
        self._space = ""  # white space before a call, which is content only if the call is invalid
        self._inside = False
        self._has_content = False
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add text; return the new content and the calls that are complete."""
        self._pending += text
        content, calls = "", list[ToolCall]()
        while True:
            if not self._inside:
                before, found = self._split_before_start()
                content += before
                if not found:
                    break
            end = self._form.end
            if not end or end not in self._pending:
                break
            inner, _, self._pending = self._pending.partition(end)
            found_calls = self._parse(inner)
            calls += self._count(found_calls)
            content += "" if found_calls else f"{self._space}{self._form.start}{inner}{end}"
            self._inside = False
        self._has_content = self._has_content or bool(content.strip())
        return content, calls

    def _split_before_start(self) -> tuple[str, bool]:
        """Return the text before the next start mark, and whether there is one.

        A possible part of the mark and the white space before it are kept.
        """
        start, pending = self._form.start, self._pending
        if self._form is PLAIN_JSON:
            stripped = pending.lstrip()
            if self._has_content or (stripped and not stripped.startswith("{")):
                self._pending = ""
                return pending, False
            self._inside = stripped.startswith("{")
            return "", self._inside
        before, mark, after = pending.partition(start)
        if not mark:
            sizes = range(min(len(start) - 1, len(pending)), 0, -1)
            size = next((size for size in sizes if start.startswith(pending[-size:])), 0)
            before, after = pending[: len(pending) - size], pending[len(pending) - size :]
        content = before.rstrip()
        self._space = before[len(content) :]
        self._inside, self._pending = bool(mark), after if mark else self._space + after
        return content, self._inside

    def finish(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add the last text; return the rest of content and calls. An incomplete or invalid call is content."""
        content, calls = self.push(text)
        pending, self._pending = self._pending, ""
        if not self._inside:
            return content + ("" if self.num_calls and not pending.strip() else pending), calls
        if last_calls := self._parse(pending):
            return content, [*calls, *self._count(last_calls)]
        return content + (pending if self._form is PLAIN_JSON else f"{self._space}{self._form.start}{pending}"), calls

    def _parse(self, text: str) -> list[ToolCall]:
        try:
            value = storage.strict_json.loads(text.strip())  # no value that is not JSON, or too deep to be written
        except ValueError:
            return []
        items = value if isinstance(value, list) else [value]
        calls = [call for item in items if (call := _to_call(item)) and call.name in self._names]
        return calls if len(calls) == len(items) else []

    def _count(self, calls: list[ToolCall]) -> list[ToolCall]:
        """Return the calls that are passed on."""
        passed = calls if self._is_parallel else calls[: max(0, 1 - self.num_calls)]
        self.num_calls += len(passed)
        return passed


def _to_call(item: Any) -> ToolCall | None:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(item["name"], text)


def check_tools(tools: list[dict[str, Any]]) -> list[str]:
    """Return the names of the functions.

    Raises:
        ApiError: 400 for a tool that is no function, or without a valid name.
    """
    names = []
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise invalid(f"tools[{index}]", "must be {'type': 'function', 'function': {...}}")
        name, parameters = function.get("name"), function.get("parameters", {})
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise invalid(f"tools[{index}].function.name", "must be 1 to 64 letters, digits, '_', '.' or '-'")
        if not isinstance(parameters, dict):
            raise invalid(f"tools[{index}].function.parameters", "must be a JSON schema")
        names.append(name)
    return names


def required_schema(tools: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    """Return the schema of a call of the function ``name``, or of any of them."""
    chosen = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    schemas = []
    for index, function in enumerate(chosen):
        place = "#/properties/arguments" if len(chosen) == 1 else f"#/anyOf/{index}/properties/arguments"
        properties = {
            "name": {"const": function["name"]},
            "arguments": _moved(function.get("parameters") or {"type": "object"}, place),
        }
        required = ["name", "arguments"]
        schemas.append(
            {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        )
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _moved(schema: Any, place: str) -> Any:
    """Return a schema whose local references are valid at ``place`` of another one.

    At "#/properties/arguments", "#/$defs/P" becomes "#/properties/arguments/$defs/P".
    """
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict) or "$id" in schema:  # references below an $id are relative to it
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = place + value[1:]
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):  # their names are no keywords
            moved[key] = {name: _moved(item, place) for name, item in value.items()}
        else:
            moved[key] = value if key in _DATA_KEYWORDS else _moved(value, place)
    return moved
