"""Eviction policies compared with worked examples, and with kvpress on the same tensors (tests/kvpress_parity)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvad.cache.device.eviction import eviction_scores, top_slots
from kvad.cache.policy import (
    ALL_QUERIES,
    TOVA,
    EvictionContext,
    EvictionPolicy,
    HeavyHitters,
    KeyNorm,
    Random,
    Sinks,
    SnapKV,
)
from kvad.config.model import AttentionSpec
from kvad.model_input import TokenPositions
from tests.kvpress_parity.tensors import HEADS, KV_HEADS, TOKENS, attention, keys

RETAINED = json.loads((Path(__file__).parents[1] / "golden_files" / "kvpress.json").read_text("utf-8"))


def context_of(mass: Tensor | None, held: Tensor | None = None, *, layer: int = 0) -> EvictionContext:
    """Return the context of the first m positions with mass [K, m] or keys ``held`` [K, m, D]."""
    tensor = mass if mass is not None else held
    assert tensor is not None
    num_heads, length = tensor.shape[:2]
    positions = torch.arange(length).expand(num_heads, -1)
    return EvictionContext(positions, mass, lambda: held, lambda: held, length, layer)  # type: ignore[arg-type, return-value]


def retained(policy: EvictionPolicy, context: EvictionContext, bits: int = 30) -> list[list[int]]:
    num_retained = min(policy.budget, context.positions.shape[1])
    return top_slots(eviction_scores(policy, context, bits), num_retained).tolist()


MASS = torch.tensor([[3.0, 0.5, 2.0, 1.0, 0.4, 0.2]])
NEEDLE = torch.tensor([[0.0, 6.0, 0.0, 0.0, 3.0, 3.0, 9.0, 9.0]])
TWO_HEADS = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.0], [0.1, 0.0, 0.7, 0.1, 0.0]])
SUMS = torch.tensor([[0.3, 0.1 + 0.2, 0.3, 0.9]], dtype=torch.float64)
KEYS = torch.tensor([[[3.0, 4.0], [1.0, 0.0], [0.0, 2.0], [9.0, 0.0]]])


@pytest.mark.parametrize(
    ("policy", "context", "expected"),
    [
        # Of six tokens four stay: the last two, and the two of most attention before them.
        (HeavyHitters(4, interval=2), context_of(MASS), [0, 2, 4, 5]),
        (HeavyHitters(4, interval=2, recent=1), context_of(MASS), [0, 2, 3, 5]),
        # Divided by the 6 5 4 3 2 1 queries that could see them: .5 .1 .5 .33 .2 .2
        (HeavyHitters(3, interval=2, recent=0, average=1), context_of(MASS), [0, 2, 3]),
        (HeavyHitters(3, interval=2, recent=0, num_sinks=2), context_of(MASS), [0, 1, 2]),
        # Averages of three over 0 6 0 0 3 3 are 2 2 2 1 2 2, and of equal scores the older ones stay.
        (SnapKV(5, interval=8, window=2, kernel=3), context_of(NEEDLE), [0, 1, 2, 6, 7]),
        (SnapKV(5, interval=8, window=2, kernel=1), context_of(NEEDLE), [1, 4, 5, 6, 7]),
        # 0 and 2 have most over both heads; the last one always stays.
        (TOVA(3, interval=2), context_of(TWO_HEADS), [0, 2, 4]),
        (KeyNorm(2, interval=2, recent=0), context_of(None, KEYS), [1, 2]),
        (KeyNorm(2, interval=2), context_of(None, KEYS), [1, 3]),
        # Sums that differ in their last bits are equal: the order of summation must not decide.
        (HeavyHitters(3, interval=2, recent=1), context_of(SUMS), [0, 1, 3]),
    ],
    ids=lambda value: str(value) if isinstance(value, EvictionPolicy) else "",
)
def test_a_policy_by_hand(policy, context, expected):
    assert retained(policy, context) == [expected] * context.positions.shape[0]


def test_random_scores_are_a_function_of_seed_layer_head_and_position():
    held, policy = torch.zeros(2, 64, 1), Random(16, interval=2)
    first = retained(policy, context_of(None, held))
    assert first == retained(policy, context_of(None, held)) and first[0] != first[1]
    assert first != retained(policy, context_of(None, held, layer=1))
    assert first != retained(Random(16, 2, seed=1), context_of(None, held))
    counts = torch.zeros(64)
    for seed in range(400):
        counts[retained(Random(16, interval=2, recent=0, seed=seed), context_of(None, held[:1]))[0]] += 1
    assert (counts - 100).abs().max() < 45  # 5 standard deviations


# ---------------------------------------------------------------- kvpress


def kvpress_context(policy: EvictionPolicy, seed: int) -> EvictionContext:
    """Return the attention of the observed queries, summed over the heads of a group, or the keys."""
    if not policy.observed_queries:
        return context_of(None, keys(seed)[0])
    weights = attention(seed)[0]
    queries = weights if policy.observed_queries == ALL_QUERIES else weights[:, TOKENS - policy.observed_queries :]
    return context_of(queries.sum(1).unflatten(0, (KV_HEADS, HEADS // KV_HEADS)).sum(1))


def policy_like(press: str, budget: int) -> EvictionPolicy:
    policies = {
        "snapkv": SnapKV(budget, interval=8, window=6, kernel=5),
        "tova": TOVA(budget, interval=8),
        "observed": HeavyHitters(budget, interval=8, recent=0, average=1),
        "key-norm": KeyNorm(budget, interval=8, recent=0),
    }
    return policies[press]


@pytest.mark.parametrize("name", [name for name in RETAINED if not name.startswith("streaming")])
def test_the_same_tokens_stay_as_under_kvpress(name):
    press, _, seed = name.split("/")
    policy = policy_like(press, len(RETAINED[name][0]))
    assert retained(policy, kvpress_context(policy, int(seed))) == RETAINED[name]


@pytest.mark.parametrize("name", [name for name in RETAINED if name.startswith("streaming")])
def test_sinks_are_streaming_in_kvpress(name):
    """The last query under ``sinks(4, n)`` sees the tokens that stay."""
    positions = torch.arange(TOKENS)
    for expected in RETAINED[name]:
        spec = Sinks(4, len(expected) - 4).restrict(AttentionSpec(True, None, 2, 4, 4), 4)
        visible = spec.pattern.visible(TokenPositions(positions[-1:]), TokenPositions(positions))[0]
        assert positions[visible].tolist() == expected


def test_the_presses_retain_different_tokens():
    presses = ["snapkv", "tova", "observed", "key-norm", "streaming"]
    assert len({json.dumps(RETAINED[f"{press}/0.5/1"]) for press in presses}) == len(presses)


def test_sinks_are_visible_within_the_layers_own_window_only() -> None:
    """sinks(2, 4) on layers with a window of 8: query 8 is 7 away from sink 1, query 20 from no sink."""
    pattern = Sinks(2, 4).restrict(AttentionSpec(True, 8, 1, 8, 8), 4).pattern
    queries, keys = TokenPositions(torch.tensor([3, 8, 9, 20])), TokenPositions(torch.arange(22))
    visible = [row.nonzero().flatten().tolist() for row in pattern.visible(queries, keys)]
    assert visible == [[0, 1, 2, 3], [1, 5, 6, 7, 8], [6, 7, 8, 9], [17, 18, 19, 20]]
