"""Scores of given tokens (teacher forcing), with or without a cache.

``UncachedScorer`` runs whole rows through the model; ``CachedScorer`` sends the same rows through an engine with any
cache, so a policy or a format is measured by the same numbers as the model. Both return, for every token of a row but
the first, its loss in nats and whether it was the most likely one. No query reads a row's last token, so a model of
limit n takes rows of n + 1 without a cache.

``run_engine`` and ``attach_logit_hook`` are the one way for every measurement through a cache (quality, streaming,
evaluation, ``kvad verify``): the engine runs until it is idle, and a hook receives the logits of each sequence.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad import config as cfg
from kvad.config import ModelConfig
from kvad.engine import Engine
from kvad.engine.execution import ModelRunner
from kvad.engine.scheduling import SamplingParams, SchedulerOutput
from kvad.errors import EngineError, NumericalError, RequestError, UsageError
from kvad.model import NoCache, Transformer
from kvad.model_input import ModelInput, SubBatch

BATCH = 8192  # tokens of rows that are computed together
LOGITS = 1 << 22  # elements of [positions, V] computed at a time
LogitHook = Callable[[int, int, Tensor], None]  # (request, position of the first, logits [n, V])


class ScoredRow(NamedTuple):
    """``tokens`` [n] int64 on the host; ``source`` [m], encoder input."""

    tokens: Tensor
    source: Tensor | None = None
    start: int = 1  # index of the first token whose score the caller uses


class RowScores(NamedTuple):
    """Scores of a row's n - 1 tokens after its first: ``nats`` [n - 1] float64, ``correct`` [n - 1] bool."""

    nats: Tensor
    correct: Tensor


class TokenScorer(Protocol):
    """Scores rows, in their order."""

    def score(self, rows: Sequence[ScoredRow]) -> list[RowScores]: ...


