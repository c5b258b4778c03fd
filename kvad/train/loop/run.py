"""From text files, or pairs of texts, to a trained model: everything around the loop.

    from kvad.train.config.run.run import RunConfig, TrainConfig
    from kvad.train.loop.run import train_model
    outcome = train_model(RunConfig(train=TrainConfig(minutes=2)), [Path("corpus")], Path("runs/x"), callbacks=[...])

An encoder-decoder (``RunConfig(model={"preset": "transformer-tiny"})``) is trained on pairs: the paths are TSV files,
or the corpus is a :class:`~kvad.train.sources.pairs.PairPaths`.  What else may be learned, and from what: ``objectives.py``.

A run folder holds ``checkpoints/step-N/`` (each a whole checkpoint), ``data/`` (the tokens), ``metrics.jsonl`` and
``run.toml`` (its configuration).
``LLM.load("runs/x")`` works from the first save on, at any moment.  What cannot be trained is refused before any of it
is written, and the folders that were made for it go again.

From texts and a trained model to a compressor of its cache: what is around the loop, as ``job.py`` is for models.

    from kvad.train.loop.run import train_summarizer
    outcome = train_model(RunConfig(objective=ObjectiveConfig("compress"), compress=CompressConfig(model="runs/x")), ...)

The run's folder holds ``checkpoints/step-N/`` (each a whole compressor, ``checkpoint/compressor.py``), ``data/`` (the
tokens, by the model's own tokenizer) and ``metrics.jsonl``.
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
    gauged: bool = False,
    peers: DataParallelGroup = SINGLE_PROCESS,
) -> TrainingResult:
    """Train a new model, or one that there is (``config.init``), on text files and folders, or on pairs of texts.

    ``overwrite``: a run that ``out`` already holds gives way at the first save (before it, it is whole).
    ``available``: bytes that may be taken (None: nobody knows).  ``gauged``: a matrix product is measured before the
    run begins, so that reports say its utilisation (``gauge.py``).  ``peers``: the processes that call this together
    (``peers.py``); the first of them alone reports and saves.  Raises UsageError, DataError, ConfigError,
    TokenizerError, MemoryPlanError before anything is written; SaveError, with the last checkpoint whole.
    """
    earlier = setup.preflight.check_run_folder(config, corpus, out, overwrite)
    if peers.is_main:
        setup.preflight.check_writable(out)
    setup.preflight.check_device(config.train)
    peers.check_divisible(config.train)
    setup.preflight.check_callbacks(config.callbacks, callbacks)
    callbacks = callbacks if peers.is_main else ()
    config = setup.initialize.resolve_paths(config)
    start = load_initial(config)
    # before a tokenizer is trained for a model that cannot be
    kind = config.resolve(vocab=1).kind if start is None else start.model_config.kind
    tell = notify_all(callbacks)
    config = setup.objective_factory.resolve_objective(config, kind)
    named = resolve_corpus(config.objective.kind, corpus)
    material = RunData(config, named, tell, start=None if start is None else start.opened)
    if start is not None:
        start = start.with_head_for(config.objective.kind, material.labels)
    tokenizer = material.make_tokenizer() if start is None else start.tokenizer
    model_config = (
        material.with_objective_head(config.resolve(tokenizer.vocab_size)) if start is None else start.model_config
    )
    _check_memory(config, model_config, available, start)
    form = None if start is None else start.checkpoint_writer()
    peers.check_data_equal(lambda: material.tokens_fingerprint(tokenizer))
    with setup.preflight.cleanup_on_error(out), peers.main_first():
        material.open(out / setup.preflight.TOKENS_FOLDER, tokenizer)
    model = setup.initialize.build_new_model(config, model_config, start)
    for line in () if start is None else start.summary():
        tell(line)
    if form is None:
        form = _form(model_config, material, tokenizer, tell)
    elif material.is_chat:
        form = form.with_chat_template(material.extra_files(tokenizer), material.generation(tokenizer))
    run = _ModelRun(config, named, out, model, tokenizer, material, form, peers, fresh=earlier)
    run.begun = None if start is None else start.state_record()
    run.gauged = gauged
    return run.fit(TrainerState(), None, callbacks, clock)


def resume_model(
    out: Path,
    *,
    config: RunConfig | None = None,
    corpus: CorpusArgument = (),
    available: int | None = None,
    callbacks: Sequence[Callback] = (),
    clock: Clock = time.monotonic,
    gauged: bool = False,
    peers: DataParallelGroup = SINGLE_PROCESS,
) -> TrainingResult:
    """Go on from the newest checkpoint of a run; to the bit where steps limit it (see ``trainer.py``).

    ``config`` and ``corpus``: None and () are the run's own; given, they must be the same but for how often is
    logged, evaluated and saved.  Raises ConfigError naming what differs, CheckpointError where there is no run, and
    MemoryPlanError as :func:`train` does.
    """
    stored, paths = read_model_run(out)
    config, corpus = setup.initialize.resolve_paths(config or stored), corpus or paths
    state = checkpoint_lib.handle.read_training_state(checkpoint_lib.folder.locate(out))
    assert state is not None, "stored_run has looked"
    peers.check_divisible(config.train)
    setup.preflight.check_callbacks(config.callbacks, callbacks)
    peers.check_world_size(state.state.get("ranks", 1))
    callbacks = callbacks if peers.is_main else ()
    begun, start = state.state.get("init"), None
    if stored.lora is not None:
        check_resumable(stored.to_dict(), config.to_dict())
        start = setup.initialize.resume_initial(config, out, begun or {})
    checkpoint = checkpoint_lib.native.open_folder(out) if start is None else start.opened
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None, "a run writes it"
    config = setup.objective_factory.resolve_objective(config, checkpoint.config.kind)
    if start is None:
        _check_same(stored, config, checkpoint, tokenizer)
    setup.preflight.check_device(config.train)
    _check_memory(config, checkpoint.config, available, start)
    tell = notify_all(callbacks)
    named = resolve_corpus(config.objective.kind, corpus)
    material = RunData(
        config, named, tell, start=None if begun is None else checkpoint, template=checkpoint_lib.folder.locate(out)
    )
    with peers.main_first():
        reopen_data(material, out, tokenizer, state, tell)
    torch.manual_seed(config.train.seed)
    if start is None:
        model = Transformer(checkpoint.config)
        model.load_state_dict(dict(checkpoint.weights()))  # copied: training must never write into a mapped file
    else:
        model = setup.initialize.load_adapted(start, out)
    model.to(config.train.device)
    if begun is None:
        form: setup.initialize.FullCheckpointWriter | setup.initialize.AdapterCheckpointWriter = _form(
            checkpoint.config, material, tokenizer, tell
        )
    else:
        form = setup.initialize.writer_like(checkpoint) if start is None else start.checkpoint_writer()
    if material.is_chat:
        form = form.with_chat_template(material.extra_files(tokenizer), material.generation(tokenizer))
    run = _ModelRun(config, named, out, model, tokenizer, material, form, peers)
    run.begun, run.gauged = begun, gauged
    return run.fit(TrainerState(**state.state["progress"]), state, callbacks, clock)


def read_model_run(out: Path) -> tuple[RunConfig, CorpusArgument]:
    """The configuration and the corpus of a run that can go on.  Raises CheckpointError where there is none."""
    setup.preflight.check_has_checkpoint(out)
    path = checkpoint_lib.folder.locate(out)
    if not (path / checkpoint_lib.folder.TRAINING).is_dir():
        raise CheckpointError(f"{path} holds a model but no training state", "only a run of kvad train can go on")
    setup.preflight.check_is_run(out)
    state = checkpoint_lib.folder.read_json(path / checkpoint_lib.folder.TRAINING / "state.json")
    try:
        return RunConfig.from_dict(state["run"]), setup.run_data.corpus_from_json(state["corpus"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path / checkpoint_lib.folder.TRAINING / 'state.json'}: no {error}") from error


class _ModelRun:
    """One run's parts, and how they become a checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        corpus: CorpusArgument,
        out: Path,
        model: Transformer,
        tokenizer: Tokenizer,
        material: RunData,
        form: setup.initialize.FullCheckpointWriter | setup.initialize.AdapterCheckpointWriter,
        peers: DataParallelGroup,
        *,
        fresh: bool = False,
    ) -> None:
        self.config, self.out, self.model, self.tokenizer, self.material = config, out, model, tokenizer, material
        self.corpus = setup.run_data.corpus_to_json(corpus)
        apply_acceleration(model, config.train)
        self.optimization = OptimizersContainer(model, config.optim, config.train, model.config.hidden_size)
        self.form, self.fresh, self.peers = form, fresh, peers
        self.begun: dict[str, str] | None = None  # the model that it began with
        self.gauged = False

    def fit(
        self,
        state: TrainerState,
        stored: checkpoint_lib.handle.TrainingState | None,
        callbacks: Sequence[Callback],
        clock: Clock,
    ) -> TrainingResult:
        train, leads = self.config.train, self.peers.is_main
        if stored is not None:
            self.optimization.load_state_tensors(stored.tensors)
            self.peers.restore_random(stored.tensors, train.device)
        elif not leads:
            torch.manual_seed(train.seed + self.peers.rank)  # of the weights it was the seed itself
        metrics = monitoring.metrics.MetricsFile(self.out / METRICS, train.log_interval)
        heard: list[Callback] = [metrics, *event_callbacks(self.out, train), *callbacks] if leads else []
        self._introduce(heard)
        if leads:
            storage.atomic.write_bytes(
                self.out / config_lib.toml.RUN_FILE, config_lib.toml.format_run_file(self.config, self.corpus).encode()
            )
        sample = self.material.sampler(self.model, self.tokenizer) if leads else None
        precision = objectives.cross_entropy.resolve_precision(train.precision, train.device)
        objective = setup.objective_factory.build_objective(self.config, self.model, Autocast(precision, train.device))
        frozen = self.config.lora is not None
        gauge = (
            monitoring.throughput.ThroughputMeter(
                self.model.config, monitoring.throughput.measure_gemm_peak(train.device, precision), frozen
            )
            if self.gauged and leads
            else None
        )
        write = (
            self._write if leads else lambda moment: checkpoint_lib.folder.step_folder(self.out, moment.step)
        )  # the first one writes it
        beside = train.async_save and leads
        saver = AsyncCheckpointer(
            lambda: self._moment(state), write, async_save=beside, has_checkpoint=stored is not None
        )
        trainer = Trainer(
            self.model,
            objective,
            self.optimization,
            self.material.data,
            train,
            state,
            saver,
            sample,
            heard,
            clock,
            throughput=gauge,
            describe_rows=self.material.describe_rows,
            data_parallel=self.peers,
        )
        with (
            metrics,
            setup.memory_estimate.translate_oom(
                lambda: self._outgrown(state.step + 1, saver.has_checkpoint, half=precision == "bf16")
            ),
        ):
            return trainer.fit()

    def _outgrown(self, step: int, there: bool, *, half: bool) -> MemoryPlanError:
        own = [parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad]
        every = sum(parameter.numel() for parameter in self.model.parameters())
        learned = None if self.config.lora is None else sum(own)
        return setup.memory_estimate.out_of_memory_error(
            self.model.config,
            self.config,
            every,
            f"in step {step}",
            checkpoint_status(there),
            half=half,
            learned=learned,
        )

    def _introduce(self, heard: Sequence[Callback]) -> None:
        def tell(method: str, report: object) -> None:
            for callback in heard:
                getattr(callback, method)(report)

        said = self.material.generation(self.tokenizer)
        for callback in heard:
            callback.on_model(TrainingContext(self.model, self.tokenizer, said, self.material.data, tell))

    def _moment(self, state: TrainerState) -> checkpoint_lib.handle.CheckpointSnapshot:
        tensors = {**self.optimization.state_tensors(), **self.peers.random_state(self.config.train.device)}
        content = checkpoint_metadata(self.config, self.corpus, self.material, state)
        if self.peers.size > 1:
            content["ranks"] = self.peers.size
        if self.begun is not None:
            content["init"] = self.begun
        with self.optimization.averaged_weights():
            weights = self.form.weights(self.model)  # those of then, also when the block is left
        best = state.best_step if self.config.train.keep_best else None
        return checkpoint_lib.handle.CheckpointSnapshot(
            state.step, weights, checkpoint_lib.handle.TrainingState(tensors, content), best
        )

    def _write(self, moment: checkpoint_lib.handle.CheckpointSnapshot) -> Path:
        path = self.form.save(self.out, moment, keep=self.config.train.keep_checkpoints, fresh=self.fresh)
        self.fresh = False
        return path


