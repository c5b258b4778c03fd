"""Test number one under policies: every stream equals its solo run, whatever its neighbours, chunks and preemptions.

The worlds of ``test_streams.py`` with a device that obeys every move: it cuts rows head by head, packs and folds
blocks, chooses blocks for a query, and copies parked rows out and in.  Which tokens rank high, and which blocks match a
query, are functions of (token, position, layer, head).  The reference holds the same rules over plain lists, one token
at a time, without blocks.  Freed blocks are filled with canaries, and pools have little more room than one row needs.

Broken on purpose (nothing parked, cuts done one after the other, chunks that run past a cut ...), the runs must fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from zlib import crc32

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvad.cache.config import CacheConfig
from kvad.cache.groups import CacheGroup
from kvad.cache.manager.allocation import BlockAllocation
from kvad.cache.manager.block_pool import BlockPool
from kvad.cache.manager.demotion import DemotionOps
from kvad.cache.manager.encoder_blocks import EncoderAllocation
from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.cache.manager.sequence_blocks import SwappedSequence
from kvad.cache.policy import EvictionPolicy
from kvad.engine.scheduling.request import StreamChunk
from kvad.engine.scheduling.sequence import SchedulerOutput, TokenSequence
from kvad.model_input import NULL_BLOCK, PADDING_BLOCK, AttentionPattern, BlockOps, EvictOp
from tests.engine.scheduling.test_streams import (
    CROSS,
    FULL,
    MACHINE,
    NARROW,
    WIDE,
    Driver,
    FakeMemory,
    LedgerWorld,
    Mismatch,
    Setup,
    Solo,
    StreamMachine,
    World,
    written_source,
)


def setup(policy: str, *, limit: int = 40, spare: int | None = None, cross: bool = False, **fields: object) -> Setup:
    given = {
        "block_size": 4,
        "max_num_seqs": 4,
        "max_seq_len": 40,
        "prefill_chunk_size": 6,
        "max_source_len": 14,
        "policy": policy,
    } | fields
    mixers = (FULL, WIDE, NARROW, CROSS) if cross else (FULL, WIDE, NARROW)
    return Setup(mixers, CacheConfig(**given), 11, limit, spare=spare)  # type: ignore[arg-type]


POLICIES = {
    "sinks": setup("sinks(3, 8)", spare=4),
    "sinks-and-full": setup("0: full; sinks(3, 4)", num_blocks=13),
    "block-window": setup("0: full; block-window(8)", num_blocks=13),
    "grains": setup("block-window(9, 3)", spare=4, block_size=2),
    "sinks-contiguous": setup("sinks(3, 8)", layout="contiguous"),
    "endless": setup("sinks(3, 8)", max_seq_len=16, limit=70, endless=True, spare=3),
    "endless-contiguous": setup("sinks(5, 7)", max_seq_len=16, limit=70, endless=True, layout="contiguous"),
    "ranked": setup("0: full; key-norm(7, interval=4)", num_blocks=13),
    "ranked-tight": setup(
        "0: random(9, interval=2); key-norm(6, interval=3, num_sinks=2, recent=2)", spare=3, block_size=2
    ),
    "watched": setup("0: full; heavy-hitters(8, interval=4, num_sinks=1)", num_blocks=13),
    "ranked-contiguous": setup("key-norm(6, interval=4)", layout="contiguous"),
    "levels": setup("0: full; tiered(4, quantized=8, interval=4, summaries=4, ratio=2)", num_blocks=13),
    "levels-tight": setup("tiered(4, quantized=4, interval=4, num_sinks=4, summaries=4, ratio=4)", spare=3),
    "packed": setup("tiered(4, interval=8)", num_blocks=10),
    "gone": setup("0: key-norm(6, interval=4); tiered(8, quantized=0, interval=4, num_sinks=4)", spare=3),
    "offload": setup("offload(8, interval=4)", num_blocks=7),
    "spilled-and-full": setup("0: full; offload(4, interval=8)", num_blocks=13),
    "spilled-translating": setup("offload(4, interval=4)", num_blocks=8, cross=True),
    "quest": setup("quest(8)", num_blocks=14),
    "translating": setup("0: full; key-norm(7, interval=4)", num_blocks=14, cross=True),
}

# ---------------------------------------------------------------- the device's rules, over entries in their order


class Entry:
    """One token of a row in one group: its keys and values carry its history."""

    __slots__ = ("history", "position", "token")

    def __init__(self, position: int, token: int) -> None:
        self.position, self.token, self.history = position, token, 0

    @property
    def said(self) -> tuple[int, int, int]:
        return self.position, self.token, self.history


HOT, PACKED, SUMMARY = range(3)  # numbers: a name's hash would differ from run to run
Cell = tuple[int, tuple[Entry, ...]]  # how a slot holds which tokens


def hot(entry: Entry) -> Cell:
    return HOT, (entry,)


def staying(policy: EvictionPolicy, held: Sequence[Cell], layer: int, head: int, kept: int, now: int) -> list[Cell]:
    """What a cut leaves of one head."""

    def rank(at: int) -> tuple[bool, int, int]:
        entry = held[at][1][0]
        always = entry.position >= now - policy.recent or entry.position < policy.num_sinks
        return always, hash((entry.position, entry.token, layer, head)), -at

    best = sorted(range(len(held)), key=rank, reverse=True)[:kept]
    return [held[at] for at in sorted(best)]


def match(bound: int, query: int) -> int:
    """How well a block may match a query."""
    return hash((bound, query))


def bound_of(before: int, entry: Entry) -> int:
    """A block's bounds, one more token in it: the order of tokens does not matter, none can be taken out."""
    return max(before, hash((entry.position, entry.token)) & 0xFFFF)


