"""Where an engine's cache lives at the end of a run: pool, tiers, spill, parking; bytes, blocks, and in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvad.engine.engine import Engine
from kvad.errors import format_count
from kvad.lab.slide import StorageReport, TraceStep

__all__ = ["storage_usage"]


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
    kept = [used + idle for used, idle in zip(stats.used, stats.evictable, strict=True)]
    held = sum(count * size for count, size in zip(kept, sizes, strict=True))
    whole = sum(count * size for count, size in zip(stats.total, sizes, strict=True))
    peak = max((sum(n * size for n, size in zip(step.used, sizes, strict=True)) for step in steps), default=0)
    more = f"{format_count(sum(stats.evictable), 'block')} kept for reuse" if any(stats.evictable) else ""
    evicted = f"{format_count(sum(stats.evictions), 'block')} evicted" if any(stats.evictions) else ""
    return _storage_report("pool", held, whole, sum(kept), sum(stats.total), peak, more, evicted)


def _prefix_cache_usage(engine: Engine) -> Iterator[StorageReport]:
    if engine.block_store is None:
        return
    engine.block_store.flush()
    stats = engine.block_store.stats()
    ram, disk = stats.ram, stats.disk
    if ram.limit:
        packed = f"{ram.compressed} packed" if ram.compressed else ""
        gone = f"{format_count(ram.evictions, 'block')} evicted" if ram.evictions else ""
        yield _storage_report("tier RAM", ram.bytes, ram.limit, ram.num_blocks, None, None, packed, gone)
    if disk.limit:
        pinned = f"{disk.pinned} pinned" if disk.pinned else ""
        moved = f"{disk.written_bytes:,} bytes written, {disk.read_bytes:,} read"
        off = f"off: {disk.disabled_reason}" if disk.disabled_reason else ""
        yield _storage_report("tier disk", disk.bytes, disk.limit, disk.num_blocks, None, None, pinned, moved, off)


def _offload_usage(engine: Engine, steps: Sequence[TraceStep]) -> Iterator[StorageReport]:
    """Of a group that is spilled, the lowest numbers lie in host memory."""
    spill = engine.kv_cache.offload_reader
    if spill is None:
        return
    stats, pools, shares = spill.stats(), engine.kv_cache_manager.pools, spill.plan.shares
    for name, on_disk, read in (("spilled RAM", False, stats.from_ram), ("spilled disk", True, stats.from_disk)):
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
        yield _storage_report("parked RAM", parked.ram_bytes, parking.ram, None, None, parked.ram_peak, swapped)
    if parking.files is not None:
        written = f"{format_count(parked.written, 'row')} written ({parked.written_bytes:,} bytes)"
        read = f"{parked.read} read ({parked.read_bytes:,} bytes)"
        failed = f"{format_count(parked.failed, 'operation')} failed: {parked.fault}" if parked.failed else ""
        yield _storage_report("parked disk", parked.disk_bytes, None, None, None, None, written, read, failed)
