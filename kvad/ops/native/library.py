"""The compiled library of CPU kernels: its structures, which variant this machine runs, and packed weights.

The library is built with the package (``build.py``), once per instruction set. It has no dependency on torch: it takes
pointers. It shares torch's pool of OpenMP threads if it is loaded after torch.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import mmap
import os
import re
import struct
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvad.ops.block_matrix import BlockMatrix
from kvad.ops.native.build import VARIANTS, library_path, source_hash
from kvad.ops.native.packed_store import PackedStore, advise
from kvad.ops.quantized_linear import QuantizedMatrix
from kvad.ops.runtime import HostMemory

Matrix = Tensor | nn.ParameterList | QuantizedMatrix | BlockMatrix  # a list: of experts, [out, in] each
JoinRows = Callable[..., NDArray[np.uint64]]  # of several matrices, given by their addresses

ENVIRONMENT_VARIABLE = "KVAD_NATIVE"  # "off", or the name of a variant
PANEL = 32  # rows of a weight that are stored together
MAX_HEAD_DIM = 1024
OPERATIONS = ("embed", "norm", "linear", "angles", "rotate", "attend", "add", "select", "experts", "gate", "lora")
MAX_EXPERTS = 1024
STORE_FORMATS = ("float32", "bfloat16", "float16", "int8", "int4", "fp8-e4m3", "fp8-e5m2")
ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "tanh")
OUTPUT_MODES = ("float", "add", "gated", "activated", "logits")
NORMS = ("none", "rms", "layer")
# What a machine must reach (kvad_cpu_level).
LEVELS = {"amx": 4, "avx512-bf16": 3, "avx512": 2, "avx2": 1, "portable": 0}
REGION_BYTES = 16 << 20  # of packed weights in memory
SMAPS = Path("/proc/self/smaps")
UNCHANGED = re.compile(  # a file's lines: addresses, then names and values
    r"^([0-9a-f]+)-([0-9a-f]+) (?:\S+ +){4}/.*\n(?:(?!Anonymous|VmFlags)[A-Z].*\n)*Anonymous: +0 kB$", re.MULTILINE
)
DTYPES = (torch.float32, torch.bfloat16)


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Store(ctypes.Structure):
    """Keys or values of a layer."""

    _fields_ = [*_fields(ctypes.c_void_p, "data scale zero"), *_fields(ctypes.c_int64, "blocks format")]


class Experts(ctypes.Structure):
    """A mixture of experts of one layer."""

    _fields_ = [
        *_fields(ctypes.c_void_p, "router router_bias selection_bias gate_up down"),  # the last two are operations
        *_fields(ctypes.c_int64, "experts chosen size groups chosen_groups is_sigmoid renormalize"),
        *_fields(ctypes.c_float, "routed_scale jitter alpha limit"),
    ]


class LoraTerm(ctypes.Structure):
    """The term of one adapter in some columns of a product."""

    _fields_ = [*_fields(ctypes.c_void_p, "a b"), *_fields(ctypes.c_int64, "rank first_panel panels")]


class Adapter(ctypes.Structure):
    """The terms of one adapter in one product."""

    _fields_ = [("terms", ctypes.c_void_p), ("num_terms", ctypes.c_int64)]


class Op(ctypes.Structure):
    """One operation; which fields it reads depends on its kind (``step.h``)."""

    _fields_ = [
        *_fields(
            ctypes.c_int32,
            "kind type input out in_offset out_offset in_stride out_stride n k mode activation heads kv_heads head_dim "
            "value_dim group rotary_dim interleaved angles own_weights out_float bias_size bias_offset "
            "short_len bits quantized_group half_scales is_e2m1 activation_bits low low_stride",
        ),
        *_fields(
            ctypes.c_void_p, "weight bias keys values position_bias slopes sink_logits query_scale experts adapters"
        ),
        *_fields(ctypes.c_float, "scale eps softcap clip"),
    ]


class SubBatchTable(ctypes.Structure):
    """Sequences with equally many new tokens, and their block table."""

    _fields_ = [*_fields(ctypes.c_int64, "num_seqs num_new width slots"), ("table", ctypes.c_void_p)]


class GroupInput(ctypes.Structure):
    """A cache group in one step."""

    _fields_ = [
        *_fields(ctypes.c_void_p, "slots positions sub_batches"),
        *_fields(ctypes.c_int64, "num_sub_batches block_size causal window num_sinks window_step layer_window"),
    ]


class StepInput(ctypes.Structure):
    """Input of one step."""

    _fields_ = [
        *_fields(ctypes.c_int64, "tokens num_logits num_groups"),
        *_fields(ctypes.c_void_p, "token_ids positions logit_indices seq_lens groups adapters logits"),
        ("num_hidden", ctypes.c_int64),
        *_fields(ctypes.c_void_p, "hidden_indices hidden"),
        ("num_tokens", ctypes.c_int64),
        *_fields(ctypes.c_void_p, "best seconds"),
    ]


class Program(ctypes.Structure):
    """The operations of a model; ``scratch`` belongs to the library."""

    _fields_ = [
        *_fields(ctypes.c_void_p, "ops widths"),
        *_fields(ctypes.c_int64, "num_ops num_buffers threads"),
        *_fields(ctypes.c_void_p, "scratch"),
        *_fields(ctypes.c_int64, "scratch_bytes peak_bytes"),
    ]


class Library:
    """A loaded variant."""

    def __init__(self, variant: str, handle: ctypes.CDLL) -> None:
        self.variant, self._handle = variant, handle

    def step(self, program: Program, step: StepInput) -> None:
        """Run a step.

        Raises:
            MemoryError: If there is no memory for its activations.
        """
        if self._handle.kvad_step(ctypes.byref(program), ctypes.byref(step)):
            raise MemoryError("no memory for the activations of a step")

    def free(self, program: Program) -> None:
        self._handle.kvad_free(ctypes.byref(program))

    def copy_blocks(self, array: Tensor, copies: Sequence[tuple[int, ...]]) -> None:
        """Copy blocks of an array [blocks, K, ...] that is stored as [K, blocks, ...], one after the other.

        ``copies``: source and target first in each.
        """
        pairs = np.array([copy[:2] for copy in copies], np.int64)
        num_blocks, num_heads = array.shape[:2]
        size = array[0, 0].numel() * array.itemsize
        self._handle.kvad_copy_blocks(
            ctypes.c_void_p(array.data_ptr()),
            *map(ctypes.c_int64, (num_heads, num_blocks * size, size)),
            pairs.ctypes.data_as(ctypes.c_void_p),
            *map(ctypes.c_int64, (len(pairs), _num_threads())),
        )

    def log_totals(self, scores: Tensor) -> Tensor:
        """Return the logarithm of the sum of e^score [N] of scores [N, V], float32; NaN of a row that is not finite."""
        totals = torch.empty(len(scores))
        self._handle.kvad_log_totals(
            ctypes.c_void_p(scores.data_ptr()),
            *map(ctypes.c_int64, (len(scores), scores.stride(0), scores.shape[1])),
            ctypes.c_void_p(totals.data_ptr()),
            ctypes.c_int64(_num_threads()),
        )
        return totals

    def draw(self, scores: Tensor, parameters: Sequence[tuple[float, ...]]) -> list[int]:
        """Draw a token of each row of scores [N, V], float32; -1 if all of them are -inf.

        ``parameters`` [N, 5]: temperature, top-k (0: all), top-p, min-p, number in [0, 1).
        """
        numbers = [number for row in parameters for number in row]
        tokens = (ctypes.c_int64 * len(scores))()
        sizes = (len(scores), scores.stride(0), scores.shape[1])
        self._handle.kvad_draw(
            ctypes.c_void_p(scores.data_ptr()),
            *map(ctypes.c_int64, sizes),
            (ctypes.c_double * len(numbers))(*numbers),
            tokens,
            ctypes.c_int64(_num_threads()),
        )
        return tokens[:]

    def pack(self, rows: NDArray[np.uint64], width: int, itemsize: int, out: Tensor) -> None:
        """Pack rows of ``width`` numbers into panels; ``rows`` are addresses, 0: a row of zeros."""
        pointer = rows.ctypes.data_as(ctypes.c_void_p)
        arguments = (len(rows), width, _even(width), itemsize)
        self._handle.kvad_pack(
            pointer, *map(ctypes.c_int64, arguments), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(_num_threads())
        )

    def pack_quantized(self, rows: Sequence[NDArray[np.uint64]], matrix: QuantizedMatrix, out: Tensor) -> None:
        """Pack rows, given by the addresses of their data, scales and, if there are any, minima; 0: a row of zeros."""
        pointers = [addresses.ctypes.data_as(ctypes.c_void_p) for addresses in rows]
        arguments = (len(rows[0]), matrix.scale.shape[1], matrix.group_size, matrix.bits, matrix.scale.itemsize)
        self._handle.kvad_pack_quantized(
            *(*pointers, None)[:3],
            *map(ctypes.c_int64, arguments),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(_num_threads()),
        )


class LoadResult(NamedTuple):
    """The library, or the reason why there is none."""

    library: Library | None
    reason: str = ""


@functools.cache
def load() -> LoadResult:
    """Load the best variant that this machine can run, or the one that ``KVAD_NATIVE`` names."""
    requested = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if requested == "off":
        return LoadResult(None, f"{ENVIRONMENT_VARIABLE}=off")
    if requested and requested not in VARIANTS:
        return LoadResult(None, f"{ENVIRONMENT_VARIABLE}={requested}: must be off or one of {', '.join(VARIANTS)}")
    runnable = runnable_variants()
    if not runnable:
        state = "were built from other sources" if library_path("portable").is_file() else "are not built"
        return LoadResult(None, f"the kernels {state}: run python -m kvad.ops.native.build")
    if requested and requested not in runnable:
        return LoadResult(None, f"{ENVIRONMENT_VARIABLE}={requested}: not built, or not for this machine")
    variant = requested or runnable[0]
    try:
        return LoadResult(load_variant(variant))
    except OSError as error:
        return LoadResult(None, f"{library_path(variant).name}: {error}; python -m kvad.ops.native.build")


def load_variant(variant: str) -> Library:
    """Load a variant.

    Raises:
        OSError: If the file is missing or damaged, or was built from other sources.
    """
    return Library(variant, _open(variant))


def runnable_variants() -> list[str]:
    """Return the variants that are built and that this machine can run, the best first."""
    try:
        level = _open("portable").kvad_cpu_level()
    except OSError:
        return []
    return [variant for variant in VARIANTS if library_path(variant).is_file() and LEVELS[variant] <= level]


def _open(variant: str) -> ctypes.CDLL:
    path = library_path(variant)
    header = path.read_bytes()[:64]
    if header.startswith(b"\x7fELF") and path.stat().st_size < _elf_size(header):
        raise OSError("it is truncated")  # the system would end this process
    handle = ctypes.CDLL(str(path))
    try:
        get_hash = handle.kvad_source_hash
    except AttributeError:
        raise OSError("it has no kernels") from None
    get_hash.restype = ctypes.c_char_p
    if get_hash() != source_hash().encode():
        raise OSError("it was built from other sources")
    return handle


def _elf_size(header: bytes) -> int:
    """Return where the table of sections ends, which compilers put last."""
    if len(header) < 64:
        return sys.maxsize
    (offset,), (size, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return int(offset + size * count)


class PackedWeights:
    """Weights in the order in which the kernels read them, made once for all engines of a model."""

    def __init__(self, store: PackedStore | None = None) -> None:
        self._panels: dict[tuple[int, ...], _Panels] = {}
        self._store = store
        self._memory = HostMemory(more_bytes=REGION_BYTES)

    @contextmanager
    def storing(self, library: Library, num_weights: int) -> Iterator[None]:
        """Map panels of the block from the store, or write all of them to it, at most ``num_weights``.

        Raises:
            OSError: If a write fails; weights are packed in memory from then on.
        """
        store = self._store
        if store is None:
            yield
            return
        complete = False
        store.open(library.variant, num_weights)
        try:
            yield
            complete = True
        except OSError:
            self._panels, self._store = {}, None
            raise
        finally:
            store.close(complete=complete)

    def panels(
        self, library: Library | None, matrices: Sequence[Matrix], files: FileMappings, *, interleaved: bool = False
    ) -> Tensor:
        """Return the rows of the matrices [n, k], one after another, as panels; of [e, n, k], n padded to whole panels.

        They are [rows / PANEL, k / step, PANEL, step], and bytes [rows / PANEL, size] if the matrices are quantized.
        ``interleaved``: half a panel of the first matrix, then the same rows of the second one, padded to half a panel.
        A weight that has changed is packed again. Pages of ``files`` that were read for it are given back.
        """
        tensors = [tensor for matrix in matrices for tensor in _parts(matrix)]
        key, state = tuple(map(id, tensors)), tuple(map(_state, tensors))
        known = self._panels.get(key)
        if known is None or known.state != state or any(ref() is None for ref in known.sources):
            join = _interleave if interleaved else _concatenate
            if library is None:  # only the shape is needed
                return _empty_panels(matrices, join)
            packed = self._load_or_pack(library, matrices, join, files)
            known = self._panels[key] = _Panels(packed, state, [weakref.ref(tensor) for tensor in tensors])
        return known.packed

    def _load_or_pack(
        self, library: Library, matrices: Sequence[Matrix], join: JoinRows, files: FileMappings
    ) -> Tensor:
        """Return the panels of matrices; those of unchanged files are in the store, if there is one."""
        name = None
        if self._store is not None:
            orders = [m.order for m in matrices if isinstance(m, BlockMatrix)]
            tensors = [x for m in matrices for x in _parts(m) if not any(x is order for order in orders)]
            kinds = [m.kind for m in matrices if isinstance(m, BlockMatrix)]
            hashes = ["" if x is None else blake2b(x.numpy().data, digest_size=16).hexdigest() for x in orders]
            if all(map(files.contain, tensors)):
                rows = [_num_rows(matrix) for matrix in matrices]
                name = self._store.name(tensors, f"{join.__name__} {rows} {kinds} {hashes}")
        packed = None
        if self._store is not None and name is not None:
            packed = self._store.find(name, _empty_panels(matrices, join))
        if packed is None:
            packed = _pack(library, matrices, join, self._memory if name is None else None)
            if self._store is not None and name is not None:
                packed = self._store.add(name, packed)
            for tensor in (tensor for matrix in matrices for tensor in _parts(matrix)):
                files.release(tensor)
        return packed

    def __reduce__(self) -> tuple[type[PackedWeights], tuple[()]]:
        """Copy without the panels: they belong to the parameters of one model."""
        return PackedWeights, ()


def _parts(matrix: Matrix) -> list[Tensor]:
    """Return the tensors that make the rows of a matrix."""
    if isinstance(matrix, nn.ParameterList):
        return list(matrix)
    return [matrix] if isinstance(matrix, Tensor) else list(matrix.tensors().values())


def _empty_panels(matrices: Sequence[Matrix], join: JoinRows) -> Tensor:
    """Return panels without memory."""
    like = matrices[0]
    counts = [_num_rows(matrix) for matrix in matrices]
    rows = _padded(len(join(*(np.zeros(count, dtype=np.uint64) for count in counts))))
    if not isinstance(like, (QuantizedMatrix, BlockMatrix)):
        return torch.empty(rows, _even(like[0].shape[-1]), dtype=like[0].dtype, device="meta")
    row_bytes = like.num_bytes // max(1, like.out_features)
    if isinstance(like, QuantizedMatrix):  # groups are filled up to four numbers
        row_bytes += like.scale.shape[1] * (-like.group_size % 4 * like.bits // 8)
    return torch.empty(rows, row_bytes, dtype=torch.uint8, device="meta")


def _num_rows(matrix: Matrix) -> int:
    if isinstance(matrix, (QuantizedMatrix, BlockMatrix)):
        return matrix.out_features
    return len(matrix) if matrix[0].dim() == 1 else len(matrix) * _padded(len(matrix[0]))


def _pack(library: Library, matrices: Sequence[Matrix], join: JoinRows, memory: HostMemory | None) -> Tensor:
    """Pack matrices; without ``memory`` in some that goes back to the system when the tensor is deleted."""
    packed = _new_like(_empty_panels(matrices, join), memory)
    plain = [_with_rows(matrix) for matrix in matrices]
    arrays = ([matrix] if isinstance(matrix, (Tensor, list)) else _parts(matrix) for matrix in plain)
    rows = [join(*map(_row_addresses, each)) for each in zip(*arrays, strict=True)]
    like = plain[0]
    if isinstance(like, QuantizedMatrix):
        library.pack_quantized(rows, like, packed)
    else:
        library.pack(rows[0], like[0].shape[-1], like[0].itemsize, packed)
    return packed


def _new_like(empty: Tensor, memory: HostMemory | None = None) -> Tensor:
    """Return a tensor of a shape and dtype; without ``memory`` its pages leave the process when it is deleted."""
    if not empty.nbytes:
        return torch.empty(empty.shape, dtype=empty.dtype)
    new = (
        torch.frombuffer(mmap.mmap(-1, empty.nbytes), dtype=torch.uint8)
        if memory is None
        else memory.take(empty.nbytes)
    )
    return new.view(empty.dtype).view(empty.shape)


def _with_rows(matrix: Matrix) -> Tensor | list[Tensor] | QuantizedMatrix:
    """Return a matrix whose rows are contiguous: a transposed one (GPT-2's are views of [in, out]) is copied."""
    if isinstance(matrix, BlockMatrix):
        return matrix.quantized()
    if isinstance(matrix, nn.ParameterList):
        return [each if each.stride(-1) == 1 else _new_like(each.to("meta")).copy_(each) for each in matrix]
    if not isinstance(matrix, Tensor) or matrix.stride(-1) == 1:
        return matrix
    return _new_like(matrix.to("meta")).copy_(matrix)


class _Panels(NamedTuple):
    packed: Tensor
    state: tuple[tuple[int, int], ...]
    sources: list[weakref.ref[Tensor]]


def weight_state(model: nn.Module) -> tuple[tuple[int, int], ...]:
    """Return what changes if a weight of the model changes; each request asks, and torch's generators take longer."""
    tables = (table for module in model.modules() for table in (module._parameters, module._buffers))
    return tuple(_state(tensor) for table in tables for tensor in table.values() if tensor is not None)


class FileMappings:
    """The files that are mapped into memory at the first question (Linux; elsewhere none is known)."""

    @functools.cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """Addresses that are mapped from files, and not written since."""
        content = SMAPS.read_text() if SMAPS.is_file() else ""
        return [(int(low, 16), int(high, 16)) for low, high in UNCHANGED.findall(content)]

    def contain(self, tensor: Tensor) -> bool:
        """Return True if the tensor's memory is mapped from a file, and unchanged."""
        at = bisect.bisect_right(self._spans, (tensor.data_ptr(), sys.maxsize)) - 1
        return at >= 0 and tensor.data_ptr() < self._spans[at][1]

    def release(self, tensor: Tensor) -> None:
        """Give the tensor's memory back: its next use reads the file again."""
        if self.contain(tensor):
            advise(tensor, mmap.MADV_DONTNEED)


def _state(parameter: Tensor) -> tuple[int, int]:
    """Return the memory and the version of a parameter: both are the same if it has not changed."""
    return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version


def _row_addresses(matrix: Tensor | list[Tensor]) -> NDArray[np.uint64]:
    if isinstance(matrix, list) or matrix.dim() == 3:
        rows = np.zeros((len(matrix), _padded(len(matrix[0]))), dtype=np.uint64)
        rows[:, : len(matrix[0])] = [_row_addresses(part) for part in matrix]
        return rows.reshape(-1)
    assert matrix.stride(1) == 1, "rows are contiguous"
    step = matrix.stride(0) * matrix.element_size()
    return matrix.data_ptr() + np.arange(len(matrix), dtype=np.uint64) * np.uint64(step)


def _concatenate(*rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return np.concatenate(rows)


def _interleave(first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.uint64]:
    half = PANEL // 2
    rows = np.zeros((2, -(-len(first) // half) * half), dtype=np.uint64)
    rows[0, : len(first)], rows[1, : len(second)] = first, second
    return np.ascontiguousarray(rows.reshape(2, -1, half).swapaxes(0, 1)).reshape(-1)


def _padded(rows: int) -> int:
    return -(-rows // PANEL) * PANEL


def _even(width: int) -> int:
    return -(-width // 2) * 2


def _num_threads() -> int:
    return torch.get_num_threads()
