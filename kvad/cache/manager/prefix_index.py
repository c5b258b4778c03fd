"""The index of known prefixes, by a chained digest of their full blocks.

A ``PrefixNode`` is the whole history up to the end of one full block: the tokens of the block and the node before
it. It is found by a chained digest, ``H(parent's digest + tokens)``, but a digest is never trusted: tokens and parent
are compared on every hit, and there is at most one node per history, so identity is equality. With a hash of 8 bits
the cache hits less often, but is never wrong (tests/cache/manager/test_block_pool.py).
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from weakref import WeakValueDictionary

HashFn = Callable[[bytes], bytes]


def digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


class PrefixNode:
    """History that ends with a full block: ``tokens`` of that block as int64 bytes, ``depth`` blocks in all."""

    __slots__ = ("__weakref__", "depth", "digest", "full_digest", "parent", "tokens")

    def __init__(self, digest: bytes, parent: PrefixNode | None, tokens: bytes) -> None:
        self.digest = digest
        self.parent = parent
        self.tokens = tokens
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.full_digest = b""  # computed on demand for block stores (prefix_offload.py)


class PrefixIndex:
    """Weak index of the nodes by digest. A node lives while a block, a longer prefix or a sequence references it."""

    def __init__(self, hash_fn: HashFn = digest) -> None:
        self._hash = hash_fn
        self._nodes: WeakValueDictionary[bytes, PrefixNode] = WeakValueDictionary()

    def root(self, name: bytes) -> PrefixNode | None:
        """Return the empty history under ``name`` (weights, adapter, tenant ...), or None on a digest collision."""
        return self.extend(None, name)

    def find(self, parent: PrefixNode | None, tokens: bytes) -> PrefixNode | None:
        """Return the node of ``parent`` + ``tokens``, or None if it is unknown."""
        return self._lookup(self.key(parent, tokens), parent, tokens)

    def extend(self, parent: PrefixNode | None, tokens: bytes) -> PrefixNode | None:
        """Return the node of ``parent`` + ``tokens``, and create it if needed. None on a digest collision."""
        key = self.key(parent, tokens)
        if key in self._nodes:
            return self._lookup(key, parent, tokens)
        prefix = self._nodes[key] = PrefixNode(key, parent, tokens)
        return prefix

    def key(self, parent: PrefixNode | None, tokens: bytes) -> bytes:
        """Return the digest of the node of ``parent`` + ``tokens``."""
        return self._hash((parent.digest if parent is not None else b"root:") + tokens)

    def _lookup(self, key: bytes, parent: PrefixNode | None, tokens: bytes) -> PrefixNode | None:
        node = self._nodes.get(key)
        if node is None or node.parent is not parent or node.tokens != tokens:
            return None
        return node
