"""Teacher-forced runs of the real scheduler, KVCacheManager, KVCache and runner; records every sampled logit.

Forced tokens make runs comparable: a sequence's logits at a position have one correct value for any cache, chunk
size, batch or preemption. ``poison`` fills every block without an owner with NaN after each
step, so reading an unwritten slot shows up as NaN.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvad.cache.config import CacheConfig
from kvad.config.model import attention_specs
from kvad.engine import Engine, EngineConfig
from kvad.engine.scheduling.preemption import PreemptionStats
from kvad.engine.scheduling.request import SamplingParams, SequenceOutput, StreamChunk
from kvad.model.no_cache import NoCache
from kvad.model.positions import short_regime_lens
from kvad.model.transformer import Transformer
from kvad.model_input import RESERVED_BLOCKS, ModelInput, SubBatch
from kvad.verify.references import QuantizedNoCache


@dataclass
class Stream:
    """A prompt and its forced continuations, one per sample.

    Args:
        arrives: Step at which it is submitted; from 1000 on, once the engine is idle.
        source: Encoder input, if any; ``prompt`` then begins the decoder's tokens.
    """

    prompt: list[int]
    continuations: list[list[int]]
    arrives: int = 0
    source: list[int] | None = None

    def tokens(self, sample: int = 0) -> list[int]:
        return self.prompt + self.continuations[sample]


@dataclass
class Run:
    """``logits[request, sample]`` maps positions to [V]; the counters record what happened in the run."""

    logits: dict[tuple[int, int], dict[int, Tensor]] = field(default_factory=dict)
    steps: int = 0
    widest: int = 0
    num_sub_batches: int = 0
    mixed: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    copies: int = 0
    encoded: int = 0  # source tokens, counted each time that a source was encoded
    encodings: int = 0  # steps of the encoder
    swaps: PreemptionStats = field(default_factory=PreemptionStats)  # preemptions by kind
    merged_cross_steps: int = 0  # steps with fewer cross-attention rows than sequences


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
    """Run all streams; ``options`` are fields of EngineConfig."""
    engine = Engine(model, cache, EngineConfig(max_num_batched_tokens=budget, **options))
    run = Run()
    waiting = dict(enumerate(streams))
    ids: dict[int, int] = {}
    while waiting or not engine.idle:
        for number, stream in list(waiting.items()):
            if run.steps >= stream.arrives and (stream.arrives < 1000 or engine.idle):
                sampling = SamplingParams(
                    max_tokens=len(stream.continuations[0]), n=len(stream.continuations), temperature=0
                )
                ids[engine.add_request(stream.prompt, sampling, encoder_token_ids=stream.source)] = number
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
        run.merged_cross_steps += _rows(plan.sub_batches) > _rows(plan.cross_sub_batches or plan.sub_batches)
        run.widest = max(run.widest, len(plan.scheduled))
        run.num_sub_batches = max(run.num_sub_batches, len(plan.sub_batches))
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


def _rows(sub_batches: Sequence[SubBatch]) -> int:
    return sum(each.num_seqs for each in sub_batches)


def run_engine(engine: Engine, *, poison: bool = False, max_seconds: float = 120.0) -> dict[int, list[StreamChunk]]:
    """Step until the engine is idle; return the chunks of each request. ``poison`` fills blocks without an owner."""
    chunks: dict[int, list[StreamChunk]] = {}
    deadline = time.monotonic() + max_seconds
    while not engine.idle:
        assert time.monotonic() < deadline, "the engine does not become idle"
        for chunk in engine.step():
            chunks.setdefault(chunk.request, []).append(chunk)
        if poison:
            engine.flush_offload()
            fill_unowned(engine, math.nan)
        engine.scheduler.check()
    return chunks


def tokens_of(chunks: Sequence[StreamChunk], sample: int = 0) -> list[int]:
    return [chunk.token_id for chunk in chunks if chunk.sample_index == sample and chunk.token_id is not None]


def fill_unowned(engine: Engine, value: float) -> None:
    """Fill every block that no sequence and no published prefix owns with ``value``.

    Reserved blocks are excepted, and those that the next BlockOps copy out.
    """
    kv_cache, manager = engine.kv_cache, engine.kv_cache_manager
    for index, (group, stores, weights, pool) in enumerate(
        zip(kv_cache.groups, kv_cache.stores, kv_cache.weights, manager.pools, strict=True)
    ):
        pending = [blocks for _, swapped in manager._swapped.pending_swap_outs for blocks in swapped[index : index + 1]]
        block_range = sorted({*range(RESERVED_BLOCKS, group.num_blocks)}.difference(*pending))
        blocks = [block for block in block_range if pool.refs[block] == 0 and pool.prefixes[block] is None]
        for layer, (keys, values) in stores.items():
            others = [each[layer].arrays for each in (weights, kv_cache.states) if layer in each]
            for array in (*keys.arrays, *values.arrays, *(array for arrays in others for array in arrays)):
                array[blocks] = value if array.is_floating_point() or math.isfinite(value) else 127  # 127 as fp8: NaN


@torch.inference_mode()
def uncached(
    model: Transformer,
    tokens: Sequence[int],
    source: Sequence[int] | None = None,
    cache: CacheConfig | None = None,
    formats: tuple[str, str] | None = None,
) -> Tensor:
    """Return the logits [T, V] of the uncached model.

    Args:
        cache: Config whose policy restricts what a query sees.
        formats: Keys and values are quantized to these formats and back.
    """
    step = fresh_step(tokens, source)
    specs = None if cache is None else cache.restrict(attention_specs(model.config))
    reference = NoCache(model.config, specs=specs, exact_rope=cache is not None and cache.endless, kernel="reference")
    rotation = {} if cache is None else {"rotate": cache.rope_at, "exact": cache.endless}
    kv_cache = reference if formats is None else QuantizedNoCache(reference, *formats, **rotation)
    return model.logits(model(step, kv_cache), step.logit_indices)


def sampled(model: Transformer, tokens: Sequence[int], **options: Any) -> Tensor:
    """Return the uncached logits [T, V] behind each token in the rotary regime of the tokens up to it."""
    logits = uncached(model, tokens, **options)
    for length in reversed(short_regime_lens(model.config.stack, model.config.max_seq_len)):
        if length < len(tokens):
            logits = torch.cat((uncached(model, tokens[:length], **options), logits[length:]))
    return logits


def fresh_step(tokens: Sequence[int], source: Sequence[int] | None = None) -> ModelInput:
    """Build the ModelInput of one sequence and its source."""
    ids, positions = torch.tensor(tokens), torch.arange(len(tokens))
    encoder_input = None if source is None else fresh_step(source)
    return ModelInput(
        ids,
        positions,
        (SubBatch(1, len(tokens), len(tokens)),),
        positions,
        seq_lens=torch.full_like(positions, len(tokens)),
        encoder_input=encoder_input,
    )


def worst(
    model: Transformer,
    streams: Sequence[Stream],
    run: Run,
    cache: CacheConfig | None = None,
    formats: tuple[str, str] | None = None,
) -> float:
    """Return max |dlogit| between a run and the uncached model, over all sampled positions of all streams."""
    largest = 0.0
    for number, stream in enumerate(streams):
        for sample in range(len(stream.continuations)):
            tokens = stream.tokens(sample)
            expected = sampled(model, tokens[:-1], source=stream.source, cache=cache, formats=formats)
            run_logits = run.logits[number, sample]
            assert sorted(run_logits) == list(range(len(stream.prompt) - 1, len(tokens) - 1)), (
                "not every position was sampled"
            )
            for position, logits in run_logits.items():
                difference = (logits.double() - expected[position].double()).abs().max().item()
                largest = max(largest, math.inf if math.isnan(difference) else difference)
    return largest
