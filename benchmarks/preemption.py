"""A preempted sequence, recomputed, swapped to RAM, or swapped to disk, by its length, as one line of JSON.

    python benchmarks/preemption.py [--lengths 256 512 1024 2048 4096] [--repeats 5] [--folder DIR] [--dtype float32]

A model of the demo's shape (random weights, a longer limit) computes a prompt of each length, is preempted and
resumed. Seconds are the median time of the engine until the next token: of its steps, or of the copies and of writing
and reading the file (each waited for). ``predicted`` is the estimate of the cost model after a warm-up; ``chosen`` is
its choice, and ``right`` is true if that was the cheaper measured one. ``crossover`` is the shortest measured
sequence for which a swap is cheaper, or None; ``pays_above`` is the number of missing tokens above which a swap pays,
because nothing of these sequences survives in the pool.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kvad.benchmarks.results import commit_id, machine_info
from kvad.cache.config import CacheConfig
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling.preemption import SwapCostModel
from kvad.engine.scheduling.request import SamplingParams
from kvad.model.transformer import Transformer
from kvad.train.config.presets import MODEL_PRESETS

WAYS = ("computed", "memory", "disk")
CHUNK = 512


class FixedChoice(SwapCostModel):
    """Measures as usual, with a fixed choice."""

    swaps = True

    def swap_is_cheaper(self, nbytes: int, tokens: int, *, disk: bool = False, back: bool = False) -> bool:
        return self.swaps


def demo_model(limit: int, dtype: torch.dtype) -> Transformer:
    torch.manual_seed(0)
    return Transformer(MODEL_PRESETS["demo"](4096, limit)).to(dtype).eval()


def engine_of(model: Transformer, way: str, folder: Path, capacity: int, dtype: str) -> Engine:
    cache = CacheConfig(
        max_num_seqs=2,
        max_seq_len=capacity,
        prefill_chunk_size=CHUNK,
        enable_prefix_caching=False,
        dtype=dtype,
        swap_space={"computed": None, "memory": 1 << 34, "disk": 0}[way],
    )
    costs = FixedChoice()
    costs.swaps = way != "computed"
    return Engine(model, cache, EngineConfig(cost_model=costs, swap_dir=folder if way == "disk" else None))


def preempt_and_resume(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Return (seconds between preemption and the next token, bytes of the sequence)."""
    number = engine.add_request(prompt, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    (sequence,) = engine.scheduler.sequences(number)
    while sequence.num_generated_tokens < 1:
        engine.step()
    engine.step()  # the usual cost of a token
    began = time.perf_counter()
    engine.step()
    token = time.perf_counter() - began
    nbytes = engine.preemption.nbytes(sequence)
    began = time.perf_counter()
    engine.scheduler._preempt(sequence)
    swap_out_and_wait(engine)
    while sequence.num_generated_tokens < 4 and not engine.idle:
        engine.step()
    seconds = time.perf_counter() - began - token
    engine.scheduler.check()
    return seconds, nbytes


def swap_out_and_wait(engine: Engine) -> None:
    """Copy the sequence out and wait until it is written, because no other sequence runs meanwhile."""
    swap_space, manager = engine.preemption.swap_space, engine.kv_cache_manager
    if swap_space is None or not len(swap_space):
        return
    engine.kv_cache.apply(manager._swapped.attach_to_ops(manager._empty_ops(), ()))
    swap_space.poll()
    while swap_space.pending:
        swap_space.wait()


def run(lengths: list[int], repeats: int, folder: Path, dtype: str) -> dict[str, Any]:
    capacity = max(lengths) + 16
    model = demo_model(capacity, getattr(torch, dtype))
    engines = {way: engine_of(model, way, folder / way, capacity, dtype) for way in WAYS}
    for engine in engines.values():
        for _ in range(2):
            preempt_and_resume(engine, [1] * min(CHUNK * 2, max(lengths)))
    results = [measured(engines, length, repeats) for length in lengths]
    result = {
        "bench": "preempt",
        "model": "demo",
        "dtype": dtype,
        "sequences": results,
        "crossover": {
            way: next((result["tokens"] for result in results if result["ms"][way] < result["ms"]["computed"]), None)
            for way in ("memory", "disk")
        },
        "costs": {way: engine.preemption.costs.measured() for way, engine in engines.items()},
        "load": round(os.getloadavg()[0], 1),
        "machine": machine_info(),
        "commit": commit_id(),
    }
    for engine in engines.values():
        engine.close()
    return result


def measured(engines: dict[str, Engine], length: int, repeats: int) -> dict[str, Any]:
    spent: dict[str, list[float]] = {way: [] for way in WAYS}
    nbytes = 0
    for at in range(repeats):
        for way in WAYS:  # in alternation, because the machine is shared
            seconds, nbytes = preempt_and_resume(engines[way], [(at + token) % 2000 for token in range(length)])
            spent[way].append(seconds)
    ms = {way: round(1e3 * statistics.median(each), 3) for way, each in spent.items()}
    costs = {way: engines[way].preemption.costs for way in WAYS}
    tokens = length + 2
    predicted = {
        "computed": costs["computed"].seconds_per_token * tokens,
        "memory": costs["memory"].swap_seconds(nbytes),
        "disk": costs["disk"].swap_seconds(nbytes, disk=True),
    }
    chosen = {way: way if predicted[way] < predicted["computed"] else "computed" for way in ("memory", "disk")}
    right = {way: ms[chosen[way]] == min(ms[way], ms["computed"]) for way in chosen}
    estimates = {way: round(1e3 * each, 3) for way, each in predicted.items()}
    pays = {way: round(tokens * max(0.0, ms[way]) / ms["computed"], 1) for way in chosen}
    return {
        "tokens": tokens,
        "bytes": nbytes,
        "ms": ms,
        "pays_above": pays,
        "predicted": estimates,
        "chosen": chosen,
        "right": right,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        print(json.dumps(run(args.lengths, args.repeats, Path(folder), args.dtype)))


if __name__ == "__main__":
    main()
