"""Adapters on disk, in PEFT's layout, and base models with an adapter merged in.

An adapter has its own folder, separate from its base::

    adapter_config.json         PEFT's: rank, alpha, target modules, path or name of the base
    adapter_model.safetensors   PEFT's: two matrices per module (``peft.py``); kvad's names for a base without a family
    adapter.json                kvad's: {"kvad", "format": 2, "names": "peft" or "kvad", "parts", "base", "fingerprint"}
    tokenizer.json and others   the base's tokenizer, unchanged
    manifest.json, training/    as in a checkpoint (``native.py``)

A folder written by PEFT has the first two.  If ``adapter.json`` has the fingerprint of the base's weights
(``model/fingerprint.py``), any other base is refused.  ``AdaptedCheckpoint`` merges the adapter lazily and is
read like any other checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvad import model, ops
from kvad.checkpoint import folder as folder_lib
from kvad.checkpoint import peft
from kvad.checkpoint.families import find_family
from kvad.checkpoint.folder import ADAPTER_CONFIG, CONFIG, read_json, write_json
from kvad.checkpoint.generation_config import GENERATION_FILE, GenerationConfig, read_generation_config
from kvad.checkpoint.handle import CheckpointHandle, TrainingState, has_tokenizer, read_tokenizer_files
from kvad.checkpoint.hub import resolve_model_path
from kvad.checkpoint.native import new_checkpoint, open_folder
from kvad.checkpoint.safetensors_io import open_file_tensors, save_tensors
from kvad.config import ModelConfig
from kvad.errors import CheckpointError, ConfigError
from kvad.text import Tokenizer, load_tokenizer

METADATA_FILE, TENSORS, FORMAT = "adapter.json", "adapter_model.safetensors", 2


def base_fingerprint(handle: CheckpointHandle) -> str:
    """Return the fingerprint of config and all weights (a second per gigabyte and core)."""
    return model.fingerprint.state_fingerprint(handle.stored_config, dict(handle.weights()))


@dataclass(frozen=True)
class AdapterFormat:
    """Format of the adapters of one base."""

    kind: str  # of the model
    targets: peft.AdapterTargets
    names: str  # "peft" if the base has a family, else "kvad"
    base: str  # path or name that the base was opened by
    folder: str  # folder of its config.json, which PEFT opens
    fingerprint: str
    tokenizer_files: Mapping[str, bytes]  # content by file name


def adapter_format(handle: CheckpointHandle, where: str, fingerprint: str) -> AdapterFormat:
    """Build the format for adapters of a base that was opened by the name ``where``."""
    family_targets = _adapter_targets(handle)
    targets = peft.native_targets(handle.config) if family_targets is None else family_targets
    names = "kvad" if family_targets is None else "peft"
    folder = str(handle.path.resolve()) if Path(where).is_dir() else where  # a name on the hub stays a name
    return AdapterFormat(
        handle.config.kind, targets, names, where, folder, fingerprint, read_tokenizer_files(handle.path)
    )


def _adapter_targets(handle: CheckpointHandle) -> peft.AdapterTargets | None:
    """Return the targets by the names of the base's family, or None if it has no family."""
    return None if handle.origin is None else peft.find_targets(find_family(handle.origin), handle.config)


def save_adapter(
    folder: Path,
    form: AdapterFormat,
    factors: Mapping[str, model.lora.LoraFactors],
    *,
    training: TrainingState | None = None,
    replaces: Sequence[Path] = (),
    **settings: Any,
) -> None:
    """Write an adapter's folder atomically.

    Args:
        folder: Folder to write.
        form: Format, from ``adapter_format``.
        factors: Trained matrices by the name of the linear layer.
        training: Training state, if training can be resumed.
        replaces: Sibling folders that are removed in the same move.
        settings: ``rank``, ``alpha``, ``use_rslora`` and ``dropout`` of ``write_peft_config``.

    Raises:
        CheckpointError: If the layout cannot hold an adapter of one of the layers.
    """
    from kvad import __version__

    tensors, modules = peft.write_factors(form.targets, factors)
    peft_config = peft.write_peft_config(form.targets, modules, kind=form.kind, base=form.folder, **settings)
    record = {"kvad": __version__, "format": FORMAT, "names": form.names, "parts": list(factors)}
    with new_checkpoint(folder, training, replaces) as temp_folder:
        write_json(temp_folder / ADAPTER_CONFIG, peft_config)
        save_tensors(folder, temp_folder / TENSORS, tensors, {"format": "pt"})
        write_json(temp_folder / METADATA_FILE, {**record, "base": form.base, "fingerprint": form.fingerprint})
        for name, content_bytes in form.tokenizer_files.items():
            (temp_folder / name).write_bytes(content_bytes)


