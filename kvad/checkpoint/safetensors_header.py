"""Safetensors headers: names, dtypes, shapes and offsets of tensors.  No torch.

The format (github.com/huggingface/safetensors): 8 bytes, a little-endian length n; n bytes of JSON, ``{"name":
{"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {...}}``; then the data.  An inconsistent
file (a truncated header, an offset past the end, bytes that are not shape x dtype) raises CheckpointError.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from kvad.errors import CheckpointError

DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
OTHER_DTYPES = {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
MAX_HEADER_BYTES = 100 << 20  # the format's own limit


class TensorInfo(NamedTuple):
    """One entry of a header.  ``bytes`` is the tensor's size in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def stored_dtype(path: Path) -> str | None:
    """Return the float dtype that holds most of a file's bytes, or None if there is none."""
    totals = dict.fromkeys(DTYPES.values(), 0)
    for tensor in read_headers(path):
        if tensor.dtype in totals:
            totals[tensor.dtype] += tensor.bytes
    dtype = max(totals, key=lambda name: totals[name])
    return dtype if totals[dtype] else None


def read_headers(path: Path) -> list[TensorInfo]:
    """Return every tensor of a file, in the order of its data.

    Raises:
        CheckpointError: If the file is missing or truncated.
    """
    header, data_bytes = _read_header(path)
    header.pop("__metadata__", None)
    tensors = []
    for name, entry in header.items():
        try:
            code, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
            begin, end = map(int, entry["data_offsets"])
            size = math.prod(shape) * SIZES.get(code, 0)
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path}: the header's entry of {name!r} is malformed") from error
        if end > data_bytes:
            raise CheckpointError(f"{path} is truncated: {name!r} ends at byte {end:,} of {data_bytes:,}")
        if begin < 0 or end < begin:
            raise CheckpointError(f"{path}: {name!r} starts at byte {begin:,} and ends at {end:,}")
        if code in SIZES and end - begin != size:
            raise CheckpointError(f"{path}: {name!r} of {code} {list(shape)} has {end - begin:,} bytes, not {size:,}")
        tensors.append(
            (begin, TensorInfo(name, {**DTYPES, **OTHER_DTYPES}.get(code, code.lower()), shape, end - begin))
        )
    return [tensor for _, tensor in sorted(tensors)]


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header and the number of data bytes after it."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", "The checkpoint is incomplete. Copy it again.")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{path} is not a complete safetensors file: {size:,} bytes, header of {length:,}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path}: the header is not JSON") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    return header, size - 8 - length
