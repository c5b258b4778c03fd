"""Cache groups: sizes by hand, and configs that are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvad.cache.config import CacheConfig
from kvad.cache.groups import CacheGroup, build_groups, group_bytes
from kvad.cache.policy import Sinks, Window
from kvad.config.model import AttentionSpec
from kvad.errors import ConfigError

ROOT = Path(__file__).parents[2]
FULL = AttentionSpec(True, None, 2, 8, 8)
LOCAL = AttentionSpec(True, 6, 2, 8, 8)
HEAD_64 = AttentionSpec(True, None, 1, 64, 64)


def groups_of(*specs: AttentionSpec, **fields: object) -> tuple[CacheGroup, ...]:
    return build_groups(specs, CacheConfig(**({"max_seq_len": 64} | fields)))  # type: ignore[arg-type]


def group_of(*specs: AttentionSpec, **fields: object) -> CacheGroup:
    (group,) = groups_of(*specs, **fields)
    return group


def test_a_latent_cache_stores_no_values_and_the_documented_bytes():
    page = (ROOT / "docs/explanation/kv-cache.md").read_text(encoding="utf-8")
    latent = AttentionSpec(True, None, 1, 576, 512, values_in_keys=True)
    for layers, heads, expected in ((27, 16, 31_104), (61, 128, 70_272)):
        plain = AttentionSpec(True, None, heads, 192, 128)
        sizes = [
            sum(group_bytes(group).per_token_payload for group in groups_of(*[spec] * layers, dtype="bfloat16"))
            for spec in (latent, plain)
        ]
        assert sizes[0] == expected and f"| {sizes[1]:,} | {sizes[0]:,} | {sizes[1] / sizes[0]:.1f} |" in page
    (group,) = groups_of(latent, key_dtype="int4", value_dtype="bfloat16")
    assert group.value_format == "int4" and group_bytes(group).per_token_payload == 288


def test_layers_with_equal_specs_share_a_group_in_order_of_first_layer():
    groups = groups_of(LOCAL, LOCAL, FULL, LOCAL, FULL)
    assert [(group.spec, group.layers) for group in groups] == [(LOCAL, (0, 1, 3)), (FULL, (2, 4))]
    assert groups_of() == ()


def test_a_full_paged_group_has_room_for_every_sequence_at_its_longest():
    group = group_of(FULL, max_num_seqs=3, max_seq_len=33, block_size=16)
    assert group == CacheGroup(FULL, (0,), block_size=16, num_blocks=3 * 3 + 2, max_blocks_per_seq=3)
    assert group.num_usable_blocks == 9


@pytest.mark.parametrize(("own", "window", "num_sinks"), [(None, 6, 2), (5, 5, 0), (6, 6, 0), (7, 6, 2)])
def test_the_narrower_of_a_layers_and_a_policys_window_applies(own, window, num_sinks):
    spec = FULL._replace(window=own)
    assert Window(6).restrict(spec, 4) == FULL._replace(window=window)
    layer_window = own if num_sinks else None  # A sink is visible within the layer's window only.
    sinks = Sinks(2, 6).restrict(spec, 4)
    assert sinks == FULL._replace(window=window, num_sinks=num_sinks, layer_window=layer_window)


@pytest.mark.parametrize(
    ("window", "chunk", "max_seq_len", "blocks"),
    [
        (6, 4, 64, 4),  # 6 + 4 - 1 = 9 slots: 3 blocks of 4, and one because they start anywhere
        (5, 4, 64, 3),  # 8 slots: 2 + 1
        (6, 4, 12, 3),  # no more than the sequence has
        (1, 1, 64, 2),
        (6, 512, 64, 16),  # a chunk longer than the sequence is impossible
        (6, 59, 64, 16),  # 64 slots, 16 + 1 blocks, but the sequence has 16
    ],
)
def test_a_paged_window_has_room_for_window_chunk_and_a_block(window, chunk, max_seq_len, blocks):
    spec = LOCAL._replace(window=window)
    group = group_of(spec, max_num_seqs=5, max_seq_len=max_seq_len, block_size=4, prefill_chunk_size=chunk)
    assert (group.block_size, group.max_blocks_per_seq, group.num_blocks) == (4, blocks, 5 * blocks + 2)


def test_an_explicit_number_of_blocks_applies_to_the_full_group_only():
    local, full = groups_of(LOCAL, FULL, max_num_seqs=2, block_size=4, prefill_chunk_size=4, num_blocks=7)
    assert (local.num_blocks, full.num_blocks, full.max_blocks_per_seq) == (2 * 4 + 2, 7 + 2, 16)


def test_a_contiguous_sequence_has_one_block():
    wide = LOCAL._replace(window=48)  # The ring is no longer than the sequence.
    fields = {"layout": "contiguous", "max_num_seqs": 3, "max_seq_len": 50, "prefill_chunk_size": 8}
    assert groups_of(LOCAL, FULL, wide, **fields) == tuple(
        CacheGroup(spec, (layer,), block_size=size, num_blocks=5, max_blocks_per_seq=1)
        for layer, (spec, size) in enumerate([(LOCAL, 13), (FULL, 50), (wide, 50)])
    )


@pytest.mark.parametrize(
    ("max_seq_len", "blocks"),
    [
        (64, (6, 6, 4)),  # 16 blocks, 12 older: 4 quantized and 2 on their way; 3 of summaries and one to copy to
        (24, (6, 2, 2)),  # 2 of 6 blocks are older, at most
        (16, (4, 1, 2)),  # none is: one spare block
        (4096, (6, 6, 6)),
    ],
)
def test_levels_have_room_for_what_a_sequence_demotes(max_seq_len, blocks):
    policy = "tiered(12, quantized=16, summaries=16, ratio=4, interval=8, num_sinks=4)"
    groups = groups_of(FULL, max_num_seqs=1, max_seq_len=max_seq_len, block_size=4, policy=policy)
    assert tuple(group.max_blocks_per_seq for group in groups) == blocks


# ---------------------------------------------------------------- bytes


def test_bytes_by_hand():
    spec = AttentionSpec(True, None, 3, 8, 4)
    sizes = group_bytes(group_of(spec, spec, max_num_seqs=2, max_seq_len=32, block_size=16, dtype="bfloat16"))
    per_token = 2 * 3 * (8 + 4) * 2  # layers, heads, key and value, bytes
    slots = (2 * 2 + 2) * 16
    assert (sizes.payload, sizes.metadata, sizes.total) == (slots * per_token, slots * 8, slots * (per_token + 8))
    assert (sizes.per_token_payload, sizes.per_token_metadata) == (per_token, 8)
    assert sizes.per_seq == 32 * (per_token + 8)


@pytest.mark.parametrize(
    ("name", "payload", "scales"),
    [
        ("float32", 256, 0),
        ("bfloat16", 128, 0),
        ("fp8-e4m3", 64, 0),
        ("fp8-e5m2", 64, 0),
        ("int8", 64, 4),
        ("int4", 32, 8),
    ],
)
def test_a_head_of_64_in_every_format(name, payload, scales):
    size = group_bytes(group_of(HEAD_64, max_num_seqs=1, key_dtype=name))
    assert (size.per_token_payload, size.per_token_scales) == (payload + 256, scales)
    assert group_bytes(group_of(HEAD_64, max_num_seqs=1, dtype=name)).per_token_payload == 2 * payload


def test_every_head_of_every_layer_has_scales():
    """Two layers with three heads: a key of 64 and a value of 32 bytes each, and one float32 scale for either."""
    spec = AttentionSpec(True, None, 3, 64, 32)
    size = group_bytes(group_of(spec, spec, max_num_seqs=1, block_size=16, dtype="int8"))
    assert (size.per_token_payload, size.per_token_scales) == (576, 48)
    assert (size.payload, size.scales) == (96 * 576, 96 * 48)  # (64 / 16 + 2) blocks of 16 slots


def test_channel_formats_by_hand():
    group = group_of(HEAD_64, max_num_seqs=1, block_size=16)
    size = group_bytes(group._replace(key_format="int4-channel", value_format="int4"))
    assert size.payload == group.num_blocks * 16 * (32 + 32)
    assert size.scales == group.num_blocks * (64 * (2 + 2) + 16 * (4 + 4))
    assert size.per_token_scales == (256 + 128) // 16


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("policy", ["tiered(8)", "0: full; tiered(8, quantized=0, summaries=8)", "quest(8)"])
def test_policies_of_whole_blocks_require_a_paged_cache(policy):
    with pytest.raises(ConfigError, match=r"cache.policy: (tiered|quest)\(8.*(whole blocks|only one block)"):
        groups_of(FULL, FULL, layout="contiguous", policy=policy)


def test_int4_requires_an_even_dim():
    odd = AttentionSpec(True, None, 2, 8, 7)
    message = "cache.value_dtype: int4 packs two numbers per byte, but the value dim of layer 1"
    with pytest.raises(ConfigError, match=message):
        groups_of(FULL, odd, value_dtype="int4")
    assert groups_of(FULL, odd, key_dtype="int4", value_dtype="int8")[1].value_format == "int8"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layout": "page"}, "cache.layout: must be one of 'paged', 'contiguous', got 'page' .did you mean 'paged'"),
        ({"dtype": "bfloat"}, "cache.dtype: 'bfloat' .did you mean 'bfloat16'"),
        ({"key_dtype": "int9"}, "cache.key_dtype: 'int9' .did you mean 'int8'"),
        ({"value_dtype": "fp8-e4m2"}, "cache.value_dtype: 'fp8-e4m2' .did you mean 'fp8-e"),
        ({"value_dtype": "int4-channel"}, "cache.value_dtype: int4-channel is for keys.*cache.value_dtype='int4'"),
        ({"key_dtype": "int4-channel", "layout": "contiguous"}, "cache.key_dtype: int4-channel packs whole blocks"),
        ({"key_dtype": "int4-channel", "policy": "tova(20)"}, "tova.20. removes tokens from them"),
        ({"key_dtype": "int4-channel", "policy": "window(4)"}, "int4-channel packs whole blocks once, but window"),
        ({"dtype": "int8-channel", "value_dtype": "int8"}, "cache.dtype: int8-channel packs whole blocks"),
        ({"max_num_seqs": 0}, "cache.max_num_seqs: must be at least 1, got 0"),
        ({"max_seq_len": -3}, "cache.max_seq_len: must be at least 1, got -3"),
        ({"prefill_chunk_size": 0}, "cache.prefill_chunk_size"),
        ({"block_size": 0}, "cache.block_size"),
        ({"num_blocks": 0}, "cache.num_blocks: must be at least 1, got 0"),
        ({"num_blocks": 4, "layout": "contiguous"}, "one block per sequence"),
    ],
)
def test_invalid_cache_configs_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**{"max_seq_len": 8, **fields})


def test_layers_that_cannot_be_cached_are_refused():
    with pytest.raises(ConfigError, match="layer 1 is bidirectional"):
        groups_of(FULL, FULL._replace(causal=False))
    with pytest.raises(ConfigError, match="no layer keeps all tokens"):
        groups_of(LOCAL, num_blocks=3)


def test_no_torch():
    modules = "kvad.cache.groups, kvad.cache.manager.kv_cache_manager, kvad.engine.scheduling.scheduler"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
