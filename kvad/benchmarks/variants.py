"""Cache variants to compare: a name, the share of the cache that is dropped, and the CacheConfig fields.

A :class:`Variant` maps the length of a sequence to the fields of a :class:`~kvad.cache.CacheConfig`;
:func:`build_engine` does the rest. ``full`` is the unchanged cache; a format is a variant that drops nothing, and
``snapkv+int8`` is snapkv with tokens stored as int8 (``int8/int4``: keys and values).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvad import cache, planning
from kvad import config as config_lib
from kvad.cache import CacheConfig, CachePolicy, build_groups, group_bytes, resolve_for_model
from kvad.config import attention_specs
from kvad.engine import Engine
from kvad.errors import ConfigError, UsageError, suggest
from kvad.llm import LLM
from kvad.model import Summarizer

SUMMARIES, LEARNED = "summaries", "learned"  # of older tokens: their means, or the output of a summarizer
RATIO = 8  # tokens of a summary, without a summarizer

CacheFields = Callable[
    [int, int], Mapping[str, Any]
]  # (tokens of a sequence, interval of evictions) -> fields of a CacheConfig


@dataclass(frozen=True)
class Variant:
    """A variant.

    ``ratio``: dropped share of a sequence's cache; ``fields``: CacheConfig fields from a sequence's length and the
    interval of evictions; ``compressor``: computes summaries.
    """

    name: str
    ratio: float
    fields: CacheFields
    compressor: Summarizer | None = None

    def budget(self, length: int) -> int:
        """Return the number of retained tokens of a sequence of this length."""
        return planning.cache_presets.slots_to_keep(self.ratio, length)

    @property
    def label(self) -> str:
        return self.name if not self.ratio else f"{self.name} {self.ratio:g}"


def known_variants() -> list[str]:
    """List ``full``, the formats and the policies of this build.

    A policy and a format are joined by a plus.
    """
    return [
        "full",
        *(name for name in planning.cache_presets.CACHE_FORMATS if _accepted(_stored(name))),
        *_eviction_names(),
        SUMMARIES,
    ]


def _eviction_names() -> list[str]:
    return list(dict.fromkeys([*planning.cache_presets.POLICY_BUILDERS, *planning.cache_presets.TIERED_POLICIES]))


def select_variants(
    names: Sequence[str], ratios: Sequence[float] = planning.cache_presets.RATIOS, compressor: Summarizer | None = None
) -> list[Variant]:
    """Build the variants of the names, ``full`` first; a policy once per ratio.

    UsageError for an unknown name.

    ``compressor``: its summaries are compared with the means, as ``learned``.
    """
    for ratio in ratios:
        if not 0 < ratio < 1:
            raise UsageError(f"ratio {ratio:g}: the share that is dropped lies between 0 and 1")
    found = [Variant("full", 0.0, variant_fields("full"))]
    for name in dict.fromkeys(names):
        policy, plus, stored = name.partition("+")
        if plus:
            made = [_combined(each, stored) for each in _variants(policy, ratios, compressor) if each.ratio]
            if not made:
                raise UsageError(f"cache {name!r}: {policy} is no policy", "write it as snapkv+int8: POLICY+FORMAT")
            found += made
        elif name != "full":
            found += _variants(name, ratios, compressor)
    return found


def _variants(name: str, ratios: Sequence[float], compressor: Summarizer | None) -> list[Variant]:
    """Build the variants of one name: once per ratio, or once if it drops nothing."""
    if ":" in name:
        return _custom(name, ratios)
    if name in _eviction_names():
        return [Variant(name, ratio, variant_fields(name, ratio)) for ratio in ratios]
    if name == SUMMARIES or (name == LEARNED and compressor is not None):
        return [_summarizing_fields(name, ratio, compressor) for ratio in ratios]
    return [Variant(name, 0.0, variant_fields(name))]


def _custom(name: str, ratios: Sequence[float]) -> list[Variant]:
    """Build variants of a custom policy (its one argument is the budget) or format, "package.module:Class"."""
    made = config_lib.plugins.load_plugin(name, "cache")
    if isinstance(made, type) and issubclass(made, CachePolicy):
        return [Variant(name, ratio, partial(_with_budget, name, ratio)) for ratio in ratios]
    cache.quantization.get_format(name, "cache")
    return [Variant(name, 0.0, lambda _length, _every: _stored(name))]


def _with_budget(name: str, ratio: float, length: int, _every: int) -> dict[str, Any]:
    return {"policy": f"{name}({planning.cache_presets.slots_to_keep(ratio, length)})"}


def _combined(variant: Variant, stored: str) -> Variant:
    """Build the same variant with another storage format."""
    form = _stored(stored)
    if not _accepted(form):
        raise UsageError(
            f"unknown cache {variant.name}+{stored}: {stored!r}", suggest(stored, planning.cache_presets.CACHE_FORMATS)
        )
    return replace(variant, name=f"{variant.name}+{stored}", fields=partial(_eviction_policy, variant.fields, stored))


def _eviction_policy(fields: CacheFields, stored: str, length: int, every: int) -> dict[str, Any]:
    made = fields(length, every)
    return {**made, **_stored(stored), "policy": planning.cache_presets.policy_for_format(made["policy"], stored)}


def _stored(name: str) -> dict[str, Any]:
    keys, values = cache.quantization.split_format_name(name)
    return {"dtype": name} if keys == values else {"key_dtype": keys, "value_dtype": values}


def variant_fields(name: str, ratio: float = 0.0) -> CacheFields:
    """Return the fields of the cache with this name.

    UsageError if it is unknown or not supported.
    """
    if name == "full":
        return lambda _length, _every: {}
    if name in _eviction_names():
        return partial(_eviction_fields, name, ratio)
    if not _accepted(_stored(name)):
        raise UsageError(f"unknown cache {name!r}", suggest(name, known_variants()))
    return lambda _length, _every: _stored(name)


def _eviction_fields(name: str, ratio: float, length: int, every: int) -> dict[str, Any]:
    if name not in planning.cache_presets.TIERED_POLICIES:
        return {"policy": planning.cache_presets.policy_for_ratio(name, ratio, length, every)}
    block = planning.cache_presets.hierarchy_block_size(planning.cache_presets.slots_to_keep(ratio, length))
    return {"policy": planning.cache_presets.policy_for_ratio(name, ratio, length, every, block), "block_size": block}


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


def _summarizing_fields(name: str, ratio: float, compressor: Summarizer | None) -> Variant:
    tokens = RATIO if compressor is None else compressor.ratio
    given = compressor if name == LEARNED else None
    return Variant(
        name,
        ratio,
        lambda length, _every: summarizing_policy(length, planning.cache_presets.slots_to_keep(ratio, length), tokens),
        given,
    )


def _accepted(fields: Mapping[str, Any]) -> bool:
    try:
        CacheConfig(max_seq_len=1, **fields)
    except (ConfigError, TypeError):  # a value or a field that this build does not support
        return False
    return True


def build_engine(
    llm: LLM, variant: Variant, length: int, *, rows: int, capacity: int, chunk: int, every: int | None = None
) -> Engine:
    """Build a separate engine for sequences of ``length`` tokens, with ``llm``'s model and the variant's cache.

    ``capacity``: maximum length; ``every``: interval of evictions (default: each chunk). No prefix is shared.
    """
    config = _cache_config(llm, variant, length, rows, capacity, chunk, every)
    return Engine(
        llm.model,
        config,
        tokenizer=None,
        max_num_batched_tokens=rows * config.prefill_chunk_size,
        summarizer=variant.compressor,
    )


def seq_bytes(llm: LLM, variant: Variant, length: int, *, chunk: int) -> int:
    """Return the bytes of a sequence of ``length`` tokens in the pool, in whole blocks, scales and metadata included.

    Raises:
        ConfigError: For a cache that this model does not support.
    """
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
