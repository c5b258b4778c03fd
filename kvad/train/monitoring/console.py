"""Console output of training: plain lines, or a dashboard in a terminal.

Plain lines, if stderr is not a terminal:

step 1,240/2,000  loss 1.713  val 1.902  lr 4.1e-04  grad_norm 0.83  23,400 tokens/s  0:31 left

The dashboard is redrawn in place and removed when training ends:

     ━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━   step 1,240/2,000   0:31 left
     loss  1.713   raw 1.698   validation 1.902, best 1.899   acc 44.1%
     rate  4.1e-04   grad_norm 0.83   23,400 tokens/s   12.3% MFU   412.5 MiB, at most 415.0 MiB

The smoothed loss is a moving average of which half is of the last seven steps. rich draws at most four times a second,
in its own thread; a step only passes its report.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvad.errors import format_bytes, format_count
from kvad.train.monitoring import callbacks

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

SECONDS_BETWEEN_LINES = 10.0


class PlainProgress(callbacks.Callback):
    """Prints a line at every evaluation, and every ten seconds of training."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.start: callbacks.StartReport | None = None
        self.last: callbacks.StepReport | None = None
        self.evaluation: callbacks.EvalReport | None = None
        self._last_time = 0.0

    def on_stage(self, text: str) -> None:
        self._print(text)

    def on_start(self, report: callbacks.StartReport) -> None:
        self.start, self._last_time = report, 0.0
        resumed = f", from step {report.step:,}" if report.step else ""
        self._print(
            f"model: {format_count(report.parameters, 'parameter')} in {report.precision} on {report.device}, "
            f"{format_count(report.tokens_per_step, 'token')} a step{resumed}"
        )

    def on_step(self, report: callbacks.StepReport) -> None:
        self.last = report
        if report.elapsed - self._last_time >= SECONDS_BETWEEN_LINES:
            self._last_time = report.elapsed
            self._print(self.status_line())

    def on_eval(self, report: callbacks.EvalReport) -> None:
        self.evaluation = report
        if self.last is not None:
            self._print(self.status_line())

    def on_samples(self, report: callbacks.SamplesReport) -> None:
        """Print each source, its target and the model's output."""
        for sample in report.samples:
            for mark, text in (("<", sample.source), ("=", sample.target), (">", sample.text)):
                if text or mark != "=":  # continued prompts have no target
                    self._print(f"  {mark} {' '.join(text.split())}")

    def on_callback_report(self, report: callbacks.CallbackReport) -> None:
        self._print(f"  {report.words}")

    def on_warning(self, report: callbacks.WarningReport) -> None:
        self._print(f"warning: {report.text}")

    def on_end(self, outcome: callbacks.TrainingResult) -> None:
        if outcome.reason != "unchanged":
            self._print(f"saved: {outcome.checkpoint}")

    def status_line(self) -> str:
        last, evaluation = self.last, self.evaluation
        assert last is not None, "on_step comes first"
        parts = [self.step_text(), f"loss {last.loss:.3f}"]
        if evaluation is not None:
            parts.append(f"val {evaluation.val_loss:.3f}")
        parts += self.accuracy_text()
        parts += [f"lr {last.lr:.1e}", f"grad_norm {last.grad_norm:.3g}", f"{last.tokens_per_second:,.0f} tokens/s"]
        return "  ".join([*parts, *self.expert_text(), *self.time_left()])

    def step_text(self) -> str:
        """Return the step and the limit, such as "step 1,240/2,000"."""
        start, last = self.start, self.last
        assert start is not None and last is not None, "on_start and on_step come first"
        return f"step {last.step:,}" + (f"/{start.steps:,}" if start.steps is not None else "")

    def accuracy_text(self) -> list[str]:
        accuracy = None if self.evaluation is None else self.evaluation.accuracy
        return [] if accuracy is None else [f"acc {accuracy:.1%}"]

    def expert_text(self) -> list[str]:
        """Return the largest load of a layer, such as "expert load 2.1x, 3 starved"; nothing without experts."""
        loads, starved = (None, None) if self.last is None else (self.last.expert_load, self.last.starved_experts)
        if loads is None or starved is None:
            return []
        count = sum(starved.values())
        return [f"expert load {max(loads.values()):.1f}x" + f", {count} starved" * bool(count)]

    def time_left(self) -> list[str]:
        return [] if self.last is None or self.last.eta is None else [f"{format_seconds(self.last.eta)} left"]

    def close(self) -> None:
        """Restore the terminal; also called after an error."""

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class ProgressMeter:
    """Logs numbers of characters and tokens every ``interval`` seconds (a ``Progress``)."""

    def __init__(self, log: Callable[[str], object], interval: float = SECONDS_BETWEEN_LINES) -> None:
        self._log, self._interval = log, interval
        self._began = self._last_time = time.monotonic()

    def __call__(self, chars: int, tokens: int) -> None:
        now = time.monotonic()
        if now - self._last_time >= self._interval:
            self._last_time = now
            speed = tokens / max(now - self._began, 1e-9)
            self._log(f"{chars / 1e6:,.1f} M characters, {tokens:,} tokens, {speed:,.0f} a second")


