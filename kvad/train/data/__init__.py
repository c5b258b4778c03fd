"""Token store, packing, collation, datasets and streaming."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.train.data import collate as collate
    from kvad.train.data import document_dataset as document_dataset
    from kvad.train.data import example_dataset as example_dataset
    from kvad.train.data import streaming as streaming
    from kvad.train.data import token_store as token_store
    from kvad.train.data.collate import Batch as Batch
    from kvad.train.data.collate import collate_rows as collate_rows
    from kvad.train.data.document_dataset import TrainingData as TrainingData
    from kvad.train.data.pair_dataset import PairDataset as PairDataset
    from kvad.train.data.token_store import Ints as Ints
    from kvad.train.data.token_store import TokenStore as TokenStore

__all__ = [
    "Batch",
    "Ints",
    "PairDataset",
    "TokenStore",
    "TrainingData",
    "collate",
    "collate_rows",
    "document_dataset",
    "example_dataset",
    "streaming",
    "token_store",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Batch": "collate",
        "Ints": "token_store",
        "PairDataset": "pair_dataset",
        "TokenStore": "token_store",
        "TrainingData": "document_dataset",
        "collate_rows": "collate",
    },
    ("collate", "document_dataset", "example_dataset", "streaming", "token_store"),
)
