"""Cells on storage: sequences that leave the pool and are restored, and a cache sharded over ranks.

A covering array (``tests/support/covering_array.py``) of policy x format x encoding x topology, each by every entry
of ``WAYS`` (``kvad/verify/round_trips.py``) and on every mesh of ``MESHES``. The logits after the round trip
are compared with the uncached model (or with a solo run, as in ``cells.py``); on a mesh, with one process.
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
from kvad.verify.references import QuantizedNoCache
from kvad.verify.replay import ReplayResult, ReplayStream
from kvad.verify.round_trips import run_round_trip
from kvad.verify.scenario import first_loss_length
from tests.support.covering_array import pairwise
from tests.support.driver import Stream, drive
from tests.support.matrix.cells import ENCODINGS, CellResult, cache_fields, config_of, make_streams
from tests.support.mesh_cases import pair, shaped
from tests.support.mesh_worker import Case, run_rank, spawn
from tests.support.random_models import build
from tests.support.uncached import run_uncached


class Column(NamedTuple):
    """A round trip, the cache options before it, and those after it."""

    way: str
    before: dict[str, Any] = {}  # noqa: RUF012  read only
    after: dict[str, Any] = {}  # noqa: RUF012


WAYS = {
    "swapped to RAM": Column("swap"),
    "swapped to disk": Column("swap-disk"),
    "swapped, contiguous": Column("swap", {"layout": "contiguous"}),
    "prefix from RAM": Column("prefix-ram"),
    "prefix from disk": Column("prefix-disk"),
    "session": Column("session"),
    "session, other blocks": Column("session", after={"block_size": 8}),
    "session, other layout": Column("session", after={"layout": "contiguous"}),
    "offloaded to RAM": Column("offload"),
    "offloaded to disk": Column("offload-disk"),
}
MESHES = ("2x1", "1x2")

# The order in which policies' open pairs are closed; it determines the sample, so a change makes
# docs/reference/matrix.json stale.
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
    """Return cells (topology, encoding, policy, format).

    Keys by channel, which only ``full`` accepts, and encoders, which have no cache, occur once each.
    """
    axes = {
        "topology": ("decoder", "encoder-decoder"),
        "encoding": ENCODINGS,
        "policy": tuple(POLICIES),
        "format": tuple(name for name in FORMATS if not name.endswith("-channel")),
    }
    sampled = [
        (case["topology"], case["encoding"], case["policy"], case["format"]) for case in pairwise(axes, order=ORDER)
    ]
    sampled += [("decoder", "rope", "full", name) for name in FORMATS if name.endswith("-channel")]
    sampled += [("encoder", "rope", "full", "float64")]
    return sorted(dict.fromkeys(sampled), key=lambda cell: (list(POLICIES).index(cell[2]), cell))


def storage_cells() -> Iterator[tuple[str, tuple[str, ...]]]:
    for cell in sample():
        for way in WAYS:
            yield "lives", (*cell, way)


def sharded() -> Iterator[tuple[str, tuple[str, ...]]]:
    for cell in sample():
        for mesh in MESHES:
            yield "shards", (*cell, mesh)


# ---------------------------------------------------------------- ways


def measure_round_trip(cell: tuple[str, ...]) -> CellResult:
    """Measure a round trip.

    ``moved`` is how much was transferred; ``missed`` is the reason if nothing was, so that the sequence was
    recomputed.
    """
    topology, encoding, policy, form, name = cell
    column, config = WAYS[name], config_of(topology, encoding)
    rope_at = "write" if policy == "quest" else ("write", "read")[sum(map(len, cell[:4])) % 2]
    model, streams = build(config), _streams(topology)
    with tempfile.TemporaryDirectory() as folder:
        try:
            cache = CacheConfig(**{**cache_fields(policy, form), "rope_at": rope_at, **column.before})
            check_policy(config, cache)
            cache_after = replace(cache, **column.after)
            result = run_round_trip(column.way, model, cache, streams, Path(folder), other=cache_after)
        except KvadError as error:
            message = error.message + (f"; {error.hint}" if error.hint else "")
            return {"refused": message.replace(f"{folder}/", "")}
    measured = _compare(model, cache, streams, result.replay)
    return {**measured, "moved": result.moved, **({"missed": result.miss_reason} if result.miss_reason else {})}


def _streams(topology: str) -> list[ReplayStream]:
    return [
        ReplayStream(
            tuple(stream.prompt),
            (tuple(stream.continuations[0]),),
            source=None if stream.source is None else tuple(stream.source),
        )
        for stream in make_streams(topology, endless=False)
    ]


def _compare(
    model: Transformer, cache: CacheConfig, streams: Sequence[ReplayStream], replayed: ReplayResult
) -> CellResult:
    """Return max |dlogit| from the uncached model, or from each sequence's solo run in other chunks."""
    assert len(replayed.pieces) == len(streams), "a sequence is missing after the round trip"
    groups = build_groups(attention_specs(model.config), cache)
    compare_solo = first_loss_length(groups) is not None
    largest = 0.0
    for (number, _), pieces in replayed.pieces.items():
        stream = streams[number]
        if compare_solo:
            expected = _solo_logits(model, cache, stream)
        else:
            uncached = NoCache(model.config, specs=cache.restrict(attention_specs(model.config)), kernel="reference")
            reference = (
                uncached
                if cache.token_formats == ("float64", "float64")
                else QuantizedNoCache(uncached, *cache.token_formats, rotate=cache.rope_at)
            )
            expected = dict(enumerate(run_uncached(model, stream.tokens(0), reference, stream.source)))
        for start, measured in pieces:
            for at, logits in enumerate(measured, start):
                if at in expected:
                    largest = max(largest, float((logits - expected[at]).abs().max().nan_to_num(nan=torch.inf)))
    return {"reference": "solo", "structure": largest} if compare_solo else {"structure": largest}


