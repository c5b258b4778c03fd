"""From logits to tokens: a fold of small functions over [N, V], each skipped when no row asks for it.

Every function leaves rows that do not use it bit for bit as they were, and a row's draw is a function of its seed,
sample and position; so what a row gets never depends on its neighbours.  Logits that are NaN or infinite become a
fault of that row, never a token.

What came out of a step: the logits of each row's work become a token, candidates and scores, or a fault.

A fault is one row's: what its logits hold that is no number, what a caller's own function raises.  Its neighbours' are
read as if it were not there.

Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011), so that a draw is a function and not a state.

``uniform(seed, sample, position)`` is the same whoever else is in the batch, after a preemption, and on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvad.engine.scheduling import (
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    SequenceOutput,
    TokenLogprob,
    num_candidates,
)

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW = np.uint64(0xFFFFFFFF)
WORD = np.uint64(32)
ROUNDS = 10

Words = npt.NDArray[np.uint64]


def philox(counter: Words, key: Words) -> Words:
    """counter [4, N] and key [2, N] of 32-bit words -> [4, N] random 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (second >> WORD) ^ c1 ^ k0, second & LOW, (first >> WORD) ^ c3 ^ k1, first & LOW
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return np.stack((c0, c1, c2, c3))


def uniform(seeds: Sequence[int], samples: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, sample, position), with 53 random bits."""
    seed = np.array(seeds, dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    sample = np.array(samples, dtype=np.uint64)
    counter = np.stack((position & LOW, position >> WORD, sample, np.zeros_like(sample)))
    words = philox(counter, np.stack((seed & LOW, seed >> WORD)))
    bits = ((words[0] << WORD) | words[1]) >> np.uint64(11)
    fractions: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return fractions


class SamplingRow(NamedTuple):
    """One row to sample: ``tokens`` is its prompt and output so far, the first ``prompt`` of them the prompt, and
    ``limit`` how many they may become."""

    sampling: SamplingParams
    tokens: Sequence[int]
    prompt: int
    sample: int
    stop_tokens: frozenset[int]
    limit: int = 1 << 62


class SampledToken(NamedTuple):
    """``candidates``: of a beam, in place of the token; it may have none that is allowed, while others go on."""

    token: int
    logprob: TokenLogprob | None
    error: str | None
    candidates: tuple[tuple[int, float], ...] = ()


NONFINITE_ERROR = "numerical error: the model's logits are NaN or infinite"
NO_ALLOWED_TOKEN = "every token is banned by allowed, bad_words, logit_bias, min_tokens or no_repeat_ngram"


def sample_tokens(logits: Tensor, jobs: Sequence[SamplingRow]) -> list[SampledToken]:
    """logits [N, V], one job per row -> one token per row."""
    raw = logits.float()
    healthy = torch.isfinite(raw).all(dim=-1).tolist()
    if not all(healthy):
        raw = torch.where(torch.isfinite(raw), raw, torch.zeros_like(raw))
    scores = raw
    searched = [i for i, job in enumerate(jobs) if job.sampling.num_beams > 1]
    if searched:  # beams add up log-probabilities, and what the fold bans or penalises of them (as transformers does)
        scores = raw.clone()
        scores[searched] = raw[searched].log_softmax(dim=-1)
    for step in SAMPLER_STEPS:
        scores = step(scores, jobs)
    tokens = scores.argmax(dim=-1)
    drawn = [i for i, job in enumerate(jobs) if not job.sampling.greedy]
    if drawn:
        tokens[drawn] = _draw(scores[drawn], [jobs[i] for i in drawn])
    chosen = tokens.tolist()
    left = (scores.amax(dim=-1) > -math.inf).tolist()
    reports = _reports(raw, jobs, chosen)
    found = _candidates(scores, jobs, searched)
    return [
        SampledToken(
            token,
            report,
            (None if some or i in found else NO_ALLOWED_TOKEN) if fine else NONFINITE_ERROR,
            found.get(i, ()),
        )
        for i, (token, report, fine, some) in enumerate(zip(chosen, reports, healthy, left, strict=True))
    ]


def _candidates(
    scores: Tensor, jobs: Sequence[SamplingRow], rows: Sequence[int]
) -> dict[int, tuple[tuple[int, float], ...]]:
    """The best continuations of beams, as many as their search looks at."""
    found = {}
    for i in rows:
        count = min(num_candidates(jobs[i].sampling, len(jobs[i].stop_tokens)), scores.shape[-1])
        values, tokens = scores[i].topk(count)
        found[i] = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return found


def gather_logprobs(logits: Tensor, targets: Sequence[int], top: int) -> list[TokenLogprob] | None:
    """Log-probabilities of ``targets`` [N] under logits [N, V], with the ``top`` best alternatives; None on a fault."""
    raw = logits.float()
    if not bool(torch.isfinite(raw).all()):
        return None
    return _score(raw, targets, [top] * len(targets))


def _reports(raw: Tensor, jobs: Sequence[SamplingRow], chosen: Sequence[int]) -> list[TokenLogprob | None]:
    asked = [i for i, job in enumerate(jobs) if job.sampling.logprobs is not None]
    if not asked:
        return [None] * len(jobs)
    reports: list[TokenLogprob | None] = [None] * len(jobs)
    tops = [jobs[i].sampling.logprobs or 0 for i in asked]
    for i, score in zip(asked, _score(raw[asked], [chosen[i] for i in asked], tops), strict=True):
        reports[i] = score
    return reports


def _score(raw: Tensor, targets: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    logprobs = raw.log_softmax(dim=-1)
    own = logprobs[range(len(targets)), list(targets)].tolist()
    best = min(max(tops), raw.shape[-1])
    values, ids = logprobs.topk(best, dim=-1) if best else (logprobs[:, :0], logprobs[:, :0])
    alternatives = [list(zip(map(int, i), v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return [
        TokenLogprob(token, logprob, tuple(row[:top]))
        for token, logprob, row, top in zip(targets, own, alternatives, tops, strict=True)
    ]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)


# ---------------------------------------------------------------- the fold


def apply_bans(scores: Tensor, jobs: Sequence[SamplingRow]) -> Tensor:
    """-inf for what must not come next: the end before ``min_tokens``, the last token of a bad word."""
    banned = [(i, token) for i, job in enumerate(jobs) for token in _banned(job) if token < scores.shape[-1]]
    if not banned:
        return scores
    scores = scores.clone()
    rows, tokens = zip(*banned, strict=True)
    scores[list(rows), list(tokens)] = -math.inf
    return scores


def _banned(job: SamplingRow) -> set[int]:
    s, tokens = job.sampling, job.tokens
    found = set(job.stop_tokens) if len(tokens) - job.prompt < s.min_tokens else set()
    for word in s.bad_words_ids:
        prefix = word[:-1]
        if not prefix or tuple(tokens[-len(prefix) :]) == tuple(prefix):
            found.add(word[-1])
    if s.no_repeat_ngram_size:
        found |= _repeated(tokens, s.no_repeat_ngram_size)
    return found


def _repeated(tokens: Sequence[int], n: int) -> set[int]:
    """The tokens that followed earlier occurrences of the last n - 1 (Paulus et al. 2018, sec. 2.5)."""
    if len(tokens) + 1 < n:
        return set()
    last = tuple(tokens[len(tokens) - n + 1 :])
    return {tokens[at + n - 1] for at in range(len(tokens) - n + 1) if tuple(tokens[at : at + n - 1]) == last}


def apply_forced_tokens(scores: Tensor, jobs: Sequence[SamplingRow]) -> Tensor:
    """Only what ``allowed`` allows; the first token, or the last, where it is forced."""
    rows = [i for i, job in enumerate(jobs) if _forces(job.sampling)]
    if not rows:
        return scores
    scores = scores.clone()
    for i in rows:
        s, tokens = jobs[i].sampling, jobs[i].tokens
        if s.allowed_tokens_fn is not None:
            ids = [token for token in s.allowed_tokens_fn(tuple(tokens)) if 0 <= token < scores.shape[-1]]
            kept = scores[i, ids]
            scores[i] = -math.inf
            scores[i, ids] = kept
        forced = s.forced_bos_token_id if len(tokens) == jobs[i].prompt else None
        if s.forced_eos_token_id is not None and len(tokens) + 1 == jobs[i].limit:
            forced = s.forced_eos_token_id
        if forced is not None:
            scores[i] = -math.inf
            scores[i, forced] = 0.0
    return scores


def _forces(s: SamplingParams) -> bool:
    return s.allowed_tokens_fn is not None or s.forced_bos_token_id is not None or s.forced_eos_token_id is not None


def apply_logit_bias(scores: Tensor, jobs: Sequence[SamplingRow]) -> Tensor:
    if not any(job.sampling.logit_bias for job in jobs):
        return scores
    scores = scores.clone()
    for i, job in enumerate(jobs):
        for token, bias in job.sampling.logit_bias.items():
            scores[i, token] += bias
    return scores


def apply_penalties(scores: Tensor, jobs: Sequence[SamplingRow]) -> Tensor:
    """Repetition (Keskar et al. 2019, sec. 4.1): positive logits are divided, negative multiplied, for tokens of the
    prompt and the output; presence and frequency are subtracted, for tokens of the output."""
    rows = [i for i, job in enumerate(jobs) if _has_penalty(job.sampling)]
    if not rows:
        return scores
    scores = scores.clone()
    for i in rows:
        s, tokens = jobs[i].sampling, torch.tensor(jobs[i].tokens, device=scores.device)
        seen = tokens.unique()
        old = scores[i, seen]
        scores[i, seen] = torch.where(old > 0, old / s.repetition_penalty, old * s.repetition_penalty)
        output, counts = tokens[jobs[i].prompt :].unique(return_counts=True)
        scores[i, output] -= s.presence_penalty + s.frequency_penalty * counts.to(scores.dtype)
    return scores


def _has_penalty(s: SamplingParams) -> bool:
    return s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0


def apply_temperature(scores: Tensor, jobs: Sequence[SamplingRow]) -> Tensor:
    """z / tau; rows at temperature 0 (greedy) and 1 stay as they are."""
    taus = [job.sampling.temperature or 1.0 for job in jobs]
    if all(tau == 1 for tau in taus):
        return scores
    best = scores.amax(dim=-1, keepdim=True)
    below = scores - best.masked_fill(best == -math.inf, 0.0)  # so that a tiny tau gives -inf and never infinity
    used = torch.tensor([tau != 1 for tau in taus], device=scores.device).unsqueeze(-1)
    return torch.where(used, below / _column([max(tau, 1e-30) for tau in taus], scores), scores)


def apply_top_k(scores: Tensor, jobs: Sequence[SamplingRow]) -> Tensor:
    """Fan et al. 2018: the k best; ties with the k-th stay."""
    vocab = scores.shape[-1]
    ks = [min(job.sampling.top_k, vocab) if job.sampling.top_k and not job.sampling.greedy else vocab for job in jobs]
    if all(k == vocab for k in ks):
        return scores
    best = scores.topk(max(k for k in ks if k < vocab), dim=-1).values
    which = torch.tensor([k - 1 if k < vocab else 0 for k in ks], device=scores.device).unsqueeze(-1)
    floor = best.gather(-1, which)
    floor = torch.where(torch.tensor([k < vocab for k in ks], device=scores.device).unsqueeze(-1), floor, -math.inf)
    return scores.masked_fill(scores < floor, -math.inf)


def apply_top_p(scores: Tensor, jobs: Sequence[SamplingRow]) -> Tensor:
    """Holtzman et al. 2020: the fewest tokens whose probabilities reach p."""
    ps = [1.0 if job.sampling.greedy else job.sampling.top_p for job in jobs]
    if all(p >= 1 for p in ps):
        return scores
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    return _drop(scores, ids, before >= _column([p if p < 1 else math.inf for p in ps], scores))


def apply_min_p(scores: Tensor, jobs: Sequence[SamplingRow]) -> Tensor:
    """Nguyen et al. 2024: tokens of at least min_p times the best one's probability."""
    ps = [0.0 if job.sampling.greedy else job.sampling.min_p for job in jobs]
    if not any(ps):
        return scores
    floor = scores.amax(dim=-1, keepdim=True) + _column([math.log(p) if p else -math.inf for p in ps], scores)
    return scores.masked_fill(scores < floor, -math.inf)


