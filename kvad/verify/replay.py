"""Replay of known tokens through the real path: Scheduler, KVCacheManager, KVCache, ModelRunner.

``replay_streams`` forces every sampled token, so its logits can be compared with ``run_uncached`` position by
position, also after the first difference. It adds no code path: chunks, sub-batches, prefix hits, forks and
preemptions are the scheduler's. ``ScenarioCounts`` counts them, so an event that did not occur is noticed.
A preemption is forced where it is decided: by a KVCacheManager that reports a full pool now and then.

``compare_logits`` compares a cache's logits with the reference: in logits, in nats and by greedy token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvad import benchmarks
from kvad import cache as cache_lib
from kvad.cache import CacheConfig, CacheGroup, build_groups
from kvad.cache.device import KVCache
from kvad.cache.manager import BlockAllocation, KVCacheManager, TokenSpan
from kvad.config import attention_specs
from kvad.engine import scheduling
from kvad.engine.execution import ManagedCache, ModelRunner
from kvad.engine.scheduling import SamplingParams, ScheduledSequence, Scheduler, SchedulerOutput, SequenceOutput
from kvad.model import NoCache, Transformer
from kvad.model_input import CacheProtocol, ModelInput, SubBatch
from kvad.verify.report import EXACT, Comparison, TokenDivergence

SequenceKey = tuple[int, int]  # (stream, sample)
MakeCache = Callable[[Sequence[CacheGroup]], ManagedCache]
ENDLESS = 1 << 40  # tokens of a sequence without a limit
PREEMPTION_INTERVAL = 4  # steps of at least two sequences between two forced preemptions


class ReplayStream(NamedTuple):
    """One request."""

    prompt: tuple[int, ...]
    forced_tokens: tuple[tuple[int, ...], ...]  # the generated tokens per sample, equally many each
    after: int | None = None  # submit it only when that stream has its first token, so it can hit the prompt's blocks
    source: tuple[int, ...] | None = None  # encoder input

    @property
    def limit(self) -> int:
        """Maximum length that the scheduler allows; it decides the rotary regime."""
        return len(self.prompt) + len(self.forced_tokens[0])

    def tokens(self, sample: int) -> tuple[int, ...]:
        """Return all tokens that are computed; the last forced token is sampled, never fed."""
        return (*self.prompt, *self.forced_tokens[sample][:-1])


@dataclass
class ScenarioCounts:
    """Counts of what a replay did."""

    rows: int = 0
    steps: int = 0
    tokens: int = 0
    chunks: int = 0  # spans that ended inside a prompt
    mixed: int = 0  # steps with decoding and prefilling sequences
    preemptions: int = 0
    recomputed: int = 0  # tokens recomputed after a preemption
    hit_tokens: int = 0  # prompt tokens found in the prefix cache at admission
    forks: int = 0
    longest: int = 0  # tokens of the longest sequence
    encoded: int = 0  # encoder inputs


@dataclass(frozen=True)
class ReplayResult:
    """Logits of a replay: per sequence (first position, logits [n, V]) of each span, recomputed ones too, by time."""

    pieces: dict[SequenceKey, list[tuple[int, Tensor]]]
    counts: ScenarioCounts = field(default_factory=ScenarioCounts)
    shares_blocks: bool = True  # the cache's sequences may share the blocks of a prefix

    def logits(self, stream: int, sample: int = 0) -> Tensor:
        """Return [T, V] as last computed; NaN at positions that a prefix hit or a fork left uncomputed."""
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
    make: MakeCache | None = None,
    watch: Callable[[SchedulerOutput], None] | None = None,
) -> ReplayResult:
    """Run ``streams`` to their end and return the logits of every computed position.

    The invariants of the scheduler and the KVCacheManager are checked after every step.

    Args:
        squeezes: Number of preemptions to force, in addition to those of a small pool (``config.num_blocks``).
        make: Builds the cache; the default is a KVCache with the rotation of ``config``.
        watch: Called with every scheduler output before it runs; then no logits are stored.
    """
    groups = build_groups(attention_specs(model.config), config)
    cache = (make or partial(KVCache, rope_at=config.rope_at, exact_rope=config.endless))(groups)
    runner = ModelRunner(model, cache)
    kv_cache_manager = _ForcedPreemption(
        groups, prefix=config.enable_prefix_caching, max_num_seqs=config.max_num_seqs, squeezes=squeezes
    )
    limit = ENDLESS if config.endless else min(model.config.max_seq_len, config.max_seq_len)
    scheduler = Scheduler(
        kv_cache_manager,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.prefill_chunk_size + config.max_num_seqs,
        prefill_chunk_size=config.prefill_chunk_size,
        limit=limit,
    )
    counts = ScenarioCounts(rows=sum(len(stream.forced_tokens) for stream in streams))
    result = ReplayResult({}, counts, kv_cache_manager.prefix_caching)
    driver = _ReplayDriver(runner, scheduler, streams, result)
    while not driver.step(watch):
        scheduler.check()
    counts.preemptions = scheduler.stats().preemptions
    counts.forks = kv_cache_manager.forks
    counts.hit_tokens = sum(usage.num_cached_tokens for usage in driver.usages)
    return result


@torch.inference_mode()
def run_uncached(
    model: Transformer,
    tokens: Sequence[int],
    limit: int | None = None,
    kv_cache: CacheProtocol | None = None,
    source: Sequence[int] | None = None,
    *,
    last_only: bool = False,
) -> Tensor:
    """Compute [T, V], the logits of a whole sequence of at most ``limit`` tokens without a cache.

    ``last_only``: [1, V], those after its last token.
    """
    model_input = run_whole_sequence(model, tokens, limit)
    if last_only:
        model_input = model_input._replace(logit_indices=model_input.logit_indices[-1:])
    if source is not None:
        model_input = model_input._replace(encoder_input=run_whole_sequence(model, source))
    return model.logits(model(model_input, kv_cache or NoCache(model.config)), model_input.logit_indices)


def run_whole_sequence(model: Transformer, tokens: Sequence[int], limit: int | None = None) -> ModelInput:
    """Build the input of one whole sequence, with logits at every position."""
    token_ids = torch.tensor(tokens, dtype=torch.int64, device=model.token_embedding.device)
    positions = torch.arange(len(tokens), device=token_ids.device)
    limits = torch.full_like(positions, len(tokens) if limit is None else limit)
    return ModelInput(token_ids, positions, (SubBatch(1, len(tokens), len(tokens)),), positions, max_seq_lens=limits)


def sequence_key(scheduled: ScheduledSequence) -> SequenceKey:
    return scheduled.sequence.request_id, scheduled.sequence.sample_index


class _ForcedPreemption(KVCacheManager):
    """A KVCacheManager that refuses a step of two or more sequences every few steps, and counts forks."""

    def __init__(self, groups: Sequence[CacheGroup], *, prefix: bool, max_num_seqs: int, squeezes: int) -> None:
        super().__init__(groups, prefix_caching=prefix, max_num_seqs=max_num_seqs)
        self.forks = 0
        self._squeezes, self._num_steps = squeezes, 0

    def allocate_slots(self, spans: Sequence[TokenSpan] | Sequence[tuple[int, int, int]]) -> BlockAllocation | None:
        if self._squeezes and len(spans) > 1 and all(self.seq_len(span[0]) for span in spans):
            self._num_steps += 1
            if self._num_steps > PREEMPTION_INTERVAL:
                self._num_steps = 0
                self._squeezes -= 1
                return None
        return super().allocate_slots(spans)

    def fork(self, seq_index: int, child: int, length: int) -> bool:
        forked = super().fork(seq_index, child, length)
        self.forks += forked
        return forked


class _ReplayDriver:
    """Submits, steps, forces tokens and collects logits."""

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, streams: Sequence[ReplayStream], result: ReplayResult
    ) -> None:
        self.runner, self.scheduler, self.streams, self.result = runner, scheduler, streams, result
        self._waiting = set(range(len(streams)))
        self._started: set[int] = set()
        self._reached: dict[SequenceKey, int] = {}
        self.usages: list[scheduling.RequestMetrics] = []
        self._submit()

    def _submit(self) -> None:
        for index in sorted(self._waiting):
            stream = self.streams[index]
            if stream.after is None or stream.after in self._started:
                self._waiting.remove(index)
                count = len(stream.forced_tokens[0])
                assert count and {len(forced) for forced in stream.forced_tokens} == {count}, "unequal samples"
                sampling = SamplingParams(max_tokens=count, temperature=0, n=len(stream.forced_tokens))
                root = f"{self.runner.rope_regime(stream.limit)} {stream.source}".encode()
                source = stream.source
                encoder_input = None if source is None else scheduling.request.EncoderInput(tuple(source))
                self.usages.append(
                    self.scheduler.add_request(index, stream.prompt, sampling, root, encoder_input=encoder_input)
                )

    def step(self, watch: Callable[[SchedulerOutput], None] | None) -> bool:
        """Run one step; return True when nothing is left."""
        output = self.scheduler.schedule()
        if output is None:
            assert self.scheduler.idle and not self._waiting, "the scheduler has work but schedules none"
            return True
        if output.encoder_batch is not None:
            self.runner.encode(output.encoder_batch)
            self.result.counts.encoded += len(output.encoder_batch.sequences)
            self.scheduler.update_from_output(output, [SequenceOutput()] * len(output.encoder_batch.sequences))
            return False
        if watch is not None:
            watch(output)
        logits = self.runner.execute(benchmarks.scorers.with_all_logits(output))
        self._collect(output, logits, keep=watch is None)
        results = []
        for scheduled in output.scheduled:
            stream, sample = sequence_key(scheduled)
            forced = self.streams[stream].forced_tokens[sample]
            token = forced[scheduled.sequence.num_generated_tokens] if scheduled.is_sampled else None
            results.append(SequenceOutput(token))
        for event in self.scheduler.update_from_output(output, results):
            assert event.error is None, event.error
            self._started.add(event.request)
        self._submit()
        return False

    def _collect(self, output: SchedulerOutput, logits: Tensor, *, keep: bool) -> None:
        counts, offset = self.result.counts, 0
        counts.steps += 1
        decoding = [scheduled.start >= scheduled.sequence.num_prompt_tokens for scheduled in output.scheduled]
        counts.mixed += any(decoding) and not all(decoding)
        for scheduled in output.scheduled:
            key, end = sequence_key(scheduled), scheduled.start + scheduled.num_tokens
            reached = self._reached.get(key, 0)
            counts.tokens += scheduled.num_tokens
            counts.recomputed += max(0, min(end, reached) - scheduled.start)
            counts.chunks += end < scheduled.sequence.num_prompt_tokens
            counts.longest = max(counts.longest, end)
            self._reached[key] = max(reached, end)
            if keep:
                piece = scheduled.start, logits[offset : offset + scheduled.num_tokens]
                self.result.pieces.setdefault(key, []).append(piece)
            offset += scheduled.num_tokens


COMPUTE_EPS = 256
STORED_EPS = 8
AMPLIFICATION = 16


def compare_logits(
    replayed: ReplayResult, reference: Mapping[SequenceKey, Tensor], tie_below: float, before: int | None = None
) -> Comparison:
    """Compare with ``reference`` [T, V] per sequence, only the positions below ``before`` if given.

    NaN on either side counts as an infinite difference.
    """
    worst, kl, divergences = 0.0, [], []
    for key, pieces in replayed.pieces.items():
        for start, piece in pieces:
            have = piece[: None if before is None else max(0, before - start)].double()
            true = reference[key][start : start + len(have)].double()
            worst = max(worst, float((have - true).abs().nan_to_num(nan=torch.inf).max()) if len(have) else 0.0)
            p, q = true.log_softmax(-1), have.log_softmax(-1)
            kl.append((p.exp() * (p - q)).sum(-1).clamp(min=0))  # KL(reference || cache) in nats
            best, chosen = true.argmax(-1), have.argmax(-1)
            for at in (best != chosen).nonzero().squeeze(-1).tolist():
                top = true[at].topk(min(2, true.shape[-1])).values
                gap, tokens = float(top[0] - top[-1]), (int(best[at]), int(chosen[at]))
                divergences.append(TokenDivergence(*key, start + at, *tokens, gap, gap < tie_below))
    every = torch.cat(kl)
    return Comparison(
        max_dlogit=worst,
        kl_mean=float(every.mean()),
        kl_max=float(every.max()),
        agree=len(every) - len(divergences),
        compared=len(every),
        ties=sum(divergence.tie for divergence in divergences),
        first_divergence=min(divergences, key=lambda d: (d.tie, d.position, d.row, d.sample), default=None),
    )


def tolerance(dtype: str, scale: float, structure: float) -> float:
    """Return the largest allowed |dlogit|, given the reference's largest |logit| and the float64 case's max |dlogit|.

    float64: 1e-10. Otherwise the rounding of float32 (256 eps, or 16 times the float64 case's noise carried over to
    float32: a sharp model amplifies it) and, for a half precision, that of what is stored (8 eps of it). A lossy format
    has float32's tolerance: beyond it, a token that differs is no tie.
    """
    if dtype == "float64":
        return EXACT
    single, double = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
    computed = max(COMPUTE_EPS * single * scale, AMPLIFICATION * structure * single / double)
    if format_loss(dtype) != "rounding":
        return computed
    return computed + STORED_EPS * max(stored.eps for stored in _formats(dtype)) * scale


def format_loss(dtype: str) -> str:
    """Return the larger loss of keys and values: "none", "rounding", "lossy"."""
    return max((stored.loss for stored in _formats(dtype)), key=("none", "rounding", "lossy").index)


def _formats(dtype: str) -> list[cache_lib.quantization.CacheFormat]:
    return [cache_lib.quantization.get_format(name) for name in cache_lib.quantization.split_format_name(dtype)]
