"""Names of files and folders that are not finished: hidden, beside the final name, and with their writer's process id.

    .NAME.PID.RANDOM.tmp    being written, or left behind by a process that died: never read
    .NAME.PID.RANDOM.old    replaced, until what replaces it is durable
    .NAME.PID.RANDOM.gone   gives way to another name: whole as long as that is written, which is the .tmp of the same
                            PID and RANDOM; without it, to be deleted

Standard library only.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import NamedTuple

_STARTED_NS = time.time_ns()
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)\.(?P<token>[0-9a-f]{8})\.(?P<kind>tmp|old|gone)")


class TempPath(NamedTuple):
    """``name``: what it had or was to have; ``kind``: "tmp", "old" or "gone"."""

    path: Path
    name: str
    pid: int
    token: str
    kind: str

    @property
    def in_use(self) -> bool:
        """Whether a living process is at work on it; one of our own id from before our time was another's
        (containers)."""
        if self.pid == os.getpid():
            return self.path.lstat().st_mtime_ns >= _STARTED_NS
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def temp_path(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.{kind}")


def replaced_path(path: Path, temporary: Path) -> Path:
    """The name of what gives way to what is written as ``temporary``."""
    writing = parse_temp_path(temporary)
    assert writing is not None and writing.kind == "tmp", temporary
    return path.with_name(f".{path.name}.{writing.pid}.{writing.token}.gone")


def interrupted_writes(parent: Path) -> list[TempPath]:
    """What a process has set aside and then died, so that it is still what its name says."""
    left = list_temp_paths(parent)
    written = {(each.pid, each.token) for each in left if each.kind == "tmp"}
    return [
        each
        for each in left
        if (each.kind == "old" or (each.kind == "gone" and (each.pid, each.token) in written))
        and not (parent / each.name).exists()
    ]


def parse_temp_path(path: Path) -> TempPath | None:
    match = _LEFTOVER.fullmatch(path.name)
    return None if match is None else TempPath(path, match["name"], int(match["pid"]), match["token"], match["kind"])


def list_temp_paths(parent: Path) -> list[TempPath]:
    paths = sorted(parent.iterdir()) if parent.is_dir() else []
    return [found for path in paths if (found := parse_temp_path(path)) is not None]
