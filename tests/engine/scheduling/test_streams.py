"""Test number one, host half: every stream equals its solo run, whatever happens around it.

The real Scheduler and Ledger run over a fake model and a fake clock.  The fake memory keeps, for every slot, what a
real one would: the token's position, the token, and a hash of everything that token could see (its keys and values
carry its whole history).  The fake model's "logits" at a position are a hash of everything that the row sees *through
its tables*: a stale, uncleared, misplaced, lost or foreign slot changes the next token.  The reference knows no
cache: it hashes the row's own tokens.

Broken on purpose (no copy-on-write, no clearing, trusting an 8-bit hash ...), the same runs must fail.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvad.cache.config import CacheConfig
from kvad.cache.groups import CacheGroup, build_groups
from kvad.cache.manager.allocation import BlockAllocation
from kvad.cache.manager.block_mapping import BlockMapping
from kvad.cache.manager.block_pool import PrefixIndex, PrefixNode, digest
from kvad.cache.manager.encoder_blocks import EncoderAllocation, EncoderBlocks, EncoderSequence
from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.cache.manager.prefix_offload import PrefetchRequest
from kvad.config.model import AttentionSpec
from kvad.engine.scheduling.beam_search import BeamSearch, Hypothesis, num_candidates
from kvad.engine.scheduling.request import EncoderInput, SamplingParams, SequenceOutput, StreamChunk, TokenLogprob
from kvad.engine.scheduling.scheduler import Scheduler
from kvad.engine.scheduling.sequence import EncoderBatch, RequestMetrics, SchedulerOutput, TokenSequence
from kvad.model_input import NULL_BLOCK, PADDING_BLOCK, BlockOps

FULL = AttentionSpec(True, None, 1, 8, 8)
WIDE = AttentionSpec(True, None, 2, 8, 8)
NARROW = AttentionSpec(True, 5, 1, 8, 8)
SELF = AttentionSpec(True, 1, 1, 8, 8)
CROSS = AttentionSpec(False, None, 1, 8, 8, is_cross_attention=True)
WIDE_CROSS = AttentionSpec(False, None, 2, 8, 8, is_cross_attention=True)
VOCAB = 997
EVERY_17TH = frozenset(range(0, VOCAB, 17))


class Mismatch(Exception):
    """A stream differs from its solo run."""


# ---------------------------------------------------------------- the reference and the fake memory


class Solo:
    """A row alone, without a cache: ``seen[p]`` is the hash of everything that position p sees."""

    def __init__(
        self, root: bytes, mixers: Sequence[AttentionSpec], tokens: Sequence[int] = (), source: Sequence[int] = ()
    ) -> None:
        self.root, self.mixers, self.source = root, tuple(dict.fromkeys(mixers)), tuple(source)
        self.tokens: list[int] = []
        self.seen: list[int] = []
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> int:
        at = len(self.tokens)
        self.tokens.append(token)
        items = [*zip(range(at), self.tokens, self.seen, strict=False), (at, token, 0)]
        source = written_source(self.source)
        views = tuple(
            source if m.is_cross_attention else tuple(items[0 if m.window is None else max(0, at - m.window + 1) :])
            for m in self.mixers
        )
        self.seen.append(hash((crc32(self.root), views)))
        return self.seen[-1]

    def cut(self, length: int) -> None:
        del self.tokens[length:], self.seen[length:]

    def again(self, tokens: Sequence[int]) -> Solo:
        """The same row with other tokens, computed anew."""
        return Solo(self.root, self.mixers, tokens, self.source)


def written_source(source: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """What an encoder writes: each position's token, and all of the source."""
    return tuple((at, token, hash(tuple(source))) for at, token in enumerate(source))


class FakeMemory:
    """Per group and slot: position (-1 = empty), token, history.  Obeys Moves and decides nothing."""

    def __init__(self, placed: Sequence[CacheGroup]) -> None:
        self.groups = placed
        sizes = [group.num_blocks * group.block_size for group in placed]
        self.position = [[-1] * size for size in sizes]
        self.token = [[0] * size for size in sizes]
        self.history = [[0] * size for size in sizes]

    def apply(self, moves: BlockOps) -> None:
        for g, group in enumerate(self.groups):
            size = group.block_size
            for block in moves.clear[g]:
                self.position[g][block * size : (block + 1) * size] = [-1] * size
            for source, target, kept in moves.copy[g]:
                for store in (self.position, self.token, self.history):
                    store[g][target * size : (target + 1) * size] = store[g][source * size : (source + 1) * size]
                self.position[g][target * size + kept : (target + 1) * size] = [-1] * (size - kept)

    def run(
        self,
        spans: Sequence[tuple[int, Sequence[int]]],
        roots: Sequence[bytes],
        placed: BlockAllocation,
        reads: Sequence[int],
    ) -> list[list[int]]:
        """spans: (start, tokens) -> per span, what each of its positions sees.  All writes come before all reads."""
        self.apply(placed.block_ops)
        at, begins = 0, []
        for start, tokens in spans:
            begins.append(at)
            for offset, token in enumerate(tokens):
                for g, slots in enumerate(placed.slots):
                    slot = slots[at + offset]
                    assert slot // self.groups[g].block_size not in (NULL_BLOCK, PADDING_BLOCK)
                    self.position[g][slot], self.token[g][slot], self.history[g][slot] = start + offset, token, 0
            at += len(tokens)
        assert all(len(slots) == at for slots in placed.slots)
        if any(len(set(slots)) != at for slots in placed.slots):
            raise Mismatch("two rows write one slot")
        return [
            self._span(number, start, len(tokens), roots[number], placed, begins[number], reads[number])
            for number, (start, tokens) in enumerate(spans)
        ]

    def spoil(self, g: int, slot: int) -> None:
        """What lies there is garbage."""
        self.history[g][slot] = 666

    def encode(self, sources: Sequence[Sequence[int]], placed: EncoderAllocation) -> None:
        self.apply(placed.block_ops)
        own = sum(not group.spec.is_cross_attention for group in self.groups)
        written = [entry for source in sources for entry in written_source(source)]
        for g, slots in enumerate(placed.slots, own):
            assert len(slots) == len(set(slots)) == len(written)
            for slot, (at, token, history) in zip(slots, written, strict=True):
                assert slot // self.groups[g].block_size not in (NULL_BLOCK, PADDING_BLOCK)
                self.position[g][slot], self.token[g][slot], self.history[g][slot] = at, token, history

    def _span(
        self, number: int, start: int, count: int, root: bytes, placed: BlockAllocation, begin: int, read: int
    ) -> list[int]:
        seen = []
        for offset in range(count):
            views = tuple(
                self._view(g, table[number], start + offset, read) for g, table in enumerate(placed.block_tables)
            )
            seen.append(hash((crc32(root), views)))
            for g, slots in enumerate(placed.slots):
                self.history[g][slots[begin + offset]] = seen[-1]
        return seen

    def _view(self, g: int, table: Sequence[int], at: int, read: int) -> tuple[tuple[int, int, int], ...]:
        group, window = self.groups[g], self.groups[g].spec.window
        size = group.block_size
        if group.spec.is_cross_attention:
            at, read = 1 << 30, 1 << 30  # all of it
        shown = min(size, read) if group.max_blocks_per_seq == 1 else size
        assert group.max_blocks_per_seq == 1 or len(table) * size <= read, "the lane reads less than its row's table"
        low = -1 if window is None else at - window
        position, token, history = self.position[g], self.token[g], self.history[g]
        return tuple(
            sorted(
                (position[slot], token[slot], history[slot])
                for block in table
                for slot in range(block * size, block * size + shown)
                if position[slot] >= 0 and low < position[slot] <= at
            )
        )


