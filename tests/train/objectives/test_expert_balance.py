"""Balance of experts: losses and biases by their formulas, resumed and shared steps, and routers that collapse."""

import math
from dataclasses import replace

import pytest
import torch

from kvad.config.layers import MoEConfig
from kvad.errors import ConfigError
from kvad.model import NoCache, Transformer
from kvad.model_input import ModelInput, SubBatch
from kvad.train.config import ObjectiveConfig
from kvad.train.data import Batch
from kvad.train.loop.failures import COLLAPSE_PATIENCE, collapse_warnings
from kvad.train.loop.run import train_model
from kvad.train.objectives.cross_entropy import Autocast, CrossEntropyObjective
from kvad.train.objectives.expert_balance import ExpertBalancer, ExpertLoad
from kvad.train.setup.objective_factory import build_objective
from tests.support.lab_models import tiny
from tests.support.training_runs import assert_resume_is_exact, metric_lines, tiny_config

EXACT = Autocast("fp32", "cpu")
SIGMOID = MoEConfig(10, 5, 2, router="sigmoid", selection_bias=True)
OPTIONS = ObjectiveConfig(router_aux_loss_coef=0.5, router_z_loss_coef=0.25, router_bias_update_rate=0.125)


def model_of(mlp, seed=0):
    torch.manual_seed(seed)
    return Transformer(tiny(mlp=mlp)).double().train()


