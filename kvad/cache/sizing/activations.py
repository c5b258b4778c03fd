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

Scratch: what a step makes beside its activations, for one layer at a time.  An upper bound, from shapes; no torch.

Letters as in ``step.py``; ``c`` is the bytes of a computed value, ``e`` of a cached one with its share of scales.  Per
*part*, a piece of what a row reads (``ops/merge.py``: tokens as they are, packed ones, summaries); all lie there at
once:

    gather   rows S K (D + Dv) e      keys and values of the blocks of all rows, side by side; nothing where a single
                                      contiguous row is read where it lies, or in an encoder, which reads what it made
    widen    rows S K D c             where the format of the keys is not the computed dtype; of the values, Dv
             rows S K D 3             bits moved into place, where it is a packed one
             rows S K D 4             and float32 on its way to half precision
             rows S K (D + Dv) 4      where half precision meets a kernel that computes in float32
    turn     rows S K D (3 c + 16)    keys that lie unrotated, or sinks that are numbered anew, and their angles
    encode   13 T K D                 new keys in float32, where their format is a packed one; of the values, Dv

and of the part that is attended to, one after the other:

    mask     12 M                     M = min(T S, max(MASK_BUDGET, rows S)) pairs made at a time; times K where heads
                                      keep, or choose, other tokens; twice where sinks are numbered anew
    scores   4 * 4 Q (8 in float64)   Q = min(H T S, max(SCORE_BUDGET, H rows S)): only with softcap, sink logits,
                                      biases or values of another width, in float16 and of summaries; else the fused
                                      kernel makes none
             6 * 4 Q                  where a policy watches
             48 Q / H                 distances and buckets of a T5 bias (48 Q where heads keep other tokens)
    merge    T H (5 Dv + 4) 4         answers of parts and their denominators, where there are several
    choose   T P (12 H + 64 K)        bounds of P blocks, ranked

and kept until the step ends, for each part:

             T S + 8 rows S           booleans (small masks only), positions
             c H T S                  for each table of biases or slopes (4 bytes of these), where it is small

Of a level that is spilled (``spilled.py``) S is of one tile, and up to three tiles are there at once: two that are
merged, and the next while it is unpacked.  Only its positions are kept for all of it.

The same bits in any batch (``ops/aligned.py``) make scores for all that is attended to, in tiles of keys and of
queries: ``_in_tiles``; that is where the smallest tile of products has :data:`TILE` rows, as :mod:`kvad.ops.batch_invariant`
found it on every machine so far.  Where it finds a larger one, an engine makes more.

Between two steps, when nothing of that is there, a policy moves tokens: ``_moved``.
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

MASK_BUDGET = 1 << 22  # ops/attend.py's, which imports torch; a test holds them equal
SCORE_BUDGET = 1 << 24
TILES, KEYS, NARROW = (8, 32, 128), 128, 16  # ops/invariant.py's, in the same way
TILE = TILES[0]
ENCODE_BYTES = 13  # bytes of a number while it is encoded: three float32 and what is stored
DEMOTE_BYTES = 40  # of a number of what descends: as stored, in float32, turned, and encoded anew
MERGE_TILES = 2  # tiles of a spilled level that wait, unpacked, while the next is
SUMMARIZER_COPIES = 12  # more of each, where a compressor looks at it; and of its units
SCORE_BYTES = 80  # of a token that is ranked, per head: its rank in float64, sorted, and their indices


@dataclass(frozen=True)
class AttentionRead:
    """Layers that share masks, in one step: ``tokens`` queries of ``rows`` rows, each of ``slots`` keys.

    ``mixers`` by what their biases are shared under; ``spec``: (K, D, Dv) of the keys and values; ``keys``: how many of
    them; ``group``: where they lie, None for what was just made; ``gathered``: they are copied out of it;
    ``unrotated``: RoPE turns them as they are read; ``below``: what lies in the levels of the same layers; ``whole``:
    of what is read a tile at a time, the slots of a row in all tiles (0: it is read at once).  ``hidden``: units of
    what makes summaries, 0 for means; ``tiled``: positions of a row where it is attended to in tiles, else 0.
    """

    specs: Mapping[str, AttentionConfig]
    spec: tuple[int, int, int]
    tokens: int
    rows: int
    slots: int
    keys: int
    group: CacheGroup | None = None
    gathered: bool = False
    unrotated: bool = False
    lower_levels: tuple[AttentionRead, ...] = ()
    whole: int = 0
    hidden: int = 0
    tiled: int = 0

    @property
    def values(self) -> int:
        kv_heads, dim, value_dim = self.spec
        return self.keys * kv_heads * (dim + value_dim)

    @property
    def heads(self) -> int:
        return max(mixer.num_heads for mixer in self.specs.values())

    @property
    def per_head(self) -> bool:
        """Whether positions are read by head: where they are, it matters where a key was."""
        own = any(
            not (mixer.position is None or isinstance(mixer.position, RopeConfig)) for mixer in self.specs.values()
        )
        return self.group is not None and self.group.eviction_policy is not None and (self.unrotated or own)

    @property
    def masks(self) -> int:
        """Masks of a pair of query and key."""
        chooses = self.group is not None and self.group.sparse_read_policy is not None
        return self.spec[0] if self.per_head or chooses else 1

    @property
    def renumbered(self) -> bool:
        return self.group is not None and self.group.spec.renumber_positions

    @property
    def watched(self) -> bool:
        """Whether every query's weights are made: the attention that a token gets decides what stays."""
        return (
            self.group is not None
            and self.group.eviction_policy is not None
            and self.group.eviction_policy.observed_queries > 0
        )

    @property
    def weighted(self) -> bool:
        return self.group is not None and self.group.lower_level is not None and self.group.lower_level.ratio > 1


