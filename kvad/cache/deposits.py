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

from kvad.cache.blocks import Prefix
from kvad.cache.disk import Buffer
from kvad.cache.sizing import CacheConfig, Group
from kvad.errors import ConfigError

__all__ = [
    "Came",
    "Deposits",
    "Fetch",
    "Found",
    "Name",
    "Ticket",
    "Tier",
    "TierHits",
    "check_shared",
    "name_of",
    "proof",
]


def check_shared(cache: CacheConfig, placed: Sequence[Group]) -> None:
    """ConfigError: the cache is to have tiers, and none of its blocks is one that another request could use."""
    if cache.tier is None and cache.tier_ram is None:
        return
    own = [group for group in placed if not group.mixer.cross and group.level is None]
    if not own or any(group.scored is not None or group.levels is not None for group in own):
        what = f"under policy {cache.kept} each row keeps its own" if own else "an encoder keeps nothing"
        raise ConfigError(f"cache.tier: {what}: there is no block that another request could use", "leave it out")


class Name(NamedTuple):
    """Of a stored block: ``key`` finds it, ``parent`` and ``tokens`` (int64, packed) must be equal before it is
    used."""

    key: str
    parent: str
    tokens: bytes


class Ticket:
    """One block on its way: ``pieces`` by group when it came, ``why`` not where it did not; ``place``: from where,
    ``packed``: where it lay packed."""

    __slots__ = ("__weakref__", "done", "groups", "name", "packed", "pieces", "place", "why")

    def __init__(self, name: Name, groups: tuple[int, ...]) -> None:
        self.name, self.groups = name, groups
        self.done, self.place, self.why = False, "", ""
        self.packed = False
        self.pieces: Mapping[int, Buffer] | None = None

    def came(self, pieces: Mapping[int, Buffer], place: str) -> None:
        self.pieces, self.place = pieces, place
        self.done = True

    def failed(self, why: str) -> None:
        self.pieces, self.why = None, why
        self.done = True


class Tier(Protocol):
    """What keeps blocks outside the pools (``tiers.py``; a fake in the tests).  Nothing here waits for a disk."""

    def has(self, key: str) -> bool: ...

    def load(self, name: Name, groups: tuple[int, ...]) -> Ticket: ...

    def wants(self, name: Name, groups: tuple[int, ...], *, evicted: bool) -> int | None:
        """The number under which Memory will hand over the block; None: it is not wanted."""
        ...

    def cancel(self, number: int) -> None:
        """What was wanted will not come, or what was lent is not asked for."""
        ...

    def lend(self, pieces: Mapping[int, Buffer]) -> int:
        """The number under which Memory will ask for these."""
        ...

    def drop(self, key: str) -> None:
        """It cannot be trusted: nobody is to find it again."""
        ...


def proof(prefix: Prefix) -> bytes:
    """A digest of the whole history; that of each prefix is computed once."""
    pending = []
    at: Prefix | None = prefix
    while at is not None and not at.proof:
        pending.append(at)
        at = at.parent
    for each in reversed(pending):
        before = b"root" if each.parent is None else each.parent.proof
        each.proof = blake2b(before + each.tokens, digest_size=32).digest()
    return prefix.proof


def name_of(prefix: Prefix) -> Name:
    assert prefix.parent is not None, "a root is no block"
    return Name(prefix.digest.hex(), proof(prefix.parent).hex(), prefix.tokens)


class Fetch:
    """What a row that waits is fetched: the next blocks of its chain, behind those that stand in the pools.

    ``chain``: every known block of its tokens, which it holds on to.  Nothing moves before :meth:`start`."""

    def __init__(self, tier: Tier | None, chain: Sequence[Prefix], wanted: Mapping[Prefix, tuple[int, ...]]) -> None:
        self._tier, self.chain, self._wanted = tier, tuple(chain), dict(wanted)
        self.tickets: dict[Prefix, Ticket] = {}
        self._left: list[Ticket] = []  # that were not done when it was asked last
        self.missed = ""  # why the chain is not longer

    @property
    def started(self) -> bool:
        return len(self.tickets) == len(self._wanted)

    def start(self) -> None:
        if self._tier is not None and not self.started:
            self.tickets = {prefix: self._tier.load(name_of(prefix), own) for prefix, own in self._wanted.items()}
            self._left = list(self.tickets.values())

    def ready(self) -> bool:
        while self._left and self._left[-1].done:  # they come in their order: the last one is asked first
            self._left.pop()
        return self.started and not self._left

    @property
    def coming(self) -> bool:
        """Is it on its way?"""
        return self.started and not self.ready()

    def has(self, prefix: Prefix, group: int) -> bool:
        ticket = self.tickets.get(prefix)
        return ticket is not None and ticket.pieces is not None and group in ticket.pieces

    def why(self) -> str:
        """Why the first block that did not come did not."""
        return next((each.why for each in self.tickets.values() if each.why), self.missed)


@dataclass
class TierHits:
    """Tokens that rows took from each place ("ram", "disk"; the others of a hit were in the pool), and admissions whose
    chain ended early, by reason."""

    tokens: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)


class Came(NamedTuple):
    """A block that a tier gave back: the ``depth``-th of its row, of these groups; ``place``: "ram", "packed" (in
    RAM) or "disk"."""

    depth: int
    groups: tuple[int, ...]
    place: str
    nbytes: int


