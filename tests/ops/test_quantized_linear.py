"""Quantized weights: worked examples, error bounds, visible non-finite values, and products without a whole copy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kvad.errors import ConfigError
from kvad.ops import linear, quantized_linear
from kvad.ops.quantized_linear import QuantizedLinear, quantize_matrix, round_inputs

FORMATS = [(8, 32), (8, 128), (4, 32), (4, 128)]


def test_int8_example() -> None:
    matrix = quantize_matrix(torch.tensor([[-0.5, 2.54, 0.0, 1.27]]), 8, 4)
    assert matrix.data.tolist() == [[-25, 127, 0, 64]]
    assert matrix.scale.tolist() == [[pytest.approx(0.02)]] and matrix.minimum is None


def test_int4_example_has_the_first_number_in_the_low_bits() -> None:
    matrix = quantize_matrix(torch.tensor([[-1.0, 0.18, 2.0, 0.6]]), 4, 4)
    assert matrix.data.tolist() == [[0 | 6 << 4, 15 | 8 << 4]]
    assert matrix.scale.tolist() == [[pytest.approx(0.2)]]
    assert matrix.minimum is not None and matrix.minimum.tolist() == [[-1.0]]


@pytest.mark.parametrize(("bits", "group"), FORMATS)
@given(seed=st.integers(0, 2**32), exponent=st.integers(-100, 100), offset=st.floats(-4, 4, width=32))
def test_the_error_is_at_most_half_a_scale(bits: int, group: int, seed: int, exponent: int, offset: float) -> None:
    numbers = torch.randn(3, 256, generator=torch.Generator().manual_seed(seed)) + offset
    weight = numbers * 2.0**exponent
    matrix = quantize_matrix(weight, bits, group)
    error = (matrix.dequantize(torch.float64) - weight.double()).abs().unflatten(-1, (-1, group))
    rounding = 2.0**-22 * weight.abs().max().double()  # of the float32 quotient
    assert (error <= matrix.scale.double()[..., None] / 2 + rounding).all()


@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_zeros_and_constants_stay(bits: int, group: int) -> None:
    assert not quantize_matrix(torch.zeros(2, 128), bits, group).dequantize(torch.float32).any()
    constant = quantize_matrix(torch.full((2, 128), 3.0), bits, group).dequantize(torch.float32)
    assert torch.allclose(constant, torch.tensor(3.0))


@pytest.mark.parametrize(("bits", "group"), FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_numbers_stay_visible_in_their_group_only(bits: int, group: int, value: float) -> None:
    weight = torch.randn(2, 256)
    weight[1, group] = value
    decoded = quantize_matrix(weight, bits, group).dequantize(torch.float32)
    damaged = decoded[1, group : 2 * group]
    assert not damaged.isfinite().any()
    assert int((~decoded.isfinite()).sum()) == group


@pytest.mark.parametrize(
    ("inputs", "bits", "group", "text"),
    [
        (33, 8, 32, "group_size: must divide the 33 inputs of the matrix, got 32"),
        (32, 8, 0, "group_size: must divide the 32 inputs of the matrix, got 0"),
        (3, 4, 3, "bits: 4 must have an even number of inputs, got 3"),
        (32, 5, 32, "bits: must be 8 or 4, got 5"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(inputs: int, bits: int, group: int, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        quantize_matrix(torch.zeros(2, inputs), bits, group)
    assert text in str(error.value)


@pytest.mark.parametrize(("bits", "group"), [*FORMATS, (8, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_layer_multiplies_by_the_dequantized_matrix(
    bits: int, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_linear, "BLOCK", 256 * 3)
    bias = nn.Parameter(torch.randn(7).to(dtype), requires_grad=False)
    layer = QuantizedLinear(quantize_matrix(torch.randn(7, 256), bits, group), bias)
    x = torch.randn(2, 5, 256).to(dtype)
    expected = x.double() @ layer.effective_weight(dtype).double().T + bias.double()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.25}[dtype]
    torch.testing.assert_close(layer(x).double(), expected, atol=tolerance, rtol=0)
    assert layer(x).dtype == dtype and (layer.out_features, layer.in_features) == (7, 256)


def test_a_product_never_dequantizes_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "BLOCK", 64 * 4)
    sizes: list[int] = []

    def spy(x: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
        sizes.append(weight.shape[0])
        return linear.linear(x, weight)

    monkeypatch.setattr(quantized_linear, "linear", spy)
    QuantizedLinear(quantize_matrix(torch.randn(10, 64), 8, 32))(torch.randn(1, 64))
    assert sizes == [4, 4, 2]


def test_float16_scales_are_used_as_they_are() -> None:
    matrix = quantize_matrix(torch.randn(4, 64), 8, 32)
    matrix = matrix._replace(scale=matrix.scale.half())
    expected = matrix.data.float().unflatten(-1, (-1, 32)) * matrix.scale.float()[..., None]
    assert torch.equal(matrix.dequantize(torch.float32), expected.flatten(-2))


def test_joined_products_keep_quantized_layers_separate() -> None:
    layers = [QuantizedLinear(quantize_matrix(torch.randn(8, 32), 8, 32)) for _ in range(2)]
    pack, x = linear.PackedLinear(), torch.randn(3, 32)
    pack.pack(*layers)
    assert pack.shape is None
    for product, layer in zip(pack(x, *layers), layers, strict=True):
        assert torch.equal(product, layer(x))


def test_the_state_is_named_and_training_is_refused() -> None:
    layer = QuantizedLinear(quantize_matrix(torch.randn(8, 32), 4, 32))
    assert list(layer.state_dict()) == ["data", "scale", "minimum"]
    assert not layer.eval().training
    with pytest.raises(ConfigError, match="training: must have floating-point weights, got int4"):
        nn.Sequential(layer).train()


def test_inputs_are_rounded_in_groups_of_at_most_128() -> None:
    x = torch.tensor([2.54, -0.5, 0.011, 1.0] * 2)
    assert torch.allclose(round_inputs(x, 4), torch.tensor([2.54, -0.5, 0.02, 1.0] * 2))
    x[5] = 127.0  # of the second group
    assert torch.allclose(round_inputs(x, 4), torch.tensor([2.54, -0.5, 0.02, 1.0, 3.0, 127.0, 0.0, 1.0]))
    assert torch.allclose(round_inputs(x, 8), torch.tensor([3.0, 0.0, 0.0, 1.0, 3.0, 127.0, 0.0, 1.0]))
    wide = torch.cat((torch.full((128,), 0.5), torch.full((128,), 127.0), torch.full((8,), 0.25)))
    assert torch.allclose(round_inputs(wide, 264), wide)


@pytest.mark.parametrize("group", [32, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rounded_inputs_stay_near_and_zeros_and_what_is_not_finite_stay(group: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, 256).to(dtype)
    x[0, :128], x[1, 3], x[2, 4] = 0.0, float("nan"), float("inf")
    rounded = round_inputs(x, group)
    tops = x[3:].double().unflatten(-1, (-1, min(group, 128))).abs().amax(-1, keepdim=True)
    error = (rounded[3:].double() - x[3:].double()).unflatten(-1, (-1, min(group, 128))).abs()
    assert (error <= tops * (1 / 254 + torch.finfo(dtype).eps)).all() and error.max() > 0
    assert not rounded[0, :128].any() and rounded[1, 3].isnan() and not rounded[2, 4].isfinite()
    assert rounded[1, 128:].isfinite().all() and rounded.dtype == dtype


@pytest.mark.parametrize("bits", [8, 4])
def test_a_layer_rounds_its_inputs_if_asked_to(bits: int) -> None:
    layer, x = QuantizedLinear(quantize_matrix(torch.randn(7, 64), bits, 32)), torch.randn(3, 64)
    plain = layer(x)
    layer.activation_bits = 8
    assert torch.equal(layer(x), layer_without_rounding(layer, round_inputs(x, 32)))
    assert 0 < (layer(x) - plain).abs().max() < 0.05 * plain.abs().max()


def layer_without_rounding(layer: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.effective_weight().T