# ---------------------------------------------------------------- the scheduler's world


class Setup(NamedTuple):
    """One configuration of the world: which layers, which layout, how tight.

    ``spare``: no pool has more than so many blocks beside those of one row at its longest."""

    mixers: tuple[AttentionSpec, ...]
    config: CacheConfig
    budget: int
    limit: int
    hash_bits: int = 128
    spare: int | None = None

    def groups(self) -> tuple[CacheGroup, ...]:
        made, spare = build_groups(self.mixers, self.config), self.spare
        if spare is None:
            return made
        return tuple(
            each._replace(num_blocks=min(each.num_blocks, each.max_blocks_per_seq + spare + 2)) for each in made
        )


SETUPS = {
    "full-tight": Setup(
        (FULL,), CacheConfig(block_size=4, max_num_seqs=5, max_seq_len=40, prefill_chunk_size=7, num_blocks=12), 12, 40
    ),
    "full-collisions": Setup(
        (FULL,),
        CacheConfig(block_size=2, max_num_seqs=5, max_seq_len=40, prefill_chunk_size=7, num_blocks=30),
        12,
        40,
        8,
    ),
    "pool-below-limit": Setup(
        (FULL, NARROW),
        CacheConfig(block_size=4, max_num_seqs=3, max_seq_len=40, prefill_chunk_size=7, num_blocks=6),
        9,
        40,
    ),
    "mixed": Setup(
        (NARROW, FULL, NARROW, WIDE, SELF),
        CacheConfig(block_size=4, max_num_seqs=4, max_seq_len=40, prefill_chunk_size=6, num_blocks=13),
        9,
        40,
    ),
    "mixed-tall": Setup(
        (FULL, NARROW),
        CacheConfig(block_size=1, max_num_seqs=4, max_seq_len=30, prefill_chunk_size=5, num_blocks=45),
        30,
        30,
    ),
    "windows": Setup(
        (NARROW, SELF), CacheConfig(block_size=2, max_num_seqs=4, max_seq_len=40, prefill_chunk_size=6), 8, 40
    ),
    "contiguous": Setup(
        (FULL, NARROW, SELF),
        CacheConfig(layout="contiguous", max_num_seqs=4, max_seq_len=40, prefill_chunk_size=6),
        9,
        40,
    ),
    "translating": Setup(
        (FULL, NARROW, CROSS, WIDE_CROSS),
        CacheConfig(
            block_size=4, max_num_seqs=4, max_seq_len=40, prefill_chunk_size=6, num_blocks=16, max_source_len=14
        ),
        12,
        40,
    ),
    "translating-contiguous": Setup(
        (FULL, CROSS),
        CacheConfig(layout="contiguous", max_num_seqs=4, max_seq_len=40, prefill_chunk_size=6, max_source_len=14),
        9,
        40,
    ),
    "no-prefix": Setup(
        (FULL, NARROW),
        CacheConfig(
            block_size=4,
            max_num_seqs=4,
            max_seq_len=40,
            prefill_chunk_size=6,
            num_blocks=14,
            enable_prefix_caching=False,
        ),
        9,
        40,
    ),
}


