"""What stored keys and values belong to: parts by name, each of which must be equal before a byte of them is used.

    model       every weight, and the shape that they are put together in
    adapter     what was merged into the weights; not said where there is none
    tokenizer   and template: what turned text into these ids ("" where ids were given)
    keys        values, policy, rotate, endless, summaries: how and what is kept
    computed    the dtype of the model's own arithmetic, and whether it is deterministic
    regime      the rotary regime, where it depends on how long the row may become
    salt        of the tenant: stored pieces are found by requests of the same salt only
    version     of this list

Block size, layout and devices are not among them: a stored piece moves between those.  No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b

FORMAT_VERSION = "1"


@dataclass(frozen=True)
class CacheFingerprint:
    """Equal parts, or not the same."""

    parts: Mapping[str, str]

    def __init__(self, **parts: str) -> None:
        object.__setattr__(self, "parts", {"version": FORMAT_VERSION, **dict(sorted(parts.items()))})

    def differences(self, other: Mapping[str, str]) -> Iterator[str]:
        """Which parts are others there: "model", "policy: full here, window(64) there"."""
        for name in dict.fromkeys([*self.parts, *other]):
            here, there = self.parts.get(name, ""), other.get(name, "")
            if here != there:
                plain = len(here) + len(there) <= 80 and name not in ("model", "tokenizer", "template", "salt")
                yield f"{name}: {here or 'none'} here, {there or 'none'} there" if plain else name

    def digest(self) -> bytes:
        hashed = blake2b(digest_size=16)
        for name, value in sorted(self.parts.items()):
            for text in (name, value):
                hashed.update(len(text.encode()).to_bytes(8, "little") + text.encode())
        return hashed.digest()
