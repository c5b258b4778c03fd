"""What a run measures: a JSONL file that survives kills, and a steady estimate of speed.

One JSON object per line; ``kind`` is ``run`` (what is trained, and where), ``step``, ``eval``, ``samples`` (what a
few held-out sources become), ``measured`` (what a listener found out), ``warning``, ``end``, or ``failed`` (what error
ended it, and after which step; a kill writes nothing).  After a resume the file says what an uninterrupted run's would,
for lines of steps that are to be done again are dropped first; beside that, the step at which a run was stopped keeps
its line.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Self, TextIO

from kvad import storage
from kvad.errors import KvadError, SaveError
from kvad.train.monitoring.callbacks import (
    Callback,
    CallbackReport,
    EvalReport,
    SamplesReport,
    StartReport,
    StepReport,
    TrainingResult,
    WarningReport,
)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole line; one that a kill cut short is left out."""
    found = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict):
            found.append(content)
    return found


class LoggedSteps(Callback):
    """Which steps are logged: the first, every ``log_every``-th, each that is evaluated, and the last before a run
    ends, however it does.  A run that is done has evaluated its last step before it saves it: no kill leaves it out."""

    def __init__(self, log_interval: int) -> None:
        self._log_interval = log_interval
        self._left: StepReport | None = None  # of the newest step, until it is logged

    def log(self, report: StepReport) -> None:
        """Called once for each of these steps, in their order."""
        raise NotImplementedError

    def catch_up(self) -> None:
        """Log the newest step, if it is not yet."""
        report, self._left = self._left, None
        if report is not None:
            self.log(report)

    def on_step(self, report: StepReport) -> None:
        self._left = report
        if report.step == 1 or report.step % self._log_interval == 0:
            self.catch_up()

    def on_eval(self, report: EvalReport) -> None:
        self.catch_up()

    def on_end(self, outcome: TrainingResult) -> None:
        self.catch_up()


class MetricsFile(LoggedSteps):
    """Appends lines, each handed to the system at once."""

    def __init__(self, path: Path, log_interval: int) -> None:
        super().__init__(log_interval)
        self.path = path
        self._file: TextIO | None = None
        self._step = 0  # how many are done

    def on_start(self, report: StartReport) -> None:
        kept = [line for line in read_metrics(self.path) if _step(line) <= report.step] if report.step else []
        if not kept:
            kept = [{"kind": "run", **dataclasses.asdict(report)}]
        storage.atomic.write_bytes(self.path, _lines(kept).encode())
        self._file, self._step = self.path.open("a", encoding="utf-8"), report.step

    def on_step(self, report: StepReport) -> None:
        self._step = report.step
        super().on_step(report)

    def log(self, report: StepReport) -> None:
        self._write("step", dataclasses.asdict(report))

    def on_eval(self, report: EvalReport) -> None:
        super().on_eval(report)
        self._write("eval", dataclasses.asdict(report))

    def on_samples(self, report: SamplesReport) -> None:
        self._write("samples", dataclasses.asdict(report))

    def on_callback_report(self, report: CallbackReport) -> None:
        self._write("measured", {"step": report.step, "what": report.what, **report.values})

    def on_warning(self, report: WarningReport) -> None:
        self._write("warning", dataclasses.asdict(report))

    def on_end(self, outcome: TrainingResult) -> None:
        super().on_end(outcome)
        if outcome.reason == "done":
            self._write("end", {**dataclasses.asdict(outcome), "checkpoint": outcome.checkpoint.name})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Of a run that an error ended, that error is told, and not what the disk refuses beside it."""
        with nullcontext() if error is None else suppress(OSError, SaveError):
            self.catch_up()
            if isinstance(error, Exception) and self._file is not None:
                text = error.message if isinstance(error, KvadError) else str(error)
                self._write("failed", {"step": self._step, "text": text})
        with nullcontext() if error is None else suppress(OSError):
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        assert self._file is not None, "on_start comes first"
        try:
            self._file.write(_lines([{"kind": kind, **values}]))
            self._file.flush()
        except OSError as error:
            raise storage.atomic.disk_error(self.path, error) from error


def _step(line: dict[str, Any]) -> float:
    if line.get("kind") in ("end", "failed"):
        return math.inf
    step = line.get("step", 0)
    return float(step) if isinstance(step, int | float) else math.inf


def _lines(contents: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(content, ensure_ascii=False) + "\n" for content in contents)


class SpeedMeter:
    """Tokens and FLOPs per second and seconds per step, as a mean in which the last dozen steps or so count."""

    def __init__(self, keep: float = 0.92) -> None:
        self._keep, self._weight = keep, 0.0
        self._tokens = self._seconds = self._flops = 0.0

    def add(self, tokens: int, seconds: float, flops: int = 0) -> None:
        self._weight = self._weight * self._keep + 1
        self._tokens = self._tokens * self._keep + tokens
        self._flops = self._flops * self._keep + flops
        self._seconds = self._seconds * self._keep + seconds

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    @property
    def flops_per_second(self) -> float:
        return self._flops / self._seconds if self._seconds > 0 else 0.0

    @property
    def seconds_per_step(self) -> float:
        return self._seconds / self._weight if self._weight else 0.0
