"""Sizes by hand, and what cannot be refused by name."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kvad.cache.config import CacheConfig
from kvad.cache.groups import CacheGroup, build_groups, group_bytes
from kvad.cache.policy import Sinks, Window
from kvad.config.model import AttentionSpec
from kvad.errors import ConfigError

FULL = AttentionSpec(True, None, 2, 8, 8)
LOCAL = AttentionSpec(True, 6, 2, 8, 8)


def test_layers_with_equal_specs_share_a_group_in_order_of_first_layer() -> None:
    placed = build_groups([LOCAL, LOCAL, FULL, LOCAL, FULL], CacheConfig(max_seq_len=64))
    assert [(group.spec, group.layers) for group in placed] == [(LOCAL, (0, 1, 3)), (FULL, (2, 4))]
    assert build_groups([], CacheConfig(max_seq_len=64)) == ()


def test_a_full_paged_group_holds_every_row_at_its_longest() -> None:
    (group,) = build_groups([FULL], CacheConfig(max_num_seqs=3, max_seq_len=33, block_size=16))
    assert group == CacheGroup(FULL, (0,), block_size=16, num_blocks=3 * 3 + 2, max_blocks_per_seq=3)
    assert group.num_usable_blocks == 9


@pytest.mark.parametrize(("own", "window", "num_sinks"), [(None, 6, 2), (5, 5, 0), (6, 6, 0), (7, 6, 2)])
def test_the_narrower_of_a_layers_and_a_policys_window_applies(own: int | None, window: int, num_sinks: int) -> None:
    spec = FULL._replace(window=own)
    assert Window(6).restrict(spec, 4) == FULL._replace(window=window)
    layer_window = own if num_sinks else None  # a sink is visible within the layer's window only
    sinks = Sinks(2, 6).restrict(spec, 4)
    assert sinks == FULL._replace(window=window, num_sinks=num_sinks, layer_window=layer_window)


@pytest.mark.parametrize(
    ("window", "chunk", "capacity", "per_row"),
    [
        (6, 4, 64, 4),  # 6 + 4 - 1 = 9 slots: 3 blocks of 4, and one because they start anywhere
        (5, 4, 64, 3),  # 8 slots: 2 + 1
        (6, 4, 12, 3),  # no more than the row has
        (1, 1, 64, 2),
        (6, 512, 64, 16),  # a chunk longer than the row cannot come
        (6, 59, 64, 16),  # 64 slots, 16 + 1 blocks, but the row has 16
    ],
)
def test_a_paged_window_holds_window_and_chunk_and_a_block(
    window: int, chunk: int, capacity: int, per_row: int
) -> None:
    config = CacheConfig(max_num_seqs=5, max_seq_len=capacity, block_size=4, prefill_chunk_size=chunk)
    (group,) = build_groups([LOCAL._replace(window=window)], config)
    assert (group.block_size, group.max_blocks_per_seq, group.num_blocks) == (4, per_row, 5 * per_row + 2)


def test_an_explicit_count_scales_the_full_group_only() -> None:
    local, full = build_groups(
        [LOCAL, FULL], CacheConfig(max_num_seqs=2, max_seq_len=64, block_size=4, prefill_chunk_size=4, num_blocks=7)
    )
    assert (local.num_blocks, full.num_blocks) == (2 * 4 + 2, 7 + 2)
    assert full.max_blocks_per_seq == 16


def test_contiguous_is_one_block_per_row() -> None:
    local, full = build_groups(
        [LOCAL, FULL], CacheConfig(layout="contiguous", max_num_seqs=3, max_seq_len=50, prefill_chunk_size=8)
    )
    assert full == CacheGroup(FULL, (1,), block_size=50, num_blocks=5, max_blocks_per_seq=1)
    assert local == CacheGroup(LOCAL, (0,), block_size=13, num_blocks=5, max_blocks_per_seq=1)
    (wide,) = build_groups(
        [LOCAL._replace(window=48)],
        CacheConfig(layout="contiguous", max_num_seqs=3, max_seq_len=50, prefill_chunk_size=8),
    )
    assert wide.block_size == 50  # the ring is no longer than the row


def test_bytes_by_hand() -> None:
    mixer = AttentionSpec(True, None, 3, 8, 4)
    config = CacheConfig(max_num_seqs=2, max_seq_len=32, block_size=16, dtype="bfloat16")
    (group,) = build_groups([mixer, mixer], config)
    sizes = group_bytes(group)
    per_token = 2 * 3 * (8 + 4) * 2  # layers, heads, key and value, bytes
    slots = (2 * 2 + 2) * 16
    assert sizes.payload == slots * per_token
    assert sizes.metadata == slots * 8
    assert (sizes.per_token_payload, sizes.per_token_metadata) == (per_token, 8)
    assert sizes.per_seq == 32 * (per_token + 8)
    assert sizes.total == sizes.payload + sizes.metadata


def test_the_notes_example_is_three_gibibytes() -> None:
    """Document 004: 24 layers, 32 heads of 64, 8,192 tokens, float32 ("about 4 GB")."""
    (group,) = build_groups([AttentionSpec(True, None, 32, 64, 64)] * 24, CacheConfig(max_num_seqs=1, max_seq_len=8192))
    assert group_bytes(group).per_token_payload * 8192 == 3_221_225_472
    halved = group._replace(key_format="bfloat16", value_format="bfloat16")
    assert group_bytes(halved).per_token_payload * 8192 == 3_221_225_472 // 2


@pytest.mark.parametrize(
    ("name", "payload", "scales"), [("float32", 256, 0), ("fp8-e4m3", 64, 0), ("int8", 64, 4), ("int4", 32, 8)]
)
def test_a_head_of_64_in_every_format(name: str, payload: int, scales: int) -> None:
    config = CacheConfig(max_num_seqs=1, max_seq_len=64, key_dtype=name)
    (group,) = build_groups([AttentionSpec(True, None, 1, 64, 64)], config)
    size = group_bytes(group)
    assert (size.per_token_payload, size.per_token_scales) == (payload + 256, scales)
    (group,) = build_groups(
        [AttentionSpec(True, None, 1, 64, 64)], CacheConfig(max_num_seqs=1, max_seq_len=64, dtype=name)
    )
    assert group_bytes(group).per_token_payload == 2 * payload


@pytest.mark.parametrize(("name", "most"), [("int8", 0.27), ("int4", 0.16), ("fp8-e4m3", 0.25), ("fp8-e5m2", 0.25)])
def test_what_a_format_takes_of_float32_scales_included(name: str, most: float) -> None:
    for dim, kv_heads in ((64, 3), (128, 8)):
        mixer = AttentionSpec(True, None, kv_heads, dim, dim)
        packed, plain = (
            group_bytes(build_groups([mixer] * 5, CacheConfig(max_num_seqs=4, max_seq_len=1024, dtype=dtype))[0])
            for dtype in (name, "float32")
        )
        assert packed.payload + packed.scales <= most * plain.payload


def test_channels_by_hand() -> None:
    (group,) = build_groups(
        [AttentionSpec(True, None, 1, 64, 64)], CacheConfig(max_num_seqs=1, max_seq_len=64, block_size=16)
    )
    size = group_bytes(group._replace(key_format="int4-channel", value_format="int4"))
    assert size.payload == group.num_blocks * 16 * (32 + 32)
    assert size.scales == group.num_blocks * (64 * (2 + 2) + 16 * (4 + 4))
    assert size.per_token_scales == (256 + 128) // 16


@pytest.mark.parametrize(
    ("capacity", "per_row"),
    [
        (64, (6, 6, 4)),  # 16 blocks, 12 of them older: 4 packed and 2 on their way; 3 of summaries and one to copy to
        (24, (6, 2, 2)),  # 2 of 6 blocks are older, at most
        (16, (4, 1, 2)),  # none is: a block stands by
        (4096, (6, 6, 6)),  # and it does not grow
    ],
)
def test_levels_hold_what_a_row_can_send_there(capacity: int, per_row: tuple[int, ...]) -> None:
    policy = "tiered(12, quantized=16, summaries=16, ratio=4, interval=8, num_sinks=4)"
    made = build_groups([FULL], CacheConfig(max_num_seqs=1, max_seq_len=capacity, block_size=4, policy=policy))
    assert tuple(group.max_blocks_per_seq for group in made) == per_row


@pytest.mark.parametrize("policy", ["tiered(8)", "0: full; tiered(8, quantized=0, summaries=8)", "quest(8)"])
def test_what_needs_blocks_is_refused_where_a_row_is_one(policy: str) -> None:
    with pytest.raises(ConfigError, match=r"cache.policy: (tiered|quest)\(8.*(whole blocks|only one block)"):
        build_groups([FULL, FULL], CacheConfig(max_seq_len=64, layout="contiguous", policy=policy))


def test_int4_needs_pairs() -> None:
    odd = AttentionSpec(True, None, 2, 8, 7)
    with pytest.raises(
        ConfigError, match=r"cache.value_dtype: int4 packs two numbers per byte, but the value dim of layer 1"
    ):
        build_groups([FULL, odd], CacheConfig(max_seq_len=8, value_dtype="int4"))
    assert (
        build_groups([FULL, odd], CacheConfig(max_seq_len=8, key_dtype="int4", value_dtype="int8"))[1].value_format
        == "int8"
    )


@pytest.mark.parametrize(
    ("fields", "words"),
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
def test_invalid_cache_configs_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CacheConfig(**{"max_seq_len": 8, **fields})


def test_layers_that_cannot_be_cached_are_refused() -> None:
    with pytest.raises(ConfigError, match="layer 1 is bidirectional"):
        build_groups([FULL, FULL._replace(causal=False)], CacheConfig(max_seq_len=8))
    with pytest.raises(ConfigError, match="no layer keeps all tokens"):
        build_groups([LOCAL], CacheConfig(max_seq_len=8, num_blocks=3))


def test_no_torch() -> None:
    import subprocess

    modules = "kvad.cache.groups, kvad.cache.manager.kv_cache_manager, kvad.engine.scheduling.scheduler"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
