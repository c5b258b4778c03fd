"""Random requests on the real Scheduler and KVCacheManager, over a fake model, a fake cache and a fake clock.

Every chunk of every request is compared with the request's solo run (``tests/support/streams.py``), whatever happens
at the same time, and every invariant is checked after each step.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvad.cache.manager.kv_cache_manager import KVCacheManager
from kvad.cache.manager.prefix_index import digest
from kvad.engine.scheduling.beam_search import BeamSearch, Hypothesis, num_candidates
from kvad.engine.scheduling.request import EncoderInput, SamplingParams, SequenceOutput, StreamChunk, TokenLogprob
from kvad.engine.scheduling.scheduler import Scheduler
from kvad.engine.scheduling.sequence import (
    EncoderBatch,
    RequestMetrics,
    ScheduledSequence,
    SchedulerOutput,
    TokenSequence,
)
from tests.support.manager_driver import unpublish_all
from tests.support.streams import FakeKVCache, Mismatch, Setup, SoloSequence

VOCAB = 997
STOP_TOKENS = frozenset(range(0, VOCAB, 17))
Faults = Callable[[TokenSequence], bool | str]  # True: numerical error; "retry": lost data, the tokens are recomputed


def no_faults(_: TokenSequence) -> bool:
    return False


# ---------------------------------------------------------------- expected chunks


class ExpectedSample:
    """The chunks of one sample, computed from its solo run."""

    def __init__(
        self, solo: SoloSequence, sample: int, sampling: SamplingParams, stop_tokens: frozenset[int], max_len: int
    ) -> None:
        self.solo, self.sample, self.sampling = solo, sample, sampling
        self.stop_tokens, self.max_len = stop_tokens, max_len
        self.num_prompt_tokens = len(solo.tokens)
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()

    def check(self, chunk: StreamChunk) -> None:
        if chunk.finish_reason in ("abort", "error"):
            return
        self.prompt_logprobs += chunk.prompt_logprobs
        if chunk.token_id is not None:
            value = self.solo.values[-1]
            token = choose_token(value, self.sample)
            if chunk.token_id != token or chunk.logprob != TokenLogprob(token, float(value)):
                raise Mismatch(f"sample {self.sample}: token {len(self.solo.tokens)} is {chunk}, alone it is {token}")
            self.solo.push(token)
        if chunk.finish_reason is not None:
            self.check_end(chunk)
        elif chunk.token_id is not None and self.finish_reason(chunk.token_id) is not None:
            raise Mismatch(f"{chunk} should have been the last")

    def finish_reason(self, token: int | None) -> str | None:
        num_generated = len(self.solo.tokens) - self.num_prompt_tokens
        if token is not None and token in self.stop_tokens and num_generated > self.sampling.min_tokens:
            return "stop"
        return "length" if len(self.solo.tokens) >= self.max_len else None

    def check_end(self, chunk: StreamChunk) -> None:
        ended_by_pool = chunk.limit == "pool" and self.sampling.overflow == "stop" and chunk.finish_reason == "length"
        if chunk.error is not None or (chunk.finish_reason != self.finish_reason(chunk.token_id) and not ended_by_pool):
            raise Mismatch(f"{chunk} at {len(self.solo.tokens)} tokens of {self.max_len}")
        expected: tuple[TokenLogprob, ...] = ()
        if self.sampling.prompt_logprobs is not None and self.sample == 0:
            tokens, values = self.solo.tokens, self.solo.values
            expected = tuple(TokenLogprob(tokens[i + 1], float(values[i])) for i in range(self.num_prompt_tokens - 1))
        if self.prompt_logprobs != expected:
            raise Mismatch(f"prompt log-probabilities {self.prompt_logprobs}, alone {expected}")


class ExpectedHypothesis:
    """The chunks of one hypothesis of a beam search: its tokens, the last one with the score."""

    def __init__(self, hypothesis: Hypothesis) -> None:
        self.hypothesis, self.num_checked = hypothesis, 0

    def check(self, chunk: StreamChunk) -> None:
        if chunk.finish_reason in ("abort", "error"):
            return
        hypothesis, index = self.hypothesis, self.num_checked
        end = (hypothesis.finish, hypothesis.score) if index == len(hypothesis.tokens) - 1 else (None, None)
        if (chunk.token_id, chunk.finish_reason, chunk.cumulative_logprob) != (hypothesis.tokens[index], *end):
            raise Mismatch(f"{chunk}: alone token {index} of {hypothesis}")
        self.num_checked += 1


def choose_token(value: int, sample: int) -> int:
    return hash((value, sample)) % VOCAB


def continuations(value: int, sampling: SamplingParams, stop_tokens: frozenset[int]) -> tuple[tuple[int, float], ...]:
    """Return a beam's candidates, which depend on everything that it sees."""
    count = num_candidates(sampling, len(stop_tokens))
    tokens = dict.fromkeys(hash((value, i)) % VOCAB for i in range(2 * count))
    candidates = [(token, -1 - (hash((value, token)) % 1000) / 200) for token in list(tokens)[:count]]
    return tuple(sorted(candidates, key=lambda candidate: -candidate[1]))


