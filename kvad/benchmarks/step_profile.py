"""``kvad bench profile``: where the time of a decoding step goes, beside the time of reading its bytes.

The real engine decodes sequences of one length; its clocks divide a step into scheduling, inputs, forward pass,
sampling and text, and the forward pass is divided by the clocks of the native kernels, or by hooks on the modules if
the model runs in PyTorch. The roofline is the time of reading every weight and the cache once, at the rate at which
this process reads as many bytes.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvad import config, model
from kvad.benchmarks.results import Progress, commit_id, machine_info, no_progress
from kvad.cache import CacheGroup, group_bytes
from kvad.engine import Engine, StepTimes
from kvad.engine.scheduling import SamplingParams
from kvad.errors import EngineError, RequestError
from kvad.llm import LLM
from kvad.model import Transformer
from kvad.model_input import AttentionParams, BlockOps, CacheView, ModelInput, WrappedView

WARM_STEPS = 4  # decoding steps before the measured ones
READ_REPEATS = 5
MIN_READ_BYTES, MAX_READ_BYTES = 1 << 20, 1 << 30
ENGINE_PARTS = ("scheduler", "inputs and block tables", "starting the kernels", "sampling", "text", "other Python")
ATTENTION = "attention and cache read"


@dataclass(frozen=True)
class StepProfile:
    """Result of ``kvad bench profile``; times are milliseconds of one decoding step."""

    what: str
    machine: str
    commit: str
    kernels: str  # the native instruction set, or "PyTorch: " and the reason
    dtype: str
    cache_dtype: str
    parameters: int
    num_seqs: int
    context: int  # tokens of each sequence before the measured steps; of an encoder-decoder: of its source
    new_tokens: int  # measured steps
    repeats: int
    step_ms: float
    slowest_ms: float  # of the repeats
    parts: dict[str, float]
    engine_share: float  # of ENGINE_PARTS in the step
    weight_bytes: int  # read in a step
    cache_bytes: int
    bandwidth: float  # bytes per second
    roofline_ms: float

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.num_seqs / self.step_ms

    @property
    def of_roofline(self) -> float:
        """Time of reading the bytes, as a fraction of the step's time."""
        return self.roofline_ms / self.step_ms


