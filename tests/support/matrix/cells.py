"""One cell of the matrix of docs/matrix.md: a policy, a format, a position encoding, a topology; measured, or refused.

Tiny random models, computed with in float64, whose rows are ragged, in chunks, and in company.  ``structure``: max
|dlogit| between what the cache says and what it promises: the model without a cache whose layers see what the policy
lets them see and whose keys and values go through the format and back; or, of a policy that ranks or summarises, each
row's own solo run in other chunks.  ``loss``: max |dlogit| from the same judge without the format; of logits of a few
units.  What cannot be is asked for all the same, and ``refused`` has the words of the error.
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
from kvad.verify.cases import first_loss_length, sized_policy
from tests.support.driver import Stream, drive, worst
from tests.support.random_models import SOURCE_VOCAB, VOCAB, build, encoder_config, model_config, pair_config

EXACT = 1e-10
TOPOLOGIES = ("decoder", "encoder-decoder", "encoder")
ENCODINGS = ("none", "learned", "sinusoidal", "rope", "alibi", "t5")
LAYOUTS = tuple(itertools.product(("paged", "contiguous"), ("write", "read")))
LENGTHS, NEW, BLOCK = (22, 3, 13), 6, 4
LONGEST = max(LENGTHS) + NEW

Said = dict[str, Any]  # {"structure": ..., "loss": ...}, {"judge": "own", "structure": ...} or {"refused": "..."}


def key(*parts: str) -> str:
    return " | ".join(parts)


def every() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(table, cell) of all that there is to ask, from the registries."""
    for cell in itertools.product(TOPOLOGIES, ENCODINGS, POLICIES, FORMATS):
        yield "product", cell
    for policy, (layout, rotate) in itertools.product(POLICIES, LAYOUTS):
        for encoding in ("rope", "alibi"):
            yield "layouts", (policy, layout, rotate, encoding)
    for encoding, policy in itertools.product(ENCODINGS, POLICIES):
        yield "endless", (encoding, policy)


def ask(table: str, cell: tuple[str, ...]) -> Said:
    if table == "product":
        topology, encoding, policy, form = cell
        layout, rotate = LAYOUTS[sum(map(len, cell)) % len(LAYOUTS)]
        if policy in ("tiered", "offload", "quest") or form.endswith("-channel"):  # they want blocks
            layout = "paged"
        if policy == "quest":  # and keys as queries see them
            rotate = "write"
        return measure(topology, encoding, made(policy, form, layout=layout, rope_at=rotate))
    if table == "layouts":
        policy, layout, rotate, encoding = cell
        return measure("decoder", encoding, made(policy, "float64", layout=layout, rope_at=rotate))
    encoding, policy = cell
    return measure("decoder", encoding, made(policy, "float64", endless=True))


def made(policy: str, form: str, **fields: Any) -> dict[str, Any]:
    """The fields of a CacheConfig: it may be refused.  A format for keys alone has its sibling for the values; under
    ``full`` it is the hierarchy that such keys are kept in, in steps that fit these rows."""
    stored, said = (
        {"key_dtype": form, "value_dtype": form.removesuffix("-channel")},
        sized_policy(policy, LONGEST, BLOCK),
    )
    if policy == "full" and form.endswith("-channel"):
        said = f"tiered({BLOCK}, key_format={form}, value_format={stored['value_dtype']}, interval={2 * BLOCK})"
        stored = {"dtype": "float64"}
    return {
        **stored,
        "policy": said,
        "block_size": BLOCK,
        "max_num_seqs": len(LENGTHS),
        "max_seq_len": 48,
        "prefill_chunk_size": 5,
        "max_source_len": 24,
        **fields,
    }


def config_of(topology: str, encoding: str) -> ModelConfig:
    return {"decoder": model_config, "encoder-decoder": pair_config, "encoder": encoder_config}[topology](encoding)


def measure(topology: str, encoding: str, fields: dict[str, Any]) -> Said:
    config = config_of(topology, encoding)
    try:
        cache = CacheConfig(**fields)
        placed = build_groups(attention_specs(config), cache)
        check_policy(config, cache)
        if topology == "encoder":  # an engine has one, with no cache: what its rows would be is refused
            Engine(build(config), cache).add_request([1], None)  # type: ignore[arg-type]
    except KvadError as error:
        return {"refused": error.message + (f"; {error.hint}" if error.hint else "")}
    model, streams = build(config), rows(topology, endless=cache.endless)
    run = drive(model, cache, streams)
    if first_loss_length(placed) is not None:
        return {"judge": "own", "structure": alone(model, cache, streams, run.logits)}
    said = {"structure": worst(model, streams, run, cache, cache.token_formats)}
    if cache.token_formats != ("float64", "float64"):
        said["loss"] = worst(model, streams, run, cache)
    return said


def rows(topology: str, *, endless: bool) -> list[Stream]:
    draw = random.Random(7)
    new = 100 if endless else NEW  # past the limit of the tiny models
    streams = []
    for length in LENGTHS:
        prompt, after = ([draw.randrange(VOCAB) for _ in range(count)] for count in (length, new))
        source = [draw.randrange(SOURCE_VOCAB) for _ in range(20 - length // 2)]
        streams.append(Stream(prompt, [after], source=source if topology == "encoder-decoder" else None))
    return streams


def alone(model: Transformer, cache: CacheConfig, streams: list[Stream], company: Any) -> float:
    """max |dlogit| of the rows from the same rows alone, in chunks of another size."""
    largest = 0.0
    for number, stream in enumerate(streams):
        solo = drive(model, replace(cache, max_num_seqs=1, prefill_chunk_size=3), [replace(stream, arrives=0)])
        for at, logits in solo.logits[0, 0].items():
            gap = (logits - company[number, 0][at]).abs().max().nan_to_num(nan=torch.inf)
            largest = max(largest, float(gap))
    return largest
