"""A restored session has equal output: in its engine, in another one, in another layout."""

import math
from functools import cache

import pytest

from kvad.cache.device import KVCache
from kvad.cache.manager import portable_layout
from kvad.cache.sessions import state as state_module
from kvad.engine.scheduling.request import SamplingParams
from kvad.errors import RequestError, StorageError
from tests.support.driver import fill_unowned
from tests.support.engine_sessions import PROMPT, SOURCE, engine, left, load, moved, run, save, spoil, worst
from tests.support.manager_driver import unpublish_all
from tests.support.random_models import model_config, pair_config

FIRST, THEN = 12, 26  # tokens of the first turn, and of the second
EXACT = 1e-10

# name: (model, cache)
CACHES = {
    **{f"full {each}": (model_config(each), {}) for each in ("learned", "sinusoidal", "rope", "alibi", "t5")},
    "full partial": (model_config("rope-partial"), {}),
    "the model's own window": (model_config("rope", heads="window-mix", layers=3), {}),
    "values of another width": (model_config("alibi", heads="value-dim"), {}),
    "window": (model_config("rope"), {"policy": "window(11)"}),
    "window alibi": (model_config("alibi"), {"policy": "window(11)"}),
    "sinks": (model_config("rope"), {"policy": "sinks(3, 14)"}),
    "sinks t5": (model_config("t5"), {"policy": "sinks(3, 14)"}),
    "sinks, a whole block": (model_config("rope"), {"policy": "sinks(4, 8)"}),
    "block-window": (model_config("rope"), {"policy": "block-window(16, 4)"}),
    "rotate on read": (model_config("rope"), {"rope_at": "read"}),
    "rotate on read, sinks": (model_config("rope-partial"), {"rope_at": "read", "policy": "sinks(3, 14)"}),
    "endless": (model_config("rope"), {"policy": "sinks(4, 16)", "endless": True}),
    "endless alibi": (model_config("alibi"), {"policy": "window(16)", "endless": True}),
    "endless, rotate on read": (model_config("rope"), {"policy": "sinks(4, 16)", "endless": True, "rope_at": "read"}),
    "heavy-hitters": (model_config("rope"), {"policy": "heavy-hitters(16, 8)"}),
    "snapkv": (model_config("alibi"), {"policy": "snapkv(16, 8, 4, 0, 4)"}),
    "heavy-hitters, rotate on read": (model_config("rope"), {"policy": "heavy-hitters(16, 8)", "rope_at": "read"}),
    "key-norm": (model_config("t5"), {"policy": "key-norm(16, 8)"}),
    "tiered": (model_config("rope"), {"policy": "tiered(12, quantized=8, summaries=8, ratio=2, interval=8)"}),
    "tiered, sinks": (
        model_config("rope"), {"policy": "tiered(12, 0, summaries=40, ratio=4, interval=8, num_sinks=4)"},
    ),
    "tiered alibi, packed": (model_config("alibi"), {"policy": "tiered(8, interval=8)"}),
    "quest": (model_config("rope"), {"policy": "quest(12)"}),
    "int8": (model_config("rope"), {"key_dtype": "int8", "value_dtype": "int8"}),
    "int8/int4": (model_config("rope"), {"key_dtype": "int8", "value_dtype": "int4", "policy": "sinks(3, 14)"}),
    "int4 keys by channel": (
        model_config("rope"), {"key_dtype": "int4-channel", "value_dtype": "int4", "residual_length": 8},
    ),
    "fp8": (model_config("learned"), {"key_dtype": "fp8-e4m3", "value_dtype": "fp8-e5m2"}),
    "bfloat16": (model_config("rope"), {"key_dtype": "bfloat16", "value_dtype": "bfloat16"}),
    "int8, heavy-hitters": (
        model_config("rope"), {"key_dtype": "int8", "value_dtype": "int8", "policy": "heavy-hitters(16, 8)"},
    ),
    "latent": (model_config("rope", heads="latent"), {}),
    "latent int8, heavy-hitters": (
        model_config("rope", heads="latent"), {"key_dtype": "int8", "policy": "heavy-hitters(16, 8)"},
    ),
    "latent, tiered": (
        model_config("rope", heads="latent"),
        {"policy": "tiered(12, quantized=8, summaries=8, ratio=2, interval=8)"},
    ),
    "latent, keys by channel": (
        model_config("rope", heads="latent"), {"key_dtype": "int4-channel", "residual_length": 8},
    ),
    "delta rule": (model_config("rope", heads="delta", layers=3), {}),
    "translating": (pair_config("rope"), {}),
    "translating t5": (pair_config("t5", own=True), {"policy": "window(11)"}),
    "translating under ranks": (pair_config("rope"), {"policy": "heavy-hitters(16, 8)"}),
}  # fmt: skip
BLOCKWISE = ("tiered", "quest", "channel", "delta")
WAYS = {
    "the same blocks": {},
    "smaller blocks": {"block_size": 1},
    "larger blocks": {"block_size": 16},
    "blocks of five": {"block_size": 5},
    "contiguous": {"layout": "contiguous"},
}


