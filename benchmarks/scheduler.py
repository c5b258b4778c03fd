"""Scheduler and KVCacheManager without a model: sequence-steps per second, as one line of JSON.

    python benchmarks/scheduler.py [--max-num-seqs 64] [--steps 2000] [--groups full|mixed]

A sequence-step is one decoding sequence in one step: scheduled, allocated and committed. The requirement is 50,000
per second.
"""

from __future__ import annotations

import argparse
import json
import platform
import time

from kvad.cache.config import CacheConfig
from kvad.cache.groups import build_groups
from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.config.model import AttentionSpec
from kvad.engine.scheduling.request import SamplingParams, SequenceOutput
from kvad.engine.scheduling.scheduler import Scheduler

FULL = AttentionSpec(True, None, 8, 64, 64)
LOCAL = AttentionSpec(True, 256, 8, 64, 64)


def run(max_num_seqs: int, steps: int, specs: tuple[AttentionSpec, ...]) -> dict[str, object]:
    """Decode ``steps`` tokens per sequence after prompts of 1 to 64 tokens; only full decode steps are timed."""
    config = CacheConfig(max_num_seqs=max_num_seqs, max_seq_len=steps + 64, prefill_chunk_size=64)
    manager = KVCacheManager(build_groups(specs, config), prefix_caching=True, max_num_seqs=max_num_seqs)
    scheduler = Scheduler(
        manager,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs * 64,
        prefill_chunk_size=64,
        limit=steps + 64,
    )
    for request in range(max_num_seqs):
        scheduler.add_request(request, [request + 1] * (1 + request), SamplingParams(max_tokens=steps))
    results = [SequenceOutput(token_id=5)] * max_num_seqs
    done, slowest, began = 0, 0.0, time.perf_counter()
    while done < steps - 1:
        at = time.perf_counter()
        plan = scheduler.schedule()
        assert plan is not None and len(plan.scheduled) == max_num_seqs
        scheduler.update_from_output(plan, results)
        now = time.perf_counter()
        if done == 0:
            began = now  # the first step computes the prompts
        else:
            slowest = max(slowest, now - at)
        done += 1
    seconds = time.perf_counter() - began
    manager.check()
    return {
        "bench": "scheduler",
        "max_num_seqs": max_num_seqs,
        "steps": done - 1,
        "groups": len(manager.groups),
        "sequence_steps_per_s": round(max_num_seqs * (done - 1) / seconds),
        "us_per_sequence_step": round(seconds / (max_num_seqs * (done - 1)) * 1e6, 3),
        "slowest_step_ms": round(slowest * 1e3, 3),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--groups", choices=("full", "mixed"), default="full")
    args = parser.parse_args()
    specs = (FULL,) * 4 if args.groups == "full" else (LOCAL, LOCAL, LOCAL, FULL)
    print(json.dumps(run(args.max_num_seqs, args.steps, specs)))


if __name__ == "__main__":
    main()
