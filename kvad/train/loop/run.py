"""Training runs: from text files or pairs to a trained model or summarizer, and resuming.

    from kvad.train.config import RunConfig, TrainConfig
    from kvad.train.loop import train_model
    result = train_model(RunConfig(train=TrainConfig(minutes=2)), [Path("corpus")], Path("runs/x"), callbacks=[...])

An encoder-decoder (``RunConfig(model={"preset": "transformer-tiny"})``) is trained on pairs: the paths are TSV files,
or the corpus is a :class:`~kvad.train.sources.pairs.PairPaths`. Other objectives: ``setup/objective_factory.py``.

A run folder holds ``checkpoints/step-N/`` (each a complete checkpoint), ``data/`` (the tokens), ``metrics.jsonl`` and
``run.toml`` (its configuration). ``LLM.load("runs/x")`` works at any snapshot after the first save. Runs that cannot
work are refused before anything is written, and folders made for them are removed.

A summarizer is trained for a trained model (``[summarizer]`` of the run file). Its checkpoints hold only the summarizer
(``checkpoint/summarizer.py``); its tokens come from the model's own tokenizer.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvad import checkpoint, storage
from kvad import checkpoint as checkpoint_lib
from kvad.checkpoint import CheckpointHandle, GenerationConfig, open_checkpoint
from kvad.config import ClassificationHeadConfig, ModelConfig, attention_specs, canonical_config
from kvad.errors import CheckpointError, ConfigError, MemoryPlanError, UsageError
from kvad.model import Summarizer, Transformer
from kvad.text import Tokenizer
from kvad.train import config as config_lib
from kvad.train import monitoring, objectives, optim, setup
from kvad.train.config import RunConfig, TokenizerConfig, TrainConfig
from kvad.train.loop.acceleration import apply_acceleration, check_acceleration
from kvad.train.loop.checkpointer import AsyncCheckpointer, checkpoint_status
from kvad.train.loop.data_parallel import SINGLE_PROCESS, DataParallelGroup
from kvad.train.loop.trainer import Trainer, TrainerState
from kvad.train.monitoring import Callback, TrainingContext, TrainingResult
from kvad.train.objectives import Autocast
from kvad.train.optim import OptimizersContainer
from kvad.train.setup import CorpusArgument, RunData, load_initial, resolve_corpus

METRICS = "metrics.jsonl"
Clock = Callable[[], float]


def train_model(
    config: RunConfig,
    corpus: CorpusArgument,
    out: Path,
    *,
    overwrite: bool = False,
    available: int | None = None,
    callbacks: Sequence[Callback] = (),
    clock: Clock = time.monotonic,
    measure_peak: bool = False,
    data_parallel: DataParallelGroup = SINGLE_PROCESS,
) -> TrainingResult:
    """Train a new model, or continue from a checkpoint (``config.init``).

    Args:
        config, corpus, out, overwrite: Configuration, texts or pairs, folder; replace a run there at the first save.
        available, callbacks: Bytes that may be used, None if unknown; receivers of reports.
        measure_peak: Time a large matrix product, for the MFU.
        data_parallel: The processes that call this together; only rank 0 reports and saves.

    Raises:
        KvadError: Before anything is written; SaveError if a checkpoint cannot be written.
    """
    replaces_run = setup.preflight.check_run_folder(config, corpus, out, overwrite)
    if data_parallel.is_main:
        setup.preflight.check_writable(out)
    setup.preflight.check_device(config.train)
    data_parallel.check_divisible(config.train)
    setup.preflight.check_callbacks(config.callbacks, callbacks)
    callbacks = callbacks if data_parallel.is_main else ()
    config = setup.initialize.resolve_paths(config)
    start = load_initial(config)
    # Fail before a tokenizer is trained for an invalid model.
    kind = config.resolve(vocab=1).kind if start is None else start.model_config.kind
    log = notify_all(callbacks)
    config = setup.objective_factory.resolve_objective(config, kind)
    resolved_corpus = resolve_corpus(config.objective.kind, corpus)
    run_data = RunData(config, resolved_corpus, log, start=None if start is None else start.opened)
    if start is not None:
        start = start.with_head_for(config.objective.kind, run_data.labels)
    tokenizer = run_data.make_tokenizer() if start is None else start.tokenizer
    model_config = (
        run_data.with_objective_head(config.resolve(tokenizer.vocab_size)) if start is None else start.model_config
    )
    _check_memory(config, model_config, available, start)
    writer = None if start is None else start.checkpoint_writer()
    data_parallel.check_data_equal(lambda: run_data.tokens_fingerprint(tokenizer))
    with setup.preflight.cleanup_on_error(out), data_parallel.main_first():
        run_data.open(out / setup.preflight.TOKENS_FOLDER, tokenizer)
    model = setup.initialize.build_new_model(config, model_config, start)
    for line in () if start is None else start.summary():
        log(line)
    if writer is None:
        writer = _build_writer(model_config, run_data, tokenizer, log)
    elif run_data.is_chat:
        writer = writer.with_chat_template(run_data.extra_files(tokenizer), run_data.generation(tokenizer))
    run = _ModelRun(config, resolved_corpus, out, model, tokenizer, run_data, writer, data_parallel, fresh=replaces_run)
    run.initial_record = None if start is None else start.state_record()
    run.measure_peak = measure_peak
    return run.fit(TrainerState(), None, callbacks, clock)


def resume_model(
    out: Path,
    *,
    config: RunConfig | None = None,
    corpus: CorpusArgument = (),
    available: int | None = None,
    callbacks: Sequence[Callback] = (),
    clock: Clock = time.monotonic,
    measure_peak: bool = False,
    data_parallel: DataParallelGroup = SINGLE_PROCESS,
) -> TrainingResult:
    """Continue from a run's newest checkpoint, bit for bit if steps limit it (``trainer.py``).

    Args:
        out: The run folder.
        config: None for the run's own; else equal but for how often it logs, evaluates and saves.
        corpus: () for the run's own; else equal to it.
        available: As for ``train_model``.
        callbacks: As for ``train_model``.
        clock: As for ``train_model``.
        measure_peak: As for ``train_model``.
        data_parallel: As for ``train_model``.

    Raises:
        ConfigError: Names what differs.
        CheckpointError: If there is no run.
        MemoryPlanError: As ``train_model``.
    """
    stored, paths = read_model_run(out)
    config, corpus = setup.initialize.resolve_paths(config or stored), corpus or paths
    state = checkpoint_lib.handle.read_training_state(checkpoint_lib.folder.locate(out))
    assert state is not None, "read_model_run checked it"
    data_parallel.check_divisible(config.train)
    setup.preflight.check_callbacks(config.callbacks, callbacks)
    data_parallel.check_world_size(state.state.get("world_size", 1))
    callbacks = callbacks if data_parallel.is_main else ()
    initial_record, start = state.state.get("initial_model"), None
    if stored.lora is not None:
        check_resumable(stored.to_dict(), config.to_dict())
        start = setup.initialize.resume_initial(config, out, initial_record or {})
    checkpoint = checkpoint_lib.native.open_folder(out) if start is None else start.opened
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None, "every run writes its tokenizer"
    config = setup.objective_factory.resolve_objective(config, checkpoint.config.kind)
    if start is None:
        _check_same(stored, config, checkpoint, tokenizer)
    setup.preflight.check_device(config.train)
    _check_memory(config, checkpoint.config, available, start)
    log = notify_all(callbacks)
    resolved_corpus = resolve_corpus(config.objective.kind, corpus)
    run_data = RunData(
        config,
        resolved_corpus,
        log,
        start=None if initial_record is None else checkpoint,
        template=checkpoint_lib.folder.locate(out),
    )
    with data_parallel.main_first():
        reopen_data(run_data, out, tokenizer, state, log)
    torch.manual_seed(config.train.seed)
    if start is None:
        model = Transformer(checkpoint.config)
        model.load_state_dict(
            dict(checkpoint.weights())
        )  # copied, because training must never write into a mapped file
    else:
        model = setup.initialize.load_adapted(start, out)
    model.to(config.train.device)
    if initial_record is None:
        writer: setup.initialize.FullCheckpointWriter | setup.initialize.AdapterCheckpointWriter = _build_writer(
            checkpoint.config, run_data, tokenizer, log
        )
    else:
        writer = setup.initialize.writer_like(checkpoint) if start is None else start.checkpoint_writer()
    if run_data.is_chat:
        writer = writer.with_chat_template(run_data.extra_files(tokenizer), run_data.generation(tokenizer))
    run = _ModelRun(config, resolved_corpus, out, model, tokenizer, run_data, writer, data_parallel)
    run.initial_record, run.measure_peak = initial_record, measure_peak
    return run.fit(TrainerState(**state.state["trainer_state"]), state, callbacks, clock)


def read_model_run(out: Path) -> tuple[RunConfig, CorpusArgument]:
    """Return configuration and corpus of a run that can resume.

    Raises:
        CheckpointError: If there is none.
    """
    setup.preflight.check_has_checkpoint(out)
    path = checkpoint_lib.folder.locate(out)
    if not (path / checkpoint_lib.folder.TRAINING).is_dir():
        raise CheckpointError(f"{path} holds a model but no training state", "Only a run of kvad train can resume.")
    setup.preflight.check_is_run(out)
    state = checkpoint_lib.folder.read_json(path / checkpoint_lib.folder.TRAINING / "state.json")
    try:
        return RunConfig.from_dict(state["run"]), setup.run_data.corpus_from_json(state["corpus"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path / checkpoint_lib.folder.TRAINING / 'state.json'}: key {error} is missing"
        ) from error


class _ModelRun:
    """Parts of a model's run and their conversion into checkpoints."""

    def __init__(
        self,
        config: RunConfig,
        corpus: CorpusArgument,
        out: Path,
        model: Transformer,
        tokenizer: Tokenizer,
        run_data: RunData,
        writer: setup.initialize.FullCheckpointWriter | setup.initialize.AdapterCheckpointWriter,
        data_parallel: DataParallelGroup,
        *,
        fresh: bool = False,
    ) -> None:
        self.config, self.out, self.model, self.tokenizer, self.run_data = config, out, model, tokenizer, run_data
        self.corpus = setup.run_data.corpus_to_json(corpus)
        apply_acceleration(model, config.train)
        self.optimization = OptimizersContainer(model, config.optim, config.train, model.config.hidden_size)
        self.writer, self.fresh, self.data_parallel = writer, fresh, data_parallel
        self.initial_record: dict[str, str] | None = None  # the initial model, as stored in checkpoints
        self.measure_peak = False

    def fit(
        self,
        state: TrainerState,
        stored: checkpoint_lib.handle.TrainingState | None,
        callbacks: Sequence[Callback],
        clock: Clock,
    ) -> TrainingResult:
        train, is_main = self.config.train, self.data_parallel.is_main
        if stored is not None:
            self.optimization.load_state_tensors(stored.tensors)
            self.data_parallel.restore_random(stored.tensors, train.device)
        elif not is_main:
            torch.manual_seed(train.seed + self.data_parallel.rank)  # each rank draws its own dropout
        metrics = monitoring.metrics.MetricsFile(self.out / METRICS, train.log_interval)
        all_callbacks: list[Callback] = [metrics, *event_callbacks(self.out, train), *callbacks] if is_main else []
        self._introduce(all_callbacks)
        if is_main:
            storage.atomic.write_bytes(
                self.out / config_lib.toml.RUN_FILE, config_lib.toml.format_run_file(self.config, self.corpus).encode()
            )
        sample = self.run_data.sampler(self.model, self.tokenizer) if is_main else None
        precision = objectives.cross_entropy.resolve_precision(train.precision, train.device)
        objective = setup.objective_factory.build_objective(self.config, self.model, Autocast(precision, train.device))
        frozen = self.config.lora is not None
        throughput = (
            monitoring.throughput.ThroughputMeter(
                self.model.config, monitoring.throughput.measure_gemm_peak(train.device, precision), frozen
            )
            if self.measure_peak and is_main
            else None
        )
        write = (
            self._write if is_main else lambda snapshot: checkpoint_lib.folder.step_folder(self.out, snapshot.step)
        )  # rank 0 writes the checkpoint
        in_background = train.async_save and is_main
        checkpointer = AsyncCheckpointer(
            lambda: self._snapshot(state), write, async_save=in_background, has_checkpoint=stored is not None
        )
        trainer = Trainer(
            self.model,
            objective,
            self.optimization,
            self.run_data.data,
            train,
            state,
            checkpointer,
            sample,
            all_callbacks,
            clock,
            throughput=throughput,
            describe_rows=self.run_data.describe_rows,
            data_parallel=self.data_parallel,
        )
        with (
            metrics,
            setup.memory_estimate.translate_oom(
                lambda: self._out_of_memory(state.step + 1, checkpointer.has_checkpoint, half=precision == "bf16")
            ),
        ):
            return trainer.fit()

    def _out_of_memory(self, step: int, has_checkpoint: bool, *, half: bool) -> MemoryPlanError:
        trained = [parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad]
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        num_trained = None if self.config.lora is None else sum(trained)
        return setup.memory_estimate.out_of_memory_error(
            self.model.config,
            self.config,
            num_parameters,
            f"in step {step}",
            checkpoint_status(has_checkpoint),
            half=half,
            learned=num_trained,
        )

    def _introduce(self, all_callbacks: Sequence[Callback]) -> None:
        def log(method: str, report: object) -> None:
            for callback in all_callbacks:
                getattr(callback, method)(report)

        generation_config = self.run_data.generation(self.tokenizer)
        for callback in all_callbacks:
            callback.on_model(TrainingContext(self.model, self.tokenizer, generation_config, self.run_data.data, log))

    def _snapshot(self, state: TrainerState) -> checkpoint_lib.handle.CheckpointSnapshot:
        tensors = {**self.optimization.state_tensors(), **self.data_parallel.random_state(self.config.train.device)}
        content = checkpoint_metadata(self.config, self.corpus, self.run_data, state)
        if self.data_parallel.size > 1:
            content["world_size"] = self.data_parallel.size
        if self.initial_record is not None:
            content["initial_model"] = self.initial_record
        with self.optimization.averaged_weights():
            weights = self.writer.weights(self.model)  # copies, so they stay averaged after the block
        best = state.best_step if self.config.train.keep_best else None
        return checkpoint_lib.handle.CheckpointSnapshot(
            state.step, weights, checkpoint_lib.handle.TrainingState(tensors, content), best
        )

    def _write(self, snapshot: checkpoint_lib.handle.CheckpointSnapshot) -> Path:
        path = self.writer.save(self.out, snapshot, keep=self.config.train.keep_checkpoints, fresh=self.fresh)
        self.fresh = False
        return path


