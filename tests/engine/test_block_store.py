"""Tiers under a real engine: what comes back from RAM or disk gives the tokens and the logits of a model without any.

Float64, forced tokens where logits are compared, freed blocks full of NaN.  A disk that fails at every operation, files
that are flipped and cut everywhere, processes that die: the output is right, and serving goes on.
"""

import errno
import logging
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.cache.manager.block_pool import digest
from kvad.cache.manager.prefix_offload import PrefixOffload
from kvad.engine import engine as engine_module
from kvad.engine.engine import Engine
from kvad.engine.prefix_pinning import pin_prefix
from kvad.engine.scheduling.request import SamplingParams, SequenceOutput
from kvad.engine.storage import open_block_store
from kvad.errors import ConfigError, SaveError, UsageError
from kvad.storage.filesystem import FileSystem
from tests.support.driver import fill_unowned, uncached
from tests.support.faulty_filesystems import FailingDisk
from tests.support.random_models import build, model_config, pair_config

PROMPT = [(7 * i) % 60 + 1 for i in range(41)]


def config(**fields):
    return CacheConfig(
        **{
            "dtype": "float64",
            "max_seq_len": 96,
            "max_num_seqs": 2,
            "block_size": 4,
            "prefill_chunk_size": 16,
            **fields,
        }
    )


def make(folder=None, heads="gqa", position="rope", model=None, disk=None, monkeypatch=None, **fields):
    if disk is not None:
        monkeypatch.setattr(engine_module, "open_block_store", lambda *parts: open_block_store(*parts, fs=disk))
    tier = {} if folder is None else {"prefix_cache_dir": os.fspath(folder)}
    return Engine(model or build(model_config(position, heads=heads)), config(**tier, **fields))


def say(engine, *prompts, new=6, salt="", poison=True, patience=60.0):
    """Greedy tokens of each prompt, submitted together, and how many of its tokens were cached."""
    requests = [
        engine.add_request(prompt, SamplingParams(max_tokens=new, temperature=0), cache_salt=salt) for prompt in prompts
    ]
    said = {request: [] for request in requests}
    usages, end = [engine.metrics(request) for request in requests], time.monotonic() + patience
    while not engine.idle:
        assert time.monotonic() < end, "it hangs"
        for piece in engine.step():
            assert piece.error is None
            if piece.token_id is not None:
                said[piece.request].append(piece.token_id)
        if poison:
            engine.flush_offload()
            fill_unowned(engine, float("nan"))
        engine.scheduler.check()
    return [(said[request], usage.num_cached_tokens) for request, usage in zip(requests, usages, strict=True)]


