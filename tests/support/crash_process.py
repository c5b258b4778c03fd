"""Child processes that are killed with SIGKILL at a chosen operation, to test what a crash leaves on disk.

Run in a separate process that has imported torch but computed nothing with it, so that a fork is safe. Operations are
flushes, renames, new folders, and calls of ``Killer.tick``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Killer:
    """Counts operations and kills this process at the ``at``-th one (0: never)."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0
        for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "mkdir"), (Path, "replace"), (Path, "write_text")):
            setattr(owner, name, self.counted(getattr(owner, name)))

    def tick(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            self.tick()
            return real(*arguments, **options)

        return operation


def finishes(work: Callable[[Killer], None], at: int, within: float | None = None) -> bool:
    """Run ``work`` in a child process that is killed at an operation or after a time.

    Args:
        work: Function to run.
        at: Number of the operation at which the child is killed, from 1; 0: never.
        within: Seconds after which the child is killed.

    Returns:
        True if the child finished.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work(Killer(at))
            code = 0
        finally:
            os._exit(code)
    if within is not None:
        time.sleep(within)
        os.kill(pid, signal.SIGKILL)  # no effect if the child has exited and is not yet reaped
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"ended by signal {os.WTERMSIG(status)}"
        return False
    assert os.WEXITSTATUS(status) == 0, "the child failed: see above"
    return True