def apply_typical_p(scores: Tensor, jobs: Sequence[SamplingRow]) -> Tensor:
    """Meister et al. 2023: the tokens whose surprise is nearest to the entropy, until their mass reaches typical_p."""
    ps = [1.0 if job.sampling.greedy else job.sampling.typical_p for job in jobs]
    if all(p >= 1 for p in ps):
        return scores
    logprobs = scores.log_softmax(dim=-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs.masked_fill(probabilities == 0, 0.0)).sum(dim=-1, keepdim=True)
    ids = (-logprobs - entropy).abs().sort(dim=-1, stable=True).indices
    ordered = probabilities.gather(-1, ids)
    before = ordered.cumsum(dim=-1) - ordered
    return _drop(scores, ids, before >= _column([p if p < 1 else math.inf for p in ps], scores))


def _drop(scores: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """-inf where ``out`` (in the order of ``ids``) says so; the first of the order stays, whatever a rounded p says."""
    out[:, 0] = False
    return scores.masked_fill(torch.zeros_like(out).scatter(-1, ids, out), -math.inf)


SAMPLER_STEPS: tuple[Callable[[Tensor, Sequence[SamplingRow]], Tensor], ...] = (
    apply_bans,
    apply_logit_bias,
    apply_penalties,
    apply_forced_tokens,
    apply_temperature,
    apply_top_k,
    apply_top_p,
    apply_min_p,
    apply_typical_p,
)


def _draw(scores: Tensor, jobs: Sequence[SamplingRow]) -> Tensor:
    """Inverse transform: the first token at which the cumulated probability exceeds the row's uniform number."""
    u = uniform([j.sampling.seed for j in jobs], [j.sample for j in jobs], [len(j.tokens) for j in jobs])
    cumulated = scores.double().softmax(dim=-1).cumsum(dim=-1)
    threshold = torch.from_numpy(u).to(scores.device).unsqueeze(-1) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, threshold, right=True).squeeze(-1).clamp(max=scores.shape[-1] - 1)


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
