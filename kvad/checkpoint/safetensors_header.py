"""Safetensors files by their headers alone: names, dtypes, shapes and places of tensors; no tensor is read.

The format (github.com/huggingface/safetensors): 8 bytes, a little-endian length n; n bytes of JSON, ``{"name":
{"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {...}}``; then the data.  What does not
add up (a header that is cut, an offset past the end, bytes that are not shape x dtype) is a CheckpointError.
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
    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def stored_dtype(path: Path) -> str | None:
    """The float dtype that holds most of a file's bytes; None where there is none."""
    totals = dict.fromkeys(DTYPES.values(), 0)
    for tensor in read_headers(path):
        if tensor.dtype in totals:
            totals[tensor.dtype] += tensor.bytes
    best = max(totals, key=lambda name: totals[name])
    return best if totals[best] else None


def read_headers(path: Path) -> list[TensorInfo]:
    """Every tensor of a file, in the order of its data.  CheckpointError for a file that is missing or not whole."""
    header, data_bytes = _read_header(path)
    header.pop("__metadata__", None)
    found = []
    for name, entry in header.items():
        try:
            code, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
            low, high = map(int, entry["data_offsets"])
            size = math.prod(shape) * SIZES.get(code, 0)
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path}: the header's entry of {name!r} is broken") from error
        if high > data_bytes:
            raise CheckpointError(f"{path} is cut off: {name!r} ends at byte {high:,} of {data_bytes:,}")
        if low < 0 or high < low:
            raise CheckpointError(f"{path}: {name!r} starts at byte {low:,} and ends at {high:,}")
        if code in SIZES and high - low != size:
            raise CheckpointError(f"{path}: {name!r} of {code} {list(shape)} has {high - low:,} bytes, not {size:,}")
        found.append((low, TensorInfo(name, {**DTYPES, **OTHER_DTYPES}.get(code, code.lower()), shape, high - low)))
    return [tensor for _, tensor in sorted(found)]


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """(the header, bytes of data after it)."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", "the checkpoint is not whole: copy it again")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{path} is not a whole safetensors file: {size:,} bytes, header of {length:,}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path}: its header is not JSON") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is not a JSON object")
    return header, size - 8 - length
