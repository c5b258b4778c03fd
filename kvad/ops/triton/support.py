"""Availability of the Triton kernels, and the data that several of them take. Does not import triton."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

ENVIRONMENT_VARIABLE = "KVAD_TRITON"  # "off": PyTorch only
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = {"fp8-e4m3": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2}
FORMATS = ("bfloat16", "float16", "float32", "int8", *FP8)
MIN_CAPABILITY = (8, 0)  # bfloat16 products; fp8 needs (8, 9)
FP8_CAPABILITY = (8, 9)


class PagedStore(NamedTuple):
    """Keys or values of a layer in a cache format, by blocks."""

    format: str
    data: Tensor  # [blocks, K, block_size, D]; fp8 as uint8
    scale: Tensor | None = None  # [blocks, K, block_size, 1], of int8

    @property
    def numbers(self) -> Tensor:
        """The data in a dtype that a kernel converts itself."""
        return self.data.view(FP8[self.format]) if self.format in FP8 else self.data


class RMSNorm(NamedTuple):
    """RMSNorm (Zhang & Sennrich 2019); ``unit_offset`` adds 1 to the weight."""

    weight: Tensor | None  # [E]
    eps: float
    unit_offset: bool = False


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Return True if Triton interprets its kernels, which then take tensors on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def starts_dependent(device: torch.device) -> bool:
    """Return True if a kernel may begin before the one before it ends (programmatic dependent launch, Hopper).

    Such a kernel waits for the end of the one before it before it reads what that one wrote; weights it reads earlier.
    """
    return device.type == "cuda" and torch.version.hip is None and _capability(device) >= (9, 0)


def launch_options(dependent: bool) -> dict[str, Any]:
    """Return the keywords of a kernel's launch."""
    return {"launch_pdl": True} if dependent else {}


def unavailable_reason(device: torch.device) -> str:
    """Return why no Triton kernel runs on a device; "" if they do."""
    if device.type == "meta":  # a description of what a GPU would do
        return ""
    if os.environ.get(ENVIRONMENT_VARIABLE) == "off":
        return f"{ENVIRONMENT_VARIABLE}=off"
    if device.type != "cuda" and not (device.type == "cpu" and is_interpreted()):
        return f"the device is {device.type}"
    if not _has_triton():
        return "triton is not installed"
    if device.type == "cuda" and (torch.version.hip is not None or _capability(device) < MIN_CAPABILITY):
        return "the GPU has no bfloat16 products"
    return ""


def unsupported_format(name: str, device: torch.device) -> str:
    """Return why the kernels cannot read and write a cache format; "" if they can."""
    if name not in FORMATS:
        return f"a cache of {name}"
    if name in FP8 and device.type == "cuda" and _capability(device) < FP8_CAPABILITY:
        return "the GPU has no fp8"
    return ""
