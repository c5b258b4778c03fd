"""``kvad bench cache``: generation with the cache, by recomputation, and with a cache that is grown by ``torch.cat``.

The three generate the same tokens greedily, in one process, taking turns between marks (64, 128, ... tokens), so that
what slows the machine slows all of them; every number is a median over repeats.  The first is the real engine, with
its scheduler, sampler and detokenizer; the other two run nothing but the model and an argmax.  ``torch.cat`` lives
here only: it is how a cache is often written first, and it copies everything once per token.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvad import config, ops
from kvad.benchmarks.results import Progress, commit_id, machine_info, no_progress
from kvad.benchmarks.step_profile import bytes_per_number
from kvad.config import attention_specs
from kvad.engine import Engine, StepTimes
from kvad.engine.scheduling import SamplingParams
from kvad.errors import EngineError, RequestError
from kvad.llm import LLM
from kvad.model import NoCache, Transformer
from kvad.model_input import (
    AttentionParams,
    CacheProtocol,
    CacheView,
    DeltaInputs,
    ModelInput,
    SubBatch,
    TokenPositions,
)

CURVE_NAMES = ("cache", "recompute", "cat")
MEDIAN_WINDOW = 15  # tokens to each side, whose median is the time of one token


@dataclass(frozen=True)
class TimingCurve:
    """Timing of one method."""

    seconds: tuple[float, ...]  # total at each mark
    fastest: tuple[float, ...]  # over the repeats
    slowest: tuple[float, ...]
    exponent: float  # slope of log seconds over log tokens
    early: float  # milliseconds of the 32nd token
    late: float  # milliseconds of the last token


@dataclass(frozen=True)
class FlopCount:
    """FLOPs and bytes of generating ``tokens`` tokens, and the factor of recomputation."""

    tokens: int
    cached: config.flops.Cost
    recomputed: config.flops.Cost
    gain: config.flops.Gain  # counted from the shapes
    formula: config.flops.Gain  # by document 004's formula, which starts from one token


@dataclass(frozen=True)
class BenchResult:
    """Result of ``kvad bench cache``."""

    what: str
    machine: str
    commit: str
    dtype: str
    cache_dtype: str
    layout: str
    parameters: int
    prompt: int
    repeats: int
    tokens: tuple[int, ...]
    curves: dict[str, TimingCurve]
    speedup: tuple[float, ...]  # seconds of recomputation over seconds with the cache, at each of tokens
    engine_ms: float  # of one decoding step
    model_ms: float
    flatness: float  # the last token's time over the 32nd's, with the cache
    outputs_agree: int  # leading tokens that are equal in all curves
    counted: tuple[FlopCount, ...]

    def lines(self) -> list[dict[str, object]]:
        """Return one flat object per curve and mark, with machine and commit, as ``kvad plot`` reads them."""
        names = ("what", "machine", "commit", "parameters", "dtype", "cache_dtype", "layout", "repeats")
        run = {name: getattr(self, name) for name in names}
        found: list[dict[str, object]] = []
        for name, curve in self.curves.items():
            for at, counted in enumerate(self.counted):
                cost = counted.recomputed if name == "recompute" else counted.cached
                numbers = {"tokens": counted.tokens, "seconds": curve.seconds[at], "exponent": curve.exponent}
                numbers |= {"fastest": curve.fastest[at], "slowest": curve.slowest[at]}
                found.append({**run, "curve": name, **numbers, "flops": cost.flops, "bytes": cost.bytes})
        return found


def bench_cache(
    llm: LLM,
    tokens: Sequence[int] = (64, 128, 256, 512),
    repeats: int = 3,
    progress: Progress = no_progress,
    *,
    prompt: str | Sequence[int] = "",
) -> BenchResult:
    """Time and count the generation of ``tokens`` tokens after ``prompt`` (empty: the opening token).

    It uses a separate engine with one sequence and the layout, dtype and block size of ``llm``'s cache. An empty prompt
    without an opening token is token 0. Raises RequestError for impossible marks, or marks beyond the model's limit.
    """
    marks = tuple(sorted(set(tokens)))
    has_opening = llm.tokenizer is not None and llm.tokenizer.special_tokens.separator is not None
    start = llm.encode(prompt) if len(prompt) or has_opening else [0]
    _check(llm, marks, len(start), repeats)
    bench = _Bench(llm, start, marks)
    bench.run(min(2 * MEDIAN_WINDOW, marks[-1]))  # warm
    bench.engine.times = StepTimes()
    runs = [bench.run(marks[-1], number, repeats, progress) for number in range(repeats)]
    curves = {name: _curve([run[name] for run in runs], marks) for name in CURVE_NAMES}
    times = bench.engine.times
    return BenchResult(
        what="bench cache",
        machine=machine_info(),
        commit=commit_id(),
        dtype=llm.model.dtype_name,
        cache_dtype=llm.cache_config.format_name,
        layout=llm.cache_config.layout,
        parameters=sum(parameter.numel() for parameter in llm.model.parameters()),
        prompt=len(start),
        repeats=repeats,
        tokens=marks,
        curves=curves,
        speedup=tuple(a / b for a, b in zip(curves["recompute"].seconds, curves["cache"].seconds, strict=True)),
        engine_ms=1e3 * (times.total - times.model) / times.steps,
        model_ms=1e3 * times.model / times.steps,
        flatness=curves["cache"].late / curves["cache"].early,
        outputs_agree=bench.agree,
        counted=tuple(_count(llm, len(start), mark) for mark in marks),
    )


def _check(llm: LLM, marks: Sequence[int], prompt: int, repeats: int) -> None:
    if len(marks) < 2 or marks[0] < 2:
        raise RequestError("new_tokens: must be at least two different numbers, each at least 2")
    if repeats < 1:
        raise RequestError(f"repeats: must be at least 1, got {repeats}")
    if prompt + marks[-1] > llm.model.config.max_seq_len:
        limit = llm.model.config.max_seq_len
        message = f"{prompt} prompt tokens and {marks[-1]} new ones exceed the model's limit of {limit}"
        raise RequestError(message, f"--new-tokens up to {limit - prompt}")


def _count(llm: LLM, prompt: int, mark: int) -> FlopCount:
    stored = bytes_per_number(llm.engine.kv_cache.groups)
    element = config.DTYPE_BYTES[llm.model.dtype_name]
    cached, fresh = config.flops.generation_cost(llm.model.config, prompt, mark, element=element, stored=stored)
    gain = config.flops.Gain(fresh.attention / cached.attention, fresh.projections / cached.projections)
    return FlopCount(mark, cached, fresh, gain, config.flops.closed_form_flops(mark))


class _Bench:
    """Runs the curves in turns; every engine run has a separate prefix salt, so nothing is reused."""

    def __init__(self, llm: LLM, start: list[int], marks: Sequence[int]) -> None:
        self.model, self.start, self.marks = llm.model, start, marks
        cache = replace(llm.cache_config, max_num_seqs=1, max_seq_len=len(start) + marks[-1], num_blocks=None)
        self.engine = Engine(llm.model, cache, tokenizer=llm.tokenizer)
        self.agree = marks[-1]
        self._runs = 0
        self._steps = {"cache": self._cached, "recompute": self._recomputed, "cat": self._grown}

    def run(
        self, total: int, number: int = 0, repeats: int = 1, progress: Progress = no_progress
    ) -> dict[str, list[float]]:
        """Return the seconds of each token, by curve; ``progress`` gets the tokens done over all repeats."""
        order = CURVE_NAMES[number % len(CURVE_NAMES) :] + CURVE_NAMES[: number % len(CURVE_NAMES)]
        steps = {name: self._steps[name](total) for name in order}
        seconds: dict[str, list[float]] = {name: [] for name in order}
        ids: dict[str, list[int]] = {name: [] for name in order}
        done = 0
        for mark in sorted({*(m for m in self.marks if m < total), total}):
            for name in order:
                for _ in range(mark - done):
                    began = time.perf_counter()
                    ids[name].append(next(steps[name]))
                    seconds[name].append(time.perf_counter() - began)
                progress(name, number * total + mark, repeats * total)
            done = mark
        same = (one == two == three for one, two, three in zip(*ids.values(), strict=True))
        self.agree = min(self.agree, next((at for at, equal in enumerate(same) if not equal), self.agree))
        return seconds

    def _cached(self, total: int) -> Iterator[int]:
        self._runs += 1
        sampling = SamplingParams(max_tokens=total, temperature=0, ignore_eos=True)
        request = self.engine.add_request(self.start, sampling, cache_salt=f"bench {self._runs}")
        try:
            while not self.engine.idle:
                for piece in self.engine.step():
                    if piece.error is not None:
                        raise EngineError(f"bench: {piece.error}")
                    if piece.token_id is not None:
                        yield piece.token_id
        finally:
            self.engine.abort_request(request)

    @torch.inference_mode()
    def _next(self, tokens: Sequence[int], first: int, cache: CacheProtocol, limit: int) -> int:
        """Run ``tokens`` at positions from ``first`` on, and choose the next token."""
        ids = torch.tensor(tokens, device=self.engine.device)
        positions = torch.arange(first, first + len(tokens), device=ids.device)
        sub_batches = (SubBatch(1, len(tokens), first + len(tokens)),)
        last, limits = torch.tensor([len(tokens) - 1], device=ids.device), torch.full_like(positions, limit)
        model_input = ModelInput(ids, positions, sub_batches, last, seq_lens=limits)
        return int(self.model.logits(self.model(model_input, cache), last).argmax())

    def _recomputed(self, total: int) -> Iterator[int]:
        tokens, memory = list(self.start), NoCache(self.model.config)
        for _ in range(total):
            tokens.append(self._next(tokens, 0, memory, len(self.start) + total))
            yield tokens[-1]

    def _grown(self, total: int) -> Iterator[int]:
        memory, new, length = ConcatCache(self.model), list(self.start), 0
        for _ in range(total):
            token = self._next(new, length, memory, len(self.start) + total)
            length, new = length + len(new), [token]
            yield token


class ConcatCache:
    """One sequence's keys and values, [1, K, S, D] per layer, concatenated by ``torch.cat`` for every token."""

    def __init__(self, model: Transformer) -> None:
        self.specs = attention_specs(model.config)
        dtype, device = model.token_embedding.dtype, model.token_embedding.device
        self.keys = [torch.empty(1, s.num_kv_heads, 0, s.head_dim, dtype=dtype, device=device) for s in self.specs]
        self.values = [torch.empty(1, s.num_kv_heads, 0, s.value_dim, dtype=dtype, device=device) for s in self.specs]
        self.positions = torch.empty(1, 0, dtype=torch.int64, device=device)

    def open(self, step: ModelInput) -> Sequence[CacheView]:
        angles, queries = ops.rotary.RotaryCache(step.positions), TokenPositions(step.positions.unsqueeze(0))
        self.positions = torch.cat((self.positions, queries.position), dim=1)
        patterns = [spec.pattern for spec in self.specs]
        keys = TokenPositions(self.positions)
        masks = {pattern: ops.attention.AttentionMask(queries, keys, pattern) for pattern in patterns}
        return [_ConcatView(self, layer, masks[pattern], angles) for layer, pattern in enumerate(patterns)]


