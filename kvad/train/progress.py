"""Training as it looks in a terminal: one live line on stderr, or plain lines where stderr is not a terminal.

step 1,240/2,000  loss 1.713  val 1.902  lr 4.1e-04  23,400 tokens/s  0:31 left
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad.errors import counted
from kvad.train.reports import (
    Callback,
    EvalReport,
    MeasuredReport,
    Outcome,
    SamplesReport,
    StartReport,
    StepReport,
    WarningReport,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

__all__ = ["PlainProgress", "RichProgress", "progress_on"]

SECONDS_BETWEEN_LINES = 10.0


def progress_on(console: Console) -> PlainProgress:
    """What suits the console."""
    return RichProgress(console) if console.is_terminal else PlainProgress(console)


class PlainProgress(Callback):
    """A line at every evaluation, and every ten seconds of training."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.start: StartReport | None = None
        self.last: StepReport | None = None
        self.val_loss: float | None = None
        self.accuracy: float | None = None
        self._told = 0.0

    def on_stage(self, text: str) -> None:
        self._print(text)

    def on_start(self, report: StartReport) -> None:
        self.start, self._told = report, 0.0
        again = f", from step {report.step:,}" if report.step else ""
        self._print(
            f"model: {counted(report.parameters, 'parameter')} in {report.precision} on {report.device}, "
            f"{counted(report.tokens_per_step, 'token')} a step{again}"
        )

    def on_step(self, report: StepReport) -> None:
        self.last = report
        if report.elapsed - self._told >= SECONDS_BETWEEN_LINES:
            self._told = report.elapsed
            self._print(self.line())

    def on_eval(self, report: EvalReport) -> None:
        self.val_loss, self.accuracy = report.val_loss, report.accuracy
        if self.last is not None:
            self._print(self.line())

    def on_samples(self, report: SamplesReport) -> None:
        """Each source, what stands beside it, and what the model says."""
        for sample in report.samples:
            for mark, text in (("<", sample.source), ("=", sample.target), (">", sample.text)):
                if text or mark != "=":  # a text that goes on has nothing beside it
                    self._print(f"  {mark} {' '.join(text.split())}")

    def on_measured(self, report: MeasuredReport) -> None:
        self._print(f"  {report.words}")

    def on_warning(self, report: WarningReport) -> None:
        self._print(f"warning: {report.text}")

    def on_end(self, outcome: Outcome) -> None:
        self._print(f"saved: {outcome.checkpoint}")

    def line(self) -> str:
        start, last = self.start, self.last
        assert start is not None and last is not None, "on_start and on_step come first"
        limit = f"/{start.steps:,}" if start.steps is not None else ""
        parts = [f"step {last.step:,}{limit}", f"loss {last.loss:.3f}"]
        if self.val_loss is not None:
            parts.append(f"val {self.val_loss:.3f}")
        if self.accuracy is not None:
            parts.append(f"right {self.accuracy:.1%}")
        parts += [f"lr {last.lr:.1e}", f"{last.tokens_per_second:,.0f} tokens/s"]
        if last.eta is not None:
            parts.append(f"{_clock(last.eta)} left")
        return "  ".join(parts)

    def close(self) -> None:
        """Leave the terminal as it was; to be called after an error too."""

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class RichProgress(PlainProgress):
    """One live line with a bar; evaluations stay above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def on_start(self, report: StartReport) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        super().on_start(report)
        columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
        self._bar = Progress(*columns, console=self.console, transient=True)
        self._task = self._bar.add_task("", total=1.0)
        self._bar.start()

    def on_step(self, report: StepReport) -> None:
        self.last = report
        assert self._bar is not None and self._task is not None and self.start is not None
        shares = [report.step / self.start.steps] if self.start.steps else []
        if self.start.minutes is not None:
            shares.append(report.elapsed / (60 * self.start.minutes))
        self._bar.update(self._task, completed=min(1.0, max(shares, default=0.0)), description=self.line())

    def on_end(self, outcome: Outcome) -> None:
        self.close()
        super().on_end(outcome)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _clock(seconds: float) -> str:
    """``75`` -> ``1:15``; ``3700`` -> ``1:01:40``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
