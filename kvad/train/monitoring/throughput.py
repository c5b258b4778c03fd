"""How busy a run keeps its machine: model FLOPs of a step over what a matrix product reaches here, and memory held.

**Model FLOP utilisation** is PaLM's (Chowdhery et al. 2022, appendix B), with products counted from the shapes
(``kvad/flops.py``): rows as they lie in memory, attention as its whole rectangle, padding counted, nothing that is
computed twice.  What it is held against is no data sheet but a large matrix product, measured once, in the precision
and with the threads of the run.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvad import config
from kvad.config import ModelConfig
from kvad.train.data import Batch

MATRIX_SIZES = {"cpu": 1024, "cuda": 8192}  # of the square matrices, where time allows
MIN_MATRIX_SIZE = 512


@dataclass(frozen=True)
class ThroughputMeter:
    """Of a ``model``'s steps, held against ``peak`` FLOP/s; ``frozen``: only adapters are trained."""

    model: ModelConfig
    peak: float
    frozen: bool = False

    def count_flops(self, batches: Sequence[Batch]) -> int:
        """FLOPs of the forward and backward passes over micro-batches.  Integers only: nothing waits for a device."""
        return sum(self._of(batch) for batch in batches)

    def _of(self, batch: Batch) -> int:
        (lane,) = batch.model_input.sub_batches
        source = (
            0
            if batch.model_input.encoder_input is None
            else batch.model_input.encoder_input.sub_batches[0].num_new_tokens
        )
        return config.flops.training_pass(
            self.model, lane.num_seqs, lane.num_new_tokens, len(batch.targets), source=source, frozen=self.frozen
        )


def measure_gemm_peak(device: str, precision: str, seconds: float = 0.4) -> float:
    """FLOP/s of the fastest of several products of two square matrices, in about ``seconds`` in all.

    On a CPU it is the processor time of all threads that counts, so that other processes do not lower the peak.
    Numbers come from a generator of its own: a run's random numbers do not change.
    """
    where = torch.device(device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    began, side, best = time.perf_counter(), MIN_MATRIX_SIZE, 0.0
    while True:
        drawn = torch.Generator(where).manual_seed(0)
        matrix = torch.rand(side, side, generator=drawn, device=where).to(dtype)
        _timed(matrix)  # warm
        before = time.perf_counter()
        best = max(best, 2 * side**3 / _timed(matrix))
        took = time.perf_counter() - before
        left = began + seconds - time.perf_counter()
        if (
            side >= MATRIX_SIZES.get(where.type, 8192) or left < 2 * 8 * took
        ):  # two of the next size take 16 times as long
            break
        side *= 2
    while time.perf_counter() - began < seconds:
        best = max(best, 2 * side**3 / _timed(matrix))
    return best


def _timed(matrix: torch.Tensor) -> float:
    """Seconds of one product."""
    if matrix.device.type == "cuda":
        torch.cuda.synchronize(matrix.device)
        began = time.perf_counter()
        matrix @ matrix
        torch.cuda.synchronize(matrix.device)
        return time.perf_counter() - began
    began = time.process_time()
    matrix @ matrix
    return max(time.process_time() - began, 1e-9) / torch.get_num_threads()


class MemoryUsage(NamedTuple):
    """Bytes, now and at most so far: of the process, or of a CUDA device what its tensors take."""

    current: int | None
    peak: int | None


def memory_usage(device: str) -> MemoryUsage:
    """None where the system does not say."""
    if torch.device(device).type == "cuda":
        return MemoryUsage(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    now = _resident()
    most: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return MemoryUsage(now, max(most, now or 0))  # the kernel counts both in batches, not to the byte


def _resident() -> int | None:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return None
