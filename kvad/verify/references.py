"""Comparison of logits with a reference: distance, tolerance, loss, recall, and the reference of lossy formats.

``compare_logits`` compares in logits, in nats and by greedy token. ``derive_tolerance`` derives the tolerance from the
plain model in the engine's dtype.

``QuantizedNoCache`` is the uncached model whose keys and values pass through a format and back. A per-token
format makes a token's stored key a function of that key alone, so a cache of that format must equal this model up to
float64 rounding, whatever the blocks, chunks and other sequences. The loss of the format itself is measured apart.

``compare_loss`` measures KL divergence and perplexity (of the prompts' own next tokens at the positions that the cache
computed) compared with the model that keeps everything. ``NeedleRecall`` runs a few of the tasks of
``kvad bench cache-quality`` (benchmarks/needle_tasks.py), as a smoke test.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvad import benchmarks, ops
from kvad import cache as cache_lib
from kvad.cache import CacheConfig
from kvad.config import AttentionSpec, attention_specs
from kvad.engine import Engine
from kvad.errors import KvadError
from kvad.model import NoCache, Transformer
from kvad.model_input import AttentionParams, CacheProtocol, CacheView, ModelInput, WrappedView
from kvad.verify.reference_model import ReferenceModel, WholeSequence
from kvad.verify.replay import ReplayResult, ReplayStream, SequenceKey
from kvad.verify.report import EXACT, Comparison, LossReport, MemoryCase, NeedleScore, TokenDivergence


class QuantizedNoCache:
    """``inner`` with keys and values quantized to the given formats; values that are part of the keys have theirs.

    ``rotate``: encode keys rotated ("write") or as the model gave them; ``exact``: as in ``RotaryCache``.
    """

    def __init__(
        self, inner: NoCache, keys: str, values: str, *, rotate: Literal["write", "read"] = "write", exact: bool = False
    ) -> None:
        for name in (keys, values):
            assert not cache_lib.quantization.get_format(name).is_blockwise, "whole blocks: not a matter of one token"
        self._inner, self._codecs = inner, (ops.quantize.get_codec(keys), ops.quantize.get_codec(values))
        self._rotates, self._exact = rotate == "write", exact

    def open(self, model_input: ModelInput) -> Sequence[CacheView]:
        there = ops.rotary.RotaryCache(model_input.positions, exact=self._exact) if self._rotates else None
        back = ops.rotary.RotaryCache(-model_input.positions, exact=True) if self._rotates and self._exact else None
        (keys, values), pairs = self._codecs, zip(self._inner.open(model_input), self._inner.specs, strict=False)
        return [
            _QuantizedView(view, keys, None if spec.values_in_keys else values, there, back) for view, spec in pairs
        ]


@dataclasses.dataclass
class _QuantizedView(WrappedView):
    """Quantizes keys, rotated by ``there`` if given, and values.

    With ``back``, keys are rotated back, so the inner cache rotates as usual and may rotate sinks further. (float32
    angles cannot be inverted: cos^2 + sin^2 is 1 to eight digits.)
    """

    view: CacheView
    keys: ops.quantize.FormatCodec
    values: ops.quantize.FormatCodec | None  # None: the last numbers of the quantized keys
    there: ops.rotary.RotaryCache | None = None  # rotates keys
    back: ops.rotary.RotaryCache | None = None

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        if k is None or v is None:
            return self.view.attend(q, k, v, params)
        rotary, value_dim = params.rotary, v.shape[-1]
        if rotary is None or self.there is None:
            k = _quantize_dequantize(self.keys, k)
        else:
            k = _quantize_dequantize(self.keys, self.there.rotate(k, rotary))
            if self.back is not None:
                k = self.back.rotate(k, rotary._replace(factor=1 / rotary.factor))
            else:
                q, params = self.there.rotate(q, rotary), params._replace(rotary=None)
        v = k[..., -value_dim:] if self.values is None else _quantize_dequantize(self.values, v)
        return self.view.attend(q, k, v, params)

    def write(self, k: Tensor, v: Tensor) -> None:
        assert self.values is not None, "cross-attention stores its values"
        self.view.write(_quantize_dequantize(self.keys, k), _quantize_dequantize(self.values, v))


def _quantize_dequantize(codec: ops.quantize.FormatCodec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), x.dtype)


NOISE_FACTOR = 4.0  # largest |dlogit|, in those of the plain model in the same dtype
# float32's errors come from the order of sums, and the plain model sums in several: at a position that is sensitive to
# rounding, one order may be right by luck. The half precisions round every result, here and in the engine.
SUM_ORDERS = 4
SUM_ORDERS_OF_ROUNDED = 12  # with rounded activations: few orders round one to another number, which may move an expert
RMS_FACTOR = 2.0  # root mean square of the dlogits, likewise


class Tolerance(NamedTuple):
    """Largest allowed distance of an engine's logits from the float64 reference."""

    max_dlogit: float
    rms_dlogit: float

    def allows(self, comparison: Comparison) -> bool:
        """Return True if both distances are within the tolerance."""
        return comparison.max_dlogit <= self.max_dlogit and comparison.rms_dlogit <= self.rms_dlogit


