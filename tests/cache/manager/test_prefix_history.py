"""What the cache records of its lookups and evictions: sources of cached tokens, reasons of misses, causes."""

from __future__ import annotations

import pytest

from kvad.cache.manager import prefix_history
from kvad.cache.manager.prefix_history import EvictionEvent, PrefixHistory
from kvad.cache.manager.prefix_index import PrefixIndex
from tests.support.manager_driver import FULL, WINDOW, ManagerDriver

PROMPT = list(range(100, 113))  # three blocks of 4 and one token


def manager_of(*specs, num_blocks=8, **fields):
    return ManagerDriver(*specs or (FULL,), num_blocks=num_blocks, max_seq_len=24, **fields)


def lookup(manager, tokens, *, root=b"", max_tokens=None):
    """Return the reason and the cause of a lookup that leaves nothing behind."""
    assert manager.add_sequence(3, tokens, root, max_tokens) is not None
    manager.free(3)
    return manager.history.lookup.reason, manager.history.lookup.cause


def test_reasons_of_misses():
    manager = manager_of()
    assert lookup(manager, PROMPT) == ("root", None)
    assert lookup(manager, PROMPT) == ("root", None)  # nothing was computed yet
    manager.add(0, PROMPT)
    manager.free(0)
    assert lookup(manager, PROMPT) == ("", None)
    assert lookup(manager, PROMPT[:4]) == ("short", None)
    assert lookup(manager, [*PROMPT[:8], 1, 2, 3, 4, 5]) == ("new", None)
    assert lookup(manager, [1, *PROMPT]) == ("new", None)
    assert lookup(manager, PROMPT, max_tokens=4) == ("scores", None)
    assert lookup(manager, PROMPT, root=b"another key") == ("root", None)


def test_another_root_is_not_looked_up():
    """A key learns nothing of the prompts of another one: the reason is the same, cached there or not."""
    manager = manager_of()
    for root, tokens in ((b"a", PROMPT), (b"b", [7] * 9)):
        manager.add_sequence(0, tokens, root)
        manager.write(0, tokens)
        manager.free(0)
    assert lookup(manager, PROMPT, root=b"b") == lookup(manager, [8] * 13, root=b"b") == ("new", None)


def test_an_eviction_has_its_cause_and_its_request():
    manager = manager_of()
    manager.add(0, PROMPT)
    manager.free(0)
    assert manager.history.evictions == ()
    tokens = list(range(24))
    manager.add_sequence(1, tokens, b"", request_id=7)
    for start in (0, 8, 16):
        manager.write(1, tokens[start : start + 8])
    (event,) = manager.history.evictions
    assert (
        (event.cause, event.request_id, event.num_blocks)
        == ("tokens", 7, manager.stats().evictions[0])
        == ("tokens", 7, 1)
    )
    manager.free(1)
    assert lookup(manager, PROMPT) == ("evicted", "tokens")  # the end of the text went first
    assert manager.history.lookup.num_ram_tokens == 0


def test_a_swapped_sequence_evicts():
    manager = manager_of(num_blocks=6)
    manager.add(0, PROMPT)
    swapped = manager.swap_out(0)
    manager.add(1, list(range(16)))
    manager.free(1)
    assert manager.swap_in(0, swapped, 9)
    assert [(event.cause, event.request_id) for event in manager.history.evictions] == [("tokens", -1), ("swap-in", 9)]


def test_a_window_that_lost_its_blocks():
    manager = manager_of(FULL, WINDOW, num_blocks=None)
    manager.add(0, list(range(21)))
    manager.free(0)
    for block, prefix in enumerate(manager.pools[1].prefixes):
        if prefix is not None:
            manager.pools[1].unpublish(block)
    assert lookup(manager, list(range(9))) == ("window", None)  # the other group still has the blocks


def test_a_cache_that_shares_nothing():
    manager = manager_of(prefix_caching=False)
    assert lookup(manager, PROMPT) == ("off", None)


def test_records_are_bounded(monkeypatch):
    monkeypatch.setattr(prefix_history, "MAX_EVENTS", 2)
    monkeypatch.setattr(prefix_history, "MAX_EVICTED", 3)
    monkeypatch.setattr(prefix_history, "MAX_ROOTS", 2)
    history, index = PrefixHistory(clock=iter(range(100)).__next__), PrefixIndex()
    nodes = [index.extend(index.root(b""), bytes([number])) for number in range(5)]
    for number, node in enumerate(nodes):
        with history.allocating("load", number):
            history.on_evicted(node)
        history.add_root(node)
    assert history.evictions == (EvictionEvent(3, "load", 3, 1), EvictionEvent(4, "load", 4, 1))
    assert [history.eviction_cause(node.digest) for node in nodes] == [None, None, "load", "load", "load"]
    assert [history.has_root(node) for node in nodes] == [False, False, False, True, True]
    assert (history.cause, history.request_id) == ("tokens", -1)


@pytest.mark.parametrize("bug", ["forgets evictions", "never sees a root"])
def test_a_bug_is_detected(monkeypatch, bug):
    if bug == "forgets evictions":
        monkeypatch.setattr(PrefixHistory, "on_evicted", lambda self, prefix: None)
        check = test_an_eviction_has_its_cause_and_its_request
    else:
        monkeypatch.setattr(PrefixHistory, "add_root", lambda self, root: None)
        check = test_reasons_of_misses
    with pytest.raises((AssertionError, ValueError)):
        check()
