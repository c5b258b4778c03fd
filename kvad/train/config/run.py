"""Run files: a training run as frozen dataclasses.

A run file has these tables::

    [model]       a complete ModelConfig, or preset = "small" and overrides; vocab_size and max_seq_len may be left out.
                  Or init = "MODEL" alone: a checkpoint to continue from, with its tokenizer
    [data]        seq_len, file_suffixes, document_unit, ...                     DataConfig
    [tokenizer]   kind, path, vocab_size, ...                                    TokenizerConfig
    [objective]   kind and its options                                           ObjectiveConfig
    [optim]       name, lr, schedule, weight_decay, max_grad_norm, ...           OptimConfig (optim.py)
    [train]       steps, minutes, batch_size, precision, save_interval, ...      TrainConfig
    [callbacks]   check_cache, prompts, bleu_samples, ...                        CallbacksConfig
    [summarizer]  model, ratio, recent, ...: instead of [model] and [tokenizer]
                  if objective.kind = "summarizer"                               SummarizerConfig
    [lora]        rank, alpha, target_modules, ...: adapters on a frozen model.init      LoraConfig

Unknown tables and keys are refused with the nearest known name. TOML has no null: in [model] the text "null" is one.
Standard library only.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from kvad import config as cfg
from kvad import storage
from kvad.config import ModelConfig
from kvad.errors import ConfigError, suggest
from kvad.train.config.optim import OptimConfig
from kvad.train.config.presets import MODEL_PRESETS


@dataclass(frozen=True)
class SourceConfig:
    """Source of a mixture."""

    paths: tuple[str, ...]  # files, folders, or one folder of `kvad data prepare`
    weight: cfg.PositiveFloat = 1.0  # share of the rows, in any unit

    def __post_init__(self) -> None:
        cfg.check_fields(self, "data.sources")
        if not self.paths:
            raise ConfigError("data.sources.paths: must not be empty", "Name at least one file or folder.")


@dataclass(frozen=True)
class DataConfig:
    """Texts of a run and how they become rows.

    ``order``: ``epochs`` cuts the corpus into rows, each used once per epoch, at a new offset every epoch; ``windows``
    starts every row at random (as nanoGPT does); ``sequential`` reads the corpus in order and shuffles
    ``shuffle_buffer`` rows at a time; ``stream`` does so without writing tokens to disk first (``data/streaming.py``).
    """

    seq_len: cfg.PositiveInt = 256  # tokens of a training row
    file_suffixes: tuple[str, ...] = ()  # files to read of a folder; () for all text files
    document_unit: Literal["files", "lines"] = "files"  # a document per file or per non-empty line
    encoding_errors: Literal["strict", "replace"] = "strict"  # for bytes that are not UTF-8
    validation_fraction: cfg.OpenFraction = 0.1  # of the tokens
    order: Literal["epochs", "windows", "sequential", "stream"] = "epochs"
    # `data/packing.py`; auto: documents are split, pairs use first-fit
    packing: Literal["auto", "split", "first-fit", "best-fit"] = "auto"
    reset_positions: bool = True  # positions restart in every document (`data/collate.py`)
    isolate_documents: bool = True  # documents do not attend to each other
    format: Literal["auto", "text", "lines", "jsonl", "pairs"] = "auto"  # `sources/formats.py`; auto: by file name
    text_field: str = "text"  # of JSON lines
    source_field: str = "source"  # of JSON lines with pairs
    target_field: str = "target"
    shuffle_buffer: cfg.PositiveInt = 1024  # rows
    sources: tuple[SourceConfig, ...] = ()  # a mixture, instead of named texts

    def __post_init__(self) -> None:
        cfg.check_fields(self, "data")


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer to load from ``path``, or to train on the corpus."""

    kind: Literal["bpe", "byte", "char", "word"] = "bpe"
    path: str | None = None
    vocab_size: int = 4096
    min_frequency: int = 1
    lowercase: bool = False
    special_tokens: tuple[str, ...] | None = None


