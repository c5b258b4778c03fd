"""Statements of notes 000, 001 and 004 on the cache, tested with a KVCache and hand-made block tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.groups import CacheGroup, build_groups, group_bytes
from kvad.config import ModelConfig
from kvad.config import layers as cfg
from kvad.config.layers import LearnedPositionsConfig, SinusoidalPositionsConfig
from kvad.config.model import AttentionSpec, attention_specs
from kvad.errors import CacheError, ConfigError
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.model_input import RESERVED_BLOCKS, BlockOps, ModelInput, SlotMapping, SubBatch
from kvad.ops.rotary import RotaryCache
from kvad.ops.sub_batch import AttentionTrace

Build = Callable[..., Transformer]
Hidden = Callable[..., Tensor]
TOKENS = torch.tensor([3, 14, 15, 9, 26, 5, 3, 5])
LAYOUTS = ["contiguous", "paged"]
ENCODINGS: dict[str, dict[str, Any]] = {
    "learned": {"absolute": LearnedPositionsConfig(256)},
    "sinusoidal": {"absolute": SinusoidalPositionsConfig()},
    "rope": {"position": cfg.RopeConfig()},
    "alibi": {"position": cfg.AlibiConfig()},
    "t5": {"position": cfg.T5BiasConfig()},
}
RELATIVE = ["rope", "alibi", "t5"]


class HandMadeStreams:
    """Sequences of one KVCache with a cursor each; every sequence owns its blocks, so there is nothing to allocate."""

    def __init__(
        self,
        model: Transformer,
        rows: int = 1,
        capacity: int = 16,
        layout: Any = "contiguous",
        dtype: str = "float64",
        **kv_cache: Any,
    ) -> None:
        config = CacheConfig(layout=layout, max_num_seqs=rows, max_seq_len=capacity, block_size=4, dtype=dtype)
        self.groups = build_groups(attention_specs(model.config), config)
        self.kv_cache = KVCache(self.groups, **kv_cache)
        self.model, self.cursor = model, [0] * rows

    def blocks(self, group: CacheGroup, row: int) -> list[int]:
        each = group.num_usable_blocks // len(self.cursor)
        first = RESERVED_BLOCKS + row * each
        return [first + each - 1 - i for i in range(each)]  # backwards: a table need not ascend

    def slots(self, group: CacheGroup, row: int, positions: Sequence[int]) -> list[int]:
        blocks, size = self.blocks(group, row), group.block_size
        return [blocks[p // size] * size + p % size for p in positions]

    @torch.inference_mode()
    def compute(self, new: dict[int, Tensor], shift: int = 0) -> list[Tensor]:
        """Compute new tokens of some sequences in one step, a sub-batch each; return the hidden states [L, E] of
        each.
        """
        spans = {row: range(self.cursor[row], self.cursor[row] + len(tokens)) for row, tokens in new.items()}
        sub_batches = tuple(SubBatch(1, len(span), span.stop) for span in spans.values())
        places = []
        for group in self.groups:
            slots = [slot for row, span in spans.items() for slot in self.slots(group, row, span)]
            tables = tuple(torch.tensor([self.blocks(group, row)]) for row in spans)
            places.append(SlotMapping(torch.tensor(slots), tables))
        positions = torch.tensor([p + shift for span in spans.values() for p in span])
        tokens = torch.cat(list(new.values()))
        step = ModelInput(tokens, positions, sub_batches, torch.arange(len(tokens)), slot_mappings=tuple(places))
        out: Tensor = self.model(step, self.kv_cache)
        for row, span in spans.items():
            self.cursor[row] = span.stop
        return list(out.split([len(tokens) for tokens in new.values()]))


def last(seen: list[AttentionTrace], layer: int) -> AttentionTrace:
    return [one for one in seen if one.layer == layer][-1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_of_note_001_steps_1_to_5(layout: str, build: Build, hidden: Hidden) -> None:
    """001, Key-Value Cache: q, k, v of the new token; K_full = [K_prev; K_new]; attend; store: equal to uncached."""
    model, seen = build(position=cfg.RopeConfig()), list[AttentionTrace]()
    stream = HandMadeStreams(model, layout=layout, attention_hook=seen.append)
    uncached, (got,) = hidden(model, TOKENS), stream.compute({0: TOKENS[:3]})
    torch.testing.assert_close(got, uncached[:3], rtol=0, atol=1e-12)
    for t in range(3, len(TOKENS)):
        before = last(seen, 1)
        (got,) = stream.compute({0: TOKENS[t : t + 1]})
        torch.testing.assert_close(got, uncached[t : t + 1], rtol=0, atol=1e-12)
        now = last(seen, 1)
        order = now.positions[0].argsort()[-(t + 1) :]  # empty slots are at -1
        assert now.q.shape[:2] == (1, 1) and now.positions[0][order].tolist() == list(range(t + 1))
        k, v = now.k[0][:, order], now.v[0][:, order]
        earlier = before.positions[0].argsort()[-t:]
        assert torch.equal(k[:, :t], before.k[0][:, earlier]) and torch.equal(v[:, :t], before.v[0][:, earlier])
        for h in range(4):
            scores = k[h // 2].numpy() @ now.q[0, 0, h].numpy() / math.sqrt(8)
            weights = np.exp(scores - scores.max())
            expected = weights / weights.sum() @ v[h // 2].numpy()
            np.testing.assert_allclose(now.out[0, 0, h].numpy(), expected, rtol=0, atol=1e-12)


def test_past_keys_and_values_are_unchanged_by_appended_tokens(build: Build) -> None:
    """000 section 1.3, 004 sections 4.2 and 4.13: under a causal mask past k, v keep the same bits."""
    model = build(position=cfg.RopeConfig())
    stream = HandMadeStreams(model)
    stream.compute({0: TOKENS[:5]})
    stores = (*stream.kv_cache.keys, *stream.kv_cache.values)
    first_values, addresses = [store.data.clone() for store in stores], [store.data.data_ptr() for store in stores]
    stream.compute({0: TOKENS[5:]})
    assert [store.data.data_ptr() for store in stores] == addresses  # written in place: nothing is concatenated
    for before, store in zip(first_values, stores, strict=True):
        after = store.data
        assert after.shape == before.shape
        assert torch.equal(before[RESERVED_BLOCKS, :, :5], after[RESERVED_BLOCKS, :, :5])
        assert bool((before[RESERVED_BLOCKS, :, 5:8] == 0).all()) and bool((after[RESERVED_BLOCKS, :, 5:8] != 0).all())
    assert past(model, TOKENS) == past(model, torch.cat([TOKENS[:5], torch.tensor([1, 2, 4])]))


@torch.inference_mode()
def past(model: Transformer, tokens: Tensor) -> list[list[float]]:
    """Return k and v of the first five tokens in every layer, recomputed."""
    seen, n = list[AttentionTrace](), len(tokens)
    step = ModelInput(tokens, torch.arange(n), (SubBatch(1, n, n),), torch.arange(n))
    model(step, NoCache(model.config, attention_hook=seen.append))
    return [part[0, :, :5].flatten().tolist() for one in seen for part in (one.k, one.v)]


def test_appended_tokens_change_the_past_of_a_bidirectional_stack(build: Build) -> None:
    """004 section 4.13: an encoder cannot append tokens, so kvad refuses to cache it."""
    model = build(position=cfg.RopeConfig(), causal=False)
    one, other = past(model, TOKENS), past(model, torch.cat([TOKENS[:5], torch.tensor([1, 2, 4])]))
    assert one[:2] == other[:2]  # the first layer's depend on the embeddings only
    assert all(np.abs(np.subtract(a, b)).max() > 1e-3 for a, b in zip(one[2:], other[2:], strict=True))
    with pytest.raises(ConfigError, match="bidirectional"):
        build_groups(attention_specs(model.config), CacheConfig(max_seq_len=8))


def test_sum_includes_the_new_token(build: Build) -> None:
    """004 section 4.6 sums over 1..T for the query T+1: its own key and value are missing, and T = 0 has no sum."""
    seen = list[AttentionTrace]()
    stream = HandMadeStreams(build(layers=1), attention_hook=seen.append)
    stream.compute({0: TOKENS[:1]})
    torch.testing.assert_close(seen[0].out[0, 0], seen[0].v[0, :, 0].repeat_interleave(2, dim=0), rtol=0, atol=1e-12)
    stream.compute({0: TOKENS[1:6]})
    stream.compute({0: TOKENS[6:7]})
    now = seen[-1]
    q, k, v = now.q[0, 0, 0].numpy(), now.k[0, 0].numpy(), now.v[0, 0].numpy()
    sums = {}
    for upper in (6, 7):  # T and T+1
        weights = np.exp(k[:upper] @ q / math.sqrt(8))
        sums[upper] = weights / weights.sum() @ v[:upper]
    np.testing.assert_allclose(now.out[0, 0, 0].numpy(), sums[7], rtol=0, atol=1e-12)
    assert np.abs(sums[6] - sums[7]).max() > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_streams_in_one_batch_equal_their_solo_runs(layout: str, build: Build, hidden: Hidden) -> None:
    """004 sections 4.5, 4.8, 4.18: one cursor per stream (a scalar is not enough); streams are independent."""
    model = build(position=cfg.RopeConfig())
    texts = [TOKENS, TOKENS.flip(0)[:4], TOKENS[2:7]]
    streams = HandMadeStreams(model, rows=3, layout=layout)
    got: list[list[Tensor]] = [[], [], []]
    for lengths in ([3, 1, 0], [1, 2, 4], [4, 1, 1]):  # prompts of different lengths, then chunks next to single tokens
        new = {r: texts[r][streams.cursor[r] :][:n] for r, n in enumerate(lengths) if n}
        for row, part in zip(new, streams.compute(new), strict=True):
            got[row].append(part)
    assert streams.cursor == [8, 4, 5]
    for text, parts in zip(texts, got, strict=True):
        torch.testing.assert_close(torch.cat(parts), hidden(model, text), rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_streams_of_100_and_50_with_nan_in_the_upper_50(layout: str, build: Build, hidden: Hidden) -> None:
    """004 section 4.9, in a cache: room for 100 each, B has 50; the contents of its upper 50 slots do not matter."""
    model, text = build(position=cfg.RopeConfig()), torch.arange(101) % 32
    streams = HandMadeStreams(model, rows=2, capacity=101, layout=layout)
    streams.compute({0: text[:100], 1: text[:50]})
    for number, group in enumerate(streams.groups):
        for slot in streams.slots(group, 1, range(50, 101)):
            for store in (*streams.kv_cache.keys, *streams.kv_cache.values):
                store.data[slot // group.block_size, :, slot % group.block_size] = math.nan
            assert int(streams.kv_cache.positions[number].flatten()[slot]) == -1
    a, b = streams.compute({0: text[100:101], 1: text[50:51]})
    torch.testing.assert_close(a, hidden(model, text)[100:], rtol=0, atol=1e-12)
    torch.testing.assert_close(b, hidden(model, text[:51])[50:], rtol=0, atol=1e-12)


def test_block_with_a_new_owner_is_cleared(build: Build, hidden: Hidden) -> None:
    """004 section 4.18, "attends to tokens from other streams": a new owner of blocks does, unless they are cleared."""
    model, fresh = build(position=cfg.RopeConfig()), TOKENS[4:]
    after = {}
    for cleared in (True, False):
        stream = HandMadeStreams(model, layout="paged")
        stream.compute({0: torch.flip(TOKENS, [0])})
        stream.cursor[0] = 0
        if cleared:
            blocks = tuple(stream.blocks(stream.groups[0], 0))
            stream.kv_cache.apply(BlockOps(clear=(blocks,), copy=((),)))
        stream.compute({0: fresh[:2]}, shift=6)  # later positions: stale keys are in the past and visible
        (after[cleared],) = stream.compute({0: fresh[2:]}, shift=6)
    torch.testing.assert_close(after[True], hidden(model, fresh)[2:], rtol=0, atol=1e-6)
    assert float((after[True] - after[False]).abs().max()) > 1e-2


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_works_with_the_cache(encoding: str, build: Build, hidden: Hidden) -> None:
    """004 section 4.10: learned, sinusoidal, rotary, ALiBi and T5, token by token."""
    model = build(**ENCODINGS[encoding])
    stream = HandMadeStreams(model, layout="paged")
    got = torch.cat([stream.compute({0: token[None]})[0] for token in TOKENS])
    torch.testing.assert_close(got, hidden(model, TOKENS), rtol=0, atol=1e-12)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_relative_encodings_see_offsets_only(encoding: str, build: Build, hidden: Hidden) -> None:
    """004 section 4.10: a wrong offset in k, v breaks absolute encodings; relative ones see i - j only."""
    model = build(**ENCODINGS[encoding])
    stream = HandMadeStreams(model)
    stream.compute({0: TOKENS[:5]}, shift=40)
    (got,) = stream.compute({0: TOKENS[5:]}, shift=40)
    off = float((got - hidden(model, TOKENS)[5:]).abs().max())
    assert off < 1e-4 if encoding in RELATIVE else off > 1e-2
    (got,) = HandMadeStreams(model).compute({0: TOKENS[:5]}, shift=3)
    assert (float((got - hidden(model, TOKENS)[:5]).abs().max()) < 1e-4) == (encoding in RELATIVE)


@torch.inference_mode()
def test_keys_are_stored_rotated(build: Build, step_of: Callable[..., ModelInput]) -> None:
    """004 sections 4.10 and 4.20: slot j stores R_j k_j, so reading needs no rotation; with a bias k_j is stored."""
    for position in (cfg.RopeConfig(), cfg.AlibiConfig(), cfg.T5BiasConfig()):
        model, step = build(position=position), step_of(TOKENS)
        stream = HandMadeStreams(model)
        stream.compute({0: TOKENS})
        layer, rotary = model.decoder.layers[0], model.decoder.position_encoding("L", step)
        _, k, v = layer.attention.project(layer.norm1(model.embedding(TOKENS, step.positions)))
        stored = [
            stores[0].data[RESERVED_BLOCKS, :, :8].transpose(0, 1)
            for stores in (stream.kv_cache.keys, stream.kv_cache.values)
        ]
        expected = RotaryCache(step.positions).rotate(k, rotary) if isinstance(position, cfg.RopeConfig) else k
        torch.testing.assert_close(stored[0], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(stored[1], v, rtol=0, atol=1e-12)
        assert (float((stored[0] - k).abs().max()) > 0.1) == isinstance(position, cfg.RopeConfig)


@torch.inference_mode()
def test_each_layer_needs_its_own_keys_and_values(
    build: Build, hidden: Hidden, step_of: Callable[..., ModelInput]
) -> None:
    """004 section 4.12: K of a layer comes from that layer's input; with another layer's K the output is wrong."""
    model, step = build(position=cfg.RopeConfig()), step_of(TOKENS[:7])
    first, second = model.decoder.layers
    view, encoding = NoCache(model.config).open(step)[0], model.decoder.position_encoding("L", step)
    x, stream = model.embedding(step.token_ids, step.positions), HandMadeStreams(model)
    stream.compute({0: TOKENS[:7]})
    keys, values = ([store.data for store in stores] for stores in (stream.kv_cache.keys, stream.kv_cache.values))
    (group,) = stream.groups  # one table for both layers
    assert {store.shape for store in (*keys, *values)} == {(group.num_blocks, 2, group.block_size, 8)}
    for inputs, is_its_own in ((first(x, view, None, encoding), True), (x, False)):
        v = second.attention.project(second.norm1(inputs))[2].transpose(0, 1)
        assert (float((values[1][RESERVED_BLOCKS, :, :7] - v).abs().max()) < 1e-12) == is_its_own
    assert float((keys[0][RESERVED_BLOCKS, :, :7] - keys[1][RESERVED_BLOCKS, :, :7]).abs().max()) > 0.1
    uncached = hidden(model, TOKENS)[7:]
    for store in (*keys, *values):  # without any one of them the next token's output is wrong
        stored = store.clone()
        store.zero_()
        (got,) = stream.compute({0: TOKENS[7:]})
        assert float((got - uncached).abs().max()) > 1e-2
        store.copy_(stored)
        stream.cursor[0] = 7
    keys[0][:], keys[1][:] = keys[1].clone(), keys[0].clone()
    (got,) = stream.compute({0: TOKENS[7:]})
    assert float((got - uncached).abs().max()) > 1e-2


@pytest.mark.parametrize("change", [{"num_kv_heads": 4}, {"num_kv_heads": 1}, {"head_dim": 6}, {"value_dim": 6}])
def test_a_cache_of_another_shape_raises(change: dict[str, int], build: Build) -> None:
    """004 section 4.18 calls mismatched shapes the most frequent bug: none of them is silent."""
    stream = HandMadeStreams(build())
    stream.model = build(**change)
    with pytest.raises((RuntimeError, AssertionError)):
        stream.compute({0: TOKENS})


def test_the_bytes_of_a_recurrent_layer_do_not_grow_with_the_length() -> None:
    """001 counts the cache among what all LLMs share: a recurrent layer needs a bounded number of states instead."""
    shapes = {"attention": cfg.AttentionConfig(4, 2, 8), "recurrence": cfg.GatedRecurrenceConfig(32, 4)}
    sizes = {}
    for name, mixer in shapes.items():
        stack = cfg.StackConfig(1, {"L": cfg.LayerConfig(mixer, cfg.GatedMLPConfig(48))})
        specs = attention_specs(ModelConfig(32, 64, 4096, stack))
        for length in (1024, 4096):
            (group,) = build_groups(specs, CacheConfig(max_num_seqs=1, max_seq_len=length))
            sizes[name, length] = group_bytes(group).payload
    assert sizes["recurrence", 1024] == sizes["recurrence", 4096] > 0
    assert sizes["attention", 4096] > 3.9 * sizes["attention", 1024]


def test_cache_refuses_gradients(build: Build) -> None:
    """004 section 4.13: gradients need the forward pass; a KVCache raises an error instead of dropping them."""
    model = build()
    stream = HandMadeStreams(model)
    compute = HandMadeStreams.compute.__wrapped__  # without inference_mode
    with pytest.raises(CacheError, match="gradient"):
        compute(stream, {0: TOKENS})


def test_separator_does_not_isolate_documents(build: Build) -> None:
    """004 section 1.3 adds ``<|endofdoc|>`` "to avoid accidental context bleed": only the mask prevents it."""
    model, separator = build(position=cfg.RopeConfig()), 0
    second, documents = [separator, 7, 8, 9], torch.tensor([0] * 4 + [1] * 4)

    @torch.inference_mode()
    def states(first: list[int], documents: Tensor | None) -> Tensor:
        tokens = torch.tensor([separator, *first, *second])
        step = ModelInput(tokens, torch.arange(8), (SubBatch(1, 8, 8),), torch.arange(8), document_ids=documents)
        out: Tensor = model(step, NoCache(model.config))
        return out[4:]

    bleed = (states([1, 2, 3], None) - states([4, 5, 6], None)).abs().max()
    isolated = (states([1, 2, 3], documents) - states([4, 5, 6], documents)).abs().max()
    assert float(bleed) > 1e-2 and float(isolated) == 0
    torch.testing.assert_close(  # relative positions: like the second document alone
        states([1, 2, 3], documents), HandMadeStreams(model).compute({0: torch.tensor(second)})[0], rtol=0, atol=1e-5
    )


def test_payload_of_section_4_17() -> None:
    """004 section 4.17: 24 layers, 32 heads of 64, 8,192 tokens in float32: 3,221,225,472 bytes, not "about 4 GB"."""
    specs = [AttentionSpec(causal=True, window=None, num_kv_heads=32, head_dim=64, value_dim=64)] * 24
    for dtype, payload in (("float32", 3_221_225_472), ("bfloat16", 1_610_612_736), ("float16", 1_610_612_736)):
        config = CacheConfig(max_num_seqs=1, max_seq_len=8192, dtype=dtype)
        (group,) = build_groups(specs, config)
        size = group_bytes(group)
        assert size.per_token_payload * 8192 == payload
        assert size.payload == payload * group.num_blocks * 16 // 8192  # and two reserved blocks of 16 slots


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-2), ("bfloat16", 1e-1)])
def test_half_precision_halves_the_payload(dtype: str, tolerance: float, build: Build, hidden: Hidden) -> None:
    """004 sections 4.11, 4.17, 4.20: stored in 16 bits, computed in a wider type."""
    model = build(position=cfg.RopeConfig()).float()
    full, half = HandMadeStreams(model, dtype="float32"), HandMadeStreams(model, dtype=dtype)
    assert half.kv_cache.payload_bytes() * 2 == full.kv_cache.payload_bytes()
    (got,) = half.compute({0: TOKENS})
    assert got.dtype == torch.float32
    error = float((got - hidden(model, TOKENS)).abs().max())
    assert 0 < error < tolerance
