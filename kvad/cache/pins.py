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

from kvad.cache.disk import DISK, Disk, is_name, no_name
from kvad.cache.entry import read_header, write_entry
from kvad.cache.shelf import KEY
from kvad.errors import EntryError

__all__ = ["ENDING", "Pin", "find_pin", "pinned_keys", "read_pins", "remove_pin", "write_pin"]

KIND, ENDING = "pin", ".pin"


class Pin(NamedTuple):
    """``tokens``: of the prefix, in whole blocks; ``text``: how it begins; ``identity``: of what its blocks belong
    to."""

    name: str
    keys: tuple[str, ...]
    tokens: int
    text: str
    identity: Mapping[str, str]


def check_name(name: str) -> str:
    """UsageError for what is no name."""
    if not is_name(name) or name.endswith(ENDING):
        raise no_name(name, "for a prefix")
    return name


def write_pin(folder: Path, pin: Pin, disk: Disk = DISK) -> None:
    """Flushed when this returns.  UsageError for its name; OSError as the disk says it."""
    facts = {"keys": list(pin.keys), "tokens": pin.tokens, "text": pin.text}
    write_entry(folder / f"{check_name(pin.name)}{ENDING}", KIND, pin.identity, facts, [], durable=True, disk=disk)


def read_pins(folder: Path, disk: Disk = DISK) -> list[Pin]:
    """Every pin that can be read, by name; damaged ones are left out (``kvad doctor`` names them)."""
    found = []
    for each in sorted(disk.scan(folder)):
        if each.name.endswith(ENDING) and is_name(each.name.removesuffix(ENDING)):
            with suppress(EntryError):
                found.append(_read(folder / each.name, disk))
    return found


def find_pin(folder: Path, name: str, disk: Disk = DISK) -> Pin:
    """EntryError: there is none of that name, or it is damaged; UsageError: it is no name."""
    path = folder / f"{check_name(name)}{ENDING}"
    try:
        return _read(path, disk)
    except EntryError as error:
        if error.why != "missing":
            raise
        raise EntryError(
            f"{folder} has no prefix {name!r}", f"kvad prefix list --tier {folder}", why="missing"
        ) from None


def remove_pin(folder: Path, name: str, disk: Disk = DISK) -> None:
    disk.remove(folder / f"{check_name(name)}{ENDING}")
    disk.sync_folder(folder)


def pinned_keys(folder: Path, disk: Disk = DISK) -> frozenset[str]:
    return frozenset(key for pin in read_pins(folder, disk) for key in pin.keys)


def _read(path: Path, disk: Disk) -> Pin:
    header = read_header(path, disk)
    keys, tokens, text = (header.facts.get(name) for name in ("keys", "tokens", "text"))
    fine = isinstance(keys, list) and all(isinstance(key, str) and KEY.fullmatch(key) for key in keys)
    if header.kind != KIND or not fine or type(tokens) is not int or not isinstance(text, str):
        raise EntryError(f"{path} is no pin", "it is left as it is", why="alien")
    assert isinstance(keys, Sequence)
    return Pin(path.name.removesuffix(ENDING), tuple(keys), tokens, text, header.identity)
