"""One name for a model's weights and shape: every byte of every parameter and buffer counts.

Two models of the same fingerprint say the same; one step of training, another dtype or another config is another name.
About a second per gigabyte and core.
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

HASH_CHUNK = 1 << 24  # bytes hashed at a time: a large tensor is many pieces, for all cores


def weights_fingerprint(model: Transformer) -> str:
    """32 hexadecimal digits."""
    return state_fingerprint(model.config, {**dict(model.named_parameters()), **dict(model.named_buffers())})


@torch.inference_mode()
def state_fingerprint(config: ModelConfig, state: Mapping[str, Tensor]) -> str:
    """The same of a model that is not put together: its parameters and buffers by name."""
    names = sorted(state)
    pieces = [piece for name in names for piece in _pieces(state[name])]
    said = [f"{name} {state[name].dtype} {tuple(state[name].shape)}" for name in names]
    told = config.to_dict()
    del told["dropout"]  # training's: it decides nothing that the model says
    digest = blake2b(json.dumps([told, said], sort_keys=True).encode(), digest_size=16)
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:  # hashing lets go of the interpreter
        for each in pool.map(_hashed, pieces):
            digest.update(each)
    return digest.hexdigest()


def _pieces(tensor: Tensor) -> list[Tensor]:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return list(flat.view(torch.uint8).split(HASH_CHUNK)) if flat.numel() else []


def _hashed(piece: Tensor) -> bytes:
    return blake2b(piece.numpy().data, digest_size=16).digest()
