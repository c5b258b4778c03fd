"""Connection of the prefix cache to the block store: copies of published blocks, and loads for waiting sequences.

A published block is stored under the key of its history: a digest of the prefix cache to find it, the tokens of the
block, and a separate 256-bit digest of the whole history before it. A loaded block is used only if tokens and digest
are equal to those of the requesting sequence: with keys of 8 bits the store hits less often, but is never wrong.

A ``PrefetchRequest`` loads the blocks of a sequence that are in no pool; it is polled. Loaded bytes stay in host
memory until the sequence is admitted. Only then are blocks allocated and filled, in the same BlockOps as everything
else (``BlockOps.load``): a request that ends while its blocks are loading leaves nothing behind, and late loads write
to an unreferenced buffer. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, Protocol

from kvad.cache.config import CacheConfig
from kvad.cache.groups import CacheGroup
from kvad.cache.manager.prefix_index import PrefixNode
from kvad.errors import ConfigError
from kvad.storage import Buffer


def check_shareable(cache: CacheConfig, groups: Sequence[CacheGroup]) -> None:
    """Raise ConfigError if a cache with a block store has no blocks that another request can use."""
    if cache.prefix_cache_dir is None and cache.prefix_cache_ram is None:
        return
    token_groups = [group for group in groups if not group.spec.is_cross_attention and group.lower_level is None]
    if not token_groups or any(
        group.eviction_policy is not None or group.demotion_policy is not None for group in token_groups
    ):
        reason = f"policy {cache.resolved_policy} shares no blocks" if token_groups else "an encoder has no cache"
        raise ConfigError(
            f"cache.prefix_cache_dir: {reason}, so there is nothing to store for other requests", "leave it out"
        )


class BlockKey(NamedTuple):
    """Key of a stored block: ``key`` finds it; ``parent_digest`` and ``tokens`` (int64 bytes) must also be equal."""

    key: str
    parent_digest: str
    tokens: bytes


@dataclass(eq=False)
class LoadHandle:
    """One block that is being loaded."""

    name: BlockKey
    groups: tuple[int, ...]
    done: bool = False
    buffers: Mapping[int, Buffer] | None = None  # by group; None until the load is complete, and after a failure
    miss_reason: str = ""  # reason of a failure
    location: str = ""  # "ram" or "disk"
    was_compressed: bool = False  # in RAM

    def complete(self, buffers: Mapping[int, Buffer], location: str) -> None:
        self.buffers, self.location, self.done = buffers, location, True

    def fail(self, miss_reason: str) -> None:
        self.buffers, self.miss_reason, self.done = None, miss_reason, True


class BlockStoreProtocol(Protocol):
    """Store of blocks beyond the pools (``offload/block_store.py``, a fake in tests). No method waits for a disk."""

    def has(self, key: str) -> bool: ...

    def load(self, name: BlockKey, groups: tuple[int, ...]) -> LoadHandle: ...

    def request_copy(self, name: BlockKey, groups: tuple[int, ...], *, evicted: bool) -> int | None:
        """Return the id under which KVCache will copy the block out, or None if it is not required."""
        ...

    def cancel(self, copy_id: int) -> None:
        """Cancel a requested copy or a staged load."""
        ...

    def stage_load(self, buffers: Mapping[int, Buffer]) -> int:
        """Return the id under which KVCache will read these buffers."""
        ...

    def drop(self, key: str) -> None:
        """Delete a block after a numerical error."""
        ...


def prefix_digest(prefix: PrefixNode) -> bytes:
    """Return a digest of the whole history; each prefix computes its own once."""
    pending = []
    node: PrefixNode | None = prefix
    while node is not None and not node.full_digest:
        pending.append(node)
        node = node.parent
    for ancestor in reversed(pending):
        parent_digest = b"root" if ancestor.parent is None else ancestor.parent.full_digest
        ancestor.full_digest = blake2b(parent_digest + ancestor.tokens, digest_size=32).digest()
    return prefix.full_digest


def block_key(prefix: PrefixNode) -> BlockKey:
    """Return the block store key of a full block."""
    assert prefix.parent is not None, "a root is no block"
    return BlockKey(prefix.digest.hex(), prefix_digest(prefix.parent).hex(), prefix.tokens)


class PrefetchRequest:
    """Loads of the blocks of a waiting sequence that are in no pool.

    ``chain`` references every known block of its tokens. Nothing is loaded before ``start``.
    """

    def __init__(
        self,
        block_store: BlockStoreProtocol | None,
        chain: Sequence[PrefixNode] = (),
        missing_groups: Mapping[PrefixNode, tuple[int, ...]] | None = None,
        missed: str = "",  # reason why the chain is not longer
    ) -> None:
        self._block_store, self.chain, self.missed = block_store, tuple(chain), missed
        self._missing_groups = dict(missing_groups or {})
        self.handles: dict[PrefixNode, LoadHandle] = {}
        self._unfinished: list[LoadHandle] = []  # as of the last call of ready

    @property
    def started(self) -> bool:
        return len(self.handles) == len(self._missing_groups)

    def start(self) -> None:
        if self._block_store is not None and not self.started:
            missing, load = self._missing_groups, self._block_store.load
            self.handles = {prefix: load(block_key(prefix), groups) for prefix, groups in missing.items()}
            self._unfinished = list(self.handles.values())

    def ready(self) -> bool:
        while self._unfinished and self._unfinished[-1].done:  # Loads finish in order: test the last one first.
            self._unfinished.pop()
        return self.started and not self._unfinished

    @property
    def in_flight(self) -> bool:
        """True while blocks are loading."""
        return self.started and not self.ready()

    def has(self, prefix: PrefixNode, group: int) -> bool:
        handle = self.handles.get(prefix)
        return handle is not None and handle.buffers is not None and group in handle.buffers

    def miss_reason(self) -> str:
        """Return the reason of the first failed load, or why the chain is not longer."""
        return next((handle.miss_reason for handle in self.handles.values() if handle.miss_reason), self.missed)


@dataclass
class OffloadHits:
    """Statistics of loaded prefixes."""

    tokens: Counter[str] = field(default_factory=Counter)  # loaded tokens by location: "ram", "disk"
    blocks: Counter[str] = field(default_factory=Counter)  # by location
    bytes: Counter[str] = field(default_factory=Counter)  # by location
    misses: Counter[str] = field(default_factory=Counter)  # admissions with a shorter chain, by reason


class LoadedBlock(NamedTuple):
    """Block that was loaded for a sequence."""

    depth: int  # index in the sequence, from 1
    groups: tuple[int, ...]
    location: str  # "ram", "packed" (compressed in RAM) or "disk"
    nbytes: int


class PrefetchResult(NamedTuple):
    """Blocks that were loaded for an admitted sequence."""

    blocks: tuple[LoadedBlock, ...] = ()
    num_skipped: int = 0  # blocks before them that a window does not need
    miss_reason: str = ""  # why the chain is not longer; "" if the prompt has no more blocks


class PrefixOffload:
    """Copies to and loads from the block store that the next BlockOps will contain.

    ``results`` is None, or the PrefetchResult of each admission by sequence index until its first commit.
    """

    def __init__(self, block_store: BlockStoreProtocol, num_groups: int) -> None:
        self.block_store, self._num_groups = block_store, num_groups
        self._pending_stores: dict[int, tuple[str, dict[int, int]]] = {}  # copy id -> key, blocks by group
        # By sequence index: loads that the next BlockOps contain, and the last block of the chain. A load has the bytes
        # of one block and its target blocks, both by group.
        self._pending_loads: dict[int, tuple[list[tuple[Mapping[int, Buffer], dict[int, int]]], PrefixNode]] = {}
        self.uncommitted_loads: dict[int, PrefixNode] = {}  # by sequence index: loaded, but not committed
        self.hits = OffloadHits()
        self.results: dict[int, PrefetchResult] | None = None

    # ------------------------------------------------------------ out

    def on_published(self, prefix: PrefixNode, blocks: dict[int, int], *, evicted: bool = False) -> None:
        """Store a block that was published in these groups, or that a pool evicts."""
        if prefix.parent is None:
            return
        copy_id = self.block_store.request_copy(block_key(prefix), tuple(blocks), evicted=evicted)
        if copy_id is not None:
            self._pending_stores[copy_id] = prefix.digest.hex(), blocks

    def on_evicted(self, index: int, block: int, prefix: PrefixNode) -> None:
        """Store a block that a pool evicts; its contents are unchanged until the next BlockOps."""
        self.on_published(prefix, {index: block}, evicted=True)

    def on_invalidated(self, prefix: PrefixNode) -> None:
        """Cancel and delete the copies of a block after a numerical error."""
        if prefix.parent is None:
            return
        key = prefix.digest.hex()
        for copy_id in [copy_id for copy_id, (other, _) in self._pending_stores.items() if other == key]:
            self.block_store.cancel(copy_id)
            del self._pending_stores[copy_id]
        self.block_store.drop(key)

    # ------------------------------------------------------------ in

    def on_acquired(
        self,
        seq_index: int,
        prefetched: PrefetchRequest,
        missing: Mapping[PrefixNode, dict[int, int]],
        last_prefix: PrefixNode,
        block_size: int,
        num_skipped: int,
    ) -> None:
        """Schedule the loads of an admitted sequence.

        ``missing`` are the newly allocated blocks, by prefix, then by group; ``num_skipped`` blocks before them are
        needed by no group.
        """
        loads, loaded = [], []
        for prefix, blocks in missing.items():
            handle = prefetched.handles[prefix]
            assert handle.buffers is not None, "a block that was not loaded is acquired"
            loads.append((handle.buffers, blocks))
            self.hits.tokens[handle.location] += block_size
            nbytes = sum(memoryview(handle.buffers[group]).nbytes for group in blocks)
            self.hits.blocks[handle.location] += 1
            self.hits.bytes[handle.location] += nbytes
            location = "packed" if handle.was_compressed else handle.location
            loaded.append(LoadedBlock(prefix.depth, tuple(blocks), location, nbytes))
        if num_skipped:  # A window does not need these blocks: they count for the location of the first loaded one.
            self.hits.tokens[prefetched.handles[next(iter(missing))].location] += num_skipped * block_size
        self._pending_loads[seq_index] = loads, last_prefix
        if self.results is not None:
            self.results[seq_index] = PrefetchResult(tuple(loaded), num_skipped)

    def on_admitted(self, seq_index: int, miss_reason: str) -> None:
        """Record the admission of a prefetched sequence, and the reason why its chain is not longer."""
        if miss_reason:
            self.hits.misses[miss_reason] += 1
        if self.results is not None:
            self.results[seq_index] = self.results.get(seq_index, PrefetchResult())._replace(miss_reason=miss_reason)

    def is_loading(self, seq_index: int) -> bool:
        """Return True if the sequence's blocks are not filled yet."""
        return seq_index in self._pending_loads

    def on_released(self, seq_index: int) -> PrefixNode | None:
        """Drop the records of a freed or committed sequence. Return its last uncommitted loaded block, if any."""
        if self.results is not None:
            self.results.pop(seq_index, None)
        pending = self._pending_loads.pop(seq_index, None)
        return self.uncommitted_loads.pop(seq_index, None if pending is None else pending[1])

    # ------------------------------------------------------------ block ops

    @property
    def pending(self) -> bool:
        return bool(self._pending_stores or self._pending_loads)

    def take_stores(self) -> tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]:
        """Return and clear the copies to make: (copy id, per group its block or nothing)."""
        stores = tuple((copy_id, self._by_group(blocks)) for copy_id, (_, blocks) in self._pending_stores.items())
        self._pending_stores.clear()
        return stores

    def take_loads(self) -> tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]:
        """Return and clear the loads to make."""
        pending = [load for loads, _ in self._pending_loads.values() for load in loads]
        self.uncommitted_loads |= {seq_index: prefix for seq_index, (_, prefix) in self._pending_loads.items()}
        self._pending_loads.clear()
        return tuple((self.block_store.stage_load(buffers), self._by_group(blocks)) for buffers, blocks in pending)

    def _by_group(self, blocks: dict[int, int]) -> tuple[tuple[int, ...], ...]:
        return tuple((blocks[index],) if index in blocks else () for index in range(self._num_groups))
