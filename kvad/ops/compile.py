"""torch.compile, where there is a compiler for it; and a plain answer where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def compile_error(device: str) -> str | None:
    """Why nothing can be compiled for a device, in one line; None where a small function could be."""
    try:
        x = torch.ones(4, device=device, requires_grad=True)
        torch.compile(lambda x: (x * x + 1).sum())(x).backward()
    except Exception as error:  # whatever the compiler, its driver or its search say
        said = [line.strip() for line in str(error).splitlines() if line.strip()]
        return said[0] if said else type(error).__name__
    return None


def lazy_compile(function: F) -> F:
    """The same function, compiled when it is called first, and again for other shapes."""
    return cast("F", torch.compile(function))