def _form(
    config: ModelConfig, material: RunData, tokenizer: Tokenizer, tell: Callable[[str], None]
) -> setup.initialize.FullCheckpointWriter:
    """Of a model that began here."""
    said = material.generation(tokenizer)
    return setup.initialize.FullCheckpointWriter(
        config, _layout(config, said, tell), said, tokenizer, material.extra_files(tokenizer)
    )


def _layout(
    config: ModelConfig, generation: GenerationConfig, tell: Callable[[str], None]
) -> checkpoint_lib.hf_layout.HFLayout | None:
    """Hugging Face's wherever one of their classes can hold the model; None is kvad's own."""
    try:
        layout = checkpoint_lib.hf_layout.choose_layout(config, generation)
    except CheckpointError as error:
        tell(f"checkpoints: kvad's own layout, as {error.message}{f' ({error.hint})' if error.hint else ''}")
        return None
    tell(f"checkpoints: Hugging Face's layout, which transformers reads as {layout.hf_class}")
    return layout


def _check_same(stored: RunConfig, wanted: RunConfig, checkpoint: CheckpointHandle, tokenizer: Tokenizer) -> None:
    there, here = stored.to_dict(), wanted.to_dict()
    if stored.init is not None or wanted.init is not None:
        check_resumable(there, here)
        return
    head = checkpoint.config.head
    labels = head.labels if isinstance(head, ClassificationHeadConfig) else ()
    model = setup.objective_factory.with_head(wanted.resolve(tokenizer.vocab_size), wanted.objective.kind, labels)
    same = canonical_config(model) == canonical_config(
        checkpoint.config
    )  # two spellings of one model are no difference
    there["model"] = {} if same else checkpoint.config.to_dict()
    here["model"] = {} if same else model.to_dict()
    if wanted.tokenizer.path is not None:
        given = setup.initialize.load_tokenizer_from(wanted.tokenizer.path)
        if given.fingerprint() != tokenizer.fingerprint():
            raise ConfigError(f"cannot resume: {wanted.tokenizer.path} is not the tokenizer of this run")
        there["tokenizer"] = here["tokenizer"]
    check_resumable(there, here)


