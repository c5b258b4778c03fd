"""Beam search against all sequences, against transformers, against values by hand; cached against uncached.

A "table" is a model without weights: the logits of a text are drawn from a hash of it, so that every text has its own.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache as remembered
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel, StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutput

from kvad.cache.config import CacheConfig
from kvad.engine import Engine, StreamChunk
from kvad.engine.execution.sampler import sample_tokens
from kvad.engine.scheduling.beam_search import BeamCandidate, BeamSearch, DiverseBeamSearch, Hypothesis, num_candidates
from kvad.engine.scheduling.request import SamplingParams
from kvad.errors import RequestError
from kvad.model.transformer import Transformer
from tests.support.driver import run_engine, tokens_of, uncached
from tests.support.random_models import SOURCE_VOCAB, VOCAB, build, model_config, pair_config
from tests.support.sequences import token_sequence

Logits = Callable[[Sequence[int]], Tensor]


def table(vocab: int, seed: int, spread: float = 1.5) -> Logits:
    @remembered
    def of(text: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(crc32(repr((seed, text)).encode()))
        return spread * torch.randn(vocab, generator=generator)

    return lambda text: of(tuple(text))


def search(
    logits: Logits,
    prompt: Sequence[int],
    sampling: SamplingParams,
    limit: int,
    has_stop_string: Callable[[Sequence[int]], bool] | None = None,
) -> list[Hypothesis]:
    """Search without a cache: the logits of each live beam are recomputed."""
    stops = frozenset(sampling.stop_token_ids)
    kind = BeamSearch if sampling.num_beam_groups == 1 else DiverseBeamSearch
    group = kind(sampling, len(prompt), limit, stops, has_stop_string)
    texts = [list(prompt)]
    while True:
        jobs = [token_sequence(sampling, text, len(prompt), 0, stops, limit) for text in texts]
        chosen = sample_tokens(torch.stack([logits(text) for text in texts]), jobs)
        scores = [{score.token_id: score for score in each.candidate_logprobs} for each in chosen]
        requested = scores if sampling.logprobs is not None else ()
        children = group.advance(texts, [each.candidates for each in chosen], requested)
        if not children:
            return group.best_hypotheses(texts)
        texts = [[*texts[child.parent], child.token] for child in children]


def same(first: Sequence[Hypothesis], second: Sequence[Hypothesis], tolerance: float = 1e-5) -> bool:
    pairs = zip(first, second, strict=True)
    return all(
        (a.tokens, a.finish) == (b.tokens, b.finish) and abs(a.score - b.score) <= tolerance * max(1, abs(b.score))
        for a, b in pairs
    )


# ---------------------------------------------------------------- all sequences


def every_ending(logits: Logits, prompt: Sequence[int], new: int, sampling: SamplingParams) -> list[Hypothesis]:
    """Return all texts of at most ``new`` tokens that end or have that length, best first."""
    vocab, found = len(logits(prompt)), []
    stops = set(sampling.stop_token_ids)
    for length in range(1, new + 1):
        for tokens in itertools.product(range(vocab), repeat=length):
            if any(token in stops for token in tokens[:-1]) or (length < new and tokens[-1] not in stops):
                continue
            texts = [[*prompt, *tokens[:at]] for at in range(length)]
            score = sum(float(logits(text).log_softmax(-1)[token]) for text, token in zip(texts, tokens, strict=True))
            base = (5 + length) / 6 if sampling.length_penalty_form == "gnmt" else length
            reason = "stop" if tokens[-1] in stops else "length"
            found.append(Hypothesis(score / base**sampling.length_penalty, tokens, reason))  # type: ignore[arg-type]
    return sorted(found, key=lambda each: -each.score)


@pytest.mark.parametrize("form", ["length", "gnmt"])
@pytest.mark.parametrize("early", [False, "never"])
@pytest.mark.parametrize("power", [0.0, 1.0, -0.7, 2.5])
@pytest.mark.parametrize(("vocab", "new", "stops"), [(3, 4, (2,)), (4, 3, (0, 3)), (2, 6, (1,)), (5, 2, ())])
def test_with_enough_beams_the_search_is_exhaustive(
    vocab: int, new: int, stops: tuple[int, ...], power: float, early: bool | str, form: str
) -> None:
    beams = vocab**new
    options: dict[str, Any] = {"length_penalty": power, "length_penalty_form": form, "early_stopping": early}
    sampling = SamplingParams(num_beams=beams, n=min(beams, 10), stop_token_ids=stops, **options)
    for seed in range(3):
        logits = table(vocab, seed)
        expected = every_ending(logits, [1], new, sampling)
        assert same(search(logits, [1], sampling, 1 + new), expected[:10])


def test_with_fewer_beams_the_best_may_be_lost() -> None:
    """The comparison can fail: narrow searches of the same tables find other texts."""
    sampling = SamplingParams(num_beams=2)
    lost = 0
    for seed in range(20):
        logits = table(4, seed)
        (best,) = search(logits, [1], sampling, 5)
        expected = every_ending(logits, [1], 4, sampling)
        assert best.score <= expected[0].score + 1e-5 and any(same([best], [each]) for each in expected)
        lost += best.tokens != expected[0].tokens
    assert 0 < lost < 20


# ---------------------------------------------------------------- transformers


class TableConfig(PretrainedConfig):
    model_type = "table"


class TableModel(PreTrainedModel, GenerationMixin):
    config_class = TableConfig

    def __init__(self, config: TableConfig, logits: Logits) -> None:
        super().__init__(config)
        self.logits = logits
        self.nothing = torch.nn.Parameter(torch.zeros(1))

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        return {"input_ids": input_ids}

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, return_dict: bool = True
    ) -> CausalLMOutput:
        return CausalLMOutput(logits=torch.stack([self.logits(seq) for seq in input_ids.tolist()]).unsqueeze(1))


def hf_beams(
    logits: Logits, prompt: Sequence[int], sampling: SamplingParams, limit: int, **more: Any
) -> list[Hypothesis]:
    """Return the hypotheses of transformers, without padding (-1 is no token id)."""
    vocab = len(logits(prompt))
    model = TableModel(TableConfig(vocab_size=vocab), logits)
    made = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        use_cache=False,
        num_beams=sampling.num_beams,
        num_return_sequences=sampling.n,
        max_length=limit,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        eos_token_id=list(sampling.stop_token_ids) or None,
        pad_token_id=vocab,
        return_dict_in_generate=True,
        output_scores=True,
        **more,
    )
    found = []
    for seq, score in zip(made.sequences.tolist(), made.sequences_scores.tolist(), strict=True):
        tokens = tuple(token for token in seq[len(prompt) :] if token != vocab)
        found.append(Hypothesis(score, tokens, "stop" if tokens[-1] in sampling.stop_token_ids else "length"))
    return found


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("power", [1.0, 0.0, 0.4, 2.0, -1.0])
def test_the_search_equals_transformers(early: bool | str, power: float) -> None:
    lengths = set()
    for seed, (vocab, beams, stops) in enumerate(
        [(6, 2, (0,)), (9, 4, (3,)), (9, 3, (1, 4, 7)), (30, 5, (2,)), (7, 3, ())]
    ):
        sampling = SamplingParams(
            num_beams=beams, n=beams, stop_token_ids=stops, length_penalty=power, early_stopping=early  # type: ignore[arg-type]
        )  # fmt: skip
        logits = table(vocab, seed)
        hypotheses_found = search(logits, [1, 2], sampling, 12)
        assert same(hypotheses_found, hf_beams(logits, [1, 2], sampling, 12)), seed
        lengths |= {(len(each.tokens), each.finish) for each in hypotheses_found}
    assert len(lengths) > (1 if power > 1 else 3), "texts of many lengths"


def test_a_diverse_search_equals_transformers() -> None:
    """transformers 4.49.0 is the last version with group beam search; its hypotheses of the same tables are stored.

    Its padding token, which it gives to groups that have ended, was one that no text contains.
    """
    golden = json.loads((Path(__file__).parents[2] / "golden_files" / "diverse_beams.json").read_text("utf-8"))
    for seed, case in enumerate(golden["cases"]):
        options = {**case["options"], "stop_token_ids": tuple(case["options"]["stop_token_ids"])}
        sampling = SamplingParams(n=options["num_beams"], **options)
        expected = [Hypothesis(score, tuple(tokens), "length") for tokens, score in case["hypotheses"]]
        found = search(table(case["vocab"], seed), golden["prompt"], sampling, case["limit"])
        assert same([replace(each, finish="length") for each in found], expected), seed
        plain = replace(sampling, num_beam_groups=1, diversity_penalty=0.0)
        assert not same(found, search(table(case["vocab"], seed), golden["prompt"], plain, case["limit"]))


def diverse_by_hand(logits: Logits, prompt: list[int], sampling: SamplingParams, new: int) -> list[tuple[int, ...]]:
    """Algorithm 1 of Vijayakumar et al. 2016 for texts that do not end: the beams of all groups, group by group."""
    groups: list[dict[tuple[int, ...], float]] = [{(): 0.0}] * sampling.num_beam_groups
    for _ in range(new):
        chosen: list[int] = []
        for index, beams in enumerate(groups):
            scores = {}
            for text, score in beams.items():
                for token, logprob in enumerate(logits([*prompt, *text]).log_softmax(-1).tolist()):
                    penalty = sampling.diversity_penalty * chosen.count(token)
                    scores[*text, token] = score + logprob - penalty
            best = sorted(scores, key=lambda text: -scores[text])[: sampling.beams_per_group]
            groups[index] = {text: scores[text] for text in best}
            chosen += [text[-1] for text in best]
    ranked = [(score, text) for beams in groups for text, score in beams.items()]
    return [text for _, text in sorted(ranked, reverse=True)]


def test_a_diverse_search_equals_the_algorithm_in_the_engine() -> None:
    """The engine's beams fork and share blocks as those of one group do."""
    model = build(model_config(), seed=3).double()
    distinct = set()
    for num_beams, num_groups, penalty in ((4, 2, 0.5), (6, 3, 2.0), (3, 3, 50.0), (4, 2, 0.0)):
        options: dict[str, Any] = {"num_beams": num_beams, "num_beam_groups": num_groups, "n": num_beams}
        sampling = SamplingParams(**options, diversity_penalty=penalty, max_tokens=6, ignore_eos=True)
        engine = Engine(model, CacheConfig(max_seq_len=32, max_num_seqs=8, block_size=4, dtype="float64"))
        request = engine.add_request([3, 1, 2], sampling)
        chunks = run_engine(engine)[request]
        found = [tuple(tokens_of(chunks, sample)) for sample in range(num_beams)]
        expected = diverse_by_hand(lambda text: uncached(model, list(text))[-1], [3, 1, 2], sampling, 6)
        assert found == expected
        distinct.add(len({text[0] for text in found}))
    assert max(distinct) == 3, "with a large penalty every group begins with another token"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4, "num_beam_groups": 3}, "num_beam_groups: must divide num_beams"),
        ({"num_beams": 4, "diversity_penalty": 1.0}, "diversity_penalty: requires num_beam_groups above 1"),
        ({"num_beam_groups": 2}, "num_beam_groups: requires num_beams above 1"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": -1.0}, "diversity_penalty: must be"),
    ],
)
def test_impossible_groups_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize("early", [True, False, "never"])
def test_a_search_with_stop_strings_equals_transformers(early: bool | str) -> None:
    """transformers ends a beam by a stopping criterion; here it is two tokens in a row, as a string may be."""

    def ends(tokens: Sequence[int]) -> bool:
        return tuple(tokens[-2:]) in ((1, 2), (4, 4), (0, 5))

    def criterion(ids: Tensor, _: object) -> Tensor:
        return torch.tensor([ends(row[2:]) for row in ids.tolist()])

    stopped = 0
    for seed in range(6):
        sampling = SamplingParams(num_beams=3, n=3, stop_token_ids=(3,), early_stopping=early)  # type: ignore[arg-type]
        logits = table(7, seed)
        found = search(logits, [6, 6], sampling, 14, ends)
        expected = hf_beams(logits, [6, 6], sampling, 14, stopping_criteria=StoppingCriteriaList([criterion]))
        for mine, other in zip(found, expected, strict=True):
            assert mine.tokens == other.tokens and abs(mine.score - other.score) < 1e-5
            assert mine.has_stop_string == ends(mine.tokens)
            assert mine.finish == ("stop" if ends(mine.tokens) or mine.tokens[-1] == 3 else "length")
        stopped += sum(each.has_stop_string for each in found)
    assert stopped > 3