class Found(NamedTuple):
    """What a row was admitted with of the tiers.  ``passed``: so many blocks before those, which a window has passed;
    ``why`` its chain is not longer: "" where there is no more of it."""

    came: tuple[Came, ...] = ()
    passed: int = 0
    why: str = ""


class Load(NamedTuple):
    """One block that a row waits for: its bytes, and where they go, per group."""

    pieces: Mapping[int, Buffer]
    blocks: dict[int, int]


class Deposits:
    """What the next moves, which name ``num_groups`` groups, are to copy out and in."""

    def __init__(self, tier: Tier, num_groups: int) -> None:
        self.tier, self._num_groups = tier, num_groups
        self._stores: dict[int, tuple[str, dict[int, int]]] = {}  # number -> key, blocks by group
        self._loads: dict[int, tuple[list[Load], Prefix]] = {}  # by row; and the furthest block that it was fetched
        self.told: dict[int, Prefix] = {}  # by row: loaded, and not committed yet
        self.hits = TierHits()
        self.found: dict[int, Found] | None = None  # by row, of its admission, until it commits; None: nobody asks

    # ------------------------------------------------------------ out

    def published(self, prefix: Prefix, blocks: dict[int, int]) -> None:
        """A block that others may find from now on, in these groups."""
        self._store(prefix, blocks, evicted=False)

    def evicted(self, index: int, block: int, prefix: Prefix) -> None:
        """A pool hands the block on; its contents stand until the next moves."""
        self._store(prefix, {index: block}, evicted=True)

    def withdrawn(self, prefix: Prefix) -> None:
        """Its numbers cannot be trusted."""
        if prefix.parent is None:
            return
        key = prefix.digest.hex()
        for number in [number for number, (other, _) in self._stores.items() if other == key]:
            self.tier.cancel(number)
            del self._stores[number]
        self.tier.drop(key)

    def forget(self) -> None:
        """Nothing that stands in the pools is to be stored any more (the weights changed)."""
        for number in self._stores:
            self.tier.cancel(number)
        self._stores.clear()

    def _store(self, prefix: Prefix, blocks: dict[int, int], *, evicted: bool) -> None:
        if prefix.parent is None:
            return
        number = self.tier.wants(name_of(prefix), tuple(blocks), evicted=evicted)
        if number is not None:
            self._stores[number] = prefix.digest.hex(), blocks

    # ------------------------------------------------------------ in

    def claimed(
        self, row: int, fetch: Fetch, missing: Mapping[Prefix, dict[int, int]], last: Prefix, size: int, passed: int
    ) -> None:
        """A row has taken blocks of ``size`` (by prefix, then by group) for what it was fetched, up to ``last``;
        ``passed``: so many blocks before those need not be there."""
        loads = []
        for prefix, blocks in missing.items():
            ticket = fetch.tickets[prefix]
            assert ticket.pieces is not None, "a block that never came is claimed"
            loads.append(Load(ticket.pieces, blocks))
            self.hits.tokens[ticket.place] += size
        if passed:  # a window has passed what comes before: whatever brought the rest made it free
            self.hits.tokens[fetch.tickets[next(iter(missing))].place] += passed * size
        self._loads[row] = loads, last
        if self.found is not None:
            came = (_came(prefix, fetch.tickets[prefix], tuple(blocks)) for prefix, blocks in missing.items())
            self.found[row] = Found(tuple(came), passed)

    def admitted(self, row: int, why: str) -> None:
        """The tiers were asked for a row, and its chain is as long as it will be; ``why`` it is not longer."""
        if why:
            self.hits.misses[why] += 1
        if self.found is not None:
            self.found[row] = self.found.get(row, Found())._replace(why=why)

    def waits(self, row: int) -> bool:
        """Are the row's blocks still empty?"""
        return row in self._loads

    def left(self, row: int) -> Prefix | None:
        """The row gives its blocks back, or has committed: the furthest block that it was fetched and nobody has seen
        come out right."""
        if self.found is not None:
            self.found.pop(row, None)
        waiting = self._loads.pop(row, None)
        return self.told.pop(row, None if waiting is None else waiting[1])

    # ------------------------------------------------------------ the moves

    @property
    def pending(self) -> bool:
        return bool(self._stores or self._loads)

    def stores(self) -> tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]:
        """What is to be copied out, told once: (number, per group its block or nothing)."""
        stores = tuple((number, self._by_group(blocks)) for number, (_, blocks) in self._stores.items())
        self._stores.clear()
        return stores

    def loads(self) -> tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]:
        """What is to be copied in, told once."""
        told = []
        for row, (loads, last) in self._loads.items():
            self.told[row] = last
            for load in loads:
                told.append((self.tier.lend(load.pieces), self._by_group(load.blocks)))
        self._loads.clear()
        return tuple(told)

    def _by_group(self, blocks: dict[int, int]) -> tuple[tuple[int, ...], ...]:
        return tuple((blocks[index],) if index in blocks else () for index in range(self._num_groups))


def _came(prefix: Prefix, ticket: Ticket, groups: tuple[int, ...]) -> Came:
    assert ticket.pieces is not None
    nbytes = sum(memoryview(ticket.pieces[group]).nbytes for group in groups)
    return Came(prefix.depth, groups, "packed" if ticket.packed else ticket.place, nbytes)
