"""Optimizers compared with other implementations; the loss scale; averages compared with their formulas."""

import math

import pytest
import torch
from torch import nn

from kvad.config.model import ModelConfig
from kvad.config.serialization import override
from kvad.errors import CheckpointError, ConfigError
from kvad.train.config.optim import OptimConfig
from kvad.train.config.run import TrainConfig
from kvad.train.optim.optimizer import LossScale, OptimizersContainer, uses_muon, uses_weight_decay
from tests.support.random_models import build, model_config


class Toy(nn.Module):
    """A matrix of a layer, a table, a norm and a stack of matrices."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def made(*shape):
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=dtype) * 0.3)

        self.embed = nn.Embedding.from_pretrained(made(11, 6).detach(), freeze=False)
        self.decoder = nn.Module()
        layer = nn.Module()
        layer.up = nn.Linear(6, 9, dtype=dtype)
        layer.down = nn.Linear(9, 6, dtype=dtype)
        layer.norm1 = nn.LayerNorm(6, dtype=dtype)
        layer.gate = made(3, 4, 5)
        self.decoder.layers = nn.ModuleList([layer])
        for parameter in self.parameters():
            parameter.data = made(*parameter.shape).data

    def randomise(self, seed, size=1.0):
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.grad = size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def copied(model):
    other = Toy()
    other.load_state_dict(model.state_dict())
    return other


def advance(model, optimization, steps, start=0):
    for step in range(start, start + steps):
        optimization.begin_step(step, 0.0)
        model.randomise(step)
        optimization.step(optimization.clip_grad_norm())


# ---------------------------------------------------------------- against others


CONSTANT = {"schedule": "constant", "lr": 0.02, "warmup_steps": 0}


def steps(model, container, reference, count, sizes=lambda step: 1.0):
    """Yield steps of ``model``, after ``reference`` got the same gradients."""
    for step in range(count):
        container.begin_step(step, 0.0)
        for each in (model, reference):
            each.randomise(step, size=sizes(step))
        container.step(container.clip_grad_norm())
        yield step


def decay_groups(named, decay):
    """Parameter groups with and without weight decay."""
    named = list(named)
    return [
        {"params": [p for n, p in named if uses_weight_decay(n, p) == decays], "weight_decay": decay * decays}
        for decays in (True, False)
    ]


@pytest.mark.parametrize("beta1", [None, 0.9])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("schedule", [CONSTANT, {"schedule": "relative"}], ids=lambda each: each["schedule"])
def test_adafactor_equals_transformers(beta1, scaled, schedule):
    transformers = pytest.importorskip("transformers.optimization")
    model, reference, relative = Toy(), Toy(), schedule["schedule"] == "relative"
    options = {"name": "adafactor", "beta1": beta1, "scale_parameter": scaled, "weight_decay": 0.1, **schedule}
    container = OptimizersContainer(model, OptimConfig(max_grad_norm=1e9, **options), TrainConfig())
    groups, lr = decay_groups(reference.named_parameters(), 0.1), None if relative else 0.02
    expected = transformers.Adafactor(groups, lr, relative_step=relative, scale_parameter=scaled, beta1=beta1)
    for _ in steps(model, container, reference, 12, lambda step: 10.0 ** (step % 4 - 2)):
        expected.step()
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("beta1", [None, 0.9])
def test_adafactor_equals_its_formula(beta1):
    """Matrix and vector, by the paper's algorithms, in a loop over the steps."""
    config = OptimConfig(name="adafactor", beta1=beta1, weight_decay=0, max_grad_norm=1e9, **CONSTANT)
    model, reference = Toy(), Toy()
    container = OptimizersContainer(model, config, TrainConfig())
    x = {n: p.detach().clone() for n, p in reference.named_parameters() if n.endswith(("up.weight", "up.bias"))}
    row, column, square = (torch.zeros(size, dtype=torch.float64) for size in (9, 6, 9))
    average = {name: torch.zeros_like(value) for name, value in x.items()}
    for step in steps(model, container, reference, 6):
        beta = 1 - (step + 1) ** -0.8
        for name, value in x.items():
            grad = reference.get_parameter(name).grad
            powers = grad**2 + 1e-30
            if value.dim() == 2:
                row = beta * row + (1 - beta) * powers.mean(1)
                column = beta * column + (1 - beta) * powers.mean(0)
                update = grad / (torch.outer(row, column) / row.mean()).sqrt()
            else:
                square = beta * square + (1 - beta) * powers
                update = grad / square.sqrt()
            update = update / max(1.0, update.square().mean().sqrt().item())
            update = update * 0.02 * max(1e-3, value.square().mean().sqrt().item())
            if beta1 is not None:
                update = average[name] = beta1 * average[name] + (1 - beta1) * update
            x[name] = value - update
            torch.testing.assert_close(model.get_parameter(name).detach(), x[name], rtol=1e-9, atol=1e-12)


def orthogonalised(matrix):
    """Five steps of X <- 3.4445 X - 4.7750 (X X') X + 2.0315 (X X')^2 X, from X / |X| (Jordan et al. 2024)."""
    flip = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if flip else matrix).bfloat16()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return (x.T if flip else x).to(matrix.dtype)


