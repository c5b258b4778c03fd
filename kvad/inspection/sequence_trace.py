"""Records of the tracer (``cache_trace.py``): states of a sequence's tokens, their reasons, storage in use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvad.cache import CacheGroup, manager
from kvad.cache.device import EvictionEvent
from kvad.engine import Engine, scheduling
from kvad.errors import format_count
from kvad.inspection import trace_report
from kvad.inspection.trace_report import (
    STATES,
    BlockChange,
    BlockUse,
    Reason,
    StateChange,
    StorageReport,
    TableChange,
    TraceStep,
)
from kvad.model_input import RESERVED_BLOCKS

NAMES = tuple(STATES)  # a state's code is its index here
SIGNS = "".join(STATES.values())
HOT, SHARED, QUANTIZED, SUMMARIZED, OFFLOADED, SWAPPED, EVICTED, UNWRITTEN = range(len(NAMES))
PREFIX_CACHE_LOCATIONS = {"ram": "the RAM store", "packed": "the RAM store (compressed)", "disk": "the disk store"}
SWAP_LOCATIONS = {"ram": "RAM", "disk": "disk", None: "RAM, beyond its bound"}
MISSING_TEXT = {
    "unknown": "the block stores have no more of it",
    "damaged": "the next block of it is damaged",
    "foreign": "the next block of it is of another version",
    "mismatch": "the next block of it is of another model",
    "collision": "the next block of it holds other tokens",
    "gone": "the next block of it was dropped from the block stores",
    "missing": "the next block of it was dropped from the block stores",
    "failed": "reading the next block of it failed",
    "withdrawn": "the next block of it was withdrawn",
    "moved": "the pool evicted more of it meanwhile",
    "no room": "the pool has no room for its blocks in the block stores",
}


class ReadableBlocks(NamedTuple):
    """Blocks of a group that a sequence can read."""

    blocks: tuple[int, ...]
    refs: tuple[int, ...]  # number of sequences that reference each
    held: Tensor | dict[int, Tensor]  # positions in their slots [S]; by layer [K, S] if heads differ


class SequenceTrace:
    """Trace of one sequence; lists are per token group, with a line per layer and head if heads differ."""

    def __init__(
        self, number: int, sequence: scheduling.sequence.TokenSequence, origin: TokenOrigin, lines: Sequence[int]
    ) -> None:
        self.number, self.sequence = number, sequence
        self.origin = origin  # of the last admission
        self.num_prefix_hits = origin.tokens if origin.source == "found" else 0
        self.restored = origin.tokens if origin.source == "restored" else 0
        self.codes = [torch.empty((count, 0), dtype=torch.uint8) for count in lines]  # [lines, positions]
        self.preempted_codes = self.codes  # at the last preemption
        self.changes: list[list[list[StateChange]]] = [[[] for _ in range(count)] for count in lines]
        self.mass: dict[int, Tensor] = {}  # layer -> attention [K, positions]
        self.tables: list[ReadableBlocks] = []
        self.published: set[tuple[int, int]] = set()  # (group, block)
        self.events: list[trace_report.SequenceEventRecord] = []
        self.is_swapped, self.length = False, 0
        self.finish: str | None = None
        self.error: str | None = None

    def grow(self, index: int, length: int) -> Tensor:
        """Return a group's codes of at least ``length`` positions."""
        codes = self.codes[index]
        more = max(0, length - codes.shape[1])
        codes = self.codes[index] = torch.cat((codes, codes.new_full((codes.shape[0], more), UNWRITTEN)), dim=1)
        return codes

    def record(self, index: int, line: int, change: StateChange) -> None:
        """Record a change; equal changes of neighboring positions are merged."""
        changes = self.changes[index][line]
        before = changes[-1] if changes else None
        if before is not None and before == change._replace(first=before.first, last=change.first - 1):
            changes[-1] = before._replace(last=change.last)
        else:
            changes.append(change)

    def block_uses(self, groups: Sequence[CacheGroup]) -> list[BlockUse]:
        """Return the blocks that the sequence could read after its last step."""
        uses = []
        for index, (table, group) in enumerate(zip(self.tables, groups, strict=False)):
            ratio, size = ratio_of(group), group.block_size
            for place, (block, refs) in enumerate(zip(table.blocks, table.refs, strict=True)):
                here = slice(place * size, (place + 1) * size)
                shares, tokens = [], set[int]()
                for layer in group.layers:
                    held = table.held[layer][:, here] if isinstance(table.held, dict) else table.held[here]
                    share, positions = _attention_share(held, self.mass[layer], self.length, ratio)
                    shares.append(share)
                    tokens |= positions
                ends = (min(tokens), max(tokens)) if tokens else (-1, -1)
                used = int((held >= 0).any(0).sum()) if held.dim() == 2 else int((held >= 0).sum()) * ratio
                published = (index, block) in self.published
                uses.append(BlockUse(index, block, used, *ends, refs, published, tuple(shares)))
        return uses


