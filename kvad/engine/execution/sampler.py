"""Sampler: from logits to tokens, candidates, log-probabilities or errors.

Sampling is a chain of small functions over [N, V], one row per sequence, each skipped if no sequence uses it. Every
function leaves other rows unchanged bit for bit, and a draw is a function of the sequence's seed, sample and tokens, so
results do not depend on neighbors. Logits that are NaN or infinite, or an exception in a caller's function, are an
error of that sequence only.

Random numbers are counter-based: Philox4x32-10 (Salmon et al. 2011) with the key ``TokenSequence.draw_key()``, a hash
of the seed and of all tokens so far, and with sample and position as the counter. A number is the same in any batch,
after a preemption or a restore, and on every machine; sequences with other tokens draw other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvad.engine import scheduling
from kvad.engine.scheduling import ScheduledSequence, SchedulerOutput, SequenceOutput, TokenLogprob, TokenSequence

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW = np.uint64(0xFFFFFFFF)
WORD = np.uint64(32)
ROUNDS = 10
MAX_PART = 1 << 20  # logits that are sampled at a time on a CPU
SPAN = 64  # tokens that ``top_k`` compares by their maximum

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


def uniform(keys: Sequence[int], samples: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (key, sample, position), with 53 random bits."""
    key, sample, position = (np.array(values, dtype=np.uint64) for values in (keys, samples, positions))
    counter = np.stack((position & LOW, position >> WORD, sample, np.zeros_like(sample)))
    words = philox(counter, np.stack((key & LOW, key >> WORD)))
    bits = ((words[0] << WORD) | words[1]) >> np.uint64(11)
    fractions: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return fractions


NONFINITE_ERROR = "numerical error: the model's logits are NaN or infinite"
NO_ALLOWED_TOKEN = (
    "every token is banned by allowed_tokens_fn, bad_words_ids, logit_bias, min_tokens or no_repeat_ngram_size"
)


def sample_outputs(output: SchedulerOutput, logits: Tensor, num_tokens: int | None = None) -> list[SequenceOutput]:
    """Sample and score each scheduled sequence's share of the logits [N, V]; ids below ``num_tokens`` are sampled."""
    results: list[SequenceOutput] = []
    sampled: dict[int, int] = {}  # index of a scheduled sequence -> index of its sampled logits
    start = 0
    for index, scheduled in enumerate(output.scheduled):
        stop = start + len(scheduled.logit_offsets)
        if scheduled.is_sampled:
            sampled[index] = stop - 1
        results.append(_score_span(scheduled, logits[start : stop - scheduled.is_sampled]))
        start = stop
    if sampled:
        sequences = [output.scheduled[index].sequence for index in sampled]
        new_results = _sample_in_parts(_select(logits, list(sampled.values())), sequences, num_tokens)
        for index, result in zip(sampled, new_results, strict=True):
            span = results[index]
            results[index] = result._replace(prompt_logprobs=span.prompt_logprobs, error=span.error or result.error)
    return results


def _score_span(scheduled: ScheduledSequence, logits: Tensor) -> SequenceOutput:
    """Score the prompt tokens that follow the span's logits [n, V]."""
    if not len(logits):
        return SequenceOutput()
    first = scheduled.start + scheduled.logit_offsets[0] + 1
    targets = scheduled.sequence.token_ids[first : first + len(logits)]
    scores = gather_logprobs(logits, targets, scheduled.sequence.sampling_params.prompt_logprobs or 0)
    return SequenceOutput(error=NONFINITE_ERROR) if scores is None else SequenceOutput(prompt_logprobs=tuple(scores))


