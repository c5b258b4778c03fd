"""From texts and a trained model to a compressor of its cache: what is around the loop, as ``job.py`` is for models.

    from kvad.train.compress import train
    outcome = train(RunConfig(objective=ObjectiveConfig("compress"), compress=CompressConfig(model="runs/x")), ...)

The run's folder holds ``checkpoints/step-N/`` (each a whole compressor, ``checkpoint/compressor.py``), ``data/`` (the
tokens, by the model's own tokenizer) and ``metrics.jsonl``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from kvad.checkpoint.atomic import write_bytes
from kvad.checkpoint.compressor import StoredSummarizer, open_summarizer, sampled_fingerprint, save_summarizer_step
from kvad.checkpoint.open import load_weights, open_checkpoint
from kvad.checkpoint.opened import CheckpointHandle, TrainingState
from kvad.config import attention_specs
from kvad.errors import CheckpointError, ConfigError, MemoryPlanError, UsageError
from kvad.model.compress import Summarizer
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import Tokenizer
from kvad.train.config import RunConfig, TokenizerConfig
from kvad.train.distil import SummaryDistillation
from kvad.train.job import (
    METRICS,
    Clock,
    check_resumable,
    checkpoint_metadata,
    event_callbacks,
    notify_all,
    reopen_data,
)
from kvad.train.material import CorpusArgument, RunData, corpus_from_json, corpus_to_json, resolve_corpus
from kvad.train.memory import translate_oom
from kvad.train.metrics import MetricsFile
from kvad.train.objective import Autocast, resolve_precision
from kvad.train.optim import OptimizersContainer
from kvad.train.refusals import (
    TOKENS_FOLDER,
    check_device,
    check_has_checkpoint,
    check_is_run,
    check_run_folder,
    check_writable,
    cleanup_on_error,
)
from kvad.train.reports import Callback, TrainingResult
from kvad.train.saver import AsyncCheckpointer, CheckpointSnapshot, checkpoint_status
from kvad.train.speed import check_acceleration
from kvad.train.toml import RUN_FILE, format_run_file
from kvad.train.trainer import Trainer, TrainerState

__all__ = ["resume_summarizer", "read_summarizer_run", "load_teacher", "train_summarizer"]


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
    earlier = check_run_folder(config, corpus, out, overwrite)
    check_writable(out)
    check_device(config.train)
    check_acceleration(config.train)
    opened, tokenizer = load_teacher(config)
    tell = notify_all(callbacks)
    named = resolve_corpus("compress", corpus)
    material = RunData(config, named, tell)
    torch.manual_seed(config.train.seed)
    compressor = Summarizer(attention_specs(opened.config), config.summarizer.ratio, config.summarizer.hidden_size)
    with cleanup_on_error(out):
        material.open(out / TOKENS_FOLDER, tokenizer)
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
    found = open_summarizer(out)
    config, corpus, state = config or run_config, corpus or paths, _training(found)
    check_resumable(run_config.to_dict(), config.to_dict())
    check_device(config.train)
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
    check_has_checkpoint(out)
    found = open_summarizer(out)
    state = _training(found).state
    check_is_run(out)
    try:
        return RunConfig.from_dict(state["run"]), corpus_from_json(state["corpus"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{found.path}: its training state has no {error}") from error


def _outgrown(state: TrainerState, left: str) -> MemoryPlanError:
    hint = f"{left}; what takes less: a lower train.batch_size, a lower data.seq_len"
    return MemoryPlanError(f"out of memory in step {state.step + 1}", hint)


def _training(found: StoredSummarizer) -> TrainingState:
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
        self.corpus, self.made_for = corpus_to_json(corpus), sampled_fingerprint(opened)
        self.compressor = compressor.to(train.device)
        self.optimization = OptimizersContainer(self.compressor, config.optim, train)
        self.model: Transformer = load_weights(opened, "float32", train.device)

    def fit(
        self, state: TrainerState, stored: TrainingState | None, callbacks: Sequence[Callback], clock: Clock
    ) -> TrainingResult:
        train = self.config.train
        if stored is not None:
            self.optimization.load_state_tensors(stored.tensors)
        metrics = MetricsFile(self.out / METRICS, train.log_interval)
        write_bytes(self.out / RUN_FILE, format_run_file(self.config, self.corpus).encode())
        autocast = Autocast(resolve_precision(train.precision, train.device), train.device)
        aim = SummaryDistillation(self.model, self.compressor, self.config.summarizer, autocast)
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
        with metrics, translate_oom(lambda: _outgrown(state, checkpoint_status(saver.has_checkpoint))):
            return trainer.fit()

    def _moment(self, state: TrainerState) -> CheckpointSnapshot:
        content = checkpoint_metadata(self.config, self.corpus, self.material, state)
        training = TrainingState(self.optimization.state_tensors(), content)
        with self.optimization.averaged_weights():
            weights = self.compressor.state_dict()
        best = state.best_step if self.config.train.keep_best else None
        return CheckpointSnapshot(state.step, weights, training, best)

    def _write(self, moment: CheckpointSnapshot) -> Path:
        train, wanted = self.config.train, self.config.summarizer
        said = {"ratio": self.compressor.ratio, "hidden": self.compressor.hidden}
        said |= {"recent": wanted.recent, "sinks": wanted.num_sinks}
        said |= {"val_loss": moment.training.state["progress"]["val_loss"]}
        path = save_summarizer_step(
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
