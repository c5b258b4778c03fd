"""One thread and its list of jobs, done in their order; nobody waits for it but who asks to.

The thread holds on to its list alone, so whoever owns the worker can be forgotten: ``stop``, or ``end``, is then called
for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

LOG = logging.getLogger(__name__)
IoJob = Callable[[], None]


class _Jobs:
    def __init__(self) -> None:
        self.waiting: deque[IoJob] = deque()
        self.changed = threading.Condition()
        self.busy = self.ending = False


class IoThread:
    """Its thread begins with its first job."""

    def __init__(self, name: str) -> None:
        self._name, self._jobs = name, _Jobs()
        self._thread: threading.Thread | None = None

    def restore(self, job: IoJob) -> None:
        with self._jobs.changed:
            if self._jobs.ending:
                return
            self._jobs.waiting.append(job)
            self._jobs.changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Until all that was put is done; False: it took longer."""
        with self._jobs.changed:
            return self._jobs.changed.wait_for(lambda: not self._jobs.waiting and not self._jobs.busy, seconds)

    def finish(self) -> None:
        """Finish what was put, whoever waits for it, and do no more."""
        with self._jobs.changed:
            self._jobs.ending = True
            self._jobs.changed.notify_all()

    def stop(self, seconds: float | None = None) -> bool:
        """Finish what was put, in that time if one is given, and do no more; False: some was left out."""
        until = None if seconds is None else time.monotonic() + seconds
        own = self._thread is threading.current_thread()  # who dropped its owner last
        done = self._thread is None or own or self.wait(seconds)
        with self._jobs.changed:
            self._jobs.waiting.clear()
            self.finish()
        if self._thread is not None and not own:
            self._thread.join(None if until is None else max(0.1, until - time.monotonic()))
        return done


def _work(jobs: _Jobs) -> None:
    while True:
        with jobs.changed:
            jobs.busy = False
            jobs.changed.notify_all()
            jobs.changed.wait_for(lambda: jobs.waiting or jobs.ending)
            if not jobs.waiting:
                return
            job = jobs.waiting.popleft()
            jobs.busy = True
        try:
            job()
        except Exception:  # a job answers for its own failures; this one is a bug, and must not end the others
            LOG.exception("a job of the cache failed")
        del job