def _sample_in_parts(
    logits: Tensor, sequences: Sequence[TokenSequence], num_tokens: int | None
) -> list[SequenceOutput]:
    """Sample from [N, V]; on a CPU a few sequences at a time, so that temporaries stay in its cache."""
    size = max(1, MAX_PART // logits.shape[-1]) if logits.device.type == "cpu" else len(sequences)
    parts = [(logits[low : low + size], sequences[low : low + size]) for low in range(0, len(sequences), size)]
    return [result for part, seqs in parts for result in _sample_or_fail(part, seqs, num_tokens)]


def _sample_or_fail(logits: Tensor, sequences: Sequence[TokenSequence], num_tokens: int | None) -> list[SequenceOutput]:
    """Sample from [N, V]; an exception in ``allowed_tokens_fn`` fails its sequence only."""
    try:
        return sample_tokens(logits, sequences, num_tokens)
    except Exception as error:
        if all(seq.sampling_params.allowed_tokens_fn is None for seq in sequences):
            raise
        if len(sequences) == 1:
            return [SequenceOutput(0, error=f"sampling failed: {type(error).__name__}: {error}")]
        parts = zip(logits.split(1), sequences, strict=True)
        return [result for part, seq in parts for result in _sample_or_fail(part, [seq], num_tokens)]


def sample_tokens(
    logits: Tensor, sequences: Sequence[TokenSequence], num_tokens: int | None = None
) -> list[SequenceOutput]:
    """Sample one token per sequence from logits [N, V]; the result of a beam has ``candidates``, possibly none.

    ``num_tokens``: the tokenizer's vocabulary. Rows of the embedding beyond it are padding and are never sampled.
    """
    raw = logits.float()
    is_finite = _finite_rows(raw)
    if not all(is_finite):
        raw = torch.where(torch.isfinite(raw), raw, torch.zeros_like(raw))
    beams = [i for i, seq in enumerate(sequences) if seq.sampling_params.num_beams > 1]
    samples = [i for i, seq in enumerate(sequences) if seq.sampling_params.num_beams == 1]
    scores = raw.log_softmax(dim=-1) if beams else raw
    if beams and samples:  # beams sum log-probabilities, to which bans and penalties apply (as in transformers)
        scores[samples] = raw[samples]
    if num_tokens is not None and num_tokens < scores.shape[-1]:
        scores = scores.index_fill(-1, torch.arange(num_tokens, scores.shape[-1], device=scores.device), -math.inf)
    for step in SAMPLER_STEPS:
        scores = step(scores, sequences)
    results: dict[int, SequenceOutput] = {}
    for rows, choose in ((beams, _best_candidates), (samples, _choose_tokens)):
        if rows:
            outputs = choose(_select(raw, rows), _select(scores, rows), [sequences[i] for i in rows])
            results |= zip(rows, outputs, strict=True)
    return [results[i] if ok else results[i]._replace(error=NONFINITE_ERROR) for i, ok in enumerate(is_finite)]


def _finite_rows(raw: Tensor) -> list[bool]:
    """Return for each row of [N, V] whether it is finite; sums are checked first, because they take one fast pass."""
    if bool(torch.isfinite(raw.sum(dim=-1)).all()):
        return [True] * len(raw)
    is_finite: list[bool] = torch.isfinite(raw).all(dim=-1).tolist()
    return is_finite


def _select(x: Tensor, rows: list[int]) -> Tensor:
    """Return the given rows, in ascending order, of [N, V]; without a copy if they are all rows."""
    return x if len(rows) == len(x) else x[rows]


def _choose_tokens(raw: Tensor, scores: Tensor, sequences: Sequence[TokenSequence]) -> list[SequenceOutput]:
    """Choose the best token of each sequence, or a random one, by scores [N, V], and score it by raw logits [N, V]."""
    tokens = scores.argmax(dim=-1)
    drawn = [i for i, seq in enumerate(sequences) if seq.sampling_params.uses_seed]
    if drawn:
        tokens[drawn] = _draw(scores[drawn], [sequences[i] for i in drawn])
    chosen = tokens.tolist()
    has_allowed = (scores.amax(dim=-1) > -math.inf).tolist()
    counts = {i: seq.sampling_params.logprobs for i, seq in enumerate(sequences)}
    requested = {i: count for i, count in counts.items() if count is not None}
    scored = _score(raw[list(requested)], [chosen[i] for i in requested], list(requested.values())) if requested else []
    logprobs = dict(zip(requested, scored, strict=True))
    return [
        SequenceOutput(token, logprobs.get(i), error=None if has_allowed[i] else NO_ALLOWED_TOKEN)
        for i, token in enumerate(chosen)
    ]


def _best_candidates(raw: Tensor, scores: Tensor, sequences: Sequence[TokenSequence]) -> list[SequenceOutput]:
    """Return the best continuations of each beam by scores [N, V], with log-probabilities by raw logits [N, V]."""
    wanted = [scheduling.num_candidates(seq.sampling_params, len(seq.stop_tokens)) for seq in sequences]
    outputs: dict[int, SequenceOutput] = {}
    for count in set(wanted):  # which of equal tokens are found depends on k, so it must not be a neighbor's
        rows = [i for i, each in enumerate(wanted) if each == count]
        best = (x.tolist() for x in top_k(_select(scores, rows), min(count, scores.shape[-1])))
        for i, values, tokens in zip(rows, *best, strict=True):
            num_top, copies = sequences[i].sampling_params.logprobs, [i] * len(tokens)
            scored = [] if num_top is None else _score(raw[copies], tokens, [num_top] * len(tokens))
            candidates = tuple(zip(tokens, values, strict=True))
            outputs[i] = SequenceOutput(tokens[0], candidates=candidates, candidate_logprobs=tuple(scored))
    return [outputs[i] for i in range(len(sequences))]


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best values and their indices, [N, k] each, of scores [N, V].

    They are in the k spans of SPAN numbers with the highest maxima, or behind the last whole span, so only these are
    ranked: three times as fast as ``torch.topk`` for 128 rows of 32,000 tokens.
    """
    num_spans = scores.shape[-1] // SPAN
    if num_spans <= 2 * k:
        return torch.topk(scores, k, dim=-1)
    spans = scores[:, : num_spans * SPAN].unflatten(1, (num_spans, SPAN))
    best = spans.amax(dim=-1).topk(k, dim=-1).indices
    inside = spans.gather(1, best.unsqueeze(-1).expand(-1, -1, SPAN)).flatten(1)
    ids = (best.unsqueeze(-1) * SPAN + torch.arange(SPAN, device=scores.device)).flatten(1)
    behind = torch.arange(num_spans * SPAN, scores.shape[-1], device=scores.device)
    values, places = torch.cat((inside, scores[:, num_spans * SPAN :]), dim=1).topk(k, dim=-1)
    return values, torch.cat((ids, behind.expand(len(scores), -1)), dim=1).gather(1, places)


def gather_logprobs(logits: Tensor, targets: Sequence[int], top_logprobs: int) -> list[TokenLogprob] | None:
    """Return log-probabilities of ``targets`` [N] under logits [N, V]; None if not finite."""
    raw = logits.float()
    if not all(_finite_rows(raw)):
        return None
    return _score(raw, targets, [top_logprobs] * len(targets))


def _score(raw: Tensor, targets: Sequence[int], num_alternatives: Sequence[int]) -> list[TokenLogprob]:
    logprobs = raw.log_softmax(dim=-1)
    target_logprobs = logprobs[range(len(targets)), list(targets)].tolist()
    values, ids = logprobs.topk(min(max(num_alternatives), raw.shape[-1]), dim=-1)
    alternatives = [list(zip(map(int, i), v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return [
        TokenLogprob(token, logprob, tuple(best[:count]))
        for token, logprob, best, count in zip(targets, target_logprobs, alternatives, num_alternatives, strict=True)
    ]


def _draw(scores: Tensor, sequences: Sequence[TokenSequence]) -> Tensor:
    """Draw by inverse transform: the first token whose cumulative probability exceeds the uniform number."""
    keys = [seq.draw_key() for seq in sequences]
    u = uniform(keys, [seq.sample_index for seq in sequences], [len(seq.token_ids) for seq in sequences])
    cumulated = scores.double().softmax(dim=-1).cumsum(dim=-1)
    threshold = torch.from_numpy(u).to(scores.device).unsqueeze(-1) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, threshold, right=True).squeeze(-1).clamp(max=scores.shape[-1] - 1)


def apply_bans(scores: Tensor, sequences: Sequence[TokenSequence]) -> Tensor:
    """Ban end tokens before ``min_tokens``, ends of bad words, and repeated n-grams."""
    banned = [(i, token) for i, seq in enumerate(sequences) for token in _banned(seq) if token < scores.shape[-1]]
    if not banned:
        return scores
    scores = scores.clone()
    indices, tokens = zip(*banned, strict=True)
    scores[list(indices), list(tokens)] = -math.inf
    return scores


def _banned(seq: TokenSequence) -> set[int]:
    params, tokens = seq.sampling_params, seq.token_ids
    banned = set(seq.stop_tokens) if len(tokens) - seq.num_prompt_tokens < params.min_tokens else set()
    for word in params.bad_words_ids:
        prefix = word[:-1]
        if not prefix or tuple(tokens[-len(prefix) :]) == tuple(prefix):
            banned.add(word[-1])
    if n := params.no_repeat_ngram_size:  # tokens that would repeat an n-gram (Paulus et al. 2018, sec. 2.5)
        last, starts = tokens[len(tokens) + 1 - n :], range(len(tokens) + 1 - n)
        banned |= {tokens[start + n - 1] for start in starts if tokens[start : start + n - 1] == last}
    return banned


def apply_forced_tokens(scores: Tensor, sequences: Sequence[TokenSequence]) -> Tensor:
    """Keep only allowed tokens, and the forced first or last token."""
    all_params = [seq.sampling_params for seq in sequences]
    options = ((p.allowed_tokens_fn, p.forced_bos_token_id, p.forced_eos_token_id) for p in all_params)
    if all(option is None for values in options for option in values):
        return scores
    scores = scores.clone()
    for i, seq in enumerate(sequences):
        params, num_tokens = seq.sampling_params, len(seq.token_ids)
        if params.allowed_tokens_fn is not None:
            ids = [t for t in params.allowed_tokens_fn(tuple(seq.token_ids)) if 0 <= t < scores.shape[-1]]
            _keep_only(scores[i], ids, scores[i, ids])
        forced_token = params.forced_bos_token_id if num_tokens == seq.num_prompt_tokens else None
        if params.forced_eos_token_id is not None and num_tokens + 1 == seq.max_len:
            forced_token = params.forced_eos_token_id
        if forced_token is not None:
            _keep_only(scores[i], [forced_token], 0.0)
    return scores


def _keep_only(scores: Tensor, ids: list[int], values: Tensor | float) -> None:
    """Set scores [V] to ``values`` at ``ids`` and to -inf elsewhere."""
    scores.fill_(-math.inf)
    scores[ids] = values


def apply_logit_bias(scores: Tensor, sequences: Sequence[TokenSequence]) -> Tensor:
    if not any(seq.sampling_params.logit_bias for seq in sequences):
        return scores
    scores = scores.clone()
    for i, seq in enumerate(sequences):
        for token, bias in seq.sampling_params.logit_bias.items():
            scores[i, token] += bias
    return scores


def apply_penalties(scores: Tensor, sequences: Sequence[TokenSequence]) -> Tensor:
    """Apply repetition, presence and frequency penalties.

    Repetition (Keskar et al. 2019, sec. 4.1): positive logits are divided, negative ones multiplied, for tokens of
    prompt and output. Presence and frequency are subtracted, for output tokens.
    """
    all_params = [seq.sampling_params for seq in sequences]
    penalties = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in all_params]
    penalized = [i for i, values in enumerate(penalties) if values != (1.0, 0.0, 0.0)]
    if not penalized:
        return scores
    scores = scores.clone()
    for i in penalized:
        params, tokens = sequences[i].sampling_params, torch.tensor(sequences[i].token_ids, device=scores.device)
        ids, penalty = tokens.unique(), params.repetition_penalty
        old_scores = scores[i, ids]
        scores[i, ids] = torch.where(old_scores > 0, old_scores / penalty, old_scores * penalty)
        output, counts = tokens[sequences[i].num_prompt_tokens :].unique(return_counts=True)
        scores[i, output] -= params.presence_penalty + params.frequency_penalty * counts.to(scores.dtype)
    return scores


def apply_temperature(scores: Tensor, sequences: Sequence[TokenSequence]) -> Tensor:
    """Divide by the temperature; sequences at 0 (greedy) and 1 are unchanged."""
    taus = [seq.sampling_params.temperature or 1.0 for seq in sequences]
    if all(tau == 1 for tau in taus):
        return scores
    best = scores.amax(dim=-1, keepdim=True)
    below = scores - best.masked_fill(best == -math.inf, 0.0)  # a tiny tau then gives -inf, never infinity
    used = torch.tensor([tau != 1 for tau in taus], device=scores.device).unsqueeze(-1)
    return torch.where(used, below / _column([max(tau, 1e-30) for tau in taus], scores), scores)


def apply_top_k(scores: Tensor, sequences: Sequence[TokenSequence]) -> Tensor:
    """Keep the k best tokens and ties with the k-th (Fan et al. 2018)."""
    ks = [0 if seq.sampling_params.greedy else seq.sampling_params.top_k for seq in sequences]
    ks = [k if 0 < k < scores.shape[-1] else 0 for k in ks]
    if not any(ks):
        return scores
    best = scores.topk(max(ks), dim=-1).values
    k = torch.tensor(ks, device=scores.device).unsqueeze(-1)
    floor = torch.where(k > 0, best.gather(-1, (k - 1).clamp(min=0)), -math.inf)
    return scores.masked_fill(scores < floor, -math.inf)


def apply_top_p(scores: Tensor, sequences: Sequence[TokenSequence]) -> Tensor:
    """Keep the fewest tokens whose probabilities reach p (Holtzman et al. 2020)."""
    ps = [1.0 if seq.sampling_params.greedy else seq.sampling_params.top_p for seq in sequences]
    if all(p >= 1 for p in ps):
        return scores
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    return _drop_beyond(scores, ids, ordered.softmax(dim=-1), ps)


def apply_min_p(scores: Tensor, sequences: Sequence[TokenSequence]) -> Tensor:
    """Keep tokens with at least min_p times the best probability (Nguyen et al. 2024)."""
    ps = [0.0 if seq.sampling_params.greedy else seq.sampling_params.min_p for seq in sequences]
    if not any(ps):
        return scores
    floor = scores.amax(dim=-1, keepdim=True) + _column([math.log(p) if p else -math.inf for p in ps], scores)
    return scores.masked_fill(scores < floor, -math.inf)


def apply_typical_p(scores: Tensor, sequences: Sequence[TokenSequence]) -> Tensor:
    """Keep tokens with surprise nearest to the entropy, up to typical_p (Meister et al. 2023)."""
    ps = [1.0 if seq.sampling_params.greedy else seq.sampling_params.typical_p for seq in sequences]
    if all(p >= 1 for p in ps):
        return scores
    logprobs = scores.log_softmax(dim=-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs.masked_fill(probabilities == 0, 0.0)).sum(dim=-1, keepdim=True)
    ids = (-logprobs - entropy).abs().sort(dim=-1, stable=True).indices
    return _drop_beyond(scores, ids, probabilities.gather(-1, ids), ps)


def _drop_beyond(scores: Tensor, ids: Tensor, probabilities: Tensor, limits: Sequence[float]) -> Tensor:
    """Drop tokens (in the order of ``ids``) after their probabilities reach a limit below 1, never the first token."""
    previous = probabilities.cumsum(dim=-1) - probabilities
    is_dropped = previous >= _column([limit if limit < 1 else math.inf for limit in limits], scores)
    is_dropped[:, 0] = False
    return scores.masked_fill(torch.zeros_like(is_dropped).scatter(-1, ids, is_dropped), -math.inf)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)


SAMPLER_STEPS: tuple[Callable[[Tensor, Sequence[TokenSequence]], Tensor], ...] = (
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
