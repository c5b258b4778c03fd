"""Fingerprint of stored keys and values: named parts that must match before use.

    model       all weights and the architecture
    adapter     adapter merged into the weights; absent without one
    tokenizer   and template: how text became token ids ("" if ids were given)
    keys        values, policy, rotate, endless, summaries: cache formats and policy
    computed    dtype of the computation, and whether it is batch-invariant
    regime      rotary regime, if it depends on the maximum length of the sequence
    salt        of the tenant: stored blocks are found only by requests with the same salt
    version     of this list

Block size, layout and devices are not included: stored blocks move between those. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b

FORMAT_VERSION = "2"


@dataclass(frozen=True)
class CacheFingerprint:
    """Named parts; two fingerprints match if all parts are equal."""

    parts: Mapping[str, str]

    def __init__(self, **parts: str) -> None:
        object.__setattr__(self, "parts", {"version": FORMAT_VERSION, **dict(sorted(parts.items()))})

    def differences(self, other: Mapping[str, str]) -> Iterator[str]:
        """Yield the parts that differ: "model", or "policy: full here, window(64) there"."""
        for name in dict.fromkeys([*self.parts, *other]):
            here, there = self.parts.get(name, ""), other.get(name, "")
            if here != there:
                plain = len(here) + len(there) <= 80 and name not in ("model", "tokenizer", "template", "salt")
                yield f"{name}: {here or 'none'} here, {there or 'none'} there" if plain else name

    def digest(self) -> bytes:
        """Return a 16-byte hash of all parts."""
        hasher = blake2b(digest_size=16)
        for name, value in sorted(self.parts.items()):
            for text in (name, value):
                hasher.update(len(text.encode()).to_bytes(8, "little") + text.encode())
        return hasher.digest()
