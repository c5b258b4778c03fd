"""The machine's limits, measured with torch: reading memory, and products of matrices."""

from __future__ import annotations

import time

import torch

from benchmarks.peers.engines import Outcome, Unsupported, serve
from benchmarks.peers.scenarios import Scenario

SIZE = 2048  # rows and columns of the product
LARGEST, SMALLEST = 1 << 30, 1 << 20  # bytes of the buffer


class LimitsWorker:
    """Runs the two measurements of ``limits``: ``precision`` is that of the product, ``tokens`` the bytes to read.

    Reading is ``torch.sum`` of float32 values, both threads. The buffer has the bytes that one step reads, between
    1 MiB and 1 GiB: a small model is read from the processor's cache.
    """

    def load(self, path: str, precision: str, threads: int, needs: dict[str, int]) -> None:
        torch.set_num_threads(threads)
        self.precision = precision
        self.buffers: dict[int, torch.Tensor] = {}
        if precision == "int8":
            self.left = torch.randint(-127, 127, (SIZE, SIZE), dtype=torch.int8)
        else:  # "int8-cache" has bfloat16 weights
            self.left = torch.randn(SIZE, SIZE).to(getattr(torch, precision, torch.bfloat16))
        self.right = self.left.t().contiguous().t()

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}

    def run(self, scenario: Scenario, prompts: list[list[int]]) -> Outcome:
        """Return seconds and bytes ("read") or operations ("multiply")."""
        if scenario.kind == "read":
            return self._read(min(max(scenario.new, SMALLEST), LARGEST))
        if scenario.kind == "multiply":
            return self._multiply()
        raise Unsupported(f"{scenario.kind}: read and multiply are known")

    def _read(self, size: int) -> Outcome:
        if size not in self.buffers:
            self.buffers = {size: torch.ones(size // 4)}
        buffer, passes = self.buffers[size], 0
        buffer.sum()
        start = time.perf_counter()
        while (seconds := time.perf_counter() - start) < 0.2:
            buffer.sum()
            passes += 1
        return Outcome(seconds, passes * size, [])

    def _multiply(self) -> Outcome:
        product = torch._int_mm if self.left.dtype == torch.int8 else torch.mm
        product(self.left, self.right)
        start, passes = time.perf_counter(), 0
        while (seconds := time.perf_counter() - start) < 0.3:
            product(self.left, self.right)
            passes += 1
        return Outcome(seconds, passes * 2 * SIZE**3, [])


if __name__ == "__main__":
    serve(LimitsWorker())
