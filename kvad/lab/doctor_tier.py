"""Look a tier's folder over: which blocks are whole, which are torn, alien or orphans; and remove what is safe to
remove.

Every byte is read.  Safe to remove: what a dead writer left half written, and a block or a pin that is damaged (it
would be refused, and can be computed again).  Never: a file of another name or version, a block of another model.  No
torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvad.aside import leftover, leftovers
from kvad.cache.disk import DISK
from kvad.cache.entry import open_entry
from kvad.cache.pins import ENDING, read_pins
from kvad.cache.shelf import KEY, LOCK
from kvad.errors import EntryError, UsageError, counted
from kvad.lab.doctor import Finding

__all__ = ["examine_tier", "is_tier"]

FIX = "kvad doctor --fix removes it"


def is_tier(folder: Path) -> bool:
    return (folder / LOCK).is_file()


def examine_tier(folder: Path, *, fix: bool = False) -> Iterator[Finding]:
    """Findings, as they are made.  UsageError: it is to be fixed, and another process holds it."""
    file = _locked(folder)
    try:
        if file is None:
            if fix:
                raise UsageError(f"{folder} is in use by another process", "stop it, or look without --fix")
            yield Finding("lock", True, "another process holds it: what it writes now may look half done")
        yield from _orphans(folder, fix)
        yield from _entries(folder, fix)
        yield from _pins(folder)
    finally:
        if file is not None:
            DISK.close(file)


def _locked(folder: Path) -> int | None:
    """None: another process holds it."""
    try:
        return DISK.lock(folder / LOCK)
    except BlockingIOError:
        return None


def _orphans(folder: Path, fix: bool) -> Iterator[Finding]:
    dead = []
    for each in leftovers(folder):
        with suppress(FileNotFoundError):
            if not each.in_use:
                dead.append(each.path)
    for path in dead:
        yield from _told("orphan", path, "a writer that died left it half written", fix)
    if not dead:
        yield Finding("orphans", True, "none")


def _entries(folder: Path, fix: bool) -> Iterator[Finding]:
    counts, models, sizes = Counter[str](), Counter[str](), 0
    for each in sorted(DISK.scan(folder)):
        if each.name == LOCK or leftover(folder / each.name) is not None:
            continue
        key, dot, ending = each.name.rpartition(".")
        block = dot + ending == ".kv" and KEY.fullmatch(key) is not None
        if not block and dot + ending != ENDING:
            yield Finding("files", False, f"{each.name} is not the tier's", "move it elsewhere")
            continue
        why, says = _read(folder / each.name, models)
        counts[why if block else f"pin {why}"] += 1
        sizes += each.size if why == "whole" else 0
        if why == "whole":
            continue
        yield from _told(why, folder / each.name, says, fix and why == "torn")
    whole = f"{counted(counts['whole'], 'block')} and {counted(counts['pin whole'], 'pin')} whole, {sizes:,} bytes"
    yield Finding(
        "entries", True, f"{whole}, of {counted(len(models), 'model or way of keeping', 'models or ways of keeping')}"
    )


def _read(path: Path, models: Counter[str]) -> tuple[str, str]:
    try:
        with open_entry(path) as entry:
            entry.check()
            models[str(sorted(entry.header.identity.items()))] += 1
    except EntryError as error:
        return error.why, error.message.removeprefix(f"{path}: ")
    except OSError as error:
        return "unread", str(error)
    return "whole", ""


def _told(check: str, path: Path, says: str, fix: bool) -> Iterator[Finding]:
    if not fix:
        safe = check in ("orphan", "torn")
        yield Finding(check, False, f"{path.name}: {says}", FIX if safe else "it is left as it is")
        return
    DISK.remove(path)
    yield Finding(check, True, f"{path.name}: {says}; removed")


def _pins(folder: Path) -> Iterator[Finding]:
    for pin in read_pins(folder):
        missing = sum(not (folder / f"{key}.kv").exists() for key in pin.keys)
        if missing:
            todo = f"kvad prefix add ... --name {pin.name} computes them again"
            yield Finding(
                "prefix", False, f"{pin.name}: {missing} of {counted(len(pin.keys), 'block')} are missing", todo
            )
        else:
            yield Finding("prefix", True, f"{pin.name}: {counted(pin.tokens, 'token')}")
