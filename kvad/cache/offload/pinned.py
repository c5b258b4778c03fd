"""Prefixes that stay: a name, the text they were made from, and the keys of their blocks, which are never evicted.

    FOLDER/NAME.pin     an entry (``entry.py``) of kind "pin": facts {"keys", "tokens", "text"}, flushed

A pin says nothing that is trusted: its blocks are checked like all others, and one that is lost is computed again.
No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvad import storage
from kvad.cache.offload.disk_store import KEY_PATTERN
from kvad.errors import StorageError
from kvad.storage import REAL_FILE_SYSTEM, FileSystem

CONTAINER_KIND, FILE_SUFFIX = "pin", ".pin"


class PinnedPrefix(NamedTuple):
    """``tokens``: of the prefix, in whole blocks; ``text``: how it begins; ``identity``: of what its blocks belong
    to."""

    name: str
    keys: tuple[str, ...]
    tokens: int
    text: str
    fingerprint: Mapping[str, str]


def check_prefix_name(name: str) -> str:
    """UsageError for what is no name."""
    if not storage.filesystem.is_valid_name(name) or name.endswith(FILE_SUFFIX):
        raise storage.filesystem.invalid_name_error(name, "for a prefix")
    return name


def write_pinned_prefix(folder: Path, pin: PinnedPrefix, disk: FileSystem = REAL_FILE_SYSTEM) -> None:
    """Flushed when this returns.  UsageError for its name; OSError as the disk says it."""
    facts = {"keys": list(pin.keys), "tokens": pin.tokens, "text": pin.text}
    storage.container.write_container(
        folder / f"{check_prefix_name(pin.name)}{FILE_SUFFIX}",
        CONTAINER_KIND,
        pin.fingerprint,
        facts,
        [],
        durable=True,
        disk=disk,
    )


def read_pinned_prefixes(folder: Path, disk: FileSystem = REAL_FILE_SYSTEM) -> list[PinnedPrefix]:
    """Every pin that can be read, by name; damaged ones are left out (``kvad doctor`` names them)."""
    found = []
    for each in sorted(disk.list_files(folder)):
        if each.name.endswith(FILE_SUFFIX) and storage.filesystem.is_valid_name(each.name.removesuffix(FILE_SUFFIX)):
            with suppress(StorageError):
                found.append(_read(folder / each.name, disk))
    return found


def find_pinned_prefix(folder: Path, name: str, disk: FileSystem = REAL_FILE_SYSTEM) -> PinnedPrefix:
    """EntryError: there is none of that name, or it is damaged; UsageError: it is no name."""
    path = folder / f"{check_prefix_name(name)}{FILE_SUFFIX}"
    try:
        return _read(path, disk)
    except StorageError as error:
        if error.reason != "missing":
            raise
        raise StorageError(
            f"{folder} has no prefix {name!r}", f"kvad prefix list --tier {folder}", reason="missing"
        ) from None


def remove_pinned_prefix(folder: Path, name: str, disk: FileSystem = REAL_FILE_SYSTEM) -> None:
    disk.remove(folder / f"{check_prefix_name(name)}{FILE_SUFFIX}")
    disk.sync_dir(folder)


def pinned_keys(folder: Path, disk: FileSystem = REAL_FILE_SYSTEM) -> frozenset[str]:
    return frozenset(key for pin in read_pinned_prefixes(folder, disk) for key in pin.keys)


def _read(path: Path, disk: FileSystem) -> PinnedPrefix:
    header = storage.container.read_header(path, disk)
    keys, tokens, text = (header.metadata.get(name) for name in ("keys", "tokens", "text"))
    fine = isinstance(keys, list) and all(isinstance(key, str) and KEY_PATTERN.fullmatch(key) for key in keys)
    if header.kind != CONTAINER_KIND or not fine or type(tokens) is not int or not isinstance(text, str):
        raise StorageError(f"{path} is no pin", "it is left as it is", reason="alien")
    assert isinstance(keys, Sequence)
    return PinnedPrefix(path.name.removesuffix(FILE_SUFFIX), tuple(keys), tokens, text, header.fingerprint)
