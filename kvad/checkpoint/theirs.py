"""A model in Hugging Face's layout: the family that can hold it, and the JSON that stands beside its weights.

Which class of theirs can hold a model is asked of the families: one can if it writes a config that it reads back as the
very same model (:meth:`Family.write`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvad.cache.weights import weight_shapes
from kvad.checkpoint.families import FAMILIES, find_family
from kvad.checkpoint.folder import CONFIG
from kvad.checkpoint.generation import (
    GENERATION_FILE,
    GenerationConfig,
    config_json_fields,
    generation_json,
    read_generation_config,
)
from kvad.checkpoint.hf import Family, HFConfigReader
from kvad.config import ModelConfig
from kvad.errors import CheckpointError, UsageError, suggest

__all__ = ["HFLayout", "choose_family", "choose_layout", "write_hf_config", "write_json_file"]

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
    if list(weight_shapes(again)) != list(weight_shapes(config)):
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
