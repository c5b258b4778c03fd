"""Speculative decoding: requests get the same tokens as without drafts, whatever is drafted.

``MixedDrafter`` is given the right tokens and mixes wrong ones in, so that drafts are accepted and rejected at every
offset. Outputs of a model in float64 are compared chunk by chunk with those of an engine without drafts.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.engine import Engine, StreamChunk
from kvad.engine.execution import DraftModel, grammar, sampler
from kvad.engine.options import EngineConfig
from kvad.engine.scheduling import (
    SamplingParams,
    SchedulerOutput,
    SequenceOutput,
    SpeculativeConfig,
    StructuredOutput,
    TokenSequence,
)
from kvad.engine.scheduling.preemption import SwapCostModel
from kvad.engine.scheduling.speculation import Drafter, DraftGate, NgramDrafter
from kvad.errors import ConfigError
from kvad.model.transformer import Transformer
from kvad.text.tokenizer import train_tokenizer
from tests.support.driver import run_engine, uncached
from tests.support.random_models import SOURCE_VOCAB, VOCAB, build, encoder_config, model_config, pair_config

CACHE = CacheConfig(dtype="float64", max_num_seqs=4, max_seq_len=64, block_size=4, prefill_chunk_size=8)
NGRAM = SpeculativeConfig("ngram", num_tokens=4, min_match=1, adaptive=False)
GREEDY = SamplingParams(temperature=0, max_tokens=20)
Outputs = dict[tuple[int, int], list[int]]  # generated tokens by request and sample


class MixedDrafter:
    """Drafts the right tokens, each of them wrong with probability 1/4."""

    def __init__(self, outputs: Outputs, wrong: float = 0.25, wrong_tokens: Sequence[int] = range(VOCAB)) -> None:
        self.outputs, self.random, self.wrong, self.wrong_tokens = outputs, random.Random(0), wrong, wrong_tokens

    def propose(self, seqs: Sequence[TokenSequence], max_drafts: Sequence[int]) -> list[list[int]]:
        drafts = []
        for seq, limit in zip(seqs, max_drafts, strict=True):
            right = self.outputs[seq.request_id, seq.sample_index]
            count = self.random.randint(0, min(limit, 5)) if limit > 0 else 0
            assert right[: seq.num_generated_tokens] == seq.token_ids[seq.num_prompt_tokens :]
            tokens = right[seq.num_generated_tokens : seq.num_generated_tokens + count]
            tokens += [0] * (count - len(tokens))  # beyond the end: the sequence ends before they are reached
            drafts.append(
                [self.random.choice(self.wrong_tokens) if self.random.random() < self.wrong else t for t in tokens]
            )
        return drafts


class Case:
    """Requests for one model and cache, run with and without drafts."""

    def __init__(
        self, model: Transformer, cache: CacheConfig, config: EngineConfig | None = None, tokenizer: Any = None
    ) -> None:
        self.model, self.cache, self.config = model, cache, config or EngineConfig(max_num_batched_tokens=40)
        self.tokenizer = tokenizer
        self.requests: list[tuple[list[int], SamplingParams, dict[str, Any]]] = []

    def add(self, prompt: Sequence[int], sampling: SamplingParams, **options: Any) -> None:
        self.requests.append((list(prompt), sampling, options))

    def run(self, engine: Engine) -> list[list[StreamChunk]]:
        for prompt, sampling, options in self.requests:
            engine.add_request(prompt, sampling, **options)
        chunks = run_engine(engine, poison=True)
        engine.flush_offload()
        assert all(used == 0 for used in engine.kv_cache_manager.stats().used), "blocks leak"
        return [chunks[request] for request in sorted(chunks)]

    def engine(self, **options: Any) -> Engine:
        return Engine(self.model, self.cache, replace(self.config, **options), tokenizer=self.tokenizer)

    def drafting(self, drafter: Drafter) -> Engine:
        engine = self.engine(speculative=SpeculativeConfig(adaptive=False))
        engine.scheduler.drafter = drafter
        return engine

    def compare(self, *, tolerance: float = 1e-9) -> Engine:
        """Compare every chunk with and without a MixedDrafter; return its engine."""
        base = self.run(self.engine())
        engine = self.drafting(MixedDrafter(outputs_of(base)))
        assert_equal(base, self.run(engine), tolerance)
        return engine


def outputs_of(chunks: Sequence[Sequence[StreamChunk]]) -> Outputs:
    outputs: Outputs = {}
    for chunk in (chunk for each in chunks for chunk in each):
        tokens = outputs.setdefault((chunk.request, chunk.sample_index), [])
        tokens.extend([] if chunk.token_id is None else [chunk.token_id])
    return outputs


def assert_equal(
    base: Sequence[Sequence[StreamChunk]], other: Sequence[Sequence[StreamChunk]], tolerance: float
) -> None:
    """Compare the chunks of each sample: tokens, texts, ends and log-probabilities."""
    for left, right in zip(base, other, strict=True):
        for sample in {chunk.sample_index for chunk in left}:
            a, b = ([chunk for chunk in chunks if chunk.sample_index == sample] for chunks in (left, right))
            assert [plain(chunk) for chunk in a] == [plain(chunk) for chunk in b]
            assert logprobs(b) == pytest.approx(logprobs(a), abs=tolerance, rel=0)


def plain(chunk: StreamChunk) -> tuple[object, ...]:
    ranked = None if chunk.logprob is None else [token for token, _ in chunk.logprob.top_logprobs]
    return chunk.token_id, chunk.finish_reason, chunk.error, chunk.limit, chunk.text, ranked


def logprobs(chunks: Sequence[StreamChunk]) -> list[float]:
    scores = [score for chunk in chunks for score in (chunk.logprob, *chunk.prompt_logprobs) if score is not None]
    return [number for score in scores for number in (score.logprob, *(value for _, value in score.top_logprobs))]


def accepted_and_rejected(engine: Engine) -> bool:
    stats = engine.scheduler.stats()
    return 0 < stats.accepted_tokens < stats.draft_tokens


def prompts(seed: int, count: int = 5, vocab: int = VOCAB) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1, vocab) for _ in range(draw.randint(3, 17))] for _ in range(count)]


OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"seed": 5, "logprobs": 3},
    {"seed": 6, "n": 2, "top_p": 0.9, "repetition_penalty": 1.2, "stop_token_ids": (3, 11, 40)},
    {"temperature": 0, "frequency_penalty": 0.6, "no_repeat_ngram_size": 2, "prompt_logprobs": 1},
    {"seed": 7, "top_k": 9, "temperature": 1.4, "min_tokens": 6, "stop_token_ids": tuple(range(0, VOCAB, 6))},
)


def case_of(model: Transformer, cache: CacheConfig, config: EngineConfig | None = None, seed: int = 3) -> Case:
    """Return five requests with different options; two of them begin with the same blocks."""
    case, texts = Case(model, cache, config), prompts(seed)
    texts[3] = [*texts[1][:9], *texts[3]]
    for prompt, options in zip(texts, OPTIONS, strict=True):
        source = {"encoder_token_ids": [t % SOURCE_VOCAB for t in prompt]} if model.encoder is not None else {}
        case.add(prompt, SamplingParams(max_tokens=24, **options), **source)
    return case


CACHES = {
    "paged": {},
    "contiguous": {"layout": "contiguous"},
    "no-prefix": {"enable_prefix_caching": False},
    "tight": {"num_blocks": 22},
    "float16": {"dtype": "float16"},
    "fp8": {"dtype": "fp8-e4m3"},
    "int8": {"dtype": "int8"},
    "int4": {"key_dtype": "int8", "value_dtype": "int4"},
    "channels": {"key_dtype": "int4-channel", "value_dtype": "int4", "residual_length": 8},
    "window": {"policy": "window(9)"},
    "window-contiguous": {"policy": "window(9)", "layout": "contiguous"},
    "sinks": {"policy": "sinks(2, 9)"},
    "sinks-contiguous": {"policy": "sinks(2, 9)", "layout": "contiguous"},
    "endless": {"overflow": "sinks", "max_seq_len": 16, "layout": "contiguous"},
    "block-window": {"policy": "block-window(10)"},
    "on-read": {"rope_at": "read"},
    "quest": {"policy": "quest(8)"},
    "key-norm": {"policy": "key-norm(8, interval=4)"},
    "tiered": {"policy": "tiered(8, quantized=8, interval=4, num_sinks=4)"},
    "offload": {"policy": "offload(8, interval=4)", "num_blocks": 40},
    "small-chunks": {"prefill_chunk_size": 2, "policy": "window(5)", "layout": "contiguous"},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CACHES)
def test_drafts_change_nothing_in_any_cache(name: str) -> None:
    engine = case_of(build(model_config()), replace(CACHE, **CACHES[name])).compare()
    assert accepted_and_rejected(engine)
    assert ("tight" in name) <= (engine.scheduler.stats().preemptions > 0)


def test_a_restored_sequence_reads_no_rejected_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quest's bounds of the last block have them until it is written again, which may be after a swap."""
    monkeypatch.setattr(SwapCostModel, "swap_is_cheaper", lambda *_, **__: True)
    case = Case(build(model_config()), replace(CACHE, policy="quest(8)", swap_space=1 << 20))
    case.add(prompts(3)[0], SamplingParams(temperature=0, max_tokens=24, logprobs=0))
    base = case.run(case.engine())
    engine = case.drafting(MixedDrafter(outputs_of(base), wrong=0.7))
    step, numbers = engine.step, itertools.count()

    def step_and_preempt() -> list[StreamChunk]:
        chunks = step()
        if next(numbers) % 2:  # after a step with drafts: a waiting sequence gets none
            engine.scheduler.preempt(0)
        return chunks

    monkeypatch.setattr(engine, "step", step_and_preempt)
    assert_equal(base, case.run(engine), 1e-9)
    assert engine.preemption.stats().to_ram and accepted_and_rejected(engine)


