"""Text descriptions of what a cache group retains. Standard library only.

"everything"      "the first 4 and the last 1,020 tokens"      "256 tokens per head, evicted every 64"
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvad import cache
from kvad.cache import CacheGroup
from kvad.config import AttentionSpec
from kvad.errors import format_count


def describe_retention(group: CacheGroup, own: Sequence[AttentionSpec] = ()) -> str:
    """Describe what a group retains.

    ``own``: the model's layers without a policy, to name the model's own window.
    """
    spec, level = group.spec, group.lower_level
    if spec.is_cross_attention:
        return "cross-attention, the source whole"
    if level is not None:
        return _level(group)
    if group.demotion_policy is not None:
        first = f"the first {group.demotion_policy.num_sinks:,} and " if group.demotion_policy.num_sinks else ""
        return f"{first}the latest {format_count(group.demotion_policy.recent, 'token')} as they are"
    if group.eviction_policy is not None:
        policy = group.eviction_policy
        return f"{format_count(policy.budget, 'token')} per head by {policy.name}, cut every {policy.interval:,}"
    if group.sparse_read_policy is not None:
        return f"everything, of which a query reads {format_count(group.sparse_read_policy.budget, 'token')}"
    if spec.window is None:
        return "everything"
    models = bool(own) and own[group.layers[0]].window == spec.window
    text = f"the last {format_count(spec.window, 'token')}" + (" (the model's window)" if models else "")
    if spec.window_step > 1:
        text = f"the last {max(1, spec.window - spec.window_step + 1):,} to {format_count(spec.window, 'token')}"
        text += f", {spec.window_step:,} leaving at once"
    first = f"the first {spec.num_sinks:,} and " if spec.num_sinks else ""
    return first + text


def _level(group: CacheGroup) -> str:
    level, size = group.lower_level, group.block_size
    assert level is not None
    if level.is_offloaded:
        return f"up to {format_count(level.max_blocks * size, 'older token')}, spilled"
    if level.ratio > 1:
        return f"{level.max_blocks * size:,} summaries of {format_count(level.ratio, 'older token')} each at most"
    return f"up to {format_count(level.max_blocks * size, 'older token')}, packed"


def describe_format(group: CacheGroup) -> str:
    """Return the format of its keys and values: "float32" or "int8/int4"."""
    return cache.quantization.join_format_names(group.key_format, group.value_format)


def layer_names(layers: Sequence[int]) -> str:
    """Format ``layer 3``, ``layers 0-3``, ``layers 0, 2, ..., 24``; other lists are written out.

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
