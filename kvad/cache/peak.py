"""An upper bound of what comes and goes within a step, from shapes alone: scratch and activations.  No torch.

Two kinds of step are bounded, and the larger number of each kind counts:

* a decoder's: ``T = min(budget, rows * chunk)`` new tokens, every row at its longest;
* an encoder's: whole sources, as many as the budget allows and at least one: ``T = min(max(budget, S), rows * S)`` of
  sources of S tokens.  An encoder has no other: what it computes is not kept.

They are seen in a process's peak, not in what it holds between two steps.  A test holds the bound against what torch
really makes.  Letters as in ``step.py``; ``c`` is the bytes of a computed value, ``e`` of a cached one with its
share of scales, F an MLP's hidden width; rows, T and S of the step, or of the source that is attended to.

scratch, for one layer at a time (``cache/layout.py``, ``ops/attend.py``):

    gather   rows S K (D + Dv) e      keys and values of the blocks of all rows, side by side; nothing where a single
                                      contiguous row is read where it lies, or in an encoder, which reads what it made
    widen    rows S K D c             where the format of the keys is not the computed dtype; of the values, Dv
             rows S K D 3             bits moved into place, where it is a packed one
             rows S K D 4             and float32 on its way to half precision
             rows S K (D + Dv) 4      where half precision meets a kernel that computes in float32
    encode   13 T K D                 new keys in float32, where their format is a packed one; of the values, Dv
    mask     12 M                     M = min(T S, max(MASK_BUDGET, rows S)) pairs made at a time
    scores   4 * 4 Q (8 in float64)   Q = min(H T S, max(SCORE_BUDGET, H rows S)): only with softcap, sink logits,
                                      biases or values of another width, or in float16; else the fused kernel makes none
             48 Q / H                 distances and buckets of a T5 bias

and kept until the step ends, for each group of layers that share masks:

             T S + 8 rows S           booleans (small masks only), positions
             c H T S                  for each table of biases or slopes (4 bytes of these), where it is small

activations, the largest of these moments, W the width of what a head's matrix reads:

    attention   c T (4 E + 4 (H D + K D) + 2 K Dv + 3 H Dv)   stream, norm; q, k while they turn, v; outputs
    MLP         c T (5 E + 3 F), gated 4 F                    stream before and after attention, norm; up, gate, product
    experts     c T (8 E + 6 F + 3 count)                     all tokens may choose one expert
    sources     c T (E + 2 K (D + Dv)) + e T K (D + Dv)       what cross-attention will read, while it is written
    logits      c T E + rows V (c + 3 * 4)                    one per row, and the sampler's float32 copies
                c T (E + 3 W + n V) + S V (c + 3)             of an encoder: of every token (n = 1, and 1 if they are
                                                              scaled, 2 if capped), and a row of them looked over
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvad.cache.formats import find_format
from kvad.cache.sizing import DTYPE_BYTES, CacheConfig, Group
from kvad.config import (
    Alibi,
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

MASK_BUDGET = 1 << 22  # ops/attend.py's, which imports torch; a test holds them equal
SCORE_BUDGET = 1 << 24
ENCODED = 13  # bytes of a number while it is encoded: three float32 and what is stored


class Peak(NamedTuple):
    """Bytes, at most."""

    scratch: int
    activations: int


def peak(config: ModelConfig, cache: CacheConfig, groups: Sequence[Group], computed: str, budget: int) -> Peak:
    """Of the largest step; ``computed``: the dtype that the model computes in."""
    scratch = activations = 0
    if config.decoder is not None:
        tokens = decoder_tokens(cache, budget)
        scratch = _of(list(_decoder_reads(config.decoder, cache, groups, tokens)), cache, computed)
        activations = _decoding(config, config.decoder, cache, tokens, DTYPE_BYTES[computed])
    if config.encoder is not None:
        tokens = encoder_tokens(config, cache, budget)
        reads = list(_encoder_reads(config, config.encoder, cache, tokens))
        scratch = max(scratch, _of(reads, cache, computed))
        activations = max(activations, _encoding(config, config.encoder, cache, tokens, DTYPE_BYTES[computed]))
    return Peak(scratch, activations)


def decoder_tokens(cache: CacheConfig, budget: int) -> int:
    """New tokens of a decoder's step, at most."""
    return min(budget, cache.rows * min(cache.chunk, cache.capacity))


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


