"""What would it take, and what would fit?  Asks ``cache/planning.py``; no weight is loaded.

A target is a checkpoint (or a run, which stands for its newest one), a Hugging Face folder, its ``config.json`` alone
or a name on the hub (of which no weights are fetched), a config (JSON, or TOML with the model under ``[model]``), a
recipe of ``kvad train``, or a known shape's name.  Exact numbers (weights, pool) and bounds (scratch, activations)
stand apart, as they do in ``cache/planning.py``.

No torch, with one exception: Hugging Face's config is read by its family, whose one file holds its table of tensors
too, and how they are turned; reading it imports torch, a second or two.  Everything else stays without.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvad.cache.formats import parted
from kvad.cache.mesh import Mesh
from kvad.cache.planning import GroupPlan, MemoryPlan, fits, plan_memory, step_bytes
from kvad.cache.portions import RankPlan, plan_ranks
from kvad.cache.settle import settle
from kvad.cache.sizing import DTYPE_BYTES, CacheConfig, Fit
from kvad.cache.weights import Summaries, num_parameters
from kvad.checkpoint.folder import CONFIG, MODEL, is_foreign, locate
from kvad.checkpoint.hub import INDEX, SINGLE, resolve
from kvad.config import ModelConfig, mixers
from kvad.errors import ConfigError, UsageError, a
from kvad.lab.fit import Table, shortfall
from kvad.lab.headers import stored_dtype
from kvad.lab.kept import kept
from kvad.lab.shapes import shape
from kvad.train.config import RunConfig, read_toml

__all__ = [
    "Report",
    "Speed",
    "Target",
    "layers_of",
    "make_report",
    "memory_json",
    "plan_target",
    "read_target",
    "to_json",
]

BYTES = (
    "weights", "compressor", "payload", "scales", "columns", "reserved", "pool", "scratch", "activations", "tiers",
    "total",
)  # fmt: skip


class Target(NamedTuple):
    """What is planned: ``stored`` is the dtype of a checkpoint's weights, None where there are none; ``origin`` the
    ``model_type`` of what is Hugging Face's."""

    name: str
    config: ModelConfig
    stored: str | None = None
    origin: str | None = None


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
    table: Table | None = None  # of what would fit, where a decoder was asked
    ranks: tuple[RankPlan, ...] = ()  # of a mesh, where one was asked for; the speeds are then nobody's


def read_target(text: str) -> Target:
    """Raises CheckpointError for a folder that is not a checkpoint, ConfigError for a config that cannot be, UsageError
    with the nearest name for what is neither there nor known."""
    path = Path(text)
    if "/" in text and not path.exists() and path.suffix not in (".json", ".toml"):
        path = resolve(text, weights=False)
    if path.is_dir():
        found = locate(path)
        if is_foreign(found):
            return _read_foreign(text, found / CONFIG)
        return Target(text, _read_config(found / CONFIG), stored_dtype(found / MODEL))
    if path.is_file() and path.suffix == ".json" and "model_type" in _content(path):
        return _read_foreign(text, path)
    if path.is_file() or path.suffix in (".json", ".toml"):
        return Target(text, _read_config(path))
    return Target(text.lower(), shape(text))


