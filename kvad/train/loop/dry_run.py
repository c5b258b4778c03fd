"""``kvad train --dry-run``: what a run will take.  Nothing is written but its tokens, in a temporary folder.

Counted: parameters, memory (``memory.py``), tokens, steps, epochs, FLOPs (``kvad/flops.py``, the rows of the first
step), bytes of a checkpoint.  Measured, on this machine as busy as it is now: a matrix product, and rows of the first
step's first micro-batch, forwards and backwards, with an optimizer's step.  As many rows as take some seconds; a whole
step is reckoned from them.  Nothing is measured where it would not fit into memory.
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

TRIAL_SECONDS = 10.0  # that a trial's passes take at most, about
MAX_REPEATS = 4  # times, where they are soon done


@dataclass(frozen=True)
class TrialTiming:
    """What was measured: ``seconds`` forwards and backwards over ``rows`` rows, and of an optimizer's ``update``.
    ``utilisation``: the rows' FLOPs a second over those of a matrix product (None: not counted)."""

    rows: int
    seconds: float
    update: float
    utilization: float | None


@dataclass(frozen=True)
class TrainingPlan:
    """None is what cannot be known: tokens and epochs of what is read in its order, steps of a run that only the clock
    ends where nothing was measured, FLOPs and memory of a compressor's training.

    ``memory``: bytes by what they are for, ``fits``: the most rows of a micro-batch (None: nobody knows what is
    available).  ``seconds``: all of the run but its saves, of which ``evaluating``.  ``checkpoint``: bytes on the disk,
    ``kept``: how many stay.
    """

    objective: str
    kind: str
    parameters: int
    trained: int
    memory: Mapping[str, int] | None
    available: int | None
    fits: int | None
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
    seconds: float | None
    eval_seconds: float | None
    checkpoint: int
    num_checkpoints: int
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
    config: RunConfig, corpus: CorpusArgument, available: int | None, tell: Callable[[str], None]
) -> TrainingPlan:
    """``available``: bytes that may be taken (None: nobody knows).  Raises as ``job.train``, but for memory."""
    setup.preflight.check_device(config.train)
    with tempfile.TemporaryDirectory() as folder:
        subject = (_compressor if config.objective.kind == "compress" else _model)(config, corpus, Path(folder), tell)
        return _planned(subject, available)


class _PlannedModel(NamedTuple):
    """What would be trained; ``make``: the trained module and its objective."""

    config: RunConfig
    model: ModelConfig
    parameters: int
    trained: int
    data: TrainingData
    make: Callable[[], tuple[nn.Module, Objective]]

    @property
    def compressor(self) -> bool:
        return self.config.objective.kind == "compress"

    @property
    def precision(self) -> str:
        return objectives.cross_entropy.resolve_precision(self.config.train.precision, self.config.train.device)


def _model(config: RunConfig, corpus: CorpusArgument, folder: Path, tell: Callable[[str], None]) -> _PlannedModel:
    config = setup.initialize.resolve_paths(config)
    start = load_initial(config)
    config = setup.objective_factory.resolve_objective(
        config, config.resolve(vocab=1).kind if start is None else start.model_config.kind
    )
    material = RunData(
        config, resolve_corpus(config.objective.kind, corpus), tell, start=None if start is None else start.opened
    )
    tokenizer = material.make_tokenizer() if start is None else start.tokenizer
    model = material.with_objective_head(config.resolve(tokenizer.vocab_size)) if start is None else start.model_config
    material.open(folder / "data", tokenizer)
    every, trained = (setup.initialize.count_parameters(model),) * 2 if start is None else start.parameters

    def make() -> tuple[nn.Module, Objective]:
        made = setup.initialize.build_new_model(config, model, start)
        apply_acceleration(made, config.train)
        autocast = Autocast(
            objectives.cross_entropy.resolve_precision(config.train.precision, config.train.device), config.train.device
        )
        return made, setup.objective_factory.build_objective(config, made, autocast)

    return _PlannedModel(config, model, every, trained, material.data, make)


def _compressor(config: RunConfig, corpus: CorpusArgument, folder: Path, tell: Callable[[str], None]) -> _PlannedModel:
    check_acceleration(config.train)
    opened, tokenizer = load_teacher(config)
    material = RunData(config, resolve_corpus("compress", corpus), tell)
    material.open(folder / "data", tokenizer)
    wanted, train = config.summarizer, config.train
    compressor = Summarizer(attention_specs(opened.config), wanted.ratio, wanted.hidden_size)
    trained = sum(parameter.numel() for parameter in compressor.parameters())

    def make() -> tuple[nn.Module, Objective]:
        from kvad import checkpoint as checkpoint_lib

        model = checkpoint_lib.loader.load_weights(opened, "float32", train.device)
        autocast = Autocast(objectives.cross_entropy.resolve_precision(train.precision, train.device), train.device)
        return compressor, objectives.summary_distillation.SummaryDistillation(
            model, compressor.to(train.device), wanted, autocast
        )

    return _PlannedModel(
        config, opened.config, setup.initialize.count_parameters(opened.config) + trained, trained, material.data, make
    )


# ---------------------------------------------------------------- the plan