def test_stop_strings_are_searched_only_in_texts_that_may_be_chosen() -> None:
    """Of 34 continuations: those of the two best that end, and the next ones until two live."""
    tested: list[int] = []

    def ends(tokens: Sequence[int]) -> bool:
        tested.append(tokens[-1])
        return tokens[-1] in (5, 7)

    beams = BeamSearch(SamplingParams(num_beams=2, n=2), 1, 9, frozenset(range(100, 116)), ends)
    tokens = (5, 6, 7, 100, 8, *range(9, 38))
    children = beams.advance([[1]], [[(token, -1.0 - rank) for rank, token in enumerate(tokens)]])
    assert tested == [5, 6, 7, 100, 8] and [child.token for child in children] == [6, 8]
    assert [hypothesis.tokens for hypothesis in beams.finished] == [(5,)]


def test_log_probabilities_of_hypotheses_are_the_model_s() -> None:
    for seed, limit in ((0, 12), (1, 12), (2, 4)):
        sampling = SamplingParams(num_beams=3, n=3, stop_token_ids=(3,), logprobs=2, length_penalty=0.0)
        logits = table(7, seed)
        for hypothesis in search(logits, [6], sampling, limit):
            assert [score.token_id for score in hypothesis.logprobs] == list(hypothesis.tokens)
            assert math.isclose(sum(score.logprob for score in hypothesis.logprobs), hypothesis.score, abs_tol=1e-5)
            for at, score in enumerate(hypothesis.logprobs):
                model = logits([6, *hypothesis.tokens[:at]]).log_softmax(-1)
                assert math.isclose(score.logprob, float(model[score.token_id]), abs_tol=1e-6)
                assert [token for token, _ in score.top_logprobs] == model.topk(2).indices.tolist()


