"""The judge of a lossy format: Fresh, whose keys and values go through the format and back.

A per-token format makes of a token's key what it is by that key alone.  So a cache of that format must say, to the last
rounding of float64, what the model without a cache says of keys and values that were encoded and decoded: whatever the
blocks, the chunks and the neighbours.  What the format itself loses is another question, and is measured apart.

What a memory that forgets costs: KL and perplexity beside the model that keeps everything, and needles found again.

Perplexity is that of the prompts' own next tokens, over the positions that the memory computed; a needle is hidden and
asked for as in ``kvad bench cache-quality`` (``tasks.py``), a few of them: a smoke test beside that bench.
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
    """``inner`` (a :class:`Fresh`) with keys and values in the formats of those names.

    ``rotate``: whether keys are encoded rotated, or as the model gave them; ``exact``: as :class:`Angles` has it.
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

    def open(self, step: ModelInput) -> Sequence[CacheView]:
        turning = _RotatedInputs(step.positions, self._exact) if self._rotates else None
        return [_QuantizedView(view, turning, *self._codecs) for view in self._inner.open(step)]


class _RotatedInputs:
    """Rotates q and k, and changes k.  ``exact``: both are turned back, so that whoever is inside rotates as it would:
    it may turn sinks further.  (Angles in float32 cannot be turned back: cos^2 + sin^2 is 1 to eight digits.)"""

    def __init__(self, positions: Tensor, exact: bool) -> None:
        self._there = ops.rotary.RotaryCache(positions, exact=exact)
        self._back = ops.rotary.RotaryCache(-positions, exact=True) if exact else None

    def through(
        self, codec: ops.quantize.FormatCodec, q: Tensor, k: Tensor, score: AttentionParams
    ) -> tuple[Tensor, Tensor, AttentionParams]:
        rotary = score.rotary
        assert rotary is not None
        k = _quantize_dequantize(codec, self._there.rotate(k, rotary))
        if self._back is None:
            return self._there.rotate(q, rotary), k, score._replace(rotary=None)
        return q, self._back.rotate(k, rotary._replace(factor=1 / rotary.factor)), score


class _QuantizedView:
    def __init__(
        self,
        view: CacheView,
        turning: _RotatedInputs | None,
        keys: ops.quantize.FormatCodec,
        values: ops.quantize.FormatCodec,
    ) -> None:
        self._view, self._turning, self._keys, self._values = view, turning, keys, values

    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: AttentionParams) -> Tensor:
        if k is None or v is None:
            return self._view.attend(q, k, v, score)
        if score.rotary is not None and self._turning is not None:
            q, k, score = self._turning.through(self._keys, q, k, score)
        else:
            k = _quantize_dequantize(self._keys, k)
        return self._view.attend(q, k, _quantize_dequantize(self._values, v), score)

    def write(self, k: Tensor, v: Tensor) -> None:
        self._view.write(_quantize_dequantize(self._keys, k), _quantize_dequantize(self._values, v))


def _quantize_dequantize(codec: ops.quantize.FormatCodec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), x.dtype)


MAX_NATS = 700.0  # exp of more is not finite
DEPTHS = (0.125, 0.375, 0.625, 0.875)


def compare_loss(
    replayed: ReplayResult,
    judge: Mapping[SequenceKey, Tensor],
    streams: Sequence[ReplayStream],
    tie_below: float,
    before: int | None,
) -> LossReport:
    """``judge`` [T, V] per row: the model without a cache or a policy.  ``before``: positions that it can speak of."""
    found = compare_logits(replayed, judge, tie_below, before)
    own, true, count = _surprise(replayed, judge, streams, before)
    agree = found.compared - len(found.divergences)
    if not count:
        return LossReport(found.kl_mean, found.kl_max, agree, found.compared, math.nan, math.nan, 0)
    own, true = math.exp(min(MAX_NATS, own / count)), math.exp(min(MAX_NATS, true / count))
    return LossReport(found.kl_mean, found.kl_max, agree, found.compared, own, true, count)


def _surprise(
    replayed: ReplayResult, judge: Mapping[SequenceKey, Tensor], streams: Sequence[ReplayStream], before: int | None
) -> tuple[float, float, int]:
    """Nats of the prompts' tokens under the memory and under the judge, and how many: each position once."""
    own = true = 0.0
    count = 0
    for number, stream in enumerate(streams):
        whole, last = replayed.logits(number), min(len(stream.prompt) - 1, before or len(stream.prompt))
        at = torch.arange(min(last, len(whole)))
        at = at[~whole[at].isnan().all(dim=-1)]  # what a prefix hit made needless was not computed
        if len(at):
            targets = torch.tensor(stream.prompt)[at + 1].unsqueeze(-1)
            own -= float(whole[at].double().log_softmax(-1).gather(-1, targets).sum())
            true -= float(judge[number, 0][at].double().log_softmax(-1).gather(-1, targets).sum())
            count += len(at)
    return own, true, count


class NeedleRecall:
    """A needle at several depths of a haystack of ``length`` tokens, and how often the full cache finds it.

    ``why``: why nothing is measured; empty where something is.
    """

    def __init__(
        self, model: Transformer, language: benchmarks.needle_tasks.HaystackLanguage | None, length: int
    ) -> None:
        self.model, self.length, self.why = model, length, ""
        self.tasks: list[benchmarks.needle_tasks.NeedleTask] = []
        self.full = 0.0
        if language is None:
            self.why = "no tokenizer to ask in"
            return
        self.language = language
        try:
            self.tasks = [
                benchmarks.needle_tasks.make_task("single", language, length, depth, seed)
                for seed, depth in enumerate(DEPTHS)
            ]
        except KvadError as error:
            self.why = error.message
            return
        self.full = self._share(
            CacheConfig(max_num_seqs=len(self.tasks), max_seq_len=length, dtype="float32", enable_prefix_caching=False)
        )
        if self.full <= benchmarks.cache_quality.MIN_FULL_RECALL:
            self.why = (
                f"the full cache finds {self.full:.2f} of needles in {length} tokens: another's would say nothing"
            )

    def recall(self, cache: CacheConfig) -> NeedleScore | None:
        """Of a memory made like ``cache``."""
        if self.why:
            return None
        made = dataclasses.replace(
            cache, max_num_seqs=len(self.tasks), max_seq_len=self.length, num_blocks=None, enable_prefix_caching=False
        )
        return NeedleScore(self._share(made), self.full, len(self.tasks), self.length)

    def _share(self, cache: CacheConfig) -> float:
        engine = Engine(
            self.model, dataclasses.replace(cache, prefill_chunk_size=min(cache.prefill_chunk_size, self.length))
        )
        try:
            found = benchmarks.cache_quality.greedy_answers(engine, self.tasks)
        finally:
            engine.close()
        shares = [self.language.answer_score(task.expected, said) for task, said in zip(self.tasks, found, strict=True)]
        return math.fsum(shares) / len(shares)