@dataclass(frozen=True)
class SummarizerConfig:
    """Summarizer of the cache of ``model``, which merges ``ratio`` tokens into one summary.

    It is trained to replace all but the first ``num_sinks`` and the latest ``recent`` tokens of a row, for ``interval``
    queries at a time, as ``tiered(recent, num_sinks=, interval=, ratio=)`` demotes tokens.
    """

    model: str | None = None  # a checkpoint
    ratio: Annotated[int, cfg.Range(2)] = 8
    recent: cfg.PositiveInt = 64
    interval: cfg.PositiveInt = 16
    num_sinks: cfg.NonNegativeInt = 0
    hidden_size: cfg.PositiveInt = 16  # hidden units per key-value head

    def __post_init__(self) -> None:
        cfg.check_fields(self, "summarizer")

    def check_context(self, context: int) -> None:
        """Raise ConfigError if nothing of a row of ``context`` tokens would be summarized."""
        last = (context - 1) // self.interval * self.interval
        if max(0, last - self.recent) // self.ratio * self.ratio <= self.num_sinks:
            raise ConfigError(
                f"summarizer.recent: rows of {context} tokens have nothing older than {self.recent} tokens",
                f"train on a longer --seq-len than {self.num_sinks + self.recent + self.interval + self.ratio}",
            )


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021; ``model/lora.py``) on linear modules."""

    rank: cfg.PositiveInt = 8
    alpha: cfg.PositiveFloat = 16.0  # scale: alpha / rank
    target_modules: str | tuple[str, ...] = ("q", "v")  # "all", "q,v", or a list that may contain dotted patterns
    dropout: cfg.Fraction = 0.0  # of an adapter's input, in training
    use_rslora: bool = False  # scale: alpha / sqrt(rank)

    def __post_init__(self) -> None:
        cfg.check_fields(self, "lora")
        if not self.target_names:
            raise ConfigError(
                "lora.target_modules: must not be empty", 'For example: target_modules = ["q", "v"], or "all".'
            )

    @property
    def target_names(self) -> tuple[str, ...]:
        """Target modules as a tuple."""
        names = self.target_modules.split(",") if isinstance(self.target_modules, str) else self.target_modules
        return tuple(filter(None, map(str.strip, names)))

    @property
    def scale(self) -> float:
        """Factor of the product B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True)
class ObjectiveConfig:
    """Objective of a run and its options.

    ``auto`` is ``next-token`` for a decoder, ``seq2seq`` for an encoder-decoder, ``masked-lm`` for an encoder;
    ``resolve_objective`` (``setup/objective_factory.py``) checks which kinds a model can have, and which keys a kind.
    """

    kind: Literal[
        "auto", "next-token", "seq2seq", "masked-lm", "span-corruption", "tag", "classify", "chat", "summarizer"
    ] = "auto"
    label_smoothing: cfg.Fraction = 0.0
    noise_density: cfg.OpenFraction = 0.15  # masked-lm, span-corruption: share of hidden tokens
    mean_span_length: Annotated[float, cfg.Range(1)] = 3.0  # span-corruption
    # seq2seq: final share of decoder inputs that are the model's predictions
    scheduled_sampling: Annotated[float, cfg.Range(0, 1)] = 0.0
    scheduled_sampling_schedule: Literal["linear", "exponential", "sigmoid"] = "linear"
    scheduled_sampling_steps: cfg.PositiveInt | None = None  # steps of the rise; None: the run's
    chat_template: str | None = None  # chat: a file; None: the tokenizer's, else ChatML
    text_field: str = "text"  # classify: in JSONL
    label_field: str = "label"  # classify: in JSONL
    input_mask_ratio: cfg.Fraction = 0.0  # tag, classify: share of input tokens masked in training
    # Mixtures of experts (`objectives/expert_balance.py`):
    router_aux_loss_coef: cfg.NonNegativeFloat = 0.0  # weight of the load-balancing loss, usually 0.01
    router_z_loss_coef: cfg.NonNegativeFloat = 0.0  # weight of the squared logsumexp of router logits, usually 0.001
    router_bias_update_rate: cfg.NonNegativeFloat = 0.0  # step of the selection biases, usually 0.001

    def __post_init__(self) -> None:
        cfg.check_fields(self, "objective")