def evens(text: Sequence[int]) -> list[int]:
    return [token for token in range(9) if token % 2 == len(text) % 2 or token == 3]


CONSTRAINTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "min_tokens": ({"min_tokens": 4}, {"min_new_tokens": 4}),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
    "bad_words_ids": ({"bad_words_ids": ((5,), (1, 7), (2, 4, 6))}, {"bad_words_ids": [[5], [1, 7], [2, 4, 6]]}),
    "forced_bos_token_id": ({"forced_bos_token_id": 8}, {"forced_bos_token_id": 8}),
    "forced_eos_token_id": ({"forced_eos_token_id": 3}, {"forced_eos_token_id": 3}),
    "allowed_tokens_fn": (
        {"allowed_tokens_fn": evens},
        {"prefix_allowed_tokens_fn": lambda _, ids: evens(ids.tolist())},
    ),
    "repetition_penalty": ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("early", [True, False])
def test_a_constrained_search_equals_transformers(name: str, early: bool) -> None:
    """Generate four tokens; the prompt is longer than any bad word, because transformers ignores shorter contexts."""
    kvad_only, hf_only = CONSTRAINTS[name]
    prompt = [1] if name == "forced_bos_token_id" else [4, 1, 2]
    changed, limit = 0, len(prompt) + 4
    for seed in range(6):
        logits = table(9, seed)
        options: dict[str, Any] = {"num_beams": 3, "n": 3, "stop_token_ids": (3,), "early_stopping": early}
        hypotheses_found = search(logits, prompt, SamplingParams(**options, **kvad_only), limit)
        assert same(hypotheses_found, hf_beams(logits, prompt, SamplingParams(**options), limit, **hf_only)), seed
        changed += not same(hypotheses_found, search(logits, prompt, SamplingParams(**options), limit))
    assert changed > 0, "the constraint made no difference"


