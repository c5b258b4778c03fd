"""Policies by position, in the oracle: under each, a cache is exact against the model with the same mask.

And rows without an end: what they say is what a row says whose kept tokens are numbered anew at every step, computed
here by hand, one query at a time, from keys that are kept unrotated.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache as cache_answers

import pytest
import torch
from torch import Tensor

from kvad.cache.config import CacheConfig
from kvad.config.model import attention_specs
from kvad.errors import ConfigError
from kvad.model.transformer import Transformer
from kvad.model_input import AttentionParams, ModelInput, SubBatch
from kvad.ops.attention import position_bias
from kvad.ops.rotary import RotaryCache
from tests.cache.test_cached_equals_uncached import HEADS, SCENARIOS, case_id, happened, streams_of, with_sources
from tests.support.covering_array import Case, full, pairwise
from tests.support.driver import Run, Stream, drive, worst
from tests.support.random_models import NORMS, POSITIONS, VOCAB, build, model_config, pair_config

KEPT = (
    "window(7)",
    "sinks(3, 9)",
    "block-window(12)",
    "sinks(5, 1)",
    "0: full; sinks(2, 6)",
    "window(16) + block-window(8)",
)
AXES = {
    "layout": ("paged", "contiguous"),
    "policy": KEPT,
    "rotate": ("write", "read"),
    "position": POSITIONS,
    "norm": NORMS,
    "heads": HEADS,
    "scenario": SCENARIOS,
}
EXACT = 1e-10


def cache_of(case: Case, **change: object) -> CacheConfig:
    scenario, paged = case["scenario"], case["layout"] == "paged"
    tight = scenario == "preempted"
    fields: dict[str, object] = {
        "layout": case["layout"],
        "dtype": "float64",
        "block_size": 4,
        "max_num_seqs": 2 if tight and not paged else 4,
        "max_seq_len": 96,
        "prefill_chunk_size": 5 if scenario in ("chunked", "mixed") else 32,
        "num_blocks": 13
        if tight and paged and case["policy"].startswith("0: full") and case["heads"] != "window"
        else None,
        "max_source_len": 60,
        "policy": case["policy"],
        "rope_at": case["rotate"],
    }
    return CacheConfig(**(fields | change))  # type: ignore[arg-type]


def asked(case: Case) -> tuple[Transformer, list[Stream]]:
    """The model of a case, and what it is asked."""
    draw = random.Random(repr(case))
    kind = case["position"], case["norm"], case["heads"]
    crossed = case.get("topology") == "encoder-decoder"
    model = build(pair_config(*kind) if crossed else model_config(*kind))
    streams = streams_of(case["scenario"], draw)
    if crossed:
        streams = with_sources(case["scenario"], streams, draw)
    return model, streams


def measure(case: Case) -> float:
    model, streams = asked(case)
    cache = cache_of(case)
    run = drive(model, cache, streams, poison=True)
    if case["scenario"] not in ("preempted", "prefix-hit", "forked"):
        happened(case, run)
    return worst(model, streams, run, cache)


@pytest.mark.parametrize("case", pairwise(AXES), ids=case_id)
def test_a_policy_is_a_mask(case: Case) -> None:
    assert measure(case) <= EXACT


@pytest.mark.parametrize("case", pairwise(AXES | {"topology": ("encoder-decoder",)}, seed=1), ids=case_id)
def test_a_policy_is_a_mask_of_the_decoder(case: Case) -> None:
    assert measure(case) <= EXACT


@pytest.mark.long(minutes=60)
@pytest.mark.parametrize("policy", KEPT)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_policy_is_a_mask_in_the_full_product(position: str, policy: str) -> None:
    axes = AXES | {"position": (position,), "policy": (policy,)}
    wrong = {case_id(case): d for case in full(axes) if not (d := measure(case)) <= EXACT}
    assert not wrong


def plain(**change: str) -> Case:
    case = {"layout": "paged", "policy": "sinks(3, 9)", "rotate": "write", "position": "rope", "norm": "pre"}
    return case | {"heads": "gqa", "scenario": "ragged"} | change


def test_the_mask_is_not_the_full_one() -> None:
    """What would hold for any policy would show nothing."""
    case = plain()
    model, streams = build(model_config("rope", "pre", "gqa")), streams_of("ragged", random.Random(0))
    assert worst(model, streams, drive(model, cache_of(case), streams)) > 1e-3


def test_blocks_go_back_as_they_are_passed() -> None:
    """A row of 60 tokens under sinks(3, 9) with chunks of 5 holds a block of sinks and the window's."""
    model = build(model_config("rope", "pre", "gqa"))
    cache = cache_of(plain(), max_num_seqs=1, prefill_chunk_size=5)
    run, most = drive_watching(model, cache, [Stream(text(30), [text(30)])])
    assert run.logits and most <= 1 + -(-(9 + 5 - 1) // 4) + 1
    assert most <= sum(group.num_usable_blocks for group in made(model, cache))


def made(model: Transformer, cache: CacheConfig) -> tuple:
    from kvad.cache.groups import build_groups

    return build_groups(attention_specs(model.config), cache)


def drive_watching(model: Transformer, cache: CacheConfig, streams: list[Stream]) -> tuple[Run, int]:
    """The run, and the most blocks that were live at once."""
    from kvad.engine.engine import Engine

    most = 0
    settle = Engine.__init__

    def watched(self: Engine, *args: object, **named: object) -> None:
        settle(self, *args, **named)  # type: ignore[arg-type]
        reserve = self.kv_cache_manager.allocate_slots

        def counted(spans: object) -> object:
            nonlocal most
            placed = reserve(spans)  # type: ignore[arg-type]
            most = max(most, *self.kv_cache_manager.stats().used)
            return placed

        self.kv_cache_manager.allocate_slots = counted  # type: ignore[method-assign, assignment]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__init__", watched)
        return drive(model, cache, streams), most


def text(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


# ---------------------------------------------------------------- rows without an end


class Renumbered:
    """The memory of Xiao et al. 2023: keys kept unrotated, numbered by their place among those that are kept.

    One token per step; ``log`` says how many a query saw.
    """

    def __init__(self, layers: int, sinks: int, window: int) -> None:
        self.sinks, self.window = sinks, window
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(layers)]
        self.seen: list[int] = []

    def open(self, step: ModelInput) -> list[_RenumberedView]:
        assert len(step.token_ids) == 1
        return [_RenumberedView(self, layer) for layer in range(len(self.keys))]


class _RenumberedView:
    def __init__(self, memory: Renumbered, layer: int) -> None:
        self.memory, self.layer = memory, layer

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: AttentionParams) -> Tensor:
        memory, keys, values = self.memory, self.memory.keys[self.layer], self.memory.values[self.layer]
        assert k is not None and v is not None
        keys.append(k)
        values.append(v)
        last = len(keys) - 1
        kept = [i for i in range(len(keys)) if i < memory.sinks or last - i < memory.window]
        memory.seen.append(len(kept))
        every, many = torch.cat([keys[i] for i in kept]), torch.cat([values[i] for i in kept])  # [n, K, D]
        places = torch.arange(len(kept))
        if score.rotary is not None:
            every = RotaryCache(places, exact=True).rotate(every, score.rotary)
            q = RotaryCache(places[-1:], exact=True).rotate(q, score.rotary)
        groups = q.shape[1] // every.shape[1]
        every, many = every.repeat_interleave(groups, 1), many.repeat_interleave(groups, 1)
        logits = torch.einsum("qhd,nhd->hqn", q, every) * score.scale
        if score.bias is not None:
            logits = logits + position_bias(score.bias, places[None, -1:], places[None])[0]
        return torch.einsum("hqn,nhd->qhd", logits.softmax(-1), many)