def right(engine, *prompts, new=6):
    """The same without any cache."""
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(new):
            tokens.append(int(uncached(engine.model, tokens, limit=len(prompt) + new)[-1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


def logits_of(engine, tokens):
    """[V] at the last of these tokens, through the engine's cache; and how many were cached."""
    with torch.inference_mode():
        request, kept = engine.add_request(tokens, SamplingParams(max_tokens=1, temperature=0)), None
        usage = engine.metrics(request)
        while not engine.idle:
            plan = engine.scheduler.schedule()
            if plan is None:
                time.sleep(0.001)
                continue
            logits = engine.runner.execute(plan)
            kept = logits[-1].clone()
            engine.scheduler.update_from_output(
                plan, [SequenceOutput(0 if work.is_sampled else None) for work in plan.scheduled]
            )
    return kept, usage.num_cached_tokens


def hits(engine):
    return engine.kv_cache_manager.prefix_offload.hits


# ---------------------------------------------------------------- the same as without


@pytest.mark.parametrize("heads", ["gqa", "window", "window-mix", "softcap", "value-dim"])
@pytest.mark.parametrize("position", ["rope", "alibi", "learned"])
def test_another_engine_finds_what_this_one_stored_and_says_the_same(tmp_path, heads, position):
    first = make(tmp_path, heads, position)
    [(tokens, cached)] = say(first, PROMPT)
    assert cached == 0 and [tokens] == right(first, PROMPT)
    first.close()
    second = make(tmp_path, heads, position)
    whole = PROMPT + tokens
    got, cached = logits_of(second, whole)
    assert cached == 44 and hits(second).tokens == {"disk": 44} and not hits(second).misses["unknown"]
    wanted = uncached(second.model, whole, limit=len(whole) + 1)[-1]
    assert (got - wanted).abs().max() <= 1e-10
    assert second.block_store.stats().bytes_in > 0
    second.close()


@pytest.mark.parametrize(
    "fields",
    [{"dtype": "float32"}, {"key_dtype": "int8", "value_dtype": "int4"}, {"dtype": "bfloat16"}, {"rope_at": "read"}],
)
@pytest.mark.parametrize("policy", ["full", "sinks(3, 9)", "quest(16)"])
def test_formats_and_policies_come_back_as_they_were(tmp_path, fields, policy):
    """What was stored is read as what is computed anew."""
    if policy.startswith("quest") and "rope_at" in fields:
        pytest.skip("bounds are of rotated keys")
    fields = {"policy": policy, **fields}
    first = make(tmp_path, **fields)
    [(tokens, _)] = say(first, PROMPT)
    first.close()
    second, fresh = make(tmp_path, **fields), make(**fields)
    whole = PROMPT + tokens
    got, cached = logits_of(second, whole)
    wanted, none = logits_of(fresh, whole)
    assert cached and not none
    assert (got - wanted).abs().max() <= 1e-6
    second.close()


def test_an_encoder_decoder_finds_the_start_of_its_target_but_only_of_the_same_source(tmp_path):
    model = build(pair_config())
    engine = Engine(model, config(prefix_cache_dir=tmp_path, max_source_len=32))
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)

    def answer(engine, source):
        request = engine.add_request(PROMPT, sampling, encoder_token_ids=source)
        usage, said = engine.metrics(request), []
        while not engine.idle:
            said += [piece.token_id for piece in engine.step() if piece.token_id is not None]
        return said, usage.num_cached_tokens

    said, _ = answer(engine, [1, 2, 3])
    engine.close()
    again = Engine(model, config(prefix_cache_dir=os.fspath(tmp_path), max_source_len=32))
    assert answer(again, [1, 2, 3]) == (said, 40)
    assert answer(again, [1, 2, 4])[1] == 0
    again.close()


def test_salts_regimes_and_block_sizes_share_nothing(tmp_path):
    engine = make(tmp_path)
    say(engine, PROMPT, salt="a")
    engine.close()
    other = make(tmp_path)
    assert say(other, PROMPT, salt="b")[0][1] == 0
    assert say(other, PROMPT, salt="a")[0][1] == 40
    other.close()
    smaller = make(tmp_path, block_size=2)
    assert say(smaller, PROMPT, salt="a")[0][1] == 0
    smaller.close()


# ---------------------------------------------------------------- a pool that is always full

PROMPTS = [
    [stem] * 3 + [(stem * i) % 50 + 1 for i in range(3, length)] for stem in (2, 3, 5, 7) for length in (17, 30, 41)
]


@pytest.mark.parametrize("tiers", ["ram", "disk", "both", "small"])
@pytest.mark.parametrize("heads", ["gqa", "window-mix"])
def test_evicted_blocks_come_back_all_the_time(tmp_path, heads, tiers):
    fields = {} if tiers in ("ram", "small") else {"folder": tmp_path}
    if tiers != "disk":
        fields["prefix_cache_ram"] = 30_000 if tiers == "small" else 1 << 20
    engine = make(heads=heads, num_blocks=24, **fields)
    rng, expected = random.Random(1), dict(zip(map(tuple, PROMPTS), right(engine, *PROMPTS, new=4), strict=True))
    for _ in range(14):
        chosen = rng.sample(PROMPTS, 3)
        for prompt, (tokens, _) in zip(chosen, say(engine, *chosen, new=4), strict=True):
            assert tokens == expected[tuple(prompt)]
    stats = engine.block_store.stats()
    places = {"ram": ["ram"], "small": ["ram"], "disk": ["disk"], "both": ["ram"]}[tiers]
    assert all(hits(engine).tokens[place] > 50 for place in places) and stats.bytes_in and stats.bytes_out
    assert tiers != "small" or stats.ram.evictions > 20
    engine.close()


def test_a_key_of_eight_bits_hits_less_and_is_never_wrong(tmp_path):
    engine = make(tmp_path, num_blocks=24, prefix_cache_ram=100_000)
    engine.kv_cache_manager._prefix_cache.prefixes._hash = lambda data: digest(data)[:1]
    rng, expected = random.Random(2), dict(zip(map(tuple, PROMPTS), right(engine, *PROMPTS, new=3), strict=True))
    for _ in range(25):
        chosen = rng.sample(PROMPTS, 2)
        for prompt, (tokens, _) in zip(chosen, say(engine, *chosen, new=3), strict=True):
            assert tokens == expected[tuple(prompt)]
    assert sum(hits(engine).tokens.values()) > 0 and hits(engine).misses["collision"] > 0
    engine.close()


def test_a_stored_block_is_never_written_by_who_loaded_it(tmp_path):
    engine = make(tmp_path, prefix_cache_ram=1 << 20)
    [(tokens, _)] = say(engine, PROMPT)
    engine.close()
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.kv")}
    again = make(tmp_path, prefix_cache_ram=1 << 20)
    for tail in ([1], [2], tokens, [3, 4]):
        assert say(again, PROMPT[:40] + tail, new=3)[0][1] == 40
    again.close()
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


# ---------------------------------------------------------------- disks that fail


def test_whichever_operation_of_the_disk_fails_the_output_is_right(tmp_path, monkeypatch, caplog):
    prompts = PROMPTS[2::3][:2]
    stored = make(tmp_path / "stored")
    expected = right(stored, *prompts, new=3)
    say(stored, prompts[0], new=3)
    stored.close()

    def life(folder, disk):
        engine = make(folder, disk=disk, monkeypatch=monkeypatch, prefix_cache_size=60_000)
        answers = [say(engine, prompt, new=3, poison=False)[0][0] for prompt in prompts]
        failed = engine.block_store is None or engine.block_store.stats().disk.failures
        engine.close()
        return answers, failed

    shutil.copytree(tmp_path / "stored", tmp_path / "counted")
    counted = FailingDisk()
    assert life(tmp_path / "counted", counted) == (expected, 0)
    heard = 0
    for k in range(0, counted.count, 1 + counted.count // 60):
        shutil.copytree(tmp_path / "stored", tmp_path / f"{k}")
        answers, failed = life(tmp_path / f"{k}", FailingDisk(k, on=k % 3 == 0, code=(errno.EIO, errno.ENOSPC)[k % 2]))
        assert answers == expected, k
        heard += bool(failed)
        shutil.rmtree(tmp_path / f"{k}")
    assert heard > 20


def test_every_flip_and_every_cut_is_a_miss_and_the_output_is_right(tmp_path):
    model, changed = build(model_config(heads="mqa", layers=1)), 0
    first = make(tmp_path, model=model)
    [(tokens, _)] = say(first, PROMPT[:5], new=2)
    first.close()
    files = sorted(tmp_path.glob("*.kv"))
    raws = [file.read_bytes() for file in files]
    for number, raw in enumerate(raws):
        for at in range(0, len(raw), 64):
            for kind in ("flip", "cut"):
                spoiled = bytearray(raw)
                spoiled[at] ^= 0x10
                for file, old in zip(files, raws, strict=True):
                    file.write_bytes(old)
                files[number].write_bytes(spoiled if kind == "flip" else raw[:at])
                engine = make(tmp_path, model=model)
                [(got, cached)] = say(engine, PROMPT[:5], new=2, poison=False)
                assert got == tokens and cached == 0, (number, at, kind)
                assert sum(hits(engine).misses.values()) == 1
                changed += 1
                engine.close()
    assert changed > 30


def test_a_read_only_folder_and_a_full_disk_do_not_stop_serving(tmp_path, monkeypatch, caplog):
    first = make(tmp_path)
    expected = say(first, PROMPT)
    first.close()
    disk = FailingDisk(0, which=("create", "remove", "touch"), code=errno.EROFS, on=True)
    engine = make(tmp_path, disk=disk, monkeypatch=monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert say(engine, PROMPT)[0][1] == 40, "what is there can still be read"
        for start in range(1, 4):
            say(engine, PROMPT[start:])
    assert engine.block_store.stats().disk.disabled_reason and engine.block_store.stats().disk.failures
    assert len([record for record in caplog.records if "the engine continues" in record.message]) == 1
    assert say(engine, PROMPT)[0][0] == expected[0][0]
    engine.close()


def test_a_folder_that_cannot_be_opened_is_left_out(tmp_path, monkeypatch, caplog):
    disk = FailingDisk(0, which=("folder", "lock"), code=errno.EACCES, on=True)
    with caplog.at_level(logging.WARNING):
        engine = make(tmp_path / "tier", disk=disk, monkeypatch=monkeypatch)
    assert engine.block_store is None and "continues without the disk store" in caplog.text
    assert say(engine, PROMPT)[0][0] == right(engine, PROMPT)[0]
    engine.close()


def test_two_engines_on_one_folder(tmp_path, caplog):
    first = make(tmp_path)
    with caplog.at_level(logging.WARNING):
        second = make(tmp_path, prefix_cache_ram=1 << 20)
    assert "in use by another process" in caplog.text
    expected = right(first, PROMPT)
    assert [say(engine, PROMPT)[0][0] for engine in (first, second)] == expected * 2
    assert second.block_store.stats().disk.num_blocks == 0 and first.block_store.flush()
    assert first.block_store.stats().disk.num_blocks
    first.close()
    second.close()
    third = make(tmp_path)
    assert third.block_store.stats().disk.num_blocks
    third.close()


def test_an_engine_that_was_forgotten_lets_its_folder_go(tmp_path):
    engine = make(tmp_path)
    say(engine, PROMPT)
    assert engine.block_store.flush()
    del engine
    import gc

    gc.collect()
    again = make(tmp_path)
    assert again.block_store.on_disk and say(again, PROMPT)[0][1] == 40
    again.close()


# ---------------------------------------------------------------- what is another's


@pytest.mark.parametrize("what", ["weights", "dtype", "policy", "shape", "rotate"])
def test_blocks_of_another_model_or_way_are_a_miss_said_once(tmp_path, what, caplog):
    first = make(tmp_path)
    say(first, PROMPT)
    first.close()
    fields = {
        "weights": {"model": build(model_config(), seed=1)},
        "dtype": {"dtype": "float32"},
        "policy": {"policy": "window(30)"},
        "shape": {"heads": "mqa"},
        "rotate": {"rope_at": "read"},
    }[what]
    with caplog.at_level(logging.INFO):
        other = make(tmp_path, **fields)
        for _ in range(2):
            assert say(other, PROMPT)[0][0] == right(other, PROMPT)[0] or what in ("dtype", "policy")
    told = [record.message for record in caplog.records if "cannot be used here" in record.message]
    named = {"weights": "model", "shape": "model", "dtype": "keys: float64"}.get(what, what)
    part = {"dtype": "keys: float32 here, float64 there"}.get(what, named)
    assert len(told) == 1 and part in told[0]
    assert not hits(other).tokens["disk"] and hits(other).misses == {"unknown": 1}
    other.close()
    again = make(tmp_path)
    assert say(again, PROMPT)[0][1] == 40, "and they are still there for their own"
    again.close()


def test_an_entry_under_a_name_that_is_not_its_own_is_refused(tmp_path):
    first = make(tmp_path)
    expected = say(first, PROMPT, PROMPT[1:])
    first.close()
    files = sorted(tmp_path.glob("*.kv"))
    moved = [file.read_bytes() for file in files[1:] + files[:1]]
    for file, raw in zip(files, moved, strict=True):
        file.write_bytes(raw)
    second = make(tmp_path)
    again = say(second, PROMPT, PROMPT[1:])
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in expected]
    assert [cached for _, cached in again] == [0, 0] and hits(second).misses["collision"] == 2
    second.close()


# ---------------------------------------------------------------- pins


def test_a_prefix_that_was_kept_stays_and_its_blocks_are_flushed(tmp_path, monkeypatch):
    disk = FailingDisk()
    engine = make(tmp_path, disk=disk, monkeypatch=monkeypatch, prefix_cache_size=60_000)
    pin = pin_prefix(engine, PROMPT, "system", "the text")
    assert pin.tokens == 40 and len(pin.keys) == 10 and engine.block_store.stats().disk.pinned == 10
    for start in range(1, 9):
        say(engine, [start, *PROMPT])
    assert engine.block_store.flush() and engine.block_store.stats().disk.bytes <= 60_000
    assert engine.block_store.stats().disk.evictions > 10
    engine.close()
    again = make(tmp_path, prefix_cache_size=60_000)
    for start in range(1, 9):
        say(again, [start, *PROMPT], new=2)
    again.kv_cache_manager.reset_prefix_cache()
    assert say(again, PROMPT)[0][1] == 40
    again.close()


def test_a_prefix_that_cannot_be_flushed_is_not_kept(tmp_path, monkeypatch):
    disk = FailingDisk(0, which=("sync",))
    engine = make(tmp_path, disk=disk, monkeypatch=monkeypatch)
    with pytest.raises(SaveError, match="not pinned"):
        pin_prefix(engine, PROMPT, "system")
    assert not list(tmp_path.glob("*.prefix"))
    for name in ("", "../x", ".hidden", "a/b", "x" * 65):
        with pytest.raises(UsageError, match="is not a valid name for a prefix"):
            pin_prefix(engine, PROMPT, name)
    engine.close()
    with pytest.raises(UsageError, match="cannot be used"):
        pin_prefix(make(), PROMPT, "system")


# ---------------------------------------------------------------- what cannot be asked


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prefix_cache_dir": "x", "prefix_cache_size": 0}, "at least 1"),
        ({"prefix_cache_ram": 0}, "at least 1"),
        ({"prefix_cache_size": 5}, "requires cache.prefix_cache_dir"),
        ({"prefix_cache_dir": "x", "prefix_cache_eviction": "fifo"}, "fifo"),
        ({"prefix_cache_dir": "x", "enable_prefix_caching": False}, "shares no blocks"),
        ({"prefix_cache_ram": 5, "layout": "contiguous"}, "shares no blocks"),
        ({"prefix_cache_dir": ""}, "prefix_cache_dir: must not be empty"),
    ],
)
def test_what_holds_nothing_is_refused(fields, says):
    with pytest.raises(ConfigError, match=says):
        config(**fields)


def test_a_policy_that_shares_nothing_and_a_folder_of_others_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"policy heavy-hitters\(16, 64, 8\) shares no blocks"):
        make(tmp_path / "tier", policy="heavy-hitters(16)")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="other files"):
        make(tmp_path)
    with pytest.raises(ConfigError, match=r"notes\.txt must be a folder"):
        make(tmp_path / "notes.txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


# ---------------------------------------------------------------- a slow disk, and requests that end meanwhile


class SlowDisk(FileSystem):
    """Reads wait until the test says so."""

    def __init__(self):
        self.slow = False

    def read(self, file, into, offset):
        while self.slow:
            time.sleep(0.001)
        return super().read(file, into, offset)


def test_nobody_waits_for_the_disk_of_another(tmp_path, monkeypatch):
    first = make(tmp_path)
    say(first, PROMPT)
    first.close()
    disk = SlowDisk()
    engine = make(tmp_path, disk=disk, monkeypatch=monkeypatch)
    disk.slow = True
    waits = engine.add_request(PROMPT, SamplingParams(max_tokens=3, temperature=0))
    goes = engine.add_request(PROMPT[1:], SamplingParams(max_tokens=3, temperature=0))
    said = {waits: [], goes: []}
    for _ in range(12):
        for piece in engine.step():
            said[piece.request].append(piece.token_id)
    assert len(said[goes]) == 3 and not said[waits] and not engine.idle
    usage = engine.metrics(waits)
    disk.slow = False
    while not engine.idle:
        for piece in engine.step():
            said[piece.request].append(piece.token_id)
    assert usage.num_cached_tokens == 40 and [said[waits]] == right(engine, PROMPT, new=3)
    engine.close()


def test_a_request_that_ends_while_its_blocks_are_on_their_way_leaves_nothing(tmp_path, monkeypatch):
    first = make(tmp_path)
    say(first, PROMPT)
    first.close()
    disk = SlowDisk()
    engine = make(tmp_path, disk=disk, monkeypatch=monkeypatch, num_blocks=24)
    disk.slow = True
    request = engine.add_request(PROMPT, SamplingParams(max_tokens=3, temperature=0))
    engine.step()
    engine.abort_request(request)
    assert engine.idle
    before = [leaf.clone() for leaf in engine.kv_cache.tensors()]
    disk.slow = False
    assert all(reader.wait(10) for reader in engine.block_store._readers)
    assert all(torch.equal(old, new) for old, new in zip(before, engine.kv_cache.tensors(), strict=True))
    assert say(engine, PROMPT[1:])[0][0] == right(engine, PROMPT[1:])[0]
    engine.close()


def test_the_queue_of_writes_is_bounded(tmp_path):
    engine = make(tmp_path)
    engine.block_store._max_queued_bytes = 1
    say(engine, PROMPT)
    stats = engine.block_store.stats()
    assert stats.num_not_written > 0
    engine.close()


# ---------------------------------------------------------------- broken on purpose


def same_key(engine):
    """Two first blocks whose keys are the same eight bits."""
    root, found = engine._root(PROMPT, SamplingParams(max_tokens=2, temperature=0), ""), {}
    for token in range(1, 60):
        (key,) = engine.kv_cache_manager.block_keys([token] * 4, root)
        if key in found:
            return found[key], token
        found[key] = token
    raise AssertionError("no two keys of eight bits are the same")


@pytest.mark.parametrize("compared", [True, False])
def test_a_block_of_another_history_is_refused_by_its_proof(tmp_path, monkeypatch, compared):
    """A stored block behind A is asked for behind B: the key and the tokens are the same, what stands before is not."""
    if not compared:
        monkeypatch.setattr("kvad.cache.manager.prefix_offload.prefix_digest", lambda prefix: b"")
    engine = make(tmp_path)
    engine.kv_cache_manager._prefix_cache.prefixes._hash = lambda data: digest(data)[:1]
    a, b = same_key(engine)
    say(engine, [a] * 4 + [1] * 8 + [2], new=2)
    assert engine.block_store.flush()
    engine.kv_cache_manager.reset_prefix_cache()
    say(engine, [b] * 4 + [2], new=2)
    prompt = [b] * 4 + [1] * 8 + [2]
    got, cached = logits_of(engine, prompt)
    near = (got - uncached(engine.model, prompt, limit=len(prompt) + 1)[-1]).abs().max() <= 1e-10
    assert (near, cached) == ((True, 4) if compared else (False, 12))
    assert hits(engine).misses["collision"] == 1 + compared, "and B's own block has A's key"
    engine.close()


def test_loads_that_are_left_out_would_be_heard(tmp_path, monkeypatch):
    first = make(tmp_path)
    say(first, PROMPT)
    first.close()
    monkeypatch.setattr(PrefixOffload, "take_loads", lambda self: ())
    engine = make(tmp_path)
    got, cached = logits_of(engine, PROMPT)
    assert cached == 40 and not (got - uncached(engine.model, PROMPT, limit=len(PROMPT) + 1)[-1]).abs().max() <= 1e-10
    engine.close()


# ---------------------------------------------------------------- kill -9

KILLER = """
import os, random, signal, sys, time
from tests.engine import test_block_store  # torch is imported, and nothing computed with it: a fork is safe
folder, count, rng = sys.argv[1], int(sys.argv[2]), random.Random(int(sys.argv[3]))
for number in range(count):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        test_block_store.fill(folder, 7 * number, write)
    assert os.read(read, 1) == b"o", "it did not start"
    time.sleep(rng.random() * 0.2)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
"""


def fill(folder, number, started):
    """Serve for ever over a tier, and write down every answer."""
    torch.set_num_threads(1)
    engine = Engine(build(model_config()), config(prefix_cache_dir=folder, prefix_cache_size=200_000, num_blocks=24))
    os.write(started, b"o" if engine.block_store is not None else b"-")
    with open(f"{folder}.said", "a") as said:
        while True:
            number += 1
            prompt = PROMPTS[number % len(PROMPTS)] + [number % 5 + 1] * (number % 3)
            tokens = say(engine, prompt, new=3, poison=False)[0][0]
            print(",".join(map(str, prompt)), ",".join(map(str, tokens)), "end", file=said, flush=True)


def kills(folder, count, seed):
    """Kill a child that fills a tier, again and again: it always starts, and every answer that it gave is right."""
    command = [sys.executable, "-c", KILLER, os.fspath(folder), str(count), str(seed)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "."}
    subprocess.run(command, cwd=Path(__file__).parents[2], env=env, check=True)
    engine, known, said = Engine(build(model_config()), config()), {}, 0
    for line in Path(f"{folder}.said").read_text().splitlines():
        if line.endswith(" end") and line.count(" ") == 2:
            prompt, tokens = (tuple(map(int, part.split(","))) for part in line.split()[:2])
            if prompt not in known:
                known[prompt] = tuple(right(engine, prompt, new=3)[0])
            assert tokens == known[prompt]
            said += 1
    last = Engine(build(model_config()), config(prefix_cache_dir=os.fspath(folder), prefix_cache_size=200_000))
    stats = last.block_store.stats().disk
    assert stats.num_blocks and stats.bytes <= 200_000 and not list(Path(folder).glob(".*.tmp"))
    for prompt in PROMPTS:
        say(last, prompt, new=2)
    assert last.block_store.stats().disk.misses.get("damaged", 0) == 0, "renamed when whole: a kill alone tears nothing"
    last.close()
    return said


def test_killed_twenty_times_while_it_fills_a_tier(tmp_path):
    assert kills(tmp_path / "tier", 20, 0) > 20


@pytest.mark.long(minutes=10)
def test_killed_five_hundred_times(tmp_path):
    assert kills(tmp_path / "tier", 500, 2) > 500
