"""Statements of note 004 (sections 1.1 to 1.4) and note 002 on the loss, on packing, and on what was measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from kvad.config.layers import RopeConfig
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.train.data.collate import Batch, CollateConfig, collate_rows
from kvad.train.data.packers import TokenSpans
from kvad.train.objectives.cross_entropy import Autocast, CrossEntropyObjective

Build = Callable[..., Transformer]
Hidden = Callable[..., Tensor]
SEPARATOR = 0
STREAM = np.array([SEPARATOR, 7, 8, 9, SEPARATOR, 5, 6])  # two documents
SOLO = [([SEPARATOR, 7, 8, 9], [7, 8, 9, SEPARATOR]), ([SEPARATOR, 5], [5, 6])]  # tokens, targets
PLAIN = Autocast("fp32", "cpu")
ROOT = Path(__file__).resolve().parents[3]


def packed() -> Batch:
    """Build one row of six tokens: the first document, and the part of the second that fits."""
    store = cast("Any", SimpleNamespace(offsets=np.array([0, 4, 7]), take=lambda at: STREAM[at]))
    spans = TokenSpans(store, np.array([[0, 4], [4, 7]]))
    return collate_rows(spans.segments(np.array([0]), 6), CollateConfig(6))


def test_the_loss_is_the_mean_of_minus_log_p(build: Build, hidden: Hidden) -> None:
    """004 section 1.1: L_t = -log p(w_t | w_<t), averaged; the separator begins each document, so w_1 counts."""
    model, losses = build(position=RopeConfig()), []
    for tokens, targets in SOLO:
        with torch.inference_mode():
            logits = model.logits(hidden(model, torch.tensor(tokens)), torch.arange(len(tokens))).numpy()
        p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        losses += [-np.log(p[t, target]) for t, target in enumerate(targets)]
    loss, count, _ = CrossEntropyObjective(model, PLAIN).evaluate_loss([packed()])
    assert count == len(losses) == 6
    assert loss == pytest.approx(np.mean(losses), rel=1e-6)


def test_packed_documents_have_solo_gradients(build: Build, step_of: Callable[..., Any]) -> None:
    """004 section 1.3: packed into one window they give the gradient of two windows; without the mask they do not."""
    model, gradients = build(position=RopeConfig()), {}
    batch = packed()
    bleeding = Batch(batch.model_input._replace(document_ids=None, positions=torch.arange(6)), batch.targets)
    solo = [Batch(step_of(torch.tensor(tokens)), torch.tensor(targets)) for tokens, targets in SOLO]
    for name, batches in {"packed": [batch], "alone": solo, "bleeding": [bleeding]}.items():
        model.zero_grad()
        for one in batches:
            reference = NoCache(model.config, kernel="reference")
            CrossEntropyObjective(model, PLAIN, cache=reference).accumulate_gradients(one, 6)
        gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(gradients["packed"], gradients["alone"], rtol=0, atol=1e-6)
    assert float((gradients["bleeding"] - gradients["alone"]).abs().max()) > 1e-2


def test_measured_claims_about_training() -> None:
    """002, Pre-Norm | Post-Norm; 004 section 1.4: the runs in dev/results, and the page's numbers of them."""
    lines = [json.loads(line) for line in (ROOT / "dev/results/claims.jsonl").read_text("utf-8").splitlines()]
    losses: dict[tuple[str, str], list[float]] = {}
    for line in sorted(lines, key=lambda line: int(line["seed"])):
        variant = line["variant"].replace("as it is:", "base:")
        losses.setdefault((line["claim"], variant), []).append(line["loss"])
    page = (ROOT / "docs/explanation/training-claims.md").read_text("utf-8")
    for (claim, variant), runs in losses.items():
        spread = f"{min(runs):.3f} to {max(runs):.3f}"
        assert f"| {claim} | {variant} | {statistics.mean(runs):.3f} | {spread} | {len(runs)} |" in page
    mean = {variant: statistics.mean(runs) for (claim, variant), runs in losses.items() if claim == "norms"}
    assert (f"{mean['post-norm, none']:.3f}", f"{mean['pre-norm, none']:.3f}") == ("3.349", "1.983")
    assert mean["post-norm, warm-up"] < 2.1
    variants = "base: tied head, 8 heads, rotary", "untied head", "1 head"
    tied, untied, one_head = (losses["parts", name] for name in variants)
    assert max(tied) < min(one_head) and round(statistics.mean(one_head) - statistics.mean(tied), 2) == 0.05
    assert all(0 < b - a < 0.03 for a, b in zip(tied, untied, strict=True))
    assert 0.005 < statistics.mean(untied) - statistics.mean(tied) < 0.015
