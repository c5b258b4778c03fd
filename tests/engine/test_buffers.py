"""Static buffers: equal buckets get equal addresses, steps say what their plans say, nothing stale is left behind."""

import pytest

from kvad.cache.memory import Memory
from kvad.cache.sizing import CacheConfig, groups
from kvad.config import mixers
from kvad.engine.buffers import MOST_BUCKETS, Bucket, StepBuffers
from kvad.engine.engine import Engine
from kvad.engine.request import Sampling
from kvad.engine.runner import Runner
from kvad.engine.scheduler import Plan
from kvad.step import EMPTY_BLOCK, Step
from tests.models import build, model_config


def make_engine(**kinds: str) -> Engine:
    model = build(model_config(**kinds))
    return Engine(model, CacheConfig(dtype="float64", rows=4, capacity=96, block_size=4, chunk=8))


def watched(engine: Engine) -> list[tuple[Plan, Step]]:
    """Every plan of this engine from now on, with its step, checked when it was made."""
    seen = []
    fill = engine.runner.buffers.fill

    def note(plan: Plan) -> Step:
        step = fill(plan)
        seen.append((plan, step))
        check(plan, step)
        return step

    engine.runner.buffers.fill = note  # type: ignore[method-assign]
    return seen


def check(plan: Plan, step: Step) -> None:
    flat = [(w, w.start + i) for w in plan.work for i in range(w.count)]
    assert step.tokens.tolist() == [w.row.tokens[p] for w, p in flat]
    assert step.positions.tolist() == [p for _, p in flat]
    assert step.lanes == plan.lanes
    if step.limits is not None:
        assert step.limits.tolist() == [w.row.limit for w, _ in flat]
    for place, slots, tables in zip(step.places, plan.placed.slots, plan.placed.tables, strict=True):
        assert place.slots.tolist() == slots
        rows = [row for table in place.tables for row in table.tolist()]
        for row, blocks in zip(rows, tables, strict=True):
            assert row == [*blocks, *[EMPTY_BLOCK] * (len(row) - len(blocks))]


def run(engine: Engine, lengths: tuple[int, ...]) -> None:
    for length in lengths:
        engine.submit(list(range(length)), Sampling(temperature=0, max_tokens=12))
    while not engine.idle:
        engine.step()


@pytest.mark.parametrize("heads", ["gqa", "window-mix"])
def test_equal_buckets_give_the_same_tensors_and_the_plans_numbers(heads: str) -> None:
    engine = make_engine(heads=heads)
    seen = watched(engine)
    run(engine, (3, 30, 60, 5, 7))
    addresses: dict[Bucket, list[int]] = {}
    again = 0
    for plan, step in seen:
        where = [t.data_ptr() for t in (step.tokens, step.positions, step.wanted)]
        where += [t.data_ptr() for place in step.places for t in (place.slots, *place.tables)]
        again += Bucket.of(plan) in addresses
        assert addresses.setdefault(Bucket.of(plan), where) == where
    assert again >= 5  # decoding comes back to the same buckets


def test_every_tensor_of_the_stack_is_in_the_leaves_and_stays_where_it_is() -> None:
    engine = make_engine()
    run(engine, (3, 30))
    before = [(leaf.data_ptr(), leaf.shape) for leaf in engine.runner.leaves()]
    run(engine, (7, 20, 50))
    assert [(leaf.data_ptr(), leaf.shape) for leaf in engine.runner.leaves()] == before
    held = {leaf.data_ptr() for leaf in engine.runner.leaves()}
    assert {p.data_ptr() for p in engine.model.parameters()} <= held
    assert {t.data_ptr() for t in engine.memory.leaves()} <= held


def test_limits_travel_where_the_rotary_regime_asks_for_them() -> None:
    engine = make_engine(position="rope-dynamic")
    seen = watched(engine)
    run(engine, (3, 9))
    assert all(step.limits is not None for _, step in seen)


def test_a_step_beyond_the_buffer_grows_it_and_many_buckets_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvad.engine.buffers.SMALLEST", 16)
    engine = make_engine()
    watched(engine)  # checks every step
    run(engine, (3, 30, 60))
    assert len(engine.runner.buffers.leaves()[0]) > 16
    monkeypatch.setattr("kvad.engine.buffers.MOST_BUCKETS", 2)
    run(engine, (4, 31, 61))
    assert MOST_BUCKETS > 2 >= len(engine.runner.buffers._buckets)


def test_a_buffer_on_its_own_needs_no_engine() -> None:
    model = build(model_config())
    placed = groups(mixers(model.config), CacheConfig(dtype="float64", rows=1, capacity=8))
    runner = Runner(model, Memory(placed))
    assert isinstance(runner.buffers, StepBuffers)
    assert len(runner.leaves()) > len(list(model.parameters()))
