"""Time of a decoding step by policy: the same model, random tokens, policies in alternation, through the engine.

    python benchmarks/decoding_by_policy.py --seq-len 1024 32768 --policies "sinks(4, 1020)"
    python benchmarks/decoding_by_policy.py --seq-len 8192 --policies full "heavy-hitters(1024)" "quest(1024)"
    python benchmarks/decoding_by_policy.py --seq-len 1024 16384 --policies full --rope-at write read
    python benchmarks/decoding_by_policy.py --seq-len 4096 --policies full --layout contiguous paged

The shape is that of the demo preset, one sequence. It is computed up to its context, then decodes; a step is measured
from schedule to commit, including periodic evictions and demotions: the mean of ``--steps`` steps, and the median.
The output is one JSON line: milliseconds of a step (wall and processor time; on a busy machine use the latter, with
one thread), the ratio to the first, the slots of the sequence, and the bytes of the pool.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time

import torch

from kvad.benchmarks.results import commit_id, machine_info
from kvad.cache.config import CacheConfig
from kvad.cache.groups import group_bytes
from kvad.engine.engine import Engine
from kvad.engine.scheduling.request import SamplingParams
from kvad.model.transformer import Transformer
from kvad.train.config.presets import MODEL_PRESETS

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Side:
    """One engine with one sequence at its context."""

    def __init__(self, model: Transformer, context: int, steps: int, **cache: object) -> None:
        fields: dict[str, object] = {
            "max_num_seqs": 1,
            "max_seq_len": context + steps + 8,
            "block_size": 16,
            "prefill_chunk_size": 512,
        }
        self.engine = Engine(model, CacheConfig(**(fields | cache)))  # type: ignore[arg-type]
        prompt = torch.randint(
            0, model.config.vocab_size, (context,), generator=torch.Generator().manual_seed(0)
        ).tolist()
        self.engine.add_request(prompt, SamplingParams(max_tokens=steps + 8, temperature=0))
        self.seconds: dict[str, list[float]] = {clock: [] for clock in CLOCKS}
        while not self.engine.step():
            pass  # compute the prompt

    def step(self) -> None:
        began = {clock: now() for clock, now in CLOCKS.items()}
        self.engine.step()
        for clock, now in CLOCKS.items():
            self.seconds[clock].append(now() - began[clock])

    def results(self) -> dict[str, object]:
        manager, memory = self.engine.kv_cache_manager, self.engine.kv_cache
        used, groups = manager.stats().used, memory.groups
        return {
            "ms": round(1e3 * statistics.median(self.seconds["wall"]), 3),
            "cpu_ms": round(1e3 * statistics.median(self.seconds["cpu"]), 3),
            "cpu_ms_mean": round(1e3 * statistics.fmean(self.seconds["cpu"]), 3),
            "slots": [blocks * group.block_size for blocks, group in zip(used, groups, strict=True)],
            "pool_bytes": sum(group_bytes(group).total for group in groups),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--policies", nargs="+", default=["full", "sinks(4, 1020)"])
    parser.add_argument("--rope-at", nargs="+", default=["write"])
    parser.add_argument("--layout", nargs="+", default=["paged"])
    parser.add_argument("--dtype", default="float32", help="dtype of the cache")
    parser.add_argument("--steps", type=int, default=128)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Transformer(MODEL_PRESETS["demo"](4096, 2 * max(options.seq_len))).eval()
    sides: dict[str, Side] = {}
    for context, policy, rotate, layout in itertools.product(
        options.seq_len, options.policies, options.rope_at, options.layout
    ):
        last_tokens = (policy, f"@{context}", rotate * (rotate != "write"), layout * (layout != "paged"))
        name = " ".join(each for each in last_tokens if each)
        fields = {"policy": policy, "rope_at": rotate, "layout": layout, "dtype": options.dtype}
        sides[name] = Side(model, context, options.steps, **fields)
    for _ in range(options.steps):
        for side in sides.values():
            side.step()
    results = {name: side.results() for name, side in sides.items()}
    first = next(iter(results.values()))
    for each in results.values():
        each["cpu_ratio"] = round(float(str(each["cpu_ms_mean"])) / float(str(first["cpu_ms_mean"])), 3)
    print(
        json.dumps({"bench": "policies", "sides": results, "machine": machine_info(), "commit": commit_id()}),
        flush=True,
    )


if __name__ == "__main__":
    main()
