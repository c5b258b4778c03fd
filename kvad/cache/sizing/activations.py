"""Upper bound of a step's temporary memory, from shapes alone: scratch and activations.

Two kinds of steps are bounded, and the maximum of each number counts:

* decoder: ``T = min(max_num_batched_tokens, sequences * chunk)`` new tokens, every sequence at its maximum length;
* encoder: whole inputs, at least one: ``T = min(max(max_num_batched_tokens, S), sequences * S)`` for inputs of S
  tokens. An encoder caches nothing.

The memory appears in a process's peak, not between two steps. A test compares the bound with torch's allocations.
Letters as in ``model_input.py``; ``c`` is the bytes of a computed value, ``e`` of a cached one with its share of
scales, F the intermediate size of an MLP, rows the number of sequences, T and S of the step, or of the encoder input.

Activations: the maximum over these moments, W the input width of the head:

    attention   c T (4 E + 4 (H D + K D) + 2 K Dv + 3 H Dv)   residual, norm; q, k during rotation; v; outputs
    MLP         c T (5 E + 3 F), gated 4 F                    two residuals, norm; up, gate, product
    experts     c T (8 E + 6 F + 10 count + 20 chosen)        all tokens may choose one expert; or 4 times the shared F
                T (chosen ((6 + c / 2) E + 5 F) + c count)    of native kernels, with what attention has: a row for each
                                                              chosen expert, with quantized weights as integers, too
    sources     c T (E + 2 K (D + Dv)) + e T K (D + Dv)       cross-attention keys and values while they are written
    logits      c T E + rows V (c + 3 * 4)                    one per sequence and draft, the sampler's float32 copies
                c T (E + 3 W + n V) + S V (c + 3)             of an encoder: of every token (n = 1, plus 1 if scaled,
                                                              2 if capped), and checks of one sequence's logits

Batch-invariant computation adds tiles: c T max(E + (H + K) D + K Dv, E + H Dv, E + 3 F) of whole tiles, and E + 2 V per
row of logits.

Scratch, of one layer at a time, is in ``scratch.py``. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvad import config as cfg
from kvad.cache import offload
from kvad.cache.config import CacheConfig
from kvad.cache.groups import CacheGroup
from kvad.cache.quantization import get_format
from kvad.cache.sizing.scratch import ENCODE_BYTES, TILE, AttentionRead, scratch_bytes, slot_bytes
from kvad.config import (
    DTYPE_BYTES,
    ModelConfig,
    attention_dims,
    encoder_attention_specs,
    encoder_hidden_size,
    head_input_size,
    kv_size,
)
from kvad.model_input import MAX_READ_SLOTS


def peak_memory(
    config: ModelConfig,
    cache: CacheConfig,
    groups: Sequence[CacheGroup],
    computed: str,
    max_num_batched_tokens: int,
    num_drafts: int = 0,
    *,
    hidden: int = 0,
    deterministic: bool = False,
) -> tuple[int, int]:
    """Return upper bounds of the scratch and of the activations of the largest step, in bytes.

    Args:
        config: Model configuration.
        cache: Resolved cache configuration.
        groups: Its groups.
        computed: Dtype of the computation.
        max_num_batched_tokens: New tokens of a step, at most.
        num_drafts: Drafts of a sequence, whose logits are needed too.
        hidden: Hidden size of the summarizer; 0 for means.
        deterministic: Batch-invariant computation.
    """
    scratch = activations = 0
    size, tiled = DTYPE_BYTES[computed], cache.max_seq_len if deterministic else 0
    if config.decoder is not None:
        tokens = max_decoder_tokens(cache, max_num_batched_tokens, groups)
        reads = _decoder_reads(config.decoder, cache, groups, tokens, hidden=hidden, tiled=tiled)
        scratch = scratch_bytes(list(reads), computed)
        tile_values = _tile_values(config, config.decoder, tokens, config.hidden_size) if deterministic else 0
        rows = max(cache.max_num_seqs, min(tokens, cache.max_num_seqs * (1 + num_drafts)))
        activations = _decoding(config, config.decoder, tokens, rows, tile_values, size)
    if config.encoder is not None:
        tokens = max_encoder_tokens(config, cache, max_num_batched_tokens)
        reads = _encoder_reads(config, config.encoder, cache, computed, tokens, tiled=tiled)
        scratch = max(scratch, scratch_bytes(list(reads), computed))
        tile_values = _tile_values(config, config.encoder, tokens, encoder_hidden_size(config)) if deterministic else 0
        activations = max(activations, _encoding(config, config.encoder, cache, tokens, tile_values, size))
    return scratch, activations


def max_decoder_tokens(cache: CacheConfig, max_num_batched_tokens: int, groups: Sequence[CacheGroup]) -> int:
    """Return the maximum number of new tokens of a decoder step; chunks end at demotions."""
    intervals = [group.demotion_policy.interval for group in groups if group.demotion_policy is not None]
    chunk = min([cache.prefill_chunk_size, cache.max_seq_len, *intervals])
    return min(max_num_batched_tokens, cache.max_num_seqs * chunk)


def max_source_tokens(config: ModelConfig, cache: CacheConfig) -> int:
    """Return the maximum length of an encoder input; 0 without an encoder."""
    if config.encoder is None:
        return 0
    return cache.max_seq_len if config.decoder is None else cache.max_source_len


def max_encoder_tokens(config: ModelConfig, cache: CacheConfig, max_num_batched_tokens: int) -> int:
    """Return the maximum number of tokens of an encoder step; inputs are encoded whole."""
    longest = max_source_tokens(config, cache)
    return min(max(max_num_batched_tokens, longest), cache.max_num_seqs * longest)


def _decoder_reads(
    stack: cfg.StackConfig, cache: CacheConfig, groups: Sequence[CacheGroup], tokens: int, *, hidden: int, tiled: int
) -> Iterator[AttentionRead]:
    lower_levels: dict[int, list[AttentionRead]] = {}
    reads: list[tuple[int, AttentionRead]] = []
    shares = offload.token_offload.plan_offload(groups, cache.offload_ram).shares
    for group_index, group in enumerate(groups):
        specs = dict(_spec_of_layer(stack, index) for index in group.layers)
        slots, rows = group.max_blocks_per_seq * group.block_size, cache.max_num_seqs
        whole = 0
        if group_index in shares:
            whole, slots = slots, min(slots, -(-shares[group_index].tile // rows) * group.block_size)
        keys = rows * slots if group.spec.is_cross_attention else min(rows * slots, max(slots, MAX_READ_SLOTS))
        has_rope = any(isinstance(attention.position, cfg.RopeConfig) for attention in specs.values())
        read = AttentionRead(
            specs,
            group,
            tokens,
            rows,
            slots,
            keys,
            keys,
            gathered=not (cache.layout == "contiguous" and rows == 1),
            unrotated=has_rope and cache.rope_at == "read",
            whole=whole,
            hidden=hidden,
            tiled=tiled,
        )
        if group.lower_level is not None:
            lower_levels.setdefault(group.lower_level.token_group, []).append(read)
        else:
            reads.append((group_index, read))
    for group_index, read in reads:
        yield replace(read, lower_levels=tuple(lower_levels.get(group_index, ())))


def _encoder_reads(
    config: ModelConfig, stack: cfg.StackConfig, cache: CacheConfig, computed: str, tokens: int, *, tiled: int
) -> Iterator[AttentionRead]:
    specs = encoder_attention_specs(config)
    layers_by_pattern: dict[tuple[bool, int | None], list[int]] = {}
    for index, spec in enumerate(specs):
        layers_by_pattern.setdefault((spec.causal, spec.window), []).append(index)
    for layers in layers_by_pattern.values():
        widest = max((specs[index] for index in layers), key=lambda spec: spec.kv_size)
        by_name = dict(_spec_of_layer(stack, index) for index in layers)
        spec = widest._replace(window=None)
        group = CacheGroup(spec, tuple(layers), 1, 0, 0, key_format=computed, value_format=computed)
        num_slots = max_source_tokens(config, cache)
        rows = cache.max_num_seqs
        yield AttentionRead(by_name, group, tokens, rows, num_slots, tokens, rows * num_slots, tiled=tiled)


def _spec_of_layer(stack: cfg.StackConfig, index: int) -> tuple[str, cfg.TokenMixer]:
    """Return the name under which a layer's biases are shared, and its attention.

    Indices from ``stack.num_layers`` on are cross-attention layers.
    """
    if index >= stack.num_layers:
        cross_attention = stack.layer_config(index - stack.num_layers).cross_attention
        assert cross_attention is not None, "cross-attention is counted after all layers"
        return f"cross {stack.layer_type(index - stack.num_layers)}", cross_attention
    attention = stack.layer_config(index).attention
    is_separate = isinstance(attention.position, cfg.T5BiasConfig) and not attention.position.shared
    return (f"{index}" if is_separate else stack.layer_type(index)), attention


def _decoding(config: ModelConfig, stack: cfg.StackConfig, tokens: int, rows: int, tile_values: int, size: int) -> int:
    moments = list(_layer_moments(config, stack, config.hidden_size, size))
    logits = tokens * config.hidden_size * size + rows * config.vocab_size * (size + 3 * 4)
    if tile_values:
        logits += _padded(rows) * (config.hidden_size + 2 * config.vocab_size) * size
    return max(size * (tokens * max(moments) + tile_values), logits)


def _encoding(
    config: ModelConfig, stack: cfg.StackConfig, cache: CacheConfig, tokens: int, tile_values: int, size: int
) -> int:
    width = encoder_hidden_size(config)
    peak = size * (tokens * max(_layer_moments(config, stack, width, size)) + tile_values)
    if config.decoder is None:
        head_bytes = _head_bytes(config, cache, tokens, size)
        if tile_values:
            head_bytes += size * 2 * _padded(tokens) * (2 * head_input_size(config) + _outputs(config))
        return max(peak, head_bytes)
    for layer in config.decoder.layer_types.values():
        assert layer.cross_attention is not None, "each layer of an encoder-decoder has cross-attention"
        dims, formats = attention_dims(config, layer.cross_attention), cache.token_formats
        sizes = zip(map(get_format, formats), (dims.head_dim, dims.value_dim), strict=True)
        stored = dims.num_kv_heads * slot_bytes(sizes, cache.block_size)
        encoding = ENCODE_BYTES * any(get_format(name).kind != "plain" for name in formats)
        numbers = kv_size(config, layer.cross_attention)
        peak = max(peak, tokens * (size * (width + 2 * numbers) + stored + encoding * numbers))
    return peak


def _head_bytes(config: ModelConfig, cache: CacheConfig, tokens: int, size: int) -> int:
    """Return the bytes of an encoder's head: per token, or per sequence if it pools."""
    head = config.head
    if config.pools_sequence:
        pooled = cache.max_num_seqs * (2 * config.hidden_size + 3 * head_input_size(config))
        return size * (tokens * config.hidden_size + pooled)
    outputs = _outputs(config)
    copies = 1
    if isinstance(head, cfg.LanguageHeadConfig):
        copies += (head.logit_scale != 1.0) + 2 * (head.logit_softcap is not None)
    total = size * tokens * (config.hidden_size + 3 * head_input_size(config) + copies * outputs)
    return total + min(tokens, cache.max_seq_len) * outputs * (size + 3)