def hasher(bits: int) -> Callable[[bytes], bytes]:
    return lambda data: digest(data)[: bits // 8]


class Stream:
    """What one sample must say: the oracle for its events."""

    def __init__(self, solo: Solo, sample: int, sampling: SamplingParams, stops: frozenset[int], limit: int) -> None:
        self.solo, self.sample, self.sampling, self.stops, self.limit = solo, sample, sampling, stops, limit
        self.prompt_len = len(solo.tokens)
        self.told_prompt: tuple[TokenLogprob, ...] = ()

    def expect(self, event: StreamChunk) -> None:
        if event.finish_reason in ("abort", "error"):
            return
        if event.prompt_logprobs:
            self.told_prompt += event.prompt_logprobs
        if event.token_id is not None:
            seen = self.solo.seen[-1]
            token = choose(seen, self.sample)
            if event.token_id != token or event.logprob != TokenLogprob(token, float(seen)):
                raise Mismatch(f"sample {self.sample}: token {len(self.solo.tokens)} is {event}, alone it is {token}")
            self.solo.push(token)
        if event.finish_reason in ("stop", "length"):
            self._ended(event)
        elif event.token_id is not None and self._reason(event.token_id) is not None:
            raise Mismatch(f"{event} should have been the last")

    def _reason(self, token: int | None) -> str | None:
        generated = len(self.solo.tokens) - self.prompt_len
        if token is not None and token in self.stops and generated > self.sampling.min_tokens:
            return "stop"
        return "length" if len(self.solo.tokens) >= self.limit else None

    def _ended(self, event: StreamChunk) -> None:
        stopped = event.limit == "pool" and self.sampling.overflow == "stop" and event.finish_reason == "length"
        if event.error is not None or (event.finish_reason != self._reason(event.token_id) and not stopped):
            raise Mismatch(f"{event} at {len(self.solo.tokens)} tokens of {self.limit}")
        if self.sampling.prompt_logprobs is not None and self.sample == 0:
            tokens, seen = self.solo.tokens, self.solo.seen
            expected = tuple(TokenLogprob(tokens[i + 1], float(seen[i])) for i in range(self.prompt_len - 1))
            if self.told_prompt != expected:
                raise Mismatch(f"prompt scores {self.told_prompt}, alone {expected}")
        elif self.told_prompt:
            raise Mismatch("prompt scores that nobody asked for")


def choose(seen: int, sample: int) -> int:
    return hash((seen, sample)) % VOCAB


def continuations(seen: int, sampling: SamplingParams, stops: frozenset[int]) -> tuple[tuple[int, float], ...]:
    """A beam's candidates: tokens and log-probabilities that depend on all that it sees."""
    count = num_candidates(sampling, len(stops))
    tokens = dict.fromkeys(hash((seen, i)) % VOCAB for i in range(2 * count))
    found = [(token, -1 - (hash((seen, token)) % 1000) / 200) for token in list(tokens)[:count]]
    return tuple(sorted(found, key=lambda each: -each[1]))


class Searched:
    """What one hypothesis of a beam search must say: its tokens, then its end with its score."""

    def __init__(self, hypothesis: Hypothesis) -> None:
        self.hypothesis, self.told = hypothesis, 0

    def expect(self, event: StreamChunk) -> None:
        if event.finish_reason in ("abort", "error"):
            return
        tokens, last = self.hypothesis.tokens, self.told == len(self.hypothesis.tokens) - 1
        end = (self.hypothesis.finish, self.hypothesis.score) if last else (None, None)
        if (event.token_id, event.finish_reason, event.cumulative_logprob) != (tokens[self.told], *end):
            raise Mismatch(f"{event}: alone token {self.told} of {self.hypothesis}")
        self.told += 1


def search(solo: Solo, sampling: SamplingParams, stops: frozenset[int], limit: int) -> list[Hypothesis]:
    """Alone: every beam computed anew, without a cache."""
    group = BeamSearch(sampling, len(solo.tokens), limit, stops)
    beams = [list(solo.tokens)]
    while True:
        found = []
        for tokens in beams:
            alone = solo.again(tokens)
            found.append(continuations(alone.seen[-1], sampling, stops))
        children = group.advance(beams, found)
        if not children:
            return group.best_hypotheses(beams)
        beams = [[*beams[child.parent], child.token] for child in children]


class World:
    """Scheduler + ledger + fake model + fake clock, with every event judged and every invariant checked."""

    def __init__(
        self,
        setup: Setup,
        *,
        ledger: type[KVCacheManager] = KVCacheManager,
        memory: type[FakeMemory] = FakeMemory,
        check: bool = True,
    ) -> None:
        self.setup = setup
        placed = setup.groups()
        self.ledger = ledger(
            placed,
            prefix_caching=setup.config.enable_prefix_caching,
            max_num_seqs=setup.config.max_num_seqs,
            hash_fn=hasher(setup.hash_bits),
            watermark=setup.config.watermark,
        )
        self.memory = memory(placed)
        self.time = 0.0
        self.scheduler = Scheduler(
            self.ledger,
            max_num_seqs=setup.config.max_num_seqs,
            max_num_batched_tokens=setup.budget,
            prefill_chunk_size=setup.config.prefill_chunk_size,
            limit=setup.limit,
            clock=self._clock,
        )
        self.streams: dict[int, dict[int, Stream | Searched]] = {}
        self.usages: dict[int, RequestMetrics] = {}
        self.numbers = itertools.count()
        self.checked = check
        self.ended: dict[str, int] = {}

    def _clock(self) -> float:
        self.time += 1.0
        return self.time

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        root: bytes = b"",
        stops: frozenset[int] = EVERY_17TH,
        source: Sequence[int] = (1, 2, 0),
    ) -> int:
        number = next(self.numbers)
        crossed = any(mixer.is_cross_attention for mixer in self.setup.mixers)
        root = root + bytes(source) if crossed else root
        read = tuple(source) if crossed else None
        self.usages[number] = self.scheduler.add_request(
            number,
            prompt,
            sampling,
            root,
            stop_tokens=stops,
            encoder_input=None if read is None else EncoderInput(read),
        )
        limit = self.setup.limit
        if sampling.max_tokens is not None:
            limit = min(limit, len(prompt) + sampling.max_tokens)
        elif self.ledger.capacity < limit:
            limit = max(len(prompt), self.ledger.capacity + 1)
        stops = stops | frozenset(sampling.stop_token_ids)
        solos = [self.alone(root, prompt, read or ()) for _ in range(sampling.n)]
        if sampling.num_beams > 1 and limit > len(prompt):
            self.streams[number] = dict(enumerate(map(Searched, search(solos[0], sampling, stops, limit))))
        else:
            self.streams[number] = {
                sample: Stream(solo, sample, sampling, stops, limit) for sample, solo in enumerate(solos)
            }
        return number

    def alone(self, root: bytes, tokens: Sequence[int], source: Sequence[int]) -> Solo:
        return Solo(root, self.setup.mixers, tokens, source)

    def cancel(self, number: int) -> None:
        told = self.scheduler.abort_request(number)
        untold = {
            event.sample_index for event in self.scheduler._pending_chunks if event.request == number
        }  # ended, and not told
        assert {event.sample_index for event in told} | untold == set(self.streams.get(number, {}))
        assert all(event.finish_reason == "abort" for event in told)
        self._judge(told)

    def finish(self, number: int, sample: int) -> None:
        for event in self.scheduler.finish_sequence(number, sample, "stop"):
            self._drop(event)

    def plan(self) -> SchedulerOutput | None:
        plan = self.scheduler.schedule()
        if plan is None:
            assert not self.streams, f"nothing runs, and {sorted(self.streams)} wait"
            return None
        if plan.encoder_batch is None:
            self._check_lanes(plan)
        return plan

    def settle(
        self, plan: SchedulerOutput, faults: Callable[[TokenSequence], bool | str] = lambda row: False
    ) -> list[StreamChunk]:
        """``faults``: which rows' numbers are wrong; "again": for something that was lost."""
        if plan.encoder_batch is not None:
            return self._encoded(plan, plan.encoder_batch, faults)
        reads = [lane.num_read_slots for lane in plan.sub_batches for _ in range(lane.num_seqs)]
        spans = [
            (work.start, work.sequence.token_ids[work.start : work.start + work.num_tokens]) for work in plan.scheduled
        ]
        seen = self.memory.run(
            spans, [work.sequence.request.prefix_root for work in plan.scheduled], plan.allocation, reads
        )
        results = []
        for work, values, number in zip(plan.scheduled, seen, range(len(seen)), strict=True):
            if faulted := faults(work.sequence):
                self._poison(plan, number)
                results.append(SequenceOutput(error="not a number", retry=faulted == "again"))
            else:
                results.append(self._result(work.sequence, work.start, work.logit_offsets, work.is_sampled, values))
        events = self.scheduler.update_from_output(plan, results)
        self._judge(events)
        self.check()
        return events

    def _encoded(
        self, plan: SchedulerOutput, encoding: EncoderBatch, faults: Callable[[TokenSequence], bool | str]
    ) -> list[StreamChunk]:
        assert sum(lane.num_seqs * lane.num_new_tokens for lane in encoding.sub_batches) == sum(
            len(row.request.encoder_tokens) for row in encoding.sequences
        )
        if encoding.allocation is not None:
            self.memory.encode([row.request.encoder_tokens for row in encoding.sequences], encoding.allocation)
        results = []
        for number, row in enumerate(encoding.sequences):
            faulted = faults(row)
            results.append(SequenceOutput(error="not a number") if faulted else SequenceOutput())
            if faulted and encoding.allocation is not None:
                begin = sum(len(before.request.encoder_tokens) for before in encoding.sequences[:number])
                own = len(self.ledger.token_groups) + len(self.ledger.lower_groups)
                for g, slots in enumerate(encoding.allocation.slots, own):
                    for slot in slots[begin : begin + len(row.request.encoder_tokens)]:
                        self.memory.spoil(g, slot)
        events = self.scheduler.update_from_output(plan, results)
        self._judge(events)
        self.check()
        return events

    def _result(self, row: TokenSequence, start: int, wanted: range, samples: bool, seen: list[int]) -> SequenceOutput:
        scored = wanted[:-1] if samples else wanted
        prompt = tuple(TokenLogprob(row.token_ids[start + i + 1], float(seen[i])) for i in scored)
        if not samples:
            return SequenceOutput(prompt_logprobs=prompt)
        if row.request.beams is not None:
            found = continuations(seen[wanted[-1]], row.sampling_params, row.stop_tokens)
            return SequenceOutput(0, None, prompt, candidates=found)
        token = choose(seen[wanted[-1]], row.sample_index)
        return SequenceOutput(token, TokenLogprob(token, float(seen[wanted[-1]])), prompt)

    def _poison(self, plan: SchedulerOutput, number: int) -> None:
        """What a faulted row wrote is garbage; nobody may ever see it."""
        begin = sum(work.num_tokens for work in plan.scheduled[:number])
        for g, slots in enumerate(plan.allocation.slots):
            for slot in slots[begin : begin + plan.scheduled[number].num_tokens]:
                self.memory.spoil(g, slot)

    def step(self, faults: Callable[[TokenSequence], bool | str] = lambda row: False) -> list[StreamChunk]:
        plan = self.plan()
        return [] if plan is None else self.settle(plan, faults)

    def drain(self, most: int = 5000) -> None:
        """Run to the end: everything finishes, and nothing is left behind."""
        for _ in range(most):
            if self.plan_and_settle_is_idle():
                break
        else:
            raise AssertionError(f"{len(self.streams)} requests did not finish in {most} steps")
        assert not self.streams and self.scheduler.idle
        assert all(used == 0 for used in self.ledger.stats().used), "blocks leak"

    def plan_and_settle_is_idle(self) -> bool:
        plan = self.plan()
        if plan is not None:
            self.settle(plan)
        return plan is None

    def check(self) -> None:
        if self.checked:
            self.scheduler.check()

    def _judge(self, events: Sequence[StreamChunk]) -> None:
        for event in events:
            self.streams[event.request][event.sample_index].expect(event)
            if event.finish_reason is not None:
                self._drop(event)

    def _drop(self, event: StreamChunk) -> None:
        assert event.finish_reason is not None
        self.ended[event.finish_reason] = self.ended.get(event.finish_reason, 0) + 1
        del self.streams[event.request][event.sample_index]
        if not self.streams[event.request]:
            del self.streams[event.request]
            assert self.usages.pop(event.request).finished is not None

    def _check_lanes(self, plan: SchedulerOutput) -> None:
        assert sum(work.num_tokens for work in plan.scheduled) == sum(
            lane.num_seqs * lane.num_new_tokens for lane in plan.sub_batches
        )
        assert 0 < sum(work.num_tokens for work in plan.scheduled) <= self.setup.budget
        at = 0
        for lane in plan.sub_batches:
            rows = plan.scheduled[at : at + lane.num_seqs]
            assert all(work.num_tokens == lane.num_new_tokens <= self.setup.config.prefill_chunk_size for work in rows)
            orders = [
                work.sequence.seq_index if plan.cross_sub_batches is None else work.sequence.priority for work in rows
            ]
            assert orders == sorted(orders)  # type: ignore[type-var]
            at += lane.num_seqs
        assert at == len(plan.scheduled) == len({work.sequence.seq_index for work in plan.scheduled})


