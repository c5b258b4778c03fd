"""What is known of a row's tokens: chains of full blocks, found, claimed, published and withdrawn; and the tiers'.

A chain is a row of :class:`~kvad.cache.manager.block_pool.PrefixNode`, each the history of the one before and a block more.  A row may
begin with the longest one that every group can serve: without a window all of its blocks must be there, with one those
of sinks and of the last ``window - 1`` tokens.

Promises:

* a block is published when finite logits have been seen at or behind its last token, and found under its whole history
  (tokens are compared, no digest is trusted);
* what the tiers gave back is claimed with blocks of its own, and published when its row commits, as if it had computed
  it;
* what is withdrawn is found by nobody again, here or in the tiers; rows that count on it keep it.

Integers only, no torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from kvad.cache.manager.block_mapping import BlockMapping
from kvad.cache.manager.block_pool import BlockPool, PrefixIndex, PrefixNode
from kvad.cache.manager.prefix_offload import PrefetchRequest, PrefixOffload
from kvad.cache.manager.sequence_blocks import NEVER, SequenceBlocks, block_index


class PrefixCache:
    """Of the groups that take tokens, all of one block size.  ``deposits``: what they say to the tiers, if there are
    any.  ``hits``, ``misses``: admissions that found something known and that did not; ``hit_tokens``: what of them
    needed no computing."""

    def __init__(
        self,
        rules: Sequence[BlockMapping],
        pools: Sequence[BlockPool],
        prefixes: PrefixIndex,
        offload: PrefixOffload | None,
    ) -> None:
        self._rules, self._pools, self.prefixes, self.offload = tuple(rules), tuple(pools), prefixes, offload
        self._size = rules[0].block_size if rules else 1
        self.hits = self.misses = self.hit_tokens = 0

    # ------------------------------------------------------------ found

    def find(
        self, root: PrefixNode, tokens: Sequence[int], longest: int, fetch: PrefetchRequest | None = None
    ) -> list[PrefixNode]:
        """The longest chain of known blocks of ``tokens`` that every group can serve, at most ``longest`` tokens."""
        size = self._size
        stride = size * 8
        packed = array("q", tokens[: longest - longest % size]).tobytes() if longest > 0 else b""
        full = [index for index, rules in enumerate(self._rules) if rules.window == NEVER]
        chain: list[PrefixNode] = []
        prefix: PrefixNode | None = root
        named = () if fetch is None else fetch.chain
        for at in range(0, len(packed), stride):
            if len(chain) < len(named):  # its digest is known
                prefix = named[len(chain)]
            else:
                prefix = self.prefixes.find(prefix, packed[at : at + stride])
            if prefix is None or not all(self._there(index, prefix, fetch) for index in full):
                break
            chain.append(prefix)
        return chain[: self._served(chain, lambda index, prefix: self._there(index, prefix, fetch))]

    def retained_prefix_length(self, seat: SequenceBlocks) -> int:
        """Tokens from the row's start on that would still be known if it gave its blocks back: others hold them."""
        prefix, chain = seat.last_block, list[PrefixNode]()
        while prefix is not None and prefix.depth:
            chain.append(prefix)
            prefix = prefix.parent
        full = [pool for pool, rules in zip(self._pools, self._rules, strict=True) if rules.window == NEVER]
        count = 0
        for prefix in reversed(chain):
            blocks = [pool.find(prefix) for pool in full]
            if any(block is None or pool.refs[block] < 2 for block, pool in zip(blocks, full, strict=True)):
                break
            count += 1
        return count * self._size

    def block_keys(self, tokens: Sequence[int], root: bytes) -> list[str]:
        """Under which keys the tiers have the whole blocks of these tokens."""
        made, size, at = list[PrefixNode](), self._size, self.prefixes.root(root)
        for start in range(0, len(tokens) - size + 1, size):
            at = None if at is None else self.prefixes.extend(at, array("q", tokens[start : start + size]).tobytes())
            if at is None:
                break
            made.append(at)
        return [prefix.digest.hex() for prefix in made]

    def prefetch(self, tokens: Sequence[int], root: bytes, longest: int) -> PrefetchRequest:
        """What the tiers have of the first ``longest`` tokens and no pool does; nothing moves before it is started.

        A group with a window is fetched the blocks that the longest known prefix needs, and no others.
        """
        at = self.prefixes.root(root) if self.offload is not None else None
        if at is None or self.offload is None or longest < self._size:
            return PrefetchRequest(None, (), {})
        tier, size, missed = self.offload.block_store, self._size, ""
        packed = array("q", tokens[: longest - longest % size]).tobytes()
        chain: list[PrefixNode] = []
        stored: set[PrefixNode] = set()
        for start in range(0, len(packed), size * 8):
            prefix = self.prefixes.extend(at, packed[start : start + size * 8])
            if prefix is None:
                missed = "collision"
                break
            lacks = [index for index, pool in enumerate(self._pools) if pool.find(prefix) is None]
            if lacks and tier.has(prefix.digest.hex()):
                stored.add(prefix)
            elif any(self._rules[index].window == NEVER for index in lacks):
                missed = "unknown"
                break
            chain.append(prefix)
            at = prefix
        depth = self._served(chain, lambda index, prefix: prefix in stored or self._there(index, prefix, None))
        missed = missed or ("unknown" if depth < len(packed) // (size * 8) else "")
        wanted: dict[PrefixNode, tuple[int, ...]] = {}
        for index, pool in enumerate(self._pools):
            for prefix in self._needs(index, chain[:depth])[1]:
                if pool.find(prefix) is None:
                    wanted[prefix] = (*wanted.get(prefix, ()), index)
        fetch = PrefetchRequest(
            tier, chain[:depth], {prefix: wanted[prefix] for prefix in chain[:depth] if prefix in wanted}
        )
        fetch.missed = missed
        return fetch

    # ------------------------------------------------------------ claimed

    def acquire_longest(
        self, row: int, seat: SequenceBlocks, tokens: Sequence[int], longest: int, fetch: PrefetchRequest | None
    ) -> int:
        """Let a new row hold the longest known chain; returns its tokens."""
        assert seat.root is not None, "this row shares nothing"
        chain, why = self.find(seat.root, tokens, longest, fetch), ""
        if fetch is not None and not self._room_for(chain):
            chain, why = self.find(seat.root, tokens, longest), "no room"
        if longest >= self._size:
            self.hits += bool(chain)
            self.misses += not chain
        if chain:
            self._hold(row, seat, chain, tokens, fetch)
        if self.offload is not None and fetch is not None:
            short = len(chain) < longest // self._size
            self.offload.on_admitted(row, (why or fetch.miss_reason() or "moved") if short else "")
        length = len(chain) * self._size
        self.hit_tokens += length
        return length

    def _room_for(self, chain: Sequence[PrefixNode]) -> bool:
        """Are there blocks for what of a chain was fetched, beside those that it claims?"""
        for index, pool in enumerate(self._pools):
            found = [pool.find(prefix) for prefix in self._needs(index, chain)[1]]
            idle = sum(block is not None and pool.refs[block] == 0 for block in found)
            if found.count(None) > pool.num_available - idle:
                return False
        return True

    def _hold(
        self,
        row: int,
        seat: SequenceBlocks,
        chain: Sequence[PrefixNode],
        tokens: Sequence[int],
        fetch: PrefetchRequest | None,
    ) -> None:
        """Hold the blocks of a chain: those in the pools are claimed before any is taken for those that were
        fetched."""
        missing: dict[PrefixNode, dict[int, int]] = {}
        for claimed in (True, False):
            for index, (hold, pool) in enumerate(zip(seat.groups, self._pools, strict=True)):
                first, needed = self._needs(index, chain)
                if claimed:
                    hold.num_skipped_blocks = first - self._rules[index].num_sink_blocks
                    found = [pool.find(prefix) for prefix in needed]
                    for block in found:
                        if block is not None:
                            pool.incref(block)
                    hold.blocks = [0 if block is None else block for block in found]
                    continue
                for place, prefix in enumerate(needed):
                    if not hold.blocks[place]:
                        hold.blocks[place] = missing.setdefault(prefix, {})[index] = pool.allocate()[0]
        sure = next((at for at, prefix in enumerate(chain) if prefix in missing), len(chain))
        seat.last_block = chain[sure - 1] if sure else seat.root
        seat.tail_tokens = list(tokens[sure * self._size : len(chain) * self._size])
        if missing:
            assert fetch is not None and self.offload is not None
            passed = 0 if any(hold.num_skipped_blocks == 0 for hold in seat.groups) else sure
            self.offload.on_acquired(row, fetch, missing, chain[-1], self._size, passed)

    # ------------------------------------------------------------ published, and not any more

    def publish(self, seat: SequenceBlocks, sure: int) -> None:
        """The row's full blocks within its first ``sure`` tokens."""
        size, tail, at = self._size, seat.tail_tokens, 0
        assert seat.last_block is not None
        for _ in range(sure // size - seat.last_block.depth):
            tip = self.prefixes.extend(seat.last_block, array("q", tail[at : at + size]).tobytes())
            if tip is None:  # its digest is another history's: this row publishes no more
                seat.last_block, seat.tail_tokens = None, []
                return
            stored = {}
            for index, (hold, pool, rules) in enumerate(zip(seat.groups, self._pools, self._rules, strict=True)):
                place = block_index(tip.depth - 1, rules.num_sink_blocks, hold.num_skipped_blocks)
                if place is not None:
                    pool.publish(hold.blocks[place], tip)
                    stored[index] = hold.blocks[place]
            if self.offload is not None:
                self.offload.on_published(tip, stored)
            seat.last_block = tip
            at += size
        del tail[:at]

    def republish(self, seat: SequenceBlocks) -> None:
        """What a woken row had published before it was parked, where nobody else has it."""
        seat.republish, prefix = False, seat.last_block
        while prefix is not None and prefix.depth:
            for hold, pool, rules in zip(seat.groups, self._pools, self._rules, strict=True):
                place = block_index(prefix.depth - 1, rules.num_sink_blocks, hold.num_skipped_blocks)
                if place is not None and pool.prefixes[hold.blocks[place]] is None:
                    pool.publish(hold.blocks[place], prefix)
            prefix = prefix.parent

    def invalidate(self, prefix: PrefixNode | None) -> None:
        """A whole history, from its end to its root: its numbers cannot be trusted."""
        while prefix is not None:
            for pool in self._pools:
                block = pool.find(prefix)
                if block is not None:
                    pool.unpublish(block)
            if self.offload is not None:
                self.offload.on_invalidated(prefix)
            prefix = prefix.parent

    def history(self, seat: SequenceBlocks, length: int) -> tuple[PrefixNode | None, list[int]]:
        """(tip, tail) of the row's first ``length`` tokens."""
        tip = seat.last_block
        if tip is None:
            return None, []
        size = self._size
        depth, rest = divmod(length, size)
        if depth >= tip.depth:
            return tip, seat.tail_tokens[: length - tip.depth * size]
        while tip.depth > depth + 1:
            assert tip.parent is not None
            tip = tip.parent
        return tip.parent, array("q", tip.tokens).tolist()[:rest]

    # ------------------------------------------------------------ inside

    def _there(self, index: int, prefix: PrefixNode, fetch: PrefetchRequest | None) -> bool:
        """Is this block of group ``index`` in its pool, or fetched?"""
        return self._pools[index].find(prefix) is not None or (fetch is not None and fetch.has(prefix, index))

    def _needs(self, index: int, chain: Sequence[PrefixNode]) -> tuple[int, list[PrefixNode]]:
        """(the first one behind those of sinks, all) of the blocks of a chain that a row in group ``index`` holds."""
        rules = self._rules[index]
        first = rules.first_needed(len(chain) * self._size)
        return first, [*chain[: rules.num_sink_blocks], *chain[first:]]

    def _served(self, chain: Sequence[PrefixNode], there: Callable[[int, PrefixNode], bool]) -> int:
        """How many blocks of a chain, each of which is there in the groups without a window, all groups can serve."""
        usable = [True] * (len(chain) + 1)
        for index, rules in enumerate(self._rules):
            if rules.window != NEVER:
                run = 0  # blocks present without a gap, up to here
                rooted = True  # so are those of sinks
                for depth, prefix in enumerate(chain, 1):
                    run = run + 1 if there(index, prefix) else 0
                    rooted &= depth > rules.num_sink_blocks or run == depth
                    usable[depth] &= rooted and run >= depth - rules.first_needed(depth * self._size)
        return max(depth for depth, ok in enumerate(usable) if ok)
