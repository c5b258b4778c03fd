"""Tests that name the fault behind the first difference of a cache, one per signature, in the order of ``SIGNATURES``.

A test relies on what the earlier ones have excluded. It uses all wrong slots together: one key may equal another's by
chance (without positions, equal tokens have equal keys in the first layer), a whole set does not. ``name_stored`` names
the fault of another engine's cache from its stored keys and values alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvad import cache as cache_lib
from kvad import ops
from kvad.model import NoCache, whole_sequences
from kvad.model_input import Rotary
from kvad.verify.mismatch import AttentionCall, Mismatch, RecordingCache
from kvad.verify.reference_model import ReferenceModel
from kvad.verify.replay import SequenceKey
from kvad.verify.report import UNKNOWN_FAULT

SHIFTS = tuple(d for d in range(-16, 17) if d)
COARSE = 0.2  # a rotated key, or that of another token, is off by its own size
LOW_PRECISION_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Explanation = tuple[str, str]  # fault name, evidence


def _missing_position(case: Mismatch) -> Explanation | None:
    missing = case.missing()
    return None if missing is None else ("table", f"the scheduled block table has no slot of position {missing}")


def _wrong_positions(case: Mismatch) -> Explanation | None:
    """Test if the positions of this step's own slots are off by one constant."""
    held_positions = case.kv_cache.positions[case.group_index].view(-1).cpu()
    slots = {int(p): int(s) for p, s in zip(case.expected, case.slots, strict=True) if p >= 0}
    positions = torch.stack([held_positions[slots[int(p)]] for p in case.new])
    shift = int(positions[0] - case.new[0])
    if shift == 0 or bool((positions < 0).any()) or not bool((positions - case.new == shift).all()):
        return None
    tokens = f"the new tokens {int(case.new[0])}..{int(case.new[-1])}"
    return "position", f"{tokens} have positions {int(positions[0])}..{int(positions[-1])}: {shift:+d}"


def _packed_differs(case: Mismatch) -> Explanation | None:
    """Test the joined products of this layer and those before it, if the model gave other tensors to the cache."""
    span = slice(case.first_token, case.first_token + len(case.new))
    given = (
        (case.call.q[span], case.reference.raw_q[case.new], 0),
        (case.call.k[span].transpose(0, 1), case.reference.raw_k[:, case.new], 1),
        (case.call.v[span].transpose(0, 1), case.reference.v[:, case.new], 1),
    )
    if all(case.same(have, true, dim) for have, true, dim in given):
        return None
    model, reference = case.context.model, case.context.reference_model
    names = {module: name for name, module in model.named_modules()}
    for (pack, layers), (_, plain) in zip(model.projections(), reference.projections(), strict=True):
        joined = [names[layer] for layer in layers]
        if any(f".layers.{index}." in joined[0] for index in range(case.call.layer + 1)):
            off = _product_gap(pack, layers, plain, model.token_embedding)
            if off > case.close:
                owner, leaves = joined[0].rpartition(".")[0], ", ".join(name.rpartition(".")[2] for name in joined)
                return "packed", f"the joined product of {owner} ({leaves}) is off by {off:.2g} of its largest number"
    return None


@torch.inference_mode()
def _product_gap(
    pack: ops.linear.PackedLinear, layers: Sequence[ops.linear.Linear], plain: Sequence[Any], like: Tensor
) -> float:
    """Return how far the joined product of random rows, one and several, is from the layers' own products."""
    gaps = [0.0]
    for rows in (1, 3):
        x = torch.randn(rows, layers[0].in_features, generator=torch.Generator().manual_seed(0)).to(like)
        for have, layer in zip(pack(x, *layers), plain, strict=True):
            true = layer(x.double())
            gaps.append(float((have - true).abs().max() / true.abs().max().clamp(min=1e-30)))
    return max(gaps)


