"""Cache trace: runs prompts on a real engine and records the state of every token, with reasons.

Nothing is computed twice, and an engine without a tracer has none of this. A ``CacheTracer`` attaches to five
hooks: the cache's attention hook and eviction hook (scores), the runner (scheduler output), the prefix cache's loads
(``PrefixOffload``) and the preemption hook (``PreemptionManager``). After each step it reads what *is* in the cache,
the positions of each group and head, and compares it with the state before; a change is explained by the step's block
operations, masks and scores. It waits for the device at every layer, and uses the kernel that returns weights: a traced
run is slow, with equal output. The result is a ``kvad.inspection.trace_report.TraceReport``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvad import ops
from kvad.cache import CacheGroup, group_bytes
from kvad.cache.device import EvictionEvent
from kvad.cache.sessions import SequenceState
from kvad.config import attention_specs
from kvad.engine import Engine, StreamChunk, scheduling
from kvad.engine.execution import ModelRunner
from kvad.engine.scheduling import SamplingParams, ScheduledSequence, SchedulerOutput
from kvad.errors import EngineError, RequestError, format_count
from kvad.inspection import sequence_trace as states
from kvad.inspection import trace_report
from kvad.inspection.sequence_trace import ReadableBlocks, SequenceTrace, TokenOrigin, ratio_of, scatter_by_position
from kvad.inspection.trace_renderer import CacheTrace
from kvad.inspection.trace_report import Reason, SequenceEventRecord, StateChange, TraceReport
from kvad.model_input import TokenPositions


def trace_requests(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    model: str = "",
    piece: Callable[[int], str] = str,
    resume: SequenceState | None = None,
    session: str = "",
    cache_salt: str = "",
) -> TraceReport:
    """Run ``prompts`` to their end, each submitted at the first token of the one before, so it can find its blocks.

    Args:
        piece: Text of a token id.
        resume: State of an earlier request, from ``session``; every prompt continues from its common prefix.
        cache_salt: The prompts share cached blocks only with requests of the same salt.

    Raises:
        RequestError: For a model other than a decoder, a mesh, or a prompt that the engine refuses.
        EngineError: If the engine is busy.
    """
    if engine.model.config.kind != "decoder":
        raise RequestError(f"an {engine.model.config.kind} has no cache trace", "Use a decoder.")
    if not engine.idle:
        raise EngineError("the engine is busy: other requests would be in the trace")
    with CacheTracer(engine, resume, session) as tracer:
        waiting, latest = list(prompts), -1
        with_output = {latest}  # requests
        while waiting or not engine.idle:
            if waiting and latest in with_output:
                num_equal = list(prompts[: len(prompts) - len(waiting)]).count(waiting[0])
                latest = engine.add_request(
                    waiting.pop(0), sampling, resume=resume, cache_salt=cache_salt, draw_salt=num_equal
                )
            chunks = engine.step()
            tracer.on_outputs(chunks)
            with_output |= {chunk.request for chunk in chunks}
        return CacheTrace(*tracer.report(model, piece))


class _TracedRunner(ModelRunner):
    """Reports each scheduler output to a tracer."""

    def __init__(self, runner: ModelRunner, tracer: CacheTracer) -> None:
        super().__init__(runner.model, runner.cache)
        self.buffers, self.tracer = runner.buffers, tracer

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> Tensor:
        self.tracer.on_scheduled(output)
        logits = super().execute(output)
        self.tracer.on_executed(output)
        return logits


class _GroupStep(NamedTuple):
    """One step of a sequence in one token group."""

    row: SequenceTrace
    group: int
    start: int  # first new position
    window_ends: list[int]  # per position: length at which a query could not see it for the first time, or 0
    evictions: dict[int, dict[int, Reason]]  # line -> position -> reason


class CacheTracer:
    """``with CacheTracer(engine) as tracer`` records every step until the end of the block.

    ``resumed``: state that requests resume from, of ``session``. RequestError for a mesh of several ranks.
    """

    def __init__(self, engine: Engine, resumed: SequenceState | None = None, session: str = "") -> None:
        if engine.kv_cache.ranks > 1:
            raise RequestError(
                f"a mesh of {engine.kv_cache.ranks} ranks cannot be traced: each has its own heads and layers",
                "Use one process; the states of tokens are the same there.",
            )
        self.engine, self.kv_cache, self.manager = engine, engine.kv_cache, engine.kv_cache_manager
        self.groups = self.manager.token_groups
        self.lower_groups: list[list[int]] = [[] for _ in self.groups]  # of each token group: its lower levels
        for number, group in enumerate(self.kv_cache.groups):
            if group.lower_level is not None:
                self.lower_groups[group.lower_level.token_group].append(number)
        self.group_of = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        self.policies = [self._policy(group) for group in self.groups]
        self.rows: dict[tuple[int, int], SequenceTrace] = {}  # by request and sample
        self.steps: list[trace_report.TraceStep] = []
        self.step = 0
        self.output: SchedulerOutput | None = None  # that is running
        self.evictions: dict[tuple[int, int], EvictionEvent] = {}  # of this step, by sequence index and layer
        self.resumed, self.session = resumed, f"session {session}" if session else "what an earlier request left"
        # Since the last step:
        self.preemptions: list[tuple[scheduling.sequence.TokenSequence, scheduling.preemption.PreemptionRecord]] = []
        self._latest: list[SequenceTrace] = []
        self._recorder = states.BlockRecorder(self.manager, self.kv_cache.groups)
        self._before = engine.runner, engine.kv_cache.attention_hook, engine.kv_cache.eviction_hook
        self._drafter = engine.scheduler.drafter

    def __enter__(self) -> CacheTracer:
        self.kv_cache.attention_hook, self.kv_cache.eviction_hook = self.on_attention, self.on_eviction
        self.engine.runner = _TracedRunner(self.engine.runner, self)
        self.engine.scheduler.drafter = None  # every step adds one token
        self.engine.preemption.preemption_hook = lambda row, record: self.preemptions.append((row, record))
        if self.manager.prefix_offload is not None:
            self.manager.prefix_offload.results = {}
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.runner, self.kv_cache.attention_hook, self.kv_cache.eviction_hook = self._before
        self.engine.scheduler.drafter = self._drafter
        self.engine.preemption.preemption_hook = None
        if self.manager.prefix_offload is not None:
            self.manager.prefix_offload.results = None

    def _policy(self, group: CacheGroup) -> str:
        window = attention_specs(self.engine.model.config)[group.layers[0]].window
        if window is not None and group.spec.window == window:
            return f"the layer's own window of {window}"
        return str(self.engine.cache.resolved_policy.for_layer(group.layers[0]))

    def _positions(self, number: int, blocks: Sequence[int]) -> Tensor:
        """Return the positions [S] of a group's slots in these blocks."""
        return self.kv_cache.positions[number][list(blocks)].flatten().cpu()

    def _head_positions(self, layer: int, blocks: Sequence[int]) -> Tensor:
        """Return the positions [K, S] of a layer whose heads retain different tokens."""
        return self.kv_cache.head_metadata[layer].positions[list(blocks)].transpose(0, 1).flatten(1).long().cpu()

    def _row(self, work: ScheduledSequence) -> SequenceTrace:
        return self.rows[work.sequence.request_id, work.sequence.sample_index]

    # ------------------------------------------------------------ hooks

    def on_eviction(self, event: EvictionEvent) -> None:
        self.evictions[event.op.seq_index, event.layer] = event

    def on_attention(self, seen: ops.sub_batch.AttentionTrace) -> None:
        """Add up the attention of this step's queries by position."""
        output, index = self.output, self.group_of[seen.layer]
        assert output is not None
        group, tables = self.groups[index], output.allocation.block_tables
        first = sum(sub_batch.num_seqs for sub_batch in output.sub_batches[: seen.sub_batch])
        heads = group.spec.num_kv_heads
        mass = seen.weights.double().nan_to_num().unflatten(1, (heads, -1)).sum((2, 3)).cpu()  # [R, K, S]
        for number in range(output.sub_batches[seen.sub_batch].num_seqs):
            work = output.scheduled[first + number]
            row, end = self._row(work), work.start + work.num_tokens
            if group.eviction_policy is not None:
                held = self._head_positions(seen.layer, tables[index][first + number])
            else:
                held = seen.positions[number].cpu().expand(heads, -1)
            width = min(held.shape[1], mass.shape[2])
            added = scatter_by_position(held[:, :width], mass[number, :, :width], end)
            for level in self.lower_groups[index]:
                positions = self._positions(level, tables[level][first + number])
                states.spread_summaries(added, positions, ratio_of(self.kv_cache.groups[level]))
            before = row.mass.get(seen.layer, added.new_zeros(heads, 0))
            added[:, : before.shape[1]] += before[:, :end]
            row.mass[seen.layer] = torch.cat((added, before[:, end:]), dim=1)

    def on_scheduled(self, output: SchedulerOutput) -> None:
        self.step, self.output = self.step + 1, output
        self.evictions.clear()
        swapped_in = self._record_preemptions()
        for work in output.scheduled:
            key = work.sequence.request_id, work.sequence.sample_index
            row = self.rows.get(key)
            if row is None or row.is_swapped:
                self._admit(row, work, swapped_in.get(key))

    def on_executed(self, output: SchedulerOutput) -> None:
        self.output, self._latest = None, [self._row(work) for work in output.scheduled]
        spans = []
        for number, (work, row) in enumerate(zip(output.scheduled, self._latest, strict=True)):
            row.tables = [
                self._readable_blocks(index, output.allocation.block_tables[index][number])
                for index in range(len(self.kv_cache.groups))
            ]
            for index in range(len(self.groups)):
                self._compare(row, index, work)
            row.length = work.start + work.num_tokens
            spans.append(trace_report.StepSpan(row.number, work.start, work.num_tokens))
        used = tuple(pool.num_live for pool in self.manager.pools)
        pool, tables = self._recorder.pool_changes(), self._recorder.table_changes(self.rows.values(), self._latest)
        self.steps.append(trace_report.TraceStep(self.step, tuple(spans), used, pool, tuple(tables)))

    def on_outputs(self, chunks: Sequence[StreamChunk]) -> None:
        """Record what an engine step published, and which sequences ended."""
        for row in self._latest:
            for index, table in enumerate(row.tables):
                known = self.manager.pools[index].prefixes
                row.published |= {(index, block) for block in table.blocks if known[block] is not None}
        for chunk in chunks:
            if chunk.finish_reason is not None and (chunk.request, chunk.sample_index) in self.rows:
                row = self.rows[chunk.request, chunk.sample_index]
                row.finish, row.error = chunk.finish_reason, chunk.error

    # ------------------------------------------------------------ admission and preemption

    def _record_preemptions(self) -> dict[tuple[int, int], scheduling.preemption.PreemptionRecord]:
        """Record preemptions since the last step and lost copies; return the sequences that were swapped in."""
        swapped_in = {}
        for sequence, record in self.preemptions:
            key = sequence.request_id, sequence.sample_index
            row = self.rows.get(key)
            if record.action == "back":
                swapped_in[key] = record
            elif row is not None and record.action in ("out", "again"):
                self._preempt(row, record)
            elif row is not None:  # its copy is lost, or was discarded
                text = "its copy is dropped: enough of it is in the prefix cache by now, the rest is recomputed"
                text = f"its copy is lost: {record.reason}" if record.action == "lost" else text
                row.events.append(SequenceEventRecord(self.step, text))
        self.preemptions.clear()
        return swapped_in

    def _admit(
        self, row: SequenceTrace | None, work: ScheduledSequence, record: scheduling.preemption.PreemptionRecord | None
    ) -> None:
        """Record the admission of a sequence, for the first time (None) or again."""
        sequence, size = work.sequence, self.groups[0].block_size
        offload = self.manager.prefix_offload
        load = None if offload is None or offload.results is None else offload.results.get(sequence.seq_index)
        kind = "shared" if row is None and work.start > 0 and sequence.sample_index > 0 else "found"
        if record is not None:
            kind = "restored" if record.location is None else "back"
        location = "" if record is None else record.location or ""
        blocks = () if load is None else load.blocks
        locations = {(group, block.depth - 1): block.location for block in blocks for group in block.groups}
        origin = TokenOrigin(self.step, kind, work.start, size, location, self.session, locations)
        again, miss_reason, nbytes = "", "", 0 if record is None else record.nbytes
        if row is None:
            lines = [1 if g.eviction_policy is None else len(g.layers) * g.spec.num_kv_heads for g in self.groups]
            row = SequenceTrace(len(self.rows), sequence, origin, lines)
            self.rows[sequence.request_id, sequence.sample_index] = row
            miss_reason = self.engine.metrics(sequence.request_id).resume_miss_reason
            if kind == "restored" and self.resumed is not None and self.resumed.length == work.start:
                nbytes = self.resumed.nbytes
        else:
            row.origin, row.is_swapped, again = origin, False, " again"
        text = f"admitted{again}{states.admission_text(origin, load, nbytes, miss_reason)}"
        row.events.append(SequenceEventRecord(self.step, text))

    def _preempt(self, row: SequenceTrace, record: scheduling.preemption.PreemptionRecord) -> None:
        tokens = format_count(row.length, "token")
        cause, text = "preempted", f"preempted: its {tokens} are to be recomputed"
        if record.action == "out":
            location = states.SWAP_LOCATIONS[record.location]
            cause, text = "swapped-out", f"swapped out: {tokens}, {record.nbytes:,} bytes, to {location}"
        row.is_swapped, row.preempted_codes = True, [codes.clone() for codes in row.codes]
        row.events.append(SequenceEventRecord(self.step, text))
        why = Reason(cause, f"{text}, at step {self.step}", row.length, source=record.location)
        for index, codes in enumerate(row.codes):
            held = (codes != states.EVICTED) & (codes != states.UNWRITTEN)
            for line, at in held.nonzero().tolist():
                row.record(index, line, StateChange(self.step, at, at, "swapped", why))
            codes[held] = states.SWAPPED

    # ------------------------------------------------------------ states

    def _readable_blocks(self, index: int, table: Sequence[int]) -> ReadableBlocks:
        group, refs = self.kv_cache.groups[index], tuple(self.manager.pools[index].refs[block] for block in table)
        if group.eviction_policy is None:
            return ReadableBlocks(tuple(table), refs, self._positions(index, table))
        return ReadableBlocks(tuple(table), refs, {layer: self._head_positions(layer, table) for layer in group.layers})

    def _codes(self, row: SequenceTrace, index: int, end: int) -> Tensor:
        """Compute [lines, end]: the state of every position, as visible to a query after the sequence's next one."""
        group, table = self.groups[index], row.tables[index]
        state = torch.tensor([states.SHARED if count > 1 else states.HOT for count in table.refs], dtype=torch.uint8)
        state = state.repeat_interleave(group.block_size)
        if isinstance(table.held, dict):
            held = torch.cat([table.held[layer] for layer in group.layers])
            return scatter_by_position(held, state.expand_as(held), end, states.EVICTED)
        codes = scatter_by_position(table.held.unsqueeze(0), state.unsqueeze(0), end, states.EVICTED)
        if row.origin.source == "found":
            hits = codes[0, : row.origin.tokens]
            hits[hits == states.HOT] = states.SHARED
        for level in self.lower_groups[index]:
            lower_group, lower = self.kv_cache.groups[level], row.tables[level].held
            ratio = ratio_of(lower_group)
            assert isinstance(lower, Tensor)
            tokens = lower[lower >= 0].unsqueeze(1) // ratio * ratio + torch.arange(ratio)
            codes[0, tokens.flatten()] = states.level_state(lower_group)
        visible = group.spec.pattern.visible(TokenPositions(torch.tensor([end - 1])), TokenPositions(torch.arange(end)))
        return codes.masked_fill(~visible, states.EVICTED)

    def _compare(self, row: SequenceTrace, index: int, work: ScheduledSequence) -> None:
        group, end = self.groups[index], work.start + work.num_tokens
        codes, before = self._codes(row, index, end), row.grow(index, end)[:, :end]
        window_ends = self._window_ends(row, index, end) if group.spec.window is not None else []
        evictions = self._eviction_reasons(index, work) if group.eviction_policy is not None else {}
        step = _GroupStep(row, index, work.start, window_ends, evictions)
        for line, at in (before != codes).nonzero().tolist():
            was, now = int(before[line, at]), int(codes[line, at])
            why = self._reason(step, line, at, was, now)
            row.record(index, line, StateChange(self.step, at, at, states.NAMES[now], why))
        before.copy_(codes)

    def _window_ends(self, row: SequenceTrace, index: int, end: int) -> list[int]:
        """Return per position the length at which a query could not see it for the first time, or 0."""
        first = min(row.length, end - 1)
        queries, keys = torch.arange(first, end), torch.arange(end)
        pattern = self.groups[index].spec.pattern
        visible = pattern.visible(TokenPositions(queries), TokenPositions(keys))
        hidden = ~visible & (queries.unsqueeze(1) >= keys)
        lengths: list[int] = torch.where(hidden.any(0), first + hidden.byte().argmax(0) + 1, 0).tolist()
        return lengths

    def _eviction_reasons(self, index: int, work: ScheduledSequence) -> dict[int, dict[int, Reason]]:
        group, reasons = self.groups[index], dict[int, dict[int, Reason]]()
        heads = group.spec.num_kv_heads
        for place, layer in enumerate(group.layers):
            event = self.evictions.get((work.sequence.seq_index, layer))
            if event is not None:
                for head in range(heads):
                    line = place * heads + head
                    reasons[line] = states.eviction_reasons(event, head, self.policies[index], self.step)
        return reasons

    def _why_evicted(self, step: _GroupStep, line: int, at: int, was: int) -> Reason:
        policy, when, origin = self.policies[step.group], f"at step {self.step}", step.row.origin
        if at in step.evictions.get(line, {}):
            return step.evictions[line][at]
        window_end = step.window_ends[at] if step.window_ends else 0
        was_restored = origin.source == "restored" and was == states.UNWRITTEN and at < step.start
        if window_end and not (was_restored and window_end <= step.start):
            return Reason("window", f"passed {when} by {policy} at length {window_end}", window_end)
        if was == states.UNWRITTEN and at < step.start:
            return states.missing_reason(origin, step.start)
        if self.groups[step.group].demotion_policy is not None:
            return Reason("dropped", f"dropped {when} at length {step.start}: {policy} keeps no more", step.start)
        return Reason("lost", f"lost {when}: no policy says why, this is a bug", step.start)

    def _reason(self, step: _GroupStep, line: int, at: int, was: int, now: int) -> Reason:
        """Return why the state of position ``at`` changed from ``was`` to ``now``."""
        if now == states.EVICTED:
            return self._why_evicted(step, line, at, was)
        when, length, origin = f"at step {self.step}", step.start, step.row.origin
        lower = states.NAMES[now] if now in (states.QUANTIZED, states.SUMMARIZED, states.OFFLOADED) else ""
        if was == states.SWAPPED and at >= step.start:
            return Reason("recomputed", f"recomputed {when}{f', {lower}' if lower else ''}", length)
        if at < step.start and origin.step == self.step and origin.source != "shared":
            same = was == states.SWAPPED and (not lower or int(step.row.preempted_codes[step.group][line, at]) == now)
            if was == states.UNWRITTEN or same:
                return origin.describe(step.group, at, length, lower)
        if now == states.OFFLOADED:
            return Reason("offloaded", f"offloaded {when} at length {length}: read back by every later query", length)
        if now == states.QUANTIZED:
            group = self.kv_cache.groups[self.lower_groups[step.group][0]]
            return Reason("quantized", f"quantized {when} into {group.format_name} at length {length}", length)
        if now == states.SUMMARIZED:
            ratio = ratio_of(self.kv_cache.groups[self.lower_groups[step.group][-1]])
            first = at // ratio * ratio
            tokens = f"one slot for tokens {first} to {first + ratio - 1}"
            return Reason("summarized", f"summarized {when} at length {length}: {tokens}", length)
        if now == states.SHARED:
            return Reason("shared", f"shared {when}: other sequences reference its block", length)
        if was == states.SHARED:
            return Reason("own", f"this sequence's own {when}", length)
        return Reason("written", f"computed {when}", length)

    # ------------------------------------------------------------ the report

    def report(self, model: str, piece: Callable[[int], str]) -> TraceReport:
        self._record_preemptions()
        groups = [
            trace_report.GroupReport(
                state=states.NAMES[states.level_state(group)],
                layers=group.layers,
                kv_heads=group.spec.num_kv_heads,
                policy=self.policies[self.group_of[group.layers[0]]],
                stored=group.format_name,
                block_size=group.block_size,
                blocks=group.num_usable_blocks,
                bytes=group_bytes(group).total,
            )
            for group in self.kv_cache.groups
        ]
        return TraceReport(
            model,
            str(self.engine.cache.resolved_policy),
            self.engine.cache.layout,
            layers=len(self.group_of),
            groups=tuple(groups),
            steps=tuple(self.steps),
            rows=tuple(self._sequence_report(row, piece) for row in self.rows.values()),
            storage=states.storage_usage(self.engine, self.steps),
            end=self._recorder.pool_changes(),
        )

    def _sequence_report(self, row: SequenceTrace, piece: Callable[[int], str]) -> trace_report.SequenceReport:
        tokens, mass = row.sequence.token_ids, []
        for layer, index in sorted(self.group_of.items()):
            heads = self.groups[index].spec.num_kv_heads
            computed = row.mass.get(layer, torch.zeros(heads, 0))
            padded = torch.nn.functional.pad(computed, (0, len(tokens) - computed.shape[1]))
            mass.append(tuple(tuple(head) for head in padded.tolist()))
        return trace_report.SequenceReport(
            request=row.sequence.request_id,
            sample=row.sequence.sample_index,
            prompt=row.sequence.num_prompt_tokens,
            num_prefix_hits=row.num_prefix_hits,
            tokens=tuple(tokens),
            pieces=tuple(piece(token) for token in tokens),
            finish=row.finish,
            error=row.error,
            lines=tuple(self._lines(row)),
            blocks=tuple(row.block_uses(self.kv_cache.groups)),
            attention_mass=tuple(mass),
            events=tuple(row.events),
            restored=row.restored,
        )

    def _lines(self, row: SequenceTrace) -> list[trace_report.GroupTrace]:
        """Return the final states and the changes of each line, in the order of layers and heads."""
        lines = []
        for index, group in enumerate(self.groups):
            heads, codes = group.spec.num_kv_heads, row.grow(index, len(row.sequence.token_ids)).tolist()
            for number, (final_codes, changes) in enumerate(zip(codes, row.changes[index], strict=True)):
                layers, head = group.layers, None
                if group.eviction_policy is not None:
                    layers, head = (group.layers[number // heads],), number % heads
                signs = "".join(states.SIGNS[code] for code in final_codes)
                lines.append(trace_report.GroupTrace(index, layers, head, signs, tuple(changes)))
        return sorted(lines, key=lambda line: (line.layers[0], line.head or 0))
