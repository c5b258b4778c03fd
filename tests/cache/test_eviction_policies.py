"""Eviction policies against worked examples and against kvpress on the same tensors (tests/kvpress_parity)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvad.cache.device.eviction import eviction_scores, top_slots
from kvad.cache.eviction_policies import TOVA, HeavyHitters, KeyNorm, Random, SnapKV
from kvad.cache.policy import ALL_QUERIES, EvictionContext, EvictionPolicy, Sinks
from kvad.config.model import AttentionSpec
from kvad.model_input import AttentionPattern, TokenPositions
from tests.kvpress_parity.tensors import HEADS, KV_HEADS, TOKENS, attention, keys

KEPT = json.loads((Path(__file__).parents[1] / "golden_files" / "kvpress.json").read_text("utf-8"))


def seen(mass: Tensor | None, held: Tensor | None = None, *, now: int | None = None, layer: int = 0) -> EvictionContext:
    """mass [K, m] of the first m positions; ``held`` [K, m, D]."""
    shape = mass if mass is not None else held
    assert shape is not None
    many = shape.shape[1]
    positions = torch.arange(many).expand(shape.shape[0], -1)
    return EvictionContext(positions, mass, lambda: held, lambda: held, now or many, layer)  # type: ignore[arg-type, return-value]


def stays(policy: EvictionPolicy, what: EvictionContext, bits: int = 30) -> list[list[int]]:
    return top_slots(eviction_scores(policy, what, bits), min(policy.budget, what.positions.shape[1])).tolist()


# ---------------------------------------------------------------- by hand


def test_heavy_hitters_by_hand() -> None:
    """Of six tokens four stay: the last two whatever they got, and the two of most attention before them."""
    mass = torch.tensor([[3.0, 0.5, 2.0, 1.0, 0.4, 0.2]])
    assert stays(HeavyHitters(4, interval=2), seen(mass)) == [[0, 2, 4, 5]]
    assert stays(HeavyHitters(4, interval=2, recent=1), seen(mass)) == [[0, 2, 3, 5]]
    # divided by the 6 5 4 3 2 1 queries that could see them: .5 .1 .5 .33 .2 .2
    assert stays(HeavyHitters(3, interval=2, recent=0, average=1), seen(mass)) == [[0, 2, 3]]
    assert stays(HeavyHitters(3, interval=2, recent=0, num_sinks=2), seen(mass)) == [[0, 1, 2]]


def test_snapkv_by_hand() -> None:
    """A needle keeps what stands around it: averages of three over 0 6 0 0 3 3 are 2 2 2 1 2 2, and of equals the older
    stay.  Without neighbours 1, 4 and 5 do."""
    mass = torch.tensor([[0.0, 6.0, 0.0, 0.0, 3.0, 3.0, 9.0, 9.0]])
    assert stays(SnapKV(5, interval=8, window=2, kernel=3), seen(mass)) == [[0, 1, 2, 6, 7]]
    assert stays(SnapKV(5, interval=8, window=2, kernel=1), seen(mass)) == [[1, 4, 5, 6, 7]]


def test_tova_by_hand() -> None:
    """All heads keep the same: 0 and 2 have most, over both heads; the last always stays."""
    mass = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.0], [0.1, 0.0, 0.7, 0.1, 0.0]])
    assert stays(TOVA(3, interval=2), seen(mass)) == [[0, 2, 4], [0, 2, 4]]


def test_short_keys_stay_by_hand() -> None:
    held = torch.tensor([[[3.0, 4.0], [1.0, 0.0], [0.0, 2.0], [9.0, 0.0]]])
    assert stays(KeyNorm(2, interval=2, recent=0), seen(None, held)) == [[1, 2]]
    assert stays(KeyNorm(2, interval=2), seen(None, held)) == [[1, 3]]


def test_any_tokens_are_a_function_of_seed_layer_head_and_position() -> None:
    held = torch.zeros(2, 64, 1)
    policy = Random(16, interval=2)
    first = stays(policy, seen(None, held))
    assert first == stays(policy, seen(None, held)) and first[0] != first[1]
    assert first != stays(policy, seen(None, held, layer=1)) and first != stays(Random(16, 2, seed=1), seen(None, held))
    counts = torch.zeros(64)
    for seed in range(400):
        counts[stays(Random(16, interval=2, recent=0, seed=seed), seen(None, held[:1]))[0]] += 1
    assert (counts - 100).abs().max() < 45  # 5 standard deviations


def test_equals_are_told_apart_by_age_and_not_by_rounding() -> None:
    """Sums that differ in their last bits are one rank: a step's order of adding may not choose."""
    mass = torch.tensor([[0.3, 0.1 + 0.2, 0.3, 0.9]], dtype=torch.float64)
    assert stays(HeavyHitters(3, interval=2, recent=1), seen(mass)) == [[0, 1, 3]]


# ---------------------------------------------------------------- kvpress


def watched(policy: EvictionPolicy, seed: int) -> EvictionContext:
    """What the queries that count leave behind, summed over the heads of a group."""
    weights = attention(seed)[0]
    queries = weights if policy.observed_queries == ALL_QUERIES else weights[:, TOKENS - policy.observed_queries :]
    mass = queries.sum(1).unflatten(0, (KV_HEADS, HEADS // KV_HEADS)).sum(1)
    return seen(mass if policy.observed_queries else None, keys(seed)[0]) if not policy.observed_queries else seen(mass)


def policy_like(press: str, budget: int) -> EvictionPolicy:
    made = {
        "snapkv": SnapKV(budget, interval=8, window=6, kernel=5),
        "tova": TOVA(budget, interval=8),
        "observed": HeavyHitters(budget, interval=8, recent=0, average=1),
        "key-norm": KeyNorm(budget, interval=8, recent=0),
    }
    return made[press]


@pytest.mark.parametrize("name", [name for name in KEPT if not name.startswith("streaming")])
def test_the_same_tokens_stay_as_under_kvpress(name: str) -> None:
    press, _, seed = name.split("/")
    policy = policy_like(press, len(KEPT[name][0]))
    assert stays(policy, watched(policy, int(seed))) == KEPT[name]


@pytest.mark.parametrize("name", [name for name in KEPT if name.startswith("streaming")])
def test_sinks_are_what_kvpress_calls_streaming(name: str) -> None:
    """What the last query sees of a row under ``sinks(4, n)``."""
    for kept in KEPT[name]:
        mixer = Sinks(4, len(kept) - 4).restrict(AttentionSpec(True, None, 2, 4, 4), 4)
        every = torch.arange(TOKENS)
        seen_by_last = AttentionPattern.from_spec(mixer).visible(TokenPositions(every[-1:]), TokenPositions(every))[0]
        assert every[seen_by_last].tolist() == kept


def test_the_presses_keep_different_tokens() -> None:
    """So that one policy in place of another is heard."""
    same = ["snapkv", "tova", "observed", "key-norm", "streaming"]
    assert len({json.dumps(KEPT[f"{press}/0.5/1"]) for press in same}) == len(same)
