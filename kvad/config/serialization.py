"""Fields of frozen dataclasses: constraints declared in their types, and conversion from and to JSON values.

``__post_init__`` checks all fields at once::

    @dataclass(frozen=True)
    class TrainConfig:
        batch_size: PositiveInt = 16
        dropout: Fraction = 0.0
        mode: Literal["fast", "exact"] = "fast"

        def __post_init__(self) -> None:
            check_fields(self, "train")

    TrainConfig(batch_size=0)   ConfigError: train.batch_size: must be at least 1, got 0 (Use 16, the default)

``from_dict`` ignores no key: an unknown key, a missing key and a value of another type raise ConfigError with the
dotted key and the nearest known one. The ``kind`` field selects the class in a union of dataclasses. Standard library
only.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from kvad.errors import ConfigError, UsageError, suggest

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """Bounds of a number, which are included unless ``above`` or ``below`` excludes them."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # low is excluded
    below: bool = False  # high is excluded

    def contains(self, value: float) -> bool:
        """Return True if the value is within the bounds."""
        is_excluded = (self.above and value == self.low) or (self.below and value == self.high)
        return self.low <= value <= self.high and not is_excluded

    def __str__(self) -> str:
        if self.low == -math.inf:
            return f"at most {self.high:,}"
        if self.high == math.inf:
            return f"{'above' if self.above else 'at least'} {self.low}"
        if self.below:
            return f"between {self.low} and {self.high}" if self.above else f"in [{self.low}, {self.high})"
        return f"above {self.low} and at most {self.high}" if self.above else f"from {self.low} to {self.high}"


_INT64 = Range(high=2**63 - 1)
PositiveInt = Annotated[int, Range(1), _INT64]
NonNegativeInt = Annotated[int, Range(0), _INT64]
PositiveFloat = Annotated[float, Range(0, above=True)]
NonNegativeFloat = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1, below=True)]  # [0, 1)
OpenFraction = Annotated[float, Range(0, 1, above=True, below=True)]  # (0, 1)


def short_repr(value: object) -> str:
    """Format any value for a one-line message."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def check_fields(instance: Any, where: str = "", error: type[UsageError] = ConfigError) -> None:
    """Check types and constraints of a dataclass's fields, of nested dataclasses too.

    Raises:
        UsageError: ``error`` for the first invalid field, named by its dotted key, which begins with ``where``.
    """
    for field, kind in _typed_fields(instance.__class__):
        key = f"{where}.{field.name}" if where else field.name
        is_number = isinstance(field.default, int | float) and not isinstance(field.default, bool)
        hint = f"Use {field.default:g}, the default" if is_number else ""
        check_value(kind, getattr(instance, field.name), key, error, hint)


def check_value(kind: Any, value: Any, key: str, error: type[UsageError] = ConfigError, hint: str = "") -> None:
    """Check one value against a type, as ``check_fields`` does; ``hint`` is for a value out of range."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        check_value(args[0], value, key, error, hint)
        for constraint in args[1:]:
            if not constraint.contains(value):
                raise error(f"{key}: must be {constraint}, got {short_repr(value)}", hint)
    elif origin in (typing.Union, types.UnionType):
        _check_union(args, value, key, error, hint)
    elif origin is Literal:
        if value not in args:
            close = difflib.get_close_matches(str(value), map(str, args), n=1, cutoff=0.5)
            message = f"{key}: must be one of {', '.join(map(repr, args))}, got {short_repr(value)}"
            raise error(message, f"did you mean {close[0]!r}?" if close else "")
    elif origin is tuple:
        _check_tuple(args, value, key, error)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise error(f"{key}: must be an object, got {short_repr(value)}")
        for name, item in value.items():
            check_value(args[1], item, f"{key}.{name}" if isinstance(name, str) else f"{key}[{name}]", error)
    elif isinstance(kind, type) and kind is not Any:
        _check_type(kind, value, key, error)


def _check_tuple(kinds: tuple[Any, ...], value: Any, key: str, error: type[UsageError]) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise error(f"{key}: must be a list, got {short_repr(value)}")
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
        raise error(f"{key}: must be {kind.__name__}, got {short_repr(value)}")
    if kind is float and not abs(value) <= sys.float_info.max:  # NaN, infinity, an integer beyond a float
        raise error(f"{key}: must be a finite number, got {short_repr(value)}")
    if dataclasses.is_dataclass(value):
        check_fields(value, key, error)


@functools.cache
def _typed_fields(cls: type[Any]) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return [(field, hints[field.name]) for field in dataclasses.fields(cls)]


