"""What a cache group keeps of a row, in words; the one place that says it.  Standard library only.

"everything"      "the first 4 and the last 1,020 tokens"      "256 tokens per head, cut every 64"
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvad.cache.formats import joined
from kvad.cache.sizing import Group
from kvad.config import MixerSpec
from kvad.errors import counted

__all__ = ["kept", "layer_names", "stored"]


def kept(group: Group, own: Sequence[MixerSpec] = ()) -> str:
    """``own``: the model's layers as they are without a policy, which tells its own windows from a policy's."""
    mixer, level = group.mixer, group.level
    if mixer.cross:
        return "cross-attention, the source whole"
    if level is not None:
        return _level(group)
    if group.levels is not None:
        first = f"the first {group.levels.sinks:,} and " if group.levels.sinks else ""
        return f"{first}the latest {counted(group.levels.recent, 'token')} as they are"
    if group.scored is not None:
        policy = group.scored
        return f"{counted(policy.budget, 'token')} per head by {policy.name}, cut every {policy.every:,}"
    if group.chooses is not None:
        return f"everything, of which a query reads {counted(group.chooses.budget, 'token')}"
    if mixer.window is None:
        return "everything"
    models = bool(own) and own[group.layers[0]].window == mixer.window
    said = f"the last {counted(mixer.window, 'token')}" + (" (the model's window)" if models else "")
    if mixer.grain > 1:
        said = f"the last {max(1, mixer.window - mixer.grain + 1):,} to {counted(mixer.window, 'token')}"
        said += f", {mixer.grain:,} leaving at once"
    first = f"the first {mixer.sinks:,} and " if mixer.sinks else ""
    return first + said


def _level(group: Group) -> str:
    level, size = group.level, group.block_size
    assert level is not None
    if level.spilled:
        return f"up to {counted(level.most * size, 'older token')}, spilled"
    if level.ratio > 1:
        return f"{level.most * size:,} summaries of {counted(level.ratio, 'older token')} each at most"
    return f"up to {counted(level.most * size, 'older token')}, packed"


def stored(group: Group) -> str:
    """The format of its keys and values: "float32", or "int8/int4"."""
    return joined(group.keys, group.values)


def layer_names(layers: Sequence[int]) -> str:
    """``layer 3``, ``layers 0-3``, ``layers 0, 2, ..., 24``; what is no such row is spelled out.

    >>> layer_names([0, 1, 2, 5, 7])
    'layers 0-2, 5, 7'
    """
    if len(layers) == 1:
        return f"layer {layers[0]}"
    steps = {b - a for a, b in itertools.pairwise(layers)}
    if len(steps) == 1 and steps != {1} and len(layers) > 3:
        return f"layers {layers[0]}, {layers[1]}, ..., {layers[-1]}"
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return "layers " + ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
