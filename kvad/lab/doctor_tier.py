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

from kvad.aside import list_temp_paths, parse_temp_path
from kvad.cache.disk import REAL_FILE_SYSTEM
from kvad.cache.entry import open_container
from kvad.cache.pins import FILE_SUFFIX, read_pinned_prefixes
from kvad.cache.shelf import KEY_PATTERN, LOCK_NAME
from kvad.errors import StorageError, UsageError, format_count
from kvad.lab.doctor import CheckResult

__all__ = ["check_cache_dir", "is_cache_dir"]

FIX_HINT = "kvad doctor --fix removes it"


def is_cache_dir(folder: Path) -> bool:
    return (folder / LOCK_NAME).is_file()


def check_cache_dir(folder: Path, *, fix: bool = False) -> Iterator[CheckResult]:
    """Findings, as they are made.  UsageError: it is to be fixed, and another process holds it."""
    file = _locked(folder)
    try:
        if file is None:
            if fix:
                raise UsageError(f"{folder} is in use by another process", "stop it, or look without --fix")
            yield CheckResult("lock", True, "another process holds it: what it writes now may look half done")
        yield from _orphans(folder, fix)
        yield from _entries(folder, fix)
        yield from _check_pinned_prefixes(folder)
    finally:
        if file is not None:
            REAL_FILE_SYSTEM.close(file)


def _locked(folder: Path) -> int | None:
    """None: another process holds it."""
    try:
        return REAL_FILE_SYSTEM.lock(folder / LOCK_NAME)
    except BlockingIOError:
        return None


def _orphans(folder: Path, fix: bool) -> Iterator[CheckResult]:
    dead = []
    for each in list_temp_paths(folder):
        with suppress(FileNotFoundError):
            if not each.in_use:
                dead.append(each.path)
    for path in dead:
        yield from _fix_or_report("orphan", path, "a writer that died left it half written", fix)
    if not dead:
        yield CheckResult("orphans", True, "none")


def _entries(folder: Path, fix: bool) -> Iterator[CheckResult]:
    counts, models, sizes = Counter[str](), Counter[str](), 0
    for each in sorted(REAL_FILE_SYSTEM.list_files(folder)):
        if each.name == LOCK_NAME or parse_temp_path(folder / each.name) is not None:
            continue
        key, dot, ending = each.name.rpartition(".")
        block = dot + ending == ".kv" and KEY_PATTERN.fullmatch(key) is not None
        if not block and dot + ending != FILE_SUFFIX:
            yield CheckResult("files", False, f"{each.name} is not the tier's", "move it elsewhere")
            continue
        why, says = _read(folder / each.name, models)
        counts[why if block else f"pin {why}"] += 1
        sizes += each.size if why == "whole" else 0
        if why == "whole":
            continue
        yield from _fix_or_report(why, folder / each.name, says, fix and why == "torn")
    whole = f"{format_count(counts['whole'], 'block')} and {format_count(counts['pin whole'], 'pin')} whole, {sizes:,} bytes"
    yield CheckResult(
        "entries",
        True,
        f"{whole}, of {format_count(len(models), 'model or way of keeping', 'models or ways of keeping')}",
    )


def _read(path: Path, models: Counter[str]) -> tuple[str, str]:
    try:
        with open_container(path) as entry:
            entry.check()
            models[str(sorted(entry.header.fingerprint.items()))] += 1
    except StorageError as error:
        return error.reason, error.message.removeprefix(f"{path}: ")
    except OSError as error:
        return "unread", str(error)
    return "whole", ""


def _fix_or_report(check: str, path: Path, says: str, fix: bool) -> Iterator[CheckResult]:
    if not fix:
        safe = check in ("orphan", "torn")
        yield CheckResult(check, False, f"{path.name}: {says}", FIX_HINT if safe else "it is left as it is")
        return
    REAL_FILE_SYSTEM.remove(path)
    yield CheckResult(check, True, f"{path.name}: {says}; removed")


def _check_pinned_prefixes(folder: Path) -> Iterator[CheckResult]:
    for pin in read_pinned_prefixes(folder):
        missing = sum(not (folder / f"{key}.kv").exists() for key in pin.keys)
        if missing:
            todo = f"kvad prefix add ... --name {pin.name} computes them again"
            yield CheckResult(
                "prefix", False, f"{pin.name}: {missing} of {format_count(len(pin.keys), 'block')} are missing", todo
            )
        else:
            yield CheckResult("prefix", True, f"{pin.name}: {format_count(pin.tokens, 'token')}")
