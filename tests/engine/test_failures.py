"""Errors stay local: exceptions, Ctrl-C, threads, finalizers, packed weights in training."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace

import pytest
import torch

from kvad.cache.config import CacheConfig
from kvad.engine.execution import sampler
from kvad.engine.execution.sampler import sample_outputs
from kvad.engine.output import OutputTextStream
from kvad.engine.scheduling.request import SamplingParams
from kvad.engine.scheduling.sequence import SchedulerOutput
from kvad.errors import EngineError, KvadError, RequestError
from kvad.llm import LLM
from kvad.model.no_cache import NoCache
from kvad.model_input import ModelInput, SubBatch
from kvad.text.tokenizer import train_tokenizer
from tests.support.driver import uncached
from tests.support.random_models import VOCAB, build, model_config

CACHE = CacheConfig(dtype="float64", max_num_seqs=4, max_seq_len=96, block_size=4)
OPTIONS = {"temperature": 0, "max_tokens": 12}


def make(heads: str = "gqa", tokenizer: object = None) -> LLM:
    return LLM(build(model_config(heads=heads)), tokenizer, CACHE)  # type: ignore[arg-type]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["model", "sampler"])
def test_an_exception_in_a_step_ends_only_its_sequences(
    monkeypatch: pytest.MonkeyPatch, failure: type[BaseException], where: str
) -> None:
    llm = make()
    expected = llm.generate([1, 2, 3], **OPTIONS).tokens

    def raise_once(*_: object) -> None:
        monkeypatch.undo()
        raise failure("now")

    with monkeypatch.context():
        if where == "model":
            monkeypatch.setattr(llm.engine.runner, "execute", raise_once)
        else:
            monkeypatch.setattr(sampler, "sample_tokens", raise_once)
        with pytest.raises(failure):
            llm.generate([1, 2, 3], **OPTIONS)
    assert llm.generate([1, 2, 3], **OPTIONS).tokens == expected
    llm.engine.scheduler.check()
    assert llm.engine.idle and not llm.client._chunk_queues


@pytest.mark.parametrize("first", [0, 4, 13])
@pytest.mark.parametrize("n", [1, 2])
def test_a_failed_step_ends_only_the_request_at_fault(monkeypatch: pytest.MonkeyPatch, n: int, first: int) -> None:
    """Steps with a token of one prompt from position ``first`` on fail: in a chunk of the prompt, or behind it.

    All requests are recomputed one after the other, each to its end.
    """
    llm = LLM(build(model_config()), None, replace(CACHE, prefill_chunk_size=4))
    prompts = [[4, 5, 6], [7, 8], [9, 4, 4, 4, 4, 2]]
    expected = [llm.generate(prompt, temperature=0, max_tokens=30).tokens for prompt in prompts]
    execute = llm.engine.runner.execute

    def fail(output: SchedulerOutput) -> torch.Tensor:
        if any(each.sequence.token_ids[:3] == [1, 2, 3] and each.start >= first for each in output.scheduled):
            raise RuntimeError("now")
        return execute(output)

    monkeypatch.setattr(llm.engine.runner, "execute", fail)
    streams = [llm.stream(prompt, temperature=0, max_tokens=30) for prompt in prompts]
    tokens = [[next(stream).token_id] for stream in streams]
    at_fault = llm.stream([1, 2, 3] * 3 + [1, 2], temperature=1, max_tokens=12, n=n, seed=1)
    with pytest.raises((RuntimeError, EngineError), match="now"):
        list(at_fault)
    for given, stream in zip(tokens, streams, strict=True):
        given += [chunk.token_id for chunk in stream]
    assert [tuple(given) for given in tokens] == expected
    llm.engine.scheduler.check()
    assert llm.engine.idle and llm.engine.kv_cache_manager.stats().used == (0,)


def test_a_failed_step_of_a_lossy_cache_ends_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their evicted tokens cannot be recomputed."""
    llm = LLM(build(model_config()), None, replace(CACHE, policy="heavy-hitters(16)"))
    stream = llm.stream([4, 5, 6], temperature=0, max_tokens=30)
    next(stream)

    def raise_once(*_: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("now")

    monkeypatch.setattr(llm.engine.runner, "execute", raise_once)
    with pytest.raises(RuntimeError):
        llm.generate([1, 2, 3], **OPTIONS)
    with pytest.raises(EngineError, match="the step failed: RuntimeError: now"):
        list(stream)


def test_a_token_unknown_to_the_tokenizer_fails_its_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler never chooses one; here it does."""
    monkeypatch.setattr("kvad.engine.engine.sample_outputs", lambda output, logits, *_: sample_outputs(output, logits))
    tokenizer = train_tokenizer("char", ["abcdefghijklmnopqrstuvwxyz"])
    llm = make(tokenizer=tokenizer)
    unknown = tokenizer.vocab_size + 1
    assert unknown < VOCAB
    known = dict.fromkeys(range(tokenizer.vocab_size, VOCAB), -1000.0)
    alone = llm.generate("abc", **OPTIONS, logit_bias=known)
    stream = llm.stream("abc", **OPTIONS, logit_bias=known)
    chunks = [next(stream)]
    with pytest.raises(EngineError, match=str(unknown)):
        llm.generate("xyz", **OPTIONS, logit_bias={unknown: 1000.0})
    chunks += list(stream)
    assert "".join(chunk.text for chunk in chunks) == alone.text
    assert tuple(chunk.token_id for chunk in chunks if chunk.token_id is not None) == alone.tokens
    llm.engine.scheduler.check()


def test_a_stream_collected_in_the_middle_of_a_step_does_not_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    knot: list[object] = [llm.stream([4, 5, 6], temperature=0, max_tokens=8)]
    next(knot[0])  # type: ignore[call-overload]
    knot.append(knot)
    del knot
    real = llm.engine.runner.execute

    def run(plan: object) -> torch.Tensor:
        monkeypatch.setattr(llm.engine.runner, "execute", real)  # once: a collection takes a second here
        gc.collect()
        return real(plan)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.engine.runner, "execute", run)
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(llm.generate([1, 2, 3], **OPTIONS)), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert done and llm.engine.idle


def test_a_trace_during_generation_has_only_its_text() -> None:
    llm = make()
    expected = llm.trace([5, 6, 7, 8], layers=[0, 1])
    thread = threading.Thread(target=lambda: llm.generate([1, 2, 3], temperature=0, max_tokens=60))
    thread.start()
    while thread.is_alive():
        seen = llm.trace([5, 6, 7, 8], layers=[0, 1])
        for layer in (0, 1):
            assert torch.equal(seen.layers[layer].hidden, expected.layers[layer].hidden)
    thread.join()


def test_a_rejected_request_leaves_nothing() -> None:
    llm = make(tokenizer=train_tokenizer("char", ["abcdefghijklmnopqrstuvwxyz"]))
    for options in (
        {"stop": "ab"},
        {"stop": ("",)},
        {"stop_token_ids": 5},
        {"stop_token_ids": ("a",)},
        {"bad_words_ids": (5,)},
        {"logit_bias": [1]},
    ):
        with pytest.raises(RequestError):
            llm.generate([1, 2], max_tokens=4, **options)
    for prompt in ([1.7, 2], [[1.5]]):
        with pytest.raises(RequestError, match="token ids"):
            llm.generate(prompt, max_tokens=4)
    assert llm.engine.idle and not llm.client._chunk_queues


def test_tensors_and_arrays_are_token_ids() -> None:
    llm = make()
    expected = llm.generate([1, 2, 3], **OPTIONS).tokens
    assert llm.generate(torch.tensor([1, 2, 3]), **OPTIONS).tokens == expected
    assert [done.tokens for done in llm.generate(torch.tensor([[1, 2, 3]]).numpy(), **OPTIONS)] == [expected]


def test_a_stop_token_is_not_part_of_the_text() -> None:
    letters = train_tokenizer("char", ["abcdefghijklmnopqrstuvwxyz"])
    llm = LLM(build(replace(model_config(), vocab_size=letters.vocab_size)), letters, CACHE)
    full_text = llm.generate("abc", temperature=0, max_tokens=20, ignore_eos=True)
    middle = full_text.tokens[4]
    first = full_text.tokens.index(middle)
    stopped = llm.generate("abc", temperature=0, max_tokens=20, stop_token_ids=(middle,), ignore_eos=True)
    assert stopped.tokens == full_text.tokens[: first + 1] and stopped.finish_reason == "stop"
    assert stopped.text == letters.decode(full_text.tokens[:first])
    text = llm.generate("abc", temperature=0, max_tokens=20, min_tokens=9, stop=(full_text.text[0],), ignore_eos=True)
    assert len(text.tokens) >= 10 or text.finish_reason == "length"


def test_a_stop_string_is_matched_after_min_tokens() -> None:
    letters = train_tokenizer("char", ["abc"])
    stream = OutputTextStream(letters, SamplingParams(min_tokens=3, stop=("c",)))
    chunks = [stream.push(token) for token in letters.encode("abcbc")]
    assert chunks == [("a", False), ("b", False), ("c", False), ("b", False), ("", True)]


def test_closing_is_an_error_in_a_waiting_thread() -> None:
    llm = make()
    errors: list[KvadError] = []

    def generate_repeatedly() -> None:
        try:
            for _ in range(50):
                llm.generate([1, 2, 3], temperature=0, max_tokens=60)
        except KvadError as error:
            errors.append(error)

    thread = threading.Thread(target=generate_repeatedly)
    thread.start()
    llm.close()
    thread.join(timeout=60)
    assert not thread.is_alive() and errors and "closed" in str(errors[0])
    for call in (llm.logits, llm.trace, llm.generate, llm.score):
        with pytest.raises(EngineError, match="closed"):
            call([1, 2, 3])


@pytest.mark.parametrize("heads", ["gqa", "mha"])
def test_a_served_model_can_be_trained(heads: str) -> None:
    """The engine packs weights, but every parameter has a gradient, and a new bias has an effect."""
    llm = make(heads)
    model = llm.model
    every = torch.arange(6)
    step = ModelInput(every + 1, every, (SubBatch(1, 6, 6),), every)
    model.logits(model(step, NoCache(model.config)), every).square().sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]
    if heads == "mha":
        before = uncached(model, [1, 2, 3])
        bias = model.decoder.layers[0].attention.q
        bias.bias = torch.nn.Parameter(bias.bias.data + 1.0)
        assert (uncached(model, [1, 2, 3]) - before).abs().max() > 1e-3
