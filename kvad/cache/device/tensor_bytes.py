"""Conversion between tensors and container sections without a copy.

Numbers are in the machine's byte order; ``container.py`` defines the order in files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvad.storage import Section


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor; writable if the tensor is."""
    assert tensor.is_contiguous(), "a section must be contiguous"
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else memoryview(bytearray())


def tensor_to_section(name: str, tensor: Tensor) -> Section:
    """Return a tensor as a section that shares its memory."""
    return Section(name, f"{tensor.dtype}".removeprefix("torch."), tuple(tensor.shape), as_bytes(tensor))


def section_to_tensor(section: Section) -> Tensor:
    """Return a section as a tensor that shares its memory."""
    dtype: torch.dtype = getattr(torch, section.dtype)
    if 0 in section.shape:
        return torch.empty(section.shape, dtype=dtype)
    return torch.frombuffer(section.data, dtype=dtype).view(section.shape)
