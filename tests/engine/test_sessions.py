"""A session goes on as if it had never stopped: in its own engine, in another one, in another layout."""

import math
from functools import cache

import pytest

from kvad.cache.device import slot_copy
from kvad.cache.manager import portable_layout
from kvad.cache.sessions import state as state_module
from kvad.engine.scheduling.request import SamplingParams
from kvad.errors import RequestError
from tests.support.driver import fill_unowned
from tests.support.engine_sessions import PROMPT, SOURCE, engine, left, load, moved, run, save, spoil, worst
from tests.support.random_models import model_config, pair_config

FIRST, THEN = 12, 26  # tokens of the first turn, and of the second
EXACT = 1e-10

# name: (model, cache)
KEPT = {
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
    "translating": (pair_config("rope"), {}),
    "translating t5": (pair_config("t5", own=True), {"policy": "window(11)"}),
    "translating under ranks": (pair_config("rope"), {"policy": "heavy-hitters(16, 8)"}),
}  # fmt: skip
BLOCKWISE = ("tiered", "quest", "channel")
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


def stays(name):
    """Whether this can be kept in one block per row."""
    return not any(word in name for word in BLOCKWISE)


@cache
def whole(name):
    """What is said without a stop: (tokens, log-probabilities)."""
    config, fields = KEPT[name]
    most = FIRST + THEN + (60 if fields.get("endless") else 0)
    _, tokens, scores = run(engine(config, **fields), PROMPT, most, encoder_token_ids=source_of(config))
    return tokens, scores


@pytest.mark.parametrize("name", KEPT)
def test_what_is_restored_goes_on_as_if_it_had_not_stopped(name, tmp_path):
    config, fields = KEPT[name]
    source = source_of(config)
    tokens, scores = whole(name)
    first = engine(config, **fields)
    said, state = left(first, PROMPT, FIRST, encoder_token_ids=source)
    assert said == tokens[:FIRST] and state.length == len(PROMPT) + FIRST - 1
    save(first, state, tmp_path / "a")
    ways = {way: more for way, more in WAYS.items() if not more or stays(name)}
    for way, more in ways.items():
        other = engine(config, **{**fields, **more})
        loaded = load(other, tmp_path / "a").state
        request, then, found = run(other, PROMPT + said, len(tokens) - FIRST, encoder_token_ids=source, resume=loaded)
        usage = other.metrics(request)
        assert (usage.num_cached_tokens, usage.resume_miss_reason) == (state.length, ""), way
        assert then == tokens[FIRST:], way
        assert worst(found, scores[FIRST:]) <= EXACT, way


@pytest.mark.parametrize("name", ["sinks", "the model's own window", "rotate on read, sinks"])
@pytest.mark.parametrize("there", WAYS)
def test_every_layout_takes_from_every_other(name, there):
    config, fields = KEPT[name]
    tokens, scores = whole(name)
    said, state = left(engine(config, **{**fields, **WAYS[there]}), PROMPT, FIRST)
    for here in WAYS.values():
        other = engine(config, **{**fields, **here})
        request, then, found = run(other, PROMPT + said, 12, resume=moved(state, other))
        assert other.metrics(request).num_cached_tokens == state.length
        assert then == tokens[FIRST : FIRST + 12] and worst(found, scores[FIRST : FIRST + 12]) <= EXACT


def test_turn_after_turn(tmp_path):
    """Kept, resumed, kept ... in ten engines of changing layouts."""
    for name in ("sinks", "heavy-hitters", "tiered", "translating"):
        config, fields = KEPT[name]
        source = source_of(config)
        tokens, _ = whole(name)
        said, loaded = [], None
        for turn in range(10):
            more = list(WAYS.values())[turn % len(WAYS)] if stays(name) else {}
            made = engine(config, **{**fields, **more})
            if turn:
                loaded = load(made, tmp_path / "a").state
            came, state = left(made, PROMPT + said, 3, encoder_token_ids=source, resume=loaded)
            said += came
            save(made, state, tmp_path / "a")
        assert said == tokens[:30], name


