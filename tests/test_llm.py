"""The LLM class: every method with text or ids, one or many prompts, in a batch or in threads; and its errors."""

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import kvad
from kvad.cache.config import CacheConfig
from kvad.cache.sizing.memory_plan import plan_memory
from kvad.engine.scheduling.request import SamplingParams
from kvad.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    MemoryPlanError,
    NumericalError,
    RequestError,
    TokenizerError,
    UsageError,
)
from kvad.llm import LLM
from tests.support.cli_checkpoints import LIMIT, write_model
from tests.support.random_models import build as random_model
from tests.support.random_models import encoder_config, model_config, pair_config

PROMPT = "def sing(poem):"
OTHERS = ["", "a", "kvad is a poem, sung from memory", "x" * 40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(folder):
    """float64, so that cached outputs equal uncached ones to 1e-10."""
    with LLM.load(folder, dtype="float64", max_num_seqs=4, block_size=4) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def llm_without_tokenizer(tmp_path_factory):
    with LLM.load(write_model(tmp_path_factory.mktemp("models") / "bare", tokenizer=False)) as loaded:
        yield loaded


def uncached_greedy(llm, tokens, count):
    """Return the greedy tokens of the uncached model."""
    tokens, out = llm.encode(tokens), []
    for _ in range(count):
        out.append(int(llm.logits(tokens + out)[-1].argmax()))
    return tuple(out)


# ---------------------------------------------------------------- generate


def test_load_generate_close(folder):
    llm = kvad.LLM.load(folder)
    done = llm.generate("def ", max_tokens=8, temperature=0)
    assert done.text == llm.tokenizer.decode(done.tokens) and done.finish_reason == "length"
    llm.close()


def test_generate_equals_the_uncached_model(llm):
    done = llm.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
    assert done.tokens == uncached_greedy(llm, PROMPT, 12)
    assert (done.usage.num_prompt_tokens, done.usage.num_completion_tokens) == (len(PROMPT), 12)
    assert 0 < done.timings.first_token <= done.timings.total and done.timings.tokens_per_second > 0
    assert len(done.choices) == 1 and done.choices[0].text == done.text and done.prompt_logprobs == ()


def test_padding_rows_of_the_embedding_are_never_sampled(tmp_path):
    """Qwen's table has more rows than its tokenizer has tokens; here nearly every row is padding."""
    with LLM.load(write_model(tmp_path / "padded", padding=20_000)) as llm:
        vocab, prompts = llm.tokenizer.vocab_size, ["a", "b"]
        drawn = llm.generate(prompts, max_tokens=8, temperature=1.0, seed=3, logprobs=4, ignore_eos=True)
        greedy = llm.generate(prompts, max_tokens=8, temperature=0, ignore_eos=True)
        beams = llm.generate("a", max_tokens=4, num_beams=2, temperature=0)
        assert max(token for done in [*drawn, *greedy, beams] for token in done.tokens) < vocab
        assert [done.finish_reason for done in [*drawn, *greedy]] == ["length"] * 4
        logits = llm.logits("a")[-1]
        assert logits.argmax() >= vocab and greedy[0].tokens[0] == logits[:vocab].argmax()


def test_timings_do_not_include_waiting_for_the_result(llm, monkeypatch):
    """The clock counts steps: the long request is read first, when the short one is long finished."""
    steps = llm.engine.scheduler.stats
    monkeypatch.setattr(llm.engine.scheduler, "_clock", lambda: float(steps().steps))
    collectors = [
        llm._requests.submitter(
            llm._requests.generation(SamplingParams(max_tokens=n, temperature=0, ignore_eos=True), {})
        )(PROMPT)
        for n in (40, 4)
    ]
    long, short = (collector.result().timings for collector in collectors)
    assert (long.total, short.total) == (39 + long.first_token, 3 + short.first_token)
    assert long.tokens_per_second == short.tokens_per_second == 1.0
    nothing = llm.generate(PROMPT, max_tokens=0).timings
    assert nothing.first_token == nothing.total and nothing.tokens_per_second == 0.0


def test_generate_accepts_text_or_ids_one_or_many(llm):
    options = {"max_tokens": 6, "temperature": 0}
    ids = [list(text.encode()) for text in ("ab", "cde")]
    one = llm.generate("ab", **options)
    assert llm.generate(ids[0], **options).tokens == one.tokens
    assert llm.generate(tuple(ids[0]), **options).tokens == one.tokens
    many = llm.generate(["ab", "cde"], **options)
    assert isinstance(many, list) and many[0].tokens == one.tokens
    assert [done.tokens for done in llm.generate(ids, **options)] == [done.tokens for done in many]
    assert llm.generate(["ab"], **options)[0].tokens == one.tokens
    assert llm.generate("ab", SamplingParams(**options)).tokens == one.tokens


def test_more_prompts_than_max_num_seqs(llm):
    prompts = [f"poem {i}" for i in range(11)]
    many = llm.generate(prompts, max_tokens=5, seed=3)
    assert [done.tokens for done in many] == [llm.generate(p, max_tokens=5, seed=3).tokens for p in prompts]


def test_empty_text_begins_with_the_opening_token(llm):
    opening = llm.tokenizer.special_tokens.separator
    assert llm.encode("") == [opening] == llm.encode([])
    assert llm.generate("", max_tokens=5, temperature=0).tokens == uncached_greedy(llm, [opening], 5)


def test_no_prompts_give_no_results(llm):
    assert llm.generate([]) == [] == llm.score([])
    assert len(llm.generate([[]], max_tokens=2)) == 1  # one empty prompt


def test_progress_is_called_after_every_prompt(llm):
    calls = []
    llm.generate(["a", "b", "c"], max_tokens=2, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_repr_and_decode(llm, folder):
    assert llm.decode(llm.encode("déf")) == "déf"
    numbers = sum(parameter.numel() for parameter in llm.model.parameters()) / 1e6
    room = f"4 sequences of {llm.engine.cache.max_seq_len} tokens"
    assert repr(llm) == f"LLM({str(folder)!r}, decoder, {numbers:.2f}M parameters in float64 on cpu, {room})"


def test_chat_is_the_rendered_conversation(tmp_path, llm):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    path = write_model(tmp_path / "chat")
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), "utf-8")
    messages = [{"role": "user", "content": "hi"}, {"role": "a", "content": "you"}]
    options = {"max_tokens": 6, "temperature": 0}
    with LLM.load(path, max_num_seqs=2) as opened:
        assert opened.chat(messages, **options).text == opened.generate("<user>hi<a>you<a>", **options).text
        continued = opened.chat(messages, SamplingParams(**options), continue_final=True)
        assert continued.tokens == opened.generate("<user>hi<a>you", **options).tokens
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat(messages)


