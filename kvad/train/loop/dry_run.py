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
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvad.config import ModelConfig, attention_specs
from kvad.model import Summarizer
from kvad.model_input import ModelInput, SubBatch
from kvad.train import monitoring, objectives, setup
from kvad.train.config import RunConfig
from kvad.train.data import Batch, TrainingData
from kvad.train.loop.acceleration import apply_acceleration, check_acceleration
from kvad.train.loop.run import load_teacher
from kvad.train.objectives import Autocast, Objective
from kvad.train.optim import OptimizersContainer
from kvad.train.setup import CorpusArgument, RunData, load_initial, resolve_corpus

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


def plan_training(
    config: RunConfig, corpus: CorpusArgument, available: int | None, log: Callable[[str], None]
) -> TrainingPlan:
    """Estimate the cost of a run.

    Args:
        config: The run's configuration.
        corpus: Its texts.
        available: Bytes that may be used, None if unknown.
        log: Receives one line per stage of preparation.

    Raises:
        KvadError: As ``train_model`` does, except for memory.
    """
    setup.preflight.check_device(config.train)
    with tempfile.TemporaryDirectory() as folder:
        subject = (_plan_summarizer if config.objective.kind == "summarizer" else _plan_model)(
            config, corpus, Path(folder), log
        )
        return _planned(subject, available)


class _PlannedModel(NamedTuple):
    """Model to be trained; ``make`` builds the trained module and its objective."""

    config: RunConfig
    model: ModelConfig
    parameters: int
    trained: int
    data: TrainingData
    make: Callable[[], tuple[nn.Module, Objective]]

    @property
    def is_summarizer(self) -> bool:
        return self.config.objective.kind == "summarizer"

    @property
    def precision(self) -> str:
        return objectives.cross_entropy.resolve_precision(self.config.train.precision, self.config.train.device)


def _plan_model(config: RunConfig, corpus: CorpusArgument, folder: Path, log: Callable[[str], None]) -> _PlannedModel:
    config = setup.initialize.resolve_paths(config)
    start = load_initial(config)
    config = setup.objective_factory.resolve_objective(
        config, config.resolve(vocab=1).kind if start is None else start.model_config.kind
    )
    run_data = RunData(
        config, resolve_corpus(config.objective.kind, corpus), log, start=None if start is None else start.opened
    )
    tokenizer = run_data.make_tokenizer() if start is None else start.tokenizer
    model = run_data.with_objective_head(config.resolve(tokenizer.vocab_size)) if start is None else start.model_config
    run_data.open(folder / "data", tokenizer)
    num_parameters, trained = (setup.initialize.count_parameters(model),) * 2 if start is None else start.parameters

    def make() -> tuple[nn.Module, Objective]:
        module = setup.initialize.build_new_model(config, model, start)
        apply_acceleration(module, config.train)
        autocast = Autocast(
            objectives.cross_entropy.resolve_precision(config.train.precision, config.train.device), config.train.device
        )
        return module, setup.objective_factory.build_objective(config, module, autocast)

    return _PlannedModel(config, model, num_parameters, trained, run_data.data, make)


def _plan_summarizer(
    config: RunConfig, corpus: CorpusArgument, folder: Path, log: Callable[[str], None]
) -> _PlannedModel:
    check_acceleration(config.train)
    teacher, tokenizer = load_teacher(config)
    run_data = RunData(config, resolve_corpus("summarizer", corpus), log)
    run_data.open(folder / "data", tokenizer)
    options, train = config.summarizer, config.train
    summarizer = Summarizer(attention_specs(teacher.config), options.ratio, options.hidden_size)
    trained = sum(parameter.numel() for parameter in summarizer.parameters())

    def make() -> tuple[nn.Module, Objective]:
        from kvad import checkpoint as checkpoint_lib

        model = checkpoint_lib.loader.load_weights(teacher, "float32", train.device)
        autocast = Autocast(objectives.cross_entropy.resolve_precision(train.precision, train.device), train.device)
        return summarizer, objectives.summary_distillation.SummaryDistillation(
            model, summarizer.to(train.device), options, autocast
        )

    return _PlannedModel(
        config,
        teacher.config,
        setup.initialize.count_parameters(teacher.config) + trained,
        trained,
        run_data.data,
        make,
    )


# ---------------------------------------------------------------- the plan


