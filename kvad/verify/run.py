"""Compares every cache configuration with the uncached model.

The reference is the same model with ``kvad.model.no_cache.NoCache``, each sequence computed whole. Every cache
runs the same sequences through the real path (``kvad.verify.replay``) in the scenario of
``kvad.verify.scenario``; the logits of every computed position, recomputed ones included, are compared with the
reference. The rules of the verdicts are in ``kvad.verify.report``; a broken cache is diagnosed by
``kvad.verify.diagnosis``.

Weights are taken as stored and computed with in float32 and float64; a half precision is a way to *store* keys and
values here, as on a CPU. The reference depends on the configuration:

* a policy by position: the model under the same mask;
* a lossy format (fp8, int8, int4): the model whose keys and values pass through it (``kvad.verify.references``);
* a ranking or summarizing policy: each sequence alone, and until its first eviction the model.

The loss compared with the model that keeps everything is a number (``kvad.verify.references``), not a verdict.
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
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvad import benchmarks
from kvad import cache as cache_lib
from kvad.cache import CacheConfig, build_groups
from kvad.cache.manager import KVCacheManager
from kvad.config import AttentionSpec, attention_specs
from kvad.errors import ConfigError, EngineError, KvadError, RequestError, StorageError, UsageError
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
    """Compare every case of ``options`` with its reference; impossible ones are skipped and reported.

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
    has_policy = not all(case.keeps_everything for case in run.cases)
    report = VerifyReport(
        rows=tuple(len(s.tokens(i)) for s in run.streams for i in range(len(s.forced_tokens))),
        positions=sum(len(t) for t in run.reference(run.double).values()),
        logit_scale=run.scale,
        injected=fault,
        cases=cases,
        notes=tuple(run.notes()),
        seconds=time.perf_counter() - start,
        rules=RULES + POLICY_RULES * has_policy + ROUND_TRIP_RULES * bool(round_trips),
        skipped=tuple(run.skipped),
        round_trips=round_trips,
    )
    if fault is not None and not report.broken:
        raise EngineError(
            f"the injected fault {fault!r} changed nothing here", "Give longer prompts or more --max-tokens."
        )
    return report


class _Plan(NamedTuple):
    """A case, its cache, the layers under its policy, and the length at which a sequence first loses data."""

    case: MemoryCase
    cache: CacheConfig
    specs: tuple[AttentionSpec, ...]
    first_loss: int | None


