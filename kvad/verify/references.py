"""References for lossy caches: quantized uncached model, loss and needle recall.

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
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from kvad import benchmarks, ops
from kvad import cache as cache_lib
from kvad.cache import CacheConfig
from kvad.engine import Engine
from kvad.errors import KvadError
from kvad.model import NoCache, Transformer
from kvad.model_input import AttentionParams, CacheProtocol, CacheView, ModelInput
from kvad.verify.replay import ReplayResult, ReplayStream, SequenceKey, compare_logits
from kvad.verify.report import LossReport, NeedleScore


class QuantizedNoCache:
    """``inner`` (a ``NoCache``) with keys and values quantized to the given formats.

    ``rotate``: encode keys rotated ("write") or as the model gave them; ``exact``: as in ``RotaryCache``.
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
        for name in (keys, values):
            assert not cache_lib.quantization.get_format(name).is_blockwise, "whole blocks: not a matter of one token"
        self._inner, self._codecs = inner, (ops.quantize.get_codec(keys), ops.quantize.get_codec(values))
        self._rotates, self._exact = rotate == "write", exact

    def open(self, model_input: ModelInput) -> Sequence[CacheView]:
        views = self._inner.open(model_input)
        if not self._rotates:
            return [_QuantizedView(view, *self._codecs) for view in views]
        there = ops.rotary.RotaryCache(model_input.positions, exact=self._exact)
        back = ops.rotary.RotaryCache(-model_input.positions, exact=True) if self._exact else None
        return [_QuantizedView(view, *self._codecs, there, back) for view in views]


@dataclasses.dataclass
class _QuantizedView:
    """Quantizes keys, rotated by ``there`` if given, and values.

    With ``back``, keys are rotated back, so the inner cache rotates as usual and may rotate sinks further. (float32
    angles cannot be inverted: cos^2 + sin^2 is 1 to eight digits.)
    """

    view: CacheView
    keys: ops.quantize.FormatCodec
    values: ops.quantize.FormatCodec
    there: ops.rotary.RotaryCache | None = None  # rotates keys
    back: ops.rotary.RotaryCache | None = None

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams) -> Tensor:
        if k is None or v is None:
            return self.view.attend(q, k, v, params)
        rotary = params.rotary
        if rotary is None or self.there is None:
            k = _quantize_dequantize(self.keys, k)
        else:
            k = _quantize_dequantize(self.keys, self.there.rotate(k, rotary))
            if self.back is not None:
                k = self.back.rotate(k, rotary._replace(factor=1 / rotary.factor))
            else:
                q, params = self.there.rotate(q, rotary), params._replace(rotary=None)
        return self.view.attend(q, k, _quantize_dequantize(self.values, v), params)

    def write(self, k: Tensor, v: Tensor) -> None:
        self.view.write(_quantize_dequantize(self.keys, k), _quantize_dequantize(self.values, v))


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
            prefill_chunk_size=min(cache.prefill_chunk_size, self.length),
        )
        scores = benchmarks.cache_quality.score_tasks(Engine(self.model, config), self.language, self.tasks)
        return math.fsum(scores) / len(scores)
