"""Speculative decoding: requests get the same tokens as without drafts, whatever is drafted.

``MixedDrafter`` is given the right tokens and mixes wrong ones in, so that drafts are accepted and rejected at every
offset. Outputs of a model in float64 are compared chunk by chunk with those of an engine without drafts.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.engine import Engine, StreamChunk
from kvad.engine.execution import DraftModel
from kvad.engine.options import EngineConfig
from kvad.engine.scheduling import SamplingParams, SpeculativeConfig, TokenSequence
from kvad.model.transformer import Transformer
from tests.support.driver import run_engine
from tests.support.random_models import SOURCE_VOCAB, VOCAB, build, model_config, pair_config

CACHE = CacheConfig(dtype="float64", max_num_seqs=4, max_seq_len=64, block_size=4, prefill_chunk_size=8)
NGRAM = SpeculativeConfig("ngram", num_tokens=4, min_match=1)
Outputs = dict[tuple[int, int], list[int]]  # generated tokens by request and sample


class MixedDrafter:
    """Drafts the right tokens, each of them wrong with probability 1/4."""

    def __init__(self, outputs: Outputs, seed: int = 0, wrong: float = 0.25) -> None:
        self.outputs, self.random, self.wrong = outputs, random.Random(seed), wrong

    def propose(self, seqs: Sequence[TokenSequence], max_drafts: Sequence[int]) -> list[list[int]]:
        drafts = []
        for seq, limit in zip(seqs, max_drafts, strict=True):
            right = self.outputs[seq.request_id, seq.sample_index]
            count = self.random.randint(0, min(limit, 5)) if limit > 0 else 0
            assert right[: seq.num_generated_tokens] == seq.token_ids[seq.num_prompt_tokens :]
            tokens = right[seq.num_generated_tokens : seq.num_generated_tokens + count]
            tokens += [0] * (count - len(tokens))  # beyond the end: the sequence ends before they are reached
            drafts.append([self.random.randrange(VOCAB) if self.random.random() < self.wrong else t for t in tokens])
        return drafts


class Case:
    """Requests for one model and cache, run with and without drafts."""

    def __init__(self, model: Transformer, cache: CacheConfig, config: EngineConfig | None = None) -> None:
        self.model, self.cache, self.config = model, cache, config or EngineConfig(max_num_batched_tokens=40)
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

    def compare(self, config: SpeculativeConfig | None = None, seed: int = 0, *, exact: bool = False) -> Engine:
        """Run both engines and compare every chunk; return the speculative engine."""
        base = self.run(Engine(self.model, self.cache, self.config))
        speculative = replace(self.config, speculative=config or SpeculativeConfig())
        engine = Engine(self.model, self.cache, speculative)
        if config is None:
            engine.scheduler.drafter = MixedDrafter(outputs_of(base), seed)
        assert_equal(base, self.run(engine), 0.0 if exact else 1e-9)
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


@pytest.mark.parametrize("name", CACHES)
def test_drafts_change_nothing_in_any_cache(name: str) -> None:
    engine = case_of(build(model_config()), replace(CACHE, **CACHES[name])).compare()
    assert accepted_and_rejected(engine)
    assert ("tight" in name) <= (engine.scheduler.stats().preemptions > 0)


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
    speculative = SpeculativeConfig("draft", num_tokens, draft_model="a model")
    return EngineConfig(max_num_batched_tokens=40, speculative=speculative, draft_model=model, **options)


@pytest.mark.parametrize("name", ["paged", "tight", "sinks-contiguous", "small-chunks", "int8"])
def test_a_draft_model_changes_nothing(name: str) -> None:
    model = build(model_config())
    case = case_of(model, replace(CACHE, **CACHES[name]))
    base = case.run(Engine(model, case.cache, case.config))
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
    base = case.run(Engine(model, CACHE, case.config))
    engine = Engine(model, CACHE, draft_config(model))
    assert_equal(base, case.run(engine), 1e-9)
    stats = engine.scheduler.stats()
    num_ends = len(OPTIONS) + 1  # a draft that ends a sample is its last token: nothing follows it
    assert stats.accepted_tokens > 50 and stats.accepted_tokens >= stats.draft_tokens - num_ends
