"""Each CPU kernel against its function in PyTorch, over random shapes, in every variant that this machine runs.

A program has a few operations: embeddings give the kernel its inputs, and a selection returns what it wrote. The same
numbers go through PyTorch in float64. A float32 result may differ by 2^-18 of the sum of the magnitudes that are added,
and one in bfloat16 by 2^-8 of itself more; what a test allows beyond that is stated in it.
"""

from __future__ import annotations

import ctypes
import math
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvad import config as cfg
from kvad.model.layers import ACTIVATIONS, MixtureOfExperts
from kvad.model_input import AlibiSlopes, AttentionParams, AttentionPattern, RelativeBuckets, Rotary, TokenPositions
from kvad.ops.attention import AttentionMask, dot_product_attention
from kvad.ops.native import library
from kvad.ops.position_bias import t5_bucket
from kvad.ops.quantize import get_codec
from kvad.ops.quantized_linear import QuantizedMatrix, quantize_matrix, round_inputs
from kvad.ops.rotary import RotaryCache

LIBRARIES = {name: library.load_variant(name) for name in library.runnable_variants()}
FLOAT, BFLOAT = library.DTYPES
FLOAT_ERROR, BFLOAT_ERROR = 2.0**-18, 2.0**-8
PANEL = library.PANEL

pytestmark = pytest.mark.skipif(not LIBRARIES, reason=library.load().reason)


