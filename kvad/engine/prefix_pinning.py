"""Compute a prefix once and keep it: its blocks on the tier's shelf, flushed, pinned under a name."""

from __future__ import annotations

from collections.abc import Sequence

from kvad.cache import offload
from kvad.cache.offload import PinnedPrefix
from kvad.engine.engine import Engine
from kvad.engine.scheduling import SamplingParams
from kvad.errors import RequestError, SaveError, UsageError, format_count


def pin_prefix(engine: Engine, tokens: Sequence[int], name: str, text: str = "") -> PinnedPrefix:
    """The whole blocks of ``tokens``, which later requests of the same beginning find without computing.

    UsageError: no tier, a name that is none; RequestError: less than a block, or what the engine refuses;  SaveError:
    the disk refused, and nothing is pinned.
    """
    offload.pinned.check_prefix_name(name)
    size = engine.cache.block_size
    if engine.block_store is None or engine.cache.prefix_cache_dir is None or not engine.block_store.on_disk:
        raise UsageError(
            f"{engine.cache.prefix_cache_dir} is not to be had", "another process holds it, or the disk refuses it"
        )
    if len(tokens) < size:
        raise RequestError(
            f"{format_count(len(tokens), 'token')} {'does' if len(tokens) == 1 else 'do'} not fill a block of {size}",
            "give a longer prefix",
        )
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    engine.add_request(tokens, sampling)
    while not engine.idle:
        for piece in engine.step():
            if piece.error is not None:
                raise RequestError(f"the prefix cannot be computed: {piece.error}")
    engine.flush_offload()
    keys = engine.block_keys(tokens, sampling)
    try:
        stored = engine.block_store.pin_blocks(keys)
        pin = PinnedPrefix(name, tuple(stored), len(keys) * size, text[:80], engine.cache_fingerprint("").parts)
        offload.pinned.write_pinned_prefix(engine.block_store.folder, pin)
    except OSError as error:
        raise SaveError(
            f"{engine.cache.prefix_cache_dir}: the prefix is not kept: {error}", "make room, or name another folder"
        ) from error
    return pin
