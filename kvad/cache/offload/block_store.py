r"""Block store: published blocks beyond the pool, in RAM and on disk.

    pool  --evicted-->  RAM (raw, then compressed: ram_store.py)
      \--published-->   disk (disk_store.py): written immediately, so that little is lost when the process ends

Reader threads load the blocks of waiting sequences; another thread writes and compresses. The engine thread never
waits for either: it calls ``BlockStore.has`` (an index in memory), gets handles and polls them.

A load returns exactly what was stored: on disk every byte is checksummed, and the key (``prefix_offload.BlockKey``: the
block's tokens and a digest of all tokens before it) and the fingerprint of weights and formats are compared. A mismatch
or a failure is a miss with a reason; from there on the sequence is computed.

Only ``wait``, ``flush``, ``pin_blocks`` and ``close`` wait for the disk. No buffer is one that a live sequence writes
to: KVCache copies. No torch.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvad import storage
from kvad.cache import manager
from kvad.cache.config import WRITE_QUEUE_BYTES
from kvad.cache.offload.disk_store import DiskBlockStore, DiskStoreStats
from kvad.cache.offload.ram_store import CachedBlock, RamBlockStore, RamStoreStats
from kvad.errors import StorageError
from kvad.storage import Buffer, CacheFingerprint, IoThread, Section

BlockKey = manager.prefix_offload.BlockKey
LoadHandle = manager.prefix_offload.LoadHandle

CONTAINER_KIND = "block"
NUM_READERS = 4  # threads: one waits for the disk while others verify checksums
CLOSE_TIMEOUT = 30.0  # seconds to finish queued writes when the store is closed
LOG = logging.getLogger(__name__)


@dataclass
class BlockStoreStats:
    """Statistics of a block store."""

    ram: RamStoreStats = field(default_factory=RamStoreStats)
    disk: DiskStoreStats = field(default_factory=DiskStoreStats)
    bytes_out: int = 0  # copied out of the pool
    bytes_in: int = 0  # copied into the pool
    num_not_written: int = 0  # blocks skipped because the write queue was full
    queued_bytes: int = 0  # bytes waiting to be written


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
        self._sizes, self._widths, self._max_queued_bytes = tuple(sizes), tuple(widths), max_queued_bytes
        self._ram_store, self._disk_store = None if ram_bytes is None else RamBlockStore(ram_bytes, widths), disk_store
        self._fingerprint = CacheFingerprint() if fingerprint is None else fingerprint
        self._key_prefix = key_prefix(self._fingerprint)
        self._changed = threading.Condition(threading.RLock())
        self._stats = BlockStoreStats()
        self._copy_ids = itertools.count()
        # Copies requested from KVCache: key, bytes to write (0: evicted, for the RAM store).
        self._requested_copies: dict[int, tuple[BlockKey, int]] = {}
        self._staged_loads: dict[int, Mapping[int, Buffer]] = {}
        self._writing: dict[str, tuple[BlockKey, Mapping[int, Buffer], int]] = {}  # by block key
        self._queued_keys: set[str] = set()  # keys that are written once KVCache has copied them
        self._pending_drops: dict[str, int] = {}  # keys that the writer has yet to remove from disk
        self._handles: weakref.WeakSet[LoadHandle] = weakref.WeakSet()
        self._num_pending_loads = 0  # handles that are not done
        self._readers = tuple(IoThread(f"kvad-block-read-{index}") for index in range(NUM_READERS))
        self._reader_cycle = itertools.cycle(self._readers)
        self._writer = IoThread("kvad-block-write")
        self._stop = weakref.finalize(self, _stop, self._readers, self._writer, disk_store)

    # ------------------------------------------------------------ called by KVCacheManager

    def has(self, key: str) -> bool:
        """True if the block is stored in RAM or on disk, or is being written."""
        with self._changed:
            in_ram = self._ram_store is not None and key in self._ram_store
            return key not in self._pending_drops and (in_ram or key in self._writing or self._is_on_disk(key))

    def load(self, name: BlockKey, groups: tuple[int, ...]) -> LoadHandle:
        """Start loading these groups of a block; poll ``LoadHandle.done``."""
        handle = LoadHandle(name, groups)
        with self._changed:
            if name.key in self._pending_drops:
                handle.fail("withdrawn")
                return handle
            self._handles.add(handle)
            writing = self._writing.get(name.key)
            block = None if self._ram_store is None else self._ram_store.get(name, groups)
            if block is not None:
                handle.was_compressed = any(group in block.compressed for group in groups)
                if block.compressed:
                    self._start_load(handle, block)
                else:
                    handle.complete(block.raw(groups, self._widths), "ram")
            elif writing is not None and writing[0] == name and all(group in writing[1] for group in groups):
                handle.complete({group: writing[1][group] for group in groups}, "ram")
            elif self._is_on_disk(name.key):
                self._start_load(handle, None)
            else:
                handle.fail("gone")
        return handle

    def request_copy(self, name: BlockKey, groups: tuple[int, ...], *, evicted: bool) -> int | None:
        """Request a copy of a block from KVCache: an evicted one goes to RAM, a published one to disk.

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
                if name.key in self._writing or self._is_on_disk(name.key):
                    return None
                size = sum(self._sizes[group] for group in groups)
                if self._stats.queued_bytes and self._stats.queued_bytes + size > self._max_queued_bytes:
                    self._stats.num_not_written += 1
                    return None
                self._queued_keys.add(name.key)
                self._stats.queued_bytes += size
            copy_id = next(self._copy_ids)
            self._requested_copies[copy_id] = name, size
            return copy_id

    def cancel(self, copy_id: int) -> None:
        """Cancel a requested copy or a staged load; unknown ids are ignored."""
        with self._changed:
            self._staged_loads.pop(copy_id, None)
            name, size = self._requested_copies.pop(copy_id, (None, 0))
            if name is not None and size:
                self._stats.queued_bytes -= size
                self._queued_keys.discard(name.key)

    def stage_load(self, buffers: Mapping[int, Buffer]) -> int:
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
                self.cancel(copy_id)
            if self._ram_store is not None:
                self._ram_store.drop(key)
            if self._disk_store is not None:
                self._dequeue(key)
                self._pending_drops[key] = self._pending_drops.get(key, 0) + 1
                self._writer.submit(partial(self._disk_store.drop, self._disk_key(key)))
                self._submit(self._writer, self._on_removed, key)

    # ------------------------------------------------------------ called by KVCache

    def put(self, copy_id: int, buffers: Mapping[int, Buffer]) -> None:
        """Receive a requested copy. The store owns the buffers from now on."""
        with self._changed:
            request = self._requested_copies.pop(copy_id, None)
            if request is None:
                return  # withdrawn meanwhile
            name, size = request
            assert all(memoryview(buffer).nbytes == self._sizes[group] for group, buffer in buffers.items())
            self._stats.bytes_out += sum(self._sizes[group] for group in buffers)
            if size:
                self._queued_keys.discard(name.key)
                self._writing[name.key] = name, buffers, size
                self._submit(self._writer, self._write, name)
            else:
                assert self._ram_store is not None
                if self._ram_store.put(name, buffers):
                    self._submit(self._writer, self._compress)

    def take(self, copy_id: int) -> Mapping[int, Buffer]:
        """Return and forget staged buffers; the caller copies and never writes them."""
        with self._changed:
            buffers = self._staged_loads.pop(copy_id)
            self._stats.bytes_in += sum(memoryview(buffer).nbytes for buffer in buffers.values())
            return buffers

    # ------------------------------------------------------------ may wait

    def wait(self, seconds: float) -> None:
        """Wait until no load is in progress, at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_pending_loads, seconds)

    @property
    def on_disk(self) -> bool:
        return self._disk_store is not None and self._disk_store.writable

    @property
    def folder(self) -> Path:
        assert self._disk_store is not None, "no disk store"
        return self._disk_store.folder

    def pin_blocks(self, keys: Sequence[str]) -> list[str]:
        """Write the queued blocks, flush these blocks to the disk and pin them; return their keys in the disk store."""
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
        with self._changed:
            ram_stats = RamStoreStats() if self._ram_store is None else self._ram_store.stats()
            disk_stats = DiskStoreStats() if self._disk_store is None else self._disk_store.stats()
            return replace(self._stats, ram=ram_stats, disk=disk_stats)

    # ------------------------------------------------------------ inside

    def _disk_key(self, key: str) -> str:
        return f"{self._key_prefix}-{key}"

    def _is_on_disk(self, key: str) -> bool:
        return self._disk_store is not None and self._disk_key(key) in self._disk_store

    def _dequeue(self, key: str) -> None:
        _, _, size = self._writing.pop(key, (None, None, 0))
        self._stats.queued_bytes -= size

    def _submit(self, thread: IoThread, method: Callable[..., None], *args: Any) -> None:
        """Call a method in a thread, which gets a weak reference: an unclosed store can be garbage collected."""
        thread.submit(partial(_call_if_alive, weakref.WeakMethod(method), *args))

    def _start_load(self, handle: LoadHandle, block: CachedBlock | None) -> None:
        self._num_pending_loads += 1
        self._submit(next(self._reader_cycle), self._load, handle, block)

    # ------------------------------------------------------------ in the threads

    def _write(self, name: BlockKey) -> None:
        with self._changed:
            entry = self._writing.get(name.key)
        if entry is None or entry[0] != name:
            return  # withdrawn meanwhile
        assert self._disk_store is not None
        sections = [Section(str(g), "uint8", (memoryview(p).nbytes,), p) for g, p in sorted(entry[1].items())]
        metadata = {"parent": name.parent_digest, "tokens": name.tokens.hex()}
        try:
            self._disk_store.put(self._disk_key(name.key), CONTAINER_KIND, self._fingerprint.parts, metadata, sections)
        finally:  # The block leaves the queue even if the write failed.
            with self._changed:
                if self._writing.get(name.key) is entry:
                    self._dequeue(name.key)

    def _on_removed(self, key: str) -> None:
        with self._changed:
            self._pending_drops[key] -= 1
            if not self._pending_drops[key]:
                del self._pending_drops[key]

    def _load(self, handle: LoadHandle, block: CachedBlock | None) -> None:
        """Decompress a block, or read it from the disk if None."""
        buffers: Mapping[int, Buffer] | None = None
        reason = "failed"  # also after a bug or a MemoryError, which IoThread logs
        try:
            if block is not None:
                buffers = block.raw(handle.groups, self._widths)
            elif not handle.done:  # Otherwise it was withdrawn meanwhile.
                assert self._disk_store is not None
                buffers = self._disk_store.get(self._disk_key(handle.name.key), partial(self._checked, handle))
        except StorageError as error:
            reason = error.reason
        except OSError:
            pass  # The disk store has counted it.
        finally:
            with self._changed:
                if not handle.done and buffers is not None:
                    handle.complete(buffers, "disk" if block is None else "ram")
                elif not handle.done:
                    handle.fail(reason)
                self._num_pending_loads -= 1
                self._changed.notify_all()

    def _checked(
        self, handle: LoadHandle, header: storage.container.Header, section: Callable[[str], memoryview]
    ) -> dict[int, Buffer]:
        """Return the buffers of a stored block, or raise StorageError if the file is another block."""
        differs = ", ".join(self._fingerprint.differences(header.fingerprint))
        if header.kind != CONTAINER_KIND or differs:
            raise StorageError(f"stored block: another kind or model: {differs}", reason="mismatch")
        key = header.metadata.get("parent"), header.metadata.get("tokens")
        if key != (handle.name.parent_digest, handle.name.tokens.hex()):
            raise StorageError("stored block: other tokens", reason="collision")
        groups = [group for group in handle.groups if str(group) in header.sections]
        if any(header.sections[str(group)].nbytes != self._sizes[group] for group in groups):
            raise StorageError("stored block: another size", reason="mismatch")
        return {group: section(str(group)) for group in groups}

    def _compress(self) -> None:
        assert self._ram_store is not None
        while True:
            with self._changed:
                block = self._ram_store.next_to_compress()
            if block is None:
                return
            compressed = block.compress(self._widths)
            with self._changed:
                self._ram_store.replace(block, compressed)


def _call_if_alive(method: weakref.WeakMethod[Callable[..., None]], *args: Any) -> None:
    bound = method()
    if bound is not None:
        bound(*args)


def _stop(readers: Sequence[IoThread], writer: IoThread, disk_store: DiskBlockStore | None) -> None:
    for reader in readers:
        reader.stop(1.0)
    if not writer.stop(CLOSE_TIMEOUT):
        LOG.warning("not all blocks were written to the disk store in %.0f s", CLOSE_TIMEOUT)
    if disk_store is not None:
        with suppress(OSError):
            disk_store.release()
