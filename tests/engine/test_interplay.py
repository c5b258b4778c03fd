"""Features that were written apart, together: kept, fetched, parked and resumed while something else happens."""

import gc
import math
import threading
import time

import pytest
import torch

from kvad.cache.disk import Disk
from kvad.cache.sizing import CacheConfig
from kvad.engine.engine import Engine
from kvad.engine.request import Sampling
from kvad.errors import ConfigError
from tests.drive import fill_unowned
from tests.engine.sessions import PROMPT, SOURCE, engine, left, run
from tests.engine.test_parking import Forced
from tests.models import build, model_config, pair_config

GREEDY = Sampling(max_tokens=8, temperature=0, ignore_eos=True)
ROPE = model_config("rope")


def tiered(**fields):
    asked = {"capacity": 96, "rows": 3, "block_size": 4, "chunk": 8, "tier_ram": 1 << 22, **fields}
    return Engine(build(ROPE), CacheConfig(**asked))


def finish(made, patience=20.0):
    """Step until nothing is left; (tokens, errors) by request."""
    end, tokens, errors = time.monotonic() + patience, {}, {}
    while not made.idle:
        assert time.monotonic() < end, "it hangs"
        for piece in made.step():
            tokens.setdefault(piece.request, []).extend([] if piece.token is None else [piece.token])
            if piece.error is not None:
                errors[piece.request] = piece.error
        made.scheduler.check()
    return tokens, errors


# ---------------------------------------------------------------- kept


def test_nothing_is_remembered_of_a_kept_request_that_failed():
    made = engine(ROPE)
    request = made.submit(PROMPT, GREEDY, keep=True)
    made.runner.run = lambda plan: 1 / 0
    with pytest.raises(ZeroDivisionError):
        made.step()
    del made.runner.run
    assert finish(made)[1][request].startswith("the step failed")
    assert not made.keeper._asked


# ---------------------------------------------------------------- resumed


def test_a_resumed_request_that_is_cancelled_before_its_step_leaves_nothing_in_memory():
    made = engine(ROPE, prefix=False)
    said, state = left(made, PROMPT, 3)
    made.cancel(made.submit(PROMPT + said, GREEDY, resume=state))
    assert made.idle and not made.memory.parked


def test_a_resumed_row_that_gives_way_before_its_step_has_its_source_again():
    made = engine(pair_config("rope"))
    said, state = left(made, PROMPT[:9], 3, source=SOURCE)
    wanted = run(engine(pair_config("rope"), dirty=False), PROMPT[:9] + said, 8, source=SOURCE)[1]
    made.ledger.drop_prefixes()
    encoded, encode = [], made.runner.encode
    made.runner.encode = lambda encoding: encoded.append(encoding) or encode(encoding)
    request = made.submit(PROMPT[:9] + said, GREEDY, source=SOURCE, resume=state)
    (row,) = made.scheduler.rows(request)
    made.scheduler._admit_sources()
    assert row.parked is not None and made.ledger.waking == [row.parked.key]
    made.scheduler._preempt(row)
    assert finish(made)[0][request] == wanted and not encoded


# ---------------------------------------------------------------- fetched


class Breaks(Disk):
    """Raises what no disk raises, where a reader opens a file."""

    broken = False

    def open(self, path):
        if self.broken:
            raise MemoryError("no memory for this")
        return super().open(path)


def test_a_reader_that_breaks_is_a_miss_and_nobody_waits_for_ever(tmp_path, monkeypatch):
    from kvad.engine import engine as engine_module
    from kvad.engine.storage import open_tiers

    disk = Breaks()
    monkeypatch.setattr(engine_module, "open_tiers", lambda *parts: open_tiers(*parts, disk=disk))
    fields = {"tier": str(tmp_path), "tier_ram": None}
    first = tiered(**fields)
    request = first.submit(PROMPT, GREEDY)
    wanted = finish(first)[0][request]
    first.close()
    second = tiered(**fields)
    disk.broken = True
    request = second.submit(PROMPT, GREEDY)
    assert finish(second)[0][request] == wanted
    assert second.usage(request).cached == 0 and second.ledger.deposits.hits.misses == {"failed": 1}
    second.close()


def test_what_a_writer_breaks_at_is_not_waited_for_and_may_be_stored_again(tmp_path):
    made = tiered(tier=str(tmp_path), tier_ram=None)
    put = made.tiers._shelf.put

    def breaks(*parts, **named):
        raise MemoryError("no memory for this")

    made.tiers._shelf.put = breaks
    made.submit(PROMPT, GREEDY)
    finish(made)
    assert made.tiers.flush() and made.tiers.stats().waiting == 0 and not made.tiers._writing
    made.tiers._shelf.put = put
    made.ledger.drop_prefixes()
    made.submit(PROMPT, GREEDY)
    finish(made)
    assert made.tiers.flush() and made.tiers.stats().disk.entries == 9
    made.close()


