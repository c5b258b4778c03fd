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

from kvad.cache.formats import get_format
from kvad.cache.scratch import ENCODE_BYTES, MASK_BUDGET, SCORE_BUDGET, TILE, AttentionRead, scratch_bytes, slot_bytes
from kvad.cache.sizing import DTYPE_BYTES, CacheConfig, CacheGroup
from kvad.cache.spilled import plan_offload
from kvad.config import (
    AttentionConfig,
    ClassificationHeadConfig,
    LanguageHeadConfig,
    LayerConfig,
    ModelConfig,
    MoEConfig,
    PlainMLPConfig,
    RopeConfig,
    StackConfig,
    T5BiasConfig,
    encoder_attention_specs,
    encoder_hidden_size,
    head_dim,
    head_input_size,
)

__all__ = [
    "MASK_BUDGET",
    "SCORE_BUDGET",
    "PeakBytes",
    "max_decoder_tokens",
    "max_encoder_tokens",
    "peak_memory",
    "max_source_tokens",
]


class PeakBytes(NamedTuple):
    """Bytes, at most."""

    scratch: int
    activations: int


def peak_memory(
    config: ModelConfig,
    cache: CacheConfig,
    groups: Sequence[CacheGroup],
    computed: str,
    budget: int,
    *,
    hidden: int = 0,
    deterministic: bool = False,
) -> PeakBytes:
    """Of the largest step; ``computed``: the dtype that the model computes in; ``hidden``: units of a compressor."""
    scratch = activations = 0
    span = cache.max_seq_len if deterministic else 0
    if config.decoder is not None:
        tokens = max_decoder_tokens(cache, budget, groups)
        reads = [_how(read, hidden, span) for read in _decoder_reads(config.decoder, cache, groups, tokens)]
        scratch = scratch_bytes(reads, computed)
        more = _tiled(config, config.decoder, tokens, config.hidden_size) if deterministic else 0
        activations = _decoding(config, config.decoder, cache, tokens, more, DTYPE_BYTES[computed])
    if config.encoder is not None:
        tokens = max_encoder_tokens(config, cache, budget)
        reads = [_how(read, hidden, span) for read in _encoder_reads(config, config.encoder, cache, tokens)]
        scratch = max(scratch, scratch_bytes(reads, computed))
        more = _tiled(config, config.encoder, tokens, encoder_hidden_size(config)) if deterministic else 0
        activations = max(activations, _encoding(config, config.encoder, cache, tokens, more, DTYPE_BYTES[computed]))
    return PeakBytes(scratch, activations)


def _how(read: AttentionRead, hidden: int, tiled: int) -> AttentionRead:
    return replace(
        read, hidden=hidden, tiled=tiled, lower_levels=tuple(_how(part, hidden, tiled) for part in read.lower_levels)
    )


def max_decoder_tokens(cache: CacheConfig, budget: int, groups: Sequence[CacheGroup]) -> int:
    """New tokens of a decoder's step, at most.  Rows that descend end their chunks where they do."""
    chunk = min(
        [
            cache.prefill_chunk_size,
            cache.max_seq_len,
            *(group.demotion_policy.interval for group in groups if group.demotion_policy is not None),
        ]
    )
    return min(budget, cache.max_num_seqs * chunk)


def max_source_tokens(config: ModelConfig, cache: CacheConfig) -> int:
    """Tokens of the longest text that the encoder reads; 0 where there is no encoder."""
    if config.encoder is None:
        return 0
    return cache.max_seq_len if config.decoder is None else cache.max_source_len


def max_encoder_tokens(config: ModelConfig, cache: CacheConfig, budget: int) -> int:
    """Tokens of an encoder's step, at most: sources are read whole."""
    longest = max_source_tokens(config, cache)
    return min(max(budget, longest), cache.max_num_seqs * longest)


# ---------------------------------------------------------------- scratch