class BlockRecorder:
    """Records what each step changes in the pools and in the block tables of the sequences."""

    def __init__(self, kv_cache_manager: manager.KVCacheManager, groups: Sequence[CacheGroup]) -> None:
        self._pools, self._groups = kv_cache_manager.pools, groups
        self._blocks = [dict.fromkeys(range(RESERVED_BLOCKS, len(pool.refs)), (0, False)) for pool in self._pools]
        self._tables: dict[tuple[int, int], tuple[tuple[int, int, int, int], ...]] = {}

    def pool_changes(self) -> tuple[BlockChange, ...]:
        """Return the blocks whose references or publication changed since the last call."""
        changes = []
        for index, (pool, known) in enumerate(zip(self._pools, self._blocks, strict=True)):
            for block, before in known.items():
                now = pool.refs[block], pool.prefixes[block] is not None
                if now != before:
                    known[block] = now
                    changes.append(BlockChange(index, block, *now))
        return tuple(changes)

    def table_changes(
        self, rows: Iterable[SequenceTrace], computed: Collection[SequenceTrace]
    ) -> Iterator[TableChange]:
        """Yield the changed tables; those of sequences that are swapped out or ended are empty.

        Args:
            rows: All sequences.
            computed: Those of this step.
        """
        for row in rows:
            is_gone = row.is_swapped or (row.finish is not None and row not in computed)
            for index, group in enumerate(self._groups if is_gone or row in computed else ()):
                key = row.number, index
                now = () if is_gone else table_entries(row.tables[index], group)
                before = self._tables.get(key, ())
                if now != before:
                    self._tables[key] = now
                    equal = (at for at, pair in enumerate(zip(before, now, strict=False)) if pair[0] != pair[1])
                    start = next(equal, min(len(before), len(now)))
                    yield TableChange(row.number, index, start, now[start:])


def table_entries(table: ReadableBlocks, group: CacheGroup) -> tuple[tuple[int, int, int, int], ...]:
    """Return (block, filled slots, first position, last position) of each block that the sequence can read.

    If heads retain different tokens, the slots are those of the head with most of them.
    """
    held = torch.cat(list(table.held.values())) if isinstance(table.held, dict) else table.held.unsqueeze(0)
    in_blocks = held.unflatten(1, (len(table.blocks), group.block_size)) if table.blocks else held.new_empty(1, 0, 1)
    used = (in_blocks >= 0).sum(2).amax(0)
    far = torch.iinfo(in_blocks.dtype).max
    first = in_blocks.masked_fill(in_blocks < 0, far).amin((0, 2)) if table.blocks else used
    last = in_blocks.amax((0, 2)) if table.blocks else used
    entries = zip(table.blocks, used.tolist(), first.tolist(), last.tolist(), strict=True)
    return tuple((block, count, low if count else -1, high if count else -1) for block, count, low, high in entries)


