"""Preemption in a real engine: sequences are swapped to memory or disk and back, bit for bit in float64.

The output never depends on the kind of preemption. If a disk fails or changes data, an exact sequence is recomputed, a
lossy one ends with an error that names the reason, and others are not affected. Freed blocks are filled with NaN.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.cache.device.host_copy import HostCopier, from_sections, to_sections
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.offload.swap_space import SwapSpace
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling.preemption import SwapCostModel
from kvad.engine.scheduling.request import SamplingParams
from kvad.errors import ConfigError
from kvad.model.transformer import Transformer
from kvad.storage.filesystem import REAL_FILE_SYSTEM, FileSystem
from kvad.storage.temp_paths import list_temp_paths
from tests.cache.test_position_policies import apart, text
from tests.support.driver import Run, Stream, drive, fill_unowned
from tests.support.faulty_filesystems import FailingDisk
from tests.support.random_models import build, model_config, pair_config
from tests.support.slow_swap_files import spoil

EXACT = 1e-10
STREAMS = [Stream(text(30), [text(20, 1)]), Stream(text(3, 2), [text(40, 3)]), Stream(text(41, 4), [text(20, 5)])]
LOSSY = ("0: full; heavy-hitters(10, interval=4)", "0: full; tiered(8, quantized=8, interval=4, summaries=4, ratio=2)")
KINDS = {
    "full": {},
    "windows": {"heads": "window-mix"},
    "quest": {"policy": "quest(16)"},
    "sinks": {"policy": "0: full; sinks(3, 9)"},
    "contiguous": {"layout": "contiguous", "max_num_seqs": 2, "num_blocks": None},
    "int8": {"dtype": "int8"},
    "heavy-hitters": {"policy": LOSSY[0]},
    "tiered": {"policy": LOSSY[1]},
    "packed": {"policy": "0: full; tiered(8, interval=8)"},
}


class FixedChoice(SwapCostModel):
    def __init__(self, swap: bool) -> None:
        super().__init__()
        self.swaps = swap

    def swap_is_cheaper(self, nbytes: int, tokens: int, *, disk: bool = False, back: bool = False) -> bool:
        return self.swaps


def cache_of(**change: object) -> CacheConfig:
    given = {
        "dtype": "float64",
        "block_size": 4,
        "max_num_seqs": 3,
        "max_seq_len": 96,
        "num_blocks": 23,
        "prefill_chunk_size": 16,
    } | change
    return CacheConfig(**given)  # type: ignore[arg-type]


def setting(kind: str, **change: object) -> tuple[Transformer, CacheConfig]:
    fields = dict(KINDS[kind])
    model = build(model_config("rope", "pre", str(fields.pop("heads", "gqa"))))
    return model, cache_of(**fields, **change)


def run_of(kind: str, way: str, folder: Path) -> tuple[Run, float]:
    """A run in company, and max |dlogit| between each stream of it and the same stream alone."""
    ram = {"computed": None, "memory": 1 << 30, "disk": 0}[way]
    model, cache = setting(kind, swap_space=ram)
    options = {"swap_dir": folder} if way == "disk" else {}
    run = drive(model, cache, STREAMS, cost_model=FixedChoice(way != "computed"), **options)
    largest = 0.0
    for number, stream in enumerate(STREAMS):
        alone = drive(model, setting(kind, max_num_seqs=1)[1], [stream])
        largest = max(largest, apart(alone, run, number, 0))
    return run, largest


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", ["computed", "memory", "disk"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "contiguous"])
def test_a_preempted_sequence_equals_its_solo_run(kind: str, way: str, tmp_path: Path) -> None:
    run, largest = run_of(kind, way, tmp_path)
    stats = run.swaps
    assert run.preemptions > 0 and largest <= EXACT
    if way == "computed" and kind not in ("heavy-hitters", "tiered", "packed"):
        assert stats.recomputed == run.preemptions and not stats.to_ram
    else:
        assert stats.to_disk == (run.preemptions if way == "disk" else 0) and stats.recomputed == 0
        assert stats.to_ram + stats.to_disk == run.preemptions
    assert (stats.swap_space.read > 0) == (way == "disk") and stats.num_lost == 0
    assert not list_temp_paths(tmp_path)


class LateStream:
    """Stands in for a GPU's stream: copies are made, in their order, when one of them is waited for."""

    def __init__(self, room: bool = True) -> None:
        self.room, self.num_runs = room, 0
        self._late: list[Callable[[], None]] = []
        self._lock = Lock()

    def run(self, copy: Callable[[], None], tensors: Sequence[torch.Tensor]) -> LateCopies:
        self.num_runs += 1
        with self._lock:
            self._late.append(copy)
        return LateCopies(self, copy)

    def before_next_step(self, completion: LateCopies) -> None:
        completion.synchronize()

    def has_room(self, nbytes: int) -> bool:
        return self.room

    def run_up_to(self, copy: Callable[[], None]) -> None:
        with self._lock, torch.inference_mode():
            while copy in self._late:
                self._late.pop(0)()

    def is_complete(self, copy: Callable[[], None]) -> bool:
        return copy not in self._late


