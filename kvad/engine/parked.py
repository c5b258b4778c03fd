"""The parking of one engine: the device's host copies, a bound, and a folder for what is beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from kvad.cache.disk import FileSystem
from kvad.cache.entry import Section
from kvad.cache.ledger import KVCacheManager
from kvad.cache.memory import KVCache
from kvad.cache.parkfiles import SwapFiles
from kvad.cache.parking import SwapSpace
from kvad.cache.swap import from_sections, to_sections
from kvad.errors import ConfigError

__all__ = ["open_swap_space"]


def open_swap_space(
    memory: KVCache, ledger: KVCacheManager, ram: int | None, folder: Path | None, disk: FileSystem
) -> SwapSpace:
    """``ram`` None: all in host memory where rows must be parked, all on disk where there is a ``folder``, else none.
    ConfigError for a folder that cannot be written to, or that would be rank 0's alone."""
    if folder is not None and memory.ranks > 1:
        raise ConfigError(
            f"park_dir: {memory.ranks} ranks share a model, and their rows are parked in host memory alone",
            "leave it out; park_ram bounds the bytes of all ranks together",
        )
    if ram is None and (folder is not None or not ledger.lossy):
        ram = 0

    def packed(key: int, copies: Sequence[Tensor]) -> list[Section]:
        memory.copier.wait(key)
        return to_sections(copies)

    files = None if folder is None else SwapFiles(folder, disk=disk)
    return SwapSpace(memory.swapped, ram=ram, files=files, to_sections=packed, from_sections=from_sections)