def format_seconds(seconds: float) -> str:
    """Format seconds: ``75`` -> ``1:15``; ``3700`` -> ``1:01:40``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


LOSS_SMOOTHING = 0.9  # decay of the smoothed loss per step
REFRESH = 4  # a second
WIDTH = 32  # of the bar


def make_progress(console: Console | None = None) -> PlainProgress:
    """Return the dashboard for a terminal (default: stderr), else plain progress."""
    if console is None:
        from rich.console import Console

        console = Console(stderr=True)
    return ConsoleDashboard(console) if console.is_terminal else PlainProgress(console)


class ConsoleDashboard(PlainProgress):
    """Dashboard of a terminal; evaluations, samples and saves are printed above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live: Live | None = None
        self._summed = self._weight = 0.0

    def on_start(self, report: callbacks.StartReport) -> None:
        from rich.live import Live

        super().on_start(report)
        self._live = Live(get_renderable=self.render, console=self.console, transient=True, refresh_per_second=REFRESH)
        self._live.start()

    def on_step(self, report: callbacks.StepReport) -> None:
        self.last = report
        self._summed = LOSS_SMOOTHING * self._summed + report.loss
        self._weight = LOSS_SMOOTHING * self._weight + 1

    def on_end(self, outcome: callbacks.TrainingResult) -> None:
        self.close()
        super().on_end(outcome)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def render(self) -> RenderableType:
        """Return the current dashboard."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        if self.last is None or self.start is None:
            return Text("  the first step ...")
        first = Table.grid(padding=(0, 2))
        where = "   ".join([self.step_text(), *self.time_left()])
        first.add_row("", ProgressBar(total=1.0, completed=self._share(), width=WIDTH), Text(where))
        lines = [Text("  " + line, no_wrap=True, overflow="ellipsis") for line in self.lines()]
        return Group(first, *lines)

    def lines(self) -> list[str]:
        """Return the lines below the bar: losses, then rate and speed."""
        last = self.last
        assert last is not None
        losses = [f"loss  {self._summed / self._weight:.3f}", f"raw {last.loss:.3f}"]
        if self.evaluation is not None:
            losses.append(f"validation {self.evaluation.val_loss:.3f}, best {self.evaluation.best:.3f}")
        losses += self.accuracy_text()
        speed = [f"rate  {last.lr:.1e}", f"grad_norm {last.grad_norm:.3g}", f"{last.tokens_per_second:,.0f} tokens/s"]
        if last.mfu is not None:
            speed.append(f"{last.mfu:.1%} MFU")
        if last.memory is not None:
            speed.append(format_bytes(last.memory))
        if last.memory_peak is not None:
            speed.append(f"at most {format_bytes(last.memory_peak)}")
        speed += self.expert_text()
        return ["   ".join(losses), "   ".join(speed)]

    def _share(self) -> float:
        start, last = self.start, self.last
        assert start is not None and last is not None
        shares = [last.step / start.steps] if start.steps else []
        if start.minutes is not None:
            shares.append(last.elapsed / (60 * start.minutes))
        return min(1.0, max(shares, default=0.0))
