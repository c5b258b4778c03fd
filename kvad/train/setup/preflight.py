"""What is refused before a run is one: a place that it cannot have, a machine that cannot do it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from kvad import checkpoint
from kvad.errors import CheckpointError, ConfigError, SaveError, UsageError
from kvad.train import config as config_lib
from kvad.train import data, monitoring
from kvad.train.config import CallbacksConfig, RunConfig, TrainConfig
from kvad.train.monitoring import Callback
from kvad.train.setup.run_data import CorpusArgument
from kvad.train.sources import PairPaths

TOKENS_FOLDER = "data"  # where in a run's folder its tokens lie

RUN_TEXT_SUFFIXES = (".json", ".jsonl", ".svg", ".toml")  # what a run's folder holds that a corpus would take for text


def check_run_folder(config: RunConfig, corpus: CorpusArgument, out: Path, overwrite: bool) -> bool:
    """Whether ``out`` holds a run that is to give way.  UsageError where it may not, and where a new run would write
    over anything that is no run's: the texts that it is to read, a folder of the same name as its tokens'."""
    tokens, run_file = out / TOKENS_FOLDER, out / config_lib.toml.RUN_FILE
    for source in (corpus, *([Path(path) for path in each.paths] for each in config.data.sources)):
        check_output_folder(out, source, config.data.file_suffixes)
        for path in _paths(source):
            if path.resolve().is_relative_to(tokens.resolve()):
                raise UsageError(
                    f"{path} lies in {tokens}, where a run of {out} writes its tokens", "choose another --out"
                )
    if tokens.exists() and not _is_tokens(tokens):
        raise UsageError(f"{tokens} is there, and a run of {out} writes its tokens there", "choose another --out")
    if run_file.exists() and not config_lib.toml.is_run_file(run_file):
        raise UsageError(
            f"{run_file} is there, and a run of {out} writes its configuration there",
            "give it another name, or choose another --out",
        )
    return _has_run(out, overwrite)


def _paths(named: CorpusArgument) -> Sequence[Path]:
    if not isinstance(named, PairPaths):
        return named
    return [path for item in (*named.files, *named.held_out) for path in item]


def _is_tokens(folder: Path) -> bool:
    """Whether a run made it: a store, a store for each part of a mixture, or nothing yet."""
    if not folder.is_dir() or data.token_store.is_prepared(folder):
        return False
    if (folder / data.token_store.MANIFEST).is_file():
        return data.token_store.is_store(folder)
    return all(part.name.isdigit() and data.token_store.is_store(part) for part in folder.iterdir())


def _has_run(out: Path, overwrite: bool) -> bool:
    """Whether a folder holds a run already.  UsageError where it may not give way."""
    earlier = checkpoint.folder.list_steps(out)
    if earlier and not overwrite:
        raise UsageError(
            f"{out} already holds a run ({earlier[-1].name})",
            "go on with --resume, choose another --out, or let it give way with --overwrite",
        )
    return bool(earlier)


def check_has_checkpoint(out: Path) -> None:
    """CheckpointError for the folder of a run that ended before its first checkpoint."""
    if checkpoint.folder.list_steps(out) or (out / checkpoint.folder.CONFIG).is_file():
        return
    if (out / config_lib.toml.RUN_FILE).is_file():
        again = f"start it again: kvad train {out / config_lib.toml.RUN_FILE} CORPUS --out {out} (its second line says what CORPUS was)"
        raise CheckpointError(f"{out} holds a run that has no checkpoint yet", again)


def check_is_run(out: Path) -> None:
    """CheckpointError for one of a run's checkpoints, its best for one: a run goes on from its newest."""
    if not checkpoint.folder.list_steps(out):
        run = next((path for path in checkpoint.folder.locate(out).parents if checkpoint.folder.list_steps(path)), None)
        raise CheckpointError(
            f"{out} is a checkpoint, not a run", f"a run goes on from its newest: --resume --out {run or 'RUN'}"
        )


def check_output_folder(out: Path, corpus: CorpusArgument, suffixes: Sequence[str]) -> None:
    """A folder, or none yet, that no corpus of folders would read as text in a later run."""
    there = _nearest_existing(out)
    if not there.is_dir():
        raise UsageError(f"{there} is a file, and a run needs a folder", "choose another folder for --out")
    if suffixes and not set(suffixes) & set(RUN_TEXT_SUFFIXES):
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


def check_writable(out: Path) -> None:
    """A folder that can be made and written into; it is made, and taken away again.

    UsageError where a file is in its way, SaveError where the disk refuses."""
    missing, there = _missing(out), _nearest_existing(out)
    if not there.is_dir():
        raise UsageError(f"{there} is a file, and {out} is to be a folder", "choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        Path(tempfile.mkdtemp(prefix=".", dir=out)).rmdir()
    except OSError as error:
        raise SaveError(f"cannot write {out}: {error.strerror or error}", "choose another --out") from error
    finally:
        _remove_empty(missing)


def check_callbacks(watch: CallbacksConfig, callbacks: Sequence[Callback]) -> None:
    """UsageError for what [watch] asks and no listener answers: training itself runs no engine."""
    left = [key for key in watch.requested if key not in {callback.handles for callback in callbacks}]
    if left:
        raise UsageError(
            f"watch.{left[0]}: no listener answers it",
            "callbacks=kvad.evaluation.training_callbacks.build_callbacks(config.watch)",
        )


@contextmanager
def cleanup_on_error(out: Path) -> Iterator[None]:
    """If the block fails, the folders that it made on the way to ``out`` go again, as far as they are empty."""
    missing = _missing(out)
    try:
        yield
    except BaseException:
        _remove_empty(missing)
        raise


def _nearest_existing(out: Path) -> Path:
    """It, or the nearest above it that is there."""
    return next(path for path in (out, *out.absolute().parents) if path.exists())


def _missing(out: Path) -> list[Path]:
    """Folders on the way to it that are not there, the lowest first."""
    return [path for path in (out, *out.parents) if not path.exists()]


def _remove_empty(folders: Sequence[Path]) -> None:
    """Those that are empty."""
    for path in folders:
        with suppress(OSError):
            path.rmdir()


def check_device(train: TrainConfig) -> None:
    """ConfigError for a device that cannot be used, ModuleNotFoundError for an extra that is not installed."""
    device = train.device
    monitoring.tensorboard.check_tensorboard(train)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"train.device: {device!r} cannot be used: {str(error).splitlines()[0]}") from error
