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
from kvad.checkpoint.compressor import StoredCompressor, model_fingerprint, open_compressor, save_compressor
from kvad.checkpoint.open import model_of, open_checkpoint
from kvad.checkpoint.opened import Opened, Training
from kvad.config import mixers
from kvad.errors import CheckpointError, ConfigError, MemoryPlanError, UsageError
from kvad.model.compress import Compressor
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import Tokenizer
from kvad.train.config import RunConfig, TokenizerConfig
from kvad.train.distil import Distillation
from kvad.train.job import (
    METRICS,
    Clock,
    check_differences,
    eventful,
    open_again,
    progress,
    teller,
)
from kvad.train.material import Material, Named, as_json, from_json, named_for
from kvad.train.memory import within
from kvad.train.metrics import MetricsFile
from kvad.train.objective import Autocast, resolve_precision
from kvad.train.optim import Optimization
from kvad.train.refusals import TOKENS, check_begun, check_machine, check_place, check_run, check_writable, nothing_left
from kvad.train.reports import Callback, Outcome
from kvad.train.saver import Moment, Saver, left
from kvad.train.speed import refuse
from kvad.train.toml import RUN_FILE, run_file
from kvad.train.trainer import State, Trainer

__all__ = ["resume", "stored_run", "subject_of", "train"]


def train(
    config: RunConfig,
    corpus: Named,
    out: Path,
    *,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
    clock: Clock = time.monotonic,
) -> Outcome:
    """Train a compressor for ``config.compress.model`` on text files and folders.

    Raises UsageError, DataError, ConfigError, CheckpointError before anything is written; SaveError, with the last
    checkpoint whole.
    """
    earlier = check_place(config, corpus, out, overwrite)
    check_writable(out)
    check_machine(config.train)
    refuse(config.train)
    opened, tokenizer = subject_of(config)
    tell = teller(callbacks)
    named = named_for("compress", corpus)
    material = Material(config, named, tell)
    torch.manual_seed(config.train.seed)
    compressor = Compressor(mixers(opened.config), config.compress.ratio, config.compress.hidden)
    with nothing_left(out):
        material.open(out / TOKENS, tokenizer)
    run = _Run(config, named, out, opened, compressor, material, fresh=earlier)
    return run.fit(State(), None, callbacks, clock)


def resume(
    out: Path,
    *,
    config: RunConfig | None = None,
    corpus: Named = (),
    callbacks: Sequence[Callback] = (),
    clock: Clock = time.monotonic,
) -> Outcome:
    """Go on from the newest checkpoint of a run, to the bit, as ``job.resume`` does for models.

    Raises ConfigError naming what differs, CheckpointError where there is no run, or the model is another now.
    """
    run_config, paths = stored_run(out)
    found = open_compressor(out)
    config, corpus, state = config or run_config, corpus or paths, _training(found)
    check_differences(run_config.to_dict(), config.to_dict())
    check_machine(config.train)
    opened, tokenizer = subject_of(config)
    compressor = found.compressor(opened).requires_grad_(True)
    tell = teller(callbacks)
    named = named_for("compress", corpus)
    material = Material(config, named, tell)
    open_again(material, out, tokenizer, state, tell)
    run = _Run(config, named, out, opened, compressor, material)
    return run.fit(State(**state.state["progress"]), state, callbacks, clock)


