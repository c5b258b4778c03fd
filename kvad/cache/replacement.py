"""Which entry of a full shelf goes first: the least recently used (:class:`Lru`), or :class:`Arc`, which also knows
what was used more than once, so that a long text read once does not push out what everybody asks for.

ARC after Megiddo and Modha 2003 (USENIX FAST, fig. 4), for entries of unequal size: where they count pages, this counts
bytes.  Two lists of what is there (``once``, ``often``), two of what has just gone; a return of something that has just
gone moves ``target``, the bytes that ``once`` may keep.

Both know keys and sizes only; whoever holds the entries says when one is added, used, evicted or gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

__all__ = ["EVICTION_ORDERS", "ARCOrder", "LRUOrder", "EvictionOrder"]


class LRUOrder:
    """The order of a shelf of ``limit`` bytes; ``sizes``: what is there."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.sizes: OrderedDict[str, int] = OrderedDict()

    def add(self, key: str, size: int) -> None:
        self.sizes[key] = size
        self.sizes.move_to_end(key)

    def touch(self, key: str) -> None:
        self.sizes.move_to_end(key)

    def remove(self, key: str) -> None:
        """It was taken away, not evicted."""
        del self.sizes[key]

    def evict(self, key: str) -> None:
        del self.sizes[key]

    def victims(self) -> Iterator[str]:
        """What goes first, first."""
        yield from self.sizes


class _Queue(OrderedDict[str, int]):
    """Keys in the order of their last use, and their bytes."""

    total = 0

    def put(self, key: str, size: int) -> None:
        self[key] = size
        self.total += size

    def drop(self, key: str) -> int:
        size = self.pop(key)
        self.total -= size
        return size


class ARCOrder(LRUOrder):
    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.once, self.often, self.left_once, self.left_often = (_Queue() for _ in range(4))
        self.target = 0

    def add(self, key: str, size: int) -> None:
        super().add(key, size)
        if key in self.left_once:  # it went too early: more room for what was used once
            more = max(size, size * self.left_often.total // max(1, self.left_once.total))
            self.target = min(self.limit, self.target + more)
            self.left_once.drop(key)
            self.often.put(key, size)
        elif key in self.left_often:
            less = max(size, size * self.left_once.total // max(1, self.left_often.total))
            self.target = max(0, self.target - less)
            self.left_often.drop(key)
            self.often.put(key, size)
        else:
            self.once.put(key, size)
        self._forget()

    def touch(self, key: str) -> None:
        super().touch(key)
        self.often.put(key, self._out(key))
        self.often.move_to_end(key)

    def remove(self, key: str) -> None:
        super().remove(key)
        self._out(key)

    def evict(self, key: str) -> None:
        super().evict(key)
        left = self.left_once if key in self.once else self.left_often
        left.put(key, self._out(key))
        self._forget()

    def victims(self) -> Iterator[str]:
        first, then = (self.once, self.often) if self.once.total > self.target else (self.often, self.once)
        yield from first
        yield from then

    def _out(self, key: str) -> int:
        return (self.once if key in self.once else self.often).drop(key)

    def _forget(self) -> None:
        """What has gone is remembered for as many bytes as the shelf holds."""
        while self.left_once and self.once.total + self.left_once.total > self.limit:
            self.left_once.drop(next(iter(self.left_once)))
        every = (self.once, self.often, self.left_once, self.left_often)
        while self.left_often and sum(each.total for each in every) > 2 * self.limit:
            self.left_often.drop(next(iter(self.left_often)))


EvictionOrder = LRUOrder
EVICTION_ORDERS: Mapping[str, type[LRUOrder]] = {"lru": LRUOrder, "arc": ARCOrder}
