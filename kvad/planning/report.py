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

from kvad import cache as cache_lib
from kvad import checkpoint
from kvad import config as config_lib
from kvad.cache import CacheConfig, resolve_for_model, sizing
from kvad.cache.sizing import GroupPlan, MemoryPlan, plan_memory
from kvad.config import ModelConfig, attention_specs
from kvad.errors import ConfigError, UsageError, with_article
from kvad.parallel import Mesh, RankPlan, plan_ranks
from kvad.planning.fit import FitTable, weights_shortfall
from kvad.planning.group_summary import describe_retention
from kvad.planning.known_models import known_model
from kvad.train.config import RunConfig, read_toml

BYTE_FIELDS = (
    "weights", "compressor", "payload", "scales", "columns", "reserved", "pool", "scratch", "activations", "tiers",
    "total",
)  # fmt: skip


class PlanTarget(NamedTuple):
    """What is planned: ``stored`` is the dtype of a checkpoint's weights, None where there are none; ``origin`` the
    ``model_type`` of what is Hugging Face's."""

    name: str
    config: ModelConfig
    stored_dtype: str | None = None
    origin: str | None = None


class DecodeSpeed(NamedTuple):
    """Decoding ``rows`` rows at ``context`` tokens: bytes read per step, and tokens/s of all rows at most."""

    rows: int
    context: int
    step_bytes: int
    tokens_per_second: float


@dataclass(frozen=True)
class PlanReport:
    """One answer of ``kvad plan``.  ``bandwidth`` in bytes per second; ``available`` None where nobody knows;
    ``fits`` for ``fit`` bytes, where it was asked."""

    name: str
    plan: MemoryPlan
    available: int | None
    bandwidth: float
    measured: bool
    speeds: tuple[DecodeSpeed, ...]
    fit: int | None
    fits: tuple[cache_lib.groups.MemoryFit, ...]
    table: FitTable | None = None  # of what would fit, where a decoder was asked
    ranks: tuple[RankPlan, ...] = ()  # of a mesh, where one was asked for; the speeds are then nobody's


def read_target(text: str) -> PlanTarget:
    """Raises CheckpointError for a folder that is not a checkpoint, ConfigError for a config that cannot be, UsageError
    with the nearest name for what is neither there nor known."""
    path = Path(text)
    if "/" in text and not path.exists() and path.suffix not in (".json", ".toml"):
        path = checkpoint.hub.resolve_model_path(text, weights=False)
    if path.is_dir():
        found = checkpoint.folder.locate(path)
        if checkpoint.folder.is_hf(found):
            return _read_foreign(text, found / checkpoint.folder.CONFIG)
        return PlanTarget(
            text,
            _read_config(found / checkpoint.folder.CONFIG),
            checkpoint.safetensors_header.stored_dtype(found / checkpoint.folder.MODEL),
        )
    if path.is_file() and path.suffix == ".json" and "model_type" in _content(path):
        return _read_foreign(text, path)
    if path.is_file() or path.suffix in (".json", ".toml"):
        return PlanTarget(text, _read_config(path))
    return PlanTarget(text.lower(), known_model(text))


