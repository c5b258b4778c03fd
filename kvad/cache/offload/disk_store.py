"""Disk store: a folder of containers by key, bounded in bytes, and its eviction orders.

    FOLDER/prefix-cache.lock     locked by the one process that writes here (flock: released when the process ends)
    FOLDER/KEY.kv                one container (``container.py``); KEY has hexadecimal digits and dashes
    FOLDER/.KEY.kv.PID.x.tmp     being written; those of dead writers are removed when the store is opened
    FOLDER/NAME.prefix           keys of blocks that are never evicted (``pinned.py``)

The index is the folder's listing of names and sizes, so there is no index file to lose or damage. Entries are verified
when they are read. Files with other names belong to others: they are not counted and not changed.

A disk failure never fails the caller. A failed write drops its entry and disables writing: one line is logged, stored
entries can still be read. A failed read drops its entry, and the MAX_FAILURES-th disables the store. A failed entry is
never tried again. Lack of space (``reserve`` bytes stay free) is not a failure.

Writes are not flushed: after a power cut an entry is complete, or refused by its checksums and recomputed.
Thread-safe. No torch.
"""

from __future__ import annotations

import logging
import re
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvad import storage
from kvad.errors import ConfigError, StorageError, suggest
from kvad.storage import REAL_FILE_SYSTEM, FileSystem, Section

LOCK_NAME = "prefix-cache.lock"
KEY_PATTERN = re.compile(r"[0-9a-f][0-9a-f-]{0,127}")
FILE_SUFFIX = ".kv"
RESERVED_BYTES = 256 << 20  # bytes that stay free on the disk
MAX_FAILURES = 3  # failed reads that disable the store
HEADER = 1024  # approximate bytes of an entry besides its sections
LOG = logging.getLogger(__name__)


class _Queue(OrderedDict[str, int]):
    """Keys in the order of their last use, with their sizes; ``total`` is the sum."""

    total = 0

    def put(self, key: str, size: int) -> None:
        self[key] = size
        self.total += size

    def drop(self, key: str) -> int:
        size = self.pop(key)
        self.total -= size
        return size


class LRUOrder:
    """Least-recently-used order of a store of ``limit`` bytes; ``sizes`` has the bytes of the stored entries."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.sizes = _Queue()

    def add(self, key: str, size: int) -> None:
        self.sizes.put(key, size)

    def touch(self, key: str) -> None:
        self.sizes.move_to_end(key)

    def remove(self, key: str) -> None:
        """Remove an entry that was deleted, not evicted, if it is stored."""
        if key in self.sizes:
            self.sizes.drop(key)

    def evict(self, key: str) -> None:
        self.remove(key)

    def victims(self) -> Iterator[str]:
        yield from self.sizes


class ARCOrder(LRUOrder):
    """Adaptive replacement (ARC): one long text does not evict the entries that many requests use.

    After Megiddo and Modha 2003 (USENIX FAST, fig. 4), with bytes instead of pages. There are two lists of stored
    entries (``once``, ``often``) and two of evicted ones. When a recently evicted entry is stored again, ``target``,
    the bytes for ``once``, is adjusted.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.once, self.often, self.left_once, self.left_often = (_Queue() for _ in range(4))
        self.target = 0

    def add(self, key: str, size: int) -> None:
        super().add(key, size)
        if key in self.left_once:  # It was evicted too early: entries used once get more room.
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
        self._trim_history()

    def touch(self, key: str) -> None:
        super().touch(key)
        self.often.put(key, self._pop(key))

    def remove(self, key: str) -> None:
        if key in self.sizes:
            self._pop(key)
        super().remove(key)

    def evict(self, key: str) -> None:
        left = self.left_once if key in self.once else self.left_often
        left.put(key, self.sizes[key])
        self.remove(key)
        self._trim_history()

    def victims(self) -> Iterator[str]:
        first, then = (self.once, self.often) if self.once.total > self.target else (self.often, self.once)
        yield from first
        yield from then

    def _pop(self, key: str) -> int:
        return (self.once if key in self.once else self.often).drop(key)

    def _trim_history(self) -> None:
        """Limit the history of evicted entries to the size of the store."""
        while self.left_once and self.once.total + self.left_once.total > self.limit:
            self.left_once.drop(next(iter(self.left_once)))
        queues = (self.once, self.often, self.left_once, self.left_often)
        while self.left_often and sum(queue.total for queue in queues) > 2 * self.limit:
            self.left_often.drop(next(iter(self.left_often)))


