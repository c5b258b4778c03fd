"""Helpers of the session tests: a request run to its end with all logits, in an engine full of NaN."""

import math
from dataclasses import replace

import torch

from kvad.cache.config import CacheConfig
from kvad.cache.sessions.state import load_session, save_session
from kvad.engine.engine import Engine
from kvad.engine.scheduling.request import SamplingParams
from kvad.model_input import RESERVED_BLOCKS
from tests.support.driver import fill_unowned
from tests.support.random_models import VOCAB, build

PROMPT = [(7 * at + at * at) % VOCAB for at in range(29)]
SOURCE = [(5 * at + 3) % VOCAB for at in range(13)]


def engine(config, *, dirty=True, dtype=torch.float64, **fields):
    """Build an engine with random weights; blocks without an owner are filled with NaN."""
    fields = {
        "max_seq_len": 96,
        "dtype": "float64",
        "block_size": 4,
        "max_num_seqs": 3,
        "prefill_chunk_size": 8,
        "max_source_len": 64,
        **fields,
    }
    if config.encoder is None:
        del fields["max_source_len"]
    built = Engine(build(config, dtype=dtype), CacheConfig(**fields))
    if dirty:
        spoil(built)
    return built


def spoil(engine):
    """Fill every free block with NaN, at positions that would be visible."""
    fill_unowned(engine, math.nan)
    kv_cache = engine.kv_cache
    for positions in kv_cache.positions:
        positions[RESERVED_BLOCKS:] = 1
    for metadata in kv_cache.head_metadata.values():
        metadata.positions[RESERVED_BLOCKS:] = 1
    for bounds in kv_cache.block_bounds.values():
        bounds.key_min[RESERVED_BLOCKS:], bounds.key_max[RESERVED_BLOCKS:] = -99, 99


def run(engine, tokens, max_tokens, **options):
    """Run one greedy request; return (request, tokens, log-probabilities of all tokens per step)."""
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0, ignore_eos=True, logprobs=min(VOCAB, engine.model.config.vocab_size)
    )
    request = engine.add_request(tokens, sampling, **options)
    generated, scores = [], []
    while not engine.idle:
        for piece in engine.step():
            assert piece.error is None, piece.error
            if piece.request == request and piece.token_id is not None:
                generated.append(piece.token_id)
                scores.append(dict(piece.logprob.top_logprobs))
        engine.scheduler.check()
        fill_unowned(engine, math.nan)
    return request, generated, scores


def worst(a, b):
    """Return max |dlogprob|."""
    assert len(a) == len(b)
    return max(abs(one[token] - other[token]) for one, other in zip(a, b, strict=True) for token in one)


def left(engine, tokens, max_tokens, **options):
    """Run a request with ``keep_state``; return (tokens, state)."""
    request, generated, _ = run(engine, tokens, max_tokens, keep_state=True, **options)
    return generated, engine.pop_state(request)


def identity_of(engine, template=""):
    return lambda regime, salt: engine.cache_fingerprint(regime, cache_salt=salt, template=template)


def save(engine, state, path, history=None, **more):
    return save_session(
        path, state, identity_of(engine)(state.regime, state.salt), history or state.tokens, {"cache_key": "x"}, **more
    )


def load(engine, path, **more):
    return load_session(path, identity_of(engine), engine.kv_cache, engine.state_keeper.engine_id, **more)


def moved(state, engine, **more):
    """Return the state as if ``engine`` had read it."""
    return replace(state, engine_id=engine.state_keeper.engine_id, **more)