def _outputs(config: ModelConfig) -> int:
    return len(config.head.labels) if isinstance(config.head, cfg.ClassificationHeadConfig) else config.vocab_size


def _tile_values(config: ModelConfig, stack: cfg.StackConfig, tokens: int, width: int) -> int:
    """Return the numbers of a product in tiles (``ops/batch_invariant.py``).

    They are its aligned input, its tiles before they are joined, and three inputs of an activation function.
    """
    peak = 0
    for layer in stack.layer_types.values():
        peak = max(peak, 3 * layer.mlp.intermediate_size, 3 * (getattr(layer.mlp, "shared_size", None) or 0))
        for attention in (layer.attention, layer.cross_attention):
            if attention is not None:
                heads, _, dim, value_dim = attention_dims(config, attention)
                peak = max(peak, heads * dim + kv_size(config, attention), heads * value_dim)
    return _padded(tokens) * (width + peak)


def _padded(rows: int) -> int:
    return -(-rows // TILE) * TILE


def _layer_moments(config: ModelConfig, stack: cfg.StackConfig, width: int, size: int) -> Iterator[int]:
    """Yield the numbers per token, of ``size`` bytes, at each moment of a layer."""
    for layer in stack.layer_types.values():
        attending = 0
        for attention in (layer.attention, layer.cross_attention):
            if attention is not None:
                heads, kv_heads, dim, value_dim = attention_dims(config, attention)
                # A latent's own projections are no wider than the absorbed queries and outputs, one copy more of each.
                copies = 4 if attention.latent is None else 5
                values = (3 + 2 * attention.output_gate) * heads * value_dim
                both = copies * (heads + kv_heads) * dim + 2 * kv_heads * value_dim
                attending = max(attending, 4 * width + both + values)
        yield attending
        if isinstance(layer.mlp, cfg.MoEConfig):
            inner, shared = layer.mlp.intermediate_size, layer.mlp.shared_size or 0
            chosen = layer.mlp.num_experts_per_token
            rest = 10 * layer.mlp.num_experts + 20 * chosen
            yield 8 * width + max(6 * inner, 4 * shared) + rest
            pairs = chosen * ((6 + size // 2) * width + 5 * inner)
            yield attending + 4 * shared + rest + -(-pairs // size)
        else:
            yield 5 * width + (3 if isinstance(layer.mlp, cfg.PlainMLPConfig) else 4) * layer.mlp.intermediate_size
