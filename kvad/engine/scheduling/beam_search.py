"""Beam search over one request: live continuations, ended hypotheses, end of the search.

A pure function of candidates, so it can be compared with a search by hand. In each step the best
``num_candidates`` continuations of the live beams are considered; those of the first ``num_beams`` that end (a stop
token, or the limit) become hypotheses, the others stay live. Scores are sums of log-probabilities divided by a penalty
of the generated length (ends included): ``length ** a`` as in transformers and fairseq, or ``((5 + length) / 6) ** a``
(Wu et al. 2016, eq. 14). ``early_stopping``: True ends at ``num_beams * patience`` hypotheses (Kasai et al. 2022);
False when the best live beam at its current length would not enter; "never" when it could not even at the limit.

The choices equal those of transformers' ``_beam_search``, up to the order of ties. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvad import cache
from kvad.engine.scheduling.request import FinishReason, SamplingParams, StreamChunk

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


def num_candidates(sampling_params: SamplingParams, num_stop_tokens: int) -> int:
    """Return the number of continuations to consider so that ``num_beams`` of them do not end."""
    return max(2, 1 + num_stop_tokens) * sampling_params.num_beams


class BeamSearch:
    """State of one search; ``max_len`` is the maximum length of a beam, prompt included."""

    def __init__(
        self, sampling_params: SamplingParams, num_prompt_tokens: int, max_len: int, stop_tokens: frozenset[int]
    ) -> None:
        self.sampling_params, self.num_prompt_tokens = sampling_params, num_prompt_tokens
        self.max_len, self.stop_tokens = max_len, stop_tokens
        self.scores = [0.0]  # scores of the live beams, best first
        self.finished: list[Hypothesis] = []
        self._num_hypotheses_to_end = math.ceil(sampling_params.num_beams * sampling_params.patience)
        self._max_hypotheses = max(sampling_params.num_beams, self._num_hypotheses_to_end)
        self._improvable = True
        self._final_sequences: list[tuple[int, ...]] | None = None  # the live beams of a finished search

    def advance(self, sequences: Sequence[Sequence[int]], candidates: Sequence[Candidates]) -> list[BeamCandidate]:
        """Return the continuations that stay live, given tokens and candidates; [] at the end."""
        params, length = self.sampling_params, len(sequences[0]) + 1 - self.num_prompt_tokens
        last = len(sequences[0]) + 1 >= self.max_len
        all_candidates = [
            BeamCandidate(parent, token, self.scores[parent] + logprob)
            for parent, continuations in enumerate(candidates)
            for token, logprob in continuations
            if logprob > -math.inf
        ]
        all_candidates.sort(key=lambda child: (-child.score, child.parent, child.token))
        best = all_candidates[: num_candidates(params, len(self.stop_tokens))]
        for child in best[: params.num_beams] if self._improvable and not self._ends_early() else ():
            if last or child.token in self.stop_tokens:
                tokens = (*sequences[child.parent][self.num_prompt_tokens :], child.token)
                reason: FinishReason = "stop" if child.token in self.stop_tokens else "length"
                self.finished.append(Hypothesis(child.score / self._penalty(length), tokens, reason))
        self.finished = sorted(self.finished, key=lambda hypothesis: -hypothesis.score)[: self._max_hypotheses]
        live = [] if last else [child for child in best if child.token not in self.stop_tokens][: params.num_beams]
        self.scores = [child.score for child in live]
        if live and not self._over(length):
            return live
        self._final_sequences = [(*sequences[child.parent], child.token) for child in live]
        return []

    def best_hypotheses(self, sequences: Sequence[Sequence[int]]) -> list[Hypothesis]:
        """Return the ``n`` best hypotheses.

        If too few have ended, the live beams ``sequences`` fill up as they are; those of a finished search include the
        tokens that would have continued them.
        """
        sequences = sequences if self._final_sequences is None else self._final_sequences
        live = []
        for score, tokens in zip(self.scores, sequences, strict=False):
            output = tuple(tokens[self.num_prompt_tokens :])
            live.append(Hypothesis(score / self._penalty(max(1, len(output))), output, "length"))
        return (self.finished + live)[: self.sampling_params.n]

    def _over(self, length: int) -> bool:
        params = self.sampling_params
        is_hopeful = params.early_stopping == "never" and params.length_penalty > 0
        max_output_len = self.max_len - self.num_prompt_tokens if is_hopeful else length
        if len(self.finished) >= params.num_beams:
            worst = min(hypothesis.score for hypothesis in self.finished)
            self._improvable = self._improvable and self.scores[0] / self._penalty(max_output_len) > worst
        return not self._improvable or self._ends_early()

    def _ends_early(self) -> bool:
        return self.sampling_params.early_stopping is True and len(self.finished) >= self._num_hypotheses_to_end

    def _penalty(self, length: int) -> float:
        params = self.sampling_params
        base = (5 + length) / 6 if params.length_penalty_form == "gnmt" else length
        return float(base**params.length_penalty)


def hypothesis_chunks(
    request_id: int, hypotheses: Sequence[Hypothesis], limit: cache.config.LengthLimit
) -> list[StreamChunk]:
    """Return the tokens of the best hypotheses; the last chunk of each has its score."""
    chunks: list[StreamChunk] = []
    for sample, hypothesis in enumerate(hypotheses):
        *tokens, last = hypothesis.tokens or (None,)
        chunks.extend(StreamChunk(request_id, sample, token) for token in tokens)
        last_chunk = StreamChunk(request_id, sample, last, finish_reason=hypothesis.finish)
        limited_by = limit if hypothesis.finish == "length" else None
        chunks.append(last_chunk._replace(cumulative_logprob=hypothesis.score, limit=limited_by))
    return chunks
