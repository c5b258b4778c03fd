"""The cache microscope: run prompts on a real engine and note what becomes of every token, and why.

Nothing is computed a second time, and nothing of it is in an engine that runs unwatched.  A :class:`Recorder` attaches
itself to five seams: the memory's probe (attention), its witness (ranks of a cut), the runner (a step's plan), what the
tiers have brought (``Deposits.found``), and the witness of rows that give way (``Swaps``).
After each step it reads what *is* in the memory, its positions and those of its heads, and lays it beside what was
there before; a change is explained by what the step's moves, masks and ranks say.  It waits for the device at every
layer, and weights take the kernel that shows them: watched runs are slow, and say the same.

What comes out is a ``slide.Slide``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

import torch
from torch import Tensor

from kvad.cache.cuts import Cut
from kvad.cache.formats import joined
from kvad.cache.sizing import Group, group_bytes
from kvad.cache.state import State
from kvad.config import mixers
from kvad.engine import row as rows
from kvad.engine.engine import Engine, Piece
from kvad.engine.request import Sampling
from kvad.engine.runner import Runner
from kvad.engine.scheduler import Plan, Work
from kvad.engine.swaps import Swapped
from kvad.errors import EngineError, RequestError
from kvad.lab.noted import (
    AWAY,
    EVICTED,
    HOT,
    NAMES,
    PACKED,
    SHARED,
    SPILLED,
    SUMMARISED,
    UNWRITTEN,
    Noted,
    Table,
    blocks_of,
    dropped,
    laid,
    scattered,
    spread,
)
from kvad.lab.places import places
from kvad.lab.slide import STATES, Change, Level, Life, Line, Row, Slide, Span, Step, Why
from kvad.lab.whence import Origin, away, begun, fell, kept_of, left_why, seated
from kvad.ops.lanes import Seen
from kvad.step import Mark, Reach

__all__ = ["Recorder", "examine"]

SIGNS = "".join(STATES.values())


def examine(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    model: str = "",
    piece: Callable[[int], str] = str,
    resume: State | None = None,
    session: str = "",
) -> Slide:
    """Run ``prompts`` to their end, each from when the one before has its first token, so that it can find its blocks.

    ``resume``: what an earlier request left, of the session of this name; every prompt goes on from it, as far as it
    agrees.  RequestError for a model that is no decoder, a mesh, and a prompt that the engine refuses; EngineError if
    it is at work.
    """
    if engine.model.config.kind != "decoder":
        raise RequestError(f"an {engine.model.config.kind} cannot be examined yet", "examine a decoder")
    if not engine.idle:
        raise EngineError("the engine is at work: what others ask of it would be on the slide")
    with Recorder(engine, resume, session) as recorder:
        waiting, latest = list(prompts), -1
        spoken = {latest}  # requests that gave anything
        while waiting or not engine.idle:
            if waiting and latest in spoken:
                latest = engine.submit(waiting.pop(0), sampling, resume=resume)
            pieces = engine.step()
            recorder.settled(pieces)
            spoken |= {each.request for each in pieces}
        return recorder.slide(model, piece)


class _Runner(Runner):
    """Shows a recorder each plan."""

    def __init__(self, runner: Runner, recorder: Recorder) -> None:
        super().__init__(runner.model, runner.cache)
        self.buffers, self.recorder = runner.buffers, recorder

    @torch.inference_mode()
    def run(self, plan: Plan) -> Tensor:
        self.recorder.begin(plan)
        logits = super().run(plan)
        self.recorder.end(plan)
        return logits


class Recorder:
    """``with Recorder(engine) as recorder``: every step until the end of the block is noted.  ``left``: what requests
    are submitted with to go on from, of the session of this name.  RequestError for a mesh of several ranks."""

    def __init__(self, engine: Engine, left: State | None = None, session: str = "") -> None:
        if engine.memory.ranks > 1:
            raise RequestError(
                f"a mesh of {engine.memory.ranks} ranks cannot be examined: each sees its own heads and layers alone",
                "examine one process: what becomes of a token is the same there",
            )
        self.engine, self.memory, self.ledger = engine, engine.memory, engine.ledger
        self.own = self.ledger.own
        self.below = [
            [n for n, group in enumerate(self.memory.groups) if group.level is not None and group.level.of == index]
            for index in range(len(self.own))
        ]
        self.group_of = {layer: index for index, group in enumerate(self.own) for layer in group.layers}
        self.policies = [self._policy(group) for group in self.own]
        self.rows: dict[tuple[int, int], Noted] = {}
        self.steps: list[Step] = []
        self.step = 0
        self.plan: Plan | None = None
        self.cuts: dict[tuple[int, int], Cut] = {}  # of this step, by seat and layer
        self.left, self.session = left, f"session {session}" if session else "what an earlier request left"
        self.moved: list[tuple[rows.Row, Swapped]] = []  # since the last step
        self._latest: list[Noted] = []
        self._before = engine.runner, engine.memory.probe, engine.memory.witness

    def __enter__(self) -> Recorder:
        self.memory.probe, self.memory.witness = self.probe, self.cut
        self.engine.runner = _Runner(self.engine.runner, self)
        self.engine.swaps.witness = lambda row, swapped: self.moved.append((row, swapped))
        if self.ledger.deposits is not None:
            self.ledger.deposits.found = {}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.engine.runner, self.memory.probe, self.memory.witness = self._before
        self.engine.swaps.witness = None
        if self.ledger.deposits is not None:
            self.ledger.deposits.found = None

    def _policy(self, group: Group) -> str:
        """What decides in these layers, in words."""
        cache, layer = self.engine.cache, group.layers[0]
        theirs = mixers(self.engine.model.config)[layer]
        if theirs.window is not None and group.mixer.window == theirs.window:
            return f"the layer's own window of {theirs.window}"
        return str(cache.kept.at(layer))

    # ------------------------------------------------------------ what is shown

    def cut(self, cut: Cut) -> None:
        self.cuts[cut.compact.row, cut.layer] = cut

    def probe(self, seen: Seen) -> None:
        """Who got how much of the attention of this step's queries, by position."""
        plan, index = self.plan, self.group_of[seen.layer]
        assert plan is not None
        group, first = self.own[index], sum(lane.rows for lane in plan.lanes[: seen.lane])
        heads = group.mixer.kv_heads
        mass = seen.weights.double().nan_to_num().unflatten(1, (heads, -1)).sum((2, 3)).cpu()  # [R, K, S]
        for number in range(plan.lanes[seen.lane].rows):
            work = plan.work[first + number]
            end, row = work.start + work.count, self.rows[work.row.request, work.row.sample]
            if group.scored is not None:
                held = self._heads(seen.layer, plan.placed.tables[index][first + number])
            else:
                held = seen.positions[number].cpu().expand(heads, -1)
            most = min(held.shape[1], mass.shape[2])
            got = scattered(held[:, :most], mass[number, :, :most], end)
            for level in self.below[index]:
                spread(got, self._positions(level, plan.placed.tables[level][first + number]), self._ratio(level))
            before = row.mass.get(seen.layer, got.new_zeros(heads, 0))
            got[:, : before.shape[1]] += before[:, :end]
            row.mass[seen.layer] = torch.cat((got, before[:, end:]), dim=1)

    def _ratio(self, number: int) -> int:
        level = self.memory.groups[number].level
        assert level is not None
        return level.ratio

    def _spilled(self, number: int) -> bool:
        level = self.memory.groups[number].level
        return level is not None and level.spilled

    def _positions(self, number: int, blocks: Sequence[int]) -> Tensor:
        """[S]: of a group's slots in these blocks."""
        return self.memory.positions[number][list(blocks)].flatten().cpu()

    def _heads(self, layer: int, blocks: Sequence[int]) -> Tensor:
        """[K, S] of a layer whose heads keep others."""
        return self.memory.columns[layer].positions[list(blocks)].transpose(0, 1).flatten(1).long().cpu()

    # ------------------------------------------------------------ a step

    def begin(self, plan: Plan) -> None:
        self.step, self.plan = self.step + 1, plan
        self.cuts.clear()
        back = self._hear()
        for work in plan.work:
            key = work.row.request, work.row.sample
            row = self.rows.get(key)
            if row is None or row.away:
                self._seat(row, work, back.get(key))

    def _hear(self) -> dict[tuple[int, int], Swapped]:
        """Note who has given way since the last step, and what was lost of them; returns whose copies are back."""
        back = {}
        for own, swapped in self.moved:
            key = own.request, own.sample
            row = self.rows.get(key)
            if swapped.what == "back":
                back[key] = swapped
            elif row is not None and swapped.what in ("out", "again"):
                self._gone_away(row, swapped)
            elif row is not None:  # its copy is lost, or wanted no more
                row.life.append(Life(self.step, fell(swapped)))
        self.moved.clear()
        return back

    def _seat(self, row: Noted | None, work: Work, swapped: Swapped | None) -> None:
        """A row takes its place, for the first time (None) or again."""
        deposits, forked = self.ledger.deposits, row is None and work.start > 0 and work.row.sample > 0
        found = None if deposits is None or deposits.found is None else deposits.found.get(work.row.seat)
        way, place = begun(swapped, forked), "" if swapped is None else swapped.place or ""
        size = self.own[0].block_size
        origin = Origin(self.step, way, work.start, size, place, self.session, kept_of(found))
        again, missed, nbytes = "", "", 0 if swapped is None else swapped.nbytes
        if row is None:
            count = [1 if g.scored is None else len(g.layers) * g.mixer.kv_heads for g in self.own]
            row = self.rows[work.row.request, work.row.sample] = Noted(len(self.rows), work.row, origin, count)
            missed = self.engine.usage(work.row.request).missed
            if way == "restored" and self.left is not None and self.left.length == work.start:
                nbytes = self.left.nbytes
        else:
            row.origin, row.away, again = origin, False, " again"
        row.life.append(Life(self.step, f"seated{again}{seated(origin, found, nbytes, missed)}"))

    def _gone_away(self, row: Noted, swapped: Swapped) -> None:
        cause, told = away(swapped, row.known)
        row.away, row.before = True, [codes.clone() for codes in row.codes]
        row.life.append(Life(self.step, told))
        why = Why(cause, f"{told}, at step {self.step}", row.known, source=swapped.place)
        for index, codes in enumerate(row.codes):
            lost = (codes != EVICTED) & (codes != UNWRITTEN)
            for line, at in lost.nonzero().tolist():
                row.note(index, line, Change(self.step, at, at, "away", why))
            codes[lost] = AWAY

    def end(self, plan: Plan) -> None:
        self.plan, self._latest = None, []
        for number, work in enumerate(plan.work):
            row = self.rows[work.row.request, work.row.sample]
            row.tables = [self._table(number, plan, index) for index in range(len(self.own))]
            below = [self._table(number, plan, level) for level in range(len(self.own), len(self.memory.groups))]
            row.tables += below
            for index in range(len(self.own)):
                self._compare(row, index, work, self._codes(row, index, work))
            row.known = work.start + work.count
            self._latest.append(row)
        spans = [Span(self.rows[w.row.request, w.row.sample].number, w.start, w.count) for w in plan.work]
        self.steps.append(Step(self.step, tuple(spans), tuple(pool.live for pool in self.ledger.pools)))

    def settled(self, pieces: Sequence[Piece]) -> None:
        """After an engine's step: what it published, and who came to an end."""
        for row in self._latest:
            for index, table in enumerate(row.tables):
                known = self.ledger.pools[index].prefixes
                row.published |= {(index, block) for block in table.blocks if known[block] is not None}
        for piece in pieces:
            row_or_none = self.rows.get((piece.request, piece.sample))
            if piece.finish is not None and row_or_none is not None:
                row_or_none.finish, row_or_none.error = piece.finish, piece.error

    def _table(self, number: int, plan: Plan, index: int) -> Table:
        group, blocks = self.memory.groups[index], tuple(plan.placed.tables[index][number])
        refs = tuple(self.ledger.pools[index].refs[block] for block in blocks)
        if group.scored is not None:
            return Table(blocks, refs, {layer: self._heads(layer, blocks) for layer in group.layers})
        return Table(blocks, refs, self._positions(index, blocks))

    # ------------------------------------------------------------ states

    def _codes(self, row: Noted, index: int, work: Work) -> Tensor:
        """[lines, end]: what is in the memory now, and may be seen by the row's next query but one's equals."""
        group, end, table = self.own[index], work.start + work.count, row.tables[index]
        state = torch.tensor([SHARED if count > 1 else HOT for count in table.refs], dtype=torch.uint8)
        state = state.repeat_interleave(group.block_size)
        if isinstance(table.held, dict):
            held = torch.cat([table.held[layer] for layer in group.layers])
            return laid(held, state.expand_as(held), end)
        codes = laid(table.held.unsqueeze(0), state.unsqueeze(0), end)
        found = row.origin.tokens if row.origin.way == "found" else 0
        codes[0, :found][codes[0, :found] == HOT] = SHARED
        for level in self.below[index]:
            ratio, lower = self._ratio(level), row.tables[level].held
            assert isinstance(lower, Tensor)
            lower = lower[lower >= 0]
            if ratio == 1:
                codes[0, lower] = SPILLED if self._spilled(level) else PACKED
            else:
                codes[0, (lower.unsqueeze(1) // ratio * ratio + torch.arange(ratio)).flatten()] = SUMMARISED
        seen = Reach.of(group.mixer).allows(Mark(torch.tensor([end - 1])), Mark(torch.arange(end)))
        return codes.masked_fill(~seen, EVICTED)

    def _compare(self, row: Noted, index: int, work: Work, codes: Tensor) -> None:
        end = work.start + work.count
        before = row.grow(index, end)
        old = before[:, :end]
        changed = (old != codes).nonzero().tolist()
        passed = self._passed(row, index, end) if self.own[index].mixer.window is not None else []
        cuts = self._ranked(index, work) if self.own[index].scored is not None else {}
        for line, at in changed:
            was, now = int(old[line, at]), int(codes[line, at])
            if now == EVICTED:
                why = self._why_left(row, index, line, at, was, work, passed, cuts)
            else:
                why = self._why_here(row, index, line, at, was, now, work)
            row.note(index, line, Change(self.step, at, at, NAMES[now], why))
        before[:, :end] = codes

    def _passed(self, row: Noted, index: int, end: int) -> list[int]:
        """For each position, the row's length when its query was the first that could not see it; 0: all could."""
        first = min(row.known, end - 1)
        queries, keys = torch.arange(first, end), torch.arange(end)
        hidden = ~Reach.of(self.own[index].mixer).allows(Mark(queries), Mark(keys)) & (queries.unsqueeze(1) >= keys)
        lengths: list[int] = torch.where(hidden.any(0), first + hidden.byte().argmax(0) + 1, 0).tolist()
        return lengths

    def _ranked(self, index: int, work: Work) -> dict[int, dict[int, Why]]:
        """By line and position, why it was dropped in this step."""
        group, told = self.own[index], dict[int, dict[int, Why]]()
        policy, heads = self.policies[index], self.own[index].mixer.kv_heads
        for place, layer in enumerate(group.layers):
            cut = self.cuts.get((work.row.seat, layer))
            for head in range(heads if cut is not None else 0):
                assert cut is not None
                told[place * heads + head] = dropped(cut, head, policy, self.step)
        return told

    def _why_left(
        self,
        row: Noted,
        index: int,
        line: int,
        at: int,
        was: int,
        work: Work,
        passed: list[int],
        cuts: dict[int, dict[int, Why]],
    ) -> Why:
        policy, when = self.policies[index], f"at step {self.step}"
        if at in cuts.get(line, {}):
            return cuts[line][at]
        before = row.origin.way == "restored" and was == UNWRITTEN and at < work.start
        if passed and passed[at] and not (before and passed[at] <= work.start):
            return Why("window", f"passed {when} by {policy} at length {passed[at]}", passed[at])
        if was == UNWRITTEN and at < work.start:
            return left_why(row.origin, work.start)
        if self.own[index].levels is not None:
            return Why("gone", f"gone {when} at length {work.start}: {policy} keeps no more", work.start)
        return Why("lost", f"lost {when}: no policy says why, this is a bug", work.start)

    def _why_here(self, row: Noted, index: int, line: int, at: int, was: int, now: int, work: Work) -> Why:
        when, length = f"at step {self.step}", work.start
        lower = NAMES[now] if now in (PACKED, SUMMARISED, SPILLED) else ""
        if was == AWAY and at >= work.start:
            return Why("again", f"computed again {when}{f', {lower}' if lower else ''}", length)
        came = at < work.start and row.origin.step == self.step and row.origin.way != "shared"
        if came and (was == UNWRITTEN or (was == AWAY and (not lower or int(row.before[index][line, at]) == now))):
            return row.origin.why(index, at, length, lower)
        if now == SPILLED:
            return Why("spilled", f"spilled {when} at length {length}: read back by every later query", length)
        if now == PACKED:
            below = self.memory.groups[self.below[index][0]]
            stored = joined(below.keys, below.values)
            return Why("packed", f"packed {when} into {stored} at length {length}", length)
        if now == SUMMARISED:
            ratio = self._ratio(self.below[index][-1])
            first = at // ratio * ratio
            others = f"one slot for tokens {first} to {first + ratio - 1}"
            return Why("summary", f"summarised {when} at length {length}: {others}", length)
        if now == SHARED:
            return Why("shared", f"shared {when}: other rows count on its block", length)
        if was == SHARED:
            return Why("own", f"this row's own {when}", length)
        return Why("written", f"computed {when}", length)

    # ------------------------------------------------------------ the slide

    def slide(self, model: str, piece: Callable[[int], str]) -> Slide:
        """All that was noted so far."""
        self._hear()
        groups = []
        for group in self.memory.groups:
            form = "hot" if group.level is None else "packed" if group.level.ratio == 1 else "summarised"
            form = "spilled" if group.level is not None and group.level.spilled else form
            index = self.group_of[group.layers[0]]
            stored, size = joined(group.keys, group.values), group_bytes(group).total
            heads, policy = group.mixer.kv_heads, self.policies[index]
            groups.append(Level(form, group.layers, heads, policy, stored, group.block_size, group.usable, size))
        cache = self.engine.cache
        every = tuple(self._row(row, piece) for row in self.rows.values())
        steps, lives = tuple(self.steps), places(self.engine, self.steps)
        return Slide(model, str(cache.kept), cache.layout, len(self.group_of), tuple(groups), steps, every, lives)

    def _row(self, row: Noted, piece: Callable[[int], str]) -> Row:
        tokens, lines = row.row.tokens, []
        for index, group in enumerate(self.own):
            codes = row.grow(index, len(tokens))
            heads = group.mixer.kv_heads
            for number, (states, changes) in enumerate(zip(codes.tolist(), row.changes[index], strict=True)):
                apart = group.scored is not None
                layers = (group.layers[number // heads],) if apart else group.layers
                head = number % heads if apart else None
                signs = "".join(SIGNS[code] for code in states)
                lines.append(Line(index, layers, head, signs, tuple(changes)))
        lines.sort(key=lambda line: (line.layers[0], line.head or 0))
        none = torch.zeros(0)
        mass = []
        for layer in sorted(self.group_of):
            got = row.mass.get(layer, none.expand(self.own[self.group_of[layer]].mixer.kv_heads, 0))
            padded = torch.nn.functional.pad(got, (0, len(tokens) - got.shape[1]))
            mass.append(tuple(tuple(head) for head in padded.tolist()))
        return Row(
            request=row.row.request,
            sample=row.row.sample,
            prompt=row.row.prompt_len,
            claimed=row.claimed,
            tokens=tuple(tokens),
            pieces=tuple(piece(token) for token in tokens),
            finish=row.finish,
            error=row.error,
            lines=tuple(lines),
            blocks=tuple(blocks_of(row, self.memory.groups)),
            mass=tuple(mass),
            life=tuple(row.life),
            restored=row.restored,
        )
