"""Open what an engine's cache has beside its pool, where it asks for any: the tiers, and the spill.

A folder that cannot be had (another process holds it, the disk refuses) is said in one line, and the engine goes on
without it; one that cannot be meant is the user's error.

The parking of one engine: the device's host copies, a bound, and a folder for what is beyond it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from torch import Tensor

from kvad import storage
from kvad.cache import CacheConfig, CacheGroup, device, offload
from kvad.cache.device import KVCache, OffloadReader
from kvad.cache.manager import KVCacheManager, check_shareable
from kvad.cache.offload import BlockStore, DiskBlockStore, SwapFiles, SwapSpace
from kvad.errors import ConfigError, StorageError, format_count
from kvad.storage import REAL_FILE_SYSTEM, CacheFingerprint, FileSystem, Section

LOG = logging.getLogger(__name__)


def open_offload_reader(
    cache: CacheConfig, placed: Sequence[CacheGroup], disk: FileSystem = REAL_FILE_SYSTEM
) -> OffloadReader | None:
    """Where tokens go that leave the pool; None: none does.  ConfigError: its folder cannot be used."""
    if not any(group.lower_level is not None and group.lower_level.is_offloaded for group in placed):
        return None
    return OffloadReader(
        placed, cache.offload_ram, None if cache.offload_dir is None else Path(cache.offload_dir), disk
    )


def open_block_store(
    cache: CacheConfig,
    placed: Sequence[CacheGroup],
    identity: Callable[[], CacheFingerprint],
    disk: FileSystem = REAL_FILE_SYSTEM,
) -> BlockStore | None:
    """The tiers of a settled cache; None where it asks for none, or there is none to be had.

    ``identity`` is asked only where blocks outlive the process.  ConfigError: a policy under which nothing is shared, a
    folder that is none of ours.
    """
    if cache.prefix_cache_dir is None and cache.prefix_cache_ram is None:
        return None
    check_shareable(cache, placed)
    own = [group for group in placed if not group.spec.is_cross_attention and group.lower_level is None]
    sizes = device.host_copy.block_bytes_per_group(own)
    widths = [
        storage.container.WIDTHS[group.tensor_formats[0][0].arrays(group.spec.head_dim)[0].dtype] for group in own
    ]
    if cache.prefix_cache_dir is None:
        return BlockStore(sizes, widths, ram=cache.prefix_cache_ram)
    known = identity()
    shelf = _open_disk_store(Path(cache.prefix_cache_dir), cache, disk)
    if shelf is None and cache.prefix_cache_ram is None:
        return None
    if shelf is not None:
        _warn_shared(shelf, known, disk)
    return BlockStore(sizes, widths, ram=cache.prefix_cache_ram, disk=shelf, identity=known)


def _open_disk_store(folder: Path, cache: CacheConfig, disk: FileSystem) -> DiskBlockStore | None:
    """None: it is not to be had now, and that was said."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"cache.prefix_cache_dir: {folder} is not a folder", "name one that is new, or a tier's")
    try:
        if folder.exists() and not (folder / offload.disk_store.LOCK_NAME).exists() and any(folder.iterdir()):
            raise ConfigError(
                f"cache.prefix_cache_dir: {folder} has other files in it", "name a folder that is new, or a tier's"
            )
        pinned = partial(offload.pinned.pinned_keys, folder, disk)
        return DiskBlockStore(
            folder, cache.prefix_cache_limit, replacement=cache.prefix_cache_eviction, pinned=pinned, disk=disk
        )
    except BlockingIOError:
        LOG.warning("%s is in use by another process; this one goes on without that tier", folder)
    except OSError as error:
        LOG.warning("%s cannot be used as a tier (%s); serving goes on without it", folder, error.strerror or error)
    return None


def _warn_shared(shelf: DiskBlockStore, identity: CacheFingerprint, disk: FileSystem) -> None:
    """Say once whose the blocks are that this engine will not find."""
    own, others = offload.block_store.key_prefix(identity), Counter[str]()
    example: dict[str, str] = {}
    for key in shelf.eviction_order():
        start = key.partition("-")[0]
        others[start] += start != own
        example[start] = key
    for start, count in others.items():
        if not count:
            continue
        with suppress(StorageError, OSError):
            header = storage.container.read_header(shelf.folder / f"{example[start]}.kv", disk)
            differs = ", ".join(identity.differences(header.fingerprint)) or "nothing that is known"
            level = logging.INFO if own in others else logging.WARNING
            blocks = format_count(count, "stored block")
            LOG.log(level, "%s: %s cannot be used here; what differs: %s", shelf.folder, blocks, differs)


def open_swap_space(
    memory: KVCache, ledger: KVCacheManager, ram: int | None, folder: Path | None, disk: FileSystem
) -> SwapSpace:
    """``ram`` None: all in host memory where rows must be parked, all on disk where there is a ``folder``, else none.
    ConfigError for a folder that cannot be written to, or that would be rank 0's alone."""
    if folder is not None and memory.ranks > 1:
        raise ConfigError(
            f"park_dir: {memory.ranks} ranks share a model, and their rows are parked in host memory alone",
            "leave it out; park_ram bounds the bytes of all ranks together",
        )
    if ram is None and (folder is not None or not ledger.lossy):
        ram = 0

    def packed(key: int, copies: Sequence[Tensor]) -> list[Section]:
        memory.copier.wait(key)
        return device.host_copy.to_sections(copies)

    files = None if folder is None else SwapFiles(folder, disk=disk)
    return SwapSpace(
        memory.swapped, ram=ram, files=files, to_sections=packed, from_sections=device.host_copy.from_sections
    )