def _build_writer(
    config: ModelConfig, run_data: RunData, tokenizer: Tokenizer, log: Callable[[str], None]
) -> setup.initialize.FullCheckpointWriter:
    """Build the checkpoint writer of a model created by this run."""
    generation_config = run_data.generation(tokenizer)
    return setup.initialize.FullCheckpointWriter(
        config, _layout(config, generation_config, log), generation_config, tokenizer, run_data.extra_files(tokenizer)
    )


def _layout(
    config: ModelConfig, generation: GenerationConfig, log: Callable[[str], None]
) -> checkpoint_lib.hf_layout.HFLayout | None:
    """Return a Hugging Face layout if one can hold the model, else None for kvad's."""
    try:
        layout = checkpoint_lib.hf_layout.choose_layout(config, generation)
    except CheckpointError as error:
        log(f"checkpoints: kvad's layout, because {error.message}{f' ({error.hint})' if error.hint else ''}")
        return None
    log(f"checkpoints: Hugging Face's layout, read by transformers as {layout.hf_class}")
    return layout


def _check_same(stored: RunConfig, wanted: RunConfig, checkpoint: CheckpointHandle, tokenizer: Tokenizer) -> None:
    there, here = stored.to_dict(), wanted.to_dict()
    if stored.init is not None or wanted.init is not None:
        check_resumable(there, here)
        return
    head = checkpoint.config.head
    labels = head.labels if isinstance(head, ClassificationHeadConfig) else ()
    model = setup.objective_factory.with_head(wanted.resolve(tokenizer.vocab_size), wanted.objective.kind, labels)
    same = canonical_config(model) == canonical_config(checkpoint.config)  # two spellings of one model are equal
    there["model"] = {} if same else checkpoint.config.to_dict()
    here["model"] = {} if same else model.to_dict()
    if wanted.tokenizer.path is not None:
        given = setup.initialize.load_tokenizer_from(wanted.tokenizer.path)
        if given.fingerprint() != tokenizer.fingerprint():
            raise ConfigError(f"tokenizer.path: must be the tokenizer of this run, got {wanted.tokenizer.path}")
        there["tokenizer"] = here["tokenizer"]
    check_resumable(there, here)