def scratch_bytes(reads: Sequence[AttentionRead], computed: str) -> int:
    """Of a step that reads so, whose layers follow one another; ``computed``: the dtype of what is computed."""
    size = config.DTYPE_BYTES[computed]
    kept = sum(_retained_bytes(part, size) for read in reads for part in (read, *read.lower_levels))
    read = kept + max((_scratch(read, computed) for read in reads), default=0)
    return max(read, *(_move_bytes(read) for read in reads)) if reads else read


def _retained_bytes(read: AttentionRead, size: int) -> int:
    """Masks, positions and biases that live as long as the step."""
    pairs, most = read.tokens * read.slots, min(read.tokens, read.rows) * MASK_BUDGET
    kept = min(read.masks * pairs, most) + 8 * read.rows * max(read.slots, read.whole)
    for mixer in read.specs.values():
        if isinstance(mixer.position, (AlibiConfig, T5BiasConfig)):
            width = size if isinstance(mixer.position, T5BiasConfig) else 4
            kept += width * min(mixer.num_heads * pairs, most)
    return kept


def _scratch(read: AttentionRead, computed: str) -> int:
    parts = (read, *read.lower_levels)
    wide = max(4, config.DTYPE_BYTES[computed])
    scratch = sum(_copy_bytes(part, computed) + _pending_bytes(part, computed) for part in parts)
    scratch += max(_attention_bytes(part, computed) for part in parts)
    if len(parts) > 1 or read.renumbered:
        scratch += read.tokens * read.heads * (5 * read.spec[2] + 4) * wide
    if read.renumbered:  # queries turned back
        scratch += read.tokens * read.heads * read.spec[1] * (3 * wide + 16)
    return scratch + _block_selection_bytes(read)


def _pending_bytes(read: AttentionRead, computed: str) -> int:
    return MERGE_TILES * read.values * config.DTYPE_BYTES[computed] if read.whole else 0


def _copy_bytes(read: AttentionRead, computed: str) -> int:
    """Keys and values as attention takes them."""
    if read.group is None:
        return 0
    kv_heads, dim, value_dim = read.spec
    size = config.DTYPE_BYTES[computed]
    both = read.group.key_format, read.group.value_format
    copied = read.keys * kv_heads * slot_bytes(both, dim, value_dim, read.group.block_size) if read.gathered else 0
    copied += sum(
        _decode_bytes(read, name, width, computed) for name, width in zip(both, (dim, value_dim), strict=True)
    )
    if read.unrotated or read.renumbered:
        angles = 16 * (kv_heads if read.per_head else 1)
        copied += read.keys * dim * (3 * kv_heads * size + angles)
    return copied + (12 * read.keys * kv_heads if read.per_head else 0)


