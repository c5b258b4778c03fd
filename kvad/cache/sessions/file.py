"""Session files: a sequence's state in one file, independent of block size and layout.

A durable container (``container.py``) of kind "session". Sections: "tokens" (of the state), "history" (all tokens of
the session; it may be longer), "source" (encoder input, if any), "N.layer.kind.number" for the arrays of group N
(``state.py``), and "rotary.layer". The metadata has the held ranges of the groups and, under "writer", the metadata of
the caller.

Reading is all or nothing: the fingerprint is compared first, then every section is read and verified, and only then a
state is returned. The pool is not changed until a request resumes from the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvad import storage
from kvad.cache import device, manager
from kvad.cache.device import KVCache
from kvad.cache.sessions.directory import CONTAINER_KIND, not_a_session
from kvad.cache.sessions.state import GroupState, SequenceState, fit_state, state_shapes
from kvad.errors import StorageError
from kvad.model_input import Rotary
from kvad.storage import REAL_FILE_SYSTEM, CacheFingerprint, ContainerFile, FileSystem, Section


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
) -> int:
    """Write a session atomically and durably, and return its size in bytes; on failure the previous file stays.

    Args:
        path: File to write.
        state: State of the sequence.
        fingerprint: Model and cache of the state.
        history: All tokens of the session.
        writer: Metadata of the caller, plain JSON.
        fs: File system.
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
        path, CONTAINER_KIND, fingerprint.parts, metadata, sections, durable=True, fs=fs
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
        held_range = manager.portable_layout.HeldRange(*map(_count, group["held_range"]))
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
        expected = state_shapes(kv_cache, state, group_index)
        stored_shapes = {name: (tuple(array.shape), array.dtype) for name, array in group_state.arrays.items()}
        if stored_shapes != expected:
            problem = f"{path}: the arrays of group {group_index} do not match its held range"
            raise StorageError(problem, reason="foreign")


def _mismatch_error(path: Path, difference: str, model: object = None) -> StorageError:
    """Build the error for a session of another model or cache; ``model`` is its origin."""
    origin = f": the model was {model}" if model else ""
    return StorageError(
        f"{path}: does not belong to this model and cache: {difference}",
        f"Open it with the model and the cache that wrote it{origin}.",
        reason="mismatch",
    )


def _section(name: str, array: Tensor) -> Section:
    return device.tensor_bytes.tensor_to_section(name, array.detach().cpu().contiguous())


def _shaped(container: ContainerFile, name: str) -> Tensor:
    """Return a meta tensor of a section's shape and dtype."""
    stored = container.header.sections[name]
    return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")


def _filled(container: ContainerFile, name: str, meta: Tensor) -> Tensor:
    array = torch.empty(meta.shape, dtype=meta.dtype)
    container.read(name, device.tensor_bytes.as_bytes(array))
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