def test_a_row_with_a_source_is_not_parked_before_what_it_was_fetched_is_there():
    config = pair_config("rope")
    fields = {"capacity": 64, "dtype": "float64", "block_size": 4, "rows": 2, "chunk": 8, "source_capacity": 16}
    made = Engine(
        build(config, dtype=torch.float64),
        CacheConfig(**fields, blocks=12, tier_ram=1 << 22, park_ram=1 << 22),
        costs=Forced(True),
    )
    prompt = PROMPT[:21]
    first = made.submit(prompt, GREEDY, source=SOURCE)
    wanted = finish(made)[0][first]
    other = made.submit(PROMPT[::-1], Sampling(max_tokens=14, temperature=0, ignore_eos=True), source=SOURCE[::-1])
    finish(made)  # the pool has given up what it knew
    fill_unowned(made, math.nan)
    assert made.tiers.stats().ram.entries and made.usage(other).completion == 14
    request = made.submit(prompt, GREEDY, source=SOURCE)
    (row,) = made.scheduler.rows(request)
    made.scheduler._admit_sources()
    assert row.state == "running" and made.ledger.standing(row.seat) is None, "its blocks are still empty"
    made.scheduler._preempt(row)
    tokens, errors = finish(made)
    assert not errors and tokens[request] == wanted


# ---------------------------------------------------------------- a step that fails


@pytest.mark.parametrize("way", ["store", "load"])
def test_what_a_failed_step_was_to_copy_is_held_by_nobody(way, tmp_path):
    made = tiered(tier=str(tmp_path), blocks=12, rows=1, capacity=44)
    made.submit(PROMPT, GREEDY)
    finish(made)
    if way == "load":
        made.submit(PROMPT[::-1], GREEDY)  # the pool gives up what it knew
        finish(made)
    apply, told = made.memory.apply, []

    def breaks(moves):
        if getattr(moves, way):
            told.append(moves)
            raise KeyboardInterrupt
        apply(moves)

    made.memory.apply = breaks
    made.submit(PROMPT if way == "load" else PROMPT[::-1], GREEDY)
    with pytest.raises(KeyboardInterrupt):
        finish(made)
    made.memory.apply = apply
    finish(made)
    assert told and not made.tiers._wanted and not made.tiers._lent and not made.tiers._coming
    assert made.tiers.flush() and made.tiers.stats().waiting == 0
    made.close()


def test_a_row_that_was_to_wake_in_a_failed_step_is_in_memory_no_more():
    made = engine(ROPE, prefix=False)
    said, state = left(made, PROMPT, 3)
    made.submit(PROMPT + said, GREEDY, resume=state)

    def breaks(moves):
        raise KeyboardInterrupt

    made.memory.apply = breaks
    with pytest.raises(KeyboardInterrupt):
        made.step()
    del made.memory.apply
    finish(made)
    assert not made.memory.parked


# ---------------------------------------------------------------- the end


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvad")}


def test_a_close_that_fails_in_one_place_closes_the_others(tmp_path, monkeypatch):
    before = threads()  # of what other tests have not closed
    made = tiered(tier=str(tmp_path / "t"), park_ram=0)
    made.submit(PROMPT, GREEDY)
    for _ in range(3):
        made.step()

    def breaks():
        raise OSError("the disk is gone")

    monkeypatch.setattr(made.swaps.parking, "close", breaks)
    with pytest.raises(OSError, match="the disk is gone"):
        made.close()
    assert not made.memory.keys, "the memory was not released"
    tiered(tier=str(tmp_path / "t")).close()
    again = tiered(tier=str(tmp_path / "t"))
    assert again.tiers is not None and again.tiers.on_disk
    again.close()
    assert threads() <= before


def test_an_engine_that_cannot_be_made_leaves_no_lock_and_no_file(tmp_path):
    (tmp_path / "file").touch()
    asked = CacheConfig(capacity=96, rows=2, block_size=4, tier=str(tmp_path / "t"))
    with pytest.raises(ConfigError, match="park_dir") as caught:
        Engine(build(ROPE), asked, park_dir=tmp_path / "file" / "parked")
    again = tiered(tier=str(tmp_path / "t"))
    assert again.tiers is not None and again.tiers.on_disk
    again.close()
    assert caught.value is not None  # it holds the frames of what failed


def test_parked_rows_of_an_engine_that_was_never_closed_leave_no_file(tmp_path):
    model = build(ROPE)
    made = Engine(
        model,
        CacheConfig(capacity=96, rows=2, block_size=4, chunk=16, park_ram=0),
        costs=Forced(True),
        park_dir=tmp_path,
    )
    request = made.submit(PROMPT, GREEDY)
    for _ in range(4):
        made.step()
    made.scheduler._preempt(made.scheduler.rows(request)[0])
    made.submit(PROMPT[::-1], GREEDY)
    for _ in range(200):
        made.scheduler._see_parked()
        moves = made.ledger._away.told(made.ledger._no_moves(), ())
        made.memory.apply(moves)
        if any(tmp_path.iterdir()):
            break
        time.sleep(0.005)
    assert any(tmp_path.iterdir())
    files = made.swaps.parking.files
    thread = files._worker._thread
    del made, files
    gc.collect()
    thread.join(10)
    assert not any(tmp_path.iterdir())
