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

from kvad.checkpoint.atomic import new_folder, sweep
from kvad.checkpoint.export import BESIDE, words_of
from kvad.checkpoint.families import find
from kvad.checkpoint.folder import (
    CONFIG,
    MANIFEST,
    TRAINING,
    check_file,
    entry_of,
    pointed,
    read_json,
    read_manifest,
    step_folder,
    steps_of,
)
from kvad.checkpoint.generation import GENERATION, Generation, read_generation, write_pooling
from kvad.checkpoint.hf import write_tensors
from kvad.checkpoint.hub import resolve
from kvad.checkpoint.imported import Imported
from kvad.checkpoint.kept import settle
from kvad.checkpoint.linears import mergeable
from kvad.checkpoint.native import load, save, save_tensors, write_json
from kvad.checkpoint.opened import TOKENIZERS, Opened, Tensors, Training
from kvad.checkpoint.peft import (
    Sites,
    check_config,
    own_sites,
    read_factors,
    sites,
    write_config,
    write_factors,
)
from kvad.checkpoint.shards import write_sharded
from kvad.config import ModelConfig
from kvad.errors import CheckpointError
from kvad.model.fingerprint import fingerprint_of
from kvad.model.lora import Factors, fingerprint, merged
from kvad.text.tokenizer import Tokenizer

__all__ = [
    "Adapted",
    "AdapterForm",
    "StoredAdapter",
    "base_fingerprint",
    "find_adapter",
    "form_of",
    "merge",
    "open_adapted",
    "open_adapter",
    "save_adapter",
    "save_adapter_step",
    "with_adapter",
]

NAME, CONFIG_NAME, TENSORS = "adapter.json", "adapter_config.json", "adapter_model.safetensors"
FORMAT = 1


def base_fingerprint(opened: Opened) -> str:
    """Every byte of its weights, and its shape.  About a second per gigabyte and core."""
    return fingerprint_of(opened.config, dict(opened.weights()))


# ---------------------------------------------------------------- writing


@dataclass(frozen=True)
class AdapterForm:
    """How adapters of one base are written: ``names`` "peft" where the base has a family, else "kvad".

    ``base``: what it was opened by, as a run; ``folder``: where its config.json is, which is what PEFT opens."""

    config: ModelConfig
    sites: Sites
    names: str
    base: str
    folder: str
    fingerprint: str
    words: Mapping[str, bytes]

    def check(self, parts: Sequence[str]) -> None:
        """CheckpointError for a part that the layout cannot hold an adapter of: before anything is trained."""
        shapes = mergeable(self.config)
        empty = {name: Factors(torch.zeros(1, shapes[name][1]), torch.zeros(shapes[name][0], 1), 1.0) for name in parts}
        write_factors(self.sites, shapes, empty)


def form_of(opened: Opened, where: str, fingerprint: str) -> AdapterForm:
    """For adapters of ``opened``, which ``where`` names; its ``fingerprint`` as :func:`base_fingerprint` gives it."""
    known = _sites(opened)
    found = own_sites(opened.config) if known is None else known
    names = "kvad" if known is None else "peft"
    folder = str(opened.path.resolve()) if Path(where).is_dir() else where  # a name on the hub stays one
    return AdapterForm(opened.config, found, names, where, folder, fingerprint, words_of(opened.path))


def _sites(opened: Opened) -> Sites | None:
    """Of the family that it came from; None of a model of kvad's alone."""
    if isinstance(opened, Imported):
        return sites(opened.family, opened.config)
    return None if opened.origin is None else sites(find(opened.origin), opened.config)


