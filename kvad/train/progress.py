"""Training as plain lines, where stderr is not a terminal (``board.py`` is for those):

step 1,240/2,000  loss 1.713  val 1.902  lr 4.1e-04  norm 0.83  23,400 tokens/s  0:31 left

And before it, texts that become tokens:

12.6 M characters, 3,271,044 tokens, 402,188 a second
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvad.errors import format_count
from kvad.train.reports import (
    Callback,
    CallbackReport,
    EvalReport,
    SamplesReport,
    StartReport,
    StepReport,
    TrainingResult,
    WarningReport,
)

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["ProgressMeter", "PlainProgress", "format_seconds"]

SECONDS_BETWEEN_LINES = 10.0


class PlainProgress(Callback):
    """A line at every evaluation, and every ten seconds of training."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.start: StartReport | None = None
        self.last: StepReport | None = None
        self.val_loss: float | None = None
        self.best: float | None = None
        self.accuracy: float | None = None
        self._told = 0.0

    def on_stage(self, text: str) -> None:
        self._print(text)

    def on_start(self, report: StartReport) -> None:
        self.start, self._told = report, 0.0
        again = f", from step {report.step:,}" if report.step else ""
        self._print(
            f"model: {format_count(report.parameters, 'parameter')} in {report.precision} on {report.device}, "
            f"{format_count(report.tokens_per_step, 'token')} a step{again}"
        )

    def on_step(self, report: StepReport) -> None:
        self.last = report
        if report.elapsed - self._told >= SECONDS_BETWEEN_LINES:
            self._told = report.elapsed
            self._print(self.status_line())

    def on_eval(self, report: EvalReport) -> None:
        self.val_loss, self.best, self.accuracy = report.val_loss, report.best, report.accuracy
        if self.last is not None:
            self._print(self.status_line())

    def on_samples(self, report: SamplesReport) -> None:
        """Each source, what stands beside it, and what the model says."""
        for sample in report.samples:
            for mark, text in (("<", sample.source), ("=", sample.target), (">", sample.text)):
                if text or mark != "=":  # a text that goes on has nothing beside it
                    self._print(f"  {mark} {' '.join(text.split())}")

    def on_callback_report(self, report: CallbackReport) -> None:
        self._print(f"  {report.words}")

    def on_warning(self, report: WarningReport) -> None:
        self._print(f"warning: {report.text}")

    def on_end(self, outcome: TrainingResult) -> None:
        self._print(f"saved: {outcome.checkpoint}")

    def status_line(self) -> str:
        start, last = self.start, self.last
        assert start is not None and last is not None, "on_start and on_step come first"
        limit = f"/{start.steps:,}" if start.steps is not None else ""
        parts = [f"step {last.step:,}{limit}", f"loss {last.loss:.3f}"]
        if self.val_loss is not None:
            parts.append(f"val {self.val_loss:.3f}")
        if self.accuracy is not None:
            parts.append(f"right {self.accuracy:.1%}")
        parts += [f"lr {last.lr:.1e}", f"norm {last.grad_norm:.3g}", f"{last.tokens_per_second:,.0f} tokens/s"]
        if last.eta is not None:
            parts.append(f"{format_seconds(last.eta)} left")
        return "  ".join(parts)

    def close(self) -> None:
        """Leave the terminal as it was; to be called after an error too."""

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class ProgressMeter:
    """Tells of characters and tokens so far (a ``corpus.Progress``), when ``every`` so many seconds have passed."""

    def __init__(self, log: Callable[[str], object], interval: float = SECONDS_BETWEEN_LINES) -> None:
        self._log, self._interval = log, interval
        self._began = self._told = time.monotonic()

    def __call__(self, chars: int, tokens: int) -> None:
        now = time.monotonic()
        if now - self._told >= self._interval:
            self._told = now
            speed = tokens / max(now - self._began, 1e-9)
            self._log(f"{chars / 1e6:,.1f} M characters, {tokens:,} tokens, {speed:,.0f} a second")


def format_seconds(seconds: float) -> str:
    """``75`` -> ``1:15``; ``3700`` -> ``1:01:40``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