def test_requests_of_different_salts_share_no_blocks(llm):
    prompt, options = "z" * 40, {"max_tokens": 2, "temperature": 0}

    def num_cached(**salt):
        return llm.generate(prompt, **options, **salt).usage.num_cached_tokens

    assert [num_cached(), num_cached(), num_cached(cache_salt="a"), num_cached(cache_salt="a")] == [0, 36, 0, 36]
    assert num_cached(cache_salt="b") == 0 and num_cached() == 36
    llm.score(prompt, cache_salt="c")
    assert num_cached(cache_salt="c") == 36
    session = llm.session(cache_salt="d")
    session.generate(prompt, **options)
    assert session.reused == 0 and num_cached(cache_salt="d") == 36


def test_samples_differ_and_do_not_depend_on_n(llm):
    done = llm.generate(PROMPT, n=6, max_tokens=8, seed=7)
    assert len(done.choices) == 6 and len({sample.token_ids for sample in done.choices}) > 3
    assert done.usage.num_completion_tokens == sum(len(sample.token_ids) for sample in done.choices)
    fewer = llm.generate(PROMPT, n=2, max_tokens=8, seed=7)
    assert [s.token_ids for s in fewer.choices] == [s.token_ids for s in done.choices[:2]]


def test_seeded_output_does_not_depend_on_the_batch(llm):
    single = llm.generate(PROMPT, max_tokens=16, seed=11)
    assert llm.generate(PROMPT, max_tokens=16, seed=11).tokens == single.tokens
    assert llm.generate(PROMPT, max_tokens=16, seed=12).tokens != single.tokens
    batch = llm.generate([*OTHERS[:2], PROMPT, *OTHERS[2:]], max_tokens=16, seed=11)
    assert batch[2].tokens == single.tokens


