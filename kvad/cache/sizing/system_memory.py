"""How much memory this process may still take: the machine's, or what its control groups leave of it.

Linux: ``MemAvailable`` of ``/proc/meminfo``, and for every memory control group around the process its limit minus what
it uses, file cache that can be dropped given back.  Elsewhere what ``sysconf`` says, and None where nobody knows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# (controllers in /proc/self/cgroup, mount, limit, used, droppable in memory.stat): version 2, version 1
_GROUPS = (
    ("", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated without swapping and without being killed; None where it cannot be known.

    ``root`` holds ``proc`` and ``sys`` (a test's are false ones).
    """
    found = [*_machine(root), *_control_groups(root)]
    if found:
        return max(0, min(found))
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        with suppress(ValueError, OSError, AttributeError):
            pages = os.sysconf(name)
            if pages > 0:
                return pages * os.sysconf("SC_PAGE_SIZE")
    return None


def _machine(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _control_groups(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for names, mount, limit, used, droppable in _GROUPS:
            if names in controllers.split(","):
                folder = root / mount
                yield from _left(folder, limit, used, droppable)
                for piece in Path(path.lstrip("/")).parts:  # a group is held by the limits of those around it
                    folder = folder / piece
                    yield from _left(folder, limit, used, droppable)


def _left(folder: Path, limit: str, used: str, droppable: str) -> Iterator[int]:
    with suppress(ValueError, IndexError):  # "max": no limit; no lines: no such file
        most, now = int(_lines(folder / limit)[0]), int(_lines(folder / used)[0])
        cache = [int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.split()[:1] == [droppable]]
        yield most - now + sum(cache)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
