"""What came out of a step: the logits of each row's work become a token, candidates and scores, or a fault.

A fault is one row's: what its logits hold that is no number, what a caller's own function raises.  Its neighbours' are
read as if it were not there.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvad.engine.request import SequenceOutput
from kvad.engine.row import ScheduledSequence, SchedulerOutput
from kvad.engine.sampler import NONFINITE_ERROR, SampledToken, SamplingRow, gather_logprobs, sample_tokens

__all__ = ["sample_outputs"]


def sample_outputs(plan: SchedulerOutput, logits: Tensor) -> list[SequenceOutput]:
    """Sample and score each work's share of the logits [N, V]."""
    sampled: list[tuple[int, int]] = []
    start, shares = 0, []
    for number, work in enumerate(plan.scheduled):
        stop = start + len(work.logit_offsets)
        if work.is_sampled:
            sampled.append((number, stop - 1))
        shares.append((start, stop - 1 if work.is_sampled else stop))
        start = stop
    results = [_scored(work, logits, share) for work, share in zip(plan.scheduled, shares, strict=True)]
    if sampled:
        jobs = [_job(plan.scheduled[number]) for number, _ in sampled]
        for (number, _), chosen in zip(sampled, _chosen(logits[[at for _, at in sampled]], jobs), strict=True):
            before = results[number]
            fault = before.error or chosen.error
            results[number] = SequenceOutput(
                chosen.token, chosen.logprob, before.prompt_logprobs, fault, candidates=chosen.candidates
            )
    return results


def _chosen(logits: Tensor, jobs: Sequence[SamplingRow]) -> list[SampledToken]:
    """Sample [N, V]; a caller's own function (``Sampling.allowed``) that raises ends its row and no other."""
    try:
        return sample_tokens(logits, jobs)
    except Exception as error:
        if all(job.sampling.allowed_tokens_fn is None for job in jobs):
            raise
        if len(jobs) == 1:
            return [SampledToken(0, None, f"sampling failed: {type(error).__name__}: {error}")]
        return [chosen for row, job in zip(logits.split(1), jobs, strict=True) for chosen in _chosen(row, [job])]


def _scored(work: ScheduledSequence, logits: Tensor, share: tuple[int, int]) -> SequenceOutput:
    low, high = share
    if low == high:
        return SequenceOutput()
    first = work.start + work.logit_offsets[0] + 1
    targets = work.sequence.token_ids[first : first + high - low]
    scores = gather_logprobs(logits[low:high], targets, work.sequence.sampling_params.prompt_logprobs or 0)
    return SequenceOutput(error=NONFINITE_ERROR) if scores is None else SequenceOutput(prompt_logprobs=tuple(scores))


def _job(work: ScheduledSequence) -> SamplingRow:
    row = work.sequence
    return SamplingRow(
        row.sampling_params, row.token_ids, row.num_prompt_tokens, row.sample_index, row.stop_tokens, row.max_len
    )