def source_of(config):
    return (
        [token % (config.encoder_input.vocab_size or config.vocab_size) for token in SOURCE]
        if config.encoder_input is not None
        else None
    )


def fits_in_one_block(name):
    """Return True if a contiguous cache supports this configuration."""
    return not any(word in name for word in BLOCKWISE)


@cache
def uninterrupted(name):
    """Return tokens and log-probabilities of an uninterrupted run."""
    config, fields = CACHES[name]
    most = FIRST + THEN + (60 if fields.get("endless") else 0)
    _, tokens, scores = run(engine(config, **fields), PROMPT, most, encoder_token_ids=source_of(config))
    return tokens, scores


@pytest.mark.parametrize("name", CACHES)
def test_a_restored_session_continues_with_equal_output(name, tmp_path):
    config, fields = CACHES[name]
    source = source_of(config)
    tokens, scores = uninterrupted(name)
    first = engine(config, **fields)
    outputs, state = left(first, PROMPT, FIRST, encoder_token_ids=source)
    assert outputs == tokens[:FIRST] and state.length == len(PROMPT) + FIRST - 1
    save(first, state, tmp_path / "a")
    ways = {way: more for way, more in WAYS.items() if not more or fits_in_one_block(name)}
    for way, more in ways.items():
        other = engine(config, **{**fields, **more})
        loaded = load(other, tmp_path / "a").state
        request, then, found = run(
            other, PROMPT + outputs, len(tokens) - FIRST, encoder_token_ids=source, resume=loaded
        )
        usage = other.metrics(request)
        assert (usage.num_cached_tokens, usage.resume_miss_reason) == (state.length, ""), way
        assert then == tokens[FIRST:], way
        assert worst(found, scores[FIRST:]) <= EXACT, way


@pytest.mark.parametrize("name", ["sinks", "the model's own window", "rotate on read, sinks"])
@pytest.mark.parametrize("there", WAYS)
def test_every_layout_restores_from_every_other(name, there):
    config, fields = CACHES[name]
    tokens, scores = uninterrupted(name)
    outputs, state = left(engine(config, **{**fields, **WAYS[there]}), PROMPT, FIRST)
    for here in WAYS.values():
        other = engine(config, **{**fields, **here})
        request, then, found = run(other, PROMPT + outputs, 12, resume=moved(state, other))
        assert other.metrics(request).num_cached_tokens == state.length
        assert then == tokens[FIRST : FIRST + 12] and worst(found, scores[FIRST : FIRST + 12]) <= EXACT