def derive_tolerance(noise: Sequence[Comparison], dtype: torch.dtype, scale: float) -> Tolerance:
    """Derive the tolerance from the plain uncached model in the engine's dtype.

    Args:
        noise: The plain model's logits, of each order of sums, compared with the same float64 reference.
        dtype: The engine's dtype.
        scale: The reference's largest |logit|.
    """
    if dtype == torch.float64:
        return Tolerance(EXACT, EXACT)
    final = torch.finfo(dtype).eps * scale  # for a plain model that happens to round nothing
    largest, rms = max(each.max_dlogit for each in noise), max(each.rms_dlogit for each in noise)
    return Tolerance(NOISE_FACTOR * largest + final, RMS_FACTOR * rms + final / 8)


class ReferenceLogits(NamedTuple):
    """Logits [T, V] of whole sequences in float64, the largest |logit|, and the tolerance of a model's dtype."""

    logits: dict[SequenceKey, Tensor]
    scale: float
    tolerance: Tolerance


def compute_reference(
    exact: ReferenceModel, plain: ReferenceModel, sequences: Sequence[WholeSequence], cache: CacheProtocol
) -> ReferenceLogits:
    """Compute sequences without a cache in float64 (``exact``) and in the engine's dtype (``plain``)."""
    logits = {(number, 0): each for number, each in enumerate(exact.whole_logits(sequences, cache))}
    scale = max(float(each.abs().max()) for each in logits.values())
    passes = (plain.whole_logits(sequences, cache, sum_order=order) for order in _sum_orders(plain))
    noise = [_compare_whole(dict(zip(logits, each, strict=True)), logits) for each in passes]
    return ReferenceLogits(logits, scale, derive_tolerance(noise, plain.compute_dtype, scale))


_Format = tuple[tuple[AttentionSpec, ...], tuple[str, str] | None]  # layers under a policy; dtype, rotation


