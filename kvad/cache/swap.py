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
from kvad.cache.raw import section_of, tensor_of

__all__ = ["Blocks", "Copier", "pack", "unpack"]

Told = Callable[[Literal["out", "in"], int, float], None]


class Blocks(Protocol):
    """``blocks`` [n] of ``array`` [blocks, ...]."""

    @property
    def array(self) -> Tensor: ...

    @property
    def blocks(self) -> Tensor: ...


class _Flying(NamedTuple):
    way: Literal["out", "in"]
    nbytes: int
    began: torch.cuda.Event
    ended: torch.cuda.Event


class Copier:
    """Copies of one device; ``told`` hears the bytes and the seconds of each, when they are known."""

    def __init__(self, device: torch.device) -> None:
        self.told: Told = lambda *_: None
        self._cuda = device.type == "cuda"
        self._flying: dict[tuple[str, int], _Flying] = {}

    def out(self, key: int, held: Iterable[Blocks]) -> list[Tensor]:
        """The blocks, contiguous, on the host; :meth:`arrived` before their numbers are read there."""
        self._hear()
        began = self._mark()
        copies = [self._host(each.array[each.blocks]) for each in held]
        self._done("out", key, copies, began)
        return copies

    def back(self, key: int, held: Iterable[Blocks], copies: Sequence[Tensor]) -> None:
        """The inverse, into as many blocks."""
        self._hear()
        began = self._mark()
        for each, copy in zip(held, copies, strict=True):
            each.array[each.blocks] = copy.to(each.array.device, non_blocking=True)
        self._done("in", key, copies, began)

    def arrived(self, key: int) -> None:
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
            self.told(way, nbytes, ended - began)
        elif isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
            self._flying[way, key] = _Flying(way, nbytes, began, ended)

    def _hear(self) -> None:
        """Tell of those that have arrived."""
        for name, flying in list(self._flying.items()):
            if flying.ended.query():
                del self._flying[name]
                self.told(flying.way, flying.nbytes, flying.began.elapsed_time(flying.ended) / 1e3)


def pack(copies: Sequence[Tensor]) -> list[Section]:
    """Contiguous host tensors as sections, named by their place; no copy is made."""
    return [section_of(str(at), each) for at, each in enumerate(copies)]


def unpack(sections: Sequence[Section]) -> list[Tensor]:
    """The inverse; the tensors lie in the sections' own memory."""
    return [tensor_of(each) for each in sorted(sections, key=lambda each: int(each.name))]
