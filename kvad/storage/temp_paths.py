"""Hidden names of unfinished files and folders, with the writer's process id.

    .NAME.PID.RANDOM.tmp    being written, or left by a process that died: never read, removed by the next write
    .NAME.PID.RANDOM.old    replaced; complete while NAME is missing (the process died between two renames)
    .NAME.PID.RANDOM.gone   replaced by another name, that of the .tmp of the same PID and RANDOM; complete while that
                            .tmp exists (the process died before its rename), garbage afterwards

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
    """A temporary path: ``name`` is the final name; ``kind`` is "tmp", "old" or "gone"."""

    path: Path
    name: str
    pid: int
    token: str
    kind: str

    @property
    def in_use(self) -> bool:
        """True if a living process is writing it.

        A path with our process id from before our start belongs to another process (containers).
        """
        if self.pid == os.getpid():
            return self.path.lstat().st_mtime_ns >= _STARTED_NS
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # It lives, under another user.
        return True


def temp_path(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.{kind}")


def replaced_path(path: Path, temporary: Path) -> Path:
    """Return the .gone path of ``path`` for the file written as ``temporary``."""
    _, pid, token, _ = temporary.name.rsplit(".", 3)
    return path.with_name(f".{path.name}.{pid}.{token}.gone")


def interrupted_writes(parent: Path) -> list[TempPath]:
    """Return replaced paths whose process died before the replacement was visible."""
    left = list_temp_paths(parent)
    written = {(path.pid, path.token) for path in left if path.kind == "tmp"}
    return [
        path
        for path in left
        if (path.kind == "old" or (path.kind == "gone" and (path.pid, path.token) in written))
        and not (parent / path.name).exists()
    ]


def parse_temp_path(path: Path) -> TempPath | None:
    """Parse a temporary path; None for other names."""
    match = _LEFTOVER.fullmatch(path.name)
    return None if match is None else TempPath(path, match["name"], int(match["pid"]), match["token"], match["kind"])


def list_temp_paths(parent: Path) -> list[TempPath]:
    """Return the temporary paths of a folder, sorted by name."""
    paths = sorted(parent.iterdir()) if parent.is_dir() else []
    return [temp for path in paths if (temp := parse_temp_path(path)) is not None]