def best_blocks(bounds: Sequence[int], own: int, query: int, budget: int) -> list[int]:
    ranked = sorted(range(own), key=lambda block: (match(bounds[block], query), -block), reverse=True)
    return [*sorted(ranked[: max(0, budget - 1)]), own]


def seen_by(reach: AttentionPattern, at: int, position: int) -> bool:
    if position > at or (reach.layer_window is not None and at - position >= reach.layer_window):
        return False
    return position >= reach.first_visible(at) or position < reach.num_sinks


def told(cells: Iterable[Cell]) -> tuple[object, ...]:
    return tuple(sorted((kind, tuple(entry.said for entry in entries)) for kind, entries in cells))


# ---------------------------------------------------------------- the reference


class Kept:
    """What a row keeps in one group, one token at a time."""

    def __init__(self, group: CacheGroup) -> None:
        self.group, self.reach = group, AttentionPattern.from_spec(group.spec)
        self.cells: list[Cell] = []
        heads = range(group.spec.num_kv_heads) if group.eviction_policy is not None else ()
        self.heads: dict[tuple[int, int], list[Cell]] = {(layer, head): [] for layer in group.layers for head in heads}
        self.left = 0  # tokens that have descended
        self.packed: list[Cell] = []
        self.summaries: list[Cell] = []

    def push(self, entry: Entry) -> object:
        now, scored, levels = entry.position, self.group.eviction_policy, self.group.demotion_policy
        if scored is not None:
            if scored.evicts_at(now):
                for (layer, head), held in self.heads.items():
                    self.heads[layer, head] = staying(scored, held, layer, head, scored.budget, now)
            for held in self.heads.values():
                held.append(hot(entry))
            return tuple(told(held) for held in self.heads.values())
        if levels is not None and now % levels.interval == 0:
            self.descend(now)
        self.cells.append(hot(entry))
        if self.group.sparse_read_policy is not None:
            return told(self.chosen(now))
        seen = [cell for cell in self.cells if levels is not None or seen_by(self.reach, now, cell[1][0].position)]
        return told([*seen, *self.packed, *self.summaries])

    def descend(self, now: int) -> None:
        policy, size = self.group.demotion_policy, self.group.block_size
        assert policy is not None
        leaving = max(0, (now - policy.recent) // size * size - policy.num_sinks) - self.left
        if leaving <= 0:
            return
        gone = self.cells[policy.num_sinks : policy.num_sinks + leaving]
        del self.cells[policy.num_sinks : policy.num_sinks + leaving]
        self.left += leaving
        if policy.quantized:
            self.packed += [(PACKED, entries) for _, entries in gone]
            over = 0 if policy.quantized < 0 else max(0, len(self.packed) - policy.quantized)
            gone, self.packed = self.packed[:over], self.packed[over:]
        if policy.summaries:
            many = policy.ratio
            for at in range(0, len(gone), many):
                entries = tuple(entry for _, each in gone[at : at + many] for entry in each)
                self.summaries.append((SUMMARY, entries))
            over = -(-len(self.summaries) // size) - -(-policy.summaries // size)
            self.summaries = self.summaries[max(0, over) * size :]

    def chosen(self, now: int) -> list[Cell]:
        size, chooses = self.group.block_size, self.group.sparse_read_policy
        assert chooses is not None
        bounds = [0] * (now // size + 1)
        for _, (entry,) in self.cells:
            bounds[entry.position // size] = bound_of(bounds[entry.position // size], entry)
        blocks = best_blocks(bounds, now // size, now, -(-chooses.budget // size))
        return [cell for cell in self.cells if cell[1][0].position // size in blocks]


class PolicySolo(Solo):
    def __init__(self, root: bytes, groups: Sequence[CacheGroup], tokens: Sequence[int], source: Sequence[int]) -> None:
        self.groups = tuple(group for group in groups if group.lower_level is None)
        self.kept = [Kept(group) for group in self.groups]
        super().__init__(root, (), tokens, source)

    def push(self, token: int) -> int:
        entries = [Entry(len(self.tokens), token) for _ in self.groups]
        source = written_source(self.source)
        views = tuple(
            source if kept.group.spec.is_cross_attention else kept.push(entry)
            for kept, entry in zip(self.kept, entries, strict=True)
        )
        self.tokens.append(token)
        self.seen.append(hash((crc32(self.root), views)))
        for entry in entries:
            entry.history = self.seen[-1]
        return self.seen[-1]

    def cut(self, length: int) -> None:
        if length < len(self.tokens):
            anew = self.again(self.tokens[:length])
            assert isinstance(anew, PolicySolo)
            self.tokens, self.seen, self.kept = anew.tokens, anew.seen, anew.kept

    def again(self, tokens: Sequence[int]) -> Solo:
        return PolicySolo(self.root, self.groups, tokens, self.source)


# ---------------------------------------------------------------- the device


class PolicyMemory(FakeMemory):
    """Per group, line and slot a cell.  A group that ranks has a line per layer and head, any other has one."""

    def __init__(self, placed: Sequence[CacheGroup]) -> None:
        super().__init__(placed)
        self.lines: list[dict[tuple[int, int], list[Cell | None]]] = []
        for group in placed:
            names = [(0, 0)]
            if group.eviction_policy is not None:
                names = [(layer, head) for layer in group.layers for head in range(group.spec.num_kv_heads)]
            self.lines.append({name: [None] * (group.num_blocks * group.block_size) for name in names})
        self.bounds = [[0] * group.num_blocks for group in placed]
        self.parked: dict[int, list[tuple[list[int], list[list[Cell | None]]]]] = {}
        self.writing: dict[tuple[int, int], Entry] = {}

    # -------- moves

    def slots(self, g: int, blocks: Iterable[int]) -> list[int]:
        size = self.groups[g].block_size
        return [slot for block in blocks for slot in range(block * size, (block + 1) * size)]

    def apply(self, moves: BlockOps) -> None:
        self.park_and_wake(moves)
        for g, cuts in enumerate(moves.evict):
            self.compact(g, cuts)
        for g, pairs in enumerate(moves.quantize):
            if pairs:
                self.pack(g, pairs)
        for g in range(len(moves.merge)):
            self.fold(g, moves)
        for g in range(len(self.groups)):
            for slot in self.slots(g, moves.clear[g]):
                for line in self.lines[g].values():
                    line[slot] = None
            for block in moves.clear[g]:
                self.bounds[g][block] = 0
            for source, target, kept in moves.copy[g]:
                self.copy(g, source, target, kept)

    def park_and_wake(self, moves: BlockOps) -> None:
        for key, blocks in moves.swap_out:
            self.parked[key] = [
                ([self.bounds[g][block] for block in held], [[line[s] for s in self.slots(g, held)] for line in lines])
                for g, held in enumerate(blocks)
                for lines in [self.lines[g].values()]
            ]
        for key, blocks in moves.swap_in:
            for g, (held, (bounds, lines)) in enumerate(zip(blocks, self.parked.pop(key), strict=True)):
                for block, bound in zip(held, bounds, strict=True):
                    self.bounds[g][block] = bound
                for line, cells in zip(self.lines[g].values(), lines, strict=True):
                    for slot, cell in zip(self.slots(g, held), cells, strict=True):
                        line[slot] = cell
        for key in moves.drop_swapped:
            self.parked.pop(key, None)

    def compact(self, g: int, cuts: Sequence[EvictOp]) -> None:
        policy, taken = self.groups[g].eviction_policy, []
        for cut in cuts:
            assert policy is not None
            slots = self.slots(g, cut.blocks)[: cut.num_held]
            for (layer, head), line in self.lines[g].items():
                held = [cell for slot in slots if (cell := line[slot]) is not None]
                if len(held) != cut.num_held:
                    raise Mismatch("a cut reads an empty slot")
                taken.append((cut, line, staying(policy, held, layer, head, cut.num_retained, cut.length)))
        for cut, line, cells in taken:
            for at, slot in enumerate(self.slots(g, cut.target_blocks)):
                line[slot] = cells[at] if at < len(cells) else None

    def pack(self, g: int, pairs: Sequence[tuple[int, int]]) -> None:
        level = self.groups[g].lower_level
        assert level is not None
        (line,), (above,) = self.lines[g].values(), self.lines[level.upper_group].values()
        read = [above[slot] for slot in self.slots(level.upper_group, [source for source, _ in pairs])]
        for slot, cell in zip(self.slots(g, [target for _, target in pairs]), read, strict=True):
            line[slot] = None if cell is None else (PACKED, cell[1])

    def fold(self, g: int, moves: BlockOps) -> None:
        level = self.groups[g].lower_level
        if not moves.merge[g] or level is None:
            return
        (line,), (above,) = self.lines[g].values(), self.lines[level.upper_group].values()
        size = self.groups[g].block_size
        read = [[above[slot] for slot in self.slots(level.upper_group, [fold.source_block])] for fold in moves.merge[g]]
        for fold, cells in zip(moves.merge[g], read, strict=True):
            for at in range(size):
                if at >= fold.first_slot or fold.base_block != fold.target_block:
                    line[fold.target_block * size + at] = (
                        line[fold.base_block * size + at] if at < fold.first_slot else None
                    )
            for at in range(0, size, level.ratio):
                entries = tuple(entry for cell in cells[at : at + level.ratio] if cell is not None for entry in cell[1])
                line[fold.target_block * size + fold.first_slot + at // level.ratio] = SUMMARY, entries

    def copy(self, g: int, source: int, target: int, kept: int) -> None:
        size = self.groups[g].block_size
        for line in self.lines[g].values():
            for at in range(size):
                line[target * size + at] = line[source * size + at] if at < kept else None
        self.bounds[g][target] = 0
        for line in self.lines[g].values():
            for cell in line[target * size : target * size + kept]:
                if cell is not None:
                    self.bounds[g][target] = bound_of(self.bounds[g][target], cell[1][0])

    def poison(self, ledger: KVCacheManager) -> None:
        """Canaries in every block that is nobody's, and that is not about to be copied out."""
        for g, pool in enumerate(ledger.pools):
            waiting = {
                block
                for _, parked in ledger._swapped.pending_swap_outs
                for blocks in parked[g : g + 1]
                for block in blocks
            }
            for block in range(2, len(pool.refs)):
                if pool.refs[block] == 0 and pool.prefixes[block] is None and block not in waiting:
                    for slot in self.slots(g, [block]):
                        for line in self.lines[g].values():
                            line[slot] = hot(Entry(0, -777))
                    self.bounds[g][block] = 1 << 20

    # -------- a step

    def run(
        self,
        spans: Sequence[tuple[int, Sequence[int]]],
        roots: Sequence[bytes],
        placed: BlockAllocation,
        reads: Sequence[int],
    ) -> list[list[int]]:
        self.apply(placed.block_ops)
        begin, begins = 0, []
        for start, tokens in spans:
            begins.append(begin)
            for offset, token in enumerate(tokens):
                for g, slots in enumerate(placed.slots):
                    self.write(g, slots[begin + offset], Entry(start + offset, token))
            begin += len(tokens)
        if any(len(set(slots)) != begin for slots in placed.slots):
            raise Mismatch("two rows write one slot")
        return [
            self._span(number, start, len(tokens), roots[number], placed, begins[number], reads[number])
            for number, (start, tokens) in enumerate(spans)
        ]

    def write(self, g: int, slot: int, entry: Entry) -> None:
        block = slot // self.groups[g].block_size
        assert block not in (NULL_BLOCK, PADDING_BLOCK)
        self.writing[g, slot] = entry
        for line in self.lines[g].values():
            line[slot] = hot(entry)
        self.bounds[g][block] = bound_of(self.bounds[g][block], entry)

    def _span(
        self, number: int, start: int, count: int, root: bytes, placed: BlockAllocation, begin: int, read: int
    ) -> list[int]:
        seen = []
        tables = [table[number] for table in placed.block_tables]
        for offset in range(count):
            views = tuple(
                self.view(g, tables, start + offset, read)
                for g, group in enumerate(self.groups)
                if group.lower_level is None
            )
            seen.append(hash((crc32(root), views)))
            for g, slots in enumerate(placed.slots):
                self.writing[g, slots[begin + offset]].history = seen[-1]
        return seen

    def view(self, g: int, tables: Sequence[Sequence[int]], at: int, read: int) -> object:
        group, size = self.groups[g], self.groups[g].block_size
        if group.spec.is_cross_attention:
            (line,) = self.lines[g].values()
            cells = [cell for slot in self.slots(g, tables[g]) if (cell := line[slot]) is not None]
            return tuple(sorted(cell[1][0].said for cell in cells))
        slots = self.slots(g, tables[g])
        assert group.max_blocks_per_seq == 1 or len(slots) <= read, "the lane reads less than its row's table"
        if group.max_blocks_per_seq == 1:
            slots = slots[: min(size, read)]
        if group.sparse_read_policy is not None:
            bounds = [self.bounds[g][block] for block in tables[g]]
            chosen = best_blocks(bounds, at // size, at, -(-group.sparse_read_policy.budget // size))
            slots = self.slots(g, [tables[g][block] for block in chosen])
        reach = AttentionPattern.from_spec(group.spec)
        views = []
        for line in self.lines[g].values():
            cells = [cell for slot in slots if (cell := line[slot]) is not None and cell[1][0].position <= at]
            if group.spec.window is not None:
                cells = [cell for cell in cells if seen_by(reach, at, cell[1][0].position)]
            for below, other in enumerate(self.groups):
                if other.lower_level is not None and other.lower_level.token_group == g:
                    (lower,) = self.lines[below].values()
                    cells += [cell for slot in self.slots(below, tables[below]) if (cell := lower[slot]) is not None]
            views.append(told(cells))
        return tuple(views) if group.eviction_policy is not None else views[0]

    def encode(self, sources: Sequence[Sequence[int]], placed: EncoderAllocation) -> None:
        self.apply(placed.block_ops)
        own = sum(not group.spec.is_cross_attention for group in self.groups)
        written = [each for source in sources for each in written_source(source)]
        for g, slots in enumerate(placed.slots, own):
            for slot, (at, token, history) in zip(slots, written, strict=True):
                entry = Entry(at, token)
                self.write(g, slot, entry)
                entry.history = history

    def spoil(self, g: int, slot: int) -> None:
        self.writing[g, slot].history = 666


# ---------------------------------------------------------------- worlds


class PolicyWorld(World):
    memory: PolicyMemory

    def __init__(
        self,
        setup: Setup,
        *,
        ledger: type[KVCacheManager] = KVCacheManager,
        memory: type[FakeMemory] = PolicyMemory,
        check: bool = True,
    ) -> None:
        super().__init__(setup, ledger=ledger, memory=memory, check=check)

    def alone(self, root: bytes, tokens: Sequence[int], source: Sequence[int]) -> Solo:
        return PolicySolo(root, self.setup.groups(), tokens, source)

    def settle(
        self, plan: SchedulerOutput, faults: Callable[[TokenSequence], bool | str] = lambda row: False
    ) -> list[StreamChunk]:
        events = super().settle(plan, faults)
        self.memory.poison(self.ledger)
        return events

    def drain(self, most: int = 5000) -> None:
        super().drain(most)
        assert len(self.memory.parked) <= len(self.ledger._swapped.pending_drops), "what was parked is kept for nobody"


class PolicyDriver(Driver):
    world_type = PolicyWorld

    def operate(self) -> None:
        """Rows that spill lose what they spilled at times, and are computed again."""
        if "offload" in self.world.setup.config.policy and self.rng.random() < 0.2:
            self.world.step(faults=lambda row: self.rng.random() < 0.05 and "again")
        else:
            super().operate()


@pytest.mark.parametrize("name", POLICIES)
def test_every_stream_equals_its_solo_run(name: str) -> None:
    world = PolicyDriver(POLICIES[name], 1).run(500)
    assert {"stop", "length", "abort", "error"} <= set(world.ended)
    tight = POLICIES[name].config.layout == "paged"
    assert not tight or world.scheduler.stats().preemptions > 5, "the pool was never full"


@pytest.mark.long(minutes=20)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(300, 306))
def test_ten_thousand_operations_under_every_policy(name: str, seed: int) -> None:
    PolicyDriver(POLICIES[name], seed).run(10_000)


class PolicyLedgerWorld(LedgerWorld):
    """Rows fork, rewind, throw drafts away, are parked, woken and forgotten."""

    def __init__(
        self, setup: Setup, ledger: type[KVCacheManager] = KVCacheManager, memory: type[FakeMemory] = PolicyMemory
    ) -> None:
        super().__init__(setup, ledger, memory)
        self.asleep: list[tuple[SwappedSequence, Solo]] = []
        self.forgets |= any(mixer.window is not None for mixer in setup.config.restrict(setup.mixers))
        self.forks = self.woken = 0

    def alone(self, root: bytes, tokens: Sequence[int], source: Sequence[int]) -> Solo:
        return PolicySolo(root, self.setup.groups(), tokens, source)

    def extend(self, spans: dict[int, tuple[list[int], int]]) -> bool:
        within = {
            seat: (tokens[: self.ledger.tokens_until_eviction(seat)], keep) for seat, (tokens, keep) in spans.items()
        }
        done = super().extend(within)
        assert isinstance(self.memory, PolicyMemory)
        self.memory.poison(self.ledger)
        return done

    def fork(self, seat: int, child: int, length: int) -> None:
        super().fork(seat, child, length)
        self.forks += child in self.rows

    def rewind(self, seat: int, length: int) -> None:
        if seat not in self.ledger._swapped.pending_swap_ins:
            super().rewind(seat, length)

    def park(self, seat: int) -> None:
        if self.ledger.lossy and not self.rows[seat].source:
            self.asleep.append((self.ledger.swap_out(seat), self.rows.pop(seat)))

    def wake(self, seat: int) -> None:
        if self.asleep and seat not in self.rows and self.ledger.swap_in(seat, self.asleep[0][0]):
            self.rows[seat] = self.asleep.pop(0)[1]
            self.woken += 1

    def forget(self) -> None:
        if self.asleep:
            self.ledger.drop_swapped(self.asleep.pop()[0])

    def operate(self, rng: random.Random, stems: Sequence[Sequence[int]]) -> None:
        draw, seat = rng.random(), rng.randrange(self.seats)
        if draw < 0.06 and seat in self.rows:
            self.park(seat)
        elif draw < 0.14:
            self.wake(seat)
        elif draw < 0.145:
            self.forget()
        else:
            super().operate(rng, stems)


@pytest.mark.parametrize("name", POLICIES)
def test_forks_rewinds_drafts_and_parked_rows_equal_solo_runs(name: str) -> None:
    world = PolicyLedgerWorld.random_run(POLICIES[name], 5, 700)
    assert isinstance(world, PolicyLedgerWorld)
    watched = world.ledger._observes_attention
    assert watched or world.forks > 5
    assert not world.ledger.lossy or name == "translating" or world.woken > 5


@pytest.mark.long(minutes=20)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(400, 406))
def test_ten_thousand_forks_rewinds_drafts_and_parked_rows(name: str, seed: int) -> None:
    PolicyLedgerWorld.random_run(POLICIES[name], seed, 10_000)


class PolicyStreamMachine(StreamMachine):
    @initialize(name=st.sampled_from(sorted(POLICIES)))
    def start(self, name: str) -> None:
        self.begin(PolicyWorld(POLICIES[name]))

    @precondition(lambda self: self.world.scheduler._running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """For no reason at all."""
        self.world.scheduler._preempt(data.draw(st.sampled_from(self.world.scheduler._running)))


class TestPolicyStreamMachine(PolicyStreamMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(MACHINE, max_examples=50, stateful_step_count=30)


@pytest.mark.long(minutes=10)
class TestPolicyStreamMachineLong(PolicyStreamMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(MACHINE, max_examples=1000, stateful_step_count=60, derandomize=False)


# ---------------------------------------------------------------- broken on purpose


class NothingParked(PolicyMemory):
    """Takes the blocks of a woken row as they are."""

    def park_and_wake(self, moves: BlockOps) -> None:
        pass


class OneCutAfterTheOther(PolicyMemory):
    """Writes what one cut leaves before the next one reads."""

    def compact(self, g: int, cuts: Sequence[EvictOp]) -> None:
        for cut in cuts:
            super().compact(g, [cut])


class RunsPastCuts(KVCacheManager):
    def tokens_until_eviction(self, row: int) -> int:
        return 1 << 30


class KeepsASiblingsBounds(KVCacheManager):
    """Does not empty a block of later tokens before it is written."""

    def __init__(self, placed: Sequence[CacheGroup], **given: object) -> None:
        super().__init__(placed, **given)  # type: ignore[arg-type]
        for rules in self.block_mappings:
            rules.has_block_bounds = False


class SharesSummaries(KVCacheManager):
    """Fills a block of summaries that another row reads, too."""

    def __init__(self, placed: Sequence[CacheGroup], **given: object) -> None:
        super().__init__(placed, **given)  # type: ignore[arg-type]
        self._allocator.demotion._is_shared = lambda *_: False  # type: ignore[method-assign]


class AtOnce(list[tuple[BlockPool, int]]):
    """What a level gives on, free before the other rows have moved."""

    def extend(self, passed: Iterable[tuple[BlockPool, int]]) -> None:
        for pool, block in passed:
            pool.decref(block)


def objects(name: str, *, alone: bool = False, operations: int = 3000, **parts: object) -> None:
    """``alone``: the ledger's world.  Invariants are not checked, so that it is the streams that notice, in
    one of a few runs."""

    def run() -> None:
        for seed in range(1, 7):
            if alone:
                PolicyLedgerWorld.random_run(POLICIES[name], seed, operations, check=False, **parts)
            else:
                PolicyDriver(POLICIES[name], seed, check=False, **parts).run(operations)

    with pytest.raises(Mismatch):
        run()


@pytest.mark.parametrize("name", ["ranked", "watched", "levels", "translating"])
def test_without_parking_streams_differ(name: str) -> None:
    objects(name, memory=NothingParked)


def cut_side_by_side(memory: type[FakeMemory]) -> None:
    """Two rows that share their first block are cut in one step; the first gets the block that the second leaves."""
    world = PolicyLedgerWorld(POLICIES["ranked"], memory=memory)
    world.admit(0, [0], b"")
    for length in (4, 8, 9):
        world.extend({0: ([1] * (length - world.ledger.seq_len(0)), 8)})
    world.fork(0, 1, 9)
    for row in (0, 1):
        world.extend({row: ([row + 2] * 3, 3)})
    assert [world.ledger.seq_len(row) for row in (0, 1)] == [12, 12]
    world.extend({0: ([5], 1), 1: ([6], 1)})
    world.check()


def test_cuts_done_one_after_the_other_are_noticed() -> None:
    cut_side_by_side(PolicyMemory)
    with pytest.raises(Mismatch):
        cut_side_by_side(OneCutAfterTheOther)


@pytest.mark.parametrize("name", ["ranked", "levels"])
def test_a_chunk_that_runs_past_a_cut_is_noticed(name: str) -> None:
    with pytest.raises((Mismatch, AssertionError)):
        PolicyDriver(POLICIES[name], 1, ledger=RunsPastCuts).run(2000)


def test_a_siblings_bounds_are_noticed() -> None:
    objects("quest", alone=True, ledger=KeepsASiblingsBounds)


def test_a_shared_block_of_summaries_is_noticed() -> None:
    objects("levels-tight", alone=True, ledger=SharesSummaries)


def test_a_level_that_gives_on_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = DemotionOps.__init__

    def eager(self: DemotionOps, groups: int) -> None:
        made(self, groups)
        self.freed_later = AtOnce()

    monkeypatch.setattr(DemotionOps, "__init__", eager)
    objects("levels-tight", alone=True)
