"""Background thread with a job queue; jobs run in order and callers wait only on request.

The thread references its queue only, so the owner of an IoThread can be garbage collected; its finalizer calls
``stop`` or ``finish``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

LOG = logging.getLogger(__name__)
T = TypeVar("T")


class _Jobs:
    """Queue and state shared with the thread."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.changed = threading.Condition()
        self.busy = self.ending = False


class IoThread:
    """Background thread that starts with its first job."""

    def __init__(self, name: str) -> None:
        self._name, self._jobs = name, _Jobs()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; canceled after ``finish`` or ``stop``."""
        future: Future[T] = Future()
        with self._jobs.changed:
            if self._jobs.ending:
                future.cancel()
                return future
            self._jobs.waiting.append((future, job))
            self._jobs.changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
        return future

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all queued jobs are done; return False after ``seconds``."""
        with self._jobs.changed:
            return self._jobs.changed.wait_for(lambda: not self._jobs.waiting and not self._jobs.busy, seconds)

    def finish(self) -> None:
        """Let the queued jobs run and accept no more."""
        with self._jobs.changed:
            self._jobs.ending = True
            self._jobs.changed.notify_all()

    def stop(self, seconds: float | None = None) -> bool:
        """Run the queued jobs, within ``seconds`` if given, and end the thread.

        Returns:
            False if jobs were dropped.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        is_current = self._thread is threading.current_thread()  # The finalizer may run in this thread.
        finished = self._thread is None or is_current or self.wait(seconds)
        with self._jobs.changed:
            self._jobs.waiting.clear()
            self.finish()
        if self._thread is not None and not is_current:
            self._thread.join(None if deadline is None else max(0.1, deadline - time.monotonic()))
        return finished


def _work(jobs: _Jobs) -> None:
    while True:
        with jobs.changed:
            jobs.busy = False
            jobs.changed.notify_all()
            jobs.changed.wait_for(lambda: jobs.waiting or jobs.ending)
            if not jobs.waiting:
                return
            future, job = jobs.waiting.popleft()
            jobs.busy = True
        run_job(future, job)
        del future, job


def run_job(future: Future[T], job: Callable[[], T]) -> None:
    """Run a job that was not canceled, and set its result."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(job())
    except BaseException as error:  # Jobs handle their own failures; this is a bug and must not stop later jobs.
        LOG.exception("a cache job failed")
        future.set_exception(error)
