"""Open what an engine's cache has beside its pool, where it asks for any: the tiers, and the spill.

A folder that cannot be had (another process holds it, the disk refuses) is said in one line, and the engine goes on
without it; one that cannot be meant is the user's error.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvad.cache.carry import block_bytes_per_group
from kvad.cache.deposits import check_shareable
from kvad.cache.disk import REAL_FILE_SYSTEM, FileSystem
from kvad.cache.entry import WIDTHS, read_header
from kvad.cache.identity import CacheFingerprint
from kvad.cache.pins import pinned_keys
from kvad.cache.shelf import LOCK_NAME, DiskBlockStore
from kvad.cache.sizing import CacheConfig, CacheGroup
from kvad.cache.spill import OffloadReader
from kvad.cache.tiers import BlockStore, key_prefix
from kvad.errors import ConfigError, StorageError, format_count

__all__ = ["open_offload_reader", "open_block_store"]

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
    sizes = block_bytes_per_group(own)
    widths = [WIDTHS[group.tensor_formats[0][0].arrays(group.spec.head_dim)[0].dtype] for group in own]
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
        if folder.exists() and not (folder / LOCK_NAME).exists() and any(folder.iterdir()):
            raise ConfigError(
                f"cache.prefix_cache_dir: {folder} has other files in it", "name a folder that is new, or a tier's"
            )
        pinned = partial(pinned_keys, folder, disk)
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
    own, others = key_prefix(identity), Counter[str]()
    example: dict[str, str] = {}
    for key in shelf.eviction_order():
        start = key.partition("-")[0]
        others[start] += start != own
        example[start] = key
    for start, count in others.items():
        if not count:
            continue
        with suppress(StorageError, OSError):
            header = read_header(shelf.folder / f"{example[start]}.kv", disk)
            differs = ", ".join(identity.differences(header.fingerprint)) or "nothing that is known"
            level = logging.INFO if own in others else logging.WARNING
            blocks = format_count(count, "stored block")
            LOG.log(level, "%s: %s cannot be used here; what differs: %s", shelf.folder, blocks, differs)