@dataclass(frozen=True)
class TrainConfig:
    """Length, batches, evaluation, checkpoints and acceleration of a run.

    It ends after ``steps`` optimizer steps or ``minutes`` of training, whichever is first (neither: 1,000 steps).
    """

    steps: cfg.PositiveInt | None = None
    minutes: cfg.PositiveFloat | None = None
    batch_size: cfg.PositiveInt = 16
    gradient_accumulation_steps: cfg.PositiveInt = 1  # micro-batches of batch_size rows per step
    seed: cfg.NonNegativeInt = 0
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"  # auto: bf16 autocast if it is faster here, else fp32
    device: str = "cpu"
    eval_interval: cfg.PositiveInt = 250  # steps
    eval_tokens: cfg.NonNegativeInt = 65536  # of the validation split, evenly spread; 0: all
    save_interval: cfg.PositiveInt = 500  # steps
    log_interval: cfg.PositiveInt = 10  # steps
    keep_checkpoints: cfg.PositiveInt = 2  # number of newest checkpoints to keep
    keep_best: bool = True  # also keep the one with the lowest validation loss, saved when it is found
    async_save: bool = True  # write a copy in the background (`loop/async_checkpointer.py`)
    activation_checkpointing: bool = False  # recompute activations in the backward pass
    compile: bool = False  # torch.compile in training steps
    tensorboard: bool = False  # also write event files

    def __post_init__(self) -> None:
        cfg.check_fields(self, "train")
        if self.precision == "fp16" and self.device.startswith("cpu"):
            raise ConfigError(
                "train.precision: fp16 must not be used on a CPU, where its matrix products take minutes",
                "Use bf16 or fp32.",
            )

    @property
    def last_step(self) -> int | None:
        """Last step; None if only the clock ends the run."""
        return 1000 if self.steps is None and self.minutes is None else self.steps


@dataclass(frozen=True)
class CallbacksConfig:
    """Callbacks at every evaluation, on a copy of the weights (``kvad.evaluation.training_callbacks``)."""

    check_cache: bool = False  # compare the cached with the uncached model
    prompts: tuple[str, ...] = ()  # texts to continue (encoder-decoder: to answer)
    max_tokens: cfg.PositiveInt = 64  # of each continuation
    temperature: cfg.NonNegativeFloat = 0.0  # 0: greedy
    bleu_samples: cfg.PositiveInt | None = None  # number of held-out pairs for BLEU

    def __post_init__(self) -> None:
        cfg.check_fields(self, "callbacks")
        if "" in self.prompts:
            raise ConfigError(f"callbacks.prompts: must be non-empty texts, got {list(self.prompts)}")
        for name in ("max_tokens", "temperature"):
            if not self.prompts and getattr(self, name) != getattr(CallbacksConfig, name):
                raise ConfigError(f"callbacks.{name}: has no meaning without callbacks.prompts", "Give prompts.")

    @property
    def requested(self) -> tuple[str, ...]:
        """Keys that request a callback."""
        return tuple(name for name in ("check_cache", "prompts", "bleu_samples") if getattr(self, name))


MODEL_KEYS = tuple(part.name for part in fields(ModelConfig))
# Keys that may change on resume: the length and the device of the run, and those on which none of its numbers depends.
RESUMABLE_KEYS = (
    *("train.steps", "train.minutes", "train.device"),
    *(f"train.{key}" for key in ("log_interval", "eval_interval", "save_interval", "keep_checkpoints", "keep_best")),
    *("train.async_save", "train.tensorboard"),
    *(f"callbacks.{key.name}" for key in fields(CallbacksConfig)),
)


@dataclass(frozen=True)
class RunConfig:
    """Configuration of a training run; ``resolve`` makes a ModelConfig of the table ``model``."""

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
            raise ConfigError(f"model.init: must be a checkpoint's path or name, got {init!r}")
        if "init" in self.model and others:
            raise ConfigError(f"model.{others[0]}: must not be given with model.init {init}", "Leave out one of them.")
        if self.objective.kind == "summarizer" and self.callbacks.requested:
            raise ConfigError(
                f"callbacks.{self.callbacks.requested[0]}: must not be given when a summarizer is trained",
                "Leave it out.",
            )
        if self.lora is not None and init is None:
            raise ConfigError("[lora]: adapters need a trained model", "Name its checkpoint: --init MODEL")

    @property
    def init(self) -> str | None:
        """Checkpoint to continue from; None for a new model."""
        init = self.model.get("init")
        return init if isinstance(init, str) else None

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> RunConfig:
        """Build from tables; ConfigErrors name table and key."""
        for name, table in content.items():
            if name not in TABLES:
                raise ConfigError(f"unknown table [{name}]", suggest(name, TABLES))
            if not isinstance(table, Mapping):
                raise ConfigError(f"{name}: must be a table, got {table!r}")
        return cfg.serialization.from_dict(RunConfig, content)

    @staticmethod
    def load(path: Path) -> RunConfig:
        """Read a TOML file; ConfigErrors name the file."""
        return RunConfig.from_dict(read_toml(path))

    def to_dict(self) -> dict[str, Any]:
        """Return tables for ``from_dict``, without [lora] if there is none."""
        content: dict[str, Any] = cfg.serialization.to_dict(self)
        if self.lora is None:
            del content["lora"]
        return content

    def resolve(self, vocab: int) -> ModelConfig:
        """Return the model config for a vocabulary size, from preset and overrides.

        Raises ConfigError if the run continues from a checkpoint, which has its own config, or a key is not valid.
        """
        if self.init is not None:
            raise ConfigError(f"model.init: the config is that of {self.init}")
        table = _with_nulls(self.model)
        name = table.pop("preset", None if table.keys() & {"decoder", "encoder"} else "small")
        dotted = table.pop("set", {})
        if name is not None and name not in MODEL_PRESETS:
            raise ConfigError(f"model.preset: unknown preset {name!r}", suggest(str(name), MODEL_PRESETS))
        base = {"embedding": {}} if name is None else MODEL_PRESETS[name](vocab, self.data.seq_len).to_dict()
        merged = cfg.serialization.override(_merge(base, table), dotted)
        _require_at_least(merged, "vocab_size", vocab, "the tokenizer's vocabulary")
        for where, part in (("", merged), ("encoder_input.", merged.get("encoder_input"))):
            if isinstance(part, dict):
                _require_at_least(part, "max_seq_len", self.data.seq_len, "data.seq_len", where)
        return ModelConfig.from_dict(merged)


