"""An upper bound of what comes and goes within a step, from shapes alone: scratch and activations.  No torch.

Two kinds of step are bounded, and the larger number of each kind counts:

* a decoder's: ``T = min(budget, rows * chunk)`` new tokens, every row at its longest;
* an encoder's: whole sources, as many as the budget allows and at least one: ``T = min(max(budget, S), rows * S)`` of
  sources of S tokens.  An encoder has no other: what it computes is not kept.

They are seen in a process's peak, not in what it holds between two steps.  A test holds the bound against what torch
really makes.  Letters as in ``step.py``; ``c`` is the bytes of a computed value, ``e`` of a cached one with its
share of scales, F an MLP's hidden width; rows, T and S of the step, or of the source that is attended to.

scratch: ``cache/scratch.py``, for one layer at a time.

activations, the largest of these moments, W the width of what a head's matrix reads:

    attention   c T (4 E + 4 (H D + K D) + 2 K Dv + 3 H Dv)   stream, norm; q, k while they turn, v; outputs
    MLP         c T (5 E + 3 F), gated 4 F                    stream before and after attention, norm; up, gate, product
    experts     c T (8 E + 6 F + 3 count)                     all tokens may choose one expert
    sources     c T (E + 2 K (D + Dv)) + e T K (D + Dv)       what cross-attention will read, while it is written
    logits      c T E + rows V (c + 3 * 4)                    one per row, and the sampler's float32 copies
                c T (E + 3 W + n V) + S V (c + 3)             of an encoder: of every token (n = 1, and 1 if they are
                                                              scaled, 2 if capped), and a row of them looked over

The same bits in any batch take tiles beside that: c T max(E + (H + K) D + K Dv, E + H Dv, E + 3 F), of whole tiles, and
of the logits' rows E + 2 V.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvad.cache.formats import find_format
from kvad.cache.scratch import ENCODED, MASK_BUDGET, SCORE_BUDGET, TILE, Read, scratch_bytes, stored_bytes
from kvad.cache.sizing import DTYPE_BYTES, CacheConfig, Group
from kvad.cache.spilled import spilling
from kvad.config import (
    Attention,
    Classes,
    Experts,
    Head,
    Layer,
    ModelConfig,
    Plain,
    Rope,
    Stack,
    T5Bias,
    encoder_mixers,
    head_dim,
    head_width,
    source_width,
)

__all__ = ["MASK_BUDGET", "SCORE_BUDGET", "Peak", "decoder_tokens", "encoder_tokens", "peak", "source_length"]


class Peak(NamedTuple):
    """Bytes, at most."""

    scratch: int
    activations: int


def peak(
    config: ModelConfig,
    cache: CacheConfig,
    groups: Sequence[Group],
    computed: str,
    budget: int,
    *,
    hidden: int = 0,
    deterministic: bool = False,
) -> Peak:
    """Of the largest step; ``computed``: the dtype that the model computes in; ``hidden``: units of a compressor."""
    scratch = activations = 0
    span = cache.capacity if deterministic else 0
    if config.decoder is not None:
        tokens = decoder_tokens(cache, budget, groups)
        reads = [_how(read, hidden, span) for read in _decoder_reads(config.decoder, cache, groups, tokens)]
        scratch = scratch_bytes(reads, computed)
        more = _tiled(config, config.decoder, tokens, config.width) if deterministic else 0
        activations = _decoding(config, config.decoder, cache, tokens, more, DTYPE_BYTES[computed])
    if config.encoder is not None:
        tokens = encoder_tokens(config, cache, budget)
        reads = [_how(read, hidden, span) for read in _encoder_reads(config, config.encoder, cache, tokens)]
        scratch = max(scratch, scratch_bytes(reads, computed))
        more = _tiled(config, config.encoder, tokens, source_width(config)) if deterministic else 0
        activations = max(activations, _encoding(config, config.encoder, cache, tokens, more, DTYPE_BYTES[computed]))
    return Peak(scratch, activations)


def _how(read: Read, hidden: int, tiled: int) -> Read:
    return replace(read, hidden=hidden, tiled=tiled, below=tuple(_how(part, hidden, tiled) for part in read.below))


def decoder_tokens(cache: CacheConfig, budget: int, groups: Sequence[Group]) -> int:
    """New tokens of a decoder's step, at most.  Rows that descend end their chunks where they do."""
    chunk = min([cache.chunk, cache.capacity, *(group.levels.every for group in groups if group.levels is not None)])
    return min(budget, cache.rows * chunk)


