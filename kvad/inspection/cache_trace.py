"""Cache trace: runs prompts on a real engine and records the state of every token, with reasons.

Nothing is computed twice, and an engine without a tracer has none of this. A :class:`CacheTracer` attaches to five
hooks: the cache's attention hook and eviction hook (scores), the runner (scheduler output), the prefix cache's loads
(``PrefixOffload``) and the preemption hook (``PreemptionManager``). After each step it reads what *is* in the cache,
the positions of each group and head, and compares it with the state before; a change is explained by the step's block
operations, masks and scores. It waits for the device at every layer, and uses the kernel that returns weights: a traced
run is slow, with equal output. The result is a :class:`kvad.inspection.trace_report.TraceReport`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from kvad import cache as cache_lib
from kvad import ops
from kvad.cache import CacheGroup, group_bytes
from kvad.cache.device import EvictionEvent
from kvad.cache.sessions import SequenceState
from kvad.config import attention_specs
from kvad.engine import Engine, StreamChunk, scheduling
from kvad.engine.execution import ModelRunner
from kvad.engine.scheduling import SamplingParams, ScheduledSequence, SchedulerOutput
from kvad.errors import EngineError, RequestError
from kvad.inspection.provenance import (
    TokenOrigin,
    admission_origin,
    loss_reason,
    missing_reason,
    preemption_reason,
    restored_locations,
    start_kind,
    storage_usage,
)
from kvad.inspection.trace_report import (
    STATES,
    BlockUse,
    GroupReport,
    GroupTrace,
    Reason,
    SequenceEventRecord,
    SequenceReport,
    StateChange,
    StepSpan,
    TraceReport,
    TraceStep,
)
from kvad.model_input import AttentionPattern, TokenPositions

NAMES = tuple(STATES)  # a state's code is its index here
HOT, SHARED, QUANTIZED, SUMMARIZED, OFFLOADED, SWAPPED, EVICTED, UNWRITTEN = range(len(NAMES))


class ReadableBlocks(NamedTuple):
    """Blocks of a group that a sequence can read.

    ``blocks``; ``refs``: how many sequences reference each; ``held``: the positions in their slots ([S]; by layer
    [K, S] if heads differ).
    """

    blocks: tuple[int, ...]
    refs: tuple[int, ...]
    held: Tensor | dict[int, Tensor]


class SequenceTrace:
    """Trace of one sequence.

    ``codes``: per token group, [lines, positions] of states; ``before``: the codes at its last preemption; ``changes``:
    per line; ``origin``: of its last admission.
    """

    def __init__(
        self, number: int, row: scheduling.sequence.TokenSequence, origin: TokenOrigin, lines: Sequence[int]
    ) -> None:
        self.number, self.row, self.origin = number, row, origin
        self.claimed = origin.tokens if origin.source == "found" else 0
        self.restored = origin.tokens if origin.source == "restored" else 0
        self.codes = [torch.empty((count, 0), dtype=torch.uint8) for count in lines]
        self.before = self.codes
        self.changes: list[list[list[StateChange]]] = [[[] for _ in range(count)] for count in lines]
        self.mass: dict[int, Tensor] = {}
        self.tables: list[ReadableBlocks] = []
        self.published: set[tuple[int, int]] = set()
        self.life: list[SequenceEventRecord] = []
        self.swapped, self.known = False, 0
        self.finish: str | None = None
        self.error: str | None = None

    def grow(self, index: int, length: int) -> Tensor:
        codes = self.codes[index]
        if codes.shape[1] < length:
            more = codes.new_full((codes.shape[0], length - codes.shape[1]), UNWRITTEN)
            codes = self.codes[index] = torch.cat((codes, more), dim=1)
        return codes

    def record(self, index: int, line: int, change: StateChange) -> None:
        """Record a change; equal changes of neighboring positions are merged."""
        changes = self.changes[index][line]
        before = changes[-1] if changes else None
        if before is not None and before == change._replace(first=before.first, last=change.first - 1):
            changes[-1] = before._replace(last=change.last)
        else:
            changes.append(change)


def scatter_by_position(held: Tensor, mass: Tensor, end: int) -> Tensor:
    """Scatter mass [K, S] of slots that hold positions [K, S] -> [K, end] by position."""
    known = (held >= 0) & (held < end)
    got = mass.new_zeros(mass.shape[0], end + 1)
    return got.scatter_add_(1, held.masked_fill(~known, end), mass * known)[:, :end]


def spread_summaries(got: Tensor, positions: Tensor, ratio: int) -> None:
    """Distribute the mass of a summary evenly over its tokens.

    ``positions``: those of the summaries.
    """
    if ratio == 1:
        return
    for middle in positions[positions >= 0].tolist():
        first = middle // ratio * ratio
        got[:, first : first + ratio] = got[:, middle : middle + 1].clone() / ratio


def states_by_position(held: Tensor, states: Tensor, end: int) -> Tensor:
    """Scatter states [n, S] of slots that hold positions [n, S] -> [n, end].

    Evicted if no slot has the position.
    """
    known = (held >= 0) & (held < end)
    codes = torch.full((held.shape[0], end + 1), EVICTED, dtype=torch.uint8)
    return codes.scatter_(1, held.masked_fill(~known, end), states)[:, :end]


def evicted_positions(cut: EvictionEvent, head: int, policy: str, step: int) -> dict[int, Reason]:
    """Return the reasons of an eviction by position."""
    ranks, positions, stays = cut.scores[head], cut.positions[head].tolist(), set(cut.order[head].tolist())
    places = {slot: place for place, slot in enumerate(ranks.sort(descending=True, stable=True).indices.tolist(), 1)}
    scores, length, held = ranks.tolist(), cut.op.length, len(positions)
    judged = [scores[slot] for slot in stays if scores[slot] != float("inf")]
    least = min(judged) if judged else None
    reasons = {}
    for slot, at in enumerate(positions):
        if slot in stays:
            continue
        place = places[slot]
        ranked = f"score {scores[slot]:.4g}, rank {place} of {held} ({place / held:.0%})"
        stayed = "only sinks and recent ones stayed" if least is None else f"the last that stayed has {least:.4g}"
        text = f"dropped at step {step} by {policy} at length {length}: {ranked}; {stayed}"
        reasons[at] = Reason("score", text, length, scores[slot], place, held, least)
    return reasons


def _attention_share(held: Tensor, mass: Tensor, known: int, ratio: int) -> tuple[float, set[int]]:
    """Return the share of a layer's attention [K, T] of the tokens in these slots ([S] or [K, S]), and the tokens."""
    got, found = 0.0, set[int]()
    for head, total in enumerate(mass.tolist()):
        here = held[head] if held.dim() == 2 else held
        first = [at // ratio * ratio for at in here.tolist() if 0 <= at < known]
        tokens = [at + more for at in first for more in range(ratio)]
        got += sum(total[at] for at in tokens)
        found.update(tokens)
    whole = float(mass.sum())
    return (got / whole if whole else 0.0), found


def readable_blocks(row: SequenceTrace, groups: Sequence[CacheGroup]) -> list[BlockUse]:
    """Return the blocks that the sequence could read after its last step."""
    made = []
    for index, table in enumerate(row.tables):
        group = groups[index]
        ratio, size = 1 if group.lower_level is None else group.lower_level.ratio, group.block_size
        for place, (block, refs) in enumerate(zip(table.blocks, table.refs, strict=True)):
            here = slice(place * size, (place + 1) * size)
            shares, every = [], set[int]()
            for layer in group.layers:
                held = table.held[layer][:, here] if isinstance(table.held, dict) else table.held[here]
                share, found = _attention_share(held, row.mass[layer], row.known, ratio)
                shares.append(share)
                every |= found
            ends = (min(every), max(every)) if every else (-1, -1)
            published = (index, block) in row.published
            taken = int((held >= 0).any(0).sum()) if held.dim() == 2 else int((held >= 0).sum()) * ratio
            made.append(BlockUse(index, block, taken, *ends, refs, published, tuple(shares)))
    return made


STATE_SIGNS = "".join(STATES.values())


def trace_requests(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    model: str = "",
    piece: Callable[[int], str] = str,
    resume: SequenceState | None = None,
    session: str = "",
) -> TraceReport:
    """Run ``prompts`` to their end, each submitted at the first token of the one before, so it can find its blocks.

    Args:
        resume: State of an earlier request, from ``session``; every prompt continues from its common prefix.

    Raises:
        RequestError: For a model other than a decoder, a mesh, or a prompt that the engine refuses.
        EngineError: If the engine is busy.
    """
    if engine.model.config.kind != "decoder":
        raise RequestError(f"an {engine.model.config.kind} has no cache trace", "Use a decoder.")
    if not engine.idle:
        raise EngineError("the engine is busy: other requests would be in the trace")
    with CacheTracer(engine, resume, session) as recorder:
        waiting, latest = list(prompts), -1
        spoken = {latest}  # requests with output
        while waiting or not engine.idle:
            if waiting and latest in spoken:
                latest = engine.add_request(waiting.pop(0), sampling, resume=resume)
            pieces = engine.step()
            recorder.on_outputs(pieces)
            spoken |= {each.request for each in pieces}
        return recorder.report(model, piece)


class _Runner(ModelRunner):
    """Reports each scheduler output to a tracer."""

    def __init__(self, runner: ModelRunner, recorder: CacheTracer) -> None:
        super().__init__(runner.model, runner.cache)
        self.buffers, self.recorder = runner.buffers, recorder

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> Tensor:
        self.recorder.on_scheduled(plan)
        logits = super().execute(plan)
        self.recorder.on_executed(plan)
        return logits


class CacheTracer:
    """``with CacheTracer(engine) as recorder`` records every step until the end of the block.

    ``left``: state that requests resume from, of ``session``. RequestError for a mesh of several ranks.
    """

    def __init__(self, engine: Engine, left: SequenceState | None = None, session: str = "") -> None:
        if engine.kv_cache.ranks > 1:
            raise RequestError(
                f"a mesh of {engine.kv_cache.ranks} ranks cannot be traced: each has its own heads and layers",
                "Use one process; the states of tokens are the same there.",
            )
        self.engine, self.memory, self.kv_cache_manager = engine, engine.kv_cache, engine.kv_cache_manager
        self.own = self.kv_cache_manager.token_groups
        self.below = [
            [
                n
                for n, group in enumerate(self.memory.groups)
                if group.lower_level is not None and group.lower_level.token_group == index
            ]
            for index in range(len(self.own))
        ]
        self.group_of = {layer: index for index, group in enumerate(self.own) for layer in group.layers}
        self.policies = [self._policy(group) for group in self.own]
        self.rows: dict[tuple[int, int], SequenceTrace] = {}
        self.steps: list[TraceStep] = []
        self.step = 0
        self.plan: SchedulerOutput | None = None
        self.evictions: dict[tuple[int, int], EvictionEvent] = {}  # of this step, by sequence index and layer
        self.left, self.session = left, f"session {session}" if session else "what an earlier request left"
        self.moved: list[
            tuple[scheduling.sequence.TokenSequence, scheduling.preemption.PreemptionRecord]
        ] = []  # since the last step
        self._latest: list[SequenceTrace] = []
        self._before = engine.runner, engine.kv_cache.attention_hook, engine.kv_cache.eviction_hook

    def __enter__(self) -> CacheTracer:
        self.memory.attention_hook, self.memory.eviction_hook = self.on_attention, self.on_eviction
        self.engine.runner = _Runner(self.engine.runner, self)
        self.engine.preemption.preemption_hook = lambda row, swapped: self.moved.append((row, swapped))
        if self.kv_cache_manager.prefix_offload is not None:
            self.kv_cache_manager.prefix_offload.results = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.engine.runner, self.memory.attention_hook, self.memory.eviction_hook = self._before
        self.engine.preemption.preemption_hook = None
        if self.kv_cache_manager.prefix_offload is not None:
            self.kv_cache_manager.prefix_offload.results = None

    def _policy(self, group: CacheGroup) -> str:
        """Return the name of the policy of these layers."""
        cache, layer = self.engine.cache, group.layers[0]
        layer_policy = attention_specs(self.engine.model.config)[layer]
        if layer_policy.window is not None and group.spec.window == layer_policy.window:
            return f"the layer's own window of {layer_policy.window}"
        return str(cache.resolved_policy.for_layer(layer))

    # ------------------------------------------------------------ hooks

    def on_eviction(self, cut: EvictionEvent) -> None:
        self.evictions[cut.op.seq_index, cut.layer] = cut

    def on_attention(self, seen: ops.sub_batch.AttentionTrace) -> None:
        """Add up the attention of this step's queries by position."""
        plan, index = self.plan, self.group_of[seen.layer]
        assert plan is not None
        group, first = self.own[index], sum(sub_batch.num_seqs for sub_batch in plan.sub_batches[: seen.sub_batch])
        heads = group.spec.num_kv_heads
        mass = seen.weights.double().nan_to_num().unflatten(1, (heads, -1)).sum((2, 3)).cpu()  # [R, K, S]
        for number in range(plan.sub_batches[seen.sub_batch].num_seqs):
            work = plan.scheduled[first + number]
            end, row = work.start + work.num_tokens, self.rows[work.sequence.request_id, work.sequence.sample_index]
            if group.eviction_policy is not None:
                held = self._heads(seen.layer, plan.allocation.block_tables[index][first + number])
            else:
                held = seen.positions[number].cpu().expand(heads, -1)
            most = min(held.shape[1], mass.shape[2])
            got = scatter_by_position(held[:, :most], mass[number, :, :most], end)
            for level in self.below[index]:
                spread_summaries(
                    got, self._positions(level, plan.allocation.block_tables[level][first + number]), self._ratio(level)
                )
            before = row.mass.get(seen.layer, got.new_zeros(heads, 0))
            got[:, : before.shape[1]] += before[:, :end]
            row.mass[seen.layer] = torch.cat((got, before[:, end:]), dim=1)

    def _ratio(self, number: int) -> int:
        level = self.memory.groups[number].lower_level
        assert level is not None
        return level.ratio

    def _is_offloaded(self, number: int) -> bool:
        level = self.memory.groups[number].lower_level
        return level is not None and level.is_offloaded

    def _positions(self, number: int, blocks: Sequence[int]) -> Tensor:
        """Return [S]: the positions of a group's slots in these blocks."""
        return self.memory.positions[number][list(blocks)].flatten().cpu()

    def _heads(self, layer: int, blocks: Sequence[int]) -> Tensor:
        """Return [K, S] of a layer whose heads retain different tokens."""
        return self.memory.head_metadata[layer].positions[list(blocks)].transpose(0, 1).flatten(1).long().cpu()

    # ------------------------------------------------------------ a step

    def on_scheduled(self, plan: SchedulerOutput) -> None:
        self.step, self.plan = self.step + 1, plan
        self.evictions.clear()
        back = self._record_preemptions()
        for work in plan.scheduled:
            key = work.sequence.request_id, work.sequence.sample_index
            row = self.rows.get(key)
            if row is None or row.swapped:
                self._admit(row, work, back.get(key))

    def _record_preemptions(self) -> dict[tuple[int, int], scheduling.preemption.PreemptionRecord]:
        """Record preemptions since the last step and lost copies.

        Return the sequences that were swapped in.
        """
        back = {}
        for own, swapped in self.moved:
            key = own.request_id, own.sample_index
            row = self.rows.get(key)
            if swapped.action == "back":
                back[key] = swapped
            elif row is not None and swapped.action in ("out", "again"):
                self._record_preemption(row, swapped)
            elif row is not None:  # its copy is lost, or was discarded
                row.life.append(SequenceEventRecord(self.step, loss_reason(swapped)))
        self.moved.clear()
        return back

    def _admit(
        self, row: SequenceTrace | None, work: ScheduledSequence, swapped: scheduling.preemption.PreemptionRecord | None
    ) -> None:
        """Record the admission of a sequence, for the first time (None) or again."""
        prefix_offload, forked = (
            self.kv_cache_manager.prefix_offload,
            row is None and work.start > 0 and work.sequence.sample_index > 0,
        )
        found = (
            None
            if prefix_offload is None or prefix_offload.results is None
            else prefix_offload.results.get(work.sequence.seq_index)
        )
        way, place = start_kind(swapped, forked), "" if swapped is None else swapped.location or ""
        size = self.own[0].block_size
        origin = TokenOrigin(self.step, way, work.start, size, place, self.session, restored_locations(found))
        again, missed, nbytes = "", "", 0 if swapped is None else swapped.nbytes
        if row is None:
            count = [1 if g.eviction_policy is None else len(g.layers) * g.spec.num_kv_heads for g in self.own]
            row = self.rows[work.sequence.request_id, work.sequence.sample_index] = SequenceTrace(
                len(self.rows), work.sequence, origin, count
            )
            missed = self.engine.metrics(work.sequence.request_id).resume_miss_reason
            if way == "restored" and self.left is not None and self.left.length == work.start:
                nbytes = self.left.nbytes
        else:
            row.origin, row.swapped, again = origin, False, " again"
        row.life.append(
            SequenceEventRecord(self.step, f"admitted{again}{admission_origin(origin, found, nbytes, missed)}")
        )

    def _record_preemption(self, row: SequenceTrace, swapped: scheduling.preemption.PreemptionRecord) -> None:
        cause, text = preemption_reason(swapped, row.known)
        row.swapped, row.before = True, [codes.clone() for codes in row.codes]
        row.life.append(SequenceEventRecord(self.step, text))
        why = Reason(cause, f"{text}, at step {self.step}", row.known, source=swapped.location)
        for index, codes in enumerate(row.codes):
            lost = (codes != EVICTED) & (codes != UNWRITTEN)
            for line, at in lost.nonzero().tolist():
                row.record(index, line, StateChange(self.step, at, at, "swapped", why))
            codes[lost] = SWAPPED

    def on_executed(self, plan: SchedulerOutput) -> None:
        self.plan, self._latest = None, []
        for number, work in enumerate(plan.scheduled):
            row = self.rows[work.sequence.request_id, work.sequence.sample_index]
            row.tables = [self._table(number, plan, index) for index in range(len(self.own))]
            below = [self._table(number, plan, level) for level in range(len(self.own), len(self.memory.groups))]
            row.tables += below
            for index in range(len(self.own)):
                self._compare(row, index, work, self._codes(row, index, work))
            row.known = work.start + work.num_tokens
            self._latest.append(row)
        spans = [
            StepSpan(self.rows[w.sequence.request_id, w.sequence.sample_index].number, w.start, w.num_tokens)
            for w in plan.scheduled
        ]
        self.steps.append(
            TraceStep(self.step, tuple(spans), tuple(pool.num_live for pool in self.kv_cache_manager.pools))
        )

    def on_outputs(self, pieces: Sequence[StreamChunk]) -> None:
        """Record what an engine step published, and which sequences ended."""
        for row in self._latest:
            for index, table in enumerate(row.tables):
                known = self.kv_cache_manager.pools[index].prefixes
                row.published |= {(index, block) for block in table.blocks if known[block] is not None}
        for piece in pieces:
            row_or_none = self.rows.get((piece.request, piece.sample_index))
            if piece.finish_reason is not None and row_or_none is not None:
                row_or_none.finish, row_or_none.error = piece.finish_reason, piece.error

    def _table(self, number: int, plan: SchedulerOutput, index: int) -> ReadableBlocks:
        group, blocks = self.memory.groups[index], tuple(plan.allocation.block_tables[index][number])
        refs = tuple(self.kv_cache_manager.pools[index].refs[block] for block in blocks)
        if group.eviction_policy is not None:
            return ReadableBlocks(blocks, refs, {layer: self._heads(layer, blocks) for layer in group.layers})
        return ReadableBlocks(blocks, refs, self._positions(index, blocks))

    # ------------------------------------------------------------ states

    def _codes(self, row: SequenceTrace, index: int, work: ScheduledSequence) -> Tensor:
        """Compute [lines, end]: the state of every position, as visible to a query after the sequence's next one."""
        group, end, table = self.own[index], work.start + work.num_tokens, row.tables[index]
        state = torch.tensor([SHARED if count > 1 else HOT for count in table.refs], dtype=torch.uint8)
        state = state.repeat_interleave(group.block_size)
        if isinstance(table.held, dict):
            held = torch.cat([table.held[layer] for layer in group.layers])
            return states_by_position(held, state.expand_as(held), end)
        codes = states_by_position(table.held.unsqueeze(0), state.unsqueeze(0), end)
        found = row.origin.tokens if row.origin.source == "found" else 0
        codes[0, :found][codes[0, :found] == HOT] = SHARED
        for level in self.below[index]:
            ratio, lower = self._ratio(level), row.tables[level].held
            assert isinstance(lower, Tensor)
            lower = lower[lower >= 0]
            if ratio == 1:
                codes[0, lower] = OFFLOADED if self._is_offloaded(level) else QUANTIZED
            else:
                codes[0, (lower.unsqueeze(1) // ratio * ratio + torch.arange(ratio)).flatten()] = SUMMARIZED
        seen = AttentionPattern.from_spec(group.spec).visible(
            TokenPositions(torch.tensor([end - 1])), TokenPositions(torch.arange(end))
        )
        return codes.masked_fill(~seen, EVICTED)

    def _compare(self, row: SequenceTrace, index: int, work: ScheduledSequence, codes: Tensor) -> None:
        end = work.start + work.num_tokens
        before = row.grow(index, end)
        old = before[:, :end]
        changed = (old != codes).nonzero().tolist()
        passed = self._passed(row, index, end) if self.own[index].spec.window is not None else []
        cuts = self._ranked(index, work) if self.own[index].eviction_policy is not None else {}
        for line, at in changed:
            was, now = int(old[line, at]), int(codes[line, at])
            if now == EVICTED:
                why = self._why_left(row, index, line, at, was, work, passed, cuts)
            else:
                why = self._why_here(row, index, line, at, was, now, work)
            row.record(index, line, StateChange(self.step, at, at, NAMES[now], why))
        before[:, :end] = codes

    def _passed(self, row: SequenceTrace, index: int, end: int) -> list[int]:
        """Return per position the length at which a query could not see it for the first time, or 0."""
        first = min(row.known, end - 1)
        queries, keys = torch.arange(first, end), torch.arange(end)
        hidden = ~AttentionPattern.from_spec(self.own[index].spec).visible(
            TokenPositions(queries), TokenPositions(keys)
        ) & (queries.unsqueeze(1) >= keys)
        lengths: list[int] = torch.where(hidden.any(0), first + hidden.byte().argmax(0) + 1, 0).tolist()
        return lengths

    def _ranked(self, index: int, work: ScheduledSequence) -> dict[int, dict[int, Reason]]:
        """Return by line and position why it was evicted in this step."""
        group, reasons = self.own[index], dict[int, dict[int, Reason]]()
        policy, heads = self.policies[index], self.own[index].spec.num_kv_heads
        for place, layer in enumerate(group.layers):
            cut = self.evictions.get((work.sequence.seq_index, layer))
            for head in range(heads if cut is not None else 0):
                assert cut is not None
                reasons[place * heads + head] = evicted_positions(cut, head, policy, self.step)
        return reasons

    def _why_left(
        self,
        row: SequenceTrace,
        index: int,
        line: int,
        at: int,
        was: int,
        work: ScheduledSequence,
        passed: list[int],
        cuts: dict[int, dict[int, Reason]],
    ) -> Reason:
        policy, when = self.policies[index], f"at step {self.step}"
        if at in cuts.get(line, {}):
            return cuts[line][at]
        before = row.origin.source == "restored" and was == UNWRITTEN and at < work.start
        if passed and passed[at] and not (before and passed[at] <= work.start):
            return Reason("window", f"passed {when} by {policy} at length {passed[at]}", passed[at])
        if was == UNWRITTEN and at < work.start:
            return missing_reason(row.origin, work.start)
        if self.own[index].demotion_policy is not None:
            return Reason("dropped", f"dropped {when} at length {work.start}: {policy} keeps no more", work.start)
        return Reason("lost", f"lost {when}: no policy says why, this is a bug", work.start)

    def _why_here(
        self, row: SequenceTrace, index: int, line: int, at: int, was: int, now: int, work: ScheduledSequence
    ) -> Reason:
        when, length = f"at step {self.step}", work.start
        lower = NAMES[now] if now in (QUANTIZED, SUMMARIZED, OFFLOADED) else ""
        if was == SWAPPED and at >= work.start:
            return Reason("recomputed", f"recomputed {when}{f', {lower}' if lower else ''}", length)
        is_restored = at < work.start and row.origin.step == self.step and row.origin.source != "shared"
        if is_restored and (
            was == UNWRITTEN or (was == SWAPPED and (not lower or int(row.before[index][line, at]) == now))
        ):
            return row.origin.describe(index, at, length, lower)
        if now == OFFLOADED:
            return Reason("offloaded", f"offloaded {when} at length {length}: read back by every later query", length)
        if now == QUANTIZED:
            below = self.memory.groups[self.below[index][0]]
            stored = cache_lib.quantization.join_format_names(below.key_format, below.value_format)
            return Reason("quantized", f"quantized {when} into {stored} at length {length}", length)
        if now == SUMMARIZED:
            ratio = self._ratio(self.below[index][-1])
            first = at // ratio * ratio
            others = f"one slot for tokens {first} to {first + ratio - 1}"
            return Reason("summarized", f"summarized {when} at length {length}: {others}", length)
        if now == SHARED:
            return Reason("shared", f"shared {when}: other rows count on its block", length)
        if was == SHARED:
            return Reason("own", f"this row's own {when}", length)
        return Reason("written", f"computed {when}", length)

    # ------------------------------------------------------------ the slide

    def report(self, model: str, piece: Callable[[int], str]) -> TraceReport:
        """All that was noted so far."""
        self._record_preemptions()
        groups = []
        for group in self.memory.groups:
            form = "hot" if group.lower_level is None else "quantized" if group.lower_level.ratio == 1 else "summarized"
            form = "offloaded" if group.lower_level is not None and group.lower_level.is_offloaded else form
            index = self.group_of[group.layers[0]]
            stored, size = (
                cache_lib.quantization.join_format_names(group.key_format, group.value_format),
                group_bytes(group).total,
            )
            heads, policy = group.spec.num_kv_heads, self.policies[index]
            groups.append(
                GroupReport(form, group.layers, heads, policy, stored, group.block_size, group.num_usable_blocks, size)
            )
        cache = self.engine.cache
        every = tuple(self._row(row, piece) for row in self.rows.values())
        steps, lives = tuple(self.steps), storage_usage(self.engine, self.steps)
        return TraceReport(
            model, str(cache.resolved_policy), cache.layout, len(self.group_of), tuple(groups), steps, every, lives
        )

    def _row(self, row: SequenceTrace, piece: Callable[[int], str]) -> SequenceReport:
        tokens, lines = row.row.token_ids, []
        for index, group in enumerate(self.own):
            codes = row.grow(index, len(tokens))
            heads = group.spec.num_kv_heads
            for number, (states, changes) in enumerate(zip(codes.tolist(), row.changes[index], strict=True)):
                apart = group.eviction_policy is not None
                layers = (group.layers[number // heads],) if apart else group.layers
                head = number % heads if apart else None
                signs = "".join(STATE_SIGNS[code] for code in states)
                lines.append(GroupTrace(index, layers, head, signs, tuple(changes)))
        lines.sort(key=lambda line: (line.layers[0], line.head or 0))
        none = torch.zeros(0)
        mass = []
        for layer in sorted(self.group_of):
            got = row.mass.get(layer, none.expand(self.own[self.group_of[layer]].spec.num_kv_heads, 0))
            padded = torch.nn.functional.pad(got, (0, len(tokens) - got.shape[1]))
            mass.append(tuple(tuple(head) for head in padded.tolist()))
        return SequenceReport(
            request=row.row.request_id,
            sample=row.row.sample_index,
            prompt=row.row.num_prompt_tokens,
            num_prefix_hits=row.claimed,
            tokens=tuple(tokens),
            pieces=tuple(piece(token) for token in tokens),
            finish=row.finish,
            error=row.error,
            lines=tuple(lines),
            blocks=tuple(readable_blocks(row, self.memory.groups)),
            attention_mass=tuple(mass),
            events=tuple(row.life),
            restored=row.restored,
        )