def solo_search(
    solo: SoloSequence, sampling: SamplingParams, stop_tokens: frozenset[int], max_len: int
) -> list[Hypothesis]:
    """Search with every beam computed anew in each step."""
    search = BeamSearch(sampling, len(solo.tokens), max_len, stop_tokens)
    beams = [list(solo.tokens)]
    while True:
        solos = [solo.with_tokens(tokens) for tokens in beams]
        children = search.advance(beams, [continuations(beam.values[-1], sampling, stop_tokens) for beam in solos])
        if not children:
            return search.best_hypotheses(beams)
        beams = [[*beams[child.parent], child.token] for child in children]


# ---------------------------------------------------------------- the scheduler's harness


class SchedulerHarness:
    """Scheduler, manager, fake cache and fake clock; compares every chunk and checks every invariant."""

    def __init__(
        self,
        setup: Setup,
        *,
        manager: Callable[..., KVCacheManager] = KVCacheManager,
        kv_cache: type[FakeKVCache] = FakeKVCache,
        check: bool = True,
        draft: bool = False,
    ) -> None:
        self.setup, self.checks_invariants, config = setup, check, setup.config
        groups = setup.groups()
        setup.check_groups(groups)
        self.manager = manager(
            groups,
            prefix_caching=config.enable_prefix_caching,
            max_num_seqs=config.max_num_seqs,
            hash_fn=lambda data: digest(data)[: setup.hash_bits // 8],
            watermark=config.watermark,
        )
        self.kv_cache = kv_cache(groups)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            prefill_chunk_size=config.prefill_chunk_size,
            limit=setup.max_len,
            clock=self.clock,
        )
        if draft:
            self.scheduler.drafter = SoloDrafter(self)
        self.time = 0.0
        self.expected: dict[int, dict[int, ExpectedSample | ExpectedHypothesis]] = {}  # by request and sample
        self.metrics: dict[int, RequestMetrics] = {}
        self.next_request = itertools.count()
        self.ended: Counter[str] = Counter()  # by finish reason

    def clock(self) -> float:
        self.time += 1.0
        return self.time

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        root: bytes = b"",
        stop_tokens: frozenset[int] = STOP_TOKENS,
        source: Sequence[int] = (1, 2, 0),
    ) -> int:
        request = next(self.next_request)
        source = tuple(source) if any(spec.is_cross_attention for spec in self.setup.specs) else ()
        root += bytes(source)
        self.metrics[request] = self.scheduler.add_request(
            request,
            prompt,
            sampling,
            root,
            stop_tokens=stop_tokens,
            encoder_input=EncoderInput(source) if source else None,
        )
        max_len = self.setup.max_len
        if sampling.max_tokens is not None:
            max_len = min(max_len, len(prompt) + sampling.max_tokens)
        elif self.manager.capacity < max_len:
            max_len = max(len(prompt), self.manager.capacity + 1)
        stop_tokens |= frozenset(sampling.stop_token_ids)
        solos = [SoloSequence(root, self.setup.groups(), prompt, source) for _ in range(sampling.n)]
        if sampling.num_beams > 1 and max_len > len(prompt):
            hypotheses = solo_search(solos[0], sampling, stop_tokens, max_len)
            self.expected[request] = dict(enumerate(map(ExpectedHypothesis, hypotheses)))
        else:
            self.expected[request] = {
                sample: ExpectedSample(solo, sample, sampling, stop_tokens, max_len)
                for sample, solo in enumerate(solos)
            }
        return request

    def abort(self, request: int) -> None:
        chunks = self.scheduler.abort_request(request)
        pending = {chunk.sample_index for chunk in self.scheduler._pending_chunks if chunk.request == request}
        assert {chunk.sample_index for chunk in chunks} | pending == set(self.expected.get(request, {}))
        assert all(chunk.finish_reason == "abort" for chunk in chunks)
        self.compare(chunks)

    def finish(self, request: int, sample: int) -> None:
        """End a sample as a stop string does."""
        for chunk in self.scheduler.finish_sequence(request, sample, "stop"):
            self.remove_expected(chunk)

    def schedule(self) -> SchedulerOutput | None:
        self.scheduler.propose_drafts()
        output = self.scheduler.schedule()
        if output is None:
            self.check_idle()
        elif output.encoder_batch is None:
            self.check_sub_batches(output)
        return output

    def check_idle(self) -> None:
        """Check that nothing can run, because the scheduler returned None."""
        assert not self.expected, f"nothing runs, and {sorted(self.expected)} wait"

    def update(self, output: SchedulerOutput, faults: Faults = no_faults) -> list[StreamChunk]:
        """Run the fake model and pass its results to the scheduler."""
        if output.encoder_batch is not None:
            results = self.encode(output.encoder_batch, faults)
        else:
            results = self.execute(output, faults)
        chunks = self.scheduler.update_from_output(output, results)
        self.compare(chunks)
        self.check()
        while accepted := self.scheduler.append_accepted():
            self.compare(accepted)
            self.check()
            chunks += accepted
        self.kv_cache.fill_unowned(self.manager)
        return chunks

    def execute(self, output: SchedulerOutput, faults: Faults) -> list[SequenceOutput]:
        num_read_slots = [batch.num_read_slots for batch in output.sub_batches for _ in range(batch.num_seqs)]
        spans = [(scheduled.start, scheduled.token_ids) for scheduled in output.scheduled]
        roots = [scheduled.sequence.request.prefix_root for scheduled in output.scheduled]
        values = self.kv_cache.run(spans, roots, output.allocation, num_read_slots)
        results, begin = [], 0
        for scheduled, span_values in zip(output.scheduled, values, strict=True):
            if fault := faults(scheduled.sequence):
                self.spoil(output.allocation.slots, 0, begin, scheduled.num_tokens)
                results.append(SequenceOutput(error="not a number", retry=fault == "retry"))
            else:
                results.append(self.result(scheduled, span_values))
            begin += scheduled.num_tokens
        return results

    def encode(self, batch: EncoderBatch, faults: Faults) -> list[SequenceOutput]:
        sources = [seq.request.encoder_tokens for seq in batch.sequences]
        assert sum(each.num_seqs * each.num_new_tokens for each in batch.sub_batches) == sum(map(len, sources))
        if batch.allocation is not None:
            self.kv_cache.encode(sources, batch.allocation)
        results, begin = [], 0
        for seq, source in zip(batch.sequences, sources, strict=True):
            fault = faults(seq)
            results.append(SequenceOutput(error="not a number") if fault else SequenceOutput())
            if fault and batch.allocation is not None:
                first_group = len(self.manager.token_groups) + len(self.manager.lower_groups)
                self.spoil(batch.allocation.slots, first_group, begin, len(source))
            begin += len(source)
        return results

    def result(self, scheduled: ScheduledSequence, values: list[int]) -> SequenceOutput:
        seq, start, _, logit_offsets, is_sampled, drafts = scheduled
        scored = logit_offsets[: -1 - len(drafts)] if is_sampled else logit_offsets
        prompt = tuple(TokenLogprob(seq.token_ids[start + i + 1], float(values[i])) for i in scored)
        if not is_sampled:
            return SequenceOutput(prompt_logprobs=prompt)
        value = values[logit_offsets[-1 - len(drafts)]]
        if seq.request.beams is not None:
            candidates = continuations(value, seq.sampling_params, seq.stop_tokens)
            return SequenceOutput(0, None, prompt, candidates=candidates)
        outputs = []
        for draft, value in zip((*drafts, -1), values[logit_offsets[-1] - len(drafts) :], strict=True):
            token = choose_token(value, seq.sample_index)
            outputs.append(SequenceOutput(token, TokenLogprob(token, float(value))))
            if token != draft:
                break
        return outputs[0]._replace(prompt_logprobs=prompt, next_outputs=tuple(outputs[1:]))

    def spoil(self, slots_per_group: Sequence[Sequence[int]], first_group: int, begin: int, count: int) -> None:
        """Make everything wrong that a failed sequence wrote; no sequence may ever see it."""
        for g, slots in enumerate(slots_per_group, first_group):
            for slot in slots[begin : begin + count]:
                self.kv_cache.spoil(g, slot)

    def step(self, faults: Faults = no_faults) -> list[StreamChunk]:
        output = self.schedule()
        return [] if output is None else self.update(output, faults)

    def is_done(self, output: SchedulerOutput | None) -> bool:
        return output is None

    def drain(self, max_steps: int = 5000) -> None:
        """Run until every request has ended, and check that nothing remains."""
        for _ in range(max_steps):
            output = self.schedule()
            if output is not None:
                self.update(output)
            elif self.is_done(output):
                break
        else:
            raise AssertionError(f"{len(self.expected)} requests did not finish in {max_steps} steps")
        assert not self.expected and self.scheduler.idle
        assert all(used == 0 for used in self.manager.stats().used), "blocks leak"
        assert len(self.kv_cache.swapped) <= len(self.manager._swapped.pending_drops), "swapped blocks leak"

    def check(self) -> None:
        if self.checks_invariants:
            self.scheduler.check()

    def compare(self, chunks: Sequence[StreamChunk]) -> None:
        for chunk in chunks:
            self.expected[chunk.request][chunk.sample_index].check(chunk)
            if chunk.finish_reason is not None:
                self.remove_expected(chunk)

    def remove_expected(self, chunk: StreamChunk) -> None:
        assert chunk.finish_reason is not None
        self.ended[chunk.finish_reason] += 1
        del self.expected[chunk.request][chunk.sample_index]
        if not self.expected[chunk.request]:
            del self.expected[chunk.request]
            assert self.metrics.pop(chunk.request).finished is not None

    def check_sub_batches(self, output: SchedulerOutput) -> None:
        num_tokens = sum(scheduled.num_tokens for scheduled in output.scheduled)
        assert num_tokens == sum(batch.num_seqs * batch.num_new_tokens for batch in output.sub_batches)
        assert 0 < num_tokens <= self.setup.max_num_batched_tokens
        begin = 0
        for batch in output.sub_batches:
            spans = output.scheduled[begin : begin + batch.num_seqs]
            begin += batch.num_seqs
            assert all(scheduled.num_tokens == batch.num_new_tokens for scheduled in spans)
            assert batch.num_new_tokens <= self.setup.config.prefill_chunk_size
            by_index = output.cross_sub_batches is None
            order: list[Any] = [
                scheduled.sequence.seq_index if by_index else scheduled.sequence.priority for scheduled in spans
            ]
            assert order == sorted(order)
        assert begin == len(output.scheduled) == len({scheduled.sequence.seq_index for scheduled in output.scheduled})