def find_adapter(path: Path) -> Path | None:
    """Return the adapter folder at ``path``, or the newest of a run; None for any other folder."""
    path = folder_lib.resolve_best_link(Path(path))
    steps = [] if (path / CONFIG).is_file() else folder_lib.list_steps(path)
    return next((folder for folder in (path, *steps[-1:]) if folder_lib.is_adapter(folder)), None)


@dataclass(frozen=True)
class StoredAdapter:
    """An opened adapter folder."""

    path: Path
    content: Mapping[str, Any]  # of adapter_config.json
    metadata: Mapping[str, Any]  # of kvad's adapter.json; empty for a folder that PEFT wrote

    @property
    def base(self) -> str | None:
        """Path or name of the model that the adapter was trained on, or None if it is not recorded."""
        base = self.metadata.get("base") or self.content.get("base_model_name_or_path")
        return base if isinstance(base, str) and base else None

    @property
    def end_tokens(self) -> tuple[int, ...] | None:
        """Tokens that end a text, if kvad stored them with the adapter."""
        path = self.path / GENERATION_FILE
        return read_generation_config({}, read_json(path)).eos_token_ids if path.is_file() else None

    def check_base(self, base: CheckpointHandle, fingerprint: str | None = None) -> None:
        """Raise CheckpointError if the adapter records that it was trained on another base.

        Args:
            base: The base.
            fingerprint: Its ``base_fingerprint``, if it is known.
        """
        trained_on = self.metadata.get("fingerprint")
        if trained_on is not None and trained_on != (fingerprint or base_fingerprint(base)):
            message = f"{self.path}: this adapter was trained on another model than {base.path}"
            raise CheckpointError(message, f"Its base was {self.base}.")

    def factors(self, base: CheckpointHandle) -> dict[str, model.lora.LoraFactors]:
        """Read the matrices by the name of the linear layer of ``base``, which they must fit."""
        has_native_names = self.metadata.get("names") == "kvad"
        targets = peft.native_targets(base.config) if has_native_names else _adapter_targets(base)
        if targets is None:
            raise CheckpointError(
                f"{self.path}: its names are those of a Hugging Face class, and {base.path} has no such class",
                "Give the base that it was trained on.",
            )
        where = str(self.path / TENSORS)
        tensors, parts = open_file_tensors(self.path / TENSORS), self.metadata.get("parts")
        return peft.read_factors(targets, tensors, self.content, where, parts)


def open_adapter(path: Path) -> StoredAdapter:
    """Open an adapter's folder, or the newest of a run."""
    path = Path(path)
    folder = find_adapter(path)
    if folder is None:
        is_model = (path / CONFIG).is_file() or folder_lib.is_run(path)
        missing = f"it has no {ADAPTER_CONFIG}" if path.exists() else "no such folder"
        reason = "it is a complete model" if is_model else missing
        hint = "Train one with kvad train --init MODEL --lora-rank RANK."
        raise CheckpointError(f"{path} is not an adapter: {reason}", hint)
    metadata: dict[str, Any] = {}
    if (folder / METADATA_FILE).exists():
        metadata = read_json(folder / METADATA_FILE)
        folder_lib.check_format(folder / METADATA_FILE, metadata, FORMAT, "kvad train --init MODEL --lora-rank RANK")
        if (folder / folder_lib.MANIFEST).exists():  # absent if PEFT's save_pretrained wrote next to adapter.json
            folder_lib.check_all_but_training(folder, TENSORS)
    content = read_json(folder / ADAPTER_CONFIG)
    peft.check_peft_config(content, str(folder / ADAPTER_CONFIG))
    return StoredAdapter(folder, content, metadata)


def merge_adapter(base: CheckpointHandle, path: Path) -> AdaptedCheckpoint:
    """Return ``base``, which must not be an adapter, with the adapter in ``path`` merged in."""
    if isinstance(base, AdaptedCheckpoint):
        hint = "Merge it first with kvad merge BASE ADAPTER --out DIR."
        raise CheckpointError(f"{base.path} is already an adapter", hint)
    adapter = open_adapter(path)
    return AdaptedCheckpoint(adapter.path, base=base, adapter=adapter)