# ---------------------------------------------------------------- by hand

A, B, END = 0, 1, 2


def played(
    sampling: SamplingParams, turns: Sequence[Sequence[Sequence[tuple[int, float]]]], limit: int = 99
) -> tuple[BeamSearch, list[list[int]], list[list[BeamCandidate]]]:
    """Pass the candidates of each live beam, step by step, until the search ends."""
    group, texts, steps = BeamSearch(sampling, 1, limit, frozenset({END})), [[9]], []
    for candidates in turns:
        children = group.advance(texts, candidates)
        steps.append(children)
        if not children:
            break
        texts = [[*texts[child.parent], child.token] for child in children]
    return group, texts, steps


def test_the_two_length_penalties() -> None:
    """One token at -1.0, or three at -2.4 in all.

    length 1: -1.0 against -2.4 / 3 = -0.8.    gnmt: (5 + 1) / 6 = 1 and (5 + 3) / 6 = 4/3: -1.0 against -1.8.
    """
    turns = [[[(A, -0.5), (END, -1.0)]], [[(A, -0.9), (B, -9.0)], []], [[(END, -1.0), (A, -9.0)], []]]
    for form, expected in (
        ("length", [(-0.8, (A, A, END)), (-1.0, (END,))]),
        ("gnmt", [(-1.0, (END,)), (-1.8, (A, A, END))]),
    ):
        sampling = SamplingParams(num_beams=2, n=2, length_penalty_form=form, stop_token_ids=(END,))  # type: ignore[arg-type]
        group, texts, _ = played(sampling, turns)
        found = [(round(each.score, 9), each.tokens) for each in group.best_hypotheses(texts)]
        assert found == expected


