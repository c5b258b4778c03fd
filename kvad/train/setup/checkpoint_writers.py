"""Writers of a run's checkpoints: complete models, adapters, summarizers.

Config, tokenizer, generation settings and layout of a checkpoint that a run starts from are kept; only weights change.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from kvad import checkpoint, storage
from kvad import model as model_lib
from kvad.checkpoint import CheckpointHandle, GenerationConfig
from kvad.config import ModelConfig
from kvad.errors import CheckpointError
from kvad.text import Tokenizer
from kvad.train.config import RunConfig, SummarizerConfig

EMBEDDING_FIELDS = ("pooling", "normalize", "max_embed_tokens", "lowercase", "prompts", "prompt_name")
CheckpointSnapshot = checkpoint.handle.CheckpointSnapshot


class CheckpointWriter(ABC):
    """Writes the steps of a run."""

    def weights(self, module: Any) -> Mapping[str, Tensor]:
        """Return the tensors of ``module`` to be written, without copying."""
        state_dict: Mapping[str, Tensor] = module.state_dict()
        return state_dict

    def save(self, run: Path, snapshot: CheckpointSnapshot, *, keep: int, fresh: bool) -> Path:
        """Write a step, prune older ones, and return its folder.

        Args:
            keep: Number of newest steps to retain.
            fresh: First save of a new run; the steps of an old one are replaced.
        """
        with checkpoint.native.new_step(run, snapshot.step, keep, snapshot.best, fresh) as (folder, replaced):
            self._save(folder, snapshot, replaced)
        return folder

    @abstractmethod
    def _save(self, folder: Path, snapshot: CheckpointSnapshot, replaced: Sequence[Path]) -> None:
        """Write the folder of a step; the folders ``replaced`` are removed in the same move."""


@dataclass(frozen=True)
class FullCheckpointWriter(CheckpointWriter):
    """Writes complete checkpoints: config, generation settings, tokenizer and extra files."""

    config: ModelConfig
    layout: checkpoint.hf_layout.HFLayout | None
    generation: GenerationConfig
    tokenizer: Tokenizer | None  # None if it is among the files
    files: Mapping[str, bytes]  # small files written unchanged
    origin: str | None = None

    def with_chat_template(self, files: Mapping[str, bytes], generation: GenerationConfig) -> FullCheckpointWriter:
        """Return a writer with a chat template and the end-of-turn tokens of ``generation``."""
        name = checkpoint.generation_config.GENERATION_FILE
        is_exact = self.layout is not None and self.layout.exact
        ends = {name: _generation_bytes(self.files.get(name), generation)} if is_exact else {}
        return replace(self, generation=generation, files={**self.files, **files, **ends})

    def _save(self, folder: Path, snapshot: CheckpointSnapshot, replaced: Sequence[Path]) -> None:
        checkpoint.native.save_checkpoint(
            folder,
            self.config,
            snapshot.weights,
            self.tokenizer,
            snapshot.training,
            layout=self.layout,
            generation=self.generation,
            files=self.files,
            origin=self.origin,
            replaces=replaced,
        )


@dataclass(frozen=True)
class AdapterCheckpointWriter(CheckpointWriter):
    """Writes checkpoints that hold only adapters."""

    form: checkpoint.adapter.AdapterFormat
    config: RunConfig

    def with_chat_template(self, files: Mapping[str, bytes], generation: GenerationConfig) -> AdapterCheckpointWriter:
        """Return a writer whose adapter folder also holds the chat template."""
        ends = {checkpoint.generation_config.GENERATION_FILE: _generation_bytes(None, generation)}
        return replace(self, form=replace(self.form, tokenizer_files={**self.form.tokenizer_files, **files, **ends}))

    def weights(self, module: model_lib.Transformer) -> Mapping[str, Tensor]:
        """Return ``NAME.a`` and ``NAME.b`` of every adapted module."""
        pairs = model_lib.lora.adapter_factors(module).items()
        return {f"{name}.{side}": getattr(pair, side) for name, pair in pairs for side in "ab"}

    def _save(self, folder: Path, snapshot: CheckpointSnapshot, replaced: Sequence[Path]) -> None:
        lora, weights = self.config.lora, snapshot.weights
        assert lora is not None
        names = [name.removesuffix(".a") for name in weights if name.endswith(".a")]
        factors = {n: model_lib.lora.LoraFactors(weights[f"{n}.a"], weights[f"{n}.b"], lora.scale) for n in names}
        settings = {name: getattr(lora, name) for name in ("rank", "alpha", "use_rslora", "dropout")}
        checkpoint.adapter.save_adapter(
            folder, self.form, factors, training=snapshot.training, replaces=replaced, **settings
        )


@dataclass(frozen=True)
class SummarizerWriter(CheckpointWriter):
    """Writes checkpoints that hold only a summarizer."""

    fingerprint: str  # of the model whose cache is summarized
    options: SummarizerConfig

    def _save(self, folder: Path, snapshot: CheckpointSnapshot, replaced: Sequence[Path]) -> None:
        settings = {key: getattr(self.options, key) for key in ("ratio", "hidden_size", "recent", "num_sinks")}
        settings["val_loss"] = snapshot.training.state["trainer_state"]["val_loss"]
        checkpoint.summarizer.save_summarizer(
            folder, snapshot.weights, self.fingerprint, settings, snapshot.training, replaces=replaced
        )


def writer_of_new_model(
    config: ModelConfig,
    generation: GenerationConfig,
    tokenizer: Tokenizer,
    files: Mapping[str, bytes],
    log: Callable[[str], None],
) -> FullCheckpointWriter:
    """Return a writer in a Hugging Face layout if one can hold the model, else in kvad's."""
    layout = None
    try:
        layout = checkpoint.hf_layout.choose_layout(config, generation)
        log(f"checkpoints: Hugging Face's layout, read by transformers as {layout.hf_class}")
    except CheckpointError as error:
        log(f"checkpoints: kvad's layout, because {error.message}{f' ({error.hint})' if error.hint else ''}")
    return FullCheckpointWriter(config, layout, generation, tokenizer, files)