def check_resumable(stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """ConfigError naming what differs in a way that a run cannot go on with."""
    found = config_lib.run.config_differences(stored, wanted) + optim.schedules.schedule_differences(stored, wanted)
    if found:
        raise ConfigError(f"cannot resume with another configuration: {'; '.join(found)}", "start a new run for that")


def reopen_data(
    material: RunData,
    out: Path,
    tokenizer: Tokenizer,
    state: checkpoint_lib.handle.TrainingState,
    tell: Callable[[str], None],
) -> None:
    """The data of a run that goes on.  ConfigError where its corpus has changed."""
    if material.tokens_fingerprint(tokenizer) != state.state["data"]:
        changed = ", ".join(material.changed_sources(out / setup.preflight.TOKENS_FOLDER)[:3])
        raise ConfigError(f"cannot resume {out}: its corpus has changed{': ' + changed if changed else ''}")
    material.open(out / setup.preflight.TOKENS_FOLDER, tokenizer)
    material.seek(state.state.get("position"))
    if state.state.get("threads") != torch.get_num_threads():
        tell(f"threads: {torch.get_num_threads()}, {state.state.get('threads')} before: the last bits may differ")


def checkpoint_metadata(config: RunConfig, corpus: Any, material: RunData, state: TrainerState) -> dict[str, Any]:
    """What a checkpoint says of the run that it belongs to."""
    return {
        "run": config.to_dict(),
        "corpus": corpus,
        "data": material.fingerprint,
        "position": material.stream_position(),
        "progress": dataclasses.asdict(state),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _check_memory(
    config: RunConfig, model: ModelConfig, available: int | None, start: setup.initialize.InitialModel | None
) -> None:
    device, precision = config.train.device, config.train.precision
    learned: int | None = None
    parameters = setup.initialize.count_parameters(model)
    if start is not None and config.lora is not None:
        parameters, learned = start.parameters
    if torch.device(device).type == "cpu":  # another device's memory answers for itself
        half = objectives.cross_entropy.resolve_precision(precision, device) == "bf16"
        setup.memory_estimate.require_training_memory(model, config, parameters, available, half=half, learned=learned)


def event_callbacks(out: Path, train: TrainConfig) -> list[Callback]:
    """What writes TensorBoard's files, where they are asked for."""
    return [monitoring.tensorboard.TensorBoardCallback(out, train.log_interval)] if train.tensorboard else []


def notify_all(callbacks: Sequence[Callback]) -> Callable[[str], None]:
    """What tells all of them what is being prepared."""

    def tell(text: str) -> None:
        for callback in callbacks:
            callback.on_stage(text)

    return tell


def train_summarizer(
    config: RunConfig,
    corpus: CorpusArgument,
    out: Path,
    *,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
    clock: Clock = time.monotonic,
) -> TrainingResult:
    """Train a compressor for ``config.compress.model`` on text files and folders.

    Raises UsageError, DataError, ConfigError, CheckpointError before anything is written; SaveError, with the last
    checkpoint whole.
    """
    earlier = setup.preflight.check_run_folder(config, corpus, out, overwrite)
    setup.preflight.check_writable(out)
    setup.preflight.check_device(config.train)
    check_acceleration(config.train)
    opened, tokenizer = load_teacher(config)
    tell = notify_all(callbacks)
    named = resolve_corpus("compress", corpus)
    material = RunData(config, named, tell)
    torch.manual_seed(config.train.seed)
    compressor = Summarizer(attention_specs(opened.config), config.summarizer.ratio, config.summarizer.hidden_size)
    with setup.preflight.cleanup_on_error(out):
        material.open(out / setup.preflight.TOKENS_FOLDER, tokenizer)
    run = _SummarizerRun(config, named, out, opened, compressor, material, fresh=earlier)
    return run.fit(TrainerState(), None, callbacks, clock)


def resume_summarizer(
    out: Path,
    *,
    config: RunConfig | None = None,
    corpus: CorpusArgument = (),
    callbacks: Sequence[Callback] = (),
    clock: Clock = time.monotonic,
) -> TrainingResult:
    """Go on from the newest checkpoint of a run, to the bit, as ``job.resume`` does for models.

    Raises ConfigError naming what differs, CheckpointError where there is no run, or the model is another now.
    """
    run_config, paths = read_summarizer_run(out)
    found = checkpoint.summarizer.open_summarizer(out)
    config, corpus, state = config or run_config, corpus or paths, _training(found)
    check_resumable(run_config.to_dict(), config.to_dict())
    setup.preflight.check_device(config.train)
    opened, tokenizer = load_teacher(config)
    compressor = found.load(opened).requires_grad_(True)
    tell = notify_all(callbacks)
    named = resolve_corpus("compress", corpus)
    material = RunData(config, named, tell)
    reopen_data(material, out, tokenizer, state, tell)
    run = _SummarizerRun(config, named, out, opened, compressor, material)
    return run.fit(TrainerState(**state.state["progress"]), state, callbacks, clock)


def read_summarizer_run(out: Path) -> tuple[RunConfig, CorpusArgument]:
    """The configuration and the corpus of a run that can go on.  Raises CheckpointError where there is none."""
    setup.preflight.check_has_checkpoint(out)
    found = checkpoint.summarizer.open_summarizer(out)
    state = _training(found).state
    setup.preflight.check_is_run(out)
    try:
        return RunConfig.from_dict(state["run"]), setup.run_data.corpus_from_json(state["corpus"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{found.path}: its training state has no {error}") from error


def _outgrown(state: TrainerState, left: str) -> MemoryPlanError:
    hint = f"{left}; what takes less: a lower train.batch_size, a lower data.seq_len"
    return MemoryPlanError(f"out of memory in step {state.step + 1}", hint)


def _training(found: checkpoint.summarizer.StoredSummarizer) -> checkpoint.handle.TrainingState:
    if found.training is None:
        raise CheckpointError(f"{found.path} holds a compressor but no training state", "only a run can go on")
    return found.training


def load_teacher(config: RunConfig) -> tuple[CheckpointHandle, Tokenizer]:
    """The model that is compressed, and its tokenizer, refused where they cannot be."""
    wanted = config.summarizer
    if wanted.model is None:
        raise UsageError("summarizer.model: a compressor is trained for a model", "name its checkpoint: --init MODEL")
    if config.model or config.tokenizer != TokenizerConfig():
        table = "model" if config.model else "tokenizer"
        raise ConfigError(f"[{table}]: a compressor's model is {wanted.model}, with its own tokenizer", "leave it out")
    opened = open_checkpoint(wanted.model)
    if opened.config.kind != "decoder":
        raise ConfigError(f"summarizer.model: {wanted.model} is an {opened.config.kind}", "only a decoder's cache is")
    if opened.tokenizer is None:
        raise ConfigError(
            f"summarizer.model: {wanted.model} came without a tokenizer", "put its tokenizer.json beside it"
        )
    if config.data.seq_len > opened.config.max_seq_len:
        limit = opened.config.max_seq_len
        raise ConfigError(
            f"data.seq_len: {config.data.seq_len} is beyond the model's limit of {limit}", f"--context {limit} fits"
        )
    wanted.check_context(config.data.seq_len)
    if config.data.packing not in ("auto", "split") or not (
        config.data.reset_positions and config.data.isolate_documents
    ):
        raise ConfigError("data: a compressor learns from rows cut from the corpus", "leave packing, reset and isolate")
    return opened, opened.tokenizer


class _SummarizerRun:
    """One run's parts, and how they become a checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        corpus: CorpusArgument,
        out: Path,
        opened: CheckpointHandle,
        compressor: Summarizer,
        material: RunData,
        *,
        fresh: bool = False,
    ) -> None:
        train = config.train
        self.config, self.out, self.material, self.fresh = config, out, material, fresh
        self.corpus, self.made_for = (
            setup.run_data.corpus_to_json(corpus),
            checkpoint.summarizer.sampled_fingerprint(opened),
        )
        self.compressor = compressor.to(train.device)
        self.optimization = OptimizersContainer(self.compressor, config.optim, train)
        self.model: Transformer = checkpoint.loader.load_weights(opened, "float32", train.device)

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
        aim = objectives.summary_distillation.SummaryDistillation(
            self.model, self.compressor, self.config.summarizer, autocast
        )
        saver = AsyncCheckpointer(
            lambda: self._moment(state), self._write, async_save=train.async_save, has_checkpoint=stored is not None
        )
        trainer = Trainer(
            self.compressor,
            aim,
            self.optimization,
            self.material.data,
            train,
            state,
            saver,
            callbacks=[metrics, *event_callbacks(self.out, train), *callbacks],
            clock=clock,
            describe_rows=self.material.describe_rows,
        )
        with (
            metrics,
            setup.memory_estimate.translate_oom(lambda: _outgrown(state, checkpoint_status(saver.has_checkpoint))),
        ):
            return trainer.fit()

    def _moment(self, state: TrainerState) -> checkpoint.handle.CheckpointSnapshot:
        content = checkpoint_metadata(self.config, self.corpus, self.material, state)
        training = checkpoint.handle.TrainingState(self.optimization.state_tensors(), content)
        with self.optimization.averaged_weights():
            weights = self.compressor.state_dict()
        best = state.best_step if self.config.train.keep_best else None
        return checkpoint.handle.CheckpointSnapshot(state.step, weights, training, best)

    def _write(self, moment: checkpoint.handle.CheckpointSnapshot) -> Path:
        train, wanted = self.config.train, self.config.summarizer
        said = {"ratio": self.compressor.ratio, "hidden": self.compressor.hidden}
        said |= {"recent": wanted.recent, "sinks": wanted.num_sinks}
        said |= {"val_loss": moment.training.state["progress"]["val_loss"]}
        path = checkpoint.summarizer.save_summarizer_step(
            self.out,
            moment.step,
            moment.weights,
            self.made_for,
            said,
            moment.training,
            keep=train.keep_checkpoints,
            best=moment.best,
            fresh=self.fresh,
        )
        self.fresh = False
        return path
