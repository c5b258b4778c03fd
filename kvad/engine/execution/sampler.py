"""Sampler: from logits to tokens, candidates, log-probabilities or errors.

Sampling is a chain of small functions over [N, V], each skipped if no row uses it. Every function leaves other rows
unchanged bit for bit, and a row's draw is a function of seed, sample and position, so results do not depend on
neighbors. Logits that are NaN or infinite, or an exception in a caller's function, are an error of that row only.

Random numbers are counter-based: Philox4x32-10 (Salmon et al. 2011). ``uniform(seed, sample, position)`` is the same in
any batch, after a preemption, and on every machine.
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
    """Counter [4, N] and key [2, N] of 32-bit words -> [4, N] random 32-bit words."""
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
    """Inputs for one row of logits."""

    sampling_params: SamplingParams
    tokens: Sequence[int]  # prompt and output
    num_prompt_tokens: int  # length of the prompt in tokens
    sample_index: int
    stop_tokens: frozenset[int]
    max_len: int = 1 << 62  # maximum number of tokens


class SampledToken(NamedTuple):
    """Sampled token; for a beam, ``candidates`` instead (possibly empty)."""

    token: int
    logprob: TokenLogprob | None
    error: str | None
    candidates: tuple[tuple[int, float], ...] = ()


NONFINITE_ERROR = "numerical error: the model's logits are NaN or infinite"
NO_ALLOWED_TOKEN = (
    "every token is banned by allowed_tokens_fn, bad_words_ids, logit_bias, min_tokens or no_repeat_ngram_size"
)


def sample_tokens(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Sample one token per row from logits [N, V]."""
    raw = logits.float()
    is_finite = torch.isfinite(raw).all(dim=-1).tolist()
    if not all(is_finite):
        raw = torch.where(torch.isfinite(raw), raw, torch.zeros_like(raw))
    scores = raw
    beam_rows = [i for i, row in enumerate(rows) if row.sampling_params.num_beams > 1]
    if beam_rows:  # beams sum log-probabilities, to which bans and penalties apply (as in transformers)
        scores = raw.clone()
        scores[beam_rows] = raw[beam_rows].log_softmax(dim=-1)
    for step in SAMPLER_STEPS:
        scores = step(scores, rows)
    tokens = scores.argmax(dim=-1)
    sampled_rows = [i for i, row in enumerate(rows) if not row.sampling_params.greedy]
    if sampled_rows:
        tokens[sampled_rows] = _draw(scores[sampled_rows], [rows[i] for i in sampled_rows])
    chosen = tokens.tolist()
    has_allowed = (scores.amax(dim=-1) > -math.inf).tolist()
    logprobs = _requested_logprobs(raw, rows, chosen)
    candidates = _candidates(scores, rows, beam_rows)
    return [
        SampledToken(
            token,
            logprob,
            (None if has_token or i in candidates else NO_ALLOWED_TOKEN) if is_row_finite else NONFINITE_ERROR,
            candidates.get(i, ()),
        )
        for i, (token, logprob, is_row_finite, has_token) in enumerate(
            zip(chosen, logprobs, is_finite, has_allowed, strict=True)
        )
    ]


def _candidates(
    scores: Tensor, rows: Sequence[SamplingRow], row_indices: Sequence[int]
) -> dict[int, tuple[tuple[int, float], ...]]:
    """Return the best continuations of beams, as many as the search considers."""
    candidates = {}
    for i in row_indices:
        count = min(num_candidates(rows[i].sampling_params, len(rows[i].stop_tokens)), scores.shape[-1])
        values, tokens = scores[i].topk(count)
        candidates[i] = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return candidates


def gather_logprobs(logits: Tensor, targets: Sequence[int], top_logprobs: int) -> list[TokenLogprob] | None:
    """Return log-probabilities of ``targets`` [N] under logits [N, V]; None if not finite."""
    raw = logits.float()
    if not bool(torch.isfinite(raw).all()):
        return None
    return _score(raw, targets, [top_logprobs] * len(targets))


def _requested_logprobs(raw: Tensor, rows: Sequence[SamplingRow], chosen: Sequence[int]) -> list[TokenLogprob | None]:
    requested = [i for i, row in enumerate(rows) if row.sampling_params.logprobs is not None]
    if not requested:
        return [None] * len(rows)
    logprobs: list[TokenLogprob | None] = [None] * len(rows)
    num_alternatives = [rows[i].sampling_params.logprobs or 0 for i in requested]
    for i, score in zip(
        requested, _score(raw[requested], [chosen[i] for i in requested], num_alternatives), strict=True
    ):
        logprobs[i] = score
    return logprobs


