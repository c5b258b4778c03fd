"""What is in a checkpoint, from its small files and its headers: no weight is read, and in kvad's layout no torch.

``problems`` are what a load would refuse: files that are missing or not as long as the manifest says, no manifest at
all; tensors that are missing, that nobody asked for, or that have another shape than the config says.  ``check`` reads
every file.  A Hugging Face folder of others has no manifest, and that is no problem.  In their layout, tensors are
listed under their own names and counted under ours, and the family imports torch (``lab/plan.py`` says why).
Attention maps need a running model and are asked of :class:`kvad.llm.LLM`, which is imported only then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvad import checkpoint, planning
from kvad import config as config_lib
from kvad import text as text_lib
from kvad.cache import sizing
from kvad.cache.sizing import MemoryPlan
from kvad.config import ModelConfig
from kvad.errors import CheckpointError, RequestError, TokenizerError, UsageError
from kvad.inspection.attention_plot import AttentionMap
from kvad.planning import plan_target, read_target

NO_MANIFEST = f"{checkpoint.folder.MANIFEST} is missing: whether these files are those that were saved cannot be known"


class TokenizerSummary(NamedTuple):
    kind: str
    vocab: int
    specials: Mapping[str, int]


@dataclass(frozen=True)
class CheckpointSummary:
    """``parameters`` by part, of what is stored; ``training``: what the checkpoint says of its training, or None.

    ``files``: how many the manifest lists, None without one; ``checked``: all of them have the manifest's sha256.
    ``origin``: the ``model_type`` of a folder in Hugging Face's layout.
    """

    path: Path
    config: ModelConfig
    tensors: tuple[checkpoint.safetensors_header.TensorInfo, ...]
    parameters: Mapping[str, int]
    problems: tuple[str, ...]
    plan: MemoryPlan
    tokenizer: TokenizerSummary | None
    training: Mapping[str, Any] | None
    files: int | None
    checked: bool
    origin: str | None = None

    @property
    def num_parameters(self) -> int:
        return sum(self.parameters.values())


class AttentionSummary(NamedTuple):
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    maps: tuple[AttentionMap, ...]


def summarize_checkpoint(folder: Path, *, check: bool = False) -> CheckpointSummary:
    """Of a folder, a run, or a name on the hub.  ``check``: also compare every file with its sha256 (this reads them
    all, and imports torch).

    Raises CheckpointError for what is not a whole checkpoint, and for a file that ``check`` finds to be another than
    the manifest's; ConfigError for a config that cannot be; UsageError for a check of a folder without any manifest.
    """
    path = checkpoint.folder.locate(checkpoint.hub.resolve_model_path(folder))
    if check and not checkpoint.folder.is_native(path):
        raise UsageError(f"{path}: a Hugging Face folder has no manifest to check against", f"kvad doctor {path}")
    if check:
        from kvad import checkpoint

        checkpoint.native.open_folder(path, verify=True)
    files = checkpoint.folder.list_files(path) if (path / checkpoint.folder.MANIFEST).is_file() else None
    target = read_target(str(path))
    contents = _hf_contents(path, target.config) if checkpoint.folder.is_hf(path) else _contents(path, target.config)
    unknown = (NO_MANIFEST,) if files is None and checkpoint.folder.is_native(path) else ()
    return CheckpointSummary(
        path=path,
        config=target.config,
        tensors=contents.tensors,
        parameters=contents.parameters,
        problems=(*unknown, *_file_problems(path, files or {}), *contents.problems),
        plan=plan_target(target, budget=sizing.memory_plan.DEFAULT_BATCHED_TOKENS),
        tokenizer=contents.tokenizer,
        training=_training(path),
        files=None if files is None else len(files),
        checked=check,
        origin=target.origin,
    )


class _Contents(NamedTuple):
    """What is in the tensor file and the tokenizer's, read as the layout asks."""

    tensors: tuple[checkpoint.safetensors_header.TensorInfo, ...]
    parameters: Mapping[str, int]
    problems: Sequence[str]
    tokenizer: TokenizerSummary | None


def _contents(path: Path, config: ModelConfig) -> _Contents:
    tensors = tuple(checkpoint.safetensors_header.read_headers(path / checkpoint.folder.MODEL))
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    return _Contents(
        tensors,
        config_lib.parameter_shapes.component_sizes(shapes),
        config_lib.parameter_shapes.mismatches(config, shapes),
        _tokenizer(path),
    )