MODELS = (
    ("learned", "pre", "mha"), ("alibi", "post", "gqa"), ("t5", "sandwich", "gqa"), ("rope-dynamic", "pre", "gqa"),
    ("rope-longrope", "pre", "window-mix"), ("rope", "parallel", "latent"), ("rope", "pre", "window"),
    ("rope", "pre", "short-conv"), ("rope", "pre", "recurrence"), ("rope", "pre", "delta"),
)  # fmt: skip


@pytest.mark.parametrize(("position", "norm", "heads"), MODELS)
def test_drafts_change_nothing_for_any_model(position: str, norm: str, heads: str) -> None:
    assert accepted_and_rejected(case_of(build(model_config(position, norm, heads)), CACHE).compare())


def test_drafts_change_nothing_for_an_encoder_decoder() -> None:
    assert accepted_and_rejected(case_of(build(pair_config()), replace(CACHE, max_source_len=64)).compare())


def noisy(model: Transformer, scale: float, seed: int = 1) -> Transformer:
    """Return a model with other weights near those of ``model``: it agrees on many tokens."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return other


def draft_config(model: Transformer, num_tokens: int = 4, **options: Any) -> EngineConfig:
    speculative = SpeculativeConfig("draft", num_tokens, draft_model="a model", adaptive=False)
    return EngineConfig(max_num_batched_tokens=40, speculative=speculative, draft_model=model, **options)


@pytest.mark.parametrize("name", ["paged", "tight", "sinks-contiguous", "small-chunks", "int8"])
def test_a_draft_model_changes_nothing(name: str) -> None:
    model = build(model_config())
    case = case_of(model, replace(CACHE, **CACHES[name]))
    base = case.run(case.engine())
    engine = Engine(model, case.cache, draft_config(noisy(model, 0.02)))
    assert_equal(base, case.run(engine), 1e-9)
    assert accepted_and_rejected(engine)
    drafter = engine.scheduler.drafter
    assert isinstance(drafter, DraftModel)
    drafter.manager.check()
    drafter.propose([], [])
    assert not any(drafter.manager.stats().used)


def test_a_draft_model_with_the_same_weights_is_always_right() -> None:
    """Its draws have the same random numbers, and its cache holds the right tokens whatever was rejected before."""
    model = build(model_config())
    case = case_of(model, CACHE)
    base = case.run(case.engine())
    engine = Engine(model, CACHE, draft_config(model))
    assert_equal(base, case.run(engine), 1e-9)
    stats = engine.scheduler.stats()
    num_ends = len(OPTIONS) + 1  # a draft that ends a sample is its last token: nothing follows it
    assert stats.accepted_tokens > 50 and stats.accepted_tokens >= stats.draft_tokens - num_ends


# ---------------------------------------------------------------- n-grams


def repetitive(model: Transformer, cache: CacheConfig = CACHE) -> Case:
    """Return requests with repeated prompts, biased so that the output repeats itself too."""
    case = Case(model, cache, EngineConfig(max_num_batched_tokens=64))
    for seed, options in enumerate(OPTIONS):
        text, bias = prompts(seed)[0][:5], dict.fromkeys(prompts(seed)[0][:3], 5.0)
        case.add(text * 3, SamplingParams(max_tokens=20, logit_bias=bias, **options))
    return case


@pytest.mark.parametrize("native", [True, False])
def test_a_draft_model_with_fewer_embeddings_gets_only_tokens_that_it_knows(native: bool) -> None:
    """Both have the tokenizer's tokens; the padding of their tables differs, and a prompt of ids may contain it."""
    tokenizer = train_tokenizer("char", ["abcdefgh"])
    small, large = tokenizer.vocab_size, tokenizer.vocab_size + 40
    prompts = [[1, 2, small + 39, 3], [1, 2, 3]]

    def outputs(config: EngineConfig) -> tuple[list[Outputs], Engine]:
        model = build(replace(model_config(), vocab_size=large)).float()
        engine = Engine(model, replace(CACHE, dtype="float32"), config, tokenizer=tokenizer)
        requests = [engine.add_request(prompt, GREEDY) for prompt in prompts]
        chunks = run_engine(engine)
        return [[chunk.token_id for chunk in chunks[request]] for request in requests], engine

    draft = build(replace(model_config(), vocab_size=small)).float()
    expected, _ = outputs(EngineConfig(native=native))
    actual, engine = outputs(draft_config(draft, native=native))
    assert actual == expected and engine.scheduler.drafter is not None
    assert engine.scheduler.stats().draft_tokens > 0, "the other request's"
    assert engine.scheduler.drafter._knows_tokens(SimpleNamespace(seq_index=0, token_ids=[small])) is False


