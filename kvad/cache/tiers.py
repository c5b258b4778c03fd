"""The tiers: where published blocks live on when the pool has none left for them, or the process is no more.

    pool  --evicted-->  RAM (as it was, then packed: attic.py)
      \\--published-->  disk (shelf.py): written through, so that little is lost whenever the process ends

A waiting row is brought what it needs by threads that read; another one writes and packs.  The step's own thread
never waits for either: it asks :meth:`Tiers.has` (an index in memory), takes tickets and polls them.

What is given back is what was stored: every byte under a checksum on disk, and its name (``deposits.Name``: the block's
tokens, and a proof of all before it) and the ``identity`` of weights and formats compared.  Whatever does not match,
and whatever fails, is a miss with a reason, from there on the row computes.

Never: a wait for a disk in ``has``, ``load``, ``wants``, ``give``, ``take``, ``lend`` or ``drop``; a piece that a live
row writes into: Memory copies.  No torch.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvad.cache.attic import Attic, AtticStats
from kvad.cache.config import TIER_QUEUE
from kvad.cache.deposits import Name, Ticket
from kvad.cache.disk import Buffer
from kvad.cache.entry import Header, Section
from kvad.cache.identity import Identity
from kvad.cache.shelf import Shelf, ShelfStats
from kvad.cache.worker import Worker
from kvad.errors import EntryError

__all__ = ["KIND", "TierStats", "Tiers", "space"]

KIND = "block"
READERS = 4  # threads: one waits for the disk while others sum up what came
LAST_WORDS = 30.0  # seconds for what waits to be written when all ends
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class TierStats:
    """Bytes copied ``out`` of the pool and ``into`` it; ``late``: blocks that were not written because too many waited
    to be; ``waiting``: bytes that do."""

    ram: AtticStats
    disk: ShelfStats
    out: int
    into: int
    late: int
    waiting: int


def space(identity: Identity) -> str:
    """The first part of a key on the shelf: blocks of other identities stand there under other keys."""
    return identity.digest()[:6].hex()


class Tiers:
    """``sizes``, ``widths``: bytes of one block, and of one number, of each group that takes tokens.  ``identity``: of
    what is stored on the shelf, but for what the root of a row's chain says (salt, regime, source)."""

    def __init__(
        self,
        sizes: Sequence[int],
        widths: Sequence[int],
        *,
        ram: int | None = None,
        shelf: Shelf | None = None,
        identity: Identity | None = None,
        queue: int = TIER_QUEUE,
    ) -> None:
        assert shelf is None or identity is not None, "what is stored on a shelf belongs to something"
        self._sizes, self._shelf, self._queue = tuple(sizes), shelf, queue
        self._attic = None if ram is None else Attic(ram, widths)
        self._identity = Identity() if identity is None else identity
        self._space = space(self._identity)
        self._changed = threading.Condition(threading.RLock())
        self._numbers = itertools.count()
        self._wanted: dict[int, tuple[Name, int]] = {}  # what Memory will hand over; bytes to be written, 0: evicted
        self._lent: dict[int, Mapping[int, Buffer]] = {}
        self._writing: dict[str, tuple[Name, Mapping[int, Buffer], int]] = {}  # by key
        self._coming: set[str] = set()  # keys that will be written, once they were handed over
        self._dropped: dict[str, int] = {}  # keys that are still to be removed from the shelf
        self._tickets: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._coming_in = 0  # tickets that are not done
        self._late = self._waiting = self._out = self._into = 0
        self._readers = tuple(Worker(f"kvad-tier-read-{number}") for number in range(READERS))
        self._next = itertools.cycle(self._readers)
        self._writer = Worker("kvad-tier-write")
        self._stop = weakref.finalize(self, _stop, self._readers, self._writer, shelf)

    # ------------------------------------------------------------ for the ledger

    def has(self, key: str) -> bool:
        with self._changed:
            if key in self._dropped:
                return False
            ram = self._attic is not None and self._attic.has(key)
            return ram or key in self._writing or (self._shelf is not None and self._on_shelf(key) in self._shelf)

    def load(self, name: Name, groups: tuple[int, ...]) -> Ticket:
        """A ticket for these groups of a block; it is done when :attr:`Ticket.done` says so."""
        ticket = Ticket(name, groups)
        with self._changed:
            if name.key in self._dropped:
                ticket.failed("withdrawn")
                return ticket
            self._tickets.add(ticket)
            writing = self._writing.get(name.key)
            kept = None if self._attic is None else self._attic.get(name, groups)
            if kept is not None and self._attic is not None:
                opening = self._attic.opening(kept, groups)
                ticket.packed = any(group in kept.packed for group in groups)
                if kept.packed:
                    self._coming_in += 1
                    next(self._next).put(partial(_unpack, weakref.ref(self), opening, ticket))
                else:
                    ticket.came(opening(), "ram")
            elif writing is not None and writing[0] == name and all(group in writing[1] for group in groups):
                ticket.came({group: writing[1][group] for group in groups}, "ram")
            elif self._shelf is not None and self._on_shelf(name.key) in self._shelf:
                self._coming_in += 1
                next(self._next).put(partial(_read, weakref.ref(self), self._shelf, ticket))
            else:
                ticket.failed("gone")
        return ticket

    def wants(self, name: Name, groups: tuple[int, ...], *, evicted: bool) -> int | None:
        with self._changed:
            size = 0
            if name.key in self._dropped or not groups:
                return None
            if evicted:
                if self._attic is None or self._attic.get(name, groups) is not None:
                    return None
            else:
                if self._shelf is None or not self._shelf.writable or name.key in self._coming:
                    return None
                if name.key in self._writing or self._on_shelf(name.key) in self._shelf:
                    return None
                size = sum(self._sizes[group] for group in groups)
                if self._waiting and self._waiting + size > self._queue:
                    self._late += 1
                    return None
                self._coming.add(name.key)
                self._waiting += size
            number = next(self._numbers)
            self._wanted[number] = name, size
            return number

    def cancel(self, number: int) -> None:
        """What was wanted will not come, or what was lent is not asked for; nothing happens where it was."""
        with self._changed:
            self._lent.pop(number, None)
            if number in self._wanted:
                self._unwant(number)

    def lend(self, pieces: Mapping[int, Buffer]) -> int:
        with self._changed:
            number = next(self._numbers)
            self._lent[number] = pieces
            return number

    def drop(self, key: str) -> None:
        """Withdrawn everywhere, also what is on its way in or out."""
        with self._changed:
            for ticket in list(self._tickets):
                if ticket.name.key == key:
                    ticket.failed("withdrawn")
            for number in [number for number, (name, _) in self._wanted.items() if name.key == key]:
                self._unwant(number)
            if self._attic is not None:
                self._attic.drop(key)
            if self._shelf is None:
                return
            self._unqueue(key)
            self._dropped[key] = self._dropped.get(key, 0) + 1
            self._writer.put(partial(_remove, weakref.ref(self), self._shelf, self._on_shelf(key), key))

    # ------------------------------------------------------------ for Memory

    def give(self, number: int, pieces: Mapping[int, Buffer]) -> None:
        """What was wanted.  The pieces are the tiers' from now on."""
        with self._changed:
            wanted = self._wanted.pop(number, None)
            if wanted is None:
                return  # withdrawn meanwhile
            name, size = wanted
            assert all(memoryview(piece).nbytes == self._sizes[group] for group, piece in pieces.items())
            self._out += sum(self._sizes[group] for group in pieces)
            if not size:
                assert self._attic is not None
                if self._attic.put(name, pieces) is not None:
                    self._writer.put(partial(_pack, weakref.ref(self), self._attic))
                return
            self._coming.discard(name.key)
            self._writing[name.key] = name, pieces, size
            assert self._shelf is not None
            self._writer.put(partial(_write, weakref.ref(self), self._shelf, name))

    def take(self, number: int) -> Mapping[int, Buffer]:
        """What was lent: to be copied, never to be written."""
        with self._changed:
            lent = self._lent.pop(number)
            self._into += sum(memoryview(piece).nbytes for piece in lent.values())
            return lent

    # ------------------------------------------------------------ for who has nothing else to do

    def wait(self, seconds: float) -> None:
        """Until nothing is on its way any more, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._coming_in, seconds)

    @property
    def on_disk(self) -> bool:
        """Is there a folder, and is it written to?"""
        return self._shelf is not None and self._shelf.writable

    @property
    def folder(self) -> Path:
        assert self._shelf is not None, "there is no folder"
        return self._shelf.folder

    def keep(self, keys: Sequence[str]) -> list[str]:
        """Write what waits, flush these blocks to the disk and pin them beside what is pinned; their names on the
        shelf. OSError as the disk says it; EntryError: one of them is not there."""
        assert self._shelf is not None, "nothing is kept without a shelf"
        self.flush()
        stored = [self._on_shelf(key) for key in keys]
        self._shelf.keep(stored)
        return stored

    def flush(self, seconds: float = LAST_WORDS) -> bool:
        """Until all that was given is written; False: it took longer."""
        return self._writer.wait(seconds)

    def close(self) -> None:
        """Write what waits, and let the folder go."""
        self._stop()

    def stats(self) -> TierStats:
        with self._changed:
            ram = AtticStats() if self._attic is None else self._attic.stats()
            disk = ShelfStats() if self._shelf is None else self._shelf.stats()
            return TierStats(ram, disk, self._out, self._into, self._late, self._waiting)

    # ------------------------------------------------------------ for the threads

    def _on_shelf(self, key: str) -> str:
        return f"{self._space}-{key}"

    def _unwant(self, number: int) -> None:
        name, size = self._wanted.pop(number)
        self._waiting -= size
        if size:
            self._coming.discard(name.key)

    def _unqueue(self, key: str) -> tuple[Name, Mapping[int, Buffer]] | None:
        found = self._writing.pop(key, None)
        if found is None:
            return None
        self._waiting -= found[2]
        return found[0], found[1]

    def written(self, shelf: Shelf, name: Name) -> None:
        with self._changed:
            found = self._writing.get(name.key)
        if found is None or found[0] != name:
            return  # withdrawn meanwhile
        sections = [Section(str(g), "uint8", (memoryview(p).nbytes,), p) for g, p in sorted(found[1].items())]
        facts = {"parent": name.parent, "tokens": name.tokens.hex()}
        try:
            shelf.put(self._on_shelf(name.key), KIND, self._identity.parts, facts, sections)
        finally:  # whatever happened, it does not wait any more
            with self._changed:
                if self._writing.get(name.key) is found:
                    self._unqueue(name.key)

    def removed(self, key: str) -> None:
        with self._changed:
            self._dropped[key] -= 1
            if not self._dropped[key]:
                del self._dropped[key]

    def arrived(self, ticket: Ticket, pieces: Mapping[int, Buffer] | None, place: str, why: str = "") -> None:
        with self._changed:
            if not ticket.done:
                if pieces is None:
                    ticket.failed(why)
                else:
                    ticket.came(pieces, place)
            self._coming_in -= 1
            if not self._coming_in:
                self._changed.notify_all()

    def read(self, shelf: Shelf, ticket: Ticket) -> None:
        if ticket.done:  # withdrawn meanwhile
            self.arrived(ticket, None, "")
            return
        try:
            pieces = shelf.get(self._on_shelf(ticket.name.key), partial(self._checked, ticket))
        except EntryError as error:
            self.arrived(ticket, None, "", error.why)
        except OSError:
            self.arrived(ticket, None, "", "failed")
        except BaseException:  # a bug, or no memory: the worker says which; whoever waits must hear of it
            self.arrived(ticket, None, "", "failed")
            raise
        else:
            self.arrived(ticket, pieces, "disk")

    def _checked(self, ticket: Ticket, header: Header, section: Callable[[str], memoryview]) -> dict[int, Buffer]:
        """The pieces of an entry that is this very block.  EntryError: it is another's."""
        name = ticket.name
        differs = ", ".join(self._identity.differs(header.identity))
        if header.kind != KIND or differs:
            raise EntryError(f"a stored block is of another kind or model: {differs}", why="other")
        if header.facts.get("parent") != name.parent or header.facts.get("tokens") != name.tokens.hex():
            raise EntryError("a stored block holds other tokens", why="collision")
        for group in ticket.groups:
            stored = header.sections.get(str(group))
            if stored is not None and stored.nbytes != self._sizes[group]:
                raise EntryError("a stored block has another size", why="other")
        return {group: section(str(group)) for group in ticket.groups if str(group) in header.sections}

    def pack(self, attic: Attic) -> None:
        while True:
            with self._changed:
                kept = attic.oldest()
                if kept is None:
                    return
                job = attic.packing(kept)
            done = job()
            with self._changed:
                attic.packed(kept, done)


