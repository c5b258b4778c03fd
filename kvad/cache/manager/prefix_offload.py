"""The ledger's side of the tiers: which blocks are copied out under which name, and which a waiting row is fetched.

A published block is *deposited* under the name of its history: a key (the ledger's digest, for finding), the block's
own tokens, and a proof of all that stands before it, a digest of 256 bits that is not the ledger's.  What a tier gives
back is used only if tokens and proof are those of the row that asks: with keys of 8 bits it hits less often, and is
never wrong.

``fetch`` asks the tiers for what of a row's blocks is in no pool; it is a plain value that is polled, and what it
brings stays in host memory until the row is admitted.  Only then are blocks taken and filled, in the same moves as
everything else (``step.Moves.load``): a request that ends while its blocks are still on their way leaves nothing
behind, and what comes late comes into memory that is nobody's.

Blocks that were loaded are published when the row commits, like those that it computed: what comes out must be finite
first.  Integers only, no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, Protocol

from kvad import storage
from kvad.cache.config import CacheConfig
from kvad.cache.groups import CacheGroup
from kvad.cache.manager.block_pool import PrefixNode
from kvad.errors import ConfigError


def check_shareable(cache: CacheConfig, placed: Sequence[CacheGroup]) -> None:
    """ConfigError: the cache is to have tiers, and none of its blocks is one that another request could use."""
    if cache.prefix_cache_dir is None and cache.prefix_cache_ram is None:
        return
    own = [group for group in placed if not group.spec.is_cross_attention and group.lower_level is None]
    if not own or any(group.eviction_policy is not None or group.demotion_policy is not None for group in own):
        what = f"under policy {cache.resolved_policy} each row keeps its own" if own else "an encoder keeps nothing"
        raise ConfigError(
            f"cache.prefix_cache_dir: {what}: there is no block that another request could use", "leave it out"
        )


class BlockKey(NamedTuple):
    """Of a stored block: ``key`` finds it, ``parent`` and ``tokens`` (int64, packed) must be equal before it is
    used."""

    key: str
    parent_digest: str
    tokens: bytes


class LoadHandle:
    """One block on its way: ``pieces`` by group when it came, ``why`` not where it did not; ``place``: from where,
    ``packed``: where it lay packed."""

    __slots__ = ("__weakref__", "buffers", "done", "groups", "location", "miss_reason", "name", "was_compressed")

    def __init__(self, name: BlockKey, groups: tuple[int, ...]) -> None:
        self.name, self.groups = name, groups
        self.done, self.location, self.miss_reason = False, "", ""
        self.was_compressed = False
        self.buffers: Mapping[int, storage.filesystem.Buffer] | None = None

    def complete(self, pieces: Mapping[int, storage.filesystem.Buffer], place: str) -> None:
        self.buffers, self.location = pieces, place
        self.done = True

    def fail(self, why: str) -> None:
        self.buffers, self.miss_reason = None, why
        self.done = True


class BlockStoreProtocol(Protocol):
    """What keeps blocks outside the pools (``tiers.py``; a fake in the tests).  Nothing here waits for a disk."""

    def has(self, key: str) -> bool: ...

    def load(self, name: BlockKey, groups: tuple[int, ...]) -> LoadHandle: ...

    def request_copy(self, name: BlockKey, groups: tuple[int, ...], *, evicted: bool) -> int | None:
        """The number under which Memory will hand over the block; None: it is not wanted."""
        ...

    def cancel(self, number: int) -> None:
        """What was wanted will not come, or what was lent is not asked for."""
        ...

    def stage_load(self, pieces: Mapping[int, storage.filesystem.Buffer]) -> int:
        """The number under which Memory will ask for these."""
        ...

    def drop(self, key: str) -> None:
        """It cannot be trusted: nobody is to find it again."""
        ...


def prefix_digest(prefix: PrefixNode) -> bytes:
    """A digest of the whole history; that of each prefix is computed once."""
    pending = []
    at: PrefixNode | None = prefix
    while at is not None and not at.full_digest:
        pending.append(at)
        at = at.parent
    for each in reversed(pending):
        before = b"root" if each.parent is None else each.parent.full_digest
        each.full_digest = blake2b(before + each.tokens, digest_size=32).digest()
    return prefix.full_digest


def block_key(prefix: PrefixNode) -> BlockKey:
    assert prefix.parent is not None, "a root is no block"
    return BlockKey(prefix.digest.hex(), prefix_digest(prefix.parent).hex(), prefix.tokens)


class PrefetchRequest:
    """What a row that waits is fetched: the next blocks of its chain, behind those that stand in the pools.

    ``chain``: every known block of its tokens, which it holds on to.  Nothing moves before :meth:`start`."""

    def __init__(
        self,
        block_store: BlockStoreProtocol | None,
        chain: Sequence[PrefixNode],
        max_blocks: Mapping[PrefixNode, tuple[int, ...]],
    ) -> None:
        self._block_store, self.chain, self._max_blocks = block_store, tuple(chain), dict(max_blocks)
        self.tickets: dict[PrefixNode, LoadHandle] = {}
        self._left: list[LoadHandle] = []  # that were not done when it was asked last
        self.missed = ""  # why the chain is not longer

    @property
    def started(self) -> bool:
        return len(self.tickets) == len(self._max_blocks)

    def start(self) -> None:
        if self._block_store is not None and not self.started:
            self.tickets = {
                prefix: self._block_store.load(block_key(prefix), own) for prefix, own in self._max_blocks.items()
            }
            self._left = list(self.tickets.values())

    def ready(self) -> bool:
        while self._left and self._left[-1].done:  # they come in their order: the last one is asked first
            self._left.pop()
        return self.started and not self._left

    @property
    def in_flight(self) -> bool:
        """Is it on its way?"""
        return self.started and not self.ready()

    def has(self, prefix: PrefixNode, group: int) -> bool:
        ticket = self.tickets.get(prefix)
        return ticket is not None and ticket.buffers is not None and group in ticket.buffers

    def miss_reason(self) -> str:
        """Why the first block that did not come did not."""
        return next((each.miss_reason for each in self.tickets.values() if each.miss_reason), self.missed)


@dataclass
class OffloadHits:
    """Tokens that rows took from each place ("ram", "disk"; the others of a hit were in the pool), and admissions whose
    chain ended early, by reason."""

    tokens: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)


class LoadedBlock(NamedTuple):
    """A block that a tier gave back: the ``depth``-th of its row, of these groups; ``place``: "ram", "packed" (in
    RAM) or "disk"."""

    depth: int
    groups: tuple[int, ...]
    location: str
    nbytes: int


class PrefetchResult(NamedTuple):
    """What a row was admitted with of the tiers.  ``passed``: so many blocks before those, which a window has passed;
    ``why`` its chain is not longer: "" where there is no more of it."""

    blocks: tuple[LoadedBlock, ...] = ()
    num_skipped: int = 0
    miss_reason: str = ""


class PendingLoad(NamedTuple):
    """One block that a row waits for: its bytes, and where they go, per group."""

    buffers: Mapping[int, storage.filesystem.Buffer]
    blocks: dict[int, int]


class PrefixOffload:
    """What the next moves, which name ``num_groups`` groups, are to copy out and in."""

    def __init__(self, block_store: BlockStoreProtocol, num_groups: int) -> None:
        self.block_store, self._num_groups = block_store, num_groups
        self._take_stores: dict[int, tuple[str, dict[int, int]]] = {}  # number -> key, blocks by group
        self._take_loads: dict[
            int, tuple[list[PendingLoad], PrefixNode]
        ] = {}  # by row; and the furthest block that it was fetched
        self.take_ops: dict[int, PrefixNode] = {}  # by row: loaded, and not committed yet
        self.hits = OffloadHits()
        self.found: dict[int, PrefetchResult] | None = (
            None  # by row, of its admission, until it commits; None: nobody asks
        )

    # ------------------------------------------------------------ out

    def on_published(self, prefix: PrefixNode, blocks: dict[int, int]) -> None:
        """A block that others may find from now on, in these groups."""
        self._store(prefix, blocks, evicted=False)

    def on_evicted(self, index: int, block: int, prefix: PrefixNode) -> None:
        """A pool hands the block on; its contents stand until the next moves."""
        self._store(prefix, {index: block}, evicted=True)

    def on_invalidated(self, prefix: PrefixNode) -> None:
        """Its numbers cannot be trusted."""
        if prefix.parent is None:
            return
        key = prefix.digest.hex()
        for number in [number for number, (other, _) in self._take_stores.items() if other == key]:
            self.block_store.cancel(number)
            del self._take_stores[number]
        self.block_store.drop(key)

    def forget(self) -> None:
        """Nothing that stands in the pools is to be stored any more (the weights changed)."""
        for number in self._take_stores:
            self.block_store.cancel(number)
        self._take_stores.clear()

    def _store(self, prefix: PrefixNode, blocks: dict[int, int], *, evicted: bool) -> None:
        if prefix.parent is None:
            return
        number = self.block_store.request_copy(block_key(prefix), tuple(blocks), evicted=evicted)
        if number is not None:
            self._take_stores[number] = prefix.digest.hex(), blocks

    # ------------------------------------------------------------ in

    def on_acquired(
        self,
        row: int,
        fetch: PrefetchRequest,
        missing: Mapping[PrefixNode, dict[int, int]],
        last: PrefixNode,
        size: int,
        passed: int,
    ) -> None:
        """A row has taken blocks of ``size`` (by prefix, then by group) for what it was fetched, up to ``last``;
        ``passed``: so many blocks before those need not be there."""
        loads = []
        for prefix, blocks in missing.items():
            ticket = fetch.tickets[prefix]
            assert ticket.buffers is not None, "a block that never came is claimed"
            loads.append(PendingLoad(ticket.buffers, blocks))
            self.hits.tokens[ticket.location] += size
        if passed:  # a window has passed what comes before: whatever brought the rest made it free
            self.hits.tokens[fetch.tickets[next(iter(missing))].location] += passed * size
        self._take_loads[row] = loads, last
        if self.found is not None:
            came = (_loaded_block(prefix, fetch.tickets[prefix], tuple(blocks)) for prefix, blocks in missing.items())
            self.found[row] = PrefetchResult(tuple(came), passed)

    def on_admitted(self, row: int, why: str) -> None:
        """The tiers were asked for a row, and its chain is as long as it will be; ``why`` it is not longer."""
        if why:
            self.hits.misses[why] += 1
        if self.found is not None:
            self.found[row] = self.found.get(row, PrefetchResult())._replace(miss_reason=why)

    def is_loading(self, row: int) -> bool:
        """Are the row's blocks still empty?"""
        return row in self._take_loads

    def on_released(self, row: int) -> PrefixNode | None:
        """The row gives its blocks back, or has committed: the furthest block that it was fetched and nobody has seen
        come out right."""
        if self.found is not None:
            self.found.pop(row, None)
        waiting = self._take_loads.pop(row, None)
        return self.take_ops.pop(row, None if waiting is None else waiting[1])

    # ------------------------------------------------------------ the moves

    @property
    def pending(self) -> bool:
        return bool(self._take_stores or self._take_loads)

    def take_stores(self) -> tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]:
        """What is to be copied out, told once: (number, per group its block or nothing)."""
        stores = tuple((number, self._by_group(blocks)) for number, (_, blocks) in self._take_stores.items())
        self._take_stores.clear()
        return stores

    def take_loads(self) -> tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]:
        """What is to be copied in, told once."""
        told = []
        for row, (loads, last) in self._take_loads.items():
            self.take_ops[row] = last
            for load in loads:
                told.append((self.block_store.stage_load(load.buffers), self._by_group(load.blocks)))
        self._take_loads.clear()
        return tuple(told)

    def _by_group(self, blocks: dict[int, int]) -> tuple[tuple[int, ...], ...]:
        return tuple((blocks[index],) if index in blocks else () for index in range(self._num_groups))


def _loaded_block(prefix: PrefixNode, ticket: LoadHandle, groups: tuple[int, ...]) -> LoadedBlock:
    assert ticket.buffers is not None
    nbytes = sum(memoryview(ticket.buffers[group]).nbytes for group in groups)
    return LoadedBlock(prefix.depth, groups, "packed" if ticket.was_compressed else ticket.location, nbytes)
