"""Where an engine's cache lives at the end of a run: pool, tiers, spill, parking; bytes, blocks, and in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvad.engine.engine import Engine
from kvad.errors import counted
from kvad.lab.slide import Place, Step

__all__ = ["places"]


def places(engine: Engine, steps: Sequence[Step]) -> tuple[Place, ...]:
    """Those that the engine has.  What waits to be written to a tier is waited for, so that it counts."""
    return (_pool(engine, steps), *_tiers(engine), *_spill(engine, steps), *_parking(engine))


def _place(
    name: str, nbytes: int, limit: int | None, blocks: int | None, of: int | None, peak: int | None, *more: str
) -> Place:
    held = f"{nbytes:,} bytes" if limit is None else f"{nbytes:,} of {limit:,} bytes"
    if blocks is not None:
        held += f" in {blocks}" + (f" of {of}" if of is not None else "") + " blocks"
    parts = [held, *([] if peak is None else [f"at most {peak:,}"]), *(each for each in more if each)]
    return Place(name, nbytes, limit, blocks, of, peak, f"{name}: {', '.join(parts)}")


def _pool(engine: Engine, steps: Sequence[Step]) -> Place:
    stats, sizes = engine.ledger.stats(), engine.memory.block_bytes()
    kept = [used + idle for used, idle in zip(stats.used, stats.evictable, strict=True)]
    held = sum(count * size for count, size in zip(kept, sizes, strict=True))
    whole = sum(count * size for count, size in zip(stats.total, sizes, strict=True))
    peak = max((sum(n * size for n, size in zip(step.used, sizes, strict=True)) for step in steps), default=0)
    more = f"{counted(sum(stats.evictable), 'block')} kept for reuse" if any(stats.evictable) else ""
    evicted = f"{counted(sum(stats.evictions), 'block')} evicted" if any(stats.evictions) else ""
    return _place("pool", held, whole, sum(kept), sum(stats.total), peak, more, evicted)


def _tiers(engine: Engine) -> Iterator[Place]:
    if engine.tiers is None:
        return
    engine.tiers.flush()
    stats = engine.tiers.stats()
    ram, disk = stats.ram, stats.disk
    if ram.limit:
        packed = f"{ram.packed} packed" if ram.packed else ""
        gone = f"{counted(ram.evictions, 'block')} evicted" if ram.evictions else ""
        yield _place("tier RAM", ram.bytes, ram.limit, ram.entries, None, None, packed, gone)
    if disk.limit:
        pinned = f"{disk.pinned} pinned" if disk.pinned else ""
        moved = f"{disk.written_bytes:,} bytes written, {disk.read_bytes:,} read"
        off = f"off: {disk.off}" if disk.off else ""
        yield _place("tier disk", disk.bytes, disk.limit, disk.entries, None, None, pinned, moved, off)


def _spill(engine: Engine, steps: Sequence[Step]) -> Iterator[Place]:
    """Of a group that is spilled, the lowest numbers lie in host memory."""
    spill = engine.memory.spill
    if spill is None:
        return
    stats, pools, shares = spill.stats(), engine.ledger.pools, spill.plan.shares
    for name, on_disk, read in (("spilled RAM", False, stats.from_ram), ("spilled disk", True, stats.from_disk)):
        bytes_of = {n: share.layers * share.line for n, share in shares.items()}
        room = {n: share.disk if on_disk else share.ram for n, share in shares.items()}
        if not any(room.values()):
            continue

        def lying(used: dict[int, int], on_disk: bool = on_disk) -> dict[int, int]:
            return {n: max(0, used[n] - s.ram) if on_disk else min(used[n], s.ram) for n, s in shares.items()}

        now = lying({n: pools[n].live for n in shares})
        peaks = (lying({n: step.used[n] for n in shares}) for step in steps)
        peak = max((sum(count * bytes_of[n] for n, count in at.items()) for at in peaks), default=0)
        held, limit = (sum(count * bytes_of[n] for n, count in at.items()) for at in (now, room))
        failed = f"{counted(stats.failed, 'operation')} failed" if on_disk and stats.failed else ""
        blocks = sum(now.values()), sum(room.values())
        yield _place(name, held, limit, *blocks, peak, f"{read:,} bytes read", failed)


def _parking(engine: Engine) -> Iterator[Place]:
    parking, stats = engine.swaps.parking, engine.swaps.stats()
    if parking is None:
        return
    parked = stats.parking
    if parking.ram or stats.to_ram:
        swapped = f"{counted(stats.to_ram, 'row')} swapped there"
        yield _place("parked RAM", parked.ram, parking.ram, None, None, parked.ram_peak, swapped)
    if parking.files is not None:
        written = f"{counted(parked.written, 'row')} written ({parked.written_bytes:,} bytes)"
        read = f"{parked.read} read ({parked.read_bytes:,} bytes)"
        failed = f"{counted(parked.failed, 'operation')} failed: {parked.fault}" if parked.failed else ""
        yield _place("parked disk", parked.disk, None, None, None, None, written, read, failed)
