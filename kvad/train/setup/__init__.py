"""Run file to model, data and objective; checks before training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.train.setup import checkpoint_writers as checkpoint_writers
    from kvad.train.setup import corpora as corpora
    from kvad.train.setup import data_check as data_check
    from kvad.train.setup import initialize as initialize
    from kvad.train.setup import memory_estimate as memory_estimate
    from kvad.train.setup import objective_factory as objective_factory
    from kvad.train.setup import preflight as preflight
    from kvad.train.setup import prepared as prepared
    from kvad.train.setup import run_data as run_data
    from kvad.train.setup.corpora import CorpusArgument as CorpusArgument
    from kvad.train.setup.corpora import resolve_corpus as resolve_corpus
    from kvad.train.setup.initialize import load_initial as load_initial
    from kvad.train.setup.prepared import prepare_data as prepare_data
    from kvad.train.setup.run_data import RunData as RunData

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