def test_equal_prompts_of_a_call_differ_and_are_repeatable(llm):
    options = {"max_tokens": 16, "seed": 1, "ignore_eos": True}
    first, second, other = (done.tokens for done in llm.generate(["a", "a", "b"], **options))
    assert first != second
    assert [done.tokens for done in llm.generate(["x", "b", "a", "y", "a"], **options)][1:3] == [other, first]
    assert llm.generate(["b", "a", "a"], **options)[2].tokens == second
    assert llm.generate("a", **options).tokens == first == llm.generate("a", draw_salt=0, **options).tokens
    assert llm.generate("a", draw_salt=1, **options).tokens == second
    assert [done.tokens for done in llm.generate(["a", "a"], draw_salt=1, **options)] == [second, second]
    assert tuple(c.token_id for c in llm.stream("a", draw_salt=1, **options)) == second
    with pytest.raises(RequestError, match="draw_salt: must be from 0"):
        llm.generate("a", draw_salt=-1, **options)


def test_draws_of_different_prompts_are_not_shared(llm):
    """With a nearly flat distribution, the tokens at one place agree no more often than by chance."""
    prompts = [[97 + i // 9, 97 + i % 9] for i in range(60)]
    done = llm.generate(prompts, seed=5, max_tokens=4, temperature=100.0, ignore_eos=True)
    firsts = [tuple(each.tokens[:2]) for each in done]
    assert len(set(firsts)) == len(firsts)  # one stream of numbers for all would give nearly one text


def test_the_default_seed_is_random_and_returned(llm):
    options = {"max_tokens": 12, "ignore_eos": True}
    first, second = llm.generate("a", **options), llm.generate("a", **options)
    assert first.seed != second.seed and first.tokens != second.tokens
    assert llm.generate("a", seed=first.seed, **options).tokens == first.tokens
    several = llm.generate(["a", "b"], SamplingParams(**options))
    assert several[0].seed == several[1].seed is not None
    assert llm.generate("a", temperature=0, **options).seed is None
    assert llm.generate("a", num_beams=2, temperature=0, **options).seed is None


def test_beams_have_log_probabilities_and_stop_strings(llm):
    options = {"num_beams": 3, "n": 3, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
    plain = llm.generate(PROMPT, **options)
    scored = llm.generate(PROMPT, **options, logprobs=1, prompt_logprobs=0)
    assert [c.token_ids for c in scored.choices] == [c.token_ids for c in plain.choices]
    expected = llm.score(PROMPT).logprobs[1:]
    assert [score.logprob for score in scored.prompt_logprobs] == pytest.approx(expected, abs=1e-6)
    for choice in scored.choices:
        assert sum(score.logprob for score in choice.logprobs) / 10 == pytest.approx(
            choice.cumulative_logprob, abs=1e-6
        )
        values = llm.logits([*llm.encode(PROMPT), *choice.token_ids]).log_softmax(-1)[len(PROMPT) - 1 : -1]
        assert [s.logprob for s in choice.logprobs] == pytest.approx(
            [float(row[token]) for row, token in zip(values, choice.token_ids, strict=True)], abs=1e-6
        )
    stop = plain.text[4:6]
    stopped = llm.generate(PROMPT, **options, stop=(stop,), early_stopping=True)
    ends = {(choice.finish_reason, choice.limit) for choice in stopped.choices}
    assert ("stop", None) in ends and not any(stop in choice.text for choice in stopped.choices)
    ended = next(choice for choice in stopped.choices if choice.finish_reason == "stop")
    assert llm.tokenizer.decode(ended.token_ids).startswith(ended.text + stop)


def test_cached_prefix_is_not_recomputed(llm):
    prompt = "the same beginning, again and again"
    first = llm.generate(prompt, max_tokens=4, temperature=0)
    second = llm.generate(prompt, max_tokens=4, temperature=0)
    assert second.usage.num_cached_tokens == (len(prompt) - 1) // 4 * 4 and second.tokens == first.tokens
    assert first.usage.num_cached_tokens < second.usage.num_cached_tokens


@pytest.mark.parametrize("stop", ["aa", "aaa", "ab"])
def test_stop_strings(llm, stop):
    options = {"max_tokens": 8, "temperature": 0, "logit_bias": {97: 500.0}}  # only "a" can be sampled
    done = llm.generate(PROMPT, stop=(stop,), **options)
    stopped = stop != "ab"
    assert done.text == ("" if stopped else "aaaaaaaa")
    assert (done.finish_reason, len(done.tokens)) == (("stop", len(stop)) if stopped else ("length", 8))


def test_stop_tokens_and_the_end_of_a_document(llm):
    end = llm.tokenizer.special_tokens.separator
    biased = {"max_tokens": 5, "temperature": 0, "logit_bias": {end: 500.0}}
    done = llm.generate(PROMPT, **biased)
    assert (done.text, done.tokens, done.finish_reason) == ("", (end,), "stop")
    assert llm.generate(PROMPT, ignore_eos=True, **biased).tokens == (end,) * 5
    continued = llm.generate(PROMPT, min_tokens=3, **biased).tokens
    assert len(continued) == 4 and end not in continued[:3]
    free = llm.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True).tokens
    assert (
        llm.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True, stop_token_ids=(free[2],)).tokens == free[:3]
    )


def test_zero_max_tokens(llm):
    done = llm.generate(PROMPT, max_tokens=0)
    assert (done.text, done.tokens, done.finish_reason) == ("", (), "length")


def test_without_max_tokens_the_model_limit_applies(llm):
    done = llm.generate("x" * (LIMIT - 5), temperature=0, ignore_eos=True)
    assert len(done.tokens) == 5 and done.finish_reason == "length"


# ---------------------------------------------------------------- numbers


def test_logprobs_equal_the_model(llm):
    done = llm.generate(PROMPT, max_tokens=6, seed=2, temperature=0.5, top_k=3, logprobs=4, ignore_eos=True)
    expected = llm.logits(llm.encode(PROMPT) + list(done.tokens)).log_softmax(-1)[len(PROMPT) - 1 : -1]
    assert [score.token_id for score in done.logprobs] == list(done.tokens)
    for score, row in zip(done.logprobs, expected, strict=True):
        assert score.logprob == pytest.approx(float(row[score.token_id]), abs=1e-5)
        best = row.topk(4)
        assert [token for token, _ in score.top_logprobs] == best.indices.tolist()
        assert [p for _, p in score.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert llm.generate(PROMPT, max_tokens=2, logprobs=0).logprobs[0].top_logprobs == ()
    assert llm.generate(PROMPT, max_tokens=2).logprobs == ()


@pytest.mark.parametrize("prefix_cached", [False, True])
def test_prompt_logprobs_equal_the_model(folder, prefix_cached):
    with LLM.load(folder, dtype="float64", block_size=4, prefill_chunk_size=5) as llm:
        if prefix_cached:
            llm.generate(PROMPT, max_tokens=1)
        scores = llm.generate(PROMPT, max_tokens=3, prompt_logprobs=2, n=2).prompt_logprobs
        expected = llm.logits(PROMPT).log_softmax(-1)
        ids = llm.encode(PROMPT)
        assert [score.token_id for score in scores] == ids[1:]
        for at, score in enumerate(scores):
            assert score.logprob == pytest.approx(float(expected[at, ids[at + 1]]), abs=1e-5)
            assert [token for token, _ in score.top_logprobs] == expected[at].topk(2).indices.tolist()


def test_score_is_the_sum_of_log_probabilities(llm):
    score = llm.score(PROMPT, top_logprobs=3)
    ids = llm.encode(PROMPT)
    expected = llm.logits(PROMPT).log_softmax(-1)[range(len(ids) - 1), ids[1:]]
    assert score.tokens == tuple(ids) and score.logprobs[0] is None and len(score.logprobs) == len(ids)
    assert score.total_logprob == pytest.approx(float(expected.sum()), abs=1e-4)
    assert score.perplexity == pytest.approx(math.exp(-float(expected.mean())), rel=1e-5)
    assert score.alternatives[0] == () and all(len(top) == 3 for top in score.alternatives[1:])


def test_score_accepts_one_or_many_texts_or_ids(llm):
    ids = list(PROMPT.encode())
    one = llm.score(PROMPT)
    assert llm.score(ids) == one
    assert llm.score([PROMPT, "ab"])[0] == one and llm.score([ids, [1, 2]])[0] == one
    single = llm.score("a")
    assert single.logprobs == (None,) and single.total_logprob == 0 and math.isnan(single.perplexity)


def test_logits(llm):
    logits = llm.logits(PROMPT)
    assert logits.shape == (len(PROMPT), 257) and logits.dtype == torch.float64
    assert torch.equal(logits, llm.logits(list(PROMPT.encode())))
    assert (llm.logits(PROMPT[:7]) - logits[:7]).abs().max() <= 1e-10


def test_logits_use_no_joined_product(folder, monkeypatch):
    """So a wrong one shows: the engine's log-probabilities differ from them."""
    split = torch.split
    with LLM.load(folder, dtype="float64", max_num_seqs=2, block_size=4) as loaded:
        expected, true = loaded.logits(PROMPT), loaded.score(PROMPT).total_logprob
        wrong = lambda x, sizes, dim: split(1.05 * x, sizes, dim=dim)  # noqa: E731
        monkeypatch.setattr("kvad.ops.linear.torch.split", wrong)
        assert torch.equal(loaded.logits(PROMPT), expected)
        assert abs(loaded.score(PROMPT).total_logprob - true) > 1e-2


@pytest.mark.parametrize("build_config", [model_config, pair_config, encoder_config])
def test_logits_use_no_fused_attention(build_config, monkeypatch):
    """Nor does the encoder; the engine's model keeps its kernel."""
    cache = CacheConfig(max_num_seqs=2, max_seq_len=16, max_source_len=16)
    with LLM(random_model(build_config("rope")), None, cache) as loaded:
        ids = ([1, 2, 3], [4, 5]) if loaded.model.config.kind == "encoder-decoder" else ([1, 2, 3],)
        expected = loaded.logits(*ids)
        monkeypatch.setattr("kvad.ops.attention._fused", lambda *_: pytest.fail("the engine's kernel is used"))
        assert torch.equal(loaded.logits(*ids), expected) and loaded.model.kernel == "auto"


@pytest.mark.parametrize("cached", [False, True])
def test_trace(llm, cached):
    outputs = llm.trace("abcd", layers=[1], heads=[0, 3], cached=cached)
    assert outputs.token_texts == ("a", "b", "c", "d") and list(outputs.layers) == [1]
    layer = outputs.layers[1]
    assert layer.weights.shape == (2, 4, 4) and layer.q.shape[:2] == (4, 2) and layer.hidden.shape == (4, 24)
    assert torch.allclose(layer.weights.sum(-1), torch.ones(2, 4, dtype=torch.float64))
    assert layer.weights.triu(1).abs().max() == 0
    assert (outputs.logits - llm.logits("abcd")).abs().max() <= 1e-10
    full_trace = llm.trace("abcd", cached=cached)
    assert list(full_trace.layers) == [0, 1] and torch.equal(full_trace.layers[1].weights[[0, 3]], layer.weights)


# ---------------------------------------------------------------- stream


def test_stream_equals_generate(llm):
    pieces = list(llm.stream(PROMPT, max_tokens=9, seed=4, n=2, logprobs=1))
    done = llm.generate(PROMPT, max_tokens=9, seed=4, n=2, logprobs=1)
    for number, sample in enumerate(done.choices):
        chunks = [piece for piece in pieces if piece.sample_index == number]
        assert "".join(piece.text for piece in chunks) == sample.text
        assert tuple(piece.token_id for piece in chunks if piece.token_id is not None) == sample.token_ids
        assert [piece.finish_reason for piece in chunks if piece.finish_reason] == [sample.finish_reason]
        assert tuple(piece.logprob for piece in chunks if piece.logprob) == sample.logprobs


def test_closing_a_stream_cancels_the_request(llm):
    stream = llm.stream(PROMPT, max_tokens=50, ignore_eos=True)
    next(stream)
    assert llm.engine.kv_cache_manager.stats().used[0] > 0 and not llm.engine.idle
    stream.close()
    assert llm.engine.kv_cache_manager.stats().used == (0,) and llm.engine.idle and not llm.client._chunk_queues
    llm.engine.scheduler.check()


def test_concurrent_streams(llm):
    expected = [llm.generate(p, max_tokens=7, seed=1).tokens for p in OTHERS]
    streams = [llm.stream(p, max_tokens=7, seed=1) for p in OTHERS]
    outputs = [[] for _ in streams]
    running = dict(enumerate(streams))
    while running:
        for number, stream in list(running.items()):
            piece = next(stream, None)
            if piece is None:
                del running[number]
            elif piece.token_id is not None:
                outputs[number].append(piece.token_id)
    assert [tuple(tokens) for tokens in outputs] == expected


# ---------------------------------------------------------------- threads


def test_threads_share_one_engine(llm):
    prompts = [f"{i} poems" for i in range(12)]
    expected = [llm.generate(p, max_tokens=8, seed=i).tokens for i, p in enumerate(prompts)]
    start = threading.Barrier(6)

    def generate_one(number):
        if number < 6:
            start.wait()
        if number % 3 == 0:
            return tuple(
                p.token_id for p in llm.stream(prompts[number], max_tokens=8, seed=number) if p.token_id is not None
            )
        return llm.generate(prompts[number], max_tokens=8, seed=number).tokens

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(generate_one, range(12))) == expected
    assert llm.engine.idle and not llm.client._chunk_queues
    llm.engine.scheduler.check()


def test_invalid_request_does_not_affect_other_threads(llm):
    expected = llm.generate(PROMPT, max_tokens=8, seed=1).tokens

    def generate_one(number):
        if number % 2:
            with pytest.raises(RequestError):
                llm.generate("x" * 200)
            return expected
        return llm.generate(PROMPT, max_tokens=8, seed=1).tokens

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(generate_one, range(8))) == {expected}