def _content(path: Path) -> Mapping[str, Any]:
    """Of a JSON file; what is none is for others to say."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_foreign(name: str, path: Path) -> Target:
    """Weights that lie beside the config settle what it leaves open: whether the head is tied, which head it is."""
    from kvad.checkpoint.imported import Imported, read_config  # with torch: see above

    origin = str(_content(path).get("model_type", ""))
    if path.name == CONFIG and any((path.parent / weights).is_file() for weights in (SINGLE, INDEX)):
        opened = Imported(path.parent)
        return Target(name, opened.config, str(opened.stored).removeprefix("torch."), origin)
    config, stored = read_config(path)
    return Target(name, config, stored if stored in DTYPE_BYTES else None, origin)


def _read_config(path: Path) -> ModelConfig:
    if path.suffix != ".toml":
        return ModelConfig.load(path)
    try:
        return _read_toml(path)
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
    source_context: int | None = None,
    weights_dtype: str | None = None,
    dtype: str | None = None,
    budget: int,
    learned: Summaries | None = None,
    deterministic: bool = False,
    **cache: Any,
) -> MemoryPlan:
    """``context`` (of an encoder: its texts) defaults to the model's limit, ``source_context`` to the source's, the
    weights to what is stored (else float32), the cache to the weights' dtype; ``cache``: other fields of CacheConfig.
    ``learned`` and ``deterministic`` as :func:`~kvad.cache.planning.plan_memory` takes them.

    Raises UsageError for a context beyond the model's limit or a source that it does not have, ConfigError for anything
    else that cannot be.
    """
    limit, source = target.config.limit, target.config.source
    if source is None and source_context is not None:
        raise UsageError(f"{target.name} has no source: it is {a(target.config.kind)}", "--context is what it reads")
    most = 0 if source is None else source.limit
    for what, asked, there in (("context", context, limit), ("source", source_context, most)):
        if asked is not None and asked > there:
            raise UsageError(
                f"a {what} of {asked:,} tokens is beyond the limit of {target.name}, {there:,} tokens",
                f"ask for {there:,} or less",
            )
    if source_context is not None and source_context < 1:
        raise UsageError(f"a source of {source_context:,} tokens", "it has at least 1")
    stored = "float32" if target.stored == "float16" else target.stored  # widened when it is loaded
    weights = weights_dtype or stored or "float32"
    config = CacheConfig(
        capacity=limit if context is None else context,
        source_capacity=most if source_context is None else source_context,
        dtype=dtype or weights,
        **cache,
    )
    return plan_memory(
        target.config, config, weights_dtype=weights, budget=budget, learned=learned, deterministic=deterministic
    )


def make_report(
    name: str,
    plan: MemoryPlan,
    *,
    available: int | None,
    bandwidth: float,
    measured: bool,
    fit: int | None = None,
    table: Table | None = None,
    mesh: Mesh | None = None,
) -> Report:
    """Speeds are for one row and for all rows, at the whole context; an encoder decodes nothing.

    ``mesh``: what each of its ranks takes, instead of speeds; ConfigError where it does not fit the model.
    """
    speeds = []
    for rows in sorted({1, plan.cache.rows}) if plan.config.decoder is not None and mesh is None else ():
        read = step_bytes(plan, rows, plan.cache.capacity)
        speeds.append(Speed(rows, plan.cache.capacity, read, rows * bandwidth / read))
    largest = () if fit is None else fits(plan, fit)
    ranks = () if mesh is None else plan_ranks(plan, mesh)
    return Report(name, plan, available, bandwidth, measured, tuple(speeds), fit, largest, table, ranks)


def to_json(report: Report) -> Mapping[str, object]:
    """What ``--json`` prints; bytes everywhere."""
    return {
        "name": report.name,
        "kind": report.plan.config.kind,
        "parameters": num_parameters(report.plan.config),
        **memory_json(report.plan),
        "available": report.available,
        "bandwidth": report.bandwidth,
        "bandwidth_measured": report.measured,
        "speeds": report.speeds,
        "fit": None if report.fit is None else _fit_json(report, report.fit),
        "ranks": [_rank_json(rank) for rank in report.ranks],
    }


def _rank_json(rank: RankPlan) -> Mapping[str, object]:
    """Exact; a step's work comes on top, on each rank at most what the whole model's takes."""
    where = {"rank": rank.mesh.rank, "tensor_rank": rank.mesh.tensor_rank, "stage": rank.mesh.stage}
    sizes = {name: getattr(rank, name) for name in ("weights", "payload", "scales", "columns", "pool", "total")}
    return {**where, "layers": list(rank.layers), "bytes": sizes}


def _fit_json(report: Report, fit: int) -> Mapping[str, object]:
    """``largest``: as the cache was asked for; ``table``: what else would fit, and what it costs."""
    short = shortfall(report.plan, fit)
    missing = None if short is None else dict(zip(("missing", "dtype", "weights"), short, strict=True))
    return {"bytes": fit, "largest": report.fits, "table": report.table, "weights_too_large": missing}


def memory_json(plan: MemoryPlan) -> Mapping[str, object]:
    """What was planned, its bytes, and each group's; the policy is the one that ``on_full`` takes, where it takes one.

    ``parked_row``: what a row takes in host memory while it has given way to others, 0 where it is computed anew;
    ``parking``: the bound of what all of them take there, part of the total where one was asked for.
    ``spilled``: what tokens below the pool take in host memory, all of which is in the total, and at most on disk.
    """
    settled = settle(plan.config, plan.cache)
    return {
        "weights_dtype": plan.weights_dtype,
        "cache": {
            **{name: getattr(plan.cache, name) for name in ("layout", "dtype", "block_size", "rows", "chunk")},
            **dict(zip(("keys", "values"), parted(plan.cache.stored), strict=True)),
            **{name: getattr(settled, name) for name in ("policy", "endless", "rotate", "on_full", "watermark")},
        },
        "context": plan.cache.capacity,
        "source_context": None if plan.config.source is None else plan.cache.source_capacity,
        "budget": plan.budget,
        "deterministic": plan.deterministic,
        "bytes": {name: getattr(plan, name) for name in BYTES},
        "parked_row": plan.parked_row,
        "spilled": {name: getattr(plan.spilling, name) for name in ("ram", "staging", "sums", "disk")},
        "parking": plan.cache.park_ram,
        "groups": [_group_json(plan, group) for group in plan.groups],
    }


def layers_of(plan: MemoryPlan, each: GroupPlan) -> tuple[int, ...]:
    """The decoder's layers of a group; cross-attention is counted after all layers in the memory's own numbers."""
    assert plan.config.decoder is not None, "an encoder has no groups"
    return tuple(index % plan.config.decoder.layers for index in each.group.layers)


def _group_json(whole: MemoryPlan, plan: GroupPlan) -> Mapping[str, object]:
    group, size = plan.group, plan.bytes
    return {
        "cross": group.mixer.cross,
        "layers": layers_of(whole, plan),
        "kept": kept(group, mixers(whole.config)),
        "keys": group.keys,
        "values": group.values,
        "level": None if group.level is None else group.level._asdict(),
        "window": group.mixer.window,
        "kv_heads": group.mixer.kv_heads,
        "head_dim": group.mixer.head_dim,
        "value_dim": group.mixer.value_dim,
        "block_size": group.block_size,
        "blocks": group.blocks,
        "blocks_per_row": group.blocks_per_row,
        "per_token": {
            "payload": size.per_token_payload,
            "scales": size.per_token_scales,
            "columns": size.per_token_columns,
        },
        "per_row": {"payload": plan.row_payload, "scales": plan.row_scales, "columns": plan.row_columns},
        "payload": plan.payload,
        "scales": plan.scales,
        "columns": plan.columns,
        "reserved": plan.reserved,
    }