def test_every_turn_reuses_the_last_state(tmp_path):
    """States are saved and restored in ten engines of changing layouts."""
    for name in ("sinks", "heavy-hitters", "tiered", "translating"):
        config, fields = CACHES[name]
        source = source_of(config)
        tokens, _ = uninterrupted(name)
        outputs, loaded = [], None
        for turn in range(10):
            more = list(WAYS.values())[turn % len(WAYS)] if fits_in_one_block(name) else {}
            llm_engine = engine(config, **{**fields, **more})
            if turn:
                loaded = load(llm_engine, tmp_path / "a").state
            new_tokens, state = left(llm_engine, PROMPT + outputs, 3, encoder_token_ids=source, resume=loaded)
            outputs += new_tokens
            save(llm_engine, state, tmp_path / "a")
        assert outputs == tokens[:30], name


# ---------------------------------------------------------------- a part of a state


@pytest.mark.parametrize("way", WAYS)
def test_the_common_prefix_of_a_state_is_used(way):
    llm_engine = engine(model_config("rope"), **WAYS[way])
    outputs, state = left(llm_engine, PROMPT, FIRST)
    for agreed in (1, 7, 16, len(PROMPT), state.length - 1, state.length):
        unpublish_all(llm_engine.kv_cache_manager)
        prompt = [*(PROMPT + outputs)[:agreed], 66, 5, 6]
        request, then, found = run(llm_engine, prompt, 5, resume=state)
        assert (
            llm_engine.metrics(request).num_cached_tokens == agreed
            and not llm_engine.metrics(request).resume_miss_reason
        )
        _, right, scores = run(engine(model_config("rope"), dirty=False), prompt, 5)
        assert then == right and worst(found, scores) <= EXACT


def test_one_token_is_left_to_compute():
    llm_engine = engine(model_config("rope"))
    _, state = left(llm_engine, PROMPT, FIRST)
    unpublish_all(llm_engine.kv_cache_manager)
    request, _, _ = run(llm_engine, PROMPT, 3, resume=state)
    assert llm_engine.metrics(request).num_cached_tokens == len(PROMPT) - 1
    request, _, _ = run(llm_engine, PROMPT[:1], 3, resume=state)
    assert (llm_engine.metrics(request).num_cached_tokens, llm_engine.metrics(request).resume_miss_reason) == (0, "")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["window", "sinks", "block-window", "delta rule"])
def test_a_windowed_state_is_used_while_it_holds_the_window(name, way):
    config, fields = CACHES[name]
    fields = {**fields, **WAYS[way]}
    llm_engine = engine(config, **fields)
    outputs, state = left(llm_engine, PROMPT, FIRST)
    served = set()
    for agreed in range(1, state.length + 1, 3):
        unpublish_all(llm_engine.kv_cache_manager)
        prompt = [*(PROMPT + outputs)[:agreed], 66, 5]
        request, then, found = run(llm_engine, prompt, 3, resume=state)
        usage = llm_engine.metrics(request)
        assert usage.num_cached_tokens in (0, agreed) and bool(usage.resume_miss_reason) == (
            usage.num_cached_tokens == 0
        )
        served.add(usage.num_cached_tokens > 0)
        _, right, scores = run(engine(config, dirty=False, **fields), prompt, 3)
        assert then == right and worst(found, scores) <= EXACT
    assert True in served
    assert False in served or way not in ("the same blocks", "smaller blocks")  # large ones hold more than they need


@pytest.mark.parametrize("name", ["heavy-hitters", "tiered"])
def test_a_lossy_state_is_used_whole_or_not_at_all(name):
    config, fields = CACHES[name]
    llm_engine = engine(config, **fields)
    outputs, state = left(llm_engine, PROMPT, FIRST)
    prompt = [*PROMPT, *outputs[:4], 66]
    request, then, found = run(llm_engine, prompt, 4, resume=state)
    assert llm_engine.metrics(request).num_cached_tokens == 0
    assert llm_engine.metrics(request).resume_miss_reason.startswith(f"tokens: equal for 33 of {state.length}, and")
    _, right, scores = run(engine(config, dirty=False, **fields), prompt, 4)
    assert then == right and worst(found, scores) <= EXACT


