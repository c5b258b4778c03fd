"""From text files, or pairs of texts, to a trained model: everything around the loop.

    from kvad.train.config import RunConfig, TrainConfig
    from kvad.train.job import train
    outcome = train(RunConfig(train=TrainConfig(minutes=2)), [Path("corpus")], Path("runs/x"), callbacks=[...])

An encoder-decoder (``RunConfig(model={"preset": "transformer-tiny"})``) is trained on pairs: the paths are TSV files,
or the corpus is a :class:`~kvad.train.pairs.PairPaths`.

A run folder holds ``checkpoints/step-N/`` (each a whole checkpoint), ``data/`` (the tokens) and ``metrics.jsonl``.
``LLM.load("runs/x")`` works from the first save on, at any moment.  What cannot be trained is refused before any of it
is written, and the folders that were made for it go again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from kvad.checkpoint.folder import TRAINING, locate, read_json, steps_of
from kvad.checkpoint.generation import Generation
from kvad.checkpoint.native import load, save_step
from kvad.checkpoint.opened import Opened, Training
from kvad.checkpoint.theirs import Layout, choose_layout
from kvad.config import ModelConfig, meaning
from kvad.errors import CheckpointError, ConfigError, UsageError
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import Tokenizer, load_tokenizer
from kvad.train.config import RunConfig, differences
from kvad.train.initial import initialise
from kvad.train.material import Material, Named, as_json, from_json, named_for
from kvad.train.memory import require
from kvad.train.metrics import MetricsFile
from kvad.train.objective import Autocast, NextToken, resolve_precision
from kvad.train.optim import Optimization
from kvad.train.pairs import PairPaths
from kvad.train.reports import Callback, Outcome
from kvad.train.trainer import State, Trainer

__all__ = [
    "METRICS",
    "Clock",
    "check_device",
    "check_differences",
    "check_out",
    "holds_run",
    "nothing_left",
    "open_again",
    "progress",
    "resume",
    "stored_run",
    "teller",
    "train",
]

METRICS = "metrics.jsonl"
TEXTS = (".json", ".jsonl", ".svg")  # what a run's folder holds that a corpus would take for text
Clock = Callable[[], float]


def train(
    config: RunConfig,
    corpus: Named,
    out: Path,
    *,
    overwrite: bool = False,
    available: int | None = None,
    callbacks: Sequence[Callback] = (),
    clock: Clock = time.monotonic,
) -> Outcome:
    """Train a new model on text files and folders, or on pairs of texts.

    ``overwrite``: a run that ``out`` already holds gives way at the first save (before it, it is whole).
    ``available``: bytes that may be taken (None: nobody knows).  Raises UsageError, DataError, ConfigError,
    TokenizerError, MemoryPlanError before anything is written; SaveError, with the last checkpoint whole.
    """
    for source in (corpus, *([Path(path) for path in each.paths] for each in config.data.sources)):
        check_out(out, source, config.data.suffixes)
    earlier = holds_run(out, overwrite)
    check_device(config.train.device)
    kind = config.resolve(vocab=1).kind  # before a tokenizer is trained for a model that cannot be
    tell = teller(callbacks)
    named = named_for(kind, corpus)
    material = Material(config, named, tell)
    tokenizer = material.make_tokenizer()
    model_config = config.resolve(tokenizer.vocab_size)
    _check_memory(config, model_config, available)
    with nothing_left(out):
        material.open(out / "data", tokenizer)
    torch.manual_seed(config.train.seed)
    model = Transformer(model_config)
    if kind == "encoder-decoder":
        initialise(model)
    model.to(config.train.device)
    layout = _layout(model_config, material.generation(tokenizer), tell)
    run = _Run(config, named, out, model, tokenizer, material, layout, fresh=earlier)
    return run.fit(State(), None, callbacks, clock)


def resume(
    out: Path,
    *,
    config: RunConfig | None = None,
    corpus: Named = (),
    available: int | None = None,
    callbacks: Sequence[Callback] = (),
    clock: Clock = time.monotonic,
) -> Outcome:
    """Go on from the newest checkpoint of a run; to the bit where steps limit it (see ``trainer.py``).

    ``config`` and ``corpus``: None and () are the run's own; given, they must be the same but for how often is
    logged, evaluated and saved.  Raises ConfigError naming what differs, CheckpointError where there is no run, and
    MemoryPlanError as :func:`train` does.
    """
    stored, paths = stored_run(out)
    checkpoint = load(out)
    state, tokenizer = checkpoint.training, checkpoint.tokenizer
    assert state is not None and tokenizer is not None, "stored_run has looked"
    config, corpus = config or stored, corpus or paths
    _check_same(stored, config, checkpoint, tokenizer)
    check_device(config.train.device)
    _check_memory(config, checkpoint.config, available)
    tell = teller(callbacks)
    named = named_for(checkpoint.config.kind, corpus)
    material = Material(config, named, tell)
    open_again(material, out, tokenizer, state, tell)
    torch.manual_seed(config.train.seed)
    model = Transformer(checkpoint.config)
    model.load_state_dict(dict(checkpoint.weights()))  # copied: training must never write into a mapped file
    model.to(config.train.device)
    layout = _layout(checkpoint.config, material.generation(tokenizer), tell)
    run = _Run(config, named, out, model, tokenizer, material, layout)
    return run.fit(State(**state.state["progress"]), state, callbacks, clock)


def stored_run(out: Path) -> tuple[RunConfig, Named]:
    """The configuration and the corpus of a run that can go on.  Raises CheckpointError where there is none."""
    path = locate(out)
    if not (path / TRAINING).is_dir():
        raise CheckpointError(f"{path} holds a model but no training state", "only a run of kvad train can go on")
    state = read_json(path / TRAINING / "state.json")
    try:
        return RunConfig.from_dict(state["run"]), from_json(state["corpus"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path / TRAINING / 'state.json'}: no {error}") from error


class _Run:
    """One run's parts, and how they become a checkpoint."""

    def __init__(
        self,
        config: RunConfig,
        corpus: Named,
        out: Path,
        model: Transformer,
        tokenizer: Tokenizer,
        material: Material,
        layout: Layout | None,
        *,
        fresh: bool = False,
    ) -> None:
        self.config, self.out, self.model, self.tokenizer, self.material = config, out, model, tokenizer, material
        self.corpus = as_json(corpus)
        self.optimization = Optimization(model, config.optim, config.train)
        self.layout, self.fresh = layout, fresh

    def fit(self, state: State, stored: Training | None, callbacks: Sequence[Callback], clock: Clock) -> Outcome:
        train = self.config.train
        if stored is not None:
            self.optimization.restore(stored.tensors)
            torch.set_rng_state(stored.tensors["rng"])
        metrics = MetricsFile(self.out / METRICS, train.log_every)
        heard = [metrics, *callbacks]
        sample = self.material.sampler(self.model, self.tokenizer)
        precision = resolve_precision(train.precision, train.device)
        objective = NextToken(self.model, Autocast(precision, train.device))
        trainer = Trainer(
            self.model, objective, self.optimization, self.material.data, train, state, self._save, sample, heard, clock
        )
        try:
            return trainer.fit()
        finally:
            metrics.close()

    def _save(self, state: State) -> Path:
        tensors = {**self.optimization.tensors(), "rng": torch.get_rng_state()}
        content = progress(self.config, self.corpus, self.material, state)
        path = save_step(
            self.out,
            state.step,
            self.model.config,
            self.model.state_dict(),
            self.tokenizer,
            Training(tensors, content),
            layout=self.layout,
            generation=self.material.generation(self.tokenizer),
            keep=self.config.train.keep,
            fresh=self.fresh,
        )
        self.fresh = False
        return path


