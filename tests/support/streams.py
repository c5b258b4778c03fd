"""Reference and fake cache of the stream tests: integers instead of tensors, and the rules of every policy.

The keys and values of a token depend on everything that it saw. So each token has a *value*: a hash of its position,
its token id, and all values that it saw. ``SoloSequence`` computes these values one token at a time over plain lists,
without blocks. ``FakeKVCache`` computes them from its slots, by way of the block tables and block operations of the
real KVCacheManager: a stale, uncleared, misplaced, lost or foreign slot changes the value. Which tokens rank high, and
which blocks match a query, are functions of (token, position, layer, head).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from zlib import crc32

from kvad.cache.config import CacheConfig
from kvad.cache.groups import CacheGroup, build_groups
from kvad.cache.manager.allocation import BlockAllocation
from kvad.cache.manager.encoder_blocks import EncoderAllocation
from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.cache.policy import EvictionPolicy
from kvad.config.model import AttentionSpec
from kvad.model_input import NULL_BLOCK, PADDING_BLOCK, RESERVED_BLOCKS, AttentionPattern, BlockOps, EvictOp

FULL = AttentionSpec(True, None, 1, 8, 8)
WIDE = AttentionSpec(True, None, 2, 8, 8)
NARROW = AttentionSpec(True, 5, 1, 8, 8)
SELF = AttentionSpec(True, 1, 1, 8, 8)
CROSS = AttentionSpec(False, None, 1, 8, 8, is_cross_attention=True)
WIDE_CROSS = AttentionSpec(False, None, 2, 8, 8, is_cross_attention=True)


class Mismatch(Exception):
    """A sequence differs from its solo run."""


class Setup(NamedTuple):
    """Layers, their cache, and the limits of a scheduler.

    ``spare``: blocks of each pool besides those of one sequence at its longest; None: as configured.
    """

    specs: tuple[AttentionSpec, ...]
    config: CacheConfig
    max_num_batched_tokens: int = 9
    max_len: int = 40
    hash_bits: int = 128
    spare: int | None = None

    def groups(self) -> tuple[CacheGroup, ...]:
        groups, spare = build_groups(self.specs, self.config), self.spare
        if spare is None:
            return groups
        return tuple(
            group._replace(num_blocks=min(group.num_blocks, group.max_blocks_per_seq + spare + RESERVED_BLOCKS))
            for group in groups
        )

    def check_groups(self, groups: Sequence[CacheGroup]) -> None:
        """Check that every layer is in one group with its own spec: ``SoloSequence`` has its rules from the groups."""
        layers = [(layer, group.spec) for group in groups if group.lower_level is None for layer in group.layers]
        specs = [spec for _, spec in sorted(layers, key=lambda each: each[0])]
        if "sinks(" in str(self.config.policy) or "block-window(" in str(self.config.policy):
            assert all(spec.window is not None for spec in specs[1:])  # The first layer is full in some setups.
            windows = [spec.window for spec in self.specs]
            unrestricted = {"num_sinks": 0, "window_step": 1, "layer_window": None, "renumber_positions": False}
            specs = [spec._replace(window=own, **unrestricted) for spec, own in zip(specs, windows, strict=True)]
        assert tuple(specs) == self.specs, "the reference would have other layers than the setup"


def cache(**fields: object) -> CacheConfig:
    defaults = {"block_size": 4, "max_num_seqs": 4, "max_seq_len": 40, "prefill_chunk_size": 6}
    return CacheConfig(**{**defaults, **fields})  # type: ignore[arg-type]


def policy_setup(policy: str, *, max_len: int = 40, spare: int | None = None, **fields: object) -> Setup:
    specs = (FULL, WIDE, NARROW, CROSS) if "max_source_len" in fields else (FULL, WIDE, NARROW)
    return Setup(specs, cache(policy=policy, **fields), 11, max_len, spare=spare)


TIGHT = {"max_num_seqs": 5, "prefill_chunk_size": 7}
EXACT_SETUPS = {
    "full-tight": Setup((FULL,), cache(**TIGHT, num_blocks=12), 12),
    "full-collisions": Setup((FULL,), cache(**TIGHT, block_size=2, num_blocks=30), 12, hash_bits=8),
    "pool-below-limit": Setup((FULL, NARROW), cache(max_num_seqs=3, prefill_chunk_size=7, num_blocks=6)),
    "mixed": Setup((NARROW, FULL, NARROW, WIDE, SELF), cache(num_blocks=13)),
    "mixed-tall": Setup(
        (FULL, NARROW), cache(block_size=1, max_seq_len=30, prefill_chunk_size=5, num_blocks=45), 30, 30
    ),
    "windows": Setup((NARROW, SELF), cache(block_size=2), 8),
    "contiguous": Setup((FULL, NARROW, SELF), cache(layout="contiguous")),
    "translating": Setup((FULL, NARROW, CROSS, WIDE_CROSS), cache(num_blocks=16, max_source_len=14), 12),
    "translating-contiguous": Setup((FULL, CROSS), cache(layout="contiguous", max_source_len=14)),
    "no-prefix": Setup((FULL, NARROW), cache(num_blocks=14, enable_prefix_caching=False)),
}
POLICY_SETUPS = {
    "sinks": policy_setup("sinks(3, 8)", spare=4),
    "sinks-and-full": policy_setup("0: full; sinks(3, 4)", num_blocks=13),
    "block-window": policy_setup("0: full; block-window(8)", num_blocks=13),
    "block-window-steps": policy_setup("block-window(9, 3)", spare=4, block_size=2),
    "sinks-contiguous": policy_setup("sinks(3, 8)", layout="contiguous"),
    "endless": policy_setup("sinks(3, 8)", max_seq_len=16, max_len=70, endless=True, spare=3),
    "endless-contiguous": policy_setup("sinks(5, 7)", max_seq_len=16, max_len=70, endless=True, layout="contiguous"),
    "ranked": policy_setup("0: full; key-norm(7, interval=4)", num_blocks=13),
    "ranked-tight": policy_setup(
        "0: random(9, interval=2); key-norm(6, interval=3, num_sinks=2, recent=2)", spare=3, block_size=2
    ),
    "observed": policy_setup("0: full; heavy-hitters(8, interval=4, num_sinks=1)", num_blocks=13),
    "ranked-contiguous": policy_setup("key-norm(6, interval=4)", layout="contiguous"),
    "tiered": policy_setup("0: full; tiered(4, quantized=8, interval=4, summaries=4, ratio=2)", num_blocks=13),
    "tiered-tight": policy_setup("tiered(4, quantized=4, interval=4, num_sinks=4, summaries=4, ratio=4)", spare=3),
    "quantized": policy_setup("tiered(4, interval=8)", num_blocks=10),
    "dropped": policy_setup("0: key-norm(6, interval=4); tiered(8, quantized=0, interval=4, num_sinks=4)", spare=3),
    "offload": policy_setup("offload(8, interval=4)", num_blocks=7),
    "offload-and-full": policy_setup("0: full; offload(4, interval=8)", num_blocks=13),
    "offload-translating": policy_setup("offload(4, interval=4)", num_blocks=8, max_source_len=14),
    "quest": policy_setup("quest(8)", num_blocks=14),
    "ranked-translating": policy_setup("0: full; key-norm(7, interval=4)", num_blocks=14, max_source_len=14),
}
SETUPS = EXACT_SETUPS | POLICY_SETUPS
# Under these policies, a sequence that was preempted cannot be recomputed.
LOSSY = ("ranked", "ranked-tight", "observed", "tiered", "tiered-tight", "quantized", "dropped", "ranked-translating")


# ---------------------------------------------------------------- tokens, and the rules of the policies


class Token:
    """One token of a sequence in one group; ``value`` depends on all that the token saw."""

    __slots__ = ("position", "token_id", "value")

    def __init__(self, position: int, token_id: int) -> None:
        self.position, self.token_id = position, token_id
        self.set_history(0)

    def set_history(self, history: int) -> None:
        self.value = hash((self.position, self.token_id, history))


EXACT, QUANTIZED, SUMMARY = range(3)  # the form in which a slot stores tokens
Cell = tuple[int, tuple[Token, ...]]


def total(cells: Iterable[Cell]) -> int:
    """Return a value of these cells that does not depend on their order."""
    return sum(
        tokens[0].value if form == EXACT else hash((form, *(token.value for token in tokens))) for form, tokens in cells
    )


def source_tokens(source: Sequence[int]) -> list[Token]:
    """Return the encoder's output: each position's token depends on the whole input."""
    tokens = [Token(position, token_id) for position, token_id in enumerate(source)]
    for token in tokens:
        token.set_history(hash(tuple(source)))
    return tokens


def retained(policy: EvictionPolicy, cells: Sequence[Cell], head: tuple[int, int], count: int, now: int) -> list[Cell]:
    """Return the cells that an eviction leaves for one (layer, head)."""

    def rank(index: int) -> tuple[bool, int, int]:
        token = cells[index][1][0]
        is_protected = token.position >= now - policy.recent or token.position < policy.num_sinks
        return is_protected, hash((token.position, token.token_id, *head)), -index

    best = sorted(range(len(cells)), key=rank, reverse=True)[:count]
    return [cells[index] for index in sorted(best)]


def extend_bounds(bounds: int, token: Token) -> int:
    """Add a token to the key bounds of a block: in any order, and no token can be removed."""
    return max(bounds, hash((token.position, token.token_id)) & 0xFFFF)


def best_blocks(bounds: Sequence[int], last: int, query: int, budget: int) -> list[int]:
    ranked = sorted(range(last), key=lambda block: (hash((bounds[block], query)), -block), reverse=True)
    return [*sorted(ranked[: max(0, budget - 1)]), last]


def is_visible(pattern: AttentionPattern, query: int, position: int) -> bool:
    if position > query or (pattern.layer_window is not None and query - position >= pattern.layer_window):
        return False
    return position >= pattern.first_visible(query) or position < pattern.num_sinks


# ---------------------------------------------------------------- the reference


class SoloGroup:
    """The tokens of a sequence in one group, one token at a time."""

    def __init__(self, group: CacheGroup) -> None:
        self.group, self.pattern = group, group.spec.pattern
        self.cells: list[Cell] = []
        heads = range(group.spec.num_kv_heads) if group.eviction_policy is not None else ()
        self.heads: dict[tuple[int, int], list[Cell]] = {(layer, head): [] for layer in group.layers for head in heads}
        self.num_demoted = 0
        self.quantized: list[Cell] = []
        self.summaries: list[Cell] = []

    def push(self, token: Token) -> int:
        """Add a token and return the value of what it sees."""
        now, group, cell = token.position, self.group, (EXACT, (token,))
        if group.eviction_policy is not None:
            if group.eviction_policy.evicts_at(now):
                for head, cells in self.heads.items():
                    self.heads[head] = retained(group.eviction_policy, cells, head, group.eviction_policy.budget, now)
            for cells in self.heads.values():
                cells.append(cell)
            return hash(tuple(map(total, self.heads.values())))
        if group.demotion_policy is not None and now % group.demotion_policy.interval == 0:
            self.demote(now)
        self.cells.append(cell)
        if group.sparse_read_policy is not None:
            return total(self.selected(now, group.sparse_read_policy.budget))
        if group.demotion_policy is not None:
            return total([*self.cells, *self.quantized, *self.summaries])
        return total(cell for cell in self.cells if is_visible(self.pattern, now, cell[1][0].position))

    def demote(self, now: int) -> None:
        policy, size = self.group.demotion_policy, self.group.block_size
        assert policy is not None
        num_leaving = max(0, (now - policy.recent) // size * size - policy.num_sinks) - self.num_demoted
        if num_leaving <= 0:
            return
        leaving = self.cells[policy.num_sinks : policy.num_sinks + num_leaving]
        del self.cells[policy.num_sinks : policy.num_sinks + num_leaving]
        self.num_demoted += num_leaving
        if policy.quantized:
            self.quantized += [(QUANTIZED, tokens) for _, tokens in leaving]
            excess = 0 if policy.quantized < 0 else max(0, len(self.quantized) - policy.quantized)
            leaving, self.quantized = self.quantized[:excess], self.quantized[excess:]
        if policy.summaries:
            for start in range(0, len(leaving), policy.ratio):
                merged = tuple(token for _, tokens in leaving[start : start + policy.ratio] for token in tokens)
                self.summaries.append((SUMMARY, merged))
            excess_blocks = -(-len(self.summaries) // size) - -(-policy.summaries // size)
            self.summaries = self.summaries[max(0, excess_blocks) * size :]

    def selected(self, now: int, budget: int) -> list[Cell]:
        size = self.group.block_size
        bounds = [0] * (now // size + 1)
        for _, (token,) in self.cells:
            bounds[token.position // size] = extend_bounds(bounds[token.position // size], token)
        blocks = best_blocks(bounds, now // size, now, -(-budget // size))
        return [cell for cell in self.cells if cell[1][0].position // size in blocks]


class SoloSequence:
    """A sequence alone, without blocks: ``values[p]`` is the value of everything that position p sees."""

    def __init__(
        self, root: bytes, groups: Sequence[CacheGroup], tokens: Sequence[int] = (), source: Sequence[int] = ()
    ) -> None:
        self.root, self.source = root, tuple(source)
        self.all_groups = tuple(group for group in groups if group.lower_level is None)
        self.groups = [SoloGroup(group) for group in self.all_groups]
        self.encoder_value = sum(token.value for token in source_tokens(source))
        self.tokens: list[int] = []
        self.values: list[int] = []
        for token in tokens:
            self.push(token)

    def push(self, token_id: int) -> int:
        token = Token(len(self.tokens), token_id)
        views = [self.encoder_value if solo.group.spec.is_cross_attention else solo.push(token) for solo in self.groups]
        self.tokens.append(token_id)
        self.values.append(hash((crc32(self.root), *views)))
        token.set_history(self.values[-1])
        return self.values[-1]

    def truncate(self, length: int) -> None:
        if length < len(self.tokens):
            self.__dict__.update(self.with_tokens(self.tokens[:length]).__dict__)

    def with_tokens(self, tokens: Sequence[int]) -> SoloSequence:
        """Compute the same sequence with other tokens."""
        return SoloSequence(self.root, self.all_groups, tokens, self.source)


# ---------------------------------------------------------------- the fake cache

Column = list[Cell | None]  # one cell per slot


class FakeKVCache:
    """Applies block operations to cells. A group that evicts has a column per (layer, head), others have one."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self.groups, self.patterns = groups, [group.spec.pattern for group in groups]
        self.columns: list[dict[tuple[int, int], Column]] = []
        for group in groups:
            heads = [(0, 0)]
            if group.eviction_policy is not None:
                heads = [(layer, head) for layer in group.layers for head in range(group.spec.num_kv_heads)]
            self.columns.append({head: [None] * (group.num_blocks * group.block_size) for head in heads})
        self.bounds = [[0] * group.num_blocks for group in groups]
        self.swapped: dict[int, list[list[tuple[int, list[Column]]]]] = {}
        self.last_written: dict[tuple[int, int], Token] = {}

    def slots(self, g: int, blocks: Iterable[int]) -> list[int]:
        size = self.groups[g].block_size
        return [slot for block in blocks for slot in range(block * size, (block + 1) * size)]

    def read_block(self, g: int, block: int) -> tuple[int, list[Column]]:
        """Return a copy of a block: its key bounds, and its cells per column."""
        slots = slice(block * self.groups[g].block_size, (block + 1) * self.groups[g].block_size)
        return self.bounds[g][block], [column[slots] for column in self.columns[g].values()]

    def write_block(self, g: int, block: int, content: tuple[int, list[Column]]) -> None:
        slots = slice(block * self.groups[g].block_size, (block + 1) * self.groups[g].block_size)
        self.bounds[g][block] = content[0]
        for column, cells in zip(self.columns[g].values(), content[1], strict=True):
            column[slots] = cells

    # -------- block operations

    def apply(self, block_ops: BlockOps) -> None:
        self.swap(block_ops)
        for g, evictions in enumerate(block_ops.evict):
            self.evict(g, evictions)
        for g, pairs in enumerate(block_ops.quantize):
            self.quantize(g, pairs)
        for g in range(len(block_ops.merge)):
            self.merge(g, block_ops)
        for g in range(len(self.groups)):
            for block in block_ops.clear[g]:
                self.write_block(g, block, self.filled(g, None))
            for source, target, count in block_ops.copy[g]:
                self.copy(g, source, target, count)

    def swap(self, block_ops: BlockOps) -> None:
        for key, blocks in block_ops.swap_out:
            self.swapped[key] = [[self.read_block(g, block) for block in held] for g, held in enumerate(blocks)]
        for key, blocks in block_ops.swap_in:
            for g, (held, contents) in enumerate(zip(blocks, self.swapped.pop(key), strict=True)):
                for block, content in zip(held, contents, strict=True):
                    self.write_block(g, block, content)
        for key in block_ops.drop_swapped:
            self.swapped.pop(key, None)

    def filled(self, g: int, cell: Cell | None) -> tuple[int, list[Column]]:
        """Return the content of a block with ``cell`` in every slot."""
        bounds = 0 if cell is None else 1 << 20
        return bounds, [[cell] * self.groups[g].block_size for _ in self.columns[g]]

    def evict(self, g: int, evictions: Sequence[EvictOp]) -> None:
        policy, results = self.groups[g].eviction_policy, []
        for eviction in evictions:
            assert policy is not None
            slots = self.slots(g, eviction.blocks)[: eviction.num_held]
            for head, column in self.columns[g].items():
                cells = [cell for slot in slots if (cell := column[slot]) is not None]
                if len(cells) != eviction.num_held:
                    raise Mismatch("an eviction reads an empty slot")
                kept = retained(policy, cells, head, eviction.num_retained, eviction.length)
                results.append((eviction, column, kept))
        for eviction, column, kept in results:
            for index, slot in enumerate(self.slots(g, eviction.target_blocks)):
                column[slot] = kept[index] if index < len(kept) else None

    def upper_cells(self, g: int, blocks: Iterable[int]) -> Column:
        """Return the cells of blocks of the level above group ``g``."""
        level = self.groups[g].lower_level
        assert level is not None
        (column,) = self.columns[level.upper_group].values()
        return [column[slot] for slot in self.slots(level.upper_group, blocks)]

    def quantize(self, g: int, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            (column,), cells = self.columns[g].values(), self.upper_cells(g, [source for source, _ in pairs])
            for slot, cell in zip(self.slots(g, [target for _, target in pairs]), cells, strict=True):
                column[slot] = None if cell is None else (QUANTIZED, cell[1])

    def merge(self, g: int, block_ops: BlockOps) -> None:
        level, size = self.groups[g].lower_level, self.groups[g].block_size
        if not block_ops.merge[g] or level is None:
            return
        (column,) = self.columns[g].values()
        sources = [self.upper_cells(g, [merge.source_block]) for merge in block_ops.merge[g]]
        for merge, cells in zip(block_ops.merge[g], sources, strict=True):
            target, base = merge.target_block * size, merge.base_block * size
            for at in range(size):
                if at >= merge.first_slot or base != target:
                    column[target + at] = column[base + at] if at < merge.first_slot else None
            for at in range(0, size, level.ratio):
                tokens = tuple(token for cell in cells[at : at + level.ratio] if cell is not None for token in cell[1])
                column[target + merge.first_slot + at // level.ratio] = SUMMARY, tokens

    def copy(self, g: int, source: int, target: int, count: int) -> None:
        """Copy the first ``count`` slots of a block; the target's others are empty."""
        bounds, copied = 0, []
        for cells in self.read_block(g, source)[1]:
            copied.append([cell if at < count else None for at, cell in enumerate(cells)])
            for cell in filter(None, cells[:count]):
                bounds = extend_bounds(bounds, cell[1][0])
        self.write_block(g, target, (bounds, copied))

    def fill_unowned(self, manager: KVCacheManager) -> None:
        """Overwrite every block that no sequence and no prefix owns, unless it is about to be copied to the host."""
        for g, pool in enumerate(manager.pools):
            pending = {
                block
                for _, swapped in manager._swapped.pending_swap_outs
                for blocks in swapped[g : g + 1]
                for block in blocks
            }
            for block in range(RESERVED_BLOCKS, len(pool.refs)):
                if pool.refs[block] == 0 and pool.prefixes[block] is None and block not in pending:
                    self.write_block(g, block, self.filled(g, (EXACT, (Token(0, -777),))))

    # -------- a step

    def run(
        self,
        spans: Sequence[tuple[int, Sequence[int]]],
        roots: Sequence[bytes],
        allocation: BlockAllocation,
        num_read_slots: Sequence[int],
    ) -> list[list[int]]:
        """Return what each position of the spans (start, tokens) sees. All writes come before all reads."""
        self.apply(allocation.block_ops)
        begin, begins = 0, []
        for start, tokens in spans:
            begins.append(begin)
            for offset, token_id in enumerate(tokens):
                for g, slots in enumerate(allocation.slots):
                    self.write(g, slots[begin + offset], Token(start + offset, token_id))
            begin += len(tokens)
        for slots in allocation.slots:
            assert len(slots) == begin
            if len(set(slots)) != begin:
                raise Mismatch("two sequences write one slot")
        results = []
        for index, (start, tokens) in enumerate(spans):
            tables, values = [table[index] for table in allocation.block_tables], []
            for offset in range(len(tokens)):
                views = [
                    self.view(g, tables, start + offset, num_read_slots[index])
                    for g, group in enumerate(self.groups)
                    if group.lower_level is None
                ]
                values.append(hash((crc32(roots[index]), *views)))
                for g, slots in enumerate(allocation.slots):
                    self.last_written[g, slots[begins[index] + offset]].set_history(values[-1])
            results.append(values)
        return results

    def write(self, g: int, slot: int, token: Token) -> None:
        block = slot // self.groups[g].block_size
        assert block not in (NULL_BLOCK, PADDING_BLOCK)
        self.last_written[g, slot] = token
        for column in self.columns[g].values():
            column[slot] = EXACT, (token,)
        self.bounds[g][block] = extend_bounds(self.bounds[g][block], token)

    def view(self, g: int, tables: Sequence[Sequence[int]], now: int, num_read_slots: int) -> int:
        """Return the value of what position ``now`` sees in group ``g``, through the tables of all groups."""
        group, size, slots = self.groups[g], self.groups[g].block_size, self.slots(g, tables[g])
        if group.spec.is_cross_attention:
            (column,) = self.columns[g].values()
            return total(cell for slot in slots if (cell := column[slot]) is not None)
        if group.max_blocks_per_seq == 1:
            slots = slots[: min(size, num_read_slots)]
        assert len(slots) <= num_read_slots, "the sub-batch reads less than the sequence's table"
        if group.sparse_read_policy is not None:
            bounds = [self.bounds[g][block] for block in tables[g]]
            blocks = best_blocks(bounds, now // size, now, -(-group.sparse_read_policy.budget // size))
            slots = self.slots(g, [tables[g][block] for block in blocks])
        lower_cells: list[Cell] = []
        for lower, other in enumerate(self.groups):
            if other.lower_level is not None and other.lower_level.token_group == g:
                (column,) = self.columns[lower].values()
                lower_cells += filter(None, (column[slot] for slot in self.slots(lower, tables[lower])))
        views = []
        for column in self.columns[g].values():
            cells = [cell for slot in slots if (cell := column[slot]) is not None and cell[1][0].position <= now]
            if group.spec.window is not None:
                cells = [cell for cell in cells if is_visible(self.patterns[g], now, cell[1][0].position)]
            views.append(total(cells + lower_cells))
        return hash(tuple(views)) if group.eviction_policy is not None else views[0]

    def encode(self, sources: Sequence[Sequence[int]], allocation: EncoderAllocation) -> None:
        self.apply(allocation.block_ops)
        first_group = sum(not group.spec.is_cross_attention for group in self.groups)
        tokens = [token for source in sources for token in source_tokens(source)]
        for g, slots in enumerate(allocation.slots, first_group):
            assert len(slots) == len(set(slots)) == len(tokens)
            for slot, token in zip(slots, tokens, strict=True):
                self.write(g, slot, token)

    def spoil(self, g: int, slot: int) -> None:
        """Make the token written last to a slot wrong."""
        self.last_written[g, slot].set_history(666)