@dataclass(frozen=True)
class _Read:
    """Layers that share masks, in one step: ``tokens`` queries of ``rows`` rows, each of ``slots`` keys.

    ``mixers`` by what their biases are shared under; ``spec``: (K, D, Dv) of the keys and values; ``keys``: how many of
    them; ``gathered``: they lie in a pool, and are copied out of it.
    """

    mixers: Mapping[str, Attention]
    spec: tuple[int, int, int]
    tokens: int
    rows: int
    slots: int
    keys: int
    gathered: bool = False
    pooled: bool = False

    @property
    def values(self) -> int:
        kv_heads, dim, value_dim = self.spec
        return self.keys * kv_heads * (dim + value_dim)


def _decoder_reads(stack: Stack, cache: CacheConfig, groups: Sequence[Group], tokens: int) -> Iterator[_Read]:
    for group in groups:
        mixers = dict(_named(stack, index) for index in group.layers)
        slots = group.blocks_per_row * group.block_size
        spec = (group.mixer.kv_heads, group.mixer.head_dim, group.mixer.value_dim)
        in_place = cache.layout == "contiguous" and cache.rows == 1
        yield _Read(mixers, spec, tokens, cache.rows, slots, cache.rows * slots, not in_place, pooled=True)


def _encoder_reads(config: ModelConfig, stack: Stack, cache: CacheConfig, tokens: int) -> Iterator[_Read]:
    specs = encoder_mixers(config)
    reaches: dict[tuple[bool, int | None], list[int]] = {}
    for index, spec in enumerate(specs):
        reaches.setdefault((spec.causal, spec.window), []).append(index)
    for layers in reaches.values():
        widest = max((specs[index] for index in layers), key=lambda s: s.kv_heads * (s.head_dim + s.value_dim))
        mixers = dict(_named(stack, index) for index in layers)
        shape = (widest.kv_heads, widest.head_dim, widest.value_dim)
        yield _Read(mixers, shape, tokens, cache.rows, source_length(config, cache), tokens)


def _named(stack: Stack, index: int) -> tuple[str, Attention]:
    """What a layer's biases are shared under, and its attention; from ``stack.layers`` on: its cross-attention."""
    if index >= stack.layers:
        cross = stack.layer(index - stack.layers).cross
        assert cross is not None, "groups count cross-attention after all layers"
        return f"cross {stack.kind_of(index - stack.layers)}", cross
    mixer = stack.layer(index).mixer
    alone = isinstance(mixer.position, T5Bias) and not mixer.position.shared
    return (f"{index}" if alone else stack.kind_of(index)), mixer


def _of(reads: Sequence[_Read], cache: CacheConfig, computed: str) -> int:
    kept = sum(_kept(read, DTYPE_BYTES[computed]) for read in reads)
    return kept + max((_scratch(read, cache, computed) for read in reads), default=0)


def _kept(read: _Read, size: int) -> int:
    """Masks, positions and biases that live as long as the step."""
    pairs, most = read.tokens * read.slots, min(read.tokens, read.rows) * MASK_BUDGET
    kept = min(pairs, most) + 8 * read.rows * read.slots
    for mixer in read.mixers.values():
        if isinstance(mixer.position, (Alibi, T5Bias)):
            width = size if isinstance(mixer.position, T5Bias) else 4
            kept += width * min(mixer.heads * pairs, most)
    return kept


