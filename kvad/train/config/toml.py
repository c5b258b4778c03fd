"""A run's configuration as a run file: readable TOML that reads back as the same run.

Every key stands in it with the value that the run had, also those that nobody said; tables that mean nothing to it are
left out.  TOML has no null: in [model] it is the text "null", elsewhere a key that is null is left out, which is what
null means there.  Standard library only; it is read by ``tomllib``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvad.train.config.run import RunConfig

RUN_FILE = "run.toml"
HEAD = "# What this run was configured as."

BARE = re.compile(r"[A-Za-z0-9_-]+")


def format_run_file(config: RunConfig, corpus: Any = None) -> str:
    """``kvad train FILE CORPUS --out FOLDER`` trains so again.  ``corpus``: what it was trained on, as a comment."""
    tables = config.to_dict()
    compressing = config.objective.kind == "compress"
    unused = {"compress": not compressing, "model": compressing, "tokenizer": compressing or config.init is not None}
    kept = {
        name: _nulls(table) if name == "model" else _drop_none(table)
        for name, table in tables.items()
        if not unused.get(name, False) or (name == "tokenizer" and config.tokenizer.path is not None)
    }
    head = f"{HEAD}  Again:  kvad train run.toml CORPUS --out FOLDER\n"
    if corpus is not None:
        head += f"# CORPUS was {json.dumps(corpus)}\n"
    return head + "\n" + dumps(kept)


def is_run_file(path: Path) -> bool:
    """Whether :func:`run_file` wrote it."""
    try:
        return path.read_bytes().startswith(HEAD.encode())
    except OSError:
        return False


def _drop_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _drop_none(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None
    }


def _nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _nulls(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_nulls(inner) for inner in value]
    return "null" if value is None else value


def dumps(content: Mapping[str, Any]) -> str:
    """TOML that ``tomllib`` reads back as ``content``: text, numbers, booleans, lists, and tables of them.

    Raises ValueError for what TOML cannot say: null, half a surrogate pair, other types.
    """
    text = "\n".join(_table(content, ())).strip("\n")
    return text + "\n" if text else ""


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Its plain keys first, then the tables in it."""
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    if path and (plain or not inner):
        yield f"\n[{'.'.join(map(_key, path))}]"
    for key, value in plain.items():
        yield f"{_key(key)} = {_value(value)}"
    for key, value in inner.items():
        yield from _table(value, (*path, key))


def _key(key: str) -> str:
    return key if BARE.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    raise ValueError(f"TOML cannot say {value!r}")


def _text(text: str) -> str:
    """A basic string: JSON's escapes are TOML's, but that DEL must be escaped too."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"TOML cannot say {text!r}") from error
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
