"""Tensors as bytes and back, without a copy: what the sections of an entry are made of and made into.

A number's bytes are the machine's own; ``entry.py`` says which machines write files that others can read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvad.storage import Section


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, writable as the tensor is."""
    assert tensor.is_contiguous(), "a section is contiguous"
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else memoryview(bytearray())


def tensor_to_section(name: str, tensor: Tensor) -> Section:
    return Section(name, f"{tensor.dtype}".removeprefix("torch."), tuple(tensor.shape), as_bytes(tensor))


def section_to_tensor(section: Section) -> Tensor:
    """The inverse of :func:`section_of`; the tensor lies in the section's own memory."""
    dtype: torch.dtype = getattr(torch, section.dtype)
    if 0 in section.shape:
        return torch.empty(section.shape, dtype=dtype)
    return torch.frombuffer(section.data, dtype=dtype).view(section.shape)
