"""Cells of where a cache lives: rows that leave the pool and come back, and a cache cut over ranks.

A covering array (``tests/support/covering_array.py``) of policy x format x encoding x topology, each of them by every
way of :data:`WAYS` (``kvad/verify/round_trips.py``) and on every mesh of :data:`MESHES`.  What a row says when
it is back is compared with what it says without a cache (or alone, as in ``cells.py``); on a mesh, with one process.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvad.cache.config import CacheConfig
from kvad.cache.groups import build_groups
from kvad.cache.policy_parser import POLICIES
from kvad.cache.quantization import FORMATS
from kvad.cache.sizing.memory_plan import check_policy
from kvad.config.model import ModelConfig, attention_specs
from kvad.errors import KvadError
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.parallel.mesh import Mesh, check_cache_fits_mesh, check_model_fits_mesh
from kvad.verify.cases import first_loss_length
from kvad.verify.references import QuantizedNoCache
from kvad.verify.replay import ReplayResult, ReplayStream, run_uncached
from kvad.verify.round_trips import run_round_trip
from tests.support.covering_array import pairwise
from tests.support.driver import drive
from tests.support.matrix.cells import ENCODINGS, Said, config_of, made, rows
from tests.support.mesh_cases import pair, shaped
from tests.support.mesh_worker import Case, run_rank, spawn
from tests.support.random_models import build


class Column(NamedTuple):
    """A way, what the cache is in the beginning, and what it is when the row comes back."""

    way: str
    first: dict[str, Any] = {}  # noqa: RUF012  read only
    then: dict[str, Any] = {}  # noqa: RUF012


WAYS = {
    "parked in RAM": Column("swap"),
    "parked on disk": Column("swap-disk"),
    "parked, contiguous": Column("swap", {"layout": "contiguous"}),
    "prefix from RAM": Column("prefix-ram"),
    "prefix from disk": Column("prefix-disk"),
    "session": Column("session"),
    "session, other blocks": Column("session", then={"block_size": 8}),
    "session, other layout": Column("session", then={"layout": "contiguous"}),
    "spilled to RAM": Column("offload"),
    "spilled to disk": Column("offload-disk"),
}
MESHES = ("2x1", "1x2")

# The order in which policies' open pairs are closed; it determines the sample, so a change makes
# docs/matrix.json stale.
ORDER = (
    "full",
    "heavy-hitters",
    "tiered",
    "key-norm",
    "quest",
    "random",
    "sinks",
    "snapkv",
    "offload",
    "tova",
    "block-window",
    "window",
)


def sample() -> list[tuple[str, str, str, str]]:
    """(topology, encoding, policy, format); keys by channel, which no policy but ``full`` has, and encoders, which have
    no cache, once each."""
    axes = {
        "topology": ("decoder", "encoder-decoder"),
        "encoding": ENCODINGS,
        "policy": tuple(POLICIES),
        "format": tuple(name for name in FORMATS if not name.endswith("-channel")),
    }
    sampled = pairwise(axes, order=ORDER)
    found = [(each["topology"], each["encoding"], each["policy"], each["format"]) for each in sampled]
    found += [("decoder", "rope", "full", name) for name in FORMATS if name.endswith("-channel")]
    found += [("encoder", "rope", "full", "float64")]
    return sorted(dict.fromkeys(found), key=lambda cell: (list(POLICIES).index(cell[2]), cell))


def every() -> Iterator[tuple[str, tuple[str, ...]]]:
    for cell in sample():
        for way in WAYS:
            yield "lives", (*cell, way)


def sharded() -> Iterator[tuple[str, tuple[str, ...]]]:
    for cell in sample():
        for mesh in MESHES:
            yield "shards", (*cell, mesh)


# ---------------------------------------------------------------- ways


def ask(cell: tuple[str, ...]) -> Said:
    """``moved``: how much went that way; ``missed``: why nothing did, so that it was computed."""
    topology, encoding, policy, form, name = cell
    column, config = WAYS[name], config_of(topology, encoding)
    turned = "write" if policy == "quest" else ("write", "read")[sum(map(len, cell[:4])) % 2]
    model, streams = build(config), _streams(topology)
    with tempfile.TemporaryDirectory() as folder:
        try:
            cache = CacheConfig(**{**made(policy, form), "rope_at": turned, **column.first})
            check_policy(config, cache)
            other = replace(cache, **column.then)
            went = run_round_trip(column.way, model, cache, streams, Path(folder), other=other)
        except KvadError as error:
            words = error.message + (f"; {error.hint}" if error.hint else "")
            return {"refused": words.replace(f"{folder}/", "")}
    said = _judged(model, cache, streams, went.replay)
    return {**said, "moved": went.moved, **({"missed": went.miss_reason} if went.miss_reason else {})}


def _streams(topology: str) -> list[ReplayStream]:
    made = rows(topology, endless=False)
    sources = [None if each.source is None else tuple(each.source) for each in made]
    return [
        ReplayStream(tuple(each.prompt), (tuple(each.continuations[0]),), source=source)
        for each, source in zip(made, sources, strict=True)
    ]


def _judged(model: Transformer, cache: CacheConfig, streams: Sequence[ReplayStream], came: ReplayResult) -> Said:
    """As ``cells.measure``: max |dlogit| from the model without a cache, or from each row alone in other chunks."""
    assert len(came.pieces) == len(streams), "a row never came back"
    placed = build_groups(attention_specs(model.config), cache)
    own = first_loss_length(placed) is not None
    largest = 0.0
    for (number, _), pieces in came.pieces.items():
        stream = streams[number]
        if own:
            right = _alone(model, cache, stream)
        else:
            memory = NoCache(model.config, specs=cache.restrict(attention_specs(model.config)), kernel="reference")
            judge = (
                memory
                if cache.token_formats == ("float64", "float64")
                else QuantizedNoCache(memory, *cache.token_formats, rotate=cache.rope_at)
            )
            logits = run_uncached(model, stream.tokens(0), stream.limit, judge, stream.source)
            right = dict(enumerate(logits))
        for start, said in pieces:
            for at, each in enumerate(said, start):
                if at in right:
                    largest = max(largest, float((each - right[at]).abs().max().nan_to_num(nan=torch.inf)))
    return {"judge": "own", "structure": largest} if own else {"structure": largest}


def _alone(model: Transformer, cache: CacheConfig, stream: ReplayStream) -> dict[int, torch.Tensor]:
    from tests.support.driver import Stream as Forced

    source = None if stream.source is None else list(stream.source)
    forced = Forced(list(stream.prompt), [list(stream.forced_tokens[0])], source=source)
    return drive(model, replace(cache, max_num_seqs=1, prefill_chunk_size=3), [forced]).logits[0, 0]


# ---------------------------------------------------------------- meshes


def shards(cells: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], Said]:
    """All of them, on one pair of processes."""
    said = {cell: {"refused": words} for cell in cells if (words := _refused(cell))}
    asked = [cell for cell in cells if cell not in said]
    if asked:
        with tempfile.TemporaryDirectory() as folder:
            found = spawn(Path(folder), "tests.support.matrix.lives", 2, json.dumps(asked))
        for cell in asked:
            result = found[" ".join(cell)]
            if "error" in result:
                raise AssertionError(f"{cell}: {result['error']}")
            said[cell] = {"structure": result["far"]}
    return said


def _refused(cell: tuple[str, ...]) -> str:
    topology, encoding, policy, form, mesh = cell
    if topology == "encoder":
        return ask((*cell[:4], next(iter(WAYS))))["refused"]
    config = _cut_config(topology, encoding)
    try:
        cache = CacheConfig(**made(policy, form))
        check_policy(config, cache)
        placed = build_groups(attention_specs(config), cache)
        check_model_fits_mesh(config, Mesh.parse(mesh))
        check_cache_fits_mesh(placed, Mesh.parse(mesh))
    except KvadError as error:
        return error.message + (f"; {error.hint}" if error.hint else "")
    return ""


def _cut_config(topology: str, encoding: str) -> ModelConfig:
    """Eight heads, which two ranks share."""
    return pair(encoding) if topology == "encoder-decoder" else shaped(encoding)


def cases(said: str) -> list[Case]:
    found = []
    for topology, encoding, policy, form, mesh in json.loads(said):
        config = _cut_config(topology, encoding)
        cache, name = CacheConfig(**made(policy, form)), " ".join((topology, encoding, policy, form, mesh))
        found.append(Case(name, mesh, config, cache, rows(topology, endless=False)))
    return found


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), cases(sys.argv[4]))
