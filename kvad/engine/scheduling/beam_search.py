"""Beam search over one request: live continuations, ended hypotheses, end of the search.

A pure function of candidates, so it can be compared with a search by hand. In each step the best
``num_candidates`` continuations of the live beams are considered; those of the first ``num_beams`` that end (a stop
token, a stop string, or the limit) become hypotheses, the others stay live. Scores are sums of log-probabilities
divided by a penalty of the generated length (ends included): ``length ** a`` as in transformers and fairseq, or
``((5 + length) / 6) ** a`` (Wu et al. 2016, eq. 14). ``early_stopping``: True ends at ``num_beams * patience``
hypotheses (Kasai et al. 2022); False when the best live beam at its current length would not enter; "never" when it
could not even at the limit.

The choices equal those of transformers' ``_beam_search``, up to the order of ties. ``DiverseBeamSearch`` runs groups of
beams that avoid each other's tokens. No torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvad import cache
from kvad.engine.scheduling.request import FinishReason, SamplingParams, StreamChunk, TokenLogprob

Candidates = Sequence[tuple[int, float]]  # (token, log-probability), best first


class BeamCandidate(NamedTuple):
    """Continuation of the beam ``parent`` with ``token``."""

    parent: int
    token: int
    score: float


@dataclass(frozen=True)
class Hypothesis:
    """Ended continuation: its generated tokens and its penalized sum of log-probabilities."""

    score: float
    tokens: tuple[int, ...]
    finish: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()  # of its tokens, if requested
    has_stop_string: bool = False  # its last token completes a stop string


def num_candidates(sampling_params: SamplingParams, num_stop_tokens: int) -> int:
    """Return how many continuations of a beam to sample: those of its group, and as many as others may penalize."""
    num_beams = sampling_params.beams_per_group
    return _num_considered(num_beams, num_stop_tokens) + sampling_params.num_beams - num_beams


def _num_considered(num_beams: int, num_stop_tokens: int) -> int:
    """Return the number of continuations to consider so that ``num_beams`` of them do not end."""
    return max(2, 1 + num_stop_tokens) * num_beams


class BeamSearch:
    """State of one search, or of one group of a diverse search.

    ``max_len`` is the maximum length of a beam, prompt included; ``has_stop_string`` returns True if generated tokens
    end with a stop string.
    """

    def __init__(
        self,
        sampling_params: SamplingParams,
        num_prompt_tokens: int,
        max_len: int,
        stop_tokens: frozenset[int],
        has_stop_string: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        self.sampling_params, self.num_prompt_tokens = sampling_params, num_prompt_tokens
        self.max_len, self.stop_tokens = max_len, stop_tokens
        self._has_stop_string = has_stop_string
        self.num_beams = sampling_params.beams_per_group
        self.chosen_tokens: list[int] = []  # in the last step, by beams that did not end before the limit
        self.scores = [0.0]  # scores of the live beams, best first
        self._logprobs: list[tuple[TokenLogprob, ...]] = [()]  # of the live beams' tokens, if requested
        self.finished: list[Hypothesis] = []
        self._num_hypotheses_to_end = math.ceil(self.num_beams * sampling_params.patience)
        self._max_hypotheses = max(self.num_beams, self._num_hypotheses_to_end)
        self._improvable = True
        self._final_sequences: list[tuple[int, ...]] | None = None  # the live beams of a finished search

    def advance(
        self,
        sequences: Sequence[Sequence[int]],
        candidates: Sequence[Candidates],
        logprobs: Sequence[Mapping[int, TokenLogprob]] = (),
    ) -> list[BeamCandidate]:
        """Return the continuations that stay live, given tokens and candidates; [] at the end.

        ``logprobs``: per live beam, the log-probabilities of the candidates by token, if requested.
        """
        length = len(sequences[0]) + 1 - self.num_prompt_tokens
        last = len(sequences[0]) + 1 >= self.max_len
        all_candidates = [
            (-self.scores[parent] - logprob, parent, token)
            for parent, continuations in enumerate(candidates)
            for token, logprob in continuations
            if logprob > -math.inf
        ]
        all_candidates.sort()
        considered = all_candidates[: _num_considered(self.num_beams, len(self.stop_tokens))]
        best = [BeamCandidate(parent, token, -cost) for cost, parent, token in considered]
        live, ended, stopped = self._divide(sequences, best)
        for child in best[: self.num_beams] if self._improvable and not self._ends_early() else ():
            if last or child in ended:
                score, output = child.score / self._penalty(length), self._output(sequences, child)
                reason: FinishReason = "stop" if child in ended else "length"
                history = self._history(child, logprobs)
                self.finished.append(Hypothesis(score, output, reason, history, child in stopped))
        self.finished = sorted(self.finished, key=_descending)[: self._max_hypotheses]
        self.chosen_tokens = [child.token for child in live]
        live = [] if last else live
        self.scores = [child.score for child in live]
        self._logprobs = [self._history(child, logprobs) for child in live]
        if live and not self._over(length):
            return live
        self._final_sequences = [(*sequences[child.parent], child.token) for child in live]
        return []

    def _divide(
        self, sequences: Sequence[Sequence[int]], best: Sequence[BeamCandidate]
    ) -> tuple[list[BeamCandidate], set[BeamCandidate], set[BeamCandidate]]:
        """Return the continuations that stay live, those that end, and those of them that end with a stop string.

        Only as many are tested as can become live or hypotheses, because a test decodes text.
        """
        live, ended, stopped = list[BeamCandidate](), set[BeamCandidate](), set[BeamCandidate]()
        for rank, child in enumerate(best):
            if rank >= self.num_beams and len(live) == self.num_beams:
                break
            if self._has_stop_string is not None and self._has_stop_string(self._output(sequences, child)):
                stopped.add(child)
            if child in stopped or child.token in self.stop_tokens:
                ended.add(child)
            else:
                live.append(child)
        return live, ended, stopped

    def best_hypotheses(self, sequences: Sequence[Sequence[int]]) -> list[Hypothesis]:
        """Return the ``n`` best hypotheses.

        If too few have ended, the live beams ``sequences`` fill up as they are; those of a finished search include the
        tokens that would have continued them.
        """
        return (self.finished + self.live_hypotheses(sequences))[: self.sampling_params.n]

    def live_hypotheses(self, sequences: Sequence[Sequence[int]]) -> list[Hypothesis]:
        """Return the live beams as they are, best first."""
        sequences = sequences if self._final_sequences is None else self._final_sequences
        live = []
        for score, tokens, logprobs in zip(self.scores, sequences, self._logprobs, strict=False):
            output = tuple(tokens[self.num_prompt_tokens :])
            live.append(Hypothesis(score / self._penalty(max(1, len(output))), output, "length", logprobs))
        return live

    def _output(self, sequences: Sequence[Sequence[int]], child: BeamCandidate) -> tuple[int, ...]:
        return (*sequences[child.parent][self.num_prompt_tokens :], child.token)

    def _history(
        self, child: BeamCandidate, logprobs: Sequence[Mapping[int, TokenLogprob]]
    ) -> tuple[TokenLogprob, ...]:
        return (*self._logprobs[child.parent], logprobs[child.parent][child.token]) if logprobs else ()

    def _over(self, length: int) -> bool:
        params = self.sampling_params
        is_hopeful = params.early_stopping == "never" and params.length_penalty > 0
        max_output_len = self.max_len - self.num_prompt_tokens if is_hopeful else length
        if len(self.finished) >= self.num_beams:
            worst = min(hypothesis.score for hypothesis in self.finished)
            self._improvable = self._improvable and self.scores[0] / self._penalty(max_output_len) > worst
        return not self._improvable or self._ends_early()

    def _ends_early(self) -> bool:
        return self.sampling_params.early_stopping is True and len(self.finished) >= self._num_hypotheses_to_end

    def _penalty(self, length: int) -> float:
        params = self.sampling_params
        base = (5 + length) / 6 if params.length_penalty_form == "gnmt" else length
        return float(base**params.length_penalty)


class DiverseBeamSearch:
    """Groups of beams that are searched one after the other in each step (Vijayakumar et al. 2016, Algorithm 1).

    A token's log-probability is reduced by ``diversity_penalty`` for every beam of an earlier group that chose it in
    the same step (Hamming diversity), so scores contain the penalties, as in transformers and fairseq. The arguments
    are those of ``BeamSearch``, which has the same methods.
    """

    def __init__(self, sampling_params: SamplingParams, *args: Any) -> None:
        self.sampling_params = sampling_params
        self._groups = [BeamSearch(sampling_params, *args) for _ in range(sampling_params.num_beam_groups)]
        self._beams = [range(1) for _ in self._groups]  # indices of each group's live beams; all begin with the prompt

    def advance(
        self,
        sequences: Sequence[Sequence[int]],
        candidates: Sequence[Candidates],
        logprobs: Sequence[Mapping[int, TokenLogprob]] = (),
    ) -> list[BeamCandidate]:
        """Return the continuations that stay live, group after group; [] at the end."""
        chosen, children = Counter[int](), list[BeamCandidate]()
        for index, group in enumerate(self._groups):
            beams, first = self._beams[index], len(children)
            if beams:
                own = [[(token, x - self._penalty(chosen[token])) for token, x in candidates[beam]] for beam in beams]
                scores = [logprobs[beam] for beam in beams] if logprobs else ()
                for child in group.advance([sequences[beam] for beam in beams], own, scores):
                    children.append(child._replace(parent=beams[child.parent]))
                chosen.update(group.chosen_tokens)
            self._beams[index] = range(first, len(children))
        return children

    def best_hypotheses(self, sequences: Sequence[Sequence[int]]) -> list[Hypothesis]:
        """Return the ``n`` best hypotheses of all groups; live beams fill up."""
        finished = [hypothesis for group in self._groups for hypothesis in group.finished]
        live: list[Hypothesis] = []
        for group, beams in zip(self._groups, self._beams, strict=True):
            room = group.num_beams - len(group.finished)
            live += group.live_hypotheses([sequences[beam] for beam in beams])[: max(0, room)]
        ranked = sorted(finished, key=_descending) + sorted(live, key=_descending)
        return ranked[: self.sampling_params.n]

    def _penalty(self, num_beams: int) -> float:
        return num_beams * self.sampling_params.diversity_penalty


def _descending(hypothesis: Hypothesis) -> float:
    return -hypothesis.score


def hypothesis_chunks(
    request_id: int, hypotheses: Sequence[Hypothesis], limit: cache.config.LengthLimit
) -> list[StreamChunk]:
    """Return the tokens of the best hypotheses; the last chunk of each has its score.

    The last token of a hypothesis with a stop string has text before it, so it is not marked as a stop token: the
    engine finds the stop string and sets the finish reason.
    """
    chunks: list[StreamChunk] = []
    for sample, hypothesis in enumerate(hypotheses):
        *tokens, last = hypothesis.tokens or (None,)
        *logprobs, last_logprob = hypothesis.logprobs or [None] * max(1, len(hypothesis.tokens))
        pairs = zip(tokens, logprobs, strict=True)
        chunks.extend(StreamChunk(request_id, sample, token, logprob) for token, logprob in pairs)
        finish = "length" if hypothesis.has_stop_string else hypothesis.finish
        last_chunk = StreamChunk(request_id, sample, last, last_logprob, finish_reason=finish)
        limited_by = limit if hypothesis.finish == "length" else None
        chunks.append(last_chunk._replace(cumulative_logprob=hypothesis.score, limit=limited_by))
    return chunks
