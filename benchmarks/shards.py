"""A decode step on one process and on meshes of two: time, and the bytes that each rank holds, one JSON line each.

    python benchmarks/shards.py [--rows 8] [--context 256] [--steps 40] [--layers 8] [--width 512] [--threads 1]

Every rank is a process with so many threads, on this machine, joined by gloo.  Random weights in float32.  Rank 0 has
the ledger; its clock is shown, wall and processor time of its own process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from kvad.cache.config import CacheConfig
from kvad.cache.sizing.memory_plan import plan_memory
from kvad.config.layers import AttentionConfig, GatedMLPConfig, LayerConfig, StackConfig
from kvad.config.model import ModelConfig
from kvad.engine.engine import Engine
from kvad.engine.scheduling.request import SamplingParams
from kvad.model.transformer import Transformer
from kvad.parallel.distributed_cache import build_follower_cache, leader_cache_factory, run_follower
from kvad.parallel.mesh import Mesh
from kvad.parallel.partition import plan_ranks
from kvad.parallel.process_groups import connect_groups
from kvad.parallel.tensor_parallel import shard_model

MESHES = ("1x1", "2x1", "1x2")


def config(asked: argparse.Namespace) -> ModelConfig:
    layer = LayerConfig(AttentionConfig(asked.width // 64, max(1, asked.width // 128)), GatedMLPConfig(3 * asked.width))
    return ModelConfig(asked.width, 8192, asked.context + asked.steps + 8, StackConfig(asked.layers, {"L": layer}))


def cache(asked: argparse.Namespace) -> CacheConfig:
    return CacheConfig(max_num_seqs=asked.rows, max_seq_len=asked.context + asked.steps + 8, prefill_chunk_size=128)


def run_rank(asked: argparse.Namespace) -> None:
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    mesh = Mesh.parse(asked.mesh).with_rank(asked.rank)
    links = connect_groups(mesh, dist.FileStore(asked.store, mesh.size), timeout=300)
    model = Transformer(config(asked)).eval()
    shard_model(model, links)
    if mesh.rank:
        run_follower(model, build_follower_cache(model, cache(asked), links))
        return
    engine = Engine(model, cache(asked), cache_factory=leader_cache_factory(model, links))
    for row in range(asked.rows):
        engine.add_request([(row + at) % 8000 for at in range(asked.context)], SamplingParams(max_tokens=asked.steps))
    while engine.times.tokens < asked.rows:
        engine.step()
    walls, busy = [], time.process_time()
    while not engine.idle and len(walls) < asked.steps - 8:
        began = time.perf_counter()
        engine.step()
        walls.append(time.perf_counter() - began)
    busy = (time.process_time() - busy) / len(walls)
    plan = plan_ranks(plan_memory(config(asked), cache(asked)), mesh)
    pool = sum(leaf.nbytes for leaf in engine.kv_cache.tensors())
    assert pool == plan[0].pool, "what was planned is what lies there"
    engine.close()
    said = {
        "bench": "shards",
        "mesh": asked.mesh,
        "rows": asked.rows,
        "context": asked.context,
        "steps": len(walls),
        "step_ms_median": round(sorted(walls)[len(walls) // 2] * 1e3, 2),
        "step_ms_best": round(min(walls) * 1e3, 2),
        "rank0_cpu_ms": round(busy * 1e3, 2),
        "weights_per_rank": [rank.weights for rank in plan],
        "pool_per_rank": [rank.pool for rank in plan],
        "threads": asked.threads,
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    print(json.dumps(said), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"rows": 8, "context": 256, "steps": 40, "layers": 8, "width": 512, "threads": 1}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mesh")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    asked = parser.parse_args()
    if asked.rank is not None:
        run_rank(asked)
        return
    for mesh in MESHES:
        with tempfile.TemporaryDirectory() as folder:
            given = [f"--{name}={getattr(asked, name)}" for name in sizes]
            given += [f"--mesh={mesh}", f"--store={Path(folder) / 'store'}"]
            env = {**os.environ, "OMP_NUM_THREADS": str(asked.threads), "MKL_NUM_THREADS": str(asked.threads)}
            ranks = [
                subprocess.Popen([sys.executable, __file__, *given, f"--rank={rank}"], env=env)
                for rank in range(Mesh.parse(mesh).size)
            ]
            assert [rank.wait() for rank in ranks] == [0] * len(ranks)


if __name__ == "__main__":
    main()
