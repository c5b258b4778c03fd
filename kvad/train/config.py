"""What a training run is, as frozen dataclasses: a TOML file in ``runs/``, and what ``--resume`` holds a run against.

A run file has these tables::

    [model]       a whole ModelConfig, or preset = "small" and what differs from it; vocab and limit may be left out.
                  Or init = "MODEL" alone: a checkpoint that training goes on from, with its tokenizer
    [data]        context, suffixes, documents, errors, validation, ...   DataConfig
    [tokenizer]   kind, path, vocab_size, ...                            TokenizerConfig
    [objective]   kind: what the model learns to say                     ObjectiveConfig
    [optim]       name, lr, schedule, weight_decay, clip, ema, ...        OptimConfig (optim_config.py)
    [train]       steps, minutes, batch, precision, save_every, ...      TrainConfig
    [compress]    model, ratio, recent, ...: what objective.kind = "compress" trains, in the place of [model] and
                  [tokenizer]                                            CompressConfig
    [lora]        rank, alpha, targets, ...: adapters are trained beside a frozen model.init    LoraConfig

Unknown tables and keys are refused with the nearest known name.  TOML has no null: in [model] the text "null" is one.
Standard library only.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvad.config import ModelConfig, from_dict, override, to_dict
from kvad.errors import ConfigError, nearest
from kvad.train.optim_config import OptimConfig
from kvad.train.presets import PRESETS

__all__ = [
    "CompressConfig",
    "DataConfig",
    "LoraConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "RunConfig",
    "SourceConfig",
    "TokenizerConfig",
    "TrainConfig",
    "assigned",
    "differences",
]

TABLES = ("model", "data", "tokenizer", "objective", "optim", "train", "compress", "lora")
# What may change on resume, as no number does.
FREE = tuple(
    f"train.{key}"
    for key in ("log_every", "eval_every", "save_every", "keep", "keep_best", "save_beside", "tensorboard")
)


@dataclass(frozen=True)
class SourceConfig:
    """One of a mixture: ``paths`` are files, folders, or one folder of ``kvad data prepare``; ``weight``: its share of
    the rows, in any unit."""

    paths: tuple[str, ...]
    weight: float = 1.0

    def __post_init__(self) -> None:
        _check(len(self.paths) > 0, "data.sources.paths", list(self.paths), "at least one")
        _check(self.weight > 0, "data.sources.weight", self.weight, "above 0")


@dataclass(frozen=True)
class DataConfig:
    """``context``: tokens of a training row.  ``suffixes``: which files of a folder (none: all that are text).

    ``documents``: whether every file is one, or every line that is not empty.

    ``errors``: what to do with bytes that are not UTF-8.  ``validation``: share of the tokens held out.  ``order``:
    ``epochs`` cuts the corpus into rows, each seen once per epoch, at a new offset every epoch; ``windows`` draws the
    start of every row at random (nanoGPT's way); ``sequential`` reads the corpus in its order and mixes ``shuffle``
    rows at a time; ``stream`` does that without writing tokens to the disk first (``stream.py``).

    ``packing``: how documents share rows, ``split``, ``first-fit`` or ``best-fit`` (``packing.py``; auto: documents are
    split, pairs go by first fit).  ``reset``: positions restart in every document; ``isolate``: documents do not see
    each other (``rows.py``).

    ``format``: how files are read (``readers.py``; auto: by their names); of JSON lines, ``field`` is the text, or
    ``source_field`` and ``target_field`` are a pair.  ``sources``: a mixture, in the place of what is named.
    """

    context: int = 256
    suffixes: tuple[str, ...] = ()
    documents: Literal["files", "lines"] = "files"
    errors: Literal["strict", "replace"] = "strict"
    validation: float = 0.1
    order: Literal["epochs", "windows", "sequential", "stream"] = "epochs"
    packing: Literal["auto", "split", "first-fit", "best-fit"] = "auto"
    reset: bool = True
    isolate: bool = True
    format: Literal["auto", "text", "lines", "jsonl", "pairs"] = "auto"
    field: str = "text"
    source_field: str = "source"
    target_field: str = "target"
    shuffle: int = 1024
    sources: tuple[SourceConfig, ...] = ()

    def __post_init__(self) -> None:
        _check(self.context >= 1, "data.context", self.context, "at least 1")
        _check(0 < self.validation < 1, "data.validation", self.validation, "between 0 and 1")
        _check(self.shuffle >= 1, "data.shuffle", self.shuffle, "at least 1")


@dataclass(frozen=True)
class TokenizerConfig:
    """``path``: a tokenizer to load; otherwise one of ``kind`` is trained on the corpus (see kvad.text.tokenizer)."""

    kind: Literal["bpe", "byte", "char", "word"] = "bpe"
    path: str | None = None
    vocab_size: int = 4096
    min_freq: int = 1
    lower: bool = False
    specials: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is learned.  ``auto``: ``next-token`` of a decoder, ``seq2seq`` of an encoder-decoder, ``masked`` of an
    encoder; ``fitting`` (``objectives.py``) says which kinds a model can have, and which keys a kind.

    ``smoothing``: label smoothing of the cross entropy.  ``density``: of masked and spans, the share of tokens that are
    hidden; ``mean_span``: of spans, how long those are.  ``sampling``: of seq2seq, the share of a decoder's tokens that
    are the model's own at last; it rises as ``sampling_schedule`` says over ``sampling_steps`` (None: the run's).
    ``hide``: of tag and classify, the share of the tokens that are read as the mask in training, against overfitting.
    ``template``: of chat, a file with the chat template (None: the tokenizer's, else ChatML).  ``text_field`` and
    ``label_field``: of classify, names in JSONL.
    """

    kind: Literal["auto", "next-token", "seq2seq", "masked", "spans", "tag", "classify", "chat", "compress"] = "auto"
    smoothing: float = 0.0
    density: float = 0.15
    mean_span: float = 3.0
    sampling: float = 0.0
    sampling_schedule: Literal["linear", "exponential", "sigmoid"] = "linear"
    sampling_steps: int | None = None
    template: str | None = None
    text_field: str = "text"
    label_field: str = "label"
    hide: float = 0.0

    def __post_init__(self) -> None:
        _check(0 <= self.smoothing < 1, "objective.smoothing", self.smoothing, "in [0, 1)")
        _check(0 < self.density < 1, "objective.density", self.density, "between 0 and 1")
        _check(self.mean_span >= 1, "objective.mean_span", self.mean_span, "at least 1")
        _check(0 <= self.sampling <= 1, "objective.sampling", self.sampling, "in [0, 1]")
        _check(0 <= self.hide < 1, "objective.hide", self.hide, "in [0, 1)")
        steps = self.sampling_steps
        _check(steps is None or steps >= 1, "objective.sampling_steps", steps, "at least 1")


@dataclass(frozen=True)
class TrainConfig:
    """A run ends after ``steps`` optimizer steps or ``minutes`` of training, whichever is first (neither: 1,000 steps).

    A step is ``accumulate`` micro-batches of ``batch`` rows.  ``precision``: ``auto`` is bf16 autocast where the
    machine multiplies bf16 faster, else fp32.  ``eval_tokens``: how much of the validation split an evaluation reads,
    evenly spread (0 = all of it).

    ``keep``: how many of the newest checkpoints stay; ``keep_best``: and the one with the lowest validation loss, which
    is saved when it is found.  ``save_beside``: from a copy, while training goes on (``saver.py``).

    ``recompute``: a layer's activations are computed again in the backward pass instead of kept.  ``compile``: the
    model's training steps run through torch.compile.  ``tensorboard``: event files are written beside the metrics
    (``events.py``).
    """

    steps: int | None = None
    minutes: float | None = None
    batch: int = 16
    accumulate: int = 1
    seed: int = 0
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    device: str = "cpu"
    eval_every: int = 250
    eval_tokens: int = 65536
    save_every: int = 500
    log_every: int = 10
    keep: int = 2
    keep_best: bool = True
    save_beside: bool = True
    recompute: bool = False
    compile: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "accumulate", "eval_every", "save_every", "log_every", "keep"):
            _check(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
        for name in ("steps", "minutes"):
            value = getattr(self, name)
            _check(value is None or value > 0, f"train.{name}", value, "above 0")
        for name in ("eval_tokens", "seed"):
            _check(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "0 or more")
        _check_precision(self.precision, self.device)

    @property
    def last_step(self) -> int | None:
        """None where only the clock ends the run."""
        return 1000 if self.steps is None and self.minutes is None else self.steps


@dataclass(frozen=True)
class CompressConfig:
    """A compressor of the cache of ``model`` (a checkpoint), which makes one summary of ``ratio`` tokens.

    It is trained to stand for all but the first ``sinks`` and the latest ``recent`` tokens of a row, for ``every``
    queries at a time, as ``hierarchy(recent, sinks=, every=, ratio=)`` lets tokens descend.  ``hidden``: units of its
    correction, for each kv head.
    """

    model: str | None = None
    ratio: int = 8
    recent: int = 64
    every: int = 16
    sinks: int = 0
    hidden: int = 16

    def __post_init__(self) -> None:
        for name, least in (("ratio", 2), ("recent", 1), ("every", 1), ("sinks", 0), ("hidden", 1)):
            _check(getattr(self, name) >= least, f"compress.{name}", getattr(self, name), f"at least {least}")

    def check_context(self, context: int) -> None:
        """ConfigError where nothing of a row of ``context`` tokens would be summarised."""
        last = (context - 1) // self.every * self.every
        if max(0, last - self.recent) // self.ratio * self.ratio <= self.sinks:
            raise ConfigError(
                f"compress.recent: of rows of {context} tokens nothing is older than {self.recent}",
                f"train on a longer --context than {self.sinks + self.recent + self.every + self.ratio}",
            )


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021; ``model/lora.py``) of ``rank``, scaled by ``alpha`` / rank (``rslora``: alpha
    / sqrt(rank)), beside the linear parts that ``targets`` name: "all", "q,v", or a list, with dotted patterns in it.

    ``dropout``: of an adapter's input, while it is trained.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: str | tuple[str, ...] = ("q", "v")
    dropout: float = 0.0
    rslora: bool = False

    def __post_init__(self) -> None:
        _check(self.rank >= 1, "lora.rank", self.rank, "at least 1")
        _check(self.alpha > 0, "lora.alpha", self.alpha, "above 0")
        _check(0 <= self.dropout < 1, "lora.dropout", self.dropout, "in [0, 1)")
        if not self.names:
            raise ConfigError("lora.targets: no part is named", 'name some, as in targets = ["q", "v"], or "all"')

    @property
    def names(self) -> tuple[str, ...]:
        """The targets, one by one."""
        said = self.targets.split(",") if isinstance(self.targets, str) else self.targets
        return tuple(name.strip() for name in said if name.strip())

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True)
class RunConfig:
    """One training run.  ``model`` is the table as it was written; ``resolve`` makes a ModelConfig of it."""

    model: Mapping[str, Any] = field(default_factory=dict)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    compress: CompressConfig = field(default_factory=CompressConfig)
    lora: LoraConfig | None = None

    def __post_init__(self) -> None:
        init, others = self.model.get("init"), sorted({*self.model} - {"init"})
        if "init" in self.model and not (isinstance(init, str) and init):
            raise ConfigError(f"model.init: expected a checkpoint's path or name, found {init!r}")
        if "init" in self.model and others:
            raise ConfigError(
                f"model.{others[0]}: the model is {init}, as it is", "leave it out, or leave model.init out"
            )
        if self.lora is not None and init is None:
            raise ConfigError("[lora]: adapters stand beside a trained model", "name its checkpoint: --init MODEL")

    @property
    def init(self) -> str | None:
        """The checkpoint that training goes on from; None of a model that begins at random."""
        found = self.model.get("init")
        return found if isinstance(found, str) else None

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> RunConfig:
        """Raises ConfigError naming the table and the key."""
        for name, table in content.items():
            if name not in TABLES:
                raise ConfigError(f"unknown table [{name}]", nearest(name, TABLES))
            if not isinstance(table, Mapping):
                raise ConfigError(f"{name}: expected a table, found {table!r}")
        return RunConfig(
            dict(content.get("model", {})),
            from_dict(DataConfig, content.get("data", {}), "data"),
            from_dict(TokenizerConfig, content.get("tokenizer", {}), "tokenizer"),
            from_dict(ObjectiveConfig, content.get("objective", {}), "objective"),
            from_dict(OptimConfig, content.get("optim", {}), "optim"),
            from_dict(TrainConfig, content.get("train", {}), "train"),
            from_dict(CompressConfig, content.get("compress", {}), "compress"),
            from_dict(LoraConfig, content["lora"], "lora") if "lora" in content else None,
        )

    @staticmethod
    def load(path: Path) -> RunConfig:
        """From a TOML file.  Raises ConfigError naming the file."""
        return RunConfig.from_dict(read_toml(path))

    def to_dict(self) -> dict[str, Any]:
        """As :meth:`from_dict` reads it; without [lora] where there is none."""
        content: dict[str, Any] = to_dict(self)
        return content if self.lora is not None else {name: content[name] for name in content if name != "lora"}

    def resolve(self, vocab: int) -> ModelConfig:
        """The model's config, given the tokenizer's size: the preset, what differs from it, vocab and limit.

        ConfigError where training goes on from a checkpoint, which has its own (``start.py``).
        """
        if self.init is not None:
            raise ConfigError(f"model.init: the model is {self.init}, as it is")
        table = _with_nulls(self.model)
        name = table.pop("preset", None if table.keys() & {"decoder", "encoder"} else "small")
        dotted = table.pop("set", {})
        if name is not None and name not in PRESETS:
            raise ConfigError(f"model.preset: {name!r} is not known", nearest(str(name), PRESETS))
        base = {"embed": {}} if name is None else to_dict(PRESETS[name](vocab, self.data.context))
        merged = override(_merge(base, table), dotted)
        _reach(merged, "vocab", vocab, "the tokenizer's vocabulary")
        _reach(merged, "limit", self.data.context, "data.context")
        if isinstance(merged.get("source"), dict):
            _reach(merged["source"], "limit", self.data.context, "data.context", "source.")
        return ModelConfig.from_dict(merged)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"no such file: {path}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def assigned(content: Mapping[str, Any], pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """A run file's tables with ``("optim.lr", "1e-3")`` and the like put in.

    A key begins with its table's name; one that does not is the model's (``decoder.layers``).  Values are JSON where
    they can be, else text; of another kind than a key asks for, they are refused when the tables are read.
    """
    made = {name: dict(table) if isinstance(table, Mapping) else table for name, table in content.items()}
    for key, text in pairs:
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        name, _, inner = key.partition(".")
        if name not in TABLES or not inner:
            name, inner = "model", key
        table = made.setdefault(name, {})
        if not isinstance(table, dict):
            continue  # what is no table is refused by RunConfig, by name
        if name == "model" and inner != "preset":
            table["set"] = {**table.get("set", {}), inner: value}
        else:
            table[inner] = value
    return made


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any], where: str = "") -> list[str]:
    """Dotted keys whose values differ, as ``"train.lr: 0.001 there, 0.01 here"``; FREE ones never do."""
    found: list[str] = []
    for key in sorted({*stored, *wanted}):
        dotted = f"{where}{key}"
        there, here = stored.get(key), wanted.get(key)
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            found += differences(there, here, f"{dotted}.")
        elif there != here and dotted not in FREE:
            found.append(f"{dotted}: {there!r} there, {here!r} here")
    return found


def _with_nulls(table: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in table.items():
        found[key] = _with_nulls(value) if isinstance(value, Mapping) else None if value == "null" else value
    return found


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables merge; everything else of ``over`` replaces.  A table of another ``kind`` replaces whole."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        same = (
            isinstance(below, Mapping) and isinstance(value, Mapping) and value.get("kind") in (None, below.get("kind"))
        )
        merged[key] = _merge(below, value) if same else value  # type: ignore[arg-type]
    return merged


def _reach(table: dict[str, Any], key: str, least: int, what: str, where: str = "") -> None:
    if table.setdefault(key, least) < least:
        raise ConfigError(f"model.{where}{key}: {table[key]} is below {least}, {what}")


def _check(holds: bool, where: str, value: object, must: str) -> None:
    if not holds:
        raise ConfigError(f"{where}: must be {must}, found {value}")


def _check_precision(precision: str, device: str) -> None:
    if precision == "fp16" and device.startswith("cpu"):
        raise ConfigError(
            "train.precision: fp16 compute on a CPU is refused: its matrix products stall there for minutes",
            "use bf16 or fp32",
        )
