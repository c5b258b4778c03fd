"""Features that were written apart, together: kept, fetched, parked and resumed while something else happens."""

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
from tests.engine.test_swap import Forced
from tests.support.driver import fill_unowned
from tests.support.engine_sessions import PROMPT, SOURCE, engine, left, run
from tests.support.random_models import build, model_config, pair_config

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
ROPE = model_config("rope")


def tiered(**fields):
    asked = {
        "max_seq_len": 96,
        "max_num_seqs": 3,
        "block_size": 4,
        "prefill_chunk_size": 8,
        "prefix_cache_ram": 1 << 22,
        **fields,
    }
    return Engine(build(ROPE), CacheConfig(**asked))


def finish(made, patience=20.0):
    """Step until nothing is left; (tokens, errors) by request."""
    end, tokens, errors = time.monotonic() + patience, {}, {}
    while not made.idle:
        assert time.monotonic() < end, "it hangs"
        for piece in made.step():
            tokens.setdefault(piece.request, []).extend([] if piece.token_id is None else [piece.token_id])
            if piece.error is not None:
                errors[piece.request] = piece.error
        made.scheduler.check()
    return tokens, errors


# ---------------------------------------------------------------- kept


def test_nothing_is_remembered_of_a_kept_request_that_failed():
    made = engine(ROPE)
    request = made.add_request(PROMPT, GREEDY, keep_state=True)
    made.runner.execute = lambda plan: 1 / 0
    with pytest.raises(ZeroDivisionError):
        made.step()
    del made.runner.execute
    assert finish(made)[1][request].startswith("the step failed")
    assert not made.state_keeper._tracked


# ---------------------------------------------------------------- resumed


def test_a_resumed_request_that_is_cancelled_before_its_step_leaves_nothing_in_memory():
    made = engine(ROPE, enable_prefix_caching=False)
    said, state = left(made, PROMPT, 3)
    made.abort_request(made.add_request(PROMPT + said, GREEDY, resume=state))
    assert made.idle and not made.kv_cache.swapped


def test_a_resumed_row_that_gives_way_before_its_step_has_its_source_again():
    made = engine(pair_config("rope"))
    said, state = left(made, PROMPT[:9], 3, encoder_token_ids=SOURCE)
    wanted = run(engine(pair_config("rope"), dirty=False), PROMPT[:9] + said, 8, encoder_token_ids=SOURCE)[1]
    made.kv_cache_manager.reset_prefix_cache()
    encoded, encode = [], made.runner.encode
    made.runner.encode = lambda encoding: encoded.append(encoding) or encode(encoding)
    request = made.add_request(PROMPT[:9] + said, GREEDY, encoder_token_ids=SOURCE, resume=state)
    (row,) = made.scheduler.sequences(request)
    made.scheduler._admit_with_encoder_input()
    assert row.swapped is not None and made.kv_cache_manager.pending_swap_ins == [row.swapped.key]
    made.scheduler._preempt(row)
    assert finish(made)[0][request] == wanted and not encoded


# ---------------------------------------------------------------- fetched


class Breaks(FileSystem):
    """Raises what no disk raises, where a reader opens a file."""

    broken = False

    def open(self, path):
        if self.broken:
            raise MemoryError("no memory for this")
        return super().open(path)


def test_a_reader_that_breaks_is_a_miss_and_nobody_waits_for_ever(tmp_path, monkeypatch):
    from kvad.engine import engine as engine_module
    from kvad.engine.storage import open_block_store

    disk = Breaks()
    monkeypatch.setattr(engine_module, "open_block_store", lambda *parts: open_block_store(*parts, fs=disk))
    fields = {"prefix_cache_dir": str(tmp_path), "prefix_cache_ram": None}
    first = tiered(**fields)
    request = first.add_request(PROMPT, GREEDY)
    wanted = finish(first)[0][request]
    first.close()
    second = tiered(**fields)
    disk.broken = True
    request = second.add_request(PROMPT, GREEDY)
    assert finish(second)[0][request] == wanted
    assert second.metrics(request).num_cached_tokens == 0 and second.kv_cache_manager.prefix_offload.hits.misses == {
        "failed": 1
    }
    second.close()


def test_what_a_writer_breaks_at_is_not_waited_for_and_may_be_stored_again(tmp_path):
    made = tiered(prefix_cache_dir=str(tmp_path), prefix_cache_ram=None)
    put = made.block_store._disk_store.put

    def breaks(*parts, **named):
        raise MemoryError("no memory for this")

    made.block_store._disk_store.put = breaks
    made.add_request(PROMPT, GREEDY)
    finish(made)
    assert made.block_store.flush() and made.block_store.stats().queued_bytes == 0 and not made.block_store._writing
    made.block_store._disk_store.put = put
    made.kv_cache_manager.reset_prefix_cache()
    made.add_request(PROMPT, GREEDY)
    finish(made)
    assert made.block_store.flush() and made.block_store.stats().disk.num_blocks == 9
    made.close()


