"""BlockPool: exact ids and order.  Prefixes: a digest is never trusted."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest

from kvad.cache.manager.block_pool import BlockPool, PrefixIndex, PrefixNode, digest


def tokens(*values: int) -> bytes:
    return array("q", values).tobytes()


def prefix_of(prefixes: PrefixIndex, *blocks: bytes, root: bytes = b"") -> PrefixNode:
    prefix = prefixes.root(root)
    for block in blocks:
        assert prefix is not None
        prefix = prefixes.extend(prefix, block)
    assert prefix is not None
    return prefix


def test_blocks_are_taken_in_order_and_the_reserved_ones_never() -> None:
    pool = BlockPool(6)
    assert (pool.total, pool.num_free, pool.num_live, pool.num_available) == (4, 4, 0, 4)
    assert [pool.allocate() for _ in range(4)] == [2, 3, 4, 5] and pool.evictions == 0
    assert (pool.num_free, pool.num_live, pool.num_available) == (0, 4, 0)
    pool.check()


def test_unpublished_blocks_are_reused_first_and_the_last_released_first_of_all() -> None:
    pool = BlockPool(7)
    for _ in range(3):
        pool.allocate()
    for block in (4, 3, 2):  # a row gives its blocks back in reverse
        pool.decref(block)
    assert [pool.allocate() for _ in range(5)] == [2, 3, 4, 5, 6]
    pool.check()


def test_published_blocks_are_evicted_last_and_the_least_recently_released_first() -> None:
    pool, prefixes = BlockPool(6), PrefixIndex()
    chain = [prefix_of(prefixes, *[tokens(i) for i in range(n)]) for n in (1, 2, 3)]
    for prefix in chain:
        block = pool.allocate()
        assert pool.publish(block, prefix)
    for block in (4, 3, 2):
        pool.decref(block)
    assert (pool.num_free, pool.evictable, pool.num_live) == (1, 3, 0)
    assert pool.allocate() == 5 and pool.evictions == 0
    assert [pool.allocate() for _ in range(3)] == [4, 3, 2]
    assert pool.evictions == 3 and pool.evictable == 0
    assert all(pool.find(prefix) is None for prefix in chain)
    pool.check()


def test_a_claimed_block_is_not_evicted_and_goes_to_the_end_of_the_list() -> None:
    pool, prefixes = BlockPool(5), PrefixIndex()
    for n in (1, 2, 3):
        pool.publish(pool.allocate(), prefix_of(prefixes, *[tokens(i) for i in range(n)]))
    for block in (2, 3, 4):
        pool.decref(block)
    pool.incref(2)
    pool.incref(2)
    assert (pool.num_live, pool.evictable, pool.refs[2]) == (1, 2, 2)
    pool.decref(2)
    assert pool.num_live == 1
    pool.decref(2)
    assert [pool.allocate() for _ in range(3)] == [3, 4, 2]


def test_the_second_block_of_a_prefix_is_not_published() -> None:
    pool, prefixes = BlockPool(5), PrefixIndex()
    prefix = prefix_of(prefixes, tokens(1, 2))
    first, second = pool.allocate(), pool.allocate()
    assert pool.publish(first, prefix)
    assert not pool.publish(second, prefix)
    assert pool.find(prefix) == first
    pool.decref(second)
    assert pool.allocate() == second and pool.evictions == 0


def test_withdraw_is_the_inverse_of_publish() -> None:
    pool, prefixes = BlockPool(5), PrefixIndex()
    live, idle = prefix_of(prefixes, tokens(1)), prefix_of(prefixes, tokens(2))
    for prefix in (live, idle):
        pool.publish(pool.allocate(), prefix)
    pool.decref(3)
    pool.unpublish(2)
    pool.unpublish(3)
    assert pool.find(live) is pool.find(idle) is None
    assert (pool.num_free, pool.evictable, pool.num_live) == (2, 0, 1)
    assert pool.allocate() == 3 and pool.evictions == 0
    pool.check()


def test_our_own_bugs_are_asserted() -> None:
    pool, prefixes = BlockPool(4), PrefixIndex()
    block = pool.allocate()
    pool.decref(block)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.decref(block)
    with pytest.raises(AssertionError, match="free and cannot be acquired"):
        pool.incref(block)
    with pytest.raises(AssertionError, match="cannot be published"):
        pool.publish(block, prefix_of(prefixes, tokens(1)))
    with pytest.raises(AssertionError, match="not published"):
        pool.unpublish(block)


def doctor_refs(pool: BlockPool) -> None:
    pool.refs[2] = 0


def doctor_double(pool: BlockPool) -> None:
    pool._idle[2] = None


def doctor_lost(pool: BlockPool) -> None:
    del pool._idle[5]


def doctor_reserved(pool: BlockPool) -> None:
    pool._idle[1] = None


def doctor_evictable(pool: BlockPool) -> None:
    pool.evictable += 1


def doctor_index(pool: BlockPool) -> None:
    pool._published.clear()


def doctor_order(pool: BlockPool) -> None:
    pool._idle.move_to_end(4, last=False)


@pytest.mark.parametrize(
    "doctor", [doctor_refs, doctor_double, doctor_lost, doctor_reserved, doctor_evictable, doctor_index, doctor_order]
)
def test_check_catches_a_doctored_state(doctor: Callable[[BlockPool], None]) -> None:
    pool, prefixes = BlockPool(7), PrefixIndex()
    for n in (1, 2, 3):
        pool.publish(pool.allocate(), prefix_of(prefixes, *[tokens(i) for i in range(n)]))
    pool.decref(4)
    pool.check()
    doctor(pool)
    with pytest.raises(AssertionError):
        pool.check()


# ---------------------------------------------------------------- prefixes


def test_a_history_has_one_prefix_and_its_depth_counts_blocks() -> None:
    prefixes = PrefixIndex()
    one = prefix_of(prefixes, tokens(1), tokens(2))
    assert prefix_of(prefixes, tokens(1), tokens(2)) is one
    assert one.depth == 2 and one.parent is not None and one.parent.depth == 1
    assert prefixes.find(one.parent, tokens(2)) is one
    assert prefixes.find(one.parent, tokens(3)) is None
    assert prefixes.find(one, tokens(2)) is None
    assert prefix_of(prefixes, tokens(1), tokens(2), root=b"other adapter") is not one
    assert len(one.digest) == 16


def test_a_digest_chains_its_parent() -> None:
    prefixes = PrefixIndex()
    root = prefix_of(prefixes)
    one = prefix_of(prefixes, tokens(7))
    assert root.digest == digest(b"root:")
    assert one.digest == digest(root.digest + tokens(7))


def test_a_prefix_lives_as_long_as_someone_holds_it() -> None:
    prefixes = PrefixIndex()
    tip = prefix_of(prefixes, tokens(1), tokens(2))
    parent = tip.parent
    assert parent is not None
    del tip
    assert prefixes.find(parent, tokens(2)) is None
    assert prefixes.find(prefix_of(prefixes), tokens(1)) is parent


def test_a_very_long_chain_is_dropped_without_recursion() -> None:
    prefixes = PrefixIndex()
    prefix = prefixes.root(b"")
    for at in range(200_000):
        assert prefix is not None
        prefix = prefixes.extend(prefix, tokens(at))
    del prefix
    assert len(prefixes._nodes) == 0


@pytest.mark.parametrize("values", [1, 2, 16])
def test_collisions_are_never_mistaken_for_equality(values: int) -> None:
    """The hash has only a few values: find and extend give this very history's prefix, or none."""
    rng = random.Random(values)
    prefixes = PrefixIndex(lambda data: bytes([digest(data)[0] % values]))
    held: dict[tuple[int, ...], PrefixNode] = {}
    root = prefixes.root(b"")
    assert root is not None
    held[()] = root
    found = refused = 0
    for _ in range(2000):
        history = rng.choice(sorted(held))
        longer = (*history, rng.randrange(3))
        known = prefixes.find(held[history], tokens(longer[-1]))
        assert known is held.get(longer)
        made = prefixes.extend(held[history], tokens(longer[-1]))
        assert made is not None or longer not in held
        if made is not None:
            assert held.setdefault(longer, made) is made
            found += 1
        else:
            refused += 1
    assert refused > 0 and len(held) <= values
    assert len(set(map(id, held.values()))) == len(held)
