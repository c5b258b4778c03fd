"""What the tasks of ``kvad eval`` share: the cache that was asked for, the model behind it, a line of progress."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from kvad.cli.common import explicit_options
from kvad.cli.evaluate_page import TextLine
from kvad.cli.policies import parse_policy_options
from kvad.cli.running import parse_format_options

if TYPE_CHECKING:
    from kvad.checkpoint.open import CheckpointHandle
    from kvad.lab.reading import TokenScorer
    from kvad.llm import LLM

__all__ = ["EvalProgress", "cache_options_given", "build_cached_scorer", "load_for_eval", "describe_cache"]


def cache_options_given(options: Mapping[str, Any]) -> dict[str, Any]:
    """What was said of the cache, as keywords of LLM.load; {} where nothing was."""
    said = explicit_options(options, ("layout", "block_size", "chunk", "compressor", "rows"))
    said = {**said, **parse_format_options(options), **parse_policy_options(options)}
    return said or ({"layout": "paged"} if options["cached"] else {})


def load_for_eval(
    opened: CheckpointHandle, options: Mapping[str, Any], *, rows: int, capacity: int, answers: bool = False
) -> LLM:
    """With the cache that was asked for; else the smallest that will do, or for ``answers`` one of ``rows`` rows."""
    from kvad.llm import LLM

    said = cache_options_given(options)
    fields: dict[str, Any] = {"prefix": False, "chunk": 16, "rows": rows, "capacity": capacity, **said}
    if not said:
        reads = opened.config.kind == "decoder" and not answers  # without a cache: one that holds next to nothing
        fields = {"rows": 1, "capacity": 1} if reads else {"rows": rows, "capacity": capacity}
    fields["chunk"] = min(fields.get("chunk", 512), fields["capacity"])
    chosen = {name: options[name] for name in ("dtype", "deterministic", "adapter")}
    return LLM.load(opened.path, **chosen, **fields)


def build_cached_scorer(llm: LLM) -> TokenScorer:
    from kvad.lab.reading import CachedScorer

    return CachedScorer(llm.engine)


def describe_cache(llm: LLM) -> TextLine:
    from kvad.cache.formats import join_format_names

    cache, group = llm.engine.cache, llm.engine.kv_cache_manager.groups[0]
    stored = join_format_names(group.key_format, group.value_format)
    return {"policy": cache.policy, "stored": stored, "layout": cache.layout, "chunk": cache.prefill_chunk_size}


class EvalProgress:
    """A line on stderr where that is a terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self._shown = not quiet and sys.stderr.isatty()

    def update(self, what: str, done: int, total: int) -> None:
        if self._shown:
            click.echo(f"\r{what:<36} {done:>11,} of {total:,} ", err=True, nl=False)

    def done(self) -> None:
        if self._shown:
            click.echo(f"\r{'':<72}\r", err=True, nl=False)

    def __enter__(self) -> EvalProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.done()