class UncachedLogits:
    """Logits of the reference by policy and format, each computed once.

    Args:
        models: The reference in float64 and in the engine's dtype.
        streams: The sequences.
        endless: Rotate by exact angles under a policy, as an endless cache does.
        progress: Called with what is computed.
    """

    def __init__(
        self,
        models: tuple[ReferenceModel, ReferenceModel],
        streams: Sequence[ReplayStream],
        *,
        endless: bool,
        progress: Callable[[str], None],
    ) -> None:
        self.exact, self.plain = models
        self.config, self._endless, self._progress = self.exact.config, endless, progress
        self._full = tuple(attention_specs(self.config))
        keys = [(index, sample) for index, stream in enumerate(streams) for sample in range(len(stream.forced_tokens))]
        self._sequences = {key: _whole(streams[key[0]], key[1]) for key in keys}
        self._computed: dict[_Format, dict[SequenceKey, Tensor]] = {}
        self._noise: dict[_Format, list[Comparison]] = {}
        self.scale = max(float(logits.abs().max()) for logits in self.logits().values())

    def clear(self) -> None:
        """Drop what a policy or a format changes."""
        plain = (self._full, None)
        self._computed = {key: logits for key, logits in self._computed.items() if key == plain}
        self._noise = {key: noise for key, noise in self._noise.items() if key == plain}

    def logits(
        self, specs: Sequence[AttentionSpec] | None = None, case: MemoryCase | None = None
    ) -> dict[SequenceKey, Tensor]:
        """Compute [T, V] of each sequence without a cache, in float64.

        ``specs``: the layers under a policy (None: without one). ``case``: keys and values pass through its formats.
        """
        specs = self._full if specs is None else tuple(specs)
        key = _format(specs, case)
        if key not in self._computed:
            self._computed[key] = self._compute(self.exact, specs, case)
        return self._computed[key]

    def _compute(
        self, model: ReferenceModel, specs: tuple[AttentionSpec, ...], case: MemoryCase | None, sum_order: int = 0
    ) -> dict[SequenceKey, Tensor]:
        if specs != self._full or case is not None:
            self._progress("the reference" + (f" of {case.name}" if case else " under the policy"))
        exact = self._endless and specs != self._full
        no_cache = NoCache(self.config, specs=specs, exact_rope=exact, kernel="reference")
        cache: CacheProtocol = no_cache
        if case is not None:
            formats = cache_lib.quantization.split_format_name(case.dtype)
            rotate: Literal["write", "read"] = "read" if case.rotate == "read" else "write"
            cache = QuantizedNoCache(no_cache, *formats, rotate=rotate, exact=case.endless)
        whole = model.whole_logits(list(self._sequences.values()), cache, sum_order=sum_order)
        return dict(zip(self._sequences, whole, strict=True))

    def tolerance(self, specs: Sequence[AttentionSpec], rounded: MemoryCase | None) -> Tolerance:
        """Derive the tolerance from the plain model, whose keys and values pass through ``rounded``'s formats."""
        noise = self._measure_noise(tuple(specs), rounded)
        if not all(math.isfinite(each.max_dlogit) for each in noise):  # an overflow of the format excuses nothing
            noise = self._measure_noise(tuple(specs), None)
        return derive_tolerance(noise, self.plain.compute_dtype, self.scale)

    def _measure_noise(self, specs: tuple[AttentionSpec, ...], case: MemoryCase | None) -> list[Comparison]:
        """Compare the plain model with the reference; only the logits of one order of sums are in memory."""
        key, exact = _format(specs, case), self.logits(specs)
        if key not in self._noise:
            orders = _sum_orders(self.plain)
            self._noise[key] = [_compare_whole(self._compute(self.plain, specs, case, each), exact) for each in orders]
        return self._noise[key]


def _format(specs: tuple[AttentionSpec, ...], case: MemoryCase | None) -> _Format:
    return specs, None if case is None else (case.dtype, case.rotate)


def _compare_whole(logits: Mapping[SequenceKey, Tensor], exact: Mapping[SequenceKey, Tensor]) -> Comparison:
    return compare_logits(ReplayResult({key: [(0, each)] for key, each in logits.items()}), exact, 0.0)


def _sum_orders(plain: ReferenceModel) -> Sequence[int]:
    if plain.compute_dtype != torch.float32:
        return range(1)
    return range(SUM_ORDERS if plain.activation_bits is None else SUM_ORDERS_OF_ROUNDED)


def _whole(stream: ReplayStream, sample: int) -> WholeSequence:
    return WholeSequence(stream.tokens(sample), stream.source)


def compare_logits(
    replayed: ReplayResult, reference: Mapping[SequenceKey, Tensor], tie_below: float, before: int | None = None
) -> Comparison:
    """Compare with ``reference`` [T, V] per sequence, only the positions below ``before`` if given.

    NaN on either side counts as an infinite difference.
    """
    worst, squares, count, kl, divergences = 0.0, 0.0, 0, [], []
    for key, pieces in replayed.pieces.items():
        for start, piece in pieces:
            have = piece[: None if before is None else max(0, before - start)].double()
            true = reference[key][start : start + len(have)].double()
            gap = (have - true).abs().nan_to_num(nan=torch.inf)
            worst, count = max(worst, float(gap.max()) if len(have) else 0.0), count + gap.numel()
            squares += float(gap.square().sum())
            p, q = true.log_softmax(-1), have.log_softmax(-1)
            kl.append((p.exp() * (p - q)).sum(-1).clamp(min=0))  # KL(reference || cache) in nats
            best, chosen = true.argmax(-1), have.argmax(-1)
            for at in (best != chosen).nonzero().squeeze(-1).tolist():
                top = true[at].topk(min(2, true.shape[-1])).values
                lead, tokens = float(top[0] - top[-1]), (int(best[at]), int(chosen[at]))
                divergences.append(TokenDivergence(*key, start + at, *tokens, lead, lead < tie_below))
    every = torch.cat([torch.empty(0), *kl])
    return Comparison(
        max_dlogit=worst,
        rms_dlogit=math.sqrt(squares / max(count, 1)),
        kl_mean=float(every.mean()),
        kl_max=float(every.max()) if len(every) else math.nan,
        agree=len(every) - len(divergences),
        compared=len(every),
        ties=sum(divergence.tie for divergence in divergences),
        first_divergence=min(divergences, key=lambda d: (d.tie, d.position, d.row, d.sample), default=None),
    )


