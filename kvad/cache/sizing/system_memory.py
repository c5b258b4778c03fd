"""Memory of this machine: bytes available to this process, and bandwidth.

Available is what the machine has, or less if control groups limit the process.

Linux: ``MemAvailable`` of ``/proc/meminfo``, and for every memory control group of the process its limit minus its use
plus the reclaimable file cache. Elsewhere the value of ``sysconf``, or None if unknown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

BANDWIDTH_BYTES = 256 << 20  # read to measure the bandwidth; larger than any processor cache
NUM_COLUMNS = 4096
# (controllers in /proc/self/cgroup, mount, limit, used, droppable in memory.stat): version 2, version 1
_GROUPS = (
    ("", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that can be allocated without swapping or an out-of-memory kill; None if unknown.

    ``root`` contains ``proc`` and ``sys``; tests pass another one.
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


def measure_bandwidth(seconds: float = 0.3) -> float:
    """Measure bytes per second, the best of several matrix-vector products: the bound of a decode step.

    Each reads ``BANDWIDTH_BYTES``, or a tenth of the available bytes if that is less, with numpy's number of threads.
    """
    import numpy as np

    available = available_bytes()
    size = BANDWIDTH_BYTES if available is None else min(BANDWIDTH_BYTES, available // 10)
    matrix = np.ones((max(1, size // (4 * NUM_COLUMNS)), NUM_COLUMNS), dtype=np.float32)
    vector = np.ones(NUM_COLUMNS, dtype=np.float32)
    best, first_start = float("inf"), time.perf_counter()
    while time.perf_counter() - first_start < seconds:
        start = time.perf_counter()
        matrix @ vector
        best = min(best, time.perf_counter() - start)
    return float(matrix.nbytes / best)
