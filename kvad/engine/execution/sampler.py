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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvad import model as model_lib
from kvad import ops
from kvad.engine import scheduling
from kvad.engine.execution import grammar
from kvad.engine.scheduling import (
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    SequenceOutput,
    TokenLogprob,
    TokenSequence,
)
from kvad.errors import KvadError

LOW = 0xFFFFFFFF  # 32 bits
FEW = 8  # random numbers that are computed one by one: Python's integers are faster than arrays
MAX_PART = 1 << 21  # logits that are sampled at a time on a CPU
LOWEST = torch.finfo(torch.float32).min
SPAN = 64  # tokens that ``top_k`` compares by their maximum
MAX_CANDIDATES = 256  # of a sequence with filters; if they keep more, all tokens are filtered
SPARE = 8  # candidates beyond ``top_k``, for ties with the k-th
STEP = 16  # the number of candidates is a multiple of it: whole vectors, so that sums have the same bits

HASH_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no power is 0


def philox(counter: Sequence[Any], key: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Four words of a counter and two of a key -> four random words, of 32 bits: integers, or arrays of uint64."""
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        even, odd = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = odd >> 32 ^ b ^ first, odd & LOW, even >> 32 ^ d ^ second, even & LOW
        first, second = first + 0x9E3779B9 & LOW, second + 0xBB67AE85 & LOW
    return a, b, c, d


def uniform(keys: Sequence[int], samples: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (key, sample, position), with 53 random bits."""

    def draw(key: Any, sample: Any, position: Any) -> Any:
        high, low, *_ = philox((position & LOW, position >> 32, sample, 0), (key & LOW, key >> 32))
        return (high << 32 | low) >> 11

    columns = keys, samples, positions
    if len(keys) <= FEW:
        bits = np.array([draw(*row) for row in zip(*columns, strict=True)], dtype=np.uint64)
    else:
        bits = draw(*(np.array(column, dtype=np.uint64) for column in columns))
    fractions: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return fractions


NONFINITE_ERROR = "numerical error: the model's logits are NaN or infinite"


def sample_outputs(
    output: SchedulerOutput, logits: Tensor, num_tokens: int | None = None, best: Sequence[int] | None = None
) -> list[SequenceOutput]:
    """Sample and score each scheduled sequence's share of the logits [N, V].

    ``num_tokens``: ids below it are sampled. ``best``: the best of them in each row, if it is known; all are finite.
    """
    if best is not None and all(map(_takes_best, output.scheduled)):
        return list(map(SequenceOutput, best))
    scored: dict[int, SequenceOutput] = {}  # index of a scheduled sequence -> scores of its prompt tokens
    sampled: dict[int, tuple[int, ...]] = {}  # index of a scheduled sequence -> its drafts
    rows: list[int] = []  # of the sampled logits
    sequences: list[TokenSequence] = []  # of each of these rows, with the drafts before it
    stop = 0
    for index, (seq, _, _, logit_offsets, is_sampled, drafts) in enumerate(output.scheduled):
        start, stop = stop, stop + len(logit_offsets)
        num_sampled = is_sampled + len(drafts)
        if is_sampled:
            if drafts and seq.grammar_state is not None:
                drafts = drafts[: grammar.num_valid_drafts(seq, drafts)]
            sampled[index] = drafts
            rows.extend(range(stop - num_sampled, stop - num_sampled + 1 + len(drafts)))
            sequences += _with_each_draft(seq, drafts)
        if stop - num_sampled > start:
            scored[index] = _score_span(output.scheduled[index], logits[start : stop - num_sampled], num_tokens)
    if best is not None and all(seq.sampling_params.needs_token_only for seq in sequences):
        new_results = _draw_from_finite(logits, rows, sequences, num_tokens, best)
    else:
        new_results = _sample_in_parts(logits, rows, sequences, num_tokens)
    if len(rows) > len(sampled):
        new_results = _accept_drafts(new_results, list(sampled.values()))
    if len(sampled) == len(output.scheduled) and not scored:
        return new_results
    results = [scored.get(index, SequenceOutput()) for index in range(len(output.scheduled))]
    for index, result in zip(sampled, new_results, strict=True):
        span = results[index]
        results[index] = result._replace(prompt_logprobs=span.prompt_logprobs, error=span.error or result.error)
    return results


@torch.inference_mode()
def pool_outputs(output: SchedulerOutput, hidden: Tensor | None, results: list[SequenceOutput]) -> None:
    """Set the results of the sequences whose hidden states are pooled, given those of their tokens in the step."""
    assert hidden is not None
    hidden, first = hidden.cpu(), 0
    for index, (seq, start, count, *_) in enumerate(output.scheduled):
        if seq.request.pooling is None:
            continue
        states = hidden[first : first + count]
        first += count
        if not bool(states.isfinite().all()):
            results[index] = SequenceOutput(error=NONFINITE_ERROR)
            continue
        if seq.pooled_states is None or start == 0:
            seq.pooled_states = model_lib.PooledStates(seq.request.pooling)
        seq.pooled_states.add(states)
        if start + count == len(seq.token_ids):
            results[index] = SequenceOutput(output=seq.pooled_states.result())


def _takes_best(scheduled: ScheduledSequence) -> bool:
    """Return True if a span has one logit, of which the best token is all that is needed."""
    return scheduled.sequence.sampling_params.needs_best_only and _has_one_logit(scheduled)


def _has_one_logit(scheduled: ScheduledSequence) -> bool:
    """Return True if a span has one logit, which is sampled; with drafts there are more."""
    return scheduled.is_sampled and len(scheduled.logit_offsets) == 1


def _with_each_draft(seq: TokenSequence, drafts: Sequence[int]) -> list[TokenSequence]:
    """Return the sequence as it is, and with 1, 2, ... of its drafts."""
    if seq.sampling_params.needs_best_only:  # of which only the options are read
        return [seq] * (1 + len(drafts))
    if drafts and seq.sampling_params.uses_seed:
        seq.draw_key()  # hashes the tokens once for all copies
    return [seq, *(seq.with_drafts(drafts[:count]) for count in range(1, 1 + len(drafts)))]


def _accept_drafts(results: Sequence[SequenceOutput], drafts: Sequence[tuple[int, ...]]) -> list[SequenceOutput]:
    """Merge the results of each sequence up to the first draft that differs from the token before it."""
    merged, start = [], 0
    for tokens in drafts:
        first, num_accepted = results[start], 0
        for token, result in zip(tokens, results[start:], strict=False):
            if result.error is not None or result.token_id != token:
                break
            num_accepted += 1
        merged.append(first._replace(next_outputs=tuple(results[start + 1 : start + 1 + num_accepted])))
        start += 1 + len(tokens)
    return merged


@torch.inference_mode()
def _score_span(scheduled: ScheduledSequence, logits: Tensor, num_tokens: int | None) -> SequenceOutput:
    """Score the prompt tokens that follow the span's logits [n, V]."""
    first = scheduled.start + scheduled.logit_offsets[0] + 1
    targets = scheduled.sequence.token_ids[first : first + len(logits)]
    scores = gather_logprobs(logits, targets, scheduled.sequence.sampling_params.prompt_logprobs or 0, num_tokens)
    return SequenceOutput(error=NONFINITE_ERROR) if scores is None else SequenceOutput(prompt_logprobs=tuple(scores))


def _draw_from_finite(
    logits: Tensor, rows: list[int], sequences: list[TokenSequence], num_tokens: int | None, best: Sequence[int]
) -> list[SequenceOutput]:
    """Return the best token of rows of finite logits [N, V], or a drawn one, without log-probabilities."""
    tokens = [best[row] for row in rows]
    drawn = [i for i, seq in enumerate(sequences) if seq.sampling_params.uses_seed]
    if drawn:
        scores = _select(logits, [rows[i] for i in drawn])[:, :num_tokens]
        for i, token in zip(drawn, _draw_filtered(scores, [sequences[i] for i in drawn]), strict=True):
            tokens[i] = token
    return list(map(SequenceOutput, tokens))


@torch.inference_mode()
def _sample_in_parts(
    logits: Tensor, rows: list[int], sequences: Sequence[TokenSequence], num_tokens: int | None
) -> list[SequenceOutput]:
    """Sample from rows of [N, V]; on a CPU a few sequences at a time, so that temporaries stay in its cache."""
    logits = _select(logits, rows)
    size = max(1, MAX_PART // logits.shape[-1]) if logits.device.type == "cpu" else max(1, len(sequences))
    parts = [(logits[low : low + size], sequences[low : low + size]) for low in range(0, len(sequences), size)]
    return [result for part, seqs in parts for result in _sample_or_fail(part, seqs, num_tokens)]


def _sample_or_fail(logits: Tensor, sequences: Sequence[TokenSequence], num_tokens: int | None) -> list[SequenceOutput]:
    """Sample from [N, V]; an exception in ``allowed_tokens_fn`` or in a grammar fails its sequence only."""
    try:
        return sample_tokens(logits, sequences, num_tokens)
    except Exception as error:
        if all(seq.sampling_params.allowed_tokens_fn is None and seq.grammar_state is None for seq in sequences):
            raise
        if len(sequences) == 1:
            reason = str(error) if isinstance(error, KvadError) else f"{type(error).__name__}: {error}"
            return [SequenceOutput(0, error=f"sampling failed: {reason}")]
        parts = zip(logits.split(1), sequences, strict=True)
        return [result for part, seq in parts for result in _sample_or_fail(part, [seq], num_tokens)]


def sample_tokens(
    logits: Tensor, sequences: Sequence[TokenSequence], num_tokens: int | None = None
) -> list[SequenceOutput]:
    """Sample one token per sequence from logits [N, V]; the result of a beam has ``candidates``, possibly none.

    ``num_tokens``: the tokenizer's vocabulary. Rows of the embedding beyond it are padding and are never sampled.
    """
    if logits.device.type != "cpu" and (rows := _rows_on_device(logits, sequences)):
        others = sorted(set(range(len(sequences))).difference(rows))
        by_row = dict(
            zip(rows, DeviceTokens(_select(logits, rows), [sequences[i] for i in rows], num_tokens).wait(), strict=True)
        )
        if others:
            sampled = sample_tokens(_select(logits, others), [sequences[i] for i in others], num_tokens)
            by_row |= zip(others, sampled, strict=True)
        return [by_row[i] for i in range(len(sequences))]
    raw = logits.float()
    beams = [i for i, seq in enumerate(sequences) if seq.sampling_params.num_beams > 1]
    samples = [i for i, seq in enumerate(sequences) if seq.sampling_params.num_beams == 1]
    totals = _finite_log_totals(raw) if beams else None
    is_finite = _finite_rows(raw) if totals is None else totals.isfinite().tolist()
    if not all(is_finite):
        raw = torch.where(torch.isfinite(raw), raw, torch.zeros_like(raw))
        totals = None if totals is None else _finite_log_totals(raw)
    scores = raw
    if edited_beams := [i for i in beams if sequences[i].sampling_params.edits_log_probabilities]:
        assert totals is not None
        first = torch.zeros_like(totals)  # what is subtracted before the edits, as in transformers
        first[edited_beams] = totals[edited_beams]
        scores, totals = raw - first.unsqueeze(1), totals - first
    results: dict[int, SequenceOutput] = {}
    with _edited(scores, sequences, is_copy=scores is not raw) as edited:
        edited = edited[:, :num_tokens]
        if totals is not None:
            seqs = [sequences[i] for i in beams]
            parts = _select(raw, beams), _select(edited, beams), _select(totals, beams)
            results |= zip(beams, _best_candidates(*parts, seqs), strict=True)
        if samples:
            seqs = [sequences[i] for i in samples]
            results |= zip(samples, _choose_tokens(_select(raw, samples), _select(edited, samples), seqs), strict=True)
    if any(seq.grammar_state is not None for seq in sequences):
        _mark_complete(results, sequences)
    return [results[i] if ok else results[i]._replace(error=NONFINITE_ERROR) for i, ok in enumerate(is_finite)]


def _mark_complete(results: dict[int, SequenceOutput], sequences: Sequence[TokenSequence]) -> None:
    """Set ``is_complete`` of the results whose tokens complete structured outputs."""
    rows = [i for i, result in results.items() if result.error is None and grammar.is_constrained(sequences[i])]
    tokens = [results[i].token_id or 0 for i in rows]
    for i, is_complete in zip(rows, grammar.complete_outputs([sequences[i] for i in rows], tokens), strict=True):
        results[i] = results[i]._replace(is_complete=is_complete)


def _rows_on_device(logits: Tensor, sequences: Sequence[TokenSequence]) -> list[int]:
    """Return the rows of logits [N, V] whose tokens ``DeviceTokens`` chooses. A row depends on no other sequence."""
    can_draw, all_params = ops.gpu.can_draw(logits), [seq.sampling_params for seq in sequences]
    return [i for i, p in enumerate(all_params) if not p.needs_host and (can_draw or p.greedy)]


def sample_on_device(output: SchedulerOutput, logits: Tensor, num_tokens: int | None = None) -> DeviceTokens | None:
    """Return the tokens of a step with one logit [N, V] per sequence; None if the host samples any of them."""
    sequences = [scheduled.sequence for scheduled in output.scheduled]
    if not all(map(_has_one_logit, output.scheduled)) or len(_rows_on_device(logits, sequences)) < len(sequences):
        return None
    return DeviceTokens(logits, sequences, num_tokens)


class DeviceTokens:
    """One token per sequence, chosen on the logits' device; the logits [N, V] may be overwritten at once.

    ``token_ids`` [N] are on the device. On a GPU nothing is waited for but in ``wait``.
    """

    @torch.inference_mode()
    def __init__(self, logits: Tensor, sequences: Sequence[TokenSequence], num_tokens: int | None = None) -> None:
        num_tokens = logits.shape[-1] if num_tokens is None else num_tokens
        scores = logits
        if any(seq.sampling_params.edits_scores for seq in sequences):
            raw = edited = logits.float()
            for step in EDIT_STEPS:
                edited = step(edited, sequences)
            scores = logits if edited is raw else edited.clamp(min=LOWEST)  # infinity would be an error of the row
        if all(seq.sampling_params.greedy for seq in sequences):
            chosen = ops.gpu.best_tokens(scores, num_tokens)
        else:
            parameters = _to_device(np.array(_draw_parameters(sequences)), logits.device)
            chosen = ops.gpu.draw_tokens(scores, parameters, num_tokens)
        self.token_ids = chosen[:, 0]
        if scores is not logits:
            chosen[:, 1] = ops.gpu.best_tokens(logits, num_tokens)[:, 1]
            chosen = torch.cat((chosen, scores.gather(1, chosen[:, :1]) > LOWEST), dim=1)
        all_counts = [seq.sampling_params.logprobs for seq in sequences]
        self._rows = [i for i, count in enumerate(all_counts) if count is not None]
        self._num_alternatives = [count for count in all_counts if count is not None]
        results: tuple[Tensor, ...] = (chosen,)
        if self._rows:
            raw, targets = _select(logits, self._rows).float(), _select(self.token_ids, self._rows)
            results += _logprobs(raw, targets, max(self._num_alternatives), num_tokens)
        self._copies = [_to_host(result) for result in results]
        self._copied = torch.cuda.Event() if logits.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> list[SequenceOutput]:
        """Return the tokens; a row that is not finite is an error, and so is one without an allowed token."""
        if self._copied is not None:
            self._copied.synchronize()
        chosen, *scored = (copy.tolist() for copy in self._copies)
        results = [
            SequenceOutput(token, error=None if is_finite and all(is_allowed) else _error_of_row(is_finite))
            for token, is_finite, *is_allowed in chosen
        ]
        if self._rows:
            logprobs = _to_logprobs([chosen[row][0] for row in self._rows], scored, self._num_alternatives)
            for row, logprob in zip(self._rows, logprobs, strict=True):
                results[row] = results[row]._replace(logprob=logprob)
        return results


def _error_of_row(is_finite: int) -> str:
    return scheduling.request.NO_ALLOWED_TOKEN if is_finite else NONFINITE_ERROR


def _to_device(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    return ops.gpu.to_device(torch.from_numpy(values), device)


def _to_host(tensor: Tensor) -> Tensor:
    """Return a tensor of the host; if it comes from a GPU, what is recorded next in its stream must be waited for."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _draw_parameters(sequences: Sequence[TokenSequence]) -> list[tuple[float, ...]]:
    """Return temperature, top-k, top-p, min-p and a random number of each sequence; zeros of a greedy one."""
    drawing = [seq for seq in sequences if not seq.sampling_params.greedy]
    numbers = iter(_uniform_numbers(drawing).tolist())
    all_params = [seq.sampling_params for seq in sequences]
    return [
        (0.0,) * 5 if p.greedy else (p.temperature, max(0, p.top_k), p.top_p, p.min_p, next(numbers))
        for p in all_params
    ]


@contextmanager
def _edited(scores: Tensor, sequences: Sequence[TokenSequence], *, is_copy: bool) -> Iterator[Tensor]:
    """Yield the scores [N, V] after the edit steps.

    Bans are written into the logits and undone afterwards, unless log-probabilities of the raw ones are requested.
    """
    if not any(seq.sampling_params.edits_scores for seq in sequences):
        yield scores
        return
    in_place = is_copy or all(seq.sampling_params.logprobs is None for seq in sequences)
    banned = _banned_entries(scores, sequences) if in_place else None
    if banned is not None:
        old = scores[banned]
        scores[banned] = -math.inf
    edited = scores
    try:
        for step in EDIT_STEPS[in_place:]:
            edited = step(edited, sequences)
        yield edited
    finally:
        if banned is not None:
            scores[banned] = old


def _finite_rows(raw: Tensor) -> list[bool]:
    """Return for each row of [N, V] whether it is finite; sums are checked first, because they take one fast pass."""
    if raw.device.type == "cpu":
        with np.errstate(all="ignore"):
            are_finite = bool(np.isfinite(raw.numpy().sum(axis=-1)).all())
    else:
        are_finite = bool(torch.isfinite(raw.sum(dim=-1)).all())
    if are_finite:
        return [True] * len(raw)
    is_finite: list[bool] = torch.isfinite(raw).all(dim=-1).tolist()
    return is_finite


def _library_for(scores: Tensor) -> ops.native.library.Library | None:
    """Return the kernels if they can read scores [N, V]."""
    return ops.native.load().library if scores.device.type == "cpu" and scores.stride(1) == 1 else None


def _finite_log_totals(raw: Tensor) -> Tensor:
    """Return logsumexp [N] of logits [N, V], float32; NaN of a row that is not finite."""
    library = _library_for(raw)
    if library is not None:
        return library.log_totals(raw)
    is_finite = torch.tensor(_finite_rows(raw), device=raw.device)
    return raw.logsumexp(dim=-1).masked_fill(~is_finite, math.nan)


def _select(x: Tensor, rows: list[int]) -> Tensor:
    """Return the given rows, in ascending order, of [N, ...]; without a copy if they are all rows."""
    return x if len(rows) == len(x) else x.index_select(0, _to_device(np.array(rows, np.int64), x.device))


def _choose_tokens(raw: Tensor, scores: Tensor, sequences: Sequence[TokenSequence]) -> list[SequenceOutput]:
    """Choose the best token of each sequence, or a random one, by scores [N, V], and score it by raw logits [N, V]."""
    chosen, is_allowed = _argmax(scores)
    drawn = [i for i, seq in enumerate(sequences) if seq.sampling_params.uses_seed]
    if drawn:
        for i, token in zip(drawn, _draw_filtered(_select(scores, drawn), [sequences[i] for i in drawn]), strict=True):
            chosen[i] = token
    requested = [i for i, seq in enumerate(sequences) if seq.sampling_params.logprobs is not None]
    counts = [sequences[i].sampling_params.logprobs or 0 for i in requested]
    num_tokens = scores.shape[-1]
    scored = _score(raw[requested], [chosen[i] for i in requested], counts, num_tokens) if requested else []
    logprobs = dict(zip(requested, scored, strict=True))
    return [
        SequenceOutput(token, logprobs.get(i), error=None if is_allowed[i] else scheduling.request.NO_ALLOWED_TOKEN)
        for i, token in enumerate(chosen)
    ]


def _argmax(scores: Tensor) -> tuple[list[int], list[bool]]:
    """Return the first best token of each row of [N, V], and whether it is allowed (not -inf).

    On a CPU numpy finds it ten times as fast as torch.
    """
    if scores.device.type == "cpu":
        rows = scores.numpy()
        chosen = [int(row.argmax()) for row in rows]
        return chosen, [bool(row[token] > -math.inf) for row, token in zip(rows, chosen, strict=True)]
    best = scores.max(dim=-1)
    return best.indices.tolist(), (best.values > -math.inf).tolist()


def _best_candidates(
    raw: Tensor, scores: Tensor, totals: Tensor, sequences: Sequence[TokenSequence]
) -> list[SequenceOutput]:
    """Return the best continuations of each beam by scores [N, V], with log-probabilities by raw logits [N, V].

    ``totals`` [N]: what is subtracted from the scores, so that they are log-probabilities.
    """
    wanted = [scheduling.num_candidates(seq.sampling_params, len(seq.stop_tokens)) for seq in sequences]
    outputs: dict[int, SequenceOutput] = {}
    for count in set(wanted):  # which of equal tokens are found depends on k, so it must not be a neighbor's
        rows = [i for i, each in enumerate(wanted) if each == count]
        found, ids = top_k(_select(scores, rows), min(count, scores.shape[-1]))
        log_probabilities = found - _select(totals, rows).unsqueeze(1)
        for i, values, tokens in zip(rows, log_probabilities.tolist(), ids.tolist(), strict=True):
            num_top = sequences[i].sampling_params.logprobs
            scored = []
            if num_top is not None:
                scored = _score(raw[i : i + 1], tokens, [num_top] * len(tokens), scores.shape[-1])
            candidates = tuple(zip(tokens, values, strict=True))
            outputs[i] = SequenceOutput(tokens[0], candidates=candidates, candidate_logprobs=tuple(scored))
    return [outputs[i] for i in range(len(sequences))]


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best values and their indices, [N, k] each, of scores [N, V].

    They are in the k spans of SPAN numbers with the highest maxima, or behind the last whole span, so only these are
    ranked: faster than ``torch.topk`` for large vocabularies. A span's numbers are ``num_spans`` apart, because maxima
    over the first dimension of [SPAN, num_spans] are vectorized.
    """
    num_spans = scores.shape[-1] // SPAN
    if num_spans <= 2 * k:
        return torch.topk(scores, k, dim=-1)
    num_inside = num_spans * SPAN
    spans = scores[:, :num_inside].unflatten(1, (SPAN, num_spans))
    best = spans.amax(dim=1).topk(k, dim=-1, sorted=False).indices
    inside = spans.gather(2, best.unsqueeze(1).expand(-1, SPAN, -1)).flatten(1)  # [N, SPAN * k]
    values, places = torch.cat((inside, scores[:, num_inside:]), dim=1).topk(k, dim=-1)
    ids = best.gather(1, places % k) + places // k * num_spans
    return values, torch.where(places < k * SPAN, ids, places - k * SPAN + num_inside)


def gather_logprobs(
    logits: Tensor, targets: Sequence[int], top_logprobs: int, num_tokens: int | None = None
) -> list[TokenLogprob] | None:
    """Return log-probabilities of ``targets`` [N] under logits [N, V]; None if not finite. See ``_score``."""
    raw = logits.float()
    if not all(_finite_rows(raw)):
        return None
    return _score(raw, targets, [top_logprobs] * len(targets), num_tokens)


def _score(
    raw: Tensor, targets: Sequence[int], num_alternatives: Sequence[int], num_tokens: int | None
) -> list[TokenLogprob]:
    """Return log-probabilities of ``targets`` [N] under raw logits [N, V], or [1, V] for all of them.

    They are of all V columns, as in transformers. The alternatives are ids below ``num_tokens`` (None: V), because the
    columns beyond the tokenizer's vocabulary are padding, which is never sampled.
    """
    chosen = torch.tensor(targets, device=raw.device)
    scored = _logprobs(raw, chosen, max(num_alternatives), num_tokens)
    return _to_logprobs(targets, [x.tolist() for x in scored], num_alternatives)


def _logprobs(
    raw: Tensor, targets: Tensor, num_alternatives: int, num_tokens: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of ``targets`` [N], and those [N, k] and the ids [N, k] of the best tokens."""
    logprobs = raw.log_softmax(dim=-1)
    known = logprobs[:, :num_tokens]
    top = known.topk(min(num_alternatives, known.shape[-1]), dim=-1)
    logprobs, values, ids = (x.expand(len(targets), -1) for x in (logprobs, *top))
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), values, ids


def _to_logprobs(
    targets: Sequence[int], scored: Sequence[list[Any]], num_alternatives: Sequence[int]
) -> list[TokenLogprob]:
    """Return the results of ``_logprobs``, as lists, for each target with as many alternatives as it needs."""
    return [
        TokenLogprob(token, logprob, tuple(zip(ids[:count], values[:count], strict=True)))
        for token, logprob, values, ids, count in zip(targets, *scored, num_alternatives, strict=True)
    ]


def _draw_filtered(scores: Tensor, sequences: Sequence[TokenSequence]) -> list[int]:
    """Draw a token per sequence from scores [N, V] after temperature and filters."""
    library = _library_for(scores)
    if library is None:
        return _draw_filtered_in_torch(scores, sequences)
    rows = [i for i, seq in enumerate(sequences) if seq.sampling_params.typical_p >= 1]
    others = sorted(set(range(len(sequences))).difference(rows))
    drawn = _draw_filtered_in_torch(_select(scores, others), [sequences[i] for i in others]) if others else []
    tokens = dict(zip(others, drawn, strict=True))
    if rows:
        seqs = [sequences[i] for i in rows]
        tokens |= zip(rows, library.draw(_select(scores, rows), _draw_parameters(seqs)), strict=True)
    return [max(tokens[i], 0) for i in range(len(sequences))]


def _draw_filtered_in_torch(scores: Tensor, sequences: Sequence[TokenSequence]) -> list[int]:
    """Draw in PyTorch; only the best tokens of a sequence are filtered, if its filters drop all others."""
    counts = [_num_candidates(seq.sampling_params, scores.shape[-1]) for seq in sequences]
    whole, tokens = [i for i, count in enumerate(counts) if not count], dict[int, int]()
    groups = [(count, seq.sampling_params.top_k > 0) for count, seq in zip(counts, sequences, strict=True)]
    for group in {group for group in groups if group[0]}:
        count, rows = group[0], [i for i, each in enumerate(groups) if each == group]
        drawn, are_complete = _draw_of_best(_select(scores, rows), [sequences[i] for i in rows], count)
        whole += [i for i, is_complete in zip(rows, are_complete, strict=True) if not is_complete]
        tokens |= zip(rows, drawn, strict=True)
    if whole:
        whole.sort()
        seqs, filtered = [sequences[i] for i in whole], _select(scores, whole)
        for step in FILTER_STEPS:
            filtered = step(filtered, seqs)
        tokens |= zip(whole, _draw(filtered, seqs).squeeze(-1).tolist(), strict=True)
    return [tokens[i] for i in range(len(sequences))]


def _num_candidates(params: SamplingParams, vocab_size: int) -> int:
    """Return the number of best tokens that probably include all that the filters keep; 0: all tokens."""
    if params.typical_p < 1:
        return 0
    count = -(-(params.top_k + SPARE) // STEP) * STEP if params.top_k > 0 else MAX_CANDIDATES
    has_few = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return count if has_few and count <= min(MAX_CANDIDATES, vocab_size // SPAN) else 0


def _draw_of_best(scores: Tensor, sequences: Sequence[TokenSequence], count: int) -> tuple[list[int], list[bool]]:
    """Draw from the ``count`` best of scores [N, V]; False for a sequence whose filters may keep another token.

    All sequences have top-k, or none.
    """
    values, ids = top_k(scores, count)
    ids, order = ids.sort(dim=-1)
    values = apply_temperature(values.gather(1, order), sequences)  # which may make numbers equal
    total, of_top_k = None, apply_top_k(values, sequences)
    if any(seq.sampling_params.top_k <= 0 and seq.sampling_params.top_p < 1 for seq in sequences):
        total = _log_total(apply_temperature(scores, sequences))
    filtered = apply_min_p(apply_top_p(of_top_k, sequences, total), sequences)
    decisive = filtered if sequences[0].sampling_params.top_k <= 0 else of_top_k
    last = values.amin(dim=-1, keepdim=True)  # all that are equal must be dropped
    are_complete = ((decisive == -math.inf) | (values > last)).all(dim=-1).tolist()
    return ids.gather(1, _draw(filtered, sequences)).squeeze(-1).tolist(), are_complete


def _draw(scores: Tensor, sequences: Sequence[TokenSequence]) -> Tensor:
    """Draw tokens [N, 1] by inverse transform: the first whose cumulative probability exceeds the uniform number.

    Weights are summed one after the other, so that tokens of no probability change no bit.
    """
    u = _uniform_numbers(sequences)
    weights = (scores.double() - scores.amax(dim=-1, keepdim=True).clamp(min=LOWEST)).exp()
    cumulated = weights.cumsum(dim=-1)
    threshold = torch.from_numpy(u).to(scores.device).unsqueeze(-1) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, threshold, right=True).clamp(max=scores.shape[-1] - 1)


def _uniform_numbers(sequences: Sequence[TokenSequence]) -> npt.NDArray[np.float64]:
    """Return the random number of each sequence's next token."""
    keys = [seq.draw_key() for seq in sequences]
    return uniform(keys, [seq.sample_index for seq in sequences], [len(seq.token_ids) for seq in sequences])


def apply_bans(scores: Tensor, sequences: Sequence[TokenSequence]) -> Tensor:
    """Ban end tokens before ``min_tokens``, ends of bad words, and repeated n-grams."""
    banned = _banned_entries(scores, sequences)
    if banned is None:
        return scores
    index = tuple(_to_device(np.array(each), scores.device) for each in banned)
    return scores.index_put(index, scores.new_full((), -math.inf))  # a number would be sent with a wait


def _banned_entries(scores: Tensor, sequences: Sequence[TokenSequence]) -> tuple[list[int], list[int]] | None:
    """Return the rows and columns of the banned scores [N, V], or None if there are none."""
    banned = [(i, token) for i, seq in enumerate(sequences) for token in _banned(seq) if token < scores.shape[-1]]
    if not banned:
        return None
    rows, tokens = zip(*banned, strict=True)
    return list(rows), list(tokens)


def _banned(seq: TokenSequence) -> set[int]:
    params, tokens = seq.sampling_params, seq.token_ids
    banned = set(seq.stop_tokens) if len(tokens) - seq.num_prompt_tokens < params.min_tokens else set()
    for word in params.bad_words_ids:
        prefix = word[:-1]
        if not prefix or tuple(tokens[-len(prefix) :]) == tuple(prefix):
            banned.add(word[-1])
    if params.no_repeat_ngram_size:
        banned |= _repeating_tokens(tokens, params.no_repeat_ngram_size)
    return banned


def _repeating_tokens(tokens: Sequence[int], n: int) -> set[int]:
    """Return the tokens that would repeat an n-gram (Paulus et al. 2018, sec. 2.5).

    Only places with the hash of the last n-1 tokens are compared, because a comparison everywhere takes n times as
    long. The hash of m tokens t is the sum of t[i] * BASE**i, modulo 2**64.
    """
    m, repeating = n - 1, set[int]()
    if len(tokens) < n:
        return repeating
    ids = np.array(tokens, dtype=np.uint64)
    powers = np.cumprod(np.full(len(ids) + 1, HASH_BASE), dtype=np.uint64)
    sums = np.cumsum(np.append(np.uint64(0), ids * powers[:-1]), dtype=np.uint64)
    hashes = (sums[m:] - sums[: len(sums) - m]) * powers[: len(sums) - m][::-1]  # as if all began at the last place
    for start in np.flatnonzero(hashes[:-1] == hashes[-1]).tolist():
        token = tokens[start + m]
        if token not in repeating and np.array_equal(ids[start : start + m], ids[len(ids) - m :]):
            repeating.add(token)
    return repeating


def apply_structured_output(scores: Tensor, sequences: Sequence[TokenSequence]) -> Tensor:
    """Keep only the tokens that the grammars of structured outputs allow."""
    rows = [i for i, seq in enumerate(sequences) if grammar.is_constrained(seq)]
    if not rows:
        return scores
    allowed = torch.from_numpy(grammar.allowed_tokens([sequences[i] for i in rows], scores.shape[-1]))
    masked = torch.where(allowed.to(scores.device), _select(scores, rows), -math.inf)
    if len(rows) == len(sequences):
        return masked
    scores = scores.clone()
    scores[rows] = masked
    return scores


def apply_forced_tokens(scores: Tensor, sequences: Sequence[TokenSequence]) -> Tensor:
    """Keep only allowed tokens, and the forced first or last token; the last one only where the grammar may end."""
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
        if forced_token is not None and (scores[i, forced_token] > -math.inf or not grammar.is_constrained(seq)):
            _keep_only(scores[i], [forced_token], 0.0)
    return scores


def _keep_only(scores: Tensor, ids: list[int], values: Tensor | float) -> None:
    """Set scores [V] to ``values`` at ``ids`` and to -inf elsewhere."""
    scores.fill_(-math.inf)
    scores[ids] = values


def apply_logit_bias(scores: Tensor, sequences: Sequence[TokenSequence]) -> Tensor:
    all_biases = [seq.sampling_params.logit_bias for seq in sequences]
    if not any(all_biases):
        return scores
    rows = np.repeat(np.arange(len(sequences)), list(map(len, all_biases)))
    tokens = np.array([token for biases in all_biases for token in biases])
    values = np.array([value for biases in all_biases for value in biases.values()])
    index = _to_device(rows, scores.device), _to_device(tokens, scores.device)
    scores = scores.clone()
    scores[index] += _to_device(values, scores.device).to(scores.dtype)
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
    counted = [sequences[i].count_tokens() for i in penalized]
    sizes = [len(counts.tokens) for counts in counted]
    index = np.repeat(penalized, sizes), np.concatenate([np.array(counts.tokens) for counts in counted])
    generated = np.concatenate([np.array(counts.generated, np.float32) for counts in counted])
    values = np.array([penalties[i] for i in penalized], np.float32)
    repetition, presence, frequency = np.repeat(values, sizes, axis=0).T
    amount = np.where(generated > 0, presence + frequency * generated, np.float32(0))
    rows, tokens, factor, subtracted = (_to_device(x, scores.device) for x in (*index, repetition, amount))
    scores, old = scores.clone(), scores[rows, tokens]
    scores[rows, tokens] = torch.where(old > 0, old / factor, old * factor) - subtracted
    return scores


def apply_temperature(scores: Tensor, sequences: Sequence[TokenSequence]) -> Tensor:
    """Divide by the temperature; sequences at 0 (greedy) and 1 are unchanged."""
    taus = [seq.sampling_params.temperature or 1.0 for seq in sequences]
    if all(tau == 1 for tau in taus):
        return scores
    # A tiny tau gives -inf then, never infinity. The best score may be -inf itself.
    below = scores - scores.amax(dim=-1, keepdim=True).clamp(min=LOWEST)
    tempered = below / _column([max(tau, 1e-30) for tau in taus], scores)
    if 1 not in taus:
        return tempered
    return torch.where(torch.tensor([[tau != 1] for tau in taus], device=scores.device), tempered, scores)


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


def apply_top_p(scores: Tensor, sequences: Sequence[TokenSequence], total: Tensor | None = None) -> Tensor:
    """Keep the fewest tokens whose probabilities reach p (Holtzman et al. 2020).

    ``total`` [N, 1]: logsumexp of the scores and of all lower ones that are left out.
    """
    ps = [1.0 if seq.sampling_params.greedy else seq.sampling_params.top_p for seq in sequences]
    if all(p >= 1 for p in ps):
        return scores
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    total = _log_total(scores) if total is None else total
    return _drop_beyond(scores, ids, (ordered - total).exp(), ps)


def _log_total(scores: Tensor) -> Tensor:
    """Return logsumexp [N, 1] of scores [N, V], with the same bits if more of them are -inf."""
    return scores.double().logsumexp(dim=-1, keepdim=True).to(scores.dtype)


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


SamplerStep = Callable[[Tensor, Sequence[TokenSequence]], Tensor]
EDIT_STEPS: tuple[SamplerStep, ...] = (
    apply_bans, apply_logit_bias, apply_penalties, apply_structured_output, apply_forced_tokens
)  # fmt: skip
FILTER_STEPS: tuple[SamplerStep, ...] = (apply_temperature, apply_top_k, apply_top_p, apply_min_p, apply_typical_p)
SAMPLER_STEPS = EDIT_STEPS + FILTER_STEPS
