"""Memory plans of a model before any weight is loaded, with ``cache/sizing``.

A target is a checkpoint (or a run: its newest one), a Hugging Face folder, its ``config.json`` alone or a name on the
hub (without weights), a config (JSON, or TOML with the model under ``[model]``), a run file of ``kvad train``, or a
known model's name. Exact numbers (weights, pool) and bounds (scratch, activations) are separate, as in
``cache/sizing``.

No torch, with one exception: a Hugging Face config is read by its family, whose file also has the tensor rules and
imports torch, which takes a second or two.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kvad import cache as cache_lib
from kvad import checkpoint, storage
from kvad import config as config_lib
from kvad.cache import CacheConfig, CacheGroup, resolve_for_model, sizing
from kvad.cache.sizing import GroupPlan, MemoryPlan, plan_memory
from kvad.config import AttentionSpec, ModelConfig, attention_specs
from kvad.errors import ConfigError, UsageError, format_bytes, format_count, suggest, with_article
from kvad.parallel import Mesh, RankPlan, plan_ranks
from kvad.planning.fit import FitTable, weights_shortfall
from kvad.planning.known_models import known_model, published_dtype
from kvad.train.config import RunConfig, read_toml

PARTS = ("payload", "scales", "metadata")
BYTE_FIELDS = (
    "weights", "adapters", "summarizer", "payload", "scales", "metadata", "reserved", "pool", "scratch", "activations",
    "prefix_cache_host_bytes", "draft_bytes", "total",
)  # fmt: skip


class QuantizedSize(NamedTuple):
    """Bytes of quantized matrices."""

    parameters: Mapping[str, int] = MappingProxyType({})  # by the parameter that a matrix replaces
    head_copy: int = 0  # of a tied head's copy of the token table

    def weight_bytes(self, config: ModelConfig, dtype: str) -> int:
        """Return the bytes of all weights, if those that are not quantized have a dtype."""
        return config_lib.parameter_shapes.weight_bytes(config, dtype, self.parameters) + self.head_copy


class PlanTarget(NamedTuple):
    """The model to plan."""

    name: str
    config: ModelConfig
    stored_dtype: str | None = None  # of a checkpoint's weights
    origin: str | None = None  # a Hugging Face ``model_type``
    quantized: QuantizedSize = QuantizedSize()  # of matrices that are computed with as they are stored


class DecodeSpeed(NamedTuple):
    """Decoding ``rows`` sequences at ``context`` tokens: bytes read per step, and the bound of tokens/s in total."""

    rows: int
    context: int
    step_bytes: int
    tokens_per_second: float


@dataclass(frozen=True, repr=False)
class PlanReport:
    """Result of ``kvad plan``."""

    name: str
    plan: MemoryPlan
    available: int | None  # bytes; None: unknown
    bandwidth: float  # bytes per second
    measured: bool
    speeds: tuple[DecodeSpeed, ...]
    fit: int | None  # bytes, if requested
    fits: tuple[sizing.fits.MemoryFit, ...]
    table: FitTable | None = None  # what would fit, for a decoder
    ranks: tuple[RankPlan, ...] = ()  # ranks of a mesh, if requested; then there are no speeds
    fitted: MemoryPlan | None = (
        None  # largest plan that fits into ``available``, if sizes that were not given may shrink
    )

    def __repr__(self) -> str:
        plan = self.plan
        sizes = {"weights": plan.weights, "cache": plan.pool, "total": plan.total, "available": self.available}
        texts = [f"{name} {format_bytes(size)}" for name, size in sizes.items() if size is not None]
        verdict = "does not fit" if self.is_too_large else "fits"
        return f"PlanReport({self.name!r}: {', '.join(texts)}: {verdict})"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values, as ``kvad plan --json`` prints it; all sizes in bytes."""
        return storage.strict_json.plain_value(dict(report_to_json(self)))  # type: ignore[return-value]

    @property
    def is_too_large(self) -> bool:
        """True if the given sizes, or one sequence of one block, do not fit."""
        if self.fit is not None:
            return not self.fits and not (self.table and self.table.rows)
        if self.available is None or self.ranks:
            return False
        return self.plan.total > self.available and (self.fitted is None or self.fitted.total > self.available)


