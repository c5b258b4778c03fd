"""Training runs: from text files or pairs to a trained model or summarizer, and resuming.

    from kvad.train.config import RunConfig, TrainConfig
    from kvad.train.loop import train_model
    result = train_model(RunConfig(train=TrainConfig(minutes=2)), [Path("corpus")], Path("runs/x"), callbacks=[...])

An encoder-decoder (``RunConfig(model={"preset": "transformer-tiny"})``) is trained on pairs: the paths are TSV files,
or the corpus is a ``kvad.train.sources.pairs.PairPaths``. Other objectives: ``setup/objective_factory.py``.

A run folder holds ``checkpoints/step-N/`` (each a complete checkpoint), ``data/`` (the tokens), ``metrics.jsonl`` and
``run.toml`` (its configuration). ``LLM.load("runs/x")`` works at any snapshot after the first save. Runs that cannot
work are refused before anything is written, and folders made for them are removed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from kvad import checkpoint, storage
from kvad import config as cfg
from kvad.checkpoint import CheckpointHandle
from kvad.config import canonical_config
from kvad.errors import CheckpointError, ConfigError, MemoryPlanError, UsageError
from kvad.model import Transformer
from kvad.train import config as config_lib
from kvad.train import monitoring, objectives, optim, setup
from kvad.train.config import RunConfig
from kvad.train.loop.async_checkpointer import AsyncCheckpointer, checkpoint_status
from kvad.train.loop.data_parallel import SINGLE_PROCESS, DataParallelGroup
from kvad.train.loop.trainer import Trainer, TrainerState, apply_acceleration
from kvad.train.monitoring import Callback, TrainingContext, TrainingResult
from kvad.train.objectives import Autocast, ExpertBalancer, Objective
from kvad.train.optim import OptimizersContainer
from kvad.train.setup import CorpusArgument, RunData, load_initial, resolve_corpus

METRICS = "metrics.jsonl"


class RunOptions(TypedDict, total=False):
    """Options for the execution of a run, the same for a new and a resumed one."""

    available: int | None  # bytes that may be used, None if unknown
    callbacks: Sequence[Callback]
    clock: Callable[[], float]  # returns seconds
    measure_peak: bool  # time a large matrix product, for the MFU
    data_parallel: DataParallelGroup  # the processes that call this together; only rank 0 reports and saves


def train_model(
    config: RunConfig, corpus: CorpusArgument, out: Path, *, overwrite: bool = False, **options: Unpack[RunOptions]
) -> TrainingResult:
    """Train a new model, continue from a checkpoint (``config.init``), or train a summarizer, in the folder ``out``.

    ``overwrite``: replace a run in ``out`` at the first save. Raises KvadError before anything is written; SaveError if
    a checkpoint cannot be written.
    """
    return TrainingRun(config, corpus, out, **options).train(overwrite)


def resume_model(
    out: Path, *, config: RunConfig | None = None, corpus: CorpusArgument = (), **options: Unpack[RunOptions]
) -> TrainingResult:
    """Continue from the newest checkpoint of the run in ``out``, bit for bit if steps limit it (``trainer.py``).

    A given ``config`` may differ from the run's in ``RESUMABLE_KEYS`` (length, device, how often it logs, evaluates and
    saves); every change is logged. With another length, the learning rate is that of a run which had it from the start.
    A given ``corpus`` must be equal to the run's. The result's ``reason`` is "unchanged" if the run had all its steps.

    Raises:
        ConfigError: Names what differs.
        UsageError: If a process is training in ``out``.
        CheckpointError: If there is no run, or a model that it needs has changed.
    """
    stored, paths = read_run_config(out)
    return TrainingRun(config or stored, corpus or paths, out, **options).resume(stored)


def read_run_config(out: Path) -> tuple[RunConfig, CorpusArgument]:
    """Return configuration and corpus of a run that can resume; CheckpointError if there is none."""
    setup.preflight.check_has_checkpoint(out)
    newest = (checkpoint.folder.list_steps(out) or [out])[-1]
    is_summarizer = (newest / checkpoint.folder.SUMMARIZER_FILE).is_file()
    path = checkpoint.summarizer.open_summarizer(out).path if is_summarizer else checkpoint.folder.locate(out)
    training = path / checkpoint.folder.TRAINING
    if not training.is_dir():
        raise CheckpointError(
            f"{path} holds a {'summarizer' if is_summarizer else 'model'} but no training state",
            "Only a run of kvad train can resume.",
        )
    setup.preflight.check_is_run(out)
    state = checkpoint.folder.read_json(training / "state.json")
    try:
        return RunConfig.from_dict(state["run"]), setup.corpora.corpus_from_json(state["corpus"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{training / 'state.json'}: key {error} is missing") from error


@dataclass
class TrainingRun:
    """A run and the parts that its stages build.

    Stages of a new run: ``open_initial``, the check of memory, ``run_data.open``, ``build``, ``fit``. The
    dry run (``dry_run.py``) has the same ones, but measures a trial instead of ``fit``.
    """

    config: RunConfig
    corpus: CorpusArgument
    out: Path
    available: int | None = None
    callbacks: Sequence[Callback] = ()
    clock: Callable[[], float] = time.monotonic
    measure_peak: bool = False
    data_parallel: DataParallelGroup = SINGLE_PROCESS
    # Built by the stages:
    initial: setup.initialize.InitialModule = field(init=False)
    run_data: RunData = field(init=False)
    module: nn.Module = field(init=False)
    objective: Objective = field(init=False)
    optimization: OptimizersContainer = field(init=False)
    writer: setup.checkpoint_writers.CheckpointWriter = field(init=False)
    replaces_run: bool = False  # the first save replaces another run

    def __post_init__(self) -> None:
        if self.config.init is not None and (folder := Path(self.config.init).expanduser()).is_dir():
            self.config = replace(self.config, model={"init": str(folder.resolve())})

    @property
    def is_summarizer(self) -> bool:
        return self.config.objective.kind == "summarizer"

    @property
    def precision(self) -> str:
        return objectives.cross_entropy.resolve_precision(self.config.train.precision, self.config.train.device)

    @property
    def memory(self) -> setup.memory_estimate.MemoryEstimate | None:
        """Estimated memory; None for a summarizer, whose memory is not estimated."""
        return self.initial.memory_estimate(self.config, half=self.precision == "bf16")

    def train(self, overwrite: bool) -> TrainingResult:
        """Train from the first step, as ``train_model``."""
        with self._lock():
            return self._train(overwrite)

    def _lock(self) -> AbstractContextManager[None]:
        """Return the lock of the run folder, which rank 0 holds."""
        return setup.preflight.lock_run(self.out) if self.data_parallel.is_main else nullcontext()

    def _train(self, overwrite: bool) -> TrainingResult:
        out, group = self.out, self.data_parallel
        self.replaces_run = setup.preflight.check_run_folder(self.config, self.corpus, out, overwrite)
        self._check_options()
        self.open_initial()
        self._check_memory()
        tokenizer = self.initial.tokenizer
        group.check_data_equal(lambda: self.run_data.tokens_fingerprint(tokenizer))
        with group.main_first():
            self.run_data.open(out / setup.preflight.TOKENS_FOLDER, tokenizer)
        self.build()
        for line in self.initial.summary():
            self.log(line)
        return self.fit(TrainerState(), None)

    def resume(self, stored: RunConfig) -> TrainingResult:
        """Continue the run in ``out``, whose configuration is ``stored``, as ``resume_model``."""
        with self._lock():
            return self._resume(stored)

    def _resume(self, stored: RunConfig) -> TrainingResult:
        newest, group = checkpoint.folder.list_steps(self.out)[-1], self.data_parallel
        checkpoint.folder.check_all(newest)  # every byte, because the run continues bit for bit
        state = checkpoint.handle.read_training_state(newest)
        assert state is not None, "read_run_config checked it"
        self._check_options()
        group.check_world_size(state.state.get("world_size", 1))
        trainer_state = TrainerState(**state.state["trainer_state"])
        self._open_stored(stored, state.state.get("initial_model"))
        self._log_changes(stored, trainer_state)
        self._check_memory()
        with group.main_first():
            self._reopen_data(state)
        self.build()
        return self.fit(trainer_state, state)

    def _check_options(self) -> None:
        config, group = self.config, self.data_parallel
        setup.preflight.check_device(config.train)
        group.check_divisible(config.train)
        setup.preflight.check_callbacks(config.callbacks, self.callbacks)
        if self.is_summarizer and group.size > 1:
            raise UsageError("a summarizer is trained by one process", "Run it without torchrun.")
        self.callbacks = self.callbacks if group.is_main else ()

    def open_initial(self) -> None:
        """Open the initial model and the texts of a new run; make its tokenizer and its model's config."""
        initial: setup.initialize.InitialModule | None = (
            setup.initialize.load_initial_summarizer if self.is_summarizer else load_initial
        )(self.config)
        # Fail before a tokenizer is trained for an invalid model.
        kind = self.config.resolve(vocab=1).kind if initial is None else initial.model_config.kind
        self.config = setup.objective_factory.resolve_objective(self.config, kind)
        self._open_texts(None if initial is None else initial.pretrained)
        initial = setup.initialize.new_initial(self.config, self.run_data) if initial is None else initial
        self.initial = initial.with_head_for(self.config.objective.kind, self.run_data.labels)

    def _open_stored(self, stored: RunConfig, record: dict[str, str] | None) -> None:
        """Open the module of a resumed run and its texts; refuse another configuration."""
        if self.is_summarizer or stored.lora is not None:  # before the frozen model is opened
            _check_resumable(stored.to_dict(), self.config.to_dict())
        if self.is_summarizer:
            stored_summarizer = checkpoint.summarizer.open_summarizer(self.out)
            self.initial = replace(setup.initialize.load_initial_summarizer(self.config), stored=stored_summarizer)
        else:
            self.initial = setup.initialize.resume_initial(self.config, self.out, record)
        self.config = setup.objective_factory.resolve_objective(self.config, self.initial.model_config.kind)
        if not self.is_summarizer and stored.lora is None:
            _check_same(stored, self.config, self.initial)
        self._open_texts(self.initial.pretrained, template=checkpoint.folder.locate(self.out))

    def _log_changes(self, stored: RunConfig, state: TrainerState) -> None:
        """Log changed keys and their effect; raise ConfigError if the run would end before its newest checkpoint."""
        before, after = stored.train, self.config.train
        if after.last_step is not None and after.last_step < state.step:
            raise ConfigError(
                f"train.steps: must be at least {state.step}, the steps of the run so far, got {after.last_step}",
                "Give more steps, or start a new run.",
            )
        for change in config_lib.run.resumable_changes(stored.to_dict(), self.config.to_dict()):
            self.log(f"changed: {change}")
        if (before.last_step, before.minutes) == (after.last_step, after.minutes):
            return
        schedules = [optim.schedules.Schedule(self.config.optim, train, self.width) for train in (before, after)]
        self.log(optim.schedules.describe_change(schedules[0], schedules[1], state.step, state.elapsed))
        objective = self.config.objective
        if objective.scheduled_sampling and objective.scheduled_sampling_steps is None:
            self.log("scheduled sampling: rises over the new length")

    @property
    def width(self) -> int | None:
        """Hidden size of the trained model; None for a summarizer."""
        return None if self.is_summarizer else self.initial.model_config.hidden_size

    def _open_texts(self, pretrained: CheckpointHandle | None, template: Path | None = None) -> None:
        self.corpus = resolve_corpus(self.config.objective.kind, self.corpus)
        self.run_data = RunData(self.config, self.corpus, self.log, start=pretrained, template=template)

    def _check_memory(self) -> None:
        memory = self.memory
        if memory is not None and torch.device(self.config.train.device).type == "cpu":  # others raise their own error
            memory.require(self.available)

    def _reopen_data(self, state: checkpoint.handle.TrainingState) -> None:
        """Open the data of a resumed run; raise ConfigError if its corpus has changed."""
        run_data, tokenizer, folder = self.run_data, self.initial.tokenizer, self.out / setup.preflight.TOKENS_FOLDER
        if run_data.tokens_fingerprint(tokenizer) != state.state["data_fingerprint"]:
            changed = ", ".join(run_data.changed_sources(folder)[:3])
            raise ConfigError(f"cannot resume {self.out}: its corpus has changed{': ' + changed if changed else ''}")
        run_data.open(folder, tokenizer)
        run_data.seek(state.state.get("stream_position"))
        if state.state.get("threads") != torch.get_num_threads():
            self.log(f"threads: {torch.get_num_threads()}, {state.state.get('threads')} before; last bits may differ")

    def build(self) -> None:
        """Build the module on its device, its objective and its optimizers."""
        config, train = self.config, self.config.train
        torch.manual_seed(train.seed)
        self.module = self.initial.build().to(train.device)
        if isinstance(self.module, Transformer):
            apply_acceleration(self.module, train)
        self.objective = self.initial.build_objective(config, self.module, Autocast(self.precision, train.device))
        self.optimization = OptimizersContainer(self.module, config.optim, train, self.width)

    def fit(self, state: TrainerState, stored: checkpoint.handle.TrainingState | None) -> TrainingResult:
        """Train from ``state``; ``stored`` is the training state of a resumed run."""
        train, group = self.config.train, self.data_parallel
        self.writer = self.initial.checkpoint_writer(self.run_data, self.log)
        if stored is not None:
            self.optimization.load_state_tensors(stored.tensors)
        if stored is not None and isinstance(self.module, Transformer):
            group.restore_random(stored.tensors, train.device)
        elif not group.is_main:
            torch.manual_seed(train.seed + group.rank)  # each rank draws its own dropout
        metrics = monitoring.metrics.MetricsFile(self.out / METRICS, train.log_interval)
        sampler = throughput = None
        if group.is_main:
            self.callbacks = [metrics, *self.callbacks]
            if train.tensorboard:
                self.callbacks.insert(1, monitoring.metrics.TensorBoardCallback(self.out, train.log_interval))
            if isinstance(self.module, Transformer):
                tokenizer, data = self.initial.tokenizer, self.run_data.data
                generation = self.run_data.generation(tokenizer)
                # Callbacks may refuse the model, so before the run file is written.
                self._notify("on_model", TrainingContext(self.module, tokenizer, generation, data, self._notify))
                sampler = self.run_data.sampler(self.module, tokenizer)
                throughput = self._throughput(self.module) if self.measure_peak else None
            run_file = config_lib.toml.format_run_file(self.config, setup.corpora.corpus_to_json(self.corpus))
            storage.atomic.write_bytes(self.out / config_lib.toml.RUN_FILE, run_file.encode())
        is_async, snapshot = train.async_save and group.is_main, partial(self._snapshot, state)
        checkpointer = AsyncCheckpointer(snapshot, self._write, async_save=is_async, has_checkpoint=stored is not None)
        parts = (self.module, self.objective, self.optimization, self.run_data.data, train, state, checkpointer)
        experts: ExpertBalancer | None = getattr(self.objective, "experts", None)
        parallel = (self.run_data.describe_rows, group, experts)
        trainer = Trainer(*parts, sampler, self.callbacks, self.clock, throughput, *parallel)

        def out_of_memory() -> MemoryPlanError:
            where, status = f"in step {state.step + 1}", checkpoint_status(checkpointer.has_checkpoint)
            if (memory := self.memory) is not None:
                return memory.out_of_memory(where, status)
            return MemoryPlanError(f"out of memory {where}", f"{status}. Lower train.batch_size or data.seq_len.")

        if stored is not None:
            trainer.checkpoint = checkpoint.folder.list_steps(self.out)[-1]
        with metrics, setup.memory_estimate.translate_oom(out_of_memory):
            return trainer.fit()

    def log(self, text: str) -> None:
        """Pass a line about a stage to all callbacks."""
        self._notify("on_stage", text)

    def _notify(self, method: str, report: object) -> None:
        for callback in self.callbacks:
            getattr(callback, method)(report)

    def _throughput(self, model: Transformer) -> monitoring.throughput.ThroughputMeter:
        peak = monitoring.throughput.measure_gemm_peak(self.config.train.device, self.precision)
        return monitoring.throughput.ThroughputMeter(model.config, peak, self.config.lora is not None)

    def _snapshot(self, state: TrainerState) -> checkpoint.handle.CheckpointSnapshot:
        group, train = self.data_parallel, self.config.train
        tensors = self.optimization.state_tensors()
        if isinstance(self.module, Transformer):
            tensors = {**tensors, **group.random_state(train.device)}
        content = {
            "run": self.config.to_dict(),
            "corpus": setup.corpora.corpus_to_json(self.corpus),
            "data_fingerprint": self.run_data.fingerprint,
            "stream_position": self.run_data.stream_position(),
            "trainer_state": dataclasses.asdict(state),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        if group.size > 1:
            content["world_size"] = group.size
        if self.initial.record is not None:
            content["initial_model"] = self.initial.record
        with self.optimization.averaged_weights():
            weights = self.writer.weights(self.module)  # copies, so they stay averaged after the block
        best = state.best_step if train.keep_best else None
        return checkpoint.handle.CheckpointSnapshot(
            state.step, weights, checkpoint.handle.TrainingState(tensors, content), best
        )

    def _write(self, snapshot: checkpoint.handle.CheckpointSnapshot) -> Path:
        """Write a checkpoint, which is rank 0's task, and return its folder."""
        if not self.data_parallel.is_main:
            return checkpoint.folder.step_folder(self.out, snapshot.step)
        path = self.writer.save(self.out, snapshot, keep=self.config.train.keep_checkpoints, fresh=self.replaces_run)
        self.replaces_run = False
        return path


def _check_same(stored: RunConfig, wanted: RunConfig, initial: setup.initialize.InitialModule) -> None:
    """Raise ConfigError if ``wanted`` is not the configuration of a resumed model's run."""
    there, here = stored.to_dict(), wanted.to_dict()
    if stored.init is None and wanted.init is None:
        head = initial.model_config.head
        labels = head.labels if isinstance(head, cfg.ClassificationHeadConfig) else ()
        resolved = wanted.resolve(initial.tokenizer.vocab_size)
        model = setup.objective_factory.with_head(resolved, wanted.objective.kind, labels)
        # Two spellings of one model are equal.
        same = canonical_config(model) == canonical_config(initial.model_config)
        there["model"] = {} if same else initial.model_config.to_dict()
        here["model"] = {} if same else model.to_dict()
        if (path := wanted.tokenizer.path) is not None:
            if setup.corpora.load_tokenizer_from(path).fingerprint() != initial.tokenizer.fingerprint():
                raise ConfigError(f"tokenizer.path: must be the tokenizer of this run, got {path}")
            there["tokenizer"] = here["tokenizer"]
    _check_resumable(there, here)


def _check_resumable(stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise ConfigError naming the differences with which a run cannot resume."""
    differences = config_lib.run.config_differences(stored, wanted)
    differences += optim.schedules.schedule_differences(stored, wanted)
    if differences:
        raise ConfigError(
            f"cannot resume with another configuration: {'; '.join(differences)}", "Start a new run for that."
        )
