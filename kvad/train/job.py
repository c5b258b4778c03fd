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
from kvad.checkpoint.generation import Generation
from kvad.checkpoint.native import load
from kvad.checkpoint.opened import Opened, Training, read_training
from kvad.checkpoint.theirs import Layout, choose_layout
from kvad.config import Classes, ModelConfig, meaning
from kvad.errors import CheckpointError, ConfigError, MemoryPlanError
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import Tokenizer
from kvad.train.config import RunConfig, TrainConfig, differences
from kvad.train.events import Events
from kvad.train.gauge import Gauge, gemm_peak
from kvad.train.material import Material, Named, as_json, from_json, named_for
from kvad.train.memory import outgrown, require, within
from kvad.train.metrics import MetricsFile
from kvad.train.objective import Autocast, resolve_precision
from kvad.train.objectives import fitting, headed, make_objective
from kvad.train.optim import Optimization
from kvad.train.peers import ALONE, Peers
from kvad.train.refusals import (
    TOKENS,
    check_begun,
    check_machine,
    check_place,
    check_run,
    check_watched,
    check_writable,
    nothing_left,
)
from kvad.train.reports import Callback, Outcome, Subject
from kvad.train.saver import Moment, Saver, left
from kvad.train.schedules import paced_by
from kvad.train.speed import prepare
from kvad.train.start import (
    Adapters,
    Start,
    Whole,
    absolute,
    at_beginning,
    count_parameters,
    restored,
    start_again,
    start_of,
    tokenizer_at,
    whole_as,
)
from kvad.train.toml import RUN_FILE, run_file
from kvad.train.trainer import State, Trainer

__all__ = [
    "METRICS",
    "Clock",
    "check_differences",
    "eventful",
    "open_again",
    "progress",
    "resume",
    "stored_run",
    "teller",
    "train",
]

METRICS = "metrics.jsonl"
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
    gauged: bool = False,
    peers: Peers = ALONE,
) -> Outcome:
    """Train a new model, or one that there is (``config.init``), on text files and folders, or on pairs of texts.

    ``overwrite``: a run that ``out`` already holds gives way at the first save (before it, it is whole).
    ``available``: bytes that may be taken (None: nobody knows).  ``gauged``: a matrix product is measured before the
    run begins, so that reports say its utilisation (``gauge.py``).  ``peers``: the processes that call this together
    (``peers.py``); the first of them alone reports and saves.  Raises UsageError, DataError, ConfigError,
    TokenizerError, MemoryPlanError before anything is written; SaveError, with the last checkpoint whole.
    """
    earlier = check_place(config, corpus, out, overwrite)
    if peers.leads:
        check_writable(out)
    check_machine(config.train)
    peers.check(config.train)
    check_watched(config.watch, callbacks)
    callbacks = callbacks if peers.leads else ()
    config = absolute(config)
    start = start_of(config)
    # before a tokenizer is trained for a model that cannot be
    kind = config.resolve(vocab=1).kind if start is None else start.model_config.kind
    tell = teller(callbacks)
    config = fitting(config, kind)
    named = named_for(config.objective.kind, corpus)
    material = Material(config, named, tell, start=None if start is None else start.opened)
    if start is not None:
        start = start.answering(config.objective.kind, material.labels)
    tokenizer = material.make_tokenizer() if start is None else start.tokenizer
    model_config = material.shaped(config.resolve(tokenizer.vocab_size)) if start is None else start.model_config
    _check_memory(config, model_config, available, start)
    form = None if start is None else start.form()
    peers.check_same(lambda: material.key(tokenizer))
    with nothing_left(out), peers.in_turn():
        material.open(out / TOKENS, tokenizer)
    model = at_beginning(config, model_config, start)
    for line in () if start is None else start.told():
        tell(line)
    if form is None:
        form = _form(model_config, material, tokenizer, tell)
    elif material.talks:
        form = form.talking(material.files(tokenizer), material.generation(tokenizer))
    run = _Run(config, named, out, model, tokenizer, material, form, peers, fresh=earlier)
    run.begun = None if start is None else start.begun()
    run.gauged = gauged
    return run.fit(State(), None, callbacks, clock)


