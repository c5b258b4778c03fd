"""A folder of entries by key, bounded in bytes: the disk tier, and what it promises when the disk does not.

    FOLDER/shelf.lock            held by the one process that writes here (flock: it goes with its process)
    FOLDER/KEY.kv                one entry (``entry.py``): hexadecimal digits and dashes
    FOLDER/.KEY.kv.PID.x.tmp     being written; left by a dead writer it is swept away when the shelf is opened
    FOLDER/NAME.pin              an entry of keys that are never evicted (``pins.py``)

The index is what the folder lists, names and sizes: a lost or a damaged index cannot be, and none of it is believed: an
entry is checked when it is read.  Files of other names are not ours: not counted, not touched.

When the disk fails, the caller never does.  A write that fails gives its entry up and *closes* the shelf to writing:
one line is logged, what is there is still read.  A read that fails gives its entry up, and the ``FAILURES``-th closes
the shelf altogether.  An entry that failed is never tried again.  No room (``reserve`` bytes stay free) is no failure.

Not flushed unless asked (``durable``): after a power cut an entry is whole or refused by its checksums, and can be
computed again.  Safe for several threads.  No torch.

Which entry of a full shelf goes first: the least recently used (:class:`Lru`), or :class:`Arc`, which also knows
what was used more than once, so that a long text read once does not push out what everybody asks for.

ARC after Megiddo and Modha 2003 (USENIX FAST, fig. 4), for entries of unequal size: where they count pages, this counts
bytes.  Two lists of what is there (``once``, ``often``), two of what has just gone; a return of something that has just
gone moves ``target``, the bytes that ``once`` may keep.

Both know keys and sizes only; whoever holds the entries says when one is added, used, evicted or gone.
"""

from __future__ import annotations

import logging
import re
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvad import storage
from kvad.errors import ConfigError, StorageError, suggest
from kvad.storage import REAL_FILE_SYSTEM, FileSystem, Section


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


LOCK_NAME = "shelf.lock"
KEY_PATTERN = re.compile(r"[0-9a-f][0-9a-f-]{0,127}")
FILE_SUFFIX = ".kv"
RESERVED_BYTES = 256 << 20  # bytes that stay free on the disk
MAX_FAILURES = 3  # reads
HEADER = 1024  # bytes of an entry beside its sections, about
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class DiskStoreStats:
    """``off``: why nothing is written, or read, any more; "" where all is well.  ``misses``: by reason."""

    bytes: int = 0
    num_blocks: int = 0
    limit: int = 0
    pinned: int = 0
    hits: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    evictions: int = 0
    num_refused: int = 0  # not written: larger than the shelf, or no room
    failures: int = 0
    num_removed: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    disabled_reason: str = ""


