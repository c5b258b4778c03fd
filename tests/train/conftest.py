"""A corpus that a model learns in seconds, and runs of a tiny model on it."""

from functools import partial
from pathlib import Path

import pytest

from kvad.train.monitoring.callbacks import Callback
from tests.support.training_runs import tiny_config


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Twelve documents of counting, whose next bytes are mostly certain."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(12):
        words = [f"{number + i} is less than {number + i + 1}." for i in range(20 + number)]
        (folder / f"{number:02d}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture
def run_config():
    """``run_config(steps=20, lr=...)``: a tiny byte model that logs every step."""
    return partial(tiny_config, steps=12, log_interval=1, eval_interval=5, save_interval=5)


class Listener(Callback):
    """Records all reports."""

    def __init__(self) -> None:
        self.stages, self.steps, self.evals, self.samples, self.saves = [], [], [], [], []
        self.start = self.outcome = None

    def on_stage(self, text):
        self.stages.append(text)

    def on_start(self, report):
        self.start = report

    def on_step(self, report):
        self.steps.append(report)

    def on_eval(self, report):
        self.evals.append(report)

    def on_samples(self, report):
        self.samples.append(report)

    def on_save(self, path, step):
        self.saves.append((path.name, step))

    def on_end(self, outcome):
        self.outcome = outcome


@pytest.fixture
def listener() -> Listener:
    return Listener()
