"""Replay of known tokens through the engine that ``LLM.generate`` uses.

``ReplayEngine`` is an ``Engine`` whose sampled tokens are forced, so its logits can be compared with the reference
position by position, also after the first difference. It adds no code path: packed products, input buffers, chunks,
sub-batches, prefix hits, forks and preemptions are the engine's. ``ScenarioCounts`` counts them, so an event that did
not occur is noticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvad import benchmarks
from kvad.cache import CacheConfig, CacheGroup
from kvad.engine import Engine, EngineConfig, scheduling
from kvad.engine.execution import ManagedCache, ModelRunner
from kvad.engine.scheduling import SamplingParams, ScheduledSequence, SchedulerOutput, TokenSequence
from kvad.errors import EngineError
from kvad.model import Transformer
from kvad.model_input import ModelInput
from kvad.verify.report import MismatchFinding

SequenceKey = tuple[int, int]  # (stream, sample)
WrapCache = Callable[[Engine], ManagedCache]
EngineParts = tuple[Transformer, EngineConfig]
PrepareEngine = Callable[[Transformer, CacheConfig, EngineConfig], EngineParts]
PREEMPTION_INTERVAL = 4  # steps between two forced preemptions


def in_one_process(model: Transformer, _cache: CacheConfig, config: EngineConfig) -> EngineParts:
    """Divide an engine among no ranks."""
    return model, config


class ReplayStream(NamedTuple):
    """One request."""

    prompt: tuple[int, ...]
    forced_tokens: tuple[tuple[int, ...], ...]  # the generated tokens per sample, equally many each
    after: int | None = None  # submit it only when that stream has its first token, so it can hit the prompt's blocks
    source: tuple[int, ...] | None = None  # encoder input
    salt: str = ""  # blocks are shared only with streams of the same salt

    @property
    def limit(self) -> int:
        """Maximum length that the scheduler allows."""
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
    loaded: int = 0  # tokens read from the block store
    drafts: int = 0  # of speculative decoding
    rejected: int = 0  # of them


@dataclass(frozen=True)
class ReplayResult:
    """Logits of a replay: per sequence (first position, logits [n, V]) of each span, recomputed ones too, by time.

    Spans before a sequence exceeds the original length of its rotary scaling are left out: it is recomputed there.
    """

    pieces: dict[SequenceKey, list[tuple[int, Tensor]]]
    counts: ScenarioCounts = field(default_factory=ScenarioCounts)
    shares_blocks: bool = True  # the cache's sequences may share the blocks of a prefix
    findings: list[MismatchFinding] = field(default_factory=list)  # faults that are seen without the reference
    failure: str = ""  # the error that ended the replay

    def logits(self, stream: int, sample: int = 0) -> Tensor:
        """Return [T, V] as last computed; NaN at positions that a prefix hit or a fork left uncomputed."""
        pieces = self.pieces[stream, sample]
        length = max(start + len(part) for start, part in pieces)
        out = pieces[0][1].new_full((length, pieces[0][1].shape[-1]), torch.nan)
        for start, part in pieces:
            out[start : start + len(part)] = part
        return out


class BlockOwner(NamedTuple):
    """The last write to a block: its sequence, and what the contents depend on."""

    key: SequenceKey
    salt: str
    source: tuple[int, ...] | None
    tokens: tuple[int, ...]  # up to the last position written


class BlockHistories:
    """History of every block, from the scheduler's output alone; finds blocks that a sequence must not share.

    Equal tokens have equal keys in the first layer, and a wrong salt changes no number at all, so this compares
    histories, not tensors. Groups that evict, merge or quantize are left out: their slots move.
    """

    def __init__(self, engine: Engine, streams: Sequence[ReplayStream]) -> None:
        groups = enumerate(engine.kv_cache.groups)
        self._groups = {index: group.block_size for index, group in groups if _keeps_slots(group)}
        self._streams = streams
        self._owners: dict[int, dict[int, BlockOwner]] = {index: {} for index in self._groups}
        self._checked: set[tuple[SequenceKey, int, int, int]] = set()  # sequence, group, block, length of its history

    def check(self, output: SchedulerOutput, requests: Mapping[int, int]) -> MismatchFinding | None:
        """Apply a scheduler output that is about to run; return the first block of another history, or None.

        ``requests`` maps those of the streams to their index; blocks that others write are not compared.
        """
        finding, block_ops = None, output.allocation.block_ops
        for group, size in self._groups.items():
            owners, offset = self._owners[group], 0
            arrived = (*block_ops.load, *block_ops.swap_in)  # compared by their contents
            for block in (*block_ops.clear[group], *(block for _, blocks in arrived for block in blocks[group])):
                owners.pop(block, None)
            for source, target, _ in block_ops.copy[group]:
                if source in owners:
                    owners[target] = owners[source]
            for scheduled, table in zip(output.scheduled, output.allocation.block_tables[group], strict=True):
                slots = output.allocation.slots[group][offset : offset + scheduled.num_tokens]
                offset += scheduled.num_tokens
                index = requests.get(scheduled.sequence.request_id)
                if index is None:
                    for slot in slots:
                        owners.pop(slot // size, None)
                    continue
                seq, drafts = scheduled.sequence, scheduled.draft_token_ids
                tokens, key = (*seq.token_ids, *drafts), (index, scheduled.sequence.sample_index)
                finding = finding or self._other_history(group, key, tuple(seq.token_ids), table)
                stream = self._streams[index]
                for position, slot in enumerate(slots, scheduled.start):
                    owners[slot // size] = BlockOwner(key, stream.salt, stream.source, tokens[: position + 1])
        return finding

    def _other_history(
        self, group: int, key: SequenceKey, tokens: tuple[int, ...], table: Sequence[int]
    ) -> MismatchFinding | None:
        stream = self._streams[key[0]]
        for block in table:
            owner = self._owners[group].get(block)
            if owner is None or owner.key == key or (key, group, block, len(owner.tokens)) in self._checked:
                continue
            self._checked.add((key, group, block, len(owner.tokens)))
            fault = "" if (owner.salt, owner.source) == (stream.salt, stream.source) else "salt"
            length = min(len(tokens), len(owner.tokens))
            if tokens[:length] != owner.tokens[:length]:
                fault = "prefix"
            if fault:
                evidence = f"block {block} was written by sequence {owner.key[0]} " + (
                    "behind other tokens" if fault == "prefix" else f"with salt {owner.salt!r}, not {stream.salt!r}"
                )
                return MismatchFinding(fault, 0, *key, length - 1, "the block table", 0.0, evidence)
        return None


def _keeps_slots(group: CacheGroup) -> bool:
    moves = group.eviction_policy is not None or group.demotion_policy is not None or group.lower_level is not None
    return not (moves or group.spec.is_cross_attention)


class ReplayEngine(AbstractContextManager["ReplayEngine"]):
    """An engine for some streams, closed at the end of its ``with``; records the logits of every position.

    Args:
        model: The model.
        cache: Configuration of the cache.
        streams: The streams; none is submitted yet.
        config: Options of the engine.
        wrap: Builds the cache that the model runner uses from the engine (default: the engine's own).
        watch: Called with every scheduler output before it runs; then no logits are stored.
    """

    def __init__(
        self,
        model: Transformer,
        cache: CacheConfig,
        streams: Sequence[ReplayStream],
        config: EngineConfig | None = None,
        *,
        wrap: WrapCache = lambda engine: engine.kv_cache,
        watch: Callable[[SchedulerOutput], None] | None = None,
    ) -> None:
        self.streams, self.watch = streams, watch
        config = config or EngineConfig()
        budget = min(config.max_num_batched_tokens, cache.prefill_chunk_size + cache.max_num_seqs)
        config = dataclasses.replace(config, max_num_batched_tokens=budget)
        self.engine = Engine(model, cache, config)
        self.engine.runner = _ReplayRunner(self, wrap(self.engine))
        if self.engine.scheduler.drafter is not None:
            self.engine.scheduler.drafter = _ForcedDrafter(self)
        counts = ScenarioCounts(rows=sum(len(stream.forced_tokens) for stream in streams))
        self.result = ReplayResult({}, counts, self.engine.kv_cache_manager.prefix_caching)
        self.requests: dict[int, int] = {}  # request -> stream
        self._reached: dict[SequenceKey, int] = {}
        self._histories = BlockHistories(self.engine, streams)

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def middle(self, index: int) -> int:
        """Return the number of a stream's tokens when half of its generation is done."""
        stream = self.streams[index]
        return len(stream.prompt) + len(stream.forced_tokens[0]) // 2

    def submit(self, index: int, *, start: int | None = None, num_samples: int = 1, **options: Any) -> int:
        """Submit a stream from its prompt, or its first ``start`` tokens; return the request's id."""
        stream = self.streams[index]
        assert {len(forced) for forced in stream.forced_tokens} == {stream.limit - len(stream.prompt)}, (
            "unequal samples"
        )
        tokens = (*stream.prompt, *stream.forced_tokens[0])[: len(stream.prompt) if start is None else start]
        sampling = SamplingParams(max_tokens=stream.limit - len(tokens), temperature=0, n=num_samples, ignore_eos=True)
        request = self.engine.add_request(
            tokens, sampling, encoder_token_ids=stream.source, cache_salt=stream.salt, **options
        )
        self.requests[request] = index
        return request

    def run(self, after_step: Callable[[int], object] = lambda _: None) -> None:
        """Run to the end; the invariants of scheduler and KVCacheManager are checked after every step.

        Raises:
            EngineError: If a sequence failed.
        """

        def check(step: int) -> None:
            self.engine.scheduler.check()
            after_step(step)

        benchmarks.scorers.run_engine(self.engine, check)

    def run_all(self, *, squeezes: int = 0) -> None:
        """Submit all streams, each sample of them, when their time has come, and run to the end.

        Args:
            squeezes: Number of preemptions to force, in addition to those of a small pool (``CacheConfig.num_blocks``).
        """
        waiting = list(range(len(self.streams)))

        def submit(_step: int) -> None:
            started = {self.requests[request] for request in self.requests if self._has_started(request)}
            for index in list(waiting):
                if self.streams[index].after is None or self.streams[index].after in started:
                    waiting.remove(index)
                    self.submit(index, num_samples=len(self.streams[index].forced_tokens))

        def after_step(step: int) -> None:
            nonlocal squeezes
            if step % PREEMPTION_INTERVAL == PREEMPTION_INTERVAL - 1 and squeezes:
                squeezes -= self._preempt_youngest()
            submit(step)

        submit(0)
        self.run(after_step)
        if waiting:
            raise EngineError(f"{len(waiting)} sequences never started")
        offload = self.engine.kv_cache_manager.prefix_offload
        if offload is not None:  # the first stream again, from blocks that the pool has evicted
            self.evict_blocks()
            self.submit(0)
            self.run()
            self.result.counts.loaded = sum(offload.hits.tokens.values())
        counts, scheduler = self.result.counts, self.engine.scheduler
        counts.preemptions = scheduler.stats().preemptions
        counts.hit_tokens = sum(scheduler.metrics(request).num_cached_tokens for request in self.requests)

    def evict_blocks(self) -> None:
        """Fill the pool with other sequences, so the streams' cached blocks are evicted."""
        vocab = self.engine.model.config.vocab_size
        longest = max(self.streams, key=lambda stream: stream.limit)
        for shift in range(self.engine.cache.max_num_seqs):
            tokens = [(token + 1 + shift) % vocab for token in (*longest.prompt, *longest.forced_tokens[0])]
            self.engine.add_request(tokens[:-1], SamplingParams(max_tokens=1), encoder_token_ids=longest.source)
        self.run()

    def _has_started(self, request: int) -> bool:
        return self.engine.metrics(request).first_token is not None

    def _preempt_youngest(self) -> bool:
        """Preempt the youngest of at least two requests that have computed tokens."""
        rows = {request: self.engine.scheduler.sequences(request) for request in self.requests}
        active = [request for request, seqs in rows.items() if any(seq.num_computed_tokens for seq in seqs)]
        return len(active) > 1 and self.engine.scheduler.preempt(max(active))

    def forced_tokens(self, seq: TokenSequence, count: int) -> tuple[int, ...]:
        """Return the ``count`` tokens that follow a sequence's tokens, fewer at its end."""
        stream, sample = self.key(seq)
        tokens = (*self.streams[stream].prompt, *self.streams[stream].forced_tokens[sample])
        return tokens[len(seq.token_ids) :][:count]

    def key(self, seq: TokenSequence) -> SequenceKey:
        """Return the stream (negative: none of the streams) and the sample of a sequence."""
        return self.requests.get(seq.request_id, -1 - seq.request_id), seq.sample_index

    def is_compared(self, scheduled: ScheduledSequence) -> bool:
        """Return True for a sequence of the streams, in the rotary regime of its whole length."""
        key = self.key(scheduled.sequence)
        if key[0] < 0:
            return False
        length = len(self.streams[key[0]].tokens(key[1]))
        return scheduled.sequence.rope_regime == self.engine.limits.rope_regime(length)

    def check_histories(self, output: SchedulerOutput) -> None:
        """Check the blocks of a step that is about to run."""
        finding = self._histories.check(output, self.requests)
        self.result.findings.extend([] if finding is None else [finding])

    def collect(self, output: SchedulerOutput, logits: Tensor) -> None:
        """Count a step and store its logits [T, V]."""
        counts, offset = self.result.counts, 0
        counts.steps += 1
        decoding = [scheduled.start >= scheduled.sequence.num_prompt_tokens for scheduled in output.scheduled]
        counts.mixed += any(decoding) and not all(decoding)
        for scheduled in output.scheduled:
            num_tokens = scheduled.num_tokens - self._num_rejected(scheduled)
            piece = logits[offset : offset + num_tokens]
            offset += scheduled.num_tokens
            if scheduled.sequence.request_id not in self.requests:
                continue
            key, end = self.key(scheduled.sequence), scheduled.start + num_tokens
            reached = self._reached.get(key, 0)
            counts.tokens += num_tokens
            counts.drafts += len(scheduled.draft_token_ids)
            counts.rejected += scheduled.num_tokens - num_tokens
            counts.recomputed += max(0, min(end, reached) - scheduled.start)
            counts.chunks += end < scheduled.sequence.num_prompt_tokens
            counts.longest = max(counts.longest, end)
            counts.forks += not reached and key[1] > 0 and scheduled.start == scheduled.sequence.num_prompt_tokens - 1
            self._reached[key] = max(reached, end)
            if self.watch is None and self.is_compared(scheduled):
                self.result.pieces.setdefault(key, []).append((scheduled.start, piece.cpu()))

    def _num_rejected(self, scheduled: ScheduledSequence) -> int:
        """Return the number of drafts from the first wrong one on."""
        drafts = scheduled.draft_token_ids
        forced = self.forced_tokens(scheduled.sequence, len(drafts)) if drafts else ()
        wrong = (i for i, (draft, token) in enumerate(zip(drafts, forced, strict=True)) if draft != token)
        return len(drafts) - next(wrong, len(drafts))


class _ForcedDrafter:
    """Drafts the forced tokens of a replay, every third one wrong."""

    def __init__(self, replay: ReplayEngine) -> None:
        self._replay = replay

    def propose(self, seqs: Sequence[TokenSequence], max_drafts: Sequence[int]) -> list[list[int]]:
        return [self._drafts(seq, limit) for seq, limit in zip(seqs, max_drafts, strict=True)]

    def _drafts(self, seq: TokenSequence, limit: int) -> list[int]:
        config = self._replay.engine.config.speculative
        if config is None or seq.request_id not in self._replay.requests:
            return []
        tokens = enumerate(self._replay.forced_tokens(seq, min(limit, config.num_tokens)), len(seq.token_ids))
        vocab = self._replay.engine.model.config.vocab_size
        return [(token + 1) % vocab if position % 3 == 2 else token for position, token in tokens]


class _ReplayRunner(ModelRunner):
    """Computes the logits of every position, and returns logits that leave the sampler no choice."""

    def __init__(self, replay: ReplayEngine, cache: ManagedCache) -> None:
        super().__init__(replay.engine.model, cache)
        self.replay = replay

    def execute(self, output: SchedulerOutput) -> Tensor:
        replay = self.replay
        replay.check_histories(output)
        if replay.watch is not None:
            replay.watch(output)
        logits = super().execute(benchmarks.scorers.with_all_logits(output))
        replay.collect(output, logits)
        rows, first = [], 0
        for scheduled in output.scheduled:
            seq, num_drafts = scheduled.sequence, len(scheduled.draft_token_ids)
            is_forced = seq.request_id in replay.requests
            forced = replay.forced_tokens(seq, 1 + num_drafts) if is_forced and scheduled.is_sampled else ()
            for offset in scheduled.logit_offsets:
                row = logits[first + offset]
                if is_forced:
                    row, index = torch.zeros_like(row), offset - (scheduled.num_tokens - 1 - num_drafts)
                    if forced and index >= 0:
                        row[forced[index]] = 1.0
                rows.append(row)
            first += scheduled.num_tokens
        return torch.stack(rows)

    def encode(self, encoder_batch: scheduling.sequence.EncoderBatch) -> tuple[Tensor, ModelInput]:
        self.replay.result.counts.encoded += len(encoder_batch.sequences)
        return super().encode(encoder_batch)
