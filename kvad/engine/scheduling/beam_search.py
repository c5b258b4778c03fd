"""Beam search over one request: which continuations live, which have ended, and when nothing better can come.

A pure function of candidates, so that it can be held against a search by hand.  Each step, of all continuations of the
live beams the best ``keep`` are looked at; those that end (a stop token, or the limit) among the first ``beams`` become
hypotheses, the others live on.  Scores are sums of log-probabilities, divided by a penalty of the generated length
(ends included): ``length ** a``, as transformers and fairseq have it, or ``((5 + length) / 6) ** a`` (Wu et al. 2016,
eq. 14).  ``early_stopping``: True ends at ``beams * patience`` hypotheses (Kasai et al. 2022); False when the best live
beam, as long as it is now, would not come in; "never" when it could not even at the limit.

The choices are those of transformers' ``_beam_search``, to the order of ties.  No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvad.engine.scheduling.request import FinishReason, SamplingParams

Candidates = Sequence[tuple[int, float]]  # (token, log-probability), best first


class BeamCandidate(NamedTuple):
    """The beam ``parent`` goes on with ``token``."""

    parent: int
    token: int
    score: float


@dataclass(frozen=True)
class Hypothesis:
    """An ended continuation: its generated tokens, and its sum of log-probabilities over the penalty."""

    score: float
    tokens: tuple[int, ...]
    finish: FinishReason


def num_candidates(sampling: SamplingParams, num_stops: int) -> int:
    """How many continuations must be looked at so that ``beams`` of them do not end."""
    return max(2, 1 + num_stops) * sampling.num_beams


class BeamSearch:
    """``limit``: tokens, prompt included, that a beam may reach."""

    def __init__(self, sampling: SamplingParams, prompt: int, limit: int, stops: frozenset[int]) -> None:
        self.sampling, self.prompt, self.limit, self.stops = sampling, prompt, limit, stops
        self.scores = [0.0]  # of the live beams, best first
        self.finished: list[Hypothesis] = []
        self._room = max(sampling.num_beams, math.ceil(sampling.num_beams * sampling.patience))
        self._full = math.ceil(sampling.num_beams * sampling.patience)
        self._improvable = True
        self._left: list[tuple[int, ...]] | None = None  # the live beams of a search that is over

    def advance(self, sequences: Sequence[Sequence[int]], candidates: Sequence[Candidates]) -> list[BeamCandidate]:
        """The beams that live on, given each one's tokens so far and its best continuations; [] when it is over."""
        s, length = self.sampling, len(sequences[0]) + 1 - self.prompt
        last = len(sequences[0]) + 1 >= self.limit
        every = [
            BeamCandidate(parent, token, self.scores[parent] + logprob)
            for parent, found in enumerate(candidates)
            for token, logprob in found
            if logprob > -math.inf
        ]
        every.sort(key=lambda child: (-child.score, child.parent, child.token))
        best = every[: num_candidates(s, len(self.stops))]
        open_ = self._improvable and not (s.early_stopping is True and len(self.finished) >= self._full)
        for child in best[: s.num_beams] if open_ else ():
            if last or child.token in self.stops:
                tokens = (*sequences[child.parent][self.prompt :], child.token)
                reason: FinishReason = "stop" if child.token in self.stops else "length"
                self.finished.append(Hypothesis(child.score / self._penalty(length), tokens, reason))
        self.finished = sorted(self.finished, key=lambda each: -each.score)[: self._room]
        alive = [] if last else [child for child in best if child.token not in self.stops][: s.num_beams]
        self.scores = [child.score for child in alive]
        if alive and not self._over(length):
            return alive
        self._left = [(*sequences[child.parent], child.token) for child in alive]
        return []

    def best_hypotheses(self, sequences: Sequence[Sequence[int]]) -> list[Hypothesis]:
        """The ``n`` best hypotheses; where too few have ended, the live beams ``sequences`` stand in as they are (those
        of a search that is over: with the tokens that they would have gone on with)."""
        sequences = sequences if self._left is None else self._left
        live = [
            Hypothesis(score / self._penalty(max(1, len(tokens) - self.prompt)), tuple(tokens[self.prompt :]), "length")
            for score, tokens in zip(self.scores, sequences, strict=False)
        ]
        return (self.finished + live)[: self.sampling.n]

    def _over(self, length: int) -> bool:
        s = self.sampling
        longest = self.limit - self.prompt if s.early_stopping == "never" and s.length_penalty > 0 else length
        if len(self.finished) >= s.num_beams:
            worst = min(each.score for each in self.finished)
            self._improvable = self._improvable and self.scores[0] / self._penalty(longest) > worst
        return not self._improvable or (s.early_stopping is True and len(self.finished) >= self._full)

    def _penalty(self, length: int) -> float:
        s = self.sampling
        base = (5 + length) / 6 if s.length_penalty_form == "gnmt" else length
        return float(base**s.length_penalty)
