"""A session saved on one mesh and continued on others: ``mesh_cases.py`` runs ``run_session`` per rank.

Real engines and files: each hop loads the session that the last one saved, generates some tokens, and saves again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from kvad.cache.config import CacheConfig
from kvad.cache.sessions.state import SequenceState, load_session, save_session
from kvad.engine import Engine, EngineConfig
from kvad.errors import ConfigError
from kvad.model.fingerprint import weights_fingerprint
from kvad.parallel.distributed_cache import build_follower_cache, leader_cache_factory, run_follower
from kvad.parallel.mesh import Mesh
from tests.support.engine_sessions import run, worst
from tests.support.manager_driver import unpublish_all
from tests.support.mesh_worker import Case, Result, build_shard, connect
from tests.support.random_models import build

HOPS = ("2x1", "1x1", "1x2", "4x1", "2x1", "1x1")
TOKENS_PER_HOP = 3  # tokens generated on each mesh


def run_session(case: Case, rank: int, store: Store) -> Result | None:
    """Return by hop the difference from one process, and the difference after the keys were zeroed."""
    stream = case.streams[1]
    prompt, source = stream.tokens(), stream.source
    if rank == 0:
        model_of_one = build(case.config)
        weights = weights_fingerprint(model_of_one)
        _, tokens, scores = run(
            Engine(model_of_one, case.cache), prompt, TOKENS_PER_HOP * len(HOPS), encoder_token_ids=source
        )
        result: Result = {"difference": {}, "tokens": True, "cached": True}
        result |= {"without_keys": 0.0, "fingerprint_required": False}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.session"
        for hop, name in enumerate(HOPS):
            mesh, cache = Mesh.parse(name), _cache(case, hop)
            if rank >= mesh.size:
                continue
            groups = connect(mesh, rank, dist.PrefixStore(f"{hop}", store))
            model = build_shard(case, groups)
            if rank:
                run_follower(model, build_follower_cache(model, cache, groups))
                continue
            factory = leader_cache_factory(model, groups)
            engine = Engine(model, cache, EngineConfig(cache_factory=factory, weights_fingerprint=weights))
            previous = tokens[: TOKENS_PER_HOP * hop]
            if hop == len(HOPS) - 1:
                zeroed = _without_keys(_load(engine, path))
                result["without_keys"] = worst(
                    _generate(engine, prompt + previous, source, zeroed)[1], scores[TOKENS_PER_HOP * hop :]
                )
                unpublish_all(engine.kv_cache_manager)
            state = _load(engine, path) if hop else None
            new_tokens, new_scores = _generate(engine, prompt + previous, source, state, path)
            result["difference"][f"{hop}: {name}"] = worst(new_scores, scores[TOKENS_PER_HOP * hop :][:TOKENS_PER_HOP])
            result["tokens"] &= new_tokens == tokens[TOKENS_PER_HOP * hop :][:TOKENS_PER_HOP]
            usage = engine.metrics(engine._next_request - 1)
            result["cached"] &= (
                usage.num_cached_tokens == (len(prompt + previous) - 1 if hop else 0) and not usage.resume_miss_reason
            )
            if mesh.size > 1:
                engine._weights_fingerprint = None
                try:
                    engine.cache_fingerprint("")
                except ConfigError as error:
                    result["fingerprint_required"] = "weights" in str(error)
            engine.close()
    return result if rank == 0 else None


def _generate(
    engine: Engine,
    tokens: Sequence[int],
    source: Sequence[int] | None,
    state: SequenceState | None,
    path: Path | None = None,
) -> tuple[list[int], Any]:
    request, new_tokens, new_scores = run(
        engine, tokens, TOKENS_PER_HOP, encoder_token_ids=source, resume=state, keep_state=path is not None
    )
    if path is not None:
        state_after = engine.pop_state(request)
        save_session(path, state_after, engine.cache_fingerprint(state_after.regime), state_after.tokens, {})
    return new_tokens, new_scores


def _load(engine: Engine, path: Path) -> SequenceState:
    fingerprint = lambda regime, salt: engine.cache_fingerprint(regime, cache_salt=salt)  # noqa: E731
    return load_session(path, fingerprint, engine.kv_cache, engine.state_keeper.engine_id).state


def _cache(case: Case, hop: int) -> CacheConfig:
    """Give every other mesh another block size, unless the policy depends on it."""
    fixed = "tiered" in case.cache.policy or "quest" in case.cache.policy
    return case.cache if fixed or hop % 2 == 0 else replace(case.cache, block_size=8)


def _without_keys(state: SequenceState) -> SequenceState:
    parts = [
        part._replace(arrays={k: torch.zeros_like(x) if "keys" in k else x for k, x in part.arrays.items()})
        for part in state.groups
    ]
    return replace(state, groups=tuple(parts))
