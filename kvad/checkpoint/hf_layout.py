"""A model in Hugging Face's layout: the family that can hold it, and the JSON that stands beside its weights.

Which class of theirs can hold a model is asked of the families: one can if it writes a config that it reads back as the
very same model (:meth:`Family.write`).

A folder in Hugging Face's layout, ours or another's, as a checkpoint: its family's config, its tokenizer, its
tensors under our names, lazily.

Nothing of the folder runs: ``auto_map`` is not followed, no pickle is opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvad import config as config_lib
from kvad.checkpoint.conversion import Family, HFConfigReader, read_tensors, resolve_config
from kvad.checkpoint.families import FAMILIES, find_family
from kvad.checkpoint.folder import CONFIG, read_json
from kvad.checkpoint.generation_config import (
    GENERATION_FILE,
    GenerationConfig,
    config_json_fields,
    generation_json,
    read_generation_config,
    read_pooling,
)
from kvad.checkpoint.handle import CheckpointHandle
from kvad.checkpoint.hub import check_readable_weights
from kvad.checkpoint.safetensors_io import ShardedTensors, open_tensors
from kvad.config import ModelConfig
from kvad.errors import CheckpointError, TokenizerError, UsageError, suggest
from kvad.text import Tokenizer

# Asked in this order, then all others: the plainest class that can hold it.
PREFERRED_FAMILIES = {"decoder": ("llama", "gpt2"), "encoder": ("bert",), "encoder-decoder": ("marian", "bart", "t5")}


class HFLayout(NamedTuple):
    """A family that holds a model, and the config that it writes of it; ``exact``: one that came with the model, which
    says all, also about generating."""

    family: Family
    content: Mapping[str, Any]
    exact: bool = False

    @property
    def hf_class(self) -> str:
        """The class of theirs that reads it."""
        return str(self.content["architectures"][0])


def choose_family(config: ModelConfig, wanted: str | None = None) -> HFLayout:
    """``wanted``: a ``model_type``.  CheckpointError says what of the model it cannot express; without ``wanted``, that
    no family can, and what the first asked said."""
    if wanted is not None:
        if wanted not in FAMILIES:
            raise UsageError(f"unknown family {wanted!r}", suggest(wanted, FAMILIES))
        return HFLayout(find_family(wanted), find_family(wanted).write(config))
    reasons = []
    for name in dict.fromkeys((*PREFERRED_FAMILIES[config.kind], *sorted(FAMILIES))):
        try:
            return HFLayout(find_family(name), find_family(name).write(config))
        except CheckpointError as error:
            reasons.append(error.message)
    raise CheckpointError("no class of transformers can hold this model", f"of the first asked: {reasons[0]}")


def choose_layout(config: ModelConfig, generation: GenerationConfig, wanted: str | None = None) -> HFLayout:
    """A layout from which training can go on: what is read back has our parameters' names too, which the optimizer's
    state is kept by, and says the same about generating.  ``wanted``: a ``model_type``.  CheckpointError says why there
    is none."""
    layout = choose_family(config, wanted)
    again = layout.family.read(HFConfigReader(layout.content, CONFIG))
    if list(config_lib.parameter_shapes.weight_shapes(again)) != list(
        config_lib.parameter_shapes.weight_shapes(config)
    ):
        raise CheckpointError(f"{layout.hf_class} would read it back under other parameters' names")
    content = _content(layout, generation, torch.float32)
    if read_generation_config(content, generation_json(generation)) != generation:
        raise CheckpointError(f"{layout.hf_class} would read back another way of generating")
    return layout


def write_hf_config(folder: Path, layout: HFLayout, generation: GenerationConfig, dtype: torch.dtype) -> None:
    """``config.json``, and ``generation_config.json`` where there is something to say."""
    if layout.exact:
        name = str(dtype).removeprefix("torch.")
        write_json_file(folder / CONFIG, {**layout.content, "dtype": name, "torch_dtype": name})
        return
    write_json_file(folder / CONFIG, _content(layout, generation, dtype))
    said = generation_json(generation)
    if said is not None:
        write_json_file(folder / GENERATION_FILE, said)


def write_json_file(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _content(layout: HFLayout, generation: GenerationConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Token ids that are not known are null, for their classes have ids of their own for what is not said; and a
    family's own padding decides positions."""
    said = {name: value for name, value in layout.content.items() if value is not None}
    name = str(dtype).removeprefix("torch.")
    return {**layout.content, **config_json_fields(generation), **said, "dtype": name, "torch_dtype": name}


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
