"""With any cache, the logits are those of the uncached model (the reference).

Axes: layout, format, positions, norms, heads and scenario, of decoders and of encoder-decoders. A covering set (every
pair of values of every two axes) of each topology runs in ``make test``, the full products in ``make test-long``.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.cache.device import kv_cache, views
from kvad.cache.device.tensors import LayerTensor, gather_metadata
from kvad.cache.quantization import split_format_name
from tests.support.covering_array import Case, full, pairwise
from tests.support.driver import Run, Stream, drive, worst
from tests.support.random_models import (
    HEADS,
    NORMS,
    POSITIONS,
    SOURCE_VOCAB,
    STATES,
    VOCAB,
    build,
    model_config,
    pair_config,
)

SCENARIOS = ("solo", "ragged", "chunked", "mixed", "preempted", "prefix-hit", "forked", "long-and-short")
AXES = {
    "layout": ("paged", "contiguous"),
    "dtype": ("float64", "float32", "bfloat16", "float16", "fp8-e4m3", "fp8-e5m2", "int8", "int4", "int8/int4"),
    "position": POSITIONS,
    "norm": NORMS,
    "heads": HEADS,
    "scenario": SCENARIOS,
}
PAIR_AXES = AXES | {  # of encoder-decoders; "own": the encoder has another vocabulary and width
    "heads": ("mha", "gqa", "value-dim", "qk-norm", "softcap", "sinks", "window-mix"),
    "scenario": (*SCENARIOS, "source-hit"),
    "vocab": ("shared", "own"),
}
# max |dlogit| over logits of a few units. Stored numbers are rounded, computed ones are not.
TOLERANCE = {"float64": 1e-10, "float32": 2e-4, "bfloat16": 1.0, "float16": 0.15}
# A lossy format is compared with the reference whose keys and values are quantized token by token, and must be equal.
# Its difference from the unquantized reference is at most this.
LOSS = {"fp8-e4m3": 3.0, "fp8-e5m2": 6.0, "int8": 0.4, "int4": 6.0, "int8/int4": 4.0}
TOLERANCE |= dict.fromkeys(LOSS, 1e-10)


def random_tokens(length: int, draw: random.Random, vocab: int = VOCAB) -> list[int]:
    return [draw.randrange(vocab) for _ in range(length)]


def streams_of(scenario: str, draw: random.Random) -> list[Stream]:
    def text(length: int) -> list[int]:
        return random_tokens(length, draw)

    if scenario == "solo":
        return [Stream(text(11), [text(9)])]
    if scenario == "mixed":
        return [Stream(text(4 + 9 * i), [text(12)], arrives=3 * i) for i in range(4)]
    if scenario == "prefix-hit":
        shared = text(26)
        first = [Stream(shared + text(3), [text(5)]), Stream(shared[:17] + text(2), [text(6)], arrives=1000)]
        later = [Stream(list(shared), [text(4)], arrives=1000), Stream(shared + text(1), [text(3)], arrives=1000)]
        return first + later
    if scenario == "forked":
        return [Stream(text(14), [text(8), text(8), text(8)]), Stream(text(5), [text(4)])]
    if scenario == "long-and-short":
        return [Stream(text(70), [text(8)]), *(Stream(text(2 + i), [text(8)]) for i in range(3))]
    return [Stream(text(n), [text(10)]) for n in (3, 21, 9, 14)]


def with_sources(scenario: str, streams: list[Stream], draw: random.Random) -> list[Stream]:
    """Add encoder inputs of all lengths, or equal ones if the scenario is about shared blocks."""
    lengths = (57, 3, 6, 1) if scenario == "long-and-short" else (13, 4, 22, 13)
    shared = random_tokens(13, draw, SOURCE_VOCAB)
    for stream, length in zip(streams, lengths, strict=False):
        is_shared = scenario in ("prefix-hit", "source-hit")
        stream.source = list(shared) if is_shared else random_tokens(length, draw, SOURCE_VOCAB)
    if scenario == "source-hit":  # The second one differs in its last token, and begins its target as the first does.
        assert streams[1].source is not None
        streams[1].source[-1] = (shared[-1] + 1) % SOURCE_VOCAB
        streams[1].prompt = streams[0].prompt + streams[1].prompt
        for stream in streams[1:]:
            stream.arrives = 1000
    return streams


def cache_of(case: Case, **change: object) -> CacheConfig:
    scenario, is_paged, policy = case["scenario"], case["layout"] == "paged", case.get("policy", "full")
    is_tight = scenario == "preempted"
    keys, values = split_format_name(case.get("dtype", "float64"))
    keeps_all = case["heads"] != "window" and policy.startswith(("full", "0: full"))
    fields = {
        "layout": case["layout"],
        "block_size": 4,
        "max_num_seqs": 2 if is_tight and not is_paged else 4,
        "max_seq_len": 96,
        "prefill_chunk_size": 5 if scenario in ("chunked", "mixed") else 32,
        "num_blocks": 13 if is_tight and is_paged and keeps_all else None,
        "max_source_len": 60,
        "policy": policy,
        "rope_at": case.get("rotate", "write"),
    }
    formats = {"key_dtype": keys, "value_dtype": values} if "dtype" in case else {"dtype": "float64"}
    return CacheConfig(**(fields | formats | change))  # type: ignore[arg-type]


def happened(case: Case, run: Run) -> None:
    """Check that the scenario happened."""
    scenario, is_paged = case["scenario"], case["layout"] == "paged"
    if scenario == "mixed":
        assert run.mixed > 0
    if scenario in ("ragged", "forked", "long-and-short"):
        assert run.widest == 4
    if scenario == "preempted" and is_paged and case["heads"] != "window":
        assert run.preemptions > 0
    if scenario == "prefix-hit" and is_paged:
        assert run.hit_tokens >= 16 + 24 + 24
    if scenario == "forked":
        assert run.copies > 0
    if scenario == "long-and-short" and is_paged and case["heads"] != "window":
        assert run.num_sub_batches > 1


def check_encoded(case: Case, streams: list[Stream], run: Run) -> None:
    """Check how many encoder tokens were encoded."""
    scenario = case["scenario"]
    lengths = [len(stream.source or ()) for stream in streams]
    is_recomputed = case["position"] in ("rope-dynamic", "rope-longrope")  # beyond 20 tokens, also its encoder input
    if scenario == "forked":
        assert run.merged_cross_steps > 0
        assert run.encoded == sum(lengths) or is_recomputed, "samples share one encoder input"
    elif scenario in ("prefix-hit", "source-hit"):
        num_different = 1 if scenario == "prefix-hit" else 2
        is_shared = case["layout"] == "paged"
        assert not is_shared or run.encoded == num_different * lengths[0], "an equal input is encoded once"
    elif scenario != "preempted" and not is_recomputed:
        assert run.encoded == sum(lengths)
    if scenario == "source-hit":
        assert run.hit_tokens == 0, "a target's blocks depend on its encoder input"
    if scenario in ("ragged", "long-and-short"):
        assert run.encodings == 1 or is_recomputed, "inputs of all lengths are encoded together"


def measure(case: Case) -> float:
    draw = random.Random(repr(case))
    dtype = torch.float32 if case["dtype"] in ("float32", "bfloat16", "float16") else torch.float64
    kind = case["position"], case["norm"], case["heads"]
    config = pair_config(*kind, own=case["vocab"] == "own") if "vocab" in case else model_config(*kind)
    if case["heads"] in STATES and config.decoder is not None:
        config = replace(config, decoder=replace(config.decoder, num_layers=3))
    model, streams = build(config, dtype=dtype), streams_of(case["scenario"], draw)
    if "vocab" in case:
        streams = with_sources(case["scenario"], streams, draw)
    run = drive(model, cache_of(case), streams, poison=True)
    happened(case, run)
    if "vocab" in case:
        check_encoded(case, streams, run)
    if case["dtype"] not in LOSS:
        return worst(model, streams, run)
    if not 1e-6 < worst(model, streams, run) <= LOSS[case["dtype"]]:
        return math.inf
    return worst(model, streams, run, formats=split_format_name(case["dtype"]))


def case_id(case: Case) -> str:
    return "-".join(case.values())


@pytest.mark.parametrize("case", pairwise(AXES) + pairwise(PAIR_AXES), ids=case_id)
def test_a_cache_changes_nothing(case: Case) -> None:
    assert measure(case) <= TOLERANCE[case["dtype"]]


@pytest.mark.parametrize("heads", STATES)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("layout", AXES["layout"])
def test_a_cache_of_states_changes_nothing(layout: str, scenario: str, heads: str) -> None:
    assert measure(exact_case(layout=layout, scenario=scenario, heads=heads)) <= TOLERANCE["float64"]


@pytest.mark.parametrize("heads", STATES)
def test_states_are_never_quantized(heads: str) -> None:
    """An int8 cache of a model equals the reference whose keys and values alone are quantized."""
    assert measure(exact_case(dtype="int8", scenario="chunked", heads=heads)) <= TOLERANCE["int8"]


@pytest.mark.long(minutes=60)
@pytest.mark.parametrize(("axes", "heads"), [(axes, heads) for axes in (AXES, PAIR_AXES) for heads in axes["heads"]])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_cache_changes_nothing_in_the_full_product(position: str, axes: dict[str, Any], heads: str) -> None:
    cases = full(axes | {"position": (position,), "heads": (heads,)})
    assert cases
    wrong = {case_id(case): d for case in cases if not (d := measure(case)) <= TOLERANCE[case["dtype"]]}
    assert not wrong


# ---------------------------------------------------------------- faults are detected


def exact_case(**change: str) -> Case:
    case = {"layout": "paged", "dtype": "float64", "position": "rope", "norm": "pre", "heads": "gqa"}
    return case | {"scenario": "ragged"} | change


@pytest.mark.parametrize(("method", "scenario"), [("clear", "preempted"), ("_copy", "forked")])
def test_without_clearing_or_copying_blocks_logits_differ(
    monkeypatch: pytest.MonkeyPatch, method: str, scenario: str
) -> None:
    monkeypatch.setattr(kv_cache.KVCache, method, lambda *_: None)
    assert not measure(exact_case(scenario=scenario)) <= 1e-3


@pytest.mark.parametrize("scenario", ["ragged", "chunked", "preempted"])
def test_one_scale_for_all_tokens_of_a_step_is_detected(monkeypatch: pytest.MonkeyPatch, scenario: str) -> None:
    """Stored numbers would depend on chunks and on other sequences."""

    def encode_together(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scale = (x.abs().amax() / 127).float().expand(*x.shape[:-1], 1)
        return (x / scale).round().to(torch.int8), scale

    real = LayerTensor.__init__

    def init(self: LayerTensor, *args: Any, **options: Any) -> None:  # The reference has its own codec.
        real(self, *args, **options)
        self._encode = encode_together

    monkeypatch.setattr(LayerTensor, "__init__", init)
    assert not measure(exact_case(dtype="int8", scenario=scenario)) <= 1e-6


def test_a_copy_without_scales_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_without_scales(self: LayerTensor, copies: Any) -> None:
        for source, target, _ in copies:
            self.data[target] = self.data[source]

    monkeypatch.setattr(LayerTensor, "copy", copy_without_scales)
    assert not measure(exact_case(dtype="int8", scenario="forked")) <= 1e-3


@pytest.mark.parametrize("heads", ["window", "gqa"])
def test_a_lost_position_is_detected(monkeypatch: pytest.MonkeyPatch, heads: str) -> None:
    def without_position_2(*args: Any) -> torch.Tensor:
        positions = gather_metadata(*args)
        return torch.where(positions == 2, -1, positions)

    monkeypatch.setattr(views, "gather_metadata", without_position_2)
    assert not measure(exact_case(heads=heads)) <= 1e-3


def test_the_tolerance_of_float32_is_rounding() -> None:
    """The same case is exact in float64."""
    assert measure(exact_case(dtype="float64")) <= 1e-10
    assert 0 < measure(exact_case(dtype="float32")) <= TOLERANCE["float32"]


def test_the_reference_of_another_text_differs() -> None:
    model, streams = build(model_config()), [Stream([1, 2, 3], [[4, 5]])]
    run = drive(model, CacheConfig(dtype="float64", max_num_seqs=1, max_seq_len=16, block_size=4), streams)
    assert 0 <= worst(model, streams, run) <= 1e-10
    streams[0].continuations[0][0] = 6
    assert worst(model, streams, run) > 1e-3