def open_adapters(base: CheckpointHandle, paths: Mapping[str, str | Path]) -> dict[str, StoredAdapter]:
    """Open adapters, by name, that are used next to ``base``.

    Raises:
        ConfigError: If a name is empty or not printable.
        CheckpointError: If a folder is no adapter, or ``base`` has an adapter merged in.
    """
    if paths and isinstance(base, AdaptedCheckpoint):
        hint = "Merge it first with kvad merge BASE ADAPTER --out DIR."
        raise CheckpointError(f"{base.path} is an adapter, and other adapters require their base", hint)
    for name in paths:
        if not name or not name.isprintable() or name != name.strip():
            raise ConfigError(f"adapters: a name must be printable text, got {name!r}", "Write NAME=PATH.")
    return {name: open_adapter(Path(path)) for name, path in paths.items()}


def open_adapted(path: Path) -> AdaptedCheckpoint:
    """Open an adapter together with the base that it names."""
    adapter = open_adapter(path)
    hint = f"If it was moved: kvad merge BASE {path} --out DIR, or open BASE with --adapter {path}."
    if adapter.base is None:
        raise CheckpointError(f"{adapter.path} is an adapter that does not name its base", hint)
    try:
        base = open_folder(resolve_model_path(adapter.base))
    except CheckpointError as error:
        raise CheckpointError(f"{adapter.path}: its base cannot be opened: {error.message}", hint) from error
    return AdaptedCheckpoint(adapter.path, base=base, adapter=adapter)


@dataclass(frozen=True, kw_only=True)
class AdaptedCheckpoint(CheckpointHandle):
    """A base with an adapter merged in; ``path`` is the adapter's folder.

    Everything but the weights is the base's, except for a tokenizer in the folder, and what kvad stored with an adapter
    that was trained on conversations: a chat template, and the tokens that end a turn.
    """

    base: CheckpointHandle
    adapter: StoredAdapter

    @cached_property
    def config(self) -> ModelConfig:
        return self.base.config

    @property
    def generation(self) -> GenerationConfig:
        end_tokens = self.adapter.end_tokens
        return self.base.generation if end_tokens is None else replace(self.base.generation, eos_token_ids=end_tokens)

    @property
    def unused_keys(self) -> tuple[str, ...]:
        return self.base.unused_keys

    @property
    def origin(self) -> str | None:
        return self.base.origin

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.base.stored_dtype

    @property
    def quantization(self) -> str | None:
        return self.base.quantization

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The base's tensors, without the adapter."""
        return self.base.tensors

    def weight_files(self) -> list[ops.native.WeightFile]:
        """Return none: merged weights are in no file."""
        return []

    @cached_property
    def factors(self) -> dict[str, model.lora.LoraFactors]:
        return self.adapter.factors(self.base)

    @property
    def tokenizer_folder(self) -> Path:
        """The adapter's folder if it has a tokenizer, else the base's."""
        return self.path if has_tokenizer(self.path) else self.base.tokenizer_folder

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return load_tokenizer(self.path) if has_tokenizer(self.path) else self.base.tokenizer

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the merged weights in the base's dtype."""
        yield from self.weights_as(None)

    def weights_as(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Yield the merged weights; merged in at least float32 and rounded once.

        Raises CheckpointError before the first tensor if the adapter was trained on another base.
        """
        self.adapter.check_base(self.base)
        if self.quantization is not None:  # the base's tensors are float32
            dtype = dtype or self.stored_dtype
        for name, tensor in self.base.weights():
            factors = self.factors.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
            if factors is None:
                yield name, tensor if dtype is None else tensor.to(dtype)
            else:
                yield name, model.lora.merge_weight(tensor, factors, dtype)

    def fingerprint(self) -> str:
        """Return the sha256 (hex) of base (all weights if it has no manifest) and adapter."""
        base = self.base.fingerprint() if self.base.files is not None else base_fingerprint(self.base)
        return hashlib.sha256(f"{base} {self.adapter_fingerprint}".encode()).hexdigest()

    @property
    def adapter_fingerprint(self) -> str:
        """Fingerprint of the adapter alone."""
        return model.lora.factors_fingerprint(self.factors)
