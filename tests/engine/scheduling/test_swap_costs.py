"""What giving way costs, as it is measured and believed."""

from __future__ import annotations

import pytest

from kvad.engine.scheduling.preemption import DECAY_FACTOR, GUESS_WEIGHT_BYTES, INITIAL_SECONDS_PER_BYTE, SwapCostModel

MIB = 1 << 20


def test_nothing_is_swapped_before_the_first_measurement() -> None:
    assert not SwapCostModel().swap_is_cheaper(1, 1000)


def test_the_choice_is_the_cheaper_one() -> None:
    costs = SwapCostModel()
    costs.record("compute", 1000, 1.0)  # 1 ms a token
    for _ in range(30):
        costs.record("out", 64 * MIB, 0.064)  # 1 ms a MiB
        costs.record("in", 64 * MIB, 0.064)
    assert costs.swap_seconds(MIB) == pytest.approx(2e-3, rel=0.02)
    assert costs.swap_is_cheaper(MIB, 3) and not costs.swap_is_cheaper(MIB, 1)
    for _ in range(30):
        costs.record("write", 64 * MIB, 0.64)
        costs.record("read", 64 * MIB, 0.32)
    assert costs.swap_seconds(MIB, disk=True) == pytest.approx(17e-3, rel=0.02)
    assert costs.swap_seconds(MIB, disk=True, back=True) == pytest.approx(6e-3, rel=0.02)
    assert not costs.swap_is_cheaper(MIB, 10, disk=True) and costs.swap_is_cheaper(MIB, 10)
    assert costs.swap_is_cheaper(MIB, 10, disk=True, back=True)


def test_the_latest_measurement_weighs_most() -> None:
    costs = SwapCostModel()
    costs.record("compute", 100, 100.0)
    for _ in range(20):
        costs.record("compute", 100, 1.0)
    assert 0.01 <= costs.seconds_per_token < 0.02


def test_an_expensive_copy_is_retried_later() -> None:
    costs = SwapCostModel()
    costs.record("compute", 1000, 0.01)
    costs.record("out", 8 * MIB, 60.0)  # the machine slept
    nbytes, tokens = MIB, 1000
    assert not costs.swap_is_cheaper(nbytes, tokens)
    num_calls = 0
    while not costs.swap_is_cheaper(nbytes, tokens):
        costs.decay()
        num_calls += 1
        assert num_calls < 200
    assert num_calls > 5
    assert 0 < DECAY_FACTOR < 1


def test_measurements_replace_the_initial_estimate() -> None:
    costs = SwapCostModel()
    assert costs.seconds_per_byte("read") == INITIAL_SECONDS_PER_BYTE["read"]
    costs.record("read", GUESS_WEIGHT_BYTES, 0.0)
    assert costs.seconds_per_byte("read") == pytest.approx(INITIAL_SECONDS_PER_BYTE["read"] / 2)


@pytest.mark.parametrize("seconds", [-1.0, 0.0])
def test_invalid_measurements_are_ignored(seconds: float) -> None:
    costs = SwapCostModel()
    costs.record("compute", 10, seconds)
    costs.record("in", 10, seconds)
    costs.record("compute", 0, 1.0)
    assert costs.seconds_per_token == 0.0 and costs.seconds_per_byte("in") > 0
    assert set(costs.measured()) == {"token_us", "out_ns", "in_ns", "write_ns", "read_ns"}
