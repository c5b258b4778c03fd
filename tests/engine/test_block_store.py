"""Block stores of a real engine: blocks from RAM or disk give the tokens and logits of the uncached model.

In float64; freed blocks are filled with NaN. If a disk operation fails, a file is damaged or a process is killed, the
output is still right, and the engine continues.
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
from kvad.cache.manager.prefix_index import digest
from kvad.cache.manager.prefix_offload import PrefixOffload
from kvad.engine import engine as engine_module
from kvad.engine.engine import Engine, pin_prefix
from kvad.engine.scheduling.request import SamplingParams, SequenceOutput
from kvad.engine.storage import open_block_store
from kvad.errors import ConfigError, SaveError, UsageError
from kvad.storage.filesystem import FileSystem
from tests.support.driver import run_engine, tokens_of, uncached
from tests.support.faulty_filesystems import FailingDisk
from tests.support.manager_driver import unpublish_all
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


def make_engine(folder=None, heads="gqa", position="rope", model=None, disk=None, monkeypatch=None, **fields):
    if disk is not None:
        monkeypatch.setattr(engine_module, "open_block_store", lambda *parts: open_block_store(*parts, fs=disk))
    store_options = {} if folder is None else {"prefix_cache_dir": os.fspath(folder)}
    return Engine(model or build(model_config(position, heads=heads)), config(**store_options, **fields))


def generate(engine, *prompts, new=6, salt="", poison=True):
    """Return each prompt's greedy tokens and its number of cached tokens; the prompts are submitted together."""
    sampling = SamplingParams(max_tokens=new, temperature=0)
    requests = [engine.add_request(prompt, sampling, cache_salt=salt) for prompt in prompts]
    metrics, chunks = [engine.metrics(request) for request in requests], run_engine(engine, poison=poison)
    assert all(chunk.error is None for request in requests for chunk in chunks[request])
    return [(tokens_of(chunks[n]), usage.num_cached_tokens) for n, usage in zip(requests, metrics, strict=True)]


def uncached_tokens(engine, *prompts, new=6):
    """The same without any cache."""
    results = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(new):
            tokens.append(int(uncached(engine.model, tokens)[-1].argmax()))
        results.append(tokens[len(prompt) :])
    return results


def logits_of(engine, tokens):
    """[V] at the last of these tokens, through the engine's cache; and how many were cached."""
    with torch.inference_mode():
        request, kept = engine.add_request(tokens, SamplingParams(max_tokens=1, temperature=0)), None
        usage = engine.metrics(request)
        while not engine.idle:
            output = engine.scheduler.schedule()
            if output is None:
                time.sleep(0.001)
                continue
            logits = engine.runner.execute(output)
            kept = logits[-1].clone()
            engine.scheduler.update_from_output(
                output, [SequenceOutput(0 if scheduled.is_sampled else None) for scheduled in output.scheduled]
            )
    return kept, usage.num_cached_tokens


def hits(engine):
    return engine.kv_cache_manager.prefix_offload.hits


# ---------------------------------------------------------------- the same as without


@pytest.mark.parametrize("heads", ["gqa", "window", "window-mix", "softcap", "value-dim"])
@pytest.mark.parametrize("position", ["rope", "alibi", "learned"])
def test_another_engine_uses_stored_blocks_with_equal_output(tmp_path, heads, position):
    first = make_engine(tmp_path, heads, position)
    [(tokens, cached)] = generate(first, PROMPT)
    assert cached == 0 and [tokens] == uncached_tokens(first, PROMPT)
    first.close()
    second = make_engine(tmp_path, heads, position)
    full_text = PROMPT + tokens
    actual, cached = logits_of(second, full_text)
    assert cached == 44 and hits(second).tokens == {"disk": 44} and not hits(second).misses["unknown"]
    wanted = uncached(second.model, full_text)[-1]
    assert (actual - wanted).abs().max() <= 1e-10
    assert second.block_store.stats().bytes_in > 0
    second.close()


