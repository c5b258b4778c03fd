"""Run configurations as TOML text that reads back as the same run.

Every key has the value that the run used, defaults included; tables without meaning for the run are left out. TOML has
no null: in [model] it is the text "null", elsewhere the key is left out, which means null there. Standard library only;
it is read by ``tomllib``.
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
HEAD = "# Configuration of this run."

BARE = re.compile(r"[A-Za-z0-9_-]+")


def format_run_file(config: RunConfig, corpus: Any = None) -> str:
    """Format a run's configuration as TOML; ``corpus`` is added as a comment."""
    tables = config.to_dict()
    is_summarizer = config.objective.kind == "summarizer"
    unused = {
        "summarizer": not is_summarizer,
        "model": is_summarizer,
        "tokenizer": is_summarizer or config.init is not None,
    }
    used = {
        name: _nulls(table) if name == "model" else _drop_none(table)
        for name, table in tables.items()
        if not unused.get(name, False) or (name == "tokenizer" and config.tokenizer.path is not None)
    }
    head = f"{HEAD}  Repeat:  kvad train run.toml CORPUS --out FOLDER\n"
    if corpus is not None:
        head += f"# CORPUS: {json.dumps(corpus)}\n"
    return head + "\n" + dumps(used)


def is_run_file(path: Path) -> bool:
    """Return True for a file written by ``format_run_file``."""
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
    """Format text, numbers, booleans, lists and tables as TOML for ``tomllib``.

    Raises:
        ValueError: For null, half a surrogate pair and other types.
    """
    text = "\n".join(_table(content, ())).strip("\n")
    return text + "\n" if text else ""


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Yield plain keys first, then inner tables."""
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
        inner = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    raise ValueError(f"TOML has no form for {value!r}")


def _text(text: str) -> str:
    """Format a basic string: JSON's escapes are TOML's, except that DEL must be escaped too."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"TOML has no form for {text!r}") from error
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