def batch_of(config, rows, length, seed, padding=0):
    """Rows whose last ``padding`` tokens are padding; every third other token has a target."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (rows * length,), generator=generator)
    positions = torch.arange(length).repeat(rows)
    documents = torch.where(positions < length - padding, 0, -1)
    at = ((documents >= 0) & (positions % 3 == seed % 3)).nonzero().flatten()
    step = ModelInput(tokens, positions, (SubBatch(rows, length, length),), at, document_ids=documents)
    return Batch(step, torch.randint(0, config.vocab_size, (len(at),), generator=generator))


def routings_of(model, batch):
    """Logits and choices of each layer, without padding."""
    routings, is_token = [], batch.model_input.document_ids >= 0
    model(batch.model_input, NoCache(model.config), routings)
    return [(logits[is_token], experts[is_token]) for logits, experts in routings]


def losses_by_hand(model, batch, options):
    """The losses of all routers by their formulas, number by number, and the loads by layer."""
    total, loads = 0.0, []
    for logits, experts in routings_of(model, batch):
        rows, chosen = logits.tolist(), experts.flatten().tolist()
        squares, sums = 0.0, [0.0] * len(rows[0])
        for row in rows:
            squares += math.log(sum(map(math.exp, row))) ** 2
            is_sigmoid = model.config.decoder.layer_config(0).mlp.router == "sigmoid"
            scores = [1 / (1 + math.exp(-x)) if is_sigmoid else math.exp(x) for x in row]
            sums = [old + score / sum(scores) for old, score in zip(sums, scores, strict=True)]
        counts = [chosen.count(expert) for expert in range(len(sums))]
        pairs = zip(counts, sums, strict=True)
        balance = len(sums) * sum(count / len(chosen) * mean / len(rows) for count, mean in pairs)
        total += options.router_aux_loss_coef * balance + options.router_z_loss_coef * squares / len(rows)
        loads.append(tuple(counts))
    return total, loads


def differentiable_losses(model, batch, options):
    """The losses of softmax routers, as one expression of tensors."""
    total = 0.0
    for logits, experts in routings_of(model, batch):
        scores, num_experts = logits.exp(), logits.shape[1]
        share = torch.stack([(experts == i).double().mean() for i in range(num_experts)])
        balance = num_experts * (share * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()
        total = total + options.router_aux_loss_coef * balance
        total = total + options.router_z_loss_coef * (scores.sum(-1).log() ** 2).mean()
    return total


@pytest.mark.parametrize("mlp", [MoEConfig(10, 5, 2), SIGMOID])
def test_losses_and_loads_are_those_of_the_papers(mlp):
    model = model_of(mlp)
    batch = batch_of(model.config, 3, 7, seed=1, padding=2)
    expected, loads = losses_by_hand(model, batch, OPTIONS)
    balancer, routings = ExpertBalancer(model, OPTIONS), []
    model(batch.model_input, NoCache(model.config), routings)
    assert balancer.loss(routings, batch.model_input).item() == pytest.approx(expected, rel=1e-12)
    found = balancer.end_step(lambda x: x, is_updated=True)
    assert [load.counts for load in found] == loads
    assert [load.layer for load in found] == ["decoder.layers.0.mlp", "decoder.layers.1.mlp"]
    assert sum(balancer.end_step(lambda x: x, is_updated=True)[0].counts) == 0, "counted once"


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_accumulated_micro_batches(recompute):
    model = model_of(MoEConfig(10, 5, 2))
    batches = [batch_of(model.config, 2, 9, seed=1), batch_of(model.config, 3, 6, seed=2, padding=1)]
    counts = [len(batch.targets) for batch in batches]
    assert counts[0] != counts[1]
    expected = 0.0
    for batch, count in zip(batches, counts, strict=True):
        hidden = model(batch.model_input, NoCache(model.config))
        logits = model.logits(hidden, batch.model_input.logit_indices)
        expected = expected + torch.nn.functional.cross_entropy(logits, batch.targets, reduction="sum") / sum(counts)
        expected = expected + differentiable_losses(model, batch, OPTIONS) * count / sum(counts)
    expected.backward()
    by_hand = {name: x.grad for name, x in model.named_parameters() if x.requires_grad}
    model.zero_grad()
    model.decoder.checkpoint_activations = recompute
    objective = CrossEntropyObjective(model, EXACT, experts=ExpertBalancer(model, OPTIONS))
    for batch in batches:
        objective.accumulate_gradients(batch, sum(counts))
    for name, gradient in by_hand.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-9, atol=1e-12, msg=name)
    expected_loads = [losses_by_hand(model, batch, OPTIONS)[1] for batch in batches]
    loads = objective.experts.end_step(lambda x: x, is_updated=True)
    summed = [tuple(map(sum, zip(*parts, strict=True))) for parts in zip(*expected_loads, strict=True)]
    assert [load.counts for load in loads] == summed, "a recomputed layer counts once"


def test_biases_move_by_the_sign_of_the_loads_of_all_ranks():
    model, other = model_of(SIGMOID), model_of(SIGMOID)
    balancers = [ExpertBalancer(each, OPTIONS) for each in (model, other)]
    batches = [batch_of(model.config, 2, 9, seed=seed) for seed in (1, 2)]
    before = [layer.mlp.selection_bias.tolist() for layer in model.decoder.layers]
    loads = [losses_by_hand(model, batch, OPTIONS)[1] for batch in batches]
    for balancer, batch in zip(balancers, batches, strict=True):
        routings = []
        model(batch.model_input, NoCache(model.config), routings)
        balancer.loss(routings, batch.model_input)
    whole = torch.cat([a + b for a, b in zip(balancers[0]._counts, balancers[1]._counts, strict=True)])
    for balancer in balancers:
        balancer.end_step(lambda _: whole, is_updated=True)
    for index, layer in enumerate(model.decoder.layers):
        counts = [a + b for a, b in zip(loads[0][index], loads[1][index], strict=True)]
        mean = sum(counts) / len(counts)
        expected = [b + 0.125 * ((mean > n) - (mean < n)) for b, n in zip(before[index], counts, strict=True)]
        assert layer.mlp.selection_bias.tolist() == expected
        assert torch.equal(layer.mlp.selection_bias, other.decoder.layers[index].mlp.selection_bias)


def test_biases_stay_if_the_optimizer_skips_a_step():
    model = model_of(SIGMOID)
    balancer, routings, batch = ExpertBalancer(model, OPTIONS), [], batch_of(model.config, 2, 9, seed=1)
    model(batch.model_input, NoCache(model.config), routings)
    balancer.loss(routings, batch.model_input)
    balancer.end_step(lambda x: x, is_updated=False)
    assert not model.decoder.layers[0].mlp.selection_bias.any()


def test_router_is_float32_under_autocast():
    model = model_of(MoEConfig(10, 5, 2)).float()
    routings, batch = [], batch_of(model.config, 2, 9, seed=1)
    with Autocast("bf16", "cpu")():
        model(batch.model_input, NoCache(model.config), routings)
    assert {routing.logits.dtype for routing in routings} == {torch.float32}


# ---------------------------------------------------------------- collapse


@pytest.mark.parametrize(
    ("counts", "busy", "starved"),
    [((10,) * 8, 8, 0), ((90, 2, 2, 2, 2, 1, 1, 0), 1, 3), ((30, 30, 30, 2, 2, 2, 2, 2), 3, 0), ((0, 0), 0, 0)],
)
def test_numbers_of_busy_and_starved_experts(counts, busy, starved):
    load = ExpertLoad("layer", counts)
    assert (load.num_busy, load.num_starved) == (busy, starved)
    assert load.max_ratio == (max(counts) / (sum(counts) / len(counts)) if any(counts) else 0.0)


def test_a_collapse_is_reported_once_per_layer_and_only_if_it_lasts():
    few, many = (50, 46, 1, 1, 1, 1), (20, 20, 20, 20, 10, 10)
    steps, warnings = {}, []
    for step in range(3 * COLLAPSE_PATIENCE):
        interrupted = many if step % (COLLAPSE_PATIENCE - 1) == 0 else few
        found = collapse_warnings(steps, [ExpertLoad("a", few), ExpertLoad("b", interrupted), ExpertLoad("c", many)])
        warnings += [(step, text) for text in found]
    ((step, text),) = warnings
    assert step == COLLAPSE_PATIENCE - 1 and "the router of a collapses: 2 of 6 experts got 90%" in text


WORDS = "\n".join(("abcdefghijklmnopqrstuvwxyz" * 2)[n % 11 :][: 13 + n * n * n % 10] for n in range(200))
EXPERTS = {"kind": "moe", "intermediate_size": 8, "num_experts": 8, "num_experts_per_token": 1}
EXPERTS |= {"router": "sigmoid", "selection_bias": True, "renormalize": False}


def run_config(objective, mlp=None, **settings):
    layers = {"hidden_size": 16, "decoder.num_layers": 2, "decoder.layer_types.L.mlp": {**EXPERTS, **(mlp or {})}}
    tables = {"objective": {"kind": "next-token", **objective}}
    return tiny_config(model={"preset": "tiny", "set": layers}, tables=tables, log_interval=1, **settings)


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text(WORDS)
    return path


@pytest.mark.parametrize("objective", [{}, {"router_aux_loss_coef": 0.3}, {"router_bias_update_rate": 0.05}])
def test_balancing_keeps_all_experts_in_use(objective, corpus, tmp_path, monkeypatch):
    """A high learning rate lets a router collapse to few of its 8 experts; a loss or a bias prevents it."""
    loads, real = [], ExpertBalancer.end_step

    def recorded(*arguments, **options):
        loads.append(real(*arguments, **options))
        return loads[-1]

    monkeypatch.setattr(ExpertBalancer, "end_step", recorded)
    train_model(run_config(objective, steps=40, lr=0.05), [corpus], tmp_path / "run")
    last = [[sum(step[layer].counts[expert] for step in loads[-20:]) for expert in range(8)] for layer in range(2)]
    warnings = [line["text"] for line in metric_lines(tmp_path / "run", "warning")]
    line = metric_lines(tmp_path / "run", "step")[-1]
    assert line["expert_load"] == {load.layer: load.max_ratio for load in loads[-1]}
    assert line["starved_experts"] == {load.layer: load.num_starved for load in loads[-1]}
    unused = [sum(100 * count < sum(counts) for count in counts) for counts in last]
    if objective:
        assert unused == [0, 0] and not warnings
    else:
        assert unused[0] >= 3 and any("decoder.layers.0.mlp collapses" in text for text in warnings)


def test_resume_is_exact_with_biases_and_losses(corpus, tmp_path):
    objective = {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.01, "router_bias_update_rate": 0.02}
    more = {"gradient_accumulation_steps": 2, "activation_checkpointing": True, "eval_interval": 5}
    config = run_config(objective, {"renormalize": True}, steps=9, lr=0.01, **more)
    whole, parts = assert_resume_is_exact(config, [corpus], tmp_path, stops=[3, 7])
    both = [
        [(line["expert_load"], line["starved_experts"]) for line in metric_lines(run, "step")] for run in (whole, parts)
    ]
    assert both[0] == both[1] and math.isfinite(max(both[0][-1][0].values()))


@pytest.mark.parametrize(
    ("mlp", "objective", "message"),
    [
        (None, {"router_aux_loss_coef": 0.1}, "objective.router_aux_loss_coef: this model has no experts"),
        (
            MoEConfig(10, 5, 2),
            {"router_bias_update_rate": 0.1},
            "router_bias_update_rate: no router has a selection bias",
        ),
    ],
)
def test_options_without_effect_are_refused(mlp, objective, message):
    model = Transformer(tiny(mlp=mlp))
    with pytest.raises(ConfigError, match=message):
        build_objective(replace(tiny_config(), objective=ObjectiveConfig(**objective)), model, EXACT)
