"""The sampler: every step equals loops and transformers' processors, and draws have the distribution of the logits.

Sequences that do not use a step keep their bits, and no sample depends on the batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import logits_process as hf_processors

from kvad import ops
from kvad.cache.manager import BlockAllocation
from kvad.engine.execution import sampler
from kvad.engine.execution.sampler import (
    NONFINITE_ERROR,
    SAMPLER_STEPS,
    gather_logprobs,
    sample_outputs,
    sample_tokens,
    uniform,
)
from kvad.engine.scheduling.beam_search import BeamSearch
from kvad.engine.scheduling.request import NO_ALLOWED_TOKEN, EncoderInput, SamplingParams, SequenceOutput
from kvad.engine.scheduling.sequence import ScheduledSequence, SchedulerOutput, TokenSequence
from kvad.model_input import BlockOps
from kvad.ops.native.library import LoadResult
from tests.support.sequences import token_sequence

VOCAB, ROWS = 29, 6


def job(
    tokens: Sequence[int] = (1,), prompt: int = 1, number: int = 0, stops: Sequence[int] = (), **options: Any
) -> TokenSequence:
    return token_sequence(SamplingParams(**options), tokens, prompt, number, frozenset(stops))


def logits_of(rows: int = ROWS, seed: int = 0, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def finite_ids(row: Tensor) -> set[int]:
    return {i for i, z in enumerate(row.tolist()) if z > -math.inf}


def softmax(row: Sequence[float]) -> list[float]:
    best = max(row)
    parts = [math.exp(z - best) for z in row]
    return [part / sum(parts) for part in parts]


# ---------------------------------------------------------------- the filters


def top_k_by_hand(row: list[float], k: int) -> set[int]:
    floor = sorted(row)[-k]
    return {i for i, z in enumerate(row) if z >= floor}


def top_p_by_hand(row: list[float], p: float) -> set[int]:
    probabilities, out, mass = softmax(row), set(), 0.0
    for i in sorted(range(len(row)), key=lambda i: -row[i]):
        if mass >= p:
            break
        out.add(i)
        mass += probabilities[i]
    return out


def min_p_by_hand(row: list[float], p: float) -> set[int]:
    probabilities = softmax(row)
    return {i for i, x in enumerate(probabilities) if x >= p * max(probabilities)}


def typical_by_hand(row: list[float], p: float) -> set[int]:
    probabilities, out, mass = softmax(row), set(), 0.0
    entropy = -sum(x * math.log(x) for x in probabilities)
    for i in sorted(range(len(row)), key=lambda i: abs(-math.log(probabilities[i]) - entropy)):
        if mass >= p:
            break
        out.add(i)
        mass += probabilities[i]
    return out


Filter = tuple[Callable[..., Tensor], str, Callable[[list[float], Any], set[int]], Any, list[Any]]
FILTERS: list[Filter] = [
    (sampler.apply_top_k, "top_k", top_k_by_hand, hf_processors.TopKLogitsWarper, [1, 2, 5, 28]),
    (sampler.apply_top_p, "top_p", top_p_by_hand, hf_processors.TopPLogitsWarper, [0.05, 0.3, 0.7, 0.95, 0.999]),
    (sampler.apply_min_p, "min_p", min_p_by_hand, hf_processors.MinPLogitsWarper, [0.01, 0.1, 0.5, 1.0]),
    (sampler.apply_typical_p, "typical_p", typical_by_hand, hf_processors.TypicalLogitsWarper, [0.05, 0.3, 0.7, 0.95]),
]
FILTER_IDS = [name for _, name, *_ in FILTERS]


@pytest.mark.parametrize("case", FILTERS, ids=FILTER_IDS)
def test_filters_equal_their_definition(case: Filter) -> None:
    step, name, by_hand, warper, values = case
    sizes = set()
    for value in values:
        scores = logits_of(40, seed=7)
        out = step(scores, [job(**{name: value})] * 40)
        for row, result in zip(scores, out, strict=True):
            assert finite_ids(result) == by_hand(row.tolist(), value)
            assert all(result[i] == row[i] for i in finite_ids(result))
            sizes.add(len(finite_ids(result)))
        assert torch.equal(out, warper(value)(torch.ones(40, 1, dtype=torch.long), scores))
    assert len(sizes) > 2 and max(sizes) > 3  # the values do differ in what they leave


@pytest.mark.parametrize("case", FILTERS, ids=FILTER_IDS)
def test_filters_keep_the_best_and_no_banned_token(case: Filter) -> None:
    step, name, _, _, values = case
    scores = logits_of(8, seed=3)
    scores[:, ::3] = -math.inf
    out = step(scores, [job(**{name: values[0]})] * 8)
    for row, result in zip(scores, out, strict=True):
        assert finite_ids(result) and finite_ids(result) <= finite_ids(row)
        if name != "typical_p":
            assert int(row.argmax()) in finite_ids(result)


@pytest.mark.parametrize("case", FILTERS, ids=FILTER_IDS)
def test_filters_of_different_values_apply_to_their_own_rows(case: Filter) -> None:
    step, name, by_hand, _, values = case
    scores = logits_of(len(values) + 1, seed=5)
    out = step(scores, [*(job(**{name: value}) for value in values), job()])
    expected = [by_hand(row.tolist(), value) for row, value in zip(scores, values, strict=False)]
    assert list(map(finite_ids, out)) == [*expected, set(range(VOCAB))]


@pytest.mark.parametrize("name", ["top_p", "typical_p"])
def test_a_mass_too_small_for_float32_still_leaves_a_token(name: str) -> None:
    (chosen,) = sample_tokens(logits_of(1), [job(**{name: 1e-60})])
    assert chosen.error is None


def test_ties_with_the_kth_stay() -> None:
    row = torch.tensor([[3.0, 1.0, 2.0, 2.0, 0.0, 2.0]])
    assert finite_ids(sampler.apply_top_k(row, [job(top_k=2)])[0]) == {0, 2, 3, 5}


def test_top_k_above_the_vocabulary_keeps_everything() -> None:
    row = logits_of(1)
    assert torch.equal(sampler.apply_top_k(row, [job(top_k=VOCAB + 5)]), row)


# ---------------------------------------------------------------- temperature, penalties, bias, bans


def test_temperature_divides() -> None:
    scores, taus = logits_of(4), [0.3, 1.0, 0.0, 2.5]
    out = sampler.apply_temperature(scores, [job(temperature=tau) for tau in taus])
    for row, result, tau in zip(scores, out, taus, strict=True):
        expected = (row.double() / (tau or 1.0)).softmax(-1)
        torch.testing.assert_close(result.double().softmax(-1), expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(out[1:3], scores[1:3])


@pytest.mark.parametrize("tau", [1e-3, 1e-30, 1e-44, 1e-300])
def test_a_tiny_temperature_is_greedy(tau: float) -> None:
    scores = logits_of(5, spread=20.0)
    scores[:, 4] = -1000.0
    chosen = sample_tokens(scores, [job(temperature=tau, seed=s) for s in range(5)])
    assert [c.token_id for c in chosen] == scores.argmax(-1).tolist() and not any(c.error for c in chosen)


TOKENS = [5, 7, 7, 2, 9, 2, 2]  # three of the prompt, four of the output


@pytest.mark.parametrize("penalty", [0.5, 1.3, 3.0])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    scores = logits_of(1)
    assert {bool(scores[0, t] > 0) for t in set(TOKENS)} == {True, False}
    mine = sampler.apply_penalties(scores, [job(TOKENS, 3, repetition_penalty=penalty)])
    expected = hf_processors.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([TOKENS]), scores)
    torch.testing.assert_close(mine, expected, rtol=0, atol=0)


def test_presence_and_frequency_count_the_output_only() -> None:
    scores = logits_of(1)
    mine = sampler.apply_penalties(scores, [job(TOKENS, 3, presence_penalty=0.7, frequency_penalty=-0.2)])
    expected = scores.clone()
    for token, count in Counter(TOKENS[3:]).items():
        expected[0, token] -= 0.7 - 0.2 * count
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)
    nothing_yet = sampler.apply_penalties(scores, [job(TOKENS[:3], 3, presence_penalty=0.7)])
    assert torch.equal(nothing_yet, scores)


def test_all_three_penalties_at_once() -> None:
    scores = logits_of(1)
    options = {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    mine = sampler.apply_penalties(scores, [job(TOKENS, 3, **options)])[0].tolist()
    for token, z in enumerate(scores[0].tolist()):
        expected = (z / 1.7 if z > 0 else z * 1.7) if token in TOKENS else z
        count = TOKENS[3:].count(token)
        expected -= (0.5 if count else 0.0) + 0.3 * count
        assert mine[token] == pytest.approx(expected, abs=1e-5)


def test_tokens_are_counted_as_they_are_appended() -> None:
    def counts(seq: TokenSequence) -> dict[int, int]:
        counted = seq.count_tokens()
        return dict(zip(counted.tokens, counted.generated, strict=True))

    seq = job([5, 7, 7], 2, frequency_penalty=0.5)
    assert counts(seq) == {5: 0, 7: 1}
    draft = seq.with_drafts([8])
    assert counts(draft) == {5: 0, 7: 1, 8: 1}
    seq.token_ids.append(7)
    assert counts(seq) == {5: 0, 7: 2}
    seq.request.beams = BeamSearch(SamplingParams(num_beams=2), 2, 9, frozenset(), None)
    seq.token_ids = [5, 7, 2, 2]  # of another beam
    assert counts(seq) == {5: 0, 7: 0, 2: 2}


def test_logit_bias_is_added() -> None:
    scores = logits_of(2)
    out = sampler.apply_logit_bias(scores, [job(logit_bias={3: 2.5, 9: -100.0}), job()])
    expected = scores.clone()
    expected[0, 3] += 2.5
    expected[0, 9] -= 100.0
    assert torch.equal(out, expected)
    (chosen,) = sample_tokens(logits_of(1), [job(temperature=0, logit_bias={11: 1000.0})])
    assert chosen.token_id == 11


class CountOperations(TorchDispatchMode):
    """Counts the operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_many_biases_are_added_in_one_operation_with_the_bits_of_one_each() -> None:
    biases = [{token: 0.1 * token - row / 3 for token in range(row, VOCAB)} for row in range(ROWS)]
    counts, jobs = [], [job(logit_bias=bias) for bias in biases]
    for some in (jobs[:1], jobs):
        scores = logits_of(len(some))
        with CountOperations() as operations:
            out = sampler.apply_logit_bias(scores, some)
        counts.append(operations.count)
        expected = scores.clone()
        for row, bias in enumerate(biases[: len(some)]):
            for token, value in bias.items():
                expected[row, token] += value
        assert torch.equal(out, expected)
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("tokens", "words", "banned"),
    [
        ([1, 2, 3], [(4,)], {4}),
        ([1, 2, 3], [(2, 3, 8)], {8}),
        ([1, 2, 3], [(1, 3, 8)], set()),
        ([3], [(2, 3, 8), (3, 6)], {6}),  # a word longer than what there is cannot be completed
        ([1, 2, 3], [(3, 3), (4, 1), (3, 5), (2, 3, 5)], {3, 5}),
    ],
)
def test_bad_words(tokens: list[int], words: list[tuple[int, ...]], banned: set[int]) -> None:
    scores = logits_of(1)
    out = sampler.apply_bans(scores, [job(tokens, 1, bad_words_ids=tuple(words))])
    assert finite_ids(out[0]) == set(range(VOCAB)) - banned
    if len(tokens) >= max(map(len, words)):  # transformers misses a word that is the whole text, and one token more
        expected = hf_processors.NoBadWordsLogitsProcessor([list(w) for w in words])(torch.tensor([tokens]), scores)
        assert finite_ids(expected[0]) == finite_ids(out[0])


