"""Planned bytes of a policy's pools are the allocated ones, and fewer than those that keep all tokens."""

from __future__ import annotations

import pytest

from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.groups import build_groups, group_bytes
from kvad.cache.sizing.memory_plan import plan_memory
from kvad.config.model import ModelConfig, attention_specs
from kvad.errors import ConfigError
from tests.cache.test_position_policies import LOSSY, MASKS
from tests.support.random_models import STATES, model_config, pair_config

POLICIES = ("full", *MASKS, *LOSSY[:-1], "1: window(8); key-norm(16, interval=8)", "offload(16, interval=8)", LOSSY[-1])
FORMATS = (
    {"dtype": "float64"},
    {"dtype": "bfloat16"},
    {"dtype": "float32", "key_dtype": "int8", "value_dtype": "int4"},
    {"dtype": "fp8-e4m3"},
)
MODELS = {
    "decoder": model_config("rope", "pre", "gqa"),
    "windowed": model_config("rope", "pre", "window-mix"),
    "values": model_config("rope", "pre", "value-dim"),
    "latent": model_config("rope", "pre", "latent"),
    "encoder-decoder": pair_config("t5", "pre", "mqa"),
    **{heads: model_config("rope", heads=heads, layers=3) for heads in STATES},
}


def cache_of(policy: str, layout: str, **change: object) -> CacheConfig:
    sizes = {"block_size": 4, "max_num_seqs": 3, "max_seq_len": 96, "prefill_chunk_size": 8, "max_source_len": 20}
    return CacheConfig(policy=policy, layout=layout, **(sizes | change))  # type: ignore[arg-type]


def allocated(config: ModelConfig, cache: CacheConfig) -> tuple[int, int, int]:
    kv_cache = KVCache(build_groups(attention_specs(config), cache), rope_at=cache.rope_at)
    sizes = kv_cache.payload_bytes(), kv_cache.scale_bytes(), kv_cache.metadata_bytes()
    assert sum(tensor.nbytes for tensor in kv_cache.tensors()) == sum(sizes)
    return sizes


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_planned_bytes_are_the_allocated_ones(policy, layout):
    if layout == "contiguous" and any(name in policy for name in ("tiered", "quest", "offload")):
        with pytest.raises(ConfigError, match=r"Use cache\.layout='paged'"):
            build_groups(attention_specs(MODELS["decoder"]), cache_of(policy, layout))
        return
    for name, config in MODELS.items():
        for formats in FORMATS:
            cache = cache_of(policy, layout, **formats)
            sizes = [group_bytes(group) for group in build_groups(attention_specs(config), cache)]
            planned = tuple(sum(getattr(size, part) for size in sizes) for part in ("payload", "scales", "metadata"))
            assert allocated(config, cache) == planned, (name, formats)
            assert plan_memory(config, cache, weights_dtype="float32").pool == sum(planned), (name, formats)


CASES = [("paged", policy) for policy in POLICIES[1:-1]]
CASES += [("contiguous", policy) for policy in POLICIES[1:-1] if "tiered" not in policy and "offload" not in policy]


@pytest.mark.parametrize(("layout", "policy"), CASES)
def test_the_pool_of_a_policy_is_smaller(layout, policy):
    """The limit is higher if one layer keeps all tokens."""
    limit = 0.65 if policy.startswith("0: full; ") else 0.5
    full, reduced = (
        sum(allocated(MODELS["decoder"], cache_of(each, layout, max_num_seqs=8, max_seq_len=384)))
        for each in ("full", policy)
    )
    assert reduced < limit * full
