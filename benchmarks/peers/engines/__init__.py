"""One worker per engine: a process that loads one model and runs scenarios on request.

A request is one JSON object per line on stdin, an answer one on stdout:

    {"op": "load", "path": "...", "precision": "bfloat16", "threads": 2, "needs": {...}}
        ->  {"seconds": 1.2, "versions": {...}, "imported_rss": 123}
    {"op": "run", "scenario": {...}, "prompts": [[...]]}       ->  {"seconds": 0.4, "tokens": 64, "output": [[...]]}
    {"op": "check", "prompts": [[...]], "outputs": [[[...]]]}  ->  {"checks": [{"agree": 63, "count": 64, "gap": 0.01}]}

An answer also has ``major_faults`` of the request and ``peak_rss``. A failure is answered with {"error": "..."}, a
request that the engine has no support for with {"unsupported": "..."}; the worker continues. What a library prints
goes to stderr. Modules of this package import nothing of kvad, except ``kvad_engine``.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.scenarios import Scenario


class Unsupported(Exception):
    """The engine cannot run this scenario or this precision; the message has the reason."""


@dataclass
class Outcome:
    """What a timed run returns."""

    seconds: float
    tokens: int  # new tokens that were computed in these seconds
    output: list[list[int]]  # new tokens of each row, in the order of the prompts


class Worker(Protocol):
    """An engine with one model."""

    def load(self, path: str, precision: str, threads: int, needs: dict[str, int]) -> None:
        """Load the model; ``needs`` are the largest ``max_len``, ``rows`` and ``tokens`` of the scenarios to come."""

    def run(self, scenario: Scenario, prompts: list[list[int]]) -> Outcome:
        """Run a scenario once. An engine may reuse what it cached of the same prompts, unless they are timed."""

    def versions(self) -> dict[str, str]:
        """Return the versions of the engine and of what decides its speed."""


def status_bytes(name: str) -> int:
    """Return a line of /proc/self/status in bytes; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":")), 0)


def usage() -> dict[str, int]:
    """Return major page faults and peak resident bytes of this process."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return {"major_faults": faults, "peak_rss": status_bytes("VmHWM")}


def answer(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
    """Do what one request asks for and return the answer."""
    before = usage()
    if request["op"] == "load":
        start = time.perf_counter()
        worker.load(request["path"], request["precision"], request["threads"], request["needs"])
        done: dict[str, Any] = {"seconds": time.perf_counter() - start, "versions": worker.versions()}
        done["imported_rss"] = before["peak_rss"]
    elif request["op"] == "check":
        done = {"checks": worker.check(request["prompts"], request["outputs"])}  # type: ignore[attr-defined]
    else:
        outcome = worker.run(Scenario.from_json(request["scenario"]), request["prompts"])
        done = {"seconds": outcome.seconds, "tokens": outcome.tokens, "output": outcome.output}
    after = usage()
    done["major_faults"] = after["major_faults"] - before["major_faults"]
    done["peak_rss"] = after["peak_rss"]
    return done


def serve(worker: Worker) -> None:
    """Answer requests until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = answer(worker, json.loads(line))
        except Unsupported as error:
            reply = {"unsupported": str(error)}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)
    os._exit(0)  # some libraries crash in their destructors
