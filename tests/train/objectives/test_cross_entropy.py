"""Loss, gradients in slices and micro-batches, precisions."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvad.model.no_cache import NoCache
from kvad.model_input import ModelInput, SubBatch
from kvad.ops import cross_entropy
from kvad.train.data.collate import Batch
from kvad.train.objectives.cross_entropy import Autocast, CrossEntropyObjective, resolve_precision
from tests.support.random_models import VOCAB, build, model_config

EXACT = Autocast("fp32", "cpu")


def ragged(rows, length, seed, share=0.6):
    """Rows in which some positions have a target."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (rows * length,), generator=generator)
    indices = (torch.rand(rows * length, generator=generator) < share).nonzero().view(-1)
    positions = torch.arange(length).repeat(rows)
    targets = torch.randint(0, VOCAB, (len(indices),), generator=generator)
    return Batch(ModelInput(tokens, positions, (SubBatch(rows, length, length),), indices), targets)


def joined(batches, length):
    """The micro-batches as one batch."""
    tokens = torch.cat([b.model_input.token_ids for b in batches])
    sizes = np.cumsum([0, *(len(b.model_input.token_ids) for b in batches)])
    indices = torch.cat([b.model_input.logit_indices + int(n) for b, n in zip(batches, sizes, strict=False)])
    positions = torch.cat([b.model_input.positions for b in batches])
    rows = len(tokens) // length
    return Batch(
        ModelInput(tokens, positions, (SubBatch(rows, length, length),), indices),
        torch.cat([b.targets for b in batches]),
    )


def gradients(model, batches, totals):
    model.zero_grad()
    objective = CrossEntropyObjective(model, EXACT)
    summed = sum(objective.accumulate_gradients(b, t) for b, t in zip(batches, totals, strict=True))
    return summed, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.fixture
def model():
    return build(model_config(), dtype=torch.float32).train()


def test_loss_is_the_mean_cross_entropy_of_targets(model):
    batch = ragged(3, 10, seed=1)
    no_cache = NoCache(model.config)
    logits = model.logits(model(batch.model_input, no_cache), batch.model_input.logit_indices)
    reference = F.cross_entropy(logits, batch.targets)
    reference.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    summed, got = gradients(model, [batch], [len(batch.targets)])
    assert summed / len(batch.targets) == pytest.approx(reference.item(), rel=1e-6)
    assert torch.allclose(got, expected, atol=1e-6)
    result = CrossEntropyObjective(model, EXACT).evaluate_loss([batch])
    assert (result.loss, result.targets) == (pytest.approx(reference.item(), rel=1e-6), len(batch.targets))


def test_loss_is_independent_of_the_slices(model, monkeypatch):
    batch = ragged(3, 10, seed=1)
    whole = gradients(model, [batch], [len(batch.targets)])
    shapes = []
    real = torch.Tensor.log_softmax
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 4 * VOCAB)
    monkeypatch.setattr(torch.Tensor, "log_softmax", lambda x, **k: (shapes.append(tuple(x.shape)), real(x, **k))[1])
    sliced = gradients(model, [batch], [len(batch.targets)])
    assert len(shapes) > 3 and max(shape[0] for shape in shapes) == 4
    assert sliced[0] == pytest.approx(whole[0], rel=1e-6) and torch.allclose(sliced[1], whole[1], atol=1e-6)


def test_ragged_micro_batches_equal_one_batch(model):
    """Token-weighted: 4 accumulated gradients equal the gradient of all rows at once to 1e-6."""
    micro = [ragged(4, 10, seed=i, share=share) for i, share in enumerate((0.9, 0.1, 0.5, 0.3))]
    total = sum(len(b.targets) for b in micro)
    assert len({len(b.targets) for b in micro}) == 4, "the micro-batches are not ragged"
    summed, accumulated = gradients(model, micro, [total] * 4)
    whole_sum, whole = gradients(model, [joined(micro, 10)], [total])
    assert summed == pytest.approx(whole_sum, rel=1e-6)
    assert (accumulated - whole).abs().max() <= 1e-6
    _, of_means = gradients(model, micro, [4 * len(b.targets) for b in micro])  # a mean of means
    assert (of_means - whole).abs().max() > 1e-3


def test_untrained_loss_is_log_vocab_size():
    """GPT-2's sanity check: the first loss is about ln V."""
    from kvad.model.transformer import Transformer

    torch.manual_seed(0)
    model = Transformer(model_config())
    result = CrossEntropyObjective(model, EXACT).evaluate_loss([ragged(8, 32, seed=0)])
    assert result.loss == pytest.approx(math.log(VOCAB), abs=0.1)


def test_bf16_is_close_and_computes_the_loss_in_fp32(model, monkeypatch):
    batch = ragged(3, 10, seed=1)
    exact = gradients(model, [batch], [len(batch.targets)])
    dtypes = set()
    real = torch.Tensor.log_softmax
    monkeypatch.setattr(torch.Tensor, "log_softmax", lambda x, **k: (dtypes.add(x.dtype), real(x, **k))[1])
    model.zero_grad()
    objective = CrossEntropyObjective(model, Autocast("bf16", "cpu"))
    summed = objective.accumulate_gradients(batch, len(batch.targets))
    rough = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert dtypes == {torch.float32}
    assert 0 < abs(summed / exact[0] - 1) < 0.02
    assert F.cosine_similarity(rough, exact[1], dim=0) > 0.99


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"avx512_bf16": True, "cpu_name": "AMD EPYC"}, "bf16"),
        ({"amx_bf16": True, "avx512_bf16": True, "cpu_name": "Intel Xeon"}, "bf16"),
        ({"avx512_bf16": True, "cpu_name": "Intel Xeon"}, "fp32"),
        ({"avx512_bf16": True}, "bf16"),
        ({}, "fp32"),
    ],
)
def test_auto_precision(monkeypatch, flags, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    assert resolve_precision("auto", "cpu") == expected
    assert resolve_precision("fp32", "cpu") == "fp32" and resolve_precision("bf16", "cpu") == "bf16"


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
def test_label_smoothing_equals_formula_and_torch(smoothing):
    """-(1 - e) log p(target) - e / C sum of log p, by hand and by torch, in float64; its gradient too."""
    model = build(model_config(), dtype=torch.float64).train()
    batch = ragged(3, 10, seed=1)
    no_cache, total = NoCache(model.config), len(batch.targets)
    logits = model.logits(model(batch.model_input, no_cache), batch.model_input.logit_indices)
    log_p = logits.log_softmax(-1)
    right = log_p.gather(1, batch.targets.unsqueeze(1)).squeeze(1)
    by_hand = (-(1 - smoothing) * right - smoothing / VOCAB * log_p.sum(-1)).sum()
    assert by_hand.item() == pytest.approx(
        F.cross_entropy(logits, batch.targets, reduction="sum", label_smoothing=smoothing).item(), rel=1e-12
    )
    (by_hand / total).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    objective = CrossEntropyObjective(model, EXACT, smoothing)
    summed = objective.accumulate_gradients(batch, total)
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert summed == pytest.approx(by_hand.item(), rel=1e-12)
    assert (got - expected).abs().max() <= 1e-12
    assert objective.evaluate_loss([batch]).loss == pytest.approx(-right.mean().item(), rel=1e-12), (
        "evaluations do not smooth"
    )