def _content(path: Path) -> Mapping[str, Any]:
    """Of a JSON file; what is none is for others to say."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_foreign(name: str, path: Path) -> PlanTarget:
    """Weights that lie beside the config settle what it leaves open: whether the head is tied, which head it is."""
    from kvad import checkpoint  # with torch: see above

    origin = str(_content(path).get("model_type", ""))
    if path.name == checkpoint.folder.CONFIG and any(
        (path.parent / weights).is_file() for weights in (checkpoint.hub.SINGLE, checkpoint.hub.INDEX)
    ):
        opened = checkpoint.hf_layout.HFCheckpoint(path.parent)
        return PlanTarget(name, opened.config, str(opened.stored_dtype).removeprefix("torch."), origin)
    config, stored = checkpoint.hf_layout.read_hf_config(path)
    return PlanTarget(name, config, stored if stored in config_lib.DTYPE_BYTES else None, origin)


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
            "set model.vocab_size, or plan the trained model",
        )
    return recipe.resolve(recipe.model.get("vocab", recipe.tokenizer.vocab_size))


def plan_target(
    target: PlanTarget,
    *,
    context: int | None = None,
    source_context: int | None = None,
    weights_dtype: str | None = None,
    dtype: str | None = None,
    budget: int,
    learned: config_lib.parameter_shapes.SummarizerShape | None = None,
    deterministic: bool = False,
    **cache: Any,
) -> MemoryPlan:
    """``context`` (of an encoder: its texts) defaults to the model's limit, ``source_context`` to the source's, the
    weights to what is stored (else float32), the cache to the weights' dtype; ``cache``: other fields of CacheConfig.
    ``learned`` and ``deterministic`` as :func:`~kvad.cache.sizing.memory_plan.plan_memory` takes them.

    Raises UsageError for a context beyond the model's limit or a source that it does not have, ConfigError for anything
    else that cannot be.
    """
    limit, source = target.config.max_seq_len, target.config.encoder_input
    if source is None and source_context is not None:
        raise UsageError(
            f"{target.name} has no source: it is {with_article(target.config.kind)}", "--context is what it reads"
        )
    most = 0 if source is None else source.max_seq_len
    for what, asked, there in (("context", context, limit), ("source", source_context, most)):
        if asked is not None and asked > there:
            raise UsageError(
                f"a {what} of {asked:,} tokens is beyond the limit of {target.name}, {there:,} tokens",
                f"ask for {there:,} or less",
            )
    if source_context is not None and source_context < 1:
        raise UsageError(f"a source of {source_context:,} tokens", "it has at least 1")
    stored = "float32" if target.stored_dtype == "float16" else target.stored_dtype  # widened when it is loaded
    weights = weights_dtype or stored or "float32"
    config = CacheConfig(
        max_seq_len=limit if context is None else context,
        max_source_len=most if source_context is None else source_context,
        dtype=dtype or weights,
        **cache,
    )
    return plan_memory(
        target.config, config, weights_dtype=weights, budget=budget, learned=learned, deterministic=deterministic
    )


def build_report(
    name: str,
    plan: MemoryPlan,
    *,
    available: int | None,
    bandwidth: float,
    measured: bool,
    fit: int | None = None,
    table: FitTable | None = None,
    mesh: Mesh | None = None,
) -> PlanReport:
    """Speeds are for one row and for all rows, at the whole context; an encoder decodes nothing.

    ``mesh``: what each of its ranks takes, instead of speeds; ConfigError where it does not fit the model.
    """
    speeds = []
    for rows in sorted({1, plan.cache.max_num_seqs}) if plan.config.decoder is not None and mesh is None else ():
        read = sizing.memory_plan.decode_step_bytes(plan, rows, plan.cache.max_seq_len)
        speeds.append(DecodeSpeed(rows, plan.cache.max_seq_len, read, rows * bandwidth / read))
    largest = () if fit is None else sizing.memory_plan.find_fits(plan, fit)
    ranks = () if mesh is None else plan_ranks(plan, mesh)
    return PlanReport(name, plan, available, bandwidth, measured, tuple(speeds), fit, largest, table, ranks)


def report_to_json(report: PlanReport) -> Mapping[str, object]:
    """What ``--json`` prints; bytes everywhere."""
    return {
        "name": report.name,
        "kind": report.plan.config.kind,
        "parameters": config_lib.parameter_shapes.num_parameters(report.plan.config),
        **memory_to_json(report.plan),
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
    sizes = {name: getattr(rank, name) for name in ("weights", "payload", "scales", "metadata", "pool", "total")}
    return {**where, "layers": list(rank.layers), "bytes": sizes}


def _fit_json(report: PlanReport, fit: int) -> Mapping[str, object]:
    """``largest``: as the cache was asked for; ``table``: what else would fit, and what it costs."""
    short = weights_shortfall(report.plan, fit)
    missing = None if short is None else dict(zip(("missing", "dtype", "weights"), short, strict=True))
    return {"bytes": fit, "largest": report.fits, "table": report.table, "weights_too_large": missing}


def memory_to_json(plan: MemoryPlan) -> Mapping[str, object]:
    """What was planned, its bytes, and each group's; the policy is the one that ``on_full`` takes, where it takes one.

    ``parked_row``: what a row takes in host memory while it has given way to others, 0 where it is computed anew;
    ``parking``: the bound of what all of them take there, part of the total where one was asked for.
    ``spilled``: what tokens below the pool take in host memory, all of which is in the total, and at most on disk.
    """
    settled = resolve_for_model(plan.config, plan.cache)
    return {
        "weights_dtype": plan.weights_dtype,
        "cache": {
            **{
                name: getattr(plan.cache, name)
                for name in ("layout", "dtype", "block_size", "max_num_seqs", "prefill_chunk_size")
            },
            **dict(
                zip(
                    ("key_dtype", "value_dtype"),
                    cache_lib.quantization.split_format_name(plan.cache.format_name),
                    strict=True,
                )
            ),
            **{name: getattr(settled, name) for name in ("policy", "endless", "rope_at", "overflow", "watermark")},
        },
        "max_seq_len": plan.cache.max_seq_len,
        "max_source_len": None if plan.config.encoder_input is None else plan.cache.max_source_len,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "deterministic": plan.deterministic,
        "bytes": {name: getattr(plan, name) for name in BYTE_FIELDS},
        "swapped_seq_bytes": plan.swapped_seq_bytes,
        "offload": {
            name: getattr(plan.offload, name) for name in ("ram_bytes", "staging_bytes", "checksum_bytes", "disk_bytes")
        },
        "swap_space": plan.cache.swap_space,
        "groups": [_group_json(plan, group) for group in plan.groups],
    }


def group_layers(plan: MemoryPlan, each: GroupPlan) -> tuple[int, ...]:
    """The decoder's layers of a group; cross-attention is counted after all layers in the memory's own numbers."""
    assert plan.config.decoder is not None, "an encoder has no groups"
    return tuple(index % plan.config.decoder.num_layers for index in each.group.layers)


def _group_json(whole: MemoryPlan, plan: GroupPlan) -> Mapping[str, object]:
    group, size = plan.group, plan.bytes
    return {
        "is_cross_attention": group.spec.is_cross_attention,
        "layers": group_layers(whole, plan),
        "retention": describe_retention(group, attention_specs(whole.config)),
        "keys": group.key_format,
        "values": group.value_format,
        "lower_level": None if group.lower_level is None else group.lower_level._asdict(),
        "window": group.spec.window,
        "num_kv_heads": group.spec.num_kv_heads,
        "head_dim": group.spec.head_dim,
        "value_dim": group.spec.value_dim,
        "block_size": group.block_size,
        "blocks": group.num_blocks,
        "blocks_per_row": group.max_blocks_per_seq,
        "per_token": {
            "payload": size.per_token_payload,
            "scales": size.per_token_scales,
            "metadata": size.per_token_metadata,
        },
        "per_row": {"payload": plan.seq_payload, "scales": plan.seq_scales, "metadata": plan.seq_metadata},
        "payload": plan.payload,
        "scales": plan.scales,
        "metadata": plan.metadata,
        "reserved": plan.reserved,
    }
