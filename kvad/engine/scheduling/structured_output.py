"""Structured output: the form that a sample's text must have, as a plain value. No torch, no llguidance.

A value is checked here as far as that needs no tokenizer; ``engine/execution/grammar.py`` compiles it. It is hashable,
so that it can be the key of a cache, and ``to_json`` and ``from_json`` carry it between processes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, get_args

from kvad import storage
from kvad.errors import RequestError, suggest

StructuredOutputKind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]
MAX_SOURCE_BYTES = 128 << 10


class Grammar(Protocol):
    """A structured output compiled for one tokenizer."""

    def start(self) -> GrammarState:
        """Return the state of a sample without tokens."""


class GrammarState(Protocol):
    """Position of a sample in its grammar, which ``engine/execution/grammar.py`` implements and reads."""

    def copy(self) -> GrammarState:
        """Return a separate state at the same position."""
        ...


@dataclass(frozen=True)
class StructuredOutput:
    """The form of a sample's text.

    Attributes:
        kind: "json_schema", "json_object" (any object), "regex" (Rust's syntax without look-around, for the whole
            text), "grammar" (Lark as llguidance defines it) or "choice" (one of several texts).
        source: The schema or the list of texts as JSON, the regex, or the grammar; "" for "json_object". JSON is stored
            in one form: no space between its tokens, and the order of its keys unchanged, because it is that of the
            generated keys.

    Raises:
        RequestError: If the source is empty, too long or not what its kind says.
    """

    kind: StructuredOutputKind
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(StructuredOutputKind):
            kinds = get_args(StructuredOutputKind)
            raise RequestError(f"structured_output: unknown kind {self.kind!r}", suggest(str(self.kind), kinds))
        if not isinstance(self.source, str):
            raise RequestError(f"{self._label}: must be text, got {type(self.source).__name__}")
        if bool(self.source) == (self.kind == "json_object"):
            raise RequestError(f"{self._label}: must {'be' if self.source else 'not be'} empty")
        try:
            num_bytes = len(self.source.encode())
        except UnicodeEncodeError:
            raise RequestError(f"{self._label}: contains a lone surrogate") from None
        if num_bytes > MAX_SOURCE_BYTES:
            raise RequestError(f"{self._label}: must have at most {MAX_SOURCE_BYTES:,} bytes, got {num_bytes:,}")
        if self.kind in ("json_schema", "choice"):
            object.__setattr__(self, "source", _plain_json(self._read_json()))

    @property
    def _label(self) -> str:
        return f"structured_output: {self.kind}"

    def _read_json(self) -> Any:
        try:
            value = storage.strict_json.loads(self.source)
        except ValueError as error:
            raise RequestError(f"{self._label}: {error}") from None
        if self.kind == "json_schema" and not isinstance(value, dict):
            raise RequestError(f"{self._label}: must be an object, got {type(value).__name__}")
        is_texts = isinstance(value, list) and bool(value) and all(isinstance(text, str) and text for text in value)
        if self.kind == "choice" and not is_texts:
            raise RequestError(f"{self._label}: must be a list of texts that are not empty")
        return value

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> StructuredOutput:
        """Build from plain data with one key, a kind.

        ``{"json_schema": {...}}`` (an object, or its JSON text), ``{"json_object": True}``, ``{"regex": "[a-z]+"}``,
        ``{"grammar": "start: ..."}`` or ``{"choice": ["yes", "no"]}``.

        Raises:
            RequestError: If it is something else.
        """
        if not isinstance(value, Mapping) or len(value) != 1:
            kinds = ", ".join(get_args(StructuredOutputKind))
            raise RequestError(f"structured_output: must be an object with one of the keys {kinds}")
        ((kind, source),) = value.items()
        if kind == "json_object":
            if source is not True:
                raise RequestError(f"structured_output: json_object: must be true, got {source!r}")
            source = ""
        elif (kind == "json_schema" and isinstance(source, Mapping)) or (kind == "choice" and _is_list(source)):
            try:
                source = _plain_json(source)
            except (TypeError, ValueError, RecursionError) as error:
                problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
                raise RequestError(f"structured_output: {kind}: {problem}") from None
        return StructuredOutput(cast("StructuredOutputKind", kind), source)

    def to_json(self) -> dict[str, Any]:
        """Return the plain data from which ``from_json`` builds an equal value."""
        if self.kind == "json_object":
            return {self.kind: True}
        return {self.kind: json.loads(self.source) if self.kind in ("json_schema", "choice") else self.source}


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _plain_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_plain_value)


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")