@dataclass
class _ConcatView:
    cache: ConcatCache
    layer: int
    mask: ops.attention.AttentionMask
    angles: ops.rotary.RotaryCache

    def write(self, k: Tensor, v: Tensor) -> None:
        raise AssertionError("self-attention reads no source")

    def convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        keys, layer = self.cache.keys, self.layer
        keys[layer] = torch.cat((keys[layer], x.unsqueeze(0).unsqueeze(0)), dim=2)
        history = F.pad(keys[layer][0], (0, 0, kernel.shape[1] - 1, 0))[:, -(kernel.shape[1] - 1 + len(x)) :]
        return ops.recurrence.causal_convolution(history, kernel)[0]

    def recur(self, x: Tensor, log_decay: Tensor) -> Tensor:
        values, layer = self.cache.values, self.layer
        start = values[layer].shape[2]
        state = values[layer][:, 0, -1] if start else x.new_zeros(1, x.shape[1])
        is_first = torch.arange(start, start + len(x), device=x.device).unsqueeze(0) == 0
        states = ops.recurrence.gated_recurrence(state, x.unsqueeze(0), log_decay.unsqueeze(0), is_first)
        values[layer] = torch.cat((values[layer], states.unsqueeze(1)), dim=2)
        return states[0]

    def delta(self, inputs: DeltaInputs) -> Tensor:
        """Apply the rule to all tokens of one chunk; the values are the state."""
        values, layer = self.cache.values, self.layer
        start = inputs.k.new_zeros(1, inputs.v.shape[1], inputs.k.shape[2], inputs.v.shape[2])
        rows = DeltaInputs(*(each.unsqueeze(0) for each in inputs))
        state = start if values[layer].shape[-2] == 0 else values[layer]
        out, values[layer] = ops.recurrence.gated_delta_rule(state, rows)
        return out[0]

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        assert k is not None and v is not None
        if params.rotary is not None:
            q, k = self.angles.rotate(q, params.rotary), self.angles.rotate(k, params.rotary)
        keys, values, layer = self.cache.keys, self.cache.values, self.layer
        keys[layer] = torch.cat((keys[layer], k.transpose(0, 1).unsqueeze(0)), dim=2)
        values[layer] = torch.cat((values[layer], v.transpose(0, 1).unsqueeze(0)), dim=2)
        queries = q.unsqueeze(0)
        return ops.attention.dot_product_attention(queries, keys[layer], values[layer], self.mask, params).out[0]


def _curve(runs: Sequence[Sequence[float]], marks: Sequence[int]) -> TimingCurve:
    totals = [[math.fsum(run[:mark]) for run in runs] for mark in marks]
    seconds = tuple(statistics.median(each) for each in totals)
    early = min(32, marks[-1])
    return TimingCurve(
        seconds=seconds,
        fastest=tuple(min(each) for each in totals),
        slowest=tuple(max(each) for each in totals),
        exponent=loglog_slope(marks, seconds),
        early=_milliseconds(runs, early),
        late=_milliseconds(runs, marks[-1]),
    )


def _milliseconds(runs: Sequence[Sequence[float]], at: int) -> float:
    """Return the milliseconds of token ``at`` (from 1): the median of its neighbors, over all runs."""
    return 1e3 * statistics.median(t for run in runs for t in run[max(1, at - 1 - MEDIAN_WINDOW) : at + MEDIAN_WINDOW])


def loglog_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the least-squares slope of (log x, log y): 1 for a linear cost, 2 for a quadratic one."""
    return statistics.linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope
