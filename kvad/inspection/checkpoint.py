"""Contents of a checkpoint, from its small files and headers; reads no weight, and no torch for kvad's layout.

``problems`` are the reasons for which loading would fail: files that are missing or shorter than in the manifest, a
missing manifest, tensors that are missing, superfluous or of another shape than the configuration gives. ``check``
reads every file. A Hugging Face folder has no manifest, which is no problem; its tensors are listed by their own names
and counted by kvad's, and the family's module imports torch. Attention maps need a running model
(``kvad.llm.LLM``), which is imported only then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvad import checkpoint, planning
from kvad import config as cfg
from kvad import text as text_lib
from kvad.cache import sizing
from kvad.cache.sizing import MemoryPlan
from kvad.config import ModelConfig
from kvad.engine import AttentionMap
from kvad.errors import CheckpointError, RequestError, TokenizerError, UsageError
from kvad.planning import plan_target, read_target
from kvad.text import Tokenizer

MAX_WEIGHTS = 20_000_000  # of a drawing of attention: one head of 4,472 tokens


class TokenizerSummary(NamedTuple):
    """A tokenizer's kind, size and special tokens."""

    kind: str
    vocab: int
    specials: Mapping[str, int]


@dataclass(frozen=True)
class CheckpointSummary:
    """Summary of a checkpoint."""

    path: Path
    config: ModelConfig
    tensors: tuple[checkpoint.safetensors_header.TensorInfo, ...]
    parameters: Mapping[str, int]  # stored numbers by part
    problems: tuple[str, ...]
    plan: MemoryPlan
    tokenizer: TokenizerSummary | None
    training: Mapping[str, Any] | None  # stored training state
    files: int | None  # in the manifest, None without one
    checked: bool  # all of them match the manifest's sha256
    unused_keys: tuple[str, ...] = ()  # of a Hugging Face config.json
    origin: str | None = None  # the model_type of a folder in Hugging Face's layout
    quantization: str | None = None  # of the file's matrices

    @property
    def num_parameters(self) -> int:
        return sum(self.parameters.values())


_Contents = tuple[tuple[checkpoint.safetensors_header.TensorInfo, ...], Mapping[str, int], Tokenizer | None]


class AttentionSummary(NamedTuple):
    """Attention maps of a text."""

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    maps: tuple[AttentionMap, ...]


def summarize_checkpoint(folder: Path, *, check: bool = False) -> CheckpointSummary:
    """Summarize a folder, a run, a GGUF file or a name on the hub; ``check`` reads every file and imports torch.

    Raises:
        CheckpointError: If the checkpoint is incomplete, or ``check`` finds a changed file.
        ConfigError: If the config is invalid.
        UsageError: If a folder without manifest is to be checked.
    """
    path = checkpoint.hub.resolve_model_path(folder)
    is_gguf = path.is_file() and path.suffix == ".gguf"
    path = path if is_gguf else checkpoint.folder.locate(path)
    is_hf = is_gguf or checkpoint.folder.is_hf(path)
    if check and (is_gguf or not checkpoint.folder.is_native(path)):
        kind = "GGUF file" if is_gguf else "Hugging Face folder"
        raise UsageError(f"{path}: a {kind} has no manifest to check against", "" if is_gguf else f"kvad doctor {path}")
    if check:
        checkpoint.native.open_folder(path, verify=True)
    files = checkpoint.folder.list_files(path) if (path / checkpoint.folder.MANIFEST).is_file() else None
    target, problems = read_target(str(path)), list[str]()
    if files is None and not is_gguf and checkpoint.folder.is_native(path):
        problems.append(
            f"{checkpoint.folder.MANIFEST} is missing: whether these files are those that were saved cannot be known"
        )
    for name, entry in (files or {}).items():
        try:
            checkpoint.folder.check_file(path / name, entry, "sha256" if checkpoint.folder.is_text(name) else "size")
        except CheckpointError as error:
            problems.append(error.message)
    handle: checkpoint.hf_layout.HFCheckpoint | None = None
    if is_hf:
        handle = checkpoint.gguf.GGUFCheckpoint(path) if is_gguf else checkpoint.hf_layout.HFCheckpoint(path)
    if handle is None:
        tensors, parameters, tokenizer = _native_contents(path, target.config, problems)
    else:
        tensors, parameters, tokenizer = _hf_contents(handle, target.config, problems)
    summary = None
    if tokenizer is not None:
        summary = TokenizerSummary(tokenizer.kind, tokenizer.vocab_size, tokenizer.special_tokens.names())
    return CheckpointSummary(
        path=path,
        config=target.config,
        tensors=tensors,
        parameters=parameters,
        problems=tuple(problems),
        plan=plan_target(target, budget=sizing.memory_plan.DEFAULT_BATCHED_TOKENS),
        tokenizer=summary,
        training=_training(path),
        files=None if files is None else len(files),
        checked=check,
        unused_keys=() if handle is None else handle.unused_keys,
        origin=target.origin,
        quantization=_quantization(path, target.config) if handle is None else handle.quantization,
    )


