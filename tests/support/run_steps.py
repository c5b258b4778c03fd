"""Steps of a run without training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kvad.checkpoint.native import new_step, save_checkpoint
from kvad.config.model import ModelConfig
from kvad.text.tokenizer import Tokenizer


def save_step(
    run: Path,
    step: int,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None = None,
    keep: int = 2,
    best: int | None = None,
    fresh: bool = False,
    **options: Any,
) -> Path:
    """Write a step of a run and return its folder; ``options`` are those of ``save_checkpoint``."""
    with new_step(run, step, keep, best, fresh) as (folder, replaced):
        save_checkpoint(folder, config, tensors, tokenizer, replaces=replaced, **options)
    return folder
