"""Memory available to this process: the machine's, or less if its control groups limit it.

Linux: ``MemAvailable`` of ``/proc/meminfo``, and for every memory control group of the process its limit minus its use
plus the reclaimable file cache. Elsewhere the value of ``sysconf``, or None if unknown.
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
    """Return the bytes that can be allocated without swapping or an out-of-memory kill.

    Args:
        root: Folder that contains ``proc`` and ``sys``; tests pass their own.

    Returns:
        The number of bytes, or None if unknown.
    """
    limits = [*_machine(root), *_control_groups(root)]
    if limits:
        return max(0, min(limits))
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
                for part in Path(path.lstrip("/")).parts:  # The limits of all parent groups apply.
                    folder = folder / part
                    yield from _left(folder, limit, used, droppable)


def _left(folder: Path, limit: str, used: str, droppable: str) -> Iterator[int]:
    with suppress(ValueError, IndexError):  # "max" means no limit; no lines, no such file.
        max_bytes, used_bytes = int(_lines(folder / limit)[0]), int(_lines(folder / used)[0])
        cache = [int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.split()[:1] == [droppable]]
        yield max_bytes - used_bytes + sum(cache)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
