"""Scheduled sampling: rate, drawn positions, inputs and targets."""

import math
from dataclasses import replace

import pytest
import torch

from kvad.errors import ConfigError
from kvad.model.no_cache import NoCache
from kvad.train.config.presets import MODEL_PRESETS
from kvad.train.config.run import ObjectiveConfig, RunConfig
from kvad.train.objectives.cross_entropy import (
    Autocast,
    CrossEntropyObjective,
    ScheduledSampling,
    ScheduledSamplingObjective,
    sampling_rate,
)
from tests.support.random_models import build
from tests.support.training_runs import tiny_config
from tests.train.data.test_text_packer import SMALL, VOCAB, Pairs, pair_dataset

EXACT = Autocast("fp32", "cpu")


def configured(sampling, **objective):
    tables = {"objective": {"kind": "seq2seq", "scheduled_sampling": sampling, **objective}}
    data = {"seq_len": 12, "validation_fraction": 0.2}
    return tiny_config("encoder-decoder", data=data, tables=tables, steps=100, batch_size=2)


def sampled(store, config):
    return pair_dataset(store, config, 1, ScheduledSampling(config))


@pytest.fixture
def model():
    return build(MODEL_PRESETS["transformer-tiny"](VOCAB, 12), dtype=torch.float64)


def test_sampling_rate_follows_the_schedule():
    at = [0, 25, 50, 100, 300]

    def shares(schedule):
        options = ObjectiveConfig("seq2seq", scheduled_sampling=0.4, scheduled_sampling_schedule=schedule)
        return [sampling_rate(options, 100, step) for step in at]

    assert shares("linear") == pytest.approx([0, 0.1, 0.2, 0.4, 0.4])
    assert shares("exponential") == pytest.approx([0, 0.4 * (1 - 0.01**0.25), 0.4 * 0.9, 0.4 * 0.99, 0.4 * 0.99])
    ends = 1 / (1 + math.exp(5))
    assert shares("sigmoid") == pytest.approx([0.4 * ends, 0.4 / (1 + math.exp(2.5)), 0.2, *[0.4 * (1 - ends)] * 2])


def test_positions_are_drawn_at_the_rate_except_the_first():
    counts = {0: 0, 50: 0, 100: 0}
    for step in counts:
        for seed in range(60):
            config = configured(0.5)
            config = replace(config, train=replace(config.train, seed=seed))
            (batch,) = sampled(SMALL, config).micro_batches(step)
            inside = (batch.model_input.positions > 0) & (batch.model_input.document_ids >= 0)
            assert inside[batch.sampled_indices].all()
            counts[step] += len(batch.sampled_indices) / int(inside.sum()) / 60
    assert counts[0] == 0
    assert counts[50] == pytest.approx(0.25, abs=0.05) and counts[100] == pytest.approx(0.5, abs=0.06)


def test_inputs_are_predictions_and_targets_stay(model):
    """Compares with a first pass and the gradient of the changed batch, computed by hand."""
    (batch,) = sampled(SMALL, configured(1.0)).micro_batches(100)
    no_cache, total = NoCache(model.config), len(batch.targets)
    with torch.no_grad():
        logits = model.logits(model(batch.model_input, no_cache), torch.arange(len(batch.model_input.token_ids)))
    tokens = batch.model_input.token_ids.clone()
    for place in batch.sampled_indices.tolist():
        tokens[place] = int(logits[place - 1].argmax())
    inside = (batch.model_input.positions > 0) & (batch.model_input.document_ids >= 0)
    assert len(batch.sampled_indices) == int(inside.sum()), "all but the first of each"
    assert (tokens != batch.model_input.token_ids).any()
    sampled_batch = batch._replace(model_input=batch.model_input._replace(token_ids=tokens))
    by_hand = CrossEntropyObjective(model, EXACT).accumulate_gradients(sampled_batch, total)
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    summed = ScheduledSamplingObjective(model, EXACT).accumulate_gradients(batch, total)
    assert summed == pytest.approx(by_hand, rel=1e-12)
    assert torch.equal(torch.cat([p.grad.flatten() for p in model.parameters()]), expected)
    model.zero_grad()
    forced = CrossEntropyObjective(model, EXACT).accumulate_gradients(batch, total)
    assert forced != pytest.approx(summed, rel=1e-3), "teacher forcing is another loss"


def test_rate_0_and_evaluation_are_teacher_forcing(model):
    data = sampled(SMALL, configured(0.5))
    (batch,) = data.micro_batches(0)
    assert len(batch.sampled_indices) == 0
    sampling, forcing = ScheduledSamplingObjective(model, EXACT), CrossEntropyObjective(model, EXACT)
    assert sampling.accumulate_gradients(batch, 7) == forcing.accumulate_gradients(batch, 7)
    (batch,) = data.micro_batches(100)
    assert sampling.evaluate_loss([batch]) == forcing.evaluate_loss([batch])


def test_rows_of_one_pair_without_padding_are_sampled():
    """Such a batch has no document ids."""
    store = Pairs(*[(3, 4)] * 5)
    content = {**configured(1.0).to_dict(), "data": {"seq_len": 5, "validation_fraction": 0.2}}
    (batch,) = sampled(store, RunConfig.from_dict(content)).micro_batches(100)
    assert len(batch.sampled_indices) == 2 * 4, "all of two rows but the first of each"


def test_number_of_steps_is_required():
    content = configured(0.5).to_dict()
    content["train"] = {"minutes": 3.0, "batch_size": 2}
    with pytest.raises(ConfigError, match=r"scheduled_sampling_steps: must be given for a run that only the clock"):
        ScheduledSampling(RunConfig.from_dict(content))
    content["objective"]["scheduled_sampling_steps"] = 10
    ScheduledSampling(RunConfig.from_dict(content))
