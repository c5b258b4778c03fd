"""Compute a prefix once and pin its blocks in the disk store under a name."""

from __future__ import annotations

from collections.abc import Sequence

from kvad.cache import offload
from kvad.cache.offload import PinnedPrefix
from kvad.engine.engine import Engine
from kvad.engine.scheduling import SamplingParams
from kvad.errors import RequestError, SaveError, UsageError


def pin_prefix(engine: Engine, tokens: Sequence[int], name: str, text: str = "") -> PinnedPrefix:
    """Store and pin the full blocks of ``tokens``; later requests with this prefix reuse them.

    Raises:
        UsageError: If there is no disk store, or the name is invalid.
        RequestError: If the prefix is shorter than a block, or the engine rejects it.
        SaveError: If the disk cannot be written; nothing is pinned.
    """
    offload.pinned.check_prefix_name(name)
    block_size = engine.cache.block_size
    if engine.block_store is None or engine.cache.prefix_cache_dir is None or not engine.block_store.on_disk:
        raise UsageError(
            f"{engine.cache.prefix_cache_dir} cannot be used", "Another process uses it, or it cannot be written."
        )
    if len(tokens) < block_size:
        raise RequestError(
            f"prefix: must have at least {block_size} tokens (one block), got {len(tokens)}", "Give a longer prefix."
        )
    sampling_params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    engine.add_request(tokens, sampling_params)
    while not engine.idle:
        for chunk in engine.step():
            if chunk.error is not None:
                raise RequestError(f"the prefix cannot be computed: {chunk.error}")
    engine.flush_offload()
    keys = engine.block_keys(tokens, sampling_params)
    try:
        stored = engine.block_store.pin_blocks(keys)
        pinned_prefix = PinnedPrefix(
            name, tuple(stored), len(keys) * block_size, text[:80], engine.cache_fingerprint("").parts
        )
        offload.pinned.write_pinned_prefix(engine.block_store.folder, pinned_prefix)
    except OSError as error:
        raise SaveError(
            f"{engine.cache.prefix_cache_dir}: the prefix is not pinned: {error}",
            "Free disk space, or use another folder.",
        ) from error
    return pinned_prefix
