"""Messages between ranks: a kind and a value. No pickle.

A value consists of JSON values, tensors, tuples, mappings and the types of ``model_input.py``. A message is three
transfers: [2] int64 (the lengths of the others), JSON text, and the tensors' bytes, omitted if empty. In the text, a
tensor is an index into the list of dtypes and shapes; the tensors are concatenated, each at a multiple of 8 bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvad.model_input import BlockOps, EvictOp, MergeOp, ModelInput, Rotary, SlotMapping, SubBatch

ALIGNED = 8  # bytes
DTYPE_NAMES = (
    "float64", "float32", "bfloat16", "float16", "int64", "int32", "int8", "float8_e4m3fn", "float8_e5m2", "uint8",
    "bool",
)  # fmt: skip
DTYPES = {name: getattr(torch, name) for name in DTYPE_NAMES}
TYPES = {cls.__name__: cls for cls in (BlockOps, EvictOp, MergeOp, ModelInput, Rotary, SlotMapping, SubBatch)}


class Message(NamedTuple):
    """A message between ranks. Lists of its payload arrive as tuples."""

    kind: str
    payload: Any = None


def send(message: Message, put: Callable[[Tensor], object]) -> None:
    """Send a message with ``put``, which transfers a CPU tensor to one rank or to all."""
    tensors: list[Tensor] = []
    payload = _encode(message.payload, tensors)
    shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    text = json.dumps([message.kind, payload, shapes]).encode()
    chunks = list(_as_bytes(tensors))
    raw = torch.cat(chunks) if chunks else torch.empty(0, dtype=torch.uint8)
    put(torch.tensor([len(text), len(raw)], dtype=torch.int64))
    put(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    if len(raw):
        put(raw)


def receive(take: Callable[[Tensor], Tensor], device: torch.device | str = "cpu") -> Message:
    """Receive a message with ``take``, which fills a tensor; the message's tensors are moved to ``device``."""
    length, size = take(torch.zeros(2, dtype=torch.int64)).tolist()
    text = bytes(take(torch.zeros(length, dtype=torch.uint8)).tolist())
    kind, payload, shapes = json.loads(text)
    raw = take(torch.zeros(size, dtype=torch.uint8)) if size else torch.empty(0, dtype=torch.uint8)
    return Message(kind, _decode(payload, [tensor.to(device) for tensor in _split_tensors(raw, shapes)]))


def _encode(value: Any, tensors: list[Tensor]) -> Any:
    """Encode a value as JSON values: tensors as an index into ``tensors``, named tuples with the name of their type."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        return {"items": [[key, _encode(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple | list):
        items = [_encode(item, tensors) for item in value]
        name = type(value).__name__
        return {"type": name, "fields": items} if name in TYPES else items
    return value


def _decode(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, list):
        return tuple(_decode(item, tensors) for item in value)
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "items" in value:
        return {key: _decode(item, tensors) for key, item in value["items"]}
    return TYPES[value["type"]](*(_decode(field, tensors) for field in value["fields"]))


def _as_bytes(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        yield flat
        if len(flat) % ALIGNED:
            yield flat.new_zeros(ALIGNED - len(flat) % ALIGNED)


def _split_tensors(raw: Tensor, shapes: Sequence[tuple[str, list[int]]]) -> Iterator[Tensor]:
    start = 0
    for name, shape in shapes:
        dtype = DTYPES[name]
        size = math.prod(shape) * dtype.itemsize
        yield raw[start : start + size].view(dtype).view(shape)
        start += -(-size // ALIGNED) * ALIGNED
