"""A world in which all moves happen to the same rows: an engine on a folder, now and then replaced by another engine.

A *talk* is a text that goes on from turn to turn, sampled.  It is submitted, cancelled, made to give way (to host
memory, to disk, or to be computed again, by the toss of a coin), finds prefixes in the pool and in both tiers, is
kept, goes on from what was kept, is saved, and goes on from its file: in the same engine, or in another one with other
blocks, another layout, or a pool that spills.  Blocks that nobody owns are NaN between any two steps.

Whatever happened to it, its logits are those of its solo run, in float64: the same text alone in an engine that knows
none of this.  :class:`Mismatch` says which talk differs, and where.
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
from kvad.cache.sessions.file import load_session, save_session
from kvad.cache.sessions.state import SequenceState
from kvad.config.model import ModelConfig
from kvad.engine.engine import Engine
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
PARKED = (4_000, 20_000)  # bytes of parked rows in host memory: none or a few, the next ones go to disk

Talk = tuple[int, int]  # stem, length of the prompt


class Mismatch(Exception):
    """A talk differs from its solo run."""


@dataclass(frozen=True)
class Setup:
    """A model and its cache; ``houses``: what is different in each engine that serves it."""

    config: ModelConfig
    cache: dict[str, Any]
    houses: tuple[dict[str, Any], ...]


TIERED = {"prefix_cache_dir": True, "prefix_cache_ram": 20_000}
SPILLING = {"overflow": "offload", "max_seq_len": 16, "offload_ram": 3_000, "num_blocks": None}
ELSEWHERE = ({"block_size": 3, **TIERED}, {"layout": "contiguous", "num_blocks": None})
SETUPS = {
    "full": Setup(model_config("rope"), {}, (TIERED, *ELSEWHERE, SPILLING)),
    "alibi int8": Setup(model_config("alibi"), {"dtype": "int8"}, (TIERED, *ELSEWHERE, SPILLING)),
    "learned int8/int4": Setup(
        model_config("learned"), {"key_dtype": "int8", "value_dtype": "int4"}, (TIERED, *ELSEWHERE)
    ),
    "the model's own window": Setup(model_config("rope", heads="window-mix"), {}, (TIERED, *ELSEWHERE)),
    "window": Setup(model_config("t5"), {"policy": "window(9)"}, (TIERED, *ELSEWHERE)),
    "sinks": Setup(model_config("rope"), {"policy": "sinks(3, 8)", "rope_at": "read"}, (TIERED, *ELSEWHERE)),
    "heavy-hitters": Setup(model_config("rope"), {"policy": "heavy-hitters(8, interval=4)"}, ({}, ELSEWHERE[1])),
    "tiered": Setup(
        model_config("rope"), {"policy": "tiered(8, quantized=4, interval=4, summaries=8, ratio=2)"}, ({},)
    ),
    "quest": Setup(model_config("rope"), {"policy": "quest(12)"}, (TIERED,)),
    "translating": Setup(pair_config("rope"), {"max_source_len": 20}, (TIERED, *ELSEWHERE)),
}


def prompt(talk: Talk) -> list[int]:
    """Those of a stem begin alike."""
    return [(talk[0] + 3) * at * at % VOCAB for at in range(talk[1])]


def source(talk: Talk) -> list[int]:
    return [(talk[0] + 2) * at % SOURCE_VOCAB for at in range(9 + talk[0])]


def sampling(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=1.0, seed=11, ignore_eos=True)


# ---------------------------------------------------------------- alone


class Noting(ModelRunner):
    """Tells of every logit that is sampled from."""

    note: Callable[[int, int, Tensor], None]

    def execute(self, plan: SchedulerOutput) -> Tensor:
        logits = super().execute(plan)
        at = 0
        for work in plan.scheduled:
            at += len(work.logit_offsets)
            if work.is_sampled:
                self.note(work.sequence.request_id, work.start + work.logit_offsets[-1] + 1, logits[at - 1])
        return logits


def noting(engine: Engine, note: Callable[[int, int, Tensor], None]) -> None:
    engine.runner = Noting(engine.model, engine.kv_cache)
    engine.runner.note = note


@cache
def alone(name: str, talk: Talk) -> tuple[tuple[int, ...], dict[int, Tensor]]:
    """All tokens of a talk, and by position the logits that each was sampled from."""
    setup = SETUPS[name]
    given = {
        "dtype": "float64",
        "block_size": 4,
        "max_seq_len": 60,
        **setup.cache,
        "max_num_seqs": 1,
        "prefill_chunk_size": 5,
        "enable_prefix_caching": False,
    }
    engine = Engine(build(setup.config), CacheConfig(**given))
    found: dict[int, Tensor] = {}
    noting(engine, lambda _, at, logits: found.update({at: logits}))
    crossed = {"encoder_token_ids": source(talk)} if setup.config.encoder_input is not None else {}
    engine.add_request(prompt(talk), sampling(TURN * TURNS), **crossed)
    tokens = prompt(talk)
    while not engine.idle:
        tokens += [piece.token_id for piece in engine.step() if piece.token_id is not None]
    assert len(tokens) == talk[1] + TURN * TURNS
    return tuple(tokens), found


# ---------------------------------------------------------------- in the world


class Coin(SwapCostModel):
    """Whether an exact row is copied or computed again is tossed."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng

    def swap_is_cheaper(self, nbytes: int, tokens: int, *, disk: bool = False, back: bool = False) -> bool:
        return self.rng.random() < 0.7


