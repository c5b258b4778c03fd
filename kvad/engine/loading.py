"""Parts of ``LLM.load``: the memory plan of an opened checkpoint, its warnings and its adapters."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from kvad import checkpoint, model
from kvad.cache import CacheConfig
from kvad.cache.sizing import (
    MemoryBudget,
    MemoryPlan,
    SpeculationShape,
    available_bytes,
    describe_room,
    plan_memory,
    require_memory,
)
from kvad.checkpoint import CheckpointHandle
from kvad.engine.options import EngineConfig, PlanSettings, ServedAdapter, free_device_bytes, plan_cache
from kvad.engine.scheduling import SpeculativeConfig
from kvad.errors import CheckpointError, ConfigError

LOG = logging.getLogger(__name__)
FREE_FIELDS = (
    "max_inter_token",
    "max_slowdown",
    "compile",
    "speculative",
    "adapters",
)  # of EngineConfig: not arguments of a plan


def with_adapters(config: EngineConfig, handle: CheckpointHandle, summarizer: str | Path | None) -> EngineConfig:
    """Load the summarizer, if any, and add the fingerprint of a merged adapter."""
    if summarizer is not None:
        config = dataclasses.replace(config, summarizer=checkpoint.summarizer.load_summarizer(Path(summarizer), handle))
    if isinstance(handle, checkpoint.adapter.AdaptedCheckpoint):
        config = dataclasses.replace(config, adapter_fingerprint=handle.adapter_fingerprint)
    return config


def open_draft_model(config: SpeculativeConfig | None, handle: CheckpointHandle) -> CheckpointHandle | None:
    """Open the draft model, if any; raise ConfigError if its tokenizer is not the model's."""
    if config is None or config.draft_model is None:
        return None
    draft = checkpoint.open_checkpoint(config.draft_model)
    tokenizers = [None if each.tokenizer is None else each.tokenizer.fingerprint() for each in (handle, draft)]
    if tokenizers[0] != tokenizers[1]:
        message = f"speculative.draft_model: {draft.path} has another tokenizer than {handle.path}"
        raise ConfigError(message, "Use a smaller model of the same family.")
    return draft


def with_draft_model(config: EngineConfig, handle: CheckpointHandle, dtype: str, device: torch.device) -> EngineConfig:
    """Load the draft model, if any, in the dtype and on the device of the model."""
    draft = open_draft_model(config.speculative, handle)
    if draft is None:
        return config
    return dataclasses.replace(config, draft_model=checkpoint.loader.load_weights(draft, dtype, device))


def load_adapters(handle: CheckpointHandle, paths: Mapping[str, str | Path]) -> dict[str, ServedAdapter]:
    """Read the adapters that requests choose by name.

    Raises:
        CheckpointError: If a folder is no adapter, was trained on another base, does not fit this one, or adapts a
            layer whose terms are not computed per request.
    """
    if paths and handle.config.decoder is None:
        message = "adapters: requests of an encoder cannot choose one"
        raise CheckpointError(message, "Load one with adapter= (--adapter FOLDER), which merges it.")
    adapters, fingerprint = dict[str, ServedAdapter](), None
    for name, stored in checkpoint.adapter.open_adapters(handle, paths).items():
        if fingerprint is None and "fingerprint" in stored.metadata:
            fingerprint = checkpoint.adapter.base_fingerprint(handle)
        stored.check_base(handle, fingerprint)
        factors = stored.factors(handle)
        if (unsupported := model.lora.unsupported_layer(handle.config, factors)) is not None:
            hint = f"Merge it: kvad merge {handle.path} {stored.path} --out DIR."
            raise CheckpointError(f"{stored.path}: {unsupported}", hint)
        adapters[name] = ServedAdapter(factors, stored.path, frozenset(stored.end_tokens or ()))
    return adapters


def adapter_bytes(adapters: Mapping[str, ServedAdapter], dtype: str, num_tokens: int) -> int:
    """Return the bytes of adapters next to weights of ``dtype``, in steps of up to ``num_tokens``."""
    return model.lora.factor_bytes([adapter.factors for adapter in adapters.values()], dtype, num_tokens)


def warn_unused(handle: CheckpointHandle) -> None:
    """Warn, in the caller of ``LLM.load``, of settings in the checkpoint that are not applied."""
    if handle.unused_keys:
        warnings.warn(f"{handle.path}: config.json: not used: {', '.join(handle.unused_keys)}", stacklevel=3)
    for name in handle.generation.ignored_fields:
        warnings.warn(f"{handle.path}: generation_config.json: {name} is not applied", stacklevel=3)


def plan_checkpoint(
    handle: CheckpointHandle,
    cache: CacheConfig | None,
    fields: Mapping[str, Any],
    memory: Literal["auto"] | int | float | MemoryBudget,
    device: torch.device,
    dtype: str | None,
    summarizer: str | Path | None,
    engine_fields: Mapping[str, Any],
) -> MemoryPlan:
    """Plan the given cache, or one that fits into the free memory of the device, and log its size.

    ``dtype`` is that of the computation; None: the stored one. ``engine_fields`` are fields of ``EngineConfig``.
    """
    budget = memory if isinstance(memory, MemoryBudget) else MemoryBudget(memory)
    is_host = device.type == "cpu"
    compute_dtype = dtype or str(handle.stored_dtype).removeprefix("torch.")
    if dtype is None and compute_dtype == "float16" and is_host:
        compute_dtype = "float32"  # float16 on a CPU is storage only
    free = available_bytes() if is_host else free_device_bytes(device)
    settings: PlanSettings = {n: x for n, x in engine_fields.items() if n not in FREE_FIELDS}  # type: ignore[assignment]
    settings["weights"] = handle.weight_bytes(compute_dtype)
    speculative: SpeculativeConfig | None = engine_fields.get("speculative")
    if speculative is not None:
        settings["speculation"] = SpeculationShape(speculative.num_tokens)
        if (draft := open_draft_model(speculative, handle)) is not None:
            shape = SpeculationShape(speculative.num_tokens, draft.config, draft.weight_bytes(compute_dtype))
            settings["speculation"] = shape
    num_tokens = engine_fields.get("max_num_batched_tokens", EngineConfig.max_num_batched_tokens)
    settings["adapters"] = adapter_bytes(engine_fields.get("adapters", {}), compute_dtype, num_tokens)
    if summarizer is not None:
        settings["summarizer_shape"] = checkpoint.folder.read_summarizer_shape(Path(summarizer))
    if cache is not None:
        plan = plan_memory(handle.config, cache, weights_dtype=compute_dtype, **settings)
        require_memory(plan, free if is_host or free is None else free + plan.host_bytes)
        return plan
    plan = plan_cache(handle.config, fields, budget, free, is_host=is_host, weights_dtype=compute_dtype, **settings)
    longest, requested = plan.cache.max_seq_len, fields.get("max_seq_len", budget.max_seq_len)
    LOG.info("%s: %s", handle.path, describe_room(plan))
    if longest < min(handle.config.max_seq_len, requested or handle.config.max_seq_len):
        LOG.warning(
            "memory: sequences end at %s tokens, since more do not fit; the model's limit is %s. "
            "A smaller --cache-dtype, a --policy or more --memory allows longer ones.",
            f"{longest:,}",
            f"{handle.config.max_seq_len:,}",
        )
    return plan
