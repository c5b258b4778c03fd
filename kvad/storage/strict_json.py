"""Strict JSON: the parser of every JSON file that kvad reads (RFC 8259).

Python's parser also accepts NaN and Infinity, keeps the last of several equal keys, detects UTF-16, and raises errors
other than ValueError for deep nesting. Here each of these is a ValueError of one line with the position.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_DEPTH = 100  # nested objects and lists
MAX_DIGITS = 100  # of an integer; a larger one overflows float
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]|-?(?:NaN|Infinity)|-?\d[\d.eE+-]*', re.DOTALL)


class _RejectedError(ValueError):
    """A value that only this parser rejects; its position is searched afterwards."""


def loads(content: bytes | str) -> Any:
    """Parse JSON.

    Args:
        content: The text, or its bytes in UTF-8 (a byte order mark is skipped).

    Raises:
        ValueError: One line with the position, if the content is not strict JSON.
    """
    text = content if isinstance(content, str) else _decode(content)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_reject_constant,
            parse_int=_parse_int,
            parse_float=_parse_float,
        )
        if _depth_exceeds_limit(value):
            raise RecursionError
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{_deep_position(text)}: nested too deeply, beyond {MAX_DEPTH} levels") from None
    except _RejectedError as error:
        raise ValueError(_describe(text, str(error))) from None
    return value


def _decode(content: bytes) -> str:
    try:
        return content.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = sorted(name for name, _ in pairs)
        duplicate = next(name for name, next_name in itertools.pairwise(names) if name == next_name)
        raise ValueError(f"an object contains {duplicate[:200]!r} twice")
    return result


def _reject_constant(name: str) -> Any:
    raise _RejectedError(name)


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _RejectedError(digits)
    return int(digits)


def _parse_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _RejectedError(digits)
    return value


def _depth_exceeds_limit(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        children = itertools.chain.from_iterable(
            item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)
        )
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _describe(text: str, rejected: str) -> str:
    """Return position and reason for the number or constant ``rejected``."""
    start = next(match.start() for match in _TOKEN.finditer(text) if match[0] == rejected)
    if rejected.lstrip("-") in ("NaN", "Infinity"):
        return f"{_position(text, start)}: {rejected} is not a JSON number"
    is_integer = rejected.lstrip("-").isdecimal()
    limit = f"an integer of {len(rejected):,} digits" if is_integer else "a number beyond the range of a float"
    return f"{_position(text, start)}: {limit} is not supported"


def _deep_position(text: str) -> str:
    depth = 0
    for match in _TOKEN.finditer(text):
        depth += (match[0] in "[{") - (match[0] in "]}")
        if depth > MAX_DEPTH:
            return _position(text, match.start())
    raise AssertionError("the depth exceeds the limit")


def _position(text: str, start: int) -> str:
    return f"line {text.count(chr(10), 0, start) + 1}, column {start - text.rfind(chr(10), 0, start)}"


def plain_value(value: object) -> object:
    """Return JSON values: dataclasses and named tuples become dicts, paths strings, NaN and infinities None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain_value(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