def slot_bytes(formats: tuple[str, str], dim: int, value_dim: int, block_size: int) -> int:
    """Bytes of a slot of one head, with its share of what belongs to a block."""
    keys, values = formats
    arrays = (*get_format(keys).arrays(dim), *get_format(values).arrays(value_dim))
    shared = sum(array.nbytes for array in arrays if array.granularity == "block")
    return sum(array.nbytes for array in arrays if array.granularity == "slot") + -(-shared // block_size)


def _decode_bytes(read: AttentionRead, name: str, dim: int, computed: str) -> int:
    """What comes of keys or values of ``dim`` numbers while they are decoded, and while new ones are encoded."""
    if name == computed:
        return 0
    count, size = read.keys * read.spec[0] * dim, config.DTYPE_BYTES[computed]
    if get_format(name).kind == "plain":
        return count * size
    return count * (size + 3 + (4 if size == 2 else 0)) + ENCODE_BYTES * read.tokens * read.spec[0] * dim


def _attention_bytes(read: AttentionRead, computed: str) -> int:
    if read.tiled:
        return _tiled_bytes(read, computed)
    size, row = config.DTYPE_BYTES[computed], read.rows * read.slots
    masks = read.masks * min(read.tokens * read.slots, max(MASK_BUDGET, row))
    made = 12 * masks * (2 if read.renumbered else 1)
    forced = read.weighted or read.watched
    unfused = [mixer for mixer in read.specs.values() if forced or _makes_scores(mixer, read.spec, computed)]
    if unfused:
        heads = max(mixer.num_heads for mixer in unfused)
        scores = min(heads * read.tokens * read.slots, max(SCORE_BUDGET, heads * row))
        made += (6 if read.watched else 4) * max(4, size) * scores
        made += 8 * read.tokens * heads * read.spec[1] if read.watched else 0  # queries, widened
        made += read.values * 4 if size == 2 else 0
        if any(isinstance(mixer.position, T5BiasConfig) for mixer in unfused):
            made += 48 * scores // (1 if read.per_head else min(mixer.num_heads for mixer in unfused))
        elif read.per_head:
            made += 24 * scores
    return made + (16 * row * read.spec[0] if read.watched else 0)


def _tiled_bytes(read: AttentionRead, computed: str) -> int:
    """Q scores of a block of queries of all rows, 5 times: products, their stack, scaled (and once more where they are
    capped), hidden; weights.  Biases 4 times, and masks, of all that lies between the first position and the last.
    Tiles of keys and values, the answer and its sums.

    A block has queries of whole groups, as few as :data:`TILE` and as many as SCORE_BUDGET lets a tile hold.
    """
    kv_heads, dim, value_dim = read.spec
    wide, heads = max(4, config.DTYPE_BYTES[computed]), read.heads
    least, most = (-(-rows // (heads // kv_heads)) for rows in (TILE, TILES[-1]))
    fitting = SCORE_BUDGET // (heads * read.slots)
    queries = max(read.rows * least, min(read.rows * most, read.tokens + read.rows * least, fitting))
    reach = None if read.group is None else read.group.spec
    slots = spread = KEYS * (
        -(-read.slots // KEYS) + (reach is not None and reach.window is not None)
    )  # tiles at edges
    if reach is not None and reach.num_sinks:
        spread = max(slots, KEYS * (-(-read.tiled // KEYS) + 1))
    capped = any(mixer.logit_softcap is not None for mixer in read.specs.values())
    made = (5 + capped) * wide * heads * queries * slots + 16 * queries * spread + 32 * read.rows * spread
    if any(isinstance(mixer.position, (AlibiConfig, T5BiasConfig)) for mixer in read.specs.values()):
        made += (4 * wide * heads + 48) * queries * spread
    tile = read.rows * kv_heads * KEYS * 3 * (max(dim, value_dim) + NARROW) * wide
    answers = heads * (queries * (3 * dim + 5 * (value_dim + NARROW)) + 2 * read.tokens * value_dim) * wide
    return made + tile + answers + 2 * read.keys * kv_heads * value_dim * config.DTYPE_BYTES[computed]


def _makes_scores(mixer: AttentionConfig, spec: tuple[int, int, int], computed: str) -> bool:
    """Whether attention holds a matrix of scores: not in the fused kernel without biases."""
    plain = (mixer.position is None or isinstance(mixer.position, RopeConfig)) and spec[1] == spec[2]
    return not plain or mixer.logit_softcap is not None or mixer.sink_logits or computed == "float16"


def _block_selection_bytes(read: AttentionRead) -> int:
    """Bounds of blocks, and which of them each query chooses."""
    if read.group is None or read.group.sparse_read_policy is None:
        return 0
    kv_heads, dim, _ = read.spec
    wide = 8 if read.group.key_format == "float64" else 4
    blocks = read.slots // read.group.block_size
    bounds = 4 * read.rows * blocks * kv_heads * dim * wide
    queries = read.tokens * (3 * read.heads * dim + 4 * kv_heads * dim) * wide
    return bounds + queries + read.tokens * blocks * (12 * read.heads + 64 * kv_heads)


def _move_bytes(read: AttentionRead) -> int:
    """What is held while rows are cut, or descend: of one layer at a time."""
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
    one = read.slots * kv_heads * (8 * 3 * max(dim, value_dim) + SCORE_BYTES)
    return read.rows * min(group.eviction_policy.budget, read.slots) * slot + one


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
        activations = _decoding(config, config.decoder, cache, tokens, more, config_lib.DTYPE_BYTES[computed])
    if config.encoder is not None:
        tokens = max_encoder_tokens(config, cache, budget)
        reads = [_how(read, hidden, span) for read in _encoder_reads(config, config.encoder, cache, tokens)]
        scratch = max(scratch, scratch_bytes(reads, computed))
        more = _tiled(config, config.encoder, tokens, encoder_hidden_size(config)) if deterministic else 0
        activations = max(
            activations,
            _encoding(config, config.encoder, cache, tokens, more, config_lib.DTYPE_BYTES[computed]),
        )
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
    shares = offload.token_offload.plan_offload(groups, cache.offload_ram).shares
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