# ---------------------------------------------------------------- random runs


class Driver:
    """Seeded random operations on a World; the prompts share prefixes of all lengths."""

    world_type: type[World] = World

    def __init__(self, setup: Setup, seed: int, **parts: object) -> None:
        self.rng = random.Random(seed)
        self.world = self.world_type(setup, **parts)  # type: ignore[arg-type]
        self.stems = [[self.rng.randrange(3) for _ in range(setup.limit)] for _ in range(3)]

    def operate(self) -> None:
        rng, world = self.rng, self.world
        draw = rng.random()
        if draw < 0.3 and len(world.streams) < 9:
            self.add()
        elif draw < 0.32 and world.streams:
            world.cancel(rng.choice(sorted(world.streams)))
        elif draw < 0.34 and world.streams:
            number = rng.choice(sorted(world.streams))
            world.finish(number, rng.choice(sorted(world.streams[number])))
        elif draw < 0.38:
            self.step_with_changes()
        elif draw < 0.382:
            world.ledger.reset_prefix_cache()
        else:
            world.step(faults=lambda row: rng.random() < 0.01)
        world.check()

    def add(self) -> None:
        rng, limit = self.rng, min(self.world.setup.limit, self.world.ledger.capacity)
        stem = rng.choice(self.stems)
        prompt = stem[: rng.randint(1, min(limit, 24))]
        if rng.random() < 0.3:
            prompt = [*prompt[:-1], rng.randrange(3)]
        sampling = SamplingParams(
            n=rng.choice((1, 1, 1, 2, 3)),
            max_tokens=rng.choice((None, 0, 1, *range(2, 12))),
            prompt_logprobs=rng.choice((None, None, None, 0)),
            stop_token_ids=(5,) if rng.random() < 0.3 else (),
        )
        if sampling.max_tokens is not None and len(prompt) + sampling.max_tokens - 1 > limit:
            sampling = SamplingParams(n=sampling.n, max_tokens=None)
        source = [rng.randrange(2) for _ in range(rng.choice((1, 4, 5, 5, 14)))]
        if rng.random() < 0.2 and not self.world.ledger.lossy:
            sampling = self.beams(len(prompt))
        self.world.add(prompt, sampling, rng.choice((b"", b"", b"", b"other")), EVERY_17TH, source)

    def beams(self, prompt: int) -> SamplingParams:
        """A search that the pool could hold; few tokens, as its oracle computes every beam anew."""
        rng, setup = self.rng, self.world.setup
        beams, new = rng.choice((2, 3)), rng.randint(1, 6)
        if (
            not self.world.ledger.has_capacity(beams, min(prompt + new, setup.limit))
            or beams > setup.config.max_num_seqs
        ):
            return SamplingParams(max_tokens=1 if prompt <= self.world.ledger.capacity else 0)
        stopping = rng.choice((True, False, "never"))
        form = rng.choice(("length", "gnmt"))
        return SamplingParams(
            num_beams=beams, n=rng.randint(1, beams), max_tokens=new, early_stopping=stopping, length_penalty_form=form
        )

    def step_with_changes(self) -> None:
        """Cancel, finish and add while the plan is in flight."""
        rng, world = self.rng, self.world
        plan = world.plan()
        if plan is None:
            return
        for _ in range(rng.randint(1, 3)):
            if world.streams and rng.random() < 0.6:
                number = rng.choice(sorted(world.streams))
                if rng.random() < 0.5:
                    world.cancel(number)
                else:
                    world.finish(number, rng.choice(sorted(world.streams[number])))
            else:
                self.add()
        world.settle(plan)

    def run(self, operations: int) -> World:
        for _ in range(operations):
            self.operate()
        self.world.drain()
        return self.world


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("seed", [1])
def test_every_stream_equals_its_solo_run(name: str, seed: int) -> None:
    world = Driver(SETUPS[name], seed).run(2000)
    assert {"stop", "length", "abort", "error"} <= set(world.ended)


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_ten_thousand_operations(seed: int) -> None:
    world = Driver(SETUPS[("full-tight", "mixed", "full-collisions")[seed % 3]], seed).run(10_000)
    stats = world.ledger.stats()
    assert world.scheduler.stats().preemptions > 50 and stats.hits > 50 and min(stats.evictions) > 50


