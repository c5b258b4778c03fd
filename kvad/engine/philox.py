"""Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011), so that a draw is a function and not a state.

``uniform(seed, sample, position)`` is the same whoever else is in the batch, after a preemption, and on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["philox", "uniform"]

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW = np.uint64(0xFFFFFFFF)
WORD = np.uint64(32)
ROUNDS = 10

Words = npt.NDArray[np.uint64]


def philox(counter: Words, key: Words) -> Words:
    """counter [4, N] and key [2, N] of 32-bit words -> [4, N] random 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (second >> WORD) ^ c1 ^ k0, second & LOW, (first >> WORD) ^ c3 ^ k1, first & LOW
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return np.stack((c0, c1, c2, c3))


def uniform(seeds: Sequence[int], samples: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, sample, position), with 53 random bits."""
    seed = np.array(seeds, dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    sample = np.array(samples, dtype=np.uint64)
    counter = np.stack((position & LOW, position >> WORD, sample, np.zeros_like(sample)))
    words = philox(counter, np.stack((seed & LOW, seed >> WORD)))
    bits = ((words[0] << WORD) | words[1]) >> np.uint64(11)
    fractions: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return fractions
