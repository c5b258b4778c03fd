"""References for lossy caches: quantized uncached model, loss and needle recall.

:class:`QuantizedNoCache` is the uncached model whose keys and values pass through a format and back. A per-token
format makes a token's stored key a function of that key alone, so a cache of that format must equal this model up to
float64 rounding, whatever the blocks, chunks and other sequences. The loss of the format itself is measured apart.

:func:`compare_loss` measures KL divergence and perplexity compared with the model that keeps everything: perplexity of
the prompts' own next tokens at the positions that the cache computed. :class:`NeedleRecall` runs a few of the tasks of
``kvad bench cache-quality`` (benchmarks/needle_tasks.py), as a smoke test.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from kvad import benchmarks, cache, ops
from kvad.cache import CacheConfig
from kvad.engine import Engine
from kvad.errors import KvadError
from kvad.model import NoCache, Transformer
from kvad.model_input import AttentionParams, CacheProtocol, CacheView, ModelInput
from kvad.verify.replay import ReplayResult, ReplayStream, SequenceKey, compare_logits
from kvad.verify.report import LossReport, NeedleScore


class QuantizedNoCache:
    """``inner`` (a :class:`NoCache`) with keys and values quantized to the given formats.

    ``rotate``: encode keys rotated ("write") or as the model gave them; ``exact``: as in :class:`RotaryCache`.
    """

    def __init__(
        self,
        inner: NoCache | CacheProtocol,
        keys: str,
        values: str,
        *,
        rotate: Literal["write", "read"] = "write",
        exact: bool = False,
    ) -> None:
        assert (
            not cache.quantization.get_format(keys).is_blockwise
            and not cache.quantization.get_format(values).is_blockwise
        ), "whole blocks: not a matter of one token"
        self._inner, self._codecs = inner, (ops.quantize.get_codec(keys), ops.quantize.get_codec(values))
        self._rotates, self._exact = rotate == "write", exact

    def open(self, model_input: ModelInput) -> Sequence[CacheView]:
        rotated = _RotatedInputs(model_input.positions, self._exact) if self._rotates else None
        return [_QuantizedView(view, rotated, *self._codecs) for view in self._inner.open(model_input)]


class _RotatedInputs:
    """Rotates q and k, and quantizes k.

    ``exact``: both are rotated back, so the inner cache rotates as usual and may rotate sinks further. (float32 angles
    cannot be inverted: cos^2 + sin^2 is 1 to eight digits.)
    """

    def __init__(self, positions: Tensor, exact: bool) -> None:
        self._there = ops.rotary.RotaryCache(positions, exact=exact)
        self._back = ops.rotary.RotaryCache(-positions, exact=True) if exact else None

    def quantize_key(
        self, codec: ops.quantize.FormatCodec, q: Tensor, k: Tensor, params: AttentionParams
    ) -> tuple[Tensor, Tensor, AttentionParams]:
        rotary = params.rotary
        assert rotary is not None
        k = _quantize_dequantize(codec, self._there.rotate(k, rotary))
        if self._back is None:
            return self._there.rotate(q, rotary), k, params._replace(rotary=None)
        return q, self._back.rotate(k, rotary._replace(factor=1 / rotary.factor)), params


class _QuantizedView:
    def __init__(
        self,
        view: CacheView,
        rotated: _RotatedInputs | None,
        keys: ops.quantize.FormatCodec,
        values: ops.quantize.FormatCodec,
    ) -> None:
        self._view, self._rotated, self._keys, self._values = view, rotated, keys, values

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        if k is None or v is None:
            return self._view.attend(q, k, v, params)
        if params.rotary is not None and self._rotated is not None:
            q, k, params = self._rotated.quantize_key(self._keys, q, k, params)
        else:
            k = _quantize_dequantize(self._keys, k)
        return self._view.attend(q, k, _quantize_dequantize(self._values, v), params)

    def write(self, k: Tensor, v: Tensor) -> None:
        self._view.write(_quantize_dequantize(self._keys, k), _quantize_dequantize(self._values, v))


def _quantize_dequantize(codec: ops.quantize.FormatCodec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), x.dtype)


MAX_NATS = 700.0  # exp of more is not finite
DEPTHS = (0.125, 0.375, 0.625, 0.875)


def compare_loss(
    replayed: ReplayResult,
    reference: Mapping[SequenceKey, Tensor],
    streams: Sequence[ReplayStream],
    tie_below: float,
    before: int | None,
) -> LossReport:
    """Measure the loss compared with ``judge`` [T, V] per sequence: the model without cache and policy.

    ``before``: use positions below this one only.
    """
    comparison = compare_logits(replayed, reference, tie_below, before)
    cached_nats, reference_nats, count = _prompt_nats(replayed, reference, streams, before)
    agree = comparison.compared - len(comparison.divergences)
    if not count:
        return LossReport(comparison.kl_mean, comparison.kl_max, agree, comparison.compared, math.nan, math.nan, 0)
    cached_nats, reference_nats = (
        math.exp(min(MAX_NATS, cached_nats / count)),
        math.exp(min(MAX_NATS, reference_nats / count)),
    )
    return LossReport(
        comparison.kl_mean, comparison.kl_max, agree, comparison.compared, cached_nats, reference_nats, count
    )


def _prompt_nats(
    replayed: ReplayResult, reference: Mapping[SequenceKey, Tensor], streams: Sequence[ReplayStream], before: int | None
) -> tuple[float, float, int]:
    """Return nats of the prompts' tokens under the cache and the reference, and their number.

    Each position once.
    """
    cached_nats = reference_nats = 0.0
    count = 0
    for index, stream in enumerate(streams):
        logits, last = replayed.logits(index), min(len(stream.prompt) - 1, before or len(stream.prompt))
        positions = torch.arange(min(last, len(logits)))
        positions = positions[~logits[positions].isnan().all(dim=-1)]  # a prefix hit left this position uncomputed
        if len(positions):
            targets = torch.tensor(stream.prompt)[positions + 1].unsqueeze(-1)
            cached_nats -= float(logits[positions].double().log_softmax(-1).gather(-1, targets).sum())
            reference_nats -= float(reference[index, 0][positions].double().log_softmax(-1).gather(-1, targets).sum())
            count += len(positions)
    return cached_nats, reference_nats, count


class NeedleRecall:
    """Recall of needles at several depths of a haystack of ``length`` tokens, and the full cache's recall.

    ``why``: reason that nothing is measured, or "".
    """

    def __init__(
        self, model: Transformer, language: benchmarks.needle_tasks.HaystackLanguage | None, length: int
    ) -> None:
        self.model, self.length, self.reason = model, length, ""
        self.tasks: list[benchmarks.needle_tasks.NeedleTask] = []
        self.full = 0.0
        if language is None:
            self.reason = "the checkpoint has no tokenizer"
            return
        self.language = language
        try:
            self.tasks = [
                benchmarks.needle_tasks.make_task("single", language, length, depth, seed)
                for seed, depth in enumerate(DEPTHS)
            ]
        except KvadError as error:
            self.reason = error.message
            return
        self.full = self._measure(
            CacheConfig(max_num_seqs=len(self.tasks), max_seq_len=length, dtype="float32", enable_prefix_caching=False)
        )
        if self.full <= benchmarks.cache_quality.MIN_FULL_RECALL:
            self.reason = (
                f"the full cache finds {self.full:.2f} of needles in {length} tokens, too few to compare caches"
            )

    def recall(self, cache: CacheConfig) -> NeedleScore | None:
        """Measure the recall of a cache like ``cache``, or None."""
        if self.reason:
            return None
        config = dataclasses.replace(
            cache, max_num_seqs=len(self.tasks), max_seq_len=self.length, num_blocks=None, enable_prefix_caching=False
        )
        return NeedleScore(self._measure(config), self.full, len(self.tasks), self.length)

    def _measure(self, cache: CacheConfig) -> float:
        engine = Engine(
            self.model, dataclasses.replace(cache, prefill_chunk_size=min(cache.prefill_chunk_size, self.length))
        )
        try:
            answers = benchmarks.cache_quality.greedy_answers(engine, self.tasks)
        finally:
            engine.close()
        shares = [
            self.language.answer_score(task.expected, answer) for task, answer in zip(self.tasks, answers, strict=True)
        ]
        return math.fsum(shares) / len(shares)