def save_adapter(
    folder: Path,
    form: AdapterForm,
    factors: Mapping[str, Factors],
    *,
    rank: int,
    alpha: float,
    rslora: bool,
    dropout: float,
    training: Training | None = None,
    replaces: Sequence[Path] = (),
) -> None:
    """Write an adapter's folder, whole or not at all.  Raises CheckpointError for a part that the layout cannot hold,
    SaveError if the disk refuses."""
    from kvad import __version__

    tensors, modules = write_factors(form.sites, mergeable(form.config), factors)
    settings = {"rank": rank, "alpha": alpha, "rslora": rslora, "dropout": dropout}
    content = write_config(form.sites, modules, kind=form.config.kind, base=form.folder, **settings)  # type: ignore[arg-type]
    said = {"kvad": __version__, "format": FORMAT, "names": form.names, "parts": list(factors)}
    with new_folder(folder, replaces=replaces) as new:
        write_json(new / CONFIG_NAME, content)
        save_tensors(folder, new / TENSORS, tensors, {"format": "pt"})
        write_json(new / NAME, {**said, "base": form.base, "fingerprint": form.fingerprint})
        for name, words in form.words.items():
            (new / name).write_bytes(words)
        if training is not None:
            (new / TRAINING).mkdir()
            write_json(new / TRAINING / "state.json", training.state)
            save_tensors(folder, new / TRAINING / "state.safetensors", training.tensors)
        files = {path.relative_to(new).as_posix(): entry_of(path) for path in sorted(new.rglob("*")) if path.is_file()}
        write_json(new / MANIFEST, {"kvad": __version__, "format": FORMAT, "files": files})


def save_adapter_step(
    run: Path,
    step: int,
    form: AdapterForm,
    factors: Mapping[str, Factors],
    *,
    keep: int,
    best: int | None = None,
    fresh: bool,
    **how: Any,
) -> Path:
    """Write ``run/checkpoints/step-N``; ``how``: as :func:`save_adapter`, the rest as ``native.save_step``."""
    folder = step_folder(run, step)
    sweep(folder.parent)
    save_adapter(folder, form, factors, replaces=steps_of(run) if fresh else (), **how)
    settle(run, keep, best)
    return folder


# ---------------------------------------------------------------- reading


def find_adapter(path: Path) -> Path | None:
    """The adapter's folder that ``path`` is, or whose run it is; None of a model's, or of none."""
    path = pointed(Path(path))
    if (path / CONFIG).is_file():
        return None
    steps = [path] if (path / CONFIG_NAME).is_file() else steps_of(path)
    return steps[-1] if steps and (steps[-1] / CONFIG_NAME).is_file() and not (steps[-1] / CONFIG).is_file() else None


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter's folder that has been looked at.

    ``content``: its adapter_config.json; ``said``: kvad's adapter.json, empty of a folder that PEFT wrote."""

    path: Path
    content: Mapping[str, Any]
    said: Mapping[str, Any]

    @property
    def base(self) -> str | None:
        """Path or name of the model that it was trained on, as far as it says."""
        found = self.said.get("base") or self.content.get("base_model_name_or_path")
        return found if isinstance(found, str) and found else None

    def factors(self, base: Opened) -> dict[str, Factors]:
        """Name of a part of ``base`` -> what is added to it.  CheckpointError where they do not fit."""
        if self.said.get("names") == "kvad":
            found: Sites | None = own_sites(base.config)
        else:
            found = _sites(base)
        if found is None:
            raise CheckpointError(
                f"{self.path}: its names are those of a Hugging Face class, and {base.path} came from none",
                "name the base that it was trained on",
            )
        where = str(self.path / TENSORS)
        parts = self.said.get("parts")
        shapes = mergeable(base.config)
        return read_factors(found, shapes, Tensors(self.path / TENSORS), self.content, where, parts)

    def check_base(self, base: Opened) -> None:
        """CheckpointError for another model than the one that it was trained on, where it says which that was."""
        wanted = self.said.get("fingerprint")
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
        if path.exists() and ((path / CONFIG).is_file() or steps_of(path)):
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
    check_config(content, str(folder / CONFIG_NAME))
    return StoredAdapter(folder, content, said)


