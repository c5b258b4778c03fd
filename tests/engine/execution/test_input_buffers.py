"""Static buffers: equal buckets get equal addresses, steps say what their plans say, nothing stale is left behind."""

import pytest

from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.groups import build_groups
from kvad.config.model import attention_specs
from kvad.engine.engine import Engine
from kvad.engine.execution.input_buffers import MAX_SHAPES, BatchShape, InputBuffers
from kvad.engine.execution.model_runner import ModelRunner
from kvad.engine.scheduling.request import SamplingParams
from kvad.engine.scheduling.sequence import SchedulerOutput
from kvad.model_input import NULL_BLOCK, ModelInput
from tests.support.random_models import build, model_config


def make_engine(**kinds: str) -> Engine:
    model = build(model_config(**kinds))
    return Engine(
        model, CacheConfig(dtype="float64", max_num_seqs=4, max_seq_len=96, block_size=4, prefill_chunk_size=8)
    )


def watched(engine: Engine) -> list[tuple[SchedulerOutput, ModelInput]]:
    """Every plan of this engine from now on, with its step, checked when it was made."""
    seen = []
    fill = engine.runner.buffers.fill

    def note(plan: SchedulerOutput) -> ModelInput:
        step = fill(plan)
        seen.append((plan, step))
        check(plan, step)
        return step

    engine.runner.buffers.fill = note  # type: ignore[method-assign]
    return seen


def check(plan: SchedulerOutput, step: ModelInput) -> None:
    flat = [(w, w.start + i) for w in plan.scheduled for i in range(w.num_tokens)]
    assert step.token_ids.tolist() == [w.sequence.token_ids[p] for w, p in flat]
    assert step.positions.tolist() == [p for _, p in flat]
    assert step.sub_batches == plan.sub_batches
    if step.max_seq_lens is not None:
        assert step.max_seq_lens.tolist() == [w.sequence.max_len for w, _ in flat]
    for place, slots, tables in zip(
        step.slot_mappings, plan.allocation.slots, plan.allocation.block_tables, strict=True
    ):
        assert place.slots.tolist() == slots
        rows = [row for table in place.block_tables for row in table.tolist()]
        for row, blocks in zip(rows, tables, strict=True):
            assert row == [*blocks, *[NULL_BLOCK] * (len(row) - len(blocks))]


def run(engine: Engine, lengths: tuple[int, ...]) -> None:
    for length in lengths:
        engine.add_request(list(range(length)), SamplingParams(temperature=0, max_tokens=12))
    while not engine.idle:
        engine.step()


@pytest.mark.parametrize("heads", ["gqa", "window-mix"])
def test_equal_buckets_give_the_same_tensors_and_the_plans_numbers(heads: str) -> None:
    engine = make_engine(heads=heads)
    seen = watched(engine)
    run(engine, (3, 30, 60, 5, 7))
    addresses: dict[BatchShape, list[int]] = {}
    again = 0
    for plan, step in seen:
        where = [t.data_ptr() for t in (step.token_ids, step.positions, step.logit_indices)]
        where += [t.data_ptr() for place in step.slot_mappings for t in (place.slots, *place.block_tables)]
        again += BatchShape.from_output(plan) in addresses
        assert addresses.setdefault(BatchShape.from_output(plan), where) == where
    assert again >= 5  # decoding comes back to the same buckets


def test_every_tensor_of_the_stack_is_in_the_leaves_and_stays_where_it_is() -> None:
    engine = make_engine()
    run(engine, (3, 30))
    before = [(leaf.data_ptr(), leaf.shape) for leaf in engine.runner.tensors()]
    run(engine, (7, 20, 50))
    assert [(leaf.data_ptr(), leaf.shape) for leaf in engine.runner.tensors()] == before
    held = {leaf.data_ptr() for leaf in engine.runner.tensors()}
    assert {p.data_ptr() for p in engine.model.parameters()} <= held
    assert {t.data_ptr() for t in engine.kv_cache.tensors()} <= held


def test_limits_travel_where_the_rotary_regime_asks_for_them() -> None:
    engine = make_engine(position="rope-dynamic")
    seen = watched(engine)
    run(engine, (3, 9))
    assert all(step.max_seq_lens is not None for _, step in seen)


def test_a_step_beyond_the_buffer_grows_it_and_many_buckets_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvad.engine.execution.input_buffers.MIN_CAPACITY", 16)
    engine = make_engine()
    watched(engine)  # checks every step
    run(engine, (3, 30, 60))
    assert len(engine.runner.buffers.tensors()[0]) > 16
    monkeypatch.setattr("kvad.engine.execution.input_buffers.MAX_SHAPES", 2)
    run(engine, (4, 31, 61))
    assert MAX_SHAPES > 2 >= len(engine.runner.buffers._shapes)


def test_a_buffer_on_its_own_needs_no_engine() -> None:
    model = build(model_config())
    placed = build_groups(attention_specs(model.config), CacheConfig(dtype="float64", max_num_seqs=1, max_seq_len=8))
    runner = ModelRunner(model, KVCache(placed))
    assert isinstance(runner.buffers, InputBuffers)
    assert len(runner.tensors()) > len(list(model.parameters()))
