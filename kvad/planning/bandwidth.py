"""Memory bandwidth of this machine, the bound of a decode step, which reads every weight once per token.

It is measured on request and not stored. numpy is imported inside the function, so ``kvad plan --help`` is instant.
"""

from __future__ import annotations

import time

from kvad.cache.sizing import available_bytes

MAX_BYTES = 256 << 20  # larger than any cache
NUM_COLUMNS = 4096


def measure_bandwidth(seconds: float = 0.3) -> float:
    """Measure bytes per second, the best of several matrix-vector products.

    Each reads ``MAX_BYTES`` (a tenth of the available bytes, if that is less) once, with numpy's number of threads.
    """
    import numpy as np

    available = available_bytes()
    size = MAX_BYTES if available is None else min(MAX_BYTES, available // 10)
    matrix = np.ones((max(1, size // (4 * NUM_COLUMNS)), NUM_COLUMNS), dtype=np.float32)
    vector = np.ones(NUM_COLUMNS, dtype=np.float32)
    best, first_start = float("inf"), time.perf_counter()
    while time.perf_counter() - first_start < seconds:
        start = time.perf_counter()
        matrix @ vector
        best = min(best, time.perf_counter() - start)
    return float(matrix.nbytes / best)
