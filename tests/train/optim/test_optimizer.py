"""Weight decay, learning rates, moments by name."""

import math

import pytest
import torch

from kvad.train.config.optim import OptimConfig
from kvad.train.config.run import TrainConfig
from kvad.train.optim.optimizer import OptimizersContainer, uses_weight_decay
from tests.support.random_models import build, model_config
from tests.train.optim.test_schedules import learning_rate


def test_matrices_and_embeddings_decay_and_nothing_else():
    model = build(model_config(position="t5", norm="post", heads="sinks"), dtype=torch.float32)
    groups = {name: uses_weight_decay(name, p) for name, p in model.named_parameters()}
    assert groups["decoder.layers.0.attention.q.weight"] and groups["embedding.tokens.weight"] and groups["head.weight"]
    others = {name for name, decay in groups.items() if not decay}
    assert {"decoder.relative_bias.L", "head.bias", "decoder.norm.weight"} <= others
    assert "decoder.layers.0.attention.sink_logits" in others
    (optimizer,) = OptimizersContainer(model, OptimConfig(weight_decay=0.25), TrainConfig()).optimizers
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    assert sizes == [sum(groups.values()), len(others)]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
    assert optimizer.defaults["fused"]


def test_warmup_and_cosine_equal_nanogpt():
    config = OptimConfig(lr=1e-3, min_lr=1e-4, warmup_steps=100)
    rates = [learning_rate(config, TrainConfig(steps=2000), step, elapsed=0.0) for step in range(2001)]
    assert rates[0] == pytest.approx(1e-3 / 101) and rates[99] == pytest.approx(1e-3 * 100 / 101)
    assert rates[100] == pytest.approx(1e-3) == max(rates)
    assert rates[1050] == pytest.approx(5.5e-4) and rates[2000] == pytest.approx(1e-4)
    assert rates[525] == pytest.approx(1e-4 + 0.5 * (1 + math.cos(math.pi * 425 / 1900)) * 9e-4)


def test_rate_follows_the_time_limit():
    config, train = OptimConfig(lr=1e-3, min_lr=0.0, warmup_steps=0), TrainConfig(minutes=2)
    assert learning_rate(config, train, 5, 0.0) == pytest.approx(1e-3)
    assert learning_rate(config, train, 5, 60.0) == pytest.approx(5e-4) == learning_rate(config, train, 999, 60.0)
    assert learning_rate(config, train, 5, 130.0) == pytest.approx(0.0)


def test_a_short_run_has_a_short_warmup():
    config, slow = OptimConfig(lr=1.0, min_lr=0.0), TrainConfig(minutes=1)
    assert learning_rate(config, TrainConfig(steps=10), 1, 0.0) == 1.0
    assert learning_rate(config, slow, 5, elapsed=1.0) < 0.1 and learning_rate(config, slow, 5, elapsed=6.1) > 0.9


def test_gradient_is_clipped_to_its_maximum_norm():
    model = build(model_config(), dtype=torch.float32)
    optimization = OptimizersContainer(model, OptimConfig(max_grad_norm=0.5), TrainConfig())
    for scale, expected in ((1.0, 0.5), (1e-6, None)):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, scale)
        before = scale * math.sqrt(sum(parameter.numel() for parameter in model.parameters()))
        assert optimization.clip_grad_norm() == pytest.approx(before, rel=1e-4)
        after = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm().item()
        assert after == pytest.approx(before if expected is None else expected, rel=1e-4)
