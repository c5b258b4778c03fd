"""Encoder inputs in a real engine: encoded once, shared by sequences, never confused; and encoder-only models.

The product of layouts, dtypes, positions and scheduling is in ``tests/cache/test_cached_equals_uncached.py``, whose
driver this file uses. Tested here: merging of encoder inputs and its failures, and separate encoder inputs per request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvad.cache.config import CacheConfig
from kvad.cache.device.kv_cache import KVCache
from kvad.config import layers as cfg
from kvad.engine import Engine, EngineConfig
from kvad.engine.execution import model_runner
from kvad.engine.scheduling.request import SamplingParams, SequenceOutput
from kvad.engine.scheduling.sequence import SchedulerOutput
from kvad.errors import ConfigError, KvadError, RequestError
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.model_input import ModelInput, SubBatch
from tests.support.driver import Run, Stream, drive, fresh_step, run_engine, tokens_of, uncached, worst
from tests.support.random_models import (
    LIMIT,
    SOURCE_LIMIT,
    SOURCE_VOCAB,
    VOCAB,
    build,
    encoder_config,
    model_config,
    pair_config,
)

EXACT = 1e-10
LAYOUTS = ("paged", "contiguous")


def text(length: int, seed: int = 0, vocab: int = SOURCE_VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(vocab, (length,), generator=generator).tolist()


def cache(layout: str = "paged", **more: object) -> CacheConfig:
    fixed = {
        "dtype": "float64",
        "block_size": 4,
        "max_num_seqs": 6,
        "max_seq_len": 60,
        "prefill_chunk_size": 16,
        "max_source_len": 40,
    }
    return CacheConfig(layout=layout, **(fixed | more))  # type: ignore[arg-type]


def greedy(new: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=new, temperature=0, **more)  # type: ignore[arg-type]


def unowned(engine: Engine) -> bool:
    return all(pool.num_live == 0 for pool in engine.kv_cache_manager.pools)


# ---------------------------------------------------------------- sequences of one encoder input


def translations(samples: int = 3) -> list[Stream]:
    """Requests of several samples each, so that runs of equal length stand side by side."""
    return [
        Stream(text(5, i, VOCAB), [text(6, 10 * i + j, VOCAB) for j in range(samples)], source=text(9 + 2 * i, i))
        for i in range(2)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("samples", [2, 3])
def test_sequences_of_one_encoder_input_are_one_row_of_cross_attention(layout: str, samples: int) -> None:
    model, streams = build(pair_config("alibi", "pre", "gqa")), translations(samples)
    run = drive(model, cache(layout), streams)
    assert worst(model, streams, run) <= EXACT
    assert run.merged_cross_steps >= 4 and run.encodings == 1


def plans(engine: Engine) -> list[SchedulerOutput]:
    """Every plan of decoder tokens until the engine is idle."""
    seen: list[SchedulerOutput] = []
    real = engine.runner.execute

    def run(plan: SchedulerOutput) -> Tensor:
        seen.append(plan)
        return real(plan)

    engine.runner.execute = run  # type: ignore[method-assign]
    run_engine(engine)
    return seen


def test_cross_attention_sub_batches_match_those_of_the_step() -> None:
    """The step's tokens, cut otherwise; where runs of a request are not equally long, nothing is folded."""
    engine = Engine(build(pair_config()), cache())
    for samples, new, source in ((3, 6, text(9)), (2, 9, text(30, 1)), (1, 3, text(4, 2))):
        engine.add_request([1, 2], greedy(new, n=samples), encoder_token_ids=source)
    shapes = set()
    for plan in plans(engine):
        assert plan.cross_sub_batches is not None
        for sub_batch, cross in zip(plan.sub_batches, plan.cross_sub_batches, strict=True):
            assert sub_batch.num_seqs * sub_batch.num_new_tokens == cross.num_seqs * cross.num_new_tokens
        shapes.add(
            tuple(
                (sub_batch.num_seqs, cross.num_seqs)
                for sub_batch, cross in zip(plan.sub_batches, plan.cross_sub_batches, strict=True)
            )
        )
    assert any(rows > cross for shape in shapes for rows, cross in shape), shapes
    assert any(rows == cross > 1 for shape in shapes for rows, cross in shape), shapes


