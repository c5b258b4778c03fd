"""Drives the real scheduler, ledger, memory and runner over tokens that are given, and keeps every sampled logit.

Teacher forcing makes runs comparable: a row's tokens are known, so its logits at a position have one right value,
whatever the cache, the chunks, the neighbours or the preemptions.  ``poison`` fills every block that nobody owns with
NaN after each step, so that a slot read without having been written is heard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvad.cache.config import CacheConfig
from kvad.config.model import attention_specs
from kvad.engine.engine import Engine
from kvad.engine.scheduling.preemption import PreemptionStats
from kvad.engine.scheduling.request import SamplingParams, SequenceOutput
from kvad.model.no_cache import NoCache
from kvad.model.transformer import Transformer
from kvad.model_input import RESERVED_BLOCKS, ModelInput, SubBatch
from kvad.verify.references import QuantizedNoCache


@dataclass
class Stream:
    """A prompt and its forced continuations, one per sample; it arrives at that step (1000: when all is quiet).

    ``source``: what an encoder reads; the prompt then begins its target."""

    prompt: list[int]
    continuations: list[list[int]]
    arrives: int = 0
    source: list[int] | None = None

    def tokens(self, sample: int = 0) -> list[int]:
        return self.prompt + self.continuations[sample]


@dataclass
class Run:
    """``logits[request, sample]``: position -> [V]; and what really happened."""

    logits: dict[tuple[int, int], dict[int, Tensor]] = field(default_factory=dict)
    steps: int = 0
    widest: int = 0
    lanes: int = 0
    mixed: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    copies: int = 0
    encoded: int = 0  # tokens of sources, each time that one was read
    encodings: int = 0  # steps of the encoder
    swaps: PreemptionStats = field(default_factory=PreemptionStats)  # how rows gave way
    folded: int = 0  # steps in which cross-attention had fewer rows than the step


@torch.inference_mode()
def drive(
    model: Transformer,
    cache: CacheConfig,
    streams: Sequence[Stream],
    *,
    budget: int = 256,
    poison: bool = True,
    **options: Any,
) -> Run:
    """``options``: the engine's."""
    engine = Engine(model, cache, max_num_batched_tokens=budget, **options)
    run = Run()
    waiting = dict(enumerate(streams))
    ids: dict[int, int] = {}
    while waiting or not engine.idle:
        for number, stream in list(waiting.items()):
            if run.steps >= stream.arrives and (stream.arrives < 1000 or engine.idle):
                asked = SamplingParams(
                    max_tokens=len(stream.continuations[0]), n=len(stream.continuations), temperature=0
                )
                ids[engine.add_request(stream.prompt, asked, encoder_token_ids=stream.source)] = number
                del waiting[number]
        plan = engine.scheduler.schedule()
        if plan is None:
            run.steps += 1
            continue
        run.steps += 1
        if plan.encoder_batch is not None:
            hidden, _ = engine.runner.encode(plan.encoder_batch)
            run.encoded += len(hidden)
            run.encodings += 1
            engine.scheduler.update_from_output(plan, [SequenceOutput()] * len(plan.encoder_batch.sequences))
            engine.scheduler.check()
            if poison:
                fill_unowned(engine, math.nan)
            continue
        logits = engine.runner.execute(plan)
        run.folded += _rows(plan.sub_batches) > _rows(plan.cross_sub_batches or plan.sub_batches)
        run.widest = max(run.widest, len(plan.scheduled))
        run.lanes = max(run.lanes, len(plan.sub_batches))
        run.mixed += len({work.num_tokens for work in plan.scheduled}) > 1
        run.copies += sum(map(len, plan.allocation.block_ops.copy))
        results, at = [], 0
        for work in plan.scheduled:
            at += len(work.logit_offsets)
            token = None
            if work.is_sampled:
                number, end = ids[work.sequence.request_id], work.start + work.num_tokens
                run.logits.setdefault((number, work.sequence.sample_index), {})[end - 1] = logits[at - 1]
                token = streams[number].tokens(work.sequence.sample_index)[end]
            results.append(SequenceOutput(token))
        engine.scheduler.update_from_output(plan, results)
        engine.scheduler.check()
        if poison:
            fill_unowned(engine, math.nan)
    run.preemptions = engine.scheduler.stats().preemptions
    run.hit_tokens = engine.kv_cache_manager.stats().hit_tokens
    run.swaps = engine.preemption.stats()
    engine.close()
    return run


def _rows(lanes: Sequence[SubBatch]) -> int:
    return sum(lane.num_seqs for lane in lanes)


def fill_unowned(engine: Engine, value: float) -> None:
    """Every block that no row and no published prefix owns, the reserved ones apart, gets ``value``."""
    memory = engine.kv_cache
    for group, stores, weights, pool in zip(
        memory.groups, memory.stores, memory.weights, engine.kv_cache_manager.pools, strict=True
    ):
        every = range(RESERVED_BLOCKS, group.num_blocks)
        blocks = [block for block in every if pool.refs[block] == 0 and pool.prefixes[block] is None]
        for layer, (keys, values) in stores.items():
            weight = weights[layer].arrays if layer in weights else ()
            for array in (*keys.arrays, *values.arrays, *weight):
                array[blocks] = value if array.is_floating_point() or math.isfinite(value) else 127  # 127 as fp8: NaN


@torch.inference_mode()
def uncached(
    model: Transformer,
    tokens: Sequence[int],
    limit: int | None = None,
    source: Sequence[int] | None = None,
    cache: CacheConfig | None = None,
    formats: tuple[str, str] | None = None,
) -> Tensor:
    """[T, V] from Fresh; ``limit``: the length that the row may reach (it decides the rotary regime).

    ``cache``: whose policy says what a query may see; ``formats``: keys and values go through these and back."""
    step = fresh_step(tokens, limit, source)
    specs = None if cache is None else cache.restrict(attention_specs(model.config))
    fresh = NoCache(model.config, specs=specs, exact_rope=cache is not None and cache.endless, kernel="reference")
    how = {} if cache is None else {"rotate": cache.rope_at, "exact": cache.endless}
    memory = fresh if formats is None else QuantizedNoCache(fresh, *formats, **how)
    return model.logits(model(step, memory), step.logit_indices)


def fresh_step(tokens: Sequence[int], limit: int | None = None, source: Sequence[int] | None = None) -> ModelInput:
    """One row, and its source; a source's limit is its length."""
    ids, every = torch.tensor(tokens), torch.arange(len(tokens))
    limits = torch.full_like(every, limit or len(tokens))
    read = None if source is None else fresh_step(source)
    return ModelInput(
        ids, every, (SubBatch(1, len(tokens), len(tokens)),), every, max_seq_lens=limits, encoder_input=read
    )


def worst(
    model: Transformer,
    streams: Sequence[Stream],
    run: Run,
    cache: CacheConfig | None = None,
    formats: tuple[str, str] | None = None,
) -> float:
    """max |dlogit| of a run against Fresh (under the cache's policy, of those formats), over every sampled position of
    every stream."""
    largest = 0.0
    for number, stream in enumerate(streams):
        for sample in range(len(stream.continuations)):
            tokens = stream.tokens(sample)
            right = uncached(model, tokens, source=stream.source, cache=cache, formats=formats)
            got = run.logits[number, sample]
            assert sorted(got) == list(range(len(stream.prompt) - 1, len(tokens) - 1)), "a position was never sampled"
            for position, logits in got.items():
                difference = (logits.double() - right[position].double()).abs().max().item()
                largest = max(largest, math.inf if math.isnan(difference) else difference)
    return largest
