"""Upper bound of the scratch memory of attention in a step, from shapes alone; letters as in ``activations.py``.

Scratch: temporary memory besides activations, of one layer at a time. Per *part* of what a sequence reads
(``ops/merge.py``: full tokens, quantized tokens, summaries), all at once:

    gather   rows S K (D + Dv) e      keys and values of the blocks of all sequences; none for a single contiguous
                                      sequence, read in place, or an encoder, which reads its own output; of
                                      latent attention S K D e, and S K Dv c for the values in the keys
    widen    rows S K D c             if the keys' format is not the computed dtype; for values, Dv
             rows S K D 3             shifted bits of an integer format
             rows S K D 4             and float32 on the way to half precision
             rows S K (D + Dv) 4      half precision with a kernel that computes in float32
    turn     rows S K D (3 c + 16)    keys stored unrotated, or renumbered sinks, and their angles
    encode   13 T K D                 new keys in float32, if their format is an integer one; for values, Dv

where ``rows S`` is at most MAX_READ_SLOTS (``model_input.py``), or S, because larger sub-batches are split; and of
the part that is attended to, one after the other:

    mask     12 M                     M = min(T S, max(MASK_BUDGET, rows S)) pairs at a time; times K if heads retain
                                      or choose different tokens; twice for renumbered sinks
    scores   4 * 4 Q (8 in float64)   Q = min(H T S, max(SCORE_BUDGET, H rows S)): only with softcap, sink logits,
                                      biases, values of another width, in float16 and for summaries; otherwise the
                                      fused kernel stores none
             6 * 4 Q                  if a policy observes attention
             48 Q / H                 distances and buckets of a T5 bias (48 Q if heads retain different tokens)
    merge    T H (5 Dv + 4) 4         outputs and denominators of several parts
    choose   T P (12 H + 64 K)        bounds of P blocks, sorted
    delta    ``_delta_bytes``         whole blocks of the gated delta rule, and their states

and until the end of the step, for each part:

             T S + 8 rows S           booleans (small masks only), positions
             c H T S                  for each small table of biases or slopes (4 bytes for slopes)

For an offloaded level (``token_offload.py``) S is that of one tile, and up to three tiles exist at once: two that are
merged, and the next being decoded. Only positions are stored for all of it.

Batch-invariant attention (``ops/batch_invariant.py``) computes scores for everything it reads, in tiles of
keys and queries (``_tiled_bytes``), if the smallest tile of products has ``TILE`` rows, as
``kvad.ops.batch_invariant`` measured on every machine so far. If it measures a larger tile, an engine uses more.

Between two steps, when none of that exists, a policy moves tokens: ``_move_bytes``. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvad import config as cfg
from kvad.cache.groups import CacheGroup
from kvad.cache.quantization import CacheFormat
from kvad.config import DTYPE_BYTES

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

    specs: Mapping[str, cfg.TokenMixer]  # by the name under which biases are shared
    group: CacheGroup  # of an encoder, which reads the keys of the step: one without blocks, in the compute dtype
    tokens: int  # queries
    rows: int  # sequences
    slots: int  # keys of each sequence
    keys: int  # keys of a sub-batch
    batch_slots: int  # slots of a sub-batch, padded to its longest sequence
    gathered: bool = False  # Blocks are copied out of the group.
    unrotated: bool = False  # RoPE is applied at read time.
    lower_levels: tuple[AttentionRead, ...] = ()
    whole: int = 0  # slots of a sequence in all tiles, if read by tiles
    hidden: int = 0  # hidden size of the summarizer; 0 for means
    tiled: int = 0  # positions of a sequence, if batch-invariant

    @property
    def dims(self) -> tuple[int, int, int]:
        """K, D and Dv."""
        return self.group.spec.num_kv_heads, self.group.spec.head_dim, self.group.spec.value_dim

    @property
    def values(self) -> int:
        """Numbers of all keys and values."""
        kv_heads, dim, value_dim = self.dims
        return self.keys * kv_heads * (dim + value_dim)

    @property
    def heads(self) -> int:
        """Maximum number of query heads."""
        return max(attention.num_heads for attention in self.specs.values())

    @property
    def per_head(self) -> bool:
        """True if heads have different positions and these affect logits."""
        has_bias = any(not _is_rotary_or_none(attention) for attention in self.specs.values())
        return self.group.eviction_policy is not None and (self.unrotated or has_bias)

    @property
    def masks(self) -> int:
        """Masks per pair of query and key."""
        return self.dims[0] if self.per_head or self.group.sparse_read_policy is not None else 1

    @property
    def renumbered(self) -> bool:
        """True if sink positions are renumbered."""
        return self.group.spec.renumber_positions

    @property
    def watched(self) -> bool:
        """True if all attention weights are computed because eviction depends on them."""
        return self.group.eviction_policy is not None and self.group.eviction_policy.observed_queries > 0


def scratch_bytes(reads: Sequence[AttentionRead], computed: str) -> int:
    """Return the scratch bytes of consecutive layers; ``computed`` is the compute dtype."""
    size = DTYPE_BYTES[computed]
    retained = sum(_retained_bytes(part, size) for read in reads for part in (read, *read.lower_levels))
    read = retained + max((_scratch(read, computed) for read in reads), default=0)
    return max(read, *(_move_bytes(read) for read in reads)) if reads else read


def _retained_bytes(read: AttentionRead, size: int) -> int:
    """Return the bytes of masks, positions and biases that exist until the end of the step."""
    pairs, max_pairs = read.tokens * read.slots, min(read.tokens, read.rows) * MASK_BUDGET
    retained = min(read.masks * pairs, max_pairs) + 8 * read.rows * max(read.slots, read.whole)
    for attention in read.specs.values():
        if isinstance(attention.position, cfg.DisentangledConfig):  # products with the table, terms, sums and indices
            products = 4 * attention.position.span * read.tokens
            retained += size * attention.num_heads * (5 * pairs + products) + 64 * pairs
        if isinstance(attention.position, (cfg.AlibiConfig, cfg.T5BiasConfig)):
            width = size if isinstance(attention.position, cfg.T5BiasConfig) else 4
            retained += width * min(attention.num_heads * pairs, max_pairs)
    return retained


def _scratch(read: AttentionRead, computed: str) -> int:
    """Return the temporary bytes of one layer."""
    parts = (read, *read.lower_levels)
    wide = max(4, DTYPE_BYTES[computed])
    scratch = sum(_copy_bytes(part, computed) for part in parts)
    scratch += sum(MERGE_TILES * part.values * DTYPE_BYTES[computed] for part in parts if part.whole)
    scratch += max(_attention_bytes(part, computed) for part in parts)
    if len(parts) > 1 or read.renumbered:
        scratch += read.tokens * read.heads * (5 * read.dims[2] + 4) * wide
    if read.renumbered:  # queries rotated back
        scratch += read.tokens * read.heads * read.dims[1] * (3 * wide + 16)
    return scratch + _block_selection_bytes(read) + _delta_bytes(read, computed)


def _delta_bytes(read: AttentionRead, computed: str) -> int:
    """Return the bytes of the gated delta rule, whole blocks of which are computed; see ``GatedDeltaConfig``."""
    wide, size, total = max(4, DTYPE_BYTES[computed]), read.group.block_size, 0
    for mixer in read.specs.values():
        if isinstance(mixer, cfg.GatedDeltaConfig):
            heads, (_, inputs, others) = mixer.num_value_heads, read.dims
            aligned = read.tokens + 2 * read.rows * size
            blocks = read.rows * size * heads * (4 * mixer.key_dim + 8 * mixer.value_dim + 8 * size)
            numbers = aligned * (4 * others + 4 * inputs) + blocks + 8 * read.rows * read.group.spec.snapshot_size
            total = max(total, wide * numbers)
    return total


def _copy_bytes(read: AttentionRead, computed: str) -> int:
    """Return the bytes of gathered, decoded and rotated keys and values."""
    kv_heads, dim, value_dim = read.dims
    size = DTYPE_BYTES[computed]
    formats = read.group.tensor_formats
    copied = read.keys * kv_heads * slot_bytes(formats, read.group.block_size) if read.gathered else 0
    copied += sum(_decode_bytes(read, fmt, width, computed) for fmt, width in formats)
    if read.group.spec.values_in_keys:  # made contiguous for the product with the weights
        copied += read.keys * kv_heads * value_dim * size
    if read.unrotated or read.renumbered:
        angles = 16 * (kv_heads if read.per_head else 1)
        copied += read.keys * dim * (3 * kv_heads * size + angles)
    return copied + (12 * read.keys * kv_heads if read.per_head else 0)


def slot_bytes(formats: Iterable[tuple[CacheFormat, int]], block_size: int) -> int:
    """Return the bytes of a slot of one head, with its share of per-block scales; formats have their dims."""
    arrays = [array for fmt, dim in formats for array in fmt.arrays(dim)]
    shared = sum(array.nbytes for array in arrays if array.granularity == "block")
    return sum(array.nbytes for array in arrays if array.granularity == "slot") + -(-shared // block_size)


def _decode_bytes(read: AttentionRead, fmt: CacheFormat, dim: int, computed: str) -> int:
    """Return the bytes of decoding keys or values of ``dim`` numbers and encoding new ones."""
    if fmt.name == computed:
        return 0
    count, size = read.keys * read.dims[0] * dim, DTYPE_BYTES[computed]
    if fmt.kind == "plain":
        return count * size
    return count * (size + 3 + (4 if size == 2 else 0)) + ENCODE_BYTES * read.tokens * read.dims[0] * dim


def _attention_bytes(read: AttentionRead, computed: str) -> int:
    """Return the bytes of masks, scores and merged outputs."""
    if read.tiled:
        return _tiled_bytes(read, computed)
    size, row = DTYPE_BYTES[computed], read.batch_slots
    masks = read.masks * min(read.tokens * read.slots, max(MASK_BUDGET, row))
    total = 12 * masks * (2 if read.renumbered else 1)
    forced = read.group.has_summaries or read.watched
    unfused = [each for each in read.specs.values() if forced or _makes_scores(each, read.dims, computed)]
    if unfused:
        heads = max(attention.num_heads for attention in unfused)
        scores = min(heads * read.tokens * read.slots, max(SCORE_BUDGET, heads * row))
        total += (6 if read.watched else 4) * max(4, size) * scores
        total += 8 * read.tokens * heads * read.dims[1] if read.watched else 0  # queries, widened
        total += read.values * 4 if size == 2 else 0
        if any(isinstance(attention.position, cfg.T5BiasConfig) for attention in unfused):
            total += 48 * scores // (1 if read.per_head else min(attention.num_heads for attention in unfused))
        elif read.per_head:
            total += 24 * scores
    return total + (16 * row * read.dims[0] if read.watched else 0)


def _tiled_bytes(read: AttentionRead, computed: str) -> int:
    """Return the bytes of batch-invariant attention.

    Q scores of a block of queries of all sequences, 5 times: products, their stack, scaled (and once more if capped),
    masked; weights. Biases 4 times, and masks, of everything between the first position and the last. Tiles of keys and
    values, the output and its sums.

    A block has queries of whole groups, at least ``TILE`` and at most as many as SCORE_BUDGET allows for a tile.
    """
    kv_heads, dim, value_dim = read.dims
    wide, heads = max(4, DTYPE_BYTES[computed]), read.heads
    min_queries, max_queries = (-(-rows // (heads // kv_heads)) for rows in (TILE, TILES[-1]))
    fitting = SCORE_BUDGET // (heads * read.slots)
    queries = max(read.rows * min_queries, min(read.rows * max_queries, read.tokens + read.rows * min_queries, fitting))
    has_window = read.group.spec.window is not None  # Then the first tile is partial.
    slots = spread = KEYS * (-(-read.slots // KEYS) + has_window)
    if read.group.spec.num_sinks:
        spread = max(slots, KEYS * (-(-read.tiled // KEYS) + 1))
    capped = any(attention.logit_softcap is not None for attention in read.specs.values())
    total = (5 + capped) * wide * heads * queries * slots + 16 * queries * spread + 32 * read.rows * spread
    if any(isinstance(attention.position, (cfg.AlibiConfig, cfg.T5BiasConfig)) for attention in read.specs.values()):
        total += (4 * wide * heads + 48) * queries * spread
    tile = read.rows * kv_heads * KEYS * 3 * (max(dim, value_dim) + NARROW) * wide
    outputs = heads * (queries * (3 * dim + 5 * (value_dim + NARROW)) + 2 * read.tokens * value_dim) * wide
    return total + tile + outputs + 2 * read.keys * kv_heads * value_dim * DTYPE_BYTES[computed]


def _is_rotary_or_none(attention: cfg.TokenMixer) -> bool:
    return attention.position is None or isinstance(attention.position, cfg.RopeConfig)


def _makes_scores(attention: cfg.TokenMixer, dims: tuple[int, int, int], computed: str) -> bool:
    """True if attention stores a score matrix, unlike the fused kernel without biases."""
    plain = _is_rotary_or_none(attention) and dims[1] == dims[2]
    return not plain or attention.logit_softcap is not None or attention.sink_logits or computed == "float16"


def _block_selection_bytes(read: AttentionRead) -> int:
    """Return the bytes of block bounds and of the blocks that each query selects."""
    if read.group.sparse_read_policy is None:
        return 0
    kv_heads, dim, _ = read.dims
    wide = 8 if read.group.key_format == "float64" else 4
    blocks = read.slots // read.group.block_size
    bounds = 4 * read.rows * blocks * kv_heads * dim * wide
    queries = read.tokens * (3 * read.heads * dim + 4 * kv_heads * dim) * wide
    return bounds + queries + read.tokens * blocks * (12 * read.heads + 64 * kv_heads)


def _move_bytes(read: AttentionRead) -> int:
    """Return the bytes of evicting or demoting tokens, of one layer at a time."""
    group, (kv_heads, dim, value_dim) = read.group, read.dims
    if group.demotion_policy is not None:
        moving = read.rows * (group.demotion_policy.interval + group.block_size)
        summarized = SUMMARIZER_COPIES * (dim + value_dim + 2 + read.hidden) if read.hidden else 0
        return moving * kv_heads * ((dim + value_dim) * DEMOTE_BYTES + summarized)
    if group.eviction_policy is None:
        return 0
    slot = kv_heads * (slot_bytes(group.tensor_formats, group.block_size) + 12)
    scoring = read.slots * kv_heads * (8 * 3 * max(dim, value_dim) + SCORE_BYTES)
    return read.rows * min(group.eviction_policy.budget, read.slots) * slot + scoring