# ---------------------------------------------------------------- load and close


def test_context_manager_frees_the_pool(folder):
    with LLM.load(folder) as llm:
        llm.generate("a", max_tokens=2)
        running = llm.stream("b", max_tokens=9)
        next(running)
    assert all(leaf.numel() == 0 for leaf in llm.engine.kv_cache.tensors())
    for call in (
        lambda: llm.generate("a"),
        lambda: llm.score("a"),
        lambda: next(llm.stream("a")),
        lambda: next(running),
    ):
        with pytest.raises(EngineError, match="closed"):
            call()
    llm.close()
    assert llm.encode("ab") == [97, 98]


def test_load_accepts_a_dtype_and_cache_options(folder):
    with LLM.load(
        folder, dtype="float64", max_num_seqs=2, max_seq_len=32, layout="contiguous", cache_dtype="bfloat16"
    ) as llm:
        assert llm.model.embedding.tokens.weight.dtype == torch.float64
        assert llm.cache_config == CacheConfig(max_num_seqs=2, max_seq_len=32, layout="contiguous", dtype="bfloat16")
        assert llm.engine.kv_cache.keys[0].data.dtype == torch.bfloat16
    with LLM.load(folder, cache_config=CacheConfig(max_seq_len=16)) as llm:
        assert llm.cache_config == CacheConfig(max_seq_len=16)
    with LLM.load(folder) as llm:
        assert llm.cache_config == CacheConfig(max_seq_len=LIMIT, max_num_seqs=256)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_num_seqs": 0}, ConfigError, "cache.max_num_seqs"),
        ({"layout": "heap"}, ConfigError, "cache.layout"),
        ({"cache_dtype": "int3"}, ConfigError, "cache.dtype"),
        ({"row": 2}, RequestError, "row"),
        (
            {"cache_config": CacheConfig(max_seq_len=8), "max_num_seqs": 2},
            RequestError,
            "cache_config= and max_num_seqs= are both given",
        ),
        (
            {"cache_config": CacheConfig(max_seq_len=8), "cache_dtype": "float32"},
            RequestError,
            "cache_config= and cache_dtype= are both",
        ),
        ({"max_num_seqs": 3_000_000_000}, MemoryPlanError, "available"),
    ],
)
def test_load_refuses_invalid_options(folder, options, error, message):
    with pytest.raises(error) as caught:
        LLM.load(folder, **options)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "foo"}, "dtype: unknown dtype 'foo'"),
        ({"dtype": "float23"}, "did you mean 'float32'"),
        ({"dtype": 5}, "unknown dtype 5"),
        ({"dtype": torch.int8}, "unknown dtype 'int8'"),
        ({"dtype": "float16"}, "float16 is for storage only on a CPU"),
        ({"dtype": torch.float16}, "float16 is for storage only on a CPU"),
        ({"cache_dtype": 5}, "cache.dtype: unknown dtype 5"),
        ({"cache_dtype": torch.int16}, "cache.dtype: unknown dtype 'int16'"),
        ({"cache_key_dtype": "int5"}, "cache.key_dtype: unknown dtype 'int5' (did you mean 'int8'?)"),
        ({"cache_value_dtype": "int8-channel"}, "cache.value_dtype: int8-channel is for keys"),
        (
            {"cache_key_dtype": "int4-channel", "layout": "contiguous"},
            "cache.key_dtype: int4-channel packs whole blocks",
        ),
        ({"device": "cuda"}, "device 'cuda': this torch finds no CUDA device"),
        ({"device": "cuda:1"}, "device 'cuda:1': this torch finds no CUDA device"),
        ({"device": "foo"}, "unknown device 'foo'"),
        ({"device": None}, "unknown device None"),
        ({"device": "meta"}, "device 'meta' cannot be used here"),
    ],
)
def test_load_refuses_unknown_dtypes_and_devices(folder, monkeypatch, options, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError) as caught:
        LLM.load(folder, **options)
    assert message in str(caught.value) and caught.value.hint


