"""What a first difference looks like: every known fault as a hypothesis with a test of its own.

In this order, because a later test relies on what the earlier ones have excluded:

1.  the plan's tables lack a position that a query may see         -> table (the host's fault)
2.  all new slots are marked with positions off by a constant      -> position
3.  the query itself differs: turned by another position, or embedded at one -> position; turned otherwise -> rotation
4.  what is read is not what is stored in the row's blocks: another of its blocks, or none -> table;
    another row's -> neighbour; another layer's -> layer
5.  what is stored is the true key rounded -> dtype; turned otherwise -> rotation; turned by another position ->
    position; another layer's -> layer; another row's -> neighbour; another position's, or nothing -> cursor
6.  keys are right, but others are visible                         -> mask
7.  scores are a constant multiple of the right ones -> scale; biased as at other positions -> position

A test judges all wrong places together: one key may look like another's by chance (without positions, equal tokens
have equal keys in the first layer), a whole set does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvad import cache, ops
from kvad.model import Transformer
from kvad.model_input import CacheView, ModelInput, Rotary, SubBatch
from kvad.verify.mismatch import AttentionCall, Mismatch, RecordingCache, first_difference
from kvad.verify.replay import SequenceKey
from kvad.verify.report import UNKNOWN_FAULT

SHIFTS = tuple(d for d in range(-16, 17) if d)
COARSE = 0.2  # a key turned, or of another token, is off by its own size
LOW_PRECISION_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def explain_mismatch(case: Mismatch) -> tuple[str, str]:
    """(the name of the fault that explains the case's first difference, the evidence in words)."""
    tests = (
        _host,
        _marked_elsewhere,
        _other_query,
        _differs_from_stored,
        _differs_from_input,
        _others_visible,
        _other_scores,
    )
    for test in tests:
        found = test(case)
        if found is not None:
            return found
    return UNKNOWN_FAULT, "no test explains it"


# ------------------------------------------------------------ 1, 2, 3: the host, the marks, the query


def _host(case: Mismatch) -> tuple[str, str] | None:
    missing = case.missing()
    if missing is None:
        return None
    return "table", f"the plan's own table holds no slot of position {missing}"


def _marked_elsewhere(case: Mismatch) -> tuple[str, str] | None:
    """The columns of this step's own slots are off by one constant."""
    column = case.memory.positions[case.row.group].view(-1)
    slots = {int(p): int(s) for p, s in zip(case.row.expected, case.row.slots, strict=True) if p >= 0}
    marks = torch.stack([column[slots[int(p)]] for p in case.new])
    shift = int(marks[0] - case.new[0])
    if shift == 0 or bool((marks < 0).any()) or not bool((marks - case.new == shift).all()):
        return None
    first, last = int(case.new[0]), int(case.new[-1])
    return "position", f"the new tokens {first}..{last} are marked {int(marks[0])}..{int(marks[-1])}: {shift:+d}"


def _other_query(case: Mismatch) -> tuple[str, str] | None:
    true = case.reference.q[case.new]
    wrong = [i for i in range(len(true)) if first_difference(case.q[i], true[i], case.close, 0) is not None]
    if not wrong:
        return None
    given = case.call.q[case.row.slot_index : case.row.slot_index + case.row.num_new][wrong]
    have, raw, positions = case.q[wrong], case.reference.raw_q[case.new[wrong]], case.new[wrong]
    if first_difference(given, raw, case.close, 0) is not None:
        return _embedded_elsewhere(case, given, wrong)
    rotary = _rotary(case, positions)
    if rotary is None:
        return UNKNOWN_FAULT, "the model gave the right queries, the memory attends with others"
    shift = _rotation_shift(case, raw, have, positions, rotary)
    if shift is not None:
        return "position", f"queries are turned as at position p{shift:+d}"
    turned = _match_other_rotation(case, raw, have, positions, rotary)
    return ("rotation", f"queries are {turned}") if turned else (UNKNOWN_FAULT, "queries are turned in no known way")


def _embedded_elsewhere(case: Mismatch, given: Tensor, wrong: list[int]) -> tuple[str, str]:
    """The model itself gave other queries: does it give these when its tokens stand at other positions?"""
    stream, sample = case.row.key
    start = case.row.start
    tokens = case.world.streams[stream].tokens(sample)[start : start + case.row.num_new]
    if case.call.layer == 0:
        for shift in (*SHIFTS, -start):
            if start + shift < 0 or not shift:
                continue
            queries = _first_queries(case.world.model, tokens, start + shift)
            if queries is not None and first_difference(given, queries[wrong], case.close, 0) is None:
                return "position", f"queries are those of tokens embedded at position p{shift:+d}"
    return UNKNOWN_FAULT, "the layer was given other inputs than the judge's, though the layers before it agree"


# ------------------------------------------------------------ 4: read against stored


def _differs_from_stored(case: Mismatch) -> tuple[str, str] | None:
    keys, columns = _stored(case)
    same = _as_read(case, keys, columns, case.k) & (columns == case.positions)
    bad = [int(p) for p in case.block_table if not bool(same[p])]
    if not bad:
        return None
    size = case.world.expected_layout.groups[case.row.group].block_size
    place = bad[0] // size
    low, high = place * size, min((place + 1) * size, len(case.positions))
    found = _blocks_like(case, case.positions[low:high], case.k[:, low:high])
    own = case.world.expected_layout.blocks[case.row.group][case.row.key]
    position = int(case.row.expected[bad[0]])
    what = f"position {position} lies in block {own[place]}, but in its place the row reads"
    mine = [block for block in found if block in own]
    if mine:
        return "table", f"{what} block {mine[0]}, another one of its own"
    for key, blocks in case.world.expected_layout.blocks[case.row.group].items():
        theirs = [block for block in found if block in blocks]
        if theirs and key != case.row.key and bool((case.positions[low:high] >= 0).any()):
            return "neighbour", f"{what} block {theirs[0]}, which belongs to row {key[0]}"
    other = _layer_like(case, case.block_table)
    if other is not None:
        return "layer", f"the keys read are those stored for layer {other}"
    if found or not bool((case.positions[low:high] >= 0).any()):
        return "table", f"{what} one that holds nothing of any row"
    return UNKNOWN_FAULT, f"{what} keys that are stored nowhere"


def _stored(case: Mismatch) -> tuple[Tensor, Tensor]:
    """What lies in the row's own blocks: keys [K, S, D] and columns [S]."""
    size = case.world.expected_layout.groups[case.row.group].block_size
    blocks, offsets = case.row.slots // size, case.row.slots % size
    keys = case.memory.keys[case.call.layer].read_slots(blocks, offsets, case.k.dtype).transpose(0, 1)
    return keys, case.memory.positions[case.row.group][blocks, offsets]


def _as_read(case: Mismatch, stored: Tensor, columns: Tensor, keys: Tensor) -> Tensor:
    """[n]: is what is stored [K, n, D], under ``columns`` [n], what was read as ``keys`` [K, n, D]?

    A memory that rotates on read gives it turned by its column, or as it lies where nothing was to be rotated.
    """
    alike = ((stored == keys) | (stored.isnan() & keys.isnan())).all(dim=-1).all(dim=0)
    rotary = _rotary(case, columns.clamp(min=0)) if case.memory.rope_on_read else None
    if rotary is None:
        return alike
    turned = (
        ops.rotary.RotaryCache(columns, exact=case.memory.exact_rope)
        .rotate(stored.transpose(0, 1), rotary)
        .transpose(0, 1)
    )
    near = (turned - keys).abs().amax(dim=(0, 2)) <= case.close * max(float(turned.abs().max()), 1e-30)
    return alike | near


def _blocks_like(case: Mismatch, columns: Tensor, keys: Tensor) -> list[int]:
    """The blocks whose first slots hold exactly these columns and keys."""
    count = len(columns)
    marks, store = case.memory.positions[case.row.group], case.memory.keys[case.call.layer]
    alike = (marks[:, :count] == columns).all(dim=-1).nonzero().squeeze(-1).tolist()
    every = torch.arange(count)
    held = {int(b): store.read_slots(every * 0 + b, every, keys.dtype).transpose(0, 1) for b in alike}
    return [block for block, each in held.items() if bool(_as_read(case, each, columns, keys).all())]


def _layer_like(case: Mismatch, places: Tensor) -> int | None:
    """Another layer whose true keys are what is read at ``places``."""
    have, meant = case.k[:, places], case.row.expected[places]
    for number, layer in enumerate(case.world.reference[case.row.key]):
        if number == case.call.layer or layer.k.shape != case.reference.k.shape:
            continue
        if first_difference(have, layer.k[:, meant], case.close, 1) is None:
            return number
    return None


# ------------------------------------------------------------ 5: stored against true


def _differs_from_input(case: Mismatch) -> tuple[str, str] | None:
    wrong = _wrong_slots(case, case.k, case.reference.k)
    if not len(wrong):
        wrong_values = _wrong_slots(case, case.v, case.reference.v)
        if not len(wrong_values):
            return None
        meant = case.row.expected[wrong_values]
        return _match_precision(case, case.v[:, wrong_values], case.reference.v[:, meant], "values") or (
            UNKNOWN_FAULT,
            f"keys are right, the value of position {int(meant[0])} is not",
        )
    meant = case.row.expected[wrong]
    have, true = case.k[:, wrong], case.reference.k[:, meant]
    rounded = _match_precision(case, have, true, "keys")
    if rounded is not None:
        return rounded
    return _match_rotation(case, have, meant) or _match_other_sequence(case, wrong, have, meant)


def _wrong_slots(case: Mismatch, have: Tensor, true: Tensor) -> Tensor:
    """The visible places [n] whose contents differ from the judge's."""
    scale = float(true.abs().max())
    gap = (have[:, case.block_table] - true[:, case.meant]).abs().nan_to_num(nan=math.inf).amax(dim=(0, 2))
    return case.block_table[gap > case.close * scale]


def _match_precision(case: Mismatch, have: Tensor, true: Tensor, what: str) -> tuple[str, str] | None:
    stored = cache.quantization.get_format(case.world.stored[what == "values"])
    if not bool(have.isfinite().all()):
        top = stored.max_value
        if float(true.abs().max()) > top:
            return "dtype", f"true {what} reach {float(true.abs().max()):.3g}, {stored.name} ends at {top:.3g}"
        return None
    for dtype in LOW_PRECISION_DTYPES:
        if torch.finfo(dtype).eps <= stored.eps:
            continue
        alike = (have - true.to(dtype).to(have.dtype)).abs() <= 1e-3 * torch.finfo(dtype).eps * true.abs()
        if float(alike.double().mean()) > 0.95:
            name = str(dtype).removeprefix("torch.")
            return "dtype", f"{what} are the true ones rounded to {name}, where {stored.name} was promised"
    if stored.loss == "lossy":
        return _coarser(have, true, what, stored.name)
    return None


def _coarser(have: Tensor, true: Tensor, what: str, promised: str) -> tuple[str, str] | None:
    """Through a lossy format no rounding looks like itself: are they the true ones all the same, only less so?"""
    largest = true.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)
    off = float(((have - true).abs() / largest).max())
    if off > COARSE:
        return None
    return "dtype", f"{what} are within {off:.2g} of their largest number of the true ones, further than {promised} is"


