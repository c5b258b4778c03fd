"""Cross entropy of a product against the plain form under autograd, in float64 to 1e-12."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from kvad.ops import cross_entropy
from kvad.ops.cross_entropy import cross_entropy_backward

POSITIONS, WIDTH, ANSWERS, TOTAL = 23, 7, 11, 40.0


def question(dtype=torch.float64, with_bias=True):
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x, weight, bias = drawn(POSITIONS, WIDTH), drawn(ANSWERS, WIDTH), drawn(ANSWERS) if with_bias else None
    targets = torch.randint(ANSWERS, (POSITIONS,), generator=generator)
    return x, weight.requires_grad_(), None if bias is None else bias.requires_grad_(), targets


def plain(x, weight, bias, targets, scale, smoothing):
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(scale * F.linear(x, weight, bias), targets, reduction="sum", label_smoothing=smoothing)
    wanted = [x, weight] if bias is None else [x, weight, bias]
    return loss.item(), torch.autograd.grad(loss / TOTAL, wanted)


@pytest.mark.parametrize(
    ("with_bias", "scale", "smoothing", "slices"),
    list(itertools.product((False, True), (1.0, 0.3), (0.0, 0.1), (1, 5))),
)
def test_it_is_the_plain_form(monkeypatch, with_bias, scale, smoothing, slices):
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", -(-POSITIONS // slices) * ANSWERS)
    x, weight, bias, targets = question(with_bias=with_bias)
    expected, gradients = plain(x, weight, bias, targets, scale, smoothing)
    loss, of_x = cross_entropy_backward(x, weight, bias, targets, TOTAL, scale=scale, smoothing=smoothing)
    assert loss == pytest.approx(expected, rel=1e-13)
    found = [of_x, weight.grad, *([] if bias is None else [bias.grad])]
    for got, wanted in zip(found, gradients, strict=True):
        assert (got - wanted).abs().max() <= 1e-12


def test_what_is_there_is_added_to_and_what_is_frozen_left_alone():
    x, weight, bias, targets = question()
    cross_entropy_backward(x, weight, bias, targets, TOTAL)
    once = weight.grad.clone(), bias.grad.clone()
    cross_entropy_backward(x, weight, bias, targets, TOTAL)
    assert torch.allclose(weight.grad, 2 * once[0], atol=1e-14) and torch.allclose(bias.grad, 2 * once[1], atol=1e-14)
    weight.grad = bias.grad = None
    cross_entropy_backward(x, weight.requires_grad_(False), bias, targets, TOTAL)
    assert weight.grad is None and torch.equal(bias.grad, once[1])


def test_slices_are_of_like_length_and_cover_every_position(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 700 * 1000)
    cut = cross_entropy._slices(2048, 1000)
    assert [at.stop - at.start for at in cut] == [682, 683, 683]
    assert cross_entropy._slices(3, 10**9) == [slice(0, 1), slice(1, 2), slice(2, 3)] and cross_entropy._slices(
        0, 5
    ) == [slice(0, 0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_a_narrow_dtype_are_near_and_their_gradients_are_summed_in_float32(dtype):
    x, weight, bias, targets = question(torch.float32)
    expected, gradients = plain(x, weight, bias, targets, 1.0, 0.0)
    loss, of_x = cross_entropy_backward(x, weight, bias, targets, TOTAL, dtype=dtype)
    assert loss == pytest.approx(expected, rel=1e-2) and weight.grad.dtype == of_x.dtype == torch.float32
    for got, wanted in zip((of_x, weight.grad, bias.grad), gradients, strict=True):
        assert (got - wanted).abs().max() <= 2e-2 * wanted.abs().max()


def test_a_loss_scale_keeps_small_chances_above_what_fp16_can_say():
    """The error is scaled before it is rounded: 2^16 makes of 1e-8, which fp16 has not, a number that it has."""
    x, weight = torch.eye(2), torch.tensor([[18.4, 0.0], [0.0, 0.0]]).requires_grad_()
    targets = torch.tensor([0, 0])
    cross_entropy_backward(x, weight, None, targets, 1.0, dtype=torch.float16)
    assert weight.grad[1, 0] == 0
    weight.grad = None
    cross_entropy_backward(x, weight, None, targets, 2.0**-16, dtype=torch.float16)
    assert weight.grad[1, 0] / 2**16 == pytest.approx(1e-8, rel=0.1)