def resume(
    out: Path,
    *,
    config: RunConfig | None = None,
    corpus: Named = (),
    available: int | None = None,
    callbacks: Sequence[Callback] = (),
    clock: Clock = time.monotonic,
    gauged: bool = False,
    peers: Peers = ALONE,
) -> Outcome:
    """Go on from the newest checkpoint of a run; to the bit where steps limit it (see ``trainer.py``).

    ``config`` and ``corpus``: None and () are the run's own; given, they must be the same but for how often is
    logged, evaluated and saved.  Raises ConfigError naming what differs, CheckpointError where there is no run, and
    MemoryPlanError as :func:`train` does.
    """
    stored, paths = stored_run(out)
    config, corpus = absolute(config or stored), corpus or paths
    state = read_training(locate(out))
    assert state is not None, "stored_run has looked"
    peers.check(config.train)
    check_watched(config.watch, callbacks)
    peers.check_resumed(state.state.get("ranks", 1))
    callbacks = callbacks if peers.leads else ()
    begun, start = state.state.get("init"), None
    if stored.lora is not None:
        check_differences(stored.to_dict(), config.to_dict())
        start = start_again(config, out, begun or {})
    checkpoint = load(out) if start is None else start.opened
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None, "a run writes it"
    config = fitting(config, checkpoint.config.kind)
    if start is None:
        _check_same(stored, config, checkpoint, tokenizer)
    check_machine(config.train)
    _check_memory(config, checkpoint.config, available, start)
    tell = teller(callbacks)
    named = named_for(config.objective.kind, corpus)
    material = Material(config, named, tell, start=None if begun is None else checkpoint, template=locate(out))
    with peers.in_turn():
        open_again(material, out, tokenizer, state, tell)
    torch.manual_seed(config.train.seed)
    if start is None:
        model = Transformer(checkpoint.config)
        model.load_state_dict(dict(checkpoint.weights()))  # copied: training must never write into a mapped file
    else:
        model = restored(start, out)
    model.to(config.train.device)
    if begun is None:
        form: Whole | Adapters = _form(checkpoint.config, material, tokenizer, tell)
    else:
        form = whole_as(checkpoint) if start is None else start.form()
    if material.talks:
        form = form.talking(material.files(tokenizer), material.generation(tokenizer))
    run = _Run(config, named, out, model, tokenizer, material, form, peers)
    run.begun, run.gauged = begun, gauged
    return run.fit(State(**state.state["progress"]), state, callbacks, clock)


def stored_run(out: Path) -> tuple[RunConfig, Named]:
    """The configuration and the corpus of a run that can go on.  Raises CheckpointError where there is none."""
    check_begun(out)
    path = locate(out)
    if not (path / TRAINING).is_dir():
        raise CheckpointError(f"{path} holds a model but no training state", "only a run of kvad train can go on")
    check_run(out)
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
        form: Whole | Adapters,
        peers: Peers,
        *,
        fresh: bool = False,
    ) -> None:
        self.config, self.out, self.model, self.tokenizer, self.material = config, out, model, tokenizer, material
        self.corpus = as_json(corpus)
        prepare(model, config.train)
        self.optimization = Optimization(model, config.optim, config.train, model.config.width)
        self.form, self.fresh, self.peers = form, fresh, peers
        self.begun: dict[str, str] | None = None  # the model that it began with
        self.gauged = False

    def fit(self, state: State, stored: Training | None, callbacks: Sequence[Callback], clock: Clock) -> Outcome:
        train, leads = self.config.train, self.peers.leads
        if stored is not None:
            self.optimization.restore(stored.tensors)
            self.peers.restore_random(stored.tensors, train.device)
        elif not leads:
            torch.manual_seed(train.seed + self.peers.rank)  # of the weights it was the seed itself
        metrics = MetricsFile(self.out / METRICS, train.log_every)
        heard: list[Callback] = [metrics, *eventful(self.out, train), *callbacks] if leads else []
        self._introduce(heard)
        if leads:
            write_bytes(self.out / RUN_FILE, run_file(self.config, self.corpus).encode())
        sample = self.material.sampler(self.model, self.tokenizer) if leads else None
        precision = resolve_precision(train.precision, train.device)
        objective = make_objective(self.config, self.model, Autocast(precision, train.device))
        frozen = self.config.lora is not None
        gauge = Gauge(self.model.config, gemm_peak(train.device, precision), frozen) if self.gauged and leads else None
        write = self._write if leads else lambda moment: step_folder(self.out, moment.step)  # the first one writes it
        beside = train.save_beside and leads
        saver = Saver(lambda: self._moment(state), write, beside=beside, there=stored is not None)
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
            gauge=gauge,
            whence=self.material.whence,
            peers=self.peers,
        )
        with metrics, within(lambda: self._outgrown(state.step + 1, saver.there, half=precision == "bf16")):
            return trainer.fit()

    def _outgrown(self, step: int, there: bool, *, half: bool) -> MemoryPlanError:
        own = [parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad]
        every = sum(parameter.numel() for parameter in self.model.parameters())
        learned = None if self.config.lora is None else sum(own)
        return outgrown(
            self.model.config, self.config, every, f"in step {step}", left(there), half=half, learned=learned
        )

    def _introduce(self, heard: Sequence[Callback]) -> None:
        def tell(method: str, report: object) -> None:
            for callback in heard:
                getattr(callback, method)(report)

        said = self.material.generation(self.tokenizer)
        for callback in heard:
            callback.on_model(Subject(self.model, self.tokenizer, said, self.material.data, tell))

    def _moment(self, state: State) -> Moment:
        tensors = {**self.optimization.tensors(), **self.peers.random(self.config.train.device)}
        content = progress(self.config, self.corpus, self.material, state)
        if self.peers.size > 1:
            content["ranks"] = self.peers.size
        if self.begun is not None:
            content["init"] = self.begun
        with self.optimization.averaged():
            weights = self.form.weights(self.model)  # those of then, also when the block is left
        best = state.best_step if self.config.train.keep_best else None
        return Moment(state.step, weights, Training(tensors, content), best)

    def _write(self, moment: Moment) -> Path:
        path = self.form.save(self.out, moment, keep=self.config.train.keep, fresh=self.fresh)
        self.fresh = False
        return path


