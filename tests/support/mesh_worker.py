"""One rank of a mesh: ``python -m tests.support.mesh_worker FOLDER RANK SIZE`` runs every case that needs this rank.

Rank 0 drives a whole model and its cut twin over the same streams and says how far apart they are, in
FOLDER/result-0.json; the others follow.  Ranks find one another through a file, so no port is asked for.
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
from kvad.engine.engine import Engine
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
from kvad.parallel.messages import receive
from kvad.parallel.process_groups import ProcessGroups, connect_groups
from kvad.parallel.tensor_parallel import shard_model
from tests.support.driver import Stream, drive
from tests.support.random_models import build

TIMEOUT = 60.0  # seconds that a rank waits for another

Result = dict[str, Any]


@dataclass
class Case:
    """``wrong``: done to a cut model on every rank, to see the check object."""

    name: str
    mesh: str
    config: ModelConfig
    cache: CacheConfig
    streams: Sequence[Stream] = field(default_factory=list)
    budget: int = 256
    dtype: torch.dtype = torch.float64
    wrong: Callable[[Transformer, ProcessGroups], None] | None = None
    run: Callable[[Case, int, Store], Result | None] | None = None  # instead of the usual
    long: bool = False  # run with the long tests only
    learned: bool = False  # summaries by a compressor whose numbers are random
    texts: bool = False  # compare the texts of real engines, one of whose requests is cancelled, too


def cut(case: Case, links: ProcessGroups, seed: int = 0) -> Transformer:
    model = build(case.config, seed=seed, dtype=case.dtype)
    shard_model(model, links)
    if case.wrong is not None:
        case.wrong(model, links)
    return model


def poisoned(memory: ShardedKVCache) -> ShardedKVCache:
    """Nothing may be read that nobody has written."""
    for stores in memory.stores:
        for pair in stores.values():
            for array in (*pair[0].arrays, *pair[1].arrays):
                array[RESERVED_BLOCKS:] = math.nan if array.is_floating_point() else 127
    return memory


def compare(case: Case, links: ProcessGroups) -> Result | None:
    """Teacher-forced logits, and greedy tokens, of the whole model and of the cut one."""
    if links.mesh.rank:
        model = cut(case, links)
        given = {} if not case.learned else {"summarizers": compressor(case).by_layer()}
        for _ in range(1 + case.texts):
            run_follower(model, poisoned(build_follower_cache(model, case.cache, links, **given)))
        return None
    whole, model = build(case.config, dtype=case.dtype), cut(case, links)
    options: dict[str, Any] = {"budget": case.budget}
    if case.learned:
        options["summarizer"] = compressor(case)
    right = drive(whole, case.cache, case.streams, **options)
    made: list[LeaderKVCache] = []

    def memory(*given: Any, **options: Any) -> LeaderKVCache:
        made.append(leader_cache_factory(model, links)(*given, **options))
        return made[-1]

    got = drive(model, case.cache, case.streams, cache_factory=memory, **options)
    made[-1].release()
    far, same = 0.0, True
    for key, positions in right.logits.items():
        assert positions.keys() == got.logits[key].keys()
        for position, logits in positions.items():
            other = got.logits[key][position]
            difference = (logits.double() - other.double()).abs().max().item()
            far = max(far, math.inf if math.isnan(difference) else difference)
            same &= bool(logits.argmax() == other.argmax())
    result = {
        "far": far,
        "argmax": same,
        "preemptions": got.preemptions,
        "copies": got.copies,
        "hits": got.hit_tokens,
        "mixed": got.mixed,
        "same_run": (right.steps, right.preemptions, right.copies) == (got.steps, got.preemptions, got.copies),
    }
    if case.texts:
        engine = Engine(model, case.cache, max_num_batched_tokens=case.budget, cache_factory=memory)
        texts = greedy(Engine(whole, case.cache, max_num_batched_tokens=case.budget), case), greedy(engine, case)
        engine.close()
        result |= {"tokens": texts[0] == texts[1], "said": sum(map(len, texts[0].values()))}
    return result


def compressor(case: Case) -> Summarizer:
    made = Summarizer(attention_specs(case.config), 2)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return made.to(case.dtype)


def answers(case: Case, rank: int, store: Store) -> Result | None:
    """What an encoder says of texts: hidden states, or what its head makes of them.  Nothing is cached."""
    links = connect_groups(Mesh.parse(case.mesh).with_rank(rank), store, timeout=TIMEOUT, idle=TIMEOUT)
    model = cut(case, links)
    if rank:
        run_follower(model, build_follower_cache(model, case.cache, links))
        return None
    texts = [stream.prompt[:40] for stream in case.streams]
    said = []
    for engine in (
        Engine(build(case.config, dtype=case.dtype), case.cache),
        Engine(model, case.cache, cache_factory=leader_cache_factory(model, links)),
    ):
        for text in texts:
            engine.add_encoder_request([token % 41 for token in text])
        pieces = {}
        while not engine.idle:
            pieces |= {piece.request: piece.output for piece in engine.step()}
        said.append([pieces[number] for number in range(len(texts))])
        engine.close()
    return {"far": max((a - b).abs().max().item() for a, b in zip(*said, strict=True))}  # type: ignore[operator]


def deserted(case: Case, rank: int, store: Store) -> Result | None:
    """Rank 1 hears of one step and goes away: rank 0 says so, and ends the rows of its step."""
    links = connect_groups(Mesh.parse(case.mesh).with_rank(rank), store, timeout=TIMEOUT, idle=TIMEOUT)
    model = cut(case, links)
    if rank:
        receive(links.broadcast_from_first_rank)
        return None
    engine = Engine(model, case.cache, cache_factory=leader_cache_factory(model, links))
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=3))
    try:
        engine.step()
    except EngineError as error:
        (piece,) = engine.step()
        return {"message": str(error), "finish": piece.finish_reason, "error_of_row": piece.error}
    return {"message": "", "finish": None, "error_of_row": None}


def greedy(engine: Engine, case: Case) -> dict[str, list[int]]:
    """Every stream's own text, all at once; the last is cancelled after some steps where there are several."""
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
            apart = dist.PrefixStore(case.name, store)
            if case.run is not None:
                result = case.run(case, rank, apart)
            else:
                result = compare(case, connect_groups(mesh.with_rank(rank), apart, timeout=TIMEOUT, idle=TIMEOUT))
        except BaseException:
            result = {"error": traceback.format_exc()}
        if result is not None:
            results[case.name] = result
    with (folder / f"result-{rank}.json").open("w") as file:
        file.write(json.dumps(results))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all is said; at the interpreter's end gloo's own threads are at times torn down while they run


def spawn(folder: Path, module: str, size: int, which: str) -> dict[str, Result]:
    """Start ``size`` processes of ``module`` for ``which`` of its cases and read what rank 0 found; any rank's error is
    in it."""
    folder.mkdir(parents=True, exist_ok=True)
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-m", module, str(folder), str(rank), str(size), which], env=quiet)
        for rank in range(size)
    ]
    try:
        codes = [rank.wait(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * size, codes
    found: dict[str, Result] = json.loads((folder / "result-0.json").read_text())
    for rank in range(1, size):
        for name, result in json.loads((folder / f"result-{rank}.json").read_text()).items():
            found[name] = {"error": f"rank {rank}: {result.get('error')}\nrank 0: {found.get(name)}"}
    return found