def _match_rotation(case: Mismatch, have: Tensor, meant: Tensor) -> tuple[str, str] | None:
    rotary = _rotary(case, meant)
    if rotary is None:
        return None
    have, raw = have.transpose(0, 1), case.reference.raw_k[:, meant].transpose(0, 1)
    turned = _match_other_rotation(case, raw, have, meant, rotary)
    if turned is not None:
        return "rotation", f"stored keys are {turned}"
    shift = _rotation_shift(case, raw, have, meant, rotary)
    return None if shift is None else ("position", f"stored keys are turned as at position p{shift:+d}")


def _match_other_sequence(case: Mismatch, wrong: Tensor, have: Tensor, meant: Tensor) -> tuple[str, str]:
    """Whose keys are they?  All wrong places must agree, so that one chance likeness names nobody."""
    other = _layer_like(case, wrong)
    if other is not None:
        return "layer", f"the keys of positions {int(meant[0])}..{int(meant[-1])} are those of layer {other}"
    columns = case.positions[wrong]
    written = columns >= 0
    first = int(meant[0])
    if _matches_keys(case, case.row.key, have[:, written], columns[written]):
        if not bool(written.all()):
            return "cursor", f"nothing is stored in the slot of position {int(meant[~written][0])}"
        return "cursor", f"the slot of position {first} holds the key of position {int(columns[0])}"
    for key in case.world.reference:
        if key != case.row.key and _matches_keys(case, key, have[:, written], columns[written]):
            return "neighbour", f"the slot of position {first} holds a key of row {key[0]}"
    if not bool(have.any()):
        return "cursor", f"the slot of position {first} is empty"
    return UNKNOWN_FAULT, f"the slot of position {first} holds a key that nobody computed"


