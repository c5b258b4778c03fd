"""What would it take, and what would fit?  Asks ``cache/planning.py``; no weight is loaded and no torch imported.

A target is a checkpoint (or a run, which stands for its newest one), a config (JSON, or TOML with the model under
``[model]``), a recipe of ``kvad train``, or a known shape's name.  Exact numbers (weights, pool) and bounds (scratch,
activations) stand apart, as they do in ``cache/planning.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvad.cache.planning import GroupPlan, MemoryPlan, fits, plan_memory, step_bytes
from kvad.cache.sizing import CacheConfig, Fit
from kvad.cache.weights import num_parameters
from kvad.checkpoint.folder import CONFIG, MODEL, locate
from kvad.config import ModelConfig
from kvad.errors import ConfigError, UsageError
from kvad.lab.headers import stored_dtype
from kvad.lab.shapes import shape
from kvad.train.config import RunConfig, read_toml

__all__ = ["Report", "Speed", "Target", "make_report", "memory_json", "plan_target", "read_target", "to_json"]


BYTES = ("weights", "payload", "columns", "reserved", "pool", "scratch", "activations", "total")


class Target(NamedTuple):
    """What is planned: ``stored`` is the dtype of a checkpoint's weights, None where there are none."""

    name: str
    config: ModelConfig
    stored: str | None = None


class Speed(NamedTuple):
    """Decoding ``rows`` rows at ``context`` tokens: bytes read per step, and tokens/s of all rows at most."""

    rows: int
    context: int
    step_bytes: int
    tokens_per_second: float


@dataclass(frozen=True)
class Report:
    """One answer of ``kvad plan``.  ``bandwidth`` in bytes per second; ``available`` None where nobody knows;
    ``fits`` for ``fit`` bytes, where it was asked."""

    name: str
    plan: MemoryPlan
    available: int | None
    bandwidth: float
    measured: bool
    speeds: tuple[Speed, ...]
    fit: int | None
    fits: tuple[Fit, ...]


def read_target(text: str) -> Target:
    """Raises CheckpointError for a folder that is not a checkpoint, ConfigError for a config that cannot be, UsageError
    with the nearest name for what is neither there nor known."""
    path = Path(text)
    if path.is_dir():
        found = locate(path)
        return Target(text, _read_config(found / CONFIG), stored_dtype(found / MODEL))
    if path.is_file() or path.suffix in (".json", ".toml"):
        return Target(text, _read_config(path))
    return Target(text.lower(), shape(text))


def _read_config(path: Path) -> ModelConfig:
    try:
        return _read_toml(path) if path.suffix == ".toml" else ModelConfig.load(path)
    except ConfigError as error:
        where = "" if str(path) in error.message else f"{path}: "
        raise ConfigError(where + error.message, error.hint) from error


def _read_toml(path: Path) -> ModelConfig:
    """A bare model, or a recipe of ``kvad train``: then the vocabulary is what its tokenizer may learn at most."""
    content = read_toml(path)
    if not content.keys() & {"data", "tokenizer", "train"}:
        return ModelConfig.from_dict(content.get("model", content))
    recipe = RunConfig.from_dict(content)
    if "vocab" not in recipe.model and recipe.tokenizer.kind != "bpe":
        raise ConfigError(
            f"the vocabulary of a {recipe.tokenizer.kind} tokenizer is known when it is trained",
            "set model.vocab, or plan the trained model",
        )
    return recipe.resolve(recipe.model.get("vocab", recipe.tokenizer.vocab_size))


def plan_target(
    target: Target,
    *,
    context: int | None = None,
    weights_dtype: str | None = None,
    dtype: str | None = None,
    budget: int,
    **cache: Any,
) -> MemoryPlan:
    """``context`` defaults to the model's limit, the weights to what is stored (else float32), the cache to the
    weights' dtype; ``cache`` are other fields of CacheConfig.

    Raises UsageError for a context beyond the model's limit, ConfigError for anything else that cannot be.
    """
    limit = target.config.limit
    if context is not None and context > limit:
        raise UsageError(
            f"a context of {context:,} tokens is beyond the limit of {target.name}, {limit:,} tokens",
            f"ask for {limit:,} or less",
        )
    stored = "float32" if target.stored == "float16" else target.stored  # widened when it is loaded
    weights = weights_dtype or stored or "float32"
    config = CacheConfig(capacity=limit if context is None else context, dtype=dtype or weights, **cache)
    return plan_memory(target.config, config, weights_dtype=weights, budget=budget)


def make_report(
    name: str, plan: MemoryPlan, *, available: int | None, bandwidth: float, measured: bool, fit: int | None = None
) -> Report:
    """Speeds are for one row and for all rows, at the whole context."""
    speeds = []
    for rows in sorted({1, plan.cache.rows}):
        read = step_bytes(plan, rows, plan.cache.capacity)
        speeds.append(Speed(rows, plan.cache.capacity, read, rows * bandwidth / read))
    table = () if fit is None else fits(plan, fit)
    return Report(name, plan, available, bandwidth, measured, tuple(speeds), fit, table)


def to_json(report: Report) -> Mapping[str, object]:
    """What ``--json`` prints; bytes everywhere."""
    return {
        "name": report.name,
        "parameters": num_parameters(report.plan.config),
        **memory_json(report.plan),
        "available": report.available,
        "bandwidth": report.bandwidth,
        "bandwidth_measured": report.measured,
        "speeds": report.speeds,
        "fit": None if report.fit is None else {"bytes": report.fit, "largest": report.fits},
    }


def memory_json(plan: MemoryPlan) -> Mapping[str, object]:
    """What was planned, its bytes, and each group's."""
    return {
        "weights_dtype": plan.weights_dtype,
        "cache": {name: getattr(plan.cache, name) for name in ("layout", "dtype", "block_size", "rows", "chunk")},
        "context": plan.cache.capacity,
        "budget": plan.budget,
        "bytes": {name: getattr(plan, name) for name in BYTES},
        "groups": [_group_json(group) for group in plan.groups],
    }


def _group_json(plan: GroupPlan) -> Mapping[str, object]:
    group, size = plan.group, plan.bytes
    return {
        "layers": group.layers,
        "window": group.mixer.window,
        "kv_heads": group.mixer.kv_heads,
        "head_dim": group.mixer.head_dim,
        "value_dim": group.mixer.value_dim,
        "block_size": group.block_size,
        "blocks": group.blocks,
        "blocks_per_row": group.blocks_per_row,
        "per_token": {"payload": size.per_token_payload, "columns": size.per_token_columns},
        "per_row": {"payload": plan.row_payload, "columns": plan.row_columns},
        "payload": plan.payload,
        "columns": plan.columns,
        "reserved": plan.reserved,
    }
