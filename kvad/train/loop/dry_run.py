"""``kvad train --dry-run``: the cost of a run, estimated without training.

Nothing is written but its tokens, in a temporary folder. Counted: parameters, memory (``memory_estimate.py``), tokens,
steps, epochs, FLOPs (``kvad/config/flops.py``, the rows of the first step), bytes of a checkpoint. Measured, under the
machine's current load: a large matrix product, and forward and backward passes with an optimizer step over rows of the
first step's first micro-batch. As many rows as take a few seconds are measured; a whole step is extrapolated from them.
Nothing is measured if it would not fit into memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kvad.train import monitoring, setup
from kvad.train.config import RunConfig
from kvad.train.data import Batch
from kvad.train.loop.run import TrainingRun
from kvad.train.monitoring import Callback
from kvad.train.setup import CorpusArgument

TRIAL_SECONDS = 10.0  # approximate upper limit of a trial's passes
MAX_REPEATS = 4  # repetitions of a short trial


@dataclass(frozen=True)
class TrialTiming:
    """Measured times of a trial."""

    rows: int
    seconds: float  # forward and backward pass over the rows
    update: float  # seconds of an optimizer step
    utilization: float | None  # the rows' FLOP/s over those of a matrix product, None if not counted


@dataclass(frozen=True)
class TrainingPlan:
    """Estimated cost of a run; None for what is unknown.

    Unknown are tokens and epochs of sequential orders, the number of steps of a run that only the clock ends if nothing
    was measured, and FLOPs and memory of summarizer training.
    """

    objective: str
    kind: str
    parameters: int
    trained: int
    memory: Mapping[str, int] | None  # bytes by purpose
    available: int | None  # bytes
    fits: int | None  # largest micro-batch that fits, None if the available memory is unknown
    train_tokens: int | None
    validation_tokens: int | None
    batch: int
    accumulate: int
    context: int
    tokens_per_step: int
    steps: int | None
    minutes: float | None
    epochs: float | None
    step_flops: int | None
    gemm_flops: float
    trial: TrialTiming | None
    step_seconds: float | None
    seconds: float | None  # of the whole run without its saves
    eval_seconds: float | None  # part of `seconds`
    checkpoint: int  # bytes on disk
    num_checkpoints: int  # number kept
    device: str
    precision: str
    threads: int

    @property
    def tokens(self) -> int | None:
        return None if self.steps is None else self.steps * self.tokens_per_step

    @property
    def flops(self) -> int | None:
        return None if self.steps is None or self.step_flops is None else self.steps * self.step_flops

    @property
    def bytes(self) -> int | None:
        return None if self.memory is None else sum(self.memory.values())


class _StageLog(Callback):
    """Passes the lines about stages to a function."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log

    def on_stage(self, text: str) -> None:
        self._log(text)


def plan_training(
    config: RunConfig, corpus: CorpusArgument, available: int | None, log: Callable[[str], None]
) -> TrainingPlan:
    """Estimate the cost of a run; raises as ``train_model``, except for memory.

    ``available`` is the number of bytes that may be used; ``log`` receives one line per stage of preparation.
    """
    setup.preflight.check_device(config.train)
    with tempfile.TemporaryDirectory() as folder:
        run = TrainingRun(config, corpus, Path(folder), available, [_StageLog(log)])
        run.open_initial()
        run.run_data.open(run.out / setup.preflight.TOKENS_FOLDER, run.initial.tokenizer)
        return _plan(run)