def test_a_row_with_a_source_is_not_parked_before_what_it_was_fetched_is_there():
    config = pair_config("rope")
    fields = {
        "max_seq_len": 64,
        "dtype": "float64",
        "block_size": 4,
        "max_num_seqs": 2,
        "prefill_chunk_size": 8,
        "max_source_len": 16,
    }
    made = Engine(
        build(config, dtype=torch.float64),
        CacheConfig(**fields, num_blocks=12, prefix_cache_ram=1 << 22, swap_space=1 << 22),
        EngineConfig(cost_model=Forced(True)),
    )
    prompt = PROMPT[:21]
    first = made.add_request(prompt, GREEDY, encoder_token_ids=SOURCE)
    wanted = finish(made)[0][first]
    other = made.add_request(
        PROMPT[::-1], SamplingParams(max_tokens=14, temperature=0, ignore_eos=True), encoder_token_ids=SOURCE[::-1]
    )
    finish(made)  # the pool has given up what it knew
    fill_unowned(made, math.nan)
    assert made.block_store.stats().ram.num_blocks and made.metrics(other).num_completion_tokens == 14
    request = made.add_request(prompt, GREEDY, encoder_token_ids=SOURCE)
    (row,) = made.scheduler.sequences(request)
    made.scheduler._admit_with_encoder_input()
    assert row.state == "running" and made.kv_cache_manager.export_layout(row.seq_index) is None, (
        "its blocks are still empty"
    )
    made.scheduler._preempt(row)
    tokens, errors = finish(made)
    assert not errors and tokens[request] == wanted


# ---------------------------------------------------------------- a step that fails


@pytest.mark.parametrize("way", ["store", "load"])
def test_what_a_failed_step_was_to_copy_is_held_by_nobody(way, tmp_path):
    made = tiered(prefix_cache_dir=str(tmp_path), num_blocks=12, max_num_seqs=1, max_seq_len=44)
    made.add_request(PROMPT, GREEDY)
    finish(made)
    if way == "load":
        made.add_request(PROMPT[::-1], GREEDY)  # the pool gives up what it knew
        finish(made)
    apply, told = made.kv_cache.apply, []

    def breaks(moves):
        if getattr(moves, way):
            told.append(moves)
            raise KeyboardInterrupt
        apply(moves)

    made.kv_cache.apply = breaks
    made.add_request(PROMPT if way == "load" else PROMPT[::-1], GREEDY)
    with pytest.raises(KeyboardInterrupt):
        finish(made)
    made.kv_cache.apply = apply
    finish(made)
    assert (
        told
        and not made.block_store._requested_copies
        and not made.block_store._staged_loads
        and not made.block_store._queued_keys
    )
    assert made.block_store.flush() and made.block_store.stats().queued_bytes == 0
    made.close()


def test_a_row_that_was_to_wake_in_a_failed_step_is_in_memory_no_more():
    made = engine(ROPE, enable_prefix_caching=False)
    said, state = left(made, PROMPT, 3)
    made.add_request(PROMPT + said, GREEDY, resume=state)

    def breaks(moves):
        raise KeyboardInterrupt

    made.kv_cache.apply = breaks
    with pytest.raises(KeyboardInterrupt):
        made.step()
    del made.kv_cache.apply
    finish(made)
    assert not made.kv_cache.swapped


# ---------------------------------------------------------------- the end


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvad")}


def test_a_close_that_fails_in_one_place_closes_the_others(tmp_path, monkeypatch):
    before = threads()  # of what other tests have not closed
    made = tiered(prefix_cache_dir=str(tmp_path / "t"), swap_space=0)
    made.add_request(PROMPT, GREEDY)
    for _ in range(3):
        made.step()

    def breaks():
        raise OSError("the disk is gone")

    monkeypatch.setattr(made.preemption.swap_space, "close", breaks)
    with pytest.raises(OSError, match="the disk is gone"):
        made.close()
    assert not made.kv_cache.keys, "the memory was not released"
    tiered(prefix_cache_dir=str(tmp_path / "t")).close()
    again = tiered(prefix_cache_dir=str(tmp_path / "t"))
    assert again.block_store is not None and again.block_store.on_disk
    again.close()
    assert threads() <= before


def test_an_engine_that_cannot_be_made_leaves_no_lock_and_no_file(tmp_path):
    (tmp_path / "file").touch()
    asked = CacheConfig(max_seq_len=96, max_num_seqs=2, block_size=4, prefix_cache_dir=str(tmp_path / "t"))
    with pytest.raises(ConfigError, match="swap_dir") as caught:
        Engine(build(ROPE), asked, EngineConfig(swap_dir=tmp_path / "file" / "parked"))
    again = tiered(prefix_cache_dir=str(tmp_path / "t"))
    assert again.block_store is not None and again.block_store.on_disk
    again.close()
    assert caught.value is not None  # it holds the frames of what failed


def test_parked_rows_of_an_engine_that_was_never_closed_leave_no_file(tmp_path):
    model = build(ROPE)
    made = Engine(
        model,
        CacheConfig(max_seq_len=96, max_num_seqs=2, block_size=4, prefill_chunk_size=16, swap_space=0),
        EngineConfig(cost_model=Forced(True), swap_dir=tmp_path),
    )
    request = made.add_request(PROMPT, GREEDY)
    for _ in range(4):
        made.step()
    made.scheduler._preempt(made.scheduler.sequences(request)[0])
    made.add_request(PROMPT[::-1], GREEDY)
    for _ in range(200):
        made.scheduler._poll_swaps()
        moves = made.kv_cache_manager._swapped.attach_to_ops(made.kv_cache_manager._empty_ops(), ())
        made.kv_cache.apply(moves)
        if any(tmp_path.iterdir()):
            break
        time.sleep(0.005)
    assert any(tmp_path.iterdir())
    files = made.preemption.swap_space.files
    thread = files._worker._thread
    del made, files
    gc.collect()
    thread.join(10)
    assert not any(tmp_path.iterdir())
