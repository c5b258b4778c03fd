"""Attention over block tables: one kernel for decoding and prefill, split over the sequence, and one that merges.

A program computes a tile of queries of one sequence and one key-value head: all query heads that share the head are
rows of the same tile, so keys and values are read once for them. Visibility is a function of positions, as in
``AttentionPattern.visible``. If there are fewer programs than the GPU can run, each reads a part of the slots with a
running maximum and sum (Milakov & Gimelshein 2018), and the parts are merged by their log-sum-exp (base 2).

    2 new tokens, 4 query heads per key-value head:  rows of a tile = (token 0, heads 0 1 2 3), (token 1, heads 0 1 2 3)
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvad.model_input import AlibiSlopes, AttentionParams, AttentionPattern
from kvad.ops.triton.support import PagedStore, is_interpreted, launch_options, starts_dependent

LOG2E = 1.4426950408889634
ALL, SOME, CHECKED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SCAN = tl.constexpr(1024)  # slots whose positions are compared at a time to find the visible ones
PROGRAMS_PER_PROCESSOR = 1
MAX_SPLITS, MIN_SPLIT = 64, 64  # parts of a sequence, and slots of a part
MIN_ROWS, MAX_ROWS = 16, 128  # of a tile of queries


class PagedSlots(NamedTuple):
    """Slots that the sequences of one sub-batch read, and the positions of their new tokens."""

    table: Tensor  # [R, P] int64 blocks
    num_slots: int  # of each sequence, from the start of its table
    positions: Tensor  # [blocks, block_size] int64
    queries: Tensor  # [R * L] int64


class _Arrays(NamedTuple):
    """Keys or values as a kernel's argument."""

    data: Any
    scale: Any
    block_stride: int
    head_stride: int
    scale_block_stride: int
    scale_head_stride: int


class _Queries(NamedTuple):
    data: Tensor
    token_stride: int
    head_stride: int
    positions: Tensor
    num_new: int  # tokens per sequence


class _Table(NamedTuple):
    blocks: Tensor
    width: int
    positions: Tensor
    num_slots: int
    num_splits: int
    split_slots: int


class _Scoring(NamedTuple):
    scale: float  # of the logits, in base 2 unless there is a softcap
    softcap: float
    slopes: Tensor | None  # [H], in base 2
    sinks: Tensor | None  # [H]
    window: int
    layer_window: int
    num_sinks: int


class _Sizes(NamedTuple):
    """Constants; each combination is a compiled kernel."""

    group: Any  # query heads per key-value head
    heads: Any
    dim: Any
    padded_dim: Any
    value_dim: Any
    padded_value_dim: Any
    block_size: Any
    rows: Any  # of a tile of queries
    slots: Any  # of a tile of keys
    single: Any  # one new token per sequence
    split: Any
    causal: Any
    windowed: Any
    window_step: Any
    has_layer_window: Any
    has_softcap: Any
    wide: Any  # multiply in float32: the interpreter has no bfloat16 products
    narrow: Any  # numbers of a layer have 32-bit indices
    scans: Any  # with one new token: first find the slots that it sees, in which nothing is compared then
    dependent: Any  # the kernel may begin before the one before it ends


@triton.jit
def _visible(query, key, scoring, sizes) -> Any:
    """Return the visibility of keys to queries by their positions, which broadcast."""
    ahead = query - key
    seen = key >= 0
    if sizes.causal:
        seen = seen & (ahead >= 0)
        if sizes.windowed:
            if sizes.window_step == 1:
                recent = ahead < scoring.window
            else:
                first = tl.maximum(query - scoring.window + 1, 0)
                first = (first + sizes.window_step - 1) // sizes.window_step * sizes.window_step
                recent = key >= first
            seen = seen & (recent | (key < scoring.num_sinks))
        if sizes.has_layer_window:
            seen = seen & (ahead < scoring.layer_window)
    elif sizes.windowed:
        seen = seen & (tl.abs(ahead) < scoring.window)
    return seen


