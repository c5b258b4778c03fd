"""Every memory against its judge: is what comes out of the cache what the model would have said without it?

The judge is the same model with :class:`kvad.model.fresh.Fresh`, each row computed whole.  Every memory runs the same
rows through the real path (:mod:`kvad.lab.replay`), in the scenario of :mod:`kvad.lab.scenario`, and the logits of
every position that was computed, recomputed ones included, are laid beside the judge's.  The rules of the verdicts are
those of :mod:`kvad.lab.findings`; a broken memory is diagnosed by :mod:`kvad.lab.diagnose`.

Weights are taken as stored and computed with in float32 and float64; a half precision is a way to *store* keys and
values here, as it is on a CPU.  Each memory is held against what it promises:

* a policy that goes by position, by the model whose layers see as little;
* a lossy format (fp8, int8, int4), by the model whose keys and values go through it (:mod:`kvad.lab.rounded`);
* a policy that ranks or summarises, by each row's own solo run, and until its first cut by the model.

What is lost by it, beside the model that keeps everything, is a number (:mod:`kvad.lab.loss`), not a verdict.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from kvad.cache.formats import parted
from kvad.cache.ledger import Ledger
from kvad.cache.sizing import CacheConfig, groups
from kvad.config import MixerSpec, mixers
from kvad.errors import ConfigError, EngineError, EntryError, RequestError, UsageError
from kvad.lab.asked import Asked, first_cut, refusal
from kvad.lab.compare import Comparison, compare, loss_of, tolerance
from kvad.lab.diagnose import diagnose
from kvad.lab.faults import check_fault, hurt_memory, hurt_model
from kvad.lab.findings import (
    EXACT,
    POLICY_RULES,
    RULES,
    THROUGH_RULES,
    Finding,
    Journey,
    Loss,
    MemoryReport,
    Report,
    Skipped,
    Verdict,
)
from kvad.lab.loss import Needles, loss_beside
from kvad.lab.replay import Key, MakeCache, Replayed, Stream, replay, uncached
from kvad.lab.room import require_room
from kvad.lab.rounded import Rounded
from kvad.lab.scenario import Options, cache_of, check_happened, make_streams, outline, squeezes
from kvad.lab.tasks import Language
from kvad.lab.through import WAYS, check_way, through
from kvad.model.fresh import Fresh
from kvad.model.transformer import Transformer
from kvad.step import Memory

__all__ = ["Comparison", "Options", "compare", "require_room", "tolerance", "verify"]


def verify(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    options: Options | None = None,
    *,
    fault: str | None = None,
    language: Language | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Hold every memory of ``options`` against its judge; those that cannot be are skipped, and said.

    ``fault``: put a broken memory in place of the real one; ``language``: what needles are hidden in.  UsageError:
    prompts or a fault that cannot be, or no memory that can; EngineError: a scenario that was asked for did not take
    place, or an injected fault that went unnoticed.
    """
    began = time.perf_counter()
    options = options or Options()
    for way in options.through:
        check_way(way)
    if fault is not None and options.through:
        raise UsageError("--break and --through: a fault is put into a memory that no row leaves", "take one of them")
    run = _Run(model, prompts, options, fault, language, progress)
    memories = tuple(run.memory(asked) for asked in run.asked)
    journeys = tuple(run.journey(asked, way) for asked in run.asked for way in options.through)
    report = Report(
        rows=tuple(len(s.tokens(i)) for s in run.streams for i in range(len(s.forced))),
        positions=sum(len(t) for t in run.judge(run.double).values()),
        logit_scale=run.scale,
        injected=fault,
        memories=memories,
        notes=tuple(run.notes()),
        seconds=time.perf_counter() - began,
        rules=RULES + POLICY_RULES * (not all(each.keeps for each in run.asked)) + THROUGH_RULES * bool(journeys),
        skipped=tuple(run.skipped),
        journeys=journeys,
    )
    if fault is not None and not report.broken:
        raise EngineError(f"the injected fault {fault!r} changed nothing here", "give longer prompts or more --tokens")
    return report