def _matches_keys(case: Mismatch, key: SequenceKey, have: Tensor, positions: Tensor) -> bool:
    """Are have [K, n, D] the true keys of a row's ``positions`` [n]?"""
    layer = case.world.reference[key][case.call.layer]
    if bool((positions >= layer.k.shape[1]).any()):
        return False
    return first_difference(have, layer.k[:, positions], case.close, 1) is None


# ------------------------------------------------------------ 6, 7: arithmetic


def _others_visible(case: Mismatch) -> tuple[str, str] | None:
    seen, true = case.visible(), case.allowed
    extra, hidden = seen & ~true, true & ~seen
    if bool(extra.any()):
        query, place = (int(n) for n in extra.nonzero()[0])
        return "mask", f"the query at position {int(case.new[query])} sees {_named(case, place)}"
    if bool(hidden.any()):
        query, place = (int(n) for n in hidden.nonzero()[0])
        return "mask", f"the query at position {int(case.new[query])} does not see {_named(case, place)}"
    return None


def _named(case: Mismatch, place: int) -> str:
    position = int(case.row.expected[place])
    return f"the key of position {position}" if position >= 0 else "a slot that nobody wrote"


def _other_scores(case: Mismatch) -> tuple[str, str] | None:
    """Scores are taken apart again: bias off, softcap undone; what is left is a multiple of q.k."""
    score, seen = case.reference.score, case.allowed.unsqueeze(0).expand_as(case.scores)
    heads, kv_heads = case.scores.shape[0], case.k.shape[0]
    keys = case.k.repeat_interleave(heads // kv_heads, dim=0)
    dots = case.q.transpose(0, 1) @ keys.transpose(-1, -2).to(case.q.dtype) * score.scale
    bias = _bias(case, 0)
    left = case.scores - bias
    if score.logit_softcap is not None:
        left = left / score.logit_softcap
        seen = seen & (left.abs() < 0.999)
        left = torch.atanh(left.clamp(-0.999, 0.999)) * score.logit_softcap
    x, y = left[seen], dots[seen]
    ratio = float((x @ y) / (y @ y).clamp(min=1e-300))
    fits = float((x - ratio * y).norm()) <= 1e-6 * float(x.norm())
    if fits and abs(ratio - 1) > 1e-6:
        return "scale", f"scores are {ratio:.6g} times scale * q.k"
    for shift in SHIFTS if score.bias is not None and score.logit_softcap is None else ():
        if first_difference((case.scores - _bias(case, shift))[seen], y, case.close, 0) is None:
            return "position", f"biases are those of queries at position p{shift:+d}"
    return None


def _bias(case: Mismatch, shift: int) -> Tensor:
    """[H, L, S] of the true positions, queries shifted."""
    if case.reference.score.bias is None:
        return torch.zeros((), dtype=case.scores.dtype)
    queries = (case.new + shift).unsqueeze(0)
    return ops.attention.position_bias(case.reference.score.bias, queries, case.row.expected.unsqueeze(0))[0].to(
        case.scores.dtype
    )


# ------------------------------------------------------------ turning


def _rotary(case: Mismatch, positions: Tensor) -> Rotary | None:
    rotary = case.reference.score.rotary
    if rotary is None or rotary.inv_freq.dim() == 1:
        return rotary
    return rotary._replace(inv_freq=rotary.inv_freq[positions])


def _rotation_shift(case: Mismatch, raw: Tensor, have: Tensor, positions: Tensor, rotary: Rotary) -> int | None:
    """The constant d with have == R(p + d) raw; raw, have [n, heads, D]."""
    for shift in (*SHIFTS, -case.row.start):
        if (
            shift
            and first_difference(have, ops.rotary.RotaryCache(positions + shift).rotate(raw, rotary), case.close, 0)
            is None
        ):
            return shift
    return None


def _match_other_rotation(case: Mismatch, raw: Tensor, have: Tensor, positions: Tensor, rotary: Rotary) -> str | None:
    swapped = rotary._replace(interleaved=not rotary.interleaved)
    ways = {
        "not turned at all": raw,
        "turned backwards": ops.rotary.RotaryCache(-positions).rotate(raw, rotary),
        "turned twice": ops.rotary.RotaryCache(positions).rotate(
            ops.rotary.RotaryCache(positions).rotate(raw, rotary), rotary
        ),
        "turned in other pairs of dimensions": ops.rotary.RotaryCache(positions).rotate(raw, swapped),
    }
    for words, turned in ways.items():
        if first_difference(have, turned, case.close, 0) is None:
            return words
    return None


# ------------------------------------------------------------ asking the model


def _first_queries(model: Transformer, tokens: Sequence[int], start: int) -> Tensor | None:
    """raw q [L, H, D] of layer 0 for ``tokens`` at ``start ..``; None where the model has no such positions."""
    caught: list[Tensor] = []

    def keep(call: AttentionCall) -> None:
        caught.append(call.q)
        raise _StopForward

    watched = RecordingCache(keep)
    watched.inner = _ZeroCache(model.config.stack.num_layers)
    positions = torch.arange(start, start + len(tokens))
    step = ModelInput(torch.tensor(tokens), positions, (SubBatch(1, len(tokens), len(tokens)),), positions)
    try:
        model(step, watched)
    except _StopForward:
        return caught[0]
    except IndexError:  # past the end of a table of learned positions
        return None
    return None


class _StopForward(Exception):
    pass


class _ZeroCache:
    """A memory whose views give zeros."""

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def open(self, step: ModelInput) -> Sequence[CacheView]:
        return [_ZeroView()] * self._layers


class _ZeroView:
    def attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, score: object) -> Tensor:
        return q.new_zeros(*q.shape[:2], q.shape[-1] if v is None else v.shape[-1])

    def write(self, k: Tensor, v: Tensor) -> None:
        pass
