"""Atomic files, checksummed containers and the file system interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.storage import atomic as atomic
    from kvad.storage import byte_shuffle as byte_shuffle
    from kvad.storage import container as container
    from kvad.storage import filesystem as filesystem
    from kvad.storage import strict_json as strict_json
    from kvad.storage import temp_paths as temp_paths
    from kvad.storage.container import CacheFingerprint as CacheFingerprint
    from kvad.storage.container import ContainerFile as ContainerFile
    from kvad.storage.container import Section as Section
    from kvad.storage.filesystem import REAL_FILE_SYSTEM as REAL_FILE_SYSTEM
    from kvad.storage.filesystem import Buffer as Buffer
    from kvad.storage.filesystem import FileSystem as FileSystem
    from kvad.storage.io_thread import IoThread as IoThread

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
