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

from kvad.checkpoint.families import find_family
from kvad.checkpoint.folder import CONFIG, is_hf, read_json
from kvad.checkpoint.generation import GENERATION_FILE, GenerationConfig, read_generation_config, read_pooling
from kvad.checkpoint.hf import Family, HFConfigReader, read_tensors, resolve_config
from kvad.checkpoint.hub import check_readable_weights
from kvad.checkpoint.opened import CheckpointHandle
from kvad.checkpoint.shards import ShardedTensors, open_tensors
from kvad.config import ModelConfig
from kvad.errors import CheckpointError, TokenizerError
from kvad.text.tokenizer import Tokenizer

__all__ = ["HFCheckpoint", "is_hf", "read_hf_config"]


def read_hf_config(path: Path) -> tuple[ModelConfig, str | None]:
    """The model that a ``config.json`` describes, no weight being there to settle what it leaves open, and the dtype
    that it names.  Raises CheckpointError for a family, an option or a quantization that kvad does not know."""
    fields = HFConfigReader(read_json(path), str(path))
    if fields.get("quantization_config") or fields.get("compression_config"):
        hint = "use the model that it was made from; its model card names it"
        raise CheckpointError(f"{path}: it is quantized, and kvad reads plain weights only", hint)
    dtype = fields.get("dtype", fields.get("torch_dtype"))
    return _family(fields).read(fields), dtype if isinstance(dtype, str) else None


def _family(fields: HFConfigReader) -> Family:
    try:
        return find_family(fields.model_type)
    except CheckpointError as error:
        code = "; its own code is never run" if "auto_map" in fields else ""
        raise CheckpointError(f"{fields.where}: {error.message}{code}", error.hint) from error


class HFCheckpoint(CheckpointHandle):
    """A family's config and tensors, under our names."""

    @cached_property
    def fields(self) -> HFConfigReader:
        check_readable_weights(self.path)
        return HFConfigReader(read_json(self.path / CONFIG), str(self.path / CONFIG))

    @cached_property
    def family(self) -> Family:
        return _family(self.fields)

    @cached_property
    def config(self) -> ModelConfig:
        config = self.family.read(self.fields)
        return (
            resolve_config(self.family, config, self.tensors)
            if config.tie_embeddings or self.family.resolve
            else config
        )

    @cached_property
    def generation(self) -> GenerationConfig:
        path = self.path / GENERATION_FILE
        said = read_generation_config(self.fields.content, read_json(path) if path.exists() else None)
        pool, unit = read_pooling(self.path) if self.config.kind == "encoder" else (None, False)
        forced = {"forced_bos_token_id": said.forced_bos_token_id, "forced_eos_token_id": said.forced_eos_token_id}
        for name, token in [*forced.items(), *(("bad_words_ids", token) for token in said.suppress_tokens)]:
            if token is not None and not 0 <= token < self.config.vocab_size:
                raise CheckpointError(f"{path}: {name}: {token} is outside the vocabulary of {self.config.vocab_size}")
        return replace(said, pooling=pool, normalize=unit)

    def read_tokenizer(self) -> Tokenizer | None:
        tokenizer = super().read_tokenizer()
        if tokenizer is not None and tokenizer.vocab_size > self.config.vocab_size:
            raise TokenizerError(
                f"{self.path}: the tokenizer has {tokenizer.vocab_size:,} ids, the model {self.config.vocab_size:,}",
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
    def stored_dtype(self) -> torch.dtype:
        """The dtype of its largest tensor."""
        return self.tensors.dtype(max(self.tensors, key=self.tensors.bytes))

    @property
    def num_bytes(self) -> int:
        return self.tensors.total_bytes

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Our tensors, mapped or made one rule at a time.  Raises CheckpointError as :func:`read_tensors` does."""
        yield from read_tensors(self.family, self.config, self.tensors, str(self.path))
