"""Origin of a sequence's tokens at admission, reasons of a preemption, and the storage in use at the end.

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


def origin_kind(record: scheduling.preemption.PreemptionRecord | None, *, forked: bool) -> str:
    """Return the ``source`` of a sequence's tokens at its admission."""
    if record is not None:
        return "restored" if record.location is None else "back"
    return "shared" if forked else "found"


def restored_locations(load: manager.prefix_offload.PrefetchResult | None) -> dict[tuple[int, int], str]:
    """Map (group, block of the sequence) to the block store that it was read from."""
    blocks = () if load is None else load.blocks
    return {(group, block.depth - 1): block.location for block in blocks for group in block.groups}


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
    text = f", {tokens} found in the prefix cache: {_describe_locations(origin, load)}" if origin.tokens else ""
    if load is not None and load.miss_reason:
        missing = MISSING_TEXT.get(load.miss_reason, "the block stores returned no more of it")
        text += f"; {missing} ({load.miss_reason})"
    return text + (f"; {origin.session} cannot be used: {miss_reason}" if miss_reason else "")


def _describe_locations(origin: TokenOrigin, load: manager.prefix_offload.PrefetchResult | None) -> str:
    """Count the tokens by location."""
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


def preemption_reason(record: scheduling.preemption.PreemptionRecord, length: int) -> tuple[str, str]:
    """Return the cause and the event text of a preempted sequence of ``length`` tokens."""
    tokens = format_count(length, "token")
    if record.action == "out":
        text = f"swapped out: {tokens}, {record.nbytes:,} bytes, to {SWAP_LOCATIONS[record.location]}"
        return "swapped-out", text
    return "preempted", f"preempted: its {tokens} are to be recomputed"


def loss_reason(record: scheduling.preemption.PreemptionRecord) -> str:
    """Describe the outcome of a lost copy."""
    if record.action == "lost":
        return f"its copy is lost: {record.reason}"
    return "its copy is dropped: enough of it is in the prefix cache by now, the rest is recomputed"


def missing_reason(origin: TokenOrigin, length: int) -> Reason:
    """Return the reason for a token that was absent when its sequence was admitted."""
    when = f"at step {origin.step}"
    if origin.source == "restored":
        return Reason("restored", f"not held by {origin.session} any more, {when}", length, source="session")
    return Reason("fork", f"not held any more by the sample that this sequence was forked from, {when}", length)


# ---------------------------------------------------------------- storage


def storage_usage(engine: Engine, steps: Sequence[TraceStep]) -> tuple[StorageReport, ...]:
    """Report each storage that the engine has, after pending writes to the block stores."""
    return (_pool(engine, steps), *_block_store(engine), *_offload(engine, steps), *_swap_space(engine))


def _report(
    name: str,
    num_bytes: int,
    limit: int | None,
    details: Sequence[str],
    *,
    blocks: int | None = None,
    of: int | None = None,
    peak: int | None = None,
) -> StorageReport:
    held = f"{num_bytes:,} bytes" if limit is None else f"{num_bytes:,} of {limit:,} bytes"
    if blocks is not None:
        held += f" in {blocks}" + (f" of {of}" if of is not None else "") + " blocks"
    parts = [held, *([] if peak is None else [f"at most {peak:,}"]), *filter(None, details)]
    return StorageReport(name, num_bytes, limit, blocks, of, peak, f"{name}: {', '.join(parts)}")


def _pool(engine: Engine, steps: Sequence[TraceStep]) -> StorageReport:
    stats, sizes = engine.kv_cache_manager.stats(), engine.kv_cache.block_bytes()
    held = [used + idle for used, idle in zip(stats.used, stats.evictable, strict=True)]

    def total_bytes(counts: Sequence[int]) -> int:
        return sum(count * size for count, size in zip(counts, sizes, strict=True))

    details = [
        f"{format_count(sum(stats.evictable), 'block')} kept for reuse" if any(stats.evictable) else "",
        f"{format_count(sum(stats.evictions), 'block')} evicted" if any(stats.evictions) else "",
    ]
    peak = max((total_bytes(step.used) for step in steps), default=0)
    limit = total_bytes(stats.total)
    return _report("pool", total_bytes(held), limit, details, blocks=sum(held), of=sum(stats.total), peak=peak)


