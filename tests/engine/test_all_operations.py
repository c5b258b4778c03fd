"""Random operations on one engine: every text equals its solo run (``tests/support/all_operations.py``).

With a bug in one operation the same runs must fail.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvad.cache.config import CacheConfig
from kvad.cache.device import kv_cache
from kvad.cache.device.host_copy import HostCopier, block_bytes_per_group
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.device.offload_reader import OffloadReader
from kvad.cache.groups import build_groups
from kvad.cache.sessions.state import PendingRestore
from kvad.config.model import attention_specs
from kvad.model_input import BlockOps
from tests.support.all_operations import SETUPS, Mismatch, OperationHarness, run_operations, talks
from tests.support.random_models import model_config
from tests.support.stream_harness import MACHINE

ALWAYS = (
    "submitted",
    "cancelled",
    "preempted",
    "ended",
    "saved",
    "resumed",
    "restored",
    "engine replaced",
    "swapped to disk",
)
TIERED = ("prefix from RAM", "prefix from disk")


pytestmark = pytest.mark.usefixtures("one_thread")


def build(name: str, seed: int, folder: Path) -> OperationHarness:
    return OperationHarness(name, random.Random(seed), folder)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in ("quest", "sinks", "window", "latent") else ())
        for name in SETUPS
    ],
)
def test_every_text_equals_its_solo_run(name: str, tmp_path: Path) -> None:
    counts = run_operations(build(name, 1, tmp_path), 700).counts
    expected = [*ALWAYS, "swapped to RAM"]
    if any("prefix_cache_dir" in options for options in SETUPS[name].engines):
        expected += TIERED
    if any("overflow" in options for options in SETUPS[name].engines):
        expected += ["offloaded", "refused by offload"]
    assert all(counts[each] > 0 for each in expected), counts
    assert counts["compared"] > 200


@pytest.mark.long(minutes=15)
@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("seed", range(100, 104))
def test_ten_thousand_random_operations(name: str, seed: int, tmp_path: Path) -> None:
    run_operations(build(name, seed, tmp_path), 10_000)


# ---------------------------------------------------------------- the same with hypothesis


class AllOperationsMachine(RuleBasedStateMachine):
    """All operations, in any order."""

    @initialize(name=st.sampled_from(sorted(SETUPS)), seed=st.integers(0, 99))
    def start(self, name: str, seed: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.harness = build(name, seed, Path(self.folder.name))

    @rule(text=st.sampled_from(talks()), keep=st.booleans())
    def submit(self, text: tuple[int, int], keep: bool) -> None:
        self.harness.submit(text, keep=keep)

    @rule(steps=st.integers(1, 9))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.step()

    @precondition(lambda self: self.harness.states)
    @rule(which=st.integers(0, 3))
    def resume(self, which: int) -> None:
        self.harness.resume(which)

    @precondition(lambda self: self.harness.states)
    @rule(which=st.integers(0, 3))
    def save(self, which: int) -> None:
        self.harness.save(which)

    @precondition(lambda self: self.harness.files)
    @rule(which=st.integers(0, 5))
    def restore(self, which: int) -> None:
        self.harness.restore(which)

    @precondition(lambda self: self.harness.live)
    @rule(which=st.integers(0, 4))
    def cancel(self, which: int) -> None:
        self.harness.cancel(which)

    @precondition(lambda self: self.harness.live)
    @rule(which=st.integers(0, 4))
    def preempt(self, which: int) -> None:
        self.harness.preempt(which)

    @rule(when=st.sampled_from(["before", "after"]))
    def fail_step(self, when: str) -> None:
        self.harness.fail_step(when)

    @rule()
    def forget(self) -> None:
        self.harness.evict_prefixes()

    @rule()
    def move(self) -> None:
        self.harness.replace_engine()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()
            self.harness.close()
            self.folder.cleanup()


class TestAllOperationsMachine(AllOperationsMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(MACHINE, max_examples=15, stateful_step_count=30)


@pytest.mark.long(minutes=15)
class TestAllOperationsMachineLong(AllOperationsMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(MACHINE, max_examples=1000, stateful_step_count=60, derandomize=False)


# ---------------------------------------------------------------- single events


class OneBlockStore:
    """Block store with one block of sevens."""

    def give(self, number: int, pieces: dict) -> None: ...

    def take(self, number: int) -> dict:
        return {0: bytes(np.full(block_bytes_per_group(GROUPS)[0] // 8, 7.0).tobytes())}


GROUPS = build_groups(
    attention_specs(model_config()), CacheConfig(dtype="float64", max_seq_len=12, max_num_seqs=2, block_size=4)
)


def test_a_swapped_copy_is_taken_before_its_block_is_loaded() -> None:
    """A sequence is swapped out, and its block is loaded from a store for another one, in the same step."""
    stored = KVCache(GROUPS)
    stored.host_store = OneBlockStore()
    keys, _ = stored.stores[0][0]
    keys.arrays[0][3] = 5.0
    stored.apply(BlockOps(((),), ((),), swap_out=((1, ((3,),)),), load=((9, ((3,),)),)))
    assert (keys.arrays[0][3] == 7.0).all()
    assert (stored.swapped[1][1] == 5.0).all()


# ---------------------------------------------------------------- bugs


def clears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "clear", lambda *_: None)


def restores_in_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore blocks in reverse order."""
    real = HostCopier.copy_in
    monkeypatch.setattr(
        HostCopier, "copy_in", lambda self, key, held, copies: real(self, key, held, [each.flip(0) for each in copies])
    )


def loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_nothing(memory: KVCache, host: object, loads: list) -> None:
        for number, _ in loads:
            host.take(number)  # type: ignore[attr-defined]

    monkeypatch.setattr(kv_cache, "copy_blocks_in", copy_nothing)


def drops_the_last_slot_of_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PendingRestore.restore

    def restore(self: PendingRestore, where: KVCache, blocks: list) -> None:
        real(self, where, blocks)
        group = where.groups[0]
        last = (self.fitted.length - 1) % group.block_size
        for keys, _ in where.stores[0].values():
            keys.arrays[0][blocks[0][-1], :, last] = 0

    monkeypatch.setattr(PendingRestore, "restore", restore)


def skips_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OffloadReader._tiles
    monkeypatch.setattr(OffloadReader, "_tiles", lambda *given: list(real(*given))[1:])


@pytest.mark.parametrize(
    "bug", [clears_nothing, restores_in_reverse, loads_nothing, drops_the_last_slot_of_a_state, skips_a_tile]
)
def test_a_bug_in_one_operation_is_detected(bug, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bug(monkeypatch)

    def runs() -> None:
        for seed in range(3):
            run_operations(build("full", seed, tmp_path / str(seed)), 900)

    with pytest.raises(Mismatch):
        runs()