def test_muon_updates_matrices_of_layers_and_adamw_the_rest():
    model, reference = Toy(torch.float32), Toy(torch.float32)
    config = OptimConfig(name="muon", weight_decay=0.1, max_grad_norm=1e9, **CONSTANT)
    container = OptimizersContainer(model, config, TrainConfig())
    matrices = {n: p for n, p in reference.named_parameters() if uses_muon(n, p)}
    assert matrices.keys() == {f"decoder.layers.0.{name}.weight" for name in ("up", "down")}
    rest = ((n, p) for n, p in reference.named_parameters() if n not in matrices)
    adamw = torch.optim.AdamW(decay_groups(rest, 0.1), lr=0.02, betas=(0.9, 0.95))
    momentum = {n: torch.zeros_like(p) for n, p in matrices.items()}
    for _ in steps(model, container, reference, 5):
        adamw.step()
        with torch.no_grad():
            for name, p in matrices.items():
                momentum[name] = 0.95 * momentum[name] + 0.05 * p.grad
                update = orthogonalised(0.05 * p.grad + 0.95 * momentum[name])
                p.mul_(1 - 0.02 * 0.1).sub_(0.02 * 0.2 * math.sqrt(max(p.shape)) * update)
    start = dict(Toy(torch.float32).named_parameters())
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        if name in matrices:  # in bfloat16: each rounds in another order
            assert (a - b).norm() < 0.06 * (b - start[name]).norm(), name
        else:
            torch.testing.assert_close(a, b)


def test_muons_update_is_nearly_orthogonal():
    """Its singular values are in the paper's range for any gradient."""
    model = build(model_config(), dtype=torch.float32)
    config = OptimConfig(name="muon", schedule="constant", lr=1.0, warmup_steps=0, weight_decay=0.0)
    optimization = OptimizersContainer(model, config, TrainConfig())
    before = {name: p.detach().clone() for name, p in model.named_parameters() if uses_muon(name, p)}
    optimization.begin_step(0, 0.0)
    torch.manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimization.step(optimization.clip_grad_norm())
    assert before
    for name, p in model.named_parameters():
        if name in before:
            values = torch.linalg.svdvals(((before[name] - p) / (0.2 * math.sqrt(max(p.shape)))).double())
            assert values.min() > 0.3 and values.max() < 1.3, (name, values)


def test_rate_of_matrices_keeps_its_ratio():
    config = OptimConfig(name="muon", lr=1e-3, min_lr=1e-4, muon_lr=2e-2)
    optimization = OptimizersContainer(Toy(), config, TrainConfig(steps=100))
    for step in (0, 50, 99):
        rate = optimization.begin_step(step, 0.0)
        muon, adamw = optimization.optimizers
        assert muon.param_groups[0]["lr"] == pytest.approx(20 * rate) and adamw.param_groups[0]["lr"] == rate


def test_muon_without_a_matrix_is_refused():
    with pytest.raises(ConfigError, match=r"optim.name: 'muon' needs trained matrices of layers"):
        OptimizersContainer(nn.Linear(3, 3), OptimConfig(name="muon"), TrainConfig())


def test_norms_of_each_head_do_not_decay():
    table = override(model_config().to_dict(), {"decoder.layer_types.L.attention.qk_norm": "each"})
    model = build(ModelConfig.from_dict(table), dtype=torch.float32)
    norms = [(n, p) for n, p in model.named_parameters() if "norm" in n and p.dim() == 2]
    assert norms and not any(uses_weight_decay(n, p) or uses_muon(n, p) for n, p in norms)


# ---------------------------------------------------------------- state


