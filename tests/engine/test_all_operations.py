"""Test number one with every move at once: whatever happens to a row, it says what it says alone (``every_move.py``).

Broken on purpose, one move at a time, the same runs must fail.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
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
from tests.engine.scheduling.test_streams import MACHINE
from tests.support.all_operations import SETUPS, Mismatch, World, talks, wander
from tests.support.random_models import model_config

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


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def world(name: str, seed: int, folder: Path) -> World:
    return World(name, random.Random(seed), folder)


@pytest.mark.parametrize("name", SETUPS)
def test_a_row_says_what_it_says_alone(name: str, tmp_path: Path) -> None:
    did = wander(world(name, 1, tmp_path), 700).did
    expected = [*ALWAYS, "swapped to RAM"]
    if any("prefix_cache_dir" in options for options in SETUPS[name].engines):
        expected += TIERED
    if any("overflow" in options for options in SETUPS[name].engines):
        expected += ["offloaded", "refused by offload"]
    assert all(did[each] > 0 for each in expected), did
    assert did["compared"] > 200


@pytest.mark.long(minutes=15)
@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("seed", range(100, 104))
def test_ten_thousand_moves(name: str, seed: int, tmp_path: Path) -> None:
    wander(world(name, seed, tmp_path), 10_000)


# ---------------------------------------------------------------- a machine that looks for the shortest story


class EveryMove(RuleBasedStateMachine):
    """All moves, in any order."""

    @initialize(name=st.sampled_from(sorted(SETUPS)), seed=st.integers(0, 99))
    def start(self, name: str, seed: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.world = world(name, seed, Path(self.folder.name))

    @rule(talk=st.sampled_from(talks()), keep=st.booleans())
    def submit(self, talk: tuple[int, int], keep: bool) -> None:
        self.world.submit(talk, keep=keep)

    @rule(steps=st.integers(1, 9))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @precondition(lambda self: self.world.states)
    @rule(which=st.integers(0, 3))
    def resume(self, which: int) -> None:
        self.world.resume(which)

    @precondition(lambda self: self.world.states)
    @rule(which=st.integers(0, 3))
    def save(self, which: int) -> None:
        self.world.save(which)

    @precondition(lambda self: self.world.files)
    @rule(which=st.integers(0, 5))
    def restore(self, which: int) -> None:
        self.world.restore(which)

    @precondition(lambda self: self.world.live)
    @rule(which=st.integers(0, 4))
    def cancel(self, which: int) -> None:
        self.world.cancel(which)

    @precondition(lambda self: self.world.live)
    @rule(which=st.integers(0, 4))
    def preempt(self, which: int) -> None:
        self.world.preempt(which)

    @rule()
    def forget(self) -> None:
        self.world.evict_prefixes()

    @rule()
    def move(self) -> None:
        self.world.replace_engine()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            self.world.close()
            self.folder.cleanup()


class TestEveryMove(EveryMove.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(MACHINE, max_examples=25, stateful_step_count=30)


@pytest.mark.long(minutes=15)
class TestEveryMoveLong(EveryMove.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(MACHINE, max_examples=1000, stateful_step_count=60, derandomize=False)


# ---------------------------------------------------------------- what it found


class Lender:
    """Has one block of sevens."""

    def give(self, number: int, pieces: dict) -> None: ...

    def take(self, number: int) -> dict:
        return {0: bytes(np.full(block_bytes_per_group(PLACED)[0] // 8, 7.0).tobytes())}


PLACED = build_groups(
    attention_specs(model_config()), CacheConfig(dtype="float64", max_seq_len=12, max_num_seqs=2, block_size=4)
)


def test_what_is_loaded_does_not_lie_in_what_is_parked() -> None:
    """A row gives way, and its block is another's, which a tier fills, in one and the same step."""
    made = KVCache(PLACED)
    made.host_store = Lender()
    keys, _ = made.stores[0][0]
    keys.arrays[0][3] = 5.0
    made.apply(BlockOps(((),), ((),), swap_out=((1, ((3,),)),), load=((9, ((3,),)),)))
    assert (keys.arrays[0][3] == 7.0).all()
    assert (made.swapped[1][1] == 5.0).all()


# ---------------------------------------------------------------- broken on purpose


def not_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "_clear", lambda *_: None)


def woken_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's blocks come back in reverse."""
    real = HostCopier.copy_in
    monkeypatch.setattr(
        HostCopier, "copy_in", lambda self, key, held, copies: real(self, key, held, [each.flip(0) for each in copies])
    )


def nothing_from_the_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    def carry_in(memory: KVCache, host: object, loads: list) -> None:
        for number, _ in loads:
            host.take(number)  # type: ignore[attr-defined]

    monkeypatch.setattr(kv_cache, "copy_blocks_in", carry_in)


def a_state_without_its_last_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PendingRestore.restore

    def put(self: PendingRestore, where: KVCache, blocks: list) -> None:
        real(self, where, blocks)
        group = where.groups[0]
        last = (self.fitted.length - 1) % group.block_size
        for keys, _ in where.stores[0].values():
            keys.arrays[0][blocks[0][-1], :, last] = 0

    monkeypatch.setattr(PendingRestore, "restore", put)


def a_tile_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OffloadReader._tiles
    monkeypatch.setattr(OffloadReader, "_tiles", lambda *given: list(real(*given))[1:])


@pytest.mark.parametrize(
    "wrong", [not_cleared, woken_elsewhere, nothing_from_the_tiers, a_state_without_its_last_slot, a_tile_left_out]
)
def test_a_broken_move_is_heard(wrong, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong(monkeypatch)

    def runs() -> None:
        for seed in range(3):
            wander(world("full", seed, tmp_path / str(seed)), 900)

    with pytest.raises(Mismatch):
        runs()
