"""A sequence's cache on the host and in a file: keys and values in token order, in their stored formats.

``capture`` copies it out of a KVCache; ``PendingRestore`` writes it into another one of the same model and
policy, with other blocks, another layout or on another device. Nothing is decoded, so nothing is rounded: a restored
state is equal bit for bit. Arrays of groups that take tokens, and of encoder inputs, are by slot ([m, K, width];
positions [m]). Arrays of lower levels are whole blocks, because blocks were quantized and merged whole, so they require
the same block size, like states that are stored once per full block. Block bounds (``quest.py``) are recomputed.

``fit_state`` returns why a state cannot be used, or how much of it can.

A session file is a durable container (``container.py``) of kind "session". Sections: "tokens" (of the state), "history"
(all tokens of the session; it may be longer), "source" (encoder input, if any), "N.layer.kind.number" for the arrays of
group N, and "rotary.layer". The metadata has the held ranges of the groups and, under "writer", the metadata of the
caller. Reading is all or nothing: the fingerprint is compared first, then every section is read and verified, and only
then a state is returned. The pool is not changed until a request resumes from the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvad import storage
from kvad.cache import device, manager
from kvad.cache.device import KVCache
from kvad.cache.groups import CacheGroup
from kvad.cache.sessions.directory import CONTAINER_KIND, not_a_session
from kvad.errors import StorageError
from kvad.model_input import Rotary
from kvad.storage import REAL_FILE_SYSTEM, CacheFingerprint, ContainerFile, FileSystem, Section

portable_layout = manager.portable_layout


class GroupState(NamedTuple):
    """State of one cache group."""

    signature: Mapping[str, Any]  # identifies the group (``group_signature``)
    held_range: portable_layout.HeldRange  # cached positions, if the group takes tokens
    num_used_slots: int  # filled slots of a lower level's blocks
    arrays: dict[str, Tensor]  # by "layer.kind.number" and "positions"


@dataclass(frozen=True, eq=False)
class SequenceState:
    """Cached keys and values of a sequence, independent of blocks and layout."""

    tokens: tuple[int, ...]  # tokens whose keys and values are included
    encoder_tokens: tuple[int, ...] | None
    regime: str  # rotary regime (``fingerprint.py``)
    salt: str
    groups: tuple[GroupState, ...]
    rotaries: Mapping[int, Rotary]  # by layer: rotation of the keys of layers with summaries
    engine_id: object = None  # engine that made the state, or was compared with it
    adapter: str = ""  # name of the engine's adapter that computed it; "": the base

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for group in self.groups for array in group.arrays.values())


class FittedState(NamedTuple):
    """The layout of the first ``length`` tokens of a state in other cache groups."""

    length: int
    layouts: tuple[portable_layout.GroupLayout, ...]  # per group that takes tokens
    lower_levels: tuple[tuple[int, int], ...]  # per level: blocks, filled slots


def group_signature(groups: Sequence[CacheGroup], group_index: int) -> dict[str, Any]:
    """Return the properties that must be equal for a group to use another's state.

    They are its layers, its attention pattern and its cache configuration. ``blocks`` is the block size if it decides
    what is cached or read, else 0.
    """
    group = groups[group_index]
    spec, level = group.spec, group.lower_level
    owner = group if level is None else groups[level.token_group]
    policy = owner.eviction_policy or owner.demotion_policy or group.sparse_read_policy
    depends_on_blocks = owner.demotion_policy is not None or group.sparse_read_policy is not None
    depends_on_blocks |= spec.snapshot_size > 0
    role = "source" if spec.is_cross_attention else "tokens" if level is None else f"level {level.ratio}"
    return {
        "role": role,
        "layers": list(group.layers),
        "heads": [spec.num_kv_heads, spec.head_dim, spec.value_dim],
        "blocks": group.block_size if depends_on_blocks else 0,
        "sees": str(spec.pattern),
        "policy": "" if policy is None else str(policy),
        "formats": [group.key_format, group.value_format],
    }


@torch.inference_mode()
def capture(
    kv_cache: KVCache,
    layout: portable_layout.SequenceLayout,
    tokens: Sequence[int],
    *,
    regime: str,
    salt: str,
    engine_id: object,
) -> SequenceState:
    """Copy a sequence's cache to the host. Its blocks may be freed afterwards."""
    groups, nothing = kv_cache.all_groups, portable_layout.HeldRange()
    num_source_tokens = len(layout.encoder_tokens or ())
    parts = [  # held range, skipped blocks, blocks, filled slots of a lower level, length
        *((*group_layout, 0, layout.length) for group_layout in layout.groups),
        *((nothing, 0, block_ids, num_used_slots, 0) for num_used_slots, block_ids in layout.lower_levels),
        *((nothing, 0, block_ids, 0, num_source_tokens) for block_ids in layout.encoder_blocks),
    ]
    group_states = tuple(
        GroupState(group_signature(groups, index), held, num_used_slots, {})
        for index, (held, _, _, num_used_slots, _) in enumerate(parts)
    )
    slots = [
        _group_slots(group, block_ids, num_skipped, held, length)
        for group, (held, num_skipped, block_ids, _, length) in zip(groups, parts, strict=False)
    ]
    for name, array in kv_cache.copy_out([block_ids for _, _, block_ids, *_ in parts], slots).items():
        group_index, _, kind = name.partition(".")
        group_states[int(group_index)].arrays[kind] = array
    rotaries = kv_cache.summary_rotaries()
    return SequenceState(tuple(tokens), layout.encoder_tokens, regime, salt, group_states, rotaries, engine_id)


