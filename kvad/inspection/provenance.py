"""Origin of a sequence's tokens at admission, their way out at preemption, and the storage of an engine at the end.

Plain values in, texts out; called by the tracer (``cache_trace.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvad.cache import manager
from kvad.engine import Engine, scheduling
from kvad.errors import format_count
from kvad.inspection.trace_report import Reason, StorageReport, TraceStep

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


class TokenOrigin(NamedTuple):
    """Origin of the first ``tokens`` at an admission.

    ``source``: "found" (in the pool's prefix cache and in block stores: ``restored`` has the location by group and
    block), "restored" (left by an earlier request, described by ``session``), "back" (its own copy, from ``location``)
    or "shared" (with the sample that it was forked from).
    """

    step: int
    source: str = "found"
    tokens: int = 0
    size: int = 1  # of a block
    location: str = ""
    session: str = ""
    restored: Mapping[tuple[int, int], str] = {}

    def describe(self, group: int, at: int, length: int, lower: str) -> Reason:
        """Return why token ``at`` is there, in the state ``lower`` if it is stored in another form."""
        when, form = f"at step {self.step}", f", {lower}" if lower else ""
        if self.source == "restored":
            return Reason("restored", f"restored {when} from {self.session}{form}", length, source="session")
        if self.source == "back":
            return Reason(
                "swapped-in",
                f"swapped in {when}, from {SWAP_LOCATIONS[self.location]}{form}",
                length,
                source=self.location,
            )
        place = self.restored.get((group, at // self.size))
        if place is not None:
            return Reason(
                "prefix-cache", f"read back from {PREFIX_CACHE_LOCATIONS[place]} {when}", length, source=place
            )
        return Reason("hit", f"found {when} in the prefix cache, in the pool", length, source="pool")


def restored_locations(found: manager.prefix_offload.PrefetchResult | None) -> dict[tuple[int, int], str]:
    """Map (group, block of the sequence) to the location that it was read from."""
    blocks = () if found is None else found.blocks
    return {(group, each.depth - 1): each.location for each in blocks for group in each.groups}


# ---------------------------------------------------------------- a row's life


def admission_origin(
    origin: TokenOrigin, found: manager.prefix_offload.PrefetchResult | None, nbytes: int, miss_reason: str
) -> str:
    """Describe an admission; ``missed`` is the reason why an earlier request's state was not used."""
    known = format_count(origin.tokens, "token")
    size = f" ({nbytes:,} bytes)" if nbytes else ""
    if origin.source == "shared":
        return f", {known} shared with sample 0"
    if origin.source == "restored":
        return f", {known} restored from {origin.session}{size}"
    if origin.source == "back":
        return f", {known} back from {SWAP_LOCATIONS[origin.location]}{size}"
    text = f", {known} found in the prefix cache: {_describe_locations(origin, found)}" if origin.tokens else ""
    if found is not None and found.miss_reason:
        text += (
            f"; {MISSING_TEXT.get(found.miss_reason, 'the block stores returned no more of it')} ({found.miss_reason})"
        )
    return text + (f"; {origin.session} cannot be used: {miss_reason}" if miss_reason else "")


def _describe_locations(origin: TokenOrigin, found: manager.prefix_offload.PrefetchResult | None) -> str:
    """Count the tokens by location."""
    blocks, nbytes = Counter[str](), Counter[str]()
    for each in () if found is None else found.blocks:
        blocks[each.location] += 1
        nbytes[each.location] += each.nbytes
    if found is not None and found.num_skipped:
        blocks[found.blocks[0].location] += found.num_skipped  # whatever brought the rest made these free
    pool = origin.tokens - sum(blocks.values()) * origin.size
    text = [f"{pool} in the pool"] if pool or not blocks else []
    for place, count in blocks.items():
        text.append(f"{count * origin.size} read back from {PREFIX_CACHE_LOCATIONS[place]} ({nbytes[place]:,} bytes)")
    return ", ".join(text)


def preemption_reason(swapped: scheduling.preemption.PreemptionRecord, held: int) -> tuple[str, str]:
    """Return the cause and the event text of a preempted sequence of ``held`` tokens."""
    if swapped.action == "out":
        return (
            "swapped-out",
            (
                f"swapped out: {format_count(held, 'token')}, {swapped.nbytes:,} bytes, "
                f"to {SWAP_LOCATIONS[swapped.location]}"
            ),
        )
    return "preempted", f"preempted: its {format_count(held, 'token')} are to be recomputed"


def loss_reason(swapped: scheduling.preemption.PreemptionRecord) -> str:
    """Describe the outcome of a lost copy."""
    if swapped.action == "lost":
        return f"its copy is lost: {swapped.reason}"
    return "its copy is dropped: enough of it is in the prefix cache by now, the rest is recomputed"


def start_kind(swapped: scheduling.preemption.PreemptionRecord | None, forked: bool) -> str:
    """The way in which a row was seated."""
    if swapped is not None:
        return "restored" if swapped.location is None else "back"
    return "shared" if forked else "found"


def missing_reason(origin: TokenOrigin, length: int) -> Reason:
    """Why a token of the past is not there of which nothing else says why."""
    when = f"at step {origin.step}"
    if origin.source == "restored":
        return Reason("restored", f"not held by {origin.session} any more, {when}", length, source="session")
    return Reason("fork", f"not held any more by the sample that this row was forked from, {when}", length)


