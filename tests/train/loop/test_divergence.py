"""Divergence warning: given once to a diverging run, never to a noisy one."""

import math
import random
from dataclasses import astuple

import pytest

from kvad.train.loop.failures import PATIENCE, DivergenceDetector
from kvad.train.loop.run import resume_model, train_model
from kvad.train.monitoring.metrics import read_metrics


def warnings_of(losses, norms=None):
    trend, found = DivergenceDetector(), []
    for step, loss in enumerate(losses, 1):
        words = trend.update(step, loss, 1.0 if norms is None else norms[step - 1], 1e-3)
        found += [(step, words)] if words else []
    return found


def learning(steps, noise=0.0, seed=0, last=1.5, first=5.5):
    rng = random.Random(seed)
    return [last + (first - last) * math.exp(-step / 60) + rng.gauss(0, noise) for step in range(steps)]


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_run_does_not_diverge(noise, seed):
    assert warnings_of(learning(2000, noise, seed)) == []


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5])
def test_a_rising_loss_diverges(noise):
    rng = random.Random(1)
    climbed = [min(1.5 + 0.05 * step, 5.0) + rng.gauss(0, noise) for step in range(300)]
    ((step, words),) = warnings_of([*learning(400, noise), *climbed])
    assert 400 + PATIENCE < step < 400 + 3 * PATIENCE, "once, and soon"
    assert words.startswith("it diverges: a loss of ") and "optim.lr (now 1.0e-03)" in words


def test_a_learning_rate_too_high_from_the_start_diverges():
    assert warnings_of([5.5, *([30.0] * 200)])[0][0] < 2 * PATIENCE


def test_a_noisy_loss_that_blew_up_diverges():
    rng = random.Random(0)
    assert warnings_of([*learning(200), *(rng.uniform(3, 35) for _ in range(200))])


@pytest.mark.parametrize("outlier", [3.0, 30.0, 1e4])
def test_an_outlier_does_not_diverge(outlier):
    losses = learning(600, 0.05)
    losses[400] = outlier
    assert warnings_of(losses) == []


def test_a_temporary_rise_does_not_diverge():
    losses = learning(600)
    losses[400:430] = [4.0] * 30
    assert warnings_of(losses) == []


def test_a_small_loss_may_double():
    assert warnings_of([0.01] * 300 + [0.05] * 300) == []


def test_growing_gradients_diverge():
    norms = [math.exp(-step / 100) + 0.1 for step in range(300)] + [1000.0] * 200
    ((_, words),) = warnings_of([2.0] * 500, norms)
    assert "a gradient norm of" in words
    assert warnings_of([2.0] * 500, [random.Random(step).lognormvariate(0, 1) for step in range(500)]) == []
    norms[310:] = [0.1] * 190
    assert warnings_of([2.0] * 500, norms) == [], "ten steps are too few"
    assert warnings_of([2.0] * 500, [math.inf] * 3 + [1.0] * 497) == [], "an adapting fp16 scale"


def test_state_restores_the_detector():
    losses = [*learning(100, 0.2), *([5.0] * 100)]
    whole, parts = DivergenceDetector(), DivergenceDetector()
    for step, loss in enumerate(losses, 1):
        parts = DivergenceDetector(*astuple(parts))
        assert whole.update(step, loss, 1.0, 1e-3) == parts.update(step, loss, 1.0, 1e-3)
    assert whole == parts


def test_a_run_whose_rate_is_far_too_high_is_warned_once(corpus, tmp_path, run_config, listener):
    warned = []
    listener.on_warning = warned.append
    config = run_config(
        steps=150, lr=3.0, warmup_steps=20, max_grad_norm=1e9, weight_decay=0.0, eval_interval=1000, save_interval=60
    )
    out = tmp_path / "run"
    train_model(config, [corpus], out, callbacks=[listener])
    (report,) = warned
    assert "it diverges" in report.text and report.step > PATIENCE
    (line,) = [line for line in read_metrics(out / "metrics.jsonl") if line["kind"] == "warning"]
    assert line == {"kind": "warning", "step": report.step, "text": report.text}
    resume_model(out, callbacks=[listener])
    assert len(warned) == 1, "the checkpoint stores that it was warned"


def test_a_run_that_learns_is_not_warned(corpus, tmp_path, run_config, listener):
    listener.on_warning = lambda report: pytest.fail(report.text)
    train_model(
        run_config(steps=150, lr=1e-2, batch_size=1, eval_interval=1000, save_interval=1000), [corpus], tmp_path / "run"
    )
