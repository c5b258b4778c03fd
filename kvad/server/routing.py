"""Choice of a replica for a request, and one reply from those of all replicas. Plain values.

Requests of a prefix go to the replica with the highest hash of (prefix, replica) (rendezvous hashing, Thaler &
Ravishankar 1998), so a replica that comes or goes moves only its own share; a replica with a much longer queue than
others is passed over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from kvad.server.wire import Message

PREFIX_BLOCKS = 4  # first blocks of a prompt that choose the replica
MAX_LEAD = 8  # a replica with so many more requests than the least loaded one is passed over


def prefix_key(tokens: Sequence[int], block_size: int, salt: str, session: Mapping[str, str] | None) -> str:
    """Return the text that chooses the replica: a session, or the first blocks; "" if there is no whole block."""
    if session is not None:
        return f"session {session['owner']} {session['name']}"
    num_tokens = min(len(tokens) // block_size, PREFIX_BLOCKS) * block_size
    return f"{salt} {list(tokens[:num_tokens])}" if num_tokens else ""


def rank_replicas(key: str, loads: Mapping[str, int]) -> list[str]:
    """Return replicas by preference: the highest hash first; those with many more requests than others last.

    Args:
        key: The prefix ("": only the load decides).
        loads: Requests of each replica.
    """
    limit = min(loads.values(), default=0) + MAX_LEAD

    def preference(name: str) -> tuple[bool, int, str]:
        digest = hashlib.blake2b(f"{key}\0{name}".encode(), digest_size=8).digest()
        is_busy = loads[name] >= limit
        return is_busy, loads[name] if is_busy or not key else -int.from_bytes(digest), name

    return sorted(loads, key=preference)


RECORDS = ("groups", "sequences", "prompts", "evictions")  # lists of records in the state of a cache


def rename_requests(reply: Message, numbers: Mapping[int, int]) -> Message:
    """Return a reply with other numbers of requests; None for a request that ``numbers`` does not have."""

    def rename(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [
            {**each, "request": numbers.get(each["request"])} if isinstance(each, dict) and "request" in each else each
            for each in value
        ]

    return {name: rename(value) for name, value in reply.items()}


def merge_replies(replies: Sequence[Message]) -> Message:
    """Return one reply: numbers are added, lists joined, and each record has the number of its ``replica``.

    A sequence's blocks are those of its replica's pools; prompts are sorted, the newest request first.
    """
    merged: Message = {}
    num_pools = 0
    for replica, reply in enumerate(replies):
        reply = {name: _of_replica(replica, value) if name in RECORDS else value for name, value in reply.items()}
        for sequence in reply.get("sequences", ()):
            sequence["blocks"] = [[]] * num_pools + sequence["blocks"]
        for group in reply.get("groups", ()):
            group["token_group"] += num_pools
        for name, value in reply.items():
            is_shared = name in merged and name not in ("block_size", "first_block")
            merged[name] = _merge(merged[name], value) if is_shared else value
        num_pools += len(reply.get("pools", ()))
    if "prompts" in merged:
        merged["prompts"].sort(key=lambda prompt: prompt["request"] or 0, reverse=True)
    return merged


def _of_replica(replica: int, records: Sequence[Message]) -> list[Message]:
    return [{**record, "replica": replica} for record in records]


def _merge(first: Any, second: Any) -> Any:
    if isinstance(first, dict) and isinstance(second, dict):
        return {name: _merge(first[name], second[name]) for name in first}
    if isinstance(first, list) and isinstance(second, list):
        return [*first, *second]
    return first + second if isinstance(first, int | float) and isinstance(second, int | float) else first
