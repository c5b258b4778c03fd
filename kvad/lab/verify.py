"""Every memory against the judge: is what comes out of the cache what the model would have said without it?

The judge is the same model with :class:`kvad.model.fresh.Fresh`, each row computed whole.  Every memory runs the same
rows through the real path (:mod:`kvad.lab.replay`), in the scenario of :mod:`kvad.lab.scenario`, and the logits of
every position that was computed, recomputed ones included, are laid beside the judge's.  The rules of the verdicts are
those of :mod:`kvad.lab.findings`; a broken memory is diagnosed by :mod:`kvad.lab.diagnose`.

Weights are taken as stored and computed with in float32 and float64; a half precision is a way to *store* keys and
values here, as it is on a CPU.  A lossy format (fp8, int8, int4) has its structure judged by the model whose keys and
values go through it (:mod:`kvad.lab.rounded`): what it loses is the format's, and no more.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kvad.cache.formats import FORMATS, parted
from kvad.cache.planning import plan_memory
from kvad.cache.sizing import CacheConfig
from kvad.config import ModelConfig, mixers
from kvad.errors import EngineError, MemoryPlanError
from kvad.lab.diagnose import diagnose
from kvad.lab.faults import check_fault, hurt_memory, hurt_model
from kvad.lab.findings import EXACT, Divergence, Finding, MemoryReport, Report, Verdict
from kvad.lab.replay import Key, Replayed, replay, uncached
from kvad.lab.rounded import Rounded
from kvad.lab.scenario import Options, cache_config, check_happened, longest_source, make_streams, squeezes
from kvad.model.fresh import Fresh
from kvad.model.transformer import Transformer
from kvad.step import Memory

__all__ = ["Comparison", "Options", "compare", "require_room", "tolerance", "verify"]

COMPUTE_EPS = 256
STORED_EPS = 8
AMPLIFIED = 16
MOST_ROWS = 1 << 40  # what would fit is not looked for beyond


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A memory's logits beside the judge's, over every position that was computed."""

    max_dlogit: float
    kl_mean: float
    kl_max: float
    compared: int
    divergences: tuple[Divergence, ...]


def compare(replayed: Replayed, judge: dict[Key, Tensor], tie_below: float) -> Comparison:
    """``judge`` [T, V] per row; NaN on either side counts as an infinite difference."""
    worst, kl, divergences = 0.0, [], []
    for key, pieces in replayed.pieces.items():
        for start, have in pieces:
            true = judge[key][start : start + len(have)].double()
            have = have.double()
            worst = max(worst, float((have - true).abs().nan_to_num(nan=torch.inf).max()))
            kl.append(_kl(true, have))
            divergences += _divergences(key, start, true, have, tie_below)
    divergence = torch.cat(kl)
    ordered = tuple(sorted(divergences, key=lambda d: (d.tie, d.position, d.row, d.sample)))
    return Comparison(worst, float(divergence.mean()), float(divergence.max()), len(divergence), ordered)


def _kl(true: Tensor, have: Tensor) -> Tensor:
    """KL(judge || memory) in nats, [n, V] [n, V] -> [n]."""
    p, q = true.log_softmax(-1), have.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)


def _divergences(key: Key, start: int, true: Tensor, have: Tensor, tie_below: float) -> list[Divergence]:
    best, chosen = true.argmax(-1), have.argmax(-1)
    found = []
    for at in (best != chosen).nonzero().squeeze(-1).tolist():
        top = true[at].topk(min(2, true.shape[-1])).values
        gap = float(top[0] - top[-1])
        found.append(Divergence(*key, start + at, int(best[at]), int(chosen[at]), gap, gap < tie_below))
    return found


def tolerance(dtype: str, scale: float, structure: float) -> float:
    """How far logits may be from the judge's; ``scale``: its largest |logit|, ``structure``: the float64 twin's noise.

    float64: 1e-10.  Else rounding in float32 (256 eps, or 16 times the twin's own noise carried over to float32: a
    sharp model amplifies it) and, for a half precision, that of what is stored (8 eps of it).  A lossy format has
    float32's: beyond it, a token that differs is no tie.
    """
    if dtype == "float64":
        return EXACT
    single, double = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
    coarser = STORED_EPS * _eps(dtype) * scale if _loss(dtype) == "rounding" else 0.0
    return max(COMPUTE_EPS * single * scale, AMPLIFIED * structure * single / double) + coarser


def _loss(dtype: str) -> str:
    """The worse of keys and values: "none", "rounding", "lossy"."""
    return max((FORMATS[name].loss for name in parted(dtype)), key=("none", "rounding", "lossy").index)


def _eps(dtype: str) -> float:
    return max(FORMATS[name].eps for name in parted(dtype))


