"""Resident memory of generation compared with ``kvad plan``, as one line of JSON.

    python benchmarks/resident_memory.py [--max-num-seqs 8] [--max-seq-len 4096] [--layout paged|contiguous]
                                  [--dtype float32] [--prefill-chunk-size 512]
                                  [--policy "sinks(4, 2044)"]

The baseline is this process after one warm step with a minimal pool. Then an engine with a pool of at least 1 GiB
fills every sequence to its last token, so that every block is touched. All numbers are above the baseline:

* ``resident``: bytes after the last step, with an idle engine, which asks the C library to return freed scratch
  (``kvad/ops/runtime.py``); this program does nothing of the kind after the baseline. Requirement: within 2% or
  48 MiB of the plan, whichever is larger; otherwise the exit code is 1.
* ``between``: the maximum between two steps, including freed scratch that the C library retains; it varies.
* ``peak``: the maximum at any moment; the plan's bound is pool, scratch and activations.

Linux only: it reads ``/proc/self/status`` (VmRSS, VmHWM) and resets the peak by ``/proc/self/clear_refs``.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from kvad.cache.config import CacheConfig
from kvad.cache.sizing.memory_plan import MemoryPlan, plan_memory
from kvad.config.layers import AttentionConfig, GatedMLPConfig, LayerConfig, StackConfig
from kvad.config.model import ModelConfig
from kvad.engine.engine import Engine
from kvad.engine.scheduling.request import SamplingParams
from kvad.model.transformer import Transformer

MIB = 1 << 20
TOLERANCE, FLOOR = 0.02, 48 * MIB


def model_config(limit: int) -> ModelConfig:
    """Small weights, large keys and values: 32 KiB per token in float32, so that 1 GiB fills quickly."""
    layer = LayerConfig(AttentionConfig(8, 8, head_dim=64), GatedMLPConfig(256))
    return ModelConfig(128, 512, limit, StackConfig(8, {"L": layer}))


def status(field: str) -> int:
    """Return bytes of ``VmRSS`` (now) or ``VmHWM`` (the maximum since the last reset)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"no {field} in /proc/self/status")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def generate(engine: Engine, num_seqs: int, prompt: int, new: int) -> int:
    """Run ``num_seqs`` sequences to their end; return the maximum resident bytes between two steps."""
    for seq_index in range(num_seqs):
        tokens = [(31 * seq_index + i) % 512 for i in range(prompt)]
        engine.add_request(tokens, SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True))
    most, steps = 0, 0
    while not engine.idle:
        engine.step()
        steps += 1
        if steps % 4 == 0:
            most = max(most, status("VmRSS"))
    return most


def trimmed() -> int:
    """Return resident bytes without freed memory that glibc retains (other C libraries may retain more)."""
    gc.collect()
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)
    return status("VmRSS")


def measure(options: CacheConfig, new: int) -> dict[str, object]:
    config = model_config(options.max_seq_len)
    torch.manual_seed(0)
    model = Transformer(config).to(torch.float32).eval()
    least = CacheConfig(
        layout=options.layout, dtype=options.dtype, max_num_seqs=1, max_seq_len=32, prefill_chunk_size=16, block_size=16
    )
    warm = Engine(model, least)
    generate(warm, 1, 16, 4)
    small = sum(leaf.nbytes for leaf in warm.kv_cache.tensors())
    warm.close()
    del warm
    baseline = trimmed()
    plan = plan_memory(config, options)
    if plan.pool < 1 << 30:
        raise SystemExit(
            f"a pool of {plan.pool:,} bytes: must be at least 1 GiB (raise --max-num-seqs or --max-seq-len)"
        )
    reset_peak()
    began = time.perf_counter()
    engine = Engine(model, options)
    after_start = sum(leaf.nbytes for leaf in engine.kv_cache.tensors())
    between = generate(engine, options.max_num_seqs, options.max_seq_len - new, new) - baseline
    seconds, peak, resident = time.perf_counter() - began, status("VmHWM") - baseline, status("VmRSS") - baseline
    assert after_start == sum(leaf.nbytes for leaf in engine.kv_cache.tensors()) == plan.pool
    return {**report(options, plan, resident, between, peak), "warm_pool": small, "seconds": round(seconds, 1)}


def report(options: CacheConfig, plan: MemoryPlan, resident: int, between: int, peak: int) -> dict[str, object]:
    predicted = plan.pool
    allowed = max(TOLERANCE * predicted, FLOOR)
    bound = plan.pool + plan.scratch + plan.activations
    return {
        "bench": "resident",
        "layout": options.layout,
        "dtype": options.dtype,
        "policy": options.policy,
        "max_num_seqs": options.max_num_seqs,
        "max_seq_len": options.max_seq_len,
        "chunk": options.prefill_chunk_size,
        "planned_pool": predicted,
        "resident": resident,
        "difference_mib": round((resident - predicted) / MIB, 2),
        "difference": round(resident / predicted - 1, 5),
        "allowed_mib": round(allowed / MIB, 2),
        "within": abs(resident - predicted) <= allowed,
        "between": between,
        "planned_peak": bound,
        "peak": peak,
        "peak_within_bound": peak <= bound + FLOOR,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--max-seq-len", type=int, default=4096)
    parser.add_argument("--layout", choices=("paged", "contiguous"), default="paged")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prefill-chunk-size", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=16, help="generated tokens of each sequence")
    parser.add_argument("--policy", default="full")
    args = parser.parse_args(argv)
    options = CacheConfig(
        layout=args.layout,
        dtype=args.dtype,
        max_num_seqs=args.max_num_seqs,
        max_seq_len=args.max_seq_len,
        prefill_chunk_size=args.prefill_chunk_size,
        enable_prefix_caching=False,
        policy=args.policy,
    )
    result = measure(options, args.new_tokens)
    print(json.dumps(result))
    return 0 if result["within"] else 1


if __name__ == "__main__":
    sys.exit(main())