def read_target(text: str) -> PlanTarget:
    """Read the model to plan; UsageError, with the nearest name, if the text is neither a path nor a known model."""
    path = Path(text)
    if "/" in text and not path.exists() and path.suffix not in (".json", ".toml"):
        path = checkpoint.hub.resolve_model_path(text, weights=False)
    if path.is_file() and path.suffix == ".gguf":
        handle = checkpoint.gguf.GGUFCheckpoint(path)
        dtype, quantized = str(handle.stored_dtype).removeprefix("torch."), QuantizedSize(*handle.quantized_bytes())
        return PlanTarget(text, handle.config, dtype, handle.origin, quantized=quantized)
    if path.is_dir():
        folder = checkpoint.folder.locate(path)
        config_file = folder / checkpoint.folder.CONFIG
        if checkpoint.folder.is_hf(folder):
            return _read_hf(text, config_file)
        config = _read_config(config_file)  # its errors come first
        file = folder / checkpoint.folder.MODEL
        quantized = _quantized_size(file, config)
        return PlanTarget(text, config, checkpoint.safetensors_header.stored_dtype(file), quantized=quantized)
    if path.is_file() and path.suffix == ".json" and "model_type" in _content(path):
        return _read_hf(text, path)
    if path.is_file() or path.suffix in (".json", ".toml"):
        return PlanTarget(text, _read_config(path))
    return PlanTarget(text.lower(), known_model(text), published_dtype(text))


def _quantized_size(file: Path, config: ModelConfig) -> QuantizedSize:
    """Add the sizes of the matrices of ``kvad quantize`` in a tensor file; a tied head's copy replaces no number."""
    tensors = {tensor.name: tensor for tensor in checkpoint.safetensors_header.read_headers(file)}
    shapes, parameters, head_copy = config_lib.parameter_shapes.weight_shapes(config), dict[str, int](), 0
    for name in tensors:
        module, _, part = name.rpartition(".")
        if part != "data" or f"{module}.scale" not in tensors:
            continue
        size = sum(
            tensors[f"{module}.{each}"].bytes for each in ("data", "scale", "minimum") if f"{module}.{each}" in tensors
        )
        parameter = config_lib.parameter_shapes.quantized_parameter(shapes, module)
        if parameter is None:
            head_copy = size
        else:
            parameters[parameter] = size
    return QuantizedSize(parameters, head_copy)


def _content(path: Path) -> Mapping[str, Any]:
    """Read a JSON file; other contents are reported elsewhere."""
    try:
        content = storage.strict_json.loads(storage.filesystem.read_bytes(path))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_hf(name: str, path: Path) -> PlanTarget:
    """Read a Hugging Face config; weights next to it decide what it leaves open: tied head, kind of head."""
    origin = str(_content(path).get("model_type", ""))
    weights = (path.parent / checkpoint.folder.MODEL, path.parent / checkpoint.folder.INDEX)
    if path.name == checkpoint.folder.CONFIG and any(file.is_file() for file in weights):
        handle = checkpoint.hf_layout.HFCheckpoint(path.parent)
        dtype, quantized = str(handle.stored_dtype).removeprefix("torch."), QuantizedSize(*handle.quantized_bytes())
        return PlanTarget(name, handle.config, dtype, origin, quantized)
    config, stored_dtype, sizes = checkpoint.hf_layout.read_hf_config(path)
    known_dtype = stored_dtype if stored_dtype in config_lib.DTYPE_BYTES else None
    return PlanTarget(name, config, known_dtype, origin, QuantizedSize(sizes))


def _read_config(path: Path) -> ModelConfig:
    """Read a bare model, or a run file of ``kvad train``, whose vocabulary is the maximum of its tokenizer."""
    if path.suffix != ".toml":
        return ModelConfig.load(path)
    try:
        content = read_toml(path)
        if not content.keys() & {"data", "tokenizer", "train"}:
            return ModelConfig.from_dict(content.get("model", content))
        recipe = RunConfig.from_dict(content)
        if "vocab_size" not in recipe.model and recipe.tokenizer.kind != "bpe":
            message = f"the vocabulary of a {recipe.tokenizer.kind} tokenizer is known when it is trained"
            raise ConfigError(message, "set model.vocab_size, or plan the trained model")
        return recipe.resolve(recipe.model.get("vocab_size", recipe.tokenizer.vocab_size))
    except ConfigError as error:
        prefix = "" if str(path) in error.message else f"{path}: "
        raise ConfigError(prefix + error.message, error.hint) from error


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
    """Plan a target with a summarizer ``learned`` and steps of ``budget`` tokens; ``cache``: fields of CacheConfig.

    The maximum lengths are by default the model's limits; ``context`` is that of texts for an encoder. The dtypes are
    by default the stored one, else float32, and for the cache (``dtype``) that of the weights.
    """
    limit, source = target.config.max_seq_len, target.config.encoder_input
    if source is None and source_context is not None:
        message = f"{target.name} has no encoder input: it is {with_article(target.config.kind)}"
        raise UsageError(message, "Use --max-seq-len.")
    max_source_len = 0 if source is None else source.max_seq_len
    for label, requested, limit_tokens in (("length", context, limit), ("source", source_context, max_source_len)):
        if requested is not None and requested > limit_tokens:
            message = f"a {label} of {requested:,} tokens is beyond the limit of {target.name}, {limit_tokens:,} tokens"
            raise UsageError(message, f"Use {limit_tokens:,} or less.")
    if source_context is not None and source_context < 1:
        raise UsageError(f"--max-source-len: must be at least 1, got {source_context}")
    stored_dtype = "float32" if target.stored_dtype == "float16" else target.stored_dtype  # widened when it is loaded
    weights = weights_dtype or stored_dtype or "float32"
    config = CacheConfig(
        max_seq_len=limit if context is None else context,
        max_source_len=max_source_len if source_context is None else source_context,
        dtype=dtype or weights,
        **cache,
    )
    if weights not in config_lib.DTYPE_BYTES:
        raise ConfigError(f"dtype: unknown dtype {weights!r}", suggest(weights, config_lib.DTYPE_BYTES))
    plan = plan_memory(
        target.config,
        config,
        weights_dtype=weights,
        weights=target.quantized.weight_bytes(target.config, weights),
        max_num_batched_tokens=budget,
        summarizer_shape=learned,
        deterministic=deterministic,
    )
    return replace(plan, head_copy=target.quantized.head_copy, quantized=target.quantized.parameters)


