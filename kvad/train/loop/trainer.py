"""Training loop: steps, evaluations, saves. Callbacks and data are passed in.

A step is a function of the weights, the moments and the step's number, bit for bit, on one machine with one number of
threads. Checkpoints are made between optimizer steps only, so a run killed amid its micro-batches repeats that step
from its first row. A run limited by ``minutes`` resumes too, but its learning rate follows the clock.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from kvad import model as model_lib
from kvad import ops
from kvad.errors import ConfigError, DataError, NumericalError
from kvad.model import Transformer
from kvad.train import monitoring, objectives
from kvad.train.config import TrainConfig
from kvad.train.data import Batch, PackedDataset
from kvad.train.loop.async_checkpointer import AsyncCheckpointer, checkpoint_status
from kvad.train.loop.data_parallel import SINGLE_PROCESS, DataParallelGroup, random_state, restore_random_state
from kvad.train.loop.failures import DivergenceDetector, NonFiniteReport, collapse_warnings, locate_nonfinite
from kvad.train.monitoring import Callback, TrainingResult
from kvad.train.objectives import ExpertBalancer, ExpertLoad, Objective
from kvad.train.optim import OptimizersContainer


@dataclass
class TrainerState:
    """Progress of a run, stored in every checkpoint next to weights and moments."""

    step: int = 0
    tokens: int = 0
    elapsed: float = 0.0
    loss: float | None = None
    val_loss: float | None = None
    val_step: int | None = None  # step of the evaluation that gave val_loss
    best: float | None = None
    best_step: int | None = None  # step of the lowest val_loss
    trend: list[float] = field(default_factory=list)  # fields of the DivergenceDetector
    collapsing_steps: dict[str, int] = field(default_factory=dict)  # by layer, see ``failures.collapse_warnings``


@dataclass
class Trainer:
    """Trains ``model`` until the last step, the time limit or a signal."""

    model: nn.Module
    objective: Objective
    optimization: OptimizersContainer
    data: PackedDataset
    config: TrainConfig
    state: TrainerState
    checkpointer: AsyncCheckpointer  # saves the model and `state`
    sample_fn: Callable[[], tuple[monitoring.callbacks.TextSample, ...]] | None = None  # called after evaluations
    callbacks: Sequence[Callback] = ()
    clock: Callable[[], float] = time.monotonic  # returns seconds
    throughput: monitoring.throughput.ThroughputMeter | None = None  # counts a step's FLOPs
    describe_rows: Callable[[range], str] = lambda rows: ""  # names the texts of rows, numbered from the run's first
    data_parallel: DataParallelGroup = SINGLE_PROCESS  # the processes that train the same model
    experts: ExpertBalancer | None = None  # of a model with experts

    def __post_init__(self) -> None:
        self.precision = objectives.cross_entropy.resolve_precision(self.config.precision, self.config.device)
        self.speed, self.flops = monitoring.throughput.SpeedMeter(), 0
        self.trend, self.clock = DivergenceDetector(*self.state.trend), self.data_parallel.clock(self.clock)
        self.checkpoint = Path()  # newest checkpoint reported by this run
        self.loads: tuple[ExpertLoad, ...] = ()  # of the newest step

    def fit(self) -> TrainingResult:
        """Train to the end, or to the end of the step in which SIGINT or SIGTERM arrives; then save.

        A resumed run that has all of its steps is left unchanged.
        """
        began, before = self.clock() - self.state.elapsed, (self.state.step, self.state.val_step)
        self._notify("on_start", self._start_report())
        with _stop_signals() as stop, ops.runtime.keep_freed_memory():
            try:
                checkpoint = self._run(stop, began)
            except NumericalError as error:
                self.checkpointer.close()  # the save in flight may become the first checkpoint
                advice = "train with a lower learning rate" + ("" if self.precision == "fp32" else " or in fp32")
                status = checkpoint_status(self.checkpointer.has_checkpoint)
                raise NumericalError(error.message, f"{status}; {error.hint or advice}") from error
            finally:
                self.checkpointer.close()
        is_unchanged = (self.state.step, self.state.val_step) == before
        outcome = self._outcome(checkpoint, is_unchanged, stop.number)
        self._notify("on_end", outcome)
        return outcome

    def _run(self, stop: _StopEvent, began: float) -> Path:
        """Run all steps and return the folder of the last checkpoint."""
        config, state = self.config, self.state
        # step of the last save that was started
        saved = state.step if self.checkpointer.has_checkpoint else None
        self.data_parallel.check_weights_equal(self.model, state.step)
        while not self.data_parallel.any_rank(stop.is_set()) and not self._is_over():
            before = self.clock()
            lr, norm, tokens = self._step()
            self.speed.add(tokens, self.clock() - before, self.flops)
            state.elapsed = self.clock() - began
            self._notify("on_step", self._step_report(lr, norm))
            assert state.loss is not None
            warning = self.trend.update(state.step, state.loss, norm, lr)
            state.trend = list(astuple(self.trend))
            warnings = [] if warning is None else [warning]
            for text in warnings + collapse_warnings(state.collapsing_steps, self.loads):
                self._notify("on_warning", monitoring.callbacks.WarningReport(state.step, text))
            if state.step % config.eval_interval == 0 or self._is_over():
                self._evaluate()  # before the save, so that a resumed run does not repeat it
            if state.step % config.save_interval == 0 or (config.keep_best and state.best_step == state.step):
                self.checkpointer.save()
                saved = state.step
            self._notify_saved()
            state.elapsed = self.clock() - began
        if self._is_over() and state.val_step != state.step:
            self._evaluate()
            saved = None
        if saved != state.step:
            self.checkpointer.save()
        self.checkpointer.wait()
        self._notify_saved()
        return self.checkpoint

    def _step(self) -> tuple[float, float, int]:
        """Run one optimizer step; return learning rate, gradient norm before clipping, number of targets."""
        state = self.state
        random = random_state(self.config.device)
        batches = self._batches()
        total = sum(len(batch.targets) for batch in batches)
        local = batches[self.data_parallel.rank :: self.data_parallel.size]
        self.flops = 0 if self.throughput is None else self.throughput.count_flops(local)
        self.model.train()
        lr = self.optimization.begin_step(state.step, state.elapsed)
        scaled = self.optimization.scaled_total(total)
        summed = sum(self.objective.accumulate_gradients(batch, scaled) for batch in local)
        summed = self.data_parallel.all_reduce_gradients(self.model, summed)
        norm = self.optimization.clip_grad_norm()
        if not math.isfinite(summed) or not self.optimization.can_continue(norm):
            restore_random_state(random, self.config.device)
            report = locate_nonfinite(self.model, self.objective, local, scaled)
            reports = self.data_parallel.all_gather_text("" if report is None else self._describe(report, batches))
            no_cause = "repeated, all values are finite: check this machine for hardware errors"
            cause = next(filter(None, reports), no_cause)
            raise NumericalError(f"step {state.step + 1}: loss {summed / total}, gradient norm {norm}; {cause}")
        self.optimization.step(norm)
        if self.experts is not None:
            self.loads = self.experts.end_step(self.data_parallel.sum, is_updated=math.isfinite(norm))
        state.step, state.tokens, state.loss = state.step + 1, state.tokens + total, summed / total
        return lr, norm, total

    def _batches(self) -> list[Batch]:
        """Return the next step's micro-batches; DataErrors name the step and its texts."""
        try:
            return self.data.micro_batches(self.state.step)
        except DataError as error:
            rows = self.config.batch_size * self.config.gradient_accumulation_steps
            row_range = range(self.state.step * rows, (self.state.step + 1) * rows)
            sources = self.describe_rows(row_range)
            where = f"step {self.state.step + 1}{f', of {sources}' if sources else ''}"
            raise DataError(f"{where}: {error.message}", error.hint) from error

    def _describe(self, report: NonFiniteReport, batches: Sequence[Batch]) -> str:
        """Describe the first non-finite value of a step."""
        if report.batch is None:
            return f"not finite: {report.tensor_name}"
        counts = [batch.model_input.sub_batches[0].num_seqs for batch in batches]
        index = self.data_parallel.rank + report.batch * self.data_parallel.size
        first = self.state.step * sum(counts) + sum(counts[:index])
        rows = range(first, first + counts[index])
        text = f"first non-finite value: {report.tensor_name}, of micro-batch {index + 1} of {len(batches)}"
        if report.row is not None:
            rows, text = range(first + report.row, first + report.row + 1), f"{text}, row {report.row + 1}"
        sources = self.describe_rows(rows)
        return f"{text} ({sources})" if sources else text

    def _is_over(self) -> bool:
        """Return True if the run is over; no step starts that would end after the time limit."""
        config, state = self.config, self.state
        if config.last_step is not None and state.step >= config.last_step:
            return True
        return config.minutes is not None and state.elapsed + self.speed.seconds_per_step > 60 * config.minutes

    def _evaluate(self) -> None:
        """Evaluate the weights that a checkpoint would store as the model's."""
        self.model.eval()
        state = self.state
        self.data_parallel.check_weights_equal(self.model, state.step)
        with self.optimization.averaged_weights():
            result = self.objective.evaluate_loss(self.data.evaluation())
            state.val_loss, state.val_step = self.data_parallel.broadcast_scalar(result.loss), state.step
            if state.best is None or state.val_loss < state.best:
                state.best, state.best_step = state.val_loss, state.step
            report = monitoring.callbacks.EvalReport(
                state.step, state.val_loss, result.targets, state.best, result.accuracy
            )
            self._notify("on_eval", report)
            if self.sample_fn is not None:
                self._notify("on_samples", monitoring.callbacks.SamplesReport(state.step, self.sample_fn()))
        self.optimization.on_evaluation(state.val_loss)

    def _notify_saved(self) -> None:
        """Report checkpoints written since the last call."""
        for path, step in self.checkpointer.finished():
            self.checkpoint = path
            self._notify("on_save", path, step)

    def _notify(self, method: str, *report: object) -> None:
        for callback in self.callbacks:
            getattr(callback, method)(*report)

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
        mfu = None if self.throughput is None else speed.flops_per_second / self.throughput.peak
        progress = (state.tokens, state.elapsed, speed.tokens_per_second, self._eta())
        max_ratios = {load.layer: load.max_ratio for load in self.loads} or None
        num_starved = {load.layer: load.num_starved for load in self.loads} or None
        experts = (max_ratios, num_starved)
        return monitoring.callbacks.StepReport(state.step, state.loss, lr, norm, *progress, mfu, *memory, *experts)

    def _eta(self) -> float | None:
        config, state = self.config, self.state
        limits = []
        if config.last_step is not None:
            limits.append((config.last_step - state.step) * self.speed.seconds_per_step)
        if config.minutes is not None:
            limits.append(60 * config.minutes - state.elapsed)
        return max(0.0, min(limits)) if limits else None

    def _outcome(self, checkpoint: Path, is_unchanged: bool, number: int | None) -> TrainingResult:
        s = self.state
        reason: Literal["done", "interrupted", "unchanged"] = "interrupted"
        if self._is_over():
            reason, number = "unchanged" if is_unchanged else "done", None
        numbers = (s.step, s.loss, s.val_loss, s.best, s.tokens, s.elapsed)
        return TrainingResult(reason, *numbers, checkpoint, s.best_step, number)


