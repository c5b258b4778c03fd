"""Sequences larger than the pool have the output of a cache that holds everything, or end with a reason.

Logits are compared in float64 with the uncached model. Under faults of the disk, sampled tokens are compared with those
of an engine without offload. Single disk operations are tested in ``tests/cache/offload/test_token_offload.py``.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvad.cache.config import CacheConfig, resolve_for_model
from kvad.cache.device.offload_reader import OffloadReader, _ReadAhead
from kvad.cache.groups import build_groups
from kvad.cache.offload import token_offload
from kvad.cache.offload.token_offload import OffloadFile
from kvad.config.model import ModelConfig, attention_specs
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling.request import SamplingParams
from kvad.errors import ConfigError, RequestError
from kvad.model.transformer import Transformer
from kvad.storage.filesystem import REAL_FILE_SYSTEM, FileSystem
from tests.support.driver import Stream, drive, worst
from tests.support.faulty_filesystems import FailingDisk
from tests.support.random_models import LIMIT, POSITIONS, build, encoder_config, model_config, pair_config
from tests.support.stream_harness import MACHINE

EXACT = 1e-10
RAM = {"memory": 1 << 30, "disk": 0, "both": 12_000}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a sequence in several tiles."""
    monkeypatch.setattr(token_offload, "TILE", 5000)


