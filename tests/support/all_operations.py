"""Model-based test of one engine under random operations, compared with solo runs.

A *talk* is a sampled text that grows from turn to turn. It is submitted, cancelled, preempted (swapped to RAM or
disk, or recomputed, at random), uses prefixes from the pool, RAM and disk, is retained as a state, resumed, saved, and
restored from its file: in the same engine, or in another one with other blocks, another layout, or token offload.
Blocks without an owner are filled with NaN after every step.

The logits of a talk must be those of its solo run in float64: the same text in an engine without any of these
operations. A ``Mismatch`` names the talk and the position that differ.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvad.cache.config import CacheConfig
from kvad.cache.sessions.state import SequenceState, load_session, save_session
from kvad.config.model import ModelConfig
from kvad.engine import Engine, EngineConfig
from kvad.engine.execution.model_runner import ModelRunner
from kvad.engine.scheduling.preemption import SwapCostModel
from kvad.engine.scheduling.request import SamplingParams
from kvad.engine.scheduling.sequence import SchedulerOutput
from kvad.errors import RequestError, StorageError
from tests.support.driver import fill_unowned
from tests.support.random_models import SOURCE_VOCAB, VOCAB, build, model_config, pair_config

EXACT = 1e-10
LENGTHS, TURN, TURNS = (3, 14, 23), 5, 4
LONGEST = LENGTHS[-1] + TURN * TURNS
STEMS = 3
SWAP_SPACES = (4_000, 20_000)  # bytes of swapped sequences in RAM: none or a few fit, the others go to disk

Talk = tuple[int, int]  # stem, length of the prompt


class Mismatch(Exception):
    """A talk differs from its solo run."""


@dataclass(frozen=True)
class Setup:
    """A model, its cache, and the options that differ between the ``engines`` that serve it."""

    config: ModelConfig
    cache: dict[str, Any]
    engines: tuple[dict[str, Any], ...]


BLOCK_STORES = {"prefix_cache_dir": True, "prefix_cache_ram": 20_000}
OFFLOADING = {"overflow": "offload", "max_seq_len": 16, "offload_ram": 3_000, "num_blocks": None}
OTHER_LAYOUTS = ({"block_size": 3, **BLOCK_STORES}, {"layout": "contiguous", "num_blocks": None})
HEAVY_HITTERS = {"policy": "heavy-hitters(8, interval=4)"}
SETUPS = {
    "full": Setup(model_config("rope"), {}, (BLOCK_STORES, *OTHER_LAYOUTS, OFFLOADING)),
    "alibi int8": Setup(model_config("alibi"), {"dtype": "int8"}, (BLOCK_STORES, *OTHER_LAYOUTS, OFFLOADING)),
    "learned int8/int4": Setup(
        model_config("learned"), {"key_dtype": "int8", "value_dtype": "int4"}, (BLOCK_STORES, *OTHER_LAYOUTS)
    ),
    "window of the model": Setup(model_config("rope", heads="window-mix"), {}, (BLOCK_STORES, *OTHER_LAYOUTS)),
    "window": Setup(model_config("t5"), {"policy": "window(9)"}, (BLOCK_STORES, *OTHER_LAYOUTS)),
    "sinks": Setup(model_config("rope"), {"policy": "sinks(3, 8)", "rope_at": "read"}, (BLOCK_STORES, *OTHER_LAYOUTS)),
    "heavy-hitters": Setup(model_config("rope"), HEAVY_HITTERS, ({}, OTHER_LAYOUTS[1])),
    "tiered": Setup(
        model_config("rope"), {"policy": "tiered(8, quantized=4, interval=4, summaries=8, ratio=2)"}, ({},)
    ),
    "quest": Setup(model_config("rope"), {"policy": "quest(12)"}, (BLOCK_STORES,)),
    "translating": Setup(pair_config("rope"), {"max_source_len": 20}, (BLOCK_STORES, *OTHER_LAYOUTS)),
    "latent": Setup(model_config("rope", heads="latent"), {}, (BLOCK_STORES, *OTHER_LAYOUTS, OFFLOADING)),
    "short-conv": Setup(
        model_config("rope", heads="short-conv", layers=3), {}, (BLOCK_STORES, *OTHER_LAYOUTS, OFFLOADING)
    ),
    "delta": Setup(model_config("rope", heads="delta"), {}, (BLOCK_STORES,)),
    "recurrence, heavy-hitters": Setup(
        model_config("rope", heads="recurrence", layers=3), HEAVY_HITTERS, ({}, OTHER_LAYOUTS[1])
    ),
}


def prompt(talk: Talk) -> list[int]:
    """Prompts with the same stem share their first tokens."""
    return [(talk[0] + 3) * at * at % VOCAB for at in range(talk[1])]


def source(talk: Talk) -> list[int]:
    return [(talk[0] + 2) * at % SOURCE_VOCAB for at in range(9 + talk[0])]


def sampling(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=1.0, seed=11, ignore_eos=True)


# ---------------------------------------------------------------- solo runs


class LogitsRecorder(ModelRunner):
    """Runner that passes every sampled position's logits to ``record``.

    With ``fails`` the next step of several requests fails, "before" or "after" it is computed.
    """

    record: Callable[[int, int, Tensor], None]
    fails = ""

    def execute(self, plan: SchedulerOutput) -> Tensor:
        self._fail("before", plan)
        logits = super().execute(plan)
        self._fail("after", plan)
        at = 0
        for work in plan.scheduled:
            at += len(work.logit_offsets)
            if work.is_sampled:
                self.record(work.sequence.request_id, work.start + work.logit_offsets[-1] + 1, logits[at - 1])
        return logits

    def _fail(self, when: str, plan: SchedulerOutput) -> None:
        if self.fails == when and len({work.sequence.request_id for work in plan.scheduled}) > 1:
            self.fails = ""
            raise RuntimeError("a step fails")


def record_logits(engine: Engine, record: Callable[[int, int, Tensor], None]) -> None:
    engine.runner = LogitsRecorder(engine.model, engine.kv_cache)
    engine.runner.record = record


@cache
def solo_run(name: str, talk: Talk) -> tuple[tuple[int, ...], dict[int, Tensor]]:
    """Return all tokens of a talk, and by position the logits that each was sampled from."""
    setup = SETUPS[name]
    options = {
        "dtype": "float64",
        "block_size": 4,
        "max_seq_len": 60,
        **setup.cache,
        "max_num_seqs": 1,
        "prefill_chunk_size": 5,
        "enable_prefix_caching": False,
    }
    engine = Engine(build(setup.config), CacheConfig(**options))
    logits_at: dict[int, Tensor] = {}
    record_logits(engine, lambda _, at, logits: logits_at.update({at: logits}))
    encoder_options = {"encoder_token_ids": source(talk)} if setup.config.encoder_input is not None else {}
    engine.add_request(prompt(talk), sampling(TURN * TURNS), **encoder_options)
    tokens = prompt(talk)
    while not engine.idle:
        tokens += [piece.token_id for piece in engine.step() if piece.token_id is not None]
    assert len(tokens) == talk[1] + TURN * TURNS
    return tuple(tokens), logits_at


# ---------------------------------------------------------------- operations


class RandomSwapCost(SwapCostModel):
    """Cost model that chooses at random between a copy and a recomputation."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    def swap_is_cheaper(self, nbytes: int, tokens: int, *, disk: bool = False, back: bool = False) -> bool:
        return self.rng.random() < 0.7