@pytest.mark.long
@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("seed", range(100, 106))
def test_ten_thousand_operations_of_every_kind(name: str, seed: int) -> None:
    Driver(SETUPS[name], seed).run(10_000)


# ---------------------------------------------------------------- the ledger alone: fork, rewind, drafts


class LedgerWorld:
    """Rows that extend by spans (of which only a part may be committed, as with drafts), fork, rewind and leave."""

    def __init__(
        self, setup: Setup, ledger: type[KVCacheManager] = KVCacheManager, memory: type[FakeMemory] = FakeMemory
    ) -> None:
        self.setup = setup
        placed = setup.groups()
        self.seats = setup.config.max_num_seqs
        self.ledger = ledger(
            placed,
            prefix_caching=setup.config.enable_prefix_caching,
            max_num_seqs=self.seats,
            hash_fn=hasher(setup.hash_bits),
        )
        self.memory = memory(placed)
        self.longest = min(setup.config.max_seq_len, self.ledger.capacity)
        self.rows: dict[int, Solo] = {}
        self.forgets = self.ledger.lossy or any(mixer.window is not None for mixer in setup.mixers)

    def alone(self, root: bytes, tokens: Sequence[int], source: Sequence[int]) -> Solo:
        return Solo(root, self.setup.mixers, tokens, source)

    def admit(self, seat: int, tokens: Sequence[int], root: bytes) -> None:
        length = self.ledger.add_sequence(seat, tokens, root)
        if seat in self.rows:
            assert length is None
            return
        assert length is not None and 0 <= length < max(1, len(tokens)) and length % self.setup.config.block_size == 0
        source = (1, 2, 0, len(root)) if any(mixer.is_cross_attention for mixer in self.setup.mixers) else ()
        if source and not self.attach(seat, source, root):
            self.ledger.free(seat)
            return
        self.rows[seat] = self.alone(root, tokens[:length], source)

    def attach(self, seat: int, source: tuple[int, ...], root: bytes) -> bool:
        known = self.ledger.attach_encoder_input(seat, source, root)
        if known is False:
            self.memory.encode([source], self.ledger.allocate_encoder_slots([seat]))
            self.ledger.commit_encoder_blocks(seat)
        return known is not None

    def extend(self, spans: dict[int, tuple[list[int], int]]) -> bool:
        """spans: seat -> (tokens to write, how many of them to commit).  False: the pool was too full."""
        spans = {
            seat: (tokens[: self.longest - len(self.rows[seat].tokens)], keep)
            for seat, (tokens, keep) in spans.items()
            if len(self.rows[seat].tokens) < self.longest
        }
        if not spans:
            return True
        before = self.ledger.stats()
        placed = self.ledger.allocate_slots(
            [(seat, len(self.rows[seat].tokens), len(new)) for seat, (new, _) in spans.items()]
        )
        if placed is None:
            assert self.ledger.stats() == before, "a refused reservation changed something"
            return False
        work = [(len(self.rows[seat].tokens), tokens) for seat, (tokens, _) in spans.items()]
        roots = [self.rows[seat].root for seat in spans]
        seen = self.memory.run(work, roots, placed, [1 << 30] * len(work))
        for (seat, (tokens, keep)), values in zip(spans.items(), seen, strict=True):
            solo = self.rows[seat]
            start = len(solo.tokens)
            alone = [solo.push(token) for token in tokens]
            if alone != values:
                raise Mismatch(f"seat {seat} at {start} + {len(tokens)} sees something else than alone")
            solo.cut(start + min(keep, len(tokens)))
            self.ledger.commit(seat, tokens[:keep])
        return True

    def fork(self, seat: int, child: int, length: int) -> None:
        before = self.ledger.stats()
        if self.ledger.fork(seat, child, length):
            self.rows[child] = self.rows[seat].again(self.rows[seat].tokens[:length])
        else:
            assert self.ledger.stats() == before
            assert self.forgets

    def rewind(self, seat: int, length: int) -> None:
        kept = self.ledger.truncate(seat, length)
        assert kept in (0, min(length, len(self.rows[seat].tokens)))
        assert kept or not length or self.forgets
        self.rows[seat].cut(kept)

    def release(self, seat: int, publish: bool) -> None:
        self.ledger.free(seat, publish)
        del self.rows[seat]

    def check(self) -> None:
        self.ledger.check()
        for seat, solo in self.rows.items():
            assert self.ledger.seq_len(seat) == len(solo.tokens)

    # -------- random operations

    def operate(self, rng: random.Random, stems: Sequence[Sequence[int]]) -> None:
        draw = rng.random()
        seat = rng.randrange(self.seats)
        taken, empty = seat in self.rows, [s for s in range(self.seats) if s not in self.rows]
        if draw < 0.15:
            self.admit(seat, rng.choice(stems)[: rng.randint(1, self.longest)], rng.choice((b"", b"", b"x")))
        elif draw < 0.22 and taken and empty:
            self.fork(seat, rng.choice(empty), rng.randint(0, len(self.rows[seat].tokens)))
        elif draw < 0.34 and taken:
            length = len(self.rows[seat].tokens)
            self.rewind(seat, max(0, length - rng.randint(0, 5)) if rng.random() < 0.8 else rng.randint(0, length))
        elif draw < 0.40 and taken:
            self.release(seat, publish=rng.random() < 0.9)
        elif draw < 0.402:
            self.ledger.reset_prefix_cache()
        elif not self.extend(self.spans(rng, stems)):
            self.release(rng.choice(sorted(self.rows)), publish=True)

    def spans(self, rng: random.Random, stems: Sequence[Sequence[int]]) -> dict[int, tuple[list[int], int]]:
        """Half of the rows go on along a stem (so that prefixes match), with a stray token now and then."""
        spans = {}
        for seat in rng.sample(sorted(self.rows), rng.randint(0, len(self.rows))):
            at = len(self.rows[seat].tokens)
            count = rng.choice((1, 1, 1, rng.randint(1, self.setup.config.prefill_chunk_size)))
            tokens = [t if rng.random() < 0.97 else 9 for t in stems[seat % len(stems)][at : at + count]]
            if tokens:
                spans[seat] = (tokens, len(tokens) if rng.random() < 0.8 else rng.randint(0, len(tokens)))
        return spans

    @classmethod
    def random_run(cls, setup: Setup, seed: int, operations: int, check: bool = True, **parts: object) -> LedgerWorld:
        rng = random.Random(seed)
        world = cls(setup, **parts)  # type: ignore[arg-type]
        stems = [[rng.randrange(3) for _ in range(world.longest)] for _ in range(2)]
        for _ in range(operations):
            world.operate(rng, stems)
            if check:
                world.check()
        for seat in list(world.rows):
            world.release(seat, publish=True)
        if check:
            world.check()
            assert all(used == 0 for used in world.ledger.stats().used), "blocks leak"
        return world