def test_a_draft_model_proposes_only_tokens_that_the_model_has() -> None:
    tokenizer = train_tokenizer("char", ["abcdefghijklmnopqrstuvwxyz"])
    model, draft = (build(replace(model_config(), vocab_size=size)).float() for size in (10, tokenizer.vocab_size))
    engine = Engine(model, replace(CACHE, dtype="float32"), draft_config(draft), tokenizer=tokenizer)
    proposed: list[int] = []
    drafter = engine.scheduler.drafter
    assert isinstance(drafter, DraftModel)
    propose = drafter.propose

    def recorded(seqs: Sequence[TokenSequence], max_drafts: Sequence[int]) -> list[list[int]]:
        drafts = propose(seqs, max_drafts)
        proposed.extend(token for tokens in drafts for token in tokens)
        return drafts

    drafter.propose = recorded  # type: ignore[method-assign]
    engine.add_request([1, 2, 3], GREEDY)
    run_engine(engine)
    assert proposed and max(proposed) < 10


def test_ngrams_change_nothing() -> None:
    case = repetitive(build(model_config()))
    base, engine = case.run(case.engine()), case.engine(speculative=NGRAM)
    assert_equal(base, case.run(engine), 1e-9)
    assert accepted_and_rejected(engine)
    metrics = [engine.metrics(request) for request in range(len(base))]
    stats = engine.scheduler.stats()
    assert sum(each.num_draft_tokens for each in metrics) == stats.draft_tokens
    assert sum(each.num_accepted_tokens for each in metrics) == stats.accepted_tokens
    num_tokens = sum(map(len, outputs_of(base).values()))
    assert sum(each.num_completion_tokens for each in metrics) == num_tokens
    assert engine.scheduler.drafter is not None and engine.times.draft > 0