@pytest.mark.parametrize(("output", "banned"), [(0, True), (1, True), (2, False), (5, False)])
def test_stop_tokens_are_banned_until_min_tokens(output: int, banned: bool) -> None:
    tokens = [1, 2, 3, *range(10, 10 + output)]
    out = sampler.apply_bans(logits_of(1), [job(tokens, 3, stops=(4, 6), min_tokens=2)])
    assert finite_ids(out[0]) == set(range(VOCAB)) - ({4, 6} if banned else set())


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_no_ngram_is_repeated(n: int) -> None:
    """As transformers over prompt and output, for texts of three different tokens, shorter than n too."""
    banned = 0
    for seed in range(12):
        length = 1 + seed
        tokens = torch.randint(3, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
        scores = logits_of(1, seed)
        mine = sampler.apply_bans(scores, [job(tokens, 1, no_repeat_ngram_size=n)])
        expected = hf_processors.NoRepeatNGramLogitsProcessor(n)(torch.tensor([tokens]), scores)
        assert finite_ids(mine[0]) == finite_ids(expected[0])
        banned += VOCAB - len(finite_ids(mine[0]))
    assert banned > 0


def repeating_tokens_by_hand(tokens: Sequence[int], n: int) -> set[int]:
    last, starts = tokens[len(tokens) + 1 - n :], range(len(tokens) + 1 - n)
    return {tokens[start + n - 1] for start in starts if tokens[start : start + n - 1] == last}


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 22))
def test_tokens_that_repeat_an_ngram_equal_their_definition(tokens: list[int], n: int) -> None:
    assert sampler._banned(job(tokens, no_repeat_ngram_size=n)) == repeating_tokens_by_hand(tokens, n)


