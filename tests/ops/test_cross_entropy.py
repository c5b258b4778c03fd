"""Cross entropy of a matrix product compared with the plain form under autograd, in float64 to 1e-12."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from kvad.ops import cross_entropy
from kvad.ops.cross_entropy import cross_entropy_backward

POSITIONS, WIDTH, ANSWERS, TOTAL = 23, 7, 11, 40.0


def question(dtype=torch.float64, with_bias=True):
    generator = torch.Generator().manual_seed(0)

    def random_inputs(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x, weight, bias = (
        random_inputs(POSITIONS, WIDTH),
        random_inputs(ANSWERS, WIDTH),
        random_inputs(ANSWERS) if with_bias else None,
    )
    targets = torch.randint(ANSWERS, (POSITIONS,), generator=generator)
    return x, weight.requires_grad_(), None if bias is None else bias.requires_grad_(), targets


def plain(x, weight, bias, targets, scale, smoothing):
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(scale * F.linear(x, weight, bias), targets, reduction="sum", label_smoothing=smoothing)
    expected = [x, weight] if bias is None else [x, weight, bias]
    return loss.item(), torch.autograd.grad(loss / TOTAL, expected)


@pytest.mark.parametrize(
    ("with_bias", "scale", "smoothing", "slices"),
    list(itertools.product((False, True), (1.0, 0.3), (0.0, 0.1), (1, 5))),
)
def test_equals_the_plain_form(monkeypatch, with_bias, scale, smoothing, slices):
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", -(-POSITIONS // slices) * ANSWERS)
    x, weight, bias, targets = question(with_bias=with_bias)
    expected, gradients = plain(x, weight, bias, targets, scale, smoothing)
    loss, of_x = cross_entropy_backward(x, weight, bias, targets, TOTAL, scale=scale, smoothing=smoothing)
    assert loss == pytest.approx(expected, rel=1e-13)
    result = [of_x, weight.grad, *([] if bias is None else [bias.grad])]
    for got, gradient in zip(result, gradients, strict=True):
        assert (got - gradient).abs().max() <= 1e-12


def test_gradients_accumulate_and_skip_frozen_inputs():
    x, weight, bias, targets = question()
    cross_entropy_backward(x, weight, bias, targets, TOTAL)
    once = weight.grad.clone(), bias.grad.clone()
    cross_entropy_backward(x, weight, bias, targets, TOTAL)
    assert torch.allclose(weight.grad, 2 * once[0], atol=1e-14) and torch.allclose(bias.grad, 2 * once[1], atol=1e-14)
    weight.grad = bias.grad = None
    cross_entropy_backward(x, weight.requires_grad_(False), bias, targets, TOTAL)
    assert weight.grad is None and torch.equal(bias.grad, once[1])


def test_slices_are_even_and_complete(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 700 * 1000)
    num_rows = cross_entropy._slices(2048, 1000)
    assert [at.stop - at.start for at in num_rows] == [682, 683, 683]
    assert cross_entropy._slices(3, 10**9) == [slice(0, 1), slice(1, 2), slice(2, 3)] and cross_entropy._slices(
        0, 5
    ) == [slice(0, 0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_sum_gradients_in_float32(dtype):
    x, weight, bias, targets = question(torch.float32)
    expected, gradients = plain(x, weight, bias, targets, 1.0, 0.0)
    loss, of_x = cross_entropy_backward(x, weight, bias, targets, TOTAL, dtype=dtype)
    assert loss == pytest.approx(expected, rel=1e-2) and weight.grad.dtype == of_x.dtype == torch.float32
    for got, expected in zip((of_x, weight.grad, bias.grad), gradients, strict=True):
        assert (got - expected).abs().max() <= 2e-2 * expected.abs().max()


def test_loss_scale_keeps_small_gradients_in_fp16():
    """The gradient is scaled before rounding: 2^16 makes 1e-8 representable in fp16."""
    x, weight = torch.eye(2), torch.tensor([[18.4, 0.0], [0.0, 0.0]]).requires_grad_()
    targets = torch.tensor([0, 0])
    cross_entropy_backward(x, weight, None, targets, 1.0, dtype=torch.float16)
    assert weight.grad[1, 0] == 0
    weight.grad = None
    cross_entropy_backward(x, weight, None, targets, 2.0**-16, dtype=torch.float16)
    assert weight.grad[1, 0] / 2**16 == pytest.approx(1e-8, rel=0.1)
