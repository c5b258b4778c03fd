"""Tokens that are already known, sent through the real path: Scheduler, Ledger, Memory, Runner.

``replay`` forces every sampled token, so what comes back can be laid beside :func:`uncached` position by position,
also after the first disagreement.  It adds no path of its own: chunks, lanes, hits, forks and preemptions are the
scheduler's, and :class:`Happened` counts them, so that a scenario that did not take place cannot pass for tested.

A preemption is brought about where it is decided: by a ledger that says, now and then, that a pool is full.

A memory's logits beside the judge's: how far apart, in logits and in nats, and where the likeliest token differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvad import cache
from kvad.cache import CacheConfig, CacheGroup, build_groups
from kvad.cache.device import KVCache
from kvad.cache.manager import BlockAllocation, KVCacheManager, TokenSpan
from kvad.config import attention_specs
from kvad.engine.execution import ManagedCache, ModelRunner
from kvad.engine.scheduling import (
    RequestMetrics,
    SamplingParams,
    ScheduledSequence,
    Scheduler,
    SchedulerOutput,
    SequenceOutput,
)
from kvad.model import NoCache, Transformer
from kvad.model_input import CacheProtocol as MemoryProtocol
from kvad.model_input import ModelInput, SubBatch
from kvad.verify.report import EXACT, TokenDivergence

SequenceKey = tuple[int, int]  # (stream, sample)
MakeCache = Callable[[Sequence[CacheGroup]], ManagedCache]
ENDLESS = 1 << 40  # tokens of a row without a limit
PREEMPTION_INTERVAL = 4  # steps of at least two rows between two refusals of the ledger


class ReplayStream(NamedTuple):
    """One request.  ``forced``: per sample, the tokens that are generated, equally many each; ``follows``: submit it
    only when that stream has its first token, so that it can hit the prompt's blocks and prefill beside decoding.
    ``source``: what the encoder of an encoder-decoder reads."""

    prompt: tuple[int, ...]
    forced_tokens: tuple[tuple[int, ...], ...]
    after: int | None = None
    source: tuple[int, ...] | None = None

    @property
    def limit(self) -> int:
        """What the scheduler lets the row reach: it decides the rotary regime."""
        return len(self.prompt) + len(self.forced_tokens[0])

    def tokens(self, sample: int) -> tuple[int, ...]:
        """All that is computed: the last forced token is sampled, never fed."""
        return (*self.prompt, *self.forced_tokens[sample][:-1])


@dataclass
class ScenarioCounts:
    """What a replay really did.  ``chunks``: spans that ended inside a prompt; ``mixed``: steps with decoding and
    prefilling rows together; ``recomputed``: tokens computed again after a preemption; ``hit_tokens``: prompt tokens
    that a row found in the cache when it was first seated; ``longest``: the longest row, in tokens; ``encoded``:
    sources that the encoder read."""

    rows: int = 0
    steps: int = 0
    tokens: int = 0
    chunks: int = 0
    mixed: int = 0
    preemptions: int = 0
    recomputed: int = 0
    hit_tokens: int = 0
    forks: int = 0
    longest: int = 0
    encoded: int = 0


@dataclass(frozen=True)
class ReplayResult:
    """``pieces``: per row (first position, logits [n, V]) of each span in the order of time, recomputed ones too."""

    pieces: dict[SequenceKey, list[tuple[int, Tensor]]]
    happened: ScenarioCounts = field(default_factory=ScenarioCounts)

    def logits(self, stream: int, sample: int = 0) -> Tensor:
        """[T, V] as last computed; NaN at positions that a prefix hit or a fork made needless."""
        pieces = self.pieces[stream, sample]
        length = max(start + len(part) for start, part in pieces)
        out = pieces[0][1].new_full((length, pieces[0][1].shape[-1]), torch.nan)
        for start, part in pieces:
            out[start : start + len(part)] = part
        return out


def replay_streams(
    model: Transformer,
    config: CacheConfig,
    streams: Sequence[ReplayStream],
    *,
    squeezes: int = 0,
    budget: int | None = None,
    make: MakeCache | None = None,
    watch: Callable[[SchedulerOutput], None] | None = None,
    keep: bool = True,
) -> ReplayResult:
    """Run ``streams`` to their end and give the logits of every position that was computed.

    ``config.rows`` seats; ``squeezes``: preemptions to force, beside those of a small pool (``config.blocks``);
    ``budget``: tokens per step (default: a chunk, and one per seat); ``make`` builds the memory (default: the real
    one, which rotates as ``config`` says); ``watch`` sees every plan before it is run; ``keep=False`` drops the logits.
    The scheduler's and the ledger's invariants are checked after every step.
    """
    placed = build_groups(attention_specs(model.config), config)
    cache = (make or partial(KVCache, rope_at=config.rope_at, exact_rope=config.endless))(placed)
    runner = ModelRunner(model, cache)
    ledger = _ForcedPreemption(
        placed, prefix=config.enable_prefix_caching, seats=config.max_num_seqs, squeezes=squeezes
    )
    limit = ENDLESS if config.endless else min(model.config.max_seq_len, config.max_seq_len)
    scheduler = Scheduler(
        ledger,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget or config.prefill_chunk_size + config.max_num_seqs,
        prefill_chunk_size=config.prefill_chunk_size,
        limit=limit,
    )
    happened = ScenarioCounts(rows=sum(len(stream.forced_tokens) for stream in streams))
    driver = _ReplayDriver(runner, scheduler, streams, ReplayResult({}, happened))
    while not driver.step(watch, keep):
        scheduler.check()
    happened.preemptions = scheduler.stats().preemptions
    happened.forks = ledger.forks
    happened.hit_tokens = sum(usage.num_cached_tokens for usage in driver.usages)
    return driver.replayed


@torch.inference_mode()
def run_uncached(
    model: Transformer,
    tokens: Sequence[int],
    limit: int | None = None,
    memory: MemoryProtocol | None = None,
    source: Sequence[int] | None = None,
) -> Tensor:
    """[T, V]: what the model says of the whole sequence with no cache.  ``limit``: what the row may reach."""
    step = run_whole_sequence(model, tokens, limit)
    if source is not None:
        step = step._replace(encoder_input=run_whole_sequence(model, source))
    return model.logits(model(step, memory or NoCache(model.config)), step.logit_indices)


def run_whole_sequence(model: Transformer, tokens: Sequence[int], limit: int | None = None) -> ModelInput:
    """One row from its first token on, all of its logits wanted."""
    flat = torch.tensor(tokens, dtype=torch.int64, device=model.token_embedding.device)
    every = torch.arange(len(tokens), device=flat.device)
    limits = torch.full_like(every, len(tokens) if limit is None else limit)
    return ModelInput(flat, every, (SubBatch(1, len(tokens), len(tokens)),), every, max_seq_lens=limits)


def sequence_key(work: ScheduledSequence) -> SequenceKey:
    return work.sequence.request_id, work.sequence.sample_index


class _ForcedPreemption(KVCacheManager):
    """The ledger, that refuses a step of two rows or more every few steps; it counts forks too."""

    def __init__(self, placed: Sequence[CacheGroup], *, prefix: bool, seats: int, squeezes: int) -> None:
        super().__init__(placed, prefix_caching=prefix, max_num_seqs=seats)
        self.forks = 0
        self._squeezes, self._calm = squeezes, 0

    def allocate_slots(self, spans: Sequence[TokenSpan] | Sequence[tuple[int, int, int]]) -> BlockAllocation | None:
        if self._squeezes and len(spans) > 1 and all(self.seq_len(span[0]) for span in spans):
            self._calm += 1
            if self._calm > PREEMPTION_INTERVAL:
                self._calm = 0
                self._squeezes -= 1
                return None
        return super().allocate_slots(spans)

    def fork(self, row: int, child: int, length: int) -> bool:
        done = super().fork(row, child, length)
        self.forks += done
        return done


class _ReplayDriver:
    """Submits, steps, forces tokens and collects logits."""

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, streams: Sequence[ReplayStream], replayed: ReplayResult
    ) -> None:
        self.runner, self.scheduler, self.streams, self.replayed = runner, scheduler, streams, replayed
        self._waiting = set(range(len(streams)))
        self._begun: set[int] = set()
        self._reached: dict[SequenceKey, int] = {}
        self.usages: list[RequestMetrics] = []
        self._submit()

    def _submit(self) -> None:
        for number in sorted(self._waiting):
            stream = self.streams[number]
            if stream.after is None or stream.after in self._begun:
                self._waiting.remove(number)
                count = len(stream.forced_tokens[0])
                assert count and all(len(forced) == count for forced in stream.forced_tokens), (
                    "samples of unequal lengths"
                )
                sampling = SamplingParams(max_tokens=count, temperature=0, n=len(stream.forced_tokens))
                root = f"{self.runner.rope_regime(stream.limit)} {stream.source}".encode()
                self.usages.append(
                    self.scheduler.add_request(number, stream.prompt, sampling, root, source=stream.source)
                )

    def step(self, watch: Callable[[SchedulerOutput], None] | None, keep: bool) -> bool:
        """One plan; True when nothing is left."""
        plan = self.scheduler.schedule()
        if plan is None:
            assert self.scheduler.idle and not self._waiting, "the scheduler stands still"
            return True
        if plan.encoder_batch is not None:
            self.runner.encode(plan.encoder_batch)
            self.replayed.happened.encoded += len(plan.encoder_batch.sequences)
            self.scheduler.update_from_output(plan, [SequenceOutput()] * len(plan.encoder_batch.sequences))
            return False
        if watch is not None:
            watch(plan)
        every = tuple(work._replace(logit_offsets=range(work.num_tokens)) for work in plan.scheduled)
        logits = self.runner.execute(plan._replace(scheduled=every))
        self._collect(plan, logits, keep)
        results = [
            SequenceOutput(self._forced(work)) if work.is_sampled else SequenceOutput() for work in plan.scheduled
        ]
        for event in self.scheduler.update_from_output(plan, results):
            assert event.error is None, event.error
            self._begun.add(event.request)
        self._submit()
        return False

    def _forced(self, work: ScheduledSequence) -> int:
        return self.streams[work.sequence.request_id].forced_tokens[work.sequence.sample_index][
            work.sequence.num_generated_tokens
        ]

    def _collect(self, plan: SchedulerOutput, logits: Tensor, keep: bool) -> None:
        happened, at = self.replayed.happened, 0
        happened.steps += 1
        decoding = [work.start >= work.sequence.num_prompt_tokens for work in plan.scheduled]
        happened.mixed += any(decoding) and not all(decoding)
        for work in plan.scheduled:
            key, end = sequence_key(work), work.start + work.num_tokens
            reached = self._reached.get(key, 0)
            happened.tokens += work.num_tokens
            happened.recomputed += max(0, min(end, reached) - work.start)
            happened.chunks += end < work.sequence.num_prompt_tokens
            happened.longest = max(happened.longest, end)
            self._reached[key] = max(reached, end)
            if keep:
                self.replayed.pieces.setdefault(key, []).append((work.start, logits[at : at + work.num_tokens]))
            at += work.num_tokens


COMPUTE_EPS = 256
STORED_EPS = 8
AMPLIFICATION = 16


@dataclass(frozen=True)
class Comparison:
    """A memory's logits beside the judge's, over every position that was computed."""

    max_dlogit: float
    kl_mean: float
    kl_max: float
    compared: int
    divergences: tuple[TokenDivergence, ...]


def compare_logits(
    replayed: ReplayResult, judge: Mapping[SequenceKey, Tensor], tie_below: float, before: int | None = None
) -> Comparison:
    """``judge`` [T, V] per row, of its positions ``before`` that one if it is given; NaN on either side counts as an
    infinite difference."""
    worst, kl, divergences = 0.0, [], []
    for key, pieces in replayed.pieces.items():
        for start, have in pieces:
            have = have[: None if before is None else max(0, before - start)]
            true = judge[key][start : start + len(have)].double()
            have = have.double()
            worst = max(worst, float((have - true).abs().nan_to_num(nan=torch.inf).max()) if len(have) else 0.0)
            kl.append(kl_divergence(true, have))
            divergences += _divergences(key, start, true, have, tie_below)
    every = torch.cat(kl)
    ordered = tuple(sorted(divergences, key=lambda d: (d.tie, d.position, d.row, d.sample)))
    return Comparison(worst, float(every.mean()), float(every.max()), len(every), ordered)


def kl_divergence(true: Tensor, have: Tensor) -> Tensor:
    """KL(judge || memory) in nats, [n, V] [n, V] -> [n]."""
    p, q = true.log_softmax(-1), have.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)


def _divergences(key: SequenceKey, start: int, true: Tensor, have: Tensor, tie_below: float) -> list[TokenDivergence]:
    best, chosen = true.argmax(-1), have.argmax(-1)
    found = []
    for at in (best != chosen).nonzero().squeeze(-1).tolist():
        top = true[at].topk(min(2, true.shape[-1])).values
        gap = float(top[0] - top[-1])
        found.append(TokenDivergence(*key, start + at, int(best[at]), int(chosen[at]), gap, gap < tie_below))
    return found


def tolerance(dtype: str, scale: float, structure: float) -> float:
    """How far logits may be from the judge's; ``scale``: its largest |logit|, ``structure``: the float64 twin's noise.

    float64: 1e-10.  Else rounding in float32 (256 eps, or 16 times the twin's own noise carried over to float32: a
    sharp model amplifies it) and, for a half precision, that of what is stored (8 eps of it).  A lossy format has
    float32's: beyond it, a token that differs is no tie.
    """
    if dtype == "float64":
        return EXACT
    single, double = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
    coarser = STORED_EPS * _eps(dtype) * scale if format_loss(dtype) == "rounding" else 0.0
    return max(COMPUTE_EPS * single * scale, AMPLIFICATION * structure * single / double) + coarser


def format_loss(dtype: str) -> str:
    """The worse of keys and values: "none", "rounding", "lossy"."""
    return max(
        (cache.quantization.get_format(name).loss for name in cache.quantization.split_format_name(dtype)),
        key=("none", "rounding", "lossy").index,
    )


def _eps(dtype: str) -> float:
    return max(cache.quantization.get_format(name).eps for name in cache.quantization.split_format_name(dtype))
