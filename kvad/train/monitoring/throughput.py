"""Speed of a run, utilization of a machine (model FLOPs over a measured matrix product), and memory.

**Model FLOP utilization** (MFU) is PaLM's (Chowdhery et al. 2022, appendix B), with products counted from shapes
(``kvad/config/flops.py``): rows as stored, attention as its full rectangle, padding included, recomputation excluded.
The reference is not a data sheet but a large matrix product, measured once with the run's precision and threads.
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

MATRIX_SIZES = {"cpu": 1024, "cuda": 8192}  # largest side of the square matrices, if time allows
MIN_MATRIX_SIZE = 512


@dataclass(frozen=True)
class ThroughputMeter:
    """Counts a model's FLOPs; ``peak``: reference FLOP/s, ``frozen``: adapters only."""

    model: ModelConfig
    peak: float
    frozen: bool = False

    def count_flops(self, batches: Sequence[Batch]) -> int:
        """Return the FLOPs of forward and backward passes, from integers only (no device wait)."""
        flops = 0
        for model_input, targets in ((batch.model_input, len(batch.targets)) for batch in batches):
            ((rows, width, _),), encoder_input = model_input.sub_batches, model_input.encoder_input
            source = 0 if encoder_input is None else encoder_input.sub_batches[0].num_new_tokens
            flops += config.flops.training_pass(self.model, rows, width, targets, source=source, frozen=self.frozen)
        return flops


class SpeedMeter:
    """Tokens and FLOPs per second and seconds per step, over about the last dozen steps."""

    def __init__(self, decay: float = 0.92) -> None:
        self._decay, self._weight = decay, 0.0
        self._tokens = self._seconds = self._flops = 0.0

    def add(self, tokens: int, seconds: float, flops: int = 0) -> None:
        self._weight = self._weight * self._decay + 1
        self._tokens = self._tokens * self._decay + tokens
        self._flops = self._flops * self._decay + flops
        self._seconds = self._seconds * self._decay + seconds

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    @property
    def flops_per_second(self) -> float:
        return self._flops / self._seconds if self._seconds > 0 else 0.0

    @property
    def seconds_per_step(self) -> float:
        return self._seconds / self._weight if self._weight else 0.0


def measure_gemm_peak(device: str, precision: str, seconds: float = 0.4) -> float:
    """Return FLOP/s of the fastest of several square matrix products, in about ``seconds``.

    On a CPU the processor time of all threads counts, so that other processes do not lower the peak. Numbers come from
    a separate generator, so a run's random numbers do not change.
    """
    torch_device = torch.device(device)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    began, side, best = time.perf_counter(), MIN_MATRIX_SIZE, 0.0
    while True:
        drawn = torch.Generator(torch_device).manual_seed(0)
        matrix = torch.rand(side, side, generator=drawn, device=torch_device).to(dtype)
        _timed(matrix)  # warm
        before = time.perf_counter()
        best = max(best, 2 * side**3 / _timed(matrix))
        elapsed = time.perf_counter() - before
        left = began + seconds - time.perf_counter()
        # Two products of the next size take 16 times as long.
        if side >= MATRIX_SIZES.get(torch_device.type, 8192) or left < 2 * 8 * elapsed:
            break
        side *= 2
    while time.perf_counter() - began < seconds:
        best = max(best, 2 * side**3 / _timed(matrix))
    return best


def _timed(matrix: torch.Tensor) -> float:
    """Return the seconds of one product."""
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
    """Bytes, current and peak: of the process, or of the tensors on a CUDA device."""

    current: int | None
    peak: int | None


def memory_usage(device: str) -> MemoryUsage:
    """Return the memory usage; None where the system does not report it."""
    if torch.device(device).type == "cuda":
        return MemoryUsage(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    try:
        with open("/proc/self/statm", "rb") as file:
            current = int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        current = None
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return MemoryUsage(current, max(peak, current or 0))  # the kernel updates both in batches