def _group_slots(
    group: CacheGroup, blocks: Sequence[int], num_skipped: int, held: portable_layout.HeldRange, length: int
) -> Tensor | None:
    """Return the slots of a group in the order of the state; None for whole blocks."""
    if group.lower_level is not None:
        return None
    return torch.tensor(portable_layout.held_slots(group, blocks, num_skipped, held, length), dtype=torch.int64)


def common_prefix_length(state: SequenceState, tokens: Sequence[int]) -> int:
    """Return the number of equal first tokens."""
    max_length = min(state.length, len(tokens))
    if state.tokens[:max_length] == tuple(tokens[:max_length]):
        return max_length
    return next(index for index in range(max_length) if state.tokens[index] != tokens[index])


def fit_state(state: SequenceState, groups: Sequence[CacheGroup], length: int) -> FittedState | str:
    """Return how these groups would store ``length`` tokens of a state, or why they cannot."""
    if len(groups) != len(state.groups):
        return f"policy: {len(groups)} cache groups here, {len(state.groups)} there"
    layouts, lower_levels = [], []
    for group_index, (group, group_state) in enumerate(zip(groups, state.groups, strict=True)):
        for name, here in group_signature(groups, group_index).items():
            if here != (there := group_state.signature.get(name)):
                name = {"sees": "policy", "blocks": "block size", "role": "policy"}.get(name, name)
                return f"{name}: {here} here, {there} there"
        if group.lower_level is not None:
            count = len(group_state.arrays["positions"])
            if count > min(group.num_usable_blocks, group.max_blocks_per_seq):
                return f"max_seq_len: {count} blocks of a level there, room for {group.max_blocks_per_seq} here"
            lower_levels.append((count, group_state.num_used_slots))
        elif not group.spec.is_cross_attention:
            if not portable_layout.is_reusable(group, group_state.held_range, state.length, length):
                policy = group.eviction_policy or group.demotion_policy
                reason = f"{policy} depends on all tokens" if policy else "the window before them is no longer cached"
                return f"tokens: equal for {length} of {state.length}, and {reason}"
            layout = portable_layout.fit_layout(group, group_state.held_range, length)
            if layout is None:
                return f"max_seq_len: {length} tokens there, no room for them here"
            layouts.append(layout)
    return FittedState(length, tuple(layouts), tuple(lower_levels))