def check_resumable(stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise ConfigError naming the differences with which a run cannot resume."""
    differences = config_lib.run.config_differences(stored, wanted) + optim.schedules.schedule_differences(
        stored, wanted
    )
    if differences:
        raise ConfigError(
            f"cannot resume with another configuration: {'; '.join(differences)}", "Start a new run for that."
        )


def reopen_data(
    run_data: RunData,
    out: Path,
    tokenizer: Tokenizer,
    state: checkpoint_lib.handle.TrainingState,
    log: Callable[[str], None],
) -> None:
    """Open the data of a resumed run; raise ConfigError if its corpus has changed."""
    if run_data.tokens_fingerprint(tokenizer) != state.state["data_fingerprint"]:
        changed = ", ".join(run_data.changed_sources(out / setup.preflight.TOKENS_FOLDER)[:3])
        raise ConfigError(f"cannot resume {out}: its corpus has changed{': ' + changed if changed else ''}")
    run_data.open(out / setup.preflight.TOKENS_FOLDER, tokenizer)
    run_data.seek(state.state.get("stream_position"))
    if state.state.get("threads") != torch.get_num_threads():
        log(f"threads: {torch.get_num_threads()}, {state.state.get('threads')} before; last bits may differ")


def checkpoint_metadata(config: RunConfig, corpus: Any, run_data: RunData, state: TrainerState) -> dict[str, Any]:
    """Return the contents of ``training/state.json``."""
    return {
        "run": config.to_dict(),
        "corpus": corpus,
        "data_fingerprint": run_data.fingerprint,
        "stream_position": run_data.stream_position(),
        "trainer_state": dataclasses.asdict(state),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _check_memory(
    config: RunConfig, model: ModelConfig, available: int | None, start: setup.initialize.InitialModel | None
) -> None:
    device, precision = config.train.device, config.train.precision
    num_trained: int | None = None
    parameters = setup.initialize.count_parameters(model)
    if start is not None and config.lora is not None:
        parameters, num_trained = start.parameters
    if torch.device(device).type == "cpu":  # other devices raise their own error
        half = objectives.cross_entropy.resolve_precision(precision, device) == "bf16"
        setup.memory_estimate.require_training_memory(
            model, config, parameters, available, half=half, learned=num_trained
        )


def event_callbacks(out: Path, train: TrainConfig) -> list[Callback]:
    """Return the callback that writes TensorBoard files, if requested."""
    return [monitoring.tensorboard.TensorBoardCallback(out, train.log_interval)] if train.tensorboard else []


def notify_all(callbacks: Sequence[Callback]) -> Callable[[str], None]:
    """Return a function that passes a line about a stage to all callbacks."""

    def log(text: str) -> None:
        for callback in callbacks:
            callback.on_stage(text)

    return log


def train_summarizer(
    config: RunConfig,
    corpus: CorpusArgument,
    out: Path,
    *,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
    clock: Clock = time.monotonic,
) -> TrainingResult:
    """Train a summarizer for ``config.summarizer.model`` on text files and folders.

    Raises:
        UsageError, DataError, ConfigError, CheckpointError: Before anything is written.
        SaveError: If a checkpoint cannot be written; the last one stays complete.
    """
    replaces_run = setup.preflight.check_run_folder(config, corpus, out, overwrite)
    setup.preflight.check_writable(out)
    setup.preflight.check_device(config.train)
    check_acceleration(config.train)
    teacher, tokenizer = load_teacher(config)
    log = notify_all(callbacks)
    resolved_corpus = resolve_corpus("summarizer", corpus)
    run_data = RunData(config, resolved_corpus, log)
    torch.manual_seed(config.train.seed)
    summarizer = Summarizer(attention_specs(teacher.config), config.summarizer.ratio, config.summarizer.hidden_size)
    with setup.preflight.cleanup_on_error(out):
        run_data.open(out / setup.preflight.TOKENS_FOLDER, tokenizer)
    run = _SummarizerRun(config, resolved_corpus, out, teacher, summarizer, run_data, fresh=replaces_run)
    return run.fit(TrainerState(), None, callbacks, clock)


def resume_summarizer(
    out: Path,
    *,
    config: RunConfig | None = None,
    corpus: CorpusArgument = (),
    callbacks: Sequence[Callback] = (),
    clock: Clock = time.monotonic,
) -> TrainingResult:
    """Continue from the newest checkpoint of a summarizer's run, bit for bit.

    Raises:
        ConfigError: Names what differs.
        CheckpointError: If there is no run, or the model changed.
    """
    run_config, paths = read_summarizer_run(out)
    stored = checkpoint.summarizer.open_summarizer(out)
    config, corpus, state = config or run_config, corpus or paths, _training(stored)
    check_resumable(run_config.to_dict(), config.to_dict())
    setup.preflight.check_device(config.train)
    teacher, tokenizer = load_teacher(config)
    summarizer = stored.load(teacher).requires_grad_(True)
    log = notify_all(callbacks)
    resolved_corpus = resolve_corpus("summarizer", corpus)
    run_data = RunData(config, resolved_corpus, log)
    reopen_data(run_data, out, tokenizer, state, log)
    run = _SummarizerRun(config, resolved_corpus, out, teacher, summarizer, run_data)
    return run.fit(TrainerState(**state.state["trainer_state"]), state, callbacks, clock)


def read_summarizer_run(out: Path) -> tuple[RunConfig, CorpusArgument]:
    """Return configuration and corpus of a summarizer's run that can resume.

    Raises:
        CheckpointError: If there is none.
    """
    setup.preflight.check_has_checkpoint(out)
    stored = checkpoint.summarizer.open_summarizer(out)
    state = _training(stored).state
    setup.preflight.check_is_run(out)
    try:
        return RunConfig.from_dict(state["run"]), setup.run_data.corpus_from_json(state["corpus"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{stored.path}: its training state lacks the key {error}") from error


def _out_of_memory(state: TrainerState, status: str) -> MemoryPlanError:
    hint = f"{status}. Lower train.batch_size or data.seq_len."
    return MemoryPlanError(f"out of memory in step {state.step + 1}", hint)


def _training(stored: checkpoint.summarizer.StoredSummarizer) -> checkpoint.handle.TrainingState:
    if stored.training is None:
        raise CheckpointError(f"{stored.path} holds a summarizer but no training state", "Only a run can resume.")
    return stored.training


def load_teacher(config: RunConfig) -> tuple[CheckpointHandle, Tokenizer]:
    """Open the model whose cache is summarized and its tokenizer; raise if they cannot be used."""
    options = config.summarizer
    if options.model is None:
        raise UsageError("summarizer.model: must name a model", "Name its checkpoint: --init MODEL")
    if config.model or config.tokenizer != TokenizerConfig():
        table = "model" if config.model else "tokenizer"
        raise ConfigError(
            f"[{table}]: must be empty, because the model is {options.model} with its own tokenizer", "Leave it out."
        )
    teacher = open_checkpoint(options.model)
    if teacher.config.kind != "decoder":
        raise ConfigError(f"summarizer.model: must be a decoder, got an {teacher.config.kind}: {options.model}")
    if teacher.tokenizer is None:
        raise ConfigError(
            f"summarizer.model: {options.model} has no tokenizer", "Put its tokenizer.json into the same folder."
        )
    if config.data.seq_len > teacher.config.max_seq_len:
        limit = teacher.config.max_seq_len
        raise ConfigError(
            f"data.seq_len: {config.data.seq_len} is beyond the model's limit of {limit}", f"--seq-len {limit} fits"
        )
    options.check_context(config.data.seq_len)
    if config.data.packing not in ("auto", "split") or not (
        config.data.reset_positions and config.data.isolate_documents
    ):
        raise ConfigError(
            "data: a summarizer is trained on rows cut from the corpus",
            "Leave out packing, reset_positions and isolate_documents.",
        )
    return teacher, teacher.tokenizer


class _SummarizerRun:
    """Parts of a summarizer's run and their conversion into checkpoints."""

    def __init__(
        self,
        config: RunConfig,
        corpus: CorpusArgument,
        out: Path,
        teacher: CheckpointHandle,
        summarizer: Summarizer,
        run_data: RunData,
        *,
        fresh: bool = False,
    ) -> None:
        train = config.train
        self.config, self.out, self.run_data, self.fresh = config, out, run_data, fresh
        self.corpus, self.model_fingerprint = (
            setup.run_data.corpus_to_json(corpus),
            checkpoint.summarizer.sampled_fingerprint(teacher),
        )
        self.summarizer = summarizer.to(train.device)
        self.optimization = OptimizersContainer(self.summarizer, config.optim, train)
        self.model: Transformer = checkpoint.loader.load_weights(teacher, "float32", train.device)

    def fit(
        self,
        state: TrainerState,
        stored: checkpoint.handle.TrainingState | None,
        callbacks: Sequence[Callback],
        clock: Clock,
    ) -> TrainingResult:
        train = self.config.train
        if stored is not None:
            self.optimization.load_state_tensors(stored.tensors)
        metrics = monitoring.metrics.MetricsFile(self.out / METRICS, train.log_interval)
        storage.atomic.write_bytes(
            self.out / config_lib.toml.RUN_FILE, config_lib.toml.format_run_file(self.config, self.corpus).encode()
        )
        autocast = Autocast(objectives.cross_entropy.resolve_precision(train.precision, train.device), train.device)
        objective = objectives.summary_distillation.SummaryDistillation(
            self.model, self.summarizer, self.config.summarizer, autocast
        )
        checkpointer = AsyncCheckpointer(
            lambda: self._snapshot(state), self._write, async_save=train.async_save, has_checkpoint=stored is not None
        )
        trainer = Trainer(
            self.summarizer,
            objective,
            self.optimization,
            self.run_data.data,
            train,
            state,
            checkpointer,
            callbacks=[metrics, *event_callbacks(self.out, train), *callbacks],
            clock=clock,
            describe_rows=self.run_data.describe_rows,
        )
        with (
            metrics,
            setup.memory_estimate.translate_oom(
                lambda: _out_of_memory(state, checkpoint_status(checkpointer.has_checkpoint))
            ),
        ):
            return trainer.fit()

    def _snapshot(self, state: TrainerState) -> checkpoint.handle.CheckpointSnapshot:
        content = checkpoint_metadata(self.config, self.corpus, self.run_data, state)
        training = checkpoint.handle.TrainingState(self.optimization.state_tensors(), content)
        with self.optimization.averaged_weights():
            weights = self.summarizer.state_dict()
        best = state.best_step if self.config.train.keep_best else None
        return checkpoint.handle.CheckpointSnapshot(state.step, weights, training, best)

    def _write(self, snapshot: checkpoint.handle.CheckpointSnapshot) -> Path:
        train, options = self.config.train, self.config.summarizer
        metadata = {"ratio": self.summarizer.ratio, "hidden_size": self.summarizer.hidden}
        metadata |= {"recent": options.recent, "num_sinks": options.num_sinks}
        metadata |= {"val_loss": snapshot.training.state["trainer_state"]["val_loss"]}
        path = checkpoint.summarizer.save_summarizer_step(
            self.out,
            snapshot.step,
            snapshot.weights,
            self.model_fingerprint,
            metadata,
            snapshot.training,
            keep=train.keep_checkpoints,
            best=snapshot.best,
            fresh=self.fresh,
        )
        self.fresh = False
        return path