def _other_query(case: Mismatch) -> Explanation | None:
    true = case.reference.q[case.new]
    wrong = [i for i in range(len(true)) if not case.same(case.q[i], true[i], 0)]
    if not wrong:
        return None
    given = case.call.q[case.first_token : case.first_token + len(case.new)][wrong]
    have, raw, positions = case.q[wrong], case.reference.raw_q[case.new[wrong]], case.new[wrong]
    if not case.same(given, raw, 0):
        return _embedded_at_other_positions(case, given, wrong)
    rotary = _rotary(case, positions)
    if rotary is None:
        return UNKNOWN_FAULT, "the model's queries are right, the cache attends with others"
    shift = _rotation_shift(case, raw, have, positions, rotary)
    if shift is not None:
        return "position", f"queries are rotated as at position p{shift:+d}"
    rotated = _match_other_rotation(case, raw, have, positions, rotary)
    return ("rotation", f"queries are {rotated}") if rotated else (UNKNOWN_FAULT, "queries are rotated in no known way")


def _embedded_at_other_positions(case: Mismatch, given: Tensor, wrong: list[int]) -> Explanation:
    """Test if the model itself gives these queries when its tokens are at other positions."""
    (stream, sample), start = case.key, case.start
    tokens = case.context.streams[stream].tokens(sample)[start : start + len(case.new)]
    for shift in (*SHIFTS, -start) if case.call.layer == 0 else ():
        if shift and start + shift >= 0:
            queries = _first_queries(case.context.reference_model, tokens, start + shift)
            if queries is not None and case.same(given, queries[wrong], 0):
                return "position", f"queries are those of tokens embedded at position p{shift:+d}"
    return UNKNOWN_FAULT, "the layer's inputs differ from the reference, though the layers before it agree"