class DiskBlockStore:
    """Open ``folder``, made if need be; ``pinned`` is asked under its lock for the keys that are never evicted, before
    any is.  BlockingIOError: another process has it; OSError as the disk says it."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        *,
        replacement: str = "lru",
        reserve: int = RESERVED_BYTES,
        pinned: Callable[[], Iterable[str]] = tuple,
        disk: FileSystem = REAL_FILE_SYSTEM,
    ) -> None:
        if max_bytes < 1:
            raise ConfigError(
                f"tier_bytes: a tier of {max_bytes} bytes holds nothing", "leave the tier out, or give it more"
            )
        if replacement not in EVICTION_ORDERS:
            raise ConfigError(f"replacement: {replacement!r}", suggest(replacement, EVICTION_ORDERS))
        self.folder, self.max_bytes, self._reserve, self._disk = folder, max_bytes, reserve, disk
        self._eviction_order = EVICTION_ORDERS[replacement](max_bytes)
        self._lock = threading.RLock()
        self._bytes = self._hits = self._read = self._written = 0
        self._evictions = self._refused = self._failures = self._bad_reads = self._swept = 0
        self._misses: Counter[str] = Counter()
        self._off, self._closed = "", False
        disk.make_dir(folder)
        file = disk.lock(folder / LOCK_NAME)
        self.release = weakref.finalize(self, _close, disk, file)  # another process may have it from then on
        try:
            self._swept = remove_leftovers(folder, disk)
            found = sorted(disk.list_files(folder), key=lambda each: (each.used_ns, each.name))
            self._pinned = frozenset(pinned())
        except BaseException:
            self.release()
            raise
        for each in found:
            key = each.name.removesuffix(FILE_SUFFIX)
            if key != each.name and KEY_PATTERN.fullmatch(key):
                self._eviction_order.add(key, each.size)
                self._bytes += each.size
        self._evict(0)

    def eviction_order(self) -> tuple[str, ...]:
        """Of all that is there, the next to go first."""
        with self._lock:
            return tuple(self._eviction_order.victims())

    def __contains__(self, key: str) -> bool:
        return not self._closed and key in self._eviction_order.sizes

    @property
    def writable(self) -> bool:
        """Is what is stored from now on written?"""
        return not self._off

    def pin(self, keys: Sequence[str]) -> None:
        """Pin these beside those that are, and flush them.  EntryError: one is not there; OSError as the disk says
        it."""
        with self._lock:
            missing = [key for key in keys if key not in self]
            if missing:
                why = self._off or "there is no room"
                raise StorageError(
                    f"{self.folder}: {len(missing)} of {len(keys)} blocks are not stored: {why}",
                    "give it more bytes (--tier-bytes), or another folder (--tier)",
                    reason="missing",
                )
            self._pinned |= frozenset(keys)
        for key in keys:
            file = self._disk.open(self._path(key))
            try:
                self._disk.sync(file)
            finally:
                self._disk.close(file)
        self._disk.sync_dir(self.folder)

    def get(self, key: str, read: Callable[[storage.container.Header, Callable[[str], memoryview]], Any]) -> Any:
        """What ``read(header, section)`` makes of an entry.  EntryError (its ``why`` is counted) where it cannot be
        read whole: a damaged entry is removed; OSError: the disk failed, and the entry is given up."""
        try:
            with storage.container.open_container(self._path(key), self._disk, whole=True) as entry:
                answer = read(entry.header, entry.read)
                count = entry.header.nbytes
        except StorageError as error:
            self._missed(key, error.reason)
            raise
        except OSError as error:
            self._bad_read(key, error)
            raise
        with self._lock:
            self._hits += 1
            self._read += count
            if key in self._eviction_order.sizes:
                self._eviction_order.touch(key)
        with suppress(OSError):  # it is only an order
            self._disk.touch(self._path(key))
        return answer

    def put(
        self,
        key: str,
        kind: str,
        identity: Mapping[str, str],
        facts: Mapping[str, Any],
        sections: Sequence[Section],
        *,
        durable: bool = False,
    ) -> bool:
        """Write an entry, for which others may have to go.  False: it was not written, and why is counted."""
        assert KEY_PATTERN.fullmatch(key), key
        if self._off or key in self:
            return False
        size = sum(memoryview(each.data).nbytes for each in sections) + HEADER
        try:
            if not self._room(size):
                return False
            size = storage.container.write_container(
                self._path(key), kind, identity, facts, sections, durable=durable, disk=self._disk
            )
        except OSError as error:
            self._fail("writing", error)
            return False
        with self._lock:
            self._eviction_order.add(key, size)
            self._bytes += size
            self._written += size
        self._evict(0, keep=key)
        return True

    def drop(self, key: str) -> None:
        """Nobody finds it any more.  (On a disk that refuses to remove it, until the shelf is opened again.)"""
        with self._lock:
            self._unlist(key)
        try:
            self._disk.remove(self._path(key))
        except FileNotFoundError:
            pass
        except OSError as error:
            self._fail("removing", error)

    def stats(self) -> DiskStoreStats:
        with self._lock:
            return DiskStoreStats(
                bytes=self._bytes,
                num_blocks=len(self._eviction_order.sizes),
                limit=self.max_bytes,
                pinned=sum(key in self._eviction_order.sizes for key in self._pinned),
                hits=self._hits,
                read_bytes=self._read,
                written_bytes=self._written,
                evictions=self._evictions,
                num_refused=self._refused,
                failures=self._failures,
                num_removed=self._swept,
                misses=dict(self._misses),
                disabled_reason=self._off,
            )

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{FILE_SUFFIX}"

    def _room(self, size: int) -> bool:
        """Evict until there is room for so many bytes; False: there cannot be."""
        if size <= self.max_bytes and self._evict(size) and self._disk.free_bytes(self.folder) - size >= self._reserve:
            return True
        with self._lock:
            self._refused += 1
            first = self._refused == 1
        if first:
            LOG.warning("%s: no room for another block; serving goes on without it", self.folder)
        return False

    def _evict(self, size: int, keep: str = "") -> bool:
        """Take away what goes first until ``size`` more bytes fit; False: what is pinned leaves no room."""
        while self._bytes + size > self.max_bytes:
            with self._lock:
                able = (key for key in self._eviction_order.victims() if key not in self._pinned and key != keep)
                victim = next(able, None)
                if victim is None:
                    return False
                self._bytes -= self._eviction_order.sizes[victim]
                self._eviction_order.evict(victim)
                self._evictions += 1
            try:
                self._disk.remove(self._path(victim))
            except FileNotFoundError:
                pass
            except OSError as error:
                self._fail("removing", error)
                return False
        return True

    def _missed(self, key: str, why: str) -> None:
        with self._lock:
            self._misses[why] += 1
            if why == "alien":  # not removed, and not in the way of the one that has this name by right
                self._unlist(key)
        if why in ("torn", "missing"):
            LOG.info("%s: entry %s is %s", self.folder, key, why)
            self.drop(key)

    def _unlist(self, key: str) -> None:
        if key in self._eviction_order.sizes:
            self._bytes -= self._eviction_order.sizes[key]
            self._eviction_order.remove(key)

    def _bad_read(self, key: str, error: OSError) -> None:
        with self._lock:
            self._misses["failed"] += 1
            self._failures += 1
            self._bad_reads += 1
            self._unlist(key)  # never tried again, as if it were clean
            if self._bad_reads < MAX_FAILURES or self._closed:
                return
            self._closed = True
            self._off = self._off or f"reading failed: {error}"
        LOG.warning("%s: reading failed (%s); serving goes on without this tier", self.folder, error)

    def _fail(self, what: str, error: OSError) -> None:
        with self._lock:
            self._failures += 1
            if self._off:
                return
            self._off = f"{what} failed: {error}"
        LOG.warning("%s: %s failed (%s); serving goes on, nothing more is stored there", self.folder, what, error)


def remove_leftovers(folder: Path, disk: FileSystem = REAL_FILE_SYSTEM) -> int:
    """Remove what writers that have died left half written; how many.  Names that are not ours stay."""
    return storage.filesystem.remove_temp_files(folder, lambda name: name.endswith((FILE_SUFFIX, ".pin")), disk)


def _close(disk: FileSystem, file: int) -> None:
    with suppress(OSError):
        disk.close(file)
