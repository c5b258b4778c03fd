"""What the tasks of ``kvad eval`` share: the cache that was asked for, the model behind it, a line of progress."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from kvad.cli.common import given
from kvad.cli.evaluate_page import Line
from kvad.cli.policies import policies_asked
from kvad.cli.running import formats_asked

if TYPE_CHECKING:
    from kvad.checkpoint.open import Opened
    from kvad.lab.reading import Reader
    from kvad.llm import LLM

__all__ = ["Progress", "cached", "cached_reader", "load", "memory"]


def cached(options: Mapping[str, Any]) -> dict[str, Any]:
    """What was said of the cache, as keywords of LLM.load; {} where nothing was."""
    said = given(options, ("layout", "block_size", "chunk", "compressor", "rows"))
    said = {**said, **formats_asked(options), **policies_asked(options)}
    return said or ({"layout": "paged"} if options["cached"] else {})


def load(opened: Opened, options: Mapping[str, Any], *, rows: int, capacity: int, answers: bool = False) -> LLM:
    """With the cache that was asked for; else the smallest that will do, or for ``answers`` one of ``rows`` rows."""
    from kvad.llm import LLM

    said = cached(options)
    fields: dict[str, Any] = {"prefix": False, "chunk": 16, "rows": rows, "capacity": capacity, **said}
    if not said:
        reads = opened.config.kind == "decoder" and not answers  # without a cache: one that holds next to nothing
        fields = {"rows": 1, "capacity": 1} if reads else {"rows": rows, "capacity": capacity}
    fields["chunk"] = min(fields.get("chunk", 512), fields["capacity"])
    chosen = {name: options[name] for name in ("dtype", "deterministic", "adapter")}
    return LLM.load(opened.path, **chosen, **fields)


def cached_reader(llm: LLM) -> Reader:
    from kvad.lab.reading import Cached

    return Cached(llm.engine)


def memory(llm: LLM) -> Line:
    from kvad.cache.formats import joined

    cache, group = llm.engine.cache, llm.engine.ledger.groups[0]
    stored = joined(group.keys, group.values)
    return {"policy": cache.policy, "stored": stored, "layout": cache.layout, "chunk": cache.chunk}


class Progress:
    """A line on stderr where that is a terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self._shown = not quiet and sys.stderr.isatty()

    def tell(self, what: str, done: int, total: int) -> None:
        if self._shown:
            click.echo(f"\r{what:<36} {done:>11,} of {total:,} ", err=True, nl=False)

    def done(self) -> None:
        if self._shown:
            click.echo(f"\r{'':<72}\r", err=True, nl=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.done()