# The threads hold no tiers while they wait: whoever forgets to close them is not kept alive by that.


def _write(tiers: weakref.ref[Tiers], shelf: Shelf, name: Name) -> None:
    found = tiers()
    if found is not None:
        found.written(shelf, name)


def _remove(tiers: weakref.ref[Tiers], shelf: Shelf, stored: str, key: str) -> None:
    try:
        shelf.drop(stored)
    finally:
        found = tiers()
        if found is not None:
            found.removed(key)


def _read(tiers: weakref.ref[Tiers], shelf: Shelf, ticket: Ticket) -> None:
    found = tiers()
    if found is not None:
        found.read(shelf, ticket)


def _unpack(tiers: weakref.ref[Tiers], opening: Callable[[], Mapping[int, Buffer]], ticket: Ticket) -> None:
    pieces = None
    try:
        pieces = opening()
    finally:
        found = tiers()
        if found is not None:
            found.arrived(ticket, pieces, "ram", "failed")


def _pack(tiers: weakref.ref[Tiers], attic: Attic) -> None:
    found = tiers()
    if found is not None:
        found.pack(attic)


def _stop(readers: Sequence[Worker], writer: Worker, shelf: Shelf | None) -> None:
    for reader in readers:
        reader.stop(1.0)
    if not writer.stop(LAST_WORDS):
        LOG.warning("not all blocks were written to the tier in %.0f s", LAST_WORDS)
    if shelf is not None:
        with suppress(OSError):
            shelf.release()