class _Structure(NamedTuple):
    """A run in float64: its distance from the reference, and from which reference ("": the only one)."""

    replayed: ReplayResult
    distance: float
    reason: str = ""


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
        self.config, self.plain_specs = model.config, attention_specs(model.config)
        self.cases, self.skipped = self._possible(prompts)
        self.single = model if model.token_embedding.dtype == torch.float32 else copy.deepcopy(model).float()
        self.double = copy.deepcopy(model).double()
        progress("the reference")
        self.streams = build_streams(self.single, prompts, options)
        if fault is not None:
            for case in self.cases:
                check_fault_name(fault, self.config, self.plan(case.float64_case).cache)
        self._references: dict[tuple[object, ...], dict[SequenceKey, Tensor]] = {}
        self._structures: dict[MemoryCase, _Structure] = {}
        self._findings: dict[MemoryCase, MismatchFinding | None] = {}
        self._needles: NeedleRecall | None = None
        self._policy = "full"
        self.scale = max(float(logits.abs().max()) for logits in self.reference(self.double).values())

    def _possible(self, prompts: Sequence[Sequence[int]]) -> tuple[list[MemoryCase], list[SkippedCase]]:
        """Split the cases into possible and skipped ones; raises the first ConfigError if none is possible."""
        if self.config.decoder is None:
            return self.options.cases, []  # build_streams raises
        rows = outline_streams(self.config, prompts, self.options)
        build_config = partial(case_cache_config, self.config, rows, self.options)
        errors = {case: unsupported_reason(self.config, case, build_config) for case in self.options.cases}
        skipped = [SkippedCase(case.name, _full_message(error)) for case, error in errors.items() if error is not None]
        if len(skipped) == len(errors):
            first = next(error for error in errors.values() if error is not None)
            raise ConfigError(first.message, first.hint)
        return [case for case, error in errors.items() if error is None], skipped

    def plan(self, case: MemoryCase) -> _Plan:
        cache = case_cache_config(self.config, self.streams, self.options, case)
        return _Plan(
            case,
            cache,
            tuple(cache.restrict(self.plain_specs)),
            first_loss_length(build_groups(self.plain_specs, cache)),
        )

    # ------------------------------------------------------------ references

    def reference(
        self, model: Transformer, specs: Sequence[AttentionSpec] | None = None, case: MemoryCase | None = None
    ) -> dict[SequenceKey, Tensor]:
        """Compute [T, V] of each sequence without a cache.

        Args:
            model: The model in one of the two precisions.
            specs: The layers under a policy (None: without one).
            case: Pass keys and values through the formats of this case.
        """
        specs = self.plain_specs if specs is None else tuple(specs)
        key = (model is self.double, specs, case and (case.dtype, case.rotate))
        if key not in self._references:
            if key[1:] != (self.plain_specs, None):
                self.progress("the reference" + (f" of {case.name}" if case else " under the policy"))
            exact = self.options.endless and specs != self.plain_specs
            cache: CacheProtocol = NoCache(self.config, specs=specs, exact_rope=exact)
            if case is not None:
                formats, rope_at = cache_lib.quantization.split_format_name(case.dtype), self.plan(case).cache.rope_at
                cache = QuantizedNoCache(cache, *formats, rotate=rope_at, exact=case.endless)
            self._references[key] = {
                (index, sample): run_uncached(model, stream.tokens(sample), stream.limit, cache, stream.source)
                for index, stream in enumerate(self.streams)
                for sample in range(len(stream.forced_tokens))
            }
        return self._references[key]

    def _start_policy(self, policy: str) -> None:
        """Drop what only the previous policy needed."""
        if policy != self._policy:
            self._policy, plain = policy, (self.plain_specs, None)
            self._references = {key: logits for key, logits in self._references.items() if key[1:] == plain}
            self._structures.clear()

    # ------------------------------------------------------------ one case

    def run_case(self, case: MemoryCase) -> CaseReport:
        began = time.perf_counter()
        self._start_policy(case.policy)
        plan = self.plan(case)
        structure = self._float64_structure(case)
        noise = structure.distance if structure.distance <= EXACT else 0.0  # a broken structure excuses nothing
        bound = tolerance(case.dtype, self.scale, noise)
        model = self.double if case.dtype == "float64" else self.single
        result = structure.replayed if case.dtype == "float64" else self._replay(plan, model)
        reference = self.reference(model, plan.specs)
        is_lossy_format = format_loss(case.dtype) == "lossy"
        if is_lossy_format:
            structure = max(structure, self._structure(plan, quantized=True), key=lambda each: each.distance)
        comparison = before_loss = compare_logits(result, reference, 2 * bound)
        if plan.first_loss is not None:
            before_loss = compare_logits(result, reference, 2 * bound, plan.first_loss)
        verdict, finding = self._verdict(plan, structure.distance, comparison, before_loss, bound)
        flips = comparison.divergences
        return CaseReport(
            layout=case.layout,
            dtype=case.dtype,
            max_dlogit=comparison.max_dlogit,
            tolerance=bound,
            structure=structure.distance,
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
            if case.keeps_everything and not is_lossy_format
            else self._measure_loss(plan, result, self.reference(model), bound),
            reason=structure.reason if verdict == "broken" and finding is None else "",
        )

    def _float64_structure(self, case: MemoryCase) -> _Structure:
        """Run the same case in float64."""
        case = case.float64_case
        if case not in self._structures:
            self._structures[case] = self._structure(self.plan(case))
        return self._structures[case]

    def _structure(self, plan: _Plan, *, quantized: bool = False) -> _Structure:
        """Run a case in float64; ``quantized``: the reference's keys and values pass through the case's formats."""
        replayed = self._replay(plan, self.double)
        reference = self.reference(self.double, plan.specs, plan.case if quantized else None)
        distance = compare_logits(replayed, reference, 2 * EXACT, plan.first_loss).max_dlogit
        if plan.first_loss is None:
            return _Structure(replayed, distance)
        alone = self._distance_from_alone(plan, replayed)
        if alone > EXACT:
            reason = f"a sequence differs by {alone:.2e} from the same sequence alone, in other chunks"
            return _Structure(replayed, max(distance, alone), reason)
        reason = f"a sequence differs by {distance:.2e} from the reference before its first eviction"
        return _Structure(replayed, distance, reason)

    def _distance_from_alone(self, plan: _Plan, replayed: ReplayResult) -> float:
        """Return max |dlogit| compared with the same sequences alone: in other chunks, with room, never preempted."""
        largest = 0.0
        chunk = max(1, self.options.prefill_chunk_size // 3 - 1)
        cache = dataclasses.replace(
            plan.cache, max_num_seqs=1, prefill_chunk_size=chunk, num_blocks=None, enable_prefix_caching=False
        )
        for (number, sample), pieces in replayed.pieces.items():
            self.progress(f"{plan.case.name}: sequence {number} alone")
            stream = self.streams[number]
            stream = ReplayStream(stream.prompt, (stream.forced_tokens[sample],), source=stream.source)
            with inject_model_fault(self.fault, self.double):
                alone = replay_streams(self.double, cache, [stream], make=self._make(cache))
            comparison = compare_logits(ReplayResult({(0, 0): pieces}), {(0, 0): alone.logits(0)}, 0.0)
            largest = max(largest, comparison.max_dlogit)
        return largest

    def _replay(self, plan: _Plan, model: Transformer) -> ReplayResult:
        self.progress(plan.case.name)
        cache = plan.cache
        with inject_model_fault(self.fault, model):
            replayed = replay_streams(
                model, cache, self.streams, squeezes=num_preemptions(self.options), make=self._make(cache)
            )
        shares = KVCacheManager(
            build_groups(self.plain_specs, cache),
            prefix_caching=cache.enable_prefix_caching,
            max_num_seqs=cache.max_num_seqs,
        ).prefix_caching
        check_scenario_counts(replayed.counts, self.streams, self.options, plan.case.layout, shares)
        return replayed

    def _make(self, cache: CacheConfig) -> MakeCache:
        return partial(inject_cache_fault, self.fault, rotate=cache.rope_at, exact=cache.endless)

    def _measure_loss(
        self, plan: _Plan, replayed: ReplayResult, reference: dict[SequenceKey, Tensor], bound: float
    ) -> LossReport:
        before = self.config.max_seq_len if plan.case.endless else None
        loss = compare_loss(replayed, reference, self.streams, 2 * bound, before)
        if self.fault is not None:
            return loss
        if self._needles is None:
            self.progress("needles, for the full cache")
            length = min(self.config.max_seq_len, max(stream.limit for stream in self.streams))
            self._needles = NeedleRecall(copy.deepcopy(self.single), self.language, length)  # an engine packs weights
        self.progress(f"{plan.case.name}: needles")
        return dataclasses.replace(loss, recall=self._needles.recall(plan.cache))

    # ------------------------------------------------------------ round trips

    def round_trip(self, case: MemoryCase, method: str) -> RoundTripResult:
        """Send a case's sequences on a round trip in float64, and compare them with sequences that stayed."""
        self._start_policy(case.policy)
        self.progress(f"{case.name} through {method}")
        plan, unit = self.plan(case), ROUND_TRIPS[method].unit
        plan = plan._replace(cache=dataclasses.replace(plan.cache, num_blocks=None))
        with tempfile.TemporaryDirectory(prefix="kvad-verify-") as folder:
            try:
                run = run_round_trip(method, self._engine_model, plan.cache, self.streams, Path(folder))
            except (ConfigError, RequestError, StorageError) as error:
                reason = _full_message(error).replace(f"{folder}/", "")
                return RoundTripResult(case.name, method, None, 0, unit, "skipped", reason)
        reference = self.reference(self.double, plan.specs, None if case.dtype == "float64" else case)
        reference = {key: reference[key] for key in run.replay.pieces}
        distance = compare_logits(run.replay, reference, 2 * EXACT, plan.first_loss).max_dlogit
        if plan.first_loss is not None:
            distance = max(distance, self._distance_from_alone(plan, run.replay))
        verdict: Literal["exact", "broken", "recomputed"] = "exact" if run.moved else "recomputed"
        if not distance <= EXACT:
            verdict = "broken"
        return RoundTripResult(case.name, method, distance, run.moved, unit, verdict, run.miss_reason)

    @cached_property
    def _engine_model(self) -> Transformer:
        """A copy, because an engine packs its weights."""
        return copy.deepcopy(self.double)

    # ------------------------------------------------------------ verdicts

    def _verdict(
        self, plan: _Plan, structure: float, comparison: Comparison, before_loss: Comparison, bound: float
    ) -> tuple[Verdict, MismatchFinding | None]:
        """Return the verdict, and the finding of a broken cache.

        ``before_loss``: comparison of the positions before the first eviction (all, if nothing is evicted).
        """
        if not structure <= EXACT:
            return "broken", self._diagnose_structure(plan)
        is_finite, loss = math.isfinite(comparison.max_dlogit), format_loss(plan.case.dtype)
        if loss == "lossy" and is_finite:
            return "lossy by design", None
        within = before_loss.max_dlogit <= bound and all(flip.tie for flip in before_loss.divergences)
        if loss == "none" and not within:
            return "broken", self._diagnose(plan)
        if plan.first_loss is not None:
            return ("lossy by design", None) if is_finite else ("broken", self._diagnose(plan))
        if within:
            return ("exact" if loss == "none" else "within tolerance"), None
        finding = self._diagnose(plan)
        return ("lossy by design", None) if finding is None and is_finite else ("broken", finding)

    def _diagnose_structure(self, plan: _Plan) -> MismatchFinding | None:
        finding = self._diagnose(self.plan(plan.case.float64_case))
        if finding is not None and finding.fault == "dtype":  # a rounding: each precision has its own
            return self._diagnose(plan) or finding
        return finding if finding is not None or plan.case.dtype == "float64" else self._diagnose(plan)

    def _diagnose(self, plan: _Plan) -> MismatchFinding | None:
        """Find the fault; a lossy policy has no reference for every number, so it is diagnosed without the policy."""
        if plan.first_loss is not None:
            plan = self.plan(plan.case.full_case)
        case = plan.case
        if case not in self._findings:
            self.progress(f"{case.name}: looking for the first difference")
            model, lossy = self.double if case.dtype == "float64" else self.single, format_loss(case.dtype) != "none"
            build = partial(inject_cache_fault, self.fault, rotate=plan.cache.rope_at, exact=plan.cache.endless)
            squeezes = num_preemptions(self.options)
            with inject_model_fault(self.fault, model):
                finding = diagnose(model, plan.cache, self.streams, build, squeezes=squeezes, lossy=lossy)
            self._findings[case] = finding
        return self._findings[case]

    def notes(self) -> list[str]:
        """Return notes about what was not, or could not be, tested."""
        notes = []
        longest = max(stream.limit for stream in self.streams)
        for window in sorted({spec.window for spec in self.plain_specs if spec.window is not None}):
            if longest <= window:
                notes.append(
                    f"no sequence of up to {longest} tokens exceeds the window of {window}: give a longer --prompt"
                )
        for plan in {case.policy: self.plan(case) for case in self.cases if not case.keeps_everything}.values():
            lengths = [spec.window + spec.num_sinks for spec in plan.specs if spec.window is not None]
            lengths += [] if plan.first_loss is None else [plan.first_loss]
            if longest <= min(lengths, default=0):
                finding = f"{plan.case.policy} keeps all of a sequence of up to {longest} tokens"
                notes.append(f"{finding}: give a longer --prompt")
        limit = self.config.max_seq_len
        if self.options.endless and longest <= limit:
            notes.append(f"no sequence of up to {longest} tokens exceeds the model's limit of {limit}")
        if self.options.prefix_hit and "contiguous" in self.options.layouts:
            notes.append("contiguous: a sequence is one block, so there are no prefix hits to verify")
        if self._needles is not None and self._needles.reason:
            notes.append(f"recall is not measured: {self._needles.reason}")
        return notes


def _full_message(error: KvadError) -> str:
    return error.message + (f"; {error.hint}" if error.hint else "")
