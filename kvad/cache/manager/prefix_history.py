"""Recent history of the prefix cache: what prompts found, why they did not find more, and what evicted their blocks.

Written at an admission and when a published block is evicted, never per token, and bounded. A reason depends only on
requests under the same prefix root (API key, salt, adapter): no request learns what another root has cached. No torch.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvad.cache.manager.prefix_index import PrefixNode

MAX_EVENTS = 64
MAX_EVICTED = 1 << 14  # evicted blocks whose eviction is known
MAX_ROOTS = 1 << 12

# What needed the space of an evicted block: new tokens of a sequence, blocks from the block store, a swapped sequence,
# or an encoder input.
EvictionCause = Literal["tokens", "load", "swap-in", "input"]


class PrefixLookup(NamedTuple):
    """Result of an admission's lookup.

    ``reason`` is why the next block of the prompt was computed: "" (there is no further full block), "short" (no full
    block before the last token), "root" (the first prompt under this prefix root), "new" (no earlier prompt continues
    like this), "evicted", "window" (needed blocks left a window), "scores" (log-probabilities of the prompt are
    requested), "off" (this cache shares no blocks), or a reason of the block store.
    """

    num_ram_tokens: int = 0  # loaded from RAM
    num_disk_tokens: int = 0  # loaded from disk
    reason: str = ""
    cause: EvictionCause | None = None  # of an eviction


@dataclass(slots=True)
class EvictionEvent:
    """Published blocks that were evicted for one request and cause."""

    time: float  # of the last eviction
    cause: EvictionCause
    request_id: int  # that needed the space; -1 if it is unknown
    num_blocks: int = 0


class PrefixHistory:
    """Evictions, and the roots under which blocks were published.

    Attributes:
        cause: Cause of an eviction now, set before blocks are allocated.
        request_id: Request that the blocks are allocated for.
        lookup: Result of the last admission.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.cause: EvictionCause = "tokens"
        self.request_id = -1
        self.lookup = PrefixLookup()
        self._events: OrderedDict[tuple[EvictionCause, int], EvictionEvent] = OrderedDict()
        self._evicted: OrderedDict[bytes, EvictionCause] = OrderedDict()
        self._roots: OrderedDict[bytes, None] = OrderedDict()

    @contextmanager
    def allocating(self, cause: EvictionCause, request_id: int) -> Iterator[None]:
        """Set the cause of evictions in this context."""
        before = self.cause, self.request_id
        self.cause, self.request_id = cause, request_id
        try:
            yield
        finally:
            self.cause, self.request_id = before

    def on_evicted(self, prefix: PrefixNode) -> None:
        """Record that a pool evicts a published block."""
        now, key = self._clock(), (self.cause, self.request_id)
        event = self._events.get(key)
        if event is None:
            event = self._events[key] = EvictionEvent(now, *key)
            if len(self._events) > MAX_EVENTS:
                self._events.popitem(last=False)
        event.num_blocks += 1
        event.time = now
        self._evicted[prefix.digest] = self.cause
        self._evicted.move_to_end(prefix.digest)
        if len(self._evicted) > MAX_EVICTED:
            self._evicted.popitem(last=False)

    @property
    def evictions(self) -> tuple[EvictionEvent, ...]:
        """The evictions for the last requests that needed space, one event per request and cause."""
        return tuple(self._events.values())

    def eviction_cause(self, digest: bytes) -> EvictionCause | None:
        """Return the cause of a block's last eviction, if it is known."""
        return self._evicted.get(digest)

    def add_root(self, root: PrefixNode) -> None:
        """Record that a first block was published under a root."""
        self._roots[root.digest] = None
        if len(self._roots) > MAX_ROOTS:
            self._roots.popitem(last=False)

    def has_root(self, root: PrefixNode) -> bool:
        return root.digest in self._roots
