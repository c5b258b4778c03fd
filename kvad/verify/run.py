"""Compares every cache configuration with the uncached model.

Every cache runs the same sequences through the engine that ``LLM.generate`` uses (``kvad.verify.replay``), with the
same options and in the model's dtype, in the scenario of ``kvad.verify.scenario``; the logits of every computed
position, recomputed ones included, are compared with the reference. The reference (``kvad.verify.reference_model``) has
the same weights, as they were before an engine packed them, in float64 and with ``NoCache``, each sequence whole:

* for a policy by position under the same mask;
* for a lossy format (fp8, int8, int4) with keys and values that pass through it (``kvad.verify.references``);
* for a ranking or summarizing policy until its first eviction; beyond it, each sequence alone.

The tolerance is derived: the same reference is compared with the plain model in the engine's dtype. Where memory
allows, each case also runs on an engine in float64, which must agree to 1e-10 (its *structure*). The loss compared with
the model that keeps everything is a number (``kvad.verify.references``), not a verdict.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kvad import benchmarks
from kvad import model as model_lib
from kvad.cache import CacheConfig, build_groups
from kvad.cache.device import KVCache
from kvad.config import AttentionSpec, attention_specs
from kvad.engine import Engine, EngineConfig
from kvad.errors import ConfigError, EngineError, KvadError, RequestError, StorageError, UsageError
from kvad.model import NoCache, Transformer
from kvad.verify import references, replay, report, scenario
from kvad.verify.diagnosis import Subject, diagnose
from kvad.verify.injected_faults import check_fault_name, inject_cache_fault, inject_engine_fault, inject_model_fault
from kvad.verify.mesh import MeshRanks, check_mesh
from kvad.verify.reference_model import reference_model
from kvad.verify.references import NeedleRecall, compare_loss
from kvad.verify.round_trips import ROUND_TRIPS, check_round_trip, run_beams, run_round_trip
from kvad.verify.summaries import SummaryCheck


def verify(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    options: scenario.ScenarioOptions | None = None,
    *,
    config: EngineConfig | None = None,
    fault: str | None = None,
    language: benchmarks.needle_tasks.HaystackLanguage | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> report.VerifyReport:
    """Compare every case of ``options`` with its reference; impossible ones are skipped and reported.

    Args:
        model: The model, in the dtype and on the device that run; engines pack its weights.
        prompts: Token ids.
        options: Sequences and caches.
        config: Options of the engine, such as ``deterministic`` or a summarizer.
        fault: Fault to inject into every engine.
        language: Language of the needle tasks.
        progress: Called with what is computed next.

    Raises:
        UsageError: If prompts or the fault are impossible, or no case is possible.
        EngineError: If a requested scenario event did not occur, or an injected fault went unnoticed.
    """
    start = time.perf_counter()
    options = options or scenario.ScenarioOptions()
    for method in options.round_trips:
        check_round_trip(method)
    if fault is not None and (options.round_trips or options.num_beams > 1):
        label = "--round-trip" if options.round_trips else "--num-beams"
        message = f"--inject-fault and {label}: a fault is injected into the configurations only"
        raise UsageError(message, "Give one of them.")
    check_mesh(model, options.mesh, config or EngineConfig())
    run = _Run(model, prompts, options, config or EngineConfig(), fault, language, progress)
    with run.open_ranks():
        cases = tuple(run.run_case(case) for case in run.cases)
        round_trips = tuple(run.round_trip(case, method) for case in run.cases for method in options.round_trips)
        if options.num_beams > 1:
            round_trips += tuple(run.search(case) for case in run.cases)
    has_policy = any(case.policy != "full" for case in run.cases)
    result = report.VerifyReport(
        rows=tuple(len(s.tokens(i)) for s in run.streams for i in range(len(s.forced_tokens))),
        positions=sum(len(t) for t in run.uncached.logits().values()),
        logit_scale=run.uncached.scale,
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
    """The replays of every case, compared with the reference."""

    def __init__(
        self,
        model: Transformer,
        prompts: Sequence[Sequence[int]],
        options: scenario.ScenarioOptions,
        config: EngineConfig,
        fault: str | None,
        language: benchmarks.needle_tasks.HaystackLanguage | None,
        progress: Callable[[str], None],
    ) -> None:
        self.options, self.fault, self.language, self.progress = options, fault, language, progress
        self.model, self.config, self.plain_specs = model, model.config, attention_specs(model.config)
        self.computed = model.dtype_name
        self.engine_config = dataclasses.replace(config, cache_factory=partial(inject_cache_fault, fault))
        self.cases, self.skipped = self._possible(prompts)
        self.exact, self.plain = reference_model(model, torch.float64), reference_model(model)
        self.double = (
            model if self.computed == "float64" else copy.deepcopy(model).double() if options.structure else None
        )
        progress("the continuations of the prompts")
        self.streams = scenario.build_streams(model, prompts, options, config, self.cases[0] if self.cases else None)
        if fault is not None:
            self._skip_cases_without(fault)
        self._structures: dict[report.MemoryCase, _Structure] = {}
        self._findings: dict[report.MemoryCase, report.MismatchFinding | None] = {}
        self._needles: NeedleRecall | None = None
        self.ranks: MeshRanks | None = None
        self._policy = "full"
        progress("the reference")
        models = self.exact, self.plain
        self.uncached = references.UncachedLogits(models, self.streams, endless=options.endless, progress=progress)

    def open_ranks(self) -> AbstractContextManager[object]:
        """Start the other ranks of the mesh, if there is one."""
        if self.options.mesh is None:
            return nullcontext()
        models = [self.model] if self.double in (None, self.model) else [self.model, self.double]
        self.ranks = MeshRanks(self.options.mesh, models, self.fault)
        return self.ranks

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

    def _skip_cases_without(self, fault: str) -> None:
        """Skip the cases that cannot have the fault; raises the first UsageError if none can."""
        errors = dict[report.MemoryCase, UsageError]()
        for case in self.cases:
            try:
                check_fault_name(fault, self.config, self.plan(case).cache, self.options.mesh)
            except UsageError as error:
                errors[case] = error
        if len(errors) == len(self.cases):
            raise next(iter(errors.values()))
        self.skipped += [report.SkippedCase(case.name, error.message) for case, error in errors.items()]
        self.cases = [case for case in self.cases if case not in errors]

    def plan(self, case: report.MemoryCase) -> _Plan:
        cache = scenario.case_cache_config(self.config, self.streams, self.options, case)
        first_loss = scenario.first_loss_length(build_groups(self.plain_specs, cache))
        return _Plan(case, cache, tuple(cache.restrict(self.plain_specs)), first_loss)

    def tolerance(self, plan: _Plan) -> references.Tolerance:
        """Derive the tolerance of a case from the plain model, whose keys and values are rounded as the case's."""
        if plan.case.dtype == "float64" and self.double is not None:
            return references.Tolerance(report.EXACT, report.EXACT)
        rounds = references.format_loss(plan.case.dtype, self.computed) == "rounding"
        return self.uncached.tolerance(plan.specs, plan.case if rounds else None)

    def _start_policy(self, policy: str) -> None:
        if policy != self._policy:
            self._policy = policy
            self.uncached.clear()
            self._structures.clear()

    def run_case(self, case: report.MemoryCase) -> report.CaseReport:
        began = time.perf_counter()
        self._start_policy(case.policy)
        plan, structure = self.plan(case), self._structure_of(case)
        bound, reference = self.tolerance(plan), self.uncached.logits(plan.specs)
        is_double = case.dtype == "float64" and structure is not None
        result = structure.replayed if is_double and structure is not None else self._replay(plan, self.model)
        is_lossy_format = references.format_loss(case.dtype) == "lossy"
        if is_lossy_format and structure is not None:
            structure = max(structure, self._structure(plan, quantized=True), key=lambda each: each.distance)
        comparison = before_loss = references.compare_logits(result, reference, 2 * bound.max_dlogit)
        if plan.first_loss is not None:
            before_loss = references.compare_logits(result, reference, 2 * bound.max_dlogit, plan.first_loss)
        reason = result.failure or ("" if structure is None else structure.reason)
        if not reason and self.ranks is not None:
            reason = "the stored keys and values of all ranks are right: queries, sums or outputs are not"
        verdict, finding = self._verdict(plan, structure, result, comparison, before_loss, bound)
        loss = None
        if (case.policy != "full" or is_lossy_format) and not result.failure:
            loss = self._measure_loss(plan, result, self.uncached.logits(), bound.max_dlogit)
        return report.CaseReport(
            **vars(case),
            **vars(comparison),
            tolerance=bound.max_dlogit,
            rms_tolerance=bound.rms_dlogit,
            structure=None if structure is None else structure.distance,
            verdict=verdict,
            seconds=time.perf_counter() - began,
            scenario_counts=dataclasses.asdict(result.counts),
            finding=finding,
            loss=loss,
            reason=reason if verdict == "broken" and finding is None else "",
        )

    def _structure_of(self, case: report.MemoryCase) -> _Structure | None:
        """Run a case's policy and layout in float64, once; None without a float64 copy of the model."""
        double = dataclasses.replace(case, dtype="float64")
        if self.double is not None and double not in self._structures:
            self._structures[double] = self._structure(self.plan(double))
        return self._structures.get(double)

    def _structure(self, plan: _Plan, *, quantized: bool = False) -> _Structure:
        """Run a case in float64; ``quantized``: the reference's keys and values pass through the case's formats."""
        assert self.double is not None
        replayed = self._replay(plan, self.double)
        if replayed.failure:
            return _Structure(replayed, math.inf, replayed.failure)
        reference = self.uncached.logits(plan.specs, plan.case if quantized else None)
        distance = references.compare_logits(replayed, reference, 2 * report.EXACT, plan.first_loss).max_dlogit
        if plan.first_loss is None:
            return _Structure(replayed, distance)
        alone = self._distance_from_alone(plan, replayed)
        if alone > report.EXACT:
            reason = f"a sequence differs by {alone:.2e} from the same sequence alone, in other chunks"
            return _Structure(replayed, max(distance, alone), reason)
        reason = f"a sequence differs by {distance:.2e} from the reference before its first eviction"
        return _Structure(replayed, distance, reason)

    def _distance_from_alone(self, plan: _Plan, replayed: replay.ReplayResult) -> float:
        """Return max |dlogit| compared with the same sequences alone, in one process.

        They run in other chunks, with room, and are never preempted.
        """
        assert self.double is not None
        largest = 0.0
        chunk = max(1, self.options.prefill_chunk_size // 3 - 1)
        fields: dict[str, Any] = {"max_num_seqs": 1, "prefill_chunk_size": chunk, "num_blocks": None}
        cache = dataclasses.replace(plan.cache, **fields, enable_prefix_caching=False, prefix_cache_ram=None)
        for (number, sample), pieces in replayed.pieces.items():
            self.progress(f"{plan.case.name}: sequence {number} alone")
            stream = self.streams[number]
            stream = replay.ReplayStream(stream.prompt, (stream.forced_tokens[sample],), source=stream.source)
            alone = self._run_streams(cache, self.double, [stream], in_one_process=True)
            comparison = references.compare_logits(
                replay.ReplayResult({(0, 0): pieces}), {(0, 0): alone.logits(0)}, 0.0
            )
            largest = max(largest, comparison.max_dlogit)
        return largest

    def _replay(self, plan: _Plan, model: Transformer) -> replay.ReplayResult:
        self.progress(plan.case.name)
        replayed = self._run_streams(plan.cache, model, self.streams, scenario.num_preemptions(self.options))
        if not replayed.failure:
            scenario.check_scenario_counts(replayed, self.streams, self.options, plan.case.layout)
        return replayed

    def _on_ranks(self, model: Transformer, cache: CacheConfig, config: EngineConfig) -> replay.EngineParts:
        """Return the parts of an engine on the mesh, if there is one."""
        return (model, config) if self.ranks is None else self.ranks.prepare(model, cache, config)

    def _run_streams(
        self,
        cache: CacheConfig,
        model: Transformer,
        streams: Sequence[replay.ReplayStream],
        squeezes: int = 0,
        *,
        in_one_process: bool = False,
    ) -> replay.ReplayResult:
        """Run streams on an engine with the injected fault, if any."""
        is_whole, config = in_one_process or self.ranks is None, self.engine_config
        if not is_whole:
            model, config = self._on_ranks(model, cache, config)
        with (
            inject_model_fault(self.fault, model),
            replay.ReplayEngine(model, cache, streams, config, wrap=self._wrap) as run,
        ):
            if is_whole and any(group.has_summaries for group in run.engine.kv_cache.groups):
                SummaryCheck(run.engine, run.result.findings)
            try:
                run.run_all(squeezes=squeezes)
            except EngineError as error:
                return dataclasses.replace(run.result, failure=error.message)
            except AssertionError as error:  # of a kernel or of the scheduler, whose inputs are wrong
                return dataclasses.replace(run.result, failure=f"the engine failed: {error}")
            return run.result

    def _wrap(self, engine: Engine) -> KVCache:
        inject_engine_fault(self.fault, engine)
        return engine.kv_cache

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
            self._needles = NeedleRecall(self.model, self.language, length)
        self.progress(f"{plan.case.name}: needles")
        return dataclasses.replace(loss, recall=self._needles.recall(plan.cache))

    def round_trip(self, case: report.MemoryCase, method: str) -> report.RoundTripResult:
        """Send a case's sequences on a round trip in float64, and compare them with sequences that stayed."""
        self._start_policy(case.policy)
        self.progress(f"{case.name} through {method}")
        plan, unit = self.plan(case), ROUND_TRIPS[method].unit
        plan = plan._replace(cache=dataclasses.replace(plan.cache, num_blocks=None))
        if self.double is None:
            reason = "there is no room for a float64 copy of the weights"
            return report.RoundTripResult(case.name, method, None, 0, unit, "skipped", reason)
        config = self.engine_config
        if self.ranks is not None:  # no rank has all weights
            config = dataclasses.replace(
                config, weights_fingerprint=model_lib.fingerprint.weights_fingerprint(self.double)
            )
        with tempfile.TemporaryDirectory(prefix="kvad-verify-") as folder:
            try:
                run = run_round_trip(
                    method, self.double, plan.cache, self.streams, Path(folder), config=config, prepare=self._on_ranks
                )
            except (ConfigError, RequestError, StorageError) as error:
                reason = _full_message(error).replace(f"{folder}/", "")
                return report.RoundTripResult(case.name, method, None, 0, unit, "skipped", reason)
        reference = self.uncached.logits(plan.specs, None if case.dtype == "float64" else case)
        reference = {key: reference[key] for key in run.replay.pieces}
        distance = references.compare_logits(run.replay, reference, 2 * report.EXACT, plan.first_loss).max_dlogit
        if plan.first_loss is not None:
            distance = max(distance, self._distance_from_alone(plan, run.replay))
        verdict: Literal["exact", "broken", "recomputed"] = "exact" if run.moved else "recomputed"
        if not distance <= report.EXACT:
            verdict = "broken"
        return report.RoundTripResult(case.name, method, distance, run.moved, unit, verdict, run.miss_reason)

    def search(self, case: report.MemoryCase) -> report.RoundTripResult:
        """Run a beam search from each prompt in the engine's dtype, and compare every beam with its reference."""
        self._start_policy(case.policy)
        name, plan = f"{self.options.num_beams} beams", self.plan(case)
        self.progress(f"{case.name} with {name}")
        result = partial(report.RoundTripResult, case.name, name, unit="tokens")
        if plan.first_loss is not None or references.format_loss(case.dtype, self.computed) != "none":
            reason = "the reference of a beam is the model with the same keys and values"
            return result(max_dlogit=None, moved=0, verdict="skipped", reason=reason)
        prompts = [stream for stream in self.streams if stream.after is None]
        try:
            beams = self.options.num_beams
            run = run_beams(self.model, plan.cache, prompts, beams, self.engine_config, self._on_ranks)
        except (ConfigError, RequestError) as error:
            return result(max_dlogit=None, moved=0, verdict="skipped", reason=_full_message(error))
        exact = self.options.endless and plan.specs != self.plain_specs
        cache = NoCache(self.config, specs=plan.specs, exact_rope=exact, kernel="reference")
        reference = references.compute_reference(self.exact, self.plain, run.sequences, cache)
        bound = reference.tolerance
        comparison = references.compare_logits(run.replay, reference.logits, 2 * bound.max_dlogit)
        return result(
            max_dlogit=comparison.max_dlogit,
            moved=comparison.compared,
            verdict="exact" if bound.allows(comparison) else "broken",
        )

    def _verdict(
        self,
        plan: _Plan,
        structure: _Structure | None,
        result: replay.ReplayResult,
        comparison: report.Comparison,
        before_loss: report.Comparison,
        bound: references.Tolerance,
    ) -> tuple[report.Verdict, report.MismatchFinding | None]:
        """Return the verdict, and the finding of a broken engine; ``before_loss``: only before the first eviction."""
        if result.failure:
            return "broken", self._diagnose(plan)
        if result.findings:
            return "broken", result.findings[0]
        if structure is not None and not structure.distance <= report.EXACT:
            finding = self._diagnose(self.plan(dataclasses.replace(plan.case, dtype="float64")))
            is_rounding = finding is not None and finding.fault == "dtype"  # each precision has its own
            return "broken", (self._diagnose(plan) or finding) if finding is None or is_rounding else finding
        is_finite, loss = math.isfinite(comparison.max_dlogit), references.format_loss(plan.case.dtype, self.computed)
        if loss == "lossy" and is_finite:
            return "lossy by design", None
        within = bound.allows(before_loss) and before_loss.agree + before_loss.ties == before_loss.compared
        if loss == "none" and not within:
            return "broken", self._diagnose(plan)
        if plan.first_loss is not None:
            return ("lossy by design", None) if is_finite else ("broken", self._diagnose(plan))
        if within:
            return ("exact" if loss == "none" and structure is not None else "within tolerance"), None
        finding = self._diagnose(plan)
        return ("lossy by design", None) if finding is None and is_finite else ("broken", finding)

    def _diagnose(self, plan: _Plan) -> report.MismatchFinding | None:
        """Find the fault, without a policy that ranks, merges or offloads, because its slots move."""
        groups = build_groups(self.plain_specs, plan.cache)
        if plan.first_loss is not None or any(group.lower_level is not None for group in groups):
            finding = self._diagnose(self.plan(dataclasses.replace(plan.case, policy="full", endless=False)))
            evidence = "" if finding is None else f"{finding.evidence}, without the policy too"
            return None if finding is None else dataclasses.replace(finding, evidence=evidence)
        case = plan.case
        if case not in self._findings:
            self.progress(f"{case.name}: looking for the first difference")
            model, plain = self.model, self.plain
            if case.dtype == "float64" and self.double is not None:
                model, plain = self.double, self.exact
            if self.ranks is not None:
                return self.ranks.diagnose(model, plan.cache, self.streams[0], self.exact)
            subject = Subject(model, self.exact, plain, self.engine_config, partial(inject_engine_fault, self.fault))
            lossy = references.format_loss(case.dtype, self.computed) != "none"
            squeezes = scenario.num_preemptions(self.options)
            find = partial(diagnose, cache=plan.cache, streams=self.streams, squeezes=squeezes, lossy=lossy)
            with inject_model_fault(self.fault, model):
                finding = find(subject)
                if (
                    finding is None and self.engine_config.deterministic
                ):  # its kernels may fail before they are compared
                    config = dataclasses.replace(self.engine_config, deterministic=False)
                    finding = find(subject._replace(config=config))
            self._findings[case] = finding
        return self._findings[case]

    def notes(self) -> list[str]:
        """Return notes about what was not, or could not be, tested."""
        notes = []
        if self.double is None:
            notes.append("no room for a float64 copy of the weights: the structure of no configuration was verified")
        retained = {}
        for plan in {case.policy: self.plan(case) for case in self.cases if case.policy != "full"}.values():
            lengths = [spec.window + spec.num_sinks for spec in plan.specs if spec.window is not None]
            lengths += [] if plan.first_loss is None else [plan.first_loss]
            retained[plan.case.policy] = min(lengths, default=0)
        notes += report.length_notes(
            max(stream.limit for stream in self.streams),
            [spec.window for spec in self.plain_specs if spec.window is not None],
            retained,
            self.config.max_seq_len if self.options.endless else None,
        )
        if self.options.prefix_hit and "contiguous" in self.options.layouts:
            notes.append("contiguous: a sequence is one block, so there are no prefix hits to verify")
        if self._needles is not None and self._needles.reason:
            notes.append(f"recall is not measured: {self._needles.reason}")
        return notes


def _full_message(error: KvadError) -> str:
    return error.message + (f"; {error.hint}" if error.hint else "")
