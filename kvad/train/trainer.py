"""The loop.  What happens in a step is on this page; what is told about it, and to whom, is handed in.

To the bit: a step is a function of the weights, the moments and the step's number, on one machine with one number of
threads.  Checkpoints are made between optimizer steps only, so one that is killed in the middle of its micro-batches
is done again from its first row.  A run limited by ``minutes`` resumes too, but its learning rate follows the clock.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from kvad.errors import NumericalError
from kvad.ops.heap import kept
from kvad.train.config import TrainConfig
from kvad.train.data import TrainingData
from kvad.train.metrics import Speed
from kvad.train.objective import Objective, resolve_precision
from kvad.train.optim import Optimization
from kvad.train.reports import Callback, EvalReport, Outcome, Sample, SamplesReport, StartReport, StepReport

__all__ = ["State", "Trainer"]


@dataclass
class State:
    """How far a run has come: what a checkpoint keeps beside weights and moments."""

    step: int = 0
    tokens: int = 0
    elapsed: float = 0.0
    loss: float | None = None
    val_loss: float | None = None
    val_step: int | None = None  # the step at which val_loss was measured
    best: float | None = None


@dataclass
class Trainer:
    """``model``: what is trained.  ``save`` writes a checkpoint of the given state and returns its folder; ``sample``
    says what the model makes of a few examples, after every evaluation; ``clock`` gives seconds."""

    model: nn.Module
    objective: Objective
    optimization: Optimization
    data: TrainingData
    config: TrainConfig
    state: State
    save: Callable[[State], Path]
    sample: Callable[[], tuple[Sample, ...]] | None = None
    callbacks: Sequence[Callback] = ()
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.precision = resolve_precision(self.config.precision, self.config.device)
        self.speed = Speed()

    def fit(self) -> Outcome:
        """Train to the end, or to the end of the step in which SIGINT or SIGTERM comes; then save."""
        config, state = self.config, self.state
        saved: tuple[int, Path] | None = None
        began = self.clock() - state.elapsed
        self._tell("on_start", self._start_report())
        with _stop_signals() as stop, kept():
            while not stop.is_set() and not self._is_over():
                before = self.clock()
                lr, norm, tokens = self._step()
                self.speed.add(tokens, self.clock() - before)
                state.elapsed = self.clock() - began
                self._tell("on_step", self._step_report(lr, norm))
                if state.step % config.eval_every == 0 or self._is_over():
                    self._evaluate()  # before the save, so that a resume does not do it again
                if state.step % config.save_every == 0:
                    saved = self._save()
                state.elapsed = self.clock() - began
            if self._is_over() and state.val_step != state.step:
                self._evaluate()
                saved = None
            if saved is None or saved[0] != state.step:
                saved = self._save()
        outcome = self._outcome(saved[1])
        self._tell("on_end", outcome)
        return outcome

    def _step(self) -> tuple[float, float, int]:
        """One optimizer step: (learning rate, gradient norm before clipping, targets)."""
        state = self.state
        batches = self.data.micro_batches(state.step)
        total = sum(len(batch.targets) for batch in batches)
        self.model.train()
        lr = self.optimization.begin(state.step, state.elapsed)
        scaled = self.optimization.scaled(total)
        summed = sum(self.objective.backward(batch, scaled) for batch in batches)
        norm = self.optimization.norm()
        if not math.isfinite(summed) or not self.optimization.usable(norm):
            raise NumericalError(
                f"step {state.step + 1}: loss {summed / total}, gradient norm {norm}",
                "the last checkpoint is whole; train with a lower learning rate or in fp32",
            )
        self.optimization.step(norm)
        state.step, state.tokens, state.loss = state.step + 1, state.tokens + total, summed / total
        return lr, norm, total

    def _is_over(self) -> bool:
        """No step is begun that would end after the time is over."""
        config, state = self.config, self.state
        if config.last_step is not None and state.step >= config.last_step:
            return True
        return config.minutes is not None and state.elapsed + self.speed.seconds_per_step > 60 * config.minutes

    def _evaluate(self) -> None:
        """Of the weights that a checkpoint says are the model's."""
        self.model.eval()
        state = self.state
        with self.optimization.averaged():
            found = self.objective.loss_of(self.data.evaluation())
            state.val_loss, state.val_step = found.loss, state.step
            state.best = min(state.val_loss, math.inf if state.best is None else state.best)
            self._tell("on_eval", EvalReport(state.step, state.val_loss, found.targets, state.best, found.accuracy))
            if self.sample is not None:
                self._tell("on_samples", SamplesReport(state.step, self.sample()))
        self.optimization.evaluated(state.val_loss)

    def _save(self) -> tuple[int, Path]:
        path = self.save(self.state)
        for callback in self.callbacks:
            callback.on_save(path, self.state.step)
        return self.state.step, path

    def _tell(self, method: str, report: object) -> None:
        for callback in self.callbacks:
            getattr(callback, method)(report)

    def _start_report(self) -> StartReport:
        return StartReport(
            step=self.state.step,
            steps=self.config.last_step,
            minutes=self.config.minutes,
            parameters=sum(p.numel() for p in self.model.parameters()),
            train_tokens=self.data.train_tokens,
            validation_tokens=self.data.validation_tokens,
            tokens_per_step=self.data.tokens_per_step,
            precision=self.precision,
            device=self.config.device,
            threads=torch.get_num_threads(),
            torch=torch.__version__,
        )

    def _step_report(self, lr: float, norm: float) -> StepReport:
        state = self.state
        assert state.loss is not None
        speed = self.speed.tokens_per_second
        return StepReport(state.step, state.loss, lr, norm, state.tokens, state.elapsed, speed, self._eta())

    def _eta(self) -> float | None:
        config, state = self.config, self.state
        left = []
        if config.last_step is not None:
            left.append((config.last_step - state.step) * self.speed.seconds_per_step)
        if config.minutes is not None:
            left.append(60 * config.minutes - state.elapsed)
        return max(0.0, min(left)) if left else None

    def _outcome(self, checkpoint: Path) -> Outcome:
        s = self.state
        reason: Literal["done", "interrupted"] = "done" if self._is_over() else "interrupted"
        return Outcome(reason, s.step, s.loss, s.val_loss, s.best, s.tokens, s.elapsed, checkpoint)


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """SIGINT and SIGTERM set the event; a second SIGINT interrupts at once.  In other threads nothing is installed."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(_number: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