def test_equal_hashes_are_not_equal_ngrams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "HASH_BASE", np.uint64(1))  # the hash is the sum
    assert sampler._banned(job([1, 2, 7, 2, 1, 8, 1, 2], no_repeat_ngram_size=3)) == {7}


@pytest.mark.parametrize("text", [[7] * 400, [7] * 200 + [3] + [7] * 199, list(range(5)) * 80])
def test_long_ngrams_are_compared_in_few_places(text: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Tokens(list[int]):
        def __getitem__(self, index: Any) -> Any:
            calls.extend([1] * isinstance(index, slice))
            return super().__getitem__(index)

    def counted(*args: Any) -> bool:
        calls.append(1)
        return array_equal(*args)

    seq, array_equal = job(text, no_repeat_ngram_size=200), np.array_equal
    seq.token_ids = Tokens(text)
    monkeypatch.setattr(np, "array_equal", counted)
    banned = sampler._banned(seq)
    assert banned == repeating_tokens_by_hand(text, 200) and len(calls) == len(banned)


def test_only_allowed_tokens_are_sampled() -> None:
    def allowed(tokens: Sequence[int]) -> list[int]:
        return [tokens[-1], tokens[-1] + 1, VOCAB + 3, -1]  # ids that are none are not allowed either

    out = sampler.apply_forced_tokens(logits_of(2), [job([3, 9], allowed_tokens_fn=allowed), job([3, 9])])
    assert finite_ids(out[0]) == {9, 10} and torch.equal(out[0, 9:11], logits_of(2)[0, 9:11])
    assert torch.equal(out[1], logits_of(2)[1])


@pytest.mark.parametrize(
    ("tokens", "limit", "forced"), [([1, 2, 3], 9, 7), ([1, 2, 3, 4], 9, None), ([1, 2, 3, 4], 5, 8), ([1, 2, 3], 4, 8)]
)
def test_the_first_token_and_the_last_are_forced(tokens: list[int], limit: int, forced: int | None) -> None:
    """Of three tokens of prompt; where the first is the last, it is the last."""
    mine = token_sequence(
        SamplingParams(forced_bos_token_id=7, forced_eos_token_id=8, max_tokens=limit - 3),
        tokens,
        3,
        0,
        frozenset(),
        limit,
    )
    out = sampler.apply_forced_tokens(logits_of(1), [mine])
    assert finite_ids(out[0]) == (set(range(VOCAB)) if forced is None else {forced})


def test_a_beam_s_candidates_are_the_best_after_all_steps() -> None:
    """Log-probabilities of the model, bans and all; a row beside it is sampled as ever."""
    scores = logits_of(2)
    beam, plain = job(stops=(4,), num_beams=3, bad_words_ids=((6,),), logit_bias={5: 9.0}), job(temperature=0)
    found, other = sample_tokens(scores, [beam, plain])
    assert other == sample_tokens(scores[1:], [plain])[0] and other.candidates == ()
    logprobs = scores[0].log_softmax(-1)
    logprobs[5] += 9.0
    logprobs[6] = -math.inf
    values, tokens = logprobs.topk(6)
    assert [token for token, _ in found.candidates] == tokens.tolist()
    torch.testing.assert_close(torch.tensor([value for _, value in found.candidates]), values)


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_candidates_have_log_probabilities(penalty: float, has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A penalty changes log-probabilities; the sample between two beams, and the logits, stay as they are."""
    if not has_kernels:
        monkeypatch.setattr(ops.native, "load", lambda: LoadResult(None, "off"))
    logits = logits_of(3)
    scores, best = logits.clone(), int(logits[0].argmax())
    banned = int(logits[0].topk(2).indices[1])
    beam = job((1, best), num_beams=2, presence_penalty=penalty, bad_words_ids=((banned,),))
    found, sampled, other = sample_tokens(scores, [beam, job(temperature=0), job(num_beams=3)])
    assert torch.equal(scores, logits) and sampled.token_id == int(logits[1].argmax())
    expected = logits.log_softmax(-1)
    expected[0, best] -= penalty
    expected[0, banned] = -math.inf
    for row, output in ((0, found), (2, other)):
        values, tokens = expected[row].topk(len(output.candidates))
        assert [token for token, _ in output.candidates] == tokens.tolist()
        torch.testing.assert_close(torch.tensor([value for _, value in output.candidates]), values)


@pytest.mark.parametrize(
    ("vocab", "k"), [(64 * 40, 8), (64 * 40 + 1, 8), (64 * 40 + 63, 1), (300, 2), (100, 8), (64, 64)]
)
def test_the_top_k_of_a_large_vocabulary_are_those_of_torch(vocab: int, k: int) -> None:
    """Also those behind the last whole span, equal numbers, several in one span, and tokens that are banned."""
    scores = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab))
    scores[0, -1] = scores[1, 7] = 9.0
    scores[2, : min(vocab, 64)] += 9.0
    scores[3, : vocab - k // 2] = -math.inf
    scores[4] = scores[4].round()
    values, ids = sampler.top_k(scores, k)
    assert torch.equal(values, scores.topk(k).values)
    assert torch.equal(values, scores.gather(1, ids))
    assert all(len(set(row)) == k for row in ids.tolist())


def test_many_sequences_are_sampled_in_parts_with_the_same_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = logits_of(7)
    sequences = [
        job(number=i, **({"num_beams": 2 + i % 2, "logprobs": 1} if i % 3 else {"logprobs": 2})) for i in range(7)
    ]
    scores[4, 3] = math.nan
    scheduled = tuple(ScheduledSequence(seq, 0, 1, range(1), True) for seq in sequences)
    output = SchedulerOutput(scheduled, (), BlockAllocation(BlockOps((), ()), (), ()))
    whole = sample_outputs(output, scores)
    calls: list[int] = []

    def counted(logits: Tensor, *args: Any) -> list[SequenceOutput]:
        calls.append(len(logits))
        return sample_tokens(logits, *args)

    monkeypatch.setattr(sampler, "MAX_PART", 2 * VOCAB + 1)
    monkeypatch.setattr(sampler, "sample_tokens", counted)
    assert repr(sample_outputs(output, scores)) == repr(whole) and calls == [2, 2, 2, 1]
    assert [result.error for result in whole] == [None] * 4 + [NONFINITE_ERROR] + [None] * 2


def test_which_of_equal_tokens_a_beam_finds_does_not_depend_on_its_neighbors() -> None:
    logits = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0)).round()
    beams = [job(num_beams=2), job(number=1, num_beams=9)]
    together, alone = sample_tokens(logits, beams), sample_tokens(logits[:1], beams[:1])
    assert together[0].candidates == alone[0].candidates


def test_nearly_equal_tokens_of_a_beam_do_not_depend_on_the_edits_of_its_neighbors() -> None:
    """As log-probabilities they are equal, so that another one could be found."""
    logits = 1e-6 * torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))
    beams = [job(num_beams=2), job(number=1, num_beams=2, presence_penalty=1.0)]
    together, alone = sample_tokens(logits, beams), sample_tokens(logits[:1], beams[:1])
    assert together[0].candidates == alone[0].candidates


def test_candidates_of_a_beam_are_scored_by_one_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, num_rows = logits_of(2), list[int]()
    log_softmax = Tensor.log_softmax

    def counted(scores: Tensor, dim: int) -> Tensor:
        num_rows.append(len(scores))
        return log_softmax(scores, dim=dim)

    monkeypatch.setattr(Tensor, "log_softmax", counted)
    beams = sample_tokens(logits, [job(num_beams=3, logprobs=2), job(number=1, num_beams=4, logprobs=0)])
    assert num_rows == [1, 1]  # each beam's candidates
    for row, num_top, beam in zip(logits, (2, 0), beams, strict=True):
        tokens = [token for token, _ in beam.candidates]
        assert list(beam.candidate_logprobs) == gather_logprobs(row.repeat(len(tokens), 1), tokens, num_top)


def test_a_beam_without_candidates_is_not_an_error() -> None:
    """It has none, and the other beams continue; the error of a sampled sequence is reported."""
    beam, row = sample_tokens(
        logits_of(2), [job(num_beams=2, allowed_tokens_fn=lambda _: []), job(allowed_tokens_fn=lambda _: [])]
    )
    assert beam.error is None and all(value == -math.inf for _, value in beam.candidates)
    assert row.error == NO_ALLOWED_TOKEN


# ---------------------------------------------------------------- neighbors

USES: list[dict[str, Any]] = [
    {"bad_words_ids": ((4,), (1, 5))},
    {"min_tokens": 3},
    {"no_repeat_ngram_size": 1},
    {"allowed_tokens_fn": lambda _: [2, 3]},
    {"logit_bias": {3: 1.5}},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"temperature": 0.7},
    {"top_k": 4},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"typical_p": 0.4},
]


@pytest.mark.parametrize("use", USES, ids=lambda use: next(iter(use)))
@pytest.mark.parametrize("step", SAMPLER_STEPS, ids=lambda step: step.__name__)
def test_sequences_that_do_not_use_a_step_keep_their_bits(step: Any, use: dict[str, Any]) -> None:
    scores = logits_of(5)
    scores[1] = torch.tensor([-0.0, 1e-40, 3e38, -3e38, math.pi] + [0.1] * (VOCAB - 5))
    before = scores.clone()
    greedy_use = {"temperature": 0.0} | {k: v for k, v in use.items() if k in ("top_k", "top_p", "min_p", "typical_p")}
    out = step(
        scores, [job([1, 7]), job([1, 7]), job([1, 7], 1, 0, (2,), **use), job([1, 7]), job([1, 7], **greedy_use)]
    )
    for row in (0, 1, 3, 4):
        assert out[row].view(torch.int32).tolist() == before[row].view(torch.int32).tolist()
    assert torch.equal(scores, before), "the logits of the caller were written to"


def test_every_option_is_used_by_exactly_one_step() -> None:
    """Otherwise the test above would hold of steps that do nothing."""
    for use in USES:
        mine = job([1, 7, 9], 1, 0, (2,), **use)
        changed = [step.__name__ for step in SAMPLER_STEPS if not torch.equal(step(logits_of(1), [mine]), logits_of(1))]
        assert len(changed) == 1, (use, changed)


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 3, 10]),
    top_p=st.sampled_from([1.0, 1.0, 0.8, 0.3]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    typical_p=st.sampled_from([1.0, 1.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.4]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5, width=16), max_size=2),
    bad_words_ids=st.lists(st.tuples(st.integers(0, VOCAB - 1)), max_size=2).map(tuple),
    min_tokens=st.integers(0, 3),
    no_repeat_ngram_size=st.sampled_from([0, 0, 2]),
    forced_bos_token_id=st.sampled_from([None, None, 6]),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, 0, 3]),
)
jobs_of = st.builds(
    token_sequence,
    samplings,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
    st.just(1),
    st.integers(0, 5),
    st.just(frozenset({4, 8})),
)
rows_of = st.tuples(jobs_of, st.integers(0, 10_000), st.sampled_from(["fine", "fine", "fine", "nan", "inf"]))


def row_of(seed: int, health: str) -> Tensor:
    row = logits_of(1, seed)[0]
    if health != "fine":
        row[seed % VOCAB] = float(health)
    return row


@settings(max_examples=60)
@given(st.lists(rows_of, min_size=1, max_size=6))
def test_samples_do_not_depend_on_the_batch(rows: list[tuple[TokenSequence, int, str]]) -> None:
    together = sample_tokens(
        torch.stack([row_of(seed, health) for _, seed, health in rows]), [mine for mine, *_ in rows]
    )
    for (mine, seed, health), chosen in zip(rows, together, strict=True):
        (alone,) = sample_tokens(row_of(seed, health)[None], [mine])
        assert chosen.error == alone.error == (None if health == "fine" else NONFINITE_ERROR)
        if health == "fine":
            assert chosen == alone
            assert (chosen.logprob is None) == (mine.sampling_params.logprobs is None)


def test_an_empty_batch_has_no_tokens() -> None:
    assert sample_tokens(torch.empty(0, VOCAB), []) == []


# ---------------------------------------------------------------- what is drawn


def draws(row: Tensor, number: int, **options: Any) -> list[int]:
    """The same row for as many samples, of one seed."""
    return [
        c.token_id for c in sample_tokens(row.expand(number, -1), [job(number=i, **options) for i in range(number)])
    ]


# The 1 - 1e-5 quantile of chi-square by degrees of freedom, Wilson and Hilferty's approximation.
def limit(freedom: int) -> float:
    return freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3


def chi_square(counts: Counter[int], expected: list[float]) -> float:
    total = counts.total()
    assert all(expected[token] > 0 for token in counts), "a token was drawn that has no chance"
    return sum((counts[i] - total * p) ** 2 / (total * p) for i, p in enumerate(expected) if p > 0)


DRAWN: dict[str, tuple[dict[str, Any], Callable[[list[float]], list[float]]]] = {
    "plain": ({}, softmax),
    "temperature": ({"temperature": 1.8}, lambda row: softmax([z / 1.8 for z in row])),
    "top-k": ({"top_k": 4}, lambda row: among(row, top_k_by_hand(row, 4))),
    "top-p": ({"top_p": 0.8}, lambda row: among(row, top_p_by_hand(row, 0.8))),
    "min-p": ({"min_p": 0.1}, lambda row: among(row, min_p_by_hand(row, 0.1))),
    "typical": ({"typical_p": 0.7}, lambda row: among(row, typical_by_hand(row, 0.7))),
    "all": (
        {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "logit_bias": {2: 1.0}},
        lambda row: folded([(z + (i == 2)) / 1.5 for i, z in enumerate(row)]),
    ),
}


def among(row: list[float], allowed: set[int]) -> list[float]:
    return softmax([z if i in allowed else -math.inf for i, z in enumerate(row)])


def folded(row: list[float]) -> list[float]:
    best = [z if i in top_k_by_hand(row, 9) else -math.inf for i, z in enumerate(row)]
    return among(best, top_p_by_hand(best, 0.9))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("plain", "all") else pytest.mark.long) for name in DRAWN]
)
def test_draws_have_the_distribution_of_the_logits(name: str) -> None:
    options, expected = DRAWN[name]
    row = logits_of(1, seed=4, spread=1.0)
    counts = Counter(draws(row, 6_000, seed=11, **options))
    chances = expected(row[0].tolist())
    freedom = sum(p > 0 for p in chances) - 1
    assert freedom >= 2
    assert chi_square(counts, chances) < limit(freedom)
    assert chi_square(counts, softmax([2 * z for z in row[0].tolist()])) > limit(VOCAB - 1)  # it can object


def test_seeds_samples_and_positions_each_make_another_draw() -> None:
    row = torch.zeros(1, 1000)

    def token(seed: int, number: int, length: int) -> int:
        return sample_tokens(row, [job([1] * length, 1, number, seed=seed)])[0].token_id

    assert token(5, 0, 3) == token(5, 0, 3)
    assert len({token(s, 0, 3) for s in range(20)}) > 15
    assert len({token(5, n, 3) for n in range(20)}) > 15
    assert len({token(5, 0, n) for n in range(1, 21)}) > 15


def first_draws(keys: Sequence[int]) -> np.ndarray:
    return uniform(keys, [0] * len(keys), [3] * len(keys))


def test_draws_of_different_prompts_seeds_and_salts_are_uncorrelated() -> None:
    """4,000 sequences that differ in one number: even draws, and no correlation from one to the next."""
    n = 4000
    prompts = [job([5, i, 7], 3, seed=1).draw_key() for i in range(n)]
    seeds = [job([5, 6, 7], 3, seed=i).draw_key() for i in range(n)]
    salted = [job([5, 6, 7], 3, seed=1) for _ in range(n)]
    for salt, sequence in enumerate(salted):
        sequence.request.draw_salt = salt
    draws = [first_draws(keys) for keys in (prompts, seeds, [sequence.draw_key() for sequence in salted])]
    for u in draws:
        counts = np.bincount((u * 20).astype(int), minlength=20)
        assert ((counts - n / 20) ** 2 / (n / 20)).sum() < limit(19)
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4.5 / math.sqrt(n)
    assert max(abs(np.corrcoef(draws)[i, j]) for i, j in ((0, 1), (0, 2), (1, 2))) < 4.5 / math.sqrt(n)
    assert len(set(first_draws([1] * n).tolist())) == 1  # one key for all prompts would be one draw


def test_a_draw_is_a_function_of_the_tokens() -> None:
    """Not of how they were computed: appended one by one, or removed and appended again."""
    tokens = [5, 6, 7, 8, 9]
    sequence = job(tokens[:2], 2, seed=3)
    keys = []
    for token in (*tokens[2:], None):
        keys.append(sequence.draw_key())
        sequence.token_ids += [] if token is None else [token]
    assert keys == [job(tokens[:n], 2, seed=3).draw_key() for n in range(2, 6)] and len(set(keys)) == 4
    assert keys == [job(tokens[:n], 1, seed=3).draw_key() for n in range(2, 6)]  # the prompt may contain an output
    del sequence.token_ids[3:]
    assert sequence.draw_key() == keys[1]
    translated = job(tokens, 5, seed=3)
    translated.request.encoder_input = EncoderInput((1, 2))
    assert translated.draw_key() != keys[-1]


def test_a_draw_inverts_the_cumulated_probabilities() -> None:
    """The first token at which the sum exceeds u; a token of no probability is never drawn, at either end."""
    row = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, 0.5, -math.inf]])
    p = row[0].double().softmax(-1).cumsum(-1).tolist()
    for number in range(300):
        sequence = job([1, 2, 3], 1, number, seed=9)
        u = float(uniform([sequence.draw_key()], [number], [3])[0])
        token = int(sampler._draw(row, [sequence]))
        assert token == next(i for i, x in enumerate(p) if x > u)


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval(u: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least and the greatest number that can be drawn still give tokens that may be."""
    monkeypatch.setattr(sampler, "uniform", lambda keys, *_: np.full(len(keys), u))
    rows = logits_of(200, seed=5, spread=5.0)
    rows[:, [0, 3, VOCAB - 1]] = -math.inf
    tokens = sampler._draw(rows, [job()] * 200).squeeze(-1).tolist()
    assert not {0, 3, VOCAB - 1} & set(tokens)
    assert set(tokens) == ({1} if u == 0 else {VOCAB - 2})


def test_greedy_ties_go_to_the_lowest_id() -> None:
    row = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0]])
    filters = {"top_k": 1, "top_p": 0.1, "min_p": 1.0, "typical_p": 0.1}
    assert sample_tokens(row, [job(temperature=0, **filters)])[0].token_id == 1