class SoloDrafter:
    """Drafts from the solo runs, each token wrong with probability 1/4."""

    def __init__(self, harness: SchedulerHarness) -> None:
        self.harness, self.rng = harness, random.Random(1)

    def propose(self, seqs: Sequence[TokenSequence], max_drafts: Sequence[int]) -> list[list[int]]:
        drafts = []
        for seq, limit in zip(seqs, max_drafts, strict=True):
            expected = self.harness.expected[seq.request_id][seq.sample_index]
            assert isinstance(expected, ExpectedSample)
            solo = expected.solo.with_tokens(seq.token_ids) if limit > 0 else expected.solo
            assert solo.tokens == seq.token_ids
            drafts.append([self.draft(solo, seq.sample_index) for _ in range(self.rng.randint(0, max(0, limit)))])
        return drafts

    def draft(self, solo: SoloSequence, sample: int) -> int:
        token = choose_token(solo.values[-1], sample)
        solo.push(token)
        return token if self.rng.random() < 0.75 else self.rng.randrange(VOCAB)


class RandomRequests:
    """Seeded random operations on a harness; the prompts share prefixes of all lengths."""

    harness_type: Callable[..., SchedulerHarness] = SchedulerHarness

    def __init__(self, setup: Setup, seed: int, **parts: Any) -> None:
        self.rng = random.Random(seed)
        self.harness = self.harness_type(setup, **parts)
        self.stems = [[self.rng.randrange(3) for _ in range(setup.max_len)] for _ in range(3)]

    def operate(self) -> None:
        rng, harness = self.rng, self.harness
        draw = rng.random()
        if draw < 0.3 and len(harness.expected) < 9:
            self.add()
        elif draw < 0.34 and harness.expected:
            self.end_one()
        elif draw < 0.38:
            self.step_with_changes()
        elif draw < 0.382:
            unpublish_all(harness.manager)
        elif draw < 0.5 and harness.manager.uses_offload:  # offloaded tokens are lost, and computed again
            harness.step(faults=lambda seq: rng.random() < 0.05 and "retry")
        else:
            harness.step(faults=lambda seq: rng.random() < 0.01)
        harness.check()

    def end_one(self) -> None:
        """Abort a request, or finish one of its samples."""
        rng, harness = self.rng, self.harness
        request = rng.choice(sorted(harness.expected))
        if rng.random() < 0.5:
            harness.abort(request)
        else:
            harness.finish(request, rng.choice(sorted(harness.expected[request])))

    def add(self) -> None:
        rng, max_len = self.rng, min(self.harness.setup.max_len, self.harness.manager.capacity)
        prompt = rng.choice(self.stems)[: rng.randint(1, min(max_len, 24))]
        if rng.random() < 0.3:
            prompt = [*prompt[:-1], rng.randrange(3)]
        sampling = SamplingParams(
            n=rng.choice((1, 1, 1, 2, 3)),
            max_tokens=rng.choice((None, 0, 1, *range(2, 12))),
            prompt_logprobs=rng.choice((None, None, None, 0)),
            stop_token_ids=(5,) if rng.random() < 0.3 else (),
        )
        if sampling.max_tokens is not None and len(prompt) + sampling.max_tokens - 1 > max_len:
            sampling = SamplingParams(n=sampling.n, max_tokens=None)
        source = self.source()
        if rng.random() < 0.2 and not self.harness.manager.lossy:
            sampling = self.beams(len(prompt))
        self.harness.add(prompt, sampling, rng.choice((b"", b"", b"", b"other")), STOP_TOKENS, source)

    def source(self) -> list[int]:
        """Return an encoder input."""
        return [self.rng.randrange(2) for _ in range(self.rng.choice((1, 4, 5, 5, 14)))]

    def beams(self, num_prompt_tokens: int) -> SamplingParams:
        """Return a search that fits into the pool, with few tokens, because its solo run is expensive."""
        rng, setup, manager = self.rng, self.harness.setup, self.harness.manager
        num_beams, max_tokens = rng.choice((2, 3)), rng.randint(1, 6)
        fits = manager.has_capacity(num_beams, min(num_prompt_tokens + max_tokens, setup.max_len))
        if not fits or num_beams > setup.config.max_num_seqs:
            return SamplingParams(max_tokens=1 if num_prompt_tokens <= manager.capacity else 0)
        return SamplingParams(
            num_beams=num_beams,
            n=rng.randint(1, num_beams),
            max_tokens=max_tokens,
            early_stopping=rng.choice((True, False, "never")),
            length_penalty_form=rng.choice(("length", "gnmt")),
        )

    def step_with_changes(self) -> None:
        """Abort, finish and add requests while a step is in flight."""
        output = self.harness.schedule()
        if output is None:
            return
        for _ in range(self.rng.randint(1, 3)):
            if self.harness.expected and self.rng.random() < 0.6:
                self.end_one()
            else:
                self.add()
        self.harness.update(output)

    def run(self, num_operations: int) -> SchedulerHarness:
        for _ in range(num_operations):
            self.operate()
        self.harness.drain()
        return self.harness