def _hf_contents(path: Path, config: ModelConfig) -> _Contents:
    """Tensors without their data, on torch's meta device, tell which names and shapes do not fit."""
    import torch

    from kvad import checkpoint

    opened = checkpoint.hf_layout.HFCheckpoint(path)
    theirs = opened.tensors
    meta = {name: torch.empty(theirs.shape(name), dtype=theirs.dtype(name), device="meta") for name in theirs}
    tensors = tuple(
        checkpoint.safetensors_header.TensorInfo(
            name, str(theirs.dtype(name)).removeprefix("torch."), theirs.shape(name), theirs.bytes(name)
        )
        for name in theirs
    )
    problems = checkpoint.conversion.find_mismatches(opened.family, config, meta, str(path))
    tokenizer = None
    try:
        found = opened.tokenizer
        tokenizer = (
            None if found is None else TokenizerSummary(found.kind, found.vocab_size, found.special_tokens.names())
        )
    except TokenizerError as error:
        problems.append(error.message)
    return _Contents(
        tensors,
        config_lib.parameter_shapes.component_sizes(config_lib.parameter_shapes.weight_shapes(config)),
        problems,
        tokenizer,
    )


def _file_problems(path: Path, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    found = []
    for name, entry in files.items():
        try:
            checkpoint.folder.check_file(path / name, entry)
        except CheckpointError as error:
            found.append(error.message)
    return found


def _tokenizer(folder: Path) -> TokenizerSummary | None:
    if not (folder / text_lib.base.FILE_NAME).is_file():
        return None
    from kvad.text import load_tokenizer

    tokenizer = load_tokenizer(folder)
    return TokenizerSummary(tokenizer.kind, tokenizer.vocab_size, tokenizer.special_tokens.names())


def _training(folder: Path) -> Mapping[str, Any] | None:
    """The state that training goes on from, and the size of its tensors."""
    state = folder / checkpoint.folder.TRAINING / "state.json"
    if not state.is_file():
        return None
    tensors = checkpoint.safetensors_header.read_headers(state.with_suffix(".safetensors"))
    return {
        **checkpoint.folder.read_json(state),
        "tensors": len(tensors),
        "tensor_bytes": sum(tensor.bytes for tensor in tensors),
    }


def attention_maps(
    folder: Path,
    text: str,
    *,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    cached: bool = False,
    target: str | None = None,
) -> AttentionSummary:
    """Run ``text`` once and keep the weights of the layers and heads asked for (None: all).

    An encoder-decoder reads ``target`` beside it (None: its own answer).  Raises CheckpointError for a folder that
    cannot be loaded, RequestError for a layer or head that is not there.
    """
    from kvad.inspection.encoder_attention import encoder_decoder_maps
    from kvad.llm import LLM

    with LLM.load(folder, rows=1, capacity=16) as llm:  # the engine's own pool is not used
        if llm.model.config.encoder is not None:
            if cached:
                raise RequestError("--cached: an encoder keeps no cache", "leave it out")
            return AttentionSummary(*encoder_decoder_maps(llm, text, target, layers=layers, heads=heads))
        if target is not None:
            raise RequestError("a decoder has no target beside its text", "leave --target out")
        traced = llm.trace(text, layers=layers, heads=heads, cached=cached)
    maps = []
    for layer, seen in traced.layers.items():
        chosen = range(seen.weights.shape[0]) if heads is None else heads
        for head, weights in zip(chosen, seen.weights.tolist(), strict=True):
            maps.append(AttentionMap(layer, head, weights))
    return AttentionSummary(tuple(traced.tokens), tuple(traced.token_texts), tuple(maps))


def outline_values(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One line ``key.inner  value`` per value; objects inside open up, what is null or empty stays away."""
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += outline_values(value, f"{prefix}{key}.")
        elif value is not None and value != []:
            shown = json.dumps(value, ensure_ascii=False)
            lines.append(f"{prefix + key:<44} {shown if len(shown) <= 60 else shown[:57] + '...'}")
    return lines


def _tensor_json(tensor: checkpoint.safetensors_header.TensorInfo, ours: bool) -> Mapping[str, object]:
    """Its part is known by our names only."""
    return {**tensor._asdict(), "part": config_lib.parameter_shapes.tensor_component(tensor.name) if ours else None}


def summary_to_json(summary: CheckpointSummary) -> Mapping[str, object]:
    """What ``kvad inspect --json`` prints; ``tensors`` always, they are small."""
    return {
        "path": summary.path,
        "origin": summary.origin,
        "config": summary.config.to_dict(),
        "parameters": {"total": summary.num_parameters, **summary.parameters},
        "tensors": [_tensor_json(tensor, summary.origin is None) for tensor in summary.tensors],
        "problems": summary.problems,
        "memory": planning.report.memory_to_json(summary.plan),
        "manifest": None if summary.files is None else {"files": summary.files, "checked": summary.checked},
        "tokenizer": summary.tokenizer,
        "training": summary.training,
    }
