"""Dynamic and longrope scaling: a sequence's tokens choose its frequencies; one that outgrows them is recomputed."""

from __future__ import annotations

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.engine.engine import Engine, EngineConfig
from kvad.model.no_cache import NoCache
from kvad.verify.reference_model import reference_model
from kvad.verify.references import compare_logits
from kvad.verify.replay import ReplayStream
from kvad.verify.round_trips import run_beams
from tests.support import engine_sessions
from tests.support.driver import Stream, drive
from tests.support.driver import worst as worst_of_run
from tests.support.engine_sessions import PROMPT, left, load, run, save, worst
from tests.support.golden_models import GoldenModel
from tests.support.random_models import build, model_config

POSITIONS = ("rope-dynamic", "rope-longrope")
ORIGINAL = 20  # of both
EXACT = 1e-10


def engine(position: str, **fields) -> Engine:
    return engine_sessions.engine(model_config(position), **fields)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("length", [ORIGINAL, ORIGINAL + 1])
def test_the_first_token_does_not_depend_on_max_tokens(position, length):
    scores = [run(engine(position), PROMPT[:length], max_tokens)[2][0] for max_tokens in (1, 2, 30)]
    assert scores[0] == scores[1] == scores[2]


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("fields", [{}, {"layout": "contiguous"}, {"policy": "sinks(2, 9)", "rope_at": "read"}])
def test_each_token_equals_that_of_a_fresh_prompt(position, fields):
    running = engine(position, **fields)
    _, generated, scores = run(running, PROMPT[:17], 7)
    for count in (0, 3, 4, 6):  # 17, 20, 21 and 23 tokens
        _, _, fresh = run(engine(position, **fields), PROMPT[:17] + generated[:count], 1)
        assert worst(scores[count : count + 1], fresh) <= EXACT, count
    assert running.scheduler.stats().preemptions == 0


@pytest.mark.parametrize(
    "policy", ["heavy-hitters(12, interval=4)", "tiered(8, quantized=0, interval=8, summaries=32, ratio=4)"]
)
def test_a_lossy_sequence_is_recomputed_as_a_prompt(policy):
    fields = {"policy": policy, "rope_at": "read"}
    _, generated, scores = run(engine("rope-longrope", **fields), PROMPT[:17], 5)
    _, _, fresh = run(engine("rope-longrope", **fields), PROMPT[:17] + generated[:4], 1)
    assert worst(scores[4:], fresh) <= EXACT


@pytest.mark.parametrize("position", POSITIONS)
def test_samples_change_their_regime_one_by_one(position):
    """The second sample starts when its sibling is already in the other regime, and does not fork from it."""
    streams = [Stream([5, 6, 7], [[8] * 9]), Stream(PROMPT[:17], [[1] * 12, [2] * 12])]
    cache = CacheConfig(
        dtype="float64", max_num_seqs=2, max_seq_len=96, block_size=4, prefill_chunk_size=8, enable_prefix_caching=False
    )
    model = build(model_config(position))
    result = drive(model, cache, streams)
    assert worst_of_run(model, streams, result) <= EXACT and result.widest == 2


def test_a_pool_that_is_full_at_the_change():
    streams = [Stream(PROMPT[n : n + 15], [[n] * 14]) for n in (0, 5, 9)]
    cache = CacheConfig(dtype="float64", max_num_seqs=3, max_seq_len=48, block_size=4, num_blocks=20)
    model = build(model_config("rope-longrope"))
    result = drive(model, cache, streams)
    assert worst_of_run(model, streams, result) <= EXACT and result.preemptions


@pytest.mark.parametrize("position", POSITIONS)
def test_beams_change_their_regime_together(position):
    model = build(model_config(position))
    cache = CacheConfig(dtype="float64", max_num_seqs=3, max_seq_len=40, block_size=4)
    found = run_beams(model, cache, [ReplayStream(tuple(PROMPT[:16]), ((0,) * 8,))], 3, EngineConfig())
    reference = reference_model(model, torch.float64)
    logits = reference.whole_logits(found.sequences, NoCache(model.config, kernel="reference"))
    assert {len(sequence.tokens) > ORIGINAL for sequence in found.sequences} == {True, False}
    expected = {(number, 0): each for number, each in enumerate(logits)}
    assert compare_logits(found.replay, expected, 0.0).max_dlogit <= EXACT


@pytest.mark.parametrize("position", POSITIONS)
def test_a_session_that_changed_its_regime_is_resumed(tmp_path, position):
    generated, state = left(engine(position, enable_prefix_caching=False), PROMPT[:15], 12)
    path, text = tmp_path / "a.session", PROMPT[:15] + generated
    save(engine(position), state, path)
    other = engine(position, enable_prefix_caching=False)
    request, tokens, scores = run(other, text, 5, resume=load(other, path).state)
    assert other.metrics(request).num_cached_tokens == len(text) - 1
    _, expected, fresh = run(engine(position), text, 5)
    assert tokens == expected and worst(scores, fresh) <= EXACT


def test_a_state_of_the_short_regime_is_not_used_beyond_it():
    generated, state = left(engine("rope-dynamic"), PROMPT[:15], 4)
    other = engine("rope-dynamic")
    request, tokens, _ = run(other, PROMPT[:15] + generated + [1, 2], 3, resume=engine_sessions.moved(state, other))
    assert other.metrics(request).resume_miss_reason == "rope_regime: 1 here, 0 in the state"
    assert tokens == run(engine("rope-dynamic"), PROMPT[:15] + generated + [1, 2], 3)[1]


@pytest.mark.parametrize("version", ["4.57", "5"])
def test_generation_beyond_the_original_length_equals_transformers(version):
    """transformers 4.57 does not recompute what its cache holds, so it is compared without a cache."""
    golden = GoldenModel((version, "phi3-longrope"))
    suffix = "_uncached" if version == "4.57" else ""
    prompt, sequence = golden.tensor("greedy/input_ids").tolist(), golden.tensor(f"greedy/sequence{suffix}").tolist()
    expected = golden.tensor(f"greedy/logits{suffix}").log_softmax(-1)
    config = CacheConfig(dtype="float32", max_num_seqs=1, max_seq_len=64, block_size=4)
    with torch.inference_mode():
        _, tokens, scores = run(Engine(golden.model(), config), prompt, len(expected))
    assert [*prompt, *tokens] == sequence and len(prompt) < 16 < len(sequence)
    for logprobs, row in zip(scores, expected, strict=True):
        assert all(abs(logprob - float(row[token])) < 1e-4 for token, logprob in logprobs.items())