@torch.inference_mode()
def by_hand(model: Transformer, tokens: Sequence[int], sinks: int, window: int) -> Tensor:
    """[T, V]."""
    assert model.config.decoder is not None
    memory = Renumbered(model.config.decoder.num_layers, sinks, window)
    rows = []
    for at, token in enumerate(tokens):
        step = ModelInput(torch.tensor([token]), torch.tensor([at]), (SubBatch(1, 1, 1),), torch.tensor([0]))
        rows.append(model.logits(model(step, memory), step.logit_indices))  # type: ignore[arg-type]
    assert max(memory.seen) == sinks + window
    return torch.cat(rows)


ENDLESS = {
    "position": ("rope", "rope-partial", "alibi", "t5", "none"),
    "chunk": ("1", "7", "64"),
    "rotate": ("write", "read"),
    "layout": ("paged", "contiguous"),
}
FAR = [Stream(text(100), [text(70, 1)]), Stream(text(31, 2), [text(90, 3)])]


@cache_answers
def far_by_hand(position: str) -> tuple[Tensor, ...]:
    model = build(model_config(position, "pre", "gqa"))
    return tuple(by_hand(model, stream.tokens(), 3, 20) for stream in FAR)


@pytest.mark.parametrize("case", pairwise(ENDLESS), ids=case_id)
def test_a_row_without_an_end_counts_what_it_keeps(case: Case) -> None:
    """Twice the model's limit, in chunks of all sizes: the same logits as numbering anew at each step."""
    right = far_by_hand(case["position"])
    model = build(model_config(case["position"], "pre", "gqa"))
    cache = CacheConfig(
        layout=case["layout"],  # type: ignore[arg-type]
        dtype="float64",
        block_size=4,
        max_num_seqs=2,
        max_seq_len=96,
        prefill_chunk_size=int(case["chunk"]),
        policy="sinks(3, 20)",
        endless=True,
        rope_at=case["rotate"],  # type: ignore[arg-type]
    )
    run = drive(model, cache, FAR)
    assert worst(model, FAR, run, cache) <= EXACT
    for number, each in enumerate(right):
        for at, logits in run.logits[number, 0].items():
            assert (logits - each[at]).abs().max() <= EXACT, at