def require_room(config: ModelConfig, lengths: Sequence[int], options: Options, available: int | None) -> None:
    """MemoryPlanError when verifying needs more than is ``available`` (None: nobody knows); it says what would fit.

    ``lengths``: tokens of the prompts; rows of ``options`` beyond them have a prompt of one token.
    """
    prompts = sorted(lengths, reverse=True)
    logits, rest = _needs(config, prompts, options, options.rows)
    if available is None or logits + rest <= available:
        return
    fit = bisect.bisect_right(
        range(1, min(options.rows, MOST_ROWS)), available, key=lambda rows: sum(_needs(config, prompts, options, rows))
    )
    raise MemoryPlanError(
        f"--rows {options.rows}: verifying takes about {_size(logits + rest)} (logits of the judge and the memories "
        f"{_size(logits)}, weights, cache and work {_size(rest)}) and {_size(available)} is available",
        f"what would fit: --rows {fit}" if fit else "not even one row fits: take fewer --tokens, or a smaller model",
    )


def _needs(config: ModelConfig, prompts: Sequence[int], options: Options, rows: int) -> tuple[int, int]:
    """(bytes of the logits that are held at once, bytes of everything else) of so many rows, the longest ones.

    Logits stand in float32 and float64 for the judge, in float64 for the twin of each layout, and in float32 for the
    memory at hand; each lossy format has a judge in float64 too, beside its memory's.  The rest is the weights in both
    precisions and the larger layout's twin, as it is planned.
    """
    known = prompts[:rows]
    shares = options.prefix_hit and "paged" in options.layouts
    every = [*known, known[min(1, len(known) - 1)], *known[: int(shares)]]  # the forked sample, the shared prefix
    seats = rows - len(known) + len(every)
    lossy = sum(_loss(dtype) == "lossy" for dtype in options.dtypes)
    numbers = 16 + 8 * len(options.layouts) + 8 * (lossy + bool(lossy))
    logits = (sum(every) + rows - len(known) + seats * options.tokens) * config.vocab * numbers
    size, longest = options.block_size, known[0] + options.tokens
    blocks = sum(-(-(length + options.tokens) // size) for length in every)
    blocks += (rows - len(known)) * -(-(1 + options.tokens) // size)
    tight = options.preempt and any(spec.window is None for spec in mixers(config))
    rest = 0
    for layout in options.layouts:
        cache = CacheConfig(
            layout="paged" if layout == "paged" else "contiguous",
            dtype="float64",
            block_size=size,
            rows=seats,
            capacity=longest,
            chunk=options.chunk,
            blocks=max(-(-longest // size) + 1, blocks // 2) if tight and layout == "paged" else None,
            source_capacity=longest_source(config),
        )
        plan = plan_memory(config, cache, weights_dtype="float64", budget=options.chunk + seats)
        rest = max(rest, plan.total + plan.weights // 2)
    return logits, rest


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def verify(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    options: Options | None = None,
    *,
    fault: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Hold every layout x dtype of ``options`` against the judge.

    ``fault``: put a broken memory in place of the real one.  UsageError: prompts or a fault that cannot be;
    EngineError: a scenario that was asked for did not take place, or an injected fault that went unnoticed.
    """
    began = time.perf_counter()
    options = options or Options()
    run = _Run(model, prompts, options, fault, progress)
    memories = tuple(run.memory(layout, dtype) for layout in options.layouts for dtype in options.dtypes)
    report = Report(
        rows=tuple(len(s.tokens(i)) for s in run.streams for i in range(len(s.forced))),
        positions=sum(len(t) for t in run.judge64.values()),
        logit_scale=run.scale,
        injected=fault,
        memories=memories,
        notes=tuple(run.notes()),
        seconds=time.perf_counter() - began,
    )
    if fault is not None and not report.broken:
        raise EngineError(f"the injected fault {fault!r} changed nothing here", "give longer prompts or more --tokens")
    return report


class _Run:
    """The judge's answers, and one replay per memory."""

    def __init__(
        self,
        model: Transformer,
        prompts: Sequence[Sequence[int]],
        options: Options,
        fault: str | None,
        progress: Callable[[str], None],
    ) -> None:
        self.options, self.fault, self.progress = options, fault, progress
        self.config = model.config
        self.single = model if model.table.dtype == torch.float32 else copy.deepcopy(model).float()
        self.double = copy.deepcopy(model).double()
        progress("the judge")
        self.streams = make_streams(self.single, prompts, options)
        if fault is not None:
            for layout in options.layouts:
                check_fault(fault, self.config, cache_config(self.config, self.streams, options, layout, "float64"))
        self.judge32, self.judge64 = self._judge(self.single), self._judge(self.double)
        self.scale = max(float(logits.abs().max()) for logits in self.judge64.values())
        self._twins: dict[str, tuple[Replayed, Comparison]] = {}
        self._findings: dict[str, Finding | None] = {}
        self._judges: dict[str, dict[Key, Tensor]] = {}

    def _judge(self, model: Transformer, memory: Memory | None = None) -> dict[Key, Tensor]:
        return {
            (number, sample): uncached(model, stream.tokens(sample), stream.limit, memory, stream.source)
            for number, stream in enumerate(self.streams)
            for sample in range(len(stream.forced))
        }

    def memory(self, layout: str, dtype: str) -> MemoryReport:
        began = time.perf_counter()
        twin, structure = self._twin(layout)
        noise = structure.max_dlogit if structure.max_dlogit <= EXACT else 0.0  # what is broken excuses nothing
        bound = tolerance(dtype, self.scale, noise)
        replayed, found = (twin, structure) if dtype == "float64" else self._replay(layout, dtype, bound)
        off = max(structure.max_dlogit, self._coded(layout, dtype) if _loss(dtype) == "lossy" else 0.0)
        verdict, finding = self._verdict(layout, dtype, off, found, bound)
        flips = found.divergences
        return MemoryReport(
            layout=layout,
            dtype=dtype,
            max_dlogit=found.max_dlogit,
            tolerance=bound,
            structure=off,
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
        )

    def _twin(self, layout: str) -> tuple[Replayed, Comparison]:
        """The same memory in float64, which judges the structure."""
        if layout not in self._twins:
            self._twins[layout] = self._replay(layout, "float64", EXACT)
        return self._twins[layout]

    def _coded(self, layout: str, dtype: str) -> float:
        """max |dlogit| of a lossy memory, computed with in float64, from the judge of its formats."""
        if dtype not in self._judges:
            self.progress(f"the judge of {dtype}")
            self._judges[dtype] = self._judge(self.double, Rounded(Fresh(self.config), *parted(dtype)))
        return self._replay(layout, dtype, EXACT, self.double, self._judges[dtype])[1].max_dlogit

    def _replay(
        self,
        layout: str,
        dtype: str,
        bound: float,
        model: Transformer | None = None,
        judge: dict[Key, Tensor] | None = None,
    ) -> tuple[Replayed, Comparison]:
        self.progress(f"{layout} {dtype}")
        if model is None or judge is None:
            model, judge = (self.double, self.judge64) if dtype == "float64" else (self.single, self.judge32)
        config = cache_config(self.config, self.streams, self.options, layout, dtype)
        with hurt_model(self.fault, model):
            make = partial(hurt_memory, self.fault)
            replayed = replay(model, config, self.streams, squeezes=squeezes(self.options), make=make)
        check_happened(replayed.happened, self.streams, self.options, layout)
        return replayed, compare(replayed, judge, 2 * bound)

    def _verdict(
        self, layout: str, dtype: str, structure: float, found: Comparison, bound: float
    ) -> tuple[Verdict, Finding | None]:
        if not structure <= EXACT:
            twin = self._diagnose(layout, "float64")
            if twin is not None and twin.fault == "dtype":  # a rounding: each precision has its own
                return "BROKEN", self._diagnose(layout, dtype) or twin
            return "BROKEN", twin if twin is not None or dtype == "float64" else self._diagnose(layout, dtype)
        if _loss(dtype) == "lossy" and math.isfinite(found.max_dlogit):
            return "lossy by design", None
        within = found.max_dlogit <= bound and all(flip.tie for flip in found.divergences)
        if _loss(dtype) != "none":
            if within:
                return "within tolerance", None
            finding = self._diagnose(layout, dtype)
            whole = finding is None and math.isfinite(found.max_dlogit)
            return ("lossy by design", None) if whole else ("BROKEN", finding)
        return ("exact", None) if within else ("BROKEN", self._diagnose(layout, dtype))

    def _diagnose(self, layout: str, dtype: str) -> Finding | None:
        name = f"{layout} {dtype}"
        if name not in self._findings:
            self.progress(f"{name}: looking for the first difference")
            model = self.double if dtype == "float64" else self.single
            config = cache_config(self.config, self.streams, self.options, layout, dtype)
            build = partial(hurt_memory, self.fault)
            lossy = _loss(dtype) != "none"
            with hurt_model(self.fault, model):
                self._findings[name] = diagnose(
                    model, config, self.streams, build, squeezes=squeezes(self.options), lossy=lossy
                )
        return self._findings[name]

    def notes(self) -> list[str]:
        """What a reader should know about what was not, or could not be, tested."""
        notes = []
        longest = max(stream.limit for stream in self.streams)
        for window in sorted({spec.window for spec in mixers(self.config) if spec.window is not None}):
            if longest <= window:
                notes.append(f"no row of up to {longest} tokens passes the window of {window}: give a longer --prompt")
        if self.options.prefix_hit and "contiguous" in self.options.layouts:
            notes.append("contiguous: a row is one block, so there are no prefix hits to verify")
        return notes