def bench_profile(
    llm: LLM,
    num_seqs: int = 1,
    context: int = 128,
    new_tokens: int = 64,
    repeats: int = 3,
    progress: Progress = no_progress,
) -> StepProfile:
    """Profile the decoding steps of ``num_seqs`` sequences of ``context`` tokens, in a separate engine.

    Raises:
        RequestError: If the numbers are impossible, or beyond the model's limit.
    """
    is_pair = llm.model.config.kind == "encoder-decoder"
    start = 1 if is_pair else context
    _check(llm, num_seqs, start, new_tokens, repeats)
    length = start + WARM_STEPS + new_tokens + 2
    cache = replace(llm.cache_config, max_num_seqs=num_seqs, max_seq_len=length, num_blocks=None)
    cache = replace(cache, max_source_len=context) if is_pair else cache
    options = replace(llm.engine.config, swap_dir=None)
    engine = Engine(llm.model, cache, options, tokenizer=llm.tokenizer)
    runs = []
    for number in range(repeats):
        prompts = _prompts(llm.model.config.vocab_size, num_seqs, context, number)
        run = _Run(engine, prompts, new_tokens, is_pair).measure()
        if min(run.values()) < 0:  # a virtual machine's clock went back
            run = _Run(engine, prompts, new_tokens, is_pair).measure()
        runs.append(run)
        progress("profile", number + 1, repeats)
    program, reason = engine.runner.program, engine.runner.native_reason
    totals = [sum(run.values()) for run in runs]
    step = statistics.median_low(totals)
    parts = runs[totals.index(step)]
    source = context if is_pair else 0
    weights, cached = _step_bytes(llm, engine.kv_cache.groups, num_seqs, start + WARM_STEPS + new_tokens // 2, source)
    engine.close()
    bandwidth = read_bandwidth(weights + cached, llm.model.token_embedding.device)
    return StepProfile(
        what="bench profile",
        machine=machine_info(),
        commit=commit_id(),
        kernels=f"PyTorch: {reason}" if program is None else program.variant,
        dtype=llm.model.dtype_name,
        cache_dtype=llm.cache_config.format_name,
        parameters=sum(parameter.numel() for parameter in llm.model.parameters()),
        num_seqs=num_seqs,
        context=context,
        new_tokens=new_tokens,
        repeats=repeats,
        step_ms=step,
        slowest_ms=max(totals),
        parts=parts,
        engine_share=sum(parts.get(name, 0.0) for name in ENGINE_PARTS) / step,
        weight_bytes=weights,
        cache_bytes=cached,
        bandwidth=bandwidth,
        roofline_ms=1e3 * (weights + cached) / bandwidth,
    )


def _check(llm: LLM, num_seqs: int, start: int, new_tokens: int, repeats: int) -> None:
    numbers = {"num_seqs": num_seqs, "context": start, "new_tokens": new_tokens, "repeats": repeats}
    for name, number in numbers.items():
        if number < 1:
            raise RequestError(f"{name}: must be at least 1, got {number}")
    limit, room = llm.model.config.max_seq_len, WARM_STEPS + 2
    if start + new_tokens + room > limit:
        message = f"{start} tokens of context and {new_tokens} new ones exceed the model's limit of {limit}"
        raise RequestError(message, f"At most {limit - room} together.")


def _prompts(vocab_size: int, num_seqs: int, length: int, seed: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = torch.randint(0, vocab_size, (num_seqs, length), generator=draw).tolist()
    return prompts


class _Run:
    """One repeat: prompts are read and some steps run, then ``new_tokens`` steps are measured."""

    def __init__(self, engine: Engine, prompts: Sequence[list[int]], new_tokens: int, is_pair: bool) -> None:
        self.engine, self.new_tokens = engine, new_tokens
        sampling = SamplingParams(max_tokens=WARM_STEPS + new_tokens + 2, temperature=0, ignore_eos=True)
        self.requests = [
            engine.add_request([0], sampling, encoder_token_ids=prompt)
            if is_pair
            else engine.add_request(prompt, sampling)
            for prompt in prompts
        ]

    def measure(self) -> dict[str, float]:
        """Return the milliseconds of each part of a step."""
        engine, runner = self.engine, self.engine.runner
        while any(engine.metrics(request).first_token is None for request in self.requests):
            self._steps(1)
        self._steps(WARM_STEPS)
        with ExitStack() as stack:
            if runner.program is None:
                clock: Any = stack.enter_context(_module_clock(engine))
            else:
                clock = runner.op_seconds = (ctypes.c_double * (len(runner.program.parts) + 1))()
                stack.callback(setattr, runner, "op_seconds", None)
            engine.times, inputs = StepTimes(), runner.input_seconds
            start = time.perf_counter()
            self._steps(self.new_tokens)
            total, inputs = time.perf_counter() - start, runner.input_seconds - inputs
        for request in self.requests:
            engine.abort_request(request)
        self._steps(1)
        seconds = self._parts(engine.times, inputs, total, clock)
        return {name: 1e3 * value / self.new_tokens for name, value in seconds.items()}

    def _steps(self, count: int) -> None:
        for _ in range(count):
            for chunk in self.engine.step():
                if chunk.error is not None:
                    raise EngineError(f"bench: {chunk.error}")

    def _parts(self, times: StepTimes, inputs: float, total: float, clock: Any) -> dict[str, float]:
        parts = defaultdict[str, float](float)
        program = self.engine.runner.program
        if program is None:
            parts.update(clock)
        else:
            for name, seconds in zip([*program.parts, "waiting for other threads"], clock[:], strict=True):
                parts[name] += seconds
        in_model = sum(parts.values())
        parts["inputs and block tables"] = inputs
        parts["starting the kernels"] = max(0.0, times.model - inputs - in_model)
        parts["scheduler"], parts["sampling"], parts["text"] = times.schedule, times.sample, times.text
        parts["other Python"] = total - times.model - times.schedule - times.sample - times.text
        return dict(parts)


# ---------------------------------------------------------------- models in PyTorch


class _Clock(defaultdict[str, float]):
    """Seconds by part; the time of a part that is entered inside another is not the other's."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(float)
        self._open: list[str] = []
        self._since = 0.0
        self._synchronize = torch.cuda.synchronize if device.type == "cuda" else None

    def enter(self, part: str) -> None:
        self._turn()
        self._open.append(part)

    def leave(self) -> None:
        self._turn()
        self._open.pop()

    def _turn(self) -> None:
        if self._synchronize is not None:
            self._synchronize()
        now = time.perf_counter()
        if self._open:
            self[self._open[-1]] += now - self._since
        self._since = now


@contextmanager
def _module_clock(engine: Engine) -> Iterator[_Clock]:
    """Measure the modules of a model that runs in PyTorch."""
    clock, runner, cache = _Clock(engine.device), engine.runner, engine.runner.cache
    with ExitStack() as stack:
        for module, part in _timed_modules(engine.model):
            enter: Callable[..., None] = lambda *_, part=part: clock.enter(part)  # noqa: E731
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(lambda *_: clock.leave()).remove)
        runner.cache = _TimedCache(cache, clock)
        stack.callback(setattr, runner, "cache", cache)
        yield clock


def _timed_modules(transformer: Transformer) -> Iterator[tuple[nn.Module, str]]:
    yield transformer, "norms and sums"  # what is left: residual sums
    yield transformer.embedding, "embedding"
    yield transformer.head, "head"
    for module in transformer.modules():
        if isinstance(module, model.layers.Norm):
            yield module, "norms and sums"
        elif isinstance(module, model.transformer.TransformerLayer):
            parts = (module.attention, module.cross_attention, module.mlp)
            yield from ((part, "weights") for part in parts if part is not None)


class _TimedCache:
    """A cache whose views are measured."""

    def __init__(self, cache: Any, clock: _Clock) -> None:
        self.cache, self.clock = cache, clock

    def open(self, model_input: ModelInput) -> Sequence[CacheView]:
        return [_TimedView(view, self.clock) for view in self.cache.open(model_input)]

    def apply(self, block_ops: BlockOps) -> None:
        self.cache.apply(block_ops)

    def tensors(self) -> list[Tensor]:
        tensors: list[Tensor] = self.cache.tensors()
        return tensors


class _TimedView(WrappedView):
    def __init__(self, view: CacheView, clock: _Clock) -> None:
        super().__init__(view)
        self.clock = clock

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        self.clock.enter(ATTENTION)
        out = self.view.attend(q, k, v, params)
        self.clock.leave()
        return out


# ---------------------------------------------------------------- roofline


def _step_bytes(llm: LLM, groups: Sequence[CacheGroup], num_seqs: int, length: int, source: int) -> tuple[int, int]:
    """Return the bytes of weights and of cached keys and values that one step reads."""
    transformer = llm.model
    assert transformer.decoder is not None
    weights = sum(map(_read_bytes(num_seqs), transformer.decoder.modules()))
    for module in transformer.decoder.modules():
        if isinstance(module, model.attention.CrossAttention):  # its keys and values are in the cache
            weights -= sum(tensor.nbytes for layer in (module.k, module.v) for tensor in layer.parameters())
    head = transformer.head
    weights += sum(tensor.nbytes for tensor in (*head.parameters(), *head.buffers()))
    is_table = transformer.config.tie_embeddings and getattr(head, "output", None) is None
    weights += transformer.token_embedding.nbytes if is_table else 0
    stored = bytes_per_number(groups)
    cost = config.flops.cached_pass(transformer.config, 1, length, source=source, stored=stored)
    return round(weights), num_seqs * cost.bytes_read


def _read_bytes(num_seqs: int) -> Callable[[nn.Module], float]:
    """Return a function that counts a module's own tensors; of experts, as many as the tokens can choose."""

    def own_bytes(module: nn.Module) -> int:
        return sum(x.nbytes for x in (*module.parameters(recurse=False), *module.buffers(recurse=False)))

    def count(module: nn.Module) -> float:
        if not isinstance(module, model.layers.MixtureOfExperts):
            return own_bytes(module)
        # Quantized and separate experts are modules, which are counted on their own.
        parts = (getattr(module, name) for name in module.PARTS)
        modules = sum(own_bytes(part) for part in parts if isinstance(part, nn.Module))
        share = min(1.0, num_seqs * module.spec.num_experts_per_token / module.spec.num_experts)
        return share * (own_bytes(module) + modules) - modules

    return count


def bytes_per_number(groups: Sequence[CacheGroup]) -> float:
    """Return the bytes of a number in the cache, with its share of the scales."""
    numbers = sum(len(group.layers) * group.spec.kv_size for group in groups)
    sizes = [group_bytes(group) for group in groups]
    return sum(size.per_token_payload + size.per_token_scales for size in sizes) / numbers


def read_bandwidth(num_bytes: int, device: torch.device) -> float:
    """Return the bytes per second at which torch sums ``num_bytes``, the best of a few times."""
    size = min(max(num_bytes, MIN_READ_BYTES), MAX_READ_BYTES)
    numbers = torch.zeros(size // 4, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(READ_REPEATS):
        start = time.perf_counter()
        numbers.sum().item()
        seconds.append(time.perf_counter() - start)
    return 4 * len(numbers) / min(seconds)
