"""A sequence larger than its pool compared with the same sequence in the pool: cost and bytes of token offload.

    python benchmarks/token_offload.py --seq-len 4096 --pool-size 1024
    python benchmarks/token_offload.py --seq-len 8192 --pool-size 2048 --dtype bfloat16 --folder /mnt/ssd

One sequence of the demo preset's shape decodes near ``--seq-len`` tokens with a pool of ``--pool-size``.
Three engines alternate step by step: everything in the pool; older tokens in RAM; older tokens on disk. The files
were just written, so they are read from the page cache if it has room; ``--cold`` drops them before each step. For
comparison the same bytes are read from the same files sequentially, without a model. The output is one JSON line:
tokens/s of decoding (wall and processor time, medians) and of the prompt, bytes read per token, and the bytes in each
place.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time

import torch

from kvad.benchmarks.results import commit_id, machine_info
from kvad.cache.config import CacheConfig
from kvad.cache.groups import group_bytes
from kvad.cache.offload.token_offload import TILE
from kvad.engine.engine import Engine
from kvad.engine.scheduling.request import SamplingParams
from kvad.model.transformer import Transformer
from kvad.train.config.presets import MODEL_PRESETS

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Side:
    """One engine with one sequence whose prompt is computed."""

    def __init__(self, model: Transformer, context: int, steps: int, **cache: object) -> None:
        self.engine = Engine(model, CacheConfig(max_num_seqs=1, enable_prefix_caching=False, **cache))  # type: ignore[arg-type]
        prompt = torch.randint(
            0, model.config.vocab_size, (context,), generator=torch.Generator().manual_seed(0)
        ).tolist()
        self.engine.add_request(prompt, SamplingParams(max_tokens=steps + 8, temperature=0, ignore_eos=True))
        self.seconds: dict[str, list[float]] = {clock: [] for clock in CLOCKS}
        self.tokens: list[int] = []
        began = {clock: now() for clock, now in CLOCKS.items()}
        while not (pieces := self.engine.step()):
            pass
        self.prompt = {clock: context / (now() - began[clock]) for clock, now in CLOCKS.items()}
        self.tokens += [piece.token_id for piece in pieces if piece.token_id is not None]
        self.before = self.moved()

    def moved(self) -> tuple[int, int, int]:
        if self.engine.kv_cache.offload_reader is None:
            return 0, 0, 0
        stats = self.engine.kv_cache.offload_reader.stats()
        return stats.written, stats.from_ram, stats.from_disk

    def files(self) -> list[int]:
        reader = self.engine.kv_cache.offload_reader
        files = {} if reader is None else reader.offload_files
        return [file for offload_file in files.values() for file in offload_file._files]

    def step(self, cold: bool) -> None:
        for file in self.files() if cold else ():
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        began = {clock: now() for clock, now in CLOCKS.items()}
        pieces = self.engine.step()
        for clock, now in CLOCKS.items():
            self.seconds[clock].append(now() - began[clock])
        self.tokens += [piece.token_id for piece in pieces if piece.token_id is not None]

    def result(self) -> dict[str, object]:
        memory, steps = self.engine.kv_cache, len(self.seconds["wall"])
        per_token = [(now - before) // steps for now, before in zip(self.moved(), self.before, strict=True)]
        plan = None if memory.offload_reader is None else memory.offload_reader.plan
        return {
            "tokens_per_s": {clock: round(1 / statistics.median(self.seconds[clock]), 2) for clock in CLOCKS},
            "prompt_tokens_per_s": {clock: round(self.prompt[clock], 1) for clock in CLOCKS},
            "bytes_per_token": dict(zip(("written", "from_ram", "from_disk"), per_token, strict=True)),
            "pool_bytes": sum(group_bytes(group).total for group in memory.groups),
            "offloaded_bytes": {}
            if plan is None
            else {"ram": plan.ram_bytes, "staging": plan.staging_bytes, "disk": plan.disk_bytes},
        }


def sequential(side: Side, cold: bool) -> float:
    """Return bytes per second of reading a sequence's files one tile at a time."""
    buffer, rates = bytearray(TILE), []
    for _ in range(5):
        for file in side.files() if cold else ():
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        began, count = time.perf_counter(), 0
        for file in side.files():
            at = 0
            while got := os.preadv(file, [buffer], at):
                at += got
            count += at
        rates.append(count / (time.perf_counter() - began))
    return statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--pool-size", type=int, default=1024, help="tokens that the pool holds")
    parser.add_argument("--dtype", default="float32", help="dtype of the cache")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--folder", help="directory of the files [default: a temporary one]")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each step")
    options = parser.parse_args()
    torch.manual_seed(0)
    limit = options.seq_len + options.steps + 8
    model = Transformer(MODEL_PRESETS["demo"](4096, limit)).eval()
    fields = {"block_size": 16, "prefill_chunk_size": 512, "dtype": options.dtype}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        offload_options = {**fields, "max_seq_len": options.pool_size, "overflow": "offload", "offload_dir": folder}
        sides = {
            "memory": Side(model, options.seq_len, options.steps, max_seq_len=limit, **fields),
            "offloaded to RAM": Side(model, options.seq_len, options.steps, offload_ram=1 << 40, **offload_options),
            "offloaded to disk": Side(model, options.seq_len, options.steps, offload_ram=0, **offload_options),
        }
        for _ in range(options.steps):
            for side in sides.values():
                side.step(options.cold)
        results = {name: side.result() for name, side in sides.items()}
        disk = sides["offloaded to disk"]
        line = {
            "bench": "token offload",
            "seq_len": options.seq_len,
            "pool": options.pool_size,
            "dtype": options.dtype,
            "cold": options.cold,
            "sides": results,
            "same_tokens": all(side.tokens == sides["memory"].tokens for side in sides.values()),
            "sequential_bytes_per_s": round(sequential(disk, options.cold)),
            "machine": machine_info(),
            "commit": commit_id(),
        }
        for side in sides.values():
            side.engine.close()
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