def test_restored_blocks_are_published():
    config = model_config("rope")
    first = engine(config)
    outputs, state = left(first, PROMPT, FIRST)
    other = engine(config)
    taken = moved(state, other)
    run(other, PROMPT + outputs, 3, resume=taken)
    request, then, _ = run(other, [*PROMPT, 5, 6], 4)
    assert other.metrics(request).num_cached_tokens == 28  # seven blocks of four
    assert then == run(engine(config, dirty=False), [*PROMPT, 5, 6], 4)[1]
    request, _, _ = run(other, PROMPT + outputs, 3, resume=taken)
    assert other.metrics(request).num_cached_tokens == 40  # what is there is not copied in again
    assert not other.kv_cache.swapped


@pytest.mark.parametrize("name", ["window", "sinks"])
def test_blocks_with_empty_slots_are_not_published(name):
    """A window restored to larger blocks leaves empty slots, which a truncated sequence would read."""
    config, fields = CACHES[name]
    outputs, state = left(engine(config, **fields, layout="contiguous"), PROMPT, FIRST)
    other = engine(config, **{**fields, "block_size": 16})
    _, more, _ = run(other, PROMPT + outputs, 20, resume=moved(state, other))
    every = PROMPT + outputs + more
    for cut in range(16, len(every), 5):
        _, then, found = run(other, [*every[:cut], 66], 3)
        _, right, scores = run(engine(config, dirty=False, **fields), [*every[:cut], 66], 3)
        assert then == right and worst(found, scores) <= EXACT, cut


# ---------------------------------------------------------------- a small pool


@pytest.mark.parametrize("name", ["full rope", "sinks", "heavy-hitters", "tiered", "translating"])
def test_states_are_restored_in_a_pool_that_is_too_small(name):
    """Sequences preempt one another; a resumed one equals its solo run."""
    config, fields = CACHES[name]
    source = source_of(config)
    tokens, _ = uninterrupted(name)
    fields = {**fields, "max_num_seqs": 3}
    if name in ("full rope", "translating"):
        fields["num_blocks"] = 34
    llm_engine = engine(config, **fields)
    outputs, state = left(llm_engine, PROMPT, FIRST, encoder_token_ids=source)
    unpublish_all(llm_engine.kv_cache_manager)
    sampling = SamplingParams(max_tokens=THEN, temperature=0, ignore_eos=True)
    requests = [
        llm_engine.add_request(PROMPT + outputs, sampling, encoder_token_ids=source, resume=state, keep_state=True)
        for _ in range(4)
    ]
    new_tokens = {request: [] for request in requests}
    while not llm_engine.idle:
        for chunk in llm_engine.step():
            assert chunk.error is None
            if chunk.token_id is not None:
                new_tokens[chunk.request].append(chunk.token_id)
        llm_engine.scheduler.check()
        fill_unowned(llm_engine, math.nan)
    assert all(each == tokens[FIRST : FIRST + THEN] for each in new_tokens.values())
    assert {llm_engine.pop_state(request).length for request in requests} == {len(PROMPT) + FIRST + THEN - 1}
    assert "num_blocks" not in fields or llm_engine.scheduler.stats().preemptions > 0
    assert not [each for each in llm_engine.kv_cache.swapped.values() if not isinstance(each, list)]


def test_seeded_sampling_continues_after_a_restore():
    config = model_config("rope")

    def sampled(llm_engine, prompt, most, **options):
        sampling = SamplingParams(max_tokens=most, temperature=1.5, seed=11, ignore_eos=True)
        request = llm_engine.add_request(prompt, sampling, **options)
        out = []
        while not llm_engine.idle:
            out += [chunk.token_id for chunk in llm_engine.step() if chunk.token_id is not None]
        return request, out

    _, tokens = sampled(engine(config), PROMPT, 30)
    llm_engine = engine(config)
    request, outputs = sampled(llm_engine, PROMPT, 9, keep_state=True)
    state = llm_engine.pop_state(request)
    unpublish_all(llm_engine.kv_cache_manager)
    _, then = sampled(llm_engine, PROMPT + outputs, 21, resume=state)
    assert outputs + then == tokens