CONFIGS = {
    "adamw": {},
    "adafactor": {"name": "adafactor"},
    "adafactor-average": {"name": "adafactor", "beta1": 0.9, "schedule": "relative"},
    "muon": {"name": "muon"},
    "plateau": {"schedule": "plateau", "plateau_patience": 0},
    "ema": {"ema_decay": 0.9},
    "average": {"average_last": 2, "average_interval": 2},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_state_is_restored_bit_for_bit(name):
    config, train = OptimConfig(**CONFIGS[name]), TrainConfig(steps=20)
    model = Toy()
    first = OptimizersContainer(model, config, train)
    advance(model, first, 5)
    first.on_evaluation(2.0), first.on_evaluation(3.0)
    stored = {key: tensor.clone() for key, tensor in first.state_tensors().items()}
    with first.averaged_weights():
        again = copied(model)  # as in a checkpoint
    second = OptimizersContainer(again, config, train)
    second.load_state_tensors(stored)
    advance(model, first, 4, start=5)
    advance(again, second, 4, start=5)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    one, other = first.state_tensors(), second.state_tensors()
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_state_of_another_shape_is_refused():
    model = Toy()
    optimization = OptimizersContainer(model, OptimConfig(name="adafactor"), TrainConfig())
    advance(model, optimization, 1)
    stored = optimization.state_tensors()
    stored["row.embed.weight"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"row.embed.weight is of shape \[3\], expected \[11\]"):
        optimization.load_state_tensors(stored)
    del stored["row.embed.weight"]
    with pytest.raises(CheckpointError, match=r"row.embed.weight is missing, expected \[11\]"):
        optimization.load_state_tensors(stored)
    averaged = OptimizersContainer(model, OptimConfig(ema_decay=0.5), TrainConfig())
    with pytest.raises(CheckpointError, match=r"averaged is missing"):
        averaged.load_state_tensors({})
    plateau = OptimizersContainer(model, OptimConfig(schedule="plateau"), TrainConfig())
    with pytest.raises(CheckpointError, match=r"plateau is missing"):
        plateau.load_state_tensors({})


def test_frozen_parameters_stay_unchanged():
    model = Toy()
    model.embed.weight.requires_grad_(False)
    before = model.embed.weight.clone()
    optimization = OptimizersContainer(model, OptimConfig(ema_decay=0.5), TrainConfig())
    advance(model, optimization, 2)
    assert torch.equal(model.embed.weight, before) and not any("embed" in name for name in optimization.state_tensors())


# ---------------------------------------------------------------- fp16's loss scale


def test_loss_scale_equals_torch():
    scale = LossScale(patience=3)
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    reference = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    for bad in [1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1]:
        reference.scale(parameter.sum()).backward()
        parameter.grad.fill_(math.inf if bad else 1.0)
        reference.step(optimizer)
        reference.update()
        optimizer.zero_grad()
        assert scale.update(math.inf if bad else 1.0) is not bool(bad)
        assert scale.scale == reference.get_scale()


def fp16(model):
    return OptimizersContainer(model, OptimConfig(lr=0.1, warmup_steps=0), TrainConfig(precision="fp16", device="cuda"))


def test_an_overflow_is_skipped_and_training_recovers():
    model, plain = Toy(), Toy()
    optimization = fp16(model)
    reference = OptimizersContainer(plain, OptimConfig(lr=0.1, warmup_steps=0), TrainConfig())
    for step, bad in enumerate([True, False, False, True, False]):
        optimization.begin_step(step, 0.0)
        size = 7 / optimization.scaled_total(7)
        assert size == 2.0 ** (15 if step else 16) or step == 4
        model.randomise(step, size=size)
        if bad:
            model.embed.weight.grad[0, 0] = math.inf
        norm, before = optimization.clip_grad_norm(), copied(model)
        assert optimization.can_continue(norm) and math.isfinite(norm) is not bad
        optimization.step(norm)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)) is bad
        if not bad:
            reference.begin_step(step, 0.0)
            plain.randomise(step)
            reference.step(reference.clip_grad_norm())
    assert (optimization.scale.scale, optimization.scale.good) == (2.0**14, 1)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    again = fp16(copied(model))
    again.load_state_tensors(optimization.state_tensors())
    assert (again.scale.scale, again.scale.good) == (2.0**14, 1)


def test_non_finite_gradient_at_the_minimum_scale_is_an_error():
    optimization = fp16(Toy())
    for _ in range(16):
        assert optimization.can_continue(math.nan)
        optimization.step(math.nan)
    assert optimization.scale.scale == 1.0 and not optimization.can_continue(math.nan)
    assert not OptimizersContainer(Toy(), OptimConfig(), TrainConfig()).can_continue(math.inf)


# ---------------------------------------------------------------- averages


def weights_after(config, steps):
    """Weights after every step, and the average at the end."""
    model = Toy()
    optimization = OptimizersContainer(model, config, TrainConfig(steps=100))
    raw = []
    for step in range(steps):
        advance(model, optimization, 1, start=step)
        raw.append([p.detach().clone() for p in model.parameters()])
    with optimization.averaged_weights():
        found = [p.detach().clone() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), raw[-1], strict=True)), "raw weights came back"
    return raw, found


def test_ema_equals_its_formula():
    raw, found = weights_after(OptimConfig(ema_decay=0.9), 7)
    for index, average in enumerate(found):
        wanted = sum(0.1 * 0.9 ** (6 - i) * one[index] for i, one in enumerate(raw)) / (1 - 0.9**7)
        torch.testing.assert_close(average, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("steps", "which"), [(1, [1]), (3, [2]), (4, [2, 4]), (9, [4, 6, 8]), (10, [6, 8, 10])])
def test_average_is_the_mean_of_the_last_copies(steps, which):
    raw, found = weights_after(OptimConfig(average_last=3, average_interval=2), steps)
    for index, average in enumerate(found):
        wanted = torch.stack([raw[step - 1][index] for step in which]).mean(dim=0)
        torch.testing.assert_close(average, wanted, rtol=1e-13, atol=1e-14)


def test_error_restores_the_trained_weights():
    model = Toy()
    optimization = OptimizersContainer(model, OptimConfig(ema_decay=0.9), TrainConfig())
    advance(model, optimization, 3)
    before = copied(model)

    def fail():
        with optimization.averaged_weights():
            assert not torch.equal(model.embed.weight, before.embed.weight)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