def ratio_of(group: CacheGroup) -> int:
    return 1 if group.lower_level is None else group.lower_level.ratio


def level_state(group: CacheGroup) -> int:
    """Return the state of tokens in this group, if no other sequence shares their block."""
    if group.lower_level is None:
        return HOT
    if group.lower_level.is_offloaded:
        return OFFLOADED
    return QUANTIZED if group.lower_level.ratio == 1 else SUMMARIZED


def _attention_share(held: Tensor, mass: Tensor, known: int, ratio: int) -> tuple[float, set[int]]:
    """Return the share of a layer's attention [K, T] of the tokens in these slots ([S] or [K, S]), and the tokens."""
    share, positions = 0.0, set[int]()
    for total, in_slots in zip(mass.tolist(), held.expand(len(mass), -1).tolist(), strict=True):
        tokens = [at // ratio * ratio + more for at in in_slots if 0 <= at < known for more in range(ratio)]
        share += sum(total[at] for at in tokens)
        positions.update(tokens)
    whole = float(mass.sum())
    return (share / whole if whole else 0.0), positions


def scatter_by_position(held: Tensor, values: Tensor, end: int, empty: int = 0) -> Tensor:
    """Scatter values [n, S] of slots that hold positions [n, S] -> [n, end]; ``empty`` where no slot has the position.

    Values of slots that hold the same position are added, if ``empty`` is 0.
    """
    known = (held >= 0) & (held < end)
    index, out = held.masked_fill(~known, end), values.new_full((held.shape[0], end + 1), empty)
    return (out.scatter_(1, index, values) if empty else out.scatter_add_(1, index, values * known))[:, :end]


def spread_summaries(mass: Tensor, positions: Tensor, ratio: int) -> None:
    """Distribute the attention of each summary (at ``positions``) evenly over its tokens, in place."""
    for middle in positions[positions >= 0].tolist() if ratio > 1 else ():
        first = middle // ratio * ratio
        mass[:, first : first + ratio] = mass[:, middle : middle + 1].clone() / ratio


def eviction_reasons(event: EvictionEvent, head: int, policy: str, step: int) -> dict[int, Reason]:
    """Return the reasons of an eviction by position."""
    scores, positions, stays = event.scores[head], event.positions[head].tolist(), set(event.order[head].tolist())
    order = scores.sort(descending=True, stable=True).indices.tolist()
    ranks = {slot: rank for rank, slot in enumerate(order, 1)}
    values, length, count = scores.tolist(), event.op.length, len(positions)
    ranked = [values[slot] for slot in stays if values[slot] != float("inf")]
    least = min(ranked) if ranked else None
    retained = "only sinks and recent ones stayed" if least is None else f"the lowest that stayed has {least:.4g}"
    reasons = {}
    for slot, position in enumerate(positions):
        if slot not in stays:
            rank = f"rank {ranks[slot]} of {count} ({ranks[slot] / count:.0%})"
            score = f"score {values[slot]:.4g}, {rank}; {retained}"
            text = f"dropped at step {step} by {policy} at length {length}: {score}"
            reasons[position] = Reason("score", text, length, values[slot], ranks[slot], count, least)
    return reasons


class TokenOrigin(NamedTuple):
    """Origin of a sequence's first tokens at an admission.

    ``source``: "found" (in the pool's prefix cache and in block stores), "restored" (left by an earlier request),
    "back" (its own copy) or "shared" (with the sample that it was forked from).
    """

    step: int
    source: str = "found"
    tokens: int = 0
    block_size: int = 1
    location: str = ""  # of its own copy
    session: str = ""  # description of the earlier request
    locations: Mapping[tuple[int, int], str] = {}  # (group, block) -> block store

    def describe(self, group: int, at: int, length: int, lower: str) -> Reason:
        """Return why token ``at`` is there, in the state ``lower`` if it is stored in another form."""
        when, form = f"at step {self.step}", f", {lower}" if lower else ""
        if self.source == "restored":
            return Reason("restored", f"restored {when} from {self.session}{form}", length, source="session")
        if self.source == "back":
            text = f"swapped in {when}, from {SWAP_LOCATIONS[self.location]}{form}"
            return Reason("swapped-in", text, length, source=self.location)
        store = self.locations.get((group, at // self.block_size))
        if store is not None:
            text = f"read back from {PREFIX_CACHE_LOCATIONS[store]} {when}"
            return Reason("prefix-cache", text, length, source=store)
        return Reason("hit", f"found {when} in the prefix cache, in the pool", length, source="pool")


def admission_text(
    origin: TokenOrigin, load: manager.prefix_offload.PrefetchResult | None, nbytes: int, miss_reason: str
) -> str:
    """Describe an admission; ``miss_reason``: why an earlier request's state was not used."""
    tokens, size = format_count(origin.tokens, "token"), f" ({nbytes:,} bytes)" if nbytes else ""
    if origin.source == "shared":
        return f", {tokens} shared with sample 0"
    if origin.source == "restored":
        return f", {tokens} restored from {origin.session}{size}"
    if origin.source == "back":
        return f", {tokens} back from {SWAP_LOCATIONS[origin.location]}{size}"
    text = f", {tokens} found in the prefix cache: {_format_locations(origin, load)}" if origin.tokens else ""
    if load is not None and load.miss_reason:
        missing = MISSING_TEXT.get(load.miss_reason, "the block stores returned no more of it")
        text += f"; {missing} ({load.miss_reason})"
    return text + (f"; {origin.session} cannot be used: {miss_reason}" if miss_reason else "")


def _format_locations(origin: TokenOrigin, load: manager.prefix_offload.PrefetchResult | None) -> str:
    blocks, nbytes = Counter[str](), Counter[str]()
    for block in () if load is None else load.blocks:
        blocks[block.location] += 1
        nbytes[block.location] += block.nbytes
    if load is not None and load.num_skipped:
        blocks[load.blocks[0].location] += load.num_skipped  # outside the window: the later blocks imply them
    pool = origin.tokens - sum(blocks.values()) * origin.block_size
    parts = [f"{pool} in the pool"] if pool or not blocks else []
    for store, count in blocks.items():
        tokens = count * origin.block_size
        parts.append(f"{tokens} read back from {PREFIX_CACHE_LOCATIONS[store]} ({nbytes[store]:,} bytes)")
    return ", ".join(parts)


def missing_reason(origin: TokenOrigin, length: int) -> Reason:
    """Return the reason for a token that was absent when its sequence was admitted."""
    when = f"at step {origin.step}"
    if origin.source == "restored":
        return Reason("restored", f"not held by {origin.session} any more, {when}", length, source="session")
    return Reason("fork", f"not held any more by the sample that this sequence was forked from, {when}", length)


def storage_usage(engine: Engine, steps: Sequence[TraceStep]) -> tuple[StorageReport, ...]:
    """Report each storage that the engine has, after pending writes to the block stores."""
    return _pool(engine, steps), *_block_store(engine), *_offload(engine, steps), *_swap_space(engine)


def _with_text(report: StorageReport, *details: str) -> StorageReport:
    held = f"{report.bytes:,} bytes" if report.limit is None else f"{report.bytes:,} of {report.limit:,} bytes"
    if report.blocks is not None:
        held += f" in {report.blocks} blocks" if report.of is None else f" in {report.blocks} of {report.of} blocks"
    parts = filter(None, [held, "" if report.peak is None else f"at most {report.peak:,}", *details])
    return report._replace(text=f"{report.location}: {', '.join(parts)}")


def _counted(number: int, noun: str, what: str) -> str:
    return f"{format_count(number, noun)} {what}" if number else ""


def _pool(engine: Engine, steps: Sequence[TraceStep]) -> StorageReport:
    stats, sizes = engine.kv_cache_manager.stats(), engine.kv_cache.block_bytes()
    held = [used + idle for used, idle in zip(stats.used, stats.evictable, strict=True)]

    def total_bytes(counts: Sequence[int]) -> int:
        return sum(count * size for count, size in zip(counts, sizes, strict=True))

    peak = max((total_bytes(step.used) for step in steps), default=0)
    report = StorageReport("pool", total_bytes(held), total_bytes(stats.total), sum(held), sum(stats.total), peak)
    reusable = _counted(sum(stats.evictable), "block", "kept for reuse")
    return _with_text(report, reusable, _counted(sum(stats.evictions), "block", "evicted"))


def _block_store(engine: Engine) -> Iterator[StorageReport]:
    if engine.block_store is None:
        return
    engine.block_store.flush()
    stats = engine.block_store.stats()
    ram, disk = stats.ram, stats.disk
    if ram.limit:
        details = [f"{ram.compressed} packed" if ram.compressed else "", _counted(ram.evictions, "block", "evicted")]
        yield _with_text(StorageReport("RAM store", ram.bytes, ram.limit, ram.num_blocks), *details)
    if disk.limit:
        details = [
            f"{disk.pinned} pinned" if disk.pinned else "",
            f"{disk.written_bytes:,} bytes written, {disk.read_bytes:,} read",
            f"off: {disk.disabled_reason}" if disk.disabled_reason else "",
        ]
        yield _with_text(StorageReport("disk store", disk.bytes, disk.limit, disk.num_blocks), *details)


def _offload(engine: Engine, steps: Sequence[TraceStep]) -> Iterator[StorageReport]:
    """Report offloaded blocks; those with the lowest indices are in host memory, the others on disk."""
    reader = engine.kv_cache.offload_reader
    if reader is None:
        return
    stats, shares = reader.stats(), reader.plan.shares
    live = [pool.num_live for pool in engine.kv_cache_manager.pools]
    failed = _counted(stats.failed, "operation", "failed")

    def total_bytes(counts: Mapping[int, int]) -> int:
        return sum(count * shares[group].layers * shares[group].block_bytes for group, count in counts.items())

    def stored(used: Sequence[int], on_disk: bool) -> dict[int, int]:
        in_ram = {group: min(used[group], share.ram) for group, share in shares.items()}
        return {group: used[group] - count for group, count in in_ram.items()} if on_disk else in_ram

    for name, on_disk, read in (("offload RAM", False, stats.from_ram), ("offload disk", True, stats.from_disk)):
        room = {group: share.disk if on_disk else share.ram for group, share in shares.items()}
        if any(room.values()):
            blocks = stored(live, on_disk)
            peak = max((total_bytes(stored(step.used, on_disk)) for step in steps), default=0)
            counts = sum(blocks.values()), sum(room.values()), peak
            report = StorageReport(name, total_bytes(blocks), total_bytes(room), *counts)
            yield _with_text(report, f"{read:,} bytes read", failed * on_disk)


def _swap_space(engine: Engine) -> Iterator[StorageReport]:
    space, stats = engine.preemption.swap_space, engine.preemption.stats()
    if space is None:
        return
    used = stats.swap_space
    if space.ram or stats.to_ram:
        swapped = f"{format_count(stats.to_ram, 'row')} swapped there"
        yield _with_text(StorageReport("swap RAM", used.ram_bytes, space.ram, peak=used.ram_peak), swapped)
    if space.files is not None:
        details = [
            f"{format_count(used.written, 'row')} written ({used.written_bytes:,} bytes)",
            f"{used.read} read ({used.read_bytes:,} bytes)",
            _counted(used.failed, "operation", f"failed: {used.fault}"),
        ]
        yield _with_text(StorageReport("swap disk", used.disk_bytes, None), *details)
