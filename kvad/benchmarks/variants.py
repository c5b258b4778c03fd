"""Cache variants to compare: a name, the share of the cache that is dropped, and the CacheConfig fields.

A ``Variant`` maps the length of a sequence to the fields of a ``kvad.cache.CacheConfig``;
``build_engine`` does the rest. ``full`` is the unchanged cache; a format is a variant that drops nothing, and
``snapkv+int8`` is snapkv with tokens stored as int8 (``int8/int4``: keys and values).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvad import cache as cache_lib
from kvad import config as cfg
from kvad import planning
from kvad.cache import CacheConfig, CachePolicy, build_groups, group_bytes, resolve_for_model
from kvad.config import attention_specs
from kvad.engine import Engine, EngineConfig
from kvad.errors import ConfigError, UsageError, suggest
from kvad.llm import LLM
from kvad.model import Summarizer

SUMMARIES, LEARNED = "summaries", "learned"  # of older tokens: their means, or the output of a summarizer
RATIO = 8  # tokens of a summary, without a summarizer

# (tokens of a sequence, interval of evictions) -> fields of a CacheConfig
CacheFields = Callable[[int, int], Mapping[str, Any]]


@dataclass(frozen=True)
class Variant:
    """A cache to compare."""

    name: str
    ratio: float  # dropped share of a sequence's cache
    fields: CacheFields
    compressor: Summarizer | None = None  # computes summaries

    def budget(self, length: int) -> int:
        """Return the number of retained tokens of a sequence of this length."""
        return planning.cache_presets.slots_to_keep(self.ratio, length)

    @property
    def label(self) -> str:
        return self.name if not self.ratio else f"{self.name} {self.ratio:g}"


def known_variants() -> list[str]:
    """List ``full``, the formats and the policies of this build; a policy and a format are joined by a plus."""
    formats = [name for name in planning.cache_presets.CACHE_FORMATS if _is_accepted(_format_fields(name))]
    return ["full", *formats, *_policy_names(), SUMMARIES]


def _policy_names() -> list[str]:
    return list(dict.fromkeys([*planning.cache_presets.POLICY_BUILDERS, *planning.cache_presets.TIERED_POLICIES]))


def select_variants(
    names: Sequence[str], ratios: Sequence[float] = planning.cache_presets.RATIOS, compressor: Summarizer | None = None
) -> list[Variant]:
    """Build the variants of the names, ``full`` first; a policy once per ratio.

    ``compressor``: its summaries are compared with the means, as ``learned``. UsageError for an unknown name.
    """
    for ratio in ratios:
        if not 0 < ratio < 1:
            raise UsageError(f"ratio {ratio:g}: the share that is dropped lies between 0 and 1")
    variants = [Variant("full", 0.0, variant_fields("full"))]
    for name in dict.fromkeys(names):
        policy, plus, stored = name.partition("+")
        if plus:
            lossy = [variant for variant in _variants(policy, ratios, compressor) if variant.ratio]
            if not lossy:
                raise UsageError(f"cache {name!r}: {policy} is no policy", "write it as snapkv+int8: POLICY+FORMAT")
            variants += [_with_format(variant, stored) for variant in lossy]
        elif name != "full":
            variants += _variants(name, ratios, compressor)
    return variants


def _variants(name: str, ratios: Sequence[float], compressor: Summarizer | None) -> list[Variant]:
    """Build the variants of one name: once per ratio, or once if it drops nothing."""
    if name == SUMMARIES or (name == LEARNED and compressor is not None):
        group = RATIO if compressor is None else compressor.ratio
        used = compressor if name == LEARNED else None

        def fields(ratio: float, length: int, _every: int) -> Mapping[str, Any]:
            return summarizing_policy(length, planning.cache_presets.slots_to_keep(ratio, length), group)

        return [Variant(name, ratio, partial(fields, ratio), used) for ratio in ratios]
    return [Variant(name, ratio, variant_fields(name, ratio)) for ratio in (ratios if _is_policy(name) else (0.0,))]


def _is_policy(name: str) -> bool:
    """True for a policy, also one of a plugin; raises ConfigError for another plugin that is not a format."""
    if not cfg.plugins.is_plugin(name, known_variants()):
        return name in _policy_names()
    plugin = cfg.plugins.load_plugin(name, "cache")
    if isinstance(plugin, type) and issubclass(plugin, CachePolicy):
        return True
    cache_lib.quantization.get_format(name, "cache")
    return False


def variant_fields(name: str, ratio: float = 0.0) -> CacheFields:
    """Return the fields of the cache with this name; UsageError if it is unknown or not supported."""
    if _is_policy(name):
        return partial(_policy_fields, name, ratio)
    fields = {} if name == "full" else _format_fields(name)
    if not _is_accepted(fields):
        raise UsageError(f"unknown cache {name!r}", suggest(name, known_variants()))
    return lambda _length, _every: fields


def _policy_fields(name: str, ratio: float, length: int, every: int) -> dict[str, Any]:
    budget = planning.cache_presets.slots_to_keep(ratio, length)
    if cfg.plugins.is_plugin(name, known_variants()):  # a plugin's one argument is the budget
        return {"policy": f"{name}({budget})"}
    if name not in planning.cache_presets.TIERED_POLICIES:
        return {"policy": planning.cache_presets.policy_for_ratio(name, ratio, length, every)}
    block = planning.cache_presets.hierarchy_block_size(budget)
    return {"policy": planning.cache_presets.policy_for_ratio(name, ratio, length, every, block), "block_size": block}


def _format_fields(name: str) -> dict[str, Any]:
    keys, values = cache_lib.quantization.split_format_name(name)
    return {"dtype": name} if keys == values else {"key_dtype": keys, "value_dtype": values}


def _with_format(variant: Variant, stored: str) -> Variant:
    name, form = f"{variant.name}+{stored}", _format_fields(stored)
    if not _is_accepted(form):
        raise UsageError(f"unknown cache {name}: {stored!r}", suggest(stored, planning.cache_presets.CACHE_FORMATS))

    def fields(length: int, every: int) -> dict[str, Any]:
        base = variant.fields(length, every)
        return {**base, **form, "policy": planning.cache_presets.policy_for_format(base["policy"], stored)}

    return replace(variant, name=name, fields=fields)


def _is_accepted(fields: Mapping[str, Any]) -> bool:
    try:
        CacheConfig(max_seq_len=1, **fields)
    except (ConfigError, TypeError):  # a value or a field that this build does not support
        return False
    return True


def summarizing_policy(length: int, budget: int, ratio: int) -> dict[str, Any]:
    """Build a tiered policy of at most ``budget`` slots for a sequence of ``length`` tokens.

    It keeps as many recent tokens as leave room for summaries of all others (at least one block; the rest is dropped).

    1024 tokens, 256 slots, 8 tokens a summary:  136 recent and 8 in transit, 112 summaries (of 896)
    """
    size = ratio  # a block becomes one summary
    recent = max(1, (budget - size - length // ratio) * ratio // (ratio - 1) // size) * size
    most = max(1, (budget - size - recent) // size) * size
    policy = f"tiered({recent}, quantized=0, interval={size}, summaries={most}, ratio={ratio})"
    return {"policy": policy, "block_size": size}


def build_engine(
    llm: LLM, variant: Variant, length: int, *, rows: int, capacity: int, chunk: int, every: int | None = None
) -> Engine:
    """Build a separate engine for sequences of ``length`` tokens, with ``llm``'s model and the variant's cache.

    ``capacity``: maximum length; ``every``: interval of evictions (default: each chunk). No prefix is shared.
    """
    config = _cache_config(llm, variant, length, rows, capacity, chunk, every)
    budget = rows * config.prefill_chunk_size
    return Engine(llm.model, config, EngineConfig(max_num_batched_tokens=budget, summarizer=variant.compressor))


def seq_bytes(llm: LLM, variant: Variant, length: int, *, chunk: int) -> int:
    """Return the bytes of a sequence in the pool, in whole blocks; ConfigError for an unsupported cache."""
    model = llm.model.config
    config = resolve_for_model(model, _cache_config(llm, variant, length, 1, length, chunk, None))
    return sum(group_bytes(group).per_seq for group in build_groups(attention_specs(model), config))


def _cache_config(
    llm: LLM, variant: Variant, length: int, rows: int, capacity: int, chunk: int, every: int | None
) -> CacheConfig:
    base: dict[str, Any] = {
        "dtype": llm.cache_config.dtype,
        "block_size": llm.cache_config.block_size,
        "max_num_seqs": rows,
        "max_seq_len": capacity,
        "prefill_chunk_size": min(chunk, capacity),
        "enable_prefix_caching": False,
    }
    made = {**base, **variant.fields(length, base["prefill_chunk_size"] if every is None else every)}
    try:
        return CacheConfig(**made)
    except TypeError as error:
        raise UsageError(f"{variant.label}: this build's cache cannot: {error}") from None