class LateCopies(NamedTuple):
    stream: LateStream
    copy: Callable[[], None]

    def is_complete(self) -> bool:
        return self.stream.is_complete(self.copy)

    def synchronize(self) -> None:
        self.stream.run_up_to(self.copy)

    def seconds(self) -> float:
        return 1e-3


@pytest.fixture
def late_streams(monkeypatch: pytest.MonkeyPatch) -> list[LateStream]:
    """The streams of the engines that are built from here on."""
    streams, init = list[LateStream](), HostCopier.__init__

    def with_stream(copier: HostCopier, device: torch.device) -> None:
        init(copier, device)
        copier.stream = LateStream()
        streams.append(copier.stream)

    monkeypatch.setattr(HostCopier, "__init__", with_stream)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    return streams


@pytest.mark.parametrize("room", [True, False], ids=["beside", "in the steps' stream"])
@pytest.mark.parametrize("way", ["memory", "disk"])
@pytest.mark.parametrize("kind", ["full", "int8", "tiered"])
def test_copies_that_are_late_change_nothing(
    kind: str, way: str, room: bool, tmp_path: Path, late_streams: list[LateStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LateStream, "has_room", lambda self, nbytes: room)
    prefetched, prefetch = list[int](), HostCopier.prefetch

    def counted(self: HostCopier, key: int, copies: Sequence[torch.Tensor]) -> None:
        prefetch(self, key, copies)
        prefetched.extend(self._staged)

    monkeypatch.setattr(HostCopier, "prefetch", counted)
    run, largest = run_of(kind, way, tmp_path)
    assert run.preemptions > 0 and run.swaps.recomputed == 0 and largest <= EXACT
    assert late_streams[0].num_runs > run.preemptions
    assert bool(prefetched) == room


def tokens_of(
    engine: Engine, prompts: list[list[int]], new: int = 20, preempt: tuple[int, ...] = ()
) -> dict[int, tuple[list[int], str | None]]:
    """Return greedy tokens or the error of each prompt; after the steps ``preempt`` the latest request is preempted."""
    numbers = [engine.add_request(prompt, SamplingParams(max_tokens=new, temperature=0)) for prompt in prompts]
    outputs: dict[int, tuple[list[int], str | None]] = {number: ([], None) for number in numbers}
    step = 0
    while not engine.idle:
        for chunk in engine.step():
            if chunk.token_id is not None:
                outputs[chunk.request][0].append(chunk.token_id)
            if chunk.error is not None:
                outputs[chunk.request] = outputs[chunk.request][0], chunk.error
        engine.scheduler.check()
        fill_unowned(engine, math.nan)
        step += 1
        if step in preempt and engine.scheduler._running:
            engine.scheduler._preempt(engine.scheduler._running[-1])
    assert engine.preemption.swap_space is not None and not len(engine.preemption.swap_space)
    return {at: outputs[number] for at, number in enumerate(numbers)}


PROMPTS = [text(30), text(9, 2), text(40, 4)]
OFTEN = tuple(range(3, 60, 3))


class SlowDisk(FileSystem):
    """A slow disk: others run while a sequence is swapped, and copies are written before they are read."""

    def read(self, file: int, into: bytes | bytearray | memoryview, offset: int) -> int:
        time.sleep(0.0005)
        return super().read(file, into, offset)


@pytest.mark.parametrize("kind", ["full", "windows", "contiguous", "heavy-hitters", "tiered", "packed"])
def test_repeatedly_preempted_sequences_equal_solo_runs(kind: str, tmp_path: Path) -> None:
    model, cache = setting(kind, swap_space=0)
    engine = Engine(model, cache, EngineConfig(swap_dir=tmp_path, cost_model=FixedChoice(True), fs=SlowDisk()))
    outputs = tokens_of(engine, PROMPTS, preempt=OFTEN)
    assert engine.preemption.stats().to_disk > 5
    engine.close()
    for number, prompt in enumerate(PROMPTS):
        assert tokens_of(Engine(model, setting(kind)[1]), [prompt])[0] == outputs[number]


def test_a_restored_target_reads_its_encoder_input(tmp_path: Path) -> None:
    model = build(pair_config("rope", "pre", "gqa"))
    streams = [
        Stream(text(3, seed), [text(30, seed + 10)], source=[token % 41 for token in text(9 + seed, seed)])
        for seed in range(3)
    ]
    cache = {"max_source_len": 32, "num_blocks": 15, "enable_prefix_caching": False}
    run = drive(model, cache_of(swap_space=0, **cache), streams, cost_model=FixedChoice(True), swap_dir=tmp_path)
    assert run.preemptions > 0 and run.swaps.to_disk == run.preemptions
    for number, stream in enumerate(streams):
        alone = drive(model, cache_of(max_source_len=32), [stream])
        assert apart(alone, run, number, 0) <= EXACT


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("kind", list(KINDS))
def test_swapped_bytes_equal_the_counted_ones(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the parking counts without a tensor is what the tensors hold."""
    model, cache = setting(kind, swap_space=1 << 30)
    engine = Engine(model, cache, EngineConfig(cost_model=FixedChoice(True)))
    counted: dict[int, int] = {}
    taken: dict[int, int] = {}
    out, keep = HostCopier.copy_out, SwapSpace.store

    def copied(self: HostCopier, key: int, held: object) -> list[torch.Tensor]:
        copies = out(self, key, held)  # type: ignore[arg-type]
        taken[key] = sum(each.nbytes for each in copies)
        return copies

    def stored(self: SwapSpace, key: int, nbytes: int, order: tuple[int, int], *, required: bool) -> None:
        counted[key] = nbytes
        keep(self, key, nbytes, order, required=required)

    monkeypatch.setattr(HostCopier, "copy_out", copied)
    monkeypatch.setattr(SwapSpace, "store", stored)
    tokens_of(engine, PROMPTS, preempt=OFTEN)
    assert taken and all(counted[key] == nbytes > 0 for key, nbytes in taken.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_copies_as_sections(dtype: torch.dtype) -> None:
    copies = [torch.randint(0, 100, shape).to(dtype) for shape in ((3, 2, 4), (0, 5), (1,))]
    back = from_sections(list(reversed(to_sections(copies))))
    for one, other in zip(copies, back, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


# ---------------------------------------------------------------- faults


def lossy_or_not(kind: str, folder: Path, disk: FileSystem) -> tuple[dict[int, tuple[list[int], str | None]], Engine]:
    model, cache = setting(kind, swap_space=0)
    engine = Engine(model, cache, EngineConfig(swap_dir=folder, cost_model=FixedChoice(True), fs=disk))
    outputs = tokens_of(engine, PROMPTS, preempt=OFTEN[::3])
    engine.close()
    return outputs, engine


def compare(kind: str, folder: Path, disk: FileSystem, right: dict[int, tuple[list[int], str | None]]) -> int:
    """Rows that ended with an error, after a look at all of them."""
    outputs, engine = lossy_or_not(kind, folder, disk)
    ended = 0
    for number, (tokens, error) in outputs.items():
        if error is None:
            assert tokens == right[number][0]
        else:
            assert kind != "full", error
            assert "are lost" in error and "cannot be recomputed" in error and str(folder) in error
            assert tokens == right[number][0][: len(tokens)]
            ended += 1
    stats = engine.preemption.stats()
    assert ended <= stats.num_lost and (kind == "full" or ended == stats.num_lost)
    return ended


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["full", "tiered"])
@pytest.mark.parametrize("which", ["read", "write", "open", "create", "replace", "free"])
def test_a_failing_disk_operation_never_changes_the_output(kind: str, which: str, tmp_path: Path) -> None:
    """Each of the first ones, a middle one and the last."""
    model, cache = setting(kind)
    right = tokens_of(Engine(model, cache), PROMPTS)
    counting = FailingDisk(which=(which,))
    lossy_or_not(kind, tmp_path, counting)
    ended = 0
    for k in sorted({0, 1, 2, counting.count // 2, max(0, counting.count - 1)}):
        ended += compare(kind, tmp_path, FailingDisk(k, which=(which,)), right)
        left = [each.path for each in list_temp_paths(tmp_path)]
        assert not left
    assert not ended or (kind == "tiered" and which in ("read", "open"))


@pytest.mark.parametrize("kind", ["full", "tiered"])
def test_a_disk_that_fails_permanently(kind: str, tmp_path: Path) -> None:
    """Rows that cannot be recomputed stay in memory, beyond the bound."""
    model, cache = setting(kind)
    right = tokens_of(Engine(model, cache), PROMPTS)
    for k in (0, 3, 20):
        compare(kind, tmp_path, FailingDisk(k, which=("create", "write", "replace"), on=True), right)


class DamagingDisk(FileSystem):
    """Changes each file behind our back."""

    def __init__(self, seed: int) -> None:
        self.rng, self.count = random.Random(seed), 0

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        spoil(target, self.rng)
        self.count += 1


@pytest.mark.parametrize("kind", ["full", "tiered"])
@pytest.mark.parametrize("seed", range(4))
def test_damaged_swap_files_are_never_used(kind: str, seed: int, tmp_path: Path) -> None:
    model, cache = setting(kind)
    right = tokens_of(Engine(model, cache), PROMPTS)
    disk = DamagingDisk(seed)
    ended = compare(kind, tmp_path, disk, right)
    assert disk.count > 0 and (ended > 0 or kind == "full")


def test_a_failing_copy_changes_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without host memory the preempted sequence is recomputed, like the others of the failed step."""
    model, cache = setting("full", swap_space=1 << 30)
    engine = Engine(model, cache, EngineConfig(cost_model=FixedChoice(True)))
    right = tokens_of(Engine(model, setting("full")[1]), PROMPTS)
    out, failed = HostCopier.copy_out, []

    def broken(self: HostCopier, key: int, held: object) -> list[torch.Tensor]:
        if not failed:
            failed.append(key)
            raise MemoryError("no memory")
        return out(self, key, held)  # type: ignore[arg-type]

    monkeypatch.setattr(HostCopier, "copy_out", broken)
    numbers = [engine.add_request(prompt, SamplingParams(max_tokens=20, temperature=0)) for prompt in PROMPTS]
    outputs: dict[int, list[int]] = {number: [] for number in numbers}
    while not engine.idle:
        for chunk in engine.step():
            assert chunk.error is None
            if chunk.token_id is not None:
                outputs[chunk.request].append(chunk.token_id)
        fill_unowned(engine, math.nan)
    assert failed and [(outputs[number], None) for number in numbers] == list(right.values())


# ---------------------------------------------------------------- life


@pytest.mark.parametrize("kind", ["full", "tiered"])
def test_a_request_can_be_aborted_while_it_is_swapped(kind: str, tmp_path: Path) -> None:
    model, cache = setting(kind, swap_space=0, num_blocks=40)
    engine = Engine(model, cache, EngineConfig(swap_dir=tmp_path, cost_model=FixedChoice(True), fs=SlowDisk()))
    right = tokens_of(Engine(model, setting(kind)[1]), [PROMPTS[0]])[0]
    for wait in range(6):
        keeps = engine.add_request(PROMPTS[0], SamplingParams(max_tokens=20, temperature=0))
        goes = engine.add_request(PROMPTS[1], SamplingParams(max_tokens=40, temperature=0))
        outputs: list[int] = []
        for step in range(60):
            outputs += [
                chunk.token_id for chunk in engine.step() if chunk.request == keeps and chunk.token_id is not None
            ]
            fill_unowned(engine, math.nan)
            if step == 3:
                engine.scheduler._preempt(engine.scheduler.sequences(goes)[0])
            if step == 3 + wait:
                engine.abort_request(goes)
            if engine.idle:
                break
        assert engine.idle and outputs == right[0]
    engine.close()
    assert not list_temp_paths(tmp_path)


def test_closing_with_swapped_sequences(tmp_path: Path) -> None:
    model, cache = setting("tiered", swap_space=0)
    engine = Engine(model, cache, EngineConfig(swap_dir=tmp_path))
    number = engine.add_request(PROMPTS[0], SamplingParams(max_tokens=20, temperature=0))
    engine.add_request(PROMPTS[1], SamplingParams(max_tokens=20, temperature=0))
    for _ in range(4):
        engine.step()
    engine.scheduler._preempt(engine.scheduler.sequences(number)[0])
    for _ in range(2):
        engine.step()
    parking = engine.preemption.swap_space
    assert parking is not None and parking.files is not None
    thread = parking.files._worker._thread
    engine.close()
    engine.close()
    assert not list_temp_paths(tmp_path) and (thread is None or not thread.is_alive())


def test_the_cost_of_a_prompt_is_measured(tmp_path: Path) -> None:
    model, cache = setting("full", swap_space=1 << 30)
    engine = Engine(model, cache)
    assert engine.preemption.costs.seconds_per_token == 0
    tokens_of(engine, PROMPTS, preempt=OFTEN)
    measured = engine.preemption.stats()
    assert engine.preemption.costs.seconds_per_token > 0 and measured.costs["token_us"] > 0
    if measured.to_ram:
        assert measured.seconds["out"] > 0


def test_an_unwritable_swap_folder_is_rejected(tmp_path: Path) -> None:
    model, cache = setting("full")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="swap_dir"):
        Engine(model, cache, EngineConfig(swap_dir=tmp_path / "file"))
    with pytest.raises(ConfigError, match="swap_space"):
        cache_of(swap_space=-1)
    assert REAL_FILE_SYSTEM.free_bytes(tmp_path) > 0


def test_blocks_restored_in_another_order_are_detected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Swap the first group's blocks; full blocks may have any order, because attention uses positions."""
    held = KVCache._swap

    def wrong(self: KVCache, moves: object) -> None:
        swap_in = tuple((key, (blocks[0][::-1], *blocks[1:])) for key, blocks in moves.swap_in)  # type: ignore[attr-defined]
        held(self, moves._replace(swap_in=swap_in))  # type: ignore[attr-defined]

    for kind in ("full", "tiered"):
        model, cache = setting(kind, swap_space=0)
        right = tokens_of(
            Engine(model, cache, EngineConfig(swap_dir=tmp_path, cost_model=FixedChoice(True))), PROMPTS, preempt=OFTEN
        )
        with monkeypatch.context() as broken:
            broken.setattr(KVCache, "_swap", wrong)
            engine = Engine(model, cache, EngineConfig(swap_dir=tmp_path, cost_model=FixedChoice(True)))
            assert tokens_of(engine, PROMPTS, preempt=OFTEN) != right
