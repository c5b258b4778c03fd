"""Fingerprint of a model: a hash of its config and of every byte of its parameters and buffers.

Models with equal fingerprints have equal outputs; a training step, another dtype or another config changes it. Takes
about a second per gigabyte and core.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import torch
from torch import Tensor

from kvad.config import ModelConfig
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
    fields = config.to_dict()
    del fields["dropout"]  # used in training only
    digest = blake2b(json.dumps([fields, shapes], sort_keys=True).encode(), digest_size=16)
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:  # hashing releases the GIL
        for chunk_digest in pool.map(_hash, chunks):
            digest.update(chunk_digest)
    return digest.hexdigest()


def _chunks(tensor: Tensor) -> list[Tensor]:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return list(flat.view(torch.uint8).split(HASH_CHUNK)) if flat.numel() else []


def _hash(chunk: Tensor) -> bytes:
    return blake2b(chunk.numpy().data, digest_size=16).digest()