class Case(NamedTuple):
    """How a test draws its numbers, and what runs its program."""

    variant: str
    threads: int
    dtype: torch.dtype
    generator: torch.Generator

    def numbers(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draw normal numbers in ``dtype``, by default the case's own."""
        return torch.randn(shape, generator=self.generator).to(self.dtype if dtype is None else dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Draw integers from 0 to ``high`` - 1."""
        return torch.randint(high, shape, generator=self.generator)

    def maybe(self, x: Tensor) -> Tensor | None:
        """Return x, or None."""
        return x if int(self.integers(2)) else None


cases = st.builds(
    Case,
    st.sampled_from([*LIBRARIES] or [""]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(library.DTYPES),
    st.integers(0, 1 << 32).map(lambda seed: torch.Generator().manual_seed(seed)),
)
sizes, counts = st.integers(1, 100), st.one_of(st.integers(1, 30), st.sampled_from([33, 50]))


class Program:
    """Operations on the rows of some tokens."""

    def __init__(self, case: Case, tokens: int, **step: Any) -> None:
        self.case, self.tokens = case, tokens
        self.ops: list[library.Op] = []
        self._widths: list[int] = []
        self._referenced: list[object] = []
        self._step = {"token_ids": torch.arange(tokens), "positions": torch.arange(tokens)} | step

    def op(self, kind: str, **fields: Any) -> None:
        fields = {"type": library.DTYPES.index(self.case.dtype), "scale": 1.0} | fields
        self.ops.append(
            library.Op(kind=library.OPERATIONS.index(kind), **{k: self._pointer(x) for k, x in fields.items()})
        )

    def _pointer(self, x: Any) -> Any:
        self._referenced.append(x)
        return (
            x.data_ptr()
            if isinstance(x, Tensor)
            else ctypes.addressof(x)
            if isinstance(x, ctypes.Structure | ctypes.Array)
            else x
        )

    def buffer(self, numbers: int, dtype: torch.dtype) -> int:
        self._widths.append(numbers * dtype.itemsize)
        return len(self._widths) - 1

    def input(self, x: Tensor) -> int:
        """Return a buffer with the rows x [T, k] in its dtype, ``padded(k)`` numbers each."""
        stride, k = padded(x.shape[1]), x.shape[1]
        rows = self.buffer(stride, FLOAT)
        self.op("embed", type=0, out=rows, out_stride=stride, k=k, weight=x.float().contiguous())
        if x.dtype is FLOAT:
            return rows
        narrow = self.buffer(stride, BFLOAT)
        self.op("norm", type=1, input=rows, out=narrow, in_stride=stride, out_stride=stride, k=k)
        return narrow

    def read(self, buffer: int, width: int, dtype: torch.dtype) -> Tensor:
        """Run, and return the first ``width`` numbers of each row [T, width] of a buffer."""
        stride = self._widths[buffer] // dtype.itemsize
        out = self.buffer(stride, dtype)
        kind = library.DTYPES.index(dtype)
        self.op("select", type=kind, input=buffer, out=out, k=stride * dtype.itemsize, n=width)
        hidden, rows = torch.full((self.tokens, width), math.nan), torch.arange(self.tokens)
        self.run(num_hidden=self.tokens, hidden_indices=rows, hidden=hidden)
        return hidden

    def run(self, **step: Any) -> None:
        operations, widths = (library.Op * len(self.ops))(*self.ops), torch.tensor(self._widths or [0])
        addresses = ctypes.addressof(operations), widths.data_ptr()
        program = library.Program(*addresses, len(operations), len(self._widths), self.case.threads)
        given_step = {name: self._pointer(x) for name, x in (self._step | step).items()}
        step_input = library.StepInput(tokens=self.tokens, **given_step)
        LIBRARIES[self.case.variant].step(program, step_input)
        LIBRARIES[self.case.variant].free(program)


def padded(numbers: int) -> int:
    return -(-numbers // PANEL) * PANEL


def fill(x: Tensor | None, size: int) -> Tensor | None:
    """Return x [.., n] in float32 with zeros up to ``size``."""
    return None if x is None else F.pad(x.float(), (0, size - x.shape[-1])).contiguous()


def packed(*matrices: Tensor | QuantizedMatrix, variant: str, interleaved: bool = False) -> Tensor:
    weights, files = library.PackedWeights(), library.FileMappings()
    return weights.panels(LIBRARIES[variant], matrices, files, interleaved=interleaved)


def assert_near(
    actual: Tensor, expected: Tensor, magnitude: Tensor, dtype: torch.dtype, error: float = FLOAT_ERROR
) -> None:
    """Compare with float64 numbers; ``magnitude``: of what is added for each."""
    allowed = error * magnitude + (BFLOAT_ERROR * expected.abs() if dtype is BFLOAT else 0) + 1e-30
    worst = ((actual.double() - expected).abs() / allowed).max()
    assert bool(worst <= 1), f"{float(worst):.3g} times the allowed error"


# ---------------------------------------------------------------- rows


@given(cases, counts, sizes, st.sampled_from([1.0, 3.5]), st.booleans())
def test_embeddings(case: Case, tokens: int, k: int, scale: float, with_positions: bool) -> None:
    table, ids = case.numbers(7, k), case.integers(7, tokens)
    positions, offset = case.integers(20, tokens), 2
    added = case.numbers(22, k, dtype=FLOAT) if with_positions else None
    program = Program(case, tokens, token_ids=ids, positions=positions)
    out = program.buffer(padded(k), FLOAT)
    program.op("embed", out=out, out_stride=padded(k), k=k, scale=scale, weight=table, bias=added, bias_offset=offset)
    rows = program.read(out, padded(k), FLOAT)
    expected = table[ids].double() * scale
    size = expected.abs()
    if added is not None:
        expected, size = expected + added[positions + offset], size + added[positions + offset].abs()
    assert_near(rows[:, :k], expected, size, FLOAT)
    assert not rows[:, k:].any()


@given(cases, counts, st.integers(2, 100), st.integers(0, 3), st.sampled_from(library.NORMS), st.booleans())
def test_norms(case: Case, tokens: int, k: int, heads: int, kind: str, to_float: bool) -> None:
    """``heads``: each of that many parts of a row is normalized; 0: the whole row, and zeros follow it."""
    own, parts, scale, eps = bool(heads % 2), max(1, heads), 1.5, 1e-5
    x = case.numbers(tokens, parts * k, dtype=FLOAT)
    weight = case.maybe(case.numbers(parts if own else 1, k, dtype=FLOAT))
    bias = case.maybe(case.numbers(parts if own else 1, k, dtype=FLOAT))
    dtype, stride = FLOAT if to_float else case.dtype, padded(parts * k)
    program = Program(case, tokens)
    source, out = program.input(x), program.buffer(stride, dtype)
    program.op("norm", input=source, out=out, in_stride=stride, out_stride=stride, k=k, heads=heads, weight=weight,
               bias=bias, mode=library.NORMS.index(kind), eps=eps, scale=scale, own_weights=own,
               out_float=to_float)  # fmt: skip
    rows = program.read(out, stride if not heads else parts * k, dtype)
    expected = x.double().unflatten(1, (parts, k))
    if kind == "layer":
        expected = F.layer_norm(expected, (k,), eps=eps)
    elif kind == "rms":
        expected = F.rms_norm(expected, (k,), eps=eps)
    expected = expected * scale
    expected = expected if weight is None else expected * weight
    # A layer norm subtracts a mean from which a number may hardly differ.
    size = expected.abs() + (4 * scale * (1 if weight is None else weight.double().abs()) if kind == "layer" else 0)
    if bias is not None:
        expected, size = expected + bias, size + bias.abs()
    assert_near(rows[:, : parts * k], expected.flatten(1), size.flatten(1), dtype)
    assert not rows[:, parts * k :].any()


@given(cases, counts, sizes)
def test_sums_and_gates(case: Case, tokens: int, k: int) -> None:
    stream, branch, gates = (case.numbers(tokens, k, dtype=FLOAT) for _ in range(3))
    program, stride = Program(case, tokens), padded(k)
    out = program.input(stream)
    program.op("add", input=program.input(branch), out=out, in_stride=stride, out_stride=stride, k=k, scale=0.7)
    expected = stream.double() + branch.double() * torch.tensor(0.7).double()
    assert_near(program.read(out, k, FLOAT), expected, stream.abs() + branch.abs(), FLOAT)
    x = case.numbers(tokens, k)
    for own in (True, False):
        program = Program(case, tokens)
        out, factors = program.input(x), program.input(gates)
        program.op("gate", input=factors, out=out, in_stride=stride, out_stride=stride, k=k, own_weights=own,
                   out_float=x.dtype is FLOAT)  # fmt: skip
        expected = x.double() * (gates if own else gates[:, :1]).double().sigmoid()
        assert_near(program.read(out, k, case.dtype), expected, expected.abs(), case.dtype, 2.0**-16)


# ---------------------------------------------------------------- products


class Product(NamedTuple):
    """A product of rows with a weight; what is done with it depends on ``mode``."""

    x: Tensor  # [T, k]
    out: Tensor  # x W', [T, n], float64
    size: Tensor  # of the magnitudes that are added


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Product:
    out, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    return Product(x, out, size) if bias is None else Product(x, out + bias, size + bias.abs())


@given(cases, counts, sizes, sizes, st.sampled_from(["float", "add", "activated", "logits"]), st.data())
def test_products(case: Case, tokens: int, k: int, n: int, mode: str, data: st.DataObject) -> None:
    x, weight, bias = case.numbers(tokens, k), case.numbers(n, k), case.maybe(case.numbers(n))
    program, inputs = Program(case, tokens), -(-k // 2) * 2
    known = product(x, weight, bias)
    panels = packed(weight, variant=case.variant)
    check_product(program, known, panels, mode, data, k=inputs, bias=fill(bias, len(panels)))


def check_product(
    program: Program, known: Product, panels: Tensor, mode: str, data: st.DataObject, **fields: Any
) -> None:
    case, (tokens, n) = program.case, known.out.shape
    expected, size = known.out, known.size
    stride, at = padded(n) + PANEL, data.draw(st.sampled_from([0, 5]))
    fields |= {"mode": library.OUTPUT_MODES.index(mode), "weight": panels, "in_stride": padded(known.x.shape[1])}
    source = program.input(known.x)
    if mode == "logits":
        scale, cap, valid = 0.25, data.draw(st.sampled_from([0.0, 3.0])), data.draw(st.integers(1, n))
        logits, best = torch.full((tokens, n), math.nan), torch.full((tokens,), -2, dtype=torch.int32)
        program.op("linear", input=source, n=n, scale=scale, softcap=cap, **fields)
        program.run(num_logits=tokens, logits=logits, best=best, num_tokens=valid)
        expected, size = expected * scale, size * scale
        expected = cap * (expected / cap).tanh() if cap else expected
        assert_near(logits, expected, size + (cap or 0), FLOAT)
        assert best.tolist() == logits[:, :valid].argmax(1).tolist()
        return
    if mode == "activated":
        name = data.draw(st.sampled_from(sorted(ACTIVATIONS)))
        out = program.buffer(stride, case.dtype)
        program.op(
            "linear",
            input=source,
            out=out,
            out_stride=stride,
            n=padded(n),
            activation=library.ACTIVATIONS.index(name),
            **fields,
        )
        expected = ACTIVATIONS[name](expected)
        slope = 1.2 if name != "relu2" else 2 * (known.out.abs() + 1)
        assert_near(program.read(out, n, case.dtype), expected, slope * size + 1e-1, case.dtype, 4 * FLOAT_ERROR)
        return
    stream = case.numbers(tokens, stride, dtype=FLOAT)
    out, clip = program.input(stream), data.draw(st.sampled_from([0.0, 2.0]))
    scale = 0.7 if mode == "add" else 1.0
    program.op(
        "linear", input=source, out=out, out_stride=stride, out_offset=at, n=padded(n), clip=clip, scale=scale, **fields
    )
    expected = expected.clamp(-clip, clip) if clip else expected
    if mode == "add":
        before = stream[:, at : at + n].double()
        expected, size = before + expected * torch.tensor(scale).double(), size + before.abs()
    rows = program.read(out, stride, FLOAT)
    assert_near(rows[:, at : at + n], expected, size, FLOAT)
    untouched = [*range(at), *range(at + padded(n), stride)]
    assert torch.equal(rows[:, untouched], stream[:, untouched])


@given(cases, counts, sizes, sizes, st.sampled_from(sorted(ACTIVATIONS)))
def test_gated_products(case: Case, tokens: int, k: int, n: int, activation: str) -> None:
    x, gate, up = case.numbers(tokens, k), case.numbers(n, k), case.numbers(n, k)
    program, half = Program(case, tokens), -(-n // 16) * 16
    source, out = program.input(x), program.buffer(padded(half), case.dtype)
    program.op("linear", input=source, out=out, in_stride=padded(k), out_stride=padded(half), n=2 * half,
               k=-(-k // 2) * 2, weight=packed(gate, up, variant=case.variant, interleaved=True),
               mode=library.OUTPUT_MODES.index("gated"), activation=library.ACTIVATIONS.index(activation))  # fmt: skip
    first, second = product(x, gate, None), product(x, up, None)
    active = ACTIVATIONS[activation](first.out)
    slope = 1.2 if activation != "relu2" else 2 * first.out.abs() + 1
    size = slope * first.size * second.out.abs() + active.abs() * second.size + 0.1 * second.size
    assert_near(program.read(out, n, case.dtype), active * second.out, size, case.dtype, 4 * FLOAT_ERROR)


def quantized(case: Case, weight: Tensor, form: str, group: int) -> QuantizedMatrix:
    """Quantize a matrix [n, k]; random numbers of its size for E2M1, which ``quantize_matrix`` does not make."""
    if form != "e2m1":
        return quantize_matrix(weight, int(form[-1]), group)
    (n, k), step = weight.shape, float(weight.abs().max()) / 16
    scale = step * 2.0 ** case.integers(3, n, k // group).float()
    return QuantizedMatrix(case.integers(256, n, k // 2).to(torch.uint8), scale, None, 4, group)


def fields_of(matrix: QuantizedMatrix, rounded: bool) -> dict[str, Any]:
    """Return the fields of a product by a matrix; ``rounded``: its inputs are rounded to 8 bits."""
    form = matrix.format
    fields = {"bits": form.bits, "quantized_group": form.group_size, "is_e2m1": form.is_e2m1}
    return fields | {"half_scales": form.scale_dtype is torch.float16, "activation_bits": 8 if rounded else 0}


@given(
    cases,
    counts,
    st.sampled_from([2, 6, 8, 32, 128, 130, 600]),
    st.integers(1, 4),
    sizes,
    st.sampled_from(["int4", "int8", "e2m1"]),
    st.data(),
)
def test_quantized_products(
    case: Case, tokens: int, group: int, groups: int, n: int, form: str, data: st.DataObject
) -> None:
    """With ``activation_bits``, and in bfloat16, a block of inputs has one scale, which limits what is lost of each."""
    rounded, k = data.draw(st.booleans()), group * groups
    matrix = quantized(case, case.numbers(n, k, dtype=FLOAT), form, group)
    matrix = matrix.with_half_scales() if data.draw(st.booleans()) else matrix
    x, bias = case.numbers(tokens, k), case.maybe(case.numbers(n))
    program = Program(case, tokens)
    known = product(x, matrix.dequantize(torch.float64), bias)
    tops = x.double().abs().unflatten(1, (-1, group)).amax(-1, keepdim=True).expand(-1, -1, group).flatten(1)
    lost = tops @ matrix.dequantize(torch.float64).abs().T  # in units of the integers' step
    if rounded:
        weight = matrix.dequantize(torch.float64)
        known = known._replace(out=product(round_inputs(x.double(), group), weight, bias).out)
    step = (2.0**-8 if rounded else 2.0**-16) if case.dtype is BFLOAT or rounded else 0.0
    known = known._replace(size=known.size + lost * step / FLOAT_ERROR)
    panels = packed(matrix, variant=case.variant)
    mode = data.draw(st.sampled_from(["float", "add", "activated", "logits"]))
    rows = padded(n)
    check_product(program, known, panels, mode, data, k=k, bias=fill(bias, rows), **fields_of(matrix, rounded))


@given(
    cases,
    st.sampled_from([2, 14, 33, 70]),
    st.sampled_from([(2, 2), (30, 30), (96, 32), (64, 64), (600, 600)]),
    sizes,
    st.sampled_from(["", "int4", "int8", "e2m1"]),
    st.booleans(),
)
def test_a_row_has_the_same_product_among_others(
    case: Case, tokens: int, shape: tuple[int, int], n: int, form: str, rounded: bool
) -> None:
    (k, group), weight = shape, case.numbers(n, shape[0], dtype=FLOAT if form else None)
    matrix = quantized(case, weight, form, group) if form else weight
    fields = fields_of(matrix, rounded) if isinstance(matrix, QuantizedMatrix) else {}
    panels, x = packed(matrix, variant=case.variant), case.numbers(tokens, k)

    for few in (1, tokens // 2):
        assert torch.equal(linear(case, x[:few], panels, n, **fields), linear(case, x, panels, n, **fields)[:few])


def linear(case: Case, x: Tensor, panels: Tensor, n: int, **fields: Any) -> Tensor:
    """Return the product of x and packed weights of n rows."""
    program, k = Program(case, len(x)), x.shape[1]
    source, out = program.input(x), program.buffer(padded(n), FLOAT)
    program.op("linear", input=source, out=out, in_stride=padded(k), out_stride=padded(n), n=padded(n), k=k,
               weight=panels, **fields)  # fmt: skip
    return program.read(out, n, FLOAT)


@pytest.mark.parametrize("variant", LIBRARIES)
@pytest.mark.parametrize("dtype", library.DTYPES, ids=str)
def test_a_product_in_parts_of_rows_and_inputs(variant: str, dtype: torch.dtype) -> None:
    case = Case(variant, 2, dtype, torch.Generator().manual_seed(1))
    x, weight = case.numbers(300, 4100), case.numbers(600, 4100)
    panels, known = packed(weight, variant=variant), product(x, weight, None)
    result = linear(case, x, panels, 600)
    assert_near(result, known.out, known.size, FLOAT)
    for few in (1, 40, 260):
        assert torch.equal(linear(case, x[:few], panels, 600), result[:few])


@given(cases, counts, sizes, st.integers(1, 5), sizes)
def test_terms_of_adapters(case: Case, tokens: int, k: int, rank: int, n: int) -> None:
    """Each token adds the terms of its own adapter, if any: to all columns, to the last, or to the first panel's."""
    x, weight, numbers = case.numbers(tokens, k), case.numbers(n, k), case.integers(4, tokens).int()
    spans = [(0, n), ((n - 1) // PANEL * PANEL, n), (0, min(n, PANEL))]
    adapters, referenced = (library.Adapter * len(spans))(), []
    expected = product(x, weight, None)
    out, size = expected.out.clone(), expected.size.clone()
    for number, (low, high) in enumerate(spans):
        a, b = case.numbers(rank, k, dtype=FLOAT), case.numbers(high - low, rank, dtype=FLOAT)
        columns = fill(b.T, padded(len(b)))
        assert columns is not None
        blocks = columns.unflatten(1, (-1, PANEL)).contiguous()
        terms = (library.LoraTerm * 1)((a.data_ptr(), blocks.data_ptr(), rank, low // PANEL, blocks.shape[1]))
        adapters[number].terms, adapters[number].num_terms = ctypes.addressof(terms), 1
        referenced += [a, blocks, terms]
        rows = numbers == number + 1
        out[rows, low:high] += x[rows].double() @ a.double().T @ b.double().T
        size[rows, low:high] += x[rows].double().abs() @ a.double().abs().T @ b.double().abs().T
    program = Program(case, tokens, adapters=numbers)
    source, low, to = program.input(x), program.buffer(padded(rank), FLOAT), program.buffer(padded(n), FLOAT)
    program.op(
        "lora", input=source, out=low, in_stride=padded(k), out_stride=padded(rank), n=rank, k=k, adapters=adapters
    )
    program.op("linear", input=source, out=to, in_stride=padded(k), out_stride=padded(n), n=padded(n), k=-(-k // 2) * 2,
               weight=packed(weight, variant=case.variant), adapters=adapters, low=low, low_stride=padded(rank),
               mode=library.OUTPUT_MODES.index("float"))  # fmt: skip
    assert_near(program.read(to, n, FLOAT), out, size, FLOAT)


@given(cases, counts, sizes, st.integers(1, 50), st.data())
def test_experts(case: Case, tokens: int, width: int, inner: int, data: st.DataObject) -> None:
    """Experts whose router's choice is clear: PyTorch in float64 could choose others of equal ones."""
    form = data.draw(st.sampled_from(["", "int4", "int8", "e2m1"]))
    if form:
        width, inner, tokens = padded(width), padded(inner), 2 * tokens
    bias, alpha, per_group = (
        data.draw(st.booleans()),
        data.draw(st.sampled_from([None, 1.7])),
        data.draw(st.integers(1, 3)),
    )
    groups = data.draw(st.sampled_from([1, 3])) if per_group > 1 else 1
    count = groups * per_group if groups > 1 else 5
    spec = cfg.MoEConfig(
        inner, count, data.draw(st.integers(1, 2)), bias=bias, router_bias=bias, routed_scale=1.5,
        router=data.draw(st.sampled_from(["softmax", "sigmoid"])), renormalize=data.draw(st.booleans()),
        selection_bias=data.draw(st.booleans()), num_groups=groups, num_groups_per_token=min(2, groups),
        swiglu_alpha=alpha, swiglu_limit=2.0 if alpha else None,
        activation=data.draw(st.sampled_from(["silu", "gelu"])) if alpha is None else "silu",
    )  # fmt: skip
    mlp = MixtureOfExperts(width, spec).requires_grad_(False)
    for name, parameter in mlp.named_parameters():
        scale = width**-0.5 if "router" in name or "gate" in name or "up" in name else inner**-0.5
        parameter.data = (case.numbers(*parameter.shape) * scale).float()
    rounded, matrices = bool(form) and data.draw(st.booleans()), None
    if form:
        group = data.draw(st.sampled_from([8, 32]))
        matrices = {name: quantized(case, getattr(mlp, name).flatten(0, 1), form, group) for name in MATRICES}
        for name, matrix in matrices.items():
            getattr(mlp, name).data = matrix.dequantize(FLOAT).view_as(getattr(mlp, name))
    x, stream = case.numbers(tokens, width), case.numbers(tokens, width, dtype=FLOAT)
    program, experts = Program(case, tokens), expert_weights(case, mlp, matrices, rounded)
    source, out = program.input(x), program.input(stream)
    program.op("experts", input=source, out=out, in_stride=padded(width), out_stride=padded(width), k=width, n=width,
               mode=library.OUTPUT_MODES.index("add"), scale=0.7, experts=experts.struct,
               activation=0 if alpha else library.ACTIVATIONS.index(spec.activation))  # fmt: skip
    expected, size = expected_of_experts(deepcopy(mlp).double(), x.double())
    expected, size = stream.double() + expected * torch.tensor(0.7).double(), stream.double().abs() + size
    # In bfloat16, shares and inner numbers are rounded. Inputs that are rounded to 8 bits may be rounded differently.
    error = 2.0**-5 if rounded else 2.0**-16 if case.dtype is FLOAT else 2.0**-7
    assert_near(program.read(out, width, FLOAT), expected, size, FLOAT, error)


MATRICES = ("gate", "up", "down")


class ExpertWeights(NamedTuple):
    struct: library.Experts
    referenced: list[object]  # what it points to


def expert_weights(
    case: Case, mlp: MixtureOfExperts, quantized: dict[str, QuantizedMatrix] | None, rounded: bool
) -> ExpertWeights:
    """Pack the experts' weights as the kernels read them."""
    spec, (experts, inner, width) = mlp.spec, mlp.gate.shape
    gate, up, down = (getattr(mlp, name).to(case.dtype) if quantized is None else quantized[name] for name in MATRICES)
    pairs = None
    if mlp.gate_bias is not None and mlp.up_bias is not None:
        halves = [fill(bias, padded(inner)) for bias in (mlp.gate_bias, mlp.up_bias)]
        pairs = torch.stack([x.unflatten(1, (-1, PANEL // 2)) for x in halves if x is not None], dim=2).contiguous()
    program = Program(case, 0)
    for matrices, bias, k in (((gate, up), pairs, width), ((down,), fill(mlp.down_bias, padded(width)), inner)):
        form: dict[str, Any] = {"k": -(-k // 2) * 2}
        if isinstance(matrices[0], QuantizedMatrix):
            form |= fields_of(matrices[0], rounded)
        panels = packed(*matrices, variant=case.variant, interleaved=len(matrices) == 2)
        program.op("linear", in_stride=padded(k), weight=panels, bias=bias, **form)
    tensors = [fill(mlp.router.weight, padded(width)), mlp.router.bias, mlp.selection_bias]
    struct = library.Experts(
        *(None if x is None else x.data_ptr() for x in tensors), *map(ctypes.addressof, program.ops),
        experts, spec.num_experts_per_token, inner,
        spec.num_groups, spec.num_groups_per_token, spec.router == "sigmoid", spec.renormalize,
        spec.routed_scale, -1.0, spec.swiglu_alpha or 0.0, spec.swiglu_limit or 0.0,
    )  # fmt: skip
    return ExpertWeights(struct, [*tensors, program])


def expected_of_experts(mlp: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output in float64, and the sums of the magnitudes of what the chosen experts add."""
    routings: list[Any] = []
    out = mlp(x, routings)
    shares, chosen = mlp._choose(routings[0].logits)
    weights = torch.zeros_like(routings[0].logits).scatter_(1, chosen, shares)
    gate, up = (torch.einsum("tw,eiw->tei", x.abs(), matrix.abs()) for matrix in (mlp.gate, mlp.up))
    size = torch.einsum("te,tei,ewi->tw", weights, (gate + 1) * (up + 2), mlp.down.abs())
    size = size if mlp.down_bias is None else size + weights @ mlp.down_bias.abs()
    return out, size


# ---------------------------------------------------------------- the cache


class Stored(NamedTuple):
    """Keys or values of a layer in a format."""

    struct: library.Store
    arrays: tuple[Tensor, ...]
    format_name: str

    def decode(self) -> Tensor:
        """Return the numbers [K, blocks, block_size, D] in float64."""
        return get_codec(self.format_name).decode(self.arrays, torch.float64)


def stored(x: Tensor, format_name: str) -> Stored:
    arrays = tuple(array.contiguous() for array in get_codec(format_name).encode(x))
    pointers = [array.data_ptr() for array in arrays] + [0, 0]
    struct = library.Store(*pointers[:3], x.shape[1], library.STORE_FORMATS.index(format_name))
    return Stored(struct, arrays, format_name)


def rounding(x: Tensor, format_name: str, scale: Tensor | None) -> Tensor:
    """Return half of a format's step at numbers x, whose group has a scale."""
    relative = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, "fp8-e4m3": 2.0**-4, "fp8-e5m2": 2.0**-3}
    smallest = {"float16": 2.0**-25, "fp8-e4m3": 2.0**-10, "fp8-e5m2": 2.0**-17}
    if scale is not None:
        return scale.double().expand_as(x) / 2
    return x.abs() * relative[format_name] + smallest.get(format_name, 0.0)


formats = st.sampled_from(library.STORE_FORMATS)


@given(
    cases,
    counts,
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(1, 40),
    formats,
    formats,
    st.data(),
)
def test_rotation_and_cache_writes(
    case: Case, tokens: int, kv_heads: int, group: int, dim: int, value_dim: int, key_format: str, value_format: str,
    data: st.DataObject,
) -> None:  # fmt: skip
    dim, value_dim = dim + dim % 2 * (key_format == "int4"), value_dim + value_dim % 2 * (value_format == "int4")
    heads, block_size = kv_heads * group, data.draw(st.sampled_from([1, 4, 16]))
    rotary_dim, interleaved = 2 * data.draw(st.integers(0, dim // 2)), data.draw(st.booleans())
    blocks = -(-tokens // block_size) + 1
    slots = torch.randperm(blocks * block_size, generator=case.generator)[:tokens]
    positions = case.integers(200, tokens)
    x = case.numbers(tokens, (heads + kv_heads) * dim + kv_heads * value_dim, dtype=FLOAT)
    scales = case.maybe(1 + case.numbers(200, dtype=FLOAT).abs())
    rotary = Rotary(1 / 100 ** torch.linspace(0, 1, rotary_dim // 2), interleaved, 1.25)
    shape = kv_heads, blocks, block_size
    keys, values = stored(torch.zeros(*shape, dim), key_format), stored(torch.zeros(*shape, value_dim), value_format)
    slot_positions = torch.full((blocks, block_size), -1)
    cache_group = library.GroupInput(slots.data_ptr(), slot_positions.data_ptr(), block_size=block_size)
    program = Program(case, tokens, positions=positions, num_groups=1, groups=cache_group)
    source, angles, even = program.input(x), program.buffer(max(1, rotary_dim), FLOAT), dim + dim % 2
    if rotary_dim:
        program.op(
            "angles", out=angles, out_stride=rotary_dim, rotary_dim=rotary_dim, weight=rotary.inv_freq, scale=1.25
        )
    out = program.buffer(padded(heads * even), case.dtype)
    program.op("rotate", input=source, out=out, in_stride=padded(x.shape[1]), out_stride=padded(heads * even),
               heads=heads, kv_heads=kv_heads, head_dim=dim, value_dim=value_dim, keys=keys.struct,
               values=values.struct, angles=angles, rotary_dim=rotary_dim, interleaved=interleaved,
               query_scale=scales)  # fmt: skip
    queries = program.read(out, heads * even, case.dtype).unflatten(1, (heads, even))

    q, k, v = x.double().split([heads * dim, kv_heads * dim, kv_heads * value_dim], dim=1)
    q, k, v = q.unflatten(1, (heads, dim)), k.unflatten(1, (kv_heads, dim)), v.unflatten(1, (kv_heads, value_dim))
    q = q if scales is None else q * scales[positions][:, None, None]
    if rotary_dim:
        rotations = RotaryCache(positions)
        q, k = rotations.rotate(q, rotary), rotations.rotate(k, rotary)
    longest = q.norm(dim=-1, keepdim=True).expand_as(q)
    assert_near(queries[..., :dim], q, longest, case.dtype)
    assert not queries[..., dim:].any()
    assert slot_positions.flatten()[slots].tolist() == positions.tolist() and int((slot_positions >= 0).sum()) == tokens
    for store, written in ((keys, k), (values, v)):
        numbers = store.decode().flatten(1, 2)
        scale = store.arrays[1].flatten(1, 2)[:, slots].transpose(0, 1) if len(store.arrays) > 1 else None
        allowed = rounding(written, store.format_name, scale) * 1.01 + 2.0**-16 * written.norm(dim=-1, keepdim=True)
        assert bool(((numbers[:, slots].transpose(0, 1) - written).abs() <= allowed).all())
        others = sorted({*range(blocks * block_size)} - {*slots.tolist()})
        assert not numbers[:, others].any()


PATTERNS = {
    "causal": AttentionPattern(),
    "window": AttentionPattern(window=37),
    "sinks": AttentionPattern(window=37, num_sinks=4),
    "window-step": AttentionPattern(window=37, num_sinks=4, window_step=8),
    "layer-window": AttentionPattern(layer_window=21),
    "two-sided": AttentionPattern(causal=False),
    "two-sided-window": AttentionPattern(causal=False, window=37),
}
FEATURES = ("plain", "softcap", "alibi", "buckets", "sink-logits", "all")
batches = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 20), st.sampled_from([0, 5, 90, 300])), min_size=1, max_size=2
)


class SubBatch(NamedTuple):
    """Sequences with as many new tokens each: tables [num_seqs, width]; slots to read of a sequence."""

    table: Tensor
    num_new: int
    slots: int


def attend(
    case: Case, x: Tensor, positions: Tensor, sub_batches: list[SubBatch], keys: Stored, values: Stored,
    slot_positions: Tensor, pattern: AttentionPattern, **fields: Any,
) -> Tensor:  # fmt: skip
    """Return the attention [T, H, D] of queries x of the same shape."""
    entries = (library.SubBatchTable * len(sub_batches))()
    for entry, (table, num_new, slots) in zip(entries, sub_batches, strict=True):
        entry.num_seqs, entry.width, entry.table = *table.shape, table.data_ptr()
        entry.num_new, entry.slots = num_new, slots
    group = library.GroupInput(
        None, slot_positions.data_ptr(), ctypes.addressof(entries), len(entries), slot_positions.shape[1],
        pattern.causal, pattern.window or 0, pattern.num_sinks, pattern.window_step, pattern.layer_window or 0,
    )  # fmt: skip
    (tokens, heads, dim), kv_heads, value_dim = x.shape, len(values.decode()), values.decode().shape[-1]
    program, even = Program(case, tokens, positions=positions, num_groups=1, groups=group), dim + dim % 2
    source = program.input(F.pad(x, (0, even - dim)).flatten(1))
    out = program.buffer(padded(heads * value_dim), case.dtype)
    program.op("attend", input=source, out=out, in_stride=padded(heads * even), out_stride=padded(heads * value_dim),
               heads=heads, kv_heads=kv_heads, head_dim=dim, value_dim=value_dim, keys=keys.struct,
               values=values.struct, **fields)  # fmt: skip
    return program.read(out, heads * value_dim, case.dtype).unflatten(1, (heads, value_dim)).double()


def spoil(store: Stored, slots: Tensor) -> None:
    """Make some slots NaN, if a format's numbers or scales can be."""
    for array in store.arrays:
        if array.is_floating_point() and array.element_size() > 1:
            array[:, slots] = math.nan


patterns, features_of_logits = st.sampled_from(sorted(PATTERNS)), st.sampled_from(FEATURES)


@given(cases, batches, st.integers(1, 2), st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), formats, formats,
       patterns, features_of_logits, st.sampled_from([1, 4, 16, 0]))  # fmt: skip
def test_attention(
    case: Case, shapes: list[tuple[int, int, int]], kv_heads: int, group: int, dim: int, value_dim: int,
    key_format: str, value_format: str, pattern: str, features: str, block_size: int,
) -> None:  # fmt: skip
    dim, value_dim = dim + dim % 2 * (key_format == "int4"), value_dim + value_dim % 2 * (value_format == "int4")
    check_attention(case, shapes, (kv_heads, group, dim, value_dim), (key_format, value_format), pattern, features,
                    block_size)  # fmt: skip


@given(cases, batches, st.integers(1, 2), st.integers(1, 8), st.sampled_from([32, 64, 96, 128, 160]),
       st.sampled_from([32, 64, 96, 128]), st.sampled_from(["", "int8", "int8", "int4"]), patterns, features_of_logits,
       st.sampled_from([8, 16, 48, 320]))  # fmt: skip
def test_attention_to_vectors_of_whole_panels(
    case: Case, shapes: list[tuple[int, int, int]], kv_heads: int, group: int, dim: int, value_dim: int,
    packed_format: str, pattern: str, features: str, block_size: int,
) -> None:  # fmt: skip
    """Kernels read them where they are stored, if few queries attend to blocks of whole tiles."""
    name = packed_format or ("bfloat16" if case.dtype is BFLOAT else "float32")
    check_attention(case, shapes, (kv_heads, group, dim, value_dim), (name, name), pattern, features, block_size)


def check_attention(
    case: Case, shapes: list[tuple[int, int, int]], sizes: tuple[int, int, int, int], formats: tuple[str, str],
    pattern_name: str, features: str, block_size: int,
) -> None:  # fmt: skip
    """Sequences of different lengths, half of them with gaps; empty slots are NaN if they can be.

    ``block_size`` 0: a sequence is one block.
    """
    (kv_heads, group, dim, value_dim), pattern = sizes, PATTERNS[pattern_name]
    heads = kv_heads * group
    longest = max(context + new for _, new, context in shapes)
    block_size = block_size or longest + 3
    widths = [-(-(context + new) // block_size) for _, new, context in shapes]
    blocks = 1 + sum(seqs * width for (seqs, _, _), width in zip(shapes, widths, strict=True))
    order = (1 + torch.randperm(blocks - 1, generator=case.generator)).tolist()
    keys = stored(case.numbers(kv_heads, blocks, block_size, dim, dtype=FLOAT), formats[0])
    values = stored(case.numbers(kv_heads, blocks, block_size, value_dim, dtype=FLOAT), formats[1])
    slot_positions, positions = torch.full((blocks, block_size), -1), []
    sub_batches = []
    for (seqs, new, context), width in zip(shapes, widths, strict=True):
        table = torch.zeros(seqs, width, dtype=torch.int64)
        for row in range(seqs):
            end, has_gaps = max(0, context - 40 * row) + new, int(case.integers(2))
            for block in range(-(-end // block_size)):
                table[row, block] = order.pop()
            for position in range(end):
                if position >= end - new or not has_gaps or int(case.integers(9)):
                    slot_positions[table[row, position // block_size], position % block_size] = position
            positions.append(torch.arange(end - new, end))
        sub_batches.append(SubBatch(table, new, context + new if width == 1 else width * block_size))
    known = [store.decode() for store in (keys, values)]
    for store in (keys, values):
        spoil(store, slot_positions < 0)
    x = case.numbers(sum(map(len, positions)), heads, dim)
    slopes = torch.rand(heads, generator=case.generator) / 8 if features in ("alibi", "all") else None
    sinks = case.numbers(heads, dtype=FLOAT) if features in ("sink-logits", "all") else None
    softcap, scale = 5.0 if features in ("softcap", "all") else None, dim**-0.5
    buckets = case.numbers(8, heads, dtype=FLOAT) if features == "buckets" else None
    bias = AlibiSlopes(slopes.double()) if slopes is not None else None
    fields: dict[str, Any] = {"slopes": slopes, "sink_logits": sinks, "softcap": softcap or 0.0, "scale": scale}
    if buckets is not None:
        far = 20
        ahead = torch.arange(far if not pattern.causal else 0, -far - 1, -1)
        rows = buckets[t5_bucket(ahead, 8, far, not pattern.causal)].T.contiguous()
        fields |= {"position_bias": rows, "bias_size": len(ahead), "bias_offset": int(ahead[0])}
    actual = attend(case, x, torch.cat(positions), sub_batches, keys, values, slot_positions, pattern, **fields)

    params = AttentionParams(scale, softcap, bias=bias, sink_logits=None if sinks is None else sinks.double())
    if buckets is not None:
        params = params._replace(bias=RelativeBuckets(buckets.double(), far, not pattern.causal))
    largest = float(known[1].abs().max())
    # Logits, weights and what is summed have the precision of the queries.
    error = (2.0**-18 if case.dtype is FLOAT else 2.0**-5) * largest
    start = 0
    for (seqs, new, _), (table, _, _) in zip(shapes, sub_batches, strict=True):
        q = x[start : start + seqs * new].double().unflatten(0, (seqs, new))
        k, v = (numbers[:, table].transpose(0, 1).flatten(2, 3) for numbers in known)
        at = torch.cat(positions)[start : start + seqs * new].unflatten(0, (seqs, new))
        mask = AttentionMask(TokenPositions(at), TokenPositions(slot_positions[table].flatten(1)), pattern)
        expected = dot_product_attention(q, k, v, mask, params, kernel="reference").out
        assert float((actual[start : start + seqs * new].unflatten(0, (seqs, new)) - expected).abs().max()) <= error
        start += seqs * new


@pytest.mark.parametrize("variant", LIBRARIES)
@pytest.mark.parametrize("format_name", ["bfloat16", "float32", "int8", "int4"])
@pytest.mark.parametrize("pattern", ["causal", "sinks"])
@settings(max_examples=5)
@given(cases, st.sampled_from([32, 64, 128, 160]), st.integers(1, 8), st.sampled_from([8, 16, 48]))
def test_a_query_has_the_same_attention_among_others(
    variant: str, format_name: str, pattern: str, case: Case, dim: int, group: int, block_size: int
) -> None:
    """In a prompt, among the last tokens of one, and beside other sequences; slots that it does not see may be NaN."""
    case = case._replace(variant=variant, dtype=FLOAT if format_name == "float32" else BFLOAT)
    length, new = 600, 40
    blocks, heads = -(-length // block_size) + 1, 2 * group
    keys, values = (stored(case.numbers(2, blocks, block_size, dim, dtype=FLOAT), format_name) for _ in range(2))
    slot_positions = torch.full((blocks, block_size), -1)
    table = 1 + torch.randperm(blocks - 1, generator=case.generator)[None]
    slots = (table[0, :, None] * block_size + torch.arange(block_size)).flatten()[:length]
    slot_positions.view(-1)[slots] = torch.arange(length)
    for store in (keys, values):
        spoil(store, slot_positions < 0)
    if pattern == "sinks":
        spoil(values, slot_positions == 20)  # which is read with the sinks
    x, positions = case.numbers(new, heads, dim), torch.arange(length - new, length)

    def attention(few: int, seqs: int = 1) -> Tensor:
        batch = [SubBatch(table.repeat(seqs, 1), few, length)]
        inputs = x[-few:].repeat(seqs, 1, 1), positions[-few:].repeat(seqs), batch
        out = attend(case, *inputs, keys, values, slot_positions, PATTERNS[pattern], scale=dim**-0.5)
        return out.unflatten(0, (seqs, few))

    whole = attention(new)[0]
    assert bool(whole.isfinite().all())
    for few, seqs in ((1, 1), (1, 20), (2, 1), (5, 13), (30, 2)):
        assert torch.equal(attention(few, seqs), whole[-few:].expand(seqs, -1, -1, -1)), (few, seqs)


@pytest.mark.parametrize("variant", LIBRARIES)
@pytest.mark.parametrize("format_name", ["bfloat16", "float32", "int8", "int4"])
@pytest.mark.parametrize("damaged", [slice(0, 256), slice(256, 512), slice(300, 301)], ids=["first", "second", "one"])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_damage_that_is_seen_is_not_left_out(variant: str, format_name: str, damaged: slice, part: str) -> None:
    """A chunk in which every key is NaN has no largest logit; its query must not have the values of the others.

    Nor may it have numbers if the values, or the scales of them, are NaN.
    """
    case = Case(variant, 2, FLOAT if format_name == "float32" else BFLOAT, torch.Generator().manual_seed(0))
    length, block_size, dim = 600, 16, 64
    slot_positions = torch.arange(-(-length // block_size) * block_size)
    slot_positions[length:] = -1
    slot_positions = slot_positions.unflatten(0, (-1, block_size))
    blocks = len(slot_positions)
    keys, values = (stored(case.numbers(2, blocks, block_size, dim, dtype=FLOAT), format_name) for _ in range(2))
    spoil({"keys": keys, "values": values}[part], (slot_positions >= damaged.start) & (slot_positions < damaged.stop))
    for new in (1, 9, 40):
        x, positions = case.numbers(new, 6, dim), torch.arange(length - new, length)
        batch = [SubBatch(torch.arange(blocks)[None], new, length)]
        out = attend(case, x, positions, batch, keys, values, slot_positions, PATTERNS["causal"], scale=dim**-0.5)
        assert bool(out.isnan().all()), new