def test_load_accepts_torch_dtypes_and_devices(folder):
    with LLM.load(folder, dtype=torch.float64, cache_dtype=torch.float16, device=torch.device("cpu")) as llm:
        assert (llm.model.embedding.tokens.weight.dtype, llm.cache_config.dtype) == (torch.float64, "float16")


def test_load_refuses_a_folder_without_a_checkpoint(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError):
            LLM.load(path)


def test_pool_bytes_equal_the_plan(folder):
    with LLM.load(folder, max_num_seqs=3, max_seq_len=40) as llm:
        allocated = sum(leaf.numel() * leaf.element_size() for leaf in llm.engine.kv_cache.tensors())
        assert allocated == plan_memory(llm.model.config, llm.cache_config).pool


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("x" * (LIMIT + 1), {}, f"prompt: must have at most {LIMIT} tokens, got {LIMIT + 1}"),
        ([1, 999], {}, "token id must be below 257, got 999"),
        ([-1], {}, "prompt: token id must be below 257, got -1"),
        ("a", {"temperature": -1}, "temperature: must be from 0 to 100, got -1"),
        ("a", {"temperatur": 1}, "unknown sampling option 'temperatur'"),
        ("a", {"top_p": 0}, "top_p: must be above 0 and at most 1, got 0"),
        ("a", {"n": 0}, "n: must be from 1 to 128, got 0"),
        ("a", {"stop": ("",)}, "stop: must not contain an empty string"),
        ("a", {"logit_bias": {999: 1.0}}, "logit_bias: token id must be below 257, got 999"),
        (
            "a",
            {"sampling_params": SamplingParams(), "max_tokens": 2},
            "sampling_params= and max_tokens= are both given",
        ),
        ("a", {"sampling_params": 5}, "sampling_params: must be SamplingParams, got 5"),
        (5, {}, "prompt: must be text or token ids"),
        (None, {}, "prompt: must be text or token ids"),
        (torch.tensor(5), {}, "prompt: must be text or token ids"),
        ([[1], 5], {}, "prompt: must be text or token ids"),
    ],
)
def test_invalid_requests_are_refused(llm, prompt, options, message):
    for call in (llm.generate, lambda *a, **k: list(llm.stream(*a, **k))):
        with pytest.raises(RequestError) as caught:
            call(prompt, **options)
        assert message in caught.value.message
    assert llm.engine.idle and not llm.client._chunk_queues


