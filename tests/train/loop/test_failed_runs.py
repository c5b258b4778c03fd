"""Runs that an error ends: hints, restart, and how comparisons read them."""

import pytest

from kvad.errors import CheckpointError, DataError, MemoryPlanError, NumericalError
from kvad.evaluation.compare_runs import comparison_warnings, read_run, read_runs
from kvad.train.loop.run import resume_model, train_model
from kvad.train.monitoring.callbacks import Callback
from kvad.train.monitoring.metrics import read_metrics
from kvad.train.optim.optimizer import OptimizersContainer


class FailAfter(Callback):
    """Raises an error in a step."""

    def __init__(self, step, error):
        self.step, self.error = step, error

    def on_step(self, report):
        if report.step == self.step:
            raise self.error


def config_of(run_config, **changes):
    return run_config(**{"log_interval": 10, "eval_interval": 100, "save_interval": 5, **changes})


@pytest.mark.parametrize(
    ("precision", "step", "hint"),
    [
        ("fp32", 3, "there is no checkpoint yet; train with a lower learning rate"),
        ("bf16", 3, "there is no checkpoint yet; train with a lower learning rate or in fp32"),
        ("fp32", 6, "the last checkpoint is whole; train with a lower learning rate"),
    ],
)
def test_hint_of_a_numerical_error(corpus, tmp_path, run_config, monkeypatch, precision, step, hint):
    real = OptimizersContainer.clip_grad_norm
    calls = iter(range(1, 100))
    monkeypatch.setattr(
        OptimizersContainer, "clip_grad_norm", lambda self: float("nan") if next(calls) == step else real(self)
    )
    with pytest.raises(NumericalError, match=f"step {step}: ") as caught:
        train_model(config_of(run_config, precision=precision), [corpus], tmp_path / "run")
    assert caught.value.hint == hint


@pytest.mark.parametrize(("step", "left"), [(3, "there is no checkpoint yet; "), (6, "the last checkpoint is whole; ")])
def test_hint_of_an_out_of_memory_error(corpus, tmp_path, run_config, step, left):
    with pytest.raises(MemoryPlanError) as caught:
        train_model(config_of(run_config), [corpus], tmp_path / "run", callbacks=[FailAfter(step, MemoryError())])
    assert caught.value.hint.startswith(left)
    if step > 5:
        with pytest.raises(MemoryPlanError) as caught:
            resume_model(tmp_path / "run", callbacks=[FailAfter(7, MemoryError())])
        assert caught.value.hint.startswith(left)


def test_metrics_of_a_failed_run_are_read_and_it_restarts(corpus, tmp_path, run_config):
    dead, whole = tmp_path / "dead", tmp_path / "whole"
    with pytest.raises(NumericalError):
        train_model(config_of(run_config), [corpus], dead, callbacks=[FailAfter(3, NumericalError("not finite"))])
    train_model(config_of(run_config, steps=4), [corpus], whole)
    run = read_run(dead)
    assert (run.summary(0.0).steps, run.summary(0.0).failed, run.finished) == (3, "not finite", False)
    assert "dead failed: not finite" in comparison_warnings(read_runs([dead, whole]))
    with pytest.raises(CheckpointError, match="holds a run that has no checkpoint yet") as caught:
        resume_model(dead)
    assert f"kvad train {dead / 'run.toml'} CORPUS --out {dead}" in caught.value.hint
    train_model(config_of(run_config), [corpus], dead)
    assert read_run(dead).finished and read_run(dead).failed is None


def test_resume_drops_the_failed_line(corpus, tmp_path, run_config):
    out, error = tmp_path / "run", NumericalError("not finite")
    with pytest.raises(NumericalError):
        train_model(config_of(run_config), [corpus], out, callbacks=[FailAfter(5, error)])  # before its save
    assert read_metrics(out / "metrics.jsonl")[-1] == {"kind": "failed", "step": 5, "text": "not finite"}
    with pytest.raises(NumericalError):
        train_model(config_of(run_config), [corpus], out, callbacks=[FailAfter(6, error)])
    resume_model(out)
    kinds = [line["kind"] for line in read_metrics(out / "metrics.jsonl")]
    assert "failed" not in kinds and kinds[-1] == "end"


def test_failure_in_the_first_step_is_reported(corpus, tmp_path, run_config, monkeypatch):
    monkeypatch.setattr(OptimizersContainer, "clip_grad_norm", lambda self: float("nan"))
    with pytest.raises(NumericalError):
        train_model(config_of(run_config), [corpus], tmp_path / "run")
    with pytest.raises(DataError, match="failed before it had logged a step: step 1: "):
        read_run(tmp_path / "run")