def test_kept_positions_would_say_something_else() -> None:
    """Without numbering anew, a sink's distance grows: another answer (so the test above can fail)."""
    model, tokens = build(model_config("alibi", "pre", "gqa")), text(80)
    cache = CacheConfig(dtype="float64", block_size=4, max_num_seqs=1, max_seq_len=96, policy="sinks(3, 20)")
    run = drive(model, cache, [Stream(tokens[:60], [tokens[60:]])])
    right = by_hand(model, tokens, 3, 20)
    assert max((logits - right[at]).abs().max() for at, logits in run.logits[0, 0].items()) > 1e-3


@pytest.mark.parametrize(
    ("position", "policy", "says"),
    [
        ("learned", "sinks(3, 20)", "learned positions are part of every key"),
        ("sinusoidal", "window(20)", "sinusoidal positions are part of every key"),
        ("rope", "full", "layer 0 keeps all tokens"),
        ("rope", "1: full; window(8)", "layer 1 keeps all tokens"),
        ("rope", "sinks(4, 100)", "must have at most 96 tokens, got 104"),
        ("rope", "block-window(3)", "size must be at least the block size 4"),
        (
            "rope-dynamic",
            "tiered(8, quantized=0, interval=8, summaries=8, ratio=4)",
            "dynamic scaling gives each sequence other frequencies",
        ),
        ("rope", "tova(8)", "layer 0 keeps all tokens"),
    ],
)
def test_an_end_that_cannot_be_lifted_is_refused_by_name(position: str, policy: str, says: str) -> None:
    model = build(model_config(position, "pre", "gqa"))
    with pytest.raises(ConfigError, match=says):
        drive(model, CacheConfig(block_size=4, max_num_seqs=1, max_seq_len=96, policy=policy, endless=True), [])


