"""Monitoring: callbacks, console, metrics file, TensorBoard, throughput."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.train.monitoring import callbacks as callbacks
    from kvad.train.monitoring import console as console
    from kvad.train.monitoring import metrics as metrics
    from kvad.train.monitoring import throughput as throughput
    from kvad.train.monitoring.callbacks import Callback as Callback
    from kvad.train.monitoring.callbacks import TrainingContext as TrainingContext
    from kvad.train.monitoring.callbacks import TrainingResult as TrainingResult
    from kvad.train.monitoring.console import make_progress as make_progress
    from kvad.train.monitoring.samples import greedy_decode as greedy_decode

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