def test_never_with_a_negative_penalty_compares_at_the_current_length() -> None:
    """With a negative penalty scores fall with the length: -0.2 x 2 may still win, although -0.2 x 98 could not.

    Endings: -2.0 x 1 and -3.0 x 2; then -0.3 x 3 = -0.9 is the best of all.
    """
    turns = [
        [[(A, -0.1), (END, -2.0), (B, -3.0)]],
        [[(A, -0.1), (END, -2.9)], [(A, -9.0), (B, -9.5)]],
        [[(END, -0.1), (A, -5.0)], [(A, -9.0), (B, -9.5)]],
        [[(A, -9.0), (B, -9.5)], [(A, -9.0), (B, -9.5)]],
    ]
    sampling = SamplingParams(num_beams=2, n=2, length_penalty=-1.0, early_stopping="never", stop_token_ids=(END,))
    group, texts, _ = played(sampling, turns)
    found = [(round(each.score, 9), each.tokens) for each in group.best_hypotheses(texts)]
    assert found == [(-0.9, (A, A, END)), (-2.0, (END,))]


def test_ties_go_to_the_first_beam_then_to_the_lowest_token() -> None:
    turns = [[[(B, -1.0), (A, -1.0)]], [[(B, -1.0), (A, -1.0)], [(B, -1.0), (A, -1.0)]]]
    _, _, steps = played(SamplingParams(num_beams=2), turns)
    assert [(child.parent, child.token) for child in steps[0]] == [(0, A), (0, B)]
    assert [(child.parent, child.token) for child in steps[1]] == [(0, A), (0, B)]


# Two beams.  After two tokens -1.0 and -1.2 have ended and -1.5 lives.  As long as it is now it is worth -0.75 a token,
# better than the worse ending (-1.0); after three, -0.7 is not; without a length penalty -1.5 never is.
ENDINGS = [
    [[(END, -1.0), (A, -1.1), (B, -1.15)]],
    [[(END, -0.1), (A, -0.4), (B, -3.0)], [(A, -5.0), (B, -6.0)]],
    [[(END, -0.15), (A, -0.6), (B, -3.0)], [(A, -5.0), (B, -6.0)]],
    [[(END, -0.1), (A, -0.9), (B, -3.0)], [(A, -5.0), (B, -6.0)]],
]


@pytest.mark.parametrize(
    ("early", "power", "turns", "scores"),
    [
        (True, 1.0, 2, (-0.6, -1.0)),  # two have ended, whatever lives
        (False, 1.0, 3, (-0.55, -0.6)),
        (True, 0.0, 2, (-1.0, -1.2)),
        (False, 0.0, 2, (-1.0, -1.2)),
        ("never", 0.0, 2, (-1.0, -1.2)),
    ],
)
def test_the_end_of_a_search(early: bool | str, power: float, turns: int, scores: tuple[float, float]) -> None:
    sampling = SamplingParams(num_beams=2, n=2, early_stopping=early, length_penalty=power, stop_token_ids=(END,))  # type: ignore[arg-type]
    group, texts, steps = played(sampling, ENDINGS)
    assert len(steps) == turns and steps[-1] == []
    assert [round(each.score, 6) for each in group.best_hypotheses(texts)] == pytest.approx(scores)


def test_early_stopping_never_considers_the_longest_text() -> None:
    """Live -6.0 after two tokens: -3.0 each now, but at the limit of 10 at best -0.6: "never" continues, False ends."""
    turns = [[[(END, -1.0), (A, -3.0)]], [[(END, -0.5), (A, -3.0)]], [[(END, -0.1), (A, -0.1)]]]
    for early, ended in ((False, 2), ("never", 3)):
        sampling = SamplingParams(num_beams=2, n=2, early_stopping=early, stop_token_ids=(END,))  # type: ignore[arg-type]
        _, _, steps = played(sampling, turns, limit=11)
        assert len(steps) == ended, early


def test_patience_waits_for_more_endings() -> None:
    """Kasai et al. 2022: first-come-first-served until beams * patience have ended; all of them compete."""
    turns = [[[(END, -1.0), (A, -1.0)]]] + [[[(END, -0.5 / 2**i), (A, -0.2)], []] for i in range(6)]
    for patience, ended in ((0.5, 1), (1.0, 2), (1.5, 3), (2.0, 4)):
        sampling = SamplingParams(num_beams=2, n=1, early_stopping=True, patience=patience, stop_token_ids=(END,))
        group, _, steps = played(sampling, turns)
        assert len(steps) == ended and steps[-1] == []
        assert len(group.finished) == ended


