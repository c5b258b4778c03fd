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

from kvad import storage
from kvad.cache import manager
from kvad.cache.config import WRITE_QUEUE_BYTES
from kvad.cache.offload.disk_store import DiskBlockStore, DiskStoreStats
from kvad.cache.offload.ram_store import RamBlockStore, RamStoreStats
from kvad.errors import StorageError
from kvad.storage import CacheFingerprint, IoThread, Section

CONTAINER_KIND = "block"
NUM_READERS = 4  # threads: one waits for the disk while others sum up what came
CLOSE_TIMEOUT = 30.0  # seconds for what waits to be written when all ends
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class BlockStoreStats:
    """Bytes copied ``out`` of the pool and ``into`` it; ``late``: blocks that were not written because too many waited
    to be; ``waiting``: bytes that do."""

    ram: RamStoreStats
    disk: DiskStoreStats
    bytes_out: int
    bytes_in: int
    num_not_written: int
    queued_bytes: int


def key_prefix(identity: CacheFingerprint) -> str:
    """The first part of a key on the shelf: blocks of other identities stand there under other keys."""
    return identity.digest()[:6].hex()


class BlockStore:
    """``sizes``, ``widths``: bytes of one block, and of one number, of each group that takes tokens.  ``identity``: of
    what is stored on the shelf, but for what the root of a row's chain says (salt, regime, source)."""

    def __init__(
        self,
        sizes: Sequence[int],
        widths: Sequence[int],
        *,
        ram: int | None = None,
        disk: DiskBlockStore | None = None,
        identity: CacheFingerprint | None = None,
        queue: int = WRITE_QUEUE_BYTES,
    ) -> None:
        assert disk is None or identity is not None, "what is stored on a shelf belongs to something"
        self._sizes, self._disk, self._queue = tuple(sizes), disk, queue
        self._attic = None if ram is None else RamBlockStore(ram, widths)
        self._identity = CacheFingerprint() if identity is None else identity
        self._space = key_prefix(self._identity)
        self._changed = threading.Condition(threading.RLock())
        self._numbers = itertools.count()
        self._wanted: dict[
            int, tuple[manager.prefix_offload.BlockKey, int]
        ] = {}  # what Memory will hand over; bytes to be written, 0: evicted
        self._lent: dict[int, Mapping[int, storage.filesystem.Buffer]] = {}
        self._writing: dict[
            str, tuple[manager.prefix_offload.BlockKey, Mapping[int, storage.filesystem.Buffer], int]
        ] = {}  # by key
        self._coming: set[str] = set()  # keys that will be written, once they were handed over
        self._dropped: dict[str, int] = {}  # keys that are still to be removed from the shelf
        self._tickets: weakref.WeakSet[manager.prefix_offload.LoadHandle] = weakref.WeakSet()
        self._coming_in = 0  # tickets that are not done
        self._late = self._waiting = self._out = self._into = 0
        self._readers = tuple(IoThread(f"kvad-tier-read-{number}") for number in range(NUM_READERS))
        self._next = itertools.cycle(self._readers)
        self._writer = IoThread("kvad-tier-write")
        self._stop = weakref.finalize(self, _stop, self._readers, self._writer, disk)

    # ------------------------------------------------------------ for the ledger

    def has(self, key: str) -> bool:
        with self._changed:
            if key in self._dropped:
                return False
            ram = self._attic is not None and self._attic.has(key)
            return ram or key in self._writing or (self._disk is not None and self._on_shelf(key) in self._disk)

    def load(self, name: manager.prefix_offload.BlockKey, groups: tuple[int, ...]) -> manager.prefix_offload.LoadHandle:
        """A ticket for these groups of a block; it is done when :attr:`Ticket.done` says so."""
        ticket = manager.prefix_offload.LoadHandle(name, groups)
        with self._changed:
            if name.key in self._dropped:
                ticket.fail("withdrawn")
                return ticket
            self._tickets.add(ticket)
            writing = self._writing.get(name.key)
            kept = None if self._attic is None else self._attic.get(name, groups)
            if kept is not None and self._attic is not None:
                opening = self._attic.decompress_job(kept, groups)
                ticket.was_compressed = any(group in kept.compressed for group in groups)
                if kept.compressed:
                    self._coming_in += 1
                    next(self._next).restore(partial(_run_decompression, weakref.ref(self), opening, ticket))
                else:
                    ticket.complete(opening(), "ram")
            elif writing is not None and writing[0] == name and all(group in writing[1] for group in groups):
                ticket.complete({group: writing[1][group] for group in groups}, "ram")
            elif self._disk is not None and self._on_shelf(name.key) in self._disk:
                self._coming_in += 1
                next(self._next).restore(partial(_read, weakref.ref(self), self._disk, ticket))
            else:
                ticket.fail("gone")
        return ticket

    def request_copy(
        self, name: manager.prefix_offload.BlockKey, groups: tuple[int, ...], *, evicted: bool
    ) -> int | None:
        with self._changed:
            size = 0
            if name.key in self._dropped or not groups:
                return None
            if evicted:
                if self._attic is None or self._attic.get(name, groups) is not None:
                    return None
            else:
                if self._disk is None or not self._disk.writable or name.key in self._coming:
                    return None
                if name.key in self._writing or self._on_shelf(name.key) in self._disk:
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

    def stage_load(self, pieces: Mapping[int, storage.filesystem.Buffer]) -> int:
        with self._changed:
            number = next(self._numbers)
            self._lent[number] = pieces
            return number

    def drop(self, key: str) -> None:
        """Withdrawn everywhere, also what is on its way in or out."""
        with self._changed:
            for ticket in list(self._tickets):
                if ticket.name.key == key:
                    ticket.fail("withdrawn")
            for number in [number for number, (name, _) in self._wanted.items() if name.key == key]:
                self._unwant(number)
            if self._attic is not None:
                self._attic.drop(key)
            if self._disk is None:
                return
            self._unqueue(key)
            self._dropped[key] = self._dropped.get(key, 0) + 1
            self._writer.restore(partial(_remove, weakref.ref(self), self._disk, self._on_shelf(key), key))

    # ------------------------------------------------------------ for Memory

    def put(self, number: int, pieces: Mapping[int, storage.filesystem.Buffer]) -> None:
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
                    self._writer.restore(partial(_run_compression, weakref.ref(self), self._attic))
                return
            self._coming.discard(name.key)
            self._writing[name.key] = name, pieces, size
            assert self._disk is not None
            self._writer.restore(partial(_write, weakref.ref(self), self._disk, name))

    def take(self, number: int) -> Mapping[int, storage.filesystem.Buffer]:
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
        return self._disk is not None and self._disk.writable

    @property
    def folder(self) -> Path:
        assert self._disk is not None, "there is no folder"
        return self._disk.folder

    def pin_blocks(self, keys: Sequence[str]) -> list[str]:
        """Write what waits, flush these blocks to the disk and pin them beside what is pinned; their names on the
        shelf. OSError as the disk says it; EntryError: one of them is not there."""
        assert self._disk is not None, "nothing is kept without a shelf"
        self.flush()
        stored = [self._on_shelf(key) for key in keys]
        self._disk.pin(stored)
        return stored

    def flush(self, seconds: float = CLOSE_TIMEOUT) -> bool:
        """Until all that was given is written; False: it took longer."""
        return self._writer.wait(seconds)

    def close(self) -> None:
        """Write what waits, and let the folder go."""
        self._stop()

    def stats(self) -> BlockStoreStats:
        with self._changed:
            ram = RamStoreStats() if self._attic is None else self._attic.stats()
            disk = DiskStoreStats() if self._disk is None else self._disk.stats()
            return BlockStoreStats(ram, disk, self._out, self._into, self._late, self._waiting)

    # ------------------------------------------------------------ for the threads

    def _on_shelf(self, key: str) -> str:
        return f"{self._space}-{key}"

    def _unwant(self, number: int) -> None:
        name, size = self._wanted.pop(number)
        self._waiting -= size
        if size:
            self._coming.discard(name.key)

    def _unqueue(
        self, key: str
    ) -> tuple[manager.prefix_offload.BlockKey, Mapping[int, storage.filesystem.Buffer]] | None:
        found = self._writing.pop(key, None)
        if found is None:
            return None
        self._waiting -= found[2]
        return found[0], found[1]

    def on_written(self, shelf: DiskBlockStore, name: manager.prefix_offload.BlockKey) -> None:
        with self._changed:
            found = self._writing.get(name.key)
        if found is None or found[0] != name:
            return  # withdrawn meanwhile
        sections = [Section(str(g), "uint8", (memoryview(p).nbytes,), p) for g, p in sorted(found[1].items())]
        facts = {"parent": name.parent_digest, "tokens": name.tokens.hex()}
        try:
            shelf.put(self._on_shelf(name.key), CONTAINER_KIND, self._identity.parts, facts, sections)
        finally:  # whatever happened, it does not wait any more
            with self._changed:
                if self._writing.get(name.key) is found:
                    self._unqueue(name.key)

    def on_removed(self, key: str) -> None:
        with self._changed:
            self._dropped[key] -= 1
            if not self._dropped[key]:
                del self._dropped[key]

    def on_loaded(
        self,
        ticket: manager.prefix_offload.LoadHandle,
        pieces: Mapping[int, storage.filesystem.Buffer] | None,
        place: str,
        why: str = "",
    ) -> None:
        with self._changed:
            if not ticket.done:
                if pieces is None:
                    ticket.fail(why)
                else:
                    ticket.complete(pieces, place)
            self._coming_in -= 1
            if not self._coming_in:
                self._changed.notify_all()

    def read_block(self, shelf: DiskBlockStore, ticket: manager.prefix_offload.LoadHandle) -> None:
        if ticket.done:  # withdrawn meanwhile
            self.on_loaded(ticket, None, "")
            return
        try:
            pieces = shelf.get(self._on_shelf(ticket.name.key), partial(self._checked, ticket))
        except StorageError as error:
            self.on_loaded(ticket, None, "", error.reason)
        except OSError:
            self.on_loaded(ticket, None, "", "failed")
        except BaseException:  # a bug, or no memory: the worker says which; whoever waits must hear of it
            self.on_loaded(ticket, None, "", "failed")
            raise
        else:
            self.on_loaded(ticket, pieces, "disk")

    def _checked(
        self,
        ticket: manager.prefix_offload.LoadHandle,
        header: storage.container.Header,
        section: Callable[[str], memoryview],
    ) -> dict[int, storage.filesystem.Buffer]:
        """The pieces of an entry that is this very block.  EntryError: it is another's."""
        name = ticket.name
        differs = ", ".join(self._identity.differences(header.fingerprint))
        if header.kind != CONTAINER_KIND or differs:
            raise StorageError(f"a stored block is of another kind or model: {differs}", reason="other")
        if header.metadata.get("parent") != name.parent_digest or header.metadata.get("tokens") != name.tokens.hex():
            raise StorageError("a stored block holds other tokens", reason="collision")
        for group in ticket.groups:
            stored = header.sections.get(str(group))
            if stored is not None and stored.nbytes != self._sizes[group]:
                raise StorageError("a stored block has another size", reason="other")
        return {group: section(str(group)) for group in ticket.groups if str(group) in header.sections}

    def compress_oldest(self, attic: RamBlockStore) -> None:
        while True:
            with self._changed:
                kept = attic.oldest()
                if kept is None:
                    return
                job = attic.compress_job(kept)
            done = job()
            with self._changed:
                attic.on_compressed(kept, done)