@triton.jit
def _visible_range(table, row, low, high, queries, scoring, sizes) -> Any:
    """Return three slots: all queries see those from the first to the second, none sees the third or later ones."""
    least, largest = tl.min(queries), tl.max(queries)
    first, clean, last = high, high, low
    for start in range(low, high, SCAN):
        slot = start + tl.arange(0, SCAN)
        inside = slot < high
        block = tl.load(table.blocks + row * table.width + slot // sizes.block_size, mask=inside, other=0)
        key = tl.load(table.positions + block * sizes.block_size + slot % sizes.block_size, mask=inside, other=-1)
        seen = key >= 0
        if sizes.causal:
            seen = seen & (key <= largest)
            if sizes.windowed:
                seen = seen & ((key > least - scoring.window) | (key < scoring.num_sinks))
            if sizes.has_layer_window:
                seen = seen & (key > least - scoring.layer_window)
        first = tl.minimum(first, tl.min(tl.where(seen, slot, high)))
        last = tl.maximum(last, tl.max(tl.where(seen, slot + 1, low)))
        if sizes.causal:
            seen = seen & (key <= least)
        clean = tl.minimum(clean, tl.min(tl.where(seen, high, slot)))
    first = low + (first - low) // sizes.slots * sizes.slots
    if sizes.windowed or sizes.has_layer_window:
        clean = first
    return first, tl.maximum(first, first + (clean - first) // sizes.slots * sizes.slots), last


@triton.jit
def _last_slot(table, row, low, high, sizes) -> Any:
    """Return the slot behind the last block of a range that is not NULL_BLOCK, which pads tables."""
    last = low
    for start in range(low // sizes.block_size, (high + sizes.block_size - 1) // sizes.block_size, SCAN):
        entry = start + tl.arange(0, SCAN)
        block = tl.load(table.blocks + row * table.width + entry, mask=entry * sizes.block_size < high, other=0)
        last = tl.maximum(last, tl.max(tl.where(block == 0, low, (entry + 1) * sizes.block_size)))
    return tl.minimum(last, high)


@triton.jit
def _lines(arrays, block, offset, kv_head, dim) -> Any:
    """Return the offsets of slots in the numbers and in the scales."""
    numbers = block * arrays.block_stride + kv_head * arrays.head_stride + offset * dim
    return numbers, block * arrays.scale_block_stride + kv_head * arrays.scale_head_stride + offset


@triton.jit
def _from_int(x, like) -> Any:
    """Convert small integers: they are added to the bits of 1.5 * 2^23, which is exact, and faster than an I2F."""
    return ((x + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0).to(like.dtype)


@triton.jit
def _widen(x, like) -> Any:
    """Convert stored numbers to the dtype of ``like``."""
    if x.dtype == tl.int8:
        return _from_int(x.to(tl.int32), like)
    if x.dtype.is_fp8():
        return x.to(tl.float16).to(tl.float32).to(like.dtype)  # exact; straight to bfloat16 is slower
    return x.to(like.dtype)


@triton.jit
def _byte(word, index: tl.constexpr, like, stored: tl.constexpr) -> Any:
    """Convert a byte of 32-bit words; 0 is the lowest."""
    if stored == tl.int8:
        return _from_int(word << (24 - 8 * index) >> 24, like)
    return _widen((word >> (8 * index)).to(tl.int8).to(stored, bitcast=True), like)


@triton.jit
def _load_values(data, lines, like, sizes) -> Any:
    """Load values [slots, Dv] in the dtype of ``like``.

    Bytes are loaded as words and converted before they are brought into the order of the product: the compiler would
    load them one by one in that order.
    """
    stored: tl.constexpr = data.dtype.element_ty
    if stored.primitive_bitwidth == 8 and sizes.value_dim % 16 == 0:
        columns = tl.arange(0, sizes.padded_value_dim // 4)
        places = tl.multiple_of(lines // 4, [4])[:, None] + columns[None, :]
        words = tl.load(
            data.to(tl.pointer_type(tl.int32)) + places, mask=columns[None, :] < sizes.value_dim // 4, other=0
        )
        even = tl.join(_byte(words, 0, like, stored), _byte(words, 2, like, stored))
        odd = tl.join(_byte(words, 1, like, stored), _byte(words, 3, like, stored))
        return tl.reshape(tl.join(even, odd), [sizes.slots, sizes.padded_value_dim])
    columns = tl.arange(0, sizes.padded_value_dim)
    places = lines[:, None] + columns[None, :]
    return _widen(tl.load(data + places, mask=columns[None, :] < sizes.value_dim, other=0.0), like)


@triton.jit
def _attend_range(at, keys, values, table, scoring, sizes, state, mode: tl.constexpr) -> Any:  # noqa: C901
    """Attend to a range of slots; ``mode`` ALL: all are visible, SOME: they are compared, CHECKED: values too."""
    q, query, head, row, kv_head, low, high = at
    top, total, acc, poison = state
    dims = tl.arange(0, sizes.padded_dim)
    for start in range(low, high, sizes.slots):
        slot = start + tl.arange(0, sizes.slots)
        inside = slot < high
        block = tl.load(table.blocks + row * table.width + slot // sizes.block_size, mask=inside, other=0)
        offset = slot % sizes.block_size
        place = block
        if sizes.narrow:
            block = block.to(tl.int32)
        lines, scale_lines = _lines(keys, block, offset, kv_head, sizes.dim)
        k = tl.load(keys.data + lines[None, :] + dims[:, None], mask=dims[:, None] < sizes.dim, other=0.0)
        scores = tl.dot(q, _widen(k, q), input_precision="ieee") * scoring.scale
        if keys.scale is not None:
            scores *= tl.load(keys.scale + scale_lines)[None, :]
        if sizes.has_softcap:
            scores = scoring.softcap * (2 * tl.sigmoid(2 * scores / scoring.softcap) - 1) * 1.4426950408889634
        if mode != ALL or scoring.slopes is not None:
            key = tl.load(table.positions + place * sizes.block_size + offset, mask=inside, other=-1).to(tl.int32)
        if scoring.slopes is not None:
            slopes = tl.load(scoring.slopes + head)
            scores -= slopes[:, None] * tl.abs(query - key[None, :]).to(tl.float32)
        if mode != ALL:
            seen = _visible(query, key[None, :], scoring, sizes)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        old, weights = tl.exp2(top - base), tl.exp2(scores - base[:, None])
        top, total = higher, total * old + tl.sum(weights, 1)
        lines, scale_lines = _lines(values, block, offset, kv_head, sizes.value_dim)
        v = _load_values(values.data, lines, q, sizes)
        if sizes.single and mode != ALL:  # zero times NaN is NaN, so values that are invisible become zero
            column = tl.reshape(seen, [sizes.slots])
            v = tl.where(column[:, None], v, 0.0)
        if mode == CHECKED:  # a value that is not finite reaches the queries that see it only
            finite = v - v == 0
            broken = tl.max(tl.where(finite, 0, 1), 1)
            v = tl.where(finite, v, 0.0)
        if values.scale is not None:
            scale = tl.load(values.scale + scale_lines)
            if sizes.single and mode != ALL:
                scale = tl.where(column, scale, 0.0)
            if mode == CHECKED:
                broken = tl.where(scale - scale == 0, broken, 1)
                scale = tl.where(scale - scale == 0, scale, 0.0)
            weights *= scale[None, :]
        if mode == CHECKED:
            poison = tl.maximum(poison, tl.max(tl.where(seen & (broken[None, :] > 0), 1, 0), 1))
        acc = tl.dot(weights.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
    return top, total, acc, poison


@triton.jit
def _attend(queries, keys, values, table, out, lse, scoring, sizes) -> None:
    """Attend with one tile of queries of one sequence and key-value head to one part of its slots."""
    if sizes.dependent:
        gdc_launch_dependents()
        gdc_wait()
    program, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    split, tile = program % table.num_splits, program // table.num_splits
    index = tile * sizes.rows + tl.arange(0, sizes.rows)
    token = row * queries.num_new + tl.minimum(index // sizes.group, queries.num_new - 1)
    head = kv_head * sizes.group + index % sizes.group
    dims, value_dims = tl.arange(0, sizes.padded_dim), tl.arange(0, sizes.padded_value_dim)
    vectors = token[:, None].to(tl.int64) * queries.token_stride + head[:, None] * queries.head_stride
    q = tl.load(queries.data + vectors + dims[None, :], mask=dims[None, :] < sizes.dim, other=0.0)
    if sizes.wide:
        q = q.to(tl.float32)
    low = split * table.split_slots
    high = tl.minimum(low + table.split_slots, table.num_slots)
    start = (
        tl.full([sizes.rows], float("-inf"), tl.float32),
        tl.zeros([sizes.rows], tl.float32),
        tl.zeros([sizes.rows, sizes.padded_value_dim], tl.float32),
        tl.zeros([sizes.rows], tl.int32),
    )
    if sizes.single:
        query = tl.load(queries.positions + row + tl.zeros([1, 1], tl.int32)).to(tl.int32)
        high = _last_slot(table, row, low, high, sizes)
        if sizes.scans:
            low, clean, high = _visible_range(table, row, low, high, query, scoring, sizes)
            at = q, query, head, row, kv_head, low, clean
            start = _attend_range(at, keys, values, table, scoring, sizes, start, ALL)
            low = clean
        at = q, query, head, row, kv_head, low, high
        top, total, acc, poison = _attend_range(at, keys, values, table, scoring, sizes, start, SOME)
    else:
        query = tl.load(queries.positions + token).to(tl.int32)[:, None]
        low, clean, high = _visible_range(table, row, low, high, query, scoring, sizes)
        at = q, query, head, row, kv_head, low, clean
        state = _attend_range(at, keys, values, table, scoring, sizes, start, ALL)
        at = q, query, head, row, kv_head, clean, high
        top, total, acc, poison = _attend_range(at, keys, values, table, scoring, sizes, state, SOME)
        if tl.max(tl.max(tl.where(acc - acc == 0, 0, 1), 1), 0) > 0:  # rare: compute again with care
            at = q, query, head, row, kv_head, low, high
            top, total, acc, poison = _attend_range(at, keys, values, table, scoring, sizes, start, CHECKED)
            acc = tl.where(poison[:, None] > 0, float("nan"), acc)
    inside = index < queries.num_new * sizes.group
    if scoring.sinks is not None and not sizes.split:
        sink = tl.load(scoring.sinks + head).to(tl.float32) * 1.4426950408889634
        base = tl.maximum(top, sink)
        old = tl.exp2(top - base)
        acc, total = acc * old[:, None], total * old + tl.exp2(sink - base)
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    target = token.to(tl.int64) * sizes.heads + head
    if sizes.split:
        target = target * table.num_splits + split
        tl.store(lse + target, top + tl.log2(total), mask=inside)
    places = target[:, None] * sizes.value_dim + value_dims[None, :]
    mask = inside[:, None] & (value_dims[None, :] < sizes.value_dim)
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _merge(parts, lse, out, sinks, splits, dim: tl.constexpr, sizes) -> None:
    """Merge the parts of one token and head: weights are 2^(lse - the largest lse)."""
    if sizes.dependent:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64)
    split, dims = tl.arange(0, 64), tl.arange(0, sizes.padded_value_dim)
    part_lse = tl.load(lse + at * splits + split, mask=split < splits, other=float("-inf"))
    top = tl.max(part_lse)
    if sinks is not None:
        sink = tl.load(sinks + at % sizes.heads).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(part_lse - base)
    total = tl.sum(weights)
    if sinks is not None:
        total += tl.exp2(sink - base)
    mask = (split[:, None] < splits) & (dims[None, :] < dim)
    part = tl.load(parts + (at * splits + split[:, None]) * dim + dims[None, :], mask=mask, other=0.0)
    # A part without a visible key has weight 0 and output 0.
    merged = tl.sum(part * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + at * dim + dims, merged.to(out.dtype.element_ty), mask=dims < dim)


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _num_rows(num_new: int, group: int, dtype: torch.dtype) -> int:
    """Return the rows of a tile of queries; products of float32 are not those of matrix units, and compile slowly."""
    most = group if num_new == 1 else min(num_new * group, MAX_ROWS if dtype.itemsize == 2 else 32)
    return max(MIN_ROWS, 1 << (most - 1).bit_length())


def num_warps(rows: int, scans: bool) -> int:
    """Return the warps of a program."""
    return 2 if scans else 4 if rows < MAX_ROWS else 8


def tile_sizes(vector_bytes: int, num_rows: int, is_busy: bool, device: torch.device) -> tuple[int, int]:
    """Return the slots of a tile and the tiles loaded ahead, which fit into the GPU's shared memory.

    ``is_busy``: there are programs for the whole GPU without a split, so that larger tiles cost nothing.
    """
    limit = 0.9 * _shared_memory(device) - num_rows * vector_bytes
    sizes = (128, 2), (64, 2), (32, 2), (32, 1)
    fitting = sizes if is_busy and num_rows < MAX_ROWS else sizes[1:]
    return next(((slots, ahead) for slots, ahead in fitting if 2 * slots * ahead * vector_bytes <= limit), (16, 1))


@functools.cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 17
    properties: Any = torch.cuda.get_device_properties(device)
    num_bytes: int = properties.shared_memory_per_block_optin
    return num_bytes


def _num_splits(num_programs: int, num_slots: int, tile: int, device: torch.device) -> int:
    """Return the number of parts that keep the GPU busy; each takes longer than merging it."""
    wanted = -(-PROGRAMS_PER_PROCESSOR * _num_processors(device) // num_programs)
    return max(1, min(wanted, MAX_SPLITS, -(-num_slots // max(tile, MIN_SPLIT))))


def paged_attention(
    q: Tensor,
    keys: PagedStore,
    values: PagedStore,
    slots: PagedSlots,
    pattern: AttentionPattern,
    params: AttentionParams,
) -> Tensor:
    """Attend with q [R * L, H, D], rotated, to the blocks of a table -> [R * L, H, Dv]."""
    tokens, heads, dim = q.shape
    num_seqs, num_slots = len(slots.table), slots.num_slots
    kv_heads, block_size, value_dim = keys.data.shape[1], keys.data.shape[2], values.data.shape[3]
    num_new, group = tokens // num_seqs, heads // kv_heads
    single = num_new == 1
    rows = _num_rows(num_new, group, q.dtype)
    dims = max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(value_dim))
    is_busy = kv_heads * num_seqs >= _num_processors(q.device)
    scans = single and is_busy and keys.data.dtype.itemsize == 1  # converting bytes leaves no time for comparisons
    tile, stages = tile_sizes(max(dims) * q.element_size(), rows, is_busy and not scans, q.device)
    num_tiles = -(-num_new * group // rows)
    splits = _num_splits(num_tiles * kv_heads * num_seqs, num_slots, tile, q.device)
    split_slots = -(-num_slots // (splits * tile)) * tile
    splits = -(-num_slots // split_slots)
    out = q.new_empty((tokens, heads, value_dim))
    lse = parts = None
    if splits > 1:
        parts = q.new_empty((tokens, heads, splits, value_dim), dtype=torch.float32)
        lse = q.new_empty((tokens, heads, splits), dtype=torch.float32)
    dependent = starts_dependent(q.device)
    narrow = max(keys.data.numel(), values.data.numel()) < 1 << 31
    numbers = group, heads, dim, dims[0], value_dim, dims[1], block_size, rows, tile
    sizes = _sizes(numbers, (single, splits > 1), pattern, params, (is_interpreted(), narrow, scans, dependent))
    _attend[(num_tiles * splits, kv_heads, num_seqs)](
        _Queries(q, q.stride(0), q.stride(1), slots.queries, num_new),
        _arrays(keys),
        _arrays(values),
        _Table(slots.table, slots.table.stride(0), slots.positions, num_slots, splits, split_slots),
        out if parts is None else parts,
        out if lse is None else lse,
        _scoring(pattern, params),
        sizes,
        num_warps=num_warps(rows, scans),
        num_stages=stages,
        **launch_options(dependent),
    )
    if parts is not None:
        _merge[(tokens * heads,)](
            parts, lse, out, params.sink_logits, splits, value_dim, sizes, **launch_options(dependent)
        )
    return out


def _scoring(pattern: AttentionPattern, params: AttentionParams) -> _Scoring:
    softcap, bias = params.logit_softcap, params.bias
    return _Scoring(
        params.scale * (LOG2E if softcap is None else 1.0),
        1.0 if softcap is None else softcap,
        bias.slopes * (bias.factor * LOG2E) if isinstance(bias, AlibiSlopes) else None,
        params.sink_logits,
        pattern.window or 0,
        pattern.layer_window or 0,
        pattern.num_sinks,
    )


def _sizes(
    numbers: tuple[int, ...],
    shape: tuple[bool, bool],
    pattern: AttentionPattern,
    params: AttentionParams,
    machine: tuple[bool, bool, bool, bool],
) -> _Sizes:
    has_layer_window = pattern.causal and pattern.layer_window is not None
    visibility = pattern.causal, pattern.window is not None, pattern.window_step, has_layer_window
    flags = *shape, *visibility, params.logit_softcap is not None, *machine
    return _Sizes(*map(tl.constexpr, (*numbers, *flags)))


def _arrays(store: PagedStore) -> _Arrays:
    data, scale = store.numbers, store.scale
    assert data.stride(2) == data.shape[3] and data.stride(3) == 1, "slots of a block follow each other"
    scale_strides = (0, 0) if scale is None else (scale.stride(0), scale.stride(1))
    return _Arrays(data, scale, data.stride(0), data.stride(1), *scale_strides)
