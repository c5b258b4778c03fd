"""TensorBoard event files of a run, in ``RUN/tensorboard`` (``train.tensorboard``).

They hold the content of ``metrics.jsonl`` for the same steps, and need the ``tensorboard`` extra. A resumed run purges
steps that it repeats, so none is shown twice; a new run in the same folder removes the older files.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from kvad.train.monitoring import callbacks
from kvad.train.monitoring.metrics import LoggedSteps

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

EVENTS_FOLDER = "tensorboard"


class TensorBoardCallback(LoggedSteps):
    """Writes steps and evaluations of the run in ``out``."""

    def __init__(self, out: Path, log_interval: int) -> None:
        super().__init__(log_interval)
        self._folder = out / EVENTS_FOLDER
        self._writer: SummaryWriter | None = None

    def on_start(self, report: callbacks.StartReport) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if not report.step:
            shutil.rmtree(self._folder, ignore_errors=True)
        purge_step = report.step + 1 if report.step else None
        self._writer = SummaryWriter(str(self._folder), purge_step=purge_step)

    def log(self, report: callbacks.StepReport) -> None:
        scalars = {"loss/training": report.loss, "learning rate": report.lr, "gradient norm": report.grad_norm}
        scalars["tokens per second"] = report.tokens_per_second
        if report.mfu is not None:
            scalars["utilization"] = report.mfu
        if report.memory is not None:
            scalars["memory (MiB)"] = report.memory / 2**20
        self._scalars(scalars, report.step)

    def on_eval(self, report: callbacks.EvalReport) -> None:
        super().on_eval(report)
        scalars = {"loss/validation": report.val_loss}
        if report.accuracy is not None:
            scalars["accuracy"] = report.accuracy
        self._scalars(scalars, report.step)

    def on_samples(self, report: callbacks.SamplesReport) -> None:
        assert self._writer is not None
        for number, sample in enumerate(report.samples):
            text = "\n".join(f"    {mark} {line}" for mark, content in (("<", sample.source), ("=", sample.target),
                             (">", sample.text)) if content for line in content.splitlines())  # fmt: skip
            self._writer.add_text(f"samples/{number}", text, report.step)

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

    def _scalars(self, scalars: dict[str, float], step: int) -> None:
        assert self._writer is not None, "on_start comes first"
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
