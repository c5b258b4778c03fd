"""Models under policies: exact against the same mask, equal to renumbered tokens, independent of other sequences."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache as cached

import pytest
import torch
from torch import Tensor

from kvad.cache.config import CacheConfig
from kvad.cache.groups import build_groups
from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.cache.manager.sequence_blocks import BlockMapping
from kvad.config.model import attention_specs
from kvad.errors import ConfigError
from kvad.model.transformer import Transformer
from kvad.model_input import AttentionParams, ModelInput, SubBatch
from kvad.ops.position_bias import position_bias
from kvad.ops.rotary import RotaryCache
from tests.cache.test_cached_equals_uncached import (
    HEADS,
    SCENARIOS,
    cache_of,
    case_id,
    happened,
    random_tokens,
    streams_of,
    with_sources,
)
from tests.support.covering_array import Case, full, pairwise
from tests.support.driver import Run, Stream, drive, worst
from tests.support.random_models import NORMS, POSITIONS, build, model_config, pair_config

EXACT = 1e-10
MASKS = (
    "window(7)",
    "sinks(3, 9)",
    "block-window(12)",
    "sinks(5, 1)",
    "0: full; sinks(2, 6)",
    "window(16) + block-window(8)",
)
AXES = {
    "layout": ("paged", "contiguous"),
    "policy": MASKS,
    "rotate": ("write", "read"),
    "position": POSITIONS,
    "norm": NORMS,
    "heads": HEADS,
    "scenario": SCENARIOS,
    "topology": ("decoder", "encoder-decoder"),
}


def text(length: int, seed: int = 0) -> list[int]:
    return random_tokens(length, random.Random(seed))


def inputs_of(case: Case) -> tuple[Transformer, list[Stream]]:
    draw = random.Random(repr(case))
    kind = case["position"], case["norm"], case["heads"]
    streams = streams_of(case["scenario"], draw)
    if case["topology"] == "decoder":
        return build(model_config(*kind)), streams
    return build(pair_config(*kind)), with_sources(case["scenario"], streams, draw)


def measure(case: Case) -> float:
    (model, streams), cache = inputs_of(case), cache_of(case)
    run = drive(model, cache, streams, poison=True)
    if case["scenario"] not in ("preempted", "prefix-hit", "forked"):
        happened(case, run)
    return worst(model, streams, run, cache)


DECODER, ENCODER_DECODER = (AXES | {"topology": (name,)} for name in AXES["topology"])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", pairwise(DECODER) + pairwise(ENCODER_DECODER, seed=1), ids=case_id)
def test_a_policy_is_a_mask(case: Case) -> None:
    assert measure(case) <= EXACT


@pytest.mark.long(minutes=60)
@pytest.mark.parametrize("policy", MASKS)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_policy_is_a_mask_in_the_full_product(position: str, policy: str) -> None:
    axes = DECODER | {"position": (position,), "policy": (policy,)}
    wrong = {case_id(case): d for case in full(axes) if not (d := measure(case)) <= EXACT}
    assert not wrong


def plain(**change: str) -> Case:
    case = {"layout": "paged", "policy": "sinks(3, 9)", "rotate": "write", "position": "rope", "norm": "pre"}
    return case | {"heads": "gqa", "scenario": "ragged", "topology": "decoder"} | change


def plain_model(position: str = "rope", **options: int) -> Transformer:
    return build(model_config(position, "pre", "gqa"), **options)


def test_the_mask_of_a_policy_is_not_the_full_one() -> None:
    case, streams = plain(), streams_of("ragged", random.Random(0))
    assert worst(plain_model(), streams, drive(plain_model(), cache_of(case), streams)) > 1e-3


def test_blocks_out_of_the_window_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence of 60 tokens under sinks(3, 9) with chunks of 5 holds a block of sinks and the window's."""
    model, cache = plain_model(), cache_of(plain(), max_num_seqs=1, prefill_chunk_size=5)
    used, real = [0], KVCacheManager.allocate_slots

    def allocate_slots(self: KVCacheManager, spans: object) -> object:
        allocation = real(self, spans)  # type: ignore[arg-type]
        used.append(max(self.stats().used))
        return allocation

    monkeypatch.setattr(KVCacheManager, "allocate_slots", allocate_slots)
    assert drive(model, cache, [Stream(text(30), [text(30)])]).logits
    usable = sum(group.num_usable_blocks for group in build_groups(attention_specs(model.config), cache))
    assert 0 < max(used) <= min(usable, 1 + -(-(9 + 5 - 1) // 4) + 1)


# ---------------------------------------------------------------- endless sequences


class RenumberedCache:
    """The cache of Xiao et al. 2023: unrotated keys, numbered by their index among the retained ones.

    One token per step; ``num_seen`` has the number of tokens that each query saw.
    """

    def __init__(self, layers: int, sinks: int, window: int) -> None:
        self.sinks, self.window, self.num_seen = sinks, window, list[int]()
        self.tokens: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(layers)]  # by layer: keys and values

    def open(self, step: ModelInput) -> list[RenumberedView]:
        assert len(step.token_ids) == 1
        return [RenumberedView(self, layer) for layer in range(len(self.tokens))]


class RenumberedView:
    def __init__(self, cache: RenumberedCache, layer: int) -> None:
        self.cache, self.layer = cache, layer

    def attend(self, q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
        tokens = self.cache.tokens[self.layer]
        tokens.append((k, v))
        first = max(self.cache.sinks, len(tokens) - self.cache.window)
        retained = tokens[: self.cache.sinks] + tokens[first:]
        self.cache.num_seen.append(len(retained))
        keys, values = map(torch.cat, zip(*retained, strict=True))  # [n, K, D]
        index = torch.arange(len(retained))
        if params.rotary is not None:
            keys = RotaryCache(index, exact=True).rotate(keys, params.rotary)
            q = RotaryCache(index[-1:], exact=True).rotate(q, params.rotary)
        groups = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        logits = torch.einsum("qhd,nhd->hqn", q, keys) * params.scale
        if params.bias is not None:
            logits = logits + position_bias(params.bias, index[None, -1:], index[None])[0]
        return torch.einsum("hqn,nhd->qhd", logits.softmax(-1), values)


@torch.inference_mode()
def renumbered_logits(model: Transformer, tokens: Sequence[int], sinks: int, window: int) -> Tensor:
    """Return logits [T, V]."""
    assert model.config.decoder is not None
    cache, logits = RenumberedCache(model.config.decoder.num_layers, sinks, window), []
    for position, token in enumerate(tokens):
        step = ModelInput(torch.tensor([token]), torch.tensor([position]), (SubBatch(1, 1, 1),), torch.tensor([0]))
        logits.append(model.logits(model(step, cache), step.logit_indices))  # type: ignore[arg-type]
    assert max(cache.num_seen) == sinks + window
    return torch.cat(logits)


ENDLESS = {
    "position": ("rope", "rope-partial", "rope-yarn", "alibi", "t5", "none"),
    "chunk": ("1", "7", "64"),
    "rotate": ("write", "read"),
    "layout": ("paged", "contiguous"),
}
LONG_STREAMS = [Stream(text(100), [text(70, 1)]), Stream(text(31, 2), [text(90, 3)])]


@cached
def long_renumbered_logits(position: str) -> tuple[Tensor, ...]:
    return tuple(renumbered_logits(plain_model(position), stream.tokens(), 3, 20) for stream in LONG_STREAMS)


@pytest.mark.parametrize("case", pairwise(ENDLESS), ids=case_id)
def test_an_endless_sequence_renumbers_its_tokens(case: Case) -> None:
    """Twice the model's limit, in chunks of all sizes: the same logits as renumbering at each step."""
    model = plain_model(case["position"])
    settings = {"max_num_seqs": 2, "prefill_chunk_size": int(case["chunk"]), "endless": True}
    cache = cache_of(plain(policy="sinks(3, 20)", rotate=case["rotate"], layout=case["layout"]), **settings)
    run = drive(model, cache, LONG_STREAMS)
    assert worst(model, LONG_STREAMS, run, cache) <= EXACT
    for number, expected in enumerate(long_renumbered_logits(case["position"])):
        for position, logits in run.logits[number, 0].items():
            assert (logits - expected[position]).abs().max() <= EXACT, position


def test_positions_that_are_not_renumbered_give_other_logits() -> None:
    """Otherwise the distance of a sink grows."""
    model, tokens = plain_model("alibi"), text(80)
    cache = cache_of(plain(policy="sinks(3, 20)"), max_num_seqs=1)
    run = drive(model, cache, [Stream(tokens[:60], [tokens[60:]])])
    expected = renumbered_logits(model, tokens, 3, 20)
    assert max((logits - expected[at]).abs().max() for at, logits in run.logits[0, 0].items()) > 1e-3


SUMMARIES = "tiered(8, quantized=0, interval=8, summaries=8, ratio=4)"
FREQUENCIES = r"scaling gives each sequence other frequencies.*cache\.rope_at='read'"


@pytest.mark.parametrize(
    ("position", "policy", "endless", "message"),
    [
        ("learned", "sinks(3, 20)", True, "learned positions are part of every key"),
        ("sinusoidal", "window(20)", True, "sinusoidal positions are part of every key"),
        ("rope", "full", True, "layer 0 keeps all tokens"),
        ("rope", "1: full; window(8)", True, "layer 1 keeps all tokens"),
        ("rope", "sinks(4, 100)", True, "must have at most 96 tokens, got 104"),
        ("rope", "block-window(3)", True, "size must be at least the block size 4"),
        ("rope", "tova(8)", True, "layer 0 keeps all tokens"),
        ("rope-dynamic", SUMMARIES, True, "dynamic scaling gives each sequence other frequencies"),
        ("rope-dynamic", SUMMARIES, False, FREQUENCIES),
        ("rope-longrope", SUMMARIES, False, FREQUENCIES),
        ("rope", "9: window(8)", False, r"'9: window\(8\)' applies to no layer"),
        ("rope", "1-0: window(8); 0: full", False, r"'1-0: window\(8\)' applies to no layer"),
        ("rope", "0-: full; 0: window(8)", False, r"'0: window\(8\)' applies to no layer"),
    ],
)
def test_unsupported_models_are_refused(position: str, policy: str, endless: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drive(plain_model(position), cache_of(plain(policy=policy), endless=endless), [])


# ---------------------------------------------------------------- eviction, levels and sparse reads


LOSSY = (
    "heavy-hitters(12, interval=8)",
    "heavy-hitters(12, interval=4, recent=2, num_sinks=2)",
    "snapkv(12, interval=8, window=4, kernel=3)",
    "tova(12, interval=8)",
    "key-norm(12, interval=8, recent=3)",
    "random(12, interval=4)",
    "0: full; tova(10, interval=4)",
    "tiered(8, interval=8, key_format=int8, value_format=int4)",
    "tiered(8, interval=8, key_format=int4-channel, value_format=int4)",
    "tiered(8, quantized=16, interval=8, summaries=8, ratio=4)",
    "tiered(8, quantized=0, interval=8, summaries=8, ratio=2, num_sinks=4)",
    "0: full; tiered(8, quantized=8, interval=4, summaries=4, ratio=2)",
    "quest(12)",
)
LOSSY_AXES = AXES | {"policy": LOSSY, "scenario": tuple(name for name in SCENARIOS if name != "prefix-hit")}


def supported(case: Case) -> Case:
    """Return the nearest supported case."""
    policy, change = case["policy"], dict[str, str]()
    if "tiered" in policy or "quest" in policy:
        change["layout"] = "paged"
    if "quest" in policy:
        change["rotate"] = "write"
    if "summaries" in policy and case["position"] in ("rope-dynamic", "rope-longrope"):
        change["rotate"] = "read"
    return case | change


LOSSY_CASES = {case_id(case): case for case in map(supported, pairwise(LOSSY_AXES))}


def difference_alone(case: Case) -> float:
    """Return max |dlogit| between each stream in a batch and the same stream alone, in chunks of another size."""
    model, streams = inputs_of(case)
    run, largest = drive(model, cache_of(case), streams, poison=True), 0.0
    cache = cache_of(case, max_num_seqs=1, prefill_chunk_size=7, num_blocks=None)
    for number, stream in enumerate(streams):
        for sample, tokens in enumerate(stream.continuations[:2]):
            alone = drive(model, cache, [Stream(stream.prompt, [tokens], source=stream.source)], poison=False)
            largest = max(largest, apart(alone, run, number, sample))
    return largest


def apart(alone: Run, run: Run, number: int, sample: int) -> float:
    """Return max |dlogit| of a stream alone and in a batch; infinite if one is not a number."""
    pairs = [(logits, run.logits[number, sample][at]) for at, logits in alone.logits[0, 0].items()]
    return max((a - b).abs().nan_to_num(nan=float("inf")).max().item() for a, b in pairs)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", LOSSY_CASES.values(), ids=LOSSY_CASES)
def test_a_lossy_policy_is_independent_of_other_sequences(case: Case) -> None:
    assert difference_alone(case) <= EXACT


@pytest.mark.long(minutes=60)
@pytest.mark.parametrize("policy", LOSSY)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_lossy_policy_is_independent_in_the_full_product(position: str, policy: str) -> None:
    cases = map(supported, full(LOSSY_AXES | {"position": (position,), "policy": (policy,)}))
    wrong = {
        name: d for name, case in {case_id(c): c for c in cases}.items() if not (d := difference_alone(case)) <= EXACT
    }
    assert not wrong


SWAPPED = (
    "0: full; heavy-hitters(10, interval=4)",
    "0: full; tiered(8, quantized=8, interval=4, summaries=4, ratio=2)",
)


def difference_swapped(policy: str) -> float:
    model = plain_model()
    streams = [Stream(text(30), [text(20, 1)]), Stream(text(3, 2), [text(40, 3)]), Stream(text(40, 4), [text(20, 5)])]
    run = drive(model, cache_of(plain(policy=policy), max_num_seqs=3, num_blocks=23, prefill_chunk_size=16), streams)
    assert run.preemptions > 0
    alone = [drive(model, cache_of(plain(policy=policy), max_num_seqs=1), [stream]) for stream in streams]
    return max(apart(each, run, number, 0) for number, each in enumerate(alone))


@pytest.mark.parametrize("policy", SWAPPED)
def test_a_preempted_sequence_under_a_lossy_policy_is_swapped(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Recomputed, it would retain other tokens."""
    assert difference_swapped(policy) <= EXACT
    monkeypatch.setattr("kvad.cache.device.host_copy.HostCopier.copy_in", lambda *_: None)
    assert not difference_swapped(policy) <= EXACT


def difference_of_late_samples(seed: int) -> float:
    """A sample is forked when the other one has written more tokens into the block that both share."""
    model, samples = plain_model(seed=seed), [text(30, seed + 10), text(30, seed + 20)]
    streams = [Stream(text(27 + seed, seed), samples), Stream(text(24, 9), [text(3, 8)])]
    cache = CacheConfig(dtype="float64", block_size=8, max_num_seqs=2, max_seq_len=96, policy="quest(16)")
    run = drive(model, cache, streams)
    alone = [drive(model, cache, [Stream(streams[0].prompt, [tokens])]) for tokens in samples]
    return max(apart(each, run, 0, sample) for sample, each in enumerate(alone))


@pytest.mark.parametrize("seed", [0, 2])
def test_a_late_sample_selects_blocks_as_if_alone(seed: int) -> None:
    assert difference_of_late_samples(seed) <= EXACT


def test_without_cleared_bounds_a_late_sample_selects_other_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    real = BlockMapping.__init__

    def without_bounds(self: BlockMapping, *args: object) -> None:
        real(self, *args)  # type: ignore[arg-type]
        self.has_block_bounds = False

    monkeypatch.setattr(BlockMapping, "__init__", without_bounds)
    assert not difference_of_late_samples(0) <= EXACT


@pytest.mark.parametrize("position", ["rope-dynamic", "rope-longrope"])
def test_keys_with_frequencies_of_their_sequence_are_summarized_unrotated(position: str) -> None:
    assert difference_alone(plain(policy=LOSSY[9], position=position, rotate="read")) <= EXACT


@pytest.mark.parametrize("position", POSITIONS)
def test_demotion_in_full_precision_changes_nothing(position: str) -> None:
    model, streams = plain_model(position), streams_of("ragged", random.Random(1))
    policy = "tiered(8, interval=8, key_format=float64, value_format=float64, num_sinks=4)"
    for rotate in ("write", "read"):
        run = drive(model, cache_of(plain(policy=policy, rotate=rotate)), streams)
        assert worst(model, streams, run) <= EXACT, rotate


def test_a_summary_of_equal_tokens_is_exact_without_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ratio`` equal keys and values with log(ratio) added to the logit: the same attention."""
    model, streams = build(model_config("none", "pre", "gqa", layers=1)), [Stream([5] * 24 + [7] * 16, [[9] * 12])]
    cache = cache_of(plain(policy="tiered(8, quantized=0, interval=8, summaries=32, ratio=4)"), max_num_seqs=1)
    assert worst(model, streams, drive(model, cache, streams)) <= EXACT
    monkeypatch.setattr("kvad.cache.device.eviction.math.log", lambda _: 0.0)
    assert not worst(model, streams, drive(model, cache, streams)) <= EXACT