def sequence(tokens: Sequence[int]) -> TokenSequence:
    """Return a stand-in with the fields that a drafter of n-grams reads."""
    return cast(TokenSequence, SimpleNamespace(request_id=0, sample_index=0, token_ids=list(tokens)))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2]),  # what followed 1 2
        ([1, 2, 3, 9, 1, 2, 4, 1, 2], [4, 1, 2, 4]),  # the latest of equally long matches
        ([7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2], [3, 9, 1, 2]),  # the longest match
        ([5, 5, 5], [5, 5, 5, 5]),  # a continuation that reaches into itself
        ([3, 1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 3], []),
        ([1, 2], []),
        ([2], []),
    ],
)
def test_the_longest_match_is_continued(tokens: list[int], expected: list[int]) -> None:
    config = SpeculativeConfig("ngram", num_tokens=4, min_match=2)
    assert NgramDrafter(config).propose([sequence(tokens)], [9]) == [expected]
    assert NgramDrafter(config).propose([sequence(tokens)], [2]) == [expected[:2]]
    assert NgramDrafter(config).propose([sequence(tokens)], [0]) == [[]]


def test_the_index_grows_with_the_sequence() -> None:
    """An index that is extended by a few tokens at a time finds what a new one finds."""
    draw, config = random.Random(4), SpeculativeConfig("ngram", num_tokens=6, min_match=2, max_match=5)
    drafter, seq = NgramDrafter(config), sequence([1])
    for _ in range(200):
        seq.token_ids.extend(draw.randrange(4) for _ in range(draw.randint(1, 4)))
        (found,) = drafter.propose([seq], [6])
        assert [found] == NgramDrafter(config).propose([sequence(seq.token_ids)], [6])
        assert bool(found) == (found == slow_continuation(seq.token_ids, config) != [])


