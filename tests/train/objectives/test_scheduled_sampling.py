"""Scheduled sampling: the share rises as its schedule says, drawn places hold what the model says, targets stay."""

import math

import pytest
import torch

from kvad.errors import ConfigError
from kvad.model.no_cache import NoCache
from kvad.train.config.presets import MODEL_PRESETS
from kvad.train.config.run import ObjectiveConfig, RunConfig
from kvad.train.objectives.cross_entropy import Autocast, CrossEntropyObjective, accumulate_gradients
from kvad.train.objectives.scheduled_sampling import SampledPairDataset, ScheduledSamplingObjective, sampling_rate
from tests.support.random_models import build
from tests.train.data.test_pair_dataset import PAD, SMALL, VOCAB, Pairs

EXACT = Autocast("fp32", "cpu")


def configured(sampling, *, steps=100, batch=2, **objective):
    content = {
        "objective": {"kind": "seq2seq", "scheduled_sampling": sampling, **objective},
        "train": {"steps": steps, "batch_size": batch},
        "data": {"seq_len": 12, "validation_fraction": 0.2},
    }
    return RunConfig.from_dict(content)


@pytest.fixture
def model():
    return build(MODEL_PRESETS["transformer-tiny"](VOCAB, 12), dtype=torch.float64)


def test_the_share_rises_as_the_schedule_says():
    at = [0, 25, 50, 100, 300]

    def shares(schedule):
        options = ObjectiveConfig("seq2seq", scheduled_sampling=0.4, scheduled_sampling_schedule=schedule)
        return [sampling_rate(options, 100, step) for step in at]

    assert shares("linear") == pytest.approx([0, 0.1, 0.2, 0.4, 0.4])
    assert shares("exponential") == pytest.approx([0, 0.4 * (1 - 0.01**0.25), 0.4 * 0.9, 0.4 * 0.99, 0.4 * 0.99])
    ends = 1 / (1 + math.exp(5))
    assert shares("sigmoid") == pytest.approx([0.4 * ends, 0.4 / (1 + math.exp(2.5)), 0.2, *[0.4 * (1 - ends)] * 2])


def test_places_are_drawn_by_their_share_and_never_the_first():
    counts = {0: 0, 50: 0, 100: 0}
    for step in counts:
        for seed in range(60):
            config = configured(0.5)
            config = RunConfig.from_dict({**config.to_dict(), "train": {"steps": 100, "batch_size": 2, "seed": seed}})
            (batch,) = SampledPairDataset(SMALL, config, 1, PAD).micro_batches(step)
            inside = (batch.model_input.positions > 0) & (batch.model_input.document_ids >= 0)
            assert inside[batch.sampled_indices].all()
            counts[step] += len(batch.sampled_indices) / int(inside.sum()) / 60
    assert (
        counts[0] == 0 and counts[50] == pytest.approx(0.25, abs=0.05) and counts[100] == pytest.approx(0.5, abs=0.06)
    )


def test_the_decoder_reads_what_the_model_says_and_learns_what_is_right(model):
    """By hand: forward, the likeliest token of the place before, and the gradient of the batch with those put in."""
    (batch,) = SampledPairDataset(SMALL, configured(1.0), 1, PAD).micro_batches(100)
    memory, total = NoCache(model.config), len(batch.targets)
    with torch.no_grad():
        logits = model.logits(model(batch.model_input, memory), torch.arange(len(batch.model_input.token_ids)))
    tokens = batch.model_input.token_ids.clone()
    for place in batch.sampled_indices.tolist():
        tokens[place] = int(logits[place - 1].argmax())
    inside = (batch.model_input.positions > 0) & (batch.model_input.document_ids >= 0)
    assert len(batch.sampled_indices) == int(inside.sum()) and (tokens != batch.model_input.token_ids).any(), (
        "all but the first of each"
    )
    by_hand = accumulate_gradients(
        model, batch._replace(model_input=batch.model_input._replace(token_ids=tokens)), memory, total, EXACT
    )
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    summed = ScheduledSamplingObjective(model, EXACT).accumulate_gradients(batch, total)
    assert summed == pytest.approx(by_hand, rel=1e-12)
    assert torch.equal(torch.cat([p.grad.flatten() for p in model.parameters()]), expected)
    model.zero_grad()
    forced = CrossEntropyObjective(model, EXACT).accumulate_gradients(batch, total)
    assert forced != pytest.approx(summed, rel=1e-3), "teacher forcing is another loss"


def test_nothing_drawn_is_teacher_forcing_and_so_is_what_it_is_judged_by(model):
    data = SampledPairDataset(SMALL, configured(0.5), 1, PAD)
    (batch,) = data.micro_batches(0)
    assert len(batch.sampled_indices) == 0
    assert ScheduledSamplingObjective(model, EXACT).accumulate_gradients(batch, 7) == CrossEntropyObjective(
        model, EXACT
    ).accumulate_gradients(batch, 7)
    (batch,) = data.micro_batches(100)
    assert ScheduledSamplingObjective(model, EXACT).evaluate_loss([batch]) == CrossEntropyObjective(
        model, EXACT
    ).evaluate_loss([batch])


def test_rows_of_one_pair_without_padding_are_drawn_too():
    """Their step names no documents: nobody else is there."""
    store = Pairs(*[(3, 4)] * 5)
    content = {**configured(1.0).to_dict(), "data": {"seq_len": 5, "validation_fraction": 0.2}}
    (batch,) = SampledPairDataset(store, RunConfig.from_dict(content), 1, PAD).micro_batches(100)
    assert len(batch.sampled_indices) == 2 * 4, "all of two rows but the first of each"


def test_somebody_must_say_over_how_many_steps():
    content = configured(0.5).to_dict()
    content["train"] = {"minutes": 3.0, "batch_size": 2}
    with pytest.raises(
        ConfigError, match=r"objective\.scheduled_sampling_steps: must be given for a run that only the clock"
    ):
        SampledPairDataset(SMALL, RunConfig.from_dict(content), 1, PAD)
    content["objective"]["scheduled_sampling_steps"] = 10
    SampledPairDataset(SMALL, RunConfig.from_dict(content), 1, PAD)