def _score(raw: Tensor, targets: Sequence[int], num_alternatives: Sequence[int]) -> list[TokenLogprob]:
    logprobs = raw.log_softmax(dim=-1)
    target_logprobs = logprobs[range(len(targets)), list(targets)].tolist()
    max_top = min(max(num_alternatives), raw.shape[-1])
    values, ids = logprobs.topk(max_top, dim=-1) if max_top else (logprobs[:, :0], logprobs[:, :0])
    alternatives = [list(zip(map(int, i), v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return [
        TokenLogprob(token, logprob, tuple(row[:num_top]))
        for token, logprob, row, num_top in zip(targets, target_logprobs, alternatives, num_alternatives, strict=True)
    ]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)


# ---------------------------------------------------------------- sampler steps


def apply_bans(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Ban end tokens before ``min_tokens``, ends of bad words, and repeated n-grams."""
    banned_tokens = [(i, token) for i, row in enumerate(rows) for token in _banned(row) if token < scores.shape[-1]]
    if not banned_tokens:
        return scores
    scores = scores.clone()
    row_indices, tokens = zip(*banned_tokens, strict=True)
    scores[list(row_indices), list(tokens)] = -math.inf
    return scores


def _banned(row: SamplingRow) -> set[int]:
    params, tokens = row.sampling_params, row.tokens
    banned = set(row.stop_tokens) if len(tokens) - row.num_prompt_tokens < params.min_tokens else set()
    for word in params.bad_words_ids:
        prefix = word[:-1]
        if not prefix or tuple(tokens[-len(prefix) :]) == tuple(prefix):
            banned.add(word[-1])
    if params.no_repeat_ngram_size:
        banned |= _repeated(tokens, params.no_repeat_ngram_size)
    return banned


def _repeated(tokens: Sequence[int], n: int) -> set[int]:
    """Return tokens that would repeat an n-gram (Paulus et al. 2018, sec. 2.5)."""
    if len(tokens) + 1 < n:
        return set()
    last = tuple(tokens[len(tokens) - n + 1 :])
    return {
        tokens[start + n - 1] for start in range(len(tokens) - n + 1) if tuple(tokens[start : start + n - 1]) == last
    }


def apply_forced_tokens(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Keep only allowed tokens, and the forced first or last token."""
    row_indices = [i for i, row in enumerate(rows) if _forces(row.sampling_params)]
    if not row_indices:
        return scores
    scores = scores.clone()
    for i in row_indices:
        params, tokens = rows[i].sampling_params, rows[i].tokens
        if params.allowed_tokens_fn is not None:
            ids = [token for token in params.allowed_tokens_fn(tuple(tokens)) if 0 <= token < scores.shape[-1]]
            allowed_scores = scores[i, ids]
            scores[i] = -math.inf
            scores[i, ids] = allowed_scores
        forced_token = params.forced_bos_token_id if len(tokens) == rows[i].num_prompt_tokens else None
        if params.forced_eos_token_id is not None and len(tokens) + 1 == rows[i].max_len:
            forced_token = params.forced_eos_token_id
        if forced_token is not None:
            scores[i] = -math.inf
            scores[i, forced_token] = 0.0
    return scores


def _forces(params: SamplingParams) -> bool:
    return (
        params.allowed_tokens_fn is not None
        or params.forced_bos_token_id is not None
        or params.forced_eos_token_id is not None
    )


def apply_logit_bias(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    if not any(row.sampling_params.logit_bias for row in rows):
        return scores
    scores = scores.clone()
    for i, row in enumerate(rows):
        for token, bias in row.sampling_params.logit_bias.items():
            scores[i, token] += bias
    return scores


def apply_penalties(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply repetition, presence and frequency penalties.

    Repetition (Keskar et al. 2019, sec. 4.1): positive logits are divided, negative ones multiplied, for tokens of
    prompt and output. Presence and frequency are subtracted, for output tokens.
    """
    row_indices = [i for i, row in enumerate(rows) if _has_penalty(row.sampling_params)]
    if not row_indices:
        return scores
    scores = scores.clone()
    for i in row_indices:
        params, tokens = rows[i].sampling_params, torch.tensor(rows[i].tokens, device=scores.device)
        token_ids = tokens.unique()
        old_scores = scores[i, token_ids]
        scores[i, token_ids] = torch.where(
            old_scores > 0, old_scores / params.repetition_penalty, old_scores * params.repetition_penalty
        )
        output, counts = tokens[rows[i].num_prompt_tokens :].unique(return_counts=True)
        scores[i, output] -= params.presence_penalty + params.frequency_penalty * counts.to(scores.dtype)
    return scores


def _has_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def apply_temperature(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Divide by the temperature; rows at 0 (greedy) and 1 are unchanged."""
    taus = [row.sampling_params.temperature or 1.0 for row in rows]
    if all(tau == 1 for tau in taus):
        return scores
    best = scores.amax(dim=-1, keepdim=True)
    below = scores - best.masked_fill(best == -math.inf, 0.0)  # a tiny tau then gives -inf, never infinity
    used = torch.tensor([tau != 1 for tau in taus], device=scores.device).unsqueeze(-1)
    return torch.where(used, below / _column([max(tau, 1e-30) for tau in taus], scores), scores)


def apply_top_k(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Keep the k best tokens and ties with the k-th (Fan et al. 2018)."""
    vocab = scores.shape[-1]
    ks = [
        min(row.sampling_params.top_k, vocab) if row.sampling_params.top_k and not row.sampling_params.greedy else vocab
        for row in rows
    ]
    if all(k == vocab for k in ks):
        return scores
    best = scores.topk(max(k for k in ks if k < vocab), dim=-1).values
    rank_index = torch.tensor([k - 1 if k < vocab else 0 for k in ks], device=scores.device).unsqueeze(-1)
    floor = best.gather(-1, rank_index)
    floor = torch.where(torch.tensor([k < vocab for k in ks], device=scores.device).unsqueeze(-1), floor, -math.inf)
    return scores.masked_fill(scores < floor, -math.inf)


def apply_top_p(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Keep the fewest tokens whose probabilities reach p (Holtzman et al. 2020)."""
    ps = [1.0 if row.sampling_params.greedy else row.sampling_params.top_p for row in rows]
    if all(p >= 1 for p in ps):
        return scores
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=-1)
    previous = probabilities.cumsum(dim=-1) - probabilities
    return _drop(scores, ids, previous >= _column([p if p < 1 else math.inf for p in ps], scores))


def apply_min_p(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Keep tokens with at least min_p times the best probability (Nguyen et al. 2024)."""
    ps = [0.0 if row.sampling_params.greedy else row.sampling_params.min_p for row in rows]
    if not any(ps):
        return scores
    floor = scores.amax(dim=-1, keepdim=True) + _column([math.log(p) if p else -math.inf for p in ps], scores)
    return scores.masked_fill(scores < floor, -math.inf)


def apply_typical_p(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Keep tokens with surprise nearest to the entropy, up to typical_p (Meister et al. 2023)."""
    ps = [1.0 if row.sampling_params.greedy else row.sampling_params.typical_p for row in rows]
    if all(p >= 1 for p in ps):
        return scores
    logprobs = scores.log_softmax(dim=-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs.masked_fill(probabilities == 0, 0.0)).sum(dim=-1, keepdim=True)
    ids = (-logprobs - entropy).abs().sort(dim=-1, stable=True).indices
    ordered = probabilities.gather(-1, ids)
    previous = ordered.cumsum(dim=-1) - ordered
    return _drop(scores, ids, previous >= _column([p if p < 1 else math.inf for p in ps], scores))


def _drop(scores: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """Set ``out`` (in the order of ``ids``) to -inf, but never the first token."""
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


def _draw(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw by inverse transform.

    The first token whose cumulative probability exceeds the uniform number.
    """
    u = uniform([j.sampling_params.seed for j in rows], [j.sample_index for j in rows], [len(j.tokens) for j in rows])
    cumulated = scores.double().softmax(dim=-1).cumsum(dim=-1)
    threshold = torch.from_numpy(u).to(scores.device).unsqueeze(-1) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, threshold, right=True).squeeze(-1).clamp(max=scores.shape[-1] - 1)


def sample_outputs(output: SchedulerOutput, logits: Tensor) -> list[SequenceOutput]:
    """Sample and score each scheduled sequence's share of the logits [N, V]."""
    sampled: list[tuple[int, int]] = []
    start, ranges = 0, []
    for index, scheduled in enumerate(output.scheduled):
        stop = start + len(scheduled.logit_offsets)
        if scheduled.is_sampled:
            sampled.append((index, stop - 1))
        ranges.append((start, stop - 1 if scheduled.is_sampled else stop))
        start = stop
    results = [
        _score_span(scheduled, logits, logit_range)
        for scheduled, logit_range in zip(output.scheduled, ranges, strict=True)
    ]
    if sampled:
        rows = [_sampling_row(output.scheduled[index]) for index, _ in sampled]
        for (index, _), chosen in zip(
            sampled, _sample_rows(logits[[start for _, start in sampled]], rows), strict=True
        ):
            previous = results[index]
            error = previous.error or chosen.error
            results[index] = SequenceOutput(
                chosen.token, chosen.logprob, previous.prompt_logprobs, error, candidates=chosen.candidates
            )
    return results


def _sample_rows(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Sample [N, V]; an exception in ``allowed_tokens_fn`` fails its row only."""
    try:
        return sample_tokens(logits, rows)
    except Exception as error:
        if all(row.sampling_params.allowed_tokens_fn is None for row in rows):
            raise
        if len(rows) == 1:
            return [SampledToken(0, None, f"sampling failed: {type(error).__name__}: {error}")]
        return [chosen for part, row in zip(logits.split(1), rows, strict=True) for chosen in _sample_rows(part, [row])]


def _score_span(scheduled: ScheduledSequence, logits: Tensor, logit_range: tuple[int, int]) -> SequenceOutput:
    low, high = logit_range
    if low == high:
        return SequenceOutput()
    first = scheduled.start + scheduled.logit_offsets[0] + 1
    targets = scheduled.sequence.token_ids[first : first + high - low]
    scores = gather_logprobs(logits[low:high], targets, scheduled.sequence.sampling_params.prompt_logprobs or 0)
    return SequenceOutput(error=NONFINITE_ERROR) if scores is None else SequenceOutput(prompt_logprobs=tuple(scores))


def _sampling_row(scheduled: ScheduledSequence) -> SamplingRow:
    row = scheduled.sequence
    return SamplingRow(
        row.sampling_params, row.token_ids, row.num_prompt_tokens, row.sample_index, row.stop_tokens, row.max_len
    )