@pytest.fixture
def offload_dir(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "offload"
    yield str(folder)
    assert not folder.exists() or not list(folder.iterdir()), "files are left"


def offload_cache(offload_dir: str, **fields: Any) -> CacheConfig:
    given = {
        "dtype": "float64",
        "block_size": 4,
        "max_num_seqs": 3,
        "max_seq_len": 32,
        "prefill_chunk_size": 8,
        "max_source_len": 20,
    }
    given |= {"overflow": "offload", "offload_dir": offload_dir, "offload_ram": 12_000}
    return CacheConfig(**(given | fields))


def offload_engine(model: Transformer, offload_dir: str, fs: FileSystem = REAL_FILE_SYSTEM, **fields: Any) -> Engine:
    return Engine(model, offload_cache(offload_dir, **fields), EngineConfig(max_num_batched_tokens=24, fs=fs))


def streams(config: ModelConfig) -> list[Stream]:
    """Return sequences that are offloaded, one that is not, and two samples."""
    rng = random.Random(4)

    def ids(count: int) -> list[int]:
        return [rng.randrange(67) for _ in range(count)]

    made = [Stream(ids(50), [ids(20)]), Stream(ids(3), [ids(60)], 2), Stream(ids(40), [ids(12), ids(12)], 3)]
    made.append(Stream(ids(5), [ids(10)], 5))
    if config.encoder_input is None:
        return made
    return [replace(stream, source=[rng.randrange(40) for _ in range(9 + 2 * at)]) for at, stream in enumerate(made)]


CONFIGS = {
    **{position: model_config(position) for position in POSITIONS},
    **{f"{position}, pair": pair_config(position) for position in ("none", "learned", "rope", "alibi", "t5")},
    **{
        heads: model_config("rope", heads=heads)
        for heads in ("mqa", "value-dim", "softcap", "sinks", "window-mix", "latent")
    },
    "value-dim, alibi": model_config("alibi", heads="value-dim"),
}


@pytest.mark.parametrize(("name", "ram"), [*((name, "both") for name in CONFIGS), ("rope", "memory"), ("rope", "disk")])
def test_streams_larger_than_the_pool_are_exact(name: str, ram: str, offload_dir: str) -> None:
    model, cache = build(CONFIGS[name]), offload_cache(offload_dir, offload_ram=RAM[ram])
    all_streams = streams(model.config)
    run = drive(model, cache, all_streams, budget=24)
    assert worst(model, all_streams, run) <= EXACT
    assert run.widest == 3 and run.mixed


@pytest.mark.parametrize("rotate", ["write", "read"])
@pytest.mark.parametrize("blocks", [8, 12])
def test_preempted_sequences_are_recomputed(rotate: str, blocks: int, offload_dir: str) -> None:
    model = build(model_config("rope-partial"))
    cache = offload_cache(offload_dir, rope_at=rotate, num_blocks=blocks, max_num_seqs=4)
    all_streams = streams(model.config)
    run = drive(model, cache, all_streams, budget=24)
    assert worst(model, all_streams, run) <= EXACT and run.preemptions > 0


@pytest.mark.parametrize(
    "formats", [("int8", "int8"), ("int4", "int8"), ("bfloat16", "bfloat16"), ("fp8-e4m3", "int4")]
)
def test_quantized_tokens_are_offloaded_unchanged(formats: tuple[str, str], offload_dir: str) -> None:
    """Compare with a reference whose keys and values are quantized too."""
    model, (keys, values) = build(model_config("rope")), formats
    cache = offload_cache(offload_dir, key_dtype=keys, value_dtype=values)
    all_streams = streams(model.config)
    assert worst(model, all_streams, drive(model, cache, all_streams, budget=24), formats=formats) <= EXACT


def test_some_layers_are_offloaded(offload_dir: str) -> None:
    model = build(model_config("rope", layers=4))
    for policy in (
        "0: full; offload(16, interval=8)",
        "0: window(9); 1: quest(90); offload(16, interval=8)",
        "0: offload(8, interval=4); offload(16, interval=8)",
    ):
        cache = offload_cache(offload_dir, overflow="preempt", max_seq_len=96, policy=policy, offload_ram=3000)
        all_streams = streams(model.config)
        assert worst(model, all_streams, drive(model, cache, all_streams, budget=24), cache=cache) <= EXACT


# ---------------------------------------------------------------- bugs


@pytest.mark.parametrize(
    "breaks", ["a tile left out", "tiles of another layer", "read too early", "zeros for what is lost"]
)
def test_a_bug_changes_the_logits(breaks: str, offload_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real_take, real_write, real_split = _ReadAhead.take, OffloadFile.write, OffloadReader._tiles
    if breaks == "a tile left out":
        monkeypatch.setattr(OffloadReader, "_tiles", lambda *given: list(real_split(*given))[1:])
    elif breaks == "tiles of another layer":
        monkeypatch.setattr(OffloadFile, "write", lambda self, layer, *rest: real_write(self, 1 - layer, *rest))
    elif breaks == "read too early":

        def take(self: _ReadAhead, layer: int, tile: Any) -> torch.Tensor:
            made = real_take(self, layer, tile)
            self._submit(self._in_flight[0][3])  # the buffer is given away before it was unpacked
            if len(self._in_flight) > 1:
                self._in_flight[-1][-1].result()
            return made

        monkeypatch.setattr(_ReadAhead, "take", take)
        monkeypatch.setattr(_ReadAhead, "done", lambda self: self._in_flight.popleft())
    else:
        monkeypatch.setattr(OffloadFile, "_read", lambda self, layer, first, into: into.fill(0) or {})
    model, all_streams = build(model_config()), streams(model_config())
    assert (
        worst(model, all_streams, drive(model, offload_cache(offload_dir, offload_ram=0), all_streams, budget=24))
        > 1e-3
    )


# ---------------------------------------------------------------- tokens, with a disk that fails

SAMPLING = SamplingParams(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True)
PROMPTS = [[3 * i % 67 for i in range(50)], [5, 6, 7], [(i * i) % 67 for i in range(61)]]
Results = dict[tuple[int, int], tuple[list[int], str | None, str | None]]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build(model_config("rope"))


@pytest.fixture(scope="module")
def expected(model: Transformer) -> Results:
    cache = CacheConfig(dtype="float64", block_size=4, max_num_seqs=3, max_seq_len=LIMIT, prefill_chunk_size=8)
    return generate(Engine(model, cache, EngineConfig(max_num_batched_tokens=24)))


def generate(
    engine: Engine, between: Callable[[Engine, int], None] = lambda *_: None, max_steps: int = 3000
) -> Results:
    """Return the tokens, finish reason and error of every prompt; ``between`` is called before each step."""
    results: Results = {}
    for prompt in PROMPTS:
        results[engine.add_request(prompt, SAMPLING), 0] = [], None, None
    step = 0
    while not engine.idle:
        between(engine, step)
        for chunk in engine.step():
            tokens, *_ = results[chunk.request, chunk.sample_index]
            tokens += [chunk.token_id] if chunk.token_id is not None else []
            results[chunk.request, chunk.sample_index] = tokens, chunk.finish_reason, chunk.error
        engine.scheduler.check()
        step += 1
        assert step < max_steps, "the engine does not become idle"
    engine.close()
    return results


def check_results(results: Results, expected: Results) -> int:
    """Compare tokens up to their end; return the number of sequences that ended with an error."""
    ended = 0
    for key, (tokens, finish, error) in results.items():
        expected_tokens = expected[key][0]
        if finish == "error":
            assert error is not None and error.startswith(f"the offloaded tokens of request {key[0]} cannot be read: ")
            assert tokens == expected_tokens[: len(tokens)]
            ended += 1
        else:
            assert (tokens, finish, error) == expected[key]
    return ended


def offload_files(engine: Engine) -> list[OffloadFile]:
    assert engine.kv_cache.offload_reader is not None
    return list(engine.kv_cache.offload_reader.offload_files.values())


@pytest.mark.parametrize("ram", RAM)
def test_tokens_equal_those_of_a_cache_that_holds_everything(
    model: Transformer, expected: Results, ram: str, offload_dir: str
) -> None:
    engine = offload_engine(model, offload_dir, offload_ram=RAM[ram])
    assert generate(engine) == expected
    assert engine.kv_cache.offload_reader is not None
    stats = engine.kv_cache.offload_reader.stats()
    assert stats.written and (stats.from_ram > 0) == (ram != "disk") and (stats.from_disk > 0) == (ram != "memory")
    assert (stats.folder is None) == (ram == "memory") and stats.failed == 0


def test_beams_share_offloaded_tokens(model: Transformer, offload_dir: str) -> None:
    sampling = SamplingParams(max_tokens=40, num_beams=3, n=3, temperature=0.0)
    results = []
    for cache in (
        CacheConfig(dtype="float64", block_size=4, max_num_seqs=3, max_seq_len=LIMIT, prefill_chunk_size=8),
        offload_cache(offload_dir, offload_ram=0),
    ):
        engine = Engine(model, cache, EngineConfig(max_num_batched_tokens=24))
        engine.add_request(PROMPTS[0], sampling)
        results.append([chunk for _ in range(400) for chunk in engine.step()])
        assert engine.idle
        engine.close()
    tokens = [[(chunk.sample_index, chunk.token_id, chunk.finish_reason) for chunk in chunks] for chunks in results]
    assert tokens[0] == tokens[1] and len(tokens[0]) > 100
    totals = [
        [chunk.cumulative_logprob for chunk in chunks if chunk.cumulative_logprob is not None] for chunks in results
    ]
    assert totals[0] == pytest.approx(totals[1], abs=1e-9)


@pytest.mark.parametrize(
    ("which", "code", "num_ks"),
    [(("write_at",), errno.ENOSPC, 3), (("write_at",), errno.EIO, 1), (("read",), errno.EIO, 3)],
)
def test_the_kth_operation_fails_for_every_k(
    model: Transformer, expected: Results, which: tuple[str, ...], code: int, num_ks: int, offload_dir: str
) -> None:
    """After a failed operation the sequence is recomputed, with the same output.

    ``num_ks``: number of first operations that fail, and of random ones; the last one is added.
    """
    counting = FailingDisk(which=which)
    generate(offload_engine(model, offload_dir, counting))
    assert counting.count > 20
    rng = random.Random(len(which[0]) + code)
    for k in sorted({*range(num_ks), counting.count - 1, *rng.sample(range(counting.count), num_ks)}):
        disk = FailingDisk(k, which=which, code=code)
        assert generate(offload_engine(model, offload_dir, disk)) == expected
        assert disk.failed == 1


@pytest.mark.long(minutes=15)
@pytest.mark.parametrize("which", [("write_at",), ("read",)])
def test_the_kth_operation_fails_for_every_single_k(
    model: Transformer, expected: Results, which: tuple[str, ...], offload_dir: str
) -> None:
    counting = FailingDisk(which=which)
    generate(offload_engine(model, offload_dir, counting))
    for k in range(counting.count):
        assert generate(offload_engine(model, offload_dir, FailingDisk(k, which=which))) == expected


@pytest.mark.parametrize("which", [("write_at",), ("read",)])
@pytest.mark.parametrize("ram", ["disk", "both"])
def test_a_disk_that_fails_permanently(
    model: Transformer, expected: Results, which: tuple[str, ...], ram: str, offload_dir: str
) -> None:
    """Sequences that do not fit into memory end with the reason; the short one is not affected."""
    for k in (0, 20):
        disk = FailingDisk(k, which=which, code=errno.ENOSPC, on=True)
        results = generate(offload_engine(model, offload_dir, disk, offload_ram=RAM[ram]))
        assert check_results(results, expected) in (1, 2) and disk.failed
        assert results[1, 0] == expected[1, 0], "the short one continues"


def test_with_room_in_memory_no_sequence_needs_the_disk(
    model: Transformer, expected: Results, offload_dir: str
) -> None:
    """The memory is full when the disk fails, but it is free again when sequences are recomputed."""
    cache = offload_cache(offload_dir, offload_ram=40_000)
    disk = FailingDisk(3, which=("write_at",), on=True)
    results = generate(Engine(model, cache, EngineConfig(max_num_batched_tokens=24, fs=disk)))
    assert disk.failed and check_results(results, expected) < 2


def damage(kind: str, at: int, engine: Engine) -> None:
    for offload_file in offload_files(engine):
        for path in offload_file.paths:
            if at < path.stat().st_size:
                if kind == "cut":
                    os.truncate(path, at)
                    continue
                with path.open("r+b") as file:
                    file.seek(at)
                    was = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([was ^ 0x40]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["flip", "cut"])
@pytest.mark.parametrize("times", ["once", "always"])
def test_damage_between_steps_is_detected(
    model: Transformer, expected: Results, kind: str, times: str, offload_dir: str
) -> None:
    """Damage random places of the files, at random steps."""
    engine = offload_engine(model, offload_dir, offload_ram=0)
    sizes: list[int] = []
    generate(engine, lambda engine, step: sizes.append(offload_files(engine)[0].paths[0].stat().st_size))
    found, rng = 0, random.Random(7)
    places = range(0, max(sizes), 64)
    for at in rng.sample(places, 5):
        first = next(step for step, size in enumerate(sizes) if size > at)
        when = rng.randrange(first, len(sizes))

        def between(engine: Engine, step: int, at: int = at, when: int = when) -> None:
            if step == when or (times == "always" and step > when):
                damage(kind, at, engine)

        engine = offload_engine(model, offload_dir, offload_ram=0)
        ended = check_results(generate(engine, between), expected)
        assert times == "always" or not ended
        found += engine.kv_cache.offload_reader is not None and engine.kv_cache.offload_reader.stats().failed > 0
    assert found > 2, "no damaged byte was read"


@pytest.mark.long(minutes=15)
@pytest.mark.parametrize("kind", ["flip", "cut"])
def test_damage_at_every_sixty_four_bytes(model: Transformer, expected: Results, kind: str, offload_dir: str) -> None:
    for at in range(0, 20_000, 64):
        engine = offload_engine(model, offload_dir, offload_ram=0)
        assert not check_results(generate(engine, lambda e, step, at=at: step == 30 and damage(kind, at, e)), expected)


def test_without_checksums_damage_changes_the_tokens(
    model: Transformer, expected: Results, offload_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above detects wrong tokens."""
    monkeypatch.setattr("kvad.cache.offload.token_offload.zlib.crc32", lambda data: 0)
    engine = offload_engine(model, offload_dir, offload_ram=0)
    results = generate(
        engine, lambda engine, step: [damage("flip", at, engine) for at in range(7, 20_000, 8) if step == 20]
    )
    with pytest.raises(AssertionError):
        check_results(results, expected)


# ---------------------------------------------------------------- folders and options


def test_the_next_start_removes_files_of_a_killed_process(offload_dir: str) -> None:
    script = (
        "import os, signal, sys\n"
        "from tests.engine.test_token_offload import *\n"
        "cache = offload_cache(sys.argv[1], offload_ram=0)\n"
        "engine = Engine(build(model_config('rope')), cache, EngineConfig(max_num_batched_tokens=24))\n"
        "generate(engine, lambda e, step: os.kill(os.getpid(), signal.SIGKILL) if step == 30 else None)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, offload_dir], check=False, timeout=120).returncode == -9
    left = list(Path(offload_dir).iterdir())
    assert left and any(path.stat().st_size for path in left)
    engine = Engine(build(model_config("rope")), offload_cache(offload_dir, offload_ram=0))
    assert not set(left) & set(Path(offload_dir).iterdir())
    engine.close()


def test_an_unwritable_folder_is_rejected_at_the_start(model: Transformer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"offload_dir: cannot write to .*file: .* \(Give another folder: --offload-dir\.\)"
    ):
        Engine(model, offload_cache(str(tmp_path / "file"), offload_ram=0))
    engine = Engine(model, offload_cache(str(tmp_path / "file"), offload_ram=1 << 30))  # it needs no file
    engine.close()


def test_unsupported_options_are_rejected() -> None:
    config = model_config("rope")
    for fields, message in (
        ({"max_seq_len": LIMIT}, "max_seq_len must be below the model's limit of 96 tokens"),
        ({"layout": "contiguous"}, "tokens are offloaded in whole blocks (Use cache.layout='paged')"),
        ({"max_seq_len": 7}, "max_seq_len 7 is less than two blocks of 4"),
        ({"policy": "sinks(4, 20)"}, "policy sinks(4, 20) is given too"),
        ({"key_dtype": "int8-channel", "dtype": "float32"}, "packs whole blocks once"),
    ):
        with pytest.raises(ConfigError) as error:
            build_groups(attention_specs(config), resolve_for_model(config, offload_cache("", **fields)))
        assert message in str(error.value)
    with pytest.raises(ConfigError, match=r"recent must be a multiple of the block size 4, got 6 \(Use recent=8\)"):
        build_groups(attention_specs(config), offload_cache("", overflow="preempt", policy="offload(6, interval=8)"))
    with pytest.raises(ConfigError, match=r"offload\(8, .*\) and key-norm\(8, .*\) cannot be combined"):
        build_groups(
            attention_specs(config),
            offload_cache("", overflow="preempt", policy="0: key-norm(8, interval=4); offload(8, interval=8)"),
        )
    with pytest.raises(ConfigError, match="an encoder has no cache"):
        resolve_for_model(encoder_config(), offload_cache(""))


def test_a_request_may_stop_at_the_cache_s_limit(model: Transformer, offload_dir: str) -> None:
    engine = Engine(model, offload_cache(offload_dir))
    sampling = replace(SAMPLING, max_tokens=None, overflow="stop")
    engine.add_request(PROMPTS[1], sampling)
    chunks = [chunk for _ in range(200) for chunk in engine.step()]
    assert sum(chunk.token_id is not None for chunk in chunks) == 29 and chunks[-1].limit == "cache"
    engine.close()
    plain = Engine(model, CacheConfig(dtype="float64", max_num_seqs=1, max_seq_len=32))
    with pytest.raises(RequestError, match="must be configured when the cache is created"):
        plain.add_request([1], replace(SAMPLING, overflow="offload"))


def test_offloaded_sequences_share_no_prefix(model: Transformer, expected: Results, offload_dir: str) -> None:
    engine = offload_engine(model, offload_dir)
    for _ in range(2):
        request = engine.add_request(PROMPTS[0], SAMPLING)
        tokens = [chunk.token_id for _ in range(80) for chunk in engine.step()]
        assert tokens == expected[0, 0][0] and engine.metrics(request).num_cached_tokens == 0
    engine.close()


# ---------------------------------------------------------------- random operations


class UnreliableDisk(FileSystem):
    """Fails, or changes a bit that it reads, the given number of times."""

    def __init__(self) -> None:
        self.fail_writes = self.fail_reads = self.flips = 0

    def write_at(self, file: int, data: Any, offset: int) -> None:
        if self.fail_writes:
            self.fail_writes -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write_at(file, data, offset)

    def read(self, file: int, into: Any, offset: int) -> int:
        if self.fail_reads:
            self.fail_reads -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        got = super().read(file, into, offset)
        if self.flips:
            self.flips -= 1
            memoryview(into).cast("B")[got // 2] ^= 1
        return got


class OffloadMachine(RuleBasedStateMachine):
    """Requests arrive, are aborted and preempted while the disk fails; tokens equal those of solo runs."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.solos = build(model_config("rope")), dict[tuple[int, int], list[int]]()
        self.prompts: dict[int, tuple[int, int]] = {}
        self.results: dict[tuple[int, int], list[int]] = {}
        self.disk = UnreliableDisk()

    @initialize(ram=st.sampled_from(sorted(RAM.values())), blocks=st.sampled_from([8, 10, 24]))
    def start(self, ram: int, blocks: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        cache = offload_cache(self.folder.name, offload_ram=ram, num_blocks=blocks)
        self.engine = Engine(self.model, cache, EngineConfig(max_num_batched_tokens=20, fs=self.disk))

    def solo_tokens(self, stem: int, length: int) -> list[int]:
        if (stem, length) not in self.solos:
            engine = Engine(self.model, CacheConfig(dtype="float64", block_size=4, max_num_seqs=1, max_seq_len=LIMIT))
            engine.add_request(self.prompt(stem, length), SAMPLING)
            self.solos[stem, length] = [p.token_id for _ in range(60) for p in engine.step() if p.token_id is not None]
        return self.solos[stem, length]

    def prompt(self, stem: int, length: int) -> list[int]:
        return [(stem + 3) * i * i % 67 for i in range(length)]

    @rule(stem=st.integers(0, 1), length=st.sampled_from([2, 30, 45, 64]))
    def submit(self, stem: int, length: int) -> None:
        if len(self.prompts) < 6:
            self.prompts[self.engine.add_request(self.prompt(stem, length), SAMPLING)] = stem, length

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for chunk in self.engine.step():
                if chunk.request not in self.prompts:
                    continue
                results = self.results.setdefault((chunk.request, 0), [])
                results += [chunk.token_id] if chunk.token_id is not None else []
                expected_tokens = self.solo_tokens(*self.prompts[chunk.request])
                assert results == expected_tokens[: len(results)]
                if chunk.finish_reason == "error":
                    assert chunk.error is not None and "cannot be read" in chunk.error
                elif chunk.finish_reason is not None:
                    assert results == expected_tokens

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.prompts)))
        self.engine.abort_request(number)
        del self.prompts[number]

    @precondition(lambda self: self.engine.scheduler._running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.engine.scheduler._preempt(data.draw(st.sampled_from(self.engine.scheduler._running)))

    @rule(kind=st.sampled_from(["fail_writes", "fail_reads", "flips"]), times=st.integers(1, 3))
    def break_disk(self, kind: str, times: int) -> None:
        setattr(self.disk, kind, times)

    @invariant()
    def is_consistent(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.step(40)
            self.engine.close()
            assert not list(Path(self.folder.name).iterdir()), "files are left"
            self.folder.cleanup()


class TestOffloadMachine(OffloadMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(MACHINE, max_examples=12, stateful_step_count=25)


@pytest.mark.long(minutes=20)
class TestOffloadMachineLong(OffloadMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(MACHINE, max_examples=400, stateful_step_count=50, derandomize=False)


def test_the_default_file_system_is_the_real_one(model: Transformer, offload_dir: str) -> None:
    engine = Engine(model, offload_cache(offload_dir, offload_ram=0))
    assert all(file.fs is REAL_FILE_SYSTEM for file in offload_files(engine))
    engine.close()
