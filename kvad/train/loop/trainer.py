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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from kvad import ops
from kvad.errors import DataError, NumericalError
from kvad.train import monitoring, objectives
from kvad.train.config import TrainConfig
from kvad.train.data import Batch, TrainingData
from kvad.train.loop.checkpointer import AsyncCheckpointer, checkpoint_status
from kvad.train.loop.data_parallel import SINGLE_PROCESS, DataParallelGroup
from kvad.train.loop.divergence import DivergenceDetector
from kvad.train.loop.nonfinite import NonFiniteReport, RandomState, locate_nonfinite
from kvad.train.monitoring import Callback, TrainingResult
from kvad.train.objectives import Objective
from kvad.train.optim import OptimizersContainer


@dataclass
class TrainerState:
    """How far a run has come: what a checkpoint keeps beside weights and moments."""

    step: int = 0
    tokens: int = 0
    elapsed: float = 0.0
    loss: float | None = None
    val_loss: float | None = None
    val_step: int | None = None  # the step at which val_loss was measured
    best: float | None = None
    best_step: int | None = None  # the step of the lowest val_loss
    trend: list[float] = field(default_factory=list)  # divergence.py's


@dataclass
class Trainer:
    """``model``: what is trained.  ``saver`` makes checkpoints of it and of ``state``; ``sample`` says what the model
    makes of a few examples, after every evaluation; ``clock`` gives seconds; ``gauge`` counts a step's FLOPs;
    ``whence`` names the texts of rows, which are counted from the run's first; ``peers`` train the same model."""

    model: nn.Module
    objective: Objective
    optimization: OptimizersContainer
    data: TrainingData
    config: TrainConfig
    state: TrainerState
    checkpointer: AsyncCheckpointer
    sample_fn: Callable[[], tuple[monitoring.callbacks.TextSample, ...]] | None = None
    callbacks: Sequence[Callback] = ()
    clock: Callable[[], float] = time.monotonic
    throughput: monitoring.throughput.ThroughputMeter | None = None
    describe_rows: Callable[[range], str] | None = None
    data_parallel: DataParallelGroup = SINGLE_PROCESS

    def __post_init__(self) -> None:
        self.precision = objectives.cross_entropy.resolve_precision(self.config.precision, self.config.device)
        self.speed, self.flops = monitoring.metrics.SpeedMeter(), 0
        self.trend, self.clock = DivergenceDetector(self.state.trend), self.data_parallel.clock(self.clock)
        self.checkpoint = Path()  # the newest that this run has told of

    def fit(self) -> TrainingResult:
        """Train to the end, or to the end of the step in which SIGINT or SIGTERM comes; then save."""
        began = self.clock() - self.state.elapsed
        self._tell("on_start", self._start_report())
        with _stop_signals() as stop, ops.malloc.keep_freed_memory():
            try:
                checkpoint = self._run(stop, began)
            except NumericalError as error:
                self.checkpointer.close()  # what is in flight may become the first checkpoint
                raise NumericalError(error.message, self._cure(error.hint)) from error
            finally:
                self.checkpointer.close()
        outcome = self._outcome(checkpoint)
        self._tell("on_end", outcome)
        return outcome

    def _run(self, stop: threading.Event, began: float) -> Path:
        """All steps; -> the folder of the last one."""
        config, state = self.config, self.state
        saved: int | None = None  # the step of the last save that was begun
        self.data_parallel.check_weights_equal(self.model, state.step)
        while not self.data_parallel.any_rank(stop.is_set()) and not self._is_over():
            before = self.clock()
            lr, norm, tokens = self._step()
            self.speed.add(tokens, self.clock() - before, self.flops)
            state.elapsed = self.clock() - began
            self._tell("on_step", self._step_report(lr, norm))
            self._watch(lr, norm)
            if state.step % config.eval_interval == 0 or self._is_over():
                self._evaluate()  # before the save, so that a resume does not do it again
            if state.step % config.save_interval == 0 or (config.keep_best and state.best_step == state.step):
                self.checkpointer.save()
                saved = state.step
            self._tell_saved()
            state.elapsed = self.clock() - began
        if self._is_over() and state.val_step != state.step:
            self._evaluate()
            saved = None
        if saved != state.step:
            self.checkpointer.save()
        self.checkpointer.wait()
        self._tell_saved()
        return self.checkpoint

    def _step(self) -> tuple[float, float, int]:
        """One optimizer step: (learning rate, gradient norm before clipping, targets)."""
        state = self.state
        random = RandomState(self.config.device)
        batches = self._batches()
        total = sum(len(batch.targets) for batch in batches)
        mine = self.data_parallel.local_batches(batches)
        self.flops = 0 if self.throughput is None else self.throughput.count_flops(mine)
        self.model.train()
        lr = self.optimization.begin_step(state.step, state.elapsed)
        scaled = self.optimization.scaled_total(total)
        summed = sum(self.objective.accumulate_gradients(batch, scaled) for batch in mine)
        summed = self.data_parallel.all_reduce_gradients(self.model, summed)
        norm = self.optimization.clip_grad_norm()
        if not math.isfinite(summed) or not self.optimization.can_continue(norm):
            random.restore()
            fault = locate_nonfinite(self.model, self.objective, mine, scaled)
            said = self.data_parallel.all_gather_text("" if fault is None else self._told(fault, batches))
            told = next(filter(None, said), "done again, all of it is finite: is this machine sound?")
            raise NumericalError(f"step {state.step + 1}: loss {summed / total}, gradient norm {norm}; {told}")
        self.optimization.step(norm)
        state.step, state.tokens, state.loss = state.step + 1, state.tokens + total, summed / total
        return lr, norm, total

    def _cure(self, hint: str) -> str:
        """What is left of a run that numbers end, and what to do; ``hint``: where it is said already."""
        lower = "train with a lower learning rate" + ("" if self.precision == "fp32" else " or in fp32")
        return f"{checkpoint_status(self.checkpointer.has_checkpoint)}; {hint or lower}"

    def _batches(self) -> list[Batch]:
        """Of the next step.  DataError names step and texts."""
        try:
            return self.data.micro_batches(self.state.step)
        except DataError as error:
            rows = self.config.batch_size * self.config.gradient_accumulation_steps
            numbers = range(self.state.step * rows, (self.state.step + 1) * rows)
            whence = "" if self.describe_rows is None else self.describe_rows(numbers)
            where = f"step {self.state.step + 1}{f', of {whence}' if whence else ''}"
            raise DataError(f"{where}: {error.message}", error.hint) from error

    def _watch(self, lr: float, norm: float) -> None:
        """Warn of a run that diverges."""
        state = self.state
        assert state.loss is not None
        warning = self.trend.update(state.step, state.loss, norm, lr)
        state.trend = self.trend.state
        if warning is not None:
            self._tell("on_warning", monitoring.callbacks.WarningReport(state.step, warning))

    def _told(self, fault: NonFiniteReport, batches: Sequence[Batch]) -> str:
        """Of a step that is not finite: what, and where."""
        if fault.batch is None:
            return f"not finite is {fault.tensor_name}"
        counts, number = (
            [batch.model_input.sub_batches[0].num_seqs for batch in batches],
            self.data_parallel.global_index(fault.batch),
        )
        first = self.state.step * sum(counts) + sum(counts[:number])
        numbers = range(first, first + counts[number])
        words = f"first not finite is {fault.tensor_name}, of micro-batch {number + 1} of {len(batches)}"
        if fault.row is not None:
            numbers, words = range(first + fault.row, first + fault.row + 1), f"{words}, row {fault.row + 1}"
        whence = "" if self.describe_rows is None else self.describe_rows(numbers)
        return f"{words} ({whence})" if whence else words

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
        self.data_parallel.check_weights_equal(self.model, state.step)
        with self.optimization.averaged_weights():
            found = self.objective.evaluate_loss(self.data.evaluation())
            state.val_loss, state.val_step = self.data_parallel.broadcast_scalar(found.loss), state.step
            if state.best is None or state.val_loss < state.best:
                state.best, state.best_step = state.val_loss, state.step
            self._tell(
                "on_eval",
                monitoring.callbacks.EvalReport(state.step, state.val_loss, found.targets, state.best, found.accuracy),
            )
            if self.sample_fn is not None:
                self._tell("on_samples", monitoring.callbacks.SamplesReport(state.step, self.sample_fn()))
        self.optimization.on_evaluation(state.val_loss)

    def _tell_saved(self) -> None:
        """Of checkpoints that are there by now."""
        for path, step in self.checkpointer.finished():
            self.checkpoint = path
            for callback in self.callbacks:
                callback.on_save(path, step)

    def _tell(self, method: str, report: object) -> None:
        for callback in self.callbacks:
            getattr(callback, method)(report)

    def _start_report(self) -> monitoring.callbacks.StartReport:
        return monitoring.callbacks.StartReport(
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
            gemm_flops=None if self.throughput is None else self.throughput.peak,
        )

    def _step_report(self, lr: float, norm: float) -> monitoring.callbacks.StepReport:
        state = self.state
        assert state.loss is not None
        speed, memory = self.speed, monitoring.throughput.memory_usage(self.config.device)
        return monitoring.callbacks.StepReport(
            step=state.step,
            loss=state.loss,
            lr=lr,
            grad_norm=norm,
            tokens=state.tokens,
            elapsed=state.elapsed,
            tokens_per_second=speed.tokens_per_second,
            eta=self._eta(),
            mfu=None if self.throughput is None else speed.flops_per_second / self.throughput.peak,
            memory=memory.current,
            memory_peak=memory.peak,
        )

    def _eta(self) -> float | None:
        config, state = self.config, self.state
        left = []
        if config.last_step is not None:
            left.append((config.last_step - state.step) * self.speed.seconds_per_step)
        if config.minutes is not None:
            left.append(60 * config.minutes - state.elapsed)
        return max(0.0, min(left)) if left else None

    def _outcome(self, checkpoint: Path) -> TrainingResult:
        s = self.state
        reason: Literal["done", "interrupted"] = "done" if self._is_over() else "interrupted"
        return TrainingResult(reason, s.step, s.loss, s.val_loss, s.best, s.tokens, s.elapsed, checkpoint, s.best_step)


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
