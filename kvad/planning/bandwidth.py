"""How fast this machine reads memory: what bounds a decode step, which reads every weight once per token.

Measured when asked and kept nowhere.  Imports numpy only inside, so that ``kvad plan --help`` is instant.
"""

from __future__ import annotations

import time

from kvad.cache.sizing import available_bytes

MAX_BYTES = 256 << 20  # past any cache
NUM_COLUMNS = 4096


def measure_bandwidth(seconds: float = 0.3) -> float:
    """Bytes per second of the best of several matrix-vector products that read ``MOST_BYTES`` (a tenth of what is
    available, where that is less) once each, with as many threads as numpy's BLAS takes."""
    import numpy as np

    available = available_bytes()
    size = MAX_BYTES if available is None else min(MAX_BYTES, available // 10)
    matrix = np.ones((max(1, size // (4 * NUM_COLUMNS)), NUM_COLUMNS), dtype=np.float32)
    vector = np.ones(NUM_COLUMNS, dtype=np.float32)
    best, began = float("inf"), time.perf_counter()
    while time.perf_counter() - began < seconds:
        start = time.perf_counter()
        matrix @ vector
        best = min(best, time.perf_counter() - start)
    return float(matrix.nbytes / best)