@dataclass(frozen=True, eq=False)
class PendingRestore:
    """A state that is written into a KVCache by the next BlockOps (a ``RestorableState``)."""

    state: SequenceState
    fitted: FittedState

    @torch.inference_mode()
    def restore(self, kv_cache: KVCache, blocks: Sequence[Sequence[int]]) -> None:
        """Write the state into ``blocks`` per group; shared encoder blocks are left out."""
        kv_cache.set_summary_rotaries(self.state.rotaries)
        num_source_tokens, slots, arrays = len(self.state.encoder_tokens or ()), [], {}
        for group_index, block_ids in enumerate(blocks):
            num_skipped, held, length, picks = 0, portable_layout.HeldRange(), num_source_tokens, [slice(None)]
            group, ended = kv_cache.all_groups[group_index], slice(None)
            if group_index < len(self.fitted.layouts):
                _, num_skipped, held, _ = self.fitted.layouts[group_index]
                length = self.fitted.length
                stored = self.state.groups[group_index].held_range
                picks = _select_slots(stored, held, length)
                first, before = (each.first_position // group.block_size for each in (held, stored))
                ended = slice(first - before, length // group.block_size - before)
            group_slots = _group_slots(group, block_ids, num_skipped, held, length)
            slots.append(group_slots)
            for kind, array in self.state.groups[group_index].arrays.items():
                selected = [ended] if ".states." in kind else picks
                arrays[f"{group_index}.{kind}"] = array if group_slots is None else _selected(array, selected)
        kv_cache.copy_in(blocks, slots, arrays)


def _select_slots(state: portable_layout.HeldRange, held_range: portable_layout.HeldRange, length: int) -> list[slice]:
    """Return where the positions of ``held_range`` are among those of a state."""
    picks = []
    for span in filter(None, portable_layout.held_positions(held_range, length)):
        is_in_front = state.num_evicted or span.start < state.num_sink_tokens
        offset = 0 if is_in_front else state.first_position - state.num_sink_tokens
        picks.append(slice(span.start - offset, span.stop - offset))
    return picks


def _selected(array: Tensor, picks: Sequence[slice]) -> Tensor:
    return array[picks[0]] if len(picks) == 1 else torch.cat([array[pick] for pick in picks]) if picks else array[:0]


def state_shapes(
    kv_cache: KVCache, state: SequenceState, group_index: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of every array of a state's group."""
    group, group_state = kv_cache.all_groups[group_index], state.groups[group_index]
    is_source = group.spec.is_cross_attention
    num_slots = len(state.encoder_tokens or ()) if is_source else group_state.held_range.slots(state.length)
    num_blocks = len(group_state.arrays["positions"])
    shapes = {}
    for name, array in kv_cache.array_specs().items():
        index, _, kind = name.partition(".")
        if int(index) != group_index or kind.split(".")[1:2] == ["block_bounds"]:
            continue
        shape = array.shape
        if group.lower_level is not None:
            shapes[kind] = (num_blocks, *shape[1:]), array.dtype
        elif ".states." in kind:
            first = group_state.held_range.first_position // group.block_size
            shapes[kind] = (state.length // group.block_size - first, *shape[1:]), array.dtype
        else:
            shapes[kind] = (num_slots, *shape[1:2], *shape[3:]) if len(shape) > 2 else (num_slots,), array.dtype
    return shapes


@dataclass(frozen=True)
class LoadedSession:
    """A session read from a file."""

    state: SequenceState
    history: tuple[int, ...]  # all tokens of the session
    metadata: Mapping[str, Any]  # of the writer
    nbytes: int  # size of the file


def save_session(
    path: Path,
    state: SequenceState,
    fingerprint: CacheFingerprint,
    history: Sequence[int],
    writer: Mapping[str, Any],
    fs: FileSystem = REAL_FILE_SYSTEM,
    check_replace: Callable[[], None] | None = None,
) -> int:
    """Write a session atomically and durably, and return its size in bytes; on failure the previous file stays.

    Args:
        path: File to write.
        state: State of the sequence.
        fingerprint: Model and cache of the state.
        history: All tokens of the session.
        writer: Metadata of the caller, plain JSON.
        fs: File system.
        check_replace: Raises if an existing file must not be replaced.
    """
    sections = [_section("tokens", torch.tensor(state.tokens)), _section("history", torch.tensor(list(history)))]
    if state.encoder_tokens is not None:
        sections.append(_section("source", torch.tensor(state.encoder_tokens)))
    for group_index, group in enumerate(state.groups):
        sections += [_section(f"{group_index}.{name}", array) for name, array in group.arrays.items()]
    sections += [_section(f"rotary.{layer}", rotary.inv_freq) for layer, rotary in state.rotaries.items()]
    metadata = {
        "length": state.length,
        "history": len(history),
        "rope_regime": state.regime,
        "cache_salt": state.salt,
        "groups": [
            {"signature": dict(signature), "held_range": list(held_range), "num_used_slots": num_used_slots}
            for signature, held_range, num_used_slots, _ in state.groups
        ],
        "rotaries": [[layer, rotary.interleaved, rotary.factor] for layer, rotary in state.rotaries.items()],
        "writer": dict(writer),
    }
    return storage.container.write_container(
        path, CONTAINER_KIND, fingerprint.parts, metadata, sections, durable=True, check_replace=check_replace, fs=fs
    )


def load_session(
    path: Path,
    fingerprint_for: Callable[[str, str], CacheFingerprint],
    kv_cache: KVCache,
    engine_id: object,
    fs: FileSystem = REAL_FILE_SYSTEM,
) -> LoadedSession:
    """Read and verify a session.

    Args:
        path: File to read.
        fingerprint_for: Returns the engine's fingerprint for (rotary regime, salt).
        kv_cache: Cache that must be able to hold the state.
        engine_id: Engine that the state is compared with.
        fs: File system.

    Raises:
        StorageError: If the file is missing, damaged, not a session, or of another model, tokenizer, policy, ...
        OSError: If the disk fails.
    """
    with storage.container.open_container(path, fs) as container:
        header = container.header
        if header.kind != CONTAINER_KIND:
            raise not_a_session(path, header.kind)
        try:
            regime, salt = str(header.metadata["rope_regime"]), str(header.metadata["cache_salt"])
            differences = list(fingerprint_for(regime, salt).differences(header.fingerprint))
            if differences:
                raise _mismatch_error(path, "; ".join(differences), header.metadata.get("writer", {}).get("model"))
            return _read(container, kv_cache, regime, salt, engine_id)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            hint = storage.container.rewrite_hint(path)
            raise StorageError(f"{path}: not a session of this version ({error!r})", hint, reason="foreign") from None


def _read(container: ContainerFile, kv_cache: KVCache, regime: str, salt: str, engine_id: object) -> LoadedSession:
    metadata, sections = container.header.metadata, container.header.sections
    descriptions, groups = metadata["groups"], []
    for group_index, group in enumerate(descriptions):
        names = [name for name in sections if name.startswith(f"{group_index}.")]
        held_range = portable_layout.HeldRange(*map(_count, group["held_range"]))
        arrays = {name.partition(".")[2]: _shaped(container, name) for name in names}
        groups.append(GroupState(group["signature"], held_range, _count(group["num_used_slots"]), arrays))
    num_encoder_tokens = None if "source" not in sections else sections["source"].shape[0]
    source = (0,) * num_encoder_tokens if num_encoder_tokens else None
    shapes = SequenceState((0,) * _count(metadata["length"]), source, regime, salt, tuple(groups), {})
    _check(container.path, shapes, kv_cache)
    for group_index, group_state in enumerate(groups):
        for name, array in group_state.arrays.items():
            group_state.arrays[name] = _filled(container, f"{group_index}.{name}", array)
    tokens, history = _integers(container, "tokens"), _integers(container, "history")
    if len(tokens) != metadata["length"] or not tokens:
        raise ValueError("tokens")
    rotaries = {}
    for layer, interleaved, factor in metadata["rotaries"]:
        inv_freq = _filled(container, f"rotary.{layer}", _shaped(container, f"rotary.{layer}"))
        rotaries[int(layer)] = Rotary(inv_freq, bool(interleaved), float(factor))
    encoder_tokens = None if num_encoder_tokens is None else _integers(container, "source")
    state = SequenceState(tokens, encoder_tokens, regime, salt, tuple(groups), rotaries, engine_id)
    return LoadedSession(state, history, metadata["writer"], container.header.nbytes)


def _check(path: Path, state: SequenceState, kv_cache: KVCache) -> None:
    """Check that the cache could hold the state, before sections are read."""
    fit = fit_state(state, kv_cache.all_groups, state.length)
    if isinstance(fit, str):
        raise _mismatch_error(path, fit)
    for group_index, group_state in enumerate(state.groups):
        stored_shapes = {name: (tuple(array.shape), array.dtype) for name, array in group_state.arrays.items()}
        if stored_shapes != state_shapes(kv_cache, state, group_index):
            problem = f"{path}: the arrays of group {group_index} do not match its held range"
            raise StorageError(problem, reason="foreign")


def _mismatch_error(path: Path, difference: str, model: object = None) -> StorageError:
    origin = f": the model was {model}" if model else ""
    return StorageError(
        f"{path}: does not belong to this model and cache: {difference}",
        f"Open it with the model and the cache that wrote it{origin}.",
        reason="mismatch",
    )


def _section(name: str, array: Tensor) -> Section:
    return device.host_copy.tensor_to_section(name, array.detach().cpu().contiguous())


def _shaped(container: ContainerFile, name: str) -> Tensor:
    stored = container.header.sections[name]
    return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")


def _filled(container: ContainerFile, name: str, meta: Tensor) -> Tensor:
    array = torch.empty(meta.shape, dtype=meta.dtype)
    container.read(name, device.host_copy.as_bytes(array))
    return array


def _integers(container: ContainerFile, name: str) -> tuple[int, ...]:
    meta = _shaped(container, name)
    if meta.dtype != torch.int64 or meta.dim() != 1:
        raise ValueError(name)
    return tuple(_filled(container, name, meta).tolist())


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