# ---------------------------------------------------------------- a part of it


@pytest.mark.parametrize("way", WAYS)
def test_of_a_prompt_that_differs_what_agrees_is_used(way):
    made = engine(model_config("rope"), **WAYS[way])
    said, state = left(made, PROMPT, FIRST)
    for agreed in (1, 7, 16, len(PROMPT), state.length - 1, state.length):
        made.kv_cache_manager.reset_prefix_cache()
        prompt = [*(PROMPT + said)[:agreed], 66, 5, 6]
        request, then, found = run(made, prompt, 5, resume=state)
        assert made.metrics(request).num_cached_tokens == agreed and not made.metrics(request).resume_miss_reason
        _, right, scores = run(engine(model_config("rope"), dirty=False), prompt, 5)
        assert then == right and worst(found, scores) <= EXACT


def test_one_token_is_left_to_compute():
    made = engine(model_config("rope"))
    _, state = left(made, PROMPT, FIRST)
    made.kv_cache_manager.reset_prefix_cache()
    request, _, _ = run(made, PROMPT, 3, resume=state)
    assert made.metrics(request).num_cached_tokens == len(PROMPT) - 1
    request, _, _ = run(made, PROMPT[:1], 3, resume=state)
    assert (made.metrics(request).num_cached_tokens, made.metrics(request).resume_miss_reason) == (0, "")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["window", "sinks", "block-window"])
def test_a_window_serves_what_it_still_holds(name, way):
    config, fields = KEPT[name]
    fields = {**fields, **WAYS[way]}
    made = engine(config, **fields)
    said, state = left(made, PROMPT, FIRST)
    served = set()
    for agreed in range(1, state.length + 1, 3):
        made.kv_cache_manager.reset_prefix_cache()
        prompt = [*(PROMPT + said)[:agreed], 66, 5]
        request, then, found = run(made, prompt, 3, resume=state)
        usage = made.metrics(request)
        assert usage.num_cached_tokens in (0, agreed) and bool(usage.resume_miss_reason) == (
            usage.num_cached_tokens == 0
        )
        served.add(usage.num_cached_tokens > 0)
        _, right, scores = run(engine(config, dirty=False, **fields), prompt, 3)
        assert then == right and worst(found, scores) <= EXACT
    assert True in served
    assert False in served or way not in ("the same blocks", "smaller blocks")  # large ones hold more than they need


@pytest.mark.parametrize("name", ["heavy-hitters", "tiered"])
def test_what_is_lossy_goes_on_whole_or_not_at_all(name):
    config, fields = KEPT[name]
    made = engine(config, **fields)
    said, state = left(made, PROMPT, FIRST)
    prompt = [*PROMPT, *said[:4], 66]
    request, then, found = run(made, prompt, 4, resume=state)
    assert made.metrics(request).num_cached_tokens == 0
    assert made.metrics(request).resume_miss_reason.startswith(f"tokens: equal for 33 of {state.length}, and")
    _, right, scores = run(engine(config, dirty=False, **fields), prompt, 4)
    assert then == right and worst(found, scores) <= EXACT


def test_of_restored_blocks_others_find_the_prefix():
    config = model_config("rope")
    first = engine(config)
    said, state = left(first, PROMPT, FIRST)
    other = engine(config)
    taken = moved(state, other)
    run(other, PROMPT + said, 3, resume=taken)
    request, then, _ = run(other, [*PROMPT, 5, 6], 4)
    assert other.metrics(request).num_cached_tokens == 28  # seven blocks of four
    assert then == run(engine(config, dirty=False), [*PROMPT, 5, 6], 4)[1]
    request, _, _ = run(other, PROMPT + said, 3, resume=taken)
    assert other.metrics(request).num_cached_tokens == 40  # what is there is not copied in again
    assert not other.kv_cache.swapped