def _native_contents(path: Path, config: ModelConfig, problems: list[str]) -> _Contents:
    """Read headers and tokenizer; tensors that do not fit the config are added to ``problems``."""
    tensors = tuple(checkpoint.safetensors_header.read_headers(path / checkpoint.folder.MODEL))
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    problems += cfg.parameter_shapes.mismatches(config, shapes)
    has_tokenizer = (path / text_lib.base.FILE_NAME).is_file()
    tokenizer = text_lib.load_tokenizer(path) if has_tokenizer else None
    parameters = cfg.parameter_shapes.component_sizes(cfg.parameter_shapes.dequantized_shapes(config, shapes))
    return tensors, parameters, tokenizer


def _quantization(path: Path, config: ModelConfig) -> str | None:
    found = checkpoint.folder.read_quantization(path)
    return None if found is None else found.describe(config)


def _hf_contents(handle: checkpoint.hf_layout.HFCheckpoint, config: ModelConfig, problems: list[str]) -> _Contents:
    """Do the same for a Hugging Face folder or a GGUF file, with tensors on torch's meta device."""
    import torch

    stored, tokenizer = handle.tensors, None
    meta = {name: torch.empty(stored.shape(name), dtype=stored.dtype(name), device="meta") for name in stored}
    tensors = tuple(
        checkpoint.safetensors_header.TensorInfo(
            name, str(stored.dtype(name)).removeprefix("torch."), stored.shape(name), stored.bytes(name)
        )
        for name in stored
    )
    problems += checkpoint.conversion.find_mismatches(handle.family, handle.transformer_config, meta, str(handle.path))
    try:
        tokenizer = handle.tokenizer
    except TokenizerError as error:
        problems.append(error.message)
    return tensors, cfg.parameter_shapes.component_sizes(cfg.parameter_shapes.weight_shapes(config)), tokenizer


def _training(folder: Path) -> Mapping[str, Any] | None:
    state = folder / checkpoint.folder.TRAINING / "state.json"
    if not state.is_file():
        return None
    tensors = checkpoint.safetensors_header.read_headers(state.with_suffix(".safetensors"))
    sizes = {"tensors": len(tensors), "tensor_bytes": sum(tensor.bytes for tensor in tensors)}
    return {**checkpoint.folder.read_json(state), **sizes}


def attention_maps(
    folder: Path,
    text: str,
    *,
    layers: Sequence[int] | None,
    heads: Sequence[int] | None,
    cached: bool = False,
    target: str | None = None,
    **load: Any,
) -> AttentionSummary:
    """Run ``text`` once and return the weights of the given layers and heads (None: all).

    ``target`` is the decoder input of an encoder-decoder (None: the model's answer); ``load`` are keywords of LLM.load.

    Raises:
        CheckpointError: If the folder cannot be loaded.
        RequestError: If a layer or head does not exist.
    """
    from kvad.inspection.encoder_attention import encoder_decoder_maps
    from kvad.llm import LLM

    with LLM.load(folder, max_num_seqs=1, max_seq_len=16, **load) as llm:  # the engine's own pool is not used
        if llm.model.config.encoder is not None:
            if cached:
                raise RequestError("--use-cache: an encoder has no cache", "Leave it out.")
            return AttentionSummary(*encoder_decoder_maps(llm, text, target, layers=layers, heads=heads))
        if target is not None:
            raise RequestError("--target: a decoder has no separate target", "Leave it out.")
        traced = llm.trace(text, layers=layers, heads=heads, cached=cached)
    count = sum(trace.weights.numel() for trace in traced.layers.values())
    if count > MAX_WEIGHTS:
        message = f"{count:,} attention weights are too many to draw, at most {MAX_WEIGHTS:,}"
        raise RequestError(message, "Choose fewer layers or heads, or a shorter text.")
    return AttentionSummary(tuple(traced.tokens), tuple(traced.token_texts), traced.attention_maps)


def outline_values(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Format one line ``key.inner  value`` per value; nested objects are flattened, null and empty values omitted."""
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += outline_values(value, f"{prefix}{key}.")
        elif value is not None and value != []:
            shown = json.dumps(value, ensure_ascii=False)
            lines.append(f"{prefix + key:<44} {shown if len(shown) <= 60 else shown[:57] + '...'}")
    return lines


def summary_to_json(summary: CheckpointSummary) -> Mapping[str, object]:
    """Build the output of ``kvad inspect --json``; ``tensors`` are always included, they are small."""
    is_native = summary.origin is None
    tensors = [
        {**tensor._asdict(), "part": cfg.parameter_shapes.tensor_component(tensor.name) if is_native else None}
        for tensor in summary.tensors
    ]
    return {
        "path": summary.path,
        "origin": summary.origin,
        "quantization": summary.quantization,
        "config": summary.config.to_dict(),
        "parameters": {"total": summary.num_parameters, **summary.parameters},
        "active_parameters": cfg.parameter_shapes.num_active_parameters(summary.config),
        "tensors": tensors,
        "problems": summary.problems,
        "unused_keys": summary.unused_keys,
        "memory": planning.report.memory_to_json(summary.plan),
        "manifest": None if summary.files is None else {"files": summary.files, "checked": summary.checked},
        "tokenizer": summary.tokenizer,
        "training": summary.training,
    }