def slow_continuation(tokens: list[int], config: SpeculativeConfig) -> list[int]:
    def match(end: int) -> int:
        lengths = range(min(config.max_match, end), config.min_match - 1, -1)
        return next((n for n in lengths if tokens[end - n : end] == tokens[-n:]), 0)

    best = max(range(1, len(tokens)), key=lambda end: (match(end), end))
    copied = list(tokens)
    for i in range(config.num_tokens if match(best) else 0):
        copied.append(copied[best + i])
    return copied[len(tokens) :]


# ---------------------------------------------------------------- the gate


def simulate(gate: DraftGate, num_seqs: int, num_steps: int, with_drafts: tuple[int, float], without: float) -> int:
    """Record steps that take ``without`` seconds for a token, or with drafts seconds for tokens; return those with."""
    count = 0
    for _ in range(num_steps):
        tokens, seconds = with_drafts if gate.is_open else (1, without)
        count += gate.is_open
        gate.record(num_seqs, num_seqs * tokens, seconds)
    return count


def test_drafts_are_proposed_while_they_are_faster() -> None:
    assert simulate(DraftGate(), 1, 1000, (3, 2.0), 1.0) > 950  # 3 tokens in 2 seconds
    assert simulate(DraftGate(), 1, 1000, (3, 4.0), 1.0) < 60
    gate = DraftGate()
    assert simulate(gate, 1, 1000, (3, 2.0), 1.0) > 950
    assert simulate(gate, 8, 1000, (3, 4.0), 1.0) < 60  # each number of sequences has its own measurements
    assert simulate(gate, 1, 1000, (3, 2.0), 1.0) > 950
    assert simulate(gate, 1, 4000, (3, 4.0), 1.0) < 2500, "a change is noticed at the next probe"
    assert simulate(gate, 1, 1000, (3, 4.0), 1.0) < 60


def test_an_engine_stops_drafting_what_is_always_wrong() -> None:
    model = build(model_config())
    case = Case(model, replace(CACHE, max_seq_len=96))
    case.add([1, 2, 3], replace(GREEDY, max_tokens=90))
    engine = case.engine(speculative=SpeculativeConfig())
    calls: list[int] = []

    class Counting(MixedDrafter):
        def propose(self, seqs: Sequence[TokenSequence], max_drafts: Sequence[int]) -> list[list[int]]:
            calls.append(len(seqs))
            return super().propose(seqs, max_drafts)

    outputs = outputs_of(case.run(case.engine()))
    engine.scheduler.drafter = Counting(outputs, wrong=1.0, wrong_tokens=[VOCAB - 1])
    record = engine._record_step
    engine._record_step = lambda output, count, _: record(  # type: ignore[method-assign]
        output, count, 2.0 if output.scheduled[0].draft_token_ids else 1.0
    )
    assert outputs_of(case.run(engine)) == outputs
    assert 10 < len(calls) < 30


# ---------------------------------------------------------------- ends of sequences


def test_a_stop_string_drops_the_accepted_drafts_after_it() -> None:
    """The text, the state that is kept and the counts are those without drafts; a state can be resumed."""
    tokenizer = train_tokenizer("byte", ["x"])
    model = build(replace(model_config(), vocab_size=tokenizer.vocab_size))
    free = Case(model, CACHE, tokenizer=tokenizer)
    free.add(tokenizer.encode("hello"), GREEDY)
    (chunks,) = free.run(free.engine())
    outputs = {(0, 0): [chunk.token_id for chunk in chunks if chunk.token_id is not None]}
    text = "".join(chunk.text for chunk in chunks)
    for start in range(2, 12):
        case = Case(model, CACHE, tokenizer=tokenizer)
        case.add(tokenizer.encode("hello"), replace(GREEDY, stop=(text[start : start + 2],)), keep_state=True)
        engines = case.engine(), case.drafting(MixedDrafter(outputs, wrong=0.0))
        results = [case.run(engine) for engine in engines]
        assert_equal(results[0], results[1], 1e-9)
        assert results[0][0][-1].finish_reason == "stop"
        states = [engine.pop_state(0) for engine in engines]
        assert states[0].tokens == states[1].tokens
        assert engines[0].metrics(0).num_completion_tokens == engines[1].metrics(0).num_completion_tokens


