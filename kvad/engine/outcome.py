"""What came out of a step: the logits of each row's work become a token, candidates and scores, or a fault.

A fault is one row's: what its logits hold that is no number, what a caller's own function raises.  Its neighbours' are
read as if it were not there.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvad.engine.request import Result
from kvad.engine.row import Plan, Work
from kvad.engine.sampler import FAULT, Chosen, Job, sample, score_tokens

__all__ = ["results_of"]


def results_of(plan: Plan, logits: Tensor) -> list[Result]:
    """Sample and score each work's share of the logits [N, V]."""
    sampled: list[tuple[int, int]] = []
    start, shares = 0, []
    for number, work in enumerate(plan.work):
        stop = start + len(work.wanted)
        if work.samples:
            sampled.append((number, stop - 1))
        shares.append((start, stop - 1 if work.samples else stop))
        start = stop
    results = [_scored(work, logits, share) for work, share in zip(plan.work, shares, strict=True)]
    if sampled:
        jobs = [_job(plan.work[number]) for number, _ in sampled]
        for (number, _), chosen in zip(sampled, _chosen(logits[[at for _, at in sampled]], jobs), strict=True):
            before = results[number]
            fault = before.fault or chosen.fault
            results[number] = Result(chosen.token, chosen.score, before.prompt, fault, candidates=chosen.candidates)
    return results


def _chosen(logits: Tensor, jobs: Sequence[Job]) -> list[Chosen]:
    """Sample [N, V]; a caller's own function (``Sampling.allowed``) that raises ends its row and no other."""
    try:
        return sample(logits, jobs)
    except Exception as error:
        if all(job.sampling.allowed is None for job in jobs):
            raise
        if len(jobs) == 1:
            return [Chosen(0, None, f"sampling failed: {type(error).__name__}: {error}")]
        return [chosen for row, job in zip(logits.split(1), jobs, strict=True) for chosen in _chosen(row, [job])]


def _scored(work: Work, logits: Tensor, share: tuple[int, int]) -> Result:
    low, high = share
    if low == high:
        return Result()
    first = work.start + work.wanted[0] + 1
    targets = work.row.tokens[first : first + high - low]
    scores = score_tokens(logits[low:high], targets, work.row.sampling.prompt_logprobs or 0)
    return Result(fault=FAULT) if scores is None else Result(prompt=tuple(scores))


def _job(work: Work) -> Job:
    row = work.row
    return Job(row.sampling, row.tokens, row.prompt_len, row.sample, row.stop_tokens, row.limit)
