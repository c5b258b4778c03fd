"""Conversion between JSON values and nested frozen dataclasses.

No key is ignored: an unknown key, a missing key and a value of another type raise ConfigError with the dotted key and
the nearest known one. The ``kind`` field selects the class in a union of dataclasses. Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from kvad.config.validation import check_value
from kvad.errors import ConfigError, suggest

T = TypeVar("T")


def to_dict(value: Any) -> Any:
    """Convert nested dataclasses, mappings and tuples to JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_dict(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_dict(item) for item in value]
    return value


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
    if origin is tuple:
        if not isinstance(data, (list, tuple)):
            raise ConfigError(f"{where}: must be a list, got {data!r}")
        return tuple(_read(typing.get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(data, Mapping):
            raise ConfigError(f"{where}: must be an object, got {data!r}")
        return {key: _read(typing.get_args(kind)[1], item, f"{where}.{key}") for key, item in data.items()}
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(typing.cast("type[Any]", kind), data, where)
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        data = float(data)
    check_value(kind, data, where)
    return data


def _read_union(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in kinds:
        return None
    classes = [k for k in kinds if dataclasses.is_dataclass(k)]
    if classes and isinstance(data, Mapping):
        by_kind = {_kind_name(k): k for k in classes}
        if len(classes) == 1:
            return _read(classes[0], data, where)
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
    raise ConfigError(errors[0] if errors else f"{where}: must be {expected}, got {data!r}")


def _kind_name(cls: Any) -> str:
    return str(next((f.default for f in dataclasses.fields(cls) if f.name == "kind"), cls.__name__))


def _read_dataclass(cls: type[Any], data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or cls.__name__}: must be an object, got {data!r}")
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
