"""Quantization formats as pure functions: worked examples, error bounds, and visible non-finite values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvad.cache.quantization import FORMATS
from kvad.errors import ConfigError
from kvad.ops import quantize
from kvad.ops.quantize import CODECS, get_codec

TOKENWISE = [name for name, each in FORMATS.items() if not each.is_blockwise]
LOSSY = [name for name in TOKENWISE if FORMATS[name].loss == "lossy"]
CHANNELS = [name for name, each in FORMATS.items() if each.is_blockwise]
finite = st.floats(-(2.0**100), 2.0**100, width=32)


def round_trip(name: str, x: Tensor) -> Tensor:
    codec = CODECS[name]
    return codec.decode(codec.encode(x), x.dtype)


def test_every_format_has_functions() -> None:
    assert list(CODECS) == list(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dim", [2, 6, 64])
def test_encoded_arrays_have_the_planned_shapes(name: str, dim: int) -> None:
    blocks = torch.randn(3, 2, 4, dim)
    listed, encoded = FORMATS[name].arrays(dim), CODECS[name].encode(blocks)
    for array, part in zip(listed, encoded, strict=True):
        assert part.shape == (3, 2, 4 if array.granularity == "slot" else 1, array.width)
        assert part.dtype == getattr(torch, array.dtype)
        assert part.nbytes == 3 * 2 * (4 if array.granularity == "slot" else 1) * array.nbytes
    assert listed[0].name == "data" and CODECS[name].decode(encoded, torch.float32).shape == blocks.shape


def test_int8_worked_example() -> None:
    data, scale = CODECS["int8"].encode(torch.tensor([[-0.5, 2.54, 0.0]]))
    assert data.tolist() == [[-25, 127, 0]] and scale.item() == pytest.approx(0.02)
    assert round_trip("int8", torch.tensor([[-0.5, 2.54, 0.0]])).tolist()[0] == pytest.approx([-0.5, 2.54, 0.0])


def test_int4_worked_example() -> None:
    x = torch.tensor([[-1.0, 0.1, 2.0, 0.5]])
    data, scale, zero = CODECS["int4"].encode(x)
    assert data.tolist() == [[0 | 6 << 4, 15 | 8 << 4]]  # 5.5 and 7.5 round to even
    assert scale.item() == pytest.approx(0.2) and zero.item() == -1
    assert round_trip("int4", x).tolist()[0] == pytest.approx([-1.0, 0.2, 2.0, 0.6])


def test_channel_format_worked_example() -> None:
    """One head of a block of three tokens, two channels: 0, 15, 30 and 5, 5, 5."""
    block = torch.tensor([[0.0, 5.0], [15.0, 5.0], [30.0, 5.0]]).view(1, 1, 3, 2)
    data, scale, zero = CODECS["int4-channel"].encode(block)
    assert scale.flatten().tolist() == [2.0, 2.0**-24] and zero.flatten().tolist() == [0.0, 5.0]
    assert data.flatten().tolist() == [0, 8, 15]  # 0, 7.5, 15 in the lower half; all 0 in the upper
    assert round_trip("int4-channel", block)[0, 0].tolist() == [[0, 5], [16, 5], [30, 5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", TOKENWISE)
def test_errors_are_within_eps(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randn(200, 32, generator=generator, dtype=torch.float64)
        .mul_(torch.logspace(-3, 2, 200)[:, None])
        .to(dtype)
    )
    back = round_trip(name, x)
    assert back.dtype == dtype
    within = FORMATS[name].eps / 2 + torch.finfo(dtype).eps + 1e-6
    error = (back.double() - x.double()).abs()
    size = x.double().abs()
    if FORMATS[name].kind == "token":
        size = size.amax(dim=-1, keepdim=True).expand_as(size)
    else:  # below the smallest normal number the step is constant
        error, size = error[size > 2**-6], size[size > 2**-6]
    assert bool((error <= within * size).all())


@given(st.lists(finite, min_size=2, max_size=24).filter(lambda x: len(x) % 2 == 0))
def test_int8_error_is_at_most_half_a_scale(values: list[float]) -> None:
    x = torch.tensor([values], dtype=torch.float32)
    (_, scale), back = CODECS["int8"].encode(x), round_trip("int8", x)
    assert bool(((back - x).abs() <= scale * 0.5001).all()) and bool(back.isfinite().all())


@given(st.lists(finite, min_size=2, max_size=24).filter(lambda x: len(x) % 2 == 0))
def test_int4_error_is_at_most_half_a_scale(values: list[float]) -> None:
    x = torch.tensor([values], dtype=torch.float32)
    (_, scale, _), back = CODECS["int4"].encode(x), round_trip("int4", x)
    slack = 1e-6 * x.abs().max()
    assert bool(((back - x).abs() <= scale * 0.5001 + slack).all()) and bool(back.isfinite().all())


@pytest.mark.parametrize("name", CHANNELS)
def test_channel_error_is_half_a_scale_and_the_rounded_zero(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    offsets = torch.linspace(-40, 40, 16)  # like keys: a channel far from zero with little variation
    x = torch.randn(5, 2, 16, 16, generator=generator) * torch.linspace(0.01, 3, 16) + offsets
    _, scale, zero = CODECS[name].encode(x)
    error = (round_trip(name, x) - x).abs()
    assert bool((error <= scale.float() * 0.57 + zero.float().abs() * 2.0**-11).all())
    per_token = (round_trip(name.partition("-")[0], x) - x).abs()
    assert error.mean() < per_token.mean() / 4, "what keys by channel are for"


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_cleared_arrays_decode_to_zero(name: str) -> None:
    x = torch.zeros(2, 3, 4, 8)
    assert torch.equal(round_trip(name, x), x)
    cleared = [torch.zeros_like(part) for part in CODECS[name].encode(torch.randn(2, 3, 4, 8))]
    assert torch.equal(CODECS[name].decode(cleared, torch.float32), x)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("others", [0.0, 1.5])
def test_non_finite_values_become_nan(name: str, bad: float, others: float) -> None:
    x = torch.full((2, 1, 4, 8), others)
    x[0, 0, 1, 2] = bad
    back = round_trip(name, x)
    assert not math.isfinite(back[0, 0, 1, 2])
    assert torch.equal(back[1], x[1]), "and leaves the others alone"


@pytest.mark.parametrize("name", LOSSY)
def test_huge_and_tiny_numbers(name: str) -> None:
    huge, tiny = torch.tensor([[1e38, -1e38, 1.0, 0.0]]), torch.tensor([[1e-44, -1e-44, 0.0, 1e-45]])
    back = round_trip(name, huge)
    assert bool(back.isfinite().all())
    most = min(FORMATS[name].max_value, 1e38)
    assert back[0, :2].tolist() == pytest.approx([most, -most], rel=0.01)
    assert bool((round_trip(name, tiny).abs() <= 1e-37).all())


def test_range_beyond_float32_becomes_nan() -> None:
    assert not round_trip("int4", torch.tensor([[3e38, -3e38]])).isfinite().any()
    assert not round_trip("int8", torch.tensor([[1e300, 1.0]], dtype=torch.float64)).isfinite().any()


@pytest.mark.parametrize("name", ["fp8-e4m3", "fp8-e5m2"])
def test_every_fp8_byte_equals_torch(name: str) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    right = every.view(getattr(torch, quantize.FP8[name][0])).double()
    for low in (0, 64, 128):  # with NaN among them, and without
        part = every[low : low + 100]
        for dtype in (torch.float64, torch.float32):
            got = CODECS[name].decode((part,), dtype).double()
            assert torch.equal(got.nan_to_num(nan=-1.5, posinf=1e9), right[low : low + 100].nan_to_num(-1.5, 1e9))


@pytest.mark.parametrize("name", LOSSY)
def test_tokens_are_quantized_independently(name: str) -> None:
    x = torch.randn(7, 3, 8)
    whole = CODECS[name].encode(x)
    for at in range(7):
        for one, all_of_them in zip(CODECS[name].encode(x[at : at + 1]), whole, strict=True):
            assert torch.equal(one[0], all_of_them[at])


def test_fp8_requires_build_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quantize.FP8, "fp8-e4m3", ("float8_of_tomorrow", 448.0))
    with pytest.raises(
        ConfigError, match=r"fp8-e4m3: torch .* has no float8_of_tomorrow on cpu .use int8, which has the same size"
    ):
        get_codec("fp8-e4m3")
    assert get_codec("fp8-e5m2") is CODECS["fp8-e5m2"]
