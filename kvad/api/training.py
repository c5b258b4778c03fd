"""``kvad.train``: settings become a run file's tables, then a run with progress and callbacks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from kvad import evaluation
from kvad.cache import sizing
from kvad.errors import UsageError, check_names
from kvad.train import config as config_lib
from kvad.train import loop, monitoring, setup
from kvad.train.config import RunConfig

if TYPE_CHECKING:
    from kvad.train.monitoring import Callback, TrainingResult

SETTING_TABLES = {  # a setting is a key of the first table that has it, under its own name
    "train": config_lib.TrainConfig, "data": config_lib.DataConfig, "tokenizer": config_lib.TokenizerConfig,
    "optim": config_lib.OptimConfig, "callbacks": config_lib.CallbacksConfig,
}  # fmt: skip
RENAMED_SETTINGS = {
    "preset": "model.preset", "init": "model.init", "objective": "objective.kind", "lora_rank": "lora.rank",
}  # fmt: skip


class TrainSettings(TypedDict, total=False):
    """Settings of ``train``: the options of ``kvad train``, and any field of the run file's tables by its name."""

    preset: str  # model preset, such as "tiny" or "encoder-tiny"
    init: str | Path  # checkpoint to start from
    objective: str
    lora_rank: int
    kind: str  # tokenizer: bpe, byte, char or word
    vocab_size: int
    seq_len: int
    file_suffixes: Sequence[str]
    validation_fraction: float
    steps: int
    minutes: float
    batch_size: int
    gradient_accumulation_steps: int
    lr: float
    min_lr: float
    warmup_steps: int
    seed: int
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    device: str
    eval_interval: int
    save_interval: int
    prompts: Sequence[str]  # continued at every evaluation
    check_cache: bool


def train(
    corpus: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    config: RunConfig | Mapping[str, Any] | str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
    **settings: Unpack[TrainSettings],
) -> TrainingResult:
    """Train a model on text files and folders, or on files of pairs, as ``kvad train`` does.

    Args:
        corpus: Files and folders; () with ``resume`` means those of the run.
        out: Folder of the run.
        config: Run file (TOML), its tables, or a RunConfig; ``settings`` override it.
        resume: Continue the run in ``out`` from its newest checkpoint, bit for bit.
        overwrite: Replace a run in ``out``.
        progress: Print losses and time left on stderr.
        callbacks: More callbacks.
        **settings: ``TrainSettings``.

    Raises:
        KvadError: Before anything is written, if the run cannot work.
    """
    out = Path(out)
    paths = [Path(each) for each in ([corpus] if isinstance(corpus, str | Path) else corpus)]
    stored = loop.read_run_config(out)[0] if resume else None
    tables = _run_tables(config) if config is not None or stored is None else stored.to_dict()
    tables = merge_settings(tables, settings)
    run = with_seq_len(RunConfig.from_dict(tables), tables, stored)
    if not progress:
        return run_training(run, paths, out, callbacks, resume=resume, overwrite=overwrite)
    with closing(monitoring.make_progress()) as reporter:
        return run_training(run, paths, out, [reporter, *callbacks], resume=resume, overwrite=overwrite)


def run_training(
    config: RunConfig,
    corpus: setup.CorpusArgument,
    out: Path,
    callbacks: Sequence[Callback],
    *,
    resume: bool = False,
    overwrite: bool = False,
    data_parallel: loop.DataParallelGroup | None = None,
) -> TrainingResult:
    """Train or resume a run whose configuration is complete, with the callbacks that it requests."""
    if config.objective.kind != "summarizer" and config.summarizer != config_lib.SummarizerConfig():
        hint = "--init MODEL without it continues a checkpoint"
        raise UsageError("[summarizer] is for --objective summarizer", hint)
    if config.callbacks.requested:  # they import the engine, which plain runs do not need
        callbacks = [*callbacks, *evaluation.build_callbacks(config.callbacks)]
    group = loop.init_data_parallel(os.environ, config.train) if data_parallel is None else data_parallel
    options = loop.RunOptions(
        available=sizing.available_bytes(), callbacks=callbacks, measure_peak=True, data_parallel=group
    )
    if resume:
        return loop.resume_model(out, config=config, corpus=corpus, **options)
    return loop.train_model(config, corpus, out, overwrite=overwrite, **options)


def _run_tables(config: RunConfig | Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    if isinstance(config, RunConfig):
        return config.to_dict()
    return config_lib.read_toml(Path(config)) if isinstance(config, str | Path) else dict(config or {})


def merge_settings(tables: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a run file with settings under their own or a renamed key.

    Raises:
        UsageError: For an unknown setting.
    """
    keys = {f.name: f"{table}.{f.name}" for table, kind in SETTING_TABLES.items() for f in dataclasses.fields(kind)}
    keys |= RENAMED_SETTINGS
    check_names(settings, tuple(keys))
    merged = {name: dict(value) if isinstance(value, Mapping) else value for name, value in tables.items()}
    for name, value in settings.items():
        set_key(merged, keys[name], str(value) if isinstance(value, Path) else value)
    return merged


def set_key(tables: dict[str, Any], key: str, value: object) -> None:
    """Set ``table.key``; RunConfig refuses a table that is none."""
    table, _, name = key.partition(".")
    inner = tables.setdefault(table, {})
    if isinstance(inner, dict):
        inner[name] = list(value) if isinstance(value, tuple) else value


def with_seq_len(config: RunConfig, tables: Mapping[str, Any], stored: RunConfig | None = None) -> RunConfig:
    """Set ``data.seq_len`` of a run that starts from a checkpoint and does not set it in ``tables``.

    It becomes that of ``stored``, the run that is resumed, else at most what the checkpoint allows.

    Raises:
        CheckpointError: If the model cannot be opened.
    """
    if "seq_len" in tables.get("data", {}) or (config.init is None and config.summarizer.model is None):
        return config
    if stored is not None:
        return dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=stored.data.seq_len))
    return setup.initialize.clamp_seq_len(config)
