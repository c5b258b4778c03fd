"""One rank of a mesh: ``python -m tests.support.mesh_worker FOLDER RANK SIZE`` runs every case that needs this rank.

Rank 0 runs a whole model and its sharded copy on the same streams and writes the differences to FOLDER/result-0.json;
the other ranks follow. Ranks find one another through a file, so no port is needed.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from kvad.cache.config import CacheConfig
from kvad.config.model import ModelConfig, attention_specs
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling.request import SamplingParams
from kvad.errors import EngineError
from kvad.model.summarizer import Summarizer
from kvad.model.transformer import Transformer
from kvad.model_input import RESERVED_BLOCKS
from kvad.parallel.distributed_cache import (
    LeaderKVCache,
    ShardedKVCache,
    build_follower_cache,
    leader_cache_factory,
    run_follower,
)
from kvad.parallel.mesh import Mesh
from kvad.parallel.process_groups import ProcessGroups, connect_groups, receive
from kvad.parallel.tensor_parallel import shard_model
from tests.support.driver import Stream, drive
from tests.support.random_models import build

TIMEOUT = 60.0  # seconds that a rank waits for another

Result = dict[str, Any]


@dataclass
class Case:
    """A test case; ``wrong`` injects a fault into a sharded model on every rank."""

    name: str
    mesh: str
    config: ModelConfig
    cache: CacheConfig
    streams: Sequence[Stream] = field(default_factory=list)
    budget: int = 256
    dtype: torch.dtype = torch.float64
    wrong: Callable[[Transformer, ProcessGroups], None] | None = None
    run: Callable[[Case, int, Store], Result | None] | None = None  # replaces ``compare``
    long: bool = False  # run with the long tests only
    learned: bool = False  # summaries by a summarizer with random weights
    texts: bool = False  # also compare texts of real engines, with one cancelled request


def connect(mesh: Mesh, rank: int, store: Store) -> ProcessGroups:
    return connect_groups(mesh.with_rank(rank), store, timeout=TIMEOUT, idle=TIMEOUT)


def build_shard(case: Case, groups: ProcessGroups, seed: int = 0) -> Transformer:
    model = build(case.config, seed=seed, dtype=case.dtype)
    shard_model(model, groups)
    if case.wrong is not None:
        case.wrong(model, groups)
    return model


def filled_with_nan(kv_cache: ShardedKVCache) -> ShardedKVCache:
    """Fill all blocks with NaN, so that a read of an unwritten slot shows."""
    for stores in kv_cache.stores:
        for pair in stores.values():
            for array in (*pair[0].arrays, *pair[1].arrays):
                array[RESERVED_BLOCKS:] = math.nan if array.is_floating_point() else 127
    return kv_cache


def compare(case: Case, groups: ProcessGroups) -> Result | None:
    """Compare teacher-forced logits and greedy tokens of the whole model and the sharded one."""
    if groups.mesh.rank:
        model = build_shard(case, groups)
        extra = {} if not case.learned else {"summarizers": random_summarizer(case).by_layer()}
        for _ in range(1 + case.texts):
            run_follower(model, filled_with_nan(build_follower_cache(model, case.cache, groups, **extra)))
        return None
    full_model, model = build(case.config, dtype=case.dtype), build_shard(case, groups)
    options: dict[str, Any] = {"budget": case.budget}
    if case.learned:
        options["summarizer"] = random_summarizer(case)
    expected = drive(full_model, case.cache, case.streams, **options)
    built: list[LeaderKVCache] = []

    def kv_cache(*arguments: Any, **options: Any) -> LeaderKVCache:
        built.append(leader_cache_factory(model, groups)(*arguments, **options))
        return built[-1]

    sharded_run = drive(model, case.cache, case.streams, cache_factory=kv_cache, **options)
    built[-1].release()
    largest, same = 0.0, True
    for key, positions in expected.logits.items():
        assert positions.keys() == sharded_run.logits[key].keys()
        for position, logits in positions.items():
            other = sharded_run.logits[key][position]
            difference = (logits.double() - other.double()).abs().max().item()
            largest = max(largest, math.inf if math.isnan(difference) else difference)
            same &= bool(logits.argmax() == other.argmax())
    result = {
        "difference": largest,
        "argmax": same,
        "preemptions": sharded_run.preemptions,
        "copies": sharded_run.copies,
        "hits": sharded_run.hit_tokens,
        "mixed": sharded_run.mixed,
        "same_run": (expected.steps, expected.preemptions, expected.copies)
        == (sharded_run.steps, sharded_run.preemptions, sharded_run.copies),
    }
    if case.texts:
        engine = Engine(model, case.cache, EngineConfig(max_num_batched_tokens=case.budget, cache_factory=kv_cache))
        texts = (
            greedy(Engine(full_model, case.cache, EngineConfig(max_num_batched_tokens=case.budget)), case),
            greedy(engine, case),
        )
        engine.close()
        result |= {"tokens": texts[0] == texts[1], "num_tokens": sum(map(len, texts[0].values()))}
    return result


def random_summarizer(case: Case) -> Summarizer:
    built = Summarizer(attention_specs(case.config), 2)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return built.to(case.dtype)


def run_encoder(case: Case, rank: int, store: Store) -> Result | None:
    """Compare an encoder's outputs (hidden states or its head's) without a cache."""
    groups = connect(Mesh.parse(case.mesh), rank, store)
    model = build_shard(case, groups)
    if rank:
        run_follower(model, build_follower_cache(model, case.cache, groups))
        return None
    texts = [stream.prompt[:40] for stream in case.streams]
    outputs = []
    for engine in (
        Engine(build(case.config, dtype=case.dtype), case.cache),
        Engine(model, case.cache, EngineConfig(cache_factory=leader_cache_factory(model, groups))),
    ):
        for text in texts:
            engine.add_encoder_request([token % 41 for token in text])
        pieces = {}
        while not engine.idle:
            pieces |= {piece.request: piece.output for piece in engine.step()}
        outputs.append([pieces[number] for number in range(len(texts))])
        engine.close()
    return {"difference": max((a - b).abs().max().item() for a, b in zip(*outputs, strict=True))}  # type: ignore[operator]


def run_lost_rank(case: Case, rank: int, store: Store) -> Result | None:
    """Let rank 1 exit after one step: rank 0 reports it and ends the sequences of its step."""
    groups = connect(Mesh.parse(case.mesh), rank, store)
    model = build_shard(case, groups)
    if rank:
        receive(groups.broadcast_from_first_rank)
        return None
    engine = Engine(model, case.cache, EngineConfig(cache_factory=leader_cache_factory(model, groups)))
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=3))
    try:
        engine.step()
    except EngineError as error:
        (piece,) = engine.step()
        return {"message": str(error), "finish": piece.finish_reason, "sequence_error": piece.error}
    return {"message": "", "finish": None, "sequence_error": None}


def greedy(engine: Engine, case: Case) -> dict[str, list[int]]:
    """Generate all streams at once; with several, the last is cancelled after some steps."""
    tokens: dict[str, list[int]] = {}
    ids = [
        engine.add_request(
            stream.prompt,
            SamplingParams(max_tokens=len(stream.continuations[0]), temperature=0),
            encoder_token_ids=stream.source,
        )
        for stream in case.streams
    ]
    steps = 0
    while not engine.idle:
        for piece in engine.step():
            if piece.token_id is not None:
                tokens.setdefault(f"{piece.request}", []).append(piece.token_id)
        steps += 1
        if steps == 6 and len(ids) > 1:
            engine.abort_request(ids[-1])
            tokens.pop(f"{ids[-1]}", None)
    return {key: tokens[key] for key in tokens if int(key) != ids[-1] or len(ids) == 1}


def run_rank(folder: Path, rank: int, size: int, cases: Sequence[Case]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    results: dict[str, Result] = {}
    for case in cases:
        mesh = Mesh.parse(case.mesh)
        if case.run is None and rank >= mesh.size:
            continue
        try:
            case_store = dist.PrefixStore(case.name, store)
            if case.run is not None:
                result = case.run(case, rank, case_store)
            else:
                result = compare(case, connect(mesh, rank, case_store))
        except BaseException:
            result = {"error": traceback.format_exc()}
        if result is not None:
            results[case.name] = result
    with (folder / f"result-{rank}.json").open("w") as file:
        file.write(json.dumps(results))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # results are written; gloo's threads may still run while the interpreter exits


def spawn(folder: Path, module: str, size: int, which: str) -> dict[str, Result]:
    """Start ``size`` processes of ``module`` and return rank 0's results, with the errors of all ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-m", module, str(folder), str(rank), str(size), which], env=environment)
        for rank in range(size)
    ]
    try:
        codes = [rank.wait(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * size, codes
    results: dict[str, Result] = json.loads((folder / "result-0.json").read_text())
    for rank in range(1, size):
        for name, result in json.loads((folder / f"result-{rank}.json").read_text()).items():
            results[name] = {"error": f"rank {rank}: {result.get('error')}\nrank 0: {results.get(name)}"}
    return results