@pytest.mark.parametrize(
    "fields",
    [{"dtype": "float32"}, {"key_dtype": "int8", "value_dtype": "int4"}, {"dtype": "bfloat16"}, {"rope_at": "read"}],
)
@pytest.mark.parametrize("policy", ["full", "sinks(3, 9)", "quest(16)"])
def test_stored_blocks_equal_recomputed_ones_in_every_format(tmp_path, fields, policy):
    """What was stored is read as what is computed anew."""
    if policy.startswith("quest") and "rope_at" in fields:
        pytest.skip("bounds are of rotated keys")
    fields = {"policy": policy, **fields}
    first = make_engine(tmp_path, **fields)
    [(tokens, _)] = generate(first, PROMPT)
    first.close()
    second, fresh = make_engine(tmp_path, **fields), make_engine(**fields)
    full_text = PROMPT + tokens
    actual, cached = logits_of(second, full_text)
    wanted, none = logits_of(fresh, full_text)
    assert cached and not none
    assert (actual - wanted).abs().max() <= 1e-6
    second.close()


def test_targets_share_stored_blocks_only_with_an_equal_encoder_input(tmp_path):
    model = build(pair_config())
    engine = Engine(model, config(prefix_cache_dir=tmp_path, max_source_len=32))
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)

    def answer(engine, source):
        request = engine.add_request(PROMPT, sampling, encoder_token_ids=source)
        usage, outputs = engine.metrics(request), []
        while not engine.idle:
            outputs += [chunk.token_id for chunk in engine.step() if chunk.token_id is not None]
        return outputs, usage.num_cached_tokens

    outputs, _ = answer(engine, [1, 2, 3])
    engine.close()
    again = Engine(model, config(prefix_cache_dir=os.fspath(tmp_path), max_source_len=32))
    assert answer(again, [1, 2, 3]) == (outputs, 40)
    assert answer(again, [1, 2, 4])[1] == 0
    again.close()


def test_salts_regimes_and_block_sizes_share_nothing(tmp_path):
    engine = make_engine(tmp_path)
    generate(engine, PROMPT, salt="a")
    engine.close()
    other = make_engine(tmp_path)
    assert generate(other, PROMPT, salt="b")[0][1] == 0
    assert generate(other, PROMPT, salt="a")[0][1] == 40
    other.close()
    smaller = make_engine(tmp_path, block_size=2)
    assert generate(smaller, PROMPT, salt="a")[0][1] == 0
    smaller.close()


# ---------------------------------------------------------------- a pool that is always full

PROMPTS = [
    [stem] * 3 + [(stem * i) % 50 + 1 for i in range(3, length)] for stem in (2, 3, 5, 7) for length in (17, 30, 41)
]


@pytest.mark.parametrize("stores", ["ram", "disk", "both", "small"])
@pytest.mark.parametrize("heads", ["gqa", "window-mix"])
def test_evicted_blocks_are_loaded_from_the_store(tmp_path, heads, stores):
    fields = {} if stores in ("ram", "small") else {"folder": tmp_path}
    if stores != "disk":
        fields["prefix_cache_ram"] = 30_000 if stores == "small" else 1 << 20
    engine = make_engine(heads=heads, num_blocks=24, **fields)
    rng, expected = (
        random.Random(1),
        dict(zip(map(tuple, PROMPTS), uncached_tokens(engine, *PROMPTS, new=4), strict=True)),
    )
    for _ in range(14):
        chosen = rng.sample(PROMPTS, 3)
        for prompt, (tokens, _) in zip(chosen, generate(engine, *chosen, new=4), strict=True):
            assert tokens == expected[tuple(prompt)]
    stats = engine.block_store.stats()
    places = {"ram": ["ram"], "small": ["ram"], "disk": ["disk"], "both": ["ram"]}[stores]
    assert all(hits(engine).tokens[place] > 50 for place in places) and stats.bytes_in and stats.bytes_out
    assert stores != "small" or stats.ram.evictions > 20
    engine.close()


def test_collisions_of_8_bit_keys_never_change_the_output(tmp_path):
    engine = make_engine(tmp_path, num_blocks=24, prefix_cache_ram=100_000)
    engine.kv_cache_manager._prefix_cache.prefixes._hash = lambda data: digest(data)[:1]
    rng, expected = (
        random.Random(2),
        dict(zip(map(tuple, PROMPTS), uncached_tokens(engine, *PROMPTS, new=3), strict=True)),
    )
    for _ in range(25):
        chosen = rng.sample(PROMPTS, 2)
        for prompt, (tokens, _) in zip(chosen, generate(engine, *chosen, new=3), strict=True):
            assert tokens == expected[tuple(prompt)]
    assert sum(hits(engine).tokens.values()) > 0 and hits(engine).misses["collision"] > 0
    engine.close()


