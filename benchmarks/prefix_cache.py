"""Costs and savings of the prefix cache and its block stores, compared with a miss and with the disk, in the same
run.

    python benchmarks/prefix_cache.py demo
    python benchmarks/prefix_cache.py 135m --folder /var/tmp/store

The output is one JSON line per measure. ``disk``: bytes per second of blocks loaded for a sequence, including
checksums, and of the same bytes read from one file, into one small buffer and into new memory, with the page cache
dropped and warm, in alternation. ``first token``: seconds to the first token of a prompt of 2,048 tokens, not cached,
and found in the pool, in RAM and on disk. ``bookkeeping``: microseconds of processor time per token for hashing,
lookup, allocation and publishing, without stores, with an empty one and with one that has all blocks. Random weights.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from deterministic_mode import SMOLLM

from kvad.benchmarks.results import machine_info
from kvad.cache.config import CacheConfig
from kvad.cache.groups import build_groups
from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.cache.manager.prefix_offload import BlockKey, LoadHandle
from kvad.cache.offload.block_store import BlockStore
from kvad.cache.offload.disk_store import DiskBlockStore
from kvad.config.model import AttentionSpec, ModelConfig
from kvad.engine.engine import Engine
from kvad.engine.scheduling.request import SamplingParams
from kvad.model.transformer import Transformer
from kvad.storage.container import CacheFingerprint
from kvad.train.config.presets import MODEL_PRESETS

PROMPT = 2048


def report(measure: str, **numbers: object) -> None:
    print(json.dumps({"bench": "prefix cache", "measure": measure, **numbers, "machine": machine_info()}), flush=True)


# ---------------------------------------------------------------- the disk


def drop(paths: list[Path]) -> None:
    """Drop these files from the page cache."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def sequential(path: Path, *, keep_all: bool) -> float:
    """Return the seconds to read a file by 1 MiB pieces: into one buffer, or with ``keep_all`` into new memory."""
    size, piece, file, at = path.stat().st_size, memoryview(bytearray(1 << 20)), os.open(path, os.O_RDONLY), 0
    began = time.perf_counter()
    whole = memoryview(mmap.mmap(-1, size)) if keep_all else None
    while count := os.preadv(file, [piece if whole is None else whole[at : at + (1 << 20)]], at) if at < size else 0:
        at += count
    seconds = time.perf_counter() - began
    os.close(file)
    return seconds


def load_seconds(folder: Path, names: list[BlockKey], size: int) -> float:
    """Return the seconds until all loads are complete."""
    store = BlockStore([size], [4], disk_store=DiskBlockStore(folder, 1 << 40), fingerprint=CacheFingerprint(model="m"))
    began = time.perf_counter()
    loads = [store.load(name, (0,)) for name in names]
    while not all(load.done for load in loads):
        store.wait(0.01)
    seconds = time.perf_counter() - began
    assert all(load.buffers is not None for load in loads)
    store.close()
    return seconds


def disk(folder: Path, size: int, count: int, repeats: int) -> None:
    store = BlockStore(
        [size],
        [4],
        disk_store=DiskBlockStore(folder / "blocks", 1 << 40),
        fingerprint=CacheFingerprint(model="m"),
        max_queued_bytes=1 << 40,
    )
    names = [BlockKey(f"{number:032x}", "", number.to_bytes(8, "little") * 16) for number in range(count)]
    block = os.urandom(size)
    began = time.perf_counter()
    for name in names:
        number = store.request_copy(name, (0,), evicted=False)
        assert number is not None
        store.put(number, {0: block})
    assert store.flush(600)
    written = time.perf_counter() - began
    store.close()
    whole = folder / "whole"
    with whole.open("wb") as file:
        for _ in range(count):
            file.write(block)
    paths = [whole, *(folder / "blocks").glob("*.kv")]
    ways = {
        "store": lambda: load_seconds(folder / "blocks", names, size),
        "sequential": lambda: sequential(whole, keep_all=False),
        "sequential_new_memory": lambda: sequential(whole, keep_all=True),
    }
    for state in ("cold", "warm"):
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, read in ways.items():
                if state == "cold":
                    drop(paths)
                seconds[way].append(read())
        rates = {way: size * count / statistics.median(each) / 1e6 for way, each in seconds.items()}
        numbers = {f"{way}_mb_s": round(rate) for way, rate in rates.items()}
        numbers |= {f"of_{way}": round(rates["store"] / rates[way], 3) for way in list(ways)[1:]}
        report(
            f"disk {state}", block_bytes=size, blocks=count, written_mb_s=round(size * count / written / 1e6), **numbers
        )


# ---------------------------------------------------------------- the first token


