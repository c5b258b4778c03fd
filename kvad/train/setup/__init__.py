"""Run file to model, data and objective; checks before training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.train.setup import data_check as data_check
    from kvad.train.setup import initialize as initialize
    from kvad.train.setup import memory_estimate as memory_estimate
    from kvad.train.setup import objective_factory as objective_factory
    from kvad.train.setup import preflight as preflight
    from kvad.train.setup import prepared as prepared
    from kvad.train.setup import run_data as run_data
    from kvad.train.setup.initialize import load_initial as load_initial
    from kvad.train.setup.prepared import prepare_data as prepare_data
    from kvad.train.setup.run_data import CorpusArgument as CorpusArgument
    from kvad.train.setup.run_data import RunData as RunData
    from kvad.train.setup.run_data import resolve_corpus as resolve_corpus

__all__ = [
    "CorpusArgument",
    "RunData",
    "data_check",
    "initialize",
    "load_initial",
    "memory_estimate",
    "objective_factory",
    "preflight",
    "prepare_data",
    "prepared",
    "resolve_corpus",
    "run_data",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "CorpusArgument": "run_data",
        "RunData": "run_data",
        "load_initial": "initialize",
        "prepare_data": "prepared",
        "resolve_corpus": "run_data",
    },
    ("data_check", "initialize", "memory_estimate", "objective_factory", "preflight", "prepared", "run_data"),
)