def test_a_loaded_block_is_never_written_to(tmp_path):
    engine = make_engine(tmp_path, prefix_cache_ram=1 << 20)
    [(tokens, _)] = generate(engine, PROMPT)
    engine.close()
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.kv")}
    again = make_engine(tmp_path, prefix_cache_ram=1 << 20)
    for tail in ([1], [2], tokens, [3, 4]):
        assert generate(again, PROMPT[:40] + tail, new=3)[0][1] == 40
    again.close()
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


# ---------------------------------------------------------------- disks that fail


def test_a_failing_disk_operation_never_changes_the_output(tmp_path, monkeypatch, caplog):
    prompts = PROMPTS[2::3][:2]
    stored = make_engine(tmp_path / "stored")
    expected = uncached_tokens(stored, *prompts, new=3)
    generate(stored, prompts[0], new=3)
    stored.close()

    def life(folder, disk):
        engine = make_engine(folder, disk=disk, monkeypatch=monkeypatch, prefix_cache_size=60_000)
        results = [generate(engine, prompt, new=3, poison=False)[0][0] for prompt in prompts]
        failed = engine.block_store is None or engine.block_store.stats().disk.failures
        engine.close()
        return results, failed

    shutil.copytree(tmp_path / "stored", tmp_path / "counted")
    counted = FailingDisk()
    assert life(tmp_path / "counted", counted) == (expected, 0)
    num_detected = 0
    for k in range(0, counted.count, 1 + counted.count // 60):
        shutil.copytree(tmp_path / "stored", tmp_path / f"{k}")
        results, failed = life(tmp_path / f"{k}", FailingDisk(k, on=k % 3 == 0, code=(errno.EIO, errno.ENOSPC)[k % 2]))
        assert results == expected, k
        num_detected += bool(failed)
        shutil.rmtree(tmp_path / f"{k}")
    assert num_detected > 20


def test_a_damaged_file_is_a_miss_and_never_changes_the_output(tmp_path):
    model, changed = build(model_config(heads="mqa", layers=1)), 0
    first = make_engine(tmp_path, model=model)
    [(tokens, _)] = generate(first, PROMPT[:5], new=2)
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
                engine = make_engine(tmp_path, model=model)
                [(actual, cached)] = generate(engine, PROMPT[:5], new=2, poison=False)
                assert actual == tokens and cached == 0, (number, at, kind)
                assert sum(hits(engine).misses.values()) == 1
                changed += 1
                engine.close()
    assert changed > 30


def test_an_engine_continues_with_a_read_only_folder(tmp_path, monkeypatch, caplog):
    first = make_engine(tmp_path)
    expected = generate(first, PROMPT)
    first.close()
    disk = FailingDisk(0, which=("create", "remove", "touch"), code=errno.EROFS, on=True)
    engine = make_engine(tmp_path, disk=disk, monkeypatch=monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert generate(engine, PROMPT)[0][1] == 40, "what is there can still be read"
        for start in range(1, 4):
            generate(engine, PROMPT[start:])
    assert engine.block_store.stats().disk.disabled_reason and engine.block_store.stats().disk.failures
    assert len([record for record in caplog.records if "the engine continues" in record.message]) == 1
    assert generate(engine, PROMPT)[0][0] == expected[0][0]
    engine.close()


def test_an_engine_continues_without_an_unavailable_folder(tmp_path, monkeypatch, caplog):
    disk = FailingDisk(0, which=("folder", "lock"), code=errno.EACCES, on=True)
    with caplog.at_level(logging.WARNING):
        engine = make_engine(tmp_path / "store", disk=disk, monkeypatch=monkeypatch)
    assert engine.block_store is None and "continues without the disk store" in caplog.text
    assert generate(engine, PROMPT)[0][0] == uncached_tokens(engine, PROMPT)[0]
    engine.close()


def test_two_engines_on_one_folder(tmp_path, caplog):
    first = make_engine(tmp_path)
    with caplog.at_level(logging.WARNING):
        second = make_engine(tmp_path, prefix_cache_ram=1 << 20)
    assert "in use by this process" in caplog.text
    expected = uncached_tokens(first, PROMPT)
    assert [generate(engine, PROMPT)[0][0] for engine in (first, second)] == expected * 2
    assert second.block_store.stats().disk.num_blocks == 0 and first.block_store.flush()
    assert first.block_store.stats().disk.num_blocks
    first.close()
    second.close()
    third = make_engine(tmp_path)
    assert third.block_store.stats().disk.num_blocks
    third.close()


def test_a_collected_engine_releases_its_folder(tmp_path):
    engine = make_engine(tmp_path)
    generate(engine, PROMPT)
    assert engine.block_store.flush()
    del engine
    import gc

    gc.collect()
    again = make_engine(tmp_path)
    assert again.block_store.on_disk and generate(again, PROMPT)[0][1] == 40
    again.close()


# ---------------------------------------------------------------- what is another's


@pytest.mark.parametrize("what", ["weights", "dtype", "policy", "shape", "rotate"])
def test_blocks_of_another_model_or_cache_are_missed_with_one_warning(tmp_path, what, caplog):
    first = make_engine(tmp_path)
    generate(first, PROMPT)
    first.close()
    fields = {
        "weights": {"model": build(model_config(), seed=1)},
        "dtype": {"dtype": "float32"},
        "policy": {"policy": "window(30)"},
        "shape": {"heads": "mqa"},
        "rotate": {"rope_at": "read"},
    }[what]
    with caplog.at_level(logging.INFO):
        other = make_engine(tmp_path, **fields)
        for _ in range(2):
            assert generate(other, PROMPT)[0][0] == uncached_tokens(other, PROMPT)[0] or what in ("dtype", "policy")
    messages = [record.message for record in caplog.records if "cannot be used here" in record.message]
    named = {"weights": "model", "shape": "model", "dtype": "keys: float64"}.get(what, what)
    part = {"dtype": "keys: float32 here, float64 there"}.get(what, named)
    assert len(messages) == 1 and part in messages[0]
    assert not hits(other).tokens["disk"] and hits(other).misses == {"unknown": 1}
    other.close()
    again = make_engine(tmp_path)
    assert generate(again, PROMPT)[0][1] == 40, "and they are still there for their own"
    again.close()


def test_an_entry_under_another_name_is_rejected(tmp_path):
    first = make_engine(tmp_path)
    expected = generate(first, PROMPT, PROMPT[1:])
    first.close()
    files = sorted(tmp_path.glob("*.kv"))
    moved = [file.read_bytes() for file in files[1:] + files[:1]]
    for file, raw in zip(files, moved, strict=True):
        file.write_bytes(raw)
    second = make_engine(tmp_path)
    again = generate(second, PROMPT, PROMPT[1:])
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in expected]
    assert [cached for _, cached in again] == [0, 0] and hits(second).misses["collision"] == 2
    second.close()


# ---------------------------------------------------------------- pins


def test_a_pinned_prefix_is_flushed_and_not_evicted(tmp_path, monkeypatch):
    disk = FailingDisk()
    engine = make_engine(tmp_path, disk=disk, monkeypatch=monkeypatch, prefix_cache_size=60_000)
    pin = pin_prefix(engine, PROMPT, "system", "the text")
    assert pin.tokens == 40 and len(pin.keys) == 10 and engine.block_store.stats().disk.pinned == 10
    for start in range(1, 9):
        generate(engine, [start, *PROMPT])
    assert engine.block_store.flush() and engine.block_store.stats().disk.bytes <= 60_000
    assert engine.block_store.stats().disk.evictions > 10
    engine.close()
    again = make_engine(tmp_path, prefix_cache_size=60_000)
    for start in range(1, 9):
        generate(again, [start, *PROMPT], new=2)
    unpublish_all(again.kv_cache_manager)
    assert generate(again, PROMPT)[0][1] == 40
    again.close()


def test_a_prefix_that_cannot_be_flushed_is_not_pinned(tmp_path, monkeypatch):
    disk = FailingDisk(0, which=("sync",))
    engine = make_engine(tmp_path, disk=disk, monkeypatch=monkeypatch)
    with pytest.raises(SaveError, match="not pinned"):
        pin_prefix(engine, PROMPT, "system")
    assert not list(tmp_path.glob("*.prefix"))
    for name in ("", "../x", ".hidden", "a/b", "x" * 65):
        with pytest.raises(UsageError, match="is not a valid name for a prefix"):
            pin_prefix(engine, PROMPT, name)
    engine.close()
    with pytest.raises(UsageError, match="cannot be used"):
        pin_prefix(make_engine(), PROMPT, "system")


# ---------------------------------------------------------------- invalid options


@pytest.mark.parametrize(
    ("fields", "message"),
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
def test_empty_stores_are_rejected(fields, message):
    with pytest.raises(ConfigError, match=message):
        config(**fields)


def test_policies_without_shared_blocks_and_foreign_folders_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"policy heavy-hitters\(16, 64, 8\) shares no blocks"):
        make_engine(tmp_path / "store", policy="heavy-hitters(16)")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="other files"):
        make_engine(tmp_path)
    with pytest.raises(ConfigError, match=r"notes\.txt must be a folder"):
        make_engine(tmp_path / "notes.txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


# ---------------------------------------------------------------- a slow disk, and requests that end meanwhile


class SlowDisk(FileSystem):
    """Reads wait until the test releases them."""

    def __init__(self):
        self.slow = False

    def read(self, file, into, offset):
        while self.slow:
            time.sleep(0.001)
        return super().read(file, into, offset)


def test_a_slow_disk_delays_only_the_request_that_reads(tmp_path, monkeypatch):
    first = make_engine(tmp_path)
    generate(first, PROMPT)
    first.close()
    disk = SlowDisk()
    engine = make_engine(tmp_path, disk=disk, monkeypatch=monkeypatch)
    disk.slow = True
    waits = engine.add_request(PROMPT, SamplingParams(max_tokens=3, temperature=0))
    goes = engine.add_request(PROMPT[1:], SamplingParams(max_tokens=3, temperature=0))
    outputs = {waits: [], goes: []}
    for _ in range(12):
        for chunk in engine.step():
            outputs[chunk.request].append(chunk.token_id)
    assert len(outputs[goes]) == 3 and not outputs[waits] and not engine.idle
    usage = engine.metrics(waits)
    disk.slow = False
    while not engine.idle:
        for chunk in engine.step():
            outputs[chunk.request].append(chunk.token_id)
    assert usage.num_cached_tokens == 40 and [outputs[waits]] == uncached_tokens(engine, PROMPT, new=3)
    engine.close()


def submit_together(engine, prompts, sampling):
    """Return the tokens of each request, and a function that takes a step and adds its tokens to them."""
    outputs = {engine.add_request(prompt, sampling): [] for prompt in prompts}

    def step():
        for chunk in engine.step():
            outputs[chunk.request].append(chunk.token_id)

    return outputs, step


def fail_a_step(engine, monkeypatch, step):
    """Take a step that fails, and wait until its blocks are dropped from the disk."""

    def fail(output):
        monkeypatch.setattr(engine.runner, "execute", execute)
        raise RuntimeError("planted")

    execute = engine.runner.execute
    monkeypatch.setattr(engine.runner, "execute", fail)
    step()
    assert engine.block_store._writer.wait(10)


def test_a_request_that_runs_alone_after_a_failed_step_loads_before_older_ones(tmp_path, monkeypatch):
    """Two older ones have loaded their blocks and must wait for it: if it waited for them, nothing would ever run."""
    first = make_engine(tmp_path)
    generate(first, PROMPT, PROMPT[1:])
    first.close()
    disk = SlowDisk()
    engine = make_engine(tmp_path, disk=disk, monkeypatch=monkeypatch, max_num_seqs=4)
    disk.slow = True
    prompts = [PROMPT[3:], PROMPT, PROMPT[1:], PROMPT[3:20] + PROMPT[:20]]
    sampling = SamplingParams(max_tokens=9, temperature=0)
    outputs, step = submit_together(engine, prompts, sampling)
    for _ in range(8):
        step()
    assert [bool(tokens) for tokens in outputs.values()] == [True, False, False, True], "the others wait for the disk"
    fail_a_step(engine, monkeypatch, step)
    step()  # the first one stores the tokens that it shares with the last one
    engine.flush_offload()
    assert engine.block_store._writer.wait(10)
    unpublish_all(engine.kv_cache_manager)
    disk.slow = False
    while not engine.idle:
        step()
    assert list(outputs.values()) == uncached_tokens(engine, *prompts, new=9)
    assert hits(engine).tokens["disk"] == 40 + 36 + 16, "the last one's were loaded too"
    engine.close()


@pytest.mark.parametrize("overflow", ["preempt", "stop", "reject"])
def test_a_request_that_loads_alone_after_a_failed_step_takes_no_room(tmp_path, monkeypatch, overflow):
    """The other one has been recomputed and waits; it is neither preempted nor ended."""
    disk = SlowDisk()
    engine = make_engine(tmp_path, disk=disk, monkeypatch=monkeypatch, num_blocks=60, overflow=overflow)
    prompts, sampling = [PROMPT, PROMPT[:20] + PROMPT[:20]], SamplingParams(max_tokens=9, temperature=0)
    outputs, step = submit_together(engine, prompts, sampling)
    for _ in range(4):
        step()
    fail_a_step(engine, monkeypatch, step)
    while len(engine.scheduler._alone) == 2:  # the first one is recomputed
        step()
    engine.flush_offload()
    assert engine.block_store._writer.wait(10)
    unpublish_all(engine.kv_cache_manager)
    disk.slow = True
    for _ in range(3):
        step()
    assert len(engine.scheduler._waiting) == 1 and engine.scheduler.stats().running == 1
    disk.slow = False
    while not engine.idle:
        step()
    assert list(outputs.values()) == uncached_tokens(engine, *prompts, new=9)
    assert engine.scheduler.stats().preemptions == 0 and hits(engine).tokens["disk"] > 0
    engine.close()


def test_a_request_that_ends_while_its_blocks_load_leaves_nothing(tmp_path, monkeypatch):
    first = make_engine(tmp_path)
    generate(first, PROMPT)
    first.close()
    disk = SlowDisk()
    engine = make_engine(tmp_path, disk=disk, monkeypatch=monkeypatch, num_blocks=24)
    disk.slow = True
    request = engine.add_request(PROMPT, SamplingParams(max_tokens=3, temperature=0))
    engine.step()
    engine.abort_request(request)
    assert engine.idle
    before = [leaf.clone() for leaf in engine.kv_cache.tensors()]
    disk.slow = False
    assert all(reader.wait(10) for reader in engine.block_store._readers)
    assert all(torch.equal(old, new) for old, new in zip(before, engine.kv_cache.tensors(), strict=True))
    assert generate(engine, PROMPT[1:])[0][0] == uncached_tokens(engine, PROMPT[1:])[0]
    engine.close()


def test_the_queue_of_writes_is_bounded(tmp_path):
    engine = make_engine(tmp_path)
    engine.block_store._max_queued_bytes = 1
    generate(engine, PROMPT)
    stats = engine.block_store.stats()
    assert stats.num_not_written > 0
    engine.close()


# ---------------------------------------------------------------- broken on purpose


def same_key(engine):
    """Two first blocks whose keys are the same eight bits."""
    root, found = engine._root(""), {}
    for token in range(1, 60):
        (key,) = engine.kv_cache_manager.block_keys([token] * 4, root)
        if key in found:
            return found[key], token
        found[key] = token
    raise AssertionError("no two keys of eight bits are the same")


@pytest.mark.parametrize("compared", [True, False])
def test_a_block_with_another_prefix_is_rejected(tmp_path, monkeypatch, compared):
    """A block stored after A is requested after B: key and tokens are equal, the prefix is not."""
    if not compared:
        monkeypatch.setattr("kvad.cache.manager.prefix_offload.prefix_digest", lambda prefix: b"")
    engine = make_engine(tmp_path)
    engine.kv_cache_manager._prefix_cache.prefixes._hash = lambda data: digest(data)[:1]
    a, b = same_key(engine)
    generate(engine, [a] * 4 + [1] * 8 + [2], new=2)
    assert engine.block_store.flush()
    unpublish_all(engine.kv_cache_manager)
    generate(engine, [b] * 4 + [2], new=2)
    prompt = [b] * 4 + [1] * 8 + [2]
    actual, cached = logits_of(engine, prompt)
    near = (actual - uncached(engine.model, prompt)[-1]).abs().max() <= 1e-10
    assert (near, cached) == ((True, 4) if compared else (False, 12))
    assert hits(engine).misses["collision"] == 1 + compared, "and B's own block has A's key"
    engine.close()


def test_a_block_with_another_history_and_equal_neighbors_is_rejected(tmp_path):
    """A's third block is requested after B: its key, its tokens and those of the block before it are equal."""
    engine = make_engine(tmp_path)
    engine.kv_cache_manager._prefix_cache.prefixes._hash = lambda data: digest(data)[:1]
    a, b = same_key(engine)
    generate(engine, [a] * 4 + [1] * 8 + [2], new=2)
    assert engine.block_store.flush()
    unpublish_all(engine.kv_cache_manager)
    prompt = [b] * 4 + [1] * 8 + [2]
    generate(engine, prompt[:9], new=2)
    actual, cached = logits_of(engine, prompt)
    assert (actual - uncached(engine.model, prompt)[-1]).abs().max() <= 1e-10 and cached == 8
    engine.close()


def test_missing_loads_are_detected(tmp_path, monkeypatch):
    first = make_engine(tmp_path)
    generate(first, PROMPT)
    first.close()
    monkeypatch.setattr(PrefixOffload, "take_loads", lambda self: ())
    engine = make_engine(tmp_path)
    actual, cached = logits_of(engine, PROMPT)
    assert cached == 40 and not (actual - uncached(engine.model, PROMPT)[-1]).abs().max() <= 1e-10
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
    os.close(write)  # so that the read ends if the child dies before it writes
    assert os.read(read, 1) == b"o", "it did not start"
    time.sleep(rng.random() * 0.2)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
"""


def fill(folder, number, started):
    """Serve forever with a block store, and append every result to a file."""
    torch.set_num_threads(1)
    engine = Engine(build(model_config()), config(prefix_cache_dir=folder, prefix_cache_size=200_000, num_blocks=24))
    os.write(started, b"o" if engine.block_store is not None else b"-")
    with open(f"{folder}.results", "a") as outputs:
        while True:
            number += 1
            prompt = PROMPTS[number % len(PROMPTS)] + [number % 5 + 1] * (number % 3)
            tokens = generate(engine, prompt, new=3, poison=False)[0][0]
            print(",".join(map(str, prompt)), ",".join(map(str, tokens)), "end", file=outputs, flush=True)


def kills(folder, count, seed):
    """Repeatedly kill a process that fills a store: it always starts again, and all of its results are right."""
    command = [sys.executable, "-c", KILLER, os.fspath(folder), str(count), str(seed)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "."}
    subprocess.run(command, cwd=Path(__file__).parents[2], env=env, check=True, timeout=60 + 10 * count)
    engine, known, outputs = Engine(build(model_config()), config()), {}, 0
    for line in Path(f"{folder}.results").read_text().splitlines():
        if line.endswith(" end") and line.count(" ") == 2:
            prompt, tokens = (tuple(map(int, part.split(","))) for part in line.split()[:2])
            if prompt not in known:
                known[prompt] = tuple(uncached_tokens(engine, prompt, new=3)[0])
            assert tokens == known[prompt]
            outputs += 1
    last = Engine(build(model_config()), config(prefix_cache_dir=os.fspath(folder), prefix_cache_size=200_000))
    stats = last.block_store.stats().disk
    assert stats.num_blocks and stats.bytes <= 200_000 and not list(Path(folder).glob(".*.tmp"))
    for prompt in PROMPTS:
        generate(last, prompt, new=2)
    assert last.block_store.stats().disk.misses.get("damaged", 0) == 0, "renamed when whole: a kill alone tears nothing"
    last.close()
    return outputs


def test_blocks_survive_eight_kills(tmp_path):
    assert kills(tmp_path / "store", 8, 0) > 8


@pytest.mark.long(minutes=10)
def test_blocks_survive_five_hundred_kills(tmp_path):
    assert kills(tmp_path / "store", 500, 2) > 500