def with_speculation(plan: MemoryPlan, num_drafts: int, draft: PlanTarget | None) -> MemoryPlan:
    """Add speculative decoding with up to ``num_drafts`` drafts per step, those of a draft model, if any."""
    plan = replace(plan, num_drafts=num_drafts)
    if draft is not None:
        config, dtype = draft.config, plan.weights_dtype
        weights = draft.quantized.weight_bytes(config, dtype)
        cache = sizing.draft_cache(config, plan.cache, dtype)
        plan = replace(plan, draft=plan_memory(config, cache, weights_dtype=dtype, weights=weights))
    return sizing.memory_plan.plan_with(plan, plan.cache)


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
    given: Collection[str] = ("max_num_seqs", "max_seq_len"),
) -> PlanReport:
    """Build the report, with speeds for one sequence and for all at the maximum length; an encoder has none.

    ``mesh``: compute the memory of each of its ranks instead of speeds; ConfigError if it does not fit the model.
    ``given``: sizes that may not shrink.
    """
    speeds = []
    for rows in sorted({1, plan.cache.max_num_seqs}) if plan.config.decoder is not None and mesh is None else ():
        read = sizing.memory_plan.decode_step_bytes(plan, rows, plan.cache.max_seq_len)
        speeds.append(DecodeSpeed(rows, plan.cache.max_seq_len, read, rows * bandwidth / read))
    largest = () if fit is None else sizing.fits.find_fits(plan, fit)
    ranks = () if mesh is None else plan_ranks(plan, mesh)
    fitted = None
    if available is not None and plan.total > available and not {"max_num_seqs", "max_seq_len"} <= set(given):
        fitted = sizing.fit_plan(plan, sizing.MemoryBudget().resolve(available), given)
    return PlanReport(name, plan, available, bandwidth, measured, tuple(speeds), fit, largest, table, ranks, fitted)


def report_to_json(report: PlanReport) -> Mapping[str, object]:
    """Build the output of ``--json``; all sizes in bytes.

    In ``fit``, ``largest`` has the largest sizes of the requested cache, and ``table`` other configurations that fit.
    """
    fit = None
    if report.fit is not None:
        short = weights_shortfall(report.plan, report.fit)
        missing = None if short is None else dict(zip(("missing", "dtype", "weights"), short, strict=True))
        fit = {"bytes": report.fit, "largest": report.fits, "table": report.table, "weights_too_large": missing}
    return {
        "name": report.name,
        "kind": report.plan.config.kind,
        "parameters": config_lib.parameter_shapes.num_parameters(report.plan.config),
        "active_parameters": config_lib.parameter_shapes.num_active_parameters(report.plan.config),
        **memory_to_json(report.plan),
        "available": report.available,
        "is_too_large": report.is_too_large,
        "bandwidth": report.bandwidth,
        "bandwidth_measured": report.measured,
        "speeds": report.speeds,
        "fit": fit,
        "ranks": [_rank_json(rank) for rank in report.ranks],
    }


def _rank_json(rank: RankPlan) -> Mapping[str, object]:
    """Return one rank's exact bytes; its activations, at most those of the whole model, come on top."""
    where = {"rank": rank.mesh.rank, "tensor_rank": rank.mesh.tensor_rank, "stage": rank.mesh.stage}
    sizes = _fields(rank, "weights", "payload", "scales", "metadata", "pool", "total")
    return {**where, "layers": list(rank.layers), "bytes": sizes}


