"""One row cut over threads is the same product; everything else goes the usual way."""

import pytest
import torch
import torch.nn.functional as F

from kvad.ops import linear as module
from kvad.ops.linear import Linear, linear


@pytest.fixture
def products(monkeypatch):
    """How often a batched product was asked for."""
    seen, real = [], torch.bmm
    monkeypatch.setattr(module.torch, "bmm", lambda a, b: (seen.append(a.shape[0]), real(a, b))[1])
    return seen


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 256), (1, 1, 256), (256,)])
@torch.inference_mode()
def test_one_row_is_the_same_product(monkeypatch, products, threads, bias, shape):
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: threads)
    x, weight, b = torch.randn(shape).double(), torch.randn(192, 256).double(), torch.randn(192).double()
    out = linear(x, weight, b if bias else None)
    expected = F.linear(x, weight, b if bias else None)
    assert out.shape == expected.shape and (out - expected).abs().max() <= 1e-10
    assert products == ([threads] if threads > 1 else [])


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.randn(2, 256), torch.randn(192, 256)),  # two rows
        (torch.randn(1, 256), torch.randn(191, 256)),  # does not divide
        (torch.randn(1, 16), torch.randn(192, 16)),  # small
        (torch.randn(1, 256).bfloat16(), torch.randn(192, 256).bfloat16()),
        (torch.randn(1, 256), torch.randn(256, 192).t()),  # not contiguous
    ],
)
def test_the_rest_goes_the_usual_way(monkeypatch, products, x, weight):
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 2)
    with torch.inference_mode():
        assert torch.equal(linear(x, weight), F.linear(x, weight)) and products == []


def test_training_goes_the_usual_way(monkeypatch, products):
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 2)
    layer, x = Linear(256, 192), torch.randn(1, 256)
    layer(x).sum().backward()
    assert products == [] and layer.weight.grad is not None
    with torch.no_grad():
        assert torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-5) and products == [2]