@pytest.mark.parametrize("name", SETUPS)
def test_forks_rewinds_and_drafts_equal_solo_runs(name: str) -> None:
    LedgerWorld.random_run(SETUPS[name], 5, 3000)


@pytest.mark.long
@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("seed", range(200, 206))
def test_ten_thousand_forks_rewinds_and_drafts(name: str, seed: int) -> None:
    LedgerWorld.random_run(SETUPS[name], seed, 10_000)


# ---------------------------------------------------------------- hypothesis: the same worlds, with shrinking

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=20)
MACHINE = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)


class StreamMachine(RuleBasedStateMachine):
    """Requests come, are cancelled, finish, fail and are preempted in a pool that is nearly always full."""

    @initialize(name=st.sampled_from(sorted(SETUPS)))
    def start(self, name: str) -> None:
        self.begin(World(SETUPS[name]))

    def begin(self, world: World) -> None:
        self.world = world
        self.longest = min(world.setup.limit, world.ledger.capacity)

    @rule(
        prompt=TOKENS,
        n=st.integers(1, 3),
        max_tokens=st.none() | st.integers(0, 8),
        scores=st.none() | st.just(0),
        root=st.sampled_from((b"", b"x")),
        source=st.lists(st.integers(0, 1), min_size=1, max_size=9),
    )
    def add(
        self, prompt: list[int], n: int, max_tokens: int | None, scores: int | None, root: bytes, source: list[int]
    ) -> None:
        if len(self.world.streams) < 8 and len(prompt) + (max_tokens or 0) <= self.longest:
            sampling = SamplingParams(n=n, max_tokens=max_tokens, prompt_logprobs=scores)
            self.world.add(prompt, sampling, root, source=source)

    @rule(prompt=TOKENS, beams=st.integers(2, 3), new=st.integers(1, 5), early=st.sampled_from((True, False, "never")))
    def search(self, prompt: list[int], beams: int, new: int, early: bool | str) -> None:
        fits = self.world.ledger.has_capacity(beams, min(len(prompt) + new, self.world.setup.limit))
        fits = fits and not self.world.ledger.lossy
        if len(self.world.streams) < 8 and fits and beams <= self.world.setup.config.max_num_seqs:
            sampling = SamplingParams(n=beams, num_beams=beams, max_tokens=new, early_stopping=early)  # type: ignore[arg-type]
            self.world.add(prompt, sampling)

    @precondition(lambda self: self.world.streams)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.streams))))

    @precondition(lambda self: self.world.streams)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.world.streams)))
        self.world.finish(number, data.draw(st.sampled_from(sorted(self.world.streams[number]))))

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @precondition(lambda self: self.world.streams)
    @rule(data=st.data())
    def fault(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.world.streams)))
        self.world.step(faults=lambda row: row.request_id == number)

    @precondition(lambda self: self.world.streams)
    @rule(data=st.data())
    def cancel_in_flight(self, data: st.DataObject) -> None:
        plan = self.world.plan()
        assert plan is not None
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.streams))))
        self.world.settle(plan)

    @invariant()
    def lawful(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


class LedgerMachine(RuleBasedStateMachine):
    """Rows admit, extend, fork, rewind and leave; each still sees only what it would alone."""

    @initialize(name=st.sampled_from(sorted(SETUPS)))
    def start(self, name: str) -> None:
        self.world = LedgerWorld(SETUPS[name])

    def seats(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.world.rows)))

    @rule(seat=st.integers(0, 3), tokens=TOKENS)
    def admit(self, seat: int, tokens: list[int]) -> None:
        self.world.admit(seat % self.world.seats, tokens, b"")

    @precondition(lambda self: self.world.rows)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5), keep=st.integers(0, 5))
    def extend(self, data: st.DataObject, tokens: list[int], keep: int) -> None:
        seats = data.draw(st.lists(st.sampled_from(sorted(self.world.rows)), min_size=1, unique=True))
        if not self.world.extend(dict.fromkeys(seats, (tokens, keep))):
            self.world.release(seats[0], publish=True)

    @precondition(lambda self: 0 < len(self.world.rows) < self.world.seats)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        seat = self.seats(data)
        child = next(s for s in range(self.world.seats) if s not in self.world.rows)
        self.world.fork(seat, child, data.draw(st.integers(0, len(self.world.rows[seat].tokens))))

    @precondition(lambda self: self.world.rows)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        seat = self.seats(data)
        self.world.rewind(seat, data.draw(st.integers(0, len(self.world.rows[seat].tokens))))

    @precondition(lambda self: self.world.rows)
    @rule(data=st.data(), publish=st.booleans())
    def release(self, data: st.DataObject, publish: bool) -> None:
        self.world.release(self.seats(data), publish)

    @invariant()
    def lawful(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


class TestStreamMachine(StreamMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = MACHINE


class TestLedgerMachine(LedgerMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = MACHINE


@pytest.mark.long(minutes=3)
class TestStreamMachineLong(StreamMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(MACHINE, max_examples=1000, stateful_step_count=60, derandomize=False)


@pytest.mark.long(minutes=3)
class TestLedgerMachineLong(LedgerMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(MACHINE, max_examples=1000, stateful_step_count=60, derandomize=False)


# ---------------------------------------------------------------- broken on purpose


class NoCopyOnWrite(KVCacheManager):
    def __init__(self, placed: Sequence[CacheGroup], **asked: Any) -> None:
        super().__init__(placed, **asked)
        self._allocator.is_shared = lambda *_: False  # type: ignore[method-assign]


class NoClearing(FakeMemory):
    def apply(self, moves: BlockOps) -> None:
        super().apply(moves._replace(clear=tuple(() for _ in moves.clear)))


class CopiesTooLittle(FakeMemory):
    def apply(self, moves: BlockOps) -> None:
        less = [tuple((source, target, kept - 1) for source, target, kept in copies) for copies in moves.copy]
        super().apply(moves._replace(copy=tuple(less)))


class TooShort(BlockMapping):
    def first_needed(self, start: int) -> int:
        return max(0, start - self.window + 2) // self.block_size


class KeepsLess(KVCacheManager):
    """Drops a windowed row's block one token too early."""

    def __init__(self, placed: Sequence[CacheGroup], **asked: Any) -> None:
        super().__init__(placed, **asked)
        for rules in self.block_mappings:
            rules.__class__ = TooShort


class ClaimsAll(KVCacheManager):
    """Forks and rewinds without asking whether the window before that point is still held."""

    def _window_held(self, seat: object, length: int) -> bool:
        return True


class OneRoot(KVCacheManager):
    """Every adapter, tenant and rotary regime in one chain of prefixes."""

    def add_sequence(
        self,
        row: int,
        tokens: Sequence[int],
        root: bytes,
        most: int | None = None,
        fetch: PrefetchRequest | None = None,
    ) -> int | None:
        return super().add_sequence(row, tokens, b"", most, fetch)


class Trusting(PrefixIndex):
    """Believes a digest without comparing tokens and parent."""

    def find(self, parent: PrefixNode | None, tokens: bytes) -> PrefixNode | None:
        return self._nodes.get(self._key(parent, tokens))


class TrustsTheHash(KVCacheManager):
    def __init__(self, placed: Sequence[CacheGroup], **asked: Any) -> None:
        super().__init__(placed, **asked)
        self._prefix_cache.prefixes = Trusting(asked["hash_fn"])


def broken(setup: str, operations: int = 4000, **parts: object) -> None:
    """The same run as above must not pass.  Checks are off, so that it is the streams that notice."""
    with pytest.raises(Mismatch):
        Driver(SETUPS[setup], 1, check=False, **parts).run(operations)


@pytest.mark.parametrize("setup", ["full-tight", "mixed", "contiguous"])
def test_without_copy_on_write_streams_differ(setup: str) -> None:
    broken(setup, ledger=NoCopyOnWrite)


@pytest.mark.parametrize("setup", ["full-tight", "mixed", "windows"])  # in a ring, stale positions lie ahead
def test_without_clearing_streams_differ(setup: str) -> None:
    broken(setup, memory=NoClearing)


@pytest.mark.parametrize("setup", ["full-tight", "mixed", "contiguous"])
def test_a_copy_that_keeps_too_little_is_noticed(setup: str) -> None:
    broken(setup, memory=CopiesTooLittle)


def test_a_window_that_drops_too_early_is_noticed() -> None:
    broken("mixed-tall", ledger=KeepsLess)


@pytest.mark.parametrize("setup", ["contiguous", "windows"])
def test_a_fork_behind_the_window_is_noticed(setup: str) -> None:
    with pytest.raises(Mismatch):
        LedgerWorld.random_run(SETUPS[setup], 1, 4000, check=False, ledger=ClaimsAll)


def test_trusting_an_8_bit_hash_is_noticed() -> None:
    broken("full-collisions", ledger=TrustsTheHash)


def test_a_prefix_of_another_root_is_noticed() -> None:
    broken("full-tight", ledger=OneRoot)


class SharesByPrefix(EncoderBlocks):
    """Knows a source by its first token alone."""

    def attach(self, tokens: Sequence[int], root: bytes) -> EncoderSequence | None:
        found = next((each for each in self.kept if each.tokens[:1] == tuple(tokens[:1])), None) if self.kept else None
        if (
            found is not None
            and found.written
            and all(pool.refs[block] for pool, blocks in zip(self.pools, found.blocks, strict=True) for block in blocks)
        ):
            return self.share(found)
        source = super().attach(tokens, root)
        self.kept += [source] if source is not None else []
        return source

    @property
    def kept(self) -> list[EncoderSequence]:
        return self.__dict__.setdefault("_kept", [])

    @kept.setter
    def kept(self, value: list[EncoderSequence]) -> None:
        self.__dict__["_kept"] = value


class SourcesMixedUp(KVCacheManager):
    def __init__(self, placed: Sequence[CacheGroup], **asked: Any) -> None:
        super().__init__(placed, **asked)
        self._encoder.__class__ = SharesByPrefix


@pytest.mark.parametrize("setup", ["translating", "translating-contiguous"])
def test_another_sources_keys_are_noticed(setup: str) -> None:
    broken(setup, ledger=SourcesMixedUp)


class ForksTheWrongBeam(KVCacheManager):
    """Forks a beam one token short of its end."""

    def fork(self, row: int, child: int, length: int) -> bool:
        done = super().fork(row, child, length)
        if done and length > 1:
            seat = self._sequences[child]
            assert seat is not None
            for hold in seat.groups:
                hold.blocks = hold.blocks[:-1] + hold.blocks[-1:][::-1]
            self.truncate(child, length - 1)
            self.allocate_slots([(child, length - 1, 1)])
            self.commit(child, [7])
        return done


def test_a_beam_forked_wrongly_is_noticed() -> None:
    broken("full-tight", ledger=ForksTheWrongBeam)


def test_two_sources_with_equal_targets_share_nothing_but_equal_sources_do() -> None:
    world = World(SETUPS["translating"])
    target = [1, 2, 0, 1, 1, 2, 0, 0, 1]
    sampling = SamplingParams(max_tokens=2)
    for source in ([1, 2, 0, 1, 1], [1, 2, 0, 1, 0], [1, 2, 0, 1, 1]):
        number = world.add(target, sampling, source=source)
        usage = world.usages[number]
        world.drain()
        assert usage.num_cached_tokens == (8 if number == 2 else 0)
    assert (world.ledger._encoder.hits, world.ledger._encoder.misses) == (1, 2)