def source_length(config: ModelConfig, cache: CacheConfig) -> int:
    """Tokens of the longest text that the encoder reads; 0 where there is no encoder."""
    if config.encoder is None:
        return 0
    return cache.capacity if config.decoder is None else cache.source_capacity


def encoder_tokens(config: ModelConfig, cache: CacheConfig, budget: int) -> int:
    """Tokens of an encoder's step, at most: sources are read whole."""
    longest = source_length(config, cache)
    return min(max(budget, longest), cache.rows * longest)


# ---------------------------------------------------------------- scratch


def _decoder_reads(stack: Stack, cache: CacheConfig, groups: Sequence[Group], tokens: int) -> Iterator[Read]:
    below: dict[int, list[Read]] = {}
    reads: list[tuple[int, Read]] = []
    shares = spilling(groups, cache.spill_ram).shares
    for number, group in enumerate(groups):
        mixers = dict(_named(stack, index) for index in group.layers)
        slots = group.blocks_per_row * group.block_size
        spec = (group.mixer.kv_heads, group.mixer.head_dim, group.mixer.value_dim)
        copied = not (cache.layout == "contiguous" and cache.rows == 1)
        unrotated = cache.rotate == "read" and any(isinstance(mixer.position, Rope) for mixer in mixers.values())
        read = Read(mixers, spec, tokens, cache.rows, slots, cache.rows * slots, group, copied, unrotated)
        if number in shares:
            at_once = -(-shares[number].tile // cache.rows) * group.block_size
            read = replace(read, slots=min(slots, at_once), keys=cache.rows * min(slots, at_once), whole=slots)
        if group.level is not None:
            below.setdefault(group.level.of, []).append(read)
        else:
            reads.append((number, read))
    for number, read in reads:
        yield replace(read, below=tuple(below.get(number, ())))


def _encoder_reads(config: ModelConfig, stack: Stack, cache: CacheConfig, tokens: int) -> Iterator[Read]:
    specs = encoder_mixers(config)
    reaches: dict[tuple[bool, int | None], list[int]] = {}
    for index, spec in enumerate(specs):
        reaches.setdefault((spec.causal, spec.window), []).append(index)
    for layers in reaches.values():
        widest = max((specs[index] for index in layers), key=lambda s: s.kv_heads * (s.head_dim + s.value_dim))
        mixers = dict(_named(stack, index) for index in layers)
        shape = (widest.kv_heads, widest.head_dim, widest.value_dim)
        yield Read(mixers, shape, tokens, cache.rows, source_length(config, cache), tokens)


def _named(stack: Stack, index: int) -> tuple[str, Attention]:
    """What a layer's biases are shared under, and its attention; from ``stack.layers`` on: its cross-attention."""
    if index >= stack.layers:
        cross = stack.layer(index - stack.layers).cross
        assert cross is not None, "groups count cross-attention after all layers"
        return f"cross {stack.kind_of(index - stack.layers)}", cross
    mixer = stack.layer(index).mixer
    alone = isinstance(mixer.position, T5Bias) and not mixer.position.shared
    return (f"{index}" if alone else stack.kind_of(index)), mixer


# ---------------------------------------------------------------- activations


def _decoding(config: ModelConfig, stack: Stack, cache: CacheConfig, tokens: int, more: int, size: int) -> int:
    """``more``: values that products of tiles make beside those of a moment."""
    moments = list(_moments(config, stack, config.width))
    logits = tokens * config.width * size + cache.rows * config.vocab * (size + 3 * 4)
    if more:
        logits += _padded(cache.rows) * (config.width + 2 * config.vocab) * size
    return max(size * (tokens * max(moments) + more), logits)


def _encoding(config: ModelConfig, stack: Stack, cache: CacheConfig, tokens: int, more: int, size: int) -> int:
    width = source_width(config)
    most = size * (tokens * max(_moments(config, stack, width)) + more)
    if config.decoder is None:
        answers = _answers(config, cache, tokens, size)
        if more:
            answers += size * 2 * _padded(tokens) * (2 * head_width(config) + _outputs(config))
        return max(most, answers)
    for layer in config.decoder.kinds.values():
        assert layer.cross is not None, "each layer of an encoder-decoder attends to the source"
        dim, kv_heads = head_dim(config, layer.cross), layer.cross.kv_heads or layer.cross.heads
        values = kv_heads * (dim + (layer.cross.value_dim or dim))
        stored = kv_heads * stored_bytes(cache.formats, dim, layer.cross.value_dim or dim, cache.block_size)
        packed = any(find_format(name).kind != "plain" for name in cache.formats)
        most = max(most, tokens * (size * (width + 2 * values) + stored + packed * ENCODED * values))
    return most


def _answers(config: ModelConfig, cache: CacheConfig, tokens: int, size: int) -> int:
    """An encoder's head: of every token, unless it answers for rows alone."""
    head = config.head
    if config.per_row:
        return size * (tokens * config.width + cache.rows * (2 * config.width + 3 * head_width(config)))
    outputs = _outputs(config)
    copies = 1
    if isinstance(head, Head):
        copies += (head.scale != 1.0) + 2 * (head.softcap is not None)
    made = size * tokens * (config.width + 3 * head_width(config) + copies * outputs)
    return made + min(tokens, cache.capacity) * outputs * (size + 3)


def _outputs(config: ModelConfig) -> int:
    return len(config.head.labels) if isinstance(config.head, Classes) else config.vocab


def _tiled(config: ModelConfig, stack: Stack, tokens: int, width: int) -> int:
    """Values of a product that is made in tiles (``ops/invariant.py``): its input, aligned, and its tiles, before they
    are joined; and three of what an activation is given."""
    most = 0
    for layer in stack.kinds.values():
        for mixer in (layer.mixer, layer.cross):
            if mixer is not None:
                dim, kv_heads = head_dim(config, mixer), mixer.kv_heads or mixer.heads
                value_dim = mixer.value_dim or dim
                made = (mixer.heads + kv_heads) * dim + kv_heads * value_dim
                most = max(most, width + made, width + mixer.heads * value_dim)
        most = max(most, width + 3 * layer.mlp.hidden)
    return _padded(tokens) * most


def _padded(rows: int) -> int:
    return -(-rows // TILE) * TILE


def _moments(config: ModelConfig, stack: Stack, width: int) -> Iterator[int]:
    """Values per token, at each moment of a layer."""
    for layer in stack.kinds.values():
        yield _attention(config, layer.mixer, width)
        yield _mlp(layer, width)
        if layer.cross is not None:
            yield _attention(config, layer.cross, width)


def _attention(config: ModelConfig, mixer: Attention, width: int) -> int:
    dim, kv_heads = head_dim(config, mixer), mixer.kv_heads or mixer.heads
    value_dim = mixer.value_dim or dim
    turned = 4 * (mixer.heads + kv_heads) * dim
    return 4 * width + turned + 2 * kv_heads * value_dim + 3 * mixer.heads * value_dim


def _mlp(layer: Layer, width: int) -> int:
    if isinstance(layer.mlp, Experts):
        return 8 * width + 6 * layer.mlp.hidden + 3 * layer.mlp.count
    return 5 * width + (3 if isinstance(layer.mlp, Plain) else 4) * layer.mlp.hidden
