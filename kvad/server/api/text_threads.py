"""Threads that encode and decode texts: one for large texts, others for the rest, so that small requests never wait.

The tokenizers of ``tokenizer.json`` release the interpreter's lock while they encode. Others hold it for up to 0.2 s
per million characters, and while they decode, all do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from kvad.server.api.errors import ApiError

T = TypeVar("T")
LARGE = 1 << 16  # characters or tokens, which take about 50 ms
SLICE = 4096  # items of a list in JSON, which take about 1 ms
NUM_THREADS = 8  # for other texts; renders of templates wait in them, too


class TextThreads:
    """Runs functions on texts in threads.

    Args:
        max_large: Largest number of large texts that wait or are encoded.
    """

    def __init__(self, max_large: int) -> None:
        self._small, self._large = ThreadPoolExecutor(NUM_THREADS, "text"), ThreadPoolExecutor(1, "large-text")
        self._max_large = max_large
        self._large_calls: list[Future[Any]] = []

    async def run(self, size: int, function: Callable[..., T], *args: Any, **settings: Any) -> T:
        """Return the result of a function; a request that is cancelled while it waits is never run.

        Args:
            size: Number of characters or tokens.
            function: Called in a thread.
            *args: Its arguments.
            **settings: Its keywords.

        Raises:
            ApiError: 429 if too many large texts wait.
        """
        is_large = size >= LARGE
        if is_large:
            self._large_calls = [call for call in self._large_calls if not call.done()]
            if len(self._large_calls) >= self._max_large:
                message = f"{len(self._large_calls)} large texts are being encoded, the limit is {self._max_large}"
                raise ApiError(429, f"{message}: try again", code="queue_full", retry_after=1)
        call = (self._large if is_large else self._small).submit(partial(function, *args, **settings))
        if is_large:
            self._large_calls.append(call)
        return await asyncio.wrap_future(call)


def encode_json(fields: Mapping[str, Any]) -> bytes:
    """Return an object as JSON; other threads run between slices of its lists, and ``json.dumps`` stops them."""
    members = []
    for name, value in fields.items():
        slices = (
            [value[start : start + SLICE] for start in range(0, len(value), SLICE)] if isinstance(value, list) else []
        )
        text = f"[{','.join(json.dumps(each)[1:-1] for each in slices)}]" if slices else json.dumps(value)
        members.append(f"{json.dumps(name)}:{text}")
    return f"{{{','.join(members)}}}".encode()


def encode_slowly(value: Any) -> bytes:
    """Return a value as JSON, written item by item in Python, so that other threads run in between."""
    return "".join(json.JSONEncoder(separators=(",", ":")).iterencode(value)).encode()


def count_chars(value: Any) -> int:
    """Return the number of characters of all texts of a JSON value, with its keys."""
    count, pending = 0, [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            count += len(each)
        elif isinstance(each, dict):
            pending += [*each.keys(), *each.values()]
        elif isinstance(each, list):
            pending += each
    return count
