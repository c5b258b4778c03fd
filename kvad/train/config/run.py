"""What a training run is, as frozen dataclasses: a TOML file in ``runs/``, and what ``--resume`` holds a run against.

A run file has these tables::

    [model]       a whole ModelConfig, or preset = "small" and what differs from it; vocab and limit may be left out.
                  Or init = "MODEL" alone: a checkpoint that training goes on from, with its tokenizer
    [data]        context, suffixes, documents, errors, validation, ...   DataConfig (data_config.py)
    [tokenizer]   kind, path, vocab_size, ...                            TokenizerConfig
    [objective]   kind: what the model learns to say                     ObjectiveConfig
    [optim]       name, lr, schedule, weight_decay, clip, ema, ...        OptimConfig (optim_config.py)
    [train]       steps, minutes, batch, precision, save_every, ...      TrainConfig
    [callbacks]       check_cache, prompts, bleu, ...: what is looked at at evaluations    WatchConfig
    [summarizer]    model, ratio, recent, ...: what objective.kind = "compress" trains, in the place of [model] and
                  [tokenizer]                                            CompressConfig (adapt_config.py)
    [lora]        rank, alpha, targets, ...: adapters are trained beside a frozen model.init    LoraConfig

Unknown tables and keys are refused with the nearest known name.  TOML has no null: in [model] the text "null" is one.
Standard library only.

[compress] and [lora] of a run file: what is trained beside a model whose own weights stay.

Standard library only.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from kvad import config
from kvad.config import ModelConfig
from kvad.errors import ConfigError, suggest
from kvad.train.config.data import DataConfig, TokenizerConfig
from kvad.train.config.optim import OptimConfig, require
from kvad.train.config.presets import MODEL_PRESETS


@dataclass(frozen=True)
class SummarizerConfig:
    """A compressor of the cache of ``model`` (a checkpoint), which makes one summary of ``ratio`` tokens.

    It is trained to stand for all but the first ``sinks`` and the latest ``recent`` tokens of a row, for ``every``
    queries at a time, as ``hierarchy(recent, sinks=, every=, ratio=)`` lets tokens descend.  ``hidden``: units of its
    correction, for each kv head.
    """

    model: str | None = None
    ratio: int = 8
    recent: int = 64
    interval: int = 16
    num_sinks: int = 0
    hidden_size: int = 16

    def __post_init__(self) -> None:
        for name, least in (("ratio", 2), ("recent", 1), ("interval", 1), ("num_sinks", 0), ("hidden_size", 1)):
            require(getattr(self, name) >= least, f"compress.{name}", getattr(self, name), f"at least {least}")

    def check_context(self, context: int) -> None:
        """ConfigError where nothing of a row of ``context`` tokens would be summarised."""
        last = (context - 1) // self.interval * self.interval
        if max(0, last - self.recent) // self.ratio * self.ratio <= self.num_sinks:
            raise ConfigError(
                f"summarizer.recent: of rows of {context} tokens nothing is older than {self.recent}",
                f"train on a longer --context than {self.num_sinks + self.recent + self.interval + self.ratio}",
            )


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021; ``model/lora.py``) of ``rank``, scaled by ``alpha`` / rank (``rslora``: alpha
    / sqrt(rank)), beside the linear parts that ``targets`` name: "all", "q,v", or a list, with dotted patterns in it.

    ``dropout``: of an adapter's input, while it is trained.
    """

    rank: int = 8
    alpha: float = 16.0
    target_modules: str | tuple[str, ...] = ("q", "v")
    dropout: float = 0.0
    use_rslora: bool = False

    def __post_init__(self) -> None:
        require(self.rank >= 1, "lora.rank", self.rank, "at least 1")
        require(self.alpha > 0, "lora.alpha", self.alpha, "above 0")
        require(0 <= self.dropout < 1, "lora.dropout", self.dropout, "in [0, 1)")
        if not self.target_names:
            raise ConfigError(
                "lora.target_modules: no part is named", 'name some, as in targets = ["q", "v"], or "all"'
            )

    @property
    def target_names(self) -> tuple[str, ...]:
        """The targets, one by one."""
        said = self.target_modules.split(",") if isinstance(self.target_modules, str) else self.target_modules
        return tuple(name.strip() for name in said if name.strip())

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