# ---------------------------------------------------------------- rejected states


def test_unsupported_states_are_rejected():
    llm_engine, other = engine(model_config("rope")), engine(model_config("rope"))
    _, state = left(llm_engine, PROMPT, 3)
    for sampling in (SamplingParams(n=2, max_tokens=3), SamplingParams(num_beams=2, max_tokens=3, temperature=0)):
        for options in ({"keep_state": True}, {"resume": state}):
            with pytest.raises(RequestError, match="one sequence, got 2"):
                llm_engine.add_request(PROMPT, sampling, **options)
    with pytest.raises(RequestError, match="another engine"):
        other.add_request(PROMPT, SamplingParams(), resume=state)
    request, _, _ = run(llm_engine, PROMPT, 3)
    with pytest.raises(RequestError, match=f"request {request}"):
        llm_engine.pop_state(request)
    request = llm_engine.add_request(PROMPT, SamplingParams(max_tokens=20, temperature=0), keep_state=True)
    llm_engine.step()
    llm_engine.abort_request(request)
    with pytest.raises(RequestError, match="has no state"):
        llm_engine.pop_state(request)
    with pytest.raises(RequestError, match="must have at most"):
        llm_engine.add_request(PROMPT * 9, SamplingParams(), resume=state)
    assert not llm_engine.kv_cache.swapped and llm_engine.idle


def test_an_unused_state_has_a_reason():
    config = model_config("rope-dynamic")
    llm_engine = engine(config)
    outputs, state = left(llm_engine, PROMPT[:9], 3)
    request, _, _ = run(llm_engine, PROMPT[:9] + outputs + PROMPT, 3, resume=state)
    assert (llm_engine.metrics(request).num_cached_tokens, llm_engine.metrics(request).resume_miss_reason[:13]) == (
        0,
        "rope_regime: ",
    )
    llm_engine = engine(model_config("rope"))
    outputs, state = left(llm_engine, PROMPT, 3)
    request, _, _ = run(llm_engine, PROMPT + outputs, 3, resume=state, cache_salt="b")
    assert llm_engine.metrics(request).resume_miss_reason == "cache_salt: b here, none in the state"
    request, _, _ = run(llm_engine, [66, *PROMPT], 3, resume=state)
    assert llm_engine.metrics(request).resume_miss_reason == "tokens: the first token differs"
    request = llm_engine.add_request(PROMPT + outputs, SamplingParams(max_tokens=1, prompt_logprobs=0), resume=state)
    assert llm_engine.metrics(request).resume_miss_reason.startswith("prompt_logprobs")
    translating = engine(pair_config("rope"))
    outputs, state = left(translating, PROMPT[:4], 3, encoder_token_ids=SOURCE)
    request, then, _ = run(translating, PROMPT[:4] + outputs, 3, resume=state, encoder_token_ids=SOURCE[1:])
    assert translating.metrics(request).resume_miss_reason == "encoder input: it differs from the state's"
    assert (
        then == run(engine(pair_config("rope"), dirty=False), PROMPT[:4] + outputs, 3, encoder_token_ids=SOURCE[1:])[1]
    )


def test_states_at_block_ends_require_the_same_blocks(tmp_path):
    config, fields = CACHES["delta rule"]
    first = engine(config, **fields)
    _, state = left(first, PROMPT, FIRST)
    save(first, state, tmp_path / "a")
    assert load(engine(config, layout="contiguous", **fields), tmp_path / "a").state.length == state.length
    with pytest.raises(StorageError, match="block size: 5 here, 4 there"):
        load(engine(config, block_size=5, **fields), tmp_path / "a")


# ---------------------------------------------------------------- broken on purpose