def _layout(config: ModelConfig, generation: Generation, tell: Callable[[str], None]) -> Layout | None:
    """Hugging Face's wherever one of their classes can hold the model; None is kvad's own."""
    try:
        layout = choose_layout(config, generation)
    except CheckpointError as error:
        tell(f"checkpoints: kvad's own layout, as {error.message}{f' ({error.hint})' if error.hint else ''}")
        return None
    tell(f"checkpoints: Hugging Face's layout, which transformers reads as {layout.reader}")
    return layout


def _check_same(stored: RunConfig, wanted: RunConfig, checkpoint: Opened, tokenizer: Tokenizer) -> None:
    there, here = stored.to_dict(), wanted.to_dict()
    model = wanted.resolve(tokenizer.vocab_size)
    same = meaning(model) == meaning(checkpoint.config)  # two spellings of one model are no difference
    there["model"] = {} if same else checkpoint.config.to_dict()
    here["model"] = {} if same else model.to_dict()
    if wanted.tokenizer.path is not None:
        given = load_tokenizer(Path(wanted.tokenizer.path))
        if given.fingerprint() != tokenizer.fingerprint():
            raise ConfigError(f"cannot resume: {wanted.tokenizer.path} is not the tokenizer of this run")
        there["tokenizer"] = here["tokenizer"]
    check_differences(there, here)


