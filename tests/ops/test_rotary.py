"""Rotary embedding: its formula, the law R(n)^T R(m) = R(m - n), and three models of transformers."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as neox_rotary
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotary
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotary

from kvad.model_input import Rotary
from kvad.ops.rotary import RotaryCache, rotate

POSITIONS = torch.tensor([0, 1, 2, 17, 400, 3])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def table(pairs: int, base: float = 100.0) -> Tensor:
    return base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)


def rotate_one(x: Tensor, at: int, rotary: Rotary) -> Tensor:
    """Rotate one vector [D] at one position."""
    return RotaryCache(torch.tensor([at])).rotate(x[None, None], rotary)[0, 0]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [8, 11])
def test_pairs_rotate_and_the_rest_is_unchanged(dim: int, interleaved: bool) -> None:
    x, freq = random(6, 3, dim), table(4)
    out = RotaryCache(POSITIONS).rotate(x, Rotary(freq, interleaved, 1.5))
    for t, position in enumerate(POSITIONS.tolist()):
        for i in range(4):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 4)
            z = torch.complex(x[t, :, a], x[t, :, b]) * 1.5 * cmath.exp(1j * position * freq[i].item())
            torch.testing.assert_close(torch.complex(out[t, :, a], out[t, :, b]), z, rtol=0, atol=1e-12)
    assert torch.equal(out[..., 8:], x[..., 8:])


@pytest.mark.parametrize("interleaved", [False, True])
def test_product_depends_on_the_signed_distance(interleaved: bool) -> None:
    rotary, (q, k) = Rotary(table(4), interleaved, 1.0), random(2, 8)
    for n, m in [(0, 5), (9, 2), (1003, 1008), (4, 4), (70, 0)]:
        product = rotate_one(q, n, rotary) @ rotate_one(k, m, rotary)
        torch.testing.assert_close(product, q @ rotate_one(k, m - n, rotary), rtol=0, atol=1e-11)
        torch.testing.assert_close(product, rotate_one(q, n - m, rotary) @ k, rtol=0, atol=1e-11)
        assert n == m or abs(product - q @ rotate_one(k, n - m, rotary)) > 1e-2
    torch.testing.assert_close(rotate_one(q, 123, rotary).norm(), q.norm(), rtol=0, atol=1e-12)
    one = rotate_one(torch.tensor([1.0, 0.0]), 1, Rotary(torch.ones(1), interleaved, 1.0))
    torch.testing.assert_close(one, torch.tensor([math.cos(1), math.sin(1)]))


def angles(dim: int) -> tuple[Tensor, Tensor]:
    angle = POSITIONS.double()[:, None] * table(dim // 2)
    return angle.cos(), angle.sin()


def test_half_split_equals_llama() -> None:
    q, k = random(6, 3, 8), random(6, 2, 8, seed=1)
    cos, sin = (torch.cat((part, part), dim=-1)[None] for part in angles(8))
    their_q, their_k = llama_rotary(q[None], k[None], cos, sin, unsqueeze_dim=2)
    own_result, rotary = RotaryCache(POSITIONS), Rotary(table(4), False, 1.0)
    torch.testing.assert_close(own_result.rotate(q, rotary), their_q[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(own_result.rotate(k, rotary), their_k[0], rtol=0, atol=1e-12)


def test_interleaved_equals_gptj() -> None:
    x, (cos, sin) = random(6, 3, 8), angles(8)
    reference = gptj_rotary(x[None], sin[None], cos[None])
    torch.testing.assert_close(
        RotaryCache(POSITIONS).rotate(x, Rotary(table(4), True, 1.0)), reference[0], rtol=0, atol=1e-12
    )


def test_partial_equals_gpt_neox() -> None:
    q, k = random(6, 3, 16), random(6, 3, 16, seed=1)
    cos, sin = (torch.cat((part, part), dim=-1)[None] for part in angles(4))
    reference, _ = neox_rotary(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    own_result = RotaryCache(POSITIONS).rotate(q, Rotary(table(2), False, 1.0))
    torch.testing.assert_close(own_result, reference[0].transpose(0, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
def test_frequencies_may_differ_per_token(interleaved: bool) -> None:
    x, rows = random(6, 3, 8), torch.stack([table(4, 10.0 * (t + 1)) for t in range(6)])
    out = RotaryCache(POSITIONS).rotate(x, Rotary(rows, interleaved, 1.0))
    for t in range(6):
        solo = RotaryCache(POSITIONS[t : t + 1]).rotate(x[t : t + 1], Rotary(rows[t], interleaved, 1.0))
        torch.testing.assert_close(out[t : t + 1], solo, rtol=0, atol=0)


def test_tables_of_one_step_are_independent() -> None:
    """Several tables are used within a step (one per kind of layer and regime) and must not be confused."""
    x, shared = random(6, 1, 8), RotaryCache(POSITIONS)
    for base in range(10, 40):
        out = shared.rotate(x, Rotary(table(4, base), False, 1.0))
        torch.testing.assert_close(
            out, RotaryCache(POSITIONS).rotate(x, Rotary(table(4, base), False, 1.0)), rtol=0, atol=0
        )
    one = table(4)
    plain, grown = (shared.rotate(x, Rotary(one, False, factor)) for factor in (1.0, 2.0))
    torch.testing.assert_close(grown, 2 * plain, rtol=0, atol=1e-12)


def test_angles_are_float32_for_every_dtype() -> None:
    """bfloat16 cannot distinguish positions 1001 and 1002, so angles must be float32."""
    x = torch.ones(2, 1, 2, dtype=torch.bfloat16)
    out = RotaryCache(torch.tensor([1001, 1002])).rotate(x, Rotary(torch.ones(1), False, 1.0))
    assert out.dtype == torch.bfloat16
    for t, position in enumerate((1001, 1002)):
        expected = [math.cos(position) - math.sin(position), math.sin(position) + math.cos(position)]
        assert out[t, 0].tolist() == pytest.approx(expected, abs=2e-2)


def test_gradient_is_the_inverse_rotation() -> None:
    x, cos, sin = random(5, 8).requires_grad_(), *(f(random(5, 4, seed=2)) for f in (torch.cos, torch.sin))
    for interleaved in (False, True):
        weight = random(5, 8, seed=3)
        (gradient,) = torch.autograd.grad((rotate(x, cos, sin, interleaved) * weight).sum(), x)
        torch.testing.assert_close(gradient, rotate(weight, cos, -sin, interleaved), rtol=0, atol=1e-12)


@pytest.mark.parametrize("few", [0, 10**9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_few_tokens_have_the_same_bits(few: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form for few tokens and the general one give equal bits."""
    monkeypatch.setattr("kvad.ops.rotary.SMALL_TOKEN_COUNT", few)
    x, freq = random(6, 3, 8).to(dtype), table(4)
    angle = POSITIONS.double()[:, None, None] * freq
    expected = rotate(x, (angle.cos() * 1.5).to(dtype), (angle.sin() * 1.5).to(dtype), False)
    assert torch.equal(RotaryCache(POSITIONS).rotate(x, Rotary(freq, False, 1.5)), expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turned", [8, 6])
def test_gradient_equals_autograd(turned, interleaved):
    """More tokens than FEW; 6 of 8 dimensions rotated, and all."""
    positions = torch.arange(50)
    rotary = Rotary(torch.rand(turned // 2), interleaved, 1.3)
    angles = RotaryCache(positions)
    x, expected = torch.randn(50, 3, 8, requires_grad=True), torch.randn(50, 3, 8)
    out = angles.rotate(x, rotary)
    cos = ((positions[:, None] * rotary.inv_freq).cos() * rotary.factor)[:, None]
    sin = ((positions[:, None] * rotary.inv_freq).sin() * rotary.factor)[:, None]
    plain = rotate(x, cos, sin, interleaved)
    assert torch.equal(out, plain) and type(out.grad_fn).__name__ == "_RotateBackward"
    of_out, of_plain = (torch.autograd.grad((y * expected).sum(), x)[0] for y in (out, plain))
    assert torch.equal(of_out, of_plain)