def test_invalid_prompt_cancels_the_whole_call(llm):
    with pytest.raises(RequestError):
        llm.generate(["a", "x" * 200, "b"], max_tokens=4)
    assert llm.engine.idle and not llm.client._chunk_queues and llm.engine.kv_cache_manager.stats().used == (0,)


@pytest.mark.parametrize(
    ("layers", "heads", "message"),
    [([2], None, "layers: must be in 0..1, got 2"), ([0], [4], "heads: must be in 0..3")],
)
def test_trace_refuses_unknown_layers_and_heads(llm, layers, heads, message):
    with pytest.raises(RequestError, match=message):
        llm.trace("ab", layers, heads)


def test_lone_surrogates_are_refused(llm):
    with pytest.raises(TokenizerError, match="surrogate"):
        llm.generate("a\ud800")


def test_ids_without_a_tokenizer(llm_without_tokenizer):
    done = llm_without_tokenizer.generate([3, 4], max_tokens=4, temperature=0)
    assert done.tokens == uncached_greedy(llm_without_tokenizer, [3, 4], 4) and done.text == ""
    assert llm_without_tokenizer.trace([3, 4]).token_texts == ("3", "4")
    for prompt, message in (("hi", "no tokenizer"), ([[]], "no opening token")):
        with pytest.raises(RequestError, match=message):
            llm_without_tokenizer.generate(prompt)
    with pytest.raises(RequestError, match="stop: requires a tokenizer"):
        llm_without_tokenizer.generate([3], stop=("x",))


def test_nan_is_an_error_and_the_next_call_works(folder):
    with LLM.load(folder) as llm:
        expected = llm.generate("ok", max_tokens=3, temperature=0).tokens
        with torch.no_grad():
            row = llm.model.embedding.tokens.weight[120].clone()
            llm.model.embedding.tokens.weight[120] = math.nan
        with pytest.raises(NumericalError, match=r"NaN or infinite \(Check the weights: kvad doctor MODEL\.\)$"):
            llm.generate("ox", max_tokens=3)
        with torch.no_grad():
            llm.model.embedding.tokens.weight[120] = row
        assert llm.generate("ok", max_tokens=3, temperature=0).tokens == expected
        assert llm.engine.idle and not llm.client._chunk_queues
        llm.engine.scheduler.check()