# ---------------------------------------------------------------- reports and faults


def test_logprobs_are_the_model_s_own() -> None:
    """Before temperature, filters and penalties, whatever was chosen by them."""
    scores = logits_of(3)
    jobs = [job(logprobs=n, temperature=0.5, top_k=2, logit_bias={3: 9.0}) for n in (0, 2)] + [job(logprobs=VOCAB + 5)]
    chosen = sample_tokens(scores, jobs)
    for row, mine, answer in zip(scores, jobs, chosen, strict=True):
        expected = row.double().log_softmax(-1).tolist()
        assert answer.logprob is not None and answer.logprob.token_id == answer.token_id
        assert answer.logprob.logprob == pytest.approx(expected[answer.token_id], abs=1e-5)
        best = sorted(range(VOCAB), key=lambda i: -expected[i])[: mine.sampling_params.logprobs]
        assert [token for token, _ in answer.logprob.top_logprobs] == best
        assert [value for _, value in answer.logprob.top_logprobs] == pytest.approx(
            [expected[i] for i in best], abs=1e-5
        )
    assert [len(c.logprob.top_logprobs) for c in chosen if c.logprob] == [0, 2, VOCAB]
    assert sample_tokens(scores[:1], [job()])[0].logprob is None


def test_prompt_scores() -> None:
    scores = logits_of(4)
    found = gather_logprobs(scores, [3, 9, 0, 28], 2)
    expected = scores.double().log_softmax(-1)
    assert found is not None and [s.token_id for s in found] == [3, 9, 0, 28]
    for row, score in zip(expected, found, strict=True):
        assert score.logprob == pytest.approx(float(row[score.token_id]), abs=1e-5)
        assert [token for token, _ in score.top_logprobs] == row.topk(2).indices.tolist()
    broken = scores.clone()
    broken[2, 5] = math.inf
    assert gather_logprobs(broken, [3, 9, 0, 28], 2) is None
    none = gather_logprobs(scores, [3, 9, 0, 28], 0)
    assert none is not None and all(s.top_logprobs == () for s in none)


