"""Tool calls: the functions of a request, and the calls found in the generated text.

Text before the first call is content; a call is passed on when it is complete, so its arguments arrive in one piece.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvad.server.api.errors import invalid
from kvad.server.api.tool_formats import Functions, ToolCall, ToolFormat

_SPACE = " \t\r\n"  # of JSON
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def split_at(text: str, marks: Sequence[str]) -> tuple[str, str, str]:
    """Return the text before the first mark, the mark, and the text after it.

    Without a mark, the last part is the end of the text that may begin one.
    """
    if found := [(index, mark) for mark in marks if (index := text.find(mark)) >= 0]:
        index, mark = min(found)
        return text[:index], mark, text[index + len(mark) :]
    sizes = range(min(max(map(len, marks)) - 1, len(text)), 0, -1)
    size = next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks)), 0)
    return text[: len(text) - size], "", text[len(text) - size :]


class ToolCallParser:
    """Separates the text of one sample into content and calls, as it arrives.

    Args:
        form: How the model writes calls.
        functions: Schemas of the offered functions by name; the call of another one is content.
        is_parallel: Pass on all calls; else the first one only.
    """

    def __init__(self, form: ToolFormat, functions: Functions, *, is_parallel: bool = True) -> None:
        self._form, self._functions, self._is_parallel = form, functions, is_parallel
        self._pending = ""  # text that may belong to a call
        self._opening = ""  # white space and mark before a call, which are content only if the call is invalid
        marks = [re.escape(mark) for mark in (form.end, form.close) if mark]
        self._marks = re.compile("|".join(marks)) if marks else None  # that end a call
        # Positions in the pending text: of the search, and after the last mark in a value.
        self._next = self._checked = 0
        self._opening_of_value = ""  # of the value in which the call so far ends
        self._inside = False
        self._has_content = False
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add text; return the new content and the calls that are complete."""
        self._pending += text
        content, calls = "", list[ToolCall]()
        while True:
            if not self._inside:
                content += self._split_before_start()
            if not self._inside or not (match := self._find_end()):
                break
            inner, end, self._pending = self._pending[: match.start()], match[0], self._pending[match.end() :]
            is_close = end == self._form.close and self.num_calls > 0 and not (self._opening or inner.strip())
            before, found = ("", []) if is_close else self.read(inner, end)
            content, calls = content + before, calls + found
            self._inside = self._form.continues and end != self._form.close
        self._has_content = self._has_content or bool(content.strip(_SPACE))
        return content, calls

    def _split_before_start(self) -> str:
        """Return the text before the next start mark.

        A possible part of the mark and the white space before it are kept.
        """
        start, pending = self._form.start, self._pending
        if not start:
            stripped = pending.lstrip(_SPACE)
            if self._has_content or (stripped and not stripped.startswith("{")):
                self._pending = ""
                return pending
            self._inside = stripped.startswith("{")
            return ""
        before, mark, after = split_at(pending, (start,))
        content = before.rstrip()
        self._opening = before[len(content) :] + mark
        self._inside, self._pending = bool(mark), after if mark else self._opening + after
        return content

    def _find_end(self) -> re.Match[str] | None:
        """Return the first mark in the text that ends a call; no text is searched twice."""
        while self._marks is not None and (match := self._marks.search(self._pending, self._next)):
            part = self._pending[self._checked : match.start()]
            self._opening_of_value = self._form.open_value(part, self._opening_of_value)
            self._next = self._checked = match.end()
            if not self._opening_of_value:
                self._next = self._checked = 0
                return match
        self._next = max(self._next, len(self._pending) - max(len(self._form.end), len(self._form.close)))
        return None

    def read(self, text: str, end: str) -> tuple[str, list[ToolCall]]:
        """Return the calls in the text of a call; the text and its marks as content if there is none."""
        calls, is_next = self._form.read(text, self._functions), end == self._form.start
        content = "" if calls else f"{self._opening}{text}{'' if is_next else end}"
        self._opening = end if is_next else ""
        passed = calls if self._is_parallel else calls[: max(0, 1 - self.num_calls)]
        self.num_calls += len(passed)
        if size := self._form.id_length:
            passed = [replace(call, id=uuid.uuid4().hex[:size]) for call in passed]
        return content, passed

    def finish(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add the last text; return the rest of content and calls. An incomplete or invalid call is content."""
        content, calls = self.push(text)
        pending, self._pending = self._pending, ""
        if not pending.strip() and not (self._inside and self._opening):
            return content + ("" if self.num_calls else pending), calls
        if not self._inside:
            return content + pending, calls
        before, last_calls = self.read(pending, "")
        return content + before, [*calls, *last_calls]


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
        if function.get("strict") not in (None, False, True):
            raise invalid(f"tools[{index}].function.strict", "must be true or false")
        names.append(name)
    return names
