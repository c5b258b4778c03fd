"""A decode step on one process and on meshes of two: time, and the bytes of each rank, one JSON line each.

    python benchmarks/decoding_by_mesh.py [--max-num-seqs 8] [--seq-len 256] [--steps 40] [--layers 8] [--width 512]
                                          [--threads 1]

Every rank is a process on this machine with N threads, connected by gloo. Random weights in float32. Times are those
of rank 0, which has the scheduler: wall and processor time of its process.
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
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling.request import SamplingParams
from kvad.model.transformer import Transformer
from kvad.parallel.distributed_cache import build_follower_cache, leader_cache_factory, run_follower
from kvad.parallel.mesh import Mesh
from kvad.parallel.partition import plan_ranks
from kvad.parallel.process_groups import connect_groups
from kvad.parallel.tensor_parallel import shard_model

MESHES = ("1x1", "2x1", "1x2")
WARM_STEPS = 8  # not measured


def config(options: argparse.Namespace) -> ModelConfig:
    layer = LayerConfig(
        AttentionConfig(options.width // 64, max(1, options.width // 128)), GatedMLPConfig(3 * options.width)
    )
    return ModelConfig(
        options.width, 8192, options.seq_len + options.steps + WARM_STEPS, StackConfig(options.layers, {"L": layer})
    )


def cache(options: argparse.Namespace) -> CacheConfig:
    return CacheConfig(
        max_num_seqs=options.max_num_seqs,
        max_seq_len=options.seq_len + options.steps + WARM_STEPS,
        prefill_chunk_size=128,
    )


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    mesh = Mesh.parse(options.mesh).with_rank(options.rank)
    links = connect_groups(mesh, dist.FileStore(options.store, mesh.size), timeout=300)
    model = Transformer(config(options)).eval()
    shard_model(model, links)
    if mesh.rank:
        run_follower(model, build_follower_cache(model, cache(options), links))
        return
    engine = Engine(model, cache(options), EngineConfig(cache_factory=leader_cache_factory(model, links)))
    for seq_index in range(options.max_num_seqs):
        engine.add_request(
            [(seq_index + at) % 8000 for at in range(options.seq_len)], SamplingParams(max_tokens=options.steps)
        )
    while engine.times.tokens < options.max_num_seqs:
        engine.step()
    walls, busy = [], time.process_time()
    while not engine.idle and len(walls) < options.steps - WARM_STEPS:
        began = time.perf_counter()
        engine.step()
        walls.append(time.perf_counter() - began)
    busy = (time.process_time() - busy) / len(walls)
    plan = plan_ranks(plan_memory(config(options), cache(options)), mesh)
    pool = sum(leaf.nbytes for leaf in engine.kv_cache.tensors())
    assert pool == plan[0].pool, "the pool differs from the plan"
    engine.close()
    report = {
        "bench": "mesh",
        "mesh": options.mesh,
        "max_num_seqs": options.max_num_seqs,
        "seq_len": options.seq_len,
        "steps": len(walls),
        "step_ms_median": round(sorted(walls)[len(walls) // 2] * 1e3, 2),
        "step_ms_best": round(min(walls) * 1e3, 2),
        "rank0_cpu_ms": round(busy * 1e3, 2),
        "weights_per_rank": [rank.weights for rank in plan],
        "pool_per_rank": [rank.pool for rank in plan],
        "threads": options.threads,
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    print(json.dumps(report), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"max-num-seqs": 8, "seq-len": 256, "steps": 40, "layers": 8, "width": 512, "threads": 1}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mesh")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    options = parser.parse_args()
    if options.steps <= WARM_STEPS:
        parser.error(f"--steps must be more than {WARM_STEPS}")
    if options.rank is not None:
        run_rank(options)
        os._exit(0)  # the result is printed; gloo's threads may still run while the interpreter exits
    for mesh in MESHES:
        with tempfile.TemporaryDirectory() as folder:
            given = [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in sizes]
            given += [f"--mesh={mesh}", f"--store={Path(folder) / 'store'}"]
            env = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "MKL_NUM_THREADS": str(options.threads)}
            ranks = [
                subprocess.Popen([sys.executable, __file__, *given, f"--rank={rank}"], env=env)
                for rank in range(Mesh.parse(mesh).size)
            ]
            assert [rank.wait() for rank in ranks] == [0] * len(ranks)


if __name__ == "__main__":
    main()
