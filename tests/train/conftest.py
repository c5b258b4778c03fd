"""A corpus that a model learns in seconds, and runs of a tiny model on it."""

import dataclasses
from pathlib import Path

import pytest

from kvad.train.config.optim import OptimConfig
from kvad.train.config.run import RunConfig
from kvad.train.monitoring.callbacks import Callback

SHAPE = {"hidden_size": 32, "decoder.num_layers": 2, "decoder.layer_types.L.mlp.intermediate_size": 48}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Twelve documents of counting: what comes next is certain most of the time."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(12):
        words = [f"{number + i} is less than {number + i + 1}." for i in range(20 + number)]
        (folder / f"{number:02d}.txt").write_text(" ".join(words))
    return folder


def parted(settings):
    """The tables that settings belong to: [optim] and [train]."""
    optim = {field.name for field in dataclasses.fields(OptimConfig)} & settings.keys()
    return {
        "optim": {name: settings[name] for name in optim},
        "train": {n: settings[n] for n in settings.keys() - optim},
    }


@pytest.fixture
def run_config():
    """``run_config(steps=20, lr=...)``: a tiny byte model; keywords are OptimConfig's and TrainConfig's."""

    def make(*, data=None, tokenizer=None, model=None, **train) -> RunConfig:
        settings = {
            "steps": 12,
            "batch_size": 4,
            "log_interval": 1,
            "eval_interval": 5,
            "save_interval": 5,
            "precision": "fp32",
        }
        return RunConfig.from_dict(
            {
                "model": model or {"preset": "tiny", "set": SHAPE},
                "data": {"seq_len": 32, **(data or {})},
                "tokenizer": tokenizer or {"kind": "byte"},
                **parted({**settings, **train}),
            }
        )

    return make


class Listener(Callback):
    """Remembers what it was told."""

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