def format_loss(dtype: str, computed: str = "float32") -> str:
    """Return the larger loss of keys and values of a ``computed`` dtype: "none", "rounding", "lossy"."""
    names = cache_lib.quantization.split_format_name(dtype)
    losses = ("none" if name == computed else cache_lib.quantization.get_format(name).loss for name in names)
    return max(losses, key=("none", "rounding", "lossy").index)


MAX_NATS = 700.0  # exp of more is not finite
DEPTHS = (0.125, 0.375, 0.625, 0.875)


def compare_loss(
    replayed: ReplayResult,
    reference: Mapping[SequenceKey, Tensor],
    streams: Sequence[ReplayStream],
    tie_below: float,
    before: int | None,
) -> LossReport:
    """Measure the loss at positions below ``before``.

    ``reference``: logits [T, V] per sequence of the model without cache and policy.
    """

    def nats(logits: Tensor, targets: Tensor) -> float:
        return -float(logits.double().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).sum())

    comparison = compare_logits(replayed, reference, tie_below, before)
    cached_nats = reference_nats = 0.0
    count = 0
    for index, stream in enumerate(streams):
        logits, last = replayed.logits(index), min(len(stream.prompt) - 1, before or len(stream.prompt))
        positions = torch.arange(min(last, len(logits)))
        positions = positions[~logits[positions].isnan().all(dim=-1)]  # a prefix hit left this position uncomputed
        if len(positions):
            targets = torch.tensor(stream.prompt)[positions + 1]
            cached_nats += nats(logits[positions], targets)
            reference_nats += nats(reference[index, 0][positions], targets)
            count += len(positions)
    cached, uncached = (
        math.exp(min(MAX_NATS, nats / count)) if count else math.nan for nats in (cached_nats, reference_nats)
    )
    compared = comparison.kl_mean, comparison.kl_max, comparison.agree, comparison.compared
    return LossReport(*compared, cached, uncached, count)


class NeedleRecall:
    """Recall of needles at several depths of a haystack of ``length`` tokens, and the full cache's recall.

    ``reason``: why nothing is measured, or "".
    """

    def __init__(
        self, model: Transformer, language: benchmarks.needle_tasks.HaystackLanguage | None, length: int
    ) -> None:
        self.model, self.length, self.language, self.reason = model, length, language, ""
        self.tasks: list[benchmarks.needle_tasks.NeedleTask] = []
        self.full = 0.0
        if language is None:
            self.reason = "the checkpoint has no tokenizer"
            return
        try:
            make = partial(benchmarks.needle_tasks.make_task, "single", language, length)
            self.tasks = [make(depth, seed) for seed, depth in enumerate(DEPTHS)]
        except KvadError as error:
            self.reason = error.message
            return
        self.full = self._measure(CacheConfig(max_seq_len=length, dtype="float32"))
        if self.full <= benchmarks.cache_quality.MIN_FULL_RECALL:
            found = f"the full cache finds {self.full:.2f} of needles in {length} tokens"
            self.reason = f"{found}, too few to compare caches"

    def recall(self, cache: CacheConfig) -> NeedleScore | None:
        """Measure the recall of a cache like ``cache``, or None."""
        if self.reason:
            return None
        return NeedleScore(self._measure(cache), self.full, len(self.tasks), self.length)

    def _measure(self, cache: CacheConfig) -> float:
        assert self.language is not None
        config = dataclasses.replace(
            cache,
            max_num_seqs=len(self.tasks),
            max_seq_len=self.length,
            num_blocks=None,
            enable_prefix_caching=False,
            prefix_cache_ram=None,
            prefill_chunk_size=min(cache.prefill_chunk_size, self.length),
        )
        scores = benchmarks.cache_quality.score_tasks(Engine(self.model, config), self.language, self.tasks)
        return math.fsum(scores) / len(scores)
