"""What ranks tell one another: a kind, plain values and tensors, as one JSON text and one run of bytes.  No pickle.

A message is three transfers, of which an empty one is left out: [2] int64 (how long the others are), the text, the
bytes.  The text says each tensor's dtype and shape; tensors lie one behind the other, each at a multiple of 8 bytes.

A step and its moves are integers and tensors of integers already; :func:`step_out` and :func:`moves_out` say them so,
:func:`step_in` and :func:`moves_in` are their inverses.
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
    str(each).removeprefix("torch."): each
    for each in (
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
    """``said``: what JSON can say."""

    kind: str
    payload: Any = None
    tensors: tuple[Tensor, ...] = ()


def send(message: Message, put: Callable[[Tensor], object]) -> None:
    """By ``put``, which takes tensors of the host: to one rank, or to all."""
    shapes = [[str(each.dtype).removeprefix("torch."), list(each.shape)] for each in message.tensors]
    text = json.dumps([message.kind, message.payload, shapes]).encode()
    pieces = list(_as_bytes(message.tensors))
    raw = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)
    put(torch.tensor([len(text), len(raw)], dtype=torch.int64))
    put(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    if len(raw):
        put(raw)


def receive(take: Callable[[Tensor], Tensor], device: torch.device | str = "cpu") -> Message:
    """By ``take``, which fills a tensor; the message's tensors are put on ``device``."""
    length, size = take(torch.zeros(2, dtype=torch.int64)).tolist()
    text = bytes(take(torch.zeros(length, dtype=torch.uint8)).tolist())
    kind, said, shapes = json.loads(text)
    raw = take(torch.zeros(size, dtype=torch.uint8)) if size else torch.empty(0, dtype=torch.uint8)
    return Message(kind, said, tuple(each.to(device) for each in _tensors_in(raw, shapes)))


def _as_bytes(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    for each in tensors:
        flat = each.detach().cpu().contiguous().view(-1).view(torch.uint8)
        yield flat
        if len(flat) % ALIGNED:
            yield flat.new_zeros(ALIGNED - len(flat) % ALIGNED)


def _tensors_in(raw: Tensor, shapes: Sequence[tuple[str, list[int]]]) -> Iterator[Tensor]:
    at = 0
    for name, shape in shapes:
        dtype = DTYPES[name]
        size = math.prod(shape) * dtype.itemsize
        yield raw[at : at + size].view(dtype).view(shape)
        at += -(-size // ALIGNED) * ALIGNED


# ---------------------------------------------------------------- steps


def encode_model_input(step: ModelInput) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """What JSON says of a step, in which numbers stand for the tensors beside it."""
    tensors: list[Tensor] = []
    return _describe(step, tensors), tuple(tensors)


def _describe(step: ModelInput, tensors: list[Tensor]) -> dict[str, Any]:
    def keep(x: Tensor | None) -> int | None:
        if x is None:
            return None
        tensors.append(x)
        return len(tensors) - 1

    said: dict[str, Any] = {name: keep(getattr(step, name)) for name in TENSORS}
    said["sub_batches"] = step.sub_batches
    said["slot_mappings"] = [
        (keep(place.slots), [keep(each) for each in place.block_tables], place.sub_batches)
        for place in step.slot_mappings
    ]
    said["encoder_input"] = None if step.encoder_input is None else _describe(step.encoder_input, tensors)
    return said


TENSORS = ("token_ids", "positions", "logit_indices", "document_ids", "max_seq_lens", "token_type_ids", "causal_order")


def decode_model_input(said: dict[str, Any], tensors: Sequence[Tensor]) -> ModelInput:
    """The inverse of :func:`step_out`."""

    def lanes(pieces: Sequence[Sequence[int]] | None) -> tuple[SubBatch, ...] | None:
        return None if pieces is None else tuple(SubBatch(*each) for each in pieces)

    def at(number: int | None) -> Tensor | None:
        return None if number is None else tensors[number]

    places = tuple(
        SlotMapping(at(slots), tuple(tensors[each] for each in tables), lanes(cut))
        for slots, tables, cut in said["slot_mappings"]
    )
    source = None if said["encoder_input"] is None else decode_model_input(said["encoder_input"], tensors)
    given: dict[str, Any] = {name: at(said[name]) for name in TENSORS}
    return ModelInput(**given, sub_batches=lanes(said["sub_batches"]) or (), slot_mappings=places, encoder_input=source)


def encode_block_ops(moves: BlockOps) -> dict[str, Any] | None:
    """Those that there are; None where nothing moves."""
    every = moves._asdict()
    said = {name: value for name, value in every.items() if any(value)}
    return {**said, "groups": len(moves.clear)} if said else None


def decode_block_ops(said: dict[str, Any]) -> BlockOps:
    """The inverse of :func:`moves_out`."""
    nothing = ((),) * said["groups"]
    given = {name: _tuples(value) for name, value in said.items() if name != "groups"}
    for name, kind in (("evict", EvictOp), ("merge", MergeOp)):
        if name in given:
            given[name] = tuple(tuple(kind(*each) for each in group) for group in given[name])
    return BlockOps(**{"clear": nothing, "copy": nothing, **given})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


# ---------------------------------------------------------------- rows


def encode_slots(
    blocks: device_lib.slot_copy.BlockIndex, slots: device_lib.slot_copy.SlotIndex
) -> tuple[Any, tuple[Tensor, ...]]:
    """What JSON says of a row's places, and the slots of those groups that have some."""
    taking = [each is not None for each in slots]
    return [[list(each) for each in blocks], taking], tuple(each for each in slots if each is not None)


def decode_slots(
    said: Any, tensors: Sequence[Tensor]
) -> tuple[device_lib.slot_copy.BlockIndex, device_lib.slot_copy.SlotIndex]:
    blocks, taking = said
    rest = iter(tensors)
    return blocks, [next(rest).cpu() if takes else None for takes in taking]


def encode_rotaries(rotaries: Mapping[int, Rotary]) -> tuple[Any, tuple[Tensor, ...]]:
    said = [[layer, each.interleaved, each.factor] for layer, each in rotaries.items()]
    return said, tuple(each.inv_freq for each in rotaries.values())


def decode_rotaries(said: Any, tensors: Sequence[Tensor]) -> dict[int, Rotary]:
    return {
        layer: Rotary(inv_freq, interleaved, factor)
        for (layer, interleaved, factor), inv_freq in zip(said, tensors, strict=True)
    }
