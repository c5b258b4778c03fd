"""Metrics of a run: a JSONL file that survives kills, and TensorBoard event files.

The JSONL file has one object per line; ``kind`` is ``run`` (the run and its machine), ``step``, ``eval``, ``samples``
(outputs for a few held-out sources), ``callback`` (numbers of a callback), ``warning``, ``end``, or ``failed`` (the
error that ended it and its step; a kill writes nothing). After a resume the file equals that of an uninterrupted run,
because lines of steps that will be repeated are dropped first; only the step at which a run was stopped keeps its
extra line.

The event files, in ``RUN/tensorboard`` (``train.tensorboard``), hold the same for the same steps, and need the
``tensorboard`` extra. A resumed run purges steps that it repeats; a new run in the same folder removes older files.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from kvad import storage
from kvad.errors import DataError, KvadError, SaveError
from kvad.train.monitoring import callbacks

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return every complete line; one truncated by a kill, or damaged, is skipped."""
    lines = []
    try:
        content = storage.filesystem.read_bytes(path) if path.exists() else b""
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    for line in content.splitlines():
        with suppress(ValueError, RecursionError):
            values = json.loads(line)
            if isinstance(values, dict):
                lines.append(values)
    return lines


class LoggedSteps(callbacks.Callback):
    """Selects steps to log: first, every ``log_interval``-th, evaluated ones, and last.

    A finished run evaluates its last step before it saves it, so no kill leaves that step out.
    """

    def __init__(self, log_interval: int) -> None:
        self._log_interval = log_interval
        self._pending: callbacks.StepReport | None = None  # the newest step, until it is logged
        self._step = 0  # last step

    def log(self, report: callbacks.StepReport) -> None:
        """Log a step; called once for each selected step, in order."""
        raise NotImplementedError

    def catch_up(self) -> None:
        """Log the newest step if that is still to be done."""
        report, self._pending = self._pending, None
        if report is not None:
            self.log(report)

    def on_step(self, report: callbacks.StepReport) -> None:
        self._pending, self._step = report, report.step
        if report.step == 1 or report.step % self._log_interval == 0:
            self.catch_up()

    def on_eval(self, report: callbacks.EvalReport) -> None:
        self.catch_up()

    def on_end(self, outcome: callbacks.TrainingResult) -> None:
        self.catch_up()


class MetricsFile(LoggedSteps):
    """Appends lines, flushing each."""

    def __init__(self, path: Path, log_interval: int) -> None:
        super().__init__(log_interval)
        self.path = path
        self._file: TextIO | None = None

    def on_start(self, report: callbacks.StartReport) -> None:
        lines = [line for line in read_metrics(self.path) if _step(line) <= report.step] if report.step else []
        if not lines:
            lines = [{"kind": "run", **dataclasses.asdict(report)}]
        storage.atomic.write_bytes(self.path, _lines(lines).encode())
        self._file, self._step = self.path.open("a", encoding="utf-8"), report.step

    def log(self, report: callbacks.StepReport) -> None:
        self._write("step", dataclasses.asdict(report))

    def on_eval(self, report: callbacks.EvalReport) -> None:
        super().on_eval(report)
        self._write("eval", dataclasses.asdict(report))

    def on_samples(self, report: callbacks.SamplesReport) -> None:
        self._write("samples", dataclasses.asdict(report))

    def on_callback_report(self, report: callbacks.CallbackReport) -> None:
        self._write("callback", {"step": report.step, "name": report.name, **report.values})

    def on_warning(self, report: callbacks.WarningReport) -> None:
        self._write("warning", dataclasses.asdict(report))

    def on_end(self, outcome: callbacks.TrainingResult) -> None:
        super().on_end(outcome)
        if outcome.reason != "interrupted":
            same = {"reason": "done", "checkpoint": outcome.checkpoint.name}  # whether or not it was resumed
            self._write("end", {**dataclasses.asdict(outcome), **same})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the file; if an error ended the run, log it and suppress errors of the disk."""
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


class TensorBoardCallback(LoggedSteps):
    """Writes steps and evaluations of the run in ``out``."""

    def __init__(self, out: Path, log_interval: int) -> None:
        super().__init__(log_interval)
        self._folder = out / "tensorboard"
        self._writer: SummaryWriter | None = None

    def on_start(self, report: callbacks.StartReport) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if not report.step:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._writer = SummaryWriter(str(self._folder), purge_step=report.step + 1 if report.step else None)

    def log(self, report: callbacks.StepReport) -> None:
        scalars = {"loss/training": report.loss, "learning rate": report.lr, "gradient norm": report.grad_norm}
        memory = None if report.memory is None else report.memory / 2**20
        more = {"tokens per second": report.tokens_per_second, "utilization": report.mfu, "memory (MiB)": memory}
        loads = {f"expert load/{layer}": load for layer, load in (report.expert_load or {}).items()}
        self._scalars({**scalars, **more, **loads}, report.step)

    def on_eval(self, report: callbacks.EvalReport) -> None:
        super().on_eval(report)
        self._scalars({"loss/validation": report.val_loss, "accuracy": report.accuracy}, report.step)

    def on_samples(self, report: callbacks.SamplesReport) -> None:
        assert self._writer is not None
        for number, sample in enumerate(report.samples):
            parts = (("<", sample.source), ("=", sample.target), (">", sample.text))
            lines = [f"    {mark} {line}" for mark, text in parts for line in text.splitlines()]
            self._writer.add_text(f"samples/{number}", "\n".join(lines), report.step)

    def on_callback_report(self, report: callbacks.CallbackReport) -> None:
        numbers = {name: value for name, value in report.values.items() if isinstance(value, int | float)}
        self._scalars({f"{report.name}/{name}": value for name, value in numbers.items()}, report.step)

    def on_end(self, outcome: callbacks.TrainingResult) -> None:
        super().on_end(outcome)
        self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _scalars(self, scalars: Mapping[str, float | None], step: int) -> None:
        assert self._writer is not None, "on_start comes first"
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)