def stored_run(out: Path) -> tuple[RunConfig, Named]:
    """The configuration and the corpus of a run that can go on.  Raises CheckpointError where there is none."""
    check_begun(out)
    found = open_compressor(out)
    state = _training(found).state
    check_run(out)
    try:
        return RunConfig.from_dict(state["run"]), from_json(state["corpus"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{found.path}: its training state has no {error}") from error


def _outgrown(state: State, left: str) -> MemoryPlanError:
    hint = f"{left}; what takes less: a lower train.batch, a lower data.context"
    return MemoryPlanError(f"out of memory in step {state.step + 1}", hint)


def _training(found: StoredCompressor) -> Training:
    if found.training is None:
        raise CheckpointError(f"{found.path} holds a compressor but no training state", "only a run can go on")
    return found.training


def subject_of(config: RunConfig) -> tuple[Opened, Tokenizer]:
    """The model that is compressed, and its tokenizer, refused where they cannot be."""
    wanted = config.compress
    if wanted.model is None:
        raise UsageError("compress.model: a compressor is trained for a model", "name its checkpoint: --init MODEL")
    if config.model or config.tokenizer != TokenizerConfig():
        table = "model" if config.model else "tokenizer"
        raise ConfigError(f"[{table}]: a compressor's model is {wanted.model}, with its own tokenizer", "leave it out")
    opened = open_checkpoint(wanted.model)
    if opened.config.kind != "decoder":
        raise ConfigError(f"compress.model: {wanted.model} is an {opened.config.kind}", "only a decoder's cache is")
    if opened.tokenizer is None:
        raise ConfigError(
            f"compress.model: {wanted.model} came without a tokenizer", "put its tokenizer.json beside it"
        )
    if config.data.context > opened.config.limit:
        limit = opened.config.limit
        raise ConfigError(
            f"data.context: {config.data.context} is beyond the model's limit of {limit}", f"--context {limit} fits"
        )
    wanted.check_context(config.data.context)
    if config.data.packing not in ("auto", "split") or not (config.data.reset and config.data.isolate):
        raise ConfigError("data: a compressor learns from rows cut from the corpus", "leave packing, reset and isolate")
    return opened, opened.tokenizer


class _Run:
    """One run's parts, and how they become a checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        corpus: Named,
        out: Path,
        opened: Opened,
        compressor: Compressor,
        material: Material,
        *,
        fresh: bool = False,
    ) -> None:
        train = config.train
        self.config, self.out, self.material, self.fresh = config, out, material, fresh
        self.corpus, self.made_for = as_json(corpus), model_fingerprint(opened)
        self.compressor = compressor.to(train.device)
        self.optimization = Optimization(self.compressor, config.optim, train)
        self.model: Transformer = model_of(opened, "float32", train.device)

    def fit(self, state: State, stored: Training | None, callbacks: Sequence[Callback], clock: Clock) -> Outcome:
        train = self.config.train
        if stored is not None:
            self.optimization.restore(stored.tensors)
        metrics = MetricsFile(self.out / METRICS, train.log_every)
        write_bytes(self.out / RUN_FILE, run_file(self.config, self.corpus).encode())
        autocast = Autocast(resolve_precision(train.precision, train.device), train.device)
        aim = Distillation(self.model, self.compressor, self.config.compress, autocast)
        saver = Saver(lambda: self._moment(state), self._write, beside=train.save_beside, there=stored is not None)
        trainer = Trainer(
            self.compressor,
            aim,
            self.optimization,
            self.material.data,
            train,
            state,
            saver,
            callbacks=[metrics, *eventful(self.out, train), *callbacks],
            clock=clock,
            whence=self.material.whence,
        )
        with metrics, within(lambda: _outgrown(state, left(saver.there))):
            return trainer.fit()

    def _moment(self, state: State) -> Moment:
        content = progress(self.config, self.corpus, self.material, state)
        training = Training(self.optimization.tensors(), content)
        with self.optimization.averaged():
            weights = self.compressor.state_dict()
        best = state.best_step if self.config.train.keep_best else None
        return Moment(state.step, weights, training, best)

    def _write(self, moment: Moment) -> Path:
        train, wanted = self.config.train, self.config.compress
        said = {"ratio": self.compressor.ratio, "hidden": self.compressor.hidden}
        said |= {"recent": wanted.recent, "sinks": wanted.sinks}
        said |= {"val_loss": moment.training.state["progress"]["val_loss"]}
        path = save_compressor(
            self.out,
            moment.step,
            moment.weights,
            self.made_for,
            said,
            moment.training,
            keep=train.keep,
            best=moment.best,
            fresh=self.fresh,
        )
        self.fresh = False
        return path
