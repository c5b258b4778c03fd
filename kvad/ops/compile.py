"""torch.compile, and a check whether it works on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def compile_error(device: str) -> str | None:
    """Compile a small function for a device; return the first line of the error, or None if it worked."""
    try:
        x = torch.ones(4, device=device, requires_grad=True)
        torch.compile(lambda x: (x * x + 1).sum())(x).backward()
    except Exception as error:  # the compiler and its driver raise errors of many types
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[0] if lines else type(error).__name__
    return None


def lazy_compile(function: F) -> F:
    """Return the function, compiled at the first call and again for other shapes."""
    return cast("F", torch.compile(function))
