"""Combinations of states, block stores and swapping."""

import gc
import math
import threading
import time

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling.request import SamplingParams
from kvad.errors import ConfigError
from kvad.storage.filesystem import FileSystem
from tests.engine.test_swap import FixedChoice
from tests.support.driver import fill_unowned, run_engine, tokens_of
from tests.support.engine_sessions import PROMPT, SOURCE, engine, left, run
from tests.support.manager_driver import unpublish_all
from tests.support.random_models import build, model_config, pair_config

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
ROPE = model_config("rope")


def tiered(**fields):
    options = {
        "max_seq_len": 96,
        "max_num_seqs": 3,
        "block_size": 4,
        "prefill_chunk_size": 8,
        "prefix_cache_ram": 1 << 22,
        **fields,
    }
    return Engine(build(ROPE), CacheConfig(**options))


def admit_with_encoder_input(llm_engine):
    for seq in llm_engine.scheduler._admission.admit(with_encoder_input=True):
        llm_engine.scheduler._admission.start(seq, 0.0)


def finish(llm_engine):
    """Run all requests to their ends; return tokens and errors by request."""
    chunks = run_engine(llm_engine)
    errors = {request: error for request, given in chunks.items() if (error := given[-1].error) is not None}
    return {request: tokens_of(given) for request, given in chunks.items()}, errors


# ---------------------------------------------------------------- kept


def test_a_failed_request_keeps_no_state():
    llm_engine = engine(ROPE)
    request = llm_engine.add_request(PROMPT, GREEDY, keep_state=True)
    llm_engine.runner.execute = lambda output: 1 / 0
    with pytest.raises(ZeroDivisionError):
        llm_engine.step()
    del llm_engine.runner.execute
    assert finish(llm_engine)[1][request].startswith("the step failed")
    assert not llm_engine.state_keeper._tracked


# ---------------------------------------------------------------- resumed


def test_a_resumed_request_aborted_before_its_step_leaves_no_copy():
    llm_engine = engine(ROPE, enable_prefix_caching=False)
    outputs, state = left(llm_engine, PROMPT, 3)
    llm_engine.abort_request(llm_engine.add_request(PROMPT + outputs, GREEDY, resume=state))
    assert llm_engine.idle and not llm_engine.kv_cache.swapped


def test_a_resumed_sequence_preempted_before_its_step_has_its_encoder_input():
    llm_engine = engine(pair_config("rope"))
    outputs, state = left(llm_engine, PROMPT[:9], 3, encoder_token_ids=SOURCE)
    expected = run(engine(pair_config("rope"), dirty=False), PROMPT[:9] + outputs, 8, encoder_token_ids=SOURCE)[1]
    unpublish_all(llm_engine.kv_cache_manager)
    encoded, encode = [], llm_engine.runner.encode
    llm_engine.runner.encode = lambda encoding: encoded.append(encoding) or encode(encoding)
    request = llm_engine.add_request(PROMPT[:9] + outputs, GREEDY, encoder_token_ids=SOURCE, resume=state)
    (seq,) = llm_engine.scheduler.sequences(request)
    admit_with_encoder_input(llm_engine)
    assert seq.swapped is not None and llm_engine.kv_cache_manager.pending_swap_ins == [seq.swapped.key]
    llm_engine.scheduler._preempt(seq)
    assert finish(llm_engine)[0][request] == expected and not encoded


# ---------------------------------------------------------------- fetched


class BrokenStore(FileSystem):
    """Raises what no disk raises, where a reader opens a file."""

    broken = False

    def open(self, path):
        if self.broken:
            raise MemoryError("no memory for this")
        return super().open(path)


