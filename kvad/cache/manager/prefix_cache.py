"""Prefix cache: chains of full blocks that are found, acquired, published and invalidated, in pools and block stores.

A chain is a list of ``kvad.cache.manager.prefix_index.PrefixNode``, each the history of the previous one plus one
block. A sequence starts with the longest chain that every group can serve: a group without a window needs all blocks,
a group with a window those of the sinks and of the last ``window - 1`` tokens.

Invariants:

* A block is published after finite logits at or behind its last token, and found under its whole history (tokens are
  compared, no digest is trusted).
* Loaded blocks are copied into newly allocated blocks, and published when their sequence commits, like computed ones.
* Invalidated blocks are not found again, in pools or block stores. Sequences that reference them keep them.

No torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvad.cache.manager.block_pool import BlockPool
from kvad.cache.manager.prefix_history import PrefixHistory, PrefixLookup
from kvad.cache.manager.prefix_index import PrefixIndex, PrefixNode
from kvad.cache.manager.prefix_offload import PrefetchRequest, PrefixOffload
from kvad.cache.manager.sequence_blocks import NEVER, BlockMapping, SequenceBlocks, block_index


@dataclass(frozen=True)
class CacheStats:
    """Block counts per group, and prefix cache statistics. ``total = used + free + evictable``."""

    total: tuple[int, ...]
    used: tuple[int, ...]
    free: tuple[int, ...]
    evictable: tuple[int, ...]
    evictions: tuple[int, ...]  # published blocks that were reused so far
    hits: int  # admissions with a cached prefix
    misses: int  # admissions without
    hit_tokens: int  # tokens that were not computed because of hits
    peak: tuple[int, ...]  # maximum of used since KVCacheManager.reset_peak
    watermark: tuple[int, ...]  # blocks that an admission leaves free


class PrefixCache:
    """Prefix cache of the groups that take tokens, which have equal block sizes. ``CacheStats`` has its counters."""

    def __init__(
        self,
        mappings: Sequence[BlockMapping],
        pools: Sequence[BlockPool],
        prefixes: PrefixIndex,
        offload: PrefixOffload | None,
        history: PrefixHistory,
    ) -> None:
        self._mappings, self._pools, self.prefixes, self.offload = tuple(mappings), tuple(pools), prefixes, offload
        self._history = history
        self._size = mappings[0].block_size if mappings else 1
        self.hits = self.misses = self.hit_tokens = 0

    def find(
        self, root: PrefixNode, tokens: Sequence[int], max_tokens: int, prefetched: PrefetchRequest | None = None
    ) -> list[PrefixNode]:
        """Return the longest cached chain of ``tokens`` that every group can serve, at most ``max_tokens`` tokens."""
        unwindowed = [index for index, mapping in enumerate(self._mappings) if mapping.window == NEVER]
        chain: list[PrefixNode] = []
        prefix: PrefixNode | None = root
        prefetched_chain = () if prefetched is None else prefetched.chain
        for block_tokens in self._full_blocks(tokens, max_tokens):
            if len(chain) < len(prefetched_chain):  # the digest was computed before
                prefix = prefetched_chain[len(chain)]
            else:
                prefix = self.prefixes.find(prefix, block_tokens)
            if prefix is None or not all(self._is_available(index, prefix, prefetched) for index in unwindowed):
                break
            chain.append(prefix)
        return chain[: self._usable_depth(chain, lambda index, prefix: self._is_available(index, prefix, prefetched))]

    def _full_blocks(self, tokens: Sequence[int], max_tokens: int) -> Iterator[bytes]:
        """Yield the full blocks of the first ``max_tokens`` tokens as int64 bytes."""
        stride = self._size * 8
        token_bytes = array("q", tokens[: max(0, max_tokens)]).tobytes()
        for start in range(0, len(token_bytes) - stride + 1, stride):
            yield token_bytes[start : start + stride]

    def retained_prefix_length(self, sequence: SequenceBlocks) -> int:
        """Return the length of the sequence's prefix that other sequences reference too."""
        prefix, chain = sequence.last_block, list[PrefixNode]()
        while prefix is not None and prefix.depth:
            chain.append(prefix)
            prefix = prefix.parent
        unwindowed = [pool for pool, rules in zip(self._pools, self._mappings, strict=True) if rules.window == NEVER]
        count = 0
        for prefix in reversed(chain):
            blocks = [pool.find(prefix) for pool in unwindowed]
            if any(block is None or pool.refs[block] < 2 for block, pool in zip(blocks, unwindowed, strict=True)):
                break
            count += 1
        return count * self._size

    def block_keys(self, tokens: Sequence[int], root: bytes) -> list[str]:
        """Return the block store keys of the full blocks of these tokens."""
        keys, prefix = list[str](), self.prefixes.root(root)
        for block_tokens in self._full_blocks(tokens, len(tokens)):
            prefix = None if prefix is None else self.prefixes.extend(prefix, block_tokens)
            if prefix is None:
                break
            keys.append(prefix.digest.hex())
        return keys

    def prefetch(self, tokens: Sequence[int], root: bytes, max_tokens: int) -> PrefetchRequest:
        """Build a request for the blocks of ``tokens`` that are in the block store and in no pool.

        Nothing is loaded before the request is started. For a group with a window it contains only the blocks that
        the longest cached prefix needs.
        """
        parent = self.prefixes.root(root) if self.offload is not None else None
        if parent is None or self.offload is None or max_tokens < self._size:
            return PrefetchRequest(None)
        block_store, missed = self.offload.block_store, ""
        chain: list[PrefixNode] = []
        stored: set[PrefixNode] = set()
        for block_tokens in self._full_blocks(tokens, max_tokens):
            prefix = self.prefixes.extend(parent, block_tokens)
            if prefix is None:
                missed = "collision"
                break
            missing_from = [index for index, pool in enumerate(self._pools) if pool.find(prefix) is None]
            if missing_from and block_store.has(prefix.digest.hex()):
                stored.add(prefix)
            elif any(self._mappings[index].window == NEVER for index in missing_from):
                missed = "unknown"
                break
            chain.append(prefix)
            parent = prefix
        depth = self._usable_depth(chain, lambda index, prefix: prefix in stored or self._is_available(index, prefix))
        missed = missed or ("unknown" if depth < max_tokens // self._size else "")
        del chain[depth:]
        missing_groups: dict[PrefixNode, tuple[int, ...]] = {}
        for index, pool in enumerate(self._pools):
            for prefix in self._needed_blocks(index, chain)[1]:
                if pool.find(prefix) is None:
                    missing_groups[prefix] = (*missing_groups.get(prefix, ()), index)
        in_order = {prefix: missing_groups[prefix] for prefix in chain if prefix in missing_groups}
        return PrefetchRequest(block_store, chain, in_order, missed)

    def acquire_longest(
        self,
        seq_index: int,
        sequence: SequenceBlocks,
        tokens: Sequence[int],
        max_tokens: int,
        prefetched: PrefetchRequest | None,
    ) -> int:
        """Give a new sequence the longest cached chain. Return its number of tokens."""
        assert sequence.root is not None, "this sequence shares no prefix"
        chain, miss_reason = self.find(sequence.root, tokens, max_tokens, prefetched), ""
        if prefetched is not None and not self._has_room(chain):
            chain, miss_reason = self.find(sequence.root, tokens, max_tokens), "no room"
        if max_tokens >= self._size:
            self.hits += bool(chain)
            self.misses += not chain
        if chain:
            self._acquire(seq_index, sequence, chain, tokens, prefetched)
        if self.offload is not None and prefetched is not None:
            short = len(chain) < max_tokens // self._size
            self.offload.on_admitted(seq_index, (miss_reason or prefetched.miss_reason() or "moved") if short else "")
        length = len(chain) * self._size
        self.hit_tokens += length
        self._history.lookup = self._describe_lookup(sequence.root, chain, tokens, max_tokens, prefetched, miss_reason)
        return length

    def _describe_lookup(
        self,
        root: PrefixNode,
        chain: Sequence[PrefixNode],
        tokens: Sequence[int],
        max_tokens: int,
        prefetched: PrefetchRequest | None,
        store_reason: str,
    ) -> PrefixLookup:
        """Return where a chain was found, and why it is not longer."""
        size, depth, handles = self._size, len(chain), {} if prefetched is None else prefetched.handles
        loaded = [handles[prefix].location for prefix in chain if prefix in handles and handles[prefix].buffers]
        found = PrefixLookup(size * loaded.count("ram"), size * loaded.count("disk"))
        if depth == max_tokens // size:
            is_short = len(tokens) <= size
            return found._replace(reason="scores" if max_tokens < len(tokens) - 1 else "short" if is_short else "")
        if not store_reason and prefetched is not None and prefetched.miss_reason() != "unknown":
            store_reason = prefetched.miss_reason()
        if store_reason or not self._history.has_root(root):
            return found._replace(reason=store_reason or "root")
        parent, block_tokens = chain[-1] if chain else root, array("q", tokens[depth * size : (depth + 1) * size])
        cause = self._history.eviction_cause(self.prefixes.key(parent, block_tokens.tobytes()))
        if cause is not None:
            return found._replace(reason="evicted", cause=cause)
        node = self.prefixes.find(parent, block_tokens.tobytes())
        is_held = node is not None and any(pool.find(node) is not None for pool in self._pools)
        return found._replace(reason="window" if is_held else "new")

    def on_evicted(self, index: int, block: int, prefix: PrefixNode) -> None:
        """Record a published block that the pool of group ``index`` evicts, and pass it to the block store."""
        self._history.on_evicted(prefix)
        if self.offload is not None:
            self.offload.on_evicted(index, block, prefix)

    def _has_room(self, chain: Sequence[PrefixNode]) -> bool:
        """Return True if the pools have room for the loaded blocks in addition to those acquired from the pools."""
        for index, pool in enumerate(self._pools):
            blocks = [pool.find(prefix) for prefix in self._needed_blocks(index, chain)[1]]
            num_idle = sum(block is not None and pool.refs[block] == 0 for block in blocks)
            if blocks.count(None) > pool.num_available - num_idle:
                return False
        return True

    def _acquire(
        self,
        seq_index: int,
        sequence: SequenceBlocks,
        chain: Sequence[PrefixNode],
        tokens: Sequence[int],
        prefetched: PrefetchRequest | None,
    ) -> None:
        """Acquire the blocks of a chain from the pools first, then allocate blocks for the loaded ones."""
        missing: dict[PrefixNode, dict[int, int]] = {}
        for index, (group_blocks, pool) in enumerate(zip(sequence.groups, self._pools, strict=True)):
            first, needed = self._needed_blocks(index, chain)
            group_blocks.num_skipped_blocks = first - self._mappings[index].num_sink_blocks
            published = [pool.find(prefix) for prefix in needed]
            for block in published:
                if block is not None:
                    pool.incref(block)
            for prefix, block in zip(needed, published, strict=True):
                if block is None:
                    block = missing.setdefault(prefix, {})[index] = pool.allocate()
                group_blocks.blocks.append(block)
        num_sure = next((index for index, prefix in enumerate(chain) if prefix in missing), len(chain))
        sequence.last_block = chain[num_sure - 1] if num_sure else sequence.root
        sequence.tail_tokens = list(tokens[num_sure * self._size : len(chain) * self._size])
        if missing:
            assert prefetched is not None and self.offload is not None
            num_skipped = num_sure if all(group.num_skipped_blocks for group in sequence.groups) else 0
            self.offload.on_acquired(seq_index, prefetched, missing, chain[-1], self._size, num_skipped)

    def publish(self, sequence: SequenceBlocks, num_sure: int) -> None:
        """Publish the full blocks within the sequence's first ``num_sure`` tokens."""
        size, tail_tokens, start = self._size, sequence.tail_tokens, 0
        assert sequence.last_block is not None
        for _ in range(num_sure // size - sequence.last_block.depth):
            node = self.prefixes.extend(sequence.last_block, array("q", tail_tokens[start : start + size]).tobytes())
            if node is None:  # Digest collision: this sequence publishes no more.
                sequence.last_block, sequence.tail_tokens = None, []
                return
            blocks = self._blocks_of(sequence, node)
            for index, block in blocks.items():
                self._pools[index].publish(block, node)
            if self.offload is not None:
                self.offload.on_published(node, blocks)
            if node.depth == 1:
                self._history.add_root(sequence.last_block)
            sequence.last_block = node
            start += size
        del tail_tokens[:start]

    def republish(self, sequence: SequenceBlocks) -> None:
        """Publish again what a sequence had published before it was swapped out, unless another block holds it."""
        sequence.republish, prefix = False, sequence.last_block
        while prefix is not None and prefix.depth:
            for index, block in self._blocks_of(sequence, prefix).items():
                if self._pools[index].prefixes[block] is None:
                    self._pools[index].publish(block, prefix)
            prefix = prefix.parent

    def _blocks_of(self, sequence: SequenceBlocks, prefix: PrefixNode) -> dict[int, int]:
        """Return the sequence's blocks of one logical block, by group; groups that freed theirs are left out."""
        blocks = {}
        for index, (group_blocks, mapping) in enumerate(zip(sequence.groups, self._mappings, strict=True)):
            number = block_index(prefix.depth - 1, mapping.num_sink_blocks, group_blocks.num_skipped_blocks)
            if number is not None:
                blocks[index] = group_blocks.blocks[number]
        return blocks

    def invalidate(self, prefix: PrefixNode | None) -> None:
        """Unpublish a whole history, from its end to its root, after a numerical error."""
        while prefix is not None:
            for pool in self._pools:
                block = pool.find(prefix)
                if block is not None:
                    pool.unpublish(block)
            if self.offload is not None:
                self.offload.on_invalidated(prefix)
            prefix = prefix.parent

    def history(self, sequence: SequenceBlocks, length: int) -> tuple[PrefixNode | None, list[int]]:
        """Return (last block, tail tokens) of the sequence's first ``length`` tokens."""
        node = sequence.last_block
        if node is None:
            return None, []
        size = self._size
        depth, rest = divmod(length, size)
        if depth >= node.depth:
            return node, sequence.tail_tokens[: length - node.depth * size]
        while node.depth > depth + 1:
            assert node.parent is not None
            node = node.parent
        return node.parent, array("q", node.tokens).tolist()[:rest]

    def _is_available(self, index: int, prefix: PrefixNode, prefetched: PrefetchRequest | None = None) -> bool:
        """Return True if this block of group ``index`` is in its pool or was loaded."""
        return self._pools[index].find(prefix) is not None or (prefetched is not None and prefetched.has(prefix, index))

    def _needed_blocks(self, index: int, chain: Sequence[PrefixNode]) -> tuple[int, list[PrefixNode]]:
        """Return (the first index behind the sinks, all blocks) of a chain that a sequence holds in group ``index``."""
        mapping = self._mappings[index]
        first = mapping.first_needed(len(chain) * self._size)
        return first, [*chain[: mapping.num_sink_blocks], *chain[first:]]

    def _usable_depth(self, chain: Sequence[PrefixNode], is_available: Callable[[int, PrefixNode], bool]) -> int:
        """Return how many blocks of a chain all groups can serve. Groups without a window have every block of it."""
        usable = [True] * (len(chain) + 1)
        for index, mapping in enumerate(self._mappings):
            if mapping.window != NEVER:
                run = 0  # consecutive available blocks up to here
                rooted = True  # the blocks of the sinks are available
                for depth, prefix in enumerate(chain, 1):
                    run = run + 1 if is_available(index, prefix) else 0
                    rooted &= depth > mapping.num_sink_blocks or run == depth
                    usable[depth] &= rooted and run >= depth - mapping.first_needed(depth * self._size)
        return max(depth for depth, ok in enumerate(usable) if ok)
