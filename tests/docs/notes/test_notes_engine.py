"""Statements of the notes on generation, streams and reuse (001, 002, 004 sections 3.3, 4.8), tested on the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvad.cache.config import CacheConfig
from kvad.config import layers as cfg
from kvad.engine import Engine, StreamChunk
from kvad.engine.scheduling.request import SamplingParams
from kvad.errors import RequestError, TokenizerError
from kvad.llm import LLM
from kvad.model.transformer import Transformer
from kvad.text.simple_tokenizers import ByteTokenizer, WordTokenizer

Build = Callable[..., Transformer]
Hidden = Callable[..., Tensor]
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def engine_of(model: Transformer, **cache: Any) -> Engine:
    fields: dict[str, Any] = {"max_seq_len": 64, "max_num_seqs": 4, "block_size": 4, "dtype": "float64"}
    return Engine(model, CacheConfig(**(fields | cache)))


def run(engine: Engine, *requests: int) -> dict[int, list[StreamChunk]]:
    pieces: dict[int, list[StreamChunk]] = {request: [] for request in requests}
    while not engine.idle:
        for piece in engine.step():
            pieces[piece.request].append(piece)
    return pieces


def tokens_of(pieces: list[StreamChunk]) -> list[int]:
    return [piece.token_id for piece in pieces if piece.token_id is not None]


def greedy(model: Transformer, hidden: Hidden, prompt: list[int], count: int) -> list[int]:
    """001, Key-Value Cache: append the new token and recompute everything."""
    text = list(prompt)
    for _ in range(count):
        states = hidden(model, torch.tensor(text))
        with torch.inference_mode():
            text.append(int(model.logits(states, torch.tensor([len(text) - 1])).argmax()))
    return text[len(prompt) :]


def test_only_prefixes_are_reused(build: Build, hidden: Hidden) -> None:
    """001: "IFF the whole input is the same except for the last part": the longest equal prefix of any sequence."""
    model = build(position=cfg.RopeConfig())
    engine, shared = engine_of(model), list(range(1, 13))
    prompts = [[*shared, 13, 14], [*shared, 20, 21, 22, 23, 24, 25], [*shared[:6], 30, *shared[7:]], [31, *shared]]
    cached = []
    for prompt in prompts:
        request = engine.add_request(prompt, GREEDY)
        assert tokens_of(run(engine, request)[request]) == greedy(model, hidden, prompt, 6)
        cached.append(engine.metrics(request).num_cached_tokens)
    assert cached == [0, 12, 4, 0]  # blocks of 4: full ones up to the first difference; a shifted text shares nothing


def test_a_step_samples_one_token_and_the_next_step_reads_it(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """001: "output[-1] is appended" is the token sampled from its logits; one per sequence and step."""
    model = build(position=cfg.RopeConfig())
    engine, inputs, weights = engine_of(model), list[list[int]](), [x.detach().clone() for x in model.parameters()]
    forward = Transformer.forward

    def record(self: Transformer, model_input: Any, cache: Any) -> Tensor:
        assert not torch.is_grad_enabled()
        inputs.append(model_input.token_ids.tolist())
        return forward(self, model_input, cache)

    monkeypatch.setattr(Transformer, "forward", record)
    for prompt in ([1, 2, 3], [4, 5]):
        engine.add_request(prompt, GREEDY)
    steps = list[dict[int, int]]()
    while not engine.idle:
        pieces = [piece for piece in engine.step() if piece.token_id is not None]
        steps.append({piece.request: piece.token_id for piece in pieces if piece.token_id is not None})
        assert len(steps[-1]) == len(pieces) == 2
    assert len(steps) == GREEDY.max_tokens and sorted(inputs[0]) == sorted([1, 2, 3, 4, 5])
    assert [sorted(read) for read in inputs[1:]] == [sorted(step.values()) for step in steps[:-1]]
    assert all(torch.equal(*pair) for pair in zip(weights, model.parameters(), strict=True))  # frozen, no gradients
    assert all(x.grad is None for x in model.parameters())


def test_generation_ends_at_the_stop_token(build: Build, hidden: Hidden) -> None:
    """001, Input & Output; 002, the decoder: until END, or without one until the limit; the finish reason names it."""
    model = build(position=cfg.RopeConfig())
    expected = greedy(model, hidden, [1, 2, 3], 6)
    stop = expected[3]
    engine = engine_of(model)
    request = engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=6, stop_token_ids=(stop,)))
    pieces = run(engine, request)[request]
    assert tokens_of(pieces) == expected[: expected.index(stop) + 1] and pieces[-1].finish_reason == "stop"
    request = engine.add_request([1, 2, 3], GREEDY)
    pieces = run(engine, request)[request]
    assert tokens_of(pieces) == expected and pieces[-1].finish_reason == "length"


def test_empty_prompt_begins_with_the_document_token(build: Build) -> None:
    """000 section 1.3: generation may begin with only a start token; 002: the first input is BOS."""
    tokenizer, cache = ByteTokenizer(), CacheConfig(max_seq_len=64, max_num_seqs=1, dtype="float64")
    opening = tokenizer.special_tokens.separator
    assert opening is not None
    with LLM(build(vocab=tokenizer.vocab_size), tokenizer, cache) as llm:
        one, other = (llm.generate(p, temperature=0, max_tokens=4, ignore_eos=True) for p in ("", [opening]))
        assert len(one.tokens) == 4 and one.tokens == other.tokens
    with LLM(build(), None, cache) as llm, pytest.raises(RequestError, match="no opening token"):
        llm.generate([[]])


def test_unknown_word_becomes_unk(capsys: pytest.CaptureFixture[str]) -> None:
    """002: a word outside the vocabulary is UNK, with a note on stderr, or an error that names the word."""
    tokenizer = WordTokenizer(["a", "kid"])
    a, unk, kid = tokenizer.encode("a golem kid")
    assert unk == tokenizer.special_tokens.unk and len({a, unk, kid}) == 3
    assert "'golem'" in capsys.readouterr().err
    tokenizer.on_unknown = "error"
    with pytest.raises(TokenizerError, match="golem"):
        tokenizer.encode("a golem kid")


def test_context_window_error_has_both_numbers(build: Build) -> None:
    """001, Input & Output: n is at most the context window; beyond it an error has both numbers, nothing is cut."""
    engine = engine_of(build(limit=20), max_seq_len=20)
    request = engine.add_request(list(range(1, 18)), SamplingParams(temperature=0, ignore_eos=True))
    assert len(tokens_of(run(engine, request)[request])) == 3
    with pytest.raises(RequestError, match=r"at most 20 .*got 21"):
        engine.add_request([1] * 21, GREEDY)


def test_ended_streams_free_their_blocks(build: Build, hidden: Hidden) -> None:
    """004 section 4.8: no mask is needed for an ended stream; the others continue unchanged."""
    model = build(position=cfg.RopeConfig())
    engine = engine_of(model, enable_prefix_caching=False)
    (pool,) = engine.kv_cache_manager.pools
    short = engine.add_request([9, 8, 7, 6, 5], SamplingParams(temperature=0, max_tokens=1))
    long = engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=12))
    engine.step()
    assert (
        engine.metrics(short).num_completion_tokens == 1 and pool.num_live == 1
    )  # the prompt of 3; the other's 2 blocks are free
    assert tokens_of(run(engine, short, long)[long]) == greedy(model, hidden, [1, 2, 3], 12)[1:]
    assert pool.num_free == pool.total


def test_long_sequence_does_not_lengthen_other_reads(build: Build) -> None:
    """004 section 4.8: group streams by length; a sub-batch reads what its sequences need."""
    engine = engine_of(build(limit=1024), max_seq_len=1024, prefill_chunk_size=1024)
    for prompt in ([1] * 900, [2] * 5, [3] * 6, [4] * 7):
        engine.add_request(prompt, GREEDY)
    engine.step()
    plan = engine.scheduler.schedule()
    assert plan is not None
    reads = sorted((sub_batch.num_seqs, sub_batch.num_read_slots) for sub_batch in plan.sub_batches)
    assert [rows for rows, _ in reads] == [1, 3]
    assert reads[0][1] >= 901 and reads[1][1] <= 64


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_window_layer_stores_only_its_window(layout: str, build: Build, hidden: Hidden) -> None:
    """004 sections 3.3 and 4.14: local attention needs only recent keys, and its pool has no room for more."""
    model = build(position=cfg.RopeConfig(), window=8)
    engine = engine_of(model, layout=layout, max_num_seqs=1, prefill_chunk_size=4, enable_prefix_caching=False)
    (group,) = engine.kv_cache.groups
    assert group.num_usable_blocks * group.block_size <= 8 + 4 - 1 + 2 * 4 < 64
    request = engine.add_request(list(range(1, 20)), SamplingParams(temperature=0, max_tokens=30))
    assert tokens_of(run(engine, request)[request]) == greedy(model, hidden, list(range(1, 20)), 30)
