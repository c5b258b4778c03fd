"""Token store, packing, collation, datasets and streaming."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.train.data import collate as collate
    from kvad.train.data import packed_dataset as packed_dataset
    from kvad.train.data import packers as packers
    from kvad.train.data import streaming as streaming
    from kvad.train.data import token_store as token_store
    from kvad.train.data.collate import Batch as Batch
    from kvad.train.data.collate import collate_rows as collate_rows
    from kvad.train.data.packed_dataset import MixtureSource as MixtureSource
    from kvad.train.data.packed_dataset import PackedDataset as PackedDataset
    from kvad.train.data.packers import DocumentPacker as DocumentPacker
    from kvad.train.data.token_store import Ints as Ints
    from kvad.train.data.token_store import TokenStore as TokenStore

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