class _Run:
    """The judges' answers, and the replays of every memory."""

    def __init__(
        self,
        model: Transformer,
        prompts: Sequence[Sequence[int]],
        options: Options,
        fault: str | None,
        language: Language | None,
        progress: Callable[[str], None],
    ) -> None:
        self.options, self.fault, self.language, self.progress = options, fault, language, progress
        self.config = model.config
        self.asked, self.skipped = self._possible(prompts)
        self.single = model if model.table.dtype == torch.float32 else copy.deepcopy(model).float()
        self.double = copy.deepcopy(model).double()
        progress("the judge")
        self.streams = make_streams(self.single, prompts, options)
        if fault is not None:
            for asked in self.asked:
                check_fault(fault, self.config, self.cache(asked.twin))
        self._judges: dict[tuple[object, ...], dict[Key, Tensor]] = {}
        self._twins: dict[Asked, tuple[Replayed, float, str]] = {}
        self._findings: dict[Asked, Finding | None] = {}
        self._needles: Needles | None = None
        self._policy = "full"
        self.scale = max(float(logits.abs().max()) for logits in self.judge(self.double).values())

    def _possible(self, prompts: Sequence[Sequence[int]]) -> tuple[list[Asked], list[Skipped]]:
        """What can be, and why the others cannot.  ConfigError, of the first, where nothing can."""
        if self.config.decoder is None:
            return self.options.asked, []  # make_streams says it
        rows = outline(self.config, prompts, self.options)
        found, skipped, first = [], [], None
        for asked in self.options.asked:
            error = refusal(self.config, asked, partial(cache_of, self.config, rows, self.options))
            if error is None:
                found.append(asked)
                continue
            first = first or error
            skipped.append(Skipped(asked.name, error.message + (f"; {error.hint}" if error.hint else "")))
        if not found:
            assert first is not None
            raise ConfigError(first.message, first.hint)
        return found, skipped

    def cache(self, asked: Asked) -> CacheConfig:
        return cache_of(self.config, self.streams, self.options, asked)

    # ------------------------------------------------------------ judges

    def judge(
        self,
        model: Transformer,
        specs: Sequence[MixerSpec] | None = None,
        asked: Asked | None = None,
    ) -> dict[Key, Tensor]:
        """[T, V] of each row without a cache.  ``specs``: the layers under a policy; ``asked``: through its formats."""
        plain = mixers(self.config)
        specs = plain if specs is None else tuple(specs)
        endless = self.options.endless and specs != plain
        name = (model is self.double, specs, asked and (asked.dtype, asked.rotate))
        if name not in self._judges:
            if name[1:] != (plain, None):
                self.progress("the judge" + (f" of {asked.name}" if asked else " under the policy"))
            memory: Memory = Fresh(self.config, specs=specs, exact=endless)
            if asked is not None:
                turned = self.cache(asked).rotate
                memory = Rounded(memory, *parted(asked.dtype), rotate=turned, exact=asked.endless)
            self._judges[name] = {
                (number, sample): uncached(model, stream.tokens(sample), stream.limit, memory, stream.source)
                for number, stream in enumerate(self.streams)
                for sample in range(len(stream.forced))
            }
        return self._judges[name]

    def _turn_to(self, policy: str) -> None:
        """Forget what only the policy before needed."""
        if policy == self._policy:
            return
        self._policy, plain = policy, mixers(self.config)
        self._judges = {name: kept for name, kept in self._judges.items() if name[1:] == (plain, None)}
        self._twins.clear()

    # ------------------------------------------------------------ one memory

    def memory(self, asked: Asked) -> MemoryReport:
        began = time.perf_counter()
        self._turn_to(asked.policy)
        cache = self.cache(asked)
        specs, cut = cache.narrowed(mixers(self.config)), first_cut(groups(mixers(self.config), cache))
        twin, structure, why = self._twin(asked, specs, cut)
        noise = structure if structure <= EXACT else 0.0  # what is broken excuses nothing
        bound = tolerance(asked.dtype, self.scale, noise)
        model = self.double if asked.dtype == "float64" else self.single
        replayed = twin if asked.dtype == "float64" else self._replay(asked, model)
        found = compare(replayed, self.judge(model, specs), 2 * bound)
        if loss_of(asked.dtype) == "lossy":
            coded, other = self._structure(asked, specs, cut, asked)[1:]
            structure, why = max(structure, coded), why or other
        young = found if cut is None else compare(replayed, self.judge(model, specs), 2 * bound, cut)
        verdict, finding = self._verdict(asked, structure, found, young, bound, cut)
        flips = found.divergences
        return MemoryReport(
            layout=asked.layout,
            dtype=asked.dtype,
            max_dlogit=found.max_dlogit,
            tolerance=bound,
            structure=structure,
            kl_mean=found.kl_mean,
            kl_max=found.kl_max,
            agree=found.compared - len(flips),
            compared=found.compared,
            ties=sum(flip.tie for flip in flips),
            first_divergence=flips[0] if flips else None,
            verdict=verdict,
            seconds=time.perf_counter() - began,
            happened=dataclasses.asdict(replayed.happened),
            finding=finding,
            policy=asked.policy,
            rotate=asked.rotate,
            endless=asked.endless,
            loss=None if asked.keeps and loss_of(asked.dtype) != "lossy" else self._lost(asked, replayed, model, bound),
            why=why if verdict == "BROKEN" and finding is None else "",
        )

    def _twin(self, asked: Asked, specs: Sequence[MixerSpec], cut: int | None) -> tuple[Replayed, float, str]:
        """The same memory in float64, which judges the structure."""
        if asked.twin not in self._twins:
            self._twins[asked.twin] = self._structure(asked.twin, specs, cut, None)
        return self._twins[asked.twin]

    def _structure(
        self, asked: Asked, specs: Sequence[MixerSpec], cut: int | None, through: Asked | None
    ) -> tuple[Replayed, float, str]:
        """A memory that is computed with in float64: its run, how far it is from what it promises, and from which."""
        replayed = self._replay(asked, self.double)
        off = compare(replayed, self.judge(self.double, specs, through), 2 * EXACT, cut).max_dlogit
        if cut is None:
            return replayed, off, ""
        alone = self._alone(asked, replayed)
        if alone > EXACT:
            return replayed, max(off, alone), f"a row differs by {alone:.2e} from the same row alone, in other chunks"
        return replayed, off, f"a row differs by {off:.2e} from the judge before anything was dropped"

    def _alone(self, asked: Asked, company: Replayed) -> float:
        """max |dlogit| of rows in company, from the same rows alone: in other chunks, with room, never preempted."""
        largest = 0.0
        chunk = max(1, self.options.chunk // 3 - 1)
        cache = dataclasses.replace(self.cache(asked), rows=1, chunk=chunk, blocks=None, prefix=False)
        for (number, sample), pieces in company.pieces.items():
            self.progress(f"{asked.name}: row {number} alone")
            stream = self.streams[number]
            alone = Stream(stream.prompt, (stream.forced[sample],), source=stream.source)
            with hurt_model(self.fault, self.double):
                solo = replay(self.double, cache, [alone], make=self._make(cache))
            largest = max(largest, compare(Replayed({(0, 0): pieces}), {(0, 0): solo.logits(0)}, 0.0).max_dlogit)
        return largest

    def _replay(self, asked: Asked, model: Transformer) -> Replayed:
        self.progress(asked.name)
        cache = self.cache(asked)
        with hurt_model(self.fault, model):
            replayed = replay(model, cache, self.streams, squeezes=squeezes(self.options), make=self._make(cache))
        shares = Ledger(groups(mixers(self.config), cache), prefix=cache.prefix, seats=cache.rows).prefix
        check_happened(replayed.happened, self.streams, self.options, asked.layout, shares)
        return replayed

    def _make(self, cache: CacheConfig) -> MakeCache:
        return partial(hurt_memory, self.fault, rotate=cache.rotate, exact=cache.endless)

    def _lost(self, asked: Asked, replayed: Replayed, model: Transformer, bound: float) -> Loss:
        before = self.config.limit if asked.endless else None
        lost = loss_beside(replayed, self.judge(model), self.streams, 2 * bound, before)
        if self.fault is not None:
            return lost
        if self._needles is None:
            self.progress("needles, for the full cache")
            length = min(self.config.limit, max(stream.limit for stream in self.streams))
            self._needles = Needles(copy.deepcopy(self.single), self.language, length)  # an engine packs its weights
        self.progress(f"{asked.name}: needles")
        return dataclasses.replace(lost, recall=self._needles.recall(self.cache(asked)))

    # ------------------------------------------------------------ leaving and coming back

    def journey(self, asked: Asked, way: str) -> Journey:
        """A memory whose rows are sent that way, in float64, beside what it promises of rows that stay."""
        self._turn_to(asked.policy)
        self.progress(f"{asked.name} through {way}")
        cache = dataclasses.replace(self.cache(asked), blocks=None)
        specs, cut = cache.narrowed(mixers(self.config)), first_cut(groups(mixers(self.config), cache))
        unit = WAYS[way].moved
        with tempfile.TemporaryDirectory(prefix="kvad-verify-") as folder:
            try:
                went = through(way, self._engines, cache, self.streams, Path(folder))
            except (ConfigError, RequestError, EntryError) as error:
                why = (error.message + (f"; {error.hint}" if error.hint else "")).replace(f"{folder}/", "")
                return Journey(asked.name, way, None, 0, unit, "skipped", why)
        judge = self.judge(self.double, specs, None if asked.dtype == "float64" else asked)
        judge = {key: judge[key] for key in went.replayed.pieces}
        off = compare(went.replayed, judge, 2 * EXACT, cut).max_dlogit
        if cut is not None:
            off = max(off, self._alone(asked, went.replayed))
        if not off <= EXACT:
            return Journey(asked.name, way, off, went.moved, unit, "BROKEN", went.missed)
        return Journey(asked.name, way, off, went.moved, unit, "exact" if went.moved else "computed again", went.missed)

    @cached_property
    def _engines(self) -> Transformer:
        """An engine packs its weights."""
        return copy.deepcopy(self.double)

    # ------------------------------------------------------------ verdicts

    def _verdict(
        self, asked: Asked, structure: float, found: Comparison, young: Comparison, bound: float, cut: int | None
    ) -> tuple[Verdict, Finding | None]:
        """``young``: over the positions before anything was dropped; all of them, under a policy that drops nothing."""
        if not structure <= EXACT:
            return "BROKEN", self._structural(asked, cut)
        loss = loss_of(asked.dtype)
        if loss == "lossy" and math.isfinite(found.max_dlogit):
            return "lossy by design", None
        within = young.max_dlogit <= bound and all(flip.tie for flip in young.divergences)
        if loss == "none" and not within:
            return "BROKEN", self._diagnose(asked, cut)
        if cut is not None:
            whole = math.isfinite(found.max_dlogit)
            return ("lossy by design", None) if whole else ("BROKEN", self._diagnose(asked, cut))
        if loss == "none":
            return "exact", None
        if within:
            return "within tolerance", None
        finding = self._diagnose(asked, cut)
        whole = finding is None and math.isfinite(found.max_dlogit)
        return ("lossy by design", None) if whole else ("BROKEN", finding)

    def _structural(self, asked: Asked, cut: int | None) -> Finding | None:
        twin = self._diagnose(asked.twin, cut)
        if twin is not None and twin.fault == "dtype":  # a rounding: each precision has its own
            return self._diagnose(asked, cut) or twin
        return twin if twin is not None or asked.dtype == "float64" else self._diagnose(asked, cut)

    def _diagnose(self, asked: Asked, cut: int | None) -> Finding | None:
        """A lossy policy has no judge of every number: what is wrong is looked for without the policy."""
        asked = asked if cut is None else asked.whole
        if asked not in self._findings:
            self.progress(f"{asked.name}: looking for the first difference")
            model, cache = self.double if asked.dtype == "float64" else self.single, self.cache(asked)
            build = partial(hurt_memory, self.fault, rotate=cache.rotate, exact=cache.endless)
            lossy = loss_of(asked.dtype) != "none"
            with hurt_model(self.fault, model):
                self._findings[asked] = diagnose(
                    model, cache, self.streams, build, squeezes=squeezes(self.options), lossy=lossy
                )
        return self._findings[asked]

    def notes(self) -> list[str]:
        """What a reader should know about what was not, or could not be, tested."""
        notes = []
        longest = max(stream.limit for stream in self.streams)
        for window in sorted({spec.window for spec in mixers(self.config) if spec.window is not None}):
            if longest <= window:
                notes.append(f"no row of up to {longest} tokens passes the window of {window}: give a longer --prompt")
        for asked in {asked.policy: asked for asked in self.asked if not asked.keeps}.values():
            notes += _unseen(asked, self.cache(asked), mixers(self.config), longest)
        if self.options.endless and longest <= self.config.limit:
            notes.append(f"no row of up to {longest} tokens passes the model's limit of {self.config.limit}")
        if self.options.prefix_hit and "contiguous" in self.options.layouts:
            notes.append("contiguous: a row is one block, so there are no prefix hits to verify")
        if self._needles is not None and self._needles.why:
            notes.append(f"recall is not measured: {self._needles.why}")
        return notes


def _unseen(asked: Asked, cache: CacheConfig, plain: Sequence[MixerSpec], longest: int) -> list[str]:
    """A policy that no row was long enough for."""
    cut = first_cut(groups(plain, cache))
    windows = [spec.window + spec.sinks for spec in cache.narrowed(plain) if spec.window is not None]
    least = min([*windows, *([] if cut is None else [cut])], default=0)
    if longest <= least:
        return [f"{asked.policy} keeps all of a row of up to {longest} tokens: give a longer --prompt"]
    return []