def test_alternatives_are_tokens_of_the_tokenizer() -> None:
    """Rows of the embedding beyond its vocabulary have the best logits here; they count in the softmax only."""
    scores, num_tokens = logits_of(4), VOCAB - 6
    scores[:, num_tokens:] += 9
    options = {"logprobs": VOCAB, "prompt_logprobs": VOCAB}
    jobs = [job([1, 2], 2, **options), job(**options), job(num_beams=2, logprobs=2)]
    scheduled = [ScheduledSequence(seq, 0, len(seq.token_ids), range(len(seq.token_ids)), True) for seq in jobs]
    output = SchedulerOutput(tuple(scheduled), (), BlockAllocation(BlockOps((), ()), (), ()))
    first, second, beam = sample_outputs(output, scores, num_tokens)
    found = [*first.prompt_logprobs, first.logprob, second.logprob, beam.candidate_logprobs[0]]
    for row, score, count in zip(scores, found, (num_tokens, num_tokens, num_tokens, 2), strict=True):
        values, ids = row.log_softmax(-1)[:num_tokens].topk(count)
        assert score is not None and score.top_logprobs == tuple(zip(ids.tolist(), values.tolist(), strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_nonfinite_logits_fail_only_their_sequence(bad: float, temperature: float) -> None:
    scores = logits_of(4)
    options = {"temperature": temperature, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 1}
    healthy = sample_tokens(scores, [job(number=i, **options) for i in range(4)])
    scores[2, 7] = bad
    chosen = sample_tokens(scores, [job(number=i, **options) for i in range(4)])
    assert [c.error for c in chosen] == [None, None, NONFINITE_ERROR, None]
    assert [c for i, c in enumerate(chosen) if i != 2] == [c for i, c in enumerate(healthy) if i != 2]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_sequence_with_every_token_banned_fails(temperature: float) -> None:
    every = tuple((token,) for token in range(VOCAB))
    filters = {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5}
    jobs = [job(temperature=temperature, bad_words_ids=words, **filters) for words in ((), every, every[1:])]
    nothing, one = sample_tokens(logits_of(3), jobs)[1:]
    assert nothing.error == NO_ALLOWED_TOKEN
    assert (one.token_id, one.error) == (0, None)


def test_half_precision_logits_are_widened_first() -> None:
    scores = logits_of(2).to(torch.bfloat16)
    jobs = [job(seed=3, logprobs=1), job(temperature=0, logprobs=1)]
    assert sample_tokens(scores, jobs) == sample_tokens(scores.float(), jobs)


def test_steps_are_in_the_documented_order() -> None:
    first = ["apply_bans", "apply_logit_bias", "apply_penalties", "apply_structured_output", "apply_forced_tokens"]
    filters = ["apply_temperature", "apply_top_k", "apply_top_p", "apply_min_p", "apply_typical_p"]
    assert [step.__name__ for step in SAMPLER_STEPS] == [*first, *filters]
    assert SamplingParams.__doc__ is not None
    text = " ".join(SamplingParams.__doc__.split())
    order = "``logit_bias``, penalties, ``structured_output``, forced tokens, temperature, ``top_k``, ``top_p``"
    assert f"{order}, ``min_p``, ``typical_p``" in text


def test_results_are_plain_values() -> None:
    (chosen,) = sample_tokens(logits_of(1), [job(logprobs=2)])
    assert isinstance(chosen, SequenceOutput) and type(chosen.token_id) is int and chosen.logprob is not None
    assert {type(chosen.logprob.logprob), *(type(v) for _, v in chosen.logprob.top_logprobs)} == {float}
    assert {type(t) for t, _ in chosen.logprob.top_logprobs} == {int}


def test_every_sampling_field_is_known_to_these_tests() -> None:
    """A new field must be applied here, or named among those that others apply."""
    tested = {key for use in USES for key in use} | {
        "seed",
        "logprobs",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "num_beams",
    }
    elsewhere = {"max_tokens", "stop", "stop_token_ids", "ignore_eos", "n", "prompt_logprobs", "overflow"}
    elsewhere |= {"length_penalty", "length_penalty_form", "early_stopping", "patience"}  # test_beam_search.py
    elsewhere |= {"num_beam_groups", "diversity_penalty", "structured_output"}  # the last: test_structured_output.py
    elsewhere |= {"visible_special_tokens"}  # tests/server/test_openai.py
    assert {f.name for f in dataclasses.fields(SamplingParams)} == tested | elsewhere


FILTERS: list[dict[str, Any]] = [
    {"top_k": 40},
    {"top_k": 248, "top_p": 0.5},
    {"top_k": 5, "min_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 2.0},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"top_p": 0.8, "min_p": 0.1},
    {"top_k": 3, "temperature": 1e-8},
]


@pytest.mark.parametrize("values", ["peaked", "flat", "ties", "few"])
def test_filtering_the_best_tokens_draws_what_filtering_all_does(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(len(FILTERS) * 12, sampler.MAX_CANDIDATES * sampler.SPAN + 7, generator=generator)
    rows *= {"peaked": 4.0, "flat": 0.01}.get(values, 1.0)
    if values == "ties":
        rows = rows.round()
    if values == "few":
        rows[:, 9:] = -math.inf
    params = [FILTERS[i % len(FILTERS)] for i in range(len(rows))]
    sequences = [job([1, 2], 1, i, **{"temperature": 0.9, "seed": i, **each}) for i, each in enumerate(params)]
    drawn = sampler._draw_filtered(rows, sequences)
    monkeypatch.setattr(sampler, "_num_candidates", lambda *_: 0)
    assert sampler._draw_filtered(rows, sequences) == drawn
    assert len(set(drawn)) > 1


@pytest.mark.parametrize("options", [{}, {"logprobs": 2}, {"num_beams": 2}, {"temperature": 0.7, "seed": 1}])
def test_bans_leave_the_logits_as_they_were(options: dict[str, Any]) -> None:
    """Also if the function of another sequence fails; the raw log-probabilities include banned tokens."""
    logits = logits_of(2)
    best = int(logits[0].argmax())
    before, params = logits.clone(), {"temperature": 0.0} | options

    def fail(tokens: Sequence[int]) -> list[int]:
        raise ValueError("no")

    banned = job((1,), 1, stops=(best,), min_tokens=3, **params)
    for other in (job((1,), 1, 1, **params), job((1,), 1, 1, allowed_tokens_fn=fail, temperature=0.0)):
        result = sampler._sample_or_fail(logits, [banned, other], None)[0]
        assert torch.equal(logits, before)
        tokens = [token for token, _ in result.candidates] if options.get("num_beams") else [result.token_id]
        assert best not in tokens
        if "logprobs" in options:
            assert result.logprob.top_logprobs[0][0] == best


GREEDY = SamplingParams(temperature=0)


@pytest.mark.parametrize(
    ("params", "offsets", "is_sampled", "drafts"),
    [
        (SamplingParams(temperature=1.0, top_k=1, seed=1), range(1), True, ()),
        (SamplingParams(temperature=0, logprobs=0), range(1), True, ()),
        (SamplingParams(temperature=0, logit_bias={7: -100.0}), range(1), True, ()),
        (SamplingParams(temperature=0, min_tokens=3, max_tokens=5), range(1), True, ()),
        (GREEDY, range(1), False, ()),
        (GREEDY, range(2), True, (2,)),
    ],
)
def test_the_kernels_best_token_is_taken_only_if_nothing_else_is_needed(
    params: SamplingParams, offsets: range, is_sampled: bool, drafts: tuple[int, ...]
) -> None:
    """The best tokens given here are not those of the logits."""
    seqs = [token_sequence(each, [1, 4, 5]) for each in (GREEDY, params)]
    spans = (ScheduledSequence(seqs[0], 1, 1, range(1), True),)
    spans += (ScheduledSequence(seqs[1], 1, len(offsets), offsets, is_sampled, drafts),)
    output = SchedulerOutput(spans, (), BlockAllocation(BlockOps((), ()), (), ()))
    logits = torch.zeros(1 + len(offsets), VOCAB)
    logits[:, 3] = 5.0
    first, second = sample_outputs(output, logits, None, [7] * len(logits))
    if params is GREEDY:
        assert first.token_id == 7 and second.token_id == (7 if is_sampled else None)
        assert second.next_outputs == ()  # the draft is another token
    elif params.uses_seed:
        assert (first.token_id, second.token_id) == (7, 3)
        logits[:, -1] = 9.0
        assert [each.token_id for each in sample_outputs(output, logits, VOCAB - 1, [7, 7])] == [7, 3]
    else:
        assert first.token_id == second.token_id == 3
    alone = sample_outputs(output._replace(scheduled=spans[:1]), logits[:1], None, [7])
    assert [each.token_id for each in alone] == [7]