def test_live_beams_complete_the_hypotheses() -> None:
    """If fewer than n hypotheses ended, live beams are returned with their present length."""
    group, texts, steps = played(
        SamplingParams(num_beams=3, n=3, stop_token_ids=(END,)), [[[(A, -1.0), (B, -1.5), (END, -2.0)]]]
    )
    assert steps == [[BeamCandidate(0, A, -1.0), BeamCandidate(0, B, -1.5)]]
    assert [each.tokens for each in group.best_hypotheses(texts)] == [(END,), (A,), (B,)]
    assert [each.finish for each in group.best_hypotheses(texts)] == ["stop", "length", "length"]


def test_an_end_below_the_best_beams_is_not_a_hypothesis() -> None:
    """A stop token at rank 3 of 2 beams ends no hypothesis and continues none."""
    group, texts, steps = played(
        SamplingParams(num_beams=2, stop_token_ids=(END,)), [[[(A, -1.0), (B, -1.1), (END, -1.2)]]]
    )
    assert [child.token for child in steps[0]] == [A, B] and group.finished == [] and len(texts) == 2


def test_at_the_limit_the_best_beams_end() -> None:
    turns = [[[(A, -1.0), (B, -1.1)]], [[(A, -1.0), (END, -1.5), (B, -7.0)], [(B, -0.2), (A, -9.0)]]]
    group, texts, steps = played(SamplingParams(num_beams=2, n=2, stop_token_ids=(END,)), turns, limit=3)
    assert steps[-1] == []
    assert [(each.tokens, each.finish) for each in group.best_hypotheses(texts)] == [
        ((B, B), "length"),
        ((A, A), "length"),
    ]


def test_banned_tokens_are_not_candidates() -> None:
    group, _, steps = played(
        SamplingParams(num_beams=2, stop_token_ids=(END,)), [[[(A, -1.0), (B, -math.inf), (END, -math.inf)]]]
    )
    assert steps == [[BeamCandidate(0, A, -1.0)]] and group.finished == []


@pytest.mark.parametrize(("beams", "stops", "looked_at"), [(2, 0, 4), (2, 1, 4), (3, 2, 9), (4, 5, 24)])
def test_the_number_of_candidates(beams: int, stops: int, looked_at: int) -> None:
    assert num_candidates(SamplingParams(num_beams=beams), stops) == looked_at


# ---------------------------------------------------------------- on real caches

END_TOKENS = (5, 17)


def cache_of(layout: str = "paged", **more: Any) -> CacheConfig:
    fixed = {
        "dtype": "float64",
        "block_size": 4,
        "max_num_seqs": 6,
        "max_seq_len": 40,
        "prefill_chunk_size": 8,
        "max_source_len": 24,
    }
    return CacheConfig(layout=layout, **(fixed | more))  # type: ignore[arg-type]


def text(length: int, seed: int, vocab: int = VOCAB) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@remembered
def model_of(kind: str) -> Transformer:
    """Return sampling parameters that favor stop tokens, so that searches have many lengths."""
    position, heads = kind.split("-")[1:]
    config = pair_config(position, "pre", heads) if kind.startswith("pair") else model_config(position, "pre", heads)
    return build(config)


KINDS = ("decoder-alibi-gqa", "decoder-rope-window", "pair-t5-gqa", "pair-rope-mqa")


def sampling_of(beams: int, new: int, **more: Any) -> SamplingParams:
    bias = dict.fromkeys(END_TOKENS, 2.0)
    fixed = {"num_beams": beams, "n": beams, "max_tokens": new, "stop_token_ids": END_TOKENS, "logit_bias": bias}
    return SamplingParams(**(fixed | more))  # type: ignore[arg-type]


class SearchOptions:
    """Options of one search, and its expected result."""

    def __init__(self, kind: str, seed: int, sampling: SamplingParams, length: int = 6) -> None:
        self.model, self.sampling, self.prompt = model_of(kind), sampling, text(length, seed)
        self.source = text(5 + seed % 7, seed, SOURCE_VOCAB) if kind.startswith("pair") else None

    def right(self) -> list[Hypothesis]:
        new = self.sampling.max_tokens
        assert new is not None
        limit = len(self.prompt) + new

        def logits(tokens: Sequence[int]) -> Tensor:
            return uncached(self.model, tokens, self.source)[-1]

        return search(logits, self.prompt, self.sampling, limit)

    def submit(self, engine: Engine) -> int:
        return engine.add_request(self.prompt, self.sampling, encoder_token_ids=self.source)


