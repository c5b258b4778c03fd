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

from kvad.cache.carry import piece_sizes
from kvad.cache.deposits import check_shared
from kvad.cache.disk import DISK, Disk
from kvad.cache.entry import WIDTHS, read_header
from kvad.cache.identity import Identity
from kvad.cache.pins import pinned_keys
from kvad.cache.shelf import LOCK, Shelf
from kvad.cache.sizing import CacheConfig, Group
from kvad.cache.spill import Spill
from kvad.cache.tiers import Tiers, space
from kvad.errors import ConfigError, EntryError, counted

__all__ = ["open_spill", "open_tiers"]

LOG = logging.getLogger(__name__)


def open_spill(cache: CacheConfig, placed: Sequence[Group], disk: Disk = DISK) -> Spill | None:
    """Where tokens go that leave the pool; None: none does.  ConfigError: its folder cannot be used."""
    if not any(group.level is not None and group.level.spilled for group in placed):
        return None
    return Spill(placed, cache.spill_ram, None if cache.spill_dir is None else Path(cache.spill_dir), disk)


def open_tiers(
    cache: CacheConfig, placed: Sequence[Group], identity: Callable[[], Identity], disk: Disk = DISK
) -> Tiers | None:
    """The tiers of a settled cache; None where it asks for none, or there is none to be had.

    ``identity`` is asked only where blocks outlive the process.  ConfigError: a policy under which nothing is shared, a
    folder that is none of ours.
    """
    if cache.tier is None and cache.tier_ram is None:
        return None
    check_shared(cache, placed)
    own = [group for group in placed if not group.mixer.cross and group.level is None]
    sizes = piece_sizes(own)
    widths = [WIDTHS[group.stores[0][0].arrays(group.mixer.head_dim)[0].dtype] for group in own]
    if cache.tier is None:
        return Tiers(sizes, widths, ram=cache.tier_ram)
    known = identity()
    shelf = _shelf(Path(cache.tier), cache, disk)
    if shelf is None and cache.tier_ram is None:
        return None
    if shelf is not None:
        _tell_others(shelf, known, disk)
    return Tiers(sizes, widths, ram=cache.tier_ram, shelf=shelf, identity=known)


def _shelf(folder: Path, cache: CacheConfig, disk: Disk) -> Shelf | None:
    """None: it is not to be had now, and that was said."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"cache.tier: {folder} is not a folder", "name one that is new, or a tier's")
    try:
        if folder.exists() and not (folder / LOCK).exists() and any(folder.iterdir()):
            raise ConfigError(f"cache.tier: {folder} has other files in it", "name a folder that is new, or a tier's")
        pinned = partial(pinned_keys, folder, disk)
        return Shelf(folder, cache.tier_limit, replacement=cache.tier_replacement, pinned=pinned, disk=disk)
    except BlockingIOError:
        LOG.warning("%s is in use by another process; this one goes on without that tier", folder)
    except OSError as error:
        LOG.warning("%s cannot be used as a tier (%s); serving goes on without it", folder, error.strerror or error)
    return None


def _tell_others(shelf: Shelf, identity: Identity, disk: Disk) -> None:
    """Say once whose the blocks are that this engine will not find."""
    own, others = space(identity), Counter[str]()
    example: dict[str, str] = {}
    for key in shelf.order():
        start = key.partition("-")[0]
        others[start] += start != own
        example[start] = key
    for start, count in others.items():
        if not count:
            continue
        with suppress(EntryError, OSError):
            header = read_header(shelf.folder / f"{example[start]}.kv", disk)
            differs = ", ".join(identity.differs(header.identity)) or "nothing that is known"
            level = logging.INFO if own in others else logging.WARNING
            blocks = counted(count, "stored block")
            LOG.log(level, "%s: %s cannot be used here; what differs: %s", shelf.folder, blocks, differs)
