"""Factories for an engine's storage besides the pool: block stores, token offload and swap space.

If a folder is unavailable (in use, or not writable), the engine logs one line and continues without
it; an invalid folder is a ConfigError.
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
    cache: CacheConfig, groups: Sequence[CacheGroup], fs: FileSystem = REAL_FILE_SYSTEM
) -> OffloadReader | None:
    """Open the storage of offloaded tokens, if any; raise ConfigError for an unusable folder."""
    if not any(group.lower_level is not None and group.lower_level.is_offloaded for group in groups):
        return None
    return OffloadReader(groups, cache.offload_ram, None if cache.offload_dir is None else Path(cache.offload_dir), fs)


def open_block_store(
    cache: CacheConfig,
    groups: Sequence[CacheGroup],
    fingerprint: Callable[[], CacheFingerprint],
    fs: FileSystem = REAL_FILE_SYSTEM,
) -> BlockStore | None:
    """Open the block store of a resolved cache configuration, or return None if none is configured or available.

    ``fingerprint`` computes the cache's fingerprint; it is called only if blocks outlive the process. Raises
    ConfigError if blocks cannot be shared under the policy, or the folder is not a prefix cache.
    """
    if cache.prefix_cache_dir is None and cache.prefix_cache_ram is None:
        return None
    check_shareable(cache, groups)
    token_groups = [group for group in groups if not group.spec.is_cross_attention and group.lower_level is None]
    block_sizes = device.host_copy.block_bytes_per_group(token_groups)
    widths = [
        storage.container.WIDTHS[group.tensor_formats[0][0].arrays(group.spec.head_dim)[0].dtype]
        for group in token_groups
    ]
    if cache.prefix_cache_dir is None:
        return BlockStore(block_sizes, widths, ram_bytes=cache.prefix_cache_ram)
    cache_fingerprint = fingerprint()
    disk_store = _open_disk_store(Path(cache.prefix_cache_dir), cache, fs)
    if disk_store is None and cache.prefix_cache_ram is None:
        return None
    if disk_store is not None:
        _warn_shared(disk_store, cache_fingerprint, fs)
    return BlockStore(
        block_sizes, widths, ram_bytes=cache.prefix_cache_ram, disk_store=disk_store, fingerprint=cache_fingerprint
    )


def _open_disk_store(folder: Path, cache: CacheConfig, fs: FileSystem) -> DiskBlockStore | None:
    """Open the disk store, or log why it is unavailable and return None."""
    hint = "Name a new folder, or an existing prefix cache."
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"cache.prefix_cache_dir: {folder} must be a folder", hint)
    try:
        if folder.exists() and not (folder / offload.disk_store.LOCK_NAME).exists() and any(folder.iterdir()):
            raise ConfigError(f"cache.prefix_cache_dir: {folder} contains other files", hint)
        pinned = partial(offload.pinned.pinned_keys, folder, fs)
        return DiskBlockStore(
            folder, cache.prefix_cache_limit, replacement=cache.prefix_cache_eviction, pinned=pinned, fs=fs
        )
    except BlockingIOError:
        owner = storage.filesystem.lock_owner(folder / offload.disk_store.LOCK_NAME)
        LOG.warning("%s is in use by %s; the engine continues without the disk store", folder, owner)
    except OSError as error:
        LOG.warning(
            "%s cannot be used (%s); the engine continues without the disk store", folder, error.strerror or error
        )
    return None


def _warn_shared(disk_store: DiskBlockStore, fingerprint: CacheFingerprint, fs: FileSystem) -> None:
    """Log once how many stored blocks belong to other models or cache configurations."""
    own_prefix, num_blocks_by_prefix = offload.block_store.key_prefix(fingerprint), Counter[str]()
    example_key: dict[str, str] = {}
    for key in disk_store.eviction_order():
        key_prefix = key.partition("-")[0]
        num_blocks_by_prefix[key_prefix] += key_prefix != own_prefix
        example_key[key_prefix] = key
    for key_prefix, num_blocks in num_blocks_by_prefix.items():
        if not num_blocks:
            continue
        with suppress(StorageError, OSError):
            header = storage.container.read_header(disk_store.folder / f"{example_key[key_prefix]}.kv", fs)
            differences = ", ".join(fingerprint.differences(header.fingerprint)) or "unknown"
            level = logging.INFO if own_prefix in num_blocks_by_prefix else logging.WARNING
            blocks = format_count(num_blocks, "stored block")
            LOG.log(level, "%s: %s cannot be used here; differences: %s", disk_store.folder, blocks, differences)


def open_swap_space(
    kv_cache: KVCache, kv_cache_manager: KVCacheManager, ram: int | None, folder: Path | None, fs: FileSystem
) -> SwapSpace:
    """Open the swap space.

    ``ram`` None: all in host memory if sequences must be swapped, all on disk if there is a ``folder``, else none.
    Raises ConfigError if the folder cannot be written, or if there are several ranks.
    """
    if folder is not None and kv_cache.ranks > 1:
        raise ConfigError(
            f"swap_dir: unavailable with {kv_cache.ranks} ranks, which swap to host memory only",
            "Omit it; swap_space limits the bytes of all ranks together.",
        )
    if ram is None and (folder is not None or not kv_cache_manager.lossy):
        ram = 0

    def to_sections(key: int, copies: Sequence[Tensor]) -> list[Section]:
        kv_cache.copier.wait(key)
        return device.host_copy.to_sections(copies)

    files = None if folder is None else SwapFiles(folder, fs=fs)
    return SwapSpace(
        kv_cache.swapped, ram=ram, files=files, to_sections=to_sections, from_sections=device.host_copy.from_sections
    )
