"""A cache that is given a compressor: streams are still their own, and what it says is what it was trained to say."""

import random

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.cache.groups import group_bytes
from kvad.config.model import attention_specs
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling.request import SamplingParams
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


def compressor_of(model, seed=0, ratio=4):
    return randomized(Summarizer(attention_specs(model.config), ratio, hidden=4), seed)


def difference(one, other):
    pairs = [(one.logits[key], other.logits[key]) for key in one.logits]
    return max(apart(a[at], b[at]) for a, b in pairs for at in a)


def apart(one, other):
    worst = float((one - other).abs().max())
    return worst if worst == worst else float("inf")


@pytest.mark.parametrize("position", ["rope", "alibi", "none"])
def test_an_untrained_one_changes_nothing_and_a_trained_one_does(position):
    model = build(model_config(position))
    means = drive(model, cache_of(), STREAMS)
    untrained = drive(model, cache_of(), STREAMS, summarizer=Summarizer(attention_specs(model.config), 4))
    assert difference(means, untrained) == 0
    assert difference(means, drive(model, cache_of(), STREAMS, summarizer=compressor_of(model))) > 1e-3


def alone(model, cache, compressor, streams=STREAMS):
    """max |dlogit| between streams in company and each alone, in chunks of another size."""
    run = drive(model, cache, streams, summarizer=compressor)
    largest = 0.0
    for number, stream in enumerate(streams):
        alone = cache_of(max_num_seqs=1, prefill_chunk_size=3, policy=cache.policy, rope_at=cache.rope_at)
        solo = drive(model, alone, [stream],
                     summarizer=compressor)  # fmt: skip
        for at, logits in solo.logits[0, 0].items():
            largest = max(largest, apart(logits, run.logits[number, 0][at]))
    return largest, run


@pytest.mark.parametrize("rotate", ["write", "read"])
@pytest.mark.parametrize(
    ("position", "heads"),
    [("rope", "gqa"), ("alibi", "mha"), ("t5", "mqa"), ("learned", "value-dim"), ("rope", "softcap")],
)
def test_a_stream_with_a_compressor_is_its_own(position, heads, rotate):
    model = build(model_config(position, "pre", heads))
    largest, _ = alone(model, cache_of(rope_at=rotate), compressor_of(model))
    assert largest <= EXACT


PARKED = "0: full; " + POLICY


def parked():
    model = build(model_config())
    streams = [Stream(text(30), [text(20, 1)]), Stream(text(3, 2), [text(40, 3)]), Stream(text(40, 4), [text(20, 5)])]
    largest, run = alone(model, cache_of(policy=PARKED, max_num_seqs=3, num_blocks=23), compressor_of(model), streams)
    assert run.preemptions > 0
    return largest


def test_a_parked_row_keeps_the_weights_of_its_summaries():
    assert parked() <= EXACT


def test_without_them_the_test_above_objects(monkeypatch):
    whole = KVCache.iter_arrays
    monkeypatch.setattr(
        KVCache,
        "iter_arrays",
        lambda self, blocks: (each for each in whole(self, blocks) if ".weights." not in each.name),
    )
    assert not parked() <= EXACT


# ---------------------------------------------------------------- what training asks is what the cache does


class _Student:
    """A memory whose layers answer as the objective's student does, from ``records`` of one row."""

    def __init__(self, config, compressor, options):
        self.config, self.layers, self.options = config, compressor.by_layer(), options

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
def test_the_student_is_the_cache(position, sinks):
    """Two layers deep: the objective's arithmetic and a real cache's say the same, up to RoPE's angles in float32."""
    model = build(model_config(position))
    compressor, tokens = compressor_of(model), text(60)
    options = SummarizerConfig(ratio=4, recent=8, interval=8, num_sinks=sinks)
    cache = cache_of(max_num_seqs=1, policy=POLICY[:-1] + f", num_sinks={sinks})")
    run = drive(model, cache, [Stream(tokens[:1], [tokens[1:]])], summarizer=compressor)
    with torch.no_grad():
        step = fresh_step(tokens)
        right = model.logits(model(step, _Student(model.config, compressor, options)), step.logit_indices)
    tolerance = 1e-5 if position.startswith("rope") else EXACT
    assert max(apart(logits, right[at]) for at, logits in run.logits[0, 0].items()) <= tolerance


# ---------------------------------------------------------------- refusals, roots, bytes


@pytest.mark.parametrize(
    ("policy", "ratio", "says"),
    [
        ("full", 4, "the cache's policy has no summaries"),
        ("tiered(8, interval=8)", 4, "the cache's policy has no summaries"),
        (POLICY, 2, r"must have the policy's ratio 4, got 2"),
    ],
)
def test_what_does_not_fit_is_refused(policy, ratio, says):
    model = build(model_config())
    with pytest.raises(ConfigError, match=says):
        Engine(model, cache_of(policy=policy), EngineConfig(summarizer=compressor_of(model, ratio=ratio)))


def test_another_models_is_refused():
    with pytest.raises(ConfigError, match="does not match layer 0 of this model"):
        Engine(
            build(model_config()), cache_of(), EngineConfig(summarizer=compressor_of(build(model_config(heads="mqa"))))
        )
    with pytest.raises(ConfigError, match="does not match layer 2 of this model"):
        Engine(build(model_config(layers=3)), cache_of(), EngineConfig(summarizer=compressor_of(build(model_config()))))


def test_a_prefix_of_one_compressor_is_none_of_another():
    model = build(model_config())
    made = [None, compressor_of(model), compressor_of(model, seed=1)]
    roots = {
        Engine(model, cache_of(), EngineConfig(summarizer=one))._root([1, 2], SamplingParams(), "") for one in made
    }
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
