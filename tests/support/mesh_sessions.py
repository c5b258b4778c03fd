"""A session that is saved on one mesh and goes on on others: ``mesh_cases.py`` runs :func:`travel` on each rank.

Real engines and real files: each hop loads what the last one has saved, says some tokens more, and saves again.
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
from kvad.cache.sessions.file import load_session, save_session
from kvad.cache.sessions.state import SequenceState
from kvad.engine.engine import Engine
from kvad.errors import ConfigError
from kvad.model.fingerprint import weights_fingerprint
from kvad.parallel.distributed_cache import build_follower_cache, leader_cache_factory, run_follower
from kvad.parallel.mesh import Mesh
from kvad.parallel.process_groups import connect_groups
from tests.support.engine_sessions import run, worst
from tests.support.mesh_worker import TIMEOUT, Case, Result, cut
from tests.support.random_models import build

HOPS = ("2x1", "1x1", "1x2", "4x1", "2x1", "1x1")
EACH = 3  # tokens that are said on each mesh


def travel(case: Case, rank: int, store: Store) -> Result | None:
    """``far``: by hop, from what one process says without stopping; ``lost``: of a session whose keys were lost."""
    stream = case.streams[1]
    prompt, source = stream.tokens(), stream.source
    if rank == 0:
        whole = build(case.config)
        weights = weights_fingerprint(whole)
        _, tokens, scores = run(Engine(whole, case.cache), prompt, EACH * len(HOPS), encoder_token_ids=source)
        result: Result = {"far": {}, "tokens": True, "cached": True, "lost": 0.0, "unknown": False}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.session"
        for hop, name in enumerate(HOPS):
            mesh, cache = Mesh.parse(name), _cache(case, hop)
            if rank >= mesh.size:
                continue
            links = connect_groups(
                mesh.with_rank(rank), dist.PrefixStore(f"{hop}", store), timeout=TIMEOUT, idle=TIMEOUT
            )
            model = cut(case, links)
            if rank:
                run_follower(model, build_follower_cache(model, cache, links))
                continue
            engine = Engine(model, cache, cache_factory=leader_cache_factory(model, links), weights_fingerprint=weights)
            said = tokens[: EACH * hop]
            if hop == len(HOPS) - 1:
                lost = _without_keys(_load(engine, path))
                result["lost"] = worst(_said(engine, prompt + said, source, lost)[1], scores[EACH * hop :])
                engine.kv_cache_manager.reset_prefix_cache()
            state = _load(engine, path) if hop else None
            came, found = _said(engine, prompt + said, source, state, path)
            result["far"][f"{hop}: {name}"] = worst(found, scores[EACH * hop :][:EACH])
            result["tokens"] &= came == tokens[EACH * hop :][:EACH]
            usage = engine.metrics(engine._next - 1)
            result["cached"] &= (
                usage.num_cached_tokens == (len(prompt + said) - 1 if hop else 0) and not usage.resume_miss_reason
            )
            if mesh.size > 1:
                engine._weights_fingerprint = None
                try:
                    engine.cache_fingerprint("")
                except ConfigError as error:
                    result["unknown"] = "weights" in str(error)
            engine.close()
    return result if rank == 0 else None


def _said(
    engine: Engine,
    tokens: Sequence[int],
    source: Sequence[int] | None,
    state: SequenceState | None,
    path: Path | None = None,
) -> tuple[list[int], Any]:
    request, came, found = run(
        engine, tokens, EACH, encoder_token_ids=source, resume=state, keep_state=path is not None
    )
    if path is not None:
        left = engine.pop_state(request)
        save_session(path, left, engine.cache_fingerprint(left.regime), left.tokens, {})
    return came, found


def _load(engine: Engine, path: Path) -> SequenceState:
    known = lambda regime, salt: engine.cache_fingerprint(regime, cache_salt=salt)  # noqa: E731
    return load_session(path, known, engine.kv_cache, engine.state_keeper.engine_id).state


def _cache(case: Case, hop: int) -> CacheConfig:
    """Every other mesh has blocks of another size, where a policy does not go by them."""
    fixed = "tiered" in case.cache.policy or "quest" in case.cache.policy
    return case.cache if fixed or hop % 2 == 0 else replace(case.cache, block_size=8)


def _without_keys(state: SequenceState) -> SequenceState:
    parts = [
        part._replace(arrays={k: torch.zeros_like(x) if "keys" in k else x for k, x in part.arrays.items()})
        for part in state.groups
    ]
    return replace(state, groups=tuple(parts))
