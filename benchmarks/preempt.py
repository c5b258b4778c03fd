"""A row that gives way: computed again, swapped to memory, swapped to disk; by its length, as one line of JSON.

    python benchmarks/preempt.py [--lengths 256 512 1024 2048 4096] [--repeats 5] [--folder DIR] [--dtype float32]

A model of the demo's shape (random weights, a longer limit) reads a prompt of each length, gives way and comes back.
Seconds are the median of what an engine spends until the row's next token: of its steps, or of the copies and the
file's writing and reading (each waited for).  ``predicted`` is what ``engine/costs.py`` believed after a warm-up;
``chosen`` is what it would do, and ``right`` whether that was the cheaper of what was measured.  ``crossover`` is the
shortest row of those measured for which a swap is cheaper, None where none is; ``pays_above``: as nothing of these rows
survives in the pool, so many of their tokens would have to be missing for a swap to be worth it.
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

from kvad.benchmarks.cache_speed import commit_id, machine_info
from kvad.cache.config import CacheConfig
from kvad.engine.engine import Engine
from kvad.engine.scheduling.preemption import SwapCostModel
from kvad.engine.scheduling.request import SamplingParams
from kvad.model.transformer import Transformer
from kvad.train.config.presets import MODEL_PRESETS

WAYS = ("computed", "memory", "disk")
CHUNK = 512


class Forced(SwapCostModel):
    """Measures as ever, and swaps as it is told."""

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
    costs = Forced()
    costs.swaps = way != "computed"
    return Engine(model, cache, cost_model=costs, swap_dir=folder if way == "disk" else None)


def trip(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """(seconds between giving way and the next token, bytes of the row)."""
    number = engine.add_request(prompt, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    (row,) = engine.scheduler.sequences(number)
    while row.num_generated_tokens < 1:
        engine.step()
    engine.step()  # what a token costs anyway
    began = time.perf_counter()
    engine.step()
    token = time.perf_counter() - began
    nbytes = engine.preemption.nbytes(row)
    began = time.perf_counter()
    engine.scheduler._preempt(row)
    away(engine)
    while row.num_generated_tokens < 4 and not engine.idle:
        engine.step()
    seconds = time.perf_counter() - began - token
    engine.scheduler.check()
    return seconds, nbytes


def away(engine: Engine) -> None:
    """Have the row copied out, and written where it is to be: nobody else is there to do it in between."""
    parking, ledger = engine.preemption.swap_space, engine.kv_cache_manager
    if parking is None or not len(parking):
        return
    engine.kv_cache.apply(ledger._away.attach_to_ops(ledger._no_moves(), ()))
    parking.poll()
    while parking.pending:
        parking.wait()


def run(lengths: list[int], repeats: int, folder: Path, dtype: str) -> dict[str, Any]:
    capacity = max(lengths) + 16
    model = demo_model(capacity, getattr(torch, dtype))
    engines = {way: engine_of(model, way, folder / way, capacity, dtype) for way in WAYS}
    for engine in engines.values():
        for _ in range(2):
            trip(engine, [1] * min(CHUNK * 2, max(lengths)))
    rows = [measured(engines, length, repeats) for length in lengths]
    result = {
        "bench": "preempt",
        "model": "demo",
        "dtype": dtype,
        "rows": rows,
        "crossover": {
            way: next((row["tokens"] for row in rows if row["ms"][way] < row["ms"]["computed"]), None)
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
        for way in WAYS:  # by turns: the machine is shared
            seconds, nbytes = trip(engines[way], [(at + token) % 2000 for token in range(length)])
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
    told = {way: round(1e3 * each, 3) for way, each in predicted.items()}
    pays = {way: round(tokens * max(0.0, ms[way]) / ms["computed"], 1) for way in chosen}
    return {
        "tokens": tokens,
        "bytes": nbytes,
        "ms": ms,
        "pays_above": pays,
        "predicted": told,
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
