"""One cell of docs/reference/matrix.md: a policy, a format, a position encoding and a topology; measured or refused.

Tiny random models in float64, with sequences of different lengths, in chunks and in batches. ``structure`` is max
|dlogit| between the cache and its reference: the uncached model whose layers see what the policy lets them see and
whose keys and values are quantized and back; or, for a policy that ranks or summarizes, each sequence's solo run in
other chunks. ``loss`` is max |dlogit| from the same reference without quantization, for logits of a few units.
Unsupported combinations are tried as well, and ``refused`` has the text of the error.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from kvad.cache.config import CacheConfig
from kvad.cache.groups import build_groups
from kvad.cache.policy_parser import POLICIES
from kvad.cache.quantization import FORMATS
from kvad.cache.sizing.memory_plan import check_policy
from kvad.config.model import ModelConfig, attention_specs
from kvad.engine.engine import Engine
from kvad.errors import KvadError
from kvad.model.transformer import Transformer
from kvad.verify.scenario import first_loss_length, sized_policy
from tests.support.driver import Stream, drive, worst
from tests.support.random_models import SOURCE_VOCAB, VOCAB, build, encoder_config, model_config, pair_config

EXACT = 1e-10
TOPOLOGIES = ("decoder", "encoder-decoder", "encoder")
ENCODINGS = ("none", "learned", "sinusoidal", "rope", "alibi", "t5")
LAYOUTS = tuple(itertools.product(("paged", "contiguous"), ("write", "read")))
LENGTHS, NEW, BLOCK = (22, 3, 13), 6, 4
LONGEST = max(LENGTHS) + NEW

CellResult = dict[
    str, Any
]  # {"structure": ..., "loss": ...}, {"reference": "solo", "structure": ...} or {"refused": "..."}


def key(*parts: str) -> str:
    return " | ".join(parts)


def all_cells() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (table, cell) of all combinations in the registries."""
    for cell in itertools.product(TOPOLOGIES, ENCODINGS, POLICIES, FORMATS):
        yield "product", cell
    for policy, (layout, rotate) in itertools.product(POLICIES, LAYOUTS):
        for encoding in ("rope", "alibi"):
            yield "layouts", (policy, layout, rotate, encoding)
    for encoding, policy in itertools.product(ENCODINGS, POLICIES):
        yield "endless", (encoding, policy)


def measure_cell(table: str, cell: tuple[str, ...]) -> CellResult:
    if table == "product":
        topology, encoding, policy, form = cell
        layout, rotate = LAYOUTS[sum(map(len, cell)) % len(LAYOUTS)]
        if policy in ("tiered", "offload", "quest") or form.endswith("-channel"):  # these require blocks
            layout = "paged"
        if policy == "quest":  # and rotated keys
            rotate = "write"
        return measure(topology, encoding, cache_fields(policy, form, layout=layout, rope_at=rotate))
    if table == "layouts":
        policy, layout, rotate, encoding = cell
        return measure("decoder", encoding, cache_fields(policy, "float64", layout=layout, rope_at=rotate))
    encoding, policy = cell
    return measure("decoder", encoding, cache_fields(policy, "float64", endless=True))


def cache_fields(policy: str, form: str, **fields: Any) -> dict[str, Any]:
    """Return the fields of a CacheConfig, which may be invalid.

    A format for keys only has its counterpart for the values; under ``full`` it becomes a tiered policy whose steps
    fit these sequences.
    """
    formats, result = (
        {"key_dtype": form, "value_dtype": form.removesuffix("-channel")},
        sized_policy(policy, LONGEST, BLOCK),
    )
    if policy == "full" and form.endswith("-channel"):
        result = f"tiered({BLOCK}, key_format={form}, value_format={formats['value_dtype']}, interval={2 * BLOCK})"
        formats = {"dtype": "float64"}
    return {
        **formats,
        "policy": result,
        "block_size": BLOCK,
        "max_num_seqs": len(LENGTHS),
        "max_seq_len": 48,
        "prefill_chunk_size": 5,
        "max_source_len": 24,
        **fields,
    }


def config_of(topology: str, encoding: str) -> ModelConfig:
    return {"decoder": model_config, "encoder-decoder": pair_config, "encoder": encoder_config}[topology](encoding)


def measure(topology: str, encoding: str, fields: dict[str, Any]) -> CellResult:
    config = config_of(topology, encoding)
    try:
        cache = CacheConfig(**fields)
        groups = build_groups(attention_specs(config), cache)
        check_policy(config, cache)
        if topology == "encoder":  # an encoder has no cache: a decoding request is refused
            Engine(build(config), cache).add_request([1], None)  # type: ignore[arg-type]
    except KvadError as error:
        return {"refused": error.message + (f"; {error.hint}" if error.hint else "")}
    model, streams = build(config), make_streams(topology, endless=cache.endless)
    run = drive(model, cache, streams)
    if first_loss_length(groups) is not None:
        return {"reference": "solo", "structure": solo_difference(model, cache, streams, run.logits)}
    result = {"structure": worst(model, streams, run, cache, cache.token_formats)}
    if cache.token_formats != ("float64", "float64"):
        result["loss"] = worst(model, streams, run, cache)
    return result


def make_streams(topology: str, *, endless: bool) -> list[Stream]:
    rng = random.Random(7)
    new = 100 if endless else NEW  # beyond the limit of the tiny models
    streams = []
    for length in LENGTHS:
        prompt, continuation = ([rng.randrange(VOCAB) for _ in range(count)] for count in (length, new))
        source = [rng.randrange(SOURCE_VOCAB) for _ in range(20 - length // 2)]
        streams.append(Stream(prompt, [continuation], source=source if topology == "encoder-decoder" else None))
    return streams


def solo_difference(model: Transformer, cache: CacheConfig, streams: list[Stream], batch_logits: Any) -> float:
    """Return max |dlogit| between the sequences and their solo runs in chunks of another size."""
    largest = 0.0
    for number, stream in enumerate(streams):
        solo = drive(model, replace(cache, max_num_seqs=1, prefill_chunk_size=3), [replace(stream, arrives=0)])
        for at, logits in solo.logits[0, 0].items():
            gap = (logits - batch_logits[number, 0][at]).abs().max().nan_to_num(nan=torch.inf)
            largest = max(largest, float(gap))
    return largest