class _StopEvent(threading.Event):
    """Event set by a signal."""

    number: int | None = None  # the signal


@contextmanager
def _stop_signals() -> Iterator[_StopEvent]:
    """Yield an event set by SIGINT or SIGTERM (in the main thread); a second SIGINT interrupts at once."""
    stop = _StopEvent()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.number = number
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def apply_acceleration(model: Transformer, train: TrainConfig) -> None:
    """Apply activation checkpointing and torch.compile to a model's training steps; ConfigError without a compiler.

    Neither changes what a model stores or computes. Only the parts between two attention calls are compiled, because
    each of them is one graph: norms, projections of queries, keys and values, and MLPs. Attention itself already has
    fused kernels (``ops/attention.py``). Evaluations and samples, whose rows have any length, are not compiled.
    """
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            stack.checkpoint_activations = train.activation_checkpointing
    if not train.compile:
        return
    reason = ops.runtime.compile_error(train.device)
    if reason is not None:
        raise ConfigError(f"train.compile: torch cannot compile for {train.device}: {reason}", "Leave it out.")
    for module in model.modules():
        if isinstance(module, (model_lib.layers.Norm, model_lib.layers.PlainMLP, model_lib.layers.GatedMLP)):
            _compile(module, "forward")
        elif isinstance(module, model_lib.attention.Attention):
            _compile(module, "project")


def _compile(module: nn.Module, name: str) -> None:
    plain: Callable[..., Any] = getattr(module, name)
    setattr(module, name, _InTraining(module, plain, ops.runtime.lazy_compile(plain)))


class _InTraining:
    """Method that runs compiled while its module is in training mode."""

    def __init__(self, module: nn.Module, plain: Callable[..., Any], fast: Callable[..., Any]) -> None:
        self._module, self._plain, self._fast = module, plain, fast

    def __call__(self, *arguments: Any) -> Any:
        return (self._fast if self._module.training else self._plain)(*arguments)