@pytest.mark.parametrize("name", ["window", "sinks"])
def test_blocks_with_holes_are_nobody_elses(name):
    """A window taken into larger blocks leaves slots empty that a shorter row would look into."""
    config, fields = KEPT[name]
    said, state = left(engine(config, **fields, layout="contiguous"), PROMPT, FIRST)
    other = engine(config, **{**fields, "block_size": 16})
    _, more, _ = run(other, PROMPT + said, 20, resume=moved(state, other))
    every = PROMPT + said + more
    for cut in range(16, len(every), 5):
        _, then, found = run(other, [*every[:cut], 66], 3)
        _, right, scores = run(engine(config, dirty=False, **fields), [*every[:cut], 66], 3)
        assert then == right and worst(found, scores) <= EXACT, cut


# ---------------------------------------------------------------- beside others


@pytest.mark.parametrize("name", ["full rope", "sinks", "heavy-hitters", "tiered", "translating"])
def test_beside_others_in_a_pool_that_is_too_small(name):
    """Rows preempt one another; whoever resumed says what it would say alone."""
    config, fields = KEPT[name]
    source = source_of(config)
    tokens, _ = whole(name)
    fields = {**fields, "max_num_seqs": 3}
    if name in ("full rope", "translating"):
        fields["num_blocks"] = 34
    made = engine(config, **fields)
    said, state = left(made, PROMPT, FIRST, encoder_token_ids=source)
    made.kv_cache_manager.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=THEN, temperature=0, ignore_eos=True)
    asked = [
        made.add_request(PROMPT + said, sampling, encoder_token_ids=source, resume=state, keep_state=True)
        for _ in range(4)
    ]
    came = {request: [] for request in asked}
    while not made.idle:
        for piece in made.step():
            assert piece.error is None
            if piece.token_id is not None:
                came[piece.request].append(piece.token_id)
        made.scheduler.check()
        fill_unowned(made, math.nan)
    assert all(each == tokens[FIRST : FIRST + THEN] for each in came.values())
    assert {made.pop_state(request).length for request in asked} == {len(PROMPT) + FIRST + THEN - 1}
    assert "num_blocks" not in fields or made.scheduler.stats().preemptions > 0
    assert not [each for each in made.kv_cache.swapped.values() if not isinstance(each, list)]


def test_seeded_sampling_goes_on_with_the_same_numbers():
    config = model_config("rope")

    def sampled(made, prompt, most, **options):
        sampling = SamplingParams(max_tokens=most, temperature=1.5, seed=11, ignore_eos=True)
        request = made.add_request(prompt, sampling, **options)
        out = []
        while not made.idle:
            out += [piece.token_id for piece in made.step() if piece.token_id is not None]
        return request, out

    _, tokens = sampled(engine(config), PROMPT, 30)
    made = engine(config)
    request, said = sampled(made, PROMPT, 9, keep_state=True)
    state = made.pop_state(request)
    made.kv_cache_manager.reset_prefix_cache()
    _, then = sampled(made, PROMPT + said, 21, resume=state)
    assert said + then == tokens


# ---------------------------------------------------------------- what is refused


def test_what_cannot_be_kept_or_resumed():
    made, other = engine(model_config("rope")), engine(model_config("rope"))
    _, state = left(made, PROMPT, 3)
    for sampling in (SamplingParams(n=2, max_tokens=3), SamplingParams(num_beams=2, max_tokens=3, temperature=0)):
        for options in ({"keep_state": True}, {"resume": state}):
            with pytest.raises(RequestError, match="one sequence, got 2"):
                made.add_request(PROMPT, sampling, **options)
    with pytest.raises(RequestError, match="another engine"):
        other.add_request(PROMPT, SamplingParams(), resume=state)
    request, _, _ = run(made, PROMPT, 3)
    with pytest.raises(RequestError, match=f"request {request}"):
        made.pop_state(request)
    request = made.add_request(PROMPT, SamplingParams(max_tokens=20, temperature=0), keep_state=True)
    made.step()
    made.abort_request(request)
    with pytest.raises(RequestError, match="has no state"):
        made.pop_state(request)
    with pytest.raises(RequestError, match="must have at most"):
        made.add_request(PROMPT * 9, SamplingParams(), resume=state)
    assert not made.kv_cache.swapped and made.idle


