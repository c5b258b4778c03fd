"""A stream that is larger than the pool says what it says in memory, whatever the disk does, or ends with why not.

Exactness is judged in float64 against Fresh.  Under faults the judge is an engine whose cache holds everything: tokens
are sampled, so that a number that is off shows.  Single disk operations are tested in
``tests/cache/offload/test_token_offload.py``.
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
from tests.engine.scheduling.test_streams import MACHINE
from tests.support.driver import Stream, drive, worst
from tests.support.faulty_filesystems import FailingDisk
from tests.support.random_models import LIMIT, POSITIONS, build, encoder_config, model_config, pair_config

EXACT = 1e-10
RAM = {"memory": 1 << 30, "disk": 0, "both": 12_000}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a row is read in several."""
    monkeypatch.setattr(token_offload, "TILE", 5000)


@pytest.fixture
def where(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "spill"
    yield str(folder)
    assert not folder.exists() or not list(folder.iterdir()), "files are left"


def spilling(where: str, **fields: Any) -> CacheConfig:
    given = {
        "dtype": "float64",
        "block_size": 4,
        "max_num_seqs": 3,
        "max_seq_len": 32,
        "prefill_chunk_size": 8,
        "max_source_len": 20,
    }
    given |= {"overflow": "offload", "offload_dir": where, "offload_ram": 12_000}
    return CacheConfig(**(given | fields))


def streams(config: ModelConfig) -> list[Stream]:
    """Rows that spill, one that does not, two samples; all longer than one tile."""
    rng = random.Random(4)

    def ids(count: int) -> list[int]:
        return [rng.randrange(67) for _ in range(count)]

    made = [Stream(ids(50), [ids(40)]), Stream(ids(3), [ids(80)], 2), Stream(ids(40), [ids(20), ids(20)], 3)]
    made.append(Stream(ids(5), [ids(10)], 5))
    if config.encoder_input is None:
        return made
    return [replace(stream, source=[rng.randrange(40) for _ in range(9 + 2 * at)]) for at, stream in enumerate(made)]


CONFIGS = {
    **{position: model_config(position) for position in POSITIONS},
    **{f"{position}, pair": pair_config(position) for position in ("none", "learned", "rope", "alibi", "t5")},
    **{heads: model_config("rope", heads=heads) for heads in ("mqa", "value-dim", "softcap", "sinks", "window-mix")},
    "value-dim, alibi": model_config("alibi", heads="value-dim"),
}


@pytest.mark.parametrize(("name", "ram"), [*((name, "both") for name in CONFIGS), ("rope", "memory"), ("rope", "disk")])
def test_streams_larger_than_the_pool_are_exact(name: str, ram: str, where: str) -> None:
    model, cache = build(CONFIGS[name]), spilling(where, offload_ram=RAM[ram])
    every = streams(model.config)
    run = drive(model, cache, every, budget=24)
    assert worst(model, every, run) <= EXACT
    assert run.widest == 3 and run.mixed


@pytest.mark.parametrize("rotate", ["write", "read"])
@pytest.mark.parametrize("blocks", [8, 12])
def test_preempted_rows_are_computed_again(rotate: str, blocks: int, where: str) -> None:
    model = build(model_config("rope-partial"))
    cache = spilling(where, rope_at=rotate, num_blocks=blocks, max_num_seqs=4)
    every = streams(model.config)
    run = drive(model, cache, every, budget=24)
    assert worst(model, every, run) <= EXACT and run.preemptions > 0


@pytest.mark.parametrize(
    "formats", [("int8", "int8"), ("int4", "int8"), ("bfloat16", "bfloat16"), ("fp8-e4m3", "int4")]
)
def test_formats_are_spilled_as_they_are(formats: tuple[str, str], where: str) -> None:
    """As the judge whose keys and values go through them."""
    model, (keys, values) = build(model_config("rope")), formats
    cache = spilling(where, key_dtype=keys, value_dtype=values)
    every = streams(model.config)
    assert worst(model, every, drive(model, cache, every, budget=24), formats=formats) <= EXACT


def test_layers_spill_beside_others(where: str) -> None:
    model = build(model_config("rope", layers=4))
    for policy in (
        "0: full; offload(16, interval=8)",
        "0: window(9); 1: quest(90); offload(16, interval=8)",
        "0: offload(8, interval=4); offload(16, interval=8)",
    ):
        cache = spilling(where, overflow="preempt", max_seq_len=96, policy=policy, offload_ram=3000)
        every = streams(model.config)
        assert worst(model, every, drive(model, cache, every, budget=24), cache=cache) <= EXACT


# ---------------------------------------------------------------- what the oracle objects to


@pytest.mark.parametrize(
    "breaks", ["a tile left out", "tiles of another layer", "read too early", "zeros for what is lost"]
)
def test_broken_on_purpose_it_is_heard(breaks: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    model, every = build(model_config()), streams(model_config())
    assert worst(model, every, drive(model, spilling(where, offload_ram=0), every, budget=24)) > 1e-3


# ---------------------------------------------------------------- engines, by their tokens

ASKED = SamplingParams(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True)
PROMPTS = [[3 * i % 67 for i in range(50)], [5, 6, 7], [(i * i) % 67 for i in range(61)]]
Said = dict[tuple[int, int], tuple[list[int], str | None, str | None]]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build(model_config("rope"))


@pytest.fixture(scope="module")
def right(model: Transformer) -> Said:
    cache = CacheConfig(dtype="float64", block_size=4, max_num_seqs=3, max_seq_len=LIMIT, prefill_chunk_size=8)
    return talk(Engine(model, cache, EngineConfig(max_num_batched_tokens=24)))


def talk(engine: Engine, between: Callable[[Engine, int], None] = lambda *_: None, most: int = 3000) -> Said:
    """Every prompt's tokens, how it ended, and why; ``between`` two steps something happens."""
    said: Said = {}
    for prompt in PROMPTS:
        said[engine.add_request(prompt, ASKED), 0] = [], None, None
    step = 0
    while not engine.idle:
        between(engine, step)
        for piece in engine.step():
            tokens, *_ = said[piece.request, piece.sample_index]
            tokens += [piece.token_id] if piece.token_id is not None else []
            said[piece.request, piece.sample_index] = tokens, piece.finish_reason, piece.error
        engine.scheduler.check()
        step += 1
        assert step < most, "it does not end"
    engine.close()
    return said


def right_or_told(said: Said, right: Said) -> int:
    """Tokens are right as far as they go; what did not come to its end says why.  -> how many did not."""
    ended = 0
    for key, (tokens, finish, error) in said.items():
        whole = right[key][0]
        if finish == "error":
            assert error is not None and error.startswith(f"the offloaded tokens of request {key[0]} cannot be read: ")
            assert tokens == whole[: len(tokens)]
            ended += 1
        else:
            assert (tokens, finish, error) == right[key]
    return ended


def spills(engine: Engine) -> list[OffloadFile]:
    assert engine.kv_cache.offload_reader is not None
    return list(engine.kv_cache.offload_reader.offload_files.values())


@pytest.mark.parametrize("ram", RAM)
def test_tokens_are_those_of_a_cache_that_holds_everything(
    model: Transformer, right: Said, ram: str, where: str
) -> None:
    engine = Engine(model, spilling(where, offload_ram=RAM[ram]), EngineConfig(max_num_batched_tokens=24))
    assert talk(engine) == right
    assert engine.kv_cache.offload_reader is not None
    stats = engine.kv_cache.offload_reader.stats()
    assert stats.written and (stats.from_ram > 0) == (ram != "disk") and (stats.from_disk > 0) == (ram != "memory")
    assert (stats.folder is None) == (ram == "memory") and stats.failed == 0


def test_beams_fork_what_is_spilled(model: Transformer, where: str) -> None:
    asked = SamplingParams(max_tokens=40, num_beams=3, n=3, temperature=0.0)
    said = []
    for cache in (
        CacheConfig(dtype="float64", block_size=4, max_num_seqs=3, max_seq_len=LIMIT, prefill_chunk_size=8),
        spilling(where, offload_ram=0),
    ):
        engine = Engine(model, cache, EngineConfig(max_num_batched_tokens=24))
        engine.add_request(PROMPTS[0], asked)
        said.append([piece for _ in range(400) for piece in engine.step()])
        assert engine.idle
        engine.close()
    tokens = [[(piece.sample_index, piece.token_id, piece.finish_reason) for piece in pieces] for pieces in said]
    assert tokens[0] == tokens[1] and len(tokens[0]) > 100
    totals = [[piece.cumulative_logprob for piece in pieces if piece.cumulative_logprob is not None] for pieces in said]
    assert totals[0] == pytest.approx(totals[1], abs=1e-9)


@pytest.mark.parametrize("which", [("write_at",), ("read",)])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_the_kth_operation_fails_for_every_k(
    model: Transformer, right: Said, which: tuple[str, ...], code: int, where: str
) -> None:
    """One that fails costs the row's computing again, and nothing else."""
    counting = FailingDisk(which=which)
    talk(Engine(model, spilling(where), EngineConfig(max_num_batched_tokens=24, fs=counting)))
    assert counting.count > 20
    rng = random.Random(len(which[0]) + code)
    for k in sorted({0, 1, 2, counting.count - 1, *rng.sample(range(counting.count), 3)}):
        disk = FailingDisk(k, which=which, code=code)
        assert talk(Engine(model, spilling(where), EngineConfig(max_num_batched_tokens=24, fs=disk))) == right
        assert disk.failed == 1


@pytest.mark.long(minutes=15)
@pytest.mark.parametrize("which", [("write_at",), ("read",)])
def test_the_kth_operation_fails_for_every_single_k(
    model: Transformer, right: Said, which: tuple[str, ...], where: str
) -> None:
    counting = FailingDisk(which=which)
    talk(Engine(model, spilling(where), EngineConfig(max_num_batched_tokens=24, fs=counting)))
    for k in range(counting.count):
        assert (
            talk(
                Engine(model, spilling(where), EngineConfig(max_num_batched_tokens=24, fs=FailingDisk(k, which=which)))
            )
            == right
        )


@pytest.mark.parametrize("which", [("write_at",), ("read",)])
@pytest.mark.parametrize("ram", ["disk", "both"])
def test_a_disk_that_is_gone_for_good(
    model: Transformer, right: Said, which: tuple[str, ...], ram: str, where: str
) -> None:
    """What does not fit into memory ends with the reason; a row that spills little, or nothing, says all it has to."""
    for k in (0, 5, 20):
        disk = FailingDisk(k, which=which, code=errno.ENOSPC, on=True)
        said = talk(
            Engine(model, spilling(where, offload_ram=RAM[ram]), EngineConfig(max_num_batched_tokens=24, fs=disk))
        )
        assert right_or_told(said, right) in (1, 2) and disk.failed
        assert said[1, 0] == right[1, 0], "the short one goes on"


def test_with_room_in_memory_nothing_needs_the_disk(model: Transformer, right: Said, where: str) -> None:
    """All memory is given out when the disk fails; by the time rows come back others have left."""
    cache = spilling(where, offload_ram=40_000)
    disk = FailingDisk(3, which=("write_at",), on=True)
    said = talk(Engine(model, cache, EngineConfig(max_num_batched_tokens=24, fs=disk)))
    assert disk.failed and right_or_told(said, right) < 2


def damage(kind: str, at: int, engine: Engine) -> None:
    for spool in spills(engine):
        for path in spool.paths:
            if at < path.stat().st_size:
                if kind == "cut":
                    os.truncate(path, at)
                    continue
                with path.open("r+b") as file:
                    file.seek(at)
                    was = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([was ^ 0x40]))


@pytest.mark.parametrize("kind", ["flip", "cut"])
@pytest.mark.parametrize("times", ["once", "always"])
def test_damage_between_steps_is_found(model: Transformer, right: Said, kind: str, times: str, where: str) -> None:
    """At places 64 bytes apart over the whole of the files, at steps of all ages."""
    engine = Engine(model, spilling(where, offload_ram=0), EngineConfig(max_num_batched_tokens=24))
    sizes: list[int] = []
    talk(engine, lambda engine, step: sizes.append(spills(engine)[0].paths[0].stat().st_size))
    found, rng = 0, random.Random(7)
    places = range(0, max(sizes), 64)
    for at in rng.sample(places, 5):
        first = next(step for step, size in enumerate(sizes) if size > at)
        when = rng.randrange(first, len(sizes))

        def between(engine: Engine, step: int, at: int = at, when: int = when) -> None:
            if step == when or (times == "always" and step > when):
                damage(kind, at, engine)

        engine = Engine(model, spilling(where, offload_ram=0), EngineConfig(max_num_batched_tokens=24))
        ended = right_or_told(talk(engine, between), right)
        assert times == "always" or not ended
        found += engine.kv_cache.offload_reader is not None and engine.kv_cache.offload_reader.stats().failed > 0
    assert found > 2, "nothing of it was read"


@pytest.mark.long(minutes=15)
@pytest.mark.parametrize("kind", ["flip", "cut"])
def test_damage_at_every_sixty_four_bytes(model: Transformer, right: Said, kind: str, where: str) -> None:
    for at in range(0, 20_000, 64):
        engine = Engine(model, spilling(where, offload_ram=0), EngineConfig(max_num_batched_tokens=24))
        assert not right_or_told(talk(engine, lambda e, step, at=at: step == 30 and damage(kind, at, e)), right)


def test_what_is_damaged_without_checksums_is_heard(
    model: Transformer, right: Said, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proof that the tests above would notice."""
    monkeypatch.setattr("kvad.cache.offload.token_offload.zlib.crc32", lambda data: 0)
    engine = Engine(model, spilling(where, offload_ram=0), EngineConfig(max_num_batched_tokens=24))
    said = talk(engine, lambda engine, step: [damage("flip", at, engine) for at in range(7, 20_000, 8) if step == 20])
    with pytest.raises(AssertionError):
        right_or_told(said, right)


# ---------------------------------------------------------------- what is not there, and what stays


def test_a_killed_process_leaves_nothing_that_the_next_start_does_not_sweep(where: str) -> None:
    script = (
        "import os, signal, sys\n"
        "from tests.engine.test_token_offload import *\n"
        "cache = spilling(sys.argv[1], offload_ram=0)\n"
        "engine = Engine(build(model_config('rope')), cache, EngineConfig(max_num_batched_tokens=24))\n"
        "talk(engine, lambda e, step: os.kill(os.getpid(), signal.SIGKILL) if step == 30 else None)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, where], check=False).returncode == -9
    left = list(Path(where).iterdir())
    assert left and any(path.stat().st_size for path in left)
    engine = Engine(build(model_config("rope")), spilling(where, offload_ram=0))
    assert not set(left) & set(Path(where).iterdir())
    engine.close()


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(model: Transformer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"offload_dir: cannot write to .*file: .* \(Give another folder: --offload-dir\.\)"
    ):
        Engine(model, spilling(str(tmp_path / "file"), offload_ram=0))
    engine = Engine(model, spilling(str(tmp_path / "file"), offload_ram=1 << 30))  # it needs none
    engine.close()


def laid_out(config: ModelConfig, cache: CacheConfig) -> None:
    build_groups(attention_specs(config), resolve_for_model(config, cache))


def test_what_cannot_spill_is_refused_with_the_reason() -> None:
    config = model_config("rope")
    for fields, said in (
        ({"max_seq_len": LIMIT}, "max_seq_len must be below the model's limit of 96 tokens"),
        ({"layout": "contiguous"}, "tokens are offloaded in whole blocks (Use cache.layout='paged')"),
        ({"max_seq_len": 7}, "max_seq_len 7 is less than two blocks of 4"),
        ({"policy": "sinks(4, 20)"}, "policy sinks(4, 20) is given too"),
        ({"key_dtype": "int8-channel", "dtype": "float32"}, "packs whole blocks once"),
    ):
        with pytest.raises(ConfigError) as error:
            laid_out(config, spilling("", **fields))
        assert said in str(error.value)
    with pytest.raises(ConfigError, match=r"recent must be a multiple of the block size 4, got 6 \(Use recent=8\)"):
        build_groups(attention_specs(config), spilling("", overflow="preempt", policy="offload(6, interval=8)"))
    with pytest.raises(ConfigError, match=r"offload\(8, .*\) and key-norm\(8, .*\) cannot be combined"):
        build_groups(
            attention_specs(config),
            spilling("", overflow="preempt", policy="0: key-norm(8, interval=4); offload(8, interval=8)"),
        )
    with pytest.raises(ConfigError, match="an encoder has no cache"):
        resolve_for_model(encoder_config(), spilling(""))


def test_a_request_may_end_where_the_pool_does(model: Transformer, where: str) -> None:
    engine = Engine(model, spilling(where))
    asked = replace(ASKED, max_tokens=None, overflow="stop")
    engine.add_request(PROMPTS[1], asked)
    pieces = [piece for _ in range(200) for piece in engine.step()]
    assert sum(piece.token_id is not None for piece in pieces) == 29 and pieces[-1].limit == "cache"
    engine.close()
    plain = Engine(model, CacheConfig(dtype="float64", max_num_seqs=1, max_seq_len=32))
    with pytest.raises(RequestError, match="must be configured when the cache is created"):
        plain.add_request([1], replace(ASKED, overflow="offload"))


def test_a_row_that_spills_shares_no_prefix(model: Transformer, right: Said, where: str) -> None:
    engine = Engine(model, spilling(where), EngineConfig(max_num_batched_tokens=24))
    for _ in range(2):
        request = engine.add_request(PROMPTS[0], ASKED)
        tokens = [piece.token_id for _ in range(80) for piece in engine.step()]
        assert tokens == right[0, 0][0] and engine.metrics(request).num_cached_tokens == 0
    engine.close()


# ---------------------------------------------------------------- all of it at once


class Unreliable(FileSystem):
    """Fails, or changes a bit of what it reads, when it is told to."""

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


class SpillMachine(RuleBasedStateMachine):
    """Requests come, are cancelled and preempted while the disk fails: what they say is what they say alone."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.solos = build(model_config("rope")), dict[tuple[int, int], list[int]]()
        self.prompts: dict[int, tuple[int, int]] = {}
        self.said: dict[tuple[int, int], list[int]] = {}
        self.disk = Unreliable()

    @initialize(ram=st.sampled_from(sorted(RAM.values())), blocks=st.sampled_from([8, 10, 24]))
    def start(self, ram: int, blocks: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        cache = spilling(self.folder.name, offload_ram=ram, num_blocks=blocks)
        self.engine = Engine(self.model, cache, EngineConfig(max_num_batched_tokens=20, fs=self.disk))

    def alone(self, stem: int, length: int) -> list[int]:
        if (stem, length) not in self.solos:
            engine = Engine(self.model, CacheConfig(dtype="float64", block_size=4, max_num_seqs=1, max_seq_len=LIMIT))
            engine.add_request(self.prompt(stem, length), ASKED)
            self.solos[stem, length] = [p.token_id for _ in range(60) for p in engine.step() if p.token_id is not None]
        return self.solos[stem, length]

    def prompt(self, stem: int, length: int) -> list[int]:
        return [(stem + 3) * i * i % 67 for i in range(length)]

    @rule(stem=st.integers(0, 1), length=st.sampled_from([2, 30, 45, 64]))
    def submit(self, stem: int, length: int) -> None:
        if len(self.prompts) < 6:
            self.prompts[self.engine.add_request(self.prompt(stem, length), ASKED)] = stem, length

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for piece in self.engine.step():
                if piece.request not in self.prompts:
                    continue
                said = self.said.setdefault((piece.request, 0), [])
                said += [piece.token_id] if piece.token_id is not None else []
                whole = self.alone(*self.prompts[piece.request])
                assert said == whole[: len(said)]
                if piece.finish_reason == "error":
                    assert piece.error is not None and "cannot be read" in piece.error
                elif piece.finish_reason is not None:
                    assert said == whole

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
    def trouble(self, kind: str, times: int) -> None:
        setattr(self.disk, kind, times)

    @invariant()
    def law(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.step(40)
            self.engine.close()
            assert not list(Path(self.folder.name).iterdir()), "files are left"
            self.folder.cleanup()


class TestSpillMachine(SpillMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(MACHINE, max_examples=12, stateful_step_count=25)


@pytest.mark.long(minutes=20)
class TestSpillMachineLong(SpillMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(MACHINE, max_examples=400, stateful_step_count=50, derandomize=False)


def test_the_real_disk_is_what_an_engine_has(model: Transformer, where: str) -> None:
    engine = Engine(model, spilling(where, offload_ram=0))
    assert all(spool.fs is REAL_FILE_SYSTEM for spool in spills(engine))
    engine.close()
