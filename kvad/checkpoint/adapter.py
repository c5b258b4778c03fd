"""Adapters on disk, in PEFT's layout, and the model that an adapter and its base are together.

A folder of its own, beside the base and not in it::

    adapter_config.json         PEFT's: rank, alpha, which modules, the base's path or name
    adapter_model.safetensors   PEFT's: two matrices per module (``peft.py``); of a base in kvad's layout, kvad's names
    adapter.json                kvad's: {"kvad", "format": 1, "names": "peft" or "kvad", "parts", "base", "fingerprint"}
    tokenizer.json and so on    the base's words, as they are
    manifest.json, training/    as of a checkpoint (``native.py``)

A folder that PEFT wrote has the first two.  Where ``adapter.json`` says what the base was, byte for byte
(``model/fingerprint.py``), another base is refused.  :class:`Adapted` is the base with the adapter merged in, lazily: a
checkpoint like any other for everything that reads one.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvad import model, storage
from kvad.checkpoint.conversion import write_tensors
from kvad.checkpoint.export import COMPANION_FILES, read_tokenizer_files
from kvad.checkpoint.families import find_family
from kvad.checkpoint.folder import (
    CONFIG,
    MANIFEST,
    TRAINING,
    check_file,
    file_digest,
    list_steps,
    prune_steps,
    read_json,
    read_manifest,
    resolve_best_link,
    step_folder,
)
from kvad.checkpoint.generation_config import GENERATION_FILE, GenerationConfig, read_generation_config, write_pooling
from kvad.checkpoint.handle import TOKENIZER_FILES, CheckpointHandle, LazyTensors, TrainingState
from kvad.checkpoint.hf_layout import HFCheckpoint
from kvad.checkpoint.hub import resolve_model_path
from kvad.checkpoint.native import open_folder, save_checkpoint, save_tensors, write_json
from kvad.checkpoint.peft import (
    AdapterTargets,
    check_peft_config,
    find_targets,
    mergeable_linears,
    native_targets,
    read_factors,
    write_factors,
    write_peft_config,
)
from kvad.checkpoint.safetensors_io import write_sharded
from kvad.config import ModelConfig
from kvad.errors import CheckpointError
from kvad.text import Tokenizer

NAME, CONFIG_NAME, TENSORS = "adapter.json", "adapter_config.json", "adapter_model.safetensors"
FORMAT = 1


def base_fingerprint(opened: CheckpointHandle) -> str:
    """Every byte of its weights, and its shape.  About a second per gigabyte and core."""
    return model.fingerprint.state_fingerprint(opened.config, dict(opened.weights()))


# ---------------------------------------------------------------- writing


@dataclass(frozen=True)
class AdapterFormat:
    """How adapters of one base are written: ``names`` "peft" where the base has a family, else "kvad".

    ``base``: what it was opened by, as a run; ``folder``: where its config.json is, which is what PEFT opens."""

    config: ModelConfig
    targets: AdapterTargets
    names: str
    base: str
    folder: str
    fingerprint: str
    tokenizer_files: Mapping[str, bytes]

    def check(self, parts: Sequence[str]) -> None:
        """CheckpointError for a part that the layout cannot hold an adapter of: before anything is trained."""
        shapes = mergeable_linears(self.config)
        empty = {
            name: model.lora.LoraFactors(torch.zeros(1, shapes[name][1]), torch.zeros(shapes[name][0], 1), 1.0)
            for name in parts
        }
        write_factors(self.targets, shapes, empty)


def adapter_format(opened: CheckpointHandle, where: str, fingerprint: str) -> AdapterFormat:
    """For adapters of ``opened``, which ``where`` names; its ``fingerprint`` as :func:`base_fingerprint` gives it."""
    known = _sites(opened)
    found = native_targets(opened.config) if known is None else known
    names = "kvad" if known is None else "peft"
    folder = str(opened.path.resolve()) if Path(where).is_dir() else where  # a name on the hub stays one
    return AdapterFormat(opened.config, found, names, where, folder, fingerprint, read_tokenizer_files(opened.path))


def _sites(opened: CheckpointHandle) -> AdapterTargets | None:
    """Of the family that it came from; None of a model of kvad's alone."""
    if isinstance(opened, HFCheckpoint):
        return find_targets(opened.family, opened.config)
    return None if opened.origin is None else find_targets(find_family(opened.origin), opened.config)