def perplexity(loss: float) -> float:
    """Return the perplexity of a loss in nats; infinite for a model that is certain of wrong tokens."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def max_row_length(config: ModelConfig) -> int | None:
    """Return the longest row that the model can compute beyond its limit: the table of learned positions, or None."""
    position = config.embedding.position
    return position.num_positions - position.offset if isinstance(position, cfg.LearnedPositionsConfig) else None


class UncachedScorer:
    """Scores without a cache, also rows of ``longest`` tokens, beyond the limit; UsageError if positions end before."""

    def __init__(self, model: Transformer, longest: int | None = None) -> None:
        self._model, self._limit = model, max(model.config.max_seq_len, longest or 0)
        most = max_row_length(model.config)
        if most is not None and self._limit > max(most, model.config.max_seq_len):
            raise UsageError(
                f"a row of {self._limit:,} tokens: the table of learned positions ends at {most:,}",
                "ask for shorter rows; only encodings that are functions of positions go on",
            )
        # A layer's window of the limit's size has no effect within the limit, but on longer rows it has.
        self._cache = NoCache(dataclasses.replace(model.config, max_seq_len=self._limit), kernel=model.kernel)

    @torch.no_grad()
    def score(self, rows: Sequence[ScoredRow]) -> list[RowScores]:
        """Score rows; rows of similar shape are computed together, ``BATCH`` tokens at a time."""
        nothing = RowScores(torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.bool))
        scores = {number: nothing for number, row in enumerate(rows) if len(row.tokens) < 2}
        order = sorted((n for n in range(len(rows)) if n not in scores), key=lambda n: _shape(rows[n]))
        for batch in _batches(rows, order):
            scores |= dict(zip(batch, self._score([rows[number] for number in batch]), strict=True))
        return [scores[number] for number in range(len(rows))]

    def _score(self, rows: Sequence[ScoredRow]) -> list[RowScores]:
        model = self._model
        longest = max(len(row.tokens) for row in rows)
        assert longest <= self._limit + 1, f"a row of {longest} tokens, and the limit is {self._limit}"
        model_input = self._model_input([row.tokens[:-1] for row in rows], rows)
        if rows[0].source is not None:
            sources = [row.source for row in rows if row.source is not None]
            model_input = model_input._replace(encoder_input=self._model_input(sources, rows))
        hidden = model(model_input, self._cache)
        targets = torch.cat([row.tokens[1:] for row in rows]).to(hidden.device)
        size, indices = max(1, LOGITS // model.config.vocab_size), torch.arange(len(hidden), device=hidden.device)
        slices = zip(indices.split(size), targets.split(size), strict=True)
        scored = [_score(model.logits(hidden, some), true) for some, true in slices]
        nats, hits = (torch.cat(parts) for parts in zip(*scored, strict=True))
        sizes = [len(row.tokens) - 1 for row in rows]
        return [RowScores(*both) for both in zip(nats.split(sizes), hits.split(sizes), strict=True)]

    def _model_input(self, parts: Sequence[Tensor], rows: Sequence[ScoredRow]) -> ModelInput:
        """Build the input of a part of each row, its tokens or its source; neighbors of one shape share a sub-batch."""
        device, lengths = self._model.token_embedding.device, [len(part) for part in parts]
        shapes = groupby(zip(lengths, map(_shape, rows), strict=True))
        sub_batches = tuple(SubBatch(len(list(equal)), length, length) for (length, _), equal in shapes)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        seq_lens = torch.cat([torch.full((length,), length) for length in lengths]).to(device)
        tokens = torch.cat(list(parts)).to(device)
        return ModelInput(tokens, positions, sub_batches, positions[:0], seq_lens=seq_lens)


def _shape(row: ScoredRow) -> tuple[int, int]:
    return len(row.tokens), 0 if row.source is None else len(row.source)


def _batches(rows: Sequence[ScoredRow], order: Sequence[int]) -> Iterator[list[int]]:
    batch, size = list[int](), 0
    for number in order:
        more = sum(_shape(rows[number]))
        if batch and size + more > BATCH:
            yield batch
            batch, size = [], 0
        batch.append(number)
        size += more
    if batch:
        yield batch


def _score(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Score logits [N, V], targets [N] -> nats [N] (float64), hits [N], on the host; NumericalError for NaN."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nats = F.cross_entropy(wide, targets, reduction="none").double().cpu()
    if bool(nats.isnan().any()):
        raise NumericalError("the model's logits are NaN", "Check the weights: kvad doctor MODEL.")
    return nats, (wide.argmax(-1) == targets).cpu()


class CachedScorer:
    """Scores through the cache of an engine, which it then owns.

    Rows are prompts, read in the cache's chunks, so a token sees what the cache has retained, and the earlier tokens of
    its own chunk. One token is sampled after the last but one and dropped, so its logits are computed too.
    """

    def __init__(self, engine: Engine, tick: Callable[[int], None] = lambda _position: None) -> None:
        """Take over the engine; ``tick`` is called with the last scored position of each chunk."""
        self._engine, self._tick = engine, tick
        self._rows: dict[int, tuple[Tensor, RowScores]] = {}  # by request
        attach_logit_hook(engine, self._record)

    @torch.no_grad()
    def score(self, rows: Sequence[ScoredRow]) -> list[RowScores]:
        """Score rows; RequestError for a row that the cache cannot hold, EngineError if a row fails."""
        scores, sampling_params = list[RowScores](), SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        most = self._engine.limits.max_len_for(sampling_params)[0]
        for row in rows:
            count = len(row.tokens) - 1
            if count >= most:
                raise RequestError(
                    f"sequence: must have at most {most:,} tokens, got {count + 1:,}",
                    "Use shorter windows, or a cache that drops tokens.",
                )
            scores.append(RowScores(torch.full((count,), torch.nan, dtype=torch.float64), torch.zeros(count).bool()))
            if count:
                source = None if row.source is None else row.source.tolist()
                request = self._engine.add_request(row.tokens[:-1].tolist(), sampling_params, encoder_token_ids=source)
                self._rows[request] = row.tokens, scores[-1]
        run_engine(self._engine)
        self._rows.clear()
        assert not any(bool(one.nats.isnan().any()) for one in scores), "every position was computed"
        return scores

    def _record(self, request: int, first: int, logits: Tensor) -> None:
        if request in self._rows:
            tokens, scores = self._rows[request]
            last = min(first + len(logits), len(tokens) - 1)
            if last > first:
                targets = tokens[first + 1 : last + 1].to(logits.device)
                scores.nats[first:last], scores.correct[first:last] = _score(logits[: last - first], targets)
                self._tick(last)


def attach_logit_hook(engine: Engine, hook: LogitHook) -> None:
    """Pass the requested logits of every step to ``hook`` from now on, per sequence."""
    engine.runner = _LogitHookRunner(engine, hook)


class _LogitHookRunner(ModelRunner):
    def __init__(self, engine: Engine, hook: LogitHook) -> None:
        super().__init__(engine.model, engine.kv_cache)
        self.hook = hook

    def execute(self, output: SchedulerOutput) -> Tensor:
        logits, first = super().execute(output), 0
        for scheduled in output.scheduled:
            if count := len(scheduled.logit_offsets):
                position = scheduled.start + scheduled.logit_offsets[0]
                self.hook(scheduled.sequence.request_id, position, logits[first : first + count])
                first += count
        return logits


def with_all_logits(output: SchedulerOutput) -> SchedulerOutput:
    """Request the logits of every computed position."""
    scheduled = tuple(work._replace(logit_offsets=range(work.num_tokens)) for work in output.scheduled)
    return output._replace(scheduled=scheduled)


def run_engine(engine: Engine, after_step: Callable[[int], None] = lambda _step: None) -> dict[int, list[int]]:
    """Run the engine until it is idle; return the generated tokens of each request, EngineError if one failed."""
    tokens: dict[int, list[int]] = defaultdict(list)
    step = 0
    while not engine.idle:
        for chunk in engine.step():
            if chunk.error is not None:
                hint = "Check the weights: kvad doctor MODEL." if chunk.error.startswith("numerical") else ""
                raise EngineError(f"request {chunk.request} failed: {chunk.error}", hint)
            if chunk.token_id is not None:
                tokens[chunk.request].append(chunk.token_id)
        after_step(step)
        step += 1
    return tokens
