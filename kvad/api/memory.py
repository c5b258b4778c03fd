"""``kvad.plan``: the memory of a model and its cache, without loading weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from kvad import checkpoint, engine, parallel, planning
from kvad.cache import CacheConfig, sizing
from kvad.engine.scheduling import SpeculativeConfig
from kvad.errors import ConfigError, UsageError, check_names

if TYPE_CHECKING:
    from kvad.cache.sizing import MemoryPlan
    from kvad.planning import PlanReport

    class PlanSettings(engine.options.CacheOptions, total=False):
        """Settings of ``plan``: those of the cache, and what follows."""

        dtype: str | None  # of weights and computation; None: as stored or published, else float32
        cache_dtype: str | None  # of keys and values; None: ``dtype``
        cache_key_dtype: str | None
        cache_value_dtype: str | None
        summarizer: str | Path | None
        max_num_batched_tokens: int
        deterministic: bool
        speculative: str | Mapping[str, Any] | SpeculativeConfig | None  # its draft model is a target too
        adapters: Mapping[str, str | Path] | None  # LoRA adapters by name that requests choose
        mesh: str | None  # such as "2x1"
        compression_ratios: Sequence[float]  # of the policies that ``fit_memory`` tries
        fit_seq_lens: Sequence[int]  # lengths and numbers of sequences that it tries
        fit_num_seqs: Sequence[int]
        quality_results: str | Path | None


PLAN_SETTINGS = (
    "dtype", "cache_dtype", "cache_key_dtype", "cache_value_dtype", "summarizer", "max_num_batched_tokens", "mesh",
    "deterministic", "speculative", "adapters", "compression_ratios", "fit_seq_lens", "fit_num_seqs", "quality_results",
)  # fmt: skip


def plan(
    target: str | Path,
    *,
    memory: Literal["auto"] | int | float = "auto",
    fit_memory: int | None = None,
    bandwidth: float | None = None,
    **settings: Unpack[PlanSettings],
) -> PlanReport:
    """Estimate the memory of a model and its cache without loading weights, as ``kvad plan`` does.

    Args:
        target: A checkpoint, a config (JSON or TOML), or the name of a known model.
        memory: Memory to compare with: what is available here, bytes (int) or a fraction of it.
        fit_memory: Bytes; also list configurations that fit into them.
        bandwidth: Memory bandwidth in bytes per second (default: measured).
        **settings: ``PlanSettings``.

    Raises:
        UsageError: For an unknown model or setting, or a size beyond the model's limit.
        CheckpointError: If an adapter does not fit the target, or the target is no checkpoint.
        ConfigError: If a value is invalid, or a mesh does not support a setting.
    """
    given: dict[str, Any] = dict(settings)
    check_names(given, (*PLAN_SETTINGS, *(field.name for field in dataclasses.fields(CacheConfig))))
    own = {name: given.pop(name) for name in PLAN_SETTINGS if name in given}
    here, sizes = sizing.available_bytes(), [name for name in ("max_num_seqs", "max_seq_len") if name in given]
    mesh = None if own.get("mesh") is None else parallel.Mesh.parse(own["mesh"])
    summarizer = own.get("summarizer")
    plan_input = planning.read_target(str(target))
    planned = planning.plan_target(
        plan_input,
        context=given.pop("max_seq_len", None),
        source_context=given.pop("max_source_len", None),
        weights_dtype=own.get("dtype"),
        dtype=own.get("cache_dtype"),
        key_dtype=own.get("cache_key_dtype", given.pop("key_dtype", None)),
        value_dtype=own.get("cache_value_dtype", given.pop("value_dtype", None)),
        budget=own.get("max_num_batched_tokens", sizing.memory_plan.DEFAULT_BATCHED_TOKENS),
        learned=None if summarizer is None else checkpoint.folder.read_summarizer_shape(Path(summarizer)),
        deterministic=own.get("deterministic", False),
        **{"max_num_seqs": 1, **given},
    )
    speculative = SpeculativeConfig.from_options(own.get("speculative"))
    if mesh is not None and mesh.size > 1:
        _check_ranks(mesh.size, own.get("adapters"), speculative)
    if speculative is not None:
        draft = None if speculative.draft_model is None else planning.read_target(speculative.draft_model)
        planned = planning.with_speculation(planned, speculative.num_tokens, draft)
    if own.get("adapters"):
        served = engine.loading.load_adapters(checkpoint.open_checkpoint(target), own["adapters"])
        num_bytes = engine.loading.adapter_bytes(served, planned.weights_dtype, planned.max_num_batched_tokens)
        planned = dataclasses.replace(planned, adapters=num_bytes)
    return planning.build_report(
        plan_input.name,
        planned,
        available=here if memory == "auto" else sizing.MemoryBudget(memory).resolve(here),
        bandwidth=sizing.measure_bandwidth() if bandwidth is None else bandwidth,
        measured=bandwidth is None,
        fit=fit_memory,
        table=None if fit_memory is None else _fit_table(planned, fit_memory, own),
        mesh=mesh,
        given=sizes,
    )


def _check_ranks(ranks: int, adapters: Mapping[str, Any] | None, speculative: SpeculativeConfig | None) -> None:
    """Raise the ConfigError that an engine of several ranks raises."""
    if adapters:
        raise ConfigError(f"adapters: requests cannot choose one with {ranks} ranks", "Merge it into the weights.")
    if speculative is not None and speculative.draft_model is not None:
        raise ConfigError(f"speculative: a draft model is not supported with {ranks} ranks", "Use n-grams.")


def _fit_table(planned: MemoryPlan, memory: int, own: Mapping[str, Any]) -> planning.fit.FitTable | None:
    """Return the configurations of a decoder that fit into ``memory``."""
    if planned.config.decoder is None:
        return None
    ratios, limit = own.get("compression_ratios", (0.75,)), planned.config.max_seq_len
    if not all(0 < fraction < 1 for fraction in ratios):
        raise UsageError(f"--compression-ratios: must be between 0 and 1, got {','.join(map(str, ratios))}")
    contexts, rows = own.get("fit_seq_lens"), own.get("fit_num_seqs") or ()
    for value in (*(contexts or ()), *rows):
        if value < 1:
            raise UsageError(f"--max-seq-len and --max-num-seqs: must be at least 1, got {value}")
    lengths = (limit // 4, limit) if limit >= 256 else (limit,)
    results = own.get("quality_results")
    return planning.fit.find_configurations(
        planned,
        memory,
        contexts=contexts if contexts is not None else () if rows else lengths,
        rows=rows,
        choices=planning.fit.policy_choices(planned, list(ratios)),
        formats=planning.fit.format_choices(planned),
        costs=planning.fit.read_costs(planning.fit.PACKAGED_COSTS if results is None else Path(results)),
    )
