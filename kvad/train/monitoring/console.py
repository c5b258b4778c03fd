"""Training as plain lines, where stderr is not a terminal (``board.py`` is for those):

step 1,240/2,000  loss 1.713  val 1.902  lr 4.1e-04  norm 0.83  23,400 tokens/s  0:31 left

And before it, texts that become tokens:

12.6 M characters, 3,271,044 tokens, 402,188 a second

Training in a terminal: a small board that is drawn over itself, and put away when training ends.

     ━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━   step 1,240/2,000   0:31 left
     loss  1.713   raw 1.698   validation 1.902, best 1.899   right 44.1%
     rate  4.1e-04   gradient norm 0.83   23,400 tokens/s   12.3% of a matrix product   412.5 MiB, at most 415.0 MiB

The smoothed loss is a moving average of which half is of the last seven steps.  rich draws it at most four times a
second, in a thread of its own; a step hands over its report and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvad.errors import format_count
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

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

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


LOSS_SMOOTHING = 0.9  # of the smoothed loss's weight, from step to step
REFRESH = 4  # a second
WIDTH = 32  # of the bar


def make_progress(console: Console) -> PlainProgress:
    """What suits the console."""
    return ConsoleDashboard(console) if console.is_terminal else PlainProgress(console)


class ConsoleDashboard(PlainProgress):
    """What a terminal shows; evaluations, samples and saves stay above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live: Live | None = None
        self._summed = self._weight = 0.0

    def on_start(self, report: StartReport) -> None:
        from rich.live import Live

        super().on_start(report)
        self._live = Live(get_renderable=self.render, console=self.console, transient=True, refresh_per_second=REFRESH)
        self._live.start()

    def on_step(self, report: StepReport) -> None:
        self.last = report
        self._summed = LOSS_SMOOTHING * self._summed + report.loss
        self._weight = LOSS_SMOOTHING * self._weight + 1

    def on_end(self, outcome: TrainingResult) -> None:
        self.close()
        super().on_end(outcome)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def render(self) -> RenderableType:
        """The board as it is now."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        if self.last is None or self.start is None:
            return Text("  the first step ...")
        first = Table.grid(padding=(0, 2))
        first.add_row("", ProgressBar(total=1.0, completed=self._share(), width=WIDTH), Text(self._where()))
        lines = [Text("  " + line, no_wrap=True, overflow="ellipsis") for line in self.lines()]
        return Group(first, *lines)

    def lines(self) -> list[str]:
        """Below the bar: of the loss, and of how it is come by."""
        last = self.last
        assert last is not None
        losses = [f"loss  {self._summed / self._weight:.3f}", f"raw {last.loss:.3f}"]
        if self.val_loss is not None:
            losses.append(f"validation {self.val_loss:.3f}, best {self.best:.3f}")
        if self.accuracy is not None:
            losses.append(f"right {self.accuracy:.1%}")
        how = [f"rate  {last.lr:.1e}", f"gradient norm {last.grad_norm:.3g}", f"{last.tokens_per_second:,.0f} tokens/s"]
        if last.mfu is not None:
            how.append(f"{last.mfu:.1%} of a matrix product")
        if last.memory is not None:
            how.append(_memory(last.memory))
        if last.memory_peak is not None:
            how.append(f"at most {_memory(last.memory_peak)}")
        return ["   ".join(losses), "   ".join(how)]

    def _share(self) -> float:
        start, last = self.start, self.last
        assert start is not None and last is not None
        shares = [last.step / start.steps] if start.steps else []
        if start.minutes is not None:
            shares.append(last.elapsed / (60 * start.minutes))
        return min(1.0, max(shares, default=0.0))

    def _where(self) -> str:
        start, last = self.start, self.last
        assert start is not None and last is not None
        limit = f"/{start.steps:,}" if start.steps is not None else ""
        left = "" if last.eta is None else f"   {format_seconds(last.eta)} left"
        return f"step {last.step:,}{limit}{left}"


def _memory(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
