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
    experts     c T (8 E + 6 F + 3 count)                     all tokens may choose one expert
    sources     c T (E + 2 K (D + Dv)) + e T K (D + Dv)       cross-attention keys and values while they are written
    logits      c T E + rows V (c + 3 * 4)                    one per sequence, and the sampler's float32 copies
                c T (E + 3 W + n V) + S V (c + 3)             of an encoder: of every token (n = 1, plus 1 if scaled,
                                                              2 if capped), and checks of one sequence's logits

Batch-invariant computation adds tiles: c T max(E + (H + K) D + K Dv, E + H Dv, E + 3 F) of whole tiles, and E + 2 V per
row of logits.

Scratch: temporary memory besides activations, of one layer at a time. Per *part* of what a sequence reads
(``ops/merge.py``: full tokens, quantized tokens, summaries), all at once:

    gather   rows S K (D + Dv) e      keys and values of the blocks of all sequences; none for a single contiguous
                                      sequence, read in place, or an encoder, which reads its own output
    widen    rows S K D c             if the keys' format is not the computed dtype; for values, Dv
             rows S K D 3             shifted bits of an integer format
             rows S K D 4             and float32 on the way to half precision
             rows S K (D + Dv) 4      half precision with a kernel that computes in float32
    turn     rows S K D (3 c + 16)    keys stored unrotated, or renumbered sinks, and their angles
    encode   13 T K D                 new keys in float32, if their format is an integer one; for values, Dv

and of the part that is attended to, one after the other:

    mask     12 M                     M = min(T S, max(MASK_BUDGET, rows S)) pairs at a time; times K if heads retain
                                      or choose different tokens; twice for renumbered sinks
    scores   4 * 4 Q (8 in float64)   Q = min(H T S, max(SCORE_BUDGET, H rows S)): only with softcap, sink logits,
                                      biases, values of another width, in float16 and for summaries; otherwise the
                                      fused kernel stores none
             6 * 4 Q                  if a policy observes attention
             48 Q / H                 distances and buckets of a T5 bias (48 Q if heads retain different tokens)
    merge    T H (5 Dv + 4) 4         outputs and denominators of several parts
    choose   T P (12 H + 64 K)        bounds of P blocks, sorted

and until the end of the step, for each part:

             T S + 8 rows S           booleans (small masks only), positions
             c H T S                  for each small table of biases or slopes (4 bytes for slopes)

For an offloaded level (``token_offload.py``) S is that of one tile, and up to three tiles exist at once: two that are
merged, and the next being decoded. Only positions are stored for all of it.

Batch-invariant attention (``ops/batch_invariant_attention.py``) computes scores for everything it reads, in tiles of
keys and queries (``_tiled_bytes``), if the smallest tile of products has :data:`TILE` rows, as
:mod:`kvad.ops.batch_invariant` measured on every machine so far. If it measures a larger tile, an engine uses more.