def test_misses_say_why():
    config = model_config("rope-dynamic")
    made = engine(config)
    said, state = left(made, PROMPT, 3)
    request, _, _ = run(made, PROMPT + said, 60, resume=state)
    assert (made.metrics(request).num_cached_tokens, made.metrics(request).resume_miss_reason[:13]) == (
        0,
        "rope_regime: ",
    )
    made = engine(model_config("rope"))
    said, state = left(made, PROMPT, 3)
    request, _, _ = run(made, PROMPT + said, 3, resume=state, cache_salt="b")
    assert made.metrics(request).resume_miss_reason == "cache_salt: b here, none in the state"
    request, _, _ = run(made, [66, *PROMPT], 3, resume=state)
    assert made.metrics(request).resume_miss_reason == "tokens: the first token differs"
    request = made.add_request(PROMPT + said, SamplingParams(max_tokens=1, prompt_logprobs=0), resume=state)
    assert made.metrics(request).resume_miss_reason.startswith("prompt_logprobs")
    translating = engine(pair_config("rope"))
    said, state = left(translating, PROMPT[:4], 3, encoder_token_ids=SOURCE)
    request, then, _ = run(translating, PROMPT[:4] + said, 3, resume=state, encoder_token_ids=SOURCE[1:])
    assert translating.metrics(request).resume_miss_reason == "encoder input: it differs from the state's"
    assert then == run(engine(pair_config("rope"), dirty=False), PROMPT[:4] + said, 3, encoder_token_ids=SOURCE[1:])[1]


# ---------------------------------------------------------------- broken on purpose


def same(made, prompt, state, tokens, scores):
    _, then, found = run(made, prompt, THEN, resume=state)
    assert tokens is None or then == tokens[FIRST : FIRST + THEN]
    assert scores is None or worst(found, scores[FIRST : FIRST + THEN]) <= EXACT


def test_a_gap_that_is_forgotten_is_heard(monkeypatch):
    config, fields = KEPT["sinks"]
    tokens, _ = whole("sinks")
    made = engine(config, **fields)
    said, state = left(made, PROMPT, FIRST)
    real = portable_layout.fit_layout
    monkeypatch.setattr(
        state_module.manager.portable_layout, "fit_layout", lambda *args: real(*args)._replace(num_skipped_blocks=0)
    )
    made.kv_cache_manager.reset_prefix_cache()
    with pytest.raises((AssertionError, IndexError)):
        same(made, PROMPT + said, state, tokens, None)


@pytest.mark.parametrize("kind", ["keys", "head_metadata", "positions", "weights"])
def test_an_array_that_is_forgotten_is_heard(kind, monkeypatch):
    name = {"head_metadata": "heavy-hitters, rotate on read", "weights": "tiered, sinks"}.get(kind, "sinks")
    config, fields = KEPT[name]
    _, scores = whole(name)
    made = engine(config, **fields)
    said, state = left(made, PROMPT, FIRST)
    made.kv_cache_manager.reset_prefix_cache()
    spoil(made)  # blocks that are filled whole are not cleared first
    real = slot_copy._arrays
    monkeypatch.setattr(slot_copy, "_arrays", lambda *given: (each for each in real(*given) if kind not in each[0]))
    with pytest.raises(AssertionError):
        same(made, PROMPT + said, state, None, scores)


def test_keys_of_a_new_engine_are_turned_back_before_they_are_summed_up(monkeypatch):
    """A row that descends before its first step: nobody has told the new memory how its keys are rotated."""
    config, fields = KEPT["tiered, sinks"]
    first = engine(config, **fields)
    said, state = left(first, PROMPT[:28], 13)  # 40 tokens: it descends next
    assert state.length == 40 and state.rotaries
    _, _, scores = run(engine(config, **fields), PROMPT[:28] + said, 20)
    for rotaries, fine in ((state.rotaries, True), ({}, False)):
        other = engine(config, dirty=False, **fields)
        _, _, found = run(other, PROMPT[:28] + said, 20, resume=moved(state, other, rotaries=rotaries))
        assert (worst(found, scores) <= EXACT) == fine