def first_token(engine: Engine, prompt: list[int]) -> float:
    request = engine.add_request(prompt, SamplingParams(max_tokens=1, temperature=0))
    usage = engine.metrics(request)
    began = time.perf_counter()
    while not engine.idle:
        engine.step()
    assert usage.num_cached_tokens in (0, len(prompt) // engine.cache.block_size * engine.cache.block_size)
    return time.perf_counter() - began


def tokens(config: ModelConfig, folder: Path, repeats: int) -> None:
    torch.manual_seed(0)
    model = Transformer(config).eval()
    cache = {"max_num_seqs": 1, "max_seq_len": PROMPT + 64, "prefill_chunk_size": 512, "block_size": 16}
    draw = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, config.vocab_size, (PROMPT + 1,), generator=draw).tolist()
    other = torch.randint(0, config.vocab_size, (PROMPT + 1,), generator=draw).tolist()
    seconds: dict[str, list[float]] = {"miss": [], "pool": [], "ram": [], "disk cold": [], "disk": []}
    for number in range(repeats):
        place = folder / f"{number}"
        engine = Engine(model, CacheConfig(**cache, prefix_cache_dir=os.fspath(place), prefix_cache_ram=1 << 40))
        seconds["miss"].append(first_token(engine, prompt))
        seconds["pool"].append(first_token(engine, prompt))
        first_token(engine, other)  # the pool has room for one prompt
        seconds["ram"].append(first_token(engine, prompt))
        engine.close()
        for state in ("disk cold", "disk"):
            if state == "disk cold":
                drop(list(place.glob("*.kv")))
            engine = Engine(model, CacheConfig(**cache, prefix_cache_dir=os.fspath(place)))
            seconds[state].append(first_token(engine, prompt))
            engine.close()
        shutil.rmtree(place)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ratios = {name: round(each / medians["miss"], 4) for name, each in medians.items()}
    report("first token", prompt=PROMPT, seconds={name: round(each, 4) for name, each in medians.items()}, ratio=ratios)


# ---------------------------------------------------------------- the host


class Instant:
    """A store without bytes that has no block, or all."""

    def __init__(self, full: bool) -> None:
        self.full, self.number = full, 0

    def has(self, key: str) -> bool:
        return self.full

    def load(self, name: BlockKey, wanted: tuple[int, ...]) -> LoadHandle:
        load = LoadHandle(name, wanted)
        load.complete(dict.fromkeys(wanted, b""), "disk")
        return load

    def request_copy(self, name: BlockKey, wanted: tuple[int, ...], *, evicted: bool) -> int | None:
        self.number += 1
        return self.number

    def cancel(self, number: int) -> None: ...

    def stage_load(self, pieces: object) -> int:
        return 0

    def drop(self, key: str) -> None: ...


def bookkeeping(repeats: int) -> None:
    """Admit, allocate and commit a prompt of 2,048 tokens: all host work except scheduling."""
    groups = build_groups([AttentionSpec(True, None, 2, 64, 64)], CacheConfig(max_num_seqs=2, max_seq_len=PROMPT + 64))
    for name, store in (("no store", None), ("empty store", Instant(False)), ("full store", Instant(True))):
        seconds_per_token = []
        for number in range(repeats):
            manager = KVCacheManager(groups, prefix_caching=True, max_num_seqs=2, block_store=store)
            prompt = [number, *range(PROMPT)]
            began = time.process_time()
            fetch = None
            if store is not None:
                fetch = manager.prefetch(prompt, b"root")
                fetch.start()
            length = manager.add_sequence(0, prompt, b"root", None, fetch) or 0
            assert length == (PROMPT if store is not None and store.full else 0)
            manager.allocate_slots([(0, length, len(prompt) - length)])
            manager.commit(0, prompt[length:])
            manager.free(0)
            seconds_per_token.append(time.process_time() - began)
        report("bookkeeping", store=name, us_per_token=round(1e6 * statistics.median(seconds_per_token) / PROMPT, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=["demo", "135m"])
    parser.add_argument("--folder", type=Path, help="directory on the disk to measure [default: a temporary one]")
    parser.add_argument("--mib", type=int, default=256, help="size of the blocks written to disk")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    config = (
        MODEL_PRESETS["demo"](4096, 4096)
        if options.shape == "demo"
        else ModelConfig.from_dict({**SMOLLM, "max_seq_len": 4096})
    )
    kinds = next(iter(config.stack.layer_types.values())).attention
    heads = kinds.num_kv_heads or kinds.num_heads
    size = 16 * (8 + config.stack.num_layers * heads * 2 * (config.hidden_size // kinds.num_heads) * 4)
    folder = Path(tempfile.mkdtemp(prefix="kvad-prefix-cache-", dir=options.folder))
    try:
        bookkeeping(5 * options.repeats)
        disk(folder, size, max(1, (options.mib << 20) // size), options.repeats)
        tokens(config, folder, options.repeats)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