TABLES = ("model", "data", "tokenizer", "objective", "optim", "train", "watch", "compress", "lora")
MODEL = tuple(part.name for part in fields(ModelConfig))


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
    label_smoothing: float = 0.0
    noise_density: float = 0.15
    mean_span_length: float = 3.0
    scheduled_sampling: float = 0.0
    scheduled_sampling_schedule: Literal["linear", "exponential", "sigmoid"] = "linear"
    scheduled_sampling_steps: int | None = None
    chat_template: str | None = None
    text_field: str = "text"
    label_field: str = "label"
    input_mask_ratio: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.label_smoothing < 1, "objective.label_smoothing", self.label_smoothing, "in [0, 1)")
        require(0 < self.noise_density < 1, "objective.noise_density", self.noise_density, "between 0 and 1")
        require(self.mean_span_length >= 1, "objective.mean_span_length", self.mean_span_length, "at least 1")
        require(0 <= self.scheduled_sampling <= 1, "objective.scheduled_sampling", self.scheduled_sampling, "in [0, 1]")
        require(0 <= self.input_mask_ratio < 1, "objective.input_mask_ratio", self.input_mask_ratio, "in [0, 1)")
        steps = self.scheduled_sampling_steps
        require(steps is None or steps >= 1, "objective.scheduled_sampling_steps", steps, "at least 1")


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
    batch_size: int = 16
    gradient_accumulation_steps: int = 1
    seed: int = 0
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    device: str = "cpu"
    eval_interval: int = 250
    eval_tokens: int = 65536
    save_interval: int = 500
    log_interval: int = 10
    keep_checkpoints: int = 2
    keep_best: bool = True
    async_save: bool = True
    activation_checkpointing: bool = False
    compile: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in (
            "batch_size",
            "gradient_accumulation_steps",
            "eval_interval",
            "save_interval",
            "log_interval",
            "keep_checkpoints",
        ):
            require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
        for name in ("steps", "minutes"):
            value = getattr(self, name)
            require(value is None or value > 0, f"train.{name}", value, "above 0")
        for name in ("eval_tokens", "seed"):
            require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "0 or more")
        _check_precision(self.precision, self.device)

    @property
    def last_step(self) -> int | None:
        """None where only the clock ends the run."""
        return 1000 if self.steps is None and self.minutes is None else self.steps


@dataclass(frozen=True)
class CallbacksConfig:
    """What is looked at at every evaluation, on a copy of the weights (``kvad.evaluation.training_callbacks``): no number of the run
    changes.

    ``check_cache``: a cache beside the model without one.  ``prompts``: how they go on (an encoder-decoder: what it
    answers), for ``prompt_tokens`` tokens at most, at ``temperature`` (0: greedily).  ``bleu``: of so many held-out
    pairs (None: of none).
    """

    check_cache: bool = False
    prompts: tuple[str, ...] = ()
    max_tokens: int = 64
    temperature: float = 0.0
    bleu_samples: int | None = None

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, "callbacks.max_tokens", self.max_tokens, "at least 1")
        require(self.temperature >= 0, "callbacks.temperature", self.temperature, "0 or more")
        require(
            self.bleu_samples is None or self.bleu_samples >= 1,
            "callbacks.bleu_samples",
            self.bleu_samples,
            "at least 1",
        )
        require("" not in self.prompts, "callbacks.prompts", list(self.prompts), "texts that are not empty")
        for name in ("max_tokens", "temperature"):
            if not self.prompts and getattr(self, name) != getattr(CallbacksConfig, name):
                raise ConfigError(f"watch.{name}: means nothing without callbacks.prompts", "say what is to go on")

    @property
    def requested(self) -> tuple[str, ...]:
        """The keys that ask for something to be looked at."""
        return tuple(name for name in ("check_cache", "prompts", "bleu_samples") if getattr(self, name))


# What may change on resume, as no number does.
RESUMABLE_KEYS = (
    *(
        f"train.{key}"
        for key in (
            "log_interval",
            "eval_interval",
            "save_interval",
            "keep_checkpoints",
            "keep_best",
            "async_save",
            "tensorboard",
        )
    ),
    *(f"callbacks.{key.name}" for key in fields(CallbacksConfig)),
)


