"""Tokens drawn by the CPU kernels equal those of PyTorch's filters."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from kvad import ops
from kvad.engine.execution import sampler
from kvad.engine.scheduling import SamplingParams
from kvad.engine.scheduling.sequence import Request, RequestMetrics, TokenSequence
from kvad.ops.native import library as native

OPTIONS = (
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.9, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 0.3},
    {"temperature": 0.9, "top_p": 1e-9},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 2.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 10**6},
    {"temperature": 1.3, "min_p": 0.02},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1e-6, "top_p": 0.5},
    {"temperature": 1.1, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
)


def sequence(number: int, options: Any) -> TokenSequence:
    params = SamplingParams(seed=number, **options)
    request = Request(number, number, params, b"", frozenset(), RequestMetrics(2, 0.0))
    return TokenSequence(request, 0, [1, number], 100)


def random_scores(kind: str, rows: int, vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    scores = 3 * torch.randn(rows, vocab, generator=generator)
    if kind == "ties":
        scores = scores.round()
    elif kind == "equal":
        scores = torch.zeros(rows, vocab)
    elif kind == "banned":
        scores[torch.rand(rows, vocab, generator=generator) < 0.7] = float("-inf")
        scores[:, vocab // 2] = 1.0
    return scores


def both(scores: Tensor, sequences: list[TokenSequence]) -> tuple[list[int], list[int]]:
    return sampler._draw_filtered(scores, sequences), sampler._draw_filtered_in_torch(scores, sequences)


@pytest.mark.parametrize("variant", native.runnable_variants())
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "banned"])
def test_tokens_equal_those_of_pytorch(kind: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.native, "load", lambda: native.LoadResult(native.load_variant(variant)))
    rows, tokens = 12, set()
    for vocab in (1, 15, 16, 17, 1023, 1024, 5000):
        scores = random_scores(kind, rows, vocab)
        for number, options in enumerate(OPTIONS):
            ours, theirs = both(scores, [sequence(rows * number + row, options) for row in range(rows)])
            assert ours == theirs, (vocab, options)
            tokens.update(ours)
    assert len(tokens) > 100 or (kind == "equal" and len(tokens) > 50)


def test_a_row_does_not_depend_on_others_and_may_be_a_slice() -> None:
    scores = random_scores("random", len(OPTIONS), 5000)[:, :4321]
    sequences = [sequence(number, options) for number, options in enumerate(OPTIONS)]
    sequences[3] = sequence(3, {"temperature": 1.0, "typical_p": 0.5})  # PyTorch's
    together = sampler._draw_filtered(scores, sequences)
    assert together == [sampler._draw_filtered(scores[i : i + 1], [seq])[0] for i, seq in enumerate(sequences)]
    assert max(together) < 4321


@pytest.mark.parametrize("variant", native.runnable_variants())
def test_log_totals_are_those_of_pytorch(variant: str) -> None:
    """Of rows of any length, which may be slices; NaN where a number is not finite."""
    library = native.load_variant(variant)
    for vocab in (1, 15, 16, 17, 1023, 1024, 1025, 5000):
        scores = random_scores("random", 9, vocab + 3)[:, :vocab]
        scores[1] += 80.0
        scores[2] -= 3e4
        scores[3], scores[3, 0] = -3e38, 3e38
        for row, value in ((4, torch.inf), (5, -torch.inf), (6, torch.nan)):
            scores[row, vocab * row // 7] = value
        totals = library.log_totals(scores)
        assert totals[4:7].isnan().all()
        rows = [0, 1, 2, 3, 7, 8]
        torch.testing.assert_close(totals[rows], scores[rows].double().logsumexp(-1).float(), rtol=2e-7, atol=2e-6)


def test_draws_have_the_probabilities() -> None:
    scores = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04]]).log()
    kept = {"top_p": torch.tensor([0.5, 0.3, 0.1, 0, 0]), "top_k": torch.tensor([0.5, 0.3, 0, 0, 0])}
    for (name, expected), value in zip(kept.items(), (0.85, 2), strict=True):
        sequences = [sequence(number, {"temperature": 1.0, name: value}) for number in range(4000)]
        drawn = sampler._draw_filtered(scores.expand(4000, 5).contiguous(), sequences)
        shares = torch.bincount(torch.tensor(drawn), minlength=5) / 4000
        assert float((shares - expected / expected.sum()).abs().max()) < 0.03


def test_the_library_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    library, reason = ops.native.load()
    if library is None:
        pytest.skip(reason)
    calls = itertools.count()
    monkeypatch.setattr(type(library), "draw", lambda self, scores, parameters: [next(calls)] * len(scores))
    assert sampler._draw_filtered(torch.zeros(1, 9), [sequence(1, {"temperature": 1.0})]) == [0]
    assert next(calls) == 1
