"""Statements of the notes on masks, minus infinity and precision (002, 003, 004 sections 2.2, 4.9, 4.11)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from kvad.model_input import AttentionParams, AttentionPattern, TokenPositions
from kvad.ops.attention import AttentionMask, AttentionOutput, Kernel, dot_product_attention

Attend = Callable[..., AttentionOutput]
NAMES: tuple[Kernel, ...] = get_args(get_args(Kernel)[0])  # the other member of the union is TileSizes
KERNELS = tuple(name for name in NAMES if name != "auto")
assert KERNELS == ("reference", "sdpa")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_mask_of_a_b_c_d() -> None:
    """002, Masked Multi-Head Self-Attention; 004 section 2.2: M_ij hides j > i, and nothing else."""
    positions = TokenPositions(torch.arange(4))
    seen = AttentionPattern().visible(positions, positions)
    assert seen.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert bool(AttentionPattern(causal=False).visible(positions, positions).all())


def test_causal_mask_of_note_003(attention: Attend) -> None:
    """003, Causal Masking: arange(25) as logits; -1e9 gives *nearly* zero there, kvad gives zero."""
    logits = np.arange(25, dtype=float).reshape(5, 5)
    mask = np.triu(np.ones((5, 5)), k=1).astype(bool)
    masked = np.where(mask, -1e9, logits)
    expected = np.exp(masked - masked.max(axis=-1, keepdims=True))
    expected /= expected.sum(axis=-1, keepdims=True)
    keys = torch.from_numpy(logits.T.copy())[:, None]  # with q = the identity, q.k is the table of logits
    done = attention(torch.eye(5, dtype=torch.float64)[:, None], keys, keys, pattern=AttentionPattern(), scale=1.0)
    assert done.scores is not None and done.weights is not None
    np.testing.assert_array_equal(done.scores[0].numpy(), np.where(mask, -np.inf, logits))
    np.testing.assert_allclose(done.weights[0].numpy(), expected, rtol=0, atol=1e-12)
    assert bool((done.weights[0].numpy()[mask] == 0).all())
    for kernel in KERNELS:  # a hidden key has no effect whatever it contains
        secret = keys.clone()
        secret[3:] = math.nan
        out = attention(
            torch.eye(5, dtype=torch.float64)[:, None], secret, secret, pattern=AttentionPattern(), scale=1.0,
            kernel=kernel, return_weights=False,
        ).out  # fmt: skip
        torch.testing.assert_close(out[:3], done.out[:3], rtol=0, atol=1e-12)
        assert bool(out[3:].isnan().any())


@pytest.mark.parametrize("kernel", KERNELS)
def test_minus_1e9_is_minus_infinity_in_float16(kernel: str, attention: Attend) -> None:
    """004 sections 2.2 and 4.11 advise -1e9 instead of -inf in float16, where -1e9 *is* -inf."""
    assert float(torch.tensor(-1e9).half()) == -math.inf
    q = random(3, 1, 8, dtype=torch.float16)
    naive = (q[:, 0] @ q[:, 0].T + torch.full((3, 3), -1e9).half()).softmax(-1)
    assert bool(naive.isnan().all())  # a fully masked row: the case that the advice should avoid
    nothing = torch.full((3,), -1)
    out = attention(q, q, q, keys=nothing, kernel=kernel, return_weights=False).out
    assert out.dtype == torch.float16 and bool((out == 0).all())


@pytest.mark.parametrize("kernel", KERNELS)
def test_sequence_masked_with_minus_1e9_attends_to_other_keys(kernel: str, attention: Attend) -> None:
    """004 section 4.11: in float32 such a row attends evenly to keys of other sequences; kvad gives zeros."""
    q, others, secret = (random(n, 1, 8, seed=n, dtype=torch.float32) for n in (1, 16, 16))
    naive = (q[0, 0] @ others[:, 0].T / math.sqrt(8) + -1e9).softmax(-1)
    torch.testing.assert_close(naive, torch.full((16,), 1 / 16))
    assert float((naive @ secret[:, 0]).abs().max()) > 0.1  # the mean of other sequences' values: a leak
    out = attention(q, others, secret, keys=torch.full((16,), -1), kernel=kernel, return_weights=False).out
    assert bool((out == 0).all())


@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_of_1e4_over_100_000_keys_stay_finite(kernel: str, attention: Attend) -> None:
    """004 section 4.11, softmax stability: the row's maximum is subtracted before the exponential."""
    n = 100_000
    sign = torch.where(torch.arange(n) % 3 == 0, 1.0, -1.0)
    k, v = (1e4 * sign)[:, None, None].float(), random(n, 1, 4, dtype=torch.float32)
    q = torch.tensor([[[1.0]], [[-1.0]]])
    assert bool((q[0, 0] * k[:, 0, 0]).exp().isinf().any())  # without the subtraction it overflows
    out = attention(q, k, v, scale=1.0, kernel=kernel, return_weights=False).out
    expected = torch.stack([v[sign > 0].double().mean(0), v[sign < 0].double().mean(0)])
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_sums_over_32k_bfloat16_values_are_float32(kernel: str, attention: Attend) -> None:
    """004 section 4.11, accumulation precision: a bfloat16 sum of 32,768 shares stalls; kvad's is exact to rounding."""
    n = 32_768
    q, k = torch.zeros(1, 1, 8, dtype=torch.bfloat16), random(n, 1, 8, dtype=torch.bfloat16)
    v = (1 + random(n, 1, 8) / 8).to(torch.bfloat16)
    stalled = torch.zeros(8, dtype=torch.bfloat16)
    for share in (v[:, 0] / n).split(1):
        stalled += share[0]
    exact = v.double().mean(0)[0]
    assert float((stalled.double() - exact).abs().min()) > 0.5
    out = attention(q, k, v, kernel=kernel, return_weights=False).out[0, 0]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_of_bfloat16_queries_are_float32(kernel: str, attention: Attend) -> None:
    """004 sections 4.11 and 4.17: scores of size 30 rounded to bfloat16 would be off by 1/8, their weights by 13%."""
    n = 32_768
    q, k = (8 * random(1, 1, 8)).to(torch.bfloat16), random(n, 1, 8, seed=1, dtype=torch.bfloat16)
    v = random(n, 1, 8, seed=2, dtype=torch.bfloat16)
    scores = k[:, 0].double() @ q[0, 0].double() / math.sqrt(8)
    exact = scores.softmax(0) @ v[:, 0].double()
    assert float((scores.bfloat16().double().softmax(0) @ v[:, 0].double() - exact).abs().max()) > 0.02
    out = attention(q, k, v, kernel=kernel, return_weights=False).out[0, 0]
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=0.004)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_of_100_and_50_with_nan_above(kernel: Kernel) -> None:
    """004 section 4.9, literally: streams of 100 and 50 in room for 100; B's upper 50 slots do not matter."""
    q, k, v = random(2, 1, 4, 8, seed=1), random(2, 2, 100, 8, seed=2), random(2, 2, 100, 8, seed=3)
    k[1, :, 50:], v[1, :, 50:] = math.nan, math.nan
    positions = torch.arange(100).repeat(2, 1)
    positions[1, 50:] = -1
    newest = torch.tensor([[99], [49]])
    out = dot_product_attention(
        q,
        k,
        v,
        AttentionMask(TokenPositions(newest), TokenPositions(positions), AttentionPattern()),
        AttentionParams(8**-0.5),
        kernel=kernel,
    ).out
    assert bool(out.isfinite().all())
    for row, length in ((0, 100), (1, 50)):
        solo = AttentionMask(
            TokenPositions(newest[row : row + 1]), TokenPositions(torch.arange(length)[None]), AttentionPattern()
        )
        visible = slice(row, row + 1)
        expected = dot_product_attention(
            q[visible],
            k[visible, :, :length],
            v[visible, :, :length],
            solo,
            AttentionParams(8**-0.5),
            kernel="reference",
        ).out
        torch.testing.assert_close(out[visible], expected, rtol=0, atol=1e-12)
    leaky = positions.clone()
    leaky[1, 50] = 50 - 1  # one slot too many must fail the test
    reading = AttentionMask(TokenPositions(newest), TokenPositions(leaky), AttentionPattern())
    assert bool(dot_product_attention(q, k, v, reading, AttentionParams(8**-0.5), kernel=kernel).out[1].isnan().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_default_kernel_is_the_fused_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """004 sections 3.3 and 4.14: FlashAttention is torch's fused kernel, called once for a whole cache."""
    fused, calls = torch.nn.functional.scaled_dot_product_attention, list[tuple[int, ...]]()

    def counting(q: Tensor, k: Tensor, *rest: object, **options: object) -> Tensor:
        calls.append(tuple(k.shape))
        out: Tensor = fused(q, k, *rest, **options)
        return out

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
    q, k = random(1, 1, 2, 8).to(dtype), random(1, 2, 300, 8).to(dtype)
    mask = AttentionMask(
        TokenPositions(torch.tensor([[299]])), TokenPositions(torch.arange(300).unsqueeze(0)), AttentionPattern()
    )
    dot_product_attention(q, k, k, mask, AttentionParams(scale=8**-0.5))
    assert calls == [(1, 2, 300, 8)]