Between two steps, when none of that exists, a policy moves tokens: ``_move_bytes``. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvad import config
from kvad import config as config_lib
from kvad.cache import offload
from kvad.cache.config import CacheConfig
from kvad.cache.groups import CacheGroup
from kvad.cache.quantization import get_format
from kvad.config import (
    AlibiConfig,
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

MASK_BUDGET = 1 << 22  # of ops/attention.py, which imports torch; a test compares them
SCORE_BUDGET = 1 << 24
TILES, KEYS, NARROW = (8, 32, 128), 128, 16  # of ops/batch_invariant.py, compared by a test
TILE = TILES[0]
ENCODE_BYTES = 13  # bytes per number while encoding: three float32 and the result
DEMOTE_BYTES = 40  # bytes per demoted number: stored, float32, rotated, encoded
MERGE_TILES = 2  # decoded tiles of an offloaded level while the next is read
SUMMARIZER_COPIES = 12  # additional copies of keys, values and hidden units for a summarizer
SCORE_BYTES = 80  # bytes per token and head for eviction: float64 scores, sorted scores, indices


@dataclass(frozen=True)
class AttentionRead:
    """One read of attention layers that share masks, in one step."""

    specs: Mapping[str, AttentionConfig]  # by the name under which biases are shared
    spec: tuple[int, int, int]  # (K, D, Dv)
    tokens: int  # queries
    rows: int  # sequences
    slots: int  # keys of each sequence
    keys: int  # keys of all sequences
    group: CacheGroup | None = None  # None: keys of the step itself
    gathered: bool = False  # Blocks are copied out of the group.
    unrotated: bool = False  # RoPE is applied at read time.
    lower_levels: tuple[AttentionRead, ...] = ()
    whole: int = 0  # slots of a sequence in all tiles, if read by tiles
    hidden: int = 0  # hidden size of the summarizer; 0 for means
    tiled: int = 0  # positions of a sequence, if batch-invariant

    @property
    def values(self) -> int:
        """Numbers of all keys and values."""
        kv_heads, dim, value_dim = self.spec
        return self.keys * kv_heads * (dim + value_dim)

    @property
    def heads(self) -> int:
        """Maximum number of query heads."""
        return max(spec_config.num_heads for spec_config in self.specs.values())

    @property
    def per_head(self) -> bool:
        """True if heads have different positions and these affect logits."""
        has_bias = any(
            not (spec_config.position is None or isinstance(spec_config.position, RopeConfig))
            for spec_config in self.specs.values()
        )
        return self.group is not None and self.group.eviction_policy is not None and (self.unrotated or has_bias)

    @property
    def masks(self) -> int:
        """Masks per pair of query and key."""
        chooses = self.group is not None and self.group.sparse_read_policy is not None
        return self.spec[0] if self.per_head or chooses else 1

    @property
    def renumbered(self) -> bool:
        """True if sink positions are renumbered."""
        return self.group is not None and self.group.spec.renumber_positions

    @property
    def watched(self) -> bool:
        """True if all attention weights are computed because eviction depends on them."""
        return (
            self.group is not None
            and self.group.eviction_policy is not None
            and self.group.eviction_policy.observed_queries > 0
        )

    @property
    def weighted(self) -> bool:
        """True for summaries."""
        return self.group is not None and self.group.lower_level is not None and self.group.lower_level.ratio > 1


def scratch_bytes(reads: Sequence[AttentionRead], computed: str) -> int:
    """Return the scratch bytes of consecutive layers; ``computed`` is the compute dtype."""
    size = config.DTYPE_BYTES[computed]
    retained = sum(_retained_bytes(part, size) for read in reads for part in (read, *read.lower_levels))
    read = retained + max((_scratch(read, computed) for read in reads), default=0)
    return max(read, *(_move_bytes(read) for read in reads)) if reads else read


def _retained_bytes(read: AttentionRead, size: int) -> int:
    """Return the bytes of masks, positions and biases that exist until the end of the step."""
    pairs, max_pairs = read.tokens * read.slots, min(read.tokens, read.rows) * MASK_BUDGET
    retained = min(read.masks * pairs, max_pairs) + 8 * read.rows * max(read.slots, read.whole)
    for spec_config in read.specs.values():
        if isinstance(spec_config.position, (AlibiConfig, T5BiasConfig)):
            width = size if isinstance(spec_config.position, T5BiasConfig) else 4
            retained += width * min(spec_config.num_heads * pairs, max_pairs)
    return retained


def _scratch(read: AttentionRead, computed: str) -> int:
    """Return the temporary bytes of one layer."""
    parts = (read, *read.lower_levels)
    wide = max(4, config.DTYPE_BYTES[computed])
    scratch = sum(_copy_bytes(part, computed) + _pending_bytes(part, computed) for part in parts)
    scratch += max(_attention_bytes(part, computed) for part in parts)
    if len(parts) > 1 or read.renumbered:
        scratch += read.tokens * read.heads * (5 * read.spec[2] + 4) * wide
    if read.renumbered:  # queries rotated back
        scratch += read.tokens * read.heads * read.spec[1] * (3 * wide + 16)
    return scratch + _block_selection_bytes(read)


def _pending_bytes(read: AttentionRead, computed: str) -> int:
    """Return the bytes of decoded tiles that wait to be merged."""
    return MERGE_TILES * read.values * config.DTYPE_BYTES[computed] if read.whole else 0


def _copy_bytes(read: AttentionRead, computed: str) -> int:
    """Return the bytes of gathered, decoded and rotated keys and values."""
    if read.group is None:
        return 0
    kv_heads, dim, value_dim = read.spec
    size = config.DTYPE_BYTES[computed]
    formats = read.group.key_format, read.group.value_format
    copied = read.keys * kv_heads * slot_bytes(formats, dim, value_dim, read.group.block_size) if read.gathered else 0
    copied += sum(
        _decode_bytes(read, name, width, computed) for name, width in zip(formats, (dim, value_dim), strict=True)
    )
    if read.unrotated or read.renumbered:
        angles = 16 * (kv_heads if read.per_head else 1)
        copied += read.keys * dim * (3 * kv_heads * size + angles)
    return copied + (12 * read.keys * kv_heads if read.per_head else 0)


def slot_bytes(formats: tuple[str, str], dim: int, value_dim: int, block_size: int) -> int:
    """Return the bytes of a slot of one head, with its share of per-block scales."""
    keys, values = formats
    arrays = (*get_format(keys).arrays(dim), *get_format(values).arrays(value_dim))
    shared = sum(array.nbytes for array in arrays if array.granularity == "block")
    return sum(array.nbytes for array in arrays if array.granularity == "slot") + -(-shared // block_size)


def _decode_bytes(read: AttentionRead, name: str, dim: int, computed: str) -> int:
    """Return the bytes of decoding keys or values of ``dim`` numbers and encoding new ones."""
    if name == computed:
        return 0
    count, size = read.keys * read.spec[0] * dim, config.DTYPE_BYTES[computed]
    if get_format(name).kind == "plain":
        return count * size
    return count * (size + 3 + (4 if size == 2 else 0)) + ENCODE_BYTES * read.tokens * read.spec[0] * dim


def _attention_bytes(read: AttentionRead, computed: str) -> int:
    """Return the bytes of masks, scores and merged outputs."""
    if read.tiled:
        return _tiled_bytes(read, computed)
    size, row = config.DTYPE_BYTES[computed], read.rows * read.slots
    masks = read.masks * min(read.tokens * read.slots, max(MASK_BUDGET, row))
    total = 12 * masks * (2 if read.renumbered else 1)
    forced = read.weighted or read.watched
    unfused = [
        spec_config for spec_config in read.specs.values() if forced or _makes_scores(spec_config, read.spec, computed)
    ]
    if unfused:
        heads = max(spec_config.num_heads for spec_config in unfused)
        scores = min(heads * read.tokens * read.slots, max(SCORE_BUDGET, heads * row))
        total += (6 if read.watched else 4) * max(4, size) * scores
        total += 8 * read.tokens * heads * read.spec[1] if read.watched else 0  # queries, widened
        total += read.values * 4 if size == 2 else 0
        if any(isinstance(spec_config.position, T5BiasConfig) for spec_config in unfused):
            total += 48 * scores // (1 if read.per_head else min(spec_config.num_heads for spec_config in unfused))
        elif read.per_head:
            total += 24 * scores
    return total + (16 * row * read.spec[0] if read.watched else 0)


def _tiled_bytes(read: AttentionRead, computed: str) -> int:
    """Return the bytes of batch-invariant attention.

    Q scores of a block of queries of all sequences, 5 times: products, their stack, scaled (and once more if capped),
    masked; weights. Biases 4 times, and masks, of everything between the first position and the last. Tiles of keys and
    values, the output and its sums.

    A block has queries of whole groups, at least :data:`TILE` and at most as many as SCORE_BUDGET allows for a tile.
    """
    kv_heads, dim, value_dim = read.spec
    wide, heads = max(4, config.DTYPE_BYTES[computed]), read.heads
    min_queries, max_queries = (-(-rows // (heads // kv_heads)) for rows in (TILE, TILES[-1]))
    fitting = SCORE_BUDGET // (heads * read.slots)
    queries = max(read.rows * min_queries, min(read.rows * max_queries, read.tokens + read.rows * min_queries, fitting))
    cache_spec = None if read.group is None else read.group.spec
    slots = spread = KEYS * (
        -(-read.slots // KEYS) + (cache_spec is not None and cache_spec.window is not None)
    )  # partial tiles
    if cache_spec is not None and cache_spec.num_sinks:
        spread = max(slots, KEYS * (-(-read.tiled // KEYS) + 1))
    capped = any(spec_config.logit_softcap is not None for spec_config in read.specs.values())
    total = (5 + capped) * wide * heads * queries * slots + 16 * queries * spread + 32 * read.rows * spread
    if any(isinstance(spec_config.position, (AlibiConfig, T5BiasConfig)) for spec_config in read.specs.values()):
        total += (4 * wide * heads + 48) * queries * spread
    tile = read.rows * kv_heads * KEYS * 3 * (max(dim, value_dim) + NARROW) * wide
    outputs = heads * (queries * (3 * dim + 5 * (value_dim + NARROW)) + 2 * read.tokens * value_dim) * wide
    return total + tile + outputs + 2 * read.keys * kv_heads * value_dim * config.DTYPE_BYTES[computed]


def _makes_scores(spec_config: AttentionConfig, spec: tuple[int, int, int], computed: str) -> bool:
    """True if attention stores a score matrix, unlike the fused kernel without biases."""
    plain = (spec_config.position is None or isinstance(spec_config.position, RopeConfig)) and spec[1] == spec[2]
    return not plain or spec_config.logit_softcap is not None or spec_config.sink_logits or computed == "float16"


def _block_selection_bytes(read: AttentionRead) -> int:
    """Return the bytes of block bounds and of the blocks that each query selects."""
    if read.group is None or read.group.sparse_read_policy is None:
        return 0
    kv_heads, dim, _ = read.spec
    wide = 8 if read.group.key_format == "float64" else 4
    blocks = read.slots // read.group.block_size
    bounds = 4 * read.rows * blocks * kv_heads * dim * wide
    queries = read.tokens * (3 * read.heads * dim + 4 * kv_heads * dim) * wide
    return bounds + queries + read.tokens * blocks * (12 * read.heads + 64 * kv_heads)


def _move_bytes(read: AttentionRead) -> int:
    """Return the bytes of evicting or demoting tokens, of one layer at a time."""
    group = read.group
    if group is None:
        return 0
    kv_heads, dim, value_dim = read.spec
    if group.demotion_policy is not None:
        moving = read.rows * (group.demotion_policy.interval + group.block_size)
        moved = moving * kv_heads * (dim + value_dim) * DEMOTE_BYTES
        return moved + (
            moving * kv_heads * (SUMMARIZER_COPIES * (dim + value_dim + 2) + SUMMARIZER_COPIES * read.hidden)
            if read.hidden
            else 0
        )
    if group.eviction_policy is None:
        return 0
    slot = kv_heads * (slot_bytes((group.key_format, group.value_format), dim, value_dim, group.block_size) + 12)
    scoring = read.slots * kv_heads * (8 * 3 * max(dim, value_dim) + SCORE_BYTES)
    return read.rows * min(group.eviction_policy.budget, read.slots) * slot + scoring


class PeakBytes(NamedTuple):
    """Upper bounds in bytes."""

    scratch: int
    activations: int


def peak_memory(
    config: ModelConfig,
    cache: CacheConfig,
    groups: Sequence[CacheGroup],
    computed: str,
    max_num_batched_tokens: int,
    *,
    hidden: int = 0,
    deterministic: bool = False,
) -> PeakBytes:
    """Return the peak of the largest step.

    Args:
        config: Model configuration.
        cache: Resolved cache configuration.
        groups: Cache groups.
        computed: Dtype of the computation.
        max_num_batched_tokens: New tokens of a step, at most.
        hidden: Hidden size of the summarizer; 0 for means.
        deterministic: Batch-invariant computation.
    """
    scratch = activations = 0
    span = cache.max_seq_len if deterministic else 0
    if config.decoder is not None:
        tokens = max_decoder_tokens(cache, max_num_batched_tokens, groups)
        reads = [_with_options(read, hidden, span) for read in _decoder_reads(config.decoder, cache, groups, tokens)]
        scratch = scratch_bytes(reads, computed)
        tile_values = _tile_values(config, config.decoder, tokens, config.hidden_size) if deterministic else 0
        activations = _decoding(config, config.decoder, cache, tokens, tile_values, config_lib.DTYPE_BYTES[computed])
    if config.encoder is not None:
        tokens = max_encoder_tokens(config, cache, max_num_batched_tokens)
        reads = [_with_options(read, hidden, span) for read in _encoder_reads(config, config.encoder, cache, tokens)]
        scratch = max(scratch, scratch_bytes(reads, computed))
        tile_values = _tile_values(config, config.encoder, tokens, encoder_hidden_size(config)) if deterministic else 0
        activations = max(
            activations, _encoding(config, config.encoder, cache, tokens, tile_values, config_lib.DTYPE_BYTES[computed])
        )
    return PeakBytes(scratch, activations)


def _with_options(read: AttentionRead, hidden: int, tiled: int) -> AttentionRead:
    """Set ``hidden`` and ``tiled`` in a read and its lower levels."""
    return replace(
        read,
        hidden=hidden,
        tiled=tiled,
        lower_levels=tuple(_with_options(part, hidden, tiled) for part in read.lower_levels),
    )


def max_decoder_tokens(cache: CacheConfig, max_num_batched_tokens: int, groups: Sequence[CacheGroup]) -> int:
    """Return the maximum number of new tokens of a decoder step; chunks end at demotions."""
    chunk = min(
        [
            cache.prefill_chunk_size,
            cache.max_seq_len,
            *(group.demotion_policy.interval for group in groups if group.demotion_policy is not None),
        ]
    )
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


# ---------------------------------------------------------------- scratch


def _decoder_reads(
    stack: StackConfig, cache: CacheConfig, groups: Sequence[CacheGroup], tokens: int
) -> Iterator[AttentionRead]:
    lower_levels: dict[int, list[AttentionRead]] = {}
    reads: list[tuple[int, AttentionRead]] = []
    shares = offload.token_offload.plan_offload(groups, cache.offload_ram).shares
    for group_index, group in enumerate(groups):
        spec_configs = dict(_spec_of_layer(stack, index) for index in group.layers)
        slots = group.max_blocks_per_seq * group.block_size
        spec = (group.spec.num_kv_heads, group.spec.head_dim, group.spec.value_dim)
        gathered = not (cache.layout == "contiguous" and cache.max_num_seqs == 1)
        unrotated = cache.rope_at == "read" and any(
            isinstance(spec_config.position, RopeConfig) for spec_config in spec_configs.values()
        )
        read = AttentionRead(
            spec_configs,
            spec,
            tokens,
            cache.max_num_seqs,
            slots,
            cache.max_num_seqs * slots,
            group,
            gathered,
            unrotated,
        )
        if group_index in shares:
            tile_slots = -(-shares[group_index].tile // cache.max_num_seqs) * group.block_size
            read = replace(
                read, slots=min(slots, tile_slots), keys=cache.max_num_seqs * min(slots, tile_slots), whole=slots
            )
        if group.lower_level is not None:
            lower_levels.setdefault(group.lower_level.token_group, []).append(read)
        else:
            reads.append((group_index, read))
    for group_index, read in reads:
        yield replace(read, lower_levels=tuple(lower_levels.get(group_index, ())))


def _encoder_reads(config: ModelConfig, stack: StackConfig, cache: CacheConfig, tokens: int) -> Iterator[AttentionRead]:
    specs = encoder_attention_specs(config)
    layers_by_pattern: dict[tuple[bool, int | None], list[int]] = {}
    for index, spec in enumerate(specs):
        layers_by_pattern.setdefault((spec.causal, spec.window), []).append(index)
    for layers in layers_by_pattern.values():
        widest = max((specs[index] for index in layers), key=lambda s: s.num_kv_heads * (s.head_dim + s.value_dim))
        spec_configs = dict(_spec_of_layer(stack, index) for index in layers)
        shape = (widest.num_kv_heads, widest.head_dim, widest.value_dim)
        yield AttentionRead(spec_configs, shape, tokens, cache.max_num_seqs, max_source_tokens(config, cache), tokens)


def _spec_of_layer(stack: StackConfig, index: int) -> tuple[str, AttentionConfig]:
    """Return the name under which a layer's biases are shared, and its attention.

    Indices from ``stack.num_layers`` on are cross-attention layers.
    """
    if index >= stack.num_layers:
        cross_attention = stack.layer_config(index - stack.num_layers).cross_attention
        assert cross_attention is not None, "cross-attention is counted after all layers"
        return f"cross {stack.layer_type(index - stack.num_layers)}", cross_attention
    spec_config = stack.layer_config(index).attention
    is_separate = isinstance(spec_config.position, T5BiasConfig) and not spec_config.position.shared
    return (f"{index}" if is_separate else stack.layer_type(index)), spec_config


# ---------------------------------------------------------------- activations


def _decoding(
    config: ModelConfig, stack: StackConfig, cache: CacheConfig, tokens: int, tile_values: int, size: int
) -> int:
    """Return the activations of a decoder step; ``tile_values`` is for batch invariance."""
    moments = list(_layer_moments(config, stack, config.hidden_size))
    logits = tokens * config.hidden_size * size + cache.max_num_seqs * config.vocab_size * (size + 3 * 4)
    if tile_values:
        logits += _padded(cache.max_num_seqs) * (config.hidden_size + 2 * config.vocab_size) * size
    return max(size * (tokens * max(moments) + tile_values), logits)


def _encoding(
    config: ModelConfig, stack: StackConfig, cache: CacheConfig, tokens: int, tile_values: int, size: int
) -> int:
    """Return the activations of an encoder step."""
    width = encoder_hidden_size(config)
    peak = size * (tokens * max(_layer_moments(config, stack, width)) + tile_values)
    if config.decoder is None:
        head_bytes = _head_bytes(config, cache, tokens, size)
        if tile_values:
            head_bytes += size * 2 * _padded(tokens) * (2 * head_input_size(config) + _outputs(config))
        return max(peak, head_bytes)
    for layer in config.decoder.layer_types.values():
        assert layer.cross_attention is not None, "each layer of an encoder-decoder has cross-attention"
        dim, kv_heads = (
            head_dim(config, layer.cross_attention),
            layer.cross_attention.num_kv_heads or layer.cross_attention.num_heads,
        )
        values = kv_heads * (dim + (layer.cross_attention.value_dim or dim))
        stored = kv_heads * slot_bytes(
            cache.token_formats, dim, layer.cross_attention.value_dim or dim, cache.block_size
        )
        is_quantized = any(get_format(name).kind != "plain" for name in cache.token_formats)
        peak = max(peak, tokens * (size * (width + 2 * values) + stored + is_quantized * ENCODE_BYTES * values))
    return peak


def _head_bytes(config: ModelConfig, cache: CacheConfig, tokens: int, size: int) -> int:
    """Return the bytes of an encoder's head: per token, or per sequence if it pools."""
    head = config.head
    if config.pools_sequence:
        return size * (
            tokens * config.hidden_size + cache.max_num_seqs * (2 * config.hidden_size + 3 * head_input_size(config))
        )
    outputs = _outputs(config)
    copies = 1
    if isinstance(head, LanguageHeadConfig):
        copies += (head.logit_scale != 1.0) + 2 * (head.logit_softcap is not None)
    total = size * tokens * (config.hidden_size + 3 * head_input_size(config) + copies * outputs)
    return total + min(tokens, cache.max_seq_len) * outputs * (size + 3)


def _outputs(config: ModelConfig) -> int:
    return len(config.head.labels) if isinstance(config.head, ClassificationHeadConfig) else config.vocab_size


def _tile_values(config: ModelConfig, stack: StackConfig, tokens: int, width: int) -> int:
    """Return the numbers of a product in tiles (``ops/batch_invariant.py``).

    They are its aligned input, its tiles before they are joined, and three inputs of an activation function.
    """
    peak = 0
    for layer in stack.layer_types.values():
        for spec_config in (layer.attention, layer.cross_attention):
            if spec_config is not None:
                dim, kv_heads = head_dim(config, spec_config), spec_config.num_kv_heads or spec_config.num_heads
                value_dim = spec_config.value_dim or dim
                projected = (spec_config.num_heads + kv_heads) * dim + kv_heads * value_dim
                peak = max(peak, width + projected, width + spec_config.num_heads * value_dim)
        peak = max(peak, width + 3 * layer.mlp.intermediate_size)
    return _padded(tokens) * peak


def _padded(rows: int) -> int:
    return -(-rows // TILE) * TILE


def _layer_moments(config: ModelConfig, stack: StackConfig, width: int) -> Iterator[int]:
    """Yield the numbers per token at each moment of a layer."""
    for layer in stack.layer_types.values():
        yield _attention(config, layer.attention, width)
        yield _mlp(layer, width)
        if layer.cross_attention is not None:
            yield _attention(config, layer.cross_attention, width)


def _attention(config: ModelConfig, spec_config: AttentionConfig, width: int) -> int:
    dim, kv_heads = head_dim(config, spec_config), spec_config.num_kv_heads or spec_config.num_heads
    value_dim = spec_config.value_dim or dim
    rotated = 4 * (spec_config.num_heads + kv_heads) * dim
    return 4 * width + rotated + 2 * kv_heads * value_dim + 3 * spec_config.num_heads * value_dim


def _mlp(layer: LayerConfig, width: int) -> int:
    if isinstance(layer.mlp, MoEConfig):
        return 8 * width + 6 * layer.mlp.intermediate_size + 3 * layer.mlp.num_experts
    return 5 * width + (3 if isinstance(layer.mlp, PlainMLPConfig) else 4) * layer.mlp.intermediate_size
