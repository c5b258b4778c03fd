"""The gated delta rule: chunks equal single tokens, and a cache of snapshots equals one pass, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvad.cache.config import CacheConfig
from kvad.cache.device import KVCache
from kvad.cache.groups import build_groups
from kvad.config import GatedDeltaConfig, GatedMLPConfig, LayerConfig, StackConfig, attention_specs
from kvad.config.model import ModelConfig
from kvad.errors import ConfigError
from kvad.model_input import RESERVED_BLOCKS, DeltaInputs, ModelInput, SlotMapping, SubBatch
from kvad.ops.recurrence import causal_convolution, gated_delta_rule

KEYS, HEADS, DIM, VALUE, SIZE, LENGTH = 2, 6, 5, 3, 4, 23
MIXER = GatedDeltaConfig(KEYS, HEADS, DIM, VALUE, kernel_size=3)


def inputs(rows: int, length: int = LENGTH, dtype: torch.dtype = torch.float64) -> DeltaInputs:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(rows, length, *shape, generator=generator, dtype=dtype)

    q, k = (F.normalize(random(KEYS, DIM), dim=-1) for _ in range(2))
    return DeltaInputs(q, k, random(HEADS, VALUE), -random(HEADS).square(), random(HEADS).sigmoid())


def token_by_token(given: DeltaInputs, state: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the rule as it is defined; ``first`` [R, L] are tokens that begin with an empty state."""
    outs = []
    for t in range(given.v.shape[1]):
        q, k = (each[:, t].repeat_interleave(HEADS // KEYS, dim=1) for each in (given.q, given.k))
        state = state * given.log_decay[:, t].exp()[..., None, None] * ~first[:, t, None, None, None]
        error = given.v[:, t] - torch.einsum("rhdv,rhd->rhv", state, k)
        state = state + torch.einsum("rhd,rhv,rh->rhdv", k, error, given.beta[:, t])
        outs.append(torch.einsum("rhdv,rhd->rhv", state, q))
    return torch.stack(outs, dim=1), state


@pytest.mark.parametrize("has_documents", [False, True])
def test_a_chunk_equals_its_tokens(has_documents: bool) -> None:
    given, state = inputs(2), torch.randn(2, HEADS, DIM, VALUE, dtype=torch.float64)
    first = torch.zeros(2, LENGTH, dtype=torch.bool)
    if has_documents:
        first[0, [4, 5, 19]] = first[1, 22] = True
    out, end = gated_delta_rule(state, given, first.cumsum(dim=1) if has_documents else None)
    right, right_end = token_by_token(given, state, first)
    assert (out - right).abs().max() <= 1e-12 and (end - right_end).abs().max() <= 1e-12


class Sequences:
    """Views of one layer's cache, for rows of equally many new tokens at any positions."""

    def __init__(self, given: DeltaInputs, x: Tensor, kernel: Tensor) -> None:
        layer = LayerConfig(MIXER, GatedMLPConfig(8))
        config = ModelConfig(8, 11, 64, StackConfig(1, {"L": layer}))
        cache = CacheConfig(block_size=SIZE, max_seq_len=64, max_num_seqs=2, dtype=str(x.dtype).removeprefix("torch."))
        (group,) = build_groups(attention_specs(config), cache, computed=cache.dtype)
        self.kv_cache, self.given, self.x, self.kernel = KVCache([group]), given, x, kernel

    def step(self, starts: dict[int, int], new: int) -> Tensor:
        """Compute ``new`` tokens from position ``starts[row]`` on of each row -> [R, new, H, Dv]."""
        positions = torch.stack([torch.arange(start, start + new) for start in starts.values()])
        blocks = RESERVED_BLOCKS + torch.arange(-(-LENGTH // SIZE))
        table = torch.stack([blocks + len(blocks) * row for row in starts])
        slots = table.gather(1, positions // SIZE) * SIZE + positions % SIZE
        flat = positions.flatten()
        step = (SubBatch(len(starts), new, table.shape[1] * SIZE),)
        model_input = ModelInput(flat, flat, step, flat, slot_mappings=(SlotMapping(slots.flatten(), (table,)),))
        (view,) = self.kv_cache.open(model_input)
        rows = torch.tensor(list(starts)).repeat_interleave(new), flat
        convolved = view.convolve(self.x[rows], self.kernel)
        history = F.pad(self.x[list(starts)], (0, 0, self.kernel.shape[1] - 1, 0))
        expected = causal_convolution(history, self.kernel)[torch.arange(len(starts)).repeat_interleave(new), flat]
        assert torch.equal(convolved, expected)
        return view.delta(DeltaInputs(*(each[rows] for each in self.given))).unflatten(0, (len(starts), new))


def sequences(dtype: torch.dtype) -> Sequences:
    size = MIXER.state_sizes(8).inputs
    return Sequences(
        inputs(2, dtype=dtype), torch.randn(2, LENGTH, size, dtype=dtype), torch.randn(size, 3, dtype=dtype)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_steps_give_the_same_bits(dtype: torch.dtype) -> None:
    whole = sequences(dtype).step({0: 0}, LENGTH)
    first = torch.zeros(1, LENGTH, dtype=torch.bool)
    state = torch.zeros(1, HEADS, DIM, VALUE, dtype=dtype)
    right, _ = token_by_token(DeltaInputs(*(each[:1] for each in inputs(2, dtype=dtype))), state, first)
    assert (whole - right).abs().max() <= {torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
    for ends in ([1, 2, 3, 4, 5, 6, 23], [7, 8, 16, 23], [3, 4, 12, 13, 23]):
        some, parts = sequences(dtype), []
        for start, end in zip([0, *ends], ends, strict=False):
            parts.append(some.step({0: start}, end - start))
        assert torch.equal(torch.cat(parts, dim=1), whole), ends


def test_a_truncated_sequence_continues_within_a_block() -> None:
    some = sequences(torch.float32)
    whole = some.step({0: 0}, LENGTH)
    for start in (21, 10, 5, 4):  # each continues from fewer tokens, where later slots are still filled
        assert torch.equal(some.step({0: start}, 2), whole[:, start : start + 2]), start


def test_rows_at_other_positions_do_not_matter() -> None:
    alone = [sequences(torch.float32).step({row: 0}, LENGTH) for row in range(2)]
    both = sequences(torch.float32)
    both.step({0: 0}, 6)
    both.step({1: 0}, 15)
    together = both.step({0: 6, 1: 15}, 5)
    assert torch.equal(together[0], alone[0][0, 6:11]) and torch.equal(together[1], alone[1][0, 15:20])


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        (GatedDeltaConfig(4, 6, 3, 2), "num_key_heads: must divide num_value_heads 6, got 4"),
        (GatedDeltaConfig(2, 4, 3, 2, kernel_size=1), "kernel_size: must be at least 2, got 1"),
    ],
)
def test_contradictory_sizes_are_refused(mixer: GatedDeltaConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(8, 11, 64, StackConfig(1, {"L": LayerConfig(mixer, GatedMLPConfig(8))}))