def _decoder_reads(
    stack: StackConfig, cache: CacheConfig, groups: Sequence[CacheGroup], tokens: int
) -> Iterator[AttentionRead]:
    below: dict[int, list[AttentionRead]] = {}
    reads: list[tuple[int, AttentionRead]] = []
    shares = plan_offload(groups, cache.offload_ram).shares
    for number, group in enumerate(groups):
        mixers = dict(_named(stack, index) for index in group.layers)
        slots = group.max_blocks_per_seq * group.block_size
        spec = (group.spec.num_kv_heads, group.spec.head_dim, group.spec.value_dim)
        copied = not (cache.layout == "contiguous" and cache.max_num_seqs == 1)
        unrotated = cache.rope_at == "read" and any(isinstance(mixer.position, RopeConfig) for mixer in mixers.values())
        read = AttentionRead(
            mixers, spec, tokens, cache.max_num_seqs, slots, cache.max_num_seqs * slots, group, copied, unrotated
        )
        if number in shares:
            at_once = -(-shares[number].tile // cache.max_num_seqs) * group.block_size
            read = replace(read, slots=min(slots, at_once), keys=cache.max_num_seqs * min(slots, at_once), whole=slots)
        if group.lower_level is not None:
            below.setdefault(group.lower_level.token_group, []).append(read)
        else:
            reads.append((number, read))
    for number, read in reads:
        yield replace(read, lower_levels=tuple(below.get(number, ())))


def _encoder_reads(config: ModelConfig, stack: StackConfig, cache: CacheConfig, tokens: int) -> Iterator[AttentionRead]:
    specs = encoder_attention_specs(config)
    reaches: dict[tuple[bool, int | None], list[int]] = {}
    for index, spec in enumerate(specs):
        reaches.setdefault((spec.causal, spec.window), []).append(index)
    for layers in reaches.values():
        widest = max((specs[index] for index in layers), key=lambda s: s.num_kv_heads * (s.head_dim + s.value_dim))
        mixers = dict(_named(stack, index) for index in layers)
        shape = (widest.num_kv_heads, widest.head_dim, widest.value_dim)
        yield AttentionRead(mixers, shape, tokens, cache.max_num_seqs, max_source_tokens(config, cache), tokens)


def _named(stack: StackConfig, index: int) -> tuple[str, AttentionConfig]:
    """What a layer's biases are shared under, and its attention; from ``stack.layers`` on: its cross-attention."""
    if index >= stack.num_layers:
        cross = stack.layer_config(index - stack.num_layers).cross_attention
        assert cross is not None, "groups count cross-attention after all layers"
        return f"cross {stack.layer_type(index - stack.num_layers)}", cross
    mixer = stack.layer_config(index).attention
    alone = isinstance(mixer.position, T5BiasConfig) and not mixer.position.shared
    return (f"{index}" if alone else stack.layer_type(index)), mixer


# ---------------------------------------------------------------- activations


def _decoding(config: ModelConfig, stack: StackConfig, cache: CacheConfig, tokens: int, more: int, size: int) -> int:
    """``more``: values that products of tiles make beside those of a moment."""
    moments = list(_moments(config, stack, config.hidden_size))
    logits = tokens * config.hidden_size * size + cache.max_num_seqs * config.vocab_size * (size + 3 * 4)
    if more:
        logits += _padded(cache.max_num_seqs) * (config.hidden_size + 2 * config.vocab_size) * size
    return max(size * (tokens * max(moments) + more), logits)


def _encoding(config: ModelConfig, stack: StackConfig, cache: CacheConfig, tokens: int, more: int, size: int) -> int:
    width = encoder_hidden_size(config)
    most = size * (tokens * max(_moments(config, stack, width)) + more)
    if config.decoder is None:
        answers = _answers(config, cache, tokens, size)
        if more:
            answers += size * 2 * _padded(tokens) * (2 * head_input_size(config) + _outputs(config))
        return max(most, answers)
    for layer in config.decoder.layer_types.values():
        assert layer.cross_attention is not None, "each layer of an encoder-decoder attends to the source"
        dim, kv_heads = (
            head_dim(config, layer.cross_attention),
            layer.cross_attention.num_kv_heads or layer.cross_attention.num_heads,
        )
        values = kv_heads * (dim + (layer.cross_attention.value_dim or dim))
        stored = kv_heads * slot_bytes(
            cache.token_formats, dim, layer.cross_attention.value_dim or dim, cache.block_size
        )
        packed = any(get_format(name).kind != "plain" for name in cache.token_formats)
        most = max(most, tokens * (size * (width + 2 * values) + stored + packed * ENCODE_BYTES * values))
    return most


def _answers(config: ModelConfig, cache: CacheConfig, tokens: int, size: int) -> int:
    """An encoder's head: of every token, unless it answers for rows alone."""
    head = config.head
    if config.pools_sequence:
        return size * (
            tokens * config.hidden_size + cache.max_num_seqs * (2 * config.hidden_size + 3 * head_input_size(config))
        )
    outputs = _outputs(config)
    copies = 1
    if isinstance(head, LanguageHeadConfig):
        copies += (head.logit_scale != 1.0) + 2 * (head.logit_softcap is not None)
    made = size * tokens * (config.hidden_size + 3 * head_input_size(config) + copies * outputs)
    return made + min(tokens, cache.max_seq_len) * outputs * (size + 3)


def _outputs(config: ModelConfig) -> int:
    return len(config.head.labels) if isinstance(config.head, ClassificationHeadConfig) else config.vocab_size


def _tiled(config: ModelConfig, stack: StackConfig, tokens: int, width: int) -> int:
    """Values of a product that is made in tiles (``ops/invariant.py``): its input, aligned, and its tiles, before they
    are joined; and three of what an activation is given."""
    most = 0
    for layer in stack.layer_types.values():
        for mixer in (layer.attention, layer.cross_attention):
            if mixer is not None:
                dim, kv_heads = head_dim(config, mixer), mixer.num_kv_heads or mixer.num_heads
                value_dim = mixer.value_dim or dim
                made = (mixer.num_heads + kv_heads) * dim + kv_heads * value_dim
                most = max(most, width + made, width + mixer.num_heads * value_dim)
        most = max(most, width + 3 * layer.mlp.intermediate_size)
    return _padded(tokens) * most


def _padded(rows: int) -> int:
    return -(-rows // TILE) * TILE


def _moments(config: ModelConfig, stack: StackConfig, width: int) -> Iterator[int]:
    """Values per token, at each moment of a layer."""
    for layer in stack.layer_types.values():
        yield _attention(config, layer.attention, width)
        yield _mlp(layer, width)
        if layer.cross_attention is not None:
            yield _attention(config, layer.cross_attention, width)


def _attention(config: ModelConfig, mixer: AttentionConfig, width: int) -> int:
    dim, kv_heads = head_dim(config, mixer), mixer.num_kv_heads or mixer.num_heads
    value_dim = mixer.value_dim or dim
    turned = 4 * (mixer.num_heads + kv_heads) * dim
    return 4 * width + turned + 2 * kv_heads * value_dim + 3 * mixer.num_heads * value_dim


def _mlp(layer: LayerConfig, width: int) -> int:
    if isinstance(layer.mlp, MoEConfig):
        return 8 * width + 6 * layer.mlp.intermediate_size + 3 * layer.mlp.num_experts
    return 5 * width + (3 if isinstance(layer.mlp, PlainMLPConfig) else 4) * layer.mlp.intermediate_size