@dataclass(frozen=True)
class RunConfig:
    """One training run.  ``model`` is the table as it was written; ``resolve`` makes a ModelConfig of it."""

    model: Mapping[str, Any] = field(default_factory=dict)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)
    summarizer: SummarizerConfig = field(default_factory=SummarizerConfig)
    lora: LoraConfig | None = None

    def __post_init__(self) -> None:
        init, others = self.model.get("init"), sorted({*self.model} - {"init"})
        if "init" in self.model and not (isinstance(init, str) and init):
            raise ConfigError(f"model.init: expected a checkpoint's path or name, found {init!r}")
        if "init" in self.model and others:
            raise ConfigError(
                f"model.{others[0]}: the model is {init}, as it is", "leave it out, or leave model.init out"
            )
        if self.objective.kind == "compress" and self.callbacks.requested:
            raise ConfigError(
                f"watch.{self.callbacks.requested[0]}: looks at a model, and a compressor is trained", "leave it out"
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
                raise ConfigError(f"unknown table [{name}]", suggest(name, TABLES))
            if not isinstance(table, Mapping):
                raise ConfigError(f"{name}: expected a table, found {table!r}")
        return RunConfig(
            dict(content.get("model", {})),
            config.serialization.from_dict(DataConfig, content.get("data", {}), "data"),
            config.serialization.from_dict(TokenizerConfig, content.get("tokenizer", {}), "tokenizer"),
            config.serialization.from_dict(ObjectiveConfig, content.get("objective", {}), "objective"),
            config.serialization.from_dict(OptimConfig, content.get("optim", {}), "optim"),
            config.serialization.from_dict(TrainConfig, content.get("train", {}), "train"),
            config.serialization.from_dict(CallbacksConfig, content.get("watch", {}), "watch"),
            config.serialization.from_dict(SummarizerConfig, content.get("compress", {}), "compress"),
            config.serialization.from_dict(LoraConfig, content["lora"], "lora") if "lora" in content else None,
        )

    @staticmethod
    def load(path: Path) -> RunConfig:
        """From a TOML file.  Raises ConfigError naming the file."""
        return RunConfig.from_dict(read_toml(path))

    def to_dict(self) -> dict[str, Any]:
        """As :meth:`from_dict` reads it; without [lora] where there is none."""
        content: dict[str, Any] = config.serialization.to_dict(self)
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
        if name is not None and name not in MODEL_PRESETS:
            raise ConfigError(f"model.preset: {name!r} is not known", suggest(str(name), MODEL_PRESETS))
        base = (
            {"embedding": {}}
            if name is None
            else config.serialization.to_dict(MODEL_PRESETS[name](vocab, self.data.seq_len))
        )
        merged = config.serialization.override(_merge(base, table), dotted)
        _require_at_least(merged, "vocab_size", vocab, "the tokenizer's vocabulary")
        _require_at_least(merged, "max_seq_len", self.data.seq_len, "data.seq_len")
        if isinstance(merged.get("encoder_input"), dict):
            _require_at_least(
                merged["encoder_input"], "max_seq_len", self.data.seq_len, "data.seq_len", "encoder_input."
            )
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


def apply_overrides(content: Mapping[str, Any], pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """A run file's tables with ``("optim.lr", "1e-3")`` and the like put in.

    A key begins with its table's name; one that does not is the model's (``decoder.num_layers``).  Values are JSON where
    they can be, else text; of another kind than a key asks for, they are refused when the tables are read.  Raises
    ConfigError for a key that begins with neither.
    """
    made = {name: dict(table) if isinstance(table, Mapping) else table for name, table in content.items()}
    for key, text in pairs:
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        name, _, inner = key.partition(".")
        if inner and name not in (*TABLES, *MODEL):
            raise ConfigError(
                f"unknown key {key!r}: {name!r} is no table, and no part of a model", suggest(name, (*TABLES, *MODEL))
            )
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


def config_differences(stored: Mapping[str, Any], wanted: Mapping[str, Any], where: str = "") -> list[str]:
    """Dotted keys whose values differ, as ``"train.lr: 0.001 there, 0.01 here"``; FREE ones never do."""
    found: list[str] = []
    for key in sorted({*stored, *wanted}):
        dotted = f"{where}{key}"
        there, here = stored.get(key), wanted.get(key)
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            found += config_differences(there, here, f"{dotted}.")
        elif there != here and dotted not in RESUMABLE_KEYS:
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


def _require_at_least(table: dict[str, Any], key: str, least: int, what: str, where: str = "") -> None:
    if table.setdefault(key, least) < least:
        raise ConfigError(f"model.{where}{key}: {table[key]} is below {least}, {what}")


def _check_precision(precision: str, device: str) -> None:
    if precision == "fp16" and device.startswith("cpu"):
        raise ConfigError(
            "train.precision: fp16 compute on a CPU is refused: its matrix products stall there for minutes",
            "use bf16 or fp32",
        )
