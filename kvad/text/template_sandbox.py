"""Rendering of chat templates in child processes with limits of time, memory and output.

A template is a program that comes with a model. It runs in ``template_worker.py``, a process without torch that is
started once and renders any number of templates. The limit of time is CPU time of that process: neither a busy machine
nor this process's garbage collector counts. A process that exceeds a limit ends, and the next render starts another.

The dialect is that of ``transformers.apply_chat_template``: trim_blocks, lstrip_blocks, break and continue,
``{% generation %}``, raise_exception, strftime_now, tojson without HTML escapes. No torch.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import weakref
from dataclasses import dataclass
from datetime import datetime
from io import BufferedReader
from pathlib import Path
from typing import Any

from kvad.errors import ChatTemplateError

__all__ = ["MAX_NESTING", "RenderLimits", "RenderOutput", "render_template"]

MAX_SOURCE = 1 << 16  # characters of a template; the longest in use have about 30,000
MAX_NESTING = 200  # levels of lists and objects within each other
MAX_WORKERS = 4  # renders at the same time, each in a process of about 20 MB
MAX_SPANS = 16 << 20  # bytes of a reply in addition to its text
START_SECONDS, WAIT_FACTOR = 60.0, 20.0  # a render waits so long, and for each second of CPU, on a busy machine
START = "import sys; sys.path += sys.argv[1:]; from template_worker import main; main()"


@dataclass(frozen=True)
class RenderLimits:
    """Limits of one render. Its memory is limited by ``template_worker.MAX_MEMORY``."""

    seconds: float = 1.0  # CPU time of compiling and rendering
    output: int = 4 << 20  # characters


@dataclass(frozen=True)
class RenderOutput:
    """Rendered text, and the positions of its ``{% generation %}`` blocks."""

    text: str
    spans: tuple[tuple[int, int], ...] | None  # [start, end) in order; None if a block is part of another text


def render_template(
    source: str, values: dict[str, Any], limits: RenderLimits, now: datetime | None = None
) -> RenderOutput:
    """Render a template, from any thread.

    Args:
        source: Jinja source; each worker compiles it once.
        values: Variables of the template; plain data.
        limits: Limits of compiling and rendering.
        now: Time of ``strftime_now`` [default: the clock].

    Raises:
        ChatTemplateError: If the template is wrong, rejects its variables or exceeds a limit.
    """
    if len(source) > MAX_SOURCE:
        raise ChatTemplateError(f"the chat template has {len(source):,} characters; the limit is {MAX_SOURCE:,}")
    clock = (now or datetime.now()).isoformat()
    request = {"source": source, "values": values, "now": clock, "max_output": limits.output, "seconds": limits.seconds}
    body = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
    pool = _pool(os.getpid())
    worker = pool.get()
    try:
        if worker is None or not worker.is_alive():
            worker = _Worker()
        reply = worker.exchange(body, limits)
    finally:
        pool.put(worker)
    if "error" in reply:
        raise ChatTemplateError(reply["error"])
    spans = reply["spans"]
    return RenderOutput(reply["text"], None if spans is None else tuple((start, end) for start, end in spans))


@functools.cache
def _pool(pid: int) -> queue.LifoQueue[_Worker | None]:
    """Return the idle workers of a process, not of its parent; None is one to start."""
    pool = queue.LifoQueue[_Worker | None]()
    for _ in range(MAX_WORKERS):
        pool.put(None)
    return pool


class _Worker:
    """Child process that renders one template at a time and ends with this process."""

    def __init__(self) -> None:
        self._socket, child_end = socket.socketpair()
        self._reader = self._socket.makefile("rb")
        command = [sys.executable, "-I", "-c", START, str(Path(__file__).parent), *filter(None, sys.path)]
        with child_end:
            self._process = subprocess.Popen(
                command,
                stdin=child_end.fileno(),
                stdout=child_end.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C is for this process
            )
        self.stop = weakref.finalize(self, _stop, self._process, self._socket, self._reader)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def exchange(self, body: bytes, limits: RenderLimits) -> dict[str, Any]:
        """Send a request and return the reply, or an "error" that describes how the process ended."""
        wait = START_SECONDS + WAIT_FACTOR * limits.seconds
        size, reply = 0, b""
        self._socket.settimeout(wait)
        try:
            self._socket.sendall(len(body).to_bytes(8) + body)
            size = int.from_bytes(self._reader.read(8))
            reply = self._reader.read(size) if size <= 8 * limits.output + MAX_SPANS else b""
        except TimeoutError:
            return {"error": f"the chat template took more than {wait:g} s"}
        except OSError:  # the process ended before it read everything
            pass
        finally:
            if not 0 < size == len(reply):
                self.stop()  # after KeyboardInterrupt, too: the next request must not get this one's reply
        if self.stop.alive:
            answer: dict[str, Any] = json.loads(reply.decode("utf-8", "surrogatepass"))
            return answer
        status = self._process.returncode
        endings = {-signal.SIGPROF: f"took more than {limits.seconds:g} s of CPU", errno.ENOMEM: "ran out of memory"}
        return {"error": f"the chat template {endings.get(status, f'ended its process with status {status}')}"}


def _stop(process: subprocess.Popen[bytes], connection: socket.socket, reader: BufferedReader) -> None:
    """End a child process; in a fork of its parent, only close the connection."""
    process.kill()
    process.wait()
    reader.close()
    connection.close()
