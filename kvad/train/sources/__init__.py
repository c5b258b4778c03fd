"""Sources: files read as documents, pairs, conversations and examples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.train.sources import chat as chat
    from kvad.train.sources import documents as documents
    from kvad.train.sources import examples as examples
    from kvad.train.sources import formats as formats
    from kvad.train.sources import pairs as pairs
    from kvad.train.sources.chat import ChatCorpus as ChatCorpus
    from kvad.train.sources.documents import Corpus as Corpus
    from kvad.train.sources.documents import open_corpus as open_corpus
    from kvad.train.sources.pairs import PairPaths as PairPaths
    from kvad.train.sources.pairs import open_pairs as open_pairs

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