# ---------------------------------------------------------------- policies that rank, and levels


RANKED = (
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
LOSSY = {
    "layout": ("paged", "contiguous"),
    "policy": RANKED,
    "rotate": ("write", "read"),
    "position": POSITIONS,
    "norm": NORMS,
    "heads": HEADS,
    "scenario": tuple(name for name in SCENARIOS if name != "prefix-hit"),
    "topology": ("decoder", "encoder-decoder"),
}


def possible(case: Case) -> Case:
    """The nearest case that is not refused by name."""
    policy, change = case["policy"], dict[str, str]()
    if "tiered" in policy or "quest" in policy:
        change["layout"] = "paged"
    if "quest" in policy:
        change["rotate"] = "write"
    if "summaries" in policy and case["position"] in ("rope-dynamic", "rope-longrope"):
        change["rotate"] = "read"
    return case | change


LOSSY_CASES = {case_id(case): case for case in map(possible, pairwise(LOSSY))}


def company(case: Case) -> float:
    """max |dlogit| between a stream in company and the same stream alone, in chunks of another size."""
    model, streams = asked(case)
    run = drive(model, cache_of(case), streams, poison=True)
    largest = 0.0
    for number, stream in enumerate(streams):
        for sample, tokens in enumerate(stream.continuations[:2]):
            alone = Stream(stream.prompt, [tokens], source=stream.source)
            solo = drive(
                model, cache_of(case, max_num_seqs=1, prefill_chunk_size=7, num_blocks=None), [alone], poison=False
            )
            largest = max(largest, apart(solo, run, number, sample))
    return largest


def apart(solo: Run, run: Run, number: int, sample: int) -> float:
    """max |dlogit| of a stream alone and in company; infinite where one is not a number."""
    pairs = [(logits, run.logits[number, sample][at]) for at, logits in solo.logits[0, 0].items()]
    return max((a - b).abs().nan_to_num(nan=float("inf")).max().item() for a, b in pairs)


@pytest.mark.parametrize("case", LOSSY_CASES.values(), ids=LOSSY_CASES)
def test_a_stream_under_a_lossy_policy_is_its_own(case: Case) -> None:
    assert company(case) <= EXACT


@pytest.mark.long(minutes=60)
@pytest.mark.parametrize("policy", RANKED)
@pytest.mark.parametrize("position", POSITIONS)
def test_a_stream_under_a_lossy_policy_is_its_own_in_the_full_product(position: str, policy: str) -> None:
    cases = {
        case_id(case): case for case in map(possible, full(LOSSY | {"position": (position,), "policy": (policy,)}))
    }
    wrong = {name: d for name, case in cases.items() if not (d := company(case)) <= EXACT}
    assert not wrong


PARKED = ("0: full; heavy-hitters(10, interval=4)", "0: full; tiered(8, quantized=8, interval=4, summaries=4, ratio=2)")


@pytest.mark.parametrize("policy", PARKED)
def test_a_preempted_row_is_parked_and_woken(policy: str) -> None:
    """Not computed again: what it kept is a matter of what it saw."""
    model = build(model_config("rope", "pre", "gqa"))
    streams = [Stream(text(30), [text(20, 1)]), Stream(text(3, 2), [text(40, 3)]), Stream(text(40, 4), [text(20, 5)])]
    cache = cache_of(plain(policy=policy), max_num_seqs=3, num_blocks=23, prefill_chunk_size=16)
    run = drive(model, cache, streams)
    assert run.preemptions > 0
    for number, stream in enumerate(streams):
        alone = drive(model, cache_of(plain(policy=policy), max_num_seqs=1), [stream])
        assert apart(alone, run, number, 0) <= EXACT


@pytest.mark.parametrize("policy", PARKED)
def test_without_parking_the_test_above_objects(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setattr("kvad.cache.device.host_copy.HostCopier.copy_in", lambda *_: None)
    with pytest.raises(AssertionError):
        test_a_preempted_row_is_parked_and_woken(policy)


@pytest.mark.parametrize("seed", [0, 2])
def test_a_late_sample_chooses_blocks_as_if_alone(seed: int) -> None:
    """It is forked when its sibling has gone on in the block that both share: those tokens are not its own."""
    model = build(model_config("rope", "pre", "gqa"), seed=seed)
    samples = [text(30, seed + 10), text(30, seed + 20)]
    streams = [Stream(text(27 + seed, seed), samples), Stream(text(24, 9), [text(3, 8)])]
    cache = CacheConfig(dtype="float64", block_size=8, max_num_seqs=2, max_seq_len=96, policy="quest(16)")
    run = drive(model, cache, streams)
    for sample, tokens in enumerate(samples):
        assert apart(drive(model, cache, [Stream(streams[0].prompt, [tokens])]), run, 0, sample) <= EXACT


def test_a_late_sample_without_emptied_blocks_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvad.cache.manager.kv_cache_manager import KVCacheManager

    made = KVCacheManager.__init__

    def forgetful(self: KVCacheManager, *args: object, **named: object) -> None:
        made(self, *args, **named)  # type: ignore[arg-type]
        for rules in self.block_mappings:
            rules.has_block_bounds = False

    monkeypatch.setattr(KVCacheManager, "__init__", forgetful)
    with pytest.raises(AssertionError):
        test_a_late_sample_chooses_blocks_as_if_alone(0)


@pytest.mark.parametrize("position", ["rope-dynamic", "rope-longrope"])
def test_summaries_of_keys_whose_turns_depend_on_a_limit_are_refused_by_name(position: str) -> None:
    model, policy = build(model_config(position, "pre", "gqa")), "tiered(8, quantized=0, interval=8, summaries=8)"
    with pytest.raises(ConfigError, match=r"gives each sequence other frequencies.*cache\.rope_at='read'"):
        drive(model, CacheConfig(block_size=8, max_num_seqs=1, max_seq_len=96, policy=policy), [])


@pytest.mark.parametrize("position", ["rope-dynamic", "rope-longrope"])
def test_keys_of_a_row_s_own_frequencies_are_summarised_unrotated_or_not_at_all(position: str) -> None:
    """Found by ``kvad verify --policy``: they could not be turned back, and a step died of it."""
    case = plain(policy=RANKED[9], position=position)
    with pytest.raises(ConfigError, match="rotated back to be summarized"):
        company(case)
    assert company(case | {"rotate": "read"}) <= EXACT


def test_packing_in_full_precision_changes_nothing() -> None:
    """Levels that lose nothing are exact, for every encoding, whichever the way of rotating."""
    for position in POSITIONS:
        for rotate in ("write", "read"):
            policy = "tiered(8, interval=8, key_format=float64, value_format=float64, num_sinks=4)"
            case = plain(policy=policy, position=position, rotate=rotate)
            model, streams = build(model_config(position, "pre", "gqa")), streams_of("ragged", random.Random(1))
            assert worst(model, streams, drive(model, cache_of(case), streams)) <= EXACT, (position, rotate)


def test_a_summary_of_equal_tokens_is_exact_without_positions() -> None:
    """ratio equal keys and values, log(ratio) more: the same attention, to the bit of float64's rounding."""
    model = build(model_config("none", "pre", "gqa", layers=1))
    policy = "tiered(8, quantized=0, interval=8, summaries=32, ratio=4)"
    streams = [Stream([5] * 24 + [7] * 16, [[9] * 12])]
    run = drive(model, cache_of(plain(policy=policy, position="none"), max_num_seqs=1), streams)
    assert worst(model, streams, run) <= EXACT


def test_without_the_weight_of_a_summary_the_test_above_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvad.cache.device.demotion.math.log", lambda _: 0.0)
    with pytest.raises(AssertionError):
        test_a_summary_of_equal_tokens_is_exact_without_positions()