# The threads hold no tiers while they wait: whoever forgets to close them is not kept alive by that.


def _write(tiers: weakref.ref[BlockStore], shelf: DiskBlockStore, name: manager.prefix_offload.BlockKey) -> None:
    found = tiers()
    if found is not None:
        found.on_written(shelf, name)


def _remove(tiers: weakref.ref[BlockStore], shelf: DiskBlockStore, stored: str, key: str) -> None:
    try:
        shelf.drop(stored)
    finally:
        found = tiers()
        if found is not None:
            found.on_removed(key)


def _read(tiers: weakref.ref[BlockStore], shelf: DiskBlockStore, ticket: manager.prefix_offload.LoadHandle) -> None:
    found = tiers()
    if found is not None:
        found.read_block(shelf, ticket)


def _run_decompression(
    tiers: weakref.ref[BlockStore],
    opening: Callable[[], Mapping[int, storage.filesystem.Buffer]],
    ticket: manager.prefix_offload.LoadHandle,
) -> None:
    pieces = None
    try:
        pieces = opening()
    finally:
        found = tiers()
        if found is not None:
            found.on_loaded(ticket, pieces, "ram", "failed")


def _run_compression(tiers: weakref.ref[BlockStore], attic: RamBlockStore) -> None:
    found = tiers()
    if found is not None:
        found.compress_oldest(attic)


def _stop(readers: Sequence[IoThread], writer: IoThread, shelf: DiskBlockStore | None) -> None:
    for reader in readers:
        reader.stop(1.0)
    if not writer.stop(CLOSE_TIMEOUT):
        LOG.warning("not all blocks were written to the tier in %.0f s", CLOSE_TIMEOUT)
    if shelf is not None:
        with suppress(OSError):
            shelf.release()