def storage_usage(engine: Engine, steps: Sequence[TraceStep]) -> tuple[StorageReport, ...]:
    """Those that the engine has.  What waits to be written to a tier is waited for, so that it counts."""
    return (_pool(engine, steps), *_prefix_cache_usage(engine), *_offload_usage(engine, steps), *_swap_usage(engine))


def _storage_report(
    name: str, nbytes: int, limit: int | None, blocks: int | None, of: int | None, peak: int | None, *more: str
) -> StorageReport:
    held = f"{nbytes:,} bytes" if limit is None else f"{nbytes:,} of {limit:,} bytes"
    if blocks is not None:
        held += f" in {blocks}" + (f" of {of}" if of is not None else "") + " blocks"
    parts = [held, *([] if peak is None else [f"at most {peak:,}"]), *(each for each in more if each)]
    return StorageReport(name, nbytes, limit, blocks, of, peak, f"{name}: {', '.join(parts)}")


def _pool(engine: Engine, steps: Sequence[TraceStep]) -> StorageReport:
    stats, sizes = engine.kv_cache_manager.stats(), engine.kv_cache.block_bytes()
    num_held = [used + idle for used, idle in zip(stats.used, stats.evictable, strict=True)]
    held = sum(count * size for count, size in zip(num_held, sizes, strict=True))
    whole = sum(count * size for count, size in zip(stats.total, sizes, strict=True))
    peak = max((sum(n * size for n, size in zip(step.used, sizes, strict=True)) for step in steps), default=0)
    more = f"{format_count(sum(stats.evictable), 'block')} kept for reuse" if any(stats.evictable) else ""
    evicted = f"{format_count(sum(stats.evictions), 'block')} evicted" if any(stats.evictions) else ""
    return _storage_report("pool", held, whole, sum(num_held), sum(stats.total), peak, more, evicted)


def _prefix_cache_usage(engine: Engine) -> Iterator[StorageReport]:
    if engine.block_store is None:
        return
    engine.block_store.flush()
    stats = engine.block_store.stats()
    ram, disk = stats.ram, stats.disk
    if ram.limit:
        packed = f"{ram.compressed} packed" if ram.compressed else ""
        gone = f"{format_count(ram.evictions, 'block')} evicted" if ram.evictions else ""
        yield _storage_report("RAM store", ram.bytes, ram.limit, ram.num_blocks, None, None, packed, gone)
    if disk.limit:
        pinned = f"{disk.pinned} pinned" if disk.pinned else ""
        moved = f"{disk.written_bytes:,} bytes written, {disk.read_bytes:,} read"
        off = f"off: {disk.disabled_reason}" if disk.disabled_reason else ""
        yield _storage_report("disk store", disk.bytes, disk.limit, disk.num_blocks, None, None, pinned, moved, off)


def _offload_usage(engine: Engine, steps: Sequence[TraceStep]) -> Iterator[StorageReport]:
    """Return the location of an offloaded block: the lowest indices are in host memory."""
    spill = engine.kv_cache.offload_reader
    if spill is None:
        return
    stats, pools, shares = spill.stats(), engine.kv_cache_manager.pools, spill.plan.shares
    for name, on_disk, read in (("offload RAM", False, stats.from_ram), ("offload disk", True, stats.from_disk)):
        bytes_of = {n: share.layers * share.block_bytes for n, share in shares.items()}
        room = {n: share.disk if on_disk else share.ram for n, share in shares.items()}
        if not any(room.values()):
            continue

        def lying(used: dict[int, int], on_disk: bool = on_disk) -> dict[int, int]:
            return {n: max(0, used[n] - s.ram) if on_disk else min(used[n], s.ram) for n, s in shares.items()}

        now = lying({n: pools[n].num_live for n in shares})
        peaks = (lying({n: step.used[n] for n in shares}) for step in steps)
        peak = max((sum(count * bytes_of[n] for n, count in at.items()) for at in peaks), default=0)
        held, limit = (sum(count * bytes_of[n] for n, count in at.items()) for at in (now, room))
        failed = f"{format_count(stats.failed, 'operation')} failed" if on_disk and stats.failed else ""
        blocks = sum(now.values()), sum(room.values())
        yield _storage_report(name, held, limit, *blocks, peak, f"{read:,} bytes read", failed)


def _swap_usage(engine: Engine) -> Iterator[StorageReport]:
    parking, stats = engine.preemption.swap_space, engine.preemption.stats()
    if parking is None:
        return
    parked = stats.swap_space
    if parking.ram or stats.to_ram:
        swapped = f"{format_count(stats.to_ram, 'row')} swapped there"
        yield _storage_report("swap RAM", parked.ram_bytes, parking.ram, None, None, parked.ram_peak, swapped)
    if parking.files is not None:
        written = f"{format_count(parked.written, 'row')} written ({parked.written_bytes:,} bytes)"
        read = f"{parked.read} read ({parked.read_bytes:,} bytes)"
        failed = f"{format_count(parked.failed, 'operation')} failed: {parked.fault}" if parked.failed else ""
        yield _storage_report("swap disk", parked.disk_bytes, None, None, None, None, written, read, failed)