def test_reading_another_encoder_input_changes_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    real = model_runner._write_tables

    def wrong(tables: Sequence[Any], blocks: Sequence[Sequence[int]]) -> None:
        real(tables, blocks[::-1] if max(table.stride for table in tables) > 1 else blocks)

    model = build(pair_config("alibi", "pre", "gqa"))
    streams = translations()
    monkeypatch.setattr(model_runner, "_write_tables", wrong)
    assert not worst(model, streams, drive(model, cache(), streams)) <= 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_clearing_a_shorter_source_sees_the_longer_one_before_it(
    monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """A contiguous block is read up to the longest encoder input of the sub-batch."""
    model = build(pair_config("rope", "pre", "gqa"))
    streams = [Stream([3, 4], [[5, 6, 7]], source=text(length, length)) for length in (39, 38, 40, 5)]
    config = cache(layout, max_num_seqs=2, enable_prefix_caching=False)
    assert worst(model, streams, drive(model, config, streams)) <= EXACT
    monkeypatch.setattr(KVCache, "clear", lambda *_: None)
    assert not worst(model, streams, drive(model, config, streams, poison=False)) <= 1e-3


# ---------------------------------------------------------------- which sources are one


def test_equal_targets_of_two_encoder_inputs_share_no_blocks() -> None:
    model, target = build(pair_config("learned")), text(17, vocab=VOCAB)
    ends = ([[1, 2, 3]], [[1, 2, 3]])
    sources = text(13), [*text(13)[:-1], (text(13)[-1] + 1) % SOURCE_VOCAB]
    streams = [Stream(target, end, 1000 * i, source) for i, (end, source) in enumerate(zip(ends, sources, strict=True))]
    run = drive(model, cache(), streams)
    assert worst(model, streams, run) <= EXACT
    assert run.hit_tokens == 0 and run.encoded == 26
    assert all((run.logits[0, 0][at] - run.logits[1, 0][at]).abs().max() > 1e-3 for at in run.logits[0, 0])


@pytest.mark.parametrize("salts", [("", ""), ("", "x")])
def test_an_equal_source_is_encoded_once(salts: tuple[str, str]) -> None:
    """While it is in use and when it is only cached; unless the salts differ."""
    engine = Engine(build(pair_config()), cache(max_source_len=24))
    source, target = text(21), text(9, vocab=VOCAB)
    results, computed = [], []
    for salt in salts:
        request = engine.add_request(target, greedy(4), encoder_token_ids=source, cache_salt=salt)
        before = engine.scheduler.stats().tokens
        results.append(tokens_of(run_engine(engine)[request]))
        computed.append(engine.scheduler.stats().tokens - before)
    assert results[0] == results[1]
    assert computed[0] == 21 + 9 + 3
    assert computed[1] == (1 + 3 if salts[0] == salts[1] else computed[0])


def test_a_running_request_shares_its_encoder_input() -> None:
    engine = Engine(build(pair_config()), cache())
    first = engine.add_request([1, 2, 3], greedy(8), encoder_token_ids=text(21))
    for _ in range(3):
        engine.step()
    before = engine.scheduler.stats().tokens
    second = engine.add_request([4, 5], greedy(8), encoder_token_ids=text(21))
    chunks_by_request = run_engine(engine)
    assert engine.scheduler.stats().tokens - before < 21 + 16
    alone = Engine(build(pair_config()), cache())
    request = alone.add_request([4, 5], greedy(8), encoder_token_ids=text(21))
    assert tokens_of(run_engine(alone)[request]) == tokens_of(chunks_by_request[second])
    assert first != second and unowned(engine)


def test_a_cached_encoder_input_is_evicted_if_blocks_are_needed() -> None:
    """The pool of sources has room for six: with more of them the oldest is read again, and nothing leaks."""
    model = build(pair_config("alibi"))
    sources = [text(17, seed) for seed in range(9)]
    order = [*range(9), 8, 0]
    streams = [Stream([7, i], [[1, 2]], arrives=1000, source=list(sources[i])) for i in order]
    run = drive(model, cache(max_num_seqs=2, max_source_len=20), streams)
    assert worst(model, streams, run) <= EXACT
    assert run.encoded == 10 * 17, "the eighth is known, the first is not"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_preempted_samples_encode_their_input_again_or_share_it(layout: str) -> None:
    model = build(pair_config("t5", "pre", "gqa"))
    streams = [
        Stream(text(6, 1, VOCAB), [text(12, 2, VOCAB), text(12, 3, VOCAB)], source=text(14)),
        Stream(text(9, 4, VOCAB), [text(12, 5, VOCAB)], source=text(5)),
    ]
    blocks = {"num_blocks": 8} if layout == "paged" else {}
    run = drive(model, cache(layout, max_num_seqs=3, max_seq_len=32, enable_prefix_caching=False, **blocks), streams)
    assert worst(model, streams, run) <= EXACT
    assert layout == "contiguous" or run.preemptions > 0


# ---------------------------------------------------------------- what cannot be served


def test_invalid_encoder_inputs_are_rejected() -> None:
    engine = Engine(build(pair_config(own=True)), cache(max_source_len=20))
    for tokens, source, words in (
        ([1], None, "encoder input: required by this model"),
        ([], text(3), "target: must have at least 1 token, got 0"),
        ([1], [], "encoder input: must have at least 1 token"),
        ([1], text(21), "encoder input: must have at most 20 tokens, got 21"),
        ([1], text(SOURCE_LIMIT + 1), f"must have at most {SOURCE_LIMIT}"),
        ([1], [SOURCE_VOCAB], f"got {SOURCE_VOCAB}"),
        ([VOCAB], [1], f"got {VOCAB}"),
    ):
        with pytest.raises(RequestError, match=words):
            engine.add_request(tokens, greedy(3), encoder_token_ids=source)
    assert engine.idle
    with pytest.raises(ConfigError, match=r"cache\.max_source_len"):
        Engine(build(pair_config()), cache(max_source_len=0))


def test_models_without_encoder_reject_encoder_input() -> None:
    decoder, encoder = Engine(build(model_config()), cache()), Engine(build(encoder_config()), cache())
    with pytest.raises(RequestError, match="encoder input: this model has no encoder"):
        decoder.add_request([1], greedy(3), encoder_token_ids=[2])
    with pytest.raises(RequestError, match="no encoder"):
        decoder.add_encoder_request([1])
    with pytest.raises(RequestError, match="cannot continue"):
        encoder.add_request([1], greedy(3))
    with pytest.raises(RequestError, match="encoder input: must have at least 1 token"):
        encoder.add_encoder_request([])
    with pytest.raises(RequestError, match=f"must have at most {LIMIT}"):
        encoder.add_encoder_request([1] * (LIMIT + 1))


def test_a_nonfinite_encoder_output_ends_its_request_and_is_not_cached() -> None:
    config = pair_config("none", own=True)
    model = build(config)
    assert model.encoder_embedding is not None and model.encoder_embedding.tokens is not None
    bad = 40
    with torch.no_grad():
        model.encoder_embedding.tokens.weight[bad] = math.nan
    engine = Engine(model, cache())
    fine = [token % bad for token in text(9)]
    sick = [*fine[:5], bad, *fine[5:]]
    numbers = [engine.add_request([1, 2], greedy(3), encoder_token_ids=source) for source in (fine, sick, fine[:4])]
    chunks_by_request = run_engine(engine)
    assert [chunks_by_request[number][-1].finish_reason for number in numbers] == ["length", "error", "length"]
    assert "NaN" in str(chunks_by_request[numbers[1]][-1].error)
    before = engine.scheduler.stats().tokens
    again = engine.add_request([1, 2], greedy(3), encoder_token_ids=sick)
    assert run_engine(engine)[again][-1].finish_reason == "error"
    assert engine.scheduler.stats().tokens == before + len(sick)
    assert unowned(engine)
    with torch.no_grad():
        for number, source in zip((numbers[0], numbers[2]), (fine, fine[:4]), strict=True):
            seq = [1, 2, *tokens_of(chunks_by_request[number])]
            best = uncached(model, seq[:-1], source=source).argmax(dim=-1).tolist()
            assert best[1:] == seq[2:]


def test_a_request_can_be_aborted_before_its_input_is_encoded() -> None:
    engine = Engine(build(pair_config()), cache(max_num_seqs=2))
    numbers = [engine.add_request([1, 2], greedy(5), encoder_token_ids=text(8, i)) for i in range(3)]
    plan = engine.scheduler.schedule()
    assert plan is not None and plan.encoder_batch is not None
    engine.abort_request(numbers[0])
    hidden, _ = engine.runner.encode(plan.encoder_batch)
    assert len(hidden) == 16
    engine.scheduler.update_from_output(plan, [SequenceOutput()] * 2)
    engine.scheduler.check()
    engine.abort_request(numbers[2])
    chunks_by_request = run_engine(engine)
    assert len(tokens_of(chunks_by_request[numbers[1]])) == 5 and numbers[2] not in chunks_by_request
    assert unowned(engine)


# ---------------------------------------------------------------- encoders alone

TEXTS = [text(11), text(3, 1), text(25, 2), text(11, 3), [6], text(40, 4)]
HEADS = {
    "masked-lm": None,
    "tags": cfg.ClassificationHeadConfig(("a", "b", "c")),
    "classes": cfg.ClassificationHeadConfig(
        ("a", "b"), level="row", pool="mean", transform=cfg.HeadTransformConfig("tanh")
    ),
    "pooled": cfg.PoolingHeadConfig("first", normalize=True),
}


def encoder(head: str = "masked-lm", position: str = "rope", heads: str = "gqa") -> Transformer:
    config = encoder_config(position, "pre", heads)
    chosen = HEADS[head]
    return build(config if chosen is None else replace(config, head=chosen))


@torch.inference_mode()
def expected(model: Transformer, tokens: Sequence[int], want: str) -> Tensor:
    step = fresh_step(tokens)
    hidden = model(step, NoCache(model.config)) if model.decoder is None else model.encode(step)
    if want != "head":
        return hidden[0] if want == "first" else hidden.mean(dim=0)
    if model.decoder is not None:
        return hidden
    if model.config.pools_sequence:
        return model.pooled_outputs(hidden, step)[0]
    return model.logits(hidden, step.logit_indices)


def outputs(engine: Engine, texts: Sequence[Sequence[int]], wants: Sequence[str]) -> list[Tensor]:
    numbers = [engine.add_encoder_request(each, want) for each, want in zip(texts, wants, strict=True)]  # type: ignore[arg-type]
    chunks_by_request = run_engine(engine)
    found = []
    for number in numbers:
        (chunk,) = chunks_by_request[number]
        assert chunk.finish_reason == "stop" and chunk.token_id is None and isinstance(chunk.output, Tensor)
        found.append(chunk.output)
    return found


POSITIONED = ("none", "learned", "sinusoidal", "rope", "rope-dynamic", "rope-longrope", "alibi", "t5")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("budget", [12, 256])
def test_encoder_outputs_equal_those_without_an_engine(head: str, budget: int) -> None:
    """Each text of a batch, in one step or several, has the output that it has alone."""
    model = encoder(head)
    engine = Engine(model, cache(), EngineConfig(max_num_batched_tokens=budget))
    for want in ("head", "mean", "first"):
        for each, output in zip(TEXTS, outputs(engine, TEXTS, [want] * len(TEXTS)), strict=True):
            assert (output - expected(model, each, want)).abs().max() <= 1e-12
    assert all(pool.num_free == pool.total for pool in engine.kv_cache_manager.pools), "an encoder keeps nothing"


@pytest.mark.parametrize("position", POSITIONED)
def test_encoder_outputs_with_every_position_encoding(position: str) -> None:
    model = encoder(position=position, heads="window-mix")
    engine = Engine(model, cache(), EngineConfig(max_num_batched_tokens=64))
    wants = ["head", "mean", "first", "head", "head", "mean"]
    for each, want, output in zip(TEXTS, wants, outputs(engine, TEXTS, wants), strict=True):
        assert (output - expected(model, each, want)).abs().max() <= 1e-12


def test_hidden_states_of_an_encoder_decoder_s_encoder() -> None:
    """Requested between two translations, which do not change."""
    model = build(pair_config("t5", "post", own=True))
    engine = Engine(model, cache())
    first = engine.add_request([1, 2], greedy(6), encoder_token_ids=TEXTS[0])
    engine.step()
    wanted = [engine.add_encoder_request(each) for each in TEXTS[1:4]]
    second = engine.add_request([1, 2], greedy(6), encoder_token_ids=TEXTS[0])
    chunks_by_request = run_engine(engine)
    for each, number in zip(TEXTS[1:4], wanted, strict=True):
        (chunk,) = chunks_by_request[number]
        assert (chunk.output - expected(model, each, "head")).abs().max() <= 1e-12
    assert tokens_of(chunks_by_request[first]) == tokens_of(chunks_by_request[second])
    assert unowned(engine)


def test_an_error_in_one_text_does_not_affect_others() -> None:
    model = encoder()
    with torch.no_grad():
        model.token_embedding[50] = math.nan
    model.head.weight = torch.nn.Parameter(torch.ones(VOCAB, 24, dtype=torch.float64))  # type: ignore[assignment]
    engine = Engine(model, cache())
    texts = [TEXTS[0], [1, 50, 2], TEXTS[3]]
    numbers = [engine.add_encoder_request(each) for each in texts]
    chunks_by_request = run_engine(engine)
    assert [chunks_by_request[number][0].finish_reason for number in numbers] == ["stop", "error", "stop"]
    assert "NaN" in str(chunks_by_request[numbers[1]][0].error) and chunks_by_request[numbers[1]][0].output is None
    for number in (0, 2):
        assert (
            chunks_by_request[numbers[number]][0].output - expected(model, texts[number], "head")
        ).abs().max() <= 1e-12


def test_a_failed_encoder_step_ends_its_texts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(encoder(), cache())
    sick = engine.add_encoder_request(TEXTS[0])

    def broken(_: object) -> None:
        raise KvadError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "encode", broken)
        with pytest.raises(KvadError):
            engine.step()
    (chunk,) = engine.step()
    assert chunk.request == sick and chunk.finish_reason == "error" and "on purpose" in str(chunk.error)
    assert outputs(engine, TEXTS[:1], ["head"])[0].shape == (11, VOCAB)