def test_the_error_of_a_draft_ends_the_sequence_where_it_would_without_drafts() -> None:
    model = build(model_config(norm="post"))  # an untied head: the NaN row is not a column of the logits
    case = Case(model, CACHE)
    for prompt in ([1, 2, 3, 4], [5, 6, 7]):
        case.add(prompt, GREEDY)
    outputs = outputs_of(case.run(case.engine()))
    poisoned = outputs[0, 0][7]
    with torch.no_grad():
        model.embedding.tokens.weight[poisoned] = torch.nan
    base, engine = case.run(case.engine()), case.drafting(MixedDrafter(outputs, wrong=0.0))
    assert_equal(base, case.run(engine), 1e-9)
    assert base[0][-1].finish_reason == "error" and 0 < len(base[0]) <= 9


def test_a_function_of_the_tokens_gets_the_accepted_drafts_too() -> None:
    """An exception for tokens that are drafted and rejected is not an error."""
    case = Case(build(model_config()), CACHE)

    def allowed(tokens: Sequence[int]) -> list[int]:
        assert 60 not in tokens, "60 is never allowed"
        return [(31 * tokens[-1] + 7 * len(tokens) + i) % 60 for i in range(9)]

    case.add([1, 2, 3], SamplingParams(max_tokens=30, seed=1, allowed_tokens_fn=allowed))
    case.add([4, 5], replace(GREEDY, allowed_tokens_fn=allowed))
    base = case.run(case.engine())
    engine = case.drafting(MixedDrafter(outputs_of(base), wrong_tokens=[60]))
    assert_equal(base, case.run(engine), 1e-9)
    assert accepted_and_rejected(engine)


