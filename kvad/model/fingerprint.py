"""Fingerprint of a model: a hash of its config and of every byte of its parameters and buffers.

Models with equal fingerprints have equal outputs; a training step, another dtype or another config changes it. Takes
about a second per gigabyte and core.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from kvad.config import ModelConfig, is_later_default
from kvad.model.transformer import Transformer

HASH_CHUNK = 1 << 24  # bytes; large tensors are divided, so that all cores hash


def weights_fingerprint(model: Transformer) -> str:
    """Return the fingerprint of a model, 32 hexadecimal digits."""
    return state_fingerprint(model.config, {**dict(model.named_parameters()), **dict(model.named_buffers())})


@torch.inference_mode()
def state_fingerprint(config: ModelConfig, state: Mapping[str, Tensor]) -> str:
    """Return the fingerprint of a config and its parameters and buffers by name."""
    names = sorted(state)
    chunks = [chunk for name in names for chunk in _chunks(state[name])]
    shapes = [f"{name} {state[name].dtype} {tuple(state[name].shape)}" for name in names]
    fields = _hashed_fields(config)
    del fields["dropout"]  # used in training only
    digest = blake2b(json.dumps([fields, shapes], sort_keys=True).encode(), digest_size=16)
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:  # hashing releases the GIL
        for chunk_digest in pool.map(_hash, chunks):
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


def _chunks(tensor: Tensor) -> list[Tensor]:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return list(flat.view(torch.uint8).split(HASH_CHUNK)) if flat.numel() else []


def _hash(chunk: Tensor) -> bytes:
    return blake2b(chunk.numpy().data, digest_size=16).digest()