@dataclass
class ActiveRequest:
    """A request of a talk. ``tokens`` are the prompt's and the sampled ones."""

    talk: Talk
    tokens: list[int]
    keep: bool
    num_given_tokens: int = 0


@dataclass
class OperationHarness:
    """An engine and its operations. ``counts`` counts each operation and its effects."""

    name: str
    rng: random.Random
    folder: Path
    counts: Counter[str] = field(default_factory=Counter)
    live: dict[int, ActiveRequest] = field(default_factory=dict)
    states: list[tuple[Talk, SequenceState]] = field(default_factory=list)
    files: list[tuple[Talk, Path]] = field(default_factory=list)
    mismatch: Mismatch | None = None

    def __post_init__(self) -> None:
        self.setup, self.engine_index = SETUPS[self.name], -1
        self.replace_engine()

    def replace_engine(self) -> None:
        """Continue with the next engine on the same folder; running requests are dropped."""
        if self.engine_index >= 0:
            self.count_engine_stats()
            self.engine.close()
            self.counts["engine replaced"] += 1
        self.live.clear()
        self.states.clear()
        self.engine_index = (self.engine_index + 1) % len(self.setup.engines)
        changes = dict(self.setup.engines[self.engine_index])
        if changes.pop("prefix_cache_dir", False):
            changes["prefix_cache_dir"] = str(self.folder / "blocks")
        if changes.get("overflow") == "offload":
            changes["offload_dir"] = str(self.folder / "offload")
        options = {
            "dtype": "float64",
            "block_size": 4,
            "max_seq_len": 48,
            "max_num_seqs": 3,
            "prefill_chunk_size": 6,
            "swap_space": self.rng.choice(SWAP_SPACES),
        }
        options |= {"num_blocks": 15, **self.setup.cache, **changes}
        if self.setup.cache.get("policy") is not None or options.get("layout") == "contiguous":
            options["num_blocks"] = None
        self.engine = Engine(
            build(self.setup.config),
            CacheConfig(**options),
            EngineConfig(max_num_batched_tokens=10, swap_dir=self.folder / "swap", cost_model=RandomSwapCost(self.rng)),
        )
        record_logits(self.engine, self.compare_logits)
        fill_unowned(self.engine, math.nan)

    @property
    def uses_offload(self) -> bool:
        return self.engine.kv_cache_manager.uses_offload

    def submit(self, talk: Talk, *, keep: bool) -> None:
        if len(self.live) < 5:
            self.begin(talk, prompt(talk), keep=keep and not self.uses_offload)
            self.counts["submitted"] += 1

    def resume(self, which: int) -> None:
        """Start the next turn from a state that this engine returned."""
        if self.states and len(self.live) < 5:
            talk, state = self.states.pop(which % len(self.states))
            self.follow(talk, state, "resumed")

    def save(self, which: int) -> None:
        if self.states:
            talk, state = self.states[which % len(self.states)]
            path = self.folder / f"{self.counts['saved'] % 6}.session"
            self.files = [each for each in self.files if each[1] != path]
            save_session(
                path, state, self.engine.cache_fingerprint(state.regime, cache_salt=state.salt), state.tokens, {}
            )
            self.files.append((talk, path))
            self.counts["saved"] += 1

    def restore(self, which: int) -> None:
        """Start the next turn from a file, perhaps written by an engine with another layout or block size."""
        if not self.files or len(self.live) >= 5:
            return
        talk, path = self.files[which % len(self.files)]
        engine = self.engine
        try:
            state = load_session(
                path,
                lambda regime, salt: engine.cache_fingerprint(regime, cache_salt=salt),
                engine.kv_cache,
                engine.state_keeper.engine_id,
            ).state
        except StorageError as error:
            if not self.uses_offload or "does not belong to this model and cache: policy" not in str(error):
                raise
            self.counts["refused by offload"] += 1
            return
        self.follow(talk, state, "restored")

    def follow(self, talk: Talk, state: SequenceState, kind: str) -> None:
        all_tokens, _ = solo_run(self.name, talk)
        if state.length + 1 + TURN > len(all_tokens):
            return
        try:
            request = self.begin(talk, list(all_tokens[: state.length + 1]), keep=True, resume=state)
        except RequestError:
            if not self.uses_offload:
                raise
            return
        self.counts[kind] += 1
        usage = self.engine.metrics(request)
        assert not usage.resume_miss_reason, usage.resume_miss_reason

    def begin(self, talk: Talk, tokens: list[int], *, keep: bool, **options: Any) -> int:
        if self.setup.config.encoder_input is not None:
            options["encoder_token_ids"] = source(talk)
        request = self.engine.add_request(tokens, sampling(TURN), keep_state=keep, **options)
        self.live[request] = ActiveRequest(talk, tokens, keep, len(tokens))
        return request

    def fail_step(self, when: str) -> None:
        """Let the next step of several requests fail, if they can be recomputed: each one continues."""
        if not (self.engine.kv_cache_manager.lossy or self.uses_offload):
            self.engine.runner.fails = when
            self.counts["a step failed"] += 1

    def step(self) -> None:
        pieces = self.engine.step()
        if self.mismatch is not None:  # the engine recomputes the requests of a step that fails
            raise self.mismatch
        for piece in pieces:
            if piece.error is not None:
                raise Mismatch(f"talk {self.live[piece.request].talk} failed: {piece.error}")
            live = self.live.get(piece.request)
            if live is None:
                continue
            if piece.token_id is not None:
                live.tokens.append(piece.token_id)
            if live.tokens != list(solo_run(self.name, live.talk)[0][: len(live.tokens)]):
                raise Mismatch(f"talk {live.talk} has the tokens {live.tokens[live.num_given_tokens :]}")
            if piece.finish_reason is not None:
                self.end(piece.request, live)
        self.engine.flush_offload()  # copy evicted blocks that are stored before they are overwritten
        fill_unowned(self.engine, math.nan)
        self.engine.scheduler.check()

    def end(self, request: int, live: ActiveRequest) -> None:
        self.counts["ended"] += 1
        assert len(live.tokens) == live.num_given_tokens + TURN
        del self.live[request]
        if live.keep:
            self.states.append((live.talk, self.engine.pop_state(request)))
            del self.states[:-4]

    def cancel(self, which: int) -> None:
        if self.live:
            request = sorted(self.live)[which % len(self.live)]
            self.engine.abort_request(request)
            del self.live[request]
            self.counts["cancelled"] += 1

    def preempt(self, which: int) -> None:
        if self.live:
            request = sorted(self.live)[which % len(self.live)]
            self.counts["preempted"] += self.engine.scheduler.preempt(request)

    def evict_prefixes(self) -> None:
        """Evict the pool's prefixes with an unrelated sequence; prefixes of talks are then only in RAM or on disk."""
        if self.setup.config.encoder_input is None and not self.uses_offload and not self.live:
            self.engine.add_request([(7 * at + 5) % VOCAB for at in range(40)], SamplingParams(max_tokens=1))
            self.counts["prefixes evicted"] += 1

    # ------------------------------------------------------------ comparison

    def compare_logits(self, request: int, at: int, logits: Tensor) -> None:
        """Compare the logits of the token at position ``at`` with those of the solo run."""
        live = self.live.get(request)
        if live is None:
            return
        expected = solo_run(self.name, live.talk)[1][at]
        difference = float((expected - logits).abs().max().nan_to_num(nan=torch.inf))
        if not difference <= EXACT:
            self.mismatch = Mismatch(f"talk {live.talk}: logits at {at} differ by {difference:.1e} from the solo run")
            raise self.mismatch
        self.counts["compared"] += 1

    def count_engine_stats(self) -> None:
        """Add the engine's own statistics to ``counts``."""
        swap_stats, block_store, offload = (
            self.engine.preemption.stats(),
            self.engine.kv_cache_manager.prefix_offload,
            self.engine.kv_cache.offload_reader,
        )
        self.counts["swapped to RAM"] += swap_stats.to_ram
        self.counts["swapped to disk"] += swap_stats.to_disk
        self.counts["recomputed"] += swap_stats.recomputed
        if block_store is not None:
            self.counts["prefix from RAM"] += block_store.hits.tokens["ram"]
            self.counts["prefix from disk"] += block_store.hits.tokens["disk"]
        if offload is not None:
            self.counts["offloaded"] += offload.stats().written

    def drain(self) -> None:
        """Step until the engine is idle."""
        for _ in range(2000):
            if self.engine.idle:
                break
            self.step()
        assert self.engine.idle and not self.live
        assert all(used == 0 for used in self.engine.kv_cache_manager.stats().used), "blocks leak"

    def close(self) -> None:
        self.count_engine_stats()
        self.engine.close()
        remaining = [path for name in ("swap", "offload") for path in (self.folder / name).rglob("*") if path.is_file()]
        assert not remaining, f"files remain: {remaining}"


def talks() -> Sequence[Talk]:
    return [(stem, length) for stem in range(STEMS) for length in LENGTHS]


def run_operations(harness: OperationHarness, num_operations: int) -> OperationHarness:
    """Apply N random operations, then run to the end."""
    rng = harness.rng
    for _ in range(num_operations):
        draw, which = rng.random(), rng.randrange(60)
        if draw < 0.14:
            harness.submit(rng.choice(talks()), keep=rng.random() < 0.7)
        elif draw < 0.20:
            harness.resume(which)
        elif draw < 0.24:
            harness.save(which)
        elif draw < 0.29:
            harness.restore(which)
        elif draw < 0.31:
            harness.cancel(which)
        elif draw < 0.39:
            harness.preempt(which)
        elif draw < 0.40:
            harness.evict_prefixes()
        elif draw < 0.406:
            harness.replace_engine()
        elif draw < 0.43:
            harness.fail_step("before" if which % 2 else "after")
        else:
            harness.step()
    harness.drain()
    harness.close()
    return harness