def _block_store(engine: Engine) -> Iterator[StorageReport]:
    if engine.block_store is None:
        return
    engine.block_store.flush()
    stats = engine.block_store.stats()
    ram, disk = stats.ram, stats.disk
    if ram.limit:
        details = [
            f"{ram.compressed} packed" if ram.compressed else "",
            f"{format_count(ram.evictions, 'block')} evicted" if ram.evictions else "",
        ]
        yield _report("RAM store", ram.bytes, ram.limit, details, blocks=ram.num_blocks)
    if disk.limit:
        details = [
            f"{disk.pinned} pinned" if disk.pinned else "",
            f"{disk.written_bytes:,} bytes written, {disk.read_bytes:,} read",
            f"off: {disk.disabled_reason}" if disk.disabled_reason else "",
        ]
        yield _report("disk store", disk.bytes, disk.limit, details, blocks=disk.num_blocks)


def _offload(engine: Engine, steps: Sequence[TraceStep]) -> Iterator[StorageReport]:
    """Report offloaded blocks; those with the lowest indices are in host memory, the others on disk."""
    reader = engine.kv_cache.offload_reader
    if reader is None:
        return
    stats, shares = reader.stats(), reader.plan.shares
    live = {group: engine.kv_cache_manager.pools[group].num_live for group in shares}
    failed = f"{format_count(stats.failed, 'operation')} failed" if stats.failed else ""
    for name, on_disk, read in (("offload RAM", False, stats.from_ram), ("offload disk", True, stats.from_disk)):
        room = {group: share.disk if on_disk else share.ram for group, share in shares.items()}
        if not any(room.values()):
            continue
        blocks, num_bytes = _offloaded(engine, live, on_disk)
        peak = max((_offloaded(engine, step.used, on_disk)[1] for step in steps), default=0)
        limit = sum(count * shares[group].layers * shares[group].block_bytes for group, count in room.items())
        details = [f"{read:,} bytes read", failed if on_disk else ""]
        yield _report(name, num_bytes, limit, details, blocks=blocks, of=sum(room.values()), peak=peak)


def _offloaded(engine: Engine, used: Mapping[int, int] | Sequence[int], on_disk: bool) -> tuple[int, int]:
    """Return (blocks, bytes) in RAM or on disk if ``used`` blocks of each group are in use."""
    assert engine.kv_cache.offload_reader is not None
    blocks = num_bytes = 0
    for group, share in engine.kv_cache.offload_reader.plan.shares.items():
        count = max(0, used[group] - share.ram) if on_disk else min(used[group], share.ram)
        blocks, num_bytes = blocks + count, num_bytes + count * share.layers * share.block_bytes
    return blocks, num_bytes


def _swap_space(engine: Engine) -> Iterator[StorageReport]:
    space, stats = engine.preemption.swap_space, engine.preemption.stats()
    if space is None:
        return
    used = stats.swap_space
    if space.ram or stats.to_ram:
        details = [f"{format_count(stats.to_ram, 'row')} swapped there"]
        yield _report("swap RAM", used.ram_bytes, space.ram, details, peak=used.ram_peak)
    if space.files is not None:
        details = [
            f"{format_count(used.written, 'row')} written ({used.written_bytes:,} bytes)",
            f"{used.read} read ({used.read_bytes:,} bytes)",
            f"{format_count(used.failed, 'operation')} failed: {used.fault}" if used.failed else "",
        ]
        yield _report("swap disk", used.disk_bytes, None, details)
