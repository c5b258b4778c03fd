"""Caches with a summarizer: sequences equal their solo runs, and the logits are those of training."""

import random

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.groups import group_bytes
from kvad.config.model import attention_specs
from kvad.engine import Engine, EngineConfig
from kvad.errors import ConfigError
from kvad.model.no_cache import NoCache
from kvad.model.summarizer import Summarizer
from kvad.train.config.run import SummarizerConfig
from kvad.train.objectives.summary_distillation import _Recorder, _Rows
from tests.model.test_summarizer import randomized
from tests.support.driver import Stream, drive, fresh_step
from tests.support.random_models import POSITIONS, VOCAB, build, model_config

POLICY = "tiered(8, quantized=0, interval=8, summaries=32, ratio=4)"
EXACT = 1e-10


def cache_of(**change):
    fields = {
        "dtype": "float64",
        "block_size": 4,
        "max_num_seqs": 4,
        "max_seq_len": 96,
        "prefill_chunk_size": 16,
        "policy": POLICY,
    }
    return CacheConfig(**(fields | change))


def text(length, seed=0):
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


STREAMS = [Stream(text(40), [text(20, 1)]), Stream(text(3, 2), [text(50, 3)]), Stream(text(25, 4), [text(9, 5)])]


def summarizer_of(model, seed=0, ratio=4):
    return randomized(Summarizer(attention_specs(model.config), ratio, hidden=4), seed)


def difference(one, other):
    pairs = [(one.logits[key], other.logits[key]) for key in one.logits]
    return max(max_difference(a[at], b[at]) for a, b in pairs for at in a)


def max_difference(one, other):
    worst = float((one - other).abs().max())
    return worst if worst == worst else float("inf")


@pytest.mark.parametrize("position", ["rope", "alibi", "none"])
def test_only_a_trained_summarizer_changes_the_logits(position):
    model = build(model_config(position))
    means = drive(model, cache_of(), STREAMS)
    untrained = drive(model, cache_of(), STREAMS, summarizer=Summarizer(attention_specs(model.config), 4))
    assert difference(means, untrained) == 0
    assert difference(means, drive(model, cache_of(), STREAMS, summarizer=summarizer_of(model))) > 1e-3


def compare_with_solo_runs(model, cache, summarizer, streams=STREAMS):
    """Return max |dlogit| between sequences in a batch and their solo runs in other chunks, and the run."""
    run = drive(model, cache, streams, summarizer=summarizer)
    largest = 0.0
    for number, stream in enumerate(streams):
        solo_cache = cache_of(max_num_seqs=1, prefill_chunk_size=3, policy=cache.policy, rope_at=cache.rope_at)
        solo = drive(model, solo_cache, [stream], summarizer=summarizer)
        for at, logits in solo.logits[0, 0].items():
            largest = max(largest, max_difference(logits, run.logits[number, 0][at]))
    return largest, run


@pytest.mark.parametrize("rope_at", ["write", "read"])
@pytest.mark.parametrize(
    ("position", "heads"),
    [("rope", "gqa"), ("alibi", "mha"), ("t5", "mqa"), ("learned", "value-dim"), ("rope", "softcap")],
)
def test_a_sequence_with_summaries_equals_its_solo_run(position, heads, rope_at):
    model = build(model_config(position, "pre", heads))
    largest, _ = compare_with_solo_runs(model, cache_of(rope_at=rope_at), summarizer_of(model))
    assert largest <= EXACT


SWAP_POLICY = "0: full; " + POLICY


def swapped():
    model = build(model_config())
    streams = [Stream(text(30), [text(20, 1)]), Stream(text(3, 2), [text(40, 3)]), Stream(text(40, 4), [text(20, 5)])]
    largest, run = compare_with_solo_runs(
        model, cache_of(policy=SWAP_POLICY, max_num_seqs=3, num_blocks=23), summarizer_of(model), streams
    )
    assert run.preemptions > 0
    return largest


def test_a_swapped_sequence_keeps_the_weights_of_its_summaries():
    assert swapped() <= EXACT


def test_missing_weights_are_detected(monkeypatch):
    iter_arrays = KVCache.iter_arrays
    monkeypatch.setattr(
        KVCache,
        "iter_arrays",
        lambda self, blocks: (each for each in iter_arrays(self, blocks) if ".weights." not in each.name),
    )
    assert not swapped() <= EXACT


