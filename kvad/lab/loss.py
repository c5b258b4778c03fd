"""What a memory that forgets costs: KL and perplexity beside the model that keeps everything, and needles found again.

Perplexity is that of the prompts' own next tokens, over the positions that the memory computed; a needle is hidden and
asked for as in ``kvad bench cache-quality`` (``tasks.py``), a few of them: a smoke test beside that bench.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvad.cache.sizing import CacheConfig
from kvad.engine.engine import Engine
from kvad.errors import KvadError
from kvad.lab.compare import compare_logits
from kvad.lab.findings import LossReport, NeedleScore
from kvad.lab.quality import MIN_FULL_RECALL, greedy_answers
from kvad.lab.replay import ReplayResult, ReplayStream, SequenceKey
from kvad.lab.tasks import HaystackLanguage, NeedleTask, make_task
from kvad.model.transformer import Transformer

__all__ = ["NeedleRecall", "compare_loss"]

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

    def __init__(self, model: Transformer, language: HaystackLanguage | None, length: int) -> None:
        self.model, self.length, self.why = model, length, ""
        self.tasks: list[NeedleTask] = []
        self.full = 0.0
        if language is None:
            self.why = "no tokenizer to ask in"
            return
        self.language = language
        try:
            self.tasks = [make_task("single", language, length, depth, seed) for seed, depth in enumerate(DEPTHS)]
        except KvadError as error:
            self.why = error.message
            return
        self.full = self._share(
            CacheConfig(max_num_seqs=len(self.tasks), max_seq_len=length, dtype="float32", enable_prefix_caching=False)
        )
        if self.full <= MIN_FULL_RECALL:
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
            found = greedy_answers(engine, self.tasks)
        finally:
            engine.close()
        shares = [self.language.answer_score(task.expected, said) for task, said in zip(self.tasks, found, strict=True)]
        return math.fsum(shares) / len(shares)