def save_adapter(
    folder: Path,
    form: AdapterFormat,
    factors: Mapping[str, model.lora.LoraFactors],
    *,
    rank: int,
    alpha: float,
    rslora: bool,
    dropout: float,
    training: TrainingState | None = None,
    replaces: Sequence[Path] = (),
) -> None:
    """Write an adapter's folder, whole or not at all.  Raises CheckpointError for a part that the layout cannot hold,
    SaveError if the disk refuses."""
    from kvad import __version__

    tensors, modules = write_factors(form.targets, mergeable_linears(form.config), factors)
    settings = {"rank": rank, "alpha": alpha, "rslora": rslora, "dropout": dropout}
    content = write_peft_config(form.targets, modules, kind=form.config.kind, base=form.folder, **settings)  # type: ignore[arg-type]
    said = {"kvad": __version__, "format": FORMAT, "names": form.names, "parts": list(factors)}
    with storage.atomic.new_folder(folder, replaces=replaces) as new:
        write_json(new / CONFIG_NAME, content)
        save_tensors(folder, new / TENSORS, tensors, {"format": "pt"})
        write_json(new / NAME, {**said, "base": form.base, "fingerprint": form.fingerprint})
        for name, words in form.tokenizer_files.items():
            (new / name).write_bytes(words)
        if training is not None:
            (new / TRAINING).mkdir()
            write_json(new / TRAINING / "state.json", training.state)
            save_tensors(folder, new / TRAINING / "state.safetensors", training.tensors)
        files = {
            path.relative_to(new).as_posix(): file_digest(path) for path in sorted(new.rglob("*")) if path.is_file()
        }
        write_json(new / MANIFEST, {"kvad": __version__, "format": FORMAT, "files": files})


def save_adapter_step(
    run: Path,
    step: int,
    form: AdapterFormat,
    factors: Mapping[str, model.lora.LoraFactors],
    *,
    keep: int,
    best: int | None = None,
    fresh: bool,
    **how: Any,
) -> Path:
    """Write ``run/checkpoints/step-N``; ``how``: as :func:`save_adapter`, the rest as ``native.save_step``."""
    folder = step_folder(run, step)
    storage.atomic.recover_interrupted(folder.parent)
    save_adapter(folder, form, factors, replaces=list_steps(run) if fresh else (), **how)
    prune_steps(run, keep, best)
    return folder


# ---------------------------------------------------------------- reading


def find_adapter(path: Path) -> Path | None:
    """The adapter's folder that ``path`` is, or whose run it is; None of a model's, or of none."""
    path = resolve_best_link(Path(path))
    if (path / CONFIG).is_file():
        return None
    steps = [path] if (path / CONFIG_NAME).is_file() else list_steps(path)
    return steps[-1] if steps and (steps[-1] / CONFIG_NAME).is_file() and not (steps[-1] / CONFIG).is_file() else None


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter's folder that has been looked at.

    ``content``: its adapter_config.json; ``said``: kvad's adapter.json, empty of a folder that PEFT wrote."""

    path: Path
    content: Mapping[str, Any]
    metadata: Mapping[str, Any]

    @property
    def base(self) -> str | None:
        """Path or name of the model that it was trained on, as far as it says."""
        found = self.metadata.get("base") or self.content.get("base_model_name_or_path")
        return found if isinstance(found, str) and found else None

    def factors(self, base: CheckpointHandle) -> dict[str, model.lora.LoraFactors]:
        """Name of a part of ``base`` -> what is added to it.  CheckpointError where they do not fit."""
        if self.metadata.get("names") == "kvad":
            found: AdapterTargets | None = native_targets(base.config)
        else:
            found = _sites(base)
        if found is None:
            raise CheckpointError(
                f"{self.path}: its names are those of a Hugging Face class, and {base.path} came from none",
                "name the base that it was trained on",
            )
        where = str(self.path / TENSORS)
        parts = self.metadata.get("parts")
        shapes = mergeable_linears(base.config)
        return read_factors(found, shapes, LazyTensors(self.path / TENSORS), self.content, where, parts)

    def check_base(self, base: CheckpointHandle) -> None:
        """CheckpointError for another model than the one that it was trained on, where it says which that was."""
        wanted = self.metadata.get("fingerprint")
        if wanted is not None and base_fingerprint(base) != wanted:
            raise CheckpointError(
                f"{self.path}: this adapter was trained on another model than {base.path}",
                f"its base was {self.base}",
            )


def open_adapter(path: Path) -> StoredAdapter:
    """A folder, or the newest of a run.  CheckpointError for what is no whole adapter of two matrices per module."""
    path = Path(path)
    folder = find_adapter(path)
    if folder is None:
        what = "no such folder" if not path.exists() else f"it has no {CONFIG_NAME}"
        if path.exists() and ((path / CONFIG).is_file() or list_steps(path)):
            what = "it is a whole model"
        raise CheckpointError(f"{path} is not an adapter: {what}", "kvad train --init MODEL --lora RANK makes one")
    said: dict[str, Any] = {}
    if (folder / NAME).is_file():
        said = read_json(folder / NAME)
        if said.get("format") != FORMAT:
            raise CheckpointError(f"{folder / NAME}: format {said.get('format')!r}, this kvad reads {FORMAT}")
        if (folder / MANIFEST).is_file():  # PEFT's save_pretrained beside our adapter.json would be no manifest's
            for name, entry in read_manifest(folder, TENSORS).items():
                check_file(folder / name, entry)
    content = read_json(folder / CONFIG_NAME)
    check_peft_config(content, str(folder / CONFIG_NAME))
    return StoredAdapter(folder, content, said)


