"""A row's bytes out of the pool and in again: host copies of whole blocks, and the same as sections of a file.

On a GPU copies are pinned and asynchronous: the device's own queue orders them before whatever overwrites the blocks
and behind whatever wrote them, and :meth:`Copier.arrived` is for whoever reads a copy on the host.  Elsewhere a copy is
there when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kvad.cache.entry import Section
from kvad.cache.raw import section_to_tensor, tensor_to_section

__all__ = ["BlockSelection", "HostCopier", "to_sections", "from_sections"]

CopyCallback = Callable[[Literal["out", "in"], int, float], None]


class BlockSelection(Protocol):
    """``blocks`` [n] of ``array`` [blocks, ...]."""

    @property
    def array(self) -> Tensor: ...

    @property
    def blocks(self) -> Tensor: ...


class _PendingCopy(NamedTuple):
    way: Literal["out", "in"]
    nbytes: int
    began: torch.cuda.Event
    ended: torch.cuda.Event


class HostCopier:
    """Copies of one device; ``told`` hears the bytes and the seconds of each, when they are known."""

    def __init__(self, device: torch.device) -> None:
        self.on_copied: CopyCallback = lambda *_: None
        self._cuda = device.type == "cuda"
        self._flying: dict[tuple[str, int], _PendingCopy] = {}

    def copy_out(self, key: int, held: Iterable[BlockSelection]) -> list[Tensor]:
        """The blocks, contiguous, on the host; :meth:`arrived` before their numbers are read there."""
        self._hear()
        began = self._mark()
        copies = [self._host(each.array[each.blocks]) for each in held]
        self._done("out", key, copies, began)
        return copies

    def copy_in(self, key: int, held: Iterable[BlockSelection], copies: Sequence[Tensor]) -> None:
        """The inverse, into as many blocks."""
        self._hear()
        began = self._mark()
        for each, copy in zip(held, copies, strict=True):
            each.array[each.blocks] = copy.to(each.array.device, non_blocking=True)
        self._done("in", key, copies, began)

    def wait(self, key: int) -> None:
        """Wait until what was copied out under ``key`` is there.  From any thread."""
        flying = self._flying.get(("out", key))
        if flying is not None:
            flying.ended.synchronize()

    def _host(self, blocks: Tensor) -> Tensor:
        if not self._cuda:
            return blocks.cpu().contiguous()
        host = torch.empty(blocks.shape, dtype=blocks.dtype, pin_memory=True)
        return host.copy_(blocks, non_blocking=True)

    def _mark(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _done(
        self, way: Literal["out", "in"], key: int, copies: Sequence[Tensor], began: float | torch.cuda.Event
    ) -> None:
        nbytes, ended = sum(each.nbytes for each in copies), self._mark()
        if isinstance(began, float) and isinstance(ended, float):
            self.on_copied(way, nbytes, ended - began)
        elif isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
            self._flying[way, key] = _PendingCopy(way, nbytes, began, ended)

    def _hear(self) -> None:
        """Tell of those that have arrived."""
        for name, flying in list(self._flying.items()):
            if flying.ended.query():
                del self._flying[name]
                self.on_copied(flying.way, flying.nbytes, flying.began.elapsed_time(flying.ended) / 1e3)


def to_sections(copies: Sequence[Tensor]) -> list[Section]:
    """Contiguous host tensors as sections, named by their place; no copy is made."""
    return [tensor_to_section(str(at), each) for at, each in enumerate(copies)]


def from_sections(sections: Sequence[Section]) -> list[Tensor]:
    """The inverse; the tensors lie in the sections' own memory."""
    return [section_to_tensor(each) for each in sorted(sections, key=lambda each: int(each.name))]
