"""A session: a row's state in one file that stands for itself, for an engine that may have other blocks or layout.

An entry (``entry.py``) of the kind "session", durable when written.  Sections: "tokens" (those of the state),
"history" (all of the session's, which may go on behind them), "source" where an encoder read one,
"N.layer.kind.number" for the arrays of group N (``state.py``), and "rotary.layer".  ``facts``: the groups' marks, and
under "said" what the caller has to say of it.

Reading is all or nothing: what it belongs to is compared first, then every section is read and its checksum compared,
and only then is there a state.  The pool is not touched: that happens when a request resumes from the state.
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
from kvad.cache.sessions.directory import CONTAINER_KIND
from kvad.cache.sessions.state import GroupState, SequenceState, fit_state, state_shapes
from kvad.errors import StorageError
from kvad.model_input import Rotary
from kvad.storage import REAL_FILE_SYSTEM, CacheFingerprint, ContainerFile, FileSystem, Section


@dataclass(frozen=True)
class LoadedSession:
    """A session as it was read.  ``history``: all of its tokens; ``said``: the writer's own facts."""

    state: SequenceState
    history: tuple[int, ...]
    metadata: Mapping[str, Any]
    nbytes: int


def save_session(
    path: Path,
    state: SequenceState,
    identity: CacheFingerprint,
    history: Sequence[int],
    said: Mapping[str, Any],
    disk: FileSystem = REAL_FILE_SYSTEM,
) -> int:
    """Write ``path``, whole and durable, or leave what was there; returns its bytes.  OSError as the disk says it."""
    sections = [_section("tokens", torch.tensor(state.tokens)), _section("history", torch.tensor(list(history)))]
    if state.encoder_tokens is not None:
        sections.append(_section("source", torch.tensor(state.encoder_tokens)))
    for number, part in enumerate(state.groups):
        sections += [_section(f"{number}.{name}", array) for name, array in part.arrays.items()]
    sections += [_section(f"rotary.{layer}", rotary.inv_freq) for layer, rotary in state.rotaries.items()]
    facts = {
        "length": state.length,
        "history": len(history),
        "regime": state.regime,
        "salt": state.salt,
        "groups": [
            {"about": dict(each.signature), "marks": list(each.held_range), "used": each.num_used_slots}
            for each in state.groups
        ],
        "rotaries": [[layer, each.interleaved, each.factor] for layer, each in state.rotaries.items()],
        "said": dict(said),
    }
    return storage.container.write_container(
        path, CONTAINER_KIND, identity.parts, facts, sections, durable=True, disk=disk
    )


def load_session(
    path: Path,
    identity: Callable[[str, str], CacheFingerprint],
    memory: KVCache,
    home: object,
    disk: FileSystem = REAL_FILE_SYSTEM,
) -> LoadedSession:
    """Read ``path``, all of it, for the engine ``home`` with this memory; ``identity``: its own, of (regime, salt).

    EntryError: it is missing, damaged, no session, or of another model, tokenizer, template, policy, ...: it says
    which.  OSError as the disk says it.
    """
    with storage.container.open_container(path, disk) as entry:
        header = entry.header
        if header.kind != CONTAINER_KIND:
            raise StorageError(f"{path}: it is a {header.kind}, no session", "it is left as it is", reason="alien")
        try:
            regime, salt = str(header.metadata["regime"]), str(header.metadata["salt"])
            different = list(identity(regime, salt).differences(header.fingerprint))
            if different:
                raise _other(path, "; ".join(different), header.metadata.get("said", {}).get("model"))
            return _read(entry, memory, regime, salt, home)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise StorageError(
                f"{path}: no session of this version ({error!r})", "it is left as it is", reason="alien"
            ) from None


def _read(entry: ContainerFile, memory: KVCache, regime: str, salt: str, home: object) -> LoadedSession:
    facts, sections = entry.header.metadata, entry.header.sections
    described, parts = facts["groups"], []
    for number, each in enumerate(described):
        names = [name for name in sections if name.startswith(f"{number}.")]
        marks, used = manager.portable_layout.HeldRange(*map(_count, each["marks"])), _count(each["used"])
        parts.append(
            GroupState(each["about"], marks, used, {name.partition(".")[2]: _shaped(entry, name) for name in names})
        )
    source = None if "source" not in sections else sections["source"].shape[0]
    _check(
        entry.path,
        SequenceState(
            (0,) * _count(facts["length"]), (0,) * source if source else None, regime, salt, tuple(parts), {}
        ),
        memory,
    )
    for number, part in enumerate(parts):
        for name, array in part.arrays.items():
            part.arrays[name] = _filled(entry, f"{number}.{name}", array)
    tokens, history = _integers(entry, "tokens"), _integers(entry, "history")
    if len(tokens) != facts["length"] or not tokens:
        raise ValueError("tokens")
    rotaries = {
        int(layer): Rotary(
            _filled(entry, f"rotary.{layer}", _shaped(entry, f"rotary.{layer}")), bool(crossed), float(by)
        )
        for layer, crossed, by in facts["rotaries"]
    }
    read = None if source is None else _integers(entry, "source")
    state = SequenceState(tokens, read, regime, salt, tuple(parts), rotaries, home)
    return LoadedSession(state, history, facts["said"], entry.header.nbytes)


def _check(path: Path, state: SequenceState, memory: KVCache) -> None:
    """Before a section is read: could this memory hold it?"""
    fitted = fit_state(state, memory.all_groups, state.length)
    if isinstance(fitted, str):
        raise _other(path, fitted)
    for number, part in enumerate(state.groups):
        expected = state_shapes(memory, state, number)
        found = {name: (tuple(array.shape), array.dtype) for name, array in part.arrays.items()}
        if found != expected:
            raise StorageError(f"{path}: the arrays of group {number} are not what its marks say", reason="alien")


def _other(path: Path, what: str, model: object = None) -> StorageError:
    """``model``: where it was loaded from, as its writer says."""
    with_what = f": the model was {model}" if model else ""
    return StorageError(
        f"{path}: it does not belong to this model and cache: {what}",
        f"open it with what it was made with{with_what}",
        reason="other",
    )


def _section(name: str, array: Tensor) -> Section:
    return device.tensor_bytes.tensor_to_section(name, array.detach().cpu().contiguous())


def _shaped(entry: ContainerFile, name: str) -> Tensor:
    """An array without contents, as the header describes it."""
    stored = entry.header.sections[name]
    return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")


def _filled(entry: ContainerFile, name: str, shaped: Tensor) -> Tensor:
    array = torch.empty(shaped.shape, dtype=shaped.dtype)
    entry.read(name, device.tensor_bytes.as_bytes(array))
    return array


def _integers(entry: ContainerFile, name: str) -> tuple[int, ...]:
    shaped = _shaped(entry, name)
    if shaped.dtype != torch.int64 or shaped.dim() != 1:
        raise ValueError(name)
    return tuple(_filled(entry, name, shaped).tolist())


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
