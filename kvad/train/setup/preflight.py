"""Checks before a run: output folder, device, callbacks."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from kvad import checkpoint, storage
from kvad.errors import CheckpointError, ConfigError, SaveError, UsageError
from kvad.train import config as config_lib
from kvad.train import data as data_lib
from kvad.train.config import CallbacksConfig, RunConfig, TrainConfig
from kvad.train.monitoring import Callback
from kvad.train.setup.corpora import CorpusArgument
from kvad.train.sources import PairPaths

TOKENS_FOLDER = "data"  # folder of the tokens within a run folder
LOCK_FILE = ".lock"  # of a run folder in which a process is training
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # of file systems without locks
RUN_TEXT_SUFFIXES = (".json", ".jsonl", ".svg", ".toml")  # files of a run folder that a corpus would read as text


def check_run_folder(config: RunConfig, corpus: CorpusArgument, out: Path, overwrite: bool) -> bool:
    """Check that a run may write to ``out``; return True if it holds a run that will be replaced.

    Raises UsageError if a run may not be replaced, or files that belong to no run would be overwritten.
    """
    tokens, run_file = out / TOKENS_FOLDER, out / config_lib.toml.RUN_FILE
    for source in (corpus, *([Path(path) for path in part.paths] for part in config.data.sources)):
        check_output_folder(out, source, config.data.file_suffixes)
        for path in [path for item in source.items for path in item] if isinstance(source, PairPaths) else source:
            if path.resolve().is_relative_to(tokens.resolve()):
                raise UsageError(f"{path} is inside {tokens}, where the run writes its tokens", "Choose another --out.")
    if tokens.exists() and not _is_tokens(tokens):
        raise UsageError(f"{tokens} exists already, and the run would write its tokens there", "Choose another --out.")
    if run_file.exists() and not config_lib.toml.is_run_file(run_file):
        raise UsageError(
            f"{run_file} exists already, and the run would write its configuration there",
            "Rename it or choose another --out.",
        )
    earlier = checkpoint.folder.list_steps(out)
    if earlier and not overwrite:
        raise UsageError(
            f"{out} already holds a run ({earlier[-1].name})",
            "Continue it with --resume, choose another --out, or replace it with --overwrite.",
        )
    return bool(earlier)


def _is_tokens(folder: Path) -> bool:
    """Return True for a run's tokens: a store, one store per mixture source, or an empty folder."""
    if not folder.is_dir() or data_lib.token_store.is_prepared(folder):
        return False
    if (folder / data_lib.token_store.MANIFEST).is_file():
        return data_lib.token_store.is_store(folder)
    return all(part.name.isdigit() and data_lib.token_store.is_store(part) for part in folder.iterdir())


def check_has_checkpoint(out: Path) -> None:
    """Raise CheckpointError for a run that ended before its first checkpoint."""
    if checkpoint.folder.list_steps(out) or (out / checkpoint.folder.CONFIG).is_file():
        return
    if (run_file := out / config_lib.toml.RUN_FILE).is_file():
        command = f"kvad train {run_file} CORPUS --out {out} (the second line of run.toml names the corpus)"
        raise CheckpointError(f"{out} holds a run that has no checkpoint yet", f"Start it again: {command}")


def check_is_run(out: Path) -> None:
    """Raise CheckpointError if ``out`` is a checkpoint of a run; runs resume from their newest."""
    if not checkpoint.folder.list_steps(out):
        run = next((path for path in checkpoint.folder.locate(out).parents if checkpoint.folder.list_steps(path)), None)
        raise CheckpointError(
            f"{out} is a checkpoint, not a run",
            f"A run resumes from its newest checkpoint: --resume --out {run or 'RUN'}",
        )


def check_output_folder(out: Path, corpus: CorpusArgument, suffixes: Sequence[str]) -> None:
    """Raise UsageError if ``out`` is a file, or a folder that a corpus would read."""
    _check_not_a_file(out)
    if suffixes and not set(suffixes) & set(RUN_TEXT_SUFFIXES):
        return
    for folder in () if isinstance(corpus, PairPaths) else corpus:
        if not folder.is_dir() or not out.resolve().is_relative_to(folder.resolve()):
            continue
        inside = out.resolve().relative_to(folder.resolve())
        if not any(part.startswith(".") for part in inside.parts):  # a corpus skips hidden folders
            raise UsageError(
                f"{out} is inside the corpus {folder}; a later run would read this run's files as text",
                "Choose another --out, or select the text files with --suffix.",
            )


def check_writable(out: Path) -> None:
    """Check that the folder can be created and written to; it is removed again."""
    with _created_folder(out, always=True), _translate_disk_errors(out):
        Path(tempfile.mkdtemp(prefix=".", dir=out)).rmdir()


@contextmanager
def lock_run(out: Path) -> Iterator[None]:
    """Create a run folder and lock it, until the block ends or the process dies.

    If the block fails, folders that are still empty are removed. A file system without locks is not locked.

    Raises:
        UsageError: If the path leads through a file, or a run is writing to the folder.
        SaveError: If the folder cannot be written to.
    """
    path = out / LOCK_FILE
    with _created_folder(out):
        lock: int | None = None
        with _translate_disk_errors(out):
            try:
                lock = storage.REAL_FILE_SYSTEM.lock(path)
            except BlockingIOError:
                owner = storage.filesystem.lock_owner(path)
                raise UsageError(
                    f"{out} is in use: {owner} is training there", "Wait until it ends, or choose another --out."
                ) from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()
            if lock is not None:
                os.close(lock)


@contextmanager
def _created_folder(out: Path, *, always: bool = False) -> Iterator[None]:
    """Create a folder for the block, with ``cleanup_on_error``; raise UsageError if a file is in the way."""
    _check_not_a_file(out)
    with cleanup_on_error(out, always=always):
        with _translate_disk_errors(out):
            out.mkdir(parents=True, exist_ok=True)
        yield


@contextmanager
def _translate_disk_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SaveError(f"cannot write {out}: {error.strerror or error}", "Choose another --out.") from error


def check_callbacks(config: CallbacksConfig, callbacks: Sequence[Callback]) -> None:
    """Raise UsageError for keys of [callbacks] without a callback that handles them."""
    unhandled = [key for key in config.requested if key not in {callback.handles for callback in callbacks}]
    if unhandled:
        raise UsageError(
            f"callbacks.{unhandled[0]}: no callback handles it",
            "Pass callbacks=kvad.evaluation.training_callbacks.build_callbacks(config.callbacks).",
        )


@contextmanager
def cleanup_on_error(out: Path, *, always: bool = False) -> Iterator[None]:
    """If the block fails, or ``always``, remove the empty folders that it created on the way to ``out``."""
    missing = [path for path in (out, *out.parents) if not path.exists()]  # the lowest first
    keeps_folders = False
    try:
        yield
        keeps_folders = not always
    finally:
        for path in () if keeps_folders else missing:
            with suppress(OSError):
                path.rmdir()


def _check_not_a_file(out: Path) -> None:
    """Raise UsageError if a path cannot be a folder because it, or a parent, is a file."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UsageError(f"{existing} is a file, and --out needs a folder", "Choose another folder for --out.")


def check_device(train: TrainConfig) -> None:
    """Check train.device and that the packages of train.tensorboard are installed (else ModuleNotFoundError)."""
    if train.tensorboard:
        import tensorboard  # noqa: F401
    try:
        torch.empty(0, device=train.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"train.device: {train.device!r} cannot be used: {reason}") from error
