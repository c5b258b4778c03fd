"""Input buffers: equal shapes have equal addresses, and tensors have the numbers of the step, without stale ones."""

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.groups import build_groups
from kvad.cache.manager import BlockAllocation
from kvad.config.model import attention_specs
from kvad.engine.engine import Engine
from kvad.engine.execution.model_runner import MAX_SHAPES, BatchShape, InputBuffers, ModelRunner
from kvad.engine.scheduling.request import SamplingParams
from kvad.engine.scheduling.sequence import ScheduledSequence, SchedulerOutput
from kvad.model_input import NULL_BLOCK, BlockOps, ModelInput, SubBatch
from tests.support.random_models import build, model_config
from tests.support.sequences import token_sequence


def make_engine(**kinds: str) -> Engine:
    model = build(model_config(**kinds))
    return Engine(
        model, CacheConfig(dtype="float64", max_num_seqs=4, max_seq_len=96, block_size=4, prefill_chunk_size=8)
    )


def watched(engine: Engine) -> list[tuple[SchedulerOutput, ModelInput]]:
    """Every plan of this engine from now on, with its step, checked when it was made."""
    seen = []
    fill = engine.runner.buffers.fill

    def note(output: SchedulerOutput) -> ModelInput:
        step = fill(output)
        seen.append((output, step))
        check(output, step)
        return step

    engine.runner.buffers.fill = note  # type: ignore[method-assign]
    return seen


def check(output: SchedulerOutput, step: ModelInput) -> None:
    flat = [(w, w.start + i) for w in output.scheduled for i in range(w.num_tokens)]
    assert step.token_ids.tolist() == [w.sequence.token_ids[p] for w, p in flat]
    assert step.positions.tolist() == [p for _, p in flat]
    assert step.sub_batches == output.sub_batches
    if step.seq_lens is not None:
        assert step.seq_lens.tolist() == [len(w.sequence.token_ids) for w, _ in flat]
    for place, slots, tables in zip(
        step.slot_mappings, output.allocation.slots, output.allocation.block_tables, strict=True
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
def test_equal_shapes_reuse_their_tensors(heads: str) -> None:
    engine = make_engine(heads=heads)
    seen = watched(engine)
    run(engine, (3, 30, 60, 5, 7))
    addresses: dict[BatchShape, list[int]] = {}
    again = 0
    for output, step in seen:
        where = [t.data_ptr() for t in (step.token_ids, step.positions, step.logit_indices)]
        where += [t.data_ptr() for place in step.slot_mappings for t in (place.slots, *place.block_tables)]
        again += BatchShape.from_output(output) in addresses
        assert addresses.setdefault(BatchShape.from_output(output), where) == where
    assert again >= 5  # decoding comes back to the same buckets


def test_all_tensors_are_listed_and_keep_their_addresses() -> None:
    engine = make_engine()
    run(engine, (3, 30))
    before = [(leaf.data_ptr(), leaf.shape) for leaf in engine.runner.tensors()]
    run(engine, (7, 20, 50))
    assert [(leaf.data_ptr(), leaf.shape) for leaf in engine.runner.tensors()] == before
    held = {leaf.data_ptr() for leaf in engine.runner.tensors()}
    assert {p.data_ptr() for p in engine.model.parameters()} <= held
    assert {t.data_ptr() for t in engine.kv_cache.tensors()} <= held


def test_lengths_are_passed_if_the_rotary_regime_needs_them() -> None:
    engine = make_engine(position="rope-dynamic")
    seen = watched(engine)
    run(engine, (3, 9))
    assert all(step.seq_lens is not None for _, step in seen)


def test_the_buffer_grows_and_the_number_of_shapes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvad.engine.execution.model_runner.MIN_CAPACITY", 16)
    engine = make_engine()
    watched(engine)  # checks every step
    run(engine, (3, 30, 60))
    assert len(engine.runner.buffers.tensors()[0]) > 16
    monkeypatch.setattr("kvad.engine.execution.model_runner.MAX_SHAPES", 2)
    run(engine, (4, 31, 61))
    assert MAX_SHAPES > 2 >= len(engine.runner.buffers._shapes)


def decoding_step(tables: list[list[int]]) -> SchedulerOutput:
    """A step of one token per sequence; the sequences have these blocks."""
    scheduled = tuple(
        ScheduledSequence(token_sequence(SamplingParams(), [1] * 40), 39, 1, range(1), True) for _ in tables
    )
    allocation = BlockAllocation(BlockOps(((),), ((),)), ([4] * len(tables),), (tables,))
    return SchedulerOutput(scheduled, (SubBatch(len(tables), 1, 64),), allocation)


def test_block_tables_are_written_again_after_a_change_and_after_another_shape() -> None:
    buffers, blocks = InputBuffers(torch.device("cpu"), with_seq_lens=False), [5, 6]
    outputs = [decoding_step([blocks]), decoding_step([[7, 8, 9], [10, 11, 12]])]
    for output in (outputs[0], *outputs, outputs[0]):
        check(output, buffers.fill(output))
    blocks[1] = 13  # in place, as copy-on-write does
    check(outputs[0], buffers.fill(outputs[0]))


def test_buffers_work_without_an_engine() -> None:
    model = build(model_config())
    placed = build_groups(attention_specs(model.config), CacheConfig(dtype="float64", max_num_seqs=1, max_seq_len=8))
    runner = ModelRunner(model, KVCache(placed))
    assert isinstance(runner.buffers, InputBuffers)
    assert len(runner.tensors()) > len(list(model.parameters()))
