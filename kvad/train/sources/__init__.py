"""Sources: files read as documents, pairs, conversations and examples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.train.sources import chat as chat
    from kvad.train.sources import columns as columns
    from kvad.train.sources import documents as documents
    from kvad.train.sources import examples as examples
    from kvad.train.sources import formats as formats
    from kvad.train.sources import pairs as pairs
    from kvad.train.sources.chat import ChatCorpus as ChatCorpus
    from kvad.train.sources.documents import open_corpus as open_corpus
    from kvad.train.sources.pairs import PairPaths as PairPaths
    from kvad.train.sources.pairs import open_pairs as open_pairs

__all__ = [
    "ChatCorpus",
    "PairPaths",
    "chat",
    "columns",
    "documents",
    "examples",
    "formats",
    "open_corpus",
    "open_pairs",
    "pairs",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {"ChatCorpus": "chat", "PairPaths": "pairs", "open_corpus": "documents", "open_pairs": "pairs"},
    ("chat", "columns", "documents", "examples", "formats", "pairs"),
)
