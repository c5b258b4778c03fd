"""What plan says of a policy's pools is what Memory allocates, to the byte; and it is less than keeping everything."""

from __future__ import annotations

import pytest

from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.groups import build_groups, group_bytes
from kvad.cache.sizing.memory_plan import plan_memory
from kvad.config.model import ModelConfig, attention_specs
from kvad.errors import ConfigError
from tests.support.random_models import model_config, pair_config

POLICIES = (
    "full",
    "window(16)",
    "sinks(4, 12)",
    "block-window(16)",
    "0: full; sinks(4, 12)",
    "heavy-hitters(16, interval=8)",
    "snapkv(16, interval=8, window=4)",
    "tova(16, interval=8)",
    "key-norm(16, interval=8)",
    "random(16, interval=8)",
    "1: window(8); key-norm(16, interval=8)",
    "tiered(16, interval=8)",
    "tiered(16, quantized=16, interval=8, key_format=int4-channel, value_format=int4, summaries=8, ratio=4)",
    "tiered(16, quantized=0, interval=8, summaries=8, ratio=4, num_sinks=8)",
    "offload(16, interval=8)",
    "quest(16)",
)
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
    "encoder-decoder": pair_config("t5", "pre", "mqa"),
}


def cache_of(policy: str, layout: str, formats: dict[str, str], **change: object) -> CacheConfig:
    given = {
        "layout": layout,
        "block_size": 8,
        "max_num_seqs": 3,
        "max_seq_len": 96,
        "prefill_chunk_size": 8,
        "max_source_len": 20,
    }
    return CacheConfig(policy=policy, **(given | formats | change))  # type: ignore[arg-type]


def allocated(config: ModelConfig, cache: CacheConfig) -> tuple[int, int, int]:
    memory = KVCache(build_groups(attention_specs(config), cache), rope_at=cache.rope_at)
    assert sum(leaf.nbytes for leaf in memory.tensors()) == (
        memory.payload_bytes() + memory.scale_bytes() + memory.metadata_bytes()
    )
    return memory.payload_bytes(), memory.scale_bytes(), memory.metadata_bytes()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_plan_and_memory_agree_to_the_byte(policy: str, layout: str) -> None:
    if layout == "contiguous" and ("tiered" in policy or "quest" in policy or "offload" in policy):
        with pytest.raises(ConfigError, match=r"Use cache\.layout='paged'"):
            build_groups(attention_specs(MODELS["decoder"]), cache_of(policy, layout, {}))
        return
    for name, config in MODELS.items():
        for formats in FORMATS:
            cache = cache_of(policy, layout, formats)
            sizes = [group_bytes(group) for group in build_groups(attention_specs(config), cache)]
            planned = tuple(sum(getattr(size, part) for size in sizes) for part in ("payload", "scales", "metadata"))
            assert allocated(config, cache) == planned, (name, formats)
            assert plan_memory(config, cache, weights_dtype="float32").pool == sum(planned), (name, formats)


@pytest.mark.parametrize("policy", POLICIES[1:-1])
@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_a_policy_s_pool_is_smaller(policy: str, layout: str) -> None:
    """Of what all layers hold of long rows; where one layer keeps everything, of the others."""
    if layout == "contiguous" and ("tiered" in policy or "offload" in policy):
        pytest.skip("tokens are demoted in whole blocks")
    config = MODELS["decoder"]
    least = 0.65 if "full" in policy or policy == "tiered(16, interval=8)" else 0.5
    full, less = (
        sum(allocated(config, cache_of(each, layout, {}, max_num_seqs=8, max_seq_len=384))) for each in ("full", policy)
    )
    assert less < least * full
