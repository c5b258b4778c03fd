"""Compares every cache configuration with the uncached model.

The reference is the same model with :class:`kvad.model.no_cache.NoCache`, each sequence computed whole. Every cache
runs the same sequences through the real path (:mod:`kvad.verify.replay`) in the scenario of
:mod:`kvad.verify.scenario`; the logits of every computed position, recomputed ones included, are compared with the
reference. The rules of the verdicts are in :mod:`kvad.verify.report`; a broken cache is diagnosed by
:mod:`kvad.verify.diagnosis`.

Weights are taken as stored and computed with in float32 and float64; a half precision is a way to *store* keys and
values here, as on a CPU. The reference depends on the configuration:

* a policy by position: the model under the same mask;
* a lossy format (fp8, int8, int4): the model whose keys and values pass through it (:mod:`kvad.verify.references`);
* a ranking or summarizing policy: each sequence alone, and until its first eviction the model.

The loss compared with the model that keeps everything is a number (:mod:`kvad.verify.references`), not a verdict.
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
    ROUND_TRIP_RULES,
    RULES,
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
    """Compare every case of ``options`` with its reference.

    Impossible ones are skipped and reported.

    Args:
        fault: Inject this fault into every cache.
        language: Language of the needle tasks.

    Raises:
        UsageError: If prompts or the fault are impossible, or no case is possible.
        EngineError: If a requested scenario event did not occur, or an injected fault went unnoticed.
    """
    start = time.perf_counter()
    options = options or ScenarioOptions()
    for method in options.round_trips:
        check_round_trip(method)
    if fault is not None and options.round_trips:
        raise UsageError(
            "--inject-fault and --round-trip: a fault is injected into caches that no sequence leaves",
            "Give one of them.",
        )
    run = _Run(model, prompts, options, fault, language, progress)
    cases = tuple(run.run_case(case) for case in run.cases)
    round_trips = tuple(run.round_trip(case, method) for case in run.cases for method in options.round_trips)
    report = VerifyReport(
        rows=tuple(len(s.tokens(i)) for s in run.streams for i in range(len(s.forced_tokens))),
        positions=sum(len(t) for t in run.reference(run.double).values()),
        logit_scale=run.scale,
        injected=fault,
        cases=cases,
        notes=tuple(run.notes()),
        seconds=time.perf_counter() - start,
        rules=RULES
        + POLICY_RULES * (not all(case.keeps_everything for case in run.cases))
        + ROUND_TRIP_RULES * bool(round_trips),
        skipped=tuple(run.skipped),
        round_trips=round_trips,
    )
    if fault is not None and not report.broken:
        raise EngineError(
            f"the injected fault {fault!r} changed nothing here", "Give longer prompts or more --max-tokens."
        )
    return report


class _Run:
    """The reference logits, and the replays of every case."""

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
        self.cases, self.skipped = self._possible(prompts)
        self.single = model if model.token_embedding.dtype == torch.float32 else copy.deepcopy(model).float()
        self.double = copy.deepcopy(model).double()
        progress("the reference")
        self.streams = build_streams(self.single, prompts, options)
        if fault is not None:
            for case in self.cases:
                check_fault_name(fault, self.config, self.cache(case.float64_case))
        self._references: dict[tuple[object, ...], dict[SequenceKey, Tensor]] = {}
        self._float64_runs: dict[MemoryCase, tuple[ReplayResult, float, str]] = {}
        self._findings: dict[MemoryCase, MismatchFinding | None] = {}
        self._needles: NeedleRecall | None = None
        self._policy = "full"
        self.scale = max(float(logits.abs().max()) for logits in self.reference(self.double).values())

    def _possible(self, prompts: Sequence[Sequence[int]]) -> tuple[list[MemoryCase], list[SkippedCase]]:
        """Split the cases into possible ones and skipped ones.

        Raises the first ConfigError if none is possible.
        """
        if self.config.decoder is None:
            return self.options.cases, []  # build_streams raises
        rows = outline_streams(self.config, prompts, self.options)
        possible, skipped, first = [], [], None
        for case in self.options.cases:
            error = unsupported_reason(self.config, case, partial(case_cache_config, self.config, rows, self.options))
            if error is None:
                possible.append(case)
                continue
            first = first or error
            skipped.append(SkippedCase(case.name, error.message + (f"; {error.hint}" if error.hint else "")))
        if not possible:
            assert first is not None
            raise ConfigError(first.message, first.hint)
        return possible, skipped

    def cache(self, case: MemoryCase) -> CacheConfig:
        return case_cache_config(self.config, self.streams, self.options, case)

    # ------------------------------------------------------------ references

    def reference(
        self, model: Transformer, specs: Sequence[AttentionSpec] | None = None, case: MemoryCase | None = None
    ) -> dict[SequenceKey, Tensor]:
        """Compute [T, V] of each sequence without a cache.

        ``specs``: the layers under a policy; ``case``: pass keys and values through its formats.
        """
        plain = attention_specs(self.config)
        specs = plain if specs is None else tuple(specs)
        endless = self.options.endless and specs != plain
        key = (model is self.double, specs, case and (case.dtype, case.rotate))
        if key not in self._references:
            if key[1:] != (plain, None):
                self.progress("the reference" + (f" of {case.name}" if case else " under the policy"))
            cache: CacheProtocol = NoCache(self.config, specs=specs, exact_rope=endless)
            if case is not None:
                rope_at = self.cache(case).rope_at
                cache = QuantizedNoCache(
                    cache, *cache_lib.quantization.split_format_name(case.dtype), rotate=rope_at, exact=case.endless
                )
            self._references[key] = {
                (index, sample): run_uncached(model, stream.tokens(sample), stream.limit, cache, stream.source)
                for index, stream in enumerate(self.streams)
                for sample in range(len(stream.forced_tokens))
            }
        return self._references[key]

    def _start_policy(self, policy: str) -> None:
        """Drop what only the previous policy needed."""
        if policy == self._policy:
            return
        self._policy, plain = policy, attention_specs(self.config)
        self._references = {key: logits for key, logits in self._references.items() if key[1:] == (plain, None)}
        self._float64_runs.clear()

    # ------------------------------------------------------------ one case

    def run_case(self, case: MemoryCase) -> CaseReport:
        began = time.perf_counter()
        self._start_policy(case.policy)
        cache = self.cache(case)
        specs, first_loss = (
            cache.restrict(attention_specs(self.config)),
            first_loss_length(build_groups(attention_specs(self.config), cache)),
        )
        float64_run, structure, reason = self._float64_run(case, specs, first_loss)
        noise = structure if structure <= EXACT else 0.0  # a broken structure excuses nothing
        bound = tolerance(case.dtype, self.scale, noise)
        model = self.double if case.dtype == "float64" else self.single
        result = float64_run if case.dtype == "float64" else self._replay(case, model)
        comparison = compare_logits(result, self.reference(model, specs), 2 * bound)
        if format_loss(case.dtype) == "lossy":
            coded_structure, other_reason = self._structure(case, specs, first_loss, case)[1:]
            structure, reason = max(structure, coded_structure), reason or other_reason
        before_loss = (
            comparison
            if first_loss is None
            else compare_logits(result, self.reference(model, specs), 2 * bound, first_loss)
        )
        verdict, finding = self._verdict(case, structure, comparison, before_loss, bound, first_loss)
        flips = comparison.divergences
        return CaseReport(
            layout=case.layout,
            dtype=case.dtype,
            max_dlogit=comparison.max_dlogit,
            tolerance=bound,
            structure=structure,
            kl_mean=comparison.kl_mean,
            kl_max=comparison.kl_max,
            agree=comparison.compared - len(flips),
            compared=comparison.compared,
            ties=sum(flip.tie for flip in flips),
            first_divergence=flips[0] if flips else None,
            verdict=verdict,
            seconds=time.perf_counter() - began,
            scenario_counts=dataclasses.asdict(result.counts),
            finding=finding,
            policy=case.policy,
            rotate=case.rotate,
            endless=case.endless,
            loss=None
            if case.keeps_everything and format_loss(case.dtype) != "lossy"
            else self._measure_loss(case, result, model, bound),
            reason=reason if verdict == "broken" and finding is None else "",
        )

    def _float64_run(
        self, case: MemoryCase, specs: Sequence[AttentionSpec], first_loss: int | None
    ) -> tuple[ReplayResult, float, str]:
        """Run the same case in float64, which tests the structure."""
        if case.float64_case not in self._float64_runs:
            self._float64_runs[case.float64_case] = self._structure(case.float64_case, specs, first_loss, None)
        return self._float64_runs[case.float64_case]

    def _structure(
        self, case: MemoryCase, specs: Sequence[AttentionSpec], first_loss: int | None, through: MemoryCase | None
    ) -> tuple[ReplayResult, float, str]:
        """Run a case in float64.

        Return its run, its distance from the reference, and from which reference.
        """
        replayed = self._replay(case, self.double)
        off = compare_logits(replayed, self.reference(self.double, specs, through), 2 * EXACT, first_loss).max_dlogit
        if first_loss is None:
            return replayed, off, ""
        alone = self._alone(case, replayed)
        if alone > EXACT:
            return (
                replayed,
                max(off, alone),
                f"a sequence differs by {alone:.2e} from the same sequence alone, in other chunks",
            )
        return replayed, off, f"a sequence differs by {off:.2e} from the reference before its first eviction"

    def _alone(self, case: MemoryCase, company: ReplayResult) -> float:
        """Return max |dlogit| compared with the same sequences alone: in other chunks, with room, never preempted."""
        largest = 0.0
        chunk = max(1, self.options.prefill_chunk_size // 3 - 1)
        cache = dataclasses.replace(
            self.cache(case), max_num_seqs=1, prefill_chunk_size=chunk, num_blocks=None, enable_prefix_caching=False
        )
        for (number, sample), pieces in company.pieces.items():
            self.progress(f"{case.name}: sequence {number} alone")
            stream = self.streams[number]
            alone = ReplayStream(stream.prompt, (stream.forced_tokens[sample],), source=stream.source)
            with inject_model_fault(self.fault, self.double):
                solo = replay_streams(self.double, cache, [alone], make=self._make(cache))
            largest = max(
                largest, compare_logits(ReplayResult({(0, 0): pieces}), {(0, 0): solo.logits(0)}, 0.0).max_dlogit
            )
        return largest

    def _replay(self, case: MemoryCase, model: Transformer) -> ReplayResult:
        self.progress(case.name)
        cache = self.cache(case)
        with inject_model_fault(self.fault, model):
            replayed = replay_streams(
                model, cache, self.streams, squeezes=num_preemptions(self.options), make=self._make(cache)
            )
        shares = KVCacheManager(
            build_groups(attention_specs(self.config), cache),
            prefix_caching=cache.enable_prefix_caching,
            max_num_seqs=cache.max_num_seqs,
        ).prefix_caching
        check_scenario_counts(replayed.counts, self.streams, self.options, case.layout, shares)
        return replayed

    def _make(self, cache: CacheConfig) -> MakeCache:
        return partial(inject_cache_fault, self.fault, rotate=cache.rope_at, exact=cache.endless)

    def _measure_loss(self, case: MemoryCase, replayed: ReplayResult, model: Transformer, bound: float) -> LossReport:
        before = self.config.max_seq_len if case.endless else None
        lost = compare_loss(replayed, self.reference(model), self.streams, 2 * bound, before)
        if self.fault is not None:
            return lost
        if self._needles is None:
            self.progress("needles, for the full cache")
            length = min(self.config.max_seq_len, max(stream.limit for stream in self.streams))
            self._needles = NeedleRecall(
                copy.deepcopy(self.single), self.language, length
            )  # an engine packs its weights
        self.progress(f"{case.name}: needles")
        return dataclasses.replace(lost, recall=self._needles.recall(self.cache(case)))

    # ------------------------------------------------------------ round trips

    def round_trip(self, case: MemoryCase, method: str) -> RoundTripResult:
        """Send a case's sequences on a round trip in float64, and compare them with sequences that stayed."""
        self._start_policy(case.policy)
        self.progress(f"{case.name} through {method}")
        cache = dataclasses.replace(self.cache(case), num_blocks=None)
        specs, first_loss = (
            cache.restrict(attention_specs(self.config)),
            first_loss_length(build_groups(attention_specs(self.config), cache)),
        )
        unit = ROUND_TRIPS[method].unit
        with tempfile.TemporaryDirectory(prefix="kvad-verify-") as folder:
            try:
                run = run_round_trip(method, self._engines, cache, self.streams, Path(folder))
            except (ConfigError, RequestError, StorageError) as error:
                reason = (error.message + (f"; {error.hint}" if error.hint else "")).replace(f"{folder}/", "")
                return RoundTripResult(case.name, method, None, 0, unit, "skipped", reason)
        reference = self.reference(self.double, specs, None if case.dtype == "float64" else case)
        reference = {key: reference[key] for key in run.replay.pieces}
        off = compare_logits(run.replay, reference, 2 * EXACT, first_loss).max_dlogit
        if first_loss is not None:
            off = max(off, self._alone(case, run.replay))
        if not off <= EXACT:
            return RoundTripResult(case.name, method, off, run.moved, unit, "broken", run.miss_reason)
        return RoundTripResult(
            case.name, method, off, run.moved, unit, "exact" if run.moved else "recomputed", run.miss_reason
        )

    @cached_property
    def _engines(self) -> Transformer:
        """A copy, because an engine packs its weights."""
        return copy.deepcopy(self.double)

    # ------------------------------------------------------------ verdicts

    def _verdict(
        self,
        case: MemoryCase,
        structure: float,
        comparison: Comparison,
        before_loss: Comparison,
        bound: float,
        first_loss: int | None,
    ) -> tuple[Verdict, MismatchFinding | None]:
        """Return the verdict.

        ``young``: comparison of the positions before the first eviction (all, if nothing is evicted).
        """
        if not structure <= EXACT:
            return "broken", self._structural(case, first_loss)
        loss = format_loss(case.dtype)
        if loss == "lossy" and math.isfinite(comparison.max_dlogit):
            return "lossy by design", None
        within = before_loss.max_dlogit <= bound and all(flip.tie for flip in before_loss.divergences)
        if loss == "none" and not within:
            return "broken", self._diagnose(case, first_loss)
        if first_loss is not None:
            is_finite = math.isfinite(comparison.max_dlogit)
            return ("lossy by design", None) if is_finite else ("broken", self._diagnose(case, first_loss))
        if loss == "none":
            return "exact", None
        if within:
            return "within tolerance", None
        finding = self._diagnose(case, first_loss)
        is_finite = finding is None and math.isfinite(comparison.max_dlogit)
        return ("lossy by design", None) if is_finite else ("broken", finding)

    def _structural(self, case: MemoryCase, first_loss: int | None) -> MismatchFinding | None:
        twin = self._diagnose(case.float64_case, first_loss)
        if twin is not None and twin.fault == "dtype":  # a rounding: each precision has its own
            return self._diagnose(case, first_loss) or twin
        return twin if twin is not None or case.dtype == "float64" else self._diagnose(case, first_loss)

    def _diagnose(self, case: MemoryCase, first_loss: int | None) -> MismatchFinding | None:
        """Find the fault.

        A lossy policy has no reference for every number, so it is diagnosed without the policy.
        """
        case = case if first_loss is None else case.full_case
        if case not in self._findings:
            self.progress(f"{case.name}: looking for the first difference")
            model, cache = self.double if case.dtype == "float64" else self.single, self.cache(case)
            build = partial(inject_cache_fault, self.fault, rotate=cache.rope_at, exact=cache.endless)
            lossy = format_loss(case.dtype) != "none"
            with inject_model_fault(self.fault, model):
                self._findings[case] = diagnose(
                    model, cache, self.streams, build, squeezes=num_preemptions(self.options), lossy=lossy
                )
        return self._findings[case]

    def notes(self) -> list[str]:
        """Return notes about what was not, or could not be, tested."""
        notes = []
        longest = max(stream.limit for stream in self.streams)
        for window in sorted({spec.window for spec in attention_specs(self.config) if spec.window is not None}):
            if longest <= window:
                notes.append(
                    f"no sequence of up to {longest} tokens exceeds the window of {window}: give a longer --prompt"
                )
        for case in {case.policy: case for case in self.cases if not case.keeps_everything}.values():
            notes += _untested_policy(case, self.cache(case), attention_specs(self.config), longest)
        if self.options.endless and longest <= self.config.max_seq_len:
            notes.append(
                f"no sequence of up to {longest} tokens exceeds the model's limit of {self.config.max_seq_len}"
            )
        if self.options.prefix_hit and "contiguous" in self.options.layouts:
            notes.append("contiguous: a sequence is one block, so there are no prefix hits to verify")
        if self._needles is not None and self._needles.reason:
            notes.append(f"recall is not measured: {self._needles.reason}")
        return notes


def _untested_policy(case: MemoryCase, cache: CacheConfig, plain: Sequence[AttentionSpec], longest: int) -> list[str]:
    """Return a note if no sequence was long enough for a policy."""
    first_loss = first_loss_length(build_groups(plain, cache))
    windows = [spec.window + spec.num_sinks for spec in cache.restrict(plain) if spec.window is not None]
    least = min([*windows, *([] if first_loss is None else [first_loss])], default=0)
    if longest <= least:
        return [f"{case.policy} keeps all of a sequence of up to {longest} tokens: give a longer --prompt"]
    return []