# ---------------------------------------------------------------- the same with hypothesis, which shrinks failures

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=20)
MACHINE = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)
MACHINE_LONG = settings(MACHINE, max_examples=1000, stateful_step_count=60, derandomize=False)


class StreamMachine(RuleBasedStateMachine):
    """Requests arrive, end, fail and are preempted in a pool that is nearly always full."""

    def __init__(self, harness: SchedulerHarness | None = None) -> None:
        super().__init__()
        if harness is not None:
            self.begin(harness)

    def begin(self, harness: SchedulerHarness) -> None:
        self.harness = harness
        self.max_len = min(harness.setup.max_len, harness.manager.capacity)

    def choose_request(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.harness.expected)))

    @rule(
        prompt=TOKENS,
        n=st.integers(1, 3),
        max_tokens=st.none() | st.integers(0, 8),
        prompt_logprobs=st.none() | st.just(0),
        root=st.sampled_from((b"", b"x")),
        source=st.lists(st.integers(0, 1), min_size=1, max_size=9),
    )
    def add(self, prompt: list[int], root: bytes, source: list[int], **options: Any) -> None:
        if len(self.harness.expected) < 8 and len(prompt) + (options["max_tokens"] or 0) <= self.max_len:
            self.harness.add(prompt, SamplingParams(**options), root, source=source)

    @rule(prompt=TOKENS, beams=st.integers(2, 3), new=st.integers(1, 5), early=st.sampled_from((True, False, "never")))
    def search(self, prompt: list[int], beams: int, new: int, early: Any) -> None:
        setup, manager = self.harness.setup, self.harness.manager
        fits = manager.has_capacity(beams, min(len(prompt) + new, setup.max_len)) and not manager.lossy
        if len(self.harness.expected) < 8 and fits and beams <= setup.config.max_num_seqs:
            self.harness.add(prompt, SamplingParams(n=beams, num_beams=beams, max_tokens=new, early_stopping=early))

    @precondition(lambda self: self.harness.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.harness.abort(self.choose_request(data))

    @precondition(lambda self: self.harness.expected)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = self.choose_request(data)
        self.harness.finish(request, data.draw(st.sampled_from(sorted(self.harness.expected[request]))))

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.step()

    @precondition(lambda self: self.harness.expected)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        request = self.choose_request(data)
        self.harness.step(faults=lambda seq: seq.request_id == request)

    @precondition(lambda self: self.harness.expected)
    @rule(data=st.data())
    def abort_in_flight(self, data: st.DataObject) -> None:
        output = self.harness.schedule()
        if output is not None and self.harness.expected:
            self.harness.abort(self.choose_request(data))
            self.harness.update(output)

    @precondition(lambda self: self.harness.scheduler._running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.harness.scheduler._preempt(data.draw(st.sampled_from(self.harness.scheduler._running)))

    @invariant()
    def is_consistent(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()
