"""Compute a prefix once and keep it: its blocks on the tier's shelf, flushed, pinned under a name."""

from __future__ import annotations

from collections.abc import Sequence

from kvad.cache.pins import Pin, check_name, write_pin
from kvad.engine.engine import Engine
from kvad.engine.request import Sampling
from kvad.errors import RequestError, SaveError, UsageError, counted

__all__ = ["keep_prefix"]


def keep_prefix(engine: Engine, tokens: Sequence[int], name: str, text: str = "") -> Pin:
    """The whole blocks of ``tokens``, which later requests of the same beginning find without computing.

    UsageError: no tier, a name that is none; RequestError: less than a block, or what the engine refuses;  SaveError:
    the disk refused, and nothing is pinned.
    """
    check_name(name)
    size = engine.cache.block_size
    if engine.tiers is None or engine.cache.tier is None or not engine.tiers.on_disk:
        raise UsageError(f"{engine.cache.tier} is not to be had", "another process holds it, or the disk refuses it")
    if len(tokens) < size:
        raise RequestError(
            f"{counted(len(tokens), 'token')} {'does' if len(tokens) == 1 else 'do'} not fill a block of {size}",
            "give a longer prefix",
        )
    sampling = Sampling(max_tokens=1, temperature=0, ignore_eos=True)
    engine.submit(tokens, sampling)
    while not engine.idle:
        for piece in engine.step():
            if piece.error is not None:
                raise RequestError(f"the prefix cannot be computed: {piece.error}")
    engine.store()
    keys = engine.block_keys(tokens, sampling)
    try:
        stored = engine.tiers.keep(keys)
        pin = Pin(name, tuple(stored), len(keys) * size, text[:80], engine.identity("").parts)
        write_pin(engine.tiers.folder, pin)
    except OSError as error:
        raise SaveError(
            f"{engine.cache.tier}: the prefix is not kept: {error}", "make room, or name another folder"
        ) from error
    return pin