def check_differences(stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """ConfigError naming what differs in a way that a run cannot go on with."""
    found = differences(stored, wanted)
    if found:
        raise ConfigError(f"cannot resume with another configuration: {'; '.join(found)}", "start a new run for that")


def holds_run(out: Path, overwrite: bool) -> bool:
    """Whether a folder holds a run already.  UsageError where it may not give way."""
    earlier = steps_of(out)
    if earlier and not overwrite:
        raise UsageError(
            f"{out} already holds a run ({earlier[-1].name})", "go on with --resume, or choose another --out"
        )
    return bool(earlier)


def open_again(
    material: Material, out: Path, tokenizer: Tokenizer, state: Training, tell: Callable[[str], None]
) -> None:
    """The data of a run that goes on.  ConfigError where its corpus has changed."""
    if material.key(tokenizer) != state.state["data"]:
        changed = ", ".join(material.changed(out / "data")[:3])
        raise ConfigError(f"cannot resume {out}: its corpus has changed{': ' + changed if changed else ''}")
    material.open(out / "data", tokenizer)
    material.seek(state.state.get("position"))
    if state.state.get("threads") != torch.get_num_threads():
        tell(f"threads: {torch.get_num_threads()}, {state.state.get('threads')} before: the last bits may differ")


def progress(config: RunConfig, corpus: Any, material: Material, state: State) -> dict[str, Any]:
    """What a checkpoint says of the run that it belongs to."""
    return {
        "run": config.to_dict(),
        "corpus": corpus,
        "data": material.fingerprint,
        "position": material.position(),
        "progress": dataclasses.asdict(state),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def check_out(out: Path, corpus: Named, suffixes: Sequence[str]) -> None:
    """A folder, or none yet, that no corpus of folders would read as text in a later run."""
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"{there} is a file, and a run needs a folder", "choose another folder for --out")
    if suffixes and not set(suffixes) & set(TEXTS):
        return
    for folder in () if isinstance(corpus, PairPaths) else corpus:
        if not folder.is_dir() or not out.resolve().is_relative_to(folder.resolve()):
            continue
        inside = out.resolve().relative_to(folder.resolve())
        if not any(part.startswith(".") for part in inside.parts):  # a corpus leaves hidden folders out
            raise UsageError(
                f"{out} lies inside the corpus {folder}: a later run would read this one's files as text",
                "choose another --out, or say which files are text with --suffix",
            )


@contextmanager
def nothing_left(out: Path) -> Iterator[None]:
    """If the block fails, the folders that it made on the way to ``out`` go again, as far as they are empty."""
    missing = [path for path in (out, *out.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        for path in missing:
            with suppress(OSError):
                path.rmdir()
        raise


def _check_memory(config: RunConfig, model: ModelConfig, available: int | None) -> None:
    device, precision = config.train.device, config.train.precision
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Transformer(model).parameters())
    if torch.device(device).type == "cpu":  # another device's memory answers for itself
        require(model, config, parameters, available, half=resolve_precision(precision, device) == "bf16")


def check_device(device: str) -> None:
    """ConfigError for one that cannot be used."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"train.device: {device!r} cannot be used: {str(error).splitlines()[0]}") from error


def teller(callbacks: Sequence[Callback]) -> Callable[[str], None]:
    """What tells all of them what is being prepared."""

    def tell(text: str) -> None:
        for callback in callbacks:
            callback.on_stage(text)

    return tell