def to_dict(value: Any) -> Any:
    """Convert nested dataclasses, mappings and tuples to JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_dict(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_dict(item) for item in value]
    return value


def changed_fields(value: Any) -> Any:
    """Convert as ``to_dict``, without the fields of dataclasses that have their default."""
    if isinstance(value, Mapping):
        return {key: changed_fields(item) for key, item in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return to_dict(value)
    fields = [(field.name, getattr(value, field.name), _default(field)) for field in dataclasses.fields(value)]
    return {name: changed_fields(item) for name, item, default in fields if item != default}


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def from_dict(cls: type[T], data: Any, where: str = "") -> T:
    """Build the dataclass ``cls`` from JSON values; ``where`` is the dotted key of ``data``, for errors."""
    return typing.cast("T", _read(cls, data, where))


def override(data: dict[str, Any], assignments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``data`` with dotted keys set: ``{"decoder.num_layers": 4}``; a key's parents must exist."""
    result: dict[str, Any] = json.loads(json.dumps(data))
    for dotted, value in assignments.items():
        node = result
        *parents, last = dotted.split(".")
        for depth, name in enumerate(parents):
            child = node.get(name)
            if name in node and child is None:
                raise ConfigError(f"{dotted}: cannot be set, because {'.'.join(parents[: depth + 1])} is null")
            if not isinstance(child, dict):
                raise ConfigError(f"unknown key {'.'.join(parents[: depth + 1])!r}", suggest(name, node))
            node = child
        node[last] = value
    return result


def _read(kind: Any, data: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _read_union(typing.get_args(kind), data, where)
    if origin is tuple and isinstance(data, (list, tuple)):
        return tuple(_read(typing.get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(data, Mapping):
        return {key: _read(typing.get_args(kind)[1], item, f"{where}.{key}") for key, item in data.items()}
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(typing.cast("type[Any]", kind), data, where)
    check_value(kind, data, where)
    return float(data) if kind is float else data


def _read_union(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in kinds:
        return None
    classes = [k for k in kinds if dataclasses.is_dataclass(k)]
    if classes and isinstance(data, Mapping):
        if len(classes) == 1:
            return _read(classes[0], data, where)
        by_kind = {str(getattr(each, "kind", each)): each for each in classes}
        without_kind = next((each for each in classes if not hasattr(each, "kind")), None)
        if without_kind is not None and "kind" not in data:
            return _read(without_kind, data, where)
        if "kind" not in data:
            raise ConfigError(f"missing key {where}.kind", f"known: {', '.join(sorted(by_kind))}")
        name = data["kind"]
        if name not in by_kind:
            raise ConfigError(f"{where}.kind: unknown kind {name!r}", suggest(str(name), by_kind))
        return _read(by_kind[name], data, where)
    errors = []
    for kind in (kind for kind in kinds if kind is not type(None) and kind not in classes):
        try:
            return _read(kind, data, where)
        except ConfigError as error:
            errors.append(error.message)
    expected = "an object or null" if type(None) in kinds else "an object"
    raise ConfigError(errors[0] if errors else f"{where}: must be {expected}, got {short_repr(data)}")


def _read_dataclass(cls: type[Any], data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or cls.__name__}: must be an object, got {short_repr(data)}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    prefix = f"{where}." if where else ""
    for key in data:
        if key not in fields:
            raise ConfigError(f"unknown key {prefix}{key}", suggest(key, fields))
    values = {key: _read(hints[key], _with_kind(fields[key], item), prefix + key) for key, item in data.items()}
    for name, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ConfigError(f"missing key {prefix}{name}")
    return cls(**values)


def _with_kind(field: dataclasses.Field[Any], data: Any) -> Any:
    """Add the field's default kind to an object without a kind."""
    if not isinstance(data, Mapping) or "kind" in data:
        return data
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return {**data, "kind": default.kind} if dataclasses.is_dataclass(default) and hasattr(default, "kind") else data


# ---------------------------------------------------------------- fingerprints

# Fields that fingerprints contain only if they differ from these defaults: those of earlier versions stay valid.
LATER_FIELDS: Mapping[str, Any] = {
    **dict.fromkeys(("latent", "query_scaling", "num_distinct_layers", "shared_size", "sparsemixer_jitter")),
    **dict.fromkeys(("value_norm", "values_from_keys", "output_scale", "selection_bias", "shared_gate"), False),
    "output_gate": False,
    **dict.fromkeys(("num_groups", "num_groups_per_token", "routed_scale"), 1),
    "renormalize": True,
}


def is_later_default(name: str, value: object) -> bool:
    """Return True for a field of ``LATER_FIELDS``, by its dotted name, that has its default."""
    field = name.rpartition(".")[2]
    return field in LATER_FIELDS and value == LATER_FIELDS[field]
