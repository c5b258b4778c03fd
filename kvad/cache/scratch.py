"""Scratch: what a step makes beside its activations, for one layer at a time.  An upper bound, from shapes; no torch.

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
queries: ``_in_tiles``; that is where the smallest tile of products has :data:`TILE` rows, as :mod:`kvad.ops.invariant`
found it on every machine so far.  Where it finds a larger one, an engine makes more.

Between two steps, when nothing of that is there, a policy moves tokens: ``_moved``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvad.cache.formats import get_format
from kvad.cache.sizing import DTYPE_BYTES, CacheGroup
from kvad.config import AlibiConfig, AttentionConfig, RopeConfig, T5BiasConfig

__all__ = [
    "ENCODE_BYTES",
    "MASK_BUDGET",
    "SCORE_BUDGET",
    "TILE",
    "TILES",
    "AttentionRead",
    "scratch_bytes",
    "slot_bytes",
]

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
    size = DTYPE_BYTES[computed]
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
    wide = max(4, DTYPE_BYTES[computed])
    scratch = sum(_copy_bytes(part, computed) + _pending_bytes(part, computed) for part in parts)
    scratch += max(_attention_bytes(part, computed) for part in parts)
    if len(parts) > 1 or read.renumbered:
        scratch += read.tokens * read.heads * (5 * read.spec[2] + 4) * wide
    if read.renumbered:  # queries turned back
        scratch += read.tokens * read.heads * read.spec[1] * (3 * wide + 16)
    return scratch + _block_selection_bytes(read)


def _pending_bytes(read: AttentionRead, computed: str) -> int:
    return MERGE_TILES * read.values * DTYPE_BYTES[computed] if read.whole else 0


def _copy_bytes(read: AttentionRead, computed: str) -> int:
    """Keys and values as attention takes them."""
    if read.group is None:
        return 0
    kv_heads, dim, value_dim = read.spec
    size = DTYPE_BYTES[computed]
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
    count, size = read.keys * read.spec[0] * dim, DTYPE_BYTES[computed]
    if get_format(name).kind == "plain":
        return count * size
    return count * (size + 3 + (4 if size == 2 else 0)) + ENCODE_BYTES * read.tokens * read.spec[0] * dim


def _attention_bytes(read: AttentionRead, computed: str) -> int:
    if read.tiled:
        return _tiled_bytes(read, computed)
    size, row = DTYPE_BYTES[computed], read.rows * read.slots
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
    wide, heads = max(4, DTYPE_BYTES[computed]), read.heads
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
    return made + tile + answers + 2 * read.keys * kv_heads * value_dim * DTYPE_BYTES[computed]


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
