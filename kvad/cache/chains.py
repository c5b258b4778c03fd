"""What is known of a row's tokens: chains of full blocks, found, claimed, published and withdrawn; and the tiers'.

A chain is a row of :class:`~kvad.cache.blocks.Prefix`, each the history of the one before and a block more.  A row may
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

from kvad.cache.blocks import BlockPool, Prefix, Prefixes
from kvad.cache.deposits import Deposits, Fetch
from kvad.cache.rules import Rules
from kvad.cache.seats import NEVER, Seat, place_of

__all__ = ["Chains"]


class Chains:
    """Of the groups that take tokens, all of one block size.  ``deposits``: what they say to the tiers, if there are
    any.  ``hits``, ``misses``: admissions that found something known and that did not; ``hit_tokens``: what of them
    needed no computing."""

    def __init__(
        self, rules: Sequence[Rules], pools: Sequence[BlockPool], prefixes: Prefixes, deposits: Deposits | None
    ) -> None:
        self._rules, self._pools, self.prefixes, self.deposits = tuple(rules), tuple(pools), prefixes, deposits
        self._size = rules[0].size if rules else 1
        self.hits = self.misses = self.hit_tokens = 0

    # ------------------------------------------------------------ found

    def find(self, root: Prefix, tokens: Sequence[int], longest: int, fetch: Fetch | None = None) -> list[Prefix]:
        """The longest chain of known blocks of ``tokens`` that every group can serve, at most ``longest`` tokens."""
        size = self._size
        stride = size * 8
        packed = array("q", tokens[: longest - longest % size]).tobytes() if longest > 0 else b""
        full = [index for index, rules in enumerate(self._rules) if rules.window == NEVER]
        chain: list[Prefix] = []
        prefix: Prefix | None = root
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

    def survives(self, seat: Seat) -> int:
        """Tokens from the row's start on that would still be known if it gave its blocks back: others hold them."""
        prefix, chain = seat.tip, list[Prefix]()
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

    def keys(self, tokens: Sequence[int], root: bytes) -> list[str]:
        """Under which keys the tiers have the whole blocks of these tokens."""
        made, size, at = list[Prefix](), self._size, self.prefixes.root(root)
        for start in range(0, len(tokens) - size + 1, size):
            at = None if at is None else self.prefixes.extend(at, array("q", tokens[start : start + size]).tobytes())
            if at is None:
                break
            made.append(at)
        return [prefix.digest.hex() for prefix in made]

    def fetch(self, tokens: Sequence[int], root: bytes, longest: int) -> Fetch:
        """What the tiers have of the first ``longest`` tokens and no pool does; nothing moves before it is started.

        A group with a window is fetched the blocks that the longest known prefix needs, and no others.
        """
        at = self.prefixes.root(root) if self.deposits is not None else None
        if at is None or self.deposits is None or longest < self._size:
            return Fetch(None, (), {})
        tier, size, missed = self.deposits.tier, self._size, ""
        packed = array("q", tokens[: longest - longest % size]).tobytes()
        chain: list[Prefix] = []
        stored: set[Prefix] = set()
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
        wanted: dict[Prefix, tuple[int, ...]] = {}
        for index, pool in enumerate(self._pools):
            for prefix in self._needs(index, chain[:depth])[1]:
                if pool.find(prefix) is None:
                    wanted[prefix] = (*wanted.get(prefix, ()), index)
        fetch = Fetch(tier, chain[:depth], {prefix: wanted[prefix] for prefix in chain[:depth] if prefix in wanted})
        fetch.missed = missed
        return fetch

    # ------------------------------------------------------------ claimed

    def claim(self, row: int, seat: Seat, tokens: Sequence[int], longest: int, fetch: Fetch | None) -> int:
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
        if self.deposits is not None and fetch is not None:
            short = len(chain) < longest // self._size
            self.deposits.admitted(row, (why or fetch.why() or "moved") if short else "")
        length = len(chain) * self._size
        self.hit_tokens += length
        return length

    def _room_for(self, chain: Sequence[Prefix]) -> bool:
        """Are there blocks for what of a chain was fetched, beside those that it claims?"""
        for index, pool in enumerate(self._pools):
            found = [pool.find(prefix) for prefix in self._needs(index, chain)[1]]
            idle = sum(block is not None and pool.refs[block] == 0 for block in found)
            if found.count(None) > pool.available - idle:
                return False
        return True

    def _hold(self, row: int, seat: Seat, chain: Sequence[Prefix], tokens: Sequence[int], fetch: Fetch | None) -> None:
        """Hold the blocks of a chain: those in the pools are claimed before any is taken for those that were
        fetched."""
        missing: dict[Prefix, dict[int, int]] = {}
        for claimed in (True, False):
            for index, (hold, pool) in enumerate(zip(seat.holds, self._pools, strict=True)):
                first, needed = self._needs(index, chain)
                if claimed:
                    hold.gap = first - self._rules[index].sinks
                    found = [pool.find(prefix) for prefix in needed]
                    for block in found:
                        if block is not None:
                            pool.acquire(block)
                    hold.blocks = [0 if block is None else block for block in found]
                    continue
                for place, prefix in enumerate(needed):
                    if not hold.blocks[place]:
                        hold.blocks[place] = missing.setdefault(prefix, {})[index] = pool.take()[0]
        sure = next((at for at, prefix in enumerate(chain) if prefix in missing), len(chain))
        seat.tip = chain[sure - 1] if sure else seat.root
        seat.tail = list(tokens[sure * self._size : len(chain) * self._size])
        if missing:
            assert fetch is not None and self.deposits is not None
            passed = 0 if any(hold.gap == 0 for hold in seat.holds) else sure
            self.deposits.claimed(row, fetch, missing, chain[-1], self._size, passed)

    # ------------------------------------------------------------ published, and not any more

    def publish(self, seat: Seat, sure: int) -> None:
        """The row's full blocks within its first ``sure`` tokens."""
        size, tail, at = self._size, seat.tail, 0
        assert seat.tip is not None
        for _ in range(sure // size - seat.tip.depth):
            tip = self.prefixes.extend(seat.tip, array("q", tail[at : at + size]).tobytes())
            if tip is None:  # its digest is another history's: this row publishes no more
                seat.tip, seat.tail = None, []
                return
            stored = {}
            for index, (hold, pool, rules) in enumerate(zip(seat.holds, self._pools, self._rules, strict=True)):
                place = place_of(tip.depth - 1, rules.sinks, hold.gap)
                if place is not None:
                    pool.publish(hold.blocks[place], tip)
                    stored[index] = hold.blocks[place]
            if self.deposits is not None:
                self.deposits.published(tip, stored)
            seat.tip = tip
            at += size
        del tail[:at]

    def publish_again(self, seat: Seat) -> None:
        """What a woken row had published before it was parked, where nobody else has it."""
        seat.again, prefix = False, seat.tip
        while prefix is not None and prefix.depth:
            for hold, pool, rules in zip(seat.holds, self._pools, self._rules, strict=True):
                place = place_of(prefix.depth - 1, rules.sinks, hold.gap)
                if place is not None and pool.prefixes[hold.blocks[place]] is None:
                    pool.publish(hold.blocks[place], prefix)
            prefix = prefix.parent

    def withdraw(self, prefix: Prefix | None) -> None:
        """A whole history, from its end to its root: its numbers cannot be trusted."""
        while prefix is not None:
            for pool in self._pools:
                block = pool.find(prefix)
                if block is not None:
                    pool.withdraw(block)
            if self.deposits is not None:
                self.deposits.withdrawn(prefix)
            prefix = prefix.parent

    def history(self, seat: Seat, length: int) -> tuple[Prefix | None, list[int]]:
        """(tip, tail) of the row's first ``length`` tokens."""
        tip = seat.tip
        if tip is None:
            return None, []
        size = self._size
        depth, rest = divmod(length, size)
        if depth >= tip.depth:
            return tip, seat.tail[: length - tip.depth * size]
        while tip.depth > depth + 1:
            assert tip.parent is not None
            tip = tip.parent
        return tip.parent, array("q", tip.tokens).tolist()[:rest]

    # ------------------------------------------------------------ inside

    def _there(self, index: int, prefix: Prefix, fetch: Fetch | None) -> bool:
        """Is this block of group ``index`` in its pool, or fetched?"""
        return self._pools[index].find(prefix) is not None or (fetch is not None and fetch.has(prefix, index))

    def _needs(self, index: int, chain: Sequence[Prefix]) -> tuple[int, list[Prefix]]:
        """(the first one behind those of sinks, all) of the blocks of a chain that a row in group ``index`` holds."""
        rules = self._rules[index]
        first = rules.first_needed(len(chain) * self._size)
        return first, [*chain[: rules.sinks], *chain[first:]]

    def _served(self, chain: Sequence[Prefix], there: Callable[[int, Prefix], bool]) -> int:
        """How many blocks of a chain, each of which is there in the groups without a window, all groups can serve."""
        usable = [True] * (len(chain) + 1)
        for index, rules in enumerate(self._rules):
            if rules.window != NEVER:
                run = 0  # blocks present without a gap, up to here
                rooted = True  # so are those of sinks
                for depth, prefix in enumerate(chain, 1):
                    run = run + 1 if there(index, prefix) else 0
                    rooted &= depth > rules.sinks or run == depth
                    usable[depth] &= rooted and run >= depth - rules.first_needed(depth * self._size)
        return max(depth for depth, ok in enumerate(usable) if ok)
