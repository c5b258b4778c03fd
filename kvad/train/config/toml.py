"""Run configurations as TOML text that reads back as the same run.

Every key has the value that the run used, defaults included; tables without meaning for the run are left out. TOML has
no null: in [model] it is the text "null", elsewhere the key is left out, which means null there. Standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvad import storage
from kvad.train.config.run import RunConfig

RUN_FILE = "run.toml"
HEAD = "# Configuration of this run."
BARE = re.compile(r"[A-Za-z0-9_-]+")


def format_run_file(config: RunConfig, corpus: Any = None) -> str:
    """Format a run's configuration as TOML; ``corpus`` is added as a comment."""
    tables = config.to_dict()
    unused = {"model", "tokenizer"} if config.objective.kind == "summarizer" else {"summarizer"}
    if config.tokenizer.path is not None:
        unused.discard("tokenizer")
    elif config.init is not None:
        unused.add("tokenizer")
    nulls = {"model": "null"}
    used = {name: _without_nulls(tables[name], nulls.get(name)) for name in tables if name not in unused}
    corpus_line = "" if corpus is None else f"# CORPUS: {json.dumps(corpus)}\n"
    return f"{HEAD}  Repeat:  kvad train run.toml CORPUS --out FOLDER\n{corpus_line}\n{dumps(used)}"


def is_run_file(path: Path) -> bool:
    """Return True for a file written by ``format_run_file``."""
    try:
        return storage.filesystem.read_bytes(path).startswith(HEAD.encode())
    except OSError:
        return False


def _without_nulls(value: Any, replacement: str | None = None) -> Any:
    """Replace nulls, or leave their keys out if there is no replacement."""
    if isinstance(value, Mapping):
        values = {key: _without_nulls(inner, replacement) for key, inner in value.items()}
        return {key: inner for key, inner in values.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(inner, replacement) for inner in value]
    return replacement if value is None else value


def dumps(content: Mapping[str, Any]) -> str:
    """Format tables as TOML for ``tomllib``; raise ValueError for null, half a surrogate pair and other types."""
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
    if isinstance(value, int | float):
        return repr(value)
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