def test_structured_outputs_with_drafts_are_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that the grammar does not allow are dropped, and the state after the accepted ones is right."""
    tokenizer = train_tokenizer("byte", [], specials=["eos"])
    model = build(replace(model_config(), vocab_size=tokenizer.vocab_size))
    case = Case(model, CACHE, tokenizer=tokenizer)
    forms: list[dict[str, Any]] = [{"regex": "[a-z]{3,9}( [0-9]{1,3}){2,9}"}, {"json_object": True}]
    for form in (*forms, {"choice": ["yes, of course", "yes, maybe", "no"]}):
        for options in ({"temperature": 0}, {"seed": 3, "n": 2, "top_p": 0.9, "logprobs": 1}):
            sampling = SamplingParams(max_tokens=30, structured_output=StructuredOutput.from_json(form), **options)
            case.add(tokenizer.encode("hello"), sampling)
    case.add(tokenizer.encode("a"), replace(case.requests[0][1], forced_bos_token_id=tokenizer.special_tokens.eos))
    base = case.run(case.engine())
    assert {chunk.finish_reason for chunks in base for chunk in chunks} >= {"stop", "length"}
    engine = case.drafting(MixedDrafter(outputs_of(base)))
    assert_equal(base, case.run(engine), 1e-9)
    assert accepted_and_rejected(engine)
    engine = case.engine(**vars_of(draft_config(noisy(model, 0.02))))
    assert_equal(base, case.run(engine), 1e-9)
    assert accepted_and_rejected(engine)
    monkeypatch.setattr(grammar.MatcherState, "copy", lambda state: state)  # one state for all drafts
    with pytest.raises(AssertionError):
        assert_equal(base, case.run(case.drafting(MixedDrafter(outputs_of(base)))), 1e-9)


def test_a_beam_search_runs_beside_sequences_with_drafts() -> None:
    case = case_of(build(model_config()), replace(CACHE, max_num_seqs=6))
    case.add([9, 8, 7], SamplingParams(num_beams=3, n=2, temperature=0, max_tokens=12))
    base = case.run(case.engine())
    outputs = outputs_of(base)
    engine = case.drafting(MixedDrafter(outputs))
    assert_equal(base, case.run(engine), 1e-9)
    assert engine.metrics(5).num_draft_tokens == 0 and accepted_and_rejected(engine)


def test_a_drafter_that_fails_is_not_used_again(caplog: pytest.LogCaptureFixture) -> None:
    model = build(model_config())
    case = case_of(model, CACHE)
    base, engine = case.run(case.engine()), case.engine(**vars_of(draft_config(noisy(model, 0.02))))
    drafter = engine.scheduler.drafter
    assert isinstance(drafter, DraftModel)
    execute, calls = drafter.runner.execute, list[int]()

    def fail(output: SchedulerOutput) -> torch.Tensor:
        calls.append(0)
        if len(calls) == 6:
            raise RuntimeError("out of memory")
        return execute(output)

    drafter.runner.execute = fail  # type: ignore[method-assign]
    assert_equal(base, case.run(engine), 1e-9)
    assert engine.scheduler.drafter is None and len(calls) == 6 and "drafting failed" in caplog.text


# ---------------------------------------------------------------- the prefix cache, preemption, exactness


def test_published_blocks_hold_no_rejected_draft() -> None:
    """Prompts that contain earlier outputs hit as many blocks as without drafts, and give the same tokens."""
    model = build(model_config())
    case = case_of(model, replace(CACHE, num_blocks=200))
    base = case.engine()
    outputs = outputs_of(case.run(base))
    engine = case.drafting(MixedDrafter(outputs, wrong=0.5))
    case.run(engine)
    engine.scheduler.drafter = None
    for request, (prompt, _, _) in enumerate(case.requests):
        for cut in (3, 9):
            tokens = [*prompt, *outputs[request, 0][:-cut]]
            results = []
            for each in (base, engine, Engine(model, replace(CACHE, enable_prefix_caching=False))):
                number = each.add_request(tokens, replace(GREEDY, logprobs=2))
                (chunks,) = run_engine(each).values()
                results.append(([plain(chunk) for chunk in chunks], logprobs(chunks), each.metrics(number)))
            assert results[0][0] == results[1][0] == results[2][0]
            assert results[1][1] == pytest.approx(results[2][1], abs=1e-9, rel=0)
            assert results[0][2].num_cached_tokens == results[1][2].num_cached_tokens > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_deterministic_engine_has_the_same_bits_with_drafts(dtype: str) -> None:
    model = build(model_config(), dtype=getattr(torch, dtype))
    config = EngineConfig(max_num_batched_tokens=40, deterministic=True)
    assert accepted_and_rejected(case_of(model, replace(CACHE, dtype=dtype), config).compare(tolerance=0.0))


def test_drafts_preempt_no_sequence() -> None:
    """A pool that has just enough blocks: drafts are dropped before a sequence is preempted."""
    cache = replace(CACHE, num_blocks=2 * 8, max_num_seqs=2, enable_prefix_caching=False)
    case = Case(build(model_config()), cache)
    for prompt in ([1, 2, 3], [4, 5, 6]):
        case.add(prompt, SamplingParams(temperature=0, max_tokens=30))  # 32 tokens, 8 blocks each
    base = case.engine()
    outputs = outputs_of(case.run(base))
    engine = case.drafting(MixedDrafter(outputs, wrong=0.5))
    case.run(engine)
    assert base.scheduler.stats().preemptions == engine.scheduler.stats().preemptions == 0


def test_drafts_take_half_of_the_tokens_of_a_step() -> None:
    """So that prompts are read while other sequences decode."""
    case = case_of(build(model_config()), CACHE, EngineConfig(max_num_batched_tokens=12))
    base = case.run(case.engine())
    engine = case.drafting(MixedDrafter(outputs_of(base), wrong=0.0))
    sizes: list[tuple[int, int]] = []
    execute = engine.runner.execute

    def record(output: SchedulerOutput) -> torch.Tensor:
        drafts = sum(len(scheduled.draft_token_ids) for scheduled in output.scheduled)
        sizes.append((drafts, sum(scheduled.num_tokens for scheduled in output.scheduled)))
        return execute(output)

    engine.runner.execute = record  # type: ignore[method-assign]
    assert_equal(base, case.run(engine), 1e-9)
    assert 0 < max(drafts for drafts, _ in sizes) <= 5 and max(num_tokens for _, num_tokens in sizes) <= 12


# ---------------------------------------------------------------- the distribution


def test_sampled_tokens_are_distributed_as_the_model_says() -> None:
    """Frequencies of pairs against the exact probabilities of the uncached model; without drafts the pairs are the
    same.
    """
    model, options = build(model_config()), {"temperature": 0.7, "top_k": 3}
    case, prompt, count = Case(model, replace(CACHE, max_num_seqs=64), EngineConfig()), [3, 1, 4], 2048
    for seed in range(count // 128):
        case.add(prompt, SamplingParams(max_tokens=3, n=128, seed=seed, **options))
    engine = case.engine(**vars_of(draft_config(noisy(model, 0.05))))
    outputs = outputs_of(case.run(engine))
    assert accepted_and_rejected(engine)
    assert outputs == outputs_of(case.run(case.engine()))
    expected = {
        (a, b): p * q
        for a, p in probabilities(model, prompt, **options)
        for b, q in probabilities(model, [*prompt, a], **options)
    }
    counts = Counter((tokens[0], tokens[1]) for tokens in outputs.values())
    assert counts.keys() <= expected.keys() and len(expected) == 9
    assert chi_square(counts, expected) < 26.1, "above it once in 1000 draws with 8 degrees of freedom"
    flatter = Counter({pair: round(count * p**0.8) for pair, p in expected.items()})
    assert chi_square(flatter, expected) > 26.1, "another distribution is not noticed"


def chi_square(counts: Counter[tuple[int, int]], expected: dict[tuple[int, int], float]) -> float:
    total = counts.total()
    return sum((counts[pair] - total * p) ** 2 / (total * p) for pair, p in expected.items())


def vars_of(config: EngineConfig) -> dict[str, Any]:
    return {"speculative": config.speculative, "draft_model": config.draft_model}


def probabilities(model: Transformer, tokens: list[int], temperature: float, top_k: int) -> list[tuple[int, float]]:
    values, ids = (uncached(model, tokens)[-1] / temperature).topk(top_k)
    return list(zip(ids.tolist(), values.softmax(dim=-1).tolist(), strict=True))


# ---------------------------------------------------------------- broken on purpose


def test_a_sampler_that_accepts_every_draft_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept_all(results: Sequence[SequenceOutput], drafts: Sequence[tuple[int, ...]]) -> list[SequenceOutput]:
        merged, start = [], 0
        for tokens in drafts:
            stop = start + 1 + len(tokens)
            merged.append(results[start]._replace(next_outputs=tuple(results[start + 1 : stop])))
            start = stop
        return merged

    monkeypatch.setattr(sampler, "_accept_drafts", accept_all)
    with pytest.raises(AssertionError):
        case_of(build(model_config()), CACHE).compare()


def test_a_sampler_without_the_drafts_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws, penalties and bans behind a draft depend on it."""
    monkeypatch.setattr(sampler, "_with_each_draft", lambda seq, drafts: [seq] * (1 + len(drafts)))
    with pytest.raises(AssertionError):
        case_of(build(model_config()), CACHE).compare()


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("ngrams", "speculative.method: "),
        ("ngram:0", "speculative.num_tokens: "),
        ("ngram:x", "speculative.num_tokens: "),
        ("draft", "speculative.draft_model: must be given"),
        ({"method": "ngram", "draft_model": "x"}, "speculative.draft_model: must be given"),
        ({"min_match": 5, "max_match": 3}, "speculative.max_match: must be at least min_match"),
        ({"num_token": 3}, "unknown option 'num_token'"),
    ],
)
def test_invalid_options_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.from_options(value)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_options_are_read_from_text() -> None:
    assert SpeculativeConfig.from_options("ngram:7") == SpeculativeConfig(num_tokens=7)
    assert SpeculativeConfig.from_options({"method": "draft", "draft_model": "x"}).method == "draft"  # type: ignore[union-attr]
    assert SpeculativeConfig.from_options(None) is None


def test_engines_that_cannot_draft_refuse_it() -> None:
    model, speculative = build(model_config()), EngineConfig(speculative=SpeculativeConfig())
    with pytest.raises(ConfigError, match=r"speculative: policy .* ranks tokens by the attention"):
        Engine(model, replace(CACHE, policy="heavy-hitters(8, interval=4)"), speculative)
    with pytest.raises(ConfigError, match="speculative: an encoder generates no tokens"):
        Engine(build(encoder_config()), CacheConfig(max_seq_len=64), speculative)
    with pytest.raises(ConfigError, match="same vocabulary"):
        Engine(model, CACHE, draft_config(build(replace(model_config(), vocab_size=VOCAB + 1))))
    with pytest.raises(ConfigError, match="must be decoders"):
        Engine(build(pair_config()), replace(CACHE, max_source_len=64), draft_config(model))
    with pytest.raises(ConfigError, match=r"requires EngineConfig\(draft_model"):
        Engine(model, CACHE, replace(draft_config(model), draft_model=None))