@dataclass
class Live:
    """A request of a talk; ``tokens``: the prompt's, and those that came."""

    talk: Talk
    tokens: list[int]
    keep: bool
    begun: int = 0


@dataclass
class World:
    """``did``: how often each move happened, and what came of it."""

    name: str
    rng: random.Random
    folder: Path
    did: Counter[str] = field(default_factory=Counter)
    live: dict[int, Live] = field(default_factory=dict)
    states: list[tuple[Talk, SequenceState]] = field(default_factory=list)
    files: list[tuple[Talk, Path]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.setup, self.house = SETUPS[self.name], -1
        self.move()

    # ------------------------------------------------------------ moves

    def move(self) -> None:
        """Into the next house: another engine, on the same folder.  Whoever is talking is cut short."""
        if self.house >= 0:
            self.count_up()
            self.engine.close()
            self.did["moved"] += 1
        self.live.clear()
        self.states.clear()
        self.house = (self.house + 1) % len(self.setup.houses)
        here = dict(self.setup.houses[self.house])
        if here.pop("prefix_cache_dir", False):
            here["prefix_cache_dir"] = str(self.folder / "tier")
        if here.get("overflow") == "offload":
            here["offload_dir"] = str(self.folder / "spill")
        given = {
            "dtype": "float64",
            "block_size": 4,
            "max_seq_len": 48,
            "max_num_seqs": 3,
            "prefill_chunk_size": 6,
            "swap_space": self.rng.choice(PARKED),
        }
        given |= {"num_blocks": 15, **self.setup.cache, **here}
        if self.setup.cache.get("policy") is not None or given.get("layout") == "contiguous":
            given["num_blocks"] = None
        self.engine = Engine(
            build(self.setup.config),
            CacheConfig(**given),
            max_num_batched_tokens=10,
            swap_dir=self.folder / "park",
            cost_model=Coin(self.rng),
        )
        noting(self.engine, self.judge)
        fill_unowned(self.engine, math.nan)

    @property
    def spilling(self) -> bool:
        return self.engine.kv_cache_manager.uses_offload

    def submit(self, talk: Talk, *, keep: bool) -> None:
        if len(self.live) < 5:
            self.begin(talk, prompt(talk), keep=keep and not self.spilling)
            self.did["submitted"] += 1

    def resume(self, which: int) -> None:
        """The next turn, from what the last one left in this engine."""
        if self.states and len(self.live) < 5:
            talk, state = self.states.pop(which % len(self.states))
            self.follow(talk, state, "resumed")

    def save(self, which: int) -> None:
        if self.states:
            talk, state = self.states[which % len(self.states)]
            path = self.folder / f"{self.did['saved'] % 6}.session"
            self.files = [each for each in self.files if each[1] != path]
            save_session(
                path, state, self.engine.cache_fingerprint(state.regime, cache_salt=state.salt), state.tokens, {}
            )
            self.files.append((talk, path))
            self.did["saved"] += 1

    def restore(self, which: int) -> None:
        """The next turn, from a file, which an engine of another layout or other blocks may have written."""
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
            if not self.spilling or "does not belong to this model and cache: policy" not in str(error):
                raise
            self.did["not restored where rows spill"] += 1
            return
        self.follow(talk, state, "restored")

    def follow(self, talk: Talk, state: SequenceState, how: str) -> None:
        whole, _ = alone(self.name, talk)
        if state.length + 1 + TURN > len(whole):
            return
        try:
            request = self.begin(talk, list(whole[: state.length + 1]), keep=True, resume=state)
        except RequestError:
            if not self.spilling:
                raise
            return
        self.did[how] += 1
        usage = self.engine.metrics(request)
        assert not usage.resume_miss_reason, usage.resume_miss_reason

    def begin(self, talk: Talk, tokens: list[int], *, keep: bool, **options: Any) -> int:
        if self.setup.config.encoder_input is not None:
            options["encoder_token_ids"] = source(talk)
        request = self.engine.add_request(tokens, sampling(TURN), keep_state=keep, **options)
        self.live[request] = Live(talk, tokens, keep, len(tokens))
        return request

    def step(self) -> None:
        for piece in self.engine.step():
            if piece.error is not None:
                raise Mismatch(f"talk {self.live[piece.request].talk} has failed: {piece.error}")
            live = self.live.get(piece.request)
            if live is None:
                continue
            if piece.token_id is not None:
                live.tokens.append(piece.token_id)
            if live.tokens != list(alone(self.name, live.talk)[0][: len(live.tokens)]):
                raise Mismatch(f"talk {live.talk} says {live.tokens[live.begun :]}")
            if piece.finish_reason is not None:
                self.end(piece.request, live)
        self.engine.flush_offload()  # what is wanted of evicted blocks is copied before they are spoilt
        fill_unowned(self.engine, math.nan)
        self.engine.scheduler.check()

    def end(self, request: int, live: Live) -> None:
        self.did["ended"] += 1
        assert len(live.tokens) == live.begun + TURN
        del self.live[request]
        if live.keep:
            self.states.append((live.talk, self.engine.pop_state(request)))
            del self.states[:-4]

    def cancel(self, which: int) -> None:
        if self.live:
            request = sorted(self.live)[which % len(self.live)]
            self.engine.abort_request(request)
            del self.live[request]
            self.did["cancelled"] += 1

    def preempt(self, which: int) -> None:
        if self.live:
            request = sorted(self.live)[which % len(self.live)]
            self.did["preempted"] += self.engine.scheduler.preempt(request)

    def forget(self) -> None:
        """The pool's prefixes are evicted by a row of strangers: what is known of talks is in the tiers alone."""
        if self.setup.config.encoder_input is None and not self.spilling and not self.live:
            self.engine.add_request([(7 * at + 5) % VOCAB for at in range(40)], SamplingParams(max_tokens=1))
            self.did["strangers"] += 1

    # ------------------------------------------------------------ the judge

    def judge(self, request: int, at: int, logits: Tensor) -> None:
        """``logits``: of the token at position ``at``."""
        live = self.live.get(request)
        if live is None:
            return
        right = alone(self.name, live.talk)[1][at]
        far = float((right - logits).abs().max().nan_to_num(nan=torch.inf))
        if not far <= EXACT:
            raise Mismatch(f"talk {live.talk}: logits at {at} are {far:.1e} from those of its solo run")
        self.did["judged"] += 1

    def count_up(self) -> None:
        """What the engine says has happened in it."""
        swaps, deposits, spill = (
            self.engine.preemption.stats(),
            self.engine.kv_cache_manager.prefix_offload,
            self.engine.kv_cache.offload_reader,
        )
        self.did["parked in RAM"] += swaps.to_ram
        self.did["parked on disk"] += swaps.to_disk
        self.did["computed again"] += swaps.recomputed
        if deposits is not None:
            self.did["prefix from RAM"] += deposits.hits.tokens["ram"]
            self.did["prefix from disk"] += deposits.hits.tokens["disk"]
        if spill is not None:
            self.did["spilled"] += spill.stats().written

    def drain(self) -> None:
        """To the end of all."""
        for _ in range(2000):
            if self.engine.idle:
                break
            self.step()
        assert self.engine.idle and not self.live
        assert all(used == 0 for used in self.engine.kv_cache_manager.stats().used), "blocks leak"

    def close(self) -> None:
        self.count_up()
        self.engine.close()
        left = [path for name in ("park", "spill") for path in (self.folder / name).rglob("*") if path.is_file()]
        assert not left, f"files are left: {left}"


def talks() -> Sequence[Talk]:
    return [(stem, length) for stem in range(STEMS) for length in LENGTHS]


def wander(world: World, moves: int) -> World:
    """So many random moves, and to the end."""
    rng = world.rng
    for _ in range(moves):
        draw, which = rng.random(), rng.randrange(60)
        if draw < 0.14:
            world.submit(rng.choice(talks()), keep=rng.random() < 0.7)
        elif draw < 0.20:
            world.resume(which)
        elif draw < 0.24:
            world.save(which)
        elif draw < 0.29:
            world.restore(which)
        elif draw < 0.31:
            world.cancel(which)
        elif draw < 0.39:
            world.preempt(which)
        elif draw < 0.40:
            world.forget()
        elif draw < 0.406:
            world.move()
        else:
            world.step()
    world.drain()
    world.close()
    return world