def _differs_from_stored(case: Mismatch) -> Explanation | None:
    blocks_of, size = case.context.expected_layout.blocks[case.group_index], case.group.block_size
    positions = case.kv_cache.positions[case.group_index][case.slots // size, case.slots % size].cpu()
    same = _as_read(case, _stored_keys(case, case.slots), positions, case.k) & (positions == case.positions)
    bad = [int(p) for p in case.visible_slots if not bool(same[p])]
    if not bad:
        return None
    block_index = bad[0] // size
    low, high = block_index * size, min((block_index + 1) * size, len(case.positions))
    is_written = bool((case.positions[low:high] >= 0).any())
    matching = _blocks_like(case, case.positions[low:high], case.k[:, low:high])
    table = blocks_of[case.key]
    prefix = f"position {int(case.expected[bad[0]])} is in block {table[block_index]}, but the sequence reads instead"
    own = [block for block in matching if block in table]
    if own:
        return "table", f"{prefix} block {own[0]}, another of its blocks"
    for key, blocks_of_key in blocks_of.items():
        others = [block for block in matching if block in blocks_of_key]
        if others and key != case.key and is_written:
            return "neighbor", f"{prefix} block {others[0]}, which belongs to sequence {key[0]}"
    layer = _layer_like(case, case.visible_slots)
    if layer is not None:
        return "layer", f"the keys read are those stored for layer {layer}"
    if matching or not is_written:
        return "table", f"{prefix} a block that no sequence wrote"
    return UNKNOWN_FAULT, f"{prefix} keys that are not stored in any block"


def _stored_keys(case: Mismatch, slots: Tensor) -> Tensor:
    """Return the keys [K, n, D] that the cache stores in ``slots`` [n], rotated unless it rotates on read."""
    blocks, offsets = slots // case.group.block_size, slots % case.group.block_size
    return case.kv_cache.keys[case.call.layer].read_slots(blocks, offsets, case.k.dtype).transpose(0, 1).cpu()


def _as_read(case: Mismatch, stored: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
    """Return [n]: True if ``stored`` [K, n, D] at ``positions`` [n] was read as ``keys`` [K, n, D].

    A cache that rotates on read returns it rotated by its position, or unchanged if there is no rotary.
    """
    alike = ((stored == keys) | (stored.isnan() & keys.isnan())).all(dim=-1).all(dim=0)
    rotary = _rotary(case, positions.clamp(min=0)) if case.kv_cache.rope_on_read else None
    if rotary is None:
        return alike
    rope = ops.rotary.RotaryCache(positions, exact=case.kv_cache.exact_rope)
    rotated = rope.rotate(stored.transpose(0, 1), rotary).transpose(0, 1)
    near = (rotated - keys).abs().amax(dim=(0, 2)) <= case.close * max(float(rotated.abs().max()), 1e-30)
    return alike | near


def _blocks_like(case: Mismatch, positions: Tensor, keys: Tensor) -> list[int]:
    """Return the blocks whose first slots have exactly these positions and keys."""
    offsets, store = torch.arange(len(positions)), case.kv_cache.keys[case.call.layer]
    held = case.kv_cache.positions[case.group_index][:, : len(positions)].cpu()
    alike = (held == positions).all(dim=-1).nonzero()
    read = partial(store.read_slots, dtype=keys.dtype)
    stored = {int(b): read(offsets * 0 + b, offsets).transpose(0, 1).cpu() for b in alike.view(-1)}
    return [block for block, found in stored.items() if bool(_as_read(case, found, positions, keys).all())]


def _layer_like(case: Mismatch, slots: Tensor) -> int | None:
    """Return another layer whose true keys are what was read at ``slots``, or None."""
    have, expected = case.k[:, slots], case.expected[slots]
    for index, layer in enumerate(case.context.reference[case.key]):
        is_comparable = index != case.call.layer and layer.k.shape == case.reference.k.shape
        if is_comparable and case.same(have, layer.k[:, expected], 1):
            return index
    return None


def _differs_from_input(case: Mismatch) -> Explanation | None:
    wrong = _wrong_slots(case, case.k, case.reference.k)
    if not len(wrong):
        wrong = _wrong_slots(case, case.v, case.reference.v)
        if not len(wrong):
            return None
        expected = case.expected[wrong]
        unknown = UNKNOWN_FAULT, f"keys are right, the value of position {int(expected[0])} is not"
        return _match_precision(case, case.v[:, wrong], case.reference.v[:, expected], "values") or unknown
    expected = case.expected[wrong]
    have, true = case.k[:, wrong], case.reference.k[:, expected]
    stored = have, true
    if case.kv_cache.rope_on_read:
        stored = _stored_keys(case, case.slots[wrong]), case.reference.raw_k[:, expected]
    return (
        _loaded_blocks(case, wrong)
        or _lost_scale(case, wrong)
        or _match_precision(case, *stored, "keys")
        or _match_rotation(case, have, expected)
        or _match_other_sequence(case, wrong, have, expected)
    )


def _wrong_slots(case: Mismatch, have: Tensor, true: Tensor) -> Tensor:
    """Return the visible slots [n] whose contents differ from the reference."""
    expected = true[:, case.visible_positions]
    gap = (have[:, case.visible_slots] - expected).abs().nan_to_num(nan=math.inf)
    return case.visible_slots[gap.amax(dim=(0, 2)) > case.close * float(expected.abs().max())]


def name_stored(case: Mismatch, what: str, have: Tensor, true: Tensor, wrong: Tensor) -> Explanation:
    """Name the fault of another cache's keys or values [K, T, D] at its ``wrong`` positions, from the same tests."""
    have, true = have[:, wrong], true[:, wrong]
    if what == "v":
        unknown = UNKNOWN_FAULT, f"keys are right, the value of position {int(wrong[0])} is not"
        return _match_precision(case, have, true, "values") or unknown
    for shift in SHIFTS:
        positions = wrong + shift
        is_within = bool((positions >= 0).all() & (positions < case.reference.k.shape[1]).all())
        if is_within and case.same(have, case.reference.k[:, positions], 1):
            return "cursor", f"the slot of position {int(wrong[0])} holds the key of position {int(positions[0])}"
    return (
        _match_precision(case, have, true, "keys")
        or _match_rotation(case, have, wrong)
        or _match_other_sequence(case, wrong, have, wrong)
    )


def _loaded_blocks(case: Mismatch, wrong: Tensor) -> Explanation | None:
    """Test if every wrong slot is in a block that was read from the block store."""
    blocks = set((case.slots[wrong] // case.group.block_size).tolist())
    if not blocks <= case.context.expected_layout.loaded[case.group_index]:
        return None
    first, last = (int(case.expected[wrong[at]]) for at in (0, -1))
    return "block-store", f"positions {first}..{last} are in blocks read from the block store, which hold other keys"


def _lost_scale(case: Mismatch, wrong: Tensor) -> Explanation | None:
    """Test if the wrong slots hold the right integers of the true keys with other scales."""
    store, keys = case.kv_cache.keys[case.call.layer], case.reference.k
    specs = store.format.arrays(store.dim)
    if len(specs) == 1 or any(spec.granularity != "slot" for spec in specs):
        return None
    if case.kv_cache.rope_on_read:
        keys = case.reference.raw_k
    blocks, offsets = case.slots[wrong] // case.group.block_size, case.slots[wrong] % case.group.block_size
    encoded = ops.quantize.get_codec(store.format.name).encode(keys[:, case.expected[wrong]].transpose(0, 1))
    pairs = zip(specs, store.arrays, encoded, strict=True)
    alike = {spec.name: _share_alike(array[blocks, :, offsets].cpu(), part) for spec, array, part in pairs}
    if alike["data"] < 0.9 or alike.get("scale", 1.0) > 0.1:
        return None
    position = int(case.expected[wrong[0]])
    return (
        "quantization-scale",
        f"the slot of position {position} holds the true key's {store.format.name} with another scale",
    )


def _share_alike(have: Tensor, true: Tensor) -> float:
    """Return the share of equal numbers, but for rounding."""
    return float(((have.double() - true.double()).abs() <= 1e-3 * true.double().abs()).double().mean())


def _match_precision(case: Mismatch, have: Tensor, true: Tensor, label: str) -> Explanation | None:
    stored = cache_lib.quantization.get_format(case.context.stored[label == "values"])
    if not bool(have.isfinite().all()):
        largest = float(true.abs().max())
        overflow = f"true {label} reach {largest:.3g}, {stored.name} ends at {stored.max_value:.3g}"
        return ("dtype", overflow) if largest > stored.max_value else None
    for dtype in LOW_PRECISION_DTYPES:
        eps = torch.finfo(dtype).eps
        alike = (have - true.to(dtype).to(have.dtype)).abs() <= 1e-3 * eps * true.abs()
        if eps > stored.eps and float(alike.double().mean()) > 0.95:
            name = str(dtype).removeprefix("torch.")
            return "dtype", f"{label} are the true ones rounded to {name}, the format is {stored.name}"
    if stored.loss != "none":  # no rounding may be recognized: test if they are the true ones, only less precise
        largest_elements = true.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30)
        off = float(((have - true).abs() / largest_elements).max())
        if off <= COARSE:
            distance = f"{label} are within {off:.2g} of their largest number of the true ones"
            return "dtype", f"{distance}, more than {stored.name} loses"
    return None


def _match_rotation(case: Mismatch, have: Tensor, expected: Tensor) -> Explanation | None:
    rotary = _rotary(case, expected)
    if rotary is None:
        return None
    have, raw = have.transpose(0, 1), case.reference.raw_k[:, expected].transpose(0, 1)
    rotated = _match_other_rotation(case, raw, have, expected, rotary)
    if rotated is not None:
        return "rotation", f"stored keys are {rotated}"
    shift = _rotation_shift(case, raw, have, expected, rotary)
    return None if shift is None else ("position", f"stored keys are rotated as at position p{shift:+d}")


def _match_other_sequence(case: Mismatch, wrong: Tensor, have: Tensor, expected: Tensor) -> Explanation:
    """Find the sequence whose keys these are; all wrong slots must agree, so a chance match is no evidence."""
    layer = _layer_like(case, wrong)
    if layer is not None:
        return "layer", f"the keys of positions {int(expected[0])}..{int(expected[-1])} are those of layer {layer}"
    positions = case.positions[wrong]
    written = positions >= 0
    slot = f"the slot of position {int(expected[0])}"
    if _matches_keys(case, case.key, have[:, written], positions[written]):
        if not bool(written.all()):
            return "cursor", f"nothing is stored in the slot of position {int(expected[~written][0])}"
        return "cursor", f"{slot} holds the key of position {int(positions[0])}"
    for key in case.context.reference:
        if key != case.key and _matches_keys(case, key, have[:, written], positions[written]):
            return "neighbor", f"{slot} holds a key of sequence {key[0]}"
    if not bool(have.any()):
        return "cursor", f"{slot} is empty"
    return UNKNOWN_FAULT, f"{slot} holds a key that no sequence computed"


def _matches_keys(case: Mismatch, key: SequenceKey, have: Tensor, positions: Tensor) -> bool:
    """Test if have [K, n, D] are the true keys of ``positions`` [n] of a sequence."""
    keys = case.context.reference[key][case.call.layer].k
    return not bool((positions >= keys.shape[1]).any()) and case.same(have, keys[:, positions], 1)


def _others_visible(case: Mismatch) -> Explanation | None:
    seen, true = case.visible(), case.allowed
    for wrong, verb in ((seen & ~true, "sees"), (true & ~seen, "does not see")):
        if bool(wrong.any()):
            query, slot = (int(n) for n in wrong.nonzero()[0])
            position = int(case.expected[slot])
            key = f"the key of position {position}" if position >= 0 else "a slot that no sequence wrote"
            return "mask", f"the query at position {int(case.new[query])} {verb} {key}"
    return None


def _other_scores(case: Mismatch) -> Explanation | None:
    """Invert the score computation (bias, softcap); the rest must be a multiple of q.k."""
    params, seen = case.reference.params, case.allowed.unsqueeze(0).expand_as(case.scores)
    keys = case.k.repeat_interleave(case.scores.shape[0] // case.k.shape[0], dim=0)
    dots = case.q.transpose(0, 1) @ keys.transpose(-1, -2).to(case.q.dtype) * params.scale
    left = case.scores - _bias(case, 0)
    if params.logit_softcap is not None:
        left = left / params.logit_softcap
        seen = seen & (left.abs() < 0.999)
        left = torch.atanh(left.clamp(-0.999, 0.999)) * params.logit_softcap
    x, y = left[seen], dots[seen]
    ratio = float((x @ y) / (y @ y).clamp(min=1e-300))
    fits = float((x - ratio * y).norm()) <= 1e-6 * float(x.norm())
    if fits and abs(ratio - 1) > 1e-6:
        return "scale", f"scores are {ratio:.6g} times scale * q.k"
    for shift in SHIFTS if params.bias is not None and params.logit_softcap is None else ():
        if case.same((case.scores - _bias(case, shift))[seen], y, 0):
            return "position", f"biases are those of queries at position p{shift:+d}"
    return None


def _bias(case: Mismatch, shift: int) -> Tensor:
    """Return the bias [H, L, S] at the true positions, queries shifted."""
    bias = case.reference.params.bias
    if bias is None:
        return torch.zeros((), dtype=case.scores.dtype)
    assert not isinstance(bias, Tensor), "biases of their own per text are those of encoders"
    queries, keys = (case.new + shift).unsqueeze(0), case.expected.unsqueeze(0)
    return ops.position_bias.position_bias(bias, queries, keys)[0].to(case.scores.dtype)


def _lost_state(case: Mismatch) -> Explanation | None:
    """Test if none of the earlier inputs that a convolution reads is visible."""
    earlier = case.visible_slots[case.visible_positions < case.start]
    if not case.group.spec.is_state or not len(earlier) or bool((case.positions[earlier] >= 0).any()):
        return None
    return "state", f"none of the {len(earlier)} inputs before position {case.start} is in the sequence's blocks"


SIGNATURES: tuple[Callable[[Mismatch], Explanation | None], ...] = (
    # No earlier input of a convolution is there: state.
    _lost_state,
    # The scheduled block tables lack a position that a query may see: table (the host's fault).
    _missing_position,
    # All new slots have positions off by a constant: position.
    _wrong_positions,
    # The model gave other q, k or v, and a joined product is not that of its layers: packed.
    _packed_differs,
    # The query differs: rotated by another position, or embedded at one: position; rotated otherwise: rotation.
    _other_query,
    # What is read is not what is stored in the sequence's blocks: another of its blocks, or none: table; another
    # sequence's: neighbor; another layer's: layer.
    _differs_from_stored,
    # What is stored is the true key rounded: dtype; rotated otherwise: rotation; rotated by another position:
    # position; another layer's: layer; another sequence's: neighbor; another position's, or nothing: cursor.
    _differs_from_input,
    # Keys are right, but others are visible: mask.
    _others_visible,
    # Scores are a constant multiple of the right ones: scale; biased as at other positions: position.
    _other_scores,
)


def _rotary(case: Mismatch, positions: Tensor) -> Rotary | None:
    rotary = case.reference.params.rotary
    if rotary is None or rotary.inv_freq.dim() == 1:
        return rotary
    return rotary._replace(inv_freq=rotary.inv_freq[positions])


def _rotate(x: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    return ops.rotary.RotaryCache(positions).rotate(x, rotary)


def _rotation_shift(case: Mismatch, raw: Tensor, have: Tensor, positions: Tensor, rotary: Rotary) -> int | None:
    """Return the constant d with have == R(p + d) raw, or None; raw, have [n, heads, D]."""
    shifts = (shift for shift in (*SHIFTS, -case.start) if shift)
    return next((shift for shift in shifts if case.same(have, _rotate(raw, positions + shift, rotary), 0)), None)


def _match_other_rotation(case: Mismatch, raw: Tensor, have: Tensor, positions: Tensor, rotary: Rotary) -> str | None:
    other_pairs = rotary._replace(interleaved=not rotary.interleaved)
    rotations = {
        "not rotated": raw,
        "rotated backwards": _rotate(raw, -positions, rotary),
        "rotated twice": _rotate(_rotate(raw, positions, rotary), positions, rotary),
        "rotated in other pairs of dimensions": _rotate(raw, positions, other_pairs),
    }
    return next((text for text, rotated in rotations.items() if case.same(have, rotated, 0)), None)


class _FirstCall(BaseException):
    """Ends a forward pass at its first attention; the queries are the only argument."""


def _first_queries(model: ReferenceModel, tokens: Sequence[int], start: int) -> Tensor | None:
    """Return raw q [L, H, D] of layer 0 for ``tokens`` at ``start ..``, or None if the model has no such positions."""
    model_input = whole_sequences([tokens], model.token_embedding.device)
    model_input = model_input._replace(positions=model_input.positions + start)

    def stop(call: AttentionCall) -> None:
        raise _FirstCall(call.q)

    try:
        model(model_input, RecordingCache(stop).wrap(NoCache(model.config)))
    except _FirstCall as first:
        queries: Tensor = first.args[0]
        return queries
    except IndexError:  # beyond the end of a table of learned positions
        pass
    return None
