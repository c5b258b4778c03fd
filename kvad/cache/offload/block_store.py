r"""Block store: published blocks beyond the pool, in RAM and on disk.

    pool  --evicted-->  RAM (raw, then compressed: ram_store.py)
      \--published-->   disk (disk_store.py): written immediately, so that little is lost when the process ends

Reader threads load the blocks of waiting sequences; another thread writes and compresses. The engine thread never
waits for either: it calls :meth:`BlockStore.has` (an index in memory), gets handles and polls them.

A load returns exactly what was stored: on disk every byte is checksummed, and the key (``prefix_offload.BlockKey``: the
block's tokens and a digest of all tokens before it) and the fingerprint of weights and formats are compared. A mismatch
or a failure is a miss with a reason; from there on the sequence is computed.

Never: a wait for the disk in ``has``, ``load``, ``request_copy``, ``put``, ``take``, ``stage_load`` or ``drop``; a
buffer that a live sequence writes to: KVCache copies. No torch.
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
NUM_READERS = 4  # threads: one waits for the disk while others verify checksums
CLOSE_TIMEOUT = 30.0  # seconds to finish queued writes when the store is closed
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class BlockStoreStats:
    """Statistics of a block store."""

    ram: RamStoreStats
    disk: DiskStoreStats
    bytes_out: int  # copied out of the pool
    bytes_in: int  # copied into the pool
    num_not_written: int  # blocks skipped because the write queue was full
    queued_bytes: int  # bytes waiting to be written


def key_prefix(fingerprint: CacheFingerprint) -> str:
    """Return the first part of a disk key; other fingerprints use other keys."""
    return fingerprint.digest()[:6].hex()


class BlockStore:
    """Stores evicted blocks in RAM and published blocks on disk.

    Args:
        sizes: Bytes of a block, per group that takes tokens.
        widths: Bytes of a number, per group.
        ram_bytes: Size of the RAM store; None for none.
        disk_store: Disk store; None for none.
        fingerprint: Model and cache of the stored blocks. Salt, rotary regime and encoder input are in the prefix root.
        max_queued_bytes: Blocks are not written while more bytes than this wait to be written.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        widths: Sequence[int],
        *,
        ram_bytes: int | None = None,
        disk_store: DiskBlockStore | None = None,
        fingerprint: CacheFingerprint | None = None,
        max_queued_bytes: int = WRITE_QUEUE_BYTES,
    ) -> None:
        assert disk_store is None or fingerprint is not None, "a disk store needs a fingerprint"
        self._sizes, self._disk_store, self._max_queued_bytes = tuple(sizes), disk_store, max_queued_bytes
        self._ram_store = None if ram_bytes is None else RamBlockStore(ram_bytes, widths)
        self._fingerprint = CacheFingerprint() if fingerprint is None else fingerprint
        self._key_prefix = key_prefix(self._fingerprint)
        self._changed = threading.Condition(threading.RLock())
        self._copy_ids = itertools.count()
        self._requested_copies: dict[
            int, tuple[manager.prefix_offload.BlockKey, int]
        ] = {}  # copies requested from KVCache: key, bytes to write (0: evicted, for the RAM store)
        self._staged_loads: dict[int, Mapping[int, storage.filesystem.Buffer]] = {}
        self._writing: dict[
            str, tuple[manager.prefix_offload.BlockKey, Mapping[int, storage.filesystem.Buffer], int]
        ] = {}  # by block key
        self._queued_keys: set[str] = set()  # keys that are written once KVCache has copied them
        self._pending_drops: dict[str, int] = {}  # keys that the writer has yet to remove from disk
        self._handles: weakref.WeakSet[manager.prefix_offload.LoadHandle] = weakref.WeakSet()
        self._num_pending_loads = 0  # handles that are not done
        self._num_not_written = self._queued_bytes = self._bytes_out = self._bytes_in = 0
        self._readers = tuple(IoThread(f"kvad-block-read-{copy_id}") for copy_id in range(NUM_READERS))
        self._reader_cycle = itertools.cycle(self._readers)
        self._writer = IoThread("kvad-block-write")
        self._stop = weakref.finalize(self, _stop, self._readers, self._writer, disk_store)

    # ------------------------------------------------------------ called by KVCacheManager

    def has(self, key: str) -> bool:
        """True if the block is stored in RAM or on disk, or is being written."""
        with self._changed:
            if key in self._pending_drops:
                return False
            in_ram = self._ram_store is not None and self._ram_store.has(key)
            return (
                in_ram
                or key in self._writing
                or (self._disk_store is not None and self._disk_key(key) in self._disk_store)
            )

    def load(self, name: manager.prefix_offload.BlockKey, groups: tuple[int, ...]) -> manager.prefix_offload.LoadHandle:
        """Start loading these groups of a block; poll :attr:`LoadHandle.done`."""
        handle = manager.prefix_offload.LoadHandle(name, groups)
        with self._changed:
            if name.key in self._pending_drops:
                handle.fail("withdrawn")
                return handle
            self._handles.add(handle)
            writing = self._writing.get(name.key)
            block = None if self._ram_store is None else self._ram_store.get(name, groups)
            if block is not None and self._ram_store is not None:
                decompress = self._ram_store.decompress_job(block, groups)
                handle.was_compressed = any(group in block.compressed for group in groups)
                if block.compressed:
                    self._num_pending_loads += 1
                    next(self._reader_cycle).submit(partial(_run_decompression, weakref.ref(self), decompress, handle))
                else:
                    handle.complete(decompress(), "ram")
            elif writing is not None and writing[0] == name and all(group in writing[1] for group in groups):
                handle.complete({group: writing[1][group] for group in groups}, "ram")
            elif self._disk_store is not None and self._disk_key(name.key) in self._disk_store:
                self._num_pending_loads += 1
                next(self._reader_cycle).submit(partial(_read, weakref.ref(self), self._disk_store, handle))
            else:
                handle.fail("gone")
        return handle

    def request_copy(
        self, name: manager.prefix_offload.BlockKey, groups: tuple[int, ...], *, evicted: bool
    ) -> int | None:
        """Request a copy of a block from KVCache.

        Args:
            name: Key of the block.
            groups: Groups to copy.
            evicted: The block is evicted from the pool and goes to RAM; else it was published and goes to disk.

        Returns:
            The id under which KVCache calls ``put``, or None if no copy is needed.
        """
        with self._changed:
            size = 0
            if name.key in self._pending_drops or not groups:
                return None
            if evicted:
                if self._ram_store is None or self._ram_store.get(name, groups) is not None:
                    return None
            else:
                if self._disk_store is None or not self._disk_store.writable or name.key in self._queued_keys:
                    return None
                if name.key in self._writing or self._disk_key(name.key) in self._disk_store:
                    return None
                size = sum(self._sizes[group] for group in groups)
                if self._queued_bytes and self._queued_bytes + size > self._max_queued_bytes:
                    self._num_not_written += 1
                    return None
                self._queued_keys.add(name.key)
                self._queued_bytes += size
            copy_id = next(self._copy_ids)
            self._requested_copies[copy_id] = name, size
            return copy_id

    def cancel(self, copy_id: int) -> None:
        """Cancel a requested copy or a staged load; unknown ids are ignored."""
        with self._changed:
            self._staged_loads.pop(copy_id, None)
            if copy_id in self._requested_copies:
                self._cancel_copy(copy_id)

    def stage_load(self, buffers: Mapping[int, storage.filesystem.Buffer]) -> int:
        """Store loaded buffers until KVCache takes them; returns the id for ``take``."""
        with self._changed:
            copy_id = next(self._copy_ids)
            self._staged_loads[copy_id] = buffers
            return copy_id

    def drop(self, key: str) -> None:
        """Drop a block from RAM and disk; copies and loads in progress are canceled."""
        with self._changed:
            for handle in list(self._handles):
                if handle.name.key == key:
                    handle.fail("withdrawn")
            for copy_id in [copy_id for copy_id, (name, _) in self._requested_copies.items() if name.key == key]:
                self._cancel_copy(copy_id)
            if self._ram_store is not None:
                self._ram_store.drop(key)
            if self._disk_store is None:
                return
            self._dequeue(key)
            self._pending_drops[key] = self._pending_drops.get(key, 0) + 1
            self._writer.submit(partial(_remove, weakref.ref(self), self._disk_store, self._disk_key(key), key))

    # ------------------------------------------------------------ called by KVCache

    def put(self, copy_id: int, buffers: Mapping[int, storage.filesystem.Buffer]) -> None:
        """Receive a requested copy. The store owns the buffers from now on."""
        with self._changed:
            request = self._requested_copies.pop(copy_id, None)
            if request is None:
                return  # withdrawn meanwhile
            name, size = request
            assert all(memoryview(buffer).nbytes == self._sizes[group] for group, buffer in buffers.items())
            self._bytes_out += sum(self._sizes[group] for group in buffers)
            if not size:
                assert self._ram_store is not None
                if self._ram_store.put(name, buffers) is not None:
                    self._writer.submit(partial(_run_compression, weakref.ref(self), self._ram_store))
                return
            self._queued_keys.discard(name.key)
            self._writing[name.key] = name, buffers, size
            assert self._disk_store is not None
            self._writer.submit(partial(_write, weakref.ref(self), self._disk_store, name))

    def take(self, copy_id: int) -> Mapping[int, storage.filesystem.Buffer]:
        """Return and forget staged buffers; the caller copies and never writes them."""
        with self._changed:
            buffers = self._staged_loads.pop(copy_id)
            self._bytes_in += sum(memoryview(buffer).nbytes for buffer in buffers.values())
            return buffers

    # ------------------------------------------------------------ may wait

    def wait(self, seconds: float) -> None:
        """Wait until no load is in progress, at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_pending_loads, seconds)

    @property
    def on_disk(self) -> bool:
        """True if there is a disk store that accepts writes."""
        return self._disk_store is not None and self._disk_store.writable

    @property
    def folder(self) -> Path:
        assert self._disk_store is not None, "no disk store"
        return self._disk_store.folder

    def pin_blocks(self, keys: Sequence[str]) -> list[str]:
        """Write the queued blocks, flush these blocks to the disk and pin them.

        Returns:
            Their keys in the disk store.

        Raises:
            StorageError: If a block is not stored.
            OSError: If the disk fails.
        """
        assert self._disk_store is not None, "pinning requires a disk store"
        self.flush()
        disk_keys = [self._disk_key(key) for key in keys]
        self._disk_store.pin(disk_keys)
        return disk_keys

    def flush(self, seconds: float = CLOSE_TIMEOUT) -> bool:
        """Wait for all queued writes; return False after ``seconds``."""
        return self._writer.wait(seconds)

    def close(self) -> None:
        """Finish queued writes, within CLOSE_TIMEOUT, and unlock the folder."""
        self._stop()

    def stats(self) -> BlockStoreStats:
        """Return the statistics of the store."""
        with self._changed:
            ram_stats = RamStoreStats() if self._ram_store is None else self._ram_store.stats()
            disk_stats = DiskStoreStats() if self._disk_store is None else self._disk_store.stats()
            return BlockStoreStats(
                ram_stats, disk_stats, self._bytes_out, self._bytes_in, self._num_not_written, self._queued_bytes
            )

    # ------------------------------------------------------------ called by the threads

    def _disk_key(self, key: str) -> str:
        return f"{self._key_prefix}-{key}"

    def _cancel_copy(self, copy_id: int) -> None:
        name, size = self._requested_copies.pop(copy_id)
        self._queued_bytes -= size
        if size:
            self._queued_keys.discard(name.key)

    def _dequeue(
        self, key: str
    ) -> tuple[manager.prefix_offload.BlockKey, Mapping[int, storage.filesystem.Buffer]] | None:
        entry = self._writing.pop(key, None)
        if entry is None:
            return None
        self._queued_bytes -= entry[2]
        return entry[0], entry[1]

    def on_written(self, disk_store: DiskBlockStore, name: manager.prefix_offload.BlockKey) -> None:
        with self._changed:
            entry = self._writing.get(name.key)
        if entry is None or entry[0] != name:
            return  # withdrawn meanwhile
        sections = [Section(str(g), "uint8", (memoryview(p).nbytes,), p) for g, p in sorted(entry[1].items())]
        metadata = {"parent": name.parent_digest, "tokens": name.tokens.hex()}
        try:
            disk_store.put(self._disk_key(name.key), CONTAINER_KIND, self._fingerprint.parts, metadata, sections)
        finally:  # The block leaves the queue even if the write failed.
            with self._changed:
                if self._writing.get(name.key) is entry:
                    self._dequeue(name.key)

    def on_removed(self, key: str) -> None:
        with self._changed:
            self._pending_drops[key] -= 1
            if not self._pending_drops[key]:
                del self._pending_drops[key]

    def on_loaded(
        self,
        handle: manager.prefix_offload.LoadHandle,
        buffers: Mapping[int, storage.filesystem.Buffer] | None,
        location: str,
        reason: str = "",
    ) -> None:
        with self._changed:
            if not handle.done:
                if buffers is None:
                    handle.fail(reason)
                else:
                    handle.complete(buffers, location)
            self._num_pending_loads -= 1
            if not self._num_pending_loads:
                self._changed.notify_all()

    def read_block(self, disk_store: DiskBlockStore, handle: manager.prefix_offload.LoadHandle) -> None:
        if handle.done:  # withdrawn meanwhile
            self.on_loaded(handle, None, "")
            return
        try:
            buffers = disk_store.get(self._disk_key(handle.name.key), partial(self._checked, handle))
        except StorageError as error:
            self.on_loaded(handle, None, "", error.reason)
        except OSError:
            self.on_loaded(handle, None, "", "failed")
        except BaseException:  # A bug or MemoryError: IoThread logs it, and waiting callers must be notified.
            self.on_loaded(handle, None, "", "failed")
            raise
        else:
            self.on_loaded(handle, buffers, "disk")

    def _checked(
        self,
        handle: manager.prefix_offload.LoadHandle,
        header: storage.container.Header,
        section: Callable[[str], memoryview],
    ) -> dict[int, storage.filesystem.Buffer]:
        """Return the buffers of a stored block after comparing its key.

        Raises:
            StorageError: If the file is another block.
        """
        name = handle.name
        differs = ", ".join(self._fingerprint.differences(header.fingerprint))
        if header.kind != CONTAINER_KIND or differs:
            raise StorageError(f"stored block: another kind or model: {differs}", reason="mismatch")
        if header.metadata.get("parent") != name.parent_digest or header.metadata.get("tokens") != name.tokens.hex():
            raise StorageError("stored block: other tokens", reason="collision")
        for group in handle.groups:
            stored = header.sections.get(str(group))
            if stored is not None and stored.nbytes != self._sizes[group]:
                raise StorageError("stored block: another size", reason="mismatch")
        return {group: section(str(group)) for group in handle.groups if str(group) in header.sections}

    def compress_oldest(self, ram_store: RamBlockStore) -> None:
        while True:
            with self._changed:
                block = ram_store.oldest()
                if block is None:
                    return
                job = ram_store.compress_job(block)
            compressed = job()
            with self._changed:
                ram_store.on_compressed(block, compressed)


# The threads hold only a weak reference to the store, so that an unclosed store can be garbage collected.


def _write(store: weakref.ref[BlockStore], disk_store: DiskBlockStore, name: manager.prefix_offload.BlockKey) -> None:
    owner = store()
    if owner is not None:
        owner.on_written(disk_store, name)


def _remove(store: weakref.ref[BlockStore], disk_store: DiskBlockStore, disk_key: str, key: str) -> None:
    try:
        disk_store.drop(disk_key)
    finally:
        owner = store()
        if owner is not None:
            owner.on_removed(key)


def _read(
    store: weakref.ref[BlockStore], disk_store: DiskBlockStore, handle: manager.prefix_offload.LoadHandle
) -> None:
    owner = store()
    if owner is not None:
        owner.read_block(disk_store, handle)


def _run_decompression(
    store: weakref.ref[BlockStore],
    decompress: Callable[[], Mapping[int, storage.filesystem.Buffer]],
    handle: manager.prefix_offload.LoadHandle,
) -> None:
    buffers = None
    try:
        buffers = decompress()
    finally:
        owner = store()
        if owner is not None:
            owner.on_loaded(handle, buffers, "ram", "failed")


def _run_compression(store: weakref.ref[BlockStore], ram_store: RamBlockStore) -> None:
    owner = store()
    if owner is not None:
        owner.compress_oldest(ram_store)


def _stop(readers: Sequence[IoThread], writer: IoThread, disk_store: DiskBlockStore | None) -> None:
    for reader in readers:
        reader.stop(1.0)
    if not writer.stop(CLOSE_TIMEOUT):
        LOG.warning("not all blocks were written to the disk store in %.0f s", CLOSE_TIMEOUT)
    if disk_store is not None:
        with suppress(OSError):
            disk_store.release()