def test_an_exception_in_a_reader_is_a_miss(tmp_path, monkeypatch):
    from kvad.engine import engine as engine_module
    from kvad.engine.storage import open_block_store

    disk = BrokenStore()
    monkeypatch.setattr(engine_module, "open_block_store", lambda *parts: open_block_store(*parts, fs=disk))
    fields = {"prefix_cache_dir": str(tmp_path), "prefix_cache_ram": None}
    first = tiered(**fields)
    request = first.add_request(PROMPT, GREEDY)
    expected = finish(first)[0][request]
    first.close()
    second = tiered(**fields)
    disk.broken = True
    request = second.add_request(PROMPT, GREEDY)
    assert finish(second)[0][request] == expected
    assert second.metrics(request).num_cached_tokens == 0 and second.kv_cache_manager.prefix_offload.hits.misses == {
        "failed": 1
    }
    second.close()


def test_an_exception_in_a_writer_allows_another_write(tmp_path):
    llm_engine = tiered(prefix_cache_dir=str(tmp_path), prefix_cache_ram=None)
    put = llm_engine.block_store._disk_store.put

    def breaks(*parts, **named):
        raise MemoryError("no memory for this")

    llm_engine.block_store._disk_store.put = breaks
    llm_engine.add_request(PROMPT, GREEDY)
    finish(llm_engine)
    assert (
        llm_engine.block_store.flush()
        and llm_engine.block_store.stats().queued_bytes == 0
        and not llm_engine.block_store._writing
    )
    llm_engine.block_store._disk_store.put = put
    unpublish_all(llm_engine.kv_cache_manager)
    llm_engine.add_request(PROMPT, GREEDY)
    finish(llm_engine)
    assert llm_engine.block_store.flush() and llm_engine.block_store.stats().disk.num_blocks == 9
    llm_engine.close()


def test_a_sequence_is_not_swapped_before_its_blocks_are_loaded():
    config = pair_config("rope")
    fields = {
        "max_seq_len": 64,
        "dtype": "float64",
        "block_size": 4,
        "max_num_seqs": 2,
        "prefill_chunk_size": 8,
        "max_source_len": 16,
    }
    llm_engine = Engine(
        build(config, dtype=torch.float64),
        CacheConfig(**fields, num_blocks=12, prefix_cache_ram=1 << 22, swap_space=1 << 22),
        EngineConfig(cost_model=FixedChoice(True)),
    )
    prompt = PROMPT[:21]
    first = llm_engine.add_request(prompt, GREEDY, encoder_token_ids=SOURCE)
    expected = finish(llm_engine)[0][first]
    other = llm_engine.add_request(
        PROMPT[::-1], SamplingParams(max_tokens=14, temperature=0, ignore_eos=True), encoder_token_ids=SOURCE[::-1]
    )
    finish(llm_engine)  # the pool has given up what it knew
    fill_unowned(llm_engine, math.nan)
    assert llm_engine.block_store.stats().ram.num_blocks and llm_engine.metrics(other).num_completion_tokens == 14
    request = llm_engine.add_request(prompt, GREEDY, encoder_token_ids=SOURCE)
    (seq,) = llm_engine.scheduler.sequences(request)
    admit_with_encoder_input(llm_engine)
    assert seq.state == "running" and llm_engine.kv_cache_manager.export_layout(seq.seq_index) is None, (
        "its blocks are still empty"
    )
    llm_engine.scheduler._preempt(seq)
    tokens, errors = finish(llm_engine)
    assert not errors and tokens[request] == expected


# ---------------------------------------------------------------- a step that fails


@pytest.mark.parametrize("way", ["store", "load"])
def test_blocks_of_a_failed_step_are_not_copied(way, tmp_path):
    llm_engine = tiered(prefix_cache_dir=str(tmp_path), num_blocks=12, max_num_seqs=1, max_seq_len=44)
    llm_engine.add_request(PROMPT, GREEDY)
    finish(llm_engine)
    if way == "load":
        llm_engine.add_request(PROMPT[::-1], GREEDY)  # the pool gives up what it knew
        finish(llm_engine)
    apply, interrupted = llm_engine.kv_cache.apply, []

    def breaks(moves):
        if getattr(moves, way):
            interrupted.append(moves)
            raise KeyboardInterrupt
        apply(moves)

    llm_engine.kv_cache.apply = breaks
    llm_engine.add_request(PROMPT if way == "load" else PROMPT[::-1], GREEDY)
    with pytest.raises(KeyboardInterrupt):
        finish(llm_engine)
    llm_engine.kv_cache.apply = apply
    finish(llm_engine)
    assert (
        interrupted
        and not llm_engine.block_store._requested_copies
        and not llm_engine.block_store._staged_loads
        and not llm_engine.block_store._queued_keys
    )
    assert llm_engine.block_store.flush() and llm_engine.block_store.stats().queued_bytes == 0
    llm_engine.close()


