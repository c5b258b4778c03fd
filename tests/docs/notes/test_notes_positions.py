"""Note 002's position encodings: its formulas in NumPy are the reference, kvad's functions are tested."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvad.config import layers as cfg
from kvad.config.layers import LearnedPositionsConfig, SinusoidalPositionsConfig
from kvad.model.positions import alibi_slopes, rope_frequencies, sinusoidal_embedding
from kvad.model.transformer import Transformer
from kvad.model_input import AlibiSlopes, RelativeBuckets, Rotary
from kvad.ops.attention import AttentionOutput
from kvad.ops.position_bias import t5_bucket
from kvad.ops.rotary import RotaryCache

Build = Callable[..., Transformer]
Attend = Callable[..., AttentionOutput]
Hidden = Callable[..., Tensor]
WIDTHS = [4, 8, 512]


def table(positions: Tensor, width: int) -> np.ndarray:
    return sinusoidal_embedding(positions, width, SinusoidalPositionsConfig(), torch.float64).numpy()


@pytest.mark.parametrize("width", WIDTHS)
@torch.inference_mode()
def test_sinusoidal_values_of_i_am_a_kid(width: int, build: Build) -> None:
    """002, Positional Encoding: I is pos 0, am is pos 1, ...; PE(pos, 2i) is a sine, PE(pos, 2i+1) a cosine."""
    expected = np.zeros((4, width))
    for pos in range(4):
        for i in range(width // 2):
            expected[pos, 2 * i] = np.sin(pos / 10000 ** (2 * i / width))
            expected[pos, 2 * i + 1] = np.cos(pos / 10000 ** (2 * i / width))
    values = table(torch.arange(4), width)
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(values[0], [0, 1] * (width // 2))
    np.testing.assert_allclose(values[1, :2], [0.84147098, 0.54030231], atol=1e-8)
    model, ids = build(width=width, absolute=SinusoidalPositionsConfig()), torch.tensor([7, 5, 1, 9])
    final = model.embedding(ids, torch.arange(4)).numpy()  # Final_embedding = Token_embedding + Positional_encoding
    np.testing.assert_allclose(final, model.embedding.tokens.weight.numpy()[ids.numpy()] + expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_shift_of_positions_is_a_rotation(width: int) -> None:
    """002: PE(pos + delta) = [[cos, sin], [-sin, cos]] PE(pos) with columns (sin, cos); as rows it is the inverse."""
    positions, delta = torch.arange(0, 200, 7), 13
    theta = 10000.0 ** (-2 * np.arange(width // 2) / width)
    c, s = np.cos(delta * theta), np.sin(delta * theta)
    matrix = np.array([[c, s], [-s, c]])  # [2, 2, pairs]
    before = table(positions, width).reshape(len(positions), -1, 2)
    after = table(positions + delta, width).reshape(len(positions), -1, 2)
    np.testing.assert_allclose(np.einsum("abi,pib->pia", matrix, before), after, rtol=0, atol=1e-12)
    backwards = table(positions + 200 - delta, width).reshape(len(positions), -1, 2)
    further = table(positions + 200, width).reshape(len(positions), -1, 2)
    np.testing.assert_allclose(np.einsum("pia,abi->pib", further, matrix), backwards, rtol=0, atol=1e-11)


@pytest.mark.parametrize("width", [*WIDTHS, 4096])
def test_wavelengths_stay_below_20000_pi(width: int) -> None:
    """002 calls 20000 pi = 62831.85 the wavelength: no pair has it; 512 dimensions have 60,611.48."""
    slowest = table(torch.tensor([1]), width)[0, -2:]
    wavelength = 2 * math.pi / math.atan2(slowest[0], slowest[1])
    assert wavelength == pytest.approx(2 * math.pi * 10000 ** ((width - 2) / width), rel=1e-9)
    assert wavelength < 20000 * math.pi
    if width == 512:
        assert wavelength == pytest.approx(60611.477, abs=1e-3)
        thousand = table(torch.tensor([1000]), width)[0, -2:]
        assert math.atan2(*thousand) == pytest.approx(0.1037, abs=5e-5)  # the note: 1000 / 10000 = 0.1


@torch.inference_mode()
def test_the_dot_product_expands_into_content_and_position_terms(build: Build) -> None:
    """002: q_i.k_j with q = W_q (x + p), k = W_k (x + p) is the sum of four terms."""
    model = build(layers=1, num_heads=1, num_kv_heads=1, head_dim=8, width=24, absolute=SinusoidalPositionsConfig())
    mixer, ids, positions = model.decoder.layers[0].attention, torch.tensor([4, 9, 4, 1, 7]), torch.arange(5)
    q, k, _ = mixer.project(model.embedding(ids, positions))
    x, p = model.embedding.tokens.weight.numpy()[ids.numpy()], table(positions, 24)
    m = mixer.q.weight.numpy().T @ mixer.k.weight.numpy()  # W_q^T W_k, columns
    terms = [x @ m @ x.T, x @ m @ p.T, p @ m @ x.T, p @ m @ p.T]
    np.testing.assert_allclose((q[:, 0] @ k[:, 0].T).numpy(), sum(terms), rtol=0, atol=1e-12)
    assert min(np.abs(term).max() for term in terms) > 1e-2


def test_alibi_slopes() -> None:
    """002, ALiBi: m_h = 2^(-8h/n), down to 2^-8; n = 12 as in the paper's code."""
    for n in (1, 2, 4, 8, 16, 64):
        np.testing.assert_allclose(alibi_slopes(n), [2 ** (-8 * h / n) for h in range(1, n + 1)])
        assert alibi_slopes(n)[-1] == 2**-8
    np.testing.assert_allclose(alibi_slopes(12), [2**-e for e in (1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5)])


