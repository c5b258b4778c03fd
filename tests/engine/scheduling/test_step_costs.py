"""Bound of the time between tokens: chunks of prompts follow the measured cost of steps, given here as numbers."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from kvad.cache.config import CacheConfig
from kvad.engine.engine import Engine, EngineConfig
from kvad.engine.scheduling.request import SamplingParams
from kvad.engine.scheduling.sequence import SchedulerOutput
from kvad.engine.scheduling.step_costs import FIRST_TOKENS, MIN_TOKENS, WARM_UP_STEPS, StepCosts
from kvad.errors import ConfigError
from tests.support.engine_sessions import PROMPT, run, worst
from tests.support.random_models import build, model_config
from tests.support.scheduler_run import FakeModelRun

DECODING, FIXED, PER_TOKEN = 0.010, 0.004, 0.0001  # seconds of a simulated step


def simulated_seconds(output: SchedulerOutput, slowdown: float = 1.0) -> float:
    """Return the seconds of a step; prompt tokens cost more with longer contexts."""
    counts = [(each.num_tokens, each.start) for each in output.scheduled if each.num_tokens > 1]
    prompt = sum(FIXED + PER_TOKEN * tokens * (1 + start / 2000) for tokens, start in counts)
    return slowdown * (DECODING * any(each.num_tokens == 1 for each in output.scheduled) + prompt)


def steps_of(
    bound: float | None, length: int = 3000, slowdown: float = 1.0, max_slowdown: float | None = None
) -> list[tuple[int, float]]:
    """Let three sequences decode while a prompt of ``length`` tokens is read: (its tokens, seconds) of each step."""
    costs = None if bound is max_slowdown is None else StepCosts(bound, max_slowdown)
    fake = FakeModelRun(budget=512, chunk=512, limit=length + 200, step_costs=costs, blocks=2000)
    for number in range(3):
        fake.add(number, 4, max_tokens=190)
    steps = list[tuple[int, float]]()
    for step in range(190):
        if step == 20:
            fake.add(3, length, max_tokens=2)
        output = fake.output()
        seconds = simulated_seconds(output, slowdown)
        if costs is not None:
            costs.record([(each.start, each.num_tokens) for each in output.scheduled], seconds)
        steps.append((sum(each.num_tokens for each in output.scheduled if each.sequence.request_id == 3), seconds))
        fake.complete(output)
        if not fake.scheduler.sequences(3) and step > 20:
            break
    assert sum(tokens for tokens, _ in steps) == length + 1, "the prompt was read, and one token more"
    return steps


def test_steps_stay_within_the_bound() -> None:
    unbounded, bounded = steps_of(None), steps_of(0.030)
    assert max(seconds for _, seconds in unbounded) > 0.060
    reading = [(tokens, seconds) for tokens, seconds in bounded if tokens > 1][WARM_UP_STEPS:-1]
    assert all(seconds <= 0.030 for _, seconds in reading)
    assert max(seconds for _, seconds in reading) > 0.025, "the bound is used"
    assert reading[-1][0] < reading[len(reading) // 3][0], "later tokens of the prompt cost more"


def test_steps_stay_within_the_ratio() -> None:
    reading = [(tokens, seconds) for tokens, seconds in steps_of(None, max_slowdown=4.0) if tokens > 1][
        WARM_UP_STEPS:-1
    ]
    assert all(seconds <= 4.4 * DECODING for _, seconds in reading), "the median lags behind the growing context"
    assert max(seconds for _, seconds in reading) > 3.4 * DECODING, "the bound is used"


def test_many_waiting_prompts_get_more_of_a_step() -> None:
    costs = StepCosts(None, 2.0)
    for _ in range(WARM_UP_STEPS + 1):
        costs.record([(9, 1)], 0.1)
        costs.record([(0, 100)], 1.0)
    tokens = [costs.budget(512, *counts).max_tokens(0) for counts in ((4, 1), (4, 4), (2, 8))]
    assert tokens == [8, 8, 32]


def test_short_steps_leave_time_for_prompts() -> None:
    costs = StepCosts(None, 2.0)
    for _ in range(WARM_UP_STEPS + 1):
        costs.record([(9, 1)], 0.001)
        costs.record([(0, 100)], 0.01)
    assert costs.budget(512, 4, 1).max_tokens(0) == 100


def test_a_bound_that_cannot_be_met_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvad"):
        steps = steps_of(0.005, length=400)
    assert {tokens for tokens, _ in steps if tokens > 1} <= {FIRST_TOKENS, MIN_TOKENS}, (
        "the prompt is read nevertheless"
    )
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("max_inter_token: 5 ms cannot be met: a step of 3 sequences takes 10 ms without")


def test_prompts_alone_are_not_bounded() -> None:
    fake = FakeModelRun(budget=512, chunk=512, limit=1200, step_costs=StepCosts(0.001))
    fake.add(0, 1000, max_tokens=1)
    assert [each.num_tokens for each in fake.output().scheduled] == [512]


def test_the_median_ignores_one_slow_step() -> None:
    costs = StepCosts(0.030)
    for seconds in (9.0, 9.0, 0.010, 0.010, 5.0, 0.010):
        costs.record([(9, 1), (9, 1)], seconds)
    for seconds in (9.0, 9.0, 0.020, 0.020, 3.0):
        costs.record([(9, 1), (0, 100), (9, 1)], seconds)
    assert costs.decoding_seconds == 0.010 and costs.budget(512, 1, 1).max_tokens(0) == 170


@pytest.mark.parametrize("bound", [0.0, -1.0, float("inf"), float("nan")])
def test_invalid_bounds(bound: float) -> None:
    with pytest.raises(ConfigError, match="max_inter_token: must be above 0 seconds"):
        EngineConfig(max_inter_token=bound)
    with pytest.raises(ConfigError, match="max_slowdown: must be at least"):
        EngineConfig(max_slowdown=bound)


def test_the_bound_changes_no_output() -> None:
    cache = CacheConfig(dtype="float64", max_num_seqs=2, max_seq_len=96, block_size=4, prefill_chunk_size=64)
    model = build(model_config())
    engine = Engine(model, cache, EngineConfig(max_inter_token=1e-9))
    engine.add_request([5, 6], SamplingParams(max_tokens=60, temperature=0))
    for _ in range(8):
        engine.step()
    before = engine.scheduler.stats().steps
    _, tokens, scores = run(engine, PROMPT * 2, 5)
    _, expected, alone = run(Engine(model, cache), PROMPT * 2, 5)
    assert tokens == expected and worst(scores, alone) <= 1e-10
    assert engine.scheduler.stats().steps - before > 5 + len(PROMPT * 2) // FIRST_TOKENS


def test_costs_are_those_of_the_context() -> None:
    """Short prompts between the parts of a long one do not make these parts longer."""
    costs = StepCosts(0.030)
    for _ in range(WARM_UP_STEPS + 1):
        costs.record([(9, 1)], 0.010)
    for _ in range(WARM_UP_STEPS + 1):
        costs.record([(9, 1), (0, 100)], 0.020)
    budget = costs.budget(512, 1, 1)
    assert budget.max_tokens(0) == budget.max_tokens(50_000) == 170, "not measured: as the next shorter ones"
    costs.record([(9, 1), (50_000, 20)], 0.030)
    assert budget.max_tokens(50_000) == 17 and budget.max_tokens(33_000) == 17 and budget.max_tokens(500) == 170
    costs.record([(9, 1), (0, 50), (50_000, 10)], 0.025)  # the short prompt takes 5 ms of them
    assert budget.max_tokens(50_000) == 17
    budget.spend(50_000, 10)
    assert budget.max_tokens(0) == 70


def test_a_long_prompt_leaves_time_for_the_short_ones_behind_it() -> None:
    """Short prompts that arrive while two long ones are read have a token after a few steps; the long ones go on."""
    costs = StepCosts(0.030)
    fake = FakeModelRun(budget=512, chunk=512, limit=9000, step_costs=costs, blocks=8000, rows=16)
    for number in range(3):
        fake.add(number, 4, max_tokens=900)
    arrivals, first_tokens, num_read = dict[int, int](), dict[int, int](), Counter[int]()
    for step in range(160):
        if step == 20:
            fake.add(10, 8000, max_tokens=2)
            fake.add(11, 8000, max_tokens=2)
        if 40 <= step < 150 and step % 10 == 0:
            arrivals[step] = step
            fake.add(step, 60, max_tokens=2)
        output = fake.output()
        costs.record([(each.start, each.num_tokens) for each in output.scheduled], simulated_seconds(output))
        num_read.update({each.sequence.request_id: each.num_tokens for each in output.scheduled if step >= 40})
        fake.complete(output)
        first_tokens |= {number: step for number in fake.tokens if number not in first_tokens}
    waits = [first_tokens[number] - step for number, step in arrivals.items()]
    assert len(waits) == 11 and max(waits) <= 10, waits
    assert min(num_read[10], num_read[11]) > 500, "both long prompts are read meanwhile"