def _planned(subject: _PlannedModel, available: int | None) -> TrainingPlan:
    config, data, train = subject.config, subject.data, subject.config.train
    memory, fits = (None, None) if subject.is_summarizer else _memory(subject, available)
    peak = monitoring.throughput.measure_gemm_peak(train.device, subject.precision)
    throughput = monitoring.throughput.ThroughputMeter(subject.model, peak, frozen=config.lora is not None)
    batches = data.micro_batches(0)
    step_flops = None if subject.is_summarizer else throughput.count_flops(batches)
    is_known = data.train_tokens > 0
    per_step = data.tokens_per_step
    # The number of targets of a pair is known only after it was read.
    if not is_known and batches[0].model_input.encoder_input is not None:
        per_step = sum(len(batch.targets) for batch in batches)
    read = (
        data.read_per_step
        if isinstance(data, (objectives.masked_lm.MaskedLMDataset, objectives.span_corruption.SpanCorruptionDataset))
        else per_step
    )
    trial = None
    if fits is None or fits >= train.batch_size:
        trial = _trial(subject, batches[0], throughput)
    seconds = (
        None
        if trial is None
        else train.gradient_accumulation_steps * trial.seconds * train.batch_size / trial.rows + trial.update
    )
    eval_tokens = min(train.eval_tokens or data.validation_tokens, data.validation_tokens)
    evaluation = None if trial is None or seconds is None else (seconds - trial.update) / 3 * eval_tokens / read
    steps = _steps(config, seconds, evaluation)
    eval_seconds = None
    if steps is not None and evaluation is not None:
        eval_seconds = -(-steps // train.eval_interval) * evaluation  # one more at the end
    return TrainingPlan(
        objective=config.objective.kind,
        kind=subject.model.kind,
        parameters=subject.parameters,
        trained=subject.trained,
        memory=memory,
        available=available,
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
        step_flops=step_flops,
        gemm_flops=peak,
        trial=trial,
        step_seconds=seconds,
        seconds=None if steps is None or seconds is None or eval_seconds is None else steps * seconds + eval_seconds,
        eval_seconds=eval_seconds,
        checkpoint=_checkpoint(subject),
        num_checkpoints=train.keep_checkpoints + train.keep_best,
        device=train.device,
        precision=subject.precision,
        threads=torch.get_num_threads(),
    )


def _memory(subject: _PlannedModel, available: int | None) -> tuple[dict[str, int], int | None]:
    """Return bytes by purpose and the largest micro-batch up to train.batch_size that fits.

    The size is None for devices other than the CPU.
    """
    config, batch = subject.config, subject.config.train.batch_size
    half = subject.precision == "bf16"
    learned = None if config.lora is None else subject.trained
    parts = setup.memory_estimate.training_parts(
        subject.model, config, subject.parameters, batch, half=half, learned=learned
    )
    if available is None or torch.device(config.train.device).type != "cpu":
        return parts, None
    sizes = range(batch, 0, -1)
    need = (
        setup.memory_estimate.training_bytes(subject.model, config, subject.parameters, n, half=half, learned=learned)
        for n in sizes
    )
    return parts, next((n for n, bytes_ in zip(sizes, need, strict=True) if bytes_ <= available), 0)


def _steps(config: RunConfig, seconds: float | None, evaluation: float | None) -> int | None:
    """Return the number of steps, within the time limit if there is one."""
    train = config.train
    if train.minutes is None or seconds is None or evaluation is None:
        return train.last_step if train.minutes is None else None
    by_clock = max(1, int(60 * train.minutes / (seconds + evaluation / train.eval_interval)))
    return by_clock if train.last_step is None else min(by_clock, train.last_step)


def _checkpoint(subject: _PlannedModel) -> int:
    """Return the bytes of a checkpoint: of adapters and summarizers, only the trained part."""
    whole = subject.config.lora is None and not subject.is_summarizer
    return setup.memory_estimate.saved_bytes(
        subject.model, subject.config, subject.parameters, None if whole else subject.trained
    )


# ---------------------------------------------------------------- the trial


def _trial(subject: _PlannedModel, batch: Batch, throughput: monitoring.throughput.ThroughputMeter) -> TrialTiming:
    """Time real rows: one first, then as many as should take TRIAL_SECONDS.

    Returns the fastest of several repetitions if they are short.
    """
    module, objective = subject.make()
    train, model = subject.config.train, subject.model
    optimization = OptimizersContainer(
        module, subject.config.optim, train, None if subject.is_summarizer else model.hidden_size
    )
    module.train()

    def timed(batch: Batch) -> tuple[float, float]:
        optimization.begin_step(0, 0.0)
        began = _now(train.device)
        objective.accumulate_gradients(batch, optimization.scaled_total(len(batch.targets)))
        passed = _now(train.device)
        optimization.step(optimization.clip_grad_norm())
        return passed - began, _now(train.device) - passed

    rows = batch.model_input.sub_batches[0].num_seqs
    timed(first_rows(batch, 1))  # the first pass allocates buffers and optimizer state
    row_seconds, update = timed(first_rows(batch, 1))
    chosen = min(rows, max(1, int(TRIAL_SECONDS / max(row_seconds, 1e-9))))
    trial_batch = first_rows(batch, chosen)
    best, spent = row_seconds, row_seconds
    if chosen > 1:
        best, update = timed(trial_batch)
        spent += best
    for _ in range(MAX_REPEATS):
        if spent + best > TRIAL_SECONDS / 3:
            break
        seconds, other_update = timed(trial_batch)
        spent, best, update = spent + seconds, min(best, seconds), min(update, other_update)
    share = None if subject.is_summarizer else throughput.count_flops([trial_batch]) / best / throughput.peak
    return TrialTiming(chosen, best, update, share)


def _now(device: str) -> float:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def first_rows(batch: Batch, count: int) -> Batch:
    """Return the first ``count`` rows of a micro-batch."""
    model_input = _first(batch.model_input, count)
    encoder_input = None if batch.model_input.encoder_input is None else _first(batch.model_input.encoder_input, count)
    sampled = (
        None
        if batch.sampled_indices is None
        else batch.sampled_indices[batch.sampled_indices < len(model_input.token_ids)]
    )
    return Batch(
        model_input._replace(encoder_input=encoder_input), batch.targets[: len(model_input.logit_indices)], sampled
    )


def _first(model_input: ModelInput, count: int) -> ModelInput:
    (sub_batch,) = model_input.sub_batches
    size = count * sub_batch.num_new_tokens

    def take(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[:size]

    return model_input._replace(
        token_ids=model_input.token_ids[:size],
        positions=model_input.positions[:size],
        sub_batches=(SubBatch(count, sub_batch.num_new_tokens, sub_batch.num_read_slots),),
        logit_indices=model_input.logit_indices[model_input.logit_indices < size],
        document_ids=take(model_input.document_ids),
        max_seq_lens=take(model_input.max_seq_lens),
        causal_order=take(model_input.causal_order),
    )