def writer_like(opened: CheckpointHandle) -> FullCheckpointWriter:
    """Return a writer that keeps the config, tokenizer, settings and layout of a model."""
    files, layout, origin = checkpoint.handle.read_tokenizer_files(opened.path), None, opened.origin
    if isinstance(opened, checkpoint.hf_layout.HFCheckpoint):
        layout, origin = checkpoint.hf_layout.HFLayout(opened.family, opened.fields.content, exact=True), None
        generation_file = opened.path / checkpoint.generation_config.GENERATION_FILE
        if generation_file.is_file():
            files |= {generation_file.name: generation_file.read_bytes()}
    return FullCheckpointWriter(opened.config, layout, opened.generation, None, files, origin)


def writer_for_new_head(opened: CheckpointHandle, config: ModelConfig) -> FullCheckpointWriter:
    """Return a writer for a new head: in its own family's layout, else another one, else kvad's."""
    embedding = {name: getattr(GenerationConfig(), name) for name in EMBEDDING_FIELDS}
    generation = replace(opened.generation, takes_pairs=False, **embedding)
    layout = None
    for family in (opened.origin, None):
        try:
            layout = checkpoint.hf_layout.choose_layout(config, generation, family)
            break
        except CheckpointError:
            continue
    return FullCheckpointWriter(config, layout, generation, None, checkpoint.handle.read_tokenizer_files(opened.path))


def _generation_bytes(before: bytes | None, generation: GenerationConfig) -> bytes:
    """Return ``generation_config.json`` with all tokens that end an answer."""
    if before is None:
        content = checkpoint.generation_config.generation_json(generation) or {}
    else:
        content = storage.strict_json.loads(before)
    return json.dumps({**content, "eos_token_id": list(generation.eos_token_ids)}, indent=2).encode()