def same(llm_engine, prompt, state, tokens, scores):
    _, then, found = run(llm_engine, prompt, THEN, resume=state)
    assert tokens is None or then == tokens[FIRST : FIRST + THEN]
    assert scores is None or worst(found, scores[FIRST : FIRST + THEN]) <= EXACT


def test_a_wrong_gap_changes_the_output(monkeypatch):
    config, fields = CACHES["sinks"]
    tokens, _ = uninterrupted("sinks")
    llm_engine = engine(config, **fields)
    outputs, state = left(llm_engine, PROMPT, FIRST)
    real = portable_layout.fit_layout
    monkeypatch.setattr(
        state_module.manager.portable_layout, "fit_layout", lambda *args: real(*args)._replace(num_skipped_blocks=0)
    )
    unpublish_all(llm_engine.kv_cache_manager)
    with pytest.raises((AssertionError, IndexError)):
        same(llm_engine, PROMPT + outputs, state, tokens, None)


@pytest.mark.parametrize("kind", ["keys", "head_metadata", "positions", "weights", "states"])
def test_a_missing_array_changes_the_output(kind, monkeypatch):
    others = {"head_metadata": "heavy-hitters, rotate on read", "weights": "tiered, sinks", "states": "delta rule"}
    name = others.get(kind, "sinks")
    config, fields = CACHES[name]
    _, scores = uninterrupted(name)
    llm_engine = engine(config, **fields)
    outputs, state = left(llm_engine, PROMPT, FIRST)
    unpublish_all(llm_engine.kv_cache_manager)
    spoil(llm_engine)  # blocks that are filled whole are not cleared first
    real = KVCache.iter_arrays
    monkeypatch.setattr(KVCache, "iter_arrays", lambda *given: (each for each in real(*given) if kind not in each.name))
    with pytest.raises(AssertionError):
        same(llm_engine, PROMPT + outputs, state, None, scores)


def test_keys_are_rotated_back_before_they_are_summarized(monkeypatch):
    """A sequence is demoted before its first step, so the new cache has not seen its rotary frequencies."""
    config, fields = CACHES["tiered, sinks"]
    first = engine(config, **fields)
    outputs, state = left(first, PROMPT[:28], 13)  # 40 tokens: it descends next
    assert state.length == 40 and state.rotaries
    _, _, scores = run(engine(config, **fields), PROMPT[:28] + outputs, 20)
    for rotaries, fine in ((state.rotaries, True), ({}, False)):
        other = engine(config, dirty=False, **fields)
        _, _, found = run(other, PROMPT[:28] + outputs, 20, resume=moved(state, other, rotaries=rotaries))
        assert (worst(found, scores) <= EXACT) == fine


@pytest.mark.parametrize("position", ["rope", "rope-yarn"])
def test_a_file_has_the_rotaries_that_summaries_need(position, tmp_path):
    """Frequencies and pairs of dimensions; the next step summarizes tokens from the file."""
    config, fields = model_config(position), CACHES["tiered, sinks"][1]
    first = engine(config, **fields)
    outputs, state = left(first, PROMPT[:28], 13)
    save(first, state, tmp_path / "a.session")
    _, _, scores = run(engine(config, **fields), PROMPT[:28] + outputs, 20)
    (rotary,) = {(each.interleaved, each.factor) for each in state.rotaries.values()}
    assert rotary == ((True, pytest.approx(1 + 0.1 * math.log(4))) if position == "rope-yarn" else (False, 1.0))
    for change in ({}, {"interleaved": not rotary[0]}):
        other = engine(config, dirty=False, **fields)
        loaded = load(other, tmp_path / "a.session").state
        rotaries = {layer: each._replace(**change) for layer, each in loaded.rotaries.items()}
        _, _, found = run(other, PROMPT[:28] + outputs, 20, resume=moved(loaded, other, rotaries=rotaries))
        assert (worst(found, scores) <= EXACT) == (not change), change