def merge_adapter(base: CheckpointHandle, path: Path) -> AdaptedCheckpoint:
    """``base`` with the adapter in ``path`` merged in.  CheckpointError where they do not belong together."""
    if isinstance(base, AdaptedCheckpoint):
        raise CheckpointError(f"{base.path} is an adapter already", "merge it first: kvad merge BASE ADAPTER --out DIR")
    adapter = open_adapter(path)
    return AdaptedCheckpoint(adapter.path, base=base, adapter=adapter)


def open_adapted(path: Path) -> AdaptedCheckpoint:
    """An adapter's folder with the base that it names.  CheckpointError where that is gone."""
    adapter = open_adapter(path)
    if adapter.base is None:
        raise CheckpointError(f"{adapter.path} is an adapter that does not name its base", _base_hint(path))
    try:
        base = open_folder(resolve_model_path(adapter.base))
    except CheckpointError as error:
        raise CheckpointError(
            f"{adapter.path}: its base cannot be opened: {error.message}", _base_hint(path)
        ) from error
    return AdaptedCheckpoint(adapter.path, base=base, adapter=adapter)


def _base_hint(path: Path) -> str:
    return f"if it lies elsewhere now: kvad merge BASE {path} --out DIR, or --adapter {path} beside BASE"


@dataclass(frozen=True, kw_only=True)
class _Parts:
    base: CheckpointHandle
    adapter: StoredAdapter


@dataclass(frozen=True)
class AdaptedCheckpoint(CheckpointHandle, _Parts):
    """A base with an adapter merged in.  ``path`` is the adapter's; all but the weights is the base's, and what kvad
    wrote of a conversation beside an adapter that was trained on them: a chat template, and what ends a turn."""

    @property
    def config(self) -> ModelConfig:
        return self.base.config

    @property
    def generation(self) -> GenerationConfig:
        there = self.path / GENERATION_FILE
        if not there.is_file():
            return self.base.generation
        return replace(self.base.generation, eos_token_ids=read_generation_config({}, read_json(there)).eos_token_ids)

    @property
    def origin(self) -> str | None:
        return self.base.origin

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.base.stored_dtype

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The base's."""
        return self.base.tensors

    @cached_property
    def factors(self) -> dict[str, model.lora.LoraFactors]:
        return self.adapter.factors(self.base)

    @property
    def tokenizer_folder(self) -> Path:
        """The base's, where the adapter's folder has none."""
        there = any(True for pattern in TOKENIZER_FILES for _ in self.path.glob(pattern))
        return self.path if there else self.base.tokenizer_folder

    def read_tokenizer(self) -> Tokenizer | None:
        return self.base.tokenizer

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Merged, in the base's dtype."""
        yield from self.weights_as(None)

    def weights_as(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Merged in float32 at least and rounded once.  CheckpointError for another base, before the first."""
        self.adapter.check_base(self.base)
        for name, tensor in self.base.weights():
            part = self.factors.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
            if part is None:
                yield name, tensor if dtype is None else tensor.to(dtype)
            else:
                yield name, model.lora.merge_weight(tensor, part, dtype)

    def fingerprint(self) -> str:
        """sha256 (hex) of base and adapter; a base that kvad did not write by every byte of its weights."""
        base = self.base.fingerprint() if self.base.files is not None else base_fingerprint(self.base)
        return hashlib.sha256(f"{base} {self.adapter_fingerprint}".encode()).hexdigest()

    @property
    def adapter_fingerprint(self) -> str:
        """Of the adapter alone."""
        return model.lora.factors_fingerprint(self.factors)


def _companion_file(adapted: AdaptedCheckpoint, name: str) -> Path:
    """A file beside the merged weights: the base's, but for what a conversation is like."""
    own = adapted.path / name
    return own if name in (GENERATION_FILE, "chat_template.jinja") and own.is_file() else adapted.base.path / name


def write_merged(adapted: AdaptedCheckpoint, out: Path, dtype: torch.dtype | None = None) -> None:
    """Write the merged model in its base's layout: the base's own files beside merged weights, stored in ``dtype`` (the
    base's).  Raises CheckpointError, SaveError."""
    base = adapted.base
    tensors = dict(adapted.weights_as(dtype))
    if not isinstance(base, HFCheckpoint):
        beside = [path for name in COMPANION_FILES if (path := _companion_file(adapted, name)).is_file()]
        save_checkpoint(
            out, base.config, tensors, None, generation=adapted.generation, beside=beside, origin=base.origin
        )
        return
    with storage.atomic.new_folder(out) as new:
        name = str(dtype or base.stored_dtype).removeprefix("torch.")
        write_json(new / CONFIG, {**base.fields.content, "dtype": name, "torch_dtype": name})
        write_sharded(new, write_tensors(base.family, base.config, tensors))
        for each in (*COMPANION_FILES, GENERATION_FILE):
            if (path := _companion_file(adapted, each)).is_file():
                shutil.copyfile(path, new / each)
        write_pooling(new, base.generation, base.config.hidden_size)