def test_a_sequence_restored_in_a_failed_step_leaves_no_copy():
    llm_engine = engine(ROPE, enable_prefix_caching=False)
    outputs, state = left(llm_engine, PROMPT, 3)
    llm_engine.add_request(PROMPT + outputs, GREEDY, resume=state)

    def breaks(moves):
        raise KeyboardInterrupt

    llm_engine.kv_cache.apply = breaks
    with pytest.raises(KeyboardInterrupt):
        llm_engine.step()
    del llm_engine.kv_cache.apply
    finish(llm_engine)
    assert not llm_engine.kv_cache.swapped


# ---------------------------------------------------------------- the end


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvad")}


def test_a_failing_close_closes_the_other_resources(tmp_path, monkeypatch):
    before = threads()  # of what other tests have not closed
    llm_engine = tiered(prefix_cache_dir=str(tmp_path / "t"), swap_space=0)
    llm_engine.add_request(PROMPT, GREEDY)
    for _ in range(3):
        llm_engine.step()

    def breaks():
        raise OSError("the disk is gone")

    monkeypatch.setattr(llm_engine.preemption.swap_space, "close", breaks)
    with pytest.raises(OSError, match="the disk is gone"):
        llm_engine.close()
    assert not llm_engine.kv_cache.keys, "the memory was not released"
    tiered(prefix_cache_dir=str(tmp_path / "t")).close()
    again = tiered(prefix_cache_dir=str(tmp_path / "t"))
    assert again.block_store is not None and again.block_store.on_disk
    again.close()
    assert threads() <= before


def test_a_failed_constructor_leaves_no_lock_and_no_file(tmp_path):
    (tmp_path / "file").touch()
    options = CacheConfig(max_seq_len=96, max_num_seqs=2, block_size=4, prefix_cache_dir=str(tmp_path / "t"))
    with pytest.raises(ConfigError, match="swap_dir") as caught:
        Engine(build(ROPE), options, EngineConfig(swap_dir=tmp_path / "file" / "swapped"))
    again = tiered(prefix_cache_dir=str(tmp_path / "t"))
    assert again.block_store is not None and again.block_store.on_disk
    again.close()
    assert caught.value is not None  # it holds the frames of what failed


def test_swap_files_of_an_engine_that_was_never_closed_are_removed(tmp_path):
    model = build(ROPE)
    llm_engine = Engine(
        model,
        CacheConfig(max_seq_len=96, max_num_seqs=2, block_size=4, prefill_chunk_size=16, swap_space=0),
        EngineConfig(cost_model=FixedChoice(True), swap_dir=tmp_path),
    )
    request = llm_engine.add_request(PROMPT, GREEDY)
    for _ in range(4):
        llm_engine.step()
    llm_engine.scheduler._preempt(llm_engine.scheduler.sequences(request)[0])
    llm_engine.add_request(PROMPT[::-1], GREEDY)
    for _ in range(200):
        llm_engine.scheduler._poll_swaps()
        moves = llm_engine.kv_cache_manager._swapped.attach_to_ops(llm_engine.kv_cache_manager._empty_ops(), ())
        llm_engine.kv_cache.apply(moves)
        if any(tmp_path.iterdir()):
            break
        time.sleep(0.005)
    assert any(tmp_path.iterdir())
    files = llm_engine.preemption.swap_space.files
    thread = files._worker._thread
    del llm_engine, files
    gc.collect()
    thread.join(10)
    assert not any(tmp_path.iterdir())