TABLES = tuple(part.name for part in fields(RunConfig))


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file as tables."""
    try:
        return tomllib.loads(storage.filesystem.read_text(path))
    except FileNotFoundError as error:
        raise ConfigError(f"no such file: {path}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, a number of too many digits, deep nesting
        raise ConfigError(f"{path} is not TOML: {error}") from error


def apply_overrides(content: Mapping[str, Any], pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return a run file's tables with pairs such as ``("optim.lr", "1e-3")`` applied.

    A key begins with its table's name, else it belongs to the model (``decoder.num_layers``). Values are JSON if they
    parse, else text; wrong types are refused when the tables are read, other keys here.
    """
    tables = {name: dict(table) if isinstance(table, Mapping) else table for name, table in content.items()}
    for key, text in pairs:
        try:
            value = storage.strict_json.loads(text)
        except ValueError:
            value = text
        name, _, inner = key.partition(".")
        known = (*TABLES, *MODEL_KEYS)
        if inner and name not in known:
            message = f"unknown key {key!r}: {name!r} is neither a table nor a model key"
            raise ConfigError(message, suggest(name, known))
        if name not in TABLES or not inner:
            name, inner = "model", key
        table = tables.setdefault(name, {})
        if not isinstance(table, dict):
            continue  # RunConfig refuses it by name
        if name == "model" and inner != "preset":
            table["set"] = {**table.get("set", {}), inner: value}
        else:
            table[inner] = value
    return tables


def config_differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return keys with other values but RESUMABLE_KEYS, such as ``"optim.lr: 0.001 there, 0.01 here"``."""
    changes = _changed_keys(stored, wanted)
    return [f"{key}: {there!r} there, {here!r} here" for key, there, here in changes if key not in RESUMABLE_KEYS]


def resumable_changes(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return RESUMABLE_KEYS with other values, such as ``"train.steps: 1000 -> 2000"``."""
    changes = _changed_keys(stored, wanted)
    return [f"{key}: {there!r} -> {here!r}" for key, there, here in changes if key in RESUMABLE_KEYS]


def _changed_keys(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], where: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted({*stored, *wanted}):
        dotted = f"{where}{key}"
        there, here = stored.get(key), wanted.get(key)
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            yield from _changed_keys(there, here, f"{dotted}.")
        elif there != here:
            yield dotted, there, here


def _with_nulls(table: Mapping[str, Any]) -> dict[str, Any]:
    result = {}
    for key, value in table.items():
        result[key] = _with_nulls(value) if isinstance(value, Mapping) else None if value == "null" else value
    return result


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested tables; other values and tables of another ``kind`` replace."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        is_same_kind = (
            isinstance(below, Mapping) and isinstance(value, Mapping) and value.get("kind") in (None, below.get("kind"))
        )
        merged[key] = _merge(below, value) if is_same_kind else value  # type: ignore[arg-type]
    return merged


def _require_at_least(table: dict[str, Any], key: str, minimum: int, reason: str, where: str = "") -> None:
    if table.setdefault(key, minimum) < minimum:
        raise ConfigError(f"model.{where}{key}: must be at least {minimum}, {reason}, got {table[key]}")
