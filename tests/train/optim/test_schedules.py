"""Learning rates compared with their formulas and torch's schedulers."""

import math

import pytest
import torch

from kvad.errors import ConfigError
from kvad.train.config.optim import OptimConfig
from kvad.train.config.run import RunConfig, TrainConfig
from kvad.train.optim.schedules import Plateau, Schedule


def learning_rate(config, train, step, elapsed, width=None):
    return Schedule(config, train, width).lr(step, elapsed)


def rates(config, train, steps, width=None):
    return [learning_rate(config, train, step, 0.0, width) for step in range(steps)]


def test_inverse_sqrt_with_noam_factor_equals_equation_3():
    config = OptimConfig(schedule="inverse-sqrt", noam_factor=2.0, warmup_steps=4000)
    found = rates(config, TrainConfig(steps=100_000), 20_000, width=512)
    for step in (0, 1, 1999, 3998, 3999, 4000, 19_999):
        number = step + 1
        assert found[step] == pytest.approx(2.0 * 512**-0.5 * min(number**-0.5, number * 4000**-1.5), rel=1e-12)
    assert max(found) == found[3999]


def test_inverse_sqrt_reaches_its_rate_at_the_end_of_warmup():
    found = rates(OptimConfig(schedule="inverse-sqrt", lr=3e-3, warmup_steps=10), TrainConfig(steps=100), 100)
    assert found[9] == pytest.approx(3e-3) == max(found)
    assert found[0] == pytest.approx(3e-4) and found[39] == pytest.approx(1.5e-3)


def test_noam_factor_requires_a_width():
    with pytest.raises(ConfigError, match=r"optim.noam_factor: must not be given"):
        Schedule(OptimConfig(schedule="inverse-sqrt", noam_factor=1.0), TrainConfig())


@pytest.mark.parametrize("form", ["linear", "sqrt"])
def test_wsd_rises_stays_and_falls(form):
    config = OptimConfig(schedule="wsd", lr=1e-2, min_lr=1e-3, warmup_steps=9, decay_fraction=0.25, decay_form=form)
    found = rates(config, TrainConfig(steps=200), 201)
    assert found[0] == pytest.approx(1e-3) and found[8] == pytest.approx(9e-3)
    assert set(found[9:151]) == {1e-2}
    for step in (151, 170, 199, 200):
        q = (step - 150) / 50
        assert found[step] == pytest.approx(1e-3 + 9e-3 * (1 - (q if form == "linear" else math.sqrt(q))))
    assert found[200] == pytest.approx(1e-3)


def test_wsd_with_a_clock_decays_in_the_last_share_of_the_time():
    config = OptimConfig(schedule="wsd", lr=1.0, min_lr=0.0, warmup_steps=0, decay_form="linear")
    found = [learning_rate(config, TrainConfig(minutes=1), 9, second) for second in (0.0, 47.9, 54.0, 60.0, 61.0)]
    assert found == pytest.approx([1.0, 1.0, 0.5, 0.0, 0.0])


def test_linear_constant_and_relative():
    train = TrainConfig(steps=110)
    linear = rates(OptimConfig(schedule="linear", lr=1e-2, min_lr=2e-3, warmup_steps=10), train, 111)
    assert linear[4] == pytest.approx(1e-2 * 5 / 11)
    assert (linear[10], linear[60], linear[110]) == pytest.approx((1e-2, 6e-3, 2e-3))
    constant = rates(OptimConfig(schedule="constant", lr=1e-2, warmup_steps=4), train, 110)
    assert constant[:4] == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3]) and set(constant[4:]) == {1e-2}
    relative = OptimConfig(name="adafactor", schedule="relative")
    assert learning_rate(relative, train, 0, 0.0) == learning_rate(relative, train, 9999, 0.0) == 1e-2
    assert learning_rate(relative, train, 39_999, 0.0) == pytest.approx(5e-3)


def test_plateau_equals_torch():
    losses = [3.0, 2.5, 2.6, 2.5, 2.4999, 2.2, 2.3, math.nan, 2.3, 2.3, 2.1, 2.2, 2.2, 2.2, 2.2, 2.2, 2.2, 2.2]
    plateau = Plateau(2, 0.5)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    for loss in losses:
        plateau.observe(loss)
        scheduler.step(loss)
        assert plateau.scale == optimizer.param_groups[0]["lr"]
    assert plateau.scale == 0.0625


def test_plateau_rate_has_a_minimum():
    config = OptimConfig(schedule="plateau", lr=1.0, min_lr=0.3, warmup_steps=0, plateau_patience=0, plateau_factor=0.5)
    schedule = Schedule(config, TrainConfig(steps=10))
    rates = []
    for loss in (1.0, 1.0, 1.0, 0.5):
        schedule.plateau.observe(loss)
        rates.append(schedule.lr(1, 0.0))
    assert rates == [1.0, 0.5, 0.3, 0.3]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"schedule": "constant", "min_lr": 0.0}, "optim.min_lr: has no meaning with optim.schedule = 'constant'"),
        ({"plateau_patience": 3}, "optim.plateau_patience: has no meaning with optim.schedule = 'cosine'"),
        ({"decay_fraction": 0.1}, "optim.decay_fraction: has no meaning with optim.schedule = 'cosine'"),
        ({"schedule": "inverse-sqrt", "noam_factor": 1.0, "lr": 1e-3}, "optim.noam_factor: must not be given together"),
        ({"schedule": "inverse-sqrt", "warmup_steps": 0}, "optim.warmup_steps: must be at least 1"),
        ({"schedule": "relative"}, "optim.schedule: 'relative' requires optim.name 'adafactor'"),
        ({"schedule": "relative", "name": "adafactor", "warmup_steps": 3}, "optim.warmup_steps: has no meaning"),
        ({"schedule": "noam"}, "optim.schedule: must be one of"),
        ({"schedule": "wsd", "decay_fraction": 1.5}, "optim.decay_fraction: must be above 0 and at most 1"),
        ({"schedule": "plateau", "plateau_factor": 1.0}, "optim.plateau_factor: must be between 0 and 1"),
        ({"momentum": 0.9}, "optim.momentum: has no meaning with optim.name = 'adamw'"),
        ({"name": "adafactor", "beta2": 0.95}, "optim.beta2: has no meaning with optim.name = 'adafactor'"),
        ({"name": "muon", "decay_rate": 0.8}, "optim.decay_rate: has no meaning with optim.name = 'muon'"),
        ({"name": "sgd"}, "optim.name: must be one of"),
        (
            {"name": "muon", "schedule": "inverse-sqrt", "noam_factor": 1.0, "muon_lr": 0.02},
            "optim.muon_lr: must not be given with optim.noam_factor",
        ),
        ({"ema_decay": 0.9, "average_last": 3, "average_interval": 5}, "optim.average_last: must not be given"),
        ({"average_last": 3}, "optim.average_interval: must be given"),
        ({"average_interval": 3}, "optim.average_interval: has no meaning without optim.average_last"),
        ({"ema_decay": 1.0}, r"optim.ema_decay: must be in \[0, 1\)"),
    ],
)
def test_unused_keys_are_refused(table, message):
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_dict({"optim": table})


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"name": "adafactor", "schedule": "relative"},
        {"name": "muon", "schedule": "wsd"},
        {"schedule": "plateau"},
        {"schedule": "inverse-sqrt", "noam_factor": 1.0, "average_last": 5, "average_interval": 10},
    ],
)
def test_a_stored_config_reads_back(table):
    config = RunConfig.from_dict({"optim": table})
    assert RunConfig.from_dict(config.to_dict()) == config