def _form(config: ModelConfig, material: Material, tokenizer: Tokenizer, tell: Callable[[str], None]) -> Whole:
    """Of a model that began here."""
    said = material.generation(tokenizer)
    return Whole(config, _layout(config, said, tell), said, tokenizer, material.files(tokenizer))


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
    if stored.init is not None or wanted.init is not None:
        check_differences(there, here)
        return
    head = checkpoint.config.head
    labels = head.labels if isinstance(head, Classes) else ()
    model = headed(wanted.resolve(tokenizer.vocab_size), wanted.objective.kind, labels)
    same = meaning(model) == meaning(checkpoint.config)  # two spellings of one model are no difference
    there["model"] = {} if same else checkpoint.config.to_dict()
    here["model"] = {} if same else model.to_dict()
    if wanted.tokenizer.path is not None:
        given = tokenizer_at(wanted.tokenizer.path)
        if given.fingerprint() != tokenizer.fingerprint():
            raise ConfigError(f"cannot resume: {wanted.tokenizer.path} is not the tokenizer of this run")
        there["tokenizer"] = here["tokenizer"]
    check_differences(there, here)


def check_differences(stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """ConfigError naming what differs in a way that a run cannot go on with."""
    found = differences(stored, wanted) + paced_by(stored, wanted)
    if found:
        raise ConfigError(f"cannot resume with another configuration: {'; '.join(found)}", "start a new run for that")


def open_again(
    material: Material, out: Path, tokenizer: Tokenizer, state: Training, tell: Callable[[str], None]
) -> None:
    """The data of a run that goes on.  ConfigError where its corpus has changed."""
    if material.key(tokenizer) != state.state["data"]:
        changed = ", ".join(material.changed(out / TOKENS)[:3])
        raise ConfigError(f"cannot resume {out}: its corpus has changed{': ' + changed if changed else ''}")
    material.open(out / TOKENS, tokenizer)
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


def _check_memory(config: RunConfig, model: ModelConfig, available: int | None, start: Start | None) -> None:
    device, precision = config.train.device, config.train.precision
    learned: int | None = None
    parameters = count_parameters(model)
    if start is not None and config.lora is not None:
        parameters, learned = start.parameters
    if torch.device(device).type == "cpu":  # another device's memory answers for itself
        half = resolve_precision(precision, device) == "bf16"
        require(model, config, parameters, available, half=half, learned=learned)


def eventful(out: Path, train: TrainConfig) -> list[Callback]:
    """What writes TensorBoard's files, where they are asked for."""
    return [Events(out, train.log_every)] if train.tensorboard else []


def teller(callbacks: Sequence[Callback]) -> Callable[[str], None]:
    """What tells all of them what is being prepared."""

    def tell(text: str) -> None:
        for callback in callbacks:
            callback.on_stage(text)

    return tell
