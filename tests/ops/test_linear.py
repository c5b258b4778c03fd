"""A linear layer for one row, split over threads, and several layers fused into one product."""

import copy

import pytest
import torch
import torch.nn.functional as F

from kvad.ops import linear as module
from kvad.ops.linear import Linear, PackedLinear, linear


@pytest.fixture
def products(monkeypatch):
    """Count the batched products."""
    seen, real = [], torch.bmm
    monkeypatch.setattr(module.torch, "bmm", lambda a, b: (seen.append(a.shape[0]), real(a, b))[1])
    return seen


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 256), (1, 1, 256), (256,)])
@torch.inference_mode()
def test_split_product_equals_plain_product(monkeypatch, products, threads, bias, shape):
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: threads)
    x, weight, b = torch.randn(shape).double(), torch.randn(192, 256).double(), torch.randn(192).double()
    out = linear(x, weight, b if bias else None)
    expected = F.linear(x, weight, b if bias else None)
    assert out.shape == expected.shape and (out - expected).abs().max() <= 1e-10
    assert products == ([threads] if threads > 1 else [])


@pytest.mark.parametrize("has_onednn", [False, module.HAS_ONEDNN])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 256), (3, 7, 256), (300, 256)])
@torch.inference_mode()
def test_products_of_several_rows_equal_those_in_float64(monkeypatch, has_onednn, bias, shape):
    monkeypatch.setattr(module, "HAS_ONEDNN", has_onednn)
    x, weights, b = torch.randn(shape), torch.randn(2 * 192, 256), torch.randn(192)
    weight = weights[192:]  # of a packed product
    out = linear(x, weight, b if bias else None)
    expected = F.linear(x.double(), weight.double(), b.double() if bias else None)
    assert out.shape == expected.shape and (out - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("x", "weight", "uses"),
    [
        (torch.randn(2, 256), torch.randn(192, 256), True),
        (torch.randn(1, 256), torch.randn(192, 256), False),  # one row
        (torch.randn(2, 16), torch.randn(192, 16), False),  # small
        (torch.randn(2, 256).double(), torch.randn(192, 256).double(), False),
    ],
)
def test_onednn_multiplies_several_rows_without_gradients(monkeypatch, x, weight, uses):
    monkeypatch.setattr(module, "HAS_ONEDNN", True)
    assert not module._prefers_onednn(x, weight)
    with torch.no_grad():
        assert module._prefers_onednn(x, weight) == uses


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
def test_other_shapes_are_not_split(monkeypatch, products, x, weight):
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(module, "HAS_ONEDNN", False)
    with torch.inference_mode():
        assert torch.equal(linear(x, weight), F.linear(x, weight)) and products == []


def test_training_is_not_split(monkeypatch, products):
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 2)
    layer, x = Linear(256, 192), torch.randn(1, 256)
    layer(x).sum().backward()
    assert products == [] and layer.weight.grad is not None
    with torch.no_grad():
        assert torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-5) and products == [2]


# ---------------------------------------------------------------- fused products of one input


def pair(bias=(False, False)):
    return Linear(64, 48, bias[0]).double(), Linear(64, 32, bias[1]).double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
@torch.inference_mode()
def test_fused_product_is_equal_and_shares_memory(rows, bias):
    a, b = pair((bias, bias))
    x, joint = torch.randn(rows, 64).double(), PackedLinear()
    before = [layer(x) for layer in (a, b)]
    values = [p.clone() for layer in (a, b) for p in layer.parameters()]
    joint.pack(a, b)
    after = joint(x, a, b)
    assert all((one - two).abs().max() <= 1e-12 for one, two in zip(before, after, strict=True))
    assert all(torch.equal(p, v) for p, v in zip([*a.parameters(), *b.parameters()], values, strict=True))
    assert a.weight.untyped_storage().data_ptr() == b.weight.untyped_storage().data_ptr()


@torch.inference_mode()
def test_changed_layers_are_not_fused():
    """A copy, another dtype or a loaded state must not use the old fused weight."""
    a, b = pair()
    joint, x = PackedLinear(), torch.randn(1, 64).double()
    joint.pack(a, b)
    copied, c, d = copy.deepcopy((joint, a, b))
    c.weight.data = torch.randn(48, 64).double()
    assert torch.equal(copied(x, c, d)[0], c(x))
    copied, c, d = copy.deepcopy((joint, a, b))
    assert copied(x.float(), c.float(), d.float())[0].dtype == torch.float32
    a.load_state_dict({"weight": torch.randn(48, 64).double()})  # in place: the fused weight shares this memory
    assert torch.allclose(joint(x, a, b)[0], a(x), atol=1e-12)
    other = Linear(64, 48, bias=False).double()  # a layer in the place of another
    assert torch.equal(joint(x, other, b)[0], other(x))


def test_mixed_biases_are_not_fused():
    a, b = pair((True, False))
    joint, x = PackedLinear(), torch.randn(3, 64).double()
    joint.pack(a, b)
    assert torch.equal(joint(x, a, b)[0], a(x)) and torch.equal(joint(x, a, b)[1], b(x))
