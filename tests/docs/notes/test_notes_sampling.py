"""Sampling from logits, and the loss (002, 003 Decoding & Sampling, 004 section 1.1)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from kvad.engine.execution.sampler import apply_temperature, gather_logprobs, sample_tokens
from kvad.engine.scheduling.request import SamplingParams
from kvad.engine.scheduling.sequence import TokenSequence
from tests.support.sequences import token_sequence

LOGITS = [2.0, 1.0, 0.5, -1.0]


def job(temperature: float, number: int = 0) -> TokenSequence:
    return token_sequence(SamplingParams(temperature=temperature, seed=1), [0], 1, number, frozenset())


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_temperature_of_note_003(tau: float) -> None:
    """003, Decoding & Sampling: p = softmax(z / tau); samples follow it; tau = 0 is greedy."""
    z = np.array(LOGITS)
    p = np.exp(z / tau) / np.exp(z / tau).sum()
    tempered = apply_temperature(torch.tensor([LOGITS]), [job(tau)]).softmax(-1)
    np.testing.assert_allclose(tempered[0].numpy(), p, rtol=1e-6)
    draws = 4000
    counts = Counter(
        c.token_id for c in sample_tokens(torch.tensor([LOGITS] * draws), [job(tau, i) for i in range(draws)])
    )
    np.testing.assert_allclose([counts[i] / draws for i in range(4)], p, rtol=0, atol=0.03)
    assert [c.token_id for c in sample_tokens(torch.tensor([LOGITS] * 9), [job(0, i) for i in range(9)])] == [0] * 9


def test_lower_temperature_sharpens() -> None:
    """003, Decoding & Sampling: the best token's share falls as tau rises; the entropy grows."""
    taus = [0.25, 0.5, 1.0, 2.0, 4.0]
    p = apply_temperature(torch.tensor([LOGITS] * 5), [job(tau) for tau in taus]).softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    assert bool((p[:-1, 0] > p[1:, 0]).all()) and bool((entropy[:-1] < entropy[1:]).all())


def test_cross_entropy_with_a_one_hot_target_is_minus_log_p() -> None:
    """002, Attention (softmax, one-hot, cross entropy); 004 section 1.1: the loss at t is -log p(w_t | w_<t)."""
    logits, targets = np.random.RandomState(0).randn(5, 7), [3, 0, 6, 6, 1]
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    one_hot = np.eye(7)[targets]
    cross_entropy = -(one_hot * np.log(p)).sum(axis=-1)
    scores = gather_logprobs(torch.from_numpy(logits), targets, top_logprobs=0)
    assert scores is not None and [score.token_id for score in scores] == targets
    np.testing.assert_allclose([-score.logprob for score in scores], cross_entropy, rtol=1e-6)
