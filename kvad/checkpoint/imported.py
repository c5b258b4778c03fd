"""A folder in Hugging Face's layout, ours or another's, as a checkpoint: its family's config, its tokenizer, its
tensors under our names, lazily.

Nothing of the folder runs: ``auto_map`` is not followed, no pickle is opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from kvad.checkpoint.families import find
from kvad.checkpoint.folder import CONFIG, is_foreign, read_json
from kvad.checkpoint.generation import GENERATION, Generation, read_generation, read_pooling
from kvad.checkpoint.hf import Family, Fields, read_tensors, settled
from kvad.checkpoint.hub import refuse_unreadable
from kvad.checkpoint.opened import Opened
from kvad.checkpoint.shards import ShardedTensors, open_tensors
from kvad.config import ModelConfig
from kvad.errors import CheckpointError, TokenizerError
from kvad.text.tokenizer import Tokenizer

__all__ = ["Imported", "is_foreign", "read_config"]


def read_config(path: Path) -> tuple[ModelConfig, str | None]:
    """The model that a ``config.json`` describes, no weight being there to settle what it leaves open, and the dtype
    that it names.  Raises CheckpointError for a family, an option or a quantization that kvad does not know."""
    fields = Fields(read_json(path), str(path))
    if fields.get("quantization_config") or fields.get("compression_config"):
        hint = "use the model that it was made from; its model card names it"
        raise CheckpointError(f"{path}: it is quantized, and kvad reads plain weights only", hint)
    dtype = fields.get("dtype", fields.get("torch_dtype"))
    return _family(fields).read(fields), dtype if isinstance(dtype, str) else None


def _family(fields: Fields) -> Family:
    try:
        return find(fields.model_type)
    except CheckpointError as error:
        code = "; its own code is never run" if "auto_map" in fields else ""
        raise CheckpointError(f"{fields.where}: {error.message}{code}", error.hint) from error


class Imported(Opened):
    """A family's config and tensors, under our names."""

    @cached_property
    def fields(self) -> Fields:
        refuse_unreadable(self.path)
        return Fields(read_json(self.path / CONFIG), str(self.path / CONFIG))

    @cached_property
    def family(self) -> Family:
        return _family(self.fields)

    @cached_property
    def config(self) -> ModelConfig:
        config = self.family.read(self.fields)
        return settled(self.family, config, self.tensors) if config.tie or self.family.settle else config

    @cached_property
    def generation(self) -> Generation:
        path = self.path / GENERATION
        said = read_generation(self.fields.content, read_json(path) if path.exists() else None)
        pool, unit = read_pooling(self.path) if self.config.kind == "encoder" else (None, False)
        forced = {"forced_bos_token_id": said.forced_first, "forced_eos_token_id": said.forced_last}
        for name, token in [*forced.items(), *(("bad_words_ids", token) for token in said.banned)]:
            if token is not None and not 0 <= token < self.config.vocab:
                raise CheckpointError(f"{path}: {name}: {token} is outside the vocabulary of {self.config.vocab}")
        return replace(said, pool=pool, unit=unit)

    def read_tokenizer(self) -> Tokenizer | None:
        tokenizer = super().read_tokenizer()
        if tokenizer is not None and tokenizer.vocab_size > self.config.vocab:
            raise TokenizerError(
                f"{self.path}: the tokenizer has {tokenizer.vocab_size:,} ids, the model {self.config.vocab:,}",
                "do they belong together?",
            )
        return tokenizer

    @cached_property
    def tensors(self) -> ShardedTensors:
        """Theirs, by their names."""
        return open_tensors(self.path)

    @property
    def origin(self) -> str:
        return self.fields.model_type

    @property
    def stored(self) -> torch.dtype:
        """The dtype of its largest tensor."""
        return self.tensors.dtype(max(self.tensors, key=self.tensors.bytes))

    @property
    def num_bytes(self) -> int:
        return self.tensors.total_bytes

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Our tensors, mapped or made one rule at a time.  Raises CheckpointError as :func:`read_tensors` does."""
        yield from read_tensors(self.family, self.config, self.tensors, str(self.path))