def _planned(subject: _PlannedModel, available: int | None) -> TrainingPlan:
    config, data, train = subject.config, subject.data, subject.config.train
    memory, fits = (None, None) if subject.compressor else _memory(subject, available)
    peak = monitoring.throughput.measure_gemm_peak(train.device, subject.precision)
    gauge = monitoring.throughput.ThroughputMeter(subject.model, peak, frozen=config.lora is not None)
    batches = data.micro_batches(0)
    counted = None if subject.compressor else gauge.count_flops(batches)
    known = data.train_tokens > 0
    per_step = data.tokens_per_step
    if (
        not known and batches[0].model_input.encoder_input is not None
    ):  # what pairs bring is known of those that were read only
        per_step = sum(len(batch.targets) for batch in batches)
    read = (
        data.read_per_step
        if isinstance(data, (objectives.masked_lm.MaskedLMDataset, objectives.span_corruption.SpanCorruptionDataset))
        else per_step
    )
    trial = None
    if fits is None or fits >= train.batch_size:
        trial = _trial(subject, batches[0], gauge)
    seconds = (
        None
        if trial is None
        else train.gradient_accumulation_steps * trial.seconds * train.batch_size / trial.rows + trial.update
    )
    judged = min(train.eval_tokens or data.validation_tokens, data.validation_tokens)
    evaluation = None if trial is None or seconds is None else (seconds - trial.update) / 3 * judged / read
    steps = _steps(config, seconds, evaluation)
    evaluating = None
    if steps is not None and evaluation is not None:
        evaluating = -(-steps // train.eval_interval) * evaluation  # one at the end, too
    return TrainingPlan(
        objective=config.objective.kind,
        kind=subject.model.kind,
        parameters=subject.parameters,
        trained=subject.trained,
        memory=memory,
        available=available,
        fits=fits,
        train_tokens=data.train_tokens if known else None,
        validation_tokens=data.validation_tokens,
        batch=train.batch_size,
        accumulate=train.gradient_accumulation_steps,
        context=config.data.seq_len,
        tokens_per_step=per_step,
        steps=steps,
        minutes=train.minutes,
        epochs=steps * read / data.train_tokens if known and steps is not None else None,
        step_flops=counted,
        gemm_flops=peak,
        trial=trial,
        step_seconds=seconds,
        seconds=None if steps is None or seconds is None or evaluating is None else steps * seconds + evaluating,
        eval_seconds=evaluating,
        checkpoint=_checkpoint(subject),
        num_checkpoints=train.keep_checkpoints + train.keep_best,
        device=train.device,
        precision=subject.precision,
        threads=torch.get_num_threads(),
    )


def _memory(subject: _PlannedModel, available: int | None) -> tuple[dict[str, int], int | None]:
    """(parts, the most rows of a micro-batch that fit, as many as are asked or fewer).  Only the CPU is asked."""
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
    """Where the clock ends it, as many as it leaves time for."""
    train = config.train
    if train.minutes is None or seconds is None or evaluation is None:
        return train.last_step if train.minutes is None else None
    by_clock = max(1, int(60 * train.minutes / (seconds + evaluation / train.eval_interval)))
    return by_clock if train.last_step is None else min(by_clock, train.last_step)


def _checkpoint(subject: _PlannedModel) -> int:
    """Bytes; of adapters and compressors they alone."""
    whole = subject.config.lora is None and not subject.compressor
    return setup.memory_estimate.saved_bytes(
        subject.model, subject.config, subject.parameters, None if whole else subject.trained
    )


# ---------------------------------------------------------------- the trial


def _trial(subject: _PlannedModel, batch: Batch, gauge: monitoring.throughput.ThroughputMeter) -> TrialTiming:
    """Of real rows: one to begin with, then as many as are expected to take ``SECONDS`` together; the fastest of
    several times, if that is soon done."""
    module, objective = subject.make()
    train, model = subject.config.train, subject.model
    optimization = OptimizersContainer(
        module, subject.config.optim, train, None if subject.compressor else model.hidden_size
    )
    module.train()

    def timed(some: Batch) -> tuple[float, float]:
        optimization.begin_step(0, 0.0)
        began = _now(train.device)
        objective.accumulate_gradients(some, optimization.scaled_total(len(some.targets)))
        passed = _now(train.device)
        optimization.step(optimization.clip_grad_norm())
        return passed - began, _now(train.device) - passed

    rows = batch.model_input.sub_batches[0].num_seqs
    timed(first_rows(batch, 1))  # makes what a first step makes
    one, update = timed(first_rows(batch, 1))
    chosen = min(rows, max(1, int(TRIAL_SECONDS / max(one, 1e-9))))
    some = first_rows(batch, chosen)
    best, spent = one, one
    if chosen > 1:
        best, update = timed(some)
        spent += best
    for _ in range(MAX_REPEATS):
        if spent + best > TRIAL_SECONDS / 3:
            break
        seconds, other = timed(some)
        spent, best, update = spent + seconds, min(best, seconds), min(update, other)
    share = None if subject.compressor else gauge.count_flops([some]) / best / gauge.peak
    return TrialTiming(chosen, best, update, share)


def _now(device: str) -> float:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def first_rows(batch: Batch, count: int) -> Batch:
    """The first rows of a micro-batch."""
    step = _first(batch.model_input, count)
    source = None if batch.model_input.encoder_input is None else _first(batch.model_input.encoder_input, count)
    mixed = (
        None if batch.sampled_indices is None else batch.sampled_indices[batch.sampled_indices < len(step.token_ids)]
    )
    return Batch(step._replace(encoder_input=source), batch.targets[: len(step.logit_indices)], mixed)


def _first(step: ModelInput, count: int) -> ModelInput:
    (lane,) = step.sub_batches
    size = count * lane.num_new_tokens

    def cut(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[:size]

    return step._replace(
        token_ids=step.token_ids[:size],
        positions=step.positions[:size],
        sub_batches=(SubBatch(count, lane.num_new_tokens, lane.num_read_slots),),
        logit_indices=step.logit_indices[step.logit_indices < size],
        document_ids=cut(step.document_ids),
        max_seq_lens=cut(step.max_seq_lens),
        causal_order=cut(step.causal_order),
    )
