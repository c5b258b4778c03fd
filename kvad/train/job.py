"""From text files, or pairs of texts, to a trained model: everything around the loop.

    from kvad.train.config import RunConfig, TrainConfig
    from kvad.train.job import train
    outcome = train(RunConfig(train=TrainConfig(minutes=2)), [Path("corpus")], Path("runs/x"), callbacks=[...])

An encoder-decoder (``RunConfig(model={"preset": "transformer-tiny"})``) is trained on pairs: the paths are TSV files,
or the corpus is a :class:`~kvad.train.pairs.PairPaths`.  What else may be learned, and from what: ``objectives.py``.

A run folder holds ``checkpoints/step-N/`` (each a whole checkpoint), ``data/`` (the tokens), ``metrics.jsonl`` and
``run.toml`` (its configuration).
``LLM.load("runs/x")`` works from the first save on, at any moment.  What cannot be trained is refused before any of it
is written, and the folders that were made for it go again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvad.checkpoint.atomic import write_bytes
from kvad.checkpoint.folder import TRAINING, locate, read_json, step_folder
from kvad.checkpoint.generation import GenerationConfig
from kvad.checkpoint.native import open_folder
from kvad.checkpoint.opened import CheckpointHandle, TrainingState, read_training_state
from kvad.checkpoint.theirs import HFLayout, choose_layout
from kvad.config import ClassificationHeadConfig, ModelConfig, canonical_config
from kvad.errors import CheckpointError, ConfigError, MemoryPlanError
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import Tokenizer
from kvad.train.config import RunConfig, TrainConfig, config_differences
from kvad.train.events import TensorBoardCallback
from kvad.train.gauge import ThroughputMeter, measure_gemm_peak
from kvad.train.material import CorpusArgument, RunData, corpus_from_json, corpus_to_json, resolve_corpus
from kvad.train.memory import out_of_memory_error, require_training_memory, translate_oom
from kvad.train.metrics import MetricsFile
from kvad.train.objective import Autocast, resolve_precision
from kvad.train.objectives import build_objective, resolve_objective, with_head
from kvad.train.optim import OptimizersContainer
from kvad.train.peers import SINGLE_PROCESS, DataParallelGroup
from kvad.train.refusals import (
    TOKENS_FOLDER,
    check_callbacks,
    check_device,
    check_has_checkpoint,
    check_is_run,
    check_run_folder,
    check_writable,
    cleanup_on_error,
)
from kvad.train.reports import Callback, TrainingContext, TrainingResult
from kvad.train.saver import AsyncCheckpointer, CheckpointSnapshot, checkpoint_status
from kvad.train.schedules import schedule_differences
from kvad.train.speed import apply_acceleration
from kvad.train.start import (
    AdapterCheckpointWriter,
    FullCheckpointWriter,
    InitialModel,
    build_new_model,
    count_parameters,
    load_adapted,
    load_initial,
    load_tokenizer_from,
    resolve_paths,
    resume_initial,
    writer_like,
)
from kvad.train.toml import RUN_FILE, format_run_file
from kvad.train.trainer import Trainer, TrainerState

__all__ = [
    "METRICS",
    "Clock",
    "check_resumable",
    "event_callbacks",
    "reopen_data",
    "checkpoint_metadata",
    "resume_model",
    "read_model_run",
    "notify_all",
    "train_model",
]

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
    earlier = check_run_folder(config, corpus, out, overwrite)
    if peers.is_main:
        check_writable(out)
    check_device(config.train)
    peers.check_divisible(config.train)
    check_callbacks(config.callbacks, callbacks)
    callbacks = callbacks if peers.is_main else ()
    config = resolve_paths(config)
    start = load_initial(config)
    # before a tokenizer is trained for a model that cannot be
    kind = config.resolve(vocab=1).kind if start is None else start.model_config.kind
    tell = notify_all(callbacks)
    config = resolve_objective(config, kind)
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
    with cleanup_on_error(out), peers.main_first():
        material.open(out / TOKENS_FOLDER, tokenizer)
    model = build_new_model(config, model_config, start)
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
    config, corpus = resolve_paths(config or stored), corpus or paths
    state = read_training_state(locate(out))
    assert state is not None, "stored_run has looked"
    peers.check_divisible(config.train)
    check_callbacks(config.callbacks, callbacks)
    peers.check_world_size(state.state.get("ranks", 1))
    callbacks = callbacks if peers.is_main else ()
    begun, start = state.state.get("init"), None
    if stored.lora is not None:
        check_resumable(stored.to_dict(), config.to_dict())
        start = resume_initial(config, out, begun or {})
    checkpoint = open_folder(out) if start is None else start.opened
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None, "a run writes it"
    config = resolve_objective(config, checkpoint.config.kind)
    if start is None:
        _check_same(stored, config, checkpoint, tokenizer)
    check_device(config.train)
    _check_memory(config, checkpoint.config, available, start)
    tell = notify_all(callbacks)
    named = resolve_corpus(config.objective.kind, corpus)
    material = RunData(config, named, tell, start=None if begun is None else checkpoint, template=locate(out))
    with peers.main_first():
        reopen_data(material, out, tokenizer, state, tell)
    torch.manual_seed(config.train.seed)
    if start is None:
        model = Transformer(checkpoint.config)
        model.load_state_dict(dict(checkpoint.weights()))  # copied: training must never write into a mapped file
    else:
        model = load_adapted(start, out)
    model.to(config.train.device)
    if begun is None:
        form: FullCheckpointWriter | AdapterCheckpointWriter = _form(checkpoint.config, material, tokenizer, tell)
    else:
        form = writer_like(checkpoint) if start is None else start.checkpoint_writer()
    if material.is_chat:
        form = form.with_chat_template(material.extra_files(tokenizer), material.generation(tokenizer))
    run = _ModelRun(config, named, out, model, tokenizer, material, form, peers)
    run.begun, run.gauged = begun, gauged
    return run.fit(TrainerState(**state.state["progress"]), state, callbacks, clock)


def read_model_run(out: Path) -> tuple[RunConfig, CorpusArgument]:
    """The configuration and the corpus of a run that can go on.  Raises CheckpointError where there is none."""
    check_has_checkpoint(out)
    path = locate(out)
    if not (path / TRAINING).is_dir():
        raise CheckpointError(f"{path} holds a model but no training state", "only a run of kvad train can go on")
    check_is_run(out)
    state = read_json(path / TRAINING / "state.json")
    try:
        return RunConfig.from_dict(state["run"]), corpus_from_json(state["corpus"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path / TRAINING / 'state.json'}: no {error}") from error


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
        form: FullCheckpointWriter | AdapterCheckpointWriter,
        peers: DataParallelGroup,
        *,
        fresh: bool = False,
    ) -> None:
        self.config, self.out, self.model, self.tokenizer, self.material = config, out, model, tokenizer, material
        self.corpus = corpus_to_json(corpus)
        apply_acceleration(model, config.train)
        self.optimization = OptimizersContainer(model, config.optim, config.train, model.config.hidden_size)
        self.form, self.fresh, self.peers = form, fresh, peers
        self.begun: dict[str, str] | None = None  # the model that it began with
        self.gauged = False

    def fit(
        self, state: TrainerState, stored: TrainingState | None, callbacks: Sequence[Callback], clock: Clock
    ) -> TrainingResult:
        train, leads = self.config.train, self.peers.is_main
        if stored is not None:
            self.optimization.load_state_tensors(stored.tensors)
            self.peers.restore_random(stored.tensors, train.device)
        elif not leads:
            torch.manual_seed(train.seed + self.peers.rank)  # of the weights it was the seed itself
        metrics = MetricsFile(self.out / METRICS, train.log_interval)
        heard: list[Callback] = [metrics, *event_callbacks(self.out, train), *callbacks] if leads else []
        self._introduce(heard)
        if leads:
            write_bytes(self.out / RUN_FILE, format_run_file(self.config, self.corpus).encode())
        sample = self.material.sampler(self.model, self.tokenizer) if leads else None
        precision = resolve_precision(train.precision, train.device)
        objective = build_objective(self.config, self.model, Autocast(precision, train.device))
        frozen = self.config.lora is not None
        gauge = (
            ThroughputMeter(self.model.config, measure_gemm_peak(train.device, precision), frozen)
            if self.gauged and leads
            else None
        )
        write = self._write if leads else lambda moment: step_folder(self.out, moment.step)  # the first one writes it
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
            translate_oom(lambda: self._outgrown(state.step + 1, saver.has_checkpoint, half=precision == "bf16")),
        ):
            return trainer.fit()

    def _outgrown(self, step: int, there: bool, *, half: bool) -> MemoryPlanError:
        own = [parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad]
        every = sum(parameter.numel() for parameter in self.model.parameters())
        learned = None if self.config.lora is None else sum(own)
        return out_of_memory_error(
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

    def _moment(self, state: TrainerState) -> CheckpointSnapshot:
        tensors = {**self.optimization.state_tensors(), **self.peers.random_state(self.config.train.device)}
        content = checkpoint_metadata(self.config, self.corpus, self.material, state)
        if self.peers.size > 1:
            content["ranks"] = self.peers.size
        if self.begun is not None:
            content["init"] = self.begun
        with self.optimization.averaged_weights():
            weights = self.form.weights(self.model)  # those of then, also when the block is left
        best = state.best_step if self.config.train.keep_best else None
        return CheckpointSnapshot(state.step, weights, TrainingState(tensors, content), best)

    def _write(self, moment: CheckpointSnapshot) -> Path:
        path = self.form.save(self.out, moment, keep=self.config.train.keep_checkpoints, fresh=self.fresh)
        self.fresh = False
        return path


def _form(
    config: ModelConfig, material: RunData, tokenizer: Tokenizer, tell: Callable[[str], None]
) -> FullCheckpointWriter:
    """Of a model that began here."""
    said = material.generation(tokenizer)
    return FullCheckpointWriter(config, _layout(config, said, tell), said, tokenizer, material.extra_files(tokenizer))


def _layout(config: ModelConfig, generation: GenerationConfig, tell: Callable[[str], None]) -> HFLayout | None:
    """Hugging Face's wherever one of their classes can hold the model; None is kvad's own."""
    try:
        layout = choose_layout(config, generation)
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
    model = with_head(wanted.resolve(tokenizer.vocab_size), wanted.objective.kind, labels)
    same = canonical_config(model) == canonical_config(
        checkpoint.config
    )  # two spellings of one model are no difference
    there["model"] = {} if same else checkpoint.config.to_dict()
    here["model"] = {} if same else model.to_dict()
    if wanted.tokenizer.path is not None:
        given = load_tokenizer_from(wanted.tokenizer.path)
        if given.fingerprint() != tokenizer.fingerprint():
            raise ConfigError(f"cannot resume: {wanted.tokenizer.path} is not the tokenizer of this run")
        there["tokenizer"] = here["tokenizer"]
    check_resumable(there, here)


def check_resumable(stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """ConfigError naming what differs in a way that a run cannot go on with."""
    found = config_differences(stored, wanted) + schedule_differences(stored, wanted)
    if found:
        raise ConfigError(f"cannot resume with another configuration: {'; '.join(found)}", "start a new run for that")


def reopen_data(
    material: RunData, out: Path, tokenizer: Tokenizer, state: TrainingState, tell: Callable[[str], None]
) -> None:
    """The data of a run that goes on.  ConfigError where its corpus has changed."""
    if material.tokens_fingerprint(tokenizer) != state.state["data"]:
        changed = ", ".join(material.changed_sources(out / TOKENS_FOLDER)[:3])
        raise ConfigError(f"cannot resume {out}: its corpus has changed{': ' + changed if changed else ''}")
    material.open(out / TOKENS_FOLDER, tokenizer)
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


def _check_memory(config: RunConfig, model: ModelConfig, available: int | None, start: InitialModel | None) -> None:
    device, precision = config.train.device, config.train.precision
    learned: int | None = None
    parameters = count_parameters(model)
    if start is not None and config.lora is not None:
        parameters, learned = start.parameters
    if torch.device(device).type == "cpu":  # another device's memory answers for itself
        half = resolve_precision(precision, device) == "bf16"
        require_training_memory(model, config, parameters, available, half=half, learned=learned)


def event_callbacks(out: Path, train: TrainConfig) -> list[Callback]:
    """What writes TensorBoard's files, where they are asked for."""
    return [TensorBoardCallback(out, train.log_interval)] if train.tensorboard else []


def notify_all(callbacks: Sequence[Callback]) -> Callable[[str], None]:
    """What tells all of them what is being prepared."""

    def tell(text: str) -> None:
        for callback in callbacks:
            callback.on_stage(text)

    return tell