def run(engine: Engine) -> dict[int, list[StreamChunk]]:
    chunks = run_engine(engine, poison=True)
    assert all(pool.num_live == 0 for pool in engine.kv_cache_manager.pools)
    return chunks


def hypotheses(chunks: Sequence[StreamChunk], n: int) -> list[Hypothesis]:
    found = []
    for number in range(n):
        own = [chunk for chunk in chunks if chunk.sample_index == number]
        assert own[-1].finish_reason is not None and own[-1].cumulative_logprob is not None, own[-1].error
        tokens = tuple(tokens_of(own, number))
        found.append(Hypothesis(own[-1].cumulative_logprob, tokens, own[-1].finish_reason))
    return found


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
@pytest.mark.parametrize("kind", KINDS)
def test_cached_beams_equal_uncached_ones(kind: str, layout: str) -> None:
    """Texts and scores are equal alone and in a batch with other searches and requests."""
    options: list[dict[str, Any]] = [{}, {"early_stopping": True, "length_penalty": 0.3}, {"no_repeat_ngram_size": 2}]
    searches = [SearchOptions(kind, seed, sampling_of(3, 9, **more)) for seed, more in enumerate(options)]
    for each in searches:
        expected = each.right()
        engine = Engine(each.model, cache_of(layout))
        number = each.submit(engine)
        assert same(hypotheses(run(engine)[number], 3), expected)
    engine = Engine(searches[0].model, cache_of(layout, max_num_seqs=8))
    plain = SearchOptions(kind, 7, SamplingParams(max_tokens=8, temperature=0, n=2))
    numbers = [each.submit(engine) for each in (plain, *searches)]
    chunks = run(engine)
    for each, number in zip(searches, numbers[1:], strict=True):
        assert same(hypotheses(chunks[number], 3), each.right())


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("kind", ["decoder-alibi-gqa", "pair-t5-gqa"])
def test_preempted_beams_equal_uncached_ones(kind: str, prefix: bool) -> None:
    model = model_of(kind)
    searches = [SearchOptions(kind, seed, sampling_of(3, 10, stop_token_ids=())) for seed in range(4)]
    engine = Engine(
        model, cache_of(num_blocks=3 * 4, enable_prefix_caching=prefix)
    )  # room for one search that shares nothing
    plain = SearchOptions(kind, 7, SamplingParams(max_tokens=12, temperature=0))
    numbers = [each.submit(engine) for each in (*searches, plain)]
    chunks = run(engine)
    assert engine.scheduler.stats().preemptions > 0
    for each, number in zip(searches, numbers, strict=False):
        assert same(hypotheses(chunks[number], 3), each.right())


def test_beams_of_one_encoder_input_are_one_row_of_cross_attention() -> None:
    beams = SearchOptions("pair-rope-mqa", 3, sampling_of(4, 9, stop_token_ids=()))
    engine = Engine(beams.model, cache_of())
    number, folded = beams.submit(engine), 0
    real = engine.runner.execute

    def watched(output: Any) -> Tensor:
        nonlocal folded
        folded += output.sub_batches[0].num_seqs == 4 and output.cross_sub_batches[0].num_seqs == 1
        return real(output)

    engine.runner.execute = watched  # type: ignore[method-assign]
    assert same(hypotheses(run(engine)[number], 4), beams.right())
    assert folded >= 7


def test_only_the_best_hypotheses_are_returned() -> None:
    beams = SearchOptions("decoder-alibi-gqa", 5, sampling_of(4, 8))
    best = beams.right()
    for n in (1, 2):
        engine = Engine(beams.model, cache_of())
        number = engine.add_request(beams.prompt, sampling_of(4, 8, n=n))
        assert same(hypotheses(run(engine)[number], n), best[:n])
        assert engine.metrics(number).num_completion_tokens == sum(len(each.tokens) for each in best[:n])


def test_an_aborted_search_leaves_nothing() -> None:
    searches = [SearchOptions("pair-t5-gqa", seed, sampling_of(3, 12, stop_token_ids=())) for seed in range(2)]
    engine = Engine(searches[0].model, cache_of())
    numbers = [each.submit(engine) for each in searches]
    for _ in range(5):
        engine.step()
    engine.abort_request(numbers[0])
    chunks = run(engine)
    assert numbers[0] not in chunks
    assert same(hypotheses(chunks[numbers[1]], 3), searches[1].right())