def _fields(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def memory_to_json(plan: MemoryPlan) -> Mapping[str, object]:
    """Return the plan, its bytes and each group's; the policy is the one that ``overflow`` selects, if any.

    ``swapped_seq_bytes``: host memory of a preempted sequence, 0 if it is recomputed; ``swap_space``: their bound, part
    of the total if requested; ``offload``: host memory of offloaded tokens, in the total, and their maximum on disk.
    """
    resolved = resolve_for_model(plan.config, plan.cache)
    key_dtype, value_dtype = cache_lib.quantization.split_format_name(plan.cache.format_name)
    return {
        "weights_dtype": plan.weights_dtype,
        "cache": {
            **_fields(plan.cache, "layout", "dtype", "block_size", "max_num_seqs", "prefill_chunk_size"),
            "key_dtype": key_dtype,
            "value_dtype": value_dtype,
            **_fields(resolved, "policy", "endless", "rope_at", "overflow", "watermark"),
        },
        "max_seq_len": plan.cache.max_seq_len,
        "max_source_len": None if plan.config.encoder_input is None else plan.cache.max_source_len,
        **_fields(plan, "max_num_batched_tokens", "deterministic"),
        "bytes": _fields(plan, *BYTE_FIELDS),
        "swapped_seq_bytes": plan.swapped_seq_bytes,
        "offload": _fields(plan.offload, "ram_bytes", "staging_bytes", "checksum_bytes", "disk_bytes"),
        "swap_space": plan.cache.swap_space,
        "groups": [_group_json(plan, group) for group in plan.groups],
    }


def group_layers(plan: MemoryPlan, group_plan: GroupPlan) -> tuple[int, ...]:
    """Return the decoder's layers of a group; the cache numbers cross-attention after all layers."""
    assert plan.config.decoder is not None, "an encoder has no groups"
    return tuple(index % plan.config.decoder.num_layers for index in group_plan.group.layers)


def _group_json(memory_plan: MemoryPlan, plan: GroupPlan) -> Mapping[str, object]:
    group = plan.group
    return {
        "is_cross_attention": group.spec.is_cross_attention,
        "layers": group_layers(memory_plan, plan),
        "retention": describe_retention(group, attention_specs(memory_plan.config)),
        "key_dtype": group.key_format,
        "value_dtype": group.value_format,
        "lower_level": None if group.lower_level is None else group.lower_level._asdict(),
        **_fields(group.spec, "window", "num_kv_heads", "head_dim", "value_dim"),
        **_fields(group, "block_size", "num_blocks", "max_blocks_per_seq"),
        "bytes_per_token": {part: getattr(plan.bytes, f"per_token_{part}") for part in PARTS},
        "bytes_per_sequence": {part: getattr(plan, f"seq_{part}") for part in PARTS},
        **_fields(plan, *PARTS, "reserved"),
    }


def describe_retention(group: CacheGroup, own: Sequence[AttentionSpec] = ()) -> str:
    """Describe what a group retains; ``own``: the model's specs without a policy, to name the model's own window."""
    spec, level = group.spec, group.lower_level
    if spec.is_cross_attention:
        return "cross-attention, the whole encoder input"
    if level is not None:
        num_slots = level.max_blocks * group.block_size
        if level.ratio > 1:
            return f"{num_slots:,} summaries of {format_count(level.ratio, 'older token')} each at most"
        return f"up to {format_count(num_slots, 'older token')}, {'offloaded' if level.is_offloaded else 'quantized'}"
    if group.demotion_policy is not None:
        first = f"the first {group.demotion_policy.num_sinks:,} and " if group.demotion_policy.num_sinks else ""
        return f"{first}the latest {format_count(group.demotion_policy.recent, 'token')} unchanged"
    if group.eviction_policy is not None:
        policy = group.eviction_policy
        return f"{format_count(policy.budget, 'token')} per head by {policy.name}, evicted every {policy.interval:,}"
    if group.sparse_read_policy is not None:
        return f"everything, of which a query reads {format_count(group.sparse_read_policy.budget, 'token')}"
    if spec.window is None:
        return "everything"
    models = bool(own) and own[group.layers[0]].window == spec.window
    text = f"the last {format_count(spec.window, 'token')}" + (" (the model's window)" if models else "")
    if spec.window_step > 1:
        text = f"the last {max(1, spec.window - spec.window_step + 1):,} to {format_count(spec.window, 'token')}"
        text += f", {spec.window_step:,} leaving at once"
    first = f"the first {spec.num_sinks:,} and " if spec.num_sinks else ""
    return first + text


def layer_names(layers: Sequence[int]) -> str:
    """Format ``layer 3``, ``layers 0-3``, ``layers 0, 2, ..., 24``; other lists are written out.

    >>> layer_names([0, 1, 2, 5, 7])
    'layers 0-2, 5, 7'
    """
    if len(layers) == 1:
        return f"layer {layers[0]}"
    steps = {b - a for a, b in itertools.pairwise(layers)}
    if len(steps) == 1 and steps != {1} and len(layers) > 3:
        return f"layers {layers[0]}, {layers[1]}, ..., {layers[-1]}"
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return "layers " + ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
