"""Every memory against its judge: is what comes out of the cache what the model would have said without it?

The judge is the same model with :class:`kvad.model.no_cache.NoCache`, each row computed whole.  Every memory runs the same
rows through the real path (:mod:`kvad.verify.replay`), in the scenario of :mod:`kvad.verify.scenario`, and the logits of
every position that was computed, recomputed ones included, are laid beside the judge's.  The rules of the verdicts are
those of :mod:`kvad.verify.report`; a broken memory is diagnosed by :mod:`kvad.verify.diagnosis`.

Weights are taken as stored and computed with in float32 and float64; a half precision is a way to *store* keys and
values here, as it is on a CPU.  Each memory is held against what it promises:

* a policy that goes by position, by the model whose layers see as little;
* a lossy format (fp8, int8, int4), by the model whose keys and values go through it (:mod:`kvad.verify.references`);
* a policy that ranks or summarises, by each row's own solo run, and until its first cut by the model.

What is lost by it, beside the model that keeps everything, is a number (:mod:`kvad.verify.references`), not a verdict.
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

from kvad import benchmarks
from kvad import cache as cache_lib
from kvad.cache import CacheConfig, build_groups
from kvad.cache.manager import KVCacheManager
from kvad.config import AttentionSpec, attention_specs
from kvad.errors import ConfigError, EngineError, RequestError, StorageError, UsageError
from kvad.model import NoCache, Transformer
from kvad.model_input import CacheProtocol
from kvad.verify.cases import MemoryCase, first_loss_length, unsupported_reason
from kvad.verify.diagnosis import diagnose
from kvad.verify.injected_faults import check_fault_name, inject_cache_fault, inject_model_fault
from kvad.verify.references import NeedleRecall, QuantizedNoCache, compare_loss
from kvad.verify.replay import (
    Comparison,
    MakeCache,
    ReplayResult,
    ReplayStream,
    SequenceKey,
    compare_logits,
    format_loss,
    replay_streams,
    run_uncached,
    tolerance,
)
from kvad.verify.report import (
    EXACT,
    POLICY_RULES,
    RULES,
    THROUGH_RULES,
    CaseReport,
    LossReport,
    MismatchFinding,
    RoundTripResult,
    SkippedCase,
    Verdict,
    VerifyReport,
)
from kvad.verify.round_trips import ROUND_TRIPS, check_round_trip, run_round_trip
from kvad.verify.scenario import (
    ScenarioOptions,
    build_streams,
    case_cache_config,
    check_scenario_counts,
    num_preemptions,
    outline_streams,
)


def verify(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    options: ScenarioOptions | None = None,
    *,
    fault: str | None = None,
    language: benchmarks.needle_tasks.HaystackLanguage | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> VerifyReport:
    """Hold every memory of ``options`` against its judge; those that cannot be are skipped, and said.

    ``fault``: put a broken memory in place of the real one; ``language``: what needles are hidden in.  UsageError:
    prompts or a fault that cannot be, or no memory that can; EngineError: a scenario that was asked for did not take
    place, or an injected fault that went unnoticed.
    """
    began = time.perf_counter()
    options = options or ScenarioOptions()
    for way in options.round_trips:
        check_round_trip(way)
    if fault is not None and options.round_trips:
        raise UsageError("--break and --through: a fault is put into a memory that no row leaves", "take one of them")
    run = _Run(model, prompts, options, fault, language, progress)
    memories = tuple(run.memory(asked) for asked in run.asked)
    journeys = tuple(run.journey(asked, way) for asked in run.asked for way in options.round_trips)
    report = VerifyReport(
        rows=tuple(len(s.tokens(i)) for s in run.streams for i in range(len(s.forced_tokens))),
        positions=sum(len(t) for t in run.judge(run.double).values()),
        logit_scale=run.scale,
        injected=fault,
        cases=memories,
        notes=tuple(run.notes()),
        seconds=time.perf_counter() - began,
        rules=RULES
        + POLICY_RULES * (not all(each.keeps_everything for each in run.asked))
        + THROUGH_RULES * bool(journeys),
        skipped=tuple(run.skipped),
        round_trips=journeys,
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
        options: ScenarioOptions,
        fault: str | None,
        language: benchmarks.needle_tasks.HaystackLanguage | None,
        progress: Callable[[str], None],
    ) -> None:
        self.options, self.fault, self.language, self.progress = options, fault, language, progress
        self.config = model.config
        self.asked, self.skipped = self._possible(prompts)
        self.single = model if model.token_embedding.dtype == torch.float32 else copy.deepcopy(model).float()
        self.double = copy.deepcopy(model).double()
        progress("the judge")
        self.streams = build_streams(self.single, prompts, options)
        if fault is not None:
            for asked in self.asked:
                check_fault_name(fault, self.config, self.cache(asked.float64_case))
        self._judges: dict[tuple[object, ...], dict[SequenceKey, Tensor]] = {}
        self._twins: dict[MemoryCase, tuple[ReplayResult, float, str]] = {}
        self._findings: dict[MemoryCase, MismatchFinding | None] = {}
        self._needles: NeedleRecall | None = None
        self._policy = "full"
        self.scale = max(float(logits.abs().max()) for logits in self.judge(self.double).values())

    def _possible(self, prompts: Sequence[Sequence[int]]) -> tuple[list[MemoryCase], list[SkippedCase]]:
        """What can be, and why the others cannot.  ConfigError, of the first, where nothing can."""
        if self.config.decoder is None:
            return self.options.cases, []  # make_streams says it
        rows = outline_streams(self.config, prompts, self.options)
        found, skipped, first = [], [], None
        for asked in self.options.cases:
            error = unsupported_reason(self.config, asked, partial(case_cache_config, self.config, rows, self.options))
            if error is None:
                found.append(asked)
                continue
            first = first or error
            skipped.append(SkippedCase(asked.name, error.message + (f"; {error.hint}" if error.hint else "")))
        if not found:
            assert first is not None
            raise ConfigError(first.message, first.hint)
        return found, skipped

    def cache(self, asked: MemoryCase) -> CacheConfig:
        return case_cache_config(self.config, self.streams, self.options, asked)

    # ------------------------------------------------------------ judges

    def judge(
        self,
        model: Transformer,
        specs: Sequence[AttentionSpec] | None = None,
        asked: MemoryCase | None = None,
    ) -> dict[SequenceKey, Tensor]:
        """[T, V] of each row without a cache.  ``specs``: the layers under a policy; ``asked``: through its formats."""
        plain = attention_specs(self.config)
        specs = plain if specs is None else tuple(specs)
        endless = self.options.endless and specs != plain
        name = (model is self.double, specs, asked and (asked.dtype, asked.rotate))
        if name not in self._judges:
            if name[1:] != (plain, None):
                self.progress("the judge" + (f" of {asked.name}" if asked else " under the policy"))
            memory: CacheProtocol = NoCache(self.config, specs=specs, exact_rope=endless)
            if asked is not None:
                turned = self.cache(asked).rope_at
                memory = QuantizedNoCache(
                    memory, *cache_lib.quantization.split_format_name(asked.dtype), rotate=turned, exact=asked.endless
                )
            self._judges[name] = {
                (number, sample): run_uncached(model, stream.tokens(sample), stream.limit, memory, stream.source)
                for number, stream in enumerate(self.streams)
                for sample in range(len(stream.forced_tokens))
            }
        return self._judges[name]

    def _turn_to(self, policy: str) -> None:
        """Forget what only the policy before needed."""
        if policy == self._policy:
            return
        self._policy, plain = policy, attention_specs(self.config)
        self._judges = {name: kept for name, kept in self._judges.items() if name[1:] == (plain, None)}
        self._twins.clear()

    # ------------------------------------------------------------ one memory

    def memory(self, asked: MemoryCase) -> CaseReport:
        began = time.perf_counter()
        self._turn_to(asked.policy)
        cache = self.cache(asked)
        specs, cut = (
            cache.restrict(attention_specs(self.config)),
            first_loss_length(build_groups(attention_specs(self.config), cache)),
        )
        twin, structure, why = self._twin(asked, specs, cut)
        noise = structure if structure <= EXACT else 0.0  # what is broken excuses nothing
        bound = tolerance(asked.dtype, self.scale, noise)
        model = self.double if asked.dtype == "float64" else self.single
        replayed = twin if asked.dtype == "float64" else self._replay(asked, model)
        found = compare_logits(replayed, self.judge(model, specs), 2 * bound)
        if format_loss(asked.dtype) == "lossy":
            coded, other = self._structure(asked, specs, cut, asked)[1:]
            structure, why = max(structure, coded), why or other
        young = found if cut is None else compare_logits(replayed, self.judge(model, specs), 2 * bound, cut)
        verdict, finding = self._verdict(asked, structure, found, young, bound, cut)
        flips = found.divergences
        return CaseReport(
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
            scenario_counts=dataclasses.asdict(replayed.happened),
            finding=finding,
            policy=asked.policy,
            rotate=asked.rotate,
            endless=asked.endless,
            loss=None
            if asked.keeps_everything and format_loss(asked.dtype) != "lossy"
            else self._lost(asked, replayed, model, bound),
            reason=why if verdict == "BROKEN" and finding is None else "",
        )

    def _twin(
        self, asked: MemoryCase, specs: Sequence[AttentionSpec], cut: int | None
    ) -> tuple[ReplayResult, float, str]:
        """The same memory in float64, which judges the structure."""
        if asked.float64_case not in self._twins:
            self._twins[asked.float64_case] = self._structure(asked.float64_case, specs, cut, None)
        return self._twins[asked.float64_case]

    def _structure(
        self, asked: MemoryCase, specs: Sequence[AttentionSpec], cut: int | None, through: MemoryCase | None
    ) -> tuple[ReplayResult, float, str]:
        """A memory that is computed with in float64: its run, how far it is from what it promises, and from which."""
        replayed = self._replay(asked, self.double)
        off = compare_logits(replayed, self.judge(self.double, specs, through), 2 * EXACT, cut).max_dlogit
        if cut is None:
            return replayed, off, ""
        alone = self._alone(asked, replayed)
        if alone > EXACT:
            return replayed, max(off, alone), f"a row differs by {alone:.2e} from the same row alone, in other chunks"
        return replayed, off, f"a row differs by {off:.2e} from the judge before anything was dropped"

    def _alone(self, asked: MemoryCase, company: ReplayResult) -> float:
        """max |dlogit| of rows in company, from the same rows alone: in other chunks, with room, never preempted."""
        largest = 0.0
        chunk = max(1, self.options.chunk // 3 - 1)
        cache = dataclasses.replace(
            self.cache(asked), max_num_seqs=1, prefill_chunk_size=chunk, num_blocks=None, enable_prefix_caching=False
        )
        for (number, sample), pieces in company.pieces.items():
            self.progress(f"{asked.name}: row {number} alone")
            stream = self.streams[number]
            alone = ReplayStream(stream.prompt, (stream.forced_tokens[sample],), source=stream.source)
            with inject_model_fault(self.fault, self.double):
                solo = replay_streams(self.double, cache, [alone], make=self._make(cache))
            largest = max(
                largest, compare_logits(ReplayResult({(0, 0): pieces}), {(0, 0): solo.logits(0)}, 0.0).max_dlogit
            )
        return largest

    def _replay(self, asked: MemoryCase, model: Transformer) -> ReplayResult:
        self.progress(asked.name)
        cache = self.cache(asked)
        with inject_model_fault(self.fault, model):
            replayed = replay_streams(
                model, cache, self.streams, squeezes=num_preemptions(self.options), make=self._make(cache)
            )
        shares = KVCacheManager(
            build_groups(attention_specs(self.config), cache),
            prefix_caching=cache.enable_prefix_caching,
            max_num_seqs=cache.max_num_seqs,
        ).prefix_caching
        check_scenario_counts(replayed.happened, self.streams, self.options, asked.layout, shares)
        return replayed

    def _make(self, cache: CacheConfig) -> MakeCache:
        return partial(inject_cache_fault, self.fault, rotate=cache.rope_at, exact=cache.endless)

    def _lost(self, asked: MemoryCase, replayed: ReplayResult, model: Transformer, bound: float) -> LossReport:
        before = self.config.max_seq_len if asked.endless else None
        lost = compare_loss(replayed, self.judge(model), self.streams, 2 * bound, before)
        if self.fault is not None:
            return lost
        if self._needles is None:
            self.progress("needles, for the full cache")
            length = min(self.config.max_seq_len, max(stream.limit for stream in self.streams))
            self._needles = NeedleRecall(
                copy.deepcopy(self.single), self.language, length
            )  # an engine packs its weights
        self.progress(f"{asked.name}: needles")
        return dataclasses.replace(lost, recall=self._needles.recall(self.cache(asked)))

    # ------------------------------------------------------------ leaving and coming back

    def journey(self, asked: MemoryCase, way: str) -> RoundTripResult:
        """A memory whose rows are sent that way, in float64, beside what it promises of rows that stay."""
        self._turn_to(asked.policy)
        self.progress(f"{asked.name} through {way}")
        cache = dataclasses.replace(self.cache(asked), num_blocks=None)
        specs, cut = (
            cache.restrict(attention_specs(self.config)),
            first_loss_length(build_groups(attention_specs(self.config), cache)),
        )
        unit = ROUND_TRIPS[way].unit
        with tempfile.TemporaryDirectory(prefix="kvad-verify-") as folder:
            try:
                went = run_round_trip(way, self._engines, cache, self.streams, Path(folder))
            except (ConfigError, RequestError, StorageError) as error:
                why = (error.message + (f"; {error.hint}" if error.hint else "")).replace(f"{folder}/", "")
                return RoundTripResult(asked.name, way, None, 0, unit, "skipped", why)
        judge = self.judge(self.double, specs, None if asked.dtype == "float64" else asked)
        judge = {key: judge[key] for key in went.replay.pieces}
        off = compare_logits(went.replay, judge, 2 * EXACT, cut).max_dlogit
        if cut is not None:
            off = max(off, self._alone(asked, went.replay))
        if not off <= EXACT:
            return RoundTripResult(asked.name, way, off, went.moved, unit, "BROKEN", went.miss_reason)
        return RoundTripResult(
            asked.name, way, off, went.moved, unit, "exact" if went.moved else "computed again", went.miss_reason
        )

    @cached_property
    def _engines(self) -> Transformer:
        """An engine packs its weights."""
        return copy.deepcopy(self.double)

    # ------------------------------------------------------------ verdicts

    def _verdict(
        self, asked: MemoryCase, structure: float, found: Comparison, young: Comparison, bound: float, cut: int | None
    ) -> tuple[Verdict, MismatchFinding | None]:
        """``young``: over the positions before anything was dropped; all of them, under a policy that drops nothing."""
        if not structure <= EXACT:
            return "BROKEN", self._structural(asked, cut)
        loss = format_loss(asked.dtype)
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

    def _structural(self, asked: MemoryCase, cut: int | None) -> MismatchFinding | None:
        twin = self._diagnose(asked.float64_case, cut)
        if twin is not None and twin.fault == "dtype":  # a rounding: each precision has its own
            return self._diagnose(asked, cut) or twin
        return twin if twin is not None or asked.dtype == "float64" else self._diagnose(asked, cut)

    def _diagnose(self, asked: MemoryCase, cut: int | None) -> MismatchFinding | None:
        """A lossy policy has no judge of every number: what is wrong is looked for without the policy."""
        asked = asked if cut is None else asked.full_case
        if asked not in self._findings:
            self.progress(f"{asked.name}: looking for the first difference")
            model, cache = self.double if asked.dtype == "float64" else self.single, self.cache(asked)
            build = partial(inject_cache_fault, self.fault, rotate=cache.rope_at, exact=cache.endless)
            lossy = format_loss(asked.dtype) != "none"
            with inject_model_fault(self.fault, model):
                self._findings[asked] = diagnose(
                    model, cache, self.streams, build, squeezes=num_preemptions(self.options), lossy=lossy
                )
        return self._findings[asked]

    def notes(self) -> list[str]:
        """What a reader should know about what was not, or could not be, tested."""
        notes = []
        longest = max(stream.limit for stream in self.streams)
        for window in sorted({spec.window for spec in attention_specs(self.config) if spec.window is not None}):
            if longest <= window:
                notes.append(f"no row of up to {longest} tokens passes the window of {window}: give a longer --prompt")
        for asked in {asked.policy: asked for asked in self.asked if not asked.keeps_everything}.values():
            notes += _unseen(asked, self.cache(asked), attention_specs(self.config), longest)
        if self.options.endless and longest <= self.config.max_seq_len:
            notes.append(f"no row of up to {longest} tokens passes the model's limit of {self.config.max_seq_len}")
        if self.options.prefix_hit and "contiguous" in self.options.layouts:
            notes.append("contiguous: a row is one block, so there are no prefix hits to verify")
        if self._needles is not None and self._needles.why:
            notes.append(f"recall is not measured: {self._needles.why}")
        return notes


def _unseen(asked: MemoryCase, cache: CacheConfig, plain: Sequence[AttentionSpec], longest: int) -> list[str]:
    """A policy that no row was long enough for."""
    cut = first_loss_length(build_groups(plain, cache))
    windows = [spec.window + spec.num_sinks for spec in cache.restrict(plain) if spec.window is not None]
    least = min([*windows, *([] if cut is None else [cut])], default=0)
    if longest <= least:
        return [f"{asked.policy} keeps all of a row of up to {longest} tokens: give a longer --prompt"]
    return []
