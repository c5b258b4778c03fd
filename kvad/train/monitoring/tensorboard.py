"""TensorBoard's event files of a run, under ``RUN/tensorboard`` (``train.tensorboard``; the ``tensorboard`` extra).

What ``metrics.jsonl`` says, by the same steps.  A run that goes on tells TensorBoard to forget the steps that it does
again, so none is shown twice; a new run in the same folder takes the older one's files away.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from kvad.train.config import TrainConfig
from kvad.train.monitoring.callbacks import (
    CallbackReport,
    EvalReport,
    SamplesReport,
    StartReport,
    StepReport,
    TrainingResult,
)
from kvad.train.monitoring.metrics import LoggedSteps

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

EVENTS_FOLDER = "tensorboard"


def check_tensorboard(train: TrainConfig) -> None:
    """ModuleNotFoundError, before anything is done, where the package is asked for and missing."""
    if train.tensorboard:
        import tensorboard  # noqa: F401


class TensorBoardCallback(LoggedSteps):
    """Of the run in ``out``: steps, and what evaluations found."""

    def __init__(self, out: Path, log_interval: int) -> None:
        super().__init__(log_interval)
        self._folder = out / EVENTS_FOLDER
        self._writer: SummaryWriter | None = None

    def on_start(self, report: StartReport) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if not report.step:
            shutil.rmtree(self._folder, ignore_errors=True)
        again = report.step + 1 if report.step else None
        self._writer = SummaryWriter(str(self._folder), purge_step=again)

    def log(self, report: StepReport) -> None:
        said = {"loss/training": report.loss, "learning rate": report.lr, "gradient norm": report.grad_norm}
        said["tokens per second"] = report.tokens_per_second
        if report.mfu is not None:
            said["utilisation"] = report.mfu
        if report.memory is not None:
            said["memory (MiB)"] = report.memory / 2**20
        self._scalars(said, report.step)

    def on_eval(self, report: EvalReport) -> None:
        super().on_eval(report)
        said = {"loss/validation": report.val_loss}
        if report.accuracy is not None:
            said["accuracy"] = report.accuracy
        self._scalars(said, report.step)

    def on_samples(self, report: SamplesReport) -> None:
        assert self._writer is not None
        for number, sample in enumerate(report.samples):
            text = "\n".join(f"    {mark} {line}" for mark, said in (("<", sample.source), ("=", sample.target),
                             (">", sample.text)) if said for line in said.splitlines())  # fmt: skip
            self._writer.add_text(f"samples/{number}", text, report.step)

    def on_callback_report(self, report: CallbackReport) -> None:
        numbers = {name: value for name, value in report.values.items() if isinstance(value, int | float)}
        self._scalars({f"{report.what}/{name}": value for name, value in numbers.items()}, report.step)

    def on_end(self, outcome: TrainingResult) -> None:
        super().on_end(outcome)
        self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _scalars(self, said: dict[str, float], step: int) -> None:
        assert self._writer is not None, "on_start comes first"
        for name, value in said.items():
            self._writer.add_scalar(name, value, step)