def with_adapter(base: Opened, path: Path) -> Adapted:
    """``base`` with the adapter in ``path`` merged in.  CheckpointError where they do not belong together."""
    if isinstance(base, Adapted):
        raise CheckpointError(f"{base.path} is an adapter already", "merge it first: kvad merge BASE ADAPTER --out DIR")
    adapter = open_adapter(path)
    return Adapted(adapter.path, base=base, adapter=adapter)


def open_adapted(path: Path) -> Adapted:
    """An adapter's folder with the base that it names.  CheckpointError where that is gone."""
    adapter = open_adapter(path)
    if adapter.base is None:
        raise CheckpointError(f"{adapter.path} is an adapter that does not name its base", _name_it(path))
    try:
        base = load(resolve(adapter.base))
    except CheckpointError as error:
        raise CheckpointError(f"{adapter.path}: its base cannot be opened: {error.message}", _name_it(path)) from error
    return Adapted(adapter.path, base=base, adapter=adapter)


def _name_it(path: Path) -> str:
    return f"if it lies elsewhere now: kvad merge BASE {path} --out DIR, or --adapter {path} beside BASE"


@dataclass(frozen=True, kw_only=True)
class _Parts:
    base: Opened
    adapter: StoredAdapter


@dataclass(frozen=True)
class Adapted(Opened, _Parts):
    """A base with an adapter merged in.  ``path`` is the adapter's; all but the weights is the base's, and what kvad
    wrote of a conversation beside an adapter that was trained on them: a chat template, and what ends a turn."""

    @property
    def config(self) -> ModelConfig:
        return self.base.config

    @property
    def generation(self) -> Generation:
        there = self.path / GENERATION
        if not there.is_file():
            return self.base.generation
        return replace(self.base.generation, stops=read_generation({}, read_json(there)).stops)

    @property
    def origin(self) -> str | None:
        return self.base.origin

    @property
    def stored(self) -> torch.dtype:
        return self.base.stored

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The base's."""
        return self.base.tensors

    @cached_property
    def factors(self) -> dict[str, Factors]:
        return self.adapter.factors(self.base)

    @property
    def words(self) -> Path:
        """The base's, where the adapter's folder has none."""
        there = any(True for pattern in TOKENIZERS for _ in self.path.glob(pattern))
        return self.path if there else self.base.words

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
                yield name, merged(tensor, part, dtype)

    def fingerprint(self) -> str:
        """sha256 (hex) of base and adapter; a base that kvad did not write by every byte of its weights."""
        base = self.base.fingerprint() if self.base.files is not None else base_fingerprint(self.base)
        return hashlib.sha256(f"{base} {self.adapter_fingerprint}".encode()).hexdigest()

    @property
    def adapter_fingerprint(self) -> str:
        """Of the adapter alone."""
        return fingerprint(self.factors)


def _beside(adapted: Adapted, name: str) -> Path:
    """A file beside the merged weights: the base's, but for what a conversation is like."""
    own = adapted.path / name
    return own if name in (GENERATION, "chat_template.jinja") and own.is_file() else adapted.base.path / name


def merge(adapted: Adapted, out: Path, dtype: torch.dtype | None = None) -> None:
    """Write the merged model in its base's layout: the base's own files beside merged weights, stored in ``dtype`` (the
    base's).  Raises CheckpointError, SaveError."""
    base = adapted.base
    tensors = dict(adapted.weights_as(dtype))
    if not isinstance(base, Imported):
        beside = [path for name in BESIDE if (path := _beside(adapted, name)).is_file()]
        save(out, base.config, tensors, None, generation=adapted.generation, beside=beside, origin=base.origin)
        return
    with new_folder(out) as new:
        name = str(dtype or base.stored).removeprefix("torch.")
        write_json(new / CONFIG, {**base.fields.content, "dtype": name, "torch_dtype": name})
        write_sharded(new, write_tensors(base.family, base.config, tensors))
        for each in (*BESIDE, GENERATION):
            if (path := _beside(adapted, each)).is_file():
                shutil.copyfile(path, new / each)
        write_pooling(new, base.generation, base.config.width)
