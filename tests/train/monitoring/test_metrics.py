"""TensorBoard files: each step once, also after a resume; missing package."""

import builtins

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kvad.cli.main import main
from kvad.train.loop.run import resume_model, train_model
from kvad.train.monitoring.callbacks import Callback


class Stop(Callback):
    """Ends a run as a kill would, after its last save."""

    def on_step(self, report):
        if report.step == 8:
            raise KeyboardInterrupt


def read(run):
    found = EventAccumulator(str(run / "tensorboard"), purge_orphaned_data=True)
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_every_step_is_written_once(corpus, tmp_path, run_config, listener):
    config = run_config(steps=12, tensorboard=True)
    with pytest.raises(KeyboardInterrupt):
        train_model(config, [corpus], tmp_path / "run", callbacks=[Stop()])  # saved at 5, killed at 8
    assert [step for step, _ in read(tmp_path / "run")["loss/training"]] == list(range(1, 9))
    resume_model(tmp_path / "run", callbacks=[listener])
    found = read(tmp_path / "run")
    assert [step for step, _ in found["loss/training"]] == list(range(1, 13))
    assert [step for step, _ in found["loss/validation"]] == [5, 10, 12]
    for report in listener.steps:
        for tag, value in (
            ("loss/training", report.loss),
            ("learning rate", report.lr),
            ("gradient norm", report.grad_norm),
        ):
            assert abs(dict(found[tag])[report.step] - value) <= 1e-5 * abs(value)
    train_model(run_config(steps=2, tensorboard=True), [corpus], tmp_path / "run", overwrite=True)
    assert [step for step, _ in read(tmp_path / "run")["loss/training"]] == [1, 2]


def test_nothing_is_written_by_default(corpus, tmp_path, run_config):
    train_model(run_config(steps=1), [corpus], tmp_path / "run")
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_missing_package_is_reported(corpus, tmp_path, monkeypatch, capsys):
    real = builtins.__import__

    def refuse(name, *arguments, **more):
        if name.partition(".")[0] == "tensorboard":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert main(["train", str(corpus), "--out", str(tmp_path / "run"), "--tensorboard"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert err == [
        "kvad: error: this needs tensorboard, which is not installed",
        "kvad: hint: pip install tensorboard, or the extra 'tensorboard' of kvad",
    ]
    assert not (tmp_path / "run").exists()
