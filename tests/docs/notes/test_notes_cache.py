"""What notes 000, 001 and 004 say about the cache itself, on kvad's Memory with tables placed by hand."""

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


class Streams:
    """Rows of one Memory with a cursor each; row r owns its blocks for life, so that there is nothing to decide."""

    def __init__(
        self,
        model: Transformer,
        rows: int = 1,
        capacity: int = 16,
        layout: Any = "contiguous",
        dtype: str = "float64",
        **memory: Any,
    ) -> None:
        config = CacheConfig(layout=layout, max_num_seqs=rows, max_seq_len=capacity, block_size=4, dtype=dtype)
        self.groups = build_groups(attention_specs(model.config), config)
        self.memory = KVCache(self.groups, **memory)
        self.model, self.cursor = model, [0] * rows

    def blocks(self, group: CacheGroup, row: int) -> list[int]:
        each = group.num_usable_blocks // len(self.cursor)
        first = RESERVED_BLOCKS + row * each
        return [first + each - 1 - i for i in range(each)]  # backwards: a table need not ascend

    def slots(self, group: CacheGroup, row: int, positions: Sequence[int]) -> list[int]:
        blocks, size = self.blocks(group, row), group.block_size
        return [blocks[p // size] * size + p % size for p in positions]

    @torch.inference_mode()
    def feed(self, new: dict[int, Tensor], shift: int = 0) -> list[Tensor]:
        """New tokens of some rows in one step, a lane per row -> the hidden states [L, E] of each."""
        spans = {row: range(self.cursor[row], self.cursor[row] + len(tokens)) for row, tokens in new.items()}
        lanes = tuple(SubBatch(1, len(span), span.stop) for span in spans.values())
        places = []
        for group in self.groups:
            slots = [slot for row, span in spans.items() for slot in self.slots(group, row, span)]
            tables = tuple(torch.tensor([self.blocks(group, row)]) for row in spans)
            places.append(SlotMapping(torch.tensor(slots), tables))
        positions = torch.tensor([p + shift for span in spans.values() for p in span])
        tokens = torch.cat(list(new.values()))
        step = ModelInput(tokens, positions, lanes, torch.arange(len(tokens)), slot_mappings=tuple(places))
        out: Tensor = self.model(step, self.memory)
        for row, span in spans.items():
            self.cursor[row] = span.stop
        return list(out.split([len(tokens) for tokens in new.values()]))


def last(seen: list[AttentionTrace], layer: int) -> AttentionTrace:
    return [one for one in seen if one.layer == layer][-1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_of_note_001_steps_1_to_5(layout: str, build: Build, hidden: Hidden) -> None:
    """001, Key-Value Cache: q, k, v of the new token; K_full = [K_prev; K_new]; attend; store: the same as without."""
    model, seen = build(position=cfg.RopeConfig()), list[AttentionTrace]()
    stream = Streams(model, layout=layout, attention_hook=seen.append)
    uncached, (got,) = hidden(model, TOKENS), stream.feed({0: TOKENS[:3]})
    torch.testing.assert_close(got, uncached[:3], rtol=0, atol=1e-12)
    for t in range(3, len(TOKENS)):
        before = last(seen, 1)
        (got,) = stream.feed({0: TOKENS[t : t + 1]})
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
    """000 section 1.3, 004 sections 4.2 and 4.13: under a causal mask k, v of the past do not change, bit for bit."""
    model = build(position=cfg.RopeConfig())
    stream = Streams(model)
    stream.feed({0: TOKENS[:5]})
    kept = [store.data.clone() for store in (*stream.memory.keys, *stream.memory.values)]
    stream.feed({0: TOKENS[5:]})
    for before, store in zip(kept, (*stream.memory.keys, *stream.memory.values), strict=True):
        after = store.data
        assert torch.equal(before[RESERVED_BLOCKS, :, :5], after[RESERVED_BLOCKS, :, :5])
        assert bool((before[RESERVED_BLOCKS, :, 5:8] == 0).all()) and bool((after[RESERVED_BLOCKS, :, 5:8] != 0).all())
    assert past(model, TOKENS) == past(model, torch.cat([TOKENS[:5], torch.tensor([1, 2, 4])]))


@torch.inference_mode()
def past(model: Transformer, tokens: Tensor) -> list[list[float]]:
    """k and v of the first five tokens in every layer, computed anew."""
    seen, n = list[AttentionTrace](), len(tokens)
    step = ModelInput(tokens, torch.arange(n), (SubBatch(1, n, n),), torch.arange(n))
    model(step, NoCache(model.config, attention_hook=seen.append))
    return [part[0, :, :5].flatten().tolist() for one in seen for part in (one.k, one.v)]


def test_appended_tokens_change_the_past_of_a_bidirectional_stack(build: Build) -> None:
    """004 section 4.13: so an encoder has nothing to append to, and kvad refuses to cache it."""
    model = build(position=cfg.RopeConfig(), causal=False)
    one, other = past(model, TOKENS), past(model, torch.cat([TOKENS[:5], torch.tensor([1, 2, 4])]))
    assert one[:2] == other[:2]  # the first layer's come from the embeddings alone
    assert all(np.abs(np.subtract(a, b)).max() > 1e-3 for a, b in zip(one[2:], other[2:], strict=True))
    with pytest.raises(ConfigError, match="bidirectional"):
        build_groups(attention_specs(model.config), CacheConfig(max_seq_len=8))


def test_the_sum_reaches_the_new_token(build: Build) -> None:
    """004 section 4.6 sums over 1..T for the query T+1: its own key and value are left out, and T = 0 has no sum."""
    seen = list[AttentionTrace]()
    stream = Streams(build(layers=1), attention_hook=seen.append)
    stream.feed({0: TOKENS[:1]})
    torch.testing.assert_close(seen[0].out[0, 0], seen[0].v[0, :, 0].repeat_interleave(2, dim=0), rtol=0, atol=1e-12)
    stream.feed({0: TOKENS[1:6]})
    stream.feed({0: TOKENS[6:7]})
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
    """004 sections 4.5, 4.8, 4.18: a cursor per stream (a scalar would not do); nobody sees a neighbour."""
    model = build(position=cfg.RopeConfig())
    texts = [TOKENS, TOKENS.flip(0)[:4], TOKENS[2:7]]
    streams = Streams(model, rows=3, layout=layout)
    got: list[list[Tensor]] = [[], [], []]
    for lengths in ([3, 1, 0], [1, 2, 4], [4, 1, 1]):  # ragged prompts, then chunks and single tokens side by side
        new = {r: texts[r][streams.cursor[r] :][:n] for r, n in enumerate(lengths) if n}
        for row, part in zip(new, streams.feed(new), strict=True):
            got[row].append(part)
    assert streams.cursor == [8, 4, 5]
    for text, parts in zip(texts, got, strict=True):
        torch.testing.assert_close(torch.cat(parts), hidden(model, text), rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_streams_of_100_and_50_with_nan_in_the_upper_50(layout: str, build: Build, hidden: Hidden) -> None:
    """004 section 4.9, in a cache: room for 100 each, B has 50; what its upper 50 slots hold reaches nobody."""
    model, text = build(position=cfg.RopeConfig()), torch.arange(101) % 32
    streams = Streams(model, rows=2, capacity=101, layout=layout)
    streams.feed({0: text[:100], 1: text[:50]})
    for number, group in enumerate(streams.groups):
        for slot in streams.slots(group, 1, range(50, 101)):
            for store in (*streams.memory.keys, *streams.memory.values):
                store.data[slot // group.block_size, :, slot % group.block_size] = math.nan
            assert int(streams.memory.positions[number].flatten()[slot]) == -1
    a, b = streams.feed({0: text[100:101], 1: text[50:51]})
    torch.testing.assert_close(a, hidden(model, text)[100:], rtol=0, atol=1e-12)
    torch.testing.assert_close(b, hidden(model, text[:51])[50:], rtol=0, atol=1e-12)


def test_a_block_that_changes_hands_is_cleared(build: Build, hidden: Hidden) -> None:
    """004 section 4.18, "attends to tokens from other streams": the seat's next owner does, unless it is cleared."""
    model, fresh = build(position=cfg.RopeConfig()), TOKENS[4:]
    after = {}
    for cleared in (True, False):
        stream = Streams(model, layout="paged")
        stream.feed({0: torch.flip(TOKENS, [0])})
        stream.cursor[0] = 0
        if cleared:
            blocks = tuple(stream.blocks(stream.groups[0], 0))
            stream.memory.apply(BlockOps(clear=(blocks,), copy=((),)))
        stream.feed({0: fresh[:2]}, shift=6)  # later positions: what lies there is of the past, and visible
        (after[cleared],) = stream.feed({0: fresh[2:]}, shift=6)
    torch.testing.assert_close(after[True], hidden(model, fresh)[2:], rtol=0, atol=1e-6)
    assert float((after[True] - after[False]).abs().max()) > 1e-2


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_works_with_the_cache(encoding: str, build: Build, hidden: Hidden) -> None:
    """004 section 4.10: learned, sinusoidal, rotary, ALiBi and T5, token by token."""
    model = build(**ENCODINGS[encoding])
    stream = Streams(model, layout="paged")
    got = torch.cat([stream.feed({0: token[None]})[0] for token in TOKENS])
    torch.testing.assert_close(got, hidden(model, TOKENS), rtol=0, atol=1e-12)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_relative_encodings_see_offsets_only(encoding: str, build: Build, hidden: Hidden) -> None:
    """004 section 4.10: a wrong offset in k, v is fatal to absolute encodings; relative ones see i - j only."""
    model = build(**ENCODINGS[encoding])
    stream = Streams(model)
    stream.feed({0: TOKENS[:5]}, shift=40)
    (got,) = stream.feed({0: TOKENS[5:]}, shift=40)
    off = float((got - hidden(model, TOKENS)[5:]).abs().max())
    assert off < 1e-4 if encoding in RELATIVE else off > 1e-2
    (got,) = Streams(model).feed({0: TOKENS[:5]}, shift=3)
    assert (float((got - hidden(model, TOKENS)[:5]).abs().max()) < 1e-4) == (encoding in RELATIVE)


@torch.inference_mode()
def test_keys_are_stored_rotated(build: Build, step_of: Callable[..., ModelInput]) -> None:
    """004 sections 4.10 and 4.20: slot j holds R_j k_j, so reading costs no rotation; ALiBi's keys lie as they are."""
    for position in (cfg.RopeConfig(), cfg.AlibiConfig()):
        model, step = build(position=position), step_of(TOKENS)
        stream = Streams(model)
        stream.feed({0: TOKENS})
        layer, rotary = model.decoder.layers[0], model.decoder.position_encoding("L", step)
        _, k, v = layer.attention.project(layer.norm1(model.embedding(TOKENS, step.positions)))
        stored = [
            stores[0].data[RESERVED_BLOCKS, :, :8].transpose(0, 1)
            for stores in (stream.memory.keys, stream.memory.values)
        ]
        expected = RotaryCache(step.positions).rotate(k, rotary) if isinstance(position, cfg.RopeConfig) else k
        torch.testing.assert_close(stored[0], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(stored[1], v, rtol=0, atol=1e-12)
        assert (float((stored[0] - k).abs().max()) > 0.1) == isinstance(position, cfg.RopeConfig)


def test_each_layer_needs_its_own_keys_and_values(build: Build, hidden: Hidden) -> None:
    """004 section 4.12: K of a layer comes from that layer's input; with another layer's the output is wrong."""
    model = build(position=cfg.RopeConfig())
    stream = Streams(model)
    stream.feed({0: TOKENS[:7]})
    keys = [store.data for store in stream.memory.keys]
    assert float((keys[0][RESERVED_BLOCKS, :, :7] - keys[1][RESERVED_BLOCKS, :, :7]).abs().max()) > 0.1
    keys[0][:], keys[1][:] = keys[1].clone(), keys[0].clone()
    (got,) = stream.feed({0: TOKENS[7:]})
    assert float((got - hidden(model, TOKENS)[7:]).abs().max()) > 1e-2


def test_a_cache_takes_no_part_in_training(build: Build) -> None:
    """004 section 4.13: gradients need the forward pass; a Memory refuses to stand in its way in silence."""
    model = build()
    stream = Streams(model)
    feed = Streams.feed.__wrapped__  # without inference_mode
    with pytest.raises(CacheError, match="gradient"):
        feed(stream, {0: TOKENS})


def test_a_separator_does_not_isolate_documents(build: Build) -> None:
    """004 section 1.3 adds ``<|endofdoc|>`` "to avoid accidental context bleed": only the mask does."""
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
    torch.testing.assert_close(  # relative positions: as if the second document stood alone
        states([1, 2, 3], documents), Streams(model).feed({0: torch.tensor(second)})[0], rtol=0, atol=1e-5
    )


def test_the_payload_of_section_4_17() -> None:
    """004 section 4.17: 24 layers, 32 heads of 64, 8,192 tokens in float32: 3,221,225,472 bytes, not "about 4 GB"."""
    specs = [AttentionSpec(causal=True, window=None, num_kv_heads=32, head_dim=64, value_dim=64)] * 24
    for dtype, payload in (("float32", 3_221_225_472), ("bfloat16", 1_610_612_736), ("float16", 1_610_612_736)):
        config = CacheConfig(max_num_seqs=1, max_seq_len=8192, dtype=dtype)
        (group,) = build_groups(specs, config)
        found = group_bytes(group)
        assert found.per_token_payload * 8192 == payload
        assert found.payload == payload * group.num_blocks * 16 // 8192  # and two reserved blocks of 16 slots


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-2), ("bfloat16", 1e-1)])
def test_half_precision_halves_the_payload(dtype: str, tolerance: float, build: Build, hidden: Hidden) -> None:
    """004 sections 4.11, 4.17, 4.20: stored in 16 bits, computed wider."""
    model = build(position=cfg.RopeConfig()).float()
    full, half = Streams(model, dtype="float32"), Streams(model, dtype=dtype)
    assert half.memory.payload_bytes() * 2 == full.memory.payload_bytes()
    (got,) = half.feed({0: TOKENS})
    assert got.dtype == torch.float32
    error = float((got - hidden(model, TOKENS)).abs().max())
    assert 0 < error < tolerance