def test_an_aborted_text_has_no_output() -> None:
    engine = Engine(encoder(), cache(max_num_seqs=2))
    numbers = [engine.add_encoder_request(each) for each in TEXTS]
    engine.step()
    engine.abort_request(numbers[3])
    engine.abort_request(numbers[3])
    chunks_by_request = run_engine(engine)
    assert numbers[3] not in chunks_by_request and set(chunks_by_request) <= set(numbers)
    assert set(chunks_by_request) | set(numbers[:2]) == set(numbers) - {numbers[3]}


def rows_alone(model: Transformer) -> Callable[[Sequence[int]], Tensor]:
    return lambda tokens: expected(model, tokens, "head")


def test_encoder_outputs_do_not_depend_on_the_batch() -> None:
    """A batch of one equals any ragged batch, to the last bits of float64."""
    model = encoder("tags", "alibi")
    alone = rows_alone(model)
    draw = torch.Generator().manual_seed(0)
    for count in (1, 2, 7):
        texts = [text(int(n), int(n)) for n in torch.randint(1, 30, (count,), generator=draw)]
        engine = Engine(model, cache(), EngineConfig(max_num_batched_tokens=40))
        for each, output in zip(texts, outputs(engine, texts, ["head"] * count), strict=True):
            assert (output - alone(each)).abs().max() <= 1e-12


def test_the_comparison_of_translations_detects_errors() -> None:
    """The driver detects another encoder input, and one that is not shared."""
    model = build(pair_config())
    streams = [Stream([1, 2, 3], [[4, 5, 6]], source=text(9))]
    run: Run = drive(model, cache(), streams)
    assert worst(model, streams, run) <= EXACT
    assert streams[0].source is not None
    streams[0].source[0] = (streams[0].source[0] + 1) % SOURCE_VOCAB
    assert worst(model, streams, run) > 1e-3
    sub_batch: ModelInput = fresh_step([1], source=[2])
    assert sub_batch.encoder_input is not None and sub_batch.encoder_input.sub_batches == (SubBatch(1, 1, 1),)
