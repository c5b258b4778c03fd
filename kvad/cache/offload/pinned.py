"""Pinned prefixes: a name, its text, and the keys of its blocks, which are never evicted.

    FOLDER/NAME.prefix     a durable container of kind "pinned-prefix": metadata {"keys", "tokens", "text"}

The file is not trusted: its blocks are verified like all others, and a lost one is recomputed. No torch.
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

CONTAINER_KIND, FILE_SUFFIX = "pinned-prefix", ".prefix"


class PinnedPrefix(NamedTuple):
    """A named prefix whose blocks stay on disk."""

    name: str
    keys: tuple[str, ...]  # of its blocks in the disk store
    tokens: int  # number of tokens, whole blocks
    text: str  # beginning of the text
    fingerprint: Mapping[str, str]  # model and cache of its blocks


def check_prefix_name(name: str) -> str:
    """Return a valid name unchanged, or raise UsageError."""
    if not storage.filesystem.is_valid_name(name) or name.endswith(FILE_SUFFIX):
        raise storage.filesystem.invalid_name_error(name, "for a prefix")
    return name


def write_pinned_prefix(folder: Path, pin: PinnedPrefix, fs: FileSystem = REAL_FILE_SYSTEM) -> None:
    """Write a pinned prefix durably."""
    metadata = {"keys": list(pin.keys), "tokens": pin.tokens, "text": pin.text}
    path = _path(folder, pin.name)
    storage.container.write_container(path, CONTAINER_KIND, pin.fingerprint, metadata, [], durable=True, fs=fs)


def read_pinned_prefixes(folder: Path, fs: FileSystem = REAL_FILE_SYSTEM) -> list[PinnedPrefix]:
    """Return every readable pinned prefix by name.

    Damaged files are skipped; ``kvad doctor`` lists them.
    """
    prefixes = []
    for file in sorted(fs.list_files(folder)):
        if file.name.endswith(FILE_SUFFIX) and storage.filesystem.is_valid_name(file.name.removesuffix(FILE_SUFFIX)):
            with suppress(StorageError):
                prefixes.append(_read(folder / file.name, fs))
    return prefixes


def find_pinned_prefix(folder: Path, name: str, fs: FileSystem = REAL_FILE_SYSTEM) -> PinnedPrefix:
    """Return the pinned prefix of this name.

    Raises:
        StorageError: If it does not exist or is damaged.
        UsageError: If the name is not valid.
    """
    path = _path(folder, name)
    try:
        return _read(path, fs)
    except StorageError as error:
        if error.reason != "missing":
            raise
        raise StorageError(
            f"{folder} has no prefix {name!r}", f"kvad prefix list --prefix-cache-dir {folder}", reason="missing"
        ) from None


def remove_pinned_prefix(folder: Path, name: str, fs: FileSystem = REAL_FILE_SYSTEM) -> None:
    """Unpin a prefix; its blocks stay until they are evicted."""
    fs.remove(_path(folder, name))
    fs.sync_dir(folder)


def pinned_keys(folder: Path, fs: FileSystem = REAL_FILE_SYSTEM) -> frozenset[str]:
    return frozenset(key for pin in read_pinned_prefixes(folder, fs) for key in pin.keys)


def _path(folder: Path, name: str) -> Path:
    return folder / f"{check_prefix_name(name)}{FILE_SUFFIX}"


def _read(path: Path, fs: FileSystem) -> PinnedPrefix:
    header = storage.container.read_header(path, fs)
    keys, tokens, text = (header.metadata.get(name) for name in ("keys", "tokens", "text"))
    is_valid = isinstance(keys, list) and all(isinstance(key, str) and KEY_PATTERN.fullmatch(key) for key in keys)
    if header.kind != CONTAINER_KIND or not is_valid or type(tokens) is not int or not isinstance(text, str):
        raise StorageError(f"{path}: not a pinned prefix", "The file is left unchanged.", reason="foreign")
    assert isinstance(keys, Sequence)
    return PinnedPrefix(path.name.removesuffix(FILE_SUFFIX), tuple(keys), tokens, text, header.fingerprint)