# ---------------------------------------------------------------- training and cache agree


class _Student:
    """Cache whose layers compute what the objective computes, from ``records`` of one sequence."""

    def __init__(self, config, summarizer, options):
        self.config, self.layers, self.options = config, summarizer.by_layer(), options

    def open(self, step):
        recorder, rows = _Recorder(NoCache(self.config), self.layers), _Rows(step, self.options)
        return [_StudentView(view, recorder, rows, n, self.layers[n]) for n, view in enumerate(recorder.open(step))]


class _StudentView:
    def __init__(self, view, recorder, rows, number, layer):
        self.view, self.recorder, self.rows, self.number, self.layer = view, recorder, rows, number, layer

    def attend(self, q, k, v, score):
        out = self.view.attend(q, k, v, score).clone()
        for span, answer in self.rows.answers(self.recorder.records[self.number], self.layer):
            out[span.low : span.high] = answer[0]
        return out


@pytest.mark.parametrize("position", [p for p in POSITIONS if p not in ("rope-dynamic", "rope-longrope")])
@pytest.mark.parametrize("sinks", [0, 8])
def test_the_training_view_equals_the_cache(position, sinks):
    """Objective and cache give equal logits in two layers, up to RoPE's angles in float32."""
    model = build(model_config(position))
    summarizer, tokens = summarizer_of(model), text(60)
    options = SummarizerConfig(ratio=4, recent=8, interval=8, num_sinks=sinks)
    cache = cache_of(max_num_seqs=1, policy=POLICY[:-1] + f", num_sinks={sinks})")
    run = drive(model, cache, [Stream(tokens[:1], [tokens[1:]])], summarizer=summarizer)
    with torch.no_grad():
        step = fresh_step(tokens)
        right = model.logits(model(step, _Student(model.config, summarizer, options)), step.logit_indices)
    tolerance = 1e-5 if position.startswith("rope") else EXACT
    assert max(max_difference(logits, right[at]) for at, logits in run.logits[0, 0].items()) <= tolerance


# ---------------------------------------------------------------- options, roots, bytes


@pytest.mark.parametrize(
    ("policy", "ratio", "message"),
    [
        ("full", 4, "the cache's policy has no summaries"),
        ("tiered(8, interval=8)", 4, "the cache's policy has no summaries"),
        (POLICY, 2, r"must have the policy's ratio 4, got 2"),
    ],
)
def test_an_unsuitable_summarizer_is_rejected(policy, ratio, message):
    model = build(model_config())
    with pytest.raises(ConfigError, match=message):
        Engine(model, cache_of(policy=policy), EngineConfig(summarizer=summarizer_of(model, ratio=ratio)))


def test_another_model_s_summarizer_is_rejected():
    with pytest.raises(ConfigError, match="does not match layer 0 of this model"):
        Engine(
            build(model_config()), cache_of(), EngineConfig(summarizer=summarizer_of(build(model_config(heads="mqa"))))
        )
    with pytest.raises(ConfigError, match="does not match layer 2 of this model"):
        Engine(build(model_config(layers=3)), cache_of(), EngineConfig(summarizer=summarizer_of(build(model_config()))))


def test_caches_with_another_summarizer_share_no_prefix():
    model = build(model_config())
    summarizers = [None, summarizer_of(model), summarizer_of(model, seed=1)]
    roots = {Engine(model, cache_of(), EngineConfig(summarizer=one))._root("") for one in summarizers}
    assert len(roots) == 3


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
def test_the_weights_of_summaries_are_counted_to_the_byte(dtype):
    model = build(model_config(), dtype=torch.float32)
    engine = Engine(model, cache_of(dtype=dtype))
    memory = engine.kv_cache
    assert memory.metadata_bytes() == sum(group_bytes(group).metadata for group in memory.groups)
    assert sum(leaf.nbytes for leaf in memory.tensors()) == sum(group_bytes(group).total for group in memory.groups)
    weights = [store for held in memory.weights for store in held.values()]
    assert len(weights) == 2 and weights[0].nbytes == memory.groups[1].num_blocks * 3 * 4 * (
        8 if dtype == "float64" else 4
    )
