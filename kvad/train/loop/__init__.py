"""Trainer, checkpointer, data parallelism and dry run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.train.loop.data_parallel import DataParallelGroup as DataParallelGroup
    from kvad.train.loop.data_parallel import init_data_parallel as init_data_parallel
    from kvad.train.loop.dry_run import TrainingPlan as TrainingPlan
    from kvad.train.loop.dry_run import plan_training as plan_training
    from kvad.train.loop.run import RunOptions as RunOptions
    from kvad.train.loop.run import read_run_config as read_run_config
    from kvad.train.loop.run import resume_model as resume_model
    from kvad.train.loop.run import train_model as train_model

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