def _scratch(read: _Read, cache: CacheConfig, computed: str) -> int:
    size = DTYPE_BYTES[computed]
    scratch = read.keys * read.spec[0] * _stored(cache, *read.spec[1:]) if read.gathered else 0
    if read.pooled:
        sides = zip(cache.formats, read.spec[1:], strict=True)
        scratch += sum(_decoded(read, name, dim, computed) for name, dim in sides)
    scratch += 12 * min(read.tokens * read.slots, max(MASK_BUDGET, read.rows * read.slots))
    unfused = [mixer for mixer in read.mixers.values() if _makes_scores(mixer, read.spec, computed)]
    if unfused:
        heads = max(mixer.heads for mixer in unfused)
        made = min(heads * read.tokens * read.slots, max(SCORE_BUDGET, heads * read.rows * read.slots))
        scratch += 4 * max(4, size) * made
        scratch += read.values * 4 if size == 2 else 0
        if any(isinstance(mixer.position, T5Bias) for mixer in unfused):
            scratch += 48 * made // min(mixer.heads for mixer in unfused)
    return scratch


def _stored(cache: CacheConfig, dim: int, value_dim: int) -> int:
    """Bytes of a slot of one head, with its share of what belongs to a block."""
    keys, values = cache.formats
    arrays = (*find_format(keys).arrays(dim), *find_format(values).arrays(value_dim))
    shared = sum(array.nbytes for array in arrays if array.grain == "block")
    return sum(array.nbytes for array in arrays if array.grain == "slot") + -(-shared // cache.block_size)


def _decoded(read: _Read, name: str, dim: int, computed: str) -> int:
    """What comes of keys or values of ``dim`` numbers while they are decoded, and while new ones are encoded."""
    if name == computed:
        return 0
    count, size = read.keys * read.spec[0] * dim, DTYPE_BYTES[computed]
    if find_format(name).kind == "plain":
        return count * size
    return count * (size + 3 + (4 if size == 2 else 0)) + ENCODED * read.tokens * read.spec[0] * dim


def _makes_scores(mixer: Attention, spec: tuple[int, int, int], computed: str) -> bool:
    """Whether attention holds a matrix of scores: not in the fused kernel without biases."""
    plain = (mixer.position is None or isinstance(mixer.position, Rope)) and spec[1] == spec[2]
    return not plain or mixer.softcap is not None or mixer.sinks or computed == "float16"


# ---------------------------------------------------------------- activations


def _decoding(config: ModelConfig, stack: Stack, cache: CacheConfig, tokens: int, size: int) -> int:
    moments = list(_moments(config, stack, config.width))
    logits = tokens * config.width * size + cache.rows * config.vocab * (size + 3 * 4)
    return max(size * tokens * max(moments), logits)


def _encoding(config: ModelConfig, stack: Stack, cache: CacheConfig, tokens: int, size: int) -> int:
    width = source_width(config)
    most = size * tokens * max(_moments(config, stack, width))
    if config.decoder is None:
        return max(most, _answers(config, cache, tokens, size))
    for layer in config.decoder.kinds.values():
        assert layer.cross is not None, "each layer of an encoder-decoder attends to the source"
        dim, kv_heads = head_dim(config, layer.cross), layer.cross.kv_heads or layer.cross.heads
        values = kv_heads * (dim + (layer.cross.value_dim or dim))
        stored = kv_heads * _stored(cache, dim, layer.cross.value_dim or dim)
        packed = any(find_format(name).kind != "plain" for name in cache.formats)
        most = max(most, tokens * (size * (width + 2 * values) + stored + packed * ENCODED * values))
    return most


def _answers(config: ModelConfig, cache: CacheConfig, tokens: int, size: int) -> int:
    """An encoder's head: of every token, unless it answers for rows alone."""
    head = config.head
    if config.per_row:
        return size * (tokens * config.width + cache.rows * (2 * config.width + 3 * head_width(config)))
    outputs = len(head.labels) if isinstance(head, Classes) else config.vocab
    copies = 1
    if isinstance(head, Head):
        copies += (head.scale != 1.0) + 2 * (head.softcap is not None)
    made = size * tokens * (config.width + 3 * head_width(config) + copies * outputs)
    return made + min(tokens, cache.capacity) * outputs * (size + 3)


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
