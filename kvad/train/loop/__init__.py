"""Trainer, checkpointer, data parallelism and dry run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.train.loop.data_parallel import DataParallelGroup as DataParallelGroup
    from kvad.train.loop.data_parallel import init_data_parallel as init_data_parallel
    from kvad.train.loop.dry_run import TrainingPlan as TrainingPlan
    from kvad.train.loop.dry_run import plan_training as plan_training
    from kvad.train.loop.run import read_model_run as read_model_run
    from kvad.train.loop.run import read_summarizer_run as read_summarizer_run
    from kvad.train.loop.run import resume_model as resume_model
    from kvad.train.loop.run import resume_summarizer as resume_summarizer
    from kvad.train.loop.run import train_model as train_model
    from kvad.train.loop.run import train_summarizer as train_summarizer

__all__ = [
    "DataParallelGroup",
    "TrainingPlan",
    "init_data_parallel",
    "plan_training",
    "read_model_run",
    "read_summarizer_run",
    "resume_model",
    "resume_summarizer",
    "train_model",
    "train_summarizer",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "DataParallelGroup": "data_parallel",
        "TrainingPlan": "dry_run",
        "init_data_parallel": "data_parallel",
        "plan_training": "dry_run",
        "read_model_run": "run",
        "read_summarizer_run": "run",
        "resume_model": "run",
        "resume_summarizer": "run",
        "train_model": "run",
        "train_summarizer": "run",
    },
    (),
)
