"""Compares every cache configuration with the uncached model.

Every cache runs the same sequences through the real path (``kvad.verify.replay``) in the scenario of
``kvad.verify.scenario``; the logits of every computed position, recomputed ones included, are compared with the
reference. Weights are taken as stored and computed with in float32 and float64; a half precision is a way to *store*
keys and values here, as on a CPU. The reference is the same model with ``NoCache``, each sequence computed whole:

* for a policy by position under the same mask;
* for a lossy format (fp8, int8, int4) with keys and values that pass through it (``kvad.verify.references``);
* for a ranking or summarizing policy until its first eviction; beyond it, each sequence alone.

The loss compared with the model that keeps everything is a number (``kvad.verify.references``), not a verdict.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvad import benchmarks
from kvad import cache as cache_lib
from kvad.cache import CacheConfig, build_groups
from kvad.cache.device import KVCache
from kvad.config import AttentionSpec, attention_specs
from kvad.errors import ConfigError, EngineError, KvadError, RequestError, StorageError, UsageError
from kvad.model import NoCache, Transformer
from kvad.model_input import CacheProtocol
from kvad.verify import replay, report, scenario
from kvad.verify.diagnosis import diagnose
from kvad.verify.injected_faults import check_fault_name, inject_cache_fault, inject_model_fault
from kvad.verify.references import NeedleRecall, QuantizedNoCache, compare_loss
from kvad.verify.round_trips import ROUND_TRIPS, check_round_trip, run_round_trip


def verify(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    options: scenario.ScenarioOptions | None = None,
    *,
    fault: str | None = None,
    language: benchmarks.needle_tasks.HaystackLanguage | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> report.VerifyReport:
    """Compare every case of ``options`` with its reference; impossible ones are skipped and reported.

    ``fault`` is injected into every cache; ``language`` is that of the needle tasks.

    Raises:
        UsageError: If prompts or the fault are impossible, or no case is possible.
        EngineError: If a requested scenario event did not occur, or an injected fault went unnoticed.
    """
    start = time.perf_counter()
    options = options or scenario.ScenarioOptions()
    for method in options.round_trips:
        check_round_trip(method)
    if fault is not None and options.round_trips:
        message = "--inject-fault and --round-trip: a fault is injected into caches that no sequence leaves"
        raise UsageError(message, "Give one of them.")
    run = _Run(model, prompts, options, fault, language, progress)
    cases = tuple(run.run_case(case) for case in run.cases)
    round_trips = tuple(run.round_trip(case, method) for case in run.cases for method in options.round_trips)
    has_policy = any(case.policy != "full" for case in run.cases)
    result = report.VerifyReport(
        rows=tuple(len(s.tokens(i)) for s in run.streams for i in range(len(s.forced_tokens))),
        positions=sum(len(t) for t in run.reference(run.double).values()),
        logit_scale=run.scale,
        injected=fault,
        cases=cases,
        notes=tuple(run.notes()),
        seconds=time.perf_counter() - start,
        rules=report.RULES + report.POLICY_RULES * has_policy + report.ROUND_TRIP_RULES * bool(round_trips),
        skipped=tuple(run.skipped),
        round_trips=round_trips,
    )
    if fault is not None and not result.broken:
        message = f"the injected fault {fault!r} changed nothing here"
        raise EngineError(message, "Give longer prompts or more --max-tokens.")
    return result


class _Plan(NamedTuple):
    """A case, its cache, the layers under its policy, and the length at which a sequence first loses data."""

    case: report.MemoryCase
    cache: CacheConfig
    specs: tuple[AttentionSpec, ...]
    first_loss: int | None


class _Structure(NamedTuple):
    """A run in float64: its distance from the reference, and from which reference ("": the only one)."""

    replayed: replay.ReplayResult
    distance: float
    reason: str = ""


class _Run:
    """The reference logits, and the replays of every case."""

    def __init__(
        self,
        model: Transformer,
        prompts: Sequence[Sequence[int]],
        options: scenario.ScenarioOptions,
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
        self.streams = scenario.build_streams(self.single, prompts, options)
        if fault is not None:
            for case in self.cases:
                check_fault_name(fault, self.config, self.plan(dataclasses.replace(case, dtype="float64")).cache)
        self._references: dict[tuple[object, ...], dict[replay.SequenceKey, Tensor]] = {}
        self._structures: dict[report.MemoryCase, _Structure] = {}
        self._findings: dict[report.MemoryCase, report.MismatchFinding | None] = {}
        self._needles: NeedleRecall | None = None
        self._engine_model: Transformer | None = None
        self._policy = "full"
        self.scale = max(float(logits.abs().max()) for logits in self.reference(self.double).values())

    def _possible(self, prompts: Sequence[Sequence[int]]) -> tuple[list[report.MemoryCase], list[report.SkippedCase]]:
        """Split the cases into possible and skipped ones; raises the first ConfigError if none is possible."""
        if self.config.decoder is None:
            return self.options.cases, []  # build_streams raises
        sources, forced = scenario.build_sources(self.config, len(prompts)), ((0,) * self.options.tokens,)
        # Sequences of the same lengths, to check the caches before anything is computed.
        rows = [replay.ReplayStream(tuple(p), forced, source=s) for p, s in zip(prompts, sources, strict=True)]
        all_cases = dict.fromkeys(self.options.cases)
        reasons = ((case, scenario.unsupported_reason(self.config, rows, self.options, case)) for case in all_cases)
        errors = {case: error for case, error in reasons if error is not None}
        if len(errors) == len(all_cases):
            first = next(iter(errors.values()))
            raise ConfigError(first.message, first.hint)
        skipped = [report.SkippedCase(case.name, _full_message(error)) for case, error in errors.items()]
        return [case for case in all_cases if case not in errors], skipped

    def plan(self, case: report.MemoryCase) -> _Plan:
        cache = scenario.case_cache_config(self.config, self.streams, self.options, case)
        first_loss = scenario.first_loss_length(build_groups(self.plain_specs, cache))
        return _Plan(case, cache, tuple(cache.restrict(self.plain_specs)), first_loss)

    def reference(
        self, model: Transformer, specs: Sequence[AttentionSpec] | None = None, case: report.MemoryCase | None = None
    ) -> dict[replay.SequenceKey, Tensor]:
        """Compute [T, V] of each sequence without a cache, in the precision of the model.

        ``specs``: the layers under a policy (None: without one). ``case``: keys and values pass through its formats.
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
                (index, sample): replay.run_uncached(model, stream.tokens(sample), stream.limit, cache, stream.source)
                for index, stream in enumerate(self.streams)
                for sample in range(len(stream.forced_tokens))
            }
        return self._references[key]

    def _start_policy(self, policy: str) -> None:
        if policy != self._policy:
            self._policy, plain = policy, (self.plain_specs, None)
            self._references = {key: logits for key, logits in self._references.items() if key[1:] == plain}
            self._structures.clear()

    def run_case(self, case: report.MemoryCase) -> report.CaseReport:
        began = time.perf_counter()
        self._start_policy(case.policy)
        plan, double = self.plan(case), dataclasses.replace(case, dtype="float64")
        if double not in self._structures:
            self._structures[double] = self._structure(self.plan(double))
        structure = self._structures[double]
        noise = structure.distance if structure.distance <= report.EXACT else 0.0  # a broken structure excuses nothing
        bound = replay.tolerance(case.dtype, self.scale, noise)
        model = self.double if case.dtype == "float64" else self.single
        result = structure.replayed if case.dtype == "float64" else self._replay(plan, model)
        reference = self.reference(model, plan.specs)
        is_lossy_format = replay.format_loss(case.dtype) == "lossy"
        if is_lossy_format:
            structure = max(structure, self._structure(plan, quantized=True), key=lambda each: each.distance)
        comparison = before_loss = replay.compare_logits(result, reference, 2 * bound)
        if plan.first_loss is not None:
            before_loss = replay.compare_logits(result, reference, 2 * bound, plan.first_loss)
        verdict, finding = self._verdict(plan, structure.distance, comparison, before_loss, bound)
        loss = None
        if case.policy != "full" or is_lossy_format:
            loss = self._measure_loss(plan, result, self.reference(model), bound)
        return report.CaseReport(
            **vars(case),
            **vars(comparison),
            tolerance=bound,
            structure=structure.distance,
            verdict=verdict,
            seconds=time.perf_counter() - began,
            scenario_counts=dataclasses.asdict(result.counts),
            finding=finding,
            loss=loss,
            reason=structure.reason if verdict == "broken" and finding is None else "",
        )

    def _structure(self, plan: _Plan, *, quantized: bool = False) -> _Structure:
        """Run a case in float64; ``quantized``: the reference's keys and values pass through the case's formats."""
        replayed = self._replay(plan, self.double)
        reference = self.reference(self.double, plan.specs, plan.case if quantized else None)
        distance = replay.compare_logits(replayed, reference, 2 * report.EXACT, plan.first_loss).max_dlogit
        if plan.first_loss is None:
            return _Structure(replayed, distance)
        alone = self._distance_from_alone(plan, replayed)
        if alone > report.EXACT:
            reason = f"a sequence differs by {alone:.2e} from the same sequence alone, in other chunks"
            return _Structure(replayed, max(distance, alone), reason)
        reason = f"a sequence differs by {distance:.2e} from the reference before its first eviction"
        return _Structure(replayed, distance, reason)

    def _distance_from_alone(self, plan: _Plan, replayed: replay.ReplayResult) -> float:
        """Return max |dlogit| compared with the same sequences alone: in other chunks, with room, never preempted."""
        largest = 0.0
        chunk = max(1, self.options.prefill_chunk_size // 3 - 1)
        cache = dataclasses.replace(
            plan.cache, max_num_seqs=1, prefill_chunk_size=chunk, num_blocks=None, enable_prefix_caching=False
        )
        for (number, sample), pieces in replayed.pieces.items():
            self.progress(f"{plan.case.name}: sequence {number} alone")
            stream = self.streams[number]
            stream = replay.ReplayStream(stream.prompt, (stream.forced_tokens[sample],), source=stream.source)
            with inject_model_fault(self.fault, self.double):
                alone = replay.replay_streams(self.double, cache, [stream], make=self._make(cache))
            comparison = replay.compare_logits(replay.ReplayResult({(0, 0): pieces}), {(0, 0): alone.logits(0)}, 0.0)
            largest = max(largest, comparison.max_dlogit)
        return largest

    def _replay(self, plan: _Plan, model: Transformer) -> replay.ReplayResult:
        self.progress(plan.case.name)
        cache, squeezes = plan.cache, scenario.num_preemptions(self.options)
        with inject_model_fault(self.fault, model):
            replayed = replay.replay_streams(model, cache, self.streams, squeezes=squeezes, make=self._make(cache))
        scenario.check_scenario_counts(replayed, self.streams, self.options, plan.case.layout)
        return replayed

    def _make(self, cache: CacheConfig) -> Callable[..., KVCache]:
        return partial(inject_cache_fault, self.fault, rotate=cache.rope_at, exact=cache.endless)

    def _measure_loss(
        self, plan: _Plan, replayed: replay.ReplayResult, reference: dict[replay.SequenceKey, Tensor], bound: float
    ) -> report.LossReport:
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

    def round_trip(self, case: report.MemoryCase, method: str) -> report.RoundTripResult:
        """Send a case's sequences on a round trip in float64, and compare them with sequences that stayed."""
        self._start_policy(case.policy)
        self.progress(f"{case.name} through {method}")
        plan, unit = self.plan(case), ROUND_TRIPS[method].unit
        plan = plan._replace(cache=dataclasses.replace(plan.cache, num_blocks=None))
        self._engine_model = self._engine_model or copy.deepcopy(self.double)  # an engine packs its weights
        with tempfile.TemporaryDirectory(prefix="kvad-verify-") as folder:
            try:
                run = run_round_trip(method, self._engine_model, plan.cache, self.streams, Path(folder))
            except (ConfigError, RequestError, StorageError) as error:
                reason = _full_message(error).replace(f"{folder}/", "")
                return report.RoundTripResult(case.name, method, None, 0, unit, "skipped", reason)
        reference = self.reference(self.double, plan.specs, None if case.dtype == "float64" else case)
        reference = {key: reference[key] for key in run.replay.pieces}
        distance = replay.compare_logits(run.replay, reference, 2 * report.EXACT, plan.first_loss).max_dlogit
        if plan.first_loss is not None:
            distance = max(distance, self._distance_from_alone(plan, run.replay))
        verdict: Literal["exact", "broken", "recomputed"] = "exact" if run.moved else "recomputed"
        if not distance <= report.EXACT:
            verdict = "broken"
        return report.RoundTripResult(case.name, method, distance, run.moved, unit, verdict, run.miss_reason)

    def _verdict(
        self, plan: _Plan, structure: float, comparison: report.Comparison, before_loss: report.Comparison, bound: float
    ) -> tuple[report.Verdict, report.MismatchFinding | None]:
        """Return the verdict, and the finding of a broken cache; ``before_loss``: only before the first eviction."""
        if not structure <= report.EXACT:
            finding = self._diagnose(self.plan(dataclasses.replace(plan.case, dtype="float64")))
            is_rounding = finding is not None and finding.fault == "dtype"  # each precision has its own
            return "broken", (self._diagnose(plan) or finding) if finding is None or is_rounding else finding
        is_finite, loss = math.isfinite(comparison.max_dlogit), replay.format_loss(plan.case.dtype)
        if loss == "lossy" and is_finite:
            return "lossy by design", None
        within = before_loss.max_dlogit <= bound and before_loss.agree + before_loss.ties == before_loss.compared
        if loss == "none" and not within:
            return "broken", self._diagnose(plan)
        if plan.first_loss is not None:
            return ("lossy by design", None) if is_finite else ("broken", self._diagnose(plan))
        if within:
            return ("exact" if loss == "none" else "within tolerance"), None
        finding = self._diagnose(plan)
        return ("lossy by design", None) if finding is None and is_finite else ("broken", finding)

    def _diagnose(self, plan: _Plan) -> report.MismatchFinding | None:
        """Find the fault; a lossy policy has no reference for every number, so it is diagnosed without the policy."""
        if plan.first_loss is not None:
            plan = self.plan(dataclasses.replace(plan.case, policy="full", endless=False))
        case = plan.case
        if case not in self._findings:
            self.progress(f"{case.name}: looking for the first difference")
            model = self.double if case.dtype == "float64" else self.single
            lossy = replay.format_loss(case.dtype) != "none"
            build, squeezes = self._make(plan.cache), scenario.num_preemptions(self.options)
            with inject_model_fault(self.fault, model):
                self._findings[case] = diagnose(model, plan.cache, self.streams, build, squeezes=squeezes, lossy=lossy)
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
        for plan in {case.policy: self.plan(case) for case in self.cases if case.policy != "full"}.values():
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