def _plan(run: TrainingRun) -> TrainingPlan:
    config, data, train, model = run.config, run.run_data.data, run.config.train, run.initial.model_config
    parameters, trained = run.initial.parameters
    saved_alone = trained if config.lora is not None or run.is_summarizer else None  # of adapters and summarizers
    stored = setup.memory_estimate.MemoryEstimate(model, config, parameters, saved_alone)
    memory, fits = run.memory, None
    if memory is not None and run.available is not None and torch.device(train.device).type == "cpu":
        fits = memory.largest_batch(run.available)
    peak = monitoring.throughput.measure_gemm_peak(train.device, run.precision)
    throughput = monitoring.throughput.ThroughputMeter(model, peak, frozen=config.lora is not None)
    batches = data.micro_batches(0)
    is_known = data.train_tokens > 0
    per_step, read = data.tokens_per_step, data.read_per_step
    # The number of targets of a pair is known only after it was read.
    if not is_known and batches[0].model_input.encoder_input is not None:
        per_step = read = sum(len(batch.targets) for batch in batches)
    trial = _trial(run, throughput) if fits is None or fits >= train.batch_size else None
    seconds = step_eval = eval_seconds = None  # of a step; of an evaluation; of all evaluations
    if trial is not None:
        seconds = train.gradient_accumulation_steps * trial.seconds * train.batch_size / trial.rows + trial.update
        eval_tokens = min(train.eval_tokens or data.validation_tokens, data.validation_tokens)
        step_eval = (seconds - trial.update) / 3 * eval_tokens / read
    steps = _steps(config, seconds, step_eval)
    if steps is not None and step_eval is not None:
        eval_seconds = -(-steps // train.eval_interval) * step_eval  # one more at the end
    return TrainingPlan(
        objective=config.objective.kind,
        kind=model.kind,
        parameters=parameters,
        trained=trained,
        memory=None if memory is None else memory.parts(train.batch_size),
        available=run.available,
        fits=fits,
        train_tokens=data.train_tokens if is_known else None,
        validation_tokens=data.validation_tokens,
        batch=train.batch_size,
        accumulate=train.gradient_accumulation_steps,
        context=config.data.seq_len,
        tokens_per_step=per_step,
        steps=steps,
        minutes=train.minutes,
        epochs=steps * read / data.train_tokens if is_known and steps is not None else None,
        step_flops=None if run.is_summarizer else throughput.count_flops(batches),
        gemm_flops=peak,
        trial=trial,
        step_seconds=seconds,
        seconds=None if steps is None or seconds is None or eval_seconds is None else steps * seconds + eval_seconds,
        eval_seconds=eval_seconds,
        checkpoint=stored.saved,
        num_checkpoints=train.keep_checkpoints + train.keep_best,
        device=train.device,
        precision=run.precision,
        threads=torch.get_num_threads(),
    )


def _steps(config: RunConfig, seconds: float | None, evaluation: float | None) -> int | None:
    """Return the number of steps, within the time limit if there is one."""
    train = config.train
    if train.minutes is None or seconds is None or evaluation is None:
        return train.last_step if train.minutes is None else None
    by_clock = max(1, int(60 * train.minutes / (seconds + evaluation / train.eval_interval)))
    return by_clock if train.last_step is None else min(by_clock, train.last_step)


def _trial(run: TrainingRun, throughput: monitoring.throughput.ThroughputMeter) -> TrialTiming:
    """Time real rows: one, then as many as should take TRIAL_SECONDS; the fastest of several short trials counts."""
    run.build()
    run.module.train()
    device, objective, optimization = run.config.train.device, run.objective, run.optimization
    first_rows = run.run_data.data.first_rows

    def timed(batch: Batch) -> tuple[float, float]:
        optimization.begin_step(0, 0.0)
        began = _now(device)
        objective.accumulate_gradients(batch, optimization.scaled_total(len(batch.targets)))
        passed = _now(device)
        optimization.step(optimization.clip_grad_norm())
        return passed - began, _now(device) - passed

    timed(first_rows(1))  # the first pass allocates buffers and optimizer state
    row_seconds, update = timed(first_rows(1))
    chosen = min(run.config.train.batch_size, max(1, int(TRIAL_SECONDS / max(row_seconds, 1e-9))))
    trial_batch = first_rows(chosen)
    best, spent = row_seconds, row_seconds
    if chosen > 1:
        best, update = timed(trial_batch)
        spent += best
    for _ in range(MAX_REPEATS):
        if spent + best > TRIAL_SECONDS / 3:
            break
        seconds, other_update = timed(trial_batch)
        spent, best, update = spent + seconds, min(best, seconds), min(update, other_update)
    share = None if run.is_summarizer else throughput.count_flops([trial_batch]) / best / throughput.peak
    return TrialTiming(chosen, best, update, share)


def _now(device: str) -> float:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
