"""The Triton kernels compared with kvad's own formulas in PyTorch; without a GPU, Triton interprets them.

Where triton is not installed, the tests are skipped.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvad import ops
from kvad.cache.device.tensors import BlockTable, LayerTensor, gather_metadata
from kvad.model_input import AlibiSlopes, AttentionParams, AttentionPattern, Rotary, TokenPositions
from kvad.ops.attention import AttentionMask, dot_product_attention

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]
BLOCK, BLOCKS = 4, 48
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    if not HAS_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when the kernels are imported, and by kvad


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles per sequence, the first of which are visible to all queries."""
    monkeypatch.setattr(ops.triton.attention, "tile_sizes", lambda *_: (16, 2))


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def paged(store: LayerTensor) -> Any:
    return ops.triton.PagedStore(store.format.name, store.data, *store.arrays[1:])


class Problem:
    """Sequences of 37, 1 and 50 tokens, of which the last ``new`` are queries, in blocks in random order."""

    def __init__(self, heads=(4, 2, 16, 16), new=1, dtype=torch.float32, formats=("float32", "float32"), shift=0):
        num_heads, kv_heads, dim, value_dim = heads
        lengths = [length for length in (37, 1, 50) if length >= new]
        width = -(-max(lengths) // BLOCK)
        blocks = torch.randperm(BLOCKS - 2, generator=torch.Generator().manual_seed(1)) + 2
        self.table = torch.zeros(len(lengths), width, dtype=torch.int64)
        self.positions = torch.full((BLOCKS, BLOCK), -1)
        for row, length in enumerate(lengths):
            self.table[row, : -(-length // BLOCK)] = blocks[row * width : row * width + -(-length // BLOCK)]
            for i in range(length):
                self.positions[self.table[row, i // BLOCK], i % BLOCK] = i + shift
        self.table, self.positions = self.table.to(DEVICE), self.positions.to(DEVICE)
        self.queries = torch.tensor([[n + shift - new + i for i in range(new)] for n in lengths], device=DEVICE)
        self.q = randn(len(lengths) * new, num_heads, dim, dtype=dtype, seed=2)
        self.stores = [
            LayerTensor(name, BLOCKS, kv_heads, BLOCK, size, DEVICE)
            for name, size in zip(formats, (dim, value_dim), strict=True)
        ]
        for seed, store in enumerate(self.stores):
            x = randn(BLOCKS, kv_heads, BLOCK, store.dim, dtype=dtype, seed=seed + 3)
            store.write_blocks(torch.arange(BLOCKS, device=DEVICE), x)
        self.params = AttentionParams(scale=dim**-0.5)

    def compute(self, pattern: AttentionPattern) -> Tensor:
        kernels = ops.triton.attention
        slots = kernels.PagedSlots(self.table, self.table.shape[1] * BLOCK, self.positions, self.queries.flatten())
        return kernels.paged_attention(self.q, *map(paged, self.stores), slots, pattern, self.params)

    def reference(self, pattern: AttentionPattern) -> Tensor:
        table = BlockTable(self.table, BLOCK, self.table.shape[1] * BLOCK)
        keys = TokenPositions(gather_metadata(self.positions, table))
        mask = AttentionMask(TokenPositions(self.queries), keys, pattern)
        q = self.q.unflatten(0, self.queries.shape)
        k, v = (store.read(table, q.dtype) for store in self.stores)
        return dot_product_attention(q, k, v, mask, self.params, kernel="reference").out.flatten(0, 1)

    def check(self, pattern: AttentionPattern = AttentionPattern()) -> None:
        out, expected = self.compute(pattern), self.reference(pattern)
        torch.testing.assert_close(
            out, expected, atol=TOLERANCES[out.dtype], rtol=TOLERANCES[out.dtype], equal_nan=True
        )


PATTERNS = {
    "causal": AttentionPattern(),
    "window": AttentionPattern(window=3),
    "sinks": AttentionPattern(window=4, num_sinks=2),
    "stepped": AttentionPattern(window=5, num_sinks=1, window_step=4),
    "layer-window": AttentionPattern(window=8, num_sinks=2, layer_window=3),
    "bidirectional": AttentionPattern(causal=False),
    "bidirectional-window": AttentionPattern(causal=False, window=3),
}


@pytest.mark.parametrize("new", [1, 7])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_visibility(pattern, new, small_tiles):
    Problem(new=new).check(PATTERNS[pattern])


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("heads", [(4, 4, 16, 16), (6, 2, 8, 24), (5, 1, 20, 20)], ids=["mha", "gqa", "mqa"])
def test_heads(heads, new):
    Problem(heads, new).check()


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("splits", [1, 5], ids=["whole", "split"])
@pytest.mark.parametrize("scores", ["plain", "softcap", "sinks", "alibi"])
def test_logits(scores, splits, new, monkeypatch):
    monkeypatch.setattr(ops.triton.attention, "_num_splits", lambda *_: splits)
    monkeypatch.setattr(ops.triton.attention, "tile_sizes", lambda *_: (16, 2))
    problem = Problem(new=new)
    changes = {
        "plain": {},
        "softcap": {"logit_softcap": 0.7},
        "sinks": {"sink_logits": randn(4)},
        "alibi": {"bias": AlibiSlopes(randn(4).abs(), 0.5)},
    }
    problem.params = problem.params._replace(**changes[scores])
    problem.check()


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "keys", "values"),
    [
        (torch.bfloat16, "bfloat16", "bfloat16"),
        (torch.float16, "float16", "float16"),
        (torch.float32, "int8", "int8"),
        (torch.bfloat16, "int8", "fp8-e4m3"),
        (torch.float32, "fp8-e5m2", "bfloat16"),
    ],
)
def test_formats(dtype, keys, values, new):
    Problem(new=new, dtype=dtype, formats=(keys, values)).check()


@pytest.mark.parametrize("new", [1, 7])
def test_values_that_are_not_finite(new, small_tiles):
    problem = Problem(new=new)
    keys, values = problem.stores
    block = problem.table[0, 8]  # positions 32 to 35 of the first sequence
    values.data[block, 0, 0] = torch.nan
    keys.data[problem.table[0, 0], 1, 0] = torch.nan
    problem.check(AttentionPattern(window=3))
    assert problem.compute(AttentionPattern(window=3)).isnan().any() == (new > 1)
    problem.check()


def test_nothing_visible_gives_zeros():
    problem = Problem()
    problem.table[1] = 0
    assert problem.compute(AttentionPattern())[1].abs().max() == 0
    problem.params = problem.params._replace(sink_logits=randn(4))
    assert problem.compute(AttentionPattern())[1].abs().max() == 0


def test_a_wrong_position_is_found():
    problem = Problem()
    expected = problem.reference(AttentionPattern())
    problem.positions[problem.table[0, 0], 0] = -1
    assert not torch.allclose(problem.compute(AttentionPattern()), expected, atol=1e-3)


FP8 = pytest.param(
    ("fp8-e4m3", "fp8-e5m2"), marks=pytest.mark.skipif(not HAS_GPU, reason="the interpreter does not round to fp8")
)
FORMATS = [("float32", "float32"), ("int8", "int8"), FP8]


@pytest.mark.parametrize("rotation", ["none", "half", "interleaved", "partial", "partial-interleaved"])
@pytest.mark.parametrize("formats", FORMATS)
def test_rotation_and_write(rotation, formats):
    dim, value_dim, heads, kv_heads, tokens = 16, 12, 6, 2, 5
    packed = randn(tokens, heads * dim + kv_heads * (dim + value_dim))
    q, k, v = packed.split((heads * dim, kv_heads * dim, kv_heads * value_dim), dim=-1)
    q, k, v = q.unflatten(-1, (heads, dim)), k.unflatten(-1, (kv_heads, dim)), v.unflatten(-1, (kv_heads, value_dim))
    positions = torch.tensor([3, 0, 9, 1, 4], device=DEVICE)
    slots = torch.tensor([9, 14, 33, 60, 8], device=DEVICE)
    size = 8 if rotation.startswith("partial") else dim
    rotary = Rotary(torch.rand(size // 2).to(DEVICE), rotation.endswith("interleaved"), 1.3)
    stores, expected = (
        [LayerTensor(f, BLOCKS, kv_heads, BLOCK, d, DEVICE) for f, d in zip(formats, (dim, value_dim), strict=True)]
        for _ in range(2)
    )
    angles, rotated_q, rotated_k = None, q, k
    if rotation != "none":
        table = ops.rotary.RotaryCache(positions)
        angles, rotated_q, rotated_k = table.angles(rotary), table.rotate(q, rotary), table.rotate(k, rotary)
    out = ops.triton.cache_write.rotate_and_write(q, k, v, *map(paged, stores), slots, angles, rotary.interleaved)
    for store, x in zip(expected, (rotated_k, v), strict=True):
        store.write(slots // BLOCK, slots % BLOCK, x)
    torch.testing.assert_close(out, rotated_q, atol=1e-5, rtol=1e-5)
    everything = BlockTable(torch.arange(BLOCKS, device=DEVICE).view(1, -1), BLOCK, BLOCKS * BLOCK)
    for store, reference in zip(stores, expected, strict=True):
        step = (
            1e-5
            if store.format.kind == "plain"
            else 2 * store.format.eps * float(reference.read(everything, torch.float32).abs().max())
        )
        difference = store.read(everything, torch.float32) - reference.read(everything, torch.float32)
        assert difference.abs().max() <= step
        assert (difference.abs() > 1e-5).float().mean() < 0.01  # a rounding that falls to the other side


def test_int8_vectors_that_are_not_finite_stay_visible():
    x = randn(2, 1, 8)
    x[0, 0, 3] = torch.inf
    stores = [LayerTensor("int8", BLOCKS, 1, BLOCK, 8, DEVICE) for _ in range(2)]
    slots = torch.tensor([9, 10], device=DEVICE)
    ops.triton.cache_write.rotate_and_write(x, x, x, *map(paged, stores), slots, None, False)
    for store in stores:
        read = store.read_slots(slots // BLOCK, slots % BLOCK, torch.float32)
        assert not read[0].isfinite().any() and read[1].isfinite().all()


def test_positions_are_written():
    column = torch.full((BLOCKS, BLOCK), -1, device=DEVICE)
    slots, positions = torch.tensor([9, 33], device=DEVICE), torch.tensor([5, 7], device=DEVICE)
    ops.triton.cache_write.write_positions(column, slots, positions)
    assert column[2, 1] == 5 and column[8, 1] == 7 and (column >= 0).sum() == 2


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype, offset):
    x, weight = randn(3, 24, dtype=dtype), randn(24, dtype=dtype, seed=1)
    norm = ops.gpu.RMSNorm(weight, 1e-3, offset)
    expected = F.rms_norm(x.float(), (24,), weight.float() + offset, 1e-3).to(dtype)
    torch.testing.assert_close(
        ops.triton.fused.rms_norm(x, norm), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype]
    )


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation(activation):
    x = randn(3, 40)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(
        ops.triton.fused.gated_activation(x, activation), ACTIVATIONS[activation](gate) * up, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("kind", ["plain", "gated", "residual"])
def test_one_row_linear(kind, has_norm, has_bias):
    inputs, outputs = 40, 26
    x, weight, bias = randn(1, inputs), randn(outputs, inputs, seed=1), randn(outputs, seed=2) if has_bias else None
    scale = randn(inputs, seed=3)
    norm = ops.gpu.RMSNorm(scale, 1e-3) if has_norm else None
    normed = F.rms_norm(x, (inputs,), scale, 1e-3) if has_norm else x
    expected, options = F.linear(normed, weight, bias), {}
    if kind == "gated":
        gate, up = expected.chunk(2, dim=-1)
        expected, options = F.silu(gate) * up, {"activation": "silu"}
    elif kind == "residual":
        residual = randn(1, outputs, seed=4)
        expected, options = expected + residual, {"residual": residual.clone()}
    out = ops.triton.fused.one_row_linear(x, weight, bias, norm=norm, **options, config=(4, 16, 1))
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert kind != "residual" or out is options["residual"]


def test_kernels_are_described_without_triton(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr(ops.triton.support, "_has_triton", lambda: False)
    assert ops.triton.support.unavailable_reason(device) == "triton is not installed"
    monkeypatch.setenv("KVAD_TRITON", "off")
    assert ops.triton.support.unavailable_reason(device) == "KVAD_TRITON=off"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_best_tokens(dtype):
    logits = randn(5, 70, dtype=dtype)
    logits[0, 67] = 9  # padding of the embedding
    logits[1, 7] = logits[1, 50] = 8  # the first of equal ones
    logits[2, 3], logits[3, 69], logits[4, 68] = torch.nan, torch.inf, -torch.inf
    best = ops.gpu.best_tokens(logits, 66)
    assert best[:, 1].tolist() == [1, 1, 0, 0, 0]
    assert best[0, 0] == logits[0, :66].float().argmax() and best[1, 0] == 7


def test_best_tokens_without_triton(monkeypatch):
    monkeypatch.setenv("KVAD_TRITON", "off")
    test_best_tokens(torch.float32)
