"""BlockPool: exact ids and order. PrefixIndex: a digest is never trusted."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest

from kvad.cache.manager.block_pool import BlockPool, LowestFreeBlockPool
from kvad.cache.manager.prefix_index import PrefixIndex, PrefixNode, digest


def tokens(*values: int) -> bytes:
    return array("q", values).tobytes()


def prefix_of(prefixes: PrefixIndex, *blocks: bytes, root: bytes = b"") -> PrefixNode:
    prefix = prefixes.root(root)
    for block in blocks:
        assert prefix is not None
        prefix = prefixes.extend(prefix, block)
    assert prefix is not None
    return prefix


def published(num_blocks: int) -> tuple[BlockPool, list[PrefixNode]]:
    """Return a pool whose blocks 2, 3 and 4 are live and published under a chain."""
    pool, prefixes = BlockPool(num_blocks), PrefixIndex()
    chain = [prefix_of(prefixes, *map(tokens, range(length))) for length in (1, 2, 3)]
    assert [pool.publish(pool.allocate(), prefix) for prefix in chain] == [True] * 3
    return pool, chain


def test_blocks_are_allocated_in_order_except_the_reserved_ones():
    pool = BlockPool(6)
    assert (pool.total, pool.num_free, pool.num_live, pool.num_available) == (4, 4, 0, 4)
    assert [pool.allocate() for _ in range(4)] == [2, 3, 4, 5] and pool.evictions == 0
    assert (pool.num_free, pool.num_live, pool.num_available) == (0, 4, 0)
    pool.check()


def test_unpublished_blocks_are_reused_first_the_last_released_one_before_the_others():
    pool = BlockPool(7)
    for _ in range(3):
        pool.allocate()
    pool.decref_all([2, 3, 4])
    assert [pool.allocate() for _ in range(5)] == [2, 3, 4, 5, 6]
    pool.check()


def test_published_blocks_are_evicted_last_the_least_recently_released_one_first():
    pool, chain = published(6)
    pool.decref_all([2, 3, 4])
    assert (pool.num_free, pool.evictable, pool.num_live) == (1, 3, 0)
    assert pool.allocate() == 5 and pool.evictions == 0
    assert [pool.allocate() for _ in range(3)] == [4, 3, 2] and (pool.evictions, pool.evictable) == (3, 0)
    assert all(pool.find(prefix) is None for prefix in chain)
    pool.check()


def test_an_acquired_block_is_not_evicted_and_then_last_in_the_list():
    pool, _ = published(5)
    pool.decref_all([4, 3, 2])
    pool.incref(2)
    pool.incref(2)
    assert (pool.num_live, pool.evictable, pool.refs[2]) == (1, 2, 2)
    pool.decref(2)
    assert pool.num_live == 1
    pool.decref(2)
    assert [pool.allocate() for _ in range(3)] == [3, 4, 2]


def test_the_second_block_of_a_prefix_is_not_published():
    pool, prefix = BlockPool(5), prefix_of(PrefixIndex(), tokens(1, 2))
    first, second = pool.allocate(), pool.allocate()
    assert pool.publish(first, prefix) and not pool.publish(second, prefix) and pool.find(prefix) == first
    pool.decref(second)
    assert pool.allocate() == second and pool.evictions == 0


def test_unpublish_is_the_inverse_of_publish():
    pool, chain = published(6)
    pool.decref(3)
    pool.unpublish(2)
    pool.unpublish(3)
    assert pool.find(chain[0]) is pool.find(chain[1]) is None
    assert (pool.num_free, pool.evictable, pool.num_live) == (2, 0, 2)
    assert pool.allocate() == 3 and pool.evictions == 0
    pool.check()


def test_wrong_calls_are_asserted():
    pool = BlockPool(4)
    block = pool.allocate()
    pool.decref(block)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.decref(block)
    with pytest.raises(AssertionError, match="free and cannot be acquired"):
        pool.incref(block)
    with pytest.raises(AssertionError, match="cannot be published"):
        pool.publish(block, prefix_of(PrefixIndex(), tokens(1)))
    with pytest.raises(AssertionError, match="not published"):
        pool.unpublish(block)


CORRUPTIONS: dict[str, Callable[[BlockPool], object]] = {
    "no reference": lambda pool: pool.refs.__setitem__(2, 0),
    "owned and idle": lambda pool: pool._idle.__setitem__(2, None),
    "neither": lambda pool: pool._idle.pop(5),
    "reserved": lambda pool: pool._idle.__setitem__(1, None),
    "count of evictable blocks": lambda pool: setattr(pool, "evictable", pool.evictable + 1),
    "index": lambda pool: pool._published.clear(),
    "order": lambda pool: pool._idle.move_to_end(4, last=False),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_check_detects_a_corrupted_state(corruption):
    pool, _ = published(7)
    pool.decref(4)
    pool.check()
    CORRUPTIONS[corruption](pool)
    with pytest.raises(AssertionError):
        pool.check()


def test_a_pool_of_offloaded_blocks_allocates_the_lowest_free_one():
    pool, rng, blocks = LowestFreeBlockPool(40), random.Random(3), list[int]()
    for _ in range(500):
        if blocks and rng.random() < 0.45:
            pool.decref(blocks.pop(rng.randrange(len(blocks))))
        elif len(blocks) < 38:
            lowest = min(set(range(2, 40)) - set(blocks))
            blocks.append(pool.allocate())
            assert blocks[-1] == lowest
        pool.check()


# ---------------------------------------------------------------- prefixes


def test_a_history_has_one_node_and_its_depth_counts_blocks():
    prefixes = PrefixIndex()
    node = prefix_of(prefixes, tokens(1), tokens(2))
    assert prefix_of(prefixes, tokens(1), tokens(2)) is node
    assert node.depth == 2 and node.parent is not None and node.parent.depth == 1
    assert prefixes.find(node.parent, tokens(2)) is node
    assert prefixes.find(node.parent, tokens(3)) is None and prefixes.find(node, tokens(2)) is None
    assert prefix_of(prefixes, tokens(1), tokens(2), root=b"other adapter") is not node


def test_a_digest_includes_that_of_the_parent():
    prefixes = PrefixIndex()
    root, node = prefix_of(prefixes), prefix_of(prefixes, tokens(7))
    assert root.digest == digest(b"root:") and node.digest == digest(root.digest + tokens(7))
    assert len(node.digest) == 16


def test_a_node_lives_while_it_is_referenced():
    prefixes = PrefixIndex()
    last = prefix_of(prefixes, tokens(1), tokens(2))
    parent = last.parent
    assert parent is not None
    del last
    assert prefixes.find(parent, tokens(2)) is None
    assert prefixes.find(prefix_of(prefixes), tokens(1)) is parent


def test_a_very_long_chain_is_dropped_without_recursion():
    prefixes = PrefixIndex()
    prefix = prefixes.root(b"")
    for index in range(200_000):
        assert prefix is not None
        prefix = prefixes.extend(prefix, tokens(index))
    del prefix
    assert len(prefixes._nodes) == 0


@pytest.mark.parametrize("values", [1, 2, 16])
def test_a_digest_collision_is_never_a_hit(values):
    """The hash has few values: find and extend return the node of exactly this history, or None."""
    rng, prefixes = random.Random(values), PrefixIndex(lambda data: bytes([digest(data)[0] % values]))
    root = prefixes.root(b"")
    assert root is not None
    nodes: dict[tuple[int, ...], PrefixNode] = {(): root}
    refused = 0
    for _ in range(2000):
        history = rng.choice(sorted(nodes))
        longer = (*history, rng.randrange(3))
        assert prefixes.find(nodes[history], tokens(longer[-1])) is nodes.get(longer)
        node = prefixes.extend(nodes[history], tokens(longer[-1]))
        assert node is not None or longer not in nodes
        refused += node is None
        assert node is None or nodes.setdefault(longer, node) is node
    assert refused > 0 and len(nodes) <= values and len(set(map(id, nodes.values()))) == len(nodes)
