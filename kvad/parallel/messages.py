"""Messages between ranks: a kind, JSON values and tensors. No pickle.

A message is three transfers: [2] int64 (the lengths of the others), the JSON text, and the tensors' bytes, omitted if
empty. The text contains each tensor's dtype and shape; the tensors are concatenated, each at a multiple of 8 bytes.

The ``encode_*`` functions turn a ModelInput, BlockOps, slots and rotaries into JSON values and tensors; the
``decode_*`` functions are their inverses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvad.cache import device as device_lib
from kvad.model_input import BlockOps, EvictOp, MergeOp, ModelInput, Rotary, SlotMapping, SubBatch

__all__ = [
    "Message",
    "decode_block_ops",
    "decode_model_input",
    "decode_rotaries",
    "decode_slots",
    "encode_block_ops",
    "encode_model_input",
    "encode_rotaries",
    "encode_slots",
    "receive",
    "send",
]  # fmt: skip

ALIGNED = 8  # bytes
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint8,
        torch.bool,
    )
}


class Message(NamedTuple):
    """A message between ranks."""

    kind: str
    payload: Any = None  # JSON values
    tensors: tuple[Tensor, ...] = ()


def send(message: Message, put: Callable[[Tensor], object]) -> None:
    """Send a message with ``put``, which transfers a CPU tensor to one rank or to all."""
    shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in message.tensors]
    text = json.dumps([message.kind, message.payload, shapes]).encode()
    chunks = list(_as_bytes(message.tensors))
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
    return Message(kind, payload, tuple(tensor.to(device) for tensor in _split_tensors(raw, shapes)))


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


# ---------------------------------------------------------------- model inputs and block operations


def encode_model_input(model_input: ModelInput) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Encode as JSON values, in which an index refers to one of the tensors."""
    tensors: list[Tensor] = []
    return _encode_fields(model_input, tensors), tuple(tensors)


def _encode_fields(model_input: ModelInput, tensors: list[Tensor]) -> dict[str, Any]:
    def append(x: Tensor | None) -> int | None:
        if x is None:
            return None
        tensors.append(x)
        return len(tensors) - 1

    fields: dict[str, Any] = {name: append(getattr(model_input, name)) for name in TENSORS}
    fields["sub_batches"] = model_input.sub_batches
    fields["slot_mappings"] = [
        (append(mapping.slots), [append(table) for table in mapping.block_tables], mapping.sub_batches)
        for mapping in model_input.slot_mappings
    ]
    encoder_input = model_input.encoder_input
    fields["encoder_input"] = None if encoder_input is None else _encode_fields(encoder_input, tensors)
    return fields


TENSORS = ("token_ids", "positions", "logit_indices", "document_ids", "max_seq_lens", "token_type_ids", "causal_order")


def decode_model_input(payload: dict[str, Any], tensors: Sequence[Tensor]) -> ModelInput:
    """Invert :func:`encode_model_input`."""

    def sub_batches(rows: Sequence[Sequence[int]] | None) -> tuple[SubBatch, ...] | None:
        return None if rows is None else tuple(SubBatch(*row) for row in rows)

    def tensor(index: int | None) -> Tensor | None:
        return None if index is None else tensors[index]

    mappings = tuple(
        SlotMapping(tensor(slots), tuple(tensors[index] for index in tables), sub_batches(rows))
        for slots, tables, rows in payload["slot_mappings"]
    )
    encoder_input = None if payload["encoder_input"] is None else decode_model_input(payload["encoder_input"], tensors)
    fields: dict[str, Any] = {name: tensor(payload[name]) for name in TENSORS}
    return ModelInput(
        **fields,
        sub_batches=sub_batches(payload["sub_batches"]) or (),
        slot_mappings=mappings,
        encoder_input=encoder_input,
    )


def encode_block_ops(block_ops: BlockOps) -> dict[str, Any] | None:
    """Encode the operations that are not empty; None if all are."""
    all_ops = block_ops._asdict()
    payload = {name: value for name, value in all_ops.items() if any(value)}
    return {**payload, "groups": len(block_ops.clear)} if payload else None


def decode_block_ops(payload: dict[str, Any]) -> BlockOps:
    """Invert :func:`encode_block_ops`."""
    empty = ((),) * payload["groups"]
    ops = {name: _to_tuples(value) for name, value in payload.items() if name != "groups"}
    for name, cls in (("evict", EvictOp), ("merge", MergeOp)):
        if name in ops:
            ops[name] = tuple(tuple(cls(*fields) for fields in group) for group in ops[name])
    return BlockOps(**{"clear": empty, "copy": empty, **ops})


def _to_tuples(value: Any) -> Any:
    return tuple(_to_tuples(item) for item in value) if isinstance(value, list) else value


# ---------------------------------------------------------------- slots and rotaries


def encode_slots(
    blocks: device_lib.slot_copy.BlockIndex, slots: device_lib.slot_copy.SlotIndex
) -> tuple[Any, tuple[Tensor, ...]]:
    """Encode a sequence's blocks, and the slots of the groups that have some."""
    has_slots = [group_slots is not None for group_slots in slots]
    return [[list(group) for group in blocks], has_slots], tuple(group for group in slots if group is not None)


def decode_slots(
    payload: Any, tensors: Sequence[Tensor]
) -> tuple[device_lib.slot_copy.BlockIndex, device_lib.slot_copy.SlotIndex]:
    """Invert :func:`encode_slots`."""
    blocks, has_slots = payload
    iterator = iter(tensors)
    return blocks, [next(iterator).cpu() if present else None for present in has_slots]


def encode_rotaries(rotaries: Mapping[int, Rotary]) -> tuple[Any, tuple[Tensor, ...]]:
    """Encode rotaries by layer."""
    payload = [[layer, rotary.interleaved, rotary.factor] for layer, rotary in rotaries.items()]
    return payload, tuple(rotary.inv_freq for rotary in rotaries.values())


def decode_rotaries(payload: Any, tensors: Sequence[Tensor]) -> dict[int, Rotary]:
    """Invert :func:`encode_rotaries`."""
    return {
        layer: Rotary(inv_freq, interleaved, factor)
        for (layer, interleaved, factor), inv_freq in zip(payload, tensors, strict=True)
    }
