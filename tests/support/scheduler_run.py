"""A scheduler with a fake model: which sequences run in each step, and how they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvad.cache.config import CacheConfig, OverflowMode
from kvad.cache.groups import build_groups
from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.config.model import AttentionSpec
from kvad.engine.scheduling.limits import LengthLimits
from kvad.engine.scheduling.request import SamplingParams, SequenceOutput, StreamChunk, TokenLogprob
from kvad.engine.scheduling.scheduler import Scheduler
from kvad.engine.scheduling.sequence import ScheduledSequence, SchedulerOutput
from kvad.engine.scheduling.step_costs import StepCosts
from tests.support.streams import FULL


class Clock:
    """Returns ``now``, which the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeModelRun:
    """A scheduler, and a model whose output is ``token``, or the number of each request."""

    def __init__(
        self,
        *specs: AttentionSpec,
        rows: int = 4,
        budget: int = 16,
        chunk: int = 8,
        limit: int = 64,
        blocks: int | None = None,
        layout: Any = "paged",
        block_size: int = 4,
        prefix: bool = True,
        watermark: float = 0.0,
        overflow: OverflowMode = "preempt",
        step_costs: StepCosts | None = None,
    ) -> None:
        config = CacheConfig(
            layout=layout,
            block_size=block_size,
            max_num_seqs=rows,
            max_seq_len=limit,
            prefill_chunk_size=chunk,
            num_blocks=blocks,
            enable_prefix_caching=prefix,
        )
        self.clock = Clock()
        groups = build_groups(specs or (FULL,), config)
        self.manager = KVCacheManager(groups, prefix_caching=prefix, max_num_seqs=rows, watermark=watermark)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            prefill_chunk_size=chunk,
            limit=LengthLimits(limit, "model", overflow),
            clock=self.clock,
            step_costs=step_costs,
        )
        self.tokens: dict[int, list[int]] = {}  # of sample 0 and its siblings, by request
        self.ends: dict[int, tuple[str | None, str | None]] = {}  # finish reason and limit by request
        self.running: list[tuple[int, ...]] = []  # requests of each step

    def add(self, number: int, prompt: int | Sequence[int], **options: Any) -> None:
        stops = options.pop("stop_tokens", frozenset())
        root = options.pop("root", b"")
        tokens = [100 * number + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        self.scheduler.add_request(number, tokens, SamplingParams(**options), root, stop_tokens=stops)

    def output(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        assert output is not None
        return output

    def complete(
        self, output: SchedulerOutput, token: int | None = None, faults: Sequence[int] = ()
    ) -> list[StreamChunk]:
        chunks = self.scheduler.update_from_output(
            output, [self._result(scheduled, token, faults) for scheduled in output.scheduled]
        )
        self.scheduler.check()
        self.running.append(tuple(scheduled.sequence.request_id for scheduled in output.scheduled))
        for chunk in chunks:
            if chunk.token_id is not None:
                self.tokens.setdefault(chunk.request, []).append(chunk.token_id)
            if chunk.finish_reason is not None:
                self.ends[chunk.request] = chunk.finish_reason, chunk.limit
        return chunks

    def _result(self, scheduled: ScheduledSequence, token: int | None, faults: Sequence[int]) -> SequenceOutput:
        if scheduled.sequence.request_id in faults:
            return SequenceOutput(error="NaN in the logits")
        token = scheduled.sequence.request_id if token is None else token
        scored = scheduled.logit_offsets[:-1] if scheduled.is_sampled else scheduled.logit_offsets
        prompt = tuple(TokenLogprob(scheduled.sequence.token_ids[scheduled.start + i + 1], -1.0) for i in scored)
        return (
            SequenceOutput(token, TokenLogprob(token, -0.5), prompt)
            if scheduled.is_sampled
            else SequenceOutput(prompt_logprobs=prompt)
        )

    def step(self, token: int | None = None, faults: Sequence[int] = ()) -> list[StreamChunk]:
        return self.complete(self.output(), token, faults)

    def shape(self) -> list[tuple[int, int, int]]:
        """Run a step; return (request, start, number of tokens) of its sequences."""
        output = self.output()
        shape = [
            (scheduled.sequence.request_id, scheduled.start, scheduled.num_tokens) for scheduled in output.scheduled
        ]
        self.complete(output)
        return shape

    def run(self, max_steps: int = 1000) -> list[StreamChunk]:
        chunks = []
        for _ in range(max_steps):
            output = self.scheduler.schedule()
            if output is None:
                assert self.scheduler.idle
                assert not any(self.manager.stats().used)
                return chunks
            chunks += self.complete(output)
        raise AssertionError("the scheduler does not become idle")

    def num_tokens(self) -> dict[int, int]:
        return {request: len(tokens) for request, tokens in self.tokens.items()}

    def preemptions(self) -> int:
        return self.scheduler.stats().preemptions
