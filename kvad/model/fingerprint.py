"""Fingerprint of a model: a hash of its config and of every byte of its parameters and buffers.

Models with equal fingerprints have equal outputs; a training step, another dtype or another config changes it. Takes
about a second per gigabyte and core.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from kvad.config import ModelConfig, is_later_default
from kvad.model.transformer import Transformer

HASH_CHUNK = 1 << 24  # bytes; large tensors are divided, so that all cores hash
BATCH = 4  # chunks of each core that are in memory at a time


def weights_fingerprint(model: Transformer) -> str:
    """Return the fingerprint of a model, 32 hexadecimal digits."""
    experts = {name: list(part) for name, part in model.named_modules() if isinstance(part, nn.ParameterList)}
    tensors = (*model.named_parameters(), *model.named_buffers())
    others = {name: tensor for name, tensor in tensors if name.rpartition(".")[0] not in experts}
    return state_fingerprint(model.config, {**others, **experts})


@torch.inference_mode()
def state_fingerprint(config: ModelConfig, state: Mapping[str, Tensor | Sequence[Tensor]]) -> str:
    """Return the fingerprint of a config and its parameters and buffers by name; a sequence is one stacked tensor."""
    names = sorted(state)
    chunks = (chunk for name in names for chunk in _chunks(state[name]))
    shapes = [f"{name} {_describe(state[name])}" for name in names]
    fields = _hashed_fields(config)
    del fields["dropout"]  # used in training only
    digest = blake2b(json.dumps([fields, shapes], sort_keys=True).encode(), digest_size=16)
    num_threads = max(1, torch.get_num_threads())
    with ThreadPoolExecutor(num_threads) as pool:  # hashing releases the GIL
        while batch := list(islice(chunks, BATCH * num_threads)):  # views that are not contiguous are copied
            for chunk_digest in pool.map(_hash, batch):
                digest.update(chunk_digest)
    return digest.hexdigest()


def _hashed_fields(value: Any) -> Any:
    """Convert a config as ``to_dict``, without ``LATER_FIELDS`` that have their default."""
    if dataclasses.is_dataclass(value):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {name: _hashed_fields(item) for name, item in fields if not is_later_default(name, item)}
    if isinstance(value, Mapping):
        return {key: _hashed_fields(item) for key, item in value.items()}
    return [_hashed_fields(item) for item in value] if isinstance(value, (tuple, list)) else value


def _describe(tensor: Tensor | Sequence[Tensor]) -> str:
    if isinstance(tensor, Tensor):
        return f"{tensor.dtype} {tuple(tensor.shape)}"
    return f"{tensor[0].dtype} {(len(tensor), *tensor[0].shape)}"


def _chunks(tensor: Tensor | Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Divide the bytes of a tensor into chunks; a chunk of stacked tensors has parts of some of them."""
    chunk, size = list[Tensor](), 0
    for each in [tensor] if isinstance(tensor, Tensor) else tensor:
        rest = each.detach().cpu().contiguous().view(-1).view(torch.uint8)
        while len(rest):
            part = rest[: HASH_CHUNK - size]
            chunk.append(part)
            rest, size = rest[len(part) :], size + len(part)
            if size == HASH_CHUNK:
                yield chunk
                chunk, size = [], 0
    if chunk:
        yield chunk


def _hash(chunk: Sequence[Tensor]) -> bytes:
    digest = blake2b(digest_size=16)
    for part in chunk:
        digest.update(part.numpy().data)
    return digest.digest()