EVICTION_ORDERS: Mapping[str, type[LRUOrder]] = {"lru": LRUOrder, "arc": ARCOrder}


@dataclass
class DiskStoreStats:
    """Statistics of a disk store."""

    bytes: int = 0
    num_blocks: int = 0
    limit: int = 0  # bytes
    pinned: int = 0  # blocks
    hits: int = 0
    read_bytes: int = 0
    written: int = 0  # blocks
    written_bytes: int = 0
    evictions: int = 0
    num_refused: int = 0  # not written: larger than the store, or no room
    failures: int = 0  # operations that the disk refused
    num_removed: int = 0  # leftovers of dead writers
    misses: Mapping[str, int] = field(default_factory=dict)  # by reason
    disabled_reason: str = ""  # why writes, or all accesses, stopped; "" while enabled


class DiskBlockStore:
    """Stores blocks in the files of a folder, which it creates and locks.

    Args:
        folder: Folder of the store.
        max_bytes: Size of all entries.
        replacement: Name of the eviction order, "lru" or "arc".
        reserve: Bytes that stay free on the disk.
        pinned: Called under the folder's lock, before any eviction; returns the keys that are never evicted.
        fs: File system.

    Raises:
        BlockingIOError: If another process has locked the folder.
        OSError: If the disk fails.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        *,
        replacement: str = "lru",
        reserve: int = RESERVED_BYTES,
        pinned: Callable[[], Iterable[str]] = tuple,
        fs: FileSystem = REAL_FILE_SYSTEM,
    ) -> None:
        if max_bytes < 1:
            raise ConfigError(
                f"cache.prefix_cache_size: must be at least 1 byte, got {max_bytes}",
                "Omit cache.prefix_cache_dir, or give a larger size.",
            )
        if replacement not in EVICTION_ORDERS:
            raise ConfigError(
                f"cache.prefix_cache_eviction: must be {' or '.join(EVICTION_ORDERS)}, got {replacement!r}",
                suggest(replacement, EVICTION_ORDERS),
            )
        self.folder, self.max_bytes, self._reserve, self._fs = folder, max_bytes, reserve, fs
        self._order = EVICTION_ORDERS[replacement](max_bytes)
        self._lock = threading.RLock()
        self._stats = DiskStoreStats(limit=max_bytes)
        self._misses, self._closed = Counter[str](), False
        fs.make_dir(folder)
        lock_file = fs.lock(folder / LOCK_NAME)
        self.release = weakref.finalize(self, _close, fs, lock_file)  # Then another process may lock the folder.
        try:
            self._stats.num_removed = remove_leftovers(folder, fs)
            files = sorted(fs.list_files(folder), key=lambda file: (file.used_ns, file.name))
            self._pinned = frozenset(pinned())
        except BaseException:
            self.release()
            raise
        for file in files:
            key = file.name.removesuffix(FILE_SUFFIX)
            if key != file.name and KEY_PATTERN.fullmatch(key):
                self._order.add(key, file.size)
        self._evict(0)

    def eviction_order(self) -> tuple[str, ...]:
        """Return all keys, the next victim first."""
        with self._lock:
            return tuple(self._order.victims())

    def __contains__(self, key: str) -> bool:
        return not self._closed and key in self._order.sizes

    @property
    def writable(self) -> bool:
        """True if new entries are written."""
        return not self._stats.disabled_reason

    def pin(self, keys: Sequence[str]) -> None:
        """Pin more keys and flush their files; StorageError if an entry is missing."""
        with self._lock:
            missing = [key for key in keys if key not in self]
            if missing:
                reason = self._stats.disabled_reason or "there is no room"
                raise StorageError(
                    f"{self.folder}: {len(missing)} of {len(keys)} blocks are not stored: {reason}",
                    "give it more bytes (--prefix-cache-size), or another folder (--prefix-cache-dir)",
                    reason="missing",
                )
            self._pinned |= frozenset(keys)
        for key in keys:
            file = self._fs.open(self._path(key))
            try:
                self._fs.sync(file)
            finally:
                self._fs.close(file)
        self._fs.sync_dir(self.folder)

    def get(self, key: str, read: Callable[[storage.container.Header, Callable[[str], memoryview]], Any]) -> Any:
        """Return ``read(header, section)`` of an entry.

        Raises:
            StorageError: If the entry cannot be used; its reason is counted. A damaged entry is removed.
            OSError: If the disk fails; the entry is dropped.
        """
        try:
            with storage.container.open_container(self._path(key), self._fs, whole=True) as entry:
                result = read(entry.header, entry.read)
        except StorageError as error:
            with self._lock:
                self._misses[error.reason] += 1
                if error.reason == "foreign":  # The file stays, and put may replace it.
                    self._order.remove(key)
            if error.reason in ("damaged", "missing"):
                LOG.info("%s: entry %s is %s", self.folder, key, error.reason)
                self.drop(key)
            raise
        except OSError as error:
            self._on_failed_read(key, error)
            raise
        with self._lock:
            self._stats.hits += 1
            self._stats.read_bytes += entry.header.nbytes
            if key in self._order.sizes:
                self._order.touch(key)
        with suppress(OSError):  # Only the eviction order is affected.
            self._fs.touch(self._path(key))
        return result

    def put(
        self,
        key: str,
        kind: str,
        fingerprint: Mapping[str, str],
        metadata: Mapping[str, Any],
        sections: Sequence[Section],
    ) -> bool:
        """Write an entry and evict others if needed; return False, with the cause counted, if it was not written."""
        assert KEY_PATTERN.fullmatch(key), key
        if not self.writable or key in self:
            return False
        size = sum(memoryview(section.data).nbytes for section in sections) + HEADER
        try:
            if not self._make_room(size):
                return False
            size = storage.container.write_container(
                self._path(key), kind, fingerprint, metadata, sections, durable=False, fs=self._fs
            )
        except OSError as error:
            self._on_failure("writing", error)
            return False
        with self._lock:
            self._order.add(key, size)
            self._stats.written += 1
            self._stats.written_bytes += size
        self._evict(0, keep=key)
        return True

    def drop(self, key: str) -> None:
        """Remove an entry. If the disk refuses, it is ignored until the store is opened again."""
        with self._lock:
            self._order.remove(key)
        self._remove_file(key)

    def stats(self) -> DiskStoreStats:
        with self._lock:
            sizes = self._order.sizes
            pinned = sum(key in sizes for key in self._pinned)
            misses = dict(self._misses)
            return replace(self._stats, bytes=sizes.total, num_blocks=len(sizes), pinned=pinned, misses=misses)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{FILE_SUFFIX}"

    def _remove_file(self, key: str) -> bool:
        try:
            self._fs.remove(self._path(key))
        except FileNotFoundError:
            pass
        except OSError as error:
            self._on_failure("removing", error)
            return False
        return True

    def _make_room(self, size: int) -> bool:
        """Evict until ``size`` more bytes fit; return False if they cannot."""
        if size <= self.max_bytes and self._evict(size) and self._fs.free_bytes(self.folder) - size >= self._reserve:
            return True
        with self._lock:
            self._stats.num_refused += 1
            is_first = self._stats.num_refused == 1
        if is_first:
            LOG.warning("%s: no room for another block; the engine continues without storing it", self.folder)
        return False

    def _evict(self, size: int, keep: str = "") -> bool:
        """Evict until ``size`` more bytes fit; return False if pinned entries prevent it."""
        while self._order.sizes.total + size > self.max_bytes:
            with self._lock:
                candidates = (key for key in self._order.victims() if key not in self._pinned and key != keep)
                victim = next(candidates, None)
                if victim is None:
                    return False
                self._order.evict(victim)
                self._stats.evictions += 1
            if not self._remove_file(victim):
                return False
        return True

    def _on_failed_read(self, key: str, error: OSError) -> None:
        with self._lock:
            self._misses["failed"] += 1
            self._stats.failures += 1
            self._order.remove(key)  # A failed entry is never tried again.
            if self._misses["failed"] < MAX_FAILURES or self._closed:
                return
            self._closed = True
            self._stats.disabled_reason = self._stats.disabled_reason or f"reading failed: {error}"
        LOG.warning("%s: reading failed (%s); the engine continues without the disk store", self.folder, error)

    def _on_failure(self, operation: str, error: OSError) -> None:
        with self._lock:
            self._stats.failures += 1
            if self._stats.disabled_reason:
                return
            self._stats.disabled_reason = f"{operation} failed: {error}"
        LOG.warning(
            "%s: %s failed (%s); the engine continues and stores no more blocks there", self.folder, operation, error
        )


def remove_leftovers(folder: Path, fs: FileSystem = REAL_FILE_SYSTEM) -> int:
    """Remove unfinished files of dead writers; returns their number."""
    return storage.filesystem.remove_temp_files(folder, lambda name: name.endswith((FILE_SUFFIX, ".prefix")), fs)


def _close(fs: FileSystem, file: int) -> None:
    with suppress(OSError):
        fs.close(file)
