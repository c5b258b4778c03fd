"""Safetensors headers: names, dtypes, shapes and offsets of tensors.  No torch.

The format (github.com/huggingface/safetensors): 8 bytes, a little-endian length n; n bytes of JSON, ``{"name":
{"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {...}}``; then the tensors' bytes without
gaps, from which the offsets count.  An inconsistent file raises a one-line CheckpointError that names file and tensor.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvad import storage
from kvad.errors import CheckpointError

DTYPES = {  # code -> name in torch, bytes of an element
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "C64": ("complex64", 8),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
WEIGHT_DTYPES = ("float64", "float32", "bfloat16", "float16")
MAX_HEADER_BYTES = 100_000_000  # the format's limit, used for the index too
LARGEST, MAX_DIMS = 2**63 - 1, 64  # limits of torch
FIELDS = {"dtype", "shape", "data_offsets"}
RETRY_HINT = "Download or copy it again."


class TensorInfo(NamedTuple):
    """One entry of a header: ``bytes`` bytes from byte ``start`` of the file, header included."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    start: int = 0


class TruncatedFileError(CheckpointError):
    """A file ends before its last tensor."""


def stored_dtype(path: Path) -> str | None:
    """Return the float dtype that holds most of a file's bytes, or None; scales of quantized matrices do not count."""
    names = {tensor.name: tensor for tensor in read_headers(path)}
    tensors = [tensor for name, tensor in names.items() if f"{name.rpartition('.')[0]}.data" not in names]
    totals = {name: sum(tensor.bytes for tensor in tensors if tensor.dtype == name) for name in WEIGHT_DTYPES}
    dtype = max(totals, key=lambda name: totals[name])
    return dtype if totals[dtype] else None


def read_headers(path: Path) -> list[TensorInfo]:
    """Return every tensor of a file, in the order of its data."""
    file = open_file(path)
    try:
        return parse_header(file, path)
    finally:
        os.close(file)


def is_truncated(path: Path) -> bool:
    """Return True if a file ends before its last tensor; False for any other inconsistency."""
    try:
        read_headers(path)
    except CheckpointError as error:
        return isinstance(error, TruncatedFileError)
    return False


def open_file(path: Path) -> int:
    """Open a regular file for reading and return its descriptor."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe must not block
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing", f"The checkpoint is incomplete. {RETRY_HINT}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(f"{path} is not a regular file")
    return file


def parse_header(file: int, path: Path) -> list[TensorInfo]:
    """Return the tensors of an open file, in the order of its data; at most the header is read."""
    size, beginning = os.fstat(file).st_size, os.pread(file, 64, 0)
    length = int.from_bytes(beginning[:8], "little")
    if beginning.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the file itself", "Run git lfs pull.")
    if size < 8 or length > size - 8:
        sizes = f"{size:,} bytes, of which the header has {length:,}" if size >= 8 else f"{size:,} bytes"
        raise TruncatedFileError(f"{path} is truncated, or not a safetensors file: {sizes}", RETRY_HINT)
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: the header must have at most {MAX_HEADER_BYTES:,} bytes, got {length:,}")
    header = parse_object(os.pread(file, length, 8), f"{path}: the header")
    metadata = header.pop("__metadata__", None)
    is_text = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    if metadata is not None and not is_text:
        raise CheckpointError(f"{path}: __metadata__ must be an object of strings")
    tensors = [_parse_entry(name, value, 8 + length, path) for name, value in header.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.bytes))
    _check_offsets(path, tensors, 8 + length, size)
    return tensors


def parse_object(content: bytes, label: str) -> dict[str, Any]:
    """Parse strict JSON that is an object; a CheckpointError begins with ``label``."""
    try:
        value = storage.strict_json.loads(content)
    except ValueError as error:
        raise CheckpointError(f"{label} is not JSON: {error}", RETRY_HINT) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{label} is not a JSON object")
    return value


def _parse_entry(name: str, value: object, data: int, path: Path) -> TensorInfo:
    """Parse a header entry; ``data`` is the offset of the file's data."""
    where = f"{path}: {tensor_label(name)}"
    if not isinstance(value, dict) or set(value) != FIELDS:
        raise CheckpointError(f"{where}: its entry must be {{dtype, shape, data_offsets}}")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        hint = f"Supported: {', '.join(DTYPES)}."
        raise CheckpointError(f"{where} has dtype {short_repr(code)}, which kvad does not read", hint)
    dtype, itemsize = DTYPES[code]
    if not _are_counts(shape) or len(shape) > MAX_DIMS or math.prod(max(1, n) for n in shape) > LARGEST // 16:
        raise CheckpointError(f"{where}: its shape must be a list of sizes")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: its data_offsets must be [begin, end]")
    size, expected_size = offsets[1] - offsets[0], math.prod(shape) * itemsize
    if size != expected_size:
        raise CheckpointError(f"{where}: {code} {shape} has {expected_size:,} bytes, its data_offsets span {size:,}")
    return TensorInfo(name, dtype, tuple(shape), size, data + offsets[0])


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= LARGEST for n in value)


def _check_offsets(path: Path, tensors: Sequence[TensorInfo], data: int, size: int) -> None:
    """Check that tensors are contiguous from the end of the header to the end of the file."""
    end, previous = data, "the header"
    for tensor in tensors:
        label = tensor_label(tensor.name)
        if not tensor.name.isprintable():
            raise CheckpointError(f"{path}: the name of {label} is not printable")
        if tensor.start < end:
            raise CheckpointError(f"{path}: {label} begins at byte {tensor.start:,}, inside {previous}")
        if tensor.start > end:
            raise CheckpointError(f"{path}: bytes {end:,} to {tensor.start:,}, before {label}, belong to no tensor")
        end, previous = tensor.start + tensor.bytes, label
    if end > size:
        raise TruncatedFileError(f"{path} is truncated: {size:,} of {end:,} bytes", RETRY_HINT)
    if end < size:
        raise CheckpointError(f"{path} is too long: {size:,} bytes, its tensors end at {end:,}", RETRY_HINT)


def tensor_label(name: str) -> str:
    return f"tensor {short_repr(name)}"


def short_repr(value: object) -> str:
    """Format any value for a one-line message."""
    if not isinstance(value, str | int | float | None):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
