"""Constraints of configuration fields, declared in their types, and the function that checks them.

A constraint is part of a field's annotation, and ``__post_init__`` checks all fields at once::

    @dataclass(frozen=True)
    class TrainConfig:
        batch_size: PositiveInt = 16
        dropout: Fraction = 0.0
        minutes: PositiveFloat | None = None
        mode: Literal["fast", "exact"] = "fast"

        def __post_init__(self) -> None:
            check_fields(self, "train")

    TrainConfig(batch_size=0)   ConfigError: train.batch_size: must be at least 1, got 0 (Use 16, the default)

``serialization.from_dict`` builds such a dataclass from JSON values. Standard library only.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from kvad.errors import ConfigError, UsageError


@dataclass(frozen=True)
class Range:
    """Bounds of a number, which are included unless ``above`` or ``below`` excludes them."""

    low: float
    high: float = math.inf
    above: bool = False  # low is excluded
    below: bool = False  # high is excluded

    def contains(self, value: float) -> bool:
        """Return True if the value is within the bounds."""
        is_excluded = (self.above and value == self.low) or (self.below and value == self.high)
        return self.low <= value <= self.high and not is_excluded

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'above' if self.above else 'at least'} {self.low}"
        if self.below:
            return f"between {self.low} and {self.high}" if self.above else f"in [{self.low}, {self.high})"
        return f"above {self.low} and at most {self.high}" if self.above else f"from {self.low} to {self.high}"


PositiveInt = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]
PositiveFloat = Annotated[float, Range(0, above=True)]
NonNegativeFloat = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1, below=True)]  # [0, 1)
OpenFraction = Annotated[float, Range(0, 1, above=True, below=True)]  # (0, 1)


def check_fields(instance: Any, where: str = "", error: type[UsageError] = ConfigError) -> None:
    """Check types and constraints of a dataclass's fields, of nested dataclasses too.

    Args:
        instance: The dataclass.
        where: Its dotted key, for messages.
        error: Class of the error.

    Raises:
        UsageError: ``error`` for the first invalid field, named by its dotted key.
    """
    for field, kind in _typed_fields(instance.__class__):
        key = f"{where}.{field.name}" if where else field.name
        check_value(kind, getattr(instance, field.name), key, error, _default_hint(field.default))


def check_value(kind: Any, value: Any, key: str, error: type[UsageError] = ConfigError, hint: str = "") -> None:
    """Check one value against a type, as ``check_fields`` does; ``hint`` is for a value out of range."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        check_value(args[0], value, key, error, hint)
        for constraint in args[1:]:
            if not constraint.contains(value):
                raise error(f"{key}: must be {constraint}, got {value}", hint)
    elif origin in (typing.Union, types.UnionType):
        _check_union(args, value, key, error, hint)
    elif origin is Literal:
        if value not in args:
            close = difflib.get_close_matches(str(value), map(str, args), n=1, cutoff=0.5)
            message = f"{key}: must be one of {', '.join(map(repr, args))}, got {value!r}"
            raise error(message, f"did you mean {close[0]!r}?" if close else "")
    elif origin is tuple:
        _check_tuple(args, value, key, error)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise error(f"{key}: must be an object, got {value!r}")
        for name, item in value.items():
            check_value(args[1], item, f"{key}.{name}" if isinstance(name, str) else f"{key}[{name}]", error)
    elif isinstance(kind, type) and kind is not Any:
        _check_type(kind, value, key, error)


def _check_tuple(kinds: tuple[Any, ...], value: Any, key: str, error: type[UsageError]) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise error(f"{key}: must be a list, got {value!r}")
    item_kinds = [kinds[0]] * len(value) if kinds[1:] == (...,) else kinds
    for index, (kind, item) in enumerate(zip(item_kinds, value, strict=True)):
        check_value(kind, item, f"{key}[{index}]", error)


def _check_union(kinds: tuple[Any, ...], value: Any, key: str, error: type[UsageError], hint: str) -> None:
    if dataclasses.is_dataclass(value) and type(value) in kinds:
        check_fields(value, key, error)
        return
    errors = []
    for kind in kinds:
        try:
            check_value(kind, value, key, error, hint)
            return
        except error as caught:
            errors.append(caught)
    raise errors[0]


def _check_type(kind: type[Any], value: Any, key: str, error: type[UsageError]) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if (kind in (int, float) and not is_number) or not isinstance(value, (int, float) if kind is float else kind):
        raise error(f"{key}: must be {kind.__name__}, got {value!r}")
    if kind is float and not math.isfinite(value):
        raise error(f"{key}: must be a finite number, got {value!r}")
    if dataclasses.is_dataclass(value):
        check_fields(value, key, error)


def _default_hint(default: Any) -> str:
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    return f"Use {default:g}, the default" if is_number else ""


@functools.cache
def _typed_fields(cls: type[Any]) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return [(field, hints[field.name]) for field in dataclasses.fields(cls)]