def _solo_logits(model: Transformer, cache: CacheConfig, stream: ReplayStream) -> dict[int, torch.Tensor]:
    source = None if stream.source is None else list(stream.source)
    forced = Stream(list(stream.prompt), [list(stream.forced_tokens[0])], source=source)
    return drive(model, replace(cache, max_num_seqs=1, prefill_chunk_size=3), [forced]).logits[0, 0]


# ---------------------------------------------------------------- meshes


def shards(cells: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], CellResult]:
    """Measure all cells on one pair of processes."""
    measured = {cell: {"refused": message} for cell in cells if (message := _refused(cell))}
    remaining = [cell for cell in cells if cell not in measured]
    if remaining:
        with tempfile.TemporaryDirectory() as folder:
            results = spawn(Path(folder), "tests.support.matrix.lives", 2, json.dumps(remaining))
        for cell in remaining:
            result = results[" ".join(cell)]
            if "error" in result:
                raise AssertionError(f"{cell}: {result['error']}")
            measured[cell] = {"structure": result["difference"]}
    return measured


def _refused(cell: tuple[str, ...]) -> str:
    topology, encoding, policy, form, mesh = cell
    if topology == "encoder":
        return measure_round_trip((*cell[:4], next(iter(WAYS))))["refused"]
    config = _sharded_config(topology, encoding)
    try:
        cache = CacheConfig(**cache_fields(policy, form))
        check_policy(config, cache)
        groups = build_groups(attention_specs(config), cache)
        check_model_fits_mesh(config, Mesh.parse(mesh))
        check_cache_fits_mesh(groups, Mesh.parse(mesh))
    except KvadError as error:
        return error.message + (f"; {error.hint}" if error.hint else "")
    return ""


def _sharded_config(topology: str, encoding: str) -> ModelConfig:
    """Return a model with eight heads, which two ranks share."""
    return pair(encoding) if topology == "encoder-decoder" else shaped(encoding)


def cases(cells: str) -> list[Case]:
    """Build the cases of cells that are given as JSON."""
    result = []
    for topology, encoding, policy, form, mesh in json.loads(cells):
        config, cache = _sharded_config(topology, encoding), CacheConfig(**cache_fields(policy, form))
        name = " ".join((topology, encoding, policy, form, mesh))
        result.append(Case(name, mesh, config, cache, make_streams(topology, endless=False)))
    return result


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), cases(sys.argv[4]))