def test_alibi_subtracts_a_slope_per_step_of_distance(attention: Attend) -> None:
    """002: softmax(q_i K^T + m [-(i-1), ..., -2, -1, 0]), with q_i K^T scaled first."""
    random, heads, n = torch.Generator().manual_seed(0), 4, 6
    q, k = (torch.randn(n, heads, 8, generator=random, dtype=torch.float64) for _ in range(2))
    slopes = torch.tensor(alibi_slopes(heads), dtype=torch.float64)
    scores = attention(q, k, k, bias=AlibiSlopes(slopes)).scores
    assert scores is not None
    for i in range(1, n + 1):  # the last query of the note is the i-th
        row = np.array([-(i - j) for j in range(1, i + 1)])
        plain = np.einsum("hd,jhd->hj", q[i - 1].numpy(), k[:i].numpy()) / math.sqrt(8)
        np.testing.assert_allclose(scores[:, i - 1, :i].numpy(), plain + slopes.numpy()[:, None] * row, atol=1e-12)


def test_t5_buckets_against_the_published_vector() -> None:
    """002, T5: the bias depends on i - j, by bucket; the reference vector is mlx-examples#113's (32 buckets, 128)."""
    keys = torch.arange(10)
    assert t5_bucket(keys - 0, 32, 128, True).tolist() == [0, 17, 18, 19, 20, 21, 22, 23, 24, 24]
    assert t5_bucket(keys - 9, 32, 128, True).tolist() == [8, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    distance_behind = t5_bucket(-torch.arange(400), 32, 128, False)
    assert distance_behind[:16].tolist() == list(range(16))  # exact up to half of the buckets
    assert bool((distance_behind[1:] >= distance_behind[:-1]).all()) and set(distance_behind[128:].tolist()) == {31}
    logarithmic = [16 + int(16 * math.log(d / 16) / math.log(128 / 16)) for d in range(16, 128)]
    assert distance_behind[16:128].tolist() == logarithmic
    assert set(t5_bucket(torch.arange(9), 32, 128, False).tolist()) == {0}  # a decoder does not distinguish later keys


def test_t5_adds_a_learned_number_per_bucket(attention: Attend, build: Build) -> None:
    """002: q_i.k_j keeps its content term, plus beta_{i-j}; T5 omits the 1/sqrt(d_k)."""
    random, n = torch.Generator().manual_seed(0), 40
    q, k = (torch.randn(n, 4, 8, generator=random, dtype=torch.float64) for _ in range(2))
    beta = torch.randn(32, 4, generator=random, dtype=torch.float64)
    mixer = build(position=cfg.T5BiasConfig(), softmax_scale="none").decoder.layers[0].attention
    scores = attention(q, k, k, bias=RelativeBuckets(beta, 128, True), scale=mixer.attention_params(None).scale).scores
    assert scores is not None
    added = scores - torch.einsum("ihd,jhd->hij", q, k)
    for i in range(n):
        for j in range(max(0, i - 7), min(n, i + 8)):  # near keys have a bucket each: 0..7 behind, 17..23 ahead
            torch.testing.assert_close(added[:, i, j], beta[i - j if j <= i else 16 + j - i])


def test_rope_rotates_each_pair_by_its_angle() -> None:
    """002, RoPE: [[cos m theta, -sin], [sin, cos]] on columns, theta_i = 10000^(-2i/d): counter-clockwise."""
    dim, m = 8, 3
    theta = 10000.0 ** (-2 * np.arange(dim // 2) / dim)
    np.testing.assert_allclose(rope_frequencies(cfg.RopeConfig(), dim, 64).numpy(), theta, rtol=1e-6)
    x = np.random.RandomState(0).randn(dim)
    c, s = np.cos(m * theta), np.sin(m * theta)
    for interleaved, (a, b) in {
        True: (slice(0, None, 2), slice(1, None, 2)),
        False: (slice(0, 4), slice(4, 8)),
    }.items():
        expected = np.empty(dim)
        expected[a], expected[b] = c * x[a] - s * x[b], s * x[a] + c * x[b]
        rotary = Rotary(torch.from_numpy(theta), interleaved, 1.0)
        turned = RotaryCache(torch.tensor([m])).rotate(torch.from_numpy(x)[None, None], rotary)
        np.testing.assert_allclose(turned[0, 0].numpy(), expected, rtol=0, atol=1e-12)
    one = RotaryCache(torch.tensor([1])).rotate(torch.tensor([[[1.0, 0.0]]]), Rotary(torch.ones(1), True, 1.0))
    torch.testing.assert_close(one[0, 0], torch.tensor([math.cos(1), math.sin(1)]))  # (1, 0) -> (cos, +sin)
    matrix = np.array([[math.cos(1), -math.sin(1)], [math.sin(1), math.cos(1)]])
    np.testing.assert_allclose(matrix @ [1, 0], one[0, 0].numpy(), rtol=1e-6)
    np.testing.assert_allclose([1, 0] @ matrix, one[0, 0].numpy() * [1, -1], rtol=1e-6)  # as rows: backwards


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_depends_on_the_distance_only(interleaved: bool) -> None:
    """002, RoPE: (R_n q)^T R_m k = q^T R_{m-n} k, R_{-m} = R_m^T; the row form is missing the transpose."""
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 8, generator=random, dtype=torch.float64) for _ in range(2))
    rotary = Rotary(10000.0 ** (-2 * torch.arange(4, dtype=torch.float64) / 8), interleaved, 1.0)

    def r(position: int, x: Tensor) -> Tensor:
        return RotaryCache(torch.tensor([position])).rotate(x, rotary).flatten()

    for n, m in [(0, 5), (9, 2), (1003, 1008), (4, 4)]:
        torch.testing.assert_close(r(n, q) @ r(m, k), q.flatten() @ r(m - n, k), rtol=0, atol=1e-10)
        torch.testing.assert_close(r(n, q) @ r(m, k), r(n - m, q) @ k.flatten(), rtol=0, atol=1e-10)
    torch.testing.assert_close(r(5, q) @ r(2, k), r(1005, q) @ r(1002, k), rtol=0, atol=1e-10)
    assert abs(r(5, q) @ r(2, k) - r(5, q) @ r(-2, k)) > 1e-2  # "q_m R_m R_n k_n^T", without the transpose


ENCODINGS: dict[str, dict[str, Any]] = {
    "learned": {"absolute": LearnedPositionsConfig(256)},
    "sinusoidal": {"absolute": SinusoidalPositionsConfig()},
    "rope": {"position": cfg.RopeConfig()},
    "alibi": {"position": cfg.AlibiConfig()},
    "t5": {"position": cfg.T5BiasConfig(bidirectional=True)},
}


def shuffled_difference(model: Transformer, hidden: Hidden) -> float:
    """Return the difference between shuffling *apple banana orange kiwi plum* and shuffling the outputs."""
    tokens, order = torch.tensor([3, 14, 15, 9, 26]), torch.tensor([4, 2, 0, 1, 3])
    return float((hidden(model, tokens[order]) - hidden(model, tokens)[order]).abs().max())


def test_without_positions_a_bidirectional_stack_is_permutation_equivariant(build: Build, hidden: Hidden) -> None:
    """002, Positional Encoding: "apple banana orange" in any order; a causal mask alone distinguishes orders."""
    assert shuffled_difference(build(causal=False), hidden) < 1e-12
    assert shuffled_difference(build(causal=True), hidden) > 1e-2


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_breaks_permutation_equivariance(encoding: str, build: Build, hidden: Hidden) -> None:
    """002, Positional Encoding: a position vector, rotation or bias encodes each word's position."""
    assert shuffled_difference(build(causal=False, **ENCODINGS[encoding]), hidden) > 1e-3