def test_a_search_without_candidates_is_an_error() -> None:
    """No token is allowed after two tokens: an error, and other requests continue."""

    def dead_end(tokens: Sequence[int]) -> Sequence[int]:
        return [1, 2, 3] if len(tokens) < 8 else []

    engine = Engine(model_of("decoder-alibi-gqa"), cache_of())
    stuck = engine.add_request(text(6, 1), sampling_of(2, 9, allowed_tokens_fn=dead_end))
    fine = SearchOptions("decoder-alibi-gqa", 2, sampling_of(2, 6))
    number = fine.submit(engine)
    chunks = run(engine)
    assert {chunk.finish_reason for chunk in chunks[stuck]} == {"error"}
    assert same(hypotheses(chunks[number], 2), fine.right())


def test_a_beam_without_candidates_does_not_affect_others() -> None:
    """A beam whose next tokens are all forbidden is dropped; the others are searched as without it."""
    beams = SearchOptions("decoder-alibi-gqa", 4, sampling_of(3, 7, stop_token_ids=()))
    dead = beams.right()[0].tokens[2]

    def allowed(tokens: Sequence[int]) -> Sequence[int]:
        return [] if len(tokens) == 9 and tokens[8] == dead else range(VOCAB)

    beams.sampling = sampling_of(3, 7, stop_token_ids=(), allowed_tokens_fn=allowed)
    expected = beams.right()
    assert [each.tokens[2] == dead for each in expected] == [False] * 3
    engine = Engine(beams.model, cache_of())
    number = beams.submit(engine)
    assert same(hypotheses(run(engine)[number], 3), expected)


# ---------------------------------------------------------------- invalid options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 7}, r"num_beams: must be at most max_num_seqs \(6\), got 7"),
        ({"num_beams": 6, "max_tokens": 30}, "no room for 6 beams of 36 tokens"),
    ],
)
def test_searches_that_do_not_fit_are_rejected(options: dict[str, Any], words: str) -> None:
    engine = Engine(model_of("decoder-alibi-gqa"), cache_of(num_blocks=50))
    with pytest.raises(RequestError, match=words):
        engine.add_request(text(6, 1), SamplingParams(**({"max_tokens": 4} | options)))
    assert engine.idle


def test_a_search_may_fill_the_pool() -> None:
    """Two beams of 9 tokens, of which 8 are stored, need 2 blocks each."""
    searches = []
    for num_blocks in (4, 40):
        engine = Engine(model_of("decoder-alibi-gqa"), cache_of(num_blocks=num_blocks))
        number = engine.add_request(text(4, 1), SamplingParams(num_beams=2, n=2, max_tokens=5))
        searches.append(hypotheses(run(engine)[number], 2))
    assert same(*searches)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 3}, r"n: must be at most num_beams \(2\), got 3"),
        ({"top_k": 4}, "top_k: cannot be combined with num_beams=2"),
        ({"top_p": 0.5}, "top_p: cannot be combined with num_beams=2"),
        ({"min_p": 0.1}, "min_p: cannot be combined with num_beams=2"),
        ({"typical_p": 0.5}, "typical_p: cannot be combined with num_beams=2"),
        ({"temperature": 0.7}, "temperature: cannot be combined with num_beams=2, got 0.7"),
        ({"num_beams": 0}, "num_beams: must be from 1 to 128, got 0"),
        ({"num_beams": 129}, "num_beams: must be from 1 to 128, got 129"),
        ({"patience": 0}, "patience: must be "),
        ({"length_penalty": math.nan}, "length_penalty: must be a finite number, got nan"),
        ({"length_penalty_form": "google"}, "length_penalty_form: must be one of 'length', 'gnmt', got 'google'"),
        ({"early_stopping": "soon"}, "early_stopping: must be true, false or 'never', got 'soon'"),
        ({"allowed_tokens_fn": [1, 2]}, "allowed_tokens_fn: must be a function"),
        ({"forced_bos_token_id": -1}, "forced_bos_token_id: must be at least 0, got -1"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size: must be at least 0, got -1"),
    ],
)
def test_options_without_beams_are_rejected_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        SamplingParams(**({"num_beams": 2} | options))


@pytest.mark.parametrize("name", ["forced_bos_token_id", "forced_eos_token_id"])
def test_a_forced_token_must_be_in_the_vocabulary(name: str) -> None:
    engine = Engine(model_of("decoder-alibi-gqa"), cache_of())
    with pytest.raises(RequestError, match=f"{name}: token id must be below {VOCAB}, got {VOCAB}"):
        engine.add_request([1], SamplingParams(max_tokens=4, **{name: VOCAB}))
