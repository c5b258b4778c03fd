"""Eviction orders: LRU and ARC."""

import random

import pytest

from kvad.cache.offload.disk_store import EVICTION_ORDERS, ARCOrder, LRUOrder


def cache(kind, limit, requests, size=lambda key: 1):
    """Return the number of hits in a cache of ``limit`` bytes."""
    order, used, hits = kind(limit), 0, 0
    for key in requests:
        if key in order.sizes:
            order.touch(key)
            hits += 1
            continue
        while used + size(key) > limit:
            victim = next(order.victims())
            used -= order.sizes[victim]
            order.evict(victim)
        order.add(key, size(key))
        used += size(key)
        assert used == sum(order.sizes.values()) <= limit
    return hits


def test_lru_is_the_order_of_use():
    order = LRUOrder(3)
    for key in "abc":
        order.add(key, 1)
    order.touch("a")
    assert list(order.victims()) == ["b", "c", "a"]
    order.remove("c")
    assert list(order.victims()) == ["b", "a"]


def test_arc_keeps_frequent_entries_during_a_scan():
    hot = [f"hot{i}" for i in range(5)]
    requests = hot * 3 + [
        each for i in range(300) for each in ([f"scan{i}"] + ([hot[i // 3 % 5]] if i % 3 == 0 else []))
    ]
    assert cache(ARCOrder, 10, requests) > 1.5 * cache(LRUOrder, 10, requests)


def test_arc_is_close_to_lru_without_frequent_entries():
    requests = [f"{(i // 40) * 8 + i % 8}" for i in range(4000)]
    assert cache(ARCOrder, 10, requests) >= 0.9 * cache(LRUOrder, 10, requests)


@pytest.mark.parametrize("name", EVICTION_ORDERS)
@pytest.mark.parametrize("seed", range(5))
def test_every_entry_is_in_one_queue(name, seed):
    rng, order, sizes = random.Random(seed), EVICTION_ORDERS[name](100), {}
    for _ in range(3000):
        key = str(rng.randrange(40))
        if key not in sizes:
            size = rng.randrange(1, 30)
            while sum(sizes.values()) + size > 100:
                victim = next(order.victims())
                order.evict(victim)
                del sizes[victim]
            order.add(key, size)
            sizes[key] = size
        elif rng.random() < 0.8:
            order.touch(key)
        else:
            order.remove(key)
            del sizes[key]
        assert dict(order.sizes) == sizes and sorted(order.victims()) == sorted(sizes)
        if isinstance(order, ARCOrder):
            assert {**order.once, **order.often} == sizes and not set(order.once) & set(order.often)
            queues = (order.once, order.often, order.left_once, order.left_often)
            assert all(queue.total == sum(queue.values()) for queue in queues)
            assert sum(queue.total for queue in queues) <= 200 and 0 <= order.target <= 100
